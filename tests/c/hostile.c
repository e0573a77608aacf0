/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Peers that violate the protocol attack a server that also has an undisturbed connection. For each kind of attack, the
 * test checks that the attacker gets what the RFC demands (a Terminate with its code, or the end of the stream), that
 * the log names peer and reason, and that the undisturbed connection keeps more than half of its rate. Other tests open
 * thousands of idle connections and check that the memory for them is bounded.
 *
 * The attackers are separate processes that send MPA, DDP and RDMAP through plain sockets.
 */
#include "mpa.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static FILE *log_file;

/* ---------------------------------------------------------------- attacks that end in a Terminate */

/* What the attacker receives: layer, type and code of a Terminate, or only the end of the stream. */
#define CODE(layer, etype, code) ((layer) << 12 | (etype) << 8 | (code))
#define END_ONLY (-1)

enum attack_kind {
	CRC, UNDERFLOW_, CUT_HEADER, EMPTY, OVERFLOW_,
	WRITE_STAG, WRITE_BOUNDS, WRITE_WRAP, WRITE_RIGHTS,
	READ_STAG, READ_BOUNDS, READ_WRAP, READ_RIGHTS, READ_HUGE, ATOMIC_RIGHTS,
	INVALIDATE_UNKNOWN, INVALIDATE_REGION,
	RESPONSE_UNASKED, IRD_OVERRUN,
	NUMBER_AGAIN, NUMBER_AHEAD, OFFSET, QUEUE, NO_RECEIVE, TOO_LONG, VERSION, OPCODE,
	TERMINATE_STORM, TERMINATE_NONSENSE,
	LONG_PRIVATE_DATA, LOUD_PRIVATE_DATA,
};

static const struct attack {
	const char *name;
	int expect;
	const char *logged;
} attacks[] = {
	[CRC] = { "bad_crc", CODE(2, 0, 2), "crc mismatch" },
	[UNDERFLOW_] = { "length_underflow", CODE(2, 0, 3), "shorter than its header" },
	[CUT_HEADER] = { "header_cut", CODE(2, 0, 3), "shorter than its header" },
	[EMPTY] = { "frame_of_nothing", CODE(2, 0, 3), "shorter than its header" },
	[OVERFLOW_] = { "length_overflow", CODE(2, 0, 2), "crc mismatch" },
	[WRITE_STAG] = { "write_stag", CODE(1, 1, 0), "not registered" },
	[WRITE_BOUNDS] = { "write_bounds", CODE(1, 1, 1), "outside stag" },
	[WRITE_WRAP] = { "write_wrap", CODE(1, 1, 3), "wraps" },
	[WRITE_RIGHTS] = { "write_rights", CODE(1, 1, 0), "no remote write access" },
	[READ_STAG] = { "read_stag", CODE(0, 1, 0), "not registered" },
	[READ_BOUNDS] = { "read_bounds", CODE(0, 1, 1), "outside remote stag" },
	[READ_WRAP] = { "read_wrap", CODE(0, 1, 4), "wraps" },
	[READ_RIGHTS] = { "read_rights", CODE(0, 1, 2), "does not give the access" },
	[READ_HUGE] = { "read_huge", CODE(0, 1, 1), "outside remote stag" },
	[ATOMIC_RIGHTS] = { "atomic_rights", CODE(0, 1, 2), "does not give the access" },
	[INVALIDATE_UNKNOWN] = { "invalidate_unknown", CODE(0, 1, 9), "may not be invalidated" },
	[INVALIDATE_REGION] = { "invalidate_region", CODE(0, 1, 9), "may not be invalidated" },
	[RESPONSE_UNASKED] = { "response_unasked", CODE(0, 2, 6), "answers no request" },
	[IRD_OVERRUN] = { "ird_overrun", CODE(1, 2, 2), "reads and atomics outstanding" },
	[NUMBER_AGAIN] = { "number_again", CODE(1, 2, 3), "out of range" },
	[NUMBER_AHEAD] = { "number_ahead", CODE(1, 2, 3), "out of range" },
	[OFFSET] = { "offset", CODE(1, 2, 4), "message offset 4" },
	[QUEUE] = { "queue", CODE(1, 2, 1), "invalid queue 7" },
	[NO_RECEIVE] = { "no_receive", CODE(1, 2, 2), "no buffer on queue 0" },
	[TOO_LONG] = { "too_long", CODE(1, 2, 5), "message of 1 bytes" },
	[VERSION] = { "version", CODE(0, 2, 5), "rdmap version 0" },
	[OPCODE] = { "opcode", CODE(0, 2, 6), "unexpected opcode" },
	[TERMINATE_STORM] = { "terminate_storm", END_ONLY, "terminated the connection" },
	[TERMINATE_NONSENSE] = { "terminate_nonsense", END_ONLY, "terminated the connection" },
	[LONG_PRIVATE_DATA] = { "private_data_too_long", END_ONLY, "not an MPA Request" },
	[LOUD_PRIVATE_DATA] = { "more_than_was_announced", END_ONLY, "bytes after the request" },
};

static void make_attack(enum attack_kind kind, struct wire *w)
{
	size_t at;

	switch (kind) {
	case CRC:
		send_message(w, 0, 2, 0, 0);
		w->at[w->len - 1] ^= 1;
		break;
	case UNDERFLOW_: /* a valid CRC, but no room for the two control bytes */
		at = w->len;
		w->len += 2;
		put8(w, 0xc1);
		end_fpdu(w, at, 0);
		break;
	case CUT_HEADER: /* the header without its last byte */
		at = begin_tagged(w, OP_WRITE, target.open, target.open_at);
		w->len--;
		end_fpdu(w, at, 0);
		break;
	case EMPTY:
		at = w->len;
		w->len += 2;
		end_fpdu(w, at, 0);
		break;
	case OVERFLOW_: /* the length field says 65,535, but the stream has less */
		at = begin_tagged(w, OP_WRITE, target.open, target.open_at);
		end_fpdu(w, at, 65535 - 14);
		while (w->len < 66000)
			put8(w, 0);
		break;
	case WRITE_STAG:
	case WRITE_BOUNDS:
	case WRITE_WRAP:
	case WRITE_RIGHTS:
		at = begin_tagged(w, OP_WRITE, kind == WRITE_STAG ? target.open ^ 1 : kind == WRITE_RIGHTS ? target.closed : target.open,
				  kind == WRITE_BOUNDS ? target.open_at + OPEN_LEN - 4
				  : kind == WRITE_WRAP ? UINT64_MAX - 3
				  : kind == WRITE_RIGHTS ? target.closed_at
							 : target.open_at);
		put64(w, 0);
		end_fpdu(w, at, 0);
		break;
	case READ_STAG:
		read_request(w, 1, 8, target.open ^ 0x100, target.open_at);
		break;
	case READ_BOUNDS:
		read_request(w, 1, 8, target.open, target.open_at + OPEN_LEN - 7);
		break;
	case READ_WRAP:
		read_request(w, 1, 8, target.open, UINT64_MAX);
		break;
	case READ_RIGHTS:
		read_request(w, 1, 8, target.closed, target.closed_at);
		break;
	case READ_HUGE:
		read_request(w, 1, UINT32_MAX, target.open, target.open_at);
		break;
	case ATOMIC_RIGHTS:
		at = begin_untagged(w, OP_FETCH_ADD, 0, 1, 1, 0);
		put32(w, 0); /* FetchAdd */
		put32(w, 7);
		put32(w, target.open);
		put64(w, target.open_at);
		put64(w, 1);
		put64(w, 0);
		put64(w, 0);
		put64(w, 0);
		end_fpdu(w, at, 0);
		break;
	case INVALIDATE_UNKNOWN:
	case INVALIDATE_REGION:
		at = begin_untagged(w, OP_SEND_INVALIDATE, kind == INVALIDATE_REGION ? target.open : 0x12345600, 0, 2, 0);
		end_fpdu(w, at, 0);
		break;
	case RESPONSE_UNASKED:
		at = begin_tagged(w, OP_RESPONSE, target.open, target.open_at);
		put64(w, 0);
		end_fpdu(w, at, 0);
		break;
	case IRD_OVERRUN: /* more requests than the server serves at a time */
		for (uint32_t msn = 1; msn <= 64; msn++)
			read_request(w, msn, 8, target.open, target.open_at);
		break;
	case NUMBER_AGAIN:
		send_message(w, 0, 1, 0, 0);
		break;
	case NUMBER_AHEAD:
		send_message(w, 0, 0x80000000u, 0, 0);
		break;
	case OFFSET:
		send_message(w, 0, 2, 4, 0);
		break;
	case QUEUE:
		send_message(w, 7, 1, 0, 0);
		break;
	case NO_RECEIVE: /* one receive is left */
		send_message(w, 0, 2, 0, 0);
		send_message(w, 0, 3, 0, 0);
		break;
	case TOO_LONG:
		send_message(w, 0, 2, 0, 1);
		break;
	case VERSION:
	case OPCODE:
		at = begin_untagged(w, OP_SEND, 0, 0, 2, 0);
		w->at[at + 3] = kind == VERSION ? 0x03 : 0x4d;
		end_fpdu(w, at, 0);
		break;
	case TERMINATE_STORM:
		for (int i = 0; i < 500; i++) {
			at = begin_untagged(w, OP_TERMINATE, 0, 2, 1, 0);
			put32(w, 0x01020000u);
			end_fpdu(w, at, 0);
		}
		break;
	case TERMINATE_NONSENSE:
		at = begin_untagged(w, OP_TERMINATE, 0, 2, 1, 0);
		put32(w, 0xffffffffu);
		end_fpdu(w, at, 0);
		break;
	case LONG_PRIVATE_DATA:
		put(w, "MPA ID Req Frame\x40\x01\xff\xff", 20);
		break;
	case LOUD_PRIVATE_DATA:
		put(w, "MPA ID Req Frame\x40\x01\x00\x04", 20);
		for (int i = 0; i < 6000; i++)
			put32(w, 0x41424344u);
		break;
	}
}

/* Reads until a Terminate or the end of the stream. Skips Read Responses. */
static int receive_result(int fd)
{
	uint8_t head[2], body[65536 + 8];

	errno = 0;
	for (int i = 0; i < 100000; i++) {
		size_t len, rest;

		if (!receive_all(fd, head, 2))
			return END_ONLY;
		len = (size_t)head[0] << 8 | head[1];
		rest = len + (4 - (len + 2) % 4) % 4 + 4;
		if (!receive_all(fd, body, rest))
			return END_ONLY;
		if (len >= 20 && body[1] == OPERATION(OP_TERMINATE))
			return CODE(body[18] >> 4, body[18] & 0xf, body[19]);
	}
	return END_ONLY;
}

/*
 * Makes one attack. Returns what the attacker received, -2 if it could not connect, or -3 if neither a Terminate nor the
 * end of the stream arrived in time.
 */
static int attack(enum attack_kind kind, unsigned int which)
{
	bool early = kind == LONG_PRIVATE_DATA || kind == LOUD_PRIVATE_DATA;
	static struct wire w;
	int fd, result;

	w.len = 0;
	make_attack(kind, &w);
	fd = early ? dial(which) : connect_peer(which);
	if (fd < 0)
		return -2;
	send_all(fd, w.at, w.len);
	result = receive_result(fd);
	if (result == END_ONLY && errno == EAGAIN)
		result = -3; /* no reaction */
	close(fd);
	return result;
}

/* The report of an attacking process. */
static struct report {
	volatile bool stop;
	volatile unsigned int attacks;
	volatile int wrong; /* an unexpected result of an attack; or how many connections could not be opened */
} *report;

/*
 * Repeats an attack at a high rate. Without the pause after each attack, the attacker would slow the server merely by
 * using the processor.
 */
static int attack_on(enum attack_kind kind)
{
	struct timespec pause = { 0, 3000000 };

	while (!report->stop) {
		int result = attack(kind, report->attacks);

		if (result != attacks[kind].expect && !report->wrong)
			report->wrong = result ? result : 0x10000;
		report->attacks++;
		nanosleep(&pause, NULL);
	}
	return 0;
}

/* ---------------------------------------------------------------- attacks beside an undisturbed connection */

static pid_t start_attacker(int (*run)(enum attack_kind), enum attack_kind kind)
{
	pid_t pid;

	fflush(stdout);
	memset(report, 0, sizeof *report);
	pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		_exit(run(kind));
	}
	return pid;
}

static long log_position(void)
{
	return log_file ? lseek(fileno(log_file), 0, SEEK_END) : 0;
}

/* Whether the log has, after `from`, a line with both texts. */
static bool is_logged(long from, const char *peer, const char *reason)
{
	char line[1024];

	if (!log_file)
		return true;
	fseek(log_file, from, SEEK_SET);
	while (fgets(line, sizeof line, log_file))
		if (strstr(line, peer) && strstr(line, reason))
			return true;
	return false;
}

static const char *one_attack(size_t kind)
{
	const struct attack *a = &attacks[kind];
	const char *peer = kind == LONG_PRIVATE_DATA || kind == LOUD_PRIVATE_DATA ? "127.0.0." : "peer 127.0.0.";
	double calm, busy;
	struct pair p;
	uint64_t end;
	pid_t pid;
	long log;
	int status;

	TRY(open_pair(&p, &usual));
	TRY(start_server());
	log = log_position();
	TRY(best_pace(&p, 4, 0, &calm));
	pid = start_attacker(attack_on, (enum attack_kind)kind);
	ENSURE(pid > 0, "fork: %s", strerror(errno));
	end = now_ms() + WAIT_MS;
	while (report->attacks < 2 && now_ms() < end)
		TRY(talk(&p, 10));
	TRY(best_pace(&p, 80, calm / 2, &busy));
	/* The number of log lines per second is limited. */
	end = now_ms() + WAIT_MS;
	while (!is_logged(log, peer, a->logged) && now_ms() < end)
		TRY(talk(&p, 100));
	report->stop = true;
	while (waitpid(pid, &status, WNOHANG) == 0)
		TRY(talk(&p, 10));
	ENSURE(!server.failed, "the server failed");
	ENSURE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the attacker ends with %#x", (unsigned int)status);
	ENSURE(report->attacks >= 3, "only %u attacks", report->attacks);
	ENSURE(!report->wrong, "the attacker receives %#x, expected %#x", (unsigned int)report->wrong,
	       (unsigned int)a->expect);
	ENSURE(busy > calm / 2, "%.0f messages a second beside the attacker, %.0f without", busy, calm);
	ENSURE(is_logged(log, peer, a->logged), "the log does not name peer and reason");
	/* No memory was changed. */
	TRY(all_bytes(server.open.at, OPEN_LEN, FRESH, "the open region"));
	TRY(all_bytes(server.closed.at, CLOSED_LEN, FRESH, "the closed region"));
	return NULL;
}

/* ---------------------------------------------------------------- peers that keep connections open */

enum holder { SILENT, HALF_REQUEST, HALF_FPDU, TRICKLE, NEVER_READS };

#define HALF 60000u

/*
 * The memory that the server may keep for one connection, in bytes: the library's limit, and QP_COST for the program's
 * queue pair.
 */
#define QP_COST (16u << 10)

/*
 * Memory that is shared by all connections of a kind, in bytes: the overhead of malloc and of tables. For peers that
 * never read, it also includes all buffers of a connection except the first.
 */
#define USUAL (4u << 20)
#define UNREAD (80u << 20)

static const struct wave {
	const char *name;
	unsigned int count;
	bool connected;
	size_t each, shared;
} waves[] = {
	/*
	 * These connections send nothing or half an MPA Request. The server keeps the descriptors of only some of them, and
	 * a few hundred bytes of memory for each connection.
	 */
	[SILENT] = { "silent", 2500, false, 2048, USUAL },
	[HALF_REQUEST] = { "half_a_request", 2500, false, 2048, USUAL },
	/* The server must buffer one FPDU for each connection, since no part of it may be used before its CRC arrives. */
	[HALF_FPDU] = { "half_an_fpdu", 2000, true, 65536 + 2 + 4 + QP_COST, USUAL },
	[TRICKLE] = { "a_byte_now_and_then", 1000, true, 4096 + QP_COST, USUAL },
	/* The server keeps Read Responses that the attacker never receives. */
	[NEVER_READS] = { "never_reads", 2000, true, 65536 + 4096 + QP_COST, UNREAD },
};

static int hold_one(enum holder kind, unsigned int which, struct wire *w)
{
	int fd;

	if (kind == SILENT || kind == HALF_REQUEST) {
		fd = dial(which);
		if (fd >= 0 && kind == HALF_REQUEST)
			send_all(fd, "MPA ID Req", 10);
		return fd;
	}
	fd = connect_peer(which);
	w->len = 0;
	if (fd >= 0 && kind == HALF_FPDU) {
		size_t at = begin_tagged(w, OP_WRITE, target.open, target.open_at);

		while (w->len < HALF)
			put64(w, 0);
		end_fpdu(w, at, 65500 - (int)(w->len - 2));
		send_all(fd, w->at, HALF);
	} else if (fd >= 0 && kind == NEVER_READS) {
		for (uint32_t msn = 1; msn <= 4; msn++)
			read_request(w, msn, OPEN_LEN, target.open, target.open_at);
		send_all(fd, w->at, w->len);
	}
	return fd;
}

/* Opens the connections of a wave and keeps them open until report->stop is set. */
static int hold(enum attack_kind as)
{
	enum holder kind = (enum holder)as;
	static int fds[4096];
	static struct wire w;
	unsigned int n = waves[kind].count;
	uint8_t byte = 0;

	for (unsigned int i = 0; i < n && !report->stop; i++) {
		fds[i] = hold_one(kind, i, &w);
		if (fds[i] >= 0)
			report->attacks++;
		else
			report->wrong++;
	}
	for (size_t round = 0; !report->stop; round++) {
		struct timespec pause = { 0, 50000000 };

		/* 0x00, 0x40, ...: the beginning of an FPDU with a ULPDU of 64 bytes, which never becomes complete */
		byte = round == 0 ? 0 : 0x40;
		for (unsigned int i = 0; kind == TRICKLE && i < n && round < 40; i++)
			if (fds[i] >= 0)
				send(fds[i], &byte, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
		nanosleep(&pause, NULL);
	}
	return 0;
}

static const char *holders(size_t kind)
{
	const struct wave *wave = &waves[kind];
	unsigned int before_fds, fds, most;
	long before, now, peak = 0;
	struct rlimit limit;
	struct pair p;
	double calm, busy;
	uint64_t end;
	pid_t pid;
	int status;

	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
	if (limit.rlim_cur < 2 * wave->count + 500)
		SKIP("too few descriptors for so many connections: ulimit -n");
	TRY(open_pair(&p, &usual));
	TRY(start_server());
	TRY(best_pace(&p, 4, 0, &calm));
	before = resident() * 1024;
	before_fds = descriptors();
	pid = start_attacker(hold, (enum attack_kind)kind);
	ENSURE(pid > 0, "fork: %s", strerror(errno));
	end = now_ms() + 40000;
	while (report->attacks + (unsigned int)report->wrong < wave->count && now_ms() < end) {
		TRY(talk(&p, 10));
		now = resident() * 1024;
		peak = now > peak ? now : peak;
	}
	/* The server receives the bytes of the attackers during this measurement. */
	TRY(best_pace(&p, 80, calm / 2, &busy));
	now = resident() * 1024;
	peak = now > peak ? now : peak;
	fds = descriptors();
	printf("# %s: %u connections (%d failed), %ld bytes each, %u descriptors more; %.0f messages/s, %.0f before\n",
	       wave->name, report->attacks, report->wrong, (peak - before) / (long)wave->count, fds - before_fds, busy,
	       calm);
	ENSURE(!wave->connected || report->attacks == wave->count, "only %u of %u connections were made", report->attacks,
	       wave->count);
	ENSURE(peak - before <= (long)(wave->count * wave->each + wave->shared), "%ld bytes more for %u connections", peak - before,
	       wave->count);
	most = wave->connected ? wave->count : 512;
	ENSURE(fds - before_fds <= most + most / 100 + 64, "%u descriptors more", fds - before_fds);
	ENSURE(busy > calm / 2, "%.0f messages a second beside them, %.0f without", busy, calm);
	ENSURE(!server.failed, "the server failed");
	report->stop = true;
	while (waitpid(pid, &status, WNOHANG) == 0)
		TRY(talk(&p, 10));
	/* When the attacker has ended, the server closes all descriptors of its connections. */
	end = now_ms() + 20000;
	while ((fds = descriptors()) > before_fds && now_ms() < end)
		TRY(talk(&p, 10));
	ENSURE(fds <= before_fds, "%u descriptors, %u before", fds, before_fds);
	return NULL;
}

#define ATTACK(kind, name) { name, one_attack, kind, 0, false }

static const struct test tests[] = {
	ATTACK(CRC, "bad_crc"),
	ATTACK(UNDERFLOW_, "length_underflow"),
	ATTACK(CUT_HEADER, "header_cut"),
	ATTACK(EMPTY, "frame_of_nothing"),
	ATTACK(OVERFLOW_, "length_overflow"),
	ATTACK(WRITE_STAG, "write_stag"),
	ATTACK(WRITE_BOUNDS, "write_bounds"),
	ATTACK(WRITE_WRAP, "write_wrap"),
	ATTACK(WRITE_RIGHTS, "write_rights"),
	ATTACK(READ_STAG, "read_stag"),
	ATTACK(READ_BOUNDS, "read_bounds"),
	ATTACK(READ_WRAP, "read_wrap"),
	ATTACK(READ_RIGHTS, "read_rights"),
	ATTACK(READ_HUGE, "read_huge"),
	ATTACK(ATOMIC_RIGHTS, "atomic_rights"),
	ATTACK(INVALIDATE_UNKNOWN, "invalidate_unknown"),
	ATTACK(INVALIDATE_REGION, "invalidate_region"),
	ATTACK(RESPONSE_UNASKED, "response_unasked"),
	ATTACK(IRD_OVERRUN, "ird_overrun"),
	ATTACK(NUMBER_AGAIN, "number_again"),
	ATTACK(NUMBER_AHEAD, "number_ahead"),
	ATTACK(OFFSET, "offset"),
	ATTACK(QUEUE, "queue"),
	ATTACK(NO_RECEIVE, "no_receive"),
	ATTACK(TOO_LONG, "too_long"),
	ATTACK(VERSION, "version"),
	ATTACK(OPCODE, "opcode"),
	ATTACK(TERMINATE_STORM, "terminate_storm"),
	ATTACK(TERMINATE_NONSENSE, "terminate_nonsense"),
	ATTACK(LONG_PRIVATE_DATA, "private_data_too_long"),
	ATTACK(LOUD_PRIVATE_DATA, "more_than_was_announced"),
	{ "silent", holders, SILENT, 0, true },
	{ "half_a_request", holders, HALF_REQUEST, 0, true },
	{ "half_an_fpdu", holders, HALF_FPDU, 0, true },
	{ "a_byte_now_and_then", holders, TRICKLE, 0, true },
	{ "never_reads", holders, NEVER_READS, 0, true },
};

int main(int argc, char **argv)
{
	report = mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (report == MAP_FAILED)
		return 2;
	/* The undisturbed connection must use TCP, as the attackers do, rather than shared memory. */
	setenv("ANYWARP_CARRIER", "tcp", 0);
	/* The test reads the log, unless the user has asked for one. */
	if (!getenv("ANYWARP_LOG") && (log_file = tmpfile())) {
		setenv("ANYWARP_LOG", "info", 1);
		/*
		 * Both descriptors share one file position. O_APPEND makes the library write at the end, wherever the
		 * reader is.
		 */
		fcntl(fileno(log_file), F_SETFL, O_APPEND);
		dup2(fileno(log_file), STDERR_FILENO);
	}
	return run_tests(tests, COUNT(tests), argc, argv);
}
