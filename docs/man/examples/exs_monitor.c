/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A simulation and its monitors. The simulation sends its memory persistently, once for each monitor. Each receive of a monitor then
 * reads the current memory, without any action of the simulation's program.
 *
 *   exs_monitor simulate PORT
 *   exs_monitor watch ADDRESS PORT
 *   exs_monitor                     both, for a short time
 *
 * It also needs the mathematical functions: cc exs_monitor.c $(pkg-config --cflags --libs exs) -lm
 */
#include <arpa/inet.h>
#include <errno.h>
#include <exs.h>
#include <math.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define WIDTH 64
#define HEIGHT 12
#define MODES 5
#define STEP_US 10000

/* The memory that monitors read. It may change during a read, so a frame is used only if its two numbers are equal. */
static struct state {
	uint64_t begun;
	double string[WIDTH];
	uint64_t done;
} state;

static exs_qhandle_t queue;

static void check(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static exs_mhandle_t start(void)
{
	check(exs_init(EXS_VERSION) == 0, "exs_init");
	check((queue = exs_qcreate(256)) >= 0, "exs_qcreate");
	exs_mhandle_t memory = exs_mregister(&state, sizeof state, 0);
	check(memory >= 0, "exs_mregister");
	return memory;
}

/* Computes a frame: the shape of a plucked string. */
static void step(uint64_t frame)
{
	state.begun = frame;
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	for (int x = 0; x < WIDTH; x++) {
		state.string[x] = 0;
		for (int mode = 1; mode <= MODES; mode++)
			state.string[x] += sin(mode * M_PI * x / (WIDTH - 1)) * cos(mode * frame * 0.05) / (mode * mode);
	}
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	state.done = frame;
}

/* Writes its port to `out`, and runs until it is stopped. */
static void simulate(unsigned short port, int out)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(port) };
	socklen_t len = sizeof addr;
	exs_mhandle_t memory = start();
	int listener;

	check((listener = exs_socket(AF_INET, SOCK_SEQPACKET, 0)) >= 0, "exs_socket");
	check(exs_bind(listener, (struct sockaddr *)&addr, len) == 0, "exs_bind");
	check(exs_listen(listener, 64) == 0, "exs_listen");
	check(exs_getsockname(listener, (struct sockaddr *)&addr, &len) == 0, "exs_getsockname");
	dprintf(out, "%d\n", ntohs(addr.sin_port));
	check(exs_accept(listener, NULL, 0, queue, 0) == 0, "exs_accept");
	for (uint64_t frame = 1;; frame++) {
		struct timeval pause = { 0, STEP_US };
		exs_event_t e;

		step(frame);
		if (exs_qdequeue(queue, &e, 1, &pause) != 1)
			continue;
		if (e.exs_evt_type == EXS_EVT_ACCEPT) { /* a monitor: it may read from now on */
			if (e.exs_evt_errno == 0)
				exs_send(e.exs_evt_union.exs_evt_accept.exs_evt_newfd, &state, sizeof state, EXS_PERSISTENT, queue,
					 0, memory);
			check(exs_accept(listener, NULL, 0, queue, 0) == 0, "exs_accept");
		} else { /* the persistent send has ended: the monitor has left */
			exs_close(e.exs_evt_fd);
		}
	}
}

static void draw(void)
{
	char line[WIDTH + 1] = "";

	printf("\033[Hframe %llu\033[K\n", (unsigned long long)state.done);
	for (int y = HEIGHT; y >= -HEIGHT; y -= 2) {
		for (int x = 0; x < WIDTH; x++) {
			double at = state.string[x] * HEIGHT / 1.5;

			line[x] = at >= y - 1 && at < y + 1 ? '*' : y == 0 ? '-' : ' ';
		}
		printf("%s\n", line);
	}
	fflush(stdout);
}

/* Draws `frames` frames, or draws without end if it is 0. Returns how many of them differ from the preceding one. */
static int watch(const char *address, unsigned short port, int frames)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(port) };
	exs_mhandle_t memory = start();
	uint64_t last = 0;
	exs_event_t e;
	int fd, moved = 0;

	check(inet_pton(AF_INET, address, &addr.sin_addr) == 1, address);
	check((fd = exs_socket(AF_INET, SOCK_SEQPACKET, 0)) >= 0, "exs_socket");
	check(exs_connect(fd, (struct sockaddr *)&addr, sizeof addr, 0, queue, 0) == 0, "exs_connect");
	check(exs_qdequeue(queue, &e, 1, NULL) == 1 && (errno = e.exs_evt_errno) == 0, "connect");
	if (isatty(1))
		printf("\033[2J");
	for (int i = 0; frames == 0 || i < frames; i++) {
		do {
			check(exs_recv(fd, &state, sizeof state, 0, queue, 0, memory) == 0, "exs_recv");
			check(exs_qdequeue(queue, &e, 1, NULL) == 1 && (errno = e.exs_evt_errno) == 0, "receive");
			check(e.exs_evt_union.exs_evt_xfer.exs_evt_length == sizeof state, "the simulation has ended");
		} while (state.begun != state.done);
		moved += state.done != last;
		last = state.done;
		if (isatty(1))
			draw();
		usleep(40000);
	}
	exs_close(fd);
	return moved;
}

int main(int argc, char **argv)
{
	char port[16] = "";
	int ends[2], moved;
	pid_t child;

	if (argc == 3 && strcmp(argv[1], "simulate") == 0)
		simulate((unsigned short)atoi(argv[2]), 1);
	if (argc == 4 && strcmp(argv[1], "watch") == 0)
		return watch(argv[2], (unsigned short)atoi(argv[3]), 0) == 0;
	if (argc != 1) {
		fprintf(stderr, "usage: exs_monitor [simulate PORT | watch ADDRESS PORT]\n");
		return 2;
	}
	check(pipe(ends) == 0 && (child = fork()) >= 0, "fork");
	if (child == 0)
		simulate(0, ends[1]);
	check(read(ends[0], port, sizeof port - 1) > 0, "the simulation does not start");
	moved = watch("127.0.0.1", (unsigned short)atoi(port), 10);
	kill(child, SIGTERM);
	waitpid(child, NULL, 0);
	printf("%d frames of 10 moved\n", moved);
	return moved < 5;
}
