//! Limits of every length, queue and wait of the fabric, with their reasons.

use crate::message::{BIRTH_BYTES, PART_BYTES};
use pagemesh_base::slice::{COPY_PAGES_MAX, LIST_ENTRIES_MAX, SLICE_IO_BYTES_MAX};
use pagemesh_base::space::{EXTENTS_MAX, TRANSACTION_PAGES_MAX};
use pagemesh_base::units::PAGE_BYTES;
use std::time::Duration;

/// Bytes of the longest text in a message: the reason of an error, a durability class. Longer texts
/// are cut at a character boundary.
pub const TEXT_BYTES_MAX: usize = 1024;

/// Bytes of the longest body: one write or one read. Lists are shorter, see [`LIST_ENTRIES_MAX`]
/// and [`EXTENTS_MAX`].
pub const BODY_BYTES_MAX: u32 = SLICE_IO_BYTES_MAX;
const _: () = assert!(LIST_ENTRIES_MAX * 32 <= BODY_BYTES_MAX as usize);
const _: () = assert!(EXTENTS_MAX * 8 <= BODY_BYTES_MAX as usize);

/// Bytes of the longest body of a transaction: each part has at least a page.
pub const TRANSACTION_BYTES_MAX: u32 =
    TRANSACTION_PAGES_MAX as u32 * (PAGE_BYTES + PART_BYTES) as u32;
const _: () = assert!(TRANSACTION_BYTES_MAX <= BODY_BYTES_MAX);

/// Bytes of the longest body of a copy: the pages, and a birth of each.
pub const COPY_BYTES_MAX: u32 = (COPY_PAGES_MAX * (PAGE_BYTES + BIRTH_BYTES)) as u32;
const _: () = assert!(COPY_BYTES_MAX <= BODY_BYTES_MAX);

/// Bytes taken with one receive: a batch of thirty 4 KiB writes. Larger ones
/// would fall out of the second-level cache before they are used.
pub const RECEIVE_BYTES: usize = 128 << 10;

/// Incomplete bodies of at least this length get a buffer of their own, which is then filled
/// without another copy.
pub const LARGE_BODY_BYTES: usize = 16 << 10;

/// Bodies up to this length are copied next to their headers before they are sent: that is cheaper
/// than one more entry of the vector.
pub const INLINE_BODY_BYTES: usize = 512;

/// Entries of the vector given to one send; the kernel takes at most 1024.
pub const SEND_PIECES_MAX: usize = 128;

/// Bytes of replies that may wait for a client that does not read them. Above it a server takes no
/// further request of that connection.
pub const UNSENT_REPLY_BYTES_MAX: usize = 4 << 20;

/// Bytes that a leg gathers before it sends unasked: a size that one send over loopback TCP handles
/// well.
pub const GATHERED_BYTES_MAX: usize = 64 << 10;

/// Deferred requests of one connection. At the limit further requests stay in the socket: a client
/// may have [`LEG_REQUESTS_MAX`] in flight, and the brick refuses none of them for that.
///
/// [`LEG_REQUESTS_MAX`]: pagemesh_base::slice::LEG_REQUESTS_MAX
pub const DEFERRED_MAX: usize = 1024;

/// Bytes that the deferred requests hold: the data of writes, and the replies of reads. At the
/// limit further requests stay in the socket.
pub const DEFERRED_BYTES_MAX: usize = 16 << 20;

/// Bytes of the longest clear, as `SliceRequest::Clear` promises. A brick frees them without
/// delaying the connection's other requests.
pub const CLEAR_BYTES_MAX: u64 = 1 << 30;

/// Connections of one server, each a thread and at most one session, unless its pool has more sessions.
pub const CONNECTIONS_MAX: usize = 512;

/// Connections of one server beside those with a session: control connections.
pub const CONTROL_CONNECTIONS_MAX: usize = 256;

/// Connections that have not proven the key yet. Further ones are closed at once, so that
/// unauthenticated connections cannot exhaust the slots of clients.
pub const UNAUTHENTICATED_MAX: usize = 64;

/// A connection that has not finished its handshake within this time is closed.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(2);

/// How long the stop of a server waits for its connections' threads.
pub const STOP_LIMIT: Duration = Duration::from_secs(5);

/// How long a server waits before it accepts again after the system refused
/// (no descriptors or memory left).
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Microseconds that a connection's thread polls for the next request before it sleeps, if polling
/// has paid lately. A wake-up costs about 5 to 50 µs.
pub const SPIN_US_MAX: u32 = 50;

/// A leg with a full socket retries at least this often. Its descriptor signals earlier that
/// there is room.
pub const FULL_SOCKET_PAUSE: Duration = Duration::from_millis(5);

/// Idle time after which the kernel probes a peer, the interval of the probes, and their number: a
/// dead machine is noticed, and its session ended, within five seconds.
pub const KEEPALIVE_IDLE: Duration = Duration::from_secs(2);
/// See [`KEEPALIVE_IDLE`].
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
/// See [`KEEPALIVE_IDLE`].
pub const KEEPALIVE_PROBES: u32 = 3;
/// Milliseconds after which unacknowledged bytes end a connection.
pub const USER_TIMEOUT_MS: u32 = 5000;

/// Answers of one listing of a brick's slices: 16 Mi slices. A brick that sends more is broken.
pub const LIST_ANSWERS_MAX: usize = 4096;

/// Sessions of one map socket: as many as a pool has journals.
pub const MAP_SESSIONS_MAX: usize = 256;

/// Clients of a map socket that have connected and not yet sent a hello.
pub const MAP_HANDSHAKES_MAX: usize = 32;

/// The time limits of a client, by phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// To establish the connection.
    pub connect: Duration,
    /// For the handshake, and once more for the attach that follows it.
    pub handshake: Duration,
    /// Silence on a leg, without a byte of a reply, while requests are in flight. While one of them
    /// is a flush or a barrier, the longer of `stall` and `call` applies.
    pub stall: Duration,
    /// For a blocking call.
    pub call: Duration,
}

impl Default for Timeouts {
    /// Two seconds: below the three that a volume may stall when a brick dies. Calls may wait for a
    /// barrier or an fdatasync, hence ten seconds.
    fn default() -> Timeouts {
        Timeouts {
            connect: Duration::from_secs(2),
            handshake: Duration::from_secs(2),
            stall: Duration::from_secs(2),
            call: Duration::from_secs(10),
        }
    }
}
