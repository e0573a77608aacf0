//! The hooks that start other programs: `exec` and `posix_spawn` with their variants.

use super::variadic::{self, with_list};
use crate::conn::dgram::LIVE as DGRAMS;
use crate::conn::sock::{LIVE, Mode as State, Sock};
use crate::conn::table::{self, Entry};
use crate::limits;
use crate::log;
use crate::owner;
use crate::real;
use crate::sys;
use anywarp_core::lock::Mutex;
use libc::{c_char, c_int, c_void};
use sockets_base::stat::Why;
use std::ptr::null;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What becomes of the process that starts another program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Starter {
    /// The program takes its place.
    Ends,
    /// It may continue to use its connections.
    Continues,
}

/// Makes a connection plain that another program inherits as descriptor `fd`, if that program may use it: an accepted connection that is not
/// decided yet, or a stream that is standard input, output or error. Returns the flags of the descriptor if it is a stream that the program
/// must not inherit: other descriptors are mostly inherited by mistake, and this process continues to use them.
fn pass_on(fd: c_int, sock: &'static Sock, starter: Starter) -> Option<c_int> {
    // SAFETY: no pointer is passed.
    let flags = unsafe { real::fcntl(fd, libc::F_GETFD, 0) };
    if flags < 0 || flags & libc::FD_CLOEXEC != 0 {
        return None;
    }
    match sock.mode() {
        // A connection of a process that continues would be shut down by `require`, and one whose Request has not arrived yet could not be
        // upgraded.
        State::Accepted if starter == Starter::Continues => {
            if sock.is_strict() && fd > libc::STDERR_FILENO {
                return Some(flags);
            }
            sock.refuse(fd, Why::Handed);
            None
        }
        State::Accepted => {
            sock.hand_over(fd);
            None
        }
        State::Up if fd <= libc::STDERR_FILENO && sock.is_ours(fd) && sock.hand_over(fd) => None,
        State::Up => Some(flags),
        State::Connecting | State::Plain => None,
    }
}

/// Called before exec. Accepted connections that are not decided yet become plain, and so does a UDP socket or a stream (an upgraded
/// connection) that is standard input, output or error. All other streams are closed by exec, because the next program would
/// read FPDUs.
fn before_exec() {
    if LIVE.load(Ordering::Relaxed) + DGRAMS.load(Ordering::Relaxed) == 0 {
        return;
    }
    // A child of vfork has a descriptor table of its own but shares the parent's memory.
    let is_visitor = owner::is_visitor();
    let patience = Instant::now() + Duration::from_millis(limits::EXIT_LOCK);
    table::for_each(|fd, entry| {
        if let Entry::Dgram(dgram) = entry
            && fd <= libc::STDERR_FILENO
            && !is_visitor
        {
            dgram.hand_over(fd);
        }
        let Entry::Sock(sock) = entry else { return };
        if !is_visitor {
            sock.before_exec(fd, patience);
        }
        if let Some(flags) = pass_on(fd, sock, Starter::Ends) {
            log::line(&format!("stream {fd} is closed by exec"));
            // SAFETY: no pointer is passed.
            unsafe {
                real::fcntl(fd, libc::F_SETFD, (flags | libc::FD_CLOEXEC) as usize);
            }
        }
    });
}

/// See `execve(2)`.
///
/// # Safety
/// The requirements of `execve` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execve(
    path: *const c_char,
    argv: *const *const c_char,
    envp: *const *const c_char,
) -> c_int {
    before_exec();
    // SAFETY: upheld by the caller.
    unsafe { real::execve(path, argv, envp) }
}

/// See `execv(3)`.
///
/// # Safety
/// The requirements of `execv` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execv(path: *const c_char, argv: *const *const c_char) -> c_int {
    before_exec();
    // SAFETY: upheld by the caller.
    unsafe { real::execv(path, argv) }
}

/// See `execvp(3)`.
///
/// # Safety
/// The requirements of `execvp` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execvp(path: *const c_char, argv: *const *const c_char) -> c_int {
    before_exec();
    // SAFETY: upheld by the caller.
    unsafe { real::execvp(path, argv) }
}

/// See `execvpe(3)`.
///
/// # Safety
/// The requirements of `execvpe` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execvpe(
    path: *const c_char,
    argv: *const *const c_char,
    envp: *const *const c_char,
) -> c_int {
    before_exec();
    // SAFETY: upheld by the caller.
    unsafe { real::execvpe(path, argv, envp) }
}

/// See `fexecve(3)`.
///
/// # Safety
/// The requirements of `fexecve` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fexecve(
    fd: c_int,
    argv: *const *const c_char,
    envp: *const *const c_char,
) -> c_int {
    before_exec();
    // SAFETY: upheld by the caller.
    unsafe { real::fexecve(fd, argv, envp) }
}

/// The arguments of `execl` and its variants, in the memory of the call: the calls can be made in a signal handler and in a child of vfork,
/// where no memory should be allocated. The last element is null.
type Arguments = [*const c_char];

/// Copies the arguments up to the null behind them. Returns false if there are too many.
///
/// # Safety
/// `list` is the address of a `va_list` that contains the arguments behind `first`, and null.
unsafe fn collect(into: &mut Arguments, first: *const c_char, list: *mut c_void) -> bool {
    let mut next = first;
    for place in into {
        *place = next;
        if next.is_null() {
            return true;
        }
        // SAFETY: upheld by the caller.
        next = unsafe { variadic::next(list) }.cast();
    }
    false
}

/// # Safety
/// The requirements of `execl` apply to `call`, and those of [`collect`].
unsafe fn with_arguments(
    first: *const c_char,
    list: *mut c_void,
    call: impl FnOnce(*const *const c_char) -> c_int,
) -> c_int {
    // SAFETY: upheld by the caller.
    let begin = unsafe { variadic::place(list) };
    let mut few = [null(); limits::ARGUMENTS_FEW];
    // SAFETY: upheld by the caller.
    if unsafe { collect(&mut few, first, list) } {
        return call(few.as_ptr());
    }
    // SAFETY: upheld by the caller; the place is that of the list.
    unsafe {
        variadic::go_to(list, begin);
        with_many_arguments(first, list, call)
    }
}

/// [`with_arguments`] for a longer list. Another function, because its arguments would not fit into the small stack of a signal handler.
///
/// # Safety
/// The requirements of [`with_arguments`] apply.
#[inline(never)]
unsafe fn with_many_arguments(
    first: *const c_char,
    list: *mut c_void,
    call: impl FnOnce(*const *const c_char) -> c_int,
) -> c_int {
    let mut arguments = [null(); limits::ARGUMENTS];
    // SAFETY: upheld by the caller.
    if unsafe { collect(&mut arguments, first, list) } {
        call(arguments.as_ptr())
    } else {
        super::fail(libc::E2BIG)
    }
}

/// `execl` with the arguments behind the first one in a list.
unsafe extern "C-unwind" fn execl_list(
    path: *const c_char,
    first: *const c_char,
    list: *mut c_void,
) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe { with_arguments(first, list, |argv| execv(path, argv)) }
}

/// `execlp` with the arguments behind the first one in a list.
unsafe extern "C-unwind" fn execlp_list(
    file: *const c_char,
    first: *const c_char,
    list: *mut c_void,
) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe { with_arguments(first, list, |argv| execvp(file, argv)) }
}

/// `execle` with the arguments behind the first one, and the environment, in a list.
unsafe extern "C-unwind" fn execle_list(
    path: *const c_char,
    first: *const c_char,
    list: *mut c_void,
) -> c_int {
    // SAFETY: upheld by the caller; the environment follows the arguments.
    unsafe {
        with_arguments(first, list, |argv| {
            execve(path, argv, variadic::next(list).cast())
        })
    }
}

/// See `execl(3)`.
///
/// # Safety
/// The requirements of `execl` apply.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execl(path: *const c_char, first: *const c_char) -> c_int {
    with_list!(execl_list, 2);
}

/// See `execlp(3)`.
///
/// # Safety
/// The requirements of `execlp` apply.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execlp(file: *const c_char, first: *const c_char) -> c_int {
    with_list!(execlp_list, 2);
}

/// See `execle(3)`.
///
/// # Safety
/// The requirements of `execle` apply.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execle(path: *const c_char, first: *const c_char) -> c_int {
    with_list!(execle_list, 2);
}

/// See `posix_spawn_file_actions_adddup2(3)`. A connection, or a UDP socket that becomes standard input, output or error of the new program,
/// becomes plain, because that program may not have the library.
///
/// # Safety
/// The requirements of `posix_spawn_file_actions_adddup2` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawn_file_actions_adddup2(
    actions: *mut c_void,
    fd: c_int,
    to: c_int,
) -> c_int {
    if !owner::is_visitor() {
        let is_standard = to <= libc::STDERR_FILENO;
        match table::get(fd) {
            Entry::Dgram(dgram) if is_standard => dgram.hand_over(fd),
            Entry::Sock(sock) if sock.mode() == State::Accepted => {
                sock.hand_over(fd);
            }
            Entry::Sock(sock)
                if sock.mode() == State::Up && !(sock.is_ours(fd) && sock.hand_over(fd)) =>
            {
                log::always(&format!(
                    "stream {fd} is passed to another program, which cannot use it; add a rule with the mode tcp for it"
                ));
            }
            _ => {}
        }
    }
    // SAFETY: upheld by the caller.
    unsafe { real::posix_spawn_file_actions_adddup2(actions, fd, to) }
}

/// The streams that the programs started by posix_spawn at present must not inherit. Their descriptors are closed by exec meanwhile.
#[derive(Debug)]
struct Hidden {
    /// The number of calls of posix_spawn under way. The last one that returns restores the flags of the descriptors.
    spawns: u32,
    /// The descriptors, with the kernel's numbers of their sockets, and their flags.
    streams: Vec<(c_int, Option<u64>, c_int)>,
}

static HIDDEN: Mutex<Hidden> = Mutex::new(Hidden {
    spawns: 0,
    streams: Vec::new(),
});

impl Hidden {
    /// Makes `fd` one that is closed by exec, if it is still a descriptor of `sock`.
    fn hide(&mut self, fd: c_int, sock: &'static Sock) {
        if !table::sock(fd).is_some_and(|now| std::ptr::eq(now, sock)) {
            return;
        }
        // SAFETY: no pointer is passed.
        let flags = unsafe { real::fcntl(fd, libc::F_GETFD, 0) };
        if flags >= 0 && flags & libc::FD_CLOEXEC == 0 {
            self.streams.push((fd, sys::cookie(fd), flags));
            set_flags(fd, flags | libc::FD_CLOEXEC);
        }
    }

    fn restore(&mut self) {
        for (fd, cookie, flags) in self.streams.drain(..) {
            // A call that the library does not see may have closed the stream, and `fd` may be another descriptor.
            if cookie.is_some() && sys::cookie(fd) == cookie {
                set_flags(fd, flags);
            }
        }
    }
}

/// Called when the table entry of a stream has been removed, before the kernel closes its descriptor `fd`. Another thread that starts a program
/// changes the flags of no descriptor that has the number `fd` later.
pub fn closing(fd: c_int) {
    HIDDEN.lock().streams.retain(|&(hidden, ..)| hidden != fd);
}

fn set_flags(fd: c_int, flags: c_int) {
    // SAFETY: no pointer is passed.
    unsafe {
        real::fcntl(fd, libc::F_SETFD, flags as usize);
    }
}

/// Locks the list of hidden streams while the process forks.
pub fn hold() -> Held {
    Held(HIDDEN.lock())
}

/// The lock of [`hold`].
#[derive(Debug)]
pub struct Held(MutexGuard<'static, Hidden>);

impl Held {
    /// Called in the child of a fork, which starts no programs yet.
    pub fn forked(mut self) {
        self.0.spawns = 0;
        self.0.restore();
    }
}

/// Starts a program by `start`. Its descriptors are handled like those of exec, but this process continues: a stream that the new
/// program must not have is closed by exec only this time.
fn spawn(start: impl FnOnce() -> c_int) -> c_int {
    if LIVE.load(Ordering::Relaxed) == 0 || owner::is_visitor() {
        return start();
    }
    HIDDEN.lock().spawns += 1;
    table::for_each(|fd, entry| {
        let Entry::Sock(sock) = entry else { return };
        if pass_on(fd, sock, Starter::Continues).is_some() {
            HIDDEN.lock().hide(fd, sock);
        }
    });
    let result = start();
    let mut hidden = HIDDEN.lock();
    // A child that was forked meanwhile has no call under way.
    hidden.spawns = hidden.spawns.saturating_sub(1);
    if hidden.spawns == 0 {
        hidden.restore();
    }
    result
}

/// See `posix_spawn(3)`.
///
/// # Safety
/// The requirements of `posix_spawn` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawn(
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    argv: *const *const c_char,
    envp: *const *const c_char,
) -> c_int {
    // SAFETY: upheld by the caller.
    spawn(|| unsafe { real::posix_spawn(pid, path, actions, attributes, argv, envp) })
}

/// See `posix_spawnp(3)`.
///
/// # Safety
/// The requirements of `posix_spawnp` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawnp(
    pid: *mut libc::pid_t,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    argv: *const *const c_char,
    envp: *const *const c_char,
) -> c_int {
    // SAFETY: upheld by the caller.
    spawn(|| unsafe { real::posix_spawnp(pid, file, actions, attributes, argv, envp) })
}
