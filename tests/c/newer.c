/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Functions of newer releases of rdma-core than the one whose headers this is compiled with, looked up at run time with
 * their versions, as the loader does for a program of another distribution. The types are declared here.
 */
#include "ends.h"

#include <dlfcn.h>

#define MASK_IOVA (1u << 0)
#define MASK_ADDR (1u << 1)
#define MASK_FD (1u << 2)
#define MASK_DMAH (1u << 4)
#define MASK_BUF (1u << 5)

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

/* A private function is one function under the node of every release that has it, and under no other. */
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
		ENSURE(flag && !*flag, "no flag in %s", nodes[i]);
	}
	ENSURE(look("ibv_cmd_create_cq_ex2", "IBVERBS_PRIVATE_34"), "no ibv_cmd_create_cq_ex2");
	ENSURE(!look("ibv_cmd_create_cq_ex2", "IBVERBS_PRIVATE_33"), "ibv_cmd_create_cq_ex2 came after node 33");
	return NULL;
}

static const char *port_speed(size_t arg)
{
	uint64_t speed = 0;

	(void)arg;
	TRY(find_all());
	/* Width code 2 is four lanes, speed code 32 is 25 Gb/s; the unit is 100 Mb/s. */
	ENSURE(port_attr.active_width == 2 && port_attr.active_speed == 32, "width %u, speed %u",
	       port_attr.active_width, port_attr.active_speed);
	ENSURE(!query_port_speed(device, PORT, &speed) && speed == 1000, "speed %llu", (unsigned long long)speed);
	ENSURE(query_port_speed(device, 2, &speed) == EINVAL, "a second port");
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

	/* A Write to the address that was given for it arrives at the beginning of the memory. */
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

	ENSURE(!reg_ex(p.b.pd, (struct mr_init_attr){ .length = 64, .addr = memory }) && errno == EINVAL, "no address: %s",
	       strerror(errno));
	ENSURE(!reg_ex(p.b.pd, (struct mr_init_attr){ .length = 64, .fd = 0, .comp_mask = MASK_FD }) && errno == EOPNOTSUPP,
	       "a dma-buf: %s", strerror(errno));
	ENSURE(!reg_ex(p.b.pd, (struct mr_init_attr){ .length = 64, .addr = memory, .comp_mask = MASK_ADDR | MASK_DMAH }) &&
		       errno == EOPNOTSUPP, "a DMA handle: %s", strerror(errno));
	ENSURE(!reg_ex(p.b.pd, (struct mr_init_attr){ .length = 64, .addr = memory, .comp_mask = MASK_ADDR | 1u << 20 }) &&
		       errno == EOPNOTSUPP, "an unknown bit: %s", strerror(errno));
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
	/* The handle goes before its region: the memory stays until the region goes. */
	close_now(buf);
	at[9999] = 2;
	ENSURE(!ibv_dereg_mr(mr), "ibv_dereg_mr");

	at = alloc_buf(pd, 4096, &buf);
	ENSURE(at, "ibv_alloc_buf: %s", strerror(errno));
	keep(close_buffer, buf, "buffer");
	ENSURE(!reg_buf_mr(other, buf, at, 4096, 0) && errno == EINVAL, "another domain: %s", strerror(errno));
	errno = 0;
	ENSURE(!reg_buf_mr(pd, buf, at + 1, 4096, 0) && errno == EINVAL, "beyond the end: %s", strerror(errno));
	errno = 0;
	ENSURE(!reg_buf_mr(pd, buf, at - 1, 16, 0) && errno == EINVAL, "before the beginning: %s", strerror(errno));
	errno = 0;
	ENSURE(!reg_buf_mr(pd, buf, at, SIZE_MAX, 0) && errno == EINVAL, "a length without end: %s", strerror(errno));
	ENSURE(export_buf(buf) == -1 && errno == ENODATA, "a buffer as dma-buf: %s", strerror(errno));
	ENSURE(!alloc_buf(pd, 0, &buf) && errno == EINVAL, "no bytes: %s", strerror(errno));
	return NULL;
}

/* What is about hardware fails as on a device that does not have it. */
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

static const struct test tests[] = {
	{ "private_nodes", private_nodes, 0, 0, false },
	{ "port_speed", port_speed, 0, 0, false },
	{ "reg_mr_ex_works", reg_mr_ex_works, 0, 0, false },
	{ "buffers", buffers, 0, 0, false },
	{ "hardware_only", hardware_only, 0, 0, false },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
