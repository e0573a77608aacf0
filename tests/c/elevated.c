/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A program with more rights than its caller (here set-group-ID) ignores the environment variables of its caller.
 * Otherwise a caller could have a capture written to any file that the program may write. The loader ignores LD_PRELOAD
 * and LD_LIBRARY_PATH in such a program, so this program is linked to the library by path.
 */
#include "ends.h"

#include <sys/auxv.h>
#include <sys/stat.h>

#define CHILD "--child"

/* Exit status of the child: with more rights, with the same rights, or failed. */
enum { MORE_RIGHTS = 40, SAME_RIGHTS = 41, FAILED = 42 };

static const struct want usual = { 0 };

static const char *one_message(void)
{
	struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, NULL, 0);
	struct pair p;

	TRY(open_pair(&p, &usual));
	TRY(post_recv(p.b.qp, 1, NULL, 0));
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.b.rcq, 1, IBV_WC_RECV, NULL));
	return expect_ok(p.a.scq, 1, IBV_WC_SEND, NULL);
}

static int child(void)
{
	const char *reason = one_message();

	if (reason) {
		printf("# child: %s [%s]\n", reason, failed_at);
		fflush(stdout);
		return FAILED;
	}
	return getauxval(AT_SECURE) ? MORE_RIGHTS : SAME_RIGHTS;
}

static int remove_file(void *path)
{
	return unlink(path);
}

/* Runs a copy of this program with the given mode. Sets `status` to its exit status, or to minus the signal that ended it. */
static const char *run_copy(mode_t mode, int *status)
{
	static char copy[4096], capture[4200];
	char bytes[65536];
	int from, to;
	ssize_t n = readlink("/proc/self/exe", copy, sizeof copy - 16);
	pid_t pid;

	ENSURE(n > 0, "readlink: %s", strerror(errno));
	memcpy(copy + n, "-copy", 6);
	from = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	unlink(copy);
	to = open(copy, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0755);
	ENSURE(from >= 0 && to >= 0, "open: %s", strerror(errno));
	keep(remove_file, copy, "copy");
	while ((n = read(from, bytes, sizeof bytes)) > 0)
		ENSURE(write(to, bytes, (size_t)n) == n, "write: %s", strerror(errno));
	ENSURE(!fchown(to, (uid_t)-1, 65534) && !fchmod(to, mode), "fchown, fchmod: %s", strerror(errno));
	close(from);
	close(to);
	snprintf(capture, sizeof capture, "%s.pcapng", copy);
	unlink(capture);
	setenv("ANYWARP_CAPTURE", capture, 1);
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		execl(copy, copy, CHILD, (char *)NULL);
		_exit(127);
	}
	ENSURE(pid > 0 && waitpid(pid, status, 0) == pid, "no process");
	*status = WIFEXITED(*status) ? WEXITSTATUS(*status) : -WTERMSIG(*status);
	ENSURE(!close_now(copy), "unlink: %s", strerror(errno));
	return NULL;
}

static const char *capture_of(const struct stat **about)
{
	static struct stat found;
	const char *path = getenv("ANYWARP_CAPTURE");

	*about = !stat(path, &found) ? &found : NULL;
	ENSURE(!*about || !unlink(path), "unlink: %s", strerror(errno));
	return NULL;
}

static const char *variables_are_obeyed(size_t arg)
{
	const struct stat *capture;
	int status;

	(void)arg;
	TRY(run_copy(0755, &status));
	TRY(capture_of(&capture));
	ENSURE(status == SAME_RIGHTS, "the child ends with %d", status);
	ENSURE(capture && capture->st_size > 0, "there is no capture");
	ENSURE((capture->st_mode & 0777) == 0600, "others may read the capture: mode %o", capture->st_mode & 0777u);
	return NULL;
}

static const char *set_group_id(size_t arg)
{
	const struct stat *capture;
	int status;

	(void)arg;
	if (geteuid() != 0)
		SKIP("only root can change the group of a program");
	/* If the library read this variable, the child's message would fail. */
	setenv("ANYWARP_FAULTS", "op=send nth=1 -> error=local-protection", 1);
	TRY(run_copy(02755, &status));
	unsetenv("ANYWARP_FAULTS");
	TRY(capture_of(&capture));
	ENSURE(status == MORE_RIGHTS, "the child ends with %d (%d: no more rights; is the folder mounted nosuid?)", status,
	       SAME_RIGHTS);
	ENSURE(!capture, "a program with more rights than its caller writes its caller's capture");
	return NULL;
}

static const struct test tests[] = {
	{ "variables_are_obeyed", variables_are_obeyed, 0, 0, false },
	{ "set_group_id", set_group_id, 0, 0, false },
};

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], CHILD))
		return child();
	return run_tests(tests, COUNT(tests), argc, argv);
}
