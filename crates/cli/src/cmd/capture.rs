//! `anywarp capture`: runs a program like `anywarp run`, and writes its traffic to a file.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;

use super::{Failure, run};
use crate::cli::Capture;
use crate::library::Library;

/// Does not return on success, because this process executes the program.
pub(crate) fn run(args: &Capture) -> Result<ExitCode, Failure> {
    let mut command = run::command(&args.run)?;
    // An absolute path, because the program may change its working directory.
    let file = env::current_dir()
        .map_err(|e| Failure::Write(args.write.clone(), e))?
        .join(&args.write);
    match fs::remove_file(&file) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(Failure::Write(file, e)),
    }
    // The file is created before the program starts, not at the first packet: errors are reported early, and no other user can create
    // it in between. It contains the program's payload, so only this user may read it.
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&file)
        .map_err(|e| Failure::Write(file.clone(), e))?;
    command.env("ANYWARP_CAPTURE", &file);
    for (name, value) in [
        ("ANYWARP_CAPTURE_SNAPLEN", args.snaplen),
        ("ANYWARP_CAPTURE_LIMIT", args.limit),
    ] {
        if let Some(value) = value {
            command.env(name, value.to_string());
        }
    }
    eprintln!("anywarp: capturing into {}", file.display());
    if let Some(script) = Library::find().ok().and_then(|l| l.dissector()) {
        eprintln!(
            "anywarp: to read it: tshark -X lua_script:{} -r {}",
            script.display(),
            file.display()
        );
    }
    Err(run::exec(command))
}
