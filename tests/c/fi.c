/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* The libfabric provider: messages, tag matching, rendezvous, one-sided operations, errors. */
#include "dgrams.h"
#include "fi_sides.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/prctl.h>

#define JOB_KEY 0x0f1a0b01u

/* The length of the messages of beyond_1gib(), which sets it: more than the device's longest request. */
static size_t huge;

/* ---------------------------------------------------------------- messages */

enum { TAG = 1, EARLY = 2, PIECES = 4, SELF = 8 };

/* Messages of every size, with and without tags, before or after their receives, in one piece or several. */
static const char *messages(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct side a, other, *b = &other;
	fi_addr_t source;

	TRY(open_sides(&a, &other));
	move_both(&a, &other);
	if (arg & SELF)
		b = &a;
	for (size_t i = 0; i < COUNT(sizes); i++) {
		size_t len = sizes[i], cut = len / 3;
		struct iovec from[2] = { { out, cut }, { out + cut, len - cut } };
		struct iovec to[3] = { { in, len - cut }, { in + len - cut, 0 }, { in + len - cut, cut + 16 } };
		fi_addr_t whom = arg & SELF ? a.self : a.peer, who = arg & SELF ? a.self : b->peer;
		uint64_t tag = 0xabcd0000 + i, data = 0x1122334455667700 + i;

		fill_bytes(out, len, i);
		memset(in, 0xee, len + 16);
		for (int step = 0; step < 2; step++) {
			bool receives = (step == 0) == !(arg & EARLY);

			if (!receives && arg & TAG) {
				if (arg & PIECES)
					OK(fi_tsendv(a.ep, from, NULL, 2, whom, tag, &a));
				else
					OK(fi_tsenddata(a.ep, out, len, NULL, data, whom, tag, &a));
			} else if (!receives) {
				if (arg & PIECES)
					OK(fi_sendv(a.ep, from, NULL, 2, whom, &a));
				else
					OK(fi_senddata(a.ep, out, len, NULL, data, whom, &a));
			} else if (arg & TAG) {
				if (arg & PIECES)
					OK(fi_trecvv(b->ep, to, NULL, 3, FI_ADDR_UNSPEC, tag, 0, b));
				else
					OK(fi_trecv(b->ep, in, len + 16, NULL, who, tag & ~0xffull, 0xff, b));
			} else {
				if (arg & PIECES)
					OK(fi_recvv(b->ep, to, NULL, 3, who, b));
				else
					OK(fi_recv(b->ep, in, len + 16, NULL, FI_ADDR_UNSPEC, b));
			}
			if (!receives && arg & EARLY) {
				/* Drives both endpoints so that the message arrives before its receive. */
				for (int turn = 0; turn < 200; turn++)
					fi_cq_read(b->rx, NULL, 0);
			}
		}
		TRY(next(b->rx, &entry, &source));
		ENSURE(entry.op_context == b && entry.len == len, "%zu bytes of %zu", entry.len, len);
		ENSURE(source == who, "from %llu", (unsigned long long)source);
		ENSURE(entry.flags & FI_RECV && entry.flags & (arg & TAG ? FI_TAGGED : FI_MSG), "flags %#llx",
		       (unsigned long long)entry.flags);
		ENSURE(!(arg & TAG) || entry.tag == tag, "tag %#llx", (unsigned long long)entry.tag);
		ENSURE(arg & PIECES || (entry.flags & FI_REMOTE_CQ_DATA && entry.data == data), "data");
		TRY(check_bytes(in, len, i));
		for (size_t j = 0; j < 16; j++)
			ENSURE(in[len + j] == 0xee, "byte %zu after the message is written", j);
		TRY(next(a.tx, &entry, NULL));
		ENSURE(entry.op_context == &a && entry.flags & FI_SEND, "the send has another context, or other flags");
	}
	ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN && fi_cq_read(b->rx, &entry, 1) == -FI_EAGAIN, "an unexpected completion");
	ENSURE(fi_cntr_read(a.cntr) == COUNT(sizes), "the counter has %llu", (unsigned long long)fi_cntr_read(a.cntr));
	return NULL;
}

/* Receives match messages in order, and by tag and source. */
static const char *matching(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct side a, b, c;
	uint32_t word[6];

	(void)arg;
	TRY(open_sides(&a, &b));
	TRY(open_side(&c, 0));
	TRY(introduce(&c, &b));
	move_both(&a, &b);
	moving[2] = &c;
	/* `c` is unknown to `b` until it is inserted below. */
	for (uint32_t i = 0; i < 3; i++) {
		OK(fi_tinject(a.ep, &i, sizeof i, a.peer, 5));
		uint32_t other = 10 + i;
		OK(fi_tinject(c.ep, &other, sizeof other, c.peer, 5));
	}
	for (uint64_t until = now_ms() + 200; now_ms() < until;)
		fi_cq_read(b.rx, NULL, 0);
	char name[64];
	size_t len = sizeof name;
	fi_addr_t stranger;
	OK(fi_getname(&c.ep->fid, name, &len));
	ENSURE(fi_av_insert(b.av, name, 1, &stranger, 0, NULL) == 1, "fi_av_insert");
	for (size_t i = 0; i < 3; i++) {
		OK(fi_trecv(b.ep, &word[i], 4, NULL, stranger, 5, 0, &word[i]));
		TRY(next(b.rx, &entry, NULL));
		ENSURE(entry.op_context == &word[i] && word[i] == 10 + i, "%zu from c: %u", i, word[i]);
	}
	for (size_t i = 0; i < 3; i++) {
		OK(fi_trecv(b.ep, &word[i], 4, NULL, FI_ADDR_UNSPEC, 0, ~0ull, &word[i]));
		TRY(next(b.rx, &entry, NULL));
		ENSURE(word[i] == i, "%zu from a: %u", i, word[i]);
	}
	/* Posted receives: the second takes the message that does not match the first. */
	OK(fi_trecv(b.ep, &word[0], 4, NULL, b.peer, 7, 0, &word[0]));
	OK(fi_trecv(b.ep, &word[1], 4, NULL, FI_ADDR_UNSPEC, 0, ~0ull, &word[1]));
	OK(fi_recv(b.ep, &word[2], 4, NULL, FI_ADDR_UNSPEC, &word[2]));
	uint32_t eight = 8, seven = 7, none = 99;
	OK(fi_tinject(a.ep, &eight, 4, a.peer, 8));
	OK(fi_tinject(a.ep, &seven, 4, a.peer, 7));
	OK(fi_inject(a.ep, &none, 4, a.peer));
	for (size_t i = 0; i < 3; i++)
		TRY(next(b.rx, &entry, NULL));
	ENSURE(word[0] == 7 && word[1] == 8 && word[2] == 99, "%u %u %u", word[0], word[1], word[2]);
	ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN, "fi_inject has a completion");
	return NULL;
}

static void mark_huge(uint8_t *at, uint8_t seed)
{
	for (size_t i = 0; i < 64; i++) {
		at[i] = (uint8_t)(seed + i);
		at[(1ul << 30) - 32 + i] = (uint8_t)(seed + 1 + i);
		at[huge - 64 + i] = (uint8_t)(seed + 2 + i);
	}
}

/* Compares all bytes. Does not read pages of `from` that were never written. */
static const char *same_huge(const uint8_t *from, const uint8_t *to)
{
	static const uint8_t zeros[1 << 16];

	for (size_t at = 0; at < huge; at += sizeof zeros) {
		size_t len = huge - at < sizeof zeros ? huge - at : sizeof zeros;
		bool marked = at == 0 || at == (1ul << 30) - sizeof zeros || at == 1ul << 30 || at + sizeof zeros >= huge - 64;

		ENSURE(!memcmp(to + at, marked ? from + at : zeros, len), "bytes differ from %zu on", at);
	}
	return NULL;
}

static int unmap(void *at)
{
	return munmap(at, huge);
}

static const char *beyond_1gib(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct fid_mr *mr;
	struct side a, b;
	bool linked = arg == 3;
	uint8_t *at[2];

	huge = arg == 0 || linked ? (1ul << 30) + 12345 : (3ul << 29) + 12345;
	/* A message of more than 1 GiB takes 10 s and more on a machine with other work. */
	patience = 6 * WAIT_MS;
	/* The memory is unmapped after the endpoints are closed, even if the test fails. */
	for (size_t i = 0; i < 2; i++) {
		at[i] = mmap(NULL, huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		ENSURE(at[i] != MAP_FAILED, "mmap");
		keep(unmap, at[i], "memory");
		madvise(at[i], huge, MADV_HUGEPAGE);
	}
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	ENSURE(info->ep_attr->max_msg_size >= huge, "max_msg_size is %zu", info->ep_attr->max_msg_size);
	mark_huge(at[0], 1);
	for (int i = 0; i < (linked ? 200 : 0); i++) {
		OK(fi_trecv(b.ep, in, 10, NULL, b.peer, 1, 0, &b));
		OK(fi_tinject(a.ep, out, 10, a.peer, 1));
		TRY(next(b.rx, &entry, NULL));
	}
	if (arg != 2) {
		OK(fi_trecv(b.ep, at[1], huge, NULL, b.peer, 1, 0, &b));
		OK(fi_tsend(a.ep, at[0], huge, NULL, a.peer, 1, &a));
		TRY(next(b.rx, &entry, NULL));
		ENSURE(entry.len == huge, "%zu bytes are received", entry.len);
		TRY(next(a.tx, &entry, NULL));
		return same_huge(at[0], at[1]);
	}
	OK(fi_mr_reg(b.domain, at[1], huge, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	mark_huge(at[0], 40);
	OK(fi_writedata(a.ep, at[0], huge, NULL, 7, a.peer, (uintptr_t)at[1], fi_mr_key(mr), &a));
	TRY(next(b.rx, &entry, NULL));
	ENSURE(entry.flags & FI_REMOTE_WRITE && entry.len == huge, "%zu bytes are written", entry.len);
	TRY(next(a.tx, &entry, NULL));
	TRY(same_huge(at[0], at[1]));
	mark_huge(at[1], 80);
	OK(fi_read(a.ep, at[0], huge, NULL, a.peer, (uintptr_t)at[1], fi_mr_key(mr), &a));
	TRY(next(a.tx, &entry, NULL));
	TRY(same_huge(at[1], at[0]));
	ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN && fi_cq_read(b.rx, &entry, 1) == -FI_EAGAIN, "an unexpected completion");
	return NULL;
}

/* An operation with FI_FENCE, and operations posted after it, wait only for earlier operations to the same peer. */
static const char *fence(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct side a, b, c;
	static int64_t target[2];
	int64_t one = 1;
	struct iovec word = { &one, sizeof one };
	struct fi_ioc number = { &one, 1 };
	struct fid_mr *mr;
	fi_addr_t to_c;

	TRY(open_sides(&a, &b));
	TRY(open_side(&c, 0));
	fi_addr_t to_b = a.peer;
	TRY(introduce(&a, &c));
	to_c = a.peer;
	move_both(&a, &b);
	moving[2] = &c;
	ENSURE(info->caps & FI_FENCE, "FI_FENCE is not offered");
	target[0] = target[1] = 0;
	OK(fi_mr_reg(b.domain, target, sizeof target, FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	struct fi_rma_iov there = { (uintptr_t)target, sizeof one, fi_mr_key(mr) };
	struct fi_rma_ioc number_there = { (uintptr_t)target, 1, fi_mr_key(mr) };
	struct fi_msg_tagged message = { .msg_iov = &word, .iov_count = 1, .addr = to_b, .tag = 2, .context = &message };
	struct fi_msg_rma write = { .msg_iov = &word, .iov_count = 1, .addr = to_b, .rma_iov = &there, .rma_iov_count = 1,
				    .context = &write };
	struct fi_msg_atomic sum = { .msg_iov = &number, .iov_count = 1, .addr = to_b, .rma_iov = &number_there,
				     .rma_iov_count = 1, .datatype = FI_INT64, .op = FI_SUM, .context = &sum };
	void *fenced = arg == 0 ? (void *)&message : arg == 1 ? (void *)&write : (void *)&sum;

	OK(fi_trecv(b.ep, in, 8, NULL, FI_ADDR_UNSPEC, 2, 0, &in[0]));
	OK(fi_trecv(b.ep, in + 8, 8, NULL, FI_ADDR_UNSPEC, 3, 0, &in[8]));
	OK(fi_trecv(c.ep, in + 16, 8, NULL, FI_ADDR_UNSPEC, 4, 0, &in[16]));
	/* This send does not complete before its receive is posted. */
	OK(fi_tsend(a.ep, out, 100000, NULL, to_b, 1, &out[0]));
	one = 5;
	switch (arg) {
	case 0: OK(fi_tsendmsg(a.ep, &message, FI_FENCE | FI_INJECT | FI_DELIVERY_COMPLETE)); break;
	case 1: OK(fi_writemsg(a.ep, &write, FI_FENCE | FI_INJECT)); break;
	case 2: OK(fi_atomicmsg(a.ep, &sum, FI_FENCE | FI_INJECT)); break;
	}
	one = 6; /* injected data was copied */
	OK(fi_tinject(a.ep, &one, sizeof one, to_b, 3));
	one = 7;
	OK(fi_tsend(a.ep, out, 8, NULL, to_c, 4, &out[4]));
	TRY(next(c.rx, &entry, NULL));
	TRY(next(a.tx, &entry, NULL));
	ENSURE(entry.op_context == &out[4], "the message to another peer does not complete first");
	for (uint64_t until = now_ms() + 100; now_ms() < until;) {
		ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN, "there is a completion before the receive is posted");
		ENSURE(fi_cq_read(b.rx, &entry, 1) == -FI_EAGAIN, "a message is received before the receive is posted");
		ENSURE(target[0] == 0, "the memory has changed before the receive");
	}
	OK(fi_trecv(b.ep, in + 1000, 100000, NULL, FI_ADDR_UNSPEC, 1, 0, &in[1000]));
	TRY(next(a.tx, &entry, NULL));
	ENSURE(entry.op_context == &out[0], "the earlier message does not complete before the fenced operation");
	TRY(next(a.tx, &entry, NULL));
	ENSURE(entry.op_context == fenced, "the fenced operation does not complete second");
	for (size_t i = 0; i < (arg == 0 ? 3u : 2u); i++)
		TRY(next(b.rx, &entry, NULL));
	int64_t got[2];
	memcpy(got, in, sizeof got);
	ENSURE((arg == 0 ? got[0] : target[0]) == 5 && got[1] == 6, "%lld %lld %lld", (long long)got[0],
	       (long long)target[0], (long long)got[1]);
	return NULL;
}

/* A read with FI_FENCE that has to wait reads into the program's memory, also with FI_INJECT, which means nothing for reads. */
static const char *fenced_read(size_t arg)
{
	static int64_t there[1000], here[1000];
	int64_t value = 0;
	struct fi_cq_tagged_entry entry;
	struct iovec sink = { here, sizeof here };
	struct side a, b;
	struct fid_mr *mr;

	(void)arg;
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	for (size_t i = 0; i < COUNT(there); i++)
		there[i] = (int64_t)i + 1;
	memset(here, 0, sizeof here);
	OK(fi_mr_reg(b.domain, there, sizeof there, FI_REMOTE_READ, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	struct fi_rma_iov from = { (uintptr_t)there, sizeof there, fi_mr_key(mr) };
	struct fi_msg_rma reads = { .msg_iov = &sink, .iov_count = 1, .addr = a.peer, .rma_iov = &from, .rma_iov_count = 1,
				    .context = &reads };
	/* A fetch has no operand. */
	struct fi_ioc none = { NULL, 1 }, fetched = { &value, 1 };
	struct fi_rma_ioc element = { (uintptr_t)&there[7], 1, fi_mr_key(mr) };
	struct fi_msg_atomic fetch = { .msg_iov = &none, .iov_count = 1, .addr = a.peer, .rma_iov = &element, .rma_iov_count = 1,
				       .datatype = FI_INT64, .op = FI_ATOMIC_READ, .context = &fetch };
	OK(fi_tsend(a.ep, out, 100000, NULL, a.peer, 1, &out[0]));
	OK(fi_readmsg(a.ep, &reads, FI_FENCE | FI_INJECT | FI_COMPLETION));
	OK(fi_fetch_atomicmsg(a.ep, &fetch, &fetched, NULL, 1, FI_FENCE | FI_INJECT | FI_COMPLETION));
	ENSURE(here[0] == 0 && fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN, "the read does not wait for the message");
	OK(fi_trecv(b.ep, in, 100000, NULL, FI_ADDR_UNSPEC, 1, 0, &in[0]));
	TRY(next(a.tx, &entry, NULL));
	ENSURE(entry.op_context == &out[0], "the message does not complete first");
	TRY(next(a.tx, &entry, NULL));
	ENSURE(entry.op_context == &reads, "the read does not complete second");
	ENSURE(!memcmp(here, there, sizeof here), "the memory does not have the data: %lld", (long long)here[0]);
	TRY(next(a.tx, &entry, NULL));
	ENSURE(entry.op_context == &fetch && value == 8, "the fetch returns %lld", (long long)value);
	return NULL;
}

/* A wait for a counter ends if an operation has failed before the wait began, but the provider has not handled it yet. */
static const char *failed_before_the_wait(size_t arg)
{
	struct side a, b;

	(void)arg;
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	OK(fi_write(a.ep, out, 8, NULL, a.peer, 0, 0x12345600, &a));
	sleep_ms(300);
	GIVES(FI_EAVAIL, fi_cntr_wait(a.cntr, 1, 5000));
	return NULL;
}

/* A directed receive stays valid if the peer's lowest index is removed from the address vector and given to another peer. */
static const char *directed_after_remove(size_t arg)
{
	char name[64];
	size_t len = sizeof name;
	struct fi_cq_tagged_entry entry;
	struct side a, b, c;
	fi_addr_t first, second, other;

	(void)arg;
	TRY(open_sides(&a, &b));
	TRY(open_side(&c, 0));
	TRY(introduce(&c, &a));
	first = a.peer;
	OK(fi_getname(&b.ep->fid, name, &len));
	ENSURE(fi_av_insert(a.av, name, 1, &second, 0, NULL) == 1 && second != first, "a second index");
	OK(fi_trecv(a.ep, in, 8, NULL, second, 1, 0, &in[0]));
	OK(fi_av_remove(a.av, &first, 1, 0));
	len = sizeof name;
	OK(fi_getname(&c.ep->fid, name, &len));
	ENSURE(fi_av_insert(a.av, name, 1, &other, 0, NULL) == 1 && other == first, "the index is not used again");
	move_both(&a, &b);
	moving[2] = &c;
	OK(fi_tsend(c.ep, "of c....", 8, NULL, c.peer, 1, &c));
	for (uint64_t until = now_ms() + 50; now_ms() < until;)
		ENSURE(fi_cq_read(a.rx, &entry, 1) == -FI_EAGAIN, "the receive takes the message of another peer");
	OK(fi_tsend(b.ep, "of b....", 8, NULL, b.peer, 1, &b));
	TRY(next(a.rx, &entry, NULL));
	ENSURE(entry.op_context == &in[0] && !memcmp(in, "of b....", 8), "the message of another peer");
	OK(fi_trecv(a.ep, in, 8, NULL, other, 1, 0, &in[0]));
	TRY(next(a.rx, &entry, NULL));
	ENSURE(!memcmp(in, "of c....", 8), "the message of another peer");
	return NULL;
}

/* A sender whose messages have no receive gets FI_EAGAIN at some point; other senders do not. No message is lost. */
static const char *flood(size_t arg)
{
	static uint32_t words[12000];
	struct fi_cq_tagged_entry entry;
	struct side a, b, c;
	uint32_t sent = 0, more = 100, word;
	uint64_t until, quiet;
	bool injects = arg;
	size_t len = injects ? INJECT : EAGER;

	TRY(open_sides(&a, &b));
	TRY(open_side(&c, 0));
	TRY(introduce(&c, &b));
	move_both(&a, &b);
	moving[2] = &c;
	until = now_ms() + 30000;
	for (quiet = now_ms(); sent <= 4000 || now_ms() < quiet + 300;) {
		ENSURE(now_ms() < until && sent < COUNT(words) - more, "%u messages are accepted without a receive", sent);
		struct iovec parts[2] = { { &words[sent], 4 }, { out + 4, len - 4 } };
		ssize_t rc;

		words[sent] = sent;
		if (injects) {
			memcpy(out, &sent, sizeof sent);
			rc = fi_tinject(a.ep, out, len, a.peer, 1);
		} else {
			rc = fi_tsendv(a.ep, parts, NULL, 2, a.peer, 1, &a);
		}
		if (rc == 0) {
			sent++;
			quiet = now_ms();
		}
		fi_cq_read(b.rx, NULL, 0);
		while (fi_cq_read(a.tx, &entry, 1) == 1)
			;
	}
	/* Short and long messages of another sender. */
	for (size_t size = 10; size <= 100000; size *= 10) {
		OK(fi_tsend(c.ep, out, size, NULL, c.peer, 2, &c));
		OK(fi_trecv(b.ep, in, size, NULL, FI_ADDR_UNSPEC, 2, 0, &c));
		TRY(next(b.rx, &entry, NULL));
		ENSURE(entry.op_context == &c && entry.len == size,
		       "the message of another sender has another context, or not %zu bytes", size);
	}
	/* The same sender sends a message whose receive is posted later. */
	OK(fi_tsend(c.ep, out, 100, NULL, c.peer, 2, &c));
	for (uint64_t end = now_ms() + 50; now_ms() < end;)
		fi_cq_read(b.rx, NULL, 0);
	OK(fi_trecv(b.ep, in, 100, NULL, FI_ADDR_UNSPEC, 2, 0, &c));
	TRY(next(b.rx, &entry, NULL));
	ENSURE(entry.op_context == &c, "the message of another sender has another context");
	for (uint32_t i = 0; i < sent; i++) {
		OK(fi_trecv(b.ep, in, len, NULL, b.peer, 1, 0, &b));
		words[sent] = sent;
		struct iovec parts[2] = { { &words[sent], 4 }, { out + 4, len - 4 } };
		if (more && fi_tsendv(a.ep, parts, NULL, 2, a.peer, 1, &a) == 0) {
			sent++;
			more--;
		}
		TRY(next(b.rx, &entry, NULL));
		memcpy(&word, in, sizeof word);
		ENSURE(word == i && entry.len == len && entry.op_context == &b, "message %u is %u", i, word);
		while (fi_cq_read(a.tx, &entry, 1) == 1)
			;
	}
	ENSURE(more < 100, "nothing could be sent again");
	/* There is room now: a message completes without a receive. */
	for (uint64_t end = now_ms() + 50; now_ms() < end;) {
		fi_cq_read(b.rx, NULL, 0);
		while (fi_cq_read(a.tx, &entry, 1) == 1)
			;
	}
	OK(fi_tsend(a.ep, out, 5000, NULL, a.peer, 1, &sent));
	TRY(next(a.tx, &entry, NULL));
	ENSURE(entry.op_context == &sent, "the message without a receive has another context");
	return NULL;
}

/* The number of connected TCP sockets in this process. A connection between two of its endpoints has two. */
static int streams(void)
{
	int found = 0;

	for (int fd = 0; fd < 1024; fd++) {
		struct sockaddr_storage peer;
		socklen_t len = sizeof peer, size = sizeof(int);
		int type = 0;

		found += !getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) && type == SOCK_STREAM &&
			 !getpeername(fd, (struct sockaddr *)&peer, &len) &&
			 (peer.ss_family == AF_INET || peer.ss_family == AF_INET6);
	}
	return found;
}

/* Waits until there are `wanted` connections: a connection ends when both ends have closed it. */
static bool has_streams(int wanted)
{
	for (int ms = 0; ms < 5000 && streams() != wanted; ms++)
		sleep_ms(1);
	return streams() == wanted;
}

enum { UNDERWAY = 256, LINKED = 700, WITH_LOSS = 7 };

/*
 * Messages of all sizes in both directions, some before and some after their receives. Each receive gets the next
 * message.
 */
static const char *exchange_in_order(struct side *a, struct side *b, size_t few, size_t most)
{
	static const size_t lengths[] = { 8, 200, 8, 300, 5000, 8, EAGER, 8, 20000 };
	static uint8_t from[2][UNDERWAY][20000], to[2][UNDERWAY][20000];
	static bool sent_done[2][LINKED], received_done[2][LINKED];
	struct side *sides[2] = { a, b };
	struct fi_cq_tagged_entry entry;
	size_t sent[2] = { 0 }, posted[2] = { 0 }, sent_until[2] = { 0 }, received_until[2] = { 0 };
	/* The time limit is for one event. All messages together take longer if datagrams are lost. */
	uint64_t until = now_ms() + WAIT_MS;

	for (size_t turn = 0, before = 0; before < 4 * LINKED; turn++) {
		before = sent_until[0] + sent_until[1] + received_until[0] + received_until[1];

		ENSURE(now_ms() < until, "messages sent %zu %zu, complete %zu %zu, received %zu %zu", sent[0], sent[1],
		       sent_until[0], sent_until[1], received_until[0], received_until[1]);
		for (size_t i = 0; i < 2; i++) {
			struct side *e = sides[i];
			uint8_t *at = from[i][sent[i] % UNDERWAY];
			size_t len = lengths[sent[i] % COUNT(lengths)];

			/* Few messages are outstanding in the first phase, and many later. */
			if (sent[i] < LINKED && sent[i] - sent_until[i] < (sent[i] < 200 ? few : most)) {
				fill_bytes(at, len, sent[i]);
				ssize_t rc = fi_tsend(e->ep, at, len, NULL, e->peer, sent[i], &sent_done[i][sent[i]]);
				ENSURE(rc == 0 || rc == -FI_EAGAIN, "fi_tsend: %zd", rc);
				sent[i] += rc == 0;
			}
			if (posted[i] < LINKED && posted[i] - received_until[i] < 8 && turn % 5 < 2) {
				at = to[i][posted[i] % UNDERWAY];
				int rc = (int)fi_trecv(e->ep, at, 20000, NULL, e->peer, 0, ~0ull, &received_done[i][posted[i]]);
				ENSURE(!rc, "fi_trecv: %d", rc);
				posted[i]++;
			}
			ssize_t n = fi_cq_read(e->tx, &entry, 1);
			ENSURE(n == 1 || n == -FI_EAGAIN, "a message is not sent: %zd", n);
			if (n == 1) {
				ENSURE(!*(bool *)entry.op_context, "a message completes twice");
				*(bool *)entry.op_context = true;
			}
			n = fi_cq_read(e->rx, &entry, 1);
			ENSURE(n == 1 || n == -FI_EAGAIN, "a message is not received: %zd", n);
			if (n == 1) {
				size_t which = (size_t)((bool *)entry.op_context - received_done[i]);

				len = lengths[which % COUNT(lengths)];
				ENSURE(entry.tag == which && entry.len == len, "receive %zu gets %llu, of %zu bytes", which,
				       (unsigned long long)entry.tag, entry.len);
				TRY(check_bytes(to[i][which % UNDERWAY], len, which));
				received_done[i][which] = true;
			}
			while (sent_until[i] < sent[i] && sent_done[i][sent_until[i]])
				sent_until[i]++;
			while (received_until[i] < posted[i] && received_done[i][received_until[i]])
				received_until[i]++;
		}
		if (sent_until[0] + sent_until[1] + received_until[0] + received_until[1] != before)
			until = now_ms() + WAIT_MS;
	}
	return NULL;
}

/*
 * Runs another process of this program, which prints at its exit how many queue pairs it had with two endpoints. Other
 * providers of libfabric create some too.
 */
static const char *count_queue_pairs(int *count)
{
	char line[300];
	FILE *child;

	*count = 0;
	setenv("ANYWARP_FAULTS", "p=0 -> kill", 1);
	snprintf(line, sizeof line, "/proc/%d/exe --two 2>&1", (int)getpid());
	child = popen(line, "r");
	ENSURE(child, "popen");
	while (fgets(line, sizeof line, child)) {
		const char *at = strstr(line, " queue pairs");

		while (at && at > line && at[-1] >= '0' && at[-1] <= '9')
			at--;
		if (at)
			*count = atoi(at);
	}
	ENSURE(pclose(child) == 0 && *count >= 2, "%d queue pairs", *count);
	return NULL;
}

/* Busy endpoints get a connection. If the connection fails, no message is lost, duplicated or out of order. */
static const char *link_between(size_t arg)
{
	/* Faults of the first and of the second end of the connection. */
	static const char *const faults[][2] = { { NULL, NULL },
						 { "op=send nth=1 -> kill", NULL },
						 { "op=send nth=40 -> kill", NULL },
						 { NULL, "op=send nth=40 -> kill" },
						 { NULL, "op=send nth=1 -> kill" },
						 { "op=send nth=75 -> error=remote-aborted", NULL },
						 { "op=send nth=60 -> kill", "op=send nth=60 -> kill" },
						 { NULL, NULL },
						 { "op=write nth=1 -> kill", NULL },
						 { NULL, "op=write nth=12 -> kill" },
						 { "op=write nth=9 -> error=remote-access", NULL },
						 { "op=bind nth=1 -> error=general", NULL },
						 { NULL, "op=bind nth=12 -> error=general" },
						 { "op=bind nth=30 -> kill", "op=write nth=30 -> kill" } };
	char rules[200] = "";
	struct side a, b;
	int before = 0;

	if (arg)
		TRY(count_queue_pairs(&before));
	for (int i = 0; i < 2; i++)
		if (faults[arg][i])
			snprintf(rules + strlen(rules), sizeof rules - strlen(rules), "qp=#%d %s\n", before + 1 + i,
				 faults[arg][i]);
	/*
	 * Some datagrams are lost and sent again, so that the first messages of the connection overtake earlier ones.
	 */
	if (arg == WITH_LOSS) {
		snprintf(rules, sizeof rules, "loss=30%%");
		/* The provider's default. In the 3 s that main() sets, all repetitions of a datagram may be lost. */
		setenv("FI_ANYWARP_PEER_TIMEOUT_MS", "30000", 1);
	}
	if (arg)
		setenv("ANYWARP_FAULTS", rules, 1);
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	ENSURE(streams() == 0, "%d connections before the first message", streams());
	TRY(exchange_in_order(&a, &b, arg == WITH_LOSS ? UNDERWAY : 4, arg == WITH_LOSS ? UNDERWAY : 64));
	if (arg && arg != WITH_LOSS)
		ENSURE(has_streams(0), "%d connections after the failure", streams());
	else
		ENSURE(streams() == 2, "%d connections between busy endpoints", streams());
	return NULL;
}

/* Sends a number by fi_tinject, which returns FI_EAGAIN until the link has free memory. The device frees the memory of earlier messages
 * when it receives their acknowledgements. */
static const char *inject(struct side *from, fi_addr_t to, uint64_t tag, uint32_t n)
{
	struct fi_cq_tagged_entry entry;
	uint64_t begin = now_ms();
	ssize_t rc;

	while ((rc = fi_tinject(from->ep, &n, sizeof n, to, tag)) == -FI_EAGAIN && now_ms() - begin < 5000)
		ENSURE(fi_cq_read(from->tx, &entry, 1) == -FI_EAGAIN, "fi_tinject has a completion");
	OK(rc);
	return NULL;
}

enum { BY_DEFAULT = 16, CONNECTED = 32 };

/*
 * With FI_DELIVERY_COMPLETE a short message completes when the peer's program has called the provider, which copies the message to
 * the posted receive, or stores it if there is none.
 */
static const char *delivered(size_t arg)
{
	static const size_t lengths[] = { 0, 8, 900, 5000, EAGER };
	uint64_t levels = FI_TRANSMIT | FI_COMPLETION | FI_DELIVERY_COMPLETE;
	struct fi_cq_tagged_entry entry;
	struct side a, b;

	TRY(open_sides(&a, &b));
	if (arg & CONNECTED) {
		TRY(exchange_in_order(&a, &b, 4, 64));
		ENSURE(streams() == 2, "%d connections", streams());
	}
	memset(moving, 0, sizeof moving);
	if (arg & BY_DEFAULT)
		OK(fi_control(&a.ep->fid, FI_SETOPSFLAG, &levels));
	for (size_t i = 0; i < COUNT(lengths); i++) {
		struct iovec piece = { out, lengths[i] };
		struct fi_msg plain = { .msg_iov = &piece, .iov_count = 1, .addr = a.peer, .context = &piece };
		struct fi_msg_tagged tagged = { .msg_iov = &piece, .iov_count = 1, .addr = a.peer, .tag = 9, .context = &piece };

		fill_bytes(out, lengths[i], i + 1);
		memset(in, 0, lengths[i]);
		if (!(arg & EARLY) && arg & TAG)
			OK(fi_trecv(b.ep, in, lengths[i], NULL, FI_ADDR_UNSPEC, 9, 0, in));
		else if (!(arg & EARLY))
			OK(fi_recv(b.ep, in, lengths[i], NULL, FI_ADDR_UNSPEC, in));
		if (arg & BY_DEFAULT)
			OK(fi_send(a.ep, out, lengths[i], NULL, a.peer, &piece));
		else if (arg & TAG)
			OK(fi_tsendmsg(a.ep, &tagged, FI_COMPLETION | FI_DELIVERY_COMPLETE));
		else
			OK(fi_sendmsg(a.ep, &plain, FI_COMPLETION | FI_DELIVERY_COMPLETE));
		for (uint64_t until = now_ms() + 50; now_ms() < until;)
			ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN, "%zu bytes: complete although the peer makes no call", lengths[i]);
		if (arg & EARLY) {
			moving[0] = &b;
			TRY(next(a.tx, &entry, NULL));
			moving[0] = NULL;
			ENSURE(entry.op_context == &piece, "%zu bytes: a foreign context", lengths[i]);
			if (arg & TAG)
				OK(fi_trecv(b.ep, in, lengths[i], NULL, FI_ADDR_UNSPEC, 9, 0, in));
			else
				OK(fi_recv(b.ep, in, lengths[i], NULL, FI_ADDR_UNSPEC, in));
			TRY(next(b.rx, &entry, NULL));
		} else {
			TRY(next(b.rx, &entry, NULL));
			TRY(next(a.tx, &entry, NULL));
			ENSURE(entry.op_context == &piece, "%zu bytes: a foreign context", lengths[i]);
		}
		TRY(check_bytes(in, lengths[i], i + 1));
	}
	return NULL;
}

/* Sends numbers to an endpoint, each when the one before has arrived. */
static const char *exchange_numbers(struct side *from, fi_addr_t to, struct side *at, uint32_t count)
{
	struct fi_cq_tagged_entry entry;

	move_both(from, at);
	for (uint32_t n = 0; n < count; n++) {
		uint32_t got = ~0u;

		OK(fi_trecv(at->ep, &got, 4, NULL, FI_ADDR_UNSPEC, 1, 0, NULL));
		TRY(inject(from, to, 1, n));
		TRY(next(at->rx, &entry, NULL));
		ENSURE(got == n, "message %u is %u", n, got);
	}
	return NULL;
}

/* Messages of a closed endpoint are still delivered, and neither end waits for the other when it closes. */
static const char *link_closes(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct side a, b;
	uint64_t begin;
	uint32_t got;

	(void)arg;
	TRY(open_sides(&a, &b));
	TRY(exchange_numbers(&a, a.peer, &b, 200));
	ENSURE(streams() == 2, "%d connections", streams());
	for (uint32_t n = 0; n < 20; n++)
		TRY(inject(&a, a.peer, 2, n));
	begin = now_ms();
	ENSURE(!close_now(a.ep), "fi_close");
	ENSURE(now_ms() - begin < 1000, "closing takes %llu ms", (unsigned long long)(now_ms() - begin));
	for (uint32_t n = 0; n < 20; n++) {
		OK(fi_trecv(b.ep, &got, 4, NULL, FI_ADDR_UNSPEC, 2, 0, &b));
		memset(moving, 0, sizeof moving);
		TRY(next(b.rx, &entry, NULL));
		ENSURE(got == n, "message %u is %u after the close", n, got);
	}
	begin = now_ms();
	ENSURE(!close_now(b.ep), "fi_close");
	ENSURE(now_ms() - begin < 1000, "closing takes %llu ms", (unsigned long long)(now_ms() - begin));
	return NULL;
}

/* Orders two endpoints by their names, as the provider does: the one with the lower name offers a connection. */
static const char *order_by_name(struct side *low, struct side *high)
{
	uint8_t names[2][64] = { { 0 } };
	size_t len = sizeof names[0];

	OK(fi_getname(&low->ep->fid, names[0], &len));
	len = sizeof names[1];
	OK(fi_getname(&high->ep->fid, names[1], &len));
	if (memcmp(names[0], names[1], len) > 0) {
		struct side moved = *low;

		*low = *high;
		*high = moved;
	}
	return NULL;
}

/*
 * An endpoint offers a connection and is closed before the other end has accepted it. That end still notices that its peer is gone: a
 * message that waits for a receive of the peer fails.
 */
static const char *link_abandoned(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct side low, high;
	uint32_t got;

	(void)arg;
	setenv("FI_ANYWARP_PEER_TIMEOUT_MS", "1000", 1);
	TRY(open_sides(&low, &high));
	TRY(order_by_name(&low, &high));
	/* The offer follows the 64th message. After the 62nd number, `high` makes no progress until `low` is closed. */
	for (uint32_t n = 0; n < 63; n++) {
		if (n == 50)
			OK(fi_send(high.ep, out, 100000, NULL, high.peer, &high));
		OK(fi_trecv(high.ep, &got, 4, NULL, FI_ADDR_UNSPEC, 1, 0, &high));
		TRY(inject(&low, low.peer, 1, n));
		if (n < 62)
			TRY(next(high.rx, &entry, NULL));
	}
	ENSURE(!close_now(low.ep), "fi_close");
	TRY(next(high.rx, &entry, NULL));
	ENSURE(got == 62, "the last message is %u", got);
	/* Now `high` connects its queue pair to that of the closed endpoint. */
	TRY(next_error(high.tx, &error, 10000));
	ENSURE(error.err == FI_EHOSTUNREACH || error.err == FI_ECONNRESET, "%s", fi_strerror(error.err));
	return NULL;
}

/*
 * Connections to closed endpoints do not count against the limit: one endpoint connects to more endpoints than the limit, each of which
 * is closed before the next one is opened.
 */
static const char *links_of_closed_peers(size_t arg)
{
	struct side a, other;

	(void)arg;
	TRY(open_side(&a, 0));
	for (size_t i = 0; i < 12; i++) {
		int before = streams();

		TRY(open_side(&other, 0));
		TRY(introduce(&a, &other));
		TRY(introduce(&other, &a));
		TRY(exchange_numbers(&a, a.peer, &other, 200));
		/* Two ends are new, and one of an earlier connection may have been closed. */
		ENSURE(streams() > before, "endpoint %zu has no connection: %d before, %d now", i, before, streams());
		ENSURE(!close_now(other.ep), "fi_close");
		memset(moving, 0, sizeof moving);
		moving[0] = &a;
		for (uint64_t until = now_ms() + 20; now_ms() < until;)
			fi_cq_read(a.rx, NULL, 0);
	}
	return NULL;
}

static void *close_endpoint(void *side)
{
	uint64_t begin = now_ms();

	if (close_now(((struct side *)side)->ep))
		return NULL;
	return (void *)(uintptr_t)(now_ms() - begin + 1);
}

/*
 * An endpoint that is closing makes no new connection, although its peer sends so many messages that one of the two would offer one. The
 * close takes long because a third endpoint does not receive.
 */
static const char *no_link_at_the_end(size_t peer_offers)
{
	uint32_t number = 0, sent = 0;
	struct side low, high, silent;
	struct side *closes = peer_offers ? &high : &low, *peer = peer_offers ? &low : &high;
	fi_addr_t to_peer;
	pthread_t thread;
	void *ms;
	int most = 0;

	TRY(open_sides(&low, &high));
	TRY(order_by_name(&low, &high));
	TRY(open_side(&silent, 0));
	to_peer = closes->peer;
	TRY(introduce(closes, &silent));
	TRY(exchange_numbers(closes, to_peer, peer, 5));
	while (sent < 1000 && fi_tinject(closes->ep, &number, sizeof number, closes->peer, 3) == 0)
		sent++;
	ENSURE(!pthread_create(&thread, NULL, close_endpoint, closes), "pthread_create");
	sleep_ms(50);
	for (uint64_t until = now_ms() + 1000; now_ms() < until; most = streams() > most ? streams() : most) {
		fi_tinject(peer->ep, &number, sizeof number, peer->peer, 1);
		fi_cq_read(peer->tx, NULL, 0);
		fi_cq_read(peer->rx, NULL, 0);
	}
	pthread_join(thread, &ms);
	ENSURE((uintptr_t)ms > 1000, "closing takes %zu ms, after %u messages", (size_t)(uintptr_t)ms, sent);
	ENSURE(most == 0, "%d connections while an endpoint closes", most);
	return NULL;
}

/* Injected messages that wait at their sender for a receive arrive although the sender's endpoint is closed. */
static const char *closes_after_inject(size_t arg)
{
	/* More than the receiver stores, and few enough to be received within the ten seconds that closing may take. */
	enum { MOST = 1500 };
	struct fi_cq_tagged_entry entry;
	struct side a, b;
	uint32_t sent = 0, got;
	pthread_t thread;
	void *ms;

	(void)arg;
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	for (uint64_t quiet = now_ms(); sent < MOST && now_ms() < quiet + 300;) {
		memcpy(out, &sent, sizeof sent);
		if (fi_tinject(a.ep, out, INJECT, a.peer, 1) == 0) {
			sent++;
			quiet = now_ms();
		}
		fi_cq_read(b.rx, NULL, 0);
		fi_cq_read(a.tx, NULL, 0);
	}
	memset(moving, 0, sizeof moving);
	ENSURE(!pthread_create(&thread, NULL, close_endpoint, &a), "pthread_create");
	sleep_ms(50);
	const char *why = NULL;
	for (uint32_t i = 0; i < sent && !why; i++) {
		why = fi_trecv(b.ep, in, INJECT, NULL, FI_ADDR_UNSPEC, 1, 0, &b) ? "fi_trecv" : next(b.rx, &entry, NULL);
		memcpy(&got, in, sizeof got);
		if (why || got != i)
			why = because("message %u of %u: %s", i, sent, why ? why : "another one arrives");
	}
	pthread_join(thread, &ms);
	TRY(why);
	ENSURE((uintptr_t)ms > 40, "no message has to wait: closing takes %zu ms", (size_t)(uintptr_t)ms);
	return NULL;
}

/* A receiver takes messages in the reverse order. Many of the messages have to wait at their sender. */
static const char *receives_in_reverse(size_t arg)
{
	enum { MOST = 6000 };
	static uint32_t words[MOST];
	struct fi_cq_tagged_entry entry;
	struct side a, b;
	uint32_t sent = 0, word;

	(void)arg;
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	for (uint64_t quiet = now_ms(); sent < MOST && now_ms() < quiet + 300;) {
		struct iovec parts[2] = { { &words[sent], 4 }, { out + 4, EAGER - 4 } };

		words[sent] = sent;
		if (fi_tsendv(a.ep, parts, NULL, 2, a.peer, sent, &a) == 0) {
			sent++;
			quiet = now_ms();
		}
		fi_cq_read(b.rx, NULL, 0);
		while (fi_cq_read(a.tx, &entry, 1) == 1)
			;
	}
	ENSURE(sent > 4000, "only %u messages are accepted", sent);
	while (sent > 0) {
		sent--;
		OK(fi_trecv(b.ep, in, EAGER, NULL, b.peer, sent, 0, &b));
		TRY(next(b.rx, &entry, NULL));
		memcpy(&word, in, sizeof word);
		ENSURE(word == sent && entry.tag == sent && entry.len == EAGER, "message %u is %u", sent, word);
		while (fi_cq_read(a.tx, &entry, 1) == 1)
			;
	}
	return NULL;
}

/* With FI_ANYWARP_LINKS=0 there are no connections. Without the variable there are connections to a limited number of peers. */
static const char *links_limited(size_t arg)
{
	struct side a, other[10];
	fi_addr_t peers[COUNT(other)];

	if (arg)
		setenv("FI_ANYWARP_LINKS", "0", 1);
	TRY(open_side(&a, 0));
	for (size_t i = 0; i < COUNT(other); i++) {
		TRY(open_side(&other[i], 0));
		TRY(introduce(&a, &other[i]));
		peers[i] = a.peer;
		TRY(introduce(&other[i], &a));
	}
	for (size_t i = 0; i < COUNT(other); i++)
		TRY(exchange_numbers(&a, peers[i], &other[i], 200));
	ENSURE(streams() == (arg ? 0 : 16), "%d connections", streams());
	return NULL;
}

/* A message that does not fit fills the buffer, and the error reports the excess length. */
static const char *truncation(size_t arg)
{
	size_t len = arg, room = arg / 2;
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct side a, b;

	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	fill_bytes(out, len, 3);
	memset(in, 0xee, len);
	OK(fi_trecv(b.ep, in, room, NULL, b.peer, 1, 0, &b));
	OK(fi_tsend(a.ep, out, len, NULL, a.peer, 1, &a));
	TRY(next_error(b.rx, &error, WAIT_MS));
	ENSURE(error.err == FI_ETRUNC && error.olen == len - room && error.len == room && error.op_context == &b,
	       "%s, %zu of %zu, %zu over", fi_strerror(error.err), error.len, room, error.olen);
	TRY(check_bytes(in, room, 3));
	ENSURE(in[room] == 0xee, "the byte after the buffer is written");
	TRY(next(a.tx, &entry, NULL));
	ENSURE(entry.op_context == &a, "the send has another context, or other flags");
	return NULL;
}

static const char *cancel(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct side a, b;
	int context[2];

	(void)arg;
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	OK(fi_trecv(b.ep, in, 100, NULL, b.peer, 1, 0, &context[0]));
	OK(fi_trecv(b.ep, in + 100, 100, NULL, b.peer, 1, 0, &context[1]));
	OK(fi_cancel(&b.ep->fid, &context[0]));
	GIVES(ENOENT, fi_cancel(&b.ep->fid, &context[0]));
	TRY(next_error(b.rx, &error, WAIT_MS));
	ENSURE(error.err == FI_ECANCELED && error.op_context == &context[0], "%s", fi_strerror(error.err));
	fill_bytes(out, 100, 1);
	OK(fi_tsend(a.ep, out, 100, NULL, a.peer, 1, &a));
	TRY(next(b.rx, &entry, NULL));
	ENSURE(entry.op_context == &context[1], "another receive than the one that is left completes");
	return check_bytes(in + 100, 100, 1);
}

/* A buffer for many short and long messages is returned to the program once, after the last write to the buffer. */
static const char *multi_recv(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct side a, b;
	struct iovec iov = { in, 200000 };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = &b };
	size_t least = 30000, got = 0, sent = 0;
	uint8_t *expected = in;

	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	OK(fi_setopt(&b.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &least, sizeof least));
	if (!arg)
		OK(fi_recvmsg(b.ep, &msg, FI_MULTI_RECV));
	fill_bytes(out, 200000, 9);
	for (size_t len = 100; sent + len <= 182000; len = len == 100 ? 20000 : 100) {
		OK(fi_send(a.ep, out + sent, len, NULL, a.peer, &a));
		sent += len;
		if (arg)
			for (uint64_t until = now_ms() + 20; now_ms() < until;)
				fi_cq_read(b.rx, NULL, 0);
	}
	if (arg)
		OK(fi_recvmsg(b.ep, &msg, FI_MULTI_RECV));
	bool over = false;
	while (!over) {
		TRY(next(b.rx, &entry, NULL));
		ENSURE(entry.flags & FI_RECV && (uint8_t *)entry.buf >= in,
		       "a completion is not of a receive, or has an address before the buffer");
		got += entry.len;
		over = entry.flags & FI_MULTI_RECV;
		if (entry.buf == expected)
			expected += entry.len;
	}
	ENSURE(got > 170000 && got <= 200000 && got <= sent, "%zu of %zu when the buffer came back", got, sent);
	return check_bytes(in, got, 9);
}

static const char *peek_and_claim(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct side a, b;
	size_t len = arg;
	struct iovec iov = { in, sizeof in };
	struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = 1, .tag = 4, .context = &b };

	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	msg.addr = b.peer;
	OK(fi_trecvmsg(b.ep, &msg, FI_PEEK));
	TRY(next_error(b.rx, &error, WAIT_MS));
	ENSURE(error.err == FI_ENOMSG && error.op_context == &b, "%s", fi_strerror(error.err));
	for (size_t i = 0; i < 3; i++) {
		fill_bytes(out, len, i);
		OK(fi_tsend(a.ep, out, len, NULL, a.peer, 4, &a));
		for (;;) { /* until the message has arrived */
			OK(fi_trecvmsg(b.ep, &msg, i ? FI_PEEK | FI_CLAIM : FI_PEEK));
			ssize_t n = fi_cq_read(b.rx, &entry, 1);
			if (n == 1)
				break;
			ENSURE(n == -FI_EAVAIL && fi_cq_readerr(b.rx, &error, 0) == 1 && error.err == FI_ENOMSG, "%zd", n);
			fi_cq_read(a.tx, NULL, 0);
		}
		ENSURE(entry.len == len && entry.tag == 4 && entry.op_context == &b, "%zu bytes", entry.len);
		switch (i) {
		case 0: OK(fi_trecv(b.ep, in, sizeof in, NULL, b.peer, 4, 0, &b)); break;
		case 1: OK(fi_trecvmsg(b.ep, &msg, FI_CLAIM)); break;
		case 2: OK(fi_trecvmsg(b.ep, &msg, FI_CLAIM | FI_DISCARD)); break;
		}
		TRY(next(b.rx, &entry, NULL));
		ENSURE(entry.op_context == &b && entry.len == (i < 2 ? len : 0), "%zu: %zu bytes", i, entry.len);
		if (i < 2)
			TRY(check_bytes(in, len, i));
		TRY(next(a.tx, &entry, NULL));
	}
	GIVES(FI_EINVAL, fi_trecvmsg(b.ep, &msg, FI_CLAIM));
	return NULL;
}

/* Only operations that request a completion have one. */
static const char *selective(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct side a, b;
	struct iovec iov = { out, 50 };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .context = &a };

	(void)arg;
	TRY(open_side(&a, FI_SELECTIVE_COMPLETION));
	TRY(open_side(&b, 0));
	TRY(introduce(&a, &b));
	TRY(introduce(&b, &a));
	move_both(&a, &b);
	msg.addr = a.peer;
	for (size_t i = 0; i < 2; i++)
		OK(fi_recv(b.ep, in, 50, NULL, FI_ADDR_UNSPEC, &b));
	OK(fi_sendmsg(a.ep, &msg, 0));
	OK(fi_sendmsg(a.ep, &msg, FI_COMPLETION | FI_DELIVERY_COMPLETE));
	TRY(next(b.rx, &entry, NULL));
	TRY(next(b.rx, &entry, NULL));
	TRY(next(a.tx, &entry, NULL));
	ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN, "there is a completion that was not requested");
	ENSURE(fi_cntr_wait(a.cntr, 2, 5000) == 0, "the counter has %llu", (unsigned long long)fi_cntr_read(a.cntr));
	/* A counter may be bound to an endpoint that is enabled. */
	OK(fi_ep_bind(b.ep, &b.cntr->fid, FI_RECV));
	OK(fi_recv(b.ep, in, 50, NULL, FI_ADDR_UNSPEC, &b));
	OK(fi_sendmsg(a.ep, &msg, 0));
	TRY(next(b.rx, &entry, NULL));
	ENSURE(fi_cntr_read(b.cntr) == 1, "the counter of receives has %llu", (unsigned long long)fi_cntr_read(b.cntr));
	return NULL;
}

/* Threads use the same two endpoints for short and long messages. Each thread has its own tag. */
struct worker {
	pthread_t thread;
	struct side *from, *to;
	uint64_t tag;
	const char *why;
	char text[200];
};

enum { THREADS = 4, ROUNDS = 60 };

static atomic_int arrived[THREADS][2];

/* Reads a completion, which may belong to any thread, and counts it for the thread in its context. */
static const char *reap(struct worker *all, struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	ssize_t n = fi_cq_read(cq, &entry, 1);

	if (n == -FI_EAGAIN)
		return NULL;
	ENSURE(n == 1, "fi_cq_read returns %zd", n);
	size_t which = (size_t)((struct worker *)entry.op_context - all);
	ENSURE(which < THREADS, "a completion has the context of no worker");
	arrived[which][entry.flags & FI_RECV ? 1 : 0]++;
	return NULL;
}

static struct worker workers[THREADS];

static const char *exchange(struct worker *w, size_t which)
{
	static uint8_t from[THREADS][60000], to[THREADS][60000];

	for (size_t i = 0; i < ROUNDS; i++) {
		size_t len = i % 3 == 0 ? 60000 : i % 3 == 1 ? 5000 : 50;
		uint64_t until = now_ms() + WAIT_MS;
		int sent = arrived[which][0], received = arrived[which][1];
		ssize_t rc;

		fill_bytes(from[which], len, i + which);
		memset(to[which], 0, len);
		OK(fi_trecv(w->to->ep, to[which], len, NULL, FI_ADDR_UNSPEC, w->tag, 0, w));
		while ((rc = fi_tsend(w->from->ep, from[which], len, NULL, w->from->peer, w->tag, w)) == -FI_EAGAIN)
			ENSURE(now_ms() < until, "no room to send");
		OK(rc);
		while (arrived[which][0] == sent || arrived[which][1] == received) {
			ENSURE(now_ms() < until, "round %zu does not end", i);
			TRY(reap(workers, w->from->tx));
			TRY(reap(workers, w->to->rx));
		}
		TRY(check_bytes(to[which], len, i + which));
	}
	return NULL;
}

static void *work(void *arg)
{
	struct worker *w = arg;
	const char *why = exchange(w, (size_t)(w - workers));

	if (why) {
		snprintf(w->text, sizeof w->text, "%s", why);
		w->why = w->text;
	}
	return NULL;
}

static const char *threads(size_t arg)
{
	struct side a, b;

	(void)arg;
	TRY(open_sides(&a, &b));
	for (size_t i = 0; i < THREADS; i++) {
		workers[i] = (struct worker){ .from = i % 2 ? &a : &b, .to = i % 2 ? &b : &a, .tag = 100 + i };
		arrived[i][0] = arrived[i][1] = 0;
		ENSURE(!pthread_create(&workers[i].thread, NULL, work, &workers[i]), "pthread_create");
	}
	for (size_t i = 0; i < THREADS; i++)
		pthread_join(workers[i].thread, NULL);
	for (size_t i = 0; i < THREADS; i++)
		ENSURE(!workers[i].why, "thread %zu: %s", i, workers[i].why);
	return NULL;
}

/* ---------------------------------------------------------------- one-sided */

static const char *memory(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct fid_mr *mr;
	struct side a, b;

	(void)arg;
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	OK(fi_mr_reg(b.domain, in, 1 << 20, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	for (size_t i = 0; i < COUNT(sizes); i++) {
		size_t len = sizes[i];
		uint64_t at = (uintptr_t)in, key = fi_mr_key(mr);

		fill_bytes(out, len, i);
		memset(in, 0, len);
		if (i % 2)
			OK(fi_write(a.ep, out, len, NULL, a.peer, at, key, &a));
		else
			OK(fi_writedata(a.ep, out, len, NULL, 0x77 + i, a.peer, at, key, &a));
		TRY(next(a.tx, &entry, NULL));
		ENSURE(entry.flags & FI_RMA && entry.flags & FI_WRITE && entry.op_context == &a,
		       "the completion is not that of the write");
		TRY(check_bytes(in, len, i));
		if (i % 2 == 0) {
			TRY(next(b.rx, &entry, NULL));
			ENSURE(entry.flags & FI_REMOTE_CQ_DATA && entry.flags & FI_REMOTE_WRITE && entry.data == 0x77 + i,
			       "the target has no completion with the data of the write");
		}
		memset(out, 0, len);
		OK(fi_read(a.ep, out, len, NULL, a.peer, at, key, &a));
		TRY(next(a.tx, &entry, NULL));
		ENSURE(entry.flags & FI_READ, "the completion is not that of the read");
		TRY(check_bytes(out, len, i));
	}
	/* Unknown memory, or a range beyond its end. */
	static const struct {
		uint64_t key, skip;
		bool read;
	} bad[] = { { 1, 0, false }, { 0, 1 << 20, false }, { 1, 0, true }, { 0, 1 << 20, true } };
	for (size_t i = 0; i < COUNT(bad); i++) {
		uint64_t at = (uintptr_t)in + bad[i].skip, key = fi_mr_key(mr) ^ (bad[i].key << 9);

		if (bad[i].read)
			OK(fi_read(a.ep, out, 100, NULL, a.peer, at, key, &a));
		else
			OK(fi_write(a.ep, out, 100, NULL, a.peer, at, key, &a));
		TRY(next_error(a.tx, &error, WAIT_MS));
		ENSURE(error.err == FI_EACCES && error.op_context == &a, "%zu: %s", i, fi_strerror(error.err));
	}
	GIVES(FI_ENOKEY, fi_write(a.ep, out, 100, NULL, a.peer, 0, 1ull << 40, &a));
	OK(fi_write(a.ep, out, 100, NULL, a.peer, (uintptr_t)in, fi_mr_key(mr), &a));
	return next(a.tx, &entry, NULL);
}

static const char *atomics(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct fi_atomic_attr attr;
	static int64_t target[512], operand[512], result[512], compare[512];
	static const uint8_t constant[64];
	struct fid_mr *mr, *read_only, *refused;
	struct side a, b;
	uint64_t at = (uintptr_t)target, key;
	size_t n = arg, most;

	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	OK(fi_mr_reg(b.domain, target, sizeof target, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	OK(fi_mr_reg(b.domain, target, sizeof target, FI_REMOTE_READ, 0, 0, 0, &read_only, NULL));
	keep(close_fid, read_only, "read-only region");
	ENSURE(fi_mr_reg(b.domain, constant, sizeof constant, FI_REMOTE_WRITE, 0, 0, 0, &refused, NULL) == -EFAULT,
	       "read-only memory is registered for writing");
	OK(fi_mr_reg(b.domain, constant, sizeof constant, FI_REMOTE_READ | FI_SEND, 0, 0, 0, &refused, NULL));
	OK(fi_close(&refused->fid));
	key = fi_mr_key(mr);
	for (size_t i = 0; i < n; i++) {
		target[i] = (int64_t)i;
		operand[i] = 1000;
		compare[i] = (int64_t)(i % 2 ? i + 1000 : i);
	}
	OK(fi_atomic(a.ep, operand, n, NULL, a.peer, at, key, FI_INT64, FI_SUM, &a));
	TRY(next(a.tx, &entry, NULL));
	ENSURE(entry.flags & FI_ATOMIC && entry.flags & FI_WRITE && entry.op_context == &a, "flags");
	for (size_t i = 0; i < n; i++)
		ENSURE(target[i] == (int64_t)i + 1000, "element %zu: the sum is %lld", i, (long long)target[i]);
	OK(fi_fetch_atomic(a.ep, operand, n, NULL, result, NULL, a.peer, at, key, FI_INT64, FI_ATOMIC_WRITE, &a));
	TRY(next(a.tx, &entry, NULL));
	for (size_t i = 0; i < n; i++)
		ENSURE(target[i] == 1000 && result[i] == (int64_t)i + 1000, "element %zu: another result of the swap", i);
	OK(fi_fetch_atomic(a.ep, NULL, n, NULL, result, NULL, a.peer, at, key, FI_INT64, FI_ATOMIC_READ, &a));
	TRY(next(a.tx, &entry, NULL));
	ENSURE(result[n - 1] == 1000, "the atomic read returns another value");
	/* A read has no operands: their list is ignored. */
	struct fi_ioc into = { result, n };
	result[n - 1] = 0;
	OK(fi_fetch_atomicv(a.ep, NULL, NULL, 1, &into, NULL, 1, a.peer, at, key, FI_INT64, FI_ATOMIC_READ, &a));
	TRY(next(a.tx, &entry, NULL));
	ENSURE(result[n - 1] == 1000, "the atomic read into a list returns another value");
	for (size_t i = 0; i < n; i++)
		target[i] = (int64_t)i + 1000;
	OK(fi_compare_atomic(a.ep, operand, n, NULL, compare, NULL, result, NULL, a.peer, at, key, FI_INT64, FI_CSWAP, &a));
	TRY(next(a.tx, &entry, NULL));
	for (size_t i = 0; i < n; i++)
		ENSURE(result[i] == (int64_t)i + 1000 && target[i] == (i % 2 ? 1000 : (int64_t)i + 1000),
		       "element %zu: another result of the compare and swap", i);
	OK(fi_inject_atomic(a.ep, operand, 1, a.peer, at, key, FI_INT64, FI_BXOR));
	/* Unknown memory, memory without write access, and ranges that end after the memory or begin before it. */
	const struct {
		uint64_t at, key;
	} bad[] = { { at, key ^ 512 }, { at, fi_mr_key(read_only) }, { at + sizeof target - 8 * n + 8, key }, { at - 8, key } };
	for (size_t i = 0; i < COUNT(bad); i++) {
		OK(fi_atomic(a.ep, operand, n, NULL, a.peer, bad[i].at, bad[i].key, FI_INT64, FI_SUM, &error));
		TRY(next_error(a.tx, &error, WAIT_MS));
		ENSURE(error.err == FI_EACCES && error.op_context == &error, "%zu: %s", i, fi_strerror(error.err));
	}
	ENSURE(target[0] == ((0 + 1000) ^ 1000), "after the injected operation the element is %lld", (long long)target[0]);
	OK(fi_fetch_atomic(a.ep, NULL, n, NULL, result, NULL, a.peer, at, fi_mr_key(read_only), FI_INT64, FI_ATOMIC_READ, &a));
	TRY(next(a.tx, &entry, NULL));
	OK(fi_atomicvalid(a.ep, FI_DOUBLE, FI_SUM, &most));
	ENSURE(most == 512, "fi_atomicvalid gives %zu elements", most);
	GIVES(FI_EOPNOTSUPP, fi_atomicvalid(a.ep, FI_DOUBLE, FI_BOR, &most));
	GIVES(FI_EOPNOTSUPP, fi_query_atomic(a.domain, FI_LONG_DOUBLE, FI_SUM, &attr, 0));
	GIVES(FI_EINVAL, fi_atomic(a.ep, operand, 513, NULL, a.peer, at, key, FI_INT64, FI_SUM, &a));
	GIVES(FI_EOPNOTSUPP, fi_atomic(a.ep, operand, 1, NULL, a.peer, at, key, FI_INT64, FI_CSWAP, &a));
	ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN, "an unexpected completion");
	return NULL;
}

/* ---------------------------------------------------------------- waiting */

static const char *wait_object(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct fid *fids[1];
	struct side a;
	uint64_t begin;
	int fd;

	TRY(open_side(&a, 0));
	GIVES(0, fi_control(&a.rx->fid, FI_GETWAIT, &fd));
	fids[0] = &a.rx->fid;
	begin = now_ms();
	ENSURE(fi_cq_sread(a.rx, &entry, 1, NULL, 100) == -FI_EAGAIN && now_ms() - begin >= 90, "fi_cq_sread did not wait");
	char name[64];
	size_t len = sizeof name;
	OK(fi_getname(&a.ep->fid, name, &len));
	ENSURE(fi_av_insert(a.av, name, 1, &a.self, 0, NULL) == 1, "fi_av_insert");
	OK(fi_recv(a.ep, in, 10, NULL, FI_ADDR_UNSPEC, &a));
	OK(fi_trywait(fabric, fids, 1));
	struct pollfd poll_fd = { .fd = fd, .events = POLLIN };
	ENSURE(poll(&poll_fd, 1, 50) == 0, "the descriptor is readable without a completion");
	OK(fi_inject(a.ep, "0123456789", 10, a.self));
	if (arg) {
		ENSURE(fi_cq_sread(a.rx, &entry, 1, NULL, 5000) == 1, "fi_cq_sread");
	} else {
		while (fi_cq_read(a.rx, &entry, 1) == -FI_EAGAIN) {
			int rc = fi_trywait(fabric, fids, 1);
			ENSURE(rc == 0 || rc == -FI_EAGAIN, "fi_trywait: %d", rc);
			if (rc == 0)
				ENSURE(poll(&poll_fd, 1, 5000) == 1, "the descriptor does not become readable");
		}
	}
	ENSURE(entry.len == 10 && !memcmp(in, "0123456789", 10), "the message has other bytes");
	return NULL;
}

/* Many messages without a receive have arrived before the message that the program waits for. The program must not sleep. */
static const char *wait_behind_others(size_t arg)
{
	enum { OTHERS = 100 };
	struct fi_cq_tagged_entry entry;
	struct fid *fids[1];
	struct side a, b;
	int fd;

	(void)arg;
	TRY(open_sides(&a, &b));
	GIVES(0, fi_control(&b.rx->fid, FI_GETWAIT, &fd));
	fids[0] = &b.rx->fid;
	struct pollfd poll_fd = { .fd = fd, .events = POLLIN };
	OK(fi_trecv(b.ep, in, 10, NULL, FI_ADDR_UNSPEC, 1, 0, &b));
	OK(fi_trywait(fabric, fids, 1));
	for (size_t i = 0; i <= OTHERS; i++) {
		OK(fi_tsend(a.ep, "0123456789", 10, NULL, a.peer, i < OTHERS ? 2 : 1, &a));
		fi_cq_read(a.tx, NULL, 0);
	}
	/* The device has received them all. Nothing else calls the library for `b`. */
	memset(moving, 0, sizeof moving);
	for (size_t i = 0; i <= OTHERS; i++)
		TRY(next(a.tx, &entry, NULL));
	ENSURE(poll(&poll_fd, 1, 5000) == 1, "the descriptor does not become readable");
	while (fi_cq_read(b.rx, &entry, 1) == -FI_EAGAIN) {
		int rc = fi_trywait(fabric, fids, 1);
		ENSURE(rc == 0 || rc == -FI_EAGAIN, "fi_trywait: %d", rc);
		if (rc == 0)
			ENSURE(poll(&poll_fd, 1, 2000) == 1, "the program sleeps although its message has arrived");
	}
	ENSURE(entry.op_context == &b && entry.len == 10, "another completion");
	return NULL;
}

/* ---------------------------------------------------------------- failures */

/* Inserts the name of the first end, which is in hexadecimal. */
static const char *insert_hex(struct side *e, const char *hex)
{
	uint8_t name[16];

	for (size_t i = 0; i < sizeof name; i++) {
		unsigned int byte = 0;

		sscanf(hex + 2 * i, "%2x", &byte);
		name[i] = (uint8_t)byte;
	}
	ENSURE(fi_av_insert(e->av, name, 1, &e->peer, 0, NULL) == 1, "fi_av_insert");
	return NULL;
}

/* Runs the other end, in a separate process: gets the name of the first end, prints its own name, and polls unless it is `idle`. */
static int be_a_peer(const char *hex, bool idle)
{
	char name[64] = { 0 };
	size_t len = sizeof name;
	struct side e;
	const char *why = open_side(&e, 0);

	if (!why && fi_getname(&e.ep->fid, name, &len))
		why = "fi_getname";
	if (!why)
		why = insert_hex(&e, hex);
	for (int i = 0; i < 200 && !why; i++)
		if (fi_trecv(e.ep, in, 10, NULL, e.peer, 77, 0, NULL))
			why = "fi_trecv";
	if (why || write(1, name, sizeof name) != sizeof name)
		return 1;
	while (idle)
		pause();
	for (;;)
		fi_cq_read(e.rx, NULL, 0);
}

/*
 * Starts the other end in a separate process, whose arguments are how[0], the name of this end, and the rest of `how`. `from` and
 * `to` are its output and its input.
 */
static const char *start_process(struct side *a, pid_t *child, const char *const how[4], int *from, int *to)
{
	char name[64], hex[40];
	size_t len = sizeof name;
	int output[2], input[2];

	OK(fi_getname(&a->ep->fid, name, &len));
	for (size_t i = 0; i < 16; i++)
		snprintf(hex + 2 * i, 3, "%02x", (uint8_t)name[i]);
	ENSURE(!pipe(output) && !pipe(input), "pipe");
	*child = fork();
	ENSURE(*child >= 0, "fork");
	if (*child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		dup2(input[0], 0);
		dup2(output[1], 1);
		execl("/proc/self/exe", "fi", how[0], hex, how[1], how[2], how[3], NULL);
		_exit(9);
	}
	close(output[1]);
	close(input[0]);
	*from = output[0];
	*to = input[1];
	ENSURE(read(*from, name, sizeof name) == sizeof name, "the peer does not tell its name");
	ENSURE(fi_av_insert(a->av, name, 1, &a->peer, 0, NULL) == 1, "fi_av_insert");
	return NULL;
}

static const char *start_peer(struct side *a, pid_t *child, const char *kind)
{
	const char *const how[4] = { kind };
	int from, to;

	TRY(start_process(a, child, how, &from, &to));
	close(from);
	close(to);
	return NULL;
}

/* A message with FI_DELIVERY_COMPLETE fails if the peer's device has received it, but the peer ends before its program makes a call. */
static const char *not_delivered(size_t arg)
{
	struct iovec piece = { out, 8 };
	struct fi_msg message = { .msg_iov = &piece, .iov_count = 1, .context = &piece };
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct side a;
	pid_t child = -1;

	(void)arg;
	TRY(open_side(&a, 0));
	TRY(start_peer(&a, &child, "--idle-peer"));
	memset(moving, 0, sizeof moving);
	message.addr = a.peer;
	OK(fi_sendmsg(a.ep, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE));
	/* The device delivers in order. */
	OK(fi_send(a.ep, out, 8, NULL, a.peer, &a));
	const char *why = next(a.tx, &entry, NULL);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	TRY(why);
	ENSURE(entry.op_context == &a, "the message is complete although the peer has made no call");
	TRY(next_error(a.tx, &error, 15000));
	ENSURE(error.op_context == &piece && (error.err == FI_EHOSTUNREACH || error.err == FI_ECONNRESET), "%s",
	       fi_strerror(error.err));
	return NULL;
}

enum { LINK = 1 << 10 };

/* Requests to a peer that is killed or stopped fail within 12 s, four times the time-out. Requests to others succeed. */
static const char *lost_peer(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct side a, b;
	uint64_t begin;
	pid_t child = -1;
	int context[3];

	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	fi_addr_t good = a.peer;
	TRY(start_peer(&a, &child, "--peer"));
	/* On a busy machine more messages pass before there is a connection. */
	for (int i = 0; i < (arg & LINK ? 20000 : 0) && (i < 200 || streams() == 0); i++) {
		OK(fi_tsend(a.ep, out, 10, NULL, a.peer, 77, &a));
		TRY(next(a.tx, &entry, NULL));
	}
	ENSURE(streams() == (arg & LINK ? 1 : 0), "%d connections", streams());
	/* The first message arrives at the peer and waits for a receive there. */
	OK(fi_tsend(a.ep, out, 100000, NULL, a.peer, 1, &context[0]));
	OK(fi_tsend(a.ep, out, 10, NULL, a.peer, 1, &context[1]));
	TRY(next(a.tx, &entry, NULL));
	ENSURE(entry.op_context == &context[1], "the short message is not the first that completes");
	kill(child, (int)(arg & ~(size_t)LINK));
	waitpid(child, NULL, WUNTRACED);
	OK(fi_tsend(a.ep, out, 10, NULL, a.peer, 1, &context[2]));
	begin = now_ms();
	bool failed[3] = { false };
	for (int i = 0; i < 2; i++) {
		const char *why = next_error(a.tx, &error, 15000);

		if (why)
			kill(child, SIGKILL);
		TRY(why);
		ENSURE(error.err == FI_EHOSTUNREACH || error.err == FI_ECONNRESET, "%s", fi_strerror(error.err));
		size_t which = (size_t)((int *)error.op_context - context);
		ENSURE(which < 3 && !failed[which], "context %zu", which);
		failed[which] = true;
	}
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	ENSURE(failed[0] && failed[2], "an operation with the lost peer has not failed");
	ENSURE(now_ms() - begin < 12000, "after %llu ms", (unsigned long long)(now_ms() - begin));
	OK(fi_trecv(b.ep, in, 20000, NULL, b.peer, 2, 0, &b));
	OK(fi_tsend(a.ep, out, 20000, NULL, good, 2, &a));
	TRY(next(b.rx, &entry, NULL));
	return next(a.tx, &entry, NULL);
}

enum { ANNOUNCES, REQUESTS, RECEIVES_LATE };

/*
 * Runs the other end of `answer_lost` in a separate process, which waits for an answer of the first end. Writes its name, one byte
 * when it waits, and the error of each of its operations.
 */
static int be_a_waiting_peer(const char *hex, int what, uint64_t at, uint64_t key)
{
	static int64_t operand = 1;
	struct pollfd input = { .fd = 0, .events = POLLIN };
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	char name[64] = { 0 };
	size_t len = sizeof name;
	struct side e;

	if (open_side(&e, 0) || fi_getname(&e.ep->fid, name, &len) || insert_hex(&e, hex))
		return 1;
	if (write(1, name, sizeof name) != sizeof name)
		return 1;
	for (int turn = 0; turn < 2; turn++) {
		struct fid_cq *cq = what == RECEIVES_LATE ? e.rx : e.tx;
		uint64_t until = now_ms() + 300;
		ssize_t n;

		if (what == ANNOUNCES && fi_tsend(e.ep, out, 100000, NULL, e.peer, 5 + (uint64_t)turn, &e))
			return 2;
		if (what == REQUESTS && fi_atomic(e.ep, &operand, 1, NULL, e.peer, at, key, FI_INT64, FI_SUM, &e))
			return 3;
		/* The first end stops this process when it has read the byte of the first turn. Before that, the message or the request
		 * must have arrived. */
		while (now_ms() < until && turn == 0)
			fi_cq_read(e.rx, NULL, 0);
		if (write(1, "", 1) != 1)
			return 4;
		while (what == RECEIVES_LATE && poll(&input, 1, 0) == 0)
			fi_cq_read(e.rx, NULL, 0);
		if (what == RECEIVES_LATE && read(0, name, 1) != 1)
			return 5;
		if (what == RECEIVES_LATE && fi_trecv(e.ep, in, 100000, NULL, FI_ADDR_UNSPEC, 5 + (uint64_t)turn, 0, &e))
			return 6;
		memset(&error, 0, sizeof error);
		while ((n = fi_cq_read(cq, &entry, 1)) == -FI_EAGAIN)
			;
		if (n == -FI_EAVAIL && fi_cq_readerr(cq, &error, 0) != 1)
			return 7;
		if (write(1, &error.err, sizeof error.err) != sizeof error.err)
			return 8;
		for (until = now_ms() + 300; now_ms() < until;)
			if (fi_cq_read(cq, &entry, 1) != -FI_EAGAIN)
				return 9;
	}
	for (;;)
		fi_cq_read(e.rx, NULL, 0);
}

/* Runs the other end of `link_given_up`: answers 200 messages, and then sends two. Writes its name, one byte, and the errors of the two. */
static int be_a_peer_with_link(const char *hex)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	char name[64] = { 0 };
	size_t len = sizeof name;
	struct side e;

	if (open_side(&e, 0) || fi_getname(&e.ep->fid, name, &len) || insert_hex(&e, hex))
		return 1;
	if (write(1, name, sizeof name) != sizeof name)
		return 1;
	for (uint64_t n = 0; n < 202; n++) {
		ssize_t rc;

		if (n < 200 && (fi_trecv(e.ep, in, 10, NULL, e.peer, n, 0, NULL) || next(e.rx, &entry, NULL)))
			return 2;
		if (n == 200 && write(1, "", 1) != 1)
			return 3;
		if (n == 200)
			for (uint64_t until = now_ms() + 300; now_ms() < until;)
				fi_cq_read(e.rx, NULL, 0);
		while ((rc = fi_tsend(e.ep, out, 10, NULL, e.peer, n, NULL)) == -FI_EAGAIN)
			fi_cq_read(e.rx, NULL, 0);
		memset(&error, 0, sizeof error);
		while (rc == 0 && (rc = fi_cq_read(e.tx, &entry, 1)) == -FI_EAGAIN)
			rc = 0;
		if (rc == -FI_EAVAIL)
			rc = fi_cq_readerr(e.tx, &error, 0);
		if (rc != 1 || (n < 200 && error.err))
			return 4;
		if (n >= 200 && write(1, &error.err, sizeof error.err) != sizeof error.err)
			return 5;
	}
	for (;;)
		fi_cq_read(e.rx, NULL, 0);
}

/* Reads what the other process writes, and meanwhile drives the endpoint. */
static const char *read_from_peer(int from, struct side *a, void *to, size_t len)
{
	struct pollfd input = { .fd = from, .events = POLLIN };
	uint64_t until = now_ms() + 15000;

	while (poll(&input, 1, 0) == 0) {
		ENSURE(now_ms() < until, "the operation of the other end does not complete");
		fi_cq_read(a->rx, NULL, 0);
	}
	ENSURE(read(from, to, len) == (ssize_t)len, "the other process has ended");
	return NULL;
}

static const char *answer_lost_to(struct side *a, size_t what, pid_t child, int from, int to, int64_t *target)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	char byte;
	int err;

	if (what == RECEIVES_LATE)
		OK(fi_tsend(a->ep, out, 100000, NULL, a->peer, 5, a));
	/* An answer to a message or an atomic is sent in a call of this program, so the program makes no call until the other end is stopped. */
	struct pollfd input = { .fd = from, .events = POLLIN };
	if (what != RECEIVES_LATE)
		ENSURE(poll(&input, 1, 10000) == 1, "the other end does not start");
	TRY(read_from_peer(from, a, &byte, 1));
	kill(child, SIGSTOP);
	waitpid(child, NULL, WUNTRACED);
	if (what == ANNOUNCES)
		OK(fi_trecv(a->ep, in, 100000, NULL, FI_ADDR_UNSPEC, 5, 0, a));
	if (what != RECEIVES_LATE) {
		for (uint64_t until = now_ms() + 100; now_ms() < until;)
			fi_cq_read(a->rx, NULL, 0);
		/* This message is given up together with the answer. */
		OK(fi_tsend(a->ep, out, 10, NULL, a->peer, 5, a));
	}
	memset(moving, 0, sizeof moving);
	moving[0] = a;
	TRY(next_error(a->tx, &error, 10000));
	ENSURE(error.op_context == a && error.err == FI_EHOSTUNREACH, "%s", fi_strerror(error.err));
	kill(child, SIGCONT);
	if (what == ANNOUNCES) {
		TRY(next_error(a->rx, &error, 10000));
		ENSURE(error.op_context == a && error.err == FI_EHOSTUNREACH, "%s", fi_strerror(error.err));
	}
	if (what == RECEIVES_LATE)
		ENSURE(write(to, "", 1) == 1, "write");
	TRY(read_from_peer(from, a, &err, sizeof err));
	ENSURE(err == FI_ECONNRESET, "the operation of the other end: %s", fi_strerror(err));

	/* The next operation succeeds, and no operation has completed twice. */
	if (what == RECEIVES_LATE) {
		OK(fi_tsend(a->ep, out, 100000, NULL, a->peer, 6, &err));
		ENSURE(write(to, "", 1) == 1, "write");
	}
	if (what == ANNOUNCES)
		OK(fi_trecv(a->ep, in, 100000, NULL, FI_ADDR_UNSPEC, 6, 0, &err));
	TRY(read_from_peer(from, a, &byte, 1));
	TRY(read_from_peer(from, a, &err, sizeof err));
	ENSURE(err == 0, "the second operation of the other end: %s", fi_strerror(err));
	if (what == REQUESTS) {
		ENSURE(*target == 2, "the target is %lld", (long long)*target);
	} else {
		TRY(next(what == ANNOUNCES ? a->rx : a->tx, &entry, NULL));
		ENSURE(entry.op_context == &err, "another completion");
	}
	GIVES(FI_EAGAIN, fi_cq_read(a->rx, &entry, 1));
	GIVES(FI_EAGAIN, fi_cq_read(a->tx, &entry, 1));
	return NULL;
}

static const char *link_given_up_by(struct side *a, pid_t child, int from)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	char byte;
	int err;

	move_both(a, a);
	for (uint64_t n = 0; n < 200; n++) {
		OK(fi_trecv(a->ep, in, 10, NULL, a->peer, n, 0, a));
		OK(fi_tsend(a->ep, out, 10, NULL, a->peer, n, a));
		TRY(next(a->tx, &entry, NULL));
		TRY(next(a->rx, &entry, NULL));
	}
	ENSURE(streams() == 1, "%d connections", streams());
	TRY(read_from_peer(from, a, &byte, 1));
	kill(child, SIGSTOP);
	waitpid(child, NULL, WUNTRACED);
	OK(fi_tsend(a->ep, out, 10, NULL, a->peer, 1, a));
	TRY(next_error(a->tx, &error, 10000));
	ENSURE(error.err == FI_EHOSTUNREACH, "%s", fi_strerror(error.err));
	kill(child, SIGCONT);
	/* The first message may have been sent on the connection. */
	TRY(read_from_peer(from, a, &err, sizeof err));
	ENSURE(err == 0 || err == FI_ECONNRESET, "the first message: %s", fi_strerror(err));
	OK(fi_trecv(a->ep, in, 10, NULL, a->peer, 201, 0, a));
	TRY(read_from_peer(from, a, &err, sizeof err));
	ENSURE(err == 0, "the second message: %s", fi_strerror(err));
	TRY(next(a->rx, &entry, NULL));
	ENSURE(streams() == 0, "%d connections", streams());
	return NULL;
}

/* An end gives up the other end and the connection to it. The other end, which responds again, can still send messages. */
static const char *link_given_up(size_t arg)
{
	const char *const how[4] = { "--peer-with-link" };
	pid_t child = -1;
	struct side a;
	int from, to;

	(void)arg;
	setenv("FI_ANYWARP_PEER_TIMEOUT_MS", "1000", 1);
	TRY(open_side(&a, 0));
	TRY(start_process(&a, &child, how, &from, &to));
	const char *why = link_given_up_by(&a, child, from);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	close(from);
	close(to);
	return why;
}

/*
 * The other end does not respond for longer than the time-out, and then responds again: the end that waits for it gives up its
 * operation, and the other end, which waits for this one, gets an error too.
 */
static const char *answer_lost(size_t what)
{
	static int64_t target;
	struct fid_mr *mr;
	struct side a;
	pid_t child = -1;
	int from, to;

	setenv("FI_ANYWARP_PEER_TIMEOUT_MS", "1000", 1);
	/* The answer, and its repetitions, stay lost when the other end runs again. Otherwise it would find them in its socket. */
	if (what != RECEIVES_LATE)
		setenv("ANYWARP_FAULTS", "op=send times=20 -> drop", 1);
	TRY(open_side(&a, 0));
	unsetenv("ANYWARP_FAULTS");
	OK(fi_mr_reg(a.domain, &target, sizeof target, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	char kind[4], at[24], key[24];
	snprintf(kind, sizeof kind, "%u", (unsigned int)what);
	snprintf(at, sizeof at, "%llu", (unsigned long long)(uintptr_t)&target);
	snprintf(key, sizeof key, "%llu", (unsigned long long)fi_mr_key(mr));
	const char *const more[] = { "--waiting-peer", kind, at, key };
	TRY(start_process(&a, &child, more, &from, &to));
	const char *why = answer_lost_to(&a, what, child, from, to, &target);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	close(from);
	close(to);
	return why;
}

/* Fills the send queue of an endpoint with messages to a peer that is stopped. They complete only after the time-out. */
static const char *fill_send_queue(struct side *a, pid_t *child)
{
	fi_addr_t peer = a->peer;
	uint64_t until = now_ms() + 2000;
	unsigned int sent = 0;

	TRY(start_peer(a, child, "--peer"));
	kill(*child, SIGSTOP);
	waitpid(*child, NULL, WUNTRACED);
	for (uint64_t quiet = now_ms(); now_ms() < until && now_ms() < quiet + 50;) {
		if (fi_tinject(a->ep, out, 8, a->peer, 77) == 0) {
			quiet = now_ms();
			sent++;
		}
	}
	ENSURE(sent > 500, "only %u messages are accepted", sent);
	a->peer = peer;
	return NULL;
}

/* Reads the failures of the messages to the stopped peer until there are no more for some time. */
static const char *drop_failures(struct side *a)
{
	struct fi_cq_err_entry error = { 0 };
	unsigned int failed = 0;

	for (uint64_t quiet = now_ms(); now_ms() < quiet + (failed ? 200 : 10000);) {
		struct fi_cq_tagged_entry entry;

		for (size_t i = 0; i < COUNT(moving) && moving[i]; i++)
			fi_cq_read(moving[i]->rx, NULL, 0);
		if (fi_cq_read(a->tx, &entry, 1) == -FI_EAVAIL && fi_cq_readerr(a->tx, &error, 0) == 1) {
			quiet = now_ms();
			failed++;
		}
	}
	ENSURE(failed > 0, "no message to the stopped peer fails");
	return NULL;
}

/*
 * The notice that a sender's share is used up waits in a full send queue. No message of the sender is lost meanwhile.
 */
static const char *notice_waits(size_t arg)
{
	enum { MOST = 4000 };
	static uint32_t words[MOST];
	struct fi_cq_tagged_entry entry;
	struct side a, b;
	uint32_t sent = 0, word;
	pid_t child = -1;

	(void)arg;
	setenv("FI_ANYWARP_LINKS", "0", 1);
	TRY(open_sides(&a, &b));
	TRY(fill_send_queue(&b, &child));
	move_both(&a, &b);
	/* The loop ends before the time-out, so the notice cannot be sent meanwhile. */
	for (uint64_t begin = now_ms(), quiet = begin; sent < MOST && now_ms() < quiet + 300 && now_ms() < begin + 1500;) {
		struct iovec parts[2] = { { &words[sent], 4 }, { out + 4, EAGER - 4 } };

		words[sent] = sent;
		if (fi_tsendv(a.ep, parts, NULL, 2, a.peer, 1, &a) == 0) {
			sent++;
			quiet = now_ms();
		}
		fi_cq_read(b.rx, NULL, 0);
		while (fi_cq_read(a.tx, &entry, 1) == 1)
			;
	}
	const char *why = sent > 1200 ? NULL : because("only %u messages are accepted", sent);
	if (!why)
		why = drop_failures(&b);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	TRY(why);
	for (uint32_t i = 0; i < sent; i++) {
		OK(fi_trecv(b.ep, in, EAGER, NULL, b.peer, 1, 0, &b));
		why = next(b.rx, &entry, NULL);
		memcpy(&word, in, sizeof word);
		if (why || word != i || entry.len != EAGER)
			return because("message %u of %u: %s", i, sent, why ? why : "another one arrives");
		while (fi_cq_read(a.tx, &entry, 1) == 1)
			;
	}
	return NULL;
}

/*
 * A connection fails after the grant for a long message has arrived, while the write waits in a full send queue. The message is
 * written over datagrams instead.
 */
static const char *link_fails_before_write(size_t arg)
{
	static uint8_t long_out[2][100000], long_in[2][100000];
	struct fi_cq_tagged_entry entry;
	struct side low, high;
	char rule[100];
	uint32_t got[25];
	pid_t child = -1;
	int before;

	(void)arg;
	TRY(count_queue_pairs(&before));
	/* The end with the higher name accepts the connection, so its queue pair is the second one of the connection. */
	snprintf(rule, sizeof rule, "qp=#%d op=send nth=20 -> kill", before + 2);
	setenv("ANYWARP_FAULTS", rule, 1);
	TRY(open_sides(&low, &high));
	TRY(order_by_name(&low, &high));
	TRY(exchange_numbers(&low, low.peer, &high, 200));
	ENSURE(streams() == 2, "%d connections", streams());
	/* The process of the peer must not fail too. */
	unsetenv("ANYWARP_FAULTS");
	TRY(fill_send_queue(&low, &child));
	memset(moving, 0, sizeof moving);
	for (size_t i = 0; i < 2; i++)
		fill_bytes(long_out[i], sizeof long_out[i], i);
	/* The grant of `low` waits in the send queue of `low`. Then `high` grants memory, and the write of `low` waits behind the grant of `low`. */
	OK(fi_trecv(low.ep, long_in[0], sizeof long_in[0], NULL, low.peer, 5, 0, &long_in[0]));
	OK(fi_trecv(high.ep, long_in[1], sizeof long_in[1], NULL, high.peer, 5, 0, &long_in[1]));
	OK(fi_tsend(high.ep, long_out[0], sizeof long_out[0], NULL, high.peer, 5, &long_out[0]));
	for (uint64_t until = now_ms() + 100; now_ms() < until;) {
		fi_cq_read(high.rx, NULL, 0);
		fi_cq_read(low.rx, NULL, 0);
	}
	OK(fi_tsend(low.ep, long_out[1], sizeof long_out[1], NULL, low.peer, 5, &long_out[1]));
	for (uint64_t until = now_ms() + 100; now_ms() < until;) {
		fi_cq_read(high.rx, NULL, 0);
		fi_cq_read(low.rx, NULL, 0);
	}
	for (uint32_t n = 0; n < COUNT(got); n++)
		OK(fi_trecv(low.ep, &got[n], 4, NULL, low.peer, 6, 0, &got[n]));
	move_both(&low, &high);
	for (uint32_t n = 0; n < COUNT(got); n++)
		fi_tinject(high.ep, &n, 4, high.peer, 6);
	const char *why = drop_failures(&low);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	TRY(why);
	ENSURE(streams() == 0, "%d connections after the failure", streams());
	TRY(next(high.rx, &entry, NULL));
	ENSURE(entry.op_context == &long_in[1] && entry.len == sizeof long_in[1], "%zu bytes", entry.len);
	return check_bytes(long_in[1], sizeof long_in[1], 1);
}

/*
 * All connections that an endpoint may have are in use. One more peer becomes busy while a connected one closes its endpoint. The last
 * messages of the closed endpoint, which are still on their way, arrive.
 */
static const char *link_needed_while_one_closes(size_t arg)
{
	enum { OTHERS = 9, LATE = 40 };
	static uint8_t long_out[100000], long_in[100000];
	struct side all[OTHERS + 1], *last = &all[OTHERS], *closes = &all[OTHERS - 2], *more = &all[OTHERS - 1];
	struct fi_cq_tagged_entry entry;
	char rule[100];
	pthread_t thread;
	uint32_t got;
	void *ms;
	int before;

	(void)arg;
	TRY(count_queue_pairs(&before));
	/*
	 * Each connection has two queue pairs. That of the end that offers it is the first. The write of a long message, and the
	 * messages after it, are delayed, but by less than the time that a close waits.
	 */
	snprintf(rule, sizeof rule, "qp=#%d op=write nth=1 -> delay=1500ms", before + (OTHERS + 1 - 2) + 2 * (OTHERS - 2) + 1);
	setenv("ANYWARP_FAULTS", rule, 1);
	for (size_t i = 0; i <= OTHERS; i++)
		TRY(open_side(&all[i], 0));
	/* The last one has the highest name, so the others offer connections to it. */
	for (size_t i = 0; i < OTHERS; i++)
		TRY(order_by_name(&all[i], last));
	for (size_t i = 0; i < OTHERS; i++) {
		TRY(introduce(&all[i], last));
		TRY(introduce(last, &all[i]));
		if (&all[i] != more)
			TRY(exchange_numbers(&all[i], all[i].peer, last, 200));
	}
	ENSURE(streams() == 2 * (OTHERS - 1), "%d connections", streams());
	fill_bytes(long_out, sizeof long_out, 1);
	OK(fi_trecv(last->ep, long_in, sizeof long_in, NULL, FI_ADDR_UNSPEC, 3, 0, long_in));
	OK(fi_tsend(closes->ep, long_out, sizeof long_out, NULL, closes->peer, 3, NULL));
	move_both(closes, last);
	for (uint64_t until = now_ms() + 100; now_ms() < until;) {
		fi_cq_read(closes->tx, NULL, 0);
		fi_cq_read(last->rx, NULL, 0);
	}
	for (uint32_t n = 0; n < LATE; n++)
		TRY(inject(closes, closes->peer, 2, n));
	ENSURE(!pthread_create(&thread, NULL, close_endpoint, closes), "pthread_create");
	sleep_ms(50);
	const char *why = exchange_numbers(more, more->peer, last, 200);
	memset(moving, 0, sizeof moving);
	if (!why)
		why = next(last->rx, &entry, NULL);
	if (!why && (entry.op_context != long_in || entry.len != sizeof long_in))
		why = "another message than the long one arrives";
	for (uint32_t n = 0; n < LATE && !why; n++) {
		why = fi_trecv(last->ep, &got, 4, NULL, FI_ADDR_UNSPEC, 2, 0, NULL) ? "fi_trecv" : next(last->rx, &entry, NULL);
		if (why || got != n)
			why = because("message %u of the closed endpoint: %s", n, why ? why : "another one arrives");
	}
	pthread_join(thread, &ms);
	TRY(why);
	TRY(check_bytes(long_in, sizeof long_in, 1));
	ENSURE((uintptr_t)ms > 500, "the last messages are not late: closing takes %zu ms", (size_t)(uintptr_t)ms);
	/* Now there is room for the connection. */
	TRY(exchange_numbers(more, more->peer, last, 1200));
	ENSURE(streams() == 2 * (OTHERS - 1), "%d connections", streams());
	return NULL;
}

/* Endpoints with another key refuse messages, and each failure is reported for its request. */
static const char *other_key(size_t arg)
{
	struct fi_cq_err_entry error;
	struct side a, b, c;
	const char *why;

	(void)arg;
	TRY(open_side(&a, 0));
	setenv("FI_ANYWARP_QKEY", "0x1234", 1);
	why = open_side(&b, 0);
	if (!why)
		why = open_side(&c, 0);
	unsetenv("FI_ANYWARP_QKEY");
	TRY(why);
	TRY(introduce(&a, &b));
	move_both(&a, &b);
	OK(fi_recv(b.ep, in, 100, NULL, FI_ADDR_UNSPEC, &b));
	for (size_t len = 10; len <= 100000; len *= 10) {
		OK(fi_send(a.ep, out, len, NULL, a.peer, &out[len]));
		TRY(next_error(a.tx, &error, WAIT_MS));
		ENSURE(error.err == FI_EREMOTEIO && error.op_context == &out[len], "%zu: %s", len, fi_strerror(error.err));
	}
	struct fi_cq_tagged_entry entry;
	TRY(introduce(&c, &b));
	OK(fi_send(c.ep, out, 100, NULL, c.peer, &c));
	move_both(&b, &c);
	TRY(next(b.rx, &entry, NULL));
	return next(c.tx, &entry, NULL);
}

/* Counts how often each request ends; `failed` counts the errors. The contexts are addresses in `from`. */
static const char *count_ends(struct fid_cq *cq, const uint8_t *from, unsigned int *ends, size_t most, unsigned int *failed)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;

	for (uint64_t until = now_ms() + 300; now_ms() < until;) {
		ssize_t n = fi_cq_read(cq, &entry, 1);
		const uint8_t *context;

		for (size_t i = 0; i < COUNT(moving) && moving[i]; i++)
			fi_cq_read(moving[i]->rx, NULL, 0);
		if (n == -FI_EAGAIN)
			continue;
		memset(&error, 0, sizeof error);
		if (n == -FI_EAVAIL)
			ENSURE(fi_cq_readerr(cq, &error, 0) == 1, "fi_cq_readerr");
		else
			ENSURE(n == 1, "fi_cq_read returns %zd", n);
		context = n == 1 ? entry.op_context : error.op_context;
		ENSURE(context >= from && context < from + most, "a completion has another context");
		ends[context - from]++;
		*failed += n != 1;
	}
	return NULL;
}

/* If the queue pair of an endpoint fails, each posted request ends once, and no further request is accepted. */
static const char *failed_endpoint(size_t arg)
{
	unsigned int receives[8] = { 0 }, sends[10] = { 0 }, failed = 0;
	struct side a, b;
	size_t posted;

	(void)arg;
	/* A later request of each endpoint fails in the device, which stops the queue pair. */
	setenv("ANYWARP_FAULTS", "op=send nth=4 -> error=local-protection", 1);
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	for (size_t i = 0; i < 4; i++) {
		OK(fi_recv(a.ep, in + 100 * i, 100, NULL, FI_ADDR_UNSPEC, &in[i]));
		OK(fi_trecv(a.ep, in + 1000 + 100 * i, 100, NULL, FI_ADDR_UNSPEC, i, 0, &in[4 + i]));
	}
	/* Sends a long message, by rendezvous, for which there is no receive. */
	OK(fi_send(a.ep, out, 100000, NULL, a.peer, &out[0]));
	for (posted = 1; posted < COUNT(sends); posted++)
		if (fi_send(a.ep, out, 10, NULL, a.peer, &out[posted]))
			break;
	TRY(count_ends(a.rx, in, receives, COUNT(receives), &failed));
	ENSURE(failed == COUNT(receives), "%u of 8 receives failed", failed);
	for (size_t i = 0; i < COUNT(receives); i++)
		ENSURE(receives[i] == 1, "receive %zu ends %u times", i, receives[i]);
	failed = 0;
	TRY(count_ends(a.tx, out, sends, COUNT(sends), &failed));
	for (size_t i = 0; i < COUNT(sends); i++)
		ENSURE(sends[i] == (i < posted), "send %zu of %zu ends %u times", i, posted, sends[i]);
	ENSURE(failed >= 2, "%u sends failed", failed);
	ENSURE(fi_recv(a.ep, in, 100, NULL, FI_ADDR_UNSPEC, NULL) == -FI_EOPBADSTATE, "a receive is accepted");
	ENSURE(fi_send(a.ep, out, 10, NULL, a.peer, NULL) == -FI_EOPBADSTATE, "a send is accepted");
	return NULL;
}

/* Sends a message several times from a queue pair that is not an endpoint. */
static const char *post_raw_times(struct dgram *from, struct region *memory, size_t size, struct side *to, size_t times)
{
	struct sockaddr_in name;
	size_t len = sizeof name;
	uint64_t until = now_ms() + WAIT_MS;
	struct ibv_wc wc;
	int n;

	OK(fi_getname(&to->ep->fid, &name, &len));
	for (size_t i = 0; i < times; i++) {
		ibv_wr_start(from->ex);
		from->ex->wr_id = 1;
		from->ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_send(from->ex);
		ibv_wr_set_ud_addr(from->ex, from->ah, (uint32_t)ntohs(name.sin_port) << 8 | (uint8_t)name.sin_zero[0],
				   JOB_KEY);
		ibv_wr_set_sge(from->ex, memory->mr->lkey, (uintptr_t)memory->at, (uint32_t)size);
		ENSURE(!ibv_wr_complete(from->ex), "ibv_wr_complete fails");
	}
	while (times > 0) {
		n = ibv_poll_cq(from->scq, 1, &wc);
		ENSURE(n >= 0, "ibv_poll_cq fails");
		ENSURE(n > 0 || now_ms() < until, "a message does not arrive");
		ENSURE(n == 0 || wc.status == IBV_WC_SUCCESS, "%s", ibv_wc_status_str(wc.status));
		times -= (size_t)n;
		if (n == 0)
			fi_cq_read(to->rx, NULL, 0);
	}
	return NULL;
}

static const char *post_raw(struct dgram *from, struct region *memory, size_t size, struct side *to)
{
	return post_raw_times(from, memory, size, to, 1);
}

/* Opens two endpoints, and a queue pair that can send any bytes to them. */
static const char *open_with_bad(struct side *a, struct side *b, struct dgram *bad, struct region *memory)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD, .max_send_size = EAGER + 32,
					     .flags = ANYWARPDV_QP_KEEP_GOING };

	TRY(open_sides(a, b));
	move_both(a, b);
	TRY(find_all());
	TRY(open_dgram(bad, &dv));
	return new_region(memory, bad->pd, EAGER + 32, IBV_ACCESS_LOCAL_WRITE);
}

/*
 * A sender that ignores the request to announce its messages blocks no other sender. Its excess messages are dropped.
 */
static const char *flood_hostile(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct region mine = { 0 };
	struct dgram bad;
	struct side a, b;
	uint8_t *m;

	(void)arg;
	TRY(open_with_bad(&a, &b, &bad, &mine));
	m = mine.at;
	memset(m, 0, 32);
	m[0] = m[1] = m[2] = 1; /* eager, with a tag */
	m[14] = EAGER >> 8;
	/* These messages need more memory than all senders together may use. */
	for (size_t i = 0; i < (80u << 20) / EAGER; i++)
		TRY(post_raw(&bad, &mine, EAGER + 32, &b));
	OK(fi_tsend(a.ep, out, 100, NULL, a.peer, 2, &a));
	TRY(next(a.tx, &entry, NULL));
	OK(fi_trecv(b.ep, in, 100, NULL, b.peer, 2, 0, &b));
	return next(b.rx, &entry, NULL);
}

/*
 * A peer announces messages and writes none of them, until the receiver has no free number for another one (a number has 20 bits). The
 * next announced message fails at the receiver, and the request of its sender ends instead of waiting for a grant for ever. The receives
 * of the peer's messages have no memory, so that the receiver registers none for them.
 */
static const char *all_names_used(size_t arg)
{
	const size_t names = 1u << 20, run = 200;
	struct fi_cq_err_entry error;
	struct fi_cq_tagged_entry entry;
	struct region mine = { 0 };
	struct dgram bad;
	struct side a, b;
	uint8_t *m;

	(void)arg;
	TRY(open_with_bad(&a, &b, &bad, &mine));
	m = mine.at;
	memset(m, 0, 32);
	m[0] = 1;
	m[1] = 2; /* announced, */
	m[2] = 1; /* with a tag, */
	m[13] = 1; /* 65536 bytes */
	for (size_t i = 0; i < names; i += run) {
		size_t n = names - i < run ? names - i : run;

		for (size_t j = 0; j < n; j++)
			OK(fi_trecv(b.ep, NULL, 0, NULL, FI_ADDR_UNSPEC, 0, 0, NULL));
		TRY(post_raw_times(&bad, &mine, 32, &b, n));
	}
	OK(fi_trecv(b.ep, in, 50000, NULL, b.peer, 2, 0, &b));
	OK(fi_tsend(a.ep, out, 50000, NULL, a.peer, 2, &a));
	TRY(next(a.tx, &entry, NULL));
	/* The last messages of the peer fail too. */
	do
		TRY(next_error(b.rx, &error, WAIT_MS));
	while (!error.op_context);
	ENSURE(error.err == FI_ENOMEM && error.op_context == &b, "the receive fails with %d", error.err);
	return NULL;
}

/* Messages of a queue pair that violates the protocol have no effect. */
static const char *hostile(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct region mine = { 0 };
	struct dgram bad;
	struct side a, b;
	uint32_t seed = 7;

	(void)arg;
	TRY(open_with_bad(&a, &b, &bad, &mine));
	/* `b` knows this address, so it processes messages about connections from it. */
	struct sockaddr_in its = { .sin_family = AF_INET, .sin_port = htons((uint16_t)(bad.qp->qp_num >> 8)),
				   .sin_addr.s_addr = htonl(0x7f000001) };
	fi_addr_t known;
	its.sin_zero[0] = (uint8_t)bad.qp->qp_num;
	ENSURE(fi_av_insert(b.av, &its, 1, &known, 0, NULL) == 1, "fi_av_insert");
	for (uint64_t i = 0; i < 2000; i++) {
		uint8_t *m = mine.at;
		size_t size = 32;

		for (size_t j = 0; j < 64; j++) {
			seed = seed * 1103515245 + 12345;
			m[j] = (uint8_t)(seed >> 16);
		}
		/* Most messages have a valid version and type. */
		if (i % 8)
			m[0] = 1, m[3] = 0, m[2] &= 63;
		if (i % 16)
			m[1] = (uint8_t)(1 + i % 12);
		if (i % 3 == 0)
			memset(m + 4, 0, 10); /* small names and lengths */
		if (i % 5 == 0)
			size = (size_t)(i % 64);
		if (i % 11 == 0)
			m[1] = 2, m[2] = 32 | (i & 1), size = 44; /* a readable announcement */
		TRY(post_raw(&bad, &mine, size, &b));
	}
	while (fi_cq_read(b.rx, &entry, 1) == 1)
		ENSURE(entry.flags & FI_REMOTE_WRITE, "there is a completion without a posted operation");
	OK(fi_trecv(b.ep, in, 50000, NULL, b.peer, 2, 0, &b));
	fill_bytes(out, 50000, 5);
	OK(fi_tsend(a.ep, out, 50000, NULL, a.peer, 2, &a));
	TRY(next(b.rx, &entry, NULL));
	TRY(check_bytes(in, 50000, 5));
	return next(a.tx, &entry, NULL);
}

/*
 * With FI_ANYWARP_RENDEZVOUS=read, the receiver of a long message reads it. A stranger cannot end the send, and an
 * announcement of memory that may not be read is an error of its receive alone.
 */
static const char *read_by_receiver(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct region mine = { 0 };
	struct dgram bad;
	struct side a, b;

	(void)arg;
	setenv("FI_ANYWARP_RENDEZVOUS", "read", 1);
	setenv("ANYWARP_FAULTS", "op=read nth=4 -> error=remote-access", 1);
	TRY(open_with_bad(&a, &b, &bad, &mine));
	fill_bytes(out, 100000, 9);
	OK(fi_tsend(a.ep, out, 100000, NULL, a.peer, 0, &a));
	memset(mine.at, 0, 32);
	mine.at[0] = 1, mine.at[1] = 10;
	for (uint8_t id = 0; id < 8; id++) {
		mine.at[7] = id;
		TRY(post_raw(&bad, &mine, 32, &a));
	}
	for (int turn = 0; turn < 200; turn++)
		fi_cq_read(b.rx, NULL, 0);
	ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN, "a send ends before its message was received");
	OK(fi_trecv(b.ep, in, 40000, NULL, b.peer, 0, 0, &b));
	TRY(next_error(b.rx, &error, WAIT_MS));
	ENSURE(error.err == FI_ETRUNC && error.len == 40000 && error.olen == 60000, "%s, %zu bytes, %zu over",
	       fi_strerror(error.err), error.len, error.olen);
	TRY(check_bytes(in, 40000, 9));
	TRY(next(a.tx, &entry, NULL));
	/* Announces a message with a tag: number 7, 100000 bytes, tag 1. No memory has the key and the address. */
	memset(mine.at, 0x55, 44);
	memcpy(mine.at, "\1\2\41\0" "\0\0\0\7" "\0\0\0\0\0\1\206\240" "\0\0\0\0\0\0\0\1" "\0\0\0\0\0\0\0\0", 32);
	TRY(post_raw(&bad, &mine, 44, &b));
	for (uint64_t tag = 1; tag < 4; tag++) {
		OK(fi_trecv(b.ep, in, sizeof in, NULL, FI_ADDR_UNSPEC, tag, 0, &b));
		if (tag > 1)
			OK(fi_tsend(a.ep, out, 100000, NULL, a.peer, tag, &a));
		if (tag == 2) {
			TRY(next(b.rx, &entry, NULL));
			TRY(check_bytes(in, 100000, 9));
			TRY(next(a.tx, &entry, NULL));
		} else {
			/* The stranger refuses the Read of tag 1. The error of tag 3 is injected, and shows that the receiver has read. */
			TRY(next_error(b.rx, &error, WAIT_MS));
			ENSURE(error.err == (tag == 1 ? FI_EREMOTEIO : FI_EACCES) && error.op_context == &b && error.len == 0,
			       "a refused Read: %s", fi_strerror(error.err));
		}
	}
	return NULL;
}

static const char *read_messages(size_t arg)
{
	setenv("FI_ANYWARP_RENDEZVOUS", "read", 1);
	return messages(arg);
}

static const char *read_peek(size_t arg)
{
	setenv("FI_ANYWARP_RENDEZVOUS", "read", 1);
	return peek_and_claim(arg);
}

static const char *read_multi_recv(size_t arg)
{
	setenv("FI_ANYWARP_RENDEZVOUS", "read", 1);
	return multi_recv(arg);
}

/* Runs the peers. Writes their queue pair numbers to `to`. Each sends two empty messages to the queue pair with the number in `from`. */
static const char *be_peers(int from, int to)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD };
	uint8_t message[32] = { 1, 1 };
	struct peers p;
	uint32_t hub;

	TRY(find_all());
	TRY(open_peers(&p, &dv, JOB_KEY));
	for (unsigned int i = 0; i < p.many; i++)
		ENSURE(write(to, &p.qps[i]->qp_num, 4) == 4, "the other process has ended");
	for (int round = 0; round < 2; round++) {
		for (unsigned int i = 0; i < p.many; i += PEERS_AT_ONCE) {
			ENSURE(read(from, &hub, sizeof hub) == sizeof hub, "the other process has ended");
			TRY(send_from_peers(&p, i, hub, message, sizeof message));
		}
	}
	/* Wait until the other process has measured its memory. */
	ENSURE(read(from, &hub, sizeof hub) == 0, "the other process has not ended");
	return close_all() ? "cannot close" : NULL;
}

/*
 * Measures the memory that an endpoint needs for each of many peers, after their insertion into the address vector and after an
 * exchange of messages.
 * The carriers in shared memory are turned off: a process has at most 64, so their memory does not grow with the number of peers.
 */
static const char *peers(size_t arg)
{
	unsigned int many = many_peers(), answered = 0;
	fi_addr_t *addresses = calloc(many, sizeof *addresses);
	struct sockaddr_in *names = calloc(many, sizeof *names);
	struct sockaddr_in mine;
	size_t len = sizeof mine;
	int there[2], back[2], status;
	double known, used;
	uint32_t number;
	struct side a;
	long before;
	pid_t pid;

	(void)arg;
	setenv("ANYWARP_CARRIER", "tcp", 1);
	ENSURE(addresses && names, "no memory");
	keep(close_memory, addresses, "memory");
	keep(close_memory, names, "memory");
	ENSURE(!pipe(there) && !pipe(back), "pipe: %s", strerror(errno));
	fflush(stdout);
	pid = fork();
	ENSURE(pid >= 0, "fork: %s", strerror(errno));
	if (pid == 0) {
		const char *reason;

		close(there[1]);
		close(back[0]);
		reason = be_peers(there[0], back[1]);
		if (reason)
			fprintf(stderr, "peers: %s [%s]\n", reason, failed_at);
		_exit(reason ? 1 : 0);
	}
	close(there[0]);
	close(back[1]);
	TRY(open_side(&a, 0));
	memset(moving, 0, sizeof moving);
	OK(fi_getname(&a.ep->fid, &mine, &len));
	for (unsigned int i = 0; i < many; i++) {
		ENSURE(read(back[0], &number, sizeof number) == sizeof number, "the process of the peers has ended");
		names[i] = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons((uint16_t)(number >> 8)),
						 .sin_addr = mine.sin_addr, .sin_zero = { (uint8_t)number } };
	}
	memset(addresses, 0, many * sizeof *addresses);
	before = resident();
	ENSURE(fi_av_insert(a.av, names, many, addresses, 0, NULL) == (int)many, "fi_av_insert");
	known = (double)(resident() - before) / many;
	number = (uint32_t)ntohs(mine.sin_port) << 8 | (uint8_t)mine.sin_zero[0];
	for (int round = 0; round < 2; round++) {
		for (unsigned int i = 0; i < many; i += PEERS_AT_ONCE) {
			unsigned int n = many - i < PEERS_AT_ONCE ? many - i : PEERS_AT_ONCE;

			ENSURE(write(there[1], &number, sizeof number) == sizeof number, "the process of the peers has ended");
			for (unsigned int j = 0; j < n; j++) {
				struct fi_cq_tagged_entry entry;
				fi_addr_t source;

				OK(fi_recv(a.ep, NULL, 0, NULL, FI_ADDR_UNSPEC, &a));
				TRY(next(a.rx, &entry, &source));
				ENSURE(source >= addresses[i] && source < addresses[i] + n, "from %ju", (uintmax_t)source);
				if (round)
					continue;
				OK(fi_send(a.ep, NULL, 0, NULL, source, &a));
				TRY(next(a.tx, &entry, NULL));
				answered++;
			}
		}
	}
	used = (double)(resident() - before) / many;
	ENSURE(answered == many, "%u answers", answered);
	close(there[1]);
	ENSURE(waitpid(pid, &status, 0) == pid && status == 0, "the peers end with %#x", (unsigned int)status);
	printf("# %u peers: %.2f KiB each in the address vector, %.2f KiB after messages in both directions\n", many, known, used);
	fflush(stdout);
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
	/* Memory that does not depend on the number of peers is allowed: the buffers of the endpoint. */
	ENSURE(known <= 0.1 + 128.0 / many && used <= 1.0 + 4096.0 / many, "too much memory for a peer");
#endif
	return NULL;
}

/* An endpoint at a chosen port is found by host and port alone. */
static const char *service(size_t arg)
{
	struct fi_info *usual = info, *hints, *here = NULL, *there = NULL;
	struct fi_cq_tagged_entry entry;
	struct sockaddr_in name;
	struct fid_ep *second;
	struct side a, b;
	size_t len = sizeof name;
	char port[8];

	(void)arg;
	TRY(find_provider());
	usual = info;
	snprintf(port, sizeof port, "%d", 20000 + getpid() % 10000);
	hints = fi_dupinfo(info);
	free(hints->src_addr);
	hints->src_addr = NULL;
	hints->src_addrlen = 0;
	OK(fi_getinfo(FI_VERSION(1, 17), NULL, port, FI_SOURCE, hints, &here));
	OK(fi_getinfo(FI_VERSION(1, 17), "127.0.0.1", port, 0, hints, &there));
	fi_freeinfo(hints);
	info = here;
	const char *why = open_side(&b, 0);
	int again = why ? 0 : fi_endpoint(b.domain, here, &second, NULL);
	info = usual;
	fi_freeinfo(here);
	TRY(why);
	ENSURE(again == -FI_EADDRINUSE, "a second endpoint at the port: %d", again);
	OK(fi_getname(&b.ep->fid, &name, &len));
	ENSURE(ntohs(name.sin_port) == atoi(port) && name.sin_zero[0] == 0, "port %u", ntohs(name.sin_port));
	TRY(open_side(&a, 0));
	move_both(&a, &b);
	ENSURE(there->dest_addr && fi_av_insert(a.av, there->dest_addr, 1, &a.peer, 0, NULL) == 1, "fi_av_insert");
	fi_freeinfo(there);
	ENSURE(fi_av_insertsvc(a.av, "127.0.0.1", port, &a.self, 0, NULL) == 1, "fi_av_insertsvc");
	for (int i = 0; i < 2; i++) {
		OK(fi_recv(b.ep, in, 100, NULL, FI_ADDR_UNSPEC, &b));
		OK(fi_send(a.ep, out, 100, NULL, i ? a.self : a.peer, &a));
		TRY(next(b.rx, &entry, NULL));
		TRY(next(a.tx, &entry, NULL));
	}
	return NULL;
}

/* Each part of an answer has only capabilities that apply to it and that the answer as a whole has. If a program does not choose
 * the type of address vectors, the answer does not either, and the program may open vectors of either type. */
static const char *answers(size_t arg)
{
	const uint64_t kinds = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC;
	const uint64_t sends = kinds | FI_SEND | FI_READ | FI_WRITE | FI_FENCE;
	const uint64_t receives =
		kinds | FI_RECV | FI_REMOTE_READ | FI_REMOTE_WRITE | FI_DIRECTED_RECV | FI_MULTI_RECV | FI_SOURCE;
	struct fi_info *all, *given, *i;
	struct fid_av *av;
	struct side a;

	(void)arg;
	TRY(open_side(&a, 0));
	given = fi_dupinfo(info);
	free(given->domain_attr->name);
	given->domain_attr->name = NULL;
	given->domain_attr->caps = FI_LOCAL_COMM;
	given->domain_attr->av_type = FI_AV_UNSPEC;
	for (int hints = 0; hints < 2; hints++) {
		int found = 0;

		OK(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints ? given : NULL, &all));
		for (i = all; i; i = i->next) {
			if (strcmp(i->fabric_attr->prov_name, "anywarp"))
				continue;
			found++;
			ENSURE(!(i->tx_attr->caps & ~(sends & i->caps)), "transmit: %#jx", (uintmax_t)i->tx_attr->caps);
			ENSURE(!(i->rx_attr->caps & ~(receives & i->caps)), "receive: %#jx", (uintmax_t)i->rx_attr->caps);
			ENSURE(i->domain_attr->caps == (FI_LOCAL_COMM | FI_REMOTE_COMM), "domain: %#jx",
			       (uintmax_t)i->domain_attr->caps);
			ENSURE(i->domain_attr->av_type == FI_AV_UNSPEC, "type of address vectors %d", i->domain_attr->av_type);
		}
		fi_freeinfo(all);
		ENSURE(found == 1, "%d answers, not 1", found);
	}
	fi_freeinfo(given);
	for (int type = FI_AV_UNSPEC; type <= FI_AV_TABLE; type++) {
		struct fi_av_attr attr = { .type = type };

		OK(fi_av_open(a.domain, &attr, &av, NULL));
		ENSURE(attr.type == (type == FI_AV_UNSPEC ? FI_AV_TABLE : (enum fi_av_type)type), "type %d: %d", type, attr.type);
		OK(fi_close(&av->fid));
	}
	return NULL;
}

/* fi_setname gives an endpoint a port, until it is enabled. */
static const char *renamed(size_t arg)
{
	struct sockaddr_in name = { 0 }, other = { .sin_family = AF_INET };
	struct fi_cq_tagged_entry entry;
	struct fid_ep *ep, *second;
	struct side a, b;
	size_t len = sizeof name;

	(void)arg;
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	OK(fi_endpoint(b.domain, info, &ep, NULL));
	keep(close_fid, ep, "endpoint");
	OK(fi_getname(&ep->fid, &name, &len));
	/* An address and a port of 0 change nothing. */
	OK(fi_setname(&ep->fid, &other, sizeof other));
	OK(fi_getname(&ep->fid, &other, &len));
	ENSURE(!memcmp(&name, &other, sizeof name), "another name");
	name.sin_port = other.sin_port = htons((uint16_t)(20000 + getpid() % 10000));
	name.sin_zero[0] = 0;
	OK(fi_setname(&ep->fid, &other, sizeof other));
	OK(fi_getname(&ep->fid, &other, &len));
	ENSURE(!memcmp(&name, &other, sizeof name), "port %u", ntohs(other.sin_port));
	OK(fi_endpoint(b.domain, info, &second, NULL));
	keep(close_fid, second, "second endpoint");
	GIVES(FI_EADDRINUSE, fi_setname(&second->fid, &name, sizeof name));
	GIVES(FI_EINVAL, fi_setname(&second->fid, &name, 3));
	other.sin_addr.s_addr = htonl(0xc0000201); /* 192.0.2.1 */
	GIVES(FI_EADDRNOTAVAIL, fi_setname(&second->fid, &other, sizeof other));
	OK(fi_ep_bind(ep, &b.tx->fid, FI_TRANSMIT));
	OK(fi_ep_bind(ep, &b.rx->fid, FI_RECV));
	OK(fi_ep_bind(ep, &b.av->fid, 0));
	OK(fi_enable(ep));
	GIVES(FI_EOPBADSTATE, fi_setname(&ep->fid, &name, sizeof name));
	OK(fi_recv(ep, in, 100, NULL, FI_ADDR_UNSPEC, &b));
	ENSURE(fi_av_insert(a.av, &name, 1, &a.peer, 0, NULL) == 1, "fi_av_insert");
	OK(fi_send(a.ep, out, 100, NULL, a.peer, &a));
	TRY(next(b.rx, &entry, NULL));
	TRY(next(a.tx, &entry, NULL));
	return NULL;
}

/* Unsupported requests are refused with the errno that libfabric documents. */
static const char *refused(size_t arg)
{
	struct fi_info *hints, *none = NULL;
	struct iovec iov[5] = { { out, 1 }, { out, 1 }, { out, 1 }, { out, 1 }, { out, 1 } };
	struct fi_av_attr shared = { .type = FI_AV_TABLE, .name = "shared" };
	struct fid_av *av;
	fi_addr_t addrs[3];
	int errors[3];
	struct side a;
	char small[4];
	size_t len = 0;

	(void)arg;
	TRY(open_side(&a, 0));
	GIVES(FI_ETOOSMALL, fi_getname(&a.ep->fid, NULL, &len));
	ENSURE(len == 16, "a name of %zu bytes", len);
	len = sizeof small;
	GIVES(FI_ETOOSMALL, fi_getname(&a.ep->fid, small, &len));
	struct sockaddr_in names[3] = { { .sin_family = AF_INET, .sin_port = htons(9), .sin_addr.s_addr = htonl(0x7f000001) },
					{ .sin_family = AF_UNIX },
					{ .sin_family = AF_INET, .sin_addr.s_addr = htonl(0x7f000001) } };
	ENSURE(fi_av_insert(a.av, names, 3, addrs, FI_SYNC_ERR, errors) == 1,
	       "fi_av_insert of one valid and two invalid names does not return 1");
	ENSURE(!errors[0] && errors[1] == FI_EINVAL && errors[2] == FI_EINVAL && addrs[1] == FI_ADDR_NOTAVAIL,
	       "invalid names have another status");
	struct sockaddr_in back;
	len = sizeof back;
	OK(fi_av_lookup(a.av, addrs[0], &back, &len));
	ENSURE(len == 16 && !memcmp(&back, &names[0], 16), "fi_av_lookup");
	OK(fi_av_remove(a.av, &addrs[0], 1, 0));
	GIVES(FI_EINVAL, fi_av_remove(a.av, &addrs[0], 1, 0));
	GIVES(FI_EINVAL, fi_av_lookup(a.av, addrs[0], &back, &len));
	GIVES(FI_EINVAL, fi_send(a.ep, out, 1, NULL, addrs[0], NULL));
	GIVES(FI_EINVAL, fi_send(a.ep, out, 1, NULL, 12345, NULL));
	GIVES(FI_EINVAL, fi_sendv(a.ep, iov, NULL, 5, 0, NULL));
	GIVES(FI_EINVAL, fi_trecv(a.ep, in, 1, NULL, 12345, 0, 0, NULL));
	GIVES(FI_EINVAL, fi_trecv(a.ep, in, 1, NULL, addrs[0], 0, 0, NULL));
	ENSURE(fi_av_insert(a.av, &names[0], 1, addrs, 0, NULL) == 1, "fi_av_insert");
	GIVES(FI_EMSGSIZE, fi_inject(a.ep, out, INJECT + 1, addrs[0]));
	GIVES(FI_ENOSYS, fi_av_open(a.domain, &shared, &av, NULL));
	GIVES(FI_EBUSY, fi_close(&a.domain->fid));
	GIVES(FI_EBUSY, fi_close(&a.tx->fid));
	GIVES(FI_EBUSY, fi_close(&a.av->fid));
	GIVES(FI_EOPBADSTATE, fi_ep_bind(a.ep, &a.tx->fid, FI_TRANSMIT));
	for (int what = 0; what < 5; what++) {
		hints = fi_allocinfo();
		hints->fabric_attr->prov_name = strdup("anywarp");
		hints->caps = FI_MSG;
		switch (what) {
		case 0: hints->ep_attr->type = FI_EP_MSG; break;
		case 1: hints->ep_attr->type = FI_EP_DGRAM; break;
		case 2: hints->caps = FI_RMA; break; /* without a memory registration mode */
		case 3: hints->domain_attr->data_progress = FI_PROGRESS_AUTO; break;
		case 4: hints->domain_attr->caps = FI_LOCAL_COMM | FI_SHARED_AV; break;
		}
		int rc = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &none);
		fi_freeinfo(hints);
		GIVES(FI_ENODATA, rc);
	}
	return NULL;
}

static const struct test tests[] = {
	/* A test that sets variables of the device runs in a separate process, because a process reads them once. */
	{ "failed_endpoint", failed_endpoint, 0, 0, true },
	{ "answers", answers, 0, 0, false },
	{ "refused", refused, 0, 0, false },
	{ "service", service, 0, 0, false },
	{ "renamed", renamed, 0, 0, false },
	{ "messages", messages, 0, 0, false },
	{ "messages_tagged", messages, TAG, 0, false },
	{ "messages_early", messages, EARLY, 0, false },
	{ "messages_tagged_early", messages, TAG | EARLY, 0, false },
	{ "messages_pieces", messages, PIECES, 0, false },
	{ "messages_tagged_pieces_early", messages, TAG | PIECES | EARLY, 0, false },
	{ "messages_to_itself", messages, SELF, 0, false },
	{ "messages_to_itself_early", messages, SELF | TAG | EARLY, 0, false },
	{ "matching", matching, 0, 0, false },
	{ "message_past_1gib", beyond_1gib, 0, 240, false },
	{ "message_past_1gib_over_a_link", beyond_1gib, 3, 240, false },
	{ "message_of_1536mib", beyond_1gib, 1, 240, false },
	{ "memory_of_1536mib", beyond_1gib, 2, 240, false },
	{ "fence_message", fence, 0, 0, false },
	{ "fence_write", fence, 1, 0, false },
	{ "fence_atomic", fence, 2, 0, false },
	{ "link", link_between, 0, 0, true },
	{ "link_fails_at_once", link_between, 1, 0, true },
	{ "link_fails", link_between, 2, 0, true },
	{ "link_fails_at_the_other_end", link_between, 3, 0, true },
	{ "link_fails_at_once_at_the_other_end", link_between, 4, 0, true },
	{ "link_has_an_error", link_between, 5, 0, true },
	{ "link_fails_at_both_ends", link_between, 6, 0, true },
	{ "link_fails_at_a_write", link_between, 8, 0, true },
	{ "link_fails_at_a_write_at_the_other_end", link_between, 9, 0, true },
	{ "link_has_an_error_of_a_write", link_between, 10, 0, true },
	{ "link_binds_no_window", link_between, 11, 0, true },
	{ "link_binds_no_window_at_the_other_end", link_between, 12, 0, true },
	{ "link_fails_at_windows_and_writes", link_between, 13, 0, true },
	{ "delivered", delivered, 0, 0, false },
	{ "delivered_tagged", delivered, TAG, 0, false },
	{ "delivered_early", delivered, EARLY, 0, false },
	{ "delivered_tagged_early", delivered, TAG | EARLY, 0, false },
	{ "delivered_by_default", delivered, BY_DEFAULT, 0, false },
	{ "delivered_over_a_link", delivered, CONNECTED | TAG, 0, true },
	{ "delivered_over_a_link_early", delivered, CONNECTED | EARLY, 0, true },
	{ "link_closes", link_closes, 0, 0, false },
	{ "link_abandoned", link_abandoned, 0, 0, false },
	{ "link_with_loss", link_between, WITH_LOSS, 0, true },
	{ "links_limited", links_limited, 0, 0, true },
	{ "links_disabled", links_limited, 1, 0, true },
	{ "links_of_closed_peers", links_of_closed_peers, 0, 0, true },
	{ "no_link_at_the_end", no_link_at_the_end, 0, 0, false },
	{ "no_link_at_the_end_offered", no_link_at_the_end, 1, 0, false },
	{ "receives_in_reverse", receives_in_reverse, 0, 0, false },
	{ "fenced_read", fenced_read, 0, 0, false },
	{ "failed_before_the_wait", failed_before_the_wait, 0, 0, false },
	{ "closes_after_inject", closes_after_inject, 0, 0, false },
	{ "directed_after_remove", directed_after_remove, 0, 0, false },
	{ "flood", flood, 0, 0, false },
	{ "flood_injected", flood, 1, 0, false },
	{ "flood_hostile", flood_hostile, 0, 0, false },
	{ "flood_of_all_names", all_names_used, 0, 240, false },
	{ "truncation", truncation, 1000, 0, false },
	{ "truncation_long", truncation, 100000, 0, false },
	{ "cancel", cancel, 0, 0, false },
	{ "multi_recv", multi_recv, 0, 0, false },
	{ "multi_recv_early", multi_recv, 1, 0, false },
	{ "peek_and_claim", peek_and_claim, 1000, 0, false },
	{ "peek_and_claim_long", peek_and_claim, 100000, 0, false },
	{ "selective", selective, 0, 0, false },
	{ "threads", threads, 0, 0, false },
	{ "memory", memory, 0, 0, false },
	{ "atomics", atomics, 5, 0, false },
	{ "atomics_long", atomics, 512, 0, false },
	{ "wait_fd", wait_object, 0, 0, false },
	{ "wait_sread", wait_object, 1, 0, false },
	{ "wait_behind_others", wait_behind_others, 0, 0, false },
	{ "not_delivered", not_delivered, 0, 0, false },
	{ "killed_peer", lost_peer, SIGKILL, 0, false },
	{ "stopped_peer", lost_peer, SIGSTOP, 0, false },
	{ "killed_peer_with_link", lost_peer, SIGKILL | LINK, 0, true },
	{ "stopped_peer_with_link", lost_peer, SIGSTOP | LINK, 0, true },
	{ "answer_lost_to_a_message", answer_lost, ANNOUNCES, 0, true },
	{ "answer_lost_to_an_atomic", answer_lost, REQUESTS, 0, true },
	{ "answer_to_a_sender_that_gave_up", answer_lost, RECEIVES_LATE, 0, true },
	{ "link_given_up", link_given_up, 0, 0, true },
	{ "notice_waits", notice_waits, 0, 0, true },
	{ "link_fails_before_write", link_fails_before_write, 0, 0, true },
	{ "link_needed_while_one_closes", link_needed_while_one_closes, 0, 0, true },
	{ "read_by_receiver", read_by_receiver, 0, 0, true },
	{ "read_messages", read_messages, TAG, 0, true },
	{ "read_messages_early", read_messages, EARLY, 0, true },
	{ "read_messages_in_pieces", read_messages, PIECES | TAG, 0, true },
	{ "read_messages_to_itself", read_messages, SELF, 0, true },
	{ "read_peek_and_claim", read_peek, 100000, 0, true },
	{ "read_multi_recv", read_multi_recv, 0, 0, true },
	{ "peers", peers, 0, 240, true },
	{ "other_key", other_key, 0, 0, false },
	{ "hostile", hostile, 0, 0, false },
};

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "--two")) {
		struct side a, b;

		return open_sides(&a, &b) != NULL;
	}
	if (argc == 3 && !strcmp(argv[1], "--peer"))
		return be_a_peer(argv[2], false);
	if (argc == 3 && !strcmp(argv[1], "--idle-peer"))
		return be_a_peer(argv[2], true);
	if (argc == 3 && !strcmp(argv[1], "--peer-with-link"))
		return be_a_peer_with_link(argv[2]);
	if (argc == 6 && !strcmp(argv[1], "--waiting-peer"))
		return be_a_waiting_peer(argv[2], atoi(argv[3]), strtoull(argv[4], NULL, 10), strtoull(argv[5], NULL, 10));
	/* fi_getinfo without hints would also query libfabric's verbs provider. It leaks the memory of the address of a loopback
	 * interface (vrb_fill_addr), which LeakSanitizer reports. */
	setenv("FI_PROVIDER", "anywarp", 0);
	/* The time-out for a silent peer. */
	setenv("FI_ANYWARP_PEER_TIMEOUT_MS", "3000", 0);
	if (argc == 1) {
		/* These tests take seconds, and run only when they are named. */
		char *most[] = { argv[0], "--without=_of_1536mib", "--without=flood_of_all_names", NULL };

		return run_tests(tests, COUNT(tests), 3, most);
	}
	return run_tests(tests, COUNT(tests), argc, argv);
}
