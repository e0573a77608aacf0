/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Endpoints of the libfabric provider in one process, with the objects that are bound to them, and functions that wait for their
 * completions with a limit.
 */
#ifndef ANYWARP_TESTS_FI_SIDES_H
#define ANYWARP_TESTS_FI_SIDES_H

#include "ends.h"

#include <netinet/in.h>
#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>
#include <sys/mman.h>
#include <sys/uio.h>

#define INJECT 16384u
#define EAGER 16384u

static struct fi_info *info;
static struct fid_fabric *fabric;

/* An endpoint and the objects that are bound to it. */
struct side {
	struct fid_domain *domain;
	struct fid_ep *ep;
	struct fid_cq *tx, *rx;
	struct fid_av *av;
	struct fid_cntr *cntr;
	fi_addr_t peer, self;
};

/* What to open for an endpoint. A member that is 0 means the default. */
struct setup {
	struct fi_info *info;      /* default: that of find_provider() */
	struct fi_cq_attr cq;      /* default: entries with all fields, and a descriptor to wait on */
	enum fi_av_type av;        /* default: a table */
	uint64_t selective;        /* 0 or FI_SELECTIVE_COMPLETION, for the transmit queue */
	bool one_queue;            /* uses one queue for transmits and receives */
	uint64_t counts;           /* what the counter counts; default: FI_SEND | FI_WRITE | FI_READ */
	const struct side *beside; /* another endpoint, whose domain is used; default: a new domain */
	bool its_queues;           /* uses the queues of `beside` */
	bool its_vector;           /* uses the address vector of `beside` */
};

UNUSED static int close_fid(void *fid)
{
	return -fi_close(fid);
}

#define OK(call)                                                                                                        \
	do {                                                                                                           \
		int rc_ = (int)(call);                                                                                 \
		ENSURE(rc_ >= 0, #call ": %s", fi_strerror(-rc_));                                                     \
	} while (0)
#define GIVES(error, call)                                                                                              \
	do {                                                                                                           \
		int rc_ = (int)(call);                                                                                 \
		ENSURE(rc_ == -(error), #call ": %d, expected %d", rc_, -(error));                                     \
	} while (0)

static const char *find_provider(void)
{
	struct fi_info *hints;
	int rc;

	if (info)
		return NULL;
	hints = fi_allocinfo();
	hints->fabric_attr->prov_name = strdup("anywarp");
	hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_DIRECTED_RECV | FI_SOURCE | FI_MULTI_RECV;
	rc = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info);
	fi_freeinfo(hints);
	ENSURE(!rc, "fi_getinfo: %s", fi_strerror(-rc));
	OK(fi_fabric(info->fabric_attr, &fabric, NULL));
	return NULL;
}

static const char *open_side_as(struct side *e, const struct setup *how)
{
	struct fi_cq_attr cq = how->cq;
	struct fi_av_attr av = { .type = how->av ? how->av : FI_AV_TABLE };
	struct fi_info *what;

	TRY(find_provider());
	what = how->info ? how->info : info;
	if (cq.format == FI_CQ_FORMAT_UNSPEC)
		cq.format = FI_CQ_FORMAT_TAGGED;
	if (cq.wait_obj == FI_WAIT_NONE)
		cq.wait_obj = FI_WAIT_FD;
	memset(e, 0, sizeof *e);
	if (how->beside) {
		e->domain = how->beside->domain;
	} else {
		OK(fi_domain(fabric, what, &e->domain, NULL));
		keep(close_fid, e->domain, "domain");
	}
	if (how->its_queues) {
		e->tx = how->beside->tx;
		e->rx = how->beside->rx;
	} else {
		OK(fi_cq_open(e->domain, &cq, &e->tx, NULL));
		keep(close_fid, e->tx, "transmit queue");
		e->rx = e->tx;
	}
	if (!how->its_queues && !how->one_queue) {
		OK(fi_cq_open(e->domain, &cq, &e->rx, NULL));
		keep(close_fid, e->rx, "receive queue");
	}
	if (how->its_vector) {
		e->av = how->beside->av;
	} else {
		OK(fi_av_open(e->domain, &av, &e->av, NULL));
		keep(close_fid, e->av, "address vector");
	}
	OK(fi_cntr_open(e->domain, NULL, &e->cntr, NULL));
	keep(close_fid, e->cntr, "counter");
	OK(fi_endpoint(e->domain, what, &e->ep, NULL));
	keep(close_fid, e->ep, "endpoint");
	GIVES(FI_ENOAV, fi_enable(e->ep));
	OK(fi_ep_bind(e->ep, &e->tx->fid, FI_TRANSMIT | how->selective));
	OK(fi_ep_bind(e->ep, &e->rx->fid, FI_RECV));
	OK(fi_ep_bind(e->ep, &e->av->fid, 0));
	OK(fi_ep_bind(e->ep, &e->cntr->fid, how->counts ? how->counts : FI_SEND | FI_WRITE | FI_READ));
	GIVES(FI_EOPBADSTATE, fi_send(e->ep, NULL, 0, NULL, 0, NULL));
	OK(fi_enable(e->ep));
	return NULL;
}

UNUSED static const char *open_side(struct side *e, uint64_t selective)
{
	struct setup how = { .selective = selective };

	return open_side_as(e, &how);
}

static const char *introduce(struct side *a, struct side *b)
{
	char name[64];
	size_t len = sizeof name;

	OK(fi_getname(&b->ep->fid, name, &len));
	ENSURE(fi_av_insert(a->av, name, 1, &a->peer, 0, NULL) == 1, "fi_av_insert");
	len = sizeof name;
	OK(fi_getname(&a->ep->fid, name, &len));
	ENSURE(fi_av_insert(a->av, name, 1, &a->self, 0, NULL) == 1, "fi_av_insert of itself");
	return NULL;
}

UNUSED static const char *open_sides_as(struct side *a, struct side *b, const struct setup *how)
{
	TRY(open_side_as(a, how));
	TRY(open_side_as(b, how));
	TRY(introduce(a, b));
	return introduce(b, a);
}

UNUSED static const char *open_sides(struct side *a, struct side *b)
{
	struct setup how = { 0 };

	return open_sides_as(a, b, &how);
}

static struct side *moving[4];

/* The longest wait for a completion, in milliseconds. */
static unsigned int patience = WAIT_MS;

/* Waits for the next completion of `cq` and meanwhile drives the endpoints in `moving`. */
UNUSED static const char *next(struct fid_cq *cq, struct fi_cq_tagged_entry *entry, fi_addr_t *source)
{
	uint64_t until = now_ms() + patience;
	struct fi_cq_err_entry error = { 0 };
	fi_addr_t nobody;
	ssize_t n;

	while ((n = fi_cq_readfrom(cq, entry, 1, source ? source : &nobody)) == -FI_EAGAIN) {
		ENSURE(now_ms() < until, "no completion arrives");
		for (size_t i = 0; i < COUNT(moving) && moving[i]; i++) {
			fi_cq_read(moving[i]->tx, NULL, 0);
			fi_cq_read(moving[i]->rx, NULL, 0);
		}
	}
	if (n == -FI_EAVAIL) {
		fi_cq_readerr(cq, &error, 0);
		return because("a failure: %s", fi_strerror(error.err));
	}
	ENSURE(n == 1, "fi_cq_readfrom returns %zd", n);
	return NULL;
}

UNUSED static const char *next_error(struct fid_cq *cq, struct fi_cq_err_entry *error, unsigned int ms)
{
	uint64_t until = now_ms() + ms;
	struct fi_cq_tagged_entry entry;
	ssize_t n;

	memset(error, 0, sizeof *error);
	while ((n = fi_cq_read(cq, &entry, 1)) == -FI_EAGAIN) {
		ENSURE(now_ms() < until, "the operation does not fail");
		for (size_t i = 0; i < COUNT(moving) && moving[i]; i++)
			fi_cq_read(moving[i]->rx, NULL, 0);
	}
	ENSURE(n == -FI_EAVAIL, "fi_cq_read returns %zd", n);
	ENSURE(fi_cq_readerr(cq, error, 0) == 1, "fi_cq_readerr");
	return NULL;
}

UNUSED static void move_both(struct side *a, struct side *b)
{
	memset(moving, 0, sizeof moving);
	moving[0] = a;
	moving[1] = b;
}

UNUSED static void fill_bytes(uint8_t *at, size_t len, size_t seed)
{
	for (size_t i = 0; i < len; i++)
		at[i] = (uint8_t)(seed + i * 7 + i / 251);
}

UNUSED static const char *check_bytes(const uint8_t *at, size_t len, size_t seed)
{
	for (size_t i = 0; i < len; i++)
		ENSURE(at[i] == (uint8_t)(seed + i * 7 + i / 251), "byte %zu of %zu differs", i, len);
	return NULL;
}

static const size_t sizes[] = { 0, 1, 991, 992, 993, 4096, EAGER - 1, EAGER, EAGER + 1, 70000, 1 << 20 };
static uint8_t out[1 << 20], in[(1 << 20) + 16];

#endif
