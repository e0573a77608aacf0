//! anywarp-sim
