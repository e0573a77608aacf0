//! `cargo xtask capture`: captures of real programs, as tshark understands them.
//!
//! Each pair of programs runs with `anywarp capture`; then tshark must find what the programs did, and nothing that is
//! malformed, damaged or unknown. The one thing that it does not know by itself, control messages, must be explained by
//! the dissector. With `ANYWARP_PROFILE=standard` there are none: tshark then knows everything without it.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Result, c_tests, sh};

/// Two programs, and what must be found of them how often at least: a display filter of Wireshark's.
struct Case {
    name: &'static str,
    server: &'static str,
    client: &'static str,
    /// Both ends speak plain iWARP.
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
    // Every opcode but Terminate.
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

/// What must not be found: with checksums of IP, TCP and UDP looked at.
const NEVER: &str = "_ws.malformed || _ws.expert.severity >= \"Warning\" || anywarp.crc.bad \
    || (iwarp_rdma.opcode > 11 && !anywarp_control) \
    || (udp && !anywarp)";

/// What besides must not be found of plain iWARP, which tshark decodes without our dissector.
const NEVER_STANDARD: &str = "_ws.malformed || _ws.expert.severity >= \"Warning\" || iwarp_rdma.opcode > 11 \
    || _ws.unreassembled || !tcp || (tcp.len > 0 && !iwarp_mpa)";

/// It takes any Send for RPC, and stumbles.
const WITHOUT: [&str; 2] = ["--disable-protocol", "rpcordma"];

/// Immediate Data, without and with solicited event (RFC 7306 §6): the only opcodes that tshark 4.0 has no name for.
const NAMELESS: [&str; 2] = ["OpCode: Unknown (0x8)", "OpCode: Unknown (0x9)"];

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(60);

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
    let mut failed = 0;
    for case in CASES {
        match case.run(&anywarp, &script, &folder) {
            Ok(()) => println!("ok    {}", case.name),
            Err(e) => {
                println!("FAIL  {}: {e}", case.name);
                failed += 1;
            }
        }
    }
    println!("{} passed, {failed} failed", CASES.len() - failed);
    if failed > 0 {
        return Err(format!("{failed} captures are not as they should be").into());
    }
    Ok(())
}

impl Case {
    fn run(&self, anywarp: &Path, script: &Path, folder: &Path) -> Result {
        let file = |side| folder.join(format!("{}-{side}.pcapng", self.name));
        let (of_server, of_client) = (file("server"), file("client"));
        let mut server = self.start(anywarp, &of_server, self.server)?;
        let done = self.clients(anywarp, &of_client, &mut server);
        if done.is_err() {
            server.kill()?;
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

    fn start(&self, anywarp: &Path, file: &Path, line: &str) -> Result<Child> {
        let log = std::fs::File::create(file.with_extension("log"))?;
        let peer = file.with_file_name("peer");
        let profile = if self.standard { "standard" } else { "auto" };
        Ok(Command::new(anywarp)
            .args(["capture", "--write"])
            .arg(file)
            .arg("--")
            .args(
                line.replace("{peer}", &peer.display().to_string())
                    .split(' '),
            )
            .env("ANYWARP_ADDR", "127.0.0.1")
            .env("ANYWARP_PROFILE", profile)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?)
    }

    /// Runs the client; again for as long as the server does not listen yet.
    fn clients(&self, anywarp: &Path, file: &Path, server: &mut Child) -> Result {
        let begin = Instant::now();
        loop {
            let mut client = self.start(anywarp, file, self.client)?;
            let done = wait(&mut client, self.client);
            if done.is_ok() || begin.elapsed() > PATIENCE || server.try_wait()?.is_some() {
                return done;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn wait(child: &mut Child, line: &str) -> Result {
    let begin = Instant::now();
    loop {
        match child.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("{line}: {status}").into()),
            None if begin.elapsed() > PATIENCE => {
                child.kill()?;
                child.wait()?;
                return Err(format!("{line}: not over after {PATIENCE:?}").into());
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// The packets that a display filter lets through, a line each.
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

/// The lines of iWARP in the whole decoding that call something unknown.
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
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{command:?}: {said}").into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
