/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A port of rdma_cm is independent of the kernel's port of the same number. Plain sockets and RDMA listeners have the
 * same number, in either order, in one process and in two. Each client reaches its server, and a plain service gets no
 * RDMA traffic.
 */
#include "ends.h"

#include <netinet/in.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <sys/socket.h>
#include <sys/syscall.h>

/* ---------------------------------------------------------------- plain sockets */

static int close_fd(void *p)
{
	return close((int)(intptr_t)p);
}

static struct sockaddr_in at(uint16_t port)
{
	return (struct sockaddr_in){
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
}

static const char *new_plain(int *fd, int kind)
{
	*fd = socket(AF_INET, kind | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	ENSURE(*fd >= 0, "socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)*fd, "plain socket");
	return NULL;
}

static const char *bind_plain(int fd, uint16_t port, bool reuse)
{
	struct sockaddr_in name = at(port);
	int on = reuse;

	ENSURE(!setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), "SO_REUSEADDR: %s", strerror(errno));
	ENSURE(!bind(fd, (struct sockaddr *)&name, sizeof name), "bind of a plain socket to %u: %s", port, strerror(errno));
	return NULL;
}

static const char *plain_listener(int *fd, uint16_t port)
{
	TRY(new_plain(fd, SOCK_STREAM));
	TRY(bind_plain(*fd, port, false));
	ENSURE(!listen(*fd, 8), "listen of a plain socket: %s", strerror(errno));
	return NULL;
}

static uint16_t port_of(int fd)
{
	struct sockaddr_in name;
	socklen_t len = sizeof name;

	return getsockname(fd, (struct sockaddr *)&name, &len) ? 0 : ntohs(name.sin_port);
}

/* A plain client reaches the plain listener, which has no other connection. */
static const char *plain_works(int listener, uint16_t port)
{
	struct sockaddr_in name = at(port);
	int client, server;
	char byte;

	ENSURE(accept(listener, NULL, NULL) < 0 && errno == EAGAIN, "a plain listener has a connection that no plain client made");
	client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(client >= 0, "socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)client, "plain client");
	ENSURE(!connect(client, (struct sockaddr *)&name, sizeof name), "connect of a plain client: %s", strerror(errno));
	TRY(readable(listener, WAIT_MS));
	server = accept(listener, NULL, NULL);
	ENSURE(server >= 0, "accept: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)server, "plain server");
	ENSURE(write(client, "p", 1) == 1, "write: %s", strerror(errno));
	TRY(readable(server, WAIT_MS));
	ENSURE(read(server, &byte, 1) == 1 && byte == 'p', "the plain server reads other data");
	return NULL;
}

/* ---------------------------------------------------------------- rdma_cm */

static int close_event_channel(void *p)
{
	rdma_destroy_event_channel(p);
	return 0;
}

static int close_id(void *p)
{
	struct rdma_cm_id *id = p;

	if (id->qp)
		rdma_destroy_qp(id);
	return rdma_destroy_id(id) ? errno : 0;
}

struct fixture {
	struct rdma_event_channel *servers, *clients;
	struct rdma_cm_id *listener;
	enum rdma_port_space space;
	uint16_t port;
};

static const char *open_fixture(struct fixture *s, enum rdma_port_space space)
{
	*s = (struct fixture){ .space = space };
	s->servers = rdma_create_event_channel();
	ENSURE(s->servers, "rdma_create_event_channel: %s", strerror(errno));
	keep(close_event_channel, s->servers, "event channel");
	s->clients = rdma_create_event_channel();
	ENSURE(s->clients, "rdma_create_event_channel: %s", strerror(errno));
	keep(close_event_channel, s->clients, "event channel");
	return NULL;
}

static const char *bind_rdma(struct fixture *s, uint16_t port)
{
	struct sockaddr_in name = at(port);

	ENSURE(!rdma_create_id(s->servers, &s->listener, NULL, s->space), "rdma_create_id: %s", strerror(errno));
	keep(close_id, s->listener, "listening id");
	ENSURE(!rdma_bind_addr(s->listener, (struct sockaddr *)&name), "rdma_bind_addr to %u: %s", port, strerror(errno));
	s->port = ntohs(rdma_get_src_port(s->listener));
	ENSURE(s->port && (!port || s->port == port), "bound to port %u, not %u", s->port, port);
	return NULL;
}

static const char *listen_rdma(struct fixture *s, uint16_t port)
{
	TRY(bind_rdma(s, port));
	ENSURE(!rdma_listen(s->listener, 8), "rdma_listen on %u: %s", port, strerror(errno));
	return NULL;
}

static const char *event(struct rdma_event_channel *channel, enum rdma_cm_event_type type, struct rdma_cm_id **id,
			 int *status)
{
	struct rdma_cm_event *e;
	enum rdma_cm_event_type got;
	int code;

	TRY(readable(channel->fd, WAIT_MS));
	ENSURE(!rdma_get_cm_event(channel, &e), "rdma_get_cm_event: %s", strerror(errno));
	got = e->event;
	code = e->status;
	if (id)
		*id = e->id;
	if (status)
		*status = code;
	ENSURE(!rdma_ack_cm_event(e), "rdma_ack_cm_event: %s", strerror(errno));
	ENSURE(got == type, "event %s (status %d), expected %s", rdma_event_str(got), code, rdma_event_str(type));
	return NULL;
}

static const char *give_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = {
		.qp_type = id->ps == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC,
		.sq_sig_all = 1,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	ENSURE(!rdma_create_qp(id, NULL, &init), "rdma_create_qp: %s", strerror(errno));
	return NULL;
}

static const struct rdma_conn_param plainest = { .responder_resources = 1, .initiator_depth = 1, .retry_count = 7 };

static const char *start_connect(struct fixture *s, struct rdma_cm_id **client)
{
	struct sockaddr_in name = at(s->port);
	struct rdma_conn_param p = plainest;

	ENSURE(!rdma_create_id(s->clients, client, NULL, s->space), "rdma_create_id: %s", strerror(errno));
	keep(close_id, *client, "client id");
	ENSURE(!rdma_resolve_addr(*client, NULL, (struct sockaddr *)&name, 2000), "rdma_resolve_addr: %s", strerror(errno));
	TRY(event(s->clients, RDMA_CM_EVENT_ADDR_RESOLVED, NULL, NULL));
	ENSURE(!rdma_resolve_route(*client, 2000), "rdma_resolve_route: %s", strerror(errno));
	TRY(event(s->clients, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL, NULL));
	TRY(give_qp(*client));
	ENSURE(!rdma_connect(*client, &p), "rdma_connect: %s", strerror(errno));
	return NULL;
}

static const char *accept_rdma(struct fixture *s)
{
	struct rdma_conn_param p = plainest;
	struct rdma_cm_id *server;

	TRY(event(s->servers, RDMA_CM_EVENT_CONNECT_REQUEST, &server, NULL));
	keep(close_id, server, "accepted id");
	TRY(give_qp(server));
	if (s->space == RDMA_PS_UDP)
		p.qp_num = server->qp->qp_num;
	ENSURE(!rdma_accept(server, &p), "rdma_accept: %s", strerror(errno));
	if (s->space == RDMA_PS_UDP)
		return NULL;
	ENSURE(ntohs(rdma_get_src_port(server)) == s->port, "the server's end has port %u, not %u",
	       ntohs(rdma_get_src_port(server)), s->port);
	return event(s->servers, RDMA_CM_EVENT_ESTABLISHED, NULL, NULL);
}

/* An RDMA client reaches the listener, and both ends report the port that the program chose. */
static const char *rdma_works(struct fixture *s)
{
	struct rdma_cm_id *client;

	TRY(start_connect(s, &client));
	TRY(accept_rdma(s));
	TRY(event(s->clients, RDMA_CM_EVENT_ESTABLISHED, NULL, NULL));
	ENSURE(ntohs(rdma_get_dst_port(client)) == s->port, "the client's peer has port %u, not %u",
	       ntohs(rdma_get_dst_port(client)), s->port);
	return NULL;
}

/* ---------------------------------------------------------------- one process */

static const char *plain_then_rdma(size_t arg)
{
	struct fixture s;
	int plain;

	(void)arg;
	TRY(plain_listener(&plain, 0));
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, port_of(plain)));
	TRY(rdma_works(&s));
	return plain_works(plain, s.port);
}

static const char *rdma_then_plain(size_t arg)
{
	struct fixture s;
	int plain;

	(void)arg;
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, 0));
	TRY(plain_listener(&plain, s.port));
	TRY(rdma_works(&s));
	return plain_works(plain, s.port);
}

/* Connections to the listener's TCP port continue, and do not prevent a plain socket from taking the port. */
static const char *plain_after_connections(size_t arg)
{
	struct fixture s;
	int plain;

	(void)arg;
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, 0));
	TRY(rdma_works(&s));
	TRY(plain_listener(&plain, s.port));
	TRY(rdma_works(&s));
	return plain_works(plain, s.port);
}

/* A plain socket with SO_REUSEADDR and an RDMA id are bound to one port before either of them listens. */
static const char *both_bound(size_t rdma_first)
{
	struct fixture s;
	int plain;

	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(bind_rdma(&s, 0));
	TRY(new_plain(&plain, SOCK_STREAM));
	TRY(bind_plain(plain, s.port, true));
	if (!rdma_first)
		ENSURE(!listen(plain, 8), "listen: %s", strerror(errno));
	ENSURE(!rdma_listen(s.listener, 8), "rdma_listen: %s", strerror(errno));
	if (rdma_first)
		ENSURE(!listen(plain, 8), "listen: %s", strerror(errno));
	TRY(rdma_works(&s));
	return plain_works(plain, s.port);
}

/* The listener is bound to one address, the plain socket to all addresses. */
static const char *plain_on_every_address(size_t family)
{
	struct sockaddr_in6 any6 = { .sin6_family = AF_INET6 };
	struct sockaddr_in any = { .sin_family = AF_INET };
	struct fixture s;
	int plain, rc;

	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, 0));
	plain = socket((int)family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	ENSURE(plain >= 0, "socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)plain, "plain socket");
	any.sin_port = any6.sin6_port = htons(s.port);
	rc = family == AF_INET ? bind(plain, (struct sockaddr *)&any, sizeof any)
			       : bind(plain, (struct sockaddr *)&any6, sizeof any6);
	ENSURE(!rc, "bind: %s", strerror(errno));
	ENSURE(!listen(plain, 8), "listen: %s", strerror(errno));
	TRY(rdma_works(&s));
	return plain_works(plain, s.port);
}

/* A second plain socket cannot bind the port of the first. */
static const char *plain_ports_are_taken(size_t arg)
{
	struct sockaddr_in name;
	struct fixture s;
	int plain, second;

	(void)arg;
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, 0));
	TRY(plain_listener(&plain, s.port));
	TRY(new_plain(&second, SOCK_STREAM));
	name = at(s.port);
	ENSURE(bind(second, (struct sockaddr *)&name, sizeof name) && errno == EADDRINUSE, "a second plain socket is bound");
	return NULL;
}

/* A second RDMA listener cannot bind the port of the first. */
static const char *rdma_ports_are_taken(size_t space)
{
	struct sockaddr_in name;
	struct rdma_cm_id *second;
	struct fixture s;

	TRY(open_fixture(&s, (enum rdma_port_space)space));
	TRY(listen_rdma(&s, 0));
	name = at(s.port);
	ENSURE(!rdma_create_id(s.servers, &second, NULL, s.space), "rdma_create_id: %s", strerror(errno));
	keep(close_id, second, "second id");
	ENSURE(rdma_bind_addr(second, (struct sockaddr *)&name) && errno == EADDRINUSE, "a second id is bound to the port");
	/* The port is free when the first listener is destroyed. */
	ENSURE(!close_now(s.listener), "rdma_destroy_id: %s", strerror(errno));
	ENSURE(!rdma_bind_addr(second, (struct sockaddr *)&name), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(!rdma_listen(second, 8), "rdma_listen: %s", strerror(errno));
	s.listener = second;
	return rdma_works(&s);
}

/*
 * Two ids with RDMA_OPTION_ID_REUSEADDR share a port. One can listen, and the other can after the first was destroyed.
 */
static const char *shared_by_option(size_t chosen)
{
	struct rdma_cm_id *id[2];
	struct sockaddr_in name = at((uint16_t)chosen);
	struct fixture s;
	int on = 1, plain;

	TRY(open_fixture(&s, RDMA_PS_TCP));
	for (int i = 0; i < 2; i++) {
		ENSURE(!rdma_create_id(s.servers, &id[i], NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
		keep(close_id, id[i], "id");
		ENSURE(!rdma_set_option(id[i], RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, sizeof on),
		       "rdma_set_option: %s", strerror(errno));
		ENSURE(!rdma_bind_addr(id[i], (struct sockaddr *)&name), "rdma_bind_addr: %s", strerror(errno));
		name = at(ntohs(rdma_get_src_port(id[i])));
	}
	ENSURE(!rdma_listen(id[0], 8), "rdma_listen: %s", strerror(errno));
	ENSURE(rdma_listen(id[1], 8) && errno == EADDRINUSE, "two listeners have one port");
	s.listener = id[0];
	s.port = ntohs(name.sin_port);
	TRY(rdma_works(&s));
	ENSURE(!close_now(id[0]), "rdma_destroy_id: %s", strerror(errno));
	ENSURE(!rdma_listen(id[1], 8), "rdma_listen again: %s", strerror(errno));
	s.listener = id[1];
	TRY(rdma_works(&s));
	/*
	 * A peer finds a listener by its signpost, a UDP socket that names the listener's TCP port (docs/ports.md). A peer
	 * without signposts finds the listener at the TCP port with the number of the RDMA port.
	 */
	plain = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(plain >= 0, "socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)plain, "plain client");
	ENSURE(!connect(plain, (struct sockaddr *)&name, sizeof name), "the listener is not at TCP port %u: %s", s.port,
	       strerror(errno));
	return NULL;
}

/* A plain socket with SO_REUSEPORT does not share the TCP port with the listener, because the listener moves to another TCP port. */
static const char *reuseport(size_t arg)
{
	struct fixture s;
	int plain, on = 1;

	(void)arg;
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, 0));
	TRY(new_plain(&plain, SOCK_STREAM));
	ENSURE(!setsockopt(plain, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on), "SO_REUSEPORT: %s", strerror(errno));
	TRY(bind_plain(plain, s.port, false));
	ENSURE(!listen(plain, 8), "listen: %s", strerror(errno));
	TRY(rdma_works(&s));
	return plain_works(plain, s.port);
}

enum { RACERS = 8, ROUNDS = 20 };

struct racer {
	struct rdma_cm_id *id;
	pthread_barrier_t *start;
	uint16_t port;
	int error;
};

static void *race(void *p)
{
	struct racer *r = p;
	struct sockaddr_in name = at(r->port);

	pthread_barrier_wait(r->start);
	r->error = rdma_bind_addr(r->id, (struct sockaddr *)&name) ? errno : 0;
	return NULL;
}

/* If threads bind one number at the same time, one of them succeeds. */
static const char *bind_race(size_t space)
{
	struct racer racers[RACERS];
	pthread_t threads[RACERS];
	pthread_barrier_t start;
	struct fixture s;

	TRY(open_fixture(&s, (enum rdma_port_space)space));
	ENSURE(!pthread_barrier_init(&start, NULL, RACERS), "pthread_barrier_init");
	for (int round = 0; round < ROUNDS; round++) {
		int won = 0;

		TRY(bind_rdma(&s, 0));
		ENSURE(!close_now(s.listener), "rdma_destroy_id: %s", strerror(errno));
		for (int i = 0; i < RACERS; i++) {
			racers[i] = (struct racer){ .start = &start, .port = s.port };
			ENSURE(!rdma_create_id(s.servers, &racers[i].id, NULL, s.space), "rdma_create_id: %s", strerror(errno));
			keep(close_id, racers[i].id, "racer");
			ENSURE(!pthread_create(&threads[i], NULL, race, &racers[i]), "pthread_create");
		}
		for (int i = 0; i < RACERS; i++)
			ENSURE(!pthread_join(threads[i], NULL), "pthread_join");
		for (int i = 0; i < RACERS; i++) {
			ENSURE(!racers[i].error || racers[i].error == EADDRINUSE, "rdma_bind_addr: %s", strerror(racers[i].error));
			won += !racers[i].error;
			ENSURE(!close_now(racers[i].id), "rdma_destroy_id: %s", strerror(errno));
		}
		ENSURE(won == 1, "%d ids have one port in round %d", won, round);
	}
	return NULL;
}

static struct rdma_cm_id *many[1000];

static int close_many(void *p)
{
	int failed = 0;

	(void)p;
	for (size_t i = 0; i < COUNT(many) && many[i]; i++) {
		failed |= rdma_destroy_id(many[i]);
		many[i] = NULL;
	}
	return failed;
}

/* Among many listeners some have their signposts at the second candidate port. Ten of them are found within a second each. */
static const char *many_listeners(size_t n)
{
	static uint16_t ports[COUNT(many)];
	struct sockaddr_in name;
	struct fixture s;

	TRY(open_fixture(&s, RDMA_PS_TCP));
	keep(close_many, many, "many listeners");
	for (size_t i = 0; i < n; i++) {
		name = at(0);
		ENSURE(!rdma_create_id(s.servers, &many[i], NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
		ENSURE(!rdma_bind_addr(many[i], (struct sockaddr *)&name), "rdma_bind_addr: %s", strerror(errno));
		ENSURE(!rdma_listen(many[i], 8), "rdma_listen: %s", strerror(errno));
		ports[i] = ntohs(rdma_get_src_port(many[i]));
	}
	for (size_t i = 0; i < n; i += n / 10) {
		uint64_t since = now_ms();

		s.port = ports[i];
		TRY(rdma_works(&s));
		ENSURE(now_ms() - since < 1000, "connecting takes %u ms", (unsigned int)(now_ms() - since));
	}
	return NULL;
}

/* ---------------------------------------------------------------- datagrams */

static const char *udp_both(size_t rdma_first)
{
	struct sockaddr_in name;
	struct fixture s;
	char bytes[64];
	int plain;

	TRY(open_fixture(&s, RDMA_PS_UDP));
	TRY(new_plain(&plain, SOCK_DGRAM));
	if (rdma_first) {
		TRY(listen_rdma(&s, 0));
		TRY(bind_plain(plain, s.port, false));
	} else {
		TRY(bind_plain(plain, 0, false));
		TRY(listen_rdma(&s, port_of(plain)));
	}
	TRY(rdma_works(&s));
	ENSURE(recv(plain, bytes, sizeof bytes, 0) < 0 && errno == EAGAIN, "the plain socket receives a datagram for RDMA");
	name = at(s.port);
	ENSURE(sendto(plain, "p", 1, 0, (struct sockaddr *)&name, sizeof name) == 1, "sendto: %s", strerror(errno));
	ENSURE(recv(plain, bytes, sizeof bytes, 0) == 1, "recv: %s", strerror(errno));
	return NULL;
}

/* Each port space has its own port numbers. */
static const char *spaces_are_apart(size_t arg)
{
	struct fixture tcp, udp;
	int stream, datagram;

	(void)arg;
	TRY(open_fixture(&tcp, RDMA_PS_TCP));
	TRY(open_fixture(&udp, RDMA_PS_UDP));
	TRY(listen_rdma(&tcp, 0));
	TRY(listen_rdma(&udp, tcp.port));
	TRY(plain_listener(&stream, tcp.port));
	TRY(new_plain(&datagram, SOCK_DGRAM));
	TRY(bind_plain(datagram, tcp.port, false));
	TRY(rdma_works(&tcp));
	TRY(rdma_works(&udp));
	return plain_works(stream, tcp.port);
}

/* ---------------------------------------------------------------- two processes */

struct helper {
	pid_t pid;
	int to, from;
};

static int end_helper(void *p)
{
	struct helper *h = p;
	int status;

	close(h->to);
	close(h->from);
	if (waitpid(h->pid, &status, 0) != h->pid || !WIFEXITED(status) || WEXITSTATUS(status)) {
		errno = ECHILD;
		return -1;
	}
	return 0;
}

/* The other process binds a port, plainly or with rdma_cm, and serves one client for each request. */
static const char *help(int from, int to, bool rdma)
{
	uint16_t port;
	struct fixture s;
	int plain = -1;
	char what;

	ENSURE(read(from, &port, sizeof port) == sizeof port, "the other process does not tell its port");
	if (rdma) {
		TRY(open_fixture(&s, RDMA_PS_TCP));
		TRY(listen_rdma(&s, port));
		port = s.port;
	} else {
		TRY(plain_listener(&plain, port));
		port = port_of(plain);
	}
	ENSURE(write(to, &port, sizeof port) == sizeof port, "write: %s", strerror(errno));
	while (read(from, &what, 1) == 1) {
		TRY(rdma ? accept_rdma(&s) : plain_works(plain, port));
		ENSURE(write(to, "d", 1) == 1, "write: %s", strerror(errno));
	}
	return NULL;
}

static const char *start_helper(struct helper *h, bool rdma)
{
	int to[2], from[2];

	ENSURE(!pipe2(to, O_CLOEXEC) && !pipe2(from, O_CLOEXEC), "pipe: %s", strerror(errno));
	fflush(stdout);
	h->pid = fork();
	ENSURE(h->pid >= 0, "fork: %s", strerror(errno));
	if (h->pid == 0) {
		const char *reason;

		close(to[1]);
		close(from[0]);
		alarm(DEFAULT_SECONDS);
		reason = help(to[0], from[1], rdma);
		if (reason)
			printf("# the other process: %s [%s]\n", reason, failed_at);
		fflush(stdout);
		_exit(reason ? 1 : 0);
	}
	close(to[0]);
	close(from[1]);
	h->to = to[1];
	h->from = from[0];
	keep(end_helper, h, "other process");
	return NULL;
}

static const char *helper_takes(struct helper *h, uint16_t *port)
{
	ENSURE(write(h->to, port, sizeof *port) == sizeof *port, "write: %s", strerror(errno));
	TRY(readable(h->from, WAIT_MS));
	ENSURE(read(h->from, port, sizeof *port) == sizeof *port, "the other process failed");
	return NULL;
}

static const char *helper_serves(struct helper *h)
{
	ENSURE(write(h->to, "s", 1) == 1, "write: %s", strerror(errno));
	return NULL;
}

static const char *helper_served(struct helper *h)
{
	char byte;

	TRY(readable(h->from, WAIT_MS));
	ENSURE(read(h->from, &byte, 1) == 1, "the other process failed");
	return NULL;
}

/* This process has the RDMA listener, the other the plain socket. */
static const char *plain_elsewhere(size_t rdma_first)
{
	static struct helper h;
	struct fixture s;
	uint16_t port = 0;

	TRY(start_helper(&h, false));
	TRY(open_fixture(&s, RDMA_PS_TCP));
	if (rdma_first) {
		TRY(listen_rdma(&s, 0));
		port = s.port;
		TRY(helper_takes(&h, &port));
	} else {
		TRY(helper_takes(&h, &port));
		TRY(listen_rdma(&s, port));
	}
	ENSURE(port == s.port, "the other process has port %u, not %u", port, s.port);
	TRY(rdma_works(&s));
	TRY(helper_serves(&h));
	return helper_served(&h);
}

/* The other process has the RDMA listener; this one has the plain socket and connects. */
static const char *rdma_elsewhere(size_t rdma_first)
{
	static struct helper h;
	struct rdma_cm_id *client;
	struct fixture s;
	uint16_t port = 0;
	int plain;

	TRY(start_helper(&h, true));
	TRY(open_fixture(&s, RDMA_PS_TCP));
	if (rdma_first) {
		TRY(helper_takes(&h, &port));
		TRY(plain_listener(&plain, port));
	} else {
		TRY(plain_listener(&plain, 0));
		port = port_of(plain);
		TRY(helper_takes(&h, &port));
	}
	s.port = port;
	TRY(helper_serves(&h));
	TRY(start_connect(&s, &client));
	TRY(event(s.clients, RDMA_CM_EVENT_ESTABLISHED, NULL, NULL));
	TRY(helper_served(&h));
	return plain_works(plain, port);
}

/* A child of fork has no device. It can bind a plain socket to the port of its parent's listener. */
static const char *forked_child(size_t arg)
{
	struct fixture s;
	int status;
	pid_t pid;

	(void)arg;
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, 0));
	TRY(rdma_works(&s));
	fflush(stdout);
	pid = fork();
	ENSURE(pid >= 0, "fork: %s", strerror(errno));
	if (pid == 0) {
		const char *reason;
		int plain;

		alarm(DEFAULT_SECONDS);
		reason = plain_listener(&plain, s.port);
		if (!reason)
			reason = plain_works(plain, s.port);
		if (reason)
			printf("# the child: %s [%s]\n", reason, failed_at);
		fflush(stdout);
		_exit(reason ? 1 : 0);
	}
	ENSURE(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status), "the child failed");
	return rdma_works(&s);
}

/* After a listener with connections was killed, the next one can use its port at once. */
static const char *restart(size_t arg)
{
	static struct helper h;
	struct rdma_cm_id *client;
	struct fixture s;
	uint16_t port = 0;
	int status;

	(void)arg;
	TRY(start_helper(&h, true));
	TRY(helper_takes(&h, &port));
	TRY(open_fixture(&s, RDMA_PS_TCP));
	s.port = port;
	TRY(helper_serves(&h));
	TRY(start_connect(&s, &client));
	TRY(event(s.clients, RDMA_CM_EVENT_ESTABLISHED, NULL, NULL));
	TRY(helper_served(&h));
	forget(&h);
	close(h.to);
	close(h.from);
	ENSURE(!kill(h.pid, SIGKILL) && waitpid(h.pid, &status, 0) == h.pid, "kill: %s", strerror(errno));
	TRY(event(s.clients, RDMA_CM_EVENT_DISCONNECTED, NULL, NULL));
	TRY(listen_rdma(&s, port));
	return rdma_works(&s);
}

/* A listener of another process has the port. */
static const char *taken_elsewhere(size_t arg)
{
	static struct helper h;
	struct rdma_cm_id *id;
	struct sockaddr_in name;
	struct fixture s;
	uint16_t port = 0;

	(void)arg;
	TRY(start_helper(&h, true));
	TRY(helper_takes(&h, &port));
	TRY(open_fixture(&s, RDMA_PS_TCP));
	name = at(port);
	ENSURE(!rdma_create_id(s.servers, &id, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(close_id, id, "id");
	ENSURE(rdma_bind_addr(id, (struct sockaddr *)&name) && errno == EADDRINUSE, "two processes have one port of rdma_cm");
	return NULL;
}

/*
 * A program that does not run on anywarp can use the port number, because with ANYWARP_PORTS=apart listeners never take
 * its TCP port.
 */
static const char *apart(size_t arg)
{
	struct sockaddr_in name;
	struct fixture s;
	int plain;

	(void)arg;
	setenv("ANYWARP_PORTS", "apart", 1);
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, 0));
	TRY(new_plain(&plain, SOCK_STREAM));
	name = at(s.port);
	ENSURE(!syscall(SYS_bind, plain, &name, sizeof name), "the system call bind: %s", strerror(errno));
	ENSURE(!syscall(SYS_listen, plain, 8), "the system call listen: %s", strerror(errno));
	TRY(rdma_works(&s));
	return plain_works(plain, s.port);
}

/* ---------------------------------------------------------------- signposts */

/* Computes the two candidate ports of a signpost as docs/ports.md defines them. */
static void candidate_ports(uint16_t port, uint16_t candidate[2])
{
	uint32_t first = port < 1024 ? 600 : 61000, count = port < 1024 ? 400 : 4536;

	candidate[0] = (uint16_t)(first + (port + RDMA_PS_TCP * 97u) % count);
	candidate[1] = (uint16_t)(first + (port * 7u + port / count * 331u + RDMA_PS_TCP * 61u + count / 2) % count);
}

/*
 * A listener of another process has its signpost at the second candidate port, because the first was taken when it
 * started. The first candidate port is free now, but the port of rdma_cm is still taken.
 */
static const char *taken_at_second_candidate(size_t arg)
{
	static struct helper h;
	struct rdma_cm_id *id;
	struct sockaddr_in name;
	uint16_t port, candidate[2];
	struct fixture s;
	int plain;

	(void)arg;
	TRY(start_helper(&h, true)); /* first, so that the helper inherits no sockets */
	TRY(plain_listener(&plain, 0));
	port = port_of(plain);
	ENSURE(!close_now((void *)(intptr_t)plain), "close: %s", strerror(errno));
	candidate_ports(port, candidate);
	TRY(new_plain(&plain, SOCK_DGRAM));
	TRY(bind_plain(plain, candidate[0], false));
	TRY(helper_takes(&h, &port));
	ENSURE(!close_now((void *)(intptr_t)plain), "close: %s", strerror(errno));
	TRY(open_fixture(&s, RDMA_PS_TCP));
	name = at(port);
	ENSURE(!rdma_create_id(s.servers, &id, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(close_id, id, "id");
	ENSURE(rdma_bind_addr(id, (struct sockaddr *)&name) && errno == EADDRINUSE, "two processes have one port of rdma_cm");
	return NULL;
}

/* A listener of another process has the port at one address; this one requests it at all addresses of both families. */
static const char *taken_at_one_address(size_t arg)
{
	struct sockaddr_in6 any = { .sin6_family = AF_INET6 };
	static struct helper h;
	struct rdma_cm_id *id;
	struct fixture s;
	uint16_t port = 0;

	(void)arg;
	TRY(start_helper(&h, true));
	TRY(helper_takes(&h, &port));
	TRY(open_fixture(&s, RDMA_PS_TCP));
	any.sin6_port = htons(port);
	ENSURE(!rdma_create_id(s.servers, &id, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(close_id, id, "id");
	ENSURE(rdma_bind_addr(id, (struct sockaddr *)&any) && errno == EADDRNOTAVAIL, "two processes have one port of rdma_cm");
	return NULL;
}

/* The signpost of a listener with RDMA_OPTION_ID_REUSEADDR does not share its UDP port, even after it has moved. */
static const char *moved_signpost_not_shared(size_t arg)
{
	struct sockaddr_in name = at(0);
	uint16_t candidate[2];
	struct fixture s;
	int plain, thief, on = 1;

	(void)arg;
	TRY(open_fixture(&s, RDMA_PS_TCP));
	ENSURE(!rdma_create_id(s.servers, &s.listener, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(close_id, s.listener, "id");
	ENSURE(!rdma_set_option(s.listener, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, sizeof on), "rdma_set_option: %s",
	       strerror(errno));
	ENSURE(!rdma_bind_addr(s.listener, (struct sockaddr *)&name), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(!rdma_listen(s.listener, 8), "rdma_listen: %s", strerror(errno));
	s.port = ntohs(rdma_get_src_port(s.listener));
	candidate_ports(s.port, candidate);
	TRY(new_plain(&plain, SOCK_DGRAM));
	TRY(bind_plain(plain, candidate[0], false));
	TRY(new_plain(&thief, SOCK_DGRAM));
	ENSURE(!setsockopt(thief, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on), "SO_REUSEPORT: %s", strerror(errno));
	name = at(candidate[1]);
	/* A direct system call, because the library's bind would move the signpost. */
	ENSURE(syscall(SYS_bind, thief, &name, sizeof name) && errno == EADDRINUSE, "another socket shares the signpost's UDP port");
	return rdma_works(&s);
}

/* A plain socket binds the port of a signpost, which moves to its other candidate port. */
static const char *signpost_moves(size_t arg)
{
	uint16_t candidate[2];
	struct fixture s;
	int plain, both;

	(void)arg;
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, 0));
	candidate_ports(s.port, candidate);
	TRY(plain_listener(&plain, s.port));
	TRY(new_plain(&both, SOCK_DGRAM));
	TRY(bind_plain(both, candidate[0], false));
	TRY(rdma_works(&s));
	return plain_works(plain, s.port);
}

/* Both candidate ports are taken: the listener is found at the TCP port of its number, after a short time. */
static const char *both_candidates_taken(size_t arg)
{
	struct sockaddr_in name;
	uint16_t candidate[2];
	struct fixture s;
	uint64_t since;
	int plain;

	(void)arg;
	TRY(plain_listener(&plain, 0));
	name = at(port_of(plain));
	ENSURE(!close_now((void *)(intptr_t)plain), "close: %s", strerror(errno));
	candidate_ports(ntohs(name.sin_port), candidate);
	for (int i = 0; i < 2; i++) {
		TRY(new_plain(&plain, SOCK_DGRAM));
		TRY(bind_plain(plain, candidate[i], false));
	}
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, ntohs(name.sin_port)));
	since = now_ms();
	TRY(rdma_works(&s));
	ENSURE(now_ms() - since < 3000, "connecting without a signpost takes %u ms", (unsigned int)(now_ms() - since));
	/* The absence of a signpost is remembered. */
	since = now_ms();
	TRY(rdma_works(&s));
	ENSURE(now_ms() - since < 300, "connecting again takes %u ms", (unsigned int)(now_ms() - since));
	return NULL;
}

enum lie { SILENCE, GARBAGE, SHORT, OTHER_NONCE, OTHER_PORT, OTHER_SPACE, PRIVILEGED, PORT_0, ECHO, ELSEWHERE, LIES };

/* A false signpost cannot direct clients to a plain service while the listener has its own signpost. */
static const char *false_signpost(size_t lie)
{
	unsigned char question[64], answer[64];
	struct sockaddr_in name, from;
	socklen_t len = sizeof from;
	enum rdma_cm_event_type got;
	struct rdma_cm_event *e;
	struct rdma_cm_id *client;
	int liar, plain, listener;
	uint16_t candidate[2], port;
	struct fixture s;
	ssize_t n;

	TRY(plain_listener(&plain, 0)); /* the false answers name its port */
	TRY(plain_listener(&listener, 0)); /* provides a free port number */
	port = port_of(listener);
	ENSURE(!close_now((void *)(intptr_t)listener), "close: %s", strerror(errno));
	candidate_ports(port, candidate);
	TRY(new_plain(&liar, SOCK_DGRAM));
	TRY(bind_plain(liar, candidate[0], false));
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, port)); /* has its signpost at the second candidate port */
	name = at(port_of(plain));
	if (lie == ELSEWHERE) {
		/*
		 * Without the listener, an answer about other ports of the same host is accepted: the plain service
		 * gets an MPA Request.
		 */
		ENSURE(!close_now(s.listener), "rdma_destroy_id: %s", strerror(errno));
	}
	TRY(start_connect(&s, &client));
	TRY(readable(liar, WAIT_MS));
	while ((n = recvfrom(liar, question, sizeof question, 0, (struct sockaddr *)&from, &len)) > 0) {
		ENSURE(n == 20 && !memcmp(question, "aWsp\x11", 5), "the datagram of %zd bytes is no query", n);
		memcpy(answer, question, 20);
		answer[4] = 0x13;
		memcpy(answer + 10, &name.sin_port, 2);
		switch ((enum lie)lie) {
		case SILENCE: continue;
		case GARBAGE: memset(answer, 0xa5, 20); break;
		case SHORT: n = 19; break;
		case OTHER_NONCE: answer[19] ^= 1; break;
		case OTHER_PORT: answer[9] ^= 1; break;
		case OTHER_SPACE: answer[7] ^= 1; break;
		case PRIVILEGED: answer[10] = 0, answer[11] = 25; break;
		case PORT_0: answer[10] = answer[11] = 0; break;
		case ECHO: memcpy(answer, question, 20); break;
		case ELSEWHERE: case LIES: break;
		}
		ENSURE(sendto(liar, answer, (size_t)n, 0, (struct sockaddr *)&from, len) == n, "sendto: %s", strerror(errno));
	}
	if (lie == ELSEWHERE) {
		int accepted;

		TRY(readable(plain, WAIT_MS));
		accepted = accept(plain, NULL, NULL);
		ENSURE(accepted >= 0, "accept: %s", strerror(errno));
		close(accepted);
		TRY(readable(s.clients->fd, WAIT_MS));
		ENSURE(!rdma_get_cm_event(s.clients, &e), "rdma_get_cm_event: %s", strerror(errno));
		got = e->event;
		ENSURE(!rdma_ack_cm_event(e), "rdma_ack_cm_event: %s", strerror(errno));
		ENSURE(got == RDMA_CM_EVENT_CONNECT_ERROR || got == RDMA_CM_EVENT_REJECTED, "event %s", rdma_event_str(got));
		return NULL;
	}
	TRY(accept_rdma(&s));
	TRY(event(s.clients, RDMA_CM_EVENT_ESTABLISHED, NULL, NULL));
	ENSURE(accept(plain, NULL, NULL) < 0 && errno == EAGAIN, "the client connected to the plain service");
	return NULL;
}

/* A signpost answers only queries and release requests. The answer to a query has as many bytes as the query. */
static const char *only_queries_answered(size_t arg)
{
	unsigned char bytes[64] = "aWsp\x11";
	struct sockaddr_in name;
	uint16_t candidate[2], port;
	struct fixture s;
	int fd;

	(void)arg;
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, 0));
	candidate_ports(s.port, candidate);
	name = at(candidate[0]);
	port = htons(s.port);
	bytes[6] = RDMA_PS_TCP >> 8;
	bytes[7] = RDMA_PS_TCP & 0xff;
	memcpy(bytes + 8, &port, 2);
	TRY(new_plain(&fd, SOCK_DGRAM));
	ENSURE(!connect(fd, (struct sockaddr *)&name, sizeof name), "connect: %s", strerror(errno));
	for (size_t len = 0; len <= 40; len++)
		if (len != 20)
			ENSURE(send(fd, bytes, len, 0) == (ssize_t)len, "send: %s", strerror(errno));
	for (int kind = 0; kind < 256; kind++) {
		if (kind == 0x11 || kind == 0x12)
			continue;
		bytes[4] = (unsigned char)kind;
		ENSURE(send(fd, bytes, 20, 0) == 20, "send: %s", strerror(errno));
		if (kind % 32 == 0)
			sleep_ms(10); /* so that the socket's buffer has room for the last datagram */
	}
	TRY(not_readable(fd, 50));
	bytes[4] = 0x11;
	ENSURE(send(fd, bytes, 20, 0) == 20, "send: %s", strerror(errno));
	TRY(readable(fd, WAIT_MS));
	ENSURE(recv(fd, bytes, sizeof bytes, 0) == 20, "the answer has another length");
	ENSURE(bytes[4] == 0x13 && bytes[5] == 0 && !memcmp(bytes + 10, &port, 2), "the answer is another one");
	TRY(not_readable(fd, 50));
	return rdma_works(&s);
}

/*
 * A flood of queries, release requests and noise at a signpost does not delay connections, and gets no more answers
 * than it sent datagrams.
 */
static const char *flooded(size_t arg)
{
	unsigned char bytes[64] = "aWsp\x11";
	uint16_t candidate[2], wire;
	struct sockaddr_in name;
	unsigned int asked = 0, answered = 0;
	struct fixture s;
	uint64_t end;
	pid_t pid;
	int fd, status;

	(void)arg;
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, 0));
	TRY(rdma_works(&s));
	candidate_ports(s.port, candidate);
	name = at(candidate[0]);
	wire = htons(s.port);
	bytes[6] = RDMA_PS_TCP >> 8;
	bytes[7] = RDMA_PS_TCP & 0xff;
	memcpy(bytes + 8, &wire, 2);
	fflush(stdout);
	pid = fork();
	ENSURE(pid >= 0, "fork: %s", strerror(errno));
	if (pid == 0) {
		alarm(DEFAULT_SECONDS);
		/* As another user if possible, so that release requests are checked and refused. */
		if (!geteuid() && (setgid(65534) || setuid(65534)))
			_exit(2);
		fd = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
		for (end = now_ms() + 1500; fd >= 0 && now_ms() < end; asked++) {
			bytes[4] = (unsigned char)(0x11 + (geteuid() ? asked % 4 : 0));
			bytes[19]++;
			sendto(fd, bytes, 20, 0, (struct sockaddr *)&name, sizeof name);
			while (recv(fd, bytes + 20, 20, 0) == 20)
				answered++;
		}
		_exit(fd < 0 || answered > asked ? 1 : 0);
	}
	for (int i = 0; i < 10; i++) {
		uint64_t since = now_ms();

		TRY(rdma_works(&s));
		ENSURE(now_ms() - since < 3000, "connecting takes %u ms", (unsigned int)(now_ms() - since));
	}
	ENSURE(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status), "the flood got more answers than it sent datagrams");
	return rdma_works(&s);
}

/* A process of the given user asks the listener to release its TCP port. Returns the status of the answer, or -1. */
static int ask_to_release(uint16_t port, uid_t user)
{
	unsigned char bytes[64] = "aWsp\x12";
	struct sockaddr_in name = at(0);
	uint16_t candidate[2], wire = htons(port);
	int fd, status;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid < 0)
		return -1;
	if (pid)
		return waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) < 100 ? WEXITSTATUS(status) : -1;
	alarm(DEFAULT_SECONDS);
	if (user != geteuid() && (setgid(user) || setuid(user)))
		_exit(100);
	fd = socket(AF_INET, SOCK_DGRAM, 0);
	if (fd < 0 || syscall(SYS_bind, fd, &name, sizeof name))
		_exit(101);
	candidate_ports(port, candidate);
	name = at(candidate[0]);
	bytes[6] = RDMA_PS_TCP >> 8;
	bytes[7] = RDMA_PS_TCP & 0xff;
	memcpy(bytes + 8, &wire, 2);
	if (sendto(fd, bytes, 20, 0, (struct sockaddr *)&name, sizeof name) != 20)
		_exit(102);
	if (readable(fd, WAIT_MS) || recv(fd, bytes, sizeof bytes, 0) != 20 || bytes[4] != 0x13)
		_exit(103);
	_exit(bytes[5]);
}

/* Only a process of the same user or of root can make a listener release its TCP port. */
static const char *release_by(size_t user)
{
	struct sockaddr_in name;
	bool may = user == geteuid();
	struct fixture s;
	int plain, status;

	if (!may && geteuid())
		SKIP("only root can become another user");
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(listen_rdma(&s, 0));
	status = ask_to_release(s.port, (uid_t)user);
	ENSURE(status == (may ? 3 : 2), "status %d", status);
	TRY(new_plain(&plain, SOCK_STREAM));
	name = at(s.port);
	/* A direct system call, because the library's bind would ask too. */
	if (syscall(SYS_bind, plain, &name, sizeof name))
		ENSURE(!may && errno == EADDRINUSE, "the system call bind: %s", strerror(errno));
	else
		ENSURE(may, "another user has made the listener release its port");
	return rdma_works(&s);
}

static const char *release_by_this_user(size_t arg)
{
	(void)arg;
	return release_by(geteuid());
}

/* A port that is bound but does not listen refuses connections, and does not lead to a plain service at its number. */
static const char *bound_only(size_t arg)
{
	struct rdma_cm_id *client;
	struct fixture s;
	int plain, status;

	(void)arg;
	TRY(plain_listener(&plain, 0));
	TRY(open_fixture(&s, RDMA_PS_TCP));
	TRY(bind_rdma(&s, port_of(plain)));
	TRY(start_connect(&s, &client));
	TRY(event(s.clients, RDMA_CM_EVENT_REJECTED, NULL, &status));
	ENSURE(status == 8, "status %d, expected 8 (no listener)", status);
	return plain_works(plain, s.port);
}

static const struct test tests[] = {
	{ "plain_then_rdma", plain_then_rdma, 0, 0, false },
	{ "rdma_then_plain", rdma_then_plain, 0, 0, false },
	{ "plain_after_connections", plain_after_connections, 0, 0, false },
	{ "both_bound_plain_listens", both_bound, 0, 0, false },
	{ "both_bound_rdma_listens", both_bound, 1, 0, false },
	{ "plain_on_every_address", plain_on_every_address, AF_INET, 0, false },
	{ "plain_on_every_address_ipv6", plain_on_every_address, AF_INET6, 0, false },
	{ "plain_ports_are_taken", plain_ports_are_taken, 0, 0, false },
	{ "rdma_ports_are_taken", rdma_ports_are_taken, RDMA_PS_TCP, 0, false },
	{ "rdma_ports_are_taken_udp", rdma_ports_are_taken, RDMA_PS_UDP, 0, false },
	{ "shared_by_option", shared_by_option, 0, 0, false },
	{ "shared_by_option_chosen", shared_by_option, 27441, 0, false },
	{ "udp_plain_first", udp_both, 0, 0, false },
	{ "udp_rdma_first", udp_both, 1, 0, false },
	{ "spaces_are_apart", spaces_are_apart, 0, 0, false },
	{ "plain_elsewhere", plain_elsewhere, 0, 0, true },
	{ "plain_elsewhere_rdma_first", plain_elsewhere, 1, 0, true },
	{ "rdma_elsewhere", rdma_elsewhere, 0, 0, true },
	{ "rdma_elsewhere_first", rdma_elsewhere, 1, 0, true },
	{ "taken_elsewhere", taken_elsewhere, 0, 0, true },
	{ "apart", apart, 0, 0, true },
	{ "reuseport", reuseport, 0, 0, false },
	{ "bind_race", bind_race, RDMA_PS_TCP, 0, false },
	{ "bind_race_udp", bind_race, RDMA_PS_UDP, 0, false },
	{ "many_listeners", many_listeners, 300, 0, false },
	{ "forked_child", forked_child, 0, 0, true },
	{ "restart", restart, 0, 0, true },
	{ "flooded", flooded, 0, 0, true },
	{ "signpost_moves", signpost_moves, 0, 0, false },
	{ "both_candidates_taken", both_candidates_taken, 0, 0, false },
	{ "taken_at_second_candidate", taken_at_second_candidate, 0, 0, true },
	{ "taken_at_one_address", taken_at_one_address, 0, 0, true },
	{ "moved_signpost_not_shared", moved_signpost_not_shared, 0, 0, false },
	{ "false_signpost_silence", false_signpost, SILENCE, 0, false },
	{ "false_signpost_garbage", false_signpost, GARBAGE, 0, false },
	{ "false_signpost_short", false_signpost, SHORT, 0, false },
	{ "false_signpost_other_nonce", false_signpost, OTHER_NONCE, 0, false },
	{ "false_signpost_other_port", false_signpost, OTHER_PORT, 0, false },
	{ "false_signpost_other_space", false_signpost, OTHER_SPACE, 0, false },
	{ "false_signpost_privileged", false_signpost, PRIVILEGED, 0, false },
	{ "false_signpost_port_0", false_signpost, PORT_0, 0, false },
	{ "false_signpost_echo", false_signpost, ECHO, 0, false },
	{ "false_signpost_elsewhere", false_signpost, ELSEWHERE, 0, false },
	{ "only_queries_answered", only_queries_answered, 0, 0, false },
	{ "release_by_this_user", release_by_this_user, 0, 0, true },
	{ "release_by_another_user", release_by, 65534, 0, true },
	{ "bound_only", bound_only, 0, 0, false },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
