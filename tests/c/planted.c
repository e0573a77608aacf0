/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Deliberate errors that check the error detectors: `cargo lab sanitize` and `cargo lab valgrind` run this program
 * first, and continue only if the error is detected. To find these errors, a detector must observe both the program and
 * the library, because the library writes to the program's memory.
 *
 *   planted overflow   registers more memory than it allocated, and lets the device write beyond the end of the allocation
 *   planted race       reads memory that the device writes, without synchronization
 *   planted uninit     branches on uninitialized memory, before the completion of the Write that fills it
 */
#include "ends.h"

static const struct want usual = { 0 };

#define LEN 64u

static const char *write_to(struct pair *p, uint8_t *at, struct region *dst, struct region *src)
{
	struct ibv_send_wr wr;
	struct ibv_sge from;

	*dst = (struct region){ .at = at, .len = LEN };
	dst->mr = new_mr(p->b.pd, at, LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	ENSURE(dst->mr, "ibv_reg_mr: %s", strerror(errno));
	from = sge_of(src, 0, LEN);
	wr = rdma_wr(1, IBV_WR_RDMA_WRITE, &from, 1, dst, 0);
	return post(p->a.qp, &wr);
}

static const char *overflow(size_t arg)
{
	struct region src, dst;
	struct pair p;
	uint8_t *small = malloc(LEN / 2);

	(void)arg;
	keep(close_memory, small, "memory");
	TRY(open_pair(&p, &usual));
	TRY(new_region(&src, p.a.pd, LEN, 0));
	TRY(write_to(&p, small, &dst, &src));
	return expect_ok(p.a.scq, 1, IBV_WC_RDMA_WRITE, NULL);
}

static const char *race(size_t arg)
{
	uint64_t end = now_ms() + WAIT_MS;
	volatile uint8_t *at = calloc(1, LEN);
	struct region src, dst;
	struct pair p;

	(void)arg;
	keep(close_memory, (void *)at, "memory");
	TRY(open_pair(&p, &usual));
	TRY(new_region(&src, p.a.pd, LEN, 0));
	TRY(write_to(&p, (uint8_t *)at, &dst, &src));
	while (!at[LEN - 1] && now_ms() < end)
		sleep_ms(1);
	return expect_ok(p.a.scq, 1, IBV_WC_RDMA_WRITE, NULL);
}

static const char *uninit(size_t arg)
{
	volatile uint8_t *at = malloc(LEN);
	struct region src, dst;
	struct pair p;

	(void)arg;
	keep(close_memory, (void *)at, "memory");
	TRY(open_pair(&p, &usual));
	TRY(new_region(&src, p.a.pd, LEN, 0));
	TRY(write_to(&p, (uint8_t *)at, &dst, &src));
	if (at[0] == 1) /* before the completion */
		puts("# one");
	return expect_ok(p.a.scq, 1, IBV_WC_RDMA_WRITE, NULL);
}

static const struct test tests[] = {
	{ "overflow", overflow, 0, 0, false },
	{ "race", race, 0, 0, false },
	{ "uninit", uninit, 0, 0, false },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
