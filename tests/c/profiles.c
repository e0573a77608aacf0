/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Device profiles: each reports the limits of its device and enforces them.
 *
 * Each test is a separate process, which sets the profile before the library reads it.
 */
#include "ends.h"

#include <dlfcn.h>
#include <rdma/rdma_cma.h>

struct device {
	const char *name;
	/* as reported by ibv_query_device */
	int qp_wr, sge, sge_rd, cqe, rd_atom, mw, srq, srq_wr, srq_sge;
	enum ibv_atomic_cap atomics;
	int transport;
	uint32_t inline_data, msg_sz;
	/* supported features */
	bool rc, uc, ud, xrc, immediate, cq_ex, qp_ex, odp, memory, domains, null_mr, resize_cq, rereg, connects, counters, blocks_own;
};

static const struct device devices[] = {
	{ "anywarp", 32768, 32, 32, 4194304, 128, 8388608, 65536, 65536, 32, IBV_ATOMIC_GLOB, IBV_TRANSPORT_IB, 1024,
	  1u << 30, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true },
	{ "siw", 32768, 6, 1, 3276800, 128, 0, 65536, 65536, 6, IBV_ATOMIC_NONE, IBV_TRANSPORT_IWARP, 80, 1u << 30, true,
	  false, false, false, false, false, false, false, false, false, false, false, false, false, false, false },
	{ "rxe", 16384, 32, 32, 32767, 128, 0, 960, 16384, 27, IBV_ATOMIC_HCA, IBV_TRANSPORT_IB, 400, 8u << 20, true, true,
	  true, false, true, true, true, false, false, false, false, true, false, true, false, false },
	{ "mlx5", 32768, 30, 30, 4194303, 16, 8388608, 65536, 32767, 31, IBV_ATOMIC_HCA, IBV_TRANSPORT_IB, 1024, 1u << 30,
	  true, true, true, true, true, true, true, true, true, true, true, true, true, true, false, true },
	{ "efa", 32768, 2, 1, 4194304, 0, 0, 0, 0, 0, IBV_ATOMIC_NONE, IBV_TRANSPORT_UNSPECIFIED, 32, 4096, false, false,
	  true, false, true, true, true, false, false, false, false, false, false, false, true, false },
};

static struct ibv_pd *pd;
static struct ibv_cq *cq;

/* `call` succeeds if the device supports it, and otherwise fails with `e`. */
#define HAS(there, call, e)                                                                                  \
	do {                                                                                                 \
		errno = 0;                                                                                   \
		bool done_ = (call);                                                                         \
		ENSURE(done_ == (there), "%s: %s", #call, done_ ? "works, but the device does not support it" : strerror(errno)); \
		ENSURE(done_ || errno == (e), "%s: %s", #call, strerror(errno));                             \
	} while (0)

static struct ibv_qp *with_caps(enum ibv_qp_type type, struct ibv_qp_cap cap)
{
	struct ibv_qp_init_attr init = { .qp_type = type, .send_cq = cq, .recv_cq = cq, .cap = cap };

	errno = 0;
	return new_qp(pd, &init);
}

static bool queue_of(int cqe)
{
	return new_cq(cqe, NULL) != NULL;
}

static bool shared(uint32_t wr, uint32_t sge)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = wr, .max_sge = sge } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);

	if (srq)
		keep(close_srq, srq, "shared receive queue");
	return srq;
}

static const char *limits(const struct device *d)
{
	enum ibv_qp_type type = d->rc ? IBV_QPT_RC : IBV_QPT_UD;
	const struct ibv_qp_cap most = { (uint32_t)d->qp_wr, (uint32_t)d->qp_wr, (uint32_t)d->sge, (uint32_t)d->sge,
					 d->inline_data };
	struct ibv_qp_cap more;
	size_t fields[] = { offsetof(struct ibv_qp_cap, max_send_wr), offsetof(struct ibv_qp_cap, max_recv_wr),
			    offsetof(struct ibv_qp_cap, max_send_sge), offsetof(struct ibv_qp_cap, max_recv_sge),
			    offsetof(struct ibv_qp_cap, max_inline_data) };

	ENSURE(device_attr.max_qp_wr == d->qp_wr && device_attr.max_sge == d->sge && device_attr.max_sge_rd == d->sge_rd,
	       "max_qp_wr %d, max_sge %d, max_sge_rd %d", device_attr.max_qp_wr, device_attr.max_sge,
	       device_attr.max_sge_rd);
	ENSURE(device_attr.max_cqe == d->cqe && device_attr.max_mw == d->mw, "max_cqe %d, max_mw %d", device_attr.max_cqe,
	       device_attr.max_mw);
	ENSURE(device_attr.max_srq == d->srq && device_attr.max_srq_wr == d->srq_wr && device_attr.max_srq_sge == d->srq_sge,
	       "max_srq %d, max_srq_wr %d, max_srq_sge %d", device_attr.max_srq, device_attr.max_srq_wr,
	       device_attr.max_srq_sge);
	ENSURE(device_attr.max_qp_rd_atom == d->rd_atom && device_attr.max_qp_init_rd_atom == d->rd_atom,
	       "max_qp_rd_atom %d", device_attr.max_qp_rd_atom);
	ENSURE(device_attr.atomic_cap == d->atomics, "atomic_cap %d", device_attr.atomic_cap);
	ENSURE((int)device->device->transport_type == d->transport, "transport %d", device->device->transport_type);
	ENSURE(port_attr.max_msg_sz == d->msg_sz, "max_msg_sz %u", port_attr.max_msg_sz);

	ENSURE(with_caps(type, most), "a queue pair with the maximum capacities: %s", strerror(errno));
	for (size_t i = 0; i < COUNT(fields); i++) {
		more = most;
		++*(uint32_t *)((char *)&more + fields[i]);
		ENSURE(!with_caps(type, more) && errno == EINVAL, "more than the maximum of capacity %zu: %s", i, strerror(errno));
	}
	HAS(true, queue_of(d->cqe), 0);
	HAS(false, queue_of(d->cqe + 1), EINVAL);
	if (!d->srq) {
		HAS(false, shared(1, 1), EOPNOTSUPP);
		return NULL;
	}
	HAS(true, shared((uint32_t)d->srq_wr, (uint32_t)d->srq_sge), 0);
	HAS(false, shared((uint32_t)d->srq_wr + 1, 1), EINVAL);
	HAS(false, shared(1, (uint32_t)d->srq_sge + 1), EINVAL);
	return NULL;
}

static bool window(void)
{
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);

	return mw && !ibv_dealloc_mw(mw);
}

static bool handle(void)
{
	struct ibv_ah_attr attr = address_of(&local_gid, 0, false);
	struct ibv_ah *ah = ibv_create_ah(pd, &attr);

	return ah && !ibv_destroy_ah(ah);
}

static bool thread_domain(void)
{
	struct ibv_td_init_attr attr = { 0 };
	struct ibv_td *td = ibv_alloc_td(device, &attr);

	return td && !ibv_dealloc_td(td);
}

static bool null_region(void)
{
	struct ibv_mr *mr = ibv_alloc_null_mr(pd);

	return mr && !ibv_dereg_mr(mr);
}

/* Whether completion counters work. The functions are looked up by name, because the headers may be too old to declare them. */
static bool counter(void)
{
	struct { uint32_t comp_mask, type, flags; } attr = { 0 };
	void *verbs = dlopen("libibverbs.so.1", RTLD_NOW);
	void *(*create)(struct ibv_context *, void *) = NULL;
	int (*destroy)(void *) = NULL;

	if (verbs) {
		create = (__typeof__(create))dlvsym(verbs, "ibv_create_comp_cntr", "IBVERBS_1.18");
		destroy = (__typeof__(destroy))dlvsym(verbs, "ibv_destroy_comp_cntr", "IBVERBS_1.18");
	}
	void *made = create && destroy ? create(device, &attr) : NULL;
	return made && !destroy(made);
}

static bool device_memory(void)
{
	struct ibv_alloc_dm_attr attr = { .length = 4096 };
	struct ibv_dm *dm = ibv_alloc_dm(device, &attr);

	return dm && !ibv_free_dm(dm);
}

static bool xrc_domain(void)
{
	struct ibv_xrcd_init_attr attr = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1,
					   .oflags = O_CREAT };
	struct ibv_xrcd *xrcd = ibv_open_xrcd(device, &attr);

	return xrcd && !ibv_close_xrcd(xrcd);
}

static bool extended_cq(void)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 4, .wc_flags = IBV_WC_EX_WITH_BYTE_LEN };
	struct ibv_cq_ex *ex = ibv_create_cq_ex(device, &attr);

	return ex && !ibv_destroy_cq(ibv_cq_ex_to_cq(ex));
}

static bool extended_qp(enum ibv_qp_type type, uint64_t ops)
{
	struct ibv_qp_init_attr_ex attr = {
		.qp_type = type, .send_cq = cq, .recv_cq = cq, .pd = pd, .cap = { 4, 4, 1, 1, 0 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = ops,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(device, &attr);

	return qp && !ibv_destroy_qp(qp);
}

static bool own_multicast_blocked(void)
{
	struct ibv_qp_init_attr_ex attr = {
		.qp_type = IBV_QPT_UD, .send_cq = cq, .recv_cq = cq, .pd = pd, .cap = { 4, 4, 1, 1, 0 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS, .create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(device, &attr);

	return qp && !ibv_destroy_qp(qp);
}

static uint8_t page[8192] __attribute__((aligned(4096)));

static bool region(unsigned int access)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, page, sizeof page, access);

	return mr && !ibv_dereg_mr(mr);
}

static bool reregistered(void)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, page, sizeof page, 0);
	int rc = ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE), e = errno;

	ibv_dereg_mr(mr);
	errno = e;
	return !rc;
}

static bool resized(void)
{
	int rc = ibv_resize_cq(cq, 2000);

	if (rc)
		errno = rc;
	return !rc;
}

static bool makes(enum ibv_qp_type type)
{
	return with_caps(type, (struct ibv_qp_cap){ 4, 4, 1, 1, 0 });
}

static const char *features(const struct device *d)
{
	struct ibv_device_attr_ex ex;
	enum ibv_qp_type type = d->rc ? IBV_QPT_RC : IBV_QPT_UD;

	HAS(d->rc, makes(IBV_QPT_RC), EOPNOTSUPP);
	HAS(d->uc, makes(IBV_QPT_UC), EOPNOTSUPP);
	HAS(d->ud, makes(IBV_QPT_UD), EOPNOTSUPP);
	HAS(d->xrc, makes(IBV_QPT_XRC_SEND), EOPNOTSUPP);
	HAS(d->xrc, xrc_domain(), EOPNOTSUPP);
	HAS(d->mw > 0, window(), EOPNOTSUPP);
	HAS(d->ud, handle(), EOPNOTSUPP);
	HAS(d->domains, thread_domain(), EOPNOTSUPP);
	HAS(d->null_mr, null_region(), EOPNOTSUPP);
	HAS(d->memory, device_memory(), EOPNOTSUPP);
	HAS(d->cq_ex, extended_cq(), EOPNOTSUPP);
	HAS(d->qp_ex, extended_qp(type, IBV_QP_EX_WITH_SEND), EOPNOTSUPP);
	HAS(d->qp_ex && d->mw > 0 && d->rc, extended_qp(type, IBV_QP_EX_WITH_BIND_MW), EOPNOTSUPP);
	HAS(d->blocks_own, own_multicast_blocked(), EOPNOTSUPP);
	HAS(d->counters, counter(), EOPNOTSUPP);
	HAS(d->resize_cq, resized(), EOPNOTSUPP);
	HAS(d->rereg, reregistered(), EOPNOTSUPP);
	HAS(d->odp, region(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND), d->rc ? EINVAL : EOPNOTSUPP);
	HAS(d->rc, region(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE), EOPNOTSUPP);
	HAS(true, region(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ), 0);
	ENSURE(!ibv_query_device_ex(device, NULL, &ex), "ibv_query_device_ex");
	ENSURE(ex.orig_attr.max_qp == device_attr.max_qp && ex.orig_attr.max_sge == device_attr.max_sge &&
		       ex.orig_attr.device_cap_flags == device_attr.device_cap_flags &&
		       ex.orig_attr.vendor_id == device_attr.vendor_id,
	       "ibv_query_device and ibv_query_device_ex differ");
	ENSURE(!!ex.odp_caps.general_caps == d->odp && !!ex.max_dm_size == d->memory && !!ex.completion_timestamp_mask == d->cq_ex,
	       "odp %#llx, memory %llu, timestamps %#llx", (unsigned long long)ex.odp_caps.general_caps,
	       (unsigned long long)ex.max_dm_size, (unsigned long long)ex.completion_timestamp_mask);
	return NULL;
}

static int try_post(struct ibv_qp *qp, enum ibv_wr_opcode opcode, int sges, struct ibv_mr *mr)
{
	struct ibv_sge sge[32];
	struct ibv_send_wr wr = send_wr(1, opcode, sge, sges), *bad;

	for (int i = 0; i < sges; i++)
		sge[i] = (struct ibv_sge){ (uintptr_t)page, 8, mr->lkey };
	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_CMP_AND_SWP) {
		wr.wr.atomic.remote_addr = (uintptr_t)page + 4096;
		wr.wr.atomic.rkey = mr->rkey;
	} else {
		wr.wr.rdma.remote_addr = (uintptr_t)page + 4096;
		wr.wr.rdma.rkey = mr->rkey;
	}
	return ibv_post_send(qp, &wr, &bad);
}

/* The functions `ibv_wr_*` refuse a message longer than the device allows. */
static const char *too_long(const struct device *d, const struct want *want)
{
	struct ibv_qp_init_attr_ex attr = {
		.qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq, .pd = pd, .cap = { 4, 4, 1, 1, 0 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(device, &attr);
	struct ibv_qp_ex *ex;
	int rc;

	ENSURE(qp, "ibv_create_qp_ex: %s", strerror(errno));
	keep(close_qp, qp, "queue pair");
	TRY(to_init(qp, want));
	TRY(to_rtr(qp, qp->qp_num, want));
	TRY(to_rts(qp, want));
	ex = ibv_qp_to_qp_ex(qp);
	ibv_wr_start(ex);
	ibv_wr_rdma_write(ex, 1, 0);
	ibv_wr_set_sge(ex, 1, (uintptr_t)page, (uint32_t)d->msg_sz + 1);
	rc = ibv_wr_complete(ex);
	ENSURE(rc == EINVAL, "a message of %u bytes and one: %s", (unsigned int)d->msg_sz, strerror(rc));
	return NULL;
}

/*
 * Which requests the queue pair accepts. It is connected to itself if the device supports connections without rdma_cm.
 */
static const char *operations(const struct device *d)
{
	const struct want want = { .rd_atomic = (uint8_t)d->rd_atom };
	const struct want more = { .rd_atomic = (uint8_t)(d->rd_atom + 1) };
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	int good = 0, rc;

	if (!d->rc)
		return NULL;
	qp = with_caps(IBV_QPT_RC, (struct ibv_qp_cap){ 16, 16, (uint32_t)d->sge, 1, 0 });
	ENSURE(qp, "ibv_create_qp: %s", strerror(errno));
	mr = new_mr(pd, page, sizeof page, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
						    IBV_ACCESS_REMOTE_ATOMIC);
	ENSURE(mr, "ibv_reg_mr: %s", strerror(errno));
	TRY(to_init(qp, &want));
	if (d->rd_atom < 255)
		ENSURE(to_rtr(qp, qp->qp_num, &more), "max_dest_rd_atomic of %d is accepted", d->rd_atom + 1);
	TRY(to_rtr(qp, qp->qp_num, &want));
	if (!d->connects) {
		ENSURE(to_rts(qp, &want), "the queue pair is connected without rdma_cm");
		return NULL;
	}
	ENSURE(to_rts(qp, &more), "max_rd_atomic of %d is accepted", d->rd_atom + 1);
	TRY(to_rts(qp, &want));
	rc = try_post(qp, IBV_WR_RDMA_READ, d->sge_rd, mr);
	ENSURE(!rc, "a Read: %s", strerror(rc));
	rc = try_post(qp, IBV_WR_ATOMIC_FETCH_AND_ADD, 1, mr);
	ENSURE(!rc, "an atomic operation: %s", strerror(rc));
	good = 2;
	for (int i = 0; i < good; i++)
		TRY(expect_status(cq, 1, IBV_WC_SUCCESS));
	return d->qp_ex ? too_long(d, &want) : NULL;
}

static const char *profile(size_t which)
{
	const struct device *d = &devices[which];

	setenv("ANYWARP_DEVICE_PROFILE", d->name, 1);
	TRY(open_device());
	pd = new_pd();
	cq = new_cq(1000, NULL);
	ENSURE(pd && cq, "%s", strerror(errno));
	TRY(limits(d));
	TRY(features(d));
	return operations(d);
}

/* Creates as many objects as the profile allows. Another one can be created only after one was destroyed. */
static const char *numbers(size_t arg)
{
	static struct ibv_ah *ahs[100];
	static struct ibv_qp *qps[256];
	bool efa = arg;
	struct ibv_ah_attr attr;

	setenv("ANYWARP_DEVICE_PROFILE", efa ? "efa" : "rxe", 1);
	TRY(open_device());
	pd = new_pd();
	cq = new_cq(100, NULL);
	ENSURE(pd && cq, "%s", strerror(errno));
	attr = address_of(&local_gid, 0, false);
	if (efa) {
		for (size_t i = 0; i < COUNT(qps); i++) {
			qps[i] = with_caps(IBV_QPT_UD, (struct ibv_qp_cap){ 4, 4, 1, 1, 0 });
			ENSURE(qps[i], "queue pair %zu: %s", i, strerror(errno));
		}
		HAS(false, makes(IBV_QPT_UD), ENOMEM);
		ENSURE(!close_now(qps[7]), "ibv_destroy_qp");
		HAS(true, makes(IBV_QPT_UD), 0);
		HAS(false, makes(IBV_QPT_UD), ENOMEM);
		return NULL;
	}
	for (size_t i = 0; i < COUNT(ahs); i++) {
		ahs[i] = ibv_create_ah(pd, &attr);
		ENSURE(ahs[i], "address handle %zu: %s", i, strerror(errno));
		keep(close_ah, ahs[i], "address handle");
	}
	HAS(false, handle(), ENOMEM);
	ENSURE(!close_now(ahs[7]), "ibv_destroy_ah");
	HAS(true, handle(), 0);
	return NULL;
}

static const char *unknown(size_t arg)
{
	struct ibv_device **list;
	int n;

	(void)arg;
	setenv("ANYWARP_DEVICE_PROFILE", "connectx-9", 1);
	list = ibv_get_device_list(&n);
	ENSURE(list && n == 1, "%d devices", n);
	errno = 0;
	ENSURE(!ibv_open_device(list[0]) && errno == EINVAL, "the device opens with an unknown profile: %s", strerror(errno));
	ibv_free_device_list(list);
	return NULL;
}

static int close_events(void *p)
{
	rdma_destroy_event_channel(p);
	return 0;
}

static int close_id(void *p)
{
	struct rdma_cm_id *id = p;

	if (id->qp)
		rdma_destroy_qp(id);
	return rdma_destroy_id(id);
}

static const char *event(struct rdma_event_channel *channel, enum rdma_cm_event_type wanted, struct rdma_cm_id **id)
{
	struct rdma_cm_event *e;
	enum rdma_cm_event_type type;

	TRY(readable(channel->fd, WAIT_MS));
	ENSURE(!rdma_get_cm_event(channel, &e), "rdma_get_cm_event: %s", strerror(errno));
	type = e->event;
	if (id)
		*id = e->id;
	rdma_ack_cm_event(e);
	ENSURE(type == wanted, "event %s, expected %s", rdma_event_str(type), rdma_event_str(wanted));
	return NULL;
}

/* With the siw profile, a queue pair that rdma_cm connects refuses unsupported requests and executes supported ones. */
static const char *siw_connected(size_t arg)
{
	struct rdma_event_channel *channel[2];
	struct rdma_cm_id *listener, *client, *server;
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 6, 6, 80 } }, again = init;
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4 };
	static const enum ibv_wr_opcode missing[] = { IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM,
						      IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP,
						      IBV_WR_LOCAL_INV };
	struct ibv_mr *mr;
	struct ibv_sge sge;

	(void)arg;
	setenv("ANYWARP_DEVICE_PROFILE", "siw", 1);
	for (int i = 0; i < 2; i++) {
		channel[i] = rdma_create_event_channel();
		ENSURE(channel[i], "rdma_create_event_channel: %s", strerror(errno));
		keep(close_events, channel[i], "event channel");
	}
	ENSURE(!rdma_create_id(channel[0], &listener, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(close_id, listener, "listener");
	ENSURE(!rdma_bind_addr(listener, (struct sockaddr *)&at), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(!rdma_listen(listener, 4), "rdma_listen: %s", strerror(errno));
	at.sin_port = rdma_get_src_port(listener);
	ENSURE(!rdma_create_id(channel[1], &client, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(close_id, client, "client");
	ENSURE(!rdma_resolve_addr(client, NULL, (struct sockaddr *)&at, 2000), "rdma_resolve_addr: %s", strerror(errno));
	TRY(event(channel[1], RDMA_CM_EVENT_ADDR_RESOLVED, NULL));
	ENSURE(!rdma_resolve_route(client, 2000), "rdma_resolve_route: %s", strerror(errno));
	TRY(event(channel[1], RDMA_CM_EVENT_ROUTE_RESOLVED, NULL));
	ENSURE(!rdma_create_qp(client, NULL, &init), "rdma_create_qp: %s", strerror(errno));
	ENSURE(!rdma_connect(client, &param), "rdma_connect: %s", strerror(errno));
	TRY(event(channel[0], RDMA_CM_EVENT_CONNECT_REQUEST, &server));
	keep(close_id, server, "server");
	ENSURE(!rdma_create_qp(server, NULL, &again), "rdma_create_qp: %s", strerror(errno));
	ENSURE(!rdma_accept(server, &param), "rdma_accept: %s", strerror(errno));
	TRY(event(channel[0], RDMA_CM_EVENT_ESTABLISHED, NULL));
	TRY(event(channel[1], RDMA_CM_EVENT_ESTABLISHED, NULL));
	mr = new_mr(client->pd, page, sizeof page, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
							  IBV_ACCESS_REMOTE_ATOMIC);
	ENSURE(mr, "ibv_reg_mr: %s", strerror(errno));
	for (size_t i = 0; i < COUNT(missing); i++)
		ENSURE(try_post(client->qp, missing[i], 1, mr) == EINVAL, "opcode %d is accepted", missing[i]);
	ENSURE(try_post(client->qp, IBV_WR_RDMA_READ, 2, mr) == EINVAL, "a Read with two elements is accepted");
	sge = (struct ibv_sge){ (uintptr_t)page, 64, mr->lkey };
	TRY(post_recv(server->qp, 1, &sge, 1));
	fill_pattern(page, 8, 3);
	ENSURE(!try_post(client->qp, IBV_WR_RDMA_WRITE, 6, mr), "a Write with six elements is refused");
	TRY(expect_status(client->send_cq, 1, IBV_WC_SUCCESS));
	for (size_t i = 0; i < 6; i++)
		TRY(same_pattern(page + 4096 + 8 * i, 8, 3));
	memset(page, 0, 8);
	ENSURE(!try_post(client->qp, IBV_WR_RDMA_READ, 1, mr), "a Read is refused");
	TRY(expect_status(client->send_cq, 1, IBV_WC_SUCCESS));
	TRY(same_pattern(page, 8, 3));
	ENSURE(!try_post(client->qp, IBV_WR_SEND, 1, mr), "a Send is refused");
	TRY(expect_status(client->send_cq, 1, IBV_WC_SUCCESS));
	return expect_status(server->recv_cq, 1, IBV_WC_SUCCESS);
}

static const struct test tests[] = {
	{ "none", profile, 0, 0, true },
	{ "siw", profile, 1, 0, true },
	{ "siw_connected", siw_connected, 0, 0, true },
	{ "rxe", profile, 2, 0, true },
	{ "rxe_address_handles", numbers, 0, 0, true },
	{ "mlx5", profile, 3, 0, true },
	{ "efa", profile, 4, 0, true },
	{ "efa_queue_pairs", numbers, 1, 0, true },
	{ "unknown", unknown, 0, 0, true },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
