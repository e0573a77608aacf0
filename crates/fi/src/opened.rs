//! The fabrics and domains that the program has open, which `fi_getinfo` names.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The objects that are open.
pub static OPENED: Opened = Opened::new();

/// The addresses of open objects, in the order of opening: those of fabrics, and those of domains with their fabrics.
#[derive(Debug)]
pub struct Opened(Mutex<Lists>);

#[derive(Debug)]
struct Lists {
    fabrics: Vec<usize>,
    domains: Vec<(usize, usize)>,
}

impl Opened {
    const fn new() -> Self {
        Self(Mutex::new(Lists {
            fabrics: Vec::new(),
            domains: Vec::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Lists> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a fabric.
    pub fn add_fabric<T>(&self, fabric: *mut T) {
        self.lock().fabrics.push(fabric.expose_provenance());
    }

    /// Adds a domain of a fabric.
    pub fn add_domain<T, F>(&self, domain: *mut T, fabric: *mut F) {
        let domain = domain.expose_provenance();
        self.lock().domains.push((domain, fabric.addr()));
    }

    /// Returns whether a fabric has open domains.
    pub fn has_domains<F>(&self, fabric: *mut F) -> bool {
        let lists = self.lock();
        lists.domains.iter().any(|(_, of)| *of == fabric.addr())
    }

    /// Removes an object that is closed.
    pub fn remove<T>(&self, object: *mut T) {
        let mut lists = self.lock();
        lists.fabrics.retain(|at| *at != object.addr());
        lists
            .domains
            .retain(|(at, of)| *at != object.addr() && *of != object.addr());
    }

    /// Returns the fabric and the domain that a program has named. If it has named only one of them, or none, returns the first ones that
    /// belong together, or null. `None`: a named object is not an open object of this provider, or they do not belong together.
    pub fn named<F, D>(&self, fabric: *mut F, domain: *mut D) -> Option<(*mut F, *mut D)> {
        let lists = self.lock();
        let is_named = |at: usize, name: usize| name == 0 || at == name;
        let found = lists.domains.iter().find(|(of_domain, of_fabric)| {
            is_named(*of_domain, domain.addr()) && is_named(*of_fabric, fabric.addr())
        });
        let (found_domain, found_fabric) = match found {
            Some((of_domain, of_fabric)) => (*of_domain, *of_fabric),
            None if !domain.is_null() => return None,
            // The fabric has no domain.
            None => {
                let mut fabrics = lists.fabrics.iter();
                let found = fabrics.find(|at| is_named(**at, fabric.addr()));
                if found.is_none() && !fabric.is_null() {
                    return None;
                }
                (0, found.copied().unwrap_or(0))
            }
        };
        Some((
            std::ptr::with_exposed_provenance_mut(found_fabric),
            std::ptr::with_exposed_provenance_mut(found_domain),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_and_its_fabric_are_named_together() {
        let opened = Opened::new();
        let mut objects = [0_u64; 4];
        let [f1, f2, d1, d2] = objects.each_mut().map(std::ptr::from_mut);
        let none = std::ptr::null_mut::<u64>();
        assert_eq!(opened.named(none, none), Some((none, none)));
        opened.add_fabric(f1);
        assert_eq!(opened.named(none, none), Some((f1, none)));
        opened.add_fabric(f2);
        opened.add_domain(d2, f2);
        assert_eq!(opened.named(f1, none), Some((f1, none)));
        opened.add_domain(d1, f1);
        assert_eq!(opened.named(f1, none), Some((f1, d1)));
        assert_eq!(opened.named(none, d2), Some((f2, d2)));
        assert_eq!(opened.named(none, none), Some((f2, d2)));
        assert_eq!(opened.named(f1, d2), None);
        assert!(opened.has_domains(f2));
        opened.remove(d2);
        assert!(!opened.has_domains(f2));
        assert_eq!(opened.named(f2, none), Some((f2, none)));
        assert_eq!(opened.named(none, d2), None);
        opened.remove(f2);
        assert_eq!(opened.named(f2, none), None);
    }
}
