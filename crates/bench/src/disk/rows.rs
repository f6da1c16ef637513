//! The rows of the comparison: one workload each, the same on every target.

use serde::Serialize;

/// The order and direction of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AccessPattern {
    /// Random reads.
    RandomRead,
    /// Random writes.
    RandomWrite,
    /// 70 % random reads, 30 % random writes.
    Mixed,
    /// Reads in order.
    SequentialRead,
    /// Writes in order.
    SequentialWrite,
}

impl AccessPattern {
    pub(super) fn fio_name(self) -> &'static str {
        match self {
            AccessPattern::RandomRead => "randread",
            AccessPattern::RandomWrite => "randwrite",
            AccessPattern::Mixed => "randrw",
            AccessPattern::SequentialRead => "read",
            AccessPattern::SequentialWrite => "write",
        }
    }

    pub(super) fn reads(self) -> bool {
        !matches!(
            self,
            AccessPattern::RandomWrite | AccessPattern::SequentialWrite
        )
    }

    pub(super) fn writes(self) -> bool {
        !matches!(
            self,
            AccessPattern::RandomRead | AccessPattern::SequentialRead
        )
    }
}

/// The durability of a row's writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RowDurability {
    /// A write may be lost at a power failure.
    Cached,
    /// A flush follows each write.
    Flushed,
    /// Each write is durable when it returns: O_DSYNC on files, a flush after each write elsewhere.
    ForcedUnitAccess,
}

/// A workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DiskRow {
    /// Its name on the command line.
    pub id: &'static str,
    /// Its name in reports.
    pub title: &'static str,
    /// Order and direction.
    pub pattern: AccessPattern,
    /// Bytes of a request.
    pub block_bytes: u32,
    /// Requests in flight of each job.
    pub depth: u32,
    /// Concurrent programs.
    pub jobs: u32,
    /// The durability of its writes.
    pub durability: RowDurability,
    /// Whether all its rounds come before the first random write, so that each target's data lies in order.
    pub is_in_order: bool,
}

const fn row(id: &'static str, title: &'static str, pattern: AccessPattern, depth: u32) -> DiskRow {
    DiskRow {
        id,
        title,
        pattern,
        block_bytes: 4096,
        depth,
        jobs: 1,
        durability: RowDurability::Cached,
        is_in_order: false,
    }
}

const fn flushed(row: DiskRow, jobs: u32, durability: RowDurability) -> DiskRow {
    DiskRow {
        jobs,
        durability,
        ..row
    }
}

const fn in_order(row: DiskRow) -> DiskRow {
    DiskRow {
        is_in_order: true,
        ..row
    }
}

/// A sequential row.
const fn sequential(id: &'static str, title: &'static str, pattern: AccessPattern) -> DiskRow {
    DiskRow {
        block_bytes: SEQUENTIAL_BYTES,
        ..row(id, title, pattern, SEQUENTIAL_DEPTH)
    }
}

/// Bytes of a sequential request.
const SEQUENTIAL_BYTES: u32 = 1 << 20;
/// Sequential requests in flight.
const SEQUENTIAL_DEPTH: u32 = 8;

/// All rows, in the order of reports.
pub const ROWS: [DiskRow; 11] = {
    use AccessPattern::{Mixed, RandomRead, RandomWrite, SequentialRead, SequentialWrite};
    use RowDurability::{Flushed, ForcedUnitAccess};
    [
        in_order(sequential(
            "sequential-read",
            "1 MiB read, QD8",
            SequentialRead,
        )),
        in_order(sequential(
            "sequential-write",
            "1 MiB write, QD8",
            SequentialWrite,
        )),
        row("random-read-qd1", "random read, QD1", RandomRead, 1),
        row("random-read-qd32", "random read, QD32", RandomRead, 32),
        row("random-write-qd32", "random write, QD32", RandomWrite, 32),
        flushed(
            row("write-flush-qd1", "write and flush, QD1", RandomWrite, 1),
            1,
            Flushed,
        ),
        flushed(
            row("write-flush-qd16", "write and flush, QD16", RandomWrite, 16),
            1,
            Flushed,
        ),
        flushed(
            row("fua-16-jobs", "16 writers with FUA", RandomWrite, 1),
            16,
            ForcedUnitAccess,
        ),
        row("mixed-qd32", "70/30, QD32", Mixed, 32),
        sequential(
            "scattered-read",
            "1 MiB read after random writes",
            SequentialRead,
        ),
        sequential(
            "scattered-write",
            "1 MiB write after random writes",
            SequentialWrite,
        ),
    ]
};

/// The row with this name on the command line.
pub fn row_of(id: &str) -> Option<DiskRow> {
    ROWS.into_iter().find(|row| row.id == id)
}
