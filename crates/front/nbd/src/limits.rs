//! The bounds of a server: every queue, length, count and wait.

use std::time::Duration;

/// Bytes of the longest read or write, which clients get as the block size limit. It is the space's
/// own limit, so requests need no splitting.
pub const PAYLOAD_BYTES_MAX: u32 = pagemesh_base::space::REQUEST_BYTES_MAX;
/// Bytes of the longest write that is read to its end only to be refused. A longer one closes the
/// connection: it is more likely garbage than a request of a client that ignored the limit.
pub const SKIPPED_BYTES_MAX: u32 = 2 * PAYLOAD_BYTES_MAX;
/// The block size that clients should prefer: the page of the store.
pub(crate) const PREFERRED_BYTES: u32 = 4096;
/// Bytes of the data of one option: enough for the longest name and a hundred metadata queries, and
/// few enough to hold for an unauthenticated client.
pub(crate) const OPTION_BYTES_MAX: usize = 64 << 10;
/// Options of one handshake; clients need fewer than ten. Those that list many exports on one
/// connection need a few dozen.
pub const OPTIONS_MAX: u32 = 256;
/// Bytes of an export's name.
pub const NAME_BYTES_MAX: usize = 255;
/// Bytes of an export's description.
pub const DESCRIPTION_BYTES_MAX: usize = 1024;
/// Exports of one registry; bounds the answer to a listing at about 5 MiB.
pub const EXPORTS_MAX: usize = 4096;
/// Requests of one connection that are in flight or have unsent replies: the limit of a channel.
pub(crate) const REQUESTS_MAX: usize = pagemesh_base::space::REQUESTS_MAX;
/// Bytes that the requests in flight and the unsent replies of one connection hold, beyond the
/// first request: two of the longest.
pub(crate) const HELD_BYTES_MAX: u64 = 2 * PAYLOAD_BYTES_MAX as u64;
/// Bytes of the shared receive buffer: more than 16 requests of 4 KiB in one
/// system call, and it stays in the second level cache.
pub const RECEIVE_BYTES: usize = 256 << 10;
/// Bytes up to which a payload is received in the shared buffer and copied out of it. A longer one
/// is received into a buffer of its own; below, the second system call costs more than the copy.
pub(crate) const COPIED_BYTES_MAX: usize = 16 << 10;
/// Bytes received at once while long writes arrive, so that little of the next long payload lands
/// in the shared buffer, from where it is copied.
pub(crate) const SHORT_RECEIVE_BYTES: usize = 4 << 10;
/// Consecutive other requests after which long writes count as over.
pub(crate) const SHORT_RECEIVE_REQUESTS: u32 = 8;
/// Buffers passed to one send.
pub(crate) const SEND_PARTS_MAX: usize = 64;
/// Requests submitted before their replies are sent: the client works on these while the rest of
/// its batch is served.
pub(crate) const BATCH_REQUESTS: usize = 8;
/// Bytes written per step of a write-zeroes that must not make holes.
pub(crate) const ZEROES_BYTES: usize = 1 << 20;
/// Microseconds of spinning before sleeping. A client at depth one returns in 5 to 15 µs; a sleep
/// and a wake-up cost about as much.
pub(crate) const SPIN_US: u64 = 40;
/// Waits of each trial with or without spinning: a millisecond of work.
pub(crate) const SPIN_TRIAL_WAITS: u32 = 32;
/// Trials before each run, half of them with spinning; the median counts.
pub(crate) const SPIN_TRIALS: usize = 10;
/// Waits after the trials, until the next ones; doubled each time the result is the same, so that
/// the slower mode runs for less than one percent.
pub(crate) const SPIN_RUN_MIN: u32 = 1024;
/// The most waits between two rounds of trials.
pub(crate) const SPIN_RUN_MAX: u32 = 16 << 10;
/// The least gain by which spinning is worth the processor.
pub(crate) const SPIN_GAIN_PERCENT: u64 = 5;
/// The longest time between two waits that counts in a trial: beyond a time slice it is a pause of
/// the client.
pub(crate) const SPIN_GAP_MAX: Duration = Duration::from_millis(1);
/// The pause of accepting after descriptors or memory ran out.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The longest wait of a handshake for its channel to be ready. Connecting to every brick takes
/// milliseconds. If no leg of a volume can be reached, requests wait for one, not the handshake.
pub(crate) const CHANNEL_READY_LIMIT: Duration = Duration::from_secs(5);

/// The configurable bounds of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections in total; more are closed at once. Each is a thread.
    pub connections_max: usize,
    /// Connections to one export; more are refused with a message.
    pub export_connections_max: usize,
    /// The time from the connection to the choice of an export.
    pub handshake: Duration,
    /// The time without a byte in the middle of a request. It is long, because a suspended client
    /// is not a broken one.
    pub stalled_message: Duration,
    /// The time for requests in flight, and their replies, when a connection ends.
    pub drain: Duration,
    /// Whether idle processors may be kept from sleeping while a client is busy.
    pub may_keep_cpus_awake: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 512,
            export_connections_max: 128,
            handshake: Duration::from_secs(15),
            stalled_message: Duration::from_secs(300),
            drain: Duration::from_secs(10),
            may_keep_cpus_awake: true,
        }
    }
}
