// SPDX-License-Identifier: Apache-2.0 OR MIT
// Makes a program or library that was built on a newer glibc run with glibc 2.28. The program or library is linked with this object.
//
// A linker binds each function to its newest version. Some functions got a new version after 2.28 although they did not
// change: those of libpthread and libdl, which moved into libc.so.6 in 2.34. Others are new names of functions that existed
// before. This file defines both kinds as hidden symbols of the same names, which the other objects of the program or library
// then use. The first kind are jumps to the old versions. The second kind are jumps or make a system call. See
// docs/decisions/025.
//
// On glibc 2.28 the old versions are in libpthread.so.0 and libdl.so.2. The loader finds them if these libraries are loaded,
// so the program or library is linked with both, even on a host where they are empty.
//
//   -DPROGRAM   for a program: defines `__libc_start_main`, which its start code calls
//   -DMATH      for a program or library that is linked with libm
//   -DREPLACES  for a library that replaces functions of libc itself: defines only the jumps
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

// The version of functions that glibc has had since it was ported to the architecture.
#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#define JUMP(to) "endbr64\njmp *" to "@GOTPCREL(%rip)\n"
#elif defined(__aarch64__)
#define OLDEST "GLIBC_2.17"
#define JUMP(to) "hint #34\nadrp x16, :got:" to "\nldr x16, [x16, :got_lo12:" to "]\nbr x16\n"
#else
#error "which glibc version is the oldest on this architecture?"
#endif

// Defines `name` as a jump to the function `target` of this version.
#define BIND_TO(name, target, version)                                                                                    \
    __asm__(".symver anywarp_glibc_" #name ", " #target "@" version "\n"                                                  \
            ".section .text.anywarp_glibc_" #name ",\"ax\",%progbits\n"                                                   \
            ".globl " #name "\n.hidden " #name "\n.type " #name ", %function\n.p2align 4\n"                               \
            #name ":\n.cfi_startproc\n" JUMP("anywarp_glibc_" #name) ".cfi_endproc\n.size " #name ", . - " #name "\n"     \
            ".text\n")
#define BIND(name) BIND_TO(name, name, OLDEST)

BIND(dlsym);
BIND(dlvsym);
BIND(dlopen);
BIND(dlclose);
BIND(dlerror);
BIND(dladdr);
BIND(pthread_create);
BIND(pthread_join);
BIND(pthread_detach);
BIND(pthread_once);
BIND(pthread_sigmask);
BIND(pthread_key_create);
BIND(pthread_key_delete);
BIND(pthread_setspecific);
BIND(pthread_getspecific);
BIND(pthread_attr_setstacksize);
BIND(pthread_attr_getstack);
BIND(pthread_attr_getguardsize);
BIND(pthread_barrier_init);
BIND(pthread_barrier_wait);
BIND(pthread_barrier_destroy);
BIND(pthread_barrierattr_init);
BIND(pthread_barrierattr_setpshared);
#if defined(__x86_64__)
BIND_TO(pthread_getattr_np, pthread_getattr_np, "GLIBC_2.2.5");
BIND_TO(pthread_setname_np, pthread_setname_np, "GLIBC_2.12");
BIND_TO(__isoc23_sscanf, __isoc99_sscanf, "GLIBC_2.7");
#else
BIND_TO(__isoc23_sscanf, __isoc99_sscanf, OLDEST);
BIND(pthread_getattr_np);
BIND(pthread_setname_np);
#endif
#if defined(MATH)
BIND(exp);
BIND(log);
BIND(pow);
#endif
// The variants of C23, which also accept the prefix 0b. Since glibc 2.38 the headers make programs call them.
BIND_TO(__isoc23_strtol, strtol, OLDEST);
BIND_TO(__isoc23_strtoul, strtoul, OLDEST);
BIND_TO(__isoc23_strtoll, strtoll, OLDEST);
BIND_TO(__isoc23_strtoull, strtoull, OLDEST);

#define HIDDEN __attribute__((visibility("hidden")))

#ifndef REPLACES

// On 64-bit architectures `struct stat64` is the structure of the kernel.
HIDDEN int stat64(const char *restrict path, struct stat64 *restrict s)
{
	return (int)syscall(SYS_newfstatat, AT_FDCWD, path, s, 0);
}

HIDDEN int fstat64(int fd, struct stat64 *s)
{
	return (int)syscall(SYS_newfstatat, fd, "", s, AT_EMPTY_PATH);
}

HIDDEN int fstatat64(int dir, const char *restrict path, struct stat64 *restrict s, int flags)
{
	return (int)syscall(SYS_newfstatat, dir, path, s, flags);
}

HIDDEN pid_t gettid(void)
{
	return (pid_t)syscall(SYS_gettid);
}

// A weak symbol in Rust's standard library. Its address is 0 here, so the library does not call the function.
__asm__(".globl posix_spawn_file_actions_addchdir_np\n.hidden posix_spawn_file_actions_addchdir_np\n"
	".set posix_spawn_file_actions_addchdir_np, 0\n");

#endif

#ifdef PROGRAM

// Before 2.34 the start code of a program passed `init` to `__libc_start_main`: a function that calls the program's
// constructors. Newer start code passes null, and the new version of `__libc_start_main` calls the constructors. The old
// version would call none, so it gets the function below.
typedef void constructor(int, char **, char **);
extern constructor *__preinit_array_start[], *__preinit_array_end[], *__init_array_start[], *__init_array_end[];
#pragma GCC visibility push(hidden)
extern void _init(void);
#pragma GCC visibility pop

static void construct(int argc, char **argv, char **envp)
{
	for (constructor **c = __preinit_array_start; c < __preinit_array_end; c++)
		(*c)(argc, argv, envp);
	_init();
	for (constructor **c = __init_array_start; c < __init_array_end; c++)
		(*c)(argc, argv, envp);
}

__asm__(".symver anywarp_glibc_start, __libc_start_main@" OLDEST);
extern int anywarp_glibc_start(int (*)(int, char **, char **), int, char **, constructor *, void (*)(void),
			       void (*)(void), void *);

HIDDEN int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv, constructor *init,
			     void (*fini)(void), void (*rtld_fini)(void), void *stack_end)
{
	return anywarp_glibc_start(main, argc, argv, init ? init : construct, fini, rtld_fini, stack_end);
}

#endif
