//! Build and check tasks.
fn main() {}
