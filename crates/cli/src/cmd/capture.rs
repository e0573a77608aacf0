//! `anywarp capture`: runs a program as `anywarp run` does, with its traffic written into a file.

use std::env;
use std::fs;
use std::io;
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
    // Whether it can be written is better known now than after the program ran.
    fs::File::create_new(&file)
        .and_then(|_| fs::remove_file(&file))
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
