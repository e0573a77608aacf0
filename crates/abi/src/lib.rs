//! anywarp-abi
