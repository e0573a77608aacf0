/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * <anywarp-buffers.h>: which buffers are copied, registered and kept, and that no registration outlives its memory.
 *
 * This program defines ibv_reg_mr and ibv_dereg_mr, which number the registrations and call the functions of the
 * device. A device that pins pages continues to use the pages that were mapped at the time of the registration. A
 * registration is therefore valid only if it is newer than the mapping of its memory.
 */
#include "ends.h"

#include <anywarp-buffers.h>
#include <dlfcn.h>
#include <inttypes.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>

#undef ibv_reg_mr

#define KIB ((size_t)1024)
#define MIB (1024 * KIB)
#define MOST 65536

static struct {
	struct ibv_mr *mr;
	uint32_t lkey;
	uint64_t number;
} live[MOST];
static size_t lives;
static uint64_t registrations;
static pthread_mutex_t lives_lock = PTHREAD_MUTEX_INITIALIZER;

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	static struct ibv_mr *(*real)(struct ibv_pd *, void *, size_t, int);
	struct ibv_mr *mr;

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "ibv_reg_mr");
	mr = real(pd, addr, length, access);
	pthread_mutex_lock(&lives_lock);
	if (mr && lives < MOST) {
		live[lives].mr = mr;
		live[lives].lkey = mr->lkey;
		live[lives++].number = ++registrations;
	}
	pthread_mutex_unlock(&lives_lock);
	return mr;
}

/* The duration of the next ibv_dereg_mr, as with a device that unpins many pages, and whether that call has begun. */
static unsigned int slow_ms;
static bool slow_begun;
static unsigned int deregistrations;

int ibv_dereg_mr(struct ibv_mr *mr)
{
	static int (*real)(struct ibv_mr *);
	unsigned int slow = __atomic_exchange_n(&slow_ms, 0, __ATOMIC_SEQ_CST);

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "ibv_dereg_mr");
	__atomic_fetch_add(&deregistrations, 1, __ATOMIC_SEQ_CST);
	if (slow) {
		__atomic_store_n(&slow_begun, true, __ATOMIC_SEQ_CST);
		sleep_ms(slow);
	}
	pthread_mutex_lock(&lives_lock);
	for (size_t i = 0; i < lives; i++)
		if (live[i].mr == mr) {
			live[i] = live[--lives];
			break;
		}
	pthread_mutex_unlock(&lives_lock);
	return real(mr);
}

/* The number of the newest registration. */
static uint64_t newest(void)
{
	uint64_t number;

	pthread_mutex_lock(&lives_lock);
	number = registrations;
	pthread_mutex_unlock(&lives_lock);
	return number;
}

/* The number of the registration with this key; 0 if it has ended. */
static uint64_t number_of(uint32_t lkey)
{
	uint64_t number = 0;

	pthread_mutex_lock(&lives_lock);
	for (size_t i = 0; i < lives; i++)
		if (live[i].lkey == lkey)
			number = live[i].number;
	pthread_mutex_unlock(&lives_lock);
	return number;
}

static size_t alive(void)
{
	size_t n;

	pthread_mutex_lock(&lives_lock);
	n = lives;
	pthread_mutex_unlock(&lives_lock);
	return n;
}

static int close_buffers(void *p) { return awbuf_close(p); }

static struct awbuf *opened(struct ibv_pd *pd, struct awbuf_attr attr)
{
	struct awbuf *buffers;

	attr.size = sizeof attr;
	buffers = awbuf_open(pd, &attr);
	if (buffers)
		keep(close_buffers, buffers, "buffers");
	return buffers;
}

static struct awbuf_stats stats_of(struct awbuf *buffers)
{
	struct awbuf_stats stats = { 0 };

	awbuf_query(buffers, &stats, sizeof stats);
	return stats;
}

static uint8_t pattern(size_t i, unsigned int seed)
{
	return (uint8_t)(i * 131 + (i >> 8) * 7 + seed);
}

static void fill(uint8_t *at, size_t len, unsigned int seed)
{
	for (size_t i = 0; i < len; i++)
		at[i] = pattern(i, seed);
}

static const char *same(const uint8_t *at, size_t len, unsigned int seed)
{
	for (size_t i = 0; i < len; i++)
		ENSURE(at[i] == pattern(i, seed), "byte %zu of %zu is %u, expected %u", i, len, at[i], pattern(i, seed));
	return NULL;
}

static uint8_t *mapped(size_t len)
{
	return mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

/* Sends between two ends with buffers of their managers (struct awbuf), and checks that the buffer of the sender is of the kind `how`. */
static const char *transfer(struct pair *p, struct awbuf *from, struct awbuf *to, const uint8_t *src, uint8_t *dst, size_t len,
			    enum awbuf_how how)
{
	struct awbuf_buffer out, in;
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct ibv_wc wc;

	ENSURE(!awbuf_get_recv(to, dst, len, 0, &in), "get_recv of %zu: %s", len, strerror(errno));
	ENSURE(!awbuf_get_send(from, src, len, 0, &out), "get_send of %zu: %s", len, strerror(errno));
	ENSURE(out.how == how && in.length == len, "%zu bytes are sent by %d, expected %d", len, out.how, how);
	ENSURE((out.how == AWBUF_COPIED) == (out.addr != src), "a copied buffer does not use the pool");
	sge = (struct ibv_sge){ .addr = (uintptr_t)in.addr, .length = (uint32_t)len, .lkey = in.lkey };
	TRY(post_recv(p->b.qp, 1, &sge, 1));
	sge = (struct ibv_sge){ .addr = (uintptr_t)out.addr, .length = (uint32_t)len, .lkey = out.lkey };
	wr = send_wr(2, IBV_WR_SEND, &sge, 1);
	TRY(post(p->a.qp, &wr));
	TRY(expect_ok(p->a.scq, 2, IBV_WC_SEND, NULL));
	TRY(expect_ok(p->b.rcq, 1, IBV_WC_RECV, &wc));
	ENSURE(wc.byte_len == len, "another number of bytes arrives: %u", wc.byte_len);
	ENSURE(!awbuf_release(&out, 0) && !awbuf_release(&in, wc.byte_len), "release");
	return NULL;
}

/* Data of lengths below and above the critical size arrives complete. */
static const char *data(size_t arg)
{
	static const size_t lengths[] = { 1, 4095, 4096, 4097, 32 * KIB, 32 * KIB + 1, 100001, 3 * MIB + 7 };
	struct awbuf *from, *to;
	struct awbuf_stats stats;
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &(struct want){ 0 }));
	from = opened(p.a.pd, (struct awbuf_attr){ .critical_size = 32 * KIB, .flags = AWBUF_NO_CACHE });
	to = opened(p.b.pd, (struct awbuf_attr){ .critical_size = 32 * KIB, .flags = AWBUF_NO_CACHE });
	ENSURE(from && to, "awbuf_open: %s", strerror(errno));
	for (unsigned int i = 0; i < COUNT(lengths); i++) {
		size_t len = lengths[i];
		uint8_t *src = malloc(len + 1), *dst = malloc(len + 1);

		keep(close_memory, src, "memory");
		keep(close_memory, dst, "memory");
		fill(src, len, i);
		memset(dst, 0, len + 1);
		TRY(transfer(&p, from, to, src, dst, len, len <= 32 * KIB ? AWBUF_COPIED : AWBUF_REGISTERED));
		TRY(same(dst, len, i));
		ENSURE(!dst[len], "a byte after the buffer is written");
	}
	stats = stats_of(from);
	ENSURE(stats.copied == 5 && stats.registered == 3 && !stats.kept && !stats.in_use && stats.critical_size == 32 * KIB,
	       "%" PRIu64 " copied, %" PRIu64 " registered, %" PRIu64 " in use", stats.copied, stats.registered, stats.in_use);
	ENSURE(stats.copied_bytes == 1 + 4095 + 4096 + 4097 + 32 * KIB, "%" PRIu64 " bytes copied", stats.copied_bytes);
	return NULL;
}

/* At release, exactly the received bytes are copied. */
static const char *short_receive(size_t arg)
{
	struct awbuf_buffer in;
	struct awbuf *buffers;
	uint8_t dst[100];

	(void)arg;
	TRY(open_device());
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = 4096 });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	memset(dst, 9, sizeof dst);
	ENSURE(!awbuf_get_recv(buffers, dst, sizeof dst, 0, &in) && in.how == AWBUF_COPIED, "get_recv: %s", strerror(errno));
	memset(in.addr, 5, sizeof dst);
	ENSURE(dst[0] == 9, "the memory is written before the release");
	ENSURE(!awbuf_release(&in, 60), "release: %s", strerror(errno));
	for (size_t i = 0; i < sizeof dst; i++)
		ENSURE(dst[i] == (i < 60 ? 5 : 9), "byte %zu is %u", i, dst[i]);
	return NULL;
}

/* If no critical size is configured, the library measures one. It is small for a device that registers quickly. */
static const char *measured(size_t arg)
{
	struct awbuf *buffers;
	struct awbuf_stats stats;

	(void)arg;
	TRY(open_device());
	buffers = awbuf_open(new_pd(), NULL);
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	keep(close_buffers, buffers, "buffers");
	stats = stats_of(buffers);
	ENSURE(stats.critical_size > 0 && stats.critical_size <= MIB, "the critical size is %" PRIu64, stats.critical_size);
	return NULL;
}

/* Uses memory until its registration is kept. Stores the key of the registration in `lkey`. */
static const char *until_kept(struct awbuf *buffers, const void *at, size_t len, uint32_t *lkey)
{
	struct awbuf_buffer out;

	for (int i = 0; i < 300; i++) {
		ENSURE(!awbuf_get_send(buffers, at, len, 0, &out), "get_send: %s", strerror(errno));
		ENSURE(!awbuf_release(&out, 0), "release: %s", strerror(errno));
		if (out.how == AWBUF_KEPT) {
			*lkey = out.lkey;
			return NULL;
		}
	}
	return "the registration of memory in regular use is not kept";
}

enum change { UNMAP, SYSCALL, FIXED, REMAP, EMPTY, FREE, TRIM, PART, CHANGES };

/* A kept registration is not used again after its memory was removed, whichever call removed it. */
static const char *change_once(size_t how)
{
	size_t len = 512 * KIB;
	struct awbuf *buffers;
	struct awbuf_buffer out;
	struct awbuf_stats stats;
	uint8_t *at, *other = NULL;
	/* volatile, because the compiler may omit an allocation that is freed and not used. */
	uint8_t *volatile hole, *volatile wall = NULL;
	uint64_t before, number;
	uintptr_t address;
	uint32_t lkey = 0;

	TRY(open_device());
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = 1 });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	if (!stats_of(buffers).watching)
		SKIP("the kernel does not report changes of memory");
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
	if (how == FREE || how == TRIM)
		SKIP("the sanitizer's allocator keeps freed memory mapped");
#endif
	if (how == FREE || how == TRIM) {
		/* With this threshold the memory is either a separate mapping or the end of the heap. */
		mallopt(M_MMAP_THRESHOLD, how == FREE ? 128 * (int)KIB : 64 * (int)MIB);
		mallopt(M_TRIM_THRESHOLD, 64 * (int)KIB);
		/*
		 * Reserves a hole in the heap for allocations of the library, so that they do not follow the memory at
		 * the end of the heap. `wall` prevents the rest of the hole from merging with the memory when that is
		 * freed.
		 */
		hole = how == TRIM ? malloc(256 * KIB) : NULL;
		wall = malloc(64);
		at = malloc(len);
		free(hole);
	} else {
		at = mapped(len);
	}
	ENSURE(at && at != MAP_FAILED, "memory: %s", strerror(errno));
	memset(at, 1, len);
	TRY(until_kept(buffers, at, len, &lkey));
	/* A part of a region with a kept registration uses this registration. */
	ENSURE(!awbuf_get_send(buffers, at + 5000, 100000, 0, &out), "get_send: %s", strerror(errno));
	ENSURE(out.how == AWBUF_KEPT && out.lkey == lkey && out.addr == at + 5000, "a part of a kept region does not use its registration");
	ENSURE(!awbuf_release(&out, 0), "release");
	address = (uintptr_t)at;
	switch ((enum change)how) {
	case UNMAP:
		ENSURE(!munmap(at, len), "munmap: %s", strerror(errno));
		break;
	case SYSCALL:
		ENSURE(!syscall(SYS_munmap, at, len), "munmap: %s", strerror(errno));
		break;
	case FIXED:
		break;
	case REMAP:
		other = mremap(at, len, 2 * len, MREMAP_MAYMOVE | MREMAP_FIXED, mapped(2 * len));
		ENSURE(other != MAP_FAILED && other != at, "mremap: %s", strerror(errno));
		break;
	case EMPTY:
		if (madvise(at, len, MADV_DONTNEED) && errno == EINVAL)
			SKIP("MADV_DONTNEED does not work on locked pages");
		break;
	case FREE:
	case TRIM:
		free(at);
		ENSURE(how == FREE || (uintptr_t)sbrk(0) < address + len, "the heap did not shrink: the test proves nothing");
		break;
	case PART:
		/* Discards one page. */
		if (madvise(at + 65536, 4096, MADV_DONTNEED) && errno == EINVAL)
			SKIP("MADV_DONTNEED does not work on locked pages");
		break;
	case CHANGES:
		break;
	}
	before = newest();
	if (how == FREE || how == TRIM) {
		uint8_t *again = malloc(len);

		ENSURE(again == at, "malloc gives other memory: the test proves nothing");
	} else if (how != EMPTY && how != PART) {
		ENSURE(mmap(at, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at, "mmap: %s",
		       strerror(errno));
	}
	memset(at, 2, len);
	for (int i = 0; i < 4; i++) {
		ENSURE(!awbuf_get_send(buffers, at, len, 0, &out), "get_send: %s", strerror(errno));
		number = number_of(out.lkey);
		ENSURE(number > before, "the registration is older than the memory (%" PRIu64 ", %" PRIu64 ")", number, before);
		ENSURE(!awbuf_release(&out, 0), "release");
	}
	stats = stats_of(buffers);
	ENSURE(stats.invalidated >= 1, "no registration was invalidated");
	/* The thread that ends registrations needs a moment to unpin the pages. */
	for (int i = 0; i < 1000 && number_of(lkey) && number_of(lkey) <= before; i++)
		sleep_ms(1);
	ENSURE(!number_of(lkey) || number_of(lkey) > before, "the old registration has not ended");
	if (how == FREE || how == TRIM)
		free(at);
	else
		munmap(at, len);
	if (other)
		munmap(other, 2 * len);
	free(wall);
	return NULL;
}

/* Another thread may take the part of the heap that the test uses. The test is then repeated. */
static const char *changed(size_t how)
{
	const char *why = NULL;

	for (unsigned int turn = 0; turn < 10; turn++) {
		why = change_once(how);
		if (!why || !strstr(why, "the test proves nothing"))
			return why;
	}
	return why;
}

/* Not all changes of shared memory are reported, so its registration is not kept. */
static const char *not_kept(size_t arg)
{
	struct awbuf *buffers;
	struct awbuf_buffer out;
	uint8_t *at;

	(void)arg;
	TRY(open_device());
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = 1 });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	at = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ENSURE(at != MAP_FAILED, "mmap: %s", strerror(errno));
	for (int i = 0; i < 20; i++) {
		ENSURE(!awbuf_get_send(buffers, at, MIB, 0, &out), "get_send: %s", strerror(errno));
		ENSURE(out.how == AWBUF_REGISTERED, "the registration of shared memory is kept");
		ENSURE(!awbuf_release(&out, 0), "release");
	}
	munmap(at, MIB);
	return NULL;
}

/* A registration in use stays until it is released, even if its memory changes. */
static const char *in_use(size_t arg)
{
	struct awbuf_buffer out, again;
	struct awbuf *buffers;
	uint8_t *at;
	uint32_t lkey = 0;

	(void)arg;
	TRY(open_device());
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = 1 });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	at = mapped(MIB);
	ENSURE(!awbuf_get_send(buffers, at, MIB, AWBUF_STABLE, &out) && out.how == AWBUF_KEPT, "%s", strerror(errno));
	lkey = out.lkey;
	ENSURE(awbuf_invalidate(buffers, at + 4096, 1) == 1, "awbuf_invalidate does not end one registration");
	ENSURE(number_of(lkey), "a registration in use has ended");
	ENSURE(!awbuf_get_send(buffers, at, MIB, AWBUF_STABLE, &again), "%s", strerror(errno));
	ENSURE(again.lkey != lkey, "a registration is used again after it was invalidated");
	ENSURE(awbuf_close(buffers) == -1 && errno == EBUSY, "awbuf_close while buffers are in use: %s", strerror(errno));
	ENSURE(!awbuf_release(&out, 0), "release");
	ENSURE(!number_of(lkey), "the registration has not ended");
	ENSURE(!awbuf_release(&again, 0), "release");
	ENSURE(awbuf_invalidate(buffers, at - 4096, 4096) == 0 && awbuf_invalidate(buffers, at, 1) == 1, "invalidate");
	ENSURE(!number_of(again.lkey), "the registration has not ended");
	munmap(at, MIB);
	return NULL;
}

/* The kept registrations stay within their limits: the oldest one is ended first. */
static const char *limits(size_t arg)
{
	struct awbuf_stats stats;
	struct awbuf_buffer out;
	struct awbuf *buffers;
	uint32_t first = 0;
	size_t before;
	uint8_t *at;

	(void)arg;
	TRY(open_device());
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = 1, .cache_bytes = MIB });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	at = mapped(8 * MIB);
	before = alive();
	for (size_t i = 0; i < 32; i++) {
		ENSURE(!awbuf_get_send(buffers, at + i * 256 * KIB, 256 * KIB, AWBUF_STABLE, &out), "%s", strerror(errno));
		ENSURE(out.how == AWBUF_KEPT, "piece %zu is not kept", i);
		first = i ? first : out.lkey;
		ENSURE(!awbuf_release(&out, 0), "release");
		ENSURE(alive() <= before + 4, "%zu registrations are alive, more than the limit allows", alive() - before);
	}
	ENSURE(!number_of(first), "the oldest registration has not ended");
	ENSURE(!awbuf_get_send(buffers, at, 2 * MIB, AWBUF_STABLE, &out) && out.how == AWBUF_REGISTERED, "more bytes are kept than allowed");
	ENSURE(!awbuf_release(&out, 0), "release");
	stats = stats_of(buffers);
	ENSURE(stats.cached_bytes <= MIB && stats.evicted >= 28, "%" PRIu64 " bytes are kept, %" PRIu64 " have ended",
	       stats.cached_bytes, stats.evicted);
	munmap(at, 8 * MIB);
	return NULL;
}

/* When the whole pool is in use, memory is registered instead. */
static const char *pool(size_t arg)
{
	enum { N = 400 };
	static struct awbuf_buffer out[N];
	struct awbuf_stats stats;
	struct awbuf *buffers;
	uint8_t *at = malloc(N * KIB);

	(void)arg;
	keep(close_memory, at, "memory");
	TRY(open_device());
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = 4096, .pool_bytes = 256 * KIB, .flags = AWBUF_NO_CACHE });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	fill(at, N * KIB, 3);
	for (size_t i = 0; i < N; i++)
		ENSURE(!awbuf_get_send(buffers, at + i * KIB, KIB, 0, &out[i]), "buffer %zu: %s", i, strerror(errno));
	for (size_t i = 0; i < N; i++) {
		ENSURE(out[i].how == (i < 256 ? AWBUF_COPIED : AWBUF_REGISTERED), "buffer %zu is %d", i, out[i].how);
		ENSURE(!memcmp(out[i].addr, at + i * KIB, KIB), "buffer %zu has other data", i);
	}
	for (size_t i = 0; i < N; i++)
		ENSURE(!awbuf_release(&out[i], 0), "release");
	stats = stats_of(buffers);
	ENSURE(stats.pool_bytes == 256 * KIB && !stats.in_use, "%" PRIu64 " bytes, %" PRIu64 " in use", stats.pool_bytes, stats.in_use);
	ENSURE(!awbuf_get_send(buffers, at, KIB, 0, &out[0]) && out[0].how == AWBUF_COPIED, "no buffer returned to the pool");
	return awbuf_release(&out[0], 0) ? "release" : NULL;
}

/* Memory of the pool that is not in use serves buffers of any size. */
static const char *pool_sizes(size_t arg)
{
	enum { N = 16 };
	struct awbuf_buffer large[N], small[N], out;
	struct awbuf_stats stats;
	struct awbuf *buffers;
	uint8_t *at = mapped(N * MIB);

	(void)arg;
	TRY(open_device());
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = MIB, .pool_bytes = N * MIB, .flags = AWBUF_NO_CACHE });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	fill(at, N * MIB, 5);
	for (int turn = 0; turn < 3; turn++) {
		for (size_t i = 0; i < N; i++) {
			ENSURE(!awbuf_get_send(buffers, at + i * MIB, MIB, 0, &large[i]), "get_send: %s", strerror(errno));
			ENSURE(large[i].how == AWBUF_COPIED, "turn %d: buffer %zu of 1 MiB is %d", turn, i, large[i].how);
			ENSURE(!memcmp(large[i].addr, at + i * MIB, MIB), "turn %d: buffer %zu has other data", turn, i);
		}
		ENSURE(!awbuf_get_send(buffers, at, 64, 0, &out) && out.how == AWBUF_REGISTERED, "more is in use than the limit allows");
		ENSURE(!awbuf_release(&out, 0), "release");
		for (size_t i = 0; i < N; i++)
			ENSURE(!awbuf_release(&large[i], 0), "release");
		/* 1, 4, 16 and 64 KiB. */
		for (size_t i = 0; i < N; i++) {
			ENSURE(!awbuf_get_send(buffers, at + i * MIB, KIB << i % 4 * 2, 0, &small[i]), "get_send: %s", strerror(errno));
			ENSURE(small[i].how == AWBUF_COPIED, "turn %d: buffer %zu of %zu is %d", turn, i, small[i].length, small[i].how);
		}
		for (size_t i = 0; i < N; i++) {
			ENSURE(!memcmp(small[i].addr, at + i * MIB, small[i].length), "turn %d: buffer %zu has other data", turn, i);
			ENSURE(!awbuf_release(&small[i], 0), "release");
		}
	}
	stats = stats_of(buffers);
	ENSURE(stats.pool_bytes <= N * MIB && !stats.in_use, "%" PRIu64 " bytes, %" PRIu64 " in use", stats.pool_bytes, stats.in_use);
	ENSURE(!awbuf_close(buffers), "awbuf_close: %s", strerror(errno));
	forget(buffers);
	/* Slabs of small buffers make room for a large one, and a small buffer uses a larger one that is free. */
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = MIB, .pool_bytes = MIB, .flags = AWBUF_NO_CACHE });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	for (size_t i = 0; i < 4; i++)
		ENSURE(!awbuf_get_send(buffers, at + i * MIB, 256 * KIB, 0, &small[i]) && small[i].how == AWBUF_COPIED, "buffer %zu", i);
	for (size_t i = 0; i < 4; i++)
		ENSURE(!awbuf_release(&small[i], 0), "release");
	ENSURE(!awbuf_get_send(buffers, at, MIB, 0, &large[0]) && large[0].how == AWBUF_COPIED, "1 MiB is %d", large[0].how);
	ENSURE(!awbuf_release(&large[0], 0), "release");
	ENSURE(!awbuf_get_send(buffers, at, 64 * KIB, 0, &small[0]) && small[0].how == AWBUF_COPIED, "64 KiB is %d", small[0].how);
	ENSURE(!awbuf_get_send(buffers, at, 64, 0, &small[1]) && small[1].how == AWBUF_COPIED, "64 bytes beside 64 KiB is %d", small[1].how);
	ENSURE(!awbuf_release(&small[0], 0) && !awbuf_release(&small[1], 0), "release");
	ENSURE(stats_of(buffers).pool_bytes == MIB, "%" PRIu64 " bytes", stats_of(buffers).pool_bytes);
	munmap(at, N * MIB);
	return NULL;
}

/* Closing the manager ends all registrations. */
static const char *all_end(size_t arg)
{
	struct awbuf_buffer out;
	struct awbuf *buffers;
	struct ibv_pd *pd;
	size_t before;
	uint8_t *at = mapped(8 * MIB);

	(void)arg;
	TRY(open_device());
	pd = new_pd();
	before = alive();
	for (int turn = 0; turn < 50; turn++) {
		buffers = awbuf_open(pd, &(struct awbuf_attr){ .size = sizeof(struct awbuf_attr), .critical_size = 8 * KIB });
		ENSURE(buffers, "awbuf_open: %s", strerror(errno));
		for (size_t i = 0; i < 8; i++) {
			ENSURE(!awbuf_get_send(buffers, at + i * MIB, 8 * KIB << i, i & 1 ? AWBUF_STABLE : 0, &out), "%s", strerror(errno));
			ENSURE(!awbuf_release(&out, 0), "release");
		}
		ENSURE(!awbuf_close(buffers), "awbuf_close: %s", strerror(errno));
		ENSURE(alive() == before, "%zu registrations are left", alive() - before);
	}
	munmap(at, 8 * MIB);
	return NULL;
}

static const char *errors(size_t arg)
{
	struct awbuf_attr attr = { .size = sizeof attr, .flags = 1u << 7 };
	struct awbuf_buffer out, copy;
	struct awbuf_stats stats;
	struct awbuf *buffers;
	uint8_t at[64], *gone;

	(void)arg;
	TRY(open_device());
	ENSURE(!awbuf_open(NULL, NULL) && errno == EINVAL, "awbuf_open without a domain: %s", strerror(errno));
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = 4096 });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	ENSURE(!awbuf_open(new_pd(), &attr) && errno == EINVAL, "awbuf_open with an unknown flag: %s", strerror(errno));
	attr = (struct awbuf_attr){ .size = 4 };
	ENSURE(!awbuf_open(new_pd(), &attr) && errno == EINVAL, "awbuf_open with a short structure: %s", strerror(errno));
	ENSURE(awbuf_close(NULL) == -1 && errno == EINVAL, "awbuf_close of NULL: %s", strerror(errno));
	ENSURE(awbuf_get_send(buffers, at, 0, 0, &out) == -1 && errno == EINVAL, "awbuf_get_send of no bytes: %s", strerror(errno));
	ENSURE(awbuf_get_send(buffers, NULL, 8, 0, &out) == -1 && errno == EINVAL,
	       "awbuf_get_send of a null pointer: %s", strerror(errno));
	ENSURE(awbuf_get_send(buffers, at, 8, 0, NULL) == -1 && errno == EINVAL,
	       "awbuf_get_send without a place for the buffer: %s", strerror(errno));
	ENSURE(awbuf_get_send(NULL, at, 8, 0, &out) == -1 && errno == EINVAL,
	       "awbuf_get_send without a manager: %s", strerror(errno));
	ENSURE(awbuf_get_recv(buffers, at, 8, 2, &out) == -1 && errno == EINVAL,
	       "awbuf_get_recv with an unknown flag: %s", strerror(errno));
	ENSURE(awbuf_get_send(buffers, at, SIZE_MAX, 0, &out) == -1 && errno == EFAULT,
	       "awbuf_get_send of more bytes than an address space has: %s", strerror(errno));
	ENSURE(awbuf_release(NULL, 0) == -1 && errno == EINVAL, "awbuf_release of NULL: %s", strerror(errno));
	ENSURE(awbuf_query(buffers, NULL, 8) == -1 && errno == EINVAL, "awbuf_query into NULL: %s", strerror(errno));
	ENSURE(!awbuf_pieces_begin(buffers, at, 8, 0, 0) && errno == EINVAL,
	       "awbuf_pieces_begin without a direction: %s", strerror(errno));
	ENSURE(!awbuf_pieces_begin(buffers, at, 0, AWBUF_SEND, 0) && errno == EINVAL,
	       "awbuf_pieces_begin of no bytes: %s", strerror(errno));
	ENSURE(!awbuf_pieces_begin(buffers, at, SIZE_MAX, AWBUF_SEND, 0) && errno == EFAULT,
	       "awbuf_pieces_begin of more bytes than an address space has: %s", strerror(errno));
	ENSURE(!awbuf_pieces_begin(buffers, at, (size_t)1 << 46, AWBUF_SEND, 0) && errno == EINVAL,
	       "awbuf_pieces_begin with too many pieces: %s", strerror(errno));
	ENSURE(awbuf_pieces_next(NULL, &out) == -1 && awbuf_pieces_end(NULL) == -1 && errno == EINVAL,
	       "null instead of pieces is accepted");
	gone = mapped(MIB);
	munmap(gone, MIB);
	ENSURE(awbuf_get_send(buffers, gone, MIB, 0, &out) == -1 && errno == EFAULT,
	       "awbuf_get_send of unmapped memory: %s", strerror(errno));
	ENSURE(awbuf_get_send(buffers, gone, MIB, AWBUF_STABLE, &out) == -1 && errno == EFAULT,
	       "awbuf_get_send of unmapped memory with AWBUF_STABLE: %s", strerror(errno));
	ENSURE(!awbuf_get_send(buffers, at, 8, 0, &out), "get_send: %s", strerror(errno));
	copy = out;
	ENSURE(!awbuf_release(&out, 0), "release");
	ENSURE(awbuf_release(&out, 0) == -1 && errno == EINVAL, "a second awbuf_release: %s", strerror(errno));
	(void)copy;
	/* An older program passes a shorter structure. */
	memset(&stats, 0xff, sizeof stats);
	ENSURE(!awbuf_query(buffers, &stats, 16) && stats.copied == UINT64_MAX && stats.watching <= 1, "more is written than the caller's structure has");
	ENSURE(!stats_of(buffers).in_use, "buffers are in use");
	return NULL;
}

/* A long buffer is sent in pieces, which several threads prepare. */
static const char *pieces(size_t threads)
{
	size_t len = 24 * MIB + 5, at_byte = 0, n = 0;
	struct awbuf_pieces *pieces;
	struct awbuf_buffer out;
	struct awbuf *from;
	struct region sink = { 0 };
	struct pair p;
	uint8_t *src;
	int more;

	TRY(open_pair(&p, &(struct want){ 0 }));
	TRY(new_region(&sink, p.b.pd, len, ALL_ACCESS));
	from = opened(p.a.pd, (struct awbuf_attr){ .critical_size = 4096, .threads = (unsigned int)threads });
	ENSURE(from, "awbuf_open: %s", strerror(errno));
	src = mapped(len);
	fill(src, len, 7);
	pieces = awbuf_pieces_begin(from, src, len, AWBUF_SEND, 0);
	ENSURE(pieces, "awbuf_pieces_begin: %s", strerror(errno));
	ENSURE(awbuf_close(from) == -1 && errno == EBUSY, "awbuf_close succeeds while pieces are made");
	while ((more = awbuf_pieces_next(pieces, &out)) == 1) {
		struct ibv_sge sge = { .addr = (uintptr_t)out.addr, .length = (uint32_t)out.length, .lkey = out.lkey };
		struct ibv_send_wr wr = rdma_wr(n, IBV_WR_RDMA_WRITE, &sge, 1, &sink, at_byte);

		ENSURE(out.length == (at_byte + MIB <= len ? MIB : len - at_byte), "piece %zu has %zu bytes", n, out.length);
		TRY(post(p.a.qp, &wr));
		TRY(expect_ok(p.a.scq, n, IBV_WC_RDMA_WRITE, NULL));
		ENSURE(!awbuf_release(&out, 0), "release");
		at_byte += out.length;
		n++;
	}
	ENSURE(!more && at_byte == len && n == 25, "%zu bytes in %zu pieces: %s", at_byte, n, strerror(errno));
	ENSURE(!awbuf_pieces_next(pieces, &out), "awbuf_pieces_next returns a piece after the last");
	ENSURE(!awbuf_pieces_end(pieces), "end");
	TRY(same(sink.at, len, 7));
	/* The operation is ended early, after 0 to 19 of the 25 pieces. */
	for (size_t stop = 0; stop < 20; stop++) {
		pieces = awbuf_pieces_begin(from, src, len, AWBUF_SEND, 0);
		ENSURE(pieces, "awbuf_pieces_begin: %s", strerror(errno));
		for (size_t i = 0; i < stop; i++) {
			ENSURE(awbuf_pieces_next(pieces, &out) == 1, "next: %s", strerror(errno));
			ENSURE(!awbuf_release(&out, 0), "release");
		}
		ENSURE(!awbuf_pieces_end(pieces), "end");
		ENSURE(!stats_of(from).in_use, "pieces are in use after the end");
	}
	munmap(src, len);
	return NULL;
}

/* A piece that could not be prepared is tried again. */
static const char *piece_again(size_t threads)
{
	struct awbuf_pieces *pieces;
	struct awbuf_buffer out;
	struct awbuf *buffers;
	uint8_t *at = mapped(4 * MIB);

	TRY(open_device());
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = 4096, .threads = (unsigned int)threads, .flags = AWBUF_NO_CACHE });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	ENSURE(!munmap(at + MIB, MIB), "munmap: %s", strerror(errno));
	pieces = awbuf_pieces_begin(buffers, at, 4 * MIB, AWBUF_SEND, 0);
	ENSURE(pieces, "awbuf_pieces_begin: %s", strerror(errno));
	for (size_t i = 0; i < 4; i++) {
		if (i == 1) {
			for (int turn = 0; turn < 2; turn++)
				ENSURE(awbuf_pieces_next(pieces, &out) == -1 && errno == EFAULT, "turn %d: an unmapped piece: %s", turn,
				       strerror(errno));
			ENSURE(mmap(at + MIB, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at + MIB,
			       "mmap: %s", strerror(errno));
		}
		ENSURE(awbuf_pieces_next(pieces, &out) == 1, "piece %zu: %s", i, strerror(errno));
		ENSURE(out.addr == at + i * MIB, "piece %zu is at another address", i);
		ENSURE(!awbuf_release(&out, 0), "release");
	}
	ENSURE(!awbuf_pieces_next(pieces, &out) && !awbuf_pieces_end(pieces), "end");
	munmap(at, 4 * MIB);
	return NULL;
}

/* ---------------------------------------------------------------- threads */

#define THREADS 4u
#define LEN (64 * KIB)

static struct awbuf *shared;
static uint64_t until;
static uint64_t hits;

/*
 * Maps memory, uses it three times, and unmaps it. The kernel may give the addresses that one thread unmaps to another
 * thread at once. No use may get a registration that is older than the mapping.
 */
static void *churn(void *arg)
{
	uint64_t turns = 0;

	(void)arg;
	while (now_ms() < until) {
		uint8_t *at = mapped(LEN);
		uint64_t before = newest();

		if (at == MAP_FAILED)
			return (void *)"mmap";
		at[0] = 1;
		for (int i = 0; i < 3; i++) {
			struct awbuf_buffer out;
			uint64_t number;

			if (awbuf_get_send(shared, at, LEN, 0, &out))
				return (void *)"get_send";
			number = number_of(out.lkey);
			if (awbuf_release(&out, 0))
				return (void *)"release";
			if (number <= before)
				return (void *)"a registration is older than the memory";
		}
		munmap(at, LEN);
		turns++;
	}
	__atomic_fetch_add(&hits, turns, __ATOMIC_RELAXED);
	return NULL;
}

/* Repeatedly uses memory that stays mapped. */
static void *reuse(void *arg)
{
	uint8_t *at = mapped(LEN);
	uint64_t kept_uses = 0;

	(void)arg;
	memset(at, 3, LEN);
	while (now_ms() < until) {
		struct awbuf_buffer out;

		if (awbuf_get_recv(shared, at, LEN, 0, &out))
			return (void *)"get_recv";
		kept_uses += out.how == AWBUF_KEPT;
		if (!number_of(out.lkey))
			return (void *)"a registration in use has ended";
		if (awbuf_release(&out, LEN))
			return (void *)"release";
	}
	munmap(at, LEN);
	return kept_uses > 100 ? NULL : (void *)"the registration of memory in regular use is not kept";
}

static const char *threads(size_t arg)
{
	pthread_t thread[THREADS];
	const char *failed = NULL;

	(void)arg;
	TRY(open_device());
	shared = opened(new_pd(), (struct awbuf_attr){ .critical_size = 1 });
	ENSURE(shared, "awbuf_open: %s", strerror(errno));
	if (!stats_of(shared).watching)
		SKIP("the kernel does not report changes of memory");
	until = now_ms() + 3000;
	for (size_t i = 0; i < THREADS; i++)
		ENSURE(!pthread_create(&thread[i], NULL, i ? churn : reuse, NULL), "pthread_create");
	for (size_t i = 0; i < THREADS; i++) {
		void *result;

		pthread_join(thread[i], &result);
		failed = result ? result : failed;
	}
	ENSURE(!failed, "%s", failed);
	ENSURE(hits > 100, "only %" PRIu64 " turns", hits);
	return NULL;
}

/* ---------------------------------------------------------------- a signal handler that unmaps memory */

static uint8_t *unmapped;
static volatile sig_atomic_t unmappings;

static void unmap_it(int number)
{
	(void)number;
	munmap(unmapped, LEN);
	mmap(unmapped, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	unmappings++;
}

/* A handler that interrupts a function of the library, which may hold a lock, unmaps and maps memory whose registration is kept. */
static const char *handler(size_t arg)
{
	static const struct itimerval often = { { 0, 2000 }, { 0, 2000 } }, never;
	uint8_t *at = mapped(LEN);
	struct awbuf_buffer out;
	sigset_t set;

	(void)arg;
	TRY(open_device());
	shared = opened(new_pd(), (struct awbuf_attr){ .critical_size = 1 });
	ENSURE(shared, "awbuf_open: %s", strerror(errno));
	if (!stats_of(shared).watching)
		SKIP("the kernel does not report changes of memory");
	unmapped = mapped(LEN);
	sigemptyset(&set);
	sigaddset(&set, SIGPROF);
	signal(SIGPROF, unmap_it);
	setitimer(ITIMER_PROF, &often, NULL);
	until = now_ms() + 2000;
	for (unsigned int i = 0; now_ms() < until; i++) {
		ENSURE(!awbuf_get_send(shared, at, LEN, 0, &out) && !awbuf_release(&out, 0), "a use: %s", strerror(errno));
		if (i % 8)
			continue;
		/* Memory in use must not be unmapped. */
		sigprocmask(SIG_BLOCK, &set, NULL);
		ENSURE(!awbuf_get_send(shared, unmapped, LEN, 0, &out) && !awbuf_release(&out, 0), "a use: %s", strerror(errno));
		sigprocmask(SIG_UNBLOCK, &set, NULL);
	}
	setitimer(ITIMER_PROF, &never, NULL);
	ENSURE(unmappings > 10 && stats_of(shared).invalidated > 10, "%d unmappings, %" PRIu64 " registrations ended",
	       (int)unmappings, stats_of(shared).invalidated);
	munmap(at, LEN);
	munmap(unmapped, LEN);
	return NULL;
}

/* ---------------------------------------------------------------- a registration that ends slowly */

#define SLOW_MS 300u

static void slow_next(void)
{
	__atomic_store_n(&slow_begun, false, __ATOMIC_SEQ_CST);
	__atomic_store_n(&slow_ms, SLOW_MS, __ATOMIC_SEQ_CST);
}

static bool is_begun(void)
{
	for (unsigned int i = 0; i < WAIT_MS && !__atomic_load_n(&slow_begun, __ATOMIC_SEQ_CST); i++)
		sleep_ms(1);
	return __atomic_load_n(&slow_begun, __ATOMIC_SEQ_CST);
}

enum { BY_CLOSE, BY_INVALIDATE };

/* awbuf_close and awbuf_invalidate wait until a registration that another thread is ending has ended. */
static const char *waits(size_t by)
{
	struct ibv_pd *pd;
	struct awbuf *buffers;
	uint8_t *at = mapped(MIB);
	uint32_t lkey = 0;
	int rc;

	TRY(open_device());
	pd = ibv_alloc_pd(device);
	buffers = awbuf_open(pd, &(struct awbuf_attr){ .size = sizeof(struct awbuf_attr), .critical_size = 1 });
	ENSURE(pd && buffers, "awbuf_open: %s", strerror(errno));
	if (!stats_of(buffers).watching)
		SKIP("the kernel does not report changes of memory");
	TRY(until_kept(buffers, at, MIB, &lkey));
	slow_next();
	munmap(at, MIB);
	ENSURE(is_begun(), "the thread of the library ends no registration");
	ENSURE(number_of(lkey), "the registration has ended already: the test proves nothing");
	if (by == BY_INVALIDATE) {
		ENSURE(awbuf_invalidate(buffers, at, MIB) == 0, "the registration is not in the list any more");
		ENSURE(!number_of(lkey), "awbuf_invalidate returns before the registration has ended");
	}
	ENSURE(!awbuf_close(buffers), "awbuf_close: %s", strerror(errno));
	ENSURE(!number_of(lkey), "awbuf_close returns before the registration has ended");
	rc = ibv_dealloc_pd(pd);
	ENSURE(!rc, "ibv_dealloc_pd: %s", strerror(rc));
	return NULL;
}

static void *release_it(void *buffer)
{
	return awbuf_release(buffer, 0) ? (void *)"release" : NULL;
}

/* The manager is busy while a buffer is being released. */
static const char *busy(size_t arg)
{
	struct awbuf_buffer out;
	struct awbuf *buffers;
	uint8_t *at = mapped(MIB);
	pthread_t thread;
	void *result;
	int rc;

	(void)arg;
	TRY(open_device());
	buffers = awbuf_open(new_pd(), &(struct awbuf_attr){ .size = sizeof(struct awbuf_attr), .critical_size = 1 });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	ENSURE(!awbuf_get_send(buffers, at, MIB, 0, &out) && out.how == AWBUF_REGISTERED, "get_send: %s", strerror(errno));
	slow_next();
	ENSURE(!pthread_create(&thread, NULL, release_it, &out), "pthread_create");
	ENSURE(is_begun(), "the release ends no registration");
	ENSURE(stats_of(buffers).in_use == 1 || !number_of(out.lkey), "the buffer is not in use any more, but still registered");
	while ((rc = awbuf_close(buffers)) && errno == EBUSY)
		sleep_ms(1);
	ENSURE(!rc, "awbuf_close: %s", strerror(errno));
	ENSURE(!number_of(out.lkey), "awbuf_close returns before the registration has ended");
	pthread_join(thread, &result);
	ENSURE(!result, "%s", (char *)result);
	munmap(at, MIB);
	return NULL;
}

/* When the process has its maximum of kept registrations, the oldest ends, whichever manager has it. */
static const char *full(size_t arg)
{
	size_t n = 1024, page = 4096;
	struct awbuf *first, *second;
	struct awbuf_buffer out;
	struct ibv_pd *pd;
	int found = 0;
	uint8_t *at;

	(void)arg;
	TRY(open_device());
	pd = new_pd();
	first = opened(pd, (struct awbuf_attr){ .critical_size = 1 });
	second = opened(pd, (struct awbuf_attr){ .critical_size = 1 });
	ENSURE(first && second, "awbuf_open: %s", strerror(errno));
	at = mapped((n + 1) * page);
	for (size_t i = 0; i < n; i++) {
		ENSURE(!awbuf_get_send(first, at + i * page, page, AWBUF_STABLE, &out), "get_send %zu: %s", i, strerror(errno));
		ENSURE(out.how == AWBUF_KEPT && !awbuf_release(&out, 0), "buffer %zu is not kept", i);
	}
	ENSURE(stats_of(first).cached == n, "%" PRIu64 " registrations are kept", stats_of(first).cached);
	for (int i = 0; i < 3; i++) {
		ENSURE(!awbuf_get_send(second, at + n * page, page, AWBUF_STABLE, &out), "get_send: %s", strerror(errno));
		found += out.how == AWBUF_KEPT;
		ENSURE(!awbuf_release(&out, 0), "release");
	}
	ENSURE(found == 3, "the second manager keeps the registration in %d of 3 uses", found);
	ENSURE(stats_of(first).evicted == 1 && stats_of(first).cached == n - 1, "%" PRIu64 " registrations of the first manager were ended, not one",
	       stats_of(first).evicted);
	munmap(at, (n + 1) * page);
	return NULL;
}

/* Memory that is alternately sent and received has one registration with the rights for both. */
static const char *rights(size_t arg)
{
	struct awbuf_buffer in, out;
	struct awbuf *buffers;
	uint8_t *at = mapped(MIB);
	uint32_t lkey = 0;

	(void)arg;
	TRY(open_device());
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = 1,
							.send_access = IBV_ACCESS_REMOTE_READ,
							.recv_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	for (int i = 0; i < 10; i++) {
		ENSURE(!awbuf_get_recv(buffers, at, MIB, AWBUF_STABLE, &in) && in.how == AWBUF_KEPT, "%s", strerror(errno));
		ENSURE(!awbuf_release(&in, 0), "release");
		ENSURE(!awbuf_get_send(buffers, at, MIB, AWBUF_STABLE, &out) && out.how == AWBUF_KEPT, "%s", strerror(errno));
		ENSURE(!awbuf_release(&out, 0), "release");
		ENSURE(!i || (in.lkey == lkey && out.lkey == lkey), "turn %d registers anew", i);
		lkey = out.lkey;
	}
	munmap(at, MIB);
	return NULL;
}

enum { WATCHED, PROMISED };

/*
 * anywarp-buffers(7): the kernel splits a mapping if one part of it is watched. After awbuf_invalidate it is one mapping
 * again, even if the program has promised in the meantime to report changes itself (AWBUF_STABLE).
 */
static const char *remap_around(size_t arg)
{
	size_t len = 16 * MIB;
	struct awbuf_buffer out;
	struct awbuf *buffers;
	uint32_t lkey = 0;
	uint8_t *at, *to;

	TRY(open_device());
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = 1 });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	if (!stats_of(buffers).watching)
		SKIP("the kernel does not report changes of memory");
	at = mapped(len);
	TRY(until_kept(buffers, at + MIB, MIB, &lkey));
	if (arg == PROMISED) {
		ENSURE(!awbuf_get_send(buffers, at + MIB, 2 * MIB, AWBUF_STABLE, &out), "get_send: %s", strerror(errno));
		ENSURE(out.how == AWBUF_KEPT && !awbuf_release(&out, 0), "the registration is not kept");
	}
	ENSURE(awbuf_invalidate(buffers, at, len) == 1, "awbuf_invalidate does not end one registration");
	to = mremap(at, len, 2 * len, MREMAP_MAYMOVE);
	ENSURE(to != MAP_FAILED, "mremap: %s", strerror(errno));
	munmap(to, 2 * len);
	return NULL;
}

enum { NEIGHBOURS, PART_UNMAPPED, CLOSED };

/*
 * No page stays watched after its last registration has ended. The test checks this for buffers that share a page, for memory that was
 * unmapped in part, and after awbuf_close. mremap fails if a part of the memory is watched.
 */
static const char *pages_are_released(size_t arg)
{
	size_t len = 16 * MIB, part = 2 * MIB + 16;
	struct awbuf *buffers;
	uint32_t lkey = 0;
	uint8_t *at, *to;

	TRY(open_device());
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = 1 });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	if (!stats_of(buffers).watching)
		SKIP("the kernel does not report changes of memory");
	at = mapped(len);
	for (int i = 0; i < 3; i++)
		TRY(until_kept(buffers, at + MIB + i * part, part, &lkey));
	if (arg == PART_UNMAPPED) {
		ENSURE(!munmap(at + MIB, 4096), "munmap: %s", strerror(errno));
		at += 2 * MIB;
		len -= 2 * MIB;
	}
	if (arg == CLOSED) {
		forget(buffers);
		ENSURE(!awbuf_close(buffers), "awbuf_close: %s", strerror(errno));
	} else {
		ENSURE(awbuf_invalidate(buffers, at, len) == (arg == NEIGHBOURS ? 3 : 2), "awbuf_invalidate does not end all registrations");
	}
	to = mremap(at, len, 2 * len, MREMAP_MAYMOVE);
	ENSURE(to != MAP_FAILED, "mremap: %s", strerror(errno));
	munmap(to, 2 * len);
	return NULL;
}

static struct awbuf *cancelled_buffers;

static void *cancelled(void *at)
{
	struct awbuf_buffer out;

	pthread_cancel(pthread_self());
	for (int i = 0; i < 3; i++)
		if (awbuf_get_send(cancelled_buffers, at, MIB, 0, &out) || awbuf_release(&out, 0))
			return (void *)"get_send";
	pthread_testcancel();
	return (void *)"not cancelled";
}

/* A thread is not cancelled inside the library. */
static const char *cancel(size_t arg)
{
	uint8_t *at = mapped(MIB);
	pthread_t thread;
	void *result;
	uint32_t lkey;

	(void)arg;
	TRY(open_device());
	cancelled_buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = 1 });
	ENSURE(cancelled_buffers, "awbuf_open: %s", strerror(errno));
	if (!stats_of(cancelled_buffers).watching)
		SKIP("the kernel does not report changes of memory");
	ENSURE(!pthread_create(&thread, NULL, cancelled, at), "pthread_create");
	pthread_join(thread, &result);
	ENSURE(result == PTHREAD_CANCELED, "%s", (char *)result);
	TRY(until_kept(cancelled_buffers, at, MIB, &lkey));
	ENSURE(!stats_of(cancelled_buffers).in_use, "a buffer is in use");
	munmap(at, MIB);
	return NULL;
}

/* In a child all functions fail and end no registration. */
static int in_child(struct awbuf *buffers, struct awbuf_buffer used[3], struct awbuf_pieces *pieces)
{
	struct awbuf_stats stats;
	struct awbuf_buffer out;
	unsigned int before = deregistrations;

#define REFUSED(call)                     \
	do {                              \
		errno = 0;                \
		if (!(call) || errno != EPERM) \
			return __LINE__ & 127; \
	} while (0)
	/* A function that waits for a thread of the parent would wait forever. */
	alarm(5);
	REFUSED(!awbuf_open(NULL, NULL));
	REFUSED(awbuf_query(buffers, &stats, sizeof stats) == -1);
	REFUSED(awbuf_get_send(buffers, &out, 4, 0, &out) == -1);
	REFUSED(awbuf_get_recv(buffers, &out, 4, 0, &out) == -1);
	REFUSED(awbuf_invalidate(buffers, used, SIZE_MAX / 4) == -1);
	for (int i = 0; i < 3; i++)
		REFUSED(awbuf_release(&used[i], 0) == -1);
	REFUSED(awbuf_pieces_next(pieces, &out) == -1);
	REFUSED(awbuf_pieces_end(pieces) == -1);
	REFUSED(!awbuf_pieces_begin(buffers, &out, 4, AWBUF_SEND, 0));
	REFUSED(awbuf_close(buffers) == -1);
	return deregistrations == before ? 0 : 127;
#undef REFUSED
}

/* A child of fork cannot use the buffers of its parent. */
static const char *forked(size_t arg)
{
	struct awbuf *buffers;
	struct awbuf_buffer used[3];
	struct awbuf_pieces *pieces;
	uint8_t *at = mapped(24 * MIB);
	size_t before;
	int status;
	pid_t child;

	(void)arg;
	TRY(open_device());
	buffers = opened(new_pd(), (struct awbuf_attr){ .critical_size = 4096 });
	ENSURE(buffers, "awbuf_open: %s", strerror(errno));
	ENSURE(!awbuf_get_recv(buffers, at, 4096, 0, &used[0]) && used[0].how == AWBUF_COPIED, "%s", strerror(errno));
	ENSURE(!awbuf_get_send(buffers, at, 8192, 0, &used[1]) && used[1].how == AWBUF_REGISTERED, "%s", strerror(errno));
	ENSURE(!awbuf_get_send(buffers, at, MIB, AWBUF_STABLE, &used[2]) && used[2].how == AWBUF_KEPT, "%s", strerror(errno));
	pieces = awbuf_pieces_begin(buffers, at, 24 * MIB, AWBUF_SEND, 0);
	ENSURE(pieces, "awbuf_pieces_begin: %s", strerror(errno));
	before = alive();
	child = fork();
	if (!child)
		_exit(in_child(buffers, used, pieces));
	ENSURE(child > 0 && waitpid(child, &status, 0) == child, "fork: %s", strerror(errno));
	ENSURE(!status, "the child may use its parent's buffers: status %#x", status);
	ENSURE(alive() == before, "%zu registrations are left of %zu", alive(), before);
	ENSURE(!awbuf_pieces_end(pieces), "awbuf_pieces_end: %s", strerror(errno));
	for (int i = 0; i < 3; i++)
		ENSURE(!awbuf_release(&used[i], 0), "release: %s", strerror(errno));
	munmap(at, 24 * MIB);
	return NULL;
}

static const struct test tests[] = {
	{ "data", data, 0, 0, false },
	{ "short_receive", short_receive, 0, 0, false },
	{ "measured", measured, 0, 0, false },
	{ "unmap", changed, UNMAP, 0, false },
	{ "unmap_by_syscall", changed, SYSCALL, 0, false },
	{ "map_over", changed, FIXED, 0, false },
	{ "remap", changed, REMAP, 0, false },
	{ "empty", changed, EMPTY, 0, false },
	{ "empty_a_page", changed, PART, 0, false },
	{ "free", changed, FREE, 0, true },
	{ "trim", changed, TRIM, 0, true },
	{ "not_kept", not_kept, 0, 0, false },
	{ "in_use", in_use, 0, 0, false },
	{ "limits", limits, 0, 0, false },
	{ "pool", pool, 0, 0, false },
	{ "pool_sizes", pool_sizes, 0, 0, false },
	{ "all_end", all_end, 0, 0, false },
	{ "errors", errors, 0, 0, false },
	{ "pieces_1", pieces, 1, 0, false },
	{ "pieces_4", pieces, 4, 0, false },
	{ "piece_again_1", piece_again, 1, 0, false },
	{ "piece_again_4", piece_again, 4, 0, false },
	{ "threads", threads, 0, 0, false },
	{ "handler", handler, 0, 0, false },
	{ "close_waits", waits, BY_CLOSE, 0, false },
	{ "invalidate_waits", waits, BY_INVALIDATE, 0, false },
	{ "busy", busy, 0, 0, false },
	{ "full", full, 0, 0, false },
	{ "rights", rights, 0, 0, false },
	{ "remap_around", remap_around, WATCHED, 0, false },
	{ "remap_around_stable", remap_around, PROMISED, 0, false },
	{ "pages_are_released", pages_are_released, NEIGHBOURS, 0, false },
	{ "pages_are_released_in_part", pages_are_released, PART_UNMAPPED, 0, false },
	{ "pages_are_released_by_close", pages_are_released, CLOSED, 0, false },
	{ "cancel", cancel, 0, 0, true },
	{ "forked", forked, 0, 0, true },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
