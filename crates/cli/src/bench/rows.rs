//! The definitions of all measurements: the commands, and the bounds for the values.

/// The unit of the values of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Microseconds; lower is better.
    Us,
    /// 10^9 bytes per second.
    Gbs,
    /// Million messages per second.
    Ms,
    /// A number of events; lower is better.
    Count,
    /// A share in percent; lower is better.
    Share,
}

impl Unit {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Us => "µs",
            Self::Gbs => "GB/s",
            Self::Ms => "M/s",
            Self::Count => "",
            Self::Share => "%",
        }
    }

    /// Returns whether lower values are better.
    pub(crate) fn costs(self) -> bool {
        matches!(self, Self::Us | Self::Count | Self::Share)
    }
}

/// How to measure a value. In the arguments, `{host}`, `{port}` and `{word}` are replaced, and `N:1000` is a count that --short
/// reduces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum How {
    /// `anywarp bench-raw`
    Raw(String),
    /// An unmodified program of perftest, on this device.
    Perftest(&'static str, String),
    /// `anywarp ping` or `blast`
    Ours(&'static str, String),
    /// Another installed program: its name, and the arguments of its server and its client.
    Peer(&'static str, &'static str, &'static str),
    /// `anywarp-cost` with two processes.
    Verbs(String),
    /// `anywarp-cost` with one process.
    VerbsAlone(String),
    /// The MPI program of the tests, with two ranks: the launch command, which comes before the program's name, and the program's
    /// arguments.
    Mpi(&'static str, &'static str),
}

/// A program or setting that is compared with others in a row.
#[derive(Debug, Clone)]
pub(crate) struct Party {
    pub(crate) name: String,
    pub(crate) how: How,
    pub(crate) env: Vec<(&'static str, &'static str)>,
    /// The name of the number in the program's output, if it does not follow from the unit of the row.
    pub(crate) value: Option<&'static str>,
    /// The factor to multiply that number by.
    pub(crate) factor: f64,
}

/// A bound for a value.
#[derive(Debug, Clone)]
pub(crate) struct Bound {
    /// The name of the party whose value is judged.
    pub(crate) of: &'static str,
    /// How the value is compared.
    pub(crate) by: By,
    /// The bound: an upper one if lower values are better, else a lower one.
    pub(crate) limit: f64,
    /// A stricter bound, which is desirable but not required.
    pub(crate) aim: Option<f64>,
}

/// What a bound applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// The value divided by that of this party. For [`RAW`], that is the better one of the row's values for raw TCP.
    Ratio(&'static str),
    /// The value minus that of this party.
    Beyond(&'static str),
    /// The value itself.
    Itself,
}

/// A group of values that are measured in turn and compared.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    pub(crate) unit: Unit,
    /// True for the rows that are measured by default.
    pub(crate) usual: bool,
    pub(crate) parties: Vec<Party>,
    pub(crate) bounds: Vec<Bound>,
}

fn party(name: &str, how: How) -> Party {
    Party {
        name: name.to_owned(),
        how,
        env: Vec::new(),
        value: None,
        factor: 1.0,
    }
}

impl Party {
    fn env(mut self, name: &'static str, value: &'static str) -> Self {
        self.env.push((name, value));
        self
    }

    /// Uses another number of the program, multiplied by a factor.
    fn takes(mut self, value: &'static str, factor: f64) -> Self {
        self.value = Some(value);
        self.factor = factor;
        self
    }

    /// Multiplies the value: a round trip takes twice the time of one direction.
    fn times(mut self, factor: f64) -> Self {
        self.factor *= factor;
        self
    }
}

fn raw(name: &str, words: &str) -> Party {
    party(name, How::Raw(words.to_owned()))
}

fn perftest(name: &str, program: &'static str, words: &str) -> Party {
    party(name, How::Perftest(program, words.to_owned())).env(LOCAL.0, LOCAL.1)
}

fn ping(name: &str, words: &str) -> Party {
    party(name, How::Ours("ping", words.to_owned()))
        .env(LOCAL.0, LOCAL.1)
        .takes("median_us", 1.0)
}

fn blast(name: &str, words: &str) -> Party {
    party(name, How::Ours("blast", words.to_owned()))
        .env(LOCAL.0, LOCAL.1)
        .takes("arrived_mb_s", 1e-3)
}

fn verbs(name: &str, words: &str) -> Party {
    party(name, How::Verbs(words.to_owned())).env(LOCAL.0, LOCAL.1)
}

fn fi_pingpong(name: &str, server: &'static str, client: &'static str) -> Party {
    party(name, How::Peer("fi_pingpong", server, client))
}

fn ucx(name: &str, server: &'static str, client: &'static str) -> Party {
    // Restricts UCX to TCP. By default it uses all transports that it finds.
    party(name, How::Peer("ucx_perftest", server, client)).env("UCX_TLS", "tcp")
}

/// Returns a party: Open MPI over the kernel's TCP of this host.
fn openmpi(words: &'static str) -> Party {
    const LAUNCH: &str = "mpiexec.openmpi -n 2 --use-hwthread-cpus --oversubscribe --bind-to hwthread:overload-allowed --mca pml ob1 --mca btl self,tcp \
         --mca btl_tcp_if_include lo";
    // Containers often have no user besides root.
    party("Open MPI tcp", How::Mpi(LAUNCH, words))
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
}

fn bound(of: &'static str, by: By, limit: f64, aim: impl Into<Option<f64>>) -> Bound {
    Bound {
        of,
        by,
        limit,
        aim: aim.into(),
    }
}

/// Makes two processes on one host use TCP instead of shared memory.
const LOCAL: (&str, &str) = ("ANYWARP_CARRIER", "tcp");

/// Turns the checksum off.
const NO_CRC: (&str, &str) = ("ANYWARP_CRC", "0");

// The names of parties that bounds refer to.

/// TCP with the congestion control of the host.
pub(crate) const RAW: &str = "raw TCP";
/// TCP with the congestion control that every program may use.
pub(crate) const RAW_RENO: &str = "raw TCP, reno";
const UDP: &str = "raw UDP";
const SEND: &str = "Send";
const WRITE: &str = "Write";
const READ: &str = "Read";
const FI: &str = "libfabric tcp";
const UCX: &str = "UCX tcp";

/// Returns all rows. `mtu` is that of the link; raw datagrams are as long as those of the device.
pub(crate) fn all(mtu: u32) -> Vec<Row> {
    let datagram = mtu.saturating_sub(28).clamp(64, 65507);
    let latency = |name, what, size: u32, count: u32, usual, fi: [&'static str; 2]| {
        let words = format!("-s {size} -n N:{count}");
        Row {
            name,
            what,
            unit: Unit::Us,
            usual,
            parties: vec![
                raw(RAW, &format!("tcp-spin --size {size} --millis N:500")),
                perftest(SEND, "ib_send_lat", &words),
                perftest(WRITE, "ib_write_lat", &words),
                ping("ping", &format!("-t rc -o send -s {size} -n N:{count}")),
                fi_pingpong(FI, fi[0], fi[1]),
            ],
            bounds: Vec::new(),
        }
    };
    let mut rows = Vec::new();

    let mut row = latency(
        "lat-64",
        "RC one way, 64 B, both ends polling",
        64,
        30000,
        true,
        [
            "-p tcp -e msg -B {port} -I N:30000 -S 64",
            "-p tcp -e msg -P {port} -I N:30000 -S 64 {host}",
        ],
    );
    row.parties.push(ucx(
        UCX,
        "-p {port}",
        "{host} -p {port} -t ucp_put_lat -s 64 -n N:20000 -f",
    ));
    row.parties.push(openmpi("lat 64 N:20000"));
    for of in [SEND, WRITE] {
        row.bounds.extend([
            bound(of, By::Ratio(RAW), 1.2, 1.1),
            bound(of, By::Ratio(FI), 0.95, None),
            bound(of, By::Ratio(UCX), 0.5, None),
        ]);
    }
    rows.push(row);

    let mut row = latency(
        "lat-4k",
        "RC one way, 4 KiB",
        4096,
        20000,
        false,
        [
            "-p tcp -e msg -B {port} -I N:20000 -S 4096",
            "-p tcp -e msg -P {port} -I N:20000 -S 4096 {host}",
        ],
    );
    row.parties.push(openmpi("lat 4096 N:20000"));
    for of in [SEND, WRITE] {
        row.bounds.extend([
            bound(of, By::Ratio(RAW), 1.2, 1.1),
            bound(of, By::Ratio(FI), 1.0, None),
        ]);
    }
    rows.push(row);

    let mut row = latency(
        "lat-64k",
        "RC one way, 64 KiB",
        65536,
        6000,
        false,
        [
            "-p tcp -e msg -B {port} -I N:6000 -S 65536",
            "-p tcp -e msg -P {port} -I N:6000 -S 65536 {host}",
        ],
    );
    row.parties.push(openmpi("lat 65536 N:6000"));
    for of in [SEND, WRITE] {
        row.bounds.extend([
            bound(of, By::Ratio(RAW), 1.15, 1.1),
            bound(of, By::Ratio(FI), 1.0, None),
        ]);
    }
    rows.push(row);

    rows.push(Row {
        name: "event-64",
        what: "RC one way, 64 B, both ends sleep until an event",
        unit: Unit::Us,
        usual: true,
        parties: vec![
            raw(RAW, "tcp-sleep --size 64 --millis N:500"),
            perftest(SEND, "ib_send_lat", "-e -s 64 -n N:10000"),
            ping("ping", "-t rc -o send --event -s 64 -n N:10000"),
        ],
        bounds: vec![bound(SEND, By::Ratio(RAW), 1.3, 1.1)],
    });

    rows.push(Row {
        name: "idle-qps",
        what: "RC one way, 64 B, beside 64 idle queue pairs",
        unit: Unit::Us,
        usual: false,
        parties: vec![
            verbs("alone", "ping --idle 0 --count N:30000"),
            verbs("64 idle", "ping --idle 64 --count N:30000"),
        ],
        bounds: vec![bound("64 idle", By::Beyond("alone"), 0.5, 0.3)],
    });

    rows.push(Row {
        name: "ud-64",
        what: "UD one way, 64 B, both ends polling",
        unit: Unit::Us,
        usual: true,
        parties: vec![
            raw(UDP, "udp-spin --size 64 --millis N:500"),
            perftest("UD Send", "ib_send_lat", "-c UD -s 64 -n N:30000"),
            ping("UD ping", "-t ud -o send -s 64 -n N:30000"),
            perftest("RC Send", "ib_send_lat", "-s 64 -n N:30000"),
            fi_pingpong(
                "libfabric udp",
                "-p udp -e dgram -B {port} -I N:20000 -S 64",
                "-p udp -e dgram -P {port} -I N:20000 -S 64 {host}",
            ),
        ],
        bounds: vec![
            bound("UD Send", By::Ratio(UDP), 1.2, 1.1),
            bound("UD Send", By::Ratio("libfabric udp"), 0.85, None),
            bound("UD Send", By::Ratio("RC Send"), 0.75, None),
        ],
    });

    rows.push(Row {
        name: "read-64",
        what: "RDMA Read of 64 B, round trip",
        unit: Unit::Us,
        usual: true,
        parties: vec![
            raw(RAW, "tcp-spin --size 64 --millis N:500").times(2.0),
            verbs(READ, "read --count N:20000"),
            raw("raw TCP asleep", "tcp-sleep --size 64 --millis N:500").times(2.0),
            perftest("Read, target asleep", "ib_read_lat", "-s 64 -n N:10000"),
        ],
        bounds: vec![
            bound(READ, By::Ratio(RAW), 1.25, None),
            bound(
                "Read, target asleep",
                By::Ratio("raw TCP asleep"),
                1.6,
                None,
            ),
        ],
    });

    let bulk = "-s 1048576 -t 16 -r 16 -n N:3000";
    rows.push(Row {
        name: "bw-1m",
        what: "RC bandwidth, 1 MiB, depth 16",
        unit: Unit::Gbs,
        usual: true,
        parties: vec![
            raw(RAW, "tcp-stream --size 1048576 --millis N:600"),
            raw(RAW_RENO, "tcp-stream --size 1048576 --millis N:600").env("ANYWARP_CC", "reno"),
            perftest(WRITE, "ib_write_bw", "-s 1048576 -t 16 -n N:3000"),
            perftest(SEND, "ib_send_bw", bulk),
            perftest("Write, no CRC", "ib_write_bw", "-s 1048576 -t 16 -n N:3000")
                .env(NO_CRC.0, NO_CRC.1),
            perftest("Send, no CRC", "ib_send_bw", bulk).env(NO_CRC.0, NO_CRC.1),
            blast("blast", "-t rc -o write -s 1M --depth 16 -n N:3000"),
            ucx(
                UCX,
                "-p {port}",
                "{host} -p {port} -t ucp_put_bw -s 1048576 -n N:3000 -f",
            ),
            openmpi("bw 1048576 N:3000 16"),
        ],
        bounds: vec![
            bound(WRITE, By::Ratio(RAW), 0.7, 0.85),
            bound(SEND, By::Ratio(RAW), 0.7, 0.85),
            bound("Write, no CRC", By::Ratio(RAW), 0.85, 0.95),
            bound("Send, no CRC", By::Ratio(RAW), 0.85, 0.95),
        ],
    });

    rows.push(Row {
        name: "bw-64k",
        what: "RC bandwidth, 64 KiB, depth 64",
        unit: Unit::Gbs,
        usual: true,
        parties: vec![
            raw(RAW, "tcp-stream --size 65536 --millis N:600"),
            raw(RAW_RENO, "tcp-stream --size 65536 --millis N:600").env("ANYWARP_CC", "reno"),
            perftest(WRITE, "ib_write_bw", "-s 65536 -t 64 -n N:30000"),
            perftest(SEND, "ib_send_bw", "-s 65536 -t 64 -r 128 -n N:30000"),
            ucx(
                UCX,
                "-p {port}",
                "{host} -p {port} -t ucp_put_bw -s 65536 -n N:30000 -f",
            ),
            openmpi("bw 65536 N:30000 64"),
        ],
        bounds: vec![
            bound(WRITE, By::Ratio(RAW), 1.0, 1.1),
            bound(SEND, By::Ratio(RAW), 1.0, 1.1),
            bound(WRITE, By::Ratio(UCX), 1.0, None),
        ],
    });

    rows.push(Row {
        name: "bw-read-1m",
        what: "RDMA Read bandwidth, 1 MiB",
        unit: Unit::Gbs,
        usual: false,
        parties: vec![
            raw(RAW, "tcp-stream --size 1048576 --millis N:600"),
            raw(RAW_RENO, "tcp-stream --size 1048576 --millis N:600").env("ANYWARP_CC", "reno"),
            perftest(READ, "ib_read_bw", "-s 1048576 -t 16 -n N:3000"),
            ucx(
                UCX,
                "-p {port}",
                "{host} -p {port} -t ucp_get -s 1048576 -n N:2000 -f",
            ),
        ],
        bounds: vec![bound(READ, By::Ratio(RAW), 0.65, 0.85)],
    });

    rows.push(Row {
        name: "rate-64",
        what: "RC messages of 64 B, depth 128, one post each",
        unit: Unit::Ms,
        usual: true,
        parties: vec![
            raw(RAW, "tcp-stream --size 64 --millis N:500"),
            raw(RAW_RENO, "tcp-stream --size 64 --millis N:500").env("ANYWARP_CC", "reno"),
            perftest(SEND, "ib_send_bw", "-s 64 -n N:1000000"),
            perftest(WRITE, "ib_write_bw", "-s 64 -n N:1000000"),
            ucx(
                UCX,
                "-p {port}",
                "{host} -p {port} -t ucp_put_bw -s 64 -n N:500000 -f",
            ),
        ],
        bounds: vec![
            bound(SEND, By::Ratio(RAW), 5.0, 12.0),
            bound(WRITE, By::Ratio(RAW), 5.0, 12.0),
        ],
    });

    rows.push(Row {
        name: "rate-64-lists",
        what: "RC messages of 64 B, lists of 32",
        unit: Unit::Ms,
        usual: false,
        parties: vec![
            raw(RAW, "tcp-stream --size 64 --list 32 --millis N:500"),
            raw(RAW_RENO, "tcp-stream --size 64 --list 32 --millis N:500")
                .env("ANYWARP_CC", "reno"),
            perftest(SEND, "ib_send_bw", "-s 64 -l 32 -n N:3200000"),
            perftest(WRITE, "ib_write_bw", "-s 64 -l 32 -n N:3200000"),
        ],
        bounds: vec![
            bound(SEND, By::Ratio(RAW), 0.7, 1.0),
            bound(WRITE, By::Ratio(RAW), 0.7, 1.0),
        ],
    });

    for (name, what, size, usual, limits) in [
        (
            "ud-rate-64",
            "UD messages of 64 B, depth 128",
            64,
            true,
            [10.0, 0.4, 0.6],
        ),
        (
            "ud-rate-1k",
            "UD messages of 1 KiB, depth 128",
            1024,
            false,
            [6.0, 0.6, 0.75],
        ),
    ] {
        rows.push(Row {
            name,
            what,
            unit: Unit::Ms,
            usual,
            parties: vec![
                raw(UDP, &format!("udp-messages --size {size} --millis N:500")),
                raw(
                    "raw GSO+GRO",
                    &format!("udp-gso --size {size} --millis N:500"),
                ),
                perftest(
                    "UD Send",
                    "ib_send_bw",
                    &format!("-c UD -s {size} -n N:1000000"),
                ),
                blast(
                    "UD blast",
                    &format!("-t ud -o send -s {size} --depth 128 -n N:1000000"),
                )
                .times(1e3 / f64::from(size)),
            ],
            bounds: vec![
                bound("UD Send", By::Ratio(UDP), limits[0], None),
                bound("UD Send", By::Ratio("raw GSO+GRO"), limits[1], limits[2]),
            ],
        });
    }

    rows.push(Row {
        name: "record-1m",
        what: "Write-Record, 1 MiB in datagrams of the path's MTU",
        unit: Unit::Gbs,
        usual: true,
        parties: vec![
            raw(
                "raw GSO+GRO",
                &format!("udp-gso --size {datagram} --millis N:600"),
            ),
            blast(
                "Write-Record",
                "-t ud -o write-record -s 1M --depth 16 -n N:2000",
            ),
        ],
        bounds: vec![bound("Write-Record", By::Ratio("raw GSO+GRO"), 0.6, 0.75)],
    });

    rows.push(Row {
        name: "qps-64",
        what: "Writes of 4 KiB on 64 RC queue pairs in turn",
        unit: Unit::Ms,
        usual: false,
        parties: vec![
            verbs("1", "spread --qps 1 --count N:400000"),
            verbs("64", "spread --qps 64 --count N:400000"),
        ],
        bounds: vec![bound("64", By::Ratio("1"), 0.8, None)],
    });

    rows.push(Row {
        name: "qps-64-fair",
        what: "difference between the shares of the best and the worst served of 64 queue pairs",
        unit: Unit::Share,
        usual: false,
        parties: vec![verbs("64", "spread --qps 64 --count N:400000").takes("unfairness", 100.0)],
        bounds: vec![bound("64", By::Itself, 10.0, None)],
    });

    rows.push(Row {
        name: "passive",
        what: "system calls and wake-ups of the target's thread during 20,000 Writes and Reads",
        unit: Unit::Count,
        usual: false,
        parties: vec![
            verbs("wake-ups", "passive --count N:20000").takes("wakeups", 1.0),
            verbs("system calls", "passive --count N:20000").takes("calls", 1.0),
        ],
        bounds: vec![
            bound("wake-ups", By::Itself, 0.0, None),
            bound("system calls", By::Itself, 0.0, None),
        ],
    });

    rows.push(Row {
        name: "idle-1000",
        what: "processor time of a process with 1,000 idle RC queue pairs",
        unit: Unit::Share,
        usual: false,
        parties: vec![verbs("asleep", "idle --qps 1000 --millis N:5000").takes("share", 100.0)],
        bounds: vec![bound("asleep", By::Itself, 0.1, None)],
    });

    rows.push(Row {
        name: "idle-polling",
        what: "wake-ups of the engine's thread while the program polls beside 1,000 idle RC queue pairs",
        unit: Unit::Count,
        usual: false,
        parties: vec![
            verbs("worker", "idle --qps 1000 --poll 1 --millis N:2000").takes("wakeups", 1.0),
        ],
        bounds: vec![bound("worker", By::Itself, 0.0, None)],
    });

    for (name, what, size) in [
        ("reg-4k", "ibv_reg_mr of 4 KiB", "4096"),
        ("reg-1m", "ibv_reg_mr of 1 MiB", "1048576"),
        ("reg-1g", "ibv_reg_mr of 1 GiB", "1073741824"),
    ] {
        let words = format!("reg --size {size} --count N:20000");
        rows.push(Row {
            name,
            what,
            unit: Unit::Us,
            usual: false,
            parties: vec![
                party("reg_mr", How::VerbsAlone(words.clone())),
                party("dereg_mr", How::VerbsAlone(words)).takes("dereg_us", 1.0),
            ],
            bounds: vec![
                bound("reg_mr", By::Itself, 1.0, None),
                bound("dereg_mr", By::Itself, 1.0, None),
            ],
        });
    }

    rows.push(Row {
        name: "shm-64",
        what: "one way between two processes of one host, 64 B",
        unit: Unit::Us,
        usual: true,
        parties: vec![
            raw("raw memory", "shm --size 64 --millis N:300"),
            near(perftest(SEND, "ib_send_lat", "-s 64 -n N:50000")),
            near(perftest(WRITE, "ib_write_lat", "-s 64 -n N:50000")),
            fi_pingpong(
                "libfabric shm",
                "-p shm -e rdm -B {port} -I N:50000 -S 64",
                "-p shm -e rdm -P {port} -I N:50000 -S 64 {host}",
            ),
        ],
        bounds: vec![
            bound(SEND, By::Ratio("raw memory"), 2.0, None),
            bound(SEND, By::Ratio("libfabric shm"), 1.0, 0.65),
        ],
    });

    rows.push(Row {
        name: "shm-64k",
        what: "one way between two processes of one host, 64 KiB",
        unit: Unit::Us,
        usual: false,
        parties: vec![
            near(perftest(SEND, "ib_send_lat", "-s 65536 -n N:6000")),
            near(perftest(WRITE, "ib_write_lat", "-s 65536 -n N:6000")),
            fi_pingpong(
                "libfabric shm",
                "-p shm -e rdm -B {port} -I N:6000 -S 65536",
                "-p shm -e rdm -P {port} -I N:6000 -S 65536 {host}",
            ),
        ],
        bounds: vec![bound(SEND, By::Ratio("libfabric shm"), 1.0, None)],
    });

    rows.push(Row {
        name: "shm-1m",
        what: "Writes of 1 MiB from private memory between two processes of one host",
        unit: Unit::Gbs,
        usual: false,
        parties: vec![
            raw("process_vm_writev", "cma --size 1048576 --millis N:500"),
            near(perftest(WRITE, "ib_write_bw", "-s 1048576 -t 16 -n N:5000")),
        ],
        bounds: vec![bound(WRITE, By::Ratio("process_vm_writev"), 0.9, None)],
    });

    rows.push(Row {
        name: "shm-rate",
        what: "messages of 64 B between two processes of one host",
        unit: Unit::Ms,
        usual: false,
        parties: vec![near(perftest(SEND, "ib_send_bw", "-s 64 -n N:3000000"))],
        bounds: vec![bound(SEND, By::Itself, 5.0, 10.0)],
    });

    let spread = |qps| near(verbs(qps, &format!("spread --qps {qps} --count N:1000000")));
    rows.push(Row {
        name: "shm-qps-64",
        what: "Writes of 4 KiB on 64 RC queue pairs in turn, between two processes of one host",
        unit: Unit::Ms,
        usual: false,
        parties: vec![spread("1"), spread("64")],
        bounds: vec![bound("64", By::Ratio("1"), 0.7, 0.9)],
    });

    rows.push(Row {
        name: "shm-qps-64-fair",
        what: "the same: difference between the shares of the best and the worst served queue pair",
        unit: Unit::Share,
        usual: false,
        parties: vec![spread("64").takes("unfairness", 100.0)],
        bounds: vec![bound("64", By::Itself, 10.0, None)],
    });

    rows
}

/// Makes two processes of one host use shared memory.
fn near(mut party: Party) -> Party {
    party.env.retain(|(name, _)| *name != LOCAL.0);
    party.env.push((LOCAL.0, "auto"));
    party
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn bounds_name_parties_of_their_row() {
        let mut names = BTreeSet::new();
        for row in all(1500) {
            assert!(names.insert(row.name), "{} is there twice", row.name);
            let parties: BTreeSet<&str> = row.parties.iter().map(|p| p.name.as_str()).collect();
            assert_eq!(parties.len(), row.parties.len(), "{}", row.name);
            for bound in &row.bounds {
                assert!(parties.contains(bound.of), "{}: {}", row.name, bound.of);
                if let By::Ratio(other) | By::Beyond(other) = bound.by {
                    assert!(parties.contains(other), "{}: {other}", row.name);
                }
            }
        }
    }
}
