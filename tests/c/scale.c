/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Many queue pairs and many threads: two processes send every operation of RC to each other at the same time.
 *
 * Every message has its own pattern, which is compared on arrival. Every work request must complete exactly once. At
 * the end, the totals of the two processes must agree.
 *
 *   --seconds=N        duration of the traffic of each test (default 1)
 *   --idle=N           number of connections and datagram peers of the test `idle`, which prints their memory
 *   --qps=N --threads=N  replace the numbers of queue pairs and threads of the other tests
 */
#include "ends.h"

#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#define SLOTS 8u                /* outstanding requests of a connection */
#define RECVS (4 * SLOTS)       /* receives that are posted on each queue pair */
#define WRITES 4u               /* outstanding Writes with immediate data that the peer has not compared */
#define SPAN 4096u              /* maximum distance of two numbers that arrive out of order */
#define QUIET_LIMIT_MS 20000u   /* time within which something must complete */
#define STOP_LIMIT_MS 60000u    /* time within which everything must complete after the last new request */

enum kind { SEND, SEND_IMM, WRITE_READ, WRITE_IMM, READ, FETCH_ADD, CMP_SWAP, GRANT, RETURN, KINDS };

static const char *const kind_names[KINDS] = { "send",	    "send_imm", "write+read", "write_imm", "read",
					       "fetch_add", "cmp_swap", "grant",      "write+send_inv" };

struct config {
	unsigned int qps, threads, queues, bytes; /* `bytes`: the longest message */
	bool events;                              /* wait for completion channels instead of polling */
	bool roam;                                /* each thread posts on all queue pairs instead of its own */
};

/* The first bytes of each Send. */
struct header {
	uint64_t number; /* number of this Send on the connection */
	uint32_t seed;
	uint32_t compared; /* how many of the receiver's Writes with immediate data the sender has compared */
	uint32_t rkey;     /* key of the window, in a GRANT */
	uint32_t kind;
};

/* The numbers that have arrived. Each must arrive once, and be less than the lowest missing number plus SPAN. */
struct numbers {
	uint64_t next; /* all numbers below have arrived */
	uint64_t bits[SPAN / 64];
};

struct slot {
	bool busy;
	enum kind kind;
	uint32_t turn, len, offset, seed;
	uint64_t number;
};

/* What the other end needs to know about a connection. */
struct remote {
	uint32_t qpn, rkey;
	uint64_t addr;
};

struct conn {
	pthread_mutex_t lock;
	struct ibv_qp *qp;
	struct queue *queue;
	unsigned int index;
	struct remote remote;
	struct slot slots[SLOTS];
	unsigned int free;
	uint64_t sends, written;   /* numbers assigned so far */
	uint64_t compared;         /* the peer's Writes with immediate data that this end has compared */
	uint64_t peer_compared;    /* this end's Writes with immediate data that the peer has compared */
	struct numbers sends_in, writes_in, adds;
	uint64_t adds_out, swaps;
	bool swapping;
	struct ibv_mw *mw;
	uint32_t window;           /* its key, as granted to the peer */
	uint32_t window_seed, window_len;
	bool grant_due, granted;
	uint32_t return_due;       /* key of the peer's window, which must be returned */
};

struct queue {
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
};

struct sums {
	uint64_t kinds[KINDS];
	uint64_t sends_in, writes_in, returns_in, grants_in, bytes;
};

static struct config config;
static struct conn *conns;
static struct queue *queues;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static uint8_t *memory;
static size_t stride;           /* bytes of memory for each connection */
static unsigned int side;       /* 0 or 1; the patterns of the two ends differ */
static int other;               /* socket to the other process */
static atomic_bool stop, quit, failed;
static atomic_llong under_way;
static atomic_ullong progress;
static pthread_mutex_t sums_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sums sums;
static char first_failure[512];

/* ---- memory of a connection: receives, data to send, data that is read, and data that the peer writes ---- */

static uint8_t *part(const struct conn *c, unsigned int which, unsigned int slot)
{
	static const unsigned int first[] = { 0, RECVS, RECVS + SLOTS, RECVS + 2 * SLOTS, RECVS + 3 * SLOTS,
					      RECVS + 3 * SLOTS + WRITES, RECVS + 3 * SLOTS + WRITES + 1 };

	return memory + stride * c->index + (size_t)config.bytes * (first[which] + slot);
}

enum { RECV_PART, OUT_PART, IN_PART, WRITE_PART, IMM_PART, WINDOW_PART, SOURCE_PART };

/* The words for atomics follow the other parts. They are aligned to 8 bytes, because the lengths of messages are. */
static uint64_t *words(const struct conn *c)
{
	return (uint64_t *)part(c, SOURCE_PART, 1);
}

static uint64_t remote_addr(const struct conn *c, const void *local)
{
	return c->remote.addr + (uint64_t)((const uint8_t *)local - part(c, RECV_PART, 0));
}

static uint64_t mixed(uint64_t x)
{
	x *= 0x9e3779b97f4a7c15u;
	x ^= x >> 29;
	x *= 0xbf58476d1ce4e5b9u;
	return x ^ x >> 32;
}

/* Fills the pattern of a message, eight bytes at a time. */
static void fill(uint8_t *at, size_t len, uint32_t seed)
{
	for (size_t i = 0; i < len; i += 8) {
		uint64_t word = mixed((uint64_t)seed << 32 | i);

		memcpy(at + i, &word, len - i < 8 ? len - i : 8);
	}
}

static const char *same(const uint8_t *at, size_t len, uint32_t seed, size_t from, const char *what)
{
	for (size_t i = 0; i < len; i++) {
		uint64_t word = mixed((uint64_t)seed << 32 | ((from + i) & ~(size_t)7));
		uint8_t byte = (uint8_t)(word >> 8 * ((from + i) & 7));

		ENSURE(at[i] == byte, "%s: byte %zu of %zu is %02x, expected %02x", what, i, len, at[i], byte);
	}
	return NULL;
}

static uint32_t source_seed(unsigned int of, unsigned int index)
{
	return (uint32_t)mixed((uint64_t)of << 32 | (index + 1));
}

/* Records that a number has arrived. */
static const char *record_arrival(struct numbers *n, uint64_t number, bool in_order, const char *what)
{
	uint64_t *word = &n->bits[number % SPAN / 64], bit = 1ull << number % 64;

	ENSURE(number >= n->next, "%s %llu arrived twice", what, (unsigned long long)number);
	ENSURE(number < n->next + SPAN, "%s %llu arrived, but %llu did not", what, (unsigned long long)number,
	       (unsigned long long)n->next);
	ENSURE(!in_order || number == n->next, "%s %llu arrived before %llu", what, (unsigned long long)number,
	       (unsigned long long)n->next);
	ENSURE(!(*word & bit), "%s %llu arrived twice", what, (unsigned long long)number);
	*word |= bit;
	while (n->bits[n->next % SPAN / 64] & 1ull << n->next % 64) {
		n->bits[n->next % SPAN / 64] &= ~(1ull << n->next % 64);
		n->next++;
	}
	return NULL;
}

/* ---- posting ---- */

static uint32_t slot_id(const struct conn *c, unsigned int slot)
{
	return c->slots[slot].turn << 4 | slot;
}

static uint64_t wr_id(const struct conn *c, unsigned int slot)
{
	return (uint64_t)c->index << 32 | slot_id(c, slot);
}

#define RECV_ID 0x80000000u

static const char *post_receive(struct conn *c, unsigned int n)
{
	struct ibv_sge sge = { (uintptr_t)part(c, RECV_PART, n), config.bytes, mr->lkey };

	return post_recv(c->qp, (uint64_t)c->index << 32 | RECV_ID | n, &sge, 1);
}

/* Releases the slot of a completed request. */
static void release(struct conn *c, unsigned int slot)
{
	c->slots[slot].busy = false;
	c->slots[slot].turn++;
	c->free++;
	atomic_fetch_sub(&under_way, 1);
}

static uint32_t random_of(uint64_t *state)
{
	*state += 0x9e3779b97f4a7c15u;
	return (uint32_t)mixed(*state);
}

static uint32_t random_len(uint64_t *state, uint32_t most)
{
	/* Three of four lengths are at most 256, the others at most `most`. */
	uint32_t r = random_of(state), limit = r & 3 ? (most < 256 ? most : 256) : most;

	return 1 + random_of(state) % limit;
}

/* Chooses the next request and a slot for it. Returns false if no request is possible now. */
static bool begin(struct conn *c, uint64_t *state, unsigned int *slot, struct header *head)
{
	struct slot *s;
	enum kind kind;

	if (!c->free)
		return false;
	if (c->return_due) {
		kind = RETURN;
	} else if (atomic_load(&stop)) {
		return false;
	} else if (c->grant_due) {
		kind = GRANT;
	} else {
		kind = (enum kind)(random_of(state) % GRANT);
		if (kind == CMP_SWAP && c->swapping)
			kind = READ;
		if (kind == WRITE_IMM && c->written - c->peer_compared >= WRITES)
			kind = SEND;
	}
	for (*slot = 0; c->slots[*slot].busy; (*slot)++)
		;
	s = &c->slots[*slot];
	s->busy = true;
	s->kind = kind;
	s->len = random_len(state, config.bytes);
	s->offset = 0;
	s->seed = random_of(state);
	c->free--;
	atomic_fetch_add(&under_way, 1);
	*head = (struct header){ .seed = s->seed, .kind = kind, .compared = (uint32_t)c->compared };
	switch (kind) {
	case SEND:
	case SEND_IMM:
	case GRANT:
	case RETURN:
		if (s->len < sizeof *head)
			s->len = sizeof *head;
		s->number = head->number = c->sends++;
		break;
	case WRITE_IMM:
		s->number = c->written++;
		break;
	case READ:
		s->offset = random_of(state) % config.bytes;
		if (s->len > config.bytes - s->offset)
			s->len = config.bytes - s->offset;
		break;
	case FETCH_ADD:
		c->adds_out++;
		break;
	case CMP_SWAP:
		s->number = c->swaps;
		c->swapping = true;
		break;
	default:
		break;
	}
	if (kind == GRANT) {
		c->grant_due = false;
		c->granted = true;
		c->window = ibv_inc_rkey(c->window);
		c->window_len = s->len;
		head->rkey = c->window;
	}
	if (kind == RETURN) {
		head->rkey = c->return_due;
		c->return_due = 0;
	}
	return true;
}

/* Posts the requests that `begin` chose. No other thread accesses the memory of the slot until they complete. */
static const char *launch(struct conn *c, unsigned int n, struct header head)
{
	struct slot *s = &c->slots[n];
	uint8_t *out = part(c, OUT_PART, n), *in = part(c, IN_PART, n);
	struct ibv_sge sge[2] = { { (uintptr_t)out, s->len, mr->lkey }, { (uintptr_t)in, s->len, mr->lkey } };
	struct ibv_send_wr wr[2] = { send_wr(wr_id(c, n), IBV_WR_SEND, sge, 1), send_wr(wr_id(c, n), IBV_WR_SEND, sge, 1) };
	enum kind kind = s->kind;
	uint8_t *target;

	switch (kind) {
	case SEND_IMM:
		wr[0].opcode = IBV_WR_SEND_WITH_IMM;
		wr[0].imm_data = htonl(s->seed ^ s->len);
		/* fall through */
	case SEND:
		memcpy(out, &head, sizeof head);
		fill(out + sizeof head, s->len - sizeof head, s->seed);
		break;
	case WRITE_READ: /* a Read of the written data follows the Write */
		fill(out, s->len, s->seed);
		memset(in, 0, s->len);
		target = part(c, WRITE_PART, n);
		wr[0].opcode = IBV_WR_RDMA_WRITE;
		wr[0].send_flags = 0;
		wr[0].next = &wr[1];
		wr[1].opcode = IBV_WR_RDMA_READ;
		wr[1].sg_list = &sge[1];
		for (int i = 0; i < 2; i++) {
			wr[i].wr.rdma.remote_addr = remote_addr(c, target);
			wr[i].wr.rdma.rkey = c->remote.rkey;
		}
		break;
	case WRITE_IMM:
		/* Both ends compute the seed from the number. */
		fill(out, s->len, (uint32_t)mixed(s->number << 1 | side));
		target = part(c, IMM_PART, s->number % WRITES);
		wr[0].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
		wr[0].imm_data = htonl((uint32_t)s->number);
		wr[0].wr.rdma.remote_addr = remote_addr(c, target);
		wr[0].wr.rdma.rkey = c->remote.rkey;
		break;
	case READ:
		memset(in, 0, s->len);
		wr[0].opcode = IBV_WR_RDMA_READ;
		wr[0].sg_list = &sge[1];
		wr[0].wr.rdma.remote_addr = remote_addr(c, part(c, SOURCE_PART, 0) + s->offset);
		wr[0].wr.rdma.rkey = c->remote.rkey;
		break;
	case FETCH_ADD:
	case CMP_SWAP:
		sge[1].length = 8;
		sge[1].addr = (sge[1].addr + 7) & ~7ull;
		wr[0].sg_list = &sge[1];
		wr[0].opcode = kind == FETCH_ADD ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP;
		wr[0].wr.atomic.remote_addr = remote_addr(c, words(c) + (kind == CMP_SWAP));
		wr[0].wr.atomic.rkey = c->remote.rkey;
		wr[0].wr.atomic.compare_add = kind == FETCH_ADD ? 1 : s->number;
		wr[0].wr.atomic.swap = s->number + 1;
		break;
	case GRANT: /* binds a window for one Write, and sends its key in the message after the bind */
		memcpy(out, &head, sizeof head);
		fill(out + sizeof head, s->len - sizeof head, s->seed);
		wr[0] = (struct ibv_send_wr){ .wr_id = wr_id(c, n), .opcode = IBV_WR_BIND_MW, .next = &wr[1] };
		wr[0].bind_mw.mw = c->mw;
		wr[0].bind_mw.rkey = head.rkey;
		wr[0].bind_mw.bind_info = (struct ibv_mw_bind_info){ .mr = mr,
								     .addr = (uintptr_t)part(c, WINDOW_PART, 0),
								     .length = config.bytes,
								     .mw_access_flags = IBV_ACCESS_REMOTE_WRITE };
		break;
	case RETURN: /* uses the window and invalidates it */
		memcpy(out, &head, sizeof head);
		fill(out + sizeof head, s->len - sizeof head, s->seed);
		wr[0].opcode = IBV_WR_RDMA_WRITE;
		wr[0].send_flags = 0;
		wr[0].next = &wr[1];
		wr[0].wr.rdma.remote_addr = remote_addr(c, part(c, WINDOW_PART, 0));
		wr[0].wr.rdma.rkey = head.rkey;
		wr[1].opcode = IBV_WR_SEND_WITH_INV;
		wr[1].invalidate_rkey = head.rkey;
		break;
	default:
		break;
	}
	TRY(post(c->qp, wr));
	return NULL;
}

/* Posts as many requests as the connection allows. */
static const char *pump(struct conn *c, uint64_t *state)
{
	struct header head;
	unsigned int slot;

	for (;;) {
		bool more;

		pthread_mutex_lock(&c->lock);
		more = begin(c, state, &slot, &head);
		pthread_mutex_unlock(&c->lock);
		if (!more)
			return NULL;
		TRY(launch(c, slot, head));
	}
}

/* ---- completions ---- */

static const char *sent(struct conn *c, const struct ibv_wc *wc, struct sums *mine)
{
	unsigned int n = wc->wr_id & 15;
	struct slot *s = &c->slots[n];
	static const enum ibv_wc_opcode opcodes[KINDS] = { IBV_WC_SEND,	     IBV_WC_SEND,     IBV_WC_RDMA_READ,
							   IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ, IBV_WC_FETCH_ADD,
							   IBV_WC_COMP_SWAP,  IBV_WC_SEND,    IBV_WC_SEND };
	uint64_t old;

	ENSURE(n < SLOTS && s->busy && (uint32_t)wc->wr_id == slot_id(c, n),
	       "connection %u: an unexpected or repeated completion: wr_id %#llx", c->index,
	       (unsigned long long)wc->wr_id);
	ENSURE(wc->opcode == opcodes[s->kind], "a %s completes with opcode %d", kind_names[s->kind], wc->opcode);
	switch (s->kind) {
	case WRITE_READ:
		TRY(same(part(c, IN_PART, n), s->len, s->seed, 0, "data written and read back"));
		break;
	case READ:
		TRY(same(part(c, IN_PART, n), s->len, source_seed(!side, c->index), s->offset, "data of a Read"));
		break;
	case FETCH_ADD:
		memcpy(&old, (void *)(((uintptr_t)part(c, IN_PART, n) + 7) & ~7ull), 8);
		TRY(record_arrival(&c->adds, old, false, "value of Fetch and Add"));
		break;
	case CMP_SWAP:
		memcpy(&old, (void *)(((uintptr_t)part(c, IN_PART, n) + 7) & ~7ull), 8);
		ENSURE(old == s->number, "compare and swap found %llu, expected %llu", (unsigned long long)old,
		       (unsigned long long)s->number);
		c->swaps++;
		c->swapping = false;
		break;
	default:
		break;
	}
	mine->kinds[s->kind]++;
	mine->bytes += s->len;
	release(c, n);
	return NULL;
}

static const char *received(struct conn *c, const struct ibv_wc *wc, struct sums *mine)
{
	unsigned int n = wc->wr_id & ~RECV_ID & 0xffffffffu;
	bool in_order = !config.roam && config.queues == config.threads;
	const uint8_t *at = part(c, RECV_PART, n);
	struct header head;

	ENSURE(n < RECVS, "a receive that was not posted: wr_id %#llx", (unsigned long long)wc->wr_id);
	mine->bytes += wc->byte_len;
	if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
		uint32_t number = ntohl(wc->imm_data);

		ENSURE(wc->wc_flags & IBV_WC_WITH_IMM, "Write with immediate data arrives without it");
		TRY(same(part(c, IMM_PART, number % WRITES), wc->byte_len,
			 (uint32_t)mixed((uint64_t)number << 1 | !side), 0, "data of a Write with immediate data"));
		TRY(record_arrival(&c->writes_in, number, in_order, "Write with immediate data"));
		c->compared = c->writes_in.next;
		mine->writes_in++;
		return NULL;
	}
	ENSURE(wc->opcode == IBV_WC_RECV, "opcode %d of a receive", wc->opcode);
	ENSURE(wc->byte_len >= sizeof head, "%u bytes received", wc->byte_len);
	memcpy(&head, at, sizeof head);
	TRY(same(at + sizeof head, wc->byte_len - sizeof head, head.seed, 0, "data of a Send"));
	TRY(record_arrival(&c->sends_in, head.number, in_order, "Send"));
	ENSURE(!!(wc->wc_flags & IBV_WC_WITH_IMM) == (head.kind == SEND_IMM), "flags %#x of a %s", wc->wc_flags,
	       kind_names[head.kind % KINDS]);
	ENSURE(head.kind != SEND_IMM || ntohl(wc->imm_data) == (head.seed ^ wc->byte_len), "immediate data %#x",
	       ntohl(wc->imm_data));
	ENSURE(!!(wc->wc_flags & IBV_WC_WITH_INV) == (head.kind == RETURN), "flags %#x of a %s", wc->wc_flags,
	       kind_names[head.kind % KINDS]);
	if (c->peer_compared < head.compared)
		c->peer_compared = head.compared;
	mine->sends_in++;
	if (head.kind == GRANT) {
		ENSURE(!c->return_due, "two windows at once");
		c->return_due = head.rkey;
		mine->grants_in++;
	}
	if (head.kind == RETURN) {
		ENSURE(c->granted && head.rkey == c->window && wc->invalidated_rkey == c->window,
		       "key %#x was invalidated, %#x was granted", wc->invalidated_rkey, c->window);
		/* The peer wrote the same data to the window as it sent. */
		ENSURE(!memcmp(part(c, WINDOW_PART, 0), at, wc->byte_len), "the data written through the window differs");
		memset(part(c, WINDOW_PART, 0), 0, wc->byte_len);
		c->granted = false;
		c->grant_due = true;
		mine->returns_in++;
	}
	return NULL;
}

static const char *completed(const struct ibv_wc *wc, struct sums *mine, uint64_t *state)
{
	unsigned int index = (unsigned int)(wc->wr_id >> 32);
	bool incoming = wc->wr_id & RECV_ID;
	struct conn *c;
	const char *reason;

	ENSURE(index < config.qps, "wr_id %#llx", (unsigned long long)wc->wr_id);
	c = &conns[index];
	ENSURE(wc->status == IBV_WC_SUCCESS, "connection %u: %s completes with status %d (%s)", index,
	       incoming ? "a receive" : kind_names[c->slots[wc->wr_id & 7].kind % KINDS], wc->status,
	       ibv_wc_status_str(wc->status));
	ENSURE(wc->qp_num == c->qp->qp_num, "completion of queue pair %#x, posted on %#x", wc->qp_num, c->qp->qp_num);
	pthread_mutex_lock(&c->lock);
	reason = incoming ? received(c, wc, mine) : sent(c, wc, mine);
	pthread_mutex_unlock(&c->lock);
	TRY(reason);
	if (incoming)
		TRY(post_receive(c, wc->wr_id & ~RECV_ID & 0xffffffffu));
	atomic_fetch_add(&progress, 1);
	TRY(pump(c, state));
	if (config.roam)
		TRY(pump(&conns[random_of(state) % config.qps], state));
	return NULL;
}

/* Polls up to 16 completions and handles them. Sets `n` to their number. */
static const char *drain(struct queue *q, struct sums *mine, uint64_t *state, int *n)
{
	struct ibv_wc wc[16];

	*n = ibv_poll_cq(q->cq, COUNT(wc), wc);
	ENSURE(*n >= 0, "ibv_poll_cq returns %d", *n);
	for (int i = 0; i < *n; i++)
		TRY(completed(&wc[i], mine, state));
	return NULL;
}

static const char *by_events(struct queue *q, struct sums *mine, uint64_t *state)
{
	struct pollfd p = { .fd = q->channel->fd, .events = POLLIN };
	struct ibv_cq *cq;
	void *context;
	int n;

	/* Several threads may share the channel, but only one of them gets the event. */
	n = poll(&p, 1, 50);
	ENSURE(n >= 0 || errno == EINTR, "poll: %s", strerror(errno));
	if (n <= 0)
		return NULL;
	if (ibv_get_cq_event(q->channel, &cq, &context)) {
		ENSURE(errno == EAGAIN, "ibv_get_cq_event: %s", strerror(errno));
		return NULL;
	}
	ENSURE(cq == q->cq, "an event of another completion queue");
	ibv_ack_cq_events(cq, 1);
	ENSURE(!ibv_req_notify_cq(cq, 0), "ibv_req_notify_cq");
	do
		TRY(drain(q, mine, state, &n));
	while (n > 0);
	return NULL;
}

static const char *work(unsigned int t, struct sums *mine)
{
	struct queue *q = &queues[t % config.queues];
	uint64_t state = mixed((uint64_t)side << 32 | t);
	int n;

	for (unsigned int i = t; i < config.qps; i += config.threads)
		TRY(pump(&conns[i], &state));
	while (!atomic_load(&quit) && !atomic_load(&failed)) {
		if (config.events) {
			TRY(by_events(q, mine, &state));
			continue;
		}
		TRY(drain(q, mine, &state, &n));
		if (!n)
			sched_yield();
	}
	return NULL;
}

static void *thread(void *t)
{
	struct sums mine = { 0 };
	const char *reason = work((unsigned int)(uintptr_t)t, &mine);

	pthread_mutex_lock(&sums_lock);
	if (reason && !atomic_load(&failed)) {
		snprintf(first_failure, sizeof first_failure, "%s [%s]", reason, failed_at);
		atomic_store(&failed, true);
	}
	for (size_t i = 0; i < sizeof mine / sizeof(uint64_t); i++)
		((uint64_t *)&sums)[i] += ((uint64_t *)&mine)[i];
	pthread_mutex_unlock(&sums_lock);
	return NULL;
}

/* ---- the two processes ---- */

static const char *send_to_other(const void *what, size_t len)
{
	ENSURE(send(other, what, len, MSG_NOSIGNAL) == (ssize_t)len, "the other process has ended");
	return NULL;
}

static const char *receive_from_other(void *what, size_t len)
{
	ssize_t n = recv(other, what, len, MSG_WAITALL);

	ENSURE(n == (ssize_t)len, "the other process has ended");
	return NULL;
}

/* A barrier of the two processes. */
static const char *meet(void)
{
	char c = 'm';

	TRY(send_to_other(&c, 1));
	return receive_from_other(&c, 1);
}

static int close_pages(void *p)
{
	(void)p;
	free(memory);
	free(conns);
	free(queues);
	return 0;
}

static const char *open_all(void)
{
	struct rlimit files;
	size_t whole;

	/* Each connection needs a socket. */
	getrlimit(RLIMIT_NOFILE, &files);
	files.rlim_cur = files.rlim_max;
	setrlimit(RLIMIT_NOFILE, &files);
	ENSURE(files.rlim_cur > config.qps + 100, "%lu descriptors are too few for %u connections: raise ulimit -n",
	       (unsigned long)files.rlim_cur, config.qps);
	TRY(open_device());
	stride = (size_t)config.bytes * (RECVS + 3 * SLOTS + WRITES + 2) + 4096;
	whole = stride * config.qps;
	memory = aligned_alloc(4096, (whole + 4095) & ~(size_t)4095);
	conns = calloc(config.qps, sizeof *conns);
	queues = calloc(config.queues, sizeof *queues);
	ENSURE(memory && conns && queues, "no memory for %zu bytes", whole);
	keep(close_pages, memory, "memory");
	pd = new_pd();
	ENSURE(pd, "ibv_alloc_pd: %s", strerror(errno));
	mr = new_mr(pd, memory, whole, ALL_ACCESS | IBV_ACCESS_MW_BIND);
	ENSURE(mr, "ibv_reg_mr: %s", strerror(errno));
	for (unsigned int i = 0; i < config.queues; i++) {
		unsigned int per = (config.qps + config.queues - 1) / config.queues;

		if (config.events) {
			queues[i].channel = new_channel();
			ENSURE(queues[i].channel, "ibv_create_comp_channel: %s", strerror(errno));
			ENSURE(!fcntl(queues[i].channel->fd, F_SETFL, O_NONBLOCK), "fcntl: %s", strerror(errno));
		}
		queues[i].cq = new_cq((int)(per * (2 * SLOTS + RECVS)), queues[i].channel);
		ENSURE(queues[i].cq, "ibv_create_cq: %s", strerror(errno));
		if (config.events)
			ENSURE(!ibv_req_notify_cq(queues[i].cq, 0), "ibv_req_notify_cq");
	}
	for (unsigned int i = 0; i < config.qps; i++) {
		struct conn *c = &conns[i];
		struct ibv_qp_init_attr init = {
			.qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = 2 * SLOTS, .max_recv_wr = RECVS, .max_send_sge = 1, .max_recv_sge = 1 },
		};

		c->index = i;
		c->free = SLOTS;
		pthread_mutex_init(&c->lock, NULL);
		c->queue = &queues[i % config.queues];
		init.send_cq = init.recv_cq = c->queue->cq;
		c->qp = new_qp(pd, &init);
		ENSURE(c->qp, "ibv_create_qp %u: %s", i, strerror(errno));
		c->mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
		ENSURE(c->mw, "ibv_alloc_mw: %s", strerror(errno));
		keep(close_mw, c->mw, "memory window");
		c->window = c->mw->rkey;
		c->grant_due = true;
		fill(part(c, SOURCE_PART, 0), config.bytes, source_seed(side, i));
		words(c)[0] = words(c)[1] = 0;
	}
	return NULL;
}

static const char *connect_all(void)
{
	struct remote *mine = calloc(2 * config.qps, sizeof *mine), *theirs = mine + config.qps;
	const struct want want = { .rd_atomic = 16, .min_rnr = 1, .timeout = 18 };

	ENSURE(mine, "no memory");
	keep(close_memory, mine, "memory");
	for (unsigned int i = 0; i < config.qps; i++) {
		mine[i] = (struct remote){ conns[i].qp->qp_num, mr->rkey, (uintptr_t)part(&conns[i], RECV_PART, 0) };
		TRY(to_init(conns[i].qp, &want));
		for (unsigned int n = 0; n < RECVS; n++)
			TRY(post_receive(&conns[i], n));
	}
	for (unsigned int i = 0; i < config.qps; i++) { /* one by one, because the socket's buffer is limited */
		TRY(send_to_other(&mine[i], sizeof mine[i]));
		TRY(receive_from_other(&theirs[i], sizeof theirs[i]));
	}
	for (unsigned int i = 0; i < config.qps; i++) {
		conns[i].remote = theirs[i];
		TRY(to_rtr(conns[i].qp, theirs[i].qpn, &want));
		TRY(to_rts(conns[i].qp, &want));
	}
	return NULL;
}

/* Waits until `done` holds. Ends early if a thread fails or no progress is made. */
static const char *wait_until(bool (*done)(void), unsigned int ms, const char *what)
{
	uint64_t end = now_ms() + ms, moved = now_ms(), before = atomic_load(&progress);

	while (!done()) {
		uint64_t now = now_ms(), count = atomic_load(&progress);

		ENSURE(!atomic_load(&failed), "%s", first_failure);
		if (count != before) {
			before = count;
			moved = now;
		}
		ENSURE(now - moved < QUIET_LIMIT_MS, "no progress, %lld requests are outstanding, while waiting until %s",
		       (long long)atomic_load(&under_way), what);
		ENSURE(now < end, "not within %u s: %s", ms / 1000, what);
		sleep_ms(2);
	}
	return NULL;
}

static uint64_t traffic_end;
static uint64_t sends_due, writes_due;

static bool time_is_over(void)
{
	return now_ms() >= traffic_end;
}

static bool nothing_under_way(void)
{
	return atomic_load(&under_way) == 0;
}

static uint64_t arrived(bool writes)
{
	uint64_t n = 0;

	for (unsigned int i = 0; i < config.qps; i++) {
		pthread_mutex_lock(&conns[i].lock);
		n += writes ? conns[i].writes_in.next : conns[i].sends_in.next;
		pthread_mutex_unlock(&conns[i].lock);
	}
	return n;
}

static bool all_arrived(void)
{
	return arrived(false) >= sends_due && arrived(true) >= writes_due;
}

/* What an end has done on a connection, for comparison by the other end. */
struct account {
	uint64_t sends, written, adds, swaps;
};

static const char *compare_accounts(void)
{
	for (unsigned int i = 0; i < config.qps; i++) {
		struct conn *c = &conns[i];
		struct account mine = { c->sends, c->written, c->adds_out, c->swaps }, theirs;

		TRY(send_to_other(&mine, sizeof mine));
		TRY(receive_from_other(&theirs, sizeof theirs));
		ENSURE(c->sends_in.next == theirs.sends, "connection %u: %llu Sends of %llu arrived", i,
		       (unsigned long long)c->sends_in.next, (unsigned long long)theirs.sends);
		ENSURE(c->writes_in.next == theirs.written, "connection %u: %llu Writes of %llu arrived", i,
		       (unsigned long long)c->writes_in.next, (unsigned long long)theirs.written);
		ENSURE(c->adds.next == c->adds_out, "connection %u: Fetch and Add returned %llu of %llu expected values", i,
		       (unsigned long long)c->adds.next, (unsigned long long)c->adds_out);
		ENSURE(words(c)[0] == theirs.adds, "connection %u: the sum is %llu, expected %llu", i,
		       (unsigned long long)words(c)[0], (unsigned long long)theirs.adds);
		ENSURE(words(c)[1] == theirs.swaps, "connection %u: the swapped word is %llu, expected %llu", i,
		       (unsigned long long)words(c)[1], (unsigned long long)theirs.swaps);
		TRY(same(part(c, SOURCE_PART, 0), config.bytes, source_seed(side, i), 0, "data that is only read"));
		ENSURE(c->sends && theirs.sends, "connection %u was never used", i);
	}
	return NULL;
}

static unsigned int number_of(const char *name, unsigned int usual)
{
	const char *text = getenv(name);

	return text && atoi(text) > 0 ? (unsigned int)atoi(text) : usual;
}

static const char *traffic(void)
{
	pthread_t *threads = calloc(config.threads, sizeof *threads);
	const char *reason;
	unsigned int began;
	uint64_t mine[2] = { 0, 0 }, theirs[2], start;

	ENSURE(threads, "no memory");
	keep(close_memory, threads, "memory");
	TRY(meet());
	start = now_ms();
	traffic_end = start + 1000 * number_of("SCALE_SECONDS", 1);
	for (began = 0; began < config.threads; began++)
		if (pthread_create(&threads[began], NULL, thread, (void *)(uintptr_t)began))
			break;
	reason = began < config.threads ? "cannot create so many threads" : NULL;
	if (!reason)
		reason = wait_until(time_is_over, 3600000, "the duration has passed");
	atomic_store(&stop, true);
	if (!reason)
		reason = wait_until(nothing_under_way, STOP_LIMIT_MS, "all requests are complete");
	/* The peer may still send. If it grants a window, this end posts one more request, which returns the window. */
	for (int round = 0; !reason && round < 3; round++) {
		mine[0] = mine[1] = 0;
		for (unsigned int i = 0; i < config.qps; i++) {
			pthread_mutex_lock(&conns[i].lock);
			mine[0] += conns[i].sends;
			mine[1] += conns[i].written;
			pthread_mutex_unlock(&conns[i].lock);
		}
		reason = send_to_other(mine, sizeof mine);
		if (!reason)
			reason = receive_from_other(theirs, sizeof theirs);
		sends_due = theirs[0];
		writes_due = theirs[1];
		if (!reason)
			reason = wait_until(all_arrived, STOP_LIMIT_MS, "all sent messages have arrived");
		if (!reason)
			reason = wait_until(nothing_under_way, STOP_LIMIT_MS, "the requests that followed are complete");
	}
	if (!reason)
		reason = meet();
	atomic_store(&quit, true);
	for (unsigned int i = 0; i < began; i++)
		pthread_join(threads[i], NULL);
	if (!reason && atomic_load(&failed))
		reason = because("%s", first_failure);
	TRY(reason);
	for (unsigned int i = 0; i < config.queues; i++)
		TRY(no_wc(queues[i].cq, 1));
	TRY(compare_accounts());
	if (side == 0) {
		uint64_t count = 0;

		printf("# %u queue pairs, %u threads, %u completion queues, %s:", config.qps, config.threads,
		       config.queues, config.events ? "events" : "polling");
		for (int k = 0; k < KINDS; k++) {
			ENSURE(sums.kinds[k], "there was no %s", kind_names[k]);
			printf(" %s %llu", kind_names[k], (unsigned long long)sums.kinds[k]);
			count += sums.kinds[k];
		}
		printf("; %llu done and %llu received in %.1f s\n", (unsigned long long)count,
		       (unsigned long long)(sums.sends_in + sums.writes_in), (double)(now_ms() - start) / 1e3);
	}
	return NULL;
}

static const char *one_end(void)
{
	TRY(open_all());
	TRY(connect_all());
	TRY(traffic());
	TRY(close_all());
	return meet();
}

/* Runs one end in this process and the other in a child, which opens the device for itself. */
static const char *both_ends(const char *(*end)(void))
{
	const char *reason;
	int pair[2], status = 0;
	pid_t pid;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	ENSURE(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair), "socketpair: %s", strerror(errno));
	fflush(stdout);
	pid = fork();
	ENSURE(pid >= 0, "fork: %s", strerror(errno));
	side = pid == 0;
	other = pair[side];
	close(pair[!side]);
	if (side == 1) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		reason = end();
		if (reason)
			printf("# the other end: %s [%s]\n", reason, failed_at);
		fflush(stdout);
		_exit(reason ? 1 : 0);
	}
	reason = end();
	close(other);
	ENSURE(waitpid(pid, &status, 0) == pid, "waitpid: %s", strerror(errno));
	TRY(reason);
	ENSURE(status == 0, "the other end fails");
	return NULL;
}

static const struct config configs[] = {
	{ 1000, 8, 8, 1024, false, false },
	{ 1000, 8, 8, 1024, true, false },
	{ 64, 64, 64, 40000, false, false },
	{ 64, 64, 64, 40000, true, false },
	{ 64, 64, 64, 4096, false, true },
	{ 64, 64, 64, 4096, true, true },
	{ 64, 16, 1, 4096, false, true },
	{ 64, 16, 1, 4096, true, true },
};

static const char *scale(size_t which)
{
	config = configs[which];
	config.qps = number_of("SCALE_QPS", config.qps);
	config.threads = number_of("SCALE_THREADS", config.threads);
	if (config.queues > 1)
		config.queues = config.threads;
	return both_ends(one_end);
}

/* ---- memory of idle connections ---- */

struct usage {
	long rss, pss; /* KiB */
};

static struct usage usage(void)
{
	struct usage u = { 0, 0 };
	FILE *f = fopen("/proc/self/smaps_rollup", "r");
	char line[128];

	while (f && fgets(line, sizeof line, f)) {
		sscanf(line, "Rss: %ld", &u.rss);
		sscanf(line, "Pss: %ld", &u.pss);
	}
	if (f)
		fclose(f);
	return u;
}

/* Prints the memory of `n` objects since `before`, at both ends. Fails if it is more than `most` KiB each; 0 means no limit. */
static const char *print_cost(const char *what, struct usage before, unsigned int n, double most)
{
	struct usage after = usage(), theirs[2];

	ENSURE(after.rss > 0, "no /proc/self/smaps_rollup");
	TRY(send_to_other((struct usage[2]){ before, after }, sizeof theirs));
	TRY(receive_from_other(theirs, sizeof theirs));
	if (side == 0)
		printf("# %-58s %7.2f KiB each, Pss %.2f; the other end %7.2f, Pss %.2f\n", what,
		       (double)(after.rss - before.rss) / n, (double)(after.pss - before.pss) / n,
		       (double)(theirs[1].rss - theirs[0].rss) / n, (double)(theirs[1].pss - theirs[0].pss) / n);
	fflush(stdout);
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
	ENSURE(most == 0 || (double)(after.rss - before.rss) / n <= most, "%s: %.2f KiB each, at most %.2f expected", what,
	       (double)(after.rss - before.rss) / n, most);
#else
	(void)most;
#endif
	return NULL;
}

#define IDLE_BYTES 65536u

static uint8_t idle_memory[2 * IDLE_BYTES];

/* Waits until the `n` requests on `cq` have completed. */
static const char *take(struct ibv_cq *cq, unsigned int n)
{
	struct ibv_wc wc;

	while (n-- > 0) {
		TRY(next_wc(cq, &wc, WAIT_MS));
		ENSURE(wc.status == IBV_WC_SUCCESS, "status %d (%s)", wc.status, ibv_wc_status_str(wc.status));
	}
	return NULL;
}

static const char *idle_connections(unsigned int n, struct ibv_mr *buffer)
{
	const struct want want = { 0 };
	struct ibv_qp **qps = calloc(n, sizeof(struct ibv_qp *));
	struct ibv_cq *cq = new_cq(4096, NULL);
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_sge small = { (uintptr_t)idle_memory, 64, buffer->lkey };
	struct ibv_sge large = { (uintptr_t)idle_memory, IDLE_BYTES, buffer->lkey };
	struct remote mine, theirs = { 0 };
	struct usage before;

	ENSURE(qps && cq, "no memory");
	keep(close_memory, qps, "memory");
	TRY(meet());
	before = usage();
	for (unsigned int i = 0; i < n; i++) {
		qps[i] = new_qp(pd, &init);
		ENSURE(qps[i], "ibv_create_qp %u: %s", i, strerror(errno));
		TRY(to_init(qps[i], &want));
	}
	TRY(print_cost("RC queue pair, not connected", before, n, 4));
	for (unsigned int i = 0; i < n; i++) {
		mine = (struct remote){ qps[i]->qp_num, buffer->rkey, (uintptr_t)idle_memory + IDLE_BYTES };
		TRY(send_to_other(&mine, sizeof mine));
		TRY(receive_from_other(&theirs, sizeof theirs));
		TRY(to_rtr(qps[i], theirs.qpn, &want));
		TRY(to_rts(qps[i], &want));
		TRY(post_recv(qps[i], 0, &small, 1));
	}
	TRY(meet());
	for (unsigned int i = 0; i < n; i++) {
		struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, &small, 1);

		TRY(post(qps[i], &wr));
		TRY(take(cq, 2));
	}
	TRY(meet());
	TRY(print_cost("RC queue pair, connected, one Send each way", before, n, 8));
	for (unsigned int i = 0; i < n; i++) {
		struct ibv_send_wr wr = send_wr(1, IBV_WR_RDMA_WRITE, &large, 1);

		wr.wr.rdma.remote_addr = theirs.addr;
		wr.wr.rdma.rkey = theirs.rkey;
		TRY(post(qps[i], &wr));
		TRY(take(cq, 1));
	}
	TRY(meet());
	sleep_ms(100); /* lets the engine's thread finish its work */
	TRY(print_cost("RC queue pair, idle after an RDMA Write of 64 KiB each way", before, n, 8));
	for (unsigned int i = 0; i < n; i++)
		ENSURE(!close_now(qps[i]), "ibv_destroy_qp");
	TRY(meet());
	sleep_ms(100);
	malloc_trim(0);
	/*
	 * The process keeps up to four receive buffers of 256 KiB, which are 2 KiB for each of 500 queue pairs. The rest of the
	 * limit is for transmit buffers and memory that malloc keeps.
	 */
	return print_cost("RC queue pair, all destroyed", before, n, 3);
}

/* One datagram queue pair, and `n` at the other end which exchange a message with it. */
static const char *idle_peers(unsigned int n, struct ibv_mr *buffer)
{
	unsigned int own = side == 0 ? 1 : n;
	const struct want want = { 0 };
	struct ibv_qp **qps = calloc(n, sizeof(struct ibv_qp *));
	struct ibv_ah **ahs = calloc(n, sizeof(struct ibv_ah *));
	uint32_t *numbers = calloc(n, sizeof *numbers), first;
	struct ibv_cq *cq = new_cq(4096, NULL);
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_UD, .send_cq = cq, .recv_cq = cq,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_sge in = { (uintptr_t)idle_memory, 128, buffer->lkey };
	struct ibv_sge out = { (uintptr_t)idle_memory + 128, 64, buffer->lkey };
	struct usage before;

	ENSURE(qps && ahs && numbers && cq, "no memory");
	keep(close_memory, qps, "memory");
	keep(close_memory, ahs, "memory");
	keep(close_memory, numbers, "memory");
	before = usage();
	for (unsigned int i = 0; i < own; i++) {
		qps[i] = new_qp(pd, &init);
		ENSURE(qps[i], "ibv_create_qp %u: %s", i, strerror(errno));
		TRY(to_init(qps[i], &want));
		TRY(to_rtr(qps[i], 0, &want));
		TRY(to_rts(qps[i], &want));
		numbers[i] = qps[i]->qp_num;
	}
	TRY(print_cost("UD queue pairs: one here, one per peer at the other end", before, n, 5));
	if (side == 0) {
		TRY(send_to_other(numbers, sizeof *numbers));
		TRY(receive_from_other(numbers, n * sizeof *numbers));
	} else {
		TRY(send_to_other(numbers, n * sizeof *numbers));
		TRY(receive_from_other(&first, sizeof first));
	}
	before = usage();
	for (unsigned int i = 0; i < n; i++) {
		struct ibv_qp *qp = qps[side == 0 ? 0 : i];
		struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, &out, 1);
		struct ibv_ah_attr ah = address_of(&local_gid, 0, false);

		ahs[i] = ibv_create_ah(pd, &ah);
		ENSURE(ahs[i], "ibv_create_ah: %s", strerror(errno));
		keep(close_ah, ahs[i], "address handle");
		wr.wr.ud.ah = ahs[i];
		wr.wr.ud.remote_qpn = side == 0 ? numbers[i] : first;
		wr.wr.ud.remote_qkey = QKEY;
		TRY(post_recv(qp, 0, &in, 1));
		TRY(meet());
		TRY(post(qp, &wr));
		TRY(take(cq, 2));
		TRY(meet());
	}
	return print_cost("UD peer, after one message each way", before, n, 6);
}

static unsigned int idle_count;

static const char *idle_end(void)
{
	struct rlimit files;
	struct ibv_mr *buffer;

	getrlimit(RLIMIT_NOFILE, &files);
	files.rlim_cur = files.rlim_max;
	setrlimit(RLIMIT_NOFILE, &files);
	TRY(open_device());
	pd = new_pd();
	ENSURE(pd, "ibv_alloc_pd: %s", strerror(errno));
	memset(idle_memory, 1, sizeof idle_memory);
	memset(kept + kept_count, 0, sizeof kept - kept_count * sizeof kept[0]); /* makes the pages resident now */
	buffer = new_mr(pd, idle_memory, sizeof idle_memory, ALL_ACCESS);
	ENSURE(buffer, "ibv_reg_mr: %s", strerror(errno));
	/* Datagrams first: malloc keeps the memory that closed connections have freed, and datagram peers would use it. */
	TRY(idle_peers(idle_count, buffer));
	TRY(idle_connections(idle_count, buffer));
	return close_all();
}

static const char *idle(size_t count)
{
	idle_count = number_of("SCALE_IDLE", (unsigned int)count);
	return both_ends(idle_end);
}

static const struct test tests[] = {
	{ "many_queue_pairs_by_polling", scale, 0, 0, true },
	{ "many_queue_pairs_by_events", scale, 1, 0, true },
	{ "many_threads_by_polling", scale, 2, 0, true },
	{ "many_threads_by_events", scale, 3, 0, true },
	{ "each_thread_on_all_queue_pairs_by_polling", scale, 4, 0, true },
	{ "each_thread_on_all_queue_pairs_by_events", scale, 5, 0, true },
	{ "one_completion_queue_for_all_by_polling", scale, 6, 0, true },
	{ "one_completion_queue_for_all_by_events", scale, 7, 0, true },
	{ "idle", idle, 500, 0, true },
};

/* Passes the value of `--NAME=VALUE` to the processes of the tests in an environment variable. */
static void option(const char *argument, const char *flag, const char *variable)
{
	size_t len = strlen(flag);

	if (!strncmp(argument, flag, len))
		setenv(variable, argument + len, 1);
}

int main(int argc, char **argv)
{
	struct test timed[COUNT(tests)];

	for (int i = 1; i < argc; i++) {
		option(argv[i], "--seconds=", "SCALE_SECONDS");
		option(argv[i], "--qps=", "SCALE_QPS");
		option(argv[i], "--threads=", "SCALE_THREADS");
		option(argv[i], "--idle=", "SCALE_IDLE");
	}
	memcpy(timed, tests, sizeof tests);
	for (size_t i = 0; i < COUNT(timed); i++)
		timed[i].seconds = 120 + number_of("SCALE_SECONDS", 1);
	return run_tests(timed, COUNT(timed), argc, argv);
}
