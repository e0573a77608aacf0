//! Functions of libibverbs about the host rather than a device: sysfs and fork.

use crate::entry;
use crate::ffi::os_errno;
use anywarp_engine::config::variable;
use anywarp_engine::process::Inherited;
use anywarp_verbs_sys::verbs::{IBV_FORK_UNNEEDED, ibv_fork_status};
use std::ffi::{CStr, CString, OsStr, OsString, c_char, c_int, c_void};
use std::fs::File;
use std::io::Read as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;

/// Returns the mount point of sysfs without a trailing slash: `SYSFS_PATH`, or `/sys`.
fn sysfs_path() -> &'static CStr {
    static PATH: Inherited<CString> = Inherited::new(|| {
        let path = variable("SYSFS_PATH").map(OsString::into_vec);
        let path = path.unwrap_or_default();
        let kept = path.iter().rposition(|&b| b != b'/').map_or(0, |i| i + 1);
        path.get(..kept)
            .filter(|p| !p.is_empty())
            .and_then(|p| CString::new(p).ok())
            .unwrap_or_else(|| c"/sys".to_owned())
    });
    PATH.get()
}

entry! {
    /// `ibv_get_sysfs_path`: returns the mount point of sysfs. The string stays valid.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn ibv_get_sysfs_path() -> *const c_char, value(c"/sys".as_ptr()), {
        sysfs_path().as_ptr()
    }
}

entry! {
    /// `ibv_read_sysfs_file`: reads `dir/file` into `buf`, without a trailing newline.
    ///
    /// Returns the length without the terminating NUL, or -1 with errno. Text that does not fit into `size` octets with the NUL
    /// is an error, except that a `size` of 0 returns 0.
    ///
    /// # Safety
    /// `dir` and `file` are C strings, `buf` has room for `size` octets.
    unsafe fn ibv_read_sysfs_file(
        dir: *const c_char, file: *const c_char, buf: *mut c_char, size: usize,
    ) -> c_int, minus_one, {
        if dir.is_null() || file.is_null() || buf.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: both are C strings (guaranteed by the caller).
        let (dir, file) = unsafe { (CStr::from_ptr(dir), CStr::from_ptr(file)) };
        let path = Path::new(OsStr::from_bytes(dir.to_bytes())).join(OsStr::from_bytes(file.to_bytes()));
        let Some(room) = size.checked_sub(1) else {
            return Ok(0);
        };
        let text = read_line(&path, room).map_err(|e| os_errno(&e))?;
        // SAFETY: `text` has at most `size - 1` octets, and `buf` has room for `size` (guaranteed by the caller).
        unsafe {
            buf.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
            buf.add(text.len()).write(0);
        }
        Ok(c_int::try_from(text.len()).unwrap_or(c_int::MAX))
    }
}

/// Returns the content of the file at `path` without a trailing newline, if it is at most `room` long.
fn read_line(path: &Path, room: usize) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let most = room.saturating_add(2) as u64;
    File::open(path)?.take(most).read_to_end(&mut text)?;
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    if text.len() > room {
        return Err(std::io::Error::from_raw_os_error(libc::ERANGE));
    }
    Ok(text)
}

// Fork: a hardware card reads pinned pages, which the parent may lose to the child by copy-on-write. This device accesses memory
// through the parent's address space, so no pages have to be marked.

entry! {
    /// `ibv_fork_init(3)`: succeeds without any effect.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn ibv_fork_init() -> c_int, value(libc::EIO), { 0 }
}

entry! {
    /// `ibv_is_fork_initialized(3)`: returns that no initialization is needed, as with a kernel that copies pinned pages on fork.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn ibv_is_fork_initialized() -> ibv_fork_status, value(IBV_FORK_UNNEEDED), { IBV_FORK_UNNEEDED }
}

entry! {
    /// `ibv_dontfork_range`: succeeds without any effect.
    ///
    /// # Safety
    /// Any range may be passed.
    unsafe fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int, value(-1), { 0 }
}

entry! {
    /// `ibv_dofork_range`: succeeds without any effect.
    ///
    /// # Safety
    /// Any range may be passed.
    unsafe fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int, value(-1), { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &Path, size: usize) -> (c_int, Vec<u8>) {
        let mut buf = vec![b'#'; 16];
        let dir = CString::new(path.parent().unwrap().as_os_str().as_bytes()).unwrap();
        let file = CString::new(path.file_name().unwrap().as_bytes()).unwrap();
        // SAFETY: two C strings, and `buf` has room for 16 octets, more than any `size` below.
        let n = unsafe {
            ibv_read_sysfs_file(dir.as_ptr(), file.as_ptr(), buf.as_mut_ptr().cast(), size)
        };
        (n, buf)
    }

    /// A trailing newline is removed and a NUL is appended. A text that leaves no room for the NUL is an error.
    #[test]
    fn a_sysfs_file_is_read_completely_or_not_at_all() {
        let path = std::env::temp_dir().join(format!("anywarp-sysfs-{}", std::process::id()));
        std::fs::write(&path, "abc\n").unwrap();
        assert_eq!(read(&path, 0).0, 0);
        assert_eq!(read(&path, 3).0, -1);
        let (n, buf) = read(&path, 4);
        assert_eq!((n, &buf[..5]), (3, &b"abc\0#"[..]));
        assert_eq!(read(&path, 16).0, 3);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read(&path, 16).0, -1);
        assert_eq!(
            std::io::Error::last_os_error().raw_os_error(),
            Some(libc::ENOENT)
        );
    }
}
