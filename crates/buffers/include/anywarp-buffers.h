/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Buffers for RDMA over any libibverbs: copied, registered, or kept registered, whichever costs least. man 7 anywarp-buffers
 */
#ifndef ANYWARP_BUFFERS_H
#define ANYWARP_BUFFERS_H

#include <stddef.h>
#include <stdint.h>
#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The buffers of one protection domain. */
struct awbuf;

/* How a manager works. What is 0 has its default. */
struct awbuf_attr {
	size_t size;           /* sizeof(struct awbuf_attr) */
	int send_access;       /* enum ibv_access_flags of memory that is sent; 0 by default */
	int recv_access;       /* of memory that is received into; IBV_ACCESS_LOCAL_WRITE by default */
	size_t critical_size;  /* memory up to this size is copied; measured by default */
	size_t pool_bytes;     /* to copy through, at most, for each direction; 16 MiB by default */
	size_t cache_bytes;    /* whose registrations are kept, at most; 256 MiB by default */
	size_t piece_size;     /* of awbuf_pieces_next; 1 MiB by default */
	unsigned int threads;  /* that register pieces; up to 4 by default */
	unsigned int flags;    /* AWBUF_NO_CACHE, AWBUF_NO_WATCH */
};

enum {
	AWBUF_NO_CACHE = 1 << 0, /* no registration is kept */
	AWBUF_NO_WATCH = 1 << 1, /* none but those of AWBUF_STABLE memory */
};

/* Flags of a use of memory. */
enum {
	AWBUF_STABLE = 1 << 0, /* the program calls awbuf_invalidate before the memory changes */
};

enum awbuf_how {
	AWBUF_COPIED = 1,     /* through memory of the manager */
	AWBUF_REGISTERED = 2, /* for this use */
	AWBUF_KEPT = 3,       /* for other uses as well */
};

enum awbuf_use {
	AWBUF_SEND = 1,
	AWBUF_RECV = 2,
};

/* Memory that is ready for a request. */
struct awbuf_buffer {
	void *addr; /* for the request; not the program's if how is AWBUF_COPIED */
	size_t length;
	uint32_t lkey;
	uint32_t rkey;
	enum awbuf_how how;
	void *opaque;
};

struct awbuf_stats {
	uint64_t critical_size;
	uint64_t watching;     /* 1: the kernel tells when memory changes */
	uint64_t copied;       /* buffers */
	uint64_t copied_bytes;
	uint64_t registered;   /* buffers, for one use */
	uint64_t hits;         /* buffers whose registration was there */
	uint64_t kept;         /* registrations that were made to be kept */
	uint64_t invalidated;  /* of these, because the memory changed */
	uint64_t evicted;      /* of these, for others */
	uint64_t cached;       /* that are kept now */
	uint64_t cached_bytes;
	uint64_t pool_bytes;
	uint64_t in_use;       /* buffers */
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

struct awbuf_pieces *awbuf_pieces_begin(struct awbuf *buffers, void *addr, size_t length, enum awbuf_use use, unsigned int flags);
int awbuf_pieces_next(struct awbuf_pieces *pieces, struct awbuf_buffer *buffer);
int awbuf_pieces_end(struct awbuf_pieces *pieces);

#ifdef __cplusplus
}
#endif

#endif
