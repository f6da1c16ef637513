//! Recovery time of a pool after its brick is killed under load.
//!
//! A brick process serves the pool. A TCP leg writes to it at the maximum rate of one connection,
//! until the brick is killed. Then this process opens the pool, and the benchmark measures that
//! time. The pools are sparse files, so a pool of 64 GiB needs only the memory of its written
//! pages.

use crate::commands::bench::MeasureArgs;
use crate::commands::bench::scratch::{ChildDaemon, remove_on_shutdown};
use crate::key;
use crate::shutdown::Shutdown;
use anyhow::{Context, bail};
use clap::Args;
use pagemesh_base::ids::Epoch;
use pagemesh_base::key::Key;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{BrickControl, Leg, SliceCompletion, SliceRequest, Stamp};
use pagemesh_base::units::Size;
use pagemesh_bench::recovery::{RecoveryOptions, RecoverySample, run_recovery};
use pagemesh_bench::report::Report;
use pagemesh_brick::brick::{OpenedBrick, OpenedPool};
use pagemesh_brick::disk_file::{MEMORY_BUDGET_MIN, OpenOptions};
use pagemesh_brick::{file, resource_limits};
use pagemesh_fabric::brick_client::BrickClient;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::tcp::TcpLeg;
use pagemesh_pmem::{Durability, Media};
use pagemesh_store::recovery::RecoverySummary;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(1));
/// The smallest pool, and the fewest bytes written to it.
const SIZE_MIN: u64 = 256 << 20;
/// Memory for the data pages of a brick.
const CACHE_BYTES: u64 = MEMORY_BUDGET_MIN as u64;
/// Requests in flight.
const DEPTH: u64 = 32;

/// Recovery time of a pool after its brick is killed under load.
#[derive(Args)]
pub struct RecoveryArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Sizes of the pools, from 256M on. They are sparse, so that they need only the room of their written pages.
    #[arg(long, value_delimiter = ',', default_values = ["8G", "64G"])]
    pub sizes: Vec<Size>,
    /// Bytes written to each pool, from 256M to half of the smallest.
    #[arg(long, default_value = "4G")]
    pub held: Size,
}

struct RecoveryBench {
    held_bytes: u64,
    dir: PathBuf,
    key_path: PathBuf,
    key: Key,
    /// The pools by their sizes, with the memory of the brick of each while it was empty.
    pools: HashMap<u64, (PathBuf, u64)>,
    seconds: u64,
    op: u64,
}

/// Runs the benchmark.
pub fn run(args: &RecoveryArgs) -> anyhow::Result<Report> {
    let measure = &args.measure;
    let smallest = args.sizes.iter().map(|size| size.0).min().unwrap_or(0);
    if !(SIZE_MIN..=smallest / 2).contains(&args.held.0) || !args.held.0.is_multiple_of(1 << 20) {
        bail!(
            "--held {} is not 256M to half of the smallest of --sizes, in whole MiB",
            args.held
        );
    }
    let ending = Shutdown::listen(false)?;
    let pools = tempfile::TempDir::new_in(&measure.pools)
        .with_context(|| format!("cannot make pools in {}", measure.pools.display()))?;
    remove_on_shutdown(ending, [pools.path()])?;
    let key_path = pools.path().join("key");
    let mut bench = RecoveryBench {
        dir: pools.path().into(),
        key: key::find_or_create(&key_path)?,
        key_path,
        held_bytes: args.held.0,
        pools: HashMap::new(),
        seconds: measure.seconds,
        op: 0,
    };
    let options = RecoveryOptions {
        rounds: measure.rounds,
        class: class_of(&measure.pools),
        sizes_bytes: args.sizes.iter().map(|size| size.0).collect(),
        ..RecoveryOptions::default()
    };
    let mut recover = |size_bytes, round| {
        let recovered = bench.recover(size_bytes, round);
        recovered.map_err(|cause| cause.into_boxed_dyn_error())
    };
    Ok(run_recovery(&mut recover, &options)?)
}

/// The durability class of pools in a directory.
fn class_of(dir: &Path) -> String {
    let class = match resource_limits::is_memory(dir) {
        true => Durability::Process,
        false => Durability::FileSync,
    };
    class.to_string()
}

/// Ends a brick. Returns the bytes that its pool holds, and the findings of its recovery.
fn close<M: Media + Send + Sync + 'static>(
    (brick, maintenance, recovered): OpenedBrick<M>,
) -> anyhow::Result<(u64, RecoverySummary)> {
    let held_bytes = brick.status()?.used_bytes;
    drop(brick);
    maintenance.stop();
    Ok((held_bytes, recovered))
}

/// Opens the pool of a brick that was killed. Returns the time that it took, the bytes that it holds, and its findings.
pub fn recover(path: &Path) -> anyhow::Result<(Duration, (u64, RecoverySummary))> {
    let start = Instant::now();
    let options = OpenOptions {
        is_sparse: true,
        ..OpenOptions::default()
    };
    let opened = OpenedPool::open(path, options)?;
    let wall = start.elapsed();
    let found = match opened {
        OpenedPool::Mapped(opened) => close(opened)?,
        OpenedPool::Disk(opened) => close(opened)?,
        OpenedPool::Tiered(opened) => close(opened)?,
    };
    Ok((wall, found))
}

/// Memory of a process that no file has.
pub fn anonymous_bytes(process: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{process}/status");
    let status = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let line = status.lines().find_map(|it| it.strip_prefix("RssAnon:"));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(kibibytes.with_context(|| format!("{path} has no RssAnon"))? << 10)
}

impl RecoveryBench {
    fn recover(&mut self, size_bytes: u64, round: usize) -> anyhow::Result<RecoverySample> {
        let is_new = !self.pools.contains_key(&size_bytes);
        let path = match self.pools.get(&size_bytes) {
            Some((path, _)) => path.clone(),
            None => {
                let path = self.dir.join(format!("{}.pool", size_bytes >> 20));
                file::create_sparse(&path, size_bytes)?;
                path
            }
        };
        let (mut brick, address) = self.start_brick(&path)?;
        let memory_bytes = anonymous_bytes(brick.0.id())?;
        let empty_pool = (path.clone(), memory_bytes);
        let empty_bytes = self.pools.entry(size_bytes).or_insert(empty_pool).1;
        let timeouts = Timeouts::default();
        if is_new {
            let remote = BrickClient::connect(address, &self.key, timeouts)?;
            remote.create(SLICE, self.held_bytes)?;
        }
        let epoch = Epoch(round as u32);
        let mut leg = TcpLeg::connect(address, &self.key, timeouts, SLICE, epoch)?;
        if is_new {
            self.write_blocks(&mut leg, epoch, 1 << 20, self.held_bytes >> 20, None)?;
        }
        let until = Instant::now() + Duration::from_secs(self.seconds);
        self.write_blocks(&mut leg, epoch, 4096, u64::MAX, Some(until))?;
        let memory_bytes = anonymous_bytes(brick.0.id())?;
        brick.0.kill()?;
        brick.0.wait()?;
        drop(leg);
        let (wall, (held_bytes, recovered)) = recover(&path)?;
        Ok(RecoverySample {
            wall,
            records: recovered.records,
            held_bytes,
            table_bytes: memory_bytes.saturating_sub(empty_bytes + CACHE_BYTES),
        })
    }

    fn start_brick(&self, pool: &Path) -> anyhow::Result<(ChildDaemon, SocketAddr)> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["brick", "--sparse", "--manager", "http://127.0.0.1:1"])
            .arg("--pool")
            .arg(pool)
            .arg("--key")
            .arg(&self.key_path)
            .args(["--memory-budget", &CACHE_BYTES.to_string()])
            .stderr(Stdio::null());
        let (brick, ready) = ChildDaemon::start(command)?;
        let address = ready.rsplit(' ').next().unwrap_or_default();
        let address = address.parse().context("the brick printed no address")?;
        Ok((brick, address))
    }

    /// Writes blocks: a number of consecutive blocks, or scattered blocks until a deadline. At the
    /// deadline it leaves the requests in flight.
    fn write_blocks(
        &mut self,
        leg: &mut TcpLeg,
        epoch: Epoch,
        block_bytes: u64,
        count: u64,
        until: Option<Instant>,
    ) -> anyhow::Result<()> {
        let data = bytes::Bytes::from(vec![0x5a; block_bytes as usize]);
        let blocks = self.held_bytes / block_bytes;
        let mut done: Vec<SliceCompletion> = Vec::new();
        let (mut sent, mut ended) = (0, 0);
        while ended < count {
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(());
            }
            while sent < count && sent - ended < DEPTH {
                self.op += 1;
                let at = match until {
                    None => sent,
                    // An odd factor visits every block, with large steps.
                    Some(_) => self.op.wrapping_mul(0x9E37_79B1) % blocks,
                };
                let stamp = Stamp {
                    epoch,
                    op: self.op,
                    open_ops: 0,
                };
                let offset = at * block_bytes;
                let data = data.clone();
                leg.submit(
                    sent,
                    SliceRequest::Write {
                        offset,
                        data,
                        stamp,
                    },
                );
                sent += 1;
            }
            leg.reap(&mut done);
            for completion in done.drain(..) {
                completion.result?;
                ended += 1;
            }
        }
        Ok(())
    }
}
