/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * TCP sockets and poll, select and epoll as programs use them. `cargo lab sockets` runs this program on the kernel's
 * sockets, and with both ends upgraded by libanywarp-sockets.so, with and without shared memory. All runs must give the same
 * results. Both ends use the loopback interface. In some tests one of them is in a child process.
 *
 * SOCKETS_UPGRADED=1 says that connections should be upgraded. The first test checks this.
 */
#include "check.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <linux/tcp.h> /* newer than netinet/tcp.h */
#include <limits.h>
#include <pthread.h>
#include <setjmp.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define SHORT_MS 30 /* time in which no event must occur */
#define LONG_MS 5000

static int close_fd(void *p)
{
	close((int)(intptr_t)p); /* the test may have closed it */
	return 0;
}

static void keep_fd(int fd)
{
	keep(close_fd, (void *)(intptr_t)fd, "descriptor");
}

struct pair {
	int a, b; /* the end that connected, and the end that accepted */
};

/* Sends a message in each direction, because the transport of an accepted connection is decided at its first read. */
static const char *greet(const struct pair *p)
{
	char word[3] = "";

	ENSURE(write(p->a, "hi", 2) == 2, "write: %s", strerror(errno));
	ENSURE(read(p->b, word, 2) == 2 && !memcmp(word, "hi", 2), "the greeting does not arrive");
	ENSURE(write(p->b, "ho", 2) == 2, "write: %s", strerror(errno));
	ENSURE(read(p->a, word, 2) == 2 && !memcmp(word, "ho", 2), "the answer does not arrive");
	return NULL;
}

/* Opens a listener on a free port. `option`: an option of SOL_SOCKET that it sets to `value`, or 0. */
static const char *listens(int *listener, struct sockaddr_in *at, int option, int value)
{
	socklen_t len = sizeof *at;

	*at = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	*listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(*listener >= 0, "socket: %s", strerror(errno));
	keep_fd(*listener);
	if (option)
		ENSURE(!setsockopt(*listener, SOL_SOCKET, option, &value, sizeof value), "setsockopt: %s", strerror(errno));
	ENSURE(!bind(*listener, (struct sockaddr *)at, sizeof *at), "bind: %s", strerror(errno));
	ENSURE(!listen(*listener, 4), "listen: %s", strerror(errno));
	ENSURE(!getsockname(*listener, (struct sockaddr *)at, &len), "getsockname: %s", strerror(errno));
	return NULL;
}

/* Opens a connection on which nothing has been sent yet. */
static const char *accepted(struct pair *p)
{
	struct sockaddr_in at;
	int listener;

	TRY(listens(&listener, &at, 0, 0));
	p->a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(p->a >= 0, "socket: %s", strerror(errno));
	keep_fd(p->a);
	ENSURE(!connect(p->a, (struct sockaddr *)&at, sizeof at), "connect: %s", strerror(errno));
	p->b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(p->b >= 0, "accept4: %s", strerror(errno));
	keep_fd(p->b);
	return NULL;
}

static const char *connected(struct pair *p)
{
	TRY(accepted(p));
	return greet(p);
}

static const char *nonblocking(int fd)
{
	ENSURE(!fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK), "fcntl: %s", strerror(errno));
	return NULL;
}

static const char *new_set(int *set)
{
	*set = epoll_create1(EPOLL_CLOEXEC);
	ENSURE(*set >= 0, "epoll_create1: %s", strerror(errno));
	keep_fd(*set);
	return NULL;
}

static int control(int set, int op, int fd, uint32_t events, uint64_t data)
{
	struct epoll_event e = { .events = events, .data.u64 = data };

	return epoll_ctl(set, op, fd, &e) ? errno : 0;
}

static const char *add(int set, int fd, uint32_t events, uint64_t data)
{
	int e = control(set, EPOLL_CTL_ADD, fd, events, data);

	ENSURE(!e, "EPOLL_CTL_ADD: %s", strerror(e));
	return NULL;
}

static const char *modify(int set, int fd, uint32_t events, uint64_t data)
{
	int e = control(set, EPOLL_CTL_MOD, fd, events, data);

	ENSURE(!e, "EPOLL_CTL_MOD: %s", strerror(e));
	return NULL;
}

static const char *drop(int set, int fd)
{
	int e = control(set, EPOLL_CTL_DEL, fd, 0, 0);

	ENSURE(!e, "EPOLL_CTL_DEL: %s", strerror(e));
	return NULL;
}

/* Checks that there is exactly one event, with this data. */
static const char *reports(int set, uint32_t events, uint64_t data)
{
	struct epoll_event e[4];
	int n = epoll_wait(set, e, 4, LONG_MS);

	ENSURE(n == 1, "%d events (%s)", n, n < 0 ? strerror(errno) : "");
	ENSURE(e[0].events == events, "events %#x, expected %#x", e[0].events, events);
	ENSURE(e[0].data.u64 == data, "data %llu, expected %llu", (unsigned long long)e[0].data.u64, (unsigned long long)data);
	return NULL;
}

static double cpu_ms(void)
{
	struct rusage r;

	getrusage(RUSAGE_SELF, &r);
	return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) * 1e3 + (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e3;
}

/* Checks that no event occurs for some time, and that the wait uses no processor time. */
static const char *is_quiet(int set)
{
	struct epoll_event e;
	double before = cpu_ms();
	uint64_t start = now_ms();
	int n = epoll_wait(set, &e, 1, SHORT_MS);

	ENSURE(n == 0, "%d events, the first %#x", n, n > 0 ? e.events : 0);
	ENSURE(now_ms() - start >= SHORT_MS - 1, "the wait ends after %llu ms", (unsigned long long)(now_ms() - start));
	ENSURE(cpu_ms() - before < SHORT_MS / 2.0, "the wait takes %.1f ms of processor time", cpu_ms() - before);
	return NULL;
}

static const char *text(int fd, const char *word)
{
	size_t len = strlen(word);

	ENSURE(write(fd, word, len) == (ssize_t)len, "write: %s", strerror(errno));
	return NULL;
}

static const char *takes(int fd, const char *word)
{
	char got[64];
	ssize_t n = recv(fd, got, strlen(word), MSG_WAITALL);

	ENSURE(n == (ssize_t)strlen(word) && !memcmp(got, word, strlen(word)), "%zd bytes instead of \"%s\"", n, word);
	return NULL;
}

/* Writes to a non-blocking descriptor until it is full. Sets `total` to the number of bytes. */
static const char *fill(int fd, size_t *total)
{
	static const char block[65536];

	for (*total = 0;;) {
		ssize_t n = write(fd, block, sizeof block);

		if (n < 0) {
			ENSURE(errno == EAGAIN, "write: %s", strerror(errno));
			return NULL;
		}
		*total += (size_t)n;
		ENSURE(*total < 1u << 30, "a gigabyte is accepted without a reader");
	}
}

static const char *take_all(int fd, size_t total)
{
	static char block[65536];

	while (total) {
		ssize_t n = read(fd, block, total < sizeof block ? total : sizeof block);

		ENSURE(n > 0, "read, with %zu bytes outstanding: %s", total, n ? strerror(errno) : "end");
		total -= (size_t)n;
	}
	return NULL;
}

/* ---------------------------------------------------------------- which transport */

/* On an upgraded connection the kernel counts more bytes than the program wrote; on a plain one, the same number. */
static const char *has_expected_transport(int fd)
{
	bool expected = getenv("SOCKETS_UPGRADED");
	struct tcp_info info;
	socklen_t len = sizeof info;

	ENSURE(!getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len), "TCP_INFO: %s", strerror(errno));
	ENSURE((info.tcpi_bytes_received > 2) == expected, "%llu bytes for 2: %s", (unsigned long long)info.tcpi_bytes_received,
	       expected ? "the connection is plain" : "the connection is upgraded");
	return NULL;
}

static const char *is_upgraded(size_t arg)
{
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	return has_expected_transport(p.b);
}

/* ---------------------------------------------------------------- sets */

static const char *level(size_t arg)
{
	struct pair p;
	int set;

	(void)arg;
	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(add(set, p.b, EPOLLIN, 7));
	TRY(is_quiet(set));
	TRY(text(p.a, "abcd"));
	TRY(reports(set, EPOLLIN, 7));
	TRY(takes(p.b, "ab"));
	TRY(reports(set, EPOLLIN, 7)); /* the rest */
	TRY(takes(p.b, "cd"));
	return is_quiet(set);
}

static const char *edge(size_t arg)
{
	struct pair p;
	int set;

	(void)arg;
	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(add(set, p.b, EPOLLIN | EPOLLET, 8));
	TRY(text(p.a, "ab"));
	TRY(reports(set, EPOLLIN, 8));
	TRY(is_quiet(set)); /* although no data was read */
	TRY(text(p.a, "cd"));
	TRY(reports(set, EPOLLIN, 8));
	TRY(takes(p.b, "abcd"));
	TRY(is_quiet(set));
	/* Data that has arrived already counts as an edge when a descriptor is added or modified. */
	TRY(text(p.a, "ef"));
	TRY(reports(set, EPOLLIN, 8));
	TRY(modify(set, p.b, EPOLLIN | EPOLLET, 9));
	return reports(set, EPOLLIN, 9);
}

static const char *one_shot(size_t arg)
{
	struct pair p;
	int set;

	(void)arg;
	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(add(set, p.b, EPOLLIN | EPOLLONESHOT, 1));
	TRY(text(p.a, "ab"));
	TRY(reports(set, EPOLLIN, 1));
	TRY(is_quiet(set));
	TRY(text(p.a, "cd"));
	TRY(is_quiet(set));
	TRY(modify(set, p.b, EPOLLIN | EPOLLONESHOT, 2));
	TRY(reports(set, EPOLLIN, 2));
	TRY(is_quiet(set));
	TRY(drop(set, p.b));
	ENSURE(control(set, EPOLL_CTL_MOD, p.b, EPOLLIN, 0) == ENOENT, "a removed descriptor can be modified");
	return NULL;
}

static const char *removed(size_t arg)
{
	struct pair p;
	int set;

	(void)arg;
	TRY(connected(&p));
	TRY(new_set(&set));
	ENSURE(control(set, EPOLL_CTL_DEL, p.b, 0, 0) == ENOENT, "a descriptor that is not in the set can be removed");
	TRY(add(set, p.b, EPOLLIN, 1));
	ENSURE(control(set, EPOLL_CTL_ADD, p.b, EPOLLIN, 1) == EEXIST, "a descriptor can be added twice");
	TRY(drop(set, p.b));
	ENSURE(control(set, EPOLL_CTL_DEL, p.b, 0, 0) == ENOENT, "a descriptor can be removed twice");
	ENSURE(control(set, EPOLL_CTL_MOD, p.b, EPOLLIN, 0) == ENOENT, "a removed descriptor can be modified");
	TRY(text(p.a, "ab"));
	TRY(is_quiet(set));
	TRY(is_quiet(set));
	TRY(add(set, p.b, EPOLLIN, 3));
	TRY(reports(set, EPOLLIN, 3));
	TRY(takes(p.b, "ab"));
	TRY(is_quiet(set));
	/* The descriptor is removed and added again at once, with other data. */
	for (uint64_t i = 0; i < 100; i++) {
		TRY(drop(set, p.b));
		TRY(add(set, p.b, i % 2 ? EPOLLIN : EPOLLOUT, i));
		if (i % 2) {
			TRY(text(p.a, "x"));
			TRY(reports(set, EPOLLIN, i));
			TRY(takes(p.b, "x"));
		} else {
			TRY(reports(set, EPOLLOUT, i));
		}
	}
	return NULL;
}

/* Data that arrives while the program does not wait for EPOLLIN is reported as soon as the program waits for it. Until then, no
 * wait spins. */
static const char *not_waited_for(size_t with_out)
{
	struct pair p;
	int set;

	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(add(set, p.b, EPOLLIN | (with_out ? EPOLLOUT : 0), 1));
	TRY(modify(set, p.b, 0, 1));
	TRY(text(p.a, "abc"));
	TRY(is_quiet(set));
	TRY(is_quiet(set));
	TRY(modify(set, p.b, EPOLLOUT, 2));
	TRY(reports(set, EPOLLOUT, 2));
	TRY(reports(set, EPOLLOUT, 2));
	TRY(modify(set, p.b, EPOLLIN | EPOLLOUT, 3));
	TRY(reports(set, EPOLLIN | EPOLLOUT, 3));
	TRY(takes(p.b, "abc"));
	TRY(modify(set, p.b, EPOLLIN, 4));
	TRY(is_quiet(set));
	/* The end of the stream is reported only while the program waits for EPOLLIN or EPOLLRDHUP. */
	ENSURE(!shutdown(p.a, SHUT_WR), "shutdown: %s", strerror(errno));
	TRY(reports(set, EPOLLIN, 4));
	TRY(modify(set, p.b, 0, 4));
	TRY(is_quiet(set));
	TRY(modify(set, p.b, EPOLLRDHUP, 5));
	return reports(set, EPOLLRDHUP, 5);
}

struct reader {
	int fd;
	size_t total;
	const char *error;
};

static void *read_later(void *arg)
{
	struct reader *r = arg;

	sleep_ms(SHORT_MS);
	r->error = take_all(r->fd, r->total);
	return NULL;
}

/* A writer that waits for room sleeps until the peer reads. */
static const char *room(size_t arg)
{
	uint32_t flags = (uint32_t)arg;
	struct reader r;
	pthread_t thread;
	struct pair p;
	int set;

	TRY(connected(&p));
	TRY(nonblocking(p.a));
	TRY(new_set(&set));
	TRY(add(set, p.a, EPOLLOUT | flags, 1));
	TRY(reports(set, EPOLLOUT, 1));
	if (flags & EPOLLONESHOT)
		TRY(modify(set, p.a, EPOLLOUT | flags, 1));
	TRY(fill(p.a, &r.total));
	if (flags & EPOLLONESHOT)
		TRY(modify(set, p.a, EPOLLOUT | flags, 1));
	/* The kernel moves data to the peer's buffer for a while, which makes room. Afterwards the socket stays full. */
	for (int turn = 0; turn < 20 && poll(&(struct pollfd){ .fd = p.a, .events = POLLOUT }, 1, SHORT_MS) == 1; turn++) {
		size_t more;

		TRY(fill(p.a, &more));
		r.total += more;
	}
	while (flags & EPOLLET && epoll_wait(set, &(struct epoll_event){ 0 }, 1, SHORT_MS) == 1)
		;
	if (flags & EPOLLONESHOT)
		TRY(modify(set, p.a, EPOLLOUT | flags, 1));
	TRY(is_quiet(set));
	r.fd = p.b;
	ENSURE(!pthread_create(&thread, NULL, read_later, &r), "pthread_create");
	{
		const char *error = reports(set, EPOLLOUT, 1);

		pthread_join(thread, NULL);
		TRY(error);
	}
	TRY(r.error);
	return greet(&p);
}

static const char *two_sets(size_t arg)
{
	struct pair p;
	int one, two;

	(void)arg;
	TRY(connected(&p));
	TRY(new_set(&one));
	TRY(new_set(&two));
	TRY(add(one, p.b, EPOLLIN, 1));
	TRY(add(two, p.b, EPOLLIN, 2));
	TRY(text(p.a, "ab"));
	TRY(reports(one, EPOLLIN, 1));
	TRY(reports(two, EPOLLIN, 2));
	TRY(reports(one, EPOLLIN, 1));
	TRY(takes(p.b, "ab"));
	TRY(is_quiet(one));
	TRY(is_quiet(two));
	TRY(drop(one, p.b));
	TRY(text(p.a, "cd"));
	TRY(is_quiet(one));
	return reports(two, EPOLLIN, 2);
}

enum { TWO_SETS, TWO_SETS_OUT, POLL_AND_SET, POLL_AND_SET_END, POLL_AND_SET_OUT };

/* What one wait has reported is reported to another wait too, also if nothing was known before. */
static const char *reported_twice(size_t how)
{
	struct pair p;
	struct pollfd ready;
	uint32_t event = how == TWO_SETS_OUT || how == POLL_AND_SET_OUT ? EPOLLOUT : EPOLLIN;
	size_t total = 0;
	int one, two;

	TRY(connected(&p));
	TRY(new_set(&one));
	TRY(new_set(&two));
	if (event == EPOLLOUT) {
		TRY(nonblocking(p.b));
		TRY(fill(p.b, &total));
	}
	TRY(add(one, p.b, event, 1));
	TRY(is_quiet(one));
	if (how == TWO_SETS || how == TWO_SETS_OUT)
		TRY(add(two, p.b, event, 2));
	TRY(is_quiet(two));
	if (how == POLL_AND_SET_END)
		ENSURE(!shutdown(p.a, SHUT_WR), "shutdown: %s", strerror(errno));
	else if (event == EPOLLIN)
		TRY(text(p.a, "ab"));
	else
		TRY(take_all(p.a, total));
	if (how == TWO_SETS || how == TWO_SETS_OUT) {
		TRY(reports(two, event, 2));
	} else {
		ready = (struct pollfd){ p.b, (short)event, 0 };
		ENSURE(poll(&ready, 1, LONG_MS) == 1 && (uint32_t)ready.revents == event, "poll reports %#x", ready.revents);
	}
	return reports(one, event, 1);
}

/* Two streams are in the set with the same event data. */
static const char *same_data(size_t arg)
{
	struct pair p, q;
	int set;

	(void)arg;
	TRY(connected(&p));
	TRY(connected(&q));
	TRY(new_set(&set));
	TRY(add(set, p.b, EPOLLIN, 5));
	TRY(add(set, q.b, EPOLLIN, 5));
	TRY(text(q.a, "q"));
	TRY(reports(set, EPOLLIN, 5));
	TRY(takes(q.b, "q"));
	TRY(is_quiet(set));
	TRY(drop(set, p.b));
	TRY(text(q.a, "r"));
	TRY(reports(set, EPOLLIN, 5));
	TRY(takes(q.b, "r"));
	TRY(modify(set, q.b, EPOLLIN, 6));
	TRY(text(q.a, "s"));
	return reports(set, EPOLLIN, 6);
}

static const char *closed(size_t copies)
{
	struct pair p;
	int set, copy = -1;

	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(add(set, p.b, EPOLLIN, 1));
	if (copies) {
		copy = dup(p.b);
		ENSURE(copy >= 0, "dup: %s", strerror(errno));
		keep_fd(copy);
		TRY(drop(set, p.b));
	}
	ENSURE(!close(p.b), "close: %s", strerror(errno));
	TRY(is_quiet(set));
	if (copies) {
		/* The stream stays open through its copy, although the original was removed from the set and closed. */
		TRY(text(p.a, "ab"));
		TRY(is_quiet(set));
		TRY(takes(copy, "ab"));
		TRY(add(set, copy, EPOLLIN, 2));
		TRY(text(p.a, "cd"));
		TRY(reports(set, EPOLLIN, 2));
	}
	return NULL;
}

/* The end that connects is in the set before it connects, and reads less than arrives. */
static const char *added_before(size_t edge)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof at;
	uint32_t events = EPOLLIN | EPOLLRDHUP | (edge ? EPOLLET : 0);
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), set, other;
	struct pair p = { .b = -1 };
	struct epoll_event e;

	ENSURE(listener >= 0, "socket: %s", strerror(errno));
	keep_fd(listener);
	ENSURE(!bind(listener, (struct sockaddr *)&at, sizeof at) && !listen(listener, 1) &&
	       !getsockname(listener, (struct sockaddr *)&at, &len), "listen: %s", strerror(errno));
	TRY(new_set(&set));
	p.a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(p.a >= 0, "socket: %s", strerror(errno));
	keep_fd(p.a);
	TRY(add(set, p.a, events | EPOLLOUT, 1));
	TRY(modify(set, p.a, events, 2));
	ENSURE(!connect(p.a, (struct sockaddr *)&at, len), "connect: %s", strerror(errno));
	p.b = accept(listener, NULL, NULL);
	ENSURE(p.b >= 0, "accept: %s", strerror(errno));
	keep_fd(p.b);
	TRY(greet(&p));
	while (epoll_wait(set, &e, 1, SHORT_MS) == 1) /* the greeting */
		ENSURE(edge && e.data.u64 == 2, "data %llu", (unsigned long long)e.data.u64);
	TRY(text(p.b, "abc"));
	TRY(reports(set, EPOLLIN, 2));
	TRY(takes(p.a, "a"));
	if (!edge) {
		TRY(reports(set, EPOLLIN, 2));
		TRY(takes(p.a, "bc"));
	}
	TRY(edge ? takes(p.a, "bc") : is_quiet(set));
	/* After the close, the number of the descriptor belongs to another socket. */
	ENSURE(!close(p.a), "close: %s", strerror(errno));
	other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(other >= 0, "socket: %s", strerror(errno));
	keep_fd(other);
	TRY(text(p.b, "late"));
	ENSURE(!close(p.b), "close: %s", strerror(errno));
	return is_quiet(set);
}

/* What the peer does after a close is no event, although the library may keep the connection for a while. */
static const char *closed_by_both(size_t writes)
{
	struct pair p;
	int set;

	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(add(set, p.b, EPOLLIN | EPOLLRDHUP | EPOLLET, 1));
	ENSURE(!close(p.b), "close: %s", strerror(errno));
	if (writes)
		TRY(text(p.a, "late"));
	ENSURE(!close(p.a), "close: %s", strerror(errno));
	return is_quiet(set);
}

enum { CLOSE_WAIT = 8 }; /* the state of a connection whose FIN has arrived (net/tcp_states.h of the kernel) */

/* Waits until the peer's FIN has arrived, without a call that reads. */
static const char *has_ended(int fd)
{
	uint64_t start = now_ms();
	struct tcp_info info = { 0 };
	socklen_t len = sizeof info;

	do {
		poll(NULL, 0, 1);
		ENSURE(!getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len), "TCP_INFO: %s", strerror(errno));
	} while (info.tcpi_state != CLOSE_WAIT && now_ms() - start < LONG_MS);
	ENSURE(info.tcpi_state == CLOSE_WAIT, "no FIN arrives: state %d", info.tcpi_state);
	return NULL;
}

/* An edge-triggered set reports the end once, with the data before it. A program then need not read until EAGAIN to find it. */
static const char *ends_behind_data(size_t length)
{
	static const char block[100000];
	struct pair p;
	int set;
	char c;

	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(add(set, p.a, EPOLLIN | EPOLLRDHUP | EPOLLET, 1));
	ENSURE(write(p.b, block, length) == (ssize_t)length, "write: %s", strerror(errno));
	ENSURE(!close(p.b), "close: %s", strerror(errno));
	TRY(has_ended(p.a));
	TRY(reports(set, EPOLLIN | EPOLLRDHUP, 1));
	TRY(take_all(p.a, length));
	ENSURE(read(p.a, &c, 1) == 0, "the stream does not end: %s", strerror(errno));
	return NULL;
}

/* The peer gets the end of a stream at once, although the library may keep a closed stream for a while. */
static const char *ends_at_once(size_t arg)
{
	struct tcp_info info = { 0 };
	socklen_t len = sizeof info;
	int ended = 0;

	(void)arg;
	for (int i = 0; i < 20; i++) {
		struct pair p;

		TRY(connected(&p));
		ENSURE(!close(p.b), "close: %s", strerror(errno));
		ENSURE(!getsockopt(p.a, IPPROTO_TCP, TCP_INFO, &info, &len), "TCP_INFO: %s", strerror(errno));
		ended += info.tcpi_state == CLOSE_WAIT;
		ENSURE(!close(p.a), "close: %s", strerror(errno));
	}
	/* On a busy machine some FINs may arrive later. */
	ENSURE(ended >= 10, "%d of 20 streams end at once", ended);
	return NULL;
}

/* A set has two descriptors. Members are added by either one, and the first one is closed. */
static const char *copied_set(size_t arg)
{
	static char block[60000];
	struct pair p;
	size_t total = 0;
	ssize_t n;
	int set, copy;

	(void)arg;
	TRY(connected(&p));
	TRY(nonblocking(p.a));
	TRY(new_set(&set));
	copy = fcntl(set, F_DUPFD_CLOEXEC, 3);
	ENSURE(copy >= 0, "F_DUPFD_CLOEXEC: %s", strerror(errno));
	keep_fd(copy);
	TRY(add(copy, p.a, EPOLLOUT | EPOLLET, 1));
	TRY(add(set, p.b, EPOLLIN, 2));
	TRY(reports(set, EPOLLOUT, 1));
	while ((n = write(p.a, block, sizeof block)) > 0)
		total += (size_t)n;
	TRY(reports(set, EPOLLIN, 2));
	ENSURE(!close(set), "close: %s", strerror(errno));
	TRY(take_all(p.b, total));
	TRY(reports(copy, EPOLLOUT, 1));
	TRY(drop(copy, p.a));
	TRY(text(p.a, "a"));
	TRY(reports(copy, EPOLLIN, 2));
	TRY(takes(p.b, "a"));
	return is_quiet(copy);
}

enum { LIMIT, URGENT };

/* An edge-triggered set reports room, or an urgent byte, although the peer has sent data before that the program does not read. */
static const char *event_behind_data(size_t which)
{
	static char block[60000];
	struct pair p;
	struct epoll_event e = { .events = 0 };
	uint32_t wanted = which == URGENT ? EPOLLPRI : EPOLLOUT;
	size_t total = 0;
	ssize_t n;
	int set;

	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(nonblocking(p.a));
	TRY(add(set, p.a, wanted | EPOLLET, 1));
	if (which == LIMIT)
		while ((n = write(p.a, block, sizeof block)) > 0)
			total += (size_t)n;
	while (epoll_wait(set, &e, 1, SHORT_MS) == 1)
		;
	if (which == LIMIT) {
		ENSURE(write(p.b, block, sizeof block) == sizeof block, "write: %s", strerror(errno));
		TRY(take_all(p.b, total));
	} else {
		ENSURE(send(p.b, block, sizeof block, MSG_OOB) == sizeof block, "send: %s", strerror(errno));
	}
	ENSURE(epoll_wait(set, &e, 1, LONG_MS) == 1 && e.events == wanted, "no event of %#x", wanted);
	return NULL;
}

/* An edge-triggered set reports room although the peer's permission to send has arrived before the writer needs it, behind unread data. */
static const char *room_behind_unread_data_before(size_t arg)
{
	static char block[30000], unread[100000];
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	/* The windows of both ends grow, because both read what they get. */
	for (int i = 0; i < 128; i++) {
		int from = i % 2 ? p.a : p.b, to = i % 2 ? p.b : p.a;

		ENSURE(write(from, block, 8000) == 8000, "write: %s", strerror(errno));
		TRY(take_all(to, 8000));
	}
	TRY(nonblocking(p.a));
	for (int pieces = 0; pieces < 16; pieces++) {
		size_t total;
		int set;

		TRY(new_set(&set));
		TRY(add(set, p.a, EPOLLIN | EPOLLOUT | EPOLLET, 1));
		TRY(reports(set, EPOLLOUT, 1));
		ENSURE(write(p.b, unread, sizeof unread) == sizeof unread, "write: %s", strerror(errno));
		for (int i = 0; i < pieces; i++) {
			ENSURE(write(p.a, block, sizeof block) == sizeof block, "write: %s", strerror(errno));
			TRY(take_all(p.b, sizeof block));
		}
		while (epoll_wait(set, &(struct epoll_event){ 0 }, 1, SHORT_MS) == 1)
			;
		TRY(fill(p.a, &total));
		TRY(take_all(p.b, total));
		TRY(reports(set, EPOLLIN | EPOLLOUT, 1));
		TRY(take_all(p.a, sizeof unread));
		close(set);
	}
	return NULL;
}

static bool leaks_are_unknown;

/*
 * LeakSanitizer calls this at exit, and looks for leaks only if the result is 0. In the child of a fork it does not know the stacks of the
 * parent's other threads, so their memory seems to have leaked.
 */
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void)
{
	return leaks_are_unknown;
}

enum { CLOSED_AT_ONCE, CLOSED_BY_EXIT, CLOSED_AFTER_ADDED };

/* The end that accepts closes the connection, or ends, before it has read or written. The other end finds the end of the data. */
static const char *closed_before_use(size_t how)
{
	struct epoll_event e;
	struct sockaddr_in at;
	int listener, set, a, b, status;
	pid_t child;
	char c;

	TRY(listens(&listener, &at, 0, 0));
	TRY(new_set(&set));
	a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(a >= 0, "socket: %s", strerror(errno));
	keep_fd(a);
	ENSURE(!connect(a, (struct sockaddr *)&at, sizeof at), "connect: %s", strerror(errno));
	TRY(add(set, a, EPOLLIN | EPOLLET, 1));
	if (how == CLOSED_BY_EXIT) {
		fflush(stdout);
		child = fork();
		ENSURE(child >= 0, "fork: %s", strerror(errno));
		if (!child) {
			b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
			leaks_are_unknown = true;
			exit(b < 0);
		}
		ENSURE(waitpid(child, &status, 0) == child && !status, "the child fails: status %#x", (unsigned int)status);
	} else {
		b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		ENSURE(b >= 0, "accept4: %s", strerror(errno));
		if (how == CLOSED_AFTER_ADDED)
			TRY(add(set, b, EPOLLIN | EPOLLOUT | EPOLLET, 2));
		ENSURE(!close(b), "close: %s", strerror(errno));
	}
	TRY(has_ended(a));
	ENSURE(epoll_wait(set, &e, 1, LONG_MS) == 1, "no event");
	ENSURE(e.events == EPOLLIN && e.data.u64 == 1, "events %#x", e.events);
	ENSURE(read(a, &c, 1) == 0, "the stream does not end: %s", strerror(errno));
	return NULL;
}

/* A set is a member of another set, and poll and select wait for the events of a set. */
static const char *nested(size_t arg)
{
	struct timeval none = { 0, 0 };
	struct pollfd poll_set;
	struct pair p;
	int inner, outer;
	fd_set fds;

	(void)arg;
	TRY(connected(&p));
	TRY(new_set(&inner));
	TRY(new_set(&outer));
	TRY(add(inner, p.b, EPOLLIN, 1));
	TRY(add(outer, inner, EPOLLIN, 2));
	poll_set = (struct pollfd){ .fd = inner, .events = POLLIN };
	TRY(is_quiet(outer));
	ENSURE(poll(&poll_set, 1, 0) == 0, "poll of a set without events returns %#x", (unsigned int)poll_set.revents);
	TRY(text(p.a, "ab"));
	TRY(reports(outer, EPOLLIN, 2));
	TRY(reports(inner, EPOLLIN, 1));
	TRY(reports(outer, EPOLLIN, 2));
	ENSURE(poll(&poll_set, 1, LONG_MS) == 1 && poll_set.revents == POLLIN, "poll does not report the event of a set");
	FD_ZERO(&fds);
	FD_SET(inner, &fds);
	ENSURE(select(inner + 1, &fds, NULL, NULL, &none) == 1 && FD_ISSET(inner, &fds),
	       "select does not report the event of a set");
	TRY(takes(p.b, "ab"));
	TRY(is_quiet(inner));
	return is_quiet(outer);
}

static void *write_later(void *arg)
{
	sleep_ms(SHORT_MS);
	return (void *)(intptr_t)write(*(int *)arg, "x", 1);
}

/* A thread that waits in a set is woken by data that another thread sends. */
static const char *woken(size_t arg)
{
	pthread_t thread;
	struct pair p;
	int set;

	(void)arg;
	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(add(set, p.b, EPOLLIN, 1));
	for (int i = 0; i < 10; i++) {
		const char *error;

		ENSURE(!pthread_create(&thread, NULL, write_later, &p.a), "pthread_create");
		error = reports(set, EPOLLIN, 1);
		pthread_join(thread, NULL);
		TRY(error);
		TRY(takes(p.b, "x"));
	}
	return is_quiet(set);
}

/* ---------------------------------------------------------------- poll and select */

static const char *polls(size_t arg)
{
	struct pollfd fds[2];
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	fds[0] = (struct pollfd){ .fd = p.b, .events = POLLIN };
	fds[1] = (struct pollfd){ .fd = p.a, .events = POLLOUT };
	ENSURE(poll(fds, 2, 0) == 1 && !fds[0].revents && fds[1].revents == POLLOUT,
	       "poll reports %#x and %#x", (unsigned int)fds[0].revents, (unsigned int)fds[1].revents);
	TRY(text(p.a, "a"));
	ENSURE(poll(fds, 1, LONG_MS) == 1 && fds[0].revents == POLLIN, "poll reports %#x", (unsigned int)fds[0].revents);
	TRY(takes(p.b, "a"));
	ENSURE(!shutdown(p.a, SHUT_WR), "shutdown: %s", strerror(errno));
	fds[0].events = POLLIN | POLLRDHUP;
	ENSURE(poll(fds, 1, LONG_MS) == 1 && fds[0].revents == (POLLIN | POLLRDHUP), "poll reports %#x at the end of the stream",
	       (unsigned int)fds[0].revents);
	ENSURE(!shutdown(p.b, SHUT_WR), "shutdown: %s", strerror(errno));
	ENSURE(poll(fds, 1, LONG_MS) == 1 && fds[0].revents == (POLLIN | POLLRDHUP | POLLHUP),
	       "poll reports %#x when both ends have ended the stream", (unsigned int)fds[0].revents);
	fds[0].fd = -1;
	ENSURE(poll(fds, 1, 0) == 0, "poll reports an event of a negative number");
	return NULL;
}

static const char *selects(size_t arg)
{
	struct timeval t = { 0, SHORT_MS * 1000 };
	fd_set r, w;
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	FD_ZERO(&r);
	FD_SET(p.b, &r);
	ENSURE(select(p.b + 1, &r, NULL, NULL, &t) == 0 && !FD_ISSET(p.b, &r), "select reports data that was not sent");
	TRY(text(p.a, "a"));
	FD_SET(p.b, &r);
	FD_ZERO(&w);
	FD_SET(p.b, &w);
	t.tv_sec = LONG_MS / 1000;
	ENSURE(select(p.b + 1, &r, NULL, NULL, &t) == 1 && FD_ISSET(p.b, &r), "select does not report the data");
	ENSURE(select(p.b + 1, &r, &w, NULL, &t) == 2 && FD_ISSET(p.b, &w), "select does not report data and room");
	return NULL;
}

/* Invalid times are refused. */
static const char *refuses_times(size_t arg)
{
	static const struct timespec bad[] = { { -1, 0 }, { 0, -1 }, { 0, 1000000000 } };
	struct timeval second = { 0, 1000000 }, negative[] = { { -1, 0 }, { 0, -1 } };
	struct pollfd fd;
	struct pair p;
	fd_set r;

	(void)arg;
	TRY(connected(&p));
	TRY(text(p.a, "a")); /* so that a call that accepts the time does not wait */
	for (size_t i = 0; i < COUNT(bad); i++) {
		fd = (struct pollfd){ .fd = p.b, .events = POLLIN };
		ENSURE(ppoll(&fd, 1, &bad[i], NULL) == -1 && errno == EINVAL, "ppoll accepts time %zu", i);
		FD_ZERO(&r);
		FD_SET(p.b, &r);
		ENSURE(pselect(p.b + 1, &r, NULL, NULL, &bad[i], NULL) == -1 && errno == EINVAL, "pselect accepts time %zu", i);
		ENSURE(FD_ISSET(p.b, &r), "pselect changes the set");
	}
	for (size_t i = 0; i < COUNT(negative); i++)
		ENSURE(select(p.b + 1, &r, NULL, NULL, &negative[i]) == -1 && errno == EINVAL, "select accepts time %zu", i);
	ENSURE(select(p.b + 1, &r, NULL, NULL, &second) == 1, "select refuses a million microseconds: %s", strerror(errno));
	return NULL;
}

/* ---------------------------------------------------------------- reads and writes */

static const char *reads(size_t arg)
{
	char b[8] = "", c[8] = "";
	struct iovec parts[2] = { { b, 2 }, { c, 6 } };
	struct pair p;
	int n;

	(void)arg;
	TRY(connected(&p));
	TRY(text(p.a, "abcdef"));
	ENSURE(recv(p.b, b, 2, MSG_PEEK) == 2 && !memcmp(b, "ab", 2), "MSG_PEEK does not read the two bytes");
	ENSURE(!ioctl(p.b, FIONREAD, &n) && n == 6, "FIONREAD returns %d", n);
	ENSURE(readv(p.b, parts, 2) == 6 && !memcmp(b, "ab", 2) && !memcmp(c, "cdef", 4), "readv reads other bytes than were sent");
	ENSURE(recv(p.b, b, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN, "MSG_DONTWAIT without data: %s", strerror(errno));
	TRY(text(p.a, "xyz"));
	ENSURE(recv(p.b, b, 2, MSG_TRUNC) == 2, "MSG_TRUNC does not return 2"); /* TCP discards the bytes */
	TRY(takes(p.b, "z"));
	ENSURE(read(p.b, b, 0) == 0, "a read of 0 bytes does not return 0");
	ENSURE(write(p.b, b, 0) == 0, "a write of 0 bytes does not return 0");
	return NULL;
}

static const char *times_out(size_t arg)
{
	struct timeval t = { 0, SHORT_MS * 1000 };
	uint64_t start = now_ms();
	struct pair p;
	char c;

	(void)arg;
	TRY(connected(&p));
	ENSURE(!setsockopt(p.b, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t), "SO_RCVTIMEO: %s", strerror(errno));
	start = now_ms();
	ENSURE(read(p.b, &c, 1) == -1 && errno == EAGAIN, "read: %s", strerror(errno));
	ENSURE(now_ms() - start >= SHORT_MS - 5, "the read ends after %llu ms", (unsigned long long)(now_ms() - start));
	return NULL;
}

static const char *half_closed(size_t arg)
{
	struct pair p;
	char c;

	(void)arg;
	TRY(connected(&p));
	TRY(text(p.a, "last"));
	ENSURE(!shutdown(p.a, SHUT_WR), "shutdown: %s", strerror(errno));
	ENSURE(write(p.a, "x", 1) == -1 && errno == EPIPE, "write after SHUT_WR: %s", strerror(errno));
	TRY(takes(p.b, "last"));
	ENSURE(read(p.b, &c, 1) == 0 && read(p.b, &c, 1) == 0, "the stream does not end after the data");
	TRY(text(p.b, "reply"));
	return takes(p.a, "reply");
}

/* After one direction has ended, the other direction can carry any amount of data. */
static const char *half_closed_reply(size_t arg)
{
	struct timeval limit = { .tv_sec = LONG_MS / 1000 };
	struct reader r = { .total = 4 << 20 };
	static char piece[1 << 16];
	const char *error = NULL;
	pthread_t thread;
	struct pair p;
	char c;

	(void)arg;
	TRY(connected(&p));
	ENSURE(!setsockopt(p.b, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit), "SO_SNDTIMEO: %s", strerror(errno));
	ENSURE(!setsockopt(p.a, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), "SO_RCVTIMEO: %s", strerror(errno));
	ENSURE(!shutdown(p.a, SHUT_WR), "shutdown: %s", strerror(errno));
	ENSURE(read(p.b, &c, 1) == 0, "the stream does not end");
	r.fd = p.a;
	ENSURE(!pthread_create(&thread, NULL, read_later, &r), "pthread_create");
	for (size_t sent = 0; sent < r.total && !error; sent += sizeof piece)
		if (write(p.b, piece, sizeof piece) != sizeof piece)
			error = "a write after the peer's shutdown blocks";
	pthread_join(thread, NULL);
	TRY(error);
	return r.error;
}

/*
 * If poll reports a socket as writable, a write of the usual length does not block, even on a blocking socket.
 * Otherwise programs with one thread (socat) would wait for a peer that waits for them.
 */
static const char *writable_does_not_block(size_t arg)
{
	struct timeval limit = { .tv_sec = 2 };
	static char piece[8192];
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	ENSURE(!setsockopt(p.a, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit), "SO_SNDTIMEO: %s", strerror(errno));
	for (int turn = 0; poll(&(struct pollfd){ .fd = p.a, .events = POLLOUT }, 1, SHORT_MS) == 1; turn++) {
		ENSURE(turn < 10000, "80 MB are accepted without a reader");
		ENSURE(write(p.a, piece, sizeof piece) == sizeof piece, "write %d waits: %s", turn, strerror(errno));
	}
	return NULL;
}

/* A thread that moves a megabyte in pieces of many lengths. The test moves data in both directions at once. */
struct mover {
	int fd;
	uint32_t seed;
	const char *error;
};

#define MOVED (1u << 20)

static void *send_pieces(void *arg)
{
	struct mover *m = arg;
	static const size_t pieces[] = { 1, 7, 4096, 100000, 3, 65535 };
	size_t sent = 0;

	for (size_t i = 0; sent < MOVED; i++) {
		size_t want = pieces[i % COUNT(pieces)];
		unsigned char block[100000];
		ssize_t n;

		want = want < MOVED - sent ? want : MOVED - sent;
		for (size_t k = 0; k < want; k++)
			block[k] = (unsigned char)((sent + k) * 31 + m->seed);
		n = write(m->fd, block, want);
		if (n <= 0) {
			m->error = "a write fails";
			return NULL;
		}
		sent += (size_t)n;
	}
	return NULL;
}

static const char *receive_pieces(int fd, uint32_t seed)
{
	size_t got = 0;

	while (got < MOVED) {
		unsigned char block[30011];
		ssize_t n = read(fd, block, sizeof block);

		ENSURE(n > 0, "read: %s", n ? strerror(errno) : "end");
		for (ssize_t k = 0; k < n; k++)
			ENSURE(block[k] == (unsigned char)((got + (size_t)k) * 31 + seed),
			       "the byte at offset %zu is wrong", got + (size_t)k);
		got += (size_t)n;
	}
	return NULL;
}

static void *receive_other(void *arg)
{
	struct mover *m = arg;

	m->error = receive_pieces(m->fd, m->seed);
	return NULL;
}

static const char *both_ways(size_t arg)
{
	struct mover from_a, from_b, at_b;
	pthread_t threads[3];
	const char *error;
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	from_a = (struct mover){ .fd = p.a, .seed = 1 };
	from_b = (struct mover){ .fd = p.b, .seed = 2 };
	at_b = (struct mover){ .fd = p.b, .seed = 1 };
	ENSURE(!pthread_create(&threads[0], NULL, send_pieces, &from_a), "pthread_create");
	ENSURE(!pthread_create(&threads[1], NULL, send_pieces, &from_b), "pthread_create");
	ENSURE(!pthread_create(&threads[2], NULL, receive_other, &at_b), "pthread_create");
	error = receive_pieces(p.a, 2);
	for (size_t i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	TRY(error);
	TRY(from_a.error);
	TRY(from_b.error);
	return at_b.error;
}

static unsigned char byte_at(size_t at)
{
	return (unsigned char)(at * 31 + at / 251);
}

static const char *same_bytes(const unsigned char *bytes, ssize_t n, size_t at)
{
	ENSURE(n > 0, "%s", n ? strerror(errno) : "end");
	for (ssize_t k = 0; k < n; k++)
		ENSURE(bytes[k] == byte_at(at + (size_t)k), "the byte at offset %zu is wrong", at + (size_t)k);
	return NULL;
}

/* Writes of any length, and reads of any length with and without MSG_PEEK, in any order. Then the child of a fork reads the rest. */
static const char *mixed_reads(size_t arg)
{
	static unsigned char block[60000];
	size_t sent = 0, got = 0;
	uint32_t state = 1;
	struct pair p;
	int status;
	pid_t child;

	(void)arg;
	TRY(connected(&p));
	TRY(nonblocking(p.a));
	for (int step = 0; step < 4000; step++) {
		size_t wanted;
		ssize_t n;

		state = state * 1664525 + 1013904223;
		/* Half of the lengths are at most 600 bytes. */
		wanted = 1 + (state >> 8) % (state & 128 ? 600 : sizeof block);
		if (state >> 31) {
			for (size_t k = 0; k < wanted; k++)
				block[k] = byte_at(sent + k);
			n = write(p.a, block, wanted);
			ENSURE(n > 0 || errno == EAGAIN, "write: %s", strerror(errno));
			sent += n > 0 ? (size_t)n : 0;
		} else if (sent > got) {
			int peek = (state >> 30) & 1 ? MSG_PEEK : 0;

			n = recv(p.b, block, wanted, peek);
			TRY(same_bytes(block, n, got));
			got += peek ? 0 : (size_t)n;
		}
	}
	ENSURE(sent > 1000000, "only %zu bytes were sent", sent);
	while (sent == got) {
		block[0] = byte_at(sent);
		ENSURE(write(p.a, block, 1) == 1, "write: %s", strerror(errno));
		sent++;
	}
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		while (got < sent) {
			ssize_t n = read(p.b, block, 1000);

			if (same_bytes(block, n, got))
				_exit(1);
			got += (size_t)n;
		}
		_exit(0);
	}
	ENSURE(waitpid(child, &status, 0) == child, "waitpid: %s", strerror(errno));
	ENSURE(!status, "the child does not read the rest: status %#x", status);
	return NULL;
}

/* Fewer bytes than SO_RCVLOWAT do not make a socket readable. */
static const char *low_water(size_t arg)
{
	struct sockaddr_in at;
	int listener, a, b;
	char block[100] = "";

	(void)arg;
	TRY(listens(&listener, &at, SO_RCVLOWAT, 100));
	a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	keep_fd(a);
	ENSURE(!connect(a, (struct sockaddr *)&at, sizeof at), "connect: %s", strerror(errno));
	b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(b >= 0, "accept4: %s", strerror(errno));
	keep_fd(b);
	ENSURE(write(a, block, 99) == 99, "write: %s", strerror(errno));
	ENSURE(!poll(&(struct pollfd){ .fd = b, .events = POLLIN }, 1, SHORT_MS), "99 bytes make the socket readable");
	ENSURE(write(a, block, 1) == 1, "write: %s", strerror(errno));
	ENSURE(poll(&(struct pollfd){ .fd = b, .events = POLLIN }, 1, LONG_MS) == 1, "100 bytes do not make the socket readable");
	return NULL;
}

/* Of the bytes of a call with MSG_OOB only the last one is urgent. */
static const char *urgent(size_t arg)
{
	char bytes[8] = "";
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	ENSURE(send(p.a, "abc", 3, MSG_OOB) == 3, "send: %s", strerror(errno));
	ENSURE(poll(&(struct pollfd){ .fd = p.b, .events = POLLPRI }, 1, LONG_MS) == 1, "poll");
	ENSURE(recv(p.b, bytes, sizeof bytes, MSG_OOB) == 1 && bytes[0] == 'c', "the urgent byte is '%c'", bytes[0]);
	ENSURE(read(p.b, bytes, sizeof bytes) == 2 && !memcmp(bytes, "ab", 2), "'%.2s' is before the urgent byte", bytes);
	return NULL;
}

/* Waits until an urgent byte has arrived. */
static const char *has_urgent(int fd)
{
	ENSURE(poll(&(struct pollfd){ .fd = fd, .events = POLLPRI }, 1, LONG_MS) == 1, "no urgent byte arrives");
	return NULL;
}

enum { SKIPPED_BYTE, INLINE };

/* A read ends before the urgent byte, and the next one skips it, or begins with it if SO_OOBINLINE is set. */
static const char *urgent_mark(size_t how)
{
	char bytes[16] = "";
	struct pollfd ready = { .events = POLLIN | POLLPRI };
	struct timeval none = { 0 };
	struct pair p;
	fd_set reads, urgents;
	int waiting, set;
	ssize_t n;

	TRY(connected(&p));
	TRY(new_set(&set));
	if (how == INLINE)
		ENSURE(!setsockopt(p.b, SOL_SOCKET, SO_OOBINLINE, &(int){ 1 }, sizeof(int)), "SO_OOBINLINE: %s", strerror(errno));
	ENSURE(sockatmark(p.b) == 0, "there is a mark before the urgent byte was sent");
	ENSURE(recv(p.b, bytes, 1, MSG_OOB | MSG_DONTWAIT) < 0 && errno == EINVAL, "MSG_OOB without an urgent byte: %s", strerror(errno));
	TRY(add(set, p.b, EPOLLPRI | EPOLLET, 1));
	TRY(text(p.a, "before"));
	ENSURE(send(p.a, "!", 1, MSG_OOB) == 1, "send: %s", strerror(errno));
	TRY(text(p.a, "behind"));
	TRY(has_urgent(p.b));
	TRY(reports(set, EPOLLPRI, 1));
	TRY(is_quiet(set));
	FD_ZERO(&reads);
	FD_ZERO(&urgents);
	FD_SET(p.b, &reads);
	FD_SET(p.b, &urgents);
	ENSURE(select(p.b + 1, &reads, NULL, &urgents, &none) == 2 && FD_ISSET(p.b, &urgents), "select does not report the urgent byte");
	/* All has arrived. */
	for (int i = 0; i < 100; i++) {
		ENSURE(!ioctl(p.b, FIONREAD, &waiting), "FIONREAD: %s", strerror(errno));
		if (waiting == (how == INLINE ? 13 : 6))
			break;
		sleep_ms(1);
	}
	ENSURE(waiting == (how == INLINE ? 13 : 6), "FIONREAD: %d bytes", waiting);
	ENSURE(recv(p.b, bytes, sizeof bytes, MSG_PEEK) == 6, "a read with MSG_PEEK does not end before the urgent byte");
	n = recv(p.b, bytes, 3, 0);
	ENSURE(n == 3 && sockatmark(p.b) == 0, "a mark is reported in the middle of the data before it");
	n = recv(p.b, bytes, sizeof bytes, MSG_WAITALL);
	ENSURE(n == 3 && !memcmp(bytes, "ore", 3), "a read returns %zd bytes before the mark", n);
	ENSURE(sockatmark(p.b) == 1, "sockatmark does not report the mark");
	ENSURE(!ioctl(p.b, SIOCATMARK, &waiting) && waiting == 1, "SIOCATMARK does not report the mark");
	if (how == INLINE) {
		ENSURE(recv(p.b, bytes, 1, MSG_OOB) < 0 && errno == EINVAL, "MSG_OOB with SO_OOBINLINE: %s", strerror(errno));
	} else {
		ENSURE(recv(p.b, bytes, sizeof bytes, MSG_OOB | MSG_PEEK) == 1 && bytes[0] == '!', "MSG_OOB and MSG_PEEK: %s", strerror(errno));
		ENSURE(recv(p.b, bytes, sizeof bytes, MSG_OOB) == 1 && bytes[0] == '!', "MSG_OOB: %s", strerror(errno));
		ENSURE(recv(p.b, bytes, sizeof bytes, MSG_OOB) < 0 && errno == EINVAL, "the urgent byte can be read twice");
		ready.fd = p.b;
		ENSURE(poll(&ready, 1, 0) == 1 && ready.revents == POLLIN, "events %#x after the urgent byte was read", ready.revents);
		ENSURE(sockatmark(p.b) == 1, "sockatmark does not report the mark after the urgent byte was read");
	}
	n = recv(p.b, bytes, sizeof bytes, MSG_PEEK);
	TRY(takes(p.b, how == INLINE ? "!behind" : "behind"));
	ENSURE(n == (how == INLINE ? 7 : 6), "MSG_PEEK returns %zd bytes behind the mark", n);
	ENSURE(sockatmark(p.b) == 0, "the mark stays");
	/* An urgent byte that is passed without MSG_OOB is lost. */
	ENSURE(send(p.a, "ab?", 3, MSG_OOB) == 3, "send: %s", strerror(errno));
	TRY(text(p.a, "c"));
	TRY(has_urgent(p.b));
	TRY(takes(p.b, "ab"));
	TRY(takes(p.b, how == INLINE ? "?c" : "c"));
	ENSURE(recv(p.b, bytes, 1, MSG_OOB | MSG_DONTWAIT) < 0 && errno == EINVAL, "a passed urgent byte can be read");
	ready = (struct pollfd){ .fd = p.b, .events = POLLIN | POLLPRI };
	ENSURE(!poll(&ready, 1, 0), "events %#x after all was read", ready.revents);
	/* Of two urgent bytes the first one becomes an ordinary one. */
	ENSURE(send(p.a, "x1", 2, MSG_OOB) == 2 && send(p.a, "y2", 2, MSG_OOB) == 2, "send: %s", strerror(errno));
	TRY(text(p.a, "z"));
	for (int i = 0; i < 1000 && (ioctl(p.b, FIONREAD, &waiting), waiting != (how == INLINE ? 5 : 3)); i++)
		sleep_ms(1);
	TRY(takes(p.b, "x1y"));
	ENSURE(sockatmark(p.b) == 1, "sockatmark does not report the second mark");
	return takes(p.b, how == INLINE ? "2z" : "z");
}

/* An urgent byte alone is not readable data. A blocked read continues behind it. */
static const char *urgent_alone(size_t arg)
{
	struct pollfd ready = { .events = POLLIN | POLLPRI };
	char byte = 0;
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	ready.fd = p.b;
	ENSURE(send(p.a, "!", 1, MSG_OOB) == 1, "send: %s", strerror(errno));
	ENSURE(poll(&ready, 1, LONG_MS) == 1 && ready.revents == POLLPRI, "events %#x", ready.revents);
	ENSURE(sockatmark(p.b) == 1, "sockatmark does not report the mark");
	ENSURE(recv(p.b, &byte, 1, MSG_OOB) == 1 && byte == '!', "MSG_OOB: %s", strerror(errno));
	ENSURE(!poll(&ready, 1, 0), "events %#x", ready.revents);
	TRY(text(p.a, "data"));
	TRY(takes(p.b, "data"));
	ENSURE(!shutdown(p.a, SHUT_WR), "shutdown: %s", strerror(errno));
	ENSURE(read(p.b, &byte, 1) == 0, "the end does not follow");
	return NULL;
}

/* The urgent byte is sent before the other end has used the connection. */
static const char *urgent_at_once(size_t refused)
{
	char bytes[16] = "";
	struct pair p;
	FILE *f;

	TRY(accepted(&p));
	ENSURE(send(p.a, "abc", 3, MSG_OOB) == 3, "send: %s", strerror(errno));
	ENSURE(send(p.a, "def", 3, 0) == 3, "send: %s", strerror(errno));
	if (refused) {
		/* The other end does not use the library. */
		f = fdopen(dup(p.b), "r");
		ENSURE(f, "fdopen: %s", strerror(errno));
		fclose(f);
	}
	ENSURE(poll(&(struct pollfd){ .fd = p.b, .events = POLLIN }, 1, LONG_MS) == 1, "nothing arrives");
	/* The first end sends the rest when it has got the answer. */
	poll(&(struct pollfd){ .fd = p.a, .events = POLLIN }, 1, SHORT_MS);
	TRY(has_urgent(p.b));
	ENSURE(read(p.b, bytes, sizeof bytes) == 2 && !memcmp(bytes, "ab", 2), "'%.2s' is before the urgent byte", bytes);
	ENSURE(sockatmark(p.b) == 1, "sockatmark does not report the mark");
	ENSURE(recv(p.b, bytes, sizeof bytes, MSG_OOB) == 1 && bytes[0] == 'c', "the urgent byte is '%c'", bytes[0]);
	return takes(p.b, "def");
}

/* SO_RCVLOWAT is set on an accepted connection from which nothing was read yet. */
static const char *low_water_later(size_t arg)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof at;
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), least = 100, a, b;
	struct timeval limit = { .tv_sec = 5 };
	char block[100] = "";
	uint64_t start;

	(void)arg;
	ENSURE(listener >= 0, "socket: %s", strerror(errno));
	keep_fd(listener);
	ENSURE(!bind(listener, (struct sockaddr *)&at, sizeof at) && !listen(listener, 4), "listen: %s", strerror(errno));
	ENSURE(!getsockname(listener, (struct sockaddr *)&at, &len), "getsockname: %s", strerror(errno));
	a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	keep_fd(a);
	ENSURE(!connect(a, (struct sockaddr *)&at, sizeof at), "connect: %s", strerror(errno));
	b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(b >= 0, "accept4: %s", strerror(errno));
	keep_fd(b);
	ENSURE(!setsockopt(b, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least), "SO_RCVLOWAT: %s", strerror(errno));
	ENSURE(!setsockopt(b, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), "SO_RCVTIMEO: %s", strerror(errno));
	ENSURE(write(a, block, 10) == 10, "write: %s", strerror(errno));
	ENSURE(!poll(&(struct pollfd){ .fd = b, .events = POLLIN }, 1, SHORT_MS), "10 bytes make the socket readable");
	start = now_ms();
	ENSURE(read(b, block, 10) == 10, "read: %s", strerror(errno));
	ENSURE(now_ms() - start < 2000, "the read of the bytes that are there waits for its time-out");
	ENSURE(write(b, block, 10) == 10, "write: %s", strerror(errno));
	ENSURE(read(a, block, 10) == 10, "the answer: %s", strerror(errno));
	return NULL;
}

struct share {
	int fd;
	size_t len;
	ssize_t got;
	const char *error;
};

static void *write_share(void *arg)
{
	static char block[1 << 18];
	struct share *share = arg;

	share->got = write(share->fd, block, share->len);
	return NULL;
}

static void *read_share(void *arg)
{
	static char bytes[2][1 << 16];
	struct share *share = arg;

	share->got = read(share->fd, bytes[share->len & 1], share->len & ~(size_t)1);
	return NULL;
}

static void *take_share(void *p)
{
	struct share *share = p;

	share->error = take_all(share->fd, share->len);
	return NULL;
}

/* Two threads each read half of what the peer writes in one call. */
static const char *two_readers(size_t half)
{
	static char block[10000];
	struct timeval limit = { .tv_sec = 5 };
	struct pair p;

	TRY(connected(&p));
	/* With `set memory 1`, these writes are enough for later long ones to pass through shared memory. */
	for (int i = 0; i < 4; i++) {
		ENSURE(write(p.a, block, sizeof block) == sizeof block, "write: %s", strerror(errno));
		TRY(take_all(p.b, sizeof block));
	}
	ENSURE(!setsockopt(p.b, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), "SO_RCVTIMEO: %s", strerror(errno));
	for (int round = 0; round < 20; round++) {
		struct share shares[2] = { { .fd = p.b, .len = half }, { .fd = p.b, .len = half | 1 } }, written = { .fd = p.a, .len = 2 * half };
		pthread_t threads[2], writer;
		ssize_t all;

		for (int i = 0; i < 2; i++)
			ENSURE(!pthread_create(&threads[i], NULL, read_share, &shares[i]), "pthread_create");
		sleep_ms(3);
		ENSURE(!pthread_create(&writer, NULL, write_share, &written), "pthread_create");
		for (int i = 0; i < 2; i++)
			pthread_join(threads[i], NULL);
		ENSURE(shares[0].got > 0 && shares[1].got > 0, "round %d: the reads return %zd and %zd", round, shares[0].got,
		       shares[1].got);
		all = shares[0].got + shares[1].got;
		if (all < (ssize_t)(2 * half))
			TRY(take_all(p.b, 2 * half - (size_t)all));
		pthread_join(writer, NULL);
		ENSURE(written.got == (ssize_t)(2 * half), "the write returns %zd", written.got);
	}
	return NULL;
}

static void *drain_all(void *arg)
{
	const struct share *share = arg;
	static char bytes[50000];
	size_t got = 0;

	sleep_ms(200);
	while (got < share->len) {
		ssize_t n = read(share->fd, bytes, sizeof bytes);

		if (n <= 0)
			break;
		got += (size_t)n;
		if (got % 7 == 0)
			sleep_ms(1);
	}
	return NULL;
}

/* Blocking writes of single bytes continue after the reader has paused, also with small buffers of the kernel. */
static const char *short_writes_block(size_t arg)
{
	struct timeval limit = { .tv_sec = 5 };
	struct share share = { .len = 60000 };
	int small = 20000;
	pthread_t thread;
	const char *error = NULL;
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	ENSURE(!setsockopt(p.a, SOL_SOCKET, SO_SNDBUF, &small, sizeof small), "SO_SNDBUF: %s", strerror(errno));
	ENSURE(!setsockopt(p.b, SOL_SOCKET, SO_RCVBUF, &small, sizeof small), "SO_RCVBUF: %s", strerror(errno));
	ENSURE(!setsockopt(p.a, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit), "SO_SNDTIMEO: %s", strerror(errno));
	ENSURE(!setsockopt(p.b, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), "SO_RCVTIMEO: %s", strerror(errno));
	share.fd = p.b;
	for (int round = 0; round < 4 && !error; round++) {
		ENSURE(!pthread_create(&thread, NULL, drain_all, &share), "pthread_create");
		for (size_t i = 0; i < share.len && !error; i++)
			if (write(p.a, "x", 1) != 1)
				error = "a write waits for ever";
		pthread_join(thread, NULL);
	}
	return error;
}

static const char *cork(int fd, int on)
{
	ENSURE(!setsockopt(fd, IPPROTO_TCP, TCP_CORK, &on, sizeof on), "TCP_CORK: %s", strerror(errno));
	return NULL;
}

/* Checks that exactly these bytes arrive together. */
static const char *arrive(int fd, const char *text)
{
	struct pollfd one = { .fd = fd, .events = POLLIN };
	char got[100];
	ssize_t n;

	ENSURE(poll(&one, 1, LONG_MS) == 1, "nothing arrives");
	n = recv(fd, got, sizeof got, MSG_DONTWAIT);
	ENSURE(n == (ssize_t)strlen(text) && !memcmp(got, text, (size_t)n), "%zd bytes arrive: %.*s", n, (int)(n < 0 ? 0 : n), got);
	return NULL;
}

static const char *nothing_arrives(int fd)
{
	ENSURE(poll(&(struct pollfd){ .fd = fd, .events = POLLIN }, 1, SHORT_MS) == 0, "corked bytes arrive");
	return NULL;
}

/* Corked bytes are sent together: when the cork is removed, with a write that has no MSG_MORE, when the stream ends, and after 200 ms. */
static const char *corked(size_t arg)
{
	static char block[100000];
	uint64_t began, shortest[2] = { UINT64_MAX, UINT64_MAX };
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	for (int round = 0; round < 3; round++) {
		TRY(cork(p.a, 1));
		ENSURE(write(p.a, "one ", 4) == 4 && write(p.a, "two", 3) == 3, "write: %s", strerror(errno));
		ENSURE(poll(&(struct pollfd){ .fd = p.a, .events = POLLOUT }, 1, 0) == 1, "a corked stream is not writable");
		TRY(nothing_arrives(p.b));
		began = now_ns();
		TRY(cork(p.a, 0));
		TRY(arrive(p.b, "one two"));
		shortest[0] = now_ns() - began < shortest[0] ? now_ns() - began : shortest[0];
		ENSURE(send(p.a, "three ", 6, MSG_MORE) == 6, "send: %s", strerror(errno));
		TRY(nothing_arrives(p.b));
		began = now_ns();
		ENSURE(send(p.a, "four", 4, 0) == 4, "send: %s", strerror(errno));
		TRY(arrive(p.b, "three four"));
		shortest[1] = now_ns() - began < shortest[1] ? now_ns() - began : shortest[1];
	}
	ENSURE(shortest[0] < 100000000 && shortest[1] < 100000000, "the bytes wait although nothing is corked any more");
	/* No write ends the message, so the bytes are sent after 200 ms. */
	ENSURE(send(p.a, "late", 4, MSG_MORE) == 4, "send: %s", strerror(errno));
	TRY(nothing_arrives(p.b));
	TRY(arrive(p.b, "late"));
	/* Long payload is not delayed, and stays behind what was corked. */
	TRY(cork(p.a, 1));
	memset(block, 'x', sizeof block);
	ENSURE(write(p.a, "head", 4) == 4 && write(p.a, block, 9000) == 9000, "write: %s", strerror(errno));
	ENSURE(read(p.b, block, 4) == 4 && !memcmp(block, "head", 4), "the bytes are in another order");
	TRY(cork(p.a, 0));
	TRY(take_all(p.b, 9000));
	/* The end of the stream comes behind corked bytes. */
	TRY(cork(p.a, 1));
	ENSURE(write(p.a, "last", 4) == 4, "write: %s", strerror(errno));
	ENSURE(!shutdown(p.a, SHUT_WR), "shutdown: %s", strerror(errno));
	TRY(arrive(p.b, "last"));
	ENSURE(read(p.b, block, 1) == 0, "the stream does not end");
	ENSURE(!setsockopt(p.b, IPPROTO_TCP, TCP_CORK, &(int){ 1 }, sizeof(int)), "TCP_CORK: %s", strerror(errno));
	ENSURE(write(p.b, "bye", 3) == 3 && !close(p.b), "write: %s", strerror(errno));
	TRY(arrive(p.a, "bye"));
	return NULL;
}

enum { PARENT_CLOSES, CHILD_ANSWERS, CHILD_READS, CHILD_WAITS };

/* A process forks with corked bytes, or after corked bytes were sent. Each byte arrives once, and both processes can use the stream. */
static const char *corked_fork(size_t how)
{
	struct pair p;
	int status;
	pid_t child;

	TRY(connected(&p));
	TRY(cork(p.a, 1));
	ENSURE(write(p.a, "head", 4) == 4, "write: %s", strerror(errno));
	if (how == CHILD_WAITS) {
		TRY(cork(p.a, 0));
		TRY(takes(p.b, "head"));
	}
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		char word[4] = "";
		bool ok = true;

		close(p.b);
		if (how == PARENT_CLOSES)
			sleep_ms(300);
		if (how == CHILD_ANSWERS)
			ok = write(p.a, "body", 4) == 4;
		if (how == CHILD_READS)
			ok = read(p.a, word, 4) == 4;
		/* The library's worker thread in the parent may look at the stream meanwhile. */
		if (how == CHILD_WAITS)
			sleep_ms(300);
		if (how == CHILD_WAITS)
			ok = write(p.a, "tail", 4) == 4;
		_exit(!ok);
	}
	if (how == PARENT_CLOSES)
		ENSURE(!close(p.a), "close: %s", strerror(errno));
	TRY(takes(p.b, how == CHILD_WAITS ? "tail" : "head"));
	if (how == CHILD_ANSWERS)
		TRY(takes(p.b, "body"));
	if (how == CHILD_READS)
		TRY(text(p.b, "word"));
	ENSURE(waitpid(child, &status, 0) == child && !status, "the child fails: status %#x", status);
	if (how == CHILD_ANSWERS) {
		TRY(cork(p.a, 0));
		TRY(nothing_arrives(p.b));
	}
	close(p.a);
	ENSURE(read(p.b, &status, 1) == 0, "the stream does not end: %s", strerror(errno));
	return NULL;
}

/* The number of connected TCP sockets of this process, without `fd`. */
static const char *other_connections(int fd, int *count)
{
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *entry;

	ENSURE(dir, "/proc/self/fd: %s", strerror(errno));
	for (*count = 0; (entry = readdir(dir));) {
		struct sockaddr_in peer;
		int other = atoi(entry->d_name);

		if (other > 2 && other != fd && other != dirfd(dir) &&
		    !getpeername(other, (struct sockaddr *)&peer, &(socklen_t){ sizeof peer }) && peer.sin_family == AF_INET)
			++*count;
	}
	closedir(dir);
	return NULL;
}

/* A process forks after it has closed a stream that its peer still has. The child has no copy of the connection. */
static const char *closed_before_fork(size_t arg)
{
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	TRY(text(p.a, "last"));
	TRY(takes(p.b, "last"));
	ENSURE(!close(p.a), "close: %s", strerror(errno));
	for (int i = 0; i < 10; i++) {
		int status, count = 0;
		pid_t child = fork();

		ENSURE(child >= 0, "fork: %s", strerror(errno));
		if (!child)
			_exit(other_connections(p.b, &count) ? 99 : count);
		ENSURE(waitpid(child, &status, 0) == child, "waitpid: %s", strerror(errno));
		ENSURE(!status, "the child has %d connections that the parent has closed", WEXITSTATUS(status));
		sleep_ms(1);
	}
	ENSURE(read(p.b, &(char){ 0 }, 1) == 0, "the stream does not end: %s", strerror(errno));
	return NULL;
}

enum { EXECV = 1, EXECL, EXECLP, EXECLE };

/* A process ends, or executes another program, with corked bytes. */
static const char *corked_end(size_t executes)
{
	struct pair p;
	int status;
	pid_t child;

	TRY(connected(&p));
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		close(p.b);
		if (write(p.a, "one ", 4) != 4 || send(p.a, "two", 3, MSG_MORE) != 3)
			_exit(1);
		if (executes == EXECV)
			execv("/bin/true", (char *[]){ "true", NULL });
		if (executes == EXECL)
			execl("/bin/true", "true", NULL);
		if (executes == EXECLP)
			execlp("true", "true", NULL);
		if (executes == EXECLE)
			execle("/bin/true", "true", NULL, environ);
		_exit(executes != 0);
	}
	close(p.a);
	ENSURE(waitpid(child, &status, 0) == child && !status, "the child fails: status %#x", status);
	TRY(takes(p.b, "one "));
	TRY(takes(p.b, "two"));
	ENSURE(read(p.b, &status, 1) == 0, "the stream does not end: %s", strerror(errno));
	return NULL;
}

/* The descriptor by which bytes were corked is closed, while another one is open. */
static const char *corked_copy(size_t arg)
{
	struct pair p;
	int copy;

	(void)arg;
	TRY(connected(&p));
	copy = dup(p.a);
	ENSURE(copy >= 0, "dup: %s", strerror(errno));
	keep_fd(copy);
	ENSURE(send(p.a, "word", 4, MSG_MORE) == 4, "send: %s", strerror(errno));
	ENSURE(!close(p.a), "close: %s", strerror(errno));
	TRY(takes(p.b, "word"));
	return NULL;
}

/* A program that only writes learns that its peer has ended. */
static const char *writes_to_the_dead(size_t arg)
{
	static char block[9000];
	struct pair p;
	pid_t child;

	(void)arg;
	TRY(connected(&p));
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		close(p.a);
		_exit(take_all(p.b, 20 * sizeof block) != NULL);
	}
	close(p.b);
	for (int i = 0; i < 20; i++)
		ENSURE(write(p.a, block, sizeof block) == (ssize_t)sizeof block, "write: %s", strerror(errno));
	ENSURE(waitpid(child, NULL, 0) == child, "waitpid: %s", strerror(errno));
	for (int i = 0; i < 100; i++) {
		if (write(p.a, block, i ? 100 : sizeof block) < 0) {
			ENSURE(errno == EPIPE || errno == ECONNRESET, "write: %s", strerror(errno));
			return NULL;
		}
		sleep_ms(10);
	}
	return "writes to a program that has ended succeed for a second";
}

static volatile sig_atomic_t signals;

static void count_signal(int number)
{
	(void)number;
	signals++;
}

/* Each write that fails with EPIPE raises SIGPIPE once, and no other write raises it. */
static const char *one_signal(size_t first)
{
	static char block[1 << 20];
	unsigned int broken = 0;
	struct pair p;
	pid_t child;

	TRY(connected(&p));
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		close(p.a);
		sleep_ms(50);
		_exit(read(p.b, block, 100) != 100);
	}
	close(p.b);
	signals = 0;
	signal(SIGPIPE, count_signal);
	for (int i = 0; i < 100 && broken < 3; i++) {
		ssize_t n = write(p.a, block, i ? 100 : first);

		broken += n < 0 && errno == EPIPE;
		ENSURE(n >= 0 || errno == EPIPE || errno == ECONNRESET, "write: %s", strerror(errno));
		ENSURE(signals == (int)broken, "%d signals for %u broken pipes", (int)signals, broken);
		sleep_ms(10);
	}
	signal(SIGPIPE, SIG_IGN);
	ENSURE(broken == 3, "only %u writes of a second find a broken pipe", broken);
	ENSURE(waitpid(child, NULL, 0) == child, "waitpid: %s", strerror(errno));
	return NULL;
}

enum { CLOSES = 1 << 20, RESETS = 1 << 21, SMALL = 1 << 22, LATE = 1 << 23, INHERITS = 1 << 24 };

/* Continues in a child, which then is the only process that has the connection. Returns false in the child. */
static bool inherits(int fd)
{
	pid_t child = fork();

	if (child) {
		close(fd);
		waitpid(child, NULL, 0);
		_exit(0);
	}
	sleep_ms(50);
	return false;
}

/* All data that the peer's process sent before it ended can be read. */
static const char *reads_from_the_dead(size_t how)
{
	size_t total = how & (CLOSES - 1);
	static char block[1 << 18];
	struct sockaddr_in at;
	struct pair p;
	pid_t child;
	size_t got = 0;
	int listener, waiting;
	ssize_t n;

	/* With small buffers the peer's process still has some of the last bytes when it ends. */
	TRY(listens(&listener, &at, how & SMALL ? SO_RCVBUF : 0, 1));
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		p.a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (how & SMALL)
			setsockopt(p.a, SOL_SOCKET, SO_SNDBUF, &(int){ 1 }, sizeof(int));
		if (connect(p.a, (struct sockaddr *)&at, sizeof at) || text(p.a, "hi") || takes(p.a, "ho") ||
		    (how & INHERITS && inherits(p.a)) || write(p.a, block, total) != (ssize_t)total)
			_exit(1);
		if (how & RESETS)
			setsockopt(p.a, SOL_SOCKET, SO_LINGER, &(struct linger){ 1, 0 }, sizeof(struct linger));
		if (how & (CLOSES | RESETS))
			close(p.a);
		_exit(0);
	}
	p.b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(p.b >= 0, "accept4: %s", strerror(errno));
	keep_fd(p.b);
	TRY(takes(p.b, "hi"));
	TRY(text(p.b, "ho"));
	/* A busy program may read more than a second after the peer's last write. */
	sleep_ms(how & LATE ? 1500 : 100);
	/* FIONREAD makes the library count these bytes. Reads of the lengths below then permit the peer twice to send more. */
	ENSURE(!ioctl(p.b, FIONREAD, &waiting), "FIONREAD: %s", strerror(errno));
	while ((n = read(p.b, block, got ? 4096 : 8190)) > 0) {
		got += (size_t)n;
		sleep_ms(1);
	}
	if (how & RESETS)
		ENSURE(n < 0 && errno == ECONNRESET, "after %zu bytes: %s", got, n ? strerror(errno) : "end");
	else
		ENSURE(n == 0, "after %zu bytes: %s", got, strerror(errno));
	ENSURE(got == total, "%zu of %zu bytes", got, total);
	ENSURE(waitpid(child, NULL, 0) == child, "waitpid: %s", strerror(errno));
	return NULL;
}

/* Calls ioctl on a stream in an endless loop: each call locks the stream for a short time, and in the pauses the stream is free. */
static void *asks(void *p)
{
	int waiting;

	for (;;) {
		for (int i = 0; i < 20; i++)
			ioctl(*(int *)p, FIONREAD, &waiting);
		usleep(1);
	}
	return NULL;
}

/* The last bytes of a process are sent although another of its threads uses the stream at the moment it ends. */
static const char *ends_while_used(size_t arg)
{
	pthread_t thread;
	struct sockaddr_in at;
	struct pair p;
	pid_t child;
	int listener;

	(void)arg;
	TRY(listens(&listener, &at, 0, 1));
	for (int i = 0; i < 100; i++) {
		child = fork();
		ENSURE(child >= 0, "fork: %s", strerror(errno));
		if (!child) {
			p.a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
			if (connect(p.a, (struct sockaddr *)&at, sizeof at) || text(p.a, "hi") || takes(p.a, "ho") || cork(p.a, 1) ||
			    pthread_create(&thread, NULL, asks, &p.a))
				_exit(1);
			usleep(100);
			_exit(text(p.a, "last") != NULL);
		}
		p.b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		ENSURE(p.b >= 0, "accept4: %s", strerror(errno));
		keep_fd(p.b);
		TRY(takes(p.b, "hi"));
		TRY(text(p.b, "ho"));
		TRY(takes(p.b, "last"));
		close(p.b);
		ENSURE(waitpid(child, NULL, 0) == child, "waitpid: %s", strerror(errno));
	}
	return NULL;
}

/*
 * This end reads while the kernel's buffer is full of bytes that the peer does not read. The peer learns nevertheless that it may send more.
 * With some values of `size` the last message fills the buffer exactly.
 */
static const char *read_with_full_buffer(size_t size)
{
	static char block[24000];
	struct share share = { .len = 24000 };
	struct sockaddr_in at;
	int listener, small = 1;
	pthread_t thread;
	size_t sent = 0;
	struct pair p;
	ssize_t n;

	TRY(listens(&listener, &at, SO_RCVBUF, small));
	p.a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	keep_fd(p.a);
	ENSURE(!setsockopt(p.a, SOL_SOCKET, SO_SNDBUF, &small, sizeof small), "SO_SNDBUF: %s", strerror(errno));
	ENSURE(!connect(p.a, (struct sockaddr *)&at, sizeof at), "connect: %s", strerror(errno));
	p.b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(p.b >= 0, "accept4: %s", strerror(errno));
	keep_fd(p.b);
	TRY(greet(&p));
	/* The peer's kernel acknowledges bytes after up to 40 ms. */
	for (int calm = 0; calm < 6; calm++) {
		while ((n = send(p.a, block, size, MSG_DONTWAIT)) > 0) {
			sent += (size_t)n;
			calm = -1;
		}
		ENSURE(errno == EAGAIN && sent < 15000, "%zu bytes were sent: %s", sent, strerror(errno));
		sleep_ms(10);
	}
	ENSURE(write(p.b, block, 12000) == 12000, "write: %s", strerror(errno));
	TRY(take_all(p.a, 12000));
	share.fd = p.a;
	ENSURE(!pthread_create(&thread, NULL, take_share, &share), "pthread_create");
	ENSURE(write(p.b, block, 24000) == 24000, "write: %s", strerror(errno));
	pthread_join(thread, NULL);
	TRY(share.error);
	TRY(take_all(p.b, sent));
	close(p.a);
	close(p.b);
	close(listener);
	return NULL;
}

static const char *reads_with_a_full_buffer(size_t arg)
{
	(void)arg;
	for (size_t size = 4; size < 50; size += 4)
		TRY(read_with_full_buffer(size));
	return NULL;
}

enum { BLOCKS, WAITS_FOR_ALL, POLLS, PEEKS, ASKS, LEVEL, EDGE, EDGE_SHORT, SIGNALLED };

struct burst {
	int fd;
	size_t len;
};

/* Writes in pieces of many lengths, with a pause now and then, in which the reader reads everything. */
static void *write_bursts(void *p)
{
	static unsigned char block[100000];
	struct burst *b = p;
	unsigned int seed = 1;

	for (size_t at = 0; at < b->len;) {
		size_t len = rand_r(&seed) % 3 ? 5000 + (size_t)rand_r(&seed) % 60000 : 1 + (size_t)rand_r(&seed) % 3000;

		len = len < b->len - at ? len : b->len - at;
		for (size_t i = 0; i < len; i++)
			block[i] = byte_at(at + i);
		for (size_t done = 0; done < len;) {
			ssize_t n = write(b->fd, block + done, len - done);

			if (n <= 0)
				return NULL;
			done += (size_t)n;
		}
		at += len;
		if (rand_r(&seed) % 16 == 0)
			usleep((useconds_t)rand_r(&seed) % 300);
	}
	return NULL;
}

/*
 * Waits for bytes in the way `how`. Returns the length of the next read: the number of bytes that are there if `how` tells it, at
 * most `most`, and otherwise `most`.
 */
static size_t wait_for_bytes(size_t how, int fd, int set, size_t most, const char **error)
{
	struct pollfd one = { .fd = fd, .events = POLLIN };
	struct timespec limit = { .tv_sec = 5 };
	struct epoll_event e;
	int there;
	sigset_t io;
	char some[3000];
	ssize_t n;

	if (how == BLOCKS || how == WAITS_FOR_ALL)
		return most;
	if (how == SIGNALLED) {
		sigemptyset(&io);
		sigaddset(&io, SIGIO);
		if (sigtimedwait(&io, NULL, &limit) != SIGIO)
			*error = "the reader gets no signal";
		return most;
	}
	if ((how >= LEVEL ? epoll_wait(set, &e, 1, LONG_MS) : poll(&one, 1, LONG_MS)) != 1)
		*error = "the reader is not woken";
	if (how == PEEKS) {
		n = recv(fd, some, sizeof some, MSG_PEEK);
		if (n <= 0)
			*error = "nothing to peek at";
		return (size_t)n < most ? (size_t)n : most;
	}
	if (how == ASKS) {
		if (ioctl(fd, FIONREAD, &there) || there <= 0)
			*error = "no bytes are there";
		return (size_t)there < most ? (size_t)there : most;
	}
	return most;
}

/* All bytes arrive in order, and each kind of wait ends when bytes arrive, however fast the peer writes. */
static const char *bursts(size_t how)
{
	static unsigned char block[70000];
	struct timeval limit = { .tv_sec = 5 };
	struct burst b = { .len = 24000000 };
	const char *error = NULL;
	unsigned int seed = 2;
	pthread_t thread;
	sigset_t io;
	int set;
	struct pair p;

	TRY(connected(&p));
	TRY(new_set(&set));
	ENSURE(!setsockopt(p.b, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), "SO_RCVTIMEO: %s", strerror(errno));
	if (how > WAITS_FOR_ALL)
		TRY(nonblocking(p.b));
	if (how == SIGNALLED) {
		sigemptyset(&io);
		sigaddset(&io, SIGIO);
		ENSURE(!pthread_sigmask(SIG_BLOCK, &io, NULL), "pthread_sigmask");
		ENSURE(!fcntl(p.b, F_SETOWN, getpid()) && !fcntl(p.b, F_SETFL, O_NONBLOCK | O_ASYNC), "fcntl: %s", strerror(errno));
		kill(getpid(), SIGIO); /* bytes may have arrived before */
	} else if (how >= LEVEL)
		ENSURE(!control(set, EPOLL_CTL_ADD, p.b, how == LEVEL ? EPOLLIN : EPOLLIN | EPOLLET, 1), "epoll_ctl: %s", strerror(errno));
	b.fd = p.a;
	ENSURE(!pthread_create(&thread, NULL, write_bursts, &b), "pthread_create");
	for (size_t at = 0; at < b.len && !error;) {
		size_t most = rand_r(&seed) % 4 ? 1 + (size_t)rand_r(&seed) % sizeof block : 1 + (size_t)rand_r(&seed) % 100;

		if (most > b.len - at)
			most = b.len - at;
		most = wait_for_bytes(how, p.b, set, most, &error);
		/* With edges and signals, the program reads until an error, or until it gets fewer bytes than it asked for. */
		for (bool again = true; again && !error && at < b.len;) {
			ssize_t n = recv(p.b, block, most, how == WAITS_FOR_ALL ? MSG_WAITALL : 0);

			again = how >= EDGE && (how == EDGE ? n > 0 : n == (ssize_t)most);
			if (n < 0 && errno == EAGAIN && how >= EDGE)
				break;
			if (n <= 0)
				error = n ? strerror(errno) : "the stream ends";
			if ((how == WAITS_FOR_ALL || how == PEEKS || how == ASKS) && n != (ssize_t)most)
				error = "fewer bytes than there are";
			for (ssize_t i = 0; i < n; i++, at++)
				if (block[i] != byte_at(at))
					error = "a wrong byte";
		}
	}
	if (error)
		shutdown(p.b, SHUT_RDWR);
	pthread_join(thread, NULL);
	return error;
}

/* A program that waits only for room is woken when the peer has read, even if the program itself has left earlier bytes unread. */
static const char *room_behind_data(size_t arg)
{
	static char block[1 << 16];
	size_t from_a, from_b;
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	for (int i = 0; i < 200; i++) {
		ENSURE(write(p.a, block, 8000) == 8000 && write(p.b, block, 8000) == 8000, "write: %s", strerror(errno));
		TRY(take_all(p.b, 8000));
		TRY(take_all(p.a, 8000));
	}
	TRY(nonblocking(p.a));
	TRY(nonblocking(p.b));
	TRY(fill(p.b, &from_b));
	TRY(fill(p.a, &from_a));
	/* The reads end in the middle of what the peer has written in one call, also on an upgraded connection. */
	ENSURE(read(p.a, block, 40000) == 40000 && read(p.a, block, 32) == 32, "read: %s", strerror(errno));
	ENSURE(!fcntl(p.b, F_SETFL, 0), "fcntl: %s", strerror(errno));
	TRY(take_all(p.b, from_a));
	ENSURE(poll(&(struct pollfd){ .fd = p.a, .events = POLLOUT }, 1, LONG_MS) == 1,
	       "the stream has no room after the peer has read everything");
	return NULL;
}

/* FIONREAD counts all bytes that have arrived, also those of a long message of which poll has seen only the beginning. */
static const char *available(size_t arg)
{
	static char piece[60000];
	int n = 0;
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	for (int i = 0; i < 50; i++) {
		ENSURE(write(p.a, piece, 8000) == 8000, "write: %s", strerror(errno));
		TRY(take_all(p.b, 8000));
	}
	ENSURE(write(p.a, piece, sizeof piece) == sizeof piece, "write: %s", strerror(errno));
	ENSURE(poll(&(struct pollfd){ .fd = p.b, .events = POLLIN }, 1, LONG_MS) == 1, "poll");
	for (uint64_t start = now_ms(); n != sizeof piece && now_ms() - start < LONG_MS; sleep_ms(1))
		ENSURE(!ioctl(p.b, FIONREAD, &n), "FIONREAD: %s", strerror(errno));
	ENSURE(n == sizeof piece, "FIONREAD returns %d", n);
	return take_all(p.b, sizeof piece);
}

/* SO_ERROR of a reset connection, with a buffer of `room` bytes: getsockopt writes only these bytes of the error, and none after them. */
static const char *short_error(size_t room)
{
	unsigned char value[sizeof(int)] = { 7, 7, 7, 7 };
	static const int error = ECONNRESET;
	struct linger reset = { 1, 0 };
	socklen_t len = (socklen_t)room;
	struct pair p;

	TRY(connected(&p));
	ENSURE(!setsockopt(p.b, SOL_SOCKET, SO_LINGER, &reset, sizeof reset), "SO_LINGER: %s", strerror(errno));
	ENSURE(!close(p.b), "close: %s", strerror(errno));
	ENSURE(poll(&(struct pollfd){ .fd = p.a, .events = POLLIN }, 1, LONG_MS) == 1, "poll does not report the reset");
	ENSURE(!getsockopt(p.a, SOL_SOCKET, SO_ERROR, value, &len), "SO_ERROR: %s", strerror(errno));
	ENSURE(len == room, "%u bytes of %zu", len, room);
	for (size_t i = 0; i < sizeof value; i++) {
		unsigned char wanted = i < room ? ((const unsigned char *)&error)[i] : 7;

		ENSURE(value[i] == wanted, "byte %zu of %zu is %u, and not %u", i, room, value[i], wanted);
	}
	return NULL;
}

/* ---------------------------------------------------------------- threads */

struct waiter {
	int fd;
	ssize_t n;
	char c;
};

static void *read_one(void *arg)
{
	struct waiter *w = arg;

	w->n = read(w->fd, &w->c, 1);
	return NULL;
}

/* A thread polls while another one is blocked in a read. The poll reports the bytes that the read leaves. */
static const char *read_and_polled(size_t arg)
{
	struct pollfd fds = { .events = POLLIN };
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	for (int i = 0; i < 20; i++) {
		struct waiter w = { .fd = p.b };
		pthread_t reader;
		int n;

		fds.fd = p.b;
		ENSURE(!pthread_create(&reader, NULL, read_one, &w), "pthread_create");
		sleep_ms(2);
		TRY(text(p.a, "yz"));
		n = poll(&fds, 1, LONG_MS);
		pthread_join(reader, NULL);
		ENSURE(n == 1 && fds.revents == POLLIN,
		       "poll beside a read returns %d and reports %#x", n, (unsigned int)fds.revents);
		TRY(takes(p.b, "z"));
	}
	return NULL;
}

struct two {
	int fd;
	struct pollfd fds;
	int n;
};

static void *poll_long(void *arg)
{
	struct two *t = arg;

	t->n = poll(&t->fds, 1, LONG_MS);
	return NULL;
}

/* As in read_and_polled, but the thread is in poll before the bytes arrive, and the read takes some of them first. */
static const char *polled_after_read(size_t arg)
{
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	for (int i = 0; i < 20; i++) {
		struct waiter w = { .fd = p.b };
		struct two t = { .fds = { .fd = p.b, .events = POLLIN } };
		pthread_t reader, poller;
		uint64_t start;

		ENSURE(!pthread_create(&reader, NULL, read_one, &w), "pthread_create");
		sleep_ms(2);
		ENSURE(!pthread_create(&poller, NULL, poll_long, &t), "pthread_create");
		sleep_ms(2);
		start = now_ms();
		TRY(text(p.a, "yz"));
		pthread_join(reader, NULL);
		pthread_join(poller, NULL);
		ENSURE(w.n == 1 && w.c == 'y', "read: %zd", w.n);
		ENSURE(t.n == 1 && t.fds.revents == POLLIN, "poll: %d, %#x", t.n, (unsigned int)t.fds.revents);
		ENSURE(now_ms() - start < LONG_MS / 2, "the calls end after %llu ms", (unsigned long long)(now_ms() - start));
		TRY(takes(p.b, "z"));
	}
	return NULL;
}

static void *poll_for_ever(void *arg)
{
	struct pollfd fds = { .fd = *(int *)arg, .events = POLLIN };

	poll(&fds, 1, -1);
	return NULL;
}

static void *read_for_ever(void *arg)
{
	char c;

	return (void *)(intptr_t)read(*(int *)arg, &c, 1);
}

/* Threads are cancelled while they wait for data. Other threads can use the connection afterwards. */
static const char *cancelled(size_t with_poll)
{
	struct pair p;

	TRY(connected(&p));
	for (int i = 0; i < 20; i++) {
		pthread_t thread;
		void *result;

		ENSURE(!pthread_create(&thread, NULL, with_poll ? poll_for_ever : read_for_ever, &p.b), "pthread_create");
		sleep_ms(2);
		ENSURE(!pthread_cancel(thread) && !pthread_join(thread, &result), "pthread_cancel");
		ENSURE(result == PTHREAD_CANCELED, "the thread was not cancelled");
		TRY(text(p.a, "ab"));
		ENSURE(poll(&(struct pollfd){ .fd = p.b, .events = POLLIN }, 1, LONG_MS) == 1,
		       "poll does not report the data after a thread was cancelled");
		TRY(takes(p.b, "ab"));
	}
	return NULL;
}

/* Waits for the end of a thread. */
static const char *ends(pthread_t thread, void **result)
{
	struct timespec until;
	int e;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += LONG_MS / 1000;
	e = pthread_timedjoin_np(thread, result, &until);
	if (e) {
		pthread_cancel(thread);
		pthread_join(thread, NULL);
	}
	ENSURE(!e, "the thread does not end: %s", strerror(e));
	return NULL;
}

/* Reads to the end, after waits by poll if `c` is set. Returns the number of bytes. */
static void *share(void *arg)
{
	const struct waiter *w = arg;
	intptr_t done = 0;
	char block[100];
	ssize_t n;

	do {
		struct pollfd ready = { w->fd, POLLIN, 0 };

		if (w->c && poll(&ready, 1, LONG_MS) != 1)
			return (void *)-1;
		n = recv(w->fd, block, sizeof block, w->c ? MSG_DONTWAIT : 0);
		done += n > 0 ? n : 0;
	} while (n > 0 || (n < 0 && errno == EAGAIN));
	return (void *)done;
}

/* Many threads read one stream, or poll it. They get all bytes, and the end. */
static const char *many_readers(size_t polls)
{
	enum { READERS = 5, WRITES = 3000 };
	struct pair p;
	struct waiter w;
	pthread_t threads[READERS];
	intptr_t total = 0;

	TRY(connected(&p));
	w = (struct waiter){ .fd = p.b, .c = (char)polls };
	for (int i = 0; i < READERS; i++)
		ENSURE(!pthread_create(&threads[i], NULL, share, &w), "pthread_create");
	for (int i = 0; i < WRITES; i++)
		TRY(text(p.a, "0123456789"));
	ENSURE(!shutdown(p.a, SHUT_WR), "shutdown: %s", strerror(errno));
	for (int i = 0; i < READERS; i++) {
		void *result;

		TRY(ends(threads[i], &result));
		ENSURE((intptr_t)result >= 0, "poll does not report the end");
		total += (intptr_t)result;
	}
	ENSURE(total == WRITES * 10, "%td bytes of %d", total, WRITES * 10);
	return NULL;
}

/* Returns whether a thread still runs after a short time. If not, it is joined. */
static bool runs(pthread_t thread, void **result)
{
	sleep_ms(SHORT_MS);
	return pthread_tryjoin_np(thread, result) == EBUSY;
}

/* The number of bytes that `write_much` writes: more than sockets accept for a peer that does not read. */
#define MUCH (16u << 20)

/* Writes until an error, or to the end. Returns the errno, or 0. */
static void *write_much(void *arg)
{
	static char block[MUCH];
	int fd = *(int *)arg;

	for (size_t at = 0; at < MUCH;) {
		ssize_t n = write(fd, block, MUCH - at);

		if (n <= 0)
			return (void *)(intptr_t)(n ? errno : EIO);
		at += (size_t)n;
	}
	return NULL;
}

static const char *reads_much(int fd)
{
	static char block[1 << 20];

	for (size_t at = 0; at < MUCH;) {
		ssize_t n = read(fd, block, sizeof block);

		ENSURE(n > 0, "after %zu bytes: %s", at, n ? strerror(errno) : "end");
		at += (size_t)n;
	}
	return NULL;
}

enum { SHUT_BOTH = 1, WITH_POLL = 2 };

/* A thread that waits for data returns when another thread shuts the connection down. */
static const char *shut_down_wakes(size_t how)
{
	struct pair p;
	pthread_t thread;
	void *result;
	int set;
	char byte;

	TRY(connected(&p));
	ENSURE(!pthread_create(&thread, NULL, how & WITH_POLL ? poll_for_ever : read_for_ever, &p.b), "pthread_create");
	sleep_ms(20);
	ENSURE(!shutdown(p.b, how & SHUT_BOTH ? SHUT_RDWR : SHUT_RD), "shutdown: %s", strerror(errno));
	TRY(ends(thread, &result));
	if (!(how & WITH_POLL))
		ENSURE(result == 0, "read returns %td", (intptr_t)result);
	TRY(new_set(&set));
	TRY(add(set, p.b, EPOLLIN, 1));
	TRY(reports(set, how & SHUT_BOTH ? EPOLLIN | EPOLLHUP : EPOLLIN, 1));
	if (how & SHUT_BOTH) {
		ENSURE(read(p.a, &byte, 1) == 0, "the peer does not see the end");
		return NULL;
	}
	/* The other direction works as before. */
	ENSURE(!pthread_create(&thread, NULL, write_much, &p.b), "pthread_create");
	TRY(reads_much(p.a));
	TRY(ends(thread, &result));
	ENSURE(result == NULL, "write: %s", strerror((int)(intptr_t)result));
	return NULL;
}

/*
 * A descriptor is closed while a thread reads from it, and its number becomes that of another connection. The thread gets no bytes of
 * the other connection, and the other connection gets no bytes of the old one.
 */
static const char *closed_while_read(size_t upgraded)
{
	struct pair p, q;
	pthread_t thread;
	void *result;
	int there;

	TRY(connected(&p));
	ENSURE(!pthread_create(&thread, NULL, read_for_ever, &p.b), "pthread_create");
	sleep_ms(20);
	close(p.b);
	if (upgraded) {
		TRY(connected(&q));
	} else {
		int local[2];

		ENSURE(!socketpair(AF_UNIX, SOCK_STREAM, 0, local), "socketpair: %s", strerror(errno));
		q = (struct pair){ local[0], local[1] };
		keep_fd(q.a);
		keep_fd(q.b);
	}
	ENSURE(dup2(q.a, p.b) == p.b, "dup2: %s", strerror(errno));
	if (q.a != p.b)
		close(q.a);
	q.a = p.b;
	TRY(text(q.a, "new"));
	TRY(text(q.b, "own"));
	TRY(text(p.a, "o"));
	TRY(ends(thread, &result));
	TRY(takes(q.b, "new"));
	/* The bytes have arrived when this returns. */
	ENSURE(recv(q.a, &there, 3, MSG_PEEK | MSG_WAITALL) > 0 && !ioctl(q.a, FIONREAD, &there) && there == 3,
	       "the thread has read from another connection");
	TRY(takes(q.a, "own"));
	return NULL;
}

/* With MSG_TRUNC the bytes are discarded, and the buffer is not used. MSG_ERRQUEUE returns no data. */
static const char *discards(size_t arg)
{
	struct pair p;
	char text_of[8] = "xxxxxxx";
	struct iovec part = { text_of, sizeof text_of };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
	ssize_t n;

	(void)arg;
	TRY(connected(&p));
	TRY(text(p.a, "hello"));
	ENSURE(poll(&(struct pollfd){ .fd = p.b, .events = POLLIN }, 1, LONG_MS) == 1, "poll");
	n = recvmsg(p.b, &message, MSG_ERRQUEUE | MSG_DONTWAIT);
	ENSURE(n < 0 && errno == EAGAIN, "MSG_ERRQUEUE: %zd", n);
	n = recv(p.b, NULL, 2, MSG_TRUNC);
	ENSURE(n == 2, "recv without a buffer: %zd (%s)", n, strerror(errno));
	n = recv(p.b, text_of, 1, MSG_TRUNC);
	ENSURE(n == 1 && text_of[0] == 'x', "recv: %zd, '%c'", n, text_of[0]);
	n = recv(p.b, NULL, INT_MAX, MSG_TRUNC);
	ENSURE(n == 2, "recv of the rest: %zd (%s)", n, strerror(errno));
	n = recv(p.b, NULL, INT_MAX, MSG_TRUNC | MSG_DONTWAIT);
	ENSURE(n < 0 && errno == EAGAIN, "recv of nothing: %zd", n);
	return NULL;
}

/* Writes a byte after 100 ms. */
static void *later(void *fd)
{
	sleep_ms(100);
	return (void *)(intptr_t)(write((int)(intptr_t)fd, "c", 1) != 1);
}

/*
 * recvmmsg reads into several buffers. It returns when all have data, with MSG_WAITFORONE when the first has, or after the first if its time
 * limit has passed.
 */
static const char *several_reads(size_t arg)
{
	struct pair p;
	char bytes[3][2];
	struct iovec parts[3];
	struct mmsghdr all[3] = { 0 };
	struct timespec none = { 0, 0 };
	pthread_t thread;
	void *result;
	int n;

	(void)arg;
	TRY(connected(&p));
	for (int i = 0; i < 3; i++) {
		parts[i] = (struct iovec){ bytes[i], 1 };
		all[i].msg_hdr = (struct msghdr){ .msg_iov = &parts[i], .msg_iovlen = 1 };
	}
	TRY(text(p.a, "ab"));
	ENSURE(!pthread_create(&thread, NULL, later, (void *)(intptr_t)p.a), "pthread_create");
	n = recvmmsg(p.b, all, 3, 0, NULL);
	TRY(ends(thread, &result));
	ENSURE(n == 3 && bytes[0][0] == 'a' && bytes[2][0] == 'c', "all: %d (%s)", n, strerror(errno));
	TRY(text(p.a, "d"));
	n = recvmmsg(p.b, all, 3, MSG_WAITFORONE, NULL);
	ENSURE(n == 1 && bytes[0][0] == 'd' && all[0].msg_len == 1, "the first one: %d (%s)", n, strerror(errno));
	TRY(text(p.a, "ef"));
	n = recvmmsg(p.b, all, 3, 0, &none);
	ENSURE(n == 1 && bytes[0][0] == 'e', "no time: %d (%s)", n, strerror(errno));
	return NULL;
}

static void no_action(int signal)
{
	(void)signal;
}

/* Sets the handler of SIGUSR1, and the flags of that of SIGALRM, which ends a test that takes too long. */
static const char *handles(int flags)
{
	struct sigaction action = { .sa_handler = no_action, .sa_flags = flags };

	ENSURE(!sigaction(SIGUSR1, &action, NULL), "sigaction: %s", strerror(errno));
	ENSURE(!sigaction(SIGALRM, NULL, &action), "sigaction: %s", strerror(errno));
	action.sa_flags = flags;
	ENSURE(!sigaction(SIGALRM, &action, NULL), "sigaction: %s", strerror(errno));
	return NULL;
}

enum { TIME_LIMIT, SIGNAL, SIGNAL_THAT_RESTARTS };

/* A write that waits, beside a thread that reads, ends at its time limit or when a signal arrives. */
static const char *blocked_write_ends(size_t how)
{
	struct pair p;
	pthread_t reader, writer;
	void *result;

	TRY(connected(&p));
	TRY(handles(how == SIGNAL_THAT_RESTARTS ? SA_RESTART : 0));
	if (how == TIME_LIMIT)
		ENSURE(!setsockopt(p.a, SOL_SOCKET, SO_SNDTIMEO, &(struct timeval){ .tv_usec = 50000 }, sizeof(struct timeval)),
		       "setsockopt: %s", strerror(errno));
	ENSURE(!pthread_create(&reader, NULL, read_for_ever, &p.a), "pthread_create");
	ENSURE(!pthread_create(&writer, NULL, write_much, &p.a), "pthread_create");
	if (how == SIGNAL_THAT_RESTARTS) {
		for (int i = 0; i < 4; i++) {
			ENSURE(runs(writer, &result), "the write has ended");
			pthread_kill(writer, SIGUSR1);
		}
		TRY(reads_much(p.b));
	}
	bool ended = false;
	for (int i = 0; how == SIGNAL && !ended && i < 20; i++) {
		pthread_kill(writer, SIGUSR1);
		ended = !runs(writer, &result);
	}
	if (!ended)
		TRY(ends(writer, &result));
	int expected[] = { EAGAIN, EINTR, 0 };
	ENSURE((intptr_t)result == expected[how], "write: %s", strerror((int)(intptr_t)result));
	TRY(text(p.b, "x"));
	return ends(reader, NULL);
}

struct selecting {
	int fd, error;
	struct timeval left;
};

static void *select_once(void *arg)
{
	struct selecting *s = arg;
	fd_set r;

	FD_ZERO(&r);
	FD_SET(s->fd, &r);
	s->error = select(s->fd + 1, &r, NULL, NULL, &s->left) < 0 ? errno : 0;
	return NULL;
}

/* A signal ends select, which reports the time that is left. Programs call it again with this time. */
static const char *select_interrupted(size_t arg)
{
	struct selecting s = { .left = { .tv_sec = LONG_MS / 1000 } };
	struct pair p;
	pthread_t thread;
	bool ended = false;

	(void)arg;
	TRY(connected(&p));
	TRY(handles(0));
	s.fd = p.b;
	ENSURE(!pthread_create(&thread, NULL, select_once, &s), "pthread_create");
	for (int i = 0; !ended && i < 20; i++) {
		sleep_ms(SHORT_MS);
		pthread_kill(thread, SIGUSR1);
		ended = !runs(thread, NULL);
	}
	ENSURE(ended, "the signal does not end select");
	ENSURE(s.error == EINTR, "select: %s", strerror(s.error));
	ENSURE(s.left.tv_sec < LONG_MS / 1000, "%ld s are left of %d", (long)s.left.tv_sec, LONG_MS / 1000);
	return NULL;
}

/* Of two threads that read, both continue after a signal whose handler has SA_RESTART. */
static const char *reads_restart(size_t arg)
{
	struct pair p;
	pthread_t readers[2];
	void *result;

	(void)arg;
	TRY(connected(&p));
	TRY(handles(SA_RESTART));
	for (int i = 0; i < 2; i++) {
		ENSURE(!pthread_create(&readers[i], NULL, read_for_ever, &p.a), "pthread_create");
		sleep_ms(10);
	}
	for (int i = 0; i < 4; i++) {
		ENSURE(runs(readers[0], &result) && runs(readers[1], &result), "a read has ended");
		pthread_kill(readers[i % 2], SIGUSR1);
	}
	TRY(text(p.b, "xy"));
	for (int i = 0; i < 2; i++) {
		TRY(ends(readers[i], &result));
		ENSURE((intptr_t)result == 1, "read returns %td", (intptr_t)result);
	}
	return NULL;
}

static sigjmp_buf out;

static void jump(int signal)
{
	(void)signal;
	siglongjmp(out, 1);
}

/* A signal handler jumps out of a call that waits. The connection can be used afterwards. */
static const char *jumps(size_t with_poll)
{
	struct sigaction action = { .sa_handler = jump };
	struct itimerval soon = { .it_value = { .tv_usec = 20000 } };
	struct pollfd fds = { .events = POLLIN };
	static struct pair p; /* local variables could be lost by the jump */

	TRY(connected(&p));
	ENSURE(!sigaction(SIGALRM, &action, NULL), "sigaction: %s", strerror(errno));
	if (!sigsetjmp(out, 1)) {
		ENSURE(!setitimer(ITIMER_REAL, &soon, NULL), "setitimer: %s", strerror(errno));
		with_poll ? poll_for_ever(&p.b) : read_for_ever(&p.b);
		return "the call has ended";
	}
	TRY(text(p.a, "ab"));
	fds.fd = p.b;
	ENSURE(poll(&fds, 1, LONG_MS) == 1, "poll does not report the data after a jump");
	return takes(p.b, "ab");
}

enum { BY_EXECL, BY_EXECLP, BY_EXECLE, BY_SPAWN, BY_SPAWNP, BY_SPAWN_DUP, BY_SPAWN_DUP_9, BY_SPAWN_DUP_URGENT };

/* Reads an urgent byte, so that it is still in front of the payload that has not arrived yet. */
static const char *read_urgent(const struct pair *p)
{
	char byte = 0;

	ENSURE(send(p->a, "!", 1, MSG_OOB) == 1, "send: %s", strerror(errno));
	ENSURE(poll(&(struct pollfd){ .fd = p->b, .events = POLLPRI }, 1, LONG_MS) == 1, "no urgent byte arrives");
	ENSURE(recv(p->b, &byte, 1, MSG_OOB) == 1 && byte == '!', "recv: %s", strerror(errno));
	return NULL;
}

/* An accepted connection, or a stream in use (BY_SPAWN_DUP_9 and later), is passed to a program without the library. */
static const char *passed_on(size_t how)
{
	char *empty[] = { NULL }, script[64], word[8] = "";
	char *argv[] = { "sh", "-c", script, NULL };
	bool is_used = how >= BY_SPAWN_DUP_9;
	posix_spawn_file_actions_t actions;
	struct share share = { .len = 4 };
	struct pair p;
	int status, e = 0;
	pthread_t reader;
	pid_t child = -1;

	TRY(!is_used ? accepted(&p) : connected(&p));
	if (how == BY_SPAWN_DUP_URGENT)
		TRY(read_urgent(&p));
	share.fd = p.a;
	/* The peer takes part in the change of a stream into a plain connection. */
	if (is_used)
		ENSURE(!pthread_create(&reader, NULL, take_share, &share), "pthread_create");
	else
		TRY(text(p.a, "word"));
	snprintf(script, sizeof script, "head -c 4 <&%d >&%d", p.b, p.b);
	ENSURE(!posix_spawn_file_actions_init(&actions), "posix_spawn_file_actions_init");
	if (how == BY_SPAWN_DUP_9) {
		snprintf(script, sizeof script, "printf word >&9");
		e = posix_spawn_file_actions_adddup2(&actions, p.b, 9);
		ENSURE(!e, "posix_spawn_file_actions_adddup2: %s", strerror(e));
	} else if (how == BY_SPAWN_DUP || how == BY_SPAWN_DUP_URGENT) {
		snprintf(script, sizeof script, is_used ? "printf word" : "head -c 4");
		e = posix_spawn_file_actions_adddup2(&actions, p.b, 0);
		e = e ? e : posix_spawn_file_actions_adddup2(&actions, p.b, 1);
		ENSURE(!e, "posix_spawn_file_actions_adddup2: %s", strerror(e));
	} else {
		ENSURE(!fcntl(p.b, F_SETFD, 0), "F_SETFD: %s", strerror(errno));
	}
	fflush(stdout);
	if (how < BY_SPAWN) {
		child = fork();
		ENSURE(child >= 0, "fork: %s", strerror(errno));
		if (!child) {
			unsetenv("LD_PRELOAD");
			if (how == BY_EXECL)
				execl("/bin/sh", "sh", "-c", script, NULL);
			if (how == BY_EXECLP)
				execlp("sh", "sh", "-c", script, "a", "b", "c", "d", "e", "f", NULL);
			if (how == BY_EXECLE)
				execle("/bin/sh", "sh", "-c", script, NULL, empty);
			_exit(1);
		}
	} else if (how == BY_SPAWNP) {
		e = posix_spawnp(&child, "sh", &actions, NULL, argv, empty);
	} else {
		e = posix_spawn(&child, "/bin/sh", &actions, NULL, argv, empty);
	}
	ENSURE(!e, "posix_spawn: %s", strerror(e));
	posix_spawn_file_actions_destroy(&actions);
	close(p.b);
	if (is_used) {
		pthread_join(reader, NULL);
		ENSURE(!share.error, "%s", share.error);
	} else {
		TRY(takes(p.a, "word"));
	}
	ENSURE(waitpid(child, &status, 0) == child && !status, "the program fails: status %#x", status);
	/* The kernel resets a connection that is closed with an urgent byte in its receive queue, also if MSG_OOB has read it. */
	if (how != BY_SPAWN_DUP_URGENT)
		ENSURE(read(p.a, word, 1) == 0, "the end does not follow: %s", strerror(errno));
	return NULL;
}

/*
 * A stream in use that is not closed on exec is not passed to another program, and stays as it is in this one. So does an accepted connection
 * that was not used yet (`is_used` is false).
 */
static const char *spawn_beside_stream(size_t is_used)
{
	char *argv[] = { "true", NULL };
	struct pair p;
	int status, e;
	pid_t child;

	TRY(is_used ? connected(&p) : accepted(&p));
	ENSURE(!fcntl(p.b, F_SETFD, 0), "F_SETFD: %s", strerror(errno));
	e = posix_spawn(&child, "/bin/true", NULL, NULL, argv, environ);
	ENSURE(!e, "posix_spawn: %s", strerror(e));
	ENSURE(waitpid(child, &status, 0) == child && !status, "the program fails: status %#x", status);
	ENSURE(fcntl(p.b, F_GETFD) == 0, "the descriptor has become one that is closed on exec");
	return greet(&p);
}

/* Starts programs one after the other. */
static void *spawn_programs(void *ends)
{
	char *argv[] = { "true", NULL };
	pid_t child;

	while (!atomic_load((atomic_bool *)ends))
		if (!posix_spawn(&child, "/bin/true", NULL, NULL, argv, environ))
			waitpid(child, NULL, 0);
	return NULL;
}

/* A thread closes a stream and opens a file while another thread starts programs. The file stays closed on exec. */
static const char *closed_during_spawn(size_t arg)
{
	uint64_t until = now_ms() + 500;
	static atomic_bool ends;
	const char *error = NULL;
	pthread_t thread;

	(void)arg;
	ENSURE(!pthread_create(&thread, NULL, spawn_programs, &ends), "pthread_create");
	while (!error && now_ms() < until) {
		struct pair p;
		int fd;

		error = connected(&p);
		if (error)
			break;
		fcntl(p.b, F_SETFD, 0);
		/* A program takes about 1 ms to start. */
		usleep(random() % 3000);
		close(p.b);
		fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
		usleep(300);
		if (fcntl(fd, F_GETFD) != FD_CLOEXEC)
			error = "a file that was opened with O_CLOEXEC has lost the flag";
		close(fd);
		close(p.a);
	}
	atomic_store(&ends, true);
	pthread_join(thread, NULL);
	return error;
}

enum { EXITS, CLOSES_FIRST, EXECUTES };

/* A program writes and ends before the other end accepts the connection. */
static const char *ends_before_accept(size_t how)
{
	struct sockaddr_in at;
	int listener, fd;
	pid_t child;
	char byte;

	TRY(listens(&listener, &at, 0, 0));
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		fd = socket(AF_INET, SOCK_STREAM, 0);
		if (connect(fd, (struct sockaddr *)&at, sizeof at) || write(fd, "important", 9) != 9)
			_exit(1);
		if (how == CLOSES_FIRST)
			close(fd);
		if (how == EXECUTES)
			execv("/bin/sleep", (char *[]){ "sleep", "0.1", NULL });
		_exit(0);
	}
	ENSURE(waitpid(child, NULL, 0) == child, "waitpid: %s", strerror(errno));
	fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(fd >= 0, "accept4: %s", strerror(errno));
	keep_fd(fd);
	TRY(takes(fd, "important"));
	ENSURE(read(fd, &byte, 1) == 0, "the end does not follow: %s", strerror(errno));
	return NULL;
}

#define BOTH_SEND 200000u

static void *send_then_read(void *arg)
{
	static __thread char block[BOTH_SEND];
	int fd = *(int *)arg;

	return (void *)(intptr_t)(write(fd, block, BOTH_SEND) != BOTH_SEND || recv(fd, block, BOTH_SEND, MSG_WAITALL) != BOTH_SEND);
}

/* Both ends send before they read. */
static const char *both_send(size_t arg)
{
	struct pair p;
	pthread_t threads[2];
	void *result;

	(void)arg;
	TRY(connected(&p));
	ENSURE(!pthread_create(&threads[0], NULL, send_then_read, &p.a), "pthread_create");
	ENSURE(!pthread_create(&threads[1], NULL, send_then_read, &p.b), "pthread_create");
	for (int i = 0; i < 2; i++) {
		TRY(ends(threads[i], &result));
		ENSURE(!result, "a call has failed");
	}
	return NULL;
}

/* Writes a pattern without end, in blocks of many lengths. The byte 255 is not in it. */
static void *write_pattern(void *p)
{
	static __thread char block[40000];
	size_t at = 0, len = 1;

	for (;;) {
		ssize_t n;

		for (size_t k = 0; k < len; k++)
			block[k] = (char)((at + k) % 251);
		n = write(*(int *)p, block, len);
		if (n < 0)
			return p;
		at += (size_t)n;
		len = 1 + (len * 7 + 11) % sizeof block;
	}
}

/* Reads patterns until the end of the stream. The byte 255 separates two patterns. */
static void *read_patterns(void *p)
{
	static char block[65536];
	struct share *share = p;
	size_t at = 0;
	ssize_t n;

	while ((n = read(share->fd, block, sizeof block)) > 0) {
		for (ssize_t k = 0; k < n; k++) {
			unsigned char byte = (unsigned char)block[k];

			if (byte == 255) {
				at = 0;
				share->len++;
			} else if (byte != at++ % 251) {
				share->error = "bytes are missing";
				return NULL;
			}
		}
	}
	share->error = n ? "the stream breaks" : NULL;
	return NULL;
}

/* Threads are cancelled while they write. The bytes that the peer gets have no gaps, and other threads can use the connection afterwards. */
static const char *cancelled_write(size_t arg)
{
	struct share share = { .len = 0 };
	pthread_t reader;
	struct pair p;

	(void)arg;
	TRY(connected(&p));
	share.fd = p.b;
	ENSURE(!pthread_create(&reader, NULL, read_patterns, &share), "pthread_create");
	for (int i = 0; i < 200; i++) {
		pthread_t thread;
		void *result;

		ENSURE(!pthread_create(&thread, NULL, write_pattern, &p.a), "pthread_create");
		usleep((useconds_t)(i * 37 % 2000));
		ENSURE(!pthread_cancel(thread) && !pthread_join(thread, &result), "pthread_cancel");
		ENSURE(result == PTHREAD_CANCELED, "the thread was not cancelled, or its write fails");
		ENSURE(write(p.a, "\377", 1) == 1, "write: %s", strerror(errno));
	}
	ENSURE(!shutdown(p.a, SHUT_WR), "shutdown: %s", strerror(errno));
	pthread_join(reader, NULL);
	TRY(share.error);
	ENSURE(share.len == 200, "%zu patterns arrive", share.len);
	return NULL;
}

/* ---------------------------------------------------------------- forks */

enum { CLOSES_SET, CLOSES_STREAM, CLOSES_ALL, CLOSES_LISTENER };

struct loop {
	int set, streams;
	struct pair pair[4];
	_Atomic bool ends[2];
};

/* Echoes what the streams of the set receive. */
static void *echo(void *p)
{
	struct loop *loop = p;

	while (!loop->ends[1]) {
		struct epoll_event e[4];
		char block[256];
		int n = epoll_wait(loop->set, e, 4, 20);

		for (int i = 0; i < n; i++) {
			ssize_t got = recv(e[i].data.fd, block, sizeof block, MSG_DONTWAIT);

			if (got > 0 && send(e[i].data.fd, block, (size_t)got, 0) != got)
				return p;
		}
	}
	return NULL;
}

static void *ask(void *p)
{
	struct loop *loop = p;
	char block[200] = "";

	while (!loop->ends[0]) {
		for (int i = 0; i < loop->streams; i++) {
			if (send(loop->pair[i].a, block, sizeof block, 0) != sizeof block ||
			    recv(loop->pair[i].a, block, sizeof block, MSG_WAITALL) != sizeof block)
				return p;
		}
	}
	return NULL;
}

static void *open_listeners(void *p)
{
	struct loop *loop = p;

	while (!loop->ends[0]) {
		struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
		int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

		if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 4))
			return p;
		close(listener);
	}
	return NULL;
}

/* The child of a process with threads closes what it has inherited, while the threads of the parent use it. */
static const char *child_closes(size_t what)
{
	struct loop loop = { .streams = 4 };
	struct sockaddr_in at;
	pthread_t threads[2];
	uint64_t start;
	int listener;
	void *failed;

	TRY(listens(&listener, &at, 0, 0));
	TRY(new_set(&loop.set));
	for (int i = 0; i < loop.streams; i++) {
		TRY(connected(&loop.pair[i]));
		TRY(add(loop.set, loop.pair[i].b, EPOLLIN, (uint64_t)loop.pair[i].b));
	}
	ENSURE(!pthread_create(&threads[0], NULL, what == CLOSES_LISTENER ? open_listeners : ask, &loop), "pthread_create");
	ENSURE(!pthread_create(&threads[1], NULL, echo, &loop), "pthread_create");
	start = now_ms();
	for (int i = 0; i < 1000 && now_ms() - start < 2000; i++) {
		pid_t child = fork();
		int status;

		ENSURE(child >= 0, "fork: %s", strerror(errno));
		if (!child) {
			signal(SIGALRM, SIG_DFL);
			alarm(5);
			if (what == CLOSES_SET)
				close(loop.set);
			if (what == CLOSES_STREAM)
				close(loop.pair[i % loop.streams].b);
			if (what == CLOSES_LISTENER)
				close(listener);
			for (int fd = 3; what == CLOSES_ALL && fd < 100; fd++)
				close(fd);
			_exit(0);
		}
		ENSURE(waitpid(child, &status, 0) == child, "waitpid: %s", strerror(errno));
		ENSURE(!status, "child %d does not end: status %#x", i, status);
	}
	for (size_t i = 0; i < COUNT(threads); i++) {
		loop.ends[i] = true;
		ENSURE(!pthread_join(threads[i], &failed) && !failed, "thread %zu of the parent fails", i);
	}
	return NULL;
}

/* A descriptor is removed from a set before a fork, and the child closes its copy. The parent can add the descriptor again. */
static const char *removed_before_fork(size_t arg)
{
	struct pair p;
	int set, status;
	pid_t child;

	(void)arg;
	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(add(set, p.a, EPOLLIN, 1));
	TRY(is_quiet(set));
	TRY(drop(set, p.a));
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		close(p.a);
		_exit(0);
	}
	ENSURE(waitpid(child, &status, 0) == child && !status, "the child fails: status %#x", status);
	TRY(add(set, p.a, EPOLLIN, 2));
	TRY(text(p.b, "ab"));
	TRY(reports(set, EPOLLIN, 2));
	TRY(takes(p.a, "ab"));
	/* The child removes a descriptor from the set. The removal applies to the parent too, because both share the set. */
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child)
		_exit(control(set, EPOLL_CTL_DEL, p.a, 0, 0));
	ENSURE(waitpid(child, &status, 0) == child && !status, "the child fails: status %#x", status);
	TRY(text(p.b, "cd"));
	TRY(is_quiet(set));
	return takes(p.a, "cd");
}

/* The child of a fork waits for the events of its parent's set, and uses none of the streams. The parent uses them afterwards. */
static const char *child_only_waits(size_t has_data)
{
	struct epoll_event e;
	struct pair p;
	int set, status;
	pid_t child;

	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(add(set, p.b, EPOLLIN, 7));
	if (has_data)
		TRY(text(p.a, "abc"));
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		int n = epoll_wait(set, &e, 1, has_data ? LONG_MS : SHORT_MS);

		_exit(n != (int)has_data || (n && (e.events != EPOLLIN || e.data.u64 != 7)));
	}
	ENSURE(waitpid(child, &status, 0) == child && !status, "the child fails: status %#x", status);
	if (!has_data)
		TRY(text(p.a, "abc"));
	TRY(reports(set, EPOLLIN, 7));
	TRY(takes(p.b, "abc"));
	TRY(text(p.b, "defg"));
	TRY(takes(p.a, "defg"));
	return is_quiet(set);
}

/* ---------------------------------------------------------------- descriptors */

/* Streams that stay ready fill the array of each wait. Other members of the set are reported too. */
static const char *shares_turns(size_t streams)
{
	struct epoll_event e[8];
	struct pair p[8];
	int set, pipes[2];
	int waits = 0, others = 0;

	TRY(new_set(&set));
	for (size_t i = 0; i < streams; i++) {
		TRY(connected(&p[i]));
		TRY(text(p[i].a, "unread"));
		TRY(add(set, p[i].b, EPOLLIN | EPOLLOUT, i));
	}
	ENSURE(!pipe2(pipes, O_CLOEXEC), "pipe2: %s", strerror(errno));
	keep_fd(pipes[0]);
	keep_fd(pipes[1]);
	TRY(text(pipes[1], "x"));
	TRY(add(set, pipes[0], EPOLLIN, 100));
	for (; waits < 1000; waits++) {
		int n = epoll_wait(set, e, (int)streams, LONG_MS);

		ENSURE(n > 0, "epoll_wait: %d", n);
		for (int i = 0; i < n; i++)
			others += e[i].data.u64 == 100;
	}
	ENSURE(others >= waits / 20, "%d waits of %d report the pipe", others, waits);
	ENSURE(waits - others >= waits / 20 || streams > 1, "%d waits of %d report the stream", waits - others, waits);
	return NULL;
}

/*
 * A program that closes the numbers from 1000 on, which the library gives its own descriptors, does not close these descriptors. If the
 * program puts descriptors of its own at these numbers, the library does not use them.
 */
static const char *closes_all_numbers(size_t replaces)
{
	struct pair p;
	int set, outer, pipes[2], top[100];
	char byte;

	TRY(read_and_polled(0)); /* the library then has an eventfd for this thread */
	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(new_set(&outer));
	TRY(add(set, p.b, EPOLLIN, 1));
	TRY(add(outer, set, EPOLLIN, 2));
	ENSURE(!pipe2(pipes, O_CLOEXEC | O_NONBLOCK), "pipe2: %s", strerror(errno));
	keep_fd(pipes[0]);
	keep_fd(pipes[1]);
	for (int i = 0; i < 100; i++) {
		if (replaces)
			top[i] = dup2(pipes[1], 1000 + i);
		else if (close(1000 + i), (top[i] = fcntl(pipes[1], F_DUPFD_CLOEXEC, 1000)) < 0)
			return "F_DUPFD_CLOEXEC";
		ENSURE(top[i] >= 0, "dup2: %s", strerror(errno));
		keep_fd(top[i]);
	}
	for (int i = 0; i < 10; i++) {
		TRY(text(p.a, "abcd"));
		TRY(reports(outer, EPOLLIN, 2));
		TRY(reports(set, EPOLLIN, 1));
		TRY(takes(p.b, "ab"));
		TRY(reports(outer, EPOLLIN, 2));
		TRY(takes(p.b, "cd"));
		epoll_wait(set, &(struct epoll_event){ 0 }, 1, 0);
		TRY(is_quiet(outer));
	}
	TRY(read_and_polled(0));
	ENSURE(read(pipes[0], &byte, 1) < 0 && errno == EAGAIN, "the library has written to a descriptor of the program");
	return NULL;
}

/* ---------------------------------------------------------------- copies of descriptors */

/* A call that cannot replace a stream does not change it. */
static const char *not_replaced(size_t arg)
{
	struct rlimit limit, low;
	struct pair p;
	int copy;

	(void)arg;
	TRY(connected(&p));
	ENSURE(dup3(p.b, p.a, 1) < 0 && errno == EINVAL, "dup3 with a wrong flag: %s", strerror(errno));
	ENSURE(dup3(p.a, p.a, 0) < 0 && errno == EINVAL, "dup3 to the same descriptor: %s", strerror(errno));
	ENSURE(dup2(-1, p.a) < 0 && errno == EBADF, "dup2 of a wrong descriptor: %s", strerror(errno));
	ENSURE(!getrlimit(RLIMIT_NOFILE, &limit), "getrlimit: %s", strerror(errno));
	low = limit;
	low.rlim_cur = (rlim_t)p.a;
	ENSURE(!setrlimit(RLIMIT_NOFILE, &low), "setrlimit: %s", strerror(errno));
	copy = dup2(p.b, p.a);
	ENSURE(!setrlimit(RLIMIT_NOFILE, &limit), "setrlimit: %s", strerror(errno));
	ENSURE(copy < 0, "dup2 to a descriptor above the limit succeeds");
	TRY(text(p.a, "there"));
	TRY(takes(p.b, "there"));
	TRY(text(p.b, "back"));
	TRY(takes(p.a, "back"));
	return NULL;
}

static void *receives_nothing(void *fd)
{
	char byte;

	return (void *)(recv(*(int *)fd, &byte, 1, 0) > 0 ? "a byte arrives" : NULL);
}

static void *writes_much(void *fd)
{
	static char block[1 << 20];

	while (write(*(int *)fd, block, sizeof block) > 0)
		;
	return NULL;
}

enum { WITH_COPY = 1, UNREAD = 2, IN_SET = 4, BESIDE_READER = 8, BESIDE_WRITER = 16 };

/* A socket that the program disconnects can connect again. Nothing of the first connection affects the second one. */
static const char *connects_again(size_t how)
{
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	struct linger linger;
	socklen_t len = sizeof linger;
	struct sockaddr_in at;
	struct pollfd ready;
	int listener, copy, set;
	pthread_t reader, writer;
	const char *result;
	struct pair p;
	char byte;

	TRY(connected(&p));
	copy = how & WITH_COPY ? dup(p.a) : p.a;
	ENSURE(copy >= 0, "dup: %s", strerror(errno));
	keep_fd(copy);
	TRY(new_set(&set));
	if (how & IN_SET)
		TRY(add(set, p.a, EPOLLIN, 1));
	if (how & UNREAD) {
		TRY(text(p.b, "unread"));
		ready = (struct pollfd){ p.a, POLLIN, 0 };
		ENSURE(poll(&ready, 1, LONG_MS) == 1, "poll: %s", strerror(errno));
	}
	if (how & BESIDE_READER) {
		ENSURE(!pthread_create(&reader, NULL, receives_nothing, &p.a), "pthread_create");
		sleep_ms(SHORT_MS);
	}
	if (how & BESIDE_WRITER) {
		ENSURE(!pthread_create(&writer, NULL, writes_much, &p.a), "pthread_create");
		sleep_ms(10 * SHORT_MS);
	}
	TRY(listens(&listener, &at, 0, 0));
	ENSURE(!connect(p.a, &none, sizeof none), "connect with AF_UNSPEC: %s", strerror(errno));
	if (how & BESIDE_WRITER)
		ENSURE(!pthread_join(writer, NULL), "pthread_join");
	else
		ENSURE(read(p.b, &byte, 1) <= 0, "the first connection does not end");
	if (how & BESIDE_READER) {
		ENSURE(!pthread_join(reader, (void **)&result), "pthread_join");
		ENSURE(!result, "%s", result);
	}
	ENSURE(write(copy, "x", 1) < 0, "a write without a connection succeeds");
	ENSURE(!getsockopt(p.a, SOL_SOCKET, SO_LINGER, &linger, &len) && !linger.l_onoff, "the socket lingers");
	ENSURE(!connect(p.a, (struct sockaddr *)&at, sizeof at), "connect: %s", strerror(errno));
	p.b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(p.b >= 0, "accept4: %s", strerror(errno));
	keep_fd(p.b);
	TRY(greet(&p));
	TRY(text(copy, "again"));
	TRY(takes(p.b, "again"));
	if (how & IN_SET) {
		TRY(text(p.b, "set"));
		TRY(reports(set, EPOLLIN, 1));
		TRY(takes(p.a, "s"));
		TRY(reports(set, EPOLLIN, 1));
	}
	return NULL;
}

static void *writes_once(void *fd)
{
	static char block[64 << 20];

	return (void *)(write(*(int *)fd, block, sizeof block) == sizeof block ? "all is accepted" : NULL);
}

/* A call that is blocked while another thread disconnects the socket and connects it again does not use the new connection. */
static const char *former_connection(size_t writes)
{
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	struct sockaddr_in at;
	const char *result;
	pthread_t thread;
	struct pair p;
	int listener;

	TRY(connected(&p));
	TRY(listens(&listener, &at, 0, 0));
	ENSURE(!pthread_create(&thread, NULL, writes ? writes_once : receives_nothing, &p.a), "pthread_create");
	sleep_ms(10 * SHORT_MS);
	ENSURE(!connect(p.a, &none, sizeof none), "connect with AF_UNSPEC: %s", strerror(errno));
	ENSURE(!connect(p.a, (struct sockaddr *)&at, sizeof at), "connect: %s", strerror(errno));
	p.b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(p.b >= 0, "accept4: %s", strerror(errno));
	keep_fd(p.b);
	TRY(text(p.b, "new"));
	ENSURE(!pthread_join(thread, (void **)&result) && !result, "%s", result);
	TRY(takes(p.a, "new"));
	TRY(text(p.a, "again"));
	return takes(p.b, "again");
}

enum { AFTER_LISTEN, BEFORE_LISTEN, ORIGINAL_CLOSED };

/* Connections are accepted by a copy of the listener's descriptor. They are upgraded as if there were no copy. */
static const char *accepted_by_copy(size_t how)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof at;
	struct pair p;
	int listener, copy, higher;

	listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(listener >= 0, "socket: %s", strerror(errno));
	keep_fd(listener);
	copy = how == BEFORE_LISTEN ? dup(listener) : -1;
	ENSURE(!bind(listener, (struct sockaddr *)&at, sizeof at) && !listen(listener, 4), "listen: %s", strerror(errno));
	ENSURE(!getsockname(listener, (struct sockaddr *)&at, &len), "getsockname: %s", strerror(errno));
	if (how != BEFORE_LISTEN)
		copy = dup(listener);
	ENSURE(copy >= 0, "dup: %s", strerror(errno));
	keep_fd(copy);
	if (how == ORIGINAL_CLOSED)
		close(listener);
	higher = fcntl(copy, F_DUPFD_CLOEXEC, 200);
	ENSURE(higher >= 0, "F_DUPFD_CLOEXEC: %s", strerror(errno));
	keep_fd(higher);
	for (int i = 0; i < 2; i++) {
		p.a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		keep_fd(p.a);
		ENSURE(!connect(p.a, (struct sockaddr *)&at, sizeof at), "connect: %s", strerror(errno));
		p.b = accept4(i ? copy : higher, NULL, NULL, SOCK_CLOEXEC);
		ENSURE(p.b >= 0, "accept4: %s", strerror(errno));
		keep_fd(p.b);
		TRY(greet(&p));
		TRY(has_expected_transport(p.b));
		if (!i)
			close(higher);
	}
	return NULL;
}

/* The descriptor of a socket is copied before the socket connects. Both can be used. */
static const char *copied_before_connect(size_t arg)
{
	struct sockaddr_in at;
	struct pair p, q;
	int listener;

	(void)arg;
	TRY(listens(&listener, &at, 0, 0));
	p.a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	keep_fd(p.a);
	q.a = dup(p.a);
	ENSURE(q.a >= 0, "dup: %s", strerror(errno));
	keep_fd(q.a);
	ENSURE(!connect(p.a, (struct sockaddr *)&at, sizeof at), "connect: %s", strerror(errno));
	p.b = q.b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(p.b >= 0, "accept4: %s", strerror(errno));
	keep_fd(p.b);
	TRY(greet(&q));
	TRY(greet(&p));
	close(p.a);
	return greet(&q);
}

/* ---------------------------------------------------------------- stdio */

extern int __dprintf_chk(int fd, int flag, const char *format, ...);

static int close_file(void *p)
{
	return fclose(p);
}

/* Sends the lines 0 to 9999 by one stream of the C library. The peer receives them by another one, and answers. */
static void *send_lines(void *p)
{
	FILE *f = p;

	for (int i = 0; i < 10000; i++)
		if (fprintf(f, "%d %s\n", i, "and the rest of the line") < 0)
			return p;
	return fflush(f) ? p : NULL;
}

static const char *takes_lines(FILE *f)
{
	char line[100];

	for (int i = 0; i < 10000; i++) {
		ENSURE(fgets(line, sizeof line, f), "line %d: %s", i, ferror(f) ? strerror(errno) : "end");
		ENSURE(atoi(line) == i && strchr(line, '\n'), "line %d is \"%s\"", i, line);
	}
	return NULL;
}

enum { IN_USE, UNDECIDED };

/* Both ends use streams of the C library, after the first bytes or from the start. */
static const char *stdio(size_t when)
{
	struct sockaddr_in at;
	FILE *in[2], *out[2];
	pthread_t thread;
	int listener;
	void *failed;
	struct pair p;
	char c;

	if (when == IN_USE) {
		TRY(connected(&p));
	} else {
		TRY(listens(&listener, &at, 0, 0));
		p.a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		keep_fd(p.a);
		ENSURE(!connect(p.a, (struct sockaddr *)&at, sizeof at), "connect: %s", strerror(errno));
		p.b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		ENSURE(p.b >= 0, "accept4: %s", strerror(errno));
		keep_fd(p.b);
	}
	ENSURE(!fdopen(p.a, "x") && errno == EINVAL, "an invalid mode is accepted");
	for (int i = 0; i < 2; i++) {
		int fd = i ? p.b : p.a;

		in[i] = fdopen(fd, "r");
		ENSURE(in[i], "fdopen: %s", strerror(errno));
		ENSURE(fileno(in[i]) == fd, "fileno is %d in place of %d", fileno(in[i]), fd);
		forget((void *)(intptr_t)fd);
		keep(close_file, in[i], "stream");
		out[i] = fdopen(dup(fd), "w");
		ENSURE(out[i], "fdopen: %s", strerror(errno));
		keep(close_file, out[i], "stream");
	}
	for (int i = 0; i < 2; i++) {
		ENSURE(!pthread_create(&thread, NULL, send_lines, out[i]), "pthread_create");
		TRY(takes_lines(in[!i]));
		ENSURE(!pthread_join(thread, &failed) && !failed, "a line cannot be written");
	}
	ENSURE(ftell(in[0]) == -1 && errno == ESPIPE, "ftell: %s", strerror(errno));
	/* The descriptors can be used too. */
	TRY(text(p.a, "ab"));
	TRY(takes(p.b, "ab"));
	ENSURE(!close_now(in[0]) && !close_now(out[0]), "fclose: %s", strerror(errno));
	ENSURE(read(p.b, &c, 1) == 0, "the stream does not end");
	ENSURE(fgetc(in[1]) == EOF && feof(in[1]) && !ferror(in[1]), "the stream does not end");
	return NULL;
}

/* One stream of the C library carries both directions. */
static const char *stdio_both(size_t arg)
{
	char line[100];
	struct pair p;
	FILE *f;

	(void)arg;
	TRY(connected(&p));
	f = fdopen(p.b, "r+");
	ENSURE(f, "fdopen: %s", strerror(errno));
	forget((void *)(intptr_t)p.b);
	keep(close_file, f, "stream");
	for (int i = 0; i < 3; i++) {
		TRY(text(p.a, "question\n"));
		ENSURE(fgets(line, sizeof line, f) && !strcmp(line, "question\n"), "fgets: %s", strerror(errno));
		ENSURE(fputs("answer\n", f) >= 0 && !fflush(f), "fputs: %s", strerror(errno));
		TRY(takes(p.a, "answer\n"));
	}
	return NULL;
}

static int print_list(int fd, const char *format, ...)
{
	va_list list;
	int n;

	va_start(list, format);
	n = vdprintf(fd, format, list);
	va_end(list);
	return n;
}

#define FORMAT "%s %d %.2f %ld %c %g %u %.1f %x %.0f %.3f %e %.4f %.5f %d\n"
#define VALUES "text", -1, 1.25, 1L << 40, 'c', 0.5, 7u, 2.5, 0xfeu, 3.0, 4.125, 1e100, 5.0625, 6.5, 99
#define PRINTED "text -1 1.25 1099511627776 c 0.5 7 2.5 fe 3 4.125 1.000000e+100 5.0625 6.50000 99\n"

static const char *prints(size_t arg)
{
	int pipes[2], n = (int)strlen(PRINTED);
	struct pair p;
	char *line;

	(void)arg;
	TRY(connected(&p));
	ENSURE(!pipe2(pipes, O_CLOEXEC), "pipe2: %s", strerror(errno));
	keep_fd(pipes[0]);
	keep_fd(pipes[1]);
	for (int i = 0; i < 2; i++) {
		int fd = i ? pipes[1] : p.a, from = i ? pipes[0] : p.b;
		char got[sizeof PRINTED] = "";

		ENSURE(dprintf(fd, FORMAT, VALUES) == n, "dprintf: %s", strerror(errno));
		ENSURE(read(from, got, sizeof got) == n && !strcmp(got, PRINTED), "dprintf: \"%s\"", got);
		ENSURE(print_list(fd, FORMAT, VALUES) == n, "vdprintf: %s", strerror(errno));
		ENSURE(read(from, got, sizeof got) == n && !strcmp(got, PRINTED), "vdprintf: \"%s\"", got);
		ENSURE(__dprintf_chk(fd, 1, FORMAT, VALUES) == n, "__dprintf_chk: %s", strerror(errno));
		ENSURE(read(from, got, sizeof got) == n && !strcmp(got, PRINTED), "__dprintf_chk: \"%s\"", got);
		ENSURE(dprintf(fd, "%s", "") == 0 && dprintf(fd, "word") == 4, "dprintf: %s", strerror(errno));
		ENSURE(read(from, got, sizeof got) == 4 && !memcmp(got, "word", 4), "dprintf: \"%s\"", got);
	}
	line = malloc(5001);
	memset(line, 'x', 5000);
	line[5000] = 0;
	n = dprintf(p.a, "%s%s", line, line);
	free(line);
	ENSURE(n == 10000, "dprintf: %d", n);
	TRY(take_all(p.b, 10000));
	return NULL;
}

/* A program makes an accepted connection its standard output, and prints. */
static const char *prints_to_standard_output(size_t arg)
{
	int status;
	struct pair p;
	pid_t child;

	(void)arg;
	TRY(accepted(&p));
	fflush(stdout);
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		if (dup2(p.b, 1) != 1 || dup2(p.b, 0) != 0)
			_exit(1);
		close(p.b);
		close(p.a);
		printf("banner\n");
		fflush(stdout);
		_exit(getchar() != 'x');
	}
	close(p.b);
	TRY(takes(p.a, "banner\n"));
	TRY(text(p.a, "x"));
	ENSURE(waitpid(child, &status, 0) == child && !status, "the child fails: status %#x", status);
	ENSURE(read(p.a, &status, 1) == 0, "the stream does not end: %s", strerror(errno));
	return NULL;
}

/* A program that has only written closes its descriptor without the C library. */
static const char *closed_by_syscall(size_t by_range)
{
	char word[8] = "";
	struct pair p;

	TRY(accepted(&p));
	ENSURE(write(p.a, "last", 4) == 4, "write: %s", strerror(errno));
	if (by_range)
		ENSURE(!syscall(SYS_close_range, p.a, p.a, 0), "SYS_close_range: %s", strerror(errno));
	else
		ENSURE(!syscall(SYS_close, p.a), "SYS_close: %s", strerror(errno));
	TRY(takes(p.b, "last"));
	ENSURE(read(p.b, word, sizeof word) == 0, "the connection does not end: %s", strerror(errno));
	ENSURE(syscall(SYS_close, p.a) < 0 && errno == EBADF, "SYS_close of a closed descriptor: %s", strerror(errno));
	return NULL;
}

/* Addresses at which there is no memory. The compiler does not know them. */
static void *volatile zero = NULL;
static void *volatile nowhere = (void *)-1;
static volatile int negative = -1;

/* Calls with addresses at which there is no memory fail, and the connection can be used afterwards. */
static const char *wrong_addresses(size_t arg)
{
	struct iovec null = { NULL, 4 }, top = { (void *)-1, 4 }, long_one = { &null, SIZE_MAX / 2 + 1 }, none = { NULL, 0 };
	struct msghdr m = { .msg_iov = &null, .msg_iovlen = 1 };
	static struct iovec many[1025];
	struct sockaddr_in at;
	struct epoll_event e;
	struct pair p;
	void *hole;
	char byte;
	int set;

	(void)arg;
	TRY(connected(&p));
	TRY(new_set(&set));
#define FAILS(call, wanted) ENSURE((call) < 0 && errno == (wanted), #call ": %s", strerror(errno))
	for (int i = 0; i < 2; i++) {
		m.msg_iov = &null;
		m.msg_iovlen = 1;
		FAILS(write(p.a, zero, 4), EFAULT);
		FAILS(write(p.a, nowhere, 4), EFAULT);
		FAILS(send(p.a, zero, 4, 0), EFAULT);
		FAILS(sendto(p.a, nowhere, 4, 0, NULL, 0), EFAULT);
		FAILS(writev(p.a, zero, 1), EFAULT);
		FAILS(writev(p.a, nowhere, 1), EFAULT);
		FAILS(writev(p.a, &null, 1), EFAULT);
		FAILS(writev(p.a, &top, 1), EFAULT);
		FAILS(writev(p.a, &long_one, 1), EINVAL);
		FAILS(writev(p.a, &none, negative), EINVAL);
		FAILS(writev(p.a, many, 1025), EINVAL);
		FAILS(sendmsg(p.a, zero, 0), EFAULT);
		FAILS(sendmsg(p.a, nowhere, 0), EFAULT);
		FAILS(sendmsg(p.a, &m, 0), EFAULT);
		FAILS(sendmmsg(p.a, nowhere, 1, 0), EFAULT);
		FAILS(read(p.b, nowhere, 4), EFAULT);
		FAILS(recv(p.b, nowhere, 4, 0), EFAULT);
		FAILS(readv(p.b, zero, 1), EFAULT);
		FAILS(readv(p.b, nowhere, 1), EFAULT);
		FAILS(readv(p.b, &top, 1), EFAULT);
		FAILS(readv(p.b, &long_one, 1), EINVAL);
		FAILS(readv(p.b, &none, negative), EINVAL);
		FAILS(readv(p.b, many, 1025), EINVAL);
		FAILS(recvmsg(p.b, zero, 0), EFAULT);
		FAILS(recvmsg(p.b, nowhere, 0), EFAULT);
		m.msg_iov = nowhere;
		FAILS(recvmsg(p.b, &m, 0), EFAULT);
		FAILS(sendmsg(p.a, &m, 0), EFAULT);
		m.msg_iov = many;
		m.msg_iovlen = 1025;
		FAILS(recvmsg(p.b, &m, 0), EMSGSIZE);
		FAILS(sendmsg(p.a, &m, 0), EMSGSIZE);
		FAILS(poll(nowhere, 1, 0), EFAULT);
		FAILS(epoll_ctl(set, EPOLL_CTL_ADD, p.b, zero), EFAULT);
		FAILS(epoll_ctl(set, EPOLL_CTL_ADD, p.b, nowhere), EFAULT);
		/* A read at address 0 finds nothing to read the first time. The second time the data stays unread. */
		FAILS(recv(p.b, zero, 4, MSG_DONTWAIT), i ? EFAULT : EAGAIN);
		if (i)
			FAILS(read(p.b, zero, 4), EFAULT);
		else
			TRY(text(p.a, "data"));
		ENSURE(poll(&(struct pollfd){ .fd = p.b, .events = POLLIN }, 1, LONG_MS) == 1, "poll: %s", strerror(errno));
	}
	FAILS(recvfrom(p.b, &byte, 1, MSG_PEEK, (struct sockaddr *)&at, nowhere), EFAULT);
#undef FAILS
	/* The first long write is not copied. */
	hole = mmap(NULL, 65536, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ENSURE(hole != MAP_FAILED, "mmap: %s", strerror(errno));
	ENSURE(write(p.a, hole, 65536) < 0 && errno == EFAULT, "a write from protected memory: %s", strerror(errno));
	munmap(hole, 65536);
	ENSURE(write(p.a, zero, 0) == 0 && writev(p.a, &none, 1) == 0, "an empty write: %s", strerror(errno));
	TRY(add(set, p.b, EPOLLIN, 1));
	ENSURE(epoll_wait(set, nowhere, 1, 0) < 0 && errno == EFAULT, "epoll_wait: %s", strerror(errno));
	ENSURE(epoll_wait(set, &e, 1, 0) == 1, "epoll_wait: %s", strerror(errno));
	TRY(takes(p.b, "data"));
	ENSURE(!shutdown(p.a, SHUT_WR), "shutdown: %s", strerror(errno));
	ENSURE(poll(&(struct pollfd){ .fd = p.b, .events = POLLIN }, 1, LONG_MS) == 1, "poll: %s", strerror(errno));
	ENSURE(read(p.b, zero, 4) == 0 && read(p.b, &byte, 1) == 0, "the end is not reported: %s", strerror(errno));
	return NULL;
}

enum { WRITES = 1, ACCEPTED = 2, READS_FIRST = 4 };

/* A program sets SO_LINGER to zero seconds before it has used a connection, and closes it: the other end gets an error behind the data. */
static const char *reset_before_use(size_t how)
{
	struct linger reset = { 1, 0 };
	struct pair p;
	int closing, other;
	char word[8];
	ssize_t n;

	TRY(accepted(&p));
	closing = how & ACCEPTED ? p.b : p.a;
	other = how & ACCEPTED ? p.a : p.b;
	if (how & READS_FIRST)
		TRY(nonblocking(other));
	if (how & READS_FIRST)
		ENSURE(read(other, word, 1) < 0 && errno == EAGAIN, "read: %s", strerror(errno));
	if (how & WRITES)
		TRY(text(how & ACCEPTED ? p.a : closing, "word"));
	ENSURE(!setsockopt(closing, SOL_SOCKET, SO_LINGER, &reset, sizeof reset), "SO_LINGER: %s", strerror(errno));
	ENSURE(!close(closing), "close: %s", strerror(errno));
	ENSURE(poll(&(struct pollfd){ .fd = other, .events = POLLIN }, 1, LONG_MS) == 1, "poll: %s", strerror(errno));
	if (how == WRITES) {
		n = recv(other, word, sizeof word, 0);
		ENSURE(n == 4 && !memcmp(word, "word", 4), "%zd bytes instead of \"word\": %s", n, strerror(errno));
	}
	n = recv(other, word, sizeof word, 0);
	ENSURE(n < 0 && errno == ECONNRESET, "%zd: %s in place of a reset", n, n ? strerror(errno) : "end");
	return NULL;
}

/* Closes a descriptor by a system call that the library does not see. */
static long closes_unseen(int fd)
{
#if defined(__x86_64__)
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "a"(SYS_close), "D"((long)fd) : "rcx", "r11", "memory");
	return result;
#elif defined(__aarch64__)
	register long number __asm__("x8") = SYS_close;
	register long result __asm__("x0") = fd;

	__asm__ volatile("svc 0" : "+r"(result) : "r"(number) : "memory");
	return result;
#else
	return close(fd);
#endif
}

/* A pipe gets the numbers of streams that were closed without the library. */
static const char *replaced_unseen(size_t with_lists)
{
	struct iovec part = { (char[]){ "word" }, 4 };
	char word[8] = "";
	struct pair p;
	int pipes[2];

	TRY(connected(&p));
	ENSURE(!closes_unseen(p.a) && !closes_unseen(p.b), "SYS_close");
	ENSURE(!pipe2(pipes, O_CLOEXEC), "pipe2: %s", strerror(errno));
	ENSURE(pipes[0] == p.a && pipes[1] == p.b, "the numbers are %d and %d", pipes[0], pipes[1]);
	if (with_lists)
		ENSURE(writev(p.b, &part, 1) == 4, "writev: %s", strerror(errno));
	else
		ENSURE(write(p.b, "word", 4) == 4, "write: %s", strerror(errno));
	part.iov_base = word;
	if (with_lists)
		ENSURE(readv(p.a, &part, 1) == 4, "readv: %s", strerror(errno));
	else
		ENSURE(read(p.a, word, 4) == 4, "read: %s", strerror(errno));
	ENSURE(!strcmp(word, "word"), "\"%s\" arrives", word);
	return NULL;
}

/* A read at the end of the data does not change errno, at which OpenSSL looks then. */
static const char *end_keeps_errno(size_t arg)
{
	struct pair p;
	char byte;
	int i;

	(void)arg;
	TRY(connected(&p));
	TRY(nonblocking(p.a));
	ENSURE(!shutdown(p.b, SHUT_WR), "shutdown: %s", strerror(errno));
	for (i = 0; i < 2; i++) {
		struct pollfd ready = { p.a, POLLIN, 0 };

		ENSURE(poll(&ready, 1, LONG_MS) == 1, "the end does not arrive");
		errno = 0;
		ENSURE(read(p.a, &byte, 1) == 0 && errno == 0, "read: %s", strerror(errno));
	}
	return NULL;
}

/* ---------------------------------------------------------------- connections that are not decided yet */

/* Opens a connection whose connecting end the library does not see: it sends no Request, and the accepting end waits for its bytes. */
static const char *plain_peer(struct pair *p)
{
	struct sockaddr_in at;
	int listener;

	TRY(listens(&listener, &at, 0, 0));
	p->a = (int)syscall(SYS_socket, AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(p->a >= 0, "socket: %s", strerror(errno));
	keep_fd(p->a);
	ENSURE(!syscall(SYS_connect, p->a, &at, sizeof at), "connect: %s", strerror(errno));
	p->b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(p->b >= 0, "accept4: %s", strerror(errno));
	keep_fd(p->b);
	return NULL;
}

static const char *peer_resets(const struct pair *p)
{
	struct linger reset = { 1, 0 };

	ENSURE(!syscall(SYS_setsockopt, p->a, SOL_SOCKET, SO_LINGER, &reset, sizeof reset), "SO_LINGER: %s", strerror(errno));
	ENSURE(!syscall(SYS_close, p->a), "close: %s", strerror(errno));
	return NULL;
}

/* Reads a byte. Returns the errno, or 0. */
static void *error_of_read(void *fd)
{
	char c;

	return (void *)(intptr_t)(read(*(int *)fd, &c, 1) < 0 ? errno : 0);
}

enum { IS_INTERRUPTED, HAS_TIME_LIMIT, IS_RESET, IS_POLLED };

/* The first read of an accepted connection ends as the kernel's does, if the peer has sent nothing. */
static const char *first_read(size_t how)
{
	static const int expected[] = { EINTR, EAGAIN, ECONNRESET, ECONNRESET };
	struct pair p;
	pthread_t reader;
	void *result;
	uint64_t start = now_ms();

	TRY(plain_peer(&p));
	TRY(handles(0));
	if (how == HAS_TIME_LIMIT)
		ENSURE(!setsockopt(p.b, SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){ .tv_usec = 400000 }, sizeof(struct timeval)),
		       "setsockopt: %s", strerror(errno));
	if (how == IS_POLLED) {
		struct pollfd ready = { p.b, POLLIN, 0 };

		TRY(peer_resets(&p));
		ENSURE(poll(&ready, 1, LONG_MS) == 1 && ready.revents & POLLERR, "poll reports %#x", ready.revents);
	}
	ENSURE(!pthread_create(&reader, NULL, error_of_read, &p.b), "pthread_create");
	if (how == IS_RESET) {
		sleep_ms(SHORT_MS);
		TRY(peer_resets(&p));
	}
	if (how == IS_INTERRUPTED) {
		sleep_ms(100);
		ENSURE(runs(reader, &result), "read returns without a signal");
		pthread_kill(reader, SIGUSR1);
	}
	TRY(ends(reader, &result));
	ENSURE((intptr_t)result == expected[how], "read: %s", strerror((int)(intptr_t)result));
	ENSURE(how != HAS_TIME_LIMIT || now_ms() - start < 790, "the time limit passes twice");
	return NULL;
}

enum { WRITES_BLOCKING, WRITES_SPINNING, WRITES_LATE };

struct connecting {
	int fd;
	size_t how;
};

/* Writes two words to a connection that TCP is still opening. Returns the errno, or 0. */
static void *write_early(void *arg)
{
	const struct connecting *c = arg;
	uint64_t until = now_ms() + LONG_MS;

	if (c->how == WRITES_LATE) {
		struct pollfd ready = { c->fd, POLLOUT, 0 };

		/* TCP connects meanwhile, and its last acknowledgement is sent without a Request. */
		sleep_ms(1500);
		poll(&ready, 1, LONG_MS);
	}
	while (write(c->fd, "early", 5) != 5)
		if (errno != EAGAIN || now_ms() > until)
			return (void *)(intptr_t)errno;
	return (void *)(intptr_t)(write(c->fd, "later", 5) == 5 ? 0 : errno);
}

/*
 * Programs write to a connection before they know that it is open, and read from one without waiting for bytes. The bytes arrive in order, and
 * nothing else does. The listener has room for one connection, so the next one is opened when TCP repeats its first segment, after a second.
 */
static const char *connects_late(size_t how)
{
	struct connecting c = { .how = how };
	struct sockaddr_in at, own;
	socklen_t len = sizeof own;
	pthread_t writer;
	void *result;
	char word[10];
	size_t done = 0;
	int listener, filler, end;

	at = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(listener >= 0, "socket: %s", strerror(errno));
	keep_fd(listener);
	ENSURE(!bind(listener, (struct sockaddr *)&at, sizeof at) && !listen(listener, 0), "listen: %s", strerror(errno));
	ENSURE(!getsockname(listener, (struct sockaddr *)&at, &len), "getsockname: %s", strerror(errno));
	filler = (int)syscall(SYS_socket, AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(filler >= 0, "socket: %s", strerror(errno));
	keep_fd(filler);
	ENSURE(!syscall(SYS_connect, filler, &at, sizeof at), "connect: %s", strerror(errno));
	c.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(c.fd >= 0, "socket: %s", strerror(errno));
	keep_fd(c.fd);
	if (how == WRITES_BLOCKING) {
		struct timeval soon = { .tv_usec = 20000 }, never = { 0 };

		ENSURE(!setsockopt(c.fd, SOL_SOCKET, SO_SNDTIMEO, &soon, sizeof soon), "SO_SNDTIMEO: %s", strerror(errno));
		ENSURE(connect(c.fd, (struct sockaddr *)&at, sizeof at) < 0 && errno == EINPROGRESS, "connect: %s", strerror(errno));
		ENSURE(!setsockopt(c.fd, SOL_SOCKET, SO_SNDTIMEO, &never, sizeof never), "SO_SNDTIMEO: %s", strerror(errno));
	} else {
		TRY(nonblocking(c.fd));
		ENSURE(connect(c.fd, (struct sockaddr *)&at, sizeof at) < 0 && errno == EINPROGRESS, "connect: %s", strerror(errno));
	}
	len = sizeof own;
	ENSURE(!getsockname(c.fd, (struct sockaddr *)&own, &len), "getsockname: %s", strerror(errno));
	end = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(end >= 0, "accept4: %s", strerror(errno));
	keep_fd(end);
	ENSURE(!pthread_create(&writer, NULL, write_early, &c), "pthread_create");
	end = accept4(listener, (struct sockaddr *)&at, &len, SOCK_CLOEXEC | SOCK_NONBLOCK);
	ENSURE(end >= 0, "accept4: %s", strerror(errno));
	keep_fd(end);
	ENSURE(at.sin_port == own.sin_port, "the listener has accepted another connection");
	for (uint64_t until = now_ms() + LONG_MS; done < sizeof word && now_ms() < until;) {
		ssize_t n = recv(end, word + done, sizeof word - done, 0);

		ENSURE(n > 0 || (n < 0 && errno == EAGAIN), "recv: %zd (%s)", n, strerror(errno));
		done += n > 0 ? (size_t)n : 0;
	}
	TRY(ends(writer, &result));
	ENSURE(result == NULL, "write: %s", strerror((int)(intptr_t)result));
	ENSURE(done == sizeof word && !memcmp(word, "earlylater", sizeof word), "%zu bytes: \"%.*s\"", done, (int)done, word);
	return NULL;
}

/* ---------------------------------------------------------------- the end, for waits without POLLIN */

enum { WITH_HANGUP, WITH_END, WITH_EDGE };

static void *shut_later(void *fd)
{
	sleep_ms(50);
	return (void *)(intptr_t)shutdown(*(int *)fd, SHUT_WR);
}

/* A wait that does not ask for data reports the end behind data that the program has not read. */
static const char *end_behind_data(size_t how)
{
	static char block[60000];
	struct pair p;
	pthread_t thread;
	void *result;
	int set;
	uint32_t wanted = how == WITH_HANGUP ? 0 : how == WITH_END ? EPOLLRDHUP : EPOLLRDHUP | EPOLLET;
	uint32_t found = how == WITH_HANGUP ? EPOLLHUP : EPOLLRDHUP;
	struct pollfd ready;

	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(add(set, p.a, wanted, 1));
	ready = (struct pollfd){ p.a, (short)(wanted & 0xffff), 0 };
	if (how == WITH_HANGUP)
		ENSURE(!shutdown(p.a, SHUT_WR), "shutdown: %s", strerror(errno));
	ENSURE(write(p.b, block, sizeof block) == sizeof block, "write: %s", strerror(errno));
	TRY(is_quiet(set));
	ENSURE(poll(&ready, 1, 0) == 0, "poll reports %#x", ready.revents);
	ENSURE(!pthread_create(&thread, NULL, shut_later, &p.b), "pthread_create");
	TRY(reports(set, found, 1));
	TRY(ends(thread, &result));
	ENSURE(result == NULL, "shutdown fails");
	ENSURE(poll(&ready, 1, LONG_MS) == 1 && (uint32_t)ready.revents == found, "poll reports %#x", ready.revents);
	TRY(take_all(p.a, sizeof block));
	ENSURE(read(p.a, block, 1) == 0, "read: %s", strerror(errno));
	return NULL;
}

/* A program writes to a peer that has closed the connection. Its waits report the reset, the next write fails, and a read returns the end. */
static const char *reset_behind_end(size_t arg)
{
	struct pair p;
	struct pollfd ready;
	char byte;

	(void)arg;
	TRY(connected(&p));
	ENSURE(!close(p.b), "close: %s", strerror(errno));
	ready = (struct pollfd){ p.a, POLLIN, 0 };
	ENSURE(poll(&ready, 1, LONG_MS) == 1 && ready.revents == POLLIN, "poll reports %#x", ready.revents);
	TRY(text(p.a, "x"));
	ready.events = 0;
	ENSURE(poll(&ready, 1, LONG_MS) == 1 && ready.revents == (POLLERR | POLLHUP), "poll reports %#x", ready.revents);
	ENSURE(read(p.a, &byte, 1) == 0, "read: %s", strerror(errno));
	ENSURE(send(p.a, "x", 1, MSG_NOSIGNAL) < 0 && errno == EPIPE, "send: %s", strerror(errno));
	return NULL;
}

/* ---------------------------------------------------------------- further calls */

/* preadv2 and pwritev2 with the offset -1 are like readv and writev. With other offsets they fail on a socket. */
static const char *vectors(size_t arg)
{
	char word[8] = "";
	struct iovec out[2] = { { "ab", 2 }, { "cd", 2 } }, in[2] = { { word, 3 }, { word + 3, 3 } };
	struct pair p;
	ssize_t n;

	(void)arg;
	TRY(connected(&p));
	n = preadv2(p.b, in, 2, -1, RWF_NOWAIT);
	if (n < 0 && errno == EOPNOTSUPP)
		SKIP("the kernel has no RWF_NOWAIT for sockets");
	ENSURE(n < 0 && errno == EAGAIN, "preadv2 of nothing: %zd (%s)", n, strerror(errno));
	ENSURE(pwritev2(p.a, out, 2, -1, 0) == 4, "pwritev2: %s", strerror(errno));
	ENSURE(poll(&(struct pollfd){ .fd = p.b, .events = POLLIN }, 1, LONG_MS) == 1, "poll");
	n = preadv2(p.b, in, 2, -1, 0);
	ENSURE(n == 4 && !memcmp(word, "abcd", 4), "preadv2: %zd \"%.4s\"", n, word);
	ENSURE(preadv2(p.b, in, 2, 0, 0) < 0 && errno == ESPIPE, "preadv2 at 0: %s", strerror(errno));
	ENSURE(pwritev2(p.a, out, 2, 0, 0) < 0 && errno == ESPIPE, "pwritev2 at 0: %s", strerror(errno));
	ENSURE(pwritev2(p.a, out, 2, -1, 0x4000) < 0 && errno == EOPNOTSUPP, "pwritev2 with a wrong flag: %s", strerror(errno));
	TRY(text(p.a, "e"));
	TRY(takes(p.b, "e"));
	return NULL;
}

/* A recv without room waits for a byte and leaves it. A read without room returns at once. */
static const char *reads_nothing(size_t arg)
{
	struct pair p;
	char byte;
	struct iovec list[1025] = { { &byte, 1 } };
	struct msghdr message = { .msg_iov = list, .msg_iovlen = 1025 };
	socklen_t len = 7;

	(void)arg;
	TRY(connected(&p));
	ENSURE(read(p.a, &byte, 0) == 0, "read: %s", strerror(errno));
	ENSURE(recv(p.a, &byte, 0, MSG_DONTWAIT) < 0 && errno == EAGAIN, "recv: %s", strerror(errno));
	ENSURE(recvfrom(p.a, &byte, 1, MSG_DONTWAIT, (struct sockaddr *)list, &len) < 0 && len == 7, "recvfrom: length %u", len);
	ENSURE(recvmsg(p.a, &message, MSG_DONTWAIT) < 0 && errno == EMSGSIZE, "recvmsg: %s", strerror(errno));
	ENSURE(sendmsg(p.a, &message, MSG_DONTWAIT) < 0 && errno == EMSGSIZE, "sendmsg: %s", strerror(errno));
	TRY(text(p.b, "x"));
	ENSURE(recv(p.a, &byte, 0, 0) == 0, "recv: %s", strerror(errno));
	TRY(takes(p.a, "x"));
	ENSURE(!shutdown(p.b, SHUT_WR), "shutdown: %s", strerror(errno));
	ENSURE(recv(p.a, &byte, 0, 0) == 0, "recv at the end: %s", strerror(errno));
	return NULL;
}

/* A pipe cannot be the source of sendfile. Programs that get EINVAL copy the bytes themselves. */
static const char *sends_no_pipe(size_t arg)
{
	struct pair p;
	int ends[2];

	(void)arg;
	TRY(connected(&p));
	ENSURE(!pipe(ends), "pipe: %s", strerror(errno));
	keep_fd(ends[0]);
	keep_fd(ends[1]);
	ENSURE(write(ends[1], "x", 1) == 1, "write: %s", strerror(errno));
	ENSURE(sendfile(p.a, ends[0], NULL, 1) < 0 && errno == EINVAL, "sendfile: %s", strerror(errno));
	return NULL;
}

/* Waits until a stream has room. Returns the events, or -1. */
static void *wait_for_room(void *fd)
{
	struct pollfd p = { .fd = *(int *)fd, .events = POLLOUT };

	return (void *)(intptr_t)(poll(&p, 1, LONG_MS) == 1 ? p.revents : -1);
}

/* A thread waits for room while the peer does not read. Another thread receives meanwhile. */
static const char *reads_beside_waiting_writer(size_t arg)
{
	static char block[1 << 16];
	struct sockaddr_in at;
	size_t sent = 0;
	pthread_t writer;
	int listener;
	struct pair p;
	void *events;
	ssize_t n;

	(void)arg;
	/* With small buffers the kernel's buffers are full before the peer's credit is used up. */
	TRY(listens(&listener, &at, SO_RCVBUF, 1));
	p.a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(p.a >= 0, "socket: %s", strerror(errno));
	keep_fd(p.a);
	ENSURE(!setsockopt(p.a, SOL_SOCKET, SO_SNDBUF, &(int){ 1 }, sizeof(int)), "SO_SNDBUF: %s", strerror(errno));
	ENSURE(!connect(p.a, (struct sockaddr *)&at, sizeof at), "connect: %s", strerror(errno));
	p.b = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(p.b >= 0, "accept4: %s", strerror(errno));
	keep_fd(p.b);
	TRY(greet(&p));
	TRY(nonblocking(p.a));
	while ((n = write(p.a, block, sizeof block)) > 0)
		sent += (size_t)n;
	ENSURE(errno == EAGAIN, "write: %s", strerror(errno));
	ENSURE(!pthread_create(&writer, NULL, wait_for_room, &p.a), "pthread_create");
	sleep_ms(50);
	for (int i = 0; i < 10; i++) {
		TRY(text(p.b, "ab"));
		ENSURE(poll(&(struct pollfd){ .fd = p.a, .events = POLLIN }, 1, 1000) == 1, "what the peer sends does not arrive");
		TRY(takes(p.a, "ab"));
	}
	TRY(take_all(p.b, sent));
	TRY(ends(writer, &events));
	ENSURE((intptr_t)events == POLLOUT, "poll reports %#x", (int)(intptr_t)events);
	return NULL;
}

/* Calls that ask for no bytes or messages do not wait, also on an accepted connection without data. */
static const char *asks_for_nothing(size_t arg)
{
	struct iovec none = { .iov_base = &arg };
	struct timespec wrong = { .tv_sec = -1 }, limit = { .tv_sec = 100, .tv_nsec = 0 };
	char byte;
	struct iovec one = { &byte, 1 };
	struct mmsghdr message = { .msg_hdr = { .msg_iov = &one, .msg_iovlen = 1 } };
	struct pair p;

	TRY(accepted(&p));
	for (int used = 0; used < 2; used++) {
		ENSURE(read(p.b, &byte, 0) == 0, "read: %s", strerror(errno));
		ENSURE(readv(p.b, &none, 1) == 0, "readv: %s", strerror(errno));
		ENSURE(preadv2(p.b, &none, 1, -1, 0) == 0, "preadv2: %s", strerror(errno));
		ENSURE(pwritev2(p.b, &none, 1, -1, 0) == 0, "pwritev2: %s", strerror(errno));
		ENSURE(writev(p.b, &none, 1) == 0, "writev: %s", strerror(errno));
		ENSURE(recvmmsg(p.b, NULL, 0, 0, NULL) == 0, "recvmmsg: %s", strerror(errno));
		ENSURE(sendmmsg(p.b, NULL, 0, 0) == 0, "sendmmsg: %s", strerror(errno));
		ENSURE(recvmmsg(p.b, &message, 1, 0, &wrong) < 0 && errno == EINVAL, "a negative time limit: %s", strerror(errno));
		if (!used)
			TRY(greet(&p));
	}
	TRY(text(p.a, "x"));
	ENSURE(recvmmsg(p.b, &message, 1, 0, &limit) == 1 && byte == 'x', "recvmmsg: %s", strerror(errno));
	ENSURE(limit.tv_sec == 99, "recvmmsg does not store the time that is left");
	return NULL;
}

/* A member cannot be changed with EPOLLEXCLUSIVE or to it, but be added again with it. */
static const char *exclusive_member(size_t arg)
{
	struct pair p;
	int set, e;

	(void)arg;
	TRY(connected(&p));
	TRY(new_set(&set));
	TRY(add(set, p.b, EPOLLIN, 1));
	TRY(drop(set, p.b));
	TRY(add(set, p.b, EPOLLIN | EPOLLEXCLUSIVE, 2));
	e = control(set, EPOLL_CTL_MOD, p.b, EPOLLIN | EPOLLEXCLUSIVE, 2);
	ENSURE(e == EINVAL, "EPOLL_CTL_MOD: %s", strerror(e));
	TRY(text(p.a, "ab"));
	TRY(reports(set, EPOLLIN, 2));
	return takes(p.b, "ab");
}

/* An accepting end that sets an option which makes its connection plain greets at once. `polls`: the other end waits before it reads. */
static const char *greets_with_option(size_t polls)
{
	uint64_t start = now_ms();

	for (int i = 0; i < 10; i++) {
		struct pair p;

		TRY(accepted(&p));
		ENSURE(!setsockopt(p.b, SOL_SOCKET, SO_OOBINLINE, &(int){ 1 }, sizeof(int)), "SO_OOBINLINE: %s", strerror(errno));
		TRY(text(p.b, "hello"));
		if (polls)
			ENSURE(poll(&(struct pollfd){ .fd = p.a, .events = POLLIN }, 1, LONG_MS) == 1, "nothing arrives");
		TRY(takes(p.a, "hello"));
	}
	/* If each greeting waits for a delayed acknowledgement, these are 40 ms each. */
	ENSURE(now_ms() - start < 200, "10 greetings take %llu ms", (unsigned long long)(now_ms() - start));
	return NULL;
}

/* Options that streams do not have are refused on sockets whose connections may become streams. */
static const char *refused_before_use(size_t arg)
{
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1, expected = getenv("SOCKETS_UPGRADED") ? ENOPROTOOPT : 0;
	struct sockaddr_in at;
	int listener, e;

	(void)arg;
	ENSURE(fd >= 0, "socket: %s", strerror(errno));
	keep_fd(fd);
	TRY(listens(&listener, &at, 0, 0));
	e = setsockopt(fd, IPPROTO_TCP, TCP_INQ, &on, sizeof on) ? errno : 0;
	ENSURE(e == expected, "TCP_INQ: %s", strerror(e));
	e = setsockopt(listener, IPPROTO_TCP, TCP_INQ, &on, sizeof on) ? errno : 0;
	ENSURE(e == expected, "TCP_INQ on a listener: %s", strerror(e));
	e = setsockopt(listener, SOL_SOCKET, SO_PEEK_OFF, &on, sizeof on) ? errno : 0;
	ENSURE(!expected || e == expected, "SO_PEEK_OFF on a listener: %s", strerror(e));
	return NULL;
}

/* SO_PEEK_OFF: each read with MSG_PEEK continues behind the last one. */
static const char *peeks_on(size_t arg)
{
	struct pair p;
	char word[4];
	int at = 0;

	(void)arg;
	TRY(accepted(&p));
	if (setsockopt(p.b, SOL_SOCKET, SO_PEEK_OFF, &at, sizeof at))
		SKIP("the kernel has no SO_PEEK_OFF for TCP");
	TRY(text(p.a, "abcd"));
	ENSURE(recv(p.b, word, 2, MSG_PEEK) == 2 && !memcmp(word, "ab", 2), "recv");
	ENSURE(recv(p.b, word, 2, MSG_PEEK) == 2 && !memcmp(word, "cd", 2), "the second recv returns \"%.2s\"", word);
	TRY(takes(p.b, "abcd"));
	return NULL;
}

/* If a wait reports an event, a signal that only the wait permits stays pending. */
static const char *signal_stays_pending(size_t arg)
{
	struct pair p;
	struct pollfd ready;
	struct epoll_event e;
	sigset_t none, usr, before, pending;
	char byte;
	int set, n, m;

	(void)arg;
	TRY(connected(&p));
	TRY(handles(0));
	TRY(new_set(&set));
	TRY(add(set, p.a, EPOLLIN, 1));
	TRY(text(p.b, "xy"));
	TRY(reports(set, EPOLLIN, 1));
	TRY(takes(p.a, "x"));
	sigemptyset(&none);
	sigemptyset(&usr);
	sigaddset(&usr, SIGUSR1);
	ENSURE(!pthread_sigmask(SIG_BLOCK, &usr, &before) && !raise(SIGUSR1), "raise: %s", strerror(errno));
	ready = (struct pollfd){ p.a, POLLIN, 0 };
	n = ppoll(&ready, 1, NULL, &none);
	m = epoll_pwait(set, &e, 1, -1, &none);
	sigpending(&pending);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	ENSURE(n == 1 && m == 1, "ppoll returns %d, and epoll_pwait %d", n, m);
	ENSURE(sigismember(&pending, SIGUSR1), "the signal does not stay pending");
	ENSURE(read(p.a, &byte, 1) == 1, "read: %s", strerror(errno));
	return NULL;
}

static const struct test tests[] = {
	{ "is_upgraded", is_upgraded, 0, 0, false },
	{ "level", level, 0, 0, false },
	{ "edge", edge, 0, 0, false },
	{ "one_shot", one_shot, 0, 0, false },
	{ "removed", removed, 0, 0, false },
	{ "not_waited_for", not_waited_for, 0, 0, false },
	{ "not_waited_for_out", not_waited_for, 1, 0, false },
	{ "room", room, 0, 0, false },
	{ "room_edge", room, EPOLLET, 0, false },
	{ "room_one_shot", room, EPOLLONESHOT, 0, false },
	{ "two_sets", two_sets, 0, 0, false },
	{ "two_sets_report", reported_twice, TWO_SETS, 0, false },
	{ "two_sets_report_room", reported_twice, TWO_SETS_OUT, 0, false },
	{ "poll_and_set_report", reported_twice, POLL_AND_SET, 0, false },
	{ "poll_and_set_report_end", reported_twice, POLL_AND_SET_END, 0, false },
	{ "poll_and_set_report_room", reported_twice, POLL_AND_SET_OUT, 0, false },
	{ "same_data", same_data, 0, 0, false },
	{ "closed", closed, 0, 0, false },
	{ "added_before", added_before, 0, 0, false },
	{ "added_before_edge", added_before, 1, 0, false },
	{ "closed_by_both", closed_by_both, 0, 0, false },
	{ "closed_by_both_late", closed_by_both, 1, 0, false },
	{ "ends_without_data", ends_behind_data, 0, 0, false },
	{ "ends_behind_data", ends_behind_data, 10, 0, false },
	{ "ends_behind_much_data", ends_behind_data, 100000, 0, false },
	{ "ends_at_once", ends_at_once, 0, 0, false },
	{ "copied_set", copied_set, 0, 0, false },
	{ "room_behind_unread_data", event_behind_data, LIMIT, 0, false },
	{ "room_behind_unread_data_before", room_behind_unread_data_before, 0, 0, false },
	{ "urgent_behind_unread_data", event_behind_data, URGENT, 0, false },
	{ "closed_before_use", closed_before_use, CLOSED_AT_ONCE, 0, false },
	{ "closed_before_use_by_exit", closed_before_use, CLOSED_BY_EXIT, 0, false },
	{ "closed_before_use_in_set", closed_before_use, CLOSED_AFTER_ADDED, 0, false },
	{ "closed_copy", closed, 1, 0, false },
	{ "nested", nested, 0, 0, false },
	{ "woken", woken, 0, 0, false },
	{ "polls", polls, 0, 0, false },
	{ "selects", selects, 0, 0, false },
	{ "select_interrupted", select_interrupted, 0, 0, false },
	{ "refuses_times", refuses_times, 0, 0, false },
	{ "reads", reads, 0, 0, false },
	{ "times_out", times_out, 0, 0, false },
	{ "half_closed", half_closed, 0, 0, false },
	{ "half_closed_reply", half_closed_reply, 0, 0, false },
	{ "writable_does_not_block", writable_does_not_block, 0, 0, false },
	{ "both_ways", both_ways, 0, 0, false },
	{ "mixed_reads", mixed_reads, 0, 0, false },
	{ "low_water", low_water, 0, 0, false },
	{ "low_water_later", low_water_later, 0, 0, false },
	{ "urgent", urgent, 0, 0, false },
	{ "urgent_mark", urgent_mark, SKIPPED_BYTE, 0, false },
	{ "urgent_mark_inline", urgent_mark, INLINE, 0, false },
	{ "urgent_alone", urgent_alone, 0, 0, false },
	{ "urgent_at_once", urgent_at_once, 0, 0, false },
	{ "urgent_at_once_refused", urgent_at_once, 1, 0, false },
	{ "two_readers", two_readers, 64000, 0, false },
	{ "two_readers_short", two_readers, 10, 0, false },
	{ "many_readers", many_readers, 0, 0, false },
	{ "many_pollers", many_readers, 1, 0, false },
	{ "short_writes_block", short_writes_block, 0, 0, false },
	{ "corked", corked, 0, 0, false },
	{ "corked_parent_closes", corked_fork, PARENT_CLOSES, 0, false },
	{ "corked_child_answers", corked_fork, CHILD_ANSWERS, 0, false },
	{ "corked_child_reads", corked_fork, CHILD_READS, 0, false },
	{ "corked_child_waits", corked_fork, CHILD_WAITS, 0, false },
	{ "corked_exit", corked_end, 0, 0, false },
	{ "corked_exec", corked_end, EXECV, 0, false },
	{ "corked_execl", corked_end, EXECL, 0, false },
	{ "corked_execlp", corked_end, EXECLP, 0, false },
	{ "corked_execle", corked_end, EXECLE, 0, false },
	{ "corked_copy", corked_copy, 0, 0, false },
	{ "writes_to_the_dead", writes_to_the_dead, 0, 0, false },
	{ "one_signal", one_signal, 100, 0, false },
	{ "one_signal_during_a_write", one_signal, 1 << 20, 0, false },
	{ "reads_from_the_dead", reads_from_the_dead, 16382, 0, false },
	{ "reads_from_the_closed", reads_from_the_dead, 16382 | CLOSES, 0, false },
	{ "reads_small_from_the_dead", reads_from_the_dead, 16000 | SMALL, 0, false },
	{ "reads_late_from_the_dead", reads_from_the_dead, 16000 | SMALL | LATE, 0, false },
	{ "reads_from_the_dead_heir", reads_from_the_dead, 16382 | INHERITS, 0, false },
	{ "reads_small_from_the_dead_heir", reads_from_the_dead, 16000 | SMALL | INHERITS, 0, false },
	{ "reads_late_from_the_dead_heir", reads_from_the_dead, 16000 | SMALL | LATE | INHERITS, 0, false },
	{ "reads_more_from_the_dead_heir", reads_from_the_dead, 200000 | INHERITS, 0, false },
	{ "ends_while_used", ends_while_used, 0, 0, false },
	{ "reads_small_from_the_closed", reads_from_the_dead, 16000 | SMALL | CLOSES, 0, false },
	{ "reads_from_the_reset", reads_from_the_dead, 16382 | RESETS, 0, false },
	{ "reads_more_from_the_dead", reads_from_the_dead, 200000, 0, false },
	{ "reads_more_from_the_closed", reads_from_the_dead, 200000 | CLOSES, 0, false },
	{ "reads_with_a_full_buffer", reads_with_a_full_buffer, 0, 0, false },
	{ "bursts_blocking", bursts, BLOCKS, 0, false },
	{ "bursts_all", bursts, WAITS_FOR_ALL, 0, false },
	{ "bursts_polled", bursts, POLLS, 0, false },
	{ "bursts_peeked", bursts, PEEKS, 0, false },
	{ "bursts_available", bursts, ASKS, 0, false },
	{ "bursts_level", bursts, LEVEL, 0, false },
	{ "bursts_edge", bursts, EDGE, 0, false },
	{ "bursts_edge_short", bursts, EDGE_SHORT, 0, false },
	{ "bursts_signalled", bursts, SIGNALLED, 0, false },
	{ "room_behind_data", room_behind_data, 0, 0, false },
	{ "available", available, 0, 0, false },
	{ "short_error_0", short_error, 0, 0, false },
	{ "short_error_1", short_error, 1, 0, false },
	{ "short_error_4", short_error, 4, 0, false },
	{ "read_and_polled", read_and_polled, 0, 0, false },
	{ "polled_after_read", polled_after_read, 0, 0, false },
	{ "cancelled_read", cancelled, 0, 0, false },
	{ "shut_down_wakes_read", shut_down_wakes, 0, 0, false },
	{ "shut_down_wakes_read_both", shut_down_wakes, SHUT_BOTH, 0, false },
	{ "shut_down_wakes_poll", shut_down_wakes, WITH_POLL, 0, false },
	{ "shut_down_wakes_poll_both", shut_down_wakes, WITH_POLL | SHUT_BOTH, 0, false },
	{ "closed_while_read", closed_while_read, 0, 0, false },
	{ "closed_while_read_upgraded", closed_while_read, 1, 0, false },
	{ "discards", discards, 0, 0, false },
	{ "several_reads", several_reads, 0, 0, false },
	{ "blocked_write_times_out", blocked_write_ends, TIME_LIMIT, 0, false },
	{ "blocked_write_interrupted", blocked_write_ends, SIGNAL, 0, false },
	{ "blocked_write_restarts", blocked_write_ends, SIGNAL_THAT_RESTARTS, 0, false },
	{ "reads_restart", reads_restart, 0, 0, false },
	{ "jumps_from_read", jumps, 0, 0, false },
	{ "jumps_from_poll", jumps, 1, 0, false },
	{ "both_send", both_send, 0, 0, false },
	{ "exits_before_accept", ends_before_accept, EXITS, 0, false },
	{ "closes_before_accept", ends_before_accept, CLOSES_FIRST, 0, false },
	{ "executes_before_accept", ends_before_accept, EXECUTES, 0, false },
	{ "passed_on_by_execl", passed_on, BY_EXECL, 0, false },
	{ "passed_on_by_execlp", passed_on, BY_EXECLP, 0, false },
	{ "passed_on_by_execle", passed_on, BY_EXECLE, 0, false },
	{ "passed_on_by_spawn", passed_on, BY_SPAWN, 0, false },
	{ "passed_on_by_spawnp", passed_on, BY_SPAWNP, 0, false },
	{ "passed_on_by_spawn_dup", passed_on, BY_SPAWN_DUP, 0, false },
	{ "passed_on_by_spawn_dup_9", passed_on, BY_SPAWN_DUP_9, 0, false },
	{ "passed_on_after_urgent", passed_on, BY_SPAWN_DUP_URGENT, 0, false },
	{ "spawn_beside_stream", spawn_beside_stream, true, 0, false },
	{ "spawn_before_first_use", spawn_beside_stream, false, 0, false },
	{ "closed_during_spawn", closed_during_spawn, 0, 0, false },
	{ "cancelled_poll", cancelled, 1, 0, false },
	{ "cancelled_write", cancelled_write, 0, 0, false },
	{ "child_closes_set", child_closes, CLOSES_SET, 0, false },
	{ "child_closes_stream", child_closes, CLOSES_STREAM, 0, false },
	{ "child_closes_all", child_closes, CLOSES_ALL, 0, false },
	{ "child_closes_listener", child_closes, CLOSES_LISTENER, 0, false },
	{ "closed_before_fork", closed_before_fork, 0, 0, false },
	{ "removed_before_fork", removed_before_fork, 0, 0, false },
	{ "child_only_waits", child_only_waits, 0, 0, false },
	{ "child_only_waits_with_data", child_only_waits, 1, 0, false },
	{ "shares_turns", shares_turns, 1, 0, false },
	{ "shares_turns_8", shares_turns, 8, 0, false },
	{ "closes_all_numbers", closes_all_numbers, 0, 0, false },
	{ "replaces_all_numbers", closes_all_numbers, 1, 0, false },
	{ "not_replaced", not_replaced, 0, 0, false },
	{ "connects_again", connects_again, 0, 0, false },
	{ "connects_again_with_a_copy", connects_again, WITH_COPY, 0, false },
	{ "connects_again_with_unread_data", connects_again, UNREAD, 0, false },
	{ "connects_again_in_a_set", connects_again, IN_SET, 0, false },
	{ "connects_again_beside_a_reader", connects_again, BESIDE_READER, 0, false },
	{ "connects_again_beside_both", connects_again, BESIDE_READER | BESIDE_WRITER, 0, false },
	{ "former_connection_read", former_connection, 0, 0, false },
	{ "former_connection_written", former_connection, 1, 0, false },
	{ "accepted_by_copy", accepted_by_copy, AFTER_LISTEN, 0, false },
	{ "accepted_by_copy_before_listen", accepted_by_copy, BEFORE_LISTEN, 0, false },
	{ "accepted_by_copy_only", accepted_by_copy, ORIGINAL_CLOSED, 0, false },
	{ "copied_before_connect", copied_before_connect, 0, 0, false },
	{ "stdio", stdio, IN_USE, 0, false },
	{ "stdio_undecided", stdio, UNDECIDED, 0, false },
	{ "stdio_both", stdio_both, 0, 0, false },
	{ "prints", prints, 0, 0, false },
	{ "prints_to_standard_output", prints_to_standard_output, 0, 0, false },
	{ "closed_by_syscall", closed_by_syscall, 0, 0, false },
	{ "closed_by_syscall_of_a_range", closed_by_syscall, 1, 0, false },
	{ "replaced_unseen", replaced_unseen, 0, 0, false },
	{ "replaced_unseen_lists", replaced_unseen, 1, 0, false },
	{ "end_keeps_errno", end_keeps_errno, 0, 0, false },
	{ "reads_beside_waiting_writer", reads_beside_waiting_writer, 0, 0, false },
	{ "asks_for_nothing", asks_for_nothing, 0, 0, false },
	{ "exclusive_member", exclusive_member, 0, 0, false },
	{ "greets_with_option", greets_with_option, 0, 0, false },
	{ "greets_with_option_polled", greets_with_option, 1, 0, false },
	{ "refused_before_use", refused_before_use, 0, 0, false },
	{ "wrong_addresses", wrong_addresses, 0, 0, false },
	{ "reset_before_use", reset_before_use, 0, 0, false },
	{ "reset_before_use_with_data", reset_before_use, WRITES, 0, false },
	{ "reset_before_use_by_acceptor", reset_before_use, ACCEPTED, 0, false },
	{ "reset_before_use_by_acceptor_with_data", reset_before_use, ACCEPTED | WRITES, 0, false },
	{ "reset_before_use_undecided", reset_before_use, ACCEPTED | READS_FIRST, 0, false },
	{ "first_read_interrupted", first_read, IS_INTERRUPTED, 0, false },
	{ "first_read_times_out", first_read, HAS_TIME_LIMIT, 0, false },
	{ "first_read_reset", first_read, IS_RESET, 0, false },
	{ "first_read_reset_polled", first_read, IS_POLLED, 0, false },
	{ "connects_late_blocking", connects_late, WRITES_BLOCKING, 0, false },
	{ "connects_late_spinning", connects_late, WRITES_SPINNING, 0, false },
	{ "connects_late_polling", connects_late, WRITES_LATE, 0, false },
	{ "hangup_behind_data", end_behind_data, WITH_HANGUP, 0, false },
	{ "end_behind_data", end_behind_data, WITH_END, 0, false },
	{ "end_behind_data_edge", end_behind_data, WITH_EDGE, 0, false },
	{ "reset_behind_end", reset_behind_end, 0, 0, false },
	{ "vectors", vectors, 0, 0, false },
	{ "reads_nothing", reads_nothing, 0, 0, false },
	{ "sends_no_pipe", sends_no_pipe, 0, 0, false },
	{ "peeks_on", peeks_on, 0, 0, false },
	{ "signal_stays_pending", signal_stays_pending, 0, 0, false },
};

int main(int argc, char **argv)
{
	signal(SIGPIPE, SIG_IGN);
	return run_tests(tests, COUNT(tests), argc, argv);
}
