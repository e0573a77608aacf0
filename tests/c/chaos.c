/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Peers that die, programs that end during traffic, threads, and many repetitions. In all cases each work request
 * completes exactly once, and nothing remains of objects that were opened and closed.
 *
 *   chaos [--rounds N] [--cycles N] [--seed N] [TEST…]
 */
#include "ends.h"

#include <dirent.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

static size_t rounds = 25, cycles = 3000;
static uint64_t seed = 1;

static const struct want usual = { 0 };
static const struct want impatient = { .timeout = 12, .retry = 3 };

static uint64_t next_random(void)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return seed;
}

/* ---------------------------------------------------------------- the other process */

#define WINDOW 64u
#define PIECE 65536u
#define WORD 4096u

/* What the two processes exchange before they connect. */
struct hello {
	uint32_t qpn, rkey;
	uint64_t addr;
	uint16_t port;
};

static const char *send_hello(int fd, const struct hello *h)
{
	ENSURE(write(fd, h, sizeof *h) == (ssize_t)sizeof *h, "write: %s", strerror(errno));
	return NULL;
}

static const char *receive_hello(int fd, struct hello *h)
{
	TRY(readable(fd, WAIT_MS));
	ENSURE(read(fd, h, sizeof *h) == (ssize_t)sizeof *h, "the other process has ended");
	return NULL;
}

/* A child process that runs this program as a peer. */
struct peer {
	pid_t pid;
	int fd;
};

static int kill_peer(void *p)
{
	struct peer *peer = p;

	if (peer->pid > 0) {
		kill(peer->pid, SIGKILL);
		waitpid(peer->pid, NULL, 0);
		peer->pid = 0;
		close(peer->fd);
	}
	return 0;
}

static const char *start_peer(struct peer *peer, const char *role)
{
	char fd[16];
	int pair[2];

	ENSURE(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair), "socketpair: %s", strerror(errno));
	snprintf(fd, sizeof fd, "%d", pair[1]);
	fflush(stdout);
	peer->fd = pair[0];
	peer->pid = fork();
	ENSURE(peer->pid >= 0, "fork: %s", strerror(errno));
	if (peer->pid == 0) {
		close(pair[0]);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		execl("/proc/self/exe", "chaos", "--peer", role, fd, (char *)NULL);
		_exit(127);
	}
	close(pair[1]);
	fcntl(pair[0], F_SETFD, FD_CLOEXEC);
	keep(kill_peer, peer, "peer");
	return NULL;
}

/* Receives, and sends as fast as possible, until it is killed. */
static const char *chatter(struct end *e, struct region *r)
{
	struct ibv_sge sge = sge_of(r, 0, WORD);
	unsigned int sending = 0;

	for (;;) {
		struct ibv_wc wc;

		while (ibv_poll_cq(e->rcq, 1, &wc) > 0) {
			if (wc.status != IBV_WC_SUCCESS)
				return NULL;
			TRY(post_recv(e->qp, 1, &sge, 1));
		}
		while (ibv_poll_cq(e->scq, 1, &wc) > 0) {
			if (wc.status != IBV_WC_SUCCESS)
				return NULL;
			sending--;
		}
		if (sending < 8) {
			struct ibv_send_wr wr = send_wr(2, IBV_WR_SEND, &sge, 1);

			TRY(post(e->qp, &wr));
			sending++;
		}
	}
}

#define LAST 150u

/* Receives `LAST` messages and exits at once, without a system call in between in which the device could run. */
static const char *take_and_end(struct end *e, struct region *r)
{
	struct ibv_sge sge = sge_of(r, 0, WORD);

	for (unsigned int taken = 0; taken < LAST;) {
		struct ibv_wc wc;

		if (ibv_poll_cq(e->rcq, 1, &wc) <= 0)
			continue;
		ENSURE(wc.status == IBV_WC_SUCCESS, "receive %u: %s", taken, ibv_wc_status_str(wc.status));
		if (++taken < LAST)
			TRY(post_recv(e->qp, 1, &sge, 1));
	}
	_exit(0);
}

static const char *peer_of_verbs(int fd, const struct want *want, const char *(*work)(struct end *, struct region *))
{
	struct hello mine, theirs;
	struct region r;
	struct end e;

	TRY(open_device());
	TRY(open_end(&e, want));
	TRY(new_region(&r, e.pd, PIECE, ALL_ACCESS));
	TRY(to_init(e.qp, want));
	for (unsigned int i = 0; i < WINDOW; i++) {
		struct ibv_sge sge = sge_of(&r, 0, WORD);

		TRY(post_recv(e.qp, 1, &sge, 1));
	}
	mine = (struct hello){ .qpn = e.qp->qp_num, .rkey = r.mr->rkey, .addr = (uintptr_t)r.at };
	TRY(send_hello(fd, &mine));
	TRY(receive_hello(fd, &theirs));
	TRY(to_rtr(e.qp, theirs.qpn, want));
	TRY(to_rts(e.qp, want));
	TRY(send_hello(fd, &mine)); /* ready */
	return work(&e, &r);
}

static struct sockaddr_in own_address(uint16_t port)
{
	const char *text = getenv("TEST_ADDR");
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };

	inet_pton(AF_INET, text ? text : "127.0.0.1", &address.sin_addr);
	return address;
}

static const char *wait_event(struct rdma_event_channel *channel, enum rdma_cm_event_type type, struct rdma_cm_id **id)
{
	struct rdma_cm_event *event;
	enum rdma_cm_event_type got;

	TRY(readable(channel->fd, 30000));
	ENSURE(!rdma_get_cm_event(channel, &event), "rdma_get_cm_event: %s", strerror(errno));
	got = event->event;
	if (id)
		*id = event->id;
	rdma_ack_cm_event(event);
	ENSURE(got == type, "event %s, expected %s", rdma_event_str(got), rdma_event_str(type));
	return NULL;
}

static const char *cm_end(struct rdma_cm_id *id, struct end *e)
{
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = 256, .max_recv_wr = 256, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	ENSURE(!rdma_create_qp(id, NULL, &init), "rdma_create_qp: %s", strerror(errno));
	*e = (struct end){ .pd = id->pd, .scq = id->send_cq, .rcq = id->recv_cq, .qp = id->qp };
	return NULL;
}

static const char *peer_of_cm(int fd)
{
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4, .retry_count = 7,
					 .rnr_retry_count = 7 };
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct sockaddr_in address;
	struct rdma_cm_id *id;
	struct hello mine = { 0 }, theirs;
	struct region r;
	struct end e;

	ENSURE(channel && !rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	TRY(receive_hello(fd, &theirs));
	address = own_address(theirs.port);
	ENSURE(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000), "rdma_resolve_addr");
	TRY(wait_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED, NULL));
	ENSURE(!rdma_resolve_route(id, 2000), "rdma_resolve_route");
	TRY(wait_event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL));
	TRY(cm_end(id, &e));
	TRY(new_region(&r, e.pd, PIECE, ALL_ACCESS));
	for (unsigned int i = 0; i < WINDOW; i++) {
		struct ibv_sge sge = sge_of(&r, 0, WORD);

		TRY(post_recv(e.qp, 1, &sge, 1));
	}
	ENSURE(!rdma_connect(id, &param), "rdma_connect: %s", strerror(errno));
	TRY(wait_event(channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	mine = (struct hello){ .rkey = r.mr->rkey, .addr = (uintptr_t)r.at };
	TRY(send_hello(fd, &mine));
	return chatter(&e, &r);
}

/* Opens a connection, exchanges data for the number of milliseconds that the test sends in `qpn`, and ends as `how` says. */
static const char *peer_that_ends(int fd, const char *how)
{
	struct pair p;
	struct region r;
	struct hello go = { 0 };
	uint64_t end;

	TRY(open_pair(&p, &usual));
	TRY(new_region(&r, p.a.pd, PIECE, ALL_ACCESS));
	TRY(send_hello(fd, &go));
	TRY(receive_hello(fd, &go));
	end = now_ms() + go.qpn;
	do {
		struct ibv_sge sge = sge_of(&r, 0, WORD);
		struct ibv_send_wr wr = send_wr(2, IBV_WR_SEND, &sge, 1), *bad;
		struct ibv_wc wc;

		post_recv(p.b.qp, 1, NULL, 0);
		wr.num_sge = 0;
		ibv_post_send(p.a.qp, &wr, &bad);
		while (ibv_poll_cq(p.a.scq, 1, &wc) > 0 || ibv_poll_cq(p.b.rcq, 1, &wc) > 0)
			;
	} while (now_ms() < end);
	if (!strcmp(how, "close")) {
		close_all();
		ibv_close_device(device);
	} else if (!strcmp(how, "close_device_first")) {
		ibv_close_device(device);
	}
	if (!strcmp(how, "_exit"))
		_exit(0);
	exit(0);
}

static int be_peer(const char *role, int fd)
{
	const char *reason;

	if (!strcmp(role, "verbs"))
		reason = peer_of_verbs(fd, &impatient, chatter);
	else if (!strcmp(role, "takes_and_ends"))
		reason = peer_of_verbs(fd, &impatient, take_and_end);
	else if (!strcmp(role, "patient"))
		reason = peer_of_verbs(fd, &(struct want){ .timeout = 20, .retry = 7 }, chatter);
	else if (!strcmp(role, "cm"))
		reason = peer_of_cm(fd);
	else
		reason = peer_that_ends(fd, role);
	if (reason)
		fprintf(stderr, "peer: %s [%s]\n", reason, failed_at);
	return reason ? 1 : 0;
}

/* ---------------------------------------------------------------- the surviving process */

/* What one end has posted, and its completions. */
struct ledger {
	uint64_t sends, recvs;           /* posted */
	uint64_t sends_done, recvs_done; /* completed, in order */
	bool failed;                     /* a send has failed, so later ones must fail too */
	enum ibv_wc_status first_error;
};

static const char *post_one(struct end *e, struct region *mine, const struct hello *peer, struct ledger *l)
{
	struct ibv_sge sge = sge_of(mine, 0, WORD);
	struct ibv_send_wr wr = send_wr(l->sends, IBV_WR_SEND, &sge, 1);

	switch (l->sends % 4) {
	case 1:
		sge.length = PIECE;
		wr.opcode = IBV_WR_RDMA_WRITE;
		break;
	case 2:
		sge.length = PIECE;
		wr.opcode = IBV_WR_RDMA_READ;
		break;
	case 3:
		sge.length = 8;
		wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
		wr.wr.atomic.remote_addr = peer->addr;
		wr.wr.atomic.rkey = peer->rkey;
		wr.wr.atomic.compare_add = 1;
		break;
	}
	if (wr.opcode == IBV_WR_RDMA_WRITE || wr.opcode == IBV_WR_RDMA_READ) {
		wr.wr.rdma.remote_addr = peer->addr;
		wr.wr.rdma.rkey = peer->rkey;
	}
	TRY(post(e->qp, &wr));
	l->sends++;
	return NULL;
}

static const char *post_receive(struct end *e, struct region *mine, struct ledger *l)
{
	struct ibv_sge sge = sge_of(mine, 0, WORD);

	TRY(post_recv(e->qp, l->recvs, &sge, 1));
	l->recvs++;
	return NULL;
}

/* Polls completions and checks that each arrives once and in order. */
static const char *settle(struct end *e, struct ledger *l)
{
	struct ibv_wc wc;

	while (ibv_poll_cq(e->scq, 1, &wc) > 0) {
		ENSURE(wc.wr_id == l->sends_done, "send %llu completes, expected %llu", (unsigned long long)wc.wr_id,
		       (unsigned long long)l->sends_done);
		ENSURE(wc.status != IBV_WC_SUCCESS || !l->failed, "send %llu succeeds after a failed one",
		       (unsigned long long)wc.wr_id);
		if (wc.status != IBV_WC_SUCCESS && !l->failed) {
			l->failed = true;
			l->first_error = wc.status;
		}
		l->sends_done++;
	}
	while (ibv_poll_cq(e->rcq, 1, &wc) > 0) {
		ENSURE(wc.wr_id == l->recvs_done, "receive %llu completes, expected %llu",
		       (unsigned long long)wc.wr_id, (unsigned long long)l->recvs_done);
		ENSURE(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_WR_FLUSH_ERR, "receive %llu: %s",
		       (unsigned long long)wc.wr_id, ibv_wc_status_str(wc.status));
		l->recvs_done++;
	}
	return NULL;
}

/* The additional objects of an rdma_cm connection. */
struct manager {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
};

/* Sends until the peer is killed. Then all posted requests must complete. */
static const char *outlive(struct end *e, struct region *mine, const struct hello *theirs, struct peer *peer,
			   struct ledger *l, unsigned int life_ms, const struct manager *m)
{
	uint64_t death = now_ns() + (uint64_t)life_ms * 1000000u + next_random() % 1000000u, end;

	while (now_ns() < death) {
		if (l->sends < l->sends_done + WINDOW)
			TRY(post_one(e, mine, theirs, l));
		TRY(settle(e, l));
		while (l->recvs < l->recvs_done + WINDOW)
			TRY(post_receive(e, mine, l));
		ENSURE(!l->failed, "send %llu fails while the peer lives: %s", (unsigned long long)l->sends_done,
		       ibv_wc_status_str(l->first_error));
	}
	kill_peer(peer);
	if (m) {
		TRY(wait_event(m->channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
		rdma_disconnect(m->id);
	}
	end = now_ms() + 40000;
	while (l->sends_done < l->sends && now_ms() < end)
		TRY(settle(e, l));
	ENSURE(l->sends_done == l->sends, "%llu of %llu sends complete after the peer's death",
	       (unsigned long long)l->sends_done, (unsigned long long)l->sends);
	while (!l->failed && now_ms() < end) { /* the queue was empty when the peer died: a request that is posted now fails */
		if (l->sends_done == l->sends)
			TRY(post_one(e, mine, theirs, l));
		TRY(settle(e, l));
	}
	ENSURE(l->failed, "sends to a dead peer succeed");
	ENSURE(l->first_error == IBV_WC_RETRY_EXC_ERR || l->first_error == IBV_WC_WR_FLUSH_ERR,
	       "the first failed send has status %s", ibv_wc_status_str(l->first_error));
	return NULL;
}

/* Receives are flushed too, and no further completion arrives. */
static const char *all_flushed(struct end *e, struct ledger *l)
{
	uint64_t end = now_ms() + 10000;

	while (l->recvs_done < l->recvs && now_ms() < end)
		TRY(settle(e, l));
	ENSURE(l->recvs_done == l->recvs, "%llu of %llu receives complete after the peer's death",
	       (unsigned long long)l->recvs_done, (unsigned long long)l->recvs);
	TRY(no_wc(e->scq, 20));
	return no_wc(e->rcq, 20);
}

static const char *killed_peer(size_t arg)
{
	(void)arg;
	TRY(open_device());
	for (size_t i = 0; i < rounds; i++) {
		struct hello mine, theirs;
		struct ledger l = { 0 };
		static struct peer peer; /* static, because the clean-up after the test uses it */
		struct region r;
		struct end e;

		TRY(open_end(&e, &impatient));
		TRY(new_region(&r, e.pd, PIECE, ALL_ACCESS));
		TRY(to_init(e.qp, &impatient));
		while (l.recvs < WINDOW)
			TRY(post_receive(&e, &r, &l));
		TRY(start_peer(&peer, "verbs"));
		TRY(receive_hello(peer.fd, &theirs));
		mine = (struct hello){ .qpn = e.qp->qp_num };
		TRY(send_hello(peer.fd, &mine));
		TRY(to_rtr(e.qp, theirs.qpn, &impatient));
		TRY(to_rts(e.qp, &impatient));
		TRY(receive_hello(peer.fd, &theirs));
		TRY(outlive(&e, &r, &theirs, &peer, &l, (unsigned int)(i * 3), NULL));
		TRY(all_flushed(&e, &l));
		TRY(state_is(e.qp, IBV_QPS_ERR));
		TRY(close_all());
	}
	return NULL;
}

static const char *wait_exit(struct peer *peer, unsigned int ms);

/*
 * The peer exits as soon as its last receive completes. It has received all messages, so all Sends succeed, although the
 * peer has not acknowledged all of them.
 */
static const char *peer_takes_and_ends(size_t arg)
{
	(void)arg;
	TRY(open_device());
	for (size_t i = 0; i < 4 * rounds; i++) {
		struct hello mine, theirs;
		static struct peer peer; /* static, because the clean-up after the test uses it */
		struct ibv_sge sge;
		struct region r;
		struct end e;
		uint64_t sent = 0;

		TRY(open_end(&e, &impatient));
		TRY(new_region(&r, e.pd, PIECE, ALL_ACCESS));
		TRY(to_init(e.qp, &impatient));
		TRY(start_peer(&peer, "takes_and_ends"));
		TRY(receive_hello(peer.fd, &theirs));
		mine = (struct hello){ .qpn = e.qp->qp_num };
		TRY(send_hello(peer.fd, &mine));
		TRY(to_rtr(e.qp, theirs.qpn, &impatient));
		TRY(to_rts(e.qp, &impatient));
		TRY(receive_hello(peer.fd, &theirs));
		sge = sge_of(&r, 0, WORD);
		for (uint64_t done = 0; done < LAST; done++) {
			for (; sent < LAST && sent < done + 16; sent++) {
				struct ibv_send_wr wr = send_wr(sent, IBV_WR_SEND, &sge, 1);

				TRY(post(e.qp, &wr));
			}
			TRY(expect_ok(e.scq, done, IBV_WC_SEND, NULL));
		}
		TRY(wait_exit(&peer, 10000));
		TRY(close_all());
	}
	return NULL;
}

/* The peer does not exist. Requests fail, whichever end would open the TCP connection, and so do later requests. */
static const char *missing_peer(size_t arg)
{
	(void)arg;
	TRY(open_device());
	for (int larger = 0; larger < 2; larger++) {
		struct region r;
		struct ibv_sge sge;
		struct ibv_send_wr wr;
		struct end e;

		TRY(open_end(&e, &impatient));
		TRY(new_region(&r, e.pd, 8, IBV_ACCESS_LOCAL_WRITE));
		TRY(to_init(e.qp, &impatient));
		TRY(to_rtr(e.qp, larger ? 0xffff01 : 0x000101, &impatient));
		TRY(to_rts(e.qp, &impatient));
		sge = sge_of(&r, 0, 8);
		for (uint64_t id = 0; id < 2; id++) {
			wr = send_wr(id, IBV_WR_SEND, &sge, 1);
			TRY(post(e.qp, &wr));
		}
		TRY(expect_status(e.scq, 0, IBV_WC_RETRY_EXC_ERR));
		TRY(expect_status(e.scq, 1, IBV_WC_WR_FLUSH_ERR));
		TRY(state_is(e.qp, IBV_QPS_ERR));
		TRY(close_all());
	}
	return NULL;
}

static int close_id(void *p)
{
	struct rdma_cm_id *id = p;

	if (id->qp)
		rdma_destroy_qp(id);
	return rdma_destroy_id(id) ? errno : 0;
}

static int close_event_channel(void *p)
{
	rdma_destroy_event_channel(p);
	return 0;
}

/* Does the same as killed_peer with a connection of rdma_cm. The surviving process also gets an event. */
static const char *killed_cm_peer(size_t arg)
{
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4, .retry_count = 7,
					 .rnr_retry_count = 7 };

	(void)arg;
	for (size_t i = 0; i < rounds; i++) {
		struct rdma_event_channel *channel = rdma_create_event_channel();
		struct sockaddr_in address = own_address(0);
		struct rdma_cm_id *listener, *id;
		struct hello mine = { 0 }, theirs;
		struct ledger l = { 0 };
		static struct peer peer; /* static, because the clean-up after the test uses it */
		struct region r;
		struct end e;

		ENSURE(channel, "rdma_create_event_channel: %s", strerror(errno));
		keep(close_event_channel, channel, "event channel");
		ENSURE(!rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
		keep(close_id, listener, "listener");
		ENSURE(!rdma_bind_addr(listener, (struct sockaddr *)&address) && !rdma_listen(listener, 4),
		       "rdma_listen: %s", strerror(errno));
		mine.port = ntohs(rdma_get_src_port(listener));
		TRY(start_peer(&peer, "cm"));
		TRY(send_hello(peer.fd, &mine));
		TRY(wait_event(channel, RDMA_CM_EVENT_CONNECT_REQUEST, &id));
		keep(close_id, id, "accepted id");
		TRY(cm_end(id, &e));
		TRY(new_region(&r, e.pd, PIECE, ALL_ACCESS));
		while (l.recvs < WINDOW)
			TRY(post_receive(&e, &r, &l));
		ENSURE(!rdma_accept(id, &param), "rdma_accept: %s", strerror(errno));
		TRY(wait_event(channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
		TRY(receive_hello(peer.fd, &theirs));
		TRY(outlive(&e, &r, &theirs, &peer, &l, (unsigned int)(i * 3),
			    &(struct manager){ .channel = channel, .id = id }));
		TRY(all_flushed(&e, &l));
		TRY(close_all());
	}
	return NULL;
}

static const char *wait_exit(struct peer *peer, unsigned int ms)
{
	uint64_t end = now_ms() + ms;
	int status;
	pid_t got;

	while ((got = waitpid(peer->pid, &status, WNOHANG)) == 0 && now_ms() < end)
		sleep_ms(1);
	ENSURE(got == peer->pid, "the program does not end");
	peer->pid = 0;
	close(peer->fd);
	ENSURE(!WIFSIGNALED(status), "the program is killed by signal %d", WTERMSIG(status));
	ENSURE(WEXITSTATUS(status) == 0, "the program ends with %d", WEXITSTATUS(status));
	return NULL;
}

/* A program ends during its traffic, promptly and with its own exit status. */
static const char *program_ends(size_t how)
{
	static const char *const ways[] = { "exit", "_exit", "close", "close_device_first" };

	for (size_t i = 0; i < rounds; i++) {
		struct hello h;
		static struct peer peer; /* static, because the clean-up after the test uses it */

		TRY(start_peer(&peer, ways[how]));
		TRY(receive_hello(peer.fd, &h));
		h.qpn = (uint32_t)(next_random() % 20);
		TRY(send_hello(peer.fd, &h));
		TRY(wait_exit(&peer, 10000));
		TRY(close_all());
	}
	return NULL;
}

/* ---------------------------------------------------------------- many repetitions */

struct holdings {
	long fds, threads, kib;
};

static long entries(const char *dir)
{
	DIR *d = opendir(dir);
	long n = 0;

	while (d && readdir(d))
		n++;
	if (d)
		closedir(d);
	return n;
}

static struct holdings holdings(void)
{
	struct holdings h = { .fds = entries("/proc/self/fd"), .threads = entries("/proc/self/task") };
	FILE *f = fopen("/proc/self/status", "r");
	char line[256];

	while (f && fgets(line, sizeof line, f))
		sscanf(line, "RssAnon: %ld", &h.kib);
	if (f)
		fclose(f);
	return h;
}

/* Waits up to 5 s for a thread of the device to close resources. Returns what the process holds then. */
static struct holdings settled_holdings(const struct holdings *wanted)
{
	uint64_t end = now_ms() + 5000;
	struct holdings h;

	do {
		h = holdings();
		if (h.fds <= wanted->fds && h.threads <= wanted->threads)
			break;
		sleep_ms(10);
	} while (now_ms() < end);
	return h;
}

/* The heap may grow by this much, whatever the number of cycles. */
#define SLACK_KIB 2048

static const char *nothing_grew(const struct holdings *before, const char *what)
{
	struct holdings after = settled_holdings(before);

	ENSURE(after.fds <= before->fds, "%s: %ld descriptors, %ld before", what, after.fds, before->fds);
	ENSURE(after.threads <= before->threads, "%s: %ld threads, %ld before", what, after.threads, before->threads);
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__ /* sanitizers keep freed memory */
	ENSURE(after.kib <= before->kib + SLACK_KIB, "%s: %ld KiB of memory, %ld before", what, after.kib, before->kib);
#endif
	return NULL;
}

/* Runs `once` to warm up, 20 times and a tenth of `count`, and then `count` times, in which resource usage must not grow. */
static const char *repeated(const char *(*once)(void), size_t count)
{
	struct holdings before;

	for (size_t i = 0; i < 20 + count / 10; i++) {
		TRY(once());
		TRY(close_all());
	}
	sleep_ms(100);
	before = holdings();
	for (size_t i = 0; i < count; i++) {
		alarm(DEFAULT_SECONDS); /* the time limit applies to each cycle */
		TRY(once());
		TRY(close_all());
	}
	return nothing_grew(&before, "after all cycles");
}

static const char *one_message(struct end *a, struct end *b)
{
	struct region src, dst;
	struct ibv_sge from, to;
	struct ibv_send_wr wr;

	TRY(new_region(&src, a->pd, 1000, 0));
	TRY(new_region(&dst, b->pd, 1000, IBV_ACCESS_LOCAL_WRITE));
	from = sge_of(&src, 0, 1000);
	to = sge_of(&dst, 0, 1000);
	TRY(post_recv(b->qp, 1, &to, 1));
	wr = send_wr(2, IBV_WR_SEND, &from, 1);
	TRY(post(a->qp, &wr));
	TRY(expect_ok(b->rcq, 1, IBV_WC_RECV, NULL));
	return expect_ok(a->scq, 2, IBV_WC_SEND, NULL);
}

static const char *verbs_once(void)
{
	struct pair p;

	TRY(open_pair(&p, &usual));
	return one_message(&p.a, &p.b);
}

static const char *verbs_cycles(size_t arg)
{
	(void)arg;
	TRY(open_device());
	return repeated(verbs_once, cycles);
}

static const char *abandoned_once(void)
{
	struct pair p;

	TRY(open_pair(&p, &usual));
	for (int i = 0; i < 10; i++) { /* sends and receives are still posted when the objects are destroyed */
		struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, NULL, 0);

		TRY(post_recv(p.a.qp, 1, NULL, 0));
		TRY(post(p.a.qp, &wr));
	}
	return NULL;
}

static const char *abandoned_cycles(size_t arg)
{
	(void)arg;
	TRY(open_device());
	return repeated(abandoned_once, cycles);
}

static struct rdma_event_channel *server_channel, *client_channel;
static struct rdma_cm_id *cm_listener;

static const char *cm_once(void)
{
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct sockaddr_in address = own_address(ntohs(rdma_get_src_port(cm_listener)));
	struct rdma_cm_id *client, *server;
	struct end a, b;

	ENSURE(!rdma_create_id(client_channel, &client, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(close_id, client, "client id");
	ENSURE(!rdma_resolve_addr(client, NULL, (struct sockaddr *)&address, 2000), "rdma_resolve_addr");
	TRY(wait_event(client_channel, RDMA_CM_EVENT_ADDR_RESOLVED, NULL));
	ENSURE(!rdma_resolve_route(client, 2000), "rdma_resolve_route");
	TRY(wait_event(client_channel, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL));
	TRY(cm_end(client, &a));
	ENSURE(!rdma_connect(client, &param), "rdma_connect: %s", strerror(errno));
	TRY(wait_event(server_channel, RDMA_CM_EVENT_CONNECT_REQUEST, &server));
	keep(close_id, server, "server id");
	TRY(cm_end(server, &b));
	ENSURE(!rdma_accept(server, &param), "rdma_accept: %s", strerror(errno));
	TRY(wait_event(client_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	TRY(wait_event(server_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	TRY(one_message(&a, &b));
	ENSURE(!rdma_disconnect(client), "rdma_disconnect: %s", strerror(errno));
	TRY(wait_event(server_channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
	rdma_disconnect(server);
	return wait_event(client_channel, RDMA_CM_EVENT_DISCONNECTED, NULL);
}

static const char *cm_cycles(size_t arg)
{
	struct sockaddr_in address = own_address(0);
	const char *reason;

	(void)arg;
	server_channel = rdma_create_event_channel();
	client_channel = rdma_create_event_channel();
	ENSURE(server_channel && client_channel, "rdma_create_event_channel: %s", strerror(errno));
	ENSURE(!rdma_create_id(server_channel, &cm_listener, NULL, RDMA_PS_TCP), "rdma_create_id: %s",
	       strerror(errno));
	ENSURE(!rdma_bind_addr(cm_listener, (struct sockaddr *)&address) && !rdma_listen(cm_listener, 16),
	       "rdma_listen: %s", strerror(errno));
	reason = repeated(cm_once, cycles);
	if (reason)
		return reason;
	ENSURE(!rdma_destroy_id(cm_listener), "rdma_destroy_id: %s", strerror(errno));
	rdma_destroy_event_channel(server_channel);
	rdma_destroy_event_channel(client_channel);
	return NULL;
}

static const char *device_once(void)
{
	struct ibv_context *usual_device = device;
	const char *reason;
	struct pair p;

	device = NULL;
	reason = open_pair(&p, &usual);
	if (!reason)
		reason = one_message(&p.a, &p.b);
	if (!reason)
		reason = close_all();
	if (!reason && ibv_close_device(device))
		reason = because("ibv_close_device: %s", strerror(errno));
	device = usual_device;
	return reason;
}

static const char *device_cycles(size_t arg)
{
	(void)arg;
	TRY(open_device());
	return repeated(device_once, cycles / 5);
}

/* ---------------------------------------------------------------- threads */

struct worker {
	struct pair p;
	size_t count;
	char reason[256];
};

static const char *work(struct worker *w)
{
	struct region src, dst;
	struct ibv_sge from, to;
	struct ibv_send_wr wr;

	src.whole = dst.whole = NULL;
	src.at = malloc(3000);
	dst.at = malloc(3000);
	ENSURE(src.at && dst.at, "no memory");
	src.mr = ibv_reg_mr(w->p.a.pd, src.at, 3000, 0);
	dst.mr = ibv_reg_mr(w->p.b.pd, dst.at, 3000, IBV_ACCESS_LOCAL_WRITE);
	ENSURE(src.mr && dst.mr, "ibv_reg_mr: %s", strerror(errno));
	from = sge_of(&src, 0, 3000);
	to = sge_of(&dst, 0, 3000);
	for (uint32_t i = 0; i < w->count; i++) {
		fill_pattern(src.at, 3000, i);
		TRY(post_recv(w->p.b.qp, i, &to, 1));
		wr = send_wr(i, IBV_WR_SEND, &from, 1);
		TRY(post(w->p.a.qp, &wr));
		TRY(expect_ok(w->p.b.rcq, i, IBV_WC_RECV, NULL));
		TRY(expect_ok(w->p.a.scq, i, IBV_WC_SEND, NULL));
		TRY(same_pattern(dst.at, 3000, i));
	}
	ENSURE(!ibv_dereg_mr(src.mr) && !ibv_dereg_mr(dst.mr), "ibv_dereg_mr");
	free(src.at);
	free(dst.at);
	return NULL;
}

static void *run_worker(void *arg)
{
	struct worker *w = arg;
	const char *reason = work(w);

	if (reason)
		snprintf(w->reason, sizeof w->reason, "%s", reason);
	return NULL;
}

/* Each thread has its own pair. */
static const char *threads_apart(size_t count)
{
	static struct worker workers[8];
	pthread_t threads[8];

	TRY(open_device());
	memset(workers, 0, sizeof workers);
	for (size_t i = 0; i < COUNT(workers); i++) {
		workers[i].count = count;
		TRY(open_pair(&workers[i].p, &usual));
	}
	for (size_t i = 0; i < COUNT(workers); i++)
		ENSURE(!pthread_create(&threads[i], NULL, run_worker, &workers[i]), "pthread_create");
	for (size_t i = 0; i < COUNT(workers); i++)
		pthread_join(threads[i], NULL);
	for (size_t i = 0; i < COUNT(workers); i++)
		ENSURE(!workers[i].reason[0], "thread %zu: %s", i, workers[i].reason);
	return NULL;
}

struct crowd {
	struct pair *p;
	struct region *src;
	size_t count, number;
	int failed;
};

static void *post_in_a_crowd(void *arg)
{
	struct crowd *c = arg;

	for (size_t i = 0; i < c->count; i++) {
		struct ibv_sge from = sge_of(c->src, c->number * 64, 64);
		struct ibv_send_wr wr = send_wr(c->number * 100000 + i, IBV_WR_SEND_WITH_IMM, &from, 1), *bad;
		int rc;

		wr.imm_data = htonl((uint32_t)(c->number * 100000 + i));
		while ((rc = ibv_post_send(c->p->a.qp, &wr, &bad)) == ENOMEM)
			sched_yield();
		if (rc)
			c->failed = rc;
	}
	return NULL;
}

/* Threads post to one queue pair while another one polls for both ends. No message is lost, duplicated or mixed up. */
static const char *threads_together(size_t count)
{
	enum { THREADS = 4 };
	struct crowd crowd[THREADS];
	pthread_t threads[THREADS];
	size_t next[THREADS] = { 0 }, sent[THREADS] = { 0 };
	size_t received = 0, completed = 0;
	uint64_t end = now_ms() + 40000;
	struct region src, dst;
	struct pair p;

	TRY(open_pair(&p, &(struct want){ .send_wr = 64, .recv_wr = 128, .sge = 1 }));
	TRY(new_region(&src, p.a.pd, THREADS * 64, 0));
	TRY(new_region(&dst, p.b.pd, 128 * 64, IBV_ACCESS_LOCAL_WRITE));
	fill_pattern(src.at, src.len, 8);
	for (uint64_t i = 0; i < 128; i++) {
		struct ibv_sge to = sge_of(&dst, i * 64, 64);

		TRY(post_recv(p.b.qp, i, &to, 1));
	}
	for (size_t i = 0; i < THREADS; i++) {
		crowd[i] = (struct crowd){ .p = &p, .src = &src, .count = count, .number = i };
		ENSURE(!pthread_create(&threads[i], NULL, post_in_a_crowd, &crowd[i]), "pthread_create");
	}
	while (received < THREADS * count || completed < THREADS * count) {
		struct ibv_wc wc;

		ENSURE(now_ms() < end, "stuck: %zu received, %zu completed of %zu", received, completed,
		       THREADS * count);
		if (ibv_poll_cq(p.b.rcq, 1, &wc) > 0) {
			struct ibv_sge to = sge_of(&dst, wc.wr_id * 64, 64);
			size_t thread = ntohl(wc.imm_data) / 100000;

			ENSURE(wc.status == IBV_WC_SUCCESS, "receive: %s", ibv_wc_status_str(wc.status));
			ENSURE(thread < THREADS && ntohl(wc.imm_data) % 100000 == next[thread],
			       "message %u, expected %zu of its thread", ntohl(wc.imm_data), next[thread]);
			next[thread]++;
			TRY(same_pattern_from(dst.at + wc.wr_id * 64, 64, 8, thread * 64));
			TRY(post_recv(p.b.qp, wc.wr_id, &to, 1));
			received++;
		}
		if (ibv_poll_cq(p.a.scq, 1, &wc) > 0) {
			size_t thread = wc.wr_id / 100000;

			ENSURE(wc.status == IBV_WC_SUCCESS, "send: %s", ibv_wc_status_str(wc.status));
			ENSURE(thread < THREADS && wc.wr_id % 100000 == sent[thread], "send %llu out of order",
			       (unsigned long long)wc.wr_id);
			sent[thread]++;
			completed++;
		}
	}
	for (size_t i = 0; i < THREADS; i++) {
		pthread_join(threads[i], NULL);
		ENSURE(!crowd[i].failed, "ibv_post_send: %s", strerror(crowd[i].failed));
	}
	return NULL;
}

static void *churn(void *arg)
{
	struct worker *w = arg;
	const char *reason = NULL;

	for (size_t i = 0; i < w->count && !reason; i++) {
		struct ibv_pd *pd = ibv_alloc_pd(device);
		struct ibv_cq *cq = ibv_create_cq(device, 16, NULL, NULL, 0);
		struct ibv_qp_init_attr init = {
			.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		};
		struct ibv_qp *qp = pd && cq ? ibv_create_qp(pd, &init) : NULL;

		if (!qp)
			reason = "ibv_create_qp fails";
		else if (to_init(qp, &usual) || post_recv(qp, 1, NULL, 0) || ibv_destroy_qp(qp))
			reason = "a verb of the queue pair fails";
		else if (ibv_destroy_cq(cq) || ibv_dealloc_pd(pd))
			reason = "closing fails";
	}
	if (reason)
		snprintf(w->reason, sizeof w->reason, "%s", reason);
	return NULL;
}

/* Some threads create and destroy queue pairs while others exchange data. */
static const char *threads_churn(size_t count)
{
	static struct worker workers[4];
	pthread_t threads[4];

	TRY(open_device());
	memset(workers, 0, sizeof workers);
	for (size_t i = 0; i < 2; i++)
		TRY(open_pair(&workers[i].p, &usual));
	for (size_t i = 0; i < 4; i++) {
		workers[i].count = count;
		ENSURE(!pthread_create(&threads[i], NULL, i < 2 ? run_worker : churn, &workers[i]), "pthread_create");
	}
	for (size_t i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	for (size_t i = 0; i < 4; i++)
		ENSURE(!workers[i].reason[0], "thread %zu: %s", i, workers[i].reason);
	return NULL;
}

/* One thread waits for completion events in poll(2); another sends to it. */
struct sleeper {
	struct end *e;
	size_t count;
	char reason[256];
};

static const char *sleep_and_take(struct sleeper *s)
{
	for (size_t got = 0; got < s->count;) {
		struct ibv_cq *cq;
		struct ibv_wc wc;
		void *context;

		TRY(readable(s->e->channel->fd, WAIT_MS));
		ENSURE(!ibv_get_cq_event(s->e->channel, &cq, &context), "ibv_get_cq_event: %s", strerror(errno));
		ibv_ack_cq_events(cq, 1);
		ENSURE(!ibv_req_notify_cq(cq, 0), "ibv_req_notify_cq");
		while (ibv_poll_cq(cq, 1, &wc) > 0) {
			ENSURE(wc.status == IBV_WC_SUCCESS, "receive %zu: %s", got, ibv_wc_status_str(wc.status));
			TRY(post_recv(s->e->qp, 1, NULL, 0));
			got++;
		}
	}
	return NULL;
}

static void *run_sleeper(void *arg)
{
	struct sleeper *s = arg;
	const char *reason = sleep_and_take(s);

	if (reason)
		snprintf(s->reason, sizeof s->reason, "%s", reason);
	return NULL;
}

static const char *thread_sleeps(size_t count)
{
	static struct sleeper sleeper;
	struct pair p;
	pthread_t thread;

	TRY(open_pair(&p, &(struct want){ .channels = true }));
	for (int i = 0; i < 64; i++)
		TRY(post_recv(p.b.qp, 1, NULL, 0));
	ENSURE(!ibv_req_notify_cq(p.b.rcq, 0), "ibv_req_notify_cq");
	sleeper = (struct sleeper){ .e = &p.b, .count = count };
	ENSURE(!pthread_create(&thread, NULL, run_sleeper, &sleeper), "pthread_create");
	for (size_t i = 0; i < count; i++) {
		struct ibv_send_wr wr = send_wr(i, IBV_WR_SEND, NULL, 0);

		TRY(post(p.a.qp, &wr));
		TRY(expect_ok(p.a.scq, i, IBV_WC_SEND, NULL));
		if (i % 50 == 0)
			sleep_ms(3); /* a pause, so that the other thread sometimes sleeps */
	}
	pthread_join(thread, NULL);
	ENSURE(!sleeper.reason[0], "sleeping thread: %s", sleeper.reason);
	return NULL;
}

/* What a waiting thread waits for. */
struct waiter {
	struct ibv_comp_channel *completions;
	struct rdma_event_channel *events;
};

static void *wait_for_nothing(void *arg)
{
	struct waiter *w = arg;
	struct rdma_cm_event *event;
	struct ibv_cq *cq;
	void *context;

	if (w->completions)
		ibv_get_cq_event(w->completions, &cq, &context);
	else
		rdma_get_cm_event(w->events, &event);
	return NULL;
}

/*
 * Waiting threads are cancelled, at the beginning of the wait or later. The objects that they waited for still work and
 * can be destroyed.
 */
static const char *threads_cancelled(size_t count)
{
	struct waiter waiter = { 0 };
	struct holdings before;
	struct ibv_cq *cq;
	struct pair p;
	void *context;

	TRY(open_pair(&p, &usual)); /* opens the descriptors and threads that remain after the first use of the device */
	TRY(close_all());
	before = holdings();
	TRY(open_pair(&p, &(struct want){ .channels = true }));
	waiter.events = rdma_create_event_channel();
	ENSURE(waiter.events, "rdma_create_event_channel: %s", strerror(errno));
	keep(close_event_channel, waiter.events, "event channel");
	for (size_t i = 0; i < count; i++) {
		pthread_t thread;
		void *result;

		waiter.completions = i % 2 ? p.b.channel : NULL;
		ENSURE(!pthread_create(&thread, NULL, wait_for_nothing, &waiter), "pthread_create");
		sleep_ms((unsigned int)(next_random() % 60));
		ENSURE(!pthread_cancel(thread) && !pthread_join(thread, &result), "pthread_cancel");
		ENSURE(result == PTHREAD_CANCELED, "the thread was not cancelled");
	}
	TRY(post_recv(p.b.qp, 1, NULL, 0));
	ENSURE(!ibv_req_notify_cq(p.b.rcq, 0), "ibv_req_notify_cq");
	struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, NULL, 0);
	TRY(post(p.a.qp, &wr));
	TRY(readable(p.b.channel->fd, WAIT_MS));
	ENSURE(!ibv_get_cq_event(p.b.channel, &cq, &context), "ibv_get_cq_event: %s", strerror(errno));
	ibv_ack_cq_events(cq, 1);
	TRY(expect_ok(p.b.rcq, 1, IBV_WC_RECV, NULL));
	TRY(expect_ok(p.a.scq, 1, IBV_WC_SEND, NULL));
	TRY(close_all());
	return nothing_grew(&before, "after cancelled threads");
}

struct cancellation {
	const char *reason;
	bool done;
};

/*
 * Calls many verbs. The program itself calls no cancellation point. The test checks that no verb acts on the pending
 * cancellation.
 */
static const char *call_verbs(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *info;
	struct sockaddr_in peer = { .sin_family = AF_INET, .sin_port = htons(9), .sin_addr = { htonl(INADDR_LOOPBACK) } };
	struct ibv_context *another = ibv_open_device(device->device);
	struct rdma_cm_id *id, *listener;
	struct ibv_port_attr attr;
	struct region from, to;
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct pair p;

	ENSURE(another, "ibv_open_device: %s", strerror(errno));
	ENSURE(!ibv_query_port(another, PORT, &attr), "ibv_query_port");
	ibv_get_device_guid(another->device);
	TRY(open_pair(&p, &usual));
	TRY(new_region(&from, p.a.pd, 100000, ALL_ACCESS));
	TRY(new_region(&to, p.b.pd, 100000, ALL_ACCESS));
	sge = sge_of(&to, 0, to.len);
	TRY(post_recv(p.b.qp, 1, &sge, 1));
	sge = sge_of(&from, 0, from.len);
	wr = send_wr(2, IBV_WR_SEND, &sge, 1);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.b.rcq, 1, IBV_WC_RECV, NULL));
	TRY(expect_ok(p.a.scq, 2, IBV_WC_SEND, NULL));
	TRY(close_all());
	ENSURE(!ibv_close_device(another), "ibv_close_device");
	ENSURE(!rdma_getaddrinfo("localhost", "0", &hints, &info), "rdma_getaddrinfo");
	ENSURE(!rdma_create_ep(&listener, info, NULL, NULL), "rdma_create_ep: %s", strerror(errno));
	ENSURE(!rdma_listen(listener, 1), "rdma_listen: %s", strerror(errno));
	rdma_freeaddrinfo(info);
	ENSURE(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	/* waits, because the id has no event channel */
	ENSURE(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&peer, 1000), "rdma_resolve_addr: %s", strerror(errno));
	ENSURE(!rdma_destroy_id(id), "rdma_destroy_id: %s", strerror(errno));
	rdma_destroy_ep(listener);
	return NULL;
}

static void *with_pending_cancel(void *arg)
{
	struct cancellation *d = arg;

	pthread_cancel(pthread_self());
	d->reason = call_verbs();
	d->done = true;
	pthread_testcancel();
	d->reason = "the thread was not cancelled";
	return NULL;
}

/* A thread with a pending cancellation completes all verbs, and is cancelled afterwards. */
static const char *cancelled_between_verbs(size_t arg)
{
	struct cancellation d = { 0 };
	pthread_t thread;
	void *result;

	(void)arg;
	TRY(open_device());
	ENSURE(!pthread_create(&thread, NULL, with_pending_cancel, &d), "pthread_create");
	ENSURE(!pthread_join(thread, &result), "pthread_join");
	ENSURE(d.done, "the thread was cancelled inside a verb");
	ENSURE(!d.reason, "%s", d.reason);
	ENSURE(result == PTHREAD_CANCELED, "the thread was not cancelled");
	return NULL;
}

static void *take_requests(void *listener)
{
	struct rdma_cm_id *id;

	rdma_get_request(listener, &id);
	return NULL;
}

/* A server that waits for connections can be cancelled, before and during the wait. */
static const char *request_cancelled(size_t count)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *info;
	struct rdma_cm_id *listener;

	TRY(open_device());
	ENSURE(!rdma_getaddrinfo("localhost", "0", &hints, &info), "rdma_getaddrinfo");
	ENSURE(!rdma_create_ep(&listener, info, NULL, NULL), "rdma_create_ep: %s", strerror(errno));
	rdma_freeaddrinfo(info);
	ENSURE(!rdma_listen(listener, 1), "rdma_listen: %s", strerror(errno));
	for (size_t i = 0; i < count; i++) {
		pthread_t thread;
		void *result;

		ENSURE(!pthread_create(&thread, NULL, take_requests, listener), "pthread_create");
		sleep_ms((unsigned int)(next_random() % 60));
		ENSURE(!pthread_cancel(thread) && !pthread_join(thread, &result), "pthread_cancel");
		ENSURE(result == PTHREAD_CANCELED, "the thread was not cancelled");
	}
	rdma_destroy_ep(listener);
	return NULL;
}

/* A peer is stopped for two seconds. With a sufficient time-out, no message is lost. */
static const char *stopped_peer(size_t arg)
{
	static const struct want patient = { .timeout = 20, .retry = 7 };
	struct hello mine, theirs;
	struct ledger l = { 0 };
	static struct peer peer; /* static, because the clean-up after the test uses it */
	struct region r;
	struct end e;

	(void)arg;
	TRY(open_device());
	TRY(open_end(&e, &patient));
	TRY(new_region(&r, e.pd, PIECE, ALL_ACCESS));
	TRY(to_init(e.qp, &patient));
	while (l.recvs < WINDOW)
		TRY(post_receive(&e, &r, &l));
	mine = (struct hello){ .qpn = e.qp->qp_num, .rkey = r.mr->rkey, .addr = (uintptr_t)r.at };
	TRY(start_peer(&peer, "patient"));
	TRY(send_hello(peer.fd, &mine));
	TRY(receive_hello(peer.fd, &theirs));
	TRY(to_rtr(e.qp, theirs.qpn, &patient));
	TRY(to_rts(e.qp, &patient));
	TRY(receive_hello(peer.fd, &theirs));
	for (int phase = 0; phase < 3; phase++) {
		uint64_t end = now_ms() + (phase == 1 ? 2000 : 300);

		if (phase)
			kill(peer.pid, phase == 1 ? SIGSTOP : SIGCONT);
		while (now_ms() < end) {
			if (l.sends < l.sends_done + WINDOW)
				TRY(post_one(&e, &r, &theirs, &l));
			TRY(settle(&e, &l));
			while (l.recvs < l.recvs_done + WINDOW)
				TRY(post_receive(&e, &r, &l));
			ENSURE(!l.failed, "send %llu fails: %s", (unsigned long long)l.sends_done,
			       ibv_wc_status_str(l.first_error));
		}
	}
	return NULL;
}

/* Does the same as killed_peer and missing_peer with RC over reliable datagrams if supported, with and without packet loss. */
static const char *over_datagrams(size_t bad)
{
	setenv("ANYWARP_RC", "udp", 1);
	if (bad)
		setenv("ANYWARP_FAULTS", "loss=2%,dup=2%,reorder=2%,seed=3", 1);
	/* A dead peer is detected later than with TCP. */
	rounds = rounds < 2 ? rounds : 2;
	TRY(killed_peer(0));
	return missing_peer(0);
}

static const struct test tests[] = {
	{ "threads_cancelled", threads_cancelled, 20, 0, false },
	{ "cancelled_between_verbs", cancelled_between_verbs, 0, 0, false },
	{ "request_cancelled", request_cancelled, 10, 0, false },
	{ "stopped_peer", stopped_peer, 0, 0, false },
	{ "missing_peer", missing_peer, 0, 0, false },
	{ "killed_peer", killed_peer, 0, 300, false },
	{ "peer_takes_and_ends", peer_takes_and_ends, 0, 300, false },
	{ "killed_cm_peer", killed_cm_peer, 0, 300, false },
	{ "killed_peer_over_datagrams", over_datagrams, 0, 120, true },
	{ "killed_peer_with_loss", over_datagrams, 1, 120, true },
	{ "program_exits", program_ends, 0, 120, false },
	{ "program_exits_at_once", program_ends, 1, 120, false },
	{ "program_closes", program_ends, 2, 120, false },
	{ "program_closes_device_first", program_ends, 3, 120, false },
	{ "threads_apart", threads_apart, 500, 120, false },
	{ "threads_together", threads_together, 5000, 120, false },
	{ "threads_churn", threads_churn, 300, 120, false },
	{ "thread_sleeps", thread_sleeps, 2000, 120, false },
	{ "verbs_cycles", verbs_cycles, 0, 600, false },
	{ "abandoned_cycles", abandoned_cycles, 0, 600, false },
	{ "cm_cycles", cm_cycles, 0, 600, false },
	{ "device_cycles", device_cycles, 0, 600, false },
};

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "--peer"))
		return be_peer(argv[2], atoi(argv[3]));
	for (int i = 1; i + 1 < argc; i++) {
		size_t *number = !strcmp(argv[i], "--rounds") ? &rounds : !strcmp(argv[i], "--cycles") ? &cycles : NULL;

		if (!strcmp(argv[i], "--seed"))
			seed = strtoull(argv[i + 1], NULL, 0) | 1;
		else if (number)
			*number = strtoul(argv[i + 1], NULL, 0);
		else
			continue;
		argv[i + 1] = "-"; /* no test has this name */
	}
	return run_tests(tests, COUNT(tests), argc, argv);
}
