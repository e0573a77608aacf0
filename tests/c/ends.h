/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Two ends in one process: their device, protection domains, queues and queue pairs, and functions that wait with a
 * limit.
 *
 * Each end has its own PD, send CQ, receive CQ and queue pair, so that a test can check which completion arrives on
 * which queue. The ends are connected with ibv_modify_qp, as programs do that exchange queue pair numbers and GIDs
 * themselves.
 */
#ifndef ANYWARP_TESTS_ENDS_H
#define ANYWARP_TESTS_ENDS_H

#include "check.h"

#include <arpa/inet.h>
#include <infiniband/verbs.h>

#define PORT 1
#define WAIT_MS 10000u /* longest wait for an expected event */
#define QUIET_MS 60u   /* how long to wait for an event that must not occur */
#define QKEY 0x11223344u

static struct ibv_context *device;
static struct ibv_device_attr device_attr;
static struct ibv_port_attr port_attr;
static union ibv_gid local_gid;
static uint8_t gid_index;

/* Opens the device named in TEST_DEVICE, or the first one, and selects the GID at index TEST_GID_INDEX, or 0. */
UNUSED static const char *open_device(void)
{
	const char *wanted = getenv("TEST_DEVICE"), *index = getenv("TEST_GID_INDEX");
	struct ibv_device **list;
	struct ibv_device *found = NULL;
	int n, rc;

	if (device)
		return NULL;
	list = ibv_get_device_list(&n);
	ENSURE(list, "ibv_get_device_list: %s", strerror(errno));
	for (int i = 0; i < n && !found; i++)
		if (!wanted || !strcmp(ibv_get_device_name(list[i]), wanted))
			found = list[i];
	ENSURE(found, "no device%s%s among %d", wanted ? " named " : "", wanted ? wanted : "", n);
	device = ibv_open_device(found);
	ibv_free_device_list(list);
	ENSURE(device, "ibv_open_device: %s", strerror(errno));
	rc = ibv_query_device(device, &device_attr);
	ENSURE(!rc, "ibv_query_device: %s", strerror(rc));
	rc = ibv_query_port(device, PORT, &port_attr);
	ENSURE(!rc, "ibv_query_port: %s", strerror(rc));
	gid_index = index ? (uint8_t)atoi(index) : 0;
	ENSURE(!ibv_query_gid(device, PORT, gid_index, &local_gid), "ibv_query_gid: %s", strerror(errno));
	return NULL;
}

UNUSED static int close_pd(void *p) { return ibv_dealloc_pd(p); }
UNUSED static int close_cq(void *p) { return ibv_destroy_cq(p); }
UNUSED static int close_qp(void *p) { return ibv_destroy_qp(p); }
UNUSED static int close_mr(void *p) { return ibv_dereg_mr(p); }
UNUSED static int close_mw(void *p) { return ibv_dealloc_mw(p); }
UNUSED static int close_ah(void *p) { return ibv_destroy_ah(p); }
UNUSED static int close_srq(void *p) { return ibv_destroy_srq(p); }
UNUSED static int close_channel(void *p) { return ibv_destroy_comp_channel(p); }
UNUSED static int close_memory(void *p) { free(p); return 0; }

UNUSED static struct ibv_pd *new_pd(void)
{
	struct ibv_pd *pd = ibv_alloc_pd(device);

	if (pd)
		keep(close_pd, pd, "protection domain");
	return pd;
}

UNUSED static struct ibv_comp_channel *new_channel(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(device);

	if (channel)
		keep(close_channel, channel, "completion channel");
	return channel;
}

UNUSED static struct ibv_cq *new_cq(int depth, struct ibv_comp_channel *channel)
{
	struct ibv_cq *cq = ibv_create_cq(device, depth, NULL, channel, 0);

	if (cq)
		keep(close_cq, cq, "completion queue");
	return cq;
}

UNUSED static struct ibv_qp *new_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	struct ibv_qp *qp = ibv_create_qp(pd, init);

	if (qp)
		keep(close_qp, qp, "queue pair");
	return qp;
}

UNUSED static struct ibv_mr *new_mr(struct ibv_pd *pd, void *at, size_t len, unsigned int access)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, at, len, access);

	if (mr)
		keep(close_mr, mr, "memory region");
	return mr;
}

#define GUARD 64u
#define FRESH 0xeeu

/* A registered buffer with guard bytes on both sides, which must not change. */
struct region {
	uint8_t *at;
	size_t len;
	struct ibv_mr *mr;
	uint8_t *whole;
};

#define ALL_ACCESS                                                                                       \
	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

UNUSED static const char *new_region(struct region *r, struct ibv_pd *pd, size_t len, unsigned int access)
{
	size_t size = (len + 2 * GUARD + 63) & ~(size_t)63;

	r->whole = aligned_alloc(64, size);
	ENSURE(r->whole, "no memory for %zu bytes", len);
	keep(close_memory, r->whole, "memory");
	memset(r->whole, (int)FRESH, size);
	r->at = r->whole + GUARD;
	r->len = len;
	r->mr = new_mr(pd, r->at, len, access);
	ENSURE(r->mr, "ibv_reg_mr of %zu bytes, access %#x: %s", len, access, strerror(errno));
	return NULL;
}

UNUSED static const char *guards_untouched(const struct region *r)
{
	TRY(all_bytes(r->whole, GUARD, FRESH, "bytes before the region"));
	return all_bytes(r->at + r->len, GUARD, FRESH, "bytes after the region");
}

UNUSED static struct ibv_sge sge_of(const struct region *r, size_t offset, size_t len)
{
	return (struct ibv_sge){ .addr = (uintptr_t)r->at + offset, .length = (uint32_t)len, .lkey = r->mr->lkey };
}

/* Parameters of an end or a pair. Zero selects the default. */
struct want {
	enum ibv_qp_type type; /* 0: RC */
	uint32_t send_wr, recv_wr, sge, inline_data;
	int cq_depth;
	bool channels;   /* create completion channels for the receive CQs */
	bool one_cq;     /* create one CQ for sends and receives of an end */
	bool srq;        /* create a shared receive queue for each end */
	bool sig_all;
	bool by_lid;     /* the address vector has a LID and no GRH */
	uint8_t timeout, retry, rnr_retry, min_rnr; /* rnr_retry: 0 selects 7, NEVER selects 0 */
	unsigned int access; /* access flags of the queue pair; 0: all */
	uint8_t rd_atomic;
	uint8_t level; /* service level */
};

#define NEVER 0xff
#define NO_ACCESS 0x80000000u

struct end {
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *scq, *rcq;
	struct ibv_srq *srq;
	struct ibv_qp *qp;
	uint32_t inline_data;
};

UNUSED static const char *open_end(struct end *e, const struct want *w)
{
	int depth = w->cq_depth ? w->cq_depth : 1024;
	struct ibv_qp_init_attr init = {
		.qp_type = w->type ? w->type : IBV_QPT_RC,
		.sq_sig_all = w->sig_all,
		.cap = {
			.max_send_wr = w->send_wr ? w->send_wr : 256,
			.max_recv_wr = w->recv_wr ? w->recv_wr : 256,
			.max_send_sge = w->sge ? w->sge : 4,
			.max_recv_sge = w->sge ? w->sge : 4,
			.max_inline_data = w->inline_data,
		},
	};

	*e = (struct end){ 0 };
	e->pd = new_pd();
	ENSURE(e->pd, "ibv_alloc_pd: %s", strerror(errno));
	if (w->channels) {
		e->channel = new_channel();
		ENSURE(e->channel, "ibv_create_comp_channel: %s", strerror(errno));
	}
	e->scq = new_cq(depth, w->one_cq ? e->channel : NULL);
	ENSURE(e->scq, "ibv_create_cq: %s", strerror(errno));
	e->rcq = w->one_cq ? e->scq : new_cq(depth, e->channel);
	ENSURE(e->rcq, "ibv_create_cq: %s", strerror(errno));
	if (w->srq) {
		struct ibv_srq_init_attr attr = { .attr = { .max_wr = 256, .max_sge = 2 } };

		e->srq = ibv_create_srq(e->pd, &attr);
		ENSURE(e->srq, "ibv_create_srq: %s", strerror(errno));
		keep(close_srq, e->srq, "shared receive queue");
	}
	init.send_cq = e->scq;
	init.recv_cq = e->rcq;
	init.srq = e->srq;
	e->qp = new_qp(e->pd, &init);
	ENSURE(e->qp, "ibv_create_qp: %s", strerror(errno));
	e->inline_data = init.cap.max_inline_data;
	return NULL;
}

UNUSED static const char *to_init(struct ibv_qp *qp, const struct want *w)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = PORT, .qkey = QKEY };
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
	int rc;

	attr.qp_access_flags = w->access == NO_ACCESS ? 0 : w->access ? w->access : ALL_ACCESS;
	if (qp->qp_type == IBV_QPT_UC)
		attr.qp_access_flags &= ~(unsigned int)(IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
	mask |= qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
	rc = ibv_modify_qp(qp, &attr, mask);
	ENSURE(!rc, "ibv_modify_qp to INIT: %s", strerror(rc));
	return NULL;
}

UNUSED static struct ibv_ah_attr address_of(const union ibv_gid *gid, uint16_t lid, bool by_lid)
{
	struct ibv_ah_attr ah = { .port_num = PORT };

	if (by_lid) {
		ah.dlid = lid;
	} else {
		ah.is_global = 1;
		ah.grh.dgid = *gid;
		ah.grh.sgid_index = gid_index;
		ah.grh.hop_limit = 64;
	}
	return ah;
}

UNUSED static const char *to_rtr(struct ibv_qp *qp, uint32_t dest, const struct want *w)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = dest,
		.rq_psn = 0,
		.max_dest_rd_atomic = w->rd_atomic ? w->rd_atomic : 4,
		.min_rnr_timer = w->min_rnr ? w->min_rnr : 12,
		.ah_attr = address_of(&local_gid, port_attr.lid, w->by_lid),
	};
	int mask = IBV_QP_STATE;
	int rc;

	attr.ah_attr.sl = w->level;
	if (qp->qp_type != IBV_QPT_UD)
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	rc = ibv_modify_qp(qp, &attr, mask);
	ENSURE(!rc, "ibv_modify_qp to RTR: %s", strerror(rc));
	return NULL;
}

UNUSED static const char *to_rts(struct ibv_qp *qp, const struct want *w)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTS,
		.sq_psn = 0,
		.timeout = w->timeout ? w->timeout : 14,
		.retry_cnt = w->retry ? w->retry : 7,
		.rnr_retry = w->rnr_retry == NEVER ? 0 : w->rnr_retry ? w->rnr_retry : 7,
		.max_rd_atomic = w->rd_atomic ? w->rd_atomic : 4,
	};
	int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	int rc;

	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	rc = ibv_modify_qp(qp, &attr, mask);
	ENSURE(!rc, "ibv_modify_qp to RTS: %s", strerror(rc));
	return NULL;
}

UNUSED static const char *to_state(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };
	int rc = ibv_modify_qp(qp, &attr, IBV_QP_STATE);

	ENSURE(!rc, "ibv_modify_qp to state %d: %s", state, strerror(rc));
	return NULL;
}

UNUSED static const char *state_is(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	int rc = ibv_query_qp(qp, &attr, IBV_QP_STATE, &init);

	ENSURE(!rc, "ibv_query_qp: %s", strerror(rc));
	ENSURE(attr.qp_state == state, "queue pair is in state %d, expected %d", attr.qp_state, state);
	return NULL;
}

struct pair {
	struct end a, b;
};

UNUSED static const char *connect_ends(struct end *a, struct end *b, const struct want *w)
{
	TRY(to_init(a->qp, w));
	TRY(to_init(b->qp, w));
	TRY(to_rtr(a->qp, b->qp->qp_num, w));
	TRY(to_rtr(b->qp, a->qp->qp_num, w));
	TRY(to_rts(a->qp, w));
	return to_rts(b->qp, w);
}

UNUSED static const char *open_pair(struct pair *p, const struct want *w)
{
	TRY(open_device());
	TRY(open_end(&p->a, w));
	TRY(open_end(&p->b, w));
	return connect_ends(&p->a, &p->b, w);
}

/* Waits for one completion. */
UNUSED static const char *next_wc(struct ibv_cq *cq, struct ibv_wc *wc, unsigned int ms)
{
	uint64_t end = now_ms() + ms;
	int n;

	do {
		n = ibv_poll_cq(cq, 1, wc);
		ENSURE(n >= 0, "ibv_poll_cq gives %d", n);
		if (n == 1)
			return NULL;
		sched_yield();
	} while (now_ms() < end);
	ENSURE(false, "no completion within %u ms", ms);
}

/* Waits for `ms` and fails if a completion arrives. */
UNUSED static const char *no_wc(struct ibv_cq *cq, unsigned int ms)
{
	uint64_t end = now_ms() + ms;
	struct ibv_wc wc;

	do {
		int n = ibv_poll_cq(cq, 1, &wc);

		ENSURE(n == 0, "unexpected completion: wr_id %llu, status %d (%s), opcode %d",
		       (unsigned long long)wc.wr_id, wc.status, ibv_wc_status_str(wc.status), wc.opcode);
		sleep_ms(1);
	} while (now_ms() < end);
	return NULL;
}

UNUSED static const char *wc_is(const struct ibv_wc *wc, uint64_t wr_id, enum ibv_wc_status status)
{
	ENSURE(wc->wr_id == wr_id, "completion of wr_id %llu (status %d %s), expected wr_id %llu",
	       (unsigned long long)wc->wr_id, wc->status, ibv_wc_status_str(wc->status), (unsigned long long)wr_id);
	ENSURE(wc->status == status, "wr_id %llu: status %d (%s), expected %d (%s)", (unsigned long long)wr_id,
	       wc->status, ibv_wc_status_str(wc->status), status, ibv_wc_status_str(status));
	return NULL;
}

/* Waits for a completion and checks that it succeeded. */
UNUSED static const char *expect_ok(struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_opcode opcode, struct ibv_wc *out)
{
	struct ibv_wc wc;

	TRY(next_wc(cq, &wc, WAIT_MS));
	TRY(wc_is(&wc, wr_id, IBV_WC_SUCCESS));
	ENSURE(wc.opcode == opcode, "wr_id %llu: opcode %d, expected %d", (unsigned long long)wr_id, wc.opcode, opcode);
	if (out)
		*out = wc;
	return NULL;
}

UNUSED static const char *expect_status(struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_status status)
{
	struct ibv_wc wc;

	TRY(next_wc(cq, &wc, WAIT_MS));
	return wc_is(&wc, wr_id, status);
}

/* Waits for `count` flushed completions with consecutive wr_id from `first`, and checks that no other follows. */
UNUSED static const char *expect_flushed(struct ibv_cq *cq, uint64_t first, size_t count)
{
	for (size_t i = 0; i < count; i++)
		TRY(expect_status(cq, first + i, IBV_WC_WR_FLUSH_ERR));
	return no_wc(cq, QUIET_MS);
}

UNUSED static const char *post_recv(struct ibv_qp *qp, uint64_t wr_id, struct ibv_sge *sge, int n)
{
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = sge, .num_sge = n }, *bad = NULL;
	int rc = ibv_post_recv(qp, &wr, &bad);

	ENSURE(!rc, "ibv_post_recv: %s", strerror(rc));
	return NULL;
}

UNUSED static const char *post_srq_recv(struct ibv_srq *srq, uint64_t wr_id, struct ibv_sge *sge, int n)
{
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = sge, .num_sge = n }, *bad = NULL;
	int rc = ibv_post_srq_recv(srq, &wr, &bad);

	ENSURE(!rc, "ibv_post_srq_recv: %s", strerror(rc));
	return NULL;
}

UNUSED static const char *post(struct ibv_qp *qp, struct ibv_send_wr *wr)
{
	struct ibv_send_wr *bad = NULL;
	int rc = ibv_post_send(qp, wr, &bad);

	ENSURE(!rc, "ibv_post_send: %s", strerror(rc));
	return NULL;
}

/* A signaled work request with the common fields set. The caller adds the fields of its opcode. */
UNUSED static struct ibv_send_wr send_wr(uint64_t wr_id, enum ibv_wr_opcode opcode, struct ibv_sge *sge, int n)
{
	return (struct ibv_send_wr){
		.wr_id = wr_id, .opcode = opcode, .sg_list = sge, .num_sge = n, .send_flags = IBV_SEND_SIGNALED
	};
}

UNUSED static struct ibv_send_wr rdma_wr(uint64_t wr_id, enum ibv_wr_opcode opcode, struct ibv_sge *sge, int n,
					 const struct region *target, size_t offset)
{
	struct ibv_send_wr wr = send_wr(wr_id, opcode, sge, n);

	wr.wr.rdma.remote_addr = (uintptr_t)target->at + offset;
	wr.wr.rdma.rkey = target->mr->rkey;
	return wr;
}

UNUSED static struct ibv_send_wr atomic_wr(uint64_t wr_id, enum ibv_wr_opcode opcode, struct ibv_sge *sge,
					   const struct region *target, uint64_t compare_add, uint64_t swap)
{
	struct ibv_send_wr wr = send_wr(wr_id, opcode, sge, 1);

	wr.wr.atomic.remote_addr = (uintptr_t)target->at;
	wr.wr.atomic.rkey = target->mr->rkey;
	wr.wr.atomic.compare_add = compare_add;
	wr.wr.atomic.swap = swap;
	return wr;
}

/* Waits until a file descriptor is readable. */
UNUSED static const char *readable(int fd, unsigned int ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	int n = poll(&p, 1, (int)ms);

	ENSURE(n >= 0, "poll: %s", strerror(errno));
	ENSURE(n == 1, "file descriptor not readable within %u ms", ms);
	ENSURE(p.revents == POLLIN, "poll reports %#x, expected POLLIN", (unsigned int)p.revents);
	return NULL;
}

UNUSED static const char *not_readable(int fd, unsigned int ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	int n = poll(&p, 1, (int)ms);

	ENSURE(n == 0, "file descriptor is readable (%#x) without an event", (unsigned int)p.revents);
	return NULL;
}

/* Waits for an asynchronous event of the device. Checks its type and its object. */
UNUSED static const char *async_event(enum ibv_event_type type, const void *object)
{
	struct ibv_async_event event;
	const void *got;

	TRY(readable(device->async_fd, WAIT_MS));
	ENSURE(!ibv_get_async_event(device, &event), "ibv_get_async_event: %s", strerror(errno));
	got = event.element.qp; /* the pointers are members of one union */
	ibv_ack_async_event(&event);
	ENSURE(event.event_type == type, "async event %d (%s), expected %d (%s)", event.event_type,
	       ibv_event_type_str(event.event_type), type, ibv_event_type_str(type));
	ENSURE(!object || got == object, "async event %s for another object", ibv_event_type_str(type));
	return NULL;
}

/* Whether a GID holds an IPv4 address. */
UNUSED static bool gid_is_ipv4(const union ibv_gid *gid)
{
	static const uint8_t prefix[12] = { [10] = 0xff, [11] = 0xff };

	return !memcmp(gid->raw, prefix, sizeof prefix);
}

#endif
