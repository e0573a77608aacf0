//! A domain: the device, and the objects opened on it, whose state one lock protects.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::endpoint::{Endpoint, Shared};
use crate::slab::Slab;
use crate::verbs::{Channel, Device, Pd};

/// The state that the lock protects.
#[derive(Debug)]
pub struct State {
    /// The state that the endpoints share.
    pub shared: Shared,
    /// The endpoints.
    pub endpoints: Slab<Endpoint>,
}

impl State {
    /// Handles the completions of the device for all endpoints.
    /// Returns whether there may be more completions of the device.
    pub fn progress(&mut self) -> bool {
        let mut more = false;
        for endpoint in self.endpoints.values_mut() {
            more |= endpoint.progress(&mut self.shared);
        }
        more
    }
}

/// A domain.
#[derive(Debug)]
pub struct Domain {
    state: Mutex<State>,
    /// The device.
    pub device: &'static Device,
    /// The protection domain.
    pub pd: Arc<Pd>,
    /// The completion channel for events of the device.
    pub channel: Arc<Channel>,
    /// The version of the interface that the program was compiled for.
    pub api: u32,
}

impl Domain {
    /// Returns a new domain of the device.
    pub fn new(device: &'static Device, api: u32) -> Result<Arc<Self>, i32> {
        let pd = Pd::new(device)?;
        let channel = Channel::new(device)?;
        let state = State {
            shared: Shared::new(Arc::clone(&pd)),
            endpoints: Slab::default(),
        };
        Ok(Arc::new(Self {
            state: Mutex::new(state),
            device,
            pd,
            channel,
            api,
        }))
    }

    /// Locks the domain.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
