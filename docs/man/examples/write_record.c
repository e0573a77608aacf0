/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A queue pair writes to the memory of another one, which polls for the record and prints how many bytes have arrived. */
#include <infiniband/anywarpdv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define QKEY 0x11111111
#define LENGTH 20000

static void check(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

/* Creates a datagram queue pair and moves it to RTS, which needs no peer. */
static struct ibv_qp *open_qp(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_UD, .pd = pd, .send_cq = cq, .recv_cq = cq,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE,
		.cap = { .max_send_wr = 16, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	/* Members that are 0 have their defaults. With datagrams of 1,000 bytes the message below needs several. */
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_UD, .segment_size = 1000 };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	struct ibv_qp *qp = anywarpdv_create_qp_ex(pd->context, &init, &dv, sizeof dv);

	check(qp != NULL, "anywarpdv_create_qp_ex");
	check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "INIT");
	attr.qp_state = IBV_QPS_RTR;
	check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE), "RTR");
	attr.qp_state = IBV_QPS_RTS;
	check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "RTS");
	return qp;
}

int main(void)
{
	static char from[LENGTH], to[LENGTH];
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context = devices && devices[0] ? ibv_open_device(devices[0]) : NULL;
	struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
	struct ibv_cq *cq = context ? ibv_create_cq(context, 16, NULL, NULL, 0) : NULL;
	struct ibv_ah_attr address = { .is_global = 1, .port_num = 1 };
	struct anywarpdv_record record;
	struct anywarpdv_range ranges[64];
	struct ibv_mr *source, *target;
	struct ibv_qp *writer, *owner;
	struct ibv_qp_ex *ex;
	struct ibv_ah *ah;
	struct ibv_wc wc;
	int n;

	check(pd && cq, "device");
	writer = open_qp(pd, cq);
	owner = open_qp(pd, cq);
	source = ibv_reg_mr(pd, from, LENGTH, 0);
	target = ibv_reg_mr(pd, to, LENGTH, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	check(source && target, "ibv_reg_mr");
	/* Both queue pairs are on this host and have its address. */
	check(!ibv_query_gid(context, 1, 0, &address.grh.dgid), "ibv_query_gid");
	ah = ibv_create_ah(pd, &address);
	check(ah != NULL, "ibv_create_ah");

	memset(from, 'x', LENGTH);
	ex = ibv_qp_to_qp_ex(writer);
	ibv_wr_start(ex);
	ex->wr_id = 1;
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(ex, target->rkey, (uintptr_t)to);
	ibv_wr_set_ud_addr(ex, ah, owner->qp_num, QKEY);
	ibv_wr_set_sge(ex, source->lkey, (uintptr_t)from, LENGTH);
	check(!ibv_wr_complete(ex), "ibv_wr_complete");

	/* No receive is posted: the record reports the message. */
	check(anywarpdv_poll_records(owner, 1, &record, sizeof record, 2000) == 1, "anywarpdv_poll_records");
	n = anywarpdv_read_map(owner, &record, sizeof record, 64, ranges, sizeof *ranges);
	printf("%u of %u bytes from queue pair 0x%x\n", record.valid, record.length, record.src_qp);
	for (int i = 0; i < n && i < 64; i++)
		printf("[%u, %u)\n", ranges[i].from, ranges[i].to);
	anywarpdv_release_map(owner, record.map);

	check(anywarpdv_poll_cq(cq, 1, &wc, 2000) == 1 && wc.status == IBV_WC_SUCCESS, "completion of the Write");
	ibv_destroy_ah(ah);
	ibv_dereg_mr(target);
	ibv_dereg_mr(source);
	ibv_destroy_qp(owner);
	ibv_destroy_qp(writer);
	ibv_destroy_cq(cq);
	ibv_dealloc_pd(pd);
	ibv_close_device(context);
	ibv_free_device_list(devices);
	return record.valid == LENGTH && memcmp(from, to, LENGTH) == 0 ? 0 : 1;
}
