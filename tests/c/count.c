/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Counts the instructions of posting and polling under callgrind: `cargo lab count`. The kernel is not counted.
 * (Receiving is not counted here, because timing decides whether the program's thread or the engine's thread does it.)
 *
 * Each phase prints its name and its number of operations to stdout, in the order of callgrind's dumps. Each phase runs
 * several times, because a thread that polls an empty queue adds instructions. The minimum is the cost of the
 * operation.
 */
#include "ends.h"

#include <valgrind/callgrind.h>

#define TIMES 50u
#define ROUNDS 20u

/* Requests in a list. */
#define LIST 16u
/* `complete_others` makes this many polls of another queue in each of two rounds. A pause follows each round. After both, a request has
 * completed. */
#define POLLS 200u

/*
 * Counts `thing`, which consists of `each` operations, in `ROUNDS` rounds of `TIMES` repetitions, after one round that is
 * not counted. `before` and `after` are not counted.
 */
#define COUNTED(name, each, before, thing, after)                                                                      \
	do {                                                                                                           \
		for (unsigned int i_ = 0; i_ < (ROUNDS + 1) * TIMES; i_++) {                                           \
			bool counts_ = i_ >= TIMES;                                                                    \
                                                                                                                       \
			before;                                                                                        \
			if (counts_)                                                                                   \
				CALLGRIND_TOGGLE_COLLECT;                                                              \
			thing;                                                                                         \
			if (counts_)                                                                                   \
				CALLGRIND_TOGGLE_COLLECT;                                                              \
			after;                                                                                         \
			if (counts_ && (i_ + 1) % TIMES == 0) {                                                        \
				CALLGRIND_DUMP_STATS_AT(name);                                                         \
				printf("%s %u\n", name, TIMES * (each));                                               \
			}                                                                                              \
		}                                                                                                      \
		fflush(stdout);                                                                                        \
	} while (0)

static int failed;

#define MUST(expr)                                                                                                     \
	do {                                                                                                           \
		if (!(expr)) {                                                                                         \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #expr);                                     \
			failed = 1;                                                                                    \
			return;                                                                                        \
		}                                                                                                      \
	} while (0)

static bool take(struct ibv_cq *cq, struct ibv_wc *wc)
{
	int n = 0;

	for (unsigned int i = 0; i < 10000000 && n == 0; i++)
		n = ibv_poll_cq(cq, 1, wc);
	return n == 1 && wc->status == IBV_WC_SUCCESS;
}

/* After two polls that find nothing, a posted request is always sent at once. Without them, timing decides this. */
static void look_in_vain(struct ibv_cq *cq)
{
	struct ibv_wc wc;

	for (unsigned int i = 0; i < 2; i++)
		MUST(ibv_poll_cq(cq, 1, &wc) == 0);
}

static void receive(struct pair *p, struct region *to)
{
	struct ibv_sge sge = sge_of(to, 0, to->len);
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	MUST(!ibv_post_recv(p->b.qp, &wr, &bad));
}

/* Polls an idle queue. The device then runs, and adds completions to the other queues. */
static void complete_others(struct ibv_cq *cq)
{
	struct ibv_wc wc;

	for (unsigned int turn = 0; turn < 2; turn++) {
		for (unsigned int i = 0; i < POLLS; i++)
			MUST(ibv_poll_cq(cq, 1, &wc) == 0);
		/* On a busy machine the acknowledgement may arrive later. */
		nanosleep(&(struct timespec){ 0, 500000 }, NULL);
	}
}

/* Receives and completes a whole list. */
static void take_list(struct pair *p)
{
	struct ibv_wc wc;

	for (unsigned int i = 0; i < LIST; i++)
		MUST(take(p->b.rcq, &wc) && take(p->a.scq, &wc));
}

static void receive_list(struct pair *p, struct region *to)
{
	for (unsigned int i = 0; i < LIST; i++)
		receive(p, to);
}

/* Counts a poll that finds a completion, and posting a list. */
static void count_more(struct pair *p, struct region *to, struct ibv_send_wr *wr)
{
	struct ibv_send_wr list[LIST], *bad;
	struct ibv_wc wc;

	COUNTED("rc/poll_cq", 1,
		(receive(p, to), ({ MUST(!ibv_post_send(p->a.qp, wr, &bad) && take(p->b.rcq, &wc)); }),
			complete_others(p->b.rcq)),
		MUST(ibv_poll_cq(p->a.scq, 1, &wc) == 1), (void)0);
	for (unsigned int i = 0; i < LIST; i++) {
		list[i] = *wr;
		list[i].next = i + 1 < LIST ? &list[i + 1] : NULL;
	}
	COUNTED("rc/post_list", LIST, (receive_list(p, to), look_in_vain(p->a.scq)),
		MUST(!ibv_post_send(p->a.qp, list, &bad)), take_list(p));
}

static void count(enum ibv_qp_type type, const char *const names[2])
{
	struct want want = { .type = type, .inline_data = 64 };
	struct region from, to;
	struct ibv_send_wr wr, *bad;
	struct ibv_sge sge;
	struct ibv_wc wc;
	struct pair p;
	const char *why;

	why = open_pair(&p, &want);
	if (!why)
		why = new_region(&from, p.a.pd, 64, IBV_ACCESS_LOCAL_WRITE);
	if (!why)
		why = new_region(&to, p.b.pd, 64 + 40, ALL_ACCESS);
	if (why)
		fprintf(stderr, "%s\n", why);
	MUST(!why);
	sge = sge_of(&from, 0, 64);
	wr = send_wr(1, IBV_WR_SEND, &sge, 1);
	wr.send_flags |= IBV_SEND_INLINE;
	if (type == IBV_QPT_UD) {
		struct ibv_ah_attr attr = address_of(&local_gid, port_attr.lid, false);
		struct ibv_ah *ah = ibv_create_ah(p.a.pd, &attr);

		MUST(ah);
		keep(close_ah, ah, "address handle");
		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = p.b.qp->qp_num;
		wr.wr.ud.remote_qkey = QKEY;
	}

	COUNTED(names[0], 1, (void)0, receive(&p, &to),
		MUST(!ibv_post_send(p.a.qp, &wr, &bad) && take(p.b.rcq, &wc) && take(p.a.scq, &wc)));
	COUNTED(names[1], 1, (receive(&p, &to), look_in_vain(p.a.scq)), MUST(!ibv_post_send(p.a.qp, &wr, &bad)),
		MUST(take(p.b.rcq, &wc) && take(p.a.scq, &wc)));
	if (type == IBV_QPT_RC)
		count_more(&p, &to, &wr);
}

int main(void)
{
	static const char *const rc[] = { "rc/post_recv", "rc/post_send" };
	static const char *const uc[] = { "uc/post_recv", "uc/post_send" };
	static const char *const ud[] = { "ud/post_recv", "ud/post_send" };

	count(IBV_QPT_RC, rc);
	count(IBV_QPT_UC, uc);
	count(IBV_QPT_UD, ud);
	return failed;
}
