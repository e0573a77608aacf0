/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Eight accepted peers send as much as the protocol allows. A ninth peer occasionally reads 64 bytes and must get them
 * in time. The serving program is the process of the test. The eight peers share one process; the ninth has another.
 */
#include "dgrams.h"
#include "mpa.h"

#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define GREEDY 8
/* The number of Reads in a round, and of rounds. Other programs may delay some rounds; an unfair server delays all. */
#define READS 100
#define ROUNDS 5
/* The time limits for half and for nine tenths of the Reads allow for three busy processes on two processors. */
#define HALF_MS 5.0
#define MOST_MS 25.0
/*
 * What the eight peers must have transferred for a valid test: on streams FLOOD kilobytes that they have sent or, with LONG_READS,
 * received; with datagrams FLOOD / 20 completed requests.
 */
#define FLOOD 10000
#define ASKED 64u

enum flood { NOTHING, EMPTY_WRITES, SMALL_WRITES, LONG_WRITES, LONG_READS };

static struct shared {
	__typeof__(target) stream;
	struct { uint32_t qpn; struct there memory; } dgram;
	_Atomic bool ready, flooding, over;
	_Atomic uint64_t flooded; /* bytes for streams, requests for datagrams */
	double half, most, longest; /* in the best round, in milliseconds */
} *shared;

static void wait_for_flag(const _Atomic bool *flag)
{
	for (uint64_t end = now_ms() + 20000; !*flag; sleep_ms(1))
		if (now_ms() > end)
			_exit(3);
}

static int in_order(const void *a, const void *b)
{
	double left = *(const double *)a, right = *(const double *)b;

	return left < right ? -1 : left > right;
}

/* Measures rounds of Reads with `read`, until one round meets the limits. */
static const char *measure(const char *(*read)(uint32_t number))
{
	double times[READS];

	for (uint32_t i = 0; i < ROUNDS * READS; i++) {
		uint64_t begin;

		sleep_ms(2);
		begin = now_ns();
		TRY(read(i));
		times[i % READS] = (double)(now_ns() - begin) / 1e6;
		if (i % READS < READS - 1)
			continue;
		qsort(times, READS, sizeof *times, in_order);
		if (i < READS || times[READS / 2] < shared->half) {
			shared->half = times[READS / 2];
			shared->most = times[READS / 10 * 9];
			shared->longest = times[READS - 1];
		}
		if (shared->half <= HALF_MS && shared->most <= MOST_MS)
			break;
	}
	return NULL;
}

/* ---------------------------------------------------------------- streams: peers that use plain sockets */

/* What a greedy peer sends repeatedly. Writes have no sequence number, so the same bytes can be sent again. */
static void fill_flood(struct wire *w, enum flood flood)
{
	size_t payload = flood == EMPTY_WRITES ? 0 : flood == SMALL_WRITES ? 1 : 60000;

	do {
		size_t at = begin_tagged(w, OP_WRITE, target.open, target.open_at + 4096);

		w->len += payload;
		end_fpdu(w, at, 0);
	} while (flood != LONG_WRITES && w->len < 60000);
}

struct greedy {
	int fd;
	size_t sent;   /* position in the repeated bytes */
	size_t left;   /* remaining bytes of the FPDU that is being received */
	size_t owed;   /* requested payload that has not arrived */
	uint8_t first; /* first byte of a length, if it arrived alone */
	bool half;
	uint32_t msn;
};

/* Parses received bytes. */
static void take(struct greedy *g, const uint8_t *at, size_t n)
{
	while (n > 0) {
		size_t skip = g->left < n ? g->left : n;

		at += skip;
		n -= skip;
		g->left -= skip;
		if (g->left > 0 || n == 0)
			continue;
		if (g->half) {
			size_t length = (size_t)g->first << 8 | *at;

			/*
			 * The FPDU is padded to four bytes and has a CRC. Two bytes of it are the length, and 14 are
			 * headers.
			 */
			g->left = (length + 2 + 3) / 4 * 4 + 4 - 2;
			g->owed -= length - 14;
		} else {
			g->first = *at;
		}
		g->half = !g->half;
		at++;
		n--;
	}
}

#define ANSWER (1u << 18)

/* Receives what has arrived, and requests Reads so that four are outstanding. */
static bool ask_more(struct greedy *g)
{
	static uint8_t bytes[ANSWER];
	struct wire w = { .len = 0 };
	ssize_t n = recv(g->fd, bytes, sizeof bytes, MSG_DONTWAIT);

	if (n == 0 || (n < 0 && errno != EAGAIN))
		return false;
	if (n > 0) {
		take(g, bytes, (size_t)n);
		shared->flooded += (uint64_t)n;
	}
	for (; g->owed <= 3 * ANSWER; g->owed += ANSWER)
		read_request(&w, ++g->msn, ANSWER, target.open, target.open_at);
	return w.len == 0 || send_all(g->fd, w.at, w.len);
}

static int be_greedy_streams(enum flood flood)
{
	struct greedy peers[GREEDY] = { 0 };
	struct wire *w = calloc(1, sizeof *w);

	wait_for_flag(&shared->ready);
	target = shared->stream;
	if (flood != LONG_READS)
		fill_flood(w, flood);
	for (int i = 0; i < GREEDY; i++) {
		peers[i].fd = connect_peer((unsigned int)i);
		if (peers[i].fd < 0)
			return 2;
	}
	shared->flooding = true;
	while (!shared->over) {
		struct pollfd p[GREEDY];

		for (int i = 0; i < GREEDY; i++)
			p[i] = (struct pollfd){ .fd = peers[i].fd, .events = flood == LONG_READS ? POLLIN : POLLOUT };
		if (flood != LONG_READS)
			poll(p, GREEDY, 10);
		for (int i = 0; i < GREEDY; i++) {
			ssize_t n;

			if (flood == LONG_READS) {
				if (!ask_more(&peers[i]))
					return 4;
				continue;
			}
			n = send(peers[i].fd, w->at + peers[i].sent, w->len - peers[i].sent, MSG_NOSIGNAL | MSG_DONTWAIT);
			if (n < 0 && errno != EAGAIN)
				return 4;
			if (n > 0) {
				shared->flooded += (uint64_t)n;
				peers[i].sent = (peers[i].sent + (size_t)n) % w->len;
			}
		}
	}
	return 0;
}

static int modest_fd;

static const char *read_stream(uint32_t number)
{
	/* Length, DDP and RDMAP header, payload, CRC. */
	uint8_t answer[2 + 14 + ASKED + 4];
	struct wire w = { .len = 0 };

	read_request(&w, number + 1, ASKED, target.open, target.open_at);
	ENSURE(send_all(modest_fd, w.at, w.len) && receive_all(modest_fd, answer, sizeof answer),
	       "the connection of the modest peer ends");
	return NULL;
}

static const char *modest_stream(void)
{
	target = shared->stream;
	modest_fd = connect_peer(GREEDY);
	ENSURE(modest_fd >= 0, "the modest peer cannot connect");
	return measure(read_stream);
}

/* ---------------------------------------------------------------- reliable datagrams: peers that use queue pairs */

static const char *open_peer(struct dgram *d)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD, .flags = ANYWARPDV_QP_PLAIN_WRITES };

	return open_dgram(d, &dv);
}

static const char *greedy_dgrams(enum flood flood)
{
	static struct dgram peers[GREEDY];
	static unsigned int under_way[GREEDY];
	enum what what = flood == LONG_READS ? READ : WRITE;
	size_t len = flood == SMALL_WRITES ? 1 : 1u << 18;
	struct there to = shared->dgram.memory;
	struct region mine[GREEDY];

	TRY(find_all());
	for (int i = 0; i < GREEDY; i++) {
		TRY(open_peer(&peers[i]));
		TRY(new_region(&mine[i], peers[i].pd, 1u << 18, IBV_ACCESS_LOCAL_WRITE));
	}
	to.at += 4096;
	while (!shared->over) {
		/* The device's thread transfers the data. A polling thread would take processor time from the server. */
		usleep(50);
		for (int i = 0; i < GREEDY; i++) {
			struct ibv_wc wc;

			for (; under_way[i] < 8; under_way[i]++)
				TRY(request_to(&peers[i], shared->dgram.qpn, what, 1, &mine[i], len, to));
			while (ibv_poll_cq(peers[i].scq, 1, &wc) == 1) {
				ENSURE(wc.status == IBV_WC_SUCCESS, "a greedy peer: %s", ibv_wc_status_str(wc.status));
				under_way[i]--;
				shared->flooded++;
				shared->flooding = true;
			}
		}
	}
	return NULL;
}

static struct dgram modest;
static struct region answers;

static const char *read_dgram(uint32_t number)
{
	TRY(request_to(&modest, shared->dgram.qpn, READ, number, &answers, ASKED, shared->dgram.memory));
	/* Sleeps between polls, so that the peers compete for the network and not for the processor. */
	for (uint64_t end = now_ms() + WAIT_MS; now_ms() < end; usleep(100)) {
		struct ibv_wc wc;

		if (ibv_poll_cq(modest.scq, 1, &wc) == 1) {
			ENSURE(wc.status == IBV_WC_SUCCESS, "Read %u: %s", number, ibv_wc_status_str(wc.status));
			return NULL;
		}
	}
	ENSURE(false, "Read %u does not complete", number);
	return NULL;
}

static const char *modest_dgram(void)
{
	TRY(find_all());
	TRY(open_peer(&modest));
	TRY(new_region(&answers, modest.pd, ASKED, IBV_ACCESS_LOCAL_WRITE));
	return measure(read_dgram);
}

static int run(const char *reason)
{
	if (reason)
		fprintf(stderr, "# %s [%s]\n", reason, failed_at);
	return reason ? 4 : 0;
}

/* ---------------------------------------------------------------- the serving program */

static int end_child(void *pid)
{
	kill((pid_t)(intptr_t)pid, SIGKILL);
	waitpid((pid_t)(intptr_t)pid, NULL, 0);
	return 0;
}

static const char *fair(size_t arg)
{
	enum flood flood = (enum flood)(arg >> 1);
	bool dgrams = arg & 1;
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD };
	struct region memory;
	pid_t greedy, good;
	struct dgram d;
	int status;

	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ENSURE(shared != MAP_FAILED, "mmap");
	fflush(NULL);
	greedy = fork();
	if (greedy == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (!dgrams)
			_exit(be_greedy_streams(flood));
		wait_for_flag(&shared->ready);
		_exit(run(greedy_dgrams(flood)));
	}
	good = fork();
	if (good == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		wait_for_flag(&shared->flooding);
		_exit(run(dgrams ? modest_dgram() : modest_stream()));
	}
	ENSURE(greedy > 0 && good > 0, "fork: %s", strerror(errno));
	keep(end_child, (void *)(intptr_t)greedy, "greedy peers");
	if (dgrams) {
		TRY(find_all());
		TRY(open_dgram(&d, &dv));
		TRY(new_region(&memory, d.pd, 1u << 20, ALL_ACCESS));
		shared->dgram.qpn = d.qp->qp_num;
		shared->dgram.memory = (struct there){ memory.mr->rkey, (uintptr_t)memory.at };
	} else {
		TRY(start_server());
		shared->stream = target;
	}
	shared->ready = true;
	ENSURE(waitpid(good, &status, 0) == good, "waitpid");
	shared->over = true;
	ENSURE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the ninth peer ends with %x", (unsigned int)status);
	ENSURE(waitpid(greedy, &status, WNOHANG) == 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 0),
	       "the greedy peers end with %x", (unsigned int)status);
	printf("# %llu %s from the greedy peers; a Read takes %.2f ms in half of the cases, %.2f in nine of ten, %.2f at most\n",
	       (unsigned long long)shared->flooded, dgrams ? "requests" : "bytes", shared->half, shared->most, shared->longest);
	ENSURE(shared->flooded > (dgrams ? FLOOD / 20 : FLOOD * 1000), "the greedy peers sent too little");
	ENSURE(shared->half <= HALF_MS && shared->most <= MOST_MS, "Reads take too long");
	return NULL;
}

static const struct test tests[] = {
	{ "stream_empty_writes", fair, EMPTY_WRITES << 1, 0, true },
	{ "stream_small_writes", fair, SMALL_WRITES << 1, 0, true },
	{ "stream_long_writes", fair, LONG_WRITES << 1, 0, true },
	{ "stream_long_reads", fair, LONG_READS << 1, 0, true },
	{ "reliable_small_writes", fair, SMALL_WRITES << 1 | 1, 0, true },
	{ "reliable_long_writes", fair, LONG_WRITES << 1 | 1, 0, true },
	{ "reliable_long_reads", fair, LONG_READS << 1 | 1, 0, true },
};

int main(int argc, char **argv) { return run_tests(tests, COUNT(tests), argc, argv); }
