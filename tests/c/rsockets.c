/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Sockets over RDMA (rdma/rsocket.h): streams, datagrams, mapped memory, rpoll, and peers that die or violate the
 * protocol.
 *
 * Both ends are in this process, except in the tests that kill a peer and in `requests_that_wait`. Their address is TEST_ADDR or
 * 127.0.0.1 with IPv4, and ::1 with IPv6.
 */
#include "ends.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <rdma/rsocket.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

#define BIG (4u << 20)

static int listener = -1, near = -1, far = -1;

static int close_socket(void *p)
{
	int *fd = p, rc = *fd < 0 ? 0 : rclose(*fd);

	*fd = -1;
	return rc;
}

/* The address of the ends, with this port. */
static struct sockaddr_storage address(bool v6, uint16_t port, socklen_t *len)
{
	const char *host = getenv("TEST_ADDR");
	struct sockaddr_storage s = { 0 };

	if (v6) {
		struct sockaddr_in6 *a = (struct sockaddr_in6 *)&s;

		a->sin6_family = AF_INET6;
		a->sin6_port = htons(port);
		a->sin6_addr = in6addr_loopback;
		*len = sizeof *a;
	} else {
		struct sockaddr_in *a = (struct sockaddr_in *)&s;

		a->sin_family = AF_INET;
		a->sin_port = htons(port);
		inet_pton(AF_INET, host ? host : "127.0.0.1", &a->sin_addr);
		*len = sizeof *a;
	}
	return s;
}

static uint16_t port_of(int fd)
{
	struct sockaddr_in6 a = { 0 };
	socklen_t len = sizeof a;

	return rgetsockname(fd, (struct sockaddr *)&a, &len) ? 0 : ntohs(a.sin6_port);
}

/* Opens a stream listener or a datagram socket at a free port. */
static const char *bound(int *fd, bool v6, int type)
{
	socklen_t len;
	struct sockaddr_storage a = address(v6, 0, &len);

	*fd = rsocket(v6 ? AF_INET6 : AF_INET, type, 0);
	ENSURE(*fd >= 0, "rsocket: %s", strerror(errno));
	keep(close_socket, fd, "socket");
	ENSURE(!rbind(*fd, (struct sockaddr *)&a, len), "rbind: %s", strerror(errno));
	ENSURE(port_of(*fd), "the bound socket has no port");
	if (type == SOCK_STREAM)
		ENSURE(!rlisten(*fd, 8), "rlisten: %s", strerror(errno));
	return NULL;
}

static int reach(int fd, bool v6, uint16_t port)
{
	socklen_t len;
	struct sockaddr_storage a = address(v6, port, &len);

	return rconnect(fd, (struct sockaddr *)&a, len);
}

/* Connects two ends of a stream. rconnect does not wait for raccept. */
static const char *stream_pair(bool v6, int mappings)
{
	TRY(bound(&listener, v6, SOCK_STREAM));
	near = rsocket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM, 0);
	ENSURE(near >= 0, "rsocket: %s", strerror(errno));
	keep(close_socket, &near, "near");
	if (mappings) {
		ENSURE(!rsetsockopt(near, SOL_RDMA, RDMA_IOMAPSIZE, &mappings, sizeof mappings), "RDMA_IOMAPSIZE");
		ENSURE(!rsetsockopt(listener, SOL_RDMA, RDMA_IOMAPSIZE, &mappings, sizeof mappings), "RDMA_IOMAPSIZE");
	}
	ENSURE(!reach(near, v6, port_of(listener)), "rconnect: %s", strerror(errno));
	far = raccept(listener, NULL, NULL);
	ENSURE(far >= 0, "raccept: %s", strerror(errno));
	keep(close_socket, &far, "far");
	return NULL;
}

static void pattern(unsigned char *p, size_t n, unsigned int seed)
{
	for (size_t i = 0; i < n; i++)
		p[i] = (unsigned char)((i * 31 + i / 253) ^ seed);
}

static const char *send_all(int fd, const void *p, size_t n)
{
	ssize_t sent = rsend(fd, p, n, 0);

	ENSURE(sent == (ssize_t)n, "rsend of %zu returns %zd: %s", n, sent, strerror(errno));
	return NULL;
}

static const char *expect(int fd, const void *p, size_t n)
{
	static unsigned char got[BIG];
	ssize_t r = rrecv(fd, got, n, MSG_WAITALL);

	ENSURE(r == (ssize_t)n, "rrecv of %zu returns %zd: %s", n, r, strerror(errno));
	ENSURE(!memcmp(got, p, n), "the received bytes differ");
	return NULL;
}

static const char *ends_of_a_stream(size_t v6)
{
	struct sockaddr_in6 a = { 0 }, b = { 0 };
	socklen_t len = sizeof a, cut = 2;

	TRY(stream_pair(v6, 0));
	TRY(send_all(near, "ping", 4));
	TRY(expect(far, "ping", 4));
	TRY(send_all(far, "pong!", 5));
	TRY(expect(near, "pong!", 5));
	ENSURE(!rgetpeername(near, (struct sockaddr *)&a, &len), "rgetpeername: %s", strerror(errno));
	ENSURE(len == (v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in)), "the peer's name has a length of %u", len);
	ENSURE(!rgetsockname(far, (struct sockaddr *)&b, &len) && !memcmp(&a, &b, len),
	       "the far end has another name than the peer of the near end");
	ENSURE(!rgetsockname(near, NULL, &cut) && cut == len, "rgetsockname without an address gives a length of %u", cut);
	ENSURE(rgetpeername(listener, (struct sockaddr *)&a, &len) && errno == ENOTCONN, "a listener has a peer");
	ENSURE(reach(near, v6, port_of(listener)) && errno == EISCONN, "a second rconnect: %s", strerror(errno));
	return NULL;
}

static void *echo(void *arg)
{
	static unsigned char buf[70000];
	int fd = *(int *)arg;
	ssize_t n;

	while ((n = rrecv(fd, buf, sizeof buf, 0)) > 0)
		if (rsend(fd, buf, (size_t)n, 0) != n)
			break;
	return (void *)(intptr_t)n;
}

struct flow {
	int fd;
	const char *reason;
};

static unsigned char big[BIG];

static void *push(void *arg)
{
	struct flow *flow = arg;

	flow->reason = send_all(flow->fd, big, sizeof big);
	return NULL;
}

/* Data in both directions at once, more than any buffer holds. */
static const char *both_ways(size_t small)
{
	static struct flow flow;
	pthread_t echoes, pushes;
	void *last;
	int size = 5000;

	TRY(bound(&listener, false, SOCK_STREAM));
	near = rsocket(AF_INET, SOCK_STREAM, 0);
	keep(close_socket, &near, "near");
	if (small) {
		ENSURE(!rsetsockopt(near, SOL_SOCKET, SO_SNDBUF, &size, sizeof size), "SO_SNDBUF");
		ENSURE(!rsetsockopt(near, SOL_SOCKET, SO_RCVBUF, &size, sizeof size), "SO_RCVBUF");
		size = 16;
		ENSURE(!rsetsockopt(near, SOL_RDMA, RDMA_SQSIZE, &size, sizeof size), "RDMA_SQSIZE");
		ENSURE(!rsetsockopt(listener, SOL_RDMA, RDMA_RQSIZE, &size, sizeof size), "RDMA_RQSIZE");
	}
	ENSURE(!reach(near, false, port_of(listener)), "rconnect: %s", strerror(errno));
	far = raccept(listener, NULL, NULL);
	ENSURE(far >= 0, "raccept: %s", strerror(errno));
	keep(close_socket, &far, "far");
	pattern(big, sizeof big, 7);
	flow = (struct flow){ near, NULL };
	ENSURE(!pthread_create(&echoes, NULL, echo, &far) && !pthread_create(&pushes, NULL, push, &flow),
	       "pthread_create fails");
	TRY(expect(near, big, sizeof big));
	pthread_join(pushes, NULL);
	TRY(flow.reason);
	ENSURE(!rshutdown(near, SHUT_WR), "rshutdown: %s", strerror(errno));
	pthread_join(echoes, &last);
	ENSURE(!last, "the echo ends with %ld", (long)(intptr_t)last);
	return NULL;
}

static const char *one_after_the_other(size_t unused UNUSED)
{
	char buf[64];
	struct iovec out[3] = { { "ab", 2 }, { "", 0 }, { "cdef", 4 } }, in[2] = { { buf, 1 }, { buf + 10, 9 } };

	TRY(stream_pair(false, 0));
	ENSURE(rwritev(near, out, 3) == 6, "rwritev: %s", strerror(errno));
	ENSURE(rrecv(far, buf, 3, MSG_PEEK) == 3 && !memcmp(buf, "abc", 3), "MSG_PEEK reads other bytes than were sent");
	ENSURE(rreadv(far, in, 2) == 6 && buf[0] == 'a' && !memcmp(buf + 10, "bcdef", 5),
	       "rreadv reads other bytes than were sent");
	ENSURE(rrecv(far, buf, sizeof buf, MSG_DONTWAIT) == -1 && errno == EAGAIN, "rrecv does not fail with EAGAIN");
	ENSURE(rread(far, NULL, 5) == -1 && errno == EFAULT, "rread without a buffer does not fail with EFAULT");
	/* Many more messages than the 384 credits of a socket. At most 150 wait to be read, so that no send waits for credits. */
	for (int i = 0; i < 3000; i++) {
		char byte = (char)i;

		TRY(send_all(near, &byte, 1));
		if (i % 150 == 149)
			for (int j = i - 149; j <= i; j++) {
				ENSURE(rread(far, &byte, 1) == 1 && byte == (char)j, "byte %d is another one, or missing", j);
			}
	}
	return NULL;
}

static const char *no_waiting(size_t unused UNUSED)
{
	struct pollfd p[2];
	int made[2], error = -1;
	socklen_t len = sizeof error;
	size_t sent = 0, got = 0;
	ssize_t n;

	TRY(bound(&listener, false, SOCK_STREAM));
	ENSURE(!rfcntl(listener, F_SETFL, O_NONBLOCK), "F_SETFL");
	ENSURE(rfcntl(listener, F_GETFL) & O_NONBLOCK, "F_GETFL");
	ENSURE(raccept(listener, NULL, NULL) == -1 && errno == EAGAIN, "raccept: %s", strerror(errno));
	near = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	keep(close_socket, &near, "near");
	n = reach(near, false, port_of(listener));
	ENSURE(!n || errno == EINPROGRESS, "rconnect: %s", strerror(errno));
	p[0] = (struct pollfd){ near, POLLOUT, 0 };
	ENSURE(rpoll(p, 1, WAIT_MS) == 1 && p[0].revents == POLLOUT, "events %#x after rconnect", (unsigned int)p[0].revents);
	ENSURE(!rgetsockopt(near, SOL_SOCKET, SO_ERROR, &error, &len) && !error, "SO_ERROR after rconnect: %d", error);
	p[0] = (struct pollfd){ listener, POLLIN, 0 };
	ENSURE(rpoll(p, 1, WAIT_MS) == 1, "the listener does not become readable");
	far = raccept(listener, NULL, NULL);
	ENSURE(far >= 0, "raccept: %s", strerror(errno));
	keep(close_socket, &far, "far");
	p[0] = (struct pollfd){ far, POLLIN | POLLOUT, 0 };
	ENSURE(rpoll(p, 1, 0) == 1 && p[0].revents == POLLOUT, "events %#x of an accepted socket", (unsigned int)p[0].revents);
	/* Writes until the buffers are full, then reads until they are empty. */
	pattern(big, sizeof big, 1);
	while ((n = rsend(near, big + sent, sizeof big - sent, 0)) > 0)
		sent += (size_t)n;
	ENSURE(n == -1 && errno == EAGAIN && sent > 1000 && sent < sizeof big, "rsend to a full socket, after %zu bytes: %s", sent,
	       strerror(errno));
	p[0] = (struct pollfd){ near, POLLOUT, 0 };
	ENSURE(rpoll(p, 1, 20) == 0, "a full socket is writable");
	while (got < sent) {
		static unsigned char part[10000];

		n = rrecv(far, part, sizeof part, 0);
		ENSURE(n > 0 && !memcmp(part, big + got, (size_t)n),
		       "rrecv returns %zd after %zu bytes, or other bytes", n, got);
		got += (size_t)n;
	}
	ENSURE(rpoll(p, 1, WAIT_MS) == 1 && p[0].revents == POLLOUT, "an empty socket is not writable");
	/* rpoll waits for a socket and a pipe together. */
	ENSURE(!pipe(made), "pipe");
	p[0] = (struct pollfd){ far, POLLIN, 0 };
	p[1] = (struct pollfd){ made[0], POLLIN, 0 };
	ENSURE(rpoll(p, 2, 10) == 0, "a descriptor without data is ready");
	ENSURE(write(made[1], "x", 1) == 1, "write");
	ENSURE(rpoll(p, 2, -1) == 1 && !p[0].revents && p[1].revents == POLLIN,
	       "events %#x of the socket, and %#x of the readable pipe", (unsigned int)p[0].revents, (unsigned int)p[1].revents);
	TRY(send_all(near, "y", 1));
	ENSURE(rpoll(p, 2, -1) >= 1, "rpoll finds no readable descriptor");
	close(made[0]);
	close(made[1]);
	return NULL;
}

static const char *select_sets(size_t unused UNUSED)
{
	struct timeval t = { 0, 20000 };
	fd_set in, out;
	int top;

	TRY(stream_pair(false, 0));
	top = (near > far ? near : far) + 1;
	FD_ZERO(&in);
	FD_SET(far, &in);
	ENSURE(rselect(top, &in, NULL, NULL, &t) == 0 && !FD_ISSET(far, &in), "a socket without data is readable");
	TRY(send_all(near, "x", 1));
	FD_SET(far, &in);
	FD_ZERO(&out);
	FD_SET(near, &out);
	ENSURE(rselect(top, &in, &out, NULL, NULL) >= 1, "rselect: %s", strerror(errno));
	ENSURE(FD_ISSET(near, &out), "a socket with free buffers is not writable");
	return NULL;
}

static const char *no_listener(size_t unused UNUSED)
{
	uint16_t port;
	char byte;

	TRY(bound(&listener, false, SOCK_STREAM));
	port = port_of(listener);
	ENSURE(!close_socket(&listener), "rclose");
	near = rsocket(AF_INET, SOCK_STREAM, 0);
	keep(close_socket, &near, "near");
	ENSURE(rrecv(near, &byte, 1, 0) == -1 && errno == ENOTCONN, "rrecv of a socket that is not connected: %s", strerror(errno));
	ENSURE(reach(near, false, port) == -1 && errno == ECONNREFUSED, "rconnect: %s", strerror(errno));
	ENSURE(rsend(near, &byte, 1, 0) == -1, "a send after a refused rconnect succeeds");
	return NULL;
}

static const char *half_closed(size_t unused UNUSED)
{
	struct pollfd p;
	char byte;

	TRY(stream_pair(false, 0));
	TRY(send_all(near, "last", 4));
	ENSURE(!rshutdown(near, SHUT_WR), "rshutdown: %s", strerror(errno));
	ENSURE(rsend(near, "x", 1, 0) == -1 && errno == EPIPE, "a send after the shutdown succeeds");
	TRY(expect(far, "last", 4));
	ENSURE(rrecv(far, &byte, 1, 0) == 0, "rrecv after the peer's rshutdown does not return 0: %s", strerror(errno));
	p = (struct pollfd){ far, POLLIN, 0 };
	ENSURE(rpoll(&p, 1, 0) == 1 && p.revents == POLLIN, "events %#x after the peer's rshutdown", (unsigned int)p.revents);
	/* The other direction still works. */
	TRY(send_all(far, "answer", 6));
	ENSURE(!rshutdown(far, SHUT_WR), "rshutdown: %s", strerror(errno));
	TRY(expect(near, "answer", 6));
	ENSURE(rrecv(near, &byte, 1, 0) == 0, "rrecv after the peer's rshutdown does not return 0: %s", strerror(errno));
	return NULL;
}

static const char *closed(size_t unused UNUSED)
{
	struct pollfd p;
	char byte;

	TRY(stream_pair(false, 0));
	pattern(big, 100000, 3);
	TRY(send_all(near, big, 100000));
	ENSURE(!close_socket(&near), "rclose: %s", strerror(errno));
	TRY(expect(far, big, 100000));
	ENSURE(rrecv(far, &byte, 1, 0) == 0, "rrecv after the peer's rclose does not return 0: %s", strerror(errno));
	p = (struct pollfd){ far, POLLIN, 0 };
	ENSURE(rpoll(&p, 1, 0) == 1 && (p.revents & POLLHUP), "events %#x after the peer's rclose", (unsigned int)p.revents);
	ENSURE(rsend(far, "x", 1, 0) == -1 && (errno == EPIPE || errno == ECONNRESET), "rsend after the peer's rclose: %s",
	       strerror(errno));
	ENSURE(rclose(-1) == -1 && errno == EBADF, "rclose of an invalid descriptor does not fail with EBADF");
	return NULL;
}

/*
 * A child connects and is killed: while this end is idle, or (`sending`) after this end has filled all buffers, so that its next rsend
 * has to wait.
 */
static const char *killed(size_t sending)
{
	static char word[BIG];
	pid_t child;
	int ready[2], status;
	ssize_t n;
	char byte;

	TRY(bound(&listener, false, SOCK_STREAM));
	ENSURE(!pipe(ready), "pipe");
	child = fork();
	if (!child) {
		int fd = rsocket(AF_INET, SOCK_STREAM, 0);
		uint16_t port = 0;

		if (read(ready[0], &port, sizeof port) != sizeof port || fd < 0 || reach(fd, false, port))
			_exit(1);
		if (rsend(fd, "here", 4, 0) != 4)
			_exit(2);
		pause();
		_exit(3);
	}
	ENSURE(child > 0, "fork: %s", strerror(errno));
	{
		uint16_t port = port_of(listener);

		ENSURE(write(ready[1], &port, sizeof port) == sizeof port, "write");
	}
	far = raccept(listener, NULL, NULL);
	ENSURE(far >= 0, "raccept: %s", strerror(errno));
	keep(close_socket, &far, "far");
	TRY(expect(far, "here", 4));
	if (sending) {
		while ((n = rsend(far, word, sizeof word, MSG_DONTWAIT)) > 0)
			;
		ENSURE(errno == EAGAIN, "rsend: %s", strerror(errno));
	}
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
	if (sending) {
		n = rsend(far, word, sizeof word, 0);
		ENSURE(n < 0 && (errno == ECONNRESET || errno == EPIPE), "rsend returns %zd: %s", n, strerror(errno));
	}
	n = rrecv(far, &byte, 1, 0);
	ENSURE(n == 0 || (n < 0 && errno == ECONNRESET), "rrecv returns %zd: %s", n, strerror(errno));
	close(ready[0]);
	close(ready[1]);
	return NULL;
}

static void *blocked(void *arg)
{
	char byte;
	ssize_t n = rrecv(*(int *)arg, &byte, 1, 0);

	return (void *)(intptr_t)(n < 0 ? errno : 0);
}

static const char *closed_by_another_thread(size_t unused UNUSED)
{
	static int fd;
	pthread_t thread;
	void *error;

	TRY(stream_pair(false, 0));
	fd = near;
	ENSURE(!pthread_create(&thread, NULL, blocked, &fd), "pthread_create fails");
	sleep_ms(30); /* The other thread should now wait in rrecv. If it does not yet, its call fails with EBADF. */
	ENSURE(!close_socket(&near), "rclose");
	pthread_join(thread, &error);
	ENSURE((intptr_t)error == EBADF || !error, "rrecv: %s", strerror((int)(intptr_t)error));
	return NULL;
}

static const char *time_is_limited(size_t unused UNUSED)
{
	struct timeval t = { 0, 30000 };
	uint64_t start = now_ms();
	char byte;

	TRY(stream_pair(false, 0));
	ENSURE(!rsetsockopt(near, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t), "SO_RCVTIMEO");
	ENSURE(rrecv(near, &byte, 1, 0) == -1 && errno == EAGAIN, "rrecv: %s", strerror(errno));
	ENSURE(now_ms() - start >= 30, "rrecv returns before its time-out of 30 ms");
	return NULL;
}

static const char *options(size_t unused UNUSED)
{
	int value = 0, one = 1;
	socklen_t len = sizeof value;
	struct linger linger = { 1, 3 }, got = { 0, 0 };

	near = rsocket(AF_INET, SOCK_STREAM, 0);
	keep(close_socket, &near, "near");
	ENSURE(!rsetsockopt(near, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one), "TCP_NODELAY");
	ENSURE(!rgetsockopt(near, IPPROTO_TCP, TCP_NODELAY, &value, &len) && value == 1,
	       "TCP_NODELAY is %d after it was set", value);
	ENSURE(!rsetsockopt(near, SOL_SOCKET, SO_LINGER, &linger, sizeof linger), "SO_LINGER");
	len = sizeof got;
	ENSURE(!rgetsockopt(near, SOL_SOCKET, SO_LINGER, &got, &len) && got.l_linger == 3,
	       "SO_LINGER is %d s, not 3", got.l_linger);
	value = 8192;
	ENSURE(!rsetsockopt(near, SOL_SOCKET, SO_SNDBUF, &value, sizeof value), "SO_SNDBUF");
	len = sizeof value;
	ENSURE(!rgetsockopt(near, SOL_SOCKET, SO_SNDBUF, &value, &len) && value == 16384, "SO_SNDBUF is %d, not 16384", value);
	ENSURE(rsetsockopt(near, SOL_SOCKET, SO_SNDBUF, &value, 2) == -1 && errno == EINVAL, "a value of two bytes is accepted");
	ENSURE(rsetsockopt(near, 4711, 1, &value, sizeof value) == -1 && errno == ENOPROTOOPT, "an unknown level is accepted");
	ENSURE(rsocket(AF_UNIX, SOCK_STREAM, 0) == -1 && errno == EAFNOSUPPORT, "AF_UNIX is accepted");
	ENSURE(rsocket(AF_INET, SOCK_STREAM, IPPROTO_UDP) == -1 && errno == EPROTONOSUPPORT, "a stream over UDP is accepted");
	ENSURE(rsend(4711, "", 1, 0) == -1 && errno == EBADF, "rsend to an unknown descriptor does not fail with EBADF");
	return NULL;
}

static const char *mapped_memory(size_t unused UNUSED)
{
	static unsigned char area[200000], from[200000];
	char byte;

	TRY(stream_pair(false, 2));
	pattern(from, sizeof from, 9);
	ENSURE(riomap(far, area, sizeof area, PROT_WRITE, 0, 1000) == 1000, "riomap: %s", strerror(errno));
	ENSURE(riomap(far, big, 4096, PROT_WRITE, 0, -1) == (off_t)(uintptr_t)big, "riomap: %s", strerror(errno));
	ENSURE(riomap(far, big, 4096, PROT_WRITE, 0, 5) == -1 && errno == ENOMEM,
	       "a third mapping is accepted where two are allowed");
	ENSURE(riomap(far, big, 4096, PROT_READ, 0, 5) == -1 && errno == EINVAL, "a mapping for reading is accepted");
	TRY(send_all(far, "m", 1));
	TRY(expect(near, "m", 1));
	ENSURE(riowrite(near, from, sizeof from, 1000, 0) == sizeof from, "riowrite: %s", strerror(errno));
	ENSURE(riowrite(near, "far away", 8, (off_t)(uintptr_t)big + 16, 0) == 8, "riowrite: %s", strerror(errno));
	/* A write ends at the end of the mapping, and writes nothing outside a mapping. */
	ENSURE(riowrite(near, from, 100, 1000 + sizeof area - 10, 0) == 10,
	       "riowrite across the end of a mapping does not write 10 bytes");
	ENSURE(riowrite(near, from, 100, 999, 0) == 0, "riowrite before the start of a mapping writes bytes");
	TRY(send_all(near, "d", 1));
	TRY(expect(far, "d", 1));
	ENSURE(!memcmp(area, from, sizeof area - 10) && !memcmp(area + sizeof area - 10, from, 10),
	       "the first mapping has other bytes");
	ENSURE(!memcmp(big + 16, "far away", 8), "the second mapping has other bytes");
	ENSURE(!riounmap(far, area, sizeof area), "riounmap: %s", strerror(errno));
	ENSURE(riounmap(far, area, sizeof area) == -1 && errno == EINVAL, "a second riounmap is accepted");
	/* A write to unmapped memory ends the connection, and the memory is unchanged. */
	memset(area, 0, sizeof area);
	riowrite(near, from, 100, 1000, 0);
	ENSURE(rrecv(near, &byte, 1, 0) <= 0, "rrecv returns bytes that were not sent");
	for (size_t i = 0; i < 100; i++)
		ENSURE(!area[i], "byte %zu is written after riounmap", i);
	return NULL;
}

static const char *datagrams(size_t v6)
{
	static char buf[5000];
	struct sockaddr_storage from;
	struct iovec iov = { buf, 3 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
	socklen_t len = sizeof from, own;
	struct sockaddr_storage to;
	struct pollfd p;

	TRY(bound(&listener, v6, SOCK_DGRAM));
	near = rsocket(v6 ? AF_INET6 : AF_INET, SOCK_DGRAM, 0);
	keep(close_socket, &near, "near");
	to = address(v6, port_of(listener), &own);
	ENSURE(rsend(near, "x", 1, 0) == -1 && errno == EDESTADDRREQ, "rsend without an address: %s", strerror(errno));
	ENSURE(rsendto(near, "hello", 5, 0, (struct sockaddr *)&to, own) == 5, "rsendto: %s", strerror(errno));
	ENSURE(rrecvfrom(listener, buf, sizeof buf, 0, (struct sockaddr *)&from, &len) == 5, "rrecvfrom does not return 5: %s",
	       strerror(errno));
	ENSURE(!memcmp(buf, "hello", 5) && len == own, "other bytes, or an address of %u bytes, not %u", len, own);
	/* The reply goes to the source of the datagram. */
	ENSURE(rsendto(listener, "hello yourself", 14, 0, (struct sockaddr *)&from, len) == 14,
	       "rsendto to the sender: %s", strerror(errno));
	p = (struct pollfd){ near, POLLIN, 0 };
	ENSURE(rpoll(&p, 1, WAIT_MS) == 1 && p.revents == POLLIN,
	       "events %#x of a socket with a datagram", (unsigned int)p.revents);
	ENSURE(rrecvmsg(near, &msg, MSG_PEEK) == 3 && msg.msg_flags == MSG_TRUNC,
	       "a truncated datagram has the flags %#x", (unsigned int)msg.msg_flags);
	ENSURE(rrecv(near, buf, sizeof buf, 0) == 14, "rrecv: %s", strerror(errno));
	/* Sizes. */
	ENSURE(!rconnect(near, (struct sockaddr *)&to, own), "rconnect: %s", strerror(errno));
	ENSURE(rsend(near, buf, sizeof buf, 0) == -1 && errno == EMSGSIZE, "a datagram of 5000 bytes is accepted");
	ENSURE(rsend(near, buf, 4092, 0) == 4092 && rsend(near, buf, 0, 0) == 0, "rsend of 4092 or of 0 bytes: %s",
	       strerror(errno));
	ENSURE(rrecv(listener, buf, sizeof buf, 0) == 4092, "rrecv does not return the longest datagram");
	ENSURE(rrecv(listener, buf, sizeof buf, 0) == 0, "rrecv does not return the empty datagram");
	ENSURE(rrecv(listener, buf, sizeof buf, MSG_DONTWAIT) == -1 && errno == EAGAIN, "rrecv does not fail with EAGAIN");
	return NULL;
}

/* A socket that is bound to the wildcard address is reached at each address of the host. */
static const char *datagrams_wildcard(size_t unused UNUSED)
{
	struct sockaddr_in to = { .sin_family = AF_INET }, from;
	socklen_t len = sizeof from;
	char buf[16];

	if (getenv("TEST_ADDR"))
		SKIP("only with the addresses of the loopback interface");
	listener = rsocket(AF_INET, SOCK_DGRAM, 0);
	ENSURE(listener >= 0, "rsocket: %s", strerror(errno));
	keep(close_socket, &listener, "socket");
	ENSURE(!rbind(listener, (struct sockaddr *)&to, sizeof to), "rbind: %s", strerror(errno));
	TRY(bound(&near, false, SOCK_DGRAM));
	to.sin_port = htons(port_of(listener));
	inet_pton(AF_INET, "127.0.0.2", &to.sin_addr);
	ENSURE(rsendto(near, "hello", 5, 0, (struct sockaddr *)&to, sizeof to) == 5, "rsendto: %s", strerror(errno));
	ENSURE(rrecvfrom(listener, buf, sizeof buf, 0, (struct sockaddr *)&from, &len) == 5, "rrecvfrom: %s", strerror(errno));
	ENSURE(rsendto(listener, "you", 3, 0, (struct sockaddr *)&from, len) == 3, "rsendto to the sender: %s", strerror(errno));
	ENSURE(rrecv(near, buf, sizeof buf, 0) == 3, "rrecv: %s", strerror(errno));
	return NULL;
}

static const char *only_from_the_peer(size_t unused UNUSED)
{
	static int third = -1;
	socklen_t len;
	struct sockaddr_storage to;
	char buf[16];

	TRY(bound(&listener, false, SOCK_DGRAM));
	TRY(bound(&near, false, SOCK_DGRAM));
	TRY(bound(&third, false, SOCK_DGRAM));
	to = address(false, port_of(near), &len);
	/* The first datagrams resolve the address, and may arrive out of order. */
	ENSURE(rsendto(third, "any", 3, 0, (struct sockaddr *)&to, len) == 3, "rsendto: %s", strerror(errno));
	ENSURE(rrecv(near, buf, sizeof buf, 0) == 3 && !memcmp(buf, "any", 3), "a socket without a peer receives nothing");
	ENSURE(rsendto(listener, "any", 3, 0, (struct sockaddr *)&to, len) == 3, "rsendto: %s", strerror(errno));
	ENSURE(rrecv(near, buf, sizeof buf, 0) == 3 && !memcmp(buf, "any", 3), "a socket without a peer receives nothing");
	ENSURE(!reach(near, false, port_of(listener)), "rconnect");
	for (unsigned int n = 0; n < 50; n++) {
		ENSURE(rsendto(third, "no", 2, 0, (struct sockaddr *)&to, len) == 2, "rsendto: %s", strerror(errno));
		ENSURE(rsendto(listener, "yes", 3, 0, (struct sockaddr *)&to, len) == 3, "rsendto: %s", strerror(errno));
		ENSURE(rrecv(near, buf, sizeof buf, 0) == 3 && !memcmp(buf, "yes", 3), "a datagram of another sender is received");
	}
	return NULL;
}

/* ---- a peer that implements the protocol itself, and violates it */

struct area {
	uint64_t addr;
	uint32_t key, len;
} __attribute__((packed));

struct hello {
	uint8_t version, flags;
	uint16_t credits;
	uint8_t reserved[3], mappings;
	struct area list, data;
} __attribute__((packed));

enum violation { NO_HELLO, OLD_VERSION, NO_LIST, TOO_MANY_BYTES, TOO_MANY_MESSAGES, WRONG_LENGTH, NO_KIND, WILD_MEMORY };

static struct rdma_cm_id *id;
static struct ibv_mr *mr;
static unsigned char words[64];

static int close_id(void *p UNUSED)
{
	if (mr)
		ibv_dereg_mr(mr);
	rdma_destroy_ep(id);
	mr = NULL;
	return 0;
}

/*
 * Sends a message of the protocol, which is a word of 4 bytes: its kind is in the upper 3 bits, a value in the others. The value of
 * kind 0 is the number of bytes that were written to the peer's memory. Kind 5 does not exist (docs/rsockets.md).
 */
static const char *send_word(uint32_t word, uint32_t len)
{
	struct ibv_sge sge = { (uintptr_t)words, len, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;
	uint64_t end = now_ms() + WAIT_MS;

	memcpy(words, &word, 4);
	ENSURE(!ibv_post_send(id->qp, &wr, &bad), "ibv_post_send fails");
	while (!ibv_poll_cq(id->send_cq, 1, &wc))
		ENSURE(now_ms() < end, "a message of the faulty peer does not complete");
	return NULL;
}

static const char *faulty_peer(size_t kind)
{
	struct ibv_qp_init_attr attr = { .cap = { 16, 16, 1, 1, 0 }, .qp_type = IBV_QPT_RC };
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *info;
	struct hello hello = { .version = 1, .flags = 2, .credits = htons(16) };
	struct rdma_conn_param param = { .private_data = &hello, .private_data_len = sizeof hello, .responder_resources = 1,
		.initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7 };
	const char *host = getenv("TEST_ADDR");
	char port[8], byte;
	int rc;
	ssize_t n;

	TRY(bound(&listener, false, SOCK_STREAM));
	snprintf(port, sizeof port, "%u", port_of(listener));
	ENSURE(!rdma_getaddrinfo(host ? host : "127.0.0.1", port, &hints, &info), "rdma_getaddrinfo");
	rc = rdma_create_ep(&id, info, NULL, &attr);
	rdma_freeaddrinfo(info);
	ENSURE(!rc, "rdma_create_ep: %s", strerror(errno));
	keep(close_id, &id, "identifier");
	mr = ibv_reg_mr(id->pd, words, sizeof words, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	ENSURE(mr, "ibv_reg_mr");
	for (int i = 0; i < 16; i++) {
		struct ibv_sge sge = { (uintptr_t)words + 48, 4, mr->lkey };
		struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

		ENSURE(!ibv_post_recv(id->qp, &wr, &bad), "ibv_post_recv");
	}
	hello.list = (struct area){ htobe64((uintptr_t)words), htobe32(mr->rkey), htobe32(kind == NO_LIST ? 0 : 2) };
	hello.data = (struct area){ htobe64((uintptr_t)words), htobe32(mr->rkey), htobe32(16) };
	if (kind == WILD_MEMORY)
		hello.data = (struct area){ htobe64(UINT64_MAX - 4), htobe32(4711), htobe32(UINT32_MAX) };
	if (kind == NO_HELLO)
		param.private_data_len = 8;
	if (kind == OLD_VERSION)
		hello.version = 0;
	rc = rdma_connect(id, &param);
	if (kind <= NO_LIST) {
		ENSURE(rc, "a peer without a valid hello is accepted");
		ENSURE(!rfcntl(listener, F_SETFL, O_NONBLOCK), "F_SETFL");
		ENSURE(raccept(listener, NULL, NULL) == -1 && errno == EAGAIN, "raccept: %s", strerror(errno));
		return NULL;
	}
	ENSURE(!rc, "rdma_connect: %s", strerror(errno));
	far = raccept(listener, NULL, NULL);
	ENSURE(far >= 0, "raccept: %s", strerror(errno));
	keep(close_socket, &far, "far");
	switch (kind) {
	case TOO_MANY_BYTES:
		TRY(send_word(0x1fffffff, 4));
		break;
	case TOO_MANY_MESSAGES:
		/*
		 * Each message reports one byte, and the program reads none. rpoll receives the messages, and has to detect
		 * that there are more than the peer has credits for.
		 */
		for (int i = 0; i < 800; i++) {
			struct pollfd p = { far, POLLOUT | POLLRDHUP, 0 };

			TRY(send_word(1, 4));
			if (rpoll(&p, 1, 0) == 1 && (p.revents & POLLRDHUP))
				break;
		}
		while ((n = rrecv(far, big, sizeof big, 0)) > 0)
			ENSURE(n < 800, "rrecv returns %zd bytes of a peer without credits for them", n);
		ENSURE(n < 0 && errno == ECONNRESET, "rrecv returns %zd: %s", n, strerror(errno));
		return NULL;
	case WRONG_LENGTH:
		TRY(send_word(0, 3));
		break;
	case NO_KIND:
		TRY(send_word(5u << 29, 4));
		break;
	case WILD_MEMORY:
		/* The peer named memory that it does not have. The Write to it is refused, and the stream ends. */
		n = rsend(far, big, 100000, 0);
		ENSURE(n != 0, "rsend returns 0");
		break;
	}
	n = rrecv(far, &byte, 1, 0);
	ENSURE(n == 0 || (n < 0 && errno == ECONNRESET), "rrecv returns %zd: %s", n, strerror(errno));
	ENSURE(kind == WILD_MEMORY || n < 0, "the stream ends without an error");
	/* The listener still accepts. */
	near = rsocket(AF_INET, SOCK_STREAM, 0);
	keep(close_socket, &near, "near");
	ENSURE(!reach(near, false, port_of(listener)), "rconnect: %s", strerror(errno));
	return NULL;
}

static const char *many_sockets(size_t unused UNUSED)
{
	enum { MANY = 40 };
	static int ends[2 * MANY];
	struct pollfd p[MANY];
	unsigned int seen = 0;

	TRY(bound(&listener, false, SOCK_STREAM));
	for (int i = 0; i < 2 * MANY; i++)
		ends[i] = -1;
	for (int i = 0; i < MANY; i++) {
		ends[i] = rsocket(AF_INET, SOCK_STREAM, 0);
		keep(close_socket, &ends[i], "end");
		ENSURE(!reach(ends[i], false, port_of(listener)), "rconnect %d: %s", i, strerror(errno));
		ends[MANY + i] = raccept(listener, NULL, NULL);
		ENSURE(ends[MANY + i] >= 0, "raccept %d: %s", i, strerror(errno));
		keep(close_socket, &ends[MANY + i], "end");
		p[i] = (struct pollfd){ ends[MANY + i], POLLIN, 0 };
	}
	for (int i = 0; i < MANY; i++) {
		char byte = (char)i;

		TRY(send_all(ends[i], &byte, 1));
	}
	while (seen < MANY) {
		ENSURE(rpoll(p, MANY, WAIT_MS) > 0, "rpoll: %s", strerror(errno));
		for (int i = 0; i < MANY; i++) {
			char byte;

			if (!p[i].revents)
				continue;
			ENSURE(rread(p[i].fd, &byte, 1) == 1 && byte == i, "end %d receives the byte of another", i);
			p[i].fd = -1;
			seen++;
		}
	}
	return NULL;
}

static atomic_bool is_over, is_closed;

static void *accept_often(void *arg)
{
	struct flow *flow = arg;

	while (!is_closed) {
		struct pollfd p = { flow->fd, POLLIN, 0 };
		int fd = rpoll(&p, 1, 20) > 0 ? raccept(flow->fd, NULL, NULL) : -1;

		if (fd >= 0 && rclose(fd))
			flow->reason = "rclose of an accepted socket fails";
	}
	return NULL;
}

/* The peer closes each connection at once. rconnect succeeds nevertheless. */
static const char *closed_at_once(size_t unused UNUSED)
{
	static struct flow flow;
	const char *reason = NULL;
	pthread_t thread;

	TRY(bound(&listener, false, SOCK_STREAM));
	is_closed = false;
	flow = (struct flow){ listener, NULL };
	ENSURE(!pthread_create(&thread, NULL, accept_often, &flow), "pthread_create fails");
	for (int i = 0; i < 200 && !reason; i++) {
		near = rsocket(AF_INET, SOCK_STREAM, 0);
		if (near < 0 || reach(near, false, port_of(listener)))
			reason = strerror(errno);
		if (close_socket(&near))
			reason = "rclose fails";
	}
	is_closed = true;
	pthread_join(thread, NULL);
	ENSURE(!reason, "rconnect: %s", reason);
	return flow.reason;
}

static void *connect_often(void *arg)
{
	struct flow *flow = arg;

	while (!is_over && !flow->reason) {
		int fd = rsocket(AF_INET, SOCK_STREAM, 0);

		/* A peer is refused while the queue of the listener is full. */
		if (fd < 0 || (reach(fd, false, port_of(flow->fd)) && errno != ECONNREFUSED))
			flow->reason = strerror(errno);
		if (fd >= 0 && rclose(fd))
			flow->reason = "rclose of a connecting thread fails";
	}
	return NULL;
}

/* Options of a listener are set while peers connect to it. */
static const char *options_of_a_busy_listener(size_t unused UNUSED)
{
	static struct flow flows[5];
	pthread_t threads[COUNT(flows)];
	const char *reason = NULL;
	int size = 32, set = 0;
	uint64_t end;

	TRY(bound(&listener, false, SOCK_STREAM));
	is_over = is_closed = false;
	for (size_t i = 0; i < COUNT(flows); i++) {
		flows[i] = (struct flow){ listener, NULL };
		ENSURE(!pthread_create(&threads[i], NULL, i ? connect_often : accept_often, &flows[i]), "pthread_create fails");
	}
	for (end = now_ms() + 300; now_ms() < end && !set;)
		set = rsetsockopt(listener, SOL_RDMA, RDMA_INLINE, &size, sizeof size);
	is_over = true;
	/* The thread that accepts ends last, because the other ones wait for it. */
	for (size_t i = COUNT(flows); i-- > 0;) {
		is_closed = i == 0;
		pthread_join(threads[i], NULL);
		reason = flows[i].reason ? flows[i].reason : reason;
	}
	ENSURE(!set, "RDMA_INLINE of a listener fails");
	ENSURE(!reason, "a thread that connects or accepts: %s", reason);
	return NULL;
}

/* ---- connection requests of peers that know only the start-up of a connection */

/* Opens a TCP connection to a listener, and sends a valid request. Returns the descriptor. */
static int raw_request(uint16_t port)
{
	struct {
		char key[16];
		uint8_t flags, revision;
		uint16_t length;
		struct hello hello;
	} __attribute__((packed)) frame = {
		.key = { 'M', 'P', 'A', ' ', 'I', 'D', ' ', 'R', 'e', 'q', ' ', 'F', 'r', 'a', 'm', 'e' },
		.flags = 0x40, .revision = 1, .length = htons(sizeof frame.hello),
		.hello = { .version = 1, .credits = htons(16), .list = { htobe64(4096), htobe32(1), htobe32(2) },
			   .data = { htobe64(4096), htobe32(1), htobe32(16) } },
	};
	socklen_t len;
	struct sockaddr_storage to = address(false, port, &len);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd >= 0 && (connect(fd, (struct sockaddr *)&to, len) || send(fd, &frame, sizeof frame, 0) != sizeof frame)) {
		close(fd);
		return -1;
	}
	return fd;
}

/*
 * Waits for `least` answers to requests, and until no other answer arrives any more. Sets in `p[i].revents` whether request `i` was
 * answered. Returns the number of answers.
 */
static unsigned int answered(struct pollfd *p, unsigned int count, unsigned int least)
{
	uint64_t end = now_ms() + WAIT_MS;
	unsigned int n = 0, before;

	do {
		before = n;
		sleep_ms(200);
		n = (unsigned int)poll(p, count, 0);
	} while (n != before || (n < least && now_ms() < end));
	return n;
}

enum { REQUESTS = 600, FILES = 512, OPENED = 16 };

/* Many peers connect to a listener whose program does not call raccept. The program can still open descriptors. */
static const char *requests_that_wait(size_t unused UNUSED)
{
	struct rlimit files = { FILES, FILES };
	static struct pollfd p[REQUESTS];
	int link[2], status = 0;
	uint16_t port = 0;
	char byte = 0;
	pid_t child;

	ENSURE(!socketpair(AF_UNIX, SOCK_STREAM, 0, link), "socketpair");
	child = fork();
	if (!child) {
		close(link[1]);
		listener = setrlimit(RLIMIT_NOFILE, &files) ? -1 : rsocket(AF_INET, SOCK_STREAM, 0);
		if (listener < 0 || rlisten(listener, 4096))
			_exit(1);
		port = port_of(listener);
		if (write(link[0], &port, sizeof port) != sizeof port || read(link[0], &byte, 1) != 1)
			_exit(2);
		for (int i = 0; i < OPENED; i++)
			if (open("/dev/null", O_RDONLY) < 0)
				_exit(3);
		_exit(0);
	}
	ENSURE(child > 0, "fork: %s", strerror(errno));
	close(link[0]);
	ENSURE(read(link[1], &port, sizeof port) == sizeof port, "the child does not listen");
	for (int i = 0; i < REQUESTS; i++) {
		p[i] = (struct pollfd){ raw_request(port), POLLIN, 0 };
		ENSURE(p[i].fd >= 0, "connect: %s", strerror(errno));
	}
	ENSURE(answered(p, REQUESTS, 1) > 0, "no request is answered");
	ENSURE(write(link[1], &byte, 1) == 1 && waitpid(child, &status, 0) == child, "waitpid");
	close(link[1]);
	for (int i = 0; i < REQUESTS; i++)
		close(p[i].fd);
	ENSURE(WIFEXITED(status) && WEXITSTATUS(status) != 3, "the listening process cannot open a descriptor any more");
	ENSURE(!status, "the child ends with status %#x", (unsigned int)status);
	return NULL;
}

/* Peers that have closed their connections do not keep the places of a listener's queue, even if its program does not call raccept. */
static const char *requests_that_were_closed(size_t unused UNUSED)
{
	enum { ACCEPTED = 8, WAITING = 16, ALL = ACCEPTED + WAITING + 1 };
	static struct pollfd p[ALL];
	uint64_t end = now_ms() + WAIT_MS;
	struct pollfd connecting;
	struct linger at_once = { 1, 0 };
	unsigned int n;

	TRY(bound(&listener, false, SOCK_STREAM));
	ENSURE(!rsetsockopt(listener, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once), "SO_LINGER");
	for (int i = 0; i < ALL; i++) {
		p[i] = (struct pollfd){ raw_request(port_of(listener)), POLLIN, 0 };
		ENSURE(p[i].fd >= 0, "connect: %s", strerror(errno));
		/* One at a time, because requests that arrive together wait before they are accepted. */
		ENSURE(i >= ACCEPTED || poll(&p[i], 1, WAIT_MS) == 1, "request %d is not answered", i);
	}
	/* Eight requests are accepted and one is refused; the others wait. */
	n = answered(p, ALL, ACCEPTED + 1);
	for (int i = 0; i < ALL; i++)
		if (!p[i].revents)
			close(p[i].fd);
	ENSURE(n == ACCEPTED + 1, "%u requests are answered", n);
	keep(close_socket, &near, "near");
	do {
		ENSURE(now_ms() < end, "requests that were closed keep the queue full");
		sleep_ms(10);
		close_socket(&near);
		near = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
		connecting = (struct pollfd){ near, POLLOUT, 0 };
		ENSURE(near >= 0 && reach(near, false, port_of(listener)), "a full queue accepts a connection");
	} while (errno == ECONNREFUSED || rpoll(&connecting, 1, 100));
	/* Now the request waits. */
	for (int i = 0; i < ACCEPTED; i++) {
		int fd = raccept(listener, NULL, NULL);

		ENSURE(fd >= 0 && !rclose(fd), "raccept: %s", strerror(errno));
	}
	ENSURE(rpoll(&connecting, 1, WAIT_MS) == 1 && connecting.revents == POLLOUT, "events %#x after raccept",
	       (unsigned int)connecting.revents);
	for (int i = 0; i < ALL; i++)
		if (p[i].revents)
			close(p[i].fd);
	return NULL;
}

#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
/* Limits the address space of this process to the present size and `more` bytes, or to what it was before if `more` is 0. */
static const char *limit_memory(rlim_t more)
{
	static struct rlimit before;
	struct rlimit now;
	FILE *f = fopen("/proc/self/statm", "r");
	unsigned long pages = 0;

	if (!before.rlim_cur)
		ENSURE(!getrlimit(RLIMIT_AS, &before), "getrlimit: %s", strerror(errno));
	now = before;
	ENSURE(f && fscanf(f, "%lu", &pages) == 1 && !fclose(f), "statm");
	if (more)
		now.rlim_cur = pages * (rlim_t)sysconf(_SC_PAGESIZE) + more;
	ENSURE(!setrlimit(RLIMIT_AS, &now), "setrlimit: %s", strerror(errno));
	return NULL;
}

/* A call that failed because memory was short succeeds when there is enough. */
static const char *short_of_memory(size_t unused UNUSED)
{
	static int third = -1;
	int size = 1 << 27;
	socklen_t len;
	struct sockaddr_storage any = address(false, 0, &len), to;
	struct pollfd p;

	TRY(stream_pair(false, 0));
	third = rsocket(AF_INET, SOCK_STREAM, 0);
	keep(close_socket, &third, "third");
	ENSURE(!rsetsockopt(third, SOL_SOCKET, SO_RCVBUF, &size, sizeof size), "SO_RCVBUF");
	TRY(limit_memory(32 << 20));
	ENSURE(reach(third, false, port_of(listener)) && errno == ENOMEM, "rconnect: %s", strerror(errno));
	size = 10000;
	ENSURE(!rsetsockopt(third, SOL_SOCKET, SO_RCVBUF, &size, sizeof size), "SO_RCVBUF");
	ENSURE(!reach(third, false, port_of(listener)), "a second rconnect: %s", strerror(errno));
	TRY(limit_memory(0));

	close_socket(&near);
	close_socket(&third);
	TRY(bound(&near, false, SOCK_DGRAM));
	third = rsocket(AF_INET, SOCK_DGRAM, 0);
	size = 1 << 27;
	ENSURE(!rsetsockopt(third, SOL_SOCKET, SO_RCVBUF, &size, sizeof size), "SO_RCVBUF");
	TRY(limit_memory(2 << 20));
	ENSURE(rbind(third, (struct sockaddr *)&any, len) && errno == ENOMEM, "rbind: %s", strerror(errno));
	TRY(limit_memory(0));
	ENSURE(!rbind(third, (struct sockaddr *)&any, len), "a second rbind: %s", strerror(errno));
	/* The bound socket answers requests for its queue pair. */
	to = address(false, port_of(third), &len);
	ENSURE(rsendto(near, "x", 1, 0, (struct sockaddr *)&to, len) == 1, "rsendto: %s", strerror(errno));
	p = (struct pollfd){ third, POLLIN, 0 };
	ENSURE(rpoll(&p, 1, WAIT_MS) == 1, "no datagram arrives at a socket that was bound in the second call");
	return NULL;
}
#endif

static const struct test tests[] = {
	{ "stream", ends_of_a_stream, false, 0, false },
	{ "stream_ipv6", ends_of_a_stream, true, 0, false },
	{ "both_ways", both_ways, false, 0, false },
	{ "both_ways_small", both_ways, true, 0, false },
	{ "parts", one_after_the_other, 0, 0, false },
	{ "nonblocking", no_waiting, 0, 0, false },
	{ "select", select_sets, 0, 0, false },
	{ "no_listener", no_listener, 0, 0, false },
	{ "half_closed", half_closed, 0, 0, false },
	{ "closed", closed, 0, 0, false },
	{ "closed_at_once", closed_at_once, 0, 0, false },
	{ "killed", killed, false, 0, false },
	{ "killed_sending", killed, true, 0, false },
	{ "closed_elsewhere", closed_by_another_thread, 0, 0, false },
	{ "timeout", time_is_limited, 0, 0, false },
	{ "options", options, 0, 0, false },
	{ "options_of_a_busy_listener", options_of_a_busy_listener, 0, 0, false },
	{ "mapped", mapped_memory, 0, 0, false },
	{ "datagrams", datagrams, false, 0, false },
	{ "datagrams_ipv6", datagrams, true, 0, false },
	{ "datagrams_wildcard", datagrams_wildcard, 0, 20, false },
	{ "datagrams_of_the_peer", only_from_the_peer, 0, 0, false },
	{ "many_sockets", many_sockets, 0, 0, false },
	{ "requests_that_wait", requests_that_wait, 0, 0, false },
	{ "requests_that_were_closed", requests_that_were_closed, 0, 0, false },
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
	{ "short_of_memory", short_of_memory, 0, 0, true },
#endif
	{ "no_hello", faulty_peer, NO_HELLO, 0, false },
	{ "old_version", faulty_peer, OLD_VERSION, 0, false },
	{ "no_list", faulty_peer, NO_LIST, 0, false },
	{ "too_many_bytes", faulty_peer, TOO_MANY_BYTES, 0, false },
	{ "too_many_messages", faulty_peer, TOO_MANY_MESSAGES, 0, false },
	{ "wrong_length", faulty_peer, WRONG_LENGTH, 0, false },
	{ "no_kind", faulty_peer, NO_KIND, 0, false },
	{ "invalid_memory", faulty_peer, WILD_MEMORY, 0, false },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
