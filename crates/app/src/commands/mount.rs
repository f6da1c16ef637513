//! `pagemesh mount`, and the helper of mount(8) and umount(8).

pub mod end;
pub mod helper;
pub mod mount_table;
pub mod options;
pub mod serve;
pub mod served;
pub mod waiters;

mod dead;
pub mod free_space;
pub mod life_signs;
mod snapshot;
pub mod snapshot_views;
pub mod status;
pub mod takeover;

use crate::args::{FuseTransport, ManagerArgs, ScrubArgs, Transport, thread_count_parser};
use crate::config::ConfigArgs;
use crate::metrics_pages::MetricsArgs;
use crate::snapshot_path::VolumeOrSnapshot;
use clap::{Args, Subcommand};
use options::MountOption;
use std::path::PathBuf;

/// Mount a file system on a directory.
///
/// The command prints `ready`, and serves until an unmount (`pagemesh umount`), SIGINT or SIGTERM.
/// The signals cut off processes with open files. A file system that another process has mounted is
/// refused. The mount waits for a process that has unmounted it and still stores data, and takes over from one that
/// has died. On SIGUSR1 it writes the status of its volume to standard output, as one
/// line of JSON; SIGUSR2 starts or stops a scrub, as for `export nbd`.
///
/// `FS@NAME` mounts a snapshot, read-only. It attaches nothing: the file system may be mounted meanwhile, and any number
/// of processes may mount the snapshot.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct MountArgs {
    /// Command to run instead of a mount.
    #[command(subcommand)]
    pub command: Option<MountCommand>,
    /// File system, or a snapshot of one as FS@NAME.
    #[arg(required = true)]
    pub name: Option<VolumeOrSnapshot>,
    /// Mount point: an existing directory.
    #[arg(required = true)]
    pub dir: Option<PathBuf>,
    /// Options of mount(8), divided by commas: ro, rw, dev, nodev, suid, nosuid, exec, noexec, sync, async, dirsync, noatime, atime,
    /// relatime, nodiratime, diratime. Without it the mount is rw, nodev, nosuid, exec, async, relatime. Options for mount(8) and
    /// systemd (defaults, nofail, _netdev, x-…) have no effect; others are refused.
    ///
    /// Only root can use dev and suid.
    #[arg(
        short = 'o', long = "options", value_name = "LIST", value_delimiter = ',', value_parser = options::parse_option
    )]
    pub options: Vec<MountOption>,
    /// Give all users access, by permissions; otherwise only the mounting user has access.
    #[arg(long)]
    pub allow_other: bool,
    /// Number of server threads.
    #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
    pub threads: usize,
    /// Take the file system over from the process that has mounted it, and fence that process.
    ///
    /// Data loss: stores into mapped files that were not synced are lost. Programs on that mount get errors.
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub config: ConfigArgs,
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
    /// Show `.snapshot` in the listings of directories. Without it the directory is there, and listings leave it out.
    ///
    /// Programs that walk a tree then walk each snapshot of each directory, too.
    #[arg(long)]
    pub show_snapshots: bool,
    /// Store changes of names, attributes and sizes on the disk after so many seconds, as `commit` of ext4. Without it
    /// each such call returns when its change is on the disk. fsync, fdatasync and O_SYNC store all changes at once.
    ///
    /// Data loss: changes since the last fsync, at most so many seconds old, are lost if the machine loses power, and also
    /// if this process is killed. The changes before them stay, in their order. Without copies on disks, and below 64 MiB, it has no effect.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=300))]
    pub commit_interval: Option<u64>,
    #[command(flatten)]
    pub scrubs: ScrubArgs,
    #[command(flatten)]
    pub metrics: MetricsArgs,
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

/// Serves a mount, or runs a command about mounts.
pub fn run(args: &MountArgs) -> anyhow::Result<()> {
    match &args.command {
        None => serve::run(args),
        Some(command) => status::run(command, args.client.output),
    }
}
