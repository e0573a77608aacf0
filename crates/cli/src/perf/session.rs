//! Runs `anywarp ping` and `anywarp blast` for another command: one server, and a sequence of runs with it.

use std::fmt;
use std::net::IpAddr;

use super::args::Perf;
use super::report::Run;
use super::side::{Side, Word, connect};
use super::{Interrupted, Lost, Watch, one_run, plan};
use crate::library::Library;

/// A client's connection to a server. It must not be used again after a failed run.
pub(crate) struct Session {
    watch: Watch,
    side: Side,
    address: IpAddr,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Session {
    /// Connects to the server on `host`.
    pub(crate) fn connect(host: &str, port: u16) -> Result<Self, String> {
        let watch = Watch::new();
        let stream = connect(host, port)?;
        let address = stream.local_addr().map_err(|e| e.to_string())?.ip();
        let side = Side::greet(stream, watch.sender.clone())
            .map_err(|why| format!("{host}, port {port}: {why}"))?;
        Ok(Self {
            watch,
            side,
            address,
        })
    }

    /// Does one run with the first size of `args`, and with `variables` in the environment of the local verbs program.
    pub(crate) fn run(
        &mut self,
        args: &Perf,
        ping: bool,
        variables: &[(String, String)],
        library: &Library,
        interrupted: &Interrupted,
    ) -> Result<Run, String> {
        if let Some(why) = args.contradiction(ping) {
            return Err(why);
        }
        let size = args.size.0.first().copied().unwrap_or(1);
        one_run(
            args,
            &plan(args, ping, size),
            variables,
            self.address,
            library,
            &mut self.watch,
            &mut self.side,
            interrupted,
            |_| {},
        )
        .map_err(|(Lost::Run(why) | Lost::Peer(why))| why)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _gone_already = self.side.send(&Word::End);
    }
}
