/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Measures what perf.c does not: registration, connecting, idle queue pairs, and fairness. Uses only public verbs. `anywarp bench`
 * and `anywarp study` run it.
 *
 *   ping    latency of a 64-byte Send, beside --idle other queue pairs that are connected but idle
 *   read    latency of a 64-byte RDMA Read while the target polls
 *   spread  4 KiB Writes on --qps queue pairs, each replaced when it completes: the rate, and how evenly it is distributed
 *   passive costs of one-sided operations for the target's thread: its system calls while it polls the memory that the peer
 *           writes, and its wake-ups while it sleeps
 *   idle    costs of --qps idle queue pairs for a process
 *   reg     ibv_reg_mr and ibv_dereg_mr; no server
 *   memory  the same with newly mapped memory, compared with copying it; no server
 *   first   time to the first byte: from no connection to a byte sent and returned, with rdma_cm and with TCP
 *   buffers RDMA Writes of memory that the program has just written: registered each time, copied, registered once, or
 *           provided by libanywarp-buffers, whole or in pieces
 *   broadcast datagrams to a multicast group with --qps members, each a process: the sum of the rates that they receive; no
 *           server
 *
 * Without a host the program is the server, if the test has one. The client prints one line of JSON. What arrives is checked,
 * except in passive; spread and buffers check the memory of the server once, at the end.
 */
#define _GNU_SOURCE
#include <anywarp-buffers.h>
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MESSAGE 64u
#define BLOCK 4096u
#define WAIT_NS 20000000000ull /* time limit of all waits */
#define MOST 4096u             /* most queue pairs */

#ifndef PR_SET_SYSCALL_USER_DISPATCH
#define PR_SET_SYSCALL_USER_DISPATCH 59
#define PR_SYS_DISPATCH_OFF 0
#define PR_SYS_DISPATCH_ON 1
#define SYSCALL_DISPATCH_FILTER_ALLOW 0
#define SYSCALL_DISPATCH_FILTER_BLOCK 1
#endif

static const char *test, *host;
static unsigned long idle_qps, qps = 1, count = 1000, millis = 1000, size = 4096, polls, port, resident, huge, threads = 1, at_once, processes, fresh_memory;
static const char *action = "register", *policy = "manager";
static int control = -1;

static struct ibv_context *device;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct ibv_qp *qp[MOST];
static unsigned long n_qps;
static uint8_t *memory;

struct info {
	union ibv_gid gid;
	uint64_t addr;
	uint32_t rkey, lid;
	uint32_t qpn[MOST];
};
static struct info mine, theirs;

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	exit(1);
}

#define MUST(expr) ((expr) ? (void)0 : die("%s:%d: %s: %s", __FILE__, __LINE__, #expr, strerror(errno)))

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---------------------------------------------------------------- the two processes */

static void meet(void)
{
	int one = 1;

	if (host) {
		struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *found;
		char service[16];

		snprintf(service, sizeof(service), "%lu", port);
		MUST(!getaddrinfo(host, service, &hints, &found));
		control = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
		MUST(control >= 0);
		MUST(!connect(control, found->ai_addr, found->ai_addrlen));
		freeaddrinfo(found);
	} else {
		struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
		int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		struct pollfd p = { .fd = listener, .events = POLLIN };

		MUST(listener >= 0);
		setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
		MUST(!bind(listener, (struct sockaddr *)&any, sizeof(any)));
		MUST(!listen(listener, 1));
		MUST(poll(&p, 1, 20000) == 1);
		control = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		MUST(control >= 0);
		close(listener);
	}
	setsockopt(control, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

static void send_all(const void *from, size_t len)
{
	MUST(send(control, from, len, MSG_NOSIGNAL) == (ssize_t)len);
}

static void receive_all(void *to, size_t len)
{
	struct pollfd p = { .fd = control, .events = POLLIN };

	if (poll(&p, 1, (int)(WAIT_NS / 1000000)) != 1)
		die("the other end sends nothing");
	if (recv(control, to, len, MSG_WAITALL) != (ssize_t)len)
		die("the other end has disconnected");
}

/* Waits until both ends have reached this point. */
static void barrier(void)
{
	char byte = '.';

	send_all(&byte, 1);
	receive_all(&byte, 1);
}

/* ---------------------------------------------------------------- verbs */

static void open_device(void)
{
	const char *wanted = getenv("ANYWARP_PERF_DEVICE");
	struct ibv_device **list = ibv_get_device_list(NULL), **one = list;

	MUST(list);
	while (*one && wanted && strcmp(wanted, ibv_get_device_name(*one)))
		one++;
	if (!*one)
		die("there is no RDMA device%s%s", wanted ? " named " : "", wanted ? wanted : "");
	device = ibv_open_device(*one);
	MUST(device);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(device);
	MUST(pd);
}

static void make(unsigned long n, unsigned int depth, size_t len)
{
	struct ibv_port_attr attr;
	unsigned long entries = n * depth * 2;

	open_device();
	if (n > MOST)
		die("at most %u queue pairs", MOST);
	n_qps = n;
	cq = ibv_create_cq(device, entries > 60000 ? 60000 : (int)entries, NULL, NULL, 0);
	MUST(cq);
	memory = aligned_alloc(4096, (len + 4095) & ~(size_t)4095);
	MUST(memory);
	memset(memory, 0, len);
	mr = ibv_reg_mr(pd, memory, len, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	MUST(mr);
	MUST(!ibv_query_port(device, 1, &attr));
	MUST(!ibv_query_gid(device, 1, 0, &mine.gid));
	mine.lid = attr.lid;
	mine.addr = (uintptr_t)memory;
	mine.rkey = mr->rkey;
	for (unsigned long i = 0; i < n; i++) {
		struct ibv_qp_init_attr init = {
			.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = depth, .max_recv_wr = depth, .max_send_sge = 1, .max_recv_sge = 1,
				 .max_inline_data = MESSAGE },
		};
		struct ibv_qp_attr to_init = { .qp_state = IBV_QPS_INIT, .port_num = 1,
			.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

		qp[i] = ibv_create_qp(pd, &init);
		MUST(qp[i]);
		MUST(!ibv_modify_qp(qp[i], &to_init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				    IBV_QP_ACCESS_FLAGS));
		mine.qpn[i] = qp[i]->qp_num;
	}
}

static void join(void)
{
	send_all(&mine, sizeof(mine));
	receive_all(&theirs, sizeof(theirs));
	for (unsigned long i = 0; i < n_qps; i++) {
		struct ibv_qp_attr rtr = {
			.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = theirs.qpn[i],
			.max_dest_rd_atomic = 16, .min_rnr_timer = 12,
			.ah_attr = { .is_global = 1, .port_num = 1, .dlid = (uint16_t)theirs.lid,
				     .grh = { .dgid = theirs.gid, .hop_limit = 64 } },
		};
		struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
					   .max_rd_atomic = 16 };

		MUST(!ibv_modify_qp(qp[i], &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
		MUST(!ibv_modify_qp(qp[i], &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				    IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
	}
	barrier();
}

static void post(unsigned long which, enum ibv_wr_opcode opcode, uint64_t wr_id, void *at, uint32_t len, uint64_t to,
		 unsigned int flags)
{
	struct ibv_sge sge = { .addr = (uintptr_t)at, .length = len, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED | flags }, *bad;
	int rc;

	wr.wr.rdma.remote_addr = theirs.addr + to;
	wr.wr.rdma.rkey = theirs.rkey;
	rc = ibv_post_send(qp[which], &wr, &bad);
	if (rc)
		die("ibv_post_send: %s", strerror(rc));
}

static void receive(unsigned long which, void *at, uint32_t len)
{
	struct ibv_sge sge = { .addr = (uintptr_t)at, .length = len, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	int rc = ibv_post_recv(qp[which], &wr, &bad);

	if (rc)
		die("ibv_post_recv: %s", strerror(rc));
}

/* Waits for the next completions by polling. Ends the program if none arrives within WAIT_NS. */
static int completions(struct ibv_wc *wc, int most)
{
	uint64_t began = 0;

	for (unsigned long looks = 1;; looks++) {
		int n = ibv_poll_cq(cq, most, wc);

		if (n < 0)
			die("ibv_poll_cq gives %d", n);
		for (int i = 0; i < n; i++)
			if (wc[i].status)
				die("a request ended: %s", ibv_wc_status_str(wc[i].status));
		if (n)
			return n;
		if (looks % 65536 == 0) {
			if (!began)
				began = now_ns();
			else if (now_ns() - began > WAIT_NS)
				die("no completion");
		}
	}
}

static uint8_t pattern(uint64_t i)
{
	return (uint8_t)(i * 131 + (i >> 8) * 7 + 1);
}

static int ascending(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return x < y ? -1 : x > y;
}

static double median_us(uint64_t *ns, unsigned long n)
{
	qsort(ns, n, sizeof(*ns), ascending);
	return (double)ns[n / 2] / 1000;
}

/* ---------------------------------------------------------------- the tests */

static void ping(void)
{
	unsigned long warmup = count / 10 + 1, sends = 0, done = 0;
	uint64_t *samples = calloc(count, sizeof(*samples)), began = 0;
	uint8_t *in = memory, *out = memory + 4096;
	struct ibv_wc wc[8];

	MUST(samples);
	make(1 + idle_qps, 64, 8192);
	in = memory;
	out = memory + 4096;
	receive(0, in, MESSAGE);
	join();
	for (unsigned long m = 0; m < count + warmup; m++) {
		bool got = false;

		memset(out, (int)(m & 0xff), MESSAGE);
		if (host) {
			began = now_ns();
			post(0, IBV_WR_SEND, 1, out, MESSAGE, 0, IBV_SEND_INLINE);
			sends++;
		}
		while (!got) {
			int n = completions(wc, 8);

			for (int i = 0; i < n; i++) {
				if (wc[i].opcode & IBV_WC_RECV)
					got = true;
				else
					done++;
			}
		}
		if (in[0] != (uint8_t)m || memcmp(in, in + 1, MESSAGE - 1))
			die("message %lu arrived with wrong content", m);
		if (host && m >= warmup)
			samples[m - warmup] = now_ns() - began;
		receive(0, in, MESSAGE);
		if (!host) {
			post(0, IBV_WR_SEND, 1, out, MESSAGE, 0, IBV_SEND_INLINE);
			sends++;
		}
		/* Wait until there is room for the next Send. */
		while (sends - done > 32)
			done += (unsigned long)completions(wc, 1);
	}
	while (done < sends)
		done += (unsigned long)completions(wc, 1);
	barrier();
	if (host)
		printf("{\"us\": %.4f}\n", median_us(samples, count) / 2);
}

static void reads(void)
{
	uint64_t *samples = calloc(count, sizeof(*samples));
	unsigned long warmup = count / 10 + 1;
	struct ibv_wc wc;
	char byte;

	MUST(samples);
	make(1, 64, 4096);
	if (!host)
		for (unsigned int i = 0; i < 4096; i++)
			memory[i] = pattern(i);
	join();
	if (!host) {
		/* The target polls, and also waits for a control message. */
		for (unsigned long looks = 0;; looks++) {
			MUST(ibv_poll_cq(cq, 1, &wc) == 0);
			ssize_t n = looks % 4096 ? -1 : recv(control, &byte, 1, MSG_DONTWAIT);

			MUST(n); /* 0: the other end has gone */
			if (n > 0)
				break;
		}
		send_all(&byte, 1);
		return;
	}
	for (unsigned long m = 0; m < count + warmup; m++) {
		uint64_t began, at = m % 63 * MESSAGE;

		memset(memory, 0, MESSAGE);
		began = now_ns();
		post(0, IBV_WR_RDMA_READ, 1, memory, MESSAGE, at, 0);
		completions(&wc, 1);
		if (m >= warmup)
			samples[m - warmup] = now_ns() - began;
		for (unsigned int i = 0; i < MESSAGE; i++)
			if (memory[i] != pattern(at + i))
				die("read %lu is wrong at byte %u", m, i);
	}
	barrier();
	printf("{\"us\": %.4f}\n", median_us(samples, count));
}

static void spread(void)
{
	unsigned long depth = 128 / qps < 2 ? 2 : 128 / qps, done = 0, each[MOST] = { 0 }, least, most;
	uint64_t began, took;
	struct ibv_wc wc[64];
	char verdict = 'y';

	make(qps, (unsigned int)depth, qps * BLOCK);
	if (host)
		for (uint64_t i = 0; i < qps * BLOCK; i++)
			memory[i] = pattern(i);
	join();
	if (!host) {
		receive_all(&verdict, 1);
		for (uint64_t i = 0; i < qps * BLOCK; i++)
			if (memory[i] != pattern(i))
				verdict = 'n';
		send_all(&verdict, 1);
		return;
	}
	began = now_ns();
	for (unsigned long d = 0; d < depth; d++)
		for (unsigned long i = 0; i < qps; i++)
			post(i, IBV_WR_RDMA_WRITE, i, memory + i * BLOCK, BLOCK, i * BLOCK, 0);
	while (done < count) {
		int n = completions(wc, 64);

		for (int i = 0; i < n; i++) {
			unsigned long which = wc[i].wr_id;

			each[which]++;
			post(which, IBV_WR_RDMA_WRITE, which, memory + which * BLOCK, BLOCK, which * BLOCK, 0);
		}
		done += (unsigned long)n;
	}
	took = now_ns() - began;
	least = most = each[0];
	for (unsigned long i = 1; i < qps; i++) {
		least = each[i] < least ? each[i] : least;
		most = each[i] > most ? each[i] : most;
	}
	for (unsigned long left = depth * qps; left;)
		left -= (unsigned long)completions(wc, 64);
	send_all(&verdict, 1);
	receive_all(&verdict, 1);
	if (verdict != 'y')
		die("the written bytes are not there");
	printf("{\"m_s\": %.6f, \"unfairness\": %.4f}\n", (double)done * 1000 / (double)took,
	       (double)(most - least) / (double)most);
}

static volatile char selector = SYSCALL_DISPATCH_FILTER_ALLOW;
static volatile unsigned long calls;

static void called(int signal)
{
	(void)signal;
	/* Only the first system call is counted. It is not executed. */
	selector = SYSCALL_DISPATCH_FILTER_ALLOW;
	calls++;
}

static long wakeups(void)
{
	struct rusage usage;

	MUST(!getrusage(RUSAGE_THREAD, &usage));
	return usage.ru_nvcsw;
}

static void traffic(unsigned long times, uint64_t last)
{
	unsigned long posted = 0, done = 0;
	struct ibv_wc wc[16];

	while (done < times) {
		while (posted < times && posted - done < 16) {
			bool write = posted % 2 == 0;

			post(0, write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, posted, memory + 4096, BLOCK, write ? 4096 : 8192, 0);
			posted++;
		}
		done += (unsigned long)completions(wc, 16);
	}
	memcpy(memory, &last, sizeof(last));
	post(0, IBV_WR_RDMA_WRITE, 0, memory, sizeof(last), 0, 0);
	completions(wc, 1);
}

static void passive(void)
{
	long results[2];
	char byte;

	make(1, 64, 3 * 4096);
	join();
	if (host) {
		traffic(count, 1);
		receive_all(&byte, 1);
		traffic(count, 2);
		send_all(&byte, 1);
		receive_all(results, sizeof(results));
		printf("{\"calls\": %ld, \"wakeups\": %ld}\n", results[0], results[1]);
		return;
	}
	/* A computing thread. The first system call that it makes raises a signal. */
	struct sigaction action = { .sa_handler = called };
	volatile uint64_t *flag = (volatile uint64_t *)(void *)memory;
	uint64_t began = now_ns();

	MUST(!sigaction(SIGSYS, &action, NULL));
	MUST(!prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON, 0ul, 0ul, &selector));
	selector = SYSCALL_DISPATCH_FILTER_BLOCK;
	syscall(SYS_getppid);
	if (calls != 1)
		die("system calls are not intercepted");
	calls = 0;
	selector = SYSCALL_DISPATCH_FILTER_BLOCK;
	for (unsigned long turns = 0; *flag != 1; turns++)
		if (turns % (1 << 20) == 0 && now_ns() - began > WAIT_NS) /* reading the clock makes no system call (vDSO) */
			break;
	selector = SYSCALL_DISPATCH_FILTER_ALLOW;
	MUST(!prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_OFF, 0ul, 0ul, 0ul));
	if (*flag != 1)
		die("nothing was written");
	results[0] = (long)calls;
	/* A sleeping thread, which wakes once, for the byte. */
	send_all("", 1);
	results[1] = wakeups();
	if (recv(control, &byte, 1, MSG_WAITALL) != 1)
		die("the other end has disconnected");
	results[1] = wakeups() - results[1] - 1;
	if (results[1] < 0)
		results[1] = 0;
	if (*flag != 2)
		die("nothing was written");
	send_all(results, sizeof(results));
}

/* Returns how often threads other than this one have waited. */
static long others_waits(void)
{
	DIR *tasks = opendir("/proc/self/task");
	struct dirent *entry;
	long all = 0;

	MUST(tasks);
	while ((entry = readdir(tasks))) {
		char path[300], line[200];
		long n;
		FILE *f;

		if (entry->d_name[0] == '.' || atoi(entry->d_name) == (int)syscall(SYS_gettid))
			continue;
		snprintf(path, sizeof(path), "/proc/self/task/%s/status", entry->d_name);
		f = fopen(path, "r");
		while (f && fgets(line, sizeof(line), f))
			if (sscanf(line, "voluntary_ctxt_switches: %ld", &n) == 1)
				all += n;
		if (f)
			fclose(f);
	}
	closedir(tasks);
	return all;
}

static double cpu_s(void)
{
	struct rusage u;

	MUST(!getrusage(RUSAGE_SELF, &u));
	return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

/* Counts in a thread of its own, so that the main thread keeps polling. If it stopped to count, the engine's thread would wake to
 * poll instead, and that wake-up would be counted. */
static void *watch(void *waits)
{
	long before = others_waits();

	usleep((useconds_t)(millis * 1000));
	*(long *)waits = others_waits() - before;
	return NULL;
}

static void idle(void)
{
	struct ibv_wc wc;
	pthread_t watcher;
	uint64_t began;
	double cpu;
	long waits = 0;

	make(qps, 4, 4096);
	join();
	/* Wait until the work after connecting is done. */
	usleep(300000);
	began = now_ns();
	cpu = cpu_s();
	if (polls) {
		/* This thread polls for longer than the other one counts. */
		uint64_t until = began + millis * 1000000 + 200000000;
		bool watched = false;

		while (now_ns() < until) {
			MUST(ibv_poll_cq(cq, 1, &wc) == 0);
			if (!watched && now_ns() > began + 100000000) {
				watched = true;
				MUST(!pthread_create(&watcher, NULL, watch, &waits));
			}
		}
		MUST(watched && !pthread_join(watcher, NULL));
	} else {
		waits = others_waits();
		usleep((useconds_t)(millis * 1000));
		waits = others_waits() - waits;
	}
	cpu = cpu_s() - cpu;
	if (host)
		printf("{\"share\": %.6f, \"wakeups\": %ld}\n", cpu * 1e9 / (double)(now_ns() - began), waits);
	barrier();
}

static void reg(void)
{
	uint64_t *ns = calloc(2 * count, sizeof(*ns));
	void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	MUST(ns && at != MAP_FAILED);
	open_device();
	for (unsigned long i = 0; i < count; i++) {
		uint64_t began = now_ns(), middle;
		struct ibv_mr *one = ibv_reg_mr(pd, at, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);

		middle = now_ns();
		MUST(one);
		MUST(!ibv_dereg_mr(one));
		ns[i] = middle - began;
		ns[count + i] = now_ns() - middle;
	}
	printf("{\"us\": %.4f, ", median_us(ns, count));
	printf("\"dereg_us\": %.4f}\n", median_us(ns + count, count));
}

/* ---------------------------------------------------------------- memory */

#define HUGE (2ul << 20)
#define LEAST_TIMES 5u   /* for each action, whatever its duration */
#define MOST_TIMES 20000u
#define MOST_THREADS 16u

/* Returns a new mapping, whose pages are touched if they should be resident. */
static uint8_t *fresh(void **mapping, size_t *length)
{
	uint8_t *at;

	*length = (size + HUGE - 1) / HUGE * HUGE + HUGE;
	*mapping = mmap(NULL, *length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	MUST(*mapping != MAP_FAILED);
	at = (uint8_t *)(((uintptr_t)*mapping + HUGE - 1) / HUGE * HUGE);
	if (madvise(at, *length - HUGE, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) && huge)
		die("this kernel has no transparent huge pages");
	for (size_t i = 0; resident && i < size; i += 4096)
		at[i] = 1;
	return at;
}

static uint64_t thread_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static struct ibv_mr *register_at(void *at)
{
	struct ibv_mr *one = ibv_reg_mr(pd, at, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);

	if (!one)
		die("ibv_reg_mr of %lu bytes: %s%s", size, strerror(errno), errno == ENOMEM || errno == EPERM ? " (more memory may be locked after `ulimit -l unlimited`, as root)" : "");
	return one;
}

static pthread_barrier_t start;

/* A thread that registers memory at the same time as others. */
static void *register_too(void *at)
{
	pthread_barrier_wait(&start);
	return register_at(at);
}

/* Registers --threads mappings, in parallel or one after the other. Returns the time until all are registered. */
static uint64_t several(void)
{
	void *mapping[MOST_THREADS], *at[MOST_THREADS], *mr_of[MOST_THREADS];
	size_t length[MOST_THREADS];
	pthread_t thread[MOST_THREADS];
	uint64_t began, took;

	for (unsigned long i = 0; i < threads; i++)
		at[i] = fresh(&mapping[i], &length[i]);
	if (at_once) {
		MUST(!pthread_barrier_init(&start, NULL, (unsigned int)threads + 1));
		for (unsigned long i = 0; i < threads; i++)
			MUST(!pthread_create(&thread[i], NULL, register_too, at[i]));
		began = now_ns();
		pthread_barrier_wait(&start);
		for (unsigned long i = 0; i < threads; i++)
			MUST(!pthread_join(thread[i], &mr_of[i]));
		took = now_ns() - began;
		pthread_barrier_destroy(&start);
	} else {
		began = now_ns();
		for (unsigned long i = 0; i < threads; i++)
			mr_of[i] = register_at(at[i]);
		took = now_ns() - began;
	}
	for (unsigned long i = 0; i < threads; i++) {
		MUST(!ibv_dereg_mr(mr_of[i]));
		munmap(mapping[i], length[i]);
	}
	return took;
}

/* What the processes of --processes share. */
struct shared {
	pthread_barrier_t start, end;
	atomic_bool over;
};

/* Handles SIGCHLD: ends this process, which would otherwise wait at a barrier for the child process that has failed. */
static void process_failed(int signal_number)
{
	(void)signal_number;
	_exit(1);
}

/* Forks --threads processes. Each registers its mapping repeatedly between the two barriers, until `over` is set. It opens the
   device itself, because a device cannot be used after a fork. */
static struct shared *fork_processes(pid_t *child)
{
	struct shared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pthread_barrierattr_t of_processes;

	MUST(shared != MAP_FAILED);
	MUST(!pthread_barrierattr_init(&of_processes) && !pthread_barrierattr_setpshared(&of_processes, PTHREAD_PROCESS_SHARED));
	MUST(!pthread_barrier_init(&shared->start, &of_processes, (unsigned int)threads + 1));
	MUST(!pthread_barrier_init(&shared->end, &of_processes, (unsigned int)threads + 1));
	signal(SIGCHLD, process_failed);
	for (unsigned long i = 0; i < threads; i++) {
		child[i] = fork();
		MUST(child[i] >= 0);
		if (child[i])
			continue;
		signal(SIGCHLD, SIG_DFL);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		open_device();
		for (;;) {
			void *mapping, *at, *registered;
			size_t length;

			at = fresh(&mapping, &length);
			pthread_barrier_wait(&shared->start);
			if (shared->over)
				_exit(0);
			registered = register_at(at);
			pthread_barrier_wait(&shared->end);
			MUST(!ibv_dereg_mr(registered));
			munmap(mapping, length);
		}
	}
	return shared;
}

static void memory_costs(void)
{
	pid_t child[MOST_THREADS];
	struct shared *shared = NULL;
	bool registers = !strcmp(action, "register"), deregisters = !strcmp(action, "deregister"), copies = !strcmp(action, "copy");
	uint64_t *ns = calloc(MOST_TIMES, sizeof(*ns)), began = now_ns(), spent = 0, busy = 0;
	uint8_t *pool = NULL;
	unsigned long n = 0;

	MUST(ns);
	if (!registers && !deregisters && !copies)
		die("--action is register, deregister or copy");
	if (threads > MOST_THREADS || (threads > 1 && !registers))
		die("--threads is at most %u, and for --action register", MOST_THREADS);
	if (processes && at_once && threads > 1)
		shared = fork_processes(child);
	open_device();
	if (copies) {
		pool = malloc(size);
		MUST(pool);
		memset(pool, 2, size);
	}
	while (n < MOST_TIMES && (n < LEAST_TIMES || now_ns() - began < millis * 1000000)) {
		uint64_t before, cpu;
		void *mapping;
		size_t length;
		uint8_t *at;

		if (shared) {
			pthread_barrier_wait(&shared->start);
			before = now_ns();
			pthread_barrier_wait(&shared->end);
			ns[n++] = now_ns() - before;
			continue;
		}
		if (threads > 1) {
			ns[n++] = several();
			continue;
		}
		at = fresh(&mapping, &length);
		cpu = thread_ns();
		before = now_ns();
		if (copies) {
			memcpy(pool, at, size);
			ns[n] = now_ns() - before;
			if (pool[size - 1] != (resident && (size - 1) % 4096 == 0) || pool[0] != resident)
				die("the copy is wrong");
		} else {
			struct ibv_mr *one = register_at(at);

			if (registers)
				ns[n] = now_ns() - before;
			if (deregisters) {
				cpu = thread_ns();
				before = now_ns();
			}
			MUST(!ibv_dereg_mr(one));
			if (deregisters)
				ns[n] = now_ns() - before;
		}
		busy += thread_ns() - cpu;
		spent += now_ns() - before;
		munmap(mapping, length);
		n++;
	}
	if (shared) {
		signal(SIGCHLD, SIG_DFL);
		shared->over = true;
		pthread_barrier_wait(&shared->start);
		for (unsigned long i = 0; i < threads; i++)
			MUST(waitpid(child[i], NULL, 0) == child[i]);
	}
	printf("{\"us\": %.4f, \"cpu\": %.2f, \"times\": %lu}\n", median_us(ns, n), spent ? 100.0 * (double)busy / (double)spent : 0.0, n);
}

/* ---------------------------------------------------------------- buffers */

static void put(uint8_t *at, uint64_t seed)
{
	for (size_t i = 0; i < size; i += 8) {
		uint64_t word = (i + seed) * 0x9e3779b97f4a7c15u;

		memcpy(at + i, &word, size - i < 8 ? size - i : 8);
	}
}

static bool is_put(const uint8_t *at, uint64_t seed)
{
	for (size_t i = 0; i < size; i += 8) {
		uint64_t word = (i + seed) * 0x9e3779b97f4a7c15u;

		if (memcmp(at + i, &word, size - i < 8 ? size - i : 8))
			return false;
	}
	return true;
}

static uint64_t process_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void write_out(const void *at, size_t len, uint32_t lkey, uint64_t to)
{
	struct ibv_sge sge = { .addr = (uintptr_t)at, .length = (uint32_t)len, .lkey = lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED },
			   *bad;
	int rc;

	wr.wr.rdma.remote_addr = theirs.addr + to;
	wr.wr.rdma.rkey = theirs.rkey;
	rc = ibv_post_send(qp[0], &wr, &bad);
	if (rc)
		die("ibv_post_send: %s", strerror(rc));
}

/* Gets the next pieces while earlier ones are sent. Returns the time of the library's calls. */
static uint64_t write_pieces(struct awbuf *buffers, uint8_t *at)
{
	uint64_t to = 0, before = now_ns(), took;
	struct awbuf_pieces *pieces = awbuf_pieces_begin(buffers, at, size, AWBUF_SEND, 0);
	struct awbuf_buffer sent[8];
	unsigned long posted = 0, done = 0;
	struct ibv_wc wc;

	took = now_ns() - before;

	MUST(pieces);
	for (;;) {
		struct awbuf_buffer *next = &sent[posted % 8];
		int more;

		if (posted - done == 8) {
			completions(&wc, 1);
			before = now_ns();
			MUST(!awbuf_release(&sent[done++ % 8], 0));
			took += now_ns() - before;
		}
		before = now_ns();
		more = awbuf_pieces_next(pieces, next);
		took += now_ns() - before;
		if (more < 0)
			die("awbuf_pieces_next: %s", strerror(errno));
		if (!more)
			break;
		write_out(next->addr, next->length, next->lkey, to);
		to += next->length;
		posted++;
	}
	while (done < posted) {
		completions(&wc, 1);
		before = now_ns();
		MUST(!awbuf_release(&sent[done++ % 8], 0));
		took += now_ns() - before;
	}
	before = now_ns();
	MUST(!awbuf_pieces_end(pieces));
	return took + now_ns() - before;
}

static void buffers_cost(void)
{
	static const char *const policies[] = { "register", "copy", "reuse", "manager", "pieces" };
	enum { REGISTER, COPY, REUSE, MANAGER, PIECES, NONE } how = 0;
	uint64_t *ns = calloc(MOST_TIMES, sizeof(*ns)), *ready = calloc(MOST_TIMES, sizeof(*ready));
	uint64_t began, spent = 0, busy = 0, seed = 0;
	struct awbuf *buffers = NULL;
	unsigned long n = 0;
	void *mapping = NULL;
	uint8_t *at = NULL;
	size_t length = 0;
	struct ibv_wc wc;
	char verdict;

	while (how < NONE && strcmp(policy, policies[how]))
		how++;
	if (how == NONE)
		die("--policy is register, copy, reuse, manager or pieces");
	MUST(ns && ready);
	make(1, 64, size);
	join();
	if (!host) {
		receive_all(&seed, sizeof(seed));
		verdict = is_put(memory, seed) ? 'y' : 'n';
		send_all(&verdict, 1);
		return;
	}
	if (how == MANAGER || how == PIECES) {
		buffers = awbuf_open(pd, NULL);
		if (!buffers)
			die("awbuf_open: %s%s", strerror(errno), errno == ENOMEM ? " (more memory may be locked after `ulimit -l unlimited`, as root)" : "");
	}
	resident = 1;
	began = now_ns();
	while (n < MOST_TIMES && (n < LEAST_TIMES || now_ns() - began < millis * 1000000)) {
		uint64_t before, middle, after, cpu;

		if (how == REUSE)
			at = memory;
		else if (!at || fresh_memory)
			at = fresh(&mapping, &length);
		put(at, ++seed);
		cpu = process_ns();
		before = now_ns();
		if (how == REGISTER) {
			struct ibv_mr *one = register_at(at);

			middle = now_ns();
			write_out(at, size, one->lkey, 0);
			completions(&wc, 1);
			after = now_ns();
			MUST(!ibv_dereg_mr(one));
		} else if (how == MANAGER) {
			struct awbuf_buffer one;

			if (awbuf_get_send(buffers, at, size, 0, &one))
				die("awbuf_get_send of %lu bytes: %s", size, strerror(errno));
			middle = now_ns();
			write_out(one.addr, size, one.lkey, 0);
			completions(&wc, 1);
			after = now_ns();
			MUST(!awbuf_release(&one, 0));
		} else if (how == PIECES) {
			middle = before + write_pieces(buffers, at);
			after = now_ns();
		} else {
			if (how == COPY)
				memcpy(memory, at, size);
			middle = now_ns();
			write_out(memory, size, mr->lkey, 0);
			completions(&wc, 1);
			after = now_ns();
		}
		ns[n] = now_ns() - before;
		/* The time of everything except the transfer. */
		ready[n] = middle - before + (before + ns[n] - after);
		n++;
		busy += process_ns() - cpu;
		spent += now_ns() - before;
		if (fresh_memory && how != REUSE)
			munmap(mapping, length);
	}
	send_all(&seed, sizeof(seed));
	receive_all(&verdict, 1);
	if (verdict != 'y')
		die("the written bytes are not there");
	if (buffers) {
		struct awbuf_stats stats;

		MUST(!awbuf_query(buffers, &stats, sizeof(stats)));
		MUST(!awbuf_close(buffers));
		printf("{\"critical\": %" PRIu64 ", \"hits\": %" PRIu64 ", \"copied\": %" PRIu64 ", ", stats.critical_size, stats.hits,
		       stats.copied);
	} else {
		printf("{");
	}
	double us = median_us(ns, n);

	printf("\"us\": %.4f, \"ready_us\": %.4f, \"mbps\": %.3f, \"cpu\": %.2f, \"times\": %lu}\n", us, median_us(ready, n), (double)size * 8 / us,
	       spent ? 100.0 * (double)busy / (double)spent : 0.0, n);
}

/* ---------------------------------------------------------------- time to the first byte */

static struct rdma_addrinfo *resolve(const char *node, const char *service, int flags)
{
	struct rdma_addrinfo hints = { .ai_flags = flags, .ai_port_space = RDMA_PS_TCP }, *found;

	if (rdma_getaddrinfo(node, service, &hints, &found))
		die("rdma_getaddrinfo: %s", strerror(errno));
	return found;
}

static struct ibv_qp_init_attr small_qp(void)
{
	return (struct ibv_qp_init_attr){ .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
					  .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
}

static void rdma_once(const char *node, const char *service, uint8_t *byte)
{
	struct rdma_addrinfo *to = resolve(node, service, 0);
	struct ibv_qp_init_attr attr = small_qp();
	struct rdma_cm_id *id;
	struct ibv_mr *one;
	struct ibv_wc wc;

	if (rdma_create_ep(&id, to, NULL, &attr))
		die("rdma_create_ep: %s", strerror(errno));
	rdma_freeaddrinfo(to);
	one = rdma_reg_msgs(id, byte, 2);
	MUST(one);
	MUST(!rdma_post_recv(id, NULL, byte + 1, 1, one));
	if (rdma_connect(id, NULL))
		die("rdma_connect: %s", strerror(errno));
	MUST(!rdma_post_send(id, NULL, byte, 1, one, 0));
	MUST(rdma_get_recv_comp(id, &wc) == 1 && !wc.status);
	MUST(rdma_get_send_comp(id, &wc) == 1 && !wc.status);
	rdma_disconnect(id);
	rdma_dereg_mr(one);
	rdma_destroy_ep(id);
}

static void rdma_answer(struct rdma_cm_id *listener)
{
	struct rdma_cm_id *id;
	struct ibv_mr *one;
	struct ibv_wc wc;
	uint8_t byte[1];

	if (rdma_get_request(listener, &id))
		die("rdma_get_request: %s", strerror(errno));
	one = rdma_reg_msgs(id, byte, 1);
	MUST(one);
	MUST(!rdma_post_recv(id, NULL, byte, 1, one));
	MUST(!rdma_accept(id, NULL));
	MUST(rdma_get_recv_comp(id, &wc) == 1 && !wc.status);
	MUST(!rdma_post_send(id, NULL, byte, 1, one, 0));
	MUST(rdma_get_send_comp(id, &wc) == 1 && !wc.status);
	barrier();
	rdma_disconnect(id);
	rdma_dereg_mr(one);
	rdma_destroy_ep(id);
}

static void first(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET };
	uint64_t *rdma_ns = calloc(count, sizeof(*rdma_ns)), *tcp_ns = calloc(count, sizeof(*tcp_ns)), began;
	socklen_t length = sizeof(any);
	struct rdma_cm_id *listener;
	uint16_t ports[2];
	uint8_t byte[2];

	MUST(rdma_ns && tcp_ns);
	if (!host) {
		struct rdma_addrinfo *here = resolve(NULL, "0", RAI_PASSIVE);
		struct ibv_qp_init_attr attr = small_qp();
		int tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

		MUST(!rdma_create_ep(&listener, here, NULL, &attr));
		rdma_freeaddrinfo(here);
		MUST(!rdma_listen(listener, 16));
		MUST(tcp >= 0 && !bind(tcp, (struct sockaddr *)&any, sizeof(any)) && !listen(tcp, 16));
		MUST(!getsockname(tcp, (struct sockaddr *)&any, &length));
		ports[0] = ntohs(rdma_get_src_port(listener));
		ports[1] = ntohs(any.sin_port);
		send_all(ports, sizeof(ports));
		for (unsigned long i = 0; i < count; i++) {
			int one;

			rdma_answer(listener);
			one = accept4(tcp, NULL, NULL, SOCK_CLOEXEC);
			MUST(one >= 0 && recv(one, byte, 1, 0) == 1 && send(one, byte, 1, MSG_NOSIGNAL) == 1);
			barrier();
			close(one);
		}
		rdma_destroy_ep(listener);
		return;
	}
	receive_all(ports, sizeof(ports));
	for (unsigned long i = 0; i < count; i++) {
		struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST }, *found;
		char service[16];
		int one;

		snprintf(service, sizeof(service), "%u", ports[0]);
		byte[0] = (uint8_t)i;
		byte[1] = (uint8_t)~i;
		began = now_ns();
		rdma_once(host, service, byte);
		rdma_ns[i] = now_ns() - began;
		if (byte[1] != (uint8_t)i)
			die("the byte arrived with a wrong value");
		barrier();
		snprintf(service, sizeof(service), "%u", ports[1]);
		began = now_ns();
		MUST(!getaddrinfo(host, service, &hints, &found));
		one = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
		MUST(one >= 0 && !connect(one, found->ai_addr, found->ai_addrlen));
		MUST(send(one, byte, 1, MSG_NOSIGNAL) == 1 && recv(one, byte + 1, 1, 0) == 1);
		tcp_ns[i] = now_ns() - began;
		freeaddrinfo(found);
		barrier();
		close(one);
	}
	printf("{\"us\": %.4f, \"tcp_us\": %.4f}\n", median_us(rdma_ns, count), median_us(tcp_ns, count));
}

/* ---------------------------------------------------------------- one sender, several receivers */

#define MEMBERS 8u
#define GRH 40u
#define RECEIVES 1024u
#define SENDS 64u
#define GROUP_QKEY 0x2468acu
#define WARM_NS 50000000ull

/* What the processes have in common. */
static struct {
	_Atomic unsigned int ready;
	_Atomic bool counts, stop;
	_Atomic uint64_t bytes[MEMBERS];
} *group;

/*
 * Makes a datagram queue pair and memory for `slots` messages. Returns the GID of the group. Its last byte is the lowest byte of the
 * parent's process number. The parent of a receiver is the sender; the sender has to replace that byte by the one of its own number.
 */
static union ibv_gid join_group(unsigned int slots, size_t slot, bool sends)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_UD, .cap = { .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = GROUP_QKEY };
	union ibv_gid gid = { .raw = { [10] = 0xff, [11] = 0xff, [12] = 239, [13] = 88, [14] = 1, [15] = (uint8_t)(getppid() & 0xff) } };

	open_device();
	cq = ibv_create_cq(device, (int)slots + 1, NULL, NULL, 0);
	memory = calloc(slots, slot);
	MUST(cq && memory);
	mr = ibv_reg_mr(pd, memory, slots * slot, IBV_ACCESS_LOCAL_WRITE);
	MUST(mr);
	init.send_cq = init.recv_cq = cq;
	*(sends ? &init.cap.max_send_wr : &init.cap.max_recv_wr) = slots;
	qp[0] = ibv_create_qp(pd, &init);
	MUST(qp[0]);
	MUST(!(errno = ibv_modify_qp(qp[0], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY)));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR };
	MUST(!(errno = ibv_modify_qp(qp[0], &attr, IBV_QP_STATE)));
	attr.qp_state = IBV_QPS_RTS;
	MUST(!(errno = ibv_modify_qp(qp[0], &attr, IBV_QP_STATE | IBV_QP_SQ_PSN)));
	return gid;
}

/* Receives until the sender has ended, and checks that all bytes of each message are equal. */
static void member(unsigned int number)
{
	uint64_t end = now_ns() + WAIT_NS;
	size_t slot = size + GRH;
	union ibv_gid gid = join_group(RECEIVES, slot, false);
	struct ibv_wc wc[16];

	MUST(!(errno = ibv_attach_mcast(qp[0], &gid, 0)));
	for (unsigned int i = 0; i < RECEIVES; i++)
		receive(0, memory + i * slot, (uint32_t)slot);
	group->ready++;
	for (unsigned int next = 0; !group->stop && now_ns() < end;) {
		int n = ibv_poll_cq(cq, 16, wc);

		MUST(n >= 0);
		for (int i = 0; i < n; i++, next = (next + 1) % RECEIVES) {
			uint8_t *at = memory + next * slot, *message = at + GRH;

			if (wc[i].status || wc[i].byte_len != slot)
				die("a receive ends with %s and %u bytes", ibv_wc_status_str(wc[i].status), wc[i].byte_len);
			if (memcmp(message, message + 1, size - 1))
				die("a message was changed");
			if (group->counts)
				group->bytes[number] += size;
			receive(0, at, (uint32_t)slot);
		}
		if (!n)
			sched_yield();
	}
}

static void broadcast(void)
{
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1 };
	uint64_t end = now_ns() + WAIT_NS, began = 0, sent = 0, received = 0, taken;
	unsigned int outstanding = 0;
	pid_t members[MEMBERS];
	struct ibv_wc wc[16];
	struct ibv_ah *ah;
	uint8_t value = 0;

	if (qps > MEMBERS || size < 2 || size > 4096)
		die("broadcast has up to %u --qps, and a --size from 2 to 4096", MEMBERS);
	group = mmap(NULL, sizeof(*group), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	MUST(group != MAP_FAILED);
	for (unsigned int i = 0; i < qps; i++) {
		members[i] = fork();
		MUST(members[i] >= 0);
		if (!members[i]) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			member(i);
			_exit(0);
		}
	}
	to.grh.dgid = join_group(SENDS, size, true);
	to.grh.dgid.raw[15] = (uint8_t)(getpid() & 0xff);
	to.grh.hop_limit = 1;
	ah = ibv_create_ah(pd, &to);
	MUST(ah);
	while (group->ready < qps) {
		if (now_ns() > end || waitpid(-1, NULL, WNOHANG) > 0)
			die("a receiver does not start");
		sched_yield();
	}
	end = now_ns() + WARM_NS;
	for (unsigned int next = 0;;) {
		int n = ibv_poll_cq(cq, 16, wc);
		uint64_t now = now_ns();

		MUST(n >= 0);
		outstanding -= (unsigned int)n;
		for (int i = 0; i < n; i++)
			if (wc[i].status)
				die("a send ends with %s", ibv_wc_status_str(wc[i].status));
		if (now > end && began) {
			taken = now - began;
			break;
		}
		if (now > end) {
			group->counts = true;
			began = now;
			end = now + millis * 1000000u;
		}
		for (; outstanding < SENDS; outstanding++, next = (next + 1) % SENDS) {
			struct ibv_sge sge = { .addr = (uintptr_t)(memory + next * size), .length = (uint32_t)size, .lkey = mr->lkey };
			struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED },
					   *bad;

			memset(memory + next * size, value++, size);
			wr.wr.ud.ah = ah;
			wr.wr.ud.remote_qpn = 0xffffff;
			wr.wr.ud.remote_qkey = GROUP_QKEY;
			MUST(!(errno = ibv_post_send(qp[0], &wr, &bad)));
			sent += began != 0;
		}
	}
	group->counts = false;
	group->stop = true;
	for (unsigned int i = 0; i < qps; i++) {
		int status;

		MUST(waitpid(members[i], &status, 0) == members[i]);
		if (status)
			die("a receiver has failed");
		received += group->bytes[i];
	}
	if (!received)
		die("nothing was received");
	printf("{\"us\": %.4f, \"mbps\": %.4f, \"sent_mbps\": %.4f, \"delivered\": %.4f}\n", (double)taken / 1000 * (double)size / (double)received,
	       (double)received * 8000 / (double)taken, (double)(sent * size) * 8000 / (double)taken,
	       100.0 * (double)received / (double)(sent * size * qps));
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
		bool two;
	} tests[] = {
		{ "ping", ping, true }, { "read", reads, true }, { "spread", spread, true }, { "passive", passive, true },
		{ "idle", idle, true }, { "reg", reg, false }, { "memory", memory_costs, false }, { "first", first, true },
		{ "buffers", buffers_cost, true }, { "broadcast", broadcast, false },
	};
	struct {
		const char *name;
		unsigned long *to;
	} options[] = {
		{ "--idle", &idle_qps }, { "--qps", &qps }, { "--count", &count }, { "--millis", &millis },
		{ "--size", &size }, { "--poll", &polls }, { "--port", &port }, { "--resident", &resident }, { "--huge", &huge },
		{ "--threads", &threads }, { "--at-once", &at_once }, { "--processes", &processes }, { "--fresh", &fresh_memory },
	};

	test = argc > 1 ? argv[1] : "";
	for (int i = 2; i < argc; i++) {
		bool known = false;

		if (!strcmp(argv[i], "--action") && i + 1 < argc) {
			action = argv[++i];
			continue;
		}
		if (!strcmp(argv[i], "--policy") && i + 1 < argc) {
			policy = argv[++i];
			continue;
		}
		for (size_t o = 0; o < sizeof(options) / sizeof(*options) && i + 1 < argc && !known; o++)
			if (!strcmp(argv[i], options[o].name)) {
				*options[o].to = strtoul(argv[++i], NULL, 10);
				known = true;
			}
		if (!known)
			host = argv[i];
	}
	if (!count || !qps || !size || !threads)
		die("--count, --qps, --size and --threads are at least 1");
	for (size_t t = 0; t < sizeof(tests) / sizeof(*tests); t++)
		if (!strcmp(test, tests[t].name)) {
			if (tests[t].two)
				meet();
			tests[t].run();
			return 0;
		}
	die("usage: %s ping|read|spread|passive|idle|reg|memory|first|buffers|broadcast [options] [HOST]", argv[0]);
}
