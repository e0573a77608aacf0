//! Lists of message sizes: `1,64,1K..4M`.

use std::str::FromStr;

/// The longest message.
const LONGEST: u64 = 1 << 30;

/// Message sizes in the order in which they were given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sizes(pub(crate) Vec<u64>);

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut sizes = Vec::new();
        for item in text.split(',') {
            match item.split_once("..") {
                None => sizes.push(number(item)?),
                Some((from, to)) => {
                    let (from, to) = (number(from)?, number(to)?);
                    if from > to {
                        return Err(format!("{item}: the range begins above its end"));
                    }
                    let doubled = std::iter::successors(Some(from), |size| Some(size * 2));
                    sizes.extend(doubled.take_while(|&size| size <= to));
                }
            }
        }
        Ok(Self(sizes))
    }
}

fn number(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is not a size from 1 to 1024M");
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (text.get(..text.len() - 1), 1 << 10),
        Some(b'm' | b'M') => (text.get(..text.len() - 1), 1 << 20),
        _ => (Some(text), 1),
    };
    let number: u64 = digits.and_then(|d| d.parse().ok()).ok_or_else(bad)?;
    number
        .checked_mul(unit)
        .filter(|size| (1..=LONGEST).contains(size))
        .ok_or_else(bad)
}

/// Formats a size in its largest whole unit.
pub(crate) fn text(size: u64) -> String {
    match size {
        _ if size >= 1 << 20 && size.is_multiple_of(1 << 20) => format!("{} MiB", size >> 20),
        _ if size >= 1 << 10 && size.is_multiple_of(1 << 10) => format!("{} KiB", size >> 10),
        _ => format!("{size} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_ranges() {
        assert_eq!(
            "1,100,1K..8K,4M".parse(),
            Ok(Sizes(vec![1, 100, 1024, 2048, 4096, 8192, 4 << 20]))
        );
        assert_eq!("3..10".parse(), Ok(Sizes(vec![3, 6])));
        for bad in [
            "",
            "0",
            "x",
            "1,,2",
            "K",
            "2048M",
            "8..4",
            "-1",
            "1..",
            "99999999999999999999M",
        ] {
            assert!(bad.parse::<Sizes>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_are_printed_in_their_largest_unit() {
        assert_eq!(
            [1, 1000, 1024, 1 << 20].map(text),
            ["1 B", "1000 B", "1 KiB", "1 MiB"]
        );
    }
}
