/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * An MPI program for `anywarp study`, and for the rows of the bench that also measure MPI. Prints one line of JSON.
 *
 *   mpi lat SIZE TIMES          two ranks: half of the round-trip time of a message
 *   mpi chain SIZE TIMES        a message of each rank to the next, all at the same time
 *   mpi bw SIZE TIMES DEPTH     two ranks: messages of rank 0, DEPTH of them outstanding
 *   mpi both SIZE TIMES DEPTH   two ranks: messages in both directions, DEPTH of them outstanding in each
 *   mpi memory SIZE             the most memory that a rank has written when each pair has exchanged a message
 *   mpi steps SIZE TIMES US     steps of a simulation with neighbours: each computes for US microseconds, divided by the
 *                               number of ranks, exchanges SIZE bytes with both neighbours, and adds up one number
 *   mpi -                       the tests in the lines of the standard input: lat SIZE TIMES, ...
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"

#define DEPTHS 64

static int rank, ranks, size, times, extra;
static char *out, *in;

static void ensure(int holds, const char *what)
{
	if (!holds) {
		fprintf(stderr, "rank %d: %s\n", rank, what);
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
}

static char *room(size_t bytes)
{
	char *at = malloc(bytes);

	ensure(at != NULL, "no memory");
	return memset(at, 0, bytes);
}

/* Ensures that the messages came from the rank `from`. */
static void check(const char *message, int from)
{
	for (int i = 0; i < size; i++)
		ensure(message[i] == from + 1, "a byte of a message is wrong");
}

static void print(const char *name, double value)
{
	if (!rank)
		printf("{\"%s\": %.4f}\n", name, value);
}

static void latency(void)
{
	double began = 0;

	for (int i = -(times / 10); i < times; i++) {
		if (!i)
			began = MPI_Wtime();
		if (!rank)
			MPI_Send(out, size, MPI_CHAR, 1, 0, MPI_COMM_WORLD);
		MPI_Recv(in, size, MPI_CHAR, !rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		if (rank)
			MPI_Send(out, size, MPI_CHAR, 0, 0, MPI_COMM_WORLD);
	}
	print("us", (MPI_Wtime() - began) * 1e6 / times / 2);
	check(in, !rank);
}

static void chain(void)
{
	int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
	double began = 0;

	for (int i = -(times / 10); i < times; i++) {
		if (!i)
			began = MPI_Wtime();
		MPI_Sendrecv(out, size, MPI_CHAR, next, 0, in, size, MPI_CHAR, previous, 0, MPI_COMM_WORLD,
			     MPI_STATUS_IGNORE);
	}
	print("us", (MPI_Wtime() - began) * 1e6 / times);
	check(in, previous);
}

/* Messages of rank 0, and of rank 1 as well if `both`. Each outstanding message has its own buffer at the receiver. */
static void bandwidth(int both)
{
	int sends = both || !rank, receives = both || rank, depth = extra;
	char *buffers = room((size_t)size * (size_t)depth), answer = 0;
	MPI_Request requests[2 * DEPTHS];
	double began, took, count;

	MPI_Barrier(MPI_COMM_WORLD);
	began = MPI_Wtime();
	for (int done = 0; done < times; done += depth) {
		int n = 0;

		for (int i = 0; i < depth && receives; i++)
			MPI_Irecv(buffers + (size_t)i * (size_t)size, size, MPI_CHAR, !rank, 0, MPI_COMM_WORLD, &requests[n++]);
		for (int i = 0; i < depth && sends; i++)
			MPI_Isend(out, size, MPI_CHAR, !rank, 0, MPI_COMM_WORLD, &requests[n++]);
		MPI_Waitall(n, requests, MPI_STATUSES_IGNORE);
	}
	if (rank)
		MPI_Send(&answer, 1, MPI_CHAR, 0, 1, MPI_COMM_WORLD);
	else
		MPI_Recv(&answer, 1, MPI_CHAR, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	took = MPI_Wtime() - began;
	count = (double)((times + depth - 1) / depth * depth) * (both ? 2 : 1);
	if (!rank)
		printf("{\"gb_s\": %.4f, \"m_s\": %.6f, \"us\": %.4f}\n", size * count / took / 1e9, count / took / 1e6,
		       took * 1e6 / count);
	for (int i = 0; i < depth && receives; i++)
		check(buffers + (size_t)i * (size_t)size, !rank);
	free(buffers);
}

/*
 * The memory of this process that was written, in units of 1,000,000 bytes. Of memory that several processes share, each is charged
 * an equal part. Linux before 6.1 reports only private memory.
 */
static double written_memory(void)
{
	FILE *file = fopen("/proc/self/smaps_rollup", "r");
	long own = -1, part = -1;
	char line[200];

	ensure(file != NULL, "/proc/self/smaps_rollup cannot be read");
	while (fgets(line, sizeof line, file)) {
		if (!strncmp(line, "Private_Dirty:", 14))
			own = strtol(line + 14, NULL, 10);
		if (!strncmp(line, "Pss_Dirty:", 10))
			part = strtol(line + 10, NULL, 10);
	}
	fclose(file);
	ensure(own >= 0, "/proc/self/smaps_rollup has no Private_Dirty");
	return (double)(part >= 0 ? part : own) * 1024 / 1e6;
}

static void memory(void)
{
	double mine, most = 0;

	for (int distance = 1; distance < ranks; distance++) {
		int to = (rank + distance) % ranks, from = (rank + ranks - distance) % ranks;

		for (int i = 0; i < times; i++)
			MPI_Sendrecv(out, size, MPI_CHAR, to, 0, in, size, MPI_CHAR, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		check(in, from);
	}
	MPI_Barrier(MPI_COMM_WORLD);
	mine = written_memory();
	MPI_Reduce(&mine, &most, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
	print("mb", most);
}

static void compute(double us)
{
	double until = MPI_Wtime() + us / 1e6;

	while (MPI_Wtime() < until)
		;
}

static void steps(void)
{
	int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
	double began = 0, took;

	for (int i = -(times / 10); i < times; i++) {
		int one = 1, all = 0;

		if (!i) {
			MPI_Barrier(MPI_COMM_WORLD);
			began = MPI_Wtime();
		}
		compute((double)extra / ranks);
		for (int way = 0; way < 2 && ranks > 1; way++) {
			int to = way ? previous : next, from = way ? next : previous;

			MPI_Sendrecv(out, size, MPI_CHAR, to, way, in, size, MPI_CHAR, from, way, MPI_COMM_WORLD,
				     MPI_STATUS_IGNORE);
		}
		MPI_Allreduce(&one, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
		ensure(all == ranks, "a sum is wrong");
	}
	took = MPI_Wtime() - began;
	if (!rank)
		printf("{\"us\": %.4f, \"steps\": %.2f}\n", took * 1e6 / times, times / took);
	if (ranks > 1)
		check(in, next);
}

static void run(int argc, char **argv)
{
	const char *test = argc > 1 ? argv[1] : "";
	int pair = !strcmp(test, "lat") || !strcmp(test, "bw") || !strcmp(test, "both");

	size = argc > 2 ? atoi(argv[2]) : 0;
	times = argc > 3 ? atoi(argv[3]) : 1;
	extra = argc > 4 ? atoi(argv[4]) : 1;
	ensure(size > 0 && times > 0 && extra >= 0, "mpi TEST SIZE [TIMES [DEPTH|US]]");
	ensure(!pair || (ranks == 2 && extra >= 1 && extra <= DEPTHS), "this test has two ranks, and a depth of 1 to 64");
	out = room((size_t)size);
	in = room((size_t)size);
	memset(out, rank + 1, (size_t)size);
	if (!strcmp(test, "lat"))
		latency();
	else if (!strcmp(test, "chain"))
		chain();
	else if (pair)
		bandwidth(!strcmp(test, "both"));
	else if (!strcmp(test, "memory"))
		memory();
	else if (!strcmp(test, "steps"))
		steps();
	else
		ensure(0, "a test is lat, chain, bw, both, memory or steps");
	free(out);
	free(in);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	char *words[MOST_WORDS] = { argv[0] };
	int count;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (argc == 2 && !strcmp(argv[1], "-"))
		while ((count = next_command(words)))
			run(count, words);
	else
		run(argc, argv);
	MPI_Finalize();
	return 0;
}
