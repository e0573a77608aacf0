/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Commands for an MPI program. The program runs several commands, one after the other, because starting its ranks takes
 * longer than most commands. Rank 0 reads a command from each line of its standard input.
 */
#ifndef COMMANDS_H
#define COMMANDS_H

#include <mpi.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MOST_WORDS = 8, MOST_CHARACTERS = 256, PAUSE_US = 10000, COMMAND_TAG = 4711 };

/*
 * Waits for the next command. Stores its words after words[0], which is not changed. Returns the number of words, including
 * words[0], or 0 at the end of the input or for an empty line.
 */
static inline int next_command(char **words)
{
	static char line[MOST_CHARACTERS];
	int rank, ranks, here = 0, count = 1;

	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (!rank) {
		if (!fgets(line, sizeof line, stdin))
			line[0] = 0;
		for (int r = 1; r < ranks; r++)
			MPI_Send(line, sizeof line, MPI_CHAR, r, COMMAND_TAG, MPI_COMM_WORLD);
	} else {
		/* MPI_Recv would poll, and so take processor time from the programs that are measured meanwhile. */
		while (MPI_Iprobe(0, COMMAND_TAG, MPI_COMM_WORLD, &here, MPI_STATUS_IGNORE), !here)
			usleep(PAUSE_US);
		MPI_Recv(line, sizeof line, MPI_CHAR, 0, COMMAND_TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	}
	for (char *word = strtok(line, " \n"); word && count < MOST_WORDS; word = strtok(NULL, " \n"))
		words[count++] = word;
	return count > 1 ? count : 0;
}

#endif
