//! The guest: QEMU, a network link to it, and the agent in it.

use super::shown;
use crate::process::Process;
use crate::programs::CHECK_EVERY;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use xtask::expect::Exit;
use xtask::{Result, sh};

/// The address of the host's end of the link.
pub(super) const HOST: &str = "10.88.0.1";
/// The address of the guest's end.
pub(super) const GUEST: &str = "10.88.0.2";
const AGENT: ([u8; 4], u16) = ([10, 88, 0, 2], 1);

/// The time limit for booting, which takes some 6 s without KVM on an idle machine.
const BOOT: Duration = Duration::from_secs(120);

/// The time limit for commands of the test suite in the guest.
const ASK: Duration = Duration::from_secs(20);

/// The time for which a program that should not exit is watched.
const STAY: Duration = Duration::from_millis(500);

/// The parameters of siw and their default values.
const PARAMETERS: [(&str, &str); 5] = [
    ("mpa_crc_required", "N"),
    ("mpa_crc_strict", "N"),
    ("peer_to_peer", "N"),
    ("mpa_version", "2"),
    ("zcopy_tx", "Y"),
];

/// The number of lines of a program's output that are shown when its case fails.
const TAIL: usize = 14;

/// A running guest.
pub(super) struct Guest {
    qemu: Process,
    console: PathBuf,
    /// The current parameters of siw. The driver is the unmodified siw before the first change, and siw_tun from then on.
    set: std::cell::RefCell<Vec<(String, String)>>,
}

impl Guest {
    /// Boots the guest with the files in `work/root` added.
    pub(super) fn boot(work: &Path) -> Result<Self> {
        let start = Instant::now();
        let cache = sh::output(&mut Command::new(
            sh::root().join("tests/interop/make-guest"),
        ))?;
        let cache = Path::new(cache.trim());
        let initramfs = with_our_files(cache, work)?;
        let console = work.join("console");
        // KVM is used only if the processor has extensions for virtualization. Without them, KVM itself is emulated in software, which is
        // slower than the emulation by QEMU.
        let kvm = File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_ok()
            && fs::read_to_string("/proc/cpuinfo")?
                .split_whitespace()
                .any(|flag| flag == "vmx" || flag == "svm");
        let (accel, cpu) = if kvm {
            ("kvm", "host")
        } else {
            ("tcg,thread=multi", "Nehalem,+rdrand")
        };
        // Offloads are off, so that packets on the link are segments as a network card would send them.
        let card = "virtio-net-pci,netdev=wire,romfile=,csum=off,gso=off,host_tso4=off,host_tso6=off,\
                    host_ecn=off,host_ufo=off,guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,\
                    guest_ufo=off";
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args([
            "-M", "q35", "-accel", accel, "-cpu", cpu, "-smp", "2", "-m", "512",
        ])
        .args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
        ])
        .arg("-kernel")
        .arg(cache.join("kernel"))
        .arg("-initrd")
        .arg(initramfs)
        .args([
            "-append",
            "console=ttyS0 quiet panic=-1 nokaslr nopti mitigations=off random.trust_cpu=1",
        ])
        .arg("-serial")
        .arg(format!("file:{}", shown(&console)))
        .args([
            "-netdev",
            "tap,id=wire,ifname=guest,script=no,downscript=no",
        ])
        .args(["-device", card])
        .stdin(Stdio::null());
        let qemu = Process::start(&mut qemu)
            .map_err(|e| format!("{e} (scripts/test interop installs it)"))?;
        let mut guest = Self {
            qemu,
            console,
            set: std::cell::RefCell::default(),
        };
        while TcpStream::connect_timeout(&AGENT.into(), Duration::from_secs(1)).is_err() {
            if let Some(status) = guest.qemu.poll()? {
                return Err(format!("QEMU ends with {status}\n{}", guest.console_text()).into());
            }
            if start.elapsed() > BOOT {
                return Err(format!("the guest does not boot\n{}", guest.console_text()).into());
            }
            sleep(Duration::from_millis(50));
        }
        println!(
            "guest: {}, up after {:.1} s ({accel})",
            fs::read_to_string(cache.join("about"))?.trim(),
            start.elapsed().as_secs_f64()
        );
        guest.ask("rdma link show siw0/1 | grep -q 'state ACTIVE' && /bin/tc filter show dev eth0 | grep -q 65702046")?;
        Ok(guest)
    }

    /// Stops the guest and boots another one.
    pub(super) fn reboot(&mut self, work: &Path) -> Result {
        self.qemu.kill();
        *self = Self::boot(work)?;
        Ok(())
    }

    /// Returns the reason why the guest must be replaced, or `None` if it need not be. After a case that `passed`, the agent is not
    /// queried.
    pub(super) fn failure(&mut self, passed: bool) -> Option<String> {
        if let Ok(Some(status)) = self.qemu.poll() {
            return Some(format!("QEMU ends with {status}"));
        }
        let text = fs::read(&self.console).unwrap_or_default();
        if complains(&String::from_utf8_lossy(&text)) {
            return Some("the guest's kernel reported an error".into());
        }
        if !passed && let Err(why) = self.ask("true") {
            return Some(format!("the guest does not answer: {why}"));
        }
        None
    }

    /// Returns the last lines of the console.
    pub(super) fn console_text(&self) -> String {
        let text = fs::read(&self.console).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines
            .get(lines.len().saturating_sub(80)..)
            .unwrap_or_default()
            .join("\n")
    }

    /// Starts a program in the guest.
    pub(super) fn start(&self, line: &str) -> Result<Remote> {
        let mut stream = TcpStream::connect_timeout(&AGENT.into(), ASK)
            .map_err(|e| format!("the guest's agent: {e}\n{}", self.console_text()))?;
        stream.write_all(format!("{line}\n").as_bytes())?;
        stream.set_read_timeout(Some(CHECK_EVERY))?;
        Ok(Remote {
            line: line.to_owned(),
            stream,
            received: Vec::new(),
            over: false,
        })
    }

    /// Runs a command of the test suite, which must succeed.
    pub(super) fn ask(&self, line: &str) -> Result {
        let mut remote = self.start(line)?;
        remote
            .finish("guest", Some(Exit::Code(0)), Instant::now() + ASK)
            .map_err(|e| format!("{line}: {e}\n{}\n{}", remote.tail(), self.console_text()).into())
    }

    /// Sets siw's parameters, and all others to their default values. The first case with parameters replaces the unmodified driver by
    /// siw_tun, which stays until the guest is replaced.
    pub(super) fn set_up(&self, parameters: &[(String, String)]) -> Result {
        if *self.set.borrow() == parameters {
            return Ok(());
        }
        let mut lines = String::from("siw-is siw_tun && cd /sys/module/siw_tun/parameters");
        for (name, _) in parameters {
            if !PARAMETERS.iter().any(|(known, _)| known == name) {
                return Err(format!("{name}: siw has no such parameter").into());
            }
        }
        for (name, usual) in PARAMETERS {
            let given = parameters.iter().find(|(n, _)| n == name);
            let value = given.map_or(usual, |(_, value)| value);
            lines.push_str(&format!(" && echo {value} >{name}"));
        }
        self.ask(&lines)?;
        *self.set.borrow_mut() = parameters.to_vec();
        Ok(())
    }

    /// Waits until a server in the guest listens on a TCP port.
    pub(super) fn await_listener(&self, port: u16, server: &mut Remote, latest: Instant) -> Result {
        let mut look = self.start(&format!(
            "until grep -q ':{port:04X} [0-9A-F]*:0000 0A' /proc/net/tcp /proc/net/tcp6; do usleep 20000; done"
        ))?;
        while look.poll()?.is_none() {
            if server.poll()?.is_some() {
                look.end()?;
                return Err("the server exited before it listened".into());
            }
            if Instant::now() > latest {
                look.end()?;
                return Err(format!("the server does not listen on port {port}").into());
            }
        }
        Ok(())
    }
}

/// Returns whether a kernel's console reports an error.
fn complains(console: &str) -> bool {
    ["Call Trace:", "Kernel panic", "blocked for more than"]
        .iter()
        .any(|complaint| console.contains(complaint))
}

/// Returns the guest's file system with the files of the test suite appended.
fn with_our_files(cache: &Path, work: &Path) -> Result<PathBuf> {
    let root = work.join("root");
    fs::copy(sh::root().join("tests/interop/init"), root.join("init"))?;
    let all = work.join("initramfs");
    fs::copy(cache.join("initramfs"), &all)?;
    let mut pack = Command::new("sh");
    pack.args([
        "-c",
        "chmod 755 init && find . | cpio -o -H newc --quiet -R 0:0",
    ])
    .current_dir(&root)
    .stdout(File::options().append(true).open(&all)?);
    sh::run(&mut pack)?;
    Ok(all)
}

/// Creates the host's end of the link, which remains when the guest stops.
pub(super) fn wire() -> Result {
    const SCRIPT: &str = "set -e
ip link set lo up
ip tuntap add dev guest mode tap
echo 1 >/proc/sys/net/ipv6/conf/guest/disable_ipv6
ip addr add 10.88.0.1/24 dev guest
ip link set guest up
";
    sh::run(Command::new("sh").args(["-c", SCRIPT]))
        .map_err(|e| format!("{e}\ndoes /dev/net/tun exist, and may this user open it?").into())
}

/// A program in the guest.
pub(super) struct Remote {
    line: String,
    stream: TcpStream,
    received: Vec<u8>,
    over: bool,
}

impl Remote {
    /// Returns the exit status if the program has exited. Waits briefly.
    fn poll(&mut self) -> Result<Option<i32>> {
        let mut buffer = [0; 4096];
        while !self.over {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.over = true,
                Ok(n) => self
                    .received
                    .extend_from_slice(buffer.get(..n).unwrap_or_default()),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
                Err(e) if e.kind() == ErrorKind::ConnectionReset => self.over = true,
                Err(e) => return Err(format!("the guest's agent: {e}").into()),
            }
            if self.status().is_some() {
                break;
            }
        }
        match self.status() {
            None if self.over => Err("the guest's agent exited without a status".into()),
            status => Ok(status),
        }
    }

    /// Returns the status, which the agent writes last.
    fn status(&self) -> Option<i32> {
        let text = String::from_utf8_lossy(&self.received);
        let (_, last) = text.strip_suffix('\n')?.rsplit_once("\nstatus ")?;
        last.parse().ok()
    }

    /// Waits for the expected exit.
    pub(super) fn finish(&mut self, side: &str, expected: Option<Exit>, end: Instant) -> Result {
        let end = if expected.is_none() {
            Instant::now() + STAY
        } else {
            end
        };
        loop {
            match (self.poll()?, expected) {
                (Some(_), Some(Exit::Any)) => return Ok(()),
                (Some(status), Some(Exit::Code(code))) if status == code => return Ok(()),
                (Some(status), Some(Exit::Code(code))) => {
                    return Err(format!("the {side} ends with {status}, expected {code}").into());
                }
                (Some(status), None) => {
                    return Err(
                        format!("the {side} should not exit, but exited with {status}").into(),
                    );
                }
                (None, None) if Instant::now() > end => return Ok(()),
                (None, _) if Instant::now() > end => {
                    return Err(format!("the {side} did not exit in time").into());
                }
                (None, _) => {}
            }
        }
    }

    /// Kills the program if it is running.
    pub(super) fn end(&mut self) -> Result {
        let _over_already = self.stream.shutdown(Shutdown::Write);
        let latest = Instant::now() + Duration::from_secs(5);
        while !self.over && self.status().is_none() {
            if self.poll().is_err() {
                break;
            }
            if Instant::now() > latest {
                return Err(format!("{}: cannot be killed in the guest", self.line).into());
            }
        }
        Ok(())
    }

    /// Returns the output.
    pub(super) fn output(&self) -> String {
        let text = String::from_utf8_lossy(&self.received);
        match text.rsplit_once("\nstatus ") {
            Some((printed, _)) => printed.to_owned(),
            None => text.into_owned(),
        }
    }

    pub(super) fn tail(&self) -> String {
        let output = self.output();
        let lines: Vec<&str> = output.lines().collect();
        let status = self
            .status()
            .map_or_else(|| "ended by us".to_owned(), |s| format!("status {s}"));
        let mut text = format!("guest: {} ({status})", self.line);
        for line in lines.iter().skip(lines.len().saturating_sub(TAIL)) {
            text.push_str("\n  out| ");
            text.push_str(line);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_errors_are_distinguished_from_normal_lines() {
        for trouble in [
            "[    9.1] Call Trace:\n",
            "[    9.2] Kernel panic - not syncing: sysrq",
            "INFO: task rping:88 blocked for more than 120 seconds.",
        ] {
            assert!(complains(trouble), "{trouble}");
        }
        assert!(!complains(
            "the guest is up\nsiw: loading out-of-tree module taints kernel.\n"
        ));
    }
}
