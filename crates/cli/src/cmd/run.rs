//! `anywarp run`: sets the variables and executes the program.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anywarp_core::fault::Plan;

use super::{Failure, address};
use crate::cli::{LogLevel, Run};
use crate::elf;
use crate::library::Library;
use crate::sys;

/// The variable for the number of threads with which an engine of Mooncake polls, by default two. These threads never pause, and
/// neither does the thread of the program that waits for a transfer.
const MOONCAKE_WORKERS: &str = "MC_WORKERS_PER_CTX";
/// On a machine with at most this many processors, the polling threads of one end of a Mooncake transfer occupy all of them. The other
/// end then runs only when the time slice of one of these threads ends, and a transfer of 4 KiB takes milliseconds instead of 50 µs.
const FEW_PROCESSORS: usize = 2;

/// Does not return on success, because this process executes the program.
pub(crate) fn run(args: &Run) -> Result<ExitCode, Failure> {
    Err(exec(command(args)?))
}

/// Executes the program. Returns only if that fails.
pub(crate) fn exec(mut command: Command) -> Failure {
    sys::inherit_sigpipe(&mut command);
    let why = command.exec();
    Failure::NotExecutable(command.get_program().into(), why)
}

/// Returns the command with its variables.
pub(crate) fn command(args: &Run) -> Result<Command, Failure> {
    let Some((name, rest)) = args.started.parts() else {
        return Err(Failure::NotFound(String::new())); // clap requires a program
    };
    let faults = args.faults.as_deref().map(check_faults).transpose()?;
    if let Some(ip) = args.device_ip {
        address::check(ip).map_err(Failure::Address)?;
    }
    let program = find(name)?;
    let library = Library::find().map_err(Failure::Library)?;

    for obstacle in elf::obstacles(&program, &library.verbs()) {
        eprintln!("anywarp: warning: {obstacle}");
    }
    if !args.no_path_shim && library.path_shim().is_none() {
        eprintln!(
            "anywarp: warning: no path shim in {}: programs that look for device files will not find any",
            library.dir().display()
        );
    }

    let mut command = Command::new(&program);
    command
        .arg0(name)
        .args(rest)
        .envs(library.variables(!args.no_path_shim, |name| env::var_os(name)));
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if let Some(workers) = mooncake_workers(processors, env::var_os(MOONCAKE_WORKERS)) {
        command.env(MOONCAKE_WORKERS, workers);
    }
    if let Some(level) = args.log {
        command.env("ANYWARP_LOG", level.as_str());
    }
    if let Some(profile) = args.profile {
        command.env("ANYWARP_DEVICE_PROFILE", profile.as_str());
    }
    if let Some(faults) = faults {
        command.env("ANYWARP_FAULTS", faults);
        command.env_remove("ANYWARP_FAULTS_FILE");
    }
    if args.stat {
        command.env("ANYWARP_STAT", "1");
    }
    if let Some(address) = args.device_ip {
        command.env("ANYWARP_ADDR", address.to_string());
    }
    if args.log.is_some_and(LogLevel::shows_info) {
        for line in explanations(&command) {
            eprintln!("anywarp: {line}");
        }
    }
    Ok(command)
}

/// Returns the value of [`MOONCAKE_WORKERS`] to set, if any. `inherited`: the value that the user has set.
fn mooncake_workers(processors: usize, inherited: Option<OsString>) -> Option<&'static str> {
    (processors <= FEW_PROCESSORS && inherited.is_none()).then_some("1")
}

/// Returns one line for each variable that is set or removed, with the reason.
fn explanations(command: &Command) -> Vec<String> {
    let why = |name: &str| match name {
        "LD_PRELOAD" => {
            "the program uses anywarp's libibverbs and librdmacm, even if it brings its own"
        }
        "LD_LIBRARY_PATH" => {
            "RDMA libraries that the program opens later by name are also anywarp's"
        }
        "FI_PROVIDER_PATH" => "libfabric finds anywarp's provider",
        MOONCAKE_WORKERS => "this machine has few processors, and each worker of Mooncake uses one",
        "ANYWARP_LOG" => "--log",
        "ANYWARP_DEVICE_PROFILE" => "--profile",
        "ANYWARP_FAULTS" | "ANYWARP_FAULTS_FILE" => "--faults",
        "ANYWARP_STAT" => "--stat",
        "ANYWARP_ADDR" => "--device-ip",
        _ => "asked for on the command line",
    };
    let lines = command.get_envs().map(|(name, value)| {
        let (name, reason) = (name.to_string_lossy(), why(&name.to_string_lossy()));
        match value {
            Some(value) => format!("sets {name}={}: {reason}", value.to_string_lossy()),
            None => format!("removes {name}: {reason}"),
        }
    });
    lines.collect()
}

/// Parses the value of --faults as the device does. The path of a file is made absolute, because a program may change its working
/// directory.
fn check_faults(spec: &OsStr) -> Result<OsString, Failure> {
    let parse = |name: &str, text: &str| {
        Plan::parse(text).map_err(|e| {
            // The line, and a mark under the invalid part.
            let line = text.lines().nth(e.line.saturating_sub(1) as usize);
            let column = e.column.saturating_sub(1) as usize;
            let shown = line.unwrap_or_default().replace('\t', " ");
            Failure::Faults(format!("{name}{e}\n  {shown}\n  {:column$}^", ""))
        })
    };
    let Some(file) = spec.as_bytes().strip_prefix(b"@") else {
        let text = spec
            .to_str()
            .ok_or_else(|| Failure::Faults(format!("{}: not in UTF-8", spec.to_string_lossy())))?;
        parse("", text)?;
        return Ok(spec.into());
    };
    let file = Path::new(OsStr::from_bytes(file));
    let unreadable = |e: io::Error| Failure::Faults(format!("{}: {e}", file.display()));
    // Each process that opens the device reads the file again.
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(Failure::Faults(format!(
            "{}: not a regular file, but the device has to read it again",
            file.display()
        )));
    }
    let text = std::fs::read_to_string(file).map_err(unreadable)?;
    parse(&format!("{}, ", file.display()), &text)?;
    let mut full = OsString::from("@");
    full.push(std::path::absolute(file).map_err(unreadable)?);
    Ok(full)
}

/// Finds a program as a shell does: a name with a slash is a path, any other is searched for in PATH.
pub(crate) fn find(name: &OsStr) -> Result<PathBuf, Failure> {
    let not_found = || Failure::NotFound(name.to_string_lossy().into_owned());
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match path.metadata() {
            Ok(file) if file.is_dir() => Err(Failure::NotExecutable(
                path,
                io::Error::from(io::ErrorKind::IsADirectory),
            )),
            Ok(_) => match rustix::fs::access(&path, rustix::fs::Access::EXEC_OK) {
                Ok(()) => Ok(path),
                Err(e) => Err(Failure::NotExecutable(path, e.into())),
            },
            Err(_) => Err(not_found()),
        };
    }
    let path = env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| is_executable(file))
        .ok_or_else(not_found)
}

/// Returns whether this user may execute the file, as execvp(3) decides about the files of `PATH`.
fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_checked_before_anything_runs() {
        assert_eq!(check_faults(OsStr::new("loss=1%")).unwrap(), "loss=1%");
        let why = |spec: &str| match check_faults(OsStr::new(spec)) {
            Err(failure @ Failure::Faults(_)) => failure.to_string(),
            other => panic!("{spec}: {other:?}"),
        };
        let text = why("seed=1;op=send -> explode");
        assert!(
            text.starts_with("--faults: line 1, character 19: 'explode' is not one of the actions")
        );
        assert!(
            text.ends_with("\n  seed=1;op=send -> explode\n                    ^"),
            "{text}"
        );
        assert!(why("@/dev/null").starts_with("--faults: /dev/null: not a regular file"));
        let (reader, _writer) = io::pipe().unwrap();
        let pipe = std::os::fd::AsRawFd::as_raw_fd(&reader);
        assert!(why(&format!("@/proc/self/fd/{pipe}")).contains("not a regular file"));
        assert!(why("@/no/such/file").starts_with("--faults: /no/such/file: No such file"));
    }

    #[test]
    fn each_variable_has_its_reason() {
        let mut command = Command::new("true");
        command.env("LD_PRELOAD", "/a.so").env("ANYWARP_STAT", "1");
        command.env("FI_PROVIDER_PATH", "/lib");
        command.env(MOONCAKE_WORKERS, "1");
        command.env_remove("ANYWARP_FAULTS_FILE");
        let lines = explanations(&command);
        assert_eq!(lines.len(), 5, "{lines:?}");
        for start in [
            "sets LD_PRELOAD=/a.so: ",
            "sets FI_PROVIDER_PATH=/lib: libfabric ",
            "sets MC_WORKERS_PER_CTX=1: this machine ",
            "sets ANYWARP_STAT=1: --stat",
            "removes ANYWARP_FAULTS_FILE: --faults",
        ] {
            assert!(lines.iter().any(|l| l.starts_with(start)), "{lines:?}");
        }
    }

    #[test]
    fn few_processors_get_one_worker_unless_the_user_decides() {
        assert_eq!(mooncake_workers(2, None), Some("1"));
        assert_eq!(mooncake_workers(2, Some("4".into())), None);
        assert_eq!(mooncake_workers(3, None), None);
    }

    #[test]
    fn a_file_of_faults_is_found_from_everywhere() {
        let dir = env::temp_dir().join(format!("anywarp-faults-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("rules");
        std::fs::write(&file, "# three\nseed=3\nop=send nth=1 -> kill\n").unwrap();
        let mut spec = OsString::from("@");
        spec.push(&file);
        assert_eq!(check_faults(&spec).unwrap(), spec);
        std::fs::write(&file, "seed=3\n\nop=send nth -> kill\n").unwrap();
        let text = check_faults(&spec).unwrap_err().to_string();
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(
            text.contains("rules, line 3, character 9: 'nth' has no value"),
            "{text}"
        );
        assert!(
            text.ends_with("\n  op=send nth -> kill\n          ^"),
            "{text}"
        );
    }

    #[test]
    fn a_name_is_searched_and_a_path_is_used_unchanged() {
        assert!(find(OsStr::new("sh")).unwrap().ends_with("sh"));
        assert_eq!(find(OsStr::new("/bin/sh")).unwrap(), Path::new("/bin/sh"));
        assert!(matches!(
            find(OsStr::new("no-such-program-here")),
            Err(Failure::NotFound(_))
        ));
        assert!(matches!(
            find(OsStr::new("/no/such/file")),
            Err(Failure::NotFound(_))
        ));
        assert!(matches!(
            find(OsStr::new("/etc/passwd")),
            Err(Failure::NotExecutable(..))
        ));
        assert!(matches!(
            find(OsStr::new("/")),
            Err(Failure::NotExecutable(..))
        ));
    }
}
