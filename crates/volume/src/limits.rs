//! Every bound of a volume, and why it is what it is.

use std::time::Duration;

/// Bytes of the regions by which range locks are found. Pieces of requests
/// never cross one, so each takes exactly one lock; long clears still need few
/// pieces (65 536 per TiB).
pub const REGION_BYTES: u64 = 16 << 20;
/// Bytes of the runs that a change of whole pages does not cross: a pool
/// records what lies within one, up to the longest write, as one operation,
/// and so takes or refuses it as a whole.
pub const ATOMIC_RUN_BYTES: u64 = 2 << 20;
/// Mutexes over which the regions of a volume are spread: enough that a dozen
/// threads rarely meet on one.
pub const LOCK_SHARDS: usize = 64;
/// Pieces of one request in flight: keeps a long discard or striped read from
/// filling the channel.
pub const REQUEST_PIECES_MAX: u32 = 64;
/// Pieces in flight on one channel. A piece has at most one message on a leg,
/// so this stays below `LEG_REQUESTS_MAX` of the seam.
pub const PIECES_MAX: usize = 2048;
/// Page repairs in flight on one channel; more damage is repaired by later
/// reads or by a check.
pub const REPAIRS_MAX: usize = 16;
/// Acknowledged but unflushed operations of one channel and column on legs of
/// class `file-sync` before a flush is started: a lane must hold them all.
pub const UNFLUSHED_MAX: usize = 512;
/// Ranges of failed changes that are remembered for a column until its copies are
/// known to be the same: an engine has no more pieces. Beyond, no part of the
/// column is read.
pub const INDETERMINATE_RANGES_MAX: usize = 2048;
/// Channels of one volume: each takes a session on every brick.
pub const CHANNELS_MAX: usize = 64;

/// How often the keeper looks whether guests have left: their operations take
/// microseconds, but their threads may have to wait for a processor.
pub const DIRECT_CLIENT_POLL: Duration = Duration::from_millis(1);

/// How long until it is tried again to make alike what a dead guest left: by then a lost
/// leg is known to be lost.
pub const RECONCILE_RETRY: Duration = Duration::from_millis(20);
/// Tries before it is told that it takes long, and then each time that they are twice as many.
pub const RECONCILE_WARN_TRIES_MIN: u64 = 64;

/// First wait before the manager is asked again.
pub const MANAGER_RETRY_MIN: Duration = Duration::from_millis(20);
/// Longest wait before the manager is asked again; bounds the stall of writes
/// after it is back.
pub const MANAGER_RETRY_MAX: Duration = Duration::from_millis(500);
/// How often an attach asks a manager that does not answer.
pub const ATTACH_TRIES_MAX: u32 = 5;
/// First wait before a leg of a column without any in-sync leg is tried again.
pub const RECONNECT_RETRY_MIN: Duration = Duration::from_millis(20);
/// Longest such wait: requests are stalled meanwhile.
pub const RECONNECT_RETRY_MAX: Duration = Duration::from_millis(250);
/// How long requests wait for a column without any in-sync leg. Long enough
/// for a brick to restart and recover, short of the time after which kernels
/// and databases give a disk up.
pub const DOWN_LIMIT: Duration = Duration::from_secs(25);
/// First wait before a stale leg is tried again.
pub const RESYNC_RETRY_MIN: Duration = Duration::from_millis(250);
/// Longest such wait.
pub const RESYNC_RETRY_MAX: Duration = Duration::from_secs(5);

/// Bytes of changes that a leg which follows has yet to get, before acknowledgements
/// wait: what may be given up when it is promoted.
pub const REPLICATION_BYTES_MAX: u64 = 64 << 20;
/// Such changes: bounds what small ones cost. Few in this crate's tests.
pub const REPLICATION_CHANGES_MAX: usize = if cfg!(test) { 64 } else { 1 << 16 };
/// For so long after the last of them was sent those that nobody waits for are gathered,
/// instead of waking who sends them for each.
pub(crate) const REPLICATION_LINGER: Duration = Duration::from_micros(500);
/// How long such a change may have waited before acknowledgements wait.
pub const REPLICATION_AGE_MAX: Duration = Duration::from_secs(1);
/// Changes on their way to a leg that follows: enough to fill a fast network. Few in
/// this crate's tests, so that more wait.
pub const REPLICATION_IN_FLIGHT_MAX: usize = if cfg!(test) { 4 } else { 256 };

/// Bytes copied under one range lock while resynchronising: with the next limit it
/// bounds how long a write to the same place waits.
pub const RESYNC_CHUNK_BYTES: u64 = 256 << 10;
/// Chunks that a leg gets at once while resynchronising: each takes several messages,
/// one after the other, and few of them fill a fast network.
pub const RESYNC_CHUNKS_MAX: usize = 8;
/// Bytes per second of a resynchronisation while there are other writes.
pub const RESYNC_BUSY_BYTES_PER_S: u64 = 128 << 20;
/// How long after the last of them there are.
pub const RESYNC_BUSY_FOR: Duration = Duration::from_millis(10);
/// Pages compared under one range lock.
pub const CHECK_CHUNK_PAGES: u64 = 256;
/// Differing runs that a check reports one by one; all are counted.
pub const DIFFERENCES_MAX: usize = 1024;
/// Damaged pages that a check or a scrub reports and logs one by one; all are
/// counted.
pub const DAMAGES_MAX: usize = 64;
/// How long after the attach the first scrub begins at the latest: a client that
/// just came has better to do.
pub const SCRUB_DELAY: Duration = Duration::from_secs(10 * 60);
/// From one scrub to the next, unless told otherwise: a damaged page should be
/// found before its other copy is damaged, too.
pub const SCRUB_EVERY: Duration = Duration::from_secs(7 * 24 * 3600);
/// Bytes per second of a scrub, unless told otherwise: a hundredth of what one
/// processor reads and sums. A TiB takes 4.7 hours.
pub const SCRUB_BYTES_PER_S: u64 = 64 << 20;
/// How many times slower a scrub is while there are writes.
pub const SCRUB_BUSY_SHARE: u32 = 4;
/// Bytes looked at before a scrub sleeps: few wake-ups, and no long burst.
pub const SCRUB_BATCH_BYTES: u64 = 1 << 20;
/// How often a chunk is tried whose legs do not answer, before it is passed over.
pub const SCRUB_TRIES_MAX: u32 = 5;
/// The pause between two such tries.
pub const SCRUB_RETRY: Duration = Duration::from_secs(1);
/// How often the status is told how far a scrub has come.
pub const SCRUB_REPORT_EVERY: Duration = Duration::from_millis(500);
/// Reads of one channel and column that are hedged and not answered by all legs
/// asked.
pub const HEDGES_MAX: usize = 64;
/// Answered reads that pay for one hedge: legs get at most a sixteenth more
/// reads.
pub const HEDGE_READS: usize = 16;
/// The soonest that a read is asked of a second leg: beyond what a processor
/// given to others for a moment costs.
pub const HEDGE_DELAY_MIN: Duration = Duration::from_millis(1);
/// The latest; also for the first reads, while nothing was measured.
pub const HEDGE_DELAY_MAX: Duration = Duration::from_millis(50);
/// How soon a brick that had no session for a channel is asked again: others give theirs
/// back within moments, or not for long.
pub const SESSION_RETRY: Duration = Duration::from_millis(50);
/// How soon a channel is tried again whose thread was inside of a call when the keeper
/// was to end a connection of it: calls take microseconds, unless an owner stands still.
pub(crate) const LINK_END_RETRY: Duration = Duration::from_millis(10);
/// How long a volume that is dropped waits for its keeper to end.
pub const DETACH_LIMIT: Duration = Duration::from_secs(2);
/// How often the manager is told that a volume is given back, while it is out of reach.
pub const DETACH_TRIES_MAX: u32 = 3;

/// Completions of a mapped leg between two reaps: every request in flight.
pub(crate) const MAPPED_DONE_MAX: usize = pagemesh_base::slice::LEG_REQUESTS_MAX;

/// How often a client asks the manager whether operators have changed the layout:
/// one call of a few kilobytes.
pub const LAYOUT_POLL: Duration = Duration::from_secs(10);

/// The same while a copy returns, as people watch that.
pub(crate) const LAYOUT_POLL_RESYNCING: Duration = Duration::from_secs(1);
