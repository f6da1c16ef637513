//! `pagemesh brick`.

pub mod device_reports;
pub mod list;
pub mod registrar;
pub mod serve;
pub mod tier_reports;

use crate::args::{Interval, ManagerArgs};
use crate::config::ConfigArgs;
use crate::memory_budget::MemoryBudget;
use crate::metrics_pages::MetricsArgs;
use clap::{Args, Subcommand, ValueEnum};
use pagemesh_base::brick_name::{BrickName, BrickRef};
use pagemesh_base::units::Size;
use std::path::PathBuf;
use uuid::Uuid;

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
    /// Path of a further device of the pool, if it has another one than at the last start; may be repeated. The pool
    /// knows its devices (`pagemesh pool device`), and each has a header that identifies it.
    #[arg(long = "device", value_name = "PATH")]
    pub devices: Vec<PathBuf>,
    /// Further device of the pool that is lost for ever, by its UUID; may be repeated. The pool is opened without it, now
    /// and later. Data loss: its pages are damaged, until scrubs of their volumes repair them from other copies.
    #[arg(long = "failed-device", value_name = "UUID")]
    pub failed_devices: Vec<Uuid>,
    /// Action when a further device of a pool of class `file-sync` fails. `end`: the brick ends, and its next start recovers
    /// the pool with the device. `retire`: the brick opens the pool again and goes on, with the device after its first error
    /// in 24 hours, and without it after the second one or a request of more than 60 s. Data loss: a retired device is never
    /// used again, and its pages are damaged, until scrubs of their volumes repair them from other copies.
    #[arg(long, default_value = "end", value_name = "ACTION")]
    pub on_device_failure: OnDeviceFailure,
    /// Address of the TCP transport; port 0 takes a free port.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: String,
    /// Unix socket for clients on this machine: they map the pool. A pool on disks cannot be mapped; there they send
    /// requests through the socket, in less time than over TCP.
    #[arg(long)]
    pub map: Option<PathBuf>,
    /// Address for clients, if it differs from --listen.
    #[arg(long)]
    pub advertise: Option<String>,
    /// Name of this brick, unique in the cluster. By default a brick keeps its name, and a new one
    /// gets the host name, with `-2`, `-3` and so on if another brick has it.
    #[arg(long)]
    pub name: Option<BrickName>,
    /// Name of a brick that has none yet, in place of the host name.
    #[arg(long, hide = true, conflicts_with = "name")]
    pub default_name: Option<BrickName>,
    /// Failure domain of this brick; by default the host name.
    #[arg(long)]
    pub domain: Option<String>,
    /// Keep a sparse pool sparse; for benchmarks only.
    #[arg(long, hide = true)]
    pub sparse: bool,
    /// Memory for the data pages of a pool of class `file-sync`, at least 16M; by default an eighth of the
    /// machine's memory, at least 16M and at most 4G. Tables take memory besides: up to 0.41 % of the pool's
    /// size. So do journals, up to 2 MiB for each session, and the buffers of connections, up to 16 MiB for each. A pool of another class ignores it.
    #[arg(long, value_name = "SIZE")]
    pub memory_budget: Option<MemoryBudget>,
    /// Interval of pool scrubs, as `12h` or `7d`, or `never`. A scrub compares the metadata of the
    /// pool with the brick's state in memory, and corrects it. SIGUSR2 and `pagemesh brick scrub`
    /// start or stop a scrub; SIGUSR1 and `pagemesh brick list` show the findings.
    #[arg(long, default_value = "1d", value_name = "TIME")]
    pub scrub_every: Interval,
    /// Bytes that the drain of a device moves per second while clients send requests; eight times as many otherwise.
    #[arg(long, default_value = "32M", value_name = "SIZE")]
    pub drain_rate: Size,
    #[command(flatten)]
    pub metrics: MetricsArgs,
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Exit when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// The effect of a further device that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnDeviceFailure {
    /// The pool goes on, without it after a second error.
    Retire,
    /// The brick ends.
    End,
}

/// List bricks and scrub their pools.
#[derive(Subcommand)]
pub enum BrickCommand {
    /// List bricks with their usage and the scrubs of their pools.
    List,
    /// Start a scrub of the pools of running bricks. A brick receives the request with its next
    /// heartbeat; `pagemesh brick list` shows the progress.
    Scrub {
        /// Name or UUID of the brick. Give either this or `--all`.
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        brick: Option<BrickRef>,
        /// All living bricks.
        #[arg(long)]
        all: bool,
        /// Stop the running scrub instead of starting one.
        #[arg(long)]
        stop: bool,
    },
}

/// Runs a brick, or a command about bricks.
pub fn run(args: &BrickArgs) -> anyhow::Result<()> {
    match &args.command {
        None => serve::run(args),
        Some(command) => list::run(command, &args.client),
    }
}
