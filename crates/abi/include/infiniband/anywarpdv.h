/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * What anywarp has beyond verbs: one-sided operations on datagrams.
 *
 * Units: lengths and offsets in bytes; times in the unit that their name says. Addresses and ports in host terms, as in
 * the socket structures they stand in. Functions that return int give 0 or a count, or -1 with errno, unless they say
 * otherwise. What a member 0 means is said there: a structure of zeroes asks for the defaults.
 *
 * Manual: anywarpdv(7) and a page for each function. Wire format: docs/datagram-iwarp.md.
 */
#ifndef INFINIBAND_ANYWARPDV_H
#define INFINIBAND_ANYWARPDV_H

#include <infiniband/verbs.h>
#include <sys/socket.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Type of the queue pair. */
enum anywarpdv_qp_type {
	/* Unreliable datagrams; ibv_qp_init_attr_ex.qp_type is IBV_QPT_UD. */
	ANYWARPDV_QPT_UD = 0,
	/* Reliable datagrams; qp_type is IBV_QPT_DRIVER. */
	ANYWARPDV_QPT_RD = 1,
};

/* How long the datagrams of a message that has several are. */
enum anywarpdv_segment {
	/* What the path carries whole: one lost packet costs one datagram. */
	ANYWARPDV_SEGMENT_PATH_MTU = 0,
	/* What jumbo frames of 9000 bytes carry. */
	ANYWARPDV_SEGMENT_JUMBO = 1,
	/* What IP allows; it cuts them, and one lost fragment costs all of up to 60 KiB. */
	ANYWARPDV_SEGMENT_MAX = 2,
};

/* When the record of a Write-Record that came in is made. */
enum anywarpdv_record_mode {
	/* When the message is complete, or when nothing more of it will come: then with what has. */
	ANYWARPDV_RECORD_ROBUST = 0,
	/* When its final datagram arrives; without that one never. */
	ANYWARPDV_RECORD_THESIS = 1,
	/* For each datagram by itself. */
	ANYWARPDV_RECORD_CHUNK = 2,
};

enum anywarpdv_qp_flags {
	/* A record also makes a completion of opcode ANYWARPDV_WC_RECORD in the receive queue's completion queue. */
	ANYWARPDV_QP_RECORD_COMPLETIONS = 1 << 0,
	/* UD: tell peers, now and then, why their messages are refused. */
	ANYWARPDV_QP_REPORT_ERRORS = 1 << 1,
	/* RD: deliver messages of a peer as they come; otherwise in the order in which it sent them. */
	ANYWARPDV_QP_UNORDERED = 1 << 2,
	/* RD: what fails towards one peer leaves the queue pair in its state; otherwise it goes to the error state. */
	ANYWARPDV_QP_KEEP_GOING = 1 << 3,
	/* RD: Writes leave no record at the peer. */
	ANYWARPDV_QP_PLAIN_WRITES = 1 << 4,
};

/*
 * Opcode of the completion of a record: wr_id is the message, byte_len the bytes that are there, src_qp the writer's queue
 * pair. anywarpdv_wc_read_record gives the record.
 */
#define ANYWARPDV_WC_RECORD IBV_WC_DRIVER1

struct anywarpdv_qp_init_attr {
	uint64_t comp_mask;		/* must be 0 */
	uint32_t driver_qp_type;	/* enum anywarpdv_qp_type */
	uint32_t flags;			/* enum anywarpdv_qp_flags */
	uint8_t segment;		/* enum anywarpdv_segment; 0 with segment_size */
	uint8_t record_mode;		/* enum anywarpdv_record_mode, of records made here */
	uint8_t repeats;		/* times that the end of a Write-Record is said again */
	uint8_t parity;			/* datagrams to one parity datagram, 1 to 15; 0: none. UD */
	uint32_t max_send_size;		/* longest Send, bytes; 0: 4096. More only if the peer says as much */
	uint32_t max_records;		/* records that wait for the program, and RD writers for them; 0: 4096 */
	uint32_t max_reads;		/* Reads and atomics outstanding, and answers that wait; 0: 16 */
	uint32_t max_read_size;		/* most bytes that a peer may read at once, UD; 0: 1 MiB */
	uint32_t grace_us;		/* how long datagrams may come behind the final one; 0: 2000 */
	uint32_t deadline_us;		/* how long a message may go without a datagram; 0: 100000 */
	uint32_t read_timeout_us;	/* how long a Read waits for its answer, UD; 0: 500000 */
	uint32_t peer_timeout_ms;	/* how long a peer may be silent, RD; 0: 5000 */
	uint32_t segment_size;		/* payload bytes of each datagram of a message that has several, a multiple of 8; 0: as
					   segment says */
	uint32_t port;			/* UDP port of the queue pair, whose number is then port * 256; 0: any */
	uint32_t reserved;		/* must be 0 */
};

/* One record: what a peer wrote here by ibv_wr_rdma_write(3) or ibv_wr_rdma_write_imm(3) on a datagram queue pair. */
struct anywarpdv_record {
	struct sockaddr_storage source;	/* address and UDP port of the writer */
	uint32_t src_qp;		/* its queue pair */
	uint32_t message_id;		/* number of the message, of this writer */
	uint32_t rkey;			/* memory written to */
	uint32_t flags;			/* enum anywarpdv_record_flags */
	uint64_t base;			/* address of the message's first byte, in the region's terms */
	uint32_t length;		/* bytes of the message */
	uint32_t valid;			/* bytes of it that are there */
	uint32_t offset;		/* of a chunk: where in the message it begins */
	__be32 imm_data;		/* if ANYWARPDV_RECORD_WITH_IMM */
	uint64_t map;			/* names the validity map, to be released; 0: [offset, offset + valid) is there */
};

enum anywarpdv_record_flags {
	/* All of the message is there. */
	ANYWARPDV_RECORD_COMPLETE = 1 << 0,
	/* Of one datagram; others of the message may have records of their own. */
	ANYWARPDV_RECORD_IS_CHUNK = 1 << 1,
	/* The final datagram, or the word that the message ended, came. */
	ANYWARPDV_RECORD_FINAL_SEEN = 1 << 2,
	ANYWARPDV_RECORD_WITH_IMM = 1 << 3,
};

/* Bytes of a message that are there: [from, to). */
struct anywarpdv_range {
	uint32_t from;
	uint32_t to;
};

enum anywarpdv_error_flags {
	/* wr_id is that of the request. It is known for the last 1,024 messages of the queue pair. */
	ANYWARPDV_ERROR_WITH_WR_ID = 1 << 0,
};

/* A peer says what went wrong with a message that was sent to it. */
struct anywarpdv_error {
	struct sockaddr_storage source;
	uint32_t src_qp;
	uint32_t message_id;
	uint8_t layer;			/* of a Terminate message: RFC 5040 section 4.8 */
	uint8_t type;
	uint8_t code;
	uint8_t flags;			/* enum anywarpdv_error_flags */
	uint32_t status;		/* enum ibv_wc_status of the request, if that was still there */
	uint64_t wr_id;			/* if ANYWARPDV_ERROR_WITH_WR_ID */
};

/* What a queue pair has seen; datagrams unless it says otherwise. */
struct anywarpdv_counters {
	uint64_t rx_dgrams;		/* arrived */
	uint64_t rx_messages;		/* messages delivered */
	uint64_t rx_bad_crc;		/* dropped: damaged */
	uint64_t rx_bad_hdr;		/* dropped: headers that break a rule */
	uint64_t rx_qkey;		/* dropped: wrong Q_Key */
	uint64_t rx_stray;		/* dropped: for no queue pair of this device */
	uint64_t rx_state;		/* dropped: the queue pair was not ready */
	uint64_t rx_dup;		/* dropped: had arrived before */
	uint64_t rx_late;		/* dropped: of a message that was over */
	uint64_t rx_no_recv;		/* dropped: no receive posted. RD: waited, for one or for room for a record */
	uint64_t rx_stag;		/* dropped: memory that may not be accessed */
	uint64_t rx_bounds;		/* dropped: too long, or too many gaps */
	uint64_t rx_repaired;		/* lost, and made from others by parity */
	uint64_t evicted;		/* messages that stayed incomplete and have no record */
	uint64_t rec_full;		/* records of complete messages */
	uint64_t rec_partial;		/* records of others, or of chunks */
	uint64_t rec_overflow;		/* records that found no room, UD */
	uint64_t reads_timeout;		/* Reads that were never answered */
	uint64_t err_in;		/* errors that peers reported */
	uint64_t err_out;		/* errors reported to peers */
	uint64_t tx_dgrams;		/* handed to the socket */
	uint64_t tx_errors;		/* refused by the socket */
	uint64_t tx_stalls;		/* times that the wait for a peer's report ran into its time-out */
	uint64_t rd_again;		/* RD: packets that were sent once more */
	uint64_t rd_probes;		/* RD: packets that asked a silent peer */
	uint64_t rd_acks;		/* RD: packets that only acknowledged */
	uint64_t rd_bad_echo;		/* RD: packets that echoed a token which is not theirs */
};

/* What the device can do on datagrams. */
struct anywarpdv_device_attr {
	uint64_t comp_mask;		/* 0 */
	uint32_t qp_types;		/* bit 1 << t for each enum anywarpdv_qp_type t */
	uint32_t qp_flags;		/* enum anywarpdv_qp_flags that are known */
	uint64_t send_ops_ud;		/* enum ibv_qp_create_send_ops_flags of ANYWARPDV_QPT_UD */
	uint64_t send_ops_rd;		/* the same of ANYWARPDV_QPT_RD */
	uint32_t max_message_size;	/* longest message, bytes */
	uint32_t min_segment_size;	/* least and largest segment_size, bytes */
	uint32_t max_segment_size;
	uint32_t max_parity;		/* largest value of parity */
};

/*
 * Sizes of structures: `inlen`, `reclen` and the like are the size that the program was compiled with. A program that knows fewer
 * members than the library gets those, and of members that the library does not know it reads zeroes.
 */

/* Whether the device is of anywarp, so that these functions work on it. */
bool anywarpdv_is_supported(struct ibv_device *device);

/* What the device can do. `inlen` is sizeof(*attr). EINVAL: a null pointer. */
int anywarpdv_query_device(struct ibv_context *context, struct anywarpdv_device_attr *attr, uint32_t inlen);

/*
 * Makes a datagram queue pair with one-sided operations. send_ops_flags of `attr_ex` may have, beside the Sends:
 * RDMA_WRITE, RDMA_WRITE_WITH_IMM and RDMA_READ; on RD also the atomics, SEND_WITH_INV, LOCAL_INV and BIND_MW.
 * `inlen` is sizeof(*attr). Null and errno on failure: EINVAL, EOPNOTSUPP for an operation or option that is not known,
 * EADDRINUSE for a port that is taken.
 */
struct ibv_qp *anywarpdv_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr_ex,
				      const struct anywarpdv_qp_init_attr *attr, uint32_t inlen);

/*
 * Takes up to `max` records, `reclen` = sizeof(*records) bytes each. Waits for the first one for `timeout_ms`: 0 not at all,
 * -1 for as long as it takes. Returns how many; 0 when the time is over.
 */
int anywarpdv_poll_records(struct ibv_qp *qp, int max, struct anywarpdv_record *records, uint32_t reclen,
			   int timeout_ms);

/*
 * Puts up to `max` ranges of bytes that are there in `ranges`, in order, whether the record has a map or not. Returns how
 * many there are. EINVAL: the map was released. `reclen` is sizeof(*record), `rangelen` sizeof(*ranges).
 */
int anywarpdv_read_map(struct ibv_qp *qp, const struct anywarpdv_record *record, uint32_t reclen, int max,
		       struct anywarpdv_range *ranges, uint32_t rangelen);

/*
 * The same as bits: bit i % 8 of byte i / 8 says that all of [i * granularity, (i + 1) * granularity) is there, as far as
 * the message goes. Returns the number of bits. EINVAL: the map was released; ENOSPC: `size` bytes are too few.
 */
int anywarpdv_read_bitmap(struct ibv_qp *qp, const struct anywarpdv_record *record, uint32_t reclen,
			  uint32_t granularity, uint8_t *bits, size_t size);

/* The program has read the map; of map 0 there is nothing to release. EINVAL: no such map. */
int anywarpdv_release_map(struct ibv_qp *qp, uint64_t map);

/*
 * An address handle to the writer of a record, as ibv_create_ah_from_wc(3) makes one to the sender of a datagram; its queue
 * pair is src_qp, and the Q_Key is the program's. Null and errno on failure.
 */
struct ibv_ah *anywarpdv_create_ah_from_record(struct ibv_pd *pd, const struct anywarpdv_record *record,
					       uint32_t reclen);

/* Takes up to `max` errors that peers reported, `errlen` = sizeof(*errors) bytes each, as anywarpdv_poll_records does. */
int anywarpdv_poll_errors(struct ibv_qp *qp, int max, struct anywarpdv_error *errors, uint32_t errlen,
			  int timeout_ms);

/* ibv_poll_cq(3) that waits for the first completion for `timeout_ms`; never for ever unless that is -1. */
int anywarpdv_poll_cq(struct ibv_cq *cq, int max, struct ibv_wc *wc, int timeout_ms);

/*
 * The number of the message of the completion that `cq` shows, between ibv_start_poll(3) and ibv_end_poll(3): of a request
 * that was sent on a datagram queue pair, the number by which the peer's records and error reports name it; of a record its
 * own. 0 for other completions. `cq` is of anywarp.
 */
uint32_t anywarpdv_wc_read_message_id(struct ibv_cq_ex *cq);

/*
 * Takes the record of the completion that `cq` shows, of opcode ANYWARPDV_WC_RECORD; `qp` is the queue pair whose number
 * the completion has, `reclen` sizeof(*record). Records taken here do not come by anywarpdv_poll_records. Returns 0, or -1
 * with errno. EINVAL: another completion, or another queue pair; ENOENT: the record was taken before.
 */
int anywarpdv_wc_read_record(struct ibv_cq_ex *cq, struct ibv_qp *qp, struct anywarpdv_record *record,
			     uint32_t reclen);

/* What the queue pair has seen. `inlen` is sizeof(*counters). */
int anywarpdv_query_counters(struct ibv_qp *qp, struct anywarpdv_counters *counters, uint32_t inlen);

/*
 * From now on only datagrams from the host of `source` reach the region, and only from queue pair `src_qp` there unless
 * that is 0. Null: from everybody again. Connected queue pairs over TCP are not asked. Returns 0, or -1 with errno. EINVAL:
 * `source_len` bytes are no whole address; EAFNOSUPPORT: neither IPv4 nor IPv6.
 */
int anywarpdv_restrict_mr(struct ibv_mr *mr, const struct sockaddr *source, socklen_t source_len, uint32_t src_qp);

#ifdef __cplusplus
}
#endif

#endif
