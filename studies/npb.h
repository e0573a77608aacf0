/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * What the kernels of the NAS parallel benchmarks have in common: the ranks, checks, memory, the random numbers of
 * NAS Technical Report RNR-94-007, and the line that reports a run.
 */
#ifndef NPB_H
#define NPB_H

#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, ranks;

static inline void start(int *argc, char ***argv)
{
	MPI_Init(argc, argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
}

/* Ends all ranks with status 1 unless the condition holds. */
static inline void ensure(int holds, const char *what, double got, double wanted)
{
	if (!holds) {
		fprintf(stderr, "rank %d: failed: %s: %.15g, expected %.15g\n", rank, what, got, wanted);
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
}

static inline void *room(size_t count, size_t size)
{
	void *at = calloc(count ? count : 1, size);

	ensure(at != NULL, "no memory", 0, 0);
	return at;
}

/* Reports a run whose result has been checked. `cargo lab mpi` and `anywarp study` read the seconds at the end of the line. */
static inline void report(const char *kernel, char class, double seconds)
{
	if (!rank)
		printf("%d ranks, %s.%c verified %.3f s\n", ranks, kernel, class, seconds);
}

/* A program with one kernel: runs the class that the argument names, and reports it. `run` gets the index of the class in `letters`. */
static inline int run_class(int argc, char **argv, const char *kernel, const char *letters, double (*run)(size_t class))
{
	const char *at = NULL;

	start(&argc, &argv);
	if (argc == 2 && argv[1][0])
		at = strchr(letters, argv[1][0]);
	if (!at) {
		fprintf(stderr, "%s CLASS: one of %s\n", kernel, letters);
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	report(kernel, *at, run((size_t)(at - letters)));
	MPI_Finalize();
	return 0;
}

/* The random number generator: x := 5^13 x mod 2^46. The random number is x / 2^46. */
static const uint64_t FACTOR = 1220703125, SEED = 314159265, MASK = ((uint64_t)1 << 46) - 1;

static inline double draw(uint64_t *x)
{
	*x = FACTOR * *x & MASK;
	return (double)*x / (double)(MASK + 1);
}

/* The state of the generator after `skip` draws. */
static inline uint64_t state_after(uint64_t skip)
{
	uint64_t x = SEED, power = FACTOR;

	for (; skip; skip >>= 1) {
		if (skip & 1)
			x = x * power & MASK;
		power = power * power & MASK;
	}
	return x;
}

/* The first element of block `r`, when `n` elements are divided among `blocks` blocks. */
static inline size_t begin_of(size_t n, int r, int blocks)
{
	return n * (size_t)r / (size_t)blocks;
}

#endif
