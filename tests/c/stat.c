/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The counters of queue pairs that `anywarp stat` reads. They come from a socket that exists only with ANYWARP_STAT,
 * and that answers only the same user and root.
 */
#include "ends.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#define MESSAGES 20u
#define LENGTH 100u
#define BURST 60u
#define PAIRS 8u

/* Queries process `pid`. Returns the answer, or NULL. *connected says whether the process has a socket for queries. */
static char *ask(pid_t pid, bool *connected)
{
	static char text[65536];
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), memory = -1;
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	char byte;
	struct iovec iov = { &byte, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control,
			      .msg_controllen = sizeof control };
	struct timeval time_limit = { .tv_sec = 10 };
	int len = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "anywarp-stat-%d", (int)pid);
	ssize_t n;

	*connected = !connect(fd, (struct sockaddr *)&name,
			      (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)len));
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time_limit, sizeof time_limit);
	if (*connected && recvmsg(fd, &msg, MSG_CMSG_CLOEXEC) == 1) {
		struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

		if (c && c->cmsg_type == SCM_RIGHTS)
			memcpy(&memory, CMSG_DATA(c), sizeof memory);
	}
	close(fd);
	if (memory < 0)
		return NULL;
	n = pread(memory, text, sizeof text - 1, 0);
	close(memory);
	if (n < 0)
		return NULL;
	text[n] = 0;
	return text;
}

/* The text after `name` in the line of a queue pair, or NULL. */
static const char *value(const char *text, uint32_t qpn, const char *name)
{
	static char line[2048];
	char qp[16], word[40];
	const char *at, *end;

	snprintf(qp, sizeof qp, " 0x%06x ", qpn);
	snprintf(word, sizeof word, " %s=", name);
	at = strstr(text, qp);
	if (!at)
		return NULL;
	end = strchr(at, '\n');
	snprintf(line, sizeof line, "%.*s", end ? (int)(end - at) : 2000, at);
	at = strstr(line, word);
	return at ? at + strlen(word) : NULL;
}

/* The number after `name` in the line of a queue pair, or -1. */
static long long number(const char *text, uint32_t qpn, const char *name)
{
	const char *at = value(text, qpn, name);

	return at ? atoll(at) : -1;
}

/* Whether the stream of a queue pair is on this carrier. */
static bool is_carried(const char *text, uint32_t qpn, const char *carrier)
{
	const char *at = value(text, qpn, "carrier");

	return at && !strncmp(at, carrier, strlen(carrier));
}

static const char *exchange(enum ibv_qp_type type, struct pair *p)
{
	struct want want = { .type = type };
	struct region from, to;

	TRY(open_pair(p, &want));
	TRY(new_region(&from, p->a.pd, LENGTH, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&to, p->b.pd, LENGTH + 40, ALL_ACCESS));
	for (uint64_t i = 0; i < MESSAGES; i++) {
		struct ibv_sge in = sge_of(&to, 0, to.len), out = sge_of(&from, 0, LENGTH);
		struct ibv_send_wr wr = send_wr(i, IBV_WR_SEND, &out, 1);

		TRY(post_recv(p->b.qp, i, &in, 1));
		TRY(post(p->a.qp, &wr));
		TRY(expect_ok(p->a.scq, i, IBV_WC_SEND, NULL));
		TRY(expect_ok(p->b.rcq, i, IBV_WC_RECV, NULL));
	}
	return NULL;
}

static const char *counts(size_t arg)
{
	struct pair p;
	bool connected;
	char *text;

	(void)arg;
	setenv("ANYWARP_STAT", "1", 1);
	TRY(exchange(IBV_QPT_RC, &p));
	text = ask(getpid(), &connected);
	ENSURE(text, "no answer to the query");
	ENSURE(number(text, p.a.qp->qp_num, "requests") == MESSAGES, "other requests in: %s", text);
	ENSURE(number(text, p.a.qp->qp_num, "request_bytes") == MESSAGES * LENGTH, "other bytes in: %s", text);
	ENSURE(number(text, p.b.qp->qp_num, "requests") == 0, "other requests in: %s", text);
	ENSURE(number(text, p.b.qp->qp_num, "received") == MESSAGES, "other messages in: %s", text);
	ENSURE(number(text, p.a.qp->qp_num, "tx_bytes") >= MESSAGES * LENGTH, "too few bytes in: %s", text);
	ENSURE(number(text, p.b.qp->qp_num, "rx_bytes") >= MESSAGES * LENGTH, "too few bytes in: %s", text);
	ENSURE(number(text, p.a.qp->qp_num, "tx_calls") >= 1, "no calls in: %s", text);
	ENSURE(number(text, p.b.qp->qp_num, "rx_calls") >= 1, "no calls in: %s", text);
	return NULL;
}

static const char *counts_datagrams(size_t arg)
{
	struct pair p;
	bool connected;
	char *text;

	(void)arg;
	setenv("ANYWARP_STAT", "1", 1);
	TRY(exchange(IBV_QPT_UC, &p));
	text = ask(getpid(), &connected);
	ENSURE(text, "no answer to the query");
	ENSURE(number(text, p.a.qp->qp_num, "tx_dgrams") >= MESSAGES, "too few datagrams in: %s", text);
	ENSURE(number(text, p.b.qp->qp_num, "rx_messages") == MESSAGES, "other messages in: %s", text);
	ENSURE(number(text, p.a.qp->qp_num, "tx_calls") >= 1, "no calls in: %s", text);
	ENSURE(number(text, p.b.qp->qp_num, "port_rx_calls") > number(text, p.b.qp->qp_num, "port_rx_empty"),
	       "no calls in: %s", text);
	ENSURE(strstr(text, "\nworker 0 wakes="), "no counters of the device's thread in: %s", text);
	return NULL;
}

/* A Send without a receive: the sender counts how often the receiver was not ready. */
static const char *not_ready(size_t arg)
{
	struct want want = { .type = IBV_QPT_RC };
	struct region from, to;
	struct ibv_sge in, out;
	struct ibv_send_wr wr;
	struct pair p;
	bool connected;
	char *text;

	(void)arg;
	setenv("ANYWARP_STAT", "1", 1);
	TRY(open_pair(&p, &want));
	TRY(new_region(&from, p.a.pd, LENGTH, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&to, p.b.pd, LENGTH, ALL_ACCESS));
	in = sge_of(&to, 0, LENGTH);
	out = sge_of(&from, 0, LENGTH);
	wr = send_wr(1, IBV_WR_SEND, &out, 1);
	TRY(post(p.a.qp, &wr));
	for (unsigned int tries = 0; tries < 500; tries++) {
		text = ask(getpid(), &connected);
		ENSURE(text, "no answer to the query");
		if (number(text, p.a.qp->qp_num, "rnr") > 0)
			break;
		sleep_ms(10);
	}
	ENSURE(number(text, p.a.qp->qp_num, "rnr") > 0, "rnr is 0 in: %s", text);
	ENSURE(number(text, p.b.qp->qp_num, "rnr") == 0, "rnr is counted at the receiver in: %s", text);
	TRY(post_recv(p.b.qp, 1, &in, 1));
	TRY(expect_ok(p.a.scq, 1, IBV_WC_SEND, NULL));
	return NULL;
}

/* A congestion control that is available to every user is used. With an unknown one, the host's default is used. */
static const char *congestion(size_t arg)
{
	static const char *const names[] = { "reno", "none-of-them" };
	char hosts[64] = "", want[80];
	bool connected;
	struct pair p;
	char *text;
	FILE *f = fopen("/proc/sys/net/ipv4/tcp_congestion_control", "re");

	ENSURE(f && fscanf(f, "%63s", hosts) == 1, "the host's congestion control is unknown");
	fclose(f);
	setenv("ANYWARP_STAT", "1", 1);
	setenv("ANYWARP_CC", names[arg], 1);
	TRY(exchange(IBV_QPT_RC, &p));
	text = ask(getpid(), &connected);
	ENSURE(text, "no answer to the query");
	snprintf(want, sizeof want, " congestion=%s", arg ? hosts : names[arg]);
	ENSURE(strstr(text, want), "not%s in: %s", want, text);
	return NULL;
}

/*
 * Posts single requests as fast as possible, with a poll after each if `polling`. Returns the number of system calls
 * that sent them.
 */
static const char *burst(bool polling, long long *calls)
{
	uint64_t done = 0;
	struct want want = { .type = IBV_QPT_RC };
	struct region from, to;
	struct ibv_wc wc;
	struct pair p;
	bool connected;
	char *text;

	TRY(open_pair(&p, &want));
	TRY(new_region(&from, p.a.pd, BURST, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&to, p.b.pd, BURST, ALL_ACCESS));
	for (uint64_t i = 0; i < BURST; i++) {
		struct ibv_sge in = sge_of(&to, i, 1);

		TRY(post_recv(p.b.qp, i, &in, 1));
	}
	/*
	 * For a while after a poll, the device's own thread does not process this queue pair, so nothing is
	 * acknowledged.
	 */
	ENSURE(ibv_poll_cq(p.a.scq, 1, &wc) == 0, "a completion without a request");
	for (uint64_t i = 0; i < BURST; i++) {
		struct ibv_sge out = sge_of(&from, i, 1);
		struct ibv_send_wr wr = send_wr(i, IBV_WR_SEND, &out, 1);

		TRY(post(p.a.qp, &wr));
		if (polling && ibv_poll_cq(p.a.scq, 1, &wc) == 1) {
			ENSURE(wc.status == IBV_WC_SUCCESS && wc.wr_id == done, "request %d", (int)wc.wr_id);
			done++;
		}
	}
	sleep_ms(100);
	text = ask(getpid(), &connected);
	ENSURE(text, "no answer to the query");
	ENSURE(number(text, p.b.qp->qp_num, "received") == BURST, "not all were sent without a poll: %s", text);
	*calls = number(text, p.a.qp->qp_num, "tx_calls");
	for (uint64_t i = 0; i < BURST; i++) {
		if (i >= done)
			TRY(expect_ok(p.a.scq, i, IBV_WC_SEND, NULL));
		TRY(expect_ok(p.b.rcq, i, IBV_WC_RECV, NULL));
	}
	return NULL;
}

/*
 * After four posts in succession, with at most one idle poll after each, small requests that are posted one by one are
 * corked. They are sent even if the program does not poll again. `polling`: whether the program polls after each post.
 * There are several bursts, because this thread may be descheduled during one.
 */
static const char *corking(size_t polling)
{
	long long calls = BURST;

	setenv("ANYWARP_STAT", "1", 1);
	for (unsigned int tries = 0; tries < 10 && calls > BURST / 4; tries++)
		TRY(burst(polling, &calls));
	ENSURE(calls <= BURST / 4, "%lld calls for %u requests", calls, BURST);
	return NULL;
}

/*
 * One end only receives and stays in RTR. The stream still changes to shared memory, or to a trunk, whichever end dialed. The queue
 * pair numbers determine which end dials.
 */
static const char *carrier(const char *name, size_t passive)
{
	struct want want = { .type = IBV_QPT_RC };
	struct end *from, *to;
	struct region out, in;
	struct pair p;
	bool connected;
	char *text = "";

	setenv("ANYWARP_STAT", "1", 1);
	setenv("ANYWARP_TRUNK", "eager", 1);
	setenv("ANYWARP_CARRIER", strcmp(name, "memory") ? "tcp" : "eager", 1);
	TRY(open_device());
	TRY(open_end(&p.a, &want));
	TRY(open_end(&p.b, &want));
	from = passive ? &p.b : &p.a;
	to = passive ? &p.a : &p.b;
	TRY(to_init(from->qp, &want));
	TRY(to_init(to->qp, &want));
	TRY(to_rtr(from->qp, to->qp->qp_num, &want));
	TRY(to_rtr(to->qp, from->qp->qp_num, &want));
	TRY(to_rts(from->qp, &want));
	TRY(new_region(&out, from->pd, LENGTH, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&in, to->pd, LENGTH, ALL_ACCESS));
	/* The hand-over takes some time, in which messages are exchanged. */
	for (uint64_t i = 0, end = now_ms() + WAIT_MS; now_ms() < end; i++) {
		struct ibv_sge received = sge_of(&in, 0, in.len), sent = sge_of(&out, 0, LENGTH);
		struct ibv_send_wr wr = send_wr(i, IBV_WR_SEND, &sent, 1);

		memset(out.at, (int)i + 1, LENGTH);
		TRY(post_recv(to->qp, i, &received, 1));
		TRY(post(from->qp, &wr));
		TRY(expect_ok(from->scq, i, IBV_WC_SEND, NULL));
		TRY(expect_ok(to->rcq, i, IBV_WC_RECV, NULL));
		ENSURE(!memcmp(out.at, in.at, LENGTH), "message %u has other data", (unsigned int)i);
		if (i < MESSAGES)
			continue;
		text = ask(getpid(), &connected);
		ENSURE(text, "no answer to the query");
		if (is_carried(text, from->qp->qp_num, name) && is_carried(text, to->qp->qp_num, name))
			return NULL;
	}
	ENSURE(false, "the carrier is not %s: %s", name, text);
}

static const char *memory(size_t passive) { return carrier("memory", passive); }

static const char *trunk(size_t passive) { return carrier("trunk", passive); }

/* Without settings for the carrier, and with one pair of queue pairs, the stream stays on TCP while it has few requests. */
static const char *tcp(size_t arg)
{
	struct want want = { .type = IBV_QPT_RC };
	struct ibv_sge sge;
	struct ibv_send_wr wr;
	struct region r;
	struct pair p;
	bool connected;
	char *text;

	(void)arg;
	setenv("ANYWARP_STAT", "1", 1);
	TRY(open_pair(&p, &want));
	TRY(new_region(&r, p.a.pd, LENGTH, IBV_ACCESS_LOCAL_WRITE));
	sge = sge_of(&r, 0, 0);
	wr = send_wr(1, IBV_WR_SEND, &sge, 0);
	TRY(post_recv(p.b.qp, 1, NULL, 0));
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 1, IBV_WC_SEND, NULL));
	text = ask(getpid(), &connected);
	ENSURE(text, "no answer to the query");
	ENSURE(is_carried(text, p.a.qp->qp_num, "tcp"), "the carrier is not tcp: %s", text);
	return NULL;
}

/* Posts two requests to each of some queue pairs. Returns the number of system calls that sent them. */
static const char *round_of_posts(struct pair *pairs, struct region *from, struct region *to, long long *calls)
{
	long long before = 0, after = 0, received = 0;
	struct ibv_wc wc;
	bool connected;
	char *text = ask(getpid(), &connected);

	ENSURE(text, "no answer to the query");
	for (unsigned int i = 0; i < PAIRS; i++) {
		before += number(text, pairs[i].a.qp->qp_num, "tx_calls");
		received -= number(text, pairs[i].b.qp->qp_num, "received");
		for (uint64_t j = 0; j < 2; j++) {
			struct ibv_sge in = sge_of(&to[i], j, 1);

			TRY(post_recv(pairs[i].b.qp, j, &in, 1));
		}
	}
	ENSURE(ibv_poll_cq(pairs[0].a.scq, 1, &wc) == 0, "a completion without a request");
	for (unsigned int i = 0; i < PAIRS; i++)
		for (uint64_t j = 0; j < 2; j++) {
			struct ibv_sge out = sge_of(&from[i], j, 1);
			struct ibv_send_wr wr = send_wr(j, IBV_WR_SEND, &out, 1);

			TRY(post(pairs[i].a.qp, &wr));
		}
	sleep_ms(100);
	text = ask(getpid(), &connected);
	ENSURE(text, "no answer to the query");
	for (unsigned int i = 0; i < PAIRS; i++) {
		after += number(text, pairs[i].a.qp->qp_num, "tx_calls");
		received += number(text, pairs[i].b.qp->qp_num, "received");
	}
	ENSURE(received == 2 * PAIRS, "not all were sent without a poll: %s", text);
	*calls = after - before;
	for (unsigned int i = 0; i < PAIRS; i++)
		for (uint64_t j = 0; j < 2; j++) {
			TRY(expect_ok(pairs[i].a.scq, j, IBV_WC_SEND, NULL));
			TRY(expect_ok(pairs[i].b.rcq, j, IBV_WC_RECV, NULL));
		}
	return NULL;
}

/*
 * After four posts to any queue pairs, a small request is delayed so that later requests of its queue pair can join it.
 * It is sent without a poll.
 */
static const char *corking_across_qps(size_t arg)
{
	struct want want = { .type = IBV_QPT_RC };
	struct region from[PAIRS], to[PAIRS];
	long long calls = 2 * PAIRS;
	struct pair pairs[PAIRS];

	(void)arg;
	setenv("ANYWARP_STAT", "1", 1);
	for (unsigned int i = 0; i < PAIRS; i++) {
		TRY(open_pair(&pairs[i], &want));
		TRY(new_region(&from[i], pairs[i].a.pd, 2, IBV_ACCESS_LOCAL_WRITE));
		TRY(new_region(&to[i], pairs[i].b.pd, 2, ALL_ACCESS));
	}
	for (unsigned int tries = 0; tries < 20 && calls > PAIRS + 2; tries++)
		TRY(round_of_posts(pairs, from, to, &calls));
	ENSURE(calls <= PAIRS + 2, "%lld calls for %u requests", calls, 2 * PAIRS);
	return NULL;
}

static const char *disabled_by_default(size_t arg)
{
	struct pair p;
	bool connected;

	(void)arg;
	unsetenv("ANYWARP_STAT");
	TRY(exchange(IBV_QPT_RC, &p));
	ask(getpid(), &connected);
	ENSURE(!connected, "there is a socket without ANYWARP_STAT");
	return NULL;
}

static const char *another_user_refused(size_t arg)
{
	struct pair p;
	pid_t me = getpid(), child;
	int status;

	(void)arg;
	if (getuid())
		SKIP("only root can become another user");
	setenv("ANYWARP_STAT", "1", 1);
	TRY(exchange(IBV_QPT_RC, &p));
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		bool connected;

		if (setgid(65534) || setuid(65534))
			_exit(2);
		_exit(ask(me, &connected) ? 1 : connected ? 0 : 3);
	}
	ENSURE(waitpid(child, &status, 0) == child && WIFEXITED(status), "the child does not end");
	ENSURE(WEXITSTATUS(status) != 1, "another user gets the counters");
	ENSURE(WEXITSTATUS(status) == 0, "the child ends with %d", WEXITSTATUS(status));
	return NULL;
}

static const struct test tests[] = {
	{ "counts", counts, 0, 0, true },
	{ "congestion", congestion, 0, 0, true },
	{ "congestion_unknown", congestion, 1, 0, true },
	{ "counts_datagrams", counts_datagrams, 0, 0, true },
	{ "not_ready", not_ready, 0, 0, true },
	{ "corking", corking, 0, 0, true },
	{ "corking_with_polls", corking, 1, 0, true },
	{ "memory", memory, 0, 0, true },
	{ "memory_other_way", memory, 1, 0, true },
	{ "trunk", trunk, 0, 0, true },
	{ "trunk_other_way", trunk, 1, 0, true },
	{ "tcp", tcp, 0, 0, true },
	{ "corking_across_qps", corking_across_qps, 0, 0, true },
	{ "disabled_by_default", disabled_by_default, 0, 0, true },
	{ "another_user_refused", another_user_refused, 0, 0, true },
};

int main(int argc, char **argv) { return run_tests(tests, COUNT(tests), argc, argv); }
