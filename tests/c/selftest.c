/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Every operation between two queue pairs of one process, with all bytes compared.
 *
 * A plain verbs program, which uses public headers only. Arguments select tests whose names contain them. `--list`
 * prints the names, `--device` the device and its addresses.
 */
#include "ends.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>

static const struct want usual = { 0 };

static const char *device_is_usable(size_t arg)
{
	struct ibv_port_attr port;

	(void)arg;
	TRY(open_device());
	ENSURE(device->num_comp_vectors >= 1, "the device has no completion vector");
	ENSURE(!ibv_query_port(device, PORT, &port), "ibv_query_port: %s", strerror(errno));
	ENSURE(port.state == IBV_PORT_ACTIVE, "port state is %s", ibv_port_state_str(port.state));
	ENSURE(port.gid_tbl_len >= 1, "the port has no GID");
	if (!strncmp(ibv_get_device_name(device->device), "anywarp", 7))
		ENSURE(port.max_msg_sz >= 1u << 30, "max_msg_sz is only %u", port.max_msg_sz);
	ENSURE(device_attr.max_qp > 0 && device_attr.max_cq > 0 && device_attr.max_mr > 0, "a limit of the device is 0");
	ENSURE(device_attr.phys_port_cnt == 1, "%d ports", device_attr.phys_port_cnt);
	ENSURE(device_attr.node_guid != 0, "the device has no node GUID");
	for (size_t i = 0; i < 16; i++)
		if (local_gid.raw[i])
			return NULL;
	ENSURE(false, "the GID is zero");
}

/* Skips a test whose message is too long for this device. */
static const char *fits(size_t len)
{
	TRY(open_device());
	if (len > port_attr.max_msg_sz)
		SKIP("the device has no messages that long");
	return NULL;
}

/* Sends one message of `len` bytes from `a` to `b`. */
static const char *send_once(struct pair *p, size_t len, struct ibv_send_wr *extra)
{
	struct region src, dst;
	struct ibv_send_wr wr;
	struct ibv_sge from, to;
	struct ibv_wc wc;
	bool imm = extra && extra->opcode == IBV_WR_SEND_WITH_IMM;

	TRY(new_region(&src, p->a.pd, len ? len : 1, 0));
	TRY(new_region(&dst, p->b.pd, len ? len : 1, IBV_ACCESS_LOCAL_WRITE));
	fill_pattern(src.at, src.len, 1);
	from = sge_of(&src, 0, len);
	to = sge_of(&dst, 0, len);
	TRY(post_recv(p->b.qp, 71, &to, len ? 1 : 0));
	wr = send_wr(17, imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND, &from, len ? 1 : 0);
	if (imm)
		wr.imm_data = extra->imm_data;
	TRY(post(p->a.qp, &wr));
	TRY(expect_ok(p->b.rcq, 71, IBV_WC_RECV, &wc));
	ENSURE(wc.byte_len == len, "byte_len %u, expected %zu", wc.byte_len, len);
	ENSURE(wc.qp_num == p->b.qp->qp_num, "qp_num %#x, expected %#x", wc.qp_num, p->b.qp->qp_num);
	ENSURE(!!(wc.wc_flags & IBV_WC_WITH_IMM) == imm, "wc_flags %#x", wc.wc_flags);
	ENSURE(!imm || wc.imm_data == wr.imm_data, "imm_data %#x, expected %#x", wc.imm_data, wr.imm_data);
	TRY(expect_ok(p->a.scq, 17, IBV_WC_SEND, &wc));
	ENSURE(wc.qp_num == p->a.qp->qp_num, "qp_num %#x, expected %#x", wc.qp_num, p->a.qp->qp_num);
	if (len)
		TRY(same_pattern(dst.at, len, 1));
	else
		TRY(all_bytes(dst.at, 1, FRESH, "target of an empty message"));
	TRY(same_pattern(src.at, src.len, 1));
	return guards_untouched(&dst);
}

static const char *rc_send(size_t len)
{
	struct pair p;

	TRY(fits(len));
	TRY(open_pair(&p, &usual));
	return send_once(&p, len, NULL);
}

static const char *rc_send_imm(size_t len)
{
	struct ibv_send_wr imm = { .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htonl(0xc0ffee01) };
	struct pair p;

	TRY(open_pair(&p, &usual));
	return send_once(&p, len, &imm);
}

static const char *uc_send(size_t len)
{
	struct want w = { .type = IBV_QPT_UC };
	struct ibv_send_wr imm = { .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htonl(0xfeedbeef) };
	struct pair p;

	TRY(open_pair(&p, &w));
	TRY(send_once(&p, len, NULL));
	return send_once(&p, len, &imm);
}

static const char *rc_by_lid(size_t len)
{
	struct want w = { .by_lid = true };
	struct pair p;

	TRY(open_device());
	if (!port_attr.lid)
		SKIP("the port has no LID");
	TRY(open_pair(&p, &w));
	return send_once(&p, len, NULL);
}

/* Three pieces are sent and received into three pieces of other lengths. Both sides also have an empty piece. */
static const char *rc_send_multi_sge(size_t arg)
{
	static const size_t out[] = { 1000, 0, 1, 3095 }, in[] = { 17, 4000, 0, 200 };
	struct region src, dst;
	struct ibv_sge from[4], to[4];
	struct ibv_send_wr wr;
	struct ibv_wc wc;
	struct pair p;
	size_t at = 0, seen = 0;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&src, p.a.pd, 8192, 0));
	TRY(new_region(&dst, p.b.pd, 8192, IBV_ACCESS_LOCAL_WRITE));
	from[0] = sge_of(&src, 7000, out[0]);
	from[1] = sge_of(&src, 6999, out[1]);
	from[2] = sge_of(&src, 6000, out[2]);
	from[3] = sge_of(&src, 3, out[3]);
	for (size_t i = 0; i < 4; at += out[i], i++)
		for (size_t k = 0; k < out[i]; k++)
			((uint8_t *)(uintptr_t)from[i].addr)[k] = pattern_byte(5, at + k);
	to[0] = sge_of(&dst, 8000, in[0]);
	to[1] = sge_of(&dst, 100, in[1]);
	to[2] = sge_of(&dst, 50, in[2]);
	to[3] = sge_of(&dst, 5000, in[3]);
	TRY(post_recv(p.b.qp, 1, to, 4));
	wr = send_wr(2, IBV_WR_SEND, from, 4);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.b.rcq, 1, IBV_WC_RECV, &wc));
	ENSURE(wc.byte_len == at, "byte_len %u, expected %zu", wc.byte_len, at);
	TRY(expect_ok(p.a.scq, 2, IBV_WC_SEND, NULL));
	for (size_t i = 0; i < 4; i++) {
		size_t n = in[i] < at - seen ? in[i] : at - seen;
		uint8_t *piece = (uint8_t *)(uintptr_t)to[i].addr;

		TRY(same_pattern_from(piece, n, 5, seen));
		if (i != 2) /* the part of a piece after the received data */
			TRY(all_bytes(piece + n, 8, FRESH, "after a piece"));
		seen += n;
	}
	return guards_untouched(&dst);
}

/* After ibv_post_send returns, inline data may be overwritten. It needs no memory region. */
static const char *inline_messages(const struct want *w, size_t len)
{
	uint8_t *scratch;
	struct region dst;
	struct ibv_sge from[2], to;
	struct ibv_send_wr wr;
	struct pair p;

	TRY(open_pair(&p, w));
	ENSURE(p.a.inline_data >= len, "max_inline_data %u, expected %zu or more", p.a.inline_data, len);
	scratch = malloc(len);
	ENSURE(scratch, "no memory");
	keep(close_memory, scratch, "memory");
	TRY(new_region(&dst, p.b.pd, 2 * len, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));

	fill_pattern(scratch, len, 9);
	from[0] = (struct ibv_sge){ .addr = (uintptr_t)scratch, .length = (uint32_t)(len / 2), .lkey = 0xdead };
	from[1] = (struct ibv_sge){ .addr = (uintptr_t)scratch + len / 2, .length = (uint32_t)(len - len / 2) };
	to = sge_of(&dst, 0, len);
	TRY(post_recv(p.b.qp, 3, &to, 1));
	wr = send_wr(4, IBV_WR_SEND, from, 2);
	wr.send_flags |= IBV_SEND_INLINE;
	TRY(post(p.a.qp, &wr));
	memset(scratch, 0, len);
	TRY(expect_ok(p.b.rcq, 3, IBV_WC_RECV, NULL));
	TRY(expect_ok(p.a.scq, 4, IBV_WC_SEND, NULL));
	TRY(same_pattern(dst.at, len, 9));

	fill_pattern(scratch, len, 10);
	wr = rdma_wr(5, IBV_WR_RDMA_WRITE, from, 2, &dst, len);
	wr.send_flags |= IBV_SEND_INLINE;
	TRY(post(p.a.qp, &wr));
	memset(scratch, 0, len);
	TRY(expect_ok(p.a.scq, 5, IBV_WC_RDMA_WRITE, NULL));
	TRY(post_recv(p.b.qp, 6, NULL, 0)); /* the following Send shows that the Write was placed */
	wr = send_wr(7, IBV_WR_SEND, NULL, 0);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.b.rcq, 6, IBV_WC_RECV, NULL));
	TRY(same_pattern(dst.at + len, len, 10));
	return guards_untouched(&dst);
}

static const char *rc_inline(size_t len)
{
	struct want w = { .inline_data = (uint32_t)len };

	return inline_messages(&w, len);
}

/*
 * Cards store inline data in the space of the scatter/gather list. So a queue pair with long lists accepts inline data although
 * max_inline_data was 0 when it was created.
 */
static const char *rc_inline_unrequested(size_t len)
{
	struct want w = { .sge = 16 };

	TRY(open_device());
	if (device_attr.max_sge < 16)
		SKIP("the device has no lists of 16 elements");
	return inline_messages(&w, len);
}

static const char *rc_unsignaled(size_t count)
{
	struct region src, dst;
	struct ibv_sge from, to;
	struct ibv_send_wr wr;
	struct pair p;

	TRY(open_pair(&p, &usual));
	TRY(new_region(&src, p.a.pd, 64, 0));
	TRY(new_region(&dst, p.b.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	from = sge_of(&src, 0, 64);
	to = sge_of(&dst, 0, 64);
	for (size_t i = 0; i < count; i++)
		TRY(post_recv(p.b.qp, i, &to, 1));
	for (size_t i = 0; i < count; i++) {
		wr = send_wr(100 + i, IBV_WR_SEND, &from, 1);
		if (i + 1 < count)
			wr.send_flags = 0;
		TRY(post(p.a.qp, &wr));
	}
	for (size_t i = 0; i < count; i++)
		TRY(expect_ok(p.b.rcq, i, IBV_WC_RECV, NULL));
	TRY(expect_ok(p.a.scq, 100 + count - 1, IBV_WC_SEND, NULL));
	TRY(no_wc(p.a.scq, QUIET_MS));
	return no_wc(p.b.rcq, QUIET_MS);
}

/* A chain of work requests is executed in order. With sq_sig_all each of them completes. */
static const char *rc_chain(size_t count)
{
	struct want w = { .sig_all = true };
	struct ibv_send_wr wr[64], *bad;
	struct ibv_recv_wr rr[64], *bad_recv;
	struct ibv_sge from[64], to[64];
	struct region src, dst;
	struct pair p;
	int rc;

	TRY(open_pair(&p, &w));
	TRY(new_region(&src, p.a.pd, count * 16, 0));
	TRY(new_region(&dst, p.b.pd, count * 16, IBV_ACCESS_LOCAL_WRITE));
	fill_pattern(src.at, src.len, 31);
	for (size_t i = 0; i < count; i++) {
		from[i] = sge_of(&src, i * 16, 16);
		to[i] = sge_of(&dst, i * 16, 16);
		wr[i] = send_wr(i, IBV_WR_SEND, &from[i], 1);
		wr[i].send_flags = 0;
		wr[i].next = i + 1 < count ? &wr[i + 1] : NULL;
		rr[i] = (struct ibv_recv_wr){ .wr_id = i, .sg_list = &to[i], .num_sge = 1 };
		rr[i].next = i + 1 < count ? &rr[i + 1] : NULL;
	}
	rc = ibv_post_recv(p.b.qp, rr, &bad_recv);
	ENSURE(!rc, "ibv_post_recv: %s", strerror(rc));
	rc = ibv_post_send(p.a.qp, wr, &bad);
	ENSURE(!rc, "ibv_post_send: %s", strerror(rc));
	for (size_t i = 0; i < count; i++) {
		TRY(expect_ok(p.a.scq, i, IBV_WC_SEND, NULL));
		TRY(expect_ok(p.b.rcq, i, IBV_WC_RECV, NULL));
	}
	return same_pattern(dst.at, dst.len, 31);
}

/* Waits for the channel's event and acknowledges it. The queue is not armed afterwards. */
static const char *channel_event(struct end *e)
{
	struct ibv_cq *cq;
	void *context;

	TRY(readable(e->channel->fd, WAIT_MS));
	ENSURE(!ibv_get_cq_event(e->channel, &cq, &context), "ibv_get_cq_event: %s", strerror(errno));
	ENSURE(cq == e->rcq, "the event is of another completion queue");
	ibv_ack_cq_events(cq, 1);
	return NULL;
}

static const char *rc_events(size_t count)
{
	struct want w = { .channels = true };
	struct ibv_send_wr wr = send_wr(2, IBV_WR_SEND, NULL, 0);
	struct pair p;

	TRY(open_pair(&p, &w));
	for (size_t i = 0; i < count; i++) {
		TRY(post_recv(p.b.qp, i, NULL, 0));
		ENSURE(!ibv_req_notify_cq(p.b.rcq, 0), "ibv_req_notify_cq: %s", strerror(errno));
		if (i == 0)
			TRY(not_readable(p.b.channel->fd, 30));
		TRY(post(p.a.qp, &wr));
		TRY(channel_event(&p.b));
		TRY(expect_ok(p.b.rcq, i, IBV_WC_RECV, NULL));
		TRY(expect_ok(p.a.scq, 2, IBV_WC_SEND, NULL));
	}
	/* one notification request gives one event, so the queue is not armed after it */
	TRY(post_recv(p.b.qp, 9, NULL, 0));
	TRY(post(p.a.qp, &wr));
	TRY(not_readable(p.b.channel->fd, QUIET_MS));
	TRY(expect_ok(p.b.rcq, 9, IBV_WC_RECV, NULL));
	return NULL;
}

/* The completion of a Send precedes that of the receive for the peer's answer: the Send is acknowledged before the answer arrives. */
static const char *rc_answered(size_t count)
{
	struct want w = { .one_cq = true };
	struct ibv_send_wr question = send_wr(1, IBV_WR_SEND, NULL, 0), answer = send_wr(2, IBV_WR_SEND, NULL, 0);
	struct pair p;

	TRY(open_pair(&p, &w));
	for (size_t i = 0; i < count; i++) {
		TRY(post_recv(p.b.qp, 3, NULL, 0));
		TRY(post_recv(p.a.qp, 4, NULL, 0));
		TRY(post(p.a.qp, &question));
		TRY(expect_ok(p.b.rcq, 3, IBV_WC_RECV, NULL));
		TRY(post(p.b.qp, &answer));
		TRY(expect_ok(p.a.scq, 1, IBV_WC_SEND, NULL));
		TRY(expect_ok(p.a.rcq, 4, IBV_WC_RECV, NULL));
		TRY(expect_ok(p.b.scq, 2, IBV_WC_SEND, NULL));
	}
	return NULL;
}

static const char *rc_solicited(size_t arg)
{
	struct want w = { .channels = true };
	struct ibv_send_wr wr = send_wr(2, IBV_WR_SEND, NULL, 0);
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &w));
	for (uint64_t i = 0; i < 3; i++)
		TRY(post_recv(p.b.qp, i, NULL, 0));
	ENSURE(!ibv_req_notify_cq(p.b.rcq, 1), "ibv_req_notify_cq: %s", strerror(errno));
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 2, IBV_WC_SEND, NULL));
	TRY(not_readable(p.b.channel->fd, QUIET_MS));
	wr.send_flags |= IBV_SEND_SOLICITED;
	TRY(post(p.a.qp, &wr));
	TRY(channel_event(&p.b));
	TRY(expect_ok(p.b.rcq, 0, IBV_WC_RECV, NULL));
	TRY(expect_ok(p.b.rcq, 1, IBV_WC_RECV, NULL));
	/* a completion with an error counts as solicited */
	ENSURE(!ibv_req_notify_cq(p.b.rcq, 1), "ibv_req_notify_cq: %s", strerror(errno));
	TRY(to_state(p.b.qp, IBV_QPS_ERR));
	TRY(channel_event(&p.b));
	return expect_status(p.b.rcq, 2, IBV_WC_WR_FLUSH_ERR);
}

/* A Write without immediate data creates no completion at the target. Its data is there when the Send that follows it arrives. */
static const char *write_once(struct pair *p, size_t len)
{
	struct region src, dst;
	struct ibv_sge from;
	struct ibv_send_wr wr[2];

	TRY(new_region(&src, p->a.pd, len ? len : 1, 0));
	TRY(new_region(&dst, p->b.pd, len ? len : 1, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	fill_pattern(src.at, src.len, 2);
	from = sge_of(&src, 0, len);
	TRY(post_recv(p->b.qp, 8, NULL, 0));
	wr[0] = rdma_wr(21, IBV_WR_RDMA_WRITE, &from, len ? 1 : 0, &dst, 0);
	wr[1] = send_wr(22, IBV_WR_SEND, NULL, 0);
	wr[0].next = &wr[1];
	TRY(post(p->a.qp, wr));
	TRY(expect_ok(p->b.rcq, 8, IBV_WC_RECV, NULL));
	if (len)
		TRY(same_pattern(dst.at, len, 2));
	else
		TRY(all_bytes(dst.at, 1, FRESH, "target of an empty message"));
	TRY(guards_untouched(&dst));
	TRY(expect_ok(p->a.scq, 21, IBV_WC_RDMA_WRITE, NULL));
	TRY(expect_ok(p->a.scq, 22, IBV_WC_SEND, NULL));
	TRY(no_wc(p->b.scq, 5));
	return no_wc(p->b.rcq, 5);
}

static const char *rc_write(size_t len)
{
	struct pair p;

	TRY(fits(len));
	TRY(open_pair(&p, &usual));
	return write_once(&p, len);
}

static const char *uc_write(size_t len)
{
	struct want w = { .type = IBV_QPT_UC };
	struct pair p;

	TRY(open_pair(&p, &w));
	return write_once(&p, len);
}

/* The target process calls no verb until the data has arrived. */
static const char *rc_write_to_idle_process(size_t len)
{
	uint64_t end = now_ms() + WAIT_MS;
	struct region src, dst;
	struct ibv_sge from;
	struct ibv_send_wr wr;
	struct pair p;
	volatile uint8_t *last;

	TRY(open_pair(&p, &usual));
	TRY(new_region(&src, p.a.pd, len, 0));
	TRY(new_region(&dst, p.b.pd, len, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	fill_pattern(src.at, len, 6);
	src.at[len - 1] = (uint8_t)~FRESH;
	from = sge_of(&src, 0, len);
	wr = rdma_wr(1, IBV_WR_RDMA_WRITE, &from, 1, &dst, 0);
	TRY(post(p.a.qp, &wr));
	last = &dst.at[len - 1];
	while (*last == FRESH && now_ms() < end)
		sleep_ms(1);
	ENSURE(*last != FRESH, "the data did not arrive while the program slept");
	TRY(expect_ok(p.a.scq, 1, IBV_WC_RDMA_WRITE, NULL));
	return same_pattern(dst.at, len - 1, 6);
}

static const char *write_imm_once(struct pair *p, size_t len)
{
	struct region src, dst;
	struct ibv_sge from;
	struct ibv_send_wr wr;
	struct ibv_wc wc;

	TRY(new_region(&src, p->a.pd, len ? len : 1, 0));
	TRY(new_region(&dst, p->b.pd, len ? len : 1, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	fill_pattern(src.at, src.len, 3);
	from = sge_of(&src, 0, len);
	TRY(post_recv(p->b.qp, 9, NULL, 0));
	wr = rdma_wr(31, IBV_WR_RDMA_WRITE_WITH_IMM, &from, len ? 1 : 0, &dst, 0);
	wr.imm_data = htonl(0x01020304);
	TRY(post(p->a.qp, &wr));
	TRY(expect_ok(p->b.rcq, 9, IBV_WC_RECV_RDMA_WITH_IMM, &wc));
	ENSURE(wc.wc_flags & IBV_WC_WITH_IMM, "wc_flags %#x", wc.wc_flags);
	ENSURE(ntohl(wc.imm_data) == 0x01020304, "imm_data %#x", ntohl(wc.imm_data));
	ENSURE(wc.byte_len == len, "byte_len %u, expected %zu", wc.byte_len, len);
	if (len)
		TRY(same_pattern(dst.at, len, 3));
	else
		TRY(all_bytes(dst.at, 1, FRESH, "target of an empty message"));
	TRY(expect_ok(p->a.scq, 31, IBV_WC_RDMA_WRITE, NULL));
	return guards_untouched(&dst);
}

static const char *rc_write_imm(size_t len)
{
	struct pair p;

	TRY(open_pair(&p, &usual));
	return write_imm_once(&p, len);
}

static const char *uc_write_imm(size_t len)
{
	struct want w = { .type = IBV_QPT_UC };
	struct pair p;

	TRY(open_pair(&p, &w));
	return write_imm_once(&p, len);
}

static const char *rc_read(size_t len)
{
	struct region sink, source;
	struct ibv_sge to;
	struct ibv_send_wr wr;
	struct pair p;

	TRY(fits(len));
	TRY(open_pair(&p, &usual));
	TRY(new_region(&sink, p.a.pd, len ? len : 1, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&source, p.b.pd, len ? len : 1, IBV_ACCESS_REMOTE_READ));
	fill_pattern(source.at, source.len, 4);
	to = sge_of(&sink, 0, len);
	wr = rdma_wr(41, IBV_WR_RDMA_READ, &to, len ? 1 : 0, &source, 0);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 41, IBV_WC_RDMA_READ, NULL));
	if (len)
		TRY(same_pattern(sink.at, len, 4));
	else
		TRY(all_bytes(sink.at, 1, FRESH, "target of an empty Read"));
	TRY(guards_untouched(&sink));
	return no_wc(p.b.rcq, 5);
}

static const char *rc_read_multi_sge(size_t arg)
{
	static const size_t in[] = { 1, 70000, 4095, 3 };
	struct region sink, source;
	struct ibv_sge to[4];
	struct ibv_send_wr wr;
	struct pair p;
	size_t sum = 0, at = 0;

	(void)arg;
	TRY(open_pair(&p, &usual));
	if (device_attr.max_sge_rd < 4)
		SKIP("the device scatters a Read over fewer than 4 pieces");
	TRY(new_region(&sink, p.a.pd, 100000, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&source, p.b.pd, 80000, IBV_ACCESS_REMOTE_READ));
	fill_pattern(source.at, source.len, 14);
	for (size_t i = 4; i-- > 0;) { /* the last piece is first in memory */
		to[i] = sge_of(&sink, at, in[i]);
		at += in[i] + 16;
		sum += in[i];
	}
	wr = rdma_wr(42, IBV_WR_RDMA_READ, to, 4, &source, 5);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 42, IBV_WC_RDMA_READ, NULL));
	at = 0;
	for (size_t i = 0; i < 4; i++) {
		uint8_t *piece = (uint8_t *)(uintptr_t)to[i].addr;

		TRY(same_pattern_from(piece, in[i], 14, 5 + at));
		TRY(all_bytes(piece + in[i], 16, FRESH, "between the pieces"));
		at += in[i];
	}
	ENSURE(at == sum, "lengths");
	return guards_untouched(&sink);
}

/* More Reads than may be outstanding: the others wait in the send queue, and all complete in order. */
static const char *rc_many_reads(size_t count)
{
	struct want w = { .rd_atomic = 2 };
	struct region sink, source;
	struct ibv_sge to[128];
	struct ibv_send_wr wr;
	struct pair p;

	TRY(open_pair(&p, &w));
	TRY(new_region(&sink, p.a.pd, count * 5000, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&source, p.b.pd, count * 5000, IBV_ACCESS_REMOTE_READ));
	fill_pattern(source.at, source.len, 15);
	for (size_t i = 0; i < count; i++) {
		to[i] = sge_of(&sink, i * 5000, 5000);
		wr = rdma_wr(i, IBV_WR_RDMA_READ, &to[i], 1, &source, i * 5000);
		TRY(post(p.a.qp, &wr));
	}
	for (size_t i = 0; i < count; i++)
		TRY(expect_ok(p.a.scq, i, IBV_WC_RDMA_READ, NULL));
	return same_pattern(sink.at, sink.len, 15);
}

/* A fenced Send after a Read carries the data of the Read. */
static const char *rc_fence(size_t rounds)
{
	struct region source, middle, dst;
	struct ibv_sge mid, to;
	struct ibv_send_wr wr[2];
	struct pair p;

	TRY(open_pair(&p, &usual));
	TRY(new_region(&source, p.b.pd, 65536, IBV_ACCESS_REMOTE_READ));
	TRY(new_region(&middle, p.a.pd, 65536, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&dst, p.b.pd, 65536, IBV_ACCESS_LOCAL_WRITE));
	mid = sge_of(&middle, 0, 65536);
	to = sge_of(&dst, 0, 65536);
	for (uint32_t i = 0; i < rounds; i++) {
		fill_pattern(source.at, source.len, i);
		TRY(post_recv(p.b.qp, i, &to, 1));
		wr[0] = rdma_wr(1, IBV_WR_RDMA_READ, &mid, 1, &source, 0);
		wr[1] = send_wr(2, IBV_WR_SEND, &mid, 1);
		wr[1].send_flags |= IBV_SEND_FENCE;
		wr[0].next = &wr[1];
		TRY(post(p.a.qp, wr));
		TRY(expect_ok(p.a.scq, 1, IBV_WC_RDMA_READ, NULL));
		TRY(expect_ok(p.a.scq, 2, IBV_WC_SEND, NULL));
		TRY(expect_ok(p.b.rcq, i, IBV_WC_RECV, NULL));
		TRY(same_pattern(dst.at, dst.len, i));
	}
	return NULL;
}

static const char *has_atomics(void)
{
	TRY(open_device());
	return device_attr.atomic_cap == IBV_ATOMIC_NONE ? "\001the device has no atomics" : NULL;
}

static const char *rc_fetch_add(size_t arg)
{
	struct region sink, cell;
	struct ibv_sge to;
	struct ibv_send_wr wr;
	struct pair p;
	uint64_t value = 0xfffffffffffffff0u, old;

	(void)arg;
	TRY(has_atomics());
	TRY(open_pair(&p, &usual));
	TRY(new_region(&sink, p.a.pd, 8, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&cell, p.b.pd, 8, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC));
	memcpy(cell.at, &value, 8);
	to = sge_of(&sink, 0, 8);
	wr = atomic_wr(51, IBV_WR_ATOMIC_FETCH_AND_ADD, &to, &cell, 0x123456789abcu, 0);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 51, IBV_WC_FETCH_ADD, NULL));
	memcpy(&old, sink.at, 8);
	ENSURE(old == value, "returned %#llx, expected %#llx", (unsigned long long)old, (unsigned long long)value);
	memcpy(&old, cell.at, 8);
	ENSURE(old == value + 0x123456789abcu, "memory holds %#llx, expected %#llx", (unsigned long long)old,
	       (unsigned long long)(value + 0x123456789abcu));
	TRY(guards_untouched(&sink));
	return guards_untouched(&cell);
}

static const char *rc_cmp_swap(size_t matches)
{
	struct region sink, cell;
	struct ibv_sge to;
	struct ibv_send_wr wr;
	struct pair p;
	uint64_t value = 0x0123456789abcdefu, next = 0xfedcba9876543210u, got, expected = matches ? next : value;

	TRY(has_atomics());
	TRY(open_pair(&p, &usual));
	TRY(new_region(&sink, p.a.pd, 8, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&cell, p.b.pd, 8, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC));
	memcpy(cell.at, &value, 8);
	to = sge_of(&sink, 0, 8);
	wr = atomic_wr(52, IBV_WR_ATOMIC_CMP_AND_SWP, &to, &cell, matches ? value : value + 1, next);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 52, IBV_WC_COMP_SWAP, NULL));
	memcpy(&got, sink.at, 8);
	ENSURE(got == value, "returned %#llx, expected %#llx", (unsigned long long)got, (unsigned long long)value);
	memcpy(&got, cell.at, 8);
	ENSURE(got == expected, "memory holds %#llx, expected %#llx", (unsigned long long)got,
	       (unsigned long long)expected);
	return guards_untouched(&cell);
}

/* Both ends add to the same word. No addition is lost, and no value is returned twice. */
static const char *rc_atomic_counter(size_t count)
{
	struct region sink_a, sink_b, cell_b;
	struct ibv_mr *cell_for_b;
	struct ibv_send_wr wr;
	struct pair p;
	uint64_t *a, *b, sum = 0;
	static uint8_t seen[512];

	TRY(has_atomics());
	TRY(open_pair(&p, &usual));
	TRY(new_region(&sink_a, p.a.pd, count * 8, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&sink_b, p.b.pd, count * 8, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&cell_b, p.b.pd, 8, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC));
	cell_for_b = new_mr(p.a.pd, cell_b.at, 8, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
	ENSURE(cell_for_b, "ibv_reg_mr of memory registered before: %s", strerror(errno));
	memset(cell_b.at, 0, 8);
	memset(seen, 0, sizeof seen);
	for (size_t i = 0; i < count; i++) {
		struct ibv_sge to_a = sge_of(&sink_a, i * 8, 8), to_b = sge_of(&sink_b, i * 8, 8);

		wr = atomic_wr(i, IBV_WR_ATOMIC_FETCH_AND_ADD, &to_a, &cell_b, 1, 0);
		TRY(post(p.a.qp, &wr));
		wr = atomic_wr(i, IBV_WR_ATOMIC_FETCH_AND_ADD, &to_b, &cell_b, 1, 0);
		wr.wr.atomic.rkey = cell_for_b->rkey;
		TRY(post(p.b.qp, &wr));
	}
	for (size_t i = 0; i < count; i++) {
		TRY(expect_ok(p.a.scq, i, IBV_WC_FETCH_ADD, NULL));
		TRY(expect_ok(p.b.scq, i, IBV_WC_FETCH_ADD, NULL));
	}
	/* Both ends are in one process, and the thread sanitizer does not know that messages in shared memory order accesses. */
	sum = __atomic_load_n((uint64_t *)(void *)cell_b.at, __ATOMIC_ACQUIRE);
	ENSURE(sum == 2 * count, "counted %llu of %zu", (unsigned long long)sum, 2 * count);
	a = (uint64_t *)(void *)sink_a.at;
	b = (uint64_t *)(void *)sink_b.at;
	for (size_t i = 0; i < count; i++) {
		ENSURE(a[i] < 2 * count && !seen[a[i]]++, "value %llu returned twice", (unsigned long long)a[i]);
		ENSURE(b[i] < 2 * count && !seen[b[i]]++, "value %llu returned twice", (unsigned long long)b[i]);
	}
	return NULL;
}

/* Sends and Writes of various sizes in both directions: order, contents, and no duplicates. */
#define SLOTS 32u
#define SLOT 40000u

static size_t mixed_size(uint32_t seq)
{
	static const size_t special[] = { 0, 1, 3, 64, 1408, 1460, 4096, 32768 };
	uint32_t x = seq * 2654435761u;

	return seq % 3 ? (x >> 8) % (SLOT - 8) : special[(x >> 20) % COUNT(special)];
}

struct flow {
	struct region out, in, written;
	uint32_t posted, completed, received;
};

static const char *flow_post(struct end *e, struct flow *f, struct flow *peer, uint32_t salt)
{
	uint32_t seq = f->posted, slot = seq % SLOTS;
	size_t len = mixed_size(seq + salt);
	struct ibv_sge from = sge_of(&f->out, slot * SLOT, len);
	struct ibv_send_wr wr[2];

	fill_pattern(f->out.at + slot * SLOT, len, seq ^ salt);
	wr[0] = rdma_wr(0, IBV_WR_RDMA_WRITE, &from, 1, &peer->written, slot * SLOT);
	wr[0].send_flags = 0;
	wr[0].next = &wr[1];
	wr[1] = send_wr(seq, IBV_WR_SEND_WITH_IMM, &from, 1);
	wr[1].imm_data = htonl(seq);
	TRY(post(e->qp, wr));
	f->posted++;
	return NULL;
}

static const char *flow_take(struct end *e, struct flow *f, uint32_t salt)
{
	uint32_t seq = f->received, slot = seq % SLOTS;
	size_t len = mixed_size(seq + salt);
	struct ibv_sge to = sge_of(&f->in, slot * SLOT, SLOT);
	struct ibv_wc wc;
	int n = ibv_poll_cq(e->rcq, 1, &wc);

	ENSURE(n >= 0, "ibv_poll_cq returns %d", n);
	if (n == 0)
		return NULL;
	TRY(wc_is(&wc, slot, IBV_WC_SUCCESS));
	ENSURE(ntohl(wc.imm_data) == seq, "message %u arrived as number %u", ntohl(wc.imm_data), seq);
	ENSURE(wc.byte_len == len, "message %u: byte_len %u, expected %zu", seq, wc.byte_len, len);
	TRY(same_pattern(f->in.at + slot * SLOT, len, seq ^ salt));
	TRY(same_pattern(f->written.at + slot * SLOT, len, seq ^ salt));
	TRY(post_recv(e->qp, slot, &to, 1));
	f->received++;
	return NULL;
}

static const char *flow_done(struct end *e, struct flow *f)
{
	struct ibv_wc wc;
	int n = ibv_poll_cq(e->scq, 1, &wc);

	ENSURE(n >= 0, "ibv_poll_cq returns %d", n);
	if (n == 0)
		return NULL;
	TRY(wc_is(&wc, f->completed, IBV_WC_SUCCESS));
	f->completed++;
	return NULL;
}

static const char *rc_both_ways(size_t count)
{
	struct flow fa = { 0 }, fb = { 0 };
	uint64_t end = now_ms() + 50000;
	struct pair p;

	TRY(open_pair(&p, &usual));
	TRY(new_region(&fa.out, p.a.pd, SLOTS * SLOT, 0));
	TRY(new_region(&fb.out, p.b.pd, SLOTS * SLOT, 0));
	TRY(new_region(&fa.in, p.a.pd, SLOTS * SLOT, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&fb.in, p.b.pd, SLOTS * SLOT, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&fa.written, p.a.pd, SLOTS * SLOT, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	TRY(new_region(&fb.written, p.b.pd, SLOTS * SLOT, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	for (uint64_t slot = 0; slot < SLOTS; slot++) {
		struct ibv_sge to_a = sge_of(&fa.in, slot * SLOT, SLOT), to_b = sge_of(&fb.in, slot * SLOT, SLOT);

		TRY(post_recv(p.a.qp, slot, &to_a, 1));
		TRY(post_recv(p.b.qp, slot, &to_b, 1));
	}
	while (fa.received < count || fb.received < count || fa.completed < count || fb.completed < count) {
		ENSURE(now_ms() < end, "stuck: a sent %u completed %u received %u, b sent %u completed %u received %u",
		       fa.posted, fa.completed, fa.received, fb.posted, fb.completed, fb.received);
		if (fa.posted < count && fa.posted < fb.received + SLOTS && fa.posted < fa.completed + SLOTS)
			TRY(flow_post(&p.a, &fa, &fb, 77));
		if (fb.posted < count && fb.posted < fa.received + SLOTS && fb.posted < fb.completed + SLOTS)
			TRY(flow_post(&p.b, &fb, &fa, 99));
		TRY(flow_take(&p.b, &fb, 77));
		TRY(flow_take(&p.a, &fa, 99));
		TRY(flow_done(&p.a, &fa));
		TRY(flow_done(&p.b, &fb));
	}
	TRY(no_wc(p.a.rcq, 20));
	return no_wc(p.b.rcq, 20);
}

/* The queue pairs of both ends share one CQ for sends and one for receives. Each message reaches its own queue pair. */
static const char *rc_many_qps(size_t count)
{
	struct end a[64] = { 0 }, b[64] = { 0 };
	struct ibv_cq *scq, *rcq;
	struct ibv_pd *pd;
	struct region src, dst;
	static uint8_t got[64];

	TRY(open_device());
	pd = new_pd();
	scq = new_cq(1024, NULL);
	rcq = new_cq(1024, NULL);
	ENSURE(pd && scq && rcq, "no room: %s", strerror(errno));
	TRY(new_region(&src, pd, count * 100, 0));
	TRY(new_region(&dst, pd, count * 100, IBV_ACCESS_LOCAL_WRITE));
	fill_pattern(src.at, src.len, 21);
	for (size_t i = 0; i < count; i++) {
		struct ibv_qp_init_attr init = {
			.send_cq = scq, .recv_cq = rcq, .qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		};

		a[i].qp = new_qp(pd, &init);
		b[i].qp = new_qp(pd, &init);
		ENSURE(a[i].qp && b[i].qp, "ibv_create_qp number %zu: %s", 2 * i, strerror(errno));
		ENSURE(a[i].qp->qp_num != b[i].qp->qp_num, "two queue pairs with one number");
		TRY(connect_ends(&a[i], &b[i], &usual));
	}
	for (size_t i = 0; i < count; i++) {
		struct ibv_sge to = sge_of(&dst, i * 100, 100);

		TRY(post_recv(b[i].qp, i, &to, 1));
	}
	for (size_t i = count; i-- > 0;) {
		struct ibv_sge from = sge_of(&src, i * 100, 100);
		struct ibv_send_wr wr = send_wr(1000 + i, IBV_WR_SEND, &from, 1);

		TRY(post(a[i].qp, &wr));
	}
	memset(got, 0, sizeof got);
	for (size_t i = 0; i < count; i++) {
		struct ibv_wc wc;

		TRY(next_wc(rcq, &wc, WAIT_MS));
		ENSURE(wc.status == IBV_WC_SUCCESS && wc.wr_id < count, "wr_id %llu: status %d",
		       (unsigned long long)wc.wr_id, wc.status);
		ENSURE(!got[wc.wr_id]++, "receive %llu completed twice", (unsigned long long)wc.wr_id);
		ENSURE(wc.qp_num == b[wc.wr_id].qp->qp_num, "completion with the number of another queue pair");
	}
	for (size_t i = 0; i < count; i++) {
		struct ibv_wc wc;

		TRY(next_wc(scq, &wc, WAIT_MS));
		ENSURE(wc.status == IBV_WC_SUCCESS, "send %llu: status %d", (unsigned long long)wc.wr_id, wc.status);
	}
	return same_pattern(dst.at, dst.len, 21);
}

static const char *rc_to_itself(size_t len)
{
	struct end e;
	struct region src, dst;
	struct ibv_sge from, to;
	struct ibv_send_wr wr;

	TRY(open_device());
	TRY(open_end(&e, &usual));
	TRY(to_init(e.qp, &usual));
	TRY(to_rtr(e.qp, e.qp->qp_num, &usual));
	TRY(to_rts(e.qp, &usual));
	TRY(new_region(&src, e.pd, len, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ));
	TRY(new_region(&dst, e.pd, len, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	fill_pattern(src.at, len, 8);
	from = sge_of(&src, 0, len);
	to = sge_of(&dst, 0, len);
	TRY(post_recv(e.qp, 1, &to, 1));
	wr = send_wr(2, IBV_WR_SEND, &from, 1);
	TRY(post(e.qp, &wr));
	TRY(expect_ok(e.rcq, 1, IBV_WC_RECV, NULL));
	TRY(expect_ok(e.scq, 2, IBV_WC_SEND, NULL));
	TRY(same_pattern(dst.at, len, 8));
	memset(dst.at, 0, len);
	wr = rdma_wr(3, IBV_WR_RDMA_READ, &to, 1, &src, 0);
	TRY(post(e.qp, &wr));
	TRY(expect_ok(e.scq, 3, IBV_WC_RDMA_READ, NULL));
	TRY(same_pattern(dst.at, len, 8));
	memset(dst.at, 0, len);
	wr = rdma_wr(4, IBV_WR_RDMA_WRITE, &from, 1, &dst, 0);
	TRY(post(e.qp, &wr));
	TRY(expect_ok(e.scq, 4, IBV_WC_RDMA_WRITE, NULL));
	TRY(post_recv(e.qp, 5, NULL, 0)); /* after the Write */
	wr = send_wr(6, IBV_WR_SEND, NULL, 0);
	TRY(post(e.qp, &wr));
	TRY(expect_ok(e.rcq, 5, IBV_WC_RECV, NULL));
	return same_pattern(dst.at, len, 8);
}

/* Receiver not ready: the Send waits until a receive is posted. */
static const char *rc_rnr_waits(size_t late_ms)
{
	struct region src, dst;
	struct ibv_sge from, to;
	struct ibv_send_wr wr;
	struct pair p;

	TRY(open_pair(&p, &usual));
	TRY(new_region(&src, p.a.pd, 4096, 0));
	TRY(new_region(&dst, p.b.pd, 4096, IBV_ACCESS_LOCAL_WRITE));
	fill_pattern(src.at, src.len, 12);
	from = sge_of(&src, 0, 4096);
	to = sge_of(&dst, 0, 4096);
	wr = send_wr(1, IBV_WR_SEND, &from, 1);
	TRY(post(p.a.qp, &wr));
	TRY(no_wc(p.a.scq, (unsigned int)late_ms));
	TRY(post_recv(p.b.qp, 2, &to, 1));
	TRY(expect_ok(p.b.rcq, 2, IBV_WC_RECV, NULL));
	TRY(expect_ok(p.a.scq, 1, IBV_WC_SEND, NULL));
	return same_pattern(dst.at, dst.len, 12);
}

static const char *rc_rnr_gives_up(size_t retries)
{
	struct want w = { .rnr_retry = retries ? (uint8_t)retries : NEVER, .min_rnr = 14 };
	struct ibv_send_wr wr[2] = { send_wr(1, IBV_WR_SEND, NULL, 0), send_wr(2, IBV_WR_SEND, NULL, 0) };
	struct pair p;

	TRY(open_pair(&p, &w));
	wr[0].next = &wr[1];
	TRY(post(p.a.qp, wr));
	TRY(expect_status(p.a.scq, 1, IBV_WC_RNR_RETRY_EXC_ERR));
	TRY(expect_flushed(p.a.scq, 2, 1));
	return state_is(p.a.qp, IBV_QPS_ERR);
}

/* A remote access error: the failing request has the status, and the others are flushed once, at the target too. */
static const char *rc_remote_error(size_t opcode)
{
	struct region mine, theirs;
	struct ibv_sge sge, to;
	struct ibv_send_wr wr;
	struct pair p;

	TRY(open_pair(&p, &usual));
	TRY(new_region(&mine, p.a.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, p.b.pd, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
						    IBV_ACCESS_REMOTE_ATOMIC));
	sge = sge_of(&mine, 0, opcode >= IBV_WR_ATOMIC_CMP_AND_SWP ? 8 : 64);
	to = sge_of(&theirs, 0, 64);
	for (uint64_t i = 0; i < 3; i++)
		TRY(post_recv(p.b.qp, 100 + i, &to, 1));
	for (uint64_t i = 0; i < 2; i++)
		TRY(post_recv(p.a.qp, 200 + i, &sge, 1));
	wr = send_wr(1, IBV_WR_SEND, &sge, 1);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.b.rcq, 100, IBV_WC_RECV, NULL));
	TRY(expect_ok(p.a.scq, 1, IBV_WC_SEND, NULL));
	memset(mine.at, 0x11, 64);
	if (opcode >= IBV_WR_ATOMIC_CMP_AND_SWP) {
		wr = atomic_wr(2, (enum ibv_wr_opcode)opcode, &sge, &theirs, 0, 0);
		wr.wr.atomic.rkey ^= 0x5a5a5a00u;
	} else {
		wr = rdma_wr(2, (enum ibv_wr_opcode)opcode, &sge, 1, &theirs, 0);
		wr.wr.rdma.rkey ^= 0x5a5a5a00u;
	}
	TRY(post(p.a.qp, &wr));
	for (uint64_t i = 3; i < 6; i++) {
		wr = send_wr(i, IBV_WR_SEND, &sge, 1);
		TRY(post(p.a.qp, &wr));
	}
	TRY(expect_status(p.a.scq, 2, IBV_WC_REM_ACCESS_ERR));
	TRY(expect_flushed(p.a.scq, 3, 3));
	TRY(expect_flushed(p.a.rcq, 200, 2));
	TRY(expect_flushed(p.b.rcq, 101, 2));
	TRY(state_is(p.a.qp, IBV_QPS_ERR));
	TRY(state_is(p.b.qp, IBV_QPS_ERR));
	/* a request that is posted to a queue pair in the error state is flushed too */
	wr = send_wr(7, IBV_WR_SEND, &sge, 1);
	TRY(post(p.a.qp, &wr));
	TRY(expect_flushed(p.a.scq, 7, 1));
	TRY(post_recv(p.b.qp, 107, &to, 1));
	TRY(expect_flushed(p.b.rcq, 107, 1));
	return all_bytes(theirs.at, 64, FRESH, "target");
}

/* A message one byte longer than the receive: each side has its own error status. */
static const char *rc_receive_too_small(size_t arg)
{
	struct region src, dst;
	struct ibv_sge from, to;
	struct ibv_send_wr wr;
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&src, p.a.pd, 65, 0));
	TRY(new_region(&dst, p.b.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	from = sge_of(&src, 0, 65);
	to = sge_of(&dst, 0, 64);
	TRY(post_recv(p.b.qp, 1, &to, 1));
	TRY(post_recv(p.b.qp, 2, &to, 1));
	wr = send_wr(3, IBV_WR_SEND, &from, 1);
	TRY(post(p.a.qp, &wr));
	TRY(expect_status(p.b.rcq, 1, IBV_WC_LOC_LEN_ERR));
	TRY(expect_flushed(p.b.rcq, 2, 1));
	TRY(expect_status(p.a.scq, 3, IBV_WC_REM_INV_REQ_ERR));
	return guards_untouched(&dst);
}

static const char *rc_local_error(size_t arg)
{
	struct region src, dst;
	struct ibv_sge from, to;
	struct ibv_send_wr wr;
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&src, p.a.pd, 64, 0));
	TRY(new_region(&dst, p.b.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	from = sge_of(&src, 1, 64); /* one byte beyond the end */
	to = sge_of(&dst, 0, 64);
	TRY(post_recv(p.b.qp, 1, &to, 1));
	wr = send_wr(2, IBV_WR_SEND, &from, 1);
	TRY(post(p.a.qp, &wr));
	TRY(expect_status(p.a.scq, 2, IBV_WC_LOC_PROT_ERR));
	TRY(state_is(p.a.qp, IBV_QPS_ERR));
	return all_bytes(dst.at, 64, FRESH, "receive buffer");
}

/* In the error state each posted request completes once, in order. */
static const char *rc_flush(size_t count)
{
	struct want w = { .rnr_retry = 7 };
	struct ibv_send_wr wr;
	struct pair p;

	TRY(open_pair(&p, &w));
	for (size_t i = 0; i < count; i++)
		TRY(post_recv(p.a.qp, i, NULL, 0));
	for (size_t i = 0; i < count; i++) { /* b has no receive posted, so none of these can succeed */
		wr = send_wr(1000 + i, IBV_WR_SEND, NULL, 0);
		if (i % 2)
			wr.send_flags = 0; /* a flushed request completes whether or not it is signaled */
		TRY(post(p.a.qp, &wr));
	}
	TRY(to_state(p.a.qp, IBV_QPS_ERR));
	TRY(expect_flushed(p.a.rcq, 0, count));
	return expect_flushed(p.a.scq, 1000, count);
}

/* RESET discards work requests and completions. The queue pair can be connected again. */
static const char *rc_reset_and_reconnect(size_t rounds)
{
	struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, NULL, 0);
	struct pair p;

	TRY(open_pair(&p, &usual));
	for (size_t i = 0; i < rounds; i++) {
		TRY(send_once(&p, 5000, NULL));
		TRY(post_recv(p.b.qp, 5, NULL, 0));
		TRY(post_recv(p.b.qp, 6, NULL, 0));
		TRY(post(p.a.qp, &wr));
		TRY(expect_ok(p.a.scq, 1, IBV_WC_SEND, NULL)); /* the completion of its receive is not polled */
		TRY(to_state(p.a.qp, IBV_QPS_RESET));
		TRY(to_state(p.b.qp, IBV_QPS_RESET));
		TRY(no_wc(p.b.rcq, 10));
		TRY(no_wc(p.a.scq, 1));
		TRY(connect_ends(&p.a, &p.b, &usual));
	}
	return send_once(&p, 100, NULL);
}

/*
 * After RESET of the other queue pair nothing is executed there: a request that is posted at once does not succeed, although the
 * transport may still take its bytes. As on hardware, this end notices nothing while it is idle.
 */
static const char *rc_peer_reset(size_t rounds)
{
	struct want w = { .timeout = 10, .retry = 2 };
	struct ibv_send_wr wr = send_wr(3, IBV_WR_SEND, NULL, 0);
	struct pair p;

	TRY(open_pair(&p, &w));
	for (size_t i = 0; i < rounds; i++) {
		/* The many messages of the first round move the connection to shared memory, if it may be used. */
		for (size_t n = 0; n < (i ? 1 : 200); n++)
			TRY(send_once(&p, 64, NULL));
		TRY(post_recv(p.a.qp, 1, NULL, 0));
		TRY(post_recv(p.b.qp, 2, NULL, 0));
		TRY(to_state(p.b.qp, IBV_QPS_RESET));
		if (i % 4 == 3) {
			TRY(no_wc(p.a.rcq, QUIET_MS));
			TRY(state_is(p.a.qp, IBV_QPS_RTS));
		}
		TRY(post(p.a.qp, &wr));
		TRY(expect_status(p.a.scq, 3, IBV_WC_RETRY_EXC_ERR));
		TRY(expect_flushed(p.a.rcq, 1, 1));
		TRY(no_wc(p.b.rcq, 1));
		TRY(to_state(p.a.qp, IBV_QPS_RESET));
		TRY(connect_ends(&p.a, &p.b, &w));
	}
	return send_once(&p, 100, NULL);
}

/* The other queue pair is destroyed: posted requests end with an error and flushes, in limited time. */
static const char *rc_peer_destroyed(size_t arg)
{
	struct want w = { .timeout = 10, .retry = 2 };
	struct ibv_send_wr wr;
	struct ibv_wc wc;
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &w));
	TRY(send_once(&p, 64, NULL));
	TRY(post_recv(p.a.qp, 50, NULL, 0));
	ENSURE(!close_now(p.b.qp), "ibv_destroy_qp");
	for (uint64_t i = 0; i < 3; i++) {
		wr = send_wr(i, IBV_WR_SEND, NULL, 0);
		TRY(post(p.a.qp, &wr));
	}
	TRY(next_wc(p.a.scq, &wc, WAIT_MS));
	ENSURE(wc.wr_id == 0, "first completion is of wr_id %llu", (unsigned long long)wc.wr_id);
	ENSURE(wc.status == IBV_WC_RETRY_EXC_ERR || wc.status == IBV_WC_WR_FLUSH_ERR, "status %d (%s)", wc.status,
	       ibv_wc_status_str(wc.status));
	TRY(expect_flushed(p.a.scq, 1, 2));
	return expect_flushed(p.a.rcq, 50, 1);
}

/* Type 2 memory window: bound by its owner, used and invalidated by the peer. */
static const char *rc_send_inv(size_t arg)
{
	struct region src, dst;
	struct ibv_mw *mw;
	struct ibv_sge from;
	struct ibv_send_wr wr;
	struct ibv_wc wc;
	struct pair p;
	uint32_t rkey;

	(void)arg;
	TRY(open_pair(&p, &usual));
	if (!(device_attr.device_cap_flags & (IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B)))
		SKIP("the device has no type 2 memory windows");
	TRY(new_region(&src, p.a.pd, 64, 0));
	TRY(new_region(&dst, p.b.pd, 128, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND));
	fill_pattern(src.at, 64, 40);
	mw = ibv_alloc_mw(p.b.pd, IBV_MW_TYPE_2);
	ENSURE(mw, "ibv_alloc_mw: %s", strerror(errno));
	keep(close_mw, mw, "memory window");
	rkey = ibv_inc_rkey(mw->rkey);
	wr = send_wr(1, IBV_WR_BIND_MW, NULL, 0);
	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = rkey;
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
		.mr = dst.mr, .addr = (uintptr_t)dst.at + 32, .length = 64, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE
	};
	TRY(post(p.b.qp, &wr));
	TRY(expect_ok(p.b.scq, 1, IBV_WC_BIND_MW, NULL));
	from = sge_of(&src, 0, 64);
	wr = rdma_wr(2, IBV_WR_RDMA_WRITE, &from, 1, &dst, 32);
	wr.wr.rdma.rkey = rkey;
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 2, IBV_WC_RDMA_WRITE, NULL));
	TRY(post_recv(p.b.qp, 3, NULL, 0));
	wr = send_wr(4, IBV_WR_SEND_WITH_INV, NULL, 0);
	wr.invalidate_rkey = rkey;
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.b.rcq, 3, IBV_WC_RECV, &wc));
	ENSURE(wc.wc_flags & IBV_WC_WITH_INV, "wc_flags %#x", wc.wc_flags);
	ENSURE(wc.invalidated_rkey == rkey, "invalidated rkey %#x, expected %#x", wc.invalidated_rkey, rkey);
	TRY(same_pattern(dst.at + 32, 64, 40));
	TRY(all_bytes(dst.at, 32, FRESH, "bytes before the window"));
	TRY(expect_ok(p.a.scq, 4, IBV_WC_SEND, NULL));
	wr = rdma_wr(5, IBV_WR_RDMA_WRITE, &from, 1, &dst, 32);
	wr.wr.rdma.rkey = rkey;
	TRY(post(p.a.qp, &wr));
	TRY(expect_status(p.a.scq, 5, IBV_WC_REM_ACCESS_ERR));
	/* SPDK's target sends with invalidation only if the device says that it can. */
	ENSURE(device_attr.device_cap_flags & IBV_DEVICE_MEM_MGT_EXTENSIONS, "device_cap_flags %#x",
	       device_attr.device_cap_flags);
	return NULL;
}

/* Two queue pairs use one shared receive queue. The limit event is raised once. */
static const char *srq_limit(size_t arg)
{
	struct want w = { .srq = true };
	struct ibv_srq_attr attr = { .srq_limit = 4 };
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct end b2 = { 0 }, a2 = { 0 };
	struct region src, dst;
	struct ibv_sge from, to;
	struct ibv_send_wr wr;
	struct ibv_wc wc;
	struct pair p;
	static uint8_t got[8];
	int rc;

	(void)arg;
	TRY(open_pair(&p, &w));
	init.send_cq = p.b.scq;
	init.recv_cq = p.b.rcq;
	init.srq = p.b.srq;
	b2.qp = new_qp(p.b.pd, &init);
	ENSURE(b2.qp, "ibv_create_qp with an SRQ: %s", strerror(errno));
	init.send_cq = p.a.scq;
	init.recv_cq = p.a.rcq;
	init.srq = NULL;
	a2.qp = new_qp(p.a.pd, &init);
	ENSURE(a2.qp, "ibv_create_qp: %s", strerror(errno));
	TRY(connect_ends(&a2, &b2, &usual));

	TRY(new_region(&src, p.a.pd, 100, 0));
	TRY(new_region(&dst, p.b.pd, 600, IBV_ACCESS_LOCAL_WRITE));
	fill_pattern(src.at, 100, 50);
	for (uint64_t i = 0; i < 6; i++) {
		to = sge_of(&dst, i * 100, 100);
		TRY(post_srq_recv(p.b.srq, i, &to, 1));
	}
	rc = ibv_modify_srq(p.b.srq, &attr, IBV_SRQ_LIMIT);
	ENSURE(!rc, "ibv_modify_srq: %s", strerror(rc));
	rc = ibv_query_srq(p.b.srq, &attr);
	ENSURE(!rc && attr.srq_limit == 4, "ibv_query_srq: %s, limit %u", strerror(rc), attr.srq_limit);
	from = sge_of(&src, 0, 100);
	memset(got, 0, sizeof got);
	for (uint64_t i = 0; i < 5; i++) {
		struct ibv_qp *qp = i % 2 ? a2.qp : p.a.qp, *at = i % 2 ? b2.qp : p.b.qp;

		wr = send_wr(i, IBV_WR_SEND, &from, 1);
		TRY(post(qp, &wr));
		TRY(next_wc(p.b.rcq, &wc, WAIT_MS));
		ENSURE(wc.status == IBV_WC_SUCCESS && wc.wr_id < 6, "wr_id %llu: status %d",
		       (unsigned long long)wc.wr_id, wc.status);
		ENSURE(!got[wc.wr_id]++, "receive %llu used twice", (unsigned long long)wc.wr_id);
		ENSURE(wc.qp_num == at->qp_num, "qp_num %#x, expected %#x", wc.qp_num, at->qp_num);
		TRY(same_pattern(dst.at + wc.wr_id * 100, 100, 50));
		TRY(expect_ok(p.a.scq, i, IBV_WC_SEND, NULL));
		if (i == 1) /* four are left, which is not below the limit */
			TRY(not_readable(device->async_fd, QUIET_MS));
		if (i == 2)
			TRY(async_event(IBV_EVENT_SRQ_LIMIT_REACHED, p.b.srq));
	}
	rc = ibv_query_srq(p.b.srq, &attr);
	ENSURE(!rc && attr.srq_limit == 0, "the limit stays armed: %u", attr.srq_limit);
	return not_readable(device->async_fd, QUIET_MS);
}

/* A failing queue pair with an SRQ reports with an event that it uses no more receives. */
static const char *srq_last_wqe(size_t arg)
{
	struct pair p;

	(void)arg;
	TRY(open_device());
	TRY(open_end(&p.a, &usual)); /* only one end has an SRQ, because the other end fails too and would raise the same event */
	TRY(open_end(&p.b, &(struct want){ .srq = true }));
	TRY(connect_ends(&p.a, &p.b, &usual));
	TRY(post_srq_recv(p.b.srq, 1, NULL, 0));
	TRY(to_state(p.b.qp, IBV_QPS_ERR));
	TRY(async_event(IBV_EVENT_QP_LAST_WQE_REACHED, p.b.qp));
	TRY(not_readable(device->async_fd, QUIET_MS));
	return no_wc(p.b.rcq, 10); /* the receive belongs to the SRQ, so it is not flushed */
}

static const char *open_ud(struct end *e, const struct want *w, uint32_t qkey)
{
	struct want ud = *w;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = PORT, .qkey = qkey };
	int rc;

	ud.type = IBV_QPT_UD;
	TRY(open_device());
	TRY(open_end(e, &ud));
	rc = ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
	ENSURE(!rc, "ibv_modify_qp to INIT: %s", strerror(rc));
	TRY(to_rtr(e->qp, 0, &ud));
	return to_rts(e->qp, &ud);
}

static const char *new_ah(struct ibv_ah **ah, struct ibv_pd *pd)
{
	struct ibv_ah_attr attr = address_of(&local_gid, 0, false);

	*ah = ibv_create_ah(pd, &attr);
	ENSURE(*ah, "ibv_create_ah: %s", strerror(errno));
	keep(close_ah, *ah, "address handle");
	return NULL;
}

static struct ibv_send_wr ud_wr(uint64_t wr_id, enum ibv_wr_opcode opcode, struct ibv_sge *sge, int n,
				struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
	struct ibv_send_wr wr = send_wr(wr_id, opcode, sge, n);

	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = qpn;
	wr.wr.ud.remote_qkey = qkey;
	return wr;
}

#define GRH 40u

/* The 40 bytes before a datagram: a GRH, or 20 unspecified bytes and the IPv4 header. */
static const char *grh_is_ours(const uint8_t *grh)
{
	if (gid_is_ipv4(&local_gid)) {
		ENSURE(grh[20] == 0x45, "byte 20 of the header is %02x, expected 45 (IPv4)", grh[20]);
		ENSURE(!memcmp(grh + 32, local_gid.raw + 12, 4), "wrong source address in the IPv4 header");
		ENSURE(!memcmp(grh + 36, local_gid.raw + 12, 4), "wrong destination address in the IPv4 header");
	} else {
		ENSURE(grh[0] >> 4 == 6, "byte 0 of the header is %02x, expected 6x", grh[0]);
		ENSURE(!memcmp(grh + 8, local_gid.raw, 16), "wrong source GID");
		ENSURE(!memcmp(grh + 24, local_gid.raw, 16), "wrong destination GID");
	}
	return NULL;
}

static const char *ud_send(size_t len)
{
	struct end a, b;
	struct region src, dst;
	struct ibv_sge from, to;
	struct ibv_send_wr wr;
	struct ibv_ah *ah;
	struct ibv_wc wc;

	TRY(open_ud(&a, &usual, QKEY));
	TRY(open_ud(&b, &usual, QKEY));
	if (len == SIZE_MAX)
		len = 128u << port_attr.active_mtu;
	TRY(new_ah(&ah, a.pd));
	TRY(new_region(&src, a.pd, len + 1, 0));
	TRY(new_region(&dst, b.pd, GRH + len, IBV_ACCESS_LOCAL_WRITE));
	fill_pattern(src.at, len + 1, 60);
	for (int with_imm = 0; with_imm < 2; with_imm++) {
		memset(dst.at, (int)FRESH, dst.len);
		from = sge_of(&src, 0, len);
		to = sge_of(&dst, 0, GRH + len);
		TRY(post_recv(b.qp, 1, &to, 1));
		wr = ud_wr(2, with_imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND, &from, len ? 1 : 0, ah, b.qp->qp_num,
			   QKEY);
		wr.imm_data = htonl(0xaabbccdd);
		TRY(post(a.qp, &wr));
		TRY(expect_ok(a.scq, 2, IBV_WC_SEND, NULL));
		TRY(expect_ok(b.rcq, 1, IBV_WC_RECV, &wc));
		ENSURE(wc.byte_len == GRH + len, "byte_len %u, expected %zu", wc.byte_len, GRH + len);
		ENSURE(wc.src_qp == a.qp->qp_num, "src_qp %#x, expected %#x", wc.src_qp, a.qp->qp_num);
		ENSURE(wc.qp_num == b.qp->qp_num, "qp_num %#x, expected %#x", wc.qp_num, b.qp->qp_num);
		ENSURE(wc.wc_flags & IBV_WC_GRH, "wc_flags %#x without GRH", wc.wc_flags);
		ENSURE(!!(wc.wc_flags & IBV_WC_WITH_IMM) == with_imm, "wc_flags %#x", wc.wc_flags);
		ENSURE(!with_imm || ntohl(wc.imm_data) == 0xaabbccdd, "imm_data %#x", ntohl(wc.imm_data));
		TRY(grh_is_ours(dst.at));
		TRY(same_pattern(dst.at + GRH, len, 60));
		TRY(guards_untouched(&dst));
	}
	return NULL;
}

/* The receiver replies to the sender with the addresses in the completion and the header. */
static const char *ud_reply(size_t arg)
{
	struct end a, b;
	struct region ra, rb;
	struct ibv_sge sge;
	struct ibv_send_wr wr;
	struct ibv_ah *ah, *back;
	struct ibv_wc wc;

	(void)arg;
	TRY(open_ud(&a, &usual, QKEY));
	TRY(open_ud(&b, &usual, QKEY));
	TRY(new_ah(&ah, a.pd));
	TRY(new_region(&ra, a.pd, 200, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&rb, b.pd, 200, IBV_ACCESS_LOCAL_WRITE));
	sge = sge_of(&rb, 0, 200);
	TRY(post_recv(b.qp, 1, &sge, 1));
	sge = sge_of(&ra, 0, 200);
	TRY(post_recv(a.qp, 2, &sge, 1));
	wr = ud_wr(3, IBV_WR_SEND, NULL, 0, ah, b.qp->qp_num, QKEY);
	TRY(post(a.qp, &wr));
	TRY(expect_ok(b.rcq, 1, IBV_WC_RECV, &wc));
	back = ibv_create_ah_from_wc(b.pd, &wc, (struct ibv_grh *)(void *)rb.at, PORT);
	ENSURE(back, "ibv_create_ah_from_wc: %s", strerror(errno));
	keep(close_ah, back, "address handle");
	fill_pattern(rb.at, 100, 61);
	sge = sge_of(&rb, 0, 100);
	wr = ud_wr(4, IBV_WR_SEND, &sge, 1, back, wc.src_qp, QKEY);
	TRY(post(b.qp, &wr));
	TRY(expect_ok(a.rcq, 2, IBV_WC_RECV, &wc));
	ENSURE(wc.src_qp == b.qp->qp_num, "src_qp %#x, expected %#x", wc.src_qp, b.qp->qp_num);
	return same_pattern(ra.at + GRH, 100, 61);
}

/* A datagram with the wrong Q_Key is dropped without notice; the next one arrives. */
static const char *ud_qkey(size_t arg)
{
	struct end a, b;
	struct region dst;
	struct ibv_sge to;
	struct ibv_send_wr wr;
	struct ibv_ah *ah;
	struct ibv_wc wc;

	(void)arg;
	TRY(open_ud(&a, &usual, 0x777));
	TRY(open_ud(&b, &usual, 0x555));
	TRY(new_ah(&ah, a.pd));
	TRY(new_region(&dst, b.pd, 200, IBV_ACCESS_LOCAL_WRITE));
	to = sge_of(&dst, 0, 200);
	TRY(post_recv(b.qp, 1, &to, 1));
	TRY(post_recv(b.qp, 2, &to, 1));
	wr = ud_wr(3, IBV_WR_SEND_WITH_IMM, NULL, 0, ah, b.qp->qp_num, 0x556);
	wr.imm_data = htonl(1);
	TRY(post(a.qp, &wr));
	TRY(expect_ok(a.scq, 3, IBV_WC_SEND, NULL));
	TRY(no_wc(b.rcq, QUIET_MS));
	/* with the high bit set, the Q_Key of the sender is sent */
	wr.wr.ud.remote_qkey = 0x80000555u;
	TRY(post(a.qp, &wr));
	TRY(expect_ok(a.scq, 3, IBV_WC_SEND, NULL));
	TRY(no_wc(b.rcq, QUIET_MS));
	wr.wr.ud.remote_qkey = 0x555;
	wr.imm_data = htonl(2);
	TRY(post(a.qp, &wr));
	TRY(expect_ok(a.scq, 3, IBV_WC_SEND, NULL));
	TRY(expect_ok(b.rcq, 1, IBV_WC_RECV, &wc));
	ENSURE(ntohl(wc.imm_data) == 2, "the wrong datagram was delivered");
	return no_wc(b.rcq, 10);
}

/* No receive is posted, or the queue pair does not exist: the datagram is lost, and no queue pair fails. */
static const char *ud_lost(size_t arg)
{
	struct end a, b;
	struct ibv_send_wr wr;
	struct region dst;
	struct ibv_sge to;
	struct ibv_ah *ah;

	(void)arg;
	TRY(open_ud(&a, &usual, QKEY));
	TRY(open_ud(&b, &usual, QKEY));
	TRY(new_ah(&ah, a.pd));
	TRY(new_region(&dst, b.pd, GRH, IBV_ACCESS_LOCAL_WRITE));
	wr = ud_wr(1, IBV_WR_SEND, NULL, 0, ah, b.qp->qp_num, QKEY);
	TRY(post(a.qp, &wr));
	TRY(expect_ok(a.scq, 1, IBV_WC_SEND, NULL));
	TRY(no_wc(b.rcq, QUIET_MS));
	wr = ud_wr(2, IBV_WR_SEND, NULL, 0, ah, b.qp->qp_num ^ 0x55, QKEY);
	TRY(post(a.qp, &wr));
	TRY(expect_ok(a.scq, 2, IBV_WC_SEND, NULL));
	to = sge_of(&dst, 0, GRH);
	TRY(post_recv(b.qp, 3, &to, 1));
	TRY(no_wc(b.rcq, QUIET_MS));
	wr = ud_wr(4, IBV_WR_SEND, NULL, 0, ah, b.qp->qp_num, QKEY);
	TRY(post(a.qp, &wr));
	TRY(expect_ok(a.scq, 4, IBV_WC_SEND, NULL));
	TRY(expect_ok(b.rcq, 3, IBV_WC_RECV, NULL));
	TRY(state_is(a.qp, IBV_QPS_RTS));
	return state_is(b.qp, IBV_QPS_RTS);
}

/* There are never more datagrams under way than posted receives, so all arrive completely and once. */
static const char *ud_stream(size_t count)
{
	struct end a, b;
	struct region src, dst;
	struct ibv_ah *ah;
	struct ibv_wc wc;
	const size_t len = 900;

	TRY(open_ud(&a, &usual, QKEY));
	TRY(open_ud(&b, &usual, QKEY));
	TRY(new_ah(&ah, a.pd));
	TRY(new_region(&src, a.pd, len, 0));
	TRY(new_region(&dst, b.pd, 8 * (GRH + len), IBV_ACCESS_LOCAL_WRITE));
	for (uint32_t round = 0; round < count / 8; round++) {
		fill_pattern(src.at, len, round);
		for (uint64_t i = 0; i < 8; i++) {
			struct ibv_sge to = sge_of(&dst, i * (GRH + len), GRH + len);

			TRY(post_recv(b.qp, i, &to, 1));
		}
		for (uint64_t i = 0; i < 8; i++) {
			struct ibv_sge from = sge_of(&src, 0, len);
			struct ibv_send_wr wr = ud_wr(i, IBV_WR_SEND, &from, 1, ah, b.qp->qp_num, QKEY);

			if (i < 7)
				wr.send_flags = 0;
			TRY(post(a.qp, &wr));
		}
		TRY(expect_ok(a.scq, 7, IBV_WC_SEND, NULL));
		for (uint64_t i = 0; i < 8; i++) {
			TRY(expect_ok(b.rcq, i, IBV_WC_RECV, &wc));
			TRY(same_pattern(dst.at + i * (GRH + len) + GRH, len, round));
		}
	}
	return NULL;
}

/* Datagram queue pairs of one process do not receive each other's datagrams. */
static const char *ud_many_qps(size_t count)
{
	struct end e[32], a;
	struct region dst;
	struct ibv_sge to;
	struct ibv_ah *ah;
	struct ibv_wc wc;
	struct want w = { .cq_depth = 16, .send_wr = 4, .recv_wr = 4, .sge = 1 };

	TRY(open_ud(&a, &usual, QKEY));
	TRY(new_ah(&ah, a.pd));
	for (size_t i = 0; i < count; i++) {
		TRY(open_ud(&e[i], &w, QKEY));
		TRY(new_region(&dst, e[i].pd, GRH, IBV_ACCESS_LOCAL_WRITE));
		to = sge_of(&dst, 0, GRH);
		TRY(post_recv(e[i].qp, i, &to, 1));
		TRY(post_recv(e[i].qp, i, &to, 1));
	}
	for (size_t i = count; i-- > 0;) {
		struct ibv_send_wr wr = ud_wr(i, IBV_WR_SEND_WITH_IMM, NULL, 0, ah, e[i].qp->qp_num, QKEY);

		wr.imm_data = htonl((uint32_t)i);
		TRY(post(a.qp, &wr));
		TRY(expect_ok(a.scq, i, IBV_WC_SEND, NULL));
	}
	for (size_t i = 0; i < count; i++) {
		TRY(expect_ok(e[i].rcq, i, IBV_WC_RECV, &wc));
		ENSURE(ntohl(wc.imm_data) == i, "datagram for %u arrived at %zu", ntohl(wc.imm_data), i);
		TRY(no_wc(e[i].rcq, 1));
	}
	return NULL;
}

/* The extended interface: ibv_wr_* between ibv_wr_start and ibv_wr_complete, and completions with ibv_cq_ex. */
static const char *open_extended(struct end *e, struct ibv_cq_ex **cq)
{
	struct ibv_cq_init_attr_ex cq_init = { .cqe = 256, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
				  IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
				  IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
		.cap = { .max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 4, .max_recv_sge = 4,
			 .max_inline_data = 64 },
	};

	*e = (struct end){ 0 };
	e->pd = new_pd();
	ENSURE(e->pd, "ibv_alloc_pd: %s", strerror(errno));
	*cq = ibv_create_cq_ex(device, &cq_init);
	if (!*cq && errno == EOPNOTSUPP)
		SKIP("no extended completion queues");
	ENSURE(*cq, "ibv_create_cq_ex: %s", strerror(errno));
	e->scq = e->rcq = ibv_cq_ex_to_cq(*cq);
	keep(close_cq, e->scq, "completion queue");
	init.send_cq = init.recv_cq = e->scq;
	init.pd = e->pd;
	e->qp = ibv_create_qp_ex(device, &init);
	if (!e->qp && errno == EOPNOTSUPP)
		SKIP("no extended queue pairs");
	ENSURE(e->qp, "ibv_create_qp_ex: %s", strerror(errno));
	keep(close_qp, e->qp, "queue pair");
	return NULL;
}

/* Polls one completion with ibv_start_poll, which must be successful. */
static const char *next_ex(struct ibv_cq_ex *cq, uint64_t wr_id, enum ibv_wc_opcode opcode, uint32_t byte_len,
			   uint32_t *imm)
{
	struct ibv_poll_cq_attr attr = { 0 };
	uint64_t end = now_ms() + WAIT_MS, got_id;
	enum ibv_wc_opcode got_opcode;
	enum ibv_wc_status status;
	uint32_t got_len = byte_len, qpn;
	int rc;

	while ((rc = ibv_start_poll(cq, &attr)) == ENOENT && now_ms() < end)
		sched_yield();
	ENSURE(!rc, "ibv_start_poll: %s", strerror(rc));
	got_id = cq->wr_id;
	status = cq->status;
	got_opcode = ibv_wc_read_opcode(cq);
	qpn = ibv_wc_read_qp_num(cq);
	if (opcode & IBV_WC_RECV)
		got_len = ibv_wc_read_byte_len(cq);
	if (imm)
		*imm = ntohl(ibv_wc_read_imm_data(cq));
	ibv_end_poll(cq);
	ENSURE(got_id == wr_id && status == IBV_WC_SUCCESS, "wr_id %llu status %d, expected wr_id %llu",
	       (unsigned long long)got_id, status, (unsigned long long)wr_id);
	ENSURE(got_opcode == opcode, "opcode %d, expected %d", got_opcode, opcode);
	ENSURE(got_len == byte_len, "byte_len %u, expected %u", got_len, byte_len);
	ENSURE(qpn != 0, "the completion has no qp_num");
	return NULL;
}

static const char *rc_extended(size_t arg)
{
	struct ibv_cq_ex *cqa, *cqb;
	struct ibv_qp_ex *qp;
	struct region src, dst, cell;
	struct ibv_sge to, pieces[2];
	struct ibv_data_buf bufs[2];
	struct pair p;
	uint64_t word = 41;
	uint32_t imm;
	int rc;

	(void)arg;
	TRY(open_device());
	TRY(open_extended(&p.a, &cqa));
	TRY(open_extended(&p.b, &cqb));
	TRY(connect_ends(&p.a, &p.b, &usual));
	qp = ibv_qp_to_qp_ex(p.a.qp);
	ENSURE(qp, "ibv_qp_to_qp_ex returns NULL");
	TRY(new_region(&src, p.a.pd, 4096, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&dst, p.b.pd, 8192,
		       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
	TRY(new_region(&cell, p.b.pd, 8, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC));
	memcpy(cell.at, &word, 8);
	fill_pattern(src.at, 4096, 70);
	to = sge_of(&dst, 0, 4096);
	TRY(post_recv(p.b.qp, 1, &to, 1));
	TRY(post_recv(p.b.qp, 2, NULL, 0));

	ibv_wr_start(qp);
	qp->wr_id = 10; /* a Send of two pieces */
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp);
	pieces[0] = sge_of(&src, 0, 100);
	pieces[1] = sge_of(&src, 100, 3996);
	ibv_wr_set_sge_list(qp, 2, pieces);
	qp->wr_id = 11; /* an inline Write, unsignaled */
	qp->wr_flags = IBV_SEND_INLINE;
	ibv_wr_rdma_write(qp, dst.mr->rkey, (uintptr_t)dst.at + 4096);
	bufs[0] = (struct ibv_data_buf){ src.at, 20 };
	bufs[1] = (struct ibv_data_buf){ src.at + 20, 44 };
	ibv_wr_set_inline_data_list(qp, 2, bufs);
	qp->wr_id = 12; /* a Write with immediate data */
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write_imm(qp, dst.mr->rkey, (uintptr_t)dst.at + 4160, htonl(99));
	ibv_wr_set_sge(qp, src.mr->lkey, (uintptr_t)src.at + 64, 1000);
	rc = ibv_wr_complete(qp);
	ENSURE(!rc, "ibv_wr_complete: %s", strerror(rc));
	TRY(next_ex(cqb, 1, IBV_WC_RECV, 4096, NULL));
	TRY(next_ex(cqb, 2, IBV_WC_RECV_RDMA_WITH_IMM, 1000, &imm));
	ENSURE(imm == 99, "imm_data %u", imm);
	TRY(next_ex(cqa, 10, IBV_WC_SEND, 0, NULL));
	TRY(next_ex(cqa, 12, IBV_WC_RDMA_WRITE, 0, NULL));
	TRY(same_pattern(dst.at, 4096, 70));
	TRY(same_pattern(dst.at + 4096, 1064, 70));

	/* an aborted batch has no effect */
	ibv_wr_start(qp);
	qp->wr_id = 13;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp);
	ibv_wr_set_sge(qp, src.mr->lkey, (uintptr_t)src.at, 8);
	ibv_wr_abort(qp);

	ibv_wr_start(qp);
	qp->wr_id = 14;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_atomic_fetch_add(qp, cell.mr->rkey, (uintptr_t)cell.at, 1);
	ibv_wr_set_sge(qp, src.mr->lkey, (uintptr_t)src.at, 8);
	qp->wr_id = 15;
	ibv_wr_rdma_read(qp, dst.mr->rkey, (uintptr_t)dst.at + 100);
	ibv_wr_set_sge(qp, src.mr->lkey, (uintptr_t)src.at + 8, 500);
	rc = ibv_wr_complete(qp);
	ENSURE(!rc, "ibv_wr_complete: %s", strerror(rc));
	TRY(next_ex(cqa, 14, IBV_WC_FETCH_ADD, 0, NULL));
	TRY(next_ex(cqa, 15, IBV_WC_RDMA_READ, 0, NULL));
	memcpy(&word, src.at, 8);
	ENSURE(word == 41, "atomic returned %llu", (unsigned long long)word);
	memcpy(&word, cell.at, 8);
	ENSURE(word == 42, "atomic left %llu", (unsigned long long)word);
	return same_pattern_from(src.at + 8, 500, 70, 100);
}

/* Adds a Send of 8 bytes to the requests since ibv_wr_start. */
static void add_send(struct ibv_qp_ex *qp, const struct region *from, uint64_t id)
{
	qp->wr_id = id;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp);
	ibv_wr_set_sge(qp, from->mr->lkey, (uintptr_t)from->at, 8);
}

/* ibv_wr_post(3): if ibv_wr_complete fails, because the queue has no room or a request is invalid, none of the requests is posted. */
static const char *rc_extended_refused(size_t arg)
{
	struct ibv_cq_ex *cqa, *cqb;
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct ibv_qp_ex *qp;
	struct region src, dst;
	struct ibv_sge to;
	struct pair p;
	uint64_t posted = 0;

	(void)arg;
	TRY(open_device());
	TRY(open_extended(&p.a, &cqa));
	TRY(open_extended(&p.b, &cqb));
	TRY(connect_ends(&p.a, &p.b, &usual));
	qp = ibv_qp_to_qp_ex(p.a.qp);
	ENSURE(qp, "ibv_qp_to_qp_ex returns NULL");
	TRY(new_region(&src, p.a.pd, 4096, IBV_ACCESS_LOCAL_WRITE));
	ENSURE(!ibv_query_qp(p.a.qp, &attr, IBV_QP_CAP, &init), "ibv_query_qp");
	/* The second of three requests has more inline data than the queue pair supports. */
	ibv_wr_start(qp);
	add_send(qp, &src, 1000);
	qp->wr_id = 1001;
	qp->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
	ibv_wr_send(qp);
	ibv_wr_set_inline_data(qp, src.at, init.cap.max_inline_data + 1);
	add_send(qp, &src, 1002);
	ENSURE(ibv_wr_complete(qp), "ibv_wr_complete accepts too much inline data");
	/* The peer has no receive, so the requests stay in the queue. The loop leaves room for one more request. */
	for (; posted + 1 < init.cap.max_send_wr; posted++) {
		ibv_wr_start(qp);
		add_send(qp, &src, posted);
		ENSURE(!ibv_wr_complete(qp), "request %llu is refused", (unsigned long long)posted);
	}
	ibv_wr_start(qp);
	for (uint64_t i = 0; i < 3; i++)
		add_send(qp, &src, 2000 + i);
	ENSURE(ibv_wr_complete(qp), "ibv_wr_complete accepts more requests than have room");
	ibv_wr_start(qp);
	add_send(qp, &src, posted++);
	ENSURE(!ibv_wr_complete(qp), "the last request that has room is refused");
	/* The receiver gets those that were posted, and no others. */
	TRY(new_region(&dst, p.b.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	to = sge_of(&dst, 0, 64);
	for (uint64_t i = 0; i < posted; i++) {
		TRY(post_recv(p.b.qp, i, &to, 1));
		TRY(next_ex(cqb, i, IBV_WC_RECV, 8, NULL));
		TRY(next_ex(cqa, i, IBV_WC_SEND, 0, NULL));
	}
	TRY(post_recv(p.b.qp, posted, &to, 1));
	TRY(no_wc(p.b.rcq, QUIET_MS));
	return no_wc(p.a.scq, 1);
}

enum { BATCHES = 20000, BATCH_THREADS = 3 };

struct batches {
	struct ibv_qp_ex *qp;
	const struct region *from, *to;
	atomic_int *under_way;
	uint64_t thread;
	int failed;
};

/* Each batch is a Write of the thread's number to the place of the thread. */
static void *post_batches(void *arg)
{
	struct batches *b = arg;
	uint64_t at = 8 * b->thread;

	for (uint64_t i = 0; i < BATCHES && !b->failed; i++) {
		/* The queue pair has room for 64 requests. */
		while (atomic_fetch_add(b->under_way, 1) >= 48) {
			atomic_fetch_sub(b->under_way, 1);
			sched_yield();
		}
		ibv_wr_start(b->qp);
		b->qp->wr_id = b->thread;
		b->qp->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_rdma_write(b->qp, b->to->mr->rkey, (uintptr_t)b->to->at + at);
		ibv_wr_set_sge(b->qp, b->from->mr->lkey, (uintptr_t)b->from->at + at, 8);
		b->failed = ibv_wr_complete(b->qp);
	}
	return NULL;
}

/* ibv_wr_post(3): a thread that calls ibv_wr_start waits until no other one is between ibv_wr_start and ibv_wr_complete. */
static const char *rc_extended_threads(size_t arg)
{
	static atomic_int under_way;
	struct batches all[BATCH_THREADS];
	pthread_t threads[BATCH_THREADS];
	uint64_t done[BATCH_THREADS] = { 0 }, count = 0, until;
	struct ibv_cq_ex *cqa, *cqb;
	struct region src, dst;
	struct ibv_wc wc;
	struct pair p;

	(void)arg;
	TRY(open_device());
	TRY(open_extended(&p.a, &cqa));
	TRY(open_extended(&p.b, &cqb));
	TRY(connect_ends(&p.a, &p.b, &usual));
	TRY(new_region(&src, p.a.pd, 8 * BATCH_THREADS, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&dst, p.b.pd, 8 * BATCH_THREADS, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	for (uint64_t i = 0; i < BATCH_THREADS; i++) {
		memset(src.at + 8 * i, (int)i + 1, 8);
		all[i] = (struct batches){ ibv_qp_to_qp_ex(p.a.qp), &src, &dst, &under_way, i, 0 };
		ENSURE(!pthread_create(&threads[i], NULL, post_batches, &all[i]), "pthread_create");
	}
	until = now_ms() + WAIT_MS;
	const char *why = NULL;
	while (count < BATCH_THREADS * (uint64_t)BATCHES && !why) {
		int n = ibv_poll_cq(p.a.scq, 1, &wc);

		if (n == 1 && (wc.status != IBV_WC_SUCCESS || wc.wr_id >= BATCH_THREADS))
			why = "a request fails, or has another wr_id";
		else if (n == 1)
			done[wc.wr_id]++, count++, atomic_fetch_sub(&under_way, 1), until = now_ms() + WAIT_MS;
		else if (n < 0 || now_ms() > until)
			why = "requests do not complete";
	}
	/* After a failure the threads must not wait for completions. */
	atomic_store(&under_way, why ? INT_MIN / 2 : 0);
	for (size_t i = 0; i < BATCH_THREADS; i++)
		pthread_join(threads[i], NULL);
	TRY(why);
	for (size_t i = 0; i < BATCH_THREADS; i++)
		ENSURE(!all[i].failed && done[i] == BATCHES, "thread %zu: %d, %llu completions", i, all[i].failed,
		       (unsigned long long)done[i]);
	ENSURE(!memcmp(src.at, dst.at, 8 * BATCH_THREADS), "a request of one thread has the memory of another");
	return no_wc(p.a.scq, 1);
}

/*
 * A program posts until the send queue is full, and only then polls. The completion queue has as many entries as the send queue, which is
 * enough because a request uses its place until its completion is polled.
 */
static const char *post_until_full(size_t arg)
{
	struct want w = { .send_wr = 16 };
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct region src, dst;
	struct ibv_send_wr wr, *bad;
	struct ibv_sge from;
	struct pair p;
	uint64_t posted = 0, done = 0;

	(void)arg;
	TRY(open_device());
	w.cq_depth = 16;
	TRY(open_pair(&p, &w));
	ENSURE(!ibv_query_qp(p.a.qp, &attr, IBV_QP_CAP, &init), "ibv_query_qp");
	if (p.a.scq->cqe < (int)init.cap.max_send_wr)
		SKIP("the send queue has more places than requested");
	TRY(new_region(&src, p.a.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&dst, p.b.pd, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	from = sge_of(&src, 0, 64);
	for (int round = 0; round < 50; round++) {
		struct ibv_wc wc;
		int rc = 0;

		for (int i = 0; i < 1000 && !rc; i++) {
			wr = rdma_wr(posted, IBV_WR_RDMA_WRITE, &from, 1, &dst, 0);
			rc = ibv_post_send(p.a.qp, &wr, &bad);
			posted += !rc;
			/* Time for the completions. */
			if (i % 8 == 7)
				sleep_ms(1);
		}
		ENSURE(rc == ENOMEM, "after %llu requests: %s", (unsigned long long)posted, rc ? strerror(rc) : "never full");
		for (; done < posted; done++) {
			TRY(next_wc(p.a.scq, &wc, WAIT_MS));
			TRY(wc_is(&wc, done, IBV_WC_SUCCESS));
		}
	}
	return NULL;
}

/* A message that waits for a receive of a shared receive queue is received soon after the receive is posted. */
static const char *srq_posted_late(size_t arg)
{
	struct want w = { .srq = true };
	struct region src, dst;
	struct ibv_send_wr wr;
	struct ibv_sge from, to;
	struct pair p;
	uint64_t begin;

	(void)arg;
	TRY(open_device());
	TRY(open_pair(&p, &w));
	TRY(new_region(&src, p.a.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&dst, p.b.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	from = sge_of(&src, 0, 64);
	to = sge_of(&dst, 0, 64);
	for (uint64_t i = 0; i < 3; i++) {
		wr = send_wr(i, IBV_WR_SEND, &from, 1);
		TRY(post(p.a.qp, &wr));
		sleep_ms(200);
		begin = now_ms();
		TRY(post_srq_recv(p.b.srq, i, &to, 1));
		TRY(expect_ok(p.b.rcq, i, IBV_WC_RECV, NULL));
		TRY(expect_ok(p.a.scq, i, IBV_WC_SEND, NULL));
		ENSURE(now_ms() - begin < 100, "%llu ms", (unsigned long long)(now_ms() - begin));
	}
	return NULL;
}

#define MIB (1024u * 1024u)

static const struct test tests[] = {
	{ "device", device_is_usable, 0, 0, false },
	{ "rc_send_0", rc_send, 0, 0, false },
	{ "rc_send_1", rc_send, 1, 0, false },
	{ "rc_send_4096", rc_send, 4096, 0, false },
	{ "rc_send_1M+3", rc_send, MIB + 3, 0, false },
	{ "rc_send_64M", rc_send, 64 * MIB, 180, false },
	{ "rc_send_imm_0", rc_send_imm, 0, 0, false },
	{ "rc_send_imm_4096", rc_send_imm, 4096, 0, false },
	{ "rc_send_multi_sge", rc_send_multi_sge, 0, 0, false },
	{ "rc_send_inv", rc_send_inv, 0, 0, false },
	{ "rc_inline_2", rc_inline, 2, 0, false },
	{ "rc_inline_64", rc_inline, 64, 0, false },
	{ "rc_inline_unrequested", rc_inline_unrequested, 256, 0, false },
	{ "rc_unsignaled", rc_unsignaled, 64, 0, false },
	{ "rc_chain", rc_chain, 64, 0, false },
	{ "rc_events", rc_events, 20, 0, false },
	{ "rc_answered", rc_answered, 200, 0, false },
	{ "rc_solicited", rc_solicited, 0, 0, false },
	{ "rc_write_0", rc_write, 0, 0, false },
	{ "rc_write_1", rc_write, 1, 0, false },
	{ "rc_write_4096", rc_write, 4096, 0, false },
	{ "rc_write_1M+3", rc_write, MIB + 3, 0, false },
	{ "rc_write_64M", rc_write, 64 * MIB, 180, false },
	{ "rc_write_to_idle_process", rc_write_to_idle_process, 300000, 0, false },
	{ "rc_write_imm_0", rc_write_imm, 0, 0, false },
	{ "rc_write_imm_4096", rc_write_imm, 4096, 0, false },
	{ "rc_write_imm_1M+3", rc_write_imm, MIB + 3, 0, false },
	{ "rc_read_0", rc_read, 0, 0, false },
	{ "rc_read_1", rc_read, 1, 0, false },
	{ "rc_read_4096", rc_read, 4096, 0, false },
	{ "rc_read_1M+3", rc_read, MIB + 3, 0, false },
	{ "rc_read_64M", rc_read, 64 * MIB, 180, false },
	{ "rc_read_multi_sge", rc_read_multi_sge, 0, 0, false },
	{ "rc_many_reads", rc_many_reads, 100, 0, false },
	{ "rc_fence", rc_fence, 32, 0, false },
	{ "rc_fetch_add", rc_fetch_add, 0, 0, false },
	{ "rc_cmp_swap_equal", rc_cmp_swap, 1, 0, false },
	{ "rc_cmp_swap_unequal", rc_cmp_swap, 0, 0, false },
	{ "rc_atomic_counter", rc_atomic_counter, 100, 0, false },
	{ "rc_both_ways", rc_both_ways, 1500, 0, false },
	{ "rc_many_qps", rc_many_qps, 64, 0, false },
	{ "rc_to_itself", rc_to_itself, 70000, 0, false },
	{ "rc_by_lid", rc_by_lid, 4096, 0, false },
	{ "rc_extended", rc_extended, 0, 0, false },
	{ "rc_extended_refused", rc_extended_refused, 0, 0, false },
	{ "rc_extended_threads", rc_extended_threads, 0, 0, false },
	{ "srq_posted_late", srq_posted_late, 0, 0, false },
	{ "post_until_full", post_until_full, 0, 0, false },
	{ "rc_rnr_waits", rc_rnr_waits, 100, 0, false },
	{ "rc_rnr_gives_up_at_once", rc_rnr_gives_up, 0, 0, false },
	{ "rc_rnr_gives_up_later", rc_rnr_gives_up, 3, 0, false },
	{ "rc_write_bad_rkey", rc_remote_error, IBV_WR_RDMA_WRITE, 0, false },
	{ "rc_write_imm_bad_rkey", rc_remote_error, IBV_WR_RDMA_WRITE_WITH_IMM, 0, false },
	{ "rc_read_bad_rkey", rc_remote_error, IBV_WR_RDMA_READ, 0, false },
	{ "rc_cmp_swap_bad_rkey", rc_remote_error, IBV_WR_ATOMIC_CMP_AND_SWP, 0, false },
	{ "rc_fetch_add_bad_rkey", rc_remote_error, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, false },
	{ "rc_receive_too_small", rc_receive_too_small, 0, 0, false },
	{ "rc_local_error", rc_local_error, 0, 0, false },
	{ "rc_flush", rc_flush, 100, 0, false },
	{ "rc_reset_and_reconnect", rc_reset_and_reconnect, 5, 0, false },
	{ "rc_peer_destroyed", rc_peer_destroyed, 0, 0, false },
	{ "rc_peer_reset", rc_peer_reset, 20, 0, false },
	{ "srq_limit", srq_limit, 0, 0, false },
	{ "srq_last_wqe", srq_last_wqe, 0, 0, false },
	{ "uc_send_1", uc_send, 1, 0, false },
	{ "uc_send_100000", uc_send, 100000, 0, false },
	{ "uc_write_4096", uc_write, 4096, 0, false },
	{ "uc_write_imm_100000", uc_write_imm, 100000, 0, false },
	{ "ud_send_0", ud_send, 0, 0, false },
	{ "ud_send_1", ud_send, 1, 0, false },
	{ "ud_send_1000", ud_send, 1000, 0, false },
	{ "ud_send_mtu", ud_send, SIZE_MAX, 0, false },
	{ "ud_reply", ud_reply, 0, 0, false },
	{ "ud_qkey", ud_qkey, 0, 0, false },
	{ "ud_lost", ud_lost, 0, 0, false },
	{ "ud_stream", ud_stream, 2000, 0, false },
	{ "ud_many_qps", ud_many_qps, 32, 0, false },
};

/* Prints the device and its addresses, one line each, for other programs. */
static int describe(void)
{
	const char *reason = open_device();

	if (reason) {
		fprintf(stderr, "%s\n", reason);
		return 1;
	}
	printf("device %s\n", ibv_get_device_name(device->device));
	for (uint32_t i = 0; i < (uint32_t)port_attr.gid_tbl_len; i++) {
		char text[INET6_ADDRSTRLEN];
		struct ibv_gid_entry entry;

		if (ibv_query_gid_ex(device, PORT, i, &entry, 0))
			continue;
		inet_ntop(AF_INET6, entry.gid.raw, text, sizeof text);
		printf("gid %u %s ifindex %u\n", i, text, entry.ndev_ifindex);
	}
	return ibv_close_device(device) ? 1 : 0;
}

int main(int argc, char **argv)
{
	if (has_flag(argc, argv, "--device"))
		return describe();
	return run_tests(tests, COUNT(tests), argc, argv);
}
