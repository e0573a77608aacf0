//! `anywarp capture`: runs a program as `anywarp run` does, with its traffic written into a file.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;

use super::{Failure, run};
use crate::cli::Capture;
use crate::library::Library;

/// Does not return when all is well: the program has taken the place of this process.
pub(crate) fn run(args: &Capture) -> Result<ExitCode, Failure> {
    let mut command = run::command(&args.run)?;
    // The program may change its folder.
    let file = env::current_dir()
        .map_err(|e| Failure::Write(args.write.clone(), e))?
        .join(&args.write);
    match fs::remove_file(&file) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(Failure::Write(file, e)),
    }
    // Made now and not at the first packet: whether it can be written is known before the program runs, and no other user
    // can make it in between. It contains the program's payload, so it is for this user alone.
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
