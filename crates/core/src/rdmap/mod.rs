//! What an operation means (RFC 5040, RFC 7306): work requests become messages, segments become deliveries.

pub mod read;
pub mod rx;
pub mod tx;

#[cfg(test)]
mod tests;
