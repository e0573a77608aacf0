/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Reliable datagrams with completions of records: a peer writes to memory of this queue pair. The program sends an answer to the
 * address of the writer, which the record contains. It needs no connection, and creates the address handle from the record. */
#include <infiniband/anywarpdv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define QKEY 0x11111111
/* As on UD, these bytes precede the data in the buffer of a receive. */
#define GRH 40

static void check(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static struct ibv_qp *open_qp(struct ibv_pd *pd, struct ibv_cq_ex *cq)
{
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_DRIVER, .pd = pd,
		.send_cq = ibv_cq_ex_to_cq(cq), .recv_cq = ibv_cq_ex_to_cq(cq),
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct anywarpdv_qp_init_attr dv = {
		.driver_qp_type = ANYWARPDV_QPT_RD, .flags = ANYWARPDV_QP_RECORD_COMPLETIONS,
	};
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
	static char from[64] = "written", to[64], answer[GRH + 64];
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context = devices && devices[0] ? ibv_open_device(devices[0]) : NULL;
	struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 16, .wc_flags = IBV_WC_EX_WITH_SRC_QP | IBV_WC_EX_WITH_BYTE_LEN };
	struct ibv_cq_ex *cq = context ? ibv_create_cq_ex(context, &cq_attr) : NULL;
	struct ibv_ah_attr address = { .is_global = 1, .port_num = 1 };
	struct ibv_poll_cq_attr all = { 0 };
	struct anywarpdv_record record = { 0 };
	struct ibv_mr *source, *target, *room;
	struct ibv_recv_wr receive = { .wr_id = 3, .num_sge = 1 }, *bad;
	struct ibv_sge sge = { .length = sizeof answer };
	struct ibv_qp *writer, *owner;
	struct ibv_qp_ex *ex;
	struct ibv_ah *ah, *back = NULL;
	int answered = 0;

	check(pd && cq, "device");
	writer = open_qp(pd, cq);
	owner = open_qp(pd, cq);
	source = ibv_reg_mr(pd, from, sizeof from, 0);
	target = ibv_reg_mr(pd, to, sizeof to, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	room = ibv_reg_mr(pd, answer, sizeof answer, IBV_ACCESS_LOCAL_WRITE);
	check(source && target && room, "ibv_reg_mr");
	sge.addr = (uintptr_t)answer;
	sge.lkey = room->lkey;
	receive.sg_list = &sge;
	check(!ibv_post_recv(writer, &receive, &bad), "ibv_post_recv");
	check(!ibv_query_gid(context, 1, 0, &address.grh.dgid), "ibv_query_gid");
	ah = ibv_create_ah(pd, &address);
	check(ah != NULL, "ibv_create_ah");

	ex = ibv_qp_to_qp_ex(writer);
	ibv_wr_start(ex);
	ex->wr_id = 1;
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(ex, target->rkey, (uintptr_t)to);
	ibv_wr_set_ud_addr(ex, ah, owner->qp_num, QKEY);
	ibv_wr_set_sge(ex, source->lkey, (uintptr_t)from, sizeof from);
	check(!ibv_wr_complete(ex), "ibv_wr_complete");

	for (long tries = 0; !answered && tries < 200000000; tries++) {
		if (ibv_start_poll(cq, &all))
			continue;
		check(cq->status == IBV_WC_SUCCESS, ibv_wc_status_str(cq->status));
		if (ibv_wc_read_opcode(cq) == ANYWARPDV_WC_RECORD) {
			check(!anywarpdv_wc_read_record(cq, owner, &record, sizeof record), "anywarpdv_wc_read_record");
			printf("%u bytes of message %u: %s\n", record.valid, record.message_id, to);
		} else if (cq->wr_id == 1) {
			printf("the Write was message %u\n", anywarpdv_wc_read_message_id(cq));
		} else if (cq->wr_id == 3) {
			answered = 1;
		}
		ibv_end_poll(cq);
		if (record.src_qp && !back) {
			back = anywarpdv_create_ah_from_record(pd, &record, sizeof record);
			check(back != NULL, "anywarpdv_create_ah_from_record");
			ex = ibv_qp_to_qp_ex(owner);
			ibv_wr_start(ex);
			ex->wr_id = 2;
			ex->wr_flags = 0;
			ibv_wr_send(ex);
			ibv_wr_set_ud_addr(ex, back, record.src_qp, QKEY);
			ibv_wr_set_sge(ex, target->lkey, (uintptr_t)to, sizeof to);
			check(!ibv_wr_complete(ex), "ibv_wr_complete");
		}
	}
	ibv_destroy_ah(ah);
	if (back)
		ibv_destroy_ah(back);
	ibv_destroy_qp(owner);
	ibv_destroy_qp(writer);
	ibv_dereg_mr(room);
	ibv_dereg_mr(target);
	ibv_dereg_mr(source);
	ibv_destroy_cq(ibv_cq_ex_to_cq(cq));
	ibv_dealloc_pd(pd);
	ibv_close_device(context);
	ibv_free_device_list(devices);
	return answered ? memcmp(from, answer + GRH, sizeof from) != 0 : 1;
}
