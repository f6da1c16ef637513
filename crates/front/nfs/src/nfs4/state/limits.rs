//! The bounds of the state of NFSv4.1: every count, length and time.

use std::time::Duration;

/// The lease: a client that sends no SEQUENCE for this time may lose its state.
pub const LEASE: Duration = Duration::from_secs(90);
/// The grace period after a start with known clients. A client notices a restart within a lease.
pub const GRACE: Duration = LEASE;
/// A reclaim near the end of the grace period extends it to this time after the reclaim.
pub const GRACE_EXTENSION: Duration = Duration::from_secs(5);
/// The longest grace period, with its extensions.
pub const GRACE_MAX: Duration = Duration::from_secs(180);
/// The time that a late RECLAIM_COMPLETE waits for the records of its reclaimed state, by NFS4ERR_DELAY. A write of a
/// record takes milliseconds. A file system that is stalled for longer must not hold up the client's opens in others.
pub const LATE_RECLAIM_WAIT: Duration = Duration::from_secs(10);
/// The time that an expired client keeps its state if no other client needs it: a laptop that sleeps
/// over a night goes on in the morning. Linux has the same time. [`COURTESY_CLIENTS_MAX`] and
/// [`COURTESY_STATES_MAX`] bound it, and the removal of an open file ends it.
pub const COURTESY: Duration = Duration::from_secs(24 * 3600);
/// Client records, confirmed or not. At the limit the server removes expired clients first.
pub const CLIENTS_MAX: usize = 4096;
/// Unconfirmed client records. EXCHANGE_ID needs no lease, so that a flood of them must not displace
/// confirmed clients; the oldest one makes room.
pub const UNCONFIRMED_MAX: usize = 1024;
/// Expired clients with state. The one that expired first makes room.
pub const COURTESY_CLIENTS_MAX: usize = 256;
/// Opens and lock stateids of expired clients; about 16 MiB. The client that expired first makes room.
pub const COURTESY_STATES_MAX: usize = 20_000;
/// Bytes of the owner of a client, an open or a lock (RFC 8881, NFS4_OPAQUE_LIMIT).
pub const OWNER_BYTES_MAX: usize = 1024;
/// Sessions of one client. Linux has one; a client with several file systems or mounts has few.
pub const SESSIONS_PER_CLIENT_MAX: usize = 16;
/// Slots of a session: requests of a client in progress at once. Linux asks for 64.
pub const SLOTS_MAX: u32 = 128;
/// Slots that a client is asked to use at most while memory for replies is short.
pub const SLOTS_SHORT: u32 = 4;
/// Bytes of a reply that a slot keeps for a repeated request (ca_maxresponsesize_cached). Replies
/// without data, with attributes and with one or two names fit.
pub const CACHED_REPLY_BYTES_MAX: u32 = 4 << 10;
/// A reply of at most these bytes is kept even if the client did not ask for it: the reply to a lone
/// SEQUENCE.
pub const SMALL_REPLY_BYTES: usize = 128;
/// Bytes of kept replies that all sessions may reserve. 1000 sessions of 8 slots take a quarter. Most
/// replies have some 200 bytes, so that less is in use.
pub const CACHED_BYTES_MAX: usize = 128 << 20;
/// A new session gets at most one part in so many of the memory for replies that is left, and one slot at
/// least: 64 slots with the longest replies at first, and fewer later. So 2600 sessions find some.
pub const CACHED_SHARE: usize = 512;
/// Bytes of kept replies that the sessions of one address may reserve: a quarter, so that one host leaves
/// memory to all others. Many clients may have one address, behind a gateway.
pub const CACHED_BYTES_PER_ADDRESS_MAX: usize = 32 << 20;
/// As [`CACHED_SHARE`], of the memory for one address: 64 slots at first, and 660 sessions find some.
pub const CACHED_SHARE_OF_ADDRESS: usize = 128;
/// Bytes of kept replies that the sessions of one client may reserve.
pub const CACHED_BYTES_PER_CLIENT_MAX: usize = 1 << 20;
/// As [`CACHED_SHARE`], of the memory for one client: 64 slots at first, and each of
/// [`SESSIONS_PER_CLIENT_MAX`] sessions finds some.
pub const CACHED_SHARE_OF_CLIENT: usize = 4;
/// Operations of a COMPOUND.
pub const OPERATIONS_MAX: u32 = 64;
/// Bytes of a request or reply below which a channel is useless: the headers and a SEQUENCE.
pub const CHANNEL_BYTES_MIN: u32 = 128;
/// Opens of all clients.
pub const OPENS_MAX: usize = 200_000;
/// Opens of one client.
pub const OPENS_PER_CLIENT_MAX: usize = 100_000;
/// Lock stateids of one client: pairs of a lock owner and a file.
pub const LOCK_STATES_PER_CLIENT_MAX: usize = 100_000;
/// Lock stateids of all clients.
pub const LOCK_STATES_MAX: usize = 200_000;
/// Ranges of one lock owner in one file.
pub const RANGES_PER_OWNER_MAX: usize = 4096;
/// Ranges of all lock owners in one file.
pub const RANGES_PER_FILE_MAX: usize = 16 << 10;
/// Ranges of all files: about 24 MiB. At the limit the server removes expired clients first.
pub const RANGES_MAX: usize = 200_000;
/// Ranges that one LOCK may add: it may split a range of the owner in two, and adds its own.
pub const RANGES_PER_LOCK_MAX: usize = 2;
/// Bytes of the records of a stored list: twice as many clients as there may be, with the longest owners,
/// take 9 MiB, and half of the list may be out of date.
pub const JOURNAL_BYTES_MAX: usize = 16 << 20;
