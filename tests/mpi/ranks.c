/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * An MPI program with known results: messages of many sizes around a ring, blocking and non-blocking; collectives;
 * one-sided puts, gets and sums. Prints how many checks passed, or which one failed.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int rank, ranks;
static long checks;

static void ensure(int holds, const char *what, long detail)
{
	if (!holds) {
		fprintf(stderr, "rank %d: %s (%ld)\n", rank, what, detail);
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	checks++;
}

/* Byte i of a message of this size from rank `from`. */
static unsigned char byte_of(int from, size_t size, size_t i)
{
	return (unsigned char)(from * 31 + size + i * 7 + i / 251);
}

static void fill(unsigned char *at, size_t size, int from)
{
	for (size_t i = 0; i < size; i++)
		at[i] = byte_of(from, size, i);
}

static void same(const unsigned char *at, size_t size, int from, const char *what)
{
	for (size_t i = 0; i < size; i++)
		if (at[i] != byte_of(from, size, i))
			ensure(0, what, (long)i);
	ensure(1, what, 0);
}

static const size_t sizes[] = { 0, 1, 8, 100, 1000, 4096, 8191, 16384, 65537, 300000, 1048576, 4194304 };
#define SIZES (sizeof sizes / sizeof *sizes)

static void ring(unsigned char *out, unsigned char *in)
{
	int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks, count;
	MPI_Status status;

	for (size_t s = 0; s < SIZES; s++) {
		fill(out, sizes[s], rank);
		MPI_Sendrecv(out, (int)sizes[s], MPI_BYTE, next, (int)s, in, (int)sizes[s], MPI_BYTE, before, (int)s,
			     MPI_COMM_WORLD, &status);
		MPI_Get_count(&status, MPI_BYTE, &count);
		ensure((size_t)count == sizes[s] && status.MPI_SOURCE == before, "length of a message in the ring", count);
		same(in, sizes[s], before, "a byte of a message in the ring");
	}
}

/* Many small messages at the same time in both directions, received in another order than they were sent. */
static void burst(void)
{
	enum { N = 200 };
	static int out[N], in[N];
	MPI_Request requests[2 * N];
	int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;

	for (int i = 0; i < N; i++)
		MPI_Irecv(&in[i], 1, MPI_INT, before, 1000 + N - 1 - i, MPI_COMM_WORLD, &requests[i]);
	for (int i = 0; i < N; i++) {
		out[i] = rank * N + i;
		MPI_Isend(&out[i], 1, MPI_INT, next, 1000 + i, MPI_COMM_WORLD, &requests[N + i]);
	}
	MPI_Waitall(2 * N, requests, MPI_STATUSES_IGNORE);
	for (int i = 0; i < N; i++)
		ensure(in[i] == before * N + N - 1 - i, "a message of the burst", i);
}

static void collectives(void)
{
	enum { N = 50000 };
	static long mine[N], all[N];
	long *many = malloc(sizeof(long) * (size_t)ranks * 1000), *back = malloc(sizeof(long) * (size_t)ranks * 1000);
	long sum = (long)ranks * (ranks - 1) / 2, got;

	for (int root = 0; root < ranks; root++) {
		for (int i = 0; i < N; i++)
			mine[i] = rank == root ? root * 7 + i : -1;
		MPI_Bcast(mine, N, MPI_LONG, root, MPI_COMM_WORLD);
		for (int i = 0; i < N; i++)
			ensure(mine[i] == root * 7 + i, "a broadcast", i);
	}
	for (int i = 0; i < N; i++)
		mine[i] = rank + i;
	MPI_Allreduce(mine, all, N, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
	for (int i = 0; i < N; i++)
		ensure(all[i] == sum + (long)ranks * i, "an allreduce", i);
	MPI_Reduce(mine, all, N, MPI_LONG, MPI_MAX, 0, MPI_COMM_WORLD);
	for (int i = 0; rank == 0 && i < N; i++)
		ensure(all[i] == ranks - 1 + i, "a maximum at rank 0", i);
	MPI_Scan(mine, all, N, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
	for (int i = 0; i < N; i++)
		ensure(all[i] == (long)rank * (rank + 1) / 2 + (long)(rank + 1) * i, "a prefix sum", i);
	for (int to = 0; to < ranks; to++)
		for (int i = 0; i < 1000; i++)
			many[to * 1000 + i] = rank * 1000000L + to * 1000 + i;
	MPI_Alltoall(many, 1000, MPI_LONG, back, 1000, MPI_LONG, MPI_COMM_WORLD);
	for (int from = 0; from < ranks; from++)
		for (int i = 0; i < 1000; i++)
			ensure(back[from * 1000 + i] == from * 1000000L + rank * 1000 + i, "an all-to-all exchange", i);
	MPI_Allgather(many, 1000, MPI_LONG, back, 1000, MPI_LONG, MPI_COMM_WORLD);
	for (int from = 0; from < ranks; from++)
		ensure(back[from * 1000 + 5] == from * 1000000L + 5, "an allgather", from);
	MPI_Scatter(many, 1000, MPI_LONG, back, 1000, MPI_LONG, ranks - 1, MPI_COMM_WORLD);
	ensure(back[3] == (ranks - 1) * 1000000L + rank * 1000 + 3, "scattered", back[3]);
	got = rank;
	MPI_Exscan(&got, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
	ensure(rank == 0 || sum == (long)rank * (rank - 1) / 2, "an exclusive prefix sum", sum);
	for (int i = 0; i < 100; i++)
		MPI_Barrier(MPI_COMM_WORLD);
	free(many);
	free(back);
}

static void one_sided(void)
{
	enum { N = 20000 };
	static long out[N], in[N];
	long *window, one = 1, old;
	int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
	MPI_Win win;

	MPI_Win_allocate(2 * N * sizeof(long), sizeof(long), MPI_INFO_NULL, MPI_COMM_WORLD, &window, &win);
	for (int i = 0; i < N; i++) {
		out[i] = rank * 3 + i;
		window[i] = window[N + i] = 0;
	}
	MPI_Win_fence(0, win);
	MPI_Put(out, N, MPI_LONG, next, 0, N, MPI_LONG, win);
	MPI_Win_fence(0, win);
	for (int i = 0; i < N; i++)
		ensure(window[i] == before * 3 + i, "the result of a put", i);
	MPI_Win_fence(0, win);
	MPI_Get(in, N, MPI_LONG, next, 0, N, MPI_LONG, win);
	MPI_Win_fence(0, win);
	for (int i = 0; i < N; i++)
		ensure(in[i] == rank * 3 + i, "the result of a get", i);
	MPI_Accumulate(out, N, MPI_LONG, 0, N, N, MPI_LONG, MPI_SUM, win);
	MPI_Win_fence(0, win);
	for (int i = 0; rank == 0 && i < N; i++)
		ensure(window[N + i] == (long)ranks * (ranks - 1) / 2 * 3 + (long)ranks * i, "an accumulated sum", i);
	MPI_Win_fence(0, win);
	window[0] = 0;
	MPI_Win_fence(0, win);
	for (int i = 0; i < 50; i++) {
		MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, win);
		MPI_Fetch_and_op(&one, &old, MPI_LONG, 0, 0, MPI_SUM, win);
		MPI_Win_unlock(0, win);
		ensure(old >= i && old < 50L * ranks, "a counter", old);
	}
	MPI_Win_fence(0, win);
	if (rank == 0)
		ensure(window[0] == 50L * ranks, "the final counter", window[0]);
	MPI_Win_free(&win);
}

int main(int argc, char **argv)
{
	unsigned char *out = malloc(sizes[SIZES - 1]), *in = malloc(sizes[SIZES - 1]);
	long total;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	ring(out, in);
	burst();
	collectives();
	one_sided();
	MPI_Reduce(&checks, &total, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
	if (rank == 0)
		printf("%d ranks, %ld checks held\n", ranks, total);
	MPI_Finalize();
	free(out);
	free(in);
	return 0;
}
