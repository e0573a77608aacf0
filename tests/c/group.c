/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Sends to a multicast group, to the broadcast address and to the subnet's broadcast address, in one datagram and in
 * several. The hosts are network namespaces on one bridge. Members receive each message completely, and drop messages
 * with another Q_Key. A host that has not joined receives nothing.
 *
 * Host 1 sends; 2 and 3 have joined, 4 has not. The namespaces end with the processes of the test.
 */
#include "dgrams.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#define HOSTS 4u
#define LONGEST 200000u
#define RECEIVES 8u
/* Maximum number of attempts for a message. Datagrams to a group are not paced, and may be lost on a busy machine. */
#define TRIES 20

static struct shared {
	_Atomic int joined;          /* hosts that are ready */
	_Atomic uint32_t got[HOSTS]; /* how many of the messages each host has received completely */
	_Atomic int wrong;           /* receives with other contents */
	_Atomic bool stop;
} *shared;

/* Message n has the test pattern n + 1. */
static const uint32_t lens[] = { 4, 1000, 4096, 30000, LONGEST };

static const char *const groups[] = { "239.88.1.2", "255.255.255.255", "10.88.0.255" };

static bool ip(const char *format, ...)
{
	char line[256] = "ip ";
	va_list args;

	va_start(args, format);
	vsnprintf(line + 3, sizeof line - 3, format, args);
	va_end(args);
	return system(line) == 0;
}

/*
 * Sets up the address of host `n`, and opens a queue pair and an address handle for the group. Runs in the namespace of the host,
 * after its interface was created.
 */
static const char *open_host(struct dgram *d, unsigned int n, size_t arg, struct ibv_ah **ah, union ibv_gid *gid)
{
	struct anywarpdv_qp_init_attr dv = { .segment = (uint8_t)(arg & 3), .max_send_size = LONGEST };
	struct ibv_ah_attr to = { .is_global = 1, .port_num = PORT };
	char address[16];
	struct in_addr group;

	snprintf(address, sizeof address, "10.88.0.%u", n);
	ENSURE(ip("link set lo up") && ip("addr add %s/24 brd + dev eth0", address) && ip("link set eth0 up") &&
		       ip("route add 224.0.0.0/4 dev eth0"),
	       "the address of the host cannot be set up");
	setenv("ANYWARP_ADDR", address, 1);
	TRY(find_all());
	TRY(open_dgram(d, &dv));
	inet_pton(AF_INET, groups[arg >> 2], &group);
	memset(gid, 0, sizeof *gid);
	gid->raw[10] = gid->raw[11] = 0xff;
	memcpy(gid->raw + 12, &group, 4);
	to.grh.dgid = *gid;
	to.grh.sgid_index = gid_index;
	to.grh.hop_limit = 1;
	*ah = ibv_create_ah(d->pd, &to);
	ENSURE(*ah, "ibv_create_ah: %s", strerror(errno));
	keep(close_ah, *ah, "address handle");
	return NULL;
}

static const char *send_one(struct dgram *d, struct ibv_ah *ah, const struct region *mine, size_t len, uint32_t qkey)
{
	int rc;

	ibv_wr_start(d->ex);
	d->ex->wr_id = 1;
	d->ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(d->ex);
	ibv_wr_set_ud_addr(d->ex, ah, 0xffffff, qkey);
	ibv_wr_set_sge(d->ex, mine->mr->lkey, (uintptr_t)mine->at, (uint32_t)len);
	rc = ibv_wr_complete(d->ex);
	ENSURE(!rc, "ibv_wr_complete: %s", strerror(rc));
	return done(d, 1, IBV_WC_SUCCESS);
}

static const char *be_sender(size_t arg)
{
	struct region mine;
	struct ibv_ah *ah;
	union ibv_gid gid;
	struct dgram d;

	TRY(open_host(&d, 1, arg, &ah, &gid));
	TRY(new_region(&mine, d.pd, LONGEST, IBV_ACCESS_LOCAL_WRITE));
	for (uint64_t end = now_ms() + WAIT_MS; shared->joined < (int)HOSTS - 1; sleep_ms(1))
		ENSURE(now_ms() < end, "only %d hosts are ready", shared->joined);
	for (uint32_t i = 0; i < COUNT(lens); i++) {
		bool whole = false;

		/* A message with another Q_Key. */
		fill_pattern(mine.at, lens[i], 1000);
		TRY(send_one(&d, ah, &mine, lens[i], QKEY + 1));
		fill_pattern(mine.at, lens[i], i + 1);
		for (int n = 0; n < TRIES && !whole; n++) {
			TRY(send_one(&d, ah, &mine, lens[i], QKEY));
			for (uint64_t end = now_ms() + 200; !whole && now_ms() < end; sched_yield())
				whole = shared->got[1] == i + 1 && shared->got[2] == i + 1;
		}
		ENSURE(whole, "a message of %u bytes arrives at %s of two hosts", lens[i],
		       shared->got[1] == i + 1 || shared->got[2] == i + 1 ? "one" : "none");
		ENSURE(!shared->wrong, "a host has received other data");
		ENSURE(!shared->got[3], "a host that has not joined receives a message");
	}
	shared->stop = true;
	return NULL;
}

static const char *be_receiver(unsigned int host, size_t arg)
{
	struct region inbox[RECEIVES];
	struct ibv_sge whole[RECEIVES];
	struct anywarpdv_counters seen;
	struct ibv_ah *ah;
	union ibv_gid gid;
	struct dgram d;

	TRY(open_host(&d, host + 1, arg, &ah, &gid));
	for (uint64_t i = 0; i < RECEIVES; i++) {
		TRY(new_region(&inbox[i], d.pd, LONGEST + 40, IBV_ACCESS_LOCAL_WRITE));
		whole[i] = sge_of(&inbox[i], 0, LONGEST + 40);
		TRY(post_recv(d.qp, i, &whole[i], 1));
	}
	/* An address of a single host is not a group. */
	for (uint8_t last = 1; last < 6; last += 4) {
		union ibv_gid one = gid;

		memcpy(one.raw + 12, (uint8_t[]){ 10, 88, 0, last }, 4);
		ENSURE(ibv_attach_mcast(d.qp, &one, 0) == EINVAL, "10.88.0.%u can be joined as a group", last);
	}
	if (host != 3)
		ENSURE(!ibv_attach_mcast(d.qp, &gid, 0), "ibv_attach_mcast: %s", strerror(errno));
	shared->joined++;
	while (!shared->stop) {
		struct ibv_wc wc;
		uint32_t n = 0;

		if (ibv_poll_cq(d.rcq, 1, &wc) != 1)
			continue;
		ENSURE(wc.status == IBV_WC_SUCCESS, "%s", ibv_wc_status_str(wc.status));
		while (n < COUNT(lens) && wc.byte_len != lens[n] + 40)
			n++;
		if (n == COUNT(lens) || same_pattern(inbox[wc.wr_id].at + 40, lens[n], n + 1))
			shared->wrong++;
		else if (n == shared->got[host])
			shared->got[host]++;
		TRY(post_recv(d.qp, wc.wr_id, &whole[wc.wr_id], 1));
	}
	if (host != 3)
		ENSURE(!ibv_detach_mcast(d.qp, &gid, 0), "the queue pair cannot be detached");
	ENSURE(!query_counters(d.qp, &seen, sizeof seen), "counters");
	ENSURE(host == 3 ? seen.rx_dgrams == 0 : seen.rx_qkey > 0, "%llu datagrams, %llu with a wrong key",
	       (unsigned long long)seen.rx_dgrams, (unsigned long long)seen.rx_qkey);
	return NULL;
}

static int end_process(void *pid)
{
	int status;

	kill((pid_t)(intptr_t)pid, SIGKILL);
	waitpid((pid_t)(intptr_t)pid, &status, 0);
	return 0;
}

/* Starts a process in a new network namespace. The process waits for a byte from the pipe `go`. */
static pid_t start(unsigned int host, size_t arg, int there, int go)
{
	pid_t pid, parent = getpid();

	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		const char *reason;
		char c = 0;

		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent || unshare(CLONE_NEWNET) || write(there, &c, 1) != 1 || read(go, &c, 1) != 1)
			_exit(1);
		kept_count = 0;
		reason = host ? be_receiver(host, arg) : be_sender(arg);
		if (!reason)
			reason = close_all();
		if (reason)
			fprintf(stderr, "host %u: %s [%s]\n", host + 1, reason, failed_at);
		_exit(reason ? 1 : 0);
	}
	if (pid > 0)
		keep(end_process, (void *)(intptr_t)pid, "process");
	return pid;
}

static const char *reaches(size_t arg)
{
	pid_t hosts[HOSTS];
	int there[2], go[2], status;
	char c = 0;

	if (unshare(CLONE_NEWNET | (geteuid() ? CLONE_NEWUSER : 0)))
		SKIP("no permission for network namespaces");
	if (!ip("link add br0 type bridge mcast_snooping 0"))
		SKIP("the kernel has no bridges, or `ip` is not installed");
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ENSURE(shared != MAP_FAILED && !pipe(there) && !pipe(go), "mmap, pipe: %s", strerror(errno));
	ENSURE(ip("link set br0 up"), "the bridge cannot be set up");
	for (unsigned int i = 0; i < HOSTS; i++) {
		hosts[i] = start(i, arg, there[1], go[0]);
		ENSURE(hosts[i] > 0 && read(there[0], &c, 1) == 1, "no process in a new network namespace");
		ENSURE(ip("link add v%u type veth peer name eth0 netns %d", i, hosts[i]) &&
			       ip("link set v%u master br0 up", i),
		       "no link to host %u", i + 1);
	}
	for (unsigned int i = 0; i < HOSTS; i++)
		ENSURE(write(go[1], &c, 1) == 1, "the process of a host has ended");
	for (unsigned int i = 0; i < HOSTS; i++) {
		ENSURE(waitpid(hosts[i], &status, 0) == hosts[i], "waitpid");
		forget((void *)(intptr_t)hosts[i]);
		ENSURE(status == 0, "host %u ends with %#x", i + 1, (unsigned int)status);
	}
	return NULL;
}

static const struct test tests[] = {
	{ "multicast_path_mtu", reaches, 0, 0, true },
	{ "multicast_jumbo", reaches, 1, 0, true },
	{ "multicast_max", reaches, 2, 0, true },
	{ "broadcast_path_mtu", reaches, 4, 0, true },
	{ "broadcast_max", reaches, 6, 0, true },
	{ "subnet_path_mtu", reaches, 8, 0, true },
	{ "subnet_max", reaches, 10, 0, true },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
