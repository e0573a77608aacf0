//! Checks packets on the link with tshark, an independent decoder of MPA, DDP and RDMAP.

use super::{guest, shown};
use crate::process::Process;
use crate::programs::CHECK_EVERY;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use xtask::Result;
use xtask::expect::Interop;

/// A filter for packets that tshark cannot decode.
const UNDECODED: &str = "_ws.malformed || _ws.unreassembled || _ws.expert.severity == \"Error\" || iwarp_mpa.bad_length";

/// The longest time until tcpdump runs, has captured the last packet, or has exited.
const LIMIT: Duration = Duration::from_secs(10);

/// The size of the capture buffer. It holds all packets of a long case, even if tcpdump gets no processor time.
const BUFFER_KIB: &str = "65536";

/// The payload of the packet that ends a capture.
const LAST: &[u8] = b"this is the last packet of the capture";
/// The destination of that packet: a port without a listener.
const AFTER: (&str, u16) = (guest::GUEST, 9);

/// The least length of a large ULPDU. A TCP segment cannot contain two of them.
const LARGE: usize = 1000;

/// The least number of large FPDUs in a capture if the percentage of aligned ones is checked. A case with fewer fails.
const BULK: usize = 100;

/// A running tcpdump on the link to the guest.
pub(super) struct Capture {
    tcpdump: Process,
    file: PathBuf,
}

impl Capture {
    /// Starts to capture packets to and from a port into `file`.
    pub(super) fn start(file: &Path, port: u16) -> Result<Self> {
        let errors = file.with_extension("err");
        let mut tcpdump = Command::new("tcpdump");
        tcpdump
            .args([
                "-i",
                "guest",
                "-s",
                "0",
                "-B",
                BUFFER_KIB,
                "-U",
                "--immediate-mode",
                "-Z",
                "root",
                "-w",
            ])
            .arg(file)
            .arg(format!("tcp port {port} or udp port {}", AFTER.1))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&errors)?);
        let mut tcpdump = Process::start(&mut tcpdump)
            .map_err(|e| format!("{e} (scripts/test interop installs it)"))?;
        let latest = Instant::now() + LIMIT;
        while !fs::read_to_string(&errors)?.contains("listening on") {
            if tcpdump.poll()?.is_some() || Instant::now() > latest {
                return Err(format!("tcpdump: {}", fs::read_to_string(&errors)?).into());
            }
            sleep(CHECK_EVERY);
        }
        Ok(Self {
            tcpdump,
            file: file.to_path_buf(),
        })
    }

    /// Ends the capture and returns the file. A signal would make tcpdump discard the packets that it has not read yet. So this
    /// first sends a last packet, and waits until tcpdump has captured it.
    pub(super) fn finish(mut self) -> Result<PathBuf> {
        UdpSocket::bind((guest::HOST, 0))?.send_to(LAST, AFTER)?;
        let latest = Instant::now() + LIMIT;
        while !fs::read(&self.file)?.ends_with(LAST) {
            if Instant::now() > latest {
                return Err("tcpdump did not capture the last packet".into());
            }
            sleep(CHECK_EVERY);
        }
        self.tcpdump.signal(Signal::TERM);
        self.tcpdump.status(LIMIT)?;
        let printed = fs::read_to_string(self.file.with_extension("err"))?;
        if !printed.contains("\n0 packets dropped by kernel") {
            return Err(format!("tcpdump dropped packets: {printed}").into());
        }
        Ok(self.file)
    }
}

/// Returns the lines that tshark prints for the packets that match `filter`.
fn matching(file: &Path, filter: &str) -> Result<String> {
    // Disables a dissector that takes any Send for RPC and reports errors.
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

/// Checks a capture. Returns `None` if it is as expected.
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
                return Some(format!("no packet matches {filter}"));
            }
            Ok(text) if !wanted && !text.is_empty() => {
                return Some(format!("a packet matches {filter}: {}", first(&text)));
            }
            Ok(_) => {}
        }
    }
    let wanted = interop.aligned?;
    match sent_by_anywarp(file).and_then(|sent| alignment(&sent)) {
        Err(why) => Some(why.to_string()),
        Ok((begin, all)) if all < BULK => Some(format!("{all} large FPDUs, {begin} aligned")),
        Ok((begin, all)) if begin * 100 < all * wanted => Some(format!(
            "only {begin} of {all} large FPDUs begin at the start of a TCP segment, which is less than {wanted} percent"
        )),
        Ok(_) => None,
    }
}

/// Returns the segments that anywarp sent on the connection of a capture, by sequence number.
fn sent_by_anywarp(file: &Path) -> Result<BTreeMap<usize, Vec<u8>>> {
    let filter = format!("ip.src == {} && tcp.len > 0", guest::HOST);
    let output = Command::new("tshark")
        .args(["-r", &shown(file), "-n", "-Y", &filter])
        .args(["-T", "fields", "-e", "tcp.seq", "-e", "tcp.payload"])
        .output()?;
    let mut sent: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    for line in String::from_utf8(output.stdout)?.lines() {
        let (number, payload) = line.split_once('\t').ok_or("tshark: no payload")?;
        let digits: Vec<char> = payload.chars().filter(char::is_ascii_hexdigit).collect();
        let bytes = digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(&pair.iter().collect::<String>(), 16))
            .collect::<std::result::Result<Vec<u8>, _>>()?;
        let segment = sent.entry(number.parse()?).or_default();
        if bytes.len() > segment.len() {
            *segment = bytes;
        }
    }
    Ok(sent)
}

/// Returns how many large FPDUs of a stream begin at the start of a segment, and how many there are. The stream begins with
/// an MPA Request or Reply: 20 bytes, whose last two are the length of the private data.
fn alignment(sent: &BTreeMap<usize, Vec<u8>>) -> Result<(usize, usize)> {
    let (first, _) = sent.first_key_value().ok_or("nothing was sent")?;
    let mut stream: Vec<u8> = Vec::new();
    for (number, bytes) in sent {
        let at = number - first;
        let known = stream.len().checked_sub(at).ok_or("a segment is missing")?;
        stream.extend(bytes.get(known..).unwrap_or_default());
    }
    let length = |at: usize| match stream.get(at..at + 2) {
        Some(&[high, low]) => Some(usize::from(u16::from_be_bytes([high, low]))),
        _ => None,
    };
    let mut at = 20 + length(18).ok_or("no MPA start-up")?;
    let (mut begin, mut all) = (0, 0);
    while let Some(ulpdu) = length(at) {
        if ulpdu >= LARGE {
            all += 1;
            begin += usize::from(sent.contains_key(&(first + at)));
        }
        // An FPDU consists of length, ULPDU, padding and CRC.
        at += (2 + ulpdu).next_multiple_of(4) + 4;
    }
    if at != stream.len() {
        return Err(format!("FPDUs end at {at} of {} bytes", stream.len()).into());
    }
    Ok((begin, all))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an MPA Request with private data, three large FPDUs, and a small one, split into segments at `cuts`.
    fn sent(cuts: &[usize]) -> BTreeMap<usize, Vec<u8>> {
        let mut stream = vec![0; 19];
        stream.extend([4, 1, 2, 3, 4]);
        for ulpdu in [1000_u16, 1001, 1002, 18] {
            stream.extend(ulpdu.to_be_bytes());
            stream.resize(
                (stream.len() + usize::from(ulpdu)).next_multiple_of(4) + 4,
                0,
            );
        }
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let ends = cuts.iter().copied().chain([stream.len()]);
        starts
            .zip(ends)
            .map(|(start, end)| (1 + start, stream[start..end].to_vec()))
            .collect()
    }

    #[test]
    fn fpdus_that_begin_with_a_segment_are_counted() {
        assert_eq!(alignment(&sent(&[24, 1032, 2040])).unwrap(), (3, 3));
        assert_eq!(alignment(&sent(&[24, 1033, 2040])).unwrap(), (2, 3));
        assert_eq!(alignment(&sent(&[20])).unwrap(), (0, 3));
    }

    #[test]
    fn repetitions_count_once_and_gaps_are_reported() {
        let mut all = sent(&[24, 1032, 2040]);
        let again = all[&25][100..].to_vec();
        all.insert(125, again);
        assert_eq!(alignment(&all).unwrap(), (3, 3));
        all.remove(&25);
        let why = alignment(&all).unwrap_err().to_string();
        assert_eq!(why, "a segment is missing");
    }
}
