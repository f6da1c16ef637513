//! The command line. The doc comments of arguments are the help texts.

use clap::builder::RangedU64ValueParser;
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use pagemesh_base::layout::VolumeName;
use pagemesh_base::units::Size;
use pagemesh_bench::session::{ROUNDS_MAX, ROUNDS_MIN};
use pagemesh_bench::sweep::RUNTIME_MAX;
use pagemesh_volume::ScrubPlan;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use uuid::Uuid;

/// The names of durability classes.
const CLASSES: [&str; 4] = ["pmem", "eadr", "file-sync", "process"];

/// Software-defined memory: pools, bricks, and mirrored volumes of persistent memory.
///
/// Exit codes: 0 success; 1 failure, with the cause on standard error; 2 invalid command line; 3 a
/// check found differences or damage; 4 another client has taken over the volume or the file
/// system; 126 `exec` cannot run the program; 127 `exec` cannot find it.
#[derive(Parser)]
#[command(name = "pagemesh", version, about, max_term_width = 100)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// Output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A table, for people.
    Table,
    /// JSON, for programs.
    Json,
}

/// The time between two repetitions, or never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval(pub Option<Duration>);

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Interval, String> {
        if text == "never" {
            return Ok(Interval(None));
        }
        let seconds = |number: &str, unit: u64| number.parse::<u64>().ok()?.checked_mul(unit);
        let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 24 * 3600)];
        let found = units.into_iter().find_map(|(suffix, unit)| {
            let number = text.strip_suffix(suffix)?;
            seconds(number, unit)
        });
        match found {
            Some(seconds @ 1..=INTERVAL_MAX) => Ok(Interval(Some(Duration::from_secs(seconds)))),
            _ => {
                Err("use a number and a unit, as 90s, 30m, 12h or 7d, up to 3650d, or never".into())
            }
        }
    }
}

/// Seconds of the longest interval: ten years.
const INTERVAL_MAX: u64 = 3650 * 24 * 3600;

/// Accepts an empty path, because an environment variable may be empty.
fn path_parser() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// The manager's address, and the key that proves membership in the cluster.
#[derive(Args, Clone)]
pub struct ManagerArgs {
    /// Address of the manager.
    #[arg(
        long,
        env = "PAGEMESH_MANAGER",
        default_value = "http://127.0.0.1:7070",
        global = true
    )]
    pub manager: String,
    /// File with the cluster key; by default the key file that `up` stored for this address.
    #[arg(long, env = "PAGEMESH_KEY", global = true, value_parser = path_parser())]
    pub key: Option<PathBuf>,
    /// Output format.
    #[arg(long, value_enum, default_value = "table", global = true)]
    pub output: Output,
}

/// The transport between a client and a brick.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// `map` if the brick is on this machine and its pool allows it, otherwise `tcp`.
    Auto,
    /// Map the pool into this process.
    Map,
    /// Send messages over TCP.
    Tcp,
}

/// The transport of FUSE requests from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FuseTransport {
    /// `io-uring` if the kernel has it enabled, otherwise `classic`.
    Auto,
    /// Read and write /dev/fuse.
    Classic,
    /// FUSE over io_uring; fail if the kernel does not offer it.
    IoUring,
}

impl FuseTransport {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            FuseTransport::Auto => "auto",
            FuseTransport::Classic => "classic",
            FuseTransport::IoUring => "io-uring",
        }
    }
}

/// The commands.
#[derive(Subcommand)]
pub enum Command {
    /// Run a whole cluster on this machine, to try pagemesh.
    Up(UpArgs),
    Down(DownArgs),
    /// Create, show and check pools.
    #[command(subcommand)]
    Pool(PoolCommand),
    /// Run the brick of a pool; list bricks and scrub their pools.
    Brick(BrickArgs),
    /// Run the manager.
    Manager(ManagerDaemonArgs),
    /// Create, show, grow, check and delete volumes.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Add, remove and promote copies of a volume.
    #[command(subcommand)]
    Replica(ReplicaCommand),
    /// Export volumes to applications.
    #[command(subcommand)]
    Export(ExportCommand),
    /// Create, show, grow and delete file systems.
    #[command(subcommand)]
    Fs(FileSystemCommand),
    /// Mount a file system, or show the direct clients of a mount.
    Mount(MountArgs),
    /// Run a program with direct access to the files of mounts.
    Exec(ExecArgs),
    /// Unmount a file system, and wait until its mount process has exited.
    Umount {
        /// Mount point.
        dir: PathBuf,
        /// Detach the mount at once, even with open files. The mount ends with the last open file;
        /// the command does not wait for that.
        #[arg(long)]
        lazy: bool,
        /// Unmount in all mount namespaces, even with open files. Later calls of processes on these
        /// files fail.
        #[arg(long, conflicts_with = "lazy")]
        force: bool,
    },
    /// Show the manager, the bricks and the volumes.
    Status {
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Run benchmarks.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Print the manual page.
    #[command(hide = true)]
    Man,
    /// Print shell completions.
    Completions {
        /// Shell.
        shell: clap_complete::Shell,
    },
}

/// Run a whole cluster on this machine, to try pagemesh.
#[derive(Args)]
pub struct UpArgs {
    /// Directory of the cluster; a later `up` on it finds the same data.
    #[arg(long, default_value = "pagemesh-data")]
    pub dir: PathBuf,
    /// Number of bricks.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub bricks: u32,
    /// Size of each new pool.
    #[arg(long, default_value = "1G")]
    pub size: Size,
    /// Address of the manager.
    #[arg(long, default_value = "127.0.0.1:7070")]
    pub listen: String,
    /// Keep the pools in memory (class `process`), in /dev/shm or the given tmpfs. This is fast,
    /// but a restart of the machine loses the data.
    #[arg(long, value_name = "TMPFS", num_args = 0..=1, require_equals = true, default_missing_value = "/dev/shm")]
    pub memory: Option<PathBuf>,
    /// Remove the cluster and its data at the end. Otherwise the data stays, also in memory.
    #[arg(long)]
    pub ephemeral: bool,
    /// Exit when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
}

/// Stop the cluster that `up` runs in a directory.
#[derive(Args)]
pub struct DownArgs {
    /// Directory of the cluster.
    #[arg(long, default_value = "pagemesh-data")]
    pub dir: PathBuf,
    /// Remove the data of the cluster, too: pools, keys, logs and the manager's database.
    #[arg(long)]
    pub remove: bool,
}

/// Create, show and check pools.
#[derive(Subcommand)]
pub enum PoolCommand {
    /// Create a pool. Its class is `file-sync` on a plain file, `process` on tmpfs and `pmem` on
    /// DAX, unless `--class` names another.
    Create {
        /// New file, or a device.
        path: PathBuf,
        /// Size of the pool.
        #[arg(long)]
        size: Size,
        /// Durability class; by default the class of the medium. `eadr` needs CPU caches that
        /// survive power loss. `process` on a plain file loses the data when the machine restarts.
        #[arg(long, value_parser = CLASSES)]
        class: Option<String>,
        /// Accept the class although nothing shows that the medium fulfils it.
        ///
        /// Data loss: if the medium does not fulfil the class, a power failure loses or damages
        /// acknowledged writes.
        #[arg(long, requires = "class")]
        trust_medium: bool,
        /// Output format.
        #[arg(long, value_enum, default_value = "table")]
        output: Output,
    },
    /// Check a pool while no brick runs on it. Without `--repair` the check writes nothing; it
    /// replays the journal of a crashed brick in memory only.
    ///
    /// The check compares both superblocks, the journal, the object table, the page tables, the
    /// bitmap, the frame counts and the in-flight table. It also reads every page and verifies its
    /// checksum. Each finding names the slice, page, frame and byte, where known. Exit code 3: the
    /// pool has damage that is not repaired.
    Check {
        /// Pool to check.
        path: PathBuf,
        /// Repair the parts that the pool can restore by itself: superblocks, bitmap, lost frames,
        /// counts, and single flipped bits of journal and tables. A damaged page needs another copy
        /// of its volume.
        #[arg(long)]
        repair: bool,
        /// Check only structures, and skip the pages.
        #[arg(long)]
        skip_data: bool,
        /// Output format.
        #[arg(long, value_enum, default_value = "table")]
        output: Output,
    },
    /// Show the superblock of a pool.
    Show {
        /// Pool to show.
        path: PathBuf,
        /// Output format.
        #[arg(long, value_enum, default_value = "table")]
        output: Output,
    },
}

/// Run the brick of a pool; list bricks and scrub their pools.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BrickArgs {
    /// Command to run instead of a brick.
    #[command(subcommand)]
    pub command: Option<BrickCommand>,
    /// Pool to serve.
    #[arg(long, required = true)]
    pub pool: Option<PathBuf>,
    /// Address of the TCP transport; port 0 takes a free port.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: String,
    /// Unix socket of the map transport.
    #[arg(long)]
    pub map: Option<PathBuf>,
    /// Address for clients, if it differs from --listen.
    #[arg(long)]
    pub advertise: Option<String>,
    /// Failure domain of this brick; by default the host name.
    #[arg(long)]
    pub domain: Option<String>,
    /// Keep a sparse pool sparse; for benchmarks only.
    #[arg(long, hide = true)]
    pub sparse: bool,
    /// Interval of pool scrubs, as `12h` or `7d`, or `never`. A scrub compares the metadata of the
    /// pool with the brick's state in memory, and corrects it. SIGUSR2 and `pagemesh brick scrub`
    /// start or stop a scrub; SIGUSR1 and `pagemesh brick list` show the findings.
    #[arg(long, default_value = "1d", value_name = "TIME")]
    pub scrub_every: Interval,
    /// Exit when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// List bricks and scrub their pools.
#[derive(Subcommand)]
pub enum BrickCommand {
    /// List bricks with their usage and the scrubs of their pools.
    List,
    /// Start a scrub of the pools of running bricks. A brick receives the request with its next
    /// heartbeat; `pagemesh brick list` shows the progress.
    Scrub {
        /// UUID of the brick.
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        brick: Option<Uuid>,
        /// All living bricks.
        #[arg(long)]
        all: bool,
        /// Stop the running scrub instead of starting one.
        #[arg(long)]
        stop: bool,
    },
}

/// Run the manager.
#[derive(Args)]
pub struct ManagerDaemonArgs {
    /// Database of the manager.
    #[arg(long, default_value = "manager.redb")]
    pub store: PathBuf,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:7070")]
    pub listen: String,
    /// File with the cluster key; by default one in the user's configuration directory, which is
    /// created if missing.
    #[arg(long, env = "PAGEMESH_KEY", value_parser = path_parser())]
    pub key: Option<PathBuf>,
    /// Exit when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
}

/// The layout of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LayoutArg {
    /// One copy, on one brick or, if it does not fit, on several.
    Concat,
    /// One copy, striped over columns.
    Stripe,
    /// Two or three copies.
    Mirror,
    /// Two or three copies of each column of a stripe.
    #[value(name = "stripe+mirror", alias = "stripe-mirror")]
    StripeMirror,
}

/// The time at which a copy receives a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReplicaMode {
    /// Before the write is acknowledged.
    Sync,
    /// Shortly after the acknowledgement, in order. A durable write (O_SYNC, O_DSYNC, fsync, FUA,
    /// flush) is acknowledged once the copy has it.
    Async,
}

/// Add, remove and promote copies of a volume.
#[derive(Subcommand)]
pub enum ReplicaCommand {
    /// Add a copy to a volume, even while it is in use. After its first resync a synchronous copy
    /// holds every acknowledged write.
    Attach {
        /// Volume.
        volume: VolumeName,
        /// UUID of the brick for the copy; by default any brick with room in a failure domain that
        /// has no copy yet.
        #[arg(long)]
        brick: Option<uuid::Uuid>,
        /// When the copy receives a write.
        #[arg(long, value_enum, default_value_t = ReplicaMode::Sync)]
        mode: ReplicaMode,
        /// Let the manager promote the asynchronous copy for a client that reaches no in-sync copy,
        /// while every brick with an in-sync copy is dead.
        ///
        /// Data loss: the promoted copy may lack the last acknowledged writes that were not
        /// durable.
        #[arg(long)]
        auto_promote: bool,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Remove a copy of a volume.
    Detach {
        /// Volume.
        volume: VolumeName,
        /// Number of the copy, from 0.
        #[arg(long)]
        copy: usize,
        /// Remove it although a client has attached the volume, which is then fenced, or although
        /// no living brick would have an in-sync copy.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Make one copy the only in-sync one; the others resync from it. Not needed while any in-sync
    /// copy is reachable: the next client then uses that copy by itself.
    Promote {
        /// Volume.
        volume: VolumeName,
        /// Number of the copy, from 0.
        #[arg(long)]
        copy: usize,
        /// Promote it although a client has attached the volume, which is then fenced, or although
        /// the copy is not in-sync.
        ///
        /// Data loss: acknowledged writes that the copy lacks are lost.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Show the copies of a volume.
    Status {
        /// Volume.
        volume: VolumeName,
        #[command(flatten)]
        client: ManagerArgs,
    },
}

/// Create, show, grow, check and delete volumes.
#[derive(Subcommand)]
pub enum VolumeCommand {
    /// Create a volume.
    Create {
        /// Name of the volume.
        name: VolumeName,
        /// Size; the volume is thin, so space is allocated on write.
        #[arg(long)]
        size: Size,
        /// Layout.
        #[arg(long, value_enum, default_value = "mirror")]
        layout: LayoutArg,
        /// Copies of a mirror, 2 or 3; 2 by default.
        #[arg(long)]
        copies: Option<usize>,
        /// Columns of a stripe; 2 by default.
        #[arg(long)]
        columns: Option<usize>,
        /// Durability class of its bricks; by default the strongest class with room.
        #[arg(long, value_parser = CLASSES)]
        class: Option<String>,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// List volumes.
    List {
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Show the layout of a volume and the states of its legs.
    Show {
        /// Volume.
        name: VolumeName,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Grow a volume, even while it is in use.
    Grow {
        /// Volume.
        name: VolumeName,
        /// New size.
        #[arg(long)]
        size: Size,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Delete a volume and all data on it.
    Delete {
        /// Volume.
        name: VolumeName,
        /// Delete it although a client has attached it.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// End the attachment of a volume, as after the loss of the client's machine. A client that
    /// still runs is fenced at its next request to the manager, within ten seconds.
    Detach {
        /// Volume.
        name: VolumeName,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Compare the copies of a volume that no client has attached.
    Check {
        /// Volume.
        name: VolumeName,
        /// Take the volume over from the client that has attached it; the client is fenced.
        #[arg(long)]
        force: bool,
        /// Number of the copy, from 0, that replaces differing pages on the other copies.
        #[arg(long)]
        repair_from: Option<usize>,
        /// Transport to the bricks.
        #[arg(long, value_enum, default_value = "auto")]
        transport: Transport,
        #[command(flatten)]
        client: ManagerArgs,
    },
}

/// Export volumes to applications.
#[derive(Subcommand)]
pub enum ExportCommand {
    /// Export volumes over the network block device protocol (NBD).
    ///
    /// SIGINT and SIGTERM stop the export. On SIGUSR1 it writes the status of each volume to
    /// standard output, as one line of JSON: stalled writes (state `awaiting-manager` or
    /// `unavailable`), the state of every leg and the error of its brick, the progress of resyncs,
    /// scrub findings, and totals such as the copied bytes. SIGUSR2 starts a scrub of all volumes,
    /// or stops the running scrubs.
    Nbd {
        /// Volumes to export, each under its own name.
        #[arg(required = true)]
        volumes: Vec<VolumeName>,
        /// Unix socket to listen on.
        #[arg(long, required_unless_present = "listen", conflicts_with = "listen")]
        socket: Option<PathBuf>,
        /// Address to listen on, as host:port.
        #[arg(long)]
        listen: Option<String>,
        /// Refuse writes.
        #[arg(long)]
        read_only: bool,
        /// Let idle processors sleep while clients are busy. Otherwise the processors poll, if this
        /// process may open /dev/cpu_dma_latency; that is faster, but needs more power.
        #[arg(long)]
        no_keep_awake: bool,
        #[command(flatten)]
        scrubs: ScrubArgs,
        /// Exit when standard input ends.
        #[arg(long, hide = true)]
        until_stdin_ends: bool,
        /// Transport to the bricks.
        #[arg(long, value_enum, default_value = "auto")]
        transport: Transport,
        #[command(flatten)]
        client: ManagerArgs,
    },
}

/// Create, show, grow and delete file systems.
#[derive(Subcommand)]
pub enum FileSystemCommand {
    /// Create a file system.
    Create {
        /// Name of the file system.
        name: VolumeName,
        /// Limit of all files together; space is allocated on write.
        #[arg(long)]
        size: Size,
        /// Number of copies, each on its own brick.
        #[arg(long, default_value_t = 2, value_parser = RangedU64ValueParser::<usize>::new().range(1..=3))]
        copies: usize,
        /// Durability class of its bricks; by default the strongest class with room.
        #[arg(long, value_parser = CLASSES)]
        class: Option<String>,
        /// Transport to the bricks.
        #[arg(long, value_enum, default_value = "auto")]
        transport: Transport,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// List file systems.
    List {
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Show the layout of a file system and the states of its copies.
    Show {
        /// File system.
        name: VolumeName,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Raise the limit of a file system, even while it is mounted.
    Grow {
        /// File system.
        name: VolumeName,
        /// New limit of all files together: at most four times the original limit, or 256 MiB if
        /// that is more.
        #[arg(long)]
        size: Size,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Delete a file system and all files in it.
    Delete {
        /// File system.
        name: VolumeName,
        /// Delete it although it is mounted.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        client: ManagerArgs,
    },
}

/// The scrub settings of attached volumes.
#[derive(Args)]
pub struct ScrubArgs {
    /// Interval of volume scrubs, as `12h` or `7d`, or `never`. A scrub reads all copies in the
    /// background, and repairs damaged pages.
    #[arg(long, default_value = "7d", value_name = "TIME")]
    scrub_every: Interval,
    /// Bytes of a volume scrubbed per second, each on all copies. A scrub slows down to a quarter
    /// while there are writes.
    #[arg(long, default_value = "64M", value_name = "SIZE")]
    scrub_rate: Size,
}

impl ScrubArgs {
    /// The scrub plan of a volume.
    pub fn plan(&self) -> ScrubPlan {
        ScrubPlan {
            every: self.scrub_every.0,
            bytes_per_s: self.scrub_rate.0,
        }
    }
}

/// Run a program with direct access to the files of mounts.
///
/// The program's threads read, overwrite and append to these files themselves. All other calls, and
/// statically linked programs, use the kernel as usual and see the same data. Direct access needs
/// mapped pools that need no flush, and a mount of the same user or of root.
#[derive(Args)]
pub struct ExecArgs {
    /// Library that intercepts the program's calls; by default the one installed with this program.
    #[arg(long, env = "PAGEMESH_PRELOAD", value_name = "FILE")]
    pub library: Option<PathBuf>,
    /// Calls of a process on files of mounts that use the kernel before the process switches to
    /// direct access. The switch costs more than a hundred calls. 32 by default.
    #[arg(long, env = "PAGEMESH_PATIENCE", value_name = "CALLS")]
    pub patience: Option<u32>,
    /// Let each process report at its exit how many operations were direct, how many used the
    /// kernel, and why. The report goes to standard error, or is appended to a file.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    pub report: Option<PathBuf>,
    /// Format of the report; JSON is one line per process.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
    /// Write to standard error why the program gets no direct access, if that is known before it
    /// runs. For a running program use `PAGEMESH_LOG=info` or --report.
    #[arg(long)]
    pub verbose: bool,
    /// Program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<std::ffi::OsString>,
}

/// Mount a file system on a directory.
///
/// The command prints `ready`, and serves until an unmount (`pagemesh umount`), SIGINT or SIGTERM.
/// The signals cut off processes with open files. The mount fences a client that had the file
/// system mounted before. On SIGUSR1 it writes the status of its volume to standard output, as one
/// line of JSON; SIGUSR2 starts or stops a scrub, as for `export nbd`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct MountArgs {
    /// Command to run instead of a mount.
    #[command(subcommand)]
    pub command: Option<MountCommand>,
    /// File system.
    #[arg(required = true)]
    pub name: Option<VolumeName>,
    /// Mount point: an existing directory.
    #[arg(required = true)]
    pub dir: Option<PathBuf>,
    /// Give all users access, by permissions; otherwise only the mounting user has access.
    #[arg(long)]
    pub allow_other: bool,
    /// Number of server threads.
    #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
    pub threads: usize,
    /// Exit when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
    /// Serve in a new session, without a terminal.
    #[arg(long, hide = true)]
    pub detach: bool,
    /// Transport to the bricks.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: Transport,
    /// Transport of FUSE requests from the kernel.
    #[arg(long, value_enum, default_value = "auto")]
    pub fuse: FuseTransport,
    /// Let idle processors sleep while the mount is busy. Otherwise the processors poll, if this
    /// process may open /dev/cpu_dma_latency; that is faster, but needs more power.
    #[arg(long)]
    pub no_keep_awake: bool,
    /// Keep files out of the kernel's page cache: each call becomes a request, and writes to one
    /// file run in parallel.
    ///
    /// Data loss: a program that uses io_uring at the current position (offset -1) overwrites its
    /// own bytes.
    #[arg(long)]
    pub direct_io: bool,
    #[command(flatten)]
    pub scrubs: ScrubArgs,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Show the mounts of this machine.
#[derive(Subcommand)]
pub enum MountCommand {
    /// Show the direct clients of a mount, how many operations were direct, how many used the
    /// kernel, and why. A file system named `status` is mounted by `mount -- status DIR`.
    Status {
        /// Mount point, or `all`.
        #[arg(default_value = "all")]
        dir: PathBuf,
    },
}

/// Mount a file system that discards all writes.
#[derive(Args)]
pub struct NullMountArgs {
    /// Mount point: an existing directory.
    pub dir: PathBuf,
    /// Number of server threads.
    #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
    pub threads: usize,
    /// Transport of FUSE requests from the kernel.
    #[arg(long, value_enum, default_value = "auto")]
    pub fuse: FuseTransport,
    /// Let idle processors sleep while the mount is busy. Otherwise the processors poll, if this
    /// process may open /dev/cpu_dma_latency; that is faster, but needs more power.
    #[arg(long)]
    pub no_keep_awake: bool,
    /// Keep files out of the kernel's page cache.
    #[arg(long)]
    pub direct_io: bool,
    /// Exit when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
}

/// Seconds of the longest measurement: the limit of the workloads.
pub const SECONDS_MAX: u64 = RUNTIME_MAX.as_secs();

fn thread_count_parser() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=pagemesh_fuse::THREADS_MAX as u64)
}

fn round_count_parser() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(ROUNDS_MIN as u64..=ROUNDS_MAX as u64)
}

/// The length of a benchmark, and the place of its results.
#[derive(Args, Clone)]
pub struct MeasureArgs {
    /// Number of rounds, 5 to 1000; results are medians over them.
    #[arg(long, default_value_t = 5, value_parser = round_count_parser())]
    pub rounds: usize,
    /// Seconds of each measurement, up to an hour.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    pub seconds: u64,
    /// Directory for raw results and plots.
    #[arg(long)]
    pub save: Option<PathBuf>,
    /// Output format.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
    /// Directory for pools: on tmpfs, hugetlbfs or DAX. A tmpfs with huge pages (mount -o
    /// huge=always) is fastest.
    #[arg(long, default_value = "/dev/shm")]
    pub pools: PathBuf,
}

/// Run benchmarks.
#[derive(Subcommand)]
pub enum BenchCommand {
    /// 4 KiB writes and reads of a mirrored volume mapped into this process, compared with two
    /// plain non-temporal copies.
    Session(MeasureArgs),
    /// 8 KiB reads by 1 to 128 readers.
    Ramp {
        #[command(flatten)]
        measure: MeasureArgs,
        /// Transport to the bricks.
        #[arg(long, value_enum, default_value = "auto")]
        transport: Transport,
    },
    /// 70 % reads and 30 % writes, by block size.
    Table {
        #[command(flatten)]
        measure: MeasureArgs,
        /// Transport to the bricks.
        #[arg(long, value_enum, default_value = "auto")]
        transport: Transport,
    },
    /// fio on this and other block servers, in turn.
    Peers(MeasureArgs),
    /// Recovery time of a pool after its brick is killed under load.
    Recovery(MeasureArgs),
    /// Mirrored files: latency of synchronous writes against throughput, compared with a null mount
    /// and, as root, GlusterFS with two copies.
    Mirror {
        #[command(flatten)]
        measure: MeasureArgs,
        /// Bytes of a write.
        #[arg(long, value_delimiter = ',', default_values_t = [512, 4096, 65536], value_parser = clap::value_parser!(u32).range(512..=1 << 20))]
        sizes: Vec<u32>,
        /// Number of concurrent writers.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 16], value_parser = clap::value_parser!(u32).range(1..=64))]
        jobs: Vec<u32>,
        /// Think time between two writes of a writer, in µs.
        #[arg(long, value_delimiter = ',', default_values_t = [0, 50, 200], value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
        think_us: Vec<u32>,
        /// Omit `--sync=1`: a write need not be durable when it returns, and does not wait for an
        /// asynchronous copy.
        #[arg(long)]
        plain: bool,
        /// Number of server threads of each mount.
        #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
        threads: usize,
        /// Transport of FUSE requests to every mount.
        #[arg(long, value_enum, default_value = "classic")]
        fuse: FuseTransport,
        /// Keep files out of the kernel's page cache on every mount.
        #[arg(long)]
        direct_io: bool,
    },
    /// Direct access to the files of a mount, with one copy and two, compared with a tmpfs and with
    /// the kernel path.
    Direct {
        #[command(flatten)]
        measure: MeasureArgs,
        /// Bytes of a request.
        #[arg(long, value_delimiter = ',', default_values_t = [512, 4096], value_parser = clap::value_parser!(u32).range(512..=1 << 20))]
        sizes: Vec<u32>,
        /// Bytes of each append to a new file.
        #[arg(long, value_delimiter = ',', default_values_t = [100], value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
        appends: Vec<u32>,
        /// Number of concurrent programs.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 16], value_parser = clap::value_parser!(u32).range(1..=64))]
        jobs: Vec<u32>,
        /// Think time between two requests of a program, in µs.
        #[arg(long, value_delimiter = ',', default_values_t = [0], value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
        think_us: Vec<u32>,
        /// Measure instead one program that writes 4096 bytes at a quarter of its maximum rate,
        /// with an asynchronous copy over TCP and with one copy.
        #[arg(long, conflicts_with_all = ["sizes", "jobs", "think_us"])]
        followed: bool,
    },
    /// Calls of libpagemesh on a file with two copies, compared with the kernel's.
    Native(MeasureArgs),
    /// Creation and removal of small files on mounts with one and two copies, compared with
    /// GlusterFS with two copies and ext4 with synchronous writes. Needs root.
    Metadata {
        #[command(flatten)]
        measure: MeasureArgs,
        /// Number of programs that create files concurrently.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 2], value_parser = clap::value_parser!(u32).range(1..=64))]
        jobs: Vec<u32>,
        /// Bytes of a file.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=65536))]
        bytes: u32,
        /// Number of server threads of each mount.
        #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
        threads: usize,
    },
    /// Creation, reading and removal of small files by one program on a mount with two copies, and
    /// `rm -rf`, compared with a tmpfs and, as root, ext4.
    SmallFiles {
        #[command(flatten)]
        measure: MeasureArgs,
        /// Number of files.
        #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..=100_000))]
        files: u64,
        /// Number of entries that `rm -rf` removes; 0 skips that part.
        #[arg(long, default_value_t = 70_000, value_parser = clap::value_parser!(u64).range(0..=100_000))]
        entries: u64,
        /// Number of server threads of the mount.
        #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
        threads: usize,
        /// Transport of FUSE requests from the kernel.
        #[arg(long, value_enum, default_value = "auto")]
        fuse: FuseTransport,
    },
    /// A file system with many files: its mount time and memory, and whether find(1) lists all
    /// files.
    Many {
        #[command(flatten)]
        measure: MeasureArgs,
        /// Number of files of a tree.
        #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..=4_000_000))]
        files: u64,
        /// Files per directory; each value makes a tree.
        #[arg(long, value_delimiter = ',', default_values_t = [1000, 1_000_000], value_parser = clap::value_parser!(u64).range(1..))]
        per_directory: Vec<u64>,
        /// Number of server threads of the mount.
        #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
        threads: usize,
    },
    /// Failure of a node under load, with its brick and its mount process: the time until the other
    /// node has mounted and writes the files, and a check that no required write is lost.
    Failover {
        #[command(flatten)]
        measure: MeasureArgs,
        /// Number of writers.
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
        writers: u32,
        /// Number of server threads of each mount.
        #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
        threads: usize,
    },
    /// pgbench on PostgreSQL, with its files on mounts with one and two copies, compared with
    /// PostgreSQL's own synchronous replication. Needs root.
    Database {
        #[command(flatten)]
        measure: MeasureArgs,
        /// Give the server direct access to its files, and compare with the kernel path and a
        /// tmpfs.
        #[arg(long)]
        direct: bool,
        /// Number of concurrent connections.
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=240))]
        clients: u32,
        /// Scale factor of pgbench: units of 100 000 accounts.
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=20))]
        scale: u32,
        /// Number of server threads of each mount.
        #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
        threads: usize,
    },
    /// Durable inserts by SQLite with direct access, on one copy and two, compared with the kernel
    /// path and a tmpfs.
    Sqlite {
        #[command(flatten)]
        measure: MeasureArgs,
        /// Number of inserts in one round on one mount.
        #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
        inserts: u32,
        /// Bytes of a row.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=65536))]
        row_bytes: u32,
    },
    /// Mount a null file system, the baseline of other benchmarks.
    #[command(hide = true)]
    Null(NullMountArgs),
    /// CPU time of three idle bricks, a manager and an export.
    Idle(MeasureArgs),
}
