/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Many queue pairs whose streams share one TCP connection, the trunk. The settings are the default ones, except that processes of one
 * host use no shared memory. The number of the process's sockets shows whether the streams have moved: a trunk within one process adds two.
 */
#include "ends.h"

#include <dirent.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define PAIRS 24
#define WORD 64u
/* Enough requests of each queue pair, one at a time, for the offer of a trunk. */
#define ROUNDS 80
#define LONG (1u << 20)
#define AFTER_IT_MOVED 400u

static const struct want usual = { .send_wr = 16, .recv_wr = 16, .sge = 1 };

/* Queue pairs in pairs, with common completion queues. `from` is read by their requests, `to` is written. */
struct many {
	struct end a[PAIRS], b[PAIRS];
	struct ibv_pd *pd;
	struct ibv_cq *sends, *receives;
	struct region from, to;
	size_t each; /* bytes of `from` and `to` for each pair */
};

/* The number of open TCP sockets. */
static int sockets(void)
{
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *entry;
	int count = 0;

	while (dir && (entry = readdir(dir))) {
		int type = 0, fd = atoi(entry->d_name);
		socklen_t size = sizeof type;

		if (!getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) && type == SOCK_STREAM)
			count++;
	}
	if (dir)
		closedir(dir);
	return count;
}

static const char *new_one(struct many *m, struct end *e)
{
	struct ibv_qp_init_attr init = {
		.send_cq = m->sends, .recv_cq = m->receives, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = usual.send_wr, .max_recv_wr = usual.recv_wr, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	*e = (struct end){ .pd = m->pd, .scq = m->sends, .rcq = m->receives };
	e->qp = ibv_create_qp(m->pd, &init);
	ENSURE(e->qp, "ibv_create_qp: %s", strerror(errno));
	return NULL;
}

static int close_many(void *what)
{
	struct many *m = what;
	int failed = 0;

	for (int i = 0; i < PAIRS; i++) {
		failed |= m->a[i].qp && ibv_destroy_qp(m->a[i].qp);
		failed |= m->b[i].qp && ibv_destroy_qp(m->b[i].qp);
	}
	return failed;
}

/* Opens the pairs, without connecting them. */
static const char *open_many(struct many *m, size_t each)
{
	*m = (struct many){ .each = each };
	TRY(open_device());
	m->pd = new_pd();
	m->sends = new_cq(4096, NULL);
	m->receives = new_cq(4096, NULL);
	ENSURE(m->pd && m->sends && m->receives, "no room: %s", strerror(errno));
	TRY(new_region(&m->from, m->pd, PAIRS * each, ALL_ACCESS));
	TRY(new_region(&m->to, m->pd, PAIRS * each, ALL_ACCESS));
	keep(close_many, m, "queue pairs");
	for (int i = 0; i < PAIRS; i++) {
		TRY(new_one(m, &m->a[i]));
		TRY(new_one(m, &m->b[i]));
	}
	return NULL;
}

/* Waits for one successful completion of each pair from `first` on. */
static const char *all_done(struct many *m, struct ibv_cq *cq, int first)
{
	bool seen[PAIRS] = { false };

	for (int i = first; i < PAIRS; i++) {
		struct ibv_wc wc;

		TRY(next_wc(cq, &wc, WAIT_MS));
		ENSURE(wc.status == IBV_WC_SUCCESS, "pair %d: %s", (int)wc.wr_id, ibv_wc_status_str(wc.status));
		ENSURE((int)wc.wr_id >= first && wc.wr_id < PAIRS && !seen[wc.wr_id], "pair %d completes twice",
		       (int)wc.wr_id);
		seen[wc.wr_id] = true;
	}
	(void)m;
	return NULL;
}

static const char *write_one(struct many *m, const struct end *e, int i, size_t len)
{
	struct ibv_sge sge = sge_of(&m->from, (size_t)i * m->each, len);
	struct ibv_send_wr wr = rdma_wr((uint64_t)i, IBV_WR_RDMA_WRITE, &sge, 1, &m->to, (size_t)i * m->each);

	return post(e->qp, &wr);
}

/* Each pair from `first` on writes some bytes, one Write at a time, in turns in both directions. */
static const char *write_words(struct many *m, int first, int rounds)
{
	for (int round = 0; round < rounds; round++) {
		for (int i = first; i < PAIRS; i++) {
			memset(m->from.at + (size_t)i * m->each, round + i, WORD);
			TRY(write_one(m, round % 2 ? &m->b[i] : &m->a[i], i, WORD));
		}
		TRY(all_done(m, m->sends, first));
		for (int i = first; i < PAIRS; i++) {
			struct ibv_qp *target = round % 2 ? m->a[i].qp : m->b[i].qp;

			/* ThreadSanitizer does not know that a completion orders accesses to memory. The locks of the queue pairs do. */
			TRY(state_is(target, IBV_QPS_RTS));
			TRY(all_bytes(m->to.at + (size_t)i * m->each, WORD, (uint8_t)(round + i), "what was written"));
			TRY(state_is(m->a[i].qp, IBV_QPS_RTS));
			TRY(state_is(m->b[i].qp, IBV_QPS_RTS));
		}
	}
	return NULL;
}

/* Connects the pairs and uses them until they have moved. */
static const char *move_many(struct many *m)
{
	int before;

	for (int i = 0; i < PAIRS; i++)
		TRY(connect_ends(&m->a[i], &m->b[i], &usual));
	TRY(write_words(m, 0, 2));
	before = sockets();
	TRY(write_words(m, 0, ROUNDS));
	for (uint64_t end = now_ms() + WAIT_MS; sockets() < before + 2 && now_ms() < end;)
		TRY(write_words(m, 0, 1));
	ENSURE(sockets() == before + 2, "%d sockets before, %d after", before, sockets());
	/* A trunk that no queue pair uses is closed after a second. */
	for (uint64_t end = now_ms() + 1500; now_ms() < end;)
		TRY(write_words(m, 0, 1));
	ENSURE(sockets() == before + 2, "%d sockets before, %d after a while", before, sockets());
	return NULL;
}

static const char *moves(size_t arg)
{
	static struct many m;

	(void)arg;
	TRY(open_many(&m, WORD));
	TRY(move_many(&m));
	return guards_untouched(&m.to);
}

static const char *switched_off(size_t arg)
{
	static struct many m;
	int before;

	(void)arg;
	setenv("ANYWARP_TRUNK", "0", 1);
	TRY(open_many(&m, WORD));
	for (int i = 0; i < PAIRS; i++)
		TRY(connect_ends(&m.a[i], &m.b[i], &usual));
	TRY(write_words(&m, 0, 2));
	before = sockets();
	TRY(write_words(&m, 0, 2 * ROUNDS));
	ENSURE(sockets() == before, "%d sockets before, %d after", before, sockets());
	return NULL;
}

/* The first pair has no receive posted. The others exchange messages meanwhile. */
static const char *neglected_one(size_t arg)
{
	static struct many m;
	struct ibv_sge to;

	(void)arg;
	TRY(open_many(&m, WORD));
	TRY(move_many(&m));
	fill_pattern(m.from.at, m.from.len, 7);
	memset(m.to.at, 0, m.to.len);
	for (int i = 0; i < PAIRS; i++) {
		struct ibv_sge from = sge_of(&m.from, (size_t)i * m.each, WORD);
		struct ibv_send_wr wr = send_wr((uint64_t)i, IBV_WR_SEND, &from, 1);

		to = sge_of(&m.to, (size_t)i * m.each, WORD);
		if (i > 0)
			TRY(post_recv(m.b[i].qp, (uint64_t)i, &to, 1));
		TRY(post(m.a[i].qp, &wr));
	}
	TRY(all_done(&m, m.receives, 1));
	TRY(all_done(&m, m.sends, 1));
	TRY(no_wc(m.sends, QUIET_MS));
	to = sge_of(&m.to, 0, WORD);
	TRY(post_recv(m.b[0].qp, 0, &to, 1));
	TRY(expect_ok(m.receives, 0, IBV_WC_RECV, NULL));
	TRY(expect_ok(m.sends, 0, IBV_WC_SEND, NULL));
	return same_pattern(m.to.at, m.to.len, 7);
}

/* Long Writes and Reads of all pairs at the same time, which fill the socket of the trunk. */
static const char *long_messages(size_t arg)
{
	static struct many m;

	(void)arg;
	TRY(open_many(&m, LONG));
	TRY(move_many(&m));
	fill_pattern(m.from.at, m.from.len, 9);
	memset(m.to.at, 0, m.to.len);
	for (int i = 0; i < PAIRS; i++) {
		struct ibv_sge sge = sge_of(&m.to, (size_t)i * m.each, LONG);
		struct ibv_send_wr wr = rdma_wr((uint64_t)i, IBV_WR_RDMA_READ, &sge, 1, &m.from, (size_t)i * m.each);

		if (i % 2)
			TRY(write_one(&m, &m.a[i], i, LONG));
		else
			TRY(post(m.a[i].qp, &wr));
	}
	TRY(all_done(&m, m.sends, 0));
	TRY(same_pattern(m.to.at, m.to.len, 9));
	return guards_untouched(&m.to);
}

/* Queue pairs leave the trunk in different ways, and the others go on. One pair connects again, and moves again. */
static const char *some_leave(size_t arg)
{
	static struct many m;
	struct ibv_wc wc;

	(void)arg;
	TRY(open_many(&m, WORD));
	TRY(move_many(&m));
	/* Pair 0 is destroyed at one end, while the other has requests. */
	TRY(write_one(&m, &m.b[0], 0, WORD));
	ENSURE(!ibv_destroy_qp(m.a[0].qp), "ibv_destroy_qp: %s", strerror(errno));
	m.a[0].qp = NULL;
	TRY(next_wc(m.sends, &wc, WAIT_MS));
	ENSURE(wc.wr_id == 0, "completion of pair %d", (int)wc.wr_id);
	/* Pair 1 fails: the key is wrong. */
	m.to.mr->rkey ^= 0x55;
	TRY(write_one(&m, &m.a[1], 1, WORD));
	m.to.mr->rkey ^= 0x55;
	TRY(expect_status(m.sends, 1, IBV_WC_REM_ACCESS_ERR));
	/* Pair 2 is reset. */
	TRY(to_state(m.a[2].qp, IBV_QPS_RESET));
	TRY(to_state(m.b[2].qp, IBV_QPS_RESET));
	TRY(write_words(&m, 3, 20));
	TRY(connect_ends(&m.a[2], &m.b[2], &usual));
	return write_words(&m, 2, 2 * ROUNDS);
}

/* All queue pairs are destroyed and others take their place, on a trunk that is open or just closing. */
static const char *again_and_again(size_t arg)
{
	static struct many m;

	TRY(open_many(&m, WORD));
	TRY(move_many(&m));
	for (size_t round = 0; round < arg; round++) {
		for (int i = 0; i < PAIRS; i++) {
			ENSURE(!ibv_destroy_qp(m.a[i].qp) && !ibv_destroy_qp(m.b[i].qp), "ibv_destroy_qp");
			m.a[i].qp = m.b[i].qp = NULL;
		}
		/* A trunk without queue pairs is closed after a second. */
		sleep_ms(round % 2 ? 995 : 0);
		for (int i = 0; i < PAIRS; i++) {
			TRY(new_one(&m, &m.a[i]));
			TRY(new_one(&m, &m.b[i]));
			TRY(connect_ends(&m.a[i], &m.b[i], &usual));
		}
		TRY(write_words(&m, 0, 2 * ROUNDS));
	}
	return NULL;
}

/* ---------------------------------------------------------------- a peer in another process */

struct hello {
	uint32_t qpn[PAIRS], rkey;
	uint64_t at;
};

static int kill_peer(void *pid)
{
	kill(*(pid_t *)pid, SIGKILL);
	return waitpid(*(pid_t *)pid, NULL, 0) < 0;
}

static const char *transfer(int out, int in, const struct hello *mine, struct hello *theirs)
{
	ENSURE(write(out, mine, sizeof *mine) == (ssize_t)sizeof *mine, "write: %s", strerror(errno));
	TRY(readable(in, WAIT_MS));
	ENSURE(read(in, theirs, sizeof *theirs) == (ssize_t)sizeof *theirs, "the other program has ended");
	return NULL;
}

/* Exchanges the numbers with the other process and connects. */
static const char *connect_many(struct many *m, int out, int in, struct hello *theirs)
{
	struct hello mine = { .rkey = m->to.mr->rkey, .at = (uintptr_t)m->to.at };

	for (int i = 0; i < PAIRS; i++) {
		TRY(to_init(m->a[i].qp, &usual));
		mine.qpn[i] = m->a[i].qp->qp_num;
	}
	TRY(transfer(out, in, &mine, theirs));
	for (int i = 0; i < PAIRS; i++) {
		TRY(to_rtr(m->a[i].qp, theirs->qpn[i], &usual));
		TRY(to_rts(m->a[i].qp, &usual));
	}
	return transfer(out, in, &mine, theirs);
}

/*
 * The peer is killed while each queue pair has requests. Each request ends exactly once, and after a request has failed, no later one of the same
 * queue pair succeeds.
 */
static const char *killed_peer(size_t arg)
{
	static struct many m;
	static pid_t pid;
	unsigned int posted[PAIRS] = { 0 }, ended[PAIRS] = { 0 }, done = 0;
	bool failed[PAIRS] = { false }, connected, killed = false;
	struct hello theirs;
	uint64_t until;
	int to[2], from[2], before = 0;

	ENSURE(!pipe(to) && !pipe(from), "pipe: %s", strerror(errno));
	pid = fork();
	if (pid == 0) {
		alarm(60);
		if (open_many(&m, WORD) || connect_many(&m, from[1], to[0], &theirs))
			_exit(1);
		for (;;)
			pause();
	}
	ENSURE(pid > 0, "fork: %s", strerror(errno));
	keep(kill_peer, &pid, "peer");
	TRY(open_many(&m, WORD));
	TRY(connect_many(&m, to[1], from[0], &theirs));
	until = now_ms() + WAIT_MS;
	while (now_ms() < until) {
		unsigned int left = 0;
		struct ibv_wc wc;

		for (int i = 0; i < PAIRS; i++) {
			struct ibv_sge sge = sge_of(&m.from, (size_t)i * WORD, WORD);
			struct ibv_send_wr wr = send_wr((uint64_t)i, IBV_WR_RDMA_WRITE, &sge, 1);

			wr.wr.rdma.remote_addr = theirs.at + (size_t)i * WORD;
			wr.wr.rdma.rkey = theirs.rkey;
			for (; !failed[i] && !killed && posted[i] - ended[i] < 4; posted[i]++)
				TRY(post(m.a[i].qp, &wr));
			left += posted[i] - ended[i];
		}
		connected = true;
		for (int i = 0; i < PAIRS; i++)
			connected &= ended[i] > 0;
		if (!before && connected)
			before = sockets();
		if (!killed && done >= (unsigned int)arg * PAIRS &&
		    (arg < AFTER_IT_MOVED || sockets() == before + 1)) {
			kill(pid, SIGKILL);
			killed = true;
		}
		if (left == 0)
			break;
		if (ibv_poll_cq(m.sends, 1, &wc) == 1) {
			ENSURE(wc.wr_id < PAIRS && ended[wc.wr_id] < posted[wc.wr_id], "too many completions");
			ENSURE(!failed[wc.wr_id] || wc.status == IBV_WC_WR_FLUSH_ERR, "%s after a failure",
			       ibv_wc_status_str(wc.status));
			ENSURE(killed || wc.status == IBV_WC_SUCCESS, "%s", ibv_wc_status_str(wc.status));
			failed[wc.wr_id] |= wc.status != IBV_WC_SUCCESS;
			ended[wc.wr_id]++;
			done++;
		}
	}
	ENSURE(killed, "%u requests have ended, with %d sockets, and %d before", done, sockets(), before);
	for (int i = 0; i < PAIRS; i++)
		ENSURE(posted[i] == ended[i], "pair %d: %u requests have not ended", i, posted[i] - ended[i]);
	return no_wc(m.sends, QUIET_MS);
}

static const struct test tests[] = {
	{ "moves", moves, 0, 0, true },
	{ "switched_off", switched_off, 0, 0, true },
	{ "neglected_one", neglected_one, 0, 0, true },
	{ "long_messages", long_messages, 0, 0, true },
	{ "some_leave", some_leave, 0, 0, true },
	{ "again_and_again", again_and_again, 6, 0, true },
	{ "peer_killed_before_it_moves", killed_peer, 8, 0, true },
	{ "peer_killed_while_it_moves", killed_peer, 66, 0, true },
	{ "peer_killed_after_it_moved", killed_peer, AFTER_IT_MOVED, 0, true },
};

int main(int argc, char **argv)
{
	setenv("ANYWARP_CARRIER", "tcp", 1);
	return run_tests(tests, COUNT(tests), argc, argv);
}
