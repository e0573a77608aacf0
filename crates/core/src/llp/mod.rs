//! Lower layer: how segments are transferred. Over TCP this is MPA, which delimits the segments in the
//! byte stream and protects them with a CRC.

pub mod mpa;
