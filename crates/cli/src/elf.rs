//! Finds reasons why a library cannot be preloaded into a program, from the program's file, without running it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use object::elf::{DT_NEEDED, DT_SONAME, FileHeader32, FileHeader64, PT_DYNAMIC, PT_INTERP};
use object::read::FileKind;
use object::read::elf::{FileHeader, ProgramHeader};

/// The type of a file, according to its first bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An ELF file: its machine, its class (1: 32 bit, 2: 64 bit), and whether it is dynamic, that is, a program or a library for the
    /// dynamic loader, or the loader itself.
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

/// A reason why the program will not find the device. The *variables* are LD_PRELOAD and LD_LIBRARY_PATH.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// The program is statically linked, so nothing is preloaded.
    Static(PathBuf),
    /// The loader ignores the variables for a program that gains privileges.
    Privileged(PathBuf),
    /// The loader ignores the variables for a program that has capabilities (capabilities(7)).
    Capable(PathBuf),
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
            Self::Capable(path) => write!(
                f,
                "{} has file capabilities: the loader ignores LD_PRELOAD for it (install the libraries system-wide, or run a \
                 copy of the file, which has none)",
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

/// The number of bytes that are read of the dynamic section, which has some 30 entries of 16 bytes.
const DYNAMIC: u64 = 64 * 1024;

/// Determines the type of a file.
pub(crate) fn kind(path: &Path) -> io::Result<Kind> {
    let mut head = Vec::new();
    let mut file = File::open(path)?;
    (&mut file).take(HEAD).read_to_end(&mut head)?;

    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|b| *b == b'\n').next().unwrap_or_default();
        let interpreter = line
            .split(|b| b.is_ascii_whitespace())
            .find(|word| !word.is_empty());
        return Ok(interpreter.map_or(Kind::Other, |name| {
            Kind::Script(PathBuf::from(OsStr::from_bytes(name)))
        }));
    }
    Ok(elf(&head, &mut file).unwrap_or(Kind::Other))
}

/// Parses the header of an ELF file in the byte order of this machine. Returns `None` for other files.
fn elf(data: &[u8], file: &mut File) -> Option<Kind> {
    let endian = object::NativeEndian;
    match FileKind::parse(data).ok()? {
        FileKind::Elf64 => header::<FileHeader64<object::NativeEndian>>(data, file, endian),
        FileKind::Elf32 => header::<FileHeader32<object::NativeEndian>>(data, file, endian),
        _ => None,
    }
}

fn header<H: FileHeader<Endian = object::NativeEndian>>(
    data: &[u8],
    file: &mut File,
    endian: object::NativeEndian,
) -> Option<Kind> {
    let header = H::parse(data).ok()?;
    header.endian().ok()?;
    let segments = header.program_headers(endian, data).ok()?;
    let find = |kind| segments.iter().find(|s| s.p_type(endian) == kind);
    let word = if header.is_class_64() { 8 } else { 4 };
    let dynamic = find(PT_INTERP).is_some()
        || find(PT_DYNAMIC).is_some_and(|segment| {
            let (at, size) = (segment.p_offset(endian), segment.p_filesz(endian));
            is_loaded(file, at.into(), size.into(), word).unwrap_or(false)
        });
    Some(Kind::Elf {
        machine: header.e_machine(endian),
        class: header.e_ident().class,
        dynamic,
    })
}

/// Returns whether the dynamic section at `at` is that of a library, or of a program that needs libraries. A statically linked
/// program that is position-independent also has such a section, but neither a name nor needed libraries in it.
fn is_loaded(file: &mut File, at: u64, size: u64, word: usize) -> io::Result<bool> {
    let mut section = Vec::new();
    file.seek(SeekFrom::Start(at))?;
    file.take(size.min(DYNAMIC)).read_to_end(&mut section)?;
    // Each entry is a tag and a value, of one word each.
    Ok(section.chunks_exact(2 * word).any(|entry| {
        let tag = entry.get(..word).and_then(number);
        tag == Some(DT_NEEDED.into()) || tag == Some(DT_SONAME.into())
    }))
}

/// Returns the integer that 4 or 8 bytes contain in the byte order of this machine.
fn number(bytes: &[u8]) -> Option<u64> {
    match bytes.len() {
        4 => bytes.try_into().ok().map(u32::from_ne_bytes).map(u64::from),
        _ => bytes.try_into().ok().map(u64::from_ne_bytes),
    }
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

/// The size of the buffer for the attribute `security.capability`, whose longest value has 24 bytes.
const CAPABILITIES_MAX: usize = 64;

/// Returns whether the file has capabilities (capabilities(7)). If another user than root executes it, the loader ignores LD_PRELOAD,
/// as for set-user-ID.
pub(crate) fn has_capabilities(path: &Path) -> bool {
    let mut value = [0; CAPABILITIES_MAX];
    // With an empty buffer the call would return 0 as the length of an attribute that exists.
    match rustix::fs::getxattr(path, "security.capability", &mut value[..]) {
        Ok(length) => length > 0,
        Err(e) => e == rustix::io::Errno::RANGE,
    }
}

/// Returns the reasons why `program`, or the interpreter that runs it, will not load `library`.
pub(crate) fn obstacles(program: &Path, library: &Path) -> Vec<Obstacle> {
    obstacles_for(rustix::process::getuid().is_root(), program, library)
}

/// Like [`obstacles`], for the superuser (`root`) or another user. File capabilities give the superuser no privileges that it lacks,
/// so the loader does not ignore the variables for it.
fn obstacles_for(root: bool, program: &Path, library: &Path) -> Vec<Obstacle> {
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
    } else if !root && has_capabilities(&path) {
        found.push(Obstacle::Capable(path));
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
    use std::collections::BTreeSet;

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
    fn a_library_and_the_loader_are_not_static() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let loaded: BTreeSet<&str> = maps
            .lines()
            .filter_map(|line| line.split_whitespace().nth(5))
            .filter(|path| path.contains(".so"))
            .collect();
        assert!(loaded.len() >= 2, "{maps}");
        for path in loaded {
            assert_eq!(obstacles(Path::new(path), Path::new(path)), [], "{path}");
        }
    }

    #[test]
    fn a_static_program_may_have_a_dynamic_section() {
        let dir = std::env::temp_dir().join(format!("anywarp-elf4-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let program = dir.join("program");
        for (tag, is_dynamic) in [
            (object::elf::DT_STRTAB, false),
            (DT_NEEDED, true),
            (DT_SONAME, true),
        ] {
            let mut file = vec![0u8; 64 + 56 + 32];
            file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
            file[18] = 0x3e;
            file[32] = 64; // the program header
            file[54] = 56;
            file[56] = 1;
            file[64] = PT_DYNAMIC as u8;
            file[64 + 8] = 64 + 56; // the offset of the section
            file[64 + 32] = 32; // its size
            file[64 + 56] = tag as u8;
            std::fs::write(&program, &file).unwrap();
            assert_eq!(
                kind(&program).unwrap(),
                Kind::Elf {
                    machine: 0x3e,
                    class: 2,
                    dynamic: is_dynamic
                },
                "{tag}"
            );
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn file_capabilities_are_an_obstacle_for_other_users_than_root() {
        let own = std::env::current_exe().unwrap();
        let copy = own.with_extension("capable");
        std::fs::copy(&own, &copy).unwrap();
        assert!(!has_capabilities(&copy));
        // cap_net_raw=ep, in version 2 of the format.
        let value = [
            1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        let flags = rustix::fs::XattrFlags::empty();
        let set = rustix::fs::setxattr(&copy, "security.capability", &value, flags);
        let (found, user, root) = (
            has_capabilities(&copy),
            obstacles_for(false, &copy, &own),
            obstacles_for(true, &copy, &own),
        );
        std::fs::remove_file(&copy).unwrap();
        if let Err(why) = set {
            eprintln!("skipped: file capabilities cannot be set here: {why}");
            return;
        }
        assert!(found);
        assert_eq!(user, [Obstacle::Capable(copy)]);
        assert_eq!(root, []);
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
