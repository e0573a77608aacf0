/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The behaviour that the list `quick` of libfabric's own tests requires of reliable-datagram endpoints, as far as fi.c does not
 * test it: the objects of the interface, every call for a transfer, the limits of resources, and several endpoints at once.
 * docs/mpi.md tells which test here or in fi.c stands for which of libfabric's.
 */
#include "fi_sides.h"
#include "network.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>

#define MODERN (FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY)
#define KINDS (FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC)

static struct fi_info *new_hints(void)
{
	struct fi_info *hints = fi_allocinfo();

	hints->fabric_attr->prov_name = strdup("anywarp");
	hints->domain_attr->mr_mode = MODERN;
	hints->caps = KINDS;
	return hints;
}

static int close_info(void *which)
{
	fi_freeinfo(which);
	return 0;
}

/* ---------------------------------------------------------------- fi_getinfo */

enum part { INFO, TX, RX, EP, DOMAIN };
enum relation { REFUSED, SAME, AT_LEAST, CONTAINS };

struct hint {
	const char *what;
	enum part part;
	size_t offset, size;
	uint64_t value;
	enum relation answer;
};

#define HINT(part, type, field, value, answer)                                                                          \
	{ #type "." #field " " #value, part, offsetof(struct type, field), sizeof(((struct type *)0)->field),          \
	  (uint64_t)(value), answer }

static const struct hint hints_of_one_field[] = {
	HINT(INFO, fi_info, caps, FI_MSG, CONTAINS),
	HINT(INFO, fi_info, caps, FI_TAGGED, CONTAINS),
	HINT(INFO, fi_info, caps, FI_TAGGED | FI_RECV, CONTAINS),
	HINT(INFO, fi_info, caps, FI_MSG | FI_SEND | FI_RECV | FI_MULTI_RECV, CONTAINS),
	HINT(INFO, fi_info, caps, FI_RMA | FI_READ | FI_REMOTE_WRITE, CONTAINS),
	HINT(INFO, fi_info, caps, FI_RMA | FI_RECV, CONTAINS),
	HINT(INFO, fi_info, caps, FI_ATOMIC, CONTAINS),
	HINT(INFO, fi_info, caps, FI_MSG | FI_SOURCE | FI_DIRECTED_RECV | FI_FENCE, CONTAINS),
	HINT(INFO, fi_info, caps, FI_MSG | FI_LOCAL_COMM | FI_REMOTE_COMM, CONTAINS),
	HINT(INFO, fi_info, caps, FI_MSG | FI_MULTICAST, REFUSED),
	HINT(INFO, fi_info, caps, FI_MSG | FI_TRIGGER, REFUSED),
	HINT(INFO, fi_info, caps, FI_RMA | FI_RMA_EVENT, REFUSED),
	HINT(INFO, fi_info, caps, FI_RMA | FI_RMA_PMEM, REFUSED),
	HINT(INFO, fi_info, caps, FI_MSG | FI_NAMED_RX_CTX, REFUSED),
	HINT(INFO, fi_info, caps, FI_MSG | FI_SHARED_AV, REFUSED),
	HINT(INFO, fi_info, caps, FI_MSG | FI_SOURCE | FI_SOURCE_ERR, REFUSED),
	HINT(INFO, fi_info, caps, FI_MSG | FI_VARIABLE_MSG, REFUSED),
	HINT(INFO, fi_info, caps, FI_MSG | FI_HMEM, REFUSED),
	HINT(INFO, fi_info, caps, FI_COLLECTIVE, REFUSED),
	HINT(INFO, fi_info, addr_format, FI_SOCKADDR_IN, SAME),
	HINT(INFO, fi_info, addr_format, FI_SOCKADDR_IB, REFUSED),
	HINT(INFO, fi_info, addr_format, FI_ADDR_STR, REFUSED),
	HINT(EP, fi_ep_attr, type, FI_EP_RDM, SAME),
	HINT(EP, fi_ep_attr, type, FI_EP_MSG, REFUSED),
	HINT(EP, fi_ep_attr, type, FI_EP_DGRAM, REFUSED),
	HINT(EP, fi_ep_attr, protocol, FI_PROTO_RXM, REFUSED),
	HINT(EP, fi_ep_attr, protocol_version, 1, SAME),
	HINT(EP, fi_ep_attr, protocol_version, 77, REFUSED),
	HINT(EP, fi_ep_attr, max_msg_size, 1 << 30, AT_LEAST),
	HINT(EP, fi_ep_attr, max_msg_size, SIZE_MAX, REFUSED),
	HINT(EP, fi_ep_attr, mem_tag_format, 0xff00ff, SAME),
	HINT(EP, fi_ep_attr, tx_ctx_cnt, 1, AT_LEAST),
	HINT(EP, fi_ep_attr, tx_ctx_cnt, 2, REFUSED),
	HINT(EP, fi_ep_attr, rx_ctx_cnt, 2, REFUSED),
	HINT(EP, fi_ep_attr, tx_ctx_cnt, FI_SHARED_CONTEXT, REFUSED),
	HINT(EP, fi_ep_attr, auth_key_size, 8, REFUSED),
	HINT(EP, fi_ep_attr, max_order_raw_size, 1, REFUSED),
	HINT(EP, fi_ep_attr, max_order_war_size, 1, REFUSED),
	HINT(EP, fi_ep_attr, max_order_waw_size, 1, REFUSED),
	HINT(TX, fi_tx_attr, caps, FI_MSG | FI_SEND, CONTAINS),
	HINT(TX, fi_tx_attr, caps, FI_TRIGGER, REFUSED),
	HINT(TX, fi_tx_attr, inject_size, INJECT, AT_LEAST),
	HINT(TX, fi_tx_attr, inject_size, INJECT + 1, REFUSED),
	HINT(TX, fi_tx_attr, size, 64, AT_LEAST),
	HINT(TX, fi_tx_attr, size, 1 << 20, REFUSED),
	HINT(TX, fi_tx_attr, iov_limit, 4, AT_LEAST),
	HINT(TX, fi_tx_attr, iov_limit, 5, REFUSED),
	HINT(TX, fi_tx_attr, rma_iov_limit, 1, AT_LEAST),
	HINT(TX, fi_tx_attr, rma_iov_limit, 2, REFUSED),
	HINT(TX, fi_tx_attr, msg_order, FI_ORDER_SAS, CONTAINS),
	HINT(TX, fi_tx_attr, msg_order, FI_ORDER_ATOMIC_RAW | FI_ORDER_ATOMIC_WAW, CONTAINS),
	HINT(TX, fi_tx_attr, msg_order, FI_ORDER_RMA_WAW, REFUSED),
	HINT(TX, fi_tx_attr, msg_order, FI_ORDER_RAW, REFUSED),
	HINT(TX, fi_tx_attr, msg_order, FI_ORDER_SAW, REFUSED),
	HINT(TX, fi_tx_attr, comp_order, FI_ORDER_STRICT, REFUSED),
	HINT(TX, fi_tx_attr, op_flags, FI_COMPLETION, SAME),
	HINT(TX, fi_tx_attr, op_flags, FI_INJECT, SAME),
	HINT(TX, fi_tx_attr, op_flags, FI_INJECT_COMPLETE, SAME),
	HINT(TX, fi_tx_attr, op_flags, FI_TRANSMIT_COMPLETE, SAME),
	HINT(TX, fi_tx_attr, op_flags, FI_DELIVERY_COMPLETE, SAME),
	HINT(TX, fi_tx_attr, op_flags, FI_COMMIT_COMPLETE, REFUSED),
	HINT(TX, fi_tx_attr, op_flags, FI_MATCH_COMPLETE, REFUSED),
	HINT(RX, fi_rx_attr, caps, FI_MSG | FI_RECV, CONTAINS),
	HINT(RX, fi_rx_attr, size, 1024, AT_LEAST),
	HINT(RX, fi_rx_attr, size, 1 << 30, REFUSED),
	HINT(RX, fi_rx_attr, total_buffered_recv, 1 << 20, AT_LEAST),
	HINT(RX, fi_rx_attr, total_buffered_recv, 1ull << 40, REFUSED),
	HINT(RX, fi_rx_attr, iov_limit, 4, AT_LEAST),
	HINT(RX, fi_rx_attr, iov_limit, 5, REFUSED),
	HINT(RX, fi_rx_attr, msg_order, FI_ORDER_SAS, CONTAINS),
	HINT(RX, fi_rx_attr, msg_order, FI_ORDER_WAR, REFUSED),
	HINT(RX, fi_rx_attr, comp_order, FI_ORDER_DATA, REFUSED),
	HINT(RX, fi_rx_attr, op_flags, FI_MULTI_RECV, SAME),
	HINT(RX, fi_rx_attr, op_flags, FI_MATCH_COMPLETE, REFUSED),
	HINT(DOMAIN, fi_domain_attr, threading, FI_THREAD_SAFE, SAME),
	HINT(DOMAIN, fi_domain_attr, threading, FI_THREAD_DOMAIN, SAME),
	HINT(DOMAIN, fi_domain_attr, threading, FI_THREAD_COMPLETION, SAME),
	HINT(DOMAIN, fi_domain_attr, control_progress, FI_PROGRESS_MANUAL, SAME),
	HINT(DOMAIN, fi_domain_attr, control_progress, FI_PROGRESS_AUTO, SAME),
	HINT(DOMAIN, fi_domain_attr, data_progress, FI_PROGRESS_MANUAL, SAME),
	HINT(DOMAIN, fi_domain_attr, data_progress, FI_PROGRESS_AUTO, REFUSED),
	HINT(DOMAIN, fi_domain_attr, resource_mgmt, FI_RM_ENABLED, SAME),
	HINT(DOMAIN, fi_domain_attr, av_type, FI_AV_MAP, SAME),
	HINT(DOMAIN, fi_domain_attr, av_type, FI_AV_TABLE, SAME),
	HINT(DOMAIN, fi_domain_attr, cq_data_size, 8, AT_LEAST),
	HINT(DOMAIN, fi_domain_attr, cq_data_size, 9, REFUSED),
	HINT(DOMAIN, fi_domain_attr, mr_key_size, 8, AT_LEAST),
	HINT(DOMAIN, fi_domain_attr, mr_key_size, 9, REFUSED),
	HINT(DOMAIN, fi_domain_attr, mr_iov_limit, 2, REFUSED),
	HINT(DOMAIN, fi_domain_attr, cq_cnt, 100, AT_LEAST),
	HINT(DOMAIN, fi_domain_attr, ep_cnt, 100, AT_LEAST),
	HINT(DOMAIN, fi_domain_attr, tx_ctx_cnt, 100, AT_LEAST),
	HINT(DOMAIN, fi_domain_attr, rx_ctx_cnt, 100, AT_LEAST),
	HINT(DOMAIN, fi_domain_attr, cntr_cnt, 100, AT_LEAST),
	HINT(DOMAIN, fi_domain_attr, cntr_cnt, 1 << 30, REFUSED),
	HINT(DOMAIN, fi_domain_attr, mr_cnt, 100, AT_LEAST),
	HINT(DOMAIN, fi_domain_attr, mr_cnt, 1 << 30, REFUSED),
	HINT(DOMAIN, fi_domain_attr, max_err_data, 1, REFUSED),
	HINT(DOMAIN, fi_domain_attr, max_ep_tx_ctx, 1, AT_LEAST),
	HINT(DOMAIN, fi_domain_attr, max_ep_stx_ctx, 1, REFUSED),
	HINT(DOMAIN, fi_domain_attr, max_ep_srx_ctx, 1, REFUSED),
	HINT(DOMAIN, fi_domain_attr, auth_key_size, 8, REFUSED),
	HINT(DOMAIN, fi_domain_attr, caps, FI_LOCAL_COMM, CONTAINS),
	HINT(DOMAIN, fi_domain_attr, caps, FI_LOCAL_COMM | FI_SHARED_AV, REFUSED),
};

static uint8_t *field_of(struct fi_info *i, const struct hint *h)
{
	void *parts[] = { i, i->tx_attr, i->rx_attr, i->ep_attr, i->domain_attr };

	return (uint8_t *)parts[h->part] + h->offset;
}

/* One hint at a time: the answer has what was requested, or there is none. */
static const char *hints(size_t arg)
{
	(void)arg;
	for (size_t i = 0; i < COUNT(hints_of_one_field); i++) {
		const struct hint *h = &hints_of_one_field[i];
		struct fi_info *asked = new_hints(), *got = NULL;
		uint64_t value = 0;

		memcpy(field_of(asked, h), &h->value, h->size);
		int rc = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, asked, &got);
		asked->ep_attr->auth_key_size = asked->domain_attr->auth_key_size = 0; /* there is none to free */
		fi_freeinfo(asked);
		ENSURE(rc == (h->answer == REFUSED ? -FI_ENODATA : 0), "%s: %s", h->what, fi_strerror(-rc));
		if (rc)
			continue;
		memcpy(&value, field_of(got, h), h->size);
		bool alone = !got->next;
		fi_freeinfo(got);
		ENSURE(alone, "%s: several answers", h->what);
		ENSURE(h->answer == SAME	? value == h->value
		       : h->answer == AT_LEAST	? value >= h->value
						: (value & h->value) == h->value,
		       "%s: the answer has %#jx", h->what, (uintmax_t)value);
	}
	return NULL;
}

/* Modes of memory registration, by version of the interface. */
static const char *hints_mr_mode(size_t arg)
{
	static const struct {
		uint32_t version;
		uint64_t caps;
		int mode;
		int answer; /* negative: refused */
		uint64_t given;
	} rows[] = {
		{ FI_VERSION(1, 17), KINDS, MODERN, MODERN, KINDS },
		{ FI_VERSION(1, 5), KINDS, MODERN, MODERN, KINDS },
		{ FI_VERSION(1, 17), KINDS, MODERN | FI_MR_LOCAL | FI_MR_RAW | FI_MR_ENDPOINT | FI_MR_HMEM, MODERN, KINDS },
		{ FI_VERSION(1, 17), KINDS, FI_MR_BASIC, FI_MR_BASIC, KINDS },
		{ FI_VERSION(1, 4), KINDS, FI_MR_BASIC, FI_MR_BASIC, KINDS },
		{ FI_VERSION(1, 4), KINDS, FI_MR_UNSPEC, FI_MR_BASIC, KINDS },
		{ FI_VERSION(1, 4), FI_RMA, FI_MR_SCALABLE, -1, 0 },
		{ FI_VERSION(1, 17), FI_RMA, 0, -1, 0 },
		{ FI_VERSION(1, 17), FI_ATOMIC, FI_MR_VIRT_ADDR | FI_MR_ALLOCATED, -1, 0 },
		{ FI_VERSION(1, 17), FI_RMA, FI_MR_PROV_KEY, -1, 0 },
		/* Hints without a mode, or with capabilities for messages only, give no access to memory. */
		{ FI_VERSION(1, 17), 0, 0, 0, FI_MSG | FI_TAGGED },
		{ FI_VERSION(1, 17), FI_MSG, MODERN, 0, FI_MSG },
		{ FI_VERSION(1, 17), 0, MODERN, MODERN, KINDS },
	};

	(void)arg;
	for (size_t i = 0; i < COUNT(rows); i++) {
		struct fi_info *asked = new_hints(), *got = NULL;

		asked->caps = rows[i].caps;
		asked->domain_attr->mr_mode = rows[i].mode;
		int rc = fi_getinfo(rows[i].version, NULL, NULL, 0, asked, &got);
		fi_freeinfo(asked);
		ENSURE(rc == (rows[i].answer < 0 ? -FI_ENODATA : 0), "row %zu: %s", i, fi_strerror(-rc));
		if (rc)
			continue;
		int mode = got->domain_attr->mr_mode;
		uint64_t caps = got->caps & KINDS;
		uint32_t version = got->fabric_attr->api_version;
		fi_freeinfo(got);
		ENSURE(mode == rows[i].answer, "row %zu: mode %#x", i, (unsigned int)mode);
		ENSURE(caps == rows[i].given, "row %zu: capabilities %#jx", i, (uintmax_t)caps);
		ENSURE(version == rows[i].version, "row %zu: version %#x", i, version);
	}
	return NULL;
}

/* Names of the fabric, of the domain and of the provider. */
static const char *hints_names(size_t arg)
{
	static const struct {
		const char *provider, *fabric, *domain;
		bool found;
	} rows[] = {
		{ "anywarp", NULL, NULL, true },     { "anywarp", "anywarp", "anywarp0", true },
		{ "anywarp", NULL, "none", false },  { "anywarp", "none", NULL, false },
		{ "none", NULL, NULL, false },	     { "anywarp", NULL, "anywarp", false },
		{ "anywarp", "anywarp", NULL, true },
	};

	(void)arg;
	for (size_t i = 0; i < COUNT(rows); i++) {
		struct fi_info *asked = new_hints(), *got = NULL;

		free(asked->fabric_attr->prov_name);
		asked->fabric_attr->prov_name = strdup(rows[i].provider);
		asked->fabric_attr->name = rows[i].fabric ? strdup(rows[i].fabric) : NULL;
		asked->domain_attr->name = rows[i].domain ? strdup(rows[i].domain) : NULL;
		int rc = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, asked, &got);
		fi_freeinfo(asked);
		ENSURE(rc == (rows[i].found ? 0 : -FI_ENODATA), "row %zu: %s", i, fi_strerror(-rc));
		if (rc)
			continue;
		bool same = !strcmp(got->fabric_attr->name, "anywarp") && !strcmp(got->domain_attr->name, "anywarp0") &&
			    !strcmp(got->fabric_attr->prov_name, "anywarp");
		fi_freeinfo(got);
		ENSURE(same, "row %zu: other names", i);
	}
	return NULL;
}

static const char *same_address(const char *what, const void *at, size_t len, const char *ip, uint16_t port)
{
	struct sockaddr_in name;
	char text[INET_ADDRSTRLEN];

	if (!ip) {
		ENSURE(!at && !len, "%s of %zu bytes, which was not expected", what, len);
		return NULL;
	}
	ENSURE(at && len == sizeof name, "%s of %zu bytes", what, len);
	memcpy(&name, at, sizeof name);
	inet_ntop(AF_INET, &name.sin_addr, text, sizeof text);
	ENSURE(name.sin_family == AF_INET && !strcmp(text, ip) && ntohs(name.sin_port) == port, "%s %s port %u", what, text,
	       ntohs(name.sin_port));
	return NULL;
}

/* The answer names the fabric and the domain that are open: those of the hints, or else the first ones. */
static const char *hints_opened(size_t arg)
{
	struct fid_domain *domains[2] = { NULL }, unknown;
	struct fi_info *asked, *got;

	(void)arg;
	TRY(find_provider());
	for (size_t opened = 0; opened <= 2; opened++) {
		if (opened) {
			OK(fi_domain(fabric, info, &domains[opened - 1], NULL));
		}
		/* `which` 0 and 1: the hints name this domain; 2: none; 3: one that is not open, as an answer does after its domain was
		 * closed. */
		for (size_t which = 0; which < 4; which++) {
			if (which < 2 && which >= opened)
				continue;
			asked = new_hints();
			asked->fabric_attr->fabric = which < 2 ? fabric : NULL;
			asked->domain_attr->domain = which < 2 ? domains[which] : which == 2 ? NULL : &unknown;
			int rc = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, asked, &got);
			fi_freeinfo(asked);
			OK(rc);
			struct fid_fabric *its_fabric = got->fabric_attr->fabric;
			struct fid_domain *its_domain = got->domain_attr->domain;
			fi_freeinfo(got);
			ENSURE(its_fabric == fabric, "%zu domains, hint %zu: another fabric", opened, which);
			ENSURE(its_domain == domains[which < 2 ? which : 0], "%zu domains, hint %zu: another domain", opened, which);
		}
	}
	/* An answer is usable as hints after the domain that it names has been closed. */
	asked = new_hints();
	OK(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, asked, &got));
	fi_freeinfo(asked);
	OK(close_fid(domains[0]));
	OK(close_fid(domains[1]));
	struct fi_info *again;
	int rc = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, got, &again);
	fi_freeinfo(got);
	OK(rc);
	ENSURE(again->fabric_attr->fabric == fabric && !again->domain_attr->domain, "the answer names a closed domain");
	fi_freeinfo(again);
	return NULL;
}

/* Source and destination addresses, by host, service and flags, and in the hints. */
static const char *hints_addresses(size_t arg)
{
	static const struct sockaddr_in here = { .sin_family = AF_INET, .sin_port = 0x3930, .sin_addr.s_addr = 0x0100007f };
	static const struct sockaddr_in away = { .sin_family = AF_INET, .sin_port = 0x3930, .sin_addr.s_addr = 0x010200c0 };
	enum { NO, MINE, OTHER };
	static const struct {
		const char *node, *service;
		uint64_t flags;
		int source, destination; /* in the hints */
		const char *from;	 /* NULL: refused */
		uint16_t from_port;
		const char *to;
		uint16_t to_port;
	} rows[] = {
		{ NULL, NULL, 0, NO, NO, "127.0.0.1", 0, NULL, 0 },
		{ "127.0.0.1", NULL, FI_SOURCE, NO, NO, "127.0.0.1", 0, NULL, 0 },
		{ NULL, "9228", FI_SOURCE, NO, NO, "127.0.0.1", 9228, NULL, 0 },
		{ "127.0.0.1", "9228", FI_SOURCE, NO, NO, "127.0.0.1", 9228, NULL, 0 },
		{ "127.0.0.1", "9228", FI_SOURCE | FI_NUMERICHOST, NO, NO, "127.0.0.1", 9228, NULL, 0 },
		{ "192.0.2.1", "9228", 0, NO, NO, "127.0.0.1", 0, "192.0.2.1", 9228 },
		{ "192.0.2.1", "9228", FI_NUMERICHOST, NO, NO, "127.0.0.1", 0, "192.0.2.1", 9228 },
		{ "192.0.2.1", NULL, 0, NO, NO, "127.0.0.1", 0, "192.0.2.1", 0 },
		{ NULL, NULL, 0, MINE, NO, "127.0.0.1", 12345, NULL, 0 },
		{ NULL, NULL, 0, NO, OTHER, "127.0.0.1", 0, "192.0.2.1", 12345 },
		{ NULL, NULL, 0, MINE, OTHER, "127.0.0.1", 12345, "192.0.2.1", 12345 },
		/* A host or service in the call is used in place of the hint. */
		{ "127.0.0.1", "9228", FI_SOURCE, MINE, OTHER, "127.0.0.1", 9228, "192.0.2.1", 12345 },
		{ "127.0.0.1", "9228", 0, MINE, OTHER, "127.0.0.1", 12345, "127.0.0.1", 9228 },
		{ NULL, "9228", FI_SOURCE, OTHER, NO, "127.0.0.1", 9228, NULL, 0 },
		{ "127.0.0.1", "http", FI_SOURCE, NO, NO, "127.0.0.1", 80, NULL, 0 },
		{ NULL, "http", FI_SOURCE, NO, NO, "127.0.0.1", 80, NULL, 0 },
		{ "192.0.2.1", "http", 0, NO, NO, "127.0.0.1", 0, "192.0.2.1", 80 },
		{ "192.0.2.1", "9228", FI_SOURCE, NO, NO, NULL, 0, NULL, 0 },
		{ NULL, NULL, 0, OTHER, NO, NULL, 0, NULL, 0 },
		{ "127.0.0.1", "port", FI_SOURCE, NO, NO, NULL, 0, NULL, 0 },
		{ "127.0.0.1", "65536", 0, NO, NO, NULL, 0, NULL, 0 },
		{ "256.0.0.1", NULL, FI_NUMERICHOST, NO, NO, NULL, 0, NULL, 0 },
		{ "localhost", NULL, FI_NUMERICHOST, NO, NO, NULL, 0, NULL, 0 },
	};

	(void)arg;
	for (size_t i = 0; i < COUNT(rows); i++) {
		struct fi_info *asked = new_hints(), *got = NULL;
		const char *why = NULL;

		if (rows[i].service && !strcmp(rows[i].service, "http") && !getservbyname("http", NULL)) {
			fi_freeinfo(asked); /* a system without names of services */
			continue;
		}
		if (rows[i].source) {
			asked->src_addr = malloc(sizeof here);
			memcpy(asked->src_addr, rows[i].source == MINE ? &here : &away, sizeof here);
			asked->src_addrlen = sizeof here;
		}
		if (rows[i].destination) {
			asked->dest_addr = malloc(sizeof away);
			memcpy(asked->dest_addr, &away, sizeof away);
			asked->dest_addrlen = sizeof away;
		}
		int rc = fi_getinfo(FI_VERSION(1, 17), rows[i].node, rows[i].service, rows[i].flags, asked, &got);
		fi_freeinfo(asked);
		if (!rc) {
			why = same_address("source", got->src_addr, got->src_addrlen, rows[i].from ? rows[i].from : "none",
					   rows[i].from_port);
			if (!why)
				why = same_address("destination", got->dest_addr, got->dest_addrlen, rows[i].to, rows[i].to_port);
			fi_freeinfo(got);
		}
		ENSURE(rc == (rows[i].from ? 0 : -FI_ENODATA), "row %zu: %s", i, fi_strerror(-rc));
		ENSURE(!why, "row %zu: %s", i, why);
	}
	/* A destination with an address of IPv6 needs a source with one, which this host may not have. */
	struct fi_info *asked = new_hints(), *got = NULL;
	int rc = fi_getinfo(FI_VERSION(1, 17), "2001:db8::1", "9228", FI_NUMERICHOST, asked, &got);
	fi_freeinfo(asked);
	if (rc) {
		GIVES(FI_ENODATA, rc);
		return NULL;
	}
	struct sockaddr_in6 from, to;
	bool fits = got->src_addrlen == sizeof from && got->dest_addrlen == sizeof to && got->addr_format == FI_SOCKADDR_IN6;
	if (fits) {
		memcpy(&from, got->src_addr, sizeof from);
		memcpy(&to, got->dest_addr, sizeof to);
	}
	fi_freeinfo(got);
	ENSURE(fits && from.sin6_family == AF_INET6 && to.sin6_family == AF_INET6 && ntohs(to.sin6_port) == 9228,
	       "the addresses of IPv6 have another length, format or family");
	return NULL;
}

/* ---------------------------------------------------------------- domains, queues and counters */

/* Several domains at once, each with an endpoint that works, and none disturbs another when it closes. */
static const char *domains(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct side first, each[6];

	(void)arg;
	TRY(open_side(&first, 0));
	for (size_t i = 0; i < COUNT(each); i++) {
		TRY(open_side(&each[i], 0));
		ENSURE(each[i].domain != first.domain, "two domains are one");
	}
	for (size_t i = 0; i < COUNT(each); i++) {
		TRY(introduce(&each[i], &first));
		move_both(&each[i], &first);
		fill_bytes(out, 500, i);
		OK(fi_recv(first.ep, in, 500, NULL, FI_ADDR_UNSPEC, &first));
		OK(fi_send(each[i].ep, out, 500, NULL, each[i].peer, &each[i]));
		TRY(next(first.rx, &entry, NULL));
		TRY(check_bytes(in, 500, i));
		TRY(next(each[i].tx, &entry, NULL));
		for (void *parts[] = { each[i].ep, each[i].cntr, each[i].av, each[i].rx, each[i].tx, each[i].domain },
			  **part = parts;
		     part < parts + COUNT(parts); part++)
			ENSURE(!close_now(*part), "endpoint %zu: closing fails", i);
	}
	return NULL;
}

/* A domain cannot be closed while an object of any kind is open on it. */
static const char *domain_in_use(size_t arg)
{
	struct fi_cq_attr cq_attr = { 0 };
	struct fi_av_attr av_attr = { 0 };
	struct fid_domain *domain;
	struct fid_cntr *cntr;
	struct fid_cq *cq;
	struct fid_av *av;
	struct fid_mr *mr;
	struct fid_ep *ep;
	struct fid *fid;

	(void)arg;
	TRY(find_provider());
	OK(fi_domain(fabric, info, &domain, &arg));
	ENSURE(domain->fid.context == &arg && domain->fid.fclass == FI_CLASS_DOMAIN, "the context or class of the domain");
	keep(close_fid, domain, "domain");
	GIVES(FI_EBUSY, fi_close(&fabric->fid));
	for (int kind = 0; kind < 5; kind++) {
		switch (kind) {
		case 0: OK(fi_cq_open(domain, &cq_attr, &cq, &cq)); fid = &cq->fid; break;
		case 1: OK(fi_av_open(domain, &av_attr, &av, &av)); fid = &av->fid; break;
		case 2: OK(fi_cntr_open(domain, NULL, &cntr, &cntr)); fid = &cntr->fid; break;
		case 3: OK(fi_mr_reg(domain, in, 100, FI_SEND, 0, 0, 0, &mr, &mr)); fid = &mr->fid; break;
		default: OK(fi_endpoint(domain, info, &ep, &ep)); fid = &ep->fid; break;
		}
		ENSURE(fid->context == (kind == 0   ? (void *)&cq
					: kind == 1 ? (void *)&av
					: kind == 2 ? (void *)&cntr
					: kind == 3 ? (void *)&mr
						    : (void *)&ep),
		       "object %d has another context", kind);
		int rc = fi_close(&domain->fid);
		OK(fi_close(fid));
		ENSURE(rc == -FI_EBUSY, "a domain with object %d is closed: %d", kind, rc);
	}
	return NULL;
}

/* Objects that an endpoint uses cannot be closed, from the binding on. An endpoint needs a queue or a counter for each direction. */
static const char *bindings(size_t arg)
{
	struct fi_cq_attr cq_attr = { 0 };
	struct fi_av_attr av_attr = { 0 };
	struct fi_cntr_attr unknown = { .events = 77 }, flagged = { .flags = 1 }, waits = { .wait_obj = FI_WAIT_FD };
	struct fi_cntr_attr yields = { .wait_obj = FI_WAIT_YIELD };
	struct fid_cntr *cntr, *none;
	struct fid_domain *domain;
	struct fid_cq *cq;
	struct fid_av *av;
	struct fid_eq *eq;
	struct fid_ep *ep;
	struct fi_eq_attr eq_attr = { 0 };

	(void)arg;
	TRY(find_provider());
	OK(fi_eq_open(fabric, &eq_attr, &eq, NULL));
	keep(close_fid, eq, "event queue");
	OK(fi_domain(fabric, info, &domain, NULL));
	keep(close_fid, domain, "domain");
	OK(fi_cq_open(domain, &cq_attr, &cq, NULL));
	keep(close_fid, cq, "queue");
	OK(fi_av_open(domain, &av_attr, &av, NULL));
	keep(close_fid, av, "address vector");
	OK(fi_cntr_open(domain, &yields, &cntr, NULL));
	keep(close_fid, cntr, "counter");
	GIVES(FI_ENOSYS, fi_cntr_open(domain, &unknown, &none, NULL));
	GIVES(FI_EINVAL, fi_cntr_open(domain, &flagged, &none, NULL));
	GIVES(FI_ENOSYS, fi_cntr_open(domain, &waits, &none, NULL));
	OK(fi_endpoint(domain, info, &ep, NULL));
	keep(close_fid, ep, "endpoint");
	OK(fi_ep_bind(ep, &eq->fid, 0));
	GIVES(FI_EBUSY, fi_close(&eq->fid));
	GIVES(FI_EBADFLAGS, fi_ep_bind(ep, &cq->fid, 0));
	GIVES(FI_EBADFLAGS, fi_ep_bind(ep, &cntr->fid, 0));
	GIVES(FI_EINVAL, fi_ep_bind(ep, &domain->fid, 0));
	GIVES(FI_ENOAV, fi_enable(ep));
	OK(fi_ep_bind(ep, &av->fid, 0));
	GIVES(FI_EBUSY, fi_close(&av->fid));
	GIVES(FI_ENOCQ, fi_enable(ep));
	OK(fi_ep_bind(ep, &cntr->fid, FI_RECV));
	GIVES(FI_EBUSY, fi_close(&cntr->fid));
	GIVES(FI_ENOCQ, fi_enable(ep));
	OK(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT));
	GIVES(FI_EBUSY, fi_close(&cq->fid));
	OK(fi_enable(ep));
	ENSURE(!close_now(ep), "closing the endpoint");
	/* An endpoint that only receives needs no queue for sends. */
	struct fi_info *receiver = fi_dupinfo(info);
	keep(close_info, receiver, "information");
	receiver->caps = FI_MSG | FI_RECV;
	OK(fi_endpoint(domain, receiver, &ep, NULL));
	keep(close_fid, ep, "endpoint");
	OK(fi_ep_bind(ep, &av->fid, 0));
	GIVES(FI_ENOCQ, fi_enable(ep));
	OK(fi_ep_bind(ep, &cq->fid, FI_RECV));
	OK(fi_enable(ep));
	ENSURE(!close_now(ep) && !close_now(cntr) && !close_now(cq) && !close_now(av), "closing");
	GIVES(FI_EBADFLAGS, fi_domain_bind(domain, &eq->fid, FI_REG_MR));
	OK(fi_domain_bind(domain, &eq->fid, 0));
	GIVES(FI_EBUSY, fi_close(&eq->fid));
	ENSURE(!close_now(domain) && !close_now(eq), "closing the domain and its event queue");
	return NULL;
}

/* An endpoint cannot use the objects of another domain. */
static const char *bindings_of_two_domains(size_t arg)
{
	struct side a, b;

	(void)arg;
	TRY(open_side(&a, 0));
	TRY(open_side(&b, 0));
	struct fid_ep *ep;
	OK(fi_endpoint(a.domain, info, &ep, NULL));
	keep(close_fid, ep, "endpoint");
	GIVES(FI_EDOMAIN, fi_ep_bind(ep, &b.tx->fid, FI_TRANSMIT));
	GIVES(FI_EDOMAIN, fi_ep_bind(ep, &b.av->fid, 0));
	GIVES(FI_EDOMAIN, fi_ep_bind(ep, &b.cntr->fid, FI_SEND));
	OK(fi_ep_bind(ep, &a.tx->fid, FI_TRANSMIT | FI_RECV));
	OK(fi_ep_bind(ep, &a.av->fid, 0));
	OK(fi_ep_bind(ep, &a.cntr->fid, FI_SEND));
	OK(fi_enable(ep));
	return NULL;
}

/* Completion queues of many sizes, with each wait object, and many at once. An unknown format is refused. */
static const char *queues(size_t arg)
{
	static const struct {
		enum fi_wait_obj object;
		int error;
	} waits[] = { { FI_WAIT_NONE, 0 },
		      { FI_WAIT_UNSPEC, 0 },
		      { FI_WAIT_FD, 0 },
		      { FI_WAIT_SET, FI_ENOSYS },
		      { FI_WAIT_MUTEX_COND, FI_ENOSYS },
		      { FI_WAIT_YIELD, 0 } };
	struct fid_domain *domain;
	struct fid_cq *cq;

	(void)arg;
	TRY(find_provider());
	OK(fi_domain(fabric, info, &domain, NULL));
	keep(close_fid, domain, "domain");
	for (size_t size = 0; size <= 1 << 16; size = size ? 2 * size : 1) {
		struct fi_cq_attr attr = { .size = size, .format = FI_CQ_FORMAT_UNSPEC, .wait_obj = FI_WAIT_UNSPEC };

		OK(fi_cq_open(domain, &attr, &cq, NULL));
		ENSURE(attr.format != FI_CQ_FORMAT_UNSPEC, "fi_cq_open does not set the format that it has chosen");
		OK(fi_close(&cq->fid));
	}
	for (size_t i = 0; i < COUNT(waits); i++) {
		struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_MSG, .wait_obj = waits[i].object, .flags = FI_AFFINITY };
		enum fi_wait_obj kind = FI_WAIT_SET;
		struct fi_cq_msg_entry entry;
		int fd = -1;
		int rc = fi_cq_open(domain, &attr, &cq, NULL);

		ENSURE(rc == -waits[i].error, "wait object %d: %s", waits[i].object, fi_strerror(-rc));
		if (rc)
			continue;
		keep(close_fid, cq, "queue");
		OK(fi_control(&cq->fid, FI_GETWAITOBJ, &kind));
		ENSURE(kind == (waits[i].object == FI_WAIT_UNSPEC ? FI_WAIT_FD : waits[i].object), "wait object %d is %d",
		       waits[i].object, kind);
		if (kind == FI_WAIT_YIELD)
			GIVES(FI_ENOSYS, fi_control(&cq->fid, FI_GETWAIT, &fd));
		uint64_t begin = now_ms();
		ssize_t n = fi_cq_sread(cq, &entry, 1, NULL, 60);
		if (waits[i].object == FI_WAIT_NONE) {
			GIVES(FI_ENOSYS, n);
			GIVES(FI_ENOSYS, fi_control(&cq->fid, FI_GETWAIT, &fd));
			GIVES(FI_ENOSYS, fi_cq_signal(cq));
		} else {
			GIVES(FI_EAGAIN, n);
			ENSURE(now_ms() - begin >= 55 && now_ms() - begin < 5000, "a wait of 60 ms takes %ju ms",
			       (uintmax_t)(now_ms() - begin));
			begin = now_ms();
			GIVES(FI_EAGAIN, fi_cq_sread(cq, &entry, 1, NULL, 0));
			OK(fi_cq_signal(cq));
			GIVES(FI_EAGAIN, fi_cq_sread(cq, &entry, 1, NULL, 20000));
			ENSURE(now_ms() - begin < 5000, "the signal does not end the wait");
		}
		GIVES(FI_EAGAIN, fi_cq_read(cq, &entry, 1));
		struct fi_cq_err_entry error = { 0 };
		GIVES(FI_EAGAIN, fi_cq_readerr(cq, &error, 0));
	}
	struct fi_cq_attr unknown = { .format = 99 };
	GIVES(FI_EINVAL, fi_cq_open(domain, &unknown, &cq, NULL));
	for (size_t i = 0; i < 300; i++) {
		struct fi_cq_attr attr = { .wait_obj = i % 2 ? FI_WAIT_FD : FI_WAIT_NONE };

		OK(fi_cq_open(domain, &attr, &cq, NULL));
		keep(close_fid, cq, "queue");
	}
	return NULL;
}

/* Something that another thread does to an object that the test waits for. */
struct later {
	pthread_t thread;
	struct fid_cq *cq;
	struct fid_cntr *cntr, *failing;
	struct fid_eq *eq;
	atomic_bool over; /* the wait has ended */
	int rc;
};

static void *do_later(void *arg)
{
	struct later *l = arg;
	struct fi_eq_entry event = { .context = l };

	sleep_ms(50);
	if (l->cq)
		l->rc = fi_cq_signal(l->cq);
	if (l->cntr)
		l->rc = fi_cntr_add(l->cntr, 5);
	/* An error that is added before the wait begins does not end it, so errors are added until it ends. */
	while (l->failing && !l->over && !l->rc) {
		l->rc = fi_cntr_adderr(l->failing, 1);
		sleep_ms(20);
	}
	if (l->eq)
		l->rc = fi_eq_write(l->eq, FI_NOTIFY, &event, sizeof event, 0) == sizeof event ? 0 : -FI_EOTHER;
	return NULL;
}

/* Threads that wait without a limit are woken by another thread. */
static const char *woken(size_t arg)
{
	struct fi_eq_attr eq_attr = { .size = 4, .flags = FI_WRITE, .wait_obj = FI_WAIT_UNSPEC };
	struct fi_cq_tagged_entry entry;
	struct fi_eq_entry event = { 0 };
	struct later l = { 0 };
	struct fid_eq *eq;
	struct side a;
	uint32_t kind = 0;
	int rc = 0;

	TRY(open_side(&a, 0));
	OK(fi_eq_open(fabric, &eq_attr, &eq, NULL));
	keep(close_fid, eq, "event queue");
	switch (arg) {
	case 0: l.cq = a.rx; break;
	case 1: l.cntr = a.cntr; break;
	case 2: l.failing = a.cntr; break;
	case 3: l.eq = eq; break;
	}
	ENSURE(!pthread_create(&l.thread, NULL, do_later, &l), "pthread_create");
	switch (arg) {
	case 0: rc = (int)fi_cq_sread(a.rx, &entry, 1, NULL, -1); break;
	case 1: rc = fi_cntr_wait(a.cntr, 5, -1); break;
	case 2: rc = fi_cntr_wait(a.cntr, 5, -1); break;
	case 3: rc = (int)fi_eq_sread(eq, &kind, &event, sizeof event, -1, 0); break;
	}
	l.over = true;
	pthread_join(l.thread, NULL);
	ENSURE(!l.rc, "the other thread fails: %s", fi_strerror(-l.rc));
	switch (arg) {
	case 0: GIVES(FI_EAGAIN, rc); break;
	case 1: OK(rc); break;
	case 2: GIVES(FI_EAVAIL, rc); break;
	case 3:
		ENSURE(rc == sizeof event && kind == FI_NOTIFY && event.context == &l, "fi_eq_sread returns %d", rc);
		break;
	}
	return NULL;
}

/* Each format writes its own fields, entry after entry, and nothing beyond them. */
static const char *queue_formats(size_t arg)
{
	static const size_t entry_sizes[] = { [FI_CQ_FORMAT_CONTEXT] = sizeof(struct fi_cq_entry),
					      [FI_CQ_FORMAT_MSG] = sizeof(struct fi_cq_msg_entry),
					      [FI_CQ_FORMAT_DATA] = sizeof(struct fi_cq_data_entry),
					      [FI_CQ_FORMAT_TAGGED] = sizeof(struct fi_cq_tagged_entry) };
	size_t size = entry_sizes[arg];
	uint8_t raw[4 * sizeof(struct fi_cq_tagged_entry)];
	struct setup how = { .cq = { .format = arg } };
	uint64_t until = now_ms() + WAIT_MS;
	struct side a, b;
	fi_addr_t sources[4];
	ssize_t n;

	TRY(open_sides_as(&a, &b, &how));
	for (size_t i = 0; i < 3; i++)
		OK(fi_trecv(b.ep, in + 100 * i, 100, NULL, FI_ADDR_UNSPEC, 40 + i, 0, &in[i]));
	for (size_t i = 0; i < 3; i++)
		OK(fi_tsenddata(a.ep, out, 10 + i, NULL, 700 + i, a.peer, 40 + i, &a));
	/* All three are read at once, when they have arrived. */
	for (int i = 0; i < 3; i++)
		while ((n = fi_cq_read(a.tx, raw, 1)) == -FI_EAGAIN) {
			fi_cq_read(b.rx, NULL, 0);
			ENSURE(now_ms() < until, "a message is not sent");
		}
	for (until = now_ms() + 20; now_ms() < until;)
		fi_cq_read(b.rx, NULL, 0);
	memset(raw, 0xee, sizeof raw);
	n = fi_cq_readfrom(b.rx, raw, 4, sources);
	ENSURE(n == 3, "%zd entries are read", n);
	for (size_t i = 0; i < 3; i++) {
		struct fi_cq_tagged_entry e = { .flags = FI_TAGGED | FI_RECV, .len = 10 + i, .data = 700 + i, .tag = 40 + i };

		memcpy(&e, raw + i * size, size);
		ENSURE(e.op_context == &in[i], "entry %zu has another context", i);
		ENSURE(e.flags & FI_TAGGED && e.flags & FI_RECV, "entry %zu: flags %#jx", i, (uintmax_t)e.flags);
		ENSURE(e.len == 10 + i && e.data == 700 + i && e.tag == 40 + i, "entry %zu: length %zu, data %ju, tag %ju", i, e.len,
		       (uintmax_t)e.data, (uintmax_t)e.tag);
		ENSURE(sources[i] == b.peer, "entry %zu is from %ju", i, (uintmax_t)sources[i]);
	}
	return all_bytes(raw + 3 * size, sizeof raw - 3 * size, 0xee, "after the entries");
}

/* The texts of errors in a queue, including those that only libfabric has. */
static const char *error_texts(size_t arg)
{
	struct fi_cq_err_entry error;
	struct side a, b;
	char text[80], part[6];

	(void)arg;
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	OK(fi_recv(b.ep, in, 5, NULL, FI_ADDR_UNSPEC, &b));
	OK(fi_inject(a.ep, out, 50, a.peer));
	TRY(next_error(b.rx, &error, WAIT_MS));
	ENSURE(error.err == FI_ETRUNC && error.prov_errno, "error %d, of the provider %d", error.err, error.prov_errno);
	memset(text, 'x', sizeof text);
	const char *shown = fi_cq_strerror(b.rx, error.prov_errno, error.err_data, text, sizeof text);
	ENSURE(shown && strcasestr(shown, "trunc") && !strcmp(shown, text), "the text is %s", shown);
	fi_cq_strerror(b.rx, error.prov_errno, error.err_data, part, sizeof part);
	ENSURE(!strncmp(part, text, sizeof part - 1) && !part[sizeof part - 1], "the text in a short buffer is %.6s", part);
	for (int code = FI_EOTHER; code <= FI_ENORX; code++) {
		shown = fi_cq_strerror(b.rx, code, NULL, NULL, 0);
		ENSURE(shown && *shown && !strstr(shown, "nknown"), "error %d: %s", code, shown);
	}
	ENSURE(!strcmp(fi_cq_strerror(b.rx, ENOENT, NULL, NULL, 0), strerror(ENOENT)), "the text of ENOENT");
	return NULL;
}

/* Event queues: sizes, wait objects, and events of the program itself. */
static const char *event_queues(size_t arg)
{
	struct fi_eq_attr attr = { .size = 32, .wait_obj = FI_WAIT_FD };
	struct fi_eq_entry event = { 0 }, got;
	struct fi_eq_err_entry error = { 0 };
	struct fid_eq *eq;
	struct fid *fids[1];
	uint32_t kind;
	uint64_t begin;
	int fd = -1;

	(void)arg;
	TRY(find_provider());
	for (size_t size = 1; size <= 1 << 16; size *= 2) {
		struct fi_eq_attr of_size = { .size = size, .flags = FI_WRITE, .wait_obj = FI_WAIT_UNSPEC };

		OK(fi_eq_open(fabric, &of_size, &eq, NULL));
		/* The queue has room for as many events as were requested. */
		for (size_t i = 0; i < size; i++)
			ENSURE(fi_eq_write(eq, FI_NOTIFY, &event, sizeof event, 0) == sizeof event, "event %zu of %zu", i, size);
		OK(fi_close(&eq->fid));
	}
	attr.wait_obj = FI_WAIT_SET;
	GIVES(FI_ENOSYS, fi_eq_open(fabric, &attr, &eq, NULL));
	attr.wait_obj = FI_WAIT_NONE;
	OK(fi_eq_open(fabric, &attr, &eq, NULL));
	keep(close_fid, eq, "event queue");
	GIVES(FI_EAGAIN, fi_eq_read(eq, &kind, &got, sizeof got, 0));
	GIVES(FI_EAGAIN, fi_eq_readerr(eq, &error, 0));
	GIVES(FI_ENOSYS, fi_control(&eq->fid, FI_GETWAIT, &fd));
	ENSURE(fi_eq_write(eq, FI_NOTIFY, &event, sizeof event, 0) < 0, "a queue without FI_WRITE accepts an event");
	attr.wait_obj = FI_WAIT_FD;
	attr.flags = FI_WRITE;
	OK(fi_eq_open(fabric, &attr, &eq, &eq));
	ENSURE(eq->fid.context == &eq && eq->fid.fclass == FI_CLASS_EQ, "the context or class of the queue");
	keep(close_fid, eq, "event queue");
	begin = now_ms();
	GIVES(FI_EAGAIN, fi_eq_sread(eq, &kind, &got, sizeof got, 60, 0));
	ENSURE(now_ms() - begin >= 55 && now_ms() - begin < 5000, "a wait of 60 ms takes %ju ms", (uintmax_t)(now_ms() - begin));
	enum fi_wait_obj object = FI_WAIT_NONE;
	OK(fi_control(&eq->fid, FI_GETWAITOBJ, &object));
	ENSURE(object == FI_WAIT_FD, "the wait object is %d", object);
	OK(fi_control(&eq->fid, FI_GETWAIT, &fd));
	struct pollfd readable = { .fd = fd, .events = POLLIN };
	fids[0] = &eq->fid;
	OK(fi_trywait(fabric, fids, 1));
	ENSURE(poll(&readable, 1, 0) == 0, "the descriptor of an empty queue is readable");
	for (size_t i = 0; i < 5; i++) {
		event = (struct fi_eq_entry){ .fid = i % 2 ? &fabric->fid : &eq->fid, .context = &out[i], .data = 90 + i };
		ENSURE(fi_eq_write(eq, FI_NOTIFY, &event, sizeof event, 0) == sizeof event, "fi_eq_write");
	}
	ENSURE(poll(&readable, 1, 0) == 1, "the descriptor is not readable after an event");
	GIVES(FI_EAGAIN, fi_trywait(fabric, fids, 1));
	GIVES(FI_ETOOSMALL, fi_eq_read(eq, &kind, &got, sizeof got - 1, 0));
	/* Each event is read twice, the first time without being removed. */
	for (size_t i = 0; i < 10; i++) {
		uint64_t flags = i % 2 ? 0 : FI_PEEK;

		memset(&got, 0, sizeof got);
		kind = 0;
		ssize_t n = i < 6 ? fi_eq_read(eq, &kind, &got, sizeof got, flags)
				  : fi_eq_sread(eq, &kind, &got, sizeof got, 1000, flags);
		ENSURE(n == sizeof got && kind == FI_NOTIFY, "event %zu: %zd bytes of kind %u", i, n, kind);
		ENSURE(got.context == &out[i / 2] && got.data == 90 + i / 2 && got.fid == (i / 2 % 2 ? &fabric->fid : &eq->fid),
		       "event %zu has other content", i);
	}
	GIVES(FI_EAGAIN, fi_eq_read(eq, &kind, &got, sizeof got, 0));
	OK(fi_trywait(fabric, fids, 1));
	ENSURE(poll(&readable, 1, 0) == 0, "the descriptor stays readable");
	ENSURE(strlen(fi_eq_strerror(eq, ENOENT, NULL, NULL, 0)) > 0, "no text of an error");
	return NULL;
}

/* Counters: many at once, their values, and waits that succeed and time out. */
static const char *counters(size_t arg)
{
	struct fid_cntr *all[200];
	struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_UNSPEC };
	struct fid_domain *domain;
	uint64_t begin;

	(void)arg;
	TRY(find_provider());
	OK(fi_domain(fabric, info, &domain, NULL));
	keep(close_fid, domain, "domain");
	for (size_t i = 0; i < COUNT(all); i++) {
		struct fi_cntr_attr *given = i & 1 ? &attr : NULL;

		OK(fi_cntr_open(domain, given, &all[i], NULL));
		keep(close_fid, all[i], "counter");
		ENSURE(fi_cntr_read(all[i]) == 0 && fi_cntr_readerr(all[i]) == 0, "a new counter is not 0");
		OK(fi_cntr_set(all[i], i));
		OK(fi_cntr_seterr(all[i], 3 * i));
	}
	for (size_t i = 0; i < COUNT(all); i++) {
		OK(fi_cntr_add(all[i], 1000));
		OK(fi_cntr_adderr(all[i], 100));
	}
	for (size_t i = 0; i < COUNT(all); i++)
		ENSURE(fi_cntr_read(all[i]) == i + 1000 && fi_cntr_readerr(all[i]) == 3 * i + 100, "counter %zu: %ju and %ju", i,
		       (uintmax_t)fi_cntr_read(all[i]), (uintmax_t)fi_cntr_readerr(all[i]));
	/* The errors before the wait do not end it. */
	OK(fi_cntr_wait(all[1], 1001, 0));
	OK(fi_cntr_wait(all[1], 5, -1));
	begin = now_ms();
	GIVES(FI_ETIMEDOUT, fi_cntr_wait(all[1], 1002, 60));
	ENSURE(now_ms() - begin >= 60 && now_ms() - begin < 5000, "a wait of 60 ms takes %ju ms", (uintmax_t)(now_ms() - begin));
	return NULL;
}

/* What a counter counts: exactly the operations that it is bound to. Failed operations are counted separately. */
static const char *counted(size_t arg)
{
	static const uint64_t what[] = { FI_SEND, FI_RECV, FI_READ, FI_WRITE };
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct fid_mr *mr;
	struct side a, b;

	(void)arg;
	for (size_t i = 0; i < COUNT(what); i++) {
		struct setup how = { .counts = what[i] };

		TRY(open_sides_as(&a, &b, &how));
		move_both(&a, &b);
		OK(fi_mr_reg(b.domain, in, 4096, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
		keep(close_fid, mr, "region");
		for (size_t n = 0; n < 3; n++) {
			OK(fi_recv(b.ep, in, 100, NULL, FI_ADDR_UNSPEC, &b));
			OK(fi_send(a.ep, out, 100, NULL, a.peer, &a));
			TRY(next(b.rx, &entry, NULL));
			TRY(next(a.tx, &entry, NULL));
		}
		for (size_t n = 0; n < 4; n++) {
			OK(fi_write(a.ep, out, 100, NULL, a.peer, (uintptr_t)in, fi_mr_key(mr), &a));
			TRY(next(a.tx, &entry, NULL));
		}
		for (size_t n = 0; n < 5; n++) {
			OK(fi_read(a.ep, out, 100, NULL, a.peer, (uintptr_t)in, fi_mr_key(mr), &a));
			TRY(next(a.tx, &entry, NULL));
		}
		uint64_t of_a = fi_cntr_read(a.cntr), of_b = fi_cntr_read(b.cntr);
		ENSURE(of_a == (what[i] == FI_SEND ? 3u : what[i] == FI_WRITE ? 4u : what[i] == FI_READ ? 5u : 0u) &&
			       of_b == (what[i] == FI_RECV ? 3u : 0u),
		       "counters of %#jx: %ju and %ju", (uintmax_t)what[i], (uintmax_t)of_a, (uintmax_t)of_b);
		OK(fi_write(a.ep, out, 100, NULL, a.peer, (uintptr_t)in + 4000, fi_mr_key(mr), &a));
		TRY(next_error(a.tx, &error, WAIT_MS));
		ENSURE(fi_cntr_read(a.cntr) == of_a, "a failed write is counted as a success");
		ENSURE(fi_cntr_readerr(a.cntr) == (what[i] == FI_WRITE), "%ju errors", (uintmax_t)fi_cntr_readerr(a.cntr));
	}
	return NULL;
}

/* The one option of endpoints, and how others are refused. */
static const char *options(size_t arg)
{
	static const int unknown[] = { FI_OPT_CM_DATA_SIZE, FI_OPT_BUFFERED_MIN, FI_OPT_SEND_BUF_SIZE, FI_OPT_FI_HMEM_P2P, 999 };
	size_t value = 0, len = sizeof value;
	struct side a;

	(void)arg;
	TRY(open_side(&a, 0));
	OK(fi_getopt(&a.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &value, &len));
	ENSURE(value > 0 && len == sizeof value, "the default is %zu, in %zu bytes", value, len);
	value = 12345;
	OK(fi_setopt(&a.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &value, sizeof value));
	value = 0;
	OK(fi_getopt(&a.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &value, &len));
	ENSURE(value == 12345, "the option is %zu", value);
	GIVES(FI_EINVAL, fi_setopt(&a.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &value, 2));
	len = 2;
	GIVES(FI_ETOOSMALL, fi_getopt(&a.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &value, &len));
	for (size_t i = 0; i < COUNT(unknown); i++) {
		len = sizeof value;
		GIVES(FI_ENOPROTOOPT, fi_getopt(&a.ep->fid, FI_OPT_ENDPOINT, unknown[i], &value, &len));
		GIVES(FI_ENOPROTOOPT, fi_setopt(&a.ep->fid, FI_OPT_ENDPOINT, unknown[i], &value, sizeof value));
	}
	len = sizeof value;
	GIVES(FI_ENOPROTOOPT, fi_getopt(&a.ep->fid, 7, FI_OPT_MIN_MULTI_RECV, &value, &len));
	return NULL;
}

/* An alias is the same endpoint with other default flags. The endpoint is open until it and its aliases are closed. */
static const char *aliases(size_t arg)
{
	struct setup how = { .selective = FI_SELECTIVE_COMPLETION };
	uint64_t flags = FI_TRANSMIT, count;
	struct fi_cq_tagged_entry entry;
	struct fid_ep *alias = NULL;
	struct side a, b;

	(void)arg;
	TRY(open_sides_as(&a, &b, &how));
	move_both(&a, &b);
	GIVES(FI_EINVAL, fi_ep_alias(a.ep, &alias, FI_COMPLETION));
	GIVES(FI_EINVAL, fi_ep_alias(a.ep, &alias, FI_TRANSMIT | FI_RECV));
	GIVES(FI_EBADFLAGS, fi_ep_alias(a.ep, &alias, FI_TRANSMIT | FI_COMMIT_COMPLETE));
	OK(fi_ep_alias(a.ep, &alias, FI_TRANSMIT | FI_COMPLETION));
	keep(close_fid, alias, "alias");
	ENSURE(alias != a.ep && alias->fid.fclass == FI_CLASS_EP, "the alias is no other endpoint");
	OK(fi_control(&a.ep->fid, FI_GETOPSFLAG, &flags));
	ENSURE(!flags, "the endpoint has the flags %#jx of the alias", (uintmax_t)flags);
	/* The queue is selective: only the send of the alias has an entry. Both count for the endpoint's counter. */
	count = fi_cntr_read(a.cntr);
	for (size_t i = 0; i < 2; i++)
		OK(fi_recv(b.ep, in, 100, NULL, b.peer, &b));
	OK(fi_send(a.ep, out, 100, NULL, a.peer, &a));
	OK(fi_send(alias, out, 100, NULL, a.peer, &alias));
	TRY(next(a.tx, &entry, NULL));
	ENSURE(entry.op_context == &alias, "the entry is of the other send");
	ENSURE(fi_cntr_read(a.cntr) == count + 2, "%ju sends are counted", (uintmax_t)(fi_cntr_read(a.cntr) - count));
	for (size_t i = 0; i < 2; i++)
		TRY(next(b.rx, &entry, NULL));
	/* The alias works on when the endpoint itself is closed. */
	ENSURE(!close_now(a.ep), "closing the endpoint");
	GIVES(FI_EBUSY, fi_close(&a.av->fid));
	OK(fi_recv(b.ep, in, 100, NULL, b.peer, &b));
	OK(fi_send(alias, out, 100, NULL, a.peer, &alias));
	TRY(next(a.tx, &entry, NULL));
	TRY(next(b.rx, &entry, NULL));
	ENSURE(!close_now(alias), "closing the alias");
	ENSURE(!close_now(a.av), "the address vector is still used");
	return NULL;
}

/* The default flags of an endpoint can be read and changed, separately for transmits and receives. */
static const char *default_flags(size_t arg)
{
	struct setup how = { .selective = FI_SELECTIVE_COMPLETION };
	struct fi_cq_tagged_entry entry;
	struct side a, b;
	uint64_t flags = FI_TRANSMIT;

	(void)arg;
	TRY(open_sides_as(&a, &b, &how));
	OK(fi_control(&a.ep->fid, FI_GETOPSFLAG, &flags));
	ENSURE(!flags, "the default flags are %#jx", (uintmax_t)flags);
	flags = FI_TRANSMIT | FI_COMPLETION | FI_DELIVERY_COMPLETE;
	OK(fi_control(&a.ep->fid, FI_SETOPSFLAG, &flags));
	flags = FI_TRANSMIT;
	OK(fi_control(&a.ep->fid, FI_GETOPSFLAG, &flags));
	ENSURE(flags == (FI_COMPLETION | FI_DELIVERY_COMPLETE), "the flags are %#jx", (uintmax_t)flags);
	flags = FI_RECV;
	OK(fi_control(&a.ep->fid, FI_GETOPSFLAG, &flags));
	ENSURE(!flags, "the flags of receives are %#jx", (uintmax_t)flags);
	flags = FI_TRANSMIT | FI_RECV;
	GIVES(FI_EINVAL, fi_control(&a.ep->fid, FI_GETOPSFLAG, &flags));
	GIVES(FI_EINVAL, fi_control(&a.ep->fid, FI_SETOPSFLAG, NULL));
	static const uint64_t bad[] = { FI_TRANSMIT | FI_COMMIT_COMPLETE, FI_TRANSMIT | FI_MULTI_RECV, FI_RECV | FI_INJECT };
	for (size_t i = 0; i < COUNT(bad); i++) {
		flags = bad[i];
		GIVES(FI_EBADFLAGS, fi_control(&a.ep->fid, FI_SETOPSFLAG, &flags));
	}
	/* The queue is selective, so only a send with the new flags has an entry. */
	OK(fi_recv(b.ep, in, 100, NULL, FI_ADDR_UNSPEC, &b));
	OK(fi_send(a.ep, out, 100, NULL, a.peer, &flags));
	move_both(&a, &b);
	TRY(next(b.rx, &entry, NULL));
	TRY(next(a.tx, &entry, NULL));
	ENSURE(entry.op_context == &flags, "the send has another context");
	return NULL;
}

/* ---------------------------------------------------------------- address vectors */

static struct sockaddr_in name4(size_t i)
{
	return (struct sockaddr_in){ .sin_family = AF_INET,
				     .sin_port = htons((uint16_t)(1000 + i)),
				     .sin_addr.s_addr = htonl(0x0a000000 + (uint32_t)i) };
}

static const char *open_vector(struct fid_av **av, enum fi_av_type type, size_t count)
{
	struct fi_av_attr attr = { .type = type, .count = count };
	struct fid_domain *domain;

	TRY(find_provider());
	OK(fi_domain(fabric, info, &domain, NULL));
	keep(close_fid, domain, "domain");
	OK(fi_av_open(domain, &attr, av, NULL));
	keep(close_fid, *av, "address vector");
	return NULL;
}

/* Vectors of many sizes. One address, many, none, with and without a list for the results; each is found again. */
static const char *vectors(size_t type)
{
	enum { MANY = 1500 };
	static struct sockaddr_in names[MANY], back;
	static fi_addr_t at[MANY];
	static int errors[MANY];
	struct fi_av_attr attr = { .type = type };
	struct fid_domain *domain;
	struct fid_av *av;
	size_t len;

	TRY(open_vector(&av, type, MANY));
	OK(fi_domain(fabric, info, &domain, NULL));
	keep(close_fid, domain, "domain");
	for (attr.count = 1; attr.count <= 1 << 17; attr.count *= 2) {
		struct fid_av *sized;

		attr.flags = attr.flags ? 0 : FI_SYMMETRIC;
		OK(fi_av_open(domain, &attr, &sized, NULL));
		OK(fi_close(&sized->fid));
	}
	for (size_t i = 0; i < MANY; i++)
		names[i] = name4(i);
	ENSURE(fi_av_insert(av, names, 0, NULL, 0, NULL) == 0, "no address");
	ENSURE(fi_av_insert(av, names, 1, NULL, 0, NULL) == 1, "one address without a list for the result");
	ENSURE(fi_av_insert(av, names + 1, 1, &at[1], 0, NULL) == 1, "one address");
	memset(errors, 0xee, sizeof errors);
	ENSURE(fi_av_insert(av, names + 2, MANY - 2, at + 2, FI_MORE | FI_SYNC_ERR, errors + 2) == MANY - 2, "many addresses");
	for (size_t i = 2; i < MANY; i++)
		ENSURE(!errors[i], "address %zu: error %d", i, errors[i]);
	/* A table numbers the addresses in their order. */
	for (size_t i = 1; i < MANY; i++) {
		ENSURE(type == FI_AV_MAP || at[i] == i, "address %zu has index %ju", i, (uintmax_t)at[i]);
		len = sizeof back;
		OK(fi_av_lookup(av, at[i], &back, &len));
		ENSURE(len == sizeof back && !memcmp(&back, &names[i], sizeof back), "address %zu differs", i);
	}
	/* A short buffer gets the beginning, and the length that is needed. */
	memset(&back, 0xee, sizeof back);
	len = 4;
	OK(fi_av_lookup(av, at[7], &back, &len));
	ENSURE(len == sizeof back && !memcmp(&back, &names[7], 4), "the beginning of an address, and the length %zu", len);
	TRY(all_bytes((uint8_t *)&back + 4, sizeof back - 4, 0xee, "after a short buffer"));
	/* Removed addresses are gone, the others stay, and the places are used again. */
	OK(fi_av_remove(av, at + 100, 50, 0));
	for (size_t i = 1; i < MANY; i++) {
		len = sizeof back;
		int rc = fi_av_lookup(av, at[i], &back, &len);
		ENSURE(rc == (i >= 100 && i < 150 ? -FI_EINVAL : 0), "after the removal, address %zu: %d", i, rc);
	}
	GIVES(FI_EINVAL, fi_av_remove(av, at + 149, 2, 0));
	len = sizeof back;
	GIVES(FI_EINVAL, fi_av_lookup(av, at[150], &back, &len));
	GIVES(FI_EINVAL, fi_av_lookup(av, FI_ADDR_NOTAVAIL, &back, &len));
	ENSURE(fi_av_insert(av, names + 100, 50, at + 100, 0, NULL) == 50, "addresses again");
	for (size_t i = 100; i < 150; i++) {
		ENSURE(at[i] < MANY, "address %zu does not use a free place: %ju", i, (uintmax_t)at[i]);
		len = sizeof back;
		OK(fi_av_lookup(av, at[i], &back, &len));
		ENSURE(!memcmp(&back, &names[i], sizeof back), "address %zu differs", i);
	}
	/* The lowest of the free places is used first. */
	OK(fi_av_remove(av, at + 10, 1, 0));
	OK(fi_av_remove(av, at + 20, 1, 0));
	fi_addr_t again[2];
	ENSURE(fi_av_insert(av, names, 2, again, 0, NULL) == 2, "two addresses again");
	ENSURE(again[0] == at[10] && again[1] == at[20], "they have the indexes %ju and %ju", (uintmax_t)again[0],
	       (uintmax_t)again[1]);
	return NULL;
}

/* Invalid addresses, alone and among valid ones, with and without a list for the errors. */
static const char *vectors_bad(size_t type)
{
	struct sockaddr_in names[6] = { name4(1), name4(2), name4(3), name4(4), name4(5), name4(6) }, back;
	fi_addr_t at[6];
	int errors[6];
	struct fid_av *av;
	size_t len;

	TRY(open_vector(&av, type, 6));
	names[1].sin_family = 77;
	names[2].sin_port = 0;
	names[4].sin_addr.s_addr = 0;
	for (size_t with = 0; with < 2; with++) {
		memset(at, 0xee, sizeof at);
		memset(errors, 0xee, sizeof errors);
		ENSURE(fi_av_insert(av, names, 6, at, with ? FI_SYNC_ERR : 0, with ? errors : NULL) == 3, "three of six addresses");
		for (size_t i = 0; i < 6; i++) {
			bool bad = i == 1 || i == 2 || i == 4;

			ENSURE((at[i] == FI_ADDR_NOTAVAIL) == bad, "address %zu has index %ju", i, (uintmax_t)at[i]);
			ENSURE(errors[i] == (!with ? (int)0xeeeeeeee : bad ? FI_EINVAL : 0), "address %zu: error %d", i, errors[i]);
			len = sizeof back;
			int rc = fi_av_lookup(av, at[i], &back, &len);
			ENSURE(rc == (bad ? -FI_EINVAL : 0), "address %zu is looked up: %d", i, rc);
			ENSURE(bad || !memcmp(&back, &names[i], sizeof back), "address %zu differs", i);
		}
	}
	memset(at, 0xee, sizeof at);
	ENSURE(fi_av_insert(av, &names[1], 1, at, 0, NULL) == 0 && at[0] == FI_ADDR_NOTAVAIL, "an invalid address alone");
	GIVES(FI_EBADFLAGS, fi_av_insert(av, names, 1, at, FI_SYNC_ERR, NULL));
	GIVES(FI_EBADFLAGS, fi_av_insert(av, names, 1, at, FI_PEEK, NULL));
	GIVES(FI_EINVAL, fi_av_insert(av, NULL, 1, at, 0, NULL));
	GIVES(FI_EINVAL, fi_av_remove(av, NULL, 1, 0));
	return NULL;
}

/* Addresses by host and service, addresses of both families in one list, and addresses as text. */
static const char *vectors_names(size_t type)
{
	static const struct {
		const char *node, *service;
		bool good;
	} rows[] = { { "10.1.2.3", "4567", true },     { "127.0.0.1", "1", true },  { "2001:db8::7", "4567", true },
		     { "10.1.2.3", "0", false },       { "0.0.0.0", "99", false },  { "::", "99", false },
		     { "224.0.0.1", "99", false } };
	struct {
		struct sockaddr_in a;
		struct sockaddr_in6 b;
		struct sockaddr_in c;
	} __attribute__((packed)) mixed = { .a = name4(1), .c = name4(2) };
	struct sockaddr_in6 back;
	char text[100], part[8];
	fi_addr_t at[3];
	struct fid_av *av;
	size_t len;
	int error;

	TRY(open_vector(&av, type, 0));
	mixed.b.sin6_family = AF_INET6;
	mixed.b.sin6_port = htons(4567);
	inet_pton(AF_INET6, "2001:db8::1", &mixed.b.sin6_addr);
	ENSURE(fi_av_insert(av, &mixed, 3, at, 0, NULL) == 3, "addresses of both families");
	len = sizeof back;
	OK(fi_av_lookup(av, at[1], &back, &len));
	ENSURE(len == sizeof back && !memcmp(&back, (void *)&mixed.b, sizeof back), "the address of IPv6 differs");
	len = sizeof back;
	OK(fi_av_lookup(av, at[2], &back, &len));
	ENSURE(len == sizeof mixed.c && !memcmp(&back, (void *)&mixed.c, len), "the address after that of IPv6 differs");
	for (size_t i = 0; i < COUNT(rows); i++) {
		error = 999;
		int rc = fi_av_insertsvc(av, rows[i].node, rows[i].service, &at[0], FI_SYNC_ERR, &error);
		ENSURE(rc == rows[i].good, "%s port %s: %d", rows[i].node, rows[i].service, rc);
		ENSURE((at[0] != FI_ADDR_NOTAVAIL) == rows[i].good, "%s port %s: index %ju", rows[i].node, rows[i].service,
		       (uintmax_t)at[0]);
		ENSURE((error == 0) == rows[i].good && error != 999, "%s port %s: error %d", rows[i].node, rows[i].service, error);
		if (!rows[i].good)
			continue;
		len = sizeof back;
		OK(fi_av_lookup(av, at[0], &back, &len));
		char host[INET6_ADDRSTRLEN] = "";
		bool v4 = len == sizeof(struct sockaddr_in);
		inet_ntop(v4 ? AF_INET : AF_INET6, v4 ? (void *)&((struct sockaddr_in *)&back)->sin_addr : (void *)&back.sin6_addr,
			  host, sizeof host);
		ENSURE(!strcmp(host, rows[i].node) && ntohs(back.sin6_port) == atoi(rows[i].service), "%s port %s is %s port %u",
		       rows[i].node, rows[i].service, host, ntohs(back.sin6_port));
		len = sizeof text;
		memset(text, 'x', sizeof text);
		const char *shown = fi_av_straddr(av, &back, text, &len);
		ENSURE(shown == text && strstr(text, rows[i].node) && strstr(text, rows[i].service), "the text is %s", text);
		ENSURE(len == strlen(text) + 1, "the text %s has the length %zu", text, len);
		size_t needed = len;
		len = sizeof part;
		fi_av_straddr(av, &back, part, &len);
		ENSURE(!strncmp(part, text, sizeof part - 1) && !part[sizeof part - 1] && len == needed, "a short text: %.8s", part);
	}
	GIVES(FI_EINVAL, fi_av_insertsvc(av, "10.1.2.3", "no port", at, 0, NULL));
	GIVES(FI_EINVAL, fi_av_insertsvc(av, "10.1.2.3", NULL, at, 0, NULL));
	GIVES(FI_EBADFLAGS, fi_av_insertsvc(av, "10.1.2.3", "99", at, FI_SYNC_ERR, NULL));
	/* The services of a host come before the next host. */
	static const struct {
		const char *node;
		uint16_t port;
	} range[] = { { "10.1.2.255", 99 }, { "10.1.2.255", 100 }, { "10.1.3.0", 99 }, { "10.1.3.0", 100 } };
	fi_addr_t each[4];
	int errors[4];
	ENSURE(fi_av_insertsym(av, "10.1.2.255", 2, "99", 2, each, FI_SYNC_ERR, errors) == 4, "a range of addresses");
	for (size_t i = 0; i < COUNT(range); i++) {
		struct sockaddr_in *name = (struct sockaddr_in *)&back;

		len = sizeof back;
		OK(fi_av_lookup(av, each[i], &back, &len));
		ENSURE(!errors[i] && len == sizeof *name, "address %zu of the range: error %d", i, errors[i]);
		ENSURE(name->sin_addr.s_addr == inet_addr(range[i].node) && ntohs(name->sin_port) == range[i].port,
		       "address %zu of the range is another one", i);
	}
	ENSURE(fi_av_insertsym(av, "10.1.2.3", 1, "65535", 2, each, FI_SYNC_ERR, errors) == 1, "a range beyond the last port");
	ENSURE(!errors[0] && errors[1] == FI_EINVAL && each[1] == FI_ADDR_NOTAVAIL, "the port after the last one");
	GIVES(FI_EINVAL, fi_av_insertsym(av, "10.1.2.3", SIZE_MAX, "99", 2, each, 0, NULL));
	return NULL;
}

/* Messages to an address that is removed from the vector of an enabled endpoint, and inserted again. */
static const char *vectors_used(size_t type)
{
	struct setup how = { .av = type };
	struct fi_cq_tagged_entry entry;
	struct sockaddr_in name;
	size_t len = sizeof name;
	struct side a, b;
	fi_addr_t decoys[3], source;

	/* Other addresses come first in the vector of `a`, so the two ends have different indexes for each other. */
	TRY(open_side_as(&a, &how));
	TRY(open_side_as(&b, &how));
	struct sockaddr_in others[3] = { name4(1), name4(2), name4(3) };
	ENSURE(fi_av_insert(a.av, others, 3, decoys, 0, NULL) == 3, "fi_av_insert");
	TRY(introduce(&a, &b));
	TRY(introduce(&b, &a));
	move_both(&a, &b);
	OK(fi_getname(&b.ep->fid, &name, &len));
	for (size_t i = 0; i < 6; i++) {
		fill_bytes(out, 300, i);
		OK(fi_recv(b.ep, in, 300, NULL, b.peer, &b));
		OK(fi_send(a.ep, out, 300, NULL, a.peer, &a));
		TRY(next(b.rx, &entry, &source));
		ENSURE(entry.op_context == &b && source == b.peer, "message %zu is from %ju", i, (uintmax_t)source);
		TRY(check_bytes(in, 300, i));
		TRY(next(a.tx, &entry, NULL));
		OK(fi_av_remove(a.av, &a.peer, 1, 0));
		GIVES(FI_EINVAL, fi_send(a.ep, out, 300, NULL, a.peer, &a));
		/* The removed address is inserted again; in every second round another address takes its place first. */
		if (i % 2)
			ENSURE(fi_av_insert(a.av, others, 1, decoys, 0, NULL) == 1, "fi_av_insert");
		ENSURE(fi_av_insert(a.av, &name, 1, &a.peer, 0, NULL) == 1, "fi_av_insert");
	}
	return NULL;
}

/* ---------------------------------------------------------------- memory regions */

/* Every combination of access rights: the peer may do exactly what was registered. */
static const char *regions(size_t arg)
{
	static const uint64_t rights[] = { FI_SEND, FI_RECV, FI_READ, FI_WRITE, FI_REMOTE_READ, FI_REMOTE_WRITE };
	static uint64_t keys[1 << COUNT(rights)];
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct side a, b;

	(void)arg;
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	for (size_t bits = 0; bits < 1u << COUNT(rights); bits++) {
		struct fid_mr *mr;
		uint64_t access = 0;

		for (size_t i = 0; i < COUNT(rights); i++)
			access |= bits >> i & 1 ? rights[i] : 0;
		/* The provider chooses the key, whatever the program requests. */
		OK(fi_mr_reg(b.domain, in, 1000, access, 0, 0xc0de, 0, &mr, &bits));
		keep(close_fid, mr, "region");
		ENSURE(mr->fid.context == &bits && mr->fid.fclass == FI_CLASS_MR, "the context or class of a region");
		keys[bits] = fi_mr_key(mr);
		for (size_t i = 0; i < bits; i++)
			ENSURE(keys[i] != keys[bits], "two regions have the key %#jx", (uintmax_t)keys[bits]);
		fill_bytes(out, 200, bits);
		memset(in, 0xee, 1000);
		OK(fi_write(a.ep, out, 200, NULL, a.peer, (uintptr_t)in + 100, keys[bits], &a));
		if (access & FI_REMOTE_WRITE) {
			TRY(next(a.tx, &entry, NULL));
			TRY(check_bytes(in + 100, 200, bits));
		} else {
			TRY(next_error(a.tx, &error, WAIT_MS));
			ENSURE(error.err == FI_EACCES, "a write without the right: %s", fi_strerror(error.err));
			TRY(all_bytes(in, 1000, 0xee, "after a refused write"));
		}
		fill_bytes(in, 200, bits + 1);
		memset(out, 0, 200);
		OK(fi_read(a.ep, out, 200, NULL, a.peer, (uintptr_t)in, keys[bits], &a));
		if (access & FI_REMOTE_READ) {
			TRY(next(a.tx, &entry, NULL));
			TRY(check_bytes(out, 200, bits + 1));
		} else {
			TRY(next_error(a.tx, &error, WAIT_MS));
			ENSURE(error.err == FI_EACCES, "a read without the right: %s", fi_strerror(error.err));
			TRY(all_bytes(out, 200, 0, "after a refused read"));
		}
	}
	return NULL;
}

/* The three ways to register memory, many sizes, and the end of a region. */
static const char *regions_ways(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct iovec both[2] = { { in, 1000 }, { in + 5000, 1000 } };
	struct fi_mr_attr attr = { .mr_iov = both, .iov_count = 1, .access = FI_REMOTE_WRITE, .requested_key = 5, .context = &attr };
	struct fid_mr *mr;
	struct side a, b;

	(void)arg;
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	for (size_t way = 0; way < 3; way++) {
		for (size_t len = 1; len <= 1 << 20; len *= 4) {
			both[0].iov_len = len;
			switch (way) {
			case 0: OK(fi_mr_reg(b.domain, in, len, FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL)); break;
			case 1: OK(fi_mr_regv(b.domain, both, 1, FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL)); break;
			case 2: OK(fi_mr_regattr(b.domain, &attr, 0, &mr)); break;
			}
			keep(close_fid, mr, "region");
			uint64_t key = fi_mr_key(mr);
			ENSURE(way != 2 || mr->fid.context == &attr, "the context of a region");
			/* The last bytes can be written, one more cannot. */
			size_t n = len < 100 ? len : 100;
			fill_bytes(out, n, len);
			memset(in, 0xee, len + 16);
			OK(fi_write(a.ep, out, n, NULL, a.peer, (uintptr_t)in + len - n, key, &a));
			TRY(next(a.tx, &entry, NULL));
			TRY(check_bytes(in + len - n, n, len));
			OK(fi_write(a.ep, out, n + 1, NULL, a.peer, (uintptr_t)in + len - n, key, &a));
			TRY(next_error(a.tx, &error, WAIT_MS));
			ENSURE(error.err == FI_EACCES, "a write beyond %zu bytes: %s", len, fi_strerror(error.err));
			TRY(all_bytes(in + len, 16, 0xee, "after the region"));
			ENSURE(!close_now(mr), "closing a region");
			OK(fi_write(a.ep, out, n, NULL, a.peer, (uintptr_t)in + len - n, key, &a));
			TRY(next_error(a.tx, &error, WAIT_MS));
			ENSURE(error.err == FI_EACCES, "a write to a closed region: %s", fi_strerror(error.err));
		}
	}
	both[0].iov_len = 1000;
	GIVES(FI_EINVAL, fi_mr_reg(b.domain, in, 0, FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	GIVES(FI_EINVAL, fi_mr_regv(b.domain, both, 2, FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	GIVES(FI_EINVAL, fi_mr_regv(b.domain, both, 0, FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	attr.iov_count = 2;
	GIVES(FI_EINVAL, fi_mr_regattr(b.domain, &attr, 0, &mr));
	GIVES(FI_EBADFLAGS, fi_mr_reg(b.domain, in, 1000, FI_REMOTE_WRITE, 0, 0, FI_RMA_EVENT, &mr, NULL));
	attr.iov_count = 1;
	GIVES(FI_EBADFLAGS, fi_mr_regattr(b.domain, &attr, FI_HMEM_DEVICE_ONLY, &mr));
	ENSURE(fi_mr_reg(b.domain, NULL, 1000, FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL) < 0, "memory at address 0 is registered");
	return NULL;
}

static void *remapped;
enum { REMAPPED = 1 << 20 };

static int unmap_remapped(void *at)
{
	return munmap(at, REMAPPED);
}

/* Memory that is unmapped and mapped again at the same address has its new content, for the peer and in messages. */
static const char *regions_remapped(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct fid_mr *mr;
	struct side a, b;

	(void)arg;
	remapped = mmap(NULL, REMAPPED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ENSURE(remapped != MAP_FAILED, "mmap");
	keep(unmap_remapped, remapped, "memory");
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	for (size_t round = 0; round < 6; round++) {
		fill_bytes(remapped, REMAPPED, round);
		OK(fi_mr_reg(b.domain, remapped, REMAPPED, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
		memset(out, 0, REMAPPED);
		ssize_t rc = fi_read(a.ep, out, REMAPPED, NULL, a.peer, (uintptr_t)remapped, fi_mr_key(mr), &a);
		const char *why = rc ? "fi_read" : next(a.tx, &entry, NULL);
		int closed = fi_close(&mr->fid);
		TRY(why);
		ENSURE(!closed, "closing the region");
		TRY(check_bytes(out, REMAPPED, round));
		/* The provider registers the memory of a long message itself, at both ends. */
		for (size_t end = 0; end < 2; end++) {
			uint8_t *from = end ? out : remapped, *to = end ? remapped : in;

			ENSURE(mmap(remapped, REMAPPED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
				       remapped, "mmap");
			fill_bytes(from, REMAPPED, 10 * round + end);
			OK(fi_recv(b.ep, to, REMAPPED, NULL, FI_ADDR_UNSPEC, &b));
			OK(fi_send(a.ep, from, REMAPPED, NULL, a.peer, &a));
			TRY(next(b.rx, &entry, NULL));
			TRY(next(a.tx, &entry, NULL));
			TRY(check_bytes(to, REMAPPED, 10 * round + end));
		}
		ENSURE(mmap(remapped, REMAPPED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == remapped,
		       "mmap");
	}
	return NULL;
}

/* ---------------------------------------------------------------- every call for a transfer */

enum how { POLL, SREAD, DESCRIPTOR, COUNTER, HOWS };

static void move_all(void)
{
	for (size_t i = 0; i < COUNT(moving) && moving[i]; i++) {
		fi_cq_read(moving[i]->tx, NULL, 0);
		fi_cq_read(moving[i]->rx, NULL, 0);
	}
}

/*
 * Waits for the next completion of `cq` in one of the ways. The waits are short, because the other endpoint in this process
 * makes progress only between them.
 */
static const char *next_by(enum how how, struct side *e, struct fid_cq *cq, struct fi_cq_tagged_entry *entry, uint64_t count)
{
	uint64_t until = now_ms() + WAIT_MS;
	struct fid *fids[1] = { &cq->fid };
	struct pollfd readable = { .fd = -1, .events = POLLIN };
	ssize_t n = -FI_EAGAIN;

	while (how == COUNTER) {
		int rc = fi_cntr_wait(e->cntr, count, 1);

		if (!rc)
			return next(cq, entry, NULL);
		ENSURE(rc == -FI_ETIMEDOUT, "fi_cntr_wait: %s", fi_strerror(-rc));
		ENSURE(now_ms() < until, "the counter does not reach %ju", (uintmax_t)count);
		move_all();
	}
	if (how == POLL)
		return next(cq, entry, NULL);
	if (how == DESCRIPTOR)
		OK(fi_control(&cq->fid, FI_GETWAIT, &readable.fd));
	while (n == -FI_EAGAIN) {
		ENSURE(now_ms() < until, "no completion arrives");
		move_all();
		if (how == SREAD) {
			n = fi_cq_sread(cq, entry, 1, NULL, 1);
			continue;
		}
		int rc = fi_trywait(fabric, fids, 1);
		ENSURE(rc == 0 || rc == -FI_EAGAIN, "fi_trywait: %s", fi_strerror(-rc));
		if (rc == 0)
			poll(&readable, 1, 1);
		n = fi_cq_read(cq, entry, 1);
	}
	ENSURE(n == 1, "a completion is read: %zd", n);
	return NULL;
}

enum call { SENT, SENT_V, SENT_MSG, INJECTED, SENT_DATA, INJECTED_DATA, SEND_CALLS };

static ssize_t send_by(enum call call, bool tagged, struct side *e, uint8_t *from, size_t len, uint64_t tag, uint64_t data)
{
	struct iovec parts[2] = { { from, len / 3 }, { from + len / 3, len - len / 3 } };
	struct fi_msg msg = { .msg_iov = parts, .iov_count = 2, .addr = e->peer, .context = e, .data = data };
	struct fi_msg_tagged tmsg = { .msg_iov = parts, .iov_count = 2, .addr = e->peer, .context = e, .data = data, .tag = tag };

	switch (call) {
	case SENT:
		return tagged ? fi_tsend(e->ep, from, len, NULL, e->peer, tag, e) : fi_send(e->ep, from, len, NULL, e->peer, e);
	case SENT_V:
		return tagged ? fi_tsendv(e->ep, parts, NULL, 2, e->peer, tag, e) : fi_sendv(e->ep, parts, NULL, 2, e->peer, e);
	case SENT_MSG:
		return tagged ? fi_tsendmsg(e->ep, &tmsg, FI_REMOTE_CQ_DATA) : fi_sendmsg(e->ep, &msg, FI_REMOTE_CQ_DATA);
	case INJECTED:
		return tagged ? fi_tinject(e->ep, from, len, e->peer, tag) : fi_inject(e->ep, from, len, e->peer);
	case SENT_DATA:
		return tagged ? fi_tsenddata(e->ep, from, len, NULL, data, e->peer, tag, e)
			      : fi_senddata(e->ep, from, len, NULL, data, e->peer, e);
	default:
		return tagged ? fi_tinjectdata(e->ep, from, len, data, e->peer, tag)
			      : fi_injectdata(e->ep, from, len, data, e->peer);
	}
}

static ssize_t receive_by(size_t call, bool tagged, struct side *e, uint8_t *to, size_t len, uint64_t tag)
{
	struct iovec parts[2] = { { to, len / 2 }, { to + len / 2, len - len / 2 } };
	struct fi_msg msg = { .msg_iov = parts, .iov_count = 2, .addr = e->peer, .context = e };
	struct fi_msg_tagged tmsg = { .msg_iov = parts, .iov_count = 2, .addr = FI_ADDR_UNSPEC, .context = e, .tag = tag };

	switch (call % 3) {
	case 0:
		return tagged ? fi_trecv(e->ep, to, len, NULL, e->peer, tag, 0, e)
			      : fi_recv(e->ep, to, len, NULL, FI_ADDR_UNSPEC, e);
	case 1:
		return tagged ? fi_trecvv(e->ep, parts, NULL, 2, e->peer, tag, 0, e) : fi_recvv(e->ep, parts, NULL, 2, e->peer, e);
	default: return tagged ? fi_trecvmsg(e->ep, &tmsg, 0) : fi_recvmsg(e->ep, &msg, 0);
	}
}

enum { MAP = 1, BASIC = 2 };

/* Opens two endpoints with maps or tables for addresses, and one of the two modes of memory registration. */
static const char *open_variant(struct side *a, struct side *b, size_t variant)
{
	struct fi_info *asked = new_hints(), *got = NULL;
	struct setup how = { .av = variant & MAP ? FI_AV_MAP : FI_AV_TABLE, .counts = FI_SEND | FI_RECV | FI_READ | FI_WRITE };

	asked->domain_attr->mr_mode = variant & BASIC ? FI_MR_BASIC : MODERN;
	asked->domain_attr->av_type = how.av;
	asked->caps = KINDS | FI_DIRECTED_RECV;
	int rc = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, asked, &got);
	fi_freeinfo(asked);
	OK(rc);
	keep(close_info, got, "information");
	how.info = got;
	TRY(open_sides_as(a, b, &how));
	move_both(a, b);
	return NULL;
}

/* Every call that sends and every call that receives, with every way to wait. */
static const char *calls(size_t variant)
{
	static const size_t lengths[] = { 0, 64, 3000, INJECT, 20000 };
	struct fi_cq_tagged_entry entry;
	uint64_t sent = 0;
	struct side a, b;

	TRY(open_variant(&a, &b, variant));
	for (size_t n = 0; n < SEND_CALLS * 2 * HOWS * COUNT(lengths); n++) {
		enum call call = n % SEND_CALLS;
		bool tagged = n / SEND_CALLS % 2, silent = call == INJECTED || call == INJECTED_DATA;
		enum how how = n / SEND_CALLS / 2 % HOWS;
		size_t len = lengths[n / SEND_CALLS / 2 / HOWS];
		uint64_t tag = 0x8000000000000000u + n, data = ~(uint64_t)n;

		if (silent && len > INJECT)
			continue;
		fill_bytes(out, len, n);
		memset(in, 0xee, len + 16);
		OK(receive_by(n, tagged, &b, in, len + 16, tag));
		OK(send_by(call, tagged, &a, out, len, tag, data));
		sent++;
		if (silent)
			memset(out, 0x11, len);
		TRY(next_by(how, &b, b.rx, &entry, sent));
		ENSURE(entry.op_context == &b && entry.len == len, "call %zu: %zu bytes of %zu", n, entry.len, len);
		ENSURE((entry.flags & (FI_RECV | FI_MSG | FI_TAGGED)) == (FI_RECV | (tagged ? FI_TAGGED : FI_MSG)), "call %zu: flags %#jx", n,
		       (uintmax_t)entry.flags);
		ENSURE(!tagged || entry.tag == tag, "call %zu: tag %#jx", n, (uintmax_t)entry.tag);
		bool has = call == SENT_DATA || call == INJECTED_DATA || call == SENT_MSG;
		ENSURE(!(entry.flags & FI_REMOTE_CQ_DATA) == !has && (!has || entry.data == data), "call %zu: data %#jx", n,
		       (uintmax_t)entry.data);
		TRY(check_bytes(in, len, n));
		TRY(all_bytes(in + len, 16, 0xee, "after the message"));
		if (!silent) {
			TRY(next_by(how, &a, a.tx, &entry, sent));
			ENSURE(entry.op_context == &a, "call %zu: another context", n);
			ENSURE((entry.flags & (FI_SEND | FI_MSG | FI_TAGGED)) == (FI_SEND | (tagged ? FI_TAGGED : FI_MSG)),
			       "call %zu: flags %#jx", n, (uintmax_t)entry.flags);
		}
	}
	for (uint64_t until = now_ms() + WAIT_MS; fi_cntr_read(a.cntr) < sent && now_ms() < until;)
		move_all();
	ENSURE(fi_cntr_read(a.cntr) == sent && fi_cntr_read(b.cntr) == sent, "counters %ju and %ju of %ju",
	       (uintmax_t)fi_cntr_read(a.cntr), (uintmax_t)fi_cntr_read(b.cntr), (uintmax_t)sent);
	ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN && fi_cq_read(b.rx, &entry, 1) == -FI_EAGAIN, "an unexpected completion");
	return NULL;
}

enum { WRITES, WRITES_V, WRITES_MSG, WRITES_INJECTED, WRITES_DATA, WRITES_INJECTED_DATA, READS, READS_V, READS_MSG, MEMORY_CALLS };

/* Every call that accesses memory, with every way to wait. */
static const char *memory_calls(size_t variant)
{
	static const size_t lengths[] = { 1, 64, INJECT, 20000, 300000 };
	struct fi_cq_tagged_entry entry;
	struct fid_mr *mr;
	uint64_t done = 0;
	struct side a, b;

	TRY(open_variant(&a, &b, variant));
	OK(fi_mr_reg(b.domain, in, sizeof in, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	for (size_t n = 0; n < MEMORY_CALLS * HOWS * COUNT(lengths); n++) {
		size_t call = n % MEMORY_CALLS, len = lengths[n / MEMORY_CALLS / HOWS];
		enum how how = n / MEMORY_CALLS % HOWS;
		bool silent = call == WRITES_INJECTED || call == WRITES_INJECTED_DATA, reads = call >= READS;
		bool data = call == WRITES_DATA || call == WRITES_INJECTED_DATA || call == WRITES_MSG;
		struct iovec parts[2] = { { out, len / 2 }, { out + len / 2, len - len / 2 } };
		uint64_t key = fi_mr_key(mr), at = (uintptr_t)in + 16;
		struct fi_rma_iov there = { at, len, key };
		struct fi_msg_rma msg = { .msg_iov = parts, .iov_count = 2, .addr = a.peer, .rma_iov = &there, .rma_iov_count = 1,
					  .context = &a, .data = n };

		if (silent && len > INJECT)
			continue;
		fill_bytes(reads ? in + 16 : out, len, n);
		memset(reads ? out : in, 0xee, len + 32);
		switch (call) {
		case WRITES: OK(fi_write(a.ep, out, len, NULL, a.peer, at, key, &a)); break;
		case WRITES_V: OK(fi_writev(a.ep, parts, NULL, 2, a.peer, at, key, &a)); break;
		case WRITES_MSG: OK(fi_writemsg(a.ep, &msg, FI_REMOTE_CQ_DATA | FI_DELIVERY_COMPLETE)); break;
		case WRITES_INJECTED: OK(fi_inject_write(a.ep, out, len, a.peer, at, key)); break;
		case WRITES_DATA: OK(fi_writedata(a.ep, out, len, NULL, n, a.peer, at, key, &a)); break;
		case WRITES_INJECTED_DATA: OK(fi_inject_writedata(a.ep, out, len, n, a.peer, at, key)); break;
		case READS: OK(fi_read(a.ep, out, len, NULL, a.peer, at, key, &a)); break;
		case READS_V: OK(fi_readv(a.ep, parts, NULL, 2, a.peer, at, key, &a)); break;
		case READS_MSG: OK(fi_readmsg(a.ep, &msg, FI_DELIVERY_COMPLETE)); break;
		}
		done++;
		if (silent) {
			memset(out, 0x11, len);
			for (uint64_t until = now_ms() + WAIT_MS; fi_cntr_read(a.cntr) < done;) {
				ENSURE(now_ms() < until, "call %zu: the injected write does not end", n);
				move_all();
			}
		} else {
			TRY(next_by(how, &a, a.tx, &entry, done));
			ENSURE(entry.op_context == &a, "call %zu: another context", n);
			ENSURE((entry.flags & (FI_RMA | FI_READ | FI_WRITE)) == (FI_RMA | (reads ? FI_READ : FI_WRITE)),
			       "call %zu: flags %#jx", n, (uintmax_t)entry.flags);
		}
		TRY(check_bytes(reads ? out : in + 16, len, n));
		TRY(all_bytes(reads ? out + len : in + 16 + len, 16, 0xee, "after the memory"));
		if (data) {
			TRY(next(b.rx, &entry, NULL));
			ENSURE(entry.flags & FI_REMOTE_WRITE && entry.flags & FI_REMOTE_CQ_DATA && entry.data == n,
			       "call %zu: flags %#jx, data %ju", n, (uintmax_t)entry.flags, (uintmax_t)entry.data);
		}
		ENSURE(fi_cq_read(b.rx, &entry, 1) == -FI_EAGAIN, "call %zu: the target has a completion", n);
	}
	ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN, "an unexpected completion");
	ENSURE(fi_cntr_read(a.cntr) == done && fi_cntr_read(b.cntr) == 0, "counters %ju of %ju, and %ju", (uintmax_t)fi_cntr_read(a.cntr),
	       (uintmax_t)done, (uintmax_t)fi_cntr_read(b.cntr));
	return NULL;
}

enum { ADDS, ADDS_V, ADDS_MSG, ADDS_INJECTED, FETCHES, FETCHES_V, FETCHES_MSG, SWAPS, SWAPS_V, SWAPS_MSG, ATOMIC_CALLS };

/* Every call for atomic operations, with every way to wait. The calls that take lists have the operands and results in two pieces. */
static const char *atomic_calls(size_t variant)
{
	enum { N = 7 };
	static uint64_t target[N + 1], operand[N], result[N], compare[N];
	struct fi_cq_tagged_entry entry;
	struct fid_mr *mr;
	uint64_t done = 0;
	struct side a, b;

	TRY(open_variant(&a, &b, variant));
	OK(fi_mr_reg(b.domain, target, sizeof target, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	for (size_t n = 0; n < ATOMIC_CALLS * HOWS * 3; n++) {
		size_t call = n % ATOMIC_CALLS;
		enum how how = n / ATOMIC_CALLS % HOWS;
		uint64_t key = fi_mr_key(mr), at = (uintptr_t)target;
		struct fi_ioc with[2] = { { operand, 3 }, { operand + 3, N - 3 } }, than[2] = { { compare, 4 }, { compare + 4, N - 4 } };
		struct fi_ioc old[2] = { { result, 2 }, { result + 2, N - 2 } };
		struct fi_rma_ioc there = { at, N, key };
		bool swaps = call >= SWAPS, fetches = call >= FETCHES;
		struct fi_msg_atomic msg = { .msg_iov = with, .iov_count = 2, .addr = a.peer, .rma_iov = &there, .rma_iov_count = 1,
					     .datatype = FI_UINT64, .op = swaps ? FI_CSWAP : FI_SUM, .context = &a };

		for (size_t i = 0; i < N; i++) {
			target[i] = 1000 * n + i;
			operand[i] = 7 * i + 1;
			compare[i] = i % 2 ? target[i] : 0;
			result[i] = 99;
		}
		target[N] = 4711;
		switch (call) {
		case ADDS: OK(fi_atomic(a.ep, operand, N, NULL, a.peer, at, key, FI_UINT64, FI_SUM, &a)); break;
		case ADDS_V: OK(fi_atomicv(a.ep, with, NULL, 2, a.peer, at, key, FI_UINT64, FI_SUM, &a)); break;
		case ADDS_MSG: OK(fi_atomicmsg(a.ep, &msg, FI_COMPLETION | FI_DELIVERY_COMPLETE)); break;
		case ADDS_INJECTED: OK(fi_inject_atomic(a.ep, operand, N, a.peer, at, key, FI_UINT64, FI_SUM)); break;
		case FETCHES:
			OK(fi_fetch_atomic(a.ep, operand, N, NULL, result, NULL, a.peer, at, key, FI_UINT64, FI_SUM, &a));
			break;
		case FETCHES_V:
			OK(fi_fetch_atomicv(a.ep, with, NULL, 2, old, NULL, 2, a.peer, at, key, FI_UINT64, FI_SUM, &a));
			break;
		case FETCHES_MSG: OK(fi_fetch_atomicmsg(a.ep, &msg, old, NULL, 2, FI_COMPLETION)); break;
		case SWAPS:
			OK(fi_compare_atomic(a.ep, operand, N, NULL, compare, NULL, result, NULL, a.peer, at, key, FI_UINT64,
					     FI_CSWAP, &a));
			break;
		case SWAPS_V:
			OK(fi_compare_atomicv(a.ep, with, NULL, 2, than, NULL, 2, old, NULL, 2, a.peer, at, key, FI_UINT64, FI_CSWAP,
					      &a));
			break;
		case SWAPS_MSG: OK(fi_compare_atomicmsg(a.ep, &msg, than, NULL, 2, old, NULL, 2, FI_COMPLETION)); break;
		}
		done++;
		if (call == ADDS_INJECTED) {
			uint64_t first = operand[0];

			operand[0] = 12345;
			for (uint64_t until = now_ms() + WAIT_MS; fi_cntr_read(a.cntr) < done;) {
				ENSURE(now_ms() < until, "call %zu: the injected operation does not end", n);
				move_all();
			}
			operand[0] = first;
		} else {
			TRY(next_by(how, &a, a.tx, &entry, done));
			ENSURE(entry.op_context == &a && entry.flags & FI_ATOMIC && entry.flags & (fetches ? FI_READ : FI_WRITE),
			       "call %zu: flags %#jx", n, (uintmax_t)entry.flags);
		}
		for (size_t i = 0; i < N; i++) {
			uint64_t before = 1000 * n + i;
			uint64_t after = !swaps ? before + operand[i] : compare[i] == before ? operand[i] : before;

			ENSURE(target[i] == after, "call %zu, element %zu: %ju, expected %ju", n, i, (uintmax_t)target[i],
			       (uintmax_t)after);
			ENSURE(result[i] == (fetches ? before : 99), "call %zu, element %zu: the former value is %ju", n, i,
			       (uintmax_t)result[i]);
		}
		ENSURE(target[N] == 4711, "call %zu: the element after the target is changed", n);
	}
	ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN && fi_cq_read(b.rx, &entry, 1) == -FI_EAGAIN, "an unexpected completion");
	return NULL;
}

/* What an operation makes of an element. Bit operations exist for integers only. */
#define AGREED(type, t, o, c)                                                                                           \
	case FI_MIN: t = o < t ? o : t; break;                                                                         \
	case FI_MAX: t = o > t ? o : t; break;                                                                         \
	case FI_SUM: t = (type)(t + o); break;                                                                         \
	case FI_PROD: t = (type)(t * o); break;                                                                        \
	case FI_LOR: t = (type)(t || o); break;                                                                        \
	case FI_LAND: t = (type)(t && o); break;                                                                       \
	case FI_LXOR: t = (type)(!t != !o); break;                                                                     \
	case FI_ATOMIC_READ: break;                                                                                    \
	case FI_ATOMIC_WRITE: t = o; break;                                                                            \
	case FI_CSWAP: t = c == t ? o : t; break;                                                                      \
	case FI_CSWAP_NE: t = c != t ? o : t; break;                                                                   \
	case FI_CSWAP_LE: t = c <= t ? o : t; break;                                                                   \
	case FI_CSWAP_LT: t = c < t ? o : t; break;                                                                    \
	case FI_CSWAP_GE: t = c >= t ? o : t; break;                                                                   \
	case FI_CSWAP_GT: t = c > t ? o : t; break
#define OF_BITS(type, t, o, c)                                                                                          \
	case FI_BOR: t = (type)(t | o); break;                                                                         \
	case FI_BAND: t = (type)(t & o); break;                                                                        \
	case FI_BXOR: t = (type)(t ^ o); break;                                                                        \
	case FI_MSWAP: t = (type)((o & c) | (t & ~c)); break
#define ELEMENT(name, type, more)                                                                                       \
	static void name(enum fi_op op, void *target, const void *operand, const void *compare)                        \
	{                                                                                                              \
		type t, o, c;                                                                                          \
                                                                                                                       \
		memcpy(&t, target, sizeof t);                                                                          \
		memcpy(&o, operand, sizeof o);                                                                         \
		memcpy(&c, compare, sizeof c);                                                                         \
		switch (op) {                                                                                          \
			AGREED(type, t, o, c);                                                                         \
			more;                                                                                          \
		default: break;                                                                                        \
		}                                                                                                      \
		memcpy(target, &t, sizeof t);                                                                          \
	}                                                                                                              \
	static void name##_of(void *at, int value)                                                                     \
	{                                                                                                              \
		type t = (type)value;                                                                                  \
                                                                                                                       \
		memcpy(at, &t, sizeof t);                                                                              \
	}

ELEMENT(of_i8, int8_t, OF_BITS(int8_t, t, o, c))
ELEMENT(of_u8, uint8_t, OF_BITS(uint8_t, t, o, c))
ELEMENT(of_i16, int16_t, OF_BITS(int16_t, t, o, c))
ELEMENT(of_u16, uint16_t, OF_BITS(uint16_t, t, o, c))
ELEMENT(of_i32, int32_t, OF_BITS(int32_t, t, o, c))
ELEMENT(of_u32, uint32_t, OF_BITS(uint32_t, t, o, c))
ELEMENT(of_i64, int64_t, OF_BITS(int64_t, t, o, c))
ELEMENT(of_u64, uint64_t, OF_BITS(uint64_t, t, o, c))
ELEMENT(of_float, float, )
ELEMENT(of_double, double, )

/*
 * Every operation on every type, with each kind of call that it exists for: without a result, with one, and comparing. The results
 * must be those that this program computes for the same operation.
 */
static const char *atomic_operations(size_t arg)
{
	static const struct {
		enum fi_datatype type;
		size_t size;
		void (*apply)(enum fi_op, void *, const void *, const void *);
		void (*put)(void *, int);
	} types[] = { { FI_INT8, 1, of_i8, of_i8_of },	       { FI_UINT8, 1, of_u8, of_u8_of },
		      { FI_INT16, 2, of_i16, of_i16_of },      { FI_UINT16, 2, of_u16, of_u16_of },
		      { FI_INT32, 4, of_i32, of_i32_of },      { FI_UINT32, 4, of_u32, of_u32_of },
		      { FI_INT64, 8, of_i64, of_i64_of },      { FI_UINT64, 8, of_u64, of_u64_of },
		      { FI_FLOAT, 4, of_float, of_float_of },  { FI_DOUBLE, 8, of_double, of_double_of } };
	static const int values[][3] = { { 3, 5, 3 }, { 6, 2, 9 }, { 0, 1, 0 }, { 1, 0, 1 }, { 0, 0, 4 }, { 7, 7, 2 }, { -3, 4, -3 } };
	enum { N = COUNT(values) };
	static _Alignas(8) uint8_t target[8 * N], operand[8 * N], compare[8 * N], result[8 * N], before[8 * N], after[8 * N];
	static const uint64_t classes[] = { 0, FI_FETCH_ATOMIC, FI_COMPARE_ATOMIC };
	struct fi_cq_tagged_entry entry;
	struct fi_atomic_attr attr;
	struct fid_mr *mr;
	size_t performed = 0;
	struct side a, b;

	(void)arg;
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	OK(fi_mr_reg(b.domain, target, sizeof target, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	uint64_t at = (uintptr_t)target, key = fi_mr_key(mr);
	for (size_t n = 0; n < COUNT(types) * COUNT(classes) * (FI_MSWAP + 1); n++) {
		size_t t = n % COUNT(types), class = n / COUNT(types) % COUNT(classes), size = types[t].size;
		enum fi_op op = n / COUNT(types) / COUNT(classes);
		enum fi_datatype type = types[t].type;

		for (size_t i = 0; i < N; i++) {
			types[t].put(target + i * size, values[i][0]);
			types[t].put(operand + i * size, values[i][1]);
			types[t].put(compare + i * size, values[i][2]);
		}
		memcpy(before, target, sizeof before);
		memset(result, 0xee, sizeof result);
		int rc = fi_query_atomic(a.domain, type, op, &attr, classes[class]);
		if (rc) {
			GIVES(FI_EOPNOTSUPP, rc);
			ssize_t refused = class == 0   ? fi_atomic(a.ep, operand, N, NULL, a.peer, at, key, type, op, &a)
					  : class == 1 ? fi_fetch_atomic(a.ep, operand, N, NULL, result, NULL, a.peer, at, key,
									 type, op, &a)
						       : fi_compare_atomic(a.ep, operand, N, NULL, compare, NULL, result, NULL,
									   a.peer, at, key, type, op, &a);
			GIVES(FI_EOPNOTSUPP, refused);
			continue;
		}
		performed++;
		ENSURE(attr.size == size && attr.count >= N, "type %d, operation %d: size %zu, count %zu", type, op, attr.size,
		       attr.count);
		switch (class) {
		case 0: OK(fi_atomic(a.ep, operand, N, NULL, a.peer, at, key, type, op, &a)); break;
		case 1: OK(fi_fetch_atomic(a.ep, operand, N, NULL, result, NULL, a.peer, at, key, type, op, &a)); break;
		case 2:
			OK(fi_compare_atomic(a.ep, operand, N, NULL, compare, NULL, result, NULL, a.peer, at, key, type, op, &a));
			break;
		}
		TRY(next(a.tx, &entry, NULL));
		memcpy(after, before, sizeof after);
		for (size_t i = 0; i < N; i++) {
			types[t].apply(op, after + i * size, operand + i * size, compare + i * size);
			ENSURE(!memcmp(target + i * size, after + i * size, size), "type %d, operation %d, class %zu: element %zu differs",
			       type, op, class, i);
			ENSURE(!class || !memcmp(result + i * size, before + i * size, size),
			       "type %d, operation %d, class %zu: the former value of element %zu differs", type, op, class, i);
		}
	}
	/* Integers have 11 operations without a result, 12 with one, and 7 that compare; floating-point types have 8, 9 and 6. */
	ENSURE(performed == 8 * (11 + 12 + 7) + 2 * (8 + 9 + 6), "%zu operations exist", performed);
	return NULL;
}

/* ---------------------------------------------------------------- completion levels, and injected data */

/* The level of a completion is requested for all operations of the endpoint, or for one. */
static const char *levels(size_t arg)
{
	static const uint64_t wanted[] = { FI_INJECT_COMPLETE, FI_TRANSMIT_COMPLETE, FI_DELIVERY_COMPLETE };
	static const size_t lengths[] = { 8, 1000, 4096, INJECT, 100000 };
	bool for_all = arg;
	struct fi_cq_tagged_entry entry;

	for (size_t l = 0; l < COUNT(wanted); l++) {
		struct fi_info *asked = new_hints(), *got = NULL;
		struct setup how = { 0 };
		struct side a, b;
		struct fid_mr *mr;

		asked->tx_attr->op_flags = for_all ? wanted[l] : 0;
		int rc = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, asked, &got);
		fi_freeinfo(asked);
		OK(rc);
		keep(close_info, got, "information");
		how.info = got;
		TRY(open_sides_as(&a, &b, &how));
		OK(fi_mr_reg(b.domain, in, sizeof in, FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
		keep(close_fid, mr, "region");
		for (size_t s = 0; s < COUNT(lengths); s++) {
			size_t len = lengths[s];
			struct iovec iov = { out, len };
			struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = a.peer, .context = &a };
			struct fi_rma_iov there = { (uintptr_t)in, len, fi_mr_key(mr) };
			struct fi_msg_rma write = { .msg_iov = &iov, .iov_count = 1, .addr = a.peer, .rma_iov = &there,
						    .rma_iov_count = 1, .context = &write };
			bool posted = false;

			/* A message without a receive. */
			move_both(&a, &b);
			fill_bytes(out, len, s);
			OK(for_all ? fi_send(a.ep, out, len, NULL, a.peer, &a) : fi_sendmsg(a.ep, &msg, wanted[l]));
			if (len > EAGER) {
				/* Its content stays here until there is a receive. */
				for (uint64_t until = now_ms() + 30; now_ms() < until;) {
					ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN, "level %zu: an early completion", l);
					fi_cq_read(b.rx, NULL, 0);
				}
				OK(fi_recv(b.ep, in, len, NULL, FI_ADDR_UNSPEC, &b));
				posted = true;
			}
			TRY(next(a.tx, &entry, NULL));
			ENSURE(entry.op_context == &a, "level %zu, %zu bytes: another context", l, len);
			/* From the completion on, the program may use the memory. */
			memset(out, 0xdd, len);
			if (!posted)
				OK(fi_recv(b.ep, in, len, NULL, FI_ADDR_UNSPEC, &b));
			TRY(next(b.rx, &entry, NULL));
			TRY(check_bytes(in, len, s));
			/* A write needs no call of the target's program. */
			memset(moving, 0, sizeof moving);
			moving[0] = &a;
			memset(in, 0, len);
			fill_bytes(out, len, s + 50);
			OK(for_all ? fi_write(a.ep, out, len, NULL, a.peer, (uintptr_t)in, fi_mr_key(mr), &write)
				   : fi_writemsg(a.ep, &write, wanted[l]));
			TRY(next(a.tx, &entry, NULL));
			ENSURE(entry.op_context == &write, "level %zu, %zu bytes: another context of the write", l, len);
			memset(out, 0xdd, len);
			for (uint64_t until = now_ms() + 1000; wanted[l] == FI_INJECT_COMPLETE && check_bytes(in, len, s + 50);)
				ENSURE(now_ms() < until, "level %zu: the data does not arrive", l);
			TRY(check_bytes(in, len, s + 50));
		}
	}
	return NULL;
}

/* The length after `len` in the test of injected messages: all lengths where the way of sending changes, and some between them. */
static size_t longer_to_inject(size_t len)
{
	size_t step = len < 8 || (len > 980 && len < 1030) ? 1 : len < 4096 ? 61 : 997;

	return len < INJECT && len + step > INJECT ? INJECT : len + step;
}

/* Injected data may be changed at once. Its largest size is that of the attributes. */
static const char *injected(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct fi_info *asked = new_hints(), *got = NULL;
	struct setup how = { 0 };
	struct fid_mr *mr;
	struct side a, b;

	(void)arg;
	/* All operations of the endpoint are injected, unless their flags say otherwise. */
	asked->tx_attr->op_flags = FI_INJECT;
	int rc = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, asked, &got);
	fi_freeinfo(asked);
	OK(rc);
	keep(close_info, got, "information");
	ENSURE(got->tx_attr->inject_size == INJECT, "%zu bytes are injected", got->tx_attr->inject_size);
	how.info = got;
	TRY(open_sides_as(&a, &b, &how));
	move_both(&a, &b);
	OK(fi_mr_reg(b.domain, in, sizeof in, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	uint64_t at = (uintptr_t)in, key = fi_mr_key(mr);
	for (size_t n = 0, len = 0; len <= INJECT; len = longer_to_inject(len), n++) {
		struct iovec iov = { out, len };
		struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = a.peer, .context = &a };
		struct fi_msg_tagged tmsg = { .msg_iov = &iov, .iov_count = 1, .addr = a.peer, .context = &a, .tag = n };
		struct fi_rma_iov there = { at, len, key };
		struct fi_msg_rma write = { .msg_iov = &iov, .iov_count = 1, .addr = a.peer, .rma_iov = &there, .rma_iov_count = 1,
					    .context = &a, .data = n };

		for (size_t call = 0; call < 11; call++) {
			bool tagged = call % 2 && call < 8, writes = call >= 8;

			fill_bytes(out, len, n + call);
			memset(in, 0xee, len + 8);
			if (!writes)
				OK(receive_by(0, tagged, &b, in, len, n));
			switch (call) {
			case 0: OK(fi_inject(a.ep, out, len, a.peer)); break;
			case 1: OK(fi_tinject(a.ep, out, len, a.peer, n)); break;
			case 2: OK(fi_injectdata(a.ep, out, len, n, a.peer)); break;
			case 3: OK(fi_tinjectdata(a.ep, out, len, n, a.peer, n)); break;
			case 4: OK(fi_sendmsg(a.ep, &msg, FI_INJECT)); break;
			case 5: OK(fi_tsendmsg(a.ep, &tmsg, FI_INJECT)); break;
			case 6: OK(fi_send(a.ep, out, len, NULL, a.peer, &a)); break;
			case 7: OK(fi_tsend(a.ep, out, len, NULL, a.peer, n, &a)); break;
			case 8: OK(fi_inject_writedata(a.ep, out, len, n, a.peer, at, key)); break;
			case 9: OK(fi_writemsg(a.ep, &write, FI_INJECT | FI_REMOTE_CQ_DATA)); break;
			case 10: OK(fi_writedata(a.ep, out, len, NULL, n, a.peer, at, key, &a)); break;
			}
			memset(out, 0xdd, len);
			TRY(next(b.rx, &entry, NULL));
			ENSURE(writes || entry.len == len, "call %zu: %zu bytes of %zu", call, entry.len, len);
			TRY(check_bytes(in, len, n + call));
			ENSURE(in[len] == 0xee, "call %zu: the byte after %zu is written", call, len);
			if ((call >= 4 && call < 8) || call >= 9)
				TRY(next(a.tx, &entry, NULL));
			ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN, "call %zu: an unexpected completion", call);
		}
	}
	struct iovec iov = { out, INJECT + 1 };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = a.peer };
	struct fi_msg_tagged tmsg = { .msg_iov = &iov, .iov_count = 1, .addr = a.peer };
	struct fi_rma_iov there = { at, INJECT + 1, key };
	struct fi_msg_rma write = { .msg_iov = &iov, .iov_count = 1, .addr = a.peer, .rma_iov = &there, .rma_iov_count = 1 };
	GIVES(FI_EMSGSIZE, fi_inject(a.ep, out, INJECT + 1, a.peer));
	GIVES(FI_EMSGSIZE, fi_tinject(a.ep, out, INJECT + 1, a.peer, 1));
	GIVES(FI_EMSGSIZE, fi_injectdata(a.ep, out, INJECT + 1, 1, a.peer));
	GIVES(FI_EMSGSIZE, fi_tinjectdata(a.ep, out, INJECT + 1, 1, a.peer, 1));
	GIVES(FI_EMSGSIZE, fi_sendmsg(a.ep, &msg, FI_INJECT));
	GIVES(FI_EMSGSIZE, fi_tsendmsg(a.ep, &tmsg, FI_INJECT));
	GIVES(FI_EMSGSIZE, fi_send(a.ep, out, INJECT + 1, NULL, a.peer, &a));
	GIVES(FI_EMSGSIZE, fi_inject_write(a.ep, out, INJECT + 1, a.peer, at, key));
	GIVES(FI_EMSGSIZE, fi_writemsg(a.ep, &write, FI_INJECT));
	/* The flags of this call replace FI_INJECT of the endpoint, so a longer message is sent. */
	OK(fi_recv(b.ep, in, INJECT + 1, NULL, FI_ADDR_UNSPEC, &b));
	OK(fi_sendmsg(a.ep, &msg, FI_TRANSMIT_COMPLETE));
	TRY(next(b.rx, &entry, NULL));
	TRY(next(a.tx, &entry, NULL));
	/* The flag has no meaning for a read, which may be longer. */
	fill_bytes(in, 100000, 3);
	memset(out, 0, 100000);
	OK(fi_read(a.ep, out, 100000, NULL, a.peer, at, key, &a));
	TRY(next(a.tx, &entry, NULL));
	return check_bytes(out, 100000, 3);
}

/* Without a buffer or with an empty list of buffers, messages and writes have no bytes. */
static const char *empty(size_t arg)
{
	struct fi_cq_tagged_entry entry;
	struct fi_msg msg = { .data = 5 };
	struct fi_msg_tagged tmsg = { .data = 5, .tag = 9 };
	struct fid_mr *mr;
	struct side a, b;

	(void)arg;
	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	msg.addr = tmsg.addr = a.peer;
	for (size_t call = 0; call < 8; call++) {
		bool tagged = call % 2;

		OK(tagged ? fi_trecvv(b.ep, NULL, NULL, 0, b.peer, 9, 0, &b) : fi_recv(b.ep, NULL, 0, NULL, b.peer, &b));
		switch (call) {
		case 0: OK(fi_send(a.ep, NULL, 0, NULL, a.peer, &a)); break;
		case 1: OK(fi_tsend(a.ep, NULL, 0, NULL, a.peer, 9, &a)); break;
		case 2: OK(fi_sendv(a.ep, NULL, NULL, 0, a.peer, &a)); break;
		case 3: OK(fi_tsendv(a.ep, NULL, NULL, 0, a.peer, 9, &a)); break;
		case 4: OK(fi_sendmsg(a.ep, &msg, FI_REMOTE_CQ_DATA)); break;
		case 5: OK(fi_tsendmsg(a.ep, &tmsg, FI_REMOTE_CQ_DATA)); break;
		case 6: OK(fi_inject(a.ep, NULL, 0, a.peer)); break;
		case 7: OK(fi_tinjectdata(a.ep, NULL, 0, 5, a.peer, 9)); break;
		}
		TRY(next(b.rx, &entry, NULL));
		ENSURE(entry.len == 0 && entry.op_context == &b, "call %zu: %zu bytes", call, entry.len);
		bool has = call == 4 || call == 5 || call == 7;
		ENSURE(!(entry.flags & FI_REMOTE_CQ_DATA) == !has && (!has || entry.data == 5), "call %zu: data", call);
		if (call < 6)
			TRY(next(a.tx, &entry, NULL));
	}
	OK(fi_mr_reg(b.domain, in, 100, FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	memset(in, 0xee, 100);
	OK(fi_writedata(a.ep, NULL, 0, NULL, 77, a.peer, (uintptr_t)in, fi_mr_key(mr), &a));
	TRY(next(b.rx, &entry, NULL));
	ENSURE(entry.flags & FI_REMOTE_WRITE && entry.data == 77, "the data of an empty write is %ju", (uintmax_t)entry.data);
	TRY(next(a.tx, &entry, NULL));
	return all_bytes(in, 100, 0xee, "after an empty write");
}

/* Receives for several messages as the default of an endpoint. Receives with tags take one message each. */
static const char *multi_recv_by_default(size_t arg)
{
	struct fi_info *asked = new_hints(), *got = NULL;
	struct setup how = { 0 };
	struct fi_cq_tagged_entry entry;
	struct side a, b;
	size_t at = 0;

	(void)arg;
	asked->caps |= FI_MULTI_RECV;
	asked->rx_attr->op_flags = FI_MULTI_RECV;
	int rc = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, asked, &got);
	fi_freeinfo(asked);
	OK(rc);
	keep(close_info, got, "information");
	how.info = got;
	TRY(open_sides_as(&a, &b, &how));
	move_both(&a, &b);
	OK(fi_recv(b.ep, in, 10000, NULL, FI_ADDR_UNSPEC, &b));
	for (size_t i = 0; i < 5; i++) {
		fill_bytes(out, 100 + i, i);
		OK(fi_inject(a.ep, out, 100 + i, a.peer));
		TRY(next(b.rx, &entry, NULL));
		ENSURE(entry.op_context == &b && entry.len == 100 + i && entry.buf == in + at, "message %zu: %zu bytes", i, entry.len);
		ENSURE(!(entry.flags & FI_MULTI_RECV), "the buffer is returned after message %zu", i);
		TRY(check_bytes(in + at, 100 + i, i));
		at += 100 + i;
	}
	OK(fi_trecv(b.ep, in + 20000, 10000, NULL, FI_ADDR_UNSPEC, 4, 0, &a));
	OK(fi_tinject(a.ep, out, 100, a.peer, 4));
	TRY(next(b.rx, &entry, NULL));
	ENSURE(entry.op_context == &a && entry.tag == 4 && entry.len == 100, "the message with a tag");
	return check_bytes(in + 20000, 100, 4);
}

/* ---------------------------------------------------------------- patterns of traffic */

/* What `pingpong` gets added to the way to wait. */
enum { TAGS = HOWS, YIELDS = 2 * TAGS };

/*
 * Messages go back and forth. `arg` is the way to wait, plus TAGS if the messages have tags, or plus YIELDS if they have tags and the
 * queues have the wait object FI_WAIT_YIELD.
 */
static const char *pingpong(size_t arg)
{
	bool tagged = arg >= TAGS;
	enum how how = arg % HOWS;
	struct setup set = { .counts = FI_RECV, .cq.wait_obj = arg >= YIELDS ? FI_WAIT_YIELD : FI_WAIT_FD };
	struct fi_cq_tagged_entry entry;
	struct side a, b, *ends[2] = { &a, &b };
	uint64_t received = 0;

	TRY(open_sides_as(&a, &b, &set));
	move_both(&a, &b);
	for (size_t s = 0; s < COUNT(sizes); s++) {
		for (size_t i = 0; i < (sizes[s] > EAGER ? 3u : 12u); i++) {
			received++;
			for (size_t way = 0; way < 2; way++) {
				struct side *from = ends[way], *to = ends[1 - way];
				uint8_t *at = way ? in : out, *there = way ? out : in;

				fill_bytes(at, sizes[s], i + way);
				memset(there, 0, sizes[s]);
				OK(receive_by(i, tagged, to, there, sizes[s], 7));
				OK(send_by(SENT, tagged, from, at, sizes[s], 7, 0));
				TRY(next_by(how, to, to->rx, &entry, received));
				ENSURE(entry.len == sizes[s], "%zu bytes of %zu", entry.len, sizes[s]);
				TRY(check_bytes(there, sizes[s], i + way));
				TRY(next(from->tx, &entry, NULL));
			}
		}
	}
	return NULL;
}

enum { WINDOW = 64, TAG_BIT = 1, BACKWARDS = 2 };

/* Sends message `i`, again and again while the endpoint has no room. */
static const char *accepted(struct side *e, bool tagged, uint8_t *from, size_t len, uint64_t i)
{
	uint64_t until = now_ms() + WAIT_MS;
	ssize_t rc;

	do {
		rc = tagged ? fi_tsenddata(e->ep, from, len, NULL, i, e->peer, 100 + i, from)
			    : fi_senddata(e->ep, from, len, NULL, i, e->peer, from);
		move_all();
	} while (rc == -FI_EAGAIN && now_ms() < until);
	OK(rc);
	return NULL;
}

/* A window of messages is outstanding, sent before or after their receives are posted. Each receive gets the right content. */
static const char *bandwidth(size_t arg)
{
	static const size_t lengths[] = { 1, 1000, EAGER, EAGER + 1, 100000 };
	static uint8_t from[WINDOW][100000], to[WINDOW][100000];
	bool tagged = arg & TAG_BIT, backwards = arg & BACKWARDS;
	struct fi_cq_tagged_entry entry;
	struct side a, b;

	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	for (size_t round = 0; round < 2 * COUNT(lengths); round++) {
		size_t len = lengths[round / 2];
		bool late = backwards || round % 2, seen[WINDOW] = { false };

		for (int step = 0; step < 2; step++) {
			for (size_t i = 0; i < WINDOW; i++) {
				/* With BACKWARDS the last message sent is received first. */
				size_t k = backwards ? WINDOW - 1 - i : i;

				if ((step == 1) == late) {
					memset(to[k], 0, len);
					OK(tagged ? fi_trecv(b.ep, to[k], len, NULL, b.peer, 100 + k, 0, to[k])
						  : fi_recv(b.ep, to[k], len, NULL, b.peer, to[k]));
				} else {
					fill_bytes(from[i], len, 3 * i + round);
					TRY(accepted(&a, tagged, from[i], len, i));
				}
			}
			if (late && !step)
				for (uint64_t until = now_ms() + 10; now_ms() < until;)
					fi_cq_read(b.rx, NULL, 0);
		}
		for (size_t i = 0; i < WINDOW; i++) {
			TRY(next(b.rx, &entry, NULL));
			size_t k = (size_t)((uint8_t(*)[100000])entry.op_context - to);
			ENSURE(k < WINDOW && !seen[k], "receive %zu ends twice", k);
			seen[k] = true;
			ENSURE(entry.len == len && entry.data == k, "receive %zu gets message %ju, %zu bytes", k, (uintmax_t)entry.data,
			       entry.len);
			TRY(check_bytes(to[k], len, 3 * k + round));
		}
		for (size_t i = 0; i < WINDOW; i++)
			TRY(next(a.tx, &entry, NULL));
		ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN && fi_cq_read(b.rx, &entry, 1) == -FI_EAGAIN,
		       "an unexpected completion");
	}
	return NULL;
}

static const char *same_bytes(const uint8_t *a, const uint8_t *b, size_t from, size_t len)
{
	for (size_t i = from; i < from + len; i++)
		ENSURE(a[i] == b[i], "byte %zu differs", i);
	return NULL;
}

/* A window of writes or reads is underway at once, each in its own part of the memory. */
static const char *memory_bandwidth(size_t call)
{
	static const size_t lengths[] = { 1, 1000, 4097, EAGER };
	struct fi_cq_tagged_entry entry;
	struct fid_mr *mr;
	struct side a, b;

	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	OK(fi_mr_reg(b.domain, in, sizeof in, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	for (size_t round = 0; round < COUNT(lengths); round++) {
		size_t len = lengths[round], sent = 0, done = 0, arrived = 0;
		uint64_t until = now_ms() + WAIT_MS;
		bool seen[WINDOW] = { false };

		memset(in, 0, WINDOW * len);
		memset(out, 0, WINDOW * len);
		fill_bytes(call == READS ? in : out, WINDOW * len, round);
		while (done < WINDOW || (call == WRITES_DATA && arrived < WINDOW)) {
			uint8_t *mine = out + sent * len;
			uint64_t at = (uintptr_t)in + sent * len, key = fi_mr_key(mr);
			ssize_t rc = -FI_EAGAIN;

			ENSURE(now_ms() < until, "%zu operations of %zu end, with %zu data", done, sent, arrived);
			if (sent < WINDOW)
				rc = call == WRITES ? fi_write(a.ep, mine, len, NULL, a.peer, at, key, mine)
				     : call == READS
					     ? fi_read(a.ep, mine, len, NULL, a.peer, at, key, mine)
					     : fi_writedata(a.ep, mine, len, NULL, sent, a.peer, at, key, mine);
			ENSURE(rc == 0 || rc == -FI_EAGAIN, "operation %zu: %s", sent, fi_strerror((int)-rc));
			sent += rc == 0;
			ssize_t n = fi_cq_read(a.tx, &entry, 1);
			ENSURE(n == 1 || n == -FI_EAGAIN, "fi_cq_read returns %zd", n);
			done += n == 1;
			n = fi_cq_read(b.rx, &entry, 1);
			ENSURE(n == -FI_EAGAIN || (n == 1 && entry.data < WINDOW && !seen[entry.data]), "the target reads %zd", n);
			if (n == 1) {
				/* The data of a write is complete when its completion is. */
				TRY(same_bytes(in, out, entry.data * len, len));
				seen[entry.data] = true;
				arrived++;
			}
		}
		TRY(check_bytes(call == READS ? out : in, WINDOW * len, round));
		ENSURE(arrived == (call == WRITES_DATA ? WINDOW : 0), "%zu completions at the target", arrived);
	}
	return NULL;
}

/* Writes go back and forth. The other end sees the data, or the last byte of it, and answers. */
static const char *memory_pingpong(size_t with_data)
{
	static uint8_t memory[2][(1 << 18) + 1];
	static const size_t lengths[] = { 1, 8, 1000, 4096, EAGER, 100000, 1 << 18 };
	struct fi_cq_tagged_entry entry;
	struct fid_mr *mr[2];
	struct side a, b, *ends[2] = { &a, &b };

	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	for (size_t i = 0; i < 2; i++) {
		OK(fi_mr_reg(ends[i]->domain, memory[i], sizeof memory[i], FI_REMOTE_WRITE, 0, 0, 0, &mr[i], NULL));
		keep(close_fid, mr[i], "region");
	}
	for (size_t s = 0; s < COUNT(lengths); s++) {
		size_t len = lengths[s];

		for (size_t i = 0; i < 10; i++) {
			struct side *from = ends[i % 2], *to = ends[1 - i % 2];
			uint8_t *at = memory[1 - i % 2];
			uint64_t key = fi_mr_key(mr[1 - i % 2]);
			volatile uint8_t *last = at + len - 1;

			fill_bytes(out, len, s + i);
			memset(at, ~out[len - 1], len);
			if (with_data) {
				OK(fi_writedata(from->ep, out, len, NULL, 100 * s + i, from->peer, (uintptr_t)at, key, from));
				TRY(next(to->rx, &entry, NULL));
				ENSURE(entry.data == 100 * s + i && entry.flags & FI_REMOTE_CQ_DATA, "the data is %ju",
				       (uintmax_t)entry.data);
				TRY(check_bytes(at, len, s + i));
			} else {
				OK(fi_write(from->ep, out, len, NULL, from->peer, (uintptr_t)at, key, from));
				for (uint64_t until = now_ms() + WAIT_MS; *last != out[len - 1];)
					ENSURE(now_ms() < until, "the last of %zu bytes does not arrive", len);
			}
			TRY(next(from->tx, &entry, NULL));
			TRY(check_bytes(at, len, s + i));
		}
	}
	return NULL;
}

/* A message that is found with FI_PEEK and FI_DISCARD is gone, and the next one with its tag is found. */
static const char *peek_discards(size_t len)
{
	struct iovec iov = { in, sizeof in };
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error;
	struct side a, b;
	struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = 1, .context = &b, .addr = FI_ADDR_UNSPEC, .ignore = 0xf };

	TRY(open_sides(&a, &b));
	move_both(&a, &b);
	GIVES(FI_EINVAL, fi_trecvmsg(b.ep, &msg, FI_DISCARD));
	for (uint64_t tag = 0x11; tag <= 0x13; tag++) {
		fill_bytes(out, len, tag);
		OK(fi_tsend(a.ep, out, len, NULL, a.peer, tag, &a));
		if (tag == 0x13)
			break;
		msg.tag = 0x10;
		uint64_t until = now_ms() + WAIT_MS;
		msg.msg_iov = NULL; /* the buffers are ignored */
		for (ssize_t n = 0; n != 1;) { /* until the message has arrived */
			OK(fi_trecvmsg(b.ep, &msg, FI_PEEK | FI_DISCARD));
			n = fi_cq_read(b.rx, &entry, 1);
			ENSURE(n == 1 || (n == -FI_EAVAIL && fi_cq_readerr(b.rx, &error, 0) == 1 && error.err == FI_ENOMSG),
			       "a search ends with %zd", n);
			ENSURE(now_ms() < until, "the message is not found");
			fi_cq_read(a.tx, NULL, 0);
		}
		ENSURE(entry.tag == tag && entry.len == len && entry.op_context == &b, "tag %#jx, %zu bytes", (uintmax_t)entry.tag,
		       entry.len);
		TRY(next(a.tx, &entry, NULL));
		OK(fi_trecvmsg(b.ep, &msg, FI_PEEK));
		TRY(next_error(b.rx, &error, WAIT_MS));
		ENSURE(error.err == FI_ENOMSG, "a discarded message is found: %s", fi_strerror(error.err));
	}
	msg.msg_iov = &iov;
	OK(fi_trecvmsg(b.ep, &msg, FI_TRANSMIT_COMPLETE));
	TRY(next(b.rx, &entry, NULL));
	ENSURE(entry.tag == 0x13 && entry.len == len, "tag %#jx", (uintmax_t)entry.tag);
	TRY(check_bytes(in, len, 0x13));
	return next(a.tx, &entry, NULL);
}

/* ---------------------------------------------------------------- limits of resources */

/* Completion queues of one entry lose nothing when hundreds of completions are not read. */
static const char *few_entries(size_t one_queue)
{
	enum { N = 500 };
	static uint32_t from[N], to[N];
	struct setup how = { .cq = { .size = 1 }, .one_queue = one_queue };
	struct fi_cq_tagged_entry entry;
	uint64_t until = now_ms() + WAIT_MS;
	struct side a, b;
	size_t sends = 0, receives = 0;

	TRY(open_sides_as(&a, &b, &how));
	for (size_t i = 0; i < N; i++) {
		to[i] = ~0u;
		OK(fi_recv(b.ep, &to[i], 4, NULL, FI_ADDR_UNSPEC, &to[i]));
	}
	for (uint32_t i = 0; i < N; i++) {
		ssize_t rc;

		from[i] = i;
		while ((rc = fi_send(a.ep, &from[i], 4, NULL, a.peer, &from[i])) == -FI_EAGAIN) {
			ENSURE(now_ms() < until, "message %u is never accepted", i);
			fi_cq_read(b.rx, NULL, 0);
		}
		OK(rc);
	}
	while (to[N - 1] == ~0u) {
		ENSURE(now_ms() < until, "the last message does not arrive");
		fi_cq_read(a.tx, NULL, 0);
		fi_cq_read(b.rx, NULL, 0);
	}
	memset(moving, 0, sizeof moving);
	for (; receives < N; receives++) {
		TRY(next(b.rx, &entry, NULL));
		ENSURE(entry.op_context == &to[receives] && to[receives] == receives, "receive %zu gets %u", receives, to[receives]);
	}
	for (; sends < N; sends++) {
		TRY(next(a.tx, &entry, NULL));
		ENSURE((uint32_t *)entry.op_context >= from && (uint32_t *)entry.op_context < from + N && entry.flags & FI_SEND,
		       "another completion");
	}
	ENSURE(fi_cq_read(a.tx, &entry, 1) == -FI_EAGAIN && fi_cq_read(b.rx, &entry, 1) == -FI_EAGAIN, "an unexpected completion");
	return NULL;
}

/*
 * Operations are posted until the endpoint refuses them, because their completions are not read. Then all completions are there, and
 * the endpoint accepts operations again.
 */
static const char *full_queue(size_t writes)
{
	static struct fi_cq_tagged_entry entries[1000];
	struct fid_mr *mr;
	struct side a, b;
	size_t posted[3] = { 0 }, ended = 0;

	TRY(open_sides(&a, &b));
	OK(fi_mr_reg(b.domain, in, 4096, FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	for (size_t round = 0; round < 2; round++) {
		uint64_t until = now_ms() + 30000, quiet = now_ms();

		/* The queue is full when nothing was accepted for 100 ms. A refusal because the device has no room ends sooner. */
		while (now_ms() < quiet + 100) {
			ENSURE(now_ms() < until && posted[round] < 1u << 18, "%zu operations are accepted", posted[round]);
			for (size_t i = 0; i < 64; i++) {
				ssize_t rc = writes ? fi_write(a.ep, out, 8, NULL, a.peer, (uintptr_t)in, fi_mr_key(mr), &a)
						    : fi_send(a.ep, out, 8, NULL, a.peer, &a);

				ENSURE(rc == 0 || rc == -FI_EAGAIN, "operation %zu: %s", posted[round], fi_strerror((int)-rc));
				if (rc)
					break;
				posted[round]++;
				quiet = now_ms();
				if (!writes)
					OK(fi_recv(b.ep, in, 8, NULL, FI_ADDR_UNSPEC, &b));
			}
			ssize_t n = fi_cq_read(b.rx, entries, COUNT(entries));
			ENSURE(n > 0 || n == -FI_EAGAIN, "fi_cq_read returns %zd", n);
		}
		ENSURE(posted[round] > 1000, "only %zu operations are accepted in round %zu", posted[round], round);
		while (ended < posted[0] + posted[1]) {
			ssize_t n = fi_cq_read(a.tx, entries, COUNT(entries));

			ENSURE(n > 0 || n == -FI_EAGAIN, "fi_cq_read returns %zd", n);
			ENSURE(now_ms() < until, "%zu of %zu operations end", ended, posted[0] + posted[1]);
			for (ssize_t i = 0; i < n; i++)
				ENSURE(entries[i].op_context == &a, "another context");
			ended += n > 0 ? (size_t)n : 0;
			if (n < 0)
				fi_cq_read(b.rx, entries, COUNT(entries));
		}
	}
	for (uint64_t until = now_ms() + 20; now_ms() < until;)
		ENSURE(fi_cq_read(a.tx, entries, 1) == -FI_EAGAIN, "more completions than operations");
	return NULL;
}

/* ---------------------------------------------------------------- several endpoints */

enum { OWN_QUEUES = 1, OWN_VECTORS = 2, BY_COMPLETION = 4, MANY_ENDS = 6 };

/* Opens an endpoint from the local address `node`, with which the source of a message is reported. */
static const char *open_side_at(struct side *side, const char *node, const struct side *beside)
{
	struct fi_info *asked = new_hints(), *got = NULL;

	asked->caps = FI_MSG | FI_SOURCE;
	int rc = fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, asked, &got);
	fi_freeinfo(asked);
	OK(rc);
	keep(close_info, got, "information");
	return open_side_as(side, &(struct setup){ .info = got, .beside = beside });
}

/* Two endpoints of a domain have different source addresses. Each sends from its own, also to the same host. */
static const char *two_sources(size_t arg)
{
	struct side server, clients[2];
	struct fi_cq_tagged_entry entry;
	const char *other = "192.0.2.7";
	fi_addr_t source, names[2];

	(void)arg;
	TRY(own_network(other));
	TRY(open_side_at(&server, "127.0.0.1", NULL));
	TRY(open_side_at(&clients[0], "127.0.0.1", NULL));
	TRY(open_side_at(&clients[1], other, &clients[0]));
	for (size_t i = 0; i < 2; i++) {
		TRY(introduce(&clients[i], &server));
		TRY(introduce(&server, &clients[i]));
		names[i] = server.peer;
	}
	for (size_t i = 0; i < 2; i++) {
		OK(fi_recv(server.ep, in, 8, NULL, FI_ADDR_UNSPEC, in));
		OK(fi_send(clients[i].ep, out, 8, NULL, clients[i].peer, out));
		move_both(&server, &clients[i]);
		TRY(next(server.rx, &entry, &source));
		ENSURE(source == names[i], "message %zu comes from %lld instead of %lld", i, (long long)source, (long long)names[i]);
	}
	return NULL;
}

/* A program waits for the descriptor of a queue. An endpoint that begins to use the queue meanwhile wakes it too. */
static const char *enabled_during_wait(size_t arg)
{
	struct side a, b, peer;
	struct fid *fids[1];
	int fd;

	(void)arg;
	TRY(open_side_as(&a, &(struct setup){ .cq.wait_obj = FI_WAIT_FD }));
	TRY(open_side_as(&peer, &(struct setup){ 0 }));
	OK(fi_control(&a.rx->fid, FI_GETWAIT, &fd));
	fids[0] = &a.rx->fid;
	OK(fi_trywait(fabric, fids, 1));
	TRY(open_side_as(&b, &(struct setup){ .beside = &a, .its_queues = true }));
	OK(fi_recv(b.ep, in, 8, NULL, FI_ADDR_UNSPEC, in));
	TRY(introduce(&peer, &b));
	OK(fi_inject(peer.ep, out, 8, peer.peer));
	for (uint64_t until = now_ms() + 2000; now_ms() < until;) {
		fi_cq_read(peer.tx, NULL, 0);
		if (poll(&(struct pollfd){ .fd = fd, .events = POLLIN }, 1, 10) == 1)
			return NULL;
	}
	return "the descriptor does not become readable";
}

/* Endpoints of one domain, with queues and address vectors of their own or in common, and as many peers in another one. */
static const char *many_endpoints(size_t arg)
{
	static struct side servers[MANY_ENDS], clients[MANY_ENDS];
	static uint8_t from[MANY_ENDS][20000], to[MANY_ENDS][20000];
	struct fi_info *asked = new_hints(), *got = NULL;
	struct setup how = { .its_queues = false };
	struct fi_cq_tagged_entry entry;
	struct fid_mr *mr;

	asked->domain_attr->threading = arg & BY_COMPLETION ? FI_THREAD_COMPLETION : FI_THREAD_SAFE;
	int rc = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, asked, &got);
	fi_freeinfo(asked);
	OK(rc);
	keep(close_info, got, "information");
	how.info = got;
	for (size_t end = 0; end < 2; end++) {
		struct side *all = end ? clients : servers;

		how.beside = NULL;
		how.its_queues = how.its_vector = false;
		for (size_t i = 0; i < MANY_ENDS; i++) {
			TRY(open_side_as(&all[i], &how));
			how.beside = &all[0];
			how.its_queues = !(arg & OWN_QUEUES);
			how.its_vector = !(arg & OWN_VECTORS);
		}
	}
	for (size_t i = 0; i < MANY_ENDS; i++) {
		TRY(introduce(&clients[i], &servers[i]));
		TRY(introduce(&servers[i], &clients[i]));
	}
	OK(fi_mr_reg(servers[0].domain, to, sizeof to, FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
	keep(close_fid, mr, "region");
	for (size_t round = 0; round < 6; round++) {
		size_t len = round % 2 ? 20000 : 300;
		bool writes = round >= 4, seen[MANY_ENDS] = { false };

		memset(to, 0, sizeof to);
		for (size_t i = 0; i < MANY_ENDS; i++) {
			fill_bytes(from[i], len, i + round);
			if (writes) {
				OK(fi_write(clients[i].ep, from[i], len, NULL, clients[i].peer, (uintptr_t)to[i], fi_mr_key(mr), from[i]));
			} else {
				OK(fi_recv(servers[i].ep, to[i], len, NULL, FI_ADDR_UNSPEC, to[i]));
				OK(fi_send(clients[i].ep, from[i], len, NULL, clients[i].peer, from[i]));
			}
		}
		/* In a common queue the completions have any order, and each has the context of its own operation. */
		for (size_t i = 0; i < MANY_ENDS && !writes; i++) {
			move_both(&servers[i], &clients[i]);
			TRY(next(servers[i].rx, &entry, NULL));
			size_t k = (size_t)((uint8_t(*)[20000])entry.op_context - to);
			ENSURE(k < MANY_ENDS && !seen[k] && (k == i || !(arg & OWN_QUEUES)), "receive %zu ends as %zu", i, k);
			seen[k] = true;
			ENSURE(entry.len == len, "receive %zu: %zu bytes", k, entry.len);
		}
		memset(seen, 0, sizeof seen);
		for (size_t i = 0; i < MANY_ENDS; i++) {
			move_both(&servers[i], &clients[i]);
			TRY(next(clients[i].tx, &entry, NULL));
			size_t k = (size_t)((uint8_t(*)[20000])entry.op_context - from);
			ENSURE(k < MANY_ENDS && !seen[k] && (k == i || !(arg & OWN_QUEUES)), "operation %zu ends as %zu", i, k);
			seen[k] = true;
		}
		for (size_t i = 0; i < MANY_ENDS; i++)
			TRY(check_bytes(to[i], len, i + round));
	}
	for (size_t i = 0; i < MANY_ENDS; i++)
		ENSURE(fi_cntr_read(clients[i].cntr) == 6, "endpoint %zu has %ju operations", i,
		       (uintmax_t)fi_cntr_read(clients[i].cntr));
	return NULL;
}

/* One server and clients that come and go. */
static const char *clients(size_t level)
{
	struct fi_info *asked = new_hints(), *got = NULL;
	struct setup how = { 0 };
	struct fi_cq_tagged_entry entry;
	struct side server, client;
	fi_addr_t source;

	asked->tx_attr->op_flags = level;
	int rc = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, asked, &got);
	fi_freeinfo(asked);
	OK(rc);
	keep(close_info, got, "information");
	how.info = got;
	TRY(open_side_as(&server, &how));
	for (size_t c = 0; c < 10; c++) {
		TRY(open_side_as(&client, &how));
		TRY(introduce(&client, &server));
		TRY(introduce(&server, &client));
		move_both(&server, &client);
		for (size_t i = 0; i < 5; i++) {
			size_t len = i == 4 ? 50000 : 100 * i;

			fill_bytes(out, len, c + i);
			OK(fi_recv(server.ep, in, len, NULL, server.peer, &server));
			OK(fi_send(client.ep, out, len, NULL, client.peer, &client));
			TRY(next(server.rx, &entry, &source));
			ENSURE(entry.len == len && source == server.peer, "client %zu: %zu bytes", c, entry.len);
			TRY(check_bytes(in, len, c + i));
			TRY(next(client.tx, &entry, NULL));
			fill_bytes(out, len, c + i + 100);
			OK(fi_recv(client.ep, in, len, NULL, client.peer, &client));
			OK(fi_send(server.ep, out, len, NULL, server.peer, &server));
			TRY(next(client.rx, &entry, NULL));
			TRY(check_bytes(in, len, c + i + 100));
			TRY(next(server.tx, &entry, NULL));
		}
		for (void *parts[] = { client.ep, client.cntr, client.av, client.rx, client.tx, client.domain }, **part = parts;
		     part < parts + COUNT(parts); part++)
			ENSURE(!close_now(*part), "client %zu: closing fails", c);
		moving[1] = NULL;
		OK(fi_av_remove(server.av, &server.peer, 1, 0));
	}
	return NULL;
}

enum { RANKS = 3 };

static struct side rank[RANKS];
static fi_addr_t rank_at[RANKS][RANKS];

static const char *open_ranks(void)
{
	memset(moving, 0, sizeof moving);
	for (size_t i = 0; i < RANKS; i++) {
		TRY(open_side(&rank[i], 0));
		moving[i] = &rank[i];
	}
	for (size_t j = 0; j < RANKS; j++) {
		char name[64];
		size_t len = sizeof name;

		OK(fi_getname(&rank[j].ep->fid, name, &len));
		for (size_t i = 0; i < RANKS; i++)
			ENSURE(fi_av_insert(rank[i].av, name, 1, &rank_at[i][j], 0, NULL) == 1, "fi_av_insert");
	}
	return NULL;
}

/* Each rank sends to each, itself too: in a ring, all at once, to the first rank, and from it. */
static const char *ranks_messages(size_t arg)
{
	enum { RING, FULL, GATHER, SCATTER, PATTERNS };
	static uint8_t from[RANKS][RANKS][20000], to[RANKS][RANKS][20000];
	struct fi_cq_tagged_entry entry;
	fi_addr_t source;

	(void)arg;
	TRY(open_ranks());
	for (size_t round = 0; round < 4 * PATTERNS; round++) {
		size_t pattern = round % PATTERNS, len = round / PATTERNS % 2 ? 20000 : 500;
		size_t receives[RANKS] = { 0 }, sends[RANKS] = { 0 };

		memset(to, 0, sizeof to);
		for (size_t step = 0; step < 2; step++)
			for (size_t i = 0; i < RANKS; i++)
				for (size_t j = 0; j < RANKS; j++) {
					bool used = pattern == FULL || (pattern == RING && j == (i + 1) % RANKS) ||
						    (pattern == GATHER && j == 0) || (pattern == SCATTER && i == 0);

					if (!used)
						continue;
					/* In half of the rounds the messages come first. */
					if (step == (round >= 2 * PATTERNS)) {
						OK(fi_recv(rank[j].ep, to[j][i], len, NULL, rank_at[j][i], to[j][i]));
						receives[j]++;
					} else {
						fill_bytes(from[i][j], len, round + 10 * i + j);
						OK(fi_send(rank[i].ep, from[i][j], len, NULL, rank_at[i][j], from[i][j]));
						sends[i]++;
					}
				}
		for (size_t j = 0; j < RANKS; j++) {
			for (size_t n = 0; n < receives[j]; n++) {
				TRY(next(rank[j].rx, &entry, &source));
				size_t i = (size_t)((uint8_t(*)[20000])entry.op_context - to[j]);
				ENSURE(i < RANKS && entry.len == len && source == rank_at[j][i],
				       "round %zu, rank %zu: a message of %zu, %zu bytes", round, j, i, entry.len);
				TRY(check_bytes(to[j][i], len, round + 10 * i + j));
			}
			for (size_t n = 0; n < sends[j]; n++)
				TRY(next(rank[j].tx, &entry, NULL));
			ENSURE(fi_cq_read(rank[j].rx, &entry, 1) == -FI_EAGAIN && fi_cq_read(rank[j].tx, &entry, 1) == -FI_EAGAIN,
			       "round %zu, rank %zu: an unexpected completion", round, j);
		}
	}
	return NULL;
}

/* Each rank writes to each, adds to a number of each, and reads from each. */
static const char *ranks_memory(size_t arg)
{
	static uint8_t from[RANKS][RANKS][9000], to[RANKS][RANKS][9000];
	static uint64_t sum[RANKS], add[RANKS];
	struct fi_cq_tagged_entry entry;
	struct fid_mr *mr[RANKS], *mr_sum[RANKS];

	(void)arg;
	TRY(open_ranks());
	for (size_t i = 0; i < RANKS; i++) {
		OK(fi_mr_reg(rank[i].domain, to[i], sizeof to[i], FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr[i], NULL));
		keep(close_fid, mr[i], "region");
		OK(fi_mr_reg(rank[i].domain, &sum[i], 8, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr_sum[i], NULL));
		keep(close_fid, mr_sum[i], "region");
		sum[i] = 0;
		add[i] = 1ull << (8 * i);
	}
	for (size_t round = 0; round < 5; round++) {
		memset(to, 0, sizeof to);
		for (size_t kind = 0; kind < 3; kind++) {
			for (size_t i = 0; i < RANKS; i++)
				for (size_t j = 0; j < RANKS; j++) {
					fi_addr_t peer = rank_at[i][j];
					uint64_t at = (uintptr_t)to[j][i];

					if (kind == 0) {
						fill_bytes(from[i][j], 9000, round + 10 * i + j);
						OK(fi_write(rank[i].ep, from[i][j], 9000, NULL, peer, at, fi_mr_key(mr[j]), from));
					} else if (kind == 1) {
						OK(fi_atomic(rank[i].ep, &add[i], 1, NULL, peer, (uintptr_t)&sum[j],
							     fi_mr_key(mr_sum[j]), FI_UINT64, FI_SUM, from));
					} else {
						/* What the next rank wrote there. */
						memset(from[i][j], 0, 9000);
						at = (uintptr_t)to[j][(i + 1) % RANKS];
						OK(fi_read(rank[i].ep, from[i][j], 9000, NULL, peer, at, fi_mr_key(mr[j]), from));
					}
				}
			for (size_t i = 0; i < RANKS; i++)
				for (size_t j = 0; j < RANKS; j++)
					TRY(next(rank[i].tx, &entry, NULL));
			for (size_t i = 0; i < RANKS; i++)
				for (size_t j = 0; j < RANKS; j++)
					TRY(kind == 2 ? check_bytes(from[i][j], 9000, round + 10 * ((i + 1) % RANKS) + j)
						      : check_bytes(to[j][i], 9000, round + 10 * i + j));
		}
		for (size_t i = 0; i < RANKS; i++)
			ENSURE(sum[i] == (round + 1) * 0x010101, "round %zu, rank %zu: the sum is %#jx", round, i, (uintmax_t)sum[i]);
	}
	return NULL;
}

/* A random mix of all kinds of operations among the ranks, many at once. Each ends once, and all data is right. */
static const char *stress(size_t arg)
{
	enum { AT_ONCE = 24, OPERATIONS = 3000, LONGEST = 30000, PLACES = RANKS * AT_ONCE };
	static struct operation {
		bool busy;
		unsigned int open; /* completions that are expected */
		size_t kind, from, to, len, seed;
	} all[PLACES];
	static uint8_t source[PLACES][LONGEST], target[PLACES][LONGEST];
	static uint64_t sums[RANKS], added[RANKS], one = 1;
	struct fid_mr *mr[RANKS], *mr_sums[RANKS];
	struct fi_cq_tagged_entry entry;
	uint64_t until = now_ms() + 3 * WAIT_MS;
	size_t started = 0, ended = 0;
	uint32_t seed = 4711;

	(void)arg;
	TRY(open_ranks());
	memset(all, 0, sizeof all);
	for (size_t i = 0; i < RANKS; i++) {
		sums[i] = added[i] = 0;
		OK(fi_mr_reg(rank[i].domain, target, sizeof target, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr[i], NULL));
		keep(close_fid, mr[i], "region");
		OK(fi_mr_reg(rank[i].domain, &sums[i], 8, FI_REMOTE_WRITE, 0, 0, 0, &mr_sums[i], NULL));
		keep(close_fid, mr_sums[i], "region");
	}
	while (ended < OPERATIONS) {
		ENSURE(now_ms() < until, "%zu of %zu operations end", ended, started);
		seed = seed * 1103515245 + 12345;
		size_t place = (seed >> 8) % PLACES;
		struct operation *o = &all[place];
		if (!o->busy && started < OPERATIONS) {
			static const size_t lengths[] = { 0, 5, 900, 4096, 16000, LONGEST };
			ssize_t rc = 0;

			seed = seed * 1103515245 + 12345;
			*o = (struct operation){ .busy = true, .open = 1, .kind = (seed >> 8) % 5, .from = (seed >> 12) % RANKS,
						 .to = (seed >> 16) % RANKS, .len = lengths[(seed >> 20) % COUNT(lengths)], .seed = started };
			struct side *e = &rank[o->from];
			fi_addr_t peer = rank_at[o->from][o->to];
			uint64_t at = (uintptr_t)target[place], key = fi_mr_key(mr[o->to]);

			memset(o->kind == 3 ? source[place] : target[place], 0, o->len);
			fill_bytes(o->kind == 3 ? target[place] : source[place], o->len, o->seed);
			switch (o->kind) {
			case 0: /* received first, */
			case 1: /* or afterwards */
				o->open = 2;
				if (o->kind == 0)
					OK(fi_trecv(rank[o->to].ep, target[place], o->len, NULL, FI_ADDR_UNSPEC, place, 0, o));
				rc = fi_tsend(e->ep, source[place], o->len, NULL, peer, place, o);
				for (uint64_t end = now_ms() + WAIT_MS; rc == -FI_EAGAIN && now_ms() < end;) {
					move_all();
					rc = fi_tsend(e->ep, source[place], o->len, NULL, peer, place, o);
				}
				OK(rc);
				if (o->kind == 1)
					OK(fi_trecv(rank[o->to].ep, target[place], o->len, NULL, FI_ADDR_UNSPEC, place, 0, o));
				break;
			case 2: rc = fi_write(e->ep, source[place], o->len, NULL, peer, at, key, o); break;
			case 3: rc = fi_read(e->ep, source[place], o->len, NULL, peer, at, key, o); break;
			case 4:
				rc = fi_atomic(e->ep, &one, 1, NULL, peer, (uintptr_t)&sums[o->to], fi_mr_key(mr_sums[o->to]), FI_UINT64,
					       FI_SUM, o);
				added[o->to] += rc == 0;
				break;
			}
			if (rc == -FI_EAGAIN) {
				o->busy = false;
			} else {
				OK(rc);
				started++;
			}
		}
		for (size_t i = 0; i < 2 * RANKS; i++) {
			ssize_t n = fi_cq_read(i % 2 ? rank[i / 2].tx : rank[i / 2].rx, &entry, 1);

			ENSURE(n == 1 || n == -FI_EAGAIN, "fi_cq_read returns %zd", n);
			if (n != 1)
				continue;
			o = entry.op_context;
			ENSURE(o >= all && o < all + PLACES && o->busy && o->open > 0, "an operation ends too often");
			if (--o->open)
				continue;
			size_t at = (size_t)(o - all);
			if (o->kind < 4)
				TRY(check_bytes(o->kind == 3 ? source[at] : target[at], o->len, o->seed));
			o->busy = false;
			ended++;
		}
	}
	for (size_t i = 0; i < RANKS; i++)
		ENSURE(sums[i] == added[i] && added[i] > 0, "rank %zu: %ju additions of %ju", i, (uintmax_t)sums[i], (uintmax_t)added[i]);
	return NULL;
}

static const struct test tests[] = {
	{ "hints", hints, 0, 0, false },
	{ "hints_mr_mode", hints_mr_mode, 0, 0, false },
	{ "hints_names", hints_names, 0, 0, false },
	{ "hints_opened", hints_opened, 0, 0, false },
	{ "hints_addresses", hints_addresses, 0, 0, false },
	{ "domains", domains, 0, 0, false },
	{ "domain_in_use", domain_in_use, 0, 0, false },
	{ "bindings", bindings, 0, 0, false },
	{ "bindings_of_two_domains", bindings_of_two_domains, 0, 0, false },
	{ "queues", queues, 0, 0, false },
	{ "queue_formats_context", queue_formats, FI_CQ_FORMAT_CONTEXT, 0, false },
	{ "queue_formats_msg", queue_formats, FI_CQ_FORMAT_MSG, 0, false },
	{ "queue_formats_data", queue_formats, FI_CQ_FORMAT_DATA, 0, false },
	{ "queue_formats_tagged", queue_formats, FI_CQ_FORMAT_TAGGED, 0, false },
	{ "error_texts", error_texts, 0, 0, false },
	{ "woken_by_a_signal", woken, 0, 10, false },
	{ "woken_by_a_count", woken, 1, 10, false },
	{ "woken_by_an_error", woken, 2, 10, false },
	{ "woken_by_an_event", woken, 3, 10, false },
	{ "event_queues", event_queues, 0, 0, false },
	{ "counters", counters, 0, 0, false },
	{ "counted", counted, 0, 0, false },
	{ "options", options, 0, 0, false },
	{ "default_flags", default_flags, 0, 0, false },
	{ "aliases", aliases, 0, 0, false },
	{ "vectors_map", vectors, FI_AV_MAP, 0, false },
	{ "vectors_table", vectors, FI_AV_TABLE, 0, false },
	{ "vectors_bad_map", vectors_bad, FI_AV_MAP, 0, false },
	{ "vectors_bad_table", vectors_bad, FI_AV_TABLE, 0, false },
	{ "vectors_names_map", vectors_names, FI_AV_MAP, 0, false },
	{ "vectors_names_table", vectors_names, FI_AV_TABLE, 0, false },
	{ "vectors_used_map", vectors_used, FI_AV_MAP, 0, false },
	{ "vectors_used_table", vectors_used, FI_AV_TABLE, 0, false },
	{ "regions", regions, 0, 0, false },
	{ "regions_ways", regions_ways, 0, 0, false },
	{ "regions_remapped", regions_remapped, 0, 0, false },
	{ "calls_table", calls, 0, 0, false },
	{ "calls_map", calls, MAP, 0, false },
	{ "calls_table_basic", calls, BASIC, 0, false },
	{ "calls_map_basic", calls, MAP | BASIC, 0, false },
	{ "memory_calls_table", memory_calls, 0, 0, false },
	{ "memory_calls_map", memory_calls, MAP, 0, false },
	{ "memory_calls_table_basic", memory_calls, BASIC, 0, false },
	{ "memory_calls_map_basic", memory_calls, MAP | BASIC, 0, false },
	{ "atomic_calls_table", atomic_calls, 0, 0, false },
	{ "atomic_calls_map_basic", atomic_calls, MAP | BASIC, 0, false },
	{ "atomic_operations", atomic_operations, 0, 0, false },
	{ "levels", levels, 0, 0, false },
	{ "levels_of_the_endpoint", levels, 1, 0, false },
	{ "injected", injected, 0, 0, false },
	{ "empty", empty, 0, 0, false },
	{ "multi_recv_by_default", multi_recv_by_default, 0, 0, false },
	{ "pingpong_poll", pingpong, POLL, 0, false },
	{ "pingpong_sread", pingpong, SREAD, 0, false },
	{ "pingpong_fd", pingpong, DESCRIPTOR, 0, false },
	{ "pingpong_counter", pingpong, COUNTER, 0, false },
	{ "pingpong_tagged_poll", pingpong, TAGS + POLL, 0, false },
	{ "pingpong_tagged_sread", pingpong, TAGS + SREAD, 0, false },
	{ "pingpong_tagged_yield", pingpong, YIELDS + SREAD, 0, false },
	{ "pingpong_tagged_fd", pingpong, TAGS + DESCRIPTOR, 0, false },
	{ "pingpong_tagged_counter", pingpong, TAGS + COUNTER, 0, false },
	{ "bandwidth", bandwidth, 0, 0, false },
	{ "bandwidth_tagged", bandwidth, TAG_BIT, 0, false },
	{ "bandwidth_backwards", bandwidth, TAG_BIT | BACKWARDS, 0, false },
	{ "memory_bandwidth_write", memory_bandwidth, WRITES, 0, false },
	{ "memory_bandwidth_writedata", memory_bandwidth, WRITES_DATA, 0, false },
	{ "memory_bandwidth_read", memory_bandwidth, READS, 0, false },
	{ "memory_pingpong", memory_pingpong, 0, 0, false },
	{ "memory_pingpong_data", memory_pingpong, 1, 0, false },
	{ "peek_discards", peek_discards, 1000, 0, false },
	{ "peek_discards_long", peek_discards, 100000, 0, false },
	{ "few_entries", few_entries, 0, 0, false },
	{ "few_entries_one_queue", few_entries, 1, 0, false },
	{ "full_queue", full_queue, 0, 0, false },
	{ "full_queue_of_writes", full_queue, 1, 0, false },
	{ "two_sources", two_sources, 0, 0, true },
	{ "enabled_during_wait", enabled_during_wait, 0, 0, false },
	{ "many_endpoints", many_endpoints, 0, 0, false },
	{ "many_endpoints_own_queues", many_endpoints, OWN_QUEUES, 0, false },
	{ "many_endpoints_own_vectors", many_endpoints, OWN_VECTORS, 0, false },
	{ "many_endpoints_own_both", many_endpoints, OWN_QUEUES | OWN_VECTORS, 0, false },
	{ "many_endpoints_by_completion", many_endpoints, BY_COMPLETION, 0, false },
	{ "clients", clients, 0, 0, false },
	{ "clients_delivery_complete", clients, FI_DELIVERY_COMPLETE, 0, false },
	{ "ranks_messages", ranks_messages, 0, 0, false },
	{ "ranks_memory", ranks_memory, 0, 0, false },
	{ "stress", stress, 0, 0, false },
};

int main(int argc, char **argv)
{
	/* As in fi.c: only this provider answers fi_getinfo. */
	setenv("FI_PROVIDER", "anywarp", 0);
	return run_tests(tests, COUNT(tests), argc, argv);
}
