//! anywarp-core
