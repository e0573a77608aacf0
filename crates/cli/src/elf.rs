//! Finds reasons why a library cannot be preloaded into a program, from the program's file, without running it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use object::elf::{FileHeader32, FileHeader64, PT_INTERP};
use object::read::FileKind;
use object::read::elf::{FileHeader, ProgramHeader};

/// The type of a file, according to its first bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An ELF file: its machine, its class (1: 32 bit, 2: 64 bit), and whether the dynamic loader starts it.
    Elf {
        machine: u16,
        class: u8,
        dynamic: bool,
    },
    /// A script, with its interpreter.
    Script(PathBuf),
    /// Another file.
    Other,
}

/// A reason why the program will not find the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// The program is statically linked, so nothing is preloaded.
    Static(PathBuf),
    /// The loader ignores the variables for a program that gains privileges.
    Privileged(PathBuf),
    /// The libraries are for another architecture.
    OtherMachine(PathBuf),
}

impl std::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Static(path) => {
                write!(
                    f,
                    "{} is statically linked: no library can be loaded into it",
                    path.display()
                )
            }
            Self::Privileged(path) => write!(
                f,
                "{} is set-user-ID or set-group-ID: the loader ignores LD_PRELOAD for it (install the libraries \
                 system-wide, or run it as its owner)",
                path.display()
            ),
            Self::OtherMachine(path) => {
                write!(
                    f,
                    "{} is a program for another architecture than the libraries",
                    path.display()
                )
            }
        }
    }
}

/// The number of bytes that are read of a file. The program headers follow the ELF header at the beginning.
const HEAD: u64 = 64 * 1024;

/// The deepest nesting of scripts whose interpreters are scripts, which is the kernel's limit.
const MAX_SCRIPT_DEPTH: usize = 4;

/// Determines the type of a file.
pub(crate) fn kind(path: &Path) -> io::Result<Kind> {
    let mut head = Vec::new();
    File::open(path)?.take(HEAD).read_to_end(&mut head)?;

    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|b| *b == b'\n').next().unwrap_or_default();
        let interpreter = line
            .split(|b| b.is_ascii_whitespace())
            .find(|word| !word.is_empty());
        return Ok(interpreter.map_or(Kind::Other, |name| {
            Kind::Script(PathBuf::from(OsStr::from_bytes(name)))
        }));
    }
    Ok(elf(&head).unwrap_or(Kind::Other))
}

/// Parses the header of an ELF file in the byte order of this machine. Returns `None` for other files.
fn elf(data: &[u8]) -> Option<Kind> {
    let endian = object::NativeEndian;
    match FileKind::parse(data).ok()? {
        FileKind::Elf64 => header::<FileHeader64<object::NativeEndian>>(data, endian),
        FileKind::Elf32 => header::<FileHeader32<object::NativeEndian>>(data, endian),
        _ => None,
    }
}

fn header<H: FileHeader<Endian = object::NativeEndian>>(
    data: &[u8],
    endian: object::NativeEndian,
) -> Option<Kind> {
    let header = H::parse(data).ok()?;
    header.endian().ok()?;
    let mut segments = header.program_headers(endian, data).ok()?.iter();
    Some(Kind::Elf {
        machine: header.e_machine(endian),
        class: header.e_ident().class,
        dynamic: segments.any(|segment| segment.p_type(endian) == PT_INTERP),
    })
}

/// Returns the program that the kernel executes for this file: the file itself, or the interpreter of a script.
pub(crate) fn interpreter_of(program: &Path) -> PathBuf {
    let mut path = program.to_path_buf();
    for _ in 0..MAX_SCRIPT_DEPTH {
        match kind(&path) {
            Ok(Kind::Script(interpreter)) => path = interpreter,
            _ => break,
        }
    }
    path
}

/// Returns whether the file has capabilities (capabilities(7)): the loader then ignores LD_PRELOAD, as for set-user-ID.
pub(crate) fn has_capabilities(path: &Path) -> bool {
    let mut none: [u8; 0] = [];
    rustix::fs::getxattr(path, "security.capability", &mut none[..]).is_ok_and(|n| n > 0)
}

/// Returns the reasons why `program`, or the interpreter that runs it, will not load `library`.
pub(crate) fn obstacles(program: &Path, library: &Path) -> Vec<Obstacle> {
    let mut found = Vec::new();
    let mut path = program.to_path_buf();
    for _ in 0..MAX_SCRIPT_DEPTH {
        match kind(&path) {
            Ok(Kind::Script(interpreter)) => path = interpreter,
            Ok(Kind::Elf {
                machine,
                class,
                dynamic,
            }) => {
                if !dynamic {
                    found.push(Obstacle::Static(path.clone()));
                }
                if matches!(kind(library), Ok(Kind::Elf { machine: m, class: c, .. }) if (m, c) != (machine, class))
                {
                    found.push(Obstacle::OtherMachine(path.clone()));
                }
                break;
            }
            Ok(Kind::Other) | Err(_) => break, // executing it reports the error
        }
    }
    if gains_privileges(&path) {
        found.push(Obstacle::Privileged(path));
    }
    found
}

/// Returns whether executing the file changes the user or the group of this process.
fn gains_privileges(path: &Path) -> bool {
    let (Ok(file), Ok(own)) = (path.metadata(), Path::new("/proc/self").metadata()) else {
        return false;
    };
    let (setuid, setgid) = (file.mode() & 0o4000 != 0, file.mode() & 0o2010 == 0o2010);
    (setuid && file.uid() != own.uid()) || (setgid && file.gid() != own.gid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_is_an_elf_program() {
        let own = std::env::current_exe().unwrap();

        assert!(matches!(
            kind(&own).unwrap(),
            Kind::Elf { dynamic: true, .. }
        ));
        assert_eq!(obstacles(&own, &own), []);
    }

    #[test]
    fn a_script_is_judged_by_its_interpreter() {
        let dir = std::env::temp_dir().join(format!("anywarp-elf-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let script = dir.join("script");
        std::fs::write(&script, "#! /bin/sh -e\nexit 0\n").unwrap();

        assert_eq!(kind(&script).unwrap(), Kind::Script("/bin/sh".into()));
        assert_eq!(obstacles(&script, Path::new("/bin/sh")), []);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_program_without_a_loader_is_static_and_another_machine_is_named() {
        let dir = std::env::temp_dir().join(format!("anywarp-elf2-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (program, library) = (dir.join("program"), dir.join("library"));
        let mut head = [0u8; 64];
        head[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        head[18] = 0xb7;
        std::fs::write(&program, head).unwrap();
        head[18] = 0x3e;
        std::fs::write(&library, head).unwrap();

        assert_eq!(
            obstacles(&program, &library),
            [
                Obstacle::Static(program.clone()),
                Obstacle::OtherMachine(program.clone())
            ]
        );
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn invalid_files_are_classified_as_other() {
        let dir = std::env::temp_dir().join(format!("anywarp-elf3-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("file");
        for content in [&b""[..], b"#!", b"\x7fELF", b"\x7fELF\x02\x01\0\0", b"MZ"] {
            std::fs::write(&file, content).unwrap();
            assert_eq!(kind(&file).unwrap(), Kind::Other, "{content:?}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
