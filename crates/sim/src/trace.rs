//! The steps of the data path as text.

use std::collections::BTreeMap;
use std::sync::Arc;

use anywarp_core::lock::Mutex;
use anywarp_core::observe::{Observer, Step};
use anywarp_core::verbs::wr::Op;
use anywarp_core::wire::control::Control;
use anywarp_core::wire::ddp::Header;
use anywarp_core::wire::rdmap::Opcode;

/// An observer that records all steps of the queue pairs that report to it.
#[derive(Debug, Default, Clone)]
pub struct Log(Arc<Mutex<Vec<(u32, String)>>>);

impl Log {
    /// Returns an observer that writes into this log.
    pub fn observer(&self) -> Arc<dyn Observer> {
        Arc::new(self.clone())
    }

    /// Takes the recorded steps, with their queue pairs.
    pub fn take(&self) -> Vec<(u32, String)> {
        std::mem::take(&mut self.0.lock())
    }
}

impl Observer for Log {
    fn step(&self, qpn: u32, step: &Step<'_>) {
        self.0.lock().push((qpn, render(step)));
    }
}

/// One step as text: its name and its arguments. ARCHITECTURE.md has a table with the steps of the data path.
pub fn render(step: &Step<'_>) -> String {
    match step {
        Step::Post(r) => {
            let name = match r.op {
                Op::Send { .. } => "Send",
                Op::Write { .. } => "Write",
                Op::AtomicWrite { .. } => "Atomic Write",
                Op::Read { .. } => "Read",
                Op::FetchAdd { .. } => "FetchAdd",
                Op::CompareSwap { .. } => "CmpSwap",
                Op::LocalInvalidate { .. } => "Local Invalidate",
                Op::Bind(_) => "Bind",
            };
            format!(
                "post      {name} of {} bytes, request {}",
                r.payload.len(),
                r.id
            )
        }
        Step::Take(id) => format!("take      request {id}"),
        Step::Build(opcode, len) => format!("build     {opcode}, {len} bytes"),
        Step::Segment(len, last) => {
            format!("segment   {len} bytes{}", if *last { ", last" } else { "" })
        }
        Step::Frame(ulpdu) => format!("frame     ULPDU of {ulpdu} bytes"),
        Step::Deframe(header, len) => match header {
            Header::Tagged(h) => format!("deframe   {}, {len} bytes", h.opcode),
            Header::Untagged(h) if h.opcode == Opcode::Control => match Control::parse(h) {
                Ok(what) => format!("deframe   Control {what:?}"),
                Err(error) => format!("deframe   {error}"),
            },
            Header::Untagged(h) => format!("deframe   {} msn {}, {len} bytes", h.opcode, h.msn),
        },
        Step::Admit(len) => format!("admit     {len} bytes"),
        Step::Place(len) => format!("place     {len} bytes"),
        Step::Deliver(opcode) => format!("deliver   {opcode}"),
        Step::Complete(c) => format!("complete  request {}: {}", c.wr_id, c.status),
        Step::Violation(error) => format!("fault     {error}"),
        Step::Terminated(t) => format!("terminated {}/{}/{:02x}", t.layer, t.etype, t.code),
        Step::Failed(why) => format!("failed    {why}"),
    }
}

/// Returns the log as text, with one step in each line. Queue pair numbers are replaced by `names`.
pub fn lines(log: &[(u32, String)], names: &BTreeMap<u32, &str>) -> String {
    log.iter()
        .map(|(qpn, step)| format!("{:<7} {step}\n", names.get(qpn).copied().unwrap_or("?")))
        .collect()
}
