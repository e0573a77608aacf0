/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* <exs.h>: extended sockets over any RDMA device. Both ends are in this process. */
#include "check.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sys/exs.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "exs_events.h"

#define MIB (1u << 20)

static exs_qhandle_t queue = EXS_QHANDLE_INVALID;
static int ends[2];
static char *block[2];
static exs_mhandle_t handle[2];
static int stream_buffer; /* the stream buffer of sockets that are created next */

static int close_fd(void *what)
{
	return exs_close((int)(intptr_t)what);
}

static int close_socket(void *what)
{
	return close((int)(intptr_t)what);
}

static int free_block(void *what)
{
	free(what);
	return 0;
}

/* Events that arrived before the expected one. Only the events of one direction of one socket are ordered. */
static exs_event_t early[8];
static size_t early_count;

static const char *event(exs_event_t *e, int type, exs_ahandle_t ah, int error)
{
	struct timeval wait = { 10, 0 };
	size_t at = 0;
	int n;

	while (at < early_count && (early[at].exs_evt_type != type || early[at].exs_evt_ahandle != ah))
		at++;
	if (at < early_count) {
		*e = early[at];
		memmove(&early[at], &early[at + 1], (--early_count - at) * sizeof early[0]);
	} else {
		for (;;) {
			do
				n = exs_qdequeue(queue, e, 1, &wait);
			while (n < 0 && errno == EINTR);
			ENSURE(n == 1, "no event of type %d with handle %ld: %d (%s)", type, (long)ah, n,
			       strerror(errno));
			if (e->exs_evt_type == type && e->exs_evt_ahandle == ah)
				break;
			ENSURE(e->exs_evt_type != type && early_count < COUNT(early),
			       "event %d with handle %ld, expected %d with %ld", e->exs_evt_type,
			       (long)e->exs_evt_ahandle, type, (long)ah);
			early[early_count++] = *e;
		}
	}
	ENSURE(e->exs_evt_errno == error, "event %d: %s, expected %s", type, strerror(e->exs_evt_errno), strerror(error));
	return NULL;
}

static const char *no_event(void)
{
	exs_event_t e;
	struct timeval wait = { 0, 50000 };

	ENSURE(early_count == 0, "an event of type %d", early[0].exs_evt_type);
	ENSURE(exs_qdequeue(queue, &e, 1, &wait) == 0, "an event of type %d", e.exs_evt_type);
	return NULL;
}

static int delete_queue(void *what)
{
	(void)what;
	return exs_qdelete(queue);
}

static const char *begin(void)
{
	ENSURE(exs_init(EXS_VERSION) == 0, "exs_init: %s", strerror(errno));
	/* A new queue for each test, because a failed test may leave events. */
	early_count = 0;
	queue = exs_qcreate(256);
	ENSURE(queue != EXS_QHANDLE_INVALID, "exs_qcreate: %s", strerror(errno));
	keep(delete_queue, NULL, "queue");
	return NULL;
}

static const char *listener(int type, int immediate, int *fd, struct sockaddr_in *addr)
{
	socklen_t len = sizeof *addr;

	*addr = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	*fd = exs_socket(AF_INET, type, 0);
	ENSURE(*fd >= 0, "exs_socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)*fd, "listener");
	ENSURE(exs_fcntl(*fd, EXS_F_SETSMALLPACKET, immediate) == 0, "fcntl: %s", strerror(errno));
	ENSURE(exs_fcntl(*fd, EXS_F_SETSTREAMBUFFER, stream_buffer) == 0, "fcntl: %s", strerror(errno));
	ENSURE(exs_bind(*fd, (struct sockaddr *)addr, len) == 0, "bind: %s", strerror(errno));
	ENSURE(exs_listen(*fd, 8) == 0, "listen: %s", strerror(errno));
	ENSURE(exs_getsockname(*fd, (struct sockaddr *)addr, &len) == 0 && addr->sin_port, "getsockname");
	return NULL;
}

/* Connects two sockets and registers a block of memory for each. */
static const char *connected(int type, int immediate)
{
	struct sockaddr_in addr, peer = { 0 };
	exs_acceptaddr_t want = { (struct sockaddr *)&peer, sizeof peer };
	struct timeval wait = { 10, 0 };
	exs_event_t e[2];
	int fd;

	TRY(begin());
	TRY(listener(type, immediate, &fd, &addr));
	ends[0] = exs_socket(AF_INET, type, 0);
	ENSURE(ends[0] >= 0, "exs_socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)ends[0], "socket");
	ENSURE(exs_fcntl(ends[0], EXS_F_SETSMALLPACKET, immediate) == 0, "fcntl: %s", strerror(errno));
	ENSURE(exs_fcntl(ends[0], EXS_F_SETSTREAMBUFFER, stream_buffer) == 0, "fcntl: %s", strerror(errno));
	ENSURE(exs_accept(fd, &want, 0, queue, 1) == 0, "accept: %s", strerror(errno));
	ENSURE(exs_connect(ends[0], (struct sockaddr *)&addr, sizeof addr, 0, queue, 2) == 0, "connect: %s",
	       strerror(errno));
	ENSURE(exs_qdequeue(queue, e, -2, &wait) == 2, "exs_qdequeue does not return two events");
	ends[1] = -1;
	for (int i = 0; i < 2; i++) {
		ENSURE(e[i].exs_evt_errno == 0, "event %d: %s", e[i].exs_evt_type, strerror(e[i].exs_evt_errno));
		if (e[i].exs_evt_type == EXS_EVT_ACCEPT)
			ends[1] = e[i].exs_evt_union.exs_evt_accept.exs_evt_newfd;
	}
	ENSURE(ends[1] >= 0 && peer.sin_family == AF_INET, "the event has no accepted socket, or no address");
	keep(close_fd, (void *)(intptr_t)ends[1], "accepted socket");
	for (int i = 0; i < 2; i++) {
		block[i] = calloc(4, MIB);
		keep(free_block, block[i], "block");
		handle[i] = exs_mregister(block[i], 4 * MIB, 0);
		ENSURE(handle[i] >= 0, "mregister: %s", strerror(errno));
	}
	return NULL;
}

static const char *finish(void)
{
	for (int i = 0; i < 2; i++)
		ENSURE(exs_mderegister(handle[i], 0) == 0, "mderegister: %s", strerror(errno));
	ENSURE(early_count == 0, "event %d with handle %ld, expected none", early[0].exs_evt_type,
	       (long)early[0].exs_evt_ahandle);
	return NULL;
}

static void fill(char *to, uint32_t seed, size_t len)
{
	for (size_t i = 0; i < len; i++)
		to[i] = (char)pattern_byte(seed, i);
}

static const char *compare(const char *is, uint32_t seed, size_t len)
{
	for (size_t i = 0; i < len; i++)
		ENSURE((uint8_t)is[i] == pattern_byte(seed, i), "byte %zu of %zu differs", i, len);
	return NULL;
}

#define SEND(len, flags, ah) exs_send(ends[0], block[0], len, flags, queue, ah, handle[0])
#define RECV(len, flags, ah) exs_recv(ends[1], block[1], len, flags, queue, ah, handle[1])
#define LENGTH(e) ((e).exs_evt_union.exs_evt_xfer.exs_evt_length)

static const char *read_counters(exs_counters_t *c)
{
	size_t len = sizeof *c;

	ENSURE(exs_qstatus(queue, EXS_QATTR_COUNTERS, c, &len) == 0 && len == sizeof *c, "exs_qstatus: %s", strerror(errno));
	return NULL;
}

/* Checks that since `before` the library has copied `copied` bytes and the device has transferred `direct` bytes. */
static const char *moved(const exs_counters_t *before, uint64_t copied, uint64_t direct)
{
	exs_counters_t now;

	TRY(read_counters(&now));
	ENSURE(now.exs_copied - before->exs_copied == copied && now.exs_direct - before->exs_direct == direct,
	       "%llu bytes copied and %llu moved, not %llu and %llu", (unsigned long long)(now.exs_copied - before->exs_copied),
	       (unsigned long long)(now.exs_direct - before->exs_direct), (unsigned long long)copied, (unsigned long long)direct);
	return NULL;
}

/*
 * Messages of many lengths, with the send or the receive first. Messages sent as immediate data are copied once at the
 * receiver, short ones also at the sender. Others are not copied.
 */
static const char *messages(size_t immediate)
{
	static const size_t lens[] = { 0, 1, 64, 1000, 4096, 65537, MIB, 4 * MIB };
	uint64_t copied = 0, direct = 0;
	exs_counters_t before;
	exs_event_t e;

	TRY(connected(SOCK_SEQPACKET, (int)immediate));
	TRY(read_counters(&before));
	for (size_t i = 0; i < COUNT(lens) * 2; i++) {
		size_t len = lens[i / 2];

		fill(block[0], (uint32_t)i, len);
		memset(block[1], 0, len);
		if (i & 1)
			ENSURE(RECV(4 * MIB, 0, 8) == 0, "recv: %s", strerror(errno));
		ENSURE(SEND(len, 0, 7) == 0, "send: %s", strerror(errno));
		if (!(i & 1))
			ENSURE(RECV(4 * MIB, 0, 8) == 0, "recv: %s", strerror(errno));
		TRY(event(&e, EXS_EVT_RECV, 8, 0));
		ENSURE(LENGTH(e) == len && e.exs_evt_fd == ends[1],
		       "%zu of %zu bytes are received, or the event names another socket", LENGTH(e), len);
		TRY(event(&e, EXS_EVT_SEND, 7, 0));
		ENSURE(LENGTH(e) == len, "sent %zu of %zu", LENGTH(e), len);
		TRY(compare(block[1], (uint32_t)i, len));
		if (len <= immediate)
			copied += len <= 256 ? 2 * len : len;
		else
			direct += len;
	}
	TRY(moved(&before, copied, direct));
	return finish();
}

/* Sends many more messages than there are credits, from unregistered memory. The events of each direction arrive in order. */
static const char *many(size_t immediate)
{
	int sent = 0, received = 0, at[2] = { 0, 0 };
	struct timeval wait = { 10, 0 };
	exs_event_t e;

	TRY(connected(SOCK_SEQPACKET, (int)immediate));
	fill(block[0], 3, 1000 * 100);
	while (at[0] < 1000 || at[1] < 1000) {
		while (sent < 1000 && sent - at[0] < 64) {
			ENSURE(exs_send(ends[0], block[0] + sent * 100, 100, 0, queue, sent, EXS_MHANDLE_UNREGISTERED) == 0,
			       "send %d: %s", sent, strerror(errno));
			sent++;
		}
		while (received < 1000 && received - at[1] < 32) {
			ENSURE(exs_recv(ends[1], block[1] + received * 100, 100, 0, queue, received,
					EXS_MHANDLE_UNREGISTERED) == 0, "recv %d: %s", received, strerror(errno));
			received++;
		}
		ENSURE(exs_qdequeue(queue, &e, 1, &wait) == 1 && !e.exs_evt_errno && LENGTH(e) == 100,
		       "the event is not that of a transfer of 100 bytes");
		int side = e.exs_evt_type == EXS_EVT_RECV;
		ENSURE(e.exs_evt_ahandle == at[side], "event %ld where %d is due", (long)e.exs_evt_ahandle, at[side]);
		at[side]++;
	}
	TRY(compare(block[1], 3, 1000 * 100));
	return finish();
}

static const char *truncated(size_t immediate)
{
	exs_event_t e;

	TRY(connected(SOCK_SEQPACKET, (int)immediate));
	fill(block[0], 5, 200);
	ENSURE(SEND(200, 0, 1) == 0 && RECV(150, 0, 2) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 2, 0));
	ENSURE(LENGTH(e) == 150 && e.exs_evt_union.exs_evt_xfer.exs_evt_flags & EXS_MSG_TRUNC,
	       "a message of 200 bytes is not reported as truncated to 150");
	TRY(event(&e, EXS_EVT_SEND, 1, 0));
	ENSURE(LENGTH(e) == 150 && block[1][150] == 0, "sent %zu", LENGTH(e));
	TRY(compare(block[1], 5, 150));
	return finish();
}

/* A stream keeps the rest of a message, and EXS_MSG_WAITALL waits for the full length. */
static const char *stream(size_t immediate)
{
	exs_event_t e;

	stream_buffer = 0;
	TRY(connected(SOCK_STREAM, (int)immediate));
	fill(block[0], 6, 200);
	ENSURE(SEND(200, 0, 1) == 0 && RECV(150, 0, 2) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 2, 0));
	ENSURE(LENGTH(e) == 150, "%zu", LENGTH(e));
	TRY(no_event());
	ENSURE(exs_recv(ends[1], block[1] + 150, 250, EXS_MSG_WAITALL, queue, 3, handle[1]) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_SEND, 1, 0));
	ENSURE(SEND(200, 0, 4) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 3, 0));
	ENSURE(LENGTH(e) == 250, "%zu", LENGTH(e));
	TRY(event(&e, EXS_EVT_SEND, 4, 0));
	TRY(compare(block[1], 6, 200));
	TRY(compare(block[1] + 200, 6, 200));
	return finish();
}

/*
 * A stream sends through the buffer if its receiver is behind (the send comes before the receive), and places data
 * directly if its receiver is ahead. The counters show which of the two has happened. Data in the buffer is delivered before data that is
 * placed directly later.
 */
static const char *stream_behind(size_t immediate)
{
	exs_counters_t before;
	exs_event_t e;
	size_t got = 0;

	stream_buffer = 10000;
	TRY(connected(SOCK_STREAM, (int)immediate));
	stream_buffer = 0;
	fill(block[0], 3, 30000);
	TRY(read_counters(&before));
	/* Nine sends fit into the buffer; the tenth and the eleventh do not. */
	for (int i = 0; i < 11; i++)
		ENSURE(exs_send(ends[0], block[0] + i * 1100, 1100, 0, queue, i, handle[0]) == 0, "send: %s", strerror(errno));
	for (int i = 0; i < 9; i++)
		TRY(event(&e, EXS_EVT_SEND, i, 0));
	TRY(no_event());
	/* 9900 of these bytes are copied out of the buffer. With immediate data, all are also copied when they arrive. */
	ENSURE(exs_recv(ends[1], block[1], 12100, EXS_MSG_WAITALL, queue, 20, handle[1]) == 0, "recv: %s", strerror(errno));
	for (int events = 0; events < 3; events++) {
		struct timeval wait = { 10, 0 };

		ENSURE(exs_qdequeue(queue, &e, 1, &wait) == 1 && !e.exs_evt_errno, "event %d", events);
		if (e.exs_evt_type == EXS_EVT_RECV)
			got = LENGTH(e);
	}
	ENSURE(got == 12100, "received %zu", got);
	TRY(compare(block[1], 3, 12100));
	if (immediate)
		TRY(moved(&before, 12100 + 9900, 0));
	else
		TRY(moved(&before, 9900, 12100));
	/* The receive is posted before the send. */
	TRY(read_counters(&before));
	ENSURE(RECV(5000, EXS_MSG_WAITALL, 21) == 0 && SEND(5000, 0, 22) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 21, 0));
	TRY(event(&e, EXS_EVT_SEND, 22, 0));
	TRY(moved(&before, 0, 5000));
	/* Longer than the buffer: the send waits for its receive, although the receiver is behind. */
	TRY(read_counters(&before));
	ENSURE(SEND(20000, 0, 23) == 0, "%s", strerror(errno));
	TRY(no_event());
	ENSURE(RECV(20000, EXS_MSG_WAITALL, 24) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 24, 0));
	TRY(event(&e, EXS_EVT_SEND, 23, 0));
	TRY(moved(&before, 0, 20000));
	/* Buffered bytes can still be read after the end of the data, also in parts. */
	ENSURE(SEND(1000, 0, 25) == 0 && exs_shutdown(ends[0], EXS_SHUT_WR, queue, 26) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_SEND, 25, 0));
	TRY(event(&e, EXS_EVT_SHUTDOWN, 26, 0));
	memset(block[1], 0, 2000);
	for (int i = 0; i < 4; i++) {
		ENSURE(exs_recv(ends[1], block[1] + i * 300, 300, 0, queue, 27, handle[1]) == 0, "%s", strerror(errno));
		TRY(event(&e, EXS_EVT_RECV, 27, 0));
		ENSURE(LENGTH(e) == (i < 3 ? 300 : 100), "part %d: %zu", i, LENGTH(e));
	}
	TRY(compare(block[1], 3, 1000));
	ENSURE(RECV(300, 0, 28) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 28, 0));
	ENSURE(LENGTH(e) == 0, "%zu bytes are received where the data ends", LENGTH(e));
	return finish();
}

/* A stream carries sends of many lengths, and the receives have other lengths. The buffer is nearly always in use. */
static const char *stream_of_parts(size_t immediate)
{
	size_t sent = 0, received = 0, total = 3 * MIB;
	unsigned int under_way = 0, at = 1;
	exs_event_t e;

	stream_buffer = 7001;
	TRY(connected(SOCK_STREAM, (int)immediate));
	stream_buffer = 0;
	fill(block[0], 8, total);
	for (bool receiving = false; received < total;) {
		struct timeval wait = { 10, 0 };
		size_t len;

		while (sent < total && under_way < 10) {
			at = at * 1103515245 + 12345;
			len = 1 + (at >> 16) % (at & 64 ? 20000 : 500);
			len = len < total - sent ? len : total - sent;
			ENSURE(exs_send(ends[0], block[0] + sent, len, 0, queue, 1, at & 128 ? handle[0] : EXS_MHANDLE_UNREGISTERED) == 0,
			       "send: %s", strerror(errno));
			sent += len;
			under_way++;
		}
		if (!receiving) {
			at = at * 1103515245 + 12345;
			len = 1 + (at >> 16) % 9000;
			len = len < total - received ? len : total - received;
			ENSURE(exs_recv(ends[1], block[1] + received, len, at & 256 ? EXS_MSG_WAITALL : 0, queue, 2,
					at & 512 ? handle[1] : EXS_MHANDLE_UNREGISTERED) == 0, "recv: %s", strerror(errno));
			receiving = true;
		}
		ENSURE(exs_qdequeue(queue, &e, 1, &wait) == 1 && !e.exs_evt_errno, "event: %s", strerror(e.exs_evt_errno));
		if (e.exs_evt_type == EXS_EVT_RECV) {
			received += LENGTH(e);
			receiving = false;
		} else {
			under_way--;
		}
	}
	for (; under_way > 0; under_way--)
		TRY(event(&e, EXS_EVT_SEND, 1, 0));
	TRY(compare(block[1], 8, total));
	return finish();
}

/*
 * Unregistered memory: short messages use the connection's registered buffers and are copied once at each end; long
 * ones are registered for the call and are not copied.
 */
static const char *unregistered(size_t arg)
{
	exs_counters_t before;
	exs_event_t e;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	for (size_t len = 1; len <= 4 * MIB; len *= 4) {
		uint64_t copies;
		exs_counters_t now;

		TRY(read_counters(&before));
		fill(block[0], (uint32_t)len, len);
		ENSURE(exs_send(ends[0], block[0], len, 0, queue, 1, EXS_MHANDLE_UNREGISTERED) == 0, "%s", strerror(errno));
		memset(block[1], 0, len);
		ENSURE(exs_recv(ends[1], block[1], len, 0, queue, 2, EXS_MHANDLE_UNREGISTERED) == 0, "%s", strerror(errno));
		TRY(event(&e, EXS_EVT_RECV, 2, 0));
		TRY(event(&e, EXS_EVT_SEND, 1, 0));
		TRY(compare(block[1], (uint32_t)len, len));
		TRY(read_counters(&now));
		copies = now.exs_copied - before.exs_copied;
		ENSURE(copies == 0 || copies == 2 * len, "%llu bytes copied for %zu", (unsigned long long)copies, len);
		ENSURE(len <= 64 * 1024 || copies == 0, "%zu bytes are copied", len);
		ENSURE(now.exs_direct - before.exs_direct == len, "%zu bytes are not moved", len);
	}
	return finish();
}

/* Persistent memory is read repeatedly, also in parts. With notify, the sender gets an event for each read. */
static const char *persistent_send(size_t notify)
{
	exs_counters_t before;
	exs_event_t e;

	TRY(connected(SOCK_SEQPACKET, 0));
	TRY(read_counters(&before));
	fill(block[0], 1, 5000);
	ENSURE(SEND(5000, notify ? EXS_PERSISTENT_NOTIFY : EXS_PERSISTENT, 1) == 0, "%s", strerror(errno));
	for (uint32_t i = 1; i < 20; i++) {
		fill(block[0], i, 5000);
		ENSURE(RECV(6000, 0, 2) == 0, "%s", strerror(errno));
		TRY(event(&e, EXS_EVT_RECV, 2, 0));
		ENSURE(LENGTH(e) == 5000, "%zu", LENGTH(e));
		TRY(compare(block[1], i, 5000));
		if (notify) {
			TRY(event(&e, EXS_EVT_SEND, 1, 0));
			ENSURE(e.exs_evt_union.exs_evt_xfer.exs_evt_flags & EXS_MSG_MORE && LENGTH(e) == 5000,
			       "the receive has another length, or the flag EXS_MSG_MORE is missing");
		}
	}
	TRY(moved(&before, 0, 19 * 5000));
	ENSURE(exs_recv_offset(ends[1], block[1], 100, 0, queue, 3, handle[1], 4950) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 3, EINVAL));
	ENSURE(exs_recv_offset(ends[1], block[1], 50, 0, queue, 4, handle[1], 4950) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 4, 0));
	ENSURE(!memcmp(block[1], block[0] + 4950, 50), "the end of the block has other bytes");
	if (notify)
		TRY(event(&e, EXS_EVT_SEND, 1, 0));
	TRY(no_event());
	ENSURE(RECV(10, EXS_PERSISTENT, 5) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 5, EBUSY));
	ENSURE(exs_mderegister(handle[0], 0) < 0 && errno == EBUSY, "memory in use is deregistered");
	ENSURE(exs_cancel(ends[0], EXS_CAF_AHANDLE, 1) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_SEND, 1, ECANCELED));
	return finish();
}

static const char *persistent_recv(size_t arg)
{
	exs_counters_t before;
	exs_event_t e;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	TRY(read_counters(&before));
	ENSURE(RECV(5000, EXS_PERSISTENT, 1) == 0, "%s", strerror(errno));
	fill(block[0], 9, 5000);
	/* A send with an offset waits until the peer's memory is known. */
	ENSURE(exs_send_offset(ends[0], block[0], 100, 0, queue, 2, handle[0], 4900) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_SEND, 2, 0));
	ENSURE(SEND(1000, 0, 3) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_SEND, 3, 0));
	TRY(moved(&before, 0, 1100));
	ENSURE(exs_send_offset(ends[0], block[0], 101, 0, queue, 4, handle[0], 4900) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_SEND, 4, EINVAL));
	ENSURE(exs_cancel(ends[1], EXS_CAF_FILDES, 0) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 1, ECANCELED));
	TRY(compare(block[1], 9, 1000));
	TRY(compare(block[1] + 4900, 9, 100));
	return finish();
}

/* A message consists of several pieces of memory, with different boundaries on each side. Then a part of a file is sent. */
static const char *vectors(size_t arg)
{
	exs_iovec_t out[3], in[2];
	exs_msghdr_t send = { .msg_iov = out, .msg_iovlen = 3 }, recv = { .msg_iov = in, .msg_iovlen = 2 };
	char name[] = "/tmp/exs-test-XXXXXX";
	exs_fdvec_t part = { .xv_kind = EXS_FDVEC, .xv_offset = 5000, .xv_iov.iov_len = 3000 };
	exs_xferfile_t file = { &part, 1 };
	exs_event_t e;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	fill(block[0], 4, 10000);
	for (int i = 0; i < 3; i++)
		out[i] = (exs_iovec_t){ block[0] + i * 1000, 1000, handle[0] };
	in[0] = (exs_iovec_t){ block[1], 1700, handle[1] };
	in[1] = (exs_iovec_t){ block[1] + 1700, 5000, EXS_MHANDLE_UNREGISTERED };
	ENSURE(exs_recvmsg(ends[1], &recv, 0, queue, 2) == 0, "%s", strerror(errno));
	ENSURE(exs_sendmsg(ends[0], &send, 0, queue, 1) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECVMSG, 2, 0));
	ENSURE(LENGTH(e) == 3000, "%zu", LENGTH(e));
	TRY(event(&e, EXS_EVT_SENDMSG, 1, 0));
	TRY(compare(block[1], 4, 3000));
	part.xv_fd = mkstemp(name);
	ENSURE(part.xv_fd >= 0 && unlink(name) == 0, "mkstemp: %s", strerror(errno));
	bool good = write(part.xv_fd, block[0], 10000) == 10000;
	good = good && exs_sendfile(ends[0], &file, 0, queue, 3) == 0 && RECV(MIB, 0, 4) == 0;
	part.xv_offset = 8000;
	int beyond = exs_sendfile(ends[0], &file, 0, queue, 5);
	int why = errno;
	close(part.xv_fd);
	ENSURE(good, "sendfile: %s", strerror(errno));
	ENSURE(beyond < 0 && why == EINVAL, "an offset beyond the end of the file is accepted");
	TRY(event(&e, EXS_EVT_RECV, 4, 0));
	TRY(event(&e, EXS_EVT_SENDFILE, 3, 0));
	ENSURE(!memcmp(block[1], block[0] + 5000, 3000), "the bytes of the file differ");
	return finish();
}

#define REFUSED(call, error) ENSURE((call) < 0 && errno == (error), #call ": %s", strerror(errno))

/* Empty parts, of registered or unregistered memory, change nothing if only the last part of a short send or receive has bytes. */
static const char *empty_parts(size_t arg)
{
	exs_iovec_t out[2], in[2];
	exs_msghdr_t send = { .msg_iov = out, .msg_iovlen = 2 }, recv = { .msg_iov = in, .msg_iovlen = 2 };
	exs_event_t e;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	fill(block[0], 4, 100);
	for (int registered = 0; registered < 2; registered++) {
		memset(block[1], 0, 200);
		out[0] = (exs_iovec_t){ block[0] + 500, 0, registered ? handle[0] : EXS_MHANDLE_UNREGISTERED };
		out[1] = (exs_iovec_t){ block[0], 5, EXS_MHANDLE_UNREGISTERED };
		in[0] = (exs_iovec_t){ block[1] + 500, 0, registered ? handle[1] : EXS_MHANDLE_UNREGISTERED };
		in[1] = (exs_iovec_t){ block[1], 100, EXS_MHANDLE_UNREGISTERED };
		ENSURE(exs_recvmsg(ends[1], &recv, 0, queue, 2) == 0, "%s", strerror(errno));
		ENSURE(exs_sendmsg(ends[0], &send, 0, queue, 1) == 0, "%s", strerror(errno));
		TRY(event(&e, EXS_EVT_RECVMSG, 2, 0));
		ENSURE(LENGTH(e) == 5, "%zu", LENGTH(e));
		TRY(event(&e, EXS_EVT_SENDMSG, 1, 0));
		TRY(compare(block[1], 4, 5));
	}
	ENSURE(exs_shutdown(ends[1], EXS_SHUT_WR, queue, 4) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_SHUTDOWN, 4, 0));
	/* The peer could not learn of a persistent receive after the end of the data. */
	REFUSED(RECV(100, EXS_PERSISTENT, 3), EPIPE);
	return finish();
}

/* A socket is closed with nothing left to send. The peer's receive reports the end of the data, although the socket has a receive that is
 * persistent or in progress. */
static const char *closes_with_a_receive(size_t persistent)
{
	struct timeval wait = { 10, 0 };
	exs_event_t e;

	TRY(connected(SOCK_SEQPACKET, 0));
	ENSURE(exs_recv(ends[0], block[0], 100, 0, queue, 1, handle[0]) == 0, "%s", strerror(errno));
	ENSURE(RECV(4 * MIB, persistent ? EXS_PERSISTENT : 0, 2) == 0, "%s", strerror(errno));
	if (persistent) {
		/* The memory is known to the peer when this send has completed. */
		ENSURE(exs_send_offset(ends[0], block[0], 100, 0, queue, 3, handle[0], 100) == 0, "%s", strerror(errno));
		TRY(event(&e, EXS_EVT_SEND, 3, 0));
	} else {
		ENSURE(SEND(4 * MIB, 0, 3) == 0, "%s", strerror(errno));
		usleep(200);
	}
	ENSURE(close_now((void *)(intptr_t)ends[1]) == 0, "%s", strerror(errno));
	/* Each call has one event, whether the transfer was complete or not. */
	for (int i = persistent ? 1 : 0; i < 3; i++) {
		ENSURE(exs_qdequeue(queue, &e, 1, &wait) == 1, "a call has no event");
		if (e.exs_evt_ahandle == 1)
			ENSURE(e.exs_evt_errno == 0 && LENGTH(e) == 0, "where the data ends: %s, %zu bytes",
			       strerror(e.exs_evt_errno), LENGTH(e));
	}
	TRY(no_event());
	return finish();
}

/* Cancelled calls, the end of a direction and the end of the connection each cause one event. */
static const char *endings(size_t arg)
{
	exs_pollfd_t polled = { .fd = ends[1], .events = EXS_POLLIN };
	exs_event_t e;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	ENSURE(RECV(100, 0, 1) == 0 && exs_cancel(ends[1], EXS_CAF_AHANDLE, 1) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 1, ECANCELED));
	ENSURE(SEND(100, 0, 2) == 0 && exs_cancel(ends[0], EXS_CAF_FILDES, 0) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_SEND, 2, ECANCELED));
	ENSURE(exs_cancel(ends[0], EXS_CAF_FILDES, 0) < 0 && errno == ENOENT,
	       "exs_cancel without a call to cancel does not fail with ENOENT");
	polled.fd = ends[1];
	ENSURE(exs_poll(&polled, 1, 0, queue, 3) == 0, "%s", strerror(errno));
	TRY(no_event());
	ENSURE(SEND(100, 0, 4) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_POLL, 3, 0));
	ENSURE(polled.revents == EXS_POLLIN, "polled %d", polled.revents);
	ENSURE(RECV(100, 0, 5) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 5, 0));
	TRY(event(&e, EXS_EVT_SEND, 4, 0));
	ENSURE(RECV(100, 0, 6) == 0 && exs_shutdown(ends[0], EXS_SHUT_WR, queue, 7) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 6, 0));
	ENSURE(LENGTH(e) == 0, "%zu bytes are received where the data ends", LENGTH(e));
	TRY(event(&e, EXS_EVT_SHUTDOWN, 7, 0));
	ENSURE(SEND(100, 0, 8) < 0 && errno == EPIPE, "a send after the shutdown does not fail with EPIPE");
	ENSURE(exs_recv(ends[0], block[0], 1, 0, queue, 9, handle[0]) == 0, "%s", strerror(errno));
	ENSURE(exs_send(ends[1], block[1], 100, 0, queue, 10, handle[1]) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 9, 0));
	TRY(event(&e, EXS_EVT_SEND, 10, 0));
	ENSURE(exs_recv(ends[0], block[0], 1, 0, queue, 11, handle[0]) == 0, "%s", strerror(errno));
	ENSURE(close_now((void *)(intptr_t)ends[1]) == 0, "%s", strerror(errno));
	/* The peer had no send outstanding, so this is the end of the data. Later calls fail. */
	TRY(event(&e, EXS_EVT_RECV, 11, 0));
	ENSURE(LENGTH(e) == 0, "%zu bytes are received where the data ends", LENGTH(e));
	ENSURE(exs_send(ends[1], block[1], 1, 0, queue, 1, handle[1]) < 0 && errno == EBADF,
	       "a call after the close does not fail with EBADF");
	return finish();
}

/* Cancelled calls are reported in the order of the calls, or at once if the program asks for it. */
static const char *cancelled_in_turn(size_t at_once)
{
	exs_event_t e;

	TRY(connected(SOCK_SEQPACKET, 0));
	for (int i = 0; i < 2; i++)
		ENSURE(!exs_fcntl(ends[i], SO_ASYNC_RECV_ORDERED, at_once ? 0 : 1), "fcntl: %s", strerror(errno));
	/* The send with an offset waits for a persistent receive. */
	ENSURE(RECV(100, 0, 1) == 0 && RECV(100, 0, 2) == 0 && SEND(100, 0, 3) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 1, 0));
	TRY(event(&e, EXS_EVT_SEND, 3, 0));
	ENSURE(RECV(100, 0, 4) == 0 && exs_send_offset(ends[0], block[0], 8, 0, queue, 5, handle[0], 8) == 0 && SEND(8, 0, 6) == 0, "%s",
	       strerror(errno));
	ENSURE(!exs_cancel(ends[1], EXS_CAF_AHANDLE, 4) && !exs_cancel(ends[0], EXS_CAF_AHANDLE, 6), "%s", strerror(errno));
	if (at_once) {
		TRY(event(&e, EXS_EVT_RECV, 4, ECANCELED));
		TRY(event(&e, EXS_EVT_SEND, 6, ECANCELED));
	}
	TRY(no_event());
	ENSURE(!exs_cancel(ends[1], EXS_CAF_AHANDLE, 2) && !exs_cancel(ends[0], EXS_CAF_AHANDLE, 5), "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 2, ECANCELED));
	TRY(event(&e, EXS_EVT_SEND, 5, ECANCELED));
	if (!at_once) {
		TRY(event(&e, EXS_EVT_RECV, 4, ECANCELED));
		TRY(event(&e, EXS_EVT_SEND, 6, ECANCELED));
	}
	return finish();
}

/* Calls that exceed their time limit end with an event, and do not consume data that arrives later. */
static const char *timeouts(size_t arg)
{
	exs_event_t e;
	uint64_t begun;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	ENSURE(!exs_fcntl(ends[1], SO_ASYNC_RECV_TIMEOUT, 60) && !exs_fcntl(ends[0], SO_ASYNC_SEND_TIMEOUT, 40), "fcntl: %s",
	       strerror(errno));
	begun = now_ms();
	ENSURE(RECV(100, 0, 1) == 0 && RECV(100, 0, 2) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECVTIMEOUT, 1, ETIMEDOUT));
	TRY(event(&e, EXS_EVT_RECVTIMEOUT, 2, ETIMEDOUT));
	ENSURE(now_ms() - begun >= 55 && now_ms() - begun < 5000, "after %llu ms", (unsigned long long)(now_ms() - begun));
	ENSURE(SEND(100, 0, 3) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_SENDTIMEOUT, 3, ETIMEDOUT));
	/* Persistent operations have no time limit, and operations that end in time are not affected. */
	ENSURE(SEND(100, 0, 4) == 0 && RECV(100, 0, 5) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 5, 0));
	TRY(event(&e, EXS_EVT_SEND, 4, 0));
	ENSURE(SEND(100, EXS_PERSISTENT, 6) == 0, "%s", strerror(errno));
	sleep_ms(80);
	TRY(no_event());
	ENSURE(!exs_cancel(ends[0], EXS_CAF_FILDES, 0), "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_SEND, 6, ECANCELED));
	/* EXS_TIMEOUT_ONCE: the limit applies to the next call only. */
	ENSURE(!exs_fcntl(ends[1], SO_ASYNC_RECV_TIMEOUT, 30 | EXS_TIMEOUT_ONCE), "fcntl: %s", strerror(errno));
	ENSURE(RECV(100, 0, 7) == 0 && RECV(100, 0, 8) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECVTIMEOUT, 7, ETIMEDOUT));
	sleep_ms(50);
	TRY(no_event());
	ENSURE(!exs_cancel(ends[1], EXS_CAF_FILDES, 0), "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 8, ECANCELED));
	return finish();
}

/* A connect to an address at which no listener answers, and an accept without a client, end with a time-out. */
static const char *connect_timeout(size_t arg)
{
	struct sockaddr_in addr, silent = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof silent;
	int fd, client, silent_fd = socket(AF_INET, SOCK_STREAM, 0);
	exs_event_t e;

	(void)arg;
	TRY(begin());
	/* This TCP listener completes connections but never answers. */
	ENSURE(silent_fd >= 0 && !bind(silent_fd, (struct sockaddr *)&silent, len) && !listen(silent_fd, 4) &&
		       !getsockname(silent_fd, (struct sockaddr *)&silent, &len), "socket: %s", strerror(errno));
	keep(close_socket, (void *)(intptr_t)silent_fd, "TCP listener");
	client = exs_socket(AF_INET, SOCK_SEQPACKET, 0);
	keep(close_fd, (void *)(intptr_t)client, "socket");
	ENSURE(!exs_fcntl(client, EXS_F_SETCONNECTTIMEOUT, 100), "fcntl: %s", strerror(errno));
	ENSURE(!exs_connect(client, (struct sockaddr *)&silent, len, 0, queue, 1), "%s", strerror(errno));
	uint64_t begun = now_ms();
	TRY(event(&e, EXS_EVT_CONNECT, 1, ETIMEDOUT));
	ENSURE(now_ms() - begun < 3000, "after %llu ms", (unsigned long long)(now_ms() - begun));
	TRY(listener(SOCK_SEQPACKET, 0, &fd, &addr));
	ENSURE(!exs_fcntl(fd, SO_ASYNC_RECV_TIMEOUT, 50), "fcntl: %s", strerror(errno));
	ENSURE(!exs_accept(fd, NULL, 0, queue, 2), "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_ACCEPT, 2, ETIMEDOUT));
	ENSURE(e.exs_evt_union.exs_evt_accept.exs_evt_newfd == -1, "the descriptor of an accept that failed is %d",
	       e.exs_evt_union.exs_evt_accept.exs_evt_newfd);
	TRY(no_event());
	return NULL;
}

/*
 * A close that reports an event: all data is delivered first. If the peer does not receive the data, the close ends
 * after its time limit.
 */
static const char *close_with_event(size_t answered)
{
	exs_event_t e;
	uint64_t begun;

	TRY(connected(SOCK_SEQPACKET, 0));
	ENSURE(!exs_fcntl(ends[0], EXS_F_SETLINGER, 100), "fcntl: %s", strerror(errno));
	fill(block[0], 7, 100000);
	ENSURE(exs_recv(ends[0], block[0], 1, 0, queue, 9, handle[0]) == 0, "%s", strerror(errno));
	ENSURE(SEND(100000, 0, 1) == 0 && SEND(1000, 0, 2) == 0, "%s", strerror(errno));
	forget((void *)(intptr_t)ends[0]);
	begun = now_ms();
	ENSURE(exs_close_async(ends[0], queue, 3) == 0, "close: %s", strerror(errno));
	ENSURE(SEND(1, 0, 4) < 0 && errno == EBADF, "a call after the close does not fail with EBADF");
	ENSURE(exs_close(ends[0]) < 0 && errno == EBADF, "a second close does not fail with EBADF");
	TRY(event(&e, EXS_EVT_RECV, 9, ECANCELED));
	if (answered) {
		ENSURE(RECV(100000, 0, 5) == 0, "%s", strerror(errno));
		TRY(event(&e, EXS_EVT_RECV, 5, 0));
		TRY(compare(block[1], 7, 100000));
		/* This event is taken before the next receive, because the events of two sockets are not ordered. */
		TRY(event(&e, EXS_EVT_SEND, 1, 0));
		ENSURE(RECV(1000, 0, 6) == 0, "%s", strerror(errno));
		TRY(event(&e, EXS_EVT_RECV, 6, 0));
		TRY(event(&e, EXS_EVT_SEND, 2, 0));
	} else {
		TRY(event(&e, EXS_EVT_SEND, 1, ECANCELED));
		TRY(event(&e, EXS_EVT_SEND, 2, ECANCELED));
		ENSURE(now_ms() - begun >= 90, "after %llu ms", (unsigned long long)(now_ms() - begun));
	}
	TRY(event(&e, EXS_EVT_CLOSE, 3, answered ? 0 : ETIMEDOUT));
	if (answered) {
		ENSURE(RECV(1000, 0, 7) == 0, "%s", strerror(errno));
		TRY(event(&e, EXS_EVT_RECV, 7, 0));
		ENSURE(LENGTH(e) == 0, "%zu bytes are received where the data ends", LENGTH(e));
	}
	TRY(no_event());
	return finish();
}

/* Data in the receiver's buffer can be read after the connection has ended, followed by the end of the data. */
static const char *read_after_the_end(size_t arg)
{
	int tries = 0;
	exs_event_t e;

	(void)arg;
	stream_buffer = 64 * 1024;
	TRY(connected(SOCK_STREAM, 0));
	stream_buffer = 0;
	fill(block[0], 7, 1000);
	ENSURE(SEND(1000, 0, 1) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_SEND, 1, 0));
	forget((void *)(intptr_t)ends[0]);
	ENSURE(exs_close_async(ends[0], queue, 2) == 0, "close: %s", strerror(errno));
	TRY(event(&e, EXS_EVT_CLOSE, 2, 0));
	while (exs_send(ends[1], block[1], 1, 0, queue, 3, handle[1]) == 0) {
		struct timeval wait = { 10, 0 };

		ENSURE(++tries < 1000, "the connection does not end");
		ENSURE(exs_qdequeue(queue, &e, 1, &wait) == 1 && e.exs_evt_ahandle == 3, "the send has no event");
		sleep_ms(5);
	}
	ENSURE(errno == ECONNRESET, "a send after the end: %s", strerror(errno));
	for (size_t at = 0; at < 1000; at += 500) {
		ENSURE(exs_recv(ends[1], block[1] + at, 500, 0, queue, 4, handle[1]) == 0, "recv: %s", strerror(errno));
		TRY(event(&e, EXS_EVT_RECV, 4, 0));
		ENSURE(LENGTH(e) == 500, "%zu bytes", LENGTH(e));
	}
	TRY(compare(block[1], 7, 1000));
	for (int times = 0; times < 2; times++) {
		ENSURE(RECV(500, EXS_MSG_WAITALL, 5) == 0, "recv: %s", strerror(errno));
		TRY(event(&e, EXS_EVT_RECV, 5, 0));
		ENSURE(LENGTH(e) == 0, "%zu bytes are received where the data ends", LENGTH(e));
	}
	ENSURE(RECV(500, EXS_PERSISTENT, 6) < 0 && errno == ECONNRESET,
	       "a persistent receive after the end does not fail with ECONNRESET");
	TRY(no_event());
	return finish();
}

/* Receives after the end of a stream return 0 bytes, also if the end has already been reported to a persistent receive. */
static const char *read_after_a_persistent_receive(size_t arg)
{
	exs_event_t e;

	(void)arg;
	TRY(connected(SOCK_STREAM, 0));
	ENSURE(RECV(100, EXS_PERSISTENT, 1) == 0 && exs_shutdown(ends[0], EXS_SHUT_WR, queue, 2) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_SHUTDOWN, 2, 0));
	ENSURE(close_now((void *)(intptr_t)ends[0]) == 0, "close");
	TRY(event(&e, EXS_EVT_RECV, 1, ECONNRESET));
	ENSURE(RECV(100, 0, 3) == 0, "recv: %s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 3, 0));
	ENSURE(LENGTH(e) == 0, "%zu bytes", LENGTH(e));
	return finish();
}

/* One call polls a listener, a readable socket and a writable socket. */
static const char *polls(size_t arg)
{
	exs_pollfd_t fds[3];
	exs_event_t e;
	struct sockaddr_in addr;
	struct timeval limit = { 10, 0 };
	int fd, client;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	TRY(listener(SOCK_SEQPACKET, 0, &fd, &addr));
	fds[0] = (exs_pollfd_t){ .fd = fd, .events = EXS_POLLIN, .revents = 99 };
	fds[1] = (exs_pollfd_t){ .fd = ends[1], .events = EXS_POLLIN, .revents = 99 };
	fds[2] = (exs_pollfd_t){ .fd = ends[0], .events = EXS_POLLIN | EXS_POLLOUT, .revents = 99 };
	ENSURE(!exs_poll(fds, 3, 0, queue, 1), "poll: %s", strerror(errno));
	TRY(event(&e, EXS_EVT_POLL, 1, 0));
	ENSURE(fds[0].revents == 0 && fds[1].revents == 0 && fds[2].revents == EXS_POLLOUT, "polled %d %d %d", fds[0].revents,
	       fds[1].revents, fds[2].revents);
	ENSURE(e.exs_evt_union.exs_evt_poll.exs_evt_fds == fds && e.exs_evt_union.exs_evt_poll.exs_evt_nfds == 3,
	       "the event of exs_poll has another array");
	fds[2].events = EXS_POLLIN;
	for (int i = 0; i < 3; i++)
		ENSURE(!exs_poll(fds, 3, 0, queue, 2 + i), "poll: %s", strerror(errno));
	TRY(no_event());
	ENSURE(!exs_cancel(ends[1], EXS_CAF_AHANDLE, 3), "cancel: %s", strerror(errno));
	TRY(event(&e, EXS_EVT_POLL, 3, ECANCELED));
	/* A client connects: each of the two remaining calls reports it once. */
	client = exs_socket(AF_INET, SOCK_SEQPACKET, 0);
	keep(close_fd, (void *)(intptr_t)client, "socket");
	ENSURE(!exs_connect(client, (struct sockaddr *)&addr, sizeof addr, 0, queue, 8), "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_POLL, 2, 0));
	TRY(event(&e, EXS_EVT_POLL, 4, 0));
	ENSURE(fds[0].revents == EXS_POLLIN && fds[1].revents == 0, "polled %d %d", fds[0].revents, fds[1].revents);
	ENSURE(!exs_accept(fd, NULL, 0, queue, 9), "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_ACCEPT, 9, 0));
	keep(close_fd, (void *)(intptr_t)e.exs_evt_union.exs_evt_accept.exs_evt_newfd, "socket");
	TRY(event(&e, EXS_EVT_CONNECT, 8, 0));
	/* With one invalid descriptor no poll is started. */
	fds[2].fd = -1;
	ENSURE(exs_poll(fds, 3, 0, queue, 5) < 0 && errno == EBADF, "%s", strerror(errno));
	fds[2].fd = ends[0];
	fds[2].events = 2;
	ENSURE(exs_poll(fds, 3, 0, queue, 5) < 0 && errno == EINVAL, "%s", strerror(errno));
	fds[2].events = EXS_POLLIN;
	/*
	 * Both ends of a connection are polled, and one is closed. The close cancels the poll, unless the other end has seen it
	 * first.
	 */
	ENSURE(!exs_poll(fds + 1, 2, 0, queue, 6), "%s", strerror(errno));
	ENSURE(close_now((void *)(intptr_t)ends[0]) == 0, "close");
	ENSURE(exs_qdequeue(queue, &e, 1, &limit) == 1 && e.exs_evt_type == EXS_EVT_POLL && e.exs_evt_ahandle == 6,
	       "exs_poll has no event");
	ENSURE(!e.exs_evt_errno || e.exs_evt_errno == ECANCELED, "errno %d", e.exs_evt_errno);
	ENSURE(!exs_poll(fds + 1, 1, 0, queue, 7), "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_POLL, 7, 0));
	ENSURE(fds[1].revents == EXS_POLLIN, "polled %d", fds[1].revents);
	TRY(no_event());
	return finish();
}

/* Polls start before the socket is ready: during a connect, and while a send waits that is cancelled later. */
static const char *polls_before_ready(size_t arg)
{
	exs_pollfd_t polled = { .events = EXS_POLLOUT };
	struct sockaddr_in addr;
	exs_event_t e;
	int fd, client, accepted;

	(void)arg;
	TRY(begin());
	TRY(listener(SOCK_SEQPACKET, 0, &fd, &addr));
	polled.fd = client = exs_socket(AF_INET, SOCK_SEQPACKET, 0);
	keep(close_fd, (void *)(intptr_t)client, "socket");
	ENSURE(!exs_connect(client, (struct sockaddr *)&addr, sizeof addr, 0, queue, 1), "%s", strerror(errno));
	ENSURE(!exs_poll(&polled, 1, 0, queue, 2) && !exs_accept(fd, NULL, 0, queue, 3), "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_ACCEPT, 3, 0));
	accepted = e.exs_evt_union.exs_evt_accept.exs_evt_newfd;
	keep(close_fd, (void *)(intptr_t)accepted, "socket");
	TRY(event(&e, EXS_EVT_CONNECT, 1, 0));
	TRY(event(&e, EXS_EVT_POLL, 2, 0));
	ENSURE(polled.revents == EXS_POLLOUT, "polled %d", polled.revents);
	/* The send with an offset waits for a persistent receive. */
	ENSURE(!exs_send_offset(client, "text", 4, 0, queue, 4, EXS_MHANDLE_UNREGISTERED, 8) && !exs_poll(&polled, 1, 0, queue, 5), "%s",
	       strerror(errno));
	TRY(no_event());
	ENSURE(!exs_cancel(client, EXS_CAF_AHANDLE, 4), "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_SEND, 4, ECANCELED));
	TRY(event(&e, EXS_EVT_POLL, 5, 0));
	return NULL;
}

/* Several parts of a file are sent with memory between them. The library reads the short part and maps the long one. */
static const char *file_in_parts(size_t arg)
{
	char name[] = "/tmp/exs-test-XXXXXX";
	exs_fdvec_t part[4] = {
		{ .xv_kind = EXS_IOVEC },
		{ .xv_kind = EXS_FDVEC, .xv_offset = 17, .xv_iov.iov_len = 100 },
		{ .xv_kind = EXS_IOVEC },
		{ .xv_kind = EXS_FDVEC, .xv_offset = 5001, .xv_iov.iov_len = 2 * MIB },
	};
	exs_xferfile_t file = { part, 4 };
	exs_event_t e;
	bool good;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	fill(block[0], 4, 3 * MIB);
	part[1].xv_fd = part[3].xv_fd = mkstemp(name);
	ENSURE(part[1].xv_fd >= 0 && unlink(name) == 0, "mkstemp: %s", strerror(errno));
	part[0].xv_iov = (exs_iovec_t){ (char *)"header", 6, EXS_MHANDLE_UNREGISTERED };
	part[2].xv_iov = (exs_iovec_t){ block[0], 1000, handle[0] };
	good = write(part[1].xv_fd, block[0], 3 * MIB) == 3 * MIB;
	good = good && exs_sendfile(ends[0], &file, 0, queue, 3) == 0 && RECV(4 * MIB, 0, 4) == 0;
	close(part[1].xv_fd);
	ENSURE(good, "sendfile: %s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 4, 0));
	ENSURE(LENGTH(e) == 1106 + 2 * MIB, "%zu", LENGTH(e));
	TRY(event(&e, EXS_EVT_SENDFILE, 3, 0));
	ENSURE(!memcmp(block[1], "header", 6) && !memcmp(block[1] + 6, block[0] + 17, 100) &&
		       !memcmp(block[1] + 106, block[0], 1000) && !memcmp(block[1] + 1106, block[0] + 5001, 2 * MIB), "the parts differ");
	part[3].xv_fd = -1;
	ENSURE(exs_sendfile(ends[0], &file, 0, queue, 3) < 0 && errno == EBADF, "%s", strerror(errno));
	return finish();
}

#define BEFORE_FILE 3000

/* A short part of a file is read during the call, also when all buffers of the library are in use, so the file may change afterwards. */
static const char *short_file_is_truncated(size_t arg)
{
	char name[] = "/tmp/exs-test-XXXXXX";
	exs_fdvec_t part = { .xv_kind = EXS_FDVEC, .xv_iov.iov_len = 100 };
	exs_xferfile_t file = { &part, 1 };
	exs_qhandle_t many;
	struct timeval wait = { 10, 0 };
	exs_event_t e;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 256));
	many = exs_qcreate(4096);
	fill(block[0], 4, 3 * MIB);
	part.xv_fd = mkstemp(name);
	ENSURE(part.xv_fd >= 0 && unlink(name) == 0, "mkstemp: %s", strerror(errno));
	keep(close_socket, (void *)(intptr_t)part.xv_fd, "file");
	ENSURE(write(part.xv_fd, block[0], 100) == 100, "write: %s", strerror(errno));
	for (int i = 0; i < BEFORE_FILE; i++)
		ENSURE(!exs_send(ends[0], block[0] + i, 1000, 0, many, 1, EXS_MHANDLE_UNREGISTERED), "send %d: %s", i, strerror(errno));
	ENSURE(!exs_sendfile(ends[0], &file, 0, many, 2), "sendfile: %s", strerror(errno));
	ENSURE(!ftruncate(part.xv_fd, 0), "ftruncate: %s", strerror(errno));
	for (int i = 0; i <= BEFORE_FILE; i++) {
		ENSURE(RECV(1000, 0, 3) == 0, "%s", strerror(errno));
		TRY(event(&e, EXS_EVT_RECV, 3, 0));
		ENSURE(exs_qdequeue(many, &e, 1, &wait) == 1 && !e.exs_evt_errno, "event %d", i);
	}
	ENSURE(e.exs_evt_ahandle == 2, "event %ld", (long)e.exs_evt_ahandle);
	ENSURE(!memcmp(block[0], block[1], 100), "the part differs");
	ENSURE(exs_qdelete(many) == 0, "%s", strerror(errno));
	return finish();
}

/* Calls that are refused at once. */
static const char *refusals(size_t arg)
{
	struct sockaddr_in addr = { .sin_family = AF_INET };
	exs_event_t e;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	REFUSED(exs_init(7), EINVAL);
	REFUSED(exs_qcreate(0), EINVAL);
	REFUSED(exs_qdelete(12345678), EBADF);
	REFUSED(exs_qdequeue(queue, NULL, 1, NULL), EFAULT);
	REFUSED(exs_qdequeue(queue, &e, 0, NULL), EINVAL);
	REFUSED(exs_send(0, block[0], 1, 0, queue, 0, handle[0]), ENOTSOCK);
	REFUSED(exs_send(-1, block[0], 1, 0, queue, 0, handle[0]), EBADF);
	REFUSED(exs_send(ends[0], block[0], 1, 0, 12345678, 0, handle[0]), EBADF);
	REFUSED(exs_send(ends[0], NULL, 1, 0, queue, 0, handle[0]), EFAULT);
	REFUSED(exs_send(ends[0], block[0], 1, 1 << 20, queue, 0, handle[0]), EINVAL);
	REFUSED(exs_send(ends[0], block[0], 1, 0, queue, 0, 12345678), EINVAL);
	REFUSED(exs_send(ends[0], block[0] + 4 * MIB - 1, 2, 0, queue, 0, handle[0]), EACCES);
	REFUSED(exs_send(ends[0], block[0], (size_t)1 << 40, 0, queue, 0, handle[0]), EMSGSIZE);
	REFUSED(exs_connect(ends[0], (struct sockaddr *)&addr, sizeof addr, 0, queue, 0), EISCONN);
	REFUSED(exs_connect(ends[0], (struct sockaddr *)&addr, 4, 0, queue, 0), EINVAL);
	REFUSED(exs_accept(ends[0], NULL, 0, queue, 0), EINVAL);
	REFUSED(exs_fcntl(ends[0], EXS_F_SETCREDITS, 5), EISCONN);
	REFUSED(exs_mregister(NULL, 1, 0), EFAULT);
	REFUSED(exs_socket(AF_UNIX, SOCK_STREAM, 0), EAFNOSUPPORT);
	int other = exs_socket(AF_INET6, SOCK_SEQPACKET, 0);
	ENSURE(other >= 0, "exs_socket: %s", strerror(errno));
	addr.sin_family = AF_INET;
	REFUSED(exs_bind(other, (struct sockaddr *)&addr, sizeof addr), EAFNOSUPPORT);
	REFUSED(exs_connect(other, (struct sockaddr *)&addr, sizeof addr, 0, queue, 0), EAFNOSUPPORT);
	ENSURE(exs_close(other) == 0, "%s", strerror(errno));
	/* A descriptor of the kernel is no socket of this library; a number that is not open is no descriptor. */
	int kernel = dup(2);
	ENSURE(kernel >= 0, "dup: %s", strerror(errno));
	REFUSED(exs_close(kernel), ENOTSOCK);
	REFUSED(exs_cancel(kernel, EXS_CAF_FILDES, 1), ENOTSOCK);
	ENSURE(close(kernel) == 0, "exs_close closed a descriptor of the kernel");
	REFUSED(exs_close(1 << 20), EBADF);
	REFUSED(exs_cancel(1 << 20, EXS_CAF_FILDES, 1), EBADF);
	/* Each call with invalid arguments fails without an event. */
	struct timeval bad_time = { -1, 0 };
	exs_pollfd_t polled = { .fd = ends[0], .events = EXS_POLLIN };
	exs_msghdr_t message = { .msg_iovlen = 1 };
	exs_fdvec_t part = { .xv_kind = 7 };
	exs_xferfile_t file = { &part, 1 };
	socklen_t length = sizeof addr;
	int value = 0;
	size_t size = sizeof value;
	int unconnected = exs_socket(AF_INET, SOCK_SEQPACKET, 0);

	ENSURE(unconnected >= 0, "exs_socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)unconnected, "socket");
	REFUSED(exs_qcreate(-5), EINVAL);
	REFUSED(exs_qcreate(1 << 30), EINVAL);
	REFUSED(exs_qdequeue(-1, &e, 1, NULL), EBADF);
	REFUSED(exs_qdequeue(queue, &e, EXS_EVTVEC_MAX + 1, NULL), EINVAL);
	REFUSED(exs_qdequeue(queue, &e, 1, &bad_time), EINVAL);
	REFUSED(exs_qmodify(-1, EXS_QATTR_DEPTH, &value, sizeof value), EBADF);
	REFUSED(exs_qmodify(queue, EXS_QATTR_DEPTH, NULL, sizeof value), EFAULT);
	REFUSED(exs_qmodify(queue, EXS_QATTR_DEPTH, &value, sizeof value), EINVAL);
	REFUSED(exs_qmodify(queue, EXS_QATTR_WAIT, &value, 1), EINVAL);
	REFUSED(exs_qmodify(queue, 77, &value, sizeof value), EINVAL);
	REFUSED(exs_qstatus(-1, EXS_QATTR_DEPTH, &value, &size), EBADF);
	REFUSED(exs_qstatus(queue, EXS_QATTR_DEPTH, NULL, &size), EFAULT);
	REFUSED(exs_qstatus(queue, EXS_QATTR_DEPTH, &value, NULL), EFAULT);
	REFUSED(exs_qstatus(queue, EXS_QATTR_COUNTERS, &value, &size), EINVAL);
	REFUSED(exs_mregister(block[0], 0, 0), EINVAL);
	REFUSED(exs_mregister(block[0], 10, 2), EINVAL);
	REFUSED(exs_mregister(block[0], SIZE_MAX, 0), EFAULT);
	REFUSED(exs_mderegister(-1, 0), EINVAL);
	REFUSED(exs_mderegister(handle[0], 1), EINVAL);
	REFUSED(exs_socket(AF_INET, SOCK_DGRAM, 0), EPROTOTYPE);
	REFUSED(exs_socket(AF_INET, SOCK_STREAM, 17), EPROTONOSUPPORT);
	REFUSED(exs_bind(-1, (struct sockaddr *)&addr, sizeof addr), EBADF);
	REFUSED(exs_bind(unconnected, NULL, sizeof addr), EFAULT);
	REFUSED(exs_bind(unconnected, (struct sockaddr *)&addr, 1), EINVAL);
	REFUSED(exs_bind(ends[0], (struct sockaddr *)&addr, sizeof addr), EINVAL);
	REFUSED(exs_listen(ends[0], 1), EINVAL);
	REFUSED(exs_listen(-1, 1), EBADF);
	REFUSED(exs_accept(-1, NULL, 0, queue, 0), EBADF);
	REFUSED(exs_accept(unconnected, NULL, 0, queue, 0), EINVAL);
	REFUSED(exs_accept(unconnected, NULL, 1, queue, 0), EINVAL);
	REFUSED(exs_connect(unconnected, NULL, sizeof addr, 0, queue, 0), EFAULT);
	REFUSED(exs_connect(-1, (struct sockaddr *)&addr, sizeof addr, 0, queue, 0), EBADF);
	REFUSED(exs_connect(unconnected, (struct sockaddr *)&addr, sizeof addr, 9, queue, 0), EINVAL);
	REFUSED(exs_connect(unconnected, (struct sockaddr *)&addr, sizeof addr, 0, -1, 0), EBADF);
	REFUSED(exs_send(unconnected, block[0], 1, 0, queue, 0, handle[0]), ENOTCONN);
	REFUSED(exs_recv(unconnected, block[0], 1, 0, queue, 0, handle[0]), ENOTCONN);
	REFUSED(exs_recv(ends[0], NULL, 1, 0, queue, 0, EXS_MHANDLE_UNREGISTERED), EFAULT);
	REFUSED(exs_recv(ends[0], block[0], 1, EXS_PERSISTENT_NOTIFY, queue, 0, handle[0]), EINVAL);
	REFUSED(exs_send(ends[0], block[0], 1, 2, queue, 0, handle[0]), EINVAL);
	REFUSED(exs_send(ends[0], block[0], 1, EXS_MSG_WAITALL, queue, 0, handle[0]), EINVAL);
	REFUSED(exs_send(ends[0], block[0], (size_t)-1, 0, queue, 0, handle[0]), EMSGSIZE);
	REFUSED(exs_send(ends[0], block[0] - 1, 2, 0, queue, 0, handle[0]), EACCES);
	REFUSED(exs_send(ends[0], block[0], 1, 0, queue, 0, EXS_MHANDLE_INVALID), EINVAL);
	REFUSED(exs_sendmsg(ends[0], NULL, 0, queue, 0), EFAULT);
	REFUSED(exs_recvmsg(ends[0], &message, 0, queue, 0), EFAULT);
	message.msg_iovlen = -1;
	REFUSED(exs_sendmsg(ends[0], &message, 0, queue, 0), EINVAL);
	message.msg_iovlen = 9;
	REFUSED(exs_sendmsg(ends[0], &message, 0, queue, 0), EMSGSIZE);
	REFUSED(exs_sendfile(ends[0], NULL, 0, queue, 0), EFAULT);
	REFUSED(exs_sendfile(ends[0], &file, 0, queue, 0), EINVAL);
	part = (exs_fdvec_t){ .xv_kind = EXS_FDVEC, .xv_fd = 0, .xv_offset = -1, .xv_iov.iov_len = 5 };
	REFUSED(exs_sendfile(ends[0], &file, 0, queue, 0), EINVAL);
	file.xf_veclen = 0;
	REFUSED(exs_sendfile(ends[0], &file, 0, queue, 0), EMSGSIZE);
	file.xf_vec = NULL;
	REFUSED(exs_sendfile(ends[0], &file, 0, queue, 0), EFAULT);
	REFUSED(exs_poll(NULL, 1, 0, queue, 0), EFAULT);
	REFUSED(exs_poll(&polled, 0, 0, queue, 0), EINVAL);
	REFUSED(exs_poll(&polled, -1, 0, queue, 0), EINVAL);
	REFUSED(exs_poll(&polled, 1, 0, -1, 0), EBADF);
	REFUSED(exs_cancel(-1, EXS_CAF_FILDES, 0), EBADF);
	REFUSED(exs_cancel(ends[0], 7, 0), EINVAL);
	REFUSED(exs_cancel(ends[0], EXS_CAF_AHANDLE, 12345), ENOENT);
	REFUSED(exs_shutdown(ends[0], 7, queue, 0), EINVAL);
	REFUSED(exs_shutdown(unconnected, EXS_SHUT_WR, queue, 0), ENOTCONN);
	REFUSED(exs_fcntl(ends[0], 4711, 0), EINVAL);
	REFUSED(exs_fcntl(-1, EXS_F_GETCREDITS), EBADF);
	REFUSED(exs_fcntl(unconnected, EXS_F_SETCREDITS, 0), EINVAL);
	REFUSED(exs_fcntl(unconnected, EXS_F_SETSMALLPACKET, -1), EINVAL);
	REFUSED(exs_fcntl(unconnected, SO_ASYNC_SEND_TIMEOUT, -1), EINVAL);
	REFUSED(exs_getsockname(ends[0], NULL, &length), EFAULT);
	REFUSED(exs_getsockname(-1, (struct sockaddr *)&addr, &length), EBADF);
	REFUSED(exs_getpeername(unconnected, (struct sockaddr *)&addr, &length), ENOTCONN);
	REFUSED(exs_close_async(-1, queue, 0), EBADF);
	REFUSED(exs_close_async(ends[0], -1, 0), EBADF);
	TRY(no_event());
	return finish();
}

/* A connection whose buffers would need more memory than the process may have fails, and the program continues. */
static const char *without_memory(size_t arg)
{
	struct rlimit was, low;
	struct sockaddr_in addr;
	unsigned long pages = 0;
	FILE *sizes;
	exs_event_t e;
	int fd, client;

	(void)arg;
	TRY(begin());
	TRY(listener(SOCK_SEQPACKET, 0, &fd, &addr));
	client = exs_socket(AF_INET, SOCK_SEQPACKET, 0);
	ENSURE(client >= 0, "exs_socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)client, "client");
	ENSURE(exs_fcntl(client, EXS_F_SETCREDITS, 1024) == 0 && exs_fcntl(client, EXS_F_SETSMALLPACKET, (int)MIB) == 0,
	       "exs_fcntl: %s", strerror(errno));
	sizes = fopen("/proc/self/statm", "r");
	ENSURE(sizes && fscanf(sizes, "%lu", &pages) == 1, "statm");
	fclose(sizes);
	getrlimit(RLIMIT_AS, &was);
	low = was;
	low.rlim_cur = pages * 4096 + ((rlim_t)512 << 20);
	setrlimit(RLIMIT_AS, &low);
	const char *why = exs_connect(client, (struct sockaddr *)&addr, sizeof addr, 0, queue, 1) ?
				  because("exs_connect: %s", strerror(errno)) :
				  event(&e, EXS_EVT_CONNECT, 1, ENOMEM);
	setrlimit(RLIMIT_AS, &was);
	return why;
}

/* A connect to a listener of the other socket type, and to a port without a listener, is refused. */
static const char *refused_connections(size_t arg)
{
	struct sockaddr_in addr;
	exs_event_t e;
	int fd, client;

	(void)arg;
	TRY(begin());
	TRY(listener(SOCK_STREAM, 0, &fd, &addr));
	client = exs_socket(AF_INET, SOCK_SEQPACKET, 0);
	keep(close_fd, (void *)(intptr_t)client, "socket");
	ENSURE(exs_connect(client, (struct sockaddr *)&addr, sizeof addr, 0, queue, 1) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_CONNECT, 1, EPROTOTYPE));
	ENSURE(close_now((void *)(intptr_t)fd) == 0, "close");
	client = exs_socket(AF_INET, SOCK_SEQPACKET, 0);
	keep(close_fd, (void *)(intptr_t)client, "socket");
	ENSURE(exs_connect(client, (struct sockaddr *)&addr, sizeof addr, 0, queue, 2) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_CONNECT, 2, ECONNREFUSED));
	return NULL;
}

/* Connections are established before the program accepts them. An accepted one has what the peer has sent until then; the others end with
 * the listener. */
static const char *accepted_later(size_t arg)
{
	struct sockaddr_in addr;
	exs_event_t e;
	int fd, client, accepted;
	char data[200] = "", got[200] = "";

	(void)arg;
	TRY(begin());
	stream_buffer = 4096;
	TRY(listener(SOCK_STREAM, 0, &fd, &addr));
	stream_buffer = 0;
	fill(data, 3, sizeof data);
	client = exs_socket(AF_INET, SOCK_STREAM, 0);
	keep(close_fd, (void *)(intptr_t)client, "socket");
	ENSURE(!exs_connect(client, (struct sockaddr *)&addr, sizeof addr, 0, queue, 1), "connect: %s", strerror(errno));
	TRY(event(&e, EXS_EVT_CONNECT, 1, 0));
	ENSURE(!exs_send(client, data, sizeof data, 0, queue, 2, EXS_MHANDLE_UNREGISTERED), "send: %s", strerror(errno));
	TRY(event(&e, EXS_EVT_SEND, 2, 0));
	ENSURE(close_now((void *)(intptr_t)client) == 0, "close");
	sleep_ms(20);
	ENSURE(!exs_accept(fd, NULL, 0, queue, 3), "accept: %s", strerror(errno));
	TRY(event(&e, EXS_EVT_ACCEPT, 3, 0));
	accepted = e.exs_evt_union.exs_evt_accept.exs_evt_newfd;
	keep(close_fd, (void *)(intptr_t)accepted, "socket");
	ENSURE(!exs_recv(accepted, got, sizeof got, 0, queue, 4, EXS_MHANDLE_UNREGISTERED), "recv: %s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 4, 0));
	ENSURE(LENGTH(e) == sizeof got && !memcmp(data, got, sizeof got), "%zu bytes", LENGTH(e));
	ENSURE(!exs_recv(accepted, got, sizeof got, 0, queue, 5, EXS_MHANDLE_UNREGISTERED), "recv: %s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 5, 0));
	ENSURE(LENGTH(e) == 0, "%zu bytes", LENGTH(e));
	client = exs_socket(AF_INET, SOCK_STREAM, 0);
	keep(close_fd, (void *)(intptr_t)client, "socket");
	ENSURE(!exs_connect(client, (struct sockaddr *)&addr, sizeof addr, 0, queue, 6), "connect: %s", strerror(errno));
	TRY(event(&e, EXS_EVT_CONNECT, 6, 0));
	ENSURE(!exs_recv(client, got, sizeof got, 0, queue, 7, EXS_MHANDLE_UNREGISTERED), "recv: %s", strerror(errno));
	TRY(no_event());
	ENSURE(close_now((void *)(intptr_t)fd) == 0, "close");
	TRY(event(&e, EXS_EVT_RECV, 7, ECONNRESET));
	return NULL;
}

/* Sockets of AF_INET6 use IPv4-mapped addresses. The addresses that the library returns have the family of the socket. */
static const char *mapped_addresses(size_t arg)
{
	struct sockaddr_in6 addr = { .sin6_family = AF_INET6 }, peer = { 0 };
	exs_acceptaddr_t want = { (struct sockaddr *)&peer, sizeof peer };
	socklen_t len = sizeof addr;
	exs_event_t e;
	int fd, client;

	(void)arg;
	TRY(begin());
	ENSURE(inet_pton(AF_INET6, "::ffff:127.0.0.1", &addr.sin6_addr) == 1, "inet_pton");
	fd = exs_socket(AF_INET6, SOCK_SEQPACKET, 0);
	keep(close_fd, (void *)(intptr_t)fd, "listener");
	ENSURE(!exs_bind(fd, (struct sockaddr *)&addr, len) && !exs_listen(fd, 4), "listen: %s", strerror(errno));
	ENSURE(!exs_getsockname(fd, (struct sockaddr *)&addr, &len) && len == sizeof addr && addr.sin6_family == AF_INET6 &&
		       IN6_IS_ADDR_V4MAPPED(&addr.sin6_addr), "family %d", addr.sin6_family);
	client = exs_socket(AF_INET6, SOCK_SEQPACKET, 0);
	keep(close_fd, (void *)(intptr_t)client, "socket");
	ENSURE(!exs_accept(fd, &want, 0, queue, 1) && !exs_connect(client, (struct sockaddr *)&addr, len, 0, queue, 2), "%s",
	       strerror(errno));
	TRY(event(&e, EXS_EVT_ACCEPT, 1, 0));
	keep(close_fd, (void *)(intptr_t)e.exs_evt_union.exs_evt_accept.exs_evt_newfd, "socket");
	TRY(event(&e, EXS_EVT_CONNECT, 2, 0));
	ENSURE(want.exs_addrlen == sizeof peer && peer.sin6_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&peer.sin6_addr), "family %d",
	       peer.sin6_family);
	return NULL;
}

/* Set by the signal that an event queue sends in the test `queues`. */
static volatile sig_atomic_t signalled;

static void on_signal(int number)
{
	(void)number;
	signalled = 1;
}

static unsigned int open_descriptors(void)
{
	DIR *all = opendir("/proc/self/fd");
	unsigned int n = 0;

	while (all && readdir(all))
		n++;
	if (all)
		closedir(all);
	return n;
}

/* The anonymous memory of this process in KiB. */
static long anonymous(void)
{
	FILE *f = fopen("/proc/self/status", "r");
	char line[128];
	long kib = 0;

	while (f && fgets(line, sizeof line, f))
		sscanf(line, "RssAnon: %ld", &kib);
	if (f)
		fclose(f);
	return kib;
}

/*
 * Whether a sanitizer or valgrind runs this program. Times are then meaningless, and freed memory is kept for some
 * time.
 */
static bool is_instrumented(void)
{
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
	return true;
#else
	const char *preloaded = getenv("LD_PRELOAD");

	return preloaded && strstr(preloaded, "vgpreload");
#endif
}

/* Peers give up while their connection is established. The accepts wait for other peers, and no resources leak. */
static const char *given_up(size_t arg)
{
	struct timeval soon = { 0, 20000 };
	long kib = 0;
	unsigned int before = 0, accepted = 0, pending = 0;
	struct sockaddr_in addr;
	exs_qhandle_t others;
	exs_event_t e;
	int fd;

	(void)arg;
	TRY(begin());
	TRY(listener(SOCK_SEQPACKET, 4096, &fd, &addr)); /* with buffers large enough to show a leak */
	others = exs_qcreate(512);
	ENSURE(others != EXS_QHANDLE_INVALID, "exs_qcreate: %s", strerror(errno));
	for (unsigned int i = 0; i < 400; i++) {
		/* A few peers stay long enough to be accepted on a slow machine too. */
		struct timespec pause = { 0, i % 60 == 59 ? 100000000 : (long)(i % 60 * 5000) };
		int client = exs_socket(AF_INET, SOCK_SEQPACKET, 0);

		if (i == 100) {
			before = open_descriptors();
			kib = anonymous();
		}
		ENSURE(client >= 0, "exs_socket: %s", strerror(errno));
		for (; pending < 1; pending++)
			ENSURE(exs_accept(fd, NULL, 0, queue, 1) == 0, "accept: %s", strerror(errno));
		ENSURE(exs_connect(client, (struct sockaddr *)&addr, sizeof addr, 0, others, 2) == 0, "connect: %s", strerror(errno));
		nanosleep(&pause, NULL);
		ENSURE(exs_close(client) == 0, "close: %s", strerror(errno));
		ENSURE(exs_qdequeue(others, &e, 1, &soon) == 1, "no event of the connect");
		if (exs_qdequeue(queue, &e, 1, &soon) < 1)
			continue;
		ENSURE(e.exs_evt_type == EXS_EVT_ACCEPT && !e.exs_evt_errno, "event %d: %s", e.exs_evt_type, strerror(e.exs_evt_errno));
		pending--;
		accepted++;
		ENSURE(exs_close(e.exs_evt_union.exs_evt_accept.exs_evt_newfd) == 0, "close: %s", strerror(errno));
	}
	for (unsigned int i = 0; i < 500 && open_descriptors() > before; i++)
		usleep(10000);
	ENSURE(open_descriptors() <= before, "%u descriptors, %u after 100 connections", open_descriptors(), before);
	printf("# %u accepted, %ld KiB more\n", accepted, anonymous() - kib);
	ENSURE(accepted > 0, "no connection was accepted");
	ENSURE(is_instrumented() || anonymous() < kib + 4096, "%ld KiB more than after 100 connections", anonymous() - kib);
	if (pending) {
		ENSURE(exs_cancel(fd, EXS_CAF_AHANDLE, 1) == 0 || errno == ENOENT, "cancel: %s", strerror(errno));
		ENSURE(exs_qdequeue(queue, &e, 1, &soon) == 1, "the last accept has no event");
	}
	return NULL;
}

static const char *queues(size_t arg)
{
	exs_signal_t on = { SIGUSR1, EXS_SIG_ENABLE }, off = { SIGUSR1, EXS_SIG_DISABLE };
	struct pollfd readable = { .events = POLLIN };
	size_t len = sizeof readable.fd;
	exs_event_t e;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	signal(SIGUSR1, on_signal);
	ENSURE(exs_qstatus(queue, EXS_QATTR_FD, &readable.fd, &len) == 0, "%s", strerror(errno));
	ENSURE(exs_qmodify(queue, EXS_QATTR_SIGNAL, &on, sizeof on) == 0, "%s", strerror(errno));
	for (int mode = EXS_WAIT_ADAPTIVE; mode <= EXS_WAIT_BUSY_POLL; mode++) {
		ENSURE(exs_qmodify(queue, EXS_QATTR_WAIT, &mode, sizeof mode) == 0, "%s", strerror(errno));
		ENSURE(poll(&readable, 1, 0) == 0, "the descriptor is readable without an event");
		signalled = 0;
		ENSURE(RECV(100, 0, 1) == 0 && SEND(100, 0, 2) == 0, "%s", strerror(errno));
		while (poll(&readable, 1, 5000) < 0 && errno == EINTR)
			;
		for (int i = 0; i < 1000 && !signalled; i++)
			sleep_ms(1);
		ENSURE(readable.revents == POLLIN && signalled, "mode %d: readable %d signalled %d", mode,
		       readable.revents, signalled);
		TRY(event(&e, EXS_EVT_RECV, 1, 0));
		TRY(event(&e, EXS_EVT_SEND, 2, 0));
	}
	ENSURE(exs_qmodify(queue, EXS_QATTR_SIGNAL, &off, sizeof off) == 0, "%s", strerror(errno));
	int mode = EXS_WAIT_ADAPTIVE;
	ENSURE(exs_qmodify(queue, EXS_QATTR_WAIT, &mode, sizeof mode) == 0, "%s", strerror(errno));
	exs_qhandle_t small = exs_qcreate(2);
	ENSURE(exs_recv(ends[1], block[1], 1, 0, small, 1, handle[1]) == 0, "%s", strerror(errno));
	ENSURE(exs_recv(ends[1], block[1], 1, 0, small, 2, handle[1]) == 0, "%s", strerror(errno));
	REFUSED(exs_recv(ends[1], block[1], 1, 0, small, 3, handle[1]), EAGAIN);
	REFUSED(exs_qdelete(small), EBUSY);
	ENSURE(close_now((void *)(intptr_t)ends[1]) == 0, "close");
	ENSURE(exs_qdequeue(small, &e, 1, NULL) == 1 && e.exs_evt_errno == ECANCELED,
	       "the first call is not reported as cancelled");
	ENSURE(exs_qdequeue(small, &e, 1, NULL) == 1 && e.exs_evt_errno == ECANCELED,
	       "the second call is not reported as cancelled");
	ENSURE(exs_qdelete(small) == 0, "%s", strerror(errno));
	return finish();
}

/*
 * A receive is cancelled while the peer may be writing to its memory. Either it completes with the send, or the send completes with
 * the next receive. The connection remains.
 */
static const char *cancel_while_written(size_t arg)
{
	enum { LONG = 4 * MIB };
	exs_event_t e;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	for (unsigned int i = 0; i < 60; i++) {
		int receive = -1, send = -1, left = 0;

		ENSURE(RECV(LONG, 0, 1) == 0, "%s", strerror(errno));
		/* From the second round on receives are advertised. In two of three rounds the pause gives the peer time to learn of this one. */
		usleep(i % 3 * 300);
		ENSURE(SEND(LONG, 0, 2) == 0, "%s", strerror(errno));
		usleep(i % 5 * 100);
		ENSURE(exs_cancel(ends[1], EXS_CAF_FILDES, 0) == 0 || errno == ENOENT, "%s", strerror(errno));
		TRY(next_event(queue, &e));
		left = (int)e.exs_evt_ahandle;
		*(left == 1 ? &receive : &send) = e.exs_evt_errno;
		if (left == 1 && receive == ECANCELED) {
			/* The send waits for another receive. */
			ENSURE(RECV(LONG, 0, 1) == 0, "%s", strerror(errno));
			TRY(next_event(queue, &e));
			left = (int)e.exs_evt_ahandle;
			*(left == 1 ? &receive : &send) = e.exs_evt_errno;
		}
		TRY(next_event(queue, &e));
		ENSURE((int)e.exs_evt_ahandle != left, "two events of call %d", left);
		*(e.exs_evt_ahandle == 1 ? &receive : &send) = e.exs_evt_errno;
		ENSURE(receive == 0 && send == 0, "receive: %s, send: %s", strerror(receive), strerror(send));
	}
	return finish();
}

/* With SO_ASYNC_RECV_ORDERED 0, the cancellation of a receive is reported before the earlier receives end, also if the peer knows of both. */
static const char *cancel_out_of_order(size_t arg)
{
	exs_event_t e;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	ENSURE(exs_fcntl(ends[1], SO_ASYNC_RECV_ORDERED, 0) == 0, "%s", strerror(errno));
	ENSURE(RECV(100, 0, 1) == 0 && RECV(100, 0, 2) == 0, "%s", strerror(errno));
	ENSURE(exs_cancel(ends[1], EXS_CAF_AHANDLE, 2) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 2, ECANCELED));
	ENSURE(SEND(10, 0, 3) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 1, 0));
	TRY(event(&e, EXS_EVT_SEND, 3, 0));
	return finish();
}

static exs_qhandle_t taken_from;
static volatile sig_atomic_t taken;

static void take_events(int number)
{
	struct timeval now = { 0, 0 };
	exs_event_t e[4];

	(void)number;
	taken += exs_qdequeue(taken_from, e, 4, &now);
}

/*
 * The signal of a queue is raised when the call that adds the event has released its locks, so a handler that does not interrupt
 * the library can dequeue the event.
 */
static const char *handler_takes_the_event(size_t arg)
{
	exs_signal_t on = { .exs_signo = SIGUSR1, .exs_mode = EXS_SIG_ENABLE };
	struct sigaction take = { .sa_handler = take_events }, was;
	int result;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	taken = 0;
	taken_from = exs_qcreate(4);
	ENSURE(taken_from != EXS_QHANDLE_INVALID && !exs_qmodify(taken_from, EXS_QATTR_SIGNAL, &on, sizeof on), "%s", strerror(errno));
	/* A receive with a time limit is not advertised, so it is cancelled without an answer of the peer. */
	ENSURE(exs_fcntl(ends[1], SO_ASYNC_RECV_TIMEOUT, 60000) == 0, "%s", strerror(errno));
	ENSURE(exs_recv(ends[1], block[1], 100, 0, taken_from, 1, handle[1]) == 0, "%s", strerror(errno));
	sigaction(SIGUSR1, &take, &was);
	result = exs_cancel(ends[1], EXS_CAF_FILDES, 0);
	sigaction(SIGUSR1, &was, NULL);
	ENSURE(result == 0 && taken == 1, "%d, %d events were taken", result, (int)taken);
	ENSURE(exs_qdelete(taken_from) == 0, "%s", strerror(errno));
	return finish();
}

static void *send_signal(void *thread)
{
	sleep_ms(50);
	pthread_kill(*(pthread_t *)thread, SIGUSR1);
	return NULL;
}

/* A signal handler ends the wait of a thread, however it waits. */
static const char *waits_are_interrupted(size_t mode)
{
	struct sigaction take = { .sa_handler = on_signal }, was;
	struct timeval wait = { 5, 0 };
	pthread_t this = pthread_self(), other;
	exs_event_t e;
	sigset_t before, after;
	int result, why, how = (int)mode;

	TRY(connected(SOCK_SEQPACKET, 0));
	ENSURE(RECV(1, 0, 1) == 0 && exs_qmodify(queue, EXS_QATTR_WAIT, &how, sizeof how) == 0, "%s", strerror(errno));
	sigprocmask(SIG_SETMASK, NULL, &before);
	signalled = 0;
	sigaction(SIGUSR1, &take, &was);
	ENSURE(pthread_create(&other, NULL, send_signal, &this) == 0, "pthread_create");
	result = exs_qdequeue(queue, &e, 1, &wait);
	why = errno;
	pthread_join(other, NULL);
	sigaction(SIGUSR1, &was, NULL);
	sigprocmask(SIG_SETMASK, NULL, &after);
	ENSURE(result < 0 && why == EINTR && signalled, "%d (%s), signalled %d", result, strerror(why), (int)signalled);
	for (int i = 1; i < 32; i++)
		ENSURE(sigismember(&before, i) == sigismember(&after, i), "signal %d is blocked", i);
	ENSURE(exs_cancel(ends[1], EXS_CAF_FILDES, 0) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 1, ECANCELED));
	return finish();
}

#define WAKES 101

/* When each event arrived at the thread's queue. */
struct sleeper {
	exs_qhandle_t q;
	uint64_t woken[WAKES];
	_Atomic bool failed;
};

static void *sleep_for_events(void *arg)
{
	struct sleeper *s = arg;

	for (int i = 0; i < WAKES; i++) {
		struct timeval wait = { 10, 0 };
		exs_event_t e;

		if (exs_recv(ends[1], block[1], 64, 0, s->q, i, handle[1]) || exs_qdequeue(s->q, &e, 1, &wait) != 1 ||
		    e.exs_evt_errno) {
			s->failed = true;
			break;
		}
		s->woken[i] = now_ns();
	}
	return NULL;
}

static int by_time(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

/* Measures the median time from a message to the return of a thread that sleeps for it. */
static const char *time_to_wake(uint64_t *median)
{
	static struct sleeper s;
	uint64_t sent[WAKES];
	pthread_t thread;
	exs_event_t e;

	s.q = exs_qcreate(8);
	s.failed = false;
	ENSURE(s.q >= 0 && pthread_create(&thread, NULL, sleep_for_events, &s) == 0, "%s", strerror(errno));
	for (int i = 0; i < WAKES && !s.failed; i++) {
		struct timespec pause = { 0, 300000 };

		nanosleep(&pause, NULL);
		sent[i] = now_ns();
		ENSURE(SEND(64, 0, 7) == 0, "send: %s", strerror(errno));
		TRY(event(&e, EXS_EVT_SEND, 7, 0));
	}
	ENSURE(pthread_join(thread, NULL) == 0 && !s.failed, "the thread has failed");
	for (int i = 0; i < WAKES; i++)
		sent[i] = s.woken[i] > sent[i] ? s.woken[i] - sent[i] : 0;
	qsort(sent, WAKES, sizeof sent[0], by_time);
	*median = sent[WAKES / 2];
	ENSURE(exs_qdelete(s.q) == 0, "qdelete: %s", strerror(errno));
	return NULL;
}

/*
 * A thread that has polled and now sleeps is woken by the message, not by a timer. If other programs use the processors, the
 * thread may wait for one, so there are up to three measurements.
 */
static const char *sleeper_is_woken(size_t arg)
{
	uint64_t median = 0;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 64));
	for (int tries = 0; tries < 3; tries++) {
		TRY(time_to_wake(&median));
		if (median < 400000)
			break;
	}
	ENSURE(is_instrumented() || median < 400000, "woken %llu us after the message", (unsigned long long)median / 1000);
	return finish();
}

/* Objects that a thread has used, and what its calls return after another thread has destroyed them. */
struct user {
	exs_qhandle_t q;
	_Atomic int step;
	int errnos[4];
	bool failed;
};

static void wait_for(struct user *u, int step)
{
	for (int i = 0; i < 10000 && u->step != step; i++)
		sleep_ms(1);
}

static void *use(void *arg)
{
	struct timeval now = { 0, 0 };
	struct user *u = arg;
	exs_event_t e;

	u->failed = SEND(10, 0, 7) || exs_qdequeue(u->q, &e, 1, &now) != 0;
	u->step = 1;
	wait_for(u, 2);
	u->errnos[0] = exs_send(ends[0], block[0], 10, 0, u->q, 7, handle[0]) ? errno : 0;
	u->errnos[1] = exs_qdequeue(u->q, &e, 1, &now) < 0 ? errno : 0;
	u->step = 3;
	wait_for(u, 4);
	u->errnos[2] = SEND(10, 0, 7) ? errno : 0;
	u->errnos[3] = exs_qdequeue(u->q, &e, 1, &now) < 0 ? errno : 0;
	return NULL;
}

/* Another thread destroys memory, a queue and a socket that a thread has just used. */
static const char *ended_by_another_thread(size_t arg)
{
	static struct user u;
	pthread_t thread;
	exs_event_t e;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	memset(&u, 0, sizeof u);
	u.q = exs_qcreate(8);
	ENSURE(u.q >= 0 && pthread_create(&thread, NULL, use, &u) == 0, "%s", strerror(errno));
	wait_for(&u, 1);
	REFUSED(exs_mderegister(handle[0], 0), EBUSY);
	ENSURE(RECV(10, 0, 8) == 0, "recv: %s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 8, 0));
	TRY(event(&e, EXS_EVT_SEND, 7, 0));
	ENSURE(exs_mderegister(handle[0], 0) == 0, "mderegister: %s", strerror(errno));
	u.step = 2;
	wait_for(&u, 3);
	ENSURE(exs_qdelete(u.q) == 0, "qdelete: %s", strerror(errno));
	ENSURE(close_now((void *)(intptr_t)ends[0]) == 0, "close: %s", strerror(errno));
	u.step = 4;
	ENSURE(pthread_join(thread, NULL) == 0 && !u.failed, "the thread has failed");
	ENSURE(u.errnos[0] == EINVAL, "a send of deregistered memory: %s", strerror(u.errnos[0]));
	ENSURE(u.errnos[1] == 0, "exs_qdequeue of a queue that still exists: %s", strerror(u.errnos[1]));
	ENSURE(u.errnos[2] == EBADF, "a send on a closed socket: %s", strerror(u.errnos[2]));
	ENSURE(u.errnos[3] == EBADF, "exs_qdequeue of a queue that was deleted: %s", strerror(u.errnos[3]));
	handle[0] = exs_mregister(block[0], 4 * MIB, 0);
	return finish();
}

/* A child of fork(2) cannot use the objects of its parent and gets EPERM. The parent is not affected. */
static const char *fork_is_refused(size_t arg)
{
	struct timeval now = { 0, 0 };
	exs_event_t e;
	int right = 0, pipes[2];
	pid_t child;

	(void)arg;
	TRY(connected(SOCK_SEQPACKET, 0));
	ENSURE(pipe(pipes) == 0, "pipe: %s", strerror(errno));
	child = fork();
	if (child == 0) {
#define TOLD(call) (right += (call) < 0 && errno == EPERM)
		TOLD(exs_init(EXS_VERSION));
		TOLD(exs_socket(AF_INET, SOCK_SEQPACKET, 0));
		TOLD(exs_qcreate(4));
		TOLD(exs_mregister(block[0], 1, 0));
		TOLD(SEND(1, 0, 1));
		TOLD(RECV(1, 0, 1));
		TOLD(exs_qdequeue(queue, &e, 1, &now));
		TOLD(exs_close(ends[0]));
		TOLD(exs_qdelete(queue));
		/* The child reports through a pipe, because memcheck changes its exit status. */
		_exit(write(pipes[1], &right, sizeof right) != sizeof right);
	}
	close(pipes[1]);
	ENSURE(child > 0 && waitpid(child, NULL, 0) == child, "fork: %s", strerror(errno));
	ENSURE(read(pipes[0], &right, sizeof right) == sizeof right && right == 9, "%d of 9 calls are refused with EPERM", right);
	close(pipes[0]);
	ENSURE(RECV(100, 0, 1) == 0 && SEND(100, 0, 2) == 0, "%s", strerror(errno));
	TRY(event(&e, EXS_EVT_RECV, 1, 0));
	TRY(event(&e, EXS_EVT_SEND, 2, 0));
	return finish();
}

static bool begins; /* `first_call` calls exs_init */

static void *first_call(void *arg)
{
	__atomic_store_n(&begins, true, __ATOMIC_RELEASE);
	exs_init(EXS_VERSION);
	return arg;
}

/*
 * A thread calls exs_init for the first time, another one forks, and the child calls exs_init too. The child must not wait for the first
 * thread, which does not exist in the child. This must run before this process calls exs_init.
 */
static const char *fork_during_the_first_call(size_t rounds)
{
#if defined __SANITIZE_THREAD__
	/* The thread sanitizer does not support that a child starts threads if its parent had several at the fork. */
	rounds = 0;
#endif
	for (size_t i = 0; i < rounds; i++) {
		int pipes[2];
		char byte = 0;
		pid_t parent;

		ENSURE(pipe(pipes) == 0, "pipe: %s", strerror(errno));
		parent = fork();
		if (parent == 0) {
			pthread_t thread;
			uint64_t end;
			pid_t child;

			if (pthread_create(&thread, NULL, first_call, NULL) || pthread_detach(thread))
				_exit(1);
			while (!__atomic_load_n(&begins, __ATOMIC_ACQUIRE))
				;
			for (end = now_ns() + i * 7919 % 4000 * 100; now_ns() < end;)
				;
			child = fork();
			if (child == 0) {
				alarm(10);
				_exit((exs_init(EXS_VERSION) && errno != EPERM) || write(pipes[1], "c", 1) != 1);
			}
			_exit(child < 0 || waitpid(child, NULL, 0) != child);
		}
		close(pipes[1]);
		ENSURE(parent > 0 && waitpid(parent, NULL, 0) == parent, "fork: %s", strerror(errno));
		ENSURE(read(pipes[0], &byte, 1) == 1, "exs_init in the child of round %zu fails or does not return", i);
		close(pipes[0]);
	}
	return NULL;
}

/*
 * After calls of exs_init that failed because descriptors were missing, the next one succeeds when there are enough. This must run
 * before all other calls of exs_init in this process, because only the first successful call needs descriptors.
 */
static const char *begun_with_few(size_t arg)
{
	struct rlimit was, low;
	int first = dup(0), more, result = -1, why = 0;

	(void)arg;
	ENSURE(first >= 0 && !close(first), "dup: %s", strerror(errno));
	getrlimit(RLIMIT_NOFILE, &was);
	low = was;
	for (more = 0; result && more < 64; more++) {
		low.rlim_cur = (rlim_t)(first + more);
		setrlimit(RLIMIT_NOFILE, &low);
		result = exs_init(EXS_VERSION);
		why = errno;
		if (result && why != EMFILE)
			break;
	}
	setrlimit(RLIMIT_NOFILE, &was);
	ENSURE(!result, "exs_init with %d descriptors: %s", more, strerror(why));
	ENSURE(more > 1, "exs_init needs no descriptor");
	return messages(0);
}

static const struct test tests[] = {
	{ "fork_during_the_first_call", fork_during_the_first_call, 150, 0, false },
	{ "begun_with_few", begun_with_few, 0, 0, false },
	{ "messages", messages, 0, 0, false },
	{ "messages_immediate", messages, 4096, 0, false },
	{ "many", many, 0, 0, false },
	{ "many_immediate", many, 100, 0, false },
	{ "truncated", truncated, 0, 0, false },
	{ "truncated_immediate", truncated, 256, 0, false },
	{ "stream", stream, 0, 0, false },
	{ "stream_immediate", stream, 256, 0, false },
	{ "stream_behind", stream_behind, 0, 0, false },
	{ "stream_behind_immediate", stream_behind, 4096, 0, false },
	{ "stream_of_parts", stream_of_parts, 0, 0, false },
	{ "stream_of_parts_immediate", stream_of_parts, 400, 0, false },
	{ "unregistered", unregistered, 0, 0, false },
	{ "persistent_send", persistent_send, 0, 0, false },
	{ "persistent_send_notify", persistent_send, 1, 0, false },
	{ "persistent_recv", persistent_recv, 0, 0, false },
	{ "vectors", vectors, 0, 0, false },
	{ "empty_parts", empty_parts, 0, 0, false },
	{ "closes_with_a_receive", closes_with_a_receive, 0, 0, false },
	{ "closes_with_a_persistent_receive", closes_with_a_receive, 1, 0, false },
	{ "endings", endings, 0, 0, false },
	{ "cancelled_in_turn", cancelled_in_turn, 0, 0, false },
	{ "cancelled_at_once", cancelled_in_turn, 1, 0, false },
	{ "timeouts", timeouts, 0, 0, false },
	{ "connect_timeout", connect_timeout, 0, 0, false },
	{ "close_with_event", close_with_event, 1, 0, false },
	{ "close_without_answer", close_with_event, 0, 0, false },
	{ "read_after_the_end", read_after_the_end, 0, 0, false },
	{ "read_after_a_persistent_receive", read_after_a_persistent_receive, 0, 0, false },
	{ "polls", polls, 0, 0, false },
	{ "polls_before_ready", polls_before_ready, 0, 0, false },
	{ "file_in_parts", file_in_parts, 0, 0, false },
	{ "short_file_is_truncated", short_file_is_truncated, 0, 0, false },
	{ "refusals", refusals, 0, 0, false },
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
	/* The sanitizers need more address space. */
	{ "without_memory", without_memory, 0, 0, false },
#endif
	{ "refused_connections", refused_connections, 0, 0, false },
	{ "accepted_later", accepted_later, 0, 0, false },
	{ "mapped_addresses", mapped_addresses, 0, 0, false },
	{ "given_up", given_up, 0, 0, false },
	{ "queues", queues, 0, 0, false },
	{ "cancel_while_written", cancel_while_written, 0, 60, false },
	{ "cancel_out_of_order", cancel_out_of_order, 0, 0, false },
	{ "handler_takes_the_event", handler_takes_the_event, 0, 0, false },
	{ "waits_are_interrupted", waits_are_interrupted, EXS_WAIT_ADAPTIVE, 0, false },
	{ "waits_are_interrupted_notify", waits_are_interrupted, EXS_WAIT_NOTIFY, 0, false },
	{ "waits_are_interrupted_busy_poll", waits_are_interrupted, EXS_WAIT_BUSY_POLL, 0, false },
	{ "sleeper_is_woken", sleeper_is_woken, 0, 0, false },
	{ "ended_by_another_thread", ended_by_another_thread, 0, 0, false },
	{ "fork_is_refused", fork_is_refused, 0, 0, false },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
