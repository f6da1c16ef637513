//! Sizes of files and of transfers, as SPEC SFS97_R1 publishes them.
//!
//! SFS97 counts transfers on the wire: a request above 8 KiB is one call for each block of 8 KiB and one for the rest of 1
//! to 7 KiB. So 149 of 164 READs and 100 of 200 WRITEs carry a whole block.

use pagemesh_base::rng::SplitMix64;

/// Bytes of a block.
pub const BLOCK_BYTES: u32 = 8 << 10;
const KIB: u32 = 1 << 10;
/// Percent of files, and their KiB.
const FILE_SIZES: [(u32, u32); 10] = [
    (33, 1),
    (21, 2),
    (13, 4),
    (10, 8),
    (8, 16),
    (5, 32),
    (4, 64),
    (3, 128),
    (2, 256),
    (1, 1024),
];
/// READs with a whole block, of all.
const WHOLE_READS: (u64, u64) = (149, 164);
/// WRITEs with a whole block, of all.
const WHOLE_WRITES: (u64, u64) = (100, 200);
/// Percent of WRITEs that append.
pub const APPEND_PERCENT: u64 = 70;
/// Percent of LOOKUPs for a name that does not exist.
pub const FAILED_LOOKUP_PERCENT: u64 = 35;

/// The mean size of a file.
pub const FILE_BYTES_MEAN: u64 = 27_330;

/// Draws the size of a file in bytes.
pub fn draw_file_bytes(rng: &mut SplitMix64) -> u32 {
    let mut left = rng.below(100) as u32;
    for (percent, kib) in FILE_SIZES {
        match left.checked_sub(percent) {
            Some(rest) => left = rest,
            None => return kib * KIB,
        }
    }
    KIB
}

/// Draws the bytes of a READ.
pub fn draw_read_bytes(rng: &mut SplitMix64) -> u32 {
    draw_transfer_bytes(rng, WHOLE_READS)
}

/// Draws the bytes of a WRITE.
pub fn draw_write_bytes(rng: &mut SplitMix64) -> u32 {
    draw_transfer_bytes(rng, WHOLE_WRITES)
}

fn draw_transfer_bytes(rng: &mut SplitMix64, (whole, all): (u64, u64)) -> u32 {
    match rng.below(all) < whole {
        true => BLOCK_BYTES,
        false => (1 + rng.below(7) as u32) * KIB,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_sizes_follow_the_published_shares() {
        assert_eq!(FILE_SIZES.iter().map(|it| it.0).sum::<u32>(), 100);
        let mean = FILE_SIZES.iter().map(|it| it.0 * it.1 * KIB / 100);
        let mean = u64::from(mean.sum::<u32>());
        assert!(mean.abs_diff(FILE_BYTES_MEAN) < 50, "{mean}");
        let mut rng = SplitMix64::new(1);
        let drawn: Vec<u32> = (0..100_000).map(|_| draw_file_bytes(&mut rng)).collect();
        for (percent, kib) in FILE_SIZES {
            let found = drawn.iter().filter(|it| **it == kib * KIB).count() / 1000;
            assert!(found.abs_diff(percent as usize) <= 1, "{kib} KiB: {found}");
        }
    }

    #[test]
    fn transfers_are_blocks_and_rests() {
        let check = |draw: fn(&mut SplitMix64) -> u32, percent: usize| {
            let mut rng = SplitMix64::new(2);
            let drawn: Vec<u32> = (0..100_000).map(|_| draw(&mut rng)).collect();
            let whole = drawn.iter().filter(|it| **it == BLOCK_BYTES).count() / 1000;
            assert!(whole.abs_diff(percent) <= 1, "{whole}");
            let is_valid = |it: &u32| *it <= BLOCK_BYTES && *it > 0 && it.is_multiple_of(KIB);
            assert!(drawn.iter().all(is_valid));
        };
        check(draw_read_bytes, 90);
        check(draw_write_bytes, 50);
    }
}
