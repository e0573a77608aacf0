/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Datagram queue pairs of <infiniband/anywarpdv.h> with all operations that their type supports. The functions are
 * looked up by name, so that a program links with any libibverbs.
 */
#ifndef ANYWARP_TESTS_DGRAMS_H
#define ANYWARP_TESTS_DGRAMS_H

#include "ends.h"

#include "../../crates/abi/include/infiniband/anywarpdv.h"

#include <dlfcn.h>

UNUSED static __typeof__(anywarpdv_create_qp_ex) *create_qp;
UNUSED static __typeof__(anywarpdv_poll_records) *poll_records;
UNUSED static __typeof__(anywarpdv_poll_errors) *poll_errors;
UNUSED static __typeof__(anywarpdv_poll_cq) *poll_cq_for;
UNUSED static __typeof__(anywarpdv_read_map) *read_map;
UNUSED static __typeof__(anywarpdv_read_bitmap) *read_bitmap;
UNUSED static __typeof__(anywarpdv_release_map) *release_map;
UNUSED static __typeof__(anywarpdv_query_counters) *query_counters;
UNUSED static __typeof__(anywarpdv_restrict_mr) *restrict_mr;
UNUSED static __typeof__(anywarpdv_set_progress) *set_progress;
UNUSED static __typeof__(anywarpdv_is_supported) *is_supported;
UNUSED static __typeof__(anywarpdv_query_device) *query_dv_device;
UNUSED static __typeof__(anywarpdv_create_ah_from_record) *ah_from_record;
UNUSED static __typeof__(anywarpdv_wc_read_message_id) *wc_read_message_id;
UNUSED static __typeof__(anywarpdv_wc_read_record) *wc_read_record;

UNUSED static const char *find_all(void)
{
	static const struct {
		const char *name;
		void **at;
	} all[] = {
		{ "anywarpdv_create_qp_ex", (void **)&create_qp },
		{ "anywarpdv_poll_records", (void **)&poll_records },
		{ "anywarpdv_poll_errors", (void **)&poll_errors },
		{ "anywarpdv_poll_cq", (void **)&poll_cq_for },
		{ "anywarpdv_read_map", (void **)&read_map },
		{ "anywarpdv_read_bitmap", (void **)&read_bitmap },
		{ "anywarpdv_release_map", (void **)&release_map },
		{ "anywarpdv_query_counters", (void **)&query_counters },
		{ "anywarpdv_restrict_mr", (void **)&restrict_mr },
		{ "anywarpdv_set_progress", (void **)&set_progress },
		{ "anywarpdv_is_supported", (void **)&is_supported },
		{ "anywarpdv_query_device", (void **)&query_dv_device },
		{ "anywarpdv_create_ah_from_record", (void **)&ah_from_record },
		{ "anywarpdv_wc_read_message_id", (void **)&wc_read_message_id },
		{ "anywarpdv_wc_read_record", (void **)&wc_read_record },
	};

	TRY(open_device());
	for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) {
		*all[i].at = dlvsym(RTLD_DEFAULT, all[i].name, "ANYWARPDV_1.0");
		ENSURE(*all[i].at, "%s is not exported", all[i].name);
	}
	ENSURE(is_supported(device->device), "the device is not supported");
	return NULL;
}

struct dgram {
	struct ibv_pd *pd;
	struct ibv_cq *scq, *rcq;
	struct ibv_qp *qp;
	struct ibv_qp_ex *ex;
	struct ibv_ah *ah; /* addresses this host */
};

/* Creates a queue pair on the given completion queues, enables all operations of its type, and moves it to RTS. */
UNUSED static const char *open_dgram_on(struct dgram *d, const struct anywarpdv_qp_init_attr *dv, struct ibv_cq *scq,
					struct ibv_cq *rcq)
{
	bool rd = dv->driver_qp_type == ANYWARPDV_QPT_RD;
	struct ibv_qp_init_attr_ex init = {
		.qp_type = rd ? IBV_QPT_DRIVER : IBV_QPT_UD,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
				  IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ,
		.cap = { .max_send_wr = 256, .max_recv_wr = 256, .max_send_sge = 4, .max_recv_sge = 4, .max_inline_data = 128 },
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = PORT, .qkey = QKEY };
	struct ibv_ah_attr to = { .is_global = 1, .port_num = PORT };

	if (rd)
		init.send_ops_flags |= IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP;
	*d = (struct dgram){ .pd = new_pd(), .scq = scq, .rcq = rcq };
	ENSURE(d->pd && d->scq && d->rcq, "protection domain and queues: %s", strerror(errno));
	init.pd = d->pd;
	init.send_cq = d->scq;
	init.recv_cq = d->rcq;
	d->qp = create_qp(device, &init, dv, sizeof(*dv));
	ENSURE(d->qp, "anywarpdv_create_qp_ex: %s", strerror(errno));
	keep(close_qp, d->qp, "queue pair");
	d->ex = ibv_qp_to_qp_ex(d->qp);
	ENSURE(d->ex, "the queue pair has no extended operations");
	ENSURE(!ibv_modify_qp(d->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
	       "ibv_modify_qp to INIT fails");
	attr.qp_state = IBV_QPS_RTR;
	ENSURE(!ibv_modify_qp(d->qp, &attr, IBV_QP_STATE), "ibv_modify_qp to RTR fails");
	attr.qp_state = IBV_QPS_RTS;
	ENSURE(!ibv_modify_qp(d->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "ibv_modify_qp to RTS fails");
	to.grh.dgid = local_gid;
	to.grh.sgid_index = gid_index;
	d->ah = ibv_create_ah(d->pd, &to);
	ENSURE(d->ah, "ibv_create_ah: %s", strerror(errno));
	keep(close_ah, d->ah, "address handle");
	return NULL;
}

/* As open_dgram_on, with two new completion queues. */
UNUSED static const char *open_dgram(struct dgram *d, const struct anywarpdv_qp_init_attr *dv)
{
	struct ibv_cq *scq = new_cq(512, NULL), *rcq = new_cq(512, NULL);

	return open_dgram_on(d, dv, scq, rcq);
}

/* Many queue pairs of one process, which stand for as many peers. */
struct peers {
	unsigned int many;
	uint32_t key;
	struct ibv_qp **qps;
	struct ibv_cq *cq;
	struct ibv_ah *ah;
};

/* The number of peers that send at once. The receiver must take their messages before further peers send. */
#define PEERS_AT_ONCE 16u

UNUSED static unsigned int many_peers(void)
{
	const char *text = getenv("DV_PEERS");

	return text && atoi(text) > 0 ? (unsigned int)atoi(text) : 1000;
}

/* Opens the queue pairs. Each has one receive of 128 bytes, whose content is not used. */
UNUSED static const char *open_peers(struct peers *p, const struct anywarpdv_qp_init_attr *dv, uint32_t key)
{
	struct ibv_qp_init_attr_ex init = {
		.qp_type = dv->driver_qp_type == ANYWARPDV_QPT_RD ? IBV_QPT_DRIVER : IBV_QPT_UD,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64 },
	};
	struct ibv_qp_attr attr = { .port_num = PORT, .qkey = key };
	struct ibv_ah_attr ah_attr = { .is_global = 1, .port_num = PORT };
	struct ibv_recv_wr wr = { .num_sge = 1 }, *bad;
	struct region sink;
	struct ibv_sge sge;

	*p = (struct peers){ .many = many_peers(), .key = key };
	p->qps = calloc(p->many, sizeof *p->qps);
	ENSURE(p->qps, "no memory");
	keep(close_memory, p->qps, "memory");
	init.pd = new_pd();
	/* Each queue pair receives at most one message and sends two. */
	init.recv_cq = new_cq((int)p->many, NULL);
	p->cq = init.send_cq = new_cq(1024, NULL);
	ENSURE(init.pd && p->cq && init.recv_cq, "protection domain and queues: %s", strerror(errno));
	TRY(new_region(&sink, init.pd, 128, IBV_ACCESS_LOCAL_WRITE));
	sge = sge_of(&sink, 0, 128);
	wr.sg_list = &sge;
	ah_attr.grh.dgid = local_gid;
	ah_attr.grh.sgid_index = gid_index;
	p->ah = ibv_create_ah(init.pd, &ah_attr);
	ENSURE(p->ah, "ibv_create_ah: %s", strerror(errno));
	keep(close_ah, p->ah, "address handle");
	for (unsigned int i = 0; i < p->many; i++) {
		struct ibv_qp *qp = p->qps[i] = create_qp(device, &init, dv, sizeof(*dv));

		ENSURE(qp, "queue pair %u: %s", i, strerror(errno));
		keep(close_qp, qp, "queue pair");
		attr.qp_state = IBV_QPS_INIT;
		ENSURE(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "INIT");
		ENSURE(!ibv_post_recv(qp, &wr, &bad), "ibv_post_recv");
		attr.qp_state = IBV_QPS_RTR;
		ENSURE(!ibv_modify_qp(qp, &attr, IBV_QP_STATE), "ibv_modify_qp to RTR fails");
		attr.qp_state = IBV_QPS_RTS;
		ENSURE(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "ibv_modify_qp to RTS fails");
	}
	return NULL;
}

/*
 * Sends a message to the queue pair `hub` of this host from each of PEERS_AT_ONCE peers, beginning with `first`. If fewer are left, sends
 * one from each of these.
 */
UNUSED static const char *send_from_peers(struct peers *p, unsigned int first, uint32_t hub, void *message, size_t len)
{
	unsigned int n = p->many - first < PEERS_AT_ONCE ? p->many - first : PEERS_AT_ONCE;

	for (unsigned int i = first; i < first + n; i++) {
		struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(p->qps[i]);

		ibv_wr_start(ex);
		ex->wr_id = i;
		ex->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
		ibv_wr_send(ex);
		ibv_wr_set_ud_addr(ex, p->ah, hub, p->key);
		ibv_wr_set_inline_data(ex, message, len);
		ENSURE(!ibv_wr_complete(ex), "ibv_wr_complete");
	}
	for (unsigned int i = 0; i < n; i++) {
		struct ibv_wc wc;

		ENSURE(poll_cq_for(p->cq, 1, &wc, (int)WAIT_MS) == 1, "a message of peer %u or of a later peer does not complete", first);
		ENSURE(wc.status == IBV_WC_SUCCESS, "peer %u: %s", (unsigned int)wc.wr_id, ibv_wc_status_str(wc.status));
	}
	return NULL;
}

enum what { SEND, WRITE, WRITE_IMM, READ };

/* The key and address of a peer's memory. */
struct there {
	uint32_t rkey;
	uint64_t at;
};

/* Posts one request on `a` to queue pair `qpn` of this host. */
UNUSED static const char *request_to(struct dgram *a, uint32_t qpn, enum what what, uint64_t id, const struct region *mine,
				     size_t len, struct there to)
{
	int rc;

	ibv_wr_start(a->ex);
	a->ex->wr_id = id;
	a->ex->wr_flags = IBV_SEND_SIGNALED;
	switch (what) {
	case SEND: ibv_wr_send(a->ex); break;
	case WRITE: ibv_wr_rdma_write(a->ex, to.rkey, to.at); break;
	case WRITE_IMM: ibv_wr_rdma_write_imm(a->ex, to.rkey, to.at, htonl(0x01020304)); break;
	case READ: ibv_wr_rdma_read(a->ex, to.rkey, to.at); break;
	}
	ibv_wr_set_ud_addr(a->ex, a->ah, qpn, QKEY);
	ibv_wr_set_sge(a->ex, mine->mr->lkey, (uintptr_t)mine->at, (uint32_t)len);
	rc = ibv_wr_complete(a->ex);
	ENSURE(!rc, "ibv_wr_complete: %s", strerror(rc));
	return NULL;
}

/* Posts one request on `a` to queue pair `b` of this process. */
UNUSED static const char *request(struct dgram *a, const struct dgram *b, enum what what, uint64_t id,
				  const struct region *mine, size_t len, const struct region *theirs)
{
	struct there to = { 0 };

	if (theirs)
		to = (struct there){ theirs->mr->rkey, (uintptr_t)theirs->at };
	return request_to(a, b->qp->qp_num, what, id, mine, len, to);
}

UNUSED static const char *done(struct dgram *d, uint64_t id, enum ibv_wc_status status)
{
	struct ibv_wc wc;

	ENSURE(poll_cq_for(d->scq, 1, &wc, (int)WAIT_MS) == 1, "request %llu does not complete", (unsigned long long)id);
	ENSURE(wc.wr_id == id, "request %llu completes instead", (unsigned long long)wc.wr_id);
	ENSURE(wc.status == status, "request %llu: %s", (unsigned long long)id, ibv_wc_status_str(wc.status));
	return NULL;
}

#endif
