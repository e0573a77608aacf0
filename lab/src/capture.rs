//! `cargo lab capture`: checks captures of real programs with tshark.
//!
//! Each pair of programs runs with `anywarp capture`. tshark must then find the packets that the programs caused, and no
//! malformed, damaged or unknown ones. tshark itself does not know anywarp's control messages: anywarp's dissector
//! (`anywarp.lua`) must decode them. With `ANYWARP_PROFILE=standard` there are no control messages, and
//! tshark must decode all packets without the dissector.
//!
//! tshark does not know anywarp's datagrams either. So the dissector is also compared with anywarp's decoder, datagram by datagram,
//! for the conversations in `docs/datagram-iwarp-vectors.md`, which contain the bytes and their decoded form.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::c_tests;
use crate::process::Process;
use xtask::{Result, sh};

/// Two programs, and display filters of Wireshark with the least number of packets that must match.
struct Case {
    name: &'static str,
    server: &'static str,
    client: &'static str,
    /// Both ends send only messages of standard iWARP, without anywarp's control messages.
    standard: bool,
    finds: &'static [(&'static str, usize)],
}

const CASES: &[Case] = &[
    Case {
        name: "rping",
        server: "rping -s -C 10 -V -S 1000 -a 127.0.0.1 -p 7801",
        client: "rping -c -C 10 -V -S 1000 -a 127.0.0.1 -p 7801",
        standard: false,
        finds: &[
            ("tcp.flags.syn == 1", 2),
            ("iwarp_mpa.req", 1),
            ("iwarp_mpa.rep", 1),
            ("iwarp_rdma.opcode == 0", 10),
            ("iwarp_rdma.opcode == 1", 10),
            ("iwarp_rdma.opcode == 2", 10),
            ("iwarp_rdma.opcode == 3", 20),
            ("anywarp_control.message contains \"Hello\"", 1),
            ("anywarp_control.message contains \"Bye\"", 1),
        ],
    },
    Case {
        name: "atomics",
        server: "ib_atomic_bw -d anywarp0 -n 5 -t 1 -p 7802",
        client: "ib_atomic_bw -d anywarp0 -n 5 -t 1 -p 7802 127.0.0.1",
        standard: false,
        finds: &[
            ("iwarp_rdma.opcode == 10", 5),
            ("iwarp_rdma.opcode == 11", 5),
        ],
    },
    Case {
        name: "large",
        server: "ib_write_bw -d anywarp0 -s 1048576 -n 5 -t 1 -p 7803",
        client: "ib_write_bw -d anywarp0 -s 1048576 -n 5 -t 1 -p 7803 127.0.0.1",
        standard: false,
        finds: &[("iwarp_rdma.opcode == 0 && iwarp_ddp.last_flag == 0", 5)],
    },
    Case {
        name: "ud",
        server: "ibv_ud_pingpong -g 0 -n 10 -s 2000 -p 7804",
        client: "ibv_ud_pingpong -g 0 -n 10 -s 2000 -p 7804 127.0.0.1",
        standard: false,
        finds: &[("anywarp.opcode == 3 && anywarp.length == 2000", 20)],
    },
    Case {
        name: "uc",
        server: "ibv_uc_pingpong -g 0 -n 10 -s 100000 -p 7805",
        client: "ibv_uc_pingpong -g 0 -n 10 -s 100000 -p 7805 127.0.0.1",
        standard: false,
        finds: &[
            (
                "anywarp.opcode == 3 && anywarp.offset > 0 && anywarp.ddp.last == 1",
                20,
            ),
            ("anywarp.report.room", 1),
        ],
    },
    // The following three cases test Write-Records (RDMA Writes that are recorded at the target) over UD, Reads over UD,
    // and Write-Records, Reads and atomics over RD.
    Case {
        name: "records",
        server: "{dv} record_path_mtu reads restricted",
        client: "{dv} record_max",
        standard: false,
        finds: &[
            (
                "anywarp.opcode == 15 && anywarp.ddp.tagged == 1 && anywarp.sub_operation == 1",
                3,
            ),
            (
                "anywarp.opcode == 15 && anywarp.sub_operation == 2 && anywarp.immediate == 0x01020304",
                3,
            ),
            (
                "anywarp.opcode == 15 && anywarp.offset > 0 && anywarp.ddp.last == 1 && anywarp.length == 1048576",
                1,
            ),
        ],
    },
    Case {
        name: "reads",
        server: "{dv} reads",
        client: "{dv} reads",
        standard: false,
        finds: &[
            ("anywarp.opcode == 1", 6),
            ("anywarp.cookie", 1),
            (
                "anywarp.opcode == 2 && anywarp.length == 1048576 && anywarp.ddp.last == 1",
                1,
            ),
        ],
    },
    Case {
        name: "reliable",
        server: "{dv} reads_reliable atomics",
        client: "{dv} record_reliable long_sends_reliable atomics refused_write",
        standard: false,
        finds: &[
            ("anywarp.rd.challenge == 1", 2),
            ("anywarp.rd.ack_counts == 1 && anywarp.rd.ack > 0", 10),
            (
                "anywarp.rd.data == 1 && anywarp.length == 1048576 && anywarp.ddp.last == 1",
                1,
            ),
            ("anywarp.opcode == 10", 10),
            ("anywarp.opcode == 11", 10),
        ],
    },
    Case {
        name: "udaddy",
        server: "udaddy -b 127.0.0.1",
        client: "udaddy -s 127.0.0.1",
        standard: false,
        finds: &[("anywarp.cm.kind == 1", 1), ("anywarp.cm.kind == 2", 1)],
    },
    Case {
        name: "standard",
        server: "rping -s -C 10 -V -S 10000 -a 127.0.0.1 -p 7811",
        client: "rping -c -C 10 -V -S 10000 -a 127.0.0.1 -p 7811",
        standard: true,
        finds: &[
            ("iwarp_mpa.req", 1),
            ("iwarp_mpa.rep", 1),
            ("iwarp_mpa.crc_check", 1),
            ("iwarp_rdma.opcode == 0", 10),
            ("iwarp_rdma.opcode == 1", 10),
            ("iwarp_rdma.opcode == 2", 10),
            ("iwarp_rdma.opcode == 3", 20),
        ],
    },
    Case {
        name: "standard-atomics",
        server: "ib_atomic_bw -R -d anywarp0 -n 5 -t 1 -p 7812",
        client: "ib_atomic_bw -R -d anywarp0 -n 5 -t 1 -p 7812 127.0.0.1",
        standard: true,
        finds: &[
            ("iwarp_rdma.opcode == 10", 5),
            ("iwarp_rdma.opcode == 11", 5),
        ],
    },
    // Sends that invalidate or solicit, Writes with immediate data, and atomics.
    Case {
        name: "standard-rest",
        server: "{peer} server 127.0.0.1 7813 rest=1",
        client: "{peer} client 127.0.0.1 7813 rest=1",
        standard: true,
        finds: &[
            ("iwarp_rdma.opcode == 0 && iwarp_ddp.last_flag == 1", 2),
            ("iwarp_rdma.opcode == 4", 1),
            ("iwarp_rdma.opcode == 5", 1),
            ("iwarp_rdma.opcode == 6", 1),
            ("iwarp_rdma.opcode == 8", 1),
            ("iwarp_rdma.opcode == 9", 1),
            ("iwarp_rdma.opcode == 10", 3),
            ("iwarp_rdma.opcode == 11", 3),
        ],
    },
    Case {
        name: "standard-terminate",
        server: "{peer} server 127.0.0.1 7814 bad=write-bounds",
        client: "{peer} client 127.0.0.1 7814 bad=write-bounds",
        standard: true,
        finds: &[(
            "iwarp_rdma.opcode == 7 && iwarp_rdma.term_layer == 1 && iwarp_rdma.term_etype_ddp == 1 \
             && iwarp_rdma.term_errcode_ddp_tagged == 1 && iwarp_rdma.term_hdrct_m == 1",
            1,
        )],
    },
];

/// A filter that must match no packet. Checksums of IP, TCP and UDP are verified.
const NEVER: &str = "_ws.malformed || _ws.expert.severity >= \"Warning\" || anywarp.crc.bad \
    || (iwarp_rdma.opcode > 11 && !anywarp_control) \
    || (udp && !anywarp)";

/// A filter that must match no packet of standard iWARP, which tshark decodes without the dissector. A packet that contains
/// only a part of an FPDU is allowed, because a socket with little room may accept only a part.
const NEVER_STANDARD: &str = "_ws.malformed || _ws.expert.severity >= \"Warning\" || iwarp_rdma.opcode > 11 \
    || _ws.unreassembled || !tcp || (tcp.len > 0 && !iwarp_mpa && !tcp.segment_data)";

/// Disables a dissector of tshark that takes each Send for RPC, and therefore reports errors.
const WITHOUT: [&str; 2] = ["--disable-protocol", "rpcordma"];

/// Immediate Data, without and with solicited event (RFC 7306 §6): the only opcodes that tshark 4.0 does not know.
const NAMELESS: [&str; 2] = ["OpCode: Unknown (0x8)", "OpCode: Unknown (0x9)"];

/// The time limit of a program.
const TIME_LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn run() -> Result {
    let dist = sh::dist();
    let anywarp = dist.join("bin/anywarp");
    let script = dist.join("share/anywarp/wireshark/anywarp.lua");
    let folder = sh::target().join("capture");
    std::fs::create_dir_all(&folder)?;
    c_tests::build_from(
        &sh::root().join("tests/interop/peer.c"),
        &folder.join("peer"),
    )?;
    c_tests::build_from(&sh::root().join("tests/c/dv.c"), &folder.join("dv"))?;
    let mut tally = sh::Tally::default();
    for name in CONVERSATIONS {
        let done = conversation(name, &script, &folder);
        tally.report(&format!("conversation {name}"), done);
    }
    for case in CASES {
        tally.report(case.name, case.run(&anywarp, &script, &folder));
    }
    tally.end("captures")
}

impl Case {
    fn run(&self, anywarp: &Path, script: &Path, folder: &Path) -> Result {
        let file = |side| folder.join(format!("{}-{side}.pcapng", self.name));
        let (of_server, of_client) = (file("server"), file("client"));
        let mut server = self.start(anywarp, &of_server, self.server)?;
        let done = self.clients(anywarp, &of_client, &mut server);
        if done.is_err() {
            server.kill();
        }
        let ended = wait(&mut server, self.server);
        done.and(ended)?;
        for file in [of_server, of_client] {
            let script = (!self.standard).then_some(script);
            let mut wrong = tshark(
                script,
                &file,
                if self.standard { NEVER_STANDARD } else { NEVER },
            )?;
            if self.standard {
                wrong += &unknown(&file)?;
            }
            if !wrong.is_empty() {
                let first: Vec<_> = wrong.lines().take(10).collect();
                let text = first.join("\n");
                return Err(format!("{}: unexpected:\n{text}", file.display()).into());
            }
            for (filter, least) in self.finds {
                let found = tshark(script, &file, filter)?.lines().count();
                if found < *least {
                    let what = format!("{found} of at least {least} packets: {filter}");
                    return Err(format!("{}: {what}", file.display()).into());
                }
            }
        }
        Ok(())
    }

    fn start(&self, anywarp: &Path, file: &Path, line: &str) -> Result<Process> {
        let log = std::fs::File::create(file.with_extension("log"))?;
        let (peer, dv) = (file.with_file_name("peer"), file.with_file_name("dv"));
        let profile = if self.standard { "standard" } else { "auto" };
        let mut command = Command::new(anywarp);
        command
            .args(["capture", "--write"])
            .arg(file)
            .arg("--")
            .args(
                line.replace("{peer}", &peer.display().to_string())
                    .replace("{dv}", &dv.display().to_string())
                    .split(' '),
            )
            .env("ANYWARP_ADDR", "127.0.0.1")
            .env("ANYWARP_PROFILE", profile)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        Process::start(&mut command)
    }

    /// Runs the client. Repeats it while the server does not listen yet.
    fn clients(&self, anywarp: &Path, file: &Path, server: &mut Process) -> Result {
        let begin = Instant::now();
        loop {
            let mut client = self.start(anywarp, file, self.client)?;
            let done = wait(&mut client, self.client);
            if done.is_ok() || begin.elapsed() > TIME_LIMIT || server.poll()?.is_some() {
                return done;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

// ---------------------------------------------------------------- stored conversations

/// The blocks of `docs/datagram-iwarp-vectors.md`.
const CONVERSATIONS: [&str; 2] = ["ud", "rd"];

/// The fields that the dissector prints for each datagram.
const FIELDS: [&str; 22] = [
    "anywarp.kind",
    "anywarp.id",
    "anywarp.offset",
    "anywarp.length",
    "anywarp.opcode",
    "anywarp.src_index",
    "anywarp.dst_index",
    "anywarp.immediate",
    "anywarp.flags.commit",
    "anywarp.flags.parity",
    "anywarp.ddp.tagged",
    "anywarp.ddp.stag",
    "anywarp.ddp.to",
    "anywarp.ddp.msn",
    "anywarp.ddp.mo",
    "anywarp.rd.seq",
    "anywarp.rd.base",
    "anywarp.rd.token",
    "anywarp.rd.echo",
    "anywarp.rd.ack_counts",
    "anywarp.rd.ack",
    "anywarp.rd.run.start",
];

/// A datagram of a conversation.
struct Listed {
    from_a: bool,
    /// The output of anywarp's decoder.
    line: String,
    bytes: Vec<u8>,
}

/// Checks that the dissector and anywarp's decoder agree on each datagram of a conversation.
fn conversation(name: &str, script: &Path, folder: &Path) -> Result {
    let page = std::fs::read_to_string(sh::root().join("docs/datagram-iwarp-vectors.md"))?;
    let block = page.split_once(&format!("<!-- {name} -->\n```text\n"));
    let (block, _) = block
        .and_then(|(_, rest)| rest.split_once("```"))
        .ok_or("the page has no such block")?;
    let mut all: Vec<Listed> = Vec::new();
    for line in block.lines() {
        if let Some(hex) = line.strip_prefix("   ") {
            let decoded = all
                .last_mut()
                .ok_or("bytes without a line that describes them")?;
            for at in (0..hex.len()).step_by(2) {
                let byte = hex
                    .get(at..at + 2)
                    .ok_or("an odd number of hexadecimal digits")?;
                decoded.bytes.push(u8::from_str_radix(byte, 16)?);
            }
        } else {
            all.push(Listed {
                from_a: line.starts_with("a b "),
                line: line.get(4..).unwrap_or_default().to_owned(),
                bytes: Vec::new(),
            });
        }
    }
    let file = folder.join(format!("conversation-{name}.pcap"));
    std::fs::write(&file, pcap(&all))?;
    let wrong = tshark(Some(script), &file, NEVER)?;
    if !wrong.is_empty() {
        return Err(format!("{}: unexpected:\n{wrong}", file.display()).into());
    }
    let mut command = Command::new("tshark");
    command.arg("-X");
    command.arg(format!("lua_script:{}", script.display()));
    command.arg("-r").arg(&file).args(["-T", "fields"]);
    command.args(["-E", "separator=;", "-E", "aggregator=,"]);
    for field in FIELDS {
        command.args(["-e", field]);
    }
    let listing = output(&mut command)?;
    if listing.lines().count() != all.len() {
        return Err(format!(
            "the dissector lists {} of {} datagrams",
            listing.lines().count(),
            all.len()
        )
        .into());
    }
    for (n, (decoded, listing)) in all.iter().zip(listing.lines()).enumerate() {
        let values: Vec<&str> = listing.split(';').collect();
        let get = |name: &str| {
            let at = FIELDS.iter().position(|f| f.ends_with(name));
            at.and_then(|at| values.get(at)).copied().unwrap_or("")
        };
        for words in expected(&get) {
            if !format!("{} ", decoded.line).contains(&words) {
                let ours = &decoded.line;
                return Err(format!("datagram {}: {words:?} is not in: {ours}", n + 1).into());
            }
        }
        let acks = decoded.line.contains(" ack ");
        if acks != (get(".ack_counts") == "1" || get(".ack_counts") == "True") {
            return Err(format!(
                "datagram {}: dissector and decoder disagree about an acknowledgement: {}",
                n + 1,
                decoded.line
            )
            .into());
        }
    }
    Ok(())
}

/// Returns the words that anywarp's decoder must print for a datagram with these fields of the dissector.
fn expected<'a>(get: &impl Fn(&str) -> &'a str) -> Vec<String> {
    let mut all = Vec::new();
    let first = |name| get(name).split(',').next().unwrap_or("");
    let set = |name| matches!(first(name), "1" | "True");
    all.push(format!(
        " index {}->{} ",
        first(".src_index"),
        first(".dst_index")
    ));
    if get(".kind").contains("packet") {
        all.push(format!(" {} base {} ", get("rd.seq"), get("rd.base")));
        all.push(format!(" token {} echo {} ", get(".token"), get(".echo")));
        let runs = get(".run.start")
            .split(',')
            .filter(|start| !start.is_empty());
        all.extend(runs.map(|start| format!("{start}-")));
        if set(".ack_counts") {
            all.push(format!(" ack {} ", get("rd.ack")));
        }
    }
    if !get(".kind").contains("segment") {
        return all;
    }
    // In a packet, the decoder prints these fields in brackets, after the fields of the packet.
    let (id, offset, length) = (get("anywarp.id"), get(".offset"), get("anywarp.length"));
    all.push(format!(" id {id} offset {offset} of {length} index "));
    let tagged = set(".tagged");
    let name = match get(".opcode") {
        "0x01" => "Read Request ",
        "0x02" => "Read Response ",
        "0x03" => "Send ",
        "0x07" => "error report: Terminate ",
        "0x0a" => " target ",
        "0x0b" => "Atomic Response ",
        "0x0f" if tagged => "Write-Record ",
        "0x0f" => "Control ",
        _ => "an opcode that occurs in no conversation",
    };
    all.push(name.to_owned());
    if tagged {
        let to = u64::from_str_radix(get("ddp.to").trim_start_matches("0x"), 16).unwrap_or(0);
        all.push(format!("stag {} to 0x{to:x} ", get(".stag")));
    } else if matches!(get(".opcode"), "0x01" | "0x03") {
        all.push(format!(" msn {} mo {} ", get(".msn"), get(".mo")));
    }
    if !get(".immediate").is_empty() {
        all.push(format!(" imm {}", get(".immediate")));
    }
    for (field, word) in [(".commit", " commit"), (".parity", " parity")] {
        if set(field) {
            all.push(word.to_owned());
        }
    }
    all
}

/// Returns datagrams between two hosts as a pcap file: IPv4 packets, a millisecond apart.
fn pcap(all: &[Listed]) -> Vec<u8> {
    let mut file = Vec::new();
    // Version 2.4, no time zone, whole packets, IP without a link layer.
    for word in [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 0xffff, 101] {
        file.extend_from_slice(&word.to_le_bytes());
    }
    for (time, decoded) in (0_u32..).zip(all) {
        let udp = u16::try_from(decoded.bytes.len() + 8).unwrap_or(u16::MAX);
        let (from, to) = if decoded.from_a { (1, 2) } else { (2, 1) };
        let mut packet = vec![0x45, 0];
        packet.extend_from_slice(&(udp + 20).to_be_bytes());
        packet.extend_from_slice(&[0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, from, 10, 0, 0, to]);
        let sum = checksum(&packet, 0).to_be_bytes();
        packet.splice(10..12, sum);
        let head = packet.len();
        packet.extend_from_slice(&[4000_u16.to_be_bytes(), 4000_u16.to_be_bytes()].concat());
        packet.extend_from_slice(&udp.to_be_bytes());
        packet.extend_from_slice(&[0, 0]);
        packet.extend_from_slice(&decoded.bytes);
        // The checksum of UDP also covers addresses, protocol and length.
        let covered: Vec<u8> = packet.iter().skip(12).copied().collect();
        let sum = checksum(&covered, u32::from(udp) + 17).to_be_bytes();
        packet.splice(head + 6..head + 8, sum);
        let len = u32::try_from(packet.len()).unwrap_or(0);
        for word in [time / 1000, time % 1000 * 1000, len, len] {
            file.extend_from_slice(&word.to_le_bytes());
        }
        file.extend_from_slice(&packet);
    }
    file
}

/// Returns the IP checksum (RFC 1071), with `more` added.
fn checksum(bytes: &[u8], more: u32) -> u16 {
    let words = bytes.chunks(2).map(|pair| {
        let [high, low] = [pair.first(), pair.get(1)].map(|b| u32::from(b.copied().unwrap_or(0)));
        high << 8 | low
    });
    let sum: u32 = words.sum::<u32>() + more;
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(0)
}

fn wait(process: &mut Process, line: &str) -> Result {
    match process.status(TIME_LIMIT) {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{line}: {status}").into()),
        Err(e) => Err(format!("{line}: {e}").into()),
    }
}

/// Returns the packets that match a display filter, one line each.
fn tshark(script: Option<&Path>, file: &Path, filter: &str) -> Result<String> {
    let mut command = Command::new("tshark");
    match script {
        Some(script) => command
            .arg("-X")
            .arg(format!("lua_script:{}", script.display())),
        None => command.args(WITHOUT),
    };
    command.args(["-o", "ip.check_checksum:TRUE"]);
    command.args(["-o", "tcp.check_checksum:TRUE"]);
    command.args(["-o", "udp.check_checksum:TRUE"]);
    output(command.arg("-r").arg(file).args(["-Y", filter]))
}

/// Returns the lines about iWARP in the full decoding that contain "Unknown", except those of the opcodes in [`NAMELESS`].
fn unknown(file: &Path) -> Result<String> {
    let mut command = Command::new("tshark");
    command
        .arg("-r")
        .arg(file)
        .args(["-O", "iwarp_mpa,iwarp_ddp_rdmap"])
        .args(WITHOUT);
    let all = output(&mut command)?;
    let lines = all.lines().filter(|line| {
        line.contains("Unknown") && !NAMELESS.iter().any(|opcode| line.contains(opcode))
    });
    Ok(lines.map(|line| format!("{line}\n")).collect())
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().map_err(|e| format!("tshark: {e}"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{command:?}: {stderr}").into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
