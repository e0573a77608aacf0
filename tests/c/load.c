/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Loads libibverbs and librdmacm in every way that programs do, and prints each check that fails.
 *
 * usage: load HOW, where HOW is
 *   linked     the program's own references (DT_NEEDED); only if built with -DLINKED
 *   soname     dlopen("libibverbs.so.1") and ("librdmacm.so.1")
 *   link       dlopen("libibverbs.so") and ("librdmacm.so"), as NCCL does first
 *   deepbind   the same names as soname, with RTLD_DEEPBIND
 *   rdmacm     librdmacm only; the functions of libibverbs are found through it
 *   DIR        by absolute path
 *
 * Except with linked and rdmacm, librdmacm is opened before libibverbs. If EXPECT_DIR is set, the library must be in this
 * folder.
 *
 * Exits with 0 if every name and version was found, all ways led to one copy of the library, and its code is still
 * mapped after dlclose.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failed;

static void check(int ok, const char *what)
{
	if (!ok) {
		const char *why = dlerror();
		fprintf(stderr, "failed: %s%s%s\n", what, why ? ": " : "", why ? why : "");
		failed = 1;
	}
}

typedef const char *(*wc_str)(enum ibv_wc_status);
typedef const char *(*event_str)(enum rdma_cm_event_type);

static void *open_or_die(const char *name, int flags)
{
	void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | flags);

	if (!handle) {
		fprintf(stderr, "failed: %s\n", dlerror());
		exit(1);
	}
	return handle;
}

/* Looks up all functions in two handles. `cm` may also serve as `verbs`. */
static void look_up(void *verbs, void *cm)
{
	static const char *const versioned[][2] = {
		{ "ibv_open_device", "IBVERBS_1.1" },   { "ibv_reg_mr_iova2", "IBVERBS_1.8" },
		{ "ibv_query_ece", "IBVERBS_1.10" },    { "ibv_reg_dmabuf_mr", "IBVERBS_1.12" },
		{ "ibv_query_qp_data_in_order", "IBVERBS_1.14" },
		{ "ibv_query_gid_type", "IBVERBS_PRIVATE_34" },
	};

	for (size_t i = 0; i < sizeof versioned / sizeof *versioned; i++)
		check(!!dlvsym(verbs, versioned[i][0], versioned[i][1]), versioned[i][0]);
	check(!!dlvsym(cm, "rdma_create_id", "RDMACM_1.0"), "rdma_create_id");
	check(!!dlvsym(cm, "rdma_establish", "RDMACM_1.2"), "rdma_establish");
	check(!dlvsym(verbs, "ibv_open_device", "IBVERBS_9.9"), "a version that does not exist");

	void *now = dlsym(verbs, "ibv_open_device");

	check(now && now == dlvsym(verbs, "ibv_open_device", "IBVERBS_1.1"), "the default version");
	check(now != dlvsym(verbs, "ibv_open_device", "IBVERBS_1.0"), "the old version is another");

	wc_str wc = (wc_str)dlsym(verbs, "ibv_wc_status_str");
	event_str event = (event_str)dlsym(cm, "rdma_event_str");

	check(wc && !strcmp(wc(IBV_WC_SUCCESS), "success"), "ibv_wc_status_str");
	check(event && !strcmp(event(RDMA_CM_EVENT_ESTABLISHED), "RDMA_CM_EVENT_ESTABLISHED"),
	      "rdma_event_str");

	/* There is one engine in the process: the strings lie in the library that holds all state. */
	Dl_info of_wc, of_event;

	check(wc && event && dladdr(wc(IBV_WC_SUCCESS), &of_wc) &&
	      dladdr(event(RDMA_CM_EVENT_ESTABLISHED), &of_event) &&
	      of_wc.dli_fbase == of_event.dli_fbase, "one copy of the library");
	if (getenv("EXPECT_DIR") && wc && dladdr(wc(IBV_WC_SUCCESS), &of_wc))
		check(!strncmp(of_wc.dli_fname, getenv("EXPECT_DIR"), strlen(getenv("EXPECT_DIR"))),
		      of_wc.dli_fname);
}

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "";
	char path[2][4096];

#ifdef LINKED
	if (!strcmp(how, "linked")) {
		check(!strcmp(ibv_wc_status_str(IBV_WC_SUCCESS), "success"), "ibv_wc_status_str");
		check(!strcmp(rdma_event_str(RDMA_CM_EVENT_REJECTED), "RDMA_CM_EVENT_REJECTED"),
		      "rdma_event_str");
		return failed;
	}
#endif
	if (!strcmp(how, "rdmacm")) {
		void *cm = open_or_die("librdmacm.so.1", 0);

		look_up(cm, cm);
		return failed;
	}

	const char *verbs_name = "libibverbs.so.1", *cm_name = "librdmacm.so.1";
	int flags = 0;

	if (!strcmp(how, "link")) {
		verbs_name = "libibverbs.so";
		cm_name = "librdmacm.so";
	} else if (!strcmp(how, "deepbind")) {
		flags = RTLD_DEEPBIND;
	} else if (how[0] == '/') {
		snprintf(path[0], sizeof path[0], "%s/libibverbs.so.1", how);
		snprintf(path[1], sizeof path[1], "%s/librdmacm.so.1", how);
		verbs_name = path[0];
		cm_name = path[1];
	} else if (strcmp(how, "soname")) {
		fprintf(stderr, "usage: load linked|soname|link|deepbind|rdmacm|DIR\n");
		return 2;
	}

	void *cm = open_or_die(cm_name, flags);
	void *verbs = open_or_die(verbs_name, flags);

	look_up(verbs, cm);

	wc_str wc = (wc_str)dlsym(verbs, "ibv_wc_status_str");

	dlclose(verbs);
	dlclose(cm);
	check(wc && !strcmp(wc(IBV_WC_SUCCESS), "success"), "code after dlclose");
	return failed;
}
