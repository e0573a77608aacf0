/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * exs-ttcp: measures throughput and latency of extended sockets, and of TCP for comparison.
 *
 * The client runs rows with a server. A row is one size in one mode. Both ends negotiate over a TCP connection, the control
 * connection, with lines of text. The data is sent over another connection, which the client establishes to a port that the
 * server announces.
 *
 *   client                                     server
 *   row MODE STREAM PING SIZE ...       ->
 *                                       <-     port N
 *   connects to port N                         accepts
 *                                       <-     ready          its receives are posted
 *   sends                                      receives
 *   sent                                ->
 *                                       <-     done CPU DEVICE COPIED LATENCIES
 *
 * The steps from "ready" on run twice, the first time to warm up. The time is measured from "ready" to "done". At the end the client
 * sends "end". In mode transaction it first waits until the server has sent "withdrawn".
 *
 * The first and last bytes of each message are made from its number and size, and the receiver compares them. With --verify all bytes are filled and
 * compared.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <exs.h>
#include <getopt.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_SIZE (16u << 20)
#define MAX_IN_FLIGHT 64u
#define MAX_COUNT 100000000u
#define MAX_PINGS 10000000u
/* The number of receives that a ping keeps posted, and the number of its send buffers. */
#define PING_BUFFERS 2
/* The number of bytes at each end of a message that are always filled and compared. */
#define STAMP sizeof(uint64_t)
#define LINE 256
/* The time limit for an event, or for a line of the other end. */
#define TIMEOUT_S 60
#define WARM_UP 16u
#define PORT "18516"

enum mode { NORMAL, IMMEDIATE, PERSISTENT_SEND, PERSISTENT_RECV, TCP, TRANSACTION, READ, MODES };
static const char *const mode_names[MODES] = {
	"normal", "immediate", "persistent-send", "persistent-recv", "tcp", "transaction", "read",
};
static const char *const wait_names[] = { "", "adaptive", "notify", "busy" };

/* The parameters of one row. */
struct row {
	unsigned int mode, stream, ping, size, in_flight, buffers, count, wait, nagle, verify;
};

/* Latencies in microseconds: one way, or of a whole read of persistent memory. */
struct latencies {
	double least, median, p99, most;
};

/* The most events that one call dequeues. */
#define EVENTS 16

/* One end of a row. */
struct end {
struct row row;
	int control;
	int data; /* a descriptor of libexs, or of the system in TCP mode */
	int back; /* of a transaction: the connection over which the client reads the server's memory */
	exs_qhandle_t queue;
	exs_mhandle_t memory, memory_in;
	/* The events that one call has dequeued, and how many of them are taken. */
	exs_event_t events[EVENTS];
	int events_got, taken;
	char *block, *block_in;
	size_t stride;
	/* The next message to send, and the next to receive. */
	uint64_t out, in;
	double *pings;
};

static double seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Returns the processor time of this process, including the library and a software device. */
static double cpu_seconds(void)
{
	struct rusage u;

	getrusage(RUSAGE_SELF, &u);
	return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

/* Returns the processor time of the threads of a software device in this process. */
static double device_seconds(void)
{
	DIR *tasks = opendir("/proc/self/task");
	struct dirent *task;
	double all = 0;

	while (tasks && (task = readdir(tasks))) {
		char path[300], name[32] = "";
		unsigned long long ns = 0;
		FILE *file;

		snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
		file = fopen(path, "r");
		if (!file)
			continue;
		if (!fgets(name, sizeof name, file))
			name[0] = 0;
		fclose(file);
		if (strcmp(name, "anywarp\n") != 0)
			continue;
		snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", task->d_name);
		file = fopen(path, "r");
		if (!file)
			continue;
		if (fscanf(file, "%llu", &ns) == 1)
			all += (double)ns * 1e-9;
		fclose(file);
	}
	if (tasks)
		closedir(tasks);
	return all;
}

__attribute__((format(printf, 1, 2))) static bool fail(const char *format, ...)
{
	va_list args;

	fputs("exs-ttcp: ", stderr);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	return false;
}

static bool fail_errno(const char *what)
{
	return fail("%s: %s", what, strerror(errno));
}

/* ---- the control connection ---- */

static bool write_all(int fd, const char *from, size_t len)
{
	while (len > 0) {
		ssize_t n = send(fd, from, len, MSG_NOSIGNAL);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return fail_errno("send");
		from += n;
		len -= (size_t)n;
	}
	return true;
}

static bool read_all(int fd, char *to, size_t len)
{
	while (len > 0) {
		ssize_t n = recv(fd, to, len, 0);

		if (n < 0 && errno == EINTR)
			continue;
		if (n == 0)
			return fail("the other end has closed the connection");
		if (n < 0)
			return fail_errno("recv");
		to += n;
		len -= (size_t)n;
	}
	return true;
}

__attribute__((format(printf, 2, 3))) static bool write_line(int control, const char *format, ...)
{
	char line[LINE];
	va_list args;
	int n;

	va_start(args, format);
	n = vsnprintf(line, sizeof line, format, args);
	va_end(args);
	return n > 0 && (size_t)n < sizeof line && write_all(control, line, (size_t)n);
}

/*
 * Reads a line without its newline. Returns 1, 0 if the connection has ended before the line, or -1 if reading failed. `patient`: there
 * is no time limit, because the other end may take long for its part of a row. If its host has failed, the connection ends.
 */
static int read_line(int control, char line[LINE], bool patient)
{
	for (size_t n = 0; n < LINE; n++) {
		ssize_t got;

		do
			got = recv(control, line + n, 1, 0);
		while (got < 0 && (errno == EINTR || (patient && n == 0 && errno == EAGAIN)));
		if (got == 0 && n == 0)
			return 0;
		if (got <= 0) {
			fail("control connection: %s", got == 0 ? "closed within a line" : strerror(errno));
			return -1;
		}
		if (line[n] == '\n') {
			line[n] = 0;
			return 1;
		}
	}
	fail("control connection: a line without an end");
	return -1;
}

static bool expect(int control, const char *word, bool patient)
{
	char line[LINE];

	if (read_line(control, line, patient) <= 0)
		return fail("the other end has left before it sent \"%s\"", word);
	if (strcmp(line, word) != 0)
		return fail("the other end sends \"%s\", expected \"%s\"", line, word);
	return true;
}

static void set_timeouts(int fd)
{
	struct timeval limit = { TIMEOUT_S, 0 };
	int one = 1, seconds = TIMEOUT_S / 4, probes = 3;

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	/* The connection ends after the time limit if the other host has failed. */
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

/* ---- the payload ---- */

static uint64_t word(uint64_t number, uint64_t at)
{
	uint64_t x = (number << 32) ^ at;

	x *= 0x9e3779b97f4a7c15u;
	return x ^ (x >> 31);
}

static size_t least(size_t a, size_t b)
{
	return a < b ? a : b;
}

/* Fills the whole message with --verify, otherwise its first and last bytes. */
static void fill(const struct row *row, char *to, uint64_t number)
{
	size_t size = row->size;
	uint64_t w;

	if (row->verify)
		for (size_t at = 0; at < size; at += sizeof w) {
			w = word(number, at);
			memcpy(to + at, &w, least(sizeof w, size - at));
		}
	w = word(number, size);
	memcpy(to, &w, least(STAMP, size));
	if (size > STAMP)
		memcpy(to + size - STAMP, &w, STAMP);
}

/* Clears a buffer, so that a message that does not arrive is detected. */
static void wipe(const struct row *row, char *at)
{
	size_t size = row->size;

	if (row->verify) {
		memset(at, 0, size);
	} else {
		memset(at, 0, least(STAMP, size));
		if (size > STAMP)
			memset(at + size - STAMP, 0, STAMP);
	}
}

static bool is_message(const struct row *row, const char *is, uint64_t number)
{
	size_t size = row->size, end = size > STAMP ? size - STAMP : 0;
	/* If the message is shorter than two stamps, the last one overwrites the end of the first. */
	size_t first = size > STAMP ? least(STAMP, end) : size;
	uint64_t w = word(number, size);

	if (memcmp(is, &w, first) != 0 || (size > STAMP && memcmp(is + end, &w, STAMP) != 0))
		return fail("message %llu of %zu bytes has not arrived as it was sent", (unsigned long long)number, size);
	if (row->verify)
		for (size_t at = STAMP; at < end; at += sizeof w) {
			w = word(number, at);
			if (memcmp(is + at, &w, least(sizeof w, end - at)) != 0)
				return fail("message %llu of %zu bytes differs at %zu", (unsigned long long)number, size, at);
		}
	return true;
}

/* Whether messages in flight share buffers. All messages have the same content then. */
static bool shares(const struct row *row)
{
	return row->buffers < row->in_flight;
}

/* Returns the number that determines the content of message `number`. */
static uint64_t content_of(const struct row *row, uint64_t number)
{
	return shares(row) || row->mode == PERSISTENT_SEND ? 1 : number;
}

/* Returns the offset of the buffer of the message in flight `slot`. */
static size_t offset_of(const struct end *e, size_t slot)
{
	return slot % (e->row.ping ? PING_BUFFERS : e->row.buffers) * e->stride;
}

/* ---- events ---- */

/* Takes the next event, and sets its type and the slot of its message. */
static bool take(struct end *e, int *type, size_t *slot)
{
	exs_event_t event;

	if (e->taken == e->events_got) {
		struct timeval limit = { TIMEOUT_S, 0 };
		int n;

		do
			n = exs_qdequeue(e->queue, e->events, EVENTS, &limit);
		while (n < 0 && errno == EINTR);
		if (n < 0)
			return fail_errno("exs_qdequeue");
		if (n == 0)
			return fail("no event within %d s", TIMEOUT_S);
		e->taken = 0;
		e->events_got = n;
	}
	event = e->events[e->taken++];
	if (event.exs_evt_errno)
		return fail("event %d: %s", event.exs_evt_type, strerror(event.exs_evt_errno));
	if (event.exs_evt_type == EXS_EVT_SEND || event.exs_evt_type == EXS_EVT_RECV)
		if (event.exs_evt_union.exs_evt_xfer.exs_evt_length != e->row.size)
			return fail("event for %zu bytes, expected %u", event.exs_evt_union.exs_evt_xfer.exs_evt_length, e->row.size);
	*type = event.exs_evt_type;
	*slot = (size_t)event.exs_evt_ahandle;
	return true;
}

/* Returns the number of bytes that the library has copied in this process. */
static unsigned long long copied(const struct end *e)
{
	exs_counters_t counters = { 0 };
	size_t len = sizeof counters;

	if (e->row.mode != TCP && exs_qstatus(e->queue, EXS_QATTR_COUNTERS, &counters, &len))
		fail_errno("exs_qstatus");
	return counters.exs_copied;
}

static bool post_recv(struct end *e, size_t slot)
{
	char *at = e->block_in + offset_of(e, slot);

	/* A shared buffer is cleared only before its first message, because later ones may arrive at any time. */
	if (!shares(&e->row) || (e->in == 1 && slot < e->row.buffers))
		wipe(&e->row, at);
	if (exs_recv(e->data, at, e->row.size, e->row.stream ? EXS_MSG_WAITALL : 0, e->queue, (exs_ahandle_t)slot, e->memory_in))
		return fail_errno("exs_recv");
	return true;
}

static bool post_send(struct end *e, size_t slot)
{
	char *at = e->block + offset_of(e, slot);
	uint64_t offset = e->row.mode == PERSISTENT_RECV && !e->row.ping ? offset_of(e, slot) : 0;

	/* A shared buffer is filled before its first message, and not changed while messages are sent from it. */
	if (!shares(&e->row) || e->out <= e->row.buffers)
		fill(&e->row, at, content_of(&e->row, e->out));
	e->out++;
	if (exs_send_offset(e->data, at, e->row.size, 0, e->queue, (exs_ahandle_t)slot, e->memory, offset))
		return fail_errno("exs_send");
	return true;
}

#define PERSISTENT_HANDLE 1000

/* Offers this end's memory to the peer: with `memory_to_write` for writing (a persistent receive), otherwise for reading. */
static bool offer(struct end *e, bool memory_to_write)
{
	size_t all = e->stride * e->row.in_flight;
	int failed;

	if (memory_to_write)
		failed = exs_recv(e->data, e->block_in, all, EXS_PERSISTENT, e->queue, PERSISTENT_HANDLE, e->memory_in);
	else
		failed = exs_send(e->data, e->block, e->row.size, EXS_PERSISTENT, e->queue, PERSISTENT_HANDLE, e->memory);
	return failed ? fail_errno("a persistent operation") : true;
}

/* Ends a persistent operation. When this returns, all data that the peer has written is in the memory. */
static bool withdraw(struct end *e, int fd)
{
	struct timeval limit = { TIMEOUT_S, 0 };
	exs_event_t event;

	if (exs_cancel(fd, EXS_CAF_AHANDLE, PERSISTENT_HANDLE))
		return fail_errno("exs_cancel");
	if (exs_qdequeue(e->queue, &event, 1, &limit) != 1)
		return fail("a persistent operation does not end");
	if (event.exs_evt_ahandle != PERSISTENT_HANDLE || event.exs_evt_errno != ECANCELED)
		return fail("event %d: %s, expected the end of a persistent operation", event.exs_evt_type,
			    strerror(event.exs_evt_errno));
	return true;
}

/* ---- throughput ---- */

static bool send_all(struct end *e, unsigned int count)
{
	unsigned int started = 0, done = 0;
	size_t slot;
	int type;

	for (; started < least(count, e->row.in_flight); started++)
		if (!post_send(e, started))
			return false;
	for (; done < count; done++) {
		if (!take(e, &type, &slot))
			return false;
		if (started < count) {
			started++;
			if (!post_send(e, slot))
				return false;
		}
	}
	return true;
}

/* Posts the receives of the first messages. */
static bool begin_receiving(struct end *e, unsigned int count)
{
	for (size_t slot = 0; slot < least(count, e->row.in_flight); slot++)
		if (!post_recv(e, slot))
			return false;
	return true;
}

static bool receive_all(struct end *e, unsigned int count)
{
	unsigned int started = (unsigned int)least(count, e->row.in_flight);
	size_t slot;
	int type;

	for (unsigned int done = 0; done < count; done++) {
		if (!take(e, &type, &slot))
			return false;
		if (!is_message(&e->row, e->block_in + offset_of(e, slot), content_of(&e->row, e->in)))
			return false;
		e->in++;
		if (started < count) {
			started++;
			if (!post_recv(e, slot))
				return false;
		}
	}
	return true;
}

/* ---- ping ---- */

#define LOOKS 2

/* Waits for the message `e->in`. Counts sends that complete meanwhile. */
static bool await_message(struct end *e, unsigned int *sent)
{
	const char *tail = e->block_in + (e->row.size > STAMP ? e->row.size - STAMP : 0);
	uint64_t w = word(e->in, e->row.size);
	double until = seconds() + TIMEOUT_S;
	size_t slot = 0;
	int type;

	if (e->row.mode != PERSISTENT_RECV) {
		do {
			if (!take(e, &type, &slot))
				return false;
			*sent += type == EXS_EVT_SEND;
		} while (type != EXS_EVT_RECV);
		return is_message(&e->row, e->block_in + offset_of(e, slot), e->in++);
	}
	/*
	 * A write into persistent memory causes no event at the receiver, so the memory is polled, as with RDMA Write. A software device
	 * places the data while the queue is polled, so the memory is compared only LOOKS times between two polls of the queue.
	 */
	for (;;) {
		for (int look = 0; look < LOOKS; look++) {
			__asm__ volatile("" ::: "memory");
			if (memcmp(tail, &w, least(STAMP, e->row.size)) == 0)
				return is_message(&e->row, e->block_in, e->in++);
		}
		struct timeval now = { 0, 0 };
		exs_event_t event;
		int n = exs_qdequeue(e->queue, &event, 1, &now);

		if (n < 0)
			return fail_errno("exs_qdequeue");
		if (n == 1 && event.exs_evt_errno)
			return fail("event %d: %s", event.exs_evt_type, strerror(event.exs_evt_errno));
		*sent += n == 1;
		if (n == 0 && seconds() > until)
			return fail("no message within %d s", TIMEOUT_S);
	}
}

/* Reads the peer's persistent memory `count` times. The latency is the whole time of a read. */
static bool fetch(struct end *e, unsigned int count)
{
	size_t slot;
	int type;

	for (unsigned int i = 0; i < count; i++) {
		double begun = seconds();

		if (!post_recv(e, 0) || !take(e, &type, &slot))
			return false;
		if (e->pings)
			e->pings[i] = (seconds() - begun) * 1e6;
		if (!is_message(&e->row, e->block_in, 1))
			return false;
	}
	return true;
}

static bool begin_ping(struct end *e, unsigned int count)
{
	for (size_t slot = 0; slot < least(count, PING_BUFFERS); slot++)
		if (!post_recv(e, slot))
			return false;
	return true;
}

/*
 * Sends a message and waits for one, `count` times. The client starts. The latency of a ping is half of the round-trip time,
 * which includes the calls that prepare the next ping.
 */
static bool ping(struct end *e, unsigned int count, bool client)
{
	unsigned int sent = 0;
	double begun = client ? seconds() : 0;
	size_t slot;
	int type;

	for (unsigned int i = 0; i < count; i++) {
		if (client && !post_send(e, i % PING_BUFFERS))
			return false;
		if (!await_message(e, &sent))
			return false;
		if (!client && !post_send(e, i % PING_BUFFERS))
			return false;
		/* The receive of the next message is posted already. This one is for the message after it. */
		if (i + PING_BUFFERS < count && e->row.mode != PERSISTENT_RECV && !post_recv(e, i % PING_BUFFERS))
			return false;
		/* Wait until the next send buffer is free. */
		for (; sent + 1 < i + 1; sent++)
			if (!take(e, &type, &slot))
				return false;
		if (client && e->pings) {
			double now = seconds();

			e->pings[i] = (now - begun) * 0.5e6;
			begun = now;
		}
	}
	for (; sent < count; sent++)
		if (!take(e, &type, &slot))
			return false;
	return true;
}

/* ---- transactions ---- */

/*
 * Each end offers its memory with a persistent send with notification, on a separate connection, and reads the memory of the other
 * end. When the client is notified that its request was read, the answer to that request is complete, and the client may write
 * the next request. When the server is notified that its answer was read, the next request is complete, and the server may write
 * the next answer.
 */
static bool transact(struct end *e, unsigned int count, bool client)
{
	int fd = client ? e->back : e->data;
	size_t slot;
	int type;

	for (unsigned int i = 0; i < count; i++) {
		bool was_read = false, received = false;

		if (client) {
			if (!take(e, &type, &slot))
				return false;
			if (slot != PERSISTENT_HANDLE)
				return fail("event %d before the request was read", type);
			was_read = true;
		}
		fill(&e->row, e->block, e->out++);
		wipe(&e->row, e->block_in);
		if (exs_recv(fd, e->block_in, e->row.size, e->row.stream ? EXS_MSG_WAITALL : 0, e->queue, 0, e->memory_in))
			return fail_errno("exs_recv");
		while (!received || !was_read) {
			if (!take(e, &type, &slot))
				return false;
			if (slot == PERSISTENT_HANDLE)
				was_read = true;
			else
				received = true;
		}
		if (!is_message(&e->row, e->block_in, e->in++))
			return false;
	}
	return true;
}

/* Starts the persistent send of this end: the client's on the first connection, the server's on the second. */
static bool offer_with_notify(struct end *e, bool client)
{
	e->in = e->out = 1;
	fill(&e->row, e->block, e->out);
	if (client)
		e->out++; /* the first request is complete; the server writes its answer before each read */
	if (exs_send(client ? e->data : e->back, e->block, e->row.size, EXS_PERSISTENT_NOTIFY, e->queue, PERSISTENT_HANDLE,
		     e->memory))
		return fail_errno("a persistent send");
	return true;
}

/* ---- TCP ---- */

static bool tcp_phase(struct end *e, unsigned int count, bool client)
{
	for (unsigned int i = 0; i < count; i++) {
		double begun = seconds();

		if (client) {
			fill(&e->row, e->block, e->out++);
			if (!write_all(e->data, e->block, e->row.size))
				return false;
		}
		if (!client || e->row.ping) {
			if (!read_all(e->data, e->block_in, e->row.size) || !is_message(&e->row, e->block_in, e->in++))
				return false;
		}
		if (!client && e->row.ping) {
			fill(&e->row, e->block, e->out++);
			if (!write_all(e->data, e->block, e->row.size))
				return false;
		}
		if (client && e->pings)
			e->pings[i] = (seconds() - begun) * 0.5e6;
	}
	return true;
}

/* ---- a row ---- */

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static struct latencies summary(double *pings, unsigned int count)
{
	qsort(pings, count, sizeof *pings, by_value);
	return (struct latencies){ pings[0], pings[count / 2], pings[(size_t)count * 99 / 100], pings[count - 1] };
}

/*
 * Returns whether the memory contains the last message of each buffer. Sends end in order, so the next message in a slot has a number
 * that is larger by `in_flight`. Messages that share a buffer have the same content.
 */
static bool has_last_messages(const struct end *e, unsigned int count)
{
	unsigned int buffers = (unsigned int)least(count, e->row.buffers);

	for (unsigned int number = count - buffers + 1; number <= count; number++) {
		const char *at = e->block_in + offset_of(e, (number - 1) % e->row.in_flight);

		if (!is_message(&e->row, at, content_of(&e->row, number)))
			return false;
	}
	return true;
}

static bool server_phase(struct end *e, unsigned int count)
{
	struct latencies l = { 0 };
	unsigned long long copies;
	double cpu, device;
	bool good;

	if (e->row.mode != TRANSACTION)
		e->in = e->out = 1;
	if (e->row.mode == PERSISTENT_RECV)
		good = offer(e, true);
	else if (e->row.mode == TRANSACTION)
		good = true;
	else
		good = e->row.mode == TCP || (e->row.ping && e->row.mode == PERSISTENT_SEND) ||
		       (e->row.ping ? begin_ping(e, count) : begin_receiving(e, count));
	if (!good || !write_line(e->control, "ready\n"))
		return false;
	cpu = cpu_seconds();
	device = device_seconds();
	copies = copied(e);
	if (e->row.mode == TCP)
		good = tcp_phase(e, count, false);
	else if (e->row.mode == TRANSACTION)
		good = transact(e, count, false);
	else if (e->row.ping)
		good = e->row.mode == PERSISTENT_SEND ? fetch(e, count) : ping(e, count, false);
	else if (e->row.mode == PERSISTENT_RECV)
		good = true;
	else
		good = receive_all(e, count);
	if (!good || !expect(e->control, "sent", true))
		return false;
	if (e->row.mode == PERSISTENT_RECV) {
		if (!withdraw(e, e->data))
			return false;
		if (!e->row.ping && !has_last_messages(e, count))
			return false;
	}
	cpu = cpu_seconds() - cpu;
	device = device_seconds() - device;
	copies = copied(e) - copies;
	if (e->pings && e->row.mode == PERSISTENT_SEND)
		l = summary(e->pings, count);
	return write_line(e->control, "done %.6f %.6f %llu %.3f %.3f %.3f %.3f\n", cpu, device, copies, l.least, l.median, l.p99,
			  l.most);
}

struct measured {
	double seconds, cpu_client, cpu_server, device_client, device_server;
	unsigned long long copied_client, copied_server;
	struct latencies latencies;
};

static bool client_phase(struct end *e, unsigned int count, struct measured *m)
{
	char line[LINE];
	bool good = true;

	if (e->row.mode != TRANSACTION)
		e->in = e->out = 1;
	if (e->row.ping && e->row.mode == PERSISTENT_RECV)
		good = offer(e, true);
	else if (e->row.ping && e->row.mode != TCP && e->row.mode != PERSISTENT_SEND)
		good = begin_ping(e, count);
	if (!good || !expect(e->control, "ready", false))
		return false;
	m->cpu_client = cpu_seconds();
	m->device_client = device_seconds();
	m->copied_client = copied(e);
	m->seconds = seconds();
	if (e->row.mode == TCP)
		good = tcp_phase(e, count, true);
	else if (e->row.mode == TRANSACTION)
		good = transact(e, count, true);
	else if (e->row.mode == PERSISTENT_SEND)
		good = true; /* the server reads, and this end waits for "done" */
	else if (e->row.ping)
		good = ping(e, count, true);
	else
		good = send_all(e, count);
	if (!good || !write_line(e->control, "sent\n") || read_line(e->control, line, true) <= 0)
		return false;
	m->seconds = seconds() - m->seconds;
	m->cpu_client = cpu_seconds() - m->cpu_client;
	m->device_client = device_seconds() - m->device_client;
	m->copied_client = copied(e) - m->copied_client;
	if (sscanf(line, "done %lf %lf %llu %lf %lf %lf %lf", &m->cpu_server, &m->device_server, &m->copied_server,
		   &m->latencies.least, &m->latencies.median, &m->latencies.p99, &m->latencies.most) != 7)
		return fail("the other end sends \"%s\", expected \"done\"", line);
	if (e->row.ping && e->row.mode == PERSISTENT_RECV && !withdraw(e, e->data))
		return false;
	if (e->pings && e->row.mode != PERSISTENT_SEND)
		m->latencies = summary(e->pings, count);
	return true;
}

static bool is_row(const struct row *r)
{
	return r->mode < MODES && r->stream <= 1 && r->ping <= 1 && r->size >= 1 && r->size <= MAX_SIZE && r->in_flight >= 1 &&
	       r->in_flight <= MAX_IN_FLIGHT && r->buffers >= 1 && r->buffers <= r->in_flight &&
	       (r->buffers == r->in_flight || (!r->ping && r->mode != TRANSACTION)) && r->count >= 1 && r->count <= (r->ping ? MAX_PINGS : MAX_COUNT) &&
	       r->wait >= EXS_WAIT_ADAPTIVE && r->wait <= EXS_WAIT_BUSY_POLL && r->nagle <= 1 && r->verify <= 1 &&
	       (r->mode != IMMEDIATE || r->size <= 1u << 20) && (r->mode != TRANSACTION || !r->ping);
}

/* Allocates what a row needs. The socket is created later. */
static bool prepare(struct end *e)
{
	size_t all;

	e->stride = ((size_t)e->row.size + 63) / 64 * 64;
	/* A ping alternates between PING_BUFFERS buffers. */
	all = e->stride * (e->row.in_flight < PING_BUFFERS ? PING_BUFFERS : e->row.in_flight);
	e->queue = EXS_QHANDLE_INVALID;
	e->memory = e->memory_in = EXS_MHANDLE_INVALID;
	e->data = e->back = -1;
	e->block = aligned_alloc(4096, (all + 4095) / 4096 * 4096);
	e->block_in = aligned_alloc(4096, (all + 4095) / 4096 * 4096);
	e->pings = e->row.ping ? calloc(e->row.count, sizeof *e->pings) : NULL;
	if (!e->block || !e->block_in || (e->row.ping && !e->pings))
		return fail("no memory for %zu bytes", all);
	/* Make the pages resident before the measurement. */
	memset(e->block, 1, all);
	memset(e->block_in, 1, all);
	if (e->row.mode == TCP)
		return true;
	if (exs_init(EXS_VERSION)) {
		if (errno == ENODEV)
			return fail("there is no RDMA device: start this program with `anywarp run -- exs-ttcp ...`");
		return fail_errno("exs_init");
	}
	e->queue = exs_qcreate(1024);
	if (e->queue < 0)
		return fail_errno("exs_qcreate");
	int wait = (int)e->row.wait;
	if (exs_qmodify(e->queue, EXS_QATTR_WAIT, &wait, sizeof wait))
		return fail_errno("exs_qmodify");
	e->memory = exs_mregister(e->block, all, 0);
	e->memory_in = exs_mregister(e->block_in, all, 0);
	if (e->memory < 0 || e->memory_in < 0)
		return fail_errno("exs_mregister");
	return true;
}

static int make_socket(const struct end *e, int family)
{
	int fd, immediate = e->row.mode == IMMEDIATE ? (int)e->row.size : 0, credits = (int)e->row.in_flight;

	if (e->row.mode == TCP) {
		fd = socket(family, SOCK_STREAM, 0);
		if (fd < 0)
			fail_errno("socket");
		return fd;
	}
	fd = exs_socket(family, e->row.stream ? SOCK_STREAM : SOCK_SEQPACKET, 0);
	if (fd < 0) {
		fail_errno("exs_socket");
		return -1;
	}
	if (credits < 4)
		credits = 4;
	if (exs_fcntl(fd, EXS_F_SETSMALLPACKET, immediate) || exs_fcntl(fd, EXS_F_SETCREDITS, credits) ||
	    exs_fcntl(fd, EXS_F_SETRECVADVERT, e->row.mode != READ)) {
		fail_errno("exs_fcntl");
		exs_close(fd);
		return -1;
	}
	return fd;
}

static void set_nagle(const struct end *e)
{
	int nodelay = !e->row.nagle;

	set_timeouts(e->data);
	setsockopt(e->data, IPPROTO_TCP, TCP_NODELAY, &nodelay, sizeof nodelay);
}

static void finish(struct end *e)
{
	if (e->back >= 0)
		exs_close(e->back);
	if (e->data >= 0) {
		if (e->row.mode == TCP)
			close(e->data);
		else
			exs_close(e->data);
	}
	if (e->memory >= 0)
		exs_mderegister(e->memory, 0);
	if (e->memory_in >= 0)
		exs_mderegister(e->memory_in, 0);
	if (e->queue >= 0)
		exs_qdelete(e->queue);
	free(e->block);
	free(e->block_in);
	free(e->pings);
}

static void set_port(struct sockaddr_storage *addr, in_port_t port)
{
	if (addr->ss_family == AF_INET6)
		((struct sockaddr_in6 *)addr)->sin6_port = port;
	else
		((struct sockaddr_in *)addr)->sin_port = port;
}

static in_port_t port_of(const struct sockaddr_storage *addr)
{
	return addr->ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)addr)->sin6_port :
					     ((const struct sockaddr_in *)addr)->sin_port;
}

/* Announces a port at the address of the control connection, and accepts the data connections of the row there. */
static bool admit(struct end *e)
{
	struct sockaddr_storage addr;
	socklen_t len = sizeof addr;
	int fd, bad;
	bool tcp = e->row.mode == TCP, good = false;

	if (getsockname(e->control, (struct sockaddr *)&addr, &len))
		return fail_errno("getsockname");
	set_port(&addr, 0);
	fd = make_socket(e, addr.ss_family);
	if (fd < 0)
		return false;
	if (tcp)
		bad = bind(fd, (struct sockaddr *)&addr, len) || listen(fd, 1) || getsockname(fd, (struct sockaddr *)&addr, &len);
	else
		bad = exs_bind(fd, (struct sockaddr *)&addr, len) || exs_listen(fd, 2) ||
		      exs_getsockname(fd, (struct sockaddr *)&addr, &len) || exs_accept(fd, NULL, 0, e->queue, 0);
	if (bad) {
		fail_errno("no listener");
	} else if (write_line(e->control, "port %d\n", ntohs(port_of(&addr)))) {
		if (tcp) {
			struct pollfd wait = { .fd = fd, .events = POLLIN };

			if (poll(&wait, 1, TIMEOUT_S * 1000) == 1)
				e->data = accept(fd, NULL, NULL);
			good = e->data >= 0 || fail("the client does not connect");
			if (good)
				set_nagle(e);
		} else {
			struct timeval limit = { TIMEOUT_S, 0 };
			exs_event_t event;

			good = exs_qdequeue(e->queue, &event, 1, &limit) == 1 && event.exs_evt_errno == 0;
			if (good)
				e->data = event.exs_evt_union.exs_evt_accept.exs_evt_newfd;
			if (good && e->row.mode == TRANSACTION) {
				good = exs_accept(fd, NULL, 0, e->queue, 0) == 0 &&
				       exs_qdequeue(e->queue, &event, 1, &limit) == 1 && event.exs_evt_errno == 0;
				if (good)
					e->back = event.exs_evt_union.exs_evt_accept.exs_evt_newfd;
			}
			if (!good)
				fail("the client does not connect");
		}
	}
	if (tcp)
		close(fd);
	else
		exs_close(fd);
	return good;
}

static bool dial(struct end *e)
{
	struct sockaddr_storage addr;
	socklen_t len = sizeof addr;
	unsigned int port;
	char line[LINE];
	int type;
	size_t slot;

	if (read_line(e->control, line, false) <= 0 || sscanf(line, "port %u", &port) != 1 || port > 65535)
		return fail("the server refuses the row");
	if (getpeername(e->control, (struct sockaddr *)&addr, &len))
		return fail_errno("getpeername");
	set_port(&addr, htons((in_port_t)port));
	e->data = make_socket(e, addr.ss_family);
	if (e->data < 0)
		return false;
	if (e->row.mode == TCP) {
		if (connect(e->data, (struct sockaddr *)&addr, len))
			return fail_errno("connect");
		set_nagle(e);
		return true;
	}
	if (exs_connect(e->data, (struct sockaddr *)&addr, len, 0, e->queue, 0))
		return fail_errno("exs_connect");
	if (!take(e, &type, &slot))
		return false;
	if (e->row.mode != TRANSACTION)
		return true;
	e->back = make_socket(e, addr.ss_family);
	if (e->back < 0)
		return false;
	if (exs_connect(e->back, (struct sockaddr *)&addr, len, 0, e->queue, 0))
		return fail_errno("exs_connect");
	return take(e, &type, &slot);
}

static bool run_server_row(int control, const struct row *row)
{
	struct end e = { .row = *row, .control = control };
	bool transaction = row->mode == TRANSACTION;
	bool good = prepare(&e) && admit(&e) && (!transaction || offer_with_notify(&e, false)) &&
		    server_phase(&e, (unsigned int)least(WARM_UP + row->in_flight, row->count)) &&
		    server_phase(&e, row->count) && (!transaction || (withdraw(&e, e.back) && write_line(control, "withdrawn\n"))) &&
		    expect(control, "end", false);

	finish(&e);
	return good;
}

static bool run_client_row(int control, const struct row *r, struct measured *m)
{
	struct end e = { .row = *r, .control = control };
	bool good = prepare(&e) && write_line(control, "row %u %u %u %u %u %u %u %u %u %u\n", r->mode, r->stream, r->ping, r->size,
				       r->in_flight, r->buffers, r->count, r->wait, r->nagle, r->verify);

	good = good && dial(&e);
	if (good && r->mode == PERSISTENT_SEND) {
		fill(r, e.block, 1);
		good = offer(&e, false);
	}
	if (good && r->mode == TRANSACTION)
		good = offer_with_notify(&e, true);
	good = good && client_phase(&e, (unsigned int)least(WARM_UP + r->in_flight, r->count), m) && client_phase(&e, r->count, m);
	if (good && (r->mode == PERSISTENT_SEND || r->mode == TRANSACTION))
		good = withdraw(&e, e.data);
	if (good && r->mode == TRANSACTION)
		good = expect(control, "withdrawn", false);
	good = good && write_line(control, "end\n");
	finish(&e);
	return good;
}

/* Serves the rows of one client. */
static bool serve(int control)
{
	char line[LINE];
	struct row r;
	int got;

	set_timeouts(control);
	while ((got = read_line(control, line, false)) == 1) {
		if (sscanf(line, "row %u %u %u %u %u %u %u %u %u %u", &r.mode, &r.stream, &r.ping, &r.size, &r.in_flight, &r.buffers,
			   &r.count, &r.wait, &r.nagle, &r.verify) != 10 ||
		    !is_row(&r)) {
			write_line(control, "refused\n");
			return fail("the client asks for \"%s\"", line);
		}
		if (!run_server_row(control, &r))
			return false;
	}
	return got == 0;
}

/* ---- results ---- */

static void report(const struct row *r, const struct measured *m, bool json)
{
	const struct latencies *l = &m->latencies;
	double rate = r->count / m->seconds, mib = rate * r->size / (1 << 20);
	double client = 100 * m->cpu_client / m->seconds, server = 100 * m->cpu_server / m->seconds;

	if (json) {
		printf("{\"mode\": \"%s\", \"type\": \"%s\", \"nagle\": %s, \"test\": \"%s\", \"size\": %u, \"in_flight\": %u, "
		       "\"buffers\": %u, \"count\": %u, \"wait\": \"%s\", \"verified\": \"%s\", \"seconds\": %.6f, ",
		       mode_names[r->mode], r->stream || r->mode == TCP ? "stream" : "seqpacket", r->nagle ? "true" : "false",
		       r->ping ? "ping" : "throughput", r->size, r->in_flight, r->buffers, r->count, wait_names[r->wait],
		       r->verify ? "all" : "ends", m->seconds);
		if (r->ping)
			printf("\"latency_us\": {\"min\": %.3f, \"median\": %.3f, \"p99\": %.3f, \"max\": %.3f}, ", l->least,
			       l->median, l->p99, l->most);
		else
			printf("\"mib_per_s\": %.2f, \"messages_per_s\": %.1f, ", mib, rate);
		printf("\"cpu_client_percent\": %.2f, \"cpu_server_percent\": %.2f, \"device_client_percent\": %.2f, "
		       "\"device_server_percent\": %.2f, \"copied_client\": %llu, \"copied_server\": %llu}\n",
		       client, server, 100 * m->device_client / m->seconds, 100 * m->device_server / m->seconds,
		       m->copied_client, m->copied_server);
	} else if (r->ping) {
		printf("%-15s %9u B  %9.2f us median  %9.2f min  %9.2f p99  cpu %3.0f %% / %3.0f %%\n", mode_names[r->mode],
		       r->size, l->median, l->least, l->p99, client, server);
	} else {
		printf("%-15s %9u B  %9.1f MiB/s  %10.0f msg/s  cpu %3.0f %% / %3.0f %%\n", mode_names[r->mode], r->size, mib,
		       rate, client, server);
	}
	fflush(stdout);
}

/* ---- the command line ---- */

static const char usage[] =
	"usage: exs-ttcp --listen [ADDRESS] [--port PORT] [--keep]     a server\n"
	"       exs-ttcp ADDRESS [--port PORT] [OPTIONS]               a client\n"
	"       exs-ttcp --self [OPTIONS]                              both on this host\n"
	"\n"
	"  -m, --mode MODE       normal, immediate, persistent-send, persistent-recv, transaction, tcp, or read, which is\n"
	"                        normal but never advertises a receive [normal]\n"
	"  -s, --size SIZE,...   bytes of a message, 1 to 16M [1M]; --all: every power of two\n"
	"  -i, --in-flight N     sends and receives under way, 1 to 64 [4]\n"
	"  -b, --buffers N       buffers that these messages use in turn, at most as many as -i [as many as -i]\n"
	"  -n, --count N         messages [512 MiB / SIZE, at least 100, at most 200000 (--ping: 20000)]\n"
	"      --ping            latency: one message there, one back\n"
	"      --stream          SOCK_STREAM, not SOCK_SEQPACKET\n"
	"      --wait HOW        adaptive, notify or busy: how threads wait for events [adaptive]\n"
	"      --nagle           with --mode tcp: without TCP_NODELAY\n"
	"      --verify          fill and compare each byte, not only the ends of each message\n"
	"      --json            one JSON object for each size\n"
	"  -p, --port PORT       [" PORT "]; 0: any, the server prints it\n"
	"      --keep            serve one client after the other\n"
	"  -h, --help            prints this\n"
	"  -V, --version\n";

struct options {
	struct row row;
	unsigned int sizes[64], size_count;
	const char *host, *port;
	bool listen, self, keep, json;
};

static int wrong(const char *what, const char *value)
{
	fail("%s: %s", what, value);
	fputs(usage, stderr);
	return 2;
}

static bool number(const char *text, unsigned int most, unsigned int *value)
{
	char *end;
	unsigned long n;

	if (text[0] < '0' || text[0] > '9')
		return false;
	errno = 0;
	n = strtoul(text, &end, 10);
	if (*end == 'K' || *end == 'k') {
		n = n <= ~0ul >> 10 ? n << 10 : ~0ul;
		end++;
	} else if (*end == 'M' || *end == 'm') {
		n = n <= ~0ul >> 20 ? n << 20 : ~0ul;
		end++;
	}
	*value = (unsigned int)n;
	return *end == 0 && errno == 0 && n >= 1 && n <= most;
}

/* getaddrinfo() accepts larger numbers, and uses their lower 16 bits. */
static bool is_port(const char *text)
{
	char *end;

	errno = 0;
	return text[0] >= '0' && text[0] <= '9' && strtoul(text, &end, 10) <= 65535 && *end == 0 && errno == 0;
}

/* Returns the index of a name in a list, or the length of the list if it is not found. */
static unsigned int find(const char *name, const char *const *names, unsigned int count)
{
	unsigned int i = 0;

	while (i < count && strcmp(name, names[i]) != 0)
		i++;
	return i;
}

static int parse(int argc, char **argv, struct options *o)
{
	enum { ALL = 256, PING, STREAM, WAIT, NAGLE, VERIFY, JSON, LISTEN, KEEP, SELF };
	static const struct option longs[] = {
		{ "mode", 1, NULL, 'm' },   { "size", 1, NULL, 's' },	   { "all", 0, NULL, ALL },	 { "in-flight", 1, NULL, 'i' },
		{ "buffers", 1, NULL, 'b' }, { "count", 1, NULL, 'n' },  { "ping", 0, NULL, PING },	   { "stream", 0, NULL, STREAM }, { "wait", 1, NULL, WAIT },
		{ "nagle", 0, NULL, NAGLE }, { "verify", 0, NULL, VERIFY }, { "json", 0, NULL, JSON },	 { "port", 1, NULL, 'p' },
		{ "listen", 0, NULL, LISTEN }, { "keep", 0, NULL, KEEP }, { "self", 0, NULL, SELF },	 { "help", 0, NULL, 'h' },
		{ "version", 0, NULL, 'V' }, { 0 },
	};
	int c;

	while ((c = getopt_long(argc, argv, "m:s:i:b:n:p:hV", longs, NULL)) != -1) {
		switch (c) {
		case 'm':
			o->row.mode = find(optarg, mode_names, MODES);
			if (o->row.mode == MODES)
				return wrong("no such mode", optarg);
			break;
		case 's': {
			char *rest = optarg, *one;

			while ((one = strsep(&rest, ",")))
				if (o->size_count == 64 || !number(one, MAX_SIZE, &o->sizes[o->size_count++]))
					return wrong("not a size from 1 to 16M", one);
			break;
		}
		case ALL:
			for (o->size_count = 0; o->size_count <= 24; o->size_count++)
				o->sizes[o->size_count] = 1u << o->size_count;
			break;
		case 'i':
			if (!number(optarg, MAX_IN_FLIGHT, &o->row.in_flight))
				return wrong("not a number from 1 to 64", optarg);
			break;
		case 'b':
			if (!number(optarg, MAX_IN_FLIGHT, &o->row.buffers))
				return wrong("not a number from 1 to 64", optarg);
			break;
		case 'n':
			if (!number(optarg, MAX_COUNT, &o->row.count))
				return wrong("not a number of messages", optarg);
			break;
		case WAIT:
			o->row.wait = find(optarg, wait_names, 4);
			if (o->row.wait == 4 || o->row.wait == 0)
				return wrong("no such way to wait", optarg);
			break;
		case 'p':
			if (!is_port(optarg))
				return wrong("not a port from 0 to 65535", optarg);
			o->port = optarg;
			break;
		case PING:
			o->row.ping = 1;
			break;
		case STREAM:
			o->row.stream = 1;
			break;
		case NAGLE:
			o->row.nagle = 1;
			break;
		case VERIFY:
			o->row.verify = 1;
			break;
		case JSON:
			o->json = true;
			break;
		case LISTEN:
			o->listen = true;
			break;
		case KEEP:
			o->keep = true;
			break;
		case SELF:
			o->self = true;
			break;
		case 'h':
			fputs(usage, stdout);
			exit(0);
		case 'V':
			puts("exs-ttcp " EXS_TTCP_VERSION);
			exit(0);
		default:
			fputs(usage, stderr);
			return 2;
		}
	}
	if (optind < argc)
		o->host = argv[optind++];
	if (optind < argc)
		return wrong("unexpected", argv[optind]);
	if (o->self && (o->host || o->listen))
		return wrong("starts both ends, and takes neither an address nor --listen", "--self");
	if (!o->self && !o->listen && !o->host)
		return wrong("one of these is needed", "--listen, --self, ADDRESS");
	if (o->keep && !o->listen)
		return wrong("only with --listen", "--keep");
	if (o->size_count == 0)
		o->sizes[o->size_count++] = 1 << 20;
	for (unsigned int i = 0; i < o->size_count; i++)
		if (o->row.mode == IMMEDIATE && o->sizes[i] > 1u << 20)
			return wrong("immediate data is at most 1M", mode_names[IMMEDIATE]);
	if (o->row.buffers == 0)
		o->row.buffers = o->row.in_flight;
	if (o->row.buffers > o->row.in_flight)
		return wrong("more buffers than messages in flight", "--buffers");
	if (shares(&o->row) && (o->row.ping || o->row.mode == TRANSACTION))
		return wrong("only for the throughput of single messages", "--buffers");
	if (o->row.mode == TRANSACTION && o->row.ping)
		return wrong("no pings in mode", mode_names[TRANSACTION]);
	if (o->row.nagle && o->row.mode != TCP)
		return wrong("only with --mode tcp", "--nagle");
	if (o->row.ping && o->row.count > MAX_PINGS)
		return wrong("too many", "--count");
	return 0;
}

/* Returns a socket for the control connection, listening or connected. */
static int control_socket(const char *host, const char *port, bool listening)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = listening ? AI_PASSIVE : 0 }, *list = NULL;
	int one = 1, fd = -1, error;

	if (listening && !host)
		hints.ai_family = AF_INET;
	error = getaddrinfo(host, port, &hints, &list);
	if (error) {
		fail("%s port %s: %s", host ? host : "any", port, gai_strerror(error));
		return -1;
	}
	for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
		fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (fd < 0)
			continue;
		if (listening)
			setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
		if (listening ? bind(fd, a->ai_addr, a->ai_addrlen) || listen(fd, 16) : connect(fd, a->ai_addr, a->ai_addrlen)) {
			error = errno;
			close(fd);
			fd = -1;
			errno = error;
		}
	}
	if (fd < 0)
		fail("%s port %s: %s", host ? host : "any", port, strerror(errno));
	freeaddrinfo(list);
	return fd;
}

static int run_server(int listener, bool keep)
{
	bool good;

	do {
		int control;

		do
			control = accept(listener, NULL, NULL);
		while (control < 0 && (errno == EINTR || errno == ECONNABORTED));
		if (control < 0) {
			fail_errno("accept");
			return 1;
		}
		good = serve(control);
		close(control);
	} while (keep);
	return good ? 0 : 1;
}

static int run_client(const struct options *o, const char *host, const char *port)
{
	int control = control_socket(host, port, false);
	bool good = control >= 0;

	if (good)
		set_timeouts(control);
	for (unsigned int i = 0; good && i < o->size_count; i++) {
		struct row row = o->row;
		struct measured m = { 0 };

		row.size = o->sizes[i];
		if (row.count == 0) {
			unsigned int most = row.ping ? 20000 : 200000, volume = (512u << 20) / row.size;

			row.count = volume < 100 ? 100 : volume > most ? most : volume;
		}
		good = run_client_row(control, &row, &m);
		if (good)
			report(&row, &m, o->json);
	}
	if (control >= 0)
		close(control);
	return good ? 0 : 1;
}

int main(int argc, char **argv)
{
	struct options o = { .row = { .in_flight = 4, .wait = EXS_WAIT_ADAPTIVE }, .port = PORT };
	struct sockaddr_storage addr;
	socklen_t len = sizeof addr;
	int listener, status, bad = parse(argc, argv, &o);
	char port[8];
	pid_t server;

	if (bad)
		return bad;
	if (!o.listen && !o.self)
		return run_client(&o, o.host, o.port);
	listener = control_socket(o.self ? "127.0.0.1" : o.host, o.self ? "0" : o.port, true);
	if (listener < 0 || getsockname(listener, (struct sockaddr *)&addr, &len))
		return 1;
	snprintf(port, sizeof port, "%d", ntohs(port_of(&addr)));
	if (o.listen) {
		printf("listening on port %s\n", port);
		fflush(stdout);
		return run_server(listener, o.keep);
	}
	/* The library is initialized after the fork, in each process. */
	server = fork();
	if (server < 0) {
		fail_errno("fork");
		return 1;
	}
	if (server == 0)
		_exit(run_server(listener, false));
	close(listener);
	bad = run_client(&o, "127.0.0.1", port);
	if (waitpid(server, &status, 0) != server || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
		bad = 1;
	return bad;
}
