/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Functions of releases of rdma-core that may be newer than the headers of this machine. They are looked up at run time by
 * name and version, as the loader does for a program of another distribution. The types are declared here.
 */
#include "ends.h"

#include <dlfcn.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <sys/epoll.h>
#include <sys/resource.h>

#define MASK_IOVA (1u << 0)
#define MASK_ADDR (1u << 1)
#define MASK_FD (1u << 2)
#define MASK_DMAH (1u << 4)
#define MASK_BUF (1u << 5)
#define MASK_UNPROTECTED (1u << 2) /* of ibv_parent_domain_init_attr */

struct buffer; /* struct ibv_buf */

struct mr_init_attr { /* struct ibv_mr_init_attr */
	size_t length;
	int access;
	uint64_t comp_mask;
	uint64_t iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah;
	struct buffer *buf;
};

static struct ibv_mr *(*reg_mr_ex)(struct ibv_pd *, struct mr_init_attr *);
static void *(*alloc_buf)(struct ibv_pd *, size_t, struct buffer **);
static void (*free_buf)(struct buffer *);
static struct ibv_mr *(*reg_buf_mr)(struct ibv_pd *, struct buffer *, void *, size_t, int);
static int (*export_buf)(struct buffer *);
static int (*query_port_speed)(struct ibv_context *, uint32_t, uint64_t *);
static void *(*alloc_dmah)(struct ibv_context *, void *);
static int (*dm_export)(struct ibv_dm *);

static void *verbs;

static void *look(const char *name, const char *version)
{
	if (!verbs)
		verbs = dlopen("libibverbs.so.1", RTLD_NOW);
	return verbs ? dlvsym(verbs, name, version) : NULL;
}

#define FIND(to, name, version)                                       \
	to = (__typeof__(to))look(name, version);                     \
	ENSURE(to, "%s@%s: %s", name, version, dlerror());

static const char *find_all(void)
{
	TRY(open_device());
	FIND(alloc_dmah, "ibv_alloc_dmah", "IBVERBS_1.15")
	FIND(reg_mr_ex, "ibv_reg_mr_ex", "IBVERBS_1.15")
	FIND(dm_export, "ibv_dm_export_dmabuf_fd", "IBVERBS_1.16")
	FIND(query_port_speed, "ibv_query_port_speed", "IBVERBS_1.16")
	FIND(alloc_buf, "ibv_alloc_buf", "IBVERBS_1.17")
	FIND(free_buf, "ibv_free_buf", "IBVERBS_1.17")
	FIND(reg_buf_mr, "ibv_reg_buf_mr", "IBVERBS_1.17")
	FIND(export_buf, "ibv_export_buf_dmabuf_fd", "IBVERBS_1.18")
	return NULL;
}

/*
 * A private function is exported under the private symbol version (IBVERBS_PRIVATE_*) of every release that has it, and
 * under no other.
 */
static const char *private_nodes(size_t arg)
{
	static const char *const nodes[] = { "IBVERBS_PRIVATE_22", "IBVERBS_PRIVATE_25", "IBVERBS_PRIVATE_33",
					     "IBVERBS_PRIVATE_34", "IBVERBS_PRIVATE_57", "IBVERBS_PRIVATE_59",
					     "IBVERBS_PRIVATE_64", "IBVERBS_PRIVATE_65" };
	int (*type)(struct ibv_context *, uint8_t, unsigned int, unsigned int *);
	char hook[64];

	(void)arg;
	TRY(open_device());
	for (size_t i = 0; i < COUNT(nodes); i++) {
		unsigned int number = 77;

		FIND(type, "ibv_query_gid_type", nodes[i])
		ENSURE(!type(device, PORT, 0, &number) && number <= 1, "%s: type %u", nodes[i], number);
		snprintf(hook, sizeof hook, "verbs_register_driver_%s", strrchr(nodes[i], '_') + 1);
		ENSURE(look(hook, nodes[i]), "no %s@%s", hook, nodes[i]);
		bool *flag = look("verbs_allow_disassociate_destroy", nodes[i]);
		ENSURE(flag && !*flag, "no verbs_allow_disassociate_destroy in %s", nodes[i]);
	}
	ENSURE(look("ibv_cmd_create_cq_ex2", "IBVERBS_PRIVATE_34"), "no ibv_cmd_create_cq_ex2");
	ENSURE(!look("ibv_cmd_create_cq_ex2", "IBVERBS_PRIVATE_33"), "ibv_cmd_create_cq_ex2 is exported in private version 33, but it is newer");
	return NULL;
}

static const char *port_speed(size_t arg)
{
	uint64_t speed = 0;

	(void)arg;
	TRY(find_all());
	/* Width code 2 means four lanes, speed code 32 means 25 Gb/s. The unit of the result is 100 Mb/s. */
	ENSURE(port_attr.active_width == 2 && port_attr.active_speed == 32, "width %u, speed %u",
	       port_attr.active_width, port_attr.active_speed);
	ENSURE(!query_port_speed(device, PORT, &speed) && speed == 1000, "speed %llu", (unsigned long long)speed);
	ENSURE(query_port_speed(device, 2, &speed) == EINVAL, "the speed of a second port can be queried");
	return NULL;
}

static struct ibv_mr *reg_ex(struct ibv_pd *pd, struct mr_init_attr attr)
{
	errno = 0;
	return reg_mr_ex(pd, &attr);
}

static const char *reg_mr_ex_works(size_t arg)
{
	static uint8_t memory[2 * 4096] __attribute__((aligned(4096)));
	struct pair p;
	struct ibv_mr *mr;

	(void)arg;
	TRY(find_all());
	TRY(open_pair(&p, &(struct want){ 0 }));
	mr = reg_ex(p.b.pd, (struct mr_init_attr){ .length = 4096, .access = ALL_ACCESS, .addr = memory, .iova = 0x10000,
						 .comp_mask = MASK_ADDR | MASK_IOVA });
	ENSURE(mr, "ibv_reg_mr_ex: %s", strerror(errno));
	keep(close_mr, mr, "memory region");
	ENSURE(mr->addr == memory && mr->length == 4096, "addr %p, length %zu", mr->addr, mr->length);

	/* A Write to the address that was chosen for the region arrives at the beginning of its memory. */
	struct region from = { 0 };
	TRY(new_region(&from, p.a.pd, 4096, ALL_ACCESS));
	fill_pattern(from.at, 4096, 5);
	struct ibv_sge sge = sge_of(&from, 0, 4096);
	struct ibv_send_wr *bad, wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
					.send_flags = IBV_SEND_SIGNALED,
					.wr.rdma = { .remote_addr = 0x10000, .rkey = mr->rkey } };
	ENSURE(!ibv_post_send(p.a.qp, &wr, &bad), "ibv_post_send");
	TRY(expect_ok(p.a.scq, 1, IBV_WC_RDMA_WRITE, NULL));
	TRY(same_pattern(memory, 4096, 5));

	ENSURE(!reg_ex(p.b.pd, (struct mr_init_attr){ .length = 64, .addr = memory }) && errno == EINVAL,
	       "ibv_reg_mr_ex without an address bit: %s", strerror(errno));
	ENSURE(!reg_ex(p.b.pd, (struct mr_init_attr){ .length = 64, .fd = 0, .comp_mask = MASK_FD }) && errno == EOPNOTSUPP,
	       "ibv_reg_mr_ex of a dma-buf: %s", strerror(errno));
	ENSURE(!reg_ex(p.b.pd, (struct mr_init_attr){ .length = 64, .addr = memory, .comp_mask = MASK_ADDR | MASK_DMAH }) &&
		       errno == EOPNOTSUPP, "ibv_reg_mr_ex with a DMA handle: %s", strerror(errno));
	ENSURE(!reg_ex(p.b.pd, (struct mr_init_attr){ .length = 64, .addr = memory, .comp_mask = MASK_ADDR | 1u << 20 }) &&
		       errno == EOPNOTSUPP, "ibv_reg_mr_ex with an unknown bit: %s", strerror(errno));
	return NULL;
}

static int close_buffer(void *p) { free_buf(p); return 0; }

static const char *buffers(size_t arg)
{
	struct ibv_pd *pd, *other;
	struct buffer *buf = NULL;
	struct ibv_mr *mr;
	uint8_t *at;

	(void)arg;
	TRY(find_all());
	pd = new_pd();
	other = new_pd();
	at = alloc_buf(pd, 10000, &buf);
	ENSURE(at && buf, "ibv_alloc_buf: %s", strerror(errno));
	keep(close_buffer, buf, "buffer");
	ENSURE((uintptr_t)at % 4096 == 0, "not aligned: %p", (void *)at);
	TRY(all_bytes(at, 10000, 0, "a new buffer"));
	at[9999] = 1;
	mr = reg_buf_mr(pd, buf, at + 8192, 1808, IBV_ACCESS_LOCAL_WRITE);
	ENSURE(mr && mr->addr == at + 8192, "ibv_reg_buf_mr: %s", strerror(errno));
	ENSURE(!ibv_dereg_mr(mr), "ibv_dereg_mr");
	mr = reg_ex(pd, (struct mr_init_attr){ .length = 10000, .access = IBV_ACCESS_LOCAL_WRITE, .addr = at, .buf = buf,
					       .comp_mask = MASK_ADDR | MASK_BUF });
	ENSURE(mr, "ibv_reg_mr_ex of a buffer: %s", strerror(errno));
	/* The buffer is freed before its region; the memory stays until the region is deregistered. */
	close_now(buf);
	at[9999] = 2;
	ENSURE(!ibv_dereg_mr(mr), "ibv_dereg_mr");

	at = alloc_buf(pd, 4096, &buf);
	ENSURE(at, "ibv_alloc_buf: %s", strerror(errno));
	keep(close_buffer, buf, "buffer");
	ENSURE(!reg_buf_mr(other, buf, at, 4096, 0) && errno == EINVAL,
	       "a region of the buffer in another domain: %s", strerror(errno));
	errno = 0;
	ENSURE(!reg_buf_mr(pd, buf, at + 1, 4096, 0) && errno == EINVAL,
	       "a region beyond the end of the buffer: %s", strerror(errno));
	errno = 0;
	ENSURE(!reg_buf_mr(pd, buf, at - 1, 16, 0) && errno == EINVAL,
	       "a region before the beginning of the buffer: %s", strerror(errno));
	errno = 0;
	ENSURE(!reg_buf_mr(pd, buf, at, SIZE_MAX, 0) && errno == EINVAL, "a region whose length overflows: %s", strerror(errno));
	ENSURE(export_buf(buf) == -1 && errno == ENODATA, "exporting the buffer as a dma-buf: %s", strerror(errno));
	ENSURE(!alloc_buf(pd, 0, &buf) && errno == EINVAL, "a buffer of no bytes: %s", strerror(errno));
	return NULL;
}

/* A parent domain may permit memory that is not encrypted. This device does not need such memory: buffers of the domain are plain ones. */
static const char *buffers_of_a_parent_domain(size_t arg)
{
	struct ibv_parent_domain_init_attr attr = { .comp_mask = MASK_UNPROTECTED };
	struct buffer *buf = NULL;
	struct ibv_pd *parent;
	struct ibv_mr *mr;
	uint8_t *at;

	(void)arg;
	TRY(find_all());
	attr.pd = new_pd();
	ENSURE(attr.pd, "ibv_alloc_pd: %s", strerror(errno));
	parent = ibv_alloc_parent_domain(device, &attr);
	ENSURE(parent, "ibv_alloc_parent_domain: %s", strerror(errno));
	keep(close_pd, parent, "parent domain");
	at = alloc_buf(parent, 4096, &buf);
	ENSURE(at, "ibv_alloc_buf: %s", strerror(errno));
	keep(close_buffer, buf, "buffer");
	mr = reg_buf_mr(parent, buf, at, 4096, IBV_ACCESS_LOCAL_WRITE);
	ENSURE(mr, "ibv_reg_buf_mr: %s", strerror(errno));
	ENSURE(!ibv_dereg_mr(mr), "ibv_dereg_mr");
	ENSURE(!reg_buf_mr(attr.pd, buf, at, 4096, 0) && errno == EINVAL, "a region of the buffer in another domain: %s",
	       strerror(errno));
	attr.comp_mask = 1u << 3;
	ENSURE(!ibv_alloc_parent_domain(device, &attr) && errno == EINVAL, "an unknown field: %s", strerror(errno));
	return NULL;
}

/* Functions that need support in hardware fail, as on a device without that support. */
static const char *hardware_only(size_t arg)
{
	(void)arg;
	TRY(find_all());
	errno = 0;
	ENSURE(!alloc_dmah(device, NULL) && errno == EOPNOTSUPP, "ibv_alloc_dmah: %s", strerror(errno));
	errno = 0;
	ENSURE(dm_export(NULL) == -1 && errno == EOPNOTSUPP, "ibv_dm_export_dmabuf_fd: %s", strerror(errno));
	return NULL;
}

static int (*poll_create)(int);
static int (*poll_ctl)(int, int, int, struct epoll_event *);
static int (*poll_wait)(int, struct epoll_event *, int, int);

static int close_rsocket(void *p) { return rclose((int)(intptr_t)p) ? errno : 0; }
static int close_file(void *p) { return close((int)(intptr_t)p) ? errno : 0; }

static const char *find_repoll(void)
{
	void *rdmacm = dlopen("librdmacm.so.1", RTLD_NOW);

	ENSURE(rdmacm, "%s", dlerror());
	poll_create = (__typeof__(poll_create))dlvsym(rdmacm, "repoll_create", "RDMACM_1.5");
	poll_ctl = (__typeof__(poll_ctl))dlvsym(rdmacm, "repoll_ctl", "RDMACM_1.5");
	poll_wait = (__typeof__(poll_wait))dlvsym(rdmacm, "repoll_wait", "RDMACM_1.5");
	ENSURE(poll_create && poll_ctl && poll_wait, "%s", dlerror());
	return NULL;
}

static const char *new_set(int *set)
{
	TRY(find_repoll());
	*set = poll_create(O_CLOEXEC);
	ENSURE(*set >= 0, "repoll_create: %s", strerror(errno));
	keep(close_rsocket, (void *)(intptr_t)*set, "set");
	return NULL;
}

static const char *new_pipe(int ends[2])
{
	ENSURE(!pipe(ends), "pipe: %s", strerror(errno));
	keep(close_file, (void *)(intptr_t)ends[0], "pipe");
	keep(close_file, (void *)(intptr_t)ends[1], "pipe");
	return NULL;
}

static int ctl(int set, int op, int fd, uint32_t events, uint64_t data)
{
	struct epoll_event event = { .events = events, .data.u64 = data };

	errno = 0;
	return poll_ctl(set, op, fd, &event);
}

/* Sockets and other descriptors in one set. */
static const char *repoll_set(size_t arg)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof to;
	struct epoll_event got[4];
	int set = -1, ends[2], listener, client, n;

	(void)arg;
	TRY(new_set(&set));
	TRY(new_pipe(ends));
	listener = rsocket(AF_INET, SOCK_STREAM, 0);
	ENSURE(listener >= 0, "rsocket: %s", strerror(errno));
	keep(close_rsocket, (void *)(intptr_t)listener, "listener");
	ENSURE(!rbind(listener, (void *)&to, sizeof to) && !rlisten(listener, 1), "rlisten: %s", strerror(errno));
	ENSURE(!rgetsockname(listener, (void *)&to, &len), "rgetsockname");
	ENSURE(!ctl(set, EPOLL_CTL_ADD, listener, EPOLLIN, 1ull << 40), "repoll_ctl for the listener: %s", strerror(errno));
	ENSURE(!ctl(set, EPOLL_CTL_ADD, ends[0], EPOLLIN, 7), "repoll_ctl for the pipe: %s", strerror(errno));
	ENSURE(ctl(set, EPOLL_CTL_ADD, ends[0], EPOLLIN, 7) == -1 && errno == EEXIST, "a descriptor is added twice: %s", strerror(errno));
	ENSURE(ctl(set, EPOLL_CTL_MOD, ends[1], EPOLLIN, 7) == -1 && errno == ENOENT,
	       "a descriptor that is not in the set is changed: %s", strerror(errno));
	ENSURE(ctl(set, 99, ends[1], EPOLLIN, 7) == -1 && errno == EINVAL,
	       "repoll_ctl with an unknown operation: %s", strerror(errno));
	n = poll_wait(set, got, 4, 30);
	ENSURE(n == 0, "%d ready descriptors, expected none", n);

	ENSURE(write(ends[1], "x", 1) == 1, "write");
	n = poll_wait(set, got, 4, WAIT_MS);
	ENSURE(n == 1 && got[0].data.u64 == 7 && got[0].events == EPOLLIN, "the pipe: %d, events %#x", n, got[0].events);

	client = rsocket(AF_INET, SOCK_STREAM, 0);
	ENSURE(client >= 0, "rsocket: %s", strerror(errno));
	keep(close_rsocket, (void *)(intptr_t)client, "client");
	ENSURE(!rfcntl(client, F_SETFL, O_NONBLOCK), "rfcntl");
	/* On a busy machine the connection may be established before the call returns. */
	ENSURE(!rconnect(client, (void *)&to, sizeof to) || errno == EINPROGRESS, "rconnect: %s", strerror(errno));
	ENSURE(!ctl(set, EPOLL_CTL_DEL, ends[0], 0, 0), "del: %s", strerror(errno));
	n = poll_wait(set, got, 4, WAIT_MS);
	ENSURE(n == 1 && got[0].data.u64 == 1ull << 40, "the listener: %d, data %llx", n,
	       (unsigned long long)got[0].data.u64);

	/* With two ready descriptors and room for one event, each is returned in turn. */
	ENSURE(!ctl(set, EPOLL_CTL_ADD, ends[0], EPOLLIN, 7), "the pipe cannot be added again");
	uint64_t seen = 0;
	for (int i = 0; i < 2; i++) {
		ENSURE(poll_wait(set, got, 1, WAIT_MS) == 1, "repoll_wait does not return one of two ready descriptors");
		seen |= got[0].data.u64;
	}
	ENSURE(seen == (1ull << 40 | 7), "only the descriptors with the bits %llx were returned", (unsigned long long)seen);
	ENSURE(poll_wait(set, got, 0, 0) == -1 && errno == EINVAL, "repoll_wait with room for no event: %s", strerror(errno));
	close_now((void *)(intptr_t)set);
	ENSURE(poll_wait(set, got, 1, 0) == -1 && errno == EBADF, "repoll_wait for a closed set: %s", strerror(errno));
	return NULL;
}

static int shared_set;

static void *wait_in_set(void *data)
{
	struct epoll_event got;

	*(uint64_t *)data = poll_wait(shared_set, &got, 1, WAIT_MS) == 1 ? got.data.u64 : 0;
	return NULL;
}

/* A waiting thread gets events of descriptors that another thread adds. */
static const char *repoll_changes(size_t arg)
{
	uint64_t data[2] = { 0 };
	pthread_t threads[2];
	int ends[2], set = -1;

	(void)arg;
	TRY(new_set(&set));
	shared_set = set;
	TRY(new_pipe(ends));
	ENSURE(write(ends[1], "x", 1) == 1, "write");
	for (int i = 0; i < 2; i++)
		ENSURE(!pthread_create(&threads[i], NULL, wait_in_set, &data[i]), "pthread_create");
	sleep_ms(50);
	ENSURE(!ctl(set, EPOLL_CTL_ADD, ends[0], EPOLLIN, 9), "add: %s", strerror(errno));
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	ENSURE(data[0] == 9 && data[1] == 9, "the threads got %llu and %llu", (unsigned long long)data[0], (unsigned long long)data[1]);
	return NULL;
}

/* A change of a set that fails for lack of descriptors has no effect. */
static const char *repoll_without_descriptors(size_t arg)
{
	struct rlimit before, now;
	uint64_t data = 0;
	pthread_t thread;
	int ends[2], set = -1, lowest, rc, failed;

	(void)arg;
	TRY(new_set(&set));
	shared_set = set;
	TRY(new_pipe(ends));
	ENSURE(!pthread_create(&thread, NULL, wait_in_set, &data), "pthread_create");
	sleep_ms(100);
	lowest = dup(0);
	ENSURE(lowest >= 0 && !close(lowest) && !getrlimit(RLIMIT_NOFILE, &before), "dup: %s", strerror(errno));
	now = before;
	now.rlim_cur = (rlim_t)lowest;
	ENSURE(!setrlimit(RLIMIT_NOFILE, &now), "setrlimit: %s", strerror(errno));
	rc = ctl(set, EPOLL_CTL_ADD, ends[0], EPOLLIN, 9);
	failed = errno;
	ENSURE(!setrlimit(RLIMIT_NOFILE, &before), "setrlimit: %s", strerror(errno));
	ENSURE(rc == -1 && failed == EMFILE, "add without descriptors: %d %s", rc, strerror(failed));
	ENSURE(!ctl(set, EPOLL_CTL_ADD, ends[0], EPOLLIN, 9), "add after a failure: %s", strerror(errno));
	ENSURE(write(ends[1], "x", 1) == 1, "write");
	pthread_join(thread, NULL);
	ENSURE(data == 9, "the thread got %llu", (unsigned long long)data);
	return NULL;
}

#define EVENT_ADDRINFO_RESOLVED 16
#define EVENT_ADDRINFO_ERROR 17
#define EVENT_USER 18

static int (*resolve_addrinfo)(struct rdma_cm_id *, const char *, const char *, const struct rdma_addrinfo *);
static int (*query_addrinfo)(struct rdma_cm_id *, struct rdma_addrinfo **);
static int (*write_cm_event)(struct rdma_cm_id *, int, int, uint64_t);

static int close_events(void *p) { rdma_destroy_event_channel(p); return 0; }
static int close_id(void *p) { return rdma_destroy_id(p); }

static const char *new_id(struct rdma_event_channel **channel, struct rdma_cm_id **id)
{
	void *rdmacm = dlopen("librdmacm.so.1", RTLD_NOW);

	ENSURE(rdmacm, "%s", dlerror());
	resolve_addrinfo = (__typeof__(resolve_addrinfo))dlvsym(rdmacm, "rdma_resolve_addrinfo", "RDMACM_1.4");
	query_addrinfo = (__typeof__(query_addrinfo))dlvsym(rdmacm, "rdma_query_addrinfo", "RDMACM_1.4");
	write_cm_event = (__typeof__(write_cm_event))dlvsym(rdmacm, "rdma_write_cm_event", "RDMACM_1.4");
	ENSURE(resolve_addrinfo && query_addrinfo && write_cm_event, "%s", dlerror());
	*channel = rdma_create_event_channel();
	ENSURE(*channel, "rdma_create_event_channel: %s", strerror(errno));
	keep(close_events, *channel, "event channel");
	ENSURE(!rdma_create_id(*channel, id, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(close_id, *id, "identifier");
	return NULL;
}

static const char *next_event(struct rdma_event_channel *channel, int kind, int *status, uint64_t *arg)
{
	struct rdma_cm_event *event;

	ENSURE(!rdma_get_cm_event(channel, &event), "rdma_get_cm_event: %s", strerror(errno));
	int got = (int)event->event;
	*status = event->status;
	memcpy(arg, &event->param, sizeof *arg);
	ENSURE(!rdma_ack_cm_event(event), "rdma_ack_cm_event");
	ENSURE(got == kind, "event %d, expected %d", got, kind);
	return NULL;
}

static const char *addresses_in_background(size_t arg)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *list;
	struct rdma_event_channel *channel = NULL;
	struct rdma_cm_id *id = NULL;
	char node[] = "127.0.0.1", service[] = "7471";
	uint64_t ignored;
	int status;

	(void)arg;
	TRY(new_id(&channel, &id));
	ENSURE(query_addrinfo(id, &list) == -1 && errno == ENODATA,
	       "rdma_query_addrinfo before the resolution: %s", strerror(errno));
	ENSURE(!resolve_addrinfo(id, node, service, &hints), "rdma_resolve_addrinfo: %s", strerror(errno));
	/* The caller may reuse the arguments. */
	memset(node, 'x', sizeof node - 1);
	memset(service, 'x', sizeof service - 1);
	memset(&hints, 0xff, sizeof hints);
	TRY(next_event(channel, EVENT_ADDRINFO_RESOLVED, &status, &ignored));
	ENSURE(!status, "status %d", status);
	for (int i = 0; i < 2; i++) {
		ENSURE(!query_addrinfo(id, &list), "rdma_query_addrinfo: %s", strerror(errno));
		struct sockaddr_in *to = (void *)list->ai_dst_addr;
		ENSURE(to && to->sin_family == AF_INET && to->sin_addr.s_addr == htonl(INADDR_LOOPBACK) &&
			       to->sin_port == htons(7471), "the resolved address is not that of the arguments");
		ENSURE(list->ai_port_space == RDMA_PS_TCP && list->ai_qp_type == IBV_QPT_RC,
		       "the resolved port space or type is not that of the hints");
		rdma_freeaddrinfo(list);
	}
	hints = (struct rdma_addrinfo){ .ai_flags = RAI_NUMERICHOST };
	ENSURE(!resolve_addrinfo(id, "no number", "7471", &hints), "rdma_resolve_addrinfo: %s", strerror(errno));
	TRY(next_event(channel, EVENT_ADDRINFO_ERROR, &status, &ignored));
	ENSURE(status == EAI_NONAME, "the status of an unknown name is %d", status);
	ENSURE(query_addrinfo(id, &list) == -1, "rdma_query_addrinfo gives the result of an earlier resolution");
	hints.ai_flags = 0x10;
	ENSURE(resolve_addrinfo(id, NULL, "7471", &hints) == -1 && errno == EOPNOTSUPP, "RAI_SA: %s", strerror(errno));
	return NULL;
}

static const char *own_events(size_t arg)
{
	struct rdma_event_channel *channel = NULL;
	struct rdma_cm_id *id = NULL;
	uint64_t got = 0;
	int status = 0;

	(void)arg;
	TRY(new_id(&channel, &id));
	ENSURE(write_cm_event(id, RDMA_CM_EVENT_ESTABLISHED, 0, 0) == -1 && errno == EINVAL,
	       "rdma_write_cm_event with an event that is not the user's: %s", strerror(errno));
	ENSURE(!write_cm_event(id, EVENT_USER, -5, 0x123456789abcdefull), "rdma_write_cm_event: %s", strerror(errno));
	TRY(next_event(channel, EVENT_USER, &status, &got));
	ENSURE(status == -5 && got == 0x123456789abcdefull,
	       "the event has status %d and argument %llx", status, (unsigned long long)got);
	/* An event that was not read is discarded with its id. */
	ENSURE(!write_cm_event(id, EVENT_USER, 0, 1), "rdma_write_cm_event");
	return NULL;
}

static const struct test tests[] = {
	{ "addresses_in_background", addresses_in_background, 0, 0, false },
	{ "own_events", own_events, 0, 0, false },
	{ "repoll_set", repoll_set, 0, 0, false },
	{ "repoll_changes", repoll_changes, 0, 0, false },
	{ "repoll_without_descriptors", repoll_without_descriptors, 0, 0, false },
	{ "private_nodes", private_nodes, 0, 0, false },
	{ "port_speed", port_speed, 0, 0, false },
	{ "reg_mr_ex_works", reg_mr_ex_works, 0, 0, false },
	{ "buffers", buffers, 0, 0, false },
	{ "buffers_of_a_parent_domain", buffers_of_a_parent_domain, 0, 0, false },
	{ "hardware_only", hardware_only, 0, 0, false },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
