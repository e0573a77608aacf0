/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Tests with a peer that vanishes: its stream ends neither with a reset nor with a FIN. Two network namespaces are
 * connected by a veth link, which the test takes down during traffic. The test is skipped if it may not create
 * namespaces.
 */
#include "ends.h"

#include <net/if.h>
#include <rdma/rdma_cma.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum way { VERBS, PATIENT, CM };

static struct want want_of(size_t way)
{
	/* A timeout of 67 ms and three retries: the request fails after a little more than a quarter of a second. */
	return (struct want){ .timeout = way == PATIENT ? 0 : 14, .retry = 3 };
}

struct hello {
	union ibv_gid gid;
	uint32_t qpn;
};

/* ---------------------------------------------------------------- the two machines */

static char space[2][32];

static int run(const char *format, ...)
{
	char command[256];
	va_list args;
	int status;

	va_start(args, format);
	vsnprintf(command, sizeof command, format, args);
	va_end(args);
	status = system(command);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int drop_spaces(void *what)
{
	(void)what;
	for (int i = 0; i < 2; i++)
		run("ip netns del %s 2>/dev/null", space[i]);
	return 0;
}

static const char *make_spaces(void)
{
	for (int i = 0; i < 2; i++) {
		snprintf(space[i], sizeof space[i], "aw-vanish-%d-%c", (int)getpid(), 'a' + i);
		if (run("ip netns add %s 2>/dev/null", space[i])) {
			drop_spaces(NULL);
			SKIP("no permission to create network namespaces");
		}
	}
	keep(drop_spaces, space, "namespaces");
	if (run("ip link add va netns %s type veth peer name vb netns %s 2>/dev/null", space[0], space[1]))
		SKIP("no permission to create network links");
	for (int i = 0; i < 2; i++) {
		ENSURE(!run("ip -n %s addr add 10.78.0.%d/24 dev v%c", space[i], i + 1, 'a' + i), "ip addr");
		ENSURE(!run("ip -n %s link set v%c up && ip -n %s link set lo up", space[i], 'a' + i, space[i]),
		       "ip link");
	}
	return NULL;
}

/* ---------------------------------------------------------------- the two programs */

static const char *exchange(int fd, const struct hello *mine, struct hello *theirs)
{
	ENSURE(write(fd, mine, sizeof *mine) == (ssize_t)sizeof *mine, "write: %s", strerror(errno));
	TRY(readable(fd, WAIT_MS));
	ENSURE(read(fd, theirs, sizeof *theirs) == (ssize_t)sizeof *theirs, "the other program has ended");
	return NULL;
}

static const char *event(struct rdma_event_channel *channel, enum rdma_cm_event_type type, struct rdma_cm_id **id)
{
	struct rdma_cm_event *e;
	enum rdma_cm_event_type got;

	TRY(readable(channel->fd, WAIT_MS));
	ENSURE(!rdma_get_cm_event(channel, &e), "rdma_get_cm_event: %s", strerror(errno));
	got = e->event;
	if (id)
		*id = e->id;
	rdma_ack_cm_event(e);
	ENSURE(got == type, "event %s, expected %s", rdma_event_str(got), rdma_event_str(type));
	return NULL;
}

/* The first end connects, the second listens. */
static const char *connect_cm(int fd, int number, struct end *e, struct rdma_event_channel **channel)
{
	struct rdma_conn_param param = { .retry_count = 3, .rnr_retry_count = 7 };
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct sockaddr_in address = { .sin_family = AF_INET };
	struct hello mine = { 0 }, theirs;
	uint8_t timeout = 14;
	struct rdma_cm_id *id, *listener;

	*channel = rdma_create_event_channel();
	ENSURE(*channel && !rdma_create_id(*channel, &id, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	address.sin_addr.s_addr = htonl(0x0a4e0002);
	if (number == 1) {
		ENSURE(!rdma_bind_addr(id, (struct sockaddr *)&address) && !rdma_listen(id, 1), "rdma_listen: %s",
		       strerror(errno));
		mine.qpn = ntohs(rdma_get_src_port(id));
		TRY(exchange(fd, &mine, &theirs));
		listener = id;
		TRY(event(*channel, RDMA_CM_EVENT_CONNECT_REQUEST, &id));
		(void)listener;
	} else {
		TRY(exchange(fd, &mine, &theirs));
		address.sin_port = htons((uint16_t)theirs.qpn);
		ENSURE(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000), "rdma_resolve_addr");
		TRY(event(*channel, RDMA_CM_EVENT_ADDR_RESOLVED, NULL));
		ENSURE(!rdma_resolve_route(id, 2000), "rdma_resolve_route");
		TRY(event(*channel, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL));
	}
	rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof timeout);
	ENSURE(!rdma_create_qp(id, NULL, &init), "rdma_create_qp: %s", strerror(errno));
	*e = (struct end){ .pd = id->pd, .scq = id->send_cq, .rcq = id->recv_cq, .qp = id->qp };
	for (int i = 0; i < 32; i++)
		TRY(post_recv(e->qp, 1, NULL, 0));
	if (number == 1)
		ENSURE(!rdma_accept(id, &param), "rdma_accept: %s", strerror(errno));
	else
		ENSURE(!rdma_connect(id, &param), "rdma_connect: %s", strerror(errno));
	return event(*channel, RDMA_CM_EVENT_ESTABLISHED, NULL);
}

static const char *connect_verbs(int fd, size_t way, struct end *e)
{
	struct want want = want_of(way);
	struct hello mine, theirs;

	TRY(open_device());
	TRY(open_end(e, &want));
	TRY(to_init(e->qp, &want));
	for (int i = 0; i < 32; i++)
		TRY(post_recv(e->qp, 1, NULL, 0));
	mine = (struct hello){ .gid = local_gid, .qpn = e->qp->qp_num };
	TRY(exchange(fd, &mine, &theirs));
	local_gid = theirs.gid; /* the GID that `to_rtr` connects to */
	TRY(to_rtr(e->qp, theirs.qpn, &want));
	if (way == PATIENT) {
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .retry_cnt = 3, .rnr_retry = 7, .max_rd_atomic = 4 };
		int rc = ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
						     IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);

		ENSURE(!rc, "ibv_modify_qp to RTS: %s", strerror(rc));
	} else {
		TRY(to_rts(e->qp, &want));
	}
	return exchange(fd, &mine, &theirs);
}

/* Sends messages one after another. Then the test takes the link down, and this end posts ten more. */
static const char *survive(int fd, int parent, size_t way)
{
	struct rdma_event_channel *channel = NULL;
	struct ibv_wc wc;
	uint64_t start, end, next = 0, done = 0;
	struct end e;
	char word;

	TRY(way == CM ? connect_cm(fd, 0, &e, &channel) : connect_verbs(fd, way, &e));
	for (; next < 20; next++) {
		struct ibv_send_wr wr = send_wr(next, IBV_WR_SEND, NULL, 0);

		TRY(post(e.qp, &wr));
		TRY(expect_ok(e.scq, next, IBV_WC_SEND, NULL));
	}
	done = next;
	ENSURE(write(parent, "!", 1) == 1 && read(parent, &word, 1) == 1, "the test has ended");
	start = now_ms();
	for (; next < 30; next++) {
		struct ibv_send_wr wr = send_wr(next, IBV_WR_SEND, NULL, 0);

		TRY(post(e.qp, &wr));
	}
	if (way == PATIENT) {
		/* Timeout 0 means no limit: no request fails while the link is down, and all complete when it is up again. */
		TRY(no_wc(e.scq, 2000));
		ENSURE(write(parent, "!", 1) == 1 && read(parent, &word, 1) == 1, "the test has ended");
		for (; done < 30; done++)
			TRY(expect_ok(e.scq, done, IBV_WC_SEND, NULL));
		return NULL;
	}
	if (channel)
		TRY(event(channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
	end = now_ms() + WAIT_MS;
	while (done < 30 && now_ms() < end) {
		if (ibv_poll_cq(e.scq, 1, &wc) < 1)
			continue;
		ENSURE(wc.wr_id == done, "send %llu completes, expected %llu", (unsigned long long)wc.wr_id,
		       (unsigned long long)done);
		if (done == 20) {
			ENSURE(wc.status == IBV_WC_RETRY_EXC_ERR, "the oldest ends with %s",
			       ibv_wc_status_str(wc.status));
			ENSURE(now_ms() - start >= 200, "the request fails after only %u ms", (unsigned int)(now_ms() - start));
			ENSURE(now_ms() - start < 2000, "the request fails only after %u ms", (unsigned int)(now_ms() - start));
		} else {
			ENSURE(wc.status == IBV_WC_WR_FLUSH_ERR, "the others end with %s",
			       ibv_wc_status_str(wc.status));
		}
		done++;
	}
	ENSURE(done == 30, "%llu of 30 sends complete", (unsigned long long)done);
	for (int i = 0; i < 32; i++)
		TRY(expect_status(e.rcq, 1, IBV_WC_WR_FLUSH_ERR));
	return NULL;
}

/* Receives messages and waits to be killed. The program sleeps, so the library's thread answers. */
static const char *answer(int fd, size_t way)
{
	struct rdma_event_channel *channel;
	struct end e;

	TRY(way == CM ? connect_cm(fd, 1, &e, &channel) : connect_verbs(fd, way, &e));
	for (;;)
		pause();
	return NULL;
}

static pid_t start(int number, int fd, int parent, size_t way)
{
	char place[64], numbers[3][16], address[16];
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid != 0)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	snprintf(place, sizeof place, "/run/netns/%s", space[number]);
	snprintf(address, sizeof address, "10.78.0.%d", number + 1);
	snprintf(numbers[0], sizeof numbers[0], "%d", fd);
	snprintf(numbers[1], sizeof numbers[1], "%d", parent);
	snprintf(numbers[2], sizeof numbers[2], "%zu", way);
	setenv("ANYWARP_ADDR", address, 1);
	if (setns(open(place, O_RDONLY | O_CLOEXEC), CLONE_NEWNET))
		_exit(126);
	execl("/proc/self/exe", "vanish", number ? "--answer" : "--survive", numbers[0], numbers[1], numbers[2],
	      (char *)NULL);
	_exit(127);
}

static int kill_program(void *p)
{
	pid_t *pid = p;

	if (*pid > 0) {
		kill(*pid, SIGKILL);
		waitpid(*pid, NULL, 0);
	}
	*pid = 0;
	return 0;
}

static const char *vanish(size_t way)
{
	static pid_t pids[2];
	int between[2], up[2], status;
	char word = 0;

	TRY(make_spaces());
	ENSURE(!socketpair(AF_UNIX, SOCK_STREAM, 0, between) && !socketpair(AF_UNIX, SOCK_STREAM, 0, up),
	       "socketpair: %s", strerror(errno));
	for (int i = 0; i < 2; i++) {
		pids[i] = start(i, between[i], up[1], way);
		ENSURE(pids[i] > 0, "fork: %s", strerror(errno));
		keep(kill_program, &pids[i], "program");
	}
	for (int i = 0; i < 2; i++)
		close(between[i]);
	close(up[1]);
	for (int round = 0; round < (way == PATIENT ? 2 : 1); round++) {
		if (readable(up[0], WAIT_MS) || read(up[0], &word, 1) != 1)
			break; /* the exit status of the program reports why it ended */
		ENSURE(!run("ip -n %s link set vb %s", space[1], round ? "up" : "down"), "ip link");
		ENSURE(write(up[0], "!", 1) == 1, "write: %s", strerror(errno));
	}
	ENSURE(waitpid(pids[0], &status, 0) == pids[0], "waitpid: %s", strerror(errno));
	pids[0] = 0;
	close(up[0]);
	ENSURE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the survivor fails (status %#x)", (unsigned int)status);
	return NULL;
}

static const struct test tests[] = {
	{ "link_down_verbs", vanish, VERBS, 0, false },
	{ "link_down_timeout_0", vanish, PATIENT, 0, false },
	{ "link_down_cm", vanish, CM, 0, false },
};

int main(int argc, char **argv)
{
	if (argc == 5 && argv[1][0] == '-' && argv[1][1] == '-') {
		int fd = atoi(argv[2]), parent = atoi(argv[3]);
		size_t way = (size_t)atoi(argv[4]);
		const char *reason;

		alarm(40);
		reason = !strcmp(argv[1], "--answer") ? answer(fd, way) : survive(fd, parent, way);
		if (reason)
			fprintf(stderr, "%s: %s [%s]\n", argv[1] + 2, reason, failed_at);
		return reason ? 1 : 0;
	}
	return run_tests(tests, COUNT(tests), argc, argv);
}
