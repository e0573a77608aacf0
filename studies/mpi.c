/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Two MPI ranks, for `anywarp study` and for the rows of the bench that also measure MPI. `lat SIZE TIMES` measures
 * half of the round-trip time of a message. `chain SIZE TIMES` measures a message of each rank to the next, both at the
 * same time. `bw SIZE TIMES DEPTH` measures messages of rank 0, DEPTH of them outstanding. Prints one line of JSON.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEPTHS 64

int main(int argc, char **argv)
{
	MPI_Request requests[DEPTHS];
	int rank, ranks, size, times, depth;
	char *buffer, answer = 0;
	double began, took;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	size = argc > 2 ? atoi(argv[2]) : 0;
	times = argc > 3 ? atoi(argv[3]) : 0;
	depth = argc > 4 ? atoi(argv[4]) : 1;
	if (ranks != 2 || size < 1 || times < 1 || depth < 1 || depth > DEPTHS) {
		fprintf(stderr, "two ranks: mpi lat SIZE TIMES | mpi chain SIZE TIMES | mpi bw SIZE TIMES DEPTH\n");
		MPI_Abort(MPI_COMM_WORLD, 2);
	}
	buffer = malloc((size_t)size);
	if (!buffer)
		MPI_Abort(MPI_COMM_WORLD, 1);
	memset(buffer, rank ? 0 : 'x', (size_t)size);
	if (!strcmp(argv[1], "chain")) {
		char *from = malloc((size_t)size);
		int warm = times / 10;

		if (!from)
			MPI_Abort(MPI_COMM_WORLD, 1);
		memset(from, 'x', (size_t)size);
		began = 0;
		for (int i = -warm; i < times; i++) {
			if (!i)
				began = MPI_Wtime();
			MPI_Sendrecv(from, size, MPI_CHAR, !rank, 0, buffer, size, MPI_CHAR, !rank, 0, MPI_COMM_WORLD,
				     MPI_STATUS_IGNORE);
		}
		took = MPI_Wtime() - began;
		free(from);
		if (!rank)
			printf("{\"us\": %.3f}\n", took * 1e6 / times);
	} else if (!strcmp(argv[1], "lat")) {
		int warm = times / 10;

		began = 0;
		for (int i = -warm; i < times; i++) {
			if (!i)
				began = MPI_Wtime();
			if (!rank)
				MPI_Send(buffer, size, MPI_CHAR, 1, 0, MPI_COMM_WORLD);
			MPI_Recv(buffer, size, MPI_CHAR, !rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			if (rank)
				MPI_Send(buffer, size, MPI_CHAR, 0, 0, MPI_COMM_WORLD);
		}
		took = MPI_Wtime() - began;
		if (!rank)
			printf("{\"us\": %.3f}\n", took * 1e6 / times / 2);
	} else {
		MPI_Barrier(MPI_COMM_WORLD);
		began = MPI_Wtime();
		for (int done = 0; done < times; done += depth) {
			for (int i = 0; i < depth; i++) {
				if (rank)
					MPI_Irecv(buffer, size, MPI_CHAR, 0, 0, MPI_COMM_WORLD, &requests[i]);
				else
					MPI_Isend(buffer, size, MPI_CHAR, 1, 0, MPI_COMM_WORLD, &requests[i]);
			}
			MPI_Waitall(depth, requests, MPI_STATUSES_IGNORE);
		}
		if (rank)
			MPI_Send(&answer, 1, MPI_CHAR, 0, 1, MPI_COMM_WORLD);
		else
			MPI_Recv(&answer, 1, MPI_CHAR, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		took = MPI_Wtime() - began;
		times = (times + depth - 1) / depth * depth;
		if (!rank)
			printf("{\"gb_s\": %.4f, \"m_s\": %.6f}\n", (double)size * times / took / 1e9, times / took / 1e6);
	}
	for (int i = 0; i < size; i++)
		if (buffer[i] != 'x') {
			fprintf(stderr, "byte %d differs from what was sent\n", i);
			MPI_Abort(MPI_COMM_WORLD, 1);
		}
	free(buffer);
	MPI_Finalize();
	return 0;
}
