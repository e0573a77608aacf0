/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Floods of datagrams at two queue pairs, one of unreliable and one of reliable datagrams, through real sockets. The
 * flood consists of noise and of datagrams that are invalid in one respect. They come from any address of this host's
 * network and, if raw sockets are permitted, with the spoofed address of a legitimate peer. The test checks that no
 * datagram of the flood is placed or delivered, that the memory which the attacked process allocates is bounded, that
 * the legitimate peer still makes progress, and that no address is sent more bytes than came from it.
 *
 * The process of the test is the victim. The legitimate peer and the flood each have a separate process.
 */
#include "dgrams.h"
#include "crc.h"

#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/ip6.h>
#include <netinet/udp.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#define READABLE_LEN (1u << 20)
#define CLOSED_LEN 4096u
#define WRITABLE_LEN 4096u
#define MESSAGE 256u
#define DEPTH 8u
#define RECEIVES 128u

/* Datagrams of the flood per second; enough to fill every table many times over. */
#define PACE 20000u
/* The length of a turn of the legitimate peer. */
#define TURN_MS 100u
/* The number of turns without the flood. Each is followed by a turn with the flood. */
#define TURNS 5u
/* The legitimate peer must make progress in at least one of this many turns without the flood. */
#define TRIES 10u
/* The part of its usual rate that the legitimate peer must reach under the flood. */
#define SHARE 0.1
/*
 * HOLDS: the memory that the victim may allocate under the flood, in KiB. Its two queue pairs keep up to 8 MiB of buffers each,
 * depending on the rate of the legitimate peer, and each carrier between its ports has 0.7 MiB. HOLDS_UNPACED: the same for a
 * flood at full speed.
 */
#define HOLDS (20 * 1024)
#define HOLDS_UNPACED (64 * 1024)
#define UNPACED_MS 1500u
/*
 * The maximum private data of a request, the longest backlog of a listener, and the memory that its requests may use,
 * in KiB.
 */
#define PRIVATE_DATA 256u
#define BACKLOG 1024
#define HOLDS_REQUESTS (4 * 1024)

enum work { IDLE, READS, RECORDS, RELIABLE, STOP };
/* UNPACED and REQUESTS send as fast as possible: datagrams of unknown senders, and connection requests of rdma_cm. */
enum flood { QUIET, STRANGERS, SPOOFED, AMPLIFIED, UNPACED, REQUESTS };

/* What the processes know about each other. */
static struct shared {
	uint32_t victim[2], good[2]; /* queue pair numbers: UD, RD */
	struct there readable, writable, closed;
	_Atomic bool peer_is_ready, flood_is_ready;
	_Atomic int work;   /* enum work, for the legitimate peer */
	_Atomic int flood;  /* enum flood, for the process of the flood */
	_Atomic uint64_t done, lost, sent, bytes_sent, bytes_back;
	_Atomic int no_raw;
	_Atomic uint16_t listener; /* UDP port of an rdma_cm listener */
	_Atomic int most_over; /* most bytes that a source received beyond what it sent */
} *shared;

/* ---------------------------------------------------------------- the legitimate peer */

static void be_legitimate_peer(void)
{
	struct anywarpdv_qp_init_attr dv[2] = {
		{ .read_timeout_us = 50000 },
		{ .driver_qp_type = ANYWARPDV_QPT_RD, .flags = ANYWARPDV_QP_KEEP_GOING },
	};
	struct region mine[2];
	struct dgram ends[2];
	const char *reason;
	unsigned int under_way = 0;

#define OR_DIE(step)                                                                                           \
	do {                                                                                                   \
		reason = (step);                                                                               \
		if (reason) {                                                                                  \
			fprintf(stderr, "legitimate peer: %s [%s]\n", reason, failed_at);                            \
			_exit(1);                                                                              \
		}                                                                                              \
	} while (0)
	OR_DIE(find_all());
	for (int i = 0; i < 2; i++) {
		OR_DIE(open_dgram(&ends[i], &dv[i]));
		shared->good[i] = ends[i].qp->qp_num;
		OR_DIE(new_region(&mine[i], ends[i].pd, WRITABLE_LEN, IBV_ACCESS_LOCAL_WRITE));
		fill_pattern(mine[i].at, WRITABLE_LEN, 1);
	}
	shared->peer_is_ready = true;
	for (int work; (work = shared->work) != STOP;) {
		bool reliable = work == RELIABLE;
		struct dgram *d = &ends[reliable];
		struct ibv_wc wc;

		if (work == IDLE && !under_way) {
			sleep_ms(1);
			continue;
		}
		for (; work != IDLE && under_way < DEPTH; under_way++) {
			enum what what = work == READS ? READ : work == RECORDS ? WRITE : SEND;
			struct there to = work == READS ? shared->readable : shared->writable;
			size_t len = work == READS ? 1024 : work == RECORDS ? WRITABLE_LEN : MESSAGE;

			OR_DIE(request_to(d, shared->victim[reliable], what, (uint64_t)work, &mine[reliable], len, to));
		}
		for (int i = 0; i < 2; i++) {
			while (ibv_poll_cq(ends[i].scq, 1, &wc) == 1) {
				under_way--;
				/* A Read that was lost in the kernel because of the flood is not counted. */
				if (wc.status == IBV_WC_SUCCESS) {
					shared->done++;
				} else if (wc.wr_id == READS && wc.status == IBV_WC_RETRY_EXC_ERR) {
					shared->lost++;
				} else {
					fprintf(stderr, "legitimate peer: %s\n", ibv_wc_status_str(wc.status));
					_exit(1);
				}
			}
		}
	}
	_exit(0);
}

/* ---------------------------------------------------------------- the flood */

struct packet {
	uint8_t at[1500];
	size_t len;
};

static uint64_t dice_state = 0x2545f4914f6cdd1d;

static uint32_t dice(uint32_t below)
{
	dice_state ^= dice_state << 13;
	dice_state ^= dice_state >> 7;
	dice_state ^= dice_state << 17;
	return (uint32_t)((dice_state >> 16) % below);
}

static uint32_t any32(void) { return dice(UINT32_MAX); }

static void put(struct packet *p, const void *bytes, size_t len)
{
	memcpy(p->at + p->len, bytes, len);
	p->len += len;
}

static void put8(struct packet *p, uint8_t n) { put(p, &n, 1); }
static void put16(struct packet *p, uint16_t n) { n = htons(n); put(p, &n, 2); }
static void put32(struct packet *p, uint32_t n) { n = htonl(n); put(p, &n, 4); }
static void put64(struct packet *p, uint64_t n) { put32(p, (uint32_t)(n >> 32)); put32(p, (uint32_t)n); }

static void fill(struct packet *p, uint8_t value, size_t len)
{
	memset(p->at + p->len, value, len);
	p->len += len;
}

static void seal(struct packet *p)
{
	uint32_t crc = crc32c(p->at, p->len);
	uint8_t last[4] = { (uint8_t)crc, (uint8_t)(crc >> 8), (uint8_t)(crc >> 16), (uint8_t)(crc >> 24) };

	put(p, last, 4);
}

/* The header of a data datagram: section 2 of docs/datagram-iwarp.md. */
static void shim(struct packet *p, uint32_t qkey, uint32_t id, uint32_t length, uint32_t offset, uint8_t sub, uint8_t dst,
		 uint8_t src)
{
	put8(p, 0xdc);
	put8(p, 0x10);
	put16(p, 0x1234);
	put32(p, qkey);
	put32(p, id);
	put32(p, length);
	put32(p, offset);
	put8(p, sub);
	put8(p, sub == 1 ? 0x02 : 0);
	put8(p, dst);
	put8(p, src);
	put16(p, 0);
}

static void tagged(struct packet *p, bool last, uint8_t opcode, uint32_t stag, uint64_t to)
{
	put8(p, last ? 0xc1 : 0x81);
	put8(p, 0x40 | opcode);
	put32(p, stag);
	put64(p, to);
}

static void untagged(struct packet *p, uint8_t opcode, uint32_t first, uint32_t qn, uint32_t msn, uint32_t mo)
{
	put8(p, 0x41);
	put8(p, 0x40 | opcode);
	put32(p, first);
	put32(p, qn);
	put32(p, msn);
	put32(p, mo);
}

/* The header of a packet of reliable datagrams (section 6) with arbitrary numbers. */
static void packet_head(struct packet *p, uint8_t flags, uint32_t echo, uint8_t dst, uint8_t src)
{
	put8(p, 0xde);
	put8(p, 0x10 | flags);
	put16(p, 0);
	put32(p, any32() | 1);
	put32(p, echo);
	put32(p, dice(1000));
	put32(p, 0);
	put8(p, 1);
	put8(p, 0);
	put8(p, dst);
	put8(p, src);
	put32(p, any32());
	put32(p, any32());
	put32(p, any32());
	put32(p, any32());
}

static void read_request(struct packet *p, uint8_t dst, uint8_t src, uint32_t id, struct there from, uint32_t size, size_t padding)
{
	shim(p, QKEY, id, (uint32_t)(36 + padding), 0, 0, dst, src);
	untagged(p, 1, 0, 1, id, 0);
	put32(p, 1);
	put64(p, 0);
	put32(p, size);
	put32(p, from.rkey);
	put64(p, from.at);
	put64(p, 0);
	fill(p, 0, padding);
}

/*
 * Builds a datagram that must not be accepted. An unknown sender may use valid keys, which must not work with its
 * address. A spoofed datagram has a valid address but no key that permits an access.
 */
static void almost_valid(struct packet *p, uint8_t dst, uint8_t src, bool spoofed)
{
	struct there writable = shared->writable;
	uint32_t id = any32();
	bool wrong_twice = false;

	p->len = 0;
	if (spoofed)
		writable.rkey = any32();
	switch (dice(16)) {
	case 0: case 1:
		/* Noise with a plausible beginning. */
		fill(p, 0, dice(1400));
		for (size_t i = 0; i < p->len; i++)
			p->at[i] = (uint8_t)dice(256);
		if (p->len > 30 && dice(4)) {
			p->at[0] = (uint8_t)(0xdc + dice(3));
			p->at[1] = (uint8_t)(0x10 | dice(16));
			p->at[22] = dst;
		}
		break;
	case 2:
		shim(p, ~QKEY, id, 64, 0, 0, dst, src);
		untagged(p, 3, 0, 0, id, 0);
		fill(p, 0x66, 64);
		break;
	case 3:
		/* Length and offset do not match the header. */
		shim(p, QKEY, id, 32, 16, 0, dst, src);
		untagged(p, 3, 0, 0, id, 8);
		fill(p, 0x66, 64);
		wrong_twice = true;
		break;
	case 4:
		shim(p, QKEY, id, 64, 0, 1, dst, src);
		tagged(p, true, 15, any32(), writable.at);
		fill(p, 0x66, 64);
		break;
	case 5:
		shim(p, QKEY, id, 64, 0, 1, dst, src);
		tagged(p, true, 15, shared->closed.rkey, shared->closed.at);
		fill(p, 0x66, 64);
		break;
	case 6:
		shim(p, QKEY, id, WRITABLE_LEN, 64, 1, dst, src);
		tagged(p, false, 15, writable.rkey, writable.at + 64);
		fill(p, 0x66, 1024);
		break;
	case 7:
		shim(p, QKEY, id, 1u << 31, 0, 1, dst, src);
		tagged(p, false, 15, writable.rkey, writable.at);
		fill(p, 0x66, 1024);
		break;
	case 8:
		read_request(p, dst, src, id, (struct there){ any32(), 0 }, READABLE_LEN, 0);
		break;
	case 9:
		read_request(p, dst, src, id, spoofed ? (struct there){ any32(), 0 } : shared->readable, READABLE_LEN,
			     dice(500));
		break;
	case 10:
		/* A response without a request. */
		shim(p, 0, id, 64, 0, 0, dst, src);
		tagged(p, true, 2, spoofed ? any32() : shared->closed.rkey, shared->closed.at);
		fill(p, 0x66, 64);
		break;
	case 11:
		/* An error, a cookie or a report. */
		shim(p, 0, id, 8, 0, dice(2) ? 3 : 0, dst, src);
		untagged(p, dice(2) ? 7 : 15, (dice(2) ? 11u : 2u) << 24, dice(2) ? 2 : 4, id, 0);
		put64(p, (uint64_t)any32() << 32 | any32());
		break;
	case 12: case 13:
		packet_head(p, (uint8_t)(dice(2) ? 0x8 : 0x2), 0, dst, src);
		break;
	case 14:
		/* A Send in a packet with a wrong token. */
		packet_head(p, 1, any32(), dst, src);
		shim(p, QKEY, id, 64, 0, 0, dst, src);
		untagged(p, 3, 0, 0, id, 0);
		fill(p, 0x66, 64);
		break;
	case 15:
		put8(p, 0xdd);
		put8(p, (uint8_t)(0x10 | (1 + dice(2))));
		put16(p, 2);
		put32(p, id);
		put16(p, 0x6869);
		break;
	}
	/* Changes one byte of some datagrams before the CRC is computed, and one bit of some after it. */
	if (!wrong_twice && p->len && dice(4) == 0)
		p->at[dice((uint32_t)p->len)] ^= (uint8_t)(1 + dice(255));
	seal(p);
	if (dice(8) == 0)
		p->at[dice((uint32_t)p->len)] ^= (uint8_t)(1 << dice(8));
}

union address {
	struct sockaddr any;
	struct sockaddr_in four;
	struct sockaddr_in6 six;
};

/* Whether the device has an IPv6 address. Its address is TEST_ADDR, or 127.0.0.1 if that variable is not set. */
static bool is_ipv6(void)
{
	const char *text = getenv("TEST_ADDR");

	return text && strchr(text, ':');
}

/* The loopback address with this port. */
static union address loopback(uint16_t port)
{
	union address address = { .six = { .sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT } };

	if (!is_ipv6())
		address.four = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(port),
						     .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	return address;
}

static uint16_t checksum(const void *at, size_t len)
{
	const uint8_t *b = at;
	uint32_t sum = 0;

	for (size_t i = 0; i < len; i++)
		sum += i % 2 ? b[i] : (uint32_t)b[i] << 8;
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return htons((uint16_t)~sum);
}

/* Sends over IPv6 with a spoofed source address. The UDP checksum is mandatory there (RFC 8200 section 8.1). */
static void send_as_ipv6(int raw, uint16_t from, uint16_t to, const struct packet *p)
{
	static const struct in6_addr local = IN6ADDR_LOOPBACK_INIT;
	struct {
		struct ip6_hdr ip;
		struct udphdr udp;
		uint8_t data[sizeof p->at];
	} all = { 0 };
	/* The checksum covers a pseudo-header and the datagram. */
	struct {
		struct in6_addr from, to;
		uint32_t len, next;
		struct udphdr udp;
		uint8_t data[sizeof p->at];
	} covered = { .from = local, .to = local };
	size_t len = sizeof all.udp + p->len;
	union address address = loopback(0);

	all.ip.ip6_flow = htonl(6u << 28);
	all.ip.ip6_plen = htons((uint16_t)len);
	all.ip.ip6_nxt = IPPROTO_UDP;
	all.ip.ip6_hlim = 64;
	all.ip.ip6_src = all.ip.ip6_dst = local;
	all.udp = (struct udphdr){ .source = htons(from), .dest = htons(to), .len = htons((uint16_t)len) };
	memcpy(all.data, p->at, p->len);
	covered.len = htonl((uint32_t)len);
	covered.next = htonl(IPPROTO_UDP);
	covered.udp = all.udp;
	memcpy(covered.data, p->at, p->len);
	all.udp.check = checksum(&covered, offsetof(__typeof__(covered), data) + p->len);
	if (!all.udp.check)
		all.udp.check = 0xffff;
	sendto(raw, &all, sizeof all.ip + len, 0, &address.any, sizeof address.six);
}

/* Sends with a spoofed source address. */
static void send_as(int raw, uint16_t from, uint16_t to, const struct packet *p)
{
	struct {
		struct iphdr ip;
		struct udphdr udp;
		uint8_t data[sizeof p->at];
	} all = { 0 };
	size_t len = sizeof all.ip + sizeof all.udp + p->len;
	union address address = loopback(0);

	if (is_ipv6()) {
		send_as_ipv6(raw, from, to, p);
		return;
	}
	all.ip = (struct iphdr){ .version = 4, .ihl = 5, .ttl = 64, .protocol = IPPROTO_UDP,
				 .tot_len = htons((uint16_t)len), .saddr = htonl(INADDR_LOOPBACK),
				 .daddr = htonl(INADDR_LOOPBACK) };
	all.ip.check = checksum(&all.ip, sizeof all.ip);
	all.udp = (struct udphdr){ .source = htons(from), .dest = htons(to),
				   .len = htons((uint16_t)(sizeof all.udp + p->len)) };
	memcpy(all.data, p->at, p->len);
	sendto(raw, &all, len, 0, &address.any, sizeof address.four);
}

/*
 * Sends from one of many addresses. All addresses of the IPv4 loopback network belong to this host. With IPv6 the
 * addresses are of as many unassigned networks, which IPV6_FREEBIND permits.
 */
static void send_from(int fd, uint32_t which, uint16_t to, const struct packet *p)
{
	union address address = loopback(to);
	struct iovec part = { (void *)p->at, p->len };
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(struct in6_pktinfo))];
	} control = { 0 };
	struct msghdr message = { .msg_name = &address, .msg_namelen = sizeof address, .msg_iov = &part, .msg_iovlen = 1,
				  .msg_control = &control, .msg_controllen = sizeof control };
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);
	struct in_pktinfo four = { .ipi_spec_dst.s_addr = htonl((127u << 24) + which) };
	struct in6_pktinfo six = { .ipi6_addr.s6_addr = { 0xfd, 0x77, (uint8_t)(which >> 16), (uint8_t)(which >> 8),
							  (uint8_t)which, [15] = 1 } };
	bool ipv6 = is_ipv6();

	head->cmsg_level = ipv6 ? IPPROTO_IPV6 : IPPROTO_IP;
	head->cmsg_type = ipv6 ? IPV6_PKTINFO : IP_PKTINFO;
	head->cmsg_len = ipv6 ? CMSG_LEN(sizeof six) : CMSG_LEN(sizeof four);
	message.msg_controllen = ipv6 ? CMSG_SPACE(sizeof six) : CMSG_SPACE(sizeof four);
	memcpy(CMSG_DATA(head), ipv6 ? (void *)&six : (void *)&four, ipv6 ? sizeof six : sizeof four);
	sendmsg(fd, &message, MSG_DONTWAIT);
}

/*
 * Opens a socket at address `which` of the IPv4 loopback network or, if the device has an IPv6 address, at the IPv6 loopback
 * address. If `which` is 0, the socket is bound to the wildcard address.
 */
static int udp_socket(uint32_t which)
{
	union address name = loopback(0);
	int fd = socket(name.any.sa_family, SOCK_DGRAM | SOCK_NONBLOCK, 0), room = 4 << 20, one = 1;

	if (name.any.sa_family == AF_INET)
		name.four.sin_addr.s_addr = which ? htonl((127u << 24) + which) : htonl(INADDR_ANY);
	else if (!which)
		name.six.sin6_addr = in6addr_any;
	if (name.any.sa_family == AF_INET6 && setsockopt(fd, IPPROTO_IPV6, IPV6_FREEBIND, &one, sizeof one))
		return -1;
	setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
	return fd >= 0 && bind(fd, &name.any, sizeof name) == 0 ? fd : -1;
}

/* Sends requests for large responses from some addresses, and counts the bytes that come back to each. */
static void amplify(int *sources, size_t many, uint64_t *sent, uint64_t *back)
{
	static const uint32_t sizes[] = { READABLE_LEN, 65536, 4096, 100, 1 };
	uint8_t answer[65536];

	for (size_t i = 0; i < many; i++) {
		uint32_t victim = shared->victim[dice(2)];
		union address to = loopback((uint16_t)(victim >> 8));
		struct packet p = { .len = 0 };
		ssize_t n;

		if (dice(2)) {
			read_request(&p, (uint8_t)victim, 1, any32(), shared->readable, sizes[dice(COUNT(sizes))], dice(200));
			seal(&p);
		} else {
			almost_valid(&p, (uint8_t)victim, 1, false);
		}
		if (sendto(sources[i], p.at, p.len, 0, &to.any, sizeof to) == (ssize_t)p.len)
			sent[i] += p.len;
		while ((n = recv(sources[i], answer, sizeof answer, 0)) >= 0)
			back[i] += (uint64_t)n;
		if (back[i] > sent[i] && (int)(back[i] - sent[i]) > shared->most_over)
			shared->most_over = (int)(back[i] - sent[i]);
		shared->bytes_sent += p.len;
	}
	shared->bytes_back = 0;
	for (size_t i = 0; i < many; i++)
		shared->bytes_back += back[i];
}

/* A connection request of rdma_cm with the maximum private data (section 8 of docs/datagram-iwarp.md). */
static void connection_request(struct packet *p)
{
	p->len = 0;
	put8(p, 0xdd);
	put8(p, 0x11);
	put16(p, PRIVATE_DATA);
	put32(p, any32());
	for (unsigned int i = 0; i < PRIVATE_DATA; i += 4)
		put32(p, i);
	seal(p);
}

static void be_flood(void)
{
	int fd = udp_socket(0), raw = socket(is_ipv6() ? AF_INET6 : AF_INET, SOCK_RAW, IPPROTO_RAW);
	uint64_t begin = 0, count = 0, sent[16] = { 0 }, back[16] = { 0 };
	int sources[16];

	for (size_t i = 0; i < COUNT(sources); i++) {
		sources[i] = udp_socket(0x010203u + (uint32_t)i);
		if (sources[i] < 0 || fd < 0) {
			perror("flood: socket");
			_exit(1);
		}
	}
	shared->no_raw = raw < 0;
	shared->flood_is_ready = true;
	for (int kind, last = QUIET;; last = kind) {
		kind = shared->flood;
		if (kind == QUIET) {
			sleep_ms(1);
			continue;
		}
		if (kind != last) {
			begin = now_ns();
			count = 0;
		}
		if (kind != UNPACED && kind != REQUESTS && count * 1000000000u / PACE > now_ns() - begin) {
			sleep_ms(1);
			continue;
		}
		for (int i = 0; i < 32; i++, count++) {
			uint32_t victim = shared->victim[dice(2)], peer = shared->good[dice(2)];
			struct packet p;

			if (kind == AMPLIFIED) {
				amplify(sources, COUNT(sources), sent, back);
			} else if (kind == REQUESTS) {
				connection_request(&p);
				send_from(fd, dice(1u << 20) + 2, shared->listener, &p);
			} else if (kind == SPOOFED) {
				almost_valid(&p, (uint8_t)victim, (uint8_t)peer, true);
				send_as(raw, (uint16_t)(peer >> 8), (uint16_t)(victim >> 8), &p);
			} else {
				almost_valid(&p, (uint8_t)victim, (uint8_t)dice(256), false);
				send_from(fd, dice(1u << 20) + 2, (uint16_t)(victim >> 8), &p);
			}
			shared->sent++;
		}
	}
}

/* ---------------------------------------------------------------- the victim */

static struct victim {
	struct dgram ends[2];
	struct region readable, writable, closed, inbox;
	uint64_t records, received;
	pid_t good, flood;
} v;

static int end_process(void *pid)
{
	int status;

	kill((pid_t)(intptr_t)pid, SIGKILL);
	return waitpid((pid_t)(intptr_t)pid, &status, 0) == (pid_t)(intptr_t)pid ? 0 : ECHILD;
}

static pid_t start(void (*be)(void))
{
	pid_t pid, parent = getpid();

	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() == parent)
			be();
		_exit(1);
	}
	if (pid > 0)
		keep(end_process, (void *)(intptr_t)pid, "process");
	return pid;
}

static const char *post_one_receive(int end)
{
	struct ibv_sge sge = sge_of(&v.inbox, 0, 40 + MESSAGE);
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	ENSURE(!ibv_post_recv(v.ends[end].qp, &wr, &bad), "ibv_post_recv");
	return NULL;
}

/* Polls all records and completions. Fails if one of them is not caused by the legitimate peer. */
static const char *take(void)
{
	struct anywarpdv_record record[16];
	struct ibv_wc wc;
	int n;

	while ((n = poll_records(v.ends[0].qp, COUNT(record), record, sizeof record[0], 0)) > 0)
		for (int i = 0; i < n; i++) {
			ENSURE(record[i].src_qp == shared->good[0], "a record of 0x%x", record[i].src_qp);
			if (record[i].map)
				ENSURE(!release_map(v.ends[0].qp, record[i].map), "the map cannot be released");
			v.records++;
		}
	ENSURE(n == 0, "records: %s", strerror(errno));
	ENSURE(poll_records(v.ends[1].qp, 1, record, sizeof record[0], 0) == 0, "there is a record on the reliable queue pair");
	ENSURE(ibv_poll_cq(v.ends[0].rcq, 1, &wc) == 0, "a Send of 0x%x was delivered", wc.src_qp);
	while (ibv_poll_cq(v.ends[1].rcq, 1, &wc) == 1) {
		ENSURE(wc.status == IBV_WC_SUCCESS && wc.src_qp == shared->good[1], "from 0x%x: %s", wc.src_qp,
		       ibv_wc_status_str(wc.status));
		TRY(same_pattern(v.inbox.at + 40, MESSAGE, 1));
		TRY(post_one_receive(1));
		v.received++;
	}
	return NULL;
}

static const char *serve(unsigned int ms)
{
	uint64_t end = now_ms() + ms;

	do {
		TRY(take());
	} while (now_ms() < end);
	ENSURE(waitpid(v.good, NULL, WNOHANG) == 0, "the legitimate peer has ended");
	ENSURE(waitpid(v.flood, NULL, WNOHANG) == 0, "the process of the flood has ended");
	return NULL;
}

static const char *open_victim(void)
{
	struct anywarpdv_qp_init_attr dv[2] = {
		{ .flags = ANYWARPDV_QP_REPORT_ERRORS, .max_records = 1 << 16 },
		{ .driver_qp_type = ANYWARPDV_QPT_RD, .flags = ANYWARPDV_QP_KEEP_GOING },
	};
	struct sockaddr_in6 six = { .sin6_family = AF_INET6 };

	memset(&v, 0, sizeof v);
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ENSURE(shared != MAP_FAILED, "mmap: %s", strerror(errno));
	v.good = start(be_legitimate_peer);
	v.flood = start(be_flood);
	ENSURE(v.good > 0 && v.flood > 0, "fork: %s", strerror(errno));
	TRY(find_all());
	ENSURE(gid_is_ipv4(&local_gid) != is_ipv6(), "TEST_ADDR is not an address of the device");
	for (int i = 0; i < 2; i++) {
		TRY(open_dgram(&v.ends[i], &dv[i]));
		shared->victim[i] = v.ends[i].qp->qp_num;
	}
	TRY(new_region(&v.readable, v.ends[0].pd, READABLE_LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ));
	TRY(new_region(&v.writable, v.ends[0].pd, WRITABLE_LEN, ALL_ACCESS));
	TRY(new_region(&v.closed, v.ends[0].pd, CLOSED_LEN, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&v.inbox, v.ends[1].pd, 40 + MESSAGE, IBV_ACCESS_LOCAL_WRITE));
	shared->readable = (struct there){ v.readable.mr->rkey, (uintptr_t)v.readable.at };
	shared->writable = (struct there){ v.writable.mr->rkey, (uintptr_t)v.writable.at };
	shared->closed = (struct there){ v.closed.mr->rkey, (uintptr_t)v.closed.at };
	for (unsigned int i = 0; i < RECEIVES; i++)
		TRY(post_one_receive(1));
	/* Receives that no datagram may fill. */
	{
		struct ibv_sge sge = sge_of(&v.closed, 0, CLOSED_LEN);
		struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

		for (int i = 0; i < 8; i++)
			ENSURE(!ibv_post_recv(v.ends[0].qp, &wr, &bad), "ibv_post_recv");
	}
	/* The test `requests` finds the port of its listener by the ports that are newly bound, so the other processes must have bound theirs. */
	for (uint64_t end = now_ms() + WAIT_MS; !shared->peer_is_ready || !shared->flood_is_ready;) {
		ENSURE(now_ms() < end, "the %s does not start", shared->peer_is_ready ? "flood" : "legitimate peer");
		sleep_ms(1);
	}
	memcpy(&six.sin6_addr, &local_gid, 16);
	ENSURE(!restrict_mr(v.writable.mr, (struct sockaddr *)&six, sizeof six, shared->good[0]), "restrict: %s", strerror(errno));
	return NULL;
}

/* Measures how many operations per second the legitimate peer completes in one turn. */
static const char *turn(enum work work, enum flood flood, double *rate)
{
	uint64_t before, begin;

	shared->flood = flood;
	shared->work = work;
	/* Gives both processes time to start. */
	TRY(serve(20));
	before = work == RECORDS ? v.records : shared->done;
	begin = now_ns();
	TRY(serve(TURN_MS));
	*rate = (double)((work == RECORDS ? v.records : shared->done) - before) * 1e9 / (double)(now_ns() - begin);
	shared->work = IDLE;
	shared->flood = QUIET;
	/* Waits for outstanding operations. */
	return serve(60);
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static const char *nothing_was_placed(void)
{
	TRY(all_bytes(v.readable.at, READABLE_LEN, FRESH, "the readable region"));
	TRY(all_bytes(v.closed.at, CLOSED_LEN, FRESH, "the closed region"));
	if (v.records)
		TRY(same_pattern(v.writable.at, WRITABLE_LEN, 1));
	else
		TRY(all_bytes(v.writable.at, WRITABLE_LEN, FRESH, "the region of the legitimate peer"));
	TRY(guards_untouched(&v.readable));
	TRY(guards_untouched(&v.writable));
	TRY(guards_untouched(&v.closed));
	return guards_untouched(&v.inbox);
}

static const char *goes_on(size_t arg)
{
	enum work work = (enum work)(arg & 7);
	enum flood flood = (enum flood)(arg >> 3);
	struct anywarpdv_counters seen[2];
	double with[TURNS], without[TURNS], share[TURNS];
	uint64_t dropped = 0;
	long before, grown;

	TRY(open_victim());
	TRY(turn(work, QUIET, &without[0]));
	if (flood == SPOOFED && shared->no_raw)
		SKIP("raw sockets are not permitted");
	before = resident();
	for (unsigned int i = 0; i < TURNS; i++) {
		/* On a loaded machine the process of the legitimate peer may not run during a turn. */
		without[i] = 0;
		for (unsigned int tries = 0; !(without[i] > 0) && tries < TRIES; tries++)
			TRY(turn(work, QUIET, &without[i]));
		TRY(turn(work, flood, &with[i]));
		ENSURE(without[i] > 0, "the legitimate peer makes no progress even without a flood");
		share[i] = with[i] / without[i];
	}
	grown = resident() - before;
	TRY(nothing_was_placed());
	for (int i = 0; i < 2; i++) {
		ENSURE(!query_counters(v.ends[i].qp, &seen[i], sizeof seen[i]), "counters");
		dropped += seen[i].rx_bad_crc + seen[i].rx_bad_hdr + seen[i].rx_qkey + seen[i].rx_stag;
	}
	qsort(share, TURNS, sizeof *share, by_value);
	printf("# flood of %llu datagrams, %llu dropped as invalid; "
	       "the legitimate peer: %.0f operations a second without the flood, %.0f %% of that with it, %llu lost; %ld KiB more\n",
	       (unsigned long long)shared->sent, (unsigned long long)dropped, without[TURNS / 2], 100 * share[TURNS / 2],
	       (unsigned long long)shared->lost, grown);
	ENSURE(shared->sent > 1000 && dropped > shared->sent / 50, "a flood of %llu, of which %llu were dropped as invalid",
	       (unsigned long long)shared->sent, (unsigned long long)dropped);
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
	ENSURE(share[TURNS / 2] >= SHARE, "the legitimate peer reaches %.0f %% of its rate without the flood",
	       100 * share[TURNS / 2]);
	ENSURE(grown <= HOLDS, "%ld KiB more", grown);
#endif
	return NULL;
}

/* No request makes the victim send more bytes to an address than came from it. */
static const char *no_amplifier(size_t arg)
{
	(void)arg;
	TRY(open_victim());
	shared->flood = AMPLIFIED;
	TRY(serve(2 * TURN_MS));
	shared->flood = QUIET;
	TRY(serve(60));
	printf("# %llu bytes of requests, %llu bytes of responses\n", (unsigned long long)shared->bytes_sent,
	       (unsigned long long)shared->bytes_back);
	ENSURE(shared->bytes_back > 1000, "too few responses: %llu bytes", (unsigned long long)shared->bytes_back);
	ENSURE(shared->most_over <= 0, "a source got %d bytes more than it had sent", shared->most_over);
	return nothing_was_placed();
}

/*
 * As many datagrams as this machine can send: they are dropped in the socket or by the device, and the legitimate peer
 * can communicate afterwards.
 */
static const char *unpaced(size_t arg)
{
	struct anywarpdv_counters seen;
	long before, grown;
	double rate;

	(void)arg;
	TRY(open_victim());
	TRY(turn(READS, QUIET, &rate));
	before = resident();
	shared->flood = UNPACED;
	TRY(serve(UNPACED_MS));
	grown = resident() - before;
	shared->flood = QUIET;
	TRY(serve(60));
	TRY(nothing_was_placed());
	ENSURE(!query_counters(v.ends[0].qp, &seen, sizeof seen), "counters");
	printf("# %.0f datagrams a second; in all %llu arrived at the UD queue pair; %ld KiB more\n",
	       (double)shared->sent * 1000 / UNPACED_MS, (unsigned long long)seen.rx_dgrams, grown);
	ENSURE(shared->sent > 10000, "a flood of %llu", (unsigned long long)shared->sent);
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
	ENSURE(grown <= HOLDS_UNPACED, "%ld KiB more", grown);
#endif
	/* On a busy machine the legitimate peer may not run in one turn. */
	for (int tries = 0; tries < 20; tries++) {
		TRY(turn(READS, QUIET, &rate));
		if (rate > 0)
			return NULL;
	}
	return "the legitimate peer does nothing after the flood";
}

/* Sets a bit for each bound UDP port of this network namespace. */
static void udp_ports(uint8_t bits[8192])
{
	static const char *const files[] = { "/proc/self/net/udp", "/proc/self/net/udp6" };
	char line[512], address[64];
	unsigned int port;

	memset(bits, 0, 8192);
	for (size_t i = 0; i < COUNT(files); i++) {
		FILE *f = fopen(files[i], "r");

		while (f && fgets(line, sizeof line, f))
			if (sscanf(line, " %*u: %63[0-9A-F]:%x", address, &port) == 2 && port < 65536)
				bits[port / 8] |= (uint8_t)(1 << port % 8);
		if (f)
			fclose(f);
	}
}

/* Number of bytes that have arrived at a UDP port of this network namespace and were not received. */
static unsigned long unread(uint16_t port)
{
	static const char *const files[] = { "/proc/self/net/udp", "/proc/self/net/udp6" };
	unsigned long bytes, all = 0;
	unsigned int bound;
	char line[512];

	for (size_t i = 0; i < COUNT(files); i++) {
		FILE *f = fopen(files[i], "r");

		while (f && fgets(line, sizeof line, f))
			if (sscanf(line, " %*u: %*[0-9A-F]:%x %*[0-9A-F]:%*x %*x %*x:%lx", &bound, &bytes) == 2 && bound == port)
				all += bytes;
		if (f)
			fclose(f);
	}
	return all;
}

/*
 * Connection requests that the program does not accept are kept up to the backlog. When the program has taken them, new
 * ones arrive.
 */
static const char *requests(size_t arg)
{
	static uint8_t before_ports[8192], after_ports[8192];
	struct rdma_event_channel *channel = rdma_create_event_channel();
	union address name = loopback(0);
	struct rdma_cm_id *listener;
	struct rdma_cm_event *event;
	unsigned int taken = 0, ports = 0;
	struct pollfd p;
	long before, grown;

	(void)arg;
	TRY(open_victim());
	ENSURE(channel && !rdma_create_id(channel, &listener, NULL, RDMA_PS_UDP), "rdma_create_id: %s", strerror(errno));
	ENSURE(!rdma_bind_addr(listener, &name.any), "rdma_bind_addr: %s", strerror(errno));
	udp_ports(before_ports);
	ENSURE(!rdma_listen(listener, BACKLOG), "rdma_listen: %s", strerror(errno));
	udp_ports(after_ports);
	for (unsigned int port = 1; port < 65536; port++)
		if ((after_ports[port / 8] & ~before_ports[port / 8]) >> port % 8 & 1) {
			shared->listener = (uint16_t)port;
			ports++;
		}
	ENSURE(ports >= 1, "%u new UDP ports", ports);
	before = resident();
	shared->flood = REQUESTS;
	sleep_ms(UNPACED_MS);
	grown = resident() - before;
	shared->flood = QUIET;
	sleep_ms(60);
	/* On a loaded machine requests may still be in the socket. The device would keep them as soon as the program takes
	 * earlier ones, so that more are counted than the backlog allows. */
	for (unsigned int ms = 0; ms < WAIT_MS && unread(shared->listener); ms++)
		sleep_ms(1);
	p = (struct pollfd){ .fd = channel->fd, .events = POLLIN };
	while (poll(&p, 1, 100) == 1) {
		ENSURE(!rdma_get_cm_event(channel, &event), "rdma_get_cm_event: %s", strerror(errno));
		ENSURE(event->event == RDMA_CM_EVENT_CONNECT_REQUEST, "%s", rdma_event_str(event->event));
		ENSURE(!rdma_reject(event->id, NULL, 0), "rdma_reject: %s", strerror(errno));
		{
			struct rdma_cm_id *id = event->id;

			rdma_ack_cm_event(event);
			rdma_destroy_id(id);
		}
		taken++;
	}
	printf("# %.0f requests a second, %u are kept; %ld KiB more\n", (double)shared->sent * 1000 / UNPACED_MS, taken, grown);
	ENSURE(taken > 0 && taken <= BACKLOG, "%u requests are kept", taken);
	ENSURE(shared->sent > BACKLOG * 4, "%llu requests", (unsigned long long)shared->sent);
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
	ENSURE(grown <= HOLDS_REQUESTS, "%ld KiB more", grown);
#endif
	shared->flood = REQUESTS;
	ENSURE(poll(&p, 1, (int)WAIT_MS) == 1, "no request arrives after the program has taken the earlier ones");
	shared->flood = QUIET;
	return NULL;
}

static const struct test tests[] = {
	{ "strangers_reads", goes_on, STRANGERS << 3 | READS, 0, true },
	{ "strangers_records", goes_on, STRANGERS << 3 | RECORDS, 0, true },
	{ "strangers_reliable", goes_on, STRANGERS << 3 | RELIABLE, 0, true },
	{ "spoofed_reads", goes_on, SPOOFED << 3 | READS, 0, true },
	{ "spoofed_records", goes_on, SPOOFED << 3 | RECORDS, 0, true },
	{ "spoofed_reliable", goes_on, SPOOFED << 3 | RELIABLE, 0, true },
	{ "no_amplifier", no_amplifier, 0, 0, true },
	{ "unpaced_strangers", unpaced, 0, 0, true },
	{ "unpaced_requests", requests, 0, 0, true },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
