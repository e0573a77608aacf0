//! The fabrics and domains that the program has open, which `fi_getinfo` names.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The fabrics that are open.
pub static FABRICS: Opened = Opened::new();
/// The domains that are open.
pub static DOMAINS: Opened = Opened::new();

/// The addresses of open objects, in the order of opening.
#[derive(Debug)]
pub struct Opened(Mutex<Vec<usize>>);

impl Opened {
    const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an object that was opened.
    pub fn add<T>(&self, object: *mut T) {
        self.lock().push(object.expose_provenance());
    }

    /// Removes an object that is closed.
    pub fn remove<T>(&self, object: *mut T) {
        self.lock().retain(|at| *at != object.addr());
    }

    /// Returns the object that a program has named, or the one that was opened first if the name is null. Null if none is open. `None`:
    /// the named object is not an open object of this provider.
    pub fn named<T>(&self, name: *mut T) -> Option<*mut T> {
        let opened = self.lock();
        if name.is_null() {
            let first = opened.first().copied();
            return Some(first.map_or(name, std::ptr::with_exposed_provenance_mut));
        }
        opened.contains(&name.addr()).then_some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_open_object_stands_for_all() {
        let opened = Opened::new();
        let (mut first, mut second) = (1, 2);
        let (first, second) = (&raw mut first, &raw mut second);
        let none = std::ptr::null_mut();
        assert_eq!(opened.named(none), Some(none));
        opened.add(first);
        opened.add(second);
        assert_eq!(opened.named(none), Some(first));
        assert_eq!(opened.named(second), Some(second));
        opened.remove(first);
        assert_eq!(opened.named(none), Some(second));
        assert_eq!(opened.named(first), None);
    }
}
