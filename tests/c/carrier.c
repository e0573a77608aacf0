/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Peers on the same host that are offered shared memory for their stream, or offer it, and break the rules of that. Each
 * attacker is a process of its own that speaks through plain sockets. What it attacks has a good connection beside, which
 * must not stop for more than MAX_GAP_MS.
 */
#include "mpa.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

/* The memory of a connection: a page, and a ring for each direction. */
#define RING (256u << 10)
#define MEMORY_LEN (4096u + 2 * RING)
#define PROOF_AT 8

/* Control messages of anywarp (crates/core/src/wire/control.rs). */
enum { HELLO = 1, HANDOVER = 12 };
enum { OFFER = 0, TAKE = 1, REFUSE = 2, SWITCH = 3 };
#define CONTROL 0x0f
#define CONTROL_QUEUE 4
#define CAN_SHARE 2u

/* Requests after which memory is offered, and some more. */
#define REQUESTS 80u
/* How long an offer counts that is not answered. */
#define OFFER_LIFETIME_MS 5000u
#define MAX_GAP_MS 10.0

static struct {
	volatile bool stop;
	volatile unsigned int rounds;
	char wrong[160];
} *shared;

/* ---------------------------------------------------------------- an anywarp peer, by hand */

struct frame {
	uint8_t body[65536 + 8];
	size_t len;
};

static void control(struct wire *w, uint32_t kind, uint32_t arg, uint32_t seq, uint32_t extra)
{
	end_fpdu(w, begin_untagged(w, CONTROL, kind << 24 | arg, CONTROL_QUEUE, seq, extra), 0);
}

static bool send_control(int fd, uint32_t kind, uint32_t arg, uint32_t seq, uint32_t extra)
{
	struct wire w = { .len = 0 };

	control(&w, kind, arg, seq, extra);
	return send_all(fd, w.at, w.len);
}

static uint32_t word_of(const struct frame *f, size_t at)
{
	uint32_t n;

	memcpy(&n, f->body + at, 4);
	return be32toh(n);
}

/* Receives until a message about shared memory; false at the end of the stream or when nothing comes for the time-out. */
static bool next_handover(int fd, struct frame *f)
{
	uint8_t head[2];

	for (int i = 0; i < 100000; i++) {
		size_t rest;

		if (!receive_all(fd, head, 2))
			return false;
		f->len = (size_t)head[0] << 8 | head[1];
		rest = f->len + (4 - (f->len + 2) % 4) % 4 + 4;
		if (!receive_all(fd, f->body, rest))
			return false;
		if (f->len >= 18 && f->body[1] == OPERATION(CONTROL) && f->body[2] == HANDOVER)
			return true;
	}
	return false;
}

static void set_patience(int fd, unsigned int ms)
{
	struct timeval patience = { .tv_sec = ms / 1000, .tv_usec = (ms % 1000) * 1000 };

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
}

/* Revision 2, with all ready-to-receive messages and four Reads: what anywarp sends. */
#define ENHANCED "\x50\x02\x00\x04\xc0\x04\xc0\x04"

/* A connection that has carried enough requests to be offered shared memory. */
static int connect_anywarp(unsigned int which)
{
	struct wire w = { .len = 0 };
	uint8_t reply[20], rest[512];
	int fd = dial(which);
	size_t more;

	if (fd < 0)
		return -1;
	if (!send_all(fd, "MPA ID Req Frame" ENHANCED, 24) || !receive_all(fd, reply, sizeof reply) ||
	    memcmp(reply, "MPA ID Rep Frame", 16) || reply[16] & 0x20)
		goto failed;
	more = (size_t)reply[18] << 8 | reply[19];
	if (more > sizeof rest || (more && !receive_all(fd, rest, more)))
		goto failed;
	control(&w, HELLO, 1, 0, CAN_SHARE);
	for (unsigned int i = 0; i < REQUESTS; i++)
		end_fpdu(&w, begin_tagged(&w, OP_WRITE, target.open, target.open_at), 0);
	if (!send_all(fd, w.at, w.len))
		goto failed;
	return fd;
failed:
	close(fd);
	return -1;
}

/* Waits for the offer and opens its memory. */
static uint8_t *open_offer(int fd)
{
	static struct frame f;
	char path[64];
	void *at;
	int file;

	if (!next_handover(fd, &f) || f.body[5] != OFFER)
		return NULL;
	snprintf(path, sizeof path, "/proc/%u/fd/%u", word_of(&f, 10), word_of(&f, 14));
	file = open(path, O_RDWR | O_CLOEXEC);
	if (file < 0)
		return NULL;
	at = mmap(NULL, MEMORY_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	close(file);
	return at == MAP_FAILED ? NULL : at;
}

static bool take(int fd, uint64_t proof)
{
	return send_control(fd, HANDOVER, TAKE, (uint32_t)(proof >> 32), (uint32_t)proof);
}

static uint64_t proof_in(const uint8_t *memory)
{
	uint64_t proof;

	memcpy(&proof, memory + PROOF_AT, 8);
	return proof;
}

/* Whether the peer ends the stream before the time is over. */
static bool has_ended(int fd, unsigned int ms)
{
	static char bytes[65536];
	uint64_t end = now_ms() + ms;

	set_patience(fd, 50);
	while (now_ms() < end) {
		ssize_t n = recv(fd, bytes, sizeof bytes, 0);

		if (n == 0 || (n < 0 && errno != EAGAIN))
			return true;
	}
	return false;
}

/* ---------------------------------------------------------------- attackers that are offered memory */

/* One round of an attacker; the reason if the library did not do what it should. */
typedef const char *attack_round(unsigned int which);

/* Takes the memory without having opened it. */
static const char *take_unseen(unsigned int which)
{
	static struct frame f;
	int fd = connect_anywarp(which);

	ENSURE(fd >= 0, "no connection");
	ENSURE(next_handover(fd, &f) && f.body[5] == OFFER, "no offer");
	ENSURE(take(fd, 0), "cannot send");
	ENSURE(has_ended(fd, 3000), "the stream goes on after a Take with a wrong proof");
	close(fd);
	return NULL;
}

/* Sends wake-ups that were not asked for, as fast as it can. */
static const char *flood_wakeups(unsigned int which)
{
	static char zeroes[65536];
	int fd = connect_anywarp(which);
	uint64_t end = now_ms() + 3000;
	uint8_t *memory;
	size_t sent = 0;

	ENSURE(fd >= 0, "no connection");
	memory = open_offer(fd);
	ENSURE(memory && take(fd, proof_in(memory)), "no memory");
	for (;;) {
		ssize_t n = send(fd, zeroes, sizeof zeroes, MSG_NOSIGNAL);

		if (n <= 0)
			break;
		sent += (size_t)n;
		ENSURE(now_ms() < end, "%zu bytes of wake-ups and the stream goes on", sent);
	}
	munmap(memory, MEMORY_LEN);
	close(fd);
	return NULL;
}

/* Writes anything to page and rings, and wakes the server. */
static const char *write_garbage(unsigned int which)
{
	int fd = connect_anywarp(which);
	uint64_t state = which * 0x9e3779b97f4a7c15u + 1;
	uint8_t *memory;

	ENSURE(fd >= 0, "no connection");
	memory = open_offer(fd);
	ENSURE(memory && take(fd, proof_in(memory)), "no memory");
	for (size_t at = which % 3 == 0 ? 0 : 1024; at < 4096 + RING; at += 8) {
		uint64_t value;

		state = state * 6364136223846793005u + 1442695040888963407u;
		value = which % 2 ? state >> 40 : state;
		memcpy(memory + at, &value, 8);
	}
	send(fd, "", 1, MSG_NOSIGNAL);
	has_ended(fd, 20);
	munmap(memory, MEMORY_LEN);
	close(fd);
	return NULL;
}

static attack_round *const attackers[] = { take_unseen, flood_wakeups, write_garbage };

static int attack_on(attack_round *round)
{
	struct timespec pause = { 0, 2000000 };

	while (!shared->stop && !shared->wrong[0]) {
		const char *reason = round(shared->rounds);

		if (reason)
			snprintf(shared->wrong, sizeof shared->wrong, "%s", reason);
		shared->rounds++;
		nanosleep(&pause, NULL);
	}
	return 0;
}

/* The longest time that one message of the good connection takes, in the best of some windows, milliseconds. */
static const char *best_gap(struct pair *p, unsigned int windows, double *best)
{
	*best = 1e9;
	for (unsigned int i = 0; i < windows; i++) {
		uint64_t end = now_ns() + 50000000;
		double gap = 0;

		while (now_ns() < end) {
			uint64_t begin = now_ns();
			double ms;

			TRY(talk(p, 1));
			ms = (double)(now_ns() - begin) / 1e6;
			gap = ms > gap ? ms : gap;
		}
		*best = gap < *best ? gap : *best;
	}
	return NULL;
}

static const char *beside(size_t which)
{
	struct pair p;
	double gap;
	pid_t pid;
	int status;

	TRY(open_pair(&p, &usual));
	TRY(start_server());
	memset(shared, 0, sizeof *shared);
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		_exit(attack_on(attackers[which]));
	}
	ENSURE(pid > 0, "fork: %s", strerror(errno));
	TRY(best_gap(&p, 20, &gap));
	for (uint64_t end = now_ms() + WAIT_MS; shared->rounds < 5 && !shared->wrong[0] && now_ms() < end;)
		TRY(talk(&p, 10));
	shared->stop = true;
	while (waitpid(pid, &status, WNOHANG) == 0)
		TRY(talk(&p, 10));
	ENSURE(!shared->wrong[0], "%s", shared->wrong);
	ENSURE(shared->rounds >= 5, "%u rounds", shared->rounds);
	ENSURE(gap <= MAX_GAP_MS, "the good connection stops for %.1f ms", gap);
	ENSURE(!server.failed, "the server failed");
	return all_bytes(server.open.at, OPEN_LEN, FRESH, "the open region");
}

/* ---------------------------------------------------------------- to which peers memory is offered */

/* Runs `run` in a process of another user, or of this one; its exit status. */
static int as_user(uid_t user, int (*run)(void))
{
	int status = -1;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		if (user && (setgid(user) || setuid(user)))
			_exit(9);
		_exit(run());
	}
	if (pid > 0)
		while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
			;
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* 0: it is offered memory; 1: it is not. */
static int is_offered(void)
{
	static struct frame f;
	int fd = connect_anywarp(0);

	if (fd < 0)
		return 2;
	set_patience(fd, 500);
	return next_handover(fd, &f) && f.body[5] == OFFER ? 0 : 1;
}

static const char *other_user(size_t arg)
{
	(void)arg;
	if (geteuid() != 0)
		SKIP("only root can become another user");
	TRY(start_server());
	ENSURE(as_user(0, is_offered) == 0, "a peer of the same user is offered no memory");
	ENSURE(as_user(65534, is_offered) == 1, "a peer of another user is offered memory");
	ENSURE(!server.failed, "the server failed");
	return NULL;
}

/* Does not answer more offers than a process makes; 0: the next peer is offered memory again after a while. */
static int ignore_offers(void)
{
	static struct frame f;
	unsigned int offered = 0;

	for (unsigned int i = 0; i < 80; i++) {
		int fd = connect_anywarp(i);

		if (fd < 0)
			return 2;
		set_patience(fd, 100);
		offered += next_handover(fd, &f) && f.body[5] == OFFER;
	}
	if (offered < 32 || offered > 64)
		return 3;
	sleep_ms(OFFER_LIFETIME_MS + 100);
	return is_offered();
}

static const char *ignored_offers(size_t arg)
{
	unsigned int before, after;
	uint64_t end;

	(void)arg;
	TRY(start_server());
	before = descriptors();
	ENSURE(as_user(0, ignore_offers) == 0, "offers that nobody answers keep others from being offered memory");
	end = now_ms() + WAIT_MS;
	do
		sleep_ms(20);
	while ((after = descriptors()) > before && now_ms() < end);
	ENSURE(after <= before, "%u descriptors, %u before", after, before);
	return NULL;
}

/* ---------------------------------------------------------------- a peer that offers */

/* What the evil server offers. */
enum bait { LEASED, PIPE, NOT_THERE, OF_INIT };

static struct {
	int listener;
	enum bait bait;
	volatile bool refused;
	volatile int64_t took_ms;
} evil;

/* Memory as the library makes it, that another process cannot open without breaking a lease. */
static int leased_memory(void)
{
	int first = memfd_create("anywarp-carrier", MFD_CLOEXEC | MFD_ALLOW_SEALING), fd;
	char path[64];

	if (first < 0 || ftruncate(first, MEMORY_LEN) || fcntl(first, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))
		return -1;
	snprintf(path, sizeof path, "/proc/self/fd/%d", first);
	fd = open(path, O_RDWR | O_CLOEXEC);
	close(first);
	signal(SIGIO, SIG_IGN);
	return fd >= 0 && !fcntl(fd, F_SETLEASE, F_WRLCK) ? fd : -1;
}

static int evil_process(void)
{
	static struct frame f;
	int ends[2], fd, file = -1;
	uint32_t pid = (uint32_t)getpid();
	uint8_t request[20], rest[512];
	uint64_t begin;
	size_t more;

	fd = accept4(evil.listener, NULL, NULL, SOCK_CLOEXEC);
	if (fd < 0 || !receive_all(fd, request, sizeof request))
		return 2;
	more = (size_t)request[18] << 8 | request[19];
	if (more > sizeof rest || (more && !receive_all(fd, rest, more)) ||
	    !send_all(fd, "MPA ID Rep Frame" ENHANCED, 24))
		return 3;
	switch (evil.bait) {
	case LEASED:
		file = leased_memory();
		break;
	case PIPE:
		file = pipe(ends) ? -1 : ends[0];
		break;
	case NOT_THERE:
		file = 12345;
		break;
	case OF_INIT:
		file = 1;
		pid = 1;
		break;
	}
	if (file < 0)
		return 4;
	begin = now_ms();
	set_patience(fd, 20000);
	if (!send_control(fd, HELLO, 1, 0, CAN_SHARE) || !send_control(fd, HANDOVER, OFFER, pid, (uint32_t)file) ||
	    !next_handover(fd, &f) || f.body[5] != REFUSE)
		return 5;
	return now_ms() - begin < 1000 ? 0 : 6;
}

static int end_attacker(void *pid)
{
	kill((pid_t)(intptr_t)pid, SIGKILL);
	waitpid((pid_t)(intptr_t)pid, NULL, 0);
	return 0;
}

static int end_client(void *arg)
{
	struct rdma_cm_id *id = arg;
	struct rdma_event_channel *channel = id->channel;

	rdma_destroy_qp(id);
	rdma_destroy_id(id);
	rdma_destroy_event_channel(channel);
	return 0;
}

static const char *await(struct rdma_event_channel *channel, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event;

	ENSURE(!rdma_get_cm_event(channel, &event), "rdma_get_cm_event: %s", strerror(errno));
	ENSURE(event->event == type, "event %s, expected %s", rdma_event_str(event->event), rdma_event_str(type));
	rdma_ack_cm_event(event);
	return NULL;
}

static const char *connect_to(struct sockaddr_in *to, struct ibv_cq **cq)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4 };
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct rdma_cm_id *id;

	ENSURE(channel && !rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(end_client, id, "client");
	ENSURE(!rdma_resolve_addr(id, NULL, (struct sockaddr *)to, 2000), "rdma_resolve_addr: %s", strerror(errno));
	TRY(await(channel, RDMA_CM_EVENT_ADDR_RESOLVED));
	ENSURE(!rdma_resolve_route(id, 2000), "rdma_resolve_route: %s", strerror(errno));
	TRY(await(channel, RDMA_CM_EVENT_ROUTE_RESOLVED));
	ENSURE(!rdma_create_qp(id, NULL, &init), "rdma_create_qp: %s", strerror(errno));
	*cq = id->send_cq;
	ENSURE(!rdma_connect(id, &param), "rdma_connect: %s", strerror(errno));
	return await(channel, RDMA_CM_EVENT_ESTABLISHED);
}

static const char *evil_offer(size_t bait)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof at;
	struct ibv_cq *cq;
	struct pair p;
	double gap;
	pid_t pid;
	int status;

	evil.bait = (enum bait)bait;
	TRY(open_pair(&p, &usual));
	evil.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(evil.listener >= 0 && !bind(evil.listener, (struct sockaddr *)&at, sizeof at) &&
		       !listen(evil.listener, 1) && !getsockname(evil.listener, (struct sockaddr *)&at, &len),
	       "listen: %s", strerror(errno));
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		_exit(evil_process());
	}
	close(evil.listener);
	ENSURE(pid > 0, "fork: %s", strerror(errno));
	keep(end_attacker, (void *)(intptr_t)pid, "attacker");
	TRY(connect_to(&at, &cq));
	TRY(best_gap(&p, 10, &gap));
	for (uint64_t end = now_ms() + WAIT_MS; waitpid(pid, &status, WNOHANG) == 0;) {
		ENSURE(now_ms() < end, "the offer is not answered");
		TRY(talk(&p, 10));
	}
	forget((void *)(intptr_t)pid);
	ENSURE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the attacker ends with %d: the offer was not refused at once",
	       WEXITSTATUS(status));
	ENSURE(gap <= MAX_GAP_MS, "the good connection stops for %.1f ms", gap);
	return NULL;
}

/* ---------------------------------------------------------------- memory of other processes */

/* Has the kernel end this process when it reads or writes the memory of a process. */
static bool forbid_foreign_memory(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 2, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = { COUNT(code), code };

	return !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

#define LARGE (1u << 20)

static bool has_shared_memory(void)
{
	char line[512];
	bool found = false;
	FILE *maps = fopen("/proc/self/maps", "r");

	while (maps && fgets(line, sizeof line, maps))
		found = found || strstr(line, "anywarp-carrier");
	if (maps)
		fclose(maps);
	return found;
}

static const char *no_foreign_memory(size_t arg)
{
	struct region from, to;
	struct pair p;

	(void)arg;
	ENSURE(forbid_foreign_memory(), "seccomp: %s", strerror(errno));
	TRY(open_pair(&p, &usual));
	TRY(new_region(&from, p.a.pd, LARGE, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&to, p.b.pd, LARGE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	fill_pattern(from.at, LARGE, 7);
	TRY(talk(&p, REQUESTS));
	for (uint64_t i = 0; i < 20; i++) {
		struct ibv_sge sge = { (uintptr_t)from.at, LARGE, from.mr->lkey };
		struct ibv_send_wr wr = send_wr(i, IBV_WR_RDMA_WRITE, &sge, 1);

		wr.wr.rdma.remote_addr = (uintptr_t)to.at;
		wr.wr.rdma.rkey = to.mr->rkey;
		TRY(post(p.a.qp, &wr));
		TRY(expect_ok(p.a.scq, i, IBV_WC_RDMA_WRITE, NULL));
	}
	ENSURE(has_shared_memory(), "the stream stays with TCP, so this shows nothing");
	return same_pattern(to.at, LARGE, 7);
}

static const struct test tests[] = {
	{ "take_without_proof", beside, 0, 0, true },
	{ "flood_of_wakeups", beside, 1, 0, true },
	{ "garbage_in_the_rings", beside, 2, 0, true },
	{ "another_user", other_user, 0, 0, true },
	{ "ignored_offers", ignored_offers, 0, 0, true },
	{ "offer_with_a_lease", evil_offer, LEASED, 0, true },
	{ "offer_of_a_pipe", evil_offer, PIPE, 0, true },
	{ "offer_of_nothing", evil_offer, NOT_THERE, 0, true },
	{ "offer_of_another_process", evil_offer, OF_INIT, 0, true },
	{ "no_memory_of_other_processes", no_foreign_memory, 0, 0, true },
};

int main(int argc, char **argv)
{
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		return 2;
	return run_tests(tests, COUNT(tests), argc, argv);
}
