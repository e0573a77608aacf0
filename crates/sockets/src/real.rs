//! The C library's functions that the hooks replace.
//!
//! The first call of each looks the symbol up in the libraries loaded after this one. The lookup allocates no memory, because memory
//! allocators call some of these functions while they initialize.

use libc::{
    c_char, c_int, c_long, c_uint, c_ulong, c_void, epoll_event, fd_set, iovec, mmsghdr, msghdr,
    nfds_t, off_t, pollfd, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};
use std::sync::atomic::{AtomicPtr, Ordering};

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Where the functions are looked up. With a sanitizer the library is not preloaded, and the functions are those of the
/// sanitizer's runtime in the program (`lab/src/sanitize.rs`).
const WHERE: *mut c_void = if cfg!(sanitized) {
    libc::RTLD_DEFAULT
} else {
    libc::RTLD_NEXT
};

/// The return value of a hook whose original this C library does not have. A program that looks up the name finds the hook,
/// and may call it.
trait Missing {
    fn missing() -> Self;
}

macro_rules! missing {
    ($($type:ty: $value:expr;)*) => {$(
        impl Missing for $type {
            fn missing() -> Self {
                // SAFETY: the C library returns the errno location of this thread.
                unsafe { *libc::__errno_location() = libc::ENOSYS }
                $value
            }
        }
    )*};
}

missing! {
    i32: -1;
    i64: -1;
    isize: -1;
    (): ();
    *mut c_void: std::ptr::null_mut();
}

macro_rules! originals {
    ($($name:ident($($arg:ident: $type:ty),*) -> $ret:ty;)*) => {$(
        /// Calls the C library's function of this name.
        ///
        /// # Safety
        /// The requirements of that function apply.
        #[inline]
        pub unsafe fn $name($($arg: $type),*) -> $ret {
            static AT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
            let mut at = AT.load(Ordering::Relaxed);
            if at.is_null() {
                // SAFETY: the name is a C string.
                at = unsafe { dlsym(WHERE, concat!(stringify!($name), "\0").as_ptr().cast()) };
                if at.is_null() {
                    return Missing::missing();
                }
                AT.store(at, Ordering::Relaxed);
            }
            // SAFETY: the C library's function of this name has this type.
            let call = unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($type),*) -> $ret>(at)
            };
            // SAFETY: upheld by the caller.
            unsafe { call($($arg),*) }
        }
    )*};
}

originals! {
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
    accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
    connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
    bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
    listen(fd: c_int, backlog: c_int) -> c_int;
    shutdown(fd: c_int, how: c_int) -> c_int;
    close(fd: c_int) -> c_int;
    closefrom(first: c_int) -> ();
    dup(fd: c_int) -> c_int;
    dup2(fd: c_int, to: c_int) -> c_int;
    dup3(fd: c_int, to: c_int, flags: c_int) -> c_int;
    fcntl(fd: c_int, cmd: c_int, arg: usize) -> c_int;
    fcntl64(fd: c_int, cmd: c_int, arg: usize) -> c_int;
    ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int;
    sockatmark(fd: c_int) -> c_int;
    getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int;
    setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int;
    read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t;
    __read_chk(fd: c_int, buf: *mut c_void, len: size_t, room: size_t) -> ssize_t;
    readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t;
    write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t;
    writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t;
    send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, addr: *const sockaddr, alen: socklen_t) -> ssize_t;
    sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t;
    sendmmsg(fd: c_int, msgs: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int;
    recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
    __recv_chk(fd: c_int, buf: *mut c_void, len: size_t, room: size_t, flags: c_int) -> ssize_t;
    recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, addr: *mut sockaddr, alen: *mut socklen_t) -> ssize_t;
    __recvfrom_chk(fd: c_int, buf: *mut c_void, len: size_t, room: size_t, flags: c_int, addr: *mut sockaddr, alen: *mut socklen_t) -> ssize_t;
    recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t;
    recvmmsg(fd: c_int, msgs: *mut mmsghdr, n: c_uint, flags: c_int, timeout: *mut timespec) -> c_int;
    sendfile(out: c_int, from: c_int, offset: *mut off_t, n: size_t) -> ssize_t;
    splice(from: c_int, off_in: *mut i64, to: c_int, off_out: *mut i64, n: size_t, flags: c_uint) -> ssize_t;
    pread(fd: c_int, buf: *mut c_void, len: size_t, offset: off_t) -> ssize_t;
    preadv2(fd: c_int, iov: *const iovec, n: c_int, offset: off_t, flags: c_int) -> ssize_t;
    pwritev2(fd: c_int, iov: *const iovec, n: c_int, offset: off_t, flags: c_int) -> ssize_t;
    poll(fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int;
    __poll_chk(fds: *mut pollfd, n: nfds_t, timeout: c_int, room: size_t) -> c_int;
    ppoll(fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    __ppoll_chk(fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t, room: size_t) -> c_int;
    select(n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, timeout: *mut timeval) -> c_int;
    pselect(n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    epoll_create(size: c_int) -> c_int;
    epoll_create1(flags: c_int) -> c_int;
    epoll_ctl(set: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int;
    epoll_wait(set: c_int, events: *mut epoll_event, n: c_int, timeout: c_int) -> c_int;
    epoll_pwait(set: c_int, events: *mut epoll_event, n: c_int, timeout: c_int, mask: *const sigset_t) -> c_int;
    epoll_pwait2(set: c_int, events: *mut epoll_event, n: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    execve(path: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    execv(path: *const c_char, argv: *const *const c_char) -> c_int;
    execvp(path: *const c_char, argv: *const *const c_char) -> c_int;
    execvpe(path: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    fexecve(fd: c_int, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    posix_spawn(pid: *mut libc::pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    posix_spawnp(pid: *mut libc::pid_t, file: *const c_char, actions: *const c_void, attributes: *const c_void, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, to: c_int) -> c_int;
    fdopen(fd: c_int, mode: *const c_char) -> *mut c_void;
    vdprintf(fd: c_int, format: *const c_char, list: *mut c_void) -> c_int;
    __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, list: *mut c_void) -> c_int;
    pthread_testcancel() -> ();
    syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long;
}
