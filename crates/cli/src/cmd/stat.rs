//! `anywarp stat`: the counters of a running program's queue pairs.
//!
//! The device in that program sends the descriptor of a memfd. The memfd contains a line of text for each queue pair, and one for
//! the device's own thread: the type, the number, then `NAME=VALUE` fields.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{IoSliceMut, Read, Seek, SeekFrom};
use std::mem::MaybeUninit;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType, recvmsg,
};
use serde_json::{Value, json};

use super::Failure;
use crate::cli::Stat;

/// The longest wait for an answer.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// The most bytes of an answer: some 300 for each of 65,536 queue pairs, with a margin.
const ANSWER_MAX: u64 = 64 << 20;

/// The values of `--interval`.
const INTERVALS: RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_secs(1_000_000);

/// The first word of an answer, with the version of its format.
const HEAD: &str = "anywarp-stat 1";

/// The type in the line of the device's own thread.
const WORKER: &str = "worker";

/// The line of a queue pair, or of the device's own thread.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    kind: String,
    number: String,
    words: BTreeMap<String, String>,
    numbers: BTreeMap<String, u64>,
}

pub(crate) fn run(args: &Stat) -> Result<ExitCode, Failure> {
    let interval = match args.interval.map(Duration::try_from_secs_f64) {
        None => None,
        Some(Ok(time)) if INTERVALS.contains(&time) => Some(time),
        Some(_) => {
            return Err(Failure::Stat(
                "--interval must be from 0.01 to 1000000 seconds".to_owned(),
            ));
        }
    };
    let mut before: Option<Vec<Line>> = None;
    // The time of the last answer. A report covers more than the interval if the process did not answer for some time.
    let mut last: Option<Instant> = None;
    for look in 1.. {
        let text = match ask(args.pid) {
            Ok(text) => text,
            Err(Lost::Silent(why)) => {
                let Some(interval) = interval else {
                    return Err(Failure::Stat(why));
                };
                // A stopped process may continue. If it ends, the next query fails in another way.
                eprintln!("anywarp: {why}");
                if args.count.is_some_and(|count| look >= count) {
                    return Ok(ExitCode::FAILURE);
                }
                thread::sleep(interval);
                continue;
            }
            // The program has exited since the last report.
            Err(_) if before.is_some() => return Ok(ExitCode::SUCCESS),
            Err(Lost::Failed(why)) => return Err(Failure::Stat(why)),
        };
        let answered = Instant::now();
        let (head, now) = parse(&text).map_err(Failure::Stat)?;
        if args.json {
            println!("{}", as_json(&head, &now));
        } else {
            let added = before.as_deref().map(|before| since(before, &now));
            print!(
                "{}",
                table(
                    &head,
                    added.as_deref().unwrap_or(&now),
                    last.map(|last| answered - last)
                )
            );
        }
        let Some(interval) = interval else { break };
        if args.count.is_some_and(|count| look >= count) {
            break;
        }
        before = Some(now);
        last = Some(answered);
        thread::sleep(interval);
    }
    Ok(ExitCode::SUCCESS)
}

/// Why there is no answer: the text for the user.
#[derive(Debug)]
enum Lost {
    /// The process does not answer in time.
    Silent(String),
    /// The process has exited, or another failure.
    Failed(String),
}

impl From<String> for Lost {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

/// Connects to the socket of a process. If the process is stopped and its queue of connections is full, this waits for at most
/// [`TIME_LIMIT`].
fn connect(pid: u32) -> rustix::io::Result<OwnedFd> {
    let name = format!("anywarp-stat-{pid}");
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let stream = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    for way in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(&stream, way, Some(TIME_LIMIT))?;
    }
    rustix::net::connect(&stream, &address)?;
    Ok(stream)
}

/// Requests the counters of the device in a process.
fn ask(pid: u32) -> Result<String, Lost> {
    let text = |e: &dyn std::fmt::Display| format!("process {pid}: {e}");
    let silent = || {
        let limit = TIME_LIMIT.as_secs();
        Lost::Silent(format!(
            "process {pid} does not answer within {limit} s; is it stopped?"
        ))
    };
    let stream = connect(pid).map_err(|e| match e {
        Errno::AGAIN => silent(),
        _ => Lost::Failed(format!(
            "process {pid} does not serve its counters: start it with `anywarp run --stat` or ANYWARP_STAT=1 (it must also \
             have a queue pair, and be in the same network namespace)"
        )),
    })?;
    // Any process may have bound this socket name. The kernel reports which process did.
    let peer = rustix::net::sockopt::socket_peercred(&stream).map_err(|e| text(&e))?;
    if u32::try_from(peer.pid.as_raw_pid()) != Ok(pid) {
        let why = format!(
            "process {pid}: another process ({}, of user {}) answers in its place; the answer is ignored",
            peer.pid.as_raw_pid(),
            peer.uid.as_raw()
        );
        return Err(why.into());
    }
    // The kernel recorded process and user when the process called `listen`. The process may have exited
    // since, and its id may have been reused.
    let users = users_of(pid).map_err(|e| text(&e))?;
    let user = peer.uid.as_raw();
    if !may_answer_for(user, &users) {
        let why = format!(
            "process {pid}: the answer comes from an earlier process with this id, of user {user}, and is ignored"
        );
        return Err(why.into());
    }
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    recvmsg(
        &stream,
        &mut [IoSliceMut::new(&mut byte)],
        &mut beside,
        RecvFlags::CMSG_CLOEXEC,
    )
    .map_err(|e| match e {
        Errno::AGAIN => silent(),
        e => Lost::Failed(text(&e)),
    })?;
    let memory = beside
        .drain()
        .find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        })
        .ok_or_else(|| format!("process {pid} answers only queries of its own user"))?;
    // A file of a FUSE file system could block the read forever.
    if rustix::fs::fcntl_get_seals(&memory).is_err() {
        let why = format!("process {pid}: its answer is not a memfd, and is ignored");
        return Err(why.into());
    }
    let answer = contents(File::from(memory)).map_err(|e| text(&e))?;
    let answer = answer
        .ok_or_else(|| format!("process {pid}: its answer is longer than {ANSWER_MAX} bytes"))?;
    Ok(printable(&String::from_utf8_lossy(&answer)))
}

/// Reads an answer. Returns `None` if it is longer than [`ANSWER_MAX`].
fn contents(mut memory: File) -> std::io::Result<Option<Vec<u8>>> {
    memory.seek(SeekFrom::Start(0))?;
    let mut answer = Vec::new();
    memory.take(ANSWER_MAX + 1).read_to_end(&mut answer)?;
    Ok((answer.len() as u64 <= ANSWER_MAX).then_some(answer))
}

/// Returns the real, effective, saved and file-system user of a process.
fn users_of(pid: u32) -> std::io::Result<Vec<u32>> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|l| l.strip_prefix("Uid:"));
    let words = line.unwrap_or_default().split_whitespace();
    Ok(words.filter_map(|word| word.parse().ok()).collect())
}

/// Returns whether a socket that `user` bound may belong to a process of `users`. A process of the superuser may have dropped its
/// privileges after it bound the socket.
fn may_answer_for(user: u32, users: &[u32]) -> bool {
    user == 0 || users.contains(&user)
}

/// Escapes control characters in `text` except newlines, because they could change the terminal's state.
fn printable(text: &str) -> String {
    text.chars()
        .fold(String::with_capacity(text.len()), |mut out, c| {
            if c.is_control() && c != '\n' {
                out.extend(c.escape_default());
            } else {
                out.push(c);
            }
            out
        })
}

fn parse(text: &str) -> Result<(String, Vec<Line>), String> {
    let mut lines = text.lines();
    let head = lines
        .next()
        .and_then(|line| line.strip_prefix(HEAD))
        .ok_or("the process has another version of anywarp")?;
    let pairs = lines
        .filter_map(|line| {
            let mut words = line.split(' ');
            let (kind, number) = (words.next()?.to_owned(), words.next()?.to_owned());
            let mut one = Line {
                kind,
                number,
                words: BTreeMap::new(),
                numbers: BTreeMap::new(),
            };
            for (name, value) in words.filter_map(|word| word.split_once('=')) {
                match value.parse() {
                    Ok(number) => {
                        one.numbers.insert(name.to_owned(), number);
                    }
                    Err(_) => {
                        one.words.insert(name.to_owned(), value.to_owned());
                    }
                }
            }
            Some(one)
        })
        .collect();
    Ok((head.trim().to_owned(), pairs))
}

/// Returns the increase of all counters. A counter that is lower than before was reset, because its queue pair was reconnected, and has
/// increased from zero.
fn since(before: &[Line], now: &[Line]) -> Vec<Line> {
    let old: BTreeMap<&str, &Line> = before.iter().map(|l| (l.number.as_str(), l)).collect();
    now.iter()
        .map(|line| {
            let mut line = line.clone();
            if let Some(old) = old.get(line.number.as_str()) {
                for (name, value) in &mut line.numbers {
                    let was = old.numbers.get(name).copied().unwrap_or_default();
                    *value = value.checked_sub(was).unwrap_or(*value);
                }
            }
            line
        })
        .collect()
}

/// Returns the counter `a` divided by the counter `b`.
fn each(line: &Line, a: &str, b: &str) -> String {
    let get = |name: &str| line.numbers.get(name).copied().unwrap_or_default() as f64;
    if get(b) > 0.0 {
        format!("{:.1}", get(a) / get(b))
    } else {
        "-".to_owned()
    }
}

fn table(head: &str, lines: &[Line], interval: Option<Duration>) -> String {
    let pairs = lines.iter().filter(|line| line.kind != WORKER).count();
    let plural = if pairs == 1 { "" } else { "s" };
    let mut text = format!("{head}, {pairs} queue pair{plural}");
    if let Some(interval) = interval {
        let _ = write!(text, ", in {:.2} s", interval.as_secs_f64());
    }
    text.push('\n');
    let mut headed = false;
    for line in lines.iter().filter(|line| line.kind == "rc") {
        if !headed {
            headed = true;
            let _ = writeln!(
                text,
                "{:<10} {:<6} {:>10} {:>10} {:>10} {:>10} {:>9} {:>6} {:>10} {:>9} {:>6} {:>6} {:>6} peer",
                "rc",
                "state",
                "requests",
                "received",
                "MB sent",
                "sends",
                "B/send",
                "full",
                "recvs",
                "B/recv",
                "empty",
                "again",
                "rnr"
            );
        }
        let get = |name: &str| line.numbers.get(name).copied().unwrap_or_default();
        let word = |name: &str| line.words.get(name).map_or("-", String::as_str);
        let _ = writeln!(
            text,
            "{:<10} {:<6} {:>10} {:>10} {:>10.1} {:>10} {:>9} {:>6} {:>10} {:>9} {:>6} {:>6} {:>6} {} {} {}",
            line.number,
            word("state"),
            get("requests"),
            get("received"),
            get("tx_bytes") as f64 / 1e6,
            get("tx_calls"),
            each(line, "tx_bytes", "tx_calls"),
            get("tx_full"),
            get("rx_calls"),
            each(line, "rx_bytes", "rx_calls"),
            get("rx_empty"),
            get("retransmissions"),
            get("rnr"),
            word("peer"),
            word("congestion"),
            word("carrier"),
        );
    }
    for line in lines.iter().filter(|line| line.kind != "rc") {
        let _ = write!(text, "{} {}", line.kind, line.number);
        for (name, value) in line.numbers.iter().filter(|(_, value)| **value > 0) {
            let _ = write!(text, " {name} {value}");
        }
        text.push('\n');
    }
    text
}

fn as_json(head: &str, lines: &[Line]) -> Value {
    let about: BTreeMap<&str, &str> = head
        .split(' ')
        .filter_map(|word| word.split_once('='))
        .collect();
    let is_worker = |line: &&Line| line.kind == WORKER;
    let worker = lines.iter().find(is_worker).map(|line| &line.numbers);
    let pairs: Vec<Value> = lines
        .iter()
        .filter(|line| !is_worker(line))
        .map(|line| {
            let mut all = json!({ "kind": line.kind, "number": line.number });
            if let Some(members) = all.as_object_mut() {
                members.extend(line.words.iter().map(|(n, v)| (n.clone(), json!(v))));
                members.extend(line.numbers.iter().map(|(n, v)| (n.clone(), json!(v))));
            }
            all
        })
        .collect();
    json!({ "process": about, "worker": worker, "queue_pairs": pairs })
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;

    use super::*;

    /// The text of a query that fails.
    fn refused(pid: u32) -> String {
        match ask(pid) {
            Err(Lost::Failed(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    const TEXT: &str = "anywarp-stat 1 pid=7 program=x\n\
        worker 0 wakes=5\n\
        rc 0x001200 state=Rts requests=10 request_bytes=640 received=0 peer=127.0.0.1:1 tx_calls=2 tx_bytes=900 \
        tx_full=0 rx_calls=4 rx_bytes=100 rx_empty=2 retransmissions=1 congestion=reno carrier=trunk\n\
        ud 0x001300 rx_dgrams=3 rx_dup=0\n";

    #[test]
    fn lines_become_a_table_and_json() {
        let (head, lines) = parse(TEXT).unwrap();
        let text = table(&head, &lines, None);
        assert!(text.contains("0x001200") && text.contains("450.0"));
        assert!(text.contains("127.0.0.1:1 reno trunk\n"), "{text}");
        assert!(text.contains("ud 0x001300 rx_dgrams 3\n"), "{text}");
        let value = as_json(&head, &lines);
        assert_eq!(value["process"]["pid"], "7");
        assert_eq!(value["queue_pairs"][0]["tx_calls"], 2);
        assert_eq!(value["worker"]["wakes"], 5);
        assert!(text.contains("2 queue pairs") && text.contains("worker 0 wakes 5\n"));
        assert!(parse("anywarp-stat 2 pid=7\n").is_err());
    }

    #[test]
    fn increments_are_reported() {
        let (_, before) = parse(TEXT).unwrap();
        let (_, now) = parse(&TEXT.replace("requests=10", "requests=25")).unwrap();
        let added = since(&before, &now);
        assert_eq!(added[1].numbers["requests"], 15);
        assert_eq!(added[1].numbers["tx_calls"], 0);
    }

    #[test]
    fn control_characters_are_shown_as_escapes() {
        assert_eq!(printable("a\x1b[2J\n\u{9b}b"), "a\\u{1b}[2J\n\\u{9b}b");
    }

    #[test]
    fn an_answer_from_another_process_is_refused() {
        // The parent of this test is a process that runs and serves no counters.
        let other = std::os::unix::process::parent_id();
        let name = SocketAddr::from_abstract_name(format!("anywarp-stat-{other}")).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind_addr(&name).unwrap();
        let why = refused(other);
        assert!(why.contains(&format!("({},", std::process::id())), "{why}");
    }

    #[test]
    fn the_users_of_a_process_are_read() {
        let me = rustix::process::geteuid().as_raw();
        let users = users_of(std::process::id()).unwrap();
        assert!(users.len() == 4 && users.contains(&me), "{users:?}");
        assert!(users_of(u32::MAX).is_err());
        assert!(may_answer_for(me, &users) && may_answer_for(0, &[1000; 4]));
        assert!(!may_answer_for(1001, &[1000; 4]));
    }

    /// Serves a file instead of counters, as another process could.
    #[test]
    fn an_answer_that_is_a_file_is_not_read() {
        use std::os::unix::net::UnixListener;
        let pid = std::process::id();
        let name = SocketAddr::from_abstract_name(format!("anywarp-stat-{pid}")).unwrap();
        let listener = UnixListener::bind_addr(&name).unwrap();
        let server = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let file = File::open("/proc/self/status").unwrap();
            let files = [std::os::fd::AsFd::as_fd(&file)];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut beside = rustix::net::SendAncillaryBuffer::new(&mut space);
            assert!(beside.push(rustix::net::SendAncillaryMessage::ScmRights(&files)));
            let byte = [std::io::IoSlice::new(b"!")];
            let flags = rustix::net::SendFlags::empty();
            rustix::net::sendmsg(&stream, &byte, &mut beside, flags).unwrap();
        });
        let error = refused(pid);
        server.join().unwrap();
        assert!(error.contains("not a memfd"), "{error}");
    }

    #[test]
    fn an_endless_answer_is_limited() {
        let memory = rustix::fs::memfd_create("answer", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let memory = File::from(memory);
        memory.set_len(ANSWER_MAX).unwrap();
        let read = contents(memory.try_clone().unwrap()).unwrap();
        assert_eq!(read.map(|bytes| bytes.len() as u64), Some(ANSWER_MAX));
        // A sparse file uses no memory here, but reading it would.
        memory.set_len(1 << 40).unwrap();
        assert_eq!(contents(memory).unwrap(), None);
    }

    #[test]
    fn a_process_without_counters_is_explained() {
        // No process has this number.
        let why = refused(1 << 30);
        assert!(why.contains("--stat"), "{why}");
    }
}
