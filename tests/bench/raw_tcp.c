// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * What plain TCP does on this machine, to compare with: a ping-pong in which both ends spin, and a stream.
 *
 *   raw_tcp lat BYTES ROUNDS     prints the median one-way time in microseconds
 *   raw_tcp bw BYTES MESSAGES    prints the rate in 2^20 bytes a second, as perftest does
 *
 * Two processes on loopback, TCP_NODELAY, the system's congestion control.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

/* Receives `size` bytes; with `spin` without ever sleeping. */
static void get(int fd, char *to, size_t size, int spin)
{
	size_t have = 0;

	while (have < size) {
		ssize_t n = recv(fd, to + have, size - have, spin ? MSG_DONTWAIT : 0);

		if (n > 0)
			have += (size_t)n;
		else if (n == 0 || (errno != EAGAIN && errno != EINTR))
			die("recv");
	}
}

static void put(int fd, const char *from, size_t size)
{
	size_t sent = 0;

	while (sent < size) {
		ssize_t n = send(fd, from + sent, size - sent, MSG_NOSIGNAL);

		if (n > 0)
			sent += (size_t)n;
		else if (errno != EAGAIN && errno != EINTR)
			die("send");
	}
}

static int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof(at);
	int one = 1, listener, fd, status, lat;
	size_t size, rounds;
	double begin, took, *times;
	char *buffer;
	pid_t child;

	if (argc != 4 || (strcmp(argv[1], "lat") && strcmp(argv[1], "bw"))) {
		fprintf(stderr, "usage: raw_tcp lat|bw BYTES ROUNDS\n");
		return 2;
	}
	lat = !strcmp(argv[1], "lat");
	size = strtoul(argv[2], NULL, 10);
	rounds = strtoul(argv[3], NULL, 10);
	buffer = malloc(size);
	times = calloc(rounds, sizeof(*times));
	if (!buffer || !times || !size || !rounds)
		return 2;
	memset(buffer, 7, size);
	listener = socket(AF_INET, SOCK_STREAM, 0);
	if (listener < 0 || bind(listener, (struct sockaddr *)&at, sizeof(at)) || listen(listener, 1))
		die("listen");
	getsockname(listener, (struct sockaddr *)&at, &len);
	child = fork();
	if (child < 0)
		die("fork");
	if (child == 0) {
		fd = accept(listener, NULL, NULL);
		if (fd < 0)
			die("accept");
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		for (size_t i = 0; i < rounds; i++) {
			get(fd, buffer, size, lat);
			if (lat)
				put(fd, buffer, size);
		}
		if (!lat)
			put(fd, "e", 1);
		_exit(0);
	}
	fd = socket(AF_INET, SOCK_STREAM, 0);
	if (fd < 0 || connect(fd, (struct sockaddr *)&at, sizeof(at)))
		die("connect");
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	begin = now();
	for (size_t i = 0; i < rounds; i++) {
		double start = now();

		put(fd, buffer, size);
		if (lat)
			get(fd, buffer, size, 1);
		times[i] = now() - start;
	}
	if (!lat)
		get(fd, buffer, 1, 0);
	took = now() - begin;
	qsort(times, rounds, sizeof(*times), by_size);
	if (lat)
		printf("%.3f\n", times[rounds / 2] / 2 * 1e6);
	else
		printf("%.1f\n", (double)size * (double)rounds / took / 1048576);
	waitpid(child, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
