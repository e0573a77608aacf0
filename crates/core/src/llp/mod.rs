//! Lower layer: how a segment travels. Over TCP this is MPA, which finds the segments in a byte
//! stream again and guards them with a CRC.

pub mod mpa;
