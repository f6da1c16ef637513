//! The identity of a file, for servers with clients that keep it across restarts, such as NFS.
//!
//! Number and generation alone do not identify a file for ever: a rollback to a snapshot, and a
//! create that a crash lost, bring back numbers with old generations. The birth time differs then.

use crate::format::inode::{Ino, Inode, Time};

/// Multipliers of the fold: fractions of the golden ratio and of the square root of 3. They and the
/// fold stay for ever, because clients keep its result.
const SEC_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
const NSEC_FACTOR: u64 = 0xbb67_ae85_84ca_a73b;

/// Identifies one file for ever. [`crate::Attr::file_id`] makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Number of the inode; reused.
    pub ino: Ino,
    /// Use of the number.
    pub generation: u32,
    /// A fold of the birth time.
    pub birth: u32,
}

impl FileId {
    pub(crate) fn of(ino: Ino, inode: &Inode) -> FileId {
        FileId::new(ino, inode.generation, inode.btime)
    }

    pub(crate) fn new(ino: Ino, generation: u32, btime: Time) -> FileId {
        let sec = btime.sec.cast_unsigned().wrapping_mul(SEC_FACTOR);
        let mixed = sec ^ u64::from(btime.nsec).wrapping_mul(NSEC_FACTOR);
        FileId {
            ino,
            generation,
            birth: (mixed ^ mixed >> 32) as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn birth(sec: i64, nsec: u32) -> u32 {
        FileId::new(Ino(7), 3, Time { sec, nsec }).birth
    }

    /// Clients keep folds: another result would make their handles stale.
    #[test]
    fn fold_of_birth_time_is_fixed() {
        assert_eq!(birth(0, 0), 0);
        assert_eq!(birth(1, 0), 0xe17d_05ac);
        assert_eq!(birth(1_700_000_000, 123_456_789), 0x50b1_81de);
    }

    #[test]
    fn near_birth_times_have_different_folds() {
        let ticks = (0..250).map(|tick| tick * 4_000_000);
        let all = ticks.flat_map(|nsec| (0..100).map(move |sec| birth(sec, nsec)));
        let mut all: Vec<u32> = all.collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        // 25 000 random numbers of 32 bits have 0.07 collisions.
        assert!(count - all.len() <= 1, "{} of {count}", all.len());
    }
}
