//! A pointer to an object of libibverbs or librdmacm, which any thread may use.

/// A raw pointer that is `Send` and `Sync`.
pub struct Ptr<T>(pub *mut T);

impl<T> std::fmt::Debug for Ptr<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:p}", self.0)
    }
}

impl<T> Clone for Ptr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Ptr<T> {}

// SAFETY: the objects of verbs and rdma_cm may be used by any thread; their owners make sure that they are destroyed once.
unsafe impl<T> Send for Ptr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Ptr<T> {}
