//! The command line.

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

/// The words of durability classes.
const CLASSES: [&str; 4] = ["pmem", "eadr", "file-sync", "process"];

/// Software-defined memory: pools, bricks, and mirrored volumes of persistent
/// memory.
///
/// Exit codes: 0 done; 1 it failed, and standard error says why; 2 the command
/// line is wrong; 3 a check found differences or damage; 4 another client took over the
/// volume or the file system; 126 and 127 `exec` cannot run the program, or does not find it.
#[derive(Parser)]
#[command(name = "pagemesh", version, about, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// How to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Table,
    /// For programs.
    Json,
}

/// A time between one thing and the next, or never.
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

/// A path that may be empty, as an environment variable may be.
fn any_path() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// The manager's address, and the key that proves membership in the cluster.
#[derive(Args, Clone)]
pub struct Client {
    /// The manager's address.
    #[arg(
        long,
        env = "PAGEMESH_MANAGER",
        default_value = "http://127.0.0.1:7070",
        global = true
    )]
    pub manager: String,
    /// The file that holds the cluster key; by default the one that `up` wrote.
    #[arg(long, env = "PAGEMESH_KEY", global = true, value_parser = any_path())]
    pub key: Option<PathBuf>,
    /// How to print.
    #[arg(long, value_enum, default_value = "table", global = true)]
    pub output: Output,
}

/// Which transport reaches bricks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// `map` where the brick is on this machine and its pool allows it.
    Auto,
    /// Memory mapped into this process.
    Map,
    /// Messages over tcp.
    Tcp,
}

/// How a mount's requests come from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fuse {
    /// Through io_uring where the kernel has that on, otherwise classic.
    Auto,
    /// By reading and writing /dev/fuse.
    Classic,
    /// Through io_uring, or not at all.
    IoUring,
}

impl Fuse {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Fuse::Auto => "auto",
            Fuse::Classic => "classic",
            Fuse::IoUring => "io-uring",
        }
    }
}

/// What to do.
#[derive(Subcommand)]
pub enum Command {
    /// Run a whole cluster on this machine, for trying.
    Up(Up),
    Down(Down),
    /// Make, look at and verify pools.
    #[command(subcommand)]
    Pool(Pool),
    /// Run the brick of a pool; list bricks, have their pools scrubbed.
    Brick(Brick),
    /// Run the manager.
    Manager(Manager),
    /// Make, look at, grow and delete volumes.
    #[command(subcommand)]
    Volume(Volume),
    /// Add copies to volumes, remove them, and go on with one of them.
    #[command(subcommand)]
    Replica(Replica),
    /// Serve volumes to applications.
    #[command(subcommand)]
    Export(Export),
    /// Make, look at and delete file systems.
    #[command(subcommand)]
    Fs(FileSystem),
    /// Mount a file system on a directory, or show which programs use a mount directly.
    Mount(Mount),
    /// Run a program whose threads reach files of mounts themselves.
    Exec(Exec),
    /// Unmount a file system, and wait until its process has ended.
    Umount {
        /// Where it is mounted.
        dir: PathBuf,
        /// Take it from its place at once, also while files are open; the mount
        /// ends with the last of them. Nobody waits for that.
        #[arg(long)]
        lazy: bool,
        /// Take it from all processes that use it, in all mount namespaces: their calls fail from
        /// then on.
        #[arg(long, conflicts_with = "lazy")]
        force: bool,
    },
    /// Show the cluster: manager, bricks, volumes.
    Status {
        #[command(flatten)]
        client: Client,
    },
    /// Measure.
    #[command(subcommand)]
    Bench(Bench),
    /// Print the manual page.
    #[command(hide = true)]
    Man,
    /// Print completions for a shell.
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
}

/// Run a whole cluster on this machine, for trying.
#[derive(Args)]
pub struct Up {
    /// Where the cluster lives; a later `up` on it finds its data again.
    #[arg(long, default_value = "pagemesh-data")]
    pub dir: PathBuf,
    /// How many bricks.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub bricks: u32,
    /// Size of each new pool.
    #[arg(long, default_value = "1G")]
    pub size: Size,
    /// The manager's address.
    #[arg(long, default_value = "127.0.0.1:7070")]
    pub listen: String,
    /// Keep the pools in memory (class `process`): fast, lost when the machine
    /// restarts. They are made in /dev/shm, or in a tmpfs that is named.
    #[arg(long, value_name = "TMPFS", num_args = 0..=1, require_equals = true, default_missing_value = "/dev/shm")]
    pub memory: Option<PathBuf>,
    /// Remove the cluster and its data at the end. Without it the data stays, in memory too.
    #[arg(long)]
    pub ephemeral: bool,
    /// End when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
}

/// End the cluster that `up` runs in a directory.
#[derive(Args)]
pub struct Down {
    /// The directory of the cluster.
    #[arg(long, default_value = "pagemesh-data")]
    pub dir: PathBuf,
    /// Remove the cluster's data, too: pools, keys, logs and the manager's database.
    #[arg(long)]
    pub remove: bool,
}

/// Make, look at and verify pools.
#[derive(Subcommand)]
pub enum Pool {
    /// Make a pool. On a plain file it is of class `file-sync`, on tmpfs
    /// `process`, on DAX `pmem`, unless `--class` says otherwise.
    Create {
        /// A file that does not exist, or a device.
        path: PathBuf,
        /// Its size.
        #[arg(long)]
        size: Size,
        /// Its durability class; by default that of its medium. `eadr` is for
        /// memory whose caches survive power loss. `process` on a plain file
        /// is lost when the machine restarts.
        #[arg(long, value_parser = CLASSES)]
        class: Option<String>,
        /// Take the class on your word, where nothing shows that the medium
        /// keeps what it promises. If it does not, power loss loses or damages
        /// acknowledged writes.
        #[arg(long, requires = "class")]
        trust_medium: bool,
        /// How to print.
        #[arg(long, value_enum, default_value = "table")]
        output: Output,
    },
    /// Verify a pool that no brick runs on. Nothing is written to it, also if
    /// its brick died: its journal is replayed in memory only.
    ///
    /// It compares both superblocks, journal, object table, page tables, the
    /// bitmap and counts of frames, and the in-flight table, and reads every
    /// page to compare its checksum. Each finding names slice, page, frame and
    /// byte where it has them. Exit code 3: something is damaged and was not
    /// repaired.
    Check {
        /// The pool.
        path: PathBuf,
        /// Write what the pool can mend by itself: superblocks, bitmap, lost
        /// frames, counts, single flipped bits of journal and tables. Damaged
        /// pages are left to another copy of their volume.
        #[arg(long)]
        repair: bool,
        /// Check structures only: pages are not read.
        #[arg(long)]
        skip_data: bool,
        /// How to print.
        #[arg(long, value_enum, default_value = "table")]
        output: Output,
    },
    /// Show what a pool says of itself.
    Show {
        /// The pool.
        path: PathBuf,
        /// How to print.
        #[arg(long, value_enum, default_value = "table")]
        output: Output,
    },
}

/// Run the brick of a pool; list bricks, have their pools scrubbed.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Brick {
    /// What to do instead of running one.
    #[command(subcommand)]
    pub command: Option<BrickCommand>,
    /// The pool.
    #[arg(long, required = true)]
    pub pool: Option<PathBuf>,
    /// Address of the tcp transport; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: String,
    /// Unix socket of the map transport.
    #[arg(long)]
    pub map: Option<PathBuf>,
    /// The address that clients are told, where it differs from --listen.
    #[arg(long)]
    pub advertise: Option<String>,
    /// What fails together with this brick; by default the host's name.
    #[arg(long)]
    pub domain: Option<String>,
    /// Leave the holes of a sparse pool: for measurements only.
    #[arg(long, hide = true)]
    pub sparse: bool,
    /// How often what the pool keeps beside pages is compared with what the
    /// brick knows, and mended: as `12h` or `7d`, or `never`. SIGUSR2 and
    /// `pagemesh brick scrub` do it at once, SIGUSR1 and `pagemesh brick list` tell
    /// what was found.
    #[arg(long, default_value = "1d", value_name = "TIME")]
    pub scrub_every: Interval,
    /// End when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
    #[command(flatten)]
    pub client: Client,
}

/// Look at running bricks.
#[derive(Subcommand)]
pub enum BrickCommand {
    /// List bricks, how full they are, and the scrubs of their pools.
    List,
    /// Have running bricks scrub their pools now. A brick hears of it with its
    /// next heartbeat; `pagemesh brick list` shows how far it has come.
    Scrub {
        /// Which brick: its UUID.
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        brick: Option<Uuid>,
        /// All that are alive.
        #[arg(long)]
        all: bool,
        /// End the scrub that is under way.
        #[arg(long)]
        stop: bool,
    },
}

/// Run the manager.
#[derive(Args)]
pub struct Manager {
    /// Its database.
    #[arg(long, default_value = "manager.redb")]
    pub store: PathBuf,
    /// Its address.
    #[arg(long, default_value = "127.0.0.1:7070")]
    pub listen: String,
    /// The file that holds the cluster key; by default one in the user's
    /// configuration directory, which is made if it is not there.
    #[arg(long, env = "PAGEMESH_KEY", value_parser = any_path())]
    pub key: Option<PathBuf>,
    /// End when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
}

/// The shape of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Layout {
    /// One slice.
    Concat,
    /// Spread over columns.
    Stripe,
    /// Copies.
    Mirror,
    /// Copies, spread over columns.
    #[value(name = "stripe+mirror", alias = "stripe-mirror")]
    StripeMirror,
}

/// When a copy has what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReplicaMode {
    /// Before it is acknowledged.
    Sync,
    /// Soon after, in the same order; what is to be durable (O_SYNC, O_DSYNC, fsync,
    /// FUA, flush) before it is acknowledged.
    Async,
}

/// Add copies to volumes, remove them, and go on with one of them.
#[derive(Subcommand)]
pub enum Replica {
    /// Add a copy to a volume, also while it is in use: it is filled meanwhile, and
    /// then has every write before it is acknowledged.
    Attach {
        /// Which volume.
        volume: VolumeName,
        /// The UUID of the brick that it goes to; by default wherever there is room
        /// in a failure domain that has no copy yet.
        #[arg(long)]
        brick: Option<uuid::Uuid>,
        /// When it has what is written.
        #[arg(long, value_enum, default_value_t = ReplicaMode::Sync)]
        mode: ReplicaMode,
        /// Let the manager promote an asynchronous copy: whoever attaches the volume and
        /// can reach no in-sync copy, while every brick with one is dead, goes on with
        /// it. What was acknowledged last and was not to be durable may be missing then.
        #[arg(long)]
        auto_promote: bool,
        #[command(flatten)]
        client: Client,
    },
    /// Remove a copy of a volume.
    Detach {
        /// Which volume.
        volume: VolumeName,
        /// Which copy, counted from 0.
        #[arg(long)]
        copy: usize,
        /// Although a client has the volume, which is then fenced.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        client: Client,
    },
    /// Go on with one copy alone. Not needed while an in-sync copy can be reached:
    /// then the next client goes on by itself. The others become copies of this one.
    Promote {
        /// Which volume.
        volume: VolumeName,
        /// Which copy, counted from 0.
        #[arg(long)]
        copy: usize,
        /// Although a client has the volume, which is then fenced; and although the
        /// copy is not in-sync: what it lacks is given up.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        client: Client,
    },
    /// Show the copies of a volume.
    Status {
        /// Which volume.
        volume: VolumeName,
        #[command(flatten)]
        client: Client,
    },
}

/// Make, look at, grow and delete volumes.
#[derive(Subcommand)]
pub enum Volume {
    /// Make a volume.
    Create {
        /// Its name.
        name: VolumeName,
        /// Its size; space is taken when it is written.
        #[arg(long)]
        size: Size,
        /// Its shape.
        #[arg(long, value_enum, default_value = "mirror")]
        layout: Layout,
        /// Copies of a mirror, 2 or 3.
        #[arg(long)]
        copies: Option<usize>,
        /// Columns of a stripe.
        #[arg(long)]
        columns: Option<usize>,
        /// Durability class of its bricks; by default the strongest with room.
        #[arg(long, value_parser = CLASSES)]
        class: Option<String>,
        #[command(flatten)]
        client: Client,
    },
    /// List volumes.
    List {
        #[command(flatten)]
        client: Client,
    },
    /// Show where a volume lies and how its legs are.
    Show {
        /// Which.
        name: VolumeName,
        #[command(flatten)]
        client: Client,
    },
    /// Make a volume larger, also while it is in use.
    Grow {
        /// Which.
        name: VolumeName,
        /// Its new size.
        #[arg(long)]
        size: Size,
        #[command(flatten)]
        client: Client,
    },
    /// Delete a volume and everything on it.
    Delete {
        /// Which.
        name: VolumeName,
        /// Although a client has attached it.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        client: Client,
    },
    /// Forget which client attached a volume, as when its machine is gone. If it runs
    /// after all, it is fenced when it asks the manager next, within ten seconds.
    Detach {
        /// Which.
        name: VolumeName,
        #[command(flatten)]
        client: Client,
    },
    /// Compare the copies of a volume. It must not be attached.
    Check {
        /// Which.
        name: VolumeName,
        /// Take it over from the client that attached it, which is then fenced.
        #[arg(long)]
        force: bool,
        /// Make pages that differ equal to this copy, counted from 0.
        #[arg(long)]
        repair_from: Option<usize>,
        /// Which transport reaches bricks.
        #[arg(long, value_enum, default_value = "auto")]
        transport: Transport,
        #[command(flatten)]
        client: Client,
    },
}

/// Serve volumes to applications.
#[derive(Subcommand)]
pub enum Export {
    /// Serve volumes over the network block device protocol.
    ///
    /// SIGINT and SIGTERM end it. SIGUSR1 makes it write how its volumes are
    /// to standard output, as one line of JSON each: whether writes wait (the
    /// state `awaiting-manager` or `unavailable`), the state of every leg and
    /// what its brick's trouble is, how far its return has come, what scrubs have
    /// found, and sums such as the bytes copied. SIGUSR2 begins a scrub of all
    /// volumes at once, and stops the one that is under way.
    Nbd {
        /// The volumes; each is an export of its name.
        #[arg(required = true)]
        volumes: Vec<VolumeName>,
        /// A unix socket.
        #[arg(long, required_unless_present = "listen", conflicts_with = "listen")]
        socket: Option<PathBuf>,
        /// An address.
        #[arg(long)]
        listen: Option<String>,
        /// Refuse changes.
        #[arg(long)]
        read_only: bool,
        /// Let idle processors sleep while clients are busy. Otherwise they
        /// poll, where this process may open /dev/cpu_dma_latency: faster, but
        /// it costs power.
        #[arg(long)]
        no_keep_awake: bool,
        #[command(flatten)]
        scrubs: Scrubs,
        /// End when standard input ends.
        #[arg(long, hide = true)]
        until_stdin_ends: bool,
        /// Which transport reaches bricks.
        #[arg(long, value_enum, default_value = "auto")]
        transport: Transport,
        #[command(flatten)]
        client: Client,
    },
}

/// Make, look at, grow and delete file systems.
#[derive(Subcommand)]
pub enum FileSystem {
    /// Make a file system.
    Create {
        /// Its name.
        name: VolumeName,
        /// What its files may take together; space is taken when it is written.
        #[arg(long)]
        size: Size,
        /// Copies, each on a brick of its own.
        #[arg(long, default_value_t = 2, value_parser = RangedU64ValueParser::<usize>::new().range(1..=3))]
        copies: usize,
        /// Durability class of its bricks; by default the strongest with room.
        #[arg(long, value_parser = CLASSES)]
        class: Option<String>,
        /// Which transport reaches bricks.
        #[arg(long, value_enum, default_value = "auto")]
        transport: Transport,
        #[command(flatten)]
        client: Client,
    },
    /// List file systems.
    List {
        #[command(flatten)]
        client: Client,
    },
    /// Show where a file system lies and how its copies are.
    Show {
        /// Which.
        name: VolumeName,
        #[command(flatten)]
        client: Client,
    },
    /// Let the files of a file system take more, also while it is mounted.
    Grow {
        /// Which.
        name: VolumeName,
        /// What its files may take together from then on: at most four times what it
        /// was made with, or 256 MiB where that is more.
        #[arg(long)]
        size: Size,
        #[command(flatten)]
        client: Client,
    },
    /// Delete a file system and everything in it.
    Delete {
        /// Which.
        name: VolumeName,
        /// Although it is mounted.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        client: Client,
    },
}

/// When attached volumes are scrubbed.
#[derive(Args)]
pub struct Scrubs {
    /// How often all copies are read in the background, and repaired where they are
    /// damaged: as `12h` or `7d`, or `never`.
    #[arg(long, default_value = "7d", value_name = "TIME")]
    scrub_every: Interval,
    /// Bytes of a volume scrubbed per second, each on all copies; a quarter of it while
    /// there are writes.
    #[arg(long, default_value = "64M", value_name = "SIZE")]
    scrub_rate: Size,
}

impl Scrubs {
    /// What the volume is to be told.
    pub fn plan(&self) -> ScrubPlan {
        ScrubPlan {
            every: self.scrub_every.0,
            bytes_per_s: self.scrub_rate.0,
        }
    }
}

/// Run a program whose threads read files of mounts, overwrite them and append to them
/// themselves.
///
/// Everything else, and programs that are linked statically, go through the kernel as
/// ever, and see the same. It takes effect for files on pools that are mapped and need no
/// flush, on mounts of the same user or root.
#[derive(Args)]
pub struct Exec {
    /// The library that catches the program's calls; by default it is looked for beside
    /// this program.
    #[arg(long, env = "PAGEMESH_PRELOAD", value_name = "FILE")]
    pub library: Option<PathBuf>,
    /// How many calls of each process on files of mounts the kernel serves before the process
    /// reaches them itself: what that takes costs more than a hundred of them. 32 by default.
    #[arg(long, env = "PAGEMESH_PATIENCE", value_name = "CALLS")]
    pub patience: Option<u32>,
    /// Each process says at its end how many operations went directly, how many the kernel
    /// got, and why: on standard error, or at the end of a file.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    pub report: Option<PathBuf>,
    /// How the report is written: JSON is one line for each process.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
    /// Say on standard error why the program is not on the direct path, if that is known
    /// before it runs. What a running program is told by `PAGEMESH_LOG=info` and --report.
    #[arg(long)]
    pub verbose: bool,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<std::ffi::OsString>,
}

/// Mount a file system on a directory.
///
/// It prints `ready` and serves until it is unmounted (`pagemesh umount`) or gets
/// SIGINT or SIGTERM, which cuts off whoever has files open. Whoever had it mounted
/// before is fenced. SIGUSR1 makes it write how its volume is to standard output, as one
/// line of JSON, and SIGUSR2 begins or stops a scrub, as `export nbd` does.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Mount {
    /// What to do instead of mounting.
    #[command(subcommand)]
    pub command: Option<MountCommand>,
    /// Which.
    #[arg(required = true)]
    pub name: Option<VolumeName>,
    /// Where: a directory that is there.
    #[arg(required = true)]
    pub dir: Option<PathBuf>,
    /// Let all users in, as permissions say; otherwise only the one who mounts.
    #[arg(long)]
    pub allow_other: bool,
    /// Threads that serve.
    #[arg(long, default_value_t = 4, value_parser = threads())]
    pub threads: usize,
    /// End when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
    /// Serve in a session of its own, without a terminal.
    #[arg(long, hide = true)]
    pub detach: bool,
    /// Which transport reaches bricks.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: Transport,
    /// How requests come from the kernel.
    #[arg(long, value_enum, default_value = "auto")]
    pub fuse: Fuse,
    /// Let idle processors sleep while the mount is busy. Otherwise they poll, where this
    /// process may open /dev/cpu_dma_latency: faster, but it costs power.
    #[arg(long)]
    pub no_keep_awake: bool,
    /// Keep files out of the kernel's page cache: each call is a request, and writes of one file go
    /// on at the same time. DATA LOSS: a program that uses io_uring at the current position
    /// (offset -1) overwrites its own bytes.
    #[arg(long)]
    pub direct_io: bool,
    #[command(flatten)]
    pub scrubs: Scrubs,
    #[command(flatten)]
    pub client: Client,
}

/// Look at mounts of this machine.
#[derive(Subcommand)]
pub enum MountCommand {
    /// Show which processes are direct clients of a mount, how many operations went directly and how
    /// many the kernel got, and why. A file system named `status` is mounted by `mount -- status DIR`.
    Status {
        /// A mount's directory, or `all`.
        #[arg(default_value = "all")]
        dir: PathBuf,
    },
}

/// Mount a file system that forgets what is written to it.
#[derive(Args)]
pub struct NullMount {
    /// Where: a directory that is there.
    pub dir: PathBuf,
    /// Threads that serve.
    #[arg(long, default_value_t = 4, value_parser = threads())]
    pub threads: usize,
    /// How requests come from the kernel.
    #[arg(long, value_enum, default_value = "auto")]
    pub fuse: Fuse,
    /// Let idle processors sleep while the mount is busy. Otherwise they poll, where this
    /// process may open /dev/cpu_dma_latency: faster, but it costs power.
    #[arg(long)]
    pub no_keep_awake: bool,
    /// Keep files out of the kernel's page cache.
    #[arg(long)]
    pub direct_io: bool,
    /// End when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
}

/// Seconds of the longest measurement: what the workloads take.
pub const SECONDS_MAX: u64 = RUNTIME_MAX.as_secs();

fn threads() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=pagemesh_fuse::THREADS_MAX as u64)
}

fn rounds() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(ROUNDS_MIN as u64..=ROUNDS_MAX as u64)
}

/// Where results go, and how long to measure.
#[derive(Args, Clone)]
pub struct Measure {
    /// Rounds, 5 to 1000; figures are medians over them.
    #[arg(long, default_value_t = 5, value_parser = rounds())]
    pub rounds: usize,
    /// Seconds of each measurement, up to an hour.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    pub seconds: u64,
    /// Where raw results and plots are written.
    #[arg(long)]
    pub save: Option<PathBuf>,
    /// How to print.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
    /// Where pools are made: a tmpfs, hugetlbfs or DAX directory. A tmpfs with
    /// huge pages (mount -o huge=always) is fastest.
    #[arg(long, default_value = "/dev/shm")]
    pub pools: PathBuf,
}

/// Measure.
#[derive(Subcommand)]
pub enum Bench {
    /// 4 KiB writes and reads of a mirrored volume mapped into this process,
    /// beside two plain non-temporal copies.
    Session(Measure),
    /// 1 to 128 readers of 8 KiB.
    Ramp {
        #[command(flatten)]
        measure: Measure,
        /// Which transport reaches the bricks.
        #[arg(long, value_enum, default_value = "auto")]
        transport: Transport,
    },
    /// 70 % reads, 30 % writes, by block size.
    Table {
        #[command(flatten)]
        measure: Measure,
        /// Which transport reaches the bricks.
        #[arg(long, value_enum, default_value = "auto")]
        transport: Transport,
    },
    /// fio against this and other block servers, alternating.
    Peers(Measure),
    /// How long a pool takes to recover after its brick was killed under load.
    Recovery(Measure),
    /// Mirrored files: latency of synchronous writes against throughput, beside a
    /// mount that does nothing and, as root, GlusterFS with two copies.
    Mirror {
        #[command(flatten)]
        measure: Measure,
        /// Bytes of a write.
        #[arg(long, value_delimiter = ',', default_values_t = [512, 4096, 65536], value_parser = clap::value_parser!(u32).range(512..=1 << 20))]
        sizes: Vec<u32>,
        /// Programs that write at the same time.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 16], value_parser = clap::value_parser!(u32).range(1..=64))]
        jobs: Vec<u32>,
        /// What each does between two writes, in µs.
        #[arg(long, value_delimiter = ',', default_values_t = [0, 50, 200], value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
        think_us: Vec<u32>,
        /// Without `--sync=1`: a write need not be durable when it returns, and does not
        /// wait for a copy that follows.
        #[arg(long)]
        plain: bool,
        /// Threads that serve each mount.
        #[arg(long, default_value_t = 4, value_parser = threads())]
        threads: usize,
        /// How requests come from the kernel to every mount.
        #[arg(long, value_enum, default_value = "classic")]
        fuse: Fuse,
        /// Keep files out of the kernel's page cache on every mount.
        #[arg(long)]
        direct_io: bool,
    },
    /// Programs that reach the files of a mount directly, with one copy and two, beside the
    /// same on a tmpfs and through the kernel.
    Direct {
        #[command(flatten)]
        measure: Measure,
        /// Bytes of a request.
        #[arg(long, value_delimiter = ',', default_values_t = [512, 4096], value_parser = clap::value_parser!(u32).range(512..=1 << 20))]
        sizes: Vec<u32>,
        /// Bytes of what is written to the end of a new file.
        #[arg(long, value_delimiter = ',', default_values_t = [100], value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
        appends: Vec<u32>,
        /// Programs at the same time.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 16], value_parser = clap::value_parser!(u32).range(1..=64))]
        jobs: Vec<u32>,
        /// What each does between two requests, in µs.
        #[arg(long, value_delimiter = ',', default_values_t = [0], value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
        think_us: Vec<u32>,
        /// Instead: one program that writes 4096 bytes, at a quarter of the rate that it could,
        /// with a copy that follows over TCP, and with one copy.
        #[arg(long, conflicts_with_all = ["sizes", "jobs", "think_us"])]
        followed: bool,
    },
    /// Calls of libpagemesh on a file with two copies, beside those of the kernel.
    Native(Measure),
    /// Small files made and removed on mounts with one and two copies, beside
    /// GlusterFS with two and ext4 with synchronous writes. Needs root.
    Metadata {
        #[command(flatten)]
        measure: Measure,
        /// Programs that make files at the same time.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 2], value_parser = clap::value_parser!(u32).range(1..=64))]
        jobs: Vec<u32>,
        /// Bytes of a file.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=65536))]
        bytes: u32,
        /// Threads that serve each mount.
        #[arg(long, default_value_t = 4, value_parser = threads())]
        threads: usize,
    },
    /// Small files made, read and removed by one program on a mount with two copies, and
    /// `rm -rf`, beside a tmpfs and, as root, ext4.
    SmallFiles {
        #[command(flatten)]
        measure: Measure,
        /// Files.
        #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..=100_000))]
        files: u64,
        /// Entries that `rm -rf` removes; 0: none.
        #[arg(long, default_value_t = 70_000, value_parser = clap::value_parser!(u64).range(0..=100_000))]
        entries: u64,
        /// Threads that serve the mount.
        #[arg(long, default_value_t = 4, value_parser = threads())]
        threads: usize,
        /// How requests come from the kernel.
        #[arg(long, value_enum, default_value = "auto")]
        fuse: Fuse,
    },
    /// A file system with many files: how long it takes to mount, what that takes of
    /// memory, and whether find(1) sees all of them.
    Many {
        #[command(flatten)]
        measure: Measure,
        /// Files of a tree.
        #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..=4_000_000))]
        files: u64,
        /// Files of a directory; a tree for each.
        #[arg(long, value_delimiter = ',', default_values_t = [1000, 1_000_000], value_parser = clap::value_parser!(u64).range(1..))]
        per_directory: Vec<u64>,
        /// Threads that serve the mount.
        #[arg(long, default_value_t = 4, value_parser = threads())]
        threads: usize,
    },
    /// A node that dies under load, brick and mounting process at once: how long it
    /// takes until the other one has the files mounted and writes them, and whether all
    /// is there that must be.
    Failover {
        #[command(flatten)]
        measure: Measure,
        /// Programs that write.
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
        writers: u32,
        /// Threads that serve each mount.
        #[arg(long, default_value_t = 4, value_parser = threads())]
        threads: usize,
    },
    /// A database: pgbench on PostgreSQL, whose files are on mounts with one and two
    /// copies, beside its own synchronous replication. Needs root.
    Database {
        #[command(flatten)]
        measure: Measure,
        /// The server reaches its files directly, beside the same through the kernel and on
        /// a tmpfs.
        #[arg(long)]
        direct: bool,
        /// Connections at the same time.
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=240))]
        clients: u32,
        /// Units of 100 000 accounts.
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=20))]
        scale: u32,
        /// Threads that serve each mount.
        #[arg(long, default_value_t = 4, value_parser = threads())]
        threads: usize,
    },
    /// Inserts by SQLite, each durable, on the direct path with one copy and two, beside the
    /// same through the kernel and on a tmpfs.
    Sqlite {
        #[command(flatten)]
        measure: Measure,
        /// Inserts of one round at one place.
        #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
        inserts: u32,
        /// Bytes of a row.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=65536))]
        row_bytes: u32,
    },
    /// Mount what does nothing: what others are measured against.
    #[command(hide = true)]
    Null(NullMount),
    /// What three bricks, a manager and an export take of a processor while
    /// nobody uses them.
    Idle(Measure),
}
