//! The page of limits, from the constants of the source.
//!
//! Invariant: each value on the page is the value of the named constant. The page names no file, so
//! that it stays right when a constant moves within its crate.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use syn::visit::{self, Visit};

/// The page, from the root of the repository.
const PAGE: &str = "docs/reference/limits.md";
/// The command that writes the generated pages.
const COMMAND: &str = "cargo xtask reference";
/// The environment variable by which that command makes tests write their pages.
const WRITE: &str = "PAGEMESH_WRITE_REFERENCE";

/// The quantity that a constant counts.
#[derive(Clone, Copy)]
enum Unit {
    Bytes,
    Count,
    Time,
    /// Seconds or milliseconds as a plain number.
    Seconds,
    Milliseconds,
    Pages,
    /// Bytes per second.
    Rate,
}

/// A limit: its meaning and effect, the unit, the directory of the crate, and the constant, or
/// `Type.field` for a field of the defaults of a type.
type Limit = (&'static str, Unit, &'static str, &'static str);

const POOLS: &[Limit] = &[
    ("Smallest pool.", Unit::Bytes, "store", "POOL_BYTES_MIN"),
    ("Largest pool.", Unit::Bytes, "store", "POOL_BYTES_MAX"),
    (
        "Fewest journals of a pool. One is the brick's, each session has one.",
        Unit::Count,
        "store",
        "JOURNALS_MIN",
    ),
    (
        "Most journals of a pool. A pool without a free one refuses a further session.",
        Unit::Count,
        "store",
        "JOURNALS_MAX",
    ),
    (
        "Journals for each GiB of a pool of 1 GiB and more, rounded up to a power of two, within the bounds of the next row and of the row above.",
        Unit::Count,
        "store",
        "JOURNALS_PER_GIGABYTE",
    ),
    (
        "Fewest journals of a pool of 1 GiB and more, and most of a smaller one, which has one for each 4 MiB.",
        Unit::Count,
        "store",
        "GIGABYTE_JOURNALS_MIN",
    ),
    (
        "Fewest slices that a pool has room for.",
        Unit::Count,
        "store",
        "OBJECTS_MIN",
    ),
    (
        "Most slices of a pool.",
        Unit::Count,
        "store",
        "OBJECTS_MAX",
    ),
    (
        "Longest part of a page that is written in place. A longer part is written as a whole page.",
        Unit::Bytes,
        "store",
        "PATCH_MAX",
    ),
    (
        "Unreadable pages that one process tolerates. A further one ends the process, on a disk the brick.",
        Unit::Count,
        "pmem",
        "PAGES_MAX",
    ),
    (
        "Findings that `pool check` lists. All are counted.",
        Unit::Count,
        "store",
        "FINDINGS_MAX",
    ),
];

const DISKS: &[Limit] = &[
    (
        "Devices of a pool, with the first.",
        Unit::Count,
        "store",
        "DEVICES_MAX",
    ),
    (
        "Requests to change the devices of a brick without a result. Further ones are refused.",
        Unit::Count,
        "manage",
        "DEVICE_REQUESTS_MAX",
    ),
    (
        "Bytes that a drain moves while clients send requests, by default (`--drain-rate`); eight times as many otherwise.",
        Unit::Rate,
        "brick",
        "DRAIN_BYTES_PER_S",
    ),
    (
        "Least memory for the data pages of a pool (`--memory-budget`).",
        Unit::Bytes,
        "brick",
        "MEMORY_BUDGET_MIN",
    ),
    (
        "Largest default of it.",
        Unit::Bytes,
        "app",
        "MEMORY_BUDGET_DEFAULT_MAX",
    ),
    (
        "The default is the machine's memory divided by this, within these bounds.",
        Unit::Count,
        "app",
        "MEMORY_BUDGET_DIVISOR",
    ),
    (
        "Pages that are not on the disk yet, at most half of the cache. Further changes wait.",
        Unit::Pages,
        "pmem",
        "DIRTY_PAGES_MAX",
    ),
    (
        "A request to a disk is reported after",
        Unit::Time,
        "pmem",
        "SLOW_REQUEST",
    ),
    (
        "It fails the pool after",
        Unit::Time,
        "pmem",
        "REQUEST_LIMIT",
    ),
    (
        "The process of a failed pool ends within, once its next heartbeat is due",
        Unit::Time,
        "app",
        "FAILED_EXIT_LIMIT",
    ),
];

const VOLUMES: &[Limit] = &[
    (
        "Volumes of a manager.",
        Unit::Count,
        "manage",
        "VOLUMES_MAX",
    ),
    ("Bricks of a manager.", Unit::Count, "manage", "BRICKS_MAX"),
    (
        "Name of a volume: letters, digits, `.`, `_`, `-`; not a dot or a dash first.",
        Unit::Bytes,
        "base",
        "NAME_BYTES_MAX",
    ),
    (
        "Snapshots of a volume, with those that bricks still drop.",
        Unit::Count,
        "manage",
        "VOLUME_SNAPSHOTS_MAX",
    ),
    (
        "Snapshots of all volumes.",
        Unit::Count,
        "manage",
        "SNAPSHOTS_MAX",
    ),
    (
        "Volumes of one call that makes snapshots.",
        Unit::Count,
        "manage",
        "GROUP_MAX",
    ),
    ("Holds of a snapshot.", Unit::Count, "manage", "HOLDS_MAX"),
    (
        "Bookmarks of a volume.",
        Unit::Count,
        "manage",
        "VOLUME_BOOKMARKS_MAX",
    ),
    (
        "Bookmarks of all volumes.",
        Unit::Count,
        "manage",
        "BOOKMARKS_MAX",
    ),
    (
        "Schedules of snapshots.",
        Unit::Count,
        "manage",
        "SCHEDULES_MAX",
    ),
    (
        "Names and patterns of volumes of a schedule.",
        Unit::Count,
        "manage",
        "PATTERNS_MAX",
    ),
    (
        "Targets of a schedule.",
        Unit::Count,
        "manage",
        "TARGETS_MAX",
    ),
    (
        "Longest name and prefix of a schedule, and longest name of a target.",
        Unit::Bytes,
        "manage",
        "PREFIX_BYTES_MAX",
    ),
    (
        "Interval of looks at schedules: a snapshot is this much late at most.",
        Unit::Time,
        "manage",
        "SCHEDULE_INTERVAL",
    ),
    (
        "Snapshots of a volume that one look of a schedule deletes.",
        Unit::Count,
        "manage",
        "PRUNED_MAX",
    ),
    ("Chunk of a backup.", Unit::Bytes, "stream", "CHUNK_BYTES"),
    (
        "Labels of a volume.",
        Unit::Count,
        "manage",
        "VOLUME_LABELS_MAX",
    ),
    (
        "Longest key and value of a label of a volume.",
        Unit::Bytes,
        "manage",
        "LABEL_PART_BYTES_MAX",
    ),
    ("Labels of a snapshot.", Unit::Count, "manage", "LABELS_MAX"),
    (
        "Longest label of a snapshot.",
        Unit::Bytes,
        "manage",
        "LABEL_BYTES_MAX",
    ),
    (
        "Attempts to make a snapshot while the layout changes.",
        Unit::Count,
        "manage",
        "CUT_ATTEMPTS_MAX",
    ),
    (
        "Attempts to make the snapshots of a group while layouts change or holds expire.",
        Unit::Count,
        "manage",
        "GROUP_ATTEMPTS_MAX",
    ),
    (
        "Time that new writes wait at most while a group is cut.",
        Unit::Time,
        "volume",
        "HOLD_LIMIT",
    ),
    (
        "Time in which clients fetch the order to give a group up.",
        Unit::Time,
        "manage",
        "ABANDON_TIME",
    ),
    (
        "Time in which a client must fetch the order for a snapshot.",
        Unit::Time,
        "manage",
        "CutTimes.fetch",
    ),
    (
        "Time of all attempts of a call that makes snapshots.",
        Unit::Time,
        "manage",
        "CutTimes.call",
    ),
    ("Copies of a column.", Unit::Count, "base", "LEGS_MAX"),
    ("Columns of a segment.", Unit::Count, "base", "COLUMNS_MAX"),
    (
        "Segments of a volume. Each growth adds one.",
        Unit::Count,
        "base",
        "SEGMENTS_MAX",
    ),
    ("Largest slice.", Unit::Bytes, "base", "SLICE_BYTES_MAX"),
    (
        "Bytes that a brick may promise for each byte of its capacity.",
        Unit::Count,
        "manage",
        "OVERPROVISION_FACTOR",
    ),
    (
        "Channels of an attached volume: its NBD connections; or two of a mount, and one for each concurrent request that reads or writes data. Further requests of a mount wait.",
        Unit::Count,
        "volume",
        "CHANNELS_MAX",
    ),
    (
        "Longest change of a page range that a crash leaves whole or undone, within 2 MiB aligned bytes of one copy.",
        Unit::Bytes,
        "base",
        "SLICE_IO_BYTES_MAX",
    ),
    (
        "Pages of a transaction.",
        Unit::Count,
        "base",
        "TRANSACTION_PAGES_MAX",
    ),
    (
        "Epochs of a volume: each attach, each change of a copy's state and each growth takes one.",
        Unit::Count,
        "base",
        "EPOCH_MAX",
    ),
    (
        "Damaged pages that a check or a scrub lists and logs. All are counted.",
        Unit::Count,
        "volume",
        "DAMAGES_MAX",
    ),
];

const FAULTS: &[Limit] = &[
    (
        "Interval of a brick's heartbeats.",
        Unit::Time,
        "manage",
        "HEARTBEAT_INTERVAL",
    ),
    (
        "Age of the last heartbeat from which a brick counts as dead.",
        Unit::Time,
        "manage",
        "DEAD_AFTER",
    ),
    (
        "Interval at which a client asks the manager for a newer layout. A fenced client learns of it within this time.",
        Unit::Time,
        "volume",
        "LAYOUT_POLL",
    ),
    (
        "Silence of a brick with requests in flight, until its leg counts as lost. Writes stall meanwhile.",
        Unit::Time,
        "fabric",
        "Timeouts.stall",
    ),
    (
        "The same while a request waits for a disk or a barrier.",
        Unit::Time,
        "fabric",
        "Timeouts.call",
    ),
    (
        "Time to connect to a brick.",
        Unit::Time,
        "fabric",
        "Timeouts.connect",
    ),
    (
        "Time of a handshake with a brick.",
        Unit::Time,
        "fabric",
        "Timeouts.handshake",
    ),
    (
        "Wait of requests to a part without an in-sync copy, then EIO.",
        Unit::Time,
        "volume",
        "DOWN_LIMIT",
    ),
    (
        "Shortest delay until a read is sent to another copy, too.",
        Unit::Time,
        "volume",
        "HEDGE_DELAY_MIN",
    ),
    (
        "Longest such delay.",
        Unit::Time,
        "volume",
        "HEDGE_DELAY_MAX",
    ),
    (
        "Longest wait between two tries to reach the manager.",
        Unit::Time,
        "volume",
        "MANAGER_RETRY_MAX",
    ),
    (
        "Longest wait between two tries to bring a stale leg back.",
        Unit::Time,
        "volume",
        "RESYNC_RETRY_MAX",
    ),
    (
        "Rate of a resync while there are other writes.",
        Unit::Rate,
        "volume",
        "RESYNC_BUSY_BYTES_PER_S",
    ),
    (
        "Wait of a detach for the channels of a volume and for its replica.",
        Unit::Time,
        "volume",
        "DETACH_LIMIT",
    ),
    (
        "Wait of the next brick until the clients of the last one have unmapped the pool. Then it kills them.",
        Unit::Time,
        "brick",
        "UNMAP_LIMIT",
    ),
    (
        "Wait of a brick for the lock of its pool. Then it gives up.",
        Unit::Time,
        "brick",
        "LOCK_LIMIT",
    ),
];

const REPLICAS: &[Limit] = &[
    (
        "Bytes by which a replica may lag before acknowledgements wait.",
        Unit::Bytes,
        "volume",
        "REPLICATION_BYTES_MAX",
    ),
    (
        "Changes by which it may lag.",
        Unit::Count,
        "volume",
        "REPLICATION_CHANGES_MAX",
    ),
    (
        "Age of the oldest unsent change.",
        Unit::Time,
        "volume",
        "REPLICATION_AGE_MAX",
    ),
];

const STALLS: &[Limit] = &[
    (
        "Wait for an operation of a process that a signal stopped, before the brick lets it run.",
        Unit::Time,
        "brick",
        "RESUME_AFTER",
    ),
    (
        "The same by the mount.",
        Unit::Time,
        "direct",
        "RESUME_AFTER",
    ),
    (
        "Wait of a barrier for a process that a debugger holds, before the brick kills it.",
        Unit::Time,
        "brick",
        "TRACED_LIMIT",
    ),
    (
        "Wait of a session for the lock of a process that does not leave its operation, before the brick kills it.",
        Unit::Time,
        "brick",
        "UNRESPONSIVE_LIMIT",
    ),
    (
        "The same if a signal stopped the process and it did not leave the operation when it ran.",
        Unit::Time,
        "brick",
        "STOPPED_LIMIT",
    ),
    (
        "Wait of the mount for a direct operation, before it kills the process.",
        Unit::Time,
        "direct",
        "OPERATION_TIME_MAX",
    ),
];

const SCRUBS: &[Limit] = &[
    (
        "Default interval of volume scrubs.",
        Unit::Time,
        "volume",
        "SCRUB_EVERY",
    ),
    (
        "Default rate of a volume scrub.",
        Unit::Rate,
        "volume",
        "SCRUB_BYTES_PER_S",
    ),
    (
        "Factor by which it is slower while there are writes.",
        Unit::Count,
        "volume",
        "SCRUB_BUSY_SHARE",
    ),
    (
        "Latest start of the first volume scrub after an attach.",
        Unit::Time,
        "volume",
        "SCRUB_DELAY",
    ),
    (
        "Tries of a chunk whose bricks do not answer, before the scrub skips it.",
        Unit::Count,
        "volume",
        "SCRUB_TRIES_MAX",
    ),
];

const NBD: &[Limit] = &[
    (
        "Connections of a server. Further ones are closed.",
        Unit::Count,
        "front/nbd",
        "Limits.connections_max",
    ),
    (
        "Connections of an export. Further ones are refused with a message.",
        Unit::Count,
        "front/nbd",
        "Limits.export_connections_max",
    ),
    ("Longest request.", Unit::Bytes, "base", "REQUEST_BYTES_MAX"),
    (
        "Requests in flight per connection.",
        Unit::Count,
        "base",
        "REQUESTS_MAX",
    ),
    (
        "Time from the connection to the choice of an export.",
        Unit::Time,
        "front/nbd",
        "Limits.handshake",
    ),
    (
        "Silence in the middle of a request, until the connection ends.",
        Unit::Time,
        "front/nbd",
        "Limits.stalled_message",
    ),
    (
        "Time for requests in flight when a connection ends.",
        Unit::Time,
        "front/nbd",
        "Limits.drain",
    ),
];

const BRICKS: &[Limit] = &[
    (
        "Connections of a brick over tcp.",
        Unit::Count,
        "fabric",
        "CONNECTIONS_MAX",
    ),
    (
        "Connections of them that have not proven the key.",
        Unit::Count,
        "fabric",
        "UNAUTHENTICATED_MAX",
    ),
    (
        "Sessions of a `map` socket.",
        Unit::Count,
        "fabric",
        "MAP_SESSIONS_MAX",
    ),
    (
        "Unacknowledged bytes end a TCP connection after",
        Unit::Milliseconds,
        "fabric",
        "USER_TIMEOUT_MS",
    ),
];

const FILES: &[Limit] = &[
    ("Largest file.", Unit::Bytes, "fs", "FILE_BYTES_MAX"),
    ("Name of a file.", Unit::Bytes, "fs", "NAME_MAX"),
    (
        "Target of a symbolic link.",
        Unit::Bytes,
        "fs",
        "TARGET_MAX",
    ),
    ("Links of a file.", Unit::Count, "fs", "LINKS_MAX"),
    (
        "Wait of a mount's request for a channel, then EIO.",
        Unit::Time,
        "fs",
        "CHANNEL_WAIT_MAX",
    ),
    (
        "Dirty pages of mappings, before the mount stores them.",
        Unit::Pages,
        "fs",
        "MMAP_DIRTY_PAGES_MAX",
    ),
    (
        "The same without space to store them. Further stores are lost, and syncs fail with EIO.",
        Unit::Pages,
        "fs",
        "MMAP_DIRTY_PAGES_HARD_MAX",
    ),
    (
        "Age of dirty pages of mappings, before the mount stores them.",
        Unit::Seconds,
        "fs",
        "MMAP_DIRTY_SECONDS_MAX",
    ),
    (
        "Threads of a mount.",
        Unit::Count,
        "front/fuse",
        "THREADS_MAX",
    ),
    (
        "Processors up to which a mount uses io_uring.",
        Unit::Count,
        "front/fuse",
        "QUEUES_MAX",
    ),
    (
        "Interval at which `df` asks the bricks.",
        Unit::Time,
        "app",
        "FREE_SPACE_INTERVAL",
    ),
    (
        "Wait of `umount` for other mount namespaces.",
        Unit::Time,
        "app",
        "UNMOUNTED_TIMEOUT",
    ),
    (
        "Wait of `umount` until all data is stored.",
        Unit::Time,
        "app",
        "COMPLETE_TIMEOUT",
    ),
    (
        "Interval at which a mount reports that it lives.",
        Unit::Time,
        "manage",
        "SIGN_INTERVAL",
    ),
    (
        "Silence after which another mount takes the file system over.",
        Unit::Time,
        "manage",
        "SILENCE_LIMIT",
    ),
    (
        "The same for a mount that has never reported, because it waits for bricks.",
        Unit::Time,
        "app",
        "CONNECT_SILENCE_LIMIT",
    ),
    (
        "Wait of a mount for a process that has unmounted the file system and stores its data.",
        Unit::Time,
        "app",
        "ENDING_LIMIT",
    ),
    (
        "Free memory below which `mount` is refused.",
        Unit::Bytes,
        "app",
        "MEMORY_MIN",
    ),
];

const DIRECT: &[Limit] = &[
    (
        "Rows of a mount: threads of all programs that are on its direct path at once. The kernel serves further ones.",
        Unit::Count,
        "volume",
        "ROWS",
    ),
    ("Rows of one process.", Unit::Count, "direct", "IO_SLOTS"),
    (
        "Connections of programs to a mount: one for each process, for each of its rows, and for each atomic write by the mount. The kernel serves further ones, but such a write fails (EOPNOTSUPP).",
        Unit::Count,
        "direct",
        "CONNECTIONS_MAX",
    ),
    (
        "Files of a mount on the direct path. The kernel serves further ones.",
        Unit::Count,
        "direct",
        "FILE_MAPS_MAX",
    ),
    (
        "Files of a process with separate counts in the report.",
        Unit::Count,
        "direct",
        "UNTRACKED_FILES",
    ),
    (
        "Mounts with a direct path for one process. The kernel serves further ones.",
        Unit::Count,
        "direct",
        "MOUNTS_MAX",
    ),
    (
        "Longest call on the direct path. The kernel serves longer ones; `libpagemesh` divides them.",
        Unit::Bytes,
        "preload",
        "DIRECT_BYTES_MAX",
    ),
    (
        "Calls of a process on files of mounts that the kernel serves first.",
        Unit::Count,
        "preload",
        "PATIENCE",
    ),
    (
        "Sessions of each pool that direct clients leave to others, at least.",
        Unit::Count,
        "direct",
        "SESSIONS_RESERVED_MIN",
    ),
    (
        "Idle time after which a thread returns its session, if sessions are scarce.",
        Unit::Time,
        "direct",
        "IDLE_MAX",
    ),
    (
        "Files whose watchers get their events in the same second.",
        Unit::Count,
        "front/fuse",
        "FILES_MAX",
    ),
    (
        "Pages that `libpagemesh` overwrites atomically.",
        Unit::Count,
        "native",
        "ATOMIC_PAGES_MAX",
    ),
    (
        "Pages of a guard.",
        Unit::Count,
        "native",
        "GUARD_PAGES_MAX",
    ),
    ("Guards of a process.", Unit::Count, "native", "GUARDS_MAX"),
    (
        "Other page changes in a pool after which a guard is invalid.",
        Unit::Count,
        "store",
        "CONSISTENT_READ_CHANGES_MAX",
    ),
];

const MANAGER: &[Limit] = &[
    (
        "Concurrent requests to the manager. Further ones are refused.",
        Unit::Count,
        "manage/src/api",
        "REQUESTS_MAX",
    ),
    (
        "Concurrent requests to it that call bricks.",
        Unit::Count,
        "manage/src/api",
        "SLOW_REQUESTS_MAX",
    ),
    (
        "Time of a request, its body included.",
        Unit::Time,
        "manage/src/api",
        "REQUEST_TIMEOUT",
    ),
    (
        "Longest body of a request.",
        Unit::Bytes,
        "manage/src/api",
        "BODY_BYTES_MAX",
    ),
    (
        "Tokens of a manager, the expired ones included.",
        Unit::Count,
        "manage/src/access",
        "TOKENS_MAX",
    ),
    (
        "Answers to calls with an `Idempotency-Key` that are kept; the oldest go first.",
        Unit::Count,
        "manage",
        "KEYS_MAX",
    ),
    (
        "Bodies of these answers together.",
        Unit::Bytes,
        "manage",
        "KEPT_BYTES_MAX",
    ),
    (
        "Wrong tokens of an address in the time of the next row. Further ones are answered with 429.",
        Unit::Count,
        "manage/src/access",
        "WRONG_TOKENS_MAX",
    ),
    (
        "Time over which wrong tokens of an address are counted.",
        Unit::Time,
        "manage/src/access",
        "WRONG_TOKENS_WINDOW",
    ),
    (
        "Addresses whose wrong tokens are counted. While there are as many, those of others are answered with 429.",
        Unit::Count,
        "manage/src/access",
        "ADDRESSES_MAX",
    ),
    (
        "Connections of the manager. A further one takes the place of an unauthenticated one, of the address that has most of them.",
        Unit::Count,
        "manage",
        "CONNECTIONS_MAX",
    ),
];

const METRICS: &[Limit] = &[
    (
        "Volumes with series of their own in the manager's metrics, by default.",
        Unit::Count,
        "manage",
        "METRIC_VOLUMES",
    ),
    (
        "Connections to the metrics of a process. Further ones wait.",
        Unit::Count,
        "metrics",
        "CONNECTIONS_MAX",
    ),
    (
        "Such a connection ends after",
        Unit::Time,
        "metrics",
        "CONNECTION_TIMEOUT",
    ),
    (
        "Head of a request for the metrics of a process.",
        Unit::Bytes,
        "metrics",
        "HEAD_BYTES_MAX",
    ),
];

const SECTIONS: &[(&str, &[Limit])] = &[
    ("Pools", POOLS),
    ("Disks", DISKS),
    ("Volumes", VOLUMES),
    ("Losses and time-outs", FAULTS),
    ("Asynchronous replicas", REPLICAS),
    ("Stopped and unresponsive processes", STALLS),
    ("Scrubs", SCRUBS),
    ("NBD", NBD),
    ("Connections of a brick", BRICKS),
    ("Files", FILES),
    ("The direct path", DIRECT),
    ("The manager", MANAGER),
    ("Metrics", METRICS),
];

/// Modules and directories without product code.
const TEST_MODULES: [&str; 5] = ["tests", "testing", "enumerate", "models", "fuzz"];

fn root() -> &'static Path {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().expect("a root")
}

/// The constants of a crate, and the fields of default values, by their names; whether each is
/// public.
#[derive(Default)]
struct Constants(HashMap<String, Vec<(bool, syn::Expr)>>);

impl Constants {
    fn of(directory: &str) -> Constants {
        let mut found = Constants::default();
        let below = root().join("crates").join(directory);
        let source = if below.join("src").is_dir() {
            below.join("src")
        } else {
            below
        };
        for entry in walkdir::WalkDir::new(&source).sort_by_file_name() {
            let path = entry.expect("a readable directory").into_path();
            let is_source = path.extension().is_some_and(|found| found == "rs");
            // The names of directories above the crate say nothing about the file.
            let inside = path.strip_prefix(&source).expect("a path in the crate");
            // The API of the manager is a part of its crate with names of its own.
            let is_other =
                directory == "manage" && inside.components().any(|it| it.as_os_str() == "api");
            let is_test = inside.components().any(|it| {
                let name = it.as_os_str().to_string_lossy();
                TEST_MODULES.contains(&name.trim_end_matches(".rs"))
            });
            if is_source && !is_other && !is_test {
                let text = fs::read_to_string(&path).expect("a text");
                let parsed = syn::parse_file(&text).expect("a source");
                found.visit_file(&parsed);
            }
        }
        found
    }

    /// The constant of this name. Of several the public one counts.
    fn expression(&self, name: &str) -> &syn::Expr {
        let found = self.0.get(name).map(Vec::as_slice).unwrap_or_default();
        let public: Vec<&syn::Expr> = found
            .iter()
            .filter(|(is_public, _)| *is_public)
            .map(|(_, expression)| expression)
            .collect();
        match (found, public.as_slice()) {
            ([(_, only)], _) => only,
            (_, [only]) => only,
            _ => panic!("{} constants are called {name}", found.len()),
        }
    }

    /// The value; of a duration in microseconds.
    fn value(&self, expression: &syn::Expr) -> u128 {
        match expression {
            syn::Expr::Lit(literal) => match &literal.lit {
                syn::Lit::Int(number) => number.base10_parse().expect("a number"),
                _ => panic!("not a number"),
            },
            syn::Expr::Paren(inner) => self.value(&inner.expr),
            syn::Expr::Cast(inner) => self.value(&inner.expr),
            syn::Expr::Binary(operation) => {
                let (left, right) = (self.value(&operation.left), self.value(&operation.right));
                match operation.op {
                    syn::BinOp::Shl(_) => left << right,
                    syn::BinOp::Mul(_) => left * right,
                    syn::BinOp::Div(_) => left / right,
                    syn::BinOp::Add(_) => left + right,
                    syn::BinOp::Sub(_) => left - right,
                    _ => panic!("an operation that this test does not know"),
                }
            }
            // `if cfg!(test) { … } else { … }`: the value of the product.
            syn::Expr::If(choice) => {
                let (_, other) = choice.else_branch.as_ref().expect("an else");
                self.value(other)
            }
            syn::Expr::Block(block) => match block.block.stmts.as_slice() {
                [syn::Stmt::Expr(only, None)] => self.value(only),
                _ => panic!("a block of one expression"),
            },
            syn::Expr::Call(call) => {
                let argument = self.value(call.args.first().expect("an argument"));
                match last_name(&call.func).as_str() {
                    "from_secs" => argument * 1_000_000,
                    "from_millis" => argument * 1_000,
                    "from_micros" => argument,
                    other => panic!("a call of {other}"),
                }
            }
            syn::Expr::Path(path) => {
                let first = path.path.segments.first().expect("a name");
                let is_own = path.path.segments.len() == 1 || first.ident == "crate";
                let name = last_name(expression);
                if is_own && self.0.contains_key(&name) {
                    self.value(self.expression(&name))
                } else {
                    value_elsewhere(&name)
                }
            }
            _ => panic!("an expression that this test does not know"),
        }
    }
}

/// The value of another crate's constant.
fn value_elsewhere(name: &str) -> u128 {
    for directory in ["base", "fs", "volume"] {
        let constants = Constants::of(directory);
        if constants.0.contains_key(name) {
            return constants.value(constants.expression(name));
        }
    }
    panic!("no constant {name}")
}

/// The last name of a path.
fn last_name(expression: &syn::Expr) -> String {
    match expression {
        syn::Expr::Path(path) => {
            let last = path.path.segments.last().expect("a name");
            last.ident.to_string()
        }
        _ => panic!("not a path"),
    }
}

impl<'ast> Visit<'ast> for Constants {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        if module.ident != "tests" {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_const(&mut self, constant: &'ast syn::ItemConst) {
        let name = constant.ident.to_string();
        let expressions = self.0.entry(name).or_default();
        let is_public = matches!(constant.vis, syn::Visibility::Public(_));
        expressions.push((is_public, (*constant.expr).clone()));
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let of_default = item.trait_.as_ref().is_some_and(|(path, ..)| {
            path.segments
                .last()
                .is_some_and(|last| last.ident == "Default")
        });
        if let (true, syn::Type::Path(own)) = (of_default, &*item.self_ty) {
            let name = own.path.segments.last().expect("a name").ident.to_string();
            let mut fields = Fields(vec![]);
            fields.visit_item_impl(item);
            for (field, expression) in fields.0 {
                let expressions = self.0.entry(format!("{name}.{field}")).or_default();
                expressions.push((true, expression));
            }
        }
        visit::visit_item_impl(self, item);
    }
}

/// The fields of struct expressions.
struct Fields(Vec<(String, syn::Expr)>);

impl<'ast> Visit<'ast> for Fields {
    fn visit_field_value(&mut self, field: &'ast syn::FieldValue) {
        if let syn::Member::Named(name) = &field.member {
            self.0.push((name.to_string(), field.expr.clone()));
        }
    }
}

/// A number with thousands apart.
fn grouped(number: u128) -> String {
    let digits = number.to_string();
    if digits.len() <= 4 {
        return digits;
    }
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// A number in the largest of these units that divides it.
fn in_units(number: u128, units: &[(u128, &str)]) -> String {
    let fits = |(size, _): &&(u128, &str)| number >= *size && number.is_multiple_of(*size);
    let (size, name) = units.iter().find(fits).expect("the smallest unit");
    format!("{} {name}", grouped(number / size))
}

fn rendered(value: u128, unit: Unit) -> String {
    const BYTE_UNITS: &[(u128, &str)] = &[
        (1 << 40, "TiB"),
        (1 << 30, "GiB"),
        (1 << 20, "MiB"),
        (1 << 10, "KiB"),
        (1, "bytes"),
    ];
    const TIME_UNITS: &[(u128, &str)] = &[
        (24 * 3_600_000_000, "d"),
        (60_000_000, "min"),
        (1_000_000, "s"),
        (1_000, "ms"),
        (1, "µs"),
    ];
    match unit {
        Unit::Bytes => in_units(value, BYTE_UNITS),
        Unit::Count => grouped(value),
        Unit::Time => in_units(value, TIME_UNITS),
        Unit::Seconds => in_units(value * 1_000_000, TIME_UNITS),
        Unit::Milliseconds => in_units(value * 1_000, TIME_UNITS),
        Unit::Pages => format!(
            "{} pages ({})",
            grouped(value),
            in_units(value * 4096, BYTE_UNITS)
        ),
        Unit::Rate => format!("{} per second", in_units(value, BYTE_UNITS)),
    }
}

/// The name of a crate, as code writes it.
fn module(directory: &str) -> String {
    let module = directory.replace("/src/", "::");
    module.trim_start_matches("front/").to_owned()
}

fn page() -> String {
    let mut page = format!(
        "<!-- Generated by `{COMMAND}` from the constants of the source. Do not edit. -->\n\n# Limits and time-outs\n\n\
         Each value is a named constant of the source, with the reason of its value beside it. Find one with\n\
         `grep -rn 'const NAME' crates`. A name with a dot is a field of the default value of a type.\n"
    );
    let mut crates = HashMap::<&str, Constants>::new();
    for (title, limits) in SECTIONS {
        page += &format!("\n## {title}\n\n| limit | value | crate and constant |\n|---|---|---|\n");
        for (meaning, unit, directory, name) in *limits {
            let constants = crates
                .entry(directory)
                .or_insert_with(|| Constants::of(directory));
            let value = constants.value(constants.expression(name));
            let (value, module) = (rendered(value, *unit), module(directory));
            page += &format!("| {meaning} | {value} | `{module}` `{name}` |\n");
        }
    }
    page
}

#[test]
fn page_of_limits_is_current() {
    let (path, wanted) = (root().join(PAGE), page());
    if std::env::var_os(WRITE).is_some() {
        fs::write(&path, &wanted).expect("the page can be written");
        return;
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    let stale = wanted.lines().find(|line| !found.contains(*line));
    assert!(
        found == wanted,
        "{PAGE} is not current (first difference: {stale:?}); run `{COMMAND}`"
    );
}

#[test]
fn values_are_written_in_their_largest_unit() {
    assert_eq!(rendered(64 << 40, Unit::Bytes), "64 TiB");
    assert_eq!(rendered(512, Unit::Bytes), "512 bytes");
    assert_eq!(rendered(90_000_000, Unit::Time), "90 s");
    assert_eq!(rendered(7 * 24 * 3_600_000_000, Unit::Time), "7 d");
    assert_eq!(rendered(65_536, Unit::Count), "65\u{202f}536");
    assert_eq!(rendered(3 << 10, Unit::Pages), "3072 pages (12 MiB)");
}
