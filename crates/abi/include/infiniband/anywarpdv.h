/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Extensions of anywarp to verbs: one-sided operations on datagrams.
 *
 * Units: lengths and offsets are in bytes; the name of a time contains its unit. Addresses and ports in socket structures are in
 * network byte order; the member `port` is in host byte order. A function that returns int returns 0 or a count, or -1 with
 * errno, unless its comment says otherwise. A member that is 0 has its default value, so a structure of zeroes has all defaults.
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
	ANYWARPDV_QPT_RD = 1
};

/* The length of the datagrams of a message that needs several. */
enum anywarpdv_segment {
	/* The path MTU: a lost packet loses one datagram. */
	ANYWARPDV_SEGMENT_PATH_MTU = 0,
	/* The length that jumbo frames of 9000 bytes carry. */
	ANYWARPDV_SEGMENT_JUMBO = 1,
	/* Up to 60 KiB of payload in each datagram. IP fragments such a datagram, and a lost fragment loses all of it. */
	ANYWARPDV_SEGMENT_MAX = 2
};

/*
 * When the record (struct anywarpdv_record) of a Write-Record is created at the receiver. A Write-Record is an RDMA Write on a
 * datagram queue pair.
 */
enum anywarpdv_record_mode {
	/* When the message is complete, or when no more of it will arrive. */
	ANYWARPDV_RECORD_ROBUST = 0,
	/* When its final datagram arrives. If that is lost, there is no record. */
	ANYWARPDV_RECORD_THESIS = 1,
	/* For each datagram. */
	ANYWARPDV_RECORD_CHUNK = 2
};

enum anywarpdv_qp_flags {
	/* Each record also has a completion, with the opcode ANYWARPDV_WC_RECORD, in the completion queue of receives. */
	ANYWARPDV_QP_RECORD_COMPLETIONS = 1 << 0,
	/* UD: report to peers why their messages are refused, at a limited rate. */
	ANYWARPDV_QP_REPORT_ERRORS = 1 << 1,
	/* RD: deliver messages of a peer as they arrive, instead of in the order in which it sent them. */
	ANYWARPDV_QP_UNORDERED = 1 << 2,
	/* RD: an error of one peer does not move the queue pair to the error state. */
	ANYWARPDV_QP_KEEP_GOING = 1 << 3,
	/* RD: Writes cause no records at the peer. */
	ANYWARPDV_QP_PLAIN_WRITES = 1 << 4
};

/*
 * A flag for send_flags of a work request and for wr_flags, in addition to those of enum ibv_send_flags. RD: the program does not
 * need the completion soon. The peer sends no acknowledgement for this request alone, so neither end has to handle one, and the
 * completion may come some 10 ms later.
 */
#define ANYWARPDV_SEND_ACK_LATER (1u << 30)

/*
 * The opcode of the completion of a record: wr_id is the number of the message, byte_len the number of bytes that have arrived, and src_qp the
 * queue pair of the writer. anywarpdv_wc_read_record returns the record.
 */
#define ANYWARPDV_WC_RECORD IBV_WC_DRIVER1

/* When the device's thread begins to handle what arrives while the program does not poll. */
enum anywarpdv_progress {
	/* 0.15 ms after the last poll. If the program had polled without a pause for at least 2 ms: 1 ms after the last poll. */
	ANYWARPDV_PROGRESS_AUTO = 0,
	/* 1 ms after the last poll, so that the thread does not disturb a program that computes between its polls. */
	ANYWARPDV_PROGRESS_POLLED = 1
};

struct anywarpdv_qp_init_attr {
	uint64_t comp_mask;		/* must be 0 */
	uint32_t driver_qp_type;	/* enum anywarpdv_qp_type */
	uint32_t flags;			/* enum anywarpdv_qp_flags */
	uint8_t segment;		/* enum anywarpdv_segment; must be 0 if segment_size is set */
	uint8_t record_mode;		/* enum anywarpdv_record_mode, of records of this queue pair */
	uint8_t repeats;		/* how often the last datagram of a Write-Record is repeated */
	uint8_t parity;			/* UD: datagrams for each parity datagram, 1 to 15; 0: no parity */
	uint32_t max_send_size;		/* longest Send, bytes; 0: 4096. Above 4096 it must be equal at the peer */
	uint32_t max_records;		/* limit of stored records and unreleased maps; RD: further writers wait; 0: 4096 */
	uint32_t max_reads;		/* limit of outstanding Reads and atomics, and of queued responses to each peer; 0: 16 */
	uint32_t max_read_size;		/* UD: longest Read of a peer; 0: 1 MiB */
	uint32_t grace_us;		/* how long datagrams are accepted after the final one; 0: 2000 */
	uint32_t deadline_us;		/* after this time without new bytes a message ends; 0: 100000 */
	uint32_t read_timeout_us;	/* UD: how long a Read waits for its response; 0: 500000 */
	uint32_t peer_timeout_ms;	/* RD: requests fail after this time without a packet of the peer; 0: 5000 */
	uint32_t segment_size;		/* payload bytes of each datagram of a message that needs several, a multiple of 8; 0: by
					   segment */
	uint32_t port;			/* UDP port of the queue pair, whose number is port * 256; 0: any port */
	uint32_t reserved;		/* must be 0 */
};

/* A record: a message that a peer wrote by ibv_wr_rdma_write(3) or ibv_wr_rdma_write_imm(3) on a datagram queue pair. */
struct anywarpdv_record {
	struct sockaddr_storage source;	/* address and UDP port of the writer */
	uint32_t src_qp;		/* queue pair of the writer */
	uint32_t message_id;		/* number of the message, among those of the writer */
	uint32_t rkey;			/* of the memory */
	uint32_t flags;			/* enum anywarpdv_record_flags */
	uint64_t base;			/* address of the first byte of the message, within the region */
	uint32_t length;		/* length of the message */
	uint32_t valid;			/* number of its bytes that have arrived */
	uint32_t offset;		/* of a chunk: its offset in the message */
	__be32 imm_data;		/* with ANYWARPDV_RECORD_WITH_IMM */
	uint64_t map;			/* the validity map, which the program releases; 0: [offset, offset + valid) has arrived */
};

enum anywarpdv_record_flags {
	/* The whole message has arrived. */
	ANYWARPDV_RECORD_COMPLETE = 1 << 0,
	/* The record is of one datagram; other datagrams of the message may have separate records. */
	ANYWARPDV_RECORD_IS_CHUNK = 1 << 1,
	/* The final datagram, or the notice that the message has ended, has arrived. */
	ANYWARPDV_RECORD_FINAL_SEEN = 1 << 2,
	ANYWARPDV_RECORD_WITH_IMM = 1 << 3
};

/* A range of bytes of a message that have arrived: [from, to). */
struct anywarpdv_range {
	uint32_t from;
	uint32_t to;
};

enum anywarpdv_error_flags {
	/* wr_id is that of the request. It is known for the last 1,024 messages of the queue pair. */
	ANYWARPDV_ERROR_WITH_WR_ID = 1 << 0
};

/* The error report of a peer about a message that was sent to it. */
struct anywarpdv_error {
	struct sockaddr_storage source;
	uint32_t src_qp;
	uint32_t message_id;
	uint8_t layer;			/* layer, type and code: as in a Terminate message (RFC 5040 section 4.8) */
	uint8_t type;
	uint8_t code;
	uint8_t flags;			/* enum anywarpdv_error_flags */
	uint32_t status;		/* enum ibv_wc_status of the request, if it was still outstanding */
	uint64_t wr_id;			/* with ANYWARPDV_ERROR_WITH_WR_ID */
};

/* Counters of a queue pair. They count datagrams unless the comment says otherwise. */
struct anywarpdv_counters {
	uint64_t rx_dgrams;		/* received */
	uint64_t rx_messages;		/* messages delivered */
	uint64_t rx_bad_crc;		/* dropped: CRC error */
	uint64_t rx_bad_hdr;		/* dropped: invalid header */
	uint64_t rx_qkey;		/* dropped: wrong Q_Key */
	uint64_t rx_stray;		/* dropped: for another queue pair, or not from the peer */
	uint64_t rx_state;		/* dropped: the queue pair was not ready, the memory of a receive was not writable, or a limit was reached */
	uint64_t rx_dup;		/* dropped: duplicate */
	uint64_t rx_late;		/* dropped: of a message that had ended */
	uint64_t rx_no_recv;		/* UD: dropped, because no receive was posted. RD: waited for a receive or for room for a record */
	uint64_t rx_stag;		/* dropped: access to the memory is not permitted */
	uint64_t rx_bounds;		/* dropped: too long, or too many gaps */
	uint64_t rx_repaired;		/* lost, and recovered by parity */
	uint64_t evicted;		/* incomplete messages that were discarded without a record */
	uint64_t rec_full;		/* records of complete messages */
	uint64_t rec_partial;		/* records of incomplete messages, or of parts of messages */
	uint64_t rec_overflow;		/* UD: records that were lost for lack of room */
	uint64_t reads_timeout;		/* Reads that timed out */
	uint64_t err_in;		/* error reports of peers */
	uint64_t err_out;		/* error reports to peers */
	uint64_t tx_dgrams;		/* passed to the socket */
	uint64_t tx_errors;		/* refused by the socket */
	uint64_t tx_stalls;		/* UD: times that sending waited in vain for a peer's report of what it had received */
	uint64_t rd_again;		/* RD: retransmitted packets */
	uint64_t rd_probes;		/* RD: packets that probed a silent peer */
	uint64_t rd_acks;		/* RD: packets with only an acknowledgement */
	uint64_t rd_bad_echo;		/* RD: packets that echoed a wrong token */
};

/* The datagram capabilities of the device. */
struct anywarpdv_device_attr {
	uint64_t comp_mask;		/* 0 */
	uint32_t qp_types;		/* bit 1 << t for each enum anywarpdv_qp_type t */
	uint32_t qp_flags;		/* supported enum anywarpdv_qp_flags */
	uint64_t send_ops_ud;		/* enum ibv_qp_create_send_ops_flags of ANYWARPDV_QPT_UD */
	uint64_t send_ops_rd;		/* the same of ANYWARPDV_QPT_RD */
	uint32_t max_message_size;	/* longest message, bytes */
	uint32_t min_segment_size;	/* limits of segment_size, bytes */
	uint32_t max_segment_size;
	uint32_t max_parity;		/* largest value of parity */
};

/*
 * `inlen`, `reclen` and similar arguments are sizes of structures at the time when the program was compiled. If the program knows
 * fewer members than the library, it gets only those. If it knows more, the library sets them to 0 in structures that it fills, and
 * the program has to set them to 0 in attributes that it passes (otherwise: EOPNOTSUPP).
 */

/* Returns whether the device is one of anywarp and supports these functions. */
bool anywarpdv_is_supported(struct ibv_device *device);

/* Queries the datagram capabilities of the device. `inlen` is sizeof(*attr). EINVAL: a pointer is null. */
int anywarpdv_query_device(struct ibv_context *context, struct anywarpdv_device_attr *attr, uint32_t inlen);

/*
 * Sets the progress of the context. ANYWARPDV_PROGRESS_POLLED takes effect only while all contexts of the process that
 * have completion queues have it.
 * EINVAL: `context` is null, or `progress` is not a value of the enumeration.
 */
int anywarpdv_set_progress(struct ibv_context *context, enum anywarpdv_progress progress);

/*
 * Creates a datagram queue pair with one-sided operations. send_ops_flags of `attr_ex` may contain, besides the Sends,
 * RDMA_WRITE, RDMA_WRITE_WITH_IMM and RDMA_READ; on RD also the atomics, SEND_WITH_INV, LOCAL_INV and BIND_MW. `inlen` is
 * sizeof(*attr). Returns null with errno if it fails. EOPNOTSUPP: an operation or option is not supported. EADDRINUSE: the port
 * is in use.
 */
struct ibv_qp *anywarpdv_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr_ex,
				      const struct anywarpdv_qp_init_attr *attr, uint32_t inlen);

/*
 * Removes up to `max` records. `reclen` is sizeof(*records). Waits for the first one for `timeout_ms`; 0: does not wait; -1:
 * waits without a limit. Returns their number, or 0 after a timeout.
 */
int anywarpdv_poll_records(struct ibv_qp *qp, int max, struct anywarpdv_record *records, uint32_t reclen,
			   int timeout_ms);

/*
 * Stores in `ranges`, in ascending order, up to `max` ranges of the bytes that have arrived. A record without a map is permitted.
 * Returns the number of ranges of the record. `reclen` is sizeof(*record), `rangelen` sizeof(*ranges). EINVAL: the map was
 * released.
 */
int anywarpdv_read_map(struct ibv_qp *qp, const struct anywarpdv_record *record, uint32_t reclen, int max,
		       struct anywarpdv_range *ranges, uint32_t rangelen);

/*
 * Writes a bitmap: bit i % 8 of byte i / 8 is set if all bytes of [i * granularity, (i + 1) * granularity) within the message
 * have arrived. Returns the number of bits. EINVAL: the map was released. ENOSPC: the bitmap needs more than `size` bytes.
 */
int anywarpdv_read_bitmap(struct ibv_qp *qp, const struct anywarpdv_record *record, uint32_t reclen,
			  uint32_t granularity, uint8_t *bits, size_t size);

/* Releases a map after the program has read it. Map 0 is ignored. EINVAL: the map does not exist. */
int anywarpdv_release_map(struct ibv_qp *qp, uint64_t map);

/*
 * Creates an address handle for the writer of a record, as ibv_create_ah_from_wc(3) does for the sender of a datagram. Requests
 * to the writer also need its queue pair number, src_qp, and the Q_Key. Returns null with errno if it fails.
 */
struct ibv_ah *anywarpdv_create_ah_from_record(struct ibv_pd *pd, const struct anywarpdv_record *record,
					       uint32_t reclen);

/* Removes up to `max` errors that peers reported, as anywarpdv_poll_records does. `errlen` is sizeof(*errors). */
int anywarpdv_poll_errors(struct ibv_qp *qp, int max, struct anywarpdv_error *errors, uint32_t errlen,
			  int timeout_ms);

/* As ibv_poll_cq(3), but waits for the first completion for `timeout_ms`; -1: without a limit. */
int anywarpdv_poll_cq(struct ibv_cq *cq, int max, struct ibv_wc *wc, int timeout_ms);

/*
 * Returns the message number of the current completion of `cq`, between ibv_start_poll(3) and ibv_end_poll(3). For a request of a
 * datagram queue pair, the records and error reports of the peer contain the same number. For a record, it is that of the written
 * message. Returns 0 for other completions. `cq` must be a queue of anywarp.
 */
uint32_t anywarpdv_wc_read_message_id(struct ibv_cq_ex *cq);

/*
 * Removes the record of the current completion of `cq`, whose opcode is ANYWARPDV_WC_RECORD. `qp` is the queue pair whose number
 * the completion contains, and `reclen` is sizeof(*record). anywarpdv_poll_records does not return this record again. Returns 0,
 * or -1 with errno. EINVAL: the completion is of another kind or queue pair. ENOENT: the record was removed before.
 */
int anywarpdv_wc_read_record(struct ibv_cq_ex *cq, struct ibv_qp *qp, struct anywarpdv_record *record,
			     uint32_t reclen);

/* Reads the counters of the queue pair. `inlen` is sizeof(*counters). */
int anywarpdv_query_counters(struct ibv_qp *qp, struct anywarpdv_counters *counters, uint32_t inlen);

/*
 * Restricts the region to datagrams from the host of `source`, and from its queue pair `src_qp` unless that is 0. Null: permits
 * all peers again. Queue pairs that are connected over TCP are not affected. Returns 0, or -1 with errno. EINVAL: `source_len` is
 * too small for an address. EAFNOSUPPORT: the address is neither IPv4 nor IPv6.
 */
int anywarpdv_restrict_mr(struct ibv_mr *mr, const struct sockaddr *source, socklen_t source_len, uint32_t src_qp);

#ifdef __cplusplus
}
#endif

#endif
