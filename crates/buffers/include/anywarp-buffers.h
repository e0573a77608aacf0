/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Buffers for RDMA over any libibverbs: copied, registered, or with a cached registration. See anywarp-buffers(7).
 */
#ifndef ANYWARP_BUFFERS_H
#define ANYWARP_BUFFERS_H

#include <stddef.h>
#include <stdint.h>
#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A manager, which provides the buffers of one protection domain. */
struct awbuf;

/* The settings of a manager. 0 stands for the default. */
struct awbuf_attr {
	size_t size;           /* sizeof(struct awbuf_attr) */
	int send_access;       /* enum ibv_access_flags for sending; default 0 */
	int recv_access;       /* the same for receiving; default IBV_ACCESS_LOCAL_WRITE */
	size_t critical_size;  /* memory up to this size is copied; default: measured */
	size_t pool_bytes;     /* limit of the memory for copies, for each direction; default 16 MiB */
	size_t cache_bytes;    /* limit of the bytes with cached registrations; default 256 MiB */
	size_t piece_size;     /* length of a piece; default 1 MiB */
	unsigned int threads;  /* number of threads that register pieces, including the caller; default: number of processors, at most 4 */
	unsigned int flags;    /* AWBUF_NO_CACHE, AWBUF_NO_WATCH */
};

enum {
	AWBUF_NO_CACHE = 1 << 0, /* cache no registrations */
	AWBUF_NO_WATCH = 1 << 1  /* cache only registrations of AWBUF_STABLE memory */
};

/* Flags of awbuf_get_send, awbuf_get_recv and awbuf_pieces_begin. */
enum {
	AWBUF_STABLE = 1 << 0 /* the memory stays mapped until the program calls awbuf_invalidate */
};

enum awbuf_how {
	AWBUF_COPIED = 1,     /* copied through memory of the manager */
	AWBUF_REGISTERED = 2, /* registered for this use */
	AWBUF_KEPT = 3        /* with a cached registration */
};

enum awbuf_use {
	AWBUF_SEND = 1,
	AWBUF_RECV = 2
};

/* Memory that is ready for a request. */
struct awbuf_buffer {
	void *addr; /* address for the request; not that of the program if how is AWBUF_COPIED */
	size_t length;
	uint32_t lkey;
	uint32_t rkey;
	enum awbuf_how how;
	void *opaque;
};

struct awbuf_stats {
	uint64_t critical_size;
	uint64_t watching;     /* 1: the kernel reports when memory is unmapped, moved or discarded */
	uint64_t copied;       /* buffers that were copied */
	uint64_t copied_bytes;
	uint64_t registered;   /* buffers registered for one use */
	uint64_t hits;         /* buffers with a cached registration */
	uint64_t kept;         /* registrations added to the cache */
	uint64_t invalidated;  /* cached registrations that ended because of a report of the kernel or a call of awbuf_invalidate */
	uint64_t evicted;      /* cached registrations that ended to make room for others */
	uint64_t cached;       /* registrations in the cache */
	uint64_t cached_bytes;
	uint64_t pool_bytes;
	uint64_t in_use;       /* buffers that are not released yet */
};

/* A long buffer in pieces. */
struct awbuf_pieces;

struct awbuf *awbuf_open(struct ibv_pd *pd, const struct awbuf_attr *attr);
int awbuf_close(struct awbuf *buffers);
int awbuf_query(struct awbuf *buffers, struct awbuf_stats *stats, size_t size);

int awbuf_get_send(struct awbuf *buffers, const void *addr, size_t length, unsigned int flags, struct awbuf_buffer *buffer);
int awbuf_get_recv(struct awbuf *buffers, void *addr, size_t length, unsigned int flags, struct awbuf_buffer *buffer);
int awbuf_release(struct awbuf_buffer *buffer, size_t received);
int awbuf_invalidate(struct awbuf *buffers, const void *addr, size_t length);

/* Data to send must be complete before this call: threads may copy later pieces before awbuf_pieces_next returns them. */
struct awbuf_pieces *awbuf_pieces_begin(struct awbuf *buffers, void *addr, size_t length, enum awbuf_use use, unsigned int flags);
int awbuf_pieces_next(struct awbuf_pieces *pieces, struct awbuf_buffer *buffer);
int awbuf_pieces_end(struct awbuf_pieces *pieces);

#ifdef __cplusplus
}
#endif

#endif
