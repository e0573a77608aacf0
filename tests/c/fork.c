/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * fork(2): the device belongs to the process that opened it, and the parent continues to use it. A child may call any
 * verb on inherited objects without harm to itself or its parent, and may open the device for itself.
 */
#include "ends.h"

#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <spawn.h>
#include <sys/wait.h>

static const struct want usual = { 0 };

/* Waits for a child with a time limit. Kills a child that hangs. */
static const char *child_ends_well(pid_t pid)
{
	uint64_t end = now_ms() + 20000;
	int status;

	for (;;) {
		pid_t got = waitpid(pid, &status, WNOHANG);

		ENSURE(got >= 0, "waitpid: %s", strerror(errno));
		if (got == pid)
			break;
		if (now_ms() > end) {
			kill(pid, SIGKILL);
			waitpid(pid, &status, 0);
			ENSURE(false, "the child does not end");
		}
		sleep_ms(2);
	}
	ENSURE(!WIFSIGNALED(status), "the child is killed by signal %d", WTERMSIG(status));
	ENSURE(WEXITSTATUS(status) == 0, "the child ends with %d", WEXITSTATUS(status));
	return NULL;
}

/* Runs `work` in a child. The child prints to stderr, because stdout has one line for each test. */
static const char *in_child(const char *(*work)(struct pair *), struct pair *p)
{
	pid_t pid;

	fflush(stdout);
	pid = fork();
	ENSURE(pid >= 0, "fork: %s", strerror(errno));
	if (pid == 0) {
		const char *reason = work(p);

		if (reason)
			fprintf(stderr, "child: %s [%s]\n", reason, failed_at);
		exit(reason ? 1 : 0); /* exit, because it runs the handlers of all libraries */
	}
	return child_ends_well(pid);
}

/* Sends a message from one end to the other, which then reads the same data by an RDMA Read. Both ends are in this process. */
static const char *talk(struct pair *p, uint32_t seed)
{
	struct region a, b;
	struct ibv_sge from, to;
	struct ibv_send_wr wr;

	TRY(new_region(&a, p->a.pd, 20000, ALL_ACCESS));
	TRY(new_region(&b, p->b.pd, 20000, ALL_ACCESS));
	fill_pattern(a.at, a.len, seed);
	from = sge_of(&a, 0, a.len);
	to = sge_of(&b, 0, b.len);
	TRY(post_recv(p->b.qp, 1, &to, 1));
	wr = send_wr(2, IBV_WR_SEND, &from, 1);
	TRY(post(p->a.qp, &wr));
	TRY(expect_ok(p->b.rcq, 1, IBV_WC_RECV, NULL));
	TRY(expect_ok(p->a.scq, 2, IBV_WC_SEND, NULL));
	TRY(same_pattern(b.at, b.len, seed));
	memset(b.at, 0, b.len);
	wr = rdma_wr(3, IBV_WR_RDMA_READ, &to, 1, &a, 0);
	TRY(post(p->b.qp, &wr));
	TRY(expect_ok(p->b.scq, 3, IBV_WC_RDMA_READ, NULL));
	return same_pattern(b.at, b.len, seed);
}

static const char *open_and_talk(struct pair *p)
{
	TRY(open_pair(p, &usual));
	TRY(talk(p, 11));
	TRY(close_all());
	ENSURE(!ibv_close_device(device), "ibv_close_device: %s", strerror(errno));
	return NULL;
}

/* The child opens the device before the parent does. Must be the first test. */
static const char *child_opens_first(size_t arg)
{
	struct pair p;

	(void)arg;
	ENSURE(!device, "the device is open: this test must be the first");
	return in_child(open_and_talk, &p);
}

static uint64_t fork_after_ns; /* of `fork_while_opening` */
static bool opening, opened; /* `open_first` has begun, and has ended */

/* The first calls of a process, which read the settings and make the device. */
static void *open_first(void *arg)
{
	int count;
	struct ibv_device **list;

	__atomic_store_n(&opening, true, __ATOMIC_RELEASE);
	list = ibv_get_device_list(&count);
	if (list && count > 0) {
		struct ibv_context *context = ibv_open_device(list[0]);

		if (context) {
			struct ibv_device_attr attr;

			ibv_query_device(context, &attr);
			ibv_close_device(context);
		}
		ibv_free_device_list(list);
	}
	__atomic_store_n(&opened, true, __ATOMIC_RELEASE);
	return arg;
}

static const char *open_or_end(struct pair *p)
{
	alarm(10); /* no process waits for this one when the process of `fork_while_opening` has been killed */
	return open_and_talk(p);
}

static const char *fork_while_opening(struct pair *p)
{
	const char *reason;
	uint64_t end;
	pthread_t thread;

	/* If the thread were not detached, the thread sanitizer would report it in the child, where it does not exist. */
	ENSURE(!pthread_create(&thread, NULL, open_first, NULL) && !pthread_detach(thread), "pthread_create");
	while (!__atomic_load_n(&opening, __ATOMIC_ACQUIRE))
		;
	for (end = now_ns() + fork_after_ns; now_ns() < end;)
		;
	reason = in_child(open_or_end, p);
	while (!__atomic_load_n(&opened, __ATOMIC_ACQUIRE))
		sleep_ms(1);
	return reason;
}

/*
 * A thread opens the device for the first time, another one forks, and the child opens the device. The child must not wait for
 * that thread, which does not exist there. Must run before this process opens the device.
 */
static const char *fork_during_first_open(size_t rounds)
{
#if defined __SANITIZE_THREAD__
	/* The thread sanitizer does not support that a child starts threads if its parent had several at the fork. */
	rounds = 0;
#endif
	struct pair p;

	ENSURE(!device, "the device is open: this test must be one of the first");
	for (size_t i = 0; i < rounds; i++) {
		fork_after_ns = i * 7919 % 2000 * 100;
		TRY(in_child(fork_while_opening, &p));
	}
	return NULL;
}

static const char *fork_init(size_t arg)
{
	int rc = ibv_fork_init();

	(void)arg;
	ENSURE(!rc, "ibv_fork_init: %s", strerror(rc));
	ENSURE(ibv_is_fork_initialized() == IBV_FORK_ENABLED || ibv_is_fork_initialized() == IBV_FORK_UNNEEDED,
	       "ibv_is_fork_initialized returns %d", ibv_is_fork_initialized());
	return NULL;
}

/* The child opens the device for itself. */
static const char *open_anew_and_talk(struct pair *p)
{
	device = NULL;
	kept_count = 0;
	return open_and_talk(p);
}

static const char *child_opens_anew(size_t arg)
{
	struct pair p, of_child;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(talk(&p, 1));
	TRY(in_child(open_anew_and_talk, &of_child));
	return talk(&p, 2);
}

static const char *nothing(struct pair *p)
{
	(void)p;
	return NULL;
}

static const char *child_does_nothing(size_t rounds)
{
	struct pair p;

	TRY(open_pair(&p, &usual));
	for (uint32_t i = 0; i < rounds; i++) {
		TRY(in_child(nothing, &p));
		TRY(talk(&p, i));
	}
	return NULL;
}

/* Calls verbs on all inherited objects. Each call must return. */
static const char *use_inherited(struct pair *p)
{
	struct ibv_send_wr wr = send_wr(9, IBV_WR_SEND, NULL, 0), *bad_send;
	struct ibv_recv_wr rr = { .wr_id = 9 }, *bad_recv;
	struct ibv_port_attr port;
	struct ibv_wc wc;

	ibv_post_send(p->a.qp, &wr, &bad_send);
	ibv_post_recv(p->a.qp, &rr, &bad_recv);
	for (int i = 0; i < 100; i++)
		ibv_poll_cq(p->b.rcq, 1, &wc);
	ibv_req_notify_cq(p->b.rcq, 0);
	ibv_query_port(device, PORT, &port);
	return NULL;
}

static const char *child_uses_inherited(size_t arg)
{
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(talk(&p, 1));
	TRY(in_child(use_inherited, &p));
	TRY(talk(&p, 2));
	TRY(no_wc(p.b.rcq, 10));
	return no_wc(p.a.scq, 10);
}

static const char *destroy_inherited(struct pair *p)
{
	(void)p;
	close_all();
	ibv_close_device(device);
	return NULL;
}

/* The child destroys the inherited objects, as a tidy program does. The parent's connection is not affected. */
static const char *child_destroys_inherited(size_t arg)
{
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(talk(&p, 1));
	TRY(in_child(destroy_inherited, &p));
	sleep_ms(50);
	TRY(state_is(p.a.qp, IBV_QPS_RTS));
	return talk(&p, 2);
}

static const char *use_and_open(struct pair *p)
{
	struct pair own;

	TRY(use_inherited(p));
	TRY(destroy_inherited(p));
	return open_anew_and_talk(&own);
}

static bool enough; /* ends the threads that keep sending */

static void *keep_talking(void *arg)
{
	struct pair *p = arg;

	while (!__atomic_load_n(&enough, __ATOMIC_RELAXED)) { /* so that the library's locks are held much of the time */
		struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, NULL, 0), *bad;
		struct ibv_recv_wr rr = { .wr_id = 1 }, *bad_recv;
		struct ibv_wc wc[8];

		ibv_post_recv(p->b.qp, &rr, &bad_recv);
		ibv_post_send(p->a.qp, &wr, &bad);
		ibv_poll_cq(p->a.scq, 8, wc);
		ibv_poll_cq(p->b.rcq, 8, wc);
	}
	return NULL;
}

/* The process forks while other threads are inside calls. The child must not wait for any of them. */
static const char *fork_during_calls(size_t rounds)
{
	const char *reason = NULL;
	pthread_t threads[3];
	struct pair p, busy[3];

	TRY(open_pair(&p, &usual));
	for (int i = 0; i < 3; i++)
		TRY(open_pair(&busy[i], &usual));
	__atomic_store_n(&enough, false, __ATOMIC_RELAXED);
	for (int i = 0; i < 3; i++)
		ENSURE(!pthread_create(&threads[i], NULL, keep_talking, &busy[i]), "pthread_create");
	for (uint32_t i = 0; i < rounds && !reason; i++) {
		reason = in_child(use_and_open, &busy[i % 3]);
		if (!reason)
			reason = talk(&p, i);
	}
	__atomic_store_n(&enough, true, __ATOMIC_RELAXED);
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	return reason;
}

/* Opens and closes sockets of the device. */
static void *keep_listening(void *arg)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };

	while (channel && !__atomic_load_n(&enough, __ATOMIC_RELAXED)) {
		struct rdma_cm_id *id;

		if (rdma_create_id(channel, &id, NULL, RDMA_PS_TCP))
			break;
		if (!rdma_bind_addr(id, (struct sockaddr *)&any))
			rdma_listen(id, 1);
		rdma_destroy_id(id);
	}
	if (channel)
		rdma_destroy_event_channel(channel);
	return arg;
}

static const char *has_no_internet_socket(struct pair *p)
{
	(void)p;
	for (int fd = 0; fd < 1024; fd++) {
		struct sockaddr_storage name;
		socklen_t len = sizeof name;

		if (!getsockname(fd, (struct sockaddr *)&name, &len))
			ENSURE(name.ss_family != AF_INET && name.ss_family != AF_INET6, "descriptor %d is a socket of the parent", fd);
	}
	return NULL;
}

/* A child does not keep sockets that another thread of its parent closes during the fork: their ports would stay in use. */
static const char *fork_while_closing(size_t rounds)
{
#if defined __SANITIZE_THREAD__
	/* With the thread sanitizer a fork takes too long for so many. */
	rounds = 0;
#endif
	const char *reason = NULL;
	pthread_t thread;
	struct pair p;

	TRY(open_pair(&p, &usual));
	__atomic_store_n(&enough, false, __ATOMIC_RELAXED);
	ENSURE(!pthread_create(&thread, NULL, keep_listening, NULL), "pthread_create");
	for (size_t i = 0; i < rounds && !reason; i++)
		reason = in_child(has_no_internet_socket, &p);
	__atomic_store_n(&enough, true, __ATOMIC_RELAXED);
	pthread_join(thread, NULL);
	return reason;
}

static const char *open_again_in_child(struct pair *p)
{
	struct pair own, of_grandchild;

	(void)p;
	device = NULL;
	kept_count = 0;
	TRY(open_pair(&own, &usual));
	TRY(talk(&own, 3));
	TRY(in_child(open_anew_and_talk, &of_grandchild));
	return talk(&own, 4);
}

static const char *grandchild(size_t arg)
{
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(in_child(open_again_in_child, &p));
	return talk(&p, 5);
}

static const char *inherited_fails(struct pair *p)
{
	struct ibv_send_wr wr = send_wr(9, IBV_WR_SEND, NULL, 0), *bad;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct ibv_async_event event;
	struct ibv_cq *cq;
	struct ibv_wc wc;
	void *context;

	ENSURE(ibv_post_send(p->a.qp, &wr, &bad) == ENODEV, "ibv_post_send in the child does not fail with ENODEV");
	ENSURE(ibv_modify_qp(p->a.qp, &attr, IBV_QP_STATE) == ENODEV, "ibv_modify_qp in the child does not fail with ENODEV");
	ENSURE(ibv_poll_cq(p->a.scq, 1, &wc) < 0, "ibv_poll_cq in the child does not fail");
	ENSURE(!ibv_alloc_pd(device) && errno == ENODEV, "ibv_alloc_pd: %s", strerror(errno));
	ENSURE(!ibv_create_cq(device, 1, NULL, NULL, 0) && errno == ENODEV, "ibv_create_cq: %s", strerror(errno));
	/* Calls that would wait return an error, because no event can arrive. */
	ENSURE(ibv_get_cq_event(p->b.channel, &cq, &context) == -1 && errno == ENODEV,
	       "ibv_get_cq_event in the child does not fail with ENODEV");
	ENSURE(ibv_get_async_event(device, &event) == -1 && errno == ENODEV,
	       "ibv_get_async_event in the child does not fail with ENODEV");
	ENSURE(!ibv_destroy_qp(p->a.qp) && !ibv_destroy_cq(p->a.scq), "destroying");
	return NULL;
}

static const char *child_gets_errors(size_t arg)
{
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &(struct want){ .channels = true }));
	TRY(talk(&p, 1));
	TRY(in_child(inherited_fails, &p));
	return talk(&p, 2);
}

/* Registered memory still belongs to the parent after a fork, even if the parent writes to it first (copy-on-write). */
static const char *memory_stays(size_t arg)
{
	struct region a, b;
	struct ibv_sge from, to;
	struct ibv_send_wr wr;
	struct pair p;
	pid_t pid;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&a, p.a.pd, 100000, ALL_ACCESS));
	TRY(new_region(&b, p.b.pd, 100000, ALL_ACCESS));
	fflush(stdout);
	pid = fork();
	ENSURE(pid >= 0, "fork: %s", strerror(errno));
	if (pid == 0) {
		sleep_ms(300);
		_exit(b.at[0] == FRESH && b.at[99999] == FRESH ? 0 : 1); /* the child's copy is unchanged */
	}
	fill_pattern(a.at, a.len, 5);
	from = sge_of(&a, 0, a.len);
	to = sge_of(&b, 0, b.len);
	TRY(post_recv(p.b.qp, 1, &to, 1));
	wr = send_wr(2, IBV_WR_SEND, &from, 1);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.b.rcq, 1, IBV_WC_RECV, NULL));
	TRY(same_pattern(b.at, b.len, 5));
	TRY(expect_ok(p.a.scq, 2, IBV_WC_SEND, NULL));
	return child_ends_well(pid);
}

/* The process runs commands during traffic. */
static const char *run_commands(size_t rounds)
{
	extern char **environ;
	char *const command[] = { "true", NULL };
	struct pair p;

	TRY(open_pair(&p, &usual));
	for (uint32_t i = 0; i < rounds; i++) {
		pid_t pid;
		int rc = posix_spawnp(&pid, command[0], NULL, NULL, command, environ);

		ENSURE(!rc, "posix_spawnp: %s", strerror(rc));
		TRY(talk(&p, i));
		TRY(child_ends_well(pid));
		ENSURE(system("exit 0") == 0, "system");
		TRY(talk(&p, 1000 + i));
	}
	return NULL;
}

/* Sockets and event descriptors of the device are not inherited by executed programs. */
static const char *nothing_is_inherited(size_t arg)
{
	struct pair p;
	int before, after;

	(void)arg;
	before = system("exit $(ls /proc/self/fd | wc -l)");
	TRY(open_pair(&p, &usual));
	TRY(talk(&p, 1));
	after = system("exit $(ls /proc/self/fd | wc -l)");
	ENSURE(WIFEXITED(before) && WIFEXITED(after), "system");
	ENSURE(WEXITSTATUS(after) <= WEXITSTATUS(before), "a command inherits %d descriptors, %d before the connection",
	       WEXITSTATUS(after), WEXITSTATUS(before));
	return NULL;
}

static int close_dm(void *p) { return ibv_free_dm(p); }

static const char *all_device_memory(void)
{
	struct ibv_device_attr_ex limits;
	struct ibv_alloc_dm_attr all = { 0 };
	struct ibv_dm *dm;

	ENSURE(!ibv_query_device_ex(device, NULL, &limits), "ibv_query_device_ex");
	all.length = (size_t)limits.max_dm_size;
	dm = ibv_alloc_dm(device, &all);
	ENSURE(dm, "ibv_alloc_dm: %s", strerror(errno));
	keep(close_dm, dm, "ibv_free_dm");
	return NULL;
}

static const char *own_device_memory(struct pair *p)
{
	(void)p;
	device = NULL;
	kept_count = 0;
	TRY(open_device());
	TRY(all_device_memory());
	return close_all();
}

/* The device of a child has its own memory, although its parent uses all of its own. */
static const char *device_memory(size_t arg)
{
	(void)arg;
	TRY(open_device());
	TRY(all_device_memory());
	return in_child(own_device_memory, NULL);
}

static const struct test tests[] = {
	{ "child_opens_first", child_opens_first, 0, 0, false },
	{ "fork_during_first_open", fork_during_first_open, 100, 0, false },
	{ "fork_init", fork_init, 0, 0, false },
	{ "child_opens_anew", child_opens_anew, 0, 0, false },
	{ "child_does_nothing", child_does_nothing, 20, 0, false },
	{ "child_uses_inherited", child_uses_inherited, 0, 0, false },
	{ "child_destroys_inherited", child_destroys_inherited, 0, 0, false },
	{ "fork_during_calls", fork_during_calls, 30, 0, false },
	{ "fork_while_closing", fork_while_closing, 300, 0, false },
	{ "grandchild", grandchild, 0, 0, false },
	{ "child_gets_errors", child_gets_errors, 0, 0, false },
	{ "memory_stays", memory_stays, 0, 0, false },
	{ "device_memory", device_memory, 0, 0, false },
	{ "run_commands", run_commands, 20, 0, false },
	{ "nothing_is_inherited", nothing_is_inherited, 0, 0, false },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
