/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * One end of one run of `anywarp ping` or `anywarp blast`: a verbs program that the command starts, controls, and kills
 * if it does not respond. Arguments are NAME=NUMBER. Standard input and output consist of lines:
 *
 *   out  hello qpn=… gid=… …      the queue pair was created
 *   in   peer qpn=… gid=… …       the hello of the other end
 *   out  armed                    connected, receives posted
 *   in   go
 *   out  progress msgs=… bytes=…  each second
 *   in   stop sent=…              to a client: end now; to a server: the number of sent messages, end when they have arrived
 *   out  samples …                one-way times, or round-trip times of Reads, in nanoseconds
 *   out  done …                   the results
 *
 * Both ends have a buffer with the same contents, the reference. Message m consists of the bytes of the reference from word
 * m % WINDOW on, so a sender sends from the reference and a receiver compares with it. All words of the reference differ. So the
 * first word of a message identifies the message, and two messages whose numbers differ by less than WINDOW have no equal words
 * at the same position.
 */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include "../../abi/include/infiniband/anywarpdv.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <netdb.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#define WINDOW 32749u /* words; a prime, so that it and the number of slots (receive buffers) have no common factor */
#define GRH 40u
#define QKEY 0x11111111u
#define PORT 1
#define BATCH 128
#define MAX_SGE 16
#define LATE 8192u  /* a message that arrives late is assumed to be at most this many messages older than the newest one */
#define SWEEP 64u /* a message this many messages older than the newest is assumed to have no record; its slot is prepared anew */

enum transport { RC, UC, UD, RD };
enum op { SEND, SEND_IMM, WRITE, WRITE_IMM, WRITE_RECORD, READ, WRITE_READ };

static struct {
	uint64_t server, blast, transport, op, size, depth, list, signal_every, inlined, event, slots, gather, iters,
		duration_ms, warmup, segment, record_mode, parity, repeats, deadline_ms, exact, idle_ms, wait_ms, gid_index, sl, unordered,
		mtu, fill, cm;
} o = { .depth = 16, .list = 1, .signal_every = 1, .gather = 1, .size = 64, .idle_ms = 10000, .wait_ms = 200 };

#define OPTION(x) { #x, &o.x }
static const struct { const char *name; uint64_t *at; } options[] = {
	OPTION(server), OPTION(blast), OPTION(transport), OPTION(op), OPTION(size), OPTION(depth), OPTION(list),
	OPTION(signal_every), OPTION(inlined), OPTION(event), OPTION(slots), OPTION(gather), OPTION(iters),
	OPTION(duration_ms), OPTION(warmup), OPTION(segment), OPTION(record_mode), OPTION(parity), OPTION(repeats),
	OPTION(deadline_ms), OPTION(exact), OPTION(idle_ms), OPTION(wait_ms), OPTION(gid_index), OPTION(sl), OPTION(unordered), OPTION(mtu),
	OPTION(fill), OPTION(cm),
};

static struct ibv_context *device;
static struct ibv_pd *pd;
static struct ibv_comp_channel *schan, *rchan;
static struct ibv_cq *scq, *rcq;
static struct ibv_qp *qp;
static struct ibv_qp_ex *ex;
static struct ibv_ah *ah;
static struct ibv_mr *ref_mr[2], *slot_mr;
static uint8_t *ref[2], *slots;
static uint64_t stride, receives;
static struct { uint32_t qpn, lid, psn, rkey, slots; uint64_t addr, ref_addr, ref_rkey; union ibv_gid gid; uint16_t cm; char ip[64]; } peer;
static struct ibv_port_attr port_attr;
static struct rdma_event_channel *cm_events;
static struct rdma_cm_id *cm_id;
static uint16_t cm_port;

static __typeof__(anywarpdv_create_qp_ex) *dv_create;
static __typeof__(anywarpdv_poll_records) *dv_poll_records;
static __typeof__(anywarpdv_read_map) *dv_read_map;
static __typeof__(anywarpdv_release_map) *dv_release_map;
static __typeof__(anywarpdv_query_counters) *dv_counters;

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	printf("error ");
	vprintf(format, args);
	printf("\n");
	fflush(stdout);
	va_end(args);
	exit(1);
}

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---------------------------------------------------------------- the reference */

/* A bijective mixing function. */
static uint64_t mix(uint64_t x)
{
	x ^= x >> 32;
	x *= 0xd6e8feb86659fd93u;
	x ^= x >> 32;
	x *= 0xa0761d6478bd642fu;
	x ^= x >> 32;
	return x;
}

static uint64_t inverse(uint64_t a)
{
	uint64_t x = a;

	for (int i = 0; i < 6; i++)
		x *= 2 - a * x;
	return x;
}

static uint64_t unmix(uint64_t x)
{
	static uint64_t first, second;

	if (!first) {
		first = inverse(0xd6e8feb86659fd93u);
		second = inverse(0xa0761d6478bd642fu);
	}
	x ^= x >> 32;
	x *= second;
	x ^= x >> 32;
	x *= first;
	x ^= x >> 32;
	return x;
}

static const uint8_t *content(uint64_t m)
{
	return ref[0] + m % WINDOW * 8;
}

/* Returns the address of message m at the receiver. */
static uint8_t *slot_of(uint64_t m)
{
	return slots + m % o.slots * stride;
}

static void *memory(size_t size)
{
	void *at;

	size = (size + 4095) & ~(size_t)4095;
	if (posix_memalign(&at, 4096, size))
		die("cannot allocate %zu bytes of memory: ask for fewer --buffers", size);
	memset(at, 0, size);
	return at;
}

/* Fills a slot before message m arrives. Each byte differs from that of m. */
static void prepare(uint64_t m)
{
	const uint8_t *from = content(m);
	uint8_t *to = slot_of(m);

	for (uint64_t i = 0; i < o.size; i++)
		to[i] = (uint8_t)~from[i];
}

/* Returns whether bytes [from, to) of the slot are still those of prepare(). */
static bool is_ready(uint64_t m, uint64_t from, uint64_t to)
{
	const uint8_t *good = content(m), *is = slot_of(m);

	for (; from < to; from++)
		if ((is[from] ^ good[from]) != 0xff)
			return false;
	return true;
}

/* ---------------------------------------------------------------- results */

static struct {
	uint64_t messages, bytes, complete, partial, duplicate, bad, overwritten, map_bad, map_checked, failed, first_at, last_at,
		first_bytes, all;
} seen;
static uint64_t *seen_bits, seen_words, expected;

static void note(uint64_t m, uint64_t bytes)
{
	seen.all++;
	if (m >= expected)
		expected = m + 1;
	if (m < o.warmup)
		return;
	if (!seen.first_at) {
		seen.first_at = now();
		seen.first_bytes = bytes;
	}
	seen.messages++;
	seen.bytes += bytes;
}

/* Records the time of arrivals. Called once for each poll, because reading the clock takes a tenth of the time of a short
 * message. */
static bool noted(bool some)
{
	if (some && seen.first_at)
		seen.last_at = now();
	return some;
}

/* Records message m. Returns whether it arrived for the first time. */
static bool first_time(uint64_t m)
{
	uint64_t word = m / 64;

	if (m > 1ull << 36)
		die("the message number %" PRIu64 " is impossibly large", m);
	if (word >= seen_words) {
		uint64_t more = word * 2 + 64;

		seen_bits = realloc(seen_bits, more * 8);
		if (!seen_bits)
			die("no memory");
		memset(seen_bits + seen_words, 0, (more - seen_words) * 8);
		seen_words = more;
	}
	if (seen_bits[word] >> (m % 64) & 1) {
		seen.duplicate++;
		return false;
	}
	seen_bits[word] |= 1ull << (m % 64);
	return true;
}

static bool lossy(void)
{
	return o.transport == UC || o.transport == UD;
}

/* Returns whether the client itself receives the messages (RDMA Read). */
static bool pulls(void)
{
	return o.op == READ || o.op == WRITE_READ;
}

/* Returns whether Sends carry their number as immediate data, because they may arrive out of order or be lost, and the payload is
 * too short for a number. */
static bool numbered(void)
{
	return o.op == SEND && o.size < 8 && (lossy() || o.unordered);
}

/* Returns the number of the message that begins with the word at `data`. */
static uint64_t name(const uint8_t *data, uint64_t len)
{
	uint64_t word, guess;

	if (len < 8)
		return expected;
	memcpy(&word, data, 8);
	word = unmix(word) - 1;
	if (word >= WINDOW)
		return expected;
	guess = expected - expected % WINDOW + word;
	/* Fewer than WINDOW - LATE consecutive messages may be missing, and a message is late by at most LATE messages. */
	if (guess >= expected + WINDOW - LATE && guess >= WINDOW)
		guess -= WINDOW;
	else if (guess + LATE < expected)
		guess += WINDOW;
	return guess;
}

/* Compares a complete message m at `data`. */
static void arrived(uint64_t m, const uint8_t *data, uint64_t len)
{
	if (!first_time(m))
		return;
	if (len != o.size || memcmp(data, content(m), len))
		seen.bad++;
	if (m >= o.warmup)
		seen.complete++;
	note(m, len);
}

/* ---------------------------------------------------------------- requests */

static uint64_t posted, completed;

/* Returns the scatter/gather elements of message m, alternating between the two copies of the reference. */
static int pieces(uint64_t m, struct ibv_sge *sge)
{
	uint64_t piece = (o.size + o.gather - 1) / o.gather, at = 0;
	int n = 0;

	if (o.op == READ) {
		sge[0] = (struct ibv_sge){ (uintptr_t)slot_of(m), (uint32_t)o.size, slot_mr->lkey };
		return 1;
	}
	for (; at < o.size; at += piece, n++) {
		uint64_t len = o.size - at < piece ? o.size - at : piece;
		int copy = n % 2;

		sge[n] = (struct ibv_sge){ (uintptr_t)(ref[copy] + m % WINDOW * 8 + at), (uint32_t)len, ref_mr[copy]->lkey };
	}
	return n;
}

static uint64_t target(uint64_t m)
{
	return o.op == READ ? peer.ref_addr + m % WINDOW * 8 : peer.addr + m % peer.slots * stride;
}

static uint32_t target_key(void)
{
	return o.op == READ ? (uint32_t)peer.ref_rkey : peer.rkey;
}

static void post_connected(uint64_t first, uint64_t count, bool last)
{
	static const enum ibv_wr_opcode opcodes[] = {
		[SEND] = IBV_WR_SEND, [SEND_IMM] = IBV_WR_SEND_WITH_IMM, [WRITE] = IBV_WR_RDMA_WRITE,
		[WRITE_IMM] = IBV_WR_RDMA_WRITE_WITH_IMM, [READ] = IBV_WR_RDMA_READ,
	};
	static struct ibv_send_wr wr[BATCH];
	static struct ibv_sge sge[BATCH][MAX_SGE];
	struct ibv_send_wr *bad;
	int rc;

	for (uint64_t i = 0; i < count; i++) {
		uint64_t m = first + i;
		bool signaled = (m + 1) % o.signal_every == 0 || (last && i + 1 == count);

		wr[i] = (struct ibv_send_wr){
			.wr_id = m,
			.next = i + 1 < count ? &wr[i + 1] : NULL,
			.sg_list = sge[i],
			.num_sge = pieces(m, sge[i]),
			.opcode = opcodes[numbered() ? SEND_IMM : o.op],
			.send_flags = (signaled ? IBV_SEND_SIGNALED : 0) | (o.inlined ? IBV_SEND_INLINE : 0),
			.imm_data = htonl((uint32_t)m),
		};
		wr[i].wr.rdma.remote_addr = target(m);
		wr[i].wr.rdma.rkey = target_key();
	}
	rc = ibv_post_send(qp, wr, &bad);
	if (rc)
		die("ibv_post_send: %s", strerror(rc));
}

static void post_datagram(uint64_t first, uint64_t count, bool last)
{
	struct ibv_data_buf bufs[MAX_SGE];
	struct ibv_sge sge[MAX_SGE];
	int n, rc;

	ibv_wr_start(ex);
	for (uint64_t i = 0; i < count; i++) {
		uint64_t m = first + i;
		bool signaled = (m + 1) % o.signal_every == 0 || (last && i + 1 == count);

		ex->wr_id = m;
		ex->wr_flags = signaled ? IBV_SEND_SIGNALED : 0;
		switch (numbered() ? SEND_IMM : o.op) {
		case SEND: ibv_wr_send(ex); break;
		case SEND_IMM: ibv_wr_send_imm(ex, htonl((uint32_t)m)); break;
		case WRITE:
		case WRITE_RECORD: ibv_wr_rdma_write(ex, target_key(), target(m)); break;
		case WRITE_IMM: ibv_wr_rdma_write_imm(ex, target_key(), target(m), htonl((uint32_t)m)); break;
		case READ: ibv_wr_rdma_read(ex, target_key(), target(m)); break;
		}
		ibv_wr_set_ud_addr(ex, ah, peer.qpn, QKEY);
		n = pieces(m, sge);
		if (o.inlined) {
			for (int j = 0; j < n; j++)
				bufs[j] = (struct ibv_data_buf){ (void *)(uintptr_t)sge[j].addr, sge[j].length };
			ibv_wr_set_inline_data_list(ex, (size_t)n, bufs);
		} else {
			ibv_wr_set_sge_list(ex, (size_t)n, sge);
		}
	}
	rc = ibv_wr_complete(ex);
	if (rc)
		die("ibv_wr_complete: %s", strerror(rc));
}

/* Posts one half of WRITE_READ: the Write of message m to the peer's memory, or the Read of it. */
static void post_half(uint64_t m, bool back)
{
	struct ibv_sge sge = { (uintptr_t)content(m), (uint32_t)o.size, ref_mr[0]->lkey };
	struct ibv_send_wr wr = { .wr_id = 2 * m + back, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE }, *bad;
	int rc;

	if (back) {
		sge.addr = (uintptr_t)slot_of(m);
		sge.lkey = slot_mr->lkey;
		wr.opcode = IBV_WR_RDMA_READ;
	} else if (o.inlined) {
		wr.send_flags = IBV_SEND_INLINE;
	}
	if (back || o.signal_every == 1)
		wr.send_flags |= IBV_SEND_SIGNALED;
	wr.wr.rdma.remote_addr = peer.addr + m % peer.slots * stride;
	wr.wr.rdma.rkey = peer.rkey;
	rc = ibv_post_send(qp, &wr, &bad);
	if (rc)
		die("ibv_post_send: %s", strerror(rc));
}

/* Posts the Write of WRITE_READ. If the Write is not signaled, the Read is posted at once; otherwise poll_sends() posts the Read
 * when the Write has completed. */
static void post_there_and_back(uint64_t m)
{
	post_half(m, false);
	if (o.signal_every > 1)
		post_half(m, true);
}

static void post(uint64_t count, bool last)
{
	if (o.op == WRITE_READ) {
		post_there_and_back(posted++);
		return;
	}
	if (ex)
		post_datagram(posted, count, last);
	else
		post_connected(posted, count, last);
	posted += count;
}

/* Posts receives. Each buffer has room for a route header before the payload. The payload begins at the start of a cache line. */
static void post_receives(uint64_t from, uint64_t count)
{
	static struct ibv_recv_wr wr[BATCH];
	static struct ibv_sge sge[BATCH];
	struct ibv_recv_wr *bad;
	uint64_t header = ex ? GRH : 0;
	bool to_memory = o.op == SEND || o.op == SEND_IMM;
	int rc;

	while (count) {
		uint64_t n = count < BATCH ? count : BATCH;

		for (uint64_t i = 0; i < n; i++) {
			sge[i] = (struct ibv_sge){ (uintptr_t)(slot_of(from + i) + 64 - header), (uint32_t)(o.size + header),
						   slot_mr->lkey };
			wr[i] = (struct ibv_recv_wr){ .wr_id = from + i, .next = i + 1 < n ? &wr[i + 1] : NULL,
						      .sg_list = &sge[i], .num_sge = to_memory };
		}
		rc = ibv_post_recv(qp, wr, &bad);
		if (rc)
			die("ibv_post_recv: %s", strerror(rc));
		from += n;
		count -= n;
	}
}

/* Polls completions of requests and counts them in `completed`. The data of Reads is compared. */
static bool poll_sends(void)
{
	struct ibv_wc wc[BATCH];
	int n = ibv_poll_cq(scq, BATCH, wc);

	if (n < 0)
		die("ibv_poll_cq: %s", strerror(errno));
	for (int i = 0; i < n; i++) {
		uint64_t m = wc[i].wr_id;
		bool good = wc[i].status == IBV_WC_SUCCESS;

		if (!good && !(o.op == READ && o.transport == UD && wc[i].status == IBV_WC_RETRY_EXC_ERR))
			die("request %" PRIu64 " ended: %s", m, ibv_wc_status_str(wc[i].status));
		if (o.op == WRITE_READ) {
			bool back = m & 1;

			m /= 2;
			if (!back) {
				post_half(m, true);
				continue;
			}
			arrived(m, slot_of(m), o.size);
		}
		if (o.op == READ) {
			/* Unsignaled requests before this one have completed successfully too. */
			for (; completed <= m; completed++)
				if (good || completed < m)
					arrived(completed, slot_of(completed), o.size);
				else
					seen.failed++;
		}
		if (m + 1 > completed)
			completed = m + 1;
	}
	return pulls() ? noted(n > 0) : n > 0;
}

/* ---------------------------------------------------------------- arrivals */

static bool records(void)
{
	return o.transport >= UD && (o.op == WRITE_RECORD || o.op == WRITE_IMM);
}

static uint64_t id_of_zero, swept;
static uint64_t *prepared, *spoilt, processed;
static bool id_known;

/*
 * Returns the number of unread records, and of those that were discarded because the queue of records was full. The record that is being
 * processed does not count. A record is discarded after all records that are in the queue then, so it does not count any more when
 * a record is processed that was queued later.
 */
static uint64_t behind(void)
{
	static uint64_t passed, queued_then, discarded_then;
	struct anywarpdv_counters c;
	int rc = dv_counters(qp, &c, sizeof(c));
	uint64_t queued;

	if (rc)
		die("anywarpdv_query_counters: %s", strerror(rc));
	queued = c.rec_full + c.rec_partial;
	if (processed > queued_then) {
		passed = discarded_then;
		queued_then = queued;
		discarded_then = c.rec_overflow;
	}
	return queued - processed + c.rec_overflow - passed;
}

/*
 * Compares bytes [from, to) of message m. The peer may overwrite them by a later message for the same slot before they are
 * compared, because there is no flow control. Each word then belongs to one of the two messages. The slots are used in turn,
 * and the device's thread continues to receive while this thread has no processor time. So the later message may be as many
 * messages ahead as there are unread records, plus one or two that have begun.
 */
static void compare_place(uint64_t m, const uint8_t *data, uint64_t from, uint64_t to)
{
	uint64_t most = 0;
	bool later = false;

	if (!memcmp(data + from, content(m) + from, to - from))
		return;
	for (uint64_t at = from; at < to; at = (at + 8) & ~(uint64_t)7) {
		uint64_t end = (at + 8) & ~(uint64_t)7, len = (end < to ? end : to) - at, word;
		bool known = !memcmp(data + at, content(m) + at, len);

		/* A word that belongs to no later message is wrong, unless more messages have arrived meanwhile. So it is looked up again. */
		for (int look = 0; !known && look < 3; look++) {
			memcpy(&word, data + at, len);
			if (look || !most)
				most = behind() / o.slots + 4;
			/* The newest message is most likely. The contents repeat after WINDOW messages. */
			for (uint64_t round = most; !known && round > 0 && most - round < WINDOW; round--)
				known = later = !memcmp(&word, content(m + round * o.slots) + at, len);
		}
		if (!known) {
			seen.bad++;
			return;
		}
	}
	if (later)
		seen.overwritten++;
}

/*
 * Returns whether later messages may have been written to the slots that are being compared, because the number of unread records
 * is more than half of the number of slots.
 */
static bool lapped(void)
{
	return behind() > o.slots / 2;
}

/* Prepares the slot of message m. Bytes of m that have arrived already are overwritten. */
static void make_ready(uint64_t m)
{
	prepare(m);
	if (lapped()) {
		spoilt[m % o.slots] = m;
		prepared[m % o.slots] = UINT64_MAX;
	} else {
		prepared[m % o.slots] = m;
	}
}

static void one_record(const struct anywarpdv_record *r)
{
	static struct anywarpdv_range range[65536];
	uint64_t in_region = r->base - (uintptr_t)slots, m;
	uint8_t *data = slots + in_region;
	int64_t ahead;
	bool chunk = r->flags & ANYWARPDV_RECORD_IS_CHUNK;
	uint64_t valid = 0, at = 0, bad;
	bool gaps, written = false;
	int n = 1;

	processed++;
	if (in_region % stride || in_region / stride >= o.slots || r->length != o.size) {
		seen.bad++;
		goto release;
	}
	if (!id_known) {
		id_of_zero = r->message_id - in_region / stride;
		id_known = true;
	}
	/* Message ids have 32 bits; the count of messages has 64. In a ping, an answer has the number of
	 * the message that it answers, so the numbers of answers have gaps where messages were lost. Messages of a ping are therefore
	 * identified by their slot. */
	ahead = (int32_t)(r->message_id - (uint32_t)id_of_zero - (uint32_t)expected);
	if (!o.blast) {
		ahead = (int64_t)((in_region / stride + o.slots - expected % o.slots) % o.slots);
		if (ahead > (int64_t)o.slots / 2)
			ahead -= (int64_t)o.slots;
	}
	m = expected + (uint64_t)ahead;
	if (m % o.slots != in_region / stride || (r->flags & ANYWARPDV_RECORD_WITH_IMM && ntohl(r->imm_data) != (uint32_t)m)) {
		seen.bad++;
		goto release;
	}
	n = dv_read_map(qp, r, sizeof *r, 65536, range, sizeof *range);
	if (n < 0 || n > 65536)
		die("anywarpdv_read_map: %s", n < 0 ? strerror(errno) : "too many ranges");
	if (!chunk && !first_time(m))
		goto release;
	bad = seen.bad;
	gaps = o.exact && !chunk && prepared[m % o.slots] == m;
	for (int i = 0; i < n; i++) {
		uint64_t to = range[i].to;

		if (range[i].from < at || to < range[i].from || to > o.size) {
			seen.map_bad++;
			goto release;
		}
		written |= gaps && !is_ready(m, at, range[i].from);
		if (!o.exact || spoilt[m % o.slots] != m)
			compare_place(m, data, range[i].from, to);
		valid += to - range[i].from;
		at = to;
	}
	written |= gaps && !is_ready(m, at, o.size);
	if ((written || seen.bad > bad) && o.exact && !chunk && lapped()) {
		/* Differences may be bytes of a later message. */
		seen.bad = bad;
		seen.overwritten++;
	} else {
		seen.map_bad += written;
		seen.map_checked += gaps;
	}
	if (valid != r->valid)
		seen.map_bad++;
	if (m >= o.warmup)
		*(r->flags & ANYWARPDV_RECORD_COMPLETE ? &seen.complete : &seen.partial) += 1;
	note(m, valid);
	if (o.exact && !chunk) {
		if (spoilt[m % o.slots] == m)
			seen.overwritten++;
		make_ready(m + o.slots);
		/* Messages that will have no record. Their slots are prepared for the next message, too. */
		for (; swept + SWEEP < m; swept++)
			if (prepared[swept % o.slots] == swept)
				make_ready(swept + o.slots);
	}
release:
	if (r->map && dv_release_map(qp, r->map))
		die("anywarpdv_release_map: %s", strerror(errno));
}

static bool take_arrivals(uint64_t *newest)
{
	struct ibv_wc wc[BATCH];
	bool to_memory = o.op == SEND || o.op == SEND_IMM;
	uint64_t header = ex ? GRH : 0;
	int n;

	if (records()) {
		struct anywarpdv_record r[BATCH];

		n = dv_poll_records(qp, BATCH, r, sizeof r[0], 0);
		if (n < 0)
			die("anywarpdv_poll_records: %s", strerror(errno));
		if (n && o.blast)
			behind();
		for (int i = 0; i < n; i++)
			one_record(&r[i]);
		*newest = expected - 1;
		return n > 0;
	}
	if (o.op == WRITE) {
		volatile uint8_t *last = slot_of(expected) + o.size - 1;
		uint64_t end;

		if (o.blast || *last != content(expected)[o.size - 1])
			return false;
		end = now() + 100000000;
		/* The last byte may arrive before other bytes of the cache line. */
		while (memcmp(slot_of(expected), content(expected), o.size) && now() < end)
			;
		*newest = expected;
		arrived(*newest, slot_of(*newest), o.size);
		*(slot_of(*newest) + o.size - 1) = (uint8_t)~content(*newest + o.slots)[o.size - 1];
		return true;
	}
	n = ibv_poll_cq(rcq, BATCH, wc);
	if (n < 0)
		die("ibv_poll_cq: %s", strerror(errno));
	for (int i = 0; i < n; i++) {
		uint8_t *data = slot_of(wc[i].wr_id) + 64;
		uint64_t m = expected, len = to_memory ? wc[i].byte_len - header : wc[i].byte_len;

		if (wc[i].status != IBV_WC_SUCCESS)
			die("receive %" PRIu64 " ended: %s", wc[i].wr_id, ibv_wc_status_str(wc[i].status));
		if (wc[i].wc_flags & IBV_WC_WITH_IMM)
			m = expected + (uint64_t)(int64_t)(int32_t)(ntohl(wc[i].imm_data) - (uint32_t)expected);
		else if (to_memory && (lossy() || o.unordered))
			m = name(data, len);
		*newest = m;
		arrived(m, to_memory ? data : slot_of(m), len);
		post_receives(wc[i].wr_id, 1);
	}
	return n > 0;
}

static bool poll_arrivals(uint64_t *newest)
{
	return noted(take_arrivals(newest));
}

/* ---------------------------------------------------------------- standard input */

static uint64_t look_again, sent = UINT64_MAX;
static bool stopped;

static void line(char *text, int size)
{
	int at = 0;

	for (;;) {
		char c;
		ssize_t n = read(STDIN_FILENO, &c, 1);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			exit(1); /* the command that started this process has ended */
		if (c == '\n' || at + 1 >= size)
			break;
		text[at++] = c;
	}
	text[at] = 0;
}

static uint64_t member(const char *text, const char *key)
{
	char with[32];
	const char *at;

	snprintf(with, sizeof(with), " %s=", key);
	at = strstr(text, with);
	if (!at)
		die("the line of the other end has no %s", key);
	return strtoull(at + strlen(with), NULL, 0);
}

/* Reads a line from the command that started this process, if there is one, and reports progress. */
static void listen_now(uint64_t at)
{
	static uint64_t told;
	struct pollfd in = { .fd = STDIN_FILENO, .events = POLLIN };
	char text[256];

	look_again = at + 2000000;
	if (poll(&in, 1, 0) > 0) {
		line(text, sizeof(text));
		if (!strncmp(text, "stop", 4)) {
			stopped = true;
			if (strstr(text, " sent="))
				sent = member(text, "sent");
		}
	}
	if (!told)
		told = at;
	if (at - told >= 1000000000) {
		uint64_t n = o.server || pulls() ? seen.all : completed;

		told = at;
		printf("progress msgs=%" PRIu64 " bytes=%" PRIu64 "\n", n, o.server ? seen.bytes : n * o.size);
		fflush(stdout);
	}
}

static void on_alarm(int signal)
{
	(void)signal;
}

/* Waits at most 50 ms for an event. SIGALRM ends the wait; it is blocked outside this function, so it interrupts nothing else.
* poll(2) is not used: if the library itself receives in user space, as anywarp does, another of its threads would have to receive
* for a thread in poll(2), and wake it. */
static void event_comes(struct ibv_comp_channel *channel)
{
	static bool ticks;
	struct ibv_cq *which;
	sigset_t alarm;
	void *context;
	int failed, why;

	sigemptyset(&alarm);
	sigaddset(&alarm, SIGALRM);
	if (!ticks) {
		struct sigaction act = { .sa_handler = on_alarm }; /* without SA_RESTART */
		struct itimerval every = { { 0, 50000 }, { 0, 50000 } };

		sigprocmask(SIG_BLOCK, &alarm, NULL);
		if (sigaction(SIGALRM, &act, NULL) || setitimer(ITIMER_REAL, &every, NULL))
			die("setitimer: %s", strerror(errno));
		ticks = true;
	}
	sigprocmask(SIG_UNBLOCK, &alarm, NULL);
	failed = ibv_get_cq_event(channel, &which, &context);
	why = errno;
	sigprocmask(SIG_BLOCK, &alarm, NULL);
	if (!failed)
		ibv_ack_cq_events(which, 1);
	else if (why != EINTR)
		die("ibv_get_cq_event: %s", strerror(why));
}

/* Waits until something may have happened. With events it sleeps, otherwise it returns at once. */
static void rest(struct ibv_cq *cq, struct ibv_comp_channel *channel, bool (*again)(void))
{
	if (!o.event)
		return;
	if (ibv_req_notify_cq(cq, 0))
		die("ibv_req_notify_cq: %s", strerror(errno));
	if (!again())
		event_comes(channel);
}

static uint64_t newest;

static bool sends_again(void)
{
	return poll_sends();
}

static bool arrivals_again(void)
{
	return poll_arrivals(&newest);
}

static bool wait_arrivals(void)
{
	if (poll_arrivals(&newest))
		return true;
	if (!o.event || o.op == WRITE)
		return false;
	if (records()) {
		struct anywarpdv_record r;
		int n = dv_poll_records(qp, 1, &r, sizeof r, 20);

		if (n < 0)
			die("anywarpdv_poll_records: %s", strerror(errno));
		if (n)
			one_record(&r);
		newest = expected - 1;
		return noted(n > 0);
	}
	{
		uint64_t before = seen.all;

		rest(rcq, rchan, arrivals_again);
		return seen.all != before || poll_arrivals(&newest);
	}
}

/* ---------------------------------------------------------------- the four roles */

static uint64_t begin_at, end_at, begin_cpu, end_cpu, begin_waited, end_waited;

/* Returns the processor time of this process in microseconds. */
static uint64_t cpu_time(void)
{
	struct rusage use;

	getrusage(RUSAGE_SELF, &use);
	return (uint64_t)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) * 1000000 + (uint64_t)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

/* Returns how long this thread was runnable without a processor, in nanoseconds; 0 if the kernel does not report it. */
static uint64_t waited_time(void)
{
	FILE *f = fopen("/proc/thread-self/schedstat", "re");
	uint64_t waited = 0;

	if (f) {
		if (fscanf(f, "%*u %" SCNu64, &waited) != 1)
			waited = 0;
		fclose(f);
	}
	return waited;
}

/* begin() is called at the start of the measurement, and end() at its end. */
static uint64_t begin(void)
{
	begin_waited = waited_time();
	begin_cpu = cpu_time();
	return begin_at = now();
}

static void end(void)
{
	end_at = now();
	end_cpu = cpu_time();
	end_waited = waited_time();
}

static void blast_client(void)
{
	uint64_t total = o.iters + o.warmup, limit = UINT64_MAX, at = now(), moved = at;
	unsigned int turns = 0;
	bool ended = false;

	begin_at = 0;
	while (!ended || completed < posted) {
		uint64_t room = o.depth - (posted - completed), most = o.list, count;
		bool busy = false;

		if (at >= look_again)
			listen_now(at);
		if (!begin_at && completed >= o.warmup) {
			at = begin();
			if (o.duration_ms)
				limit = at + o.duration_ms * 1000000;
		}
		/* No request of the measurement is posted before the warm-up has ended. */
		count = (begin_at ? total : o.warmup) - posted;
		if (o.fill)
			most = room < BATCH ? room : BATCH;
		if (count > most)
			count = most;
		if (!ended && count && count <= room) {
			/* The last request is signaled, so that the completion of all earlier ones is known. */
			ended = at >= limit || stopped || posted + count == total;
			post(count, ended || posted + count == o.warmup);
			moved = at;
			room -= count;
			busy = true;
		}
		if (poll_sends()) {
			moved = at;
			busy = true;
		} else if (room < o.list || ended || !count) {
			rest(scq, schan, sends_again);
			busy = false;
		}
		/* The clock is not read for each short message, because that takes a tenth of the time of a message. */
		if (!busy || o.list * o.size >= 16384 || ++turns % 16 == 0)
			at = now();
		if (completed < posted && at - moved > o.idle_ms * 1000000)
			die("no request has ended for %" PRIu64 " ms: is the other end alive and reachable?", o.idle_ms);
	}
	end();
}

/* Receives until all sent messages have arrived, or no more arrive. */
static void blast_server(void)
{
	uint64_t quiet_after = now();

	for (;;) {
		uint64_t at, quiet;

		if (o.op == READ || (o.op == WRITE && !records())) {
			struct pollfd in = { .fd = STDIN_FILENO, .events = POLLIN };

			poll(&in, 1, 100);
			listen_now(now());
			if (stopped)
				break;
			continue;
		}
		at = wait_arrivals() && seen.last_at ? (quiet_after = seen.last_at) : now();
		if (at >= look_again) {
			bool before = stopped;

			listen_now(at);
			if (stopped && !before)
				quiet_after = at;
		}
		quiet = at - quiet_after;
		if (stopped && seen.all >= sent && !(records() && o.record_mode == ANYWARPDV_RECORD_CHUNK))
			break;
		if (stopped && quiet > (lossy() ? 300000000u : o.idle_ms * 1000000))
			break;
	}
	end();
}

/* Compares the last plain Write of each slot, the only one that is still there. */
static void compare_slots(void)
{
	for (uint64_t s = 0; s < o.slots && s < sent; s++) {
		uint64_t m = s + (sent - 1 - s) / o.slots * o.slots;
		uint64_t end = now() + (o.transport == UC ? 300000000u : 0);
		bool good;

		while (!(good = !memcmp(slot_of(m), content(m), o.size)) && now() < end)
			poll_sends();
		if (good)
			seen.complete++;
		else if (o.transport == UC)
			seen.partial++;
		else
			seen.bad++;
	}
}

static uint32_t *samples;
static uint64_t samples_n, samples_room;

static void sample(uint64_t time)
{
	if (samples_n == samples_room) {
		samples_room = 2 * samples_room + 4096;
		samples = realloc(samples, samples_room * sizeof(*samples));
		if (!samples)
			die("no memory for %" PRIu64 " samples", samples_room);
	}
	samples[samples_n++] = time > UINT32_MAX ? UINT32_MAX : (uint32_t)time;
}

static void ping_client(void)
{
	uint64_t total = o.iters + o.warmup, limit = UINT64_MAX, limit_ms = lossy() ? o.wait_ms : o.idle_ms;

	for (uint64_t m = 0; m < total && !stopped; m++) {
		uint64_t start = now(), at = start, before = seen.all;
		bool back = false;

		if (m == o.warmup) {
			start = at = begin();
			if (o.duration_ms)
				limit = start + o.duration_ms * 1000000;
		}
		if (start >= limit)
			break;
		post(1, true);
		while (!back) {
			if (pulls()) {
				if (!poll_sends())
					rest(scq, schan, sends_again);
				back = completed > m;
			} else {
				if (wait_arrivals())
					back = seen.all > before && newest >= m;
				else
					poll_sends();
			}
			at = now();
			if (at - start > limit_ms * 1000000)
				break;
			if (at >= look_again)
				listen_now(at);
		}
		if (!back && !lossy())
			die("no answer for %" PRIu64 " ms: is the other end alive and reachable?", limit_ms);
		if (back && m >= o.warmup && !(pulls() && seen.all == before)) {
			sample((at - start) / (o.op == READ ? 1 : 2));
		} else if (!back) {
			seen.failed++;
			if (expected <= m && !pulls())
				expected = m + 1;
		}
		/* Wait for a free send queue entry for the next message. */
		while (posted - completed >= o.depth) {
			if (!poll_sends() && now() - at > o.idle_ms * 1000000)
				die("no request has ended for %" PRIu64 " ms", o.idle_ms);
		}
	}
	end();
}

static void ping_server(void)
{
	uint64_t last = now();

	while (!stopped) {
		uint64_t at = now(), before = seen.all;

		if (pulls()) {
			struct pollfd in = { .fd = STDIN_FILENO, .events = POLLIN };

			poll(&in, 1, 100);
			listen_now(now());
			continue;
		}
		if (wait_arrivals() && seen.all > before) {
			/* An answer has the number of the message that it answers. */
			posted = newest;
			post(1, true);
			poll_sends();
			last = at;
		} else {
			poll_sends();
		}
		if (at >= look_again)
			listen_now(at);
		if (at - last > 60000000000u)
			die("no message for a minute");
	}
	end();
}

/* ---------------------------------------------------------------- objects */

static void find_dv(void)
{
	static const struct { const char *name; void **at; } all[] = {
		{ "anywarpdv_create_qp_ex", (void **)&dv_create },
		{ "anywarpdv_poll_records", (void **)&dv_poll_records },
		{ "anywarpdv_read_map", (void **)&dv_read_map },
		{ "anywarpdv_release_map", (void **)&dv_release_map },
		{ "anywarpdv_query_counters", (void **)&dv_counters },
	};

	for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) {
		*all[i].at = dlvsym(RTLD_DEFAULT, all[i].name, "ANYWARPDV_1.0");
		if (!*all[i].at)
			die("this libibverbs has no %s: ud and rd need anywarp's", all[i].name);
	}
}

static void open_device(void)
{
	const char *wanted = getenv("ANYWARP_PERF_DEVICE");
	int n = 0, which = -1;
	struct ibv_device **list = ibv_get_device_list(&n);

	for (int i = 0; i < n && which < 0; i++)
		if (!wanted || !strcmp(wanted, ibv_get_device_name(list[i])))
			which = i;
	if (which < 0)
		die("no RDMA device%s%s", wanted ? " named " : "", wanted ? wanted : "");
	device = ibv_open_device(list[which]);
	if (!device)
		die("%s does not open: %s", ibv_get_device_name(list[which]), strerror(errno));
	if (ibv_query_port(device, PORT, &port_attr))
		die("ibv_query_port: %s", strerror(errno));
}

static void make_queue_pair(void)
{
	struct ibv_device_attr attr;
	bool rd = o.transport == RD;
	bool answers = !o.blast || o.server;

	if (ibv_query_device(device, &attr))
		die("ibv_query_device: %s", strerror(errno));
	pd = ibv_alloc_pd(device);
	if (!pd)
		die("ibv_alloc_pd: %s", strerror(errno));
	if (o.event) {
		schan = ibv_create_comp_channel(device);
		rchan = ibv_create_comp_channel(device);
		if (!schan || !rchan)
			die("ibv_create_comp_channel: %s", strerror(errno));
	}
	/* Receives are posted only if needed. A Write with immediate data consumes one. Up to `depth` Writes may be placed
	 * while they wait for a receive. So `slots - depth` receives are posted (at least one), and the peer does not overwrite a
	 * message before it is compared. */
	receives = 0;
	if (answers && (o.op == SEND || o.op == SEND_IMM))
		receives = o.slots;
	else if (answers && o.op == WRITE_IMM && !records())
		receives = o.slots > o.depth ? o.slots - o.depth : 1;
	if (receives > (uint64_t)attr.max_qp_wr)
		receives = (uint64_t)attr.max_qp_wr;
	if (receives > 8192)
		receives = 8192;
	scq = ibv_create_cq(device, (int)(o.depth + o.list + 16), NULL, schan, 0);
	rcq = ibv_create_cq(device, (int)receives + 16, NULL, rchan, 0);
	if (!scq || !rcq)
		die("ibv_create_cq: %s", strerror(errno));

	struct ibv_qp_cap cap = {
		.max_send_wr = (uint32_t)(o.depth + o.list), .max_recv_wr = (uint32_t)receives + 1,
		.max_send_sge = (uint32_t)o.gather, .max_recv_sge = 1, .max_inline_data = o.inlined ? (uint32_t)o.size : 0,
	};
	if (o.transport <= UC) {
		struct ibv_qp_init_attr init = {
			.send_cq = scq, .recv_cq = rcq, .cap = cap, .qp_type = o.transport == RC ? IBV_QPT_RC : IBV_QPT_UC,
		};

		qp = ibv_create_qp(pd, &init);
		if (!qp)
			die("ibv_create_qp: %s%s", strerror(errno), o.inlined ? " (is --size too long for --inline?)" : "");
		return;
	}
	find_dv();

	struct ibv_qp_init_attr_ex init = {
		.qp_type = rd ? IBV_QPT_DRIVER : IBV_QPT_UD, .pd = pd, .send_cq = scq, .recv_cq = rcq, .cap = cap,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
				  IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ,
	};
	struct anywarpdv_qp_init_attr dv = {
		.driver_qp_type = rd ? ANYWARPDV_QPT_RD : ANYWARPDV_QPT_UD,
		.flags = (rd && o.op == WRITE ? ANYWARPDV_QP_PLAIN_WRITES : 0) | (rd && o.unordered ? ANYWARPDV_QP_UNORDERED : 0),
		.segment = (uint8_t)o.segment, .record_mode = (uint8_t)o.record_mode, .repeats = (uint8_t)o.repeats,
		.parity = (uint8_t)o.parity, .max_send_size = o.size > 4096 ? (uint32_t)o.size : 0, .max_records = 65536,
		.max_reads = o.depth > 16 ? (uint32_t)o.depth : 0, .max_read_size = o.size > 1 << 20 ? (uint32_t)o.size : 0,
		.read_timeout_us = (uint32_t)o.wait_ms * 1000, .deadline_us = (uint32_t)o.deadline_ms * 1000,
	};

	qp = dv_create(device, &init, &dv, sizeof(dv));
	if (!qp)
		die("anywarpdv_create_qp_ex: %s%s", strerror(errno), o.inlined ? " (is --size too long for --inline?)" : "");
	ex = ibv_qp_to_qp_ex(qp);
	if (!ex)
		die("the queue pair has no extended operations");
}

static void make_memory(void)
{
	uint64_t words = WINDOW + o.size / 8 + 2;
	uint64_t room = o.op == READ && o.server ? 1 : o.slots;

	for (int copy = 0; copy < 2; copy++) {
		ref[copy] = memory(words * 8);
		for (uint64_t i = 0; i < words; i++) {
			uint64_t word = mix(i + 1);

			memcpy(ref[copy] + i * 8, &word, 8);
		}
		ref_mr[copy] = ibv_reg_mr(pd, ref[copy], words * 8, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
		if (!ref_mr[copy])
			die("ibv_reg_mr: %s", strerror(errno));
	}
	slots = memory(room * stride);
	slot_mr = ibv_reg_mr(pd, slots, room * stride, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	if (!slot_mr)
		die("ibv_reg_mr: %s", strerror(errno));
	if (o.op == WRITE && !o.blast)
		for (uint64_t s = 0; s < o.slots; s++)
			slot_of(s)[o.size - 1] = (uint8_t)~content(s)[o.size - 1];
	if (o.exact && records() && (o.server || !o.blast)) {
		prepared = calloc(o.slots, sizeof(*prepared));
		spoilt = malloc(o.slots * sizeof(*spoilt));
		if (!prepared || !spoilt)
			die("no memory");
		for (uint64_t s = 0; s < o.slots; s++) {
			prepare(s);
			prepared[s] = s;
			spoilt[s] = UINT64_MAX;
		}
	} else {
		o.exact = 0;
	}
}

static void modify(struct ibv_qp_attr *attr, int mask, const char *what)
{
	int rc = ibv_modify_qp(qp, attr, mask);

	if (rc)
		die("%s: %s", what, strerror(rc));
}

static bool is_iwarp(void)
{
	return device->device->transport_type == IBV_TRANSPORT_IWARP;
}

static bool is_ours(void)
{
	return dlvsym(RTLD_DEFAULT, "anywarpdv_create_qp_ex", "ANYWARPDV_1.0");
}

/* An iWARP device other than anywarp's connects its queue pairs only by rdma_cm, not by addresses in ibv_modify_qp. */
static bool by_cm(void)
{
	return o.cm || (is_iwarp() && !is_ours());
}

/* The address of this end: that of the control connection. */
static const char *own_ip(void)
{
	const char *ip = getenv("ANYWARP_ADDR");

	return ip ? ip : "0.0.0.0";
}

static struct sockaddr_storage address_of(const char *ip, uint16_t port)
{
	struct addrinfo *found, hints = { .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV };
	struct sockaddr_storage to = { 0 };
	char service[8];
	int rc;

	snprintf(service, sizeof(service), "%u", port);
	rc = getaddrinfo(ip, service, &hints, &found);
	if (rc)
		die("%s: %s", ip, gai_strerror(rc));
	memcpy(&to, found->ai_addr, found->ai_addrlen);
	freeaddrinfo(found);
	return to;
}

static void make_cm_id(void)
{
	cm_events = rdma_create_event_channel();
	if (!cm_events || rdma_create_id(cm_events, &cm_id, NULL, RDMA_PS_TCP))
		die("rdma_create_id: %s", strerror(errno));
}

/* Waits for an event of one of these two kinds, and returns it. */
static struct rdma_cm_event cm_event(enum rdma_cm_event_type wanted, enum rdma_cm_event_type other)
{
	struct pollfd ready = { .fd = cm_events->fd, .events = POLLIN };
	struct rdma_cm_event *event, copy;

	if (poll(&ready, 1, (int)o.idle_ms) != 1)
		die("rdma_cm: no %s", rdma_event_str(wanted));
	if (rdma_get_cm_event(cm_events, &event))
		die("rdma_get_cm_event: %s", strerror(errno));
	if (event->event != wanted && event->event != other)
		die("rdma_cm: %s (%d) instead of %s", rdma_event_str(event->event), event->status, rdma_event_str(wanted));
	copy = *event;
	rdma_ack_cm_event(event);
	return copy;
}

/* Moves the queue pair to a state, with the attributes that rdma_cm gives for it. */
static void modify_by_cm(struct rdma_cm_id *id, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };
	int mask;

	if (rdma_init_qp_attr(id, &attr, &mask))
		die("rdma_init_qp_attr: %s", strerror(errno));
	if (state == IBV_QPS_INIT)
		attr.qp_access_flags |= IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	modify(&attr, mask, "state by rdma_cm");
	if (state == IBV_QPS_INIT && receives)
		post_receives(0, receives);
}

static void listen_by_cm(void)
{
	struct sockaddr_storage at = address_of(own_ip(), 0);

	make_cm_id();
	if (rdma_bind_addr(cm_id, (struct sockaddr *)&at) || rdma_listen(cm_id, 1))
		die("rdma_listen on %s: %s", own_ip(), strerror(errno));
	cm_port = ntohs(rdma_get_src_port(cm_id));
}

/* Connects the queue pair by rdma_cm. rdma_cm has not created the queue pair, so this program passes the number to rdma_cm and
 * changes the states itself. On an iWARP device, the device changes the states after INIT, when the connection is made. */
static void connect_by_cm(void)
{
	struct rdma_conn_param param = { .responder_resources = 16, .initiator_depth = 16, .retry_count = 7, .rnr_retry_count = 7,
					 .qp_num = qp->qp_num };
	struct rdma_cm_event event;

	if (o.server) {
		event = cm_event(RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_CONNECT_REQUEST);
		modify_by_cm(event.id, IBV_QPS_INIT);
		if (!is_iwarp()) {
			modify_by_cm(event.id, IBV_QPS_RTR);
			modify_by_cm(event.id, IBV_QPS_RTS);
		}
		if (rdma_accept(event.id, &param))
			die("rdma_accept: %s", strerror(errno));
	} else {
		struct sockaddr_storage to = address_of(peer.ip, peer.cm);

		make_cm_id();
		if (rdma_resolve_addr(cm_id, NULL, (struct sockaddr *)&to, 2000))
			die("rdma_resolve_addr to %s: %s", peer.ip, strerror(errno));
		cm_event(RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ADDR_RESOLVED);
		if (rdma_resolve_route(cm_id, 2000))
			die("rdma_resolve_route: %s", strerror(errno));
		cm_event(RDMA_CM_EVENT_ROUTE_RESOLVED, RDMA_CM_EVENT_ROUTE_RESOLVED);
		if (strcmp(ibv_get_device_name(cm_id->verbs->device), ibv_get_device_name(device->device)))
			die("%s is reached by the device %s", peer.ip, ibv_get_device_name(cm_id->verbs->device));
		modify_by_cm(cm_id, IBV_QPS_INIT);
		if (rdma_connect(cm_id, &param))
			die("rdma_connect: %s", strerror(errno));
	}
	event = cm_event(RDMA_CM_EVENT_ESTABLISHED, o.server ? RDMA_CM_EVENT_ESTABLISHED : RDMA_CM_EVENT_CONNECT_RESPONSE);
	if (event.event == RDMA_CM_EVENT_CONNECT_RESPONSE) {
		modify_by_cm(cm_id, IBV_QPS_RTR);
		modify_by_cm(cm_id, IBV_QPS_RTS);
		if (rdma_establish(cm_id))
			die("rdma_establish: %s", strerror(errno));
	}
}

static void connect_peer(uint32_t psn)
{
	static const enum ibv_mtu mtus[] = { IBV_MTU_1024, IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096 };
	struct ibv_ah_attr to = { .is_global = 1, .port_num = PORT, .dlid = (uint16_t)peer.lid };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = PORT, .qkey = QKEY };
	bool connected = o.transport <= UC, rc = o.transport == RC;

	to.grh.dgid = peer.gid;
	to.grh.sgid_index = (uint8_t)o.gid_index;
	to.grh.hop_limit = 64;
	to.sl = (uint8_t)o.sl;
	if (connected)
		attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | (rc ? IBV_ACCESS_REMOTE_READ : 0);
	modify(&attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | (connected ? IBV_QP_ACCESS_FLAGS : IBV_QP_QKEY), "to INIT");
	if (receives)
		post_receives(0, receives);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR };
	if (connected) {
		attr.path_mtu = o.mtu >= 1 && o.mtu <= 5 ? mtus[o.mtu] : port_attr.active_mtu;
		attr.dest_qp_num = peer.qpn;
		attr.rq_psn = peer.psn;
		attr.ah_attr = to;
		attr.max_dest_rd_atomic = 16;
		attr.min_rnr_timer = 12;
		modify(&attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				  (rc ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0), "to RTR");
	} else {
		modify(&attr, IBV_QP_STATE, "to RTR");
		ah = ibv_create_ah(pd, &to);
		if (!ah)
			die("ibv_create_ah: %s", strerror(errno));
	}
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = psn, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				     .max_rd_atomic = 16 };
	modify(&attr, IBV_QP_STATE | IBV_QP_SQ_PSN |
			  (rc ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0), "to RTS");
}

static void hello(uint32_t psn)
{
	union ibv_gid gid;

	if (ibv_query_gid(device, PORT, (int)o.gid_index, &gid))
		die("GID %" PRIu64 ": %s", o.gid_index, strerror(errno));
	printf("hello qpn=%u lid=%u psn=%u rkey=%u addr=%" PRIu64 " slots=%" PRIu64 " ref_rkey=%u ref_addr=%" PRIu64
	       " cm=%u ip=%s device=%s gid=", qp->qp_num, port_attr.lid, psn, slot_mr->rkey, (uint64_t)(uintptr_t)slots, o.slots,
	       ref_mr[0]->rkey, (uint64_t)(uintptr_t)ref[0], cm_port, own_ip(), ibv_get_device_name(device->device));
	for (int i = 0; i < 16; i++)
		printf("%02x", gid.raw[i]);
	printf("\n");
	fflush(stdout);
}

static void read_peer(void)
{
	char text[1024];
	const char *gid;

	line(text, sizeof(text));
	if (strncmp(text, "peer ", 5))
		die("unexpected: %s", text);
	peer.qpn = (uint32_t)member(text, "qpn");
	peer.lid = (uint32_t)member(text, "lid");
	peer.psn = (uint32_t)member(text, "psn");
	peer.rkey = (uint32_t)member(text, "rkey");
	peer.addr = member(text, "addr");
	peer.slots = (uint32_t)member(text, "slots");
	peer.ref_rkey = member(text, "ref_rkey");
	peer.ref_addr = member(text, "ref_addr");
	peer.cm = (uint16_t)member(text, "cm");
	gid = strstr(text, " ip=");
	if (!gid || sscanf(gid, " ip=%63s", peer.ip) != 1)
		die("the line of the other end has no IP address");
	gid = strstr(text, " gid=");
	if (!gid || strlen(gid) < 5 + 32 || !peer.slots)
		die("the line of the other end has no gid");
	for (int i = 0; i < 16; i++) {
		unsigned byte;

		if (sscanf(gid + 5 + 2 * i, "%2x", &byte) != 1)
			die("the gid of the other end is invalid");
		peer.gid.raw[i] = (uint8_t)byte;
	}
}

static void tell(void)
{
	struct anywarpdv_counters c = { 0 };

	for (uint64_t i = 0; i < samples_n; i++)
		printf("%s%u%s", i % 500 ? " " : "samples ", samples[i], i % 500 == 499 || i + 1 == samples_n ? "\n" : "");
	printf("done posted=%" PRIu64 " warmup=%" PRIu64 " elapsed_ns=%" PRIu64 " messages=%" PRIu64 " bytes=%" PRIu64
	       " complete=%" PRIu64 " partial=%" PRIu64 " duplicate=%" PRIu64 " bad=%" PRIu64 " overwritten=%" PRIu64 " map_bad=%" PRIu64
	       " map_checked=%" PRIu64 " failed=%" PRIu64 " span_ns=%" PRIu64 " first_bytes=%" PRIu64 " cpu_us=%" PRIu64 " waited_ns=%" PRIu64,
	       o.server ? 0 : posted, o.warmup, end_at - begin_at, seen.messages, seen.bytes, seen.complete, seen.partial,
	       seen.duplicate, seen.bad, seen.overwritten, seen.map_bad, seen.map_checked, seen.failed, seen.last_at - seen.first_at,
	       seen.first_bytes,
	       end_cpu - begin_cpu, end_waited - begin_waited);
	if (ex && !dv_counters(qp, &c, sizeof(c)))
		printf(" rx_dgrams=%" PRIu64 " tx_dgrams=%" PRIu64 " rx_no_recv=%" PRIu64 " rx_late=%" PRIu64 " rx_dup=%" PRIu64
		       " rx_repaired=%" PRIu64 " evicted=%" PRIu64 " rec_full=%" PRIu64 " rec_partial=%" PRIu64
		       " rec_overflow=%" PRIu64 " tx_stalls=%" PRIu64 " tx_errors=%" PRIu64 " reads_timeout=%" PRIu64, c.rx_dgrams,
		       c.tx_dgrams, c.rx_no_recv, c.rx_late, c.rx_dup, c.rx_repaired, c.evicted, c.rec_full, c.rec_partial,
		       c.rec_overflow, c.tx_stalls, c.tx_errors, c.reads_timeout);
	printf("\n");
	fflush(stdout);
}

int main(int argc, char **argv)
{
	uint32_t psn;
	char text[64];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (int i = 1; i < argc; i++) {
		const char *value = strchr(argv[i], '=');
		size_t j, n = sizeof(options) / sizeof(*options);

		for (j = 0; value && j < n; j++)
			if (!strncmp(argv[i], options[j].name, (size_t)(value - argv[i])) && !options[j].name[value - argv[i]])
				break;
		if (!value || j == n)
			die("%s: no such argument; this program is run by `anywarp ping` and `anywarp blast`", argv[i]);
		*options[j].at = strtoull(value + 1, NULL, 0);
	}
	if (!o.size || !o.depth || !o.list || !o.signal_every || !o.gather || !o.slots || o.list > BATCH || o.gather > MAX_SGE)
		die("a number is out of range");
	if (!o.iters)
		o.iters = 1ull << 35;
	if (o.list > o.depth)
		o.list = o.depth;
	if (o.signal_every > o.depth / 2)
		o.signal_every = o.depth > 1 ? o.depth / 2 : 1;
	stride = (o.size + 64 + 63) / 64 * 64; /* room for a route header */
	psn = (uint32_t)now() & 0xffffff;
	open_device();
	make_queue_pair();
	make_memory();
	if (o.server && by_cm())
		listen_by_cm();
	hello(psn);
	read_peer();
	if (o.server ? by_cm() : peer.cm != 0)
		connect_by_cm();
	else if (by_cm())
		die("%s connects only by rdma_cm, which the other end does not use: give the client --cm",
		    ibv_get_device_name(device->device));
	else
		connect_peer(psn);
	printf("armed\n");
	fflush(stdout);
	line(text, sizeof(text));
	if (strcmp(text, "go"))
		return 1;
	begin();
	if (!o.blast)
		(o.server ? ping_server : ping_client)();
	else if (!o.server)
		blast_client();
	else
		blast_server();
	if (o.server && o.blast && o.op == WRITE && !records() && sent != UINT64_MAX && sent)
		compare_slots();
	tell();
	/* The other end may still wait for acknowledgements of this one. */
	line(text, sizeof(text));
	return 0;
}
