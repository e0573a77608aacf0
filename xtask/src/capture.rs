//! `cargo xtask capture`: captures of real programs, as tshark understands them.
//!
//! Each pair of programs runs with `anywarp capture`; then tshark must find what the programs did, and nothing that is
//! malformed, damaged or unknown. The one thing that it does not know by itself, control messages, must be explained by
//! the dissector.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Result, sh};

/// Two programs, and what must be found of them how often at least: a display filter of Wireshark's.
struct Case {
    name: &'static str,
    server: &'static str,
    client: &'static str,
    finds: &'static [(&'static str, usize)],
}

const CASES: &[Case] = &[
    Case {
        name: "rping",
        server: "rping -s -C 10 -V -S 1000 -a 127.0.0.1 -p 7801",
        client: "rping -c -C 10 -V -S 1000 -a 127.0.0.1 -p 7801",
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
        finds: &[
            ("iwarp_rdma.opcode == 10", 5),
            ("iwarp_rdma.opcode == 11", 5),
        ],
    },
    Case {
        name: "large",
        server: "ib_write_bw -d anywarp0 -s 1048576 -n 5 -t 1 -p 7803",
        client: "ib_write_bw -d anywarp0 -s 1048576 -n 5 -t 1 -p 7803 127.0.0.1",
        finds: &[("iwarp_rdma.opcode == 0 && iwarp_ddp.last_flag == 0", 5)],
    },
    Case {
        name: "ud",
        server: "ibv_ud_pingpong -g 0 -n 10 -s 2000 -p 7804",
        client: "ibv_ud_pingpong -g 0 -n 10 -s 2000 -p 7804 127.0.0.1",
        finds: &[("anywarp.opcode == 3 && anywarp.length == 2000", 20)],
    },
    Case {
        name: "uc",
        server: "ibv_uc_pingpong -g 0 -n 10 -s 100000 -p 7805",
        client: "ibv_uc_pingpong -g 0 -n 10 -s 100000 -p 7805 127.0.0.1",
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
        finds: &[("anywarp.cm.kind == 1", 1), ("anywarp.cm.kind == 2", 1)],
    },
];

/// What must not be found: with checksums of IP, TCP and UDP looked at.
const NEVER: &str = "_ws.malformed || _ws.expert.severity >= \"Warning\" || anywarp.crc.bad \
    || (iwarp_rdma.opcode > 11 && !anywarp_control) \
    || (udp && !anywarp)";

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn run() -> Result {
    let dist = sh::dist();
    let anywarp = dist.join("bin/anywarp");
    let script = dist.join("share/anywarp/wireshark/anywarp.lua");
    let folder = sh::target().join("capture");
    std::fs::create_dir_all(&folder)?;
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
        let mut server = start(anywarp, &of_server, self.server)?;
        let done = self.clients(anywarp, &of_client, &mut server);
        if done.is_err() {
            server.kill()?;
        }
        let ended = wait(&mut server, self.server);
        done.and(ended)?;
        for file in [of_server, of_client] {
            let found = tshark(script, &file, NEVER)?;
            if !found.is_empty() {
                let first: Vec<_> = found.lines().take(10).collect();
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

    /// Runs the client; again for as long as the server does not listen yet.
    fn clients(&self, anywarp: &Path, file: &Path, server: &mut Child) -> Result {
        let begin = Instant::now();
        loop {
            let mut client = start(anywarp, file, self.client)?;
            let done = wait(&mut client, self.client);
            if done.is_ok() || begin.elapsed() > PATIENCE || server.try_wait()?.is_some() {
                return done;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn start(anywarp: &Path, file: &Path, line: &str) -> Result<Child> {
    let log = std::fs::File::create(file.with_extension("log"))?;
    Ok(Command::new(anywarp)
        .args(["capture", "--write"])
        .arg(file)
        .arg("--")
        .args(line.split(' '))
        .env("ANYWARP_ADDR", "127.0.0.1")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()?)
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
fn tshark(script: &Path, file: &PathBuf, filter: &str) -> Result<String> {
    let output = Command::new("tshark")
        .arg("-X")
        .arg(format!("lua_script:{}", script.display()))
        .args([
            "-o",
            "ip.check_checksum:TRUE",
            "-o",
            "tcp.check_checksum:TRUE",
        ])
        .args(["-o", "udp.check_checksum:TRUE"])
        .arg("-r")
        .arg(file)
        .args(["-Y", filter])
        .output()
        .map_err(|e| format!("tshark: {e}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("tshark: {filter}: {said}").into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
