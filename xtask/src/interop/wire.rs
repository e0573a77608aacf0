//! What crosses the wire, as tshark sees it: an independent decoder of MPA, DDP and RDMAP.

use super::shown;
use crate::Result;
use crate::expect::Interop;
use crate::programs::LOOK;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// What tshark says of packets that it cannot decode.
const UNDECODED: &str = "_ws.malformed || _ws.unreassembled || _ws.expert.severity == \"Error\" || iwarp_mpa.bad_length";

/// Longest time until tcpdump runs, or has ended.
const LIMIT: Duration = Duration::from_secs(10);

/// tcpdump on the wire to the guest.
pub(super) struct Capture {
    tcpdump: Child,
    file: PathBuf,
}

impl Capture {
    /// Begins to write what goes to and from a port into `file`.
    pub(super) fn start(file: &Path, port: u16) -> Result<Self> {
        let errors = file.with_extension("err");
        let mut tcpdump = Command::new("tcpdump")
            .args([
                "-i",
                "guest",
                "-s",
                "0",
                "-U",
                "--immediate-mode",
                "-Z",
                "root",
                "-w",
            ])
            .arg(file)
            .args(["tcp", "port", &port.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&errors)?)
            .spawn()
            .map_err(|e| format!("tcpdump: {e} (scripts/test interop installs it)"))?;
        let latest = Instant::now() + LIMIT;
        while !fs::read_to_string(&errors)?.contains("listening on") {
            if tcpdump.try_wait()?.is_some() || Instant::now() > latest {
                return Err(format!("tcpdump: {}", fs::read_to_string(&errors)?).into());
            }
            sleep(LOOK);
        }
        Ok(Self {
            tcpdump,
            file: file.to_path_buf(),
        })
    }

    /// Ends it and returns the file.
    pub(super) fn finish(mut self) -> Result<PathBuf> {
        if let Some(pid) = Pid::from_raw(i32::try_from(self.tcpdump.id())?) {
            kill_process(pid, Signal::TERM)?;
        }
        let latest = Instant::now() + LIMIT;
        while self.tcpdump.try_wait()?.is_none() {
            if Instant::now() > latest {
                self.tcpdump.kill()?;
            }
            sleep(LOOK);
        }
        Ok(self.file)
    }
}

/// Lines that tshark prints of the packets that pass `filter`.
fn matching(file: &Path, filter: &str) -> Result<String> {
    // It takes any Send for RPC, and stumbles: without that.
    let output = Command::new("tshark")
        .args(["-r", &shown(file), "-2", "-n", "-Y", filter])
        .args(["--disable-protocol", "rpcordma"])
        .output()
        .map_err(|e| format!("tshark: {e} (scripts/test interop installs it)"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Judges a capture; `None` when it is as expected.
pub(super) fn judge(file: &Path, interop: &Interop) -> Option<String> {
    let look = |filter: &str| matching(file, filter).map_err(|e| e.to_string());
    let first = |text: &str| text.lines().next().unwrap_or_default().trim().to_owned();
    for (filter, wanted) in interop
        .wire
        .iter()
        .map(|filter| (filter.as_str(), true))
        .chain(interop.never_wire.iter().map(|f| (f.as_str(), false)))
        .chain([(UNDECODED, false)])
    {
        match look(filter) {
            Err(why) => return Some(why),
            Ok(text) if wanted && text.is_empty() => {
                return Some(format!("no packet passes {filter}"));
            }
            Ok(text) if !wanted && !text.is_empty() => {
                return Some(format!("a packet passes {filter}: {}", first(&text)));
            }
            Ok(_) => {}
        }
    }
    None
}
