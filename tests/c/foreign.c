/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Tests the device against a second implementation of docs/datagram-iwarp.md, in both directions. The second
 * implementation is this program: it was written from the document, shares no code with the device, and sends and
 * receives on a UDP socket. In all tests, everything that a test receives from the device is checked against the rules
 * of the document (`check_data`, `check_packet`).
 */
#include "dgrams.h"

#include "crc.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

/* ---------------------------------------------------------------- fields */

static void put16(uint8_t *at, uint16_t v) { v = htons(v); memcpy(at, &v, 2); }
static void put32(uint8_t *at, uint32_t v) { v = htonl(v); memcpy(at, &v, 4); }
static void put64(uint8_t *at, uint64_t v) { put32(at, (uint32_t)(v >> 32)); put32(at + 4, (uint32_t)v); }
static uint16_t get16(const uint8_t *at) { return (uint16_t)(at[0] << 8 | at[1]); }
static uint32_t get32(const uint8_t *at) { return (uint32_t)get16(at) << 16 | get16(at + 2); }
static uint64_t get64(const uint8_t *at) { return (uint64_t)get32(at) << 32 | get32(at + 4); }

/* Appends the CRC32C, least significant byte first. */
static size_t seal(uint8_t *d, size_t len)
{
	uint32_t crc = crc32c(d, len);

	for (int i = 0; i < 4; i++)
		d[len + (size_t)i] = (uint8_t)(crc >> (8 * i));
	return len + 4;
}

static bool sealed(const uint8_t *d, size_t len)
{
	uint8_t again[4];
	uint32_t crc;

	if (len < 4)
		return false;
	crc = crc32c(d, len - 4);
	for (int i = 0; i < 4; i++)
		again[i] = (uint8_t)(crc >> (8 * i));
	return !memcmp(again, d + len - 4, 4);
}

enum { I = 1, Z = 2, P = 4 };			/* flags of a data datagram */
enum { D = 1, C = 2, R = 4, A = 8 };		/* flags of a packet */
enum { K = 1, S = 2 };				/* further flags of a packet, in byte 20 */
enum { WRITE_OP = 0, READ_REQUEST = 1, READ_RESPONSE = 2, SEND_OP = 3, TERMINATE = 7, ATOMIC_REQUEST = 10,
       ATOMIC_RESPONSE = 11, RECORD = 15, CONTROL = 15 };
enum { REPORT = 2, COOKIE = 11 };

/* A data datagram: the fields of section 2. */
struct data {
	uint8_t flags, sub, attr, dst, src, opcode, kind;
	bool tagged, last;
	uint16_t epoch, seg;
	uint32_t qkey, id, length, offset, imm, stag, qn, msn, mo;
	uint64_t to;
	const uint8_t *payload;
	size_t len;
};

static size_t data_bytes(uint8_t *out, const struct data *d)
{
	size_t at = 26;

	memset(out, 0, at);
	out[0] = 0xdc;
	out[1] = 0x10 | d->flags;
	put16(out + 2, d->epoch);
	put32(out + 4, d->qkey);
	put32(out + 8, d->id);
	put32(out + 12, d->length);
	put32(out + 16, d->offset);
	out[20] = d->sub;
	out[21] = d->attr;
	out[22] = d->dst;
	out[23] = d->src;
	put16(out + 24, d->seg);
	if (d->flags & I) {
		put32(out + at, d->imm);
		put32(out + at + 4, 0);
		at += 8;
	}
	out[at++] = (uint8_t)(d->tagged << 7 | d->last << 6 | 1);
	out[at++] = 0x40 | d->opcode;
	if (d->tagged) {
		put32(out + at, d->stag);
		put64(out + at + 4, d->to);
		at += 12;
	} else {
		put32(out + at, (uint32_t)d->kind << 24);
		put32(out + at + 4, d->qn);
		put32(out + at + 8, d->msn);
		put32(out + at + 12, d->mo);
		at += 16;
	}
	if (d->len)
		memcpy(out + at, d->payload, d->len);
	return at + d->len;
}

/* Parses a data datagram without its CRC, and checks every rule of section 2 and the table of section 3. */
static const char *check_data(const uint8_t *in, size_t len, struct data *d, bool reliable)
{
	size_t at = 26;

	ENSURE(len >= 40 && in[0] == 0xdc && in[1] >> 4 == 1, "%zu bytes that begin with %02x %02x", len, in[0], in[1]);
	*d = (struct data){ .flags = in[1] & 15, .epoch = get16(in + 2), .qkey = get32(in + 4), .id = get32(in + 8),
			    .length = get32(in + 12), .offset = get32(in + 16), .sub = in[20], .attr = in[21], .dst = in[22],
			    .src = in[23], .seg = get16(in + 24) };
	ENSURE(!(d->flags & 8), "the reserved flag is set");
	ENSURE(d->epoch, "the epoch is 0");
	if (d->flags & I) {
		d->imm = get32(in + at);
		ENSURE(get32(in + at + 4) == 0, "the bytes after the immediate data are not 0");
		at += 8;
	}
	d->tagged = in[at] >> 7;
	d->last = in[at] >> 6 & 1;
	ENSURE((in[at] & 0x3f) == 1, "DDP control %02x", in[at]);
	ENSURE(in[at + 1] >> 6 == 1 && !(in[at + 1] & 0x30), "RDMAP control %02x", in[at + 1]);
	d->opcode = in[at + 1] & 15;
	at += 2;
	ENSURE(len >= at + (d->tagged ? 12 : 16), "no whole DDP header in %zu bytes", len);
	if (d->tagged) {
		d->stag = get32(in + at);
		d->to = get64(in + at + 4);
		at += 12;
		ENSURE(d->to >= d->offset, "the base address is below zero");
	} else {
		d->kind = in[at];
		d->qn = get32(in + at + 4);
		d->msn = get32(in + at + 8);
		d->mo = get32(in + at + 12);
		at += 16;
		ENSURE(d->mo == d->offset, "MO %u, offset %u", d->mo, d->offset);
		ENSURE(d->msn == d->id || (d->opcode == CONTROL && d->kind == COOKIE), "MSN %u, id %u", d->msn, d->id);
	}
	d->payload = in + at;
	d->len = len - at;
	ENSURE(d->offset + d->len <= d->length, "%u + %zu of %u", d->offset, d->len, d->length);
	ENSURE(!d->last || d->offset + d->len == d->length, "the flag L is set before the end of the message");
	ENSURE(!(d->flags & Z) || (d->last && !d->len), "a commit has payload");
	ENSURE(!(d->flags & P) || !d->last, "a parity datagram has the flag L");
	ENSURE(d->seg || !(d->attr >> 4), "a group has no segment length");
	if (d->tagged) {
		ENSURE(d->opcode == WRITE_OP || d->opcode == READ_RESPONSE || (d->opcode == RECORD && (d->sub == 1 || d->sub == 2)),
		       "tagged opcode %u, sub %u", d->opcode, d->sub);
	} else {
		static const uint8_t queue[16] = { [READ_REQUEST] = 1, [TERMINATE] = 2, [ATOMIC_REQUEST] = 1,
						   [ATOMIC_RESPONSE] = 3, [CONTROL] = 4 };

		ENSURE(d->qn == queue[d->opcode], "opcode %u on queue %u", d->opcode, d->qn);
		ENSURE(d->opcode != CONTROL || !reliable, "there is a control message on RD");
		ENSURE(d->sub == (d->opcode == TERMINATE ? 3 : 0), "opcode %u, sub %u", d->opcode, d->sub);
	}
	return NULL;
}

/* ---------------------------------------------------------------- the peer */

struct peer {
	int fd;
	uint32_t qpn;
	uint16_t epoch;
	uint32_t id;
	uint8_t dst; /* index of the device's queue pair */
	/* For reliable datagrams. */
	uint32_t token, echo, seq, base, ack, time_echo;
	bool knows; /* `ack` is valid */
	uint8_t in[65536];
	size_t in_len;
};

static struct peer foreign;

static int close_peer(void *p) { return close(((struct peer *)p)->fd); }

/* Opens a socket at the address of the device, and sets the state of a peer that sends to queue pair `qpn`. */
static const char *open_peer(struct peer *p, uint32_t qpn)
{
	struct sockaddr_storage own = { 0 };
	struct sockaddr_in *four = (struct sockaddr_in *)&own;
	struct sockaddr_in6 *six = (struct sockaddr_in6 *)&own;
	bool old = gid_is_ipv4(&local_gid);
	socklen_t len = old ? sizeof *four : sizeof *six;

	memset(p, 0, sizeof *p);
	own.ss_family = old ? AF_INET : AF_INET6;
	if (old)
		memcpy(&four->sin_addr, local_gid.raw + 12, 4);
	else
		memcpy(&six->sin6_addr, local_gid.raw, 16);
	p->fd = socket(own.ss_family, SOCK_DGRAM, 0);
	ENSURE(p->fd >= 0, "socket: %s", strerror(errno));
	keep(close_peer, p, "socket");
	ENSURE(!bind(p->fd, (struct sockaddr *)&own, len), "bind: %s", strerror(errno));
	ENSURE(!getsockname(p->fd, (struct sockaddr *)&own, &len), "getsockname: %s", strerror(errno));
	p->qpn = (uint32_t)ntohs(four->sin_port) << 8 | 5; /* sockaddr_in and sockaddr_in6 have the port at the same offset */
	four->sin_port = htons((uint16_t)(qpn >> 8));
	ENSURE(!connect(p->fd, (struct sockaddr *)&own, len), "connect: %s", strerror(errno));
	p->dst = (uint8_t)qpn;
	p->epoch = 0x2718;
	p->id = 0xfffffffe; /* wraps to 0 after two messages */
	p->token = 0xfeedf00d;
	p->seq = p->base = 0xffffffff;
	return NULL;
}

static const char *transmit(const struct peer *p, uint8_t *d, size_t len)
{
	len = seal(d, len);
	ENSURE(send(p->fd, d, len, 0) == (ssize_t)len, "send: %s", strerror(errno));
	return NULL;
}

/* Waits for a datagram. `in_len` is its length without the CRC, or 0 if none arrives in time. */
static const char *receive(struct peer *p, unsigned int ms)
{
	struct pollfd wait = { .fd = p->fd, .events = POLLIN };
	ssize_t n;

	p->in_len = 0;
	if (poll(&wait, 1, (int)ms) <= 0)
		return NULL;
	n = recv(p->fd, p->in, sizeof p->in, 0);
	ENSURE(n > 0, "recv: %s", strerror(errno));
	ENSURE(sealed(p->in, (size_t)n), "the CRC of %zd bytes is wrong", n);
	p->in_len = (size_t)n - 4;
	return NULL;
}

/* ---------------------------------------------------------------- UD */

static const char *send_as(struct peer *p, struct data d, bool wrong_crc)
{
	static uint8_t out[65536];
	size_t len;

	d.dst = p->dst;
	d.src = (uint8_t)p->qpn;
	d.epoch = p->epoch;
	len = seal(out, data_bytes(out, &d));
	out[len - 1] ^= wrong_crc;
	ENSURE(send(p->fd, out, len, 0) == (ssize_t)len, "send: %s", strerror(errno));
	return NULL;
}

static const char *send_data(struct peer *p, struct data d)
{
	return send_as(p, d, false);
}

static unsigned int reports;
static uint32_t last_room;

/* Waits for a datagram of the device other than a report. Checks and counts reports. */
static const char *next_data(struct peer *p, struct data *d, bool wanted)
{
	for (;;) {
		TRY(receive(p, wanted ? WAIT_MS : QUIET_MS));
		if (!p->in_len) {
			ENSURE(!wanted, "no datagram arrives");
			d->len = 0;
			d->opcode = 0xff;
			return NULL;
		}
		TRY(check_data(p->in, p->in_len, d, false));
		ENSURE(d->dst == (uint8_t)p->qpn && d->src == p->dst, "index %u to %u", d->src, d->dst);
		if (d->tagged || d->opcode != CONTROL || d->kind != REPORT)
			return NULL;
		ENSURE(d->len == 8, "a report of %zu bytes", d->len);
		last_room = get32(d->payload + 4);
		ENSURE(last_room >= 131072, "room %u", last_room);
		reports++;
	}
}

static struct data send_of(struct peer *p, const uint8_t *from, uint32_t length, uint32_t offset, size_t len)
{
	return (struct data){ .qkey = QKEY, .id = p->id, .length = length, .offset = offset, .opcode = SEND_OP, .msn = p->id,
			      .mo = offset, .payload = from + offset, .len = len, .last = offset + len == length };
}

static struct data record_of(struct peer *p, const uint8_t *from, const struct region *to, uint32_t length, uint32_t offset, size_t len)
{
	return (struct data){ .qkey = QKEY, .id = p->id, .length = length, .offset = offset, .opcode = RECORD, .sub = 1,
			      .tagged = true, .stag = to->mr->rkey, .to = (uintptr_t)to->at + offset, .payload = from + offset,
			      .len = len, .last = offset + len == length };
}

#define ROUTE 40u

static uint8_t from[9000];

/* Sends of one datagram, and of several that arrive in reverse order. */
static const char *ud_sends_arrive(size_t arg)
{
	/* On a busy machine, a long time may pass between two datagrams of a message. */
	struct anywarpdv_qp_init_attr dv = { .max_send_size = 1 << 16, .deadline_us = 5000000 };
	struct region into;
	struct ibv_sge sge;
	struct dgram a;
	struct ibv_wc wc;
	struct data d;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_peer(&foreign, a.qp->qp_num));
	TRY(new_region(&into, a.pd, ROUTE + sizeof from, IBV_ACCESS_LOCAL_WRITE));
	fill_pattern(from, sizeof from, 1);
	reports = 0;
	/*
	 * The report about an empty Send is longer than the Send. The device delays it until it has received enough bytes
	 * from this address (docs/datagram-iwarp.md, section 5), and a newer report replaces it.
	 */
	for (uint32_t i = 0; i < 5; i++, foreign.id++) {
		uint32_t length = i == 0 ? 0 : i == 1 ? 77 : 9000, each = 1408;

		sge = sge_of(&into, 0, into.len);
		TRY(post_recv(a.qp, i, &sge, 1));
		if (i == 2)
			for (uint32_t n = (length + each - 1) / each; n-- > 0;)
				TRY(send_data(&foreign, send_of(&foreign, from, length, n * each, length - n * each < each ? length - n * each : each)));
		else
			for (uint32_t at = 0; at == 0 || at < length; at += each)
				TRY(send_data(&foreign, send_of(&foreign, from, length, at, length - at < each ? length - at : each)));
		TRY(expect_ok(a.rcq, i, IBV_WC_RECV, &wc));
		ENSURE(wc.byte_len == ROUTE + length, "%u bytes of %u", wc.byte_len, length);
		ENSURE(wc.src_qp == foreign.qpn && wc.wc_flags & IBV_WC_GRH, "from 0x%x", wc.src_qp);
		TRY(same_pattern(into.at + ROUTE, length, 1));
	}
	TRY(next_data(&foreign, &d, false));
	ENSURE(reports >= 4, "the device sent %u reports about five messages", reports);
	/* Datagrams with a wrong Q_Key, an unknown `sub`, or an MO that differs from the offset are dropped. */
	TRY(post_recv(a.qp, 9, &sge, 1));
	d = send_of(&foreign, from, 77, 0, 77);
	d.qkey++;
	TRY(send_data(&foreign, d));
	d.qkey--;
	d.sub = 9;
	TRY(send_data(&foreign, d));
	d.sub = 0;
	d.mo = 1;
	TRY(send_data(&foreign, d));
	TRY(no_wc(a.rcq, QUIET_MS));
	TRY(send_data(&foreign, send_of(&foreign, from, 77, 0, 77)));
	TRY(expect_ok(a.rcq, 9, IBV_WC_RECV, &wc));
	return NULL;
}

/*
 * Parity replaces one lost datagram of a group. If two are lost, none is replaced: the record's map of the bytes that have
 * arrived contains neither.
 */
static const char *ud_records_arrive(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .flags = ANYWARPDV_QP_REPORT_ERRORS };
	struct anywarpdv_record record;
	struct anywarpdv_range ranges[4];
	struct region to;
	struct dgram a;
	struct data d;
	uint8_t parity[1000];

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_peer(&foreign, a.qp->qp_num));
	TRY(new_region(&to, a.pd, 4500, ALL_ACCESS));
	fill_pattern(from, sizeof from, 2);
	/* Five segments in groups of two. The fourth is lost, and in the second message also the third. */
	for (uint32_t lost = 1; lost <= 2; lost++, foreign.id++) {
		for (uint32_t n = 0; n < 5; n++) {
			uint32_t len = n == 4 ? 500 : 1000;

			d = record_of(&foreign, from, &to, 4500, n * 1000, len);
			d.attr = 2 << 4;
			d.seg = 1000;
			if (n != 3 && !(lost == 2 && n == 2))
				TRY(send_data(&foreign, d));
			if (n % 2 == 0 && n != 4)
				continue;
			for (uint32_t i = 0; i < len; i++)
				parity[i] = n == 4 ? from[4000 + i] : from[(n - 1) * 1000 + i] ^ from[n * 1000 + i];
			d = record_of(&foreign, from, &to, 4500, n == 4 ? 4000 : (n - 1) * 1000, len);
			d.attr = 2 << 4;
			d.seg = 1000;
			d.flags = P;
			d.last = false;
			d.payload = parity;
			TRY(send_data(&foreign, d));
		}
		ENSURE(poll_records(a.qp, 1, &record, sizeof record, (int)WAIT_MS) == 1, "no record arrives");
		ENSURE(record.src_qp == foreign.qpn && record.message_id == foreign.id, "message %u from 0x%x", record.message_id, record.src_qp);
		ENSURE(record.length == 4500 && record.base == (uintptr_t)to.at, "%u bytes", record.length);
		if (lost == 1) {
			ENSURE(record.flags & ANYWARPDV_RECORD_COMPLETE && record.valid == 4500, "%u valid", record.valid);
			TRY(same_pattern(to.at, 4500, 2));
			continue;
		}
		ENSURE(!(record.flags & ANYWARPDV_RECORD_COMPLETE) && record.valid == 2500, "%u valid", record.valid);
		ENSURE(read_map(a.qp, &record, sizeof record, 4, ranges, sizeof *ranges) == 2, "the map does not have two ranges");
		ENSURE(ranges[0].from == 0 && ranges[0].to == 2000 && ranges[1].from == 4000 && ranges[1].to == 4500,
		       "the map has other ranges");
		ENSURE(!release_map(a.qp, record.map), "release_map: %s", strerror(errno));
	}
	/* A wrong STag: the error names the message. */
	d = record_of(&foreign, from, &to, 100, 0, 100);
	d.stag ^= 0x100;
	TRY(send_data(&foreign, d));
	TRY(next_data(&foreign, &d, true));
	ENSURE(d.opcode == TERMINATE && d.id == foreign.id && d.len >= 4, "opcode %u of message %u", d.opcode, d.id);
	ENSURE(d.payload[0] >> 4 <= 1, "a Terminate of layer %u", d.payload[0] >> 4);
	return guards_untouched(&to);
}

/*
 * The device answers a long Read only to an address that has returned the device's cookie: this proves that the address
 * receives datagrams.
 */
static const char *ud_reads_are_answered(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { 0 };
	uint8_t request_[36] = { 0 }, got[9000] = { 0 };
	struct region source;
	size_t bytes = 0;
	struct dgram a;
	struct data d;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_peer(&foreign, a.qp->qp_num));
	TRY(new_region(&source, a.pd, sizeof got, ALL_ACCESS));
	fill_pattern(source.at, source.len, 3);
	put32(request_, 0xabcd);		/* sink STag, TO */
	put64(request_ + 4, 0x7000);
	put32(request_ + 12, sizeof got);	/* RDMARDSZ */
	put32(request_ + 16, source.mr->rkey);
	put64(request_ + 20, (uintptr_t)source.at);
	for (int attempt = 0; attempt < 2; attempt++) {
		d = (struct data){ .qkey = QKEY, .id = foreign.id, .length = sizeof request_, .opcode = READ_REQUEST, .qn = 1,
				   .msn = foreign.id, .payload = request_, .len = sizeof request_, .last = true };
		TRY(send_data(&foreign, d));
		TRY(next_data(&foreign, &d, true));
		if (attempt == 0) {
			ENSURE(d.opcode == CONTROL && !d.tagged && d.kind == COOKIE && d.id == foreign.id && d.len == 8,
			       "opcode %u, kind %u, %zu bytes", d.opcode, d.kind, d.len);
			memcpy(request_ + 28, d.payload, 8);
		}
	}
	while (bytes < sizeof got) {
		ENSURE(d.tagged && d.opcode == READ_RESPONSE && d.id == foreign.id && d.length == sizeof got, "opcode %u", d.opcode);
		ENSURE(d.stag == 0xabcd && d.to == 0x7000 + d.offset, "STag %x, TO %llx", d.stag, (unsigned long long)d.to);
		memcpy(got + d.offset, d.payload, d.len);
		bytes += d.len;
		if (bytes < sizeof got)
			TRY(next_data(&foreign, &d, true));
	}
	ENSURE(d.last, "the last datagram has no flag L");
	return same_pattern(got, sizeof got, 3);
}

/* Unreliable requests of the device: a Send, a Write-Record, and a Read that this peer answers. */
static const char *ud_requests_of_the_device(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .max_send_size = 1 << 16 };
	static uint8_t got[9000];
	uint8_t cookie[8] = "12345678";
	struct region mine;
	struct dgram a;
	struct data d;
	uint32_t id, base;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_peer(&foreign, a.qp->qp_num));
	TRY(new_region(&mine, a.pd, sizeof got, ALL_ACCESS));
	for (int i = 0; i < 3; i++) {
		enum what what = i == 0 ? SEND : i == 1 ? WRITE : WRITE_IMM;
		size_t bytes = 0;

		fill_pattern(mine.at, mine.len, (uint32_t)(4 + i));
		memset(got, 0, sizeof got);
		TRY(request_to(&a, foreign.qpn, what, (uint64_t)i, &mine, sizeof got, (struct there){ 0x5555, 0x10000 }));
		do {
			TRY(next_data(&foreign, &d, true));
			ENSURE(d.qkey == QKEY && d.length == sizeof got && d.tagged == (what != SEND), "Q_Key %x, %u bytes", d.qkey, d.length);
			ENSURE(d.opcode == (what == SEND ? SEND_OP : RECORD), "opcode %u", d.opcode);
			ENSURE(what == SEND || (d.stag == 0x5555 && d.to == 0x10000 + d.offset), "STag %x", d.stag);
			ENSURE(what != WRITE_IMM || (d.sub == 2 && d.flags & I && d.imm == 0x01020304), "immediate %x", d.imm);
			memcpy(got + d.offset, d.payload, d.len);
			bytes += d.len;
		} while (bytes < sizeof got);
		TRY(same_pattern(got, sizeof got, (uint32_t)(4 + i)));
		TRY(done(&a, (uint64_t)i, IBV_WC_SUCCESS));
	}
	/* A Read: this peer first demands a cookie, then answers with the last datagram first. */
	memset(mine.at, 0, mine.len);
	TRY(request_to(&a, foreign.qpn, READ, 9, &mine, 5000, (struct there){ 0x5555, 0x10000 }));
	TRY(next_data(&foreign, &d, true));
	while (d.opcode == RECORD) /* commits, which repeat the ends of earlier messages */
		TRY(next_data(&foreign, &d, true));
	ENSURE(d.opcode == READ_REQUEST && d.qkey == QKEY && d.len >= 36, "opcode %u of %zu bytes", d.opcode, d.len);
	ENSURE(get32(d.payload + 12) == 5000 && get32(d.payload + 16) == 0x5555 && get64(d.payload + 20) == 0x10000,
	       "the Read Request has another length or address");
	id = d.id;
	TRY(send_data(&foreign, (struct data){ .id = id, .length = 8, .opcode = CONTROL, .kind = COOKIE, .qn = 4, .msn = id,
					       .payload = cookie, .len = 8, .last = true }));
	TRY(next_data(&foreign, &d, true));
	ENSURE(d.opcode == READ_REQUEST && d.id == id && !memcmp(d.payload + 28, cookie, 8), "the cookie does not come back");
	base = get32(d.payload);
	fill_pattern(got, sizeof got, 9);
	for (int n = 4; n >= 0; n--) {
		d = (struct data){ .id = id, .length = 5000, .offset = (uint32_t)n * 1000, .opcode = READ_RESPONSE, .tagged = true,
				   .stag = base, .to = (uintptr_t)mine.at + (size_t)n * 1000, .len = 1000, .last = n == 4 };
		if (!n) {
			/*
			 * Two invalid answers, one with a wrong CRC and one with a wrong message length. They contain other
			 * bytes, so that the test notices if they are placed.
			 */
			d.payload = got + 1000;
			TRY(send_as(&foreign, d, true));
			d.length = 4999;
			TRY(send_as(&foreign, d, false));
			d.length = 5000;
		}
		d.payload = got + n * 1000;
		TRY(send_data(&foreign, d));
	}
	TRY(done(&a, 9, IBV_WC_SUCCESS));
	TRY(same_pattern(mine.at, 5000, 9));
	return guards_untouched(&mine);
}

/* ---------------------------------------------------------------- RD */

struct packet {
	uint8_t flags, more, why, runs;
	uint32_t token, echo, seq, base, ack, window, time, time_echo;
	struct data d;
};

/* Sends a packet, with data if `d` is set. */
static const char *send_packet(struct peer *p, uint8_t flags, uint32_t seq, const struct data *d)
{
	static uint8_t out[65536];
	struct data copy;
	size_t len = 40;

	memset(out, 0, len);
	out[0] = 0xde;
	out[1] = (uint8_t)(0x10 | flags | (d ? D : 0));
	put32(out + 4, p->token);
	put32(out + 8, p->echo);
	if (!(flags & C)) {
		put32(out + 12, seq);
		put32(out + 16, p->base);
		out[20] = p->knows ? K : 0;
		put32(out + 24, p->knows ? p->ack : 0);
	}
	out[22] = p->dst;
	out[23] = (uint8_t)p->qpn;
	put32(out + 28, 1 << 20);
	put32(out + 32, 77777);
	put32(out + 36, p->time_echo);
	if (d) {
		copy = *d;
		copy.dst = p->dst;
		copy.src = (uint8_t)p->qpn;
		copy.epoch = p->epoch;
		len += data_bytes(out + len, &copy);
	}
	return transmit(p, out, len);
}

/* Waits for a packet of the device and checks the rules of section 6. */
static const char *next_packet(struct peer *p, struct packet *k)
{
	const uint8_t *in = p->in;
	size_t at = 40;

	TRY(receive(p, WAIT_MS));
	ENSURE(p->in_len >= 40, "no packet but %zu bytes", p->in_len);
	ENSURE(in[0] == 0xde && in[1] >> 4 == 1 && !in[21], "begins with %02x %02x", in[0], in[1]);
	*k = (struct packet){ .flags = in[1] & 15, .runs = in[2], .why = in[3], .token = get32(in + 4), .echo = get32(in + 8),
			      .seq = get32(in + 12), .base = get32(in + 16), .more = in[20], .ack = get32(in + 24),
			      .window = get32(in + 28), .time = get32(in + 32), .time_echo = get32(in + 36) };
	ENSURE(in[22] == (uint8_t)p->qpn && in[23] == p->dst, "index %u to %u", in[23], in[22]);
	ENSURE(k->token, "the token is 0");
	ENSURE(k->runs <= 16, "%u runs", k->runs);
	ENSURE(k->flags & C || (int32_t)(k->seq - k->base) >= 0, "number %u before base %u", k->seq, k->base);
	for (unsigned int i = 0; i < k->runs; i++, at += 8)
		ENSURE((int32_t)(get32(in + at + 4) - get32(in + at)) > 0 && (int32_t)(get32(in + at) - k->ack) >= 0, "run %u", i);
	p->time_echo = k->time;
	if (k->flags & D)
		return check_data(in + at, p->in_len - at, &k->d, true);
	ENSURE(p->in_len == at, "%zu bytes after a packet without data", p->in_len - at);
	return NULL;
}

/* This peer begins: a packet without data is challenged, and later packets carry the token of the challenge. */
static const char *begin(struct peer *p)
{
	struct packet k;

	TRY(send_packet(p, 0, p->seq, NULL));
	TRY(next_packet(p, &k));
	ENSURE(k.flags == C && k.echo == p->token && !k.more && !k.seq && !k.base && !k.why && !k.runs,
	       "the packet is no challenge: flags %x", k.flags);
	ENSURE(k.window >= 131072, "window %u", k.window);
	p->echo = k.token;
	return NULL;
}

/*
 * Waits until the device has acknowledged everything before `until`, or has refused a packet. No packet that the device
 * sends meanwhile may have data.
 */
static const char *acknowledged(struct peer *p, uint32_t until, struct packet *k)
{
	do {
		TRY(next_packet(p, k));
		ENSURE(!(k->flags & (D | C)), "flags %x", k->flags);
		ENSURE(k->token == p->echo && k->echo == p->token, "a packet has a wrong token or echo");
		if (!p->knows) {
			p->ack = k->base;
			p->knows = true;
		}
		ENSURE(!k->why || k->more & K, "a refusal has no number");
	} while (!(k->more & K) || (k->ack != until && !k->why));
	return NULL;
}

/*
 * Messages of this peer are delivered once and in order. A message without a receive waits, and a refused one is
 * reported.
 */
static const char *rd_peer_sends(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD };
	struct anywarpdv_record record;
	struct region into, to;
	struct packet k;
	struct ibv_sge sge;
	struct dgram a;
	struct ibv_wc wc;
	struct data d, first;
	uint32_t first_seq;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_peer(&foreign, a.qp->qp_num));
	TRY(new_region(&into, a.pd, ROUTE + 2000, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&to, a.pd, 3000, ALL_ACCESS));
	fill_pattern(from, sizeof from, 6);
	TRY(begin(&foreign));

	/*
	 * Without a receive the device sets R and does not advance ack. With one, the message is delivered and
	 * acknowledged at once.
	 */
	d = send_of(&foreign, from, 200, 0, 200);
	TRY(send_packet(&foreign, A, foreign.seq, &d));
	TRY(acknowledged(&foreign, foreign.seq, &k));
	ENSURE(k.flags & R, "the flag R is not set although a message waits for a receive: flags %x", k.flags);
	sge = sge_of(&into, 0, into.len);
	TRY(post_recv(a.qp, 1, &sge, 1));
	TRY(expect_ok(a.rcq, 1, IBV_WC_RECV, &wc));
	ENSURE(wc.byte_len == ROUTE + 200 && wc.src_qp == foreign.qpn, "%u bytes", wc.byte_len);
	TRY(same_pattern(into.at + ROUTE, 200, 6));
	foreign.seq++;
	foreign.id++;
	TRY(acknowledged(&foreign, foreign.seq, &k));
	foreign.base = foreign.seq;

	/*
	 * The first of three packets of a Write-Record is lost: the others are reported as a run and wait. Then the
	 * packet arrives twice.
	 */
	first_seq = foreign.seq;
	first = record_of(&foreign, from, &to, 3000, 0, 1000);
	for (uint32_t n = 1; n < 3; n++) {
		d = record_of(&foreign, from, &to, 3000, n * 1000, 1000);
		TRY(send_packet(&foreign, A, first_seq + n, &d));
		TRY(acknowledged(&foreign, first_seq, &k));
		ENSURE(k.runs == 1 && get32(foreign.in + 40) == first_seq + 1 && get32(foreign.in + 44) == first_seq + n + 1, "%u runs", k.runs);
	}
	ENSURE(poll_records(a.qp, 1, &record, sizeof record, (int)QUIET_MS) == 0, "an incomplete message has a record");
	TRY(send_packet(&foreign, 0, first_seq, &first));
	TRY(send_packet(&foreign, A, first_seq, &first));
	foreign.seq = foreign.base = first_seq + 3;
	TRY(acknowledged(&foreign, foreign.seq, &k));
	ENSURE(poll_records(a.qp, 1, &record, sizeof record, (int)WAIT_MS) == 1, "no record arrives");
	ENSURE(record.flags & ANYWARPDV_RECORD_COMPLETE && record.length == 3000 && record.message_id == foreign.id,
	       "the record is not complete, or of another message");
	TRY(same_pattern(to.at, 3000, 6));
	ENSURE(poll_records(a.qp, 1, &record, sizeof record, 0) == 0, "one message has a second record");
	foreign.id++;

	/*
	 * A wrong STag: the device refuses the packet (`why` is 10, `ack` is the packet's sequence number), and repeats
	 * this in its packets until the peer's base is beyond that number. Later messages are accepted.
	 */
	d = record_of(&foreign, from, &to, 100, 0, 100);
	d.stag ^= 0x100;
	TRY(send_packet(&foreign, A, foreign.seq, &d));
	TRY(acknowledged(&foreign, foreign.seq + 1, &k));
	ENSURE(k.why == 10 && k.ack == foreign.seq, "why %u at %u", k.why, k.ack);
	foreign.id++;
	foreign.base = ++foreign.seq;
	sge = sge_of(&into, 0, into.len);
	TRY(post_recv(a.qp, 2, &sge, 1));
	d = send_of(&foreign, from, 10, 0, 10);
	TRY(send_packet(&foreign, A, foreign.seq, &d));
	TRY(expect_ok(a.rcq, 2, IBV_WC_RECV, &wc));
	foreign.base = ++foreign.seq;
	do
		TRY(acknowledged(&foreign, foreign.seq, &k));
	while (k.why);
	return guards_untouched(&to);
}

/* A Read and an atomic of this peer. The responses are packets, which it must acknowledge. */
static const char *rd_peer_reads(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD };
	uint8_t ask[52] = { 0 }, got[3000] = { 0 };
	struct region source;
	size_t bytes = 0;
	struct packet k;
	uint64_t before;
	struct dgram a;
	struct data d;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_peer(&foreign, a.qp->qp_num));
	TRY(new_region(&source, a.pd, sizeof got, ALL_ACCESS | IBV_ACCESS_REMOTE_ATOMIC));
	fill_pattern(source.at, source.len, 7);
	TRY(begin(&foreign));
	put32(ask, 0xabcd);
	put64(ask + 4, 0x7000);
	put32(ask + 12, sizeof got);
	put32(ask + 16, source.mr->rkey);
	put64(ask + 20, (uintptr_t)source.at);
	d = (struct data){ .qkey = QKEY, .id = foreign.id, .length = 36, .opcode = READ_REQUEST, .qn = 1, .msn = foreign.id,
			   .payload = ask, .len = 36, .last = true };
	TRY(send_packet(&foreign, A, foreign.seq++, &d));
	while (bytes < sizeof got) {
		TRY(next_packet(&foreign, &k));
		if (!foreign.knows) {
			foreign.ack = k.base;
			foreign.knows = true;
		}
		if (k.more & K && k.ack == foreign.seq)
			foreign.base = foreign.seq;
		if (k.flags & D && k.seq == foreign.ack) {
			ENSURE(k.d.opcode == READ_RESPONSE && k.d.id == foreign.id && k.d.stag == 0xabcd &&
			       k.d.to == 0x7000 + k.d.offset && k.d.length == sizeof got, "opcode %u", k.d.opcode);
			memcpy(got + k.d.offset, k.d.payload, k.d.len);
			bytes += k.d.len;
			foreign.ack++;
		}
		/*
		 * This packet echoes the time of the received one, which proves to the device that its packet has arrived.
		 * Before this proof, the device limits the length of the response.
		 */
		TRY(send_packet(&foreign, 0, foreign.seq, NULL));
	}
	TRY(same_pattern(got, sizeof got, 7));
	foreign.id++;

	/* A FetchAdd of 5 (RFC 7306 section 5.1). Its packet is sent twice and must be executed once. */
	memset(ask, 0, sizeof ask);
	memcpy(&before, source.at, 8);
	put32(ask, 0);				/* FetchAdd */
	put32(ask + 4, 0x31337);		/* request identifier */
	put32(ask + 8, source.mr->rkey);
	put64(ask + 12, (uintptr_t)source.at);
	put64(ask + 20, 5);			/* add or swap data */
	put64(ask + 28, 0);			/* add mask: no bit divides the 64 bits into fields */
	d = (struct data){ .qkey = QKEY, .id = foreign.id, .length = 52, .opcode = ATOMIC_REQUEST, .qn = 1, .msn = foreign.id,
			   .payload = ask, .len = 52, .last = true };
	for (int i = 0; i < 2; i++)
		TRY(send_packet(&foreign, A, foreign.seq, &d));
	foreign.seq++;
	do {
		TRY(next_packet(&foreign, &k));
	} while (!(k.flags & D) || k.seq != foreign.ack);
	ENSURE(k.d.opcode == ATOMIC_RESPONSE && k.d.id == foreign.id && k.d.len == 12, "opcode %u of %zu bytes", k.d.opcode, k.d.len);
	ENSURE(get32(k.d.payload) == 0x31337 && get64(k.d.payload + 4) == before, "the answer has another original value");
	foreign.ack++;
	TRY(send_packet(&foreign, A, foreign.seq, NULL));
	before += 5;
	ENSURE(!memcmp(source.at, &before, 8), "the memory has another value after the operation");
	return NULL;
}

/*
 * The device begins: it sends data after the challenge, repeats a lost packet, and completes a request only when it is
 * acknowledged.
 */
static const char *rd_device_sends(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD };
	static uint8_t got[8000];
	struct region mine;
	uint32_t lost = 0;
	size_t bytes = 0;
	struct packet k;
	struct ibv_wc wc;
	struct dgram a;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_peer(&foreign, a.qp->qp_num));
	TRY(new_region(&mine, a.pd, sizeof got, ALL_ACCESS));
	fill_pattern(mine.at, mine.len, 8);
	memset(got, 0, sizeof got);
	TRY(request_to(&a, foreign.qpn, WRITE, 1, &mine, sizeof got, (struct there){ 0x5555, 0x10000 }));
	TRY(next_packet(&foreign, &k));
	ENSURE(!k.echo && !(k.flags & D), "the packet has data before the token is known: flags %x", k.flags);
	foreign.echo = k.token;
	TRY(send_packet(&foreign, C, 0, NULL));
	for (bool again = false; bytes < sizeof got || !again;) {
		TRY(next_packet(&foreign, &k));
		ENSURE(k.echo == foreign.token && k.token == foreign.echo, "a packet has a wrong token, or the wrong echo %x", k.echo);
		if (!foreign.knows) {
			foreign.ack = k.base;
			foreign.knows = true;
			ENSURE(poll_cq_for(a.scq, 1, &wc, 0) == 0, "the request completes before it is acknowledged");
		}
		if (k.flags & D && !lost) {
			lost = k.seq + 1; /* dropped */
			continue;
		}
		if (k.flags & D && k.seq == lost - 1)
			again = true;
		if (k.flags & D && (k.seq == foreign.ack || (int32_t)(k.seq - foreign.ack) > 0)) {
			ENSURE(k.d.opcode == RECORD && k.d.qkey == QKEY && k.d.stag == 0x5555 && k.d.to == 0x10000 + k.d.offset, "opcode %u", k.d.opcode);
			memcpy(got + k.d.offset, k.d.payload, k.d.len);
			if (k.seq == foreign.ack) {
				bytes += k.d.len;
				foreign.ack++;
			}
		}
		/* Packets beyond the lost one are not acknowledged either, so that the device must send them again. */
		TRY(send_packet(&foreign, 0, foreign.seq, NULL));
	}
	TRY(done(&a, 1, IBV_WC_SUCCESS));
	TRY(same_pattern(got, sizeof got, 8));

	/* A refusal ends only this request, with the status of its `why` field. */
	TRY(request_to(&a, foreign.qpn, WRITE, 2, &mine, 100, (struct there){ 0x6666, 0x10000 }));
	do
		TRY(next_packet(&foreign, &k));
	while (!(k.flags & D) || k.seq != foreign.ack);
	{
		uint8_t out[64] = { 0 };

		out[0] = 0xde;
		out[1] = 0x10;
		out[3] = 10;
		put32(out + 4, foreign.token);
		put32(out + 8, foreign.echo);
		put32(out + 12, foreign.seq);
		put32(out + 16, foreign.base);
		out[20] = K;
		out[22] = foreign.dst;
		out[23] = (uint8_t)foreign.qpn;
		put32(out + 24, foreign.ack);
		put32(out + 28, 1 << 20);
		put32(out + 36, foreign.time_echo);
		TRY(transmit(&foreign, out, 40));
	}
	TRY(done(&a, 2, IBV_WC_REM_ACCESS_ERR));
	return NULL;
}

static FILE *log_file;

/* Wrong tokens are counted, and their sender is named in the log. After a second, the right token is accepted again. */
static const char *rd_guessed_tokens(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD };
	struct anywarpdv_counters seen;
	char text[4096] = "";
	struct region into;
	uint32_t right;
	struct data d;
	struct ibv_sge sge;
	struct dgram a;
	struct ibv_wc wc;
	int arrived = 0;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_peer(&foreign, a.qp->qp_num));
	TRY(new_region(&into, a.pd, ROUTE + 100, IBV_ACCESS_LOCAL_WRITE));
	sge = sge_of(&into, 0, into.len);
	TRY(post_recv(a.qp, 1, &sge, 1));
	TRY(begin(&foreign));
	right = foreign.echo;
	for (uint32_t n = 1; n <= 1000; n++) {
		foreign.echo = right + n;
		TRY(send_packet(&foreign, 0, foreign.seq, NULL));
		/* Polling limits the rate of these packets to one that the device can receive. */
		poll_cq_for(a.rcq, 1, &wc, 0);
	}
	foreign.echo = right;
	d = send_of(&foreign, from, 64, 0, 64);
	for (int turn = 0; turn < 100 && !arrived; turn++) {
		TRY(send_packet(&foreign, A, foreign.seq, &d));
		arrived = poll_cq_for(a.rcq, 1, &wc, 50);
	}
	ENSURE(arrived == 1 && wc.status == IBV_WC_SUCCESS, "the right token is not accepted any more");
	ENSURE(!query_counters(a.qp, &seen, sizeof seen) && seen.rd_bad_echo >= 300, "%llu wrong echoes are counted",
	       (unsigned long long)seen.rd_bad_echo);
	ENSURE(log_file, "the log file cannot be created");
	rewind(log_file);
	text[fread(text, 1, sizeof text - 1, log_file)] = 0;
	ENSURE(strstr(text, "echo wrong tokens"), "the log: %s", text);
	return NULL;
}

static const struct test tests[] = {
	{ "ud_sends_arrive", ud_sends_arrive, 0, 0, false },
	{ "ud_records_arrive", ud_records_arrive, 0, 0, false },
	{ "ud_reads_are_answered", ud_reads_are_answered, 0, 0, false },
	{ "ud_requests_of_the_device", ud_requests_of_the_device, 0, 0, false },
	{ "rd_peer_sends", rd_peer_sends, 0, 0, false },
	{ "rd_peer_reads", rd_peer_reads, 0, 0, false },
	{ "rd_device_sends", rd_device_sends, 0, 0, false },
	{ "rd_guessed_tokens", rd_guessed_tokens, 0, 0, false },
};

int main(int argc, char **argv)
{
	log_file = tmpfile();
	if (log_file) {
		setenv("ANYWARP_LOG", "warn", 1);
		dup2(fileno(log_file), STDERR_FILENO);
	}
	return run_tests(tests, COUNT(tests), argc, argv);
}
