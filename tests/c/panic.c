/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A panic inside the library: the program survives, gets IBV_EVENT_DEVICE_FATAL and flushed completions, and can close
 * everything. Runs on a build with debug assertions, which panics on request: when ANYWARP_TEST_PANIC is set and a
 * request with one of the identifiers below is posted.
 */
#include "ends.h"

#include <pthread.h>
#include <rdma/rdma_cma.h>

#define IN_CALL 0x70616e6963000001u
#define IN_WORKER 0x70616e6963000002u
#define RECEIVES 4u

static const struct want usual = { 0 };

static const char *post_receives(struct ibv_qp *qp)
{
	for (uint64_t i = 0; i < RECEIVES; i++)
		TRY(post_recv(qp, i, NULL, 0));
	return NULL;
}

/* A failed device creates no objects, each call returns the documented error, and existing objects can be destroyed. */
static const char *has_failed(struct pair *p)
{
	struct ibv_send_wr wr = send_wr(9, IBV_WR_SEND, NULL, 0), *bad_send;
	struct ibv_recv_wr recv = { .wr_id = 9 }, *bad_recv;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct ibv_device **list;
	struct ibv_pd *pd;
	int n, rc;

	rc = ibv_post_send(p->a.qp, &wr, &bad_send);
	ENSURE(rc == EIO, "ibv_post_send returns %d", rc);
	ENSURE(bad_send == &wr, "ibv_post_send does not say which request it refused");
	rc = ibv_post_recv(p->a.qp, &recv, &bad_recv);
	ENSURE(rc == EIO, "ibv_post_recv returns %d", rc);
	rc = ibv_modify_qp(p->a.qp, &attr, IBV_QP_STATE);
	ENSURE(rc == EIO, "ibv_modify_qp returns %d", rc);
	errno = 0;
	ENSURE(!ibv_create_cq(device, 1, NULL, NULL, 0) && errno == EIO, "ibv_create_cq: %s", strerror(errno));
	errno = 0;
	ENSURE(!ibv_reg_mr(p->a.pd, &n, sizeof n, 0) && errno == EIO, "ibv_reg_mr: %s", strerror(errno));
	errno = 0;
	ENSURE(!ibv_create_qp(p->a.pd, &(struct ibv_qp_init_attr){
					       .qp_type = IBV_QPT_RC, .send_cq = p->a.scq, .recv_cq = p->a.rcq,
					       .cap = { .max_send_wr = 1, .max_recv_wr = 1 } }) &&
		       errno == EIO,
	       "ibv_create_qp: %s", strerror(errno));
	list = ibv_get_device_list(&n);
	ENSURE(list && n >= 1, "no device list");
	errno = 0;
	ENSURE(!ibv_open_device(list[0]) && errno == EIO, "ibv_open_device: %s", strerror(errno));
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(device);
	ENSURE(!pd || !ibv_dealloc_pd(pd), "ibv_dealloc_pd");
	return NULL;
}

static const char *receives_are_flushed(struct end *e)
{
	return expect_flushed(e->rcq, 0, RECEIVES);
}

/* The other end is in this process too, so both are flushed. */
static const char *fatal_event_and_flush(struct pair *p)
{
	TRY(async_event(IBV_EVENT_DEVICE_FATAL, NULL));
	TRY(receives_are_flushed(&p->a));
	TRY(receives_are_flushed(&p->b));
	TRY(has_failed(p));
	TRY(close_all());
	ENSURE(!ibv_close_device(device), "ibv_close_device: %s", strerror(errno));
	device = NULL;
	return NULL;
}

static const char *open_all(struct pair *p)
{
	TRY(open_pair(p, &usual));
	TRY(post_receives(p->a.qp));
	return post_receives(p->b.qp);
}

static const char *in_a_call(size_t arg)
{
	struct ibv_send_wr wr = send_wr(IN_CALL, IBV_WR_SEND, NULL, 0), *bad;
	struct pair p;
	int rc;

	(void)arg;
	TRY(open_all(&p));
	rc = ibv_post_send(p.a.qp, &wr, &bad);
	ENSURE(rc == EIO, "a call that panics returns %d, expected EIO", rc);
	return fatal_event_and_flush(&p);
}

/* The device's thread panics while the program waits for an event: a message arrives, and no thread polls. */
static const char *in_the_device_thread(size_t arg)
{
	struct ibv_send_wr wr = send_wr(7, IBV_WR_SEND, NULL, 0), *bad;
	struct ibv_wc wc;
	struct pair p;
	int rc;

	(void)arg;
	TRY(open_all(&p));
	TRY(post_recv(p.b.qp, IN_WORKER, NULL, 0));
	/* The panic may happen earlier: the sockets are new, and the device's thread may poll them. */
	rc = ibv_post_send(p.a.qp, &wr, &bad);
	ENSURE(!rc || rc == EIO, "ibv_post_send returns %d", rc);
	TRY(async_event(IBV_EVENT_DEVICE_FATAL, NULL));
	if (!rc) {
		TRY(next_wc(p.a.scq, &wc, WAIT_MS));
		if (wc.status != IBV_WC_SUCCESS)
			TRY(wc_is(&wc, 7, IBV_WC_WR_FLUSH_ERR));
	}
	TRY(receives_are_flushed(&p.a));
	for (uint64_t i = 0; i < RECEIVES; i++) {
		TRY(next_wc(p.b.rcq, &wc, WAIT_MS));
		/* The message may have arrived before the panic. */
		if (!(i == 0 && wc.status == IBV_WC_SUCCESS))
			TRY(wc_is(&wc, i, IBV_WC_WR_FLUSH_ERR));
	}
	TRY(next_wc(p.b.rcq, &wc, WAIT_MS));
	TRY(wc_is(&wc, IN_WORKER, IBV_WC_WR_FLUSH_ERR));
	TRY(has_failed(&p));
	TRY(close_all());
	ENSURE(!ibv_close_device(device), "ibv_close_device: %s", strerror(errno));
	device = NULL;
	return NULL;
}

/* Datagram queue pairs are flushed like the others. */
static const char *datagrams(size_t arg)
{
	struct ibv_send_wr wr = send_wr(IN_CALL, IBV_WR_SEND, NULL, 0), *bad;
	struct pair p, datagrams;

	(void)arg;
	TRY(open_all(&p));
	TRY(open_pair(&datagrams, &(struct want){ .type = IBV_QPT_UD }));
	TRY(post_receives(datagrams.a.qp));
	ENSURE(ibv_post_send(p.a.qp, &wr, &bad) == EIO, "the call does not fail");
	TRY(async_event(IBV_EVENT_DEVICE_FATAL, NULL));
	return receives_are_flushed(&datagrams.a);
}

/* ---------------------------------------------------------------- waiting threads */

struct waiter {
	struct ibv_comp_channel *channel;
	struct rdma_event_channel *cm;
	enum rdma_cm_event_type cm_event;
	int rc;
};

static void *wait_for_completion(void *arg)
{
	struct waiter *w = arg;
	struct ibv_cq *cq;
	void *context;

	w->rc = ibv_get_cq_event(w->channel, &cq, &context);
	if (!w->rc)
		ibv_ack_cq_events(cq, 1);
	return NULL;
}

static void *wait_for_cm(void *arg)
{
	struct waiter *w = arg;
	struct rdma_cm_event *event;

	w->rc = rdma_get_cm_event(w->cm, &event);
	if (!w->rc) {
		w->cm_event = event->event;
		rdma_ack_cm_event(event);
	}
	return NULL;
}

static const char *join(pthread_t thread)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += WAIT_MS / 1000;
	ENSURE(!pthread_timedjoin_np(thread, NULL, &until), "a thread still waits");
	return NULL;
}

/* Threads that wait in the library wake up: one in a completion channel, one in an event channel. */
static const char *waiting_threads_wake(size_t arg)
{
	struct ibv_send_wr wr = send_wr(IN_CALL, IBV_WR_SEND, NULL, 0), *bad;
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct waiter completion = { .rc = -1 }, cm = { .rc = -1 };
	pthread_t threads[3];
	struct waiter bound = { .rc = -1 };
	struct rdma_cm_id *id, *another, *bound_id;
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &(struct want){ .channels = true }));
	TRY(post_receives(p.a.qp));
	ENSURE(!ibv_req_notify_cq(p.a.rcq, 0), "ibv_req_notify_cq");
	completion.channel = p.a.channel;
	cm.cm = rdma_create_event_channel();
	ENSURE(cm.cm && !rdma_create_id(cm.cm, &id, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	ENSURE(!rdma_bind_addr(id, (struct sockaddr *)&address) && !rdma_listen(id, 1), "rdma_listen: %s",
	       strerror(errno));
	/* An identifier that is bound to the device gets the event although it is not connected. */
	bound.cm = rdma_create_event_channel();
	ENSURE(bound.cm && !rdma_create_id(bound.cm, &bound_id, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	ENSURE(!rdma_bind_addr(bound_id, (struct sockaddr *)&address) && bound_id->verbs, "rdma_bind_addr: %s", strerror(errno));
	ENSURE(!pthread_create(&threads[0], NULL, wait_for_completion, &completion) &&
		       !pthread_create(&threads[1], NULL, wait_for_cm, &cm) &&
		       !pthread_create(&threads[2], NULL, wait_for_cm, &bound),
	       "pthread_create");
	sleep_ms(50); /* gives them time to block; the test is valid even if they do not */
	ENSURE(ibv_post_send(p.a.qp, &wr, &bad) == EIO, "the call does not fail");
	TRY(join(threads[0]));
	TRY(join(threads[1]));
	TRY(join(threads[2]));
	ENSURE(!completion.rc, "ibv_get_cq_event fails");
	ENSURE(!cm.rc && cm.cm_event == RDMA_CM_EVENT_DEVICE_REMOVAL, "rdma_get_cm_event: %d, %s", cm.rc,
	       rdma_event_str(cm.cm_event));
	ENSURE(!bound.rc && bound.cm_event == RDMA_CM_EVENT_DEVICE_REMOVAL, "rdma_get_cm_event: %d, %s", bound.rc,
	       rdma_event_str(bound.cm_event));
	TRY(receives_are_flushed(&p.a));
	errno = 0;
	ENSURE(rdma_create_id(cm.cm, &another, NULL, RDMA_PS_TCP) && errno == EIO, "rdma_create_id: %s", strerror(errno));
	ENSURE(!rdma_destroy_id(id), "rdma_destroy_id: %s", strerror(errno));
	rdma_destroy_event_channel(cm.cm);
	ENSURE(!rdma_destroy_id(bound_id), "rdma_destroy_id: %s", strerror(errno));
	rdma_destroy_event_channel(bound.cm);
	return NULL;
}

/* A failed device uses no processor time, although its sockets are readable: no thread polls them in a loop. */
static const char *failed_device_is_idle(size_t arg)
{
	struct ibv_send_wr wr = send_wr(IN_CALL, IBV_WR_SEND, NULL, 0), *bad;
	struct timespec before, after;
	struct pair p;

	(void)arg;
	TRY(open_all(&p));
	ENSURE(ibv_post_send(p.a.qp, &wr, &bad) == EIO, "the call does not fail");
	TRY(async_event(IBV_EVENT_DEVICE_FATAL, NULL));
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
	sleep_ms(500);
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
	ENSURE((after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1000000 < 100,
	       "the failed device uses processor time");
	return NULL;
}

static const struct test tests[] = {
	{ "in_a_call", in_a_call, 0, 0, true },
	{ "in_the_device_thread", in_the_device_thread, 0, 0, true },
	{ "datagrams", datagrams, 0, 0, true },
	{ "waiting_threads_wake", waiting_threads_wake, 0, 0, true },
	{ "failed_device_is_idle", failed_device_is_idle, 0, 0, true },
};

int main(int argc, char **argv)
{
	setenv("ANYWARP_TEST_PANIC", "1", 1);
	return run_tests(tests, COUNT(tests), argc, argv);
}
