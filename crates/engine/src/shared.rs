//! Memory that two processes of one user share, and copies between it and the program's memory.

use crate::mem::UserSlice;

pub(crate) use shared_memory::Shared;

/// Copies between shared memory and user memory. The two may overlap, because a program can register any memory of its process.
pub(crate) trait UserCopies {
    /// Copies user memory to offset `at`. Does nothing if it does not fit.
    fn put_user(&self, at: usize, from: UserSlice<'_>);

    /// Fills user memory with bytes from offset `at`. Does nothing if they are not inside the shared memory.
    fn get_user(&self, at: usize, to: UserSlice<'_>);
}

impl UserCopies for Shared {
    fn put_user(&self, at: usize, from: UserSlice<'_>) {
        // SAFETY: the slice is valid while its lifetime lasts.
        unsafe { self.put_from(at, from.start(), from.len()) };
    }

    fn get_user(&self, at: usize, to: UserSlice<'_>) {
        // SAFETY: the slice is valid while its lifetime lasts.
        unsafe { self.get_to(at, to.start(), to.len()) };
    }
}
