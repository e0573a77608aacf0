/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A host that runs out of descriptors, ports or memory.
 *
 * The same scenario runs repeatedly, each time in a new process and with a higher limit, from a limit that is too low
 * for the first call to one that is sufficient for all. A shortage must be reported by errno, an event or the status of a
 * completion. The process must not crash or hang, and no data may be damaged. When the limit is removed, the same
 * process must complete the scenario.
 */
#include "ends.h"
#include "network.h"

#include <dirent.h>
#include <rdma/rdma_cma.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#define SHORT_MS 300u  /* how long to wait under a limit, where a message may never arrive */
#define BYTES 3000u
#define STAYS 11        /* descriptors that the engine keeps until the process ends, /proc/self/maps among them */

/* The result of a scenario: complete, incomplete because of the limit, or failed. */
enum outcome { DONE, WITHOUT, WRONG };

static bool scarce;           /* a limit is set, so a failure that reports a shortage is allowed */
static char missed[160];      /* the call that failed because of the limit */
static unsigned int wait_ms = WAIT_MS;

/* Errno values that report a shortage. */
static bool reports_shortage(int e)
{
	return e == EMFILE || e == ENFILE || e == ENOMEM || e == EAGAIN || e == EADDRINUSE || e == EADDRNOTAVAIL ||
	       e == ENOBUFS;
}

#define MISSED "\002"

/* A call that may fail because of the limit; `e` is its error number. */
#define NEED(cond, e, what)                                                                             \
	do {                                                                                            \
		errno = 0;                                                                              \
		if (!(cond)) {                                                                          \
			int e_ = (e);                                                                   \
			ENSURE(scarce && reports_shortage(e_), "%s: %s", what, strerror(e_));               \
			snprintf(missed, sizeof missed, "%s: %s", what, strerror(e_));                  \
			return MISSED;                                                                  \
		}                                                                                       \
	} while (0)

/* An event or completion that may be missing, or have an error, because of the limit. */
#define LATE(cond, ...)                                                                                 \
	do {                                                                                            \
		if (!(cond)) {                                                                          \
			ENSURE(scarce, __VA_ARGS__);                                                    \
			snprintf(missed, sizeof missed, __VA_ARGS__);                                   \
			return MISSED;                                                                  \
		}                                                                                       \
	} while (0)

static int close_device(void *p)
{
	device = NULL;
	return ibv_close_device(p) ? errno : 0;
}

static int close_events(void *p)
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

static struct region one, two;

/* Waits for a completion. Under a limit, its status may report that the peer cannot be reached. */
static const char *completion(struct ibv_cq *cq, uint64_t id)
{
	uint64_t end = now_ms() + wait_ms;
	struct ibv_wc wc;
	int n;

	do {
		n = ibv_poll_cq(cq, 1, &wc);
		ENSURE(n >= 0, "ibv_poll_cq returns %d", n);
		if (!n)
			sleep_ms(1);
	} while (!n && now_ms() < end);
	LATE(n == 1, "no completion within %u ms", wait_ms);
	ENSURE(wc.wr_id == id || wc.status, "wr_id %llu", (unsigned long long)wc.wr_id);
	LATE(wc.status == IBV_WC_SUCCESS, "status %s", ibv_wc_status_str(wc.status));
	return NULL;
}

/* Sends a message, and compares the received data with the sent data. */
static const char *message(struct ibv_qp *from, struct ibv_cq *sent, struct ibv_qp *to, struct ibv_cq *received, uint32_t seed)
{
	struct ibv_sge out = sge_of(&one, 0, BYTES), in = sge_of(&two, 0, BYTES);
	struct ibv_recv_wr recv = { .wr_id = 1, .sg_list = &in, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr wr = send_wr(2, IBV_WR_SEND, &out, 1), *bad;
	int rc;

	fill_pattern(one.at, BYTES, seed);
	memset(two.at, 0, BYTES);
	rc = ibv_post_recv(to, &recv, &bad_recv);
	NEED(!rc, rc, "ibv_post_recv");
	rc = ibv_post_send(from, &wr, &bad);
	NEED(!rc, rc, "ibv_post_send");
	TRY(completion(received, 1));
	TRY(completion(sent, 2));
	TRY(same_pattern(two.at, BYTES, seed));
	TRY(guards_untouched(&one));
	return guards_untouched(&two);
}

/* A message in each direction between two ends that share a completion queue. */
static const char *both(struct ibv_qp *qp[2], struct ibv_cq *cq, uint32_t seed)
{
	for (int i = 0; i < 2; i++) {
		struct ibv_sge out = sge_of(&one, 0, BYTES), in = sge_of(&two, 0, BYTES);
		struct ibv_send_wr wr = send_wr(2, IBV_WR_SEND, &out, 1);
		uint64_t end = now_ms() + WAIT_MS;
		unsigned int seen = 0;

		fill_pattern(one.at, BYTES, seed + (uint32_t)i);
		memset(two.at, 0, BYTES);
		TRY(post_recv(qp[!i], 1, &in, 1));
		TRY(post(qp[i], &wr));
		while (seen != 3) {
			struct ibv_wc wc;

			ENSURE(now_ms() < end, "not all completions arrived (bit mask %#x, expected 0x3)", seen);
			if (ibv_poll_cq(cq, 1, &wc) != 1)
				continue;
			ENSURE(wc.status == IBV_WC_SUCCESS, "status %s", ibv_wc_status_str(wc.status));
			seen |= 1u << (wc.wr_id - 1);
		}
		TRY(same_pattern(two.at, BYTES, seed + (uint32_t)i));
	}
	return NULL;
}

static const char *open_base(struct ibv_pd **pd)
{
	struct ibv_device **list;
	int n;

	NEED((list = ibv_get_device_list(&n)), errno, "ibv_get_device_list");
	device = ibv_open_device(list[0]);
	n = errno;
	ibv_free_device_list(list);
	NEED(device, n, "ibv_open_device");
	keep(close_device, device, "device");
	ENSURE(!ibv_query_gid(device, PORT, 0, &local_gid), "ibv_query_gid: %s", strerror(errno));
	NEED((*pd = new_pd()), errno, "ibv_alloc_pd");
	for (int i = 0; i < 2; i++) {
		struct region *r = i ? &two : &one;

		r->len = BYTES;
		memset(r->whole, (int)FRESH, BYTES + 2 * GUARD);
		NEED((r->mr = new_mr(*pd, r->at, BYTES, ALL_ACCESS)), errno, "ibv_reg_mr");
	}
	return NULL;
}

/* Two RC queue pairs and then two UD queue pairs, connected with ibv_modify_qp. */
static const char *by_hand(struct ibv_pd *pd)
{
	const struct want rc = { 0 }, ud = { .type = IBV_QPT_UD };
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq[2];
	struct ibv_qp *qp[2];
	struct ibv_ah *ah;
	struct ibv_ah_attr address = address_of(&local_gid, 0, false);

	NEED((channel = new_channel()), errno, "ibv_create_comp_channel");
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 2, 2, 64 } };

		NEED((cq[i] = new_cq(64, i ? channel : NULL)), errno, "ibv_create_cq");
		init.send_cq = init.recv_cq = cq[i];
		NEED((qp[i] = new_qp(pd, &init)), errno, "ibv_create_qp");
		TRY(to_init(qp[i], &rc));
	}
	for (int i = 0; i < 2; i++)
		TRY(to_rtr(qp[i], qp[!i]->qp_num, &rc));
	for (int i = 0; i < 2; i++)
		TRY(to_rts(qp[i], &rc));
	TRY(message(qp[0], cq[0], qp[1], cq[1], 1));
	TRY(message(qp[1], cq[1], qp[0], cq[0], 2));
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_UD, .send_cq = cq[i], .recv_cq = cq[i],
						 .cap = { 16, 16, 2, 2, 64 } };

		NEED((qp[i] = new_qp(pd, &init)), errno, "ibv_create_qp of a datagram queue pair");
		TRY(to_init(qp[i], &ud));
		TRY(to_rtr(qp[i], 0, &ud));
		TRY(to_rts(qp[i], &ud));
	}
	NEED((ah = ibv_create_ah(pd, &address)), errno, "ibv_create_ah");
	keep(close_ah, ah, "address handle");
	{
		struct ibv_sge in = sge_of(&two, 0, BYTES), out = sge_of(&one, 0, 1000);
		struct ibv_recv_wr recv = { .wr_id = 1, .sg_list = &in, .num_sge = 1 }, *bad_recv;
		struct ibv_send_wr wr = send_wr(2, IBV_WR_SEND, &out, 1), *bad;
		int e;

		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = qp[1]->qp_num;
		wr.wr.ud.remote_qkey = QKEY;
		e = ibv_post_recv(qp[1], &recv, &bad_recv);
		NEED(!e, e, "ibv_post_recv");
		e = ibv_post_send(qp[0], &wr, &bad);
		NEED(!e, e, "ibv_post_send");
		TRY(completion(cq[0], 2));
		TRY(completion(cq[1], 1)); /* on one host no datagram is lost while the socket buffer has room */
		TRY(same_pattern(two.at + 40, 1000, 2));
	}
	return NULL;
}

/* Waits for the event `wanted`. Under a limit, an event that reports an error is allowed. */
static const char *event(struct rdma_event_channel *channel, enum rdma_cm_event_type wanted, struct rdma_cm_id **id)
{
	struct pollfd p = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;
	enum rdma_cm_event_type type;
	int status;

	LATE(poll(&p, 1, (int)wait_ms) == 1, "no event %s within %u ms", rdma_event_str(wanted), wait_ms);
	NEED(!rdma_get_cm_event(channel, &event), errno, "rdma_get_cm_event");
	type = event->event;
	status = event->status;
	if (type == RDMA_CM_EVENT_CONNECT_REQUEST && wanted == type) {
		*id = event->id;
		keep(close_id, *id, "accepted rdma_cm_id");
	}
	rdma_ack_cm_event(event);
	if (type == wanted)
		return NULL;
	ENSURE(type == RDMA_CM_EVENT_ADDR_ERROR || type == RDMA_CM_EVENT_ROUTE_ERROR ||
		       type == RDMA_CM_EVENT_CONNECT_ERROR || type == RDMA_CM_EVENT_UNREACHABLE ||
		       type == RDMA_CM_EVENT_REJECTED || type == RDMA_CM_EVENT_DISCONNECTED,
	       "event %s, expected %s", rdma_event_str(type), rdma_event_str(wanted));
	LATE(false, "event %s (%s), expected %s", rdma_event_str(type), strerror(-status), rdma_event_str(wanted));
	return NULL;
}

static const char *registered(struct ibv_pd *pd)
{
	NEED((one.mr = ibv_reg_mr(pd, one.at, BYTES, ALL_ACCESS)), errno, "ibv_reg_mr");
	NEED((two.mr = ibv_reg_mr(pd, two.at, BYTES, ALL_ACCESS)), errno, "ibv_reg_mr");
	return NULL;
}

/* Two ends that are connected with rdma_cm. */
static const char *by_manager(void)
{
	struct rdma_event_channel *channel[2];
	struct rdma_cm_id *listener, *client, *server = NULL;
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 2, 2, 64 } };
	struct rdma_conn_param param = { .responder_resources = 2, .initiator_depth = 2, .retry_count = 7,
					 .rnr_retry_count = 7 };
	struct region was[2] = { one, two };
	const char *reason;

	for (int i = 0; i < 2; i++) {
		NEED((channel[i] = rdma_create_event_channel()), errno, "rdma_create_event_channel");
		keep(close_events, channel[i], "event channel");
	}
	NEED(!rdma_create_id(channel[0], &listener, NULL, RDMA_PS_TCP), errno, "rdma_create_id");
	keep(close_id, listener, "listener");
	NEED(!rdma_bind_addr(listener, (struct sockaddr *)&at), errno, "rdma_bind_addr");
	NEED(!rdma_listen(listener, 4), errno, "rdma_listen");
	at.sin_port = rdma_get_src_port(listener);
	NEED(!rdma_create_id(channel[1], &client, NULL, RDMA_PS_TCP), errno, "rdma_create_id");
	keep(close_id, client, "client");
	NEED(!rdma_resolve_addr(client, NULL, (struct sockaddr *)&at, 2000), errno, "rdma_resolve_addr");
	TRY(event(channel[1], RDMA_CM_EVENT_ADDR_RESOLVED, NULL));
	NEED(!rdma_resolve_route(client, 2000), errno, "rdma_resolve_route");
	TRY(event(channel[1], RDMA_CM_EVENT_ROUTE_RESOLVED, NULL));
	NEED(!rdma_create_qp(client, NULL, &init), errno, "rdma_create_qp");
	NEED(!rdma_connect(client, &param), errno, "rdma_connect");
	TRY(event(channel[0], RDMA_CM_EVENT_CONNECT_REQUEST, &server));
	init = (struct ibv_qp_init_attr){ .qp_type = IBV_QPT_RC, .cap = { 16, 16, 2, 2, 64 } };
	NEED(!rdma_create_qp(server, NULL, &init), errno, "rdma_create_qp of the server");
	NEED(!rdma_accept(server, &param), errno, "rdma_accept");
	TRY(event(channel[0], RDMA_CM_EVENT_ESTABLISHED, NULL));
	TRY(event(channel[1], RDMA_CM_EVENT_ESTABLISHED, NULL));
	/* rdma_cm uses another protection domain. */
	one.mr = two.mr = NULL;
	reason = registered(client->pd);
	if (!reason)
		reason = message(client->qp, client->send_cq, server->qp, server->recv_cq, 5);
	if (two.mr)
		ibv_dereg_mr(two.mr);
	if (one.mr)
		ibv_dereg_mr(one.mr);
	one = was[0];
	two = was[1];
	return reason;
}

/* Runs the scenario. Prints a line and returns WRONG if it fails in another way than by reporting a shortage. */
static enum outcome scenario(void)
{
	const char *reason, *cleanup;
	struct ibv_pd *pd = NULL;

	failed_at[0] = missed[0] = 0;
	reason = open_base(&pd);
	if (!reason)
		reason = by_hand(pd);
	if (!reason)
		reason = by_manager();
	cleanup = close_all();
	if (cleanup || (reason && strcmp(reason, MISSED) != 0)) {
		printf("# %s [%s]\n", cleanup ? cleanup : reason, failed_at);
		fflush(stdout);
		return WRONG;
	}
	return reason ? WITHOUT : DONE;
}

static long open_fds(void)
{
	DIR *d = opendir("/proc/self/fd");
	long n = -1; /* does not count the descriptor of the directory */

	while (d && readdir(d))
		n++;
	if (d)
		closedir(d);
	return n - 2;
}

static long address_space(void)
{
	FILE *f = fopen("/proc/self/statm", "r");
	long pages = 0;

	if (!f || fscanf(f, "%ld", &pages) != 1)
		pages = 0;
	if (f)
		fclose(f);
	return pages * getpagesize();
}

/* A limit and its steps. */
struct scarcity {
	const char *what;
	int resource;
	long step, steps;
	long tail; /* steps at the end that must be sufficient */
};

static const struct scarcity scarcities[] = {
	{ "descriptors", RLIMIT_NOFILE, 1, 64, 2 },
	{ "address space", RLIMIT_AS, 64 << 10, 400, 2 },
};

/* Allocates the memory of the scenario before the limit is set. */
static void own_memory(void)
{
	static uint8_t pages[2][(BYTES + 2 * GUARD + 4095) & ~4095u] __attribute__((aligned(64)));

	memset(pages, 1, sizeof pages);
	one.whole = pages[0];
	two.whole = pages[1];
	one.at = one.whole + GUARD;
	two.at = two.whole + GUARD;
}

/* Runs in a child process: runs the scenario with the limit, and again after removing it. */
static int with_little(const struct scarcity *s, long n)
{
	struct rlimit was, low;
	enum outcome first, second;
	char little[sizeof missed];
	long fds;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	own_memory();
	fds = open_fds();
	getrlimit(s->resource, &was);
	low = was;
	low.rlim_cur = (rlim_t)((s->resource == RLIMIT_NOFILE ? fds : address_space()) + n * s->step);
	scarce = true;
	wait_ms = SHORT_MS;
	if (setrlimit(s->resource, &low))
		return 90;
	first = scenario();
	setrlimit(s->resource, &was);
	memcpy(little, missed, sizeof missed);
	scarce = false;
	wait_ms = WAIT_MS;
	second = scenario();
	if (second != DONE)
		printf("# the scenario fails after the limit was removed; with the limit: \"%s\"\n", little);
	if (getenv("SCARCE_SAY"))
		printf("# %s + %ld: %s\n", s->what, n * s->step, first == DONE ? "enough" : little);
	/*
	 * Some descriptors stay open: those of the engine, and those that rdma_cm shares among ids. The descriptors of
	 * closed connections are closed soon.
	 */
	for (uint64_t end = now_ms() + WAIT_MS; second == DONE && open_fds() > fds + STAYS;) {
		if (now_ms() > end) {
			printf("# %ld descriptors more than before; with the limit: \"%s\"\n", open_fds() - fds, little);
			second = WRONG;
		}
		sleep_ms(1);
	}
	fflush(stdout);
	return first == WRONG || second != DONE ? 91 : first == DONE ? 0 : 1;
}

static const char *rising_limits(size_t which)
{
	const struct scarcity *s = &scarcities[which];
	unsigned long too_little = 0, enough = 0;

	fflush(stdout);
	for (long n = 0; n < s->steps && enough < (unsigned long)s->tail; n++) {
		int status;
		pid_t pid = fork();

		ENSURE(pid >= 0, "fork: %s", strerror(errno));
		if (pid == 0) {
			alarm(30);
			signal(SIGALRM, SIG_DFL);
			_exit(with_little(s, n));
		}
		ENSURE(waitpid(pid, &status, 0) == pid, "waitpid: %s", strerror(errno));
		ENSURE(!WIFSIGNALED(status), "%s + %ld: killed by signal %d", s->what, n * s->step, WTERMSIG(status));
		ENSURE(WEXITSTATUS(status) <= 1, "%s + %ld: see the lines before", s->what, n * s->step);
		if (WEXITSTATUS(status))
			too_little++;
		else
			enough++;
	}
	ENSURE(too_little > 3, "only %lu limits were too low for the scenario", too_little);
	ENSURE(enough >= (unsigned long)s->tail, "%s: still not enough with %ld", s->what, s->steps * s->step);
	return NULL;
}

/* Allocates all memory that malloc can provide: existing connections still work, and new objects are refused. Then frees the memory. */
static const char *no_memory_at_all(size_t arg)
{
	enum { MOST = 1 << 17 };
	static void *taken[MOST];
	const struct want want = { 0 };
	struct rlimit was, low;
	struct ibv_pd *pd = NULL;
	struct ibv_cq *cq;
	struct ibv_qp *qp[2];
	const char *reason;
	unsigned int refused = 0;
	size_t n = 0, before;

	(void)arg;
	own_memory();
	TRY(open_base(&pd));
	cq = new_cq(64, NULL);
	ENSURE(cq, "ibv_create_cq: %s", strerror(errno));
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq,
						 .cap = { 16, 16, 2, 2, 64 } };

		qp[i] = new_qp(pd, &init);
		ENSURE(qp[i], "ibv_create_qp: %s", strerror(errno));
		TRY(to_init(qp[i], &want));
	}
	for (int i = 0; i < 2; i++)
		TRY(to_rtr(qp[i], qp[!i]->qp_num, &want));
	for (int i = 0; i < 2; i++)
		TRY(to_rts(qp[i], &want));
	TRY(both(qp, cq, 1));
	getrlimit(RLIMIT_AS, &was);
	low = was;
	low.rlim_cur = (rlim_t)address_space();
	ENSURE(!setrlimit(RLIMIT_AS, &low), "setrlimit: %s", strerror(errno));
	for (size_t size = 1 << 20; size >= 16 && n < MOST; size /= 2)
		while (n < MOST && (taken[n] = malloc(size)))
			n++;
	before = kept_count;
	scarce = true;
	wait_ms = SHORT_MS;
	reason = n == MOST ? "malloc provides more memory than the test can allocate" : NULL;
	/* Checks many times that existing connections still work, and that new objects are refused. */
	for (uint32_t round = 0; !reason && round < 2000; round++) {
		reason = round % 20 ? NULL : both(qp, cq, round);
		if (!reason) {
			reason = by_hand(pd);
			if (reason && !strcmp(reason, MISSED)) {
				refused++;
				reason = NULL;
			}
		}
		while (!reason && kept_count > before) {
			struct kept k = kept[--kept_count];

			if (k.close(k.what))
				reason = "an object cannot be destroyed";
		}
	}
	while (n > 0)
		free(taken[--n]);
	setrlimit(RLIMIT_AS, &was);
	TRY(reason);
	ENSURE(refused > 100, "only %u calls were refused", refused);
	scarce = false;
	wait_ms = WAIT_MS;
	TRY(both(qp, cq, 3));
	TRY(by_hand(pd));
	return by_manager();
}

/*
 * Large queues are filled while there is no memory. Each post succeeds or returns ENOMEM, and no posted receive is
 * lost.
 */
static const char *deep_queues(size_t arg)
{
	enum { DEPTH = 32768, MOST = 1 << 17 };
	static void *taken[MOST];
	const struct want want = { 0 };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { DEPTH, DEPTH, 1, 1, 0 } };
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = DEPTH, .max_sge = 1 } };
	struct ibv_recv_wr recv = { .wr_id = 7 }, *bad_recv;
	struct rlimit was, low;
	struct ibv_pd *pd = NULL;
	struct ibv_srq *srq;
	struct ibv_qp *qp;
	size_t n = 0, posted = 0;
	int rc = 0, shared_rc = 0;

	(void)arg;
	own_memory();
	TRY(open_base(&pd));
	init.send_cq = init.recv_cq = new_cq(2 * DEPTH, NULL);
	qp = new_qp(pd, &init);
	srq = ibv_create_srq(pd, &shared);
	ENSURE(init.send_cq && qp && srq, "%s", strerror(errno));
	keep(close_srq, srq, "shared receive queue");
	TRY(to_init(qp, &want));
	getrlimit(RLIMIT_AS, &was);
	low = was;
	low.rlim_cur = (rlim_t)address_space();
	ENSURE(!setrlimit(RLIMIT_AS, &low), "setrlimit: %s", strerror(errno));
	for (size_t size = 1 << 20; size >= 16 && n < MOST; size /= 2)
		while (n < MOST && (taken[n] = malloc(size)))
			n++;
	while (posted < DEPTH && !(rc = ibv_post_recv(qp, &recv, &bad_recv)))
		posted++;
	for (size_t i = 0; i < DEPTH && !shared_rc; i++)
		shared_rc = ibv_post_srq_recv(srq, &recv, &bad_recv);
	while (n > 0)
		free(taken[--n]);
	setrlimit(RLIMIT_AS, &was);
	ENSURE(rc == ENOMEM && posted < DEPTH, "%zu receives, then %s", posted, strerror(rc));
	ENSURE(shared_rc == ENOMEM, "ibv_post_srq_recv without memory: %s", strerror(shared_rc));
	/* Each posted receive completes once, and nothing else completes. */
	TRY(to_state(qp, IBV_QPS_ERR));
	for (size_t i = 0; i < posted; i++)
		TRY(expect_status(init.recv_cq, 7, IBV_WC_WR_FLUSH_ERR));
	TRY(no_wc(init.recv_cq, QUIET_MS));
	rc = ibv_post_srq_recv(srq, &recv, &bad_recv);
	ENSURE(!rc, "ibv_post_srq_recv after the limit was removed: %s", strerror(rc));
	return NULL;
}

/* ---- ports ---- */

static const char *write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	bool ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);

	if (fd >= 0)
		close(fd);
	ENSURE(ok, "%s: %s", path, strerror(errno));
	return NULL;
}

#define RANGE "/proc/sys/net/ipv4/ip_local_port_range"

/* Runs the scenario with 0 to 16 free ports. Sockets of the test occupy the other ports of the range. */
static const char *few_ports(size_t arg)
{
	unsigned long too_little = 0, enough = 0;

	(void)arg;
	TRY(own_network(NULL));
	own_memory();
	TRY(write_file(RANGE, "42000 42015"));
	for (int free_ports = 0; free_ports <= 16; free_ports += free_ports < 6 ? 1 : 5) {
		int status;
		pid_t pid;

		fflush(stdout);
		pid = fork();
		ENSURE(pid >= 0, "fork: %s", strerror(errno));
		if (pid == 0) {
			enum outcome first, second;

			prctl(PR_SET_PDEATHSIG, SIGKILL);
			alarm(30);
			signal(SIGALRM, SIG_DFL);
			for (int i = free_ports; i < 16; i++) {
				struct sockaddr_in6 at = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)(42000 + i)) };

				for (int kind = 0; kind < 2; kind++) {
					int fd = socket(AF_INET6, kind ? SOCK_DGRAM : SOCK_STREAM, 0);

					if (bind(fd, (struct sockaddr *)&at, sizeof at) || (!kind && listen(fd, 1)))
						_exit(92);
				}
			}
			scarce = true;
			wait_ms = SHORT_MS;
			first = scenario();
			if (getenv("SCARCE_SAY"))
				printf("# ports + %d: %s\n", free_ports, first == DONE ? "enough" : missed);
			if (write_file(RANGE, "32768 60999"))
				_exit(93);
			scarce = false;
			wait_ms = WAIT_MS;
			second = scenario();
			fflush(stdout);
			_exit(first == WRONG || second != DONE ? 91 : first == DONE ? 0 : 1);
		}
		ENSURE(waitpid(pid, &status, 0) == pid, "waitpid: %s", strerror(errno));
		ENSURE(!WIFSIGNALED(status), "%d ports: killed by signal %d", free_ports, WTERMSIG(status));
		ENSURE(WEXITSTATUS(status) <= 1, "%d ports: fails (%d)", free_ports, WEXITSTATUS(status));
		if (WEXITSTATUS(status))
			too_little++;
		else
			enough++;
		TRY(write_file(RANGE, "42000 42015"));
	}
	ENSURE(too_little > 1 && enough > 0, "%lu times too few ports, %lu times enough", too_little, enough);
	return NULL;
}

#define GONE_MS 100u /* how long the last descriptor of a destroyed connection may stay open on a busy machine */

/* The descriptors of a connection are closed when its two queue pairs are destroyed, and not by a timer seconds later. */
static const char *descriptors_closed(size_t rounds)
{
	struct ibv_send_wr wr = { .wr_id = 2, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED };
	const struct want w = { 0 };
	unsigned int late = 0;
	long before = 0;

	for (size_t i = 0; i < rounds; i++) {
		struct pair p;
		uint64_t since;

		TRY(open_pair(&p, &w));
		TRY(post_recv(p.b.qp, 1, NULL, 0));
		TRY(post(p.a.qp, &wr));
		TRY(expect_ok(p.a.scq, 2, IBV_WC_SEND, NULL));
		TRY(expect_ok(p.b.rcq, 1, IBV_WC_RECV, NULL));
		ENSURE(!close_now(p.a.qp) && !close_now(p.b.qp), "ibv_destroy_qp");
		if (i == 0) {
			sleep_ms(GONE_MS);
			before = open_fds();
		}
		since = now_ms();
		late += open_fds() > before;
		while (open_fds() > before)
			ENSURE(now_ms() - since < GONE_MS, "%ld descriptors after %zu connections, %ld after one", open_fds(), i + 1,
			       before);
	}
	printf("# %u of %zu connections still had a descriptor when ibv_destroy_qp returned\n", late, rounds);
	/* If only the device's thread closed the descriptors, nine of ten would still be open. */
	ENSURE(late <= rounds / 10, "%u of %zu connections still had a descriptor when ibv_destroy_qp returned", late, rounds);
	return NULL;
}

static const struct test tests[] = {
	{ "descriptors_closed", descriptors_closed, 200, 60, true },
	{ "few_descriptors", rising_limits, 0, 200, true },
	{ "little_memory", rising_limits, 1, 300, true },
	{ "no_memory_at_all", no_memory_at_all, 0, 60, true },
	{ "deep_queues", deep_queues, 0, 60, true },
	{ "few_ports", few_ports, 0, 200, true },
};

int main(int argc, char **argv)
{
	if (has_flag(argc, argv, "--say"))
		setenv("SCARCE_SAY", "1", 1);
	return run_tests(tests, COUNT(tests), argc, argv);
}
