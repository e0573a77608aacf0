//! Replays the inputs that the fuzzer found.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::path::Path;

use anywarp_sim::fuzz::TARGETS;

#[test]
fn every_input_of_every_corpus() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    for (name, target) in TARGETS {
        let mut files: Vec<_> = std::fs::read_dir(corpora.join(name))
            .unwrap_or_else(|e| panic!("fuzz/corpus/{name}: {e}"))
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        assert!(
            files.len() >= 20,
            "fuzz/corpus/{name}: {} files",
            files.len()
        );
        for file in files {
            // A panic message names only the test. The line that was printed last before the panic names the input.
            println!("{}", file.display());
            target(&std::fs::read(&file).unwrap());
        }
    }
}
