//! The oldest supported glibc, and the check that the built files run with it.

use crate::{Result, sh};
use object::Endianness;
use object::elf::FileHeader64;
use object::read::elf::{FileHeader, SectionHeader};
use std::fs;
use std::path::{Path, PathBuf};

/// The minor version of the oldest supported glibc 2, which is that of EL 8, Debian 10, and wheels with the tag `manylinux_2_28`.
pub const OLDEST: u32 = 28;

/// The kind of file that `crates/abi/link/glibc.c` is linked into.
#[derive(Debug, Clone, Copy)]
pub enum Into {
    Library,
    Program,
    /// A library that replaces functions of libc.
    Replacement,
}

/// Compiles `crates/abi/link/glibc.c` into the folder `work`. Returns the arguments for the linker.
pub fn arguments(work: &Path, into: Into) -> Result<Vec<String>> {
    fs::create_dir_all(work)?;
    let (name, define) = match into {
        Into::Library => ("glibc.o", None),
        Into::Program => ("glibc-program.o", Some("-DPROGRAM")),
        Into::Replacement => ("glibc-replacement.o", Some("-DREPLACES")),
    };
    let object = work.join(name);
    let mut cc = sh::cc();
    cc.args(["-O2", "-fPIC", "-c"])
        .args(define)
        .arg(sh::root().join("crates/abi/link/glibc.c"))
        .arg("-o")
        .arg(&object);
    sh::run(&mut cc)?;
    Ok(vec![
        object.display().to_string(),
        "-Wl,--gc-sections".to_owned(),
        "-Wl,--push-state,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2,--pop-state".to_owned(),
    ])
}

/// Checks that no ELF file below `folder` needs a version node that is newer than the oldest supported glibc.
pub fn check(folder: &Path) -> Result {
    let mut folders = vec![folder.to_owned()];
    let (mut seen, mut newer) = (0_usize, Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if let Some(needed) = needed(&path)? {
                seen += 1;
                let beyond = needed.iter().filter(|version| is_newer(version));
                newer.extend(beyond.map(|version| format!("{} needs {version}", path.display())));
            }
        }
    }
    if seen == 0 {
        return Err(format!("{}: no programs and no libraries", folder.display()).into());
    }
    if newer.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{}\nnewer than glibc 2.{OLDEST}: bind it in crates/abi/link/glibc.c (objdump -T names the functions)",
        newer.join("\n")
    )
    .into())
}

/// Returns whether a version node of glibc is newer than the oldest glibc.
fn is_newer(version: &str) -> bool {
    let Some(number) = version.strip_prefix("GLIBC_") else {
        return false;
    };
    let numbers: Option<Vec<u32>> = number.split('.').map(|n| n.parse().ok()).collect();
    // Nodes without a number belong to new features of the loader, such as GLIBC_ABI_DT_RELR.
    numbers.is_none_or(|n| n > vec![2, OLDEST])
}

/// Returns the version nodes that an ELF file needs, or `None` for another kind of file.
fn needed(path: &PathBuf) -> Result<Option<Vec<String>>> {
    let data = fs::read(path)?;
    if !data.starts_with(b"\x7fELF") {
        return Ok(None);
    }
    parse(&data)
        .map(Some)
        .map_err(|e| format!("{}: {e}", path.display()).into())
}

fn parse(data: &[u8]) -> object::Result<Vec<String>> {
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let mut needed = Vec::new();
    for section in sections.iter() {
        let Some((mut libraries, strings)) = section.gnu_verneed(endian, data)? else {
            continue;
        };
        let strings = sections.strings(endian, data, strings)?;
        while let Some((_, mut versions)) = libraries.next()? {
            while let Some(version) = versions.next()? {
                let name = version.name(endian, strings)?;
                needed.push(String::from_utf8_lossy(name).into_owned());
            }
        }
    }
    Ok(needed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        for old in [
            "GLIBC_2.2.5",
            "GLIBC_2.28",
            "GLIBC_2.17",
            "GCC_3.0",
            "IBVERBS_1.14",
        ] {
            assert!(!is_newer(old), "{old}");
        }
        for new in [
            "GLIBC_2.29",
            "GLIBC_2.28.1",
            "GLIBC_2.100",
            "GLIBC_3.0",
            "GLIBC_ABI_DT_RELR",
        ] {
            assert!(is_newer(new), "{new}");
        }
    }

    /// The check finds a program that needs a newer version. Linked with the object, the program passes the check and runs.
    #[test]
    fn a_program_is_bound_to_old_versions() {
        let dir = std::env::temp_dir().join(format!("anywarp-glibc-{}", std::process::id()));
        fs::create_dir_all(dir.join("bin")).unwrap();
        let (source, program) = (dir.join("p.c"), dir.join("bin/p"));
        let code = "#define _GNU_SOURCE\n#include <pthread.h>\n#include <sys/stat.h>\n#include <unistd.h>\n\
            static int begun;\n\
            __attribute__((constructor)) static void begin(int argc) { begun = argc; }\n\
            static void *thread(void *a) { return gettid() == getpid() ? 0 : a; }\n\
            int main(void) { pthread_t t; void *end; struct stat64 s;\n\
            if (pthread_create(&t, 0, thread, &s) || pthread_join(t, &end)) return 1;\n\
            if (stat64(\"/\", &s) || !S_ISDIR(s.st_mode) || fstat64(0, &s)) return 2;\n\
            return begun == 1 && end == &s ? 0 : 3; }\n";
        fs::write(&source, code).unwrap();
        let build = |arguments: &[String]| {
            let mut cc = sh::cc();
            sh::run(cc.arg("-o").args([&program, &source]).args(arguments)).unwrap();
            std::process::Command::new(&program)
                .status()
                .unwrap()
                .code()
        };
        assert_eq!(build(&[]), Some(0));
        // If the build machine's glibc is old enough, the check passes without the object too.
        let plain = check(&dir.join("bin"));
        let newer = needed(&program)
            .unwrap()
            .unwrap()
            .iter()
            .any(|v| is_newer(v));
        assert_eq!(plain.is_err(), newer);
        let bound = arguments(&dir, Into::Program).unwrap();
        assert_eq!(build(&bound), Some(0));
        let checked = check(&dir.join("bin")).map_err(|e| e.to_string());
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(checked, Ok(()));
    }
}
