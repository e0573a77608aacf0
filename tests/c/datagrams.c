/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * UDP sockets as programs use them. `cargo lab sockets` runs this program on the kernel's sockets, and with
 * libanywarp-sockets.so and rules that send the program's datagrams as messages of datagram-iWARP (docs/sockets.md).
 * Datagrams that are not messages are called plain, and sockets that send messages upgraded. All runs must give the same
 * results. All ends use the loopback interface, and are in this process or in a child of it.
 *
 * With DATAGRAMS_RELIABLE the datagrams are to be reliable. A thread of the library then reads the socket, so a datagram
 * may arrive after the call that sent it has returned. To see what was sent, the test captures the packets of the interface.
 *
 * If the datagrams are to be messages, DATAGRAMS_HEAD is the number of bytes before the payload of a message: 44 for a
 * Send, 40 for a Write-Record. To read messages as they were sent, the test uses direct system calls, which the library
 * does not intercept.
 */
#include "check.h"

#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/errqueue.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define SHORT_MS 30 /* how long a test waits to see that nothing occurs */
#define LONG_MS 5000
#define TAIL 4      /* bytes after the payload of a message: the CRC */
#define MOST 65507  /* the longest payload of a datagram over IPv4 */

static char big[1 << 17], got[1 << 17];

static int close_fd(void *p)
{
	close((int)(intptr_t)p); /* the test may have closed it */
	return 0;
}

static size_t head_of_messages(void)
{
	const char *text = getenv("DATAGRAMS_HEAD");

	return text ? strtoul(text, NULL, 10) : 0;
}

static bool is_reliable(void)
{
	return getenv("DATAGRAMS_RELIABLE") != NULL;
}

/* Waits until everything that was sent has arrived. Unreliable datagrams have arrived when the call that sends them returns. */
static void settle(void)
{
	if (is_reliable())
		sleep_ms(SHORT_MS);
}

struct at {
	struct sockaddr_storage addr;
	socklen_t len;
};

static struct sockaddr *name(const struct at *at)
{
	return (struct sockaddr *)&at->addr;
}

static in_port_t *port_of(struct at *at)
{
	return at->addr.ss_family == AF_INET ? &((struct sockaddr_in *)&at->addr)->sin_port
					     : &((struct sockaddr_in6 *)&at->addr)->sin6_port;
}

static struct at loopback(int family)
{
	struct at at = { .addr.ss_family = (sa_family_t)family };

	if (family == AF_INET) {
		((struct sockaddr_in *)&at.addr)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		at.len = sizeof(struct sockaddr_in);
	} else {
		((struct sockaddr_in6 *)&at.addr)->sin6_addr = in6addr_loopback;
		at.len = sizeof(struct sockaddr_in6);
	}
	return at;
}

static const char *made(int *fd, int family)
{
	*fd = socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	ENSURE(*fd >= 0, "socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)*fd, "descriptor");
	return NULL;
}

static const char *own_name(int fd, struct at *at)
{
	at->len = sizeof at->addr;
	ENSURE(!getsockname(fd, name(at), &at->len), "getsockname: %s", strerror(errno));
	return NULL;
}

/* Creates a socket at a port of the loopback address. Sets its address. */
static const char *bound(int *fd, struct at *at, int family)
{
	TRY(made(fd, family));
	*at = loopback(family);
	ENSURE(!bind(*fd, name(at), at->len), "bind: %s", strerror(errno));
	return own_name(*fd, at);
}

/* A bound server, and a client that sends to it without being bound. */
struct ends {
	int client, server;
	struct at at;
};

static const char *both_of(struct ends *e, int family)
{
	TRY(bound(&e->server, &e->at, family));
	return made(&e->client, family);
}

static const char *both(struct ends *e)
{
	return both_of(e, AF_INET);
}

static const char *send_to(int fd, const void *bytes, size_t n, const struct at *at)
{
	ssize_t r = sendto(fd, bytes, n, 0, name(at), at->len);

	ENSURE(r == (ssize_t)n, "sendto of %zu: %zd %s", n, r, strerror(errno));
	return NULL;
}

static const char *text_to(int fd, const char *text, const struct at *at)
{
	return send_to(fd, text, strlen(text), at);
}

static const char *takes_from(int fd, const char *text, struct at *from)
{
	char buf[256];
	ssize_t n;

	if (from)
		from->len = sizeof from->addr;
	n = recvfrom(fd, buf, sizeof buf, 0, from ? name(from) : NULL, from ? &from->len : NULL);
	ENSURE(n >= 0, "recvfrom: %s", strerror(errno));
	ENSURE((size_t)n == strlen(text) && !memcmp(buf, text, (size_t)n), "got '%.*s', expected '%s'", (int)n, buf, text);
	return NULL;
}

static const char *takes(int fd, const char *text)
{
	return takes_from(fd, text, NULL);
}

static const char *nothing(int fd)
{
	ssize_t n = recv(fd, got, sizeof got, MSG_DONTWAIT);

	ENSURE(n < 0 && errno == EAGAIN, "recv without a datagram: %zd %s", n, n < 0 ? strerror(errno) : "");
	return NULL;
}

/* Opens a socket that receives the packets of all interfaces. */
static const char *tapped(int *tap)
{
	*tap = socket(AF_PACKET, SOCK_DGRAM | SOCK_CLOEXEC, htons(ETH_P_ALL));
	ENSURE(*tap >= 0, "packet socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)*tap, "tap");
	return NULL;
}

static size_t seen_at, seen_bytes;

/*
 * Ensures that the text was sent in a packet of reliable datagrams if `in_packet`, otherwise as a plain datagram. Stores in
 * `seen_at` the offset of the UDP payload within `big`, and in `seen_bytes` its length.
 */
static const char *seen(int tap, const char *text, bool in_packet)
{
	ssize_t n;

	while ((n = recv(tap, big, sizeof big, MSG_DONTWAIT)) > 0) {
		size_t ip = big[0] >> 4 == 6 ? 40 : 20;
		const char *payload = big + ip + 8;

		if ((size_t)n <= ip + 8 || !memmem(payload, (size_t)n - ip - 8, text, strlen(text)))
			continue;
		ENSURE(((unsigned char)payload[0] == 0xde) == in_packet, "'%s' was sent with the first byte %02x", text,
		       (unsigned char)payload[0]);
		seen_at = ip + 8;
		seen_bytes = (size_t)n - seen_at;
		return NULL;
	}
	return because("'%s' was not seen on the interface", text);
}

/* The length of the next datagram as the kernel received it. */
static long raw_length(int fd)
{
	return syscall(SYS_recvfrom, fd, got, sizeof got, MSG_PEEK, NULL, NULL);
}

static const char *same_address(const struct at *a, const struct at *b)
{
	ENSURE(a->len == b->len && !memcmp(&a->addr, &b->addr, a->len), "the addresses differ; the first has %u bytes", a->len);
	return NULL;
}

static const char *send_kind(int fd, const char *text, const struct at *at, int into, bool as_message)
{
	size_t head = as_message ? head_of_messages() : 0;
	long n, expected = (long)(strlen(text) + head + (head ? TAIL : 0));
	int tap;

	if (is_reliable()) {
		TRY(tapped(&tap));
		TRY(text_to(fd, text, at));
		TRY(takes(into, text));
		TRY(seen(tap, text, as_message));
		close(tap);
		return NULL;
	}
	TRY(text_to(fd, text, at));
	n = raw_length(into);
	ENSURE(n == expected, "%ld bytes received, expected %ld", n, expected);
	return takes(into, text);
}

/* ---------------------------------------------------------------- which transport */

static const char *is_upgraded(size_t family)
{
	struct ends e;
	struct at from;
	long n;

	TRY(both_of(&e, (int)family));
	TRY(send_kind(e.client, "hello", &e.at, e.server, true));
	TRY(text_to(e.client, "again", &e.at));
	TRY(takes_from(e.server, "again", &from));
	TRY(send_kind(e.server, "answer", &from, e.client, true));
	ENSURE(!connect(e.client, name(&e.at), e.at.len), "connect: %s", strerror(errno));
	ENSURE(write(e.client, "word", 4) == 4, "write: %s", strerror(errno));
	if (is_reliable())
		return takes(e.server, "word");
	n = raw_length(e.server);
	ENSURE((n > 4) == (head_of_messages() > 0), "%ld bytes received by write", n);
	return takes(e.server, "word");
}

/* ---------------------------------------------------------------- addresses */

static const char *sources(size_t family)
{
	struct at at, from, peer;
	struct ends e;
	struct msghdr m = { .msg_name = &from.addr, .msg_namelen = sizeof from.addr };
	struct iovec part = { got, sizeof got };
	char small[4];

	TRY(both_of(&e, (int)family));
	TRY(text_to(e.client, "one", &e.at));
	TRY(own_name(e.client, &at));
	ENSURE(*port_of(&at), "the socket has no port after the first datagram");
	TRY(takes_from(e.server, "one", &from));
	ENSURE(*port_of(&from) == *port_of(&at), "the source has another port");
	at = loopback((int)family);
	*port_of(&at) = *port_of(&from);
	TRY(same_address(&at, &from));
	/* recvmsg returns the whole address. recvfrom cuts it off at the length that the caller gives. */
	TRY(text_to(e.client, "two", &e.at));
	m.msg_iov = &part;
	m.msg_iovlen = 1;
	ENSURE(recvmsg(e.server, &m, 0) == 3 && m.msg_namelen == at.len,
	       "recvmsg returns another length, of the datagram or of the address");
	TRY(text_to(e.client, "three", &e.at));
	from.len = sizeof small;
	ENSURE(recvfrom(e.server, got, sizeof got, 0, (struct sockaddr *)small, &from.len) == 5, "recvfrom does not return 5");
	ENSURE(from.len == at.len && !memcmp(small, &at.addr, sizeof small), "an address that is cut off has length %u", from.len);
	peer.len = sizeof peer.addr;
	ENSURE(getpeername(e.client, name(&peer), &peer.len) < 0 && errno == ENOTCONN,
	       "getpeername before connect does not fail with ENOTCONN");
	ENSURE(!connect(e.client, name(&e.at), e.at.len), "connect: %s", strerror(errno));
	peer.len = sizeof peer.addr;
	ENSURE(!getpeername(e.client, name(&peer), &peer.len), "getpeername: %s", strerror(errno));
	TRY(same_address(&peer, &e.at));
	peer = at;
	TRY(own_name(e.client, &at));
	return same_address(&at, &peer);
}

/* A socket of IPv6 that sends to one of IPv4. */
static const char *mapped(size_t arg)
{
	struct sockaddr_in6 to = { .sin6_family = AF_INET6 };
	struct at at, from, six = { .len = sizeof to };
	int server, client;

	(void)arg;
	TRY(bound(&server, &at, AF_INET));
	TRY(made(&client, AF_INET6));
	to.sin6_port = *port_of(&at);
	ENSURE(inet_pton(AF_INET6, "::ffff:127.0.0.1", &to.sin6_addr) == 1, "inet_pton");
	memcpy(&six.addr, &to, sizeof to);
	TRY(send_kind(client, "hello", &six, server, true));
	TRY(text_to(client, "again", &six));
	TRY(takes_from(server, "again", &from));
	TRY(send_kind(server, "answer", &from, client, true));
	TRY(text_to(server, "answer", &from));
	TRY(takes_from(client, "answer", &from));
	return same_address(&from, &six);
}

static const char *packet_info(size_t arg)
{
	char control[256];
	struct iovec part = { got, sizeof got };
	struct msghdr m = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	struct at at = loopback(AF_INET), from;
	struct in_pktinfo info = { 0 };
	int on = 1, server, client, tos = -1;

	(void)arg;
	TRY(made(&server, AF_INET));
	((struct sockaddr_in *)&at.addr)->sin_addr.s_addr = 0;
	ENSURE(!bind(server, name(&at), at.len), "bind: %s", strerror(errno));
	TRY(own_name(server, &at));
	((struct sockaddr_in *)&at.addr)->sin_addr.s_addr = htonl(0x7f000009);
	ENSURE(!setsockopt(server, IPPROTO_IP, IP_PKTINFO, &on, sizeof on), "IP_PKTINFO: %s", strerror(errno));
	ENSURE(!setsockopt(server, IPPROTO_IP, IP_RECVTOS, &on, sizeof on), "IP_RECVTOS: %s", strerror(errno));
	TRY(made(&client, AF_INET));
	on = 0x10;
	ENSURE(!setsockopt(client, IPPROTO_IP, IP_TOS, &on, sizeof on), "IP_TOS: %s", strerror(errno));
	TRY(text_to(client, "where", &at));
	ENSURE(recvmsg(server, &m, 0) == 5 && !memcmp(got, "where", 5), "recvmsg: %s", strerror(errno));
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
		if (c->cmsg_type == IP_PKTINFO)
			memcpy(&info, CMSG_DATA(c), sizeof info);
		else if (c->cmsg_type == IP_TOS)
			tos = *CMSG_DATA(c);
	}
	ENSURE(ntohl(info.ipi_addr.s_addr) == 0x7f000009 && info.ipi_ifindex == 1, "IP_PKTINFO: %x", ntohl(info.ipi_addr.s_addr));
	ENSURE(tos == 0x10, "IP_TOS: %d", tos);
	/* The server replies from the address that the request was sent to. */
	m.msg_controllen = CMSG_SPACE(sizeof info);
	m.msg_name = &from.addr;
	TRY(own_name(client, &from));
	((struct sockaddr_in *)&from.addr)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	m.msg_namelen = from.len;
	part.iov_len = 5;
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	*c = (struct cmsghdr){ .cmsg_level = IPPROTO_IP, .cmsg_type = IP_PKTINFO, .cmsg_len = CMSG_LEN(sizeof info) };
	info = (struct in_pktinfo){ .ipi_spec_dst.s_addr = htonl(0x7f000009) };
	memcpy(CMSG_DATA(c), &info, sizeof info);
	ENSURE(sendmsg(server, &m, 0) == 5, "sendmsg: %s", strerror(errno));
	if (!is_reliable())
		ENSURE((raw_length(client) > 5) == (head_of_messages() > 0),
		       "the reply is a message where a datagram is expected, or the reverse");
	TRY(takes_from(client, "where", &from));
	return same_address(&from, &at);
}

/* ---------------------------------------------------------------- sizes */

static const char *sizes(size_t family)
{
	static const size_t all[] = { 0, 1, 43, 44, 48, 1400, 1424, 1425, 1472, 1473, 9000, MOST - 49, MOST - 48, MOST - 47, MOST - 1, MOST };
	struct ends e;

	TRY(both_of(&e, (int)family));
	for (size_t i = 0; i < COUNT(all); i++) {
		for (size_t j = 0; j < all[i]; j++)
			big[j] = (char)(i * 31 + j * 7 + j / 256);
		TRY(send_to(e.client, big, all[i], &e.at));
		ssize_t n = recv(e.server, got, sizeof got, 0);
		ENSURE(n == (ssize_t)all[i] && !memcmp(got, big, all[i]), "%zu bytes: got %zd", all[i], n);
	}
	ENSURE(sendto(e.client, big, 65536, 0, name(&e.at), e.at.len) < 0 && errno == EMSGSIZE, "65536 bytes: %s", strerror(errno));
	if (family == AF_INET)
		ENSURE(sendto(e.client, big, MOST + 1, 0, name(&e.at), e.at.len) < 0 && errno == EMSGSIZE, "65508 bytes: %s",
		       strerror(errno));
	return nothing(e.server);
}

/*
 * A datagram that must not be fragmented, with the longest payload of the path and with one byte more, with and without
 * IP_RECVERR.
 */
static const char *path(size_t reports)
{
	int mtu = 0, on = IP_PMTUDISC_DO, report = (int)reports;
	socklen_t len = sizeof mtu;
	struct msghdr m = { 0 };
	struct ends e;

	TRY(both(&e));
	ENSURE(!connect(e.client, name(&e.at), e.at.len), "connect: %s", strerror(errno));
	ENSURE(!setsockopt(e.client, IPPROTO_IP, IP_MTU_DISCOVER, &on, sizeof on), "IP_MTU_DISCOVER: %s", strerror(errno));
	ENSURE(!setsockopt(e.client, IPPROTO_IP, IP_RECVERR, &report, sizeof report), "IP_RECVERR: %s", strerror(errno));
	ENSURE(!getsockopt(e.client, IPPROTO_IP, IP_MTU, &mtu, &len), "IP_MTU: %s", strerror(errno));
	size_t most = (size_t)mtu - 28 < MOST ? (size_t)mtu - 28 : MOST;
	ENSURE(send(e.client, big, most, 0) == (ssize_t)most, "send of %zu: %s", most, strerror(errno));
	ENSURE(recvmsg(e.client, &m, MSG_ERRQUEUE) < 0 && errno == EAGAIN, "a datagram that was sent has an error report");
	ENSURE(send(e.client, big, most + 1, 0) < 0 && errno == EMSGSIZE, "send of one more: %s", strerror(errno));
	ENSURE(recv(e.server, got, sizeof got, 0) == (ssize_t)most, "recv: %s", strerror(errno));
	return nothing(e.server);
}

static const char *cut_off(size_t arg)
{
	char a[4], b[3];
	struct iovec parts[2] = { { a, sizeof a }, { b, sizeof b } };
	struct msghdr m = { .msg_iov = parts, .msg_iovlen = 2 };
	struct ends e;
	ssize_t n;

	(void)arg;
	TRY(both(&e));
	TRY(text_to(e.client, "0123456789", &e.at));
	memset(got, '-', 8);
	ENSURE(recv(e.server, got, 4, MSG_PEEK) == 4 && !memcmp(got, "0123----", 8), "peek: %.8s", got);
	ENSURE(recv(e.server, got, 4, MSG_PEEK | MSG_TRUNC) == 10, "MSG_PEEK with MSG_TRUNC does not return the length");
	memset(a, '-', sizeof a);
	memset(b, '-', sizeof b);
	n = recvmsg(e.server, &m, MSG_PEEK);
	ENSURE(n == 7 && m.msg_flags == MSG_TRUNC && !memcmp(a, "0123", 4) && !memcmp(b, "456", 3), "recvmsg: %zd, flags %x", n,
	       m.msg_flags);
	n = recvmsg(e.server, &m, MSG_TRUNC);
	ENSURE(n == 10 && m.msg_flags == MSG_TRUNC, "recvmsg with the length: %zd, flags %x", n, m.msg_flags);
	TRY(nothing(e.server));
	/* Datagrams as long as the buffers, and longer ones. */
	TRY(text_to(e.client, "0123456", &e.at));
	n = recvmsg(e.server, &m, MSG_TRUNC);
	ENSURE(n == 7 && m.msg_flags == 0, "recvmsg: %zd, flags %x", n, m.msg_flags);
	TRY(text_to(e.client, "0123456789", &e.at));
	ENSURE(readv(e.server, parts, 2) == 7, "readv: %s", strerror(errno));
	TRY(text_to(e.client, "0123456789", &e.at));
	memset(got, '-', 8);
	ENSURE(read(e.server, got, 2) == 2 && !memcmp(got, "01------", 8), "read: %.8s", got);
	return nothing(e.server);
}

static const char *empty(size_t arg)
{
	struct iovec none = { got, 0 };
	struct ends e;

	(void)arg;
	TRY(both(&e));
	ENSURE(!connect(e.client, name(&e.at), e.at.len), "connect: %s", strerror(errno));
	/* An empty datagram is delivered. */
	ENSURE(send(e.client, "", 0, 0) == 0, "send: %s", strerror(errno));
	ENSURE(recv(e.server, got, sizeof got, 0) == 0, "recv: %s", strerror(errno));
	ENSURE(write(e.client, "", 0) == 0, "write: %s", strerror(errno));
	settle();
	ENSURE(recv(e.server, got, sizeof got, MSG_DONTWAIT) == 0, "write of 0 bytes: %s", strerror(errno));
	ENSURE(writev(e.client, &none, 1) == 0, "writev: %s", strerror(errno));
	TRY(nothing(e.server));
	/* A read(2) of 0 bytes consumes no datagram; a recv(2) of 0 bytes does. */
	TRY(text_to(e.client, "one", &e.at));
	ENSURE(read(e.server, got, 0) == 0, "read of 0 bytes: %s", strerror(errno));
	ENSURE(readv(e.server, &none, 1) == 0, "readv of 0 bytes: %s", strerror(errno));
	TRY(takes(e.server, "one"));
	TRY(text_to(e.client, "two", &e.at));
	ENSURE(recv(e.server, NULL, 0, 0) == 0, "recv of 0 bytes: %s", strerror(errno));
	return nothing(e.server);
}

static const char *bytes_available(size_t arg)
{
	struct ends e;
	int n = -1;

	(void)arg;
	TRY(both(&e));
	ENSURE(!ioctl(e.server, FIONREAD, &n) && n == 0, "FIONREAD: %d", n);
	TRY(text_to(e.client, "hello", &e.at));
	TRY(text_to(e.client, "and more", &e.at));
	settle();
	ENSURE(!ioctl(e.server, FIONREAD, &n) && n == 5, "FIONREAD: %d", n);
	TRY(takes(e.server, "hello"));
	ENSURE(!ioctl(e.server, FIONREAD, &n) && n == 8, "FIONREAD: %d", n);
	TRY(takes(e.server, "and more"));
	ENSURE(!ioctl(e.server, FIONREAD, &n) && n == 0, "FIONREAD: %d", n);
	return NULL;
}

/* ---------------------------------------------------------------- lists */

static const char *lists(size_t arg)
{
	struct mmsghdr out[4], in[4];
	struct iovec parts[8], into[4];
	char texts[4][8] = { "one", "two", "three", "four" }, buf[4][8];
	struct timespec soon = { 0, 0 };
	struct iovec all = { big, 9000 };
	struct mmsghdr long_one = { .msg_hdr = { .msg_iov = &all, .msg_iovlen = 1 } };
	struct ends e;

	(void)arg;
	TRY(both(&e));
	memcpy(big, "abc", 3);
	long_one.msg_hdr.msg_name = name(&e.at);
	long_one.msg_hdr.msg_namelen = e.at.len;
	memset(out, 0, sizeof out);
	memset(in, 0, sizeof in);
	for (size_t i = 0; i < 4; i++) {
		/* Each datagram is in two pieces. */
		parts[2 * i] = (struct iovec){ texts[i], 2 };
		parts[2 * i + 1] = (struct iovec){ texts[i] + 2, strlen(texts[i]) - 2 };
		out[i].msg_hdr = (struct msghdr){ .msg_iov = &parts[2 * i], .msg_iovlen = 2, .msg_name = name(&e.at), .msg_namelen = e.at.len };
		into[i] = (struct iovec){ buf[i], sizeof buf[i] };
		in[i].msg_hdr = (struct msghdr){ .msg_iov = &into[i], .msg_iovlen = 1 };
	}
	ENSURE(sendmmsg(e.client, out, 4, 0) == 4, "sendmmsg: %s", strerror(errno));
	for (size_t i = 0; i < 4; i++)
		ENSURE(out[i].msg_len == strlen(texts[i]), "datagram %zu: %u bytes sent", i, out[i].msg_len);
	ENSURE(recvmmsg(e.server, in, 4, 0, NULL) == 4, "recvmmsg: %s", strerror(errno));
	for (size_t i = 0; i < 4; i++)
		ENSURE(in[i].msg_len == strlen(texts[i]) && !memcmp(buf[i], texts[i], in[i].msg_len),
		       "datagram %zu has another length or other bytes", i);
	/* The datagrams that have arrived already are returned with the first. */
	ENSURE(sendmmsg(e.client, out, 2, 0) == 2, "sendmmsg: %s", strerror(errno));
	settle();
	ENSURE(recvmmsg(e.server, in, 4, MSG_WAITFORONE, NULL) == 2, "MSG_WAITFORONE: %s", strerror(errno));
	ENSURE(recvmmsg(e.server, in, 4, MSG_DONTWAIT, NULL) < 0 && errno == EAGAIN, "MSG_DONTWAIT: %s", strerror(errno));
	/* The buffers are too short. */
	into[0].iov_len = 2;
	into[1].iov_len = 3;
	ENSURE(sendmmsg(e.client, out, 4, 0) == 4, "sendmmsg: %s", strerror(errno));
	memset(buf, '-', sizeof buf);
	ENSURE(recvmmsg(e.server, in, 2, MSG_PEEK, NULL) == 2, "MSG_PEEK: %s", strerror(errno));
	ENSURE(in[0].msg_len == 2 && in[0].msg_hdr.msg_flags == MSG_TRUNC && !memcmp(buf[0], "on------", 8), "the first, cut off: %u, %x",
	       in[0].msg_len, in[0].msg_hdr.msg_flags);
	ENSURE(recvmmsg(e.server, in, 4, MSG_TRUNC, NULL) == 4, "MSG_TRUNC: %s", strerror(errno));
	ENSURE(in[0].msg_len == 3 && in[0].msg_hdr.msg_flags == MSG_TRUNC && !memcmp(buf[0], "on", 2), "the length of the first: %u", in[0].msg_len);
	ENSURE(in[1].msg_len == 3 && in[1].msg_hdr.msg_flags == 0 && !memcmp(buf[1], "two-----", 8), "the second: %u, %x", in[1].msg_len,
	       in[1].msg_hdr.msg_flags);
	ENSURE(sendmmsg(e.client, &long_one, 1, 0) == 1, "sendmmsg: %s", strerror(errno));
	ENSURE(recvmmsg(e.server, in, 1, MSG_TRUNC, NULL) == 1, "MSG_TRUNC: %s", strerror(errno));
	ENSURE(in[0].msg_len == 9000 && in[0].msg_hdr.msg_flags == MSG_TRUNC && !memcmp(buf[0], "ab", 2), "a long one: %u", in[0].msg_len);
	into[0].iov_len = into[1].iov_len = sizeof buf[0];
	/* recvmmsg checks the time after each datagram. */
	ENSURE(sendmmsg(e.client, out, 4, 0) == 4, "sendmmsg: %s", strerror(errno));
	ENSURE(recvmmsg(e.server, in, 4, 0, &soon) == 1, "recvmmsg with no time: %s", strerror(errno));
	ENSURE(recvmmsg(e.server, in, 3, 0, NULL) == 3, "recvmmsg: %s", strerror(errno));
	/* The second datagram has no address. */
	out[1].msg_hdr.msg_name = NULL;
	ENSURE(sendmmsg(e.client, out, 3, 0) == 1, "sendmmsg does not send one datagram before an invalid one");
	ENSURE(sendmmsg(e.client, out + 1, 1, 0) < 0 && errno == EDESTADDRREQ, "sendmmsg without address: %s", strerror(errno));
	return takes(e.server, "one");
}

/*
 * A list of datagrams to two receivers in turn. One of them does not use the library, and one datagram is too long for a
 * message.
 */
static const char *mixed_list(size_t arg)
{
	struct mmsghdr out[5];
	struct iovec parts[5];
	struct at plain_at = loopback(AF_INET);
	struct ends e;
	long n;
	int plain;

	(void)arg;
	TRY(both(&e));
	plain = (int)syscall(SYS_socket, AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	ENSURE(plain >= 0, "socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)plain, "descriptor");
	ENSURE(!syscall(SYS_bind, plain, name(&plain_at), plain_at.len), "bind: %s", strerror(errno));
	TRY(own_name(plain, &plain_at));
	memset(out, 0, sizeof out);
	for (size_t i = 0; i < COUNT(out); i++) {
		const struct at *to = i % 2 ? &plain_at : &e.at;

		parts[i] = (struct iovec){ big, i == 4 ? MOST : 10 + i };
		out[i].msg_hdr = (struct msghdr){ .msg_iov = &parts[i], .msg_iovlen = 1, .msg_name = name(to), .msg_namelen = to->len };
	}
	ENSURE(sendmmsg(e.client, out, 5, 0) == 5, "sendmmsg: %s", strerror(errno));
	for (size_t i = 0; i < COUNT(out); i++)
		ENSURE(out[i].msg_len == parts[i].iov_len, "datagram %zu: %u bytes sent", i, out[i].msg_len);
	settle();
	n = raw_length(e.server);
	if (!is_reliable())
		ENSURE((n > 10) == (head_of_messages() > 0), "%ld bytes received", n);
	for (size_t i = 0; i < COUNT(out); i++) {
		int fd = i % 2 ? plain : e.server;

		n = syscall(SYS_recvfrom, plain, got, sizeof got, MSG_PEEK | MSG_DONTWAIT, NULL, NULL);
		ENSURE(fd != plain || n == (long)parts[i].iov_len, "datagram %zu: %ld bytes to a plain receiver", i, n);
		ENSURE(recv(fd, got, sizeof got, 0) == (ssize_t)parts[i].iov_len, "datagram %zu has another length", i);
	}
	return NULL;
}

/* ---------------------------------------------------------------- waits */

static const char *nonblocking(size_t arg)
{
	struct timeval t = { 0, SHORT_MS * 1000 };
	struct ends e;
	uint64_t before;

	(void)arg;
	TRY(both(&e));
	TRY(nothing(e.server));
	ENSURE(!setsockopt(e.server, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t), "SO_RCVTIMEO: %s", strerror(errno));
	before = now_ms();
	ENSURE(recv(e.server, got, sizeof got, 0) < 0 && errno == EAGAIN, "recv: %s", strerror(errno));
	ENSURE(now_ms() - before >= SHORT_MS - 1 && now_ms() - before < LONG_MS, "%u ms", (unsigned int)(now_ms() - before));
	ENSURE(!fcntl(e.server, F_SETFL, O_NONBLOCK), "fcntl: %s", strerror(errno));
	ENSURE(read(e.server, got, sizeof got) < 0 && errno == EAGAIN, "read: %s", strerror(errno));
	TRY(text_to(e.client, "late", &e.at));
	settle();
	return takes(e.server, "late");
}

static void *send_later(void *arg)
{
	struct ends *e = arg;

	sleep_ms(SHORT_MS);
	return (void *)text_to(e->client, "later", &e->at);
}

static const char *ready(size_t arg)
{
	struct ends e;
	fd_set set;
	struct timeval t = { LONG_MS / 1000, 0 };
	struct pollfd p = { .events = POLLIN | POLLOUT };
	pthread_t thread;

	(void)arg;
	TRY(both(&e));
	p.fd = e.server;
	ENSURE(poll(&p, 1, 0) == 1 && p.revents == POLLOUT, "poll: %x", (unsigned int)p.revents);
	p.events = POLLIN;
	ENSURE(poll(&p, 1, SHORT_MS) == 0, "poll reports a datagram that was not sent");
	ENSURE(!pthread_create(&thread, NULL, send_later, &e), "pthread_create");
	ENSURE(poll(&p, 1, LONG_MS) == 1 && p.revents == POLLIN, "poll: %x", (unsigned int)p.revents);
	ENSURE(poll(&p, 1, 0) == 1, "a second poll does not report the datagram");
	ENSURE(!pthread_join(thread, NULL), "pthread_join");
	TRY(takes(e.server, "later"));
	ENSURE(poll(&p, 1, 0) == 0, "poll reports a datagram after the last");
	ENSURE(!pthread_create(&thread, NULL, send_later, &e), "pthread_create");
	FD_ZERO(&set);
	FD_SET(e.server, &set);
	ENSURE(select(e.server + 1, &set, NULL, NULL, &t) == 1 && FD_ISSET(e.server, &set), "select: %s", strerror(errno));
	ENSURE(!pthread_join(thread, NULL), "pthread_join");
	return takes(e.server, "later");
}

static const char *sets(size_t flags)
{
	struct epoll_event ev = { .events = EPOLLIN | (uint32_t)flags, .data.u64 = 7 }, out[2];
	struct ends e;
	int set = epoll_create1(EPOLL_CLOEXEC);

	ENSURE(set >= 0, "epoll_create1: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)set, "set");
	TRY(both(&e));
	ENSURE(!epoll_ctl(set, EPOLL_CTL_ADD, e.server, &ev), "epoll_ctl: %s", strerror(errno));
	ENSURE(epoll_wait(set, out, 2, SHORT_MS) == 0, "epoll_wait reports a datagram that was not sent");
	TRY(text_to(e.client, "one", &e.at));
	ENSURE(epoll_wait(set, out, 2, LONG_MS) == 1 && out[0].events == EPOLLIN && out[0].data.u64 == 7,
	       "epoll_wait does not report the first datagram");
	ENSURE(epoll_wait(set, out, 2, 0) == (flags == 0), "only a level-triggered event must be repeated");
	TRY(text_to(e.client, "two", &e.at));
	settle();
	ENSURE(epoll_wait(set, out, 2, 0) == (flags != EPOLLONESHOT),
	       "the second datagram must be reported, except with EPOLLONESHOT");
	if (flags == EPOLLONESHOT) {
		ENSURE(!epoll_ctl(set, EPOLL_CTL_MOD, e.server, &ev), "epoll_ctl: %s", strerror(errno));
		ENSURE(epoll_wait(set, out, 2, 0) == 1, "epoll_wait does not report the datagram after the socket was armed again");
	}
	TRY(takes(e.server, "one"));
	TRY(takes(e.server, "two"));
	ENSURE(epoll_wait(set, out, 2, SHORT_MS) == 0, "epoll_wait reports a datagram after the last");
	return NULL;
}

/* ---------------------------------------------------------------- connections */

static const char *connections(size_t arg)
{
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	struct at other_at, at;
	struct ends e;
	int other;

	(void)arg;
	TRY(both(&e));
	TRY(bound(&other, &other_at, AF_INET));
	ENSURE(send(e.client, "x", 1, 0) < 0 && errno == EDESTADDRREQ, "send without address: %s", strerror(errno));
	ENSURE(!connect(e.client, name(&e.at), e.at.len), "connect: %s", strerror(errno));
	TRY(own_name(e.client, &at));
	ENSURE(send(e.client, "one", 3, 0) == 3, "send: %s", strerror(errno));
	TRY(takes(e.server, "one"));
	/* A connected socket receives datagrams of its peer only. */
	if (is_reliable()) /* a reliable datagram would be repeated until the connection ends */
		ENSURE(syscall(SYS_sendto, other, "stranger", 8, 0, name(&at), at.len) == 8, "sendto: %s", strerror(errno));
	else
		TRY(text_to(other, "stranger", &at));
	TRY(text_to(e.server, "peer", &at));
	TRY(takes(e.client, "peer"));
	TRY(nothing(e.client));
	/*
	 * A connected socket can still send to another address, but not reliably: the kernel drops the acknowledgements
	 * of that address.
	 */
	if (is_reliable()) {
		TRY(text_to(e.client, "elsewhere", &other_at));
		TRY(takes(other, "elsewhere"));
	} else {
		TRY(send_kind(e.client, "elsewhere", &other_at, other, true));
	}
	/* A second connect changes the peer. */
	ENSURE(!connect(e.client, name(&other_at), other_at.len), "connect again: %s", strerror(errno));
	ENSURE(send(e.client, "two", 3, 0) == 3, "send: %s", strerror(errno));
	TRY(takes(other, "two"));
	settle(); /* AF_UNSPEC changes the port of the socket, and the acknowledgement must arrive at the old one */
	/* AF_UNSPEC removes the peer. */
	ENSURE(!connect(e.client, &none, sizeof none), "AF_UNSPEC: %s", strerror(errno));
	ENSURE(send(e.client, "x", 1, 0) < 0 && errno == EDESTADDRREQ, "send after AF_UNSPEC: %s", strerror(errno));
	TRY(send_kind(e.client, "three", &e.at, e.server, true));
	TRY(text_to(e.client, "four", &e.at));
	TRY(takes_from(e.server, "four", &at));
	TRY(send_kind(e.server, "five", &at, e.client, true));
	return nothing(other);
}

static const char *refused(size_t arg)
{
	struct ends e;
	struct pollfd p = { .events = POLLIN };
	int error = 0;
	socklen_t len = sizeof error;

	(void)arg;
	TRY(both(&e));
	ENSURE(!connect(e.client, name(&e.at), e.at.len), "connect: %s", strerror(errno));
	ENSURE(send(e.client, "one", 3, 0) == 3, "send: %s", strerror(errno));
	TRY(takes(e.server, "one"));
	close(e.server);
	ENSURE(send(e.client, "two", 3, 0) == 3, "send to a closed port: %s", strerror(errno));
	ENSURE(recv(e.client, got, sizeof got, 0) < 0 && errno == ECONNREFUSED, "recv: %s", strerror(errno));
	ENSURE(send(e.client, "three", 5, 0) == 5, "send to a closed port: %s", strerror(errno));
	settle();
	ENSURE(send(e.client, "four", 4, 0) < 0 && errno == ECONNREFUSED, "send: %s", strerror(errno));
	ENSURE(send(e.client, "five", 4, 0) == 4, "send to a closed port: %s", strerror(errno));
	p.fd = e.client;
	ENSURE(poll(&p, 1, LONG_MS) == 1 && (p.revents & POLLERR), "poll: %x", (unsigned int)p.revents);
	ENSURE(!getsockopt(e.client, SOL_SOCKET, SO_ERROR, &error, &len) && error == ECONNREFUSED, "SO_ERROR: %d", error);
	return nothing(e.client);
}

/* MSG_ERRQUEUE returns the datagram that caused the error. */
static const char *errors(size_t arg)
{
	char control[512];
	struct iovec part = { got, sizeof got };
	struct msghdr m = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	struct sock_extended_err *why = NULL;
	struct mmsghdr list[2] = { { .msg_hdr = { .msg_iov = &part, .msg_iovlen = 1 } }, { .msg_hdr = { .msg_iov = &part, .msg_iovlen = 1 } } };
	struct ends e;
	int on = 1;
	ssize_t n;

	(void)arg;
	TRY(both(&e));
	ENSURE(!setsockopt(e.client, IPPROTO_IP, IP_RECVERR, &on, sizeof on), "IP_RECVERR: %s", strerror(errno));
	TRY(text_to(e.client, "one", &e.at));
	TRY(takes(e.server, "one"));
	close(e.server);
	TRY(text_to(e.client, "a lost datagram", &e.at));
	ENSURE(recv(e.client, got, sizeof got, 0) < 0 && errno == ECONNREFUSED, "recv: %s", strerror(errno));
	n = recvmsg(e.client, &m, MSG_ERRQUEUE);
	ENSURE(n == 15 && !memcmp(got, "a lost datagram", 15), "the datagram: %zd bytes", n);
	ENSURE((m.msg_flags & ~MSG_CTRUNC) == MSG_ERRQUEUE, "flags %x", m.msg_flags);
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
		if (c->cmsg_type == IP_RECVERR)
			why = (struct sock_extended_err *)CMSG_DATA(c);
	ENSURE(why && why->ee_errno == ECONNREFUSED, "the error report has no reason");
	/* The same with recvmmsg, and with a buffer that is too short: the full length of the datagram is not reported. */
	TRY(text_to(e.client, "another", &e.at));
	ENSURE(recv(e.client, got, sizeof got, 0) < 0 && errno == ECONNREFUSED, "recv: %s", strerror(errno));
	ENSURE(recvmmsg(e.client, list, 2, MSG_ERRQUEUE, NULL) == 1, "recvmmsg: %s", strerror(errno));
	ENSURE(list[0].msg_len == 7 && !memcmp(got, "another", 7), "the datagram of a list: %u bytes", list[0].msg_len);
	TRY(text_to(e.client, "the third", &e.at));
	ENSURE(recv(e.client, got, sizeof got, 0) < 0 && errno == ECONNREFUSED, "recv: %s", strerror(errno));
	part.iov_len = 3;
	m.msg_controllen = sizeof control;
	n = recvmsg(e.client, &m, MSG_ERRQUEUE | MSG_TRUNC);
	ENSURE(n == 3 && !memcmp(got, "the", 3) && (m.msg_flags & MSG_TRUNC), "the datagram, cut off: %zd, flags %x", n, m.msg_flags);
	return NULL;
}

static const char *shut(size_t arg)
{
	struct ends e;

	(void)arg;
	TRY(both(&e));
	ENSURE(shutdown(e.client, SHUT_WR) < 0 && errno == ENOTCONN, "shutdown before connect: %s", strerror(errno));
	ENSURE(!connect(e.client, name(&e.at), e.at.len), "connect: %s", strerror(errno));
	ENSURE(!shutdown(e.client, SHUT_WR), "shutdown: %s", strerror(errno));
	ENSURE(send(e.client, "x", 1, 0) < 0 && errno == EPIPE, "send after shutdown: %s", strerror(errno));
	ENSURE(!shutdown(e.client, SHUT_RD), "shutdown: %s", strerror(errno));
	ENSURE(recv(e.client, got, sizeof got, 0) == 0, "recv after shutdown: %s", strerror(errno));
	return nothing(e.server);
}

/* ---------------------------------------------------------------- datagrams that are not upgraded */

static const char *groups(size_t arg)
{
	struct ip_mreqn join = { .imr_multiaddr.s_addr = htonl(0xef010203), .imr_address.s_addr = htonl(INADDR_LOOPBACK) };
	struct at at = loopback(AF_INET);
	int client, members[2], on = 1;

	(void)arg;
	TRY(made(&client, AF_INET));
	((struct sockaddr_in *)&at.addr)->sin_addr.s_addr = 0;
	for (int i = 0; i < 2; i++) {
		TRY(made(&members[i], AF_INET));
		ENSURE(!setsockopt(members[i], SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), "SO_REUSEADDR: %s", strerror(errno));
		ENSURE(!bind(members[i], name(&at), at.len), "bind: %s", strerror(errno));
		ENSURE(!setsockopt(members[i], IPPROTO_IP, IP_ADD_MEMBERSHIP, &join, sizeof join), "join: %s", strerror(errno));
		TRY(own_name(members[i], &at));
	}
	((struct sockaddr_in *)&at.addr)->sin_addr = join.imr_multiaddr;
	ENSURE(!setsockopt(client, IPPROTO_IP, IP_MULTICAST_IF, &join, sizeof join), "IP_MULTICAST_IF: %s", strerror(errno));
	TRY(send_kind(client, "to all", &at, members[0], false));
	return takes(members[1], "to all");
}

static const char *corked(size_t arg)
{
	struct iovec parts[2] = { { "seven", 5 }, { "eight", 5 } };
	struct mmsghdr list[2] = { { .msg_hdr = { .msg_iov = &parts[0], .msg_iovlen = 1 } },
				   { .msg_hdr = { .msg_iov = &parts[1], .msg_iovlen = 1 } } };
	struct ends e;
	int on = 1;

	(void)arg;
	TRY(both(&e));
	ENSURE(!connect(e.client, name(&e.at), e.at.len), "connect: %s", strerror(errno));
	ENSURE(send(e.client, "one ", 4, MSG_MORE) == 4 && send(e.client, "two ", 4, MSG_MORE) == 4, "MSG_MORE: %s", strerror(errno));
	TRY(nothing(e.server));
	ENSURE(send(e.client, "three", 5, 0) == 5, "send: %s", strerror(errno));
	TRY(takes(e.server, "one two three"));
	TRY(send_kind(e.client, "alone", &e.at, e.server, true));
	/* The first datagram of a list completes the pending data. */
	ENSURE(send(e.client, "six ", 4, MSG_MORE) == 4, "MSG_MORE: %s", strerror(errno));
	ENSURE(sendmmsg(e.client, list, 2, 0) == 2, "sendmmsg: %s", strerror(errno));
	TRY(takes(e.server, "six seven"));
	TRY(takes(e.server, "eight"));
	TRY(send_kind(e.client, "alone", &e.at, e.server, true));
	/* A call that fails does not add its data. */
	ENSURE(send(e.client, "nine ", 5, MSG_MORE) == 5, "MSG_MORE: %s", strerror(errno));
	ENSURE(send(e.client, big, 65536, 0) < 0 && errno == EMSGSIZE, "a datagram that is too long: %s", strerror(errno));
	ENSURE(send(e.client, "ten", 3, 0) == 3, "send: %s", strerror(errno));
	TRY(takes(e.server, "nine ten"));
	ENSURE(!setsockopt(e.client, IPPROTO_UDP, UDP_CORK, &on, sizeof on), "UDP_CORK: %s", strerror(errno));
	ENSURE(send(e.client, "four ", 5, 0) == 5 && send(e.client, "five", 4, 0) == 4, "UDP_CORK: %s", strerror(errno));
	TRY(nothing(e.server));
	on = 0;
	ENSURE(!setsockopt(e.client, IPPROTO_UDP, UDP_CORK, &on, sizeof on), "UDP_CORK: %s", strerror(errno));
	TRY(takes(e.server, "four five"));
	return send_kind(e.client, "alone", &e.at, e.server, true);
}

static const char *segmented(size_t arg)
{
	char control[CMSG_SPACE(sizeof(uint16_t))] = { 0 };
	struct iovec part = { "abcdefgh", 8 };
	struct msghdr m = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	struct ends e;
	int size = 3;

	(void)arg;
	TRY(both(&e));
	ENSURE(!connect(e.client, name(&e.at), e.at.len), "connect: %s", strerror(errno));
	ENSURE(!setsockopt(e.client, IPPROTO_UDP, UDP_SEGMENT, &size, sizeof size), "UDP_SEGMENT: %s", strerror(errno));
	ENSURE(send(e.client, "abcdefgh", 8, 0) == 8, "send: %s", strerror(errno));
	TRY(takes(e.server, "abc"));
	TRY(takes(e.server, "def"));
	TRY(takes(e.server, "gh"));
	size = 0;
	ENSURE(!setsockopt(e.client, IPPROTO_UDP, UDP_SEGMENT, &size, sizeof size), "UDP_SEGMENT: %s", strerror(errno));
	TRY(send_kind(e.client, "whole", &e.at, e.server, true));
	*c = (struct cmsghdr){ .cmsg_level = IPPROTO_UDP, .cmsg_type = UDP_SEGMENT, .cmsg_len = CMSG_LEN(sizeof(uint16_t)) };
	*(uint16_t *)CMSG_DATA(c) = 5;
	ENSURE(sendmsg(e.client, &m, 0) == 8, "sendmsg: %s", strerror(errno));
	TRY(takes(e.server, "abcde"));
	return takes(e.server, "fgh");
}

/* Datagrams of a program without the library, some of which look like messages. */
static const char *plain_peers(size_t arg)
{
	/* A Send of "hello" for another queue pair, from docs/datagram-iwarp-vectors.md. */
	static const unsigned char vector[] = { 0xdc, 0x10, 0x12, 0x34, 0x11, 0x11, 0x11, 0x11, 0, 0, 0, 1, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 3,
						7, 0, 0, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 'h', 'e', 'l', 'l',
						'o', 0x46, 0xb8, 0x3b, 0xd7 };
	struct at at, from;
	struct ends e;
	long wire;
	int plain, tap;

	(void)arg;
	TRY(both(&e));
	/* The socket is created by a direct system call, as if by a program without the library. */
	plain = (int)syscall(SYS_socket, AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	ENSURE(plain >= 0, "socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)plain, "descriptor");
	at = loopback(AF_INET);
	ENSURE(!syscall(SYS_bind, plain, name(&at), at.len), "bind: %s", strerror(errno));
	TRY(own_name(plain, &at));
	TRY(send_kind(plain, "plain", &e.at, e.server, false));
	TRY(text_to(plain, "plain", &e.at));
	TRY(takes_from(e.server, "plain", &from));
	TRY(send_kind(e.server, "plain too", &from, plain, false));
	ENSURE(syscall(SYS_sendto, plain, vector, sizeof vector, 0, name(&e.at), e.at.len) == sizeof vector, "sendto");
	ENSURE(recv(e.server, got, sizeof got, 0) == sizeof vector && !memcmp(got, vector, sizeof vector),
	       "the prepared message is not delivered");
	/* A message that the library has sent, with one bit changed. */
	if (is_reliable()) {
		TRY(text_to(e.client, "first", &e.at));
		TRY(takes(e.server, "first"));
		TRY(tapped(&tap));
		TRY(text_to(e.client, "message", &e.at));
		TRY(takes(e.server, "message"));
		TRY(seen(tap, "message", true));
		wire = (long)seen_bytes;
		memmove(big, big + seen_at, seen_bytes);
	} else {
		TRY(text_to(e.client, "message", &e.at));
		wire = raw_length(e.server);
		memcpy(big, got, (size_t)wire);
		TRY(takes(e.server, "message"));
	}
	for (long bit = 0; bit < wire * 8; bit++) {
		big[bit / 8] ^= (char)(1 << bit % 8);
		ENSURE(syscall(SYS_sendto, plain, big, wire, 0, name(&e.at), e.at.len) == wire, "sendto: %s", strerror(errno));
		ENSURE(recv(e.server, got, sizeof got, 0) == wire && !memcmp(got, big, (size_t)wire),
		       "bit %ld: a damaged message is not delivered unchanged", bit);
		big[bit / 8] ^= (char)(1 << bit % 8);
	}
	return nothing(e.server);
}

/* A program without the library binds the same port. It soon gets plain datagrams. */
static const char *replaced(size_t arg)
{
	struct ends e;
	int plain;

	(void)arg;
	TRY(both(&e));
	TRY(send_kind(e.client, "one", &e.at, e.server, true));
	close(e.server);
	plain = (int)syscall(SYS_socket, AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	ENSURE(plain >= 0, "socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)plain, "descriptor");
	ENSURE(!syscall(SYS_bind, plain, name(&e.at), e.at.len), "bind: %s", strerror(errno));
	sleep_ms(300);
	return send_kind(e.client, "two", &e.at, plain, false);
}

/* ---------------------------------------------------------------- descriptors, processes, threads */

static const char *copies(size_t arg)
{
	struct ends e;
	int copy;

	(void)arg;
	TRY(both(&e));
	copy = dup(e.server);
	ENSURE(copy >= 0, "dup: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)copy, "copy");
	TRY(text_to(e.client, "one", &e.at));
	TRY(takes(copy, "one"));
	close(e.server);
	TRY(send_kind(e.client, "two", &e.at, copy, true));
	copy = dup2(copy, e.server);
	ENSURE(copy == e.server, "dup2: %s", strerror(errno));
	return send_kind(e.client, "three", &e.at, e.server, true);
}

#define LAST_WORDS 50

static const char *forked(size_t arg)
{
	struct at from;
	struct ends e;
	int status;
	pid_t child;

	(void)arg;
	TRY(both(&e));
	TRY(text_to(e.client, "ask", &e.at));
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		bool ok = !takes_from(e.server, "ask", &from);

		for (int i = 0; i < LAST_WORDS; i++)
			ok = ok && !text_to(e.server, "answer", &from);
		_exit(!ok);
	}
	/* What the child has sent right before its end arrives too. */
	for (int i = 0; i < LAST_WORDS; i++)
		TRY(takes(e.client, "answer"));
	ENSURE(waitpid(child, &status, 0) == child && !status, "the child failed");
	/* Parent and child both still use the socket. */
	TRY(send_kind(e.client, "more", &e.at, e.server, true));
	child = fork();
	ENSURE(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		close(e.server);
		_exit(text_to(e.client, "from the child", &e.at) != NULL);
	}
	TRY(takes(e.server, "from the child"));
	ENSURE(waitpid(child, &status, 0) == child && !status, "the child failed");
	return send_kind(e.client, "the last", &e.at, e.server, true);
}

/*
 * After the descriptor is passed on, the receiver may be a program without the library, so datagrams to it are plain. (Here nobody
 * receives the descriptor.)
 */
static const char *passed(size_t arg)
{
	char control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec part = { "x", 1 };
	struct msghdr m = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	struct ends e;
	int pair[2];

	(void)arg;
	TRY(both(&e));
	TRY(send_kind(e.client, "one", &e.at, e.server, true));
	TRY(text_to(e.client, "before", &e.at));
	settle();
	ENSURE(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), "socketpair: %s", strerror(errno));
	*c = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int)) };
	memcpy(CMSG_DATA(c), &e.server, sizeof(int));
	ENSURE(sendmsg(pair[0], &m, 0) == 1, "sendmsg: %s", strerror(errno));
	close(pair[0]);
	close(pair[1]);
	/* A message that has already arrived is still decoded here. */
	TRY(takes(e.server, "before"));
	sleep_ms(300);
	return send_kind(e.client, "two", &e.at, e.server, false);
}

#define THREADS 4
#define EACH 2000

struct worker {
	struct ends *ends;
	const char *error;
	size_t taken;
};

static void *send_many(void *arg)
{
	struct worker *w = arg;
	uint32_t word[16];

	for (uint32_t i = 0; i < EACH && !w->error; i++) {
		for (size_t j = 0; j < COUNT(word); j++)
			word[j] = i * 16 + (uint32_t)j;
		w->error = send_to(w->ends->client, word, sizeof word, &w->ends->at);
		if (i % 16 == 15)
			sched_yield();
	}
	return NULL;
}

static void *take_many(void *arg)
{
	struct worker *w = arg;
	uint32_t word[32];

	while (!w->error) {
		ssize_t n = recv(w->ends->server, word, sizeof word, 0);

		if (n < 0 && errno == EAGAIN)
			return NULL;
		if (n != 64)
			w->error = because("a datagram of %zd bytes", n);
		for (size_t j = 0; j < 16 && !w->error; j++)
			if (word[j] != word[0] + j)
				w->error = "a datagram with parts of another";
		w->taken++;
	}
	return NULL;
}

static const char *many_threads(size_t arg)
{
	struct timeval t = { 0, 300 * 1000 };
	struct worker w[2 * THREADS];
	pthread_t threads[2 * THREADS];
	struct ends e;
	size_t taken = 0;

	(void)arg;
	TRY(both(&e));
	ENSURE(!setsockopt(e.server, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t), "SO_RCVTIMEO: %s", strerror(errno));
	for (size_t i = 0; i < 2 * THREADS; i++) {
		w[i] = (struct worker){ .ends = &e };
		ENSURE(!pthread_create(&threads[i], NULL, i < THREADS ? take_many : send_many, &w[i]), "pthread_create");
	}
	for (size_t i = 0; i < 2 * THREADS; i++) {
		ENSURE(!pthread_join(threads[i], NULL), "pthread_join");
		ENSURE(!w[i].error, "%s", w[i].error);
		taken += w[i].taken;
	}
	/* The kernel drops some datagrams if the readers are late. */
	ENSURE(taken > EACH / 2, "only %zu of %u datagrams arrive", taken, THREADS * EACH);
	return NULL;
}

static void *wait_for_ever(void *arg)
{
	struct ends *e = arg;
	char buf[16];

	recv(e->server, buf, sizeof buf, 0);
	return NULL;
}

static const char *cancelled(size_t arg)
{
	struct ends e;
	void *result;

	(void)arg;
	TRY(both(&e));
	for (int i = 0; i < 50; i++) {
		pthread_t thread;

		ENSURE(!pthread_create(&thread, NULL, wait_for_ever, &e), "pthread_create");
		if (i % 2)
			sleep_ms(2);
		ENSURE(!pthread_cancel(thread) && !pthread_join(thread, &result), "pthread_cancel");
		ENSURE(result == PTHREAD_CANCELED, "the thread was not cancelled");
	}
	TRY(text_to(e.client, "still", &e.at));
	return takes(e.server, "still");
}

static char in_handler[16];
static ssize_t handled;
static int handler_fd;

static void take_in_handler(int signal)
{
	int saved = errno;

	(void)signal;
	handled = recv(handler_fd, in_handler, sizeof in_handler, MSG_DONTWAIT);
	errno = saved;
}

static void *signal_later(void *arg)
{
	sleep_ms(SHORT_MS);
	pthread_kill(*(pthread_t *)arg, SIGUSR1);
	return NULL;
}

/* A signal interrupts a call that waits, and its handler reads another socket. */
static const char *interrupted(size_t arg)
{
	struct sigaction act = { .sa_handler = take_in_handler };
	pthread_t self = pthread_self(), thread;
	struct ends e;
	struct at at;

	(void)arg;
	TRY(both(&e));
	TRY(bound(&handler_fd, &at, AF_INET));
	TRY(text_to(e.client, "handled", &at));
	ENSURE(!sigaction(SIGUSR1, &act, NULL), "sigaction: %s", strerror(errno));
	ENSURE(!pthread_create(&thread, NULL, signal_later, &self), "pthread_create");
	ENSURE(recv(e.server, got, sizeof got, 0) < 0 && errno == EINTR, "recv: %s", strerror(errno));
	ENSURE(!pthread_join(thread, NULL), "pthread_join");
	ENSURE(handled == 7 && !memcmp(in_handler, "handled", 7), "the handler got %zd", handled);
	TRY(text_to(e.client, "after", &e.at));
	return takes(e.server, "after");
}

/* Datagrams that exceed the socket's buffer are dropped, and the others are complete. Reliable ones are not dropped. */
static const char *overflow(size_t arg)
{
	struct ends e;
	size_t n = 0;
	int size = 4096;

	(void)arg;
	TRY(both(&e));
	ENSURE(!setsockopt(e.server, SOL_SOCKET, SO_RCVBUF, &size, sizeof size), "SO_RCVBUF: %s", strerror(errno));
	for (uint32_t i = 0; i < 1000; i++)
		TRY(send_to(e.client, &i, sizeof i, &e.at));
	for (uint32_t i; n < 1000 && recv(e.server, &i, sizeof i, is_reliable() ? 0 : MSG_DONTWAIT) == sizeof i; n++)
		ENSURE(i == n, "datagram %u, expected %zu", i, n);
	ENSURE(n > 0 && (n < 1000) != is_reliable(), "%zu datagrams", n);
	TRY(text_to(e.client, "after", &e.at));
	return takes(e.server, "after");
}

/* A server with one socket for each client, all at one port. */
static const char *one_port(size_t arg)
{
	struct at at, from;
	int server, child, client, other, on = 1;

	(void)arg;
	TRY(made(&server, AF_INET));
	ENSURE(!setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), "SO_REUSEADDR: %s", strerror(errno));
	at = loopback(AF_INET);
	ENSURE(!bind(server, name(&at), at.len), "bind: %s", strerror(errno));
	TRY(own_name(server, &at));
	TRY(made(&client, AF_INET));
	TRY(made(&other, AF_INET));
	TRY(text_to(client, "hello", &at));
	TRY(takes_from(server, "hello", &from));
	TRY(made(&child, AF_INET));
	ENSURE(!setsockopt(child, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), "SO_REUSEADDR: %s", strerror(errno));
	ENSURE(!bind(child, name(&at), at.len), "bind: %s", strerror(errno));
	ENSURE(!connect(child, name(&from), from.len), "connect: %s", strerror(errno));
	TRY(send_kind(client, "for the child", &at, child, true));
	ENSURE(send(child, "to the client", 13, 0) == 13, "send: %s", strerror(errno));
	TRY(takes(client, "to the client"));
	close(server);
	sleep_ms(300);
	return send_kind(client, "again", &at, child, true);
}

/* The library leaves most descriptors to a program with many sockets. */
static const char *many_sockets(size_t arg)
{
	struct rlimit limit = { 256, 256 };
	int fds[256], n = 0, server;
	struct at at;

	(void)arg;
	ENSURE(!setrlimit(RLIMIT_NOFILE, &limit), "setrlimit: %s", strerror(errno));
	TRY(bound(&server, &at, AF_INET));
	while ((fds[n] = socket(AF_INET, SOCK_DGRAM, 0)) >= 0) {
		TRY(text_to(fds[n++], "hello", &at));
		TRY(takes(server, "hello"));
	}
	ENSURE(errno == EMFILE, "socket: %s", strerror(errno));
	/* A socket with reliable datagrams takes five descriptors. */
	ENSURE(n >= 256 - 256 / 8 - 16 - (is_reliable() ? 256 / 8 * 4 : 0), "%d sockets", n);
	while (n > 0)
		close(fds[--n]);
	ENSURE((fds[0] = socket(AF_INET, SOCK_DGRAM, 0)) >= 0, "socket: %s", strerror(errno));
	TRY(send_kind(fds[0], "again", &at, server, true));
	close(fds[0]);
	return NULL;
}

/* ---------------------------------------------------------------- concurrent and invalid calls */

static void *take_early(void *arg)
{
	const struct ends *e = arg;
	char buf[64];
	ssize_t n = recv(e->client, buf, sizeof buf, 0);

	return (void *)(n == 6 && !memcmp(buf, "answer", 6) ? NULL : because("the early reader got %zd bytes", n));
}

/* A thread waits for a datagram on a socket that has not sent anything yet, and therefore has no port. */
static const char *early_reader(size_t arg)
{
	struct ends e;
	struct at from;
	pthread_t thread;
	void *error;

	(void)arg;
	TRY(both(&e));
	ENSURE(!pthread_create(&thread, NULL, take_early, &e), "pthread_create");
	sleep_ms(SHORT_MS);
	TRY(text_to(e.client, "ask", &e.at));
	TRY(takes_from(e.server, "ask", &from));
	TRY(text_to(e.server, "answer", &from));
	ENSURE(!pthread_join(thread, &error), "pthread_join");
	ENSURE(!error, "%s", (const char *)error);
	return NULL;
}

/* A call that succeeds does not change errno. */
static const char *no_error(size_t arg)
{
	struct ends e;

	(void)arg;
	TRY(both(&e));
	for (int i = 0; i < 200; i++) {
		errno = 0;
		TRY(text_to(e.client, "hello", &e.at));
		TRY(takes(e.server, "hello"));
		ENSURE(!errno, "datagram %d: %s", i, strerror(errno));
	}
	return NULL;
}

/* The program replaces the library's own descriptors, which it does not know, with a listener. */
static const char *descriptors_replaced(size_t arg)
{
	struct at at = loopback(AF_INET);
	int listener, stream, accepted;
	struct ends e;

	(void)arg;
	TRY(both(&e));
	TRY(send_kind(e.client, "one", &e.at, e.server, true));
	listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	ENSURE(listener >= 0 && !bind(listener, name(&at), at.len) && !listen(listener, 8), "listener: %s", strerror(errno));
	TRY(own_name(listener, &at));
	for (int fd = 1000; fd < 1016; fd++)
		if (syscall(SYS_fcntl, fd, F_GETFD) >= 0)
			ENSURE(dup2(listener, fd) == fd, "dup2: %s", strerror(errno));
	stream = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(stream >= 0 && !connect(stream, name(&at), at.len), "connect: %s", strerror(errno));
	for (int i = 0; i < 200; i++) {
		TRY(text_to(e.client, "hello", &e.at));
		TRY(takes(e.server, "hello"));
	}
	close(e.server);
	accepted = accept(listener, NULL, NULL);
	ENSURE(accepted >= 0, "accept: %s", strerror(errno));
	return NULL;
}

/* FIONREAD does not consume a pending error. */
static const char *pending_error(size_t arg)
{
	struct ends e;
	struct at at;
	int error = 0, n = -1;
	socklen_t len = sizeof error;

	(void)arg;
	TRY(both(&e));
	ENSURE(!connect(e.client, name(&e.at), e.at.len), "connect: %s", strerror(errno));
	TRY(own_name(e.client, &at));
	TRY(text_to(e.server, "hello", &at));
	settle();
	close(e.server);
	ENSURE(send(e.client, "one", 3, 0) == 3, "send without a receiver: %s", strerror(errno));
	settle();
	ENSURE(!ioctl(e.client, FIONREAD, &n) && n >= 5, "FIONREAD: %d", n);
	ENSURE(recv(e.client, got, sizeof got, 0) < 0 && errno == ECONNREFUSED, "recv: %s", strerror(errno));
	ENSURE(!ioctl(e.client, FIONREAD, &n) && n == 5, "FIONREAD: %d", n);
	TRY(takes(e.client, "hello"));
	ENSURE(send(e.client, "two", 3, 0) == 3, "send without a receiver: %s", strerror(errno));
	settle();
	ENSURE(!ioctl(e.client, FIONREAD, &n) && n == 0, "FIONREAD: %d", n);
	ENSURE(!getsockopt(e.client, SOL_SOCKET, SO_ERROR, &error, &len) && error == ECONNREFUSED, "SO_ERROR: %d", error);
	return NULL;
}

static const char *invalid_buffers(size_t arg)
{
	struct iovec one = { big, 1 };
	struct msghdr m = { .msg_iov = &one, .msg_iovlen = (size_t)1 << 40 };
	struct mmsghdr list[2] = { { .msg_hdr = m }, { .msg_hdr = m } };
	struct pollfd input = { .events = POLLIN };
	struct ends e;

	(void)arg;
	TRY(both(&e));
	input.fd = e.server;
	ENSURE(!connect(e.client, name(&e.at), e.at.len), "connect: %s", strerror(errno));
	ENSURE(send(e.client, NULL, 10, 0) < 0 && errno == EFAULT, "send from a null pointer: %s", strerror(errno));
	ENSURE(sendmsg(e.client, &m, 0) < 0 && errno == EMSGSIZE, "sendmsg of too many parts: %s", strerror(errno));
	ENSURE(sendmmsg(e.client, list, 2, 0) < 0 && errno == EMSGSIZE, "sendmmsg of too many parts: %s", strerror(errno));
	list[0].msg_hdr.msg_iovlen = 1;
	ENSURE(sendmmsg(e.client, list, 2, 0) == 1, "sendmmsg with an invalid datagram: %s", strerror(errno));
	ENSURE(recvmsg(e.server, &m, 0) < 0 && errno == EMSGSIZE, "recvmsg to too many parts: %s", strerror(errno));
	ENSURE(poll(&input, 1, 5000) == 1, "the valid datagram does not arrive");
	ENSURE(recvmmsg(e.server, list, 2, MSG_DONTWAIT, NULL) == 1, "recvmmsg: %s", strerror(errno));
	list[0].msg_hdr.msg_iovlen = 1025;
	ENSURE(recvmmsg(e.server, list, 1, MSG_DONTWAIT, NULL) < 0 && errno == EMSGSIZE, "recvmmsg to too many parts: %s", strerror(errno));
	TRY(text_to(e.client, "lost", &e.at));
	ENSURE(recv(e.server, NULL, 10, 0) < 0 && errno == EFAULT, "recv to a null pointer: %s", strerror(errno));
	TRY(text_to(e.client, "after", &e.at));
	return takes(e.server, "after");
}

/* A socket that has sent nothing, in a process without other sockets, is passed to another program. */
static const char *passed_unused(size_t arg)
{
	char control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec part = { "x", 1 };
	struct msghdr m = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	struct ends e;
	int pair[2];

	(void)arg;
	TRY(made(&e.client, AF_INET));
	ENSURE(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), "socketpair: %s", strerror(errno));
	*c = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int)) };
	memcpy(CMSG_DATA(c), &e.client, sizeof(int));
	ENSURE(sendmsg(pair[0], &m, 0) == 1, "sendmsg: %s", strerror(errno));
	close(pair[0]);
	close(pair[1]);
	TRY(bound(&e.server, &e.at, AF_INET));
	return send_kind(e.client, "plain", &e.at, e.server, false);
}

/* A child of vfork executes a program. The parent's sockets stay upgraded, including the one that is standard input. */
static const char *vfork_child(size_t arg)
{
	char *const command[] = { "true", NULL };
	struct ends e;
	int status;
	pid_t child;

	(void)arg;
	TRY(both(&e));
	ENSURE(dup2(e.server, STDIN_FILENO) == STDIN_FILENO, "dup2: %s", strerror(errno));
	TRY(send_kind(e.client, "one", &e.at, e.server, true));
	child = vfork();
	if (!child) {
		execv("/bin/true", command);
		_exit(1);
	}
	ENSURE(child > 0 && waitpid(child, &status, 0) == child && !status, "the child failed");
	sleep_ms(300);
	return send_kind(e.client, "two", &e.at, STDIN_FILENO, true);
}

/* Programs with and without the library use the same port number, one with IPv6 and one with IPv4. */
static const char *v6_only(size_t arg)
{
	struct at at = loopback(AF_INET6), plain_at = loopback(AF_INET);
	int server, client, plain, on = 1;

	(void)arg;
	TRY(made(&server, AF_INET6));
	((struct sockaddr_in6 *)&at.addr)->sin6_addr = in6addr_any;
	ENSURE(!setsockopt(server, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on), "IPV6_V6ONLY: %s", strerror(errno));
	ENSURE(!bind(server, name(&at), at.len), "bind: %s", strerror(errno));
	TRY(own_name(server, &at));
	plain = (int)syscall(SYS_socket, AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	ENSURE(plain >= 0, "socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)plain, "descriptor");
	*port_of(&plain_at) = *port_of(&at);
	ENSURE(!syscall(SYS_bind, plain, name(&plain_at), plain_at.len), "bind: %s", strerror(errno));
	TRY(made(&client, AF_INET));
	TRY(send_kind(client, "plain", &plain_at, plain, false));
	TRY(made(&client, AF_INET6));
	((struct sockaddr_in6 *)&at.addr)->sin6_addr = in6addr_loopback;
	return send_kind(client, "message", &at, server, true);
}

/* Broadcasts are plain datagrams, because some hosts of the network may not use the library. */
static const char *broadcast(size_t arg)
{
	struct at at = loopback(AF_INET);
	int client, server, on = 1;

	(void)arg;
	TRY(made(&server, AF_INET));
	((struct sockaddr_in *)&at.addr)->sin_addr.s_addr = 0;
	ENSURE(!bind(server, name(&at), at.len), "bind: %s", strerror(errno));
	TRY(own_name(server, &at));
	((struct sockaddr_in *)&at.addr)->sin_addr.s_addr = htonl(0x7fffffff);
	TRY(made(&client, AF_INET));
	ENSURE(sendto(client, "x", 1, 0, name(&at), at.len) < 0 && errno == EACCES, "without SO_BROADCAST: %s", strerror(errno));
	ENSURE(!setsockopt(client, SOL_SOCKET, SO_BROADCAST, &on, sizeof on), "SO_BROADCAST: %s", strerror(errno));
	TRY(send_kind(client, "to all", &at, server, false));
	((struct sockaddr_in *)&at.addr)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return send_kind(client, "to one", &at, server, true);
}

static const struct test tests[] = {
	{ "is_upgraded", is_upgraded, AF_INET, 0, false },
	{ "is_upgraded_v6", is_upgraded, AF_INET6, 0, false },
	{ "sources", sources, AF_INET, 0, false },
	{ "sources_v6", sources, AF_INET6, 0, false },
	{ "mapped", mapped, 0, 0, false },
	{ "packet_info", packet_info, 0, 0, false },
	{ "sizes", sizes, AF_INET, 0, false },
	{ "sizes_v6", sizes, AF_INET6, 0, false },
	{ "path", path, 0, 0, false },
	{ "path_reports", path, 1, 0, false },
	{ "cut_off", cut_off, 0, 0, false },
	{ "empty", empty, 0, 0, false },
	{ "bytes_available", bytes_available, 0, 0, false },
	{ "lists", lists, 0, 0, false },
	{ "mixed_list", mixed_list, 0, 0, false },
	{ "nonblocking", nonblocking, 0, 0, false },
	{ "ready", ready, 0, 0, false },
	{ "level", sets, 0, 0, false },
	{ "edge", sets, EPOLLET, 0, false },
	{ "one_shot", sets, EPOLLONESHOT, 0, false },
	{ "connections", connections, 0, 0, false },
	{ "refused", refused, 0, 0, false },
	{ "errors", errors, 0, 0, false },
	{ "shut", shut, 0, 0, false },
	{ "groups", groups, 0, 0, false },
	{ "corked", corked, 0, 0, false },
	{ "segmented", segmented, 0, 0, false },
	{ "plain_peers", plain_peers, 0, 0, false },
	{ "replaced", replaced, 0, 0, false },
	{ "copies", copies, 0, 0, false },
	{ "forked", forked, 0, 0, false },
	{ "passed", passed, 0, 0, false },
	{ "many_threads", many_threads, 0, 0, false },
	{ "cancelled", cancelled, 0, 0, false },
	{ "interrupted", interrupted, 0, 0, false },
	{ "overflow", overflow, 0, 0, false },
	{ "one_port", one_port, 0, 0, false },
	{ "early_reader", early_reader, 0, 5, true },
	{ "errno_unchanged", no_error, 0, 0, false },
	{ "descriptors_replaced", descriptors_replaced, 0, 0, true },
	{ "pending_error", pending_error, 0, 0, false },
	{ "invalid_buffers", invalid_buffers, 0, 0, true },
	{ "passed_unused", passed_unused, 0, 0, true },
	{ "vfork_child", vfork_child, 0, 0, true },
	{ "v6_only", v6_only, 0, 0, false },
	{ "broadcast", broadcast, 0, 0, false },
	{ "many_sockets", many_sockets, 0, 0, true },
};

int main(int argc, char **argv)
{
	signal(SIGPIPE, SIG_IGN);
	return run_tests(tests, COUNT(tests), argc, argv);
}
