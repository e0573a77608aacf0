//! Spare receive and transmit buffers.

use crate::locks::{Mutex, Rank};

/// Bytes of a receive buffer: room for several of the largest FPDUs.
pub const RX_BUFFER_LEN: usize = 256 * 1024;
/// Largest number of buffers of each kind that are kept for reuse. A thread uses one of each at a time.
const SPARE_BUFFERS_MAX: usize = 4;

/// Buffers that are not in use.
#[derive(Debug)]
pub(super) struct Buffers {
    rx: Mutex<Vec<Box<[u8]>>>,
    tx: Mutex<Vec<Vec<u8>>>,
}

impl Buffers {
    pub(super) const fn new() -> Self {
        Self {
            rx: Mutex::new(Rank::Buffers, Vec::new()),
            tx: Mutex::new(Rank::Buffers, Vec::new()),
        }
    }

    pub(super) fn take_rx(&self) -> Box<[u8]> {
        let spare = self.rx.lock().pop();
        spare.unwrap_or_else(|| vec![0; RX_BUFFER_LEN].into_boxed_slice())
    }

    pub(super) fn return_rx(&self, buffer: Box<[u8]>) {
        let mut spare = self.rx.lock();
        if spare.len() < SPARE_BUFFERS_MAX {
            spare.push(buffer);
        }
    }

    pub(super) fn take_tx(&self) -> Vec<u8> {
        self.tx.lock().pop().unwrap_or_default()
    }

    pub(super) fn return_tx(&self, buffer: Vec<u8>) {
        let mut spare = self.tx.lock();
        if spare.len() < SPARE_BUFFERS_MAX {
            spare.push(buffer);
        }
    }
}
