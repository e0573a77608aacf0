//! Reads the settings of a link from text.

use std::fmt;
use std::path::PathBuf;

/// Number of service levels.
pub const LEVELS: usize = 16;
/// Number of virtual lanes for data. InfiniBand's sixteenth lane is for the subnet manager.
pub const LANES: usize = 15;

/// Bytes of one unit of weight (IBA 7.6.9.1).
const WEIGHT_UNIT: u16 = 64;
/// Bytes of one unit of `qos_high_limit` (IBA 7.6.9.1).
const LIMIT_UNIT: u32 = 4096;
/// The value of `qos_high_limit` that stands for no limit (IBA 7.6.9.1).
const NO_LIMIT: u8 = 255;
/// Largest number of entries of a table (IBA 7.6.9.1).
const ENTRIES_MAX: usize = 64;

/// The generations of InfiniBand, and the data rate of a link with four physical lanes in bit/s.
const GENERATIONS: [(&str, u64); 5] = [
    ("SDR", 8_000_000_000),
    ("DDR", 16_000_000_000),
    ("QDR", 32_000_000_000),
    ("FDR", 54_545_454_545),
    ("EDR", 100_000_000_000),
];

/// The names of the settings.
const NAMES: &str =
    "rate, link, qos_max_vls, qos_high_limit, qos_vlarb_high, qos_vlarb_low, qos_sl2vl";

/// A lane in a table, with its weight in units of 64 bytes per round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The lane.
    pub lane: u8,
    /// Its weight; 0: it is not served from this table.
    pub weight: u8,
}

impl Share {
    /// The bytes that the lane may send in its turn.
    pub(super) fn bytes(self) -> i64 {
        i64::from(self.weight) * i64::from(WEIGHT_UNIT)
    }
}

/// The settings of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Bytes per second.
    pub rate: u64,
    /// The file by which processes of one host share the link; `None`: each process has its own.
    pub link: Option<PathBuf>,
    /// The table of high priority.
    pub high: Vec<Share>,
    /// The table of low priority.
    pub low: Vec<Share>,
    /// Bytes of high priority that may be sent while low priority waits; `None`: without limit. 0 allows one packet.
    pub high_limit: Option<u32>,
    /// The lane of each service level.
    pub lanes: [u8; LEVELS],
}

/// An error in the text of the settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrong(String);

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Wrong {}

fn wrong<T>(what: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong(what.into()))
}

/// The service level of a traffic class: its upper three bits, as RoCE derives the priority of a packet.
pub fn level_of_class(class: u8) -> u8 {
    class >> 5
}

impl Settings {
    /// Reads the settings: `NAME VALUE` or `NAME=VALUE`, each on its own line or separated by semicolons. Lines that begin with
    /// `#` are comments.
    ///
    /// # Errors
    /// The first error in the text, and what to write instead.
    pub fn parse(text: &str) -> Result<Self, Wrong> {
        let (mut rate, mut link, mut lanes_used, mut limit) = (None, None, None, 0);
        let (mut high, mut low, mut map) = (None, None, None);
        let lines = text.lines().filter(|l| !l.trim_start().starts_with('#'));
        for part in lines.flat_map(|line| line.split(';')) {
            let part = part.trim();
            if part.is_empty() {
                continue;
            }
            let at = part.find(|c: char| c == '=' || c.is_whitespace());
            let Some((name, value)) = at.and_then(|at| part.split_at_checked(at)) else {
                return wrong(format!(
                    "'{part}' has no value: write NAME=VALUE; the names are {NAMES}"
                ));
            };
            let value = value.trim_start_matches(|c: char| c == '=' || c.is_whitespace());
            match name {
                "rate" => rate = Some(read_rate(value)?),
                "link" if value.starts_with('/') => link = Some(PathBuf::from(value)),
                "link" => {
                    return wrong(format!(
                        "link={value}: give the whole path of a file, such as /dev/shm/link; processes that name the \
                         same file share the link"
                    ));
                }
                "qos_max_vls" => lanes_used = Some(number(name, value, 1, 15)?),
                "qos_high_limit" => limit = number(name, value, 0, 255)?,
                "qos_vlarb_high" => high = Some(table(name, value)?),
                "qos_vlarb_low" => low = Some(table(name, value)?),
                "qos_sl2vl" => map = Some(list(name, value)?),
                other => return wrong(format!("'{other}' is no setting: there are {NAMES}")),
            }
        }
        let Some(rate) = rate else {
            return wrong(
                "rate is missing: lanes matter only on a link that is slower than its senders; add rate=1Gbit/s, or \
                 another rate",
            );
        };
        let named = high.iter().chain(&low).flatten();
        let highest = named.map(|share| share.lane).max().unwrap_or(0);
        let lanes_used = lanes_used.unwrap_or(highest + 1);
        if highest >= lanes_used {
            return wrong(format!(
                "lane {highest} is in a table, and qos_max_vls={lanes_used} has the lanes 0 to {}: increase \
                 qos_max_vls",
                lanes_used - 1
            ));
        }
        let low = low.unwrap_or_else(|| match &high {
            None => (0..lanes_used)
                .map(|lane| Share { lane, weight: 1 })
                .collect(),
            Some(_) => Vec::new(),
        });
        let settings = Self {
            rate,
            link,
            high: high.unwrap_or_default(),
            low,
            high_limit: (limit != NO_LIMIT).then(|| u32::from(limit) * LIMIT_UNIT),
            lanes: map.unwrap_or_else(|| {
                std::array::from_fn(|level| u8::try_from(level).unwrap_or(0) % lanes_used)
            }),
        };
        settings.check(lanes_used)?;
        Ok(settings)
    }

    /// Refuses service levels whose lanes would never be served.
    fn check(&self, lanes_used: u8) -> Result<(), Wrong> {
        for (level, &lane) in self.lanes.iter().enumerate() {
            if lane >= lanes_used {
                return wrong(format!(
                    "qos_sl2vl gives service level {level} lane {lane}, and there are lanes 0 to {}: increase \
                     qos_max_vls, or name another lane",
                    lanes_used - 1
                ));
            }
            let tables = self.high.iter().chain(&self.low);
            if !tables
                .clone()
                .any(|share| share.lane == lane && share.weight > 0)
            {
                return wrong(format!(
                    "lane {lane} of service level {level} has no weight and would never send: add {lane}:1 to \
                     qos_vlarb_low, or give the level another lane in qos_sl2vl"
                ));
            }
        }
        Ok(())
    }

    /// A hash of all settings except the file. Processes that share a link compare it to detect different settings.
    pub fn fingerprint(&self) -> u64 {
        let limit = self.high_limit.map_or(u64::MAX, u64::from);
        let mut words = vec![self.rate, limit, self.high.len() as u64];
        let shares = self.high.iter().chain(&self.low);
        words.extend(shares.map(|s| u64::from(s.lane) << 8 | u64::from(s.weight)));
        words.extend(self.lanes.map(u64::from));
        // FNV-1a over words
        words.iter().fold(0xcbf2_9ce4_8422_2325, |hash, word| {
            (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }
}

fn number(name: &str, value: &str, least: u8, most: u8) -> Result<u8, Wrong> {
    match value.parse() {
        Ok(n) if (least..=most).contains(&n) => Ok(n),
        _ => wrong(format!(
            "{name}={value}: give a number from {least} to {most}"
        )),
    }
}

/// Reads a rate in bytes per second.
fn read_rate(value: &str) -> Result<u64, Wrong> {
    let words = || {
        let generations = GENERATIONS.map(|(name, _)| name).join(", ");
        format!(
            "rate={value}: give a number and one of kbit/s, Mbit/s, Gbit/s, or one of {generations}"
        )
    };
    if let Some((_, bits)) = GENERATIONS.iter().find(|(name, _)| *name == value) {
        return Ok(bits / 8);
    }
    let scales = [("kbit/s", 1e3), ("Mbit/s", 1e6), ("Gbit/s", 1e9)];
    let bits = scales.iter().find_map(|(unit, scale)| {
        let digits = value.strip_suffix(unit)?.trim_end();
        Some(digits.parse::<f64>().ok()? * scale)
    });
    match bits {
        Some(bits) if (8e4..=1e12).contains(&bits) => Ok((bits / 8.0) as u64),
        Some(_) => wrong(format!(
            "rate={value}: give a rate from 80kbit/s to 1000Gbit/s"
        )),
        None => wrong(words()),
    }
}

/// Reads a table: entries `LANE:WEIGHT`, separated by commas.
fn table(name: &str, value: &str) -> Result<Vec<Share>, Wrong> {
    let mut shares = Vec::new();
    for entry in value.split(',').map(str::trim).filter(|e| !e.is_empty()) {
        let pair = entry.split_once(':');
        let read = pair.and_then(|(lane, weight)| {
            let lane = lane.parse::<u8>().ok()?;
            let weight = weight.parse::<u8>().ok()?;
            (usize::from(lane) < LANES).then_some(Share { lane, weight })
        });
        let Some(share) = read else {
            return wrong(format!(
                "{name}: '{entry}' is no entry: write LANE:WEIGHT with a lane from 0 to {} and a weight from 0 to \
                 255, such as 0:1,1:4",
                LANES - 1
            ));
        };
        shares.push(share);
    }
    if shares.len() > ENTRIES_MAX {
        return wrong(format!("{name}: a table has at most {ENTRIES_MAX} entries"));
    }
    Ok(shares)
}

/// Reads the lanes of all service levels.
fn list(name: &str, value: &str) -> Result<[u8; LEVELS], Wrong> {
    let lanes: Result<Vec<u8>, Wrong> = value
        .split(',')
        .map(|lane| number(name, lane.trim(), 0, 14))
        .collect();
    let lanes = lanes?;
    <[u8; LEVELS]>::try_from(lanes.as_slice()).or_else(|_| {
        wrong(format!(
            "{name} has {} lanes: give {LEVELS} with commas, one for each service level",
            lanes.len()
        ))
    })
}
