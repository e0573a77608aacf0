//! Generates and checks the test vectors in `docs/datagram-iwarp-vectors.md`: two conversations, each datagram with its
//! text by [`pretty::udp`] and its bytes. Also checks the vectors in `docs/datagram-iwarp.md`.
//!
//! Virtual time and a seed make the bytes deterministic. `cargo lab capture` passes the same bytes to tshark and compares
//! the output of its dissector. If the bytes differ from the document, the wire format or what the device sends has changed. If
//! the change is intended, run with `ANYWARP_BLESS=1` and check the difference.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::cell::RefCell;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Mutex;
use std::time::Duration;

use anywarp_core::datagram::Kind;
use anywarp_core::datagram::options::{Options, Segment};
use anywarp_core::llp::mpa::crc::Crc32c;
use anywarp_core::verbs::wc::Status;
use anywarp_core::wire::pretty;
use anywarp_sim::ether::{Ether, Id, Link};
use anywarp_sim::{
    Request, Rng, access, compare_swap, fetch_add, read, send, send_imm, write, write_imm,
};

const MS: Duration = Duration::from_millis(1);

/// A datagram: whether it goes from the first end to the second, and its bytes.
type Sent = (bool, Vec<u8>);

/// Two ends, and all datagrams that they send.
struct Conversation {
    net: Ether,
    a: Id,
    b: Id,
    sent: Rc<RefCell<Vec<Sent>>>,
    lose: Rc<RefCell<Vec<usize>>>,
}

impl Conversation {
    fn new(kind: Kind, options: Options) -> Self {
        let mut net = Ether::new(7, Link::default());
        let a = net.join(kind, options);
        let b = net.join(kind, options);
        for end in [a, b] {
            // Datagrams are short, so that a message has several and the text stays readable.
            net[end].qp.set_paths(|_| 0);
        }
        let sent = Rc::new(RefCell::new(Vec::new()));
        let lose = Rc::new(RefCell::new(Vec::new()));
        let (log, lost, to_b) = (Rc::clone(&sent), Rc::clone(&lose), net[b].addr);
        net.filter = Some(Box::new(move |datagram| {
            let mut log = log.borrow_mut();
            log.push((datagram.to == to_b, datagram.bytes.to_vec()));
            !lost.borrow().contains(&log.len())
        }));
        Self {
            net,
            a,
            b,
            sent,
            lose,
        }
    }

    /// Loses the `nth` datagram that is sent from now on, counted from 1.
    fn lose(&self, nth: usize) {
        self.lose.borrow_mut().push(self.sent.borrow().len() + nth);
    }

    /// Runs until the network is idle, or for 400 ms. Checks that `a` has completed the request `id` and no other.
    fn end(&mut self, id: u64, status: Status) {
        self.net.run(400 * MS);
        let ends = self.net[self.a].completed();
        let ends: Vec<_> = ends.iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(ends, [(id, status)]);
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (to_b, bytes) in self.sent.borrow().iter() {
            let (from, to) = if *to_b { ("a", "b") } else { ("b", "a") };
            writeln!(text, "{from} {to} {}", pretty::udp(bytes)).unwrap();
            for line in bytes.chunks(64) {
                text.push_str("   ");
                line.iter().for_each(|b| write!(text, "{b:02x}").unwrap());
                text.push('\n');
            }
        }
        text
    }

    /// Compares the conversation with the block `name` of the document.
    fn compare(&self, name: &str) {
        let text = self.text();
        let begin = format!("<!-- {name} -->\n```text\n");
        // The other test may write its block at the same time.
        static DOCUMENT: Mutex<()> = Mutex::new(());
        let _alone = DOCUMENT.lock();
        let file = document("datagram-iwarp-vectors.md");
        let page = std::fs::read_to_string(&file).unwrap();
        let (before, rest) = page.split_once(&begin).unwrap();
        let (kept, after) = rest.split_once("```").unwrap();
        if std::env::var_os("ANYWARP_BLESS").is_some() {
            std::fs::write(&file, format!("{before}{begin}{text}```{after}")).unwrap();
            return;
        }
        for (n, (new, old)) in text.lines().zip(kept.lines()).enumerate() {
            assert_eq!(new, old, "{name}, line {}", n + 1);
        }
        assert_eq!(text.lines().count(), kept.lines().count(), "{name}");
        // The decoder knows all messages and fields.
        assert!(!text.contains("malformed") && !text.contains("unknown"));
    }
}

fn document(name: &str) -> PathBuf {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR"));
    crates.join("../../docs").join(name)
}

/// `docs/datagram-iwarp.md` contains vectors in backticks, with spaces between the fields.
#[test]
fn the_vectors_in_the_text_are_whole_datagrams() {
    let page = std::fs::read_to_string(document("datagram-iwarp.md")).unwrap();
    let is_hex =
        |span: &&str| span.len() > 30 && span.chars().all(|c| c.is_ascii_hexdigit() || c == ' ');
    let mut count = 0;
    for span in page.split('`').filter(is_hex) {
        let digits: String = span.split(' ').collect();
        let bytes: Vec<u8> = (0..digits.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
            .collect();
        let (body, crc) = bytes.split_last_chunk::<4>().unwrap();
        assert_eq!(Crc32c::of(body), *crc, "{span}");
        let text = pretty::udp(&bytes).to_string();
        assert!(
            !text.contains("malformed") && !text.contains("unknown"),
            "{span}: {text}"
        );
        count += 1;
    }
    assert_eq!(count, 6);
}

fn options() -> Options {
    Options {
        one_sided: true,
        segment: Segment::PathMtu,
        max_send: 1 << 16,
        report_errors: true,
        keep_going: true,
        ..Options::default()
    }
}

#[test]
fn unreliable_datagrams() {
    let options = Options {
        parity: 2,
        repeats: 1,
        ..options()
    };
    let mut ends = Conversation::new(Kind::Ud, options);
    let (a, b) = (ends.a, ends.b);
    const LEN: usize = 1300;
    const MESSAGE: usize = 300;
    let mine = ends.net[a].host.register(LEN, access::ALL);
    let theirs = ends.net[b].host.register(LEN, access::ALL);
    let closed = ends.net[b].host.register(LEN, access::LOCAL);
    ends.net[a].host.fill(&mine, &Rng::new(1).bytes(LEN));
    ends.net[b].recv(1, &[theirs.all()]);
    let part = mine.part(0, 20);
    ends.net.post(a, b, send_imm(1, *b"imm.").from(&[part]));
    ends.end(1, Status::Success);
    ends.net
        .post(a, b, write(2, theirs.remote(0)).from(&[part]));
    ends.end(2, Status::Success);
    // A message of many datagrams, one of which is lost and restored from the others.
    ends.lose(2);
    let request = write_imm(3, theirs.remote(0), [1, 2, 3, 4]);
    ends.net.post(a, b, request.from(&[mine.part(0, MESSAGE)]));
    ends.end(3, Status::Success);
    assert_eq!(ends.net[b].qp.counters().rx_repaired, 1);
    assert_eq!(ends.net[b].qp.records().len(), 2);
    // A responder sends no more bytes than it has received from the requester's address. A longer response needs a cookie.
    ends.net
        .post(a, b, read(4, theirs.remote(0)).from(&[mine.all()]));
    ends.end(4, Status::Success);
    ends.net
        .post(a, b, write(5, closed.remote(0)).from(&[part]));
    ends.end(5, Status::Success);
    assert!(ends.net[a].qp.poll_error().is_some());
    ends.compare("ud");
}

#[test]
fn reliable_datagrams() {
    let mut ends = Conversation::new(Kind::Rd, options());
    let (a, b) = (ends.a, ends.b);
    const LEN: usize = 1300;
    const MESSAGE: usize = 300;
    let mine = ends.net[a].host.register(LEN, access::ALL);
    let theirs = ends.net[b].host.register(LEN, access::ALL);
    let closed = ends.net[b].host.register(LEN, access::LOCAL);
    ends.net[a].host.fill(&mine, &Rng::new(1).bytes(LEN));
    // The first contact, and a Send that waits for a receive.
    let part = mine.part(0, 20);
    ends.net.post(a, b, send_imm(1, *b"imm.").from(&[part]));
    ends.net.run(100 * MS);
    ends.net[b].recv(1, &[theirs.all()]);
    ends.end(1, Status::Success);
    // A message of many datagrams, one of which is lost.
    ends.lose(2);
    let request = write_imm(2, theirs.remote(0), [1, 2, 3, 4]);
    ends.net.post(a, b, request.from(&[mine.part(0, MESSAGE)]));
    ends.end(2, Status::Success);
    ends.net
        .post(a, b, read(3, theirs.remote(0)).from(&[mine.part(0, 200)]));
    ends.end(3, Status::Success);
    let word = mine.part(0, 8);
    ends.net
        .post(a, b, fetch_add(4, theirs.remote(8), 5).from(&[word]));
    ends.end(4, Status::Success);
    ends.net
        .post(a, b, compare_swap(5, theirs.remote(8), 0, 1).from(&[word]));
    ends.end(5, Status::Success);
    ends.net
        .post(a, b, write(6, closed.remote(0)).from(&[part]));
    ends.end(6, Status::RemoteAccess);
    ends.net[b].recv(2, &[theirs.all()]);
    ends.net.post(a, b, send(7).from(&[part]));
    ends.end(7, Status::Success);
    ends.compare("rd");
}
