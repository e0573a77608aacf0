/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A peer of extended sockets that violates their protocol. It uses verbs and sends messages that docs/exs.md forbids.
 *
 * Each case connects, starts calls on the extended socket, and sends messages of which the last is invalid. The socket
 * must report each outstanding call exactly once with EPROTO, and its memory must not change.
 */
#include "check.h"

#include <arpa/inet.h>
#include <endian.h>
#include <exs.h>
#include <netinet/in.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#include "exs_events.h"

#define CREDITS 4
#define IMMEDIATE 64
#define RECEIVES 64
#define BUFFER 8192u
#define BLOCK 4096u
#define FILLED 0xa5
/* The number of calls that begin() starts, with the handles 1 to CALLS. */
#define CALLS 4

enum { ADVERT = 1, ACK, PLACE, NOTIFY, CANCEL, FIN, READY, WRITTEN };

static exs_qhandle_t queue = EXS_QHANDLE_INVALID;
static int listener_fd, fd;
static struct sockaddr_in addr;
static unsigned char *block;
static exs_mhandle_t handle;
static struct rdma_cm_id *peer;
static struct ibv_mr *region;
static unsigned char *buffers; /* of the peer: the first to send from, the others to receive into */

/*
 * A message header. Members that are not set are 0. `more` bytes of zeros follow it, and `cut` bytes are removed from
 * its end.
 */
struct message {
	int type, flags, header;
	uint32_t seq;
	uint64_t length, address;
	uint32_t stag, of;
	unsigned int more, cut;
};

static size_t put(unsigned char *to, const struct message *m)
{
	uint16_t header = htobe16((uint16_t)(m->header ? m->header : 32));
	uint32_t seq = htobe32(m->seq), stag = htobe32(m->stag), of = htobe32(m->of);
	uint64_t length = htobe64(m->length), address = htobe64(m->address);

	memset(to, 0, BUFFER);
	to[0] = (unsigned char)m->type;
	to[1] = (unsigned char)m->flags;
	memcpy(to + 2, &header, 2);
	memcpy(to + 4, &seq, 4);
	memcpy(to + 8, &length, 8);
	memcpy(to + 16, &address, 8);
	memcpy(to + 24, &stag, 4);
	memcpy(to + 28, &of, 4);
	if (m->type == READY && m->header == 48) {
		uint32_t length32 = htobe32((uint32_t)m->length);

		/* The memory of a READY is in a segment. No message with data precedes it. */
		memset(to + 16, 0, 12);
		memcpy(to + 32, &address, 8);
		memcpy(to + 40, &stag, 4);
		memcpy(to + 44, &length32, 4);
	}
	return 32 + m->more - m->cut;
}

/* Whether the peer says that it understands READY and WRITTEN. Then it accepts no immediate data, so that receives are advertised at once. */
static bool understands_ready;

static void hello(unsigned char to[16])
{
	memcpy(to, understands_ready ? "EXSP\1\0\0\4\0\0\0\0\0\0\0\3" : "EXSP\1\0\0\4\0\0\0\100\0\0\0\0", 16);
}

static int close_fd(void *what)
{
	return exs_close((int)(intptr_t)what);
}

static int close_raw(void *what)
{
	return close((int)(intptr_t)what);
}

static int close_peer(void *what)
{
	(void)what;
	if (peer->qp) {
		rdma_disconnect(peer);
		rdma_destroy_qp(peer);
	}
	if (region)
		ibv_dereg_mr(region);
	region = NULL;
	rdma_destroy_id(peer);
	return 0;
}

static int free_memory(void *what)
{
	free(what);
	return 0;
}

static const char *start(void)
{
	socklen_t len = sizeof addr;

	ENSURE(exs_init(EXS_VERSION) == 0, "exs_init: %s", strerror(errno));
	if (queue == EXS_QHANDLE_INVALID)
		queue = exs_qcreate(256);
	listener_fd = exs_socket(AF_INET, SOCK_SEQPACKET, 0);
	ENSURE(listener_fd >= 0, "exs_socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)listener_fd, "listener");
	ENSURE(!exs_fcntl(listener_fd, EXS_F_SETSMALLPACKET, IMMEDIATE), "fcntl: %s", strerror(errno));
	ENSURE(!exs_fcntl(listener_fd, EXS_F_SETCREDITS, CREDITS), "fcntl: %s", strerror(errno));
	addr = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	ENSURE(!exs_bind(listener_fd, (struct sockaddr *)&addr, len), "bind: %s", strerror(errno));
	ENSURE(!exs_listen(listener_fd, 8), "listen: %s", strerror(errno));
	ENSURE(!exs_getsockname(listener_fd, (struct sockaddr *)&addr, &len), "getsockname: %s", strerror(errno));
	return NULL;
}

static const char *event(exs_event_t *e)
{
	return next_event(queue, e);
}

static const char *no_event(unsigned int ms)
{
	struct timeval wait = { 0, ms * 1000 };
	exs_event_t e;

	ENSURE(exs_qdequeue(queue, &e, 1, &wait) == 0, "an unexpected event: type %d handle %ld (%s)", e.exs_evt_type,
	       (long)e.exs_evt_ahandle, strerror(e.exs_evt_errno));
	return NULL;
}

static void wr_attributes(struct ibv_qp_init_attr *attr)
{
	*attr = (struct ibv_qp_init_attr){
		.cap = { .max_send_wr = 64, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
	};
}

/* Creates the peer's queue pair and posts receives. */
static const char *equip(void)
{
	struct ibv_qp_init_attr attr;

	wr_attributes(&attr);
	ENSURE(!rdma_create_qp(peer, NULL, &attr), "rdma_create_qp: %s", strerror(errno));
	buffers = calloc(RECEIVES + 1, BUFFER);
	keep(free_memory, buffers, "buffers");
	region = ibv_reg_mr(peer->pd, buffers, (RECEIVES + 1) * BUFFER,
			    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
	ENSURE(region, "ibv_reg_mr: %s", strerror(errno));
	keep(close_peer, &peer, "peer");
	for (unsigned int i = 1; i <= RECEIVES; i++)
		ENSURE(!rdma_post_recv(peer, NULL, buffers + i * BUFFER, BUFFER, region), "post: %s", strerror(errno));
	return NULL;
}

static const char *resolve(void)
{
	struct sockaddr_in to = addr;

	ENSURE(!rdma_create_id(NULL, &peer, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	ENSURE(!rdma_resolve_addr(peer, NULL, (struct sockaddr *)&to, 2000) && !rdma_resolve_route(peer, 2000),
	       "resolve: %s", strerror(errno));
	return equip();
}

static int dial(const void *data, size_t len)
{
	struct rdma_conn_param param = {
		.private_data = data,
		.private_data_len = (uint8_t)len,
		.responder_resources = 16,
		.initiator_depth = 16,
	};

	return rdma_connect(peer, &param);
}

/* Connects the peer to an extended socket that has a block of memory. */
static const char *connected(void)
{
	unsigned char data[16];
	exs_event_t e;

	TRY(start());
	ENSURE(!exs_accept(listener_fd, NULL, 0, queue, 0), "accept: %s", strerror(errno));
	TRY(resolve());
	hello(data);
	ENSURE(!dial(data, sizeof data), "rdma_connect: %s", strerror(errno));
	TRY(event(&e));
	ENSURE(e.exs_evt_type == EXS_EVT_ACCEPT && !e.exs_evt_errno, "accept: %s", strerror(e.exs_evt_errno));
	fd = e.exs_evt_union.exs_evt_accept.exs_evt_newfd;
	keep(close_fd, (void *)(intptr_t)fd, "socket");
	block = malloc(BLOCK);
	keep(free_memory, block, "block");
	memset(block, FILLED, BLOCK);
	handle = exs_mregister(block, BLOCK, 0);
	ENSURE(handle >= 0, "mregister: %s", strerror(errno));
	return NULL;
}

/*
 * Starts two sends, the second persistent. If `receive`, two receives start before them. Otherwise two more sends follow them: one of
 * no bytes, and a persistent one with notification.
 */
static const char *begin(bool receive)
{
	int failed = 0;

	if (receive)
		failed |= exs_recv(fd, block, 100, 0, queue, 3, handle) || exs_recv(fd, block + 100, 100, 0, queue, 4, handle);
	failed |= exs_send(fd, block, 100, 0, queue, 1, handle) || exs_send(fd, block, 200, EXS_PERSISTENT, queue, 2, handle);
	if (!receive) {
		failed |= exs_send(fd, block, 0, 0, queue, 3, handle);
		failed |= exs_send(fd, block, 1, EXS_PERSISTENT_NOTIFY, queue, 4, handle);
	}
	ENSURE(!failed, "a call: %s", strerror(errno));
	return NULL;
}

static const char *unchanged(void)
{
	for (unsigned int i = 0; i < BLOCK; i++)
		ENSURE(block[i] == FILLED, "byte %u of the block has changed", i);
	return NULL;
}

/* Sends the contents of the first buffer. A refused send is no failure, because the other end may have closed the connection. */
static const char *post(size_t len)
{
	struct ibv_wc wc;

	if (rdma_post_send(peer, NULL, buffers, len, region, 0))
		return NULL;
	ENSURE(rdma_get_send_comp(peer, &wc) == 1, "the peer's send does not complete: %s", strerror(errno));
	return NULL;
}

/* Each call that begin() has started ends once with `error`, and the memory is unchanged. */
static const char *ended(int error)
{
	unsigned int seen = 0;
	exs_event_t e;

	for (int i = 0; i < CALLS; i++) {
		TRY(event(&e));
		ENSURE(e.exs_evt_fd == fd && e.exs_evt_ahandle >= 1 && e.exs_evt_ahandle <= CALLS && !(seen & 1u << e.exs_evt_ahandle),
		       "event of %d with handle %ld", e.exs_evt_fd, (long)e.exs_evt_ahandle);
		seen |= 1u << e.exs_evt_ahandle;
		ENSURE(e.exs_evt_errno == error, "call %ld: %s, expected %s", (long)e.exs_evt_ahandle, strerror(e.exs_evt_errno),
		       strerror(error));
	}
	TRY(no_event(2));
	TRY(unchanged());
	ENSURE(exs_send(fd, block, 1, 0, queue, 5, handle) < 0 && errno == ECONNRESET, "a send after the end: %s", strerror(errno));
	ENSURE(exs_mderegister(handle, 0) == 0, "mderegister: %s", strerror(errno));
	return NULL;
}

/* The last `calls` calls end because the connection is broken, and the memory is unchanged. */
static const char *all_broken(int calls)
{
	exs_event_t e;

	for (int i = 0; i < calls; i++) {
		TRY(event(&e));
		ENSURE(e.exs_evt_errno == EPROTO || e.exs_evt_errno == ECONNRESET, "event %ld: %s", (long)e.exs_evt_ahandle,
		       strerror(e.exs_evt_errno));
	}
	TRY(no_event(2));
	return unchanged();
}

/* Messages of which the last is invalid. */
struct fault {
	const char *name;
	bool receive;
	struct message m[6];
};

static const struct fault faults[] = {
	{ "type 0", true, { { .type = 0, .seq = 1 } } },
	{ "type 9", true, { { .type = 9, .seq = 1 } } },
	{ "READY of a peer that does not understand it", true, { { .type = READY, .seq = 1, .length = 1 } } },
	{ "WRITTEN to no receive", true, { { .type = WRITTEN, .seq = 1, .length = 1 } } },
	{ "type 255", true, { { .type = 255, .seq = 1 } } },
	{ "no bytes", true, { { .type = FIN, .seq = 1, .cut = 32 } } },
	{ "one byte", true, { { .type = FIN, .seq = 1, .cut = 31 } } },
	{ "a byte less", true, { { .type = FIN, .seq = 1, .cut = 1 } } },
	{ "a byte more", true, { { .type = FIN, .seq = 1, .more = 1 } } },
	{ "longer than all messages", true, { { .type = ADVERT, .flags = 1, .seq = 1, .length = 4000, .more = 4000 } } },
	{ "a header of 31", true, { { .type = FIN, .seq = 1, .header = 31 } } },
	{ "a header of 65535", true, { { .type = ADVERT, .seq = 1, .header = 65535 } } },
	{ "one segment after the header", true, { { .type = ADVERT, .seq = 1, .header = 48, .more = 16 } } },
	{ "segments whose lengths do not add up", true, { { .type = ADVERT, .seq = 1, .header = 64, .more = 32, .length = 9 } } },
	{ "nine segments", true, { { .type = ADVERT, .seq = 1, .header = 176, .more = 144 } } },
	{ "segments of a FIN", true, { { .type = FIN, .seq = 1, .header = 64, .more = 32 } } },
	{ "notify without persistent", true, { { .type = ADVERT, .flags = 4, .seq = 1, .length = 1 } } },
	{ "immediate and persistent", true, { { .type = ADVERT, .flags = 3, .seq = 1, .length = 1, .more = 1 } } },
	{ "an unknown flag", true, { { .type = ADVERT, .flags = 16, .seq = 1 } } },
	{ "an acknowledgement of number 0", true, { { .type = ADVERT, .flags = 8, .seq = 1 } } },
	{ "an acknowledgement of an unsent message in an ADVERT", true, { { .type = ADVERT, .flags = 8, .seq = 1, .length = 1, .of = 77 } } },
	{ "an unknown status", true, { { .type = ACK, .flags = 3, .seq = 1 } } },
	{ "a length beyond 2^30", true, { { .type = ADVERT, .seq = 1, .length = (1u << 30) + 1 } } },
	{ "a length of 2^64 - 1", true, { { .type = ADVERT, .seq = 1, .length = ~0ull } } },
	{ "immediate data of 2^64 - 1", true, { { .type = ADVERT, .flags = 1, .seq = 1, .length = ~0ull } } },
	{ "a length of immediate data without data", true, { { .type = ADVERT, .flags = 1, .seq = 1, .length = 64, .more = 63 } } },
	{ "too much immediate data", true, { { .type = ADVERT, .flags = 1, .seq = 1, .length = 65, .more = 65 } } },
	{ "an address in a FIN", true, { { .type = FIN, .seq = 1, .address = 1 } } },
	{ "a length in a CANCEL", true, { { .type = CANCEL, .seq = 1, .length = 1 } } },
	{ "number 0", true, { { .type = FIN, .seq = 0 } } },
	{ "number 2 first", true, { { .type = FIN, .seq = 2 } } },
	{ "a number twice", false, { { .type = ADVERT, .seq = 1, .length = 1 }, { .type = ADVERT, .seq = 1, .length = 1 } } },
	{ "more adverts than credits",
	  false,
	  { { .type = ADVERT, .seq = 1, .length = 1 },
	    { .type = ADVERT, .seq = 2, .length = 1 },
	    { .type = ADVERT, .seq = 3, .length = 1 },
	    { .type = ADVERT, .seq = 4, .length = 1 },
	    { .type = ADVERT, .seq = 5, .length = 1 } } },
	{ "an advert after FIN", false, { { .type = FIN, .seq = 1 }, { .type = ADVERT, .seq = 2, .length = 1 } } },
	{ "an ACK without a message", true, { { .type = ACK, .seq = 99 } } },
	{ "more taken than advertised", true, { { .type = ACK, .seq = 1, .length = 101 } } },
	{ "more taken than persistent", true, { { .type = ACK, .seq = 2, .length = 201 } } },
	{ "an ACK with a segment", true, { { .type = ACK, .seq = 1, .length = 5, .address = 1 } } },
	{ "a NOTIFY without a send", true, { { .type = NOTIFY, .seq = 1, .of = 77, .length = 1 } } },
	{ "a NOTIFY of a send without notify", true, { { .type = NOTIFY, .seq = 1, .of = 2, .length = 1 } } },
	{ "a NOTIFY of a send", true, { { .type = NOTIFY, .seq = 1, .of = 1, .length = 1 } } },
	{ "a NOTIFY beyond the block", false, { { .type = NOTIFY, .seq = 1, .of = 4, .length = 2 } } },
};

static const char *fault(size_t which)
{
	const struct fault *f = &faults[which];

	TRY(connected());
	TRY(begin(f->receive));
	for (size_t i = 0; i < COUNT(f->m) && (i == 0 || f->m[i].type || f->m[i].seq); i++)
		TRY(post(put(buffers, &f->m[i])));
	return ended(EPROTO);
}

static const char *all_faults(size_t arg)
{
	(void)arg;
	for (size_t i = 0; i < COUNT(faults); i++) {
		const char *reason = fault(i), *closed = close_all();

		ENSURE(!reason, "%s: %s", faults[i].name, reason);
		ENSURE(!closed, "%s: %s", faults[i].name, closed);
	}
	printf("# %zu faults\n", COUNT(faults));
	return NULL;
}

/* The peer advertises memory that it does not have. The device of the peer refuses the Read, and nothing is placed. */
static const char *foreign_memory(size_t which)
{
	uint64_t at = (uintptr_t)buffers;
	struct message m = { .type = ADVERT, .seq = 1, .length = 100 };

	TRY(connected());
	TRY(begin(true));
	at = (uintptr_t)buffers;
	if (which == 0) { /* no registered STag */
		m.address = at;
		m.stag = region->rkey ^ 0x5500;
	} else if (which == 1) { /* beyond the end of the region */
		m.address = at + (RECEIVES + 1) * BUFFER - 50;
		m.stag = region->rkey;
	} else if (which == 2) { /* an address range that wraps */
		m.address = ~0ull - 20;
		m.stag = region->rkey;
	}
	TRY(post(put(buffers, &m)));
	return ended(EPROTO);
}

/*
 * The peer names a persistent receive that does not exist. The first send may complete, since a Write has no response;
 * later sends fail.
 */
static const char *unknown_persistent_receive(size_t arg)
{
	struct message m = { .type = PLACE, .seq = 1, .length = 4096, .address = (uintptr_t)buffers, .stag = 0x12345600 };
	unsigned int events = 0;
	exs_event_t e;

	(void)arg;
	TRY(connected());
	TRY(post(put(buffers, &m)));
	for (int tries = 0; tries < 1000; tries++) {
		/*
		 * A send with an offset waits for the PLACE. A send without one would be an ADVERT, which this peer
		 * does not answer.
		 */
		if (exs_send_offset(fd, block, 100, 0, queue, tries, handle, 10)) {
			ENSURE(errno == ECONNRESET, "send: %s", strerror(errno));
			ENSURE(events > 0, "the call has no event");
			TRY(no_event(2));
			TRY(unchanged());
			return NULL;
		}
		TRY(event(&e));
		ENSURE(e.exs_evt_ahandle == tries, "event %ld of %d", (long)e.exs_evt_ahandle, tries);
		events++;
		sleep_ms(5);
	}
	return "the connection does not end";
}

/* The peer writes to memory that was advertised for reading, or reads beyond its end. The device refuses it. */
static const char *beyond_the_advert(size_t write)
{
	struct ibv_wc wc;
	uint64_t at;
	uint32_t stag;
	exs_event_t e;
	unsigned int seen = 0;

	TRY(connected());
	TRY(begin(true));
	ENSURE(rdma_get_recv_comp(peer, &wc) == 1 && wc.status == 0, "no advert arrives");
	memcpy(&at, buffers + BUFFER + 16, 8);
	memcpy(&stag, buffers + BUFFER + 24, 4);
	at = be64toh(at);
	stag = be32toh(stag);
	memset(buffers, 0x11, 100);
	if (write)
		ENSURE(!rdma_post_write(peer, NULL, buffers, 100, region, 0, at, stag), "post: %s", strerror(errno));
	else
		ENSURE(!rdma_post_read(peer, NULL, buffers, 100, region, 0, at + BLOCK - 50, stag), "post: %s", strerror(errno));
	for (int i = 0; i < CALLS; i++) {
		TRY(event(&e));
		ENSURE(e.exs_evt_errno == ECONNRESET || e.exs_evt_errno == EPROTO, "event %ld: %s", (long)e.exs_evt_ahandle,
		       strerror(e.exs_evt_errno));
		seen |= 1u << e.exs_evt_ahandle;
	}
	ENSURE(seen == 0x1e, "events %x", seen);
	TRY(no_event(2));
	return unchanged();
}

/* An advertised receive, as the peer sees it. */
struct ready {
	uint32_t number, stag;
	uint64_t at;
};

/* Waits until the socket has advertised `count` receives. Other messages are skipped. */
static const char *advertised(struct ready *ready, unsigned int count)
{
	for (unsigned int seen = 0, i = 1; seen < count; i++) {
		const unsigned char *m = buffers + i * BUFFER;
		struct ibv_wc wc;

		ENSURE(i <= RECEIVES && rdma_get_recv_comp(peer, &wc) == 1 && wc.status == 0, "no receive is advertised");
		if (m[0] != READY)
			continue;
		ENSURE((m[1] & 2) != 0, "the STag of a receive is not that of a memory window");
		memcpy(&ready[seen].number, m + 4, 4);
		memcpy(&ready[seen].at, m + 32, 8);
		memcpy(&ready[seen].stag, m + 40, 4);
		ready[seen].number = be32toh(ready[seen].number);
		ready[seen].at = be64toh(ready[seen].at);
		ready[seen].stag = be32toh(ready[seen].stag);
		seen++;
	}
	return NULL;
}

/* Sends the contents of the first buffer by a Send with Invalidate. */
static const char *post_invalidating(size_t len, uint32_t stag)
{
	struct ibv_sge sge = { (uintptr_t)buffers, (uint32_t)len, region->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_INV, .invalidate_rkey = stag }, *bad;
	struct ibv_wc wc;

	if (ibv_post_send(peer->qp, &wr, &bad))
		return NULL;
	ENSURE(rdma_get_send_comp(peer, &wc) == 1, "the peer's send does not complete: %s", strerror(errno));
	return NULL;
}

/* Writes bytes to the memory of a receive. */
static const char *write_to(const struct ready *r, uint32_t offset, uint32_t len)
{
	struct ibv_wc wc;

	memset(buffers, 0x11, len);
	ENSURE(!rdma_post_write(peer, NULL, buffers, len, region, 0, r->at + offset, r->stag), "post: %s", strerror(errno));
	ENSURE(rdma_get_send_comp(peer, &wc) == 1, "the peer's Write does not complete: %s", strerror(errno));
	return NULL;
}

/* What a peer does with two advertised receives of 100 bytes. */
enum { RIGHT, UNKNOWN_RECEIVE, SECOND_FIRST, TOO_LONG, NOT_INVALIDATED, OTHER_INVALIDATED, TWICE, DONE, BEYOND, WRITES_LATER, CREDITS_TWICE, MISUSES };

static const char *misuse(size_t which)
{
	struct ready r[2];
	struct message m = { .type = WRITTEN, .seq = 1, .length = 50 };
	exs_event_t e;

	TRY(connected());
	TRY(begin(true));
	TRY(advertised(r, 2));
	m.address = r[0].number;
	switch (which) {
	case UNKNOWN_RECEIVE:
		m.address = 99;
		break;
	case SECOND_FIRST:
		m.address = r[1].number;
		break;
	case TOO_LONG:
		m.length = 101;
		break;
	case DONE:
		m = (struct message){ .type = ACK, .seq = r[0].number };
		break;
	case BEYOND:
		TRY(write_to(&r[0], 60, 41));
		break;
	case CREDITS_TWICE:
		/* An ADVERT ends the advertisement of the receives, so a WRITTEN cannot follow. */
		TRY(post(put(buffers, &(struct message){ .type = ADVERT, .seq = 1, .flags = 2, .length = 1, .address = 1, .stag = 1 })));
		m.seq = 2;
		break;
	default:
		break;
	}
	if (which == RIGHT || which == TWICE || which == WRITES_LATER)
		TRY(write_to(&r[0], 0, 50));
	if (which == NOT_INVALIDATED)
		TRY(post(put(buffers, &m)));
	else
		TRY(post_invalidating(put(buffers, &m), r[which == OTHER_INVALIDATED].stag));
	if (which != RIGHT && which != TWICE && which != WRITES_LATER)
		return which == BEYOND || which == CREDITS_TWICE ? all_broken(CALLS) : ended(EPROTO);
	TRY(event(&e));
	ENSURE(e.exs_evt_ahandle == 3 && !e.exs_evt_errno && e.exs_evt_union.exs_evt_xfer.exs_evt_length == 50, "event %ld: %s, %zu bytes",
	       (long)e.exs_evt_ahandle, strerror(e.exs_evt_errno), e.exs_evt_union.exs_evt_xfer.exs_evt_length);
	for (unsigned int i = 0; i < 50; i++)
		ENSURE(block[i] == 0x11, "byte %u is not that of the peer", i);
	memset(block, FILLED, 50);
	if (which == RIGHT)
		return unchanged();
	/* The receive has ended, so nothing is written to its memory any more. */
	if (which == WRITES_LATER) {
		TRY(write_to(&r[0], 0, 50));
	} else {
		m.seq = 2;
		TRY(post(put(buffers, &m)));
	}
	return all_broken(CALLS - 1);
}

static const char *advertised_receives(size_t arg)
{
	(void)arg;
	understands_ready = true;
	for (size_t i = 0; i < MISUSES; i++) {
		const char *reason = misuse(i), *closed = close_all();
		struct timeval wait = { 0, 20000 };
		exs_event_t e;

		/* These are the events of calls that were outstanding when the socket was closed. */
		while (exs_qdequeue(queue, &e, 1, &wait) > 0)
			ENSURE(e.exs_evt_errno, "misuse %zu: call %ld succeeds at the end", i, (long)e.exs_evt_ahandle);
		ENSURE(!reason, "misuse %zu: %s", i, reason);
		ENSURE(!closed, "misuse %zu: %s", i, closed);
	}
	return NULL;
}

/* The peer advertises receives, and violates the rules or has no such memory. */
static const char *receives_of_the_peer(size_t which)
{
	struct message m = { .type = READY, .header = 48, .more = 16, .length = 200, .stag = 0x12345600 };
	exs_event_t e;

	understands_ready = true;
	TRY(connected());
	m.address = (uintptr_t)buffers;
	if (which == 0) {
		/* More messages than credits. */
		for (m.seq = 1; m.seq <= CREDITS + 1; m.seq++) {
			m.flags = m.seq > 1;
			TRY(post(put(buffers, &m)));
		}
		sleep_ms(20);
	} else {
		/* The device of the peer refuses the Write. */
		m.seq = 1;
		TRY(post(put(buffers, &m)));
		sleep_ms(20);
		ENSURE(exs_send(fd, block, 100, 0, queue, 1, handle) == 0, "send: %s", strerror(errno));
		TRY(event(&e));
		ENSURE(e.exs_evt_errno == EPROTO || e.exs_evt_errno == ECONNRESET, "%s", strerror(e.exs_evt_errno));
	}
	for (int tries = 0; exs_send(fd, block, 1, 0, queue, 5, handle) == 0; tries++) {
		TRY(event(&e));
		ENSURE(e.exs_evt_errno == EPROTO || e.exs_evt_errno == ECONNRESET, "%s", strerror(e.exs_evt_errno));
		ENSURE(tries < 100, "the connection does not end");
	}
	ENSURE(errno == ECONNRESET, "a send after the end: %s", strerror(errno));
	return unchanged();
}

/*
 * A peer does not answer the request to give back a receive. The receive is not cancelled then, because the peer may be writing to its memory.
 * When the program closes the socket, the receive ends and the peer cannot write any more.
 */
static const char *keeps_a_receive(size_t arg)
{
	struct ready r;
	exs_event_t e;

	(void)arg;
	understands_ready = true;
	TRY(connected());
	ENSURE(exs_recv(fd, block, 100, 0, queue, 1, handle) == 0, "recv: %s", strerror(errno));
	TRY(advertised(&r, 1));
	ENSURE(exs_cancel(fd, EXS_CAF_FILDES, 0) == 0, "cancel: %s", strerror(errno));
	TRY(no_event(20));
	ENSURE(close_now((void *)(intptr_t)fd) == 0, "close");
	TRY(event(&e));
	ENSURE(e.exs_evt_ahandle == 1 && e.exs_evt_errno == ECANCELED, "%s", strerror(e.exs_evt_errno));
	ENSURE(exs_mderegister(handle, 0) == 0, "mderegister: %s", strerror(errno));
	TRY(write_to(&r, 0, 50));
	sleep_ms(20);
	return unchanged();
}

/* A peer sends an endless sequence of cancels and receives no answer. The number of queued answers is limited. */
static const char *flood(size_t arg)
{
	struct message m = { .type = CANCEL, .of = 1000 };
	struct ibv_wc wc;

	(void)arg;
	TRY(connected());
	TRY(begin(true));
	for (uint32_t i = 1; i < 100000; i++) {
		m.seq = i;
		if (rdma_post_send(peer, NULL, buffers, put(buffers, &m), region, 0))
			break;
		if (rdma_get_send_comp(peer, &wc) != 1 || wc.status)
			break;
		ENSURE(i < 99999, "100,000 messages are accepted although no answer is received");
	}
	/* The peer has receives for 64 answers. When answer 65 arrives, the device of the peer ends the connection. */
	for (int i = 0; i < CALLS; i++) {
		exs_event_t e;

		TRY(event(&e));
		ENSURE(e.exs_evt_errno == EPROTO || e.exs_evt_errno == ECONNRESET, "%s", strerror(e.exs_evt_errno));
	}
	TRY(no_event(2));
	return unchanged();
}

/* Invalid private data of a request: the listener rejects it with its own private data, and its accept still waits. */
static const char *private_data(size_t arg)
{
	static const struct {
		const char *name, *data;
		size_t len;
	} bad[] = {
		{ "none", "", 0 },
		{ "another magic", "GET / HTTP/1.1\r\n", 16 },
		{ "version 2", "EXSP\2\0\0\4\0\0\0\0\0\0\0\0", 16 },
		{ "an unknown flag", "EXSP\1\4\0\4\0\0\0\0\0\0\0\0", 16 },
		{ "the other type", "EXSP\1\1\0\4\0\0\0\0\0\0\0\0", 16 },
		{ "no credits", "EXSP\1\0\0\0\0\0\0\0\0\0\0\0", 16 },
	};
	exs_event_t e;

	(void)arg;
	TRY(start());
	ENSURE(!exs_accept(listener_fd, NULL, 0, queue, 9), "accept: %s", strerror(errno));
	for (size_t i = 0; i < COUNT(bad); i++) {
		TRY(resolve());
		ENSURE(dial(bad[i].data, bad[i].len) < 0 && errno == ECONNREFUSED, "%s: %s", bad[i].name, strerror(errno));
		ENSURE(peer->event && peer->event->event == RDMA_CM_EVENT_REJECTED, "%s: no refusal", bad[i].name);
		ENSURE(peer->event->param.conn.private_data_len >= 16 &&
			       !memcmp(peer->event->param.conn.private_data, "EXSP\1\0\0\4\0\0\0\100\0\0\0\1", 16),
		       "%s: refused without private data", bad[i].name);
		ENSURE(close_now(&peer) == 0, "close");
	}
	TRY(no_event(2));
	ENSURE(!exs_cancel(listener_fd, EXS_CAF_FILDES, 0), "cancel: %s", strerror(errno));
	TRY(event(&e));
	ENSURE(e.exs_evt_ahandle == 9 && e.exs_evt_errno == ECANCELED, "%s", strerror(e.exs_evt_errno));
	return NULL;
}

static int close_listener(void *what)
{
	return rdma_destroy_id(what);
}

/* A listener accepts or rejects with invalid private data. */
static const char *answers(size_t arg)
{
	static const struct {
		const char *name, *data;
		size_t len;
		bool accept;
		int error;
	} bad[] = {
		{ "accepted with none", "", 0, true, EPROTO },
		{ "accepted with another magic", "GET / HTTP/1.1\r\n", 16, true, EPROTO },
		{ "accepted with version 2", "EXSP\2\0\0\4\0\0\0\0\0\0\0\0", 16, true, EPROTONOSUPPORT },
		{ "accepted with an unknown flag", "EXSP\1\4\0\4\0\0\0\0\0\0\0\0", 16, true, EPROTO },
		{ "accepted with the other type", "EXSP\1\1\0\4\0\0\0\0\0\0\0\0", 16, true, EPROTOTYPE },
		{ "accepted without credits", "EXSP\1\0\0\0\0\0\0\0\0\0\0\0", 16, true, EPROTO },
		{ "refused with none", "", 0, false, ECONNREFUSED },
		{ "refused with another magic", "GET / HTTP/1.1\r\n", 16, false, ECONNREFUSED },
		{ "refused with version 2", "EXSP\2\0\0\4\0\0\0\0\0\0\0\0", 16, false, EPROTONOSUPPORT },
		{ "refused with the other type", "EXSP\1\1\0\4\0\0\0\0\0\0\0\0", 16, false, EPROTOTYPE },
	};
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct rdma_cm_id *listener;
	exs_event_t e;

	(void)arg;
	TRY(start());
	ENSURE(!rdma_create_id(NULL, &listener, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(close_listener, listener, "verbs listener");
	ENSURE(!rdma_bind_addr(listener, (struct sockaddr *)&any) && !rdma_listen(listener, 8), "listen: %s", strerror(errno));
	any.sin_port = rdma_get_src_port(listener);
	for (size_t i = 0; i < COUNT(bad); i++) {
		struct rdma_conn_param param = {
			.private_data = bad[i].data, .private_data_len = (uint8_t)bad[i].len, .responder_resources = 1, .initiator_depth = 1
		};

		fd = exs_socket(AF_INET, SOCK_SEQPACKET, 0);
		keep(close_fd, (void *)(intptr_t)fd, "socket");
		ENSURE(!exs_connect(fd, (struct sockaddr *)&any, sizeof any, 0, queue, 3), "connect: %s", strerror(errno));
		ENSURE(!rdma_get_request(listener, &peer), "rdma_get_request: %s", strerror(errno));
		TRY(equip());
		/* The other end may end the connection before this call returns. */
		if (bad[i].accept)
			rdma_accept(peer, &param);
		else
			ENSURE(!rdma_reject(peer, bad[i].data, (uint8_t)bad[i].len), "rdma_reject: %s", strerror(errno));
		TRY(event(&e));
		ENSURE(e.exs_evt_type == EXS_EVT_CONNECT && e.exs_evt_errno == bad[i].error, "%s: %s, expected %s", bad[i].name,
		       strerror(e.exs_evt_errno), strerror(bad[i].error));
		TRY(no_event(2));
		ENSURE(close_now((void *)(intptr_t)fd) == 0 && close_now(&peer) == 0, "close");
	}
	return NULL;
}

#define HALF_OPEN 80

/*
 * Peers that request a connection and do not confirm it: MPA requests without the ready-to-receive message (RFC 6581). They neither take an
 * accept nor keep other peers out, and the accepts can be cancelled.
 */
static const char *half_open(size_t arg)
{
	static const unsigned char request[] = "MPA ID Req Frame\x50\x02\x00\x14\xc0\x01\xc0\x01";
	unsigned char message[sizeof request - 1 + 16], data[16];
	exs_event_t e;

	(void)arg;
	TRY(start());
	ENSURE(!exs_accept(listener_fd, NULL, 0, queue, 0) && !exs_accept(listener_fd, NULL, 0, queue, 1), "accept: %s", strerror(errno));
	memcpy(message, request, sizeof request - 1);
	hello(message + sizeof request - 1);
	for (int i = 0; i < HALF_OPEN; i++) {
		int raw = socket(AF_INET, SOCK_STREAM, 0);

		ENSURE(raw >= 0 && !connect(raw, (struct sockaddr *)&addr, sizeof addr), "connect: %s", strerror(errno));
		keep(close_raw, (void *)(intptr_t)raw, "TCP socket");
		ENSURE(send(raw, message, sizeof message, MSG_NOSIGNAL) == sizeof message, "send: %s", strerror(errno));
	}
	TRY(no_event(20));
	uint64_t began = now_ms();
	TRY(resolve());
	hello(data);
	while (dial(data, sizeof data)) {
		/* On a busy machine the requests of the others may still fill the queue. */
		ENSURE(errno == ECONNREFUSED && now_ms() - began < 1500, "rdma_connect: %s", strerror(errno));
		ENSURE(close_now(&peer) == 0, "close");
		sleep_ms(5);
		TRY(resolve());
	}
	TRY(event(&e));
	ENSURE(e.exs_evt_type == EXS_EVT_ACCEPT && !e.exs_evt_errno && e.exs_evt_ahandle == 0, "accept %ld: %s",
	       (long)e.exs_evt_ahandle, strerror(e.exs_evt_errno));
	keep(close_fd, (void *)(intptr_t)e.exs_evt_union.exs_evt_accept.exs_evt_newfd, "socket");
	ENSURE(now_ms() - began < 1500, "the accept took %llu ms", (unsigned long long)(now_ms() - began));
	ENSURE(!exs_cancel(listener_fd, EXS_CAF_FILDES, 0), "cancel: %s", strerror(errno));
	TRY(event(&e));
	ENSURE(e.exs_evt_ahandle == 1 && e.exs_evt_errno == ECANCELED, "%s", strerror(e.exs_evt_errno));
	return NULL;
}

static const struct test tests[] = {
	{ "faults", all_faults, 0, 120, false },
	{ "foreign_stag", foreign_memory, 0, 0, false },
	{ "beyond_foreign_memory", foreign_memory, 1, 0, false },
	{ "address_that_wraps", foreign_memory, 2, 0, false },
	{ "unknown_persistent_receive", unknown_persistent_receive, 0, 0, false },
	{ "write_to_advert", beyond_the_advert, 1, 0, false },
	{ "read_beyond_advert", beyond_the_advert, 0, 0, false },
	{ "flood", flood, 0, 0, false },
	{ "advertised_receives", advertised_receives, 0, 60, false },
	{ "more_receives_than_credits", receives_of_the_peer, 0, 0, false },
	{ "receive_without_memory", receives_of_the_peer, 1, 0, false },
	{ "keeps_a_receive", keeps_a_receive, 0, 0, false },
	{ "private_data", private_data, 0, 0, false },
	{ "answers", answers, 0, 0, false },
	{ "half_open", half_open, 0, 0, false },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
