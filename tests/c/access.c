/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Operations that must be refused: access flags, bounds, protection domains, states, attribute masks and invalid
 * arguments. Each test expects the errno or the completion status that the man pages document, and checks that nothing
 * else happens.
 */
#include "ends.h"

#include <sys/mman.h>

static const struct want usual = { 0 };

/* ---------------------------------------------------------------- access flags */

enum operation { WRITE, READ, ATOMIC };

static const char *const operation_names[] = { "Write", "Read", "atomic" };
static const unsigned int flag_of[] = { IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_ATOMIC };

static struct ibv_send_wr operation_wr(enum operation op, struct ibv_sge *sge, const struct region *target, size_t at)
{
	struct ibv_send_wr wr;

	if (op == ATOMIC) {
		wr = atomic_wr(1, IBV_WR_ATOMIC_FETCH_AND_ADD, sge, target, 1, 0);
		wr.wr.atomic.remote_addr += at;
		return wr;
	}
	return rdma_wr(1, op == WRITE ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, sge, 1, target, at);
}

/* Runs one operation on a region and a queue pair with the given flags, and sets the status of its completion. */
static const char *try_operation(enum operation op, unsigned int mr_access, unsigned int qp_access,
				 enum ibv_wc_status *status)
{
	struct want w = { .access = qp_access ? qp_access : NO_ACCESS };
	struct region mine, theirs;
	struct ibv_sge sge;
	struct ibv_send_wr wr;
	struct ibv_wc wc;
	struct pair p;

	TRY(open_pair(&p, &w));
	TRY(new_region(&mine, p.a.pd, 8, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, p.b.pd, 8, mr_access));
	memset(mine.at, 0x11, 8);
	sge = sge_of(&mine, 0, 8);
	wr = operation_wr(op, &sge, &theirs, 0);
	TRY(post(p.a.qp, &wr));
	TRY(next_wc(p.a.scq, &wc, WAIT_MS));
	*status = wc.status;
	if (wc.status != IBV_WC_SUCCESS) {
		TRY(all_bytes(theirs.at, 8, FRESH, "forbidden target"));
		TRY(all_bytes(mine.at, 8, 0x11, "target of a refused operation"));
	}
	return NULL;
}

/*
 * An operation succeeds if the region and the queue pair have only the flag of this operation. It fails if the region or the queue
 * pair has all flags except that one.
 */
static const char *remote_flags(size_t op)
{
	const unsigned int all = ALL_ACCESS, local = IBV_ACCESS_LOCAL_WRITE;
	enum ibv_wc_status status;

	TRY(try_operation((enum operation)op, local | flag_of[op], flag_of[op], &status));
	ENSURE(status == IBV_WC_SUCCESS, "%s with its own flag only: %s", operation_names[op],
	       ibv_wc_status_str(status));
	TRY(try_operation((enum operation)op, all & ~flag_of[op], all, &status));
	ENSURE(status == IBV_WC_REM_ACCESS_ERR, "%s without its flag on the memory: %s", operation_names[op],
	       ibv_wc_status_str(status));
	TRY(try_operation((enum operation)op, all, all & ~(flag_of[op] | local), &status));
	ENSURE(status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR,
	       "%s without its flag on the queue pair: %s", operation_names[op], ibv_wc_status_str(status));
	TRY(try_operation((enum operation)op, local, all, &status));
	ENSURE(status == IBV_WC_REM_ACCESS_ERR, "%s on memory for local use: %s", operation_names[op],
	       ibv_wc_status_str(status));
	return NULL;
}

/* The receive buffer is not locally writable: the receive fails, and so does the send. */
static const char *receive_into_read_only(size_t arg)
{
	struct region src, dst;
	struct ibv_sge from, to;
	struct ibv_send_wr wr;
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&src, p.a.pd, 64, 0));
	TRY(new_region(&dst, p.b.pd, 64, 0));
	memset(src.at, 0x22, 64);
	from = sge_of(&src, 0, 64);
	to = sge_of(&dst, 0, 64);
	TRY(post_recv(p.b.qp, 1, &to, 1));
	wr = send_wr(2, IBV_WR_SEND, &from, 1);
	TRY(post(p.a.qp, &wr));
	TRY(expect_status(p.b.rcq, 1, IBV_WC_LOC_PROT_ERR));
	TRY(expect_status(p.a.scq, 2, IBV_WC_REM_OP_ERR));
	return all_bytes(dst.at, 64, FRESH, "read-only receive buffer");
}

/* Only the memory that a message fills has to be in a region: adapters check no more of a receive. */
static const char *receive_beyond_region(size_t arg)
{
	struct region src, dst;
	struct ibv_sge from, to[2];
	struct ibv_send_wr wr;
	struct ibv_wc wc;
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&src, p.a.pd, 64, 0));
	TRY(new_region(&dst, p.b.pd, 8, IBV_ACCESS_LOCAL_WRITE));
	memset(src.at, 0x22, 64);
	/* An element that is longer than its region, and one with a wrong key behind one that the message fills. */
	to[0] = sge_of(&dst, 0, 64);
	TRY(post_recv(p.b.qp, 1, to, 1));
	to[0] = sge_of(&dst, 0, 8);
	to[1] = (struct ibv_sge){ to[0].addr, 8, ~to[0].lkey };
	TRY(post_recv(p.b.qp, 2, to, 2));
	from = sge_of(&src, 0, 8);
	for (uint64_t id = 1; id <= 2; id++) {
		wr = send_wr(id, IBV_WR_SEND, &from, 1);
		TRY(post(p.a.qp, &wr));
		TRY(expect_ok(p.b.rcq, id, IBV_WC_RECV, &wc));
		ENSURE(wc.byte_len == 8, "%u bytes", wc.byte_len);
		TRY(expect_ok(p.a.scq, id, IBV_WC_SEND, NULL));
	}
	to[0] = sge_of(&dst, 0, 64);
	TRY(post_recv(p.b.qp, 3, to, 1));
	from = sge_of(&src, 0, 9);
	wr = send_wr(3, IBV_WR_SEND, &from, 1);
	TRY(post(p.a.qp, &wr));
	TRY(expect_status(p.b.rcq, 3, IBV_WC_LOC_PROT_ERR));
	TRY(expect_status(p.a.scq, 3, IBV_WC_REM_OP_ERR));
	return guards_untouched(&dst);
}

static const char *read_into_read_only(size_t arg)
{
	struct region sink, source;
	struct ibv_sge to;
	struct ibv_send_wr wr, *bad;
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&sink, p.a.pd, 64, 0));
	TRY(new_region(&source, p.b.pd, 64, IBV_ACCESS_REMOTE_READ));
	memset(source.at, 0x33, 64);
	to = sge_of(&sink, 0, 64);
	wr = rdma_wr(1, IBV_WR_RDMA_READ, &to, 1, &source, 0);
	if (ibv_post_send(p.a.qp, &wr, &bad) == 0)
		TRY(expect_status(p.a.scq, 1, IBV_WC_LOC_PROT_ERR));
	return all_bytes(sink.at, 64, FRESH, "read-only sink");
}

/* A key is valid only in its own protection domain, locally and remotely. */
static const char *other_pd_local(size_t arg)
{
	struct region src;
	struct ibv_pd *other;
	struct ibv_sge from;
	struct ibv_send_wr wr;
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &usual));
	other = new_pd();
	ENSURE(other, "ibv_alloc_pd: %s", strerror(errno));
	TRY(new_region(&src, other, 64, 0));
	TRY(post_recv(p.b.qp, 1, NULL, 0));
	from = sge_of(&src, 0, 64);
	wr = send_wr(2, IBV_WR_SEND, &from, 1);
	TRY(post(p.a.qp, &wr));
	return expect_status(p.a.scq, 2, IBV_WC_LOC_PROT_ERR);
}

static const char *other_pd_remote(size_t op)
{
	struct region mine, theirs;
	struct ibv_pd *other;
	struct ibv_sge sge;
	struct ibv_send_wr wr;
	struct pair p;

	TRY(open_pair(&p, &usual));
	other = new_pd();
	ENSURE(other, "ibv_alloc_pd: %s", strerror(errno));
	TRY(new_region(&mine, p.a.pd, 8, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, other, 8, ALL_ACCESS));
	sge = sge_of(&mine, 0, 8);
	wr = operation_wr((enum operation)op, &sge, &theirs, 0);
	TRY(post(p.a.qp, &wr));
	TRY(expect_status(p.a.scq, 1, IBV_WC_REM_ACCESS_ERR));
	return all_bytes(theirs.at, 8, FRESH, "memory of another protection domain");
}

/* ---------------------------------------------------------------- bounds */

struct bound {
	int64_t from; /* offset of the first byte */
	uint32_t len;
	bool allowed;
};

static const char *one_bound(enum operation op, const struct bound *b)
{
	struct region mine, theirs;
	struct ibv_sge sge;
	struct ibv_send_wr wr;
	struct ibv_wc wc;
	struct pair p;

	TRY(open_pair(&p, &usual));
	TRY(new_region(&mine, p.a.pd, 256, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, p.b.pd, 128, ALL_ACCESS));
	sge = sge_of(&mine, 0, b->len);
	wr = operation_wr(op, &sge, &theirs, (size_t)b->from);
	TRY(post(p.a.qp, &wr));
	TRY(next_wc(p.a.scq, &wc, WAIT_MS));
	ENSURE(wc.status == (b->allowed ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR), "%s of %u bytes at %lld: %s",
	       operation_names[op], b->len, (long long)b->from, ibv_wc_status_str(wc.status));
	return guards_untouched(&theirs);
}

static const char *remote_bounds(size_t op)
{
	static const struct bound bounds[] = {
		{ 0, 128, true }, { 127, 1, true }, { 128, 1, false }, { 127, 2, false }, { 0, 129, false },
		{ -1, 1, false }, { -1, 64, false }, { 128, 128, false },
	};

	for (size_t i = 0; i < COUNT(bounds); i++)
		TRY(one_bound((enum operation)op, &bounds[i]));
	return NULL;
}

/* Address plus length exceeds the address space. */
static const char *remote_wraps(size_t op)
{
	struct region mine, theirs;
	struct ibv_sge sge;
	struct ibv_send_wr wr;
	struct pair p;

	TRY(open_pair(&p, &usual));
	TRY(new_region(&mine, p.a.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, p.b.pd, 64, ALL_ACCESS));
	sge = sge_of(&mine, 0, 64);
	wr = operation_wr((enum operation)op, &sge, &theirs, 0);
	wr.wr.rdma.remote_addr = UINT64_MAX - 7;
	TRY(post(p.a.qp, &wr));
	return expect_status(p.a.scq, 1, IBV_WC_REM_ACCESS_ERR);
}

/* With a length of 0, neither key nor address is checked. */
static const char *zero_length(size_t op)
{
	struct ibv_send_wr wr = send_wr(1, op == WRITE ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, NULL, 0);
	struct pair p;

	TRY(open_pair(&p, &usual));
	wr.wr.rdma.remote_addr = 0x1234;
	wr.wr.rdma.rkey = 0xdeadbeef;
	TRY(post(p.a.qp, &wr));
	return expect_status(p.a.scq, 1, IBV_WC_SUCCESS);
}

static const char *atomic_alignment(size_t offset)
{
	struct region mine, theirs;
	struct ibv_sge sge;
	struct ibv_send_wr wr, *bad;
	struct ibv_wc wc;
	struct pair p;

	TRY(open_pair(&p, &usual));
	TRY(new_region(&mine, p.a.pd, 8, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, p.b.pd, 64, ALL_ACCESS));
	sge = sge_of(&mine, 0, 8);
	wr = operation_wr(ATOMIC, &sge, &theirs, offset);
	if (ibv_post_send(p.a.qp, &wr, &bad) == EINVAL)
		return all_bytes(theirs.at, 64, FRESH, "misaligned target");
	TRY(next_wc(p.a.scq, &wc, WAIT_MS));
	ENSURE(wc.status == IBV_WC_REM_INV_REQ_ERR || wc.status == IBV_WC_REM_ACCESS_ERR, "atomic at offset %zu: %s",
	       offset, ibv_wc_status_str(wc.status));
	return all_bytes(theirs.at, 64, FRESH, "misaligned target");
}

/* ---------------------------------------------------------------- deregistration and ibv_rereg_mr */

/* After ibv_dereg_mr returns, no late Write changes the memory. */
static const char *dereg_ends_access(size_t rounds)
{
	for (size_t i = 0; i < rounds; i++) {
		struct region mine, theirs;
		struct ibv_sge sge;
		struct ibv_send_wr wr;
		struct pair p;
		struct ibv_wc wc;
		size_t ended = 0;

		TRY(open_pair(&p, &usual));
		TRY(new_region(&mine, p.a.pd, 65536, 0));
		TRY(new_region(&theirs, p.b.pd, 65536, ALL_ACCESS));
		memset(mine.at, 0x44, 65536);
		sge = sge_of(&mine, 0, 65536);
		for (uint64_t k = 0; k < 64; k++) {
			wr = rdma_wr(k, IBV_WR_RDMA_WRITE, &sge, 1, &theirs, 0);
			TRY(post(p.a.qp, &wr));
		}
		for (size_t k = 0; k < i * 50; k++)
			sched_yield();
		ENSURE(!close_now(theirs.mr), "ibv_dereg_mr");
		memset(theirs.at, 0x55, 65536);
		for (; ended < 64; ended++)
			TRY(next_wc(p.a.scq, &wc, WAIT_MS));
		sleep_ms(20);
		TRY(all_bytes(theirs.at, 65536, 0x55, "memory that is no longer registered"));
		close_all();
	}
	return NULL;
}

static const char *old_key(size_t arg)
{
	struct region mine, theirs;
	struct ibv_mr *again;
	struct ibv_sge sge;
	struct ibv_send_wr wr;
	struct pair p;
	uint32_t rkey;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&mine, p.a.pd, 64, 0));
	TRY(new_region(&theirs, p.b.pd, 64, ALL_ACCESS));
	rkey = theirs.mr->rkey;
	ENSURE(!close_now(theirs.mr), "ibv_dereg_mr");
	again = new_mr(p.b.pd, theirs.at, 64, ALL_ACCESS);
	ENSURE(again, "ibv_reg_mr: %s", strerror(errno));
	ENSURE(again->rkey != rkey, "the next region has the key of the old one");
	theirs.mr = again;
	sge = sge_of(&mine, 0, 64);
	wr = rdma_wr(1, IBV_WR_RDMA_WRITE, &sge, 1, &theirs, 0);
	wr.wr.rdma.rkey = rkey;
	TRY(post(p.a.qp, &wr));
	return expect_status(p.a.scq, 1, IBV_WC_REM_ACCESS_ERR);
}

/* ibv_rereg_mr moves a region to other memory and removes rights. */
static const char *rereg(size_t arg)
{
	struct region mine, theirs, other;
	struct ibv_sge sge;
	struct ibv_send_wr wr;
	struct pair p;
	int rc;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&mine, p.a.pd, 64, 0));
	TRY(new_region(&theirs, p.b.pd, 64, ALL_ACCESS));
	TRY(new_region(&other, p.b.pd, 64, 0));
	memset(mine.at, 0x66, 64);
	rc = ibv_rereg_mr(theirs.mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, other.at, 64, 0);
	if (rc && (errno == EOPNOTSUPP || errno == ENOSYS))
		SKIP("the device has no ibv_rereg_mr");
	ENSURE(!rc, "ibv_rereg_mr returns %d: %s", rc, strerror(errno));
	sge = sge_of(&mine, 0, 64);
	wr = rdma_wr(1, IBV_WR_RDMA_WRITE, &sge, 1, &theirs, 0);
	wr.wr.rdma.remote_addr = (uintptr_t)other.at;
	wr.wr.rdma.rkey = theirs.mr->rkey;
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 1, IBV_WC_RDMA_WRITE, NULL));
	TRY(post_recv(p.b.qp, 2, NULL, 0));
	wr = send_wr(3, IBV_WR_SEND, NULL, 0);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.b.rcq, 2, IBV_WC_RECV, NULL));
	TRY(expect_ok(p.a.scq, 3, IBV_WC_SEND, NULL));
	TRY(all_bytes(other.at, 64, 0x66, "new place"));
	TRY(all_bytes(theirs.at, 64, FRESH, "old place"));
	rc = ibv_rereg_mr(theirs.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE);
	ENSURE(!rc, "ibv_rereg_mr returns %d: %s", rc, strerror(errno));
	memset(other.at, 0, 64);
	wr = rdma_wr(4, IBV_WR_RDMA_WRITE, &sge, 1, &theirs, 0);
	wr.wr.rdma.remote_addr = (uintptr_t)other.at;
	wr.wr.rdma.rkey = theirs.mr->rkey;
	TRY(post(p.a.qp, &wr));
	TRY(expect_status(p.a.scq, 4, IBV_WC_REM_ACCESS_ERR));
	return all_bytes(other.at, 64, 0, "memory whose write access was removed");
}

/* Writes to a region and checks that the Write succeeds or is refused, as `good` says. */
static const char *write_into(struct pair *p, const struct region *mine, struct ibv_mr *mr, void *at, bool good)
{
	struct ibv_sge sge = sge_of(mine, 0, 64);
	struct ibv_send_wr wr = send_wr(1, IBV_WR_RDMA_WRITE, &sge, 1);

	wr.wr.rdma.remote_addr = (uintptr_t)at;
	wr.wr.rdma.rkey = mr->rkey;
	TRY(post(p->a.qp, &wr));
	return expect_status(p->a.scq, 1, good ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR);
}

/* ibv_rereg_mr moves a region to another protection domain, alone or with all other changes. The keys stay the same. */
static const char *rereg_domain(size_t everything)
{
	struct region mine, theirs, other;
	struct pair one, two;
	uint32_t lkey, rkey;
	int rc;

	TRY(open_pair(&one, &usual));
	TRY(open_pair(&two, &usual));
	TRY(new_region(&mine, two.a.pd, 64, 0));
	TRY(new_region(&other, two.b.pd, 64, 0));
	TRY(new_region(&theirs, one.b.pd, 64, everything ? 0 : ALL_ACCESS));
	lkey = theirs.mr->lkey;
	rkey = theirs.mr->rkey;
	memset(mine.at, 0x67, 64);
	/* If the reference counts are wrong, the protection domains cannot be freed after the test. */
	if (everything)
		rc = ibv_rereg_mr(theirs.mr, IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD |
				  IBV_REREG_MR_CHANGE_ACCESS, two.b.pd, other.at, 64, ALL_ACCESS);
	else
		rc = ibv_rereg_mr(theirs.mr, IBV_REREG_MR_CHANGE_PD, two.b.pd, NULL, 0, 0);
	if (rc && (errno == EOPNOTSUPP || errno == ENOSYS))
		SKIP("the device has no ibv_rereg_mr");
	ENSURE(!rc, "ibv_rereg_mr returns %d: %s", rc, strerror(errno));
	ENSURE(theirs.mr->pd == two.b.pd, "the region has its old domain after ibv_rereg_mr");
	ENSURE(theirs.mr->lkey == lkey && theirs.mr->rkey == rkey, "ibv_rereg_mr has changed the keys of the region");
	ENSURE(!everything || (theirs.mr->addr == other.at && theirs.mr->length == 64),
	       "the region has its old address or length after ibv_rereg_mr");
	TRY(write_into(&two, &mine, theirs.mr, everything ? other.at : theirs.at, true));
	TRY(all_bytes(everything ? other.at : theirs.at, 64, 0x67, "the new memory"));
	TRY(all_bytes(everything ? theirs.at : other.at, 64, FRESH, "the old memory"));
	/* A queue pair of the old domain can no longer access the region. */
	TRY(new_region(&mine, one.a.pd, 64, 0));
	return write_into(&one, &mine, theirs.mr, theirs.at, false);
}

/* If ibv_rereg_mr refuses the arguments, the region is unchanged. */
static const char *rereg_refused(size_t arg)
{
	const int all = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
	struct region mine, theirs;
	struct ibv_mr *null;
	struct pair p;
	int rc;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&mine, p.a.pd, 64, 0));
	TRY(new_region(&theirs, p.b.pd, 64, ALL_ACCESS));
	memset(mine.at, 0x68, 64);
#define REFUSES(flags, pd, at, len, access) do { \
		errno = 0; \
		rc = ibv_rereg_mr(theirs.mr, flags, pd, at, len, access); \
		ENSURE(rc && errno, "ibv_rereg_mr(" #flags ", " #pd ", " #at ", " #len ", " #access ") returns %d", rc); \
	} while (0)
	REFUSES(0, NULL, NULL, 0, 0);
	REFUSES(all + 1, p.b.pd, theirs.at, 64, 0);
	REFUSES(IBV_REREG_MR_CHANGE_TRANSLATION, NULL, theirs.at, 0, 0);
	REFUSES(IBV_REREG_MR_CHANGE_TRANSLATION, NULL, (void *)4096, 64, 0); /* not mapped */
	REFUSES(IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE); /* remote write needs local write */
	REFUSES(IBV_REREG_MR_CHANGE_TRANSLATION, NULL, theirs.at, 32, ALL_ACCESS); /* the rights do not change */
	ENSURE(rc == IBV_REREG_MR_ERR_INPUT && errno == EINVAL, "ibv_rereg_mr returns %d: %s", rc, strerror(errno));
	ENSURE(theirs.mr->addr == theirs.at && theirs.mr->length == 64 && theirs.mr->pd == p.b.pd,
	       "a refused ibv_rereg_mr has changed the region");
	TRY(write_into(&p, &mine, theirs.mr, theirs.at, true));
	TRY(all_bytes(theirs.at, 64, 0x68, "the region"));
	null = ibv_alloc_null_mr(p.a.pd);
	if (!null)
		return NULL; /* optional */
	keep(close_mr, null, "null region");
	rc = ibv_rereg_mr(null, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, mine.at, 64, 0);
	ENSURE(rc == IBV_REREG_MR_ERR_INPUT, "ibv_rereg_mr of a null region returns %d", rc);
	return NULL;
}

/* ibv_rereg_mr refuses a region of device memory and the handle of an imported region. */
static const char *rereg_of_others_refused(size_t arg)
{
	struct ibv_alloc_dm_attr attr = { .length = 64 };
	struct ibv_mr *mr, *imported;
	struct ibv_dm *dm;
	struct region mine;
	struct pair p;
	int rc;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&mine, p.a.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	imported = ibv_import_mr(p.a.pd, mine.mr->handle);
	if (imported) { /* optional */
		rc = ibv_rereg_mr(imported, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0);
		ENSURE(rc == IBV_REREG_MR_ERR_INPUT && errno == EINVAL, "ibv_rereg_mr of an imported region returns %d: %s", rc,
		       strerror(errno));
		ibv_unimport_mr(imported);
	}
	dm = ibv_alloc_dm(device, &attr);
	if (!dm)
		return NULL; /* optional */
	mr = ibv_reg_dm_mr(p.b.pd, dm, 0, 64, IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	ENSURE(mr, "ibv_reg_dm_mr: %s", strerror(errno));
	rc = ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, mine.at, 64, 0);
	ENSURE(rc == IBV_REREG_MR_ERR_INPUT && errno == EINVAL, "ibv_rereg_mr of device memory returns %d: %s", rc, strerror(errno));
	ENSURE(!ibv_dereg_mr(mr) && !ibv_free_dm(dm), "the device memory cannot be freed");
	return NULL;
}

/* ---------------------------------------------------------------- states and masks */

/* The attributes that ibv_modify_qp(3) requires for a transition of one type of queue pair. */
struct step {
	enum ibv_qp_type type;
	enum ibv_qp_state from, to;
	int required;
};

#define CONNECTED_RTR (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)

static const struct step steps[] = {
	{ IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT,
	  IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS },
	{ IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_RTR, CONNECTED_RTR | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER },
	{ IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_RTS,
	  IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
		  IBV_QP_MAX_QP_RD_ATOMIC },
	{ IBV_QPT_UC, IBV_QPS_RESET, IBV_QPS_INIT,
	  IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS },
	{ IBV_QPT_UC, IBV_QPS_INIT, IBV_QPS_RTR, CONNECTED_RTR },
	{ IBV_QPT_UC, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN },
	{ IBV_QPT_UD, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY },
	{ IBV_QPT_UD, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QP_STATE },
	{ IBV_QPT_UD, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN },
};

/* Values that are valid for every transition. */
static struct ibv_qp_attr good_values(enum ibv_qp_state state, uint32_t dest)
{
	return (struct ibv_qp_attr){
		.qp_state = state, .port_num = PORT, .qkey = QKEY, .path_mtu = IBV_MTU_1024, .dest_qp_num = dest,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12, .ah_attr = address_of(&local_gid, 0, false),
		.timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
}

/* A transition fails if any required attribute is missing, and succeeds with the required attributes only. */
static const char *required_masks(size_t type)
{
	struct want w = { .type = (enum ibv_qp_type)type };
	struct end e, peer;

	TRY(open_device());
	TRY(open_end(&e, &w));
	TRY(open_end(&peer, &w));
	for (size_t i = 0; i < COUNT(steps); i++) {
		const struct step *s = &steps[i];
		struct ibv_qp_attr attr = good_values(s->to, peer.qp->qp_num);

		if (s->type != w.type)
			continue;
		for (int bit = 1; bit <= IBV_QP_DEST_QPN; bit <<= 1) {
			int rc;

			if (!(s->required & bit) || bit == IBV_QP_STATE)
				continue;
			rc = ibv_modify_qp(e.qp, &attr, s->required & ~bit);
			ENSURE(rc == EINVAL, "state %d to %d without bit %#x returns %d, expected EINVAL", s->from, s->to,
			       (unsigned int)bit, rc);
			TRY(state_is(e.qp, s->from));
		}
		ENSURE(!ibv_modify_qp(e.qp, &attr, s->required), "state %d to %d with all required attributes: %s", s->from, s->to,
		       strerror(errno));
		TRY(state_is(e.qp, s->to));
		ENSURE(e.qp->state == s->to, "qp->state is %d, expected %d", e.qp->state, s->to);
	}
	return NULL;
}

/* Transitions that the state machine does not have are refused, and so are attributes that a transition does not take. */
static const char *forbidden_steps(size_t type)
{
	static const struct {
		enum ibv_qp_state at, to;
		int mask;
	} forbidden[] = {
		{ IBV_QPS_RESET, IBV_QPS_RTR, IBV_QP_STATE },
		{ IBV_QPS_RESET, IBV_QPS_RTS, IBV_QP_STATE },
		{ IBV_QPS_INIT, IBV_QPS_RTS, IBV_QP_STATE },
		{ IBV_QPS_RTR, IBV_QPS_INIT, IBV_QP_STATE },
		{ IBV_QPS_RTS, IBV_QPS_INIT, IBV_QP_STATE },
		{ IBV_QPS_RTS, IBV_QPS_RTR, IBV_QP_STATE },
		{ IBV_QPS_INIT, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_SQ_PSN },
		{ IBV_QPS_INIT, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_TIMEOUT },
	};
	struct want w = { .type = (enum ibv_qp_type)type };
	struct end e, peer;

	TRY(open_device());
	TRY(open_end(&e, &w));
	TRY(open_end(&peer, &w));
	for (size_t i = 0; i <= 3; i++) {
		const enum ibv_qp_state here = (enum ibv_qp_state)(IBV_QPS_RESET + i);

		for (size_t k = 0; k < COUNT(forbidden); k++) {
			struct ibv_qp_attr attr = good_values(forbidden[k].to, peer.qp->qp_num);
			int rc;

			if (forbidden[k].at != here)
				continue;
			rc = ibv_modify_qp(e.qp, &attr, forbidden[k].mask);
			ENSURE(rc == EINVAL, "state %d to %d with mask %#x returns %d, expected EINVAL", here,
			       forbidden[k].to, (unsigned int)forbidden[k].mask, rc);
			TRY(state_is(e.qp, here));
		}
		for (size_t k = 0; k < COUNT(steps); k++) {
			struct ibv_qp_attr attr = good_values(steps[k].to, peer.qp->qp_num);

			if (steps[k].type == w.type && steps[k].from == here)
				ENSURE(!ibv_modify_qp(e.qp, &attr, steps[k].required), "state %d to %d: %s", here,
				       steps[k].to, strerror(errno));
		}
	}
	TRY(to_state(e.qp, IBV_QPS_ERR));
	TRY(state_is(e.qp, IBV_QPS_ERR));
	return to_state(e.qp, IBV_QPS_RESET);
}

static const char *bad_values(size_t arg)
{
	struct ibv_qp_attr attr;
	struct end e;
	int rc;

	(void)arg;
	TRY(open_device());
	TRY(open_end(&e, &usual));
	attr = good_values(IBV_QPS_INIT, 0);
	attr.port_num = 2;
	rc = ibv_modify_qp(e.qp, &attr, steps[0].required);
	ENSURE(rc == EINVAL, "port 2 of a device with one port: ibv_modify_qp returns %d", rc);
	TRY(to_init(e.qp, &usual));
	attr = good_values(IBV_QPS_RTR, e.qp->qp_num);
	attr.max_dest_rd_atomic = 255;
	rc = ibv_modify_qp(e.qp, &attr, steps[1].required);
	ENSURE(rc == EINVAL, "max_dest_rd_atomic 255 returns %d, the device has %d", rc, device_attr.max_qp_rd_atom);
	return state_is(e.qp, IBV_QPS_INIT);
}

/* ibv_query_qp returns the values of ibv_modify_qp and ibv_create_qp. */
static const char *query(size_t arg)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct pair p;
	int rc;

	(void)arg;
	TRY(open_pair(&p, &usual));
	rc = ibv_query_qp(p.a.qp, &attr, 0x1fffff, &init);
	ENSURE(!rc, "ibv_query_qp: %s", strerror(rc));
	ENSURE(attr.qp_state == IBV_QPS_RTS, "state %d", attr.qp_state);
	ENSURE(attr.dest_qp_num == p.b.qp->qp_num, "dest_qp_num %#x", attr.dest_qp_num);
	ENSURE(attr.path_mtu == IBV_MTU_1024, "path_mtu %d", attr.path_mtu);
	ENSURE(attr.timeout == 14 && attr.retry_cnt == 7 && attr.rnr_retry == 7 && attr.min_rnr_timer == 12,
	       "timeout %u retry_cnt %u rnr_retry %u min_rnr_timer %u", attr.timeout, attr.retry_cnt, attr.rnr_retry,
	       attr.min_rnr_timer);
	ENSURE(attr.max_rd_atomic == 4 && attr.max_dest_rd_atomic == 4, "max_rd_atomic %u max_dest_rd_atomic %u",
	       attr.max_rd_atomic, attr.max_dest_rd_atomic);
	ENSURE(attr.ah_attr.is_global && !memcmp(&attr.ah_attr.grh.dgid, &local_gid, 16),
	       "ibv_query_qp returns another address vector");
	ENSURE(attr.port_num == PORT, "port_num %u", attr.port_num);
	ENSURE((attr.qp_access_flags & 0xf & ~IBV_ACCESS_LOCAL_WRITE) ==
		       (ALL_ACCESS & 0xf & ~IBV_ACCESS_LOCAL_WRITE), "qp_access_flags %#x", attr.qp_access_flags);
	ENSURE(init.qp_type == IBV_QPT_RC && init.send_cq == p.a.scq && init.recv_cq == p.a.rcq && !init.srq,
	       "ibv_query_qp returns other creation attributes");
	ENSURE(init.cap.max_send_wr >= 256 && init.cap.max_recv_wr >= 256 && init.cap.max_send_sge >= 4,
	       "max_send_wr %u max_recv_wr %u max_send_sge %u", init.cap.max_send_wr, init.cap.max_recv_wr,
	       init.cap.max_send_sge);
	return NULL;
}

/* Posting fails in states that do not accept work requests. */
static const char *posting_too_early(size_t arg)
{
	struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, NULL, 0), *bad_send = NULL;
	struct ibv_recv_wr rr = { .wr_id = 2 }, *bad_recv = NULL;
	struct end e;
	int rc;

	(void)arg;
	TRY(open_device());
	TRY(open_end(&e, &usual));
	rc = ibv_post_recv(e.qp, &rr, &bad_recv);
	ENSURE(rc == EINVAL && bad_recv == &rr, "ibv_post_recv in RESET returns %d", rc);
	rc = ibv_post_send(e.qp, &wr, &bad_send);
	ENSURE(rc == EINVAL && bad_send == &wr, "ibv_post_send in RESET returns %d", rc);
	TRY(to_init(e.qp, &usual));
	rc = ibv_post_recv(e.qp, &rr, &bad_recv);
	ENSURE(!rc, "ibv_post_recv in INIT returns %d", rc);
	rc = ibv_post_send(e.qp, &wr, &bad_send);
	ENSURE(rc == EINVAL, "ibv_post_send in INIT returns %d", rc);
	TRY(to_rtr(e.qp, e.qp->qp_num, &usual));
	rc = ibv_post_send(e.qp, &wr, &bad_send);
	ENSURE(rc == EINVAL, "ibv_post_send in RTR returns %d", rc);
	return no_wc(e.scq, 5);
}

/* ---------------------------------------------------------------- arguments */

static const char *full_queues(size_t arg)
{
	struct want w = { .send_wr = 4, .recv_wr = 4, .cq_depth = 4096, .rnr_retry = 7 };
	struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, NULL, 0), *bad_send = NULL;
	struct ibv_recv_wr rr = { .wr_id = 2 }, *bad_recv = NULL;
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	uint32_t posted = 0;
	struct pair p;
	int rc;

	(void)arg;
	TRY(open_pair(&p, &w));
	rc = ibv_query_qp(p.a.qp, &attr, IBV_QP_CAP, &init);
	ENSURE(!rc, "ibv_query_qp: %s", strerror(rc));
	while (posted < 5000 && !(rc = ibv_post_recv(p.a.qp, &rr, &bad_recv)))
		posted++;
	ENSURE(rc == ENOMEM && bad_recv == &rr, "receive %u returns %d", posted, rc);
	ENSURE(posted >= init.cap.max_recv_wr, "only %u receives of %u fit", posted, init.cap.max_recv_wr);
	posted = 0;
	while (posted < 5000 && !(rc = ibv_post_send(p.a.qp, &wr, &bad_send))) /* no receive is posted, so the sends stay in the queue */
		posted++;
	ENSURE(rc == ENOMEM && bad_send == &wr, "send %u returns %d", posted, rc);
	ENSURE(posted >= init.cap.max_send_wr, "only %u sends of %u fit", posted, init.cap.max_send_wr);
	return NULL;
}

/* bad_wr names the first bad request of a chain; the requests before it are carried out. */
static const char *bad_in_a_chain(size_t arg)
{
	struct ibv_send_wr wr[3], *bad = NULL;
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct ibv_sge many[256];
	struct region src;
	struct pair p;
	int rc;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&src, p.a.pd, 64, 0));
	for (size_t i = 0; i < COUNT(many); i++)
		many[i] = sge_of(&src, 0, 8);
	for (uint64_t i = 0; i < 3; i++) {
		TRY(post_recv(p.b.qp, 10 + i, NULL, 0));
		wr[i] = send_wr(i, IBV_WR_SEND, NULL, 0);
	}
	wr[0].next = &wr[1];
	wr[1].next = &wr[2];
	wr[1].sg_list = many;
	rc = ibv_query_qp(p.a.qp, &attr, IBV_QP_CAP, &init);
	ENSURE(!rc && init.cap.max_send_sge < COUNT(many), "ibv_query_qp: %s, max_send_sge %u", strerror(rc),
	       init.cap.max_send_sge);
	wr[1].num_sge = (int)init.cap.max_send_sge + 1;
	rc = ibv_post_send(p.a.qp, wr, &bad);
	ENSURE(rc == EINVAL || rc == ENOMEM, "ibv_post_send returns %d", rc);
	ENSURE(bad == &wr[1], "bad_wr is request %td", bad ? bad - wr : -1);
	TRY(expect_ok(p.a.scq, 0, IBV_WC_SEND, NULL));
	TRY(expect_ok(p.b.rcq, 10, IBV_WC_RECV, NULL));
	return no_wc(p.b.rcq, QUIET_MS);
}

static const char *inline_too_long(size_t arg)
{
	struct want w = { .inline_data = 16 };
	static uint8_t bytes[1 << 20];
	struct ibv_sge sge = { .addr = (uintptr_t)bytes };
	struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, &sge, 1), *bad = NULL;
	struct pair p;
	int rc;

	(void)arg;
	TRY(open_pair(&p, &w));
	sge.length = p.a.inline_data + 1;
	wr.send_flags |= IBV_SEND_INLINE;
	rc = ibv_post_send(p.a.qp, &wr, &bad);
	ENSURE((rc == EINVAL || rc == ENOMEM) && bad == &wr, "%u inline bytes of %u give %d", sge.length,
	       p.a.inline_data, rc);
	return no_wc(p.a.scq, 5);
}

/* An opcode that the type of queue pair does not support is refused or completes with an error. */
static const char *wrong_opcode(size_t type)
{
	static const struct {
		enum ibv_qp_type type;
		enum ibv_wr_opcode opcode;
	} wrong[] = {
		{ IBV_QPT_UC, IBV_WR_RDMA_READ },
		{ IBV_QPT_UC, IBV_WR_ATOMIC_FETCH_AND_ADD },
		{ IBV_QPT_UD, IBV_WR_RDMA_WRITE },
		{ IBV_QPT_UD, IBV_WR_RDMA_READ },
		{ IBV_QPT_UD, IBV_WR_ATOMIC_CMP_AND_SWP },
		{ IBV_QPT_RC, (enum ibv_wr_opcode)200 },
	};
	struct want w = { .type = (enum ibv_qp_type)type };
	struct region mine;
	struct pair p;

	TRY(open_device());
	TRY(open_end(&p.a, &w));
	TRY(open_end(&p.b, &w));
	TRY(connect_ends(&p.a, &p.b, &w));
	TRY(new_region(&mine, p.a.pd, 8, ALL_ACCESS));
	for (size_t i = 0; i < COUNT(wrong); i++) {
		struct ibv_sge sge = sge_of(&mine, 0, 8);
		struct ibv_send_wr wr = rdma_wr(1, wrong[i].opcode, &sge, 1, &mine, 0), *bad = NULL;
		int rc;

		if (wrong[i].type != w.type)
			continue;
		rc = ibv_post_send(p.a.qp, &wr, &bad);
		if (rc == 0) {
			struct ibv_wc wc;

			TRY(next_wc(p.a.scq, &wc, WAIT_MS));
			ENSURE(wc.status != IBV_WC_SUCCESS, "opcode %d succeeds", wrong[i].opcode);
			continue;
		}
		ENSURE((rc == EINVAL || rc == EOPNOTSUPP || rc == ENOSYS) && bad == &wr, "opcode %d returns %d",
		       wrong[i].opcode, rc);
	}
	return no_wc(p.a.scq, 5);
}

static const char *too_large(size_t arg)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC };
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 16, .max_sge = 1 } };
	const struct ibv_qp_cap small = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 };
	struct ibv_pd *pd;
	struct ibv_cq *cq;

	(void)arg;
	TRY(open_device());
	pd = new_pd();
	cq = new_cq(16, NULL);
	ENSURE(pd && cq, "a small queue: %s", strerror(errno));
	ENSURE(!ibv_create_cq(device, 0, NULL, NULL, 0), "ibv_create_cq accepts a depth of 0");
	ENSURE(errno == EINVAL, "ibv_create_cq with a depth of 0: %s", strerror(errno));
	ENSURE(!ibv_create_cq(device, device_attr.max_cqe + 1, NULL, NULL, 0), "ibv_create_cq accepts max_cqe + 1");
	ENSURE(errno == EINVAL, "ibv_create_cq with a depth of max_cqe + 1: %s", strerror(errno));
	ENSURE(device->num_comp_vectors == sysconf(_SC_NPROCESSORS_ONLN), "%d completion vectors", device->num_comp_vectors);
	for (int vector = 0; vector < device->num_comp_vectors; vector++) {
		struct ibv_cq *of_vector = ibv_create_cq(device, 1, NULL, NULL, vector);

		ENSURE(of_vector && !ibv_destroy_cq(of_vector), "a completion queue of vector %d: %s", vector, strerror(errno));
	}
	ENSURE(!ibv_create_cq(device, 1, NULL, NULL, -1), "ibv_create_cq accepts vector -1");
	ENSURE(!ibv_create_cq(device, 1, NULL, NULL, device->num_comp_vectors),
	       "ibv_create_cq accepts a vector beyond the last one");
	ENSURE(errno == EINVAL, "ibv_create_cq with a vector beyond the last one: %s", strerror(errno));
	init.send_cq = init.recv_cq = cq;
#define REFUSED(field, value)                                                                    \
	do {                                                                                     \
		init.cap = small;                                                                \
		init.cap.field = (uint32_t)(value);                                              \
		errno = 0;                                                                       \
		ENSURE(!ibv_create_qp(pd, &init), "ibv_create_qp accepts " #field " %u",           \
		       init.cap.field);                                                          \
		ENSURE(errno == EINVAL || errno == ENOMEM, #field ": %s", strerror(errno));      \
	} while (0)
	REFUSED(max_send_wr, device_attr.max_qp_wr + 1);
	REFUSED(max_recv_wr, device_attr.max_qp_wr + 1);
	REFUSED(max_send_sge, device_attr.max_sge + 1);
	REFUSED(max_recv_sge, device_attr.max_sge + 1);
	REFUSED(max_inline_data, 1u << 30);
	init.cap = small;
	init.qp_type = (enum ibv_qp_type)77;
	ENSURE(!ibv_create_qp(pd, &init), "ibv_create_qp accepts type 77");
	srq.attr.max_wr = (uint32_t)device_attr.max_srq_wr + 1;
	ENSURE(!ibv_create_srq(pd, &srq), "ibv_create_srq accepts max_srq_wr + 1");
	ENSURE(errno == EINVAL || errno == ENOMEM, "ibv_create_srq: %s", strerror(errno));
	return NULL;
}

static const char *bad_regions(size_t arg)
{
	static uint8_t bytes[64];
	const size_t part = 64 * 1024; /* a multiple of every page size */
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	uint8_t *at;

	(void)arg;
	TRY(open_device());
	pd = new_pd();
	ENSURE(pd, "ibv_alloc_pd: %s", strerror(errno));
	mr = ibv_reg_mr(pd, bytes, sizeof bytes, IBV_ACCESS_REMOTE_WRITE);
	ENSURE(!mr && errno == EINVAL, "ibv_reg_mr with remote but not local write: %s", strerror(errno));
	mr = ibv_reg_mr(pd, bytes, sizeof bytes, IBV_ACCESS_REMOTE_ATOMIC);
	ENSURE(!mr && errno == EINVAL, "ibv_reg_mr with remote atomics but not local write: %s", strerror(errno));
	mr = ibv_reg_mr(pd, (void *)(uintptr_t)(UINTPTR_MAX - 10), 4096, IBV_ACCESS_LOCAL_WRITE);
	ENSURE(!mr && (errno == EINVAL || errno == EFAULT || errno == ENOMEM),
	       "ibv_reg_mr across the end of the address space: %s", strerror(errno));
	mr = ibv_reg_mr(pd, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING);
	ENSURE(mr, "ibv_reg_mr with an optional flag: %s", strerror(errno));
	ENSURE(!ibv_dereg_mr(mr), "ibv_dereg_mr");
	mr = ibv_reg_mr(pd, bytes, 1, 0);
	ENSURE(mr && mr->length == 1 && mr->addr == bytes && mr->pd == pd,
	       "ibv_reg_mr returns no region, or one with other fields");
	ENSURE(!ibv_dereg_mr(mr), "ibv_dereg_mr");
	at = mmap(NULL, 3 * part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ENSURE(at != MAP_FAILED && !munmap(at + part, part), "mmap: %s", strerror(errno));
	errno = 0;
	ENSURE(!ibv_reg_mr(pd, at, 3 * part, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT, "a range with a hole is registered: %s",
	       strerror(errno));
	mr = ibv_reg_mr(pd, at + 2 * part, part, IBV_ACCESS_LOCAL_WRITE);
	ENSURE(mr, "ibv_reg_mr of memory after the hole: %s", strerror(errno));
	ENSURE(!ibv_dereg_mr(mr), "ibv_dereg_mr");
	munmap(at, 3 * part);
	return NULL;
}

/* Objects in use cannot be destroyed. */
static const char *busy(size_t arg)
{
	struct want w = { .channels = true, .srq = true };
	struct region r;
	struct end e;
	int rc;

	(void)arg;
	TRY(open_device());
	TRY(open_end(&e, &w));
	TRY(new_region(&r, e.pd, 8, 0));
	rc = ibv_dealloc_pd(e.pd);
	ENSURE(rc == EBUSY, "ibv_dealloc_pd of a used domain returns %d", rc);
	rc = ibv_destroy_cq(e.scq);
	ENSURE(rc == EBUSY, "ibv_destroy_cq of a used queue returns %d", rc);
	rc = ibv_destroy_srq(e.srq);
	ENSURE(rc == EBUSY, "ibv_destroy_srq of a used queue returns %d", rc);
	rc = ibv_destroy_comp_channel(e.channel);
	ENSURE(rc == EBUSY, "ibv_destroy_comp_channel of a used channel returns %d", rc);
	return NULL;
}

/* A queue pair that is attached to a multicast group is not destroyed. */
static const char *busy_in_a_group(size_t arg)
{
	const struct want w = { .type = IBV_QPT_UD };
	union ibv_gid gid = { .raw = { [10] = 0xff, [11] = 0xff, 239, 12, 13, 14 } };
	struct end e;
	int rc;

	(void)arg;
	TRY(open_device());
	TRY(open_end(&e, &w));
	TRY(to_init(e.qp, &w));
	for (int twice = 0; twice < 2; twice++) {
		rc = ibv_attach_mcast(e.qp, &gid, 0);
		ENSURE(!rc, "ibv_attach_mcast: %s", strerror(rc));
	}
	rc = ibv_destroy_qp(e.qp);
	if (!rc)
		forget(e.qp);
	ENSURE(rc == EBUSY, "ibv_destroy_qp of a member of a group returns %d", rc);
	rc = ibv_detach_mcast(e.qp, &gid, 0);
	ENSURE(!rc, "ibv_detach_mcast: %s", strerror(rc));
	rc = ibv_detach_mcast(e.qp, &gid, 0);
	ENSURE(rc == EINVAL, "ibv_detach_mcast of a queue pair that is no member returns %d", rc);
	return NULL;
}

static const char *ports_and_tables(size_t arg)
{
	struct ibv_ah_attr attr;
	struct ibv_port_attr port;
	union ibv_gid gid;
	struct ibv_pd *pd;
	__be16 pkey;
	int rc;

	(void)arg;
	TRY(open_device());
	pd = new_pd();
	ENSURE(pd, "ibv_alloc_pd: %s", strerror(errno));
	rc = ibv_query_port(device, 0, &port);
	ENSURE(rc == EINVAL, "port 0 returns %d", rc);
	rc = ibv_query_port(device, 2, &port);
	ENSURE(rc == EINVAL, "port 2 returns %d", rc);
	ENSURE(ibv_query_gid(device, PORT, port_attr.gid_tbl_len, &gid), "ibv_query_gid returns a GID beyond the table");
	ENSURE(ibv_query_gid(device, PORT, -1, &gid), "ibv_query_gid accepts the index -1");
	ENSURE(!ibv_query_pkey(device, PORT, 0, &pkey) && pkey == htons(0xffff), "P_Key 0 is %#x", ntohs(pkey));
	ENSURE(ibv_query_pkey(device, PORT, port_attr.pkey_tbl_len, &pkey), "ibv_query_pkey returns a P_Key beyond the table");
	attr = address_of(&local_gid, 0, false);
	attr.port_num = 2;
	ENSURE(!ibv_create_ah(pd, &attr), "ibv_create_ah accepts port 2");
	attr = address_of(&local_gid, 0, true);
	attr.dlid = 0;
	ENSURE(!ibv_create_ah(pd, &attr), "ibv_create_ah accepts no GID and no LID");
	return NULL;
}

/* ---------------------------------------------------------------- completion queues */

/* Polls a queue that has overflowed until a poll fails. Sets the number of completions that it still had. */
static const char *polled_until_error(struct ibv_cq *cq, struct ibv_cq_ex *extended, int *polled)
{
	struct ibv_poll_cq_attr attr = { 0 };
	struct ibv_wc wc;
	int rc;

	*polled = 0;
	if (!extended) {
		while ((rc = ibv_poll_cq(cq, 1, &wc)) == 1)
			++*polled;
		ENSURE(rc < 0, "ibv_poll_cq of a queue that has overflowed returns %d", rc);
		return NULL;
	}
	for (rc = ibv_start_poll(extended, &attr); !rc; rc = ibv_next_poll(extended))
		++*polled;
	if (*polled)
		ibv_end_poll(extended);
	ENSURE(rc == EIO, "%s of a queue that has overflowed: %s", *polled ? "ibv_next_poll" : "ibv_start_poll", strerror(rc));
	return NULL;
}

/* After an overflow, the completions that the queue still has are polled without an error. Then each poll reports the failure. */
static const char *overflow_reported(struct ibv_cq *cq, struct ibv_cq_ex *extended)
{
	int polled;

	TRY(polled_until_error(cq, extended, &polled));
	ENSURE(polled >= cq->cqe, "%d completions of a full queue of %d are polled", polled, cq->cqe);
	sleep_ms(QUIET_MS); /* polling has made room for the last completions of the queue pair that failed */
	TRY(polled_until_error(cq, extended, &polled));
	for (int i = 0; i < 3; i++) {
		TRY(polled_until_error(cq, extended, &polled));
		ENSURE(!polled, "%d more completions", polled);
	}
	return NULL;
}

/* More completions than the queue holds: the queue fails with an asynchronous event. */
static const char *cq_overflow(size_t is_extended)
{
	struct ibv_cq_init_attr_ex tiny_init = { .cqe = 1, .wc_flags = IBV_WC_EX_WITH_BYTE_LEN };
	struct ibv_cq_ex *extended = NULL;
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = 512, .max_recv_wr = 512, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, NULL, 0), *bad;
	struct ibv_cq *tiny;
	struct end a = { 0 }, b;
	int sent = 0;

	TRY(open_device());
	TRY(open_end(&b, &(struct want){ .recv_wr = 512 }));
	a.pd = new_pd();
	if (is_extended) {
		extended = ibv_create_cq_ex(device, &tiny_init);
		if (!extended && (errno == EOPNOTSUPP || errno == ENOSYS))
			SKIP("the device has no extended completion queues");
		tiny = extended ? ibv_cq_ex_to_cq(extended) : NULL;
		if (tiny)
			keep(close_cq, tiny, "completion queue");
	} else {
		tiny = new_cq(1, NULL);
	}
	ENSURE(a.pd && tiny, "a queue of one: %s", strerror(errno));
	a.rcq = new_cq(16, NULL);
	init.send_cq = tiny;
	init.recv_cq = a.rcq;
	a.qp = new_qp(a.pd, &init);
	ENSURE(a.qp, "ibv_create_qp: %s", strerror(errno));
	TRY(connect_ends(&a, &b, &usual));
	ENSURE(tiny->cqe < 256, "a queue of one has %d entries", tiny->cqe);
	for (; sent < tiny->cqe + 2; sent++)
		TRY(post_recv(b.qp, 1, NULL, 0));
	for (int i = 0; i < sent && !ibv_post_send(a.qp, &wr, &bad); i++)
		;
	TRY(async_event(IBV_EVENT_CQ_ERR, tiny));
	/* What a poll of such a queue returns depends on the device. */
	if (strncmp(ibv_get_device_name(device->device), "anywarp", 7) != 0)
		return NULL;
	return overflow_reported(tiny, extended);
}

static const char *resize(size_t arg)
{
	struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, NULL, 0);
	struct pair p;
	int rc;

	(void)arg;
	TRY(open_pair(&p, &usual));
	for (uint64_t i = 0; i < 8; i++) {
		TRY(post_recv(p.b.qp, i, NULL, 0));
		TRY(post(p.a.qp, &wr));
		TRY(expect_ok(p.a.scq, 1, IBV_WC_SEND, NULL));
	}
	sleep_ms(50);
	rc = ibv_resize_cq(p.b.rcq, 4000);
	if (rc == EOPNOTSUPP || rc == ENOSYS)
		SKIP("the device has no ibv_resize_cq");
	ENSURE(!rc, "ibv_resize_cq: %s", strerror(rc));
	ENSURE(p.b.rcq->cqe >= 4000, "cqe is %d", p.b.rcq->cqe);
	rc = ibv_resize_cq(p.b.rcq, device_attr.max_cqe + 1);
	ENSURE(rc == EINVAL, "ibv_resize_cq to max_cqe + 1 returns %d", rc);
	for (uint64_t i = 0; i < 8; i++)
		TRY(expect_ok(p.b.rcq, i, IBV_WC_RECV, NULL));
	return NULL;
}

/* Events of a destroyed object are discarded. */
static const char *destroyed_events_discarded(size_t arg)
{
	struct pair p;

	(void)arg;
	TRY(open_device());
	TRY(open_end(&p.a, &usual));
	TRY(open_end(&p.b, &(struct want){ .srq = true }));
	TRY(connect_ends(&p.a, &p.b, &usual));
	TRY(post_srq_recv(p.b.srq, 1, NULL, 0));
	TRY(to_state(p.b.qp, IBV_QPS_ERR)); /* raises LAST_WQE_REACHED, which is not read */
	sleep_ms(50);
	ENSURE(!close_now(p.b.qp), "ibv_destroy_qp");
	return not_readable(device->async_fd, QUIET_MS);
}

/* Destroys a queue pair after a burst of Writes, and counts those that have arrived. */
static const char *destroy_after_burst(uint64_t *arrived)
{
	enum { WRITES = 1000 };
	struct want w = { .send_wr = WRITES, .inline_data = 64, .cq_depth = 2 * WRITES };
	struct region mine, theirs;
	struct ibv_send_wr wr;
	struct ibv_sge from;
	struct pair p;

	TRY(open_pair(&p, &w));
	TRY(new_region(&mine, p.a.pd, 64, 0));
	TRY(new_region(&theirs, p.b.pd, 64 * WRITES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	memset(theirs.at, 0, 64 * WRITES);
	from = sge_of(&mine, 0, 64);
	/* The first one ends the setup of the connection. */
	wr = rdma_wr(0, IBV_WR_RDMA_WRITE, &from, 1, &theirs, 0);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 0, IBV_WC_RDMA_WRITE, NULL));
	for (uint64_t i = 1; i < WRITES; i++) {
		memset(mine.at, (int)(i % 251) + 1, 64);
		wr = rdma_wr(i, IBV_WR_RDMA_WRITE, &from, 1, &theirs, 64 * i);
		wr.send_flags |= IBV_SEND_INLINE;
		TRY(post(p.a.qp, &wr));
	}
	ENSURE(!close_now(p.b.qp), "ibv_destroy_qp");
	*arrived = 1;
	while (*arrived < WRITES && theirs.at[64 * *arrived])
		++*arrived;
	for (uint64_t i = 1; i < *arrived; i++) {
		TRY(expect_ok(p.a.scq, i, IBV_WC_RDMA_WRITE, NULL));
		TRY(all_bytes(theirs.at + 64 * i, 64, (uint8_t)(i % 251 + 1), "the bytes of a Write"));
	}
	return NULL;
}

/*
 * When a queue pair is destroyed, the Writes that have arrived still complete, and their bytes are in memory, even if there are
 * many. If both ends share memory, the shared memory can hold all of them.
 */
static const char *destroyed_with_many_arrived(size_t arg)
{
	/*
	 * Requests that have not arrived may fail: the last ones of a burst, which the sender keeps until it polls or until earlier ones
	 * are acknowledged, and those in its socket while the congestion window is full. The bytes in memory show which ones have
	 * arrived. On a busy machine the device's thread may not run during the burst, and few arrive; the test then tries again.
	 */
	enum { ATTEMPTS = 20, FEWEST = 100 };
	uint64_t arrived = 0, most = 0;

	(void)arg;
	for (int i = 0; i < ATTEMPTS && most <= FEWEST; i++) {
		TRY(destroy_after_burst(&arrived));
		if (arrived > most)
			most = arrived;
		TRY(close_all());
	}
	ENSURE(most > FEWEST, "at most %u Writes have arrived", (unsigned int)most);
	return NULL;
}

/* A Write completes although the program stops polling after a random number of polls: the device's thread does the rest. */
static const char *completed_without_further_polls(size_t arg)
{
	enum { ROUNDS = 2000, LONGEST = 1 << 20 };
	struct want w = { .send_wr = 16, .cq_depth = 32, .channels = true, .one_cq = true };
	struct region mine, theirs;
	struct ibv_send_wr wr;
	struct ibv_sge from;
	struct ibv_cq *cq;
	struct ibv_wc wc;
	struct pair p;
	uint32_t random = 1;
	void *context;

	(void)arg;
	TRY(open_pair(&p, &w));
	TRY(new_region(&mine, p.a.pd, LONGEST, 0));
	TRY(new_region(&theirs, p.b.pd, LONGEST, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	for (uint64_t i = 0; i < ROUNDS; i++) {
		struct pollfd ready = { .fd = p.a.channel->fd, .events = POLLIN };
		uint32_t len, polls;

		random = random * 1664525u + 1013904223u;
		polls = random >> 16 & 15;
		len = (uint32_t)LONGEST >> (random >> 24 & 7);
		from = sge_of(&mine, 0, len);
		wr = rdma_wr(i, IBV_WR_RDMA_WRITE, &from, 1, &theirs, 0);
		ENSURE(!ibv_req_notify_cq(p.a.scq, 0), "ibv_req_notify_cq");
		TRY(post(p.a.qp, &wr));
		/* Polls of another queue, which stays empty, handle the connection and do not take the completion. */
		for (uint32_t n = 0; n < polls; n++)
			ENSURE(!ibv_poll_cq(p.b.rcq, 1, &wc), "a completion without a request");
		/* poll(2) does not call the library, so from now on only the device's thread handles the connection. */
		ENSURE(poll(&ready, 1, WAIT_MS) == 1, "round %llu: a Write of %u bytes does not complete after %u polls", (unsigned long long)i, len, polls);
		ENSURE(!ibv_get_cq_event(p.a.channel, &cq, &context) && cq == p.a.scq, "ibv_get_cq_event");
		ibv_ack_cq_events(p.a.scq, 1);
		TRY(expect_ok(p.a.scq, i, IBV_WC_RDMA_WRITE, NULL));
	}
	return NULL;
}

/* ---------------------------------------------------------------- draining, migration, ECE */

static const char *to_sqd(struct ibv_qp *qp, bool notify)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = notify };
	int rc = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY);

	ENSURE(!rc, "ibv_modify_qp to SQD: %s", strerror(rc));
	return NULL;
}

static const char *draining(struct ibv_qp *qp, bool expected)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	int rc = ibv_query_qp(qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY, &init);

	ENSURE(!rc, "ibv_query_qp: %s", strerror(rc));
	ENSURE(attr.qp_state == IBV_QPS_SQD, "state %d", attr.qp_state);
	ENSURE(attr.sq_draining == expected, "sq_draining %d", attr.sq_draining);
	return NULL;
}

/*
 * In SQD, requests that were begun are completed, and later ones wait until the queue pair is in RTS again.
 * IBV_EVENT_SQ_DRAINED is raised if it was requested.
 */
static const char *drain(size_t notify)
{
	struct want w = { .min_rnr = 1 };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .rnr_retry = 6 };
	struct ibv_send_wr wr;
	struct region from, to;
	struct ibv_sge sge;
	struct pair p;
	int rc;

	TRY(open_pair(&p, &w));
	TRY(new_region(&from, p.a.pd, 1 << 20, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&to, p.b.pd, 1 << 20, ALL_ACCESS));
	fill_pattern(to.at, to.len, 5);
	/* After this exchange a posted request begins at once. */
	TRY(post_recv(p.b.qp, 11, NULL, 0));
	wr = send_wr(0, IBV_WR_SEND, NULL, 0);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 0, IBV_WC_SEND, NULL));
	TRY(expect_ok(p.b.rcq, 11, IBV_WC_RECV, NULL));
	sge = sge_of(&from, 0, from.len);
	wr = rdma_wr(1, IBV_WR_RDMA_READ, &sge, 1, &to, 0);
	TRY(post(p.a.qp, &wr));
	TRY(to_sqd(p.a.qp, notify));
	wr = send_wr(2, IBV_WR_SEND, NULL, 0);
	TRY(post_recv(p.b.qp, 12, NULL, 0));
	TRY(post(p.a.qp, &wr));
	/* Modifying an attribute in SQD must not cancel the requested event. */
	rc = ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE | IBV_QP_RNR_RETRY);
	ENSURE(!rc, "ibv_modify_qp in SQD: %s", strerror(rc));
	TRY(expect_ok(p.a.scq, 1, IBV_WC_RDMA_READ, NULL));
	TRY(same_pattern(from.at, from.len, 5));
	if (notify)
		TRY(async_event(IBV_EVENT_SQ_DRAINED, p.a.qp));
	TRY(draining(p.a.qp, false));
	TRY(no_wc(p.b.rcq, QUIET_MS));
	TRY(not_readable(device->async_fd, 0));
	TRY(to_state(p.a.qp, IBV_QPS_RTS));
	TRY(expect_ok(p.b.rcq, 12, IBV_WC_RECV, NULL));
	return expect_ok(p.a.scq, 2, IBV_WC_SEND, NULL);
}

/* With no request outstanding, any type of queue pair is drained at once. */
static const char *drained_at_once(size_t type)
{
	struct want w = { .type = (enum ibv_qp_type)type };
	struct pair p;

	TRY(open_pair(&p, &w));
	TRY(to_sqd(p.a.qp, true));
	TRY(async_event(IBV_EVENT_SQ_DRAINED, p.a.qp));
	return to_state(p.a.qp, IBV_QPS_RTS);
}

/* The first message that arrives at a connected queue pair in RTR raises one event. `len` is that of an RC Send or of a Write, and 0 for UC. */
static const char *established(size_t len)
{
	struct want w = { .type = len ? IBV_QPT_RC : IBV_QPT_UC };
	struct region from, to;
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct pair p;

	TRY(open_device());
	TRY(open_end(&p.a, &w));
	TRY(open_end(&p.b, &w));
	TRY(new_region(&from, p.a.pd, 1 << 20, ALL_ACCESS));
	TRY(new_region(&to, p.b.pd, 1 << 20, ALL_ACCESS));
	TRY(to_init(p.a.qp, &w));
	TRY(to_init(p.b.qp, &w));
	TRY(to_rtr(p.a.qp, p.b.qp->qp_num, &w));
	TRY(to_rtr(p.b.qp, p.a.qp->qp_num, &w));
	TRY(to_rts(p.a.qp, &w));
	TRY(not_readable(device->async_fd, QUIET_MS));
	sge = sge_of(&from, 0, len ? (uint32_t)len : 100);
	if (len == 1)
		wr = rdma_wr(1, IBV_WR_RDMA_WRITE, &sge, 1, &to, 0);
	else
		wr = send_wr(1, IBV_WR_SEND, &sge, 1);
	struct ibv_sge all = sge_of(&to, 0, to.len);
	for (uint64_t i = 0; i < 3; i++)
		TRY(post_recv(p.b.qp, i, &all, 1));
	TRY(post(p.a.qp, &wr));
	TRY(async_event(IBV_EVENT_COMM_EST, p.b.qp));
	if (len != 1)
		TRY(expect_ok(p.b.rcq, 0, IBV_WC_RECV, NULL));
	TRY(expect_ok(p.a.scq, 1, len == 1 ? IBV_WC_RDMA_WRITE : IBV_WC_SEND, NULL));
	wr = send_wr(2, IBV_WR_SEND, NULL, 0);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.b.rcq, len == 1 ? 0 : 1, IBV_WC_RECV, NULL));
	TRY(to_rts(p.b.qp, &w));
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.b.rcq, len == 1 ? 1 : 2, IBV_WC_RECV, NULL));
	return not_readable(device->async_fd, QUIET_MS);
}

/* A device without packet pacing refuses a rate limit. */
static const char *rate_limit_refused(size_t arg)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .rate_limit = 1000 };
	struct ibv_device_attr_ex ex;
	struct pair p;
	int rc;

	(void)arg;
	TRY(open_pair(&p, &usual));
	if (!ibv_query_device_ex(device, NULL, &ex) && ex.packet_pacing_caps.qp_rate_limit_max)
		SKIP("the device limits the rate of a queue pair");
	rc = ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE | IBV_QP_RATE_LIMIT);
	ENSURE(rc == EOPNOTSUPP || rc == EINVAL, "ibv_modify_qp with a rate limit returns %d", rc);
	return NULL;
}

/* A device that cannot delay events refuses to moderate them. */
static const char *moderation_refused(size_t arg)
{
	struct ibv_modify_cq_attr attr = { .attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = { .cq_count = 8, .cq_period = 100 } };
	struct ibv_device_attr_ex ex;
	struct ibv_cq *cq;
	int rc;

	(void)arg;
	TRY(open_device());
	ENSURE(!ibv_query_device_ex(device, NULL, &ex), "ibv_query_device_ex");
	if (ex.cq_mod_caps.max_cq_count)
		SKIP("the device moderates events");
	cq = new_cq(4, NULL);
	ENSURE(cq, "ibv_create_cq: %s", strerror(errno));
	rc = ibv_modify_cq(cq, &attr);
	ENSURE(rc == EOPNOTSUPP, "ibv_modify_cq returns %d", rc);
	return NULL;
}

/* A device without IBV_DEVICE_AUTO_PATH_MIG refuses an alternate path and keeps the primary one. */
static const char *alternate_path_refused(size_t arg)
{
	struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, NULL, 0);
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct pair p;
	int rc;

	(void)arg;
	TRY(open_pair(&p, &usual));
	if (device_attr.device_cap_flags & IBV_DEVICE_AUTO_PATH_MIG)
		SKIP("the device migrates paths");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .alt_port_num = PORT, .alt_timeout = 14,
				     .alt_ah_attr = address_of(&local_gid, port_attr.lid, false) };
	rc = ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE | IBV_QP_ALT_PATH);
	ENSURE(rc == EOPNOTSUPP || rc == EINVAL, "ibv_modify_qp with an alternate path returns %d", rc);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .path_mig_state = IBV_MIG_REARM };
	rc = ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE | IBV_QP_PATH_MIG_STATE);
	ENSURE(rc == EOPNOTSUPP || rc == EINVAL, "ibv_modify_qp to REARM returns %d", rc);
	/* Setting the current state is allowed. */
	attr.path_mig_state = IBV_MIG_MIGRATED;
	rc = ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE | IBV_QP_PATH_MIG_STATE);
	ENSURE(!rc, "ibv_modify_qp to MIGRATED: %s", strerror(rc));
	rc = ibv_query_qp(p.a.qp, &attr, IBV_QP_PATH_MIG_STATE | IBV_QP_ALT_PATH, &init);
	ENSURE(!rc, "ibv_query_qp: %s", strerror(rc));
	ENSURE(attr.path_mig_state == IBV_MIG_MIGRATED && !attr.alt_port_num, "the refused path was stored");
	TRY(post_recv(p.b.qp, 2, NULL, 0));
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.b.rcq, 2, IBV_WC_RECV, NULL));
	return expect_ok(p.a.scq, 1, IBV_WC_SEND, NULL);
}

/* The functions that return an errno value also set errno, which many programs print. */
static const char *errno_is_the_result(size_t arg)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };
	struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, NULL, 0), *bad;
	struct ibv_recv_wr rwr = { .num_sge = 100 }, *bad_recv;
	struct ibv_srq_attr srq_attr = { .max_wr = UINT32_MAX };
	struct want w = { .srq = true };
	struct ibv_port_attr port;
	struct end e;

	(void)arg;
	TRY(open_device());
	TRY(open_end(&e, &w));
#define SETS(call) do { \
		int rc; \
		errno = 0; \
		rc = call; \
		ENSURE(rc > 0 && rc == errno, #call " returns %d and sets errno to %d", rc, errno); \
	} while (0)
	SETS(ibv_query_port(device, 2, &port));
	SETS(ibv_modify_qp(e.qp, &attr, IBV_QP_STATE));
	SETS(ibv_post_send(e.qp, &wr, &bad));
	SETS(ibv_post_srq_recv(e.srq, &rwr, &bad_recv));
	SETS(ibv_modify_srq(e.srq, &srq_attr, IBV_SRQ_MAX_WR));
	SETS(ibv_resize_cq(e.scq, -1));
	SETS(ibv_destroy_cq(e.scq));
	SETS(ibv_destroy_srq(e.srq));
	SETS(ibv_dealloc_pd(e.pd));
	return NULL;
}

/* Without support for enhanced connection establishment, the functions return the documented errors. */
static const char *ece_unsupported(size_t arg)
{
	struct ibv_ece ece = { .vendor_id = 0x15b3, .options = 1 }, none = { 0 };
	struct pair p;
	int rc;

	(void)arg;
	TRY(open_device());
	TRY(open_end(&p.a, &usual));
	rc = ibv_query_ece(p.a.qp, &none);
	if (!rc)
		SKIP("the device has options");
	ENSURE(rc == EOPNOTSUPP, "ibv_query_ece returns %d", rc);
	rc = ibv_set_ece(p.a.qp, &ece);
	ENSURE(rc == EOPNOTSUPP, "ibv_set_ece returns %d", rc);
	rc = ibv_set_ece(p.a.qp, &none);
	ENSURE(rc == EOPNOTSUPP, "ibv_set_ece of none returns %d", rc);
	return NULL;
}

static const struct test tests[] = {
	{ "flags_write", remote_flags, WRITE, 0, false },
	{ "flags_read", remote_flags, READ, 0, false },
	{ "flags_atomic", remote_flags, ATOMIC, 0, false },
	{ "receive_into_read_only", receive_into_read_only, 0, 0, false },
	{ "receive_beyond_region", receive_beyond_region, 0, 0, false },
	{ "read_into_read_only", read_into_read_only, 0, 0, false },
	{ "other_pd_local", other_pd_local, 0, 0, false },
	{ "other_pd_write", other_pd_remote, WRITE, 0, false },
	{ "other_pd_read", other_pd_remote, READ, 0, false },
	{ "other_pd_atomic", other_pd_remote, ATOMIC, 0, false },
	{ "bounds_write", remote_bounds, WRITE, 0, false },
	{ "bounds_read", remote_bounds, READ, 0, false },
	{ "wraps_write", remote_wraps, WRITE, 0, false },
	{ "wraps_read", remote_wraps, READ, 0, false },
	{ "zero_length_write", zero_length, WRITE, 0, false },
	{ "zero_length_read", zero_length, READ, 0, false },
	{ "atomic_misaligned_by_4", atomic_alignment, 4, 0, false },
	{ "atomic_misaligned_by_1", atomic_alignment, 1, 0, false },
	{ "dereg_ends_access", dereg_ends_access, 20, 0, false },
	{ "old_key", old_key, 0, 0, false },
	{ "rereg", rereg, 0, 0, false },
	{ "rereg_domain", rereg_domain, 0, 0, false },
	{ "rereg_everything", rereg_domain, 1, 0, false },
	{ "rereg_refused", rereg_refused, 0, 0, false },
	{ "rereg_of_others_refused", rereg_of_others_refused, 0, 0, false },
	{ "drain", drain, true, 0, false },
	{ "drain_without_event", drain, false, 0, false },
	{ "established_rc", established, 100, 0, false },
	{ "established_rc_long", established, 1 << 20, 0, false },
	{ "established_rc_write", established, 1, 0, false },
	{ "established_uc", established, 0, 0, false },
	{ "drained_rc", drained_at_once, IBV_QPT_RC, 0, false },
	{ "drained_uc", drained_at_once, IBV_QPT_UC, 0, false },
	{ "drained_ud", drained_at_once, IBV_QPT_UD, 0, false },
	{ "alternate_path_refused", alternate_path_refused, 0, 0, false },
	{ "rate_limit_refused", rate_limit_refused, 0, 0, false },
	{ "moderation_refused", moderation_refused, 0, 0, false },
	{ "errno_is_the_result", errno_is_the_result, 0, 0, false },
	{ "ece_unsupported", ece_unsupported, 0, 0, false },
	{ "masks_rc", required_masks, IBV_QPT_RC, 0, false },
	{ "masks_uc", required_masks, IBV_QPT_UC, 0, false },
	{ "masks_ud", required_masks, IBV_QPT_UD, 0, false },
	{ "steps_rc", forbidden_steps, IBV_QPT_RC, 0, false },
	{ "steps_uc", forbidden_steps, IBV_QPT_UC, 0, false },
	{ "steps_ud", forbidden_steps, IBV_QPT_UD, 0, false },
	{ "bad_values", bad_values, 0, 0, false },
	{ "query", query, 0, 0, false },
	{ "posting_too_early", posting_too_early, 0, 0, false },
	{ "full_queues", full_queues, 0, 0, false },
	{ "bad_in_a_chain", bad_in_a_chain, 0, 0, false },
	{ "inline_too_long", inline_too_long, 0, 0, false },
	{ "wrong_opcode_rc", wrong_opcode, IBV_QPT_RC, 0, false },
	{ "wrong_opcode_uc", wrong_opcode, IBV_QPT_UC, 0, false },
	{ "wrong_opcode_ud", wrong_opcode, IBV_QPT_UD, 0, false },
	{ "too_large", too_large, 0, 0, false },
	{ "bad_regions", bad_regions, 0, 0, false },
	{ "busy", busy, 0, 0, false },
	{ "busy_in_a_group", busy_in_a_group, 0, 0, false },
	{ "ports_and_tables", ports_and_tables, 0, 0, false },
	{ "cq_overflow", cq_overflow, 0, 0, false },
	{ "cq_overflow_extended", cq_overflow, 1, 0, false },
	{ "resize_cq", resize, 0, 0, false },
	{ "destroyed_events_discarded", destroyed_events_discarded, 0, 0, false },
	{ "destroyed_with_many_arrived", destroyed_with_many_arrived, 0, 0, false },
	{ "completed_without_further_polls", completed_without_further_polls, 0, 0, false },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
