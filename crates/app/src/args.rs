//! Arguments that several commands share. Their doc comments are the help texts.

use anyhow::{Context, anyhow};
use clap::builder::{OsStringValueParser, RangedU64ValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use pagemesh_base::units::Size;
use pagemesh_volume::ScrubPlan;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// The manager of commands that name none, unless a `client.toml` does.
pub const DEFAULT_MANAGER: &str = "http://127.0.0.1:7070";

/// The names of durability classes.
pub const CLASSES: [&str; 4] = ["pmem", "eadr", "file-sync", "process"];

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
pub fn path_parser() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// The manager's address, and the key that proves membership in the cluster.
#[derive(Args, Clone)]
pub struct ManagerArgs {
    /// Address of the manager; by default the one in `~/.config/pagemesh/client.toml`, and then in
    /// `/etc/pagemesh/client.toml`.
    #[arg(
        long,
        env = "PAGEMESH_MANAGER",
        default_value = DEFAULT_MANAGER,
        global = true
    )]
    pub manager: String,
    /// File with the cluster key; by default the one in the user's `client.toml`, the key file that `up` stored for
    /// this address, or the one in `/etc/pagemesh/client.toml`.
    #[arg(long, env = "PAGEMESH_KEY", global = true, value_parser = path_parser())]
    pub key: Option<PathBuf>,
    /// File with a token, which replaces the key in calls to the manager; by default the token in the
    /// variable `PAGEMESH_TOKEN`, if it is set, or without `--key` the file in a `client.toml`. Commands that
    /// reach bricks (exports, mounts, checks) need the key.
    #[arg(long, env = "PAGEMESH_TOKEN_FILE", global = true, value_name = "FILE", value_parser = path_parser())]
    pub token_file: Option<PathBuf>,
    /// Output format.
    #[arg(long, value_enum, default_value = "table", global = true)]
    pub output: Output,
}

/// The transport between a client and a brick.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// On the brick's machine `map`, or requests through its unix socket if the pool is of class `file-sync`; otherwise `tcp`.
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

pub fn thread_count_parser() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=pagemesh_fuse::THREADS_MAX as u64)
}

/// Parses a listen address, as `host:port`.
pub fn listen_address(address: &str) -> anyhow::Result<std::net::SocketAddr> {
    address_of("--listen", address)
}

/// Parses the address of an option, as `host:port`.
pub fn address_of(option: &str, address: &str) -> anyhow::Result<std::net::SocketAddr> {
    let way_out = || format!("write {option} as host:port, as in 127.0.0.1:7071");
    let found = address.to_socket_addrs();
    let mut found =
        found.map_err(|cause| anyhow!("cannot listen on '{address}': {cause}; {}", way_out()))?;
    found
        .next()
        .with_context(|| format!("'{address}' names no address; {}", way_out()))
}
