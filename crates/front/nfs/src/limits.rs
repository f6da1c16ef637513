//! The bounds of the wire and the server: every length, count and wait.

use std::time::Duration;

/// Bytes of the data of one READ or WRITE. Clients learn it from FSINFO. Linux asks for no more.
pub const TRANSFER_BYTES_MAX: u32 = 1 << 20;
/// Bytes of a record beyond the data of a WRITE: two authentication bodies, a file handle and the
/// fixed fields need less than 1 KiB, and a SYMLINK has a target instead of data.
pub const RECORD_OVERHEAD_BYTES: usize = 4 << 10;
/// Bytes of a record, which is one call.
pub const RECORD_BYTES_MAX: usize = TRANSFER_BYTES_MAX as usize + RECORD_OVERHEAD_BYTES;
/// Fragments of one record. Kernels send one; libraries with small buffers send a fragment for each
/// 16 KiB or more of a WRITE.
pub const FRAGMENTS_MAX: u32 = 64;
/// Bytes that a record reserves for a fragment before any of them arrives: all calls but large
/// WRITEs fit. A larger record takes memory as its bytes arrive.
pub const FRAGMENT_RESERVED_BYTES_MAX: usize = 16 << 10;
/// Bytes of the body of a credential or verifier (RFC 5531).
pub const AUTH_BODY_BYTES_MAX: usize = 400;
/// Bytes of the client's machine name in AUTH_SYS (RFC 5531).
pub const MACHINE_NAME_BYTES_MAX: usize = 255;
/// Supplementary groups in AUTH_SYS (RFC 5531).
pub const GROUPS_MAX: usize = 16;
/// Bytes of a file handle (RFC 1813).
pub const HANDLE_BYTES_MAX: usize = 64;
/// Bytes of a file's name, as in the file-system crate.
pub const NAME_BYTES_MAX: usize = 255;
/// Bytes of the target of a symbolic link: the longest path of Linux without its final zero.
pub const SYMLINK_BYTES_MAX: usize = 4095;
/// Bytes of a path in MOUNT (RFC 1813, MNTPATHLEN).
pub const MOUNT_PATH_BYTES_MAX: usize = 1024;
/// Entries of an ACL on the wire, as Linux and Solaris have it. The file system takes fewer.
pub const ACL_ENTRIES_MAX: usize = 1024;
/// Bytes of the result of READDIR and READDIRPLUS. The file system holds a lock while it collects a
/// listing, so the result is shorter than a READ.
pub const LISTING_BYTES_MAX: u32 = 64 << 10;
/// Bytes of the name of an export.
pub const EXPORT_NAME_BYTES_MAX: usize = 255;
/// Exports of one server; a list of them is below 300 KiB.
pub const EXPORTS_MAX: usize = 1000;
/// Bytes of an exports file: 1000 exports with 100 clients each, and comments.
pub const EXPORTS_FILE_BYTES_MAX: usize = 1 << 20;
/// Rules of one export in an exports file. A call compares its address with them in turn.
pub const EXPORT_RULES_MAX: usize = 256;
/// Rules of all exports in a file. The list of exports stays below 2 MiB.
pub const RULES_MAX: usize = 8192;
/// Mounts that DUMP lists; an older one is forgotten. The list stays below 1.2 MiB.
pub const MOUNTS_MAX: usize = 1024;
/// Steps to the parent that a LOOKUP of `..` takes in an export of a directory, to find the export's
/// root above. The deepest path that Linux can name has 2048 directories.
pub const PARENT_STEPS_MAX: usize = 2048;
/// Users with groups in memory. 1000 groups of each are 16 MiB.
pub const GROUP_ANSWERS_MAX: usize = 4096;
/// The time after which the groups of a user are looked up again. The earlier groups serve calls
/// meanwhile.
pub const GROUP_ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// The time that groups serve calls while their name service fails or does not answer. A user that leaves
/// a group keeps its rights for as long.
pub const GROUP_ANSWER_AGE_MAX: Duration = Duration::from_secs(600);
/// The pause after a lookup of groups that has failed.
pub(crate) const GROUP_RETRY_PAUSE: Duration = Duration::from_secs(5);
/// The time that a call waits for the first answer about its user. Then it gets NFS3ERR_JUKEBOX, and its
/// worker is free. A name service in the network answers within milliseconds.
pub const GROUP_LOOKUP_WAIT: Duration = Duration::from_millis(500);
/// Calls that wait for such an answer. More get NFS3ERR_JUKEBOX at once, so that workers are left.
pub(crate) const GROUP_WAITERS_MAX: usize = 8;
/// Threads that look groups up. A name service that does not answer holds no more.
pub(crate) const GROUP_THREADS_MAX: usize = 4;
/// The time that a call waits for another one that lists or opens snapshots. Then it gets
/// NFS3ERR_JUKEBOX, and its worker is free.
pub(crate) const SNAPSHOT_WAIT: Duration = Duration::from_millis(500);
/// The time for rpcbind to answer all calls of a registration.
pub const RPCBIND_LIMIT: Duration = Duration::from_secs(1);
/// The pause between two registrations with rpcbind: it forgets them when it restarts.
pub const RPCBIND_PAUSE: Duration = Duration::from_secs(60);
/// Pins of one export that the server keeps between requests: the files that its clients use at
/// once. Each takes about 400 bytes, here and in the file system.
pub const PINS_MAX: usize = 1024;
/// The time that an unused pin is kept. A removed file holds its space for as long, if the removal
/// went another way than this server.
pub const PIN_IDLE_LIMIT: Duration = Duration::from_secs(5);
/// The pause between two searches for unused pins.
pub(crate) const PIN_SWEEP_PAUSE: Duration = Duration::from_secs(1);
/// Bytes of the receive buffer of a polling thread. All calls but WRITEs fit; the data of a WRITE goes
/// past it.
pub(crate) const RECEIVE_BYTES: usize = 16 << 10;
/// Replies that the server keeps for repeated calls, of all clients. A client repeats a call within
/// minutes; 16 384 are a second of creates at the highest rate, and minutes of ordinary work.
pub const REPLIES_MAX: usize = 16 << 10;
/// Bytes of these replies and of the entries that hold them. A CREATE has about 400.
pub const REPLY_CACHE_BYTES_MAX: usize = 16 << 20;
/// Bytes that a kept reply takes beside its own.
pub(crate) const REPLY_ENTRY_BYTES: usize = 256;
/// Bytes of the arguments that identify a repeated call: all of a RENAME with the longest names.
pub(crate) const REPLY_CHECKSUM_BYTES_MAX: usize = 1024;
/// Repetitions that wait for the end of one running call. More are dropped; their client asks again.
pub(crate) const REPETITIONS_MAX: usize = 8;
/// Clients that wait until they are accepted; the system may allow fewer. Clients beyond it connect a
/// second later.
pub(crate) const LISTEN_BACKLOG: i32 = 4096;
/// Words of a set of attributes in NFSv4: minor version 1 has attributes up to number 81.
pub const BITMAP_WORDS_MAX: usize = 3;
/// Bytes of the tag of a COMPOUND. A client chooses it, and the reply repeats it.
pub const TAG_BYTES_MAX: usize = 1024;
/// Operations of one COMPOUND. Linux sends fewer than 16.
pub const OPERATIONS_MAX: u32 = 64;
/// Bytes of the values of attributes that a client sends: an ACL with the most entries, two names of owners and fixed fields.
pub const ATTRIBUTES_BYTES_MAX: usize = 96 << 10;
/// Entries of an ACL of NFSv4: two for each entry of the longest POSIX ACLs for access and inheritance, which have 511.
pub const ACES_MAX: usize = 2048;
/// Bytes of the name of an owner of files.
pub const OWNER_NAME_BYTES_MAX: usize = 1024;
/// Bytes of the name of a client, and of an owner of opens or locks (RFC 8881, NFS4_OPAQUE_LIMIT).
pub const OWNER_BYTES_MAX: usize = 1024;
/// Algorithms that a client offers for the protection of state. None is used.
pub const SECURITY_OIDS_MAX: usize = 16;
/// Security flavors that a client offers for callbacks.
pub const CALLBACK_SECURITY_MAX: usize = 8;
/// State ids of one TEST_STATEID.
pub const STATEIDS_MAX: usize = 256;
/// Names and numbers of owners in memory. Each takes about 300 bytes.
pub const OWNER_ANSWERS_MAX: usize = 8192;
/// The time that the name or number of an owner is kept.
pub const OWNER_ANSWER_LIMIT: Duration = Duration::from_secs(600);
/// The same if the name service knows none, or fails.
pub const OWNER_FAILURE_LIMIT: Duration = Duration::from_secs(30);
/// The time that an old answer serves calls while the name service does not answer.
pub const OWNER_STALE_LIMIT: Duration = Duration::from_secs(3600);
/// The time that clients wait for a first answer, by NFS4ERR_DELAY. Then the number counts.
pub const OWNER_LOOKUP_WAIT: Duration = Duration::from_secs(5);
/// Threads that ask the name service.
pub const OWNER_LOOKUPS_MAX: usize = 4;
/// Lookups that wait for these threads. More are asked for again by their clients.
pub const OWNER_LOOKUPS_QUEUED_MAX: usize = 1024;
/// Bytes of a name that the name service is asked for: the longest name of a user, and a domain.
pub const OWNER_LOOKUP_BYTES_MAX: usize = 512;
/// The pause of accepting after descriptors or memory ran out.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The time that threads get after their sockets are shut down.
pub(crate) const ABANDON_LIMIT: Duration = Duration::from_secs(2);

/// Workers of one export, and calls that polling threads run for it. A call holds a channel of the
/// volume at most, and a volume has 62 for calls: the rest is for a mount and for upkeep.
pub const EXPORT_WORKERS_MAX: usize = 40;
/// Workers of all exports. Each export has an equal share of its own, so that no export can take the
/// workers of another one; the share is one worker at least.
pub const WORKERS_MAX: usize = 1024;
/// The wait of a call that lets an export grow.
pub(crate) const QUEUE_WAIT_LIMIT: Duration = Duration::from_millis(1);
/// The longest mean time of calls that polling threads run although others wait: several times as long
/// as the handover to a worker.
pub(crate) const SHORT_CALL: Duration = Duration::from_micros(50);
/// The calls of that mean: the weight of the last one is one part of so many.
pub(crate) const MEAN_CALLS: u32 = 16;
/// Short calls of one connection in its turn.
pub(crate) const TURN_CALLS: usize = 4;
/// Replies to short calls that are sent together, so the first one waits for a part of a millisecond.
pub(crate) const UNSENT_REPLIES_MAX: usize = 8;
/// The time that a worker without a call stays.
pub(crate) const WORKER_IDLE_LIMIT: Duration = Duration::from_secs(10);
/// The time without the end of a call after which an export with running calls counts as stalled.
pub(crate) const STALL_LIMIT: Duration = Duration::from_secs(1);
/// The same for one connection: its calls to the export run, and none of them has ended. Calls of others may end
/// all the time, from memory. Beyond its share, the connection is refused then.
pub(crate) const CONNECTION_STALL_LIMIT: Duration = STALL_LIMIT;
/// Calls of one connection to one export, queued and running.
pub(crate) const SHARE_CALLS_MAX: usize = 128;
/// Bytes of these calls and of the longest replies to them.
pub(crate) const SHARE_BYTES_MAX: usize = 8 << 20;
/// Calls of one connection without a sent reply. Clients keep up to 64 calls in flight.
pub(crate) const CONNECTION_CALLS_MAX: usize = 256;
/// Bytes of these calls and replies. One call to each export is always allowed.
pub(crate) const CONNECTION_BYTES_MAX: usize = 16 << 20;
/// Calls of one export, queued and running.
pub(crate) const EXPORT_CALLS_MAX: usize = 4096;
/// Bytes of the calls and replies of all exports. Each export has an equal share.
pub const CALL_BYTES_MAX: usize = 512 << 20;
/// The least share of an export: the longest WRITE and the longest READ.
pub(crate) const EXPORT_BYTES_MIN: usize = 4 << 20;
/// Bytes of incomplete records, and of replies that clients have not taken, of all connections. From the half on,
/// connections with untaken replies have one call at a time; others go on. Beyond, the connections are closed that
/// have waited for their clients for the longest time.
pub const UNSENT_BYTES_MAX: usize = 512 << 20;
/// Replies that one system call sends.
pub(crate) const REPLIES_AT_ONCE: usize = 8;
/// System calls that read one connection before the next one gets its turn.
pub(crate) const READS_PER_TURN: usize = 64;
/// Connections that a polling thread takes at once.
pub(crate) const EVENTS_AT_ONCE: usize = 8;
/// The least polling threads. One of them never waits for a file system.
pub(crate) const POLLERS_MIN: usize = 4;
/// The most polling threads.
pub(crate) const POLLERS_MAX: usize = 16;
/// The longest pause between two searches for connections that are beyond a deadline.
pub(crate) const DEADLINE_PAUSE: Duration = Duration::from_secs(1);

/// The configurable bounds of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections with a call so far. One more is closed at its first call.
    pub connections_max: usize,
    /// Those among them from one address.
    pub address_connections_max: usize,
    /// Connections with a call of hosts without a rule of any export. One more closes the oldest of them.
    pub without_rule_max: usize,
    /// Connections without a call so far. One more closes the oldest of them.
    pub half_open_max: usize,
    /// The time without a call. Clients connect again by themselves; Linux closes after 5 minutes.
    pub idle: Duration,
    /// The time from the first byte of a record to its last.
    pub record: Duration,
    /// The time for a client to take one reply.
    pub reply: Duration,
    /// See [`UNSENT_BYTES_MAX`].
    pub unsent_bytes_max: usize,
    /// The time for calls in progress, and their replies, when the server stops.
    pub drain: Duration,
    /// The longest pause between two searches for connections that are beyond a deadline. It is shorter if
    /// a deadline is.
    pub sweep: Duration,
    /// A fixed number of workers of each export, for measurements; none: by the load.
    pub fixed_workers: Option<usize>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            address_connections_max: 2048,
            without_rule_max: 64,
            half_open_max: 10_240,
            idle: Duration::from_secs(360),
            record: Duration::from_secs(60),
            reply: Duration::from_secs(60),
            unsent_bytes_max: UNSENT_BYTES_MAX,
            drain: Duration::from_secs(10),
            sweep: DEADLINE_PAUSE,
            fixed_workers: None,
        }
    }
}
