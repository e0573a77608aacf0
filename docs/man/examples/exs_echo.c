/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* An echo server and its client on extended sockets, in one program with one event queue. */
#include <arpa/inet.h>
#include <exs.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static exs_qhandle_t queue;

static void check(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

int main(void)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof addr;
	static char out[100], echo[100], back[100];
	int server, client, echoed = 0;
	exs_event_t e;

	check(exs_init(EXS_VERSION) == 0, "exs_init");
	check((queue = exs_qcreate(16)) >= 0, "exs_qcreate");
	check((server = exs_socket(AF_INET, SOCK_SEQPACKET, 0)) >= 0, "exs_socket");
	check(exs_bind(server, (struct sockaddr *)&addr, len) == 0, "exs_bind");
	check(exs_listen(server, 1) == 0, "exs_listen");
	check(exs_getsockname(server, (struct sockaddr *)&addr, &len) == 0, "exs_getsockname");
	check(exs_accept(server, NULL, 0, queue, 0) == 0, "exs_accept");
	check((client = exs_socket(AF_INET, SOCK_SEQPACKET, 0)) >= 0, "exs_socket");
	check(exs_connect(client, (struct sockaddr *)&addr, len, 0, queue, 0) == 0, "exs_connect");
	while (!echoed) {
		struct timeval wait = { 10, 0 };

		check(exs_qdequeue(queue, &e, 1, &wait) == 1 && e.exs_evt_errno == 0, "exs_qdequeue");
		size_t length = e.exs_evt_union.exs_evt_xfer.exs_evt_length;
		switch (e.exs_evt_type) {
		case EXS_EVT_CONNECT: /* the client: sends, and receives what comes back */
			strcpy(out, "hello");
			check(exs_recv(client, back, 100, 0, queue, 0, EXS_MHANDLE_UNREGISTERED) == 0, "exs_recv");
			check(exs_send(client, out, 6, 0, queue, 0, EXS_MHANDLE_UNREGISTERED) == 0, "exs_send");
			break;
		case EXS_EVT_ACCEPT: /* the server: receives */
			check(exs_recv(e.exs_evt_union.exs_evt_accept.exs_evt_newfd, echo, 100, 0, queue, 1,
				       EXS_MHANDLE_UNREGISTERED) == 0, "exs_recv");
			break;
		case EXS_EVT_RECV: /* the server sends back what it received; the client prints it */
			if (e.exs_evt_ahandle == 1)
				check(exs_send(e.exs_evt_fd, echo, length, 0, queue, 1, EXS_MHANDLE_UNREGISTERED) == 0, "exs_send");
			else
				echoed = printf("%s\n", back);
			break;
		}
	}
	return strcmp(back, "hello") != 0;
}
