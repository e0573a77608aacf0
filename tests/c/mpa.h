/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A server that uses rdma_cm, and peers that attack it: they send MPA, DDP and RDMAP through plain sockets. The process
 * of the server also has an undisturbed connection, which no peer attacks. The pace of this connection shows how an
 * attack affects the process.
 */
#ifndef ANYWARP_TESTS_MPA_H
#define ANYWARP_TESTS_MPA_H

#include "ends.h"
#include "crc.h"

#include <arpa/inet.h>
#include <endian.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sys/socket.h>

static const struct want usual = { 0 };

/* ---------------------------------------------------------------- the server */

#define OPEN_LEN (1u << 20)
#define CLOSED_LEN 4096u

static struct server {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listener;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct region open, closed; /* `open` for remote reads and writes; `closed` without remote rights */
	uint16_t port;
	pthread_t thread;
	volatile bool stop, failed;
	volatile unsigned int accepted, gone;
} server;

/* What the attackers know about the server. */
static struct {
	uint16_t port;
	uint32_t open, closed;
	uint64_t open_at, closed_at;
} target;

UNUSED static void drain(void)
{
	struct ibv_wc wc[64];

	while (ibv_poll_cq(server.cq, COUNT(wc), wc) > 0)
		;
}

UNUSED static bool accept_one(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC, .send_cq = server.cq, .recv_cq = server.cq,
		.cap = { .max_send_wr = 1, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4, .rnr_retry_count = 7 };

	if (rdma_create_qp(id, server.pd, &init))
		return false;
	for (uint64_t i = 0; i < 2; i++)
		if (post_recv(id->qp, i, NULL, 0))
			return false;
	/* The peer may have gone meanwhile, which is not a failure. */
	if (rdma_accept(id, &param)) {
		rdma_destroy_qp(id);
		return rdma_destroy_id(id) == 0;
	}
	server.accepted++;
	return true;
}

UNUSED static void *serve(void *arg)
{
	(void)arg;
	while (!server.stop && !server.failed) {
		struct pollfd p = { .fd = server.channel->fd, .events = POLLIN };
		struct rdma_cm_event *event;
		struct rdma_cm_id *id;
		enum rdma_cm_event_type type;

		drain();
		if (poll(&p, 1, 20) != 1)
			continue;
		if (rdma_get_cm_event(server.channel, &event)) {
			server.failed = true;
			break;
		}
		id = event->id;
		type = event->event;
		rdma_ack_cm_event(event);
		if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
			server.failed = server.failed || !accept_one(id);
		} else if (type == RDMA_CM_EVENT_DISCONNECTED || type == RDMA_CM_EVENT_CONNECT_ERROR) {
			rdma_disconnect(id);
			rdma_destroy_qp(id);
			server.failed = server.failed || rdma_destroy_id(id);
			server.gone++;
		} else if (type != RDMA_CM_EVENT_ESTABLISHED) {
			server.failed = true;
		}
	}
	return NULL;
}

UNUSED static int stop_server(void *arg)
{
	(void)arg;
	server.stop = true;
	pthread_join(server.thread, NULL);
	return server.failed;
}

UNUSED static int close_listener(void *id)
{
	int rc = rdma_destroy_id(id);

	rdma_destroy_event_channel(server.channel);
	return rc;
}

UNUSED static const char *start_server(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };

	memset(&server, 0, sizeof server);
	server.channel = rdma_create_event_channel();
	ENSURE(server.channel && !rdma_create_id(server.channel, &server.listener, NULL, RDMA_PS_TCP),
	       "rdma_create_id: %s", strerror(errno));
	keep(close_listener, server.listener, "listener");
	ENSURE(!rdma_bind_addr(server.listener, (struct sockaddr *)&address) && !rdma_listen(server.listener, 1024),
	       "rdma_listen: %s", strerror(errno));
	/* The server uses the device context that rdma_cm has opened. */
	server.pd = ibv_alloc_pd(server.listener->verbs);
	ENSURE(server.pd, "ibv_alloc_pd: %s", strerror(errno));
	keep(close_pd, server.pd, "protection domain");
	server.cq = ibv_create_cq(server.listener->verbs, 1 << 17, NULL, NULL, 0);
	ENSURE(server.cq, "ibv_create_cq: %s", strerror(errno));
	keep(close_cq, server.cq, "completion queue");
	TRY(new_region(&server.open, server.pd, OPEN_LEN,
		       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
	TRY(new_region(&server.closed, server.pd, CLOSED_LEN, IBV_ACCESS_LOCAL_WRITE));
	target.port = ntohs(rdma_get_src_port(server.listener));
	target.open = server.open.mr->rkey;
	target.open_at = (uintptr_t)server.open.at;
	target.closed = server.closed.mr->rkey;
	target.closed_at = (uintptr_t)server.closed.at;
	ENSURE(!pthread_create(&server.thread, NULL, serve, NULL), "pthread_create");
	keep(stop_server, &server, "server");
	return NULL;
}

/* ---------------------------------------------------------------- building messages */

struct wire {
	uint8_t at[70000];
	size_t len;
};

UNUSED static void put(struct wire *w, const void *bytes, size_t len)
{
	memcpy(w->at + w->len, bytes, len);
	w->len += len;
}

UNUSED static void put8(struct wire *w, uint8_t n) { put(w, &n, 1); }
UNUSED static void put32(struct wire *w, uint32_t n) { n = htobe32(n); put(w, &n, 4); }
UNUSED static void put64(struct wire *w, uint64_t n) { n = htobe64(n); put(w, &n, 8); }

enum { OP_WRITE = 0, OP_READ = 1, OP_RESPONSE = 2, OP_SEND = 3, OP_SEND_INVALIDATE = 4, OP_TERMINATE = 7, OP_FETCH_ADD = 8 };
/* RDMAP version 1 and an opcode. The opcode of an Atomic Request is 10 (RFC 7306). */
#define OPERATION(op) (0x40 | ((op) == OP_FETCH_ADD ? 0x0a : (op)))

/* Begins an FPDU. Returns its offset. */
UNUSED static size_t begin_tagged(struct wire *w, int op, uint32_t stag, uint64_t to)
{
	size_t at = w->len;

	w->len += 2;
	put8(w, 0xc1);
	put8(w, OPERATION(op));
	put32(w, stag);
	put64(w, to);
	return at;
}

UNUSED static size_t begin_untagged(struct wire *w, int op, uint32_t word, uint32_t qn, uint32_t msn, uint32_t mo)
{
	size_t at = w->len;

	w->len += 2;
	put8(w, 0x41);
	put8(w, OPERATION(op));
	put32(w, word);
	put32(w, qn);
	put32(w, msn);
	put32(w, mo);
	return at;
}

/* Completes an FPDU with length, padding and CRC. A `more` other than 0 makes the length wrong. */
UNUSED static void end_fpdu(struct wire *w, size_t at, int more)
{
	uint16_t len = htobe16((uint16_t)((int)(w->len - at - 2) + more));
	uint32_t crc;

	memcpy(w->at + at, &len, 2);
	while ((w->len - at) % 4)
		put8(w, 0);
	crc = htole32(crc32c(w->at + at, w->len - at));
	put(w, &crc, 4);
}

UNUSED static void read_request(struct wire *w, uint32_t msn, uint32_t size, uint32_t stag, uint64_t to)
{
	size_t at = begin_untagged(w, OP_READ, 0, 1, msn, 0);

	put32(w, 0x700);
	put64(w, 0x10);
	put32(w, size);
	put32(w, stag);
	put64(w, to);
	end_fpdu(w, at, 0);
}

UNUSED static void send_message(struct wire *w, uint32_t qn, uint32_t msn, uint32_t mo, size_t len)
{
	size_t at = begin_untagged(w, OP_SEND, 0, qn, msn, mo);

	for (size_t i = 0; i < len; i++)
		put8(w, 'x');
	end_fpdu(w, at, 0);
}

UNUSED static bool send_all(int fd, const void *bytes, size_t len)
{
	const uint8_t *at = bytes;

	while (len > 0) {
		ssize_t n = send(fd, at, len, MSG_NOSIGNAL);

		if (n <= 0)
			return false;
		at += n;
		len -= (size_t)n;
	}
	return true;
}

UNUSED static bool receive_all(int fd, void *bytes, size_t len)
{
	return recv(fd, bytes, len, MSG_WAITALL) == (ssize_t)len;
}

/* Opens a TCP connection. It comes from one of eight addresses, so that there are enough ports. */
UNUSED static int dial(unsigned int which)
{
	struct sockaddr_in from = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(0x7f000002u + which % 8) };
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
				  .sin_port = htons(target.port) };
	struct timeval time_limit = { .tv_sec = 5 };
	int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return -1;
	setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time_limit, sizeof time_limit);
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time_limit, sizeof time_limit);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	if (bind(fd, (struct sockaddr *)&from, sizeof from) || connect(fd, (struct sockaddr *)&to, sizeof to)) {
		close(fd);
		return -1;
	}
	return fd;
}

/* Opens a connection, completes the MPA start-up and sends the initiator's first message. */
UNUSED static int connect_peer(unsigned int which)
{
	static const uint8_t request[20] = "MPA ID Req Frame\x40\x01\x00\x00";
	struct wire first = { .len = 0 };
	uint8_t reply[20], rest[512];
	int fd = dial(which);
	size_t more;

	if (fd < 0)
		return -1;
	send_message(&first, 0, 1, 0, 0);
	if (!send_all(fd, request, sizeof request) || !receive_all(fd, reply, sizeof reply) ||
	    memcmp(reply, "MPA ID Rep Frame", 16) || reply[16] & 0x20)
		goto failed;
	more = (size_t)reply[18] << 8 | reply[19];
	if (more > sizeof rest || (more && !receive_all(fd, rest, more)) || !send_all(fd, first.at, first.len))
		goto failed;
	return fd;
failed:
	close(fd);
	return -1;
}

/* ---------------------------------------------------------------- the undisturbed connection */

UNUSED static const char *talk(struct pair *p, size_t count)
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

/*
 * Measures windows of 25 ms and returns the messages per second of the best one, because other programs may disturb
 * some windows, and an attack disturbs all. Stops when `enough` is reached.
 */
UNUSED static const char *best_pace(struct pair *p, unsigned int windows, double enough, double *best)
{
	*best = 0;
	for (unsigned int i = 0; i < windows && (i < 4 || *best < enough); i++) {
		uint64_t begin = now_ns(), end = begin + 25000000;
		size_t count = 0;
		double pace;

		while (now_ns() < end) {
			TRY(talk(p, 20));
			count += 20;
		}
		pace = (double)count * 1e9 / (double)(now_ns() - begin);
		if (pace > *best)
			*best = pace;
	}
	return NULL;
}

UNUSED static unsigned int descriptors(void)
{
	unsigned int n = 0;

	for (int fd = 0; fd < 20000; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

#endif
