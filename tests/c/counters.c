/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Completion counters of rdma-core 65: each completed request counts once, whether or not it creates a completion. The
 * functions are looked up by name and version, because the headers at compile time may be older.
 */
#include "ends.h"

#include <dlfcn.h>

struct counter { /* struct ibv_comp_cntr */
	struct ibv_context *context;
	uint32_t handle;
};

enum { WRS, BYTES };

struct init_attr { /* struct ibv_comp_cntr_init_attr */
	uint32_t comp_mask;
	unsigned int type;
	uint32_t flags;
};

struct attach_attr { /* struct ibv_qp_attach_comp_cntr_attr */
	uint32_t comp_mask;
	uint32_t op_mask;
};

struct caps { /* struct ibv_comp_cntr_caps */
	uint64_t max_value;
	uint32_t max_counters;
	uint32_t ops;
};

#define OP_SEND (1u << 0)
#define OP_RECV (1u << 1)
#define OP_READ (1u << 2)
#define OP_REMOTE_READ (1u << 3)
#define OP_WRITE (1u << 4)
#define OP_REMOTE_WRITE (1u << 5)
#define OP_LOCAL (OP_SEND | OP_RECV | OP_READ | OP_WRITE)

static struct counter *(*create)(struct ibv_context *, struct init_attr *);
static int (*destroy)(struct counter *);
static int (*set)(struct counter *, uint64_t);
static int (*set_err)(struct counter *, uint64_t);
static int (*inc)(struct counter *, uint64_t);
static int (*inc_err)(struct counter *, uint64_t);
static int (*read_done)(struct counter *, uint64_t *);
static int (*read_err)(struct counter *, uint64_t *);
static int (*attach)(struct ibv_qp *, struct counter *, struct attach_attr *);
static int (*query_caps)(struct ibv_context *, struct caps *, size_t);

static const char *find_all(void)
{
	void *verbs = dlopen("libibverbs.so.1", RTLD_NOW);
	const struct {
		void *to;
		const char *name;
	} all[] = {
		{ &create, "ibv_create_comp_cntr" },     { &destroy, "ibv_destroy_comp_cntr" },
		{ &set, "ibv_set_comp_cntr" },           { &set_err, "ibv_set_err_comp_cntr" },
		{ &inc, "ibv_inc_comp_cntr" },           { &inc_err, "ibv_inc_err_comp_cntr" },
		{ &read_done, "ibv_read_comp_cntr" },    { &read_err, "ibv_read_err_comp_cntr" },
		{ &attach, "ibv_qp_attach_comp_cntr" },  { &query_caps, "_ibv_query_comp_cntr_caps" },
	};

	ENSURE(verbs, "%s", dlerror());
	for (size_t i = 0; i < COUNT(all); i++) {
		void *found = dlvsym(verbs, all[i].name, "IBVERBS_1.18");

		ENSURE(found, "%s: %s", all[i].name, dlerror());
		memcpy(all[i].to, &found, sizeof found);
	}
	return open_device();
}

static int close_counter(void *p) { return destroy(p); }

static const char *new_counter(struct counter **c, unsigned int type)
{
	struct init_attr attr = { .type = type };

	errno = 0;
	*c = create(device, &attr);
	ENSURE(*c, "ibv_create_comp_cntr: %s", strerror(errno));
	keep(close_counter, *c, "counter");
	return NULL;
}

static int attach_to(struct ibv_qp *qp, struct counter *c, uint32_t ops)
{
	struct attach_attr attr = { .op_mask = ops };

	return attach(qp, c, &attr);
}

/*
 * Reads the counter until it has the expected values, and then checks that they do not increase further. Polls no completion
 * queue.
 */
static const char *counts(struct counter *c, uint64_t done, uint64_t failed)
{
	uint64_t end = now_ms() + WAIT_MS, quiet = 0, got = 0, bad = 0;

	do {
		ENSURE(!read_done(c, &got) && !read_err(c, &bad), "ibv_read_comp_cntr");
		if (got == done && bad == failed && !quiet)
			quiet = now_ms() + QUIET_MS / 4;
		ENSURE(!quiet || (got == done && bad == failed), "more is counted than was done: %llu and %llu",
		       (unsigned long long)got, (unsigned long long)bad);
		sched_yield();
	} while (now_ms() < (quiet ? quiet : end));
	ENSURE(quiet, "counted %llu and %llu in error, expected %llu and %llu", (unsigned long long)got,
	       (unsigned long long)bad, (unsigned long long)done, (unsigned long long)failed);
	return NULL;
}

/* Opens a connected pair whose counters are attached before it is connected. */
static const char *open_counted(struct pair *p, const struct want *w, struct counter *a[6], struct counter *b[6],
				unsigned int type, uint32_t ops)
{
	TRY(find_all());
	for (int i = 0; i < 6; i++) {
		if (ops & 1u << i) {
			TRY(new_counter(&a[i], type));
			TRY(new_counter(&b[i], type));
		}
	}
	TRY(open_end(&p->a, w));
	TRY(open_end(&p->b, w));
	for (int i = 0; i < 6; i++) {
		if (ops & 1u << i) {
			int rc = attach_to(p->a.qp, a[i], 1u << i);

			ENSURE(!rc, "op %d: %s", i, strerror(rc));
			rc = attach_to(p->b.qp, b[i], 1u << i);
			ENSURE(!rc, "op %d: %s", i, strerror(rc));
		}
	}
	return connect_ends(&p->a, &p->b, w);
}

enum { SEND, RECV, READ, REMOTE_READ, WRITE, REMOTE_WRITE };

/* Posts requests of each opcode, with lengths from one segment to many segments. Every third request is unsignaled. */
static const char *each_counts_once(size_t arg)
{
	static const size_t lengths[] = { 0, 8, 700, 4096, 70000 };
	unsigned int type = arg ? BYTES : WRS;
	struct counter *a[6] = { 0 }, *b[6] = { 0 };
	uint64_t n[6] = { 0 }, bytes[6] = { 0 }, signaled = 0, id = 0;
	struct region from = { 0 }, to = { 0 };
	struct ibv_sge sge, sink[3];
	struct ibv_wc wc;
	struct pair p;

	TRY(open_counted(&p, &(struct want){ 0 }, a, b, type, OP_LOCAL | OP_REMOTE_READ | OP_REMOTE_WRITE));
	TRY(new_region(&from, p.a.pd, 100000, ALL_ACCESS));
	TRY(new_region(&to, p.b.pd, 100000, ALL_ACCESS));
	for (int round = 0; round < 3; round++) {
		for (size_t l = 0; l < COUNT(lengths); l++) {
			static const enum ibv_wr_opcode ops[] = { IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE,
								  IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ };
			size_t len = lengths[l];

			for (size_t o = 0; o < COUNT(ops); o++, id++) {
				bool takes_receive = ops[o] != IBV_WR_RDMA_WRITE && ops[o] != IBV_WR_RDMA_READ;
				bool is_send = ops[o] == IBV_WR_SEND || ops[o] == IBV_WR_SEND_WITH_IMM;
				int own = is_send ? SEND : ops[o] == IBV_WR_RDMA_READ ? READ : WRITE;

				if (takes_receive) {
					sge = sge_of(&to, 0, to.len);
					TRY(post_recv(p.b.qp, id, &sge, 1));
					n[RECV]++;
					bytes[RECV] += len;
				}
				sge = sge_of(&from, 0, len);
				struct ibv_send_wr wr = rdma_wr(id, ops[o], &sge, 1, &to, 0);
				if (id % 3 == 0)
					wr.send_flags = 0;
				else
					signaled++;
				TRY(post(p.a.qp, &wr));
				n[own]++;
				bytes[own] += len;
			}
		}
	}
	/* A Read with several SGEs counts as one request here, and as one Read Request for each SGE at the target. */
	for (int i = 0; i < 3; i++)
		sink[i] = sge_of(&from, (size_t)i * 100, 100);
	struct ibv_send_wr read = rdma_wr(id++, IBV_WR_RDMA_READ, sink, 3, &to, 0);
	TRY(post(p.a.qp, &read));
	signaled++;
	n[READ]++;
	bytes[READ] += 300;
	n[REMOTE_READ] = n[READ] + 2;
	bytes[REMOTE_READ] = bytes[READ];
	n[REMOTE_WRITE] = n[WRITE];
	bytes[REMOTE_WRITE] = bytes[WRITE];
	/* Atomics have no bit in the attach mask, so they are not counted at the target. */
	sge = sge_of(&from, 0, 8);
	struct ibv_send_wr add = atomic_wr(id, IBV_WR_ATOMIC_FETCH_AND_ADD, &sge, &to, 1, 0);
	TRY(post(p.a.qp, &add));
	signaled++;

	/* No thread polls a queue: reading a counter drives the device. */
	const uint64_t *of = type == WRS ? n : bytes;
	TRY(counts(a[SEND], of[SEND], 0));
	TRY(counts(a[WRITE], of[WRITE], 0));
	TRY(counts(a[READ], of[READ], 0));
	TRY(counts(b[RECV], of[RECV], 0));
	TRY(counts(b[REMOTE_READ], of[REMOTE_READ], 0));
	TRY(counts(b[REMOTE_WRITE], of[REMOTE_WRITE], 0));
	/* Each event counts at one end only. */
	TRY(counts(a[RECV], 0, 0));
	TRY(counts(a[REMOTE_READ], 0, 0));
	TRY(counts(a[REMOTE_WRITE], 0, 0));
	TRY(counts(b[SEND], 0, 0));
	TRY(counts(b[WRITE], 0, 0));
	TRY(counts(b[READ], 0, 0));
	/* The completions are the same as without counters. */
	for (uint64_t i = 0; i < signaled; i++) {
		TRY(next_wc(p.a.scq, &wc, WAIT_MS));
		ENSURE(wc.status == IBV_WC_SUCCESS, "wr_id %llu: %s", (unsigned long long)wc.wr_id,
		       ibv_wc_status_str(wc.status));
	}
	for (uint64_t i = 0; i < n[RECV]; i++)
		TRY(next_wc(p.b.rcq, &wc, WAIT_MS));
	TRY(no_wc(p.a.scq, QUIET_MS));
	return no_wc(p.b.rcq, QUIET_MS);
}

/* A completion is counted before it can be polled. */
static const char *counted_before_polled(size_t arg)
{
	struct counter *a[6] = { 0 }, *b[6] = { 0 };
	struct region from = { 0 };
	struct pair p;

	(void)arg;
	TRY(open_counted(&p, &(struct want){ 0 }, a, b, WRS, OP_SEND | OP_RECV));
	TRY(new_region(&from, p.a.pd, 64, ALL_ACCESS));
	for (uint64_t i = 0; i < 200; i++) {
		uint64_t sent, received;
		struct ibv_sge sge = sge_of(&from, 0, 64);
		struct ibv_send_wr wr = send_wr(i, IBV_WR_SEND, &sge, 1);

		wr.send_flags |= IBV_SEND_INLINE;
		wr.num_sge = 0;
		TRY(post_recv(p.b.qp, i, NULL, 0));
		TRY(post(p.a.qp, &wr));
		TRY(expect_ok(p.b.rcq, i, IBV_WC_RECV, NULL));
		ENSURE(!read_done(b[RECV], &received) && received == i + 1, "%llu of %llu received",
		       (unsigned long long)received, (unsigned long long)i + 1);
		TRY(expect_ok(p.a.scq, i, IBV_WC_SEND, NULL));
		ENSURE(!read_done(a[SEND], &sent) && sent == i + 1, "%llu of %llu sent", (unsigned long long)sent,
		       (unsigned long long)i + 1);
	}
	return NULL;
}

/* Each failed or flushed request adds one to the error count, even if the counter counts bytes. */
static const char *errors(size_t arg)
{
	struct counter *a[6] = { 0 }, *b[6] = { 0 };
	struct region from = { 0 }, to = { 0 };
	struct pair p;

	TRY(open_counted(&p, &(struct want){ 0 }, a, b, arg ? BYTES : WRS, OP_LOCAL | OP_REMOTE_WRITE));
	TRY(new_region(&from, p.a.pd, 64, ALL_ACCESS));
	TRY(new_region(&to, p.b.pd, 64, ALL_ACCESS));
	for (uint64_t i = 0; i < 5; i++)
		TRY(post_recv(p.b.qp, i, NULL, 0));
	struct ibv_sge sge = sge_of(&from, 0, 64);
	struct ibv_send_wr good = rdma_wr(1, IBV_WR_RDMA_WRITE, &sge, 1, &to, 0);
	struct ibv_send_wr bad = rdma_wr(2, IBV_WR_RDMA_WRITE, &sge, 1, &to, 1);
	good.send_flags = bad.send_flags = 0;
	TRY(post(p.a.qp, &good));
	TRY(counts(a[WRITE], arg ? 64 : 1, 0));
	TRY(post(p.a.qp, &bad));
	TRY(expect_status(p.a.scq, 2, IBV_WC_REM_ACCESS_ERR));
	struct ibv_send_wr late = send_wr(3, IBV_WR_SEND, &sge, 1);
	TRY(post(p.a.qp, &late));
	TRY(expect_status(p.a.scq, 3, IBV_WC_WR_FLUSH_ERR));
	TRY(counts(a[WRITE], arg ? 64 : 1, 1));
	TRY(counts(a[SEND], 0, 1));
	TRY(counts(b[RECV], 0, 5));
	TRY(counts(b[REMOTE_WRITE], arg ? 64 : 1, 0));
	/* Discards the asynchronous events of the refused Write, which the next test would get. */
	struct ibv_async_event event;
	struct pollfd events = { .fd = device->async_fd, .events = POLLIN };
	while (poll(&events, 1, 0) == 1 && !ibv_get_async_event(device, &event))
		ibv_ack_async_event(&event);
	return NULL;
}

/* Outstanding requests of a destroyed queue pair never complete, and do not count. */
static const char *destroyed_is_not_an_error(size_t arg)
{
	struct counter *c;
	struct want w = { 0 };
	struct end e;

	(void)arg;
	TRY(find_all());
	TRY(new_counter(&c, WRS));
	TRY(open_end(&e, &w));
	ENSURE(!attach_to(e.qp, c, OP_RECV), "ibv_qp_attach_comp_cntr");
	TRY(to_init(e.qp, &w));
	TRY(post_recv(e.qp, 1, NULL, 0));
	ENSURE(destroy(c) == EBUSY, "a counter is destroyed while it is attached");
	close_now(e.qp);
	return counts(c, 0, 0);
}

/* Counts the requests of datagram queue pairs, and attaches one counter to several queue pairs. */
static const char *datagrams(size_t arg)
{
	struct want w = { .type = IBV_QPT_UD };
	struct counter *sent, *received, *c;
	struct region from = { 0 }, to = { 0 };
	struct ibv_sge sge;
	struct pair p;

	(void)arg;
	TRY(find_all());
	TRY(new_counter(&sent, WRS));
	TRY(new_counter(&received, BYTES));
	TRY(new_counter(&c, WRS));
	TRY(open_end(&p.a, &w));
	TRY(open_end(&p.b, &w));
	ENSURE(!attach_to(p.a.qp, sent, OP_SEND) && !attach_to(p.b.qp, sent, OP_SEND),
	       "one counter cannot be attached to two queue pairs");
	ENSURE(!attach_to(p.b.qp, received, OP_RECV), "ibv_qp_attach_comp_cntr");
	ENSURE(attach_to(p.a.qp, c, OP_REMOTE_WRITE) == EOPNOTSUPP, "a counter of remote operations is attached to UD");
	ENSURE(attach_to(p.a.qp, c, OP_READ | OP_REMOTE_READ) == EOPNOTSUPP, "a counter of remote operations is attached to UD");
	TRY(connect_ends(&p.a, &p.b, &w));
	TRY(new_region(&from, p.a.pd, 100, ALL_ACCESS));
	TRY(new_region(&to, p.b.pd, 4096, ALL_ACCESS));
	struct ibv_ah_attr attr = address_of(&local_gid, port_attr.lid, false);
	struct ibv_ah *ah = ibv_create_ah(p.a.pd, &attr);
	ENSURE(ah, "ibv_create_ah: %s", strerror(errno));
	keep(close_ah, ah, "address handle");
	for (uint64_t i = 0; i < 10; i++) {
		sge = sge_of(&to, 0, to.len);
		TRY(post_recv(p.b.qp, i, &sge, 1));
	}
	for (uint64_t i = 0; i < 10; i++) {
		sge = sge_of(&from, 0, 100);
		struct ibv_send_wr wr = send_wr(i, IBV_WR_SEND, &sge, 1);

		if (i % 2)
			wr.send_flags = 0;
		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = p.b.qp->qp_num;
		wr.wr.ud.remote_qkey = QKEY;
		TRY(post(p.a.qp, &wr));
	}
	TRY(counts(sent, 10, 0));
	/* As in the completions, the length includes the 40 bytes of the GRH. */
	return counts(received, 10 * 140, 0);
}

/* Successful receives count even if the completion queue has no room for them. */
static const char *without_room(size_t arg)
{
	enum { MANY = 100, IGNORE_OVERRUN = 1 << 1, MASK_FLAGS = 1 << 0 };
	struct ibv_cq_init_attr_ex attr = { .cqe = 1, .comp_mask = MASK_FLAGS, .flags = IGNORE_OVERRUN };
	struct want w = { .recv_wr = MANY };
	struct counter *c;
	struct ibv_cq_ex *small;
	struct end a, b;

	(void)arg;
	TRY(find_all());
	TRY(new_counter(&c, WRS));
	TRY(open_end(&a, &w));
	small = ibv_create_cq_ex(device, &attr);
	ENSURE(small, "ibv_create_cq_ex: %s", strerror(errno));
	keep(close_cq, small, "completion queue");
	b = (struct end){ .pd = new_pd(), .scq = new_cq(1, NULL), .rcq = ibv_cq_ex_to_cq(small) };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .send_cq = b.scq, .recv_cq = b.rcq,
					 .cap = { .max_send_wr = 1, .max_recv_wr = MANY, .max_recv_sge = 1 } };
	b.qp = new_qp(b.pd, &init);
	ENSURE(b.qp, "ibv_create_qp: %s", strerror(errno));
	ENSURE(!attach_to(b.qp, c, OP_RECV), "ibv_qp_attach_comp_cntr");
	TRY(connect_ends(&a, &b, &w));
	for (uint64_t i = 0; i < MANY; i++)
		TRY(post_recv(b.qp, i, NULL, 0));
	for (uint64_t i = 0; i < MANY; i++) {
		struct ibv_send_wr wr = send_wr(i, IBV_WR_SEND, NULL, 0);

		wr.send_flags = 0;
		TRY(post(a.qp, &wr));
	}
	return counts(c, MANY, 0);
}

static const char *rules(size_t arg)
{
	struct caps caps = { 0 }, part = { .ops = 77 };
	struct counter *c, *d;
	struct want w = { 0 };
	struct pair p;
	uint64_t value = 1;

	(void)arg;
	TRY(find_all());
	ENSURE(!query_caps(device, &caps, sizeof caps), "ibv_query_comp_cntr_caps");
	ENSURE(caps.max_value == UINT64_MAX && caps.max_counters >= 1024 &&
		       caps.ops == (OP_LOCAL | OP_REMOTE_READ | OP_REMOTE_WRITE),
	       "max_value %llu, max_counters %u, ops %#x", (unsigned long long)caps.max_value, caps.max_counters, caps.ops);
	/* The structure of an older header is shorter. */
	ENSURE(!query_caps(device, &part, 12) && part.max_counters == caps.max_counters && part.ops == 77,
	       "a structure of 12 bytes is not filled, or more is written than it has");

	errno = 0;
	ENSURE(!create(device, &(struct init_attr){ .type = 2 }) && errno == EOPNOTSUPP, "type 2: %s", strerror(errno));
	errno = 0;
	ENSURE(!create(device, &(struct init_attr){ .flags = 1 }) && errno == EOPNOTSUPP, "flags: %s", strerror(errno));
	errno = 0;
	ENSURE(!create(device, &(struct init_attr){ .comp_mask = 1 }) && errno == EOPNOTSUPP, "mask: %s", strerror(errno));
	errno = 0;
	ENSURE(!create(device, NULL) && errno == EINVAL, "no attributes: %s", strerror(errno));

	TRY(new_counter(&c, WRS));
	TRY(new_counter(&d, WRS));
	ENSURE(c->context == device && c->handle != d->handle, "the counter has another context, or the handle of another counter");
	ENSURE(!read_done(c, &value) && value == 0, "a new counter has %llu", (unsigned long long)value);
	ENSURE(!set(c, UINT64_MAX) && !inc(c, 3) && !set_err(c, 7) && !inc_err(c, 5), "setting or incrementing fails");
	TRY(counts(c, 2, 12));
	TRY(counts(d, 0, 0));

	TRY(open_end(&p.a, &w));
	TRY(open_end(&p.b, &w));
	ENSURE(attach_to(p.a.qp, c, 0) == EINVAL, "a counter of no operation is attached");
	ENSURE(attach_to(p.a.qp, c, 1u << 6) == EOPNOTSUPP, "a counter of an unknown operation is attached");
	ENSURE(attach(p.a.qp, c, &(struct attach_attr){ .comp_mask = 1, .op_mask = 1 }) == EOPNOTSUPP,
	       "an unknown comp_mask is accepted");
	ENSURE(!attach_to(p.a.qp, c, OP_SEND | OP_WRITE), "a counter cannot be attached in RESET");
	ENSURE(attach_to(p.a.qp, d, OP_WRITE | OP_READ) == EBUSY, "two counters are attached for one operation");
	ENSURE(attach_to(p.a.qp, c, OP_SEND) == EBUSY, "a counter is attached twice for one operation");
	TRY(to_init(p.a.qp, &w));
	ENSURE(!attach_to(p.a.qp, d, OP_READ), "a counter cannot be attached in INIT");
	TRY(to_init(p.b.qp, &w));
	TRY(to_rtr(p.a.qp, p.b.qp->qp_num, &w));
	ENSURE(attach_to(p.a.qp, c, OP_RECV) == EINVAL, "a counter is attached in RTR");
	TRY(to_rtr(p.b.qp, p.a.qp->qp_num, &w));
	TRY(to_rts(p.a.qp, &w));
	ENSURE(attach_to(p.a.qp, c, OP_RECV) == EINVAL, "a counter is attached in RTS");
	ENSURE(destroy(c) == EBUSY && destroy(d) == EBUSY, "a counter is destroyed while it is attached");
	/* In RESET the counter stays attached. */
	TRY(to_state(p.a.qp, IBV_QPS_RESET));
	ENSURE(destroy(c) == EBUSY, "a counter is destroyed after the reset of its queue pair, which it is still attached to");
	ENSURE(attach_to(p.a.qp, d, OP_SEND) == EBUSY, "the operation has no counter any more after a reset");
	close_now(p.a.qp);
	close_now(c);
	close_now(d);
	return NULL;
}

static const struct test tests[] = {
	{ "each_counts_once", each_counts_once, 0, 0, false },
	{ "each_counts_its_bytes", each_counts_once, 1, 0, false },
	{ "counted_before_polled", counted_before_polled, 0, 0, false },
	{ "errors", errors, 0, 0, false },
	{ "errors_of_bytes", errors, 1, 0, false },
	{ "destroyed_is_not_an_error", destroyed_is_not_an_error, 0, 0, false },
	{ "datagrams", datagrams, 0, 0, false },
	{ "without_room", without_room, 0, 0, false },
	{ "rules", rules, 0, 0, false },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
