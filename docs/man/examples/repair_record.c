/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A queue pair writes a message to the memory of another one by unreliable datagrams. The owner of the memory finds in the validity
 * map which blocks have not arrived, and these are written again until all have. */
#include <infiniband/anywarpdv.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define QKEY 0x11111111
#define BLOCK 1000
#define BLOCKS 200
#define LENGTH (BLOCK * BLOCKS)

static char from[LENGTH], to[LENGTH];

static void check(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static struct ibv_qp *open_qp(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_UD, .pd = pd, .send_cq = cq, .recv_cq = cq,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE,
		.cap = { .max_send_wr = 16, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	/* The last datagram of a message is sent three times in all, so that a message seldom ends by its deadline. */
	struct anywarpdv_qp_init_attr dv = {
		.driver_qp_type = ANYWARPDV_QPT_UD, .flags = ANYWARPDV_QP_REPORT_ERRORS, .segment_size = BLOCK, .repeats = 2,
	};
	struct anywarpdv_device_attr device;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	struct ibv_qp *qp;

	check(!anywarpdv_query_device(pd->context, &device, sizeof device), "anywarpdv_query_device");
	if (BLOCK < device.min_segment_size || BLOCK > device.max_segment_size)
		dv.segment_size = 0;
	qp = anywarpdv_create_qp_ex(pd->context, &init, &dv, sizeof dv);
	check(qp != NULL, "anywarpdv_create_qp_ex");
	check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "INIT");
	attr.qp_state = IBV_QPS_RTR;
	check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE), "RTR");
	attr.qp_state = IBV_QPS_RTS;
	check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "RTS");
	return qp;
}

/* Sets the bit of each block that has arrived according to the record, and releases its map. */
static void note(struct ibv_qp *owner, const struct anywarpdv_record *record, uint8_t arrived[BLOCKS / 8])
{
	size_t first = (record->base - (uintptr_t)to) / BLOCK;
	uint8_t bits[BLOCKS / 8];
	int n = anywarpdv_read_bitmap(owner, record, sizeof *record, BLOCK, bits, sizeof bits);

	check(n >= 0, "anywarpdv_read_bitmap");
	for (size_t i = 0; i < (size_t)n; i++)
		if (bits[i / 8] >> i % 8 & 1)
			arrived[(first + i) / 8] |= (uint8_t)(1 << (first + i) % 8);
	check(!anywarpdv_release_map(owner, record->map), "anywarpdv_release_map");
}

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	int is_ours = devices && devices[0] && anywarpdv_is_supported(devices[0]);
	struct ibv_context *context = is_ours ? ibv_open_device(devices[0]) : NULL;
	struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
	struct ibv_cq *cq = context ? ibv_create_cq(context, 16, NULL, NULL, 0) : NULL;
	struct ibv_ah_attr address = { .is_global = 1, .port_num = 1 };
	struct sockaddr_in6 writer_address = { .sin6_family = AF_INET6 };
	uint8_t arrived[BLOCKS / 8] = { 0 };
	struct anywarpdv_counters counters;
	struct anywarpdv_record record;
	struct anywarpdv_error error;
	struct ibv_mr *source, *target;
	struct ibv_qp *writer, *owner;
	struct ibv_qp_ex *ex;
	struct ibv_ah *ah;
	struct ibv_wc wc;
	unsigned writes = 0;
	size_t block, end;

	check(pd && cq, "device");
	writer = open_qp(pd, cq);
	owner = open_qp(pd, cq);
	ex = ibv_qp_to_qp_ex(writer);
	for (size_t i = 0; i < LENGTH; i++)
		from[i] = (char)(i * 31 + i / BLOCK);
	source = ibv_reg_mr(pd, from, LENGTH, 0);
	target = ibv_reg_mr(pd, to, LENGTH, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	check(source && target, "ibv_reg_mr");
	check(!ibv_query_gid(context, 1, 0, &address.grh.dgid), "ibv_query_gid");
	ah = ibv_create_ah(pd, &address);
	check(ah != NULL, "ibv_create_ah");
	/* Only this writer may access the memory. A GID is an IPv6 address, or a mapped IPv4 address. */
	memcpy(&writer_address.sin6_addr, &address.grh.dgid, sizeof address.grh.dgid);
	check(!anywarpdv_restrict_mr(target, (struct sockaddr *)&writer_address, sizeof writer_address, writer->qp_num),
	      "anywarpdv_restrict_mr");

	/* Each round writes the missing blocks, with one Write for each run of them. There are at most 1,000 Writes in all. */
	for (block = 0; writes < 1000; block = end) {
		while (block < BLOCKS && arrived[block / 8] >> block % 8 & 1)
			block++;
		if (block == BLOCKS) {
			size_t missing = 0;

			for (size_t i = 0; i < BLOCKS; i++)
				missing += !(arrived[i / 8] >> i % 8 & 1);
			if (!missing)
				break;
			end = 0;
			continue;
		}
		for (end = block; end < BLOCKS && !(arrived[end / 8] >> end % 8 & 1);)
			end++;
		ibv_wr_start(ex);
		ex->wr_id = ++writes;
		ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_rdma_write(ex, target->rkey, (uintptr_t)(to + block * BLOCK));
		ibv_wr_set_ud_addr(ex, ah, owner->qp_num, QKEY);
		ibv_wr_set_sge(ex, source->lkey, (uintptr_t)(from + block * BLOCK), (uint32_t)(end - block) * BLOCK);
		check(!ibv_wr_complete(ex), "ibv_wr_complete");
		/* A message of which nothing arrived has no record. */
		check(anywarpdv_poll_cq(cq, 1, &wc, 2000) == 1 && wc.status == IBV_WC_SUCCESS, "completion of the Write");
		while (anywarpdv_poll_records(owner, 1, &record, sizeof record, 200) == 1) {
			note(owner, &record, arrived);
			if (record.base == (uintptr_t)(to + block * BLOCK))
				break;
		}
	}
	while (anywarpdv_poll_errors(writer, 1, &error, sizeof error, 0) == 1)
		printf("refused: request %llu, layer %u, type %u, code %u\n",
		       (unsigned long long)error.wr_id, error.layer, error.type, error.code);
	check(!anywarpdv_query_counters(owner, &counters, sizeof counters), "anywarpdv_query_counters");
	printf("%u Writes; records of whole messages: %llu, of others: %llu\n", writes,
	       (unsigned long long)counters.rec_full, (unsigned long long)counters.rec_partial);
	ibv_destroy_ah(ah);
	ibv_dereg_mr(target);
	ibv_dereg_mr(source);
	ibv_destroy_qp(owner);
	ibv_destroy_qp(writer);
	ibv_destroy_cq(cq);
	ibv_dealloc_pd(pd);
	ibv_close_device(context);
	ibv_free_device_list(devices);
	return memcmp(from, to, LENGTH) ? 1 : 0;
}
