/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A sender in the style of existing programs for the Extended Sockets API (ES-API): <sys/exs.h>, handles printed with %d, a
 * ring of registered shared memory, EAGAIN when too many calls are outstanding, and half of the events dequeued at a time.
 */
#include "check.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/exs.h>
#include <pthread.h>
#include <sys/mman.h>

#define SIZE 32768
#define RING 64
#define DEPTH 32
#define MESSAGES 2000

static char *ring, *sink;

static int unmap(void *what)
{
	return munmap(what, (size_t)SIZE * RING);
}

static int close_fd(void *what)
{
	return exs_close((int)(intptr_t)what);
}

static const char *listening(int *fd, struct sockaddr_in *addr)
{
	socklen_t len = sizeof *addr;

	*fd = exs_socket(AF_INET, SOCK_STREAM, 0);
	ENSURE(*fd != -1, "exs_socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)*fd, "listener");
	*addr = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	ENSURE(exs_bind(*fd, (struct sockaddr *)addr, len) == 0, "exs_bind: %s", strerror(errno));
	ENSURE(exs_listen(*fd, 5) == 0, "exs_listen: %s", strerror(errno));
	ENSURE(exs_getsockname(*fd, (struct sockaddr *)addr, &len) == 0, "exs_getsockname: %s", strerror(errno));
	return NULL;
}

/* Receives into one slot after another and compares the data. It has its own queue. */
static void *receiver(void *arg)
{
	int fd = *(int *)arg;
	exs_qhandle_t q = exs_qcreate(4);
	exs_mhandle_t mh = exs_mregister(sink, (size_t)SIZE * RING, EXS_MRF_SHARED);

	if (q == EXS_QHANDLE_INVALID || mh == EXS_MHANDLE_INVALID)
		return "the receiver cannot start";
	for (int i = 0; i < MESSAGES; i++) {
		char *at = sink + (size_t)(i % RING) * SIZE;
		struct timeval wait = { 20, 0 };
		exs_event_t e;

		memset(at, 0, 8);
		if (exs_recv(fd, at, SIZE, EXS_MSG_WAITALL, q, (exs_ahandle_t)i, mh))
			return "exs_recv fails";
		if (exs_qdequeue(q, &e, 1, &wait) != 1 || e.exs_evt_errno ||
		    e.exs_evt_union.exs_evt_xfer.exs_evt_length != SIZE)
			return "a message does not arrive";
		if (at[0] != (char)(i % RING) || at[SIZE - 1] != (char)(i % RING + 1))
			return "a message differs from what was sent";
	}
	if (exs_mderegister(mh, 0) || exs_qdelete(q))
		return "the receiver cannot end";
	return NULL;
}

static const char *netperf(size_t arg)
{
	exs_event_t evtvec[DEPTH];
	exs_qhandle_t exs_qhandle;
	exs_mhandle_t exs_mhandle;
	int listener, fd, peer, exs_aio_pending = 0;
	struct sockaddr_in addr;
	pthread_t thread;
	void *failed = "the thread cannot be joined";

	(void)arg;
	ENSURE(exs_init(EXS_VERSION) != -1, "exs_init: %s", strerror(errno));
	exs_qhandle = exs_qcreate(DEPTH);
	ENSURE(exs_qhandle != EXS_QHANDLE_INVALID, "exs_qcreate: %s", strerror(errno));
	ring = mmap(NULL, (size_t)SIZE * RING, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	sink = mmap(NULL, (size_t)SIZE * RING, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ENSURE(ring != MAP_FAILED && sink != MAP_FAILED, "mmap: %s", strerror(errno));
	keep(unmap, ring, "ring");
	keep(unmap, sink, "sink");
	exs_mhandle = exs_mregister(ring, (size_t)SIZE * RING, EXS_MRF_SHARED);
	ENSURE(exs_mhandle != EXS_MHANDLE_INVALID, "exs_mregister: %s", strerror(errno));
	for (int i = 0; i < RING; i++) {
		ring[(size_t)i * SIZE] = (char)i;
		ring[(size_t)(i + 1) * SIZE - 1] = (char)(i + 1);
	}
	TRY(listening(&listener, &addr));
	fd = exs_socket(AF_INET, SOCK_STREAM, 0);
	ENSURE(fd != -1, "exs_socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)fd, "socket");
	ENSURE(exs_accept(listener, NULL, 0, exs_qhandle, -1) == 0, "exs_accept: %s", strerror(errno));
	ENSURE(exs_connect(fd, (struct sockaddr *)&addr, sizeof addr, 0, exs_qhandle, -1) == 0, "exs_connect: %s",
	       strerror(errno));
	ENSURE(exs_qdequeue(exs_qhandle, evtvec, -2, NULL) == 2, "exs_qdequeue does not return two events: %s", strerror(errno));
	peer = -1;
	for (int i = 0; i < 2; i++) {
		ENSURE(evtvec[i].exs_evt_errno == 0, "event %d: %s", evtvec[i].exs_evt_type, strerror(evtvec[i].exs_evt_errno));
		if (evtvec[i].exs_evt_type == EXS_EVT_ACCEPT)
			peer = evtvec[i].exs_evt_union.exs_evt_accept.exs_evt_newfd;
	}
	ENSURE(peer >= 0, "neither event is an accept");
	keep(close_fd, (void *)(intptr_t)peer, "peer");
	ENSURE(pthread_create(&thread, NULL, receiver, &peer) == 0, "pthread_create fails");

	for (int i = 0; i < MESSAGES;) {
		char *send_ring = ring + (size_t)(i % RING) * SIZE;
		int len = exs_send(fd, send_ring, SIZE, 0, exs_qhandle, (exs_ahandle_t)-1, exs_mhandle);

		if (len == 0) {
			exs_aio_pending++;
			i++;
		}
		if (len < 0 && errno != EAGAIN && errno != EINTR)
			return because("exs_send q %d m %d: %s", exs_qhandle, exs_mhandle, strerror(errno));
		if (len < 0 && exs_aio_pending > 1) {
			/* Waits for at least half of the outstanding calls. */
			int num = exs_qdequeue(exs_qhandle, evtvec, -(exs_aio_pending / 2), NULL);

			ENSURE(num >= exs_aio_pending / 2, "%d events, with %d calls outstanding", num, exs_aio_pending);
			for (int e = 0; e < num; e++)
				ENSURE(evtvec[e].exs_evt_type == EXS_EVT_SEND && evtvec[e].exs_evt_errno == 0, "event %d: %s",
				       evtvec[e].exs_evt_type, strerror(evtvec[e].exs_evt_errno));
			exs_aio_pending -= num;
		}
	}
	while (exs_aio_pending > 0) {
		int num = exs_qdequeue(exs_qhandle, evtvec, exs_aio_pending, NULL);

		ENSURE(num > 0, "exs_qdequeue: %s", strerror(errno));
		exs_aio_pending -= num;
	}
	ENSURE(pthread_join(thread, &failed) == 0 && !failed, "%s", (const char *)failed);
	ENSURE(exs_mderegister(exs_mhandle, 0) == 0 && exs_qdelete(exs_qhandle) == 0,
	       "deregistering the memory, or deleting the queue: %s", strerror(errno));
	return NULL;
}

static const struct test tests[] = {
	{ "netperf", netperf, 0, 0, false },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
