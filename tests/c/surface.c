/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Less common objects of verbs: device memory, on-demand paging, null regions, thread and parent domains, imported
 * objects, atomic writes, XRC. Tests that data is transferred, and which arguments are refused.
 */
#include "ends.h"

#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdatomic.h>

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

static const struct want usual = { 0 };

static int close_dm(void *p) { return ibv_free_dm(p); }

static struct ibv_dm *new_dm(size_t len)
{
	struct ibv_alloc_dm_attr attr = { .length = len };
	struct ibv_dm *dm = ibv_alloc_dm(device, &attr);

	if (dm)
		keep(close_dm, dm, "ibv_free_dm");
	return dm;
}

/* ---------------------------------------------------------------- device memory */

/* The peer writes and reads device memory, and the program copies data into it and out of it. */
static const char *device_memory(size_t arg)
{
	const unsigned int access = IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
				    IBV_ACCESS_REMOTE_READ;
	struct region mine;
	struct ibv_send_wr wr, *bad;
	struct ibv_sge sge;
	struct ibv_dm *dm;
	struct ibv_mr *mr;
	uint32_t word = 0x01020304, got = 0;
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&mine, p.a.pd, 256, IBV_ACCESS_LOCAL_WRITE));
	dm = new_dm(4096);
	ENSURE(dm, "ibv_alloc_dm: %s", strerror(errno));
	mr = ibv_reg_dm_mr(p.b.pd, dm, 1024, 512, access);
	ENSURE(mr, "ibv_reg_dm_mr: %s", strerror(errno));
	keep(close_mr, mr, "ibv_dereg_mr");
	ENSURE(ibv_free_dm(dm) == EBUSY, "device memory with a memory region was freed");

	memset(mine.at, 0x5a, 256);
	sge = sge_of(&mine, 0, 256);
	wr = send_wr(1, IBV_WR_RDMA_WRITE, &sge, 1);
	wr.wr.rdma.rkey = mr->rkey;
	wr.wr.rdma.remote_addr = 256;
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 1, IBV_WC_RDMA_WRITE, NULL));
	ENSURE(!ibv_memcpy_from_dm(&got, dm, 1024 + 256 + 252, 4), "ibv_memcpy_from_dm");
	ENSURE(got == 0x5a5a5a5a, "the last word is 0x%x", got);
	ENSURE(!ibv_memcpy_from_dm(&got, dm, 1024 + 252, 4), "ibv_memcpy_from_dm");
	ENSURE(got == 0, "a word before the Write is 0x%x", got);

	ENSURE(!ibv_memcpy_to_dm(dm, 1024, &word, 4), "ibv_memcpy_to_dm");
	wr = send_wr(2, IBV_WR_RDMA_READ, &sge, 1);
	wr.wr.rdma.rkey = mr->rkey;
	wr.wr.rdma.remote_addr = 0;
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 2, IBV_WC_RDMA_READ, NULL));
	ENSURE(!memcmp(mine.at, &word, 4), "the Read returned other data");

	/* One octet beyond the region. */
	wr = send_wr(3, IBV_WR_RDMA_WRITE, &sge, 1);
	wr.wr.rdma.rkey = mr->rkey;
	wr.wr.rdma.remote_addr = 257;
	ENSURE(!ibv_post_send(p.a.qp, &wr, &bad), "ibv_post_send");
	TRY(expect_status(p.a.scq, 3, IBV_WC_REM_ACCESS_ERR));
	return NULL;
}

static const char *device_memory_limits(size_t arg)
{
	struct ibv_alloc_dm_attr attr = { 0 };
	struct ibv_device_attr_ex ex;
	struct ibv_dm *all;
	uint32_t word = 0;
	struct ibv_pd *pd = new_pd();

	(void)arg;
	ENSURE(pd && !ibv_query_device_ex(device, NULL, &ex), "an object of the test cannot be created");
	ENSURE(ex.max_dm_size > 0, "max_dm_size is 0");
	errno = 0;
	ENSURE(!ibv_alloc_dm(device, &attr) && errno == EINVAL, "0 bytes: %s", strerror(errno));
	attr.length = ex.max_dm_size + 1;
	ENSURE(!ibv_alloc_dm(device, &attr) && errno == ENOMEM, "too much: %s", strerror(errno));
	all = new_dm(ex.max_dm_size);
	ENSURE(all, "ibv_alloc_dm of all: %s", strerror(errno));
	attr.length = 4;
	ENSURE(!ibv_alloc_dm(device, &attr) && errno == ENOMEM, "one word more: %s", strerror(errno));
	ENSURE(ibv_memcpy_to_dm(all, 2, &word, 4) == EINVAL, "ibv_memcpy_to_dm accepts an odd offset");
	ENSURE(ibv_memcpy_to_dm(all, ex.max_dm_size, &word, 4) == EINVAL, "ibv_memcpy_to_dm writes beyond the end");
	ENSURE(ibv_memcpy_from_dm(&word, all, UINT64_MAX - 3, 4) == EINVAL, "ibv_memcpy_from_dm accepts an offset that wraps");
	ENSURE(!ibv_reg_dm_mr(pd, all, 0, 64, IBV_ACCESS_LOCAL_WRITE) && errno == EINVAL,
	       "a region that is not zero-based is accepted");
	ENSURE(!ibv_reg_dm_mr(pd, all, 64, ex.max_dm_size, IBV_ACCESS_ZERO_BASED) && errno == EINVAL,
	       "a region beyond the end is accepted");
	return NULL;
}

/* ---------------------------------------------------------------- on-demand paging */

#define PAGE ((size_t)4096)

/* An access to unmapped pages completes with an error. The peer can access pages that were unmapped and mapped again. */
static const char *unmapped_pages(size_t remote)
{
	const unsigned int access = ALL_ACCESS | IBV_ACCESS_ON_DEMAND;
	struct region mine;
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct ibv_mr *mr;
	struct pair p;
	uint8_t *at;

	TRY(open_pair(&p, &usual));
	TRY(new_region(&mine, p.a.pd, 2 * PAGE, IBV_ACCESS_LOCAL_WRITE));
	at = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ENSURE(at != MAP_FAILED, "mmap");
	mr = ibv_reg_mr(remote ? p.b.pd : p.a.pd, at, 4 * PAGE, (int)access);
	ENSURE(mr, "ibv_reg_mr: %s", strerror(errno));
	keep(close_mr, mr, "ibv_dereg_mr");
	/* Unmaps the middle and maps it again. */
	ENSURE(!munmap(at + PAGE, 2 * PAGE), "munmap");
	ENSURE(mmap(at + PAGE, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
		       at + PAGE, "the second mmap fails");
	memset(mine.at, 0x77, 2 * PAGE);
	sge = sge_of(&mine, 0, 2 * PAGE);
	if (remote) {
		wr = send_wr(1, IBV_WR_RDMA_WRITE, &sge, 1);
		wr.wr.rdma.rkey = mr->rkey;
		wr.wr.rdma.remote_addr = (uintptr_t)at + PAGE;
		TRY(post(p.a.qp, &wr));
		TRY(expect_ok(p.a.scq, 1, IBV_WC_RDMA_WRITE, NULL));
		TRY(all_bytes(at + PAGE, 2 * PAGE, 0x77, "pages that came back"));
	}
	ENSURE(!munmap(at + PAGE, 2 * PAGE), "munmap");
	if (remote) {
		wr = send_wr(2, IBV_WR_RDMA_WRITE, &sge, 1);
		wr.wr.rdma.rkey = mr->rkey;
		wr.wr.rdma.remote_addr = (uintptr_t)at + PAGE / 2;
		TRY(post(p.a.qp, &wr));
		TRY(expect_status(p.a.scq, 2, IBV_WC_REM_ACCESS_ERR));
	} else {
		sge = (struct ibv_sge){ .addr = (uintptr_t)at, .length = 4 * PAGE, .lkey = mr->lkey };
		wr = send_wr(2, IBV_WR_SEND, &sge, 1);
		TRY(post(p.a.qp, &wr));
		TRY(expect_status(p.a.scq, 2, IBV_WC_LOC_PROT_ERR));
	}
	munmap(at, PAGE);
	munmap(at + 3 * PAGE, PAGE);
	return NULL;
}

/* An access of the peer fails if the protection of the pages forbids it. A Read of read-only pages succeeds. */
static const char *pages_without_rights(size_t arg)
{
	static const int rights[] = { PROT_NONE, PROT_READ };
	struct region mine;
	struct ibv_send_wr wr;
	struct ibv_sge sge;

	(void)arg;
	for (size_t i = 0; i < COUNT(rights); i++) {
		struct ibv_mr *mr;
		struct pair p;
		uint8_t *at;

		TRY(open_pair(&p, &usual));
		TRY(new_region(&mine, p.a.pd, 64, IBV_ACCESS_LOCAL_WRITE));
		at = mmap(NULL, PAGE, rights[i], MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		ENSURE(at != MAP_FAILED, "mmap");
		mr = ibv_reg_mr(p.b.pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND | ALL_ACCESS);
		ENSURE(mr, "ibv_reg_mr: %s", strerror(errno));
		keep(close_mr, mr, "ibv_dereg_mr");
		sge = sge_of(&mine, 0, 64);
		if (rights[i] == PROT_READ) {
			wr = send_wr(1, IBV_WR_RDMA_READ, &sge, 1);
			wr.wr.rdma.rkey = mr->rkey;
			wr.wr.rdma.remote_addr = (uintptr_t)at;
			TRY(post(p.a.qp, &wr));
			TRY(expect_ok(p.a.scq, 1, IBV_WC_RDMA_READ, NULL));
		}
		wr = send_wr(2, IBV_WR_RDMA_WRITE, &sge, 1);
		wr.wr.rdma.rkey = mr->rkey;
		wr.wr.rdma.remote_addr = (uintptr_t)at;
		TRY(post(p.a.qp, &wr));
		TRY(expect_status(p.a.scq, 2, IBV_WC_REM_ACCESS_ERR));
		munmap(at, PAGE);
	}
	return NULL;
}

/*
 * Without on-demand paging, memory that cannot be accessed with the rights of the region is refused. (From Linux 6.11 on that is also true
 * if only a page in its middle cannot be accessed.)
 */
static const char *pages_without_rights_of_the_region(size_t arg)
{
	static const int rights[] = { PROT_NONE, PROT_READ };
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	uint8_t *at;

	(void)arg;
	TRY(open_device());
	pd = new_pd();
	ENSURE(pd, "an object of the test cannot be created");
	for (size_t i = 0; i < COUNT(rights); i++) {
		at = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		ENSURE(at != MAP_FAILED && !mprotect(at + PAGE, PAGE, rights[i]), "mmap");
		errno = 0;
		ENSURE(!ibv_reg_mr(pd, at, 2 * PAGE, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT,
		       "memory that cannot be written is registered for writing: %s", strerror(errno));
		ENSURE(!ibv_reg_mr(pd, at + PAGE, 2 * PAGE, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT,
		       "memory that cannot be written is registered for writing: %s", strerror(errno));
		mr = ibv_reg_mr(pd, at, 2 * PAGE, 0);
		ENSURE(mr, "ibv_reg_mr: %s", strerror(errno));
		ENSURE(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE),
		       "memory that cannot be written is registered again for writing");
		ENSURE(!mprotect(at + PAGE, PAGE, PROT_READ | PROT_WRITE), "mprotect");
		ENSURE(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE), "ibv_rereg_mr");
		ENSURE(!ibv_dereg_mr(mr), "ibv_dereg_mr");
		munmap(at, 3 * PAGE);
	}
	ENSURE(!ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE), "the whole address space is registered");
	return NULL;
}

/* A region of the whole address space. ibv_advise_mr prefetches its pages. */
static const char *implicit(size_t arg)
{
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct ibv_mr *a, *b;
	struct pair p;
	uint8_t *at;

	(void)arg;
	TRY(open_pair(&p, &usual));
	a = ibv_reg_mr(p.a.pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE);
	ENSURE(a, "ibv_reg_mr: %s", strerror(errno));
	keep(close_mr, a, "ibv_dereg_mr");
	b = ibv_reg_mr(p.b.pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND | ALL_ACCESS);
	ENSURE(b, "ibv_reg_mr: %s", strerror(errno));
	keep(close_mr, b, "ibv_dereg_mr");
	at = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ENSURE(at != MAP_FAILED, "mmap");
	memset(at, 0x31, PAGE);
	sge = (struct ibv_sge){ .addr = (uintptr_t)at, .length = PAGE, .lkey = a->lkey };
	ENSURE(!ibv_advise_mr(p.a.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1), "advise");
	wr = send_wr(1, IBV_WR_RDMA_WRITE, &sge, 1);
	wr.wr.rdma.rkey = b->rkey;
	wr.wr.rdma.remote_addr = (uintptr_t)at + 2 * PAGE;
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 1, IBV_WC_RDMA_WRITE, NULL));
	TRY(all_bytes(at + 2 * PAGE, PAGE, 0x31, "target"));
	wr.wr_id = 2;
	wr.wr.rdma.remote_addr = 8;
	TRY(post(p.a.qp, &wr));
	TRY(expect_status(p.a.scq, 2, IBV_WC_REM_ACCESS_ERR));
	ENSURE(ibv_advise_mr(p.a.pd, 77, 0, &sge, 1) == EOPNOTSUPP, "an unknown advice is accepted");
	ENSURE(ibv_advise_mr(p.b.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1) == EPERM,
	       "a region of another domain is accepted");
	munmap(at, 4 * PAGE);
	return NULL;
}

/* The errno of ibv_advise_mr tells what is wrong with the element. */
static const char *advice_refused(size_t arg)
{
	struct ibv_mr *mr, *plain;
	struct ibv_sge sge;
	struct ibv_pd *pd;
	uint8_t *at;
	int rc;

	(void)arg;
	TRY(open_device());
	pd = new_pd();
	ENSURE(pd, "an object of the test cannot be created");
	at = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ENSURE(at != MAP_FAILED, "mmap");
	mr = new_mr(pd, at, 2 * PAGE, IBV_ACCESS_ON_DEMAND);
	if (!mr)
		SKIP("no on-demand paging");
	plain = new_mr(pd, at, PAGE, IBV_ACCESS_LOCAL_WRITE);
	ENSURE(plain, "ibv_reg_mr: %s", strerror(errno));
	sge = (struct ibv_sge){ .addr = (uintptr_t)at, .length = PAGE, .lkey = mr->lkey };
#define ADVISE(advice, flags) (rc = ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_##advice, flags, &sge, 1))
	ENSURE(!ADVISE(PREFETCH, 0), "ibv_advise_mr: %s", strerror(rc));
	ENSURE(ADVISE(PREFETCH, 2) == EINVAL, "an unknown flag: %s", strerror(rc));
	ENSURE(ADVISE(PREFETCH_WRITE, 0) == EPERM, "a region that is only read: %s", strerror(rc));
	sge.length = 3 * PAGE;
	ENSURE(ADVISE(PREFETCH, 0) == EFAULT, "a range beyond the region: %s", strerror(rc));
	sge.length = PAGE;
	munmap(at + PAGE, PAGE);
	sge.addr += PAGE;
	ENSURE(ADVISE(PREFETCH, 0) == EFAULT, "a page that is not mapped: %s", strerror(rc));
	sge.addr -= PAGE;
	sge.lkey = plain->lkey;
	ENSURE(ADVISE(PREFETCH, 0) == ENOENT, "a region without on-demand paging: %s", strerror(rc));
	sge.lkey = 0;
	ENSURE(ADVISE(PREFETCH, 0) == ENOENT, "a key of no region: %s", strerror(rc));
	ENSURE(!ibv_dereg_mr(plain), "ibv_dereg_mr");
	forget(plain);
	munmap(at, 4 * PAGE);
	return NULL;
}

/* ---------------------------------------------------------------- null regions */

static const char *null_region(size_t arg)
{
	struct region mine, theirs;
	struct ibv_send_wr wr;
	struct ibv_sge sge[2];
	struct ibv_mr *null;
	struct ibv_wc wc;
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &usual));
	TRY(new_region(&mine, p.a.pd, 100, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, p.b.pd, 300, ALL_ACCESS));
	null = ibv_alloc_null_mr(p.b.pd);
	ENSURE(null, "ibv_alloc_null_mr: %s", strerror(errno));
	keep(close_mr, null, "ibv_dereg_mr");

	/* 60 bytes are discarded by a null region, 40 are stored. */
	memset(mine.at, 0x21, 60);
	memset(mine.at + 60, 0x22, 40);
	sge[0] = (struct ibv_sge){ .addr = 12345, .length = 60, .lkey = null->lkey };
	sge[1] = sge_of(&theirs, 0, 40);
	TRY(post_recv(p.b.qp, 1, sge, 2));
	sge[0] = sge_of(&mine, 0, 100);
	wr = send_wr(2, IBV_WR_SEND, sge, 1);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.b.rcq, 1, IBV_WC_RECV, &wc));
	ENSURE(wc.byte_len == 100, "byte_len %u", wc.byte_len);
	TRY(all_bytes(theirs.at, 40, 0x22, "the stored bytes"));
	TRY(expect_ok(p.a.scq, 2, IBV_WC_SEND, NULL));

	/* A null region is read as zeros, whatever was written to it. */
	memset(mine.at, 0xff, 100);
	sge[0] = sge_of(&mine, 0, 100);
	TRY(post_recv(p.a.qp, 3, sge, 1));
	sge[0] = (struct ibv_sge){ .addr = 0, .length = 100, .lkey = null->lkey };
	wr = send_wr(4, IBV_WR_SEND, sge, 1);
	TRY(post(p.b.qp, &wr));
	TRY(expect_ok(p.a.rcq, 3, IBV_WC_RECV, NULL));
	TRY(all_bytes(mine.at, 100, 0, "the bytes that were read"));
	return NULL;
}

/* ---------------------------------------------------------------- domains */

static int close_td(void *p) { return ibv_dealloc_td(p); }

static const char *domains(size_t arg)
{
	struct ibv_td_init_attr td_attr = { 0 };
	struct ibv_parent_domain_init_attr attr = { 0 };
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 4, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD };
	struct ibv_pd *pd = new_pd(), *parent;
	struct ibv_cq_ex *cq;
	struct ibv_td *td;
	struct ibv_mr *mr;
	static uint8_t memory[64];
	int rc;

	(void)arg;
	td = ibv_alloc_td(device, &td_attr);
	ENSURE(pd && td, "set-up: %s", strerror(errno));
	keep(close_td, td, "ibv_dealloc_td");
	errno = 0;
	ENSURE(!ibv_alloc_parent_domain(device, &attr) && errno == EINVAL, "without a domain: %s", strerror(errno));
	attr.pd = pd;
	attr.td = td;
	attr.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
	ENSURE(!ibv_alloc_parent_domain(device, &attr) && errno == EINVAL, "null allocators are accepted");
	attr.comp_mask = 0;
	parent = ibv_alloc_parent_domain(device, &attr);
	ENSURE(parent, "ibv_alloc_parent_domain: %s", strerror(errno));
	keep(close_pd, parent, "ibv_dealloc_pd of the parent domain");
	ENSURE(ibv_dealloc_td(td) == EBUSY, "a thread domain in use was freed");
	ENSURE(ibv_dealloc_pd(pd) == EBUSY, "a protection domain with a parent domain was freed");
	mr = ibv_reg_mr(parent, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	ENSURE(mr, "ibv_reg_mr: %s", strerror(errno));
	ENSURE(ibv_dealloc_pd(parent) == EBUSY, "a parent domain in use was freed");
	ENSURE(!ibv_dereg_mr(mr), "ibv_dereg_mr");
	cq_attr.parent_domain = parent;
	cq = ibv_create_cq_ex(device, &cq_attr);
	ENSURE(cq, "ibv_create_cq_ex: %s", strerror(errno));
	rc = ibv_dealloc_pd(parent);
	if (!rc)
		forget(parent);
	ENSURE(rc == EBUSY, "ibv_dealloc_pd of the parent domain of a completion queue returns %d", rc);
	ENSURE(!ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), "ibv_destroy_cq");
	cq_attr.parent_domain = NULL;
	ENSURE(!ibv_create_cq_ex(device, &cq_attr) && errno == EINVAL, "a completion queue of no domain: %s", strerror(errno));
	return NULL;
}

/* ---------------------------------------------------------------- import */

static const char *imported(size_t arg)
{
	struct ibv_pd *pd, *again;
	struct ibv_context *other;
	static uint8_t memory[64];
	struct ibv_mr *mr, *same, *last;
	struct ibv_device_attr_ex limits;
	struct ibv_alloc_dm_attr all = { 0 };
	struct ibv_dm *dm, *copied;
	int copy, pipes[2];

	(void)arg;
	TRY(open_device());
	pd = new_pd();
	ENSURE(pd, "an object of the test cannot be created");
	mr = new_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	ENSURE(mr, "an object of the test cannot be created");
	ENSURE(!pipe(pipes), "pipe");
	errno = 0;
	ENSURE(!ibv_import_device(pipes[0]) && errno == EOPNOTSUPP, "a pipe as a device: %s", strerror(errno));
	close(pipes[0]);
	close(pipes[1]);
	ENSURE(!ibv_import_device(-1) && errno == EOPNOTSUPP, "an invalid descriptor is imported");
	copy = dup(device->cmd_fd);
	ENSURE(copy >= 0, "cmd_fd: %s", strerror(errno));
	other = ibv_import_device(copy);
	close(copy);
	ENSURE(other, "ibv_import_device: %s", strerror(errno));
	ENSURE(!ibv_import_pd(other, 0x7fffffff) && errno == EINVAL, "a domain with an invalid handle is imported");
	again = ibv_import_pd(other, pd->handle);
	ENSURE(again, "ibv_import_pd: %s", strerror(errno));
	ENSURE(!ibv_import_mr(again, 0) && errno == EINVAL, "a region with an invalid handle is imported");
	same = ibv_import_mr(again, mr->handle);
	ENSURE(same && same->lkey == mr->lkey && same->length == 64 && !same->addr, "ibv_import_mr");
	ENSURE(ibv_dealloc_pd(pd) == EBUSY, "a protection domain was freed while it is imported");
	ibv_unimport_mr(same);
	ibv_unimport_pd(again);
	/* One of the users destroys the objects, whichever it is. The others give up their handles. */
	again = ibv_import_pd(other, pd->handle);
	ENSURE(again, "ibv_import_pd: %s", strerror(errno));
	last = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	ENSURE(last, "ibv_reg_mr: %s", strerror(errno));
	same = ibv_import_mr(again, last->handle);
	ENSURE(same && !ibv_dereg_mr(same), "ibv_dereg_mr of an imported region");
	ibv_unimport_mr(last);
	ibv_unimport_pd(again);
	ENSURE(!ibv_query_device_ex(device, NULL, &limits), "ibv_query_device_ex");
	all.length = (size_t)limits.max_dm_size;
	dm = ibv_alloc_dm(device, &all);
	ENSURE(dm, "ibv_alloc_dm: %s", strerror(errno));
	copied = ibv_import_dm(device, dm->handle);
	ENSURE(copied && !ibv_free_dm(copied), "ibv_free_dm of imported memory");
	ibv_unimport_dm(dm);
	dm = ibv_alloc_dm(device, &all);
	ENSURE(dm && !ibv_free_dm(dm), "ibv_alloc_dm: %s", strerror(errno));
	ENSURE(!ibv_close_device(other), "ibv_close_device");
	return NULL;
}

/* ---------------------------------------------------------------- small */

/* A null region cannot be created while no descriptor is free. Later it can. */
static const char *null_region_later(size_t arg)
{
	struct ibv_pd *pd;
	struct rlimit all, none;
	struct ibv_mr *mr;

	(void)arg;
	TRY(open_device());
	pd = new_pd();
	ENSURE(pd, "an object of the test cannot be created");
	ENSURE(!getrlimit(RLIMIT_NOFILE, &all), "getrlimit");
	none = (struct rlimit){ .rlim_cur = 0, .rlim_max = all.rlim_max };
	ENSURE(!setrlimit(RLIMIT_NOFILE, &none), "setrlimit");
	mr = ibv_alloc_null_mr(pd);
	ENSURE(!setrlimit(RLIMIT_NOFILE, &all), "setrlimit");
	ENSURE(!mr, "a null region was created without a descriptor");
	mr = ibv_alloc_null_mr(pd);
	ENSURE(mr, "ibv_alloc_null_mr: %s", strerror(errno));
	ENSURE(!ibv_dereg_mr(mr), "ibv_dereg_mr");
	return NULL;
}

/* If an attribute is invalid, ibv_modify_srq changes none. */
static const char *receives_refused(size_t arg)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_srq_attr attr = { .max_wr = 8, .srq_limit = 9 };
	struct ibv_pd *pd;
	struct ibv_srq *srq;

	(void)arg;
	TRY(open_device());
	pd = new_pd();
	ENSURE(pd, "an object of the test cannot be created");
	srq = ibv_create_srq(pd, &init);
	ENSURE(srq, "ibv_create_srq: %s", strerror(errno));
	keep(close_srq, srq, "ibv_destroy_srq");
	ENSURE(ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) == EINVAL, "a limit above the size is accepted");
	ENSURE(!ibv_query_srq(srq, &attr) && attr.max_wr == 16 && attr.srq_limit == 0, "max_wr %u, srq_limit %u", attr.max_wr,
	       attr.srq_limit);
	return NULL;
}

/* The limit is an attribute of ibv_modify_srq only: programs leave it uninitialized when they create a queue. */
static const char *limit_when_created(size_t arg)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 16, .max_sge = 1, .srq_limit = 0xeeeeeeee } };
	struct ibv_srq_init_attr_ex ex = { .attr = init.attr, .comp_mask = IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE };
	struct ibv_srq_attr attr;
	struct ibv_srq *srq;

	(void)arg;
	TRY(open_device());
	ex.pd = new_pd();
	ENSURE(ex.pd, "an object of the test cannot be created");
	for (int extended = 0; extended < 2; extended++) {
		srq = extended ? ibv_create_srq_ex(device, &ex) : ibv_create_srq(ex.pd, &init);
		ENSURE(srq, "a shared receive queue: %s", strerror(errno));
		keep(close_srq, srq, "ibv_destroy_srq");
		ENSURE(!ibv_query_srq(srq, &attr) && attr.srq_limit == 0, "srq_limit %u", attr.srq_limit);
	}
	/* Fields that the device does not know are not ignored. */
	ex.comp_mask |= IBV_SRQ_INIT_ATTR_RESERVED;
	ENSURE(!ibv_create_srq_ex(device, &ex) && (errno == EOPNOTSUPP || errno == EINVAL || errno == ENOSYS),
	       "an unknown field: %s", strerror(errno));
	return NULL;
}

/* A program whose header is newer has a longer structure: since rdma-core 49, ibv_port_attr ends with another field. It is zero. */
static const char *longer_structures(size_t arg)
{
	struct { struct ibv_port_attr known; uint8_t more[60]; } port;
	struct { struct ibv_device_attr_ex known; uint8_t more[64]; } attr;
	const struct verbs_context *functions;

	(void)arg;
	TRY(open_device());
	functions = verbs_get_ctx(device);
	ENSURE(functions, "the context has no functions");
	memset(&port, 0xee, sizeof port);
	ENSURE(!functions->query_port(device, PORT, &port.known, sizeof port), "query_port");
	ENSURE(port.known.state == port_attr.state, "state %d", port.known.state);
	TRY(all_bytes(port.more, sizeof port.more, 0, "further fields of the port"));
	memset(&attr, 0xee, sizeof attr);
	ENSURE(!functions->query_device_ex(device, NULL, &attr.known, sizeof attr), "query_device_ex");
	ENSURE(attr.known.orig_attr.max_qp == device_attr.max_qp, "max_qp %d", attr.known.orig_attr.max_qp);
	return all_bytes(attr.more, sizeof attr.more, 0, "further fields of the device");
}

/* A window of type 2 of an unreliable connection, bound and invalidated with ibv_wr_*. */
static const char *window_of_uc(size_t arg)
{
	const struct want want = { .type = IBV_QPT_UC };
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_UC,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_mw_bind_info info = { .length = 64, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE };
	struct region mine, theirs;
	struct ibv_qp_ex *ex;
	struct ibv_mw *mw;
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct end a, b;
	uint32_t key;
	int rc;

	(void)arg;
	TRY(open_device());
	TRY(open_end(&a, &want));
	TRY(open_end(&b, &want));
	mw = ibv_alloc_mw(b.pd, IBV_MW_TYPE_2);
	if (!mw)
		SKIP("no windows of type 2");
	keep(close_mw, mw, "memory window");
	init.send_cq = b.scq;
	init.recv_cq = b.rcq;
	init.pd = b.pd;
	b.qp = ibv_create_qp_ex(device, &init);
	ENSURE(b.qp, "ibv_create_qp_ex: %s", strerror(errno));
	keep(close_qp, b.qp, "queue pair");
	TRY(connect_ends(&a, &b, &want));
	TRY(new_region(&mine, a.pd, 64, 0));
	TRY(new_region(&theirs, b.pd, 128, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND));
	memset(mine.at, 0x47, 64);
	info.mr = theirs.mr;
	info.addr = (uintptr_t)theirs.at + 64;
	key = ibv_inc_rkey(mw->rkey);
	ex = ibv_qp_to_qp_ex(b.qp);
	ibv_wr_start(ex);
	ex->wr_id = 1;
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_bind_mw(ex, mw, key, &info);
	rc = ibv_wr_complete(ex);
	ENSURE(!rc, "ibv_wr_complete: %s", strerror(rc));
	TRY(expect_ok(b.scq, 1, IBV_WC_BIND_MW, NULL));

	TRY(post_recv(b.qp, 2, NULL, 0));
	sge = sge_of(&mine, 0, 64);
	wr = send_wr(3, IBV_WR_RDMA_WRITE_WITH_IMM, &sge, 1);
	wr.wr.rdma.rkey = key;
	wr.wr.rdma.remote_addr = info.addr;
	TRY(post(a.qp, &wr));
	TRY(expect_ok(a.scq, 3, IBV_WC_RDMA_WRITE, NULL));
	TRY(expect_ok(b.rcq, 2, IBV_WC_RECV_RDMA_WITH_IMM, NULL));
	TRY(all_bytes(theirs.at, 64, FRESH, "bytes before the window"));
	TRY(all_bytes(theirs.at + 64, 64, 0x47, "the window"));

	ibv_wr_start(ex);
	ex->wr_id = 4;
	ibv_wr_local_inv(ex, key);
	rc = ibv_wr_complete(ex);
	ENSURE(!rc, "ibv_wr_complete: %s", strerror(rc));
	TRY(expect_ok(b.scq, 4, IBV_WC_LOCAL_INV, NULL));
	/* Now nothing is bound to the region. */
	ENSURE(!ibv_dereg_mr(theirs.mr), "ibv_dereg_mr");
	forget(theirs.mr);
	return NULL;
}

/* Programs compare the time of a completion with `tv_nsec` of the clock, which mlx4 and mlx5 set to the number of ticks. */
static const char *clock_of_completions(size_t arg)
{
	struct ibv_cq_init_attr_ex init = { .cqe = 4, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP };
	struct ibv_values_ex before = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK }, after = before;
	struct ibv_poll_cq_attr attr = { 0 };
	struct ibv_qp_init_attr qp_init = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR }, ready = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad;
	struct ibv_pd *pd;
	struct ibv_cq_ex *queue;
	struct ibv_qp *qp;
	uint64_t at;
	int rc;

	(void)arg;
	TRY(open_device());
	pd = new_pd();
	ENSURE(pd, "an object of the test cannot be created");
	queue = ibv_create_cq_ex(device, &init);
	ENSURE(queue, "ibv_create_cq_ex: %s", strerror(errno));
	keep(close_cq, ibv_cq_ex_to_cq(queue), "ibv_destroy_cq");
	qp_init.send_cq = qp_init.recv_cq = ibv_cq_ex_to_cq(queue);
	qp = ibv_create_qp(pd, &qp_init);
	ENSURE(qp, "ibv_create_qp: %s", strerror(errno));
	keep(close_qp, qp, "ibv_destroy_qp");
	ENSURE(!ibv_query_rt_values_ex(device, &before), "ibv_query_rt_values_ex");
	/* More than a second, because `tv_nsec` must not start at 0 again with each second. */
	sleep_ms(1100);
	ENSURE(!ibv_modify_qp(qp, &ready, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "ibv_modify_qp");
	ENSURE(!ibv_post_recv(qp, &wr, &bad), "ibv_post_recv");
	ENSURE(!ibv_modify_qp(qp, &error, IBV_QP_STATE), "ibv_modify_qp");
	rc = ibv_start_poll(queue, &attr);
	ENSURE(!rc, "ibv_start_poll: %s", strerror(rc));
	at = ibv_wc_read_completion_ts(queue);
	ibv_end_poll(queue);
	ENSURE(!ibv_query_rt_values_ex(device, &after), "ibv_query_rt_values_ex");
	ENSURE((uint64_t)before.raw_clock.tv_nsec < at && at < (uint64_t)after.raw_clock.tv_nsec, "%llu is not between %lld and %lld",
	       (unsigned long long)at, (long long)before.raw_clock.tv_nsec, (long long)after.raw_clock.tv_nsec);
	return NULL;
}

/* ---------------------------------------------------------------- atomic writes */

#define ODP_ATOMIC_WRITE (1u << 7) /* IBV_ODP_SUPPORT_ATOMIC_WRITE, since rdma-core 58 */

static const char *atomic_write(size_t on_demand)
{
	struct want w = { 0 };
	struct region mine, theirs;
	struct ibv_device_attr_ex ex;
	struct ibv_send_wr wr, *bad;
	struct ibv_sge sge;
	struct pair p;

	TRY(open_pair(&p, &w));
	TRY(new_region(&mine, p.a.pd, 16, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, p.b.pd, 64, ALL_ACCESS | (on_demand ? IBV_ACCESS_ON_DEMAND : 0)));
	if (on_demand) {
		ENSURE(!ibv_query_device_ex(device, NULL, &ex), "ibv_query_device_ex");
		ENSURE(ex.odp_caps.per_transport_caps.rc_odp_caps & ODP_ATOMIC_WRITE && ex.xrc_odp_caps & ODP_ATOMIC_WRITE,
		       "rc_odp_caps %#x, xrc_odp_caps %#x", ex.odp_caps.per_transport_caps.rc_odp_caps, ex.xrc_odp_caps);
	}
	memset(mine.at, 0x3c, 16);
	sge = sge_of(&mine, 0, 8);
	wr = rdma_wr(1, IBV_WR_ATOMIC_WRITE, &sge, 1, &theirs, 8);
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.a.scq, 1, IBV_WC_ATOMIC_WRITE, NULL));
	TRY(all_bytes(theirs.at + 8, 8, 0x3c, "the word"));
	TRY(all_bytes(theirs.at + 16, 48, FRESH, "bytes after the word"));
	wr.wr.rdma.remote_addr += 4;
	ENSURE(ibv_post_send(p.a.qp, &wr, &bad) == EINVAL, "an address between two words is accepted");
	wr.wr.rdma.remote_addr += 4;
	sge.length = 4;
	ENSURE(ibv_post_send(p.a.qp, &wr, &bad) == EINVAL, "half a word is accepted");
	return NULL;
}

/* ---------------------------------------------------------------- XRC */

static int close_xrcd(void *p) { return ibv_close_xrcd(p); }

struct xrc_end {
	struct ibv_xrcd *domain;
	struct ibv_qp *sender, *receiver;
	struct ibv_srq *srq[2];
	struct ibv_cq *cq[2]; /* of each shared receive queue */
	struct ibv_cq *scq;
	uint32_t number[2];
};

static const char *open_xrc(struct xrc_end *e, struct ibv_pd *pd)
{
	struct ibv_xrcd_init_attr domain = {
		.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT
	};
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD };

	e->domain = ibv_open_xrcd(device, &domain);
	ENSURE(e->domain, "ibv_open_xrcd: %s", strerror(errno));
	keep(close_xrcd, e->domain, "ibv_close_xrcd");
	for (int i = 0; i < 2; i++) {
		struct ibv_srq_init_attr_ex srq = {
			.attr = { .max_wr = 16, .max_sge = 1 },
			.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD |
				     IBV_SRQ_INIT_ATTR_CQ,
			.srq_type = IBV_SRQT_XRC,
			.pd = pd,
			.xrcd = e->domain,
		};

		e->cq[i] = new_cq(16, NULL);
		srq.cq = e->cq[i];
		e->srq[i] = ibv_create_srq_ex(device, &srq);
		ENSURE(e->srq[i], "ibv_create_srq_ex: %s", strerror(errno));
		keep(close_srq, e->srq[i], "ibv_destroy_srq");
		ENSURE(!ibv_get_srq_num(e->srq[i], &e->number[i]), "ibv_get_srq_num");
	}
	ENSURE(e->number[0] != e->number[1], "two queues with the same number");
	init.xrcd = e->domain;
	e->receiver = ibv_create_qp_ex(device, &init);
	ENSURE(e->receiver, "the receiving end: %s", strerror(errno));
	keep(close_qp, e->receiver, "ibv_destroy_qp");
	e->scq = new_cq(16, NULL);
	init = (struct ibv_qp_init_attr_ex){ .qp_type = IBV_QPT_XRC_SEND,
					     .comp_mask = IBV_QP_INIT_ATTR_PD,
					     .pd = pd,
					     .send_cq = e->scq,
					     .cap = { .max_send_wr = 16, .max_send_sge = 1 } };
	e->sender = ibv_create_qp_ex(device, &init);
	ENSURE(e->sender, "the sending end: %s", strerror(errno));
	keep(close_qp, e->sender, "ibv_destroy_qp");
	return NULL;
}

/*
 * Connects an XRC send queue pair with the receive queue pair of the other side. `all`: passes the attributes of both ends to
 * each queue pair, as perftest does. The kernel ignores the attributes that belong to the other end.
 */
static const char *connect_xrc(struct ibv_qp *sender, struct ibv_qp *receiver, bool all)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT,
				    .port_num = PORT,
				    .qp_access_flags = ALL_ACCESS,
				    .path_mtu = IBV_MTU_4096,
				    .min_rnr_timer = 12,
				    .timeout = 14,
				    .retry_cnt = 7,
				    .rnr_retry = 7,
				    .max_rd_atomic = 4,
				    .max_dest_rd_atomic = 4 };
	int init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	int rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	int rts = IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT;
	int rtr_receiver = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	int rts_sender = IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;

	ENSURE(!ibv_modify_qp(sender, &attr, init) && !ibv_modify_qp(receiver, &attr, init), "ibv_modify_qp to INIT fails");
	attr.ah_attr = address_of(&local_gid, port_attr.lid, false);
	attr.qp_state = IBV_QPS_RTR;
	attr.dest_qp_num = receiver->qp_num;
	ENSURE(!ibv_modify_qp(sender, &attr, all ? rtr | rtr_receiver : rtr), "the sender to RTR: %s", strerror(errno));
	attr.dest_qp_num = sender->qp_num;
	ENSURE(!ibv_modify_qp(receiver, &attr, rtr | rtr_receiver), "the receiver to RTR: %s", strerror(errno));
	attr.qp_state = IBV_QPS_RTS;
	ENSURE(!ibv_modify_qp(receiver, &attr, all ? rts | rts_sender : rts), "the receiver to RTS: %s", strerror(errno));
	ENSURE(!ibv_modify_qp(sender, &attr, rts | rts_sender), "ibv_modify_qp of the sender to RTS fails");
	return NULL;
}

/* One connection reaches both shared receive queues, and the memory of their protection domain. */
static const char *xrc(size_t arg)
{
	struct ibv_pd *pd = new_pd(), *other = new_pd();
	struct region mine, theirs, foreign;
	struct xrc_end a, b;
	struct ibv_send_wr wr, *bad;
	struct ibv_sge sge;
	struct ibv_wc wc;

	ENSURE(pd && other, "an object of the test cannot be created");
	TRY(open_xrc(&a, pd));
	TRY(open_xrc(&b, pd));
	TRY(connect_xrc(a.sender, b.receiver, arg));
	TRY(new_region(&mine, pd, 64, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, pd, 256, ALL_ACCESS));
	TRY(new_region(&foreign, other, 64, ALL_ACCESS));
	ENSURE(ibv_close_xrcd(b.domain) == EBUSY, "a domain in use was closed");
	memset(mine.at, 0x42, 64);
	for (int i = 0; i < 6; i++) {
		int to = i % 3 == 2;

		sge = sge_of(&theirs, 64, 64);
		/* The last two messages find no receive at first. */
		if (i < 4)
			TRY(post_srq_recv(b.srq[to], (uint64_t)(100 + i), &sge, 1));
		sge = sge_of(&mine, 0, 64);
		wr = send_wr((uint64_t)i, i == 1 ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND, &sge, 1);
		wr.imm_data = 77;
		wr.qp_type.xrc.remote_srqn = b.number[to];
		TRY(post(a.sender, &wr));
		if (i >= 4) {
			TRY(no_wc(a.scq, QUIET_MS));
			sge = sge_of(&theirs, 64, 64);
			TRY(post_srq_recv(b.srq[to], (uint64_t)(100 + i), &sge, 1));
		}
		TRY(expect_ok(b.cq[to], (uint64_t)(100 + i), IBV_WC_RECV, &wc));
		ENSURE(wc.byte_len == 64 && wc.qp_num == b.receiver->qp_num, "byte_len %u", wc.byte_len);
		ENSURE(i != 1 || (wc.wc_flags & IBV_WC_WITH_IMM && wc.imm_data == 77),
		       "the immediate data is missing or wrong");
		TRY(expect_ok(a.scq, (uint64_t)i, IBV_WC_SEND, NULL));
	}
	TRY(all_bytes(theirs.at + 64, 64, 0x42, "the sent data"));
	wr = rdma_wr(10, IBV_WR_RDMA_WRITE, &sge, 1, &theirs, 0);
	sge = sge_of(&mine, 0, 64);
	wr.qp_type.xrc.remote_srqn = b.number[0];
	TRY(post(a.sender, &wr));
	TRY(expect_ok(a.scq, 10, IBV_WC_RDMA_WRITE, NULL));
	TRY(all_bytes(theirs.at, 64, 0x42, "the written data"));
	ENSURE(ibv_post_send(b.receiver, &wr, &bad) == EINVAL, "the receiving end can send");
	/* Memory of a protection domain other than that of the queue. */
	wr = rdma_wr(11, IBV_WR_RDMA_WRITE, &sge, 1, &foreign, 0);
	wr.qp_type.xrc.remote_srqn = b.number[0];
	TRY(post(a.sender, &wr));
	TRY(expect_status(a.scq, 11, IBV_WC_REM_ACCESS_ERR));
	TRY(all_bytes(foreign.at, 64, FRESH, "memory of another domain"));
	/* A shared receive queue that does not exist. */
	TRY(connect_xrc(b.sender, a.receiver, false));
	wr = send_wr(12, IBV_WR_SEND, &sge, 1);
	wr.qp_type.xrc.remote_srqn = 0xfffff0;
	TRY(post(b.sender, &wr));
	TRY(expect_status(b.scq, 12, IBV_WC_REM_INV_REQ_ERR));
	return NULL;
}

/* A shared receive queue raises its limit event, and is destroyed while the peer still sends to it. */
static const char *xrc_queue_destroyed(size_t arg)
{
	struct ibv_srq_attr limit = { .srq_limit = 2 };
	struct ibv_pd *pd = new_pd();
	struct region mine, theirs;
	struct xrc_end a, b;
	struct ibv_send_wr wr;
	struct ibv_sge sge;

	(void)arg;
	ENSURE(pd, "an object of the test cannot be created");
	TRY(open_xrc(&a, pd));
	TRY(open_xrc(&b, pd));
	TRY(connect_xrc(a.sender, b.receiver, arg));
	TRY(new_region(&mine, pd, 8, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&theirs, pd, 8, ALL_ACCESS));
	sge = sge_of(&theirs, 0, 8);
	for (uint64_t id = 0; id < 3; id++)
		TRY(post_srq_recv(b.srq[0], id, &sge, 1));
	ENSURE(!ibv_modify_srq(b.srq[0], &limit, IBV_SRQ_LIMIT), "ibv_modify_srq");
	sge = sge_of(&mine, 0, 8);
	for (uint64_t id = 0; id < 2; id++) {
		wr = send_wr(id, IBV_WR_SEND, &sge, 1);
		wr.qp_type.xrc.remote_srqn = b.number[0];
		TRY(post(a.sender, &wr));
		TRY(expect_ok(a.scq, id, IBV_WC_SEND, NULL));
		TRY(expect_ok(b.cq[0], id, IBV_WC_RECV, NULL));
	}
	TRY(async_event(IBV_EVENT_SRQ_LIMIT_REACHED, b.srq[0]));
	forget(b.srq[0]);
	ENSURE(!ibv_destroy_srq(b.srq[0]), "ibv_destroy_srq: %s", strerror(errno));
	/* One receive was still posted. It must not be used any more. */
	memset(theirs.at, 0, 8);
	wr.wr_id = 7;
	memset(mine.at, 0x11, 8);
	TRY(post(a.sender, &wr));
	TRY(no_wc(b.cq[0], QUIET_MS));
	TRY(all_bytes(theirs.at, 8, 0, "the buffer of a destroyed queue"));
	return NULL;
}

/* XRC domains that are identified by a file. */
static const char *xrc_domains(size_t arg)
{
	struct ibv_xrcd_init_attr init = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS };
	struct ibv_qp_init_attr_ex qp_init = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD };
	char name[] = "/tmp/anywarp-xrc-XXXXXX";
	struct ibv_xrcd *one, *same;
	struct ibv_qp *first;
	int fd = mkstemp(name);

	(void)arg;
	TRY(open_device());
	ENSURE(fd >= 0, "mkstemp");
	unlink(name);
	errno = 0;
	init.fd = -1;
	ENSURE(!ibv_open_xrcd(device, &init) && errno == EINVAL, "an anonymous domain without O_CREAT: %s", strerror(errno));
	init.fd = fd;
	ENSURE(!ibv_open_xrcd(device, &init) && errno == ENOENT, "a domain that does not exist: %s", strerror(errno));
	init.oflags = O_CREAT;
	one = ibv_open_xrcd(device, &init);
	ENSURE(one, "ibv_open_xrcd: %s", strerror(errno));
	keep(close_xrcd, one, "ibv_close_xrcd");
	init.oflags = O_CREAT | O_EXCL;
	ENSURE(!ibv_open_xrcd(device, &init) && errno == EEXIST, "a domain that exists, with O_EXCL: %s", strerror(errno));
	init.oflags = 0;
	same = ibv_open_xrcd(device, &init);
	ENSURE(same, "ibv_open_xrcd: %s", strerror(errno));
	keep(close_xrcd, same, "ibv_close_xrcd");
	close(fd);
	/* Other files have other inodes for as long as the domain exists, although its file is deleted. */
	init.oflags = O_CREAT | O_EXCL;
	for (size_t i = 0; i < 20; i++) {
		char other[] = "/tmp/anywarp-xrc-XXXXXX";
		struct ibv_xrcd *third;

		init.fd = mkstemp(other);
		ENSURE(init.fd >= 0, "mkstemp");
		unlink(other);
		third = ibv_open_xrcd(device, &init);
		close(init.fd);
		ENSURE(third, "a file has the domain of another one: %s", strerror(errno));
		ENSURE(!ibv_close_xrcd(third), "ibv_close_xrcd");
	}
	qp_init.xrcd = one;
	first = ibv_create_qp_ex(device, &qp_init);
	ENSURE(first, "ibv_create_qp_ex: %s", strerror(errno));
	ENSURE(ibv_close_xrcd(one) == EBUSY, "a domain with a queue pair was closed");
	ENSURE(!ibv_destroy_qp(first), "ibv_destroy_qp");
	return NULL;
}

static int close_manager(void *p)
{
	rdma_destroy_event_channel(p);
	return 0;
}

/*
 * The descriptors of events are readable and never writable, like those of the kernel. Otherwise a program that waits
 * for both would spin.
 */
static const char *descriptors(size_t arg)
{
	struct rdma_event_channel *manager;
	struct ibv_comp_channel *channel;
	struct pollfd all[3];

	(void)arg;
	TRY(open_device());
	channel = new_channel();
	manager = rdma_create_event_channel();
	ENSURE(channel && manager, "channels: %s", strerror(errno));
	keep(close_manager, manager, "event channel");
	all[0] = (struct pollfd){ .fd = channel->fd, .events = POLLIN | POLLOUT };
	all[1] = (struct pollfd){ .fd = device->async_fd, .events = POLLIN | POLLOUT };
	all[2] = (struct pollfd){ .fd = manager->fd, .events = POLLIN | POLLOUT };
	ENSURE(poll(all, 3, 0) == 0, "events %x %x %x", all[0].revents, all[1].revents, all[2].revents);
	return NULL;
}

#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__ /* with a sanitizer, the library that emulates the files is not loaded */
static const char *file_says(const char *name, const char *expected)
{
	char path[128], text[64] = "";
	FILE *f;

	snprintf(path, sizeof path, "/sys/class/infiniband/%s/%s", ibv_get_device_name(device->device), name);
	f = fopen(path, "r");
	ENSURE(f, "%s: %s", path, strerror(errno));
	if (!fgets(text, sizeof text, f))
		text[0] = 0;
	fclose(f);
	text[strcspn(text, "\n")] = 0;
	ENSURE(!strcmp(text, expected), "%s: %s, expected %s", name, text, expected);
	return NULL;
}

/* The files in sysfs, which some programs read instead of querying the device, agree with the device. */
static const char *files(size_t arg)
{
	const uint8_t *guid = (const uint8_t *)&device_attr.node_guid;
	char text[32];

	(void)arg;
	TRY(open_device());
	snprintf(text, sizeof text, "%02x%02x:%02x%02x:%02x%02x:%02x%02x", guid[0], guid[1], guid[2], guid[3], guid[4],
		 guid[5], guid[6], guid[7]);
	TRY(file_says("node_guid", text));
	TRY(file_says("sys_image_guid", text));
	TRY(file_says("fw_ver", device_attr.fw_ver));
	TRY(file_says("hca_type", "anywarp"));
	snprintf(text, sizeof text, "0x%x", port_attr.lid);
	TRY(file_says("ports/1/lid", text));
	ENSURE(port_attr.active_width == 2 && port_attr.active_speed == 32, "width %u, speed %u", port_attr.active_width, port_attr.active_speed);
	return file_says("ports/1/rate", "100 Gb/sec (4X EDR)");
}
#endif

/* Number of TCP connections of this process. Listeners are not counted: the device's thread may be about to accept a
 * connection, and then closes the listener a moment after the last queue pair. */
static unsigned int open_connections(void)
{
	DIR *all = opendir("/proc/self/fd");
	struct dirent *entry;
	unsigned int n = 0;

	while (all && (entry = readdir(all))) {
		struct tcp_info info;
		socklen_t len = sizeof info;

		n += !getsockopt(atoi(entry->d_name), IPPROTO_TCP, TCP_INFO, &info, &len) && info.tcpi_state != TCP_LISTEN;
	}
	if (all)
		closedir(all);
	return n;
}

static void destroy(struct ibv_qp *qp)
{
	forget(qp);
	ibv_destroy_qp(qp);
}

/* After both queue pairs of a connection have been destroyed, no socket of it is left, although the device's thread sleeps
 * because the program has polled. If a poll detects the end of the connection, its socket is closed before the queue pair
 * is destroyed. The number of polls varies, so that the end is detected by a poll in some rounds only. */
static const char *no_socket_is_left(size_t arg)
{
	unsigned int before, left = 0;
	struct ibv_wc wc;
	struct pair p;

	(void)arg;
	/* The first pair opens the sockets of the device. */
	TRY(open_pair(&p, &usual));
	TRY(close_all());
	sleep_ms(200);
	before = open_connections();
	for (unsigned int i = 0; i < 50; i++) {
		TRY(open_pair(&p, &usual));
		for (unsigned int j = 0; j < 50; j++) {
			struct ibv_send_wr wr = send_wr(j, IBV_WR_SEND, NULL, 0);

			TRY(post_recv(p.b.qp, j, NULL, 0));
			TRY(post(p.a.qp, &wr));
			TRY(expect_ok(p.b.rcq, j, IBV_WC_RECV, NULL));
			TRY(expect_ok(p.a.scq, j, IBV_WC_SEND, NULL));
		}
		TRY(to_state(p.a.qp, IBV_QPS_ERR));
		for (unsigned int polls = 0; polls < i; polls++)
			ENSURE(!ibv_poll_cq(p.b.rcq, 1, &wc), "a completion of status %d", wc.status);
		TRY(to_state(p.b.qp, IBV_QPS_ERR));
		destroy(p.b.qp);
		destroy(p.a.qp);
		left += open_connections() > before;
		TRY(close_all());
	}
	ENSURE(!left, "a socket was left %u of 50 times", left);
	return NULL;
}

static struct watcher {
	struct ibv_cq *cq;
	_Atomic bool started, stop;
	_Atomic unsigned int found;
} watcher;

static void *watch_queue(void *arg)
{
	struct watcher *w = arg;
	struct ibv_wc wc;

	w->started = true;
	while (!w->stop)
		w->found += ibv_poll_cq(w->cq, 1, &wc) != 0;
	return NULL;
}

/* The requests of a queue pair that is destroyed do not complete, not even for a thread that polls at this moment. */
static const char *no_completion_when_destroyed(size_t arg)
{
	(void)arg;
	for (unsigned int i = 0; i < 200; i++) {
		pthread_t thread;
		struct pair p;

		TRY(open_pair(&p, &usual));
		for (unsigned int j = 0; j < 60; j++)
			TRY(post_recv(p.b.qp, j, NULL, 0));
		watcher.cq = p.b.rcq;
		watcher.started = watcher.stop = watcher.found = 0;
		ENSURE(!pthread_create(&thread, NULL, watch_queue, &watcher), "pthread_create");
		while (!watcher.started)
			sched_yield();
		destroy(p.b.qp);
		watcher.stop = true;
		pthread_join(thread, NULL);
		ENSURE(!watcher.found, "%u completions in round %u", watcher.found, i);
		TRY(close_all());
	}
	return NULL;
}

#define POLLED_ROUNDS 4000u

/* A thread that polls the last word of messages and then checks the rest. */
static struct poller {
	uint64_t *words; /* the memory of the message */
	size_t count;            /* its length in words */
	_Atomic uint64_t taken;  /* the last round that was checked */
	_Atomic size_t wrong;    /* how many words were of an earlier round */
	_Atomic bool stop;
} poller;

/* The thread sanitizer would report the accesses to the memory: it does not see what the device and its peer have agreed on. */
__attribute__((no_sanitize("thread"))) static void *poll_last_word(void *arg)
{
	struct poller *p = arg;

	for (uint64_t round = 1; round <= POLLED_ROUNDS; round++) {
		while (__atomic_load_n(&p->words[p->count - 1], __ATOMIC_ACQUIRE) != round)
			if (p->stop)
				return NULL;
		for (size_t i = 0; i < p->count; i++)
			p->wrong += __atomic_load_n(&p->words[i], __ATOMIC_RELAXED) != round;
		p->taken = round;
	}
	return NULL;
}

/* Programs poll the last word of the memory of RDMA Writes and then read the rest. Their rings are often not aligned to cache lines. */
static const char *last_word_arrives_last(size_t len)
{
	static uint64_t source[8192];
	uint64_t end = now_ms() + 6 * WAIT_MS;
	const char *failure = NULL;
	struct region from, to;
	pthread_t thread;
	struct pair p;

	TRY(open_pair(&p, &usual));
	TRY(new_region(&from, p.a.pd, len, IBV_ACCESS_LOCAL_WRITE));
	TRY(new_region(&to, p.b.pd, len + 8, ALL_ACCESS));
	memset(to.at, 0, len + 8);
	poller.words = (uint64_t *)(to.at + 8);
	poller.count = len / 8;
	poller.taken = poller.wrong = poller.stop = 0;
	ENSURE(!pthread_create(&thread, NULL, poll_last_word, &poller), "pthread_create");
	for (uint64_t round = 1; round <= POLLED_ROUNDS && !failure && !poller.wrong; round++) {
		struct ibv_sge sge = sge_of(&from, 0, (uint32_t)len);
		struct ibv_send_wr wr = rdma_wr(round, IBV_WR_RDMA_WRITE, &sge, 1, &to, 8);

		for (size_t i = 0; i < len / 8; i++)
			source[i] = round;
		memcpy(from.at, source, len);
		failure = post(p.a.qp, &wr);
		if (!failure)
			failure = expect_ok(p.a.scq, round, IBV_WC_RDMA_WRITE, NULL);
		while (!failure && poller.taken != round && now_ms() < end)
			sched_yield();
		if (!failure && poller.taken != round)
			failure = "the last word does not arrive";
	}
	poller.stop = true;
	pthread_join(thread, NULL);
	ENSURE(!failure, "%s", failure);
	ENSURE(!poller.wrong, "%zu words are old when the last one arrives", poller.wrong);
	return NULL;
}

/* Public fields and attributes that programs for other devices rely on. */
static const char *public_fields(size_t arg)
{
	struct ibv_comp_channel *channel;
	struct ibv_qp_attr attr = { 0 };
	struct ibv_qp_init_attr init;
	struct ibv_cq *cq;
	void *context;
	struct pair p;

	(void)arg;
	TRY(open_device());
	/* An index other than -1 would be that of a device of the kernel. UCX asks the kernel for the type of the device with
	 * this index, and prints errors if the kernel has no InfiniBand modules. */
	ENSURE(ibv_get_device_index(device->device) == -1, "index %d", ibv_get_device_index(device->device));
	TRY(open_pair(&p, &(struct want){ 0 }));
	/* Only five bits of the timer are used. */
	attr.min_rnr_timer = 0x20 | 12;
	ENSURE(!ibv_modify_qp(p.a.qp, &attr, IBV_QP_MIN_RNR_TIMER), "min_rnr_timer 0x2c: %s", strerror(errno));
	ENSURE(!ibv_query_qp(p.a.qp, &attr, IBV_QP_MIN_RNR_TIMER, &init), "ibv_query_qp");
	ENSURE(attr.min_rnr_timer == 12, "min_rnr_timer %u", attr.min_rnr_timer);
	/* Only a query with IBV_QP_STATE updates the public field `state`. */
	p.a.qp->state = IBV_QPS_SQD;
	ENSURE(!ibv_query_qp(p.a.qp, &attr, IBV_QP_AV, &init) && p.a.qp->state == IBV_QPS_SQD, "state %d", p.a.qp->state);
	ENSURE(!ibv_query_qp(p.a.qp, &attr, IBV_QP_STATE, &init) && p.a.qp->state == IBV_QPS_RTS, "state %d", p.a.qp->state);
	/* Acknowledged events are counted in a public field. */
	channel = new_channel();
	cq = new_cq(4, channel);
	ENSURE(cq && !ibv_req_notify_cq(cq, 0), "a completion queue: %s", strerror(errno));
	{
		struct ibv_qp_init_attr one = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
						.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
		struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR }, first = { .qp_state = IBV_QPS_INIT, .port_num = PORT };
		struct ibv_qp *qp = new_qp(p.a.pd, &one);

		ENSURE(qp, "ibv_create_qp: %s", strerror(errno));
		ENSURE(!ibv_modify_qp(qp, &first, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
		       "ibv_modify_qp to INIT fails");
		TRY(post_recv(qp, 1, NULL, 0));
		ENSURE(!ibv_modify_qp(qp, &error, IBV_QP_STATE), "ibv_modify_qp to ERR fails");
	}
	ENSURE(cq->comp_events_completed == 0, "%u events before the first", cq->comp_events_completed);
	TRY(readable(channel->fd, WAIT_MS));
	ENSURE(!ibv_get_cq_event(channel, &cq, &context), "ibv_get_cq_event: %s", strerror(errno));
	ibv_ack_cq_events(cq, 1);
	ENSURE(cq->comp_events_completed == 1, "%u events are acknowledged", cq->comp_events_completed);
	return NULL;
}

#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
static int by_number(const void *a, const void *b)
{
	uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;

	return left < right ? -1 : left > right;
}

/*
 * Measures the time of the event for a message to `p`. The program first polls without a pause and then waits with
 * poll(2).
 */
static const char *one_event(struct pair *p, uint64_t id, uint64_t *ns)
{
	struct ibv_send_wr wr = send_wr(id, IBV_WR_SEND, NULL, 0);
	struct ibv_wc wc;
	struct ibv_cq *cq;
	void *context;
	uint64_t begin;

	TRY(post_recv(p->b.qp, id, NULL, 0));
	for (uint64_t end = now_ms() + 4; now_ms() < end;)
		ENSURE(ibv_poll_cq(p->b.rcq, 1, &wc) == 0, "a completion without a request");
	ENSURE(!ibv_req_notify_cq(p->b.rcq, 0), "ibv_req_notify_cq");
	begin = now_ns();
	TRY(post(p->a.qp, &wr));
	TRY(readable(p->b.channel->fd, WAIT_MS));
	*ns = now_ns() - begin;
	ENSURE(!ibv_get_cq_event(p->b.channel, &cq, &context), "ibv_get_cq_event: %s", strerror(errno));
	ibv_ack_cq_events(cq, 1);
	TRY(expect_ok(p->b.rcq, id, IBV_WC_RECV, NULL));
	return expect_ok(p->a.scq, id, IBV_WC_SEND, NULL);
}

/* When a program arms a queue after polling and then waits for the descriptor itself, the device's thread receives for it. */
static const char *event_after_polling(size_t arg)
{
	const struct want want = { .channels = true };
	uint64_t ns[20], id = 0, median = UINT64_MAX;
	struct pair p;

	(void)arg;
	TRY(open_pair(&p, &want));
	/* The first messages let the device learn how this program waits. */
	for (; id < 4; id++)
		TRY(one_event(&p, id, ns));
	for (int round = 0; round < 5 && median > 250000; round++) {
		for (size_t i = 0; i < COUNT(ns); i++)
			TRY(one_event(&p, id++, &ns[i]));
		qsort(ns, COUNT(ns), sizeof *ns, by_number);
		median = ns[COUNT(ns) / 2] < median ? ns[COUNT(ns) / 2] : median;
	}
	printf("# an event after polling: %.0f us\n", (double)median / 1e3);
	ENSURE(median <= 250000, "an event after polling takes %llu ns", (unsigned long long)median);
	return NULL;
}
#endif

static const struct test tests[] = {
	{ "descriptors", descriptors, 0, 0, false },
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
	{ "files", files, 0, 0, false },
	{ "event_after_polling", event_after_polling, 0, 0, false },
#endif
	{ "no_socket_is_left", no_socket_is_left, 0, 0, true },
	{ "no_completion_when_destroyed", no_completion_when_destroyed, 0, 0, true },
	{ "last_word_of_1024_bytes", last_word_arrives_last, 1024, 0, false },
	{ "last_word_of_2048_bytes", last_word_arrives_last, 2048, 0, false },
	{ "last_word_of_65536_bytes", last_word_arrives_last, 65536, 0, false },
	{ "public_fields", public_fields, 0, 0, false },
	{ "device_memory", device_memory, 0, 0, false },
	{ "device_memory_limits", device_memory_limits, 0, 0, false },
	{ "unmapped_pages_local", unmapped_pages, 0, 0, false },
	{ "unmapped_pages_remote", unmapped_pages, 1, 0, false },
	{ "implicit", implicit, 0, 0, false },
	{ "advice_refused", advice_refused, 0, 0, false },
	{ "null_region", null_region, 0, 0, false },
	{ "domains", domains, 0, 0, false },
	{ "imported", imported, 0, 0, false },
	{ "atomic_write", atomic_write, 0, 0, false },
	{ "atomic_write_on_demand", atomic_write, 1, 0, false },
	{ "xrc", xrc, 0, 0, false },
	{ "xrc_attributes_of_both_ends", xrc, 1, 0, false },
	{ "xrc_queue_destroyed", xrc_queue_destroyed, 0, 0, false },
	{ "xrc_domains", xrc_domains, 0, 0, false },
	{ "pages_without_rights", pages_without_rights, 0, 0, false },
	{ "pages_without_rights_of_the_region", pages_without_rights_of_the_region, 0, 0, false },
	{ "null_region_later", null_region_later, 0, 0, true },
	{ "receives_refused", receives_refused, 0, 0, false },
	{ "limit_when_created", limit_when_created, 0, 0, false },
	{ "longer_structures", longer_structures, 0, 0, false },
	{ "window_of_uc", window_of_uc, 0, 0, false },
	{ "clock", clock_of_completions, 0, 0, false },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
