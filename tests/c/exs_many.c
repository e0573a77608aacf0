/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Many extended sockets, threads and queues: calls, cancels and closes in random order, and peers that are killed. Each
 * call that was started has exactly one event.
 *
 *   exs_many [--sockets=N] [--threads=N] [--calls=N] [--kills=N]
 */
#include "check.h"

#include <arpa/inet.h>
#include <exs.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>

#define QUEUES 8
#define SLOT 256u
#define BIG 20000u

static unsigned int sockets = 1000, threads = 64, calls = 100000, kills = 30;

static exs_qhandle_t queues[QUEUES];
static atomic_int *fds; /* -1: closed */
static char *memory;	/* a slot for each call, followed by the data of large sends */
static exs_mhandle_t handle;
static atomic_uchar *events; /* events of each call */
static atomic_uint next_call, started, ended, errors[200];

static const char *listener(int *fd, struct sockaddr_in *addr)
{
	socklen_t len = sizeof *addr;

	*addr = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	*fd = exs_socket(AF_INET, SOCK_SEQPACKET, 0);
	ENSURE(*fd >= 0 && !exs_fcntl(*fd, EXS_F_SETSMALLPACKET, 64) && !exs_bind(*fd, (struct sockaddr *)addr, len) &&
		       !exs_listen(*fd, 1024) && !exs_getsockname(*fd, (struct sockaddr *)addr, &len),
	       "listener: %s", strerror(errno));
	return NULL;
}

static const char *wait_for(exs_qhandle_t q, exs_event_t *e)
{
	struct timeval wait = { 30, 0 };
	int n;

	do
		n = exs_qdequeue(q, e, 1, &wait);
	while (n < 0 && errno == EINTR);
	ENSURE(n == 1, "no event: %s", strerror(errno));
	return NULL;
}

static uint32_t any(uint64_t *seed)
{
	*seed = *seed * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(*seed >> 33);
}

/* Starts a random call on a random socket, or cancels a call or closes a socket. */
static void act(uint64_t *seed)
{
	uint32_t what = any(seed) % 100, which = any(seed) % sockets, at;
	int fd = atomic_load(&fds[which]);
	exs_qhandle_t q = queues[any(seed) % QUEUES];
	size_t len = any(seed) % SLOT;
	exs_mhandle_t mh = any(seed) & 1 ? handle : EXS_MHANDLE_UNREGISTERED;
	bool closes;
	int failed;

	at = atomic_fetch_add(&next_call, 1);
	if (at >= calls || fd < 0)
		return;
	if (what < 4) {
		exs_cancel(fd, EXS_CAF_FILDES, 0);
		return;
	}
	if (what < 8) {
		exs_cancel(fd, EXS_CAF_AHANDLE, (exs_ahandle_t)(at - 1 - any(seed) % 50));
		return;
	}
	/* The probability is such that about half of the sockets are closed at the end. */
	closes = any(seed) % calls < sockets * 3 / 4;
	if (closes) {
		if (atomic_exchange(&fds[which], -1) < 0)
			return;
		if (what & 1) {
			exs_close(fd);
			return;
		}
	}
	char *slot = memory + (size_t)at * SLOT;
	atomic_fetch_add(&started, 1);
	if (closes)
		failed = exs_close_async(fd, q, at);
	else if (what < 14)
		failed = exs_poll((exs_pollfd_t[]){ { .fd = -1 } }, 1, 0, q, at); /* fails, because the descriptor is invalid */
	else if (what < 18) {
		exs_pollfd_t *polled = (exs_pollfd_t *)slot;
		int other = atomic_load(&fds[any(seed) % sockets]);

		polled[0] = (exs_pollfd_t){ .fd = fd, .events = EXS_POLLIN };
		polled[1] = (exs_pollfd_t){ .fd = other, .events = EXS_POLLIN | EXS_POLLOUT };
		failed = exs_poll(polled, 2, 0, q, at);
	} else if (what < 54)
		failed = exs_send(fd, slot, len, 0, q, at, mh);
	else if (what < 57)
		failed = exs_send(fd, memory + (size_t)calls * SLOT, BIG, 0, q, at, mh);
	else if (what < 58)
		failed = exs_send(fd, slot, len, EXS_PERSISTENT, q, at, mh);
	else
		failed = exs_recv(fd, slot, SLOT, 0, q, at, mh);
	if (failed) {
		atomic_fetch_sub(&started, 1);
		if (errno < 200)
			atomic_fetch_add(&errors[errno], 1);
	}
}

static bool take(exs_qhandle_t q, long us)
{
	struct timeval wait = { 0, us };
	exs_event_t e[16];
	int n = exs_qdequeue(q, e, 16, &wait);

	for (int i = 0; i < n; i++) {
		atomic_fetch_add(&events[e[i].exs_evt_ahandle], 1);
		atomic_fetch_add(&ended, 1);
	}
	return n > 0;
}

static void *work(void *arg)
{
	uint64_t seed = (uintptr_t)arg * 7919 + 1;
	exs_qhandle_t q = queues[(uintptr_t)arg % QUEUES];

	while (atomic_load(&next_call) < calls) {
		for (int i = 0; i < 8; i++)
			act(&seed);
		take(q, (uintptr_t)arg % 3 ? 0 : 1000);
	}
	return NULL;
}

static int free_memory(void *what)
{
	free(what);
	return 0;
}

static void *zeros(size_t size)
{
	void *all = calloc(1, size);

	keep(free_memory, all, "memory");
	return all;
}

static const char *race(size_t arg)
{
	pthread_t *all = zeros(threads * sizeof *all);
	struct sockaddr_in addr;
	exs_event_t e;
	int fd;

	(void)arg;
	ENSURE(exs_init(EXS_VERSION) == 0, "exs_init: %s", strerror(errno));
	for (int i = 0; i < QUEUES; i++)
		queues[i] = exs_qcreate((int)calls);
	fds = zeros(sockets * sizeof *fds);
	events = zeros(calls);
	memory = zeros((size_t)calls * SLOT + BIG);
	handle = exs_mregister(memory, (size_t)calls * SLOT + BIG, 0);
	ENSURE(handle >= 0, "mregister: %s", strerror(errno));
	TRY(listener(&fd, &addr));
	for (unsigned int i = 0; i < sockets; i += 2) {
		int client = exs_socket(AF_INET, SOCK_SEQPACKET, 0);

		ENSURE(client >= 0 && !exs_fcntl(client, EXS_F_SETSMALLPACKET, 64), "exs_socket: %s", strerror(errno));
		ENSURE(!exs_accept(fd, NULL, 0, queues[0], 1) &&
			       !exs_connect(client, (struct sockaddr *)&addr, sizeof addr, 0, queues[0], 2),
		       "%s", strerror(errno));
		for (int j = 0; j < 2; j++) {
			TRY(wait_for(queues[0], &e));
			ENSURE(!e.exs_evt_errno, "connection %u: %s", i / 2, strerror(e.exs_evt_errno));
			if (e.exs_evt_type == EXS_EVT_ACCEPT)
				atomic_store(&fds[i], e.exs_evt_union.exs_evt_accept.exs_evt_newfd);
		}
		atomic_store(&fds[i + 1], client);
	}
	for (unsigned int i = 0; i < threads; i++)
		ENSURE(pthread_create(&all[i], NULL, work, (void *)(uintptr_t)i) == 0, "pthread_create fails");
	for (unsigned int i = 0; i < threads; i++)
		pthread_join(all[i], NULL);
	unsigned int open = 0, under_way = atomic_load(&started) - atomic_load(&ended);
	for (unsigned int i = 0; i < sockets; i++) {
		int left = atomic_exchange(&fds[i], -1);

		open += left >= 0;
		if (left >= 0)
			ENSURE(exs_close(left) == 0, "close: %s", strerror(errno));
	}
	ENSURE(exs_close(fd) == 0, "close: %s", strerror(errno));
	uint64_t until = now_ms() + 30000;
	while (atomic_load(&ended) < atomic_load(&started) && now_ms() < until)
		for (int i = 0; i < QUEUES; i++)
			take(queues[i], 1000);
	printf("# %u calls, %u refused by full queues, %u sockets open at the end with %u outstanding calls\n", atomic_load(&started),
	       atomic_load(&errors[EAGAIN]), open, under_way);
	for (unsigned int i = 0; i < calls; i++)
		ENSURE(atomic_load(&events[i]) <= 1, "call %u has %d events", i, atomic_load(&events[i]));
	ENSURE(atomic_load(&ended) == atomic_load(&started), "%u events of %u calls", atomic_load(&ended), atomic_load(&started));
	ENSURE(atomic_load(&started) > calls / 4, "only %u calls", atomic_load(&started));
	for (int i = 0; i < QUEUES; i++) {
		ENSURE(!take(queues[i], 1000), "an unexpected event");
		ENSURE(exs_qdelete(queues[i]) == 0, "qdelete: %s", strerror(errno));
	}
	ENSURE(exs_mderegister(handle, 0) == 0, "mderegister: %s", strerror(errno));
	return NULL;
}

#define PEERS 4

/* The process that is stopped. It only accepts connections. */
static int accepting_peer(int count)
{
	struct sockaddr_in addr;
	exs_event_t e;
	int fd;
	exs_qhandle_t q;

	if (exs_init(EXS_VERSION) || (q = exs_qcreate(4096)) < 0 || listener(&fd, &addr))
		return 1;
	printf("%d\n", ntohs(addr.sin_port));
	fflush(stdout);
	for (int i = 0; i < count; i++)
		if (exs_accept(fd, NULL, 0, q, i) || exs_qdequeue(q, &e, 1, NULL) != 1 || e.exs_evt_errno)
			return 1;
	printf("accepted\n");
	fflush(stdout);
	sleep(60);
	return 0;
}

/* The process that is killed. It repeats calls on each of its sockets. */
static int peer(const char *role, const char *port)
{
	struct sockaddr_in addr;
	static char out[100000], in[PEERS][100000];
	exs_event_t e;
	int fd;
	exs_qhandle_t q;

	if (exs_init(EXS_VERSION) || (q = exs_qcreate(4096)) < 0)
		return 1;
	if (!strcmp(role, "listen")) {
		if (listener(&fd, &addr))
			return 1;
		printf("%d\n", ntohs(addr.sin_port));
		fflush(stdout);
		for (int i = 0; i < PEERS; i++)
			exs_accept(fd, NULL, 0, q, i);
	} else {
		addr = (struct sockaddr_in){
			.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)atoi(port))
		};
		printf("connects\n");
		fflush(stdout);
		for (int i = 0; i < PEERS; i++) {
			fd = exs_socket(AF_INET, SOCK_SEQPACKET, 0);
			exs_connect(fd, (struct sockaddr *)&addr, sizeof addr, 0, q, i);
		}
	}
	for (uint64_t until = now_ms() + 20000; now_ms() < until;) {
		struct timeval wait = { 1, 0 };

		if (exs_qdequeue(q, &e, 1, &wait) != 1)
			continue;
		fd = e.exs_evt_type == EXS_EVT_ACCEPT ? e.exs_evt_union.exs_evt_accept.exs_evt_newfd : e.exs_evt_fd;
		if (e.exs_evt_errno)
			continue;
		if (e.exs_evt_type != EXS_EVT_SEND)
			exs_recv(fd, in[e.exs_evt_ahandle], 100000, 0, q, e.exs_evt_ahandle, EXS_MHANDLE_UNREGISTERED);
		if (e.exs_evt_type != EXS_EVT_RECV)
			exs_send(fd, out, 100000, 0, q, e.exs_evt_ahandle, EXS_MHANDLE_UNREGISTERED);
	}
	return 0;
}

/* Kills the peer after a time that depends on the round. All outstanding calls then end. The first two rounds, one for each role of the
 * peer, kill it when a connection exists, and measure the time until then. The later rounds kill it after up to twice that time: before a
 * connection is established, while it is, and afterwards, also on a slow machine. */
static const char *kill_at(unsigned int round, exs_qhandle_t q, unsigned int *connected)
{
	static uint64_t first_connection[2];
	/* The data that all connections send, and a receive buffer for each. */
	static char out[100000], in[2 * PEERS + 1][100000];
	bool listens = round & 1;
	unsigned int pending = 0;
	struct sockaddr_in addr;
	int fd = -1, pipes[2], open[2 * PEERS + 1], count = 0;
	char port[16] = "", line[16] = "";
	exs_event_t e;
	pid_t child;

	ENSURE(pipe(pipes) == 0, "pipe: %s", strerror(errno));
	if (!listens) {
		TRY(listener(&fd, &addr));
		open[count++] = fd;
		snprintf(port, sizeof port, "%d", ntohs(addr.sin_port));
		for (int i = 0; i < PEERS; i++) {
			ENSURE(!exs_accept(fd, NULL, 0, q, 0), "accept: %s", strerror(errno));
			pending++;
		}
	}
	child = fork();
	if (child == 0) {
		dup2(pipes[1], STDOUT_FILENO);
		execl("/proc/self/exe", "exs_many", "--peer", listens ? "listen" : "connect", port, (char *)NULL);
		_exit(127);
	}
	ENSURE(child > 0, "fork: %s", strerror(errno));
	close(pipes[1]);
	/* If the peer listens, the line contains its port. */
	ENSURE(read(pipes[0], line, sizeof line - 1) > 0, "the peer does not start");
	uint64_t began = now_ns(), until = began + 30000000000ull;
	if (listens) {
		addr = (struct sockaddr_in){
			.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)atoi(line))
		};
		for (int i = 0; i < PEERS; i++) {
			fd = exs_socket(AF_INET, SOCK_SEQPACKET, 0);
			open[count++] = fd;
			ENSURE(fd >= 0 && !exs_connect(fd, (struct sockaddr *)&addr, sizeof addr, 0, q, 0), "connect: %s", strerror(errno));
			pending++;
		}
	}
	close(pipes[0]);
	uint64_t dies = round < 2 ? until : began + first_connection[listens] * (round % 16) / 8;
	bool killed = false;
	while (pending > 0 && now_ns() < until) {
		struct timeval wait = { 0, 500 };

		if (!killed && now_ns() >= dies) {
			killed = true;
			kill(child, SIGKILL);
			waitpid(child, NULL, 0);
			/* Accepts for which no connection was established do not end with the peer. */
			if (!listens)
				exs_cancel(open[0], EXS_CAF_FILDES, 0);
		}
		if (exs_qdequeue(q, &e, 1, &wait) != 1)
			continue;
		pending--;
		if (e.exs_evt_errno)
			continue;
		fd = e.exs_evt_fd;
		if (e.exs_evt_type == EXS_EVT_ACCEPT) {
			fd = e.exs_evt_union.exs_evt_accept.exs_evt_newfd;
			open[count++] = fd;
		}
		if (e.exs_evt_type == EXS_EVT_ACCEPT || e.exs_evt_type == EXS_EVT_CONNECT) {
			++*connected;
			if (round < 2 && !first_connection[listens]) {
				dies = now_ns();
				first_connection[listens] = dies - began;
			}
			pending += !exs_send(fd, out, sizeof out, EXS_PERSISTENT, q, 0, EXS_MHANDLE_UNREGISTERED);
		}
		if (e.exs_evt_type != EXS_EVT_SEND) {
			int at = 0;

			while (at < count - 1 && open[at] != fd)
				at++;
			pending += !exs_recv(fd, in[at], sizeof in[at], 0, q, 1, EXS_MHANDLE_UNREGISTERED);
		}
		if (e.exs_evt_type != EXS_EVT_RECV)
			pending += !exs_send(fd, out, 50000, 0, q, 0, EXS_MHANDLE_UNREGISTERED);
	}
	ENSURE(pending == 0 && killed, "round %u: %u calls have no event", round, pending);
	for (int i = 0; i < count; i++)
		ENSURE(exs_close(open[i]) == 0, "close: %s", strerror(errno));
	struct timeval none = { 0, 0 };
	ENSURE(exs_qdequeue(q, &e, 1, &none) == 0, "round %u: an unexpected event", round);
	return NULL;
}

static const char *killed(size_t arg)
{
	unsigned int connected = 0;
	exs_qhandle_t q;

	(void)arg;
	ENSURE(exs_init(EXS_VERSION) == 0, "exs_init: %s", strerror(errno));
	q = exs_qcreate(4096);
	for (unsigned int i = 0; i < kills; i++)
		TRY(kill_at(i, q, &connected));
	printf("# %u kills, %u connections\n", kills, connected);
	ENSURE(connected > 0 || kills == 0, "no connection was made");
	ENSURE(exs_qdelete(q) == 0, "qdelete: %s", strerror(errno));
	return NULL;
}

#define STOPPED 20

static pid_t stopped;

static int kill_stopped(void *what)
{
	(void)what;
	kill(stopped, SIGKILL);
	return waitpid(stopped, NULL, 0) != stopped;
}

/* Connects sockets to a process and then stops it, so that it answers as little as a peer whose host has failed. */
static const char *with_stopped_peer(exs_qhandle_t q, int *open, int count)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct timeval wait = { 10, 0 };
	char line[16] = "", counted[16];
	exs_event_t e;
	int pipes[2];

	ENSURE(pipe(pipes) == 0, "pipe: %s", strerror(errno));
	snprintf(counted, sizeof counted, "%d", count);
	stopped = fork();
	if (stopped == 0) {
		dup2(pipes[1], STDOUT_FILENO);
		execl("/proc/self/exe", "exs_many", "--peer", "accept", counted, (char *)NULL);
		_exit(127);
	}
	ENSURE(stopped > 0, "fork: %s", strerror(errno));
	keep(kill_stopped, NULL, "peer");
	close(pipes[1]);
	ENSURE(read(pipes[0], line, sizeof line - 1) > 0, "the peer does not start");
	addr.sin_port = htons((uint16_t)atoi(line));
	for (int i = 0; i < count; i++) {
		open[i] = exs_socket(AF_INET, SOCK_SEQPACKET, 0);
		ENSURE(open[i] >= 0 && !exs_connect(open[i], (struct sockaddr *)&addr, sizeof addr, 0, q, 0), "connect: %s", strerror(errno));
		ENSURE(exs_qdequeue(q, &e, 1, &wait) == 1 && !e.exs_evt_errno, "connect");
	}
	ENSURE(read(pipes[0], line, sizeof line - 1) > 0, "the peer does not accept");
	close(pipes[0]);
	/* The wait lasts until the connections use shared memory, in which messages wait for the peer. A TCP socket would accept some of them. */
	sleep_ms(300);
	ENSURE(!kill(stopped, SIGSTOP), "kill: %s", strerror(errno));
	return NULL;
}

/* Closes whose linger time ends do not delay the other sockets. */
static const char *closes_to_a_stopped_peer(size_t arg)
{
	struct sockaddr_in addr;
	struct timeval wait = { 10, 0 };
	static char out[1000];
	exs_event_t e;
	exs_qhandle_t q, others;
	int fd, client, open[STOPPED];

	(void)arg;
	ENSURE(exs_init(EXS_VERSION) == 0, "exs_init: %s", strerror(errno));
	q = exs_qcreate(4096);
	others = exs_qcreate(4);
	TRY(listener(&fd, &addr));
	TRY(with_stopped_peer(q, open, STOPPED));
	for (int i = 0; i < STOPPED; i++) {
		ENSURE(!exs_fcntl(open[i], EXS_F_SETLINGER, 50), "fcntl: %s", strerror(errno));
		ENSURE(!exs_send(open[i], out, sizeof out, 0, q, 1, EXS_MHANDLE_UNREGISTERED), "send: %s", strerror(errno));
		ENSURE(!exs_close_async(open[i], q, 2), "close: %s", strerror(errno));
	}
	sleep_ms(55);
	uint64_t began = now_ms();
	client = exs_socket(AF_INET, SOCK_SEQPACKET, 0);
	ENSURE(!exs_accept(fd, NULL, 0, others, 1), "accept: %s", strerror(errno));
	ENSURE(!exs_connect(client, (struct sockaddr *)&addr, sizeof addr, 0, others, 2), "connect: %s", strerror(errno));
	for (int i = 0; i < 2; i++) {
		ENSURE(exs_qdequeue(others, &e, 1, &wait) == 1 && !e.exs_evt_errno, "no connection");
		if (e.exs_evt_type == EXS_EVT_ACCEPT)
			ENSURE(exs_close(e.exs_evt_union.exs_evt_accept.exs_evt_newfd) == 0, "close: %s", strerror(errno));
	}
	ENSURE(now_ms() - began < 1000, "another socket waits %llu ms", (unsigned long long)(now_ms() - began));
	for (int i = 0; i < 2 * STOPPED; i++)
		ENSURE(exs_qdequeue(q, &e, 1, &wait) == 1 && e.exs_evt_errno, "%d events", i);
	ENSURE(!exs_close(client) && !exs_close(fd) && !exs_qdelete(q) && !exs_qdelete(others), "close: %s", strerror(errno));
	return NULL;
}

/* Time limits end the calls also if the peer does not answer. */
static const char *limits_with_a_stopped_peer(size_t arg)
{
	static char out[100000], in[100];
	exs_event_t e;
	exs_qhandle_t q;
	int fd;

	(void)arg;
	ENSURE(exs_init(EXS_VERSION) == 0, "exs_init: %s", strerror(errno));
	q = exs_qcreate(16);
	TRY(with_stopped_peer(q, &fd, 1));
	ENSURE(!exs_recv(fd, in, sizeof in, 0, q, 1, EXS_MHANDLE_UNREGISTERED), "recv: %s", strerror(errno));
	ENSURE(!exs_fcntl(fd, SO_ASYNC_SEND_TIMEOUT, 50), "fcntl: %s", strerror(errno));
	uint64_t began = now_ms();
	ENSURE(!exs_send(fd, out, sizeof out, 0, q, 2, EXS_MHANDLE_UNREGISTERED), "send: %s", strerror(errno));
	for (int i = 0; i < 2; i++) {
		TRY(wait_for(q, &e));
		ENSURE(e.exs_evt_errno == ETIMEDOUT, "call %ld: %s", (long)e.exs_evt_ahandle, strerror(e.exs_evt_errno));
		ENSURE(e.exs_evt_type == (e.exs_evt_ahandle == 2 ? EXS_EVT_SENDTIMEOUT : EXS_EVT_RECV), "event %d", e.exs_evt_type);
	}
	ENSURE(now_ms() - began >= 1000 && now_ms() - began < 5000, "after %llu ms", (unsigned long long)(now_ms() - began));
	ENSURE(exs_send(fd, out, 1, 0, q, 3, EXS_MHANDLE_UNREGISTERED) < 0 && errno == ECONNRESET, "a send after the end");
	ENSURE(!exs_close(fd) && !exs_qdelete(q), "close: %s", strerror(errno));
	return NULL;
}

static const struct test tests[] = {
	{ "race", race, 0, 300, false },
	{ "killed", killed, 0, 300, false },
	{ "closes_to_a_stopped_peer", closes_to_a_stopped_peer, 0, 0, false },
	{ "limits_with_a_stopped_peer", limits_with_a_stopped_peer, 0, 0, false },
};

int main(int argc, char **argv)
{
	struct rlimit files;
	static const struct {
		const char *name;
		unsigned int *value;
	} numbers[] = { { "--sockets=", &sockets }, { "--threads=", &threads }, { "--calls=", &calls }, { "--kills=", &kills } };

	if (argc >= 4 && !strcmp(argv[1], "--peer") && !strcmp(argv[2], "accept"))
		return accepting_peer(atoi(argv[3]));
	if (argc >= 3 && !strcmp(argv[1], "--peer"))
		return peer(argv[2], argc > 3 ? argv[3] : "0");
	for (int i = 1; i < argc; i++)
		for (size_t j = 0; j < COUNT(numbers); j++)
			if (!strncmp(argv[i], numbers[j].name, strlen(numbers[j].name)))
				*numbers[j].value = (unsigned int)atoi(argv[i] + strlen(numbers[j].name));
	getrlimit(RLIMIT_NOFILE, &files);
	files.rlim_cur = files.rlim_max;
	setrlimit(RLIMIT_NOFILE, &files);
	return run_tests(tests, COUNT(tests), argc, argv);
}
