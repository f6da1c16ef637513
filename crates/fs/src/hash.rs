//! Hash tables by page and inode numbers. The file system assigns these numbers itself, so the hash
//! need not resist chosen keys.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// 2^64 divided by the golden ratio: it spreads adjacent numbers (Knuth, TAOCP 6.4).
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

pub(crate) type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;
pub(crate) type NumberSet<K> = HashSet<K, BuildHasherDefault<NumberHasher>>;

/// Hashes one number: multiplies it and XORs the halves of the product.
#[derive(Clone, Copy, Default)]
pub(crate) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u64(&mut self, number: u64) {
        let product = u128::from(self.0 ^ number) * u128::from(FACTOR);
        self.0 = (product as u64) ^ (product >> 64) as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::{BuildHasher, BuildHasherDefault};

    /// A hash table takes the bucket from the low bits, and a tag from the highest seven.
    #[test]
    fn spaced_numbers_differ_in_low_and_high_bits() {
        let hash = |number: u64| BuildHasherDefault::<NumberHasher>::default().hash_one(number);
        for step in [1, 8, 16, 512, 1 << 20] {
            let hashes: Vec<u64> = (0..1024).map(|at| hash(at * step)).collect();
            let places: HashSet<u64> = hashes.iter().map(|hash| hash % 1024).collect();
            let tags: HashSet<u64> = hashes.iter().map(|hash| hash >> 57).collect();
            assert!(places.len() > 500, "{} places, step {step}", places.len());
            assert!(tags.len() > 100, "{} tags, step {step}", tags.len());
        }
    }
}
