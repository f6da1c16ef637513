//! The commands: one module for each, with a folder where it has parts. The arguments of a command
//! stand in its module; their doc comments are the help texts.

pub mod backup;
pub mod bench;
pub mod bookmark;
pub mod brick;
pub mod clone;
pub mod doctor;
pub mod down;
pub mod events;
pub mod exec;
pub mod export;
pub mod fs;
pub mod manager;
pub mod mount;
pub mod nfs;
pub mod pool;
pub mod replica;
pub mod schedule;
pub mod serve;
pub mod snapshot;
pub mod status;
pub mod support_bundle;
pub mod tier;
pub mod token;
pub mod top;
pub mod umount;
pub mod up;
pub mod volume;
pub mod why;

mod help;

use crate::args::ManagerArgs;
use clap::{Parser, Subcommand};

/// Software-defined memory: pools, bricks, and mirrored volumes of persistent memory.
///
/// Exit codes: 0 success; 1 failure, with the cause on standard error; 2 invalid command line; 3 a
/// check found differences, damage or errors; 4 another client has taken over the volume or the file
/// system; 5 a check
/// found warnings only; 126 `exec` cannot run the program; 127 `exec` cannot find it.
#[derive(Parser)]
#[command(name = "pagemesh", version, about, max_term_width = 100)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand)]
pub enum Command {
    /// Run a whole cluster on this machine, to try pagemesh.
    Up(up::UpArgs),
    Down(down::DownArgs),
    /// Create, show and check pools, and change their devices.
    #[command(subcommand)]
    Pool(pool::PoolCommand),
    /// Run the brick of a pool; list bricks and scrub their pools.
    Brick(brick::BrickArgs),
    /// Run the manager.
    Manager(manager::ManagerDaemonArgs),
    /// Create, show, grow, check and delete volumes.
    #[command(subcommand)]
    Volume(volume::VolumeCommand),
    /// Add, remove and promote copies of a volume.
    #[command(subcommand)]
    Replica(replica::ReplicaCommand),
    /// Make, list, hold, delete, send and receive snapshots of volumes.
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
    /// Make, list and promote clones: writable volumes that begin as a snapshot, and share its pages.
    #[command(subcommand)]
    Clone(clone::CloneCommand),
    /// Make, list and delete bookmarks: starts of `snapshot send --from` that keep no data.
    #[command(subcommand)]
    Bookmark(bookmark::BookmarkCommand),
    /// Store snapshots in a directory of compressed chunks, verify, prune and restore them.
    #[command(subcommand)]
    Backup(backup::BackupCommand),
    /// Make, show, change and delete schedules of snapshots, and send their snapshots to other clusters.
    #[command(subcommand)]
    Schedule(schedule::ScheduleCommand),
    /// Choose the volumes that stay in memory, in pools with disks behind memory, and show how they are used.
    #[command(subcommand)]
    Tier(tier::TierCommand),
    /// Export volumes to applications.
    #[command(subcommand)]
    Export(export::ExportCommand),
    /// List and show file systems that are served over NFS.
    #[command(subcommand)]
    Nfs(nfs::NfsCommand),
    /// Serve file systems to other machines.
    #[command(subcommand)]
    Serve(serve::ServeCommand),
    /// Create, show, grow and delete file systems.
    #[command(subcommand)]
    Fs(fs::FileSystemCommand),
    /// Mount a file system, or show the direct clients of a mount.
    Mount(mount::MountArgs),
    /// Run a program with direct access to the files of mounts.
    Exec(exec::ExecArgs),
    Umount(umount::UmountArgs),
    /// Show the manager, the bricks and the volumes.
    Status {
        #[command(flatten)]
        client: ManagerArgs,
    },
    Top(top::TopArgs),
    Why(why::WhyArgs),
    /// Show, follow and acknowledge the events of the cluster.
    Events(events::EventsArgs),
    Doctor(doctor::DoctorArgs),
    SupportBundle(support_bundle::SupportBundleArgs),
    /// Create, list and revoke tokens of the manager's API.
    #[command(subcommand)]
    Token(token::TokenCommand),
    /// Run benchmarks.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Print the manual page.
    #[command(hide = true)]
    Man,
    /// Print shell completions.
    Completions {
        /// Shell.
        shell: clap_complete::Shell,
    },
}

/// The outcome of a command without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Success.
    Done,
    /// A check found differences, damage or an unusable part.
    Damaged,
    /// A check found only limits.
    Warned,
}

/// Runs a command.
pub fn run(command: &Command) -> anyhow::Result<Verdict> {
    match command {
        Command::Up(args) => up::run(args)?,
        Command::Down(args) => down::run(args)?,
        Command::Pool(command) => return pool::run(command),
        Command::Brick(args) => brick::run(args)?,
        Command::Manager(args) => manager::run(args)?,
        Command::Volume(command) => return volume::run(command),
        Command::Replica(command) => replica::run(command)?,
        Command::Snapshot(command) => return snapshot::run(command),
        Command::Clone(command) => clone::run(command)?,
        Command::Bookmark(command) => bookmark::run(command)?,
        Command::Backup(command) => return backup::run(command),
        Command::Schedule(command) => schedule::run(command)?,
        Command::Tier(command) => tier::run(command)?,
        Command::Export(command) => export::run(command)?,
        Command::Nfs(command) => nfs::run(command)?,
        Command::Serve(command) => serve::run(command)?,
        Command::Fs(command) => fs::run(command)?,
        Command::Mount(args) => mount::run(args)?,
        Command::Umount(args) => umount::run(args)?,
        Command::Exec(args) => exec::run(args)?,
        Command::Status { client } => status::run(client)?,
        Command::Top(args) => top::run(args)?,
        Command::Why(args) => why::run(args)?,
        Command::Events(args) => events::run(args)?,
        Command::Doctor(args) => return doctor::run(args),
        Command::SupportBundle(args) => support_bundle::run(args)?,
        Command::Token(command) => token::run(command)?,
        Command::Bench(command) => bench::run(command)?,
        Command::Man => help::print_man()?,
        Command::Completions { shell } => help::print_completions(*shell)?,
    }
    Ok(Verdict::Done)
}
