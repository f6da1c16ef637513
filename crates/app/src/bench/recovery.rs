//! How long a pool takes to recover after its brick was killed under load.
//!
//! A brick process serves the pool; a leg over tcp writes to it as fast as one
//! connection can, until the brick is killed. Then this process opens the
//! pool, and that is what is timed. The pools are sparse files, so that one of
//! 64 GiB needs only the memory that is written.

use crate::args::Measure;
use crate::bench::{Daemon, remove_at_end};
use crate::ending::Ending;
use crate::key;
use anyhow::Context;
use pagemesh_base::ids::Epoch;
use pagemesh_base::key::Key;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{BrickControl, Leg, SliceCompletion, SliceRequest, Stamp};
use pagemesh_bench::recovery::{RecoveryOptions, RecoverySample, run_recovery};
use pagemesh_bench::report::Report;
use pagemesh_brick::brick::Brick;
use pagemesh_brick::file;
use pagemesh_fabric::brick_client::BrickClient;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::tcp::TcpLeg;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(1));
/// Bytes that each pool holds: half of the smaller one.
const HELD_BYTES: u64 = 4 << 30;
/// Requests in flight.
const DEPTH: u64 = 32;

struct Bench {
    dir: PathBuf,
    key_path: PathBuf,
    key: Key,
    filled: HashMap<u64, PathBuf>,
    seconds: u64,
    op: u64,
}

/// Measures 8 GiB beside 64 GiB.
pub fn run(measure: &Measure) -> anyhow::Result<Report> {
    let ending = Ending::listen(false)?;
    let pools = tempfile::TempDir::new_in(&measure.pools)
        .with_context(|| format!("cannot make pools in {}", measure.pools.display()))?;
    remove_at_end(ending, [pools.path()])?;
    let key_path = pools.path().join("key");
    let mut bench = Bench {
        dir: pools.path().into(),
        key: key::find_or_create(&key_path)?,
        key_path,
        filled: HashMap::new(),
        seconds: measure.seconds,
        op: 0,
    };
    let options = RecoveryOptions {
        rounds: measure.rounds,
        ..RecoveryOptions::default()
    };
    let mut recover = |size_bytes, round| {
        let recovered = bench.recover(size_bytes, round);
        recovered.map_err(|cause| cause.into_boxed_dyn_error())
    };
    Ok(run_recovery(&mut recover, &options)?)
}

impl Bench {
    fn recover(&mut self, size_bytes: u64, round: usize) -> anyhow::Result<RecoverySample> {
        let is_new = !self.filled.contains_key(&size_bytes);
        let path = match self.filled.get(&size_bytes) {
            Some(path) => path.clone(),
            None => {
                let path = self.dir.join(format!("{}.pool", size_bytes >> 30));
                file::create_sparse(&path, size_bytes)?;
                self.filled.insert(size_bytes, path.clone());
                path
            }
        };
        let (mut brick, address) = self.start(&path)?;
        let timeouts = Timeouts::default();
        if is_new {
            let remote = BrickClient::connect(address, &self.key, timeouts)?;
            remote.create(SLICE, HELD_BYTES)?;
        }
        let epoch = Epoch(round as u32);
        let mut leg = TcpLeg::connect(address, &self.key, timeouts, SLICE, epoch)?;
        if is_new {
            self.load(&mut leg, epoch, 1 << 20, HELD_BYTES >> 20, None)?;
        }
        let until = Instant::now() + Duration::from_secs(self.seconds);
        self.load(&mut leg, epoch, 4096, u64::MAX, Some(until))?;
        brick.0.kill()?;
        brick.0.wait()?;
        drop(leg);
        let start = Instant::now();
        let (opened, keeper, recovered) = Brick::open_sparse(&path)?;
        let wall = start.elapsed();
        let held_bytes = opened.status()?.used_bytes;
        drop(opened);
        keeper.stop();
        Ok(RecoverySample {
            wall,
            records: recovered.records,
            held_bytes,
        })
    }

    fn start(&self, pool: &Path) -> anyhow::Result<(Daemon, SocketAddr)> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["brick", "--sparse", "--manager", "http://127.0.0.1:1"])
            .arg("--pool")
            .arg(pool)
            .arg("--key")
            .arg(&self.key_path)
            .stderr(Stdio::null());
        let (brick, ready) = Daemon::start(command)?;
        let address = ready.rsplit(' ').next().unwrap_or_default();
        let address = address.parse().context("the brick told no address")?;
        Ok((brick, address))
    }

    /// Writes blocks: one after the other up to a count, or all over until a
    /// time, and then leaves what is in flight alone.
    fn load(
        &mut self,
        leg: &mut TcpLeg,
        epoch: Epoch,
        block_bytes: u64,
        count: u64,
        until: Option<Instant>,
    ) -> anyhow::Result<()> {
        let data = bytes::Bytes::from(vec![0x5a; block_bytes as usize]);
        let blocks = HELD_BYTES / block_bytes;
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
                    // An odd factor visits every block, far apart.
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
