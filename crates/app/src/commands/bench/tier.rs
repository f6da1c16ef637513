//! Working sets of half to eight times the memory of a pool with a disk behind it.
//!
//! Two bricks run in this process: one with a disk behind its memory, and one with memory alone. Threads with a session each
//! send requests to them in turn.
//!
//! Invariant: pools and files lie in two scratch directories that are removed at the end.

use crate::args::Output;
use crate::commands::bench::SECONDS_MAX;
use crate::commands::bench::scratch::remove_on_shutdown;
use crate::shutdown::Shutdown;
use anyhow::{Context, anyhow, bail};
use clap::Args;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{BrickControl, SliceReply, SliceRequest, Stamp};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::units::{PAGE_BYTES, Size};
use pagemesh_base::wait::until_ready;
use pagemesh_bench::distribution::{PageDistribution, PageLaw};
use pagemesh_bench::report::Report;
use pagemesh_brick::brick::{Brick, MaintenanceThread, OpenedPool};
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file;
use pagemesh_brick::worker::Worker;
use pagemesh_fabric::service::Outcome;
use pagemesh_pmem::{MappedMedia, Media, NewDevice, TieredMedia};
use rustix::event::{PollFd, PollFlags};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use uuid::Uuid;

const PAGE: u64 = PAGE_BYTES as u64;
const SLICE: SliceId = SliceId(Uuid::from_u128(1));
const SCANNED: SliceId = SliceId(Uuid::from_u128(2));
/// Times the memory that the disk takes: two sets of eight times, and frames that are not freed yet.
const DISK_FACTOR: u64 = 20;
const SIZE_MIN: u64 = 16 << 20;
const SIZE_MAX: u64 = 64 << 30;
/// Threads that send requests.
const THREADS: usize = 2;
/// Reads in a hundred requests.
const READ_PERCENT: u64 = 70;
/// Requests of a warm-up, for each page of memory.
const WARM_UP_FACTOR: u64 = 4;
/// Working sets, in halves of the memory.
const SETS: [u64; 5] = [1, 2, 4, 8, 16];
/// The set that is measured beside a scan.
const SCAN_SET: u64 = 8;
const LAWS: [PageLaw; 3] = [PageLaw::Zipf(1.1), PageLaw::Zipf(0.9), PageLaw::Uniform];

/// Memory in front of a disk: working sets of half to eight times the memory, 70 % reads.
///
/// Pools lie in new directories, which are removed.
#[derive(Args)]
pub struct TierArgs {
    /// Directory in memory, on tmpfs, hugetlbfs or DAX.
    #[arg(long, default_value = "/dev/shm")]
    pub pools: PathBuf,
    /// Directory on the disk.
    #[arg(long)]
    pub dir: PathBuf,
    /// Memory of the pool, 16M to 64G. The disk needs twenty times as much.
    #[arg(long, default_value = "64M")]
    pub memory: Size,
    /// Seconds of each measurement, up to an hour.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    pub seconds: u64,
    /// Directory for raw results and plots.
    #[arg(long)]
    pub save: Option<PathBuf>,
    /// Output format.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// Runs the benchmark.
pub fn run(args: &TierArgs) -> anyhow::Result<Report> {
    let memory = args.memory.0;
    if !(SIZE_MIN..=SIZE_MAX).contains(&memory) {
        bail!("--memory {} is not 16M to 64G", args.memory);
    }
    let ending = Shutdown::listen(false)?;
    let in_memory = tempfile::TempDir::new_in(&args.pools)
        .with_context(|| format!("cannot make pools in {}", args.pools.display()))?;
    let on_disk = tempfile::TempDir::new_in(&args.dir)
        .with_context(|| format!("cannot make a disk in {}", args.dir.display()))?;
    remove_on_shutdown(ending, [in_memory.path(), on_disk.path()])?;
    let tiered = open_tiered(in_memory.path(), on_disk.path(), memory)?;
    // Its sets fit into memory, and so do the frames that are not freed yet.
    let plain = open_plain(in_memory.path(), 2 * memory)?;
    let mut report = Report::new(
        "tier",
        "memory in front of a disk, 4 KiB, 70 % reads, two threads",
        &tiered.brick.durability().to_string(),
        &[
            ("set", ""),
            ("rate", "1000/s"),
            ("without tier", "×"),
            ("hits", "%"),
            ("best hits", "%"),
            ("of the ideal", "×"),
            ("written to disk", "× of writes"),
        ],
    );
    let runtime = Duration::from_secs(args.seconds);
    let cold = cold_read(&tiered, memory)?;
    for law in LAWS {
        for set in SETS {
            let row = measure(&tiered, &plain, (law, set), runtime, cold, false)?;
            report.add_row(row);
        }
    }
    let law = (PageLaw::Zipf(1.1), SCAN_SET);
    let row = measure(&tiered, &plain, law, runtime, cold, true)?;
    report.add_row(row);
    report.add_note(format!(
        "memory of {}, disk in {}; a cold read takes {:.0} µs; hits are of reads; the best hits are those of a memory \
         that always has the likeliest pages; the ideal rate follows from the hits, the rate of the set that fits and the \
         cold read",
        args.memory,
        args.dir.display(),
        cold.as_secs_f64() * 1e6
    ));
    report.add_note(
        "single measurements of each row; the sets that fit alternate with the pool without a disk",
    );
    Ok(report)
}

/// A running brick.
struct OpenBrick<M: Media> {
    brick: Arc<Brick<M>>,
    memory_pages: u64,
    _maintenance: MaintenanceThread<M>,
}

fn open_plain(pools: &Path, bytes: u64) -> anyhow::Result<OpenBrick<MappedMedia>> {
    let path = pools.join("plain");
    file::create(&path, bytes)?;
    match OpenedPool::open(&path, OpenOptions::default())? {
        OpenedPool::Mapped((brick, maintenance, _)) => Ok(OpenBrick {
            memory_pages: bytes / PAGE,
            brick,
            _maintenance: maintenance,
        }),
        _ => bail!("{} is not in memory", pools.display()),
    }
}

/// A pool with a disk behind it, and its objects.
fn open_tiered(pools: &Path, dir: &Path, memory: u64) -> anyhow::Result<OpenBrick<TieredMedia>> {
    let (path, disk) = (pools.join("tiered"), dir.join("disk"));
    file::create(&path, memory)?;
    let options = OpenOptions {
        takes_disks: true,
        ..OpenOptions::default()
    };
    let OpenedPool::Tiered((brick, maintenance, _)) = OpenedPool::open(&path, options)? else {
        bail!("{} is not in memory", pools.display());
    };
    let bytes = DISK_FACTOR * memory;
    let mut new = File::options();
    let file = new.read(true).write(true).create_new(true).open(&disk)?;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)
        .with_context(|| format!("no room for {bytes} bytes in {}", dir.display()))?;
    brick.add_disk(Uuid::new_v4(), bytes, |planned, media| {
        media.attach_device(NewDevice {
            file,
            bytes: planned.bytes(),
            head_len: planned.head_len(),
            frame_table: planned.frame_table_bytes(),
        })
    })?;
    for slice in [SLICE, SCANNED] {
        brick.create(slice, 8 * memory)?;
    }
    let tiered = OpenBrick {
        memory_pages: memory / PAGE,
        brick,
        _maintenance: maintenance,
    };
    let mut client = Client::open(&tiered.brick, SCANNED)?;
    for page in 0..8 * tiered.memory_pages {
        client.write(page)?;
    }
    Ok(tiered)
}

/// The mean time of a read of a page that was not read before.
fn cold_read(tiered: &OpenBrick<TieredMedia>, memory: u64) -> anyhow::Result<Duration> {
    const READS: u64 = 500;
    let mut client = Client::open(&tiered.brick, SCANNED)?;
    let mut rng = SplitMix64::new(3);
    let start = Instant::now();
    for _ in 0..READS {
        client.read(rng.next_u64() % (4 * memory / PAGE))?;
    }
    Ok(start.elapsed() / READS as u32)
}

/// The result of the threads of one measurement.
#[derive(Clone, Copy, Default)]
struct LoadResult {
    requests: u64,
    writes: u64,
    hits: u64,
    misses: u64,
    seconds: f64,
}

impl LoadResult {
    fn rate(&self) -> f64 {
        self.requests as f64 / self.seconds
    }

    fn hit_ratio(&self) -> f64 {
        self.hits as f64 / (self.hits + self.misses).max(1) as f64
    }
}

fn measure(
    tiered: &OpenBrick<TieredMedia>,
    plain: &OpenBrick<MappedMedia>,
    (law, set): (PageLaw, u64),
    runtime: Duration,
    cold: Duration,
    scans: bool,
) -> anyhow::Result<Vec<pagemesh_bench::report::ReportCell>> {
    let pages = tiered.memory_pages * set / 2;
    let law_of_set = PageDistribution::new(law, pages);
    // The same requests without a disk, on as many pages as fit.
    let fitting = PageDistribution::new(law, pages.min(tiered.memory_pages / 2));
    plain
        .brick
        .create(SLICE, fitting_bytes(tiered))
        .or_else(|cause| match cause {
            pagemesh_base::slice::SliceError::SliceExists(_) => Ok(()),
            cause => Err(cause),
        })?;
    warm_up(&tiered.brick, &law_of_set, pages, tiered.memory_pages)?;
    warm_up(
        &plain.brick,
        &fitting,
        pages.min(tiered.memory_pages / 2),
        0,
    )?;
    let without = load(&plain.brick, &fitting, runtime)?;
    let before = tiered.brick.tier_figures().context("no tier")?;
    let found = match scans {
        false => load(&tiered.brick, &law_of_set, runtime)?,
        true => beside_scan(tiered, || load(&tiered.brick, &law_of_set, runtime))?,
    };
    let after = tiered.brick.tier_figures().context("no tier")?;
    let demoted = after.demoted - before.demoted;
    let miss_share = (1.0 - found.hit_ratio()) * READ_PERCENT as f64 / 100.0;
    let (hit_s, miss_s) = (THREADS as f64 / without.rate(), cold.as_secs_f64());
    let ideal = THREADS as f64 / ((1.0 - miss_share) * hit_s + miss_share * miss_s);
    let name = format!("{law}, {} × memory", set as f64 / 2.0);
    Ok(vec![
        match scans {
            true => format!("{name}, beside a scan").into(),
            false => name.into(),
        },
        (found.rate() / 1000.0).into(),
        (found.rate() / without.rate()).into(),
        (100.0 * found.hit_ratio()).into(),
        (100.0 * law_of_set.best_hit_ratio(tiered.memory_pages)).into(),
        (found.rate() / ideal).into(),
        (demoted as f64 / found.writes.max(1) as f64).into(),
    ])
}

fn fitting_bytes(tiered: &OpenBrick<TieredMedia>) -> u64 {
    tiered.memory_pages / 2 * PAGE
}

/// Writes every page once, then sends requests until the tier has settled.
fn warm_up<M: Media + Send + Sync + 'static>(
    brick: &Arc<Brick<M>>,
    law: &PageDistribution,
    pages: u64,
    memory_pages: u64,
) -> anyhow::Result<()> {
    let mut client = Client::open(brick, SLICE)?;
    for page in 0..pages {
        client.write(page)?;
    }
    let mut rng = SplitMix64::new(77);
    for _ in 0..WARM_UP_FACTOR * memory_pages {
        client.request(law.draw(&mut rng), &mut rng)?;
    }
    Ok(())
}

/// Threads that send requests for a time.
fn load<M: Media + Send + Sync + 'static>(
    brick: &Arc<Brick<M>>,
    law: &PageDistribution,
    runtime: Duration,
) -> anyhow::Result<LoadResult> {
    let one = |seed: u64| -> anyhow::Result<LoadResult> {
        let mut client = Client::open(brick, SLICE)?;
        let mut rng = SplitMix64::new(seed);
        let start = Instant::now();
        let mut found = LoadResult::default();
        while start.elapsed() < runtime {
            found.writes += u64::from(client.request(law.draw(&mut rng), &mut rng)?);
            found.requests += 1;
        }
        (found.hits, found.misses) = client.worker.tier_reads();
        found.seconds = start.elapsed().as_secs_f64();
        Ok(found)
    };
    let results = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=THREADS as u64)
            .map(|seed| scope.spawn(move || one(seed)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.collect::<Vec<_>>()
    });
    let mut all = LoadResult::default();
    for result in results {
        let found = result.map_err(|_| anyhow!("a thread panicked"))??;
        all.requests += found.requests;
        all.writes += found.writes;
        all.hits += found.hits;
        all.misses += found.misses;
        all.seconds = all.seconds.max(found.seconds);
    }
    Ok(all)
}

/// Runs a measurement while another thread reads eight times the memory in order, again and again.
fn beside_scan(
    tiered: &OpenBrick<TieredMedia>,
    run: impl FnOnce() -> anyhow::Result<LoadResult>,
) -> anyhow::Result<LoadResult> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let scan = scope.spawn(|| -> anyhow::Result<()> {
            let mut client = Client::open(&tiered.brick, SCANNED)?;
            for page in (0..8 * tiered.memory_pages).cycle() {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                client.read(page)?;
            }
            Ok(())
        });
        let found = run();
        is_over.store(true, Ordering::Relaxed);
        scan.join().map_err(|_| anyhow!("the scan panicked"))??;
        found
    })
}

/// A session of a brick in this process.
struct Client<M: Media + Send + Sync + 'static> {
    worker: Worker<M>,
    op: u64,
    page: bytes::Bytes,
}

impl<M: Media + Send + Sync + 'static> Client<M> {
    fn open(brick: &Arc<Brick<M>>, slice: SliceId) -> anyhow::Result<Client<M>> {
        let mut worker = Worker::open(brick, std::process::id(), 0)?;
        worker.attach(slice, Epoch(1))?;
        Ok(Client {
            worker,
            op: 0,
            page: vec![0x5a; PAGE_BYTES].into(),
        })
    }

    /// A read or a write of a page. Returns whether it was a write.
    fn request(&mut self, page: u64, rng: &mut SplitMix64) -> anyhow::Result<bool> {
        let is_read = rng.next_u64() % 100 < READ_PERCENT;
        match is_read {
            true => self.read(page)?,
            false => self.write(page)?,
        }
        Ok(!is_read)
    }

    fn read(&mut self, page: u64) -> anyhow::Result<()> {
        let (offset, len) = (page * PAGE, PAGE as u32);
        self.execute(SliceRequest::Read { offset, len })
    }

    fn write(&mut self, page: u64) -> anyhow::Result<()> {
        self.op += 1;
        self.execute(SliceRequest::Write {
            offset: page * PAGE,
            data: self.page.clone(),
            stamp: Stamp {
                epoch: Epoch(1),
                op: self.op,
                open_ops: 0,
            },
        })
    }

    fn execute(&mut self, request: SliceRequest) -> anyhow::Result<()> {
        let started = self.worker.start(0, request, TierHint::None);
        self.worker.end_batch();
        let ticket = match started {
            Outcome::Done(result) => return check(result),
            Outcome::Deferred(ticket) => ticket,
        };
        let mut done = Vec::new();
        loop {
            self.worker.finish(&mut done);
            if let Some((_, result)) = done.drain(..).find(|(it, _)| *it == ticket) {
                return check(result);
            }
            let mut fds = Vec::new();
            self.worker.device_fds(&mut fds);
            let watched = fds.into_iter();
            let mut fds: Vec<_> = watched
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect();
            until_ready(&mut fds, None)?;
        }
    }
}

fn check(result: Result<SliceReply, pagemesh_base::slice::SliceError>) -> anyhow::Result<()> {
    result.map(drop).map_err(Into::into)
}
