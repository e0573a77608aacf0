/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Measures a transport of MPI. With two ranks: half of the round-trip time of a message of 8 bytes, and the throughput
 * of messages of 1 MiB with 16 outstanding. With more ranks: the private memory that the largest rank has written after
 * each pair has exchanged 1 KiB. Prints one line, `MICROSECONDS GIGABYTES_PER_SECOND MEGABYTES`, with 0 for what was
 * not measured.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHORT = 8, LONG = 1 << 20, MEDIUM = 1024, DEPTH = 16, TIMES = 20000, BURSTS = 40 };

static int rank, ranks;

static void ensure(int holds, const char *what)
{
	if (!holds) {
		fprintf(stderr, "rank %d: %s\n", rank, what);
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
}

static double latency(void)
{
	long long sent = 0, got = 0;
	double began = 0;

	for (int i = -TIMES / 10; i < TIMES; i++) {
		if (i == 0)
			began = MPI_Wtime();
		sent = i;
		if (!rank)
			MPI_Send(&sent, SHORT, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
		MPI_Recv(&got, SHORT, MPI_BYTE, !rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		ensure(got == i, "a short message");
		if (rank)
			MPI_Send(&got, SHORT, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
	}
	return (MPI_Wtime() - began) * 1e6 / TIMES / 2;
}

static double rate(void)
{
	static unsigned char buffer[DEPTH][LONG];
	MPI_Request requests[DEPTH];
	double began = 0;
	char answer = 0;

	for (int burst = -4; burst < BURSTS; burst++) {
		if (burst == 0) {
			MPI_Barrier(MPI_COMM_WORLD);
			began = MPI_Wtime();
		}
		for (int i = 0; i < DEPTH; i++) {
			if (rank) {
				MPI_Irecv(buffer[i], LONG, MPI_BYTE, 0, i, MPI_COMM_WORLD, &requests[i]);
			} else {
				buffer[i][LONG - 1] = (unsigned char)(burst * 3 + i);
				MPI_Isend(buffer[i], LONG, MPI_BYTE, 1, i, MPI_COMM_WORLD, &requests[i]);
			}
		}
		MPI_Waitall(DEPTH, requests, MPI_STATUSES_IGNORE);
		for (int i = 0; i < DEPTH; i++)
			ensure(buffer[i][LONG - 1] == (unsigned char)(burst * 3 + i), "a long message");
	}
	if (rank)
		MPI_Send(&answer, 1, MPI_CHAR, 0, 1, MPI_COMM_WORLD);
	else
		MPI_Recv(&answer, 1, MPI_CHAR, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	return (double)LONG * DEPTH * BURSTS / (MPI_Wtime() - began) / 1e9;
}

/* The private memory that this process has written, in megabytes of 1,000,000 bytes. */
static double memory(void)
{
	FILE *file = fopen("/proc/self/smaps_rollup", "r");
	char line[200];
	long kib = -1;

	ensure(file != NULL, "smaps_rollup");
	while (fgets(line, sizeof line, file))
		if (!strncmp(line, "Private_Dirty:", 14))
			kib = strtol(line + 14, NULL, 10);
	fclose(file);
	ensure(kib >= 0, "smaps_rollup has no Private_Dirty");
	return (double)kib * 1024 / 1e6;
}

static double exchange(void)
{
	static unsigned char out[MEDIUM], in[MEDIUM];
	double mine, most = 0;

	for (int distance = 1; distance < ranks; distance++) {
		int to = (rank + distance) % ranks, from = (rank + ranks - distance) % ranks;

		memset(out, rank + 1, sizeof out);
		MPI_Sendrecv(out, MEDIUM, MPI_BYTE, to, 0, in, MEDIUM, MPI_BYTE, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		ensure(in[0] == from + 1 && in[MEDIUM - 1] == from + 1, "a message of 1 KiB");
	}
	MPI_Barrier(MPI_COMM_WORLD);
	mine = memory();
	MPI_Reduce(&mine, &most, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
	return most;
}

int main(int argc, char **argv)
{
	double us = 0, gb = 0, mb = 0;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	ensure(ranks > 1, "at least 2 ranks");
	if (argc > 1 && !strcmp(argv[1], "memory")) {
		mb = exchange();
	} else {
		ensure(ranks == 2, "2 ranks, or the argument `memory`");
		us = latency();
		gb = rate();
	}
	if (!rank)
		printf("%.2f %.3f %.1f\n", us, gb, mb);
	MPI_Finalize();
	return 0;
}
