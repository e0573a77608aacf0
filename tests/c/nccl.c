/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Verbs as NCCL uses them. NCCL looks up every function at run time, by name and version. It connects a queue pair to
 * itself; an RDMA Read on that queue pair flushes the data that a GPU has received. It connects two queue pairs of one
 * process. It calls ibv_reg_dmabuf_mr to learn whether the device supports dma-buf.
 */
#include "ends.h"

#include <dlfcn.h>

/* The functions, as `name, version`. */
#define FUNCTIONS(F)                                                                                              \
	F(ibv_get_device_list, "IBVERBS_1.1") F(ibv_free_device_list, "IBVERBS_1.1")                              \
	F(ibv_get_device_name, "IBVERBS_1.1") F(ibv_open_device, "IBVERBS_1.1") F(ibv_close_device, "IBVERBS_1.1") \
	F(ibv_get_async_event, "IBVERBS_1.1") F(ibv_ack_async_event, "IBVERBS_1.1")                               \
	F(ibv_query_device, "IBVERBS_1.1") F(ibv_query_gid, "IBVERBS_1.1") F(ibv_query_qp, "IBVERBS_1.1")         \
	F(ibv_alloc_pd, "IBVERBS_1.1") F(ibv_dealloc_pd, "IBVERBS_1.1") F(ibv_dereg_mr, "IBVERBS_1.1")            \
	F(ibv_create_cq, "IBVERBS_1.1") F(ibv_destroy_cq, "IBVERBS_1.1") F(ibv_create_qp, "IBVERBS_1.1")          \
	F(ibv_modify_qp, "IBVERBS_1.1") F(ibv_destroy_qp, "IBVERBS_1.1") F(ibv_fork_init, "IBVERBS_1.1")          \
	F(ibv_event_type_str, "IBVERBS_1.1") F(ibv_reg_mr_iova2, "IBVERBS_1.8")                                   \
	F(ibv_query_ece, "IBVERBS_1.10") F(ibv_set_ece, "IBVERBS_1.10") F(ibv_reg_dmabuf_mr, "IBVERBS_1.12")

/* The header has macros of some of these names. */
#undef ibv_query_port
#undef ibv_reg_mr

#define DECLARE(name, version) static __typeof__(name) *my_##name;
FUNCTIONS(DECLARE)
static struct ibv_mr *(*my_ibv_reg_mr)(struct ibv_pd *, void *, size_t, int);
static int (*my_ibv_query_port)(struct ibv_context *, uint8_t, struct _compat_ibv_port_attr *);

static const char *look_up(void)
{
	void *library = dlopen("libibverbs.so", RTLD_NOW);

	if (!library)
		library = dlopen("libibverbs.so.1", RTLD_NOW);
	ENSURE(library, "%s", dlerror());
#define FIND(name, version)                                                          \
	my_##name = (__typeof__(my_##name))dlvsym(library, #name, version);          \
	ENSURE(my_##name, "%s@%s: %s", #name, version, dlerror());
	FUNCTIONS(FIND)
	FIND(ibv_reg_mr, "IBVERBS_1.1")
	FIND(ibv_query_port, "IBVERBS_1.1")
	return NULL;
}

static int drop_device(void *p) { return my_ibv_close_device(p); }
static int drop_pd(void *p) { return my_ibv_dealloc_pd(p); }
static int drop_cq(void *p) { return my_ibv_destroy_cq(p); }
static int drop_qp(void *p) { return my_ibv_destroy_qp(p); }
static int drop_mr(void *p) { return my_ibv_dereg_mr(p); }

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static uint8_t memory[1 << 20] __attribute__((aligned(4096)));

static const char *open_all(void)
{
	struct ibv_device **list;
	struct ibv_port_attr port;
	int n;

	TRY(look_up());
	ENSURE(!my_ibv_fork_init(), "ibv_fork_init");
	list = my_ibv_get_device_list(&n);
	ENSURE(list && n > 0, "no device");
	context = my_ibv_open_device(list[0]);
	my_ibv_free_device_list(list);
	ENSURE(context, "ibv_open_device: %s", strerror(errno));
	keep(drop_device, context, "device");
	memset(&port, 0, sizeof port);
	ENSURE(!my_ibv_query_port(context, 1, (struct _compat_ibv_port_attr *)&port), "ibv_query_port");
	ENSURE(port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_ETHERNET, "port state %d, link %d",
	       port.state, port.link_layer);
	ENSURE(!my_ibv_query_gid(context, 1, 0, &local_gid), "ibv_query_gid: %s", strerror(errno));
	pd = my_ibv_alloc_pd(context);
	ENSURE(pd, "ibv_alloc_pd: %s", strerror(errno));
	keep(drop_pd, pd, "protection domain");
	cq = my_ibv_create_cq(context, 256, NULL, NULL, 0);
	ENSURE(cq, "ibv_create_cq: %s", strerror(errno));
	keep(drop_cq, cq, "completion queue");
	mr = my_ibv_reg_mr_iova2(pd, memory, sizeof memory, (uintptr_t)memory, ALL_ACCESS | IBV_ACCESS_RELAXED_ORDERING);
	ENSURE(mr, "ibv_reg_mr_iova2: %s", strerror(errno));
	keep(drop_mr, mr, "memory region");
	return NULL;
}

static const char *make_qp(struct ibv_qp **qp)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq,
					 .cap = { 64, 64, 1, 1, 0 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL_ACCESS };
	struct ibv_ece ece = { 0 };
	int rc;

	*qp = my_ibv_create_qp(pd, &init);
	ENSURE(*qp, "ibv_create_qp: %s", strerror(errno));
	keep(drop_qp, *qp, "queue pair");
	rc = my_ibv_query_ece(*qp, &ece);
	ENSURE(!rc || rc == EOPNOTSUPP, "ibv_query_ece: %s", strerror(rc));
	if (!rc)
		ENSURE(!my_ibv_set_ece(*qp, &ece), "ibv_set_ece of the options that were queried fails");
	rc = my_ibv_modify_qp(*qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	ENSURE(!rc, "ibv_modify_qp to INIT: %s", strerror(rc));
	return NULL;
}

static const char *connect_qp(struct ibv_qp *qp, uint32_t to)
{
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096, .dest_qp_num = to,
				   .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
				   .ah_attr = address_of(&local_gid, 0, false) };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7,
				   .max_rd_atomic = 1 };
	int rc = my_ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
						    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);

	ENSURE(!rc, "ibv_modify_qp to RTR: %s", strerror(rc));
	rc = my_ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
						IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
	ENSURE(!rc, "ibv_modify_qp to RTS: %s", strerror(rc));
	return NULL;
}

#define QUARTER (sizeof memory / 4)

static const char *one(struct ibv_qp *qp, enum ibv_wr_opcode opcode, size_t from, size_t to, size_t len)
{
	struct ibv_sge sge = { (uintptr_t)memory + from, (uint32_t)len, mr->lkey };
	struct ibv_send_wr wr = send_wr(2, opcode, &sge, 1);

	wr.imm_data = htonl(4711);
	wr.wr.rdma.remote_addr = (uintptr_t)memory + to;
	wr.wr.rdma.rkey = mr->rkey;
	return post(qp, &wr);
}

/* Waits for both completions of a request that takes a receive: the sender's (wr_id 2) and the receiver's (wr_id 1). */
static const char *sent_and_received(enum ibv_wc_opcode received, size_t len)
{
	unsigned int seen = 0;

	while (seen != 3) {
		struct ibv_wc wc;

		TRY(next_wc(cq, &wc, WAIT_MS));
		ENSURE(wc.status == IBV_WC_SUCCESS, "status %s", ibv_wc_status_str(wc.status));
		ENSURE(wc.wr_id == 1 || wc.wr_id == 2, "wr_id %llu", (unsigned long long)wc.wr_id);
		ENSURE(!(seen & 1u << (wc.wr_id - 1)), "request %llu completes twice", (unsigned long long)wc.wr_id);
		seen |= 1u << (wc.wr_id - 1);
		if (wc.wr_id != 1)
			continue;
		ENSURE(wc.opcode == received && wc.byte_len == len, "opcode %d, %u bytes", wc.opcode, wc.byte_len);
		ENSURE(received == IBV_WC_RECV || ((wc.wc_flags & IBV_WC_WITH_IMM) && ntohl(wc.imm_data) == 4711),
		       "the completion has no immediate data, or other data");
	}
	return NULL;
}

/* Posts each operation that NCCL uses, from `qp` to `peer`. Both may be the same queue pair. */
static const char *traffic(struct ibv_qp *qp, struct ibv_qp *peer)
{
	static const size_t lengths[] = { 1, 8, 4096, 65536, QUARTER };

	for (size_t i = 0; i < COUNT(lengths); i++) {
		size_t len = lengths[i];
		struct ibv_sge in = { (uintptr_t)memory + 3 * QUARTER, (uint32_t)QUARTER, mr->lkey };

		memset(memory + QUARTER, 0, 3 * QUARTER);
		fill_pattern(memory, len, (uint32_t)len);
		TRY(one(qp, IBV_WR_RDMA_WRITE, 0, QUARTER, len));
		TRY(expect_ok(cq, 2, IBV_WC_RDMA_WRITE, NULL));
		TRY(same_pattern(memory + QUARTER, len, (uint32_t)len));
		TRY(one(qp, IBV_WR_RDMA_READ, 2 * QUARTER, QUARTER, len)); /* as NCCL flushes */
		TRY(expect_ok(cq, 2, IBV_WC_RDMA_READ, NULL));
		TRY(same_pattern(memory + 2 * QUARTER, len, (uint32_t)len));
		TRY(post_recv(peer, 1, &in, 1));
		TRY(one(qp, IBV_WR_SEND, 0, 0, len));
		TRY(sent_and_received(IBV_WC_RECV, len));
		TRY(same_pattern(memory + 3 * QUARTER, len, (uint32_t)len));
		memset(memory + QUARTER, 0, QUARTER);
		TRY(post_recv(peer, 1, NULL, 0));
		TRY(one(qp, IBV_WR_RDMA_WRITE_WITH_IMM, 0, QUARTER, len));
		TRY(sent_and_received(IBV_WC_RECV_RDMA_WITH_IMM, len));
		TRY(same_pattern(memory + QUARTER, len, (uint32_t)len));
	}
	return no_wc(cq, QUIET_MS);
}

static const char *to_itself(size_t arg)
{
	struct ibv_qp *qp;

	(void)arg;
	TRY(open_all());
	TRY(make_qp(&qp));
	TRY(connect_qp(qp, qp->qp_num));
	return traffic(qp, qp);
}

static const char *two_in_one_process(size_t arg)
{
	struct ibv_qp *a, *b;

	(void)arg;
	TRY(open_all());
	TRY(make_qp(&a));
	TRY(make_qp(&b));
	TRY(connect_qp(a, b->qp_num));
	TRY(connect_qp(b, a->qp_num));
	TRY(traffic(a, b));
	return traffic(b, a);
}

/* Many queue pairs flush at once, each connected to itself, as NCCL does with several channels. */
static const char *many_to_themselves(size_t count)
{
	struct ibv_qp *qps[64];

	TRY(open_all());
	fill_pattern(memory, 4096, 9);
	for (size_t i = 0; i < count; i++) {
		TRY(make_qp(&qps[i]));
		TRY(connect_qp(qps[i], qps[i]->qp_num));
	}
	for (size_t round = 0; round < 20; round++) {
		for (size_t i = 0; i < count; i++) {
			memset(memory + QUARTER + 4096 * i, 0, 4096);
			TRY(one(qps[i], IBV_WR_RDMA_READ, QUARTER + 4096 * i, 0, 4096));
		}
		for (size_t i = 0; i < count; i++)
			TRY(expect_ok(cq, 2, IBV_WC_RDMA_READ, NULL));
		for (size_t i = 0; i < count; i++)
			TRY(same_pattern(memory + QUARTER + 4096 * i, 4096, 9));
	}
	return NULL;
}

/* NCCL calls ibv_reg_dmabuf_mr with arguments that no device accepts, and checks errno. */
static const char *no_dma_buf(size_t arg)
{
	(void)arg;
	TRY(open_all());
	errno = 0;
	ENSURE(!my_ibv_reg_dmabuf_mr(pd, 0, 0, 0, -1, 0), "ibv_reg_dmabuf_mr without a dma-buf succeeds");
	ENSURE(errno == EOPNOTSUPP, "ibv_reg_dmabuf_mr: %s", strerror(errno));
	return NULL;
}

static const struct test tests[] = {
	{ "to_itself", to_itself, 0, 0, true },
	{ "two_in_one_process", two_in_one_process, 0, 0, true },
	{ "many_to_themselves", many_to_themselves, 64, 0, true },
	{ "no_dma_buf", no_dma_buf, 0, 0, true },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
