/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Service levels on a link with virtual lanes (ANYWARP_QOS): shares of connections and of datagrams, the limit of high priority, and
 * that wrong settings are refused.
 *
 * The device reads the variable once, so each test runs in a new process of this program with its own value.
 */
#define _GNU_SOURCE
#include "ends.h"

#include <netinet/in.h>
#include <netinet/ip.h>

#define SIZE 16384u
#define DATAGRAM 1024u
/* At RATE, the outstanding requests of a sender take 52 or 26 ms: longer than the program may have to wait for a processor of a busy machine. */
#define OUTSTANDING 32u
#define DATAGRAMS_OUTSTANDING 256u
#define RATE 10000000.0 /* 80Mbit/s, in bytes a second */
#define SETTLE_MS 300u
#define MEASURE_MS 700u

/* A sender that always has requests outstanding. */
struct sender {
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	unsigned int outstanding, posted;
	uint64_t completed;
	bool stopped;
};

static const char *refill(struct sender *s)
{
	struct ibv_wc wc;
	int n;

	while ((n = ibv_poll_cq(s->cq, 1, &wc)) > 0) {
		ENSURE(wc.status == IBV_WC_SUCCESS, "a request fails: %s", ibv_wc_status_str(wc.status));
		s->completed++;
		if (!s->stopped)
			TRY(post(s->qp, &s->wr));
	}
	ENSURE(n == 0, "ibv_poll_cq gives %d", n);
	return NULL;
}

/* Lets two senders send for a time. */
static const char *drive(struct sender *s, unsigned int ms)
{
	uint64_t end = now_ms() + ms;

	while (now_ms() < end) {
		TRY(refill(&s[0]));
		TRY(refill(&s[1]));
		sched_yield();
	}
	return NULL;
}

/* Measures the shares of two senders: the ratio of the second to the first, and the sum in bytes a second. */
static const char *shares(struct sender *s, uint32_t size, double *ratio, double *sum)
{
	uint64_t first, second, begun;
	double seconds;

	for (int i = 0; i < 2; i++) {
		s[i].wr.sg_list = &s[i].sge;
		for (; s[i].posted < s[i].outstanding; s[i].posted++)
			TRY(post(s[i].qp, &s[i].wr));
	}
	TRY(drive(s, SETTLE_MS));
	first = s[0].completed;
	second = s[1].completed;
	begun = now_ms();
	TRY(drive(s, MEASURE_MS));
	seconds = (double)(now_ms() - begun) / 1000;
	first = s[0].completed - first;
	second = s[1].completed - second;
	*ratio = first ? (double)second / (double)first : 1e9;
	*sum = (double)(first + second) * size / seconds;
	return NULL;
}

/*
 * Fails unless two senders with weights 1 and 4 share the link accordingly, and use at least a part `least` of it. Other
 * programs may keep a sender from running in a measurement, so there are up to three.
 */
static const char *share_by_weight(struct sender *s, uint32_t size, double least)
{
	double ratio = 0, sum = 0;
	bool good = false;

	for (int tries = 0; tries < 3 && !good; tries++) {
		TRY(shares(s, size, &ratio, &sum));
		good = ratio > 3.2 && ratio < 4.8 && sum > least * RATE && sum < 1.1 * RATE;
	}
	ENSURE(good, "the ratio is %.2f with weights 1 and 4, at %.0f bytes a second of %.0f", ratio, sum, RATE);
	return NULL;
}

/* Two connections of service levels 0 and 1, with Writes. */
static const char *connections(struct sender *s, struct pair *pairs)
{
	static struct region from[2], to[2];

	for (int i = 0; i < 2; i++) {
		struct want want = { .level = (uint8_t)i };

		TRY(open_pair(&pairs[i], &want));
		TRY(new_region(&from[i], pairs[i].a.pd, SIZE, ALL_ACCESS));
		TRY(new_region(&to[i], pairs[i].b.pd, SIZE, ALL_ACCESS));
		s[i] = (struct sender){ .qp = pairs[i].a.qp, .cq = pairs[i].a.scq, .sge = sge_of(&from[i], 0, SIZE), .outstanding = OUTSTANDING };
		s[i].wr = rdma_wr(1, IBV_WR_RDMA_WRITE, &s[i].sge, 1, &to[i], 0);
	}
	return NULL;
}

static const char *weights_of_connections(void)
{
	struct sender s[2];
	struct pair pairs[2];

	TRY(connections(s, pairs));
	return share_by_weight(s, SIZE, 0.8);
}

/* A high limit of 255 means no limit: the low lane waits until the high one has nothing to send. */
static const char *no_limit(void)
{
	struct sender s[2];
	struct pair pairs[2];
	double ratio, sum;
	uint64_t before;

	TRY(connections(s, pairs));
	for (int tries = 0; tries < 3; tries++) {
		TRY(shares(s, SIZE, &ratio, &sum));
		if (ratio > 20)
			break;
	}
	ENSURE(ratio > 20, "the ratio is %.2f without a limit, at %.0f bytes a second", ratio, sum);
	s[1].stopped = true;
	TRY(drive(s, SETTLE_MS));
	before = s[0].completed;
	TRY(drive(s, SETTLE_MS));
	ENSURE(s[0].completed - before > 100, "%u requests in %u ms when the other sender has stopped",
	       (unsigned int)(s[0].completed - before), SETTLE_MS);
	return NULL;
}

/* The service level of a datagram follows from the traffic class of its address handle. */
static const char *weights_of_datagrams(void)
{
	static struct region from[2];
	struct sender s[2];
	struct pair pairs[2];

	for (int i = 0; i < 2; i++) {
		struct want want = { .type = IBV_QPT_UD };
		struct ibv_ah_attr to;
		struct ibv_ah *ah;

		TRY(open_pair(&pairs[i], &want));
		to = address_of(&local_gid, port_attr.lid, false);
		to.grh.traffic_class = (uint8_t)(i * 0x20);
		ah = ibv_create_ah(pairs[i].a.pd, &to);
		ENSURE(ah, "ibv_create_ah: %s", strerror(errno));
		TRY(new_region(&from[i], pairs[i].a.pd, DATAGRAM, ALL_ACCESS));
		s[i] = (struct sender){ .qp = pairs[i].a.qp, .cq = pairs[i].a.scq, .sge = sge_of(&from[i], 0, DATAGRAM), .outstanding = DATAGRAMS_OUTSTANDING };
		s[i].wr = send_wr(1, IBV_WR_SEND, &s[i].sge, 1);
		s[i].wr.wr.ud.ah = ah;
		s[i].wr.wr.ud.remote_qpn = pairs[i].b.qp->qp_num;
		s[i].wr.wr.ud.remote_qkey = QKEY;
	}
	TRY(share_by_weight(s, DATAGRAM, 0.7));
	for (int i = 0; i < 2; i++)
		ENSURE(!ibv_destroy_ah(s[i].wr.wr.ud.ah), "ibv_destroy_ah: %s", strerror(errno));
	return NULL;
}

/* The device does not open. */
static const char *refused(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;

	ENSURE(list && list[0], "no device");
	errno = 0;
	context = ibv_open_device(list[0]);
	ENSURE(!context && errno == EINVAL, "ibv_open_device succeeds, or fails with: %s", strerror(errno));
	ibv_free_device_list(list);
	return NULL;
}

struct row {
	const char *name, *settings;
	const char *(*run)(void);
	const char *logged; /* on stderr */
};
static const struct row rows[] = {
	{ "weights_of_connections", "rate=80Mbit/s;qos_vlarb_low=0:1,1:4", weights_of_connections, NULL },
	{ "weights_of_datagrams", "rate=80Mbit/s;qos_vlarb_low=0:1,1:4", weights_of_datagrams, NULL },
	{ "no_limit", "rate=80Mbit/s;qos_high_limit=255;qos_vlarb_high=1:1;qos_vlarb_low=0:1", no_limit, NULL },
	{ "no_rate", "qos_vlarb_low=0:1", refused, "rate is missing" },
	{ "no_such_file", "@/nowhere/qos", refused, "/nowhere/qos: No such file" },
	{ "no_such_folder", "rate=1Gbit/s;link=/nowhere/link", refused, "link=/nowhere/link: No such file" },
	{ "no_link", "rate=1Gbit/s;link=/proc/self/exe", refused, "link=/proc/self/exe: " },
};

/* Runs a row in a process with its settings. */
static const char *run_row(size_t number)
{
	const struct row *row = &rows[number];
	char log[4096];
	size_t used = 0;
	ssize_t n;
	int ends[2], status;
	pid_t pid;

	ENSURE(!pipe2(ends, O_CLOEXEC), "pipe: %s", strerror(errno));
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		setenv("ANYWARP_QOS", row->settings, 1);
		dup2(ends[1], STDERR_FILENO);
		execl("/proc/self/exe", "qos", "--child", row->name, (char *)NULL);
		_exit(127);
	}
	close(ends[1]);
	ENSURE(pid > 0, "fork: %s", strerror(errno));
	while ((n = read(ends[0], log + used, sizeof log - 1 - used)) > 0)
		used += (size_t)n;
	log[used] = 0;
	close(ends[0]);
	ENSURE(waitpid(pid, &status, 0) == pid, "waitpid: %s", strerror(errno));
	ENSURE(!status, "status %#x: %s", (unsigned int)status, log);
	ENSURE(!row->logged || strstr(log, row->logged), "stderr has no \"%s\": %s", row->logged, log);
	return NULL;
}

#define ROW(n) { NULL, run_row, n, 0, false }
static struct test tests[] = { ROW(0), ROW(1), ROW(2), ROW(3), ROW(4), ROW(5), ROW(6) };

int main(int argc, char **argv)
{
	_Static_assert(COUNT(rows) == COUNT(tests), "each row is a test");

	for (size_t i = 0; i < COUNT(rows); i++) {
		const char *reason, *cleanup;

		tests[i].name = rows[i].name;
		if (argc != 3 || strcmp(argv[1], "--child") || strcmp(argv[2], rows[i].name))
			continue;
		alarm(DEFAULT_SECONDS / 2);
		reason = rows[i].run();
		if (reason)
			fprintf(stderr, "# %s [%s]\n", reason, failed_at);
		cleanup = close_all();
		if (cleanup)
			fprintf(stderr, "# %s\n", cleanup);
		return reason || cleanup ? 1 : 0;
	}
	return run_tests(tests, COUNT(tests), argc, argv);
}
