/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * <infiniband/anywarpdv.h>: Write-Record, Read and reliable datagrams as a program uses them. The functions are found by
 * name, so that the program links with any libibverbs.
 */
#define _GNU_SOURCE
#include "ends.h"

#include "../../crates/abi/include/infiniband/anywarpdv.h"

#include <dlfcn.h>
#include <poll.h>
#include <sys/wait.h>
#include <netinet/in.h>

static __typeof__(anywarpdv_create_qp_ex) *create_qp;
static __typeof__(anywarpdv_poll_records) *poll_records;
static __typeof__(anywarpdv_poll_errors) *poll_errors;
static __typeof__(anywarpdv_poll_cq) *poll_cq_for;
static __typeof__(anywarpdv_read_map) *read_map;
static __typeof__(anywarpdv_read_bitmap) *read_bitmap;
static __typeof__(anywarpdv_release_map) *release_map;
static __typeof__(anywarpdv_query_counters) *query_counters;
static __typeof__(anywarpdv_restrict_mr) *restrict_mr;
static __typeof__(anywarpdv_is_supported) *is_supported;

static const char *find_all(void)
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
		{ "anywarpdv_is_supported", (void **)&is_supported },
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
	struct ibv_ah *ah; /* to this very host */
};

/* A queue pair in RTS with every operation that its kind has. */
static const char *open_dgram(struct dgram *d, const struct anywarpdv_qp_init_attr *dv)
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
	*d = (struct dgram){ 0 };
	d->pd = new_pd();
	d->scq = new_cq(512, NULL);
	d->rcq = new_cq(512, NULL);
	ENSURE(d->pd && d->scq && d->rcq, "protection domain and queues: %s", strerror(errno));
	init.pd = d->pd;
	init.send_cq = d->scq;
	init.recv_cq = d->rcq;
	d->qp = create_qp(device, &init, dv, sizeof(*dv));
	ENSURE(d->qp, "anywarpdv_create_qp_ex: %s", strerror(errno));
	keep(close_qp, d->qp, "queue pair");
	d->ex = ibv_qp_to_qp_ex(d->qp);
	ENSURE(d->ex, "no extended operations");
	ENSURE(!ibv_modify_qp(d->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "to INIT");
	attr.qp_state = IBV_QPS_RTR;
	ENSURE(!ibv_modify_qp(d->qp, &attr, IBV_QP_STATE), "to RTR");
	attr.qp_state = IBV_QPS_RTS;
	ENSURE(!ibv_modify_qp(d->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "to RTS");
	to.grh.dgid = local_gid;
	to.grh.sgid_index = gid_index;
	d->ah = ibv_create_ah(d->pd, &to);
	ENSURE(d->ah, "ibv_create_ah: %s", strerror(errno));
	keep(close_ah, d->ah, "address handle");
	return NULL;
}

enum what { SEND, WRITE, WRITE_IMM, READ };

/* Posts one request of `a` to `b`. */
static const char *request(struct dgram *a, const struct dgram *b, enum what what, uint64_t id, const struct region *mine,
			   size_t len, const struct region *theirs)
{
	int rc;

	ibv_wr_start(a->ex);
	a->ex->wr_id = id;
	a->ex->wr_flags = IBV_SEND_SIGNALED;
	switch (what) {
	case SEND: ibv_wr_send(a->ex); break;
	case WRITE: ibv_wr_rdma_write(a->ex, theirs->mr->rkey, (uintptr_t)theirs->at); break;
	case WRITE_IMM: ibv_wr_rdma_write_imm(a->ex, theirs->mr->rkey, (uintptr_t)theirs->at, htonl(0x01020304)); break;
	case READ: ibv_wr_rdma_read(a->ex, theirs->mr->rkey, (uintptr_t)theirs->at); break;
	}
	ibv_wr_set_ud_addr(a->ex, a->ah, b->qp->qp_num, QKEY);
	ibv_wr_set_sge(a->ex, mine->mr->lkey, (uintptr_t)mine->at, (uint32_t)len);
	rc = ibv_wr_complete(a->ex);
	ENSURE(!rc, "ibv_wr_complete: %s", strerror(rc));
	return NULL;
}

static const char *done(struct dgram *d, uint64_t id, enum ibv_wc_status status)
{
	struct ibv_wc wc;

	ENSURE(poll_cq_for(d->scq, 1, &wc, (int)WAIT_MS) == 1, "request %llu does not complete", (unsigned long long)id);
	ENSURE(wc.wr_id == id, "completion of %llu", (unsigned long long)wc.wr_id);
	ENSURE(wc.status == status, "%llu: %s", (unsigned long long)id, ibv_wc_status_str(wc.status));
	return NULL;
}

/* ---------------------------------------------------------------- what is exported */

static const char *refused(size_t arg)
{
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_UD, .comp_mask = IBV_QP_INIT_ATTR_PD };
	struct anywarpdv_qp_init_attr dv = { 0 };
	struct {
		struct anywarpdv_qp_init_attr dv;
		uint64_t more;
	} newer = { .more = 1 };

	(void)arg;
	TRY(find_all());
	init.pd = new_pd();
	init.send_cq = init.recv_cq = new_cq(8, NULL);
	init.cap = (struct ibv_qp_cap){ .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 };
#define REFUSES(what, with)                                                                                            \
	do {                                                                                                           \
		dv = (struct anywarpdv_qp_init_attr)with;                                                              \
		errno = 0;                                                                                             \
		ENSURE(!create_qp(device, &init, &dv, sizeof(dv)) && errno == (what), #with ": %s", strerror(errno)); \
	} while (0)
#define A(...) { __VA_ARGS__ }
	REFUSES(EOPNOTSUPP, A(.comp_mask = 1));
	REFUSES(EOPNOTSUPP, A(.flags = 1u << 31));
	REFUSES(EOPNOTSUPP, A(.reserved = { 0, 1, 0 }));
	REFUSES(EOPNOTSUPP, A(.driver_qp_type = ANYWARPDV_QPT_RD));
	REFUSES(EINVAL, A(.segment = 3));
	REFUSES(EINVAL, A(.record_mode = 3));
	REFUSES(EINVAL, A(.parity = 16));
	REFUSES(EINVAL, A(.max_send_size = 1u << 31));
	errno = 0;
	ENSURE(!create_qp(device, &init, &newer.dv, sizeof(newer)) && errno == EOPNOTSUPP, "a newer structure");
	newer.more = 0;
	init.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	init.send_ops_flags = IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
	errno = 0;
	ENSURE(!create_qp(device, &init, &newer.dv, sizeof(newer)) && errno == EOPNOTSUPP, "atomics on UD");
	return NULL;
}

/* ---------------------------------------------------------------- Write-Record */

static const size_t lens[] = { 0, 1, 100, 4096, 70000, 1 << 20 };
#define LENS (sizeof(lens) / sizeof(*lens))

static const char *write_record(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .segment = (uint8_t)(arg % 3), .driver_qp_type = (uint32_t)(arg / 3) };
	struct anywarpdv_record record;
	struct region mine, theirs;
	struct dgram a, b;
	uint8_t bits[16];

	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	for (size_t i = 0; i < LENS; i++) {
		enum what what = i % 2 ? WRITE_IMM : WRITE;

		TRY(new_region(&mine, a.pd, lens[i] ? lens[i] : 1, IBV_ACCESS_LOCAL_WRITE));
		TRY(new_region(&theirs, b.pd, lens[i] ? lens[i] : 1, ALL_ACCESS));
		fill_pattern(mine.at, lens[i], (uint32_t)i);
		TRY(request(&a, &b, what, i, &mine, lens[i], &theirs));
		ENSURE(poll_records(b.qp, 1, &record, (int)WAIT_MS) == 1, "no record of %zu bytes", lens[i]);
		ENSURE(record.flags & ANYWARPDV_RECORD_COMPLETE, "not complete");
		ENSURE(record.length == lens[i] && record.valid == lens[i], "%u of %u", record.valid, record.length);
		ENSURE(record.src_qp == a.qp->qp_num, "from 0x%x", record.src_qp);
		ENSURE(!(what == WRITE_IMM) == !(record.flags & ANYWARPDV_RECORD_WITH_IMM), "immediate");
		ENSURE(what != WRITE_IMM || record.imm_data == htonl(0x01020304), "immediate 0x%x", record.imm_data);
		ENSURE(!lens[i] || record.base == (uintptr_t)theirs.at, "base");
		ENSURE(!lens[i] || record.rkey == theirs.mr->rkey, "rkey");
		ENSURE(record.map == 0, "a map that is not needed");
		ENSURE(!memcmp(theirs.at, mine.at, lens[i]), "bytes differ");
		TRY(guards_untouched(&theirs));
		TRY(done(&a, i, IBV_WC_SUCCESS));
	}
	ENSURE(poll_records(b.qp, 1, &record, 0) == 0, "one record too many");
	errno = 0;
	ENSURE(read_bitmap(b.qp, 1, 100, 10, bits, sizeof(bits)) == -1 && errno == EINVAL, "a map that is not there");
	ENSURE(release_map(b.qp, 1) == -1 && errno == EINVAL, "a map that is not there is released");
	return NULL;
}

/* A region for another queue pair: nothing is placed, and the writer is told. */
static const char *restricted(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .flags = ANYWARPDV_QP_REPORT_ERRORS };
	struct anywarpdv_counters seen;
	struct anywarpdv_record record;
	struct anywarpdv_error error;
	struct sockaddr_in6 six = { .sin6_family = AF_INET6 };
	struct region mine, theirs;
	struct dgram a, b;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&mine, a.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, b.pd, 64, ALL_ACCESS));
	memcpy(&six.sin6_addr, &local_gid, 16);
	ENSURE(!restrict_mr(theirs.mr, (struct sockaddr *)&six, a.qp->qp_num + 1), "restrict");
	TRY(request(&a, &b, WRITE, 1, &mine, 64, &theirs));
	ENSURE(poll_errors(a.qp, 1, &error, (int)WAIT_MS) == 1, "no error");
	ENSURE(error.src_qp == b.qp->qp_num && error.layer == 0 && error.type == 1, "%u %u", error.layer, error.type);
	TRY(all_bytes(theirs.at, 64, FRESH, "the region"));
	ENSURE(!query_counters(b.qp, &seen, sizeof(seen)), "counters");
	ENSURE(seen.rx_stag == 1 && seen.err_out == 1, "%llu %llu", (unsigned long long)seen.rx_stag,
	       (unsigned long long)seen.err_out);
	ENSURE(!restrict_mr(theirs.mr, (struct sockaddr *)&six, a.qp->qp_num), "restrict");
	TRY(request(&a, &b, WRITE, 2, &mine, 64, &theirs));
	ENSURE(poll_records(b.qp, 1, &record, (int)WAIT_MS) == 1, "no record");
	return NULL;
}

/* ---------------------------------------------------------------- Read, Send, atomics */

static const char *reads(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = (uint32_t)arg };
	struct region mine, theirs;
	struct dgram a, b;

	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	for (size_t i = 0; i < LENS; i++) {
		TRY(new_region(&mine, a.pd, lens[i] ? lens[i] : 1, IBV_ACCESS_LOCAL_WRITE));
		TRY(new_region(&theirs, b.pd, lens[i] ? lens[i] : 1, ALL_ACCESS));
		fill_pattern(theirs.at, lens[i], (uint32_t)i);
		TRY(request(&a, &b, READ, i, &mine, lens[i], &theirs));
		TRY(done(&a, i, IBV_WC_SUCCESS));
		ENSURE(!memcmp(theirs.at, mine.at, lens[i]), "bytes differ");
		TRY(guards_untouched(&mine));
	}
	return NULL;
}

/* A Read of somebody who is not there ends in time; a dead peer of reliable datagrams too. */
static const char *nobody(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = {
		.driver_qp_type = (uint32_t)arg,
		.read_timeout_us = 50000,
		.peer_timeout_ms = 300,
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };
	struct ibv_qp_init_attr init;
	struct region mine;
	struct dgram a, b;

	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&mine, a.pd, 64, ALL_ACCESS));
	attr.qp_state = IBV_QPS_ERR;
	ENSURE(!ibv_modify_qp(b.qp, &attr, IBV_QP_STATE), "to ERR");
	TRY(request(&a, &b, READ, 1, &mine, 64, &mine));
	TRY(done(&a, 1, IBV_WC_RETRY_EXC_ERR));
	ENSURE(!ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init), "ibv_query_qp");
	ENSURE(attr.qp_state == (arg ? IBV_QPS_ERR : IBV_QPS_RTS), "state %d", attr.qp_state);
	if (arg) {
		attr.qp_state = IBV_QPS_RTS;
		ENSURE(!ibv_modify_qp(a.qp, &attr, IBV_QP_STATE), "from ERR to RTS");
	}
	return NULL;
}

static const char *long_sends(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = (uint32_t)arg, .max_send_size = 1 << 20 };
	struct region mine, theirs;
	struct ibv_recv_wr wr = { .wr_id = 9, .num_sge = 1 }, *bad;
	struct ibv_sge sge;
	struct dgram a, b;
	struct ibv_wc wc;

	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	for (size_t i = 0; i < LENS; i++) {
		TRY(new_region(&mine, a.pd, lens[i] ? lens[i] : 1, IBV_ACCESS_LOCAL_WRITE));
		TRY(new_region(&theirs, b.pd, lens[i] + 40, IBV_ACCESS_LOCAL_WRITE));
		fill_pattern(mine.at, lens[i], (uint32_t)i);
		sge = sge_of(&theirs, 0, lens[i] + 40);
		wr.sg_list = &sge;
		ENSURE(!ibv_post_recv(b.qp, &wr, &bad), "ibv_post_recv");
		TRY(request(&a, &b, SEND, i, &mine, lens[i], NULL));
		ENSURE(poll_cq_for(b.rcq, 1, &wc, (int)WAIT_MS) == 1, "no message of %zu bytes", lens[i]);
		ENSURE(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV, "%s", ibv_wc_status_str(wc.status));
		ENSURE(wc.byte_len == lens[i] + 40 && wc.src_qp == a.qp->qp_num, "%u bytes", wc.byte_len);
		ENSURE(wc.wc_flags & IBV_WC_GRH, "no route header");
		ENSURE(!memcmp(theirs.at + 40, mine.at, lens[i]), "bytes differ");
		TRY(guards_untouched(&theirs));
		TRY(done(&a, i, IBV_WC_SUCCESS));
	}
	return NULL;
}

static const char *atomics(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD };
	struct region old, word;
	struct dgram a, b;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&old, a.pd, 8, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&word, b.pd, 8, ALL_ACCESS));
	*(uint64_t *)word.at = 40;
	for (int i = 0; i < 10; i++) {
		ibv_wr_start(a.ex);
		a.ex->wr_id = (uint64_t)i;
		a.ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_atomic_fetch_add(a.ex, word.mr->rkey, (uintptr_t)word.at, 2);
		ibv_wr_set_ud_addr(a.ex, a.ah, b.qp->qp_num, QKEY);
		ibv_wr_set_sge(a.ex, old.mr->lkey, (uintptr_t)old.at, 8);
		ENSURE(!ibv_wr_complete(a.ex), "ibv_wr_complete");
		TRY(done(&a, (uint64_t)i, IBV_WC_SUCCESS));
		ENSURE(*(uint64_t *)old.at == 40 + 2 * (uint64_t)i, "%d", i);
	}
	ENSURE(*(uint64_t *)word.at == 60, "the word");
	return NULL;
}

/* A Write to memory that is not for it: told to its source, whose queue pair stops. */
static const char *refused_write(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD };
	struct anywarpdv_error error;
	struct region mine, theirs;
	struct dgram a, b;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&mine, a.pd, 4096, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, b.pd, 4096, IBV_ACCESS_LOCAL_WRITE));
	TRY(request(&a, &b, WRITE, 1, &mine, 4096, &theirs));
	TRY(done(&a, 1, IBV_WC_REM_ACCESS_ERR));
	ENSURE(poll_errors(a.qp, 1, &error, (int)WAIT_MS) == 1, "no error");
	ENSURE(error.status == IBV_WC_REM_ACCESS_ERR, "status %u", error.status);
	TRY(all_bytes(theirs.at, 4096, FRESH, "the region"));
	return NULL;
}

/* ---------------------------------------------------------------- many peers of one queue pair */

/* KiB of this process that are in memory. */
static long resident(void)
{
	FILE *f = fopen("/proc/self/smaps_rollup", "r");
	char line[128];
	long kib = 0;

	while (f && fgets(line, sizeof line, f))
		sscanf(line, "Rss: %ld", &kib);
	if (f)
		fclose(f);
	return kib;
}

static unsigned int many_peers(void)
{
	const char *text = getenv("DV_PEERS");

	return text && atoi(text) > 0 ? (unsigned int)atoi(text) : 1000;
}

/* The process of the peers: each sends one message to the queue pair that the pipe names, in groups. */
static const char *be_peers(const struct anywarpdv_qp_init_attr *dv, int from, int to)
{
	struct ibv_qp_init_attr_ex init = {
		.qp_type = dv->driver_qp_type == ANYWARPDV_QPT_RD ? IBV_QPT_DRIVER : IBV_QPT_UD,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64 },
	};
	struct ibv_qp_attr attr = { .port_num = PORT, .qkey = QKEY };
	struct ibv_ah_attr ah_attr = { .is_global = 1, .port_num = PORT };
	unsigned int many = many_peers();
	struct ibv_qp **qps;
	struct ibv_ah *ah;
	struct ibv_cq *cq;
	uint32_t hub;

	TRY(find_all());
	qps = calloc(many, sizeof *qps);
	ENSURE(qps, "no memory");
	keep(close_memory, qps, "memory");
	init.pd = new_pd();
	cq = init.send_cq = init.recv_cq = new_cq(1024, NULL);
	ENSURE(init.pd && cq, "protection domain and queue: %s", strerror(errno));
	ah_attr.grh.dgid = local_gid;
	ah_attr.grh.sgid_index = gid_index;
	ah = ibv_create_ah(init.pd, &ah_attr);
	ENSURE(ah, "ibv_create_ah: %s", strerror(errno));
	keep(close_ah, ah, "address handle");
	for (unsigned int i = 0; i < many; i++) {
		qps[i] = create_qp(device, &init, dv, sizeof(*dv));
		ENSURE(qps[i], "queue pair %u: %s", i, strerror(errno));
		keep(close_qp, qps[i], "queue pair");
		attr.qp_state = IBV_QPS_INIT;
		ENSURE(!ibv_modify_qp(qps[i], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "INIT");
		attr.qp_state = IBV_QPS_RTR;
		ENSURE(!ibv_modify_qp(qps[i], &attr, IBV_QP_STATE), "to RTR");
		attr.qp_state = IBV_QPS_RTS;
		ENSURE(!ibv_modify_qp(qps[i], &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "to RTS");
	}
	/* Twice: the second time shows what is there to stay. */
	for (int round = 0; round < 2; round++) {
		ENSURE(read(from, &hub, sizeof hub) == sizeof hub, "the other process is gone");
		for (unsigned int i = 0; i < many; i++) {
			struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qps[i]);
			struct ibv_wc wc;

			ibv_wr_start(ex);
			ex->wr_id = i;
			ex->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
			ibv_wr_send(ex);
			ibv_wr_set_ud_addr(ex, ah, hub, QKEY);
			ibv_wr_set_inline_data(ex, &i, sizeof i);
			ENSURE(!ibv_wr_complete(ex), "ibv_wr_complete");
			/* A few at a time, for the receives of the other one. */
			if (i % 16 != 15 && i != many - 1)
				continue;
			for (unsigned int n = i % 16 + 1; n > 0; n--) {
				ENSURE(poll_cq_for(cq, 1, &wc, (int)WAIT_MS) == 1, "%u does not complete", i);
				ENSURE(wc.status == IBV_WC_SUCCESS, "%u: %s", i, ibv_wc_status_str(wc.status));
			}
			ENSURE(read(from, &hub, sizeof hub) == sizeof hub, "the other process is gone");
		}
		ENSURE(write(to, &hub, sizeof hub) == sizeof hub, "the other process is gone");
	}
	return close_all() ? "cannot close" : NULL;
}

/* One queue pair and many that send to it: each message arrives, and what a peer costs is said. */
static const char *peers(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = (uint32_t)arg };
	struct ibv_recv_wr wr = { .num_sge = 1 }, *bad;
	unsigned int many = many_peers();
	int there[2], back[2], status;
	struct region inbox;
	struct ibv_sge sge;
	struct dgram hub;
	long before = 0;
	double each;
	pid_t pid;

	ENSURE(!pipe(there) && !pipe(back), "pipe: %s", strerror(errno));
	fflush(stdout);
	pid = fork();
	ENSURE(pid >= 0, "fork: %s", strerror(errno));
	if (pid == 0) {
		const char *reason;

		close(there[1]);
		close(back[0]);
		reason = be_peers(&dv, there[0], back[1]);
		if (reason)
			fprintf(stderr, "peers: %s [%s]\n", reason, failed_at);
		_exit(reason ? 1 : 0);
	}
	close(there[0]);
	close(back[1]);
	TRY(find_all());
	TRY(open_dgram(&hub, &dv));
	TRY(new_region(&inbox, hub.pd, 128, IBV_ACCESS_LOCAL_WRITE));
	sge = sge_of(&inbox, 0, 128);
	wr.sg_list = &sge;
	for (int i = 0; i < 200; i++)
		ENSURE(!ibv_post_recv(hub.qp, &wr, &bad), "ibv_post_recv");
	for (int round = 0; round < 2; round++) {
		uint32_t number = hub.qp->qp_num;

		ENSURE(write(there[1], &number, sizeof number) == sizeof number, "the peers are gone");
		if (round == 0)
			before = resident();
		for (unsigned int i = 0; i < many; i++) {
			struct ibv_wc wc;

			ENSURE(poll_cq_for(hub.rcq, 1, &wc, 60000) == 1, "%u of %u messages", i, many);
			ENSURE(wc.status == IBV_WC_SUCCESS, "%s", ibv_wc_status_str(wc.status));
			ENSURE(!ibv_post_recv(hub.qp, &wr, &bad), "ibv_post_recv");
			if (i % 16 != 15 && i != many - 1)
				continue;
			/* Reliable ones wait for their acknowledgements first. */
			ibv_poll_cq(hub.rcq, 0, &wc);
			ENSURE(write(there[1], &number, sizeof number) == sizeof number, "the peers are gone");
		}
		/* The peers still wait for acknowledgements. */
		for (struct pollfd fd = { .fd = back[0], .events = POLLIN }; poll(&fd, 1, 0) == 0;) {
			struct ibv_wc wc;

			ENSURE(ibv_poll_cq(hub.rcq, 1, &wc) == 0, "one message too many");
		}
		ENSURE(read(back[0], &number, sizeof number) == sizeof number, "the peers are gone");
	}
	each = (double)(resident() - before) / many;
	printf("# %u peers of one %s queue pair: %.2f KiB each\n", many, arg ? "RD" : "UD", each);
	fflush(stdout);
	ENSURE(waitpid(pid, &status, 0) == pid && status == 0, "the peers end with %#x", (unsigned int)status);
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
	/* What is there once, whatever their number, shows with few. */
	ENSURE(each <= 1.0 + 1024.0 / many, "%.2f KiB for each peer", each);
#endif
	return NULL;
}

static const char *waits_end(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { 0 };
	struct anywarpdv_record record;
	struct dgram a;
	struct ibv_wc wc;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	ENSURE(poll_records(a.qp, 1, &record, 30) == 0, "a record of nothing");
	ENSURE(poll_cq_for(a.scq, 1, &wc, 30) == 0, "a completion of nothing");
	errno = 0;
	ENSURE(poll_records(a.qp, 0, &record, 0) == -1 && errno == EINVAL, "room for none");
	return NULL;
}

static const struct test tests[] = {
	{ "refused", refused, 0, 0, false },
	{ "record_path_mtu", write_record, 0, 0, false },
	{ "record_jumbo", write_record, 1, 0, false },
	{ "record_max", write_record, 2, 0, false },
	{ "record_reliable", write_record, 3, 0, false },
	{ "restricted", restricted, 0, 0, false },
	{ "reads", reads, ANYWARPDV_QPT_UD, 0, false },
	{ "reads_reliable", reads, ANYWARPDV_QPT_RD, 0, false },
	{ "nobody", nobody, ANYWARPDV_QPT_UD, 0, false },
	{ "nobody_reliable", nobody, ANYWARPDV_QPT_RD, 0, false },
	{ "long_sends", long_sends, ANYWARPDV_QPT_UD, 0, false },
	{ "long_sends_reliable", long_sends, ANYWARPDV_QPT_RD, 0, false },
	{ "atomics", atomics, 0, 0, false },
	{ "refused_write", refused_write, 0, 0, false },
	{ "waits_end", waits_end, 0, 0, false },
	{ "peers", peers, ANYWARPDV_QPT_UD, 120, true },
	{ "peers_reliable", peers, ANYWARPDV_QPT_RD, 120, true },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
