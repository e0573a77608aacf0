/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Injected faults (ANYWARP_FAULTS): their effect on a verbs program, that the same seed gives the same faults, and that
 * reliable services survive the faults that they must survive.
 *
 * The device reads the variable once, so each test runs in a new process of this program with its own value. In that
 * process, queue pair #1 sends and #2 receives.
 */
#define _GNU_SOURCE
#include "ends.h"

#include "../../crates/abi/include/infiniband/anywarpdv.h"

#include <dlfcn.h>
#include <netinet/in.h>

/* ---------------------------------------------------------------- a process with injected faults */

struct child {
	const char *name;
	const char *(*run)(void);
};
static const struct child children[];
static const size_t children_count;

#define LOG_MAX (4u << 20)

/* Runs a program with these faults. Sets its exit status, and `log` to what it wrote to stderr (up to LOG_MAX). */
static const char *spawn(char *const argv[], const char *faults, char *log, int *status)
{
	size_t used = 0;
	int ends[2];
	pid_t pid;

	ENSURE(!pipe2(ends, O_CLOEXEC), "pipe: %s", strerror(errno));
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		setenv("ANYWARP_FAULTS", faults, 1);
		setenv("ANYWARP_LOG", "info", 1);
		dup2(ends[1], STDERR_FILENO);
		execvp(argv[0], argv);
		_exit(127);
	}
	close(ends[1]);
	ENSURE(pid > 0, "fork: %s", strerror(errno));
	for (;;) {
		ssize_t n = read(ends[0], log + used, LOG_MAX - 1 - used);

		if (n <= 0)
			break;
		used += (size_t)n;
	}
	log[used] = 0;
	close(ends[0]);
	ENSURE(waitpid(pid, status, 0) == pid, "waitpid: %s", strerror(errno));
	return NULL;
}

static char *new_log(void)
{
	char *log = malloc(LOG_MAX);

	if (log)
		keep(close_memory, log, "memory");
	return log;
}

/* Runs one of `children`, which must succeed. */
static const char *under(const char *faults, const char *child, char *log)
{
	char *argv[] = { "/proc/self/exe", "--child", (char *)child, NULL };
	int status = 0;

	TRY(spawn(argv, faults, log, &status));
	if (status)
		fprintf(stderr, "%s", log);
	ENSURE(!status, "%s with %s: status %#x, see above", child, faults, (unsigned int)status);
	return NULL;
}

/* The number of faults of a kind, according to the summary. */
static unsigned long fault_count(const char *log, const char *action)
{
	const char *line = strstr(log, "faults: seed"), *at;
	unsigned long n = 0;
	char word[64];

	snprintf(word, sizeof word, " %s", action);
	for (at = line; at && (at = strstr(at, word)); at++) {
		const char *digit = at;

		while (digit > line && digit[-1] >= '0' && digit[-1] <= '9')
			digit--;
		if (digit < at)
			n += strtoul(digit, NULL, 10);
	}
	return n;
}

/* ---------------------------------------------------------------- reliable connections */

static const struct want fast = { .rnr_retry = 1, .min_rnr = 12 };

static const char *write_of(struct pair *p, uint64_t id, const struct region *from, const struct region *to)
{
	struct ibv_sge sge = sge_of(from, 0, from->len);
	struct ibv_send_wr wr = rdma_wr(id, IBV_WR_RDMA_WRITE, &sge, 1, to, 0);

	return post(p->a.qp, &wr);
}

static const char *send_of(struct pair *p, uint64_t id, const struct region *from)
{
	struct ibv_sge sge = sge_of(from, 0, from->len);
	struct ibv_send_wr wr = send_wr(id, IBV_WR_SEND, &sge, 1);

	return post(p->a.qp, &wr);
}

static const char *open_with_memory(struct pair *p, const struct want *w, struct region *from, struct region *to, size_t len)
{
	TRY(open_pair(p, w));
	TRY(new_region(from, p->a.pd, len, ALL_ACCESS));
	TRY(new_region(to, p->b.pd, len, ALL_ACCESS));
	fill_pattern(from->at, len, 1);
	return NULL;
}

/* The third request fails with the configured status and is not sent. The requests after it are flushed. */
static const char *third_fails(enum ibv_wr_opcode opcode, enum ibv_wc_status status)
{
	struct region from, to;
	struct ibv_sge sge;
	struct ibv_wc wc;
	struct pair p;

	TRY(open_with_memory(&p, &fast, &from, &to, 64));
	sge = sge_of(&to, 0, 64);
	for (uint64_t i = 1; i <= 4; i++)
		TRY(post_recv(p.b.qp, i, &sge, 1));
	for (uint64_t i = 1; i <= 5; i++) {
		struct ibv_sge mine = sge_of(&from, 0, 64);
		struct ibv_send_wr wr = rdma_wr(i, opcode, &mine, 1, &to, 0);

		if (opcode == IBV_WR_SEND)
			wr = send_wr(i, opcode, &mine, 1);
		TRY(post(p.a.qp, &wr));
		TRY(next_wc(p.a.scq, &wc, WAIT_MS));
		TRY(wc_is(&wc, i, i < 3 ? IBV_WC_SUCCESS : i == 3 ? status : IBV_WC_WR_FLUSH_ERR));
	}
	TRY(state_is(p.a.qp, IBV_QPS_ERR));
	if (opcode == IBV_WR_SEND)
		for (uint64_t i = 1; i <= 2; i++)
			TRY(expect_ok(p.b.rcq, i, IBV_WC_RECV, NULL));
	return no_wc(p.b.rcq, QUIET_MS);
}

static const char *send_remote_access(void) { return third_fails(IBV_WR_SEND, IBV_WC_REM_ACCESS_ERR); }
static const char *write_remote_operation(void) { return third_fails(IBV_WR_RDMA_WRITE, IBV_WC_REM_OP_ERR); }
static const char *read_retry(void) { return third_fails(IBV_WR_RDMA_READ, IBV_WC_RETRY_EXC_ERR); }
static const char *send_protection(void) { return third_fails(IBV_WR_SEND, IBV_WC_LOC_PROT_ERR); }

/* The connection is broken at the second Write. Both ends get completions, and therefore no event. */
static const char *killed(void)
{
	struct region from, to;
	struct ibv_sge sge;
	struct pair p;

	TRY(open_with_memory(&p, &fast, &from, &to, 64));
	sge = sge_of(&to, 0, 64);
	TRY(post_recv(p.b.qp, 9, &sge, 1));
	TRY(write_of(&p, 1, &from, &to));
	TRY(expect_ok(p.a.scq, 1, IBV_WC_RDMA_WRITE, NULL));
	memset(to.at, (int)FRESH, to.len);
	TRY(write_of(&p, 2, &from, &to));
	TRY(expect_status(p.a.scq, 2, IBV_WC_RETRY_EXC_ERR));
	TRY(state_is(p.a.qp, IBV_QPS_ERR));
	TRY(expect_status(p.b.rcq, 9, IBV_WC_WR_FLUSH_ERR));
	TRY(not_readable(device->async_fd, QUIET_MS));
	TRY(state_is(p.b.qp, IBV_QPS_ERR));
	return all_bytes(to.at, 64, FRESH, "the region");
}

/*
 * The third of several outstanding requests breaks the connection. Each completes once, and the oldest has the error
 * status.
 */
static const char *killed_with_outstanding(void)
{
	struct region from, to;
	struct ibv_wc wc;
	struct pair p;

	TRY(open_with_memory(&p, &fast, &from, &to, 64));
	for (uint64_t i = 1; i <= 4; i++)
		TRY(write_of(&p, i, &from, &to));
	for (uint64_t i = 1, blamed = 0; i <= 4; i++) {
		TRY(next_wc(p.a.scq, &wc, WAIT_MS));
		ENSURE(wc.wr_id == i, "completion of %llu, expected %llu", (unsigned long long)wc.wr_id, (unsigned long long)i);
		if (wc.status == IBV_WC_SUCCESS) {
			ENSURE(!blamed && i < 3, "request %llu succeeds after the connection was broken", (unsigned long long)i);
		} else {
			ENSURE(wc.status == (blamed ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR), "%llu: %s",
			       (unsigned long long)i, ibv_wc_status_str(wc.status));
			blamed = i;
		}
	}
	return no_wc(p.a.scq, QUIET_MS);
}

/* The first Send finds the receiver not ready once; the second more often than rnr_retry allows. */
static const char *not_ready(void)
{
	struct region from, to;
	struct ibv_sge sge;
	struct pair p;

	TRY(open_with_memory(&p, &fast, &from, &to, 64));
	sge = sge_of(&to, 0, 64);
	for (uint64_t i = 1; i <= 3; i++)
		TRY(post_recv(p.b.qp, i, &sge, 1));
	TRY(send_of(&p, 1, &from));
	TRY(expect_ok(p.a.scq, 1, IBV_WC_SEND, NULL));
	TRY(expect_ok(p.b.rcq, 1, IBV_WC_RECV, NULL));
	TRY(send_of(&p, 2, &from));
	TRY(expect_status(p.a.scq, 2, IBV_WC_RNR_RETRY_EXC_ERR));
	return state_is(p.a.qp, IBV_QPS_ERR);
}

/* The second Send is delayed by at least 150 ms; the others are not delayed. */
static const char *late(void)
{
	struct region from, to;
	uint64_t since;
	struct ibv_sge sge;
	struct pair p;

	TRY(open_with_memory(&p, &fast, &from, &to, 64));
	sge = sge_of(&to, 0, 64);
	for (uint64_t i = 1; i <= 3; i++) {
		TRY(post_recv(p.b.qp, i, &sge, 1));
		since = now_ms();
		TRY(send_of(&p, i, &from));
		TRY(expect_ok(p.a.scq, i, IBV_WC_SEND, NULL));
		TRY(expect_ok(p.b.rcq, i, IBV_WC_RECV, NULL));
		ENSURE(i != 2 || now_ms() - since >= 150, "only %llu ms", (unsigned long long)(now_ms() - since));
	}
	return NULL;
}

/* 20 Writes of 64 KiB at 10 MB/s take 131 ms. */
static const char *slow(void)
{
	struct region from, to;
	uint64_t since;
	struct pair p;

	TRY(open_with_memory(&p, &fast, &from, &to, 65536));
	since = now_ms();
	for (uint64_t i = 1; i <= 20; i++)
		TRY(write_of(&p, i, &from, &to));
	for (uint64_t i = 1; i <= 20; i++)
		TRY(expect_ok(p.a.scq, i, IBV_WC_RDMA_WRITE, NULL));
	ENSURE(now_ms() - since >= 130, "only %llu ms", (unsigned long long)(now_ms() - since));
	return same_pattern(to.at, to.len, 1);
}

/* ---------------------------------------------------------------- datagrams */

#define MESSAGES 1000u

struct datagrams {
	struct pair p;
	struct ibv_ah *ah;
	struct region from, to;
};

static const char *open_datagrams(struct datagrams *d)
{
	struct want w = { .type = IBV_QPT_UD, .recv_wr = 4096, .cq_depth = 8192 };
	struct ibv_ah_attr attr;

	TRY(open_pair(&d->p, &w));
	attr = address_of(&local_gid, 0, false);
	d->ah = ibv_create_ah(d->p.a.pd, &attr);
	ENSURE(d->ah, "ibv_create_ah: %s", strerror(errno));
	keep(close_ah, d->ah, "address handle");
	TRY(new_region(&d->from, d->p.a.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&d->to, d->p.b.pd, 64 + 40, IBV_ACCESS_LOCAL_WRITE));
	return NULL;
}

/* Message `n` carries its number as immediate data. */
static struct ibv_send_wr number_wr(const struct datagrams *d, uint32_t n, struct ibv_sge *sge)
{
	struct ibv_send_wr wr = send_wr(n, IBV_WR_SEND_WITH_IMM, sge, 1);

	wr.imm_data = htonl(n);
	wr.wr.ud.ah = d->ah;
	wr.wr.ud.remote_qpn = d->p.b.qp->qp_num;
	wr.wr.ud.remote_qkey = QKEY;
	return wr;
}

/* Sends message `n`, which must complete with `status`. */
static const char *send_number(struct datagrams *d, uint32_t n, enum ibv_wc_status status)
{
	struct ibv_sge sge = sge_of(&d->from, 0, 64);
	struct ibv_send_wr wr = number_wr(d, n, &sge);

	TRY(post(d->p.a.qp, &wr));
	return expect_status(d->p.a.scq, n, status);
}

/* Checks that the next messages are these, and no others. */
static const char *arrive(struct datagrams *d, const uint32_t *numbers)
{
	struct ibv_wc wc;

	for (; *numbers; numbers++) {
		TRY(next_wc(d->p.b.rcq, &wc, WAIT_MS));
		ENSURE(wc.status == IBV_WC_SUCCESS, "%s", ibv_wc_status_str(wc.status));
		ENSURE(ntohl(wc.imm_data) == *numbers, "message %u, expected %u", ntohl(wc.imm_data), *numbers);
	}
	return no_wc(d->p.b.rcq, QUIET_MS);
}

/* Sends nine messages. The given ones must arrive, in this order. */
static const char *nine(const uint32_t *numbers)
{
	struct ibv_sge sge, from;
	struct ibv_send_wr wrs[9];
	struct datagrams d;

	TRY(open_datagrams(&d));
	from = sge_of(&d.from, 0, 64);
	sge = sge_of(&d.to, 0, 104);
	for (uint32_t i = 1; i <= 20; i++)
		TRY(post_recv(d.p.b.qp, i, &sge, 1));
	/* Posts the messages without waiting in between, so that little time passes. */
	for (uint32_t i = 1; i <= 9; i++) {
		wrs[i - 1] = number_wr(&d, i, &from);
		wrs[i - 1].next = i < 9 ? &wrs[i] : NULL;
	}
	TRY(post(d.p.a.qp, wrs));
	for (uint32_t i = 1; i <= 9; i++)
		TRY(expect_ok(d.p.a.scq, i, IBV_WC_SEND, NULL));
	return arrive(&d, numbers);
}

static const char *ud_third_lost(void) { return nine((const uint32_t[]){ 1, 2, 4, 5, 7, 8, 0 }); }
static const char *ud_second_lost(void) { return nine((const uint32_t[]){ 1, 3, 4, 5, 6, 7, 8, 9, 0 }); }
static const char *ud_second_passed(void) { return nine((const uint32_t[]){ 1, 3, 2, 4, 5, 6, 7, 8, 9, 0 }); }
static const char *ud_second_last(void) { return nine((const uint32_t[]){ 1, 3, 4, 5, 6, 7, 8, 9, 2, 0 }); }
static const char *ud_second_twice(void) { return nine((const uint32_t[]){ 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 0 }); }
static const char *ud_all(void) { return nine((const uint32_t[]){ 1, 2, 3, 4, 5, 6, 7, 8, 9, 0 }); }

/* With an unreliable service, an error stops only the send queue. */
static const char *ud_error(void)
{
	struct ibv_sge sge;
	struct datagrams d;

	TRY(open_datagrams(&d));
	sge = sge_of(&d.to, 0, 104);
	for (uint32_t i = 1; i <= 4; i++)
		TRY(post_recv(d.p.b.qp, i, &sge, 1));
	TRY(send_number(&d, 1, IBV_WC_SUCCESS));
	TRY(send_number(&d, 2, IBV_WC_LOC_LEN_ERR));
	TRY(state_is(d.p.a.qp, IBV_QPS_SQE));
	TRY(send_number(&d, 3, IBV_WC_WR_FLUSH_ERR));
	TRY(to_state(d.p.a.qp, IBV_QPS_RTS));
	TRY(send_number(&d, 4, IBV_WC_SUCCESS));
	return arrive(&d, (const uint32_t[]){ 1, 4, 0 });
}

/* Sends many messages and prints to stderr how many arrived. */
static const char *ud_many(void)
{
	struct ibv_sge sge;
	struct datagrams d;
	uint32_t arrived = 0;
	struct ibv_wc wc;

	TRY(open_datagrams(&d));
	sge = sge_of(&d.to, 0, 104);
	for (uint32_t i = 1; i <= 2 * MESSAGES; i++)
		TRY(post_recv(d.p.b.qp, i, &sge, 1));
	for (uint32_t i = 1; i <= MESSAGES; i++)
		TRY(send_number(&d, i, IBV_WC_SUCCESS));
	while (!next_wc(d.p.b.rcq, &wc, QUIET_MS))
		arrived++;
	fprintf(stderr, "arrived %u\n", arrived);
	return NULL;
}

/* ---------------------------------------------------------------- datagrams with one-sided operations */

static __typeof__(anywarpdv_create_qp_ex) *create_qp;
static __typeof__(anywarpdv_poll_records) *poll_records;
static __typeof__(anywarpdv_read_map) *read_map;
static __typeof__(anywarpdv_release_map) *release_map;

static const char *find_all(void)
{
	TRY(open_device());
	create_qp = dlvsym(RTLD_DEFAULT, "anywarpdv_create_qp_ex", "ANYWARPDV_1.0");
	poll_records = dlvsym(RTLD_DEFAULT, "anywarpdv_poll_records", "ANYWARPDV_1.0");
	read_map = dlvsym(RTLD_DEFAULT, "anywarpdv_read_map", "ANYWARPDV_1.0");
	release_map = dlvsym(RTLD_DEFAULT, "anywarpdv_release_map", "ANYWARPDV_1.0");
	ENSURE(create_qp && poll_records && read_map && release_map, "functions of <infiniband/anywarpdv.h> are missing");
	return NULL;
}

struct one_sided {
	struct end end;
	struct ibv_qp_ex *ex;
	struct ibv_ah *ah;
};

/* `type`: a value of enum anywarpdv_qp_type, with PLAIN if Writes make no records. */
#define PLAIN (1u << 31)

static const char *open_one_sided(struct one_sided *d, uint32_t type)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = type & ~PLAIN, .flags = type & PLAIN ? ANYWARPDV_QP_PLAIN_WRITES : 0 };
	bool rd = dv.driver_qp_type == ANYWARPDV_QPT_RD;
	struct ibv_qp_init_attr_ex init = {
		.qp_type = rd ? IBV_QPT_DRIVER : IBV_QPT_UD,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
				  (rd ? IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD : 0),
		.cap = { .max_send_wr = 64, .max_recv_wr = 1024, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = PORT, .qkey = QKEY };
	struct ibv_ah_attr to = address_of(&local_gid, 0, false);

	*d = (struct one_sided){ 0 };
	init.pd = d->end.pd = new_pd();
	init.send_cq = d->end.scq = new_cq(512, NULL);
	init.recv_cq = d->end.rcq = new_cq(2048, NULL);
	ENSURE(init.pd && init.send_cq && init.recv_cq, "protection domain and queues: %s", strerror(errno));
	d->end.qp = create_qp(device, &init, &dv, sizeof dv);
	ENSURE(d->end.qp, "anywarpdv_create_qp_ex: %s", strerror(errno));
	keep(close_qp, d->end.qp, "queue pair");
	d->ex = ibv_qp_to_qp_ex(d->end.qp);
	ENSURE(!ibv_modify_qp(d->end.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
	       "ibv_modify_qp to INIT fails");
	attr.qp_state = IBV_QPS_RTR;
	ENSURE(!ibv_modify_qp(d->end.qp, &attr, IBV_QP_STATE), "ibv_modify_qp to RTR fails");
	attr.qp_state = IBV_QPS_RTS;
	ENSURE(!ibv_modify_qp(d->end.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "ibv_modify_qp to RTS fails");
	d->ah = ibv_create_ah(d->end.pd, &to);
	ENSURE(d->ah, "ibv_create_ah: %s", strerror(errno));
	keep(close_ah, d->ah, "address handle");
	return NULL;
}

static const char *finish(struct one_sided *a, const struct one_sided *b, const struct region *mine)
{
	ibv_wr_set_ud_addr(a->ex, a->ah, b->end.qp->qp_num, QKEY);
	ibv_wr_set_sge(a->ex, mine->mr->lkey, (uintptr_t)mine->at, (uint32_t)mine->len);
	ENSURE(!ibv_wr_complete(a->ex), "ibv_wr_complete");
	return NULL;
}

/* Sends and atomics are each executed exactly once, in order. */
static const char *rd_exactly_once(void)
{
	struct region old, word, from, to;
	struct one_sided a, b;
	struct ibv_sge sge;
	struct ibv_wc wc;

	TRY(find_all());
	TRY(open_one_sided(&a, ANYWARPDV_QPT_RD));
	TRY(open_one_sided(&b, ANYWARPDV_QPT_RD));
	TRY(new_region(&old, a.end.pd, 8, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&word, b.end.pd, 8, ALL_ACCESS));
	TRY(new_region(&from, a.end.pd, 3000, ALL_ACCESS));
	TRY(new_region(&to, b.end.pd, 3040, ALL_ACCESS));
	*(uint64_t *)word.at = 0;
	sge = sge_of(&to, 0, 3040);
	for (uint32_t i = 0; i < MESSAGES; i++)
		TRY(post_recv(b.end.qp, i, &sge, 1));
	for (uint32_t i = 0; i < MESSAGES; i++) {
		fill_pattern(from.at, from.len, i);
		ibv_wr_start(a.ex);
		a.ex->wr_id = i;
		a.ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_send_imm(a.ex, htonl(i));
		TRY(finish(&a, &b, &from));
		TRY(expect_ok(a.end.scq, i, IBV_WC_SEND, NULL));
		TRY(expect_ok(b.end.rcq, i, IBV_WC_RECV, &wc));
		ENSURE(ntohl(wc.imm_data) == i, "message %u, expected %u", ntohl(wc.imm_data), i);
		TRY(same_pattern(to.at + 40, from.len, i));
		if (i % 4)
			continue;
		ibv_wr_start(a.ex);
		a.ex->wr_id = i;
		a.ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_atomic_fetch_add(a.ex, word.mr->rkey, (uintptr_t)word.at, 1);
		TRY(finish(&a, &b, &old));
		TRY(expect_ok(a.end.scq, i, IBV_WC_FETCH_ADD, NULL));
		ENSURE(*(uint64_t *)old.at == i / 4, "the word was %llu, expected %u", (unsigned long long)*(uint64_t *)old.at,
		       i / 4);
	}
	TRY(no_wc(b.end.rcq, QUIET_MS));
	ENSURE(*(uint64_t *)word.at == MESSAGES / 4, "the word is %llu", (unsigned long long)*(uint64_t *)word.at);
	return NULL;
}

/* RD has no count of RNR retries, so the first Send fails. */
static const char *rd_not_ready(void)
{
	struct one_sided a, b;
	struct region from;

	TRY(find_all());
	TRY(open_one_sided(&a, ANYWARPDV_QPT_RD));
	TRY(open_one_sided(&b, ANYWARPDV_QPT_RD));
	TRY(new_region(&from, a.end.pd, 8, IBV_ACCESS_LOCAL_WRITE));
	ibv_wr_start(a.ex);
	a.ex->wr_id = 1;
	a.ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send_imm(a.ex, 0);
	TRY(finish(&a, &b, &from));
	return expect_status(a.end.scq, 1, IBV_WC_RNR_RETRY_EXC_ERR);
}

/* A rule for Writes applies to Writes that make no records. */
static const char *rd_plain_write(void)
{
	struct region from, to;
	struct one_sided a, b;

	TRY(find_all());
	TRY(open_one_sided(&a, ANYWARPDV_QPT_RD | PLAIN));
	TRY(open_one_sided(&b, ANYWARPDV_QPT_RD | PLAIN));
	TRY(new_region(&from, a.end.pd, 8, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&to, b.end.pd, 8, ALL_ACCESS));
	for (uint32_t i = 1; i <= 2; i++) {
		ibv_wr_start(a.ex);
		a.ex->wr_id = i;
		a.ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_rdma_write(a.ex, to.mr->rkey, (uintptr_t)to.at);
		TRY(finish(&a, &b, &from));
		TRY(expect_status(a.end.scq, i, i == 1 ? IBV_WC_SUCCESS : IBV_WC_GENERAL_ERR));
	}
	return NULL;
}

#define RECORDS 40u
#define RECORD_LEN (256u << 10)

/* A map of a Write-Record is exact: the ranges that it lists were written, and no others. */
static const char *maps_are_exact(void)
{
	static struct anywarpdv_range ranges[4096];
	struct anywarpdv_record record;
	struct region from, to;
	struct one_sided a, b;
	uint64_t valid = 0;
	unsigned int maps = 0;

	TRY(find_all());
	TRY(open_one_sided(&a, ANYWARPDV_QPT_UD));
	TRY(open_one_sided(&b, ANYWARPDV_QPT_UD));
	TRY(new_region(&from, a.end.pd, RECORD_LEN, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&to, b.end.pd, RECORD_LEN, ALL_ACCESS));
	/* The pattern contains no FRESH byte. */
	for (size_t i = 0; i < RECORD_LEN; i++)
		from.at[i] = (uint8_t)(pattern_byte(1, i) & 0x7f);
	for (uint32_t m = 0; m < RECORDS; m++) {
		uint32_t next = 0;
		int n = 1;

		memset(to.at, (int)FRESH, to.len);
		ibv_wr_start(a.ex);
		a.ex->wr_id = m;
		a.ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_rdma_write(a.ex, to.mr->rkey, (uintptr_t)to.at);
		TRY(finish(&a, &b, &from));
		TRY(expect_ok(a.end.scq, m, IBV_WC_RDMA_WRITE, NULL));
		ENSURE(poll_records(b.end.qp, 1, &record, sizeof record, (int)WAIT_MS) == 1, "no record of message %u", m);
		ENSURE(record.length == RECORD_LEN, "%u bytes", record.length);
		ranges[0] = (struct anywarpdv_range){ 0, record.length };
		if (record.map) {
			n = read_map(b.end.qp, &record, sizeof record, (int)COUNT(ranges), ranges, sizeof *ranges);
			ENSURE(n > 0 && n <= (int)COUNT(ranges), "%d ranges", n);
			ENSURE(!release_map(b.end.qp, record.map), "release");
			maps++;
		}
		for (int i = 0; i < n; i++) {
			ENSURE(ranges[i].from >= next && ranges[i].to > ranges[i].from && ranges[i].to <= RECORD_LEN,
			       "range [%u, %u)", ranges[i].from, ranges[i].to);
			TRY(all_bytes(to.at + next, ranges[i].from - next, FRESH, "a gap"));
			ENSURE(!memcmp(to.at + ranges[i].from, from.at + ranges[i].from, ranges[i].to - ranges[i].from),
			       "message %u: bytes of [%u, %u) differ", m, ranges[i].from, ranges[i].to);
			valid += ranges[i].to - ranges[i].from;
			next = ranges[i].to;
		}
		TRY(all_bytes(to.at + next, RECORD_LEN - next, FRESH, "a gap"));
		TRY(guards_untouched(&to));
	}
	ENSURE(poll_records(b.end.qp, 1, &record, sizeof record, 0) == 0, "an unexpected record");
	ENSURE(maps > 0, "nothing was lost");
	fprintf(stderr, "valid %llu of %u\n", (unsigned long long)valid, RECORDS * RECORD_LEN);
	return NULL;
}

/* The device does not open with an invalid setting. */
static const char *refused_text(void)
{
	int n = 0;
	struct ibv_device **list = ibv_get_device_list(&n);

	ENSURE(list && n > 0, "no device");
	errno = 0;
	ENSURE(!ibv_open_device(list[0]) && errno == EINVAL, "the device opens: %s", strerror(errno));
	ibv_free_device_list(list);
	return NULL;
}

#define CHILD(function) { #function, function }
static const struct child children[] = {
	CHILD(send_remote_access), CHILD(write_remote_operation), CHILD(read_retry), CHILD(send_protection), CHILD(killed),
	CHILD(killed_with_outstanding), CHILD(not_ready), CHILD(late), CHILD(slow), CHILD(ud_third_lost), CHILD(ud_second_lost),
	CHILD(ud_second_passed), CHILD(ud_second_last), CHILD(ud_second_twice), CHILD(ud_all), CHILD(ud_error),
	CHILD(ud_many), CHILD(rd_exactly_once), CHILD(rd_not_ready), CHILD(rd_plain_write), CHILD(maps_are_exact), CHILD(refused_text),
};
static const size_t children_count = COUNT(children);

/* ---------------------------------------------------------------- the tests */

/* The configured faults, the child process that they are injected into, and a line of the summary with its count. */
static const struct row {
	const char *faults, *child, *action;
	unsigned long count;
} rows[] = {
	{ "qp=#1 op=send nth=3 -> error=remote-access", "send_remote_access", "error=remote-access", 1 },
	{ "op=write nth=3 -> error=remote-operation", "write_remote_operation", "error=remote-operation", 1 },
	{ "op=read every=3 times=1 -> error=retry-exceeded", "read_retry", "error=retry-exceeded", 1 },
	{ "op=send nth=3 -> error=local-protection", "send_protection", "error=local-protection", 1 },
	{ "op=write nth=2 -> kill", "killed", "kill", 1 },
	{ "nth=3 -> kill", "killed_with_outstanding", "kill", 1 },
	{ "op=send nth=1 -> rnr; op=send nth=2 -> rnr=2", "not_ready", "rnr", 2 },
	{ "op=send nth=1 -> rnr", "rd_not_ready", "rnr", 1 },
	{ "op=write nth=2 -> error=general", "rd_plain_write", "error=general", 1 },
	{ "op=send nth=2 -> delay=150ms", "late", "delay", 1 },
	{ "op=write -> slow=10MB/s", "slow", "slow", 20 },
	{ "qp=#1 op=send every=3 -> drop", "ud_third_lost", "drop", 3 },
	{ "qp=#2 op=send nth=2 dir=rx -> drop", "ud_second_lost", "drop", 1 },
	{ "op=send nth=2 -> corrupt", "ud_second_lost", "corrupt", 1 },
	{ "op=send nth=2 dir=rx -> corrupt", "ud_second_lost", "corrupt", 1 },
	{ "op=send nth=2 -> reorder", "ud_second_passed", "reorder", 1 },
	{ "op=send nth=2 dir=rx -> reorder", "ud_second_passed", "reorder", 1 },
	{ "op=send nth=2 -> delay=300ms", "ud_second_last", "delay", 1 },
	{ "op=send nth=2 dir=rx -> delay=300ms", "ud_second_last", "delay", 1 },
	{ "op=send nth=2 -> dup", "ud_second_twice", "dup", 1 },
	{ "op=send nth=2 dir=rx -> dup", "ud_second_twice", "dup", 1 },
	{ "peer=192.0.2.1 -> drop", "ud_all", "drop", 0 },
	{ "op=send nth=2 -> error=local-length", "ud_error", "error=local-length", 1 },
};

static const char *exact(size_t arg)
{
	const struct row *row = &rows[arg];
	char *log = new_log();

	ENSURE(log, "no memory");
	TRY(under(row->faults, row->child, log));
	ENSURE(strstr(log, "faults: seed"), "no summary: %.200s", log);
	ENSURE(fault_count(log, row->action) == row->count, "%lu %s, expected %lu: %s", fault_count(log, row->action), row->action,
	       row->count, strstr(log, "faults: seed"));
	return NULL;
}

/* Keeps only the lines of a log about faults, and removes the process identifier. */
static void only_faults(char *log)
{
	char *to = log, *next;

	for (char *line = log; *line; line = next) {
		char *end = strchrnul(line, '\n'), *at = strstr(line, "fault: ");

		next = *end ? end + 1 : end;
		if (at && at < end) {
			memmove(to, at, (size_t)(next - at));
			to += next - at;
		}
	}
	*to = 0;
}

#define BAD_LINK "loss=0.05,dup=5%,reorder=0.02,corrupt=0.02,"

static const char *same_seed_same_faults(size_t arg)
{
	char *logs[3];

	(void)arg;
	for (int i = 0; i < 3; i++) {
		logs[i] = new_log();
		ENSURE(logs[i], "no memory");
		TRY(under(i < 2 ? BAD_LINK "seed=7" : BAD_LINK "seed=8", "ud_many", logs[i]));
		only_faults(logs[i]);
		ENSURE(strlen(logs[i]) > 1000, "few faults: %s", logs[i]);
	}
	ENSURE(!strcmp(logs[0], logs[1]), "two runs with one seed differ");
	ENSURE(strcmp(logs[0], logs[2]), "another seed gives the same faults");
	return NULL;
}

/* The number of lost messages equals the number in the summary. */
static const char *loss_is_reported(size_t arg)
{
	char *log = new_log();
	const char *at;

	(void)arg;
	ENSURE(log, "no memory");
	TRY(under("loss=0.05,seed=3", "ud_many", log));
	at = strstr(log, "arrived ");
	ENSURE(at, "%.200s", log);
	ENSURE(strtoul(at + 8, NULL, 10) + fault_count(log, "drop") == MESSAGES, "arrived %s", at + 8);
	ENSURE(fault_count(log, "drop") >= 20 && fault_count(log, "drop") <= 90, "%lu of %u lost", fault_count(log, "drop"), MESSAGES);
	return NULL;
}

static const char *survives(size_t arg)
{
	static const struct {
		const char *faults, *child;
	} all[] = {
		{ "loss=0.05,dup=0.05,reorder=0.05,corrupt=0.05,seed=1", "rd_exactly_once" },
		{ "loss=0.05,dup=0.05,reorder=0.05,corrupt=0.05,dir=rx,seed=2", "rd_exactly_once" },
		{ "loss=0.05,dup=0.05,reorder=0.05,corrupt=0.02,seed=3", "maps_are_exact" },
		{ "loss=0.05,dup=0.05,reorder=0.05,corrupt=0.02,delay=1ms,jitter=500us,dir=rx,seed=4", "maps_are_exact" },
	};
	char *log = new_log();

	ENSURE(log, "no memory");
	TRY(under(all[arg].faults, all[arg].child, log));
	ENSURE(fault_count(log, "drop") > 0 && fault_count(log, "dup") > 0 && fault_count(log, "corrupt") > 0 && fault_count(log, "reorder") > 0,
	       "a fault did not happen: %s", strstr(log, "faults: seed"));
	return NULL;
}

static const char *wrong_text(size_t arg)
{
	static const struct {
		const char *faults, *expected;
	} all[] = {
		{ "seed=1,los=0.1", "ANYWARP_FAULTS, line 1, character 8: 'los' is not one of the settings" },
		{ "@/no/such/file", "ANYWARP_FAULTS: /no/such/file: No such file" },
		{ "op=send -> explode", "character 12: 'explode' is not one of the actions" },
	};
	char *log = new_log();

	ENSURE(log, "no memory");
	TRY(under(all[arg].faults, "refused_text", log));
	ENSURE(strstr(log, all[arg].expected), "it expected: %.300s", log);
	ENSURE(!strstr(log, "faults: seed"), "a summary without faults");
	return NULL;
}

/*
 * rping, whose connection is broken on one side: both sides end and report it. (Its exit status depends on which of its
 * threads gets the error first.)
 */
static const char *rping_ends(size_t arg)
{
	char *server[] = { "rping", "-s", "-a", "127.0.0.1", "-p", arg ? "17172" : "17171", "-C", "1000", NULL };
	char *client[] = { "rping", "-c", "-a", "127.0.0.1", "-p", arg ? "17172" : "17171", "-C", "1000", NULL };
	const char *kill_at = arg ? "op=read nth=5 -> kill" : "op=send nth=5 -> kill";
	char *log = new_log(), *other = new_log();
	int status = 0, exited = 0;
	uint64_t since = now_ms();
	pid_t pid;

	ENSURE(log && other, "no memory");
	if (access("/usr/bin/rping", X_OK))
		SKIP("rping is not installed");
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		alarm(DEFAULT_SECONDS / 2);
		if (spawn(server, arg ? kill_at : "seed=1", other, &exited))
			_exit(2);
		if (arg ? fault_count(other, "kill") == 1 && strstr(other, "cq completion failed status 12") :
			  strstr(other, "server DISCONNECT EVENT") != NULL)
			_exit(WIFEXITED(exited) ? 0 : 3);
		fprintf(stderr, "%s", other);
		_exit(1);
	}
	ENSURE(pid > 0, "fork: %s", strerror(errno));
	/* A client that connects before the server listens is rejected, and is started again. */
	do {
		TRY(spawn(client, arg ? "seed=1" : kill_at, log, &status));
	} while (strstr(log, "RDMA_CM_EVENT_REJECTED") && now_ms() - since < WAIT_MS);
	ENSURE(WIFEXITED(status), "client status %#x: %.300s", (unsigned int)status, log);
	if (arg)
		ENSURE(strstr(log, "client DISCONNECT EVENT"), "output of the client: %.300s", log);
	else
		ENSURE(fault_count(log, "kill") == 1 && strstr(log, "cq completion failed status 12"), "output of the client: %.300s", log);
	ENSURE(waitpid(pid, &exited, 0) == pid && !exited, "the server: status %#x", (unsigned int)exited);
	return NULL;
}

#define ROW(n) { "exact_" #n, exact, n, 0, false }
static const struct test tests[] = {
	ROW(0), ROW(1), ROW(2), ROW(3), ROW(4), ROW(5), ROW(6), ROW(7), ROW(8), ROW(9), ROW(10), ROW(11), ROW(12), ROW(13),
	ROW(14), ROW(15), ROW(16), ROW(17), ROW(18), ROW(19), ROW(20), ROW(21), ROW(22),
	{ "same_seed_same_faults", same_seed_same_faults, 0, 0, false },
	{ "loss_is_reported", loss_is_reported, 0, 0, false },
	{ "reliable_datagrams_tx", survives, 0, 0, false },
	{ "reliable_datagrams_rx", survives, 1, 0, false },
	{ "maps_tx", survives, 2, 0, false },
	{ "maps_rx", survives, 3, 0, false },
	{ "wrong_setting", wrong_text, 0, 0, false },
	{ "wrong_file", wrong_text, 1, 0, false },
	{ "wrong_action", wrong_text, 2, 0, false },
	{ "rping_client_killed", rping_ends, 0, 0, false },
	{ "rping_server_killed", rping_ends, 1, 0, false },
};

int main(int argc, char **argv)
{
	_Static_assert(COUNT(rows) == 23, "each row is a test");

	if (argc == 3 && !strcmp(argv[1], "--child")) {
		for (size_t i = 0; i < children_count; i++) {
			const char *reason, *cleanup;

			if (strcmp(children[i].name, argv[2]))
				continue;
			alarm(DEFAULT_SECONDS / 2);
			reason = children[i].run();
			if (reason)
				fprintf(stderr, "# %s: %s [%s]\n", argv[2], reason, failed_at);
			cleanup = close_all();
			if (cleanup)
				fprintf(stderr, "# %s: %s\n", argv[2], cleanup);
			return reason || cleanup ? 1 : 0;
		}
		return 2;
	}
	return run_tests(tests, COUNT(tests), argc, argv);
}
