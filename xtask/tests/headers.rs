//! The C headers of the libraries.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Adds the headers in a folder, and in the folders in it.
fn find(folder: &Path, headers: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            find(&path, headers)?;
        } else if path.extension().is_some_and(|e| e == "h") {
            headers.push(path);
        }
    }
    Ok(())
}

/// Returns C text without its comments and white space.
fn code(text: &str) -> String {
    let mut parts = text.split("/*");
    let first = parts.next().unwrap_or_default();
    let rest = parts.filter_map(|part| part.split_once("*/"));
    let code: String = std::iter::once(first)
        .chain(rest.map(|(_, after)| after))
        .collect();
    code.split_whitespace().collect()
}

/// C89 and C++98 do not permit a comma after the last enumerator, and compilers warn about it with `-pedantic`.
#[test]
fn no_comma_follows_the_last_enumerator() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .join("crates");
    let mut headers = Vec::new();
    for name in ["abi", "buffers", "exs"] {
        find(&crates.join(name).join("include"), &mut headers).unwrap();
    }
    assert!(headers.len() >= 3, "{headers:?}");
    for header in headers {
        let text = fs::read_to_string(&header).unwrap();
        assert!(!code(&text).contains(",}"), "{}", header.display());
    }
}
