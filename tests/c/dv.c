/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* <infiniband/anywarpdv.h>: Write-Record, Read and reliable datagrams of one program. */
#include "dgrams.h"

#include "crc.h"

#include <dirent.h>
#include <netinet/in.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/* ---------------------------------------------------------------- exported functions */

static const char *refused(size_t arg)
{
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_UD, .comp_mask = IBV_QP_INIT_ATTR_PD };
	struct anywarpdv_qp_init_attr dv = { 0 };
	struct {
		struct anywarpdv_qp_init_attr dv;
		uint64_t more;
	} newer = { .more = 1 };

	(void)arg;
	TRY(find_all());
	init.pd = new_pd();
	init.send_cq = init.recv_cq = new_cq(8, NULL);
	init.cap = (struct ibv_qp_cap){ .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 };
#define REFUSES(what, with)                                                                                            \
	do {                                                                                                           \
		dv = (struct anywarpdv_qp_init_attr)with;                                                              \
		errno = 0;                                                                                             \
		ENSURE(!create_qp(device, &init, &dv, sizeof(dv)) && errno == (what), #with ": %s", strerror(errno)); \
	} while (0)
#define A(...) { __VA_ARGS__ }
	REFUSES(EOPNOTSUPP, A(.comp_mask = 1));
	REFUSES(EOPNOTSUPP, A(.flags = 1u << 31));
	REFUSES(EOPNOTSUPP, A(.reserved = 1));
	REFUSES(EOPNOTSUPP, A(.driver_qp_type = ANYWARPDV_QPT_RD));
	REFUSES(EINVAL, A(.segment = 3));
	REFUSES(EINVAL, A(.record_mode = 3));
	REFUSES(EINVAL, A(.port = 65536));
	REFUSES(EINVAL, A(.parity = 16));
	REFUSES(EINVAL, A(.max_send_size = 1u << 31));
	errno = 0;
	ENSURE(!create_qp(device, &init, &newer.dv, sizeof(newer)) && errno == EOPNOTSUPP,
	       "a structure of a newer version with unknown values is accepted");
	newer.more = 0;
	init.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	init.send_ops_flags = IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
	errno = 0;
	ENSURE(!create_qp(device, &init, &newer.dv, sizeof(newer)) && errno == EOPNOTSUPP, "atomics on UD are accepted");
	return NULL;
}

/* A chosen UDP port determines the number of the queue pair. A second queue pair cannot use the same port. */
static const char *chosen_port(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD };
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_DRIVER,
		.comp_mask = IBV_QP_INIT_ATTR_PD,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct dgram a, b;
	struct region mine, theirs;
	struct ibv_sge sge;

	(void)arg;
	TRY(find_all());
	dv.port = 20000 + (uint32_t)getpid() % 10000;
	TRY(open_dgram(&a, &dv));
	ENSURE(a.qp->qp_num == dv.port << 8, "number %#x", a.qp->qp_num);
	init.pd = a.pd;
	init.send_cq = init.recv_cq = a.scq;
	errno = 0;
	ENSURE(!create_qp(device, &init, &dv, sizeof dv) && errno == EADDRINUSE,
	       "a second queue pair at the port: %s", strerror(errno));
	uint32_t port = dv.port;
	dv.port = 0;
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&mine, b.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, a.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	sge = (struct ibv_sge){ (uintptr_t)theirs.at, 64, theirs.mr->lkey };
	TRY(post_recv(a.qp, 1, &sge, 1));
	TRY(request_to(&b, port << 8, SEND, 7, &mine, 0, (struct there){ 0 }));
	TRY(done(&b, 7, IBV_WC_SUCCESS));
	ENSURE(!close_now(a.ah) && !close_now(a.qp), "closing");
	dv.port = port;
	return open_dgram(&a, &dv);
}

/* ---------------------------------------------------------------- Write-Record */

static const size_t lens[] = { 0, 1, 100, 4096, 70000, 1 << 20 };
#define LENS (sizeof(lens) / sizeof(*lens))

static const char *write_record(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .segment = (uint8_t)(arg % 3), .driver_qp_type = (uint32_t)(arg / 3) };
	struct anywarpdv_record record;
	struct anywarpdv_range range;
	struct region mine, theirs;
	struct dgram a, b;
	uint8_t bits[16];

	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	for (size_t i = 0; i < LENS; i++) {
		enum what what = i % 2 ? WRITE_IMM : WRITE;

		TRY(new_region(&mine, a.pd, lens[i] ? lens[i] : 1, IBV_ACCESS_LOCAL_WRITE));
		TRY(new_region(&theirs, b.pd, lens[i] ? lens[i] : 1, ALL_ACCESS));
		fill_pattern(mine.at, lens[i], (uint32_t)i);
		TRY(request(&a, &b, what, i, &mine, lens[i], &theirs));
		ENSURE(poll_records(b.qp, 1, &record, sizeof record, (int)WAIT_MS) == 1, "no record of %zu bytes", lens[i]);
		ENSURE(record.flags & ANYWARPDV_RECORD_COMPLETE, "the record is not marked as complete");
		ENSURE(record.length == lens[i] && record.valid == lens[i], "%u of %u", record.valid, record.length);
		ENSURE(record.src_qp == a.qp->qp_num, "from 0x%x", record.src_qp);
		ENSURE(!(what == WRITE_IMM) == !(record.flags & ANYWARPDV_RECORD_WITH_IMM), "immediate");
		ENSURE(what != WRITE_IMM || record.imm_data == htonl(0x01020304), "immediate 0x%x", record.imm_data);
		ENSURE(!lens[i] || record.base == (uintptr_t)theirs.at, "base");
		ENSURE(!lens[i] || record.rkey == theirs.mr->rkey, "rkey");
		ENSURE(record.map == 0, "a complete record has a map");
		ENSURE(!memcmp(theirs.at, mine.at, lens[i]), "the memory has other bytes than were written");
		TRY(guards_untouched(&theirs));
		TRY(done(&a, i, IBV_WC_SUCCESS));
	}
	errno = 0;
	ENSURE(poll_records(b.qp, 1, &(struct anywarpdv_record){ 0 }, sizeof record, 0) == 0, "there is one record too many");
	/* A complete record has no map; it has one range. */
	ENSURE(read_map(b.qp, &record, sizeof record, 1, &range, sizeof range) == 1 && range.from == 0 && range.to == record.length,
	       "a complete record does not have one range with all bytes");
	memset(bits, 0, sizeof bits);
	ENSURE(read_bitmap(b.qp, &record, sizeof record, record.length / 10 + 1, bits, sizeof bits) > 0 && bits[0] & 1,
	       "the bit map of a complete record does not begin with 1");
	ENSURE(!release_map(b.qp, record.map), "releasing the map of a complete record fails");
	record.map = 1;
	ENSURE(read_bitmap(b.qp, &record, sizeof record, record.length / 10 + 1, bits, sizeof bits) == -1 && errno == EINVAL,
	       "the map of an unknown record can be read");
	errno = 0;
	ENSURE(read_map(b.qp, &record, sizeof record, 1, &range, sizeof range) == -1 && errno == EINVAL,
	       "the map of an unknown record can be read");
	ENSURE(release_map(b.qp, 1) == -1 && errno == EINVAL, "the map of an unknown record can be released");
	return NULL;
}

/* The receiver of a record replies to the writer with the addresses in the record. */
static const char *answer_a_record(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = (uint32_t)arg };
	struct anywarpdv_record record;
	struct region from, to;
	struct ibv_ah *own;
	struct dgram a, b;

	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&from, a.pd, 64, ALL_ACCESS));
	TRY(new_region(&to, b.pd, 64, ALL_ACCESS));
	fill_pattern(from.at, 64, 3);
	TRY(request(&a, &b, WRITE, 1, &from, 64, &to));
	ENSURE(poll_records(b.qp, 1, &record, sizeof record, (int)WAIT_MS) == 1, "no record arrives");
	own = b.ah;
	b.ah = ah_from_record(b.pd, &record, sizeof record);
	ENSURE(b.ah, "anywarpdv_create_ah_from_record: %s", strerror(errno));
	keep(close_ah, b.ah, "address handle");
	ENSURE(b.ah != own && record.src_qp == a.qp->qp_num, "from 0x%x", record.src_qp);
	fill_pattern(to.at, 64, 4);
	TRY(request(&b, &a, WRITE, 2, &to, 64, &from));
	ENSURE(poll_records(a.qp, 1, &record, sizeof record, (int)WAIT_MS) == 1, "no answer arrives");
	record.source.ss_family = AF_UNIX;
	errno = 0;
	ENSURE(!ah_from_record(b.pd, &record, sizeof record) && errno == EAFNOSUPPORT, "an address of another family is accepted");
	return same_pattern(from.at, 64, 4);
}

/*
 * A program that was compiled with shorter structures gets the members that it knows. With longer structures, the rest
 * is zero.
 */
static const char *sizes(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { 0 };
	struct { struct anywarpdv_record known; uint8_t unknown[24]; } longer[2];
	struct { struct anywarpdv_device_attr known; uint64_t unknown; } about;
	struct { struct anywarpdv_range known; uint32_t unknown; } ranges[2];
	uint8_t shorter[2][offsetof(struct anywarpdv_record, base)], small[12];
	struct anywarpdv_record head;
	struct region mine, theirs;
	struct dgram a, b;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&mine, a.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, b.pd, 64, ALL_ACCESS));
	for (size_t round = 0; round < 2; round++) {
		for (size_t taken = 0; taken < 2; taken++)
			TRY(request(&a, &b, WRITE, taken, &mine, 64, &theirs));
		for (size_t taken = 0; taken < 2; taken++)
			TRY(done(&a, taken, IBV_WC_SUCCESS));
		memset(longer, 0xff, sizeof longer);
		memset(shorter, 0xff, sizeof shorter);
		for (int n = 0; n < 2;) {
			int more = round ? poll_records(b.qp, 2 - n, &longer[n].known, sizeof longer[0], (int)WAIT_MS)
					 : poll_records(b.qp, 2 - n, (struct anywarpdv_record *)shorter[n],
							sizeof shorter[0], (int)WAIT_MS);

			ENSURE(more > 0, "%d records", n);
			n += more;
		}
		for (size_t i = 0; i < 2; i++) {
			memcpy(&head, shorter[i], sizeof shorter[i]);
			ENSURE(round || head.src_qp == a.qp->qp_num, "record %zu of the shorter form", i);
			ENSURE(!round || longer[i].known.valid == 64, "record %zu of the longer form", i);
			if (round)
				TRY(all_bytes(longer[i].unknown, sizeof longer[i].unknown, 0, "after a record"));
		}
	}
	errno = 0;
	ENSURE(poll_records(b.qp, 1, &head, 0, 0) == -1 && errno == EINVAL, "records of size 0 are accepted");
	memset(ranges, 0xff, sizeof ranges);
	ENSURE(read_map(b.qp, &longer[0].known, sizeof longer[0], 1, &ranges[0].known, sizeof ranges[0]) == 1,
	       "anywarpdv_read_map does not return one range");
	ENSURE(ranges[0].known.from == 0 && ranges[0].known.to == 64, "[%u, %u)", ranges[0].known.from, ranges[0].known.to);
	ENSURE(ranges[0].unknown == 0 && ranges[1].unknown == UINT32_MAX,
	       "the end of a longer range is not set to 0, or more ranges are written than there are");
	memset(ranges, 0xff, sizeof ranges);
	ENSURE(read_map(b.qp, &longer[0].known, sizeof longer[0], 1, &ranges[0].known, sizeof(uint32_t)) == 1,
	       "anywarpdv_read_map does not return one range");
	ENSURE(ranges[0].known.from == 0 && ranges[0].known.to == UINT32_MAX,
	       "bytes after the first member of a range are written");
	errno = 0;
	ENSURE(read_map(b.qp, &longer[0].known, sizeof longer[0], 1, &ranges[0].known, 0) == -1 && errno == EINVAL,
	       "ranges of size 0 are accepted");
	memset(&about, 0xff, sizeof about);
	ENSURE(!query_dv_device(device, &about.known, sizeof about) && about.unknown == 0,
	       "anywarpdv_query_device fails with a longer structure, or does not set its end to 0");
	ENSURE(about.known.qp_types == 3 && about.known.max_parity == 15 && about.known.max_message_size >= 1u << 30,
	       "query_device: %#x %u %u", about.known.qp_types, about.known.max_parity, about.known.max_message_size);
	memset(small, 0xff, sizeof small);
	ENSURE(!query_dv_device(device, (struct anywarpdv_device_attr *)small, 8),
	       "anywarpdv_query_device fails with a shorter structure");
	TRY(all_bytes(small, 8, 0, "the first members"));
	return all_bytes(small + 8, 4, 0xff, "bytes after the caller's structure");
}

/* The program chooses the length of the datagrams of a message. Invalid lengths are refused. */
static const char *segment_size(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .segment_size = 1000 };
	struct anywarpdv_device_attr about;
	struct anywarpdv_counters seen;
	struct anywarpdv_record record;
	struct region mine, theirs;
	struct dgram a, b;
	uint32_t wrong[4];

	(void)arg;
	TRY(find_all());
	ENSURE(!query_dv_device(device, &about, sizeof about), "query_device: %s", strerror(errno));
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&mine, a.pd, 100000, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, b.pd, 100000, ALL_ACCESS));
	TRY(request(&a, &b, WRITE, 1, &mine, 100000, &theirs));
	ENSURE(poll_records(b.qp, 1, &record, sizeof record, (int)WAIT_MS) == 1 && record.valid == 100000, "no record arrives");
	ENSURE(!query_counters(b.qp, &seen, sizeof seen), "counters");
	ENSURE(seen.rx_dgrams == 100, "%llu datagrams", (unsigned long long)seen.rx_dgrams);
	wrong[0] = about.min_segment_size - 8;
	wrong[1] = about.max_segment_size + 8;
	wrong[2] = 1001;
	wrong[3] = 1000;
	for (size_t i = 0; i < COUNT(wrong); i++) {
		struct ibv_qp_init_attr_ex init = {
			.qp_type = IBV_QPT_UD, .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = a.pd,
			.send_cq = a.scq, .recv_cq = a.rcq, .cap = { .max_send_wr = 1, .max_send_sge = 1 },
		};

		dv.segment_size = wrong[i];
		dv.segment = i == 3 ? ANYWARPDV_SEGMENT_MAX : 0;
		errno = 0;
		ENSURE(!create_qp(device, &init, &dv, sizeof dv) && errno == EINVAL, "segment_size %u", wrong[i]);
	}
	return NULL;
}

/*
 * Records that the program does not poll block their writers. No record is lost, and each polled record admits one
 * more.
 */
static const char *record_waits(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = {
		.driver_qp_type = ANYWARPDV_QPT_RD,
		.flags = (uint32_t)arg,
		.max_records = 2,
	};
	const unsigned int many = 8;
	struct anywarpdv_counters seen;
	struct anywarpdv_record record;
	struct region mine, theirs;
	struct dgram a, b;
	unsigned int at = 0;
	struct ibv_wc wc;

	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&mine, a.pd, 5000, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, b.pd, 5000, ALL_ACCESS));
	/* Messages of one datagram, and of several. */
	for (uint64_t i = 0; i < many; i++)
		TRY(request(&a, &b, WRITE_IMM, i, &mine, i % 2 ? 5000 : 64, &theirs));
	for (uint64_t i = 0; i < 2; i++)
		TRY(done(&a, i, IBV_WC_SUCCESS));
	ENSURE(poll_cq_for(a.scq, 1, &wc, 300) == 0, "a Write completes although its record does not fit");
	for (unsigned int taken = 0; taken < many; taken++) {
		ENSURE(poll_records(b.qp, 1, &record, sizeof record, (int)WAIT_MS) == 1, "%u of %u records", taken, many);
		ENSURE(record.flags & ANYWARPDV_RECORD_COMPLETE, "the record is not marked as complete");
		at += record.length == 64;
		if (taken + 2 < many)
			TRY(done(&a, taken + 2, IBV_WC_SUCCESS));
	}
	ENSURE(at == many / 2, "%u of one datagram", at);
	ENSURE(poll_records(b.qp, 1, &record, sizeof record, 0) == 0, "there is one record too many");
	ENSURE(!query_counters(b.qp, &seen, sizeof(seen)), "counters");
	ENSURE(seen.rec_full == many && seen.rec_overflow == 0, "%llu records, %llu lost", (unsigned long long)seen.rec_full,
	       (unsigned long long)seen.rec_overflow);
	return NULL;
}

static struct ibv_cq_ex *new_cq_ex(void)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 64 };
	struct ibv_cq_ex *cq = ibv_create_cq_ex(device, &attr);

	if (cq)
		keep(close_cq, ibv_cq_ex_to_cq(cq), "completion queue");
	return cq;
}

/* Moves to the next completion of an extended queue. */
static const char *show(struct ibv_cq_ex *cq)
{
	struct ibv_poll_cq_attr attr = { 0 };

	for (uint64_t end = now_ms() + WAIT_MS; now_ms() < end;) {
		int rc = ibv_start_poll(cq, &attr);

		if (rc == ENOENT)
			continue;
		ENSURE(!rc, "ibv_start_poll: %s", strerror(rc));
		return NULL;
	}
	ENSURE(false, "no completion");
	return NULL;
}

/* An extended completion has the message number at both ends, and the record at the target. */
static const char *read_from_completions(size_t kind)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = (uint32_t)kind, .flags = ANYWARPDV_QP_RECORD_COMPLETIONS };
	struct anywarpdv_record record, second;
	struct ibv_cq_ex *scq, *rcq;
	struct region mine, theirs;
	struct dgram a, b;
	uint32_t ids[3];

	TRY(find_all());
	scq = new_cq_ex();
	rcq = new_cq_ex();
	ENSURE(scq && rcq, "ibv_create_cq_ex: %s", strerror(errno));
	TRY(open_dgram_on(&a, &dv, ibv_cq_ex_to_cq(scq), ibv_cq_ex_to_cq(rcq)));
	TRY(open_dgram_on(&b, &dv, ibv_cq_ex_to_cq(scq), ibv_cq_ex_to_cq(rcq)));
	TRY(new_region(&mine, a.pd, 40000, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, b.pd, 40000, ALL_ACCESS));
	errno = 0;
	ENSURE(wc_read_message_id(scq) == 0, "the completion queue offers no extended fields");
	ENSURE(wc_read_record(rcq, b.qp, &record, sizeof record) == -1 && errno == EINVAL,
	       "a record is read before the first completion: %s", strerror(errno));
	for (uint32_t i = 0; i < 3; i++) {
		size_t len = i ? 40000 : 64;

		TRY(request(&a, &b, WRITE, i, &mine, len, &theirs));
		TRY(show(scq));
		ENSURE(scq->status == IBV_WC_SUCCESS && scq->wr_id == i, "request %u: %s", i, ibv_wc_status_str(scq->status));
		ids[i] = wc_read_message_id(scq);
		ENSURE(i == 0 || ids[i] == ids[i - 1] + 1, "message %u after %u", ids[i], ids[i - 1]);
		ENSURE(wc_read_record(scq, a.qp, &record, sizeof record) == -1 && errno == EINVAL,
		       "a record can be read from the completion of a request");
		ibv_end_poll(scq);
	}
	/*
	 * The first record is polled with anywarpdv_poll_records. The completions that follow still name their own
	 * records.
	 */
	ENSURE(poll_records(b.qp, 1, &record, sizeof record, (int)WAIT_MS) == 1, "no record arrives");
	ENSURE(record.message_id == ids[0], "message %u, not %u", record.message_id, ids[0]);
	for (uint32_t i = 0; i < 3; i++) {
		TRY(show(rcq));
		ENSURE(ibv_wc_read_opcode(rcq) == (enum ibv_wc_opcode)ANYWARPDV_WC_RECORD, "opcode %d", ibv_wc_read_opcode(rcq));
		ENSURE(wc_read_message_id(rcq) == ids[i], "message %u, not %u", wc_read_message_id(rcq), ids[i]);
		ENSURE(wc_read_record(rcq, a.qp, &record, sizeof record) == -1 && errno == EINVAL,
		       "a record can be read through another queue pair");
		if (i == 0) {
			ENSURE(wc_read_record(rcq, b.qp, &record, sizeof record) == -1 && errno == ENOENT,
			       "a record can be read twice");
			ibv_end_poll(rcq);
			continue;
		}
		ENSURE(!wc_read_record(rcq, b.qp, &record, sizeof record), "record %u: %s", i, strerror(errno));
		ENSURE(record.message_id == ids[i] && record.src_qp == a.qp->qp_num && record.rkey == theirs.mr->rkey &&
			       record.length == 40000 && record.valid == 40000 && record.flags & ANYWARPDV_RECORD_COMPLETE,
		       "record %u: message %u of %u, %u of %u bytes", i, record.message_id, record.src_qp, record.valid,
		       record.length);
		ENSURE(wc_read_record(rcq, b.qp, &second, sizeof second) == -1 && errno == ENOENT, "a record can be read twice");
		ibv_end_poll(rcq);
	}
	ENSURE(poll_records(b.qp, 1, &record, sizeof record, 0) == 0, "there is a record too many");
	return NULL;
}

/* A Write to a region that is restricted to another queue pair: nothing is placed, and the writer gets the error. */
static const char *restricted(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .flags = ANYWARPDV_QP_REPORT_ERRORS };
	struct anywarpdv_counters seen;
	struct anywarpdv_record record;
	struct anywarpdv_error error;
	struct sockaddr_in6 six = { .sin6_family = AF_INET6 };
	struct region mine, theirs;
	struct dgram a, b;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&mine, a.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, b.pd, 64, ALL_ACCESS));
	memcpy(&six.sin6_addr, &local_gid, 16);
	ENSURE(!restrict_mr(theirs.mr, (struct sockaddr *)&six, sizeof six, a.qp->qp_num + 1), "restrict");
	TRY(request(&a, &b, WRITE, 1, &mine, 64, &theirs));
	ENSURE(poll_errors(a.qp, 1, &error, sizeof error, (int)WAIT_MS) == 1, "no error is reported");
	ENSURE(error.src_qp == b.qp->qp_num && error.layer == 0 && error.type == 1, "%u %u", error.layer, error.type);
	ENSURE(error.flags == ANYWARPDV_ERROR_WITH_WR_ID && error.wr_id == 1, "flags %u, request %llu", error.flags,
	       (unsigned long long)error.wr_id);
	TRY(all_bytes(theirs.at, 64, FRESH, "the region"));
	ENSURE(!query_counters(b.qp, &seen, sizeof(seen)), "counters");
	ENSURE(seen.rx_stag == 1 && seen.err_out == 1, "%llu %llu", (unsigned long long)seen.rx_stag,
	       (unsigned long long)seen.err_out);
	ENSURE(!restrict_mr(theirs.mr, (struct sockaddr *)&six, sizeof six, a.qp->qp_num), "restrict");
	errno = 0;
	ENSURE(restrict_mr(theirs.mr, (struct sockaddr *)&six, sizeof six - 1, 0) == -1 && errno == EINVAL,
	       "a part of an address is accepted");
	ENSURE(restrict_mr(theirs.mr, (struct sockaddr *)&six, 1, 0) == -1 && errno == EINVAL,
	       "a length shorter than the family is accepted");
	ENSURE(restrict_mr(theirs.mr, &(struct sockaddr){ .sa_family = AF_UNIX }, sizeof six, 0) == -1 && errno == EAFNOSUPPORT,
	       "an address of another family is accepted");
	TRY(request(&a, &b, WRITE, 2, &mine, 64, &theirs));
	ENSURE(poll_records(b.qp, 1, &record, sizeof record, (int)WAIT_MS) == 1, "no record arrives");
	/* The restriction stays if the region gets other rights. */
	ENSURE(!restrict_mr(theirs.mr, (struct sockaddr *)&six, sizeof six, a.qp->qp_num + 1), "restrict");
	ENSURE(!ibv_rereg_mr(theirs.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL_ACCESS), "ibv_rereg_mr");
	TRY(request(&a, &b, WRITE, 3, &mine, 64, &theirs));
	ENSURE(poll_errors(a.qp, 1, &error, sizeof error, (int)WAIT_MS) == 1, "no error is reported");
	ENSURE(error.wr_id == 3 && error.layer == 0 && error.type == 1, "%u %u", error.layer, error.type);
	return NULL;
}

/* ---------------------------------------------------------------- Read, Send, atomics */

static const char *reads(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = (uint32_t)arg };
	struct region mine, theirs;
	struct dgram a, b;

	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	for (size_t i = 0; i < LENS; i++) {
		TRY(new_region(&mine, a.pd, lens[i] ? lens[i] : 1, IBV_ACCESS_LOCAL_WRITE));
		TRY(new_region(&theirs, b.pd, lens[i] ? lens[i] : 1, ALL_ACCESS));
		fill_pattern(theirs.at, lens[i], (uint32_t)i);
		TRY(request(&a, &b, READ, i, &mine, lens[i], &theirs));
		TRY(done(&a, i, IBV_WC_SUCCESS));
		ENSURE(!memcmp(theirs.at, mine.at, lens[i]), "the memory has other bytes than were written");
		TRY(guards_untouched(&mine));
	}
	return NULL;
}

/* In each progress mode, requests complete while the program does not poll: the device's thread takes over. */
static const char *progress(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD };
	struct region mine, theirs;
	struct dgram a, b;
	struct ibv_wc wc;

	(void)arg;
	TRY(find_all());
	errno = 0;
	ENSURE(set_progress(NULL, ANYWARPDV_PROGRESS_AUTO) == -1 && errno == EINVAL, "no context: %s", strerror(errno));
	errno = 0;
	ENSURE(set_progress(device, (enum anywarpdv_progress)2) == -1 && errno == EINVAL, "value 2: %s", strerror(errno));
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&mine, a.pd, 64, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, b.pd, 64, ALL_ACCESS));
	for (uint64_t i = 0; i < 20; i++) {
		int polled;

		ENSURE(!set_progress(device, i % 2 ? ANYWARPDV_PROGRESS_POLLED : ANYWARPDV_PROGRESS_AUTO), "%s", strerror(errno));
		fill_pattern(theirs.at, 64, (uint32_t)i);
		/* This poll finds nothing, and begins the time after which the thread takes over. */
		ENSURE(ibv_poll_cq(a.scq, 1, &wc) == 0, "there is a completion too many");
		TRY(request(&a, &b, READ, i, &mine, 64, &theirs));
		polled = ibv_poll_cq(a.scq, 1, &wc);
		if (!polled) {
			usleep(200000);
			polled = ibv_poll_cq(a.scq, 1, &wc);
		}
		ENSURE(polled == 1, "Read %llu has not completed without a poll", (unsigned long long)i);
		ENSURE(wc.wr_id == i && wc.status == IBV_WC_SUCCESS, "%s", ibv_wc_status_str(wc.status));
		TRY(same_pattern(mine.at, 64, (uint32_t)i));
	}
	return NULL;
}

/* Returns how often the device's threads have slept, or -1. */
static long sleeps_of_threads(void)
{
	char path[300], line[200];
	struct dirent *entry;
	long all = 0, n;
	DIR *tasks = opendir("/proc/self/task");

	if (!tasks)
		return -1;
	while ((entry = readdir(tasks))) {
		bool is_device = false;
		FILE *status;

		snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
		status = fopen(path, "r");
		while (status && fgets(line, sizeof line, status)) {
			is_device |= !strcmp(line, "Name:\tanywarp\n");
			if (is_device && sscanf(line, "voluntary_ctxt_switches: %ld", &n) == 1)
				all += n;
		}
		if (status)
			fclose(status);
	}
	closedir(tasks);
	return all;
}

/* Returns how often the device's threads sleep while the program polls once in 400 us. */
static long sleeps_beside(struct ibv_cq *cq)
{
	long before = sleeps_of_threads();
	struct ibv_wc wc;

	for (int i = 0; i < 300; i++) {
		struct timespec now, start;

		ibv_poll_cq(cq, 1, &wc);
		clock_gettime(CLOCK_MONOTONIC, &start);
		do
			clock_gettime(CLOCK_MONOTONIC, &now);
		while ((now.tv_sec - start.tv_sec) * 1000000000L + now.tv_nsec - start.tv_nsec < 400000);
	}
	return sleeps_of_threads() - before;
}

/*
 * A program that makes progress only by polls is not disturbed by the device's thread while it computes, even if a library has opened a
 * context that it does not use any more. libfabric's provider for verbs does this: librdmacm keeps the context of its identifiers open.
 */
static const char *undisturbed(size_t arg)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct rdma_cm_id *id;
	long automatic = 0, polled = 0;
	struct ibv_cq *cq;

	(void)arg;
	TRY(find_all());
	ENSURE(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	ENSURE(!rdma_bind_addr(id, (struct sockaddr *)&any), "rdma_bind_addr: %s", strerror(errno));
	cq = ibv_create_cq(id->verbs, 1, NULL, NULL, 0);
	ENSURE(cq && !ibv_destroy_cq(cq), "the queue of the other context: %s", strerror(errno));
	ENSURE(!rdma_destroy_id(id), "rdma_destroy_id: %s", strerror(errno));
	cq = ibv_create_cq(device, 1, NULL, NULL, 0);
	ENSURE(cq, "ibv_create_cq: %s", strerror(errno));
	/* If other programs use the processors, the program polls later than it should, and the device's thread takes over. */
	for (int attempt = 0; attempt < 10; attempt++) {
		ENSURE(!set_progress(device, ANYWARPDV_PROGRESS_AUTO), "%s", strerror(errno));
		automatic = sleeps_beside(cq);
		ENSURE(!set_progress(device, ANYWARPDV_PROGRESS_POLLED), "%s", strerror(errno));
		polled = sleeps_beside(cq);
		ENSURE(automatic >= 0 && polled >= 0, "/proc/self/task: %s", strerror(errno));
		if (automatic > 100 && polled < automatic / 3)
			break;
	}
	ENSURE(automatic > 100, "without the setting the thread sleeps only %ld times", automatic);
	ENSURE(polled < automatic / 3, "the thread sleeps %ld times, without the setting %ld times", polled, automatic);
	ENSURE(!set_progress(device, ANYWARPDV_PROGRESS_AUTO) && !ibv_destroy_cq(cq), "%s", strerror(errno));
	return NULL;
}

/* A Read from a peer that does not answer, because its queue pair is in the error state, times out, with UD and with RD. */
static const char *missing_peer(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = {
		.driver_qp_type = (uint32_t)arg,
		.read_timeout_us = 50000,
		.peer_timeout_ms = 300,
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };
	struct ibv_qp_init_attr init;
	struct region mine;
	struct dgram a, b;

	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&mine, a.pd, 64, ALL_ACCESS));
	attr.qp_state = IBV_QPS_ERR;
	ENSURE(!ibv_modify_qp(b.qp, &attr, IBV_QP_STATE), "ibv_modify_qp to ERR fails");
	TRY(request(&a, &b, READ, 1, &mine, 64, &mine));
	TRY(done(&a, 1, IBV_WC_RETRY_EXC_ERR));
	ENSURE(!ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init), "ibv_query_qp");
	ENSURE(attr.qp_state == (arg ? IBV_QPS_ERR : IBV_QPS_RTS), "state %d", attr.qp_state);
	if (arg) {
		attr.qp_state = IBV_QPS_RTS;
		ENSURE(!ibv_modify_qp(a.qp, &attr, IBV_QP_STATE), "ibv_modify_qp from ERR to RTS fails");
	}
	return NULL;
}

/* ---------------------------------------------------------------- deadlines are checked by polling threads */

/* Returns the device's own thread of process `pid` if it waits for events, and 0 otherwise. */
static pid_t waiting_worker(pid_t pid)
{
	char path[64], text[64];
	struct dirent *entry;
	pid_t found = 0;
	DIR *tasks;

	snprintf(path, sizeof path, "/proc/%d/task", pid);
	tasks = opendir(path);
	while (tasks && !found && (entry = readdir(tasks))) {
		pid_t tid = atoi(entry->d_name);
		long call = -1;
		FILE *f;

		for (int i = 0; tid && i < 2; i++) {
			snprintf(path, sizeof path, "/proc/%d/task/%d/%s", pid, tid, i ? "syscall" : "comm");
			f = fopen(path, "r");
			if (!f || !fgets(text, sizeof text, f))
				text[0] = 0;
			if (f)
				fclose(f);
			if (i == 0 && strncmp(text, "anywarp", 7))
				tid = 0;
		}
		if (tid && sscanf(text, "%ld", &call) == 1)
			switch (call) {
#ifdef SYS_epoll_wait
			case SYS_epoll_wait:
#endif
#ifdef SYS_epoll_pwait2
			case SYS_epoll_pwait2:
#endif
			case SYS_epoll_pwait: found = tid;
			}
	}
	if (tasks)
		closedir(tasks);
	return found;
}

/* Stops the device's thread of process `pid` while it holds no lock, until `go` is closed. */
static void hold_worker(pid_t pid, int told, int go)
{
	char how = 'n';
	pid_t tid = 0;

	for (uint64_t end = now_ms() + WAIT_MS; how == 'n' && now_ms() < end; sleep_ms(1)) {
		int status;

		tid = waiting_worker(pid);
		if (!tid)
			continue;
		if (ptrace(PTRACE_SEIZE, tid, NULL, NULL)) {
			how = 's';
			break;
		}
		if (!ptrace(PTRACE_INTERRUPT, tid, NULL, NULL) && waitpid(tid, &status, __WALL) == tid && WIFSTOPPED(status) &&
		    waiting_worker(pid) == tid)
			how = 'y';
		else
			ptrace(PTRACE_DETACH, tid, NULL, NULL);
	}
	if (write(told, &how, 1) == 1 && how == 'y')
		while (read(go, &how, 1) > 0)
			;
	if (tid)
		ptrace(PTRACE_DETACH, tid, NULL, NULL);
	_exit(0);
}

/* Sends one half of a Write-Record of 16 bytes through a plain socket. */
static const char *send_half(const struct dgram *to, const struct region *theirs, bool second)
{
	uint32_t number = to->qp->qp_num;
	const uint8_t from = second ? 8 : 0;
	uint64_t at = (uintptr_t)theirs->at + from;
	const uint32_t words[] = { QKEY, 3, 16, from };
	struct sockaddr_in6 addr = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)(number >> 8)) };
	uint8_t d[52] = { 0xdc, 0x10, 0x12, 0x34, [20] = 1, 2, (uint8_t)number, 7, [26] = second ? 0xc1 : 0x81, 0x4f };
	/* Static, so that all datagrams have the same source. */
	static int fd = -1;
	uint32_t crc;
	ssize_t sent;

	if (fd < 0)
		fd = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	for (int i = 0; i < 16; i++)
		d[4 + i] = (uint8_t)(words[i / 4] >> (24 - 8 * (i % 4)));
	for (int i = 0; i < 4; i++)
		d[28 + i] = (uint8_t)(theirs->mr->rkey >> (24 - 8 * i));
	for (int i = 0; i < 8; i++) {
		d[32 + i] = (uint8_t)(at >> (56 - 8 * i));
		d[40 + i] = (uint8_t)(from + i);
	}
	crc = crc32c(d, 48);
	for (int i = 0; i < 4; i++)
		d[48 + i] = (uint8_t)(crc >> (8 * i));
	memcpy(&addr.sin6_addr, &local_gid, 16);
	sent = sendto(fd, d, sizeof d, 0, (struct sockaddr *)&addr, sizeof addr);
	ENSURE(sent == sizeof d, "sendto: %s", strerror(errno));
	return NULL;
}

/* Polls, without any other call, until there is a completion. */
static const char *only_poll(struct ibv_cq *cq, struct ibv_wc *wc)
{
	for (uint64_t end = now_ms() + WAIT_MS; ibv_poll_cq(cq, 1, wc) == 0;)
		ENSURE(now_ms() < end, "no completion");
	return NULL;
}

/* The device's own thread, which another process has stopped. */
struct held {
	pid_t helper;
	int go, told;
	char how; /* y: stopped; s: not permitted; n: the thread never waits */
};

static const char *hold(struct held *held)
{
	int told[2], go[2];

	ENSURE(!pipe(told) && !pipe(go), "pipe: %s", strerror(errno));
	fflush(stdout);
	held->helper = fork();
	ENSURE(held->helper >= 0, "fork: %s", strerror(errno));
	if (held->helper == 0) {
		close(go[1]);
		/* Waits until prctl has permitted ptrace. */
		if (read(go[0], &held->how, 1) == 1)
			hold_worker(getppid(), told[1], go[0]);
		_exit(1);
	}
	close(told[1]);
	close(go[0]);
	held->go = go[1];
	held->told = told[0];
	prctl(PR_SET_PTRACER, held->helper, 0, 0, 0);
	ENSURE(write(go[1], "", 1) == 1 && read(told[0], &held->how, 1) == 1, "the helper has ended");
	return NULL;
}

static void let_go(struct held *held)
{
	close(held->go);
	close(held->told);
	waitpid(held->helper, NULL, 0);
}

/* By polling alone, a Read from a missing peer, an incomplete record and a Send to a silent reliable peer time out. */
static const char *end_by_polling(struct dgram *a, struct dgram *b, struct dgram *c, struct dgram *d, const struct region *mine,
				  const struct region *theirs)
{
	struct ibv_wc wc;

	TRY(request(a, b, READ, 1, mine, 64, mine));
	TRY(only_poll(a->scq, &wc));
	ENSURE(wc.wr_id == 1 && wc.status == IBV_WC_RETRY_EXC_ERR, "the Read: %s", ibv_wc_status_str(wc.status));
	TRY(send_half(a, mine, true));
	TRY(only_poll(a->rcq, &wc));
	ENSURE(wc.opcode == (enum ibv_wc_opcode)ANYWARPDV_WC_RECORD && wc.byte_len == 8, "the record: opcode %d, %u bytes",
	       wc.opcode, wc.byte_len);
	TRY(request(c, d, SEND, 2, theirs, 64, NULL));
	TRY(only_poll(c->scq, &wc));
	ENSURE(wc.wr_id == 2 && wc.status == IBV_WC_RETRY_EXC_ERR, "the reliable Send: %s", ibv_wc_status_str(wc.status));
	return NULL;
}

/* The device's own thread does not run. A thread that polls still checks the deadlines. */
static const char *polled_deadlines(size_t arg)
{
	struct anywarpdv_qp_init_attr ud = {
		.flags = ANYWARPDV_QP_RECORD_COMPLETIONS,
		.read_timeout_us = 20000,
		.deadline_us = 20000,
	};
	struct anywarpdv_qp_init_attr rd = { .driver_qp_type = ANYWARPDV_QPT_RD, .peer_timeout_ms = 50 };
	struct dgram a, b, c, d, *dead[] = { &b, &d };
	struct anywarpdv_record record;
	struct region mine, theirs;
	const char *reason = NULL;
	struct held held;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &ud));
	TRY(open_dgram(&b, &ud));
	TRY(open_dgram(&c, &rd));
	TRY(open_dgram(&d, &rd));
	TRY(new_region(&mine, a.pd, 64, ALL_ACCESS));
	TRY(new_region(&theirs, c.pd, 64, ALL_ACCESS));
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

		ENSURE(!ibv_modify_qp(dead[i]->qp, &attr, IBV_QP_STATE), "ibv_modify_qp to ERR fails");
	}
	TRY(hold(&held));
	if (held.how == 'y')
		reason = end_by_polling(&a, &b, &c, &d, &mine, &theirs);
	let_go(&held);
	if (held.how == 's')
		SKIP("ptrace of another process is not permitted");
	ENSURE(held.how == 'y', "the device's thread never waits");
	TRY(reason);
	ENSURE(poll_records(a.qp, 1, &record, sizeof record, 0) == 1 && record.valid == 8, "there is no record, or not of 8 bytes");
	return NULL;
}

/*
 * Half of a message waits in the socket beyond its deadline while no thread polls. The message is still delivered
 * completely.
 */
static const char *deadline_passes_unpolled(struct dgram *a, const struct region *mine)
{
	struct anywarpdv_record record;
	struct anywarpdv_counters seen;

	TRY(send_half(a, mine, true));
	for (uint64_t end = now_ms() + WAIT_MS;;) {
		struct ibv_wc wc;

		ENSURE(ibv_poll_cq(a->rcq, 1, &wc) == 0 && !query_counters(a->qp, &seen, sizeof seen),
		       "there is a completion, or the counters cannot be read");
		if (seen.rx_dgrams)
			break;
		ENSURE(now_ms() < end, "no datagram arrives");
	}
	TRY(send_half(a, mine, false));
	sleep_ms(1500);
	ENSURE(poll_records(a->qp, 1, &record, sizeof record, (int)WAIT_MS) == 1, "no record arrives");
	ENSURE(record.flags & ANYWARPDV_RECORD_COMPLETE, "%u of %u bytes", record.valid, record.length);
	return NULL;
}

static const char *queued_half_beats_deadline(size_t arg)
{
	/* The deadline is so long that scheduling delays alone do not let it expire. */
	struct anywarpdv_qp_init_attr ud = { .grace_us = 1000000, .deadline_us = 1000000 };
	const char *reason = NULL;
	struct region mine;
	struct held held;
	struct dgram a;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &ud));
	TRY(new_region(&mine, a.pd, 64, ALL_ACCESS));
	TRY(hold(&held));
	if (held.how == 'y')
		reason = deadline_passes_unpolled(&a, &mine);
	let_go(&held);
	if (held.how == 's')
		SKIP("ptrace of another process is not permitted");
	ENSURE(held.how == 'y', "the device's thread never waits");
	return reason;
}

static const char *long_sends(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = (uint32_t)arg, .max_send_size = 1 << 20 };
	struct region mine, theirs;
	struct ibv_recv_wr wr = { .wr_id = 9, .num_sge = 1 }, *bad;
	struct ibv_sge sge;
	struct dgram a, b;
	struct ibv_wc wc;

	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	for (size_t i = 0; i < LENS; i++) {
		TRY(new_region(&mine, a.pd, lens[i] ? lens[i] : 1, IBV_ACCESS_LOCAL_WRITE));
		TRY(new_region(&theirs, b.pd, lens[i] + 40, IBV_ACCESS_LOCAL_WRITE));
		fill_pattern(mine.at, lens[i], (uint32_t)i);
		sge = sge_of(&theirs, 0, lens[i] + 40);
		wr.sg_list = &sge;
		ENSURE(!ibv_post_recv(b.qp, &wr, &bad), "ibv_post_recv");
		TRY(request(&a, &b, SEND, i, &mine, lens[i], NULL));
		ENSURE(poll_cq_for(b.rcq, 1, &wc, (int)WAIT_MS) == 1, "no message of %zu bytes", lens[i]);
		ENSURE(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV, "%s", ibv_wc_status_str(wc.status));
		ENSURE(wc.byte_len == lens[i] + 40 && wc.src_qp == a.qp->qp_num, "%u bytes", wc.byte_len);
		ENSURE(wc.wc_flags & IBV_WC_GRH, "the datagram has no route header");
		ENSURE(!memcmp(theirs.at + 40, mine.at, lens[i]), "the memory has other bytes than were written");
		TRY(guards_untouched(&theirs));
		TRY(done(&a, i, IBV_WC_SUCCESS));
	}
	return NULL;
}

static const char *atomics(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD };
	struct region old, word;
	struct dgram a, b;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&old, a.pd, 8, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&word, b.pd, 8, ALL_ACCESS));
	*(uint64_t *)word.at = 40;
	for (int i = 0; i < 10; i++) {
		ibv_wr_start(a.ex);
		a.ex->wr_id = (uint64_t)i;
		a.ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_atomic_fetch_add(a.ex, word.mr->rkey, (uintptr_t)word.at, 2);
		ibv_wr_set_ud_addr(a.ex, a.ah, b.qp->qp_num, QKEY);
		ibv_wr_set_sge(a.ex, old.mr->lkey, (uintptr_t)old.at, 8);
		ENSURE(!ibv_wr_complete(a.ex), "ibv_wr_complete");
		TRY(done(&a, (uint64_t)i, IBV_WC_SUCCESS));
		ENSURE(*(uint64_t *)old.at == 40 + 2 * (uint64_t)i, "%d", i);
	}
	ENSURE(*(uint64_t *)word.at == 60, "the word has another value");
	return NULL;
}

/* A Write to memory that its source may not write. The source gets the error, and its queue pair stops. */
static const char *refused_write(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD };
	struct anywarpdv_error error;
	struct region mine, theirs;
	struct dgram a, b;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&mine, a.pd, 4096, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, b.pd, 4096, IBV_ACCESS_LOCAL_WRITE));
	TRY(request(&a, &b, WRITE, 1, &mine, 4096, &theirs));
	TRY(done(&a, 1, IBV_WC_REM_ACCESS_ERR));
	ENSURE(poll_errors(a.qp, 1, &error, sizeof error, (int)WAIT_MS) == 1, "no error is reported");
	ENSURE(error.status == IBV_WC_REM_ACCESS_ERR, "status %u", error.status);
	ENSURE(error.layer == 0 && error.type == 1 && error.code == 2, "%u %u %u", error.layer, error.type, error.code);
	ENSURE(error.flags == ANYWARPDV_ERROR_WITH_WR_ID && error.wr_id == 1, "flags %u, request %llu", error.flags,
	       (unsigned long long)error.wr_id);
	TRY(all_bytes(theirs.at, 4096, FRESH, "the region"));
	return NULL;
}

/* A Send that is too long for its receive: the report names no access violation. */
static const char *refused_send(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = ANYWARPDV_QPT_RD };
	struct anywarpdv_error error;
	struct region mine, theirs;
	struct ibv_sge sge;
	struct dgram a, b;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	TRY(open_dgram(&b, &dv));
	TRY(new_region(&mine, a.pd, 4096, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, b.pd, 4096, IBV_ACCESS_LOCAL_WRITE));
	sge = (struct ibv_sge){ (uintptr_t)theirs.at, 100, theirs.mr->lkey };
	TRY(post_recv(b.qp, 1, &sge, 1));
	TRY(request(&a, &b, SEND, 1, &mine, 4096, &theirs));
	TRY(done(&a, 1, IBV_WC_REM_INV_REQ_ERR));
	ENSURE(poll_errors(a.qp, 1, &error, sizeof error, (int)WAIT_MS) == 1, "no error is reported");
	ENSURE(error.status == IBV_WC_REM_INV_REQ_ERR && error.wr_id == 1, "status %u", error.status);
	ENSURE(error.layer == 0 && error.type == 2 && error.code == 0xff, "%u %u %u", error.layer, error.type, error.code);
	return NULL;
}

/* ---------------------------------------------------------------- many peers of one queue pair */

/* Runs the peers. In each round each sends one message to the queue pair that the pipe names, PEERS_AT_ONCE at a time. */
static const char *be_peers(const struct anywarpdv_qp_init_attr *dv, int from, int to)
{
	struct peers p;
	uint32_t hub;

	TRY(find_all());
	TRY(open_peers(&p, dv, QKEY));
	/* The memory is measured after a second round, because memory that only the first round needs is not a cost of a peer. */
	for (int round = 0; round < 2; round++) {
		ENSURE(read(from, &hub, sizeof hub) == sizeof hub, "the other process has ended");
		for (unsigned int i = 0; i < p.many; i += PEERS_AT_ONCE) {
			TRY(send_from_peers(&p, i, hub, &i, sizeof i));
			ENSURE(read(from, &hub, sizeof hub) == sizeof hub, "the other process has ended");
		}
		ENSURE(write(to, &hub, sizeof hub) == sizeof hub, "the other process has ended");
	}
	return close_all() ? "cannot close" : NULL;
}

/*
 * Many queue pairs send to one. Each message arrives, and the memory for each peer is printed. Shared memory between ports
 * of one host is turned off: a process shares at most 64 of them, so it is not a cost of each peer.
 */
static const char *peers(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { .driver_qp_type = (uint32_t)arg };
	struct ibv_recv_wr wr = { .num_sge = 1 }, *bad;
	unsigned int many = many_peers();
	int there[2], back[2], status;
	struct region inbox;
	struct ibv_sge sge;
	struct dgram hub;
	long before = 0;
	double each;
	pid_t pid;

	setenv("ANYWARP_CARRIER", "tcp", 1);
	ENSURE(!pipe(there) && !pipe(back), "pipe: %s", strerror(errno));
	fflush(stdout);
	pid = fork();
	ENSURE(pid >= 0, "fork: %s", strerror(errno));
	if (pid == 0) {
		const char *reason;

		close(there[1]);
		close(back[0]);
		reason = be_peers(&dv, there[0], back[1]);
		if (reason)
			fprintf(stderr, "peers: %s [%s]\n", reason, failed_at);
		_exit(reason ? 1 : 0);
	}
	close(there[0]);
	close(back[1]);
	TRY(find_all());
	TRY(open_dgram(&hub, &dv));
	TRY(new_region(&inbox, hub.pd, 128, IBV_ACCESS_LOCAL_WRITE));
	sge = sge_of(&inbox, 0, 128);
	wr.sg_list = &sge;
	for (int i = 0; i < 200; i++)
		ENSURE(!ibv_post_recv(hub.qp, &wr, &bad), "ibv_post_recv");
	for (int round = 0; round < 2; round++) {
		uint32_t number = hub.qp->qp_num;

		ENSURE(write(there[1], &number, sizeof number) == sizeof number, "the process of the peers has ended");
		if (round == 0)
			before = resident();
		for (unsigned int i = 0; i < many; i++) {
			struct ibv_wc wc;

			ENSURE(poll_cq_for(hub.rcq, 1, &wc, 60000) == 1, "%u of %u messages", i, many);
			ENSURE(wc.status == IBV_WC_SUCCESS, "%s", ibv_wc_status_str(wc.status));
			ENSURE(!ibv_post_recv(hub.qp, &wr, &bad), "ibv_post_recv");
			if (i % PEERS_AT_ONCE != PEERS_AT_ONCE - 1 && i != many - 1)
				continue;
			/* Reliable peers first wait for the acknowledgements, which this poll sends. */
			ibv_poll_cq(hub.rcq, 0, &wc);
			ENSURE(write(there[1], &number, sizeof number) == sizeof number, "the process of the peers has ended");
		}
		/* The peers still wait for acknowledgements. */
		for (struct pollfd fd = { .fd = back[0], .events = POLLIN }; poll(&fd, 1, 0) == 0;) {
			struct ibv_wc wc;

			ENSURE(ibv_poll_cq(hub.rcq, 1, &wc) == 0, "there is one message too many");
		}
		ENSURE(read(back[0], &number, sizeof number) == sizeof number, "the process of the peers has ended");
	}
	each = (double)(resident() - before) / many;
	printf("# %u peers of one %s queue pair: %.2f KiB each\n", many, arg ? "RD" : "UD", each);
	fflush(stdout);
	ENSURE(waitpid(pid, &status, 0) == pid && status == 0, "the peers end with %#x", (unsigned int)status);
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
	/* Memory that does not depend on the number of peers, such as buffers, is allowed. */
	ENSURE(each <= 1.0 + 2048.0 / many, "%.2f KiB for each peer", each);
#endif
	return NULL;
}

static const char *waits_end(size_t arg)
{
	struct anywarpdv_qp_init_attr dv = { 0 };
	struct anywarpdv_record record;
	struct dgram a;
	struct ibv_wc wc;

	(void)arg;
	TRY(find_all());
	TRY(open_dgram(&a, &dv));
	ENSURE(poll_records(a.qp, 1, &record, sizeof record, 30) == 0, "a record without a Write");
	ENSURE(poll_cq_for(a.scq, 1, &wc, 30) == 0, "a completion without a request");
	errno = 0;
	ENSURE(poll_records(a.qp, 0, &record, sizeof record, 0) == -1 && errno == EINVAL, "an array of no records is accepted");
	return NULL;
}

static const struct test tests[] = {
	{ "refused", refused, 0, 0, false },
	{ "record_path_mtu", write_record, 0, 0, false },
	{ "record_jumbo", write_record, 1, 0, false },
	{ "record_max", write_record, 2, 0, false },
	{ "record_reliable", write_record, 3, 0, false },
	{ "answer_a_record", answer_a_record, ANYWARPDV_QPT_UD, 0, false },
	{ "answer_a_record_reliable", answer_a_record, ANYWARPDV_QPT_RD, 0, false },
	{ "sizes", sizes, 0, 0, false },
	{ "chosen_port", chosen_port, 0, 0, false },
	{ "segment_size", segment_size, 0, 0, false },
	{ "record_waits", record_waits, 0, 0, false },
	{ "record_waits_unordered", record_waits, ANYWARPDV_QP_UNORDERED, 0, false },
	{ "restricted", restricted, 0, 0, false },
	{ "read_from_completions_ud", read_from_completions, ANYWARPDV_QPT_UD, 0, false },
	{ "read_from_completions_rd", read_from_completions, ANYWARPDV_QPT_RD, 0, false },
	{ "reads", reads, ANYWARPDV_QPT_UD, 0, false },
	{ "progress", progress, 0, 0, false },
	{ "undisturbed", undisturbed, 0, 0, false },
	{ "reads_reliable", reads, ANYWARPDV_QPT_RD, 0, false },
	{ "missing_peer", missing_peer, ANYWARPDV_QPT_UD, 0, false },
	{ "missing_peer_reliable", missing_peer, ANYWARPDV_QPT_RD, 0, false },
	{ "polled_deadlines", polled_deadlines, 0, 0, false },
	{ "queued_half_beats_deadline", queued_half_beats_deadline, 0, 0, false },
	{ "long_sends", long_sends, ANYWARPDV_QPT_UD, 0, false },
	{ "long_sends_reliable", long_sends, ANYWARPDV_QPT_RD, 0, false },
	{ "atomics", atomics, 0, 0, false },
	{ "refused_write", refused_write, 0, 0, false },
	{ "refused_send", refused_send, 0, 0, false },
	{ "waits_end", waits_end, 0, 0, false },
	{ "peers", peers, ANYWARPDV_QPT_UD, 120, true },
	{ "peers_reliable", peers, ANYWARPDV_QPT_RD, 120, true },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
