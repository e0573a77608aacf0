/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * How registration treats pages: by default they are left as they are, ANYWARP_PREFAULT makes them resident, and
 * ANYWARP_PIN also locks them.
 *
 * Each test is a separate process, which sets its environment variables before the library reads them.
 */
#include "ends.h"

#include <sys/mman.h>
#include <sys/resource.h>

#define PAGE ((size_t)4096)
#define PAGES ((size_t)64)

static struct ibv_pd *pd;
static uint8_t *at;

/* Maps pages that have not been accessed. */
static const char *fresh(const char *variable)
{
	if (variable)
		setenv(variable, "1", 1);
	TRY(open_device());
	pd = new_pd();
	ENSURE(pd, "%s", strerror(errno));
	at = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ENSURE(at != MAP_FAILED, "mmap: %s", strerror(errno));
	/* The test counts single pages. */
	madvise(at, PAGES * PAGE, MADV_NOHUGEPAGE);
	return NULL;
}

static size_t resident_pages(void)
{
	unsigned char pages[PAGES];
	size_t n = 0;

	if (mincore(at, PAGES * PAGE, pages))
		return 0;
	for (size_t i = 0; i < PAGES; i++)
		n += pages[i] & 1;
	return n;
}

/* The number of locked pages, according to the kernel. */
static size_t locked(void)
{
	FILE *f = fopen("/proc/self/status", "re");
	char line[256];
	size_t kib = 0;

	while (f && fgets(line, sizeof line, f))
		if (sscanf(line, "VmLck: %zu kB", &kib) == 1)
			break;
	if (f)
		fclose(f);
	return kib * 1024 / PAGE;
}

/* A range with a hole or an unreadable page is not registered, and the pages before it do not stay locked. */
static const char *refused(bool there)
{
	ENSURE(!(there ? mprotect(at + 8 * PAGE, PAGE, PROT_NONE) : munmap(at + 8 * PAGE, PAGE)), "%s", strerror(errno));
	errno = 0;
	ENSURE(!ibv_reg_mr(pd, at, PAGES * PAGE, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT, "%s is registered: %s",
	       there ? "an unreadable page" : "a hole", strerror(errno));
	ENSURE(!locked(), "%zu pages stay locked after a refusal", locked());
	return NULL;
}

static const char *left(size_t arg)
{
	(void)arg;
	TRY(fresh(NULL));
	ENSURE(new_mr(pd, at, PAGES * PAGE, IBV_ACCESS_LOCAL_WRITE), "%s", strerror(errno));
	ENSURE(!resident_pages() && !locked(), "%zu pages are resident, %zu locked", resident_pages(), locked());
	return NULL;
}

static const char *brought_in(size_t arg)
{
	(void)arg;
	TRY(fresh("ANYWARP_PREFAULT"));
	ENSURE(new_mr(pd, at + PAGE + 1, PAGE, IBV_ACCESS_LOCAL_WRITE), "%s", strerror(errno));
	ENSURE(resident_pages() == 2, "%zu pages are resident, expected the 2 of the region", resident_pages());
	ENSURE(new_mr(pd, at, PAGES * PAGE, IBV_ACCESS_LOCAL_WRITE), "%s", strerror(errno));
	ENSURE(resident_pages() == PAGES && !locked(), "%zu pages are resident, %zu locked", resident_pages(), locked());
	return refused(false);
}

static const char *pinned(size_t arg)
{
	struct ibv_mr *all, *some, *demand;

	(void)arg;
	TRY(fresh("ANYWARP_PIN"));
	all = ibv_reg_mr(pd, at, 20 * PAGE, IBV_ACCESS_LOCAL_WRITE);
	ENSURE(all, "ibv_reg_mr: %s", strerror(errno));
	ENSURE(locked() == 20 && resident_pages() == 20, "%zu pages are locked, %zu resident", locked(), resident_pages());
	some = ibv_reg_mr(pd, at + 10 * PAGE, 20 * PAGE, 0);
	ENSURE(some, "ibv_reg_mr: %s", strerror(errno));
	ENSURE(locked() == 30, "%zu pages are locked by both regions", locked());
	ENSURE(!ibv_dereg_mr(all), "ibv_dereg_mr");
	ENSURE(locked() == 20, "%zu pages are locked by the second region", locked());
	ENSURE(!ibv_rereg_mr(some, IBV_REREG_MR_CHANGE_TRANSLATION, pd, at + 40 * PAGE, 5 * PAGE, 0), "ibv_rereg_mr: %s",
	       strerror(errno));
	ENSURE(locked() == 5, "%zu pages are locked after the region was moved", locked());
	demand = ibv_reg_mr(pd, at, PAGES * PAGE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND);
	ENSURE(demand, "ibv_reg_mr on demand: %s", strerror(errno));
	ENSURE(locked() == 5, "%zu pages are locked with an on-demand region", locked());
	ENSURE(!ibv_dereg_mr(demand) && !ibv_dereg_mr(some), "ibv_dereg_mr");
	ENSURE(!locked(), "%zu pages are locked without a region", locked());
	TRY(refused(true));
	return refused(false);
}

/* A registration beyond the limit of locked memory fails with ENOMEM, and a smaller region can still be registered. */
static const char *limit(size_t arg)
{
	struct rlimit most = { 16 * PAGE, 16 * PAGE };

	(void)arg;
	ENSURE(!setrlimit(RLIMIT_MEMLOCK, &most), "setrlimit: %s", strerror(errno));
	/* The limit does not apply to root. */
	if (!geteuid())
		ENSURE(!setgid(65534) && !setuid(65534), "setuid: %s", strerror(errno));
	TRY(fresh("ANYWARP_PIN"));
	ENSURE(new_mr(pd, at, 10 * PAGE, IBV_ACCESS_LOCAL_WRITE), "%s", strerror(errno));
	errno = 0;
	ENSURE(!ibv_reg_mr(pd, at + 10 * PAGE, 10 * PAGE, IBV_ACCESS_LOCAL_WRITE) && errno == ENOMEM,
	       "ibv_reg_mr of more than may be locked: %s", strerror(errno));
	ENSURE(locked() == 10, "%zu pages are locked", locked());
	ENSURE(new_mr(pd, at + 10 * PAGE, 6 * PAGE, IBV_ACCESS_LOCAL_WRITE), "%s", strerror(errno));
	return NULL;
}

static const struct test tests[] = {
	{ "left", left, 0, 0, true },
	{ "brought_in", brought_in, 0, 0, true },
	{ "pinned", pinned, 0, 0, true },
	{ "limit", limit, 0, 0, true },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
