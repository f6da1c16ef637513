//! Sizes: the page, the cache line, and the text form of sizes.

use std::fmt;
use std::str::FromStr;

/// Bytes of a page and of a frame.
pub const PAGE_BYTES: usize = 4096;
/// Bytes of a cache line: the unit of a flush.
pub const LINE_BYTES: usize = 64;

/// A size in bytes, in text `4096`, `64M` or `4G`. Suffixes are powers of 1024 and may be followed
/// by `iB` or `B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// No digits at the start.
    #[error("'{0}' is not a size; write a whole number with an optional K, M, G or T, as in 64M")]
    NotANumber(String),
    /// A suffix that names no unit.
    #[error("'{text}' ends in '{suffix}', which is no unit; use K, M, G or T")]
    UnknownUnit {
        /// The whole text.
        text: String,
        /// The text after the digits.
        suffix: String,
    },
    /// More bytes than 64 bits hold.
    #[error("'{0}' is more bytes than can be counted; the largest size is below 16777216T")]
    TooLarge(String),
}

fn unit_shift(suffix: &str) -> Option<u32> {
    let upper = suffix.to_ascii_uppercase();
    let letter = upper
        .strip_suffix("IB")
        .or_else(|| upper.strip_suffix('B'))
        .unwrap_or(&upper);
    match letter {
        // "4iB" names no unit; "4" and "4B" are bytes.
        "" if upper.len() < 2 => Some(0),
        "K" => Some(10),
        "M" => Some(20),
        "G" => Some(30),
        "T" => Some(40),
        _ => None,
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let trimmed = text.trim();
        let end = trimmed
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(trimmed.len());
        let (digits, suffix) = trimmed.split_at(end);
        if digits.is_empty() {
            return Err(SizeError::NotANumber(text.into()));
        }
        let shift = unit_shift(suffix).ok_or_else(|| SizeError::UnknownUnit {
            text: text.into(),
            suffix: suffix.into(),
        })?;
        digits
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(1 << shift))
            .map(Size)
            .ok_or_else(|| SizeError::TooLarge(text.into()))
    }
}

impl fmt::Display for Size {
    /// Writes the largest unit that divides the size, so that it parses back.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[track_caller]
    fn check(text: &str, bytes: u64) {
        assert_eq!(text.parse(), Ok(Size(bytes)), "{text:?}");
    }

    #[test]
    fn sizes_with_suffixes_are_parsed() {
        check("0", 0);
        check("512", 512);
        check("512B", 512);
        check("64M", 64 << 20);
        check(" 4g ", 4 << 30);
        check("4GiB", 4 << 30);
        check("16777215T", 16_777_215 << 40);
    }

    #[test]
    fn malformed_sizes_are_refused() {
        for text in ["", "G", "-1", "1.5G", "4X", "4iB", "4GG", "é", "4 G"] {
            assert!(text.parse::<Size>().is_err(), "{text:?}");
        }
        for text in ["16777216T", "18446744073709551616"] {
            assert_eq!(text.parse::<Size>(), Err(SizeError::TooLarge(text.into())));
        }
    }

    proptest! {
        #[test]
        fn displayed_size_parses_back(bytes: u64, shift in 0u32..50) {
            let size = Size(bytes >> shift << shift);
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }

        #[test]
        fn size_parser_never_panics(text in ".*") {
            let _ = text.parse::<Size>();
        }
    }
}
