//! `cargo lab study`: tests `anywarp study` with a short run of each of its runners: the files that it writes, the
//! continuation of an interrupted run, and error cases.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::perf::waiting_port;
use crate::process::Process;
use xtask::{Result, sh};

/// The time limit of one command.
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// A figure of each runner. A runner is a program that measures the points of an experiment.
const FIGURES: [&str; 13] = [
    "pb:1b",
    "pb:3a",
    "pb:6c",
    "hc:5",
    "hc:10",
    "hc:ttfb",
    "hc:rules",
    "mc:4b",
    "exs:5",
    "thesis:3.8",
    "thesis:4.14",
    "thesis:5.11",
    "thesis:6.12",
];

/// A script that parses a page and its drawings as XML, and checks that every figure is in it.
const PAGE: &str = r#"
import sys, xml.etree.ElementTree as tree
text = open(sys.argv[1], encoding="utf-8").read()
page = tree.fromstring(text.split("\n", 1)[1])
for figure in sys.argv[2:]:
    section = page.find(f".//section[@id='{figure}']")
    assert section is not None, figure
    drawing = section.find(".//{http://www.w3.org/2000/svg}svg")
    assert drawing is not None and len(list(drawing)) > 10, f"{figure}: no drawing"
    assert section.find(".//table") is not None, f"{figure}: no table"
for element in page.iter():
    for name in ("src", "href"):
        value = element.get(name, "")
        assert "//" not in value, f"not of this folder: {value}"
"#;

/// Appended to a page: a script that measures the drawings as a browser shows them, and writes what is wrong into the page.
const MEASURE: &str = r#"
<script>
const wrong = [];
let drawings = 0;
for (const svg of document.querySelectorAll("section svg")) {
  drawings += 1;
  const name = svg.closest("section").id, box = svg.getBoundingClientRect();
  if (box.width < 200 || box.height < 80) wrong.push(`${name}: a drawing of ${box.width} x ${box.height}`);
  for (const text of svg.querySelectorAll("text")) {
    const at = text.getBoundingClientRect();
    if (at.left < box.left - 1 || at.right > box.right + 1 || at.top < box.top - 1 || at.bottom > box.bottom + 1)
      wrong.push(`${name}: "${text.textContent}" is cut off`);
  }
}
if (document.documentElement.scrollWidth > innerWidth) wrong.push(`${document.documentElement.scrollWidth} pixels wide`);
const seen = document.createElement("p");
seen.id = "measured";
seen.textContent = `${drawings} drawings: ${wrong.join("; ") || "nothing wrong"}`;
document.body.append(seen);
</script>
"#;

pub(crate) fn run(browser: bool) -> Result {
    let folder = sh::target().join("study");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let mut tally = sh::Tally::default();
    tally.report("each runner", each_runner(&folder));
    tally.report("a second run measures nothing", nothing_new(&folder));
    tally.report(
        "an interrupted run is continued",
        goes_on(&folder.join("interrupted")),
    );
    tally.report("killed", killed(&folder.join("killed")));
    tally.report(
        "a server on another host",
        elsewhere(&folder.join("elsewhere")),
    );
    tally.report("side by side", side_by_side(&folder.join("beside")));
    if browser {
        tally.report("the page in a browser", shown(&folder));
    }
    tally.report("list", list());
    tally.report("hints", hints(&folder));
    tally.report("invalid arguments are refused", refused(&folder));
    tally.end("tests of studies")
}

fn anywarp(words: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(sh::dist().join("bin/anywarp"));
    command.arg("study").args(words);
    if words.first() != Some(&"list") {
        command.arg("--report").arg(folder);
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn output(words: &[&str], folder: &Path, expected: i32) -> Result<Output> {
    let output = Process::start(&mut anywarp(words, folder))?.output(TIME_LIMIT)?;
    if output.status.code() != Some(expected) {
        let text = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        return Err(format!("{words:?}: {}: {text}", output.status).into());
    }
    Ok(output)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn smoke() -> Vec<&'static str> {
    ["run", "--smoke", "--quiet"]
        .into_iter()
        .chain(FIGURES)
        .collect()
}

fn each_runner(folder: &Path) -> Result {
    let output = output(&smoke(), folder, 0)?;
    let table = text(&output.stdout);
    for figure in FIGURES {
        if !table
            .lines()
            .any(|line| line.split(' ').next() == Some(figure))
        {
            return Err(format!("the table has no line for {figure}:\n{table}").into());
        }
        let name = figure.replace(':', "-");
        let csv = fs::read_to_string(folder.join(format!("{name}.csv")))?;
        let columns: BTreeSet<usize> = csv.lines().map(|line| line.split(',').count()).collect();
        if csv.lines().count() < 3 || columns.len() != 1 {
            return Err(format!("{name}.csv has not the form of a table:\n{csv}").into());
        }
    }
    let names = FIGURES.map(|figure| figure.replace(':', "-"));
    sh::run(
        Command::new("python3")
            .args(["-c", PAGE])
            .arg(folder.join("index.html"))
            .args(&names),
    )?;
    sh::run(
        Command::new("python3")
            .args(["-m", "json.tool"])
            .arg(folder.join("study.json"))
            .stdout(Stdio::null()),
    )
}

fn samples(folder: &Path) -> Result<usize> {
    Ok(fs::read_to_string(folder.join("samples.jsonl"))?
        .lines()
        .count())
}

fn nothing_new(folder: &Path) -> Result {
    let before = samples(folder)?;
    output(&smoke(), folder, 0)?;
    if samples(folder)? != before {
        return Err("existing samples were measured again".into());
    }
    Ok(())
}

/// Interrupts a run. The same command must then measure only the missing samples.
fn goes_on(folder: &Path) -> Result {
    const FIGURE: [&str; 4] = ["run", "--smoke", "--quiet", "pb:8a"];
    let process = Process::start(&mut anywarp(&FIGURE, folder))?;
    let end = Instant::now() + TIME_LIMIT;
    while samples(folder).unwrap_or_default() < 3 {
        if Instant::now() > end {
            return Err("no sample was measured".into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    process.signal(Signal::INT);
    let stopped = process.output(TIME_LIMIT)?;
    if stopped.status.code() != Some(130)
        || !text(&stopped.stderr).contains("the same command continues here")
    {
        return Err(format!("{}: {}", stopped.status, text(&stopped.stderr)).into());
    }
    let first = samples(folder)?;
    output(&FIGURE, folder, 0)?;
    let points: BTreeSet<String> = fs::read_to_string(folder.join("samples.jsonl"))?
        .lines()
        .filter_map(|line| {
            Some(
                line.split("\"point\":\"")
                    .nth(1)?
                    .split('"')
                    .next()?
                    .to_owned(),
            )
        })
        .collect();
    if points.len() != samples(folder)? || first >= points.len() {
        return Err(format!(
            "{first} samples, then {} of {} points",
            samples(folder)?,
            points.len()
        )
        .into());
    }
    Ok(())
}

/// Returns the child processes of a process.
fn children(parent: u32) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let Ok(pid) = name.parse::<u32>() else {
            continue;
        };
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // Fields: PID (NAME) STATE PARENT
        let after = stat.rsplit(") ").next().unwrap_or_default();
        if after.split(' ').nth(1) == Some(parent.to_string().as_str()) {
            found.push(pid);
        }
    }
    Ok(found)
}

/// A killed run must leave no server running: not one that has just been started, nor one that measures.
fn killed(folder: &Path) -> Result {
    for least in [0, 2] {
        let mut process = Process::start(&mut anywarp(
            &["run", "--quick", "--quiet", "--fresh", "pb:8a"],
            folder,
        ))?;
        let end = Instant::now() + TIME_LIMIT;
        let servers = loop {
            let servers = children(process.id())?;
            if !servers.is_empty() && samples(folder).unwrap_or_default() >= least {
                break servers;
            }
            if Instant::now() > end || process.poll()?.is_some() {
                return Err(format!("{} servers, less than {least} samples", servers.len()).into());
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        process.signal(Signal::KILL);
        process.output(TIME_LIMIT)?;
        let end = Instant::now() + Duration::from_secs(5);
        for pid in servers {
            // A zombie that its new parent has not reaped yet counts as exited.
            while fs::read_to_string(format!("/proc/{pid}/stat"))
                .is_ok_and(|stat| !stat.contains(") Z "))
            {
                if Instant::now() > end {
                    return Err(format!("process {pid} still exists").into());
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
    Ok(())
}

/// With a remote server, points that need control of both ends are blank. After the server has ended, the other points fail.
fn elsewhere(folder: &Path) -> Result {
    let mut server = Process::start(
        Command::new(sh::dist().join("bin/anywarp"))
            .args(["blast", "--server", "--forever", "-p", "0"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped()),
    )?;
    let port = waiting_port(&server.first_line(TIME_LIMIT, false)?)?.to_string();
    let words = [
        "run",
        "--smoke",
        "-q",
        "pb:8a",
        "--host",
        "127.0.0.1",
        "--port",
        &port,
    ];
    output(&words, folder, 0)?;
    let json = fs::read_to_string(folder.join("study.json"))?;
    let csv = fs::read_to_string(folder.join("pb-8a.csv"))?;
    if !json.contains("two machines have no memory in common")
        || !csv.contains(",tcp,")
        || csv.contains(",memory,")
    {
        return Err(csv.into());
    }
    drop(server);
    // The run says why its points failed.
    let mut again = words.to_vec();
    again.push("--fresh");
    let table = text(&output(&again, folder, 1)?.stdout);
    if !table.contains("pb:8a        failed: ") {
        return Err(format!("no reason:\n{table}").into());
    }
    Ok(())
}

/// Two carriers and plain TCP on a network that delays packets. No message can be faster than the delay.
fn side_by_side(folder: &Path) -> Result {
    const DELAY_US: f64 = 2000.0;
    let words = [
        "run",
        "--smoke",
        "-q",
        "pb:1b",
        "--vary",
        "carrier=tcp,udp,kernel",
        "--vary",
        "mtu=1500",
        "--vary",
        "network-delay=2ms",
    ];
    output(&words, folder, 0)?;
    let csv = fs::read_to_string(folder.join("pb-1b.csv"))?;
    let mut lines = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let head = lines.next().unwrap_or_default();
    let column = |name: &str| head.iter().position(|column| *column == name);
    let (carrier, time) = column("carrier")
        .zip(column("oneway_us"))
        .ok_or_else(|| format!("the columns are missing:\n{csv}"))?;
    let mut carriers = BTreeSet::new();
    for line in lines {
        let us = line.get(time).and_then(|us| us.parse::<f64>().ok());
        // On a busy machine a datagram may be sent again, after tens of milliseconds.
        if !us.is_some_and(|us| us > DELAY_US && us < 100.0 * DELAY_US) {
            return Err(format!("not delayed: {}", line.join(",")).into());
        }
        carriers.extend(line.get(carrier).map(|name| (*name).to_owned()));
    }
    if carriers.len() != 3 {
        return Err(format!("only {carriers:?}:\n{csv}").into());
    }
    Ok(())
}

/// Has a browser show the page, and measures its drawings there.
fn shown(folder: &Path) -> Result {
    let page = folder.join("measured.html");
    let text = fs::read_to_string(folder.join("index.html"))?;
    fs::write(&page, text.replace("</body>", &format!("{MEASURE}</body>")))?;
    let output = Command::new("chromium")
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--window-size=1280,1000",
        ])
        .arg("--dump-dom")
        .arg(format!("file://{}", page.display()))
        .stderr(Stdio::null())
        .output()
        .map_err(|e| format!("chromium: {e}: apt install chromium"))?;
    let dom = String::from_utf8_lossy(&output.stdout).into_owned();
    let measured = dom
        .split("<p id=\"measured\">")
        .nth(1)
        .and_then(|rest| rest.split("</p>").next())
        .ok_or("the script did not run in the browser")?;
    let drawings: usize = measured
        .split(' ')
        .next()
        .and_then(|n| n.parse().ok())
        .unwrap_or(0);
    if drawings < FIGURES.len() || !measured.ends_with("nothing wrong") {
        return Err(measured.to_owned().into());
    }
    Ok(())
}

fn list() -> Result {
    let table = text(&output(&["list"], Path::new(""), 0)?.stdout);
    for name in ["pb:1a", "pb:8d", "pb:T1", "hc:11", "thesis:6.4"] {
        if !table.contains(&format!("  {name} ")) {
            return Err(format!("{name} is not in the list:\n{table}").into());
        }
    }
    Ok(())
}

fn hints(folder: &Path) -> Result {
    let advice = text(&output(&["hints"], folder, 0)?.stdout);
    if !advice
        .lines()
        .any(|line| line.starts_with("- ") && line.ends_with("[pb:1b]"))
    {
        return Err(format!("the advice of pb:1b is missing:\n{advice}").into());
    }
    // The table of suitability contains measured and unmeasured rows.
    for (parameter, measured, why) in [
        ("short connections", true, "[hc:ttfb]"),
        ("buffers that are used repeatedly", true, "[hc:rules]"),
        (
            "large transfers",
            false,
            "not measured: anywarp study run exs:11",
        ),
        ("scattered data", false, "no figure measures this"),
    ] {
        let row = advice.lines().find(|line| line.starts_with(parameter));
        if !row.is_some_and(|row| row.contains(" ? ") != measured && row.ends_with(why)) {
            return Err(format!(
                "the table has no row for {parameter} with the reason {why}:\n{advice}"
            )
            .into());
        }
    }
    Ok(())
}

fn refused(folder: &Path) -> Result {
    for (words, folder, why) in [
        (&["run", "pb:9"][..], folder, "there is no figure pb:9"),
        (
            &["run", "pb:1a", "--vary", "colour=red"],
            folder,
            "no chosen figure has the axis colour",
        ),
        (
            &["run", "pb:1a", "--device", "nosuch", "--smoke", "-q"],
            &folder.join("other"),
            "",
        ),
        (
            &["run", "pb:1a"],
            Path::new("/proc/study"),
            "choose another --report",
        ),
        (&["hints"], Path::new("/proc/study"), "nothing was measured"),
    ] {
        let expected = if why.is_empty() { 1 } else { 2 };
        let output = output(words, folder, expected)?;
        let lines = text(&output.stderr);
        if !lines.contains(why) || !why.is_empty() && lines.lines().count() != 1 {
            return Err(format!("{words:?}: {lines}").into());
        }
        if why.is_empty() && !text(&output.stdout).contains("no RDMA device named nosuch") {
            return Err(format!("{words:?}: {}", text(&output.stdout)).into());
        }
    }
    Ok(())
}
