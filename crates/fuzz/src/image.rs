//! Files that are mostly zeroes, stored as text: golden images of a format, so that a test can
//! check that old files are still readable.
//!
//! The first line is the number of bytes. Each further line is `offset count hex`: the same 64
//! bytes, `count` times from the offset on. Zeroes at the end of the 64 bytes are left out, and so
//! are lines of zeroes only.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

const LINE_BYTES: usize = 64;

/// Reads the golden image at a path. If there is none, `PAGEMESH_KEEP_IMAGES=1` stores the output of `make` there
/// first. An image is never replaced.
///
/// # Panics
/// If the text is missing or is not the text of an image.
pub fn golden_image(path: &Path, make: impl FnOnce() -> Vec<u8>) -> Vec<u8> {
    if env::var_os("PAGEMESH_KEEP_IMAGES").is_some() && !path.exists() {
        fs::write(path, to_text(&make())).unwrap_or_else(|cause| panic!("{path:?}: {cause}"));
    }
    read_image(path)
}

/// Reads an image that is never made again.
///
/// # Panics
/// If the text is missing or is not the text of an image.
pub fn read_image(path: &Path) -> Vec<u8> {
    let text = fs::read_to_string(path).unwrap_or_else(|cause| panic!("{path:?}: {cause}"));
    from_text(&text).unwrap_or_else(|| panic!("{path:?} is not the text of an image"))
}

fn to_text(bytes: &[u8]) -> String {
    let mut text = format!("{}\n", bytes.len());
    let mut rest: Vec<(usize, &[u8])> = (0..)
        .step_by(LINE_BYTES)
        .zip(bytes.chunks(LINE_BYTES))
        .collect();
    rest.retain(|(_, line)| line.iter().any(|byte| *byte != 0));
    let follows = |a: &(usize, &[u8]), b: &(usize, &[u8])| a.0 + LINE_BYTES == b.0 && a.1 == b.1;
    for run in rest.chunk_by(follows) {
        let (at, line) = run[0];
        let end = line
            .iter()
            .rposition(|byte| *byte != 0)
            .map_or(0, |last| last + 1);
        let _infallible = write!(text, "{at} {} ", run.len());
        for byte in &line[..end] {
            let _infallible = write!(text, "{byte:02x}");
        }
        text.push('\n');
    }
    text
}

fn from_text(text: &str) -> Option<Vec<u8>> {
    let mut lines = text.lines();
    let mut bytes = vec![0; lines.next()?.parse().ok()?];
    for line in lines {
        let mut words = line.split(' ');
        let (at, count): (usize, usize) =
            (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let digits = words.next()?;
        for line in 0..count {
            for digit in 0..digits.len() / 2 {
                let byte = u8::from_str_radix(digits.get(digit * 2..digit * 2 + 2)?, 16).ok()?;
                *bytes.get_mut(at + line * LINE_BYTES + digit)? = byte;
            }
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_survives_text_round_trip() {
        let mut bytes = vec![0; 1000];
        bytes[70] = 7;
        bytes[128..400].fill(0xa5);
        bytes[999] = 1;
        let text = to_text(&bytes);
        assert_eq!(from_text(&text), Some(bytes));
        assert_eq!(text.lines().count(), 5, "{text}");
        for bad in [
            "",
            "x",
            "100\n0 1",
            "100\n64 1 zz",
            "64\n64 1 01",
            "64\n0 2 01",
        ] {
            assert_eq!(from_text(bad), None, "{bad:?}");
        }
    }
}
