//! Why a pool cannot be opened or cannot continue.

use crate::format::devices::BadDevice;
use crate::format::geometry::BadSize;
use crate::format::journal::JournalDamage;
use crate::format::superblock::BadSuperblock;
use crate::format::table::BadTable;
use pagemesh_base::ids::Seq;
use pagemesh_pmem::MapError;
use uuid::Uuid;

/// The remedy for damage that the pool cannot repair. A new pool is a new brick, and no volume
/// copies itself there without an operator.
const REPLACE_POOL: &str = "replace the pool by a new brick: attach copies there and detach the lost ones with `pagemesh replica`";

/// Why a pool cannot be opened or cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// No valid superblock.
    #[error(transparent)]
    Superblock(#[from] BadSuperblock),
    /// A slice has snapshots, and the superblock names no log of versions.
    #[error("the superblock names no log of versions, and a slice has snapshots; {REPLACE_POOL}")]
    NoVersionLog,
    /// The changes of snapshots that a crash interrupted cannot be finished.
    #[error("the snapshots of the pool cannot be loaded: {0}")]
    Snapshots(String),
    /// A size that no pool has.
    #[error(transparent)]
    Size(#[from] BadSize),
    /// A device that cannot join the pool.
    #[error(transparent)]
    Device(#[from] BadDevice),
    /// The file or device is shorter than the pool.
    #[error(
        "the pool has {wanted} bytes but its file only {found}; it was truncated, restore it from a copy"
    )]
    Truncated {
        /// Bytes of the pool.
        wanted: u64,
        /// Bytes there.
        found: u64,
    },
    /// A device without a header of its own.
    #[error(
        "device {0} has no sound header; connect the right device, or name its path with --device; if the device is lost for ever, start the brick with --failed-device {0}: its pages are damaged then"
    )]
    NoDeviceHeader(Uuid),
    /// An old copy of a further device.
    #[error(
        "device {device} is a stale copy: it was last used at opening {found} of the pool, and the last one was {wanted}; connect the device itself, or name its path with --device; if the device is lost for ever, start the brick with --failed-device {device}: its pages are damaged then"
    )]
    StaleDevice {
        /// The device.
        device: Uuid,
        /// The opening in its header.
        found: u32,
        /// The last opening by the superblock.
        wanted: u32,
    },
    /// An old copy of the first device.
    #[error(
        "the pool's first device is a stale copy: its last opening was {wanted}, and device {device} was used at opening {found}; start the brick with the first device itself"
    )]
    StaleFirstDevice {
        /// The device with a later opening.
        device: Uuid,
        /// The opening in its header.
        found: u32,
        /// The last opening by the superblock.
        wanted: u32,
    },
    /// Another device joined meanwhile, or too many changed since the opening.
    #[error(
        "the pool's devices changed meanwhile, or too often since it was opened; try again, or start the brick again"
    )]
    DeviceChanged,
    /// The journal lost a record that was persistent.
    #[error("{0}; the medium lost it: {remedy}", remedy = REPLACE_POOL)]
    Journal(#[from] JournalDamage),
    /// A record that only an older build reads.
    #[error(
        "journal {0} holds a record of an older build, which this one does not read; start the older build and stop it in order once, so that it closes the pool"
    )]
    OlderFormat(u32),
    /// A part of a transaction is lost.
    #[error(
        "journal {0} lost a part of a transaction that was persistent; {remedy}",
        remedy = REPLACE_POOL
    )]
    Transaction(u32),
    /// The newer superblock is lost, and the older one no longer matches the journals.
    #[error(
        "one superblock is damaged, and the other is too old: journal {0} continued after it was written; {remedy}",
        remedy = REPLACE_POOL
    )]
    Superseded(u32),
    /// A record that was persistent names data that is damaged.
    #[error(
        "the record with seq {0} is valid but its data is damaged; {remedy}",
        remedy = REPLACE_POOL
    )]
    Data(Seq),
    /// A page table is damaged.
    #[error("{0}; {remedy}", remedy = REPLACE_POOL)]
    Table(#[from] BadTable),
    /// A page table cannot be read.
    #[error(
        "byte {0} of the pool, in a page table, cannot be read; {remedy}",
        remedy = REPLACE_POOL
    )]
    Unreadable(usize),
    /// A valid record with impossible content.
    #[error(
        "the record with seq {0} is impossible: its seq or a frame is out of range; {remedy}",
        remedy = REPLACE_POOL
    )]
    Record(Seq),
    /// A frame that was in use twice.
    #[error("frame {0} was freed twice: a page table is damaged; {remedy}", remedy = REPLACE_POOL)]
    FreedTwice(u64),
    /// A record of an object that the pool does not have.
    #[error(
        "a record names entry {0} of the object table, which the pool does not have; {remedy}",
        remedy = REPLACE_POOL
    )]
    Object(u32),
    /// The system refused.
    #[error(transparent)]
    System(#[from] MapError),
    /// An earlier failure; the persistent state is unknown since.
    #[error("the pool has failed earlier; open it again")]
    Failed,
    /// A session's journal holds an impossible record.
    #[error(
        "journal {0} holds a damaged or impossible record; stop the brick and run `pagemesh pool check` on the pool"
    )]
    Session(u32),
}
