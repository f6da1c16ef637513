//! The content summary: a sum of hashes of pages, which does not depend on their order.

use crate::PAGE_BYTES;
use sha2::{Digest, Sha256};
use std::fmt;

/// The sum, modulo 2^128, of the hashes of the pages of a snapshot. A page of zeroes adds nothing. The hash is the
/// first 16 bytes, little endian, of the SHA-256 of the page's offset (8 bytes, little endian) and its bytes.
///
/// A stream of changes has the difference of the summaries of its two snapshots, so neither end reads pages that did
/// not change. It finds defects and damage; it is no proof against a forged stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContentSummary(u128);

impl ContentSummary {
    /// The summary of these bytes in a stream.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> ContentSummary {
        ContentSummary(u128::from_le_bytes(bytes))
    }

    /// As in a stream.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }

    /// Adds the pages of a range. `data` is whole pages from this offset on.
    pub fn add(&mut self, offset: u64, data: &[u8]) {
        for hash in hashes(offset, data) {
            self.0 = self.0.wrapping_add(hash);
        }
    }

    /// Takes away the pages of a range, as they were before a change.
    pub fn subtract(&mut self, offset: u64, data: &[u8]) {
        for hash in hashes(offset, data) {
            self.0 = self.0.wrapping_sub(hash);
        }
    }

    /// The summary after further changes with this difference.
    #[must_use]
    pub fn plus(self, difference: ContentSummary) -> ContentSummary {
        ContentSummary(self.0.wrapping_add(difference.0))
    }
}

impl fmt::Display for ContentSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

fn hashes(offset: u64, data: &[u8]) -> impl Iterator<Item = u128> {
    data.chunks(PAGE_BYTES).enumerate().map(move |(at, page)| {
        if crate::is_zero(page) {
            return 0;
        }
        let offset = offset + (at * PAGE_BYTES) as u64;
        let mut hash = Sha256::new();
        hash.update(offset.to_le_bytes());
        hash.update(page);
        u128::from_le_bytes(crate::fields::take(&hash.finalize(), 0))
    })
}
