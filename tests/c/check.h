/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The test harness of the C programs: a table of tests, one line of output for each test, and a time limit for each.
 *
 * A test is a function that returns NULL if it passes, and otherwise the reason why it failed. It registers what it
 * opens with `keep()`. The harness closes these objects after the test, newest first, whether the test passed or not.
 * If closing one fails, the test fails. A test that runs in a separate process is an exception: this process ends without
 * closing them. SIGALRM enforces the time limit, so a call that never returns ends the program with a FAIL line.
 *
 *   ok rc_send_4096
 *   FAIL rc_write_0 completion status 10 (remote access error), expected 0
 *   skip rc_send_inv the device has no type 2 memory windows
 *   41 passed, 1 failed, 1 skipped
 */
#ifndef ANYWARP_TESTS_CHECK_H
#define ANYWARP_TESTS_CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define UNUSED __attribute__((unused))

/* One row of the table of tests. `arg` distinguishes rows that share a function. */
struct test {
	const char *name;
	const char *(*run)(size_t arg);
	size_t arg;
	unsigned int seconds; /* time limit; 0: DEFAULT_SECONDS */
	bool alone;           /* run in a separate process: the test may crash, or needs a process that has not used the library yet */
};

#define DEFAULT_SECONDS 60

/* The source positions that a failure passed through, innermost first. */
static char failed_at[256];

UNUSED static void note_place(const char *file, int line, bool first)
{
	size_t used = first ? 0 : strlen(failed_at);

	snprintf(failed_at + used, sizeof failed_at - used, "%s%s:%d", first ? "" : " < ", file, line);
}

/* Formats a reason. The two newest results stay valid, so that a reason may contain the previous one. */
UNUSED __attribute__((format(printf, 1, 2))) static const char *because(const char *format, ...)
{
	static char text[2][512];
	static int turn;
	va_list args;

	turn = !turn;
	va_start(args, format);
	vsnprintf(text[turn], sizeof text[turn], format, args);
	va_end(args);
	return text[turn];
}

/* Fails the test with a formatted reason unless `cond` holds. */
#define ENSURE(cond, ...)                                             \
	do {                                                          \
		if (!(cond)) {                                        \
			note_place(__FILE_NAME__, __LINE__, true);    \
			return because(__VA_ARGS__);                  \
		}                                                     \
	} while (0)

/* Returns the reason of a step that failed. */
#define TRY(step)                                                     \
	do {                                                          \
		const char *reason_ = (step);                         \
		if (reason_) {                                        \
			note_place(__FILE_NAME__, __LINE__, false);   \
			return reason_;                               \
		}                                                     \
	} while (0)

#define SKIP_MARK '\001'
#define SKIPPED 77 /* exit status of a skipped test that ran in a separate process */

/* Ends the test as skipped, because the device or the host does not offer what the test needs. */
#define SKIP(reason) return "\001" reason

UNUSED static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

UNUSED static uint64_t now_ms(void)
{
	return now_ns() / 1000000u;
}

UNUSED static void sleep_ms(unsigned int ms)
{
	struct timespec t = { ms / 1000, (long)(ms % 1000) * 1000000 };

	while (nanosleep(&t, &t) && errno == EINTR)
		;
}

/* An object that a test opened. The harness closes it after the test. */
struct kept {
	int (*close)(void *what);
	void *what;
	const char *name;
};

static struct kept kept[65536];
static size_t kept_count;

UNUSED static void keep(int (*close_it)(void *), void *what, const char *name)
{
	if (kept_count == COUNT(kept)) {
		fprintf(stderr, "the test keeps too many objects\n");
		abort();
	}
	kept[kept_count++] = (struct kept){ close_it, what, name };
}

/* Closes one kept object now. Returns the result of its close function. */
UNUSED static int close_now(void *what)
{
	for (size_t i = kept_count; i-- > 0;) {
		if (kept[i].what != what)
			continue;
		struct kept k = kept[i];
		memmove(&kept[i], &kept[i + 1], (kept_count - i - 1) * sizeof kept[0]);
		kept_count--;
		return k.close(k.what);
	}
	return ENOENT;
}

/* Removes a kept object that was closed otherwise. */
UNUSED static void forget(void *what)
{
	for (size_t i = kept_count; i-- > 0;) {
		if (kept[i].what == what) {
			memmove(&kept[i], &kept[i + 1], (kept_count - i - 1) * sizeof kept[0]);
			kept_count--;
			return;
		}
	}
}

static const char *close_all(void)
{
	static char text[128];
	const char *reason = NULL;

	while (kept_count > 0) {
		struct kept k = kept[--kept_count];
		int rc = k.close(k.what);

		if (rc && !reason) {
			snprintf(text, sizeof text, "clean-up: closing the %s returns %d (%s)", k.name, rc,
				 strerror(rc > 0 ? rc : errno));
			reason = text;
		}
	}
	return reason;
}

static struct {
	int passed, failed, skipped;
	const char *running;
} tally;

/*
 * Reports the expired time limit and ends the program. The signal may have interrupted stdio, so the text is sent with
 * write(2).
 */
static void on_deadline(int signal_number)
{
	char text[256];
	int n = snprintf(text, sizeof text, "FAIL %s time limit expired\n%d passed, %d failed, %d skipped\n",
			 tally.running ? tally.running : "?", tally.passed, tally.failed + 1, tally.skipped);

	(void)signal_number;
	if (n > 0 && write(STDOUT_FILENO, text, (size_t)n) < 0)
		_exit(3);
	_exit(1);
}

/*
 * Whether the arguments select this test. Arguments are parts of names; without arguments all tests are selected.
 * `--without=PART` excludes tests.
 */
static bool selected(const char *name, int argc, char **argv)
{
	static const char without[] = "--without=";
	bool any = false;

	for (int i = 1; i < argc; i++) {
		if (!strncmp(argv[i], without, sizeof without - 1) && strstr(name, argv[i] + sizeof without - 1))
			return false;
	}
	for (int i = 1; i < argc; i++) {
		if (argv[i][0] == '-')
			continue;
		any = true;
		if (strstr(name, argv[i]))
			return true;
	}
	return !any;
}

UNUSED static bool has_flag(int argc, char **argv, const char *flag)
{
	for (int i = 1; i < argc; i++)
		if (!strcmp(argv[i], flag))
			return true;
	return false;
}

/* Runs a test in a new process of this program. That process prints the reason of a failure. */
static const char *run_alone(const struct test *t)
{
	static char text[128];
	char program[4096] = { 0 };
	pid_t pid;
	int status;

	/* The link itself cannot be executed under valgrind, where it leads to valgrind. */
	if (readlink("/proc/self/exe", program, sizeof program - 1) <= 0)
		return "/proc/self/exe cannot be read";
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		execl(program, "test", "--alone", t->name, (char *)NULL);
		_exit(127);
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return "fork or waitpid failed";
	if (WIFSIGNALED(status))
		snprintf(text, sizeof text, "killed by signal %d", WTERMSIG(status));
	else if (WEXITSTATUS(status) == SKIPPED)
		snprintf(text, sizeof text, "%csee the line before", SKIP_MARK);
	else if (WEXITSTATUS(status))
		snprintf(text, sizeof text, "failed, see the line before");
	else
		return NULL;
	return text;
}

/*
 * Appends a skipped test to the file named in CHECK_SKIPS, so that the runner can compare it with the expected skips.
 */
UNUSED static void note_skip(const char *name, const char *reason)
{
	const char *path = getenv("CHECK_SKIPS");
	FILE *file = path ? fopen(path, "a") : NULL;

	if (file) {
		fprintf(file, "%s %s\n", name, reason);
		fclose(file);
	}
}

static void run_test(const struct test *t, bool isolate)
{
	const char *reason, *cleanup;

	tally.running = t->name;
	alarm(t->seconds ? t->seconds : DEFAULT_SECONDS);
	failed_at[0] = 0;
	reason = isolate && t->alone ? run_alone(t) : t->run(t->arg);
	cleanup = close_all();
	alarm(0);
	if (!reason)
		reason = cleanup;
	if (!reason) {
		tally.passed++;
		printf("ok %s\n", t->name);
	} else if (reason[0] == SKIP_MARK) {
		tally.skipped++;
		printf("skip %s %s\n", t->name, reason + 1);
		note_skip(t->name, reason + 1);
	} else {
		tally.failed++;
		printf("FAIL %s %s%s%s%s\n", t->name, reason, failed_at[0] ? " [" : "", failed_at, failed_at[0] ? "]" : "");
	}
	fflush(stdout);
}

/* Runs the table of tests and prints the totals. Returns the exit status of the program. */
UNUSED static int run_tests(const struct test *tests, size_t count, int argc, char **argv)
{
	struct sigaction action = { .sa_handler = on_deadline };

	if (has_flag(argc, argv, "--list")) {
		for (size_t i = 0; i < count; i++)
			puts(tests[i].name);
		return 0;
	}
	sigaction(SIGALRM, &action, NULL);
	signal(SIGPIPE, SIG_IGN);
	if (argc == 3 && !strcmp(argv[1], "--alone")) {
		const char *reason = "no such test";

		for (size_t i = 0; i < count; i++)
			if (!strcmp(tests[i].name, argv[2]))
				reason = tests[i].run(tests[i].arg);
		if (reason && reason[0] == SKIP_MARK) {
			printf("# %s: %s\n", argv[2], reason + 1);
			return SKIPPED;
		}
		if (reason)
			printf("FAIL %s: %s [%s]\n", argv[2], reason, failed_at);
		return reason ? 1 : 0;
	}
	/* An argument that matches no test is an error. Otherwise a test whose name is misspelled would silently not run. */
	for (int i = 1; i < argc; i++) {
		bool found = argv[i][0] == '-';

		for (size_t k = 0; k < count && !found; k++)
			found = strstr(tests[k].name, argv[i]);
		if (!found) {
			printf("FAIL %s: no test has this name\n", argv[i]);
			return 1;
		}
	}
	for (size_t i = 0; i < count; i++)
		if (selected(tests[i].name, argc, argv))
			run_test(&tests[i], true);
	printf("%d passed, %d failed, %d skipped\n", tally.passed, tally.failed, tally.skipped);
	return tally.failed || tally.passed == 0 ? 1 : 0;
}

/* The byte at `offset` of the test pattern `seed`. Lost, repeated and swapped blocks are all detected. */
static inline uint8_t pattern_byte(uint32_t seed, size_t offset)
{
	uint64_t x = ((uint64_t)seed << 40) ^ (offset >> 3);

	x *= 0x9e3779b97f4a7c15u;
	x ^= x >> 29;
	x *= 0xbf58476d1ce4e5b9u;
	return (uint8_t)(x >> (8 * (offset & 7)));
}

UNUSED static void fill_pattern(uint8_t *at, size_t len, uint32_t seed)
{
	for (size_t i = 0; i < len; i++)
		at[i] = pattern_byte(seed, i);
}

/* Compares memory with the bytes `[from, from + len)` of the pattern. Reports the first difference. */
UNUSED static const char *same_pattern_from(const uint8_t *at, size_t len, uint32_t seed, size_t from)
{
	for (size_t i = 0; i < len; i++)
		ENSURE(at[i] == pattern_byte(seed, from + i), "byte %zu of %zu is %02x, expected %02x", i, len, at[i],
		       pattern_byte(seed, from + i));
	return NULL;
}

UNUSED static const char *same_pattern(const uint8_t *at, size_t len, uint32_t seed)
{
	return same_pattern_from(at, len, seed, 0);
}

UNUSED static const char *all_bytes(const uint8_t *at, size_t len, uint8_t value, const char *what)
{
	for (size_t i = 0; i < len; i++)
		ENSURE(at[i] == value, "%s: byte %zu of %zu was changed: %02x, expected %02x", what, i, len, at[i],
		       value);
	return NULL;
}

/* The resident memory of this process in KiB. */
UNUSED static long resident(void)
{
	FILE *f = fopen("/proc/self/smaps_rollup", "r");
	char line[128];
	long kib = 0;

	while (f && fgets(line, sizeof line, f))
		sscanf(line, "Rss: %ld", &kib);
	if (f)
		fclose(f);
	return kib;
}

#endif
