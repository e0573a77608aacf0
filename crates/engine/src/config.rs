//! The configuration of the device, read once from the environment.
//!
//! [`anywarp_core::env::VARIABLES`] documents each variable. Other files of this crate do not read them from the environment.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use anywarp_core::bounds;
use anywarp_core::connection::Peer;
use anywarp_core::env::LOG_LEVELS;

use crate::process::Inherited;
use crate::sys::secure::has_more_rights_than_its_caller;

/// The configuration of this process. The environment is read at the first call.
pub fn config() -> &'static Config {
    static CONFIG: Inherited<Config> = Inherited::new(|| Config::from_variables(variable));
    CONFIG.get()
}

/// The value of an environment variable. `None` in a program that runs with more privileges than the process that
/// started it (set-user-ID, set-group-ID, file capabilities): a variable could make such a program write to files, or
/// trust addresses, that its user has no right to choose.
pub fn variable(name: &str) -> Option<OsString> {
    if has_more_rights_than_its_caller() {
        return None;
    }
    std::env::var_os(name)
}

/// The settings of the environment.
#[derive(Debug)]
pub struct Config {
    /// `ANYWARP_LOG`: the most verbose level that is written.
    pub log: Level,
    /// A warning about the value of `ANYWARP_LOG`, which is written although the log is off.
    pub log_warning: Option<String>,
    /// `ANYWARP_ADDR`: the address that becomes GID 0.
    pub address: Option<IpAddr>,
    /// `ANYWARP_FACE`: the node type and transport that queries report.
    pub face: Face,
    /// `ANYWARP_DEVICE_PROFILE`: the name of the device whose limits are enforced.
    pub device_profile: Option<String>,
    /// `ANYWARP_CRC`: whether CRC32C is requested on connections.
    pub crc: bool,
    /// `ANYWARP_CARRIER`: the transport between processes of one host.
    pub transport: Transport,
    /// `ANYWARP_TRUNK`: when queue pairs with the same peer process share a trunk; `None` for never.
    pub trunk: Option<TrunkUse>,
    /// `ANYWARP_PIN` and `ANYWARP_PREFAULT`: whether pages are locked or faulted in when memory is registered.
    pub pages: Pages,
    /// `ANYWARP_CC`: the TCP congestion control; `None` for the host's.
    pub congestion_control: Option<String>,
    /// `ANYWARP_GSO`: whether runs of datagrams (of one length, to one destination) are passed to the kernel as one buffer (UDP_SEGMENT).
    pub gso: bool,
    /// `ANYWARP_GRO`: whether runs of datagrams are received from the kernel as one buffer (UDP_GRO).
    pub gro: bool,
    /// `ANYWARP_RC=udp`: reliable connections made by `ibv_modify_qp` use reliable datagrams. Both ends must choose it.
    pub rc_over_udp: bool,
    /// `ANYWARP_PORTS=apart`: listeners of rdma_cm never bind the TCP port with the number of their rdma_cm port.
    pub ports_apart: bool,
    /// `ANYWARP_UC=rd`: unreliable connections use reliable datagrams. Both ends must choose it.
    pub uc_over_rd: bool,
    /// `ANYWARP_FAULTS`: a fault plan, or `@` and the name of a file that holds one.
    pub faults: Option<OsString>,
    /// `ANYWARP_FAULTS_FILE`: the name of a file that holds a fault plan.
    pub faults_file: Option<PathBuf>,
    /// `ANYWARP_QOS`: the settings of a link with virtual lanes, or `@` and the name of a file that holds them.
    pub qos: Option<OsString>,
    /// `ANYWARP_STAT`: whether `anywarp stat` may read the counters of this process.
    pub stat: bool,
    /// `ANYWARP_CAPTURE` and its limits.
    pub capture: Option<Capture>,
    /// `ANYWARP_PROFILE`: how the stream to a peer is cut into FPDUs.
    pub framing: Framing,
    /// `ANYWARP_TEST_PANIC`: whether the tests of builds with debug assertions may cause a panic.
    pub test_panic: bool,
    /// One line for each variable whose value is not one of its choices. The device logs them when it is opened.
    pub warnings: Vec<String>,
}

/// Severity of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// Nothing is written.
    Off,
    /// The device or a queue pair became unusable.
    Error,
    /// Misuse, settings and resources that cannot be used, connections that were closed in start-up.
    Warn,
    /// Connections made and lost.
    Info,
    /// Each work request.
    Debug,
    /// Each frame.
    Trace,
}

/// The device type that queries report. It does not change what is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Face {
    /// A RoCE v2 channel adapter on Ethernet, which most programs accept.
    Roce,
    /// An iWARP RNIC on Ethernet.
    Iwarp,
    /// A channel adapter on InfiniBand.
    Ib,
}

/// The transport of streams and datagrams between processes of one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// TCP connections and UDP.
    Tcp,
    /// Shared memory, after [`bounds::CARRIER_AFTER`] requests or datagrams.
    Auto,
    /// Shared memory from the first request or datagram on.
    Eager,
}

impl Transport {
    /// The number of requests or datagrams after which shared memory is used; `None` for never.
    pub fn share_after(self) -> Option<u32> {
        match self {
            Self::Tcp => None,
            Self::Auto => Some(bounds::CARRIER_AFTER),
            Self::Eager => Some(0),
        }
    }
}

/// When queue pairs share a trunk: a TCP connection that carries the streams of several queue pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrunkUse {
    /// The least number of queue pairs with the same peer process that share one.
    pub least: usize,
    /// The number of requests after which a queue pair may join.
    pub after: u32,
}

/// What happens to the pages of memory that is registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// Nothing: they are faulted in at the first access.
    Leave,
    /// They are faulted in.
    Prefault,
    /// They are faulted in and locked.
    Pin,
}

/// How the stream to a peer is cut into FPDUs (RFC 5044 section 4.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// A peer that is not anywarp gets FPDUs of one TCP segment each; two anywarp ends use large FPDUs and messages of
    /// their own.
    Aligned,
    /// Like `Aligned`, but this end does not identify itself as anywarp.
    Standard,
    /// Each peer gets FPDUs that are as large as RFC 5044 allows.
    Large,
}

impl Framing {
    /// Whether FPDUs to a peer are aligned with TCP segments.
    pub fn aligns(self, peer: Option<Peer>) -> bool {
        self != Self::Large && peer != Some(Peer::Anywarp)
    }
}

/// Where packets are captured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capture {
    /// The pcapng file.
    pub path: PathBuf,
    /// Bytes of a packet that are kept.
    pub snap_len: usize,
    /// Bytes that one process writes to the file at most.
    pub limit: u64,
}

/// Bytes that one process writes to a capture file when `ANYWARP_CAPTURE_LIMIT` is unset.
const CAPTURE_LIMIT_DEFAULT: u64 = 1 << 30;

impl Config {
    /// Reads the variables through `lookup`.
    fn from_variables(lookup: impl Fn(&str) -> Option<OsString>) -> Self {
        let lookup = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let text = |name| lookup(name).map(|value| value.to_string_lossy().into_owned());
        let mut reader = Choices {
            text: &text,
            warnings: Vec::new(),
        };
        let log = reader.level();
        // No other variable was read yet, so this is the only warning.
        let log_warning = reader.warnings.pop();
        let device_profile = text("ANYWARP_DEVICE_PROFILE");
        // A device profile of an iWARP RNIC implies that queries report one.
        let face_default = if device_profile.as_deref() == Some("siw") {
            Face::Iwarp
        } else {
            Face::Roce
        };
        Self {
            log,
            log_warning,
            address: reader.address(),
            face: reader.choice(
                "ANYWARP_FACE",
                face_default,
                &[
                    ("roce", Face::Roce),
                    ("iwarp", Face::Iwarp),
                    ("ib", Face::Ib),
                ],
            ),
            // RFC 5044 §4.4 [mpa-crc-default]: CRCs are on unless they are switched off explicitly.
            crc: reader.choice("ANYWARP_CRC", true, &[("0", false), ("1", true)]),
            transport: reader.choice(
                "ANYWARP_CARRIER",
                Transport::Auto,
                &[
                    ("auto", Transport::Auto),
                    ("tcp", Transport::Tcp),
                    ("eager", Transport::Eager),
                ],
            ),
            trunk: reader.trunk(),
            pages: match (
                reader.is_on("ANYWARP_PIN"),
                reader.is_on("ANYWARP_PREFAULT"),
            ) {
                (true, _) => Pages::Pin,
                (false, true) => Pages::Prefault,
                (false, false) => Pages::Leave,
            },
            congestion_control: text("ANYWARP_CC"),
            gso: reader.choice("ANYWARP_GSO", true, &[("1", true), ("0", false)]),
            gro: reader.choice("ANYWARP_GRO", true, &[("1", true), ("0", false)]),
            rc_over_udp: reader.choice("ANYWARP_RC", false, &[("tcp", false), ("udp", true)]),
            ports_apart: reader.choice("ANYWARP_PORTS", false, &[("tcp", false), ("apart", true)]),
            uc_over_rd: reader.choice("ANYWARP_UC", false, &[("udp", false), ("rd", true)]),
            faults: lookup("ANYWARP_FAULTS"),
            faults_file: lookup("ANYWARP_FAULTS_FILE").map(PathBuf::from),
            qos: lookup("ANYWARP_QOS"),
            stat: reader.is_on("ANYWARP_STAT"),
            capture: lookup("ANYWARP_CAPTURE").map(|path| Capture {
                path: PathBuf::from(path),
                snap_len: reader
                    .number("ANYWARP_CAPTURE_SNAPLEN")
                    .unwrap_or(usize::MAX),
                limit: reader
                    .number("ANYWARP_CAPTURE_LIMIT")
                    .unwrap_or(CAPTURE_LIMIT_DEFAULT),
            }),
            framing: reader.choice(
                "ANYWARP_PROFILE",
                Framing::Aligned,
                &[
                    ("auto", Framing::Aligned),
                    ("standard", Framing::Standard),
                    ("large", Framing::Large),
                ],
            ),
            test_panic: lookup("ANYWARP_TEST_PANIC").is_some(),
            device_profile,
            warnings: reader.warnings,
        }
    }
}

/// Reads variables that take one of a few words, and warns of other values.
struct Choices<'a> {
    text: &'a dyn Fn(&'static str) -> Option<String>,
    warnings: Vec<String>,
}

impl Choices<'_> {
    /// The value of `ANYWARP_LOG`, in lower case or capitals.
    fn level(&mut self) -> Level {
        let Some(value) = (self.text)("ANYWARP_LOG") else {
            return Level::Off;
        };
        match value.to_ascii_lowercase().as_str() {
            "off" => Level::Off,
            "error" => Level::Error,
            "warn" | "warning" => Level::Warn,
            "info" => Level::Info,
            "debug" => Level::Debug,
            "trace" => Level::Trace,
            _ => {
                self.warnings.push(format!(
                    "ANYWARP_LOG: unknown value '{value}', the log is off; the values are {}",
                    LOG_LEVELS.join(", ")
                ));
                Level::Off
            }
        }
    }

    /// Whether the value of `name` is 1, and not 0 or unset.
    fn is_on(&mut self, name: &'static str) -> bool {
        self.choice(name, false, &[("0", false), ("1", true)])
    }

    /// The number in `name`; `None` when it is unset or, with a warning, no number.
    fn number<T: FromStr>(&mut self, name: &'static str) -> Option<T> {
        let value = (self.text)(name)?;
        let number = value.parse().ok();
        if number.is_none() {
            self.warnings.push(format!(
                "{name}: '{value}' is not a number, the default is used"
            ));
        }
        number
    }

    /// The value of `ANYWARP_ADDR`.
    fn address(&mut self) -> Option<IpAddr> {
        let value = (self.text)("ANYWARP_ADDR")?;
        let address = value.parse::<IpAddr>();
        if address.is_err() {
            self.warnings.push(format!(
                "ANYWARP_ADDR: '{value}' is not an IP address, the default is used"
            ));
        }
        address.ok().map(|ip| ip.to_canonical())
    }

    /// The value of `ANYWARP_TRUNK`.
    fn trunk(&mut self) -> Option<TrunkUse> {
        let value = (self.text)("ANYWARP_TRUNK");
        let least = match value.as_deref() {
            None => bounds::TRUNK_MIN,
            Some("0") => return None,
            Some("eager") => return Some(TrunkUse { least: 1, after: 0 }),
            Some(number) => number.parse().unwrap_or_else(|_| {
                self.warnings.push(format!(
                    "ANYWARP_TRUNK: '{number}' is neither a number nor eager, the default is used"
                ));
                bounds::TRUNK_MIN
            }),
        };
        let after = bounds::CARRIER_AFTER;
        Some(TrunkUse { least, after })
    }

    /// The value of `name`; `default` when it is unset or, with a warning, not one of `choices`.
    fn choice<T: Copy>(
        &mut self,
        name: &'static str,
        default: T,
        choices: &[(&'static str, T)],
    ) -> T {
        let Some(value) = (self.text)(name) else {
            return default;
        };
        if let Some((_, chosen)) = choices.iter().find(|(word, _)| *word == value) {
            return *chosen;
        }
        let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
        self.warnings.push(format!(
            "{name}: unknown value '{value}', the default is used; the values are {}",
            words.join(", ")
        ));
        default
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;
    use std::path::Path;

    use anywarp_core::env::{Reader, VARIABLES};

    use super::*;

    fn with(variables: &[(&str, &str)]) -> Config {
        Config::from_variables(|name| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn crcs_are_on_unless_they_are_switched_off() {
        // RFC 5044 §4.4 [mpa-crc-default]
        assert!(with(&[]).crc);
        for value in ["", "1", "no"] {
            assert!(with(&[("ANYWARP_CRC", value)]).crc, "{value:?}");
        }
        assert!(!with(&[("ANYWARP_CRC", "0")]).crc);
    }

    #[test]
    fn an_unknown_value_is_reported_and_the_default_used() {
        let config = with(&[("ANYWARP_CARRIER", "pigeon"), ("ANYWARP_UC", "rd")]);
        assert_eq!(config.transport, Transport::Auto);
        assert!(config.uc_over_rd);
        assert_eq!(
            config.warnings,
            [
                "ANYWARP_CARRIER: unknown value 'pigeon', the default is used; the values are auto, tcp, eager"
            ]
        );
        assert!(with(&[("ANYWARP_CARRIER", "")]).warnings.is_empty());
    }

    #[test]
    fn an_unknown_value_is_as_if_unset() {
        let bad = [
            "ANYWARP_CRC",
            "ANYWARP_PIN",
            "ANYWARP_PREFAULT",
            "ANYWARP_STAT",
            "ANYWARP_CAPTURE_SNAPLEN",
            "ANYWARP_CAPTURE_LIMIT",
        ];
        let mut variables = bad.map(|name| (name, "maybe")).to_vec();
        variables.push(("ANYWARP_CAPTURE", "file"));
        let config = with(&variables);
        let unset = with(&[("ANYWARP_CAPTURE", "file")]);
        let of = |c: &Config| (c.crc, c.pages, c.stat, c.capture.clone());
        assert_eq!(of(&config), of(&unset));
        assert_eq!(config.warnings.len(), bad.len());
        assert_eq!(
            config.warnings[0],
            "ANYWARP_CRC: unknown value 'maybe', the default is used; the values are 0, 1"
        );
        for name in bad {
            let named = |w: &&String| w.starts_with(&format!("{name}: "));
            assert_eq!(config.warnings.iter().filter(named).count(), 1, "{name}");
        }
        assert!(with(&[("ANYWARP_STAT", "1")]).stat);
        assert_eq!(with(&[("ANYWARP_PREFAULT", "1")]).pages, Pages::Prefault);
        assert_eq!(with(&[("ANYWARP_PIN", "1")]).pages, Pages::Pin);
    }

    #[test]
    fn an_unknown_level_of_the_log_is_reported() {
        for name in LOG_LEVELS {
            let config = with(&[("ANYWARP_LOG", name)]);
            assert_eq!(config.log == Level::Off, name == "off");
            assert_eq!(config.log_warning, None);
        }
        assert_eq!(with(&[("ANYWARP_LOG", "INFO")]).log, Level::Info);
        let config = with(&[("ANYWARP_LOG", "foo")]);
        assert_eq!(config.log, Level::Off);
        assert_eq!(
            config.log_warning.as_deref(),
            Some(
                "ANYWARP_LOG: unknown value 'foo', the log is off; the values are off, error, warn, info, debug, trace"
            )
        );
        assert!(config.warnings.is_empty());
    }

    #[test]
    fn an_address_that_is_none_is_reported() {
        let of = |value| with(&[("ANYWARP_ADDR", value)]);
        for value in ["pigeon", "10.0.0.1,10.0.0.2", "10.0.0.1/8", "fe80::1%lo"] {
            let config = of(value);
            assert_eq!(config.address, None);
            assert_eq!(
                config.warnings,
                [format!(
                    "ANYWARP_ADDR: '{value}' is not an IP address, the default is used"
                )]
            );
        }
        let own = Some(IpAddr::from([10, 0, 0, 1]));
        assert_eq!(
            [of("10.0.0.1").address, of("::ffff:10.0.0.1").address],
            [own; 2]
        );
        assert!(of("fd00::1").warnings.is_empty() && of("").warnings.is_empty());
    }

    #[test]
    fn trunks_are_used_from_a_number_of_connections_on() {
        let of = |value| with(&[("ANYWARP_TRUNK", value)]).trunk;
        let from = |least, after| Some(TrunkUse { least, after });
        let usual = from(bounds::TRUNK_MIN, bounds::CARRIER_AFTER);
        assert_eq!([of(""), of("many")], [usual; 2]);
        assert_eq!([of("0"), of("eager")], [None, from(1, 0)]);
        assert_eq!(of("3"), from(3, bounds::CARRIER_AFTER));
        assert_eq!(with(&[("ANYWARP_TRUNK", "many")]).warnings.len(), 1);
    }

    #[test]
    fn segmentation_offload_is_switched_off_for_each_direction() {
        let of = |variables: &[(&str, &str)]| {
            let config = with(variables);
            (config.gso, config.gro)
        };
        assert_eq!(of(&[]), (true, true));
        assert_eq!(of(&[("ANYWARP_GSO", "0")]), (false, true));
        assert_eq!(of(&[("ANYWARP_GRO", "0")]), (true, false));
        assert_eq!(with(&[("ANYWARP_GRO", "no")]).warnings.len(), 1);
    }

    #[test]
    fn the_profile_of_an_iwarp_rnic_implies_its_face() {
        let profile = ("ANYWARP_DEVICE_PROFILE", "siw");
        assert_eq!(with(&[profile]).face, Face::Iwarp);
        assert_eq!(with(&[profile, ("ANYWARP_FACE", "ib")]).face, Face::Ib);
        assert_eq!(with(&[]).face, Face::Roce);
    }

    #[test]
    fn exactly_the_documented_variables_of_the_library_are_read() {
        let read = RefCell::new(BTreeSet::new());
        let _ = Config::from_variables(|name| {
            read.borrow_mut().insert(name.to_owned());
            // The limits of a capture are read only with a file.
            (name == "ANYWARP_CAPTURE").then(|| "file".into())
        });
        let documented = VARIABLES.iter().filter(|v| v.reader == Reader::Device);
        let documented: BTreeSet<_> = documented.map(|v| v.name.to_owned()).collect();
        assert_eq!(read.into_inner(), documented);
    }

    /// Calls `each` with every line of the source files below `folder`.
    fn lines(folder: &Path, each: &mut dyn FnMut(&Path, &str)) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                lines(&path, each);
            } else if path.extension().is_some_and(|e| e == "rs" || e == "c") {
                let text = std::fs::read_to_string(&path).unwrap();
                text.lines().for_each(|line| each(&path, line));
            }
        }
    }

    /// The files listed here may read the environment: they check whether the program has more privileges than its
    /// caller. `pages.rs` does not need the check: it looks for valgrind, which cannot run such a program.
    #[test]
    fn no_other_file_of_the_libraries_reads_the_environment() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let others = [
            "engine/src/config.rs",
            "engine/src/sys/pages.rs",
            "fi/src/log.rs",
            "sockets/src/log.rs",
            "sockets/src/policy.rs",
        ];
        for folder in [
            "core/src",
            "engine/src",
            "abi/src",
            "buffers/src",
            "fi/src",
            "exs/src",
            "exs-async/src",
            "sockets/src",
            "sockets-base/src",
            "cli/shim",
        ] {
            lines(&crates.join(folder), &mut |path, line| {
                let reads = ["env::var", "var_os(", "getenv("];
                if reads.iter().any(|r| line.contains(r)) && !line.contains("secure_getenv(") {
                    assert!(
                        others.iter().any(|o| path.ends_with(o)),
                        "{}: {line}",
                        path.display()
                    );
                }
            });
        }
    }

    #[test]
    fn each_variable_that_a_program_of_ours_names_is_documented() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut found = 0;
        for folder in ["core/src", "engine/src", "abi/src", "cli"] {
            lines(&crates.join(folder), &mut |path, line| {
                for word in line.split('"').skip(1).step_by(2) {
                    let name = word.strip_prefix("ANYWARP_").unwrap_or_default();
                    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_')
                    {
                        continue;
                    }
                    found += 1;
                    assert!(
                        VARIABLES.iter().any(|v| v.name == word),
                        "{}: {word}",
                        path.display()
                    );
                }
            });
        }
        assert!(found > 20, "{found}");
    }
}
