//! Every limit of a volume, and its reason.

use std::time::Duration;

/// The size in bytes of the regions by which range locks are found. Pieces of requests never
/// cross a region border, so each takes exactly one lock. Long clears still need few pieces (65
/// 536 per TiB).
pub const REGION_BYTES: u64 = 16 << 20;
/// The size in bytes of the runs that a change of whole pages does not cross. A pool records a
/// change within one run, up to the longest write, as one operation. So it accepts or refuses
/// the change as a whole.
pub const ATOMIC_RUN_BYTES: u64 = 2 << 20;
/// The number of mutexes over which the regions of a volume are spread: enough that a dozen
/// threads rarely contend for one.
pub const LOCK_SHARDS: usize = 64;
/// The maximum of pieces of one request in flight. It keeps a long discard or a striped read
/// from filling the channel.
pub const REQUEST_PIECES_MAX: u32 = 64;
/// The maximum of pieces in flight on one channel. A piece has at most one message on a leg, so
/// this stays below `LEG_REQUESTS_MAX` of the slice interface.
pub const PIECES_MAX: usize = 2048;
/// The maximum of page repairs in flight on one channel. Later reads or a check repair further
/// damage.
pub const REPAIRS_MAX: usize = 16;
/// The maximum of acknowledged but unflushed operations of one channel and column on legs of
/// class `file-sync`. At the limit the channel starts a flush: a journal must hold them all.
pub const UNFLUSHED_MAX: usize = 512;
/// The maximum of failed ranges that are recorded for a column until its copies are known to be
/// equal: an engine has no more pieces. Beyond it, all reads of the column fail.
pub const INDETERMINATE_RANGES_MAX: usize = 2048;
/// The maximum of channels of one volume: each takes a session on every brick.
pub const CHANNELS_MAX: usize = 64;

/// The time that a cut waits for the layout, and for changes that began before it. Writers go on meanwhile, so
/// it only bounds the wait of the manager, which takes the snapshot again.
pub const CUT_LIMIT: Duration = Duration::from_secs(10);

/// The time that changes wait at most while the volumes of a group are cut at one moment. Then they go on, and the
/// group is cut again. It bounds the stall of writes after a manager or a controller has died; a usual hold takes two
/// messages to the manager.
pub const HOLD_LIMIT: Duration = Duration::from_millis(500);
/// The interval at which a waiting direct client checks whether its change may go on.
pub const HOLD_POLL: Duration = Duration::from_micros(50);
/// The time that a cut waits for the asynchronous replica to prepare the snapshot. The replica is at most
/// [`REPLICATION_AGE_MAX`] behind, or acknowledgements wait for it. A later answer leaves the snapshot missing there.
pub const REPLICA_PREPARE_LIMIT: Duration = Duration::from_secs(2);
/// Snapshots that were cut, and that the replica does not have yet. The replica is some seconds behind at most, and a cut
/// takes longer than some milliseconds. Beyond it a snapshot is missing on the replica.
pub const REPLICA_SNAPSHOTS_MAX: usize = 64;
/// Snapshots that the replica has, and that were not reported to the manager. A report has all of them. A manager that
/// does not answer makes no snapshots, so their number is below [`REPLICA_SNAPSHOTS_MAX`] in practice.
pub const REPLICA_SNAPSHOTS_REPORTED_MAX: usize = 128;

/// The interval at which the controller checks whether direct operations have ended. They take
/// microseconds, but their threads may have to wait for a processor.
pub const DIRECT_CLIENT_POLL: Duration = Duration::from_millis(1);

/// The wait before the next try to reconcile a torn operation. By then a lost leg is known to
/// be lost.
pub const RECONCILE_RETRY: Duration = Duration::from_millis(20);
/// The number of failed tries before a warning is logged. After that a warning comes at each
/// power of two.
pub const RECONCILE_WARN_TRIES_MIN: u64 = 64;

/// The first wait before the manager is asked again.
pub const MANAGER_RETRY_MIN: Duration = Duration::from_millis(20);
/// The longest wait before the manager is asked again. It bounds the stall of writes after the
/// manager is back.
pub const MANAGER_RETRY_MAX: Duration = Duration::from_millis(500);
/// How often an attach calls a manager that does not answer.
pub const ATTACH_TRIES_MAX: u32 = 5;
/// The first wait before a leg of a column without any in-sync leg is tried again.
pub const RECONNECT_RETRY_MIN: Duration = Duration::from_millis(20);
/// The longest such wait: requests are stalled meanwhile.
pub const RECONNECT_RETRY_MAX: Duration = Duration::from_millis(250);
/// How long requests wait for a column without any in-sync leg. That is long enough for a brick
/// to restart and recover. It is shorter than the time after which kernels and databases give a
/// disk up.
pub const DOWN_LIMIT: Duration = Duration::from_secs(25);
/// The first wait before a stale leg is tried again.
pub const RESYNC_RETRY_MIN: Duration = Duration::from_millis(250);
/// The longest such wait.
pub const RESYNC_RETRY_MAX: Duration = Duration::from_secs(5);

/// The maximum of bytes that a replica may lag behind before acknowledgements wait.
///
/// **Data loss:** A promotion of the replica may lose this much.
pub const REPLICATION_BYTES_MAX: u64 = 64 << 20;
/// The maximum of changes that a replica may lag behind. It bounds the cost of small changes.
pub const REPLICATION_CHANGES_MAX: usize = 1 << 16;
/// How long the sender lingers after it sent a change. Changes that no acknowledgement waits
/// for are batched meanwhile, since a wake-up for each costs more.
pub(crate) const REPLICATION_LINGER: Duration = Duration::from_micros(500);
/// How old the oldest unsent change may be before acknowledgements wait.
pub const REPLICATION_AGE_MAX: Duration = Duration::from_secs(1);
/// The maximum of changes in flight to a replica: enough to fill a fast network.
pub const REPLICATION_IN_FLIGHT_MAX: usize = 256;

/// The bytes that resync copies under one range lock. With the next limit it bounds how long a
/// write to the same place waits.
pub const RESYNC_CHUNK_BYTES: u64 = 256 << 10;
/// The maximum of chunks in flight to one leg in resync. Each takes several messages, one after
/// the other, and few of them fill a fast network.
pub const RESYNC_CHUNKS_MAX: usize = 8;
/// The bytes per second of a resync while there are other writes.
pub const RESYNC_BUSY_BYTES_PER_S: u64 = 128 << 20;
/// How long other writes count as going on after the last of them.
pub const RESYNC_BUSY_FOR: Duration = Duration::from_millis(10);
/// The pages that a check compares under one range lock.
pub const CHECK_CHUNK_PAGES: u64 = 256;
/// The maximum of differing runs that a check lists. All are counted.
pub const DIFFERENCES_MAX: usize = 1024;
/// The maximum of damaged pages that a check or a scrub lists and logs. All are counted.
pub const DAMAGES_MAX: usize = 64;
/// The latest start of the first scrub after the attach. The delay keeps a scrub from competing
/// with the start of the client.
pub const SCRUB_DELAY: Duration = Duration::from_secs(10 * 60);
/// The default interval between two scrubs. A scrub should find a damaged page before its other
/// copy is damaged, too.
pub const SCRUB_EVERY: Duration = Duration::from_secs(7 * 24 * 3600);
/// The default bytes per second of a scrub: a hundredth of the rate at which one processor
/// reads and sums. A TiB takes 4.7 hours.
pub const SCRUB_BYTES_PER_S: u64 = 64 << 20;
/// How many times slower a scrub is while there are writes.
pub const SCRUB_BUSY_SHARE: u32 = 4;
/// The bytes that a scrub reads before it sleeps: few wake-ups, and no long burst.
pub const SCRUB_BATCH_BYTES: u64 = 1 << 20;
/// How often a scrub tries a chunk, before it skips it because its legs do not answer.
pub const SCRUB_TRIES_MAX: u32 = 5;
/// The pause between two such tries.
pub const SCRUB_RETRY: Duration = Duration::from_secs(1);
/// The interval at which a scrub updates its progress in the status.
pub const SCRUB_REPORT_EVERY: Duration = Duration::from_millis(500);
/// The maximum of hedged reads of one channel and column that have not been answered by all
/// legs asked.
pub const HEDGES_MAX: usize = 64;
/// The number of answered reads per hedge. Legs get at most a sixteenth more reads.
pub const HEDGE_READS: usize = 16;
/// The shortest delay before a read is hedged: longer than a processor's switch to another
/// thread costs.
pub const HEDGE_DELAY_MIN: Duration = Duration::from_millis(1);
/// The longest delay. It also holds for the first reads, before any latency is measured.
pub const HEDGE_DELAY_MAX: Duration = Duration::from_millis(50);
/// The wait before a brick that had no session for a channel is asked again. Other clients
/// release theirs soon, or not for a long time.
pub const SESSION_RETRY: Duration = Duration::from_millis(50);
/// The wait before the controller tries again to end a channel's connection while the channel's
/// thread is inside a call. Calls take microseconds, unless an owner is stalled.
pub(crate) const LINK_END_RETRY: Duration = Duration::from_millis(10);
/// How long a detach waits for channels and the replica before the volume is released.
pub const DETACH_LIMIT: Duration = Duration::from_secs(2);
/// How often a detach calls a manager that is out of reach.
pub const DETACH_TRIES_MAX: u32 = 3;

/// The maximum of completions of a mapped leg between two reaps: every request in flight.
pub(crate) const MAPPED_DONE_MAX: usize = pagemesh_base::slice::LEG_REQUESTS_MAX;

/// The interval at which a client asks the manager for changes of the layout: one call of a few
/// kilobytes.
pub const LAYOUT_POLL: Duration = Duration::from_secs(10);

/// The same interval during a resync, because people watch its progress.
pub(crate) const LAYOUT_POLL_RESYNCING: Duration = Duration::from_secs(1);

/// The maximum of changes that a replica may lag behind; see [`REPLICATION_CHANGES_MAX`].
#[inline(always)]
pub(crate) fn replication_changes_max() -> usize {
    #[cfg(feature = "test-api")]
    if lowered::are_lowered() {
        return lowered::LOWERED_CHANGES_MAX;
    }
    REPLICATION_CHANGES_MAX
}

/// The maximum of changes in flight to a replica; see [`REPLICATION_IN_FLIGHT_MAX`].
#[inline(always)]
pub(crate) fn replication_in_flight_max() -> usize {
    #[cfg(feature = "test-api")]
    if lowered::are_lowered() {
        return lowered::LOWERED_IN_FLIGHT_MAX;
    }
    REPLICATION_IN_FLIGHT_MAX
}

/// Limits so low that tests reach them. A test asks for them; the feature alone, which other
/// crates' tests may enable with theirs, changes nothing.
#[cfg(feature = "test-api")]
pub(crate) mod lowered {
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Few, so that acknowledgements wait.
    pub const LOWERED_CHANGES_MAX: usize = 64;
    /// Few, so that more changes wait.
    pub(crate) const LOWERED_IN_FLIGHT_MAX: usize = 4;

    static ARE_LOWERED: AtomicBool = AtomicBool::new(false);

    /// Lowers the limits of replication in this process, for good.
    pub fn lower_replication_limits() {
        ARE_LOWERED.store(true, Ordering::Relaxed);
    }

    pub(crate) fn are_lowered() -> bool {
        ARE_LOWERED.load(Ordering::Relaxed)
    }
}
