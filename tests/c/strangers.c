/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Connections to a listening port that do not come from a valid peer: other clients, silent or slow ones, and peers
 * that violate the protocol. Each such connection is closed in time and does not disturb others. Each kind is logged a few times
 * at most.
 */
#include "ends.h"
#include "crc.h"

#include <arpa/inet.h>
#include <endian.h>
#include <netinet/tcp.h>
#include <rdma/rdma_cma.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define CROWD 1000
/* A client that has not sent its Request within five seconds is disconnected. */
#define CLOSED_WITHIN_MS 8000

static const struct want usual = { 0 };
static FILE *log_file;

/* An address of the device, IPv4 or IPv6, with a port. */
union address {
	struct sockaddr any;
	struct sockaddr_in four;
	struct sockaddr_in6 six;
};

static union address at_port(uint16_t port)
{
	const char *text = getenv("TEST_ADDR");
	union address address = { .six = { .sin6_family = AF_INET6, .sin6_port = htons(port) } };

	if (text && inet_pton(AF_INET6, text, &address.six.sin6_addr) == 1)
		return address;
	address.four = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(port) };
	inet_pton(AF_INET, text ? text : "127.0.0.1", &address.four.sin_addr);
	return address;
}

/* ---------------------------------------------------------------- the clients, in a separate process */

enum kind { SCAN, HTTP, NOISE, SILENT, SLOW, KINDS };

static int dial(uint16_t port)
{
	union address address = at_port(port);
	int fd = socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd >= 0 && connect(fd, &address.any, sizeof address)) {
		close(fd);
		return -1;
	}
	return fd;
}

/* Whether the other side has closed the connection, after any data. */
static bool is_closed(int fd)
{
	char text[512];
	ssize_t n;

	while ((n = recv(fd, text, sizeof text, MSG_DONTWAIT)) > 0)
		;
	return n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
}

/* Opens connections of one kind. Returns 0 if all were closed in time, 1 if not, and 2 if too few could connect. */
static int crowd(enum kind kind, uint16_t port, int count)
{
	static const char http[] = "GET / HTTP/1.1\r\nHost: example.org\r\n\r\n";
	static const char slow[] = "MPA ID Req Frame";
	static int fds[CROWD];
	struct rlimit limit;
	uint64_t end;
	int open_ones = 0;

	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max < 4096 ? limit.rlim_max : 4096;
	setrlimit(RLIMIT_NOFILE, &limit);
	for (int i = 0; i < count; i++) {
		uint8_t noise[300];

		fds[i] = dial(port);
		if (fds[i] < 0)
			continue;
		open_ones++;
		for (size_t n = 0; n < sizeof noise; n++)
			noise[n] = pattern_byte((uint32_t)i, n);
		if (kind == HTTP)
			send(fds[i], http, sizeof http - 1, MSG_NOSIGNAL);
		else if (kind == NOISE)
			send(fds[i], noise, sizeof noise, MSG_NOSIGNAL);
		else if (kind == SCAN)
			close(fds[i]);
	}
	if (open_ones < count / 2)
		return 2;
	end = now_ms() + CLOSED_WITHIN_MS;
	for (size_t round = 0; kind != SCAN; round++) {
		int left = 0;

		for (int i = 0; i < count; i++) {
			if (fds[i] < 0)
				continue;
			if (kind == SLOW && round < sizeof slow - 1)
				send(fds[i], slow + round, 1, MSG_NOSIGNAL);
			if (is_closed(fds[i])) {
				close(fds[i]);
				fds[i] = -1;
			} else {
				left++;
			}
		}
		if (left == 0)
			break;
		if (now_ms() > end)
			return 1;
		sleep_ms(100);
	}
	return 0;
}

static pid_t send_crowd(enum kind kind, uint16_t port, int count)
{
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		_exit(crowd(kind, port, count));
	}
	return pid;
}

/* ---------------------------------------------------------------- the listening program */

static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener;

static int close_listener(void *id)
{
	int rc = rdma_destroy_id(id);

	rdma_destroy_event_channel(channel);
	return rc;
}

static const char *listen_cm(uint16_t *port)
{
	union address address = at_port(0);

	channel = rdma_create_event_channel();
	ENSURE(channel && !rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), "rdma_create_id: %s",
	       strerror(errno));
	ENSURE(!rdma_bind_addr(listener, &address.any) && !rdma_listen(listener, 64), "rdma_listen: %s",
	       strerror(errno));
	keep(close_listener, listener, "listener");
	*port = ntohs(rdma_get_src_port(listener));
	return NULL;
}

static const char *talk(struct pair *p, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		struct ibv_send_wr wr = send_wr(i, IBV_WR_SEND, NULL, 0);

		TRY(post_recv(p->b.qp, i, NULL, 0));
		TRY(post(p->a.qp, &wr));
		TRY(expect_ok(p->b.rcq, i, IBV_WC_RECV, NULL));
		TRY(expect_ok(p->a.scq, i, IBV_WC_SEND, NULL));
	}
	return NULL;
}

/* A rate, in messages per 200 ms, that an undisturbed connection reaches even on its slower carrier. */
#define BRISK ((size_t)6000)

/* Counts the messages that can be exchanged within `ms`. */
static const char *pace(struct pair *p, unsigned int ms, size_t *count)
{
	uint64_t end = now_ms() + ms;

	for (*count = 0; now_ms() < end; *count += 10)
		TRY(talk(p, 10));
	return NULL;
}

static double cpu_seconds(void)
{
	struct rusage use;

	getrusage(RUSAGE_SELF, &use);
	return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
	       (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6;
}

static long open_fds(void)
{
	long n = 0;

	for (int fd = 0; fd < 4096; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static const char *crowd_ends(pid_t pid, struct pair *p)
{
	int status = 0;

	/* The program sleeps sometimes, so that the device's own thread must do the work. */
	while (waitpid(pid, &status, WNOHANG) == 0) {
		TRY(talk(p, 5));
		sleep_ms(50);
	}
	ENSURE(WIFEXITED(status), "the clients were killed by signal %d", WTERMSIG(status));
	ENSURE(WEXITSTATUS(status) != 2, "too few clients could connect");
	ENSURE(WEXITSTATUS(status) == 0, "connections were not closed in time");
	return NULL;
}

static const char *descriptors_are_back(long before)
{
	uint64_t end = now_ms() + 3000;

	while (open_fds() > before && now_ms() < end)
		sleep_ms(20);
	ENSURE(open_fds() <= before, "%ld descriptors, %ld before", open_fds(), before);
	return NULL;
}

/* A thousand connections of one kind, half of them to the rdma_cm listener and half to the port of a queue pair. */
static const char *strangers(size_t kind)
{
	size_t calm, busy = 0;
	uint16_t port;
	struct pair p;
	pid_t at_cm, at_qp;
	long before;

	TRY(open_pair(&p, &usual));
	TRY(listen_cm(&port));
	TRY(pace(&p, 200, &calm));
	before = open_fds();
	at_cm = send_crowd((enum kind)kind, port, CROWD / 2);
	at_qp = send_crowd((enum kind)kind, (uint16_t)(p.a.qp->qp_num >> 8), CROWD / 2);
	ENSURE(at_cm > 0 && at_qp > 0, "fork: %s", strerror(errno));
	sleep_ms(150);
	/* This thread yields between polls, so the clients may slow down one measurement, but not all of them. */
	if (calm > BRISK)
		calm = BRISK;
	for (int i = 0; i < 5 && (!i || busy <= calm / 10); i++)
		TRY(pace(&p, 200, &busy));
	ENSURE(busy > calm / 10, "%zu messages with half-open connections, %zu without", busy, calm);
	TRY(crowd_ends(at_cm, &p));
	TRY(crowd_ends(at_qp, &p));
	return descriptors_are_back(before);
}

/* With few descriptors, connections without an MPA Request get a part of them, and the program can use the others. */
static const char *few_descriptors(size_t arg)
{
	struct rlimit was, low;
	struct pair p, another;
	const char *reason;
	uint16_t port;
	pid_t pid;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(listen_cm(&port));
	getrlimit(RLIMIT_NOFILE, &was);
	low = was;
	low.rlim_cur = 128;
	setrlimit(RLIMIT_NOFILE, &low);
	pid = send_crowd(SILENT, port, CROWD);
	sleep_ms(300);
	reason = open_pair(&another, &usual);
	if (!reason)
		reason = talk(&another, 10);
	if (!reason)
		reason = crowd_ends(pid, &p);
	setrlimit(RLIMIT_NOFILE, &was);
	TRY(reason);
	TRY(close_all());
	return NULL;
}

/* The part of the test below that runs without a free descriptor. `late` connects to `address`. */
static const char *without_descriptors(struct pair *p, int late, const union address *address, double *busy)
{
	ENSURE(late >= 0 && !connect(late, &address->any, sizeof *address), "connect: %s", strerror(errno));
	*busy = cpu_seconds();
	sleep_ms(1500);
	*busy = cpu_seconds() - *busy;
	TRY(talk(p, 100));
	ENSURE(!ibv_create_comp_channel(device), "ibv_create_comp_channel succeeds without a free descriptor");
	ENSURE(errno == EMFILE, "without a free descriptor, errno is %s", strerror(errno));
	return NULL;
}

/* Without a free descriptor, new connections wait, and no thread spins. Later everything works as before. */
static const char *no_descriptors(size_t arg)
{
	struct rlimit was, low;
	union address address;
	const char *reason;
	uint16_t port;
	struct pair p;
	double busy = 0;
	pid_t pid;
	int late;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(listen_cm(&port));
	TRY(talk(&p, 10));
	getrlimit(RLIMIT_NOFILE, &was);
	low = was;
	low.rlim_cur = 3; /* lower than the number of open descriptors */
	pid = send_crowd(SILENT, port, 50);
	/*
	 * The device may accept the crowd's connections before the limit is set. `late` is created before the
	 * limit is set and connects afterwards, so its connection cannot be accepted.
	 */
	address = at_port(port);
	late = socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setrlimit(RLIMIT_NOFILE, &low);
	reason = without_descriptors(&p, late, &address, &busy);
	setrlimit(RLIMIT_NOFILE, &was); /* also after a failure, for the tests that follow */
	close(late);
	TRY(reason);
	ENSURE(busy < 0.5, "%.2f s of CPU time in 1.5 s without descriptors", busy);
	return crowd_ends(pid, &p);
}

/*
 * Opens a device and an end with an increasing number of free descriptors, until both open. Before that, each attempt
 * fails with EMFILE and leaks no descriptor.
 */
static int open_with_few(void)
{
	struct rlimit was, low;
	long before = open_fds(), after;
	rlim_t extra;

	getrlimit(RLIMIT_NOFILE, &was);
	low = was;
	for (extra = 0; extra < 64; extra++) {
		const char *reason;
		struct end e;

		device = NULL;
		kept_count = 0;
		low.rlim_cur = (rlim_t)before + extra;
		setrlimit(RLIMIT_NOFILE, &low);
		errno = 0;
		reason = open_device();
		if (!reason)
			reason = open_end(&e, &(struct want){ .channels = true });
		if (reason && errno != EMFILE)
			return fprintf(stderr, "%s [%s]\n", reason, failed_at), 2;
		if (!reason)
			break;
		close_all();
		if (device)
			ibv_close_device(device);
	}
	setrlimit(RLIMIT_NOFILE, &was);
	if (extra == 0 || extra == 64)
		return 3;
	if (close_all() || ibv_close_device(device))
		return 4;
	after = open_fds();
	/*
	 * Descriptors of the engine that stay open: two epoll sets, the eventfd that wakes the thread, two timers, the address
	 * monitor, and the file that represents the device.
	 */
	return after <= before + 7 ? 0 : 5;
}

static const char *descriptors_run_out(size_t arg)
{
	pid_t pid;
	int status;

	(void)arg;
	fflush(stdout);
	pid = fork();
	ENSURE(pid >= 0, "fork: %s", strerror(errno));
	if (pid == 0) {
		/* RLIMIT_NOFILE limits the highest descriptor number, so inherited descriptors are closed. */
		for (int fd = 3; fd < 4096; fd++)
			close(fd);
		_exit(open_with_few());
	}
	ENSURE(waitpid(pid, &status, 0) == pid, "waitpid: %s", strerror(errno));
	ENSURE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %#x", (unsigned int)status);
	return NULL;
}

/* ---------------------------------------------------------------- peers that violate the protocol */

static int close_id(void *id)
{
	struct rdma_cm_id *i = id;

	if (i->qp)
		rdma_destroy_qp(i);
	return rdma_destroy_id(i);
}

static const char *wait_event(enum rdma_cm_event_type type, struct rdma_cm_id **id)
{
	struct rdma_cm_event *event;
	enum rdma_cm_event_type got;

	TRY(readable(channel->fd, WAIT_MS));
	ENSURE(!rdma_get_cm_event(channel, &event), "rdma_get_cm_event: %s", strerror(errno));
	got = event->event;
	if (id)
		*id = event->id;
	rdma_ack_cm_event(event);
	ENSURE(got == type, "event %s, expected %s", rdma_event_str(got), rdma_event_str(type));
	return NULL;
}

enum violation { BAD_CRC, TRUNCATED, RESET, TOO_LONG };

/*
 * Builds an FPDU with an untagged Send: ULPDU length, DDP and RDMAP control, 4 unused bytes, queue 0, message number,
 * offset 0, payload, CRC.
 */
static void send_fpdu(uint8_t *at, uint8_t msn, uint8_t len)
{
	uint8_t head[24] = { 0, 18 + len, 0x41, 0x43, [15] = msn, [20] = 'a', 'b', 'c', 'd' };
	uint32_t crc = htole32(crc32c(head, 20u + len));

	memcpy(at, head, sizeof head);
	memcpy(at + 20 + len, &crc, 4);
}

/*
 * A peer without anywarp's extensions connects, sends one valid Send, and then violates the protocol. Nothing more is delivered, and
 * the posted requests are flushed.
 */
static const char *protocol_violation(size_t how)
{
	static const uint8_t request[20] = "MPA ID Req Frame\x40\x01\x00\x00";
	uint8_t fpdu[28];
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct linger at_once = { .l_onoff = 1 };
	struct region r = { 0 };
	struct ibv_sge to;
	struct rdma_cm_id *id;
	uint8_t answer[256];
	uint16_t port;
	int fd;

	TRY(open_device());
	TRY(listen_cm(&port));
	fd = dial(port);
	ENSURE(fd >= 0, "connect: %s", strerror(errno));
	ENSURE(send(fd, request, sizeof request, MSG_NOSIGNAL) == sizeof request, "send: %s", strerror(errno));
	TRY(wait_event(RDMA_CM_EVENT_CONNECT_REQUEST, &id));
	keep(close_id, id, "id");
	ENSURE(!rdma_create_qp(id, NULL, &init), "rdma_create_qp: %s", strerror(errno));
	TRY(new_region(&r, id->pd, 64, IBV_ACCESS_LOCAL_WRITE));
	to = sge_of(&r, 0, 64);
	TRY(post_recv(id->qp, 6, NULL, 0));
	TRY(post_recv(id->qp, 7, &to, 1));
	ENSURE(!rdma_accept(id, &param), "rdma_accept: %s", strerror(errno));
	TRY(readable(fd, WAIT_MS));
	ENSURE(recv(fd, answer, sizeof answer, 0) >= 20, "no MPA Reply");
	TRY(wait_event(RDMA_CM_EVENT_ESTABLISHED, NULL));
	/* A responder sends nothing before the initiator's first message, not even a Terminate. */
	send_fpdu(fpdu, 1, 0);
	ENSURE(send(fd, fpdu, 24, MSG_NOSIGNAL) == 24, "send: %s", strerror(errno));
	TRY(expect_ok(id->recv_cq, 6, IBV_WC_RECV, NULL));
	send_fpdu(fpdu, 2, 4);
	fpdu[24] ^= 1;
	if (how == TRUNCATED) {
		send(fd, fpdu, 17, MSG_NOSIGNAL);
		shutdown(fd, SHUT_WR);
	} else if (how == RESET) {
		send(fd, fpdu, 17, MSG_NOSIGNAL);
		setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
		close(fd);
		fd = -1;
	} else {
		if (how == TOO_LONG)
			fpdu[0] = fpdu[1] = 0xff;
		for (int i = 0; i < (how == TOO_LONG ? 3000 : 1); i++)
			send(fd, fpdu, sizeof fpdu, MSG_NOSIGNAL);
	}
	TRY(expect_status(id->recv_cq, 7, IBV_WC_WR_FLUSH_ERR));
	TRY(wait_event(RDMA_CM_EVENT_DISCONNECTED, NULL));
	TRY(all_bytes(r.at, 64, FRESH, "the receive"));
	if (how == BAD_CRC) {
		TRY(readable(fd, WAIT_MS));
		ssize_t n = recv(fd, answer, sizeof answer, 0);

		ENSURE(n > 4 && (answer[3] & 0x0f) == 7, "%zd bytes, and no Terminate", n);
	}
	if (fd >= 0)
		close(fd);
	return NULL;
}

/* Each kind of event is logged a few times at most, even if it occurs often. */
static const char *logged_once(size_t arg)
{
	static const char *const what[] = { "port scan", "not an MPA Request", "no MPA Request within", "cannot accept" };
	char line[512];

	(void)arg;
	for (size_t i = 0; i < COUNT(what); i++) {
		size_t n = 0;

		rewind(log_file);
		while (fgets(line, sizeof line, log_file))
			n += strstr(line, what[i]) != NULL;
		ENSURE(n >= 1 && n <= 4, "\"%s\" is logged %zu times", what[i], n);
	}
	return NULL;
}

static const struct test tests[] = {
	{ "port_scans", strangers, SCAN, 0, false },
	{ "http_requests", strangers, HTTP, 0, false },
	{ "noise", strangers, NOISE, 0, false },
	{ "silence", strangers, SILENT, 0, false },
	{ "slow_talkers", strangers, SLOW, 0, false },
	{ "few_descriptors", few_descriptors, 0, 0, false },
	{ "no_descriptors", no_descriptors, 0, 0, false },
	{ "descriptors_run_out", descriptors_run_out, 0, 0, false },
	{ "logged_once", logged_once, 0, 0, false },
	{ "bad_crc", protocol_violation, BAD_CRC, 0, false },
	{ "truncated", protocol_violation, TRUNCATED, 0, false },
	{ "reset", protocol_violation, RESET, 0, false },
	{ "too_long", protocol_violation, TOO_LONG, 0, false },
};

int main(int argc, char **argv)
{
	log_file = tmpfile();
	if (!getenv("ANYWARP_LOG") && log_file) {
		setenv("ANYWARP_LOG", "warn", 1);
		dup2(fileno(log_file), STDERR_FILENO);
	}
	return run_tests(tests, COUNT(tests), argc, argv);
}
