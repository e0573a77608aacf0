//! anywarp-engine
