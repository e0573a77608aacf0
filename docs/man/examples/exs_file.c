/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Sends a file. The receiver reads it from the page cache of the sender.
 *
 *   exs_file receive FILE PORT
 *   exs_file send FILE ADDRESS PORT
 *   exs_file                          sends the program itself, and compares it
 */
#include <arpa/inet.h>
#include <errno.h>
#include <exs.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PART (1 << 20)
#define PARTS 4 /* in progress at once */

static exs_qhandle_t queue;

static void check(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

/* Dequeues the next event, which must not be an error. Returns its length. */
static size_t event(exs_event_t *e, const char *what)
{
	check(exs_qdequeue(queue, e, 1, NULL) == 1 && (errno = e->exs_evt_errno) == 0, what);
	return e->exs_evt_union.exs_evt_xfer.exs_evt_length;
}

static void send_file(const char *name, const char *address, unsigned short port)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(port) };
	exs_fdvec_t part[PARTS];
	exs_xferfile_t call[PARTS];
	struct stat status;
	off_t at = 0;
	int fd, pending = 0, file = open(name, O_RDONLY);
	exs_event_t e;

	check(file >= 0 && fstat(file, &status) == 0, name);
	check(inet_pton(AF_INET, address, &addr.sin_addr) == 1, address);
	check((fd = exs_socket(AF_INET, SOCK_STREAM, 0)) >= 0, "exs_socket");
	check(exs_connect(fd, (struct sockaddr *)&addr, sizeof addr, 0, queue, 0) == 0, "exs_connect");
	event(&e, "connect");
	for (int slot = 0; at < status.st_size || pending > 0;) {
		if (at < status.st_size && pending < PARTS) {
			off_t left = status.st_size - at;

			part[slot] = (exs_fdvec_t){ .xv_kind = EXS_FDVEC, .xv_fd = file, .xv_offset = at };
			part[slot].xv_iov.iov_len = left < PART ? (size_t)left : PART;
			call[slot] = (exs_xferfile_t){ &part[slot], 1 };
			check(exs_sendfile(fd, &call[slot], 0, queue, slot) == 0, "exs_sendfile");
			at += (off_t)part[slot].xv_iov.iov_len;
			slot = (slot + 1) % PARTS;
			pending++;
		} else { /* the events are in the order of the calls */
			event(&e, "send");
			pending--;
		}
	}
	check(exs_shutdown(fd, EXS_SHUT_WR, queue, 0) == 0, "exs_shutdown");
	event(&e, "shutdown");
	exs_close(fd);
	close(file);
}

/* Receives a file. Writes the port of the listener to `out`. */
static void receive_file(const char *name, unsigned short port, int out)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(port) };
	socklen_t len = sizeof addr;
	char *block = malloc((size_t)PARTS * PART);
	int listener, fd, file = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644);
	exs_mhandle_t memory;
	exs_event_t e;
	size_t n;

	check(file >= 0, name);
	check(block && (memory = exs_mregister(block, (size_t)PARTS * PART, 0)) >= 0, "exs_mregister");
	check((listener = exs_socket(AF_INET, SOCK_STREAM, 0)) >= 0, "exs_socket");
	check(exs_bind(listener, (struct sockaddr *)&addr, len) == 0, "exs_bind");
	check(exs_listen(listener, 1) == 0, "exs_listen");
	check(exs_getsockname(listener, (struct sockaddr *)&addr, &len) == 0, "exs_getsockname");
	dprintf(out, "%d\n", ntohs(addr.sin_port));
	check(exs_accept(listener, NULL, 0, queue, 0) == 0, "exs_accept");
	event(&e, "accept");
	fd = e.exs_evt_union.exs_evt_accept.exs_evt_newfd;
	for (int slot = 0; slot < PARTS; slot++)
		check(exs_recv(fd, block + slot * PART, PART, 0, queue, slot, memory) == 0, "exs_recv");
	while ((n = event(&e, "receive")) > 0) {
		char *at = block + e.exs_evt_ahandle * PART;

		check(write(file, at, n) == (ssize_t)n, name);
		check(exs_recv(fd, at, PART, 0, queue, e.exs_evt_ahandle, memory) == 0, "exs_recv");
	}
	check(close(file) == 0, name);
	exs_close(fd);
	exs_close(listener);
}

static void start(void)
{
	check(exs_init(EXS_VERSION) == 0, "exs_init");
	check((queue = exs_qcreate(64)) >= 0, "exs_qcreate");
}

int main(int argc, char **argv)
{
	char name[] = "/tmp/exs_file.XXXXXX", command[100], port[16] = "";
	int ends[2], status;
	pid_t child;

	if (argc == 4 && strcmp(argv[1], "receive") == 0) {
		start();
		receive_file(argv[2], (unsigned short)atoi(argv[3]), 1);
		return 0;
	}
	if (argc == 5 && strcmp(argv[1], "send") == 0) {
		start();
		send_file(argv[2], argv[3], (unsigned short)atoi(argv[4]));
		return 0;
	}
	if (argc != 1) {
		fprintf(stderr, "usage: exs_file [receive FILE PORT | send FILE ADDRESS PORT]\n");
		return 2;
	}
	check(mkstemp(name) >= 0 && pipe(ends) == 0 && (child = fork()) >= 0, "fork");
	start();
	if (child == 0) {
		receive_file(name, 0, ends[1]);
		_exit(0);
	}
	check(read(ends[0], port, sizeof port - 1) > 0, "the receiver does not start");
	send_file("/proc/self/exe", "127.0.0.1", (unsigned short)atoi(port));
	check(waitpid(child, &status, 0) == child && status == 0, "the receiver");
	snprintf(command, sizeof command, "cmp %s /proc/%d/exe", name, getpid());
	status = system(command);
	unlink(name);
	return status != 0;
}
