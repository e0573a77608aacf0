/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Attacks on the transfer of a stream to shared memory, by peers on the same host. Each attacker is a separate process
 * that uses plain sockets. An undisturbed connection in the attacked process must not pause for more than MAX_GAP_MS,
 * unless other programs delay it.
 */
#include "mpa.h"

#include <linux/filter.h>
#include <linux/fuse.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>

/* The shared memory of a connection: a page, and a ring for each direction. */
#define RING (256u << 10)
#define MEMORY_LEN (4096u + 2 * RING)
#define PROOF_AT 8
#define CONNECTION_AT 2048
#define MAGIC 0x6177636172720005u

/* Control messages of anywarp (crates/core/src/wire/control.rs). */
enum { HELLO = 1, HANDOVER = 12 };
enum { OFFER = 0, TAKE = 1, REFUSE = 2, SWITCH = 3 };
#define CONTROL 0x0f
#define CONTROL_QUEUE 4
#define CAN_SHARE 2u

/* More requests than a connection needs before memory is offered. */
#define REQUESTS 80u
/* More peers than a process shares memory with. */
#define PEERS 80u
/* How long an offer that is not answered counts against the limit. */
#define OFFER_LIFETIME_MS 5000u
#define MAX_GAP_MS 10.0
/*
 * The number of attempts of a test whose attacker attacks only once. The test makes another attempt if a message takes longer than
 * MAX_GAP_MS, because another program may have delayed the message.
 */
#define TURNS 5u

static struct {
	volatile bool stop;
	volatile unsigned int rounds;
	char wrong[160];
} *shared;

/* ---------------------------------------------------------------- an anywarp peer that uses a plain socket */

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

/* Receives until a message about shared memory arrives. Returns false at the end of the stream or after a time-out. */
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

static void set_timeout(int fd, unsigned int ms)
{
	struct timeval timeout = { .tv_sec = ms / 1000, .tv_usec = (ms % 1000) * 1000 };

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
}

/* What anywarp sends: revision 2, with all ready-to-receive messages and four Reads. */
#define ENHANCED "\x50\x02\x00\x04\xc0\x04\xc0\x04"

/* Opens a connection and sends so many requests that shared memory is offered. */
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

/* Waits for the offer and maps its memory. */
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

/* Whether the peer closes the stream within `ms`. */
static bool has_ended(int fd, unsigned int ms)
{
	static char bytes[65536];
	uint64_t end = now_ms() + ms;

	set_timeout(fd, 50);
	while (now_ms() < end) {
		ssize_t n = recv(fd, bytes, sizeof bytes, 0);

		if (n == 0 || (n < 0 && errno != EAGAIN))
			return true;
	}
	return false;
}

/* ---------------------------------------------------------------- attackers that accept an offer */

/* One round of an attack. Returns the reason if the library did not react as it must. */
typedef const char *attack_round(unsigned int which);

/* Accepts the memory with a wrong proof, without having opened it. */
static const char *take_unseen(unsigned int which)
{
	static struct frame f;
	int fd = connect_anywarp(which);

	ENSURE(fd >= 0, "the connection to the server fails");
	ENSURE(next_handover(fd, &f) && f.body[5] == OFFER, "the server offers no memory");
	ENSURE(take(fd, 0), "the Take cannot be sent");
	ENSURE(has_ended(fd, 3000), "the stream continues after a Take with a wrong proof");
	close(fd);
	return NULL;
}

/* Sends unrequested wake-ups as fast as possible. */
static const char *flood_wakeups(unsigned int which)
{
	static char zeroes[65536];
	int fd = connect_anywarp(which);
	uint64_t end = now_ms() + 3000;
	uint8_t *memory;
	size_t sent = 0;

	ENSURE(fd >= 0, "the connection to the server fails");
	memory = open_offer(fd);
	ENSURE(memory && take(fd, proof_in(memory)), "the server offers no memory, or the Take cannot be sent");
	for (;;) {
		ssize_t n = send(fd, zeroes, sizeof zeroes, MSG_NOSIGNAL);

		ENSURE(n >= 0 || errno != EAGAIN, "the stream stops after %zu bytes of wake-ups, and stays open", sent);
		if (n <= 0)
			break;
		sent += (size_t)n;
		ENSURE(now_ms() < end, "the stream continues after %zu bytes of wake-ups", sent);
	}
	munmap(memory, MEMORY_LEN);
	close(fd);
	return NULL;
}

/*
 * Writes random data to the page and to one of the rings, and wakes the server. Two of three rounds leave the first 1024 bytes of the page as
 * they are.
 */
static const char *write_garbage(unsigned int which)
{
	int fd = connect_anywarp(which);
	uint64_t state = which * 0x9e3779b97f4a7c15u + 1;
	uint8_t *memory;

	ENSURE(fd >= 0, "the connection to the server fails");
	memory = open_offer(fd);
	ENSURE(memory && take(fd, proof_in(memory)), "the server offers no memory, or the Take cannot be sent");
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

static int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/*
 * Measures, in windows of 50 ms, the longest time of one message of the undisturbed connection. Returns the maximum of
 * the windows, and their median, because other programs may delay some of them.
 */
static const char *gaps_of(struct pair *p, unsigned int windows, double *median, double *longest)
{
	double gaps[32];

	ENSURE(windows <= COUNT(gaps), "%u windows, more than the test has room for", windows);
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
		gaps[i] = gap;
	}
	qsort(gaps, windows, sizeof *gaps, by_size);
	*median = gaps[windows / 2];
	*longest = gaps[windows - 1];
	printf("# the undisturbed connection: a message takes at most %.2f ms in the median window of 50 ms, %.2f in the worst of %u\n", *median,
	       gaps[windows - 1], windows);
	return NULL;
}

/*
 * Exchanges messages until a process ends, or stops if `flags` has WUNTRACED. Returns the longest time of one message.
 */
static const char *talk_until(struct pair *p, pid_t pid, int flags, int *status, double *longest)
{
	*longest = 0;
	for (uint64_t end = now_ms() + WAIT_MS; waitpid(pid, status, flags | WNOHANG) == 0;) {
		uint64_t begin = now_ns();
		double ms;

		ENSURE(now_ms() < end, "the attacker does not end");
		TRY(talk(p, 1));
		ms = (double)(now_ns() - begin) / 1e6;
		*longest = ms > *longest ? ms : *longest;
	}
	return NULL;
}

static const char *beside(size_t which)
{
	double gap, longest;
	struct pair p;
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
	TRY(gaps_of(&p, 20, &gap, &longest));
	for (uint64_t end = now_ms() + WAIT_MS; shared->rounds < 5 && !shared->wrong[0] && now_ms() < end;)
		TRY(talk(&p, 10));
	shared->stop = true;
	while (waitpid(pid, &status, WNOHANG) == 0)
		TRY(talk(&p, 10));
	ENSURE(!shared->wrong[0], "%s", shared->wrong);
	ENSURE(shared->rounds >= 5, "only %u rounds", shared->rounds);
	ENSURE(gap <= MAX_GAP_MS, "the undisturbed connection stops for %.1f ms", gap);
	ENSURE(!server.failed, "the server failed");
	return all_bytes(server.open.at, OPEN_LEN, FRESH, "the open region");
}

/* ---------------------------------------------------------------- which peers get an offer */

/* Runs `run` in a new process of the given user. Returns its exit status. */
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

/* Returns 0 if this process is offered memory, 1 if not, and 2 if it cannot connect. */
static int is_offered(void)
{
	static struct frame f;
	int fd = connect_anywarp(0);

	if (fd < 0)
		return 2;
	set_timeout(fd, 500);
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

/*
 * Ignores more offers than a process makes at a time. Returns 0 if later peers are offered memory again after a while.
 */
static int ignore_offers(void)
{
	static struct frame f;
	unsigned int offered = 0;

	for (unsigned int i = 0; i < 80; i++) {
		int fd = connect_anywarp(i);

		if (fd < 0)
			return 2;
		set_timeout(fd, 100);
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
	ENSURE(as_user(0, ignore_offers) == 0, "unanswered offers prevent offers to other peers");
	end = now_ms() + WAIT_MS;
	do
		sleep_ms(20);
	while ((after = descriptors()) > before && now_ms() < end);
	ENSURE(after <= before, "%u descriptors, %u before", after, before);
	return NULL;
}

/* ---------------------------------------------------------------- peers that stop, and many peers */

static int end_attacker(void *pid)
{
	kill((pid_t)(intptr_t)pid, SIGKILL);
	waitpid((pid_t)(intptr_t)pid, NULL, 0);
	return 0;
}

/* The number of Reads that a peer requests before it stops. Each reads the whole open region. */
#define READS 4u

/* Accepts the memory, requests more data than the ring holds, and stops. */
static int read_and_stop(void)
{
	struct wire w = { .len = 0 };
	uint8_t *memory;
	int fd = connect_anywarp(0);

	if (fd < 0 || !(memory = open_offer(fd)))
		return 2;
	for (uint32_t msn = 1; msn <= READS; msn++)
		read_request(&w, msn, OPEN_LEN, target.open, target.open_at);
	if (!send_all(fd, w.at, w.len) || !take(fd, proof_in(memory)))
		return 3;
	shared->rounds = 1;
	raise(SIGSTOP);
	return 0;
}

/* A peer that stops during a Read delays neither other connections nor the deregistration of the region. */
static const char *stopped_peer(size_t arg)
{
	double longest = 1e9;
	uint64_t begin;
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(start_server());
	for (unsigned int turn = 0; turn < TURNS && longest > MAX_GAP_MS; turn++) {
		double median, gap;
		pid_t pid;
		int status;

		memset(shared, 0, sizeof *shared);
		fflush(stdout);
		pid = fork();
		if (pid == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			_exit(read_and_stop());
		}
		ENSURE(pid > 0, "fork: %s", strerror(errno));
		keep(end_attacker, (void *)(intptr_t)pid, "attacker");
		TRY(talk_until(&p, pid, WUNTRACED, &status, &gap));
		ENSURE(WIFSTOPPED(status), "the attacker ends with %d before it stops", WEXITSTATUS(status));
		TRY(gaps_of(&p, 10, &median, &longest));
		longest = gap > longest ? gap : longest;
	}
	ENSURE(longest <= MAX_GAP_MS, "the undisturbed connection stops for %.1f ms, %u times", longest, TURNS);
	begin = now_ns();
	forget(server.open.mr);
	ENSURE(!ibv_dereg_mr(server.open.mr), "ibv_dereg_mr: %s", strerror(errno));
	ENSURE(now_ns() - begin < 10000000, "ibv_dereg_mr takes %.1f ms", (double)(now_ns() - begin) / 1e6);
	TRY(talk(&p, 100));
	ENSURE(!server.failed, "the server failed");
	return NULL;
}

/*
 * HOLDS_EACH: what this process may allocate for each peer, in addition to shared memory, in bytes. HOLDS: what it may
 * allocate in total for other reasons.
 */
#define HOLDS_EACH (96u << 10)
#define HOLDS (8u << 20)

/* Accepts the memory. Returns whether the library switches to it. */
static bool switches_to_memory(int fd, uint64_t proof)
{
	static struct frame f;

	return take(fd, proof) && next_handover(fd, &f) && f.body[5] == SWITCH;
}

/*
 * Opens more connections than a process shares memory with, and accepts all offers, the oldest ones only after they
 * have expired. Then stops without releasing any.
 */
static int hold_memory(void)
{
	static struct { int fd; uint8_t *memory; } early[PEERS];
	unsigned int taken = 0;

	for (unsigned int i = 0; i < PEERS; i++) {
		early[i].fd = connect_anywarp(i);
		if (early[i].fd < 0)
			return 2;
		set_timeout(early[i].fd, 100);
		early[i].memory = open_offer(early[i].fd);
	}
	sleep_ms(OFFER_LIFETIME_MS + 100);
	for (unsigned int i = 0; i < PEERS; i++) {
		struct wire w = { .len = 0 };
		uint8_t *memory;
		int fd = connect_anywarp(i);

		if (fd < 0)
			return 3;
		set_timeout(fd, 100);
		read_request(&w, 1, OPEN_LEN, target.open, target.open_at);
		if (!send_all(fd, w.at, w.len))
			return 4;
		memory = open_offer(fd);
		set_timeout(fd, 1000);
		taken += memory && switches_to_memory(fd, proof_in(memory));
	}
	for (unsigned int i = 0; i < PEERS; i++) {
		set_timeout(early[i].fd, 1000);
		taken += early[i].memory && switches_to_memory(early[i].fd, proof_in(early[i].memory));
	}
	shared->rounds = taken;
	raise(SIGSTOP);
	return 0;
}

/*
 * Many peers want to share memory. The process shares it with at most 64, and allocates no more than SECURITY.md says.
 */
static const char *many_peers(size_t arg)
{
	long before, after;
	pid_t pid;
	int status;

	(void)arg;
	TRY(start_server());
	memset(shared, 0, sizeof *shared);
	before = resident() * 1024;
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		_exit(hold_memory());
	}
	ENSURE(pid > 0, "fork: %s", strerror(errno));
	keep(end_attacker, (void *)(intptr_t)pid, "attacker");
	ENSURE(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status), "the attacker ends with %d", WEXITSTATUS(status));
	sleep_ms(300);
	after = resident() * 1024;
	printf("# %u peers, %u share memory: %ld KiB more\n", 2 * PEERS, shared->rounds, (after - before) / 1024);
	ENSURE(shared->rounds > 32 && shared->rounds <= 64, "memory is shared with %u peers", shared->rounds);
	ENSURE(after - before <= (long)(shared->rounds * MEMORY_LEN + 2 * PEERS * HOLDS_EACH + HOLDS), "%ld KiB more",
	       (after - before) / 1024);
	ENSURE(!server.failed, "the server failed");
	return NULL;
}

/* ---------------------------------------------------------------- a peer that makes an offer */

/* Exit status of an attacker that cannot create the file that it wants to offer. */
#define NOT_POSSIBLE 77

/* What the hostile server offers. */
enum offered { LEASED, PIPE, NOT_THERE, OF_INIT, FUSE, FAULTING };

static struct {
	int listener;
	enum offered kind;
	volatile bool refused;
	volatile int64_t took_ms;
} hostile;

/* Creates memory as the library does, with a lease that another process must break to open it. */
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

static bool answer(int fuse, const struct fuse_in_header *of, int error, const void *body, size_t len)
{
	struct fuse_out_header head = { .len = (uint32_t)(sizeof head + len), .error = -error, .unique = of->unique };
	struct iovec parts[] = { { &head, sizeof head }, { (void *)(uintptr_t)body, len } };

	return writev(fuse, parts, 2) == (ssize_t)head.len;
}

/*
 * Serves a FUSE file system with one file, which looks like the memory of a connection. Once the file is open, requests
 * for its attributes are never answered, and the caller blocks forever.
 */
static int serve_fuse(int fuse)
{
	static uint8_t in[1 << 17] __attribute__((aligned(8)));
	const struct fuse_in_header *head = (const struct fuse_in_header *)in;
	struct fuse_attr file = { .ino = 2, .size = MEMORY_LEN, .mode = S_IFREG | 0600, .nlink = 1, .blksize = 4096 };
	struct fuse_attr root = { .ino = 1, .mode = S_IFDIR | 0700, .nlink = 2, .blksize = 4096 };

	while (read(fuse, in, sizeof in) > 0) {
		struct fuse_init_out init = { .major = FUSE_KERNEL_VERSION, .minor = 26, .max_write = 4096 };
		struct fuse_entry_out entry = { .nodeid = 2, .attr = file };
		struct fuse_attr_out of_root = { .attr = root };
		struct fuse_open_out open = { .fh = 1 };

		if (head->opcode == FUSE_INIT)
			answer(fuse, head, 0, &init, 64);
		else if (head->opcode == FUSE_LOOKUP)
			answer(fuse, head, 0, &entry, sizeof entry);
		else if (head->opcode == FUSE_OPEN)
			answer(fuse, head, 0, &open, sizeof open);
		else if (head->opcode == FUSE_GETATTR && head->nodeid == 1)
			answer(fuse, head, 0, &of_root, sizeof of_root);
		else if (head->opcode == FUSE_FLUSH)
			answer(fuse, head, ENOSYS, NULL, 0);
	}
	return 0;
}

/* Opens a file of that file system. Returns -1 if this process may not mount one. */
static int file_in_user_space(void)
{
	int fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	char options[96];
	pid_t pid;

	snprintf(options, sizeof options, "fd=%d,rootmode=40700,user_id=0,group_id=0", fuse);
	if (fuse < 0 || unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("anywarp-test", "/mnt", "fuse", 0, options))
		return -1;
	/* A child answers the last requests too, which the kernel makes when this process closes its files. */
	pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		_exit(serve_fuse(fuse));
	}
	close(fuse);
	return pid < 0 ? -1 : open("/mnt/memfd:anywarp-carrier", O_RDWR | O_CLOEXEC);
}

/* Writes the same first bytes as the library to memory for the connection `fd`. */
static void fill_page(uint8_t *memory, int fd)
{
	struct sockaddr_in ends[2];
	socklen_t len = sizeof *ends;
	char name[2][INET_ADDRSTRLEN];

	getsockname(fd, (struct sockaddr *)&ends[0], &len);
	len = sizeof *ends;
	getpeername(fd, (struct sockaddr *)&ends[1], &len);
	for (int i = 0; i < 2; i++)
		inet_ntop(AF_INET, &ends[i].sin_addr, name[i], sizeof name[i]);
	snprintf((char *)memory + CONNECTION_AT, 160, "%s:%u %s:%u", name[0], ntohs(ends[0].sin_port), name[1],
		 ntohs(ends[1].sin_port));
	memcpy(memory, &(uint64_t){ MAGIC }, 8);
}

/* Creates memory as the library does. This process registers to handle its page faults (userfaultfd), and never handles one. */
static int faulting_memory(int fd)
{
	int file = memfd_create("anywarp-carrier", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register range = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	uint8_t *memory;

	if (file < 0 || uffd < 0 || ftruncate(file, MEMORY_LEN) || fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))
		return -1;
	memory = mmap(NULL, MEMORY_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (memory == MAP_FAILED)
		return -1;
	fill_page(memory, fd);
	range.range.start = (uintptr_t)memory;
	range.range.len = MEMORY_LEN;
	return !ioctl(uffd, UFFDIO_API, &api) && !ioctl(uffd, UFFDIO_REGISTER, &range) ? file : -1;
}

static int hostile_process(void)
{
	static struct frame f;
	int ends[2], fd, file = -1;
	uint32_t pid = (uint32_t)getpid();
	uint8_t request[20], rest[512];
	uint64_t begin;
	size_t more;

	fd = accept4(hostile.listener, NULL, NULL, SOCK_CLOEXEC);
	if (fd < 0 || !receive_all(fd, request, sizeof request))
		return 2;
	more = (size_t)request[18] << 8 | request[19];
	if (more > sizeof rest || (more && !receive_all(fd, rest, more)) ||
	    !send_all(fd, "MPA ID Rep Frame" ENHANCED, 24))
		return 3;
	switch (hostile.kind) {
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
	case FUSE:
		file = file_in_user_space();
		break;
	case FAULTING:
		file = faulting_memory(fd);
		break;
	}
	if (file < 0)
		return hostile.kind == FUSE || hostile.kind == FAULTING ? NOT_POSSIBLE : 4;
	/* Waits until the undisturbed connection is being measured. */
	sleep_ms(100);
	begin = now_ms();
	set_timeout(fd, 20000);
	if (!send_control(fd, HELLO, 1, 0, CAN_SHARE) || !send_control(fd, HANDOVER, OFFER, pid, (uint32_t)file) ||
	    !next_handover(fd, &f) || f.body[5] != (hostile.kind == FAULTING ? TAKE : REFUSE))
		return 5;
	if (now_ms() - begin >= 1000)
		return 6;
	if (hostile.kind == FAULTING) {
		/* userfaultfd affects only the mapping of this process. The library uses the memory for a while. */
		if (!send_control(fd, HANDOVER, SWITCH, 0, 0))
			return 5;
		sleep_ms(600);
		return 0;
	}
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

/* Runs one hostile server and connects to it. Returns the longest time of one message of the undisturbed connection. */
static const char *offer_once(struct pair *p, double *longest)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof at;
	double median, gap;
	struct ibv_cq *cq;
	pid_t pid;
	int status;

	hostile.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(hostile.listener >= 0 && !bind(hostile.listener, (struct sockaddr *)&at, sizeof at) &&
		       !listen(hostile.listener, 1) && !getsockname(hostile.listener, (struct sockaddr *)&at, &len),
	       "listen: %s", strerror(errno));
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		_exit(hostile_process());
	}
	close(hostile.listener);
	ENSURE(pid > 0, "fork: %s", strerror(errno));
	keep(end_attacker, (void *)(intptr_t)pid, "attacker");
	TRY(connect_to(&at, &cq));
	TRY(gaps_of(p, 10, &median, longest));
	TRY(talk_until(p, pid, 0, &status, &gap));
	*longest = gap > *longest ? gap : *longest;
	forget((void *)(intptr_t)pid);
	if (WIFEXITED(status) && WEXITSTATUS(status) == NOT_POSSIBLE)
		SKIP("this process may not make such a file");
	ENSURE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the attacker ends with %d: the offer was not answered at once",
	       WEXITSTATUS(status));
	return NULL;
}

static const char *hostile_offer(size_t bait)
{
	double longest = 1e9;
	struct pair p;

	hostile.kind = (enum offered)bait;
	TRY(open_pair(&p, &usual));
	for (unsigned int turn = 0; turn < TURNS && longest > MAX_GAP_MS; turn++)
		TRY(offer_once(&p, &longest));
	ENSURE(longest <= MAX_GAP_MS, "the undisturbed connection stops for %.1f ms in the last of %u attempts", longest, TURNS);
	return NULL;
}

/* ---------------------------------------------------------------- access to other processes */

/* Makes the kernel kill this process if it reads or writes the memory of another process. */
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
	ENSURE(has_shared_memory(), "the stream stays on TCP, so the test proves nothing");
	return same_pattern(to.at, LARGE, 7);
}

static double cpu_ms(void)
{
	struct rusage r;

	getrusage(RUSAGE_SELF, &r);
	return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) * 1e3 + (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e3;
}

/* A connection that moves to shared memory while its socket is full does not keep the device's thread busy afterwards. */
static const char *full_socket(size_t arg)
{
	enum { LEN = 4 << 20, MANY = 100 };
	struct want want = { .type = IBV_QPT_RC };
	struct ibv_send_wr wr, *bad;
	struct region from, to;
	struct ibv_sge sge;
	struct ibv_wc wc;
	struct pair p;
	double before;

	(void)arg;
	TRY(open_pair(&p, &want));
	TRY(new_region(&from, p.a.pd, LEN, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&to, p.b.pd, LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	sge = sge_of(&from, 0, LEN);
	wr = rdma_wr(1, IBV_WR_RDMA_WRITE, &sge, 1, &to, 0);
	/* The program polls rarely, so that the device's thread sends. */
	for (int posted = 0, done = 0; done < MANY;) {
		while (posted < MANY && posted < done + 8) {
			ENSURE(!ibv_post_send(p.a.qp, &wr, &bad), "ibv_post_send");
			posted++;
		}
		sleep_ms(2);
		while (ibv_poll_cq(p.a.scq, 1, &wc) == 1) {
			ENSURE(wc.status == IBV_WC_SUCCESS, "%s", ibv_wc_status_str(wc.status));
			done++;
		}
	}
	sleep_ms(50);
	before = cpu_ms();
	sleep_ms(300);
	ENSURE(cpu_ms() - before < 100, "an idle process uses %.0f ms of processor time in 300 ms", cpu_ms() - before);
	return NULL;
}

static const struct test tests[] = {
	{ "take_with_wrong_proof", beside, 0, 0, true },
	{ "flood_of_wakeups", beside, 1, 0, true },
	{ "random_ring_contents", beside, 2, 0, true },
	{ "another_user", other_user, 0, 0, true },
	{ "ignored_offers", ignored_offers, 0, 0, true },
	{ "offer_with_a_lease", hostile_offer, LEASED, 0, true },
	{ "offer_of_a_pipe", hostile_offer, PIPE, 0, true },
	{ "offer_of_missing_descriptor", hostile_offer, NOT_THERE, 0, true },
	{ "offer_of_another_process", hostile_offer, OF_INIT, 0, true },
	{ "offer_of_a_file_in_user_space", hostile_offer, FUSE, 0, true },
	{ "offer_of_memory_that_faults", hostile_offer, FAULTING, 0, true },
	{ "stopped_peer", stopped_peer, 0, 0, true },
	{ "full_socket", full_socket, 0, 0, true },
	{ "memory_of_many_peers", many_peers, 0, 0, true },
	{ "no_foreign_memory_access", no_foreign_memory, 0, 0, true },
};

int main(int argc, char **argv)
{
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		return 2;
	return run_tests(tests, COUNT(tests), argc, argv);
}
