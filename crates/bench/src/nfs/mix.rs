//! The mix of NFSv3 operations, as SPEC SFS97_R1 (SFS 3.0) publishes it, and simpler mixes for load shapes.

use pagemesh_base::rng::SplitMix64;
use serde::Serialize;

/// An operation of the mix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// LOOKUP.
    Lookup,
    /// READ.
    Read,
    /// WRITE.
    Write,
    /// GETATTR.
    GetAttr,
    /// READLINK.
    ReadLink,
    /// READDIR.
    ReadDir,
    /// CREATE.
    Create,
    /// REMOVE.
    Remove,
    /// FSSTAT.
    FsStat,
    /// SETATTR.
    SetAttr,
    /// READDIRPLUS.
    ReadDirPlus,
    /// ACCESS.
    Access,
    /// COMMIT.
    Commit,
}

/// Number of operations.
pub const OPERATIONS: usize = Operation::ALL.len();

impl Operation {
    /// All, in the order of their numbers.
    pub const ALL: [Operation; 13] = [
        Operation::Lookup,
        Operation::Read,
        Operation::Write,
        Operation::GetAttr,
        Operation::ReadLink,
        Operation::ReadDir,
        Operation::Create,
        Operation::Remove,
        Operation::FsStat,
        Operation::SetAttr,
        Operation::ReadDirPlus,
        Operation::Access,
        Operation::Commit,
    ];

    /// Its place in [`Operation::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }

    /// Its name in RFC 1813.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Operation::Lookup => "LOOKUP",
            Operation::Read => "READ",
            Operation::Write => "WRITE",
            Operation::GetAttr => "GETATTR",
            Operation::ReadLink => "READLINK",
            Operation::ReadDir => "READDIR",
            Operation::Create => "CREATE",
            Operation::Remove => "REMOVE",
            Operation::FsStat => "FSSTAT",
            Operation::SetAttr => "SETATTR",
            Operation::ReadDirPlus => "READDIRPLUS",
            Operation::Access => "ACCESS",
            Operation::Commit => "COMMIT",
        }
    }
}

/// The bytes that READs and WRITEs access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AccessShape {
    /// Bytes of each transfer, at a multiple of them; none: blocks and rests, as SFS97 counts them.
    pub transfer_bytes: Option<u32>,
    /// All files alike, instead of mostly hot ones.
    pub is_uniform: bool,
    /// WRITEs are FILE_SYNC, and not UNSTABLE.
    pub is_synchronous: bool,
}

const SFS97_ACCESS: AccessShape = AccessShape {
    transfer_bytes: None,
    is_uniform: false,
    is_synchronous: false,
};

/// Weights of the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OperationMix {
    /// Its name in reports.
    pub name: &'static str,
    /// The weights, in the order of [`Operation::ALL`].
    weights: [u32; OPERATIONS],
    /// The bytes that they access.
    pub access: AccessShape,
}

impl OperationMix {
    /// The mix of SPEC SFS97_R1 for NFSv3, in the percentages that it publishes. They add up to 99.
    pub const SFS97: OperationMix = OperationMix {
        name: "sfs97",
        weights: [27, 18, 9, 11, 7, 2, 1, 1, 1, 1, 9, 7, 5],
        access: SFS97_ACCESS,
    };
    /// READ alone.
    pub const READS: OperationMix = OperationMix {
        name: "reads",
        weights: [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        access: SFS97_ACCESS,
    };
    /// WRITE, and a COMMIT after eight of them.
    pub const WRITES: OperationMix = OperationMix {
        name: "writes",
        weights: [0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        access: SFS97_ACCESS,
    };
    /// Names and attributes: no data.
    pub const NAMES: OperationMix = OperationMix {
        name: "names",
        weights: [40, 0, 0, 20, 5, 5, 5, 5, 0, 5, 5, 10, 0],
        access: SFS97_ACCESS,
    };
    /// Metadata of hot files, which caches hold.
    pub const CACHED_METADATA: OperationMix = OperationMix {
        name: "cached-metadata",
        weights: [2, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        access: SFS97_ACCESS,
    };
    /// READs of a page each, of all files alike.
    pub const PAGE_READS: OperationMix = OperationMix {
        name: "page-reads",
        access: AccessShape {
            transfer_bytes: Some(4096),
            is_uniform: true,
            is_synchronous: false,
        },
        ..Self::READS
    };
    /// WRITEs that are stored before each answer.
    pub const SYNCHRONOUS_WRITES: OperationMix = OperationMix {
        name: "synchronous-writes",
        weights: [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        access: AccessShape {
            transfer_bytes: None,
            is_uniform: false,
            is_synchronous: true,
        },
    };

    /// Draws an operation.
    pub fn draw(&self, rng: &mut SplitMix64) -> Operation {
        let total: u32 = self.weights.iter().sum();
        let mut left = rng.below(u64::from(total.max(1))) as u32;
        for (operation, weight) in Operation::ALL.into_iter().zip(self.weights) {
            match left.checked_sub(weight) {
                Some(rest) => left = rest,
                None => return operation,
            }
        }
        Operation::GetAttr
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_operations_follow_the_published_mix() {
        let mut rng = SplitMix64::new(3);
        let mut counts = [0u32; OPERATIONS];
        (0..99_000).for_each(|_| counts[OperationMix::SFS97.draw(&mut rng).index()] += 1);
        for (operation, percent) in [
            (Operation::Lookup, 27),
            (Operation::Read, 18),
            (Operation::GetAttr, 11),
            (Operation::Write, 9),
            (Operation::ReadDirPlus, 9),
            (Operation::Access, 7),
            (Operation::ReadLink, 7),
            (Operation::Commit, 5),
            (Operation::ReadDir, 2),
            (Operation::Create, 1),
            (Operation::Remove, 1),
            (Operation::FsStat, 1),
            (Operation::SetAttr, 1),
        ] {
            let found = f64::from(counts[operation.index()]) / 1000.0;
            let wanted = f64::from(percent);
            assert!((found - wanted).abs() < 0.5, "{operation:?}: {found}");
        }
    }

    #[test]
    fn operations_stand_at_their_own_index() {
        for (at, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation.index(), at);
        }
    }

    #[test]
    fn other_mixes_draw_only_their_operations() {
        let mut rng = SplitMix64::new(4);
        for _ in 0..1000 {
            assert_eq!(OperationMix::READS.draw(&mut rng), Operation::Read);
            let write = OperationMix::WRITES.draw(&mut rng);
            assert!(matches!(write, Operation::Write | Operation::Commit));
            let sync = OperationMix::SYNCHRONOUS_WRITES.draw(&mut rng);
            assert_eq!(sync, Operation::Write);
            let name = OperationMix::NAMES.draw(&mut rng);
            assert!(!matches!(name, Operation::Read | Operation::Write));
        }
    }
}
