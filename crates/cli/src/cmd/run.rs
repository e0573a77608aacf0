//! `anywarp run`: sets the variables and becomes the program.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use super::Failure;
use crate::cli::Run;
use crate::elf;
use crate::library::Library;

/// Does not return when all is well: the program has taken the place of this process.
pub(crate) fn run(args: &Run) -> Result<ExitCode, Failure> {
    Err(exec(command(args)?))
}

/// Becomes the program; what is returned is why not.
pub(crate) fn exec(mut command: Command) -> Failure {
    let why = command.exec();
    Failure::NotExecutable(command.get_program().into(), why)
}

/// The program with its variables.
pub(crate) fn command(args: &Run) -> Result<Command, Failure> {
    let Some((name, rest)) = args.program.split_first() else {
        return Err(Failure::NotFound(String::new())); // clap asks for one
    };
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
    if let Some(level) = args.log {
        command.env("ANYWARP_LOG", level.as_str());
    }
    if let Some(profile) = args.profile {
        command.env("ANYWARP_DEVICE_PROFILE", profile.as_str());
    }
    if let Some(address) = args.device_ip {
        command.env("ANYWARP_ADDR", address.to_string());
    }
    Ok(command)
}

/// Looks a program up as a shell does: a name with a slash is a path, any other is searched for in PATH.
fn find(name: &OsStr) -> Result<PathBuf, Failure> {
    let not_found = || Failure::NotFound(name.to_string_lossy().into_owned());
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match path.metadata() {
            Ok(file) if file.is_dir() => Err(Failure::NotExecutable(
                path,
                io::Error::from(io::ErrorKind::IsADirectory),
            )),
            Ok(_) => Ok(path),
            Err(_) => Err(not_found()),
        };
    }
    let path = env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| is_executable(file))
        .ok_or_else(not_found)
}

fn is_executable(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_searched_for_and_a_path_is_taken_as_it_is() {
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
            find(OsStr::new("/")),
            Err(Failure::NotExecutable(..))
        ));
    }
}
