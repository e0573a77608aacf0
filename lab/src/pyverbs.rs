//! `cargo lab pyverbs`: runs rdma-core's own tests, as packaged by the distribution, with anywarp's libraries.
//!
//! The tests run three times: with the defaults, with the GID of an IPv6 address, and with the device shown as an iWARP RNIC.
//! `tests/pyverbs/expect` lists the tests that do not pass, with the reason. Any other failure is an error, and so is a line
//! of that file that is not needed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use xtask::{Result, sh};

/// The folder in which Debian's python3-pyverbs installs the tests.
const SOURCE: &str = "/usr/share/doc/rdma-core/tests";

/// The tests of other vendors' devices, which are skipped.
const VENDORS: [&str; 3] = ["test_mlx5_", "test_efa", "test_cuda_"];

/// The time limit of one module in seconds.
const TIME_LIMIT: &str = "120";

/// The settings of the device in one pass.
struct Pass {
    name: &'static str,
    device_ip: &'static str,
    face: &'static str,
}

const PASSES: [Pass; 3] = [
    Pass {
        name: "roce",
        device_ip: "127.0.0.1",
        face: "roce",
    },
    Pass {
        name: "ipv6",
        device_ip: "::1",
        face: "roce",
    },
    Pass {
        name: "iwarp",
        device_ip: "127.0.0.1",
        face: "iwarp",
    },
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    Ok,
    Skip,
    Fail,
    Maybe,
}

/// A line of the file of expectations.
#[derive(Debug)]
struct Line {
    word: Word,
    /// The pass that the line applies to. `None`: all.
    pass: Option<String>,
    pattern: String,
    number: usize,
    used: bool,
}

pub(crate) fn run(only: Option<&str>) -> Result {
    let folder = sh::target().join("pyverbs");
    unpack(&folder)?;
    huge_pages();
    let text = fs::read_to_string(sh::root().join("tests/pyverbs/expect"))?;
    let mut lines = parse(&text)?;
    let mut wrong = Vec::new();
    let mut total = 0;
    for pass in &PASSES {
        let mut counts: BTreeMap<String, [usize; 3]> = BTreeMap::new();
        for module in modules(&folder)? {
            if only.is_some_and(|part| !module.contains(part)) {
                continue;
            }
            let output = one(&folder, &module, pass)?;
            let mut seen = 0;
            for line in output.lines() {
                let Some((word, id, rest)) = outcome(line) else {
                    continue;
                };
                seen += 1;
                let slot = counts.entry(module.clone()).or_default();
                match word {
                    Word::Ok => slot[0] += 1,
                    Word::Skip => slot[1] += 1,
                    _ => slot[2] += 1,
                }
                if let Some(why) = judge(&mut lines, pass.name, word, id) {
                    wrong.push(format!("{}: {id}: {why} {rest}", pass.name));
                    if word == Word::Fail {
                        println!("{output}");
                    }
                }
            }
            if seen == 0 {
                println!("{output}");
                wrong.push(format!("{}: {module}: no test was run", pass.name));
            }
        }
        let mut sum = [0; 3];
        for (module, counts) in &counts {
            let [ok, skipped, failed] = counts;
            println!(
                "{:6} {module:24} {ok:3} ok {skipped:3} skipped {failed:3} failed",
                pass.name
            );
            for (sum, n) in sum.iter_mut().zip(counts) {
                *sum += n;
            }
        }
        let [ok, skipped, failed] = sum;
        println!(
            "{:6} {ok} ok, {skipped} skipped, {failed} failed",
            pass.name
        );
        total += ok;
    }
    if only.is_none() {
        for line in lines.iter().filter(|l| !l.used) {
            wrong.push(format!(
                "tests/pyverbs/expect:{}: no test needs this line",
                line.number
            ));
        }
    }
    for line in &wrong {
        println!("FAIL  {line}");
    }
    println!("{total} passed, {} failed", wrong.len());
    if wrong.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{} results or lines of tests/pyverbs/expect are wrong, see above",
        wrong.len()
    )
    .into())
}

/// Returns why an outcome is unexpected, or `None` if it is expected.
fn judge(lines: &mut [Line], pass: &str, word: Word, id: &str) -> Option<&'static str> {
    let mut expected = Word::Ok;
    for line in lines {
        let here = line.pass.as_ref().is_none_or(|p| p == pass);
        if here && matches(&line.pattern, id) {
            line.used |= word != Word::Ok || line.word == Word::Maybe;
            expected = line.word;
            break;
        }
    }
    match (expected, word) {
        (a, b) if a == b => None,
        (Word::Maybe, Word::Ok | Word::Skip) => None,
        (_, Word::Ok) => Some("passes: remove its line from the expectations"),
        (_, Word::Skip) => Some("skips itself"),
        _ => Some("fails"),
    }
}

fn parse(text: &str) -> Result<Vec<Line>> {
    let mut lines = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let mut words = line.split_whitespace();
        let (Some(word), Some(pattern), Some(_reason)) = (words.next(), words.next(), words.next())
        else {
            return Err(format!("tests/pyverbs/expect:{}: not WORD PATTERN REASON", i + 1).into());
        };
        let (word, pass) = match word.split_once('@') {
            Some((word, pass)) => (word, Some(pass.to_owned())),
            None => (word, None),
        };
        let word = match word {
            "skip" => Word::Skip,
            "maybe" => Word::Maybe,
            "fail" => Word::Fail,
            _ => return Err(format!("tests/pyverbs/expect:{}: unknown word {word}", i + 1).into()),
        };
        lines.push(Line {
            word,
            pass,
            pattern: pattern.to_owned(),
            number: i + 1,
            used: false,
        });
    }
    Ok(lines)
}

/// Parses a line of tests/pyverbs/run.py: `ok ID`, `skip ID reason`, `fail ID`.
fn outcome(line: &str) -> Option<(Word, &str, &str)> {
    let (word, rest) = line.split_once(' ')?;
    let word = match word {
        "ok" => Word::Ok,
        "skip" => Word::Skip,
        "fail" => Word::Fail,
        _ => return None,
    };
    let (id, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    Some((word, id.strip_prefix("tests.")?, rest))
}

/// Returns whether `text` matches `pattern`, in which * matches any characters.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((head, tail)) => text.strip_prefix(head).is_some_and(|rest| {
            (0..=rest.len()).any(|at| rest.get(at..).is_some_and(|r| matches(tail, r)))
        }),
    }
}

/// Returns the folder with the tests. If documentation is not installed (as in small containers), extracts it from the package.
fn source(folder: &Path) -> Result<PathBuf> {
    let installed = Path::new(SOURCE);
    if installed.is_dir() {
        return Ok(installed.into());
    }
    let package = folder.join("package");
    if package.exists() {
        fs::remove_dir_all(&package)?;
    }
    fs::create_dir_all(&package)?;
    let mut download = Command::new("apt-get");
    download.args(["download", "-q", "python3-pyverbs"]);
    sh::run(download.current_dir(&package))?;
    sh::run(
        Command::new("sh")
            .args(["-c", "dpkg-deb --extract ./*.deb ."])
            .current_dir(&package),
    )?;
    Ok(package.join(SOURCE.trim_start_matches('/')))
}

/// Copies the tests and unpacks them, because the distribution compresses large files.
fn unpack(folder: &Path) -> Result {
    let tests = folder.join("tests");
    if tests.exists() {
        fs::remove_dir_all(&tests)?;
    }
    fs::create_dir_all(&tests)?;
    let source = source(folder)?;
    for entry in fs::read_dir(source)? {
        let path = entry?.path();
        if let Some(name) = path.file_name() {
            fs::copy(&path, tests.join(name))?;
        }
    }
    let packed: Vec<_> = fs::read_dir(&tests)?
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "gz"))
        .collect();
    if packed.is_empty() {
        return Ok(());
    }
    sh::run(Command::new("gunzip").args(packed))
}

/// Reserves huge pages for the tests that need them. Without the privilege to do so, those tests run without huge pages.
fn huge_pages() {
    const FILE: &str = "/proc/sys/vm/nr_hugepages";
    let few = fs::read_to_string(FILE).is_ok_and(|t| t.trim().parse().is_ok_and(|n: u32| n < 8));
    if few {
        let _not_root = fs::write(FILE, "8");
    }
}

fn modules(folder: &Path) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder.join("tests"))? {
        let name = entry?.file_name();
        let Some(name) = name.to_str().and_then(|n| n.strip_suffix(".py")) else {
            continue;
        };
        if name.starts_with("test_") && !VENDORS.iter().any(|v| name.starts_with(v)) {
            all.push(name.to_owned());
        }
    }
    all.sort();
    Ok(all)
}

/// Runs one module and returns its output.
fn one(folder: &Path, module: &str, pass: &Pass) -> Result<String> {
    let output = Command::new("timeout")
        .arg(TIME_LIMIT)
        .arg(sh::dist().join("bin/anywarp"))
        .args(["run", "--device-ip", pass.device_ip, "--"])
        .arg("/usr/bin/python3")
        .arg(sh::root().join("tests/pyverbs/run.py"))
        .arg(folder)
        .args([module, "--dev", "anywarp0", "--gid", "0"])
        .env("ANYWARP_FACE", pass.face)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        text.push_str(&format!("fail tests.{module} {}\n", output.status));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_anything() {
        assert!(matches("*xrc*", "test_cq.A.test_xrc_b"));
        assert!(matches("test_flow.*", "test_flow.A.b"));
        assert!(matches("a*b*c", "aXbYc"));
        assert!(!matches("a*b*c", "aXbY"));
        assert!(!matches("test_flow.*", "test_flo.A"));
    }

    #[test]
    fn passed_tests_need_no_line_and_failures_are_reported() {
        let mut lines = parse("skip a.* why\nmaybe b.* why\nskip@ipv6 c.* why").unwrap();
        let mut judge = |pass, word, id| judge(&mut lines, pass, word, id);
        assert_eq!(judge("roce", Word::Skip, "a.x"), None);
        assert!(judge("roce", Word::Ok, "a.x").is_some());
        assert_eq!(judge("roce", Word::Ok, "b.x"), None);
        assert_eq!(judge("roce", Word::Skip, "b.x"), None);
        assert!(judge("roce", Word::Fail, "b.x").is_some());
        assert!(judge("roce", Word::Skip, "c.x").is_some());
        assert_eq!(judge("ipv6", Word::Skip, "c.x"), None);
        assert!(judge("roce", Word::Fail, "d.x").is_some());
        assert!(parse("skip a").is_err());
    }
}
