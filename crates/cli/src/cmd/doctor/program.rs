//! Checks whether a program or a Python package will find the device, by reading its files without running it.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use object::elf::{self, FileHeader32, FileHeader64};
use object::read::FileKind;
use object::read::elf::{Dyn, FileHeader, ProgramHeader, Sym};

use super::Line;
use crate::cmd::Failure;
use crate::cmd::run::find;
use crate::elf::{Kind, Obstacle, has_capabilities, obstacles};
use crate::library::Library;

/// The most bytes that are read of a file. Only the beginning of a larger one is checked.
const FILE_MAX: u64 = 512 << 20;
/// The most files of a package that are checked.
const FILES_MAX: usize = 20_000;
/// The deepest nesting of folders in a package that is followed.
const DEPTH_MAX: usize = 16;
/// Programs that start others with a clean environment.
const LAUNCHERS: [&str; 10] = [
    "sudo",
    "su",
    "doas",
    "runuser",
    "pkexec",
    "ssh",
    "docker",
    "podman",
    "systemd-run",
    "flatpak",
];
/// Strings in a program that loads the libraries by dlopen.
const OPENED: [&str; 2] = ["libibverbs.so", "librdmacm.so"];
/// A string in programs that use the kernel's netlink interface for RDMA, which does not list anywarp's device.
const NETLINK: &str = "NETLINK_RDMA";
/// A function of libibverbs that every program calls.
const VERBS: &[u8] = b"ibv_open_device";

/// Advice for a program with file capabilities.
const CAPABLE: &str =
    "install the package anywarp-system, or run a copy of the file: a copy has no capabilities";

/// The facts in an ELF file.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Facts {
    interpreter: Option<PathBuf>,
    /// The libraries that the file is linked with.
    needed: Vec<String>,
    /// Whether the file defines the functions of libibverbs.
    has_verbs: bool,
    /// Whether the file contains the name of libibverbs or librdmacm as a string and is linked with neither.
    opens_verbs: bool,
    uses_netlink: bool,
}

/// Checks `name`: a program, a library, a folder of a package, or the name of a Python package.
pub(super) fn lines(name: &OsStr, library: &Library) -> Result<Vec<Line>, Failure> {
    let path = Path::new(name);
    if path.is_dir() {
        return Ok(package(name, &[path.to_path_buf()]));
    }
    match find(name) {
        Ok(path) => Ok(program(name, &path, library)),
        // Many systems install libraries without the permission to execute them.
        Err(Failure::NotExecutable(path, _))
            if matches!(crate::elf::kind(&path), Ok(Kind::Elf { dynamic: true, .. })) =>
        {
            Ok(program(name, &path, library))
        }
        Err(e) => match python_package(name) {
            Some(folders) => Ok(package(name, &folders)),
            None => Err(e),
        },
    }
}

/// Checks a program. For a script, checks the interpreter.
fn program(name: &OsStr, path: &Path, library: &Library) -> Vec<Line> {
    let mut lines = vec![Line::ok("program", path.display().to_string())];
    let base = path.file_name().unwrap_or_default().to_string_lossy();
    if LAUNCHERS.contains(&base.as_ref()) {
        lines.push(Line::warn(
            "environment",
            format!("{base} starts programs with an environment of its own, without LD_PRELOAD"),
            format!("let it start anywarp: {base} … anywarp run -- PROGRAM"),
        ));
        return lines;
    }
    let runs = crate::elf::interpreter_of(path);
    if runs != path {
        if !runs.is_file() {
            lines.push(Line::fail(
                "interpreter",
                format!("{} is not on this machine", runs.display()),
                "install it, or correct the first line of the script",
            ));
            return lines;
        }
        lines.push(Line::ok("interpreter", runs.display().to_string()));
    }
    for obstacle in obstacles(path, &library.verbs()) {
        let advice = match &obstacle {
            Obstacle::Static(_) => {
                "build it with shared libraries, or run it on a machine with a device"
            }
            Obstacle::Privileged(_) => {
                "install the package anywarp-system, or run the program as its owner"
            }
            Obstacle::Capable(_) => CAPABLE,
            Obstacle::OtherMachine(_) => "install anywarp for that architecture",
        };
        lines.push(Line::fail("loading", obstacle.to_string(), advice));
    }
    if rustix::process::getuid().is_root() && has_capabilities(&runs) {
        lines.push(Line::warn(
            "loading",
            "the file has capabilities: for other users than root the loader ignores LD_PRELOAD",
            CAPABLE,
        ));
    }
    let Some(facts) = read(&runs) else {
        return lines;
    };
    let is_library = facts.interpreter.is_none();
    if let Some(loader) = &facts.interpreter {
        lines.push(loader_line(loader));
    }
    lines.extend(verbs_lines(&[(runs.clone(), facts)], runs != path));
    if lines.iter().all(|line| !line.is_fail()) {
        lines.push(Line::ok(
            "how",
            if is_library {
                "anywarp run -- PROGRAM, which loads this library".to_owned()
            } else {
                format!("anywarp run -- {}", name.to_string_lossy())
            },
        ));
    }
    lines
}

fn loader_line(loader: &Path) -> Line {
    let base = loader.file_name().unwrap_or_default().to_string_lossy();
    if base.starts_with("ld-musl") {
        return Line::fail(
            "C library",
            format!("musl ({})", loader.display()),
            "use a build for glibc: anywarp's libraries need it",
        );
    }
    if !loader.exists() {
        return Line::fail(
            "C library",
            format!("the loader {} is not on this machine", loader.display()),
            "install the C library that the program was built for",
        );
    }
    Line::ok("C library", format!("glibc ({})", loader.display()))
}

/// Returns the lines about verbs for these files.
fn verbs_lines(files: &[(PathBuf, Facts)], is_interpreter: bool) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut linked = BTreeSet::new();
    let mut own = BTreeSet::new();
    let mut opens = false;
    for (path, facts) in files {
        let base = path.file_name().unwrap_or_default().to_string_lossy();
        if is_bundled(&base) {
            own.insert(base.clone().into_owned());
        } else if facts.has_verbs && !base.starts_with("libibverbs.so") {
            lines.push(Line::fail(
                "verbs",
                format!("{} has libibverbs in it, linked statically", path.display()),
                "build it with the shared libibverbs.so.1",
            ));
        }
        for needed in &facts.needed {
            if is_bundled(needed) {
                own.insert(needed.clone());
            } else if needed.starts_with("libibverbs.so") || needed.starts_with("librdmacm.so") {
                linked.insert(needed.clone());
            }
        }
        opens |= facts.opens_verbs;
        if facts.uses_netlink {
            lines.push(Line::warn(
                "netlink",
                format!(
                    "{} asks the kernel for RDMA devices (NETLINK_RDMA)",
                    path.display()
                ),
                "the kernel does not list anywarp0; use the library's functions or ibv_devinfo",
            ));
        }
    }
    if !own.is_empty() {
        lines.push(Line::ok(
            "verbs",
            format!(
                "brings its own library ({}), which only LD_PRELOAD replaces: use anywarp run, or all variables of anywarp \
                 env",
                join(&own)
            ),
        ));
    }
    if !linked.is_empty() {
        lines.push(Line::ok("verbs", format!("linked with {}", join(&linked))));
    } else if opens {
        lines.push(Line::ok("verbs", "opens libibverbs or librdmacm itself"));
    } else if own.is_empty() && lines.iter().all(|line| !line.is_fail()) && !is_interpreter {
        lines.push(Line::warn(
            "verbs",
            "names no RDMA library itself",
            "if one of its libraries or plug-ins names one, the device is found; to check that file, name it instead of the program",
        ));
    }
    lines
}

fn join(names: &BTreeSet<String>) -> String {
    names
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(", ")
}

/// Returns whether a library's name is that of a bundled copy, such as libibverbs-1de1263b.so.1.14 in a wheel.
fn is_bundled(name: &str) -> bool {
    ["libibverbs-", "librdmacm-"]
        .iter()
        .any(|own| name.starts_with(own))
        && name.contains(".so")
}

/// Checks all shared objects of a package. `folders` may contain files.
fn package(name: &OsStr, folders: &[PathBuf]) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut objects = Vec::new();
    let mut left = FILES_MAX;
    for folder in folders {
        if folder.is_file() {
            lines.push(Line::ok("file", folder.display().to_string()));
            objects.push(folder.clone());
            continue;
        }
        lines.push(Line::ok("folder", folder.display().to_string()));
        collect(folder, DEPTH_MAX, &mut left, &mut objects);
    }
    let files: Vec<(PathBuf, Facts)> = objects
        .into_iter()
        .filter_map(|path| read(&path).map(|facts| (path, facts)))
        .collect();
    lines.push(Line::ok(
        "files",
        format!("{} shared objects and programs", files.len()),
    ));
    let verbs = verbs_lines(&files, false);
    let usable = verbs.iter().all(|line| !line.is_fail());
    lines.extend(verbs);
    if usable {
        lines.push(Line::ok(
            "how",
            format!(
                "anywarp run -- python3 … (then {} finds the device)",
                name.to_string_lossy()
            ),
        ));
    }
    lines
}

fn collect(folder: &Path, depth: usize, left: &mut usize, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        if *left == 0 {
            return;
        }
        *left -= 1;
        let Ok(kind) = entry.file_type() else {
            continue;
        };
        if kind.is_dir() && depth > 0 {
            collect(&entry.path(), depth - 1, left, found);
        } else if kind.is_file() && starts_as_elf(&entry.path()) {
            found.push(entry.path());
        }
    }
}

fn starts_as_elf(path: &Path) -> bool {
    let mut magic = [0; 4];
    fs::File::open(path).is_ok_and(|mut f| f.read_exact(&mut magic).is_ok()) && magic == elf::ELFMAG
}

/// Finds the folders of a Python package without importing it: its own, and those of the libraries bundled in its wheel. A module that
/// is a single file has no folder of its own, so the file is returned.
fn python_package(name: &OsStr) -> Option<Vec<PathBuf>> {
    let text = name.to_str()?;
    if text.is_empty() || !text.chars().all(|c| c.is_alphanumeric() || c == '_') {
        return None;
    }
    let script = "import importlib.util as u, sys\n\
                  s = u.find_spec(sys.argv[1])\n\
                  p = [] if s is None else list(s.submodule_search_locations or [s.origin])\n\
                  sys.stdout.write('\\0'.join(p))";
    let out = Command::new("python3")
        .args(["-c", script, text])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let mut folders: Vec<PathBuf> = out
        .stdout
        .split(|b| *b == 0)
        .filter(|path| !path.is_empty())
        .map(|path| PathBuf::from(OsString::from(OsStr::from_bytes(path))))
        .collect();
    let beside = folders.first()?.parent()?.to_path_buf();
    for entry in fs::read_dir(beside).into_iter().flatten().flatten() {
        let base = entry.file_name().to_string_lossy().into_owned();
        let own = base.trim_start_matches('.');
        if own.starts_with(text) && own.ends_with(".libs") {
            folders.push(entry.path());
        }
    }
    Some(folders)
}

/// Reads a file. Returns `None` if it is not an ELF file of this machine's byte order.
fn read(path: &Path) -> Option<Facts> {
    let mut data = Vec::new();
    let file = fs::File::open(path).ok()?;
    file.take(FILE_MAX).read_to_end(&mut data).ok()?;
    let endian = object::NativeEndian;
    let mut facts = match FileKind::parse(&*data).ok()? {
        FileKind::Elf64 => parse::<FileHeader64<object::NativeEndian>>(&data, endian),
        FileKind::Elf32 => parse::<FileHeader32<object::NativeEndian>>(&data, endian),
        _ => None,
    }?;
    let contains = |text: &str| data.windows(text.len()).any(|w| w == text.as_bytes());
    let linked = facts
        .needed
        .iter()
        .any(|n| OPENED.iter().any(|o| n.starts_with(o)));
    facts.opens_verbs = !linked && OPENED.iter().any(|name| contains(name));
    facts.uses_netlink = contains(NETLINK);
    Some(facts)
}

fn parse<H: FileHeader<Endian = object::NativeEndian>>(
    data: &[u8],
    endian: object::NativeEndian,
) -> Option<Facts> {
    let header = H::parse(data).ok()?;
    header.endian().ok()?;
    let mut facts = Facts::default();
    for segment in header.program_headers(endian, data).ok()? {
        if let Ok(Some(path)) = segment.interpreter(endian, data) {
            facts.interpreter = Some(PathBuf::from(OsStr::from_bytes(path)));
        }
    }
    let sections = header.sections(endian, data).ok()?;
    if let Ok(Some((entries, link))) = sections.dynamic(endian, data)
        && let Ok(strings) = sections.strings(endian, data, link)
    {
        for entry in entries {
            if entry.tag32(endian) == Some(elf::DT_NEEDED)
                && let Ok(name) = entry.string(endian, strings)
            {
                facts
                    .needed
                    .push(String::from_utf8_lossy(name).into_owned());
            }
        }
    }
    for kind in [elf::SHT_DYNSYM, elf::SHT_SYMTAB] {
        let Ok(symbols) = sections.symbols(endian, data, kind) else {
            continue;
        };
        facts.has_verbs |= symbols.iter().any(|symbol| {
            !symbol.is_undefined(endian) && symbols.symbol_name(endian, symbol) == Ok(VERBS)
        });
    }
    Some(facts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(needed: &[&str]) -> Facts {
        Facts {
            needed: needed.iter().map(|n| (*n).to_owned()).collect(),
            ..Facts::default()
        }
    }

    fn told(file: &str, facts: Facts) -> Vec<(bool, String)> {
        verbs_lines(&[(PathBuf::from(file), facts)], false)
            .into_iter()
            .map(|line| (line.is_fail(), line.found))
            .collect()
    }

    #[test]
    fn the_needed_libraries_of_a_program_are_read() {
        let own = std::env::current_exe().unwrap();
        let facts = read(&own).unwrap();
        assert!(facts.needed.iter().any(|n| n == "libc.so.6"), "{facts:?}");
        assert!(facts.interpreter.is_some_and(|i| i.exists()));
        assert!(!facts.has_verbs);
    }

    #[test]
    fn libraries_are_distinguished() {
        assert_eq!(
            told("/bin/x", facts(&["libibverbs.so.1", "libc.so.6"])),
            [(false, "linked with libibverbs.so.1".to_owned())]
        );
        let bundled = told("/x/y.so", facts(&["libibverbs-1de1263b.so.1.14.48"]));
        assert!(
            bundled[0].1.contains("brings its own library"),
            "{bundled:?}"
        );
        let inside = Facts {
            has_verbs: true,
            ..Facts::default()
        };
        let inside = told("/bin/x", inside);
        assert!(
            inside[0].0 && inside[0].1.contains("linked statically"),
            "{inside:?}"
        );
        let opens = Facts {
            opens_verbs: true,
            ..Facts::default()
        };
        assert_eq!(told("/bin/x", opens).len(), 1);
        let netlink = Facts {
            uses_netlink: true,
            ..facts(&["libibverbs.so.1"])
        };
        assert_eq!(told("/bin/x", netlink).len(), 2);
        assert!(
            told("/bin/x", facts(&[]))[0]
                .1
                .contains("names no RDMA library")
        );
    }

    #[test]
    fn a_loader_of_another_c_library_is_named() {
        assert!(loader_line(Path::new("/lib/ld-musl-x86_64.so.1")).is_fail());
        assert!(loader_line(Path::new("/no/such/ld-linux.so.2")).is_fail());
    }

    #[test]
    fn only_valid_package_names_are_queried() {
        for name in ["", "os;exit()", "a-b", "--help", "a/b"] {
            assert_eq!(python_package(OsStr::new(name)), None, "{name}");
        }
    }
}
