//! The bytes that a pool writes for each byte of a user, and the metadata that a kept version needs.
//!
//! One brick runs in this process. Every page of a slice is replaced once, in a scattered order: first without a snapshot,
//! then after one, which keeps a version of each page. The brick counts its writes, and its used bytes tell what versions
//! need besides their pages: entries, nodes above them, and the version log.

use super::SnapshotsArgs;
use crate::commands::bench::scratch::{SPARE_BYTES, remove_on_shutdown};
use crate::shutdown::Shutdown;
use anyhow::{Context, bail};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::media_bytes::MediaBytes;
use pagemesh_base::slice::{BrickControl, SliceRequest, Stamp};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_bench::report::{Report, ReportCell};
use pagemesh_brick::brick::{Brick, OpenedPool};
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file;
use pagemesh_brick::worker::Worker;
use pagemesh_fabric::service::Outcome;
use pagemesh_pmem::MappedMedia;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

const PAGE: u64 = PAGE_BYTES as u64;
const SLICE: SliceId = SliceId(Uuid::from_u128(1));
const SNAPSHOT: Epoch = Epoch(2);
/// A prime number: the step from one page to the next, modulo the pages.
const STEP: u64 = 2_654_435_761;
/// The owner has ended its work if its counts stay the same for this long.
const CALM: Duration = Duration::from_secs(1);
const CALM_LIMIT: Duration = Duration::from_secs(300);

pub(super) fn run(args: &SnapshotsArgs) -> anyhow::Result<Report> {
    let ending = Shutdown::listen(false)?;
    let dir = &args.measure.pools;
    let scratch = tempfile::TempDir::new_in(dir)
        .with_context(|| format!("cannot make a pool in {}", dir.display()))?;
    remove_on_shutdown(ending, [scratch.path()])?;
    let path = scratch.path().join("pool");
    let size = args.size.0;
    file::create(&path, 2 * size + size / 16 + SPARE_BYTES)?;
    let opened = OpenedPool::open(&path, OpenOptions::default())?;
    let OpenedPool::Mapped((brick, _maintenance, _)) = opened else {
        bail!("{} is not in memory", dir.display());
    };
    brick.create(SLICE, size)?;
    let columns = [
        ("case", ""),
        ("to the medium", "× of user bytes"),
        ("its metadata", "× of user bytes"),
        ("kept versions", ""),
        ("metadata of a version", "bytes"),
    ];
    let title = "bytes that one copy writes, each page of a volume replaced once";
    let class = brick.durability().to_string();
    let mut report = Report::new("snapshots", title, &class, &columns);
    let pages = size / PAGE;
    replace_all(&brick, Epoch(1), pages)?;
    let before = calm_figures(&brick)?;
    replace_all(&brick, Epoch(1), pages)?;
    let plain = calm_figures(&brick)?;
    report.add_row(row("no snapshot", &before, &plain, 0, pages));
    let mut worker = open_worker(&brick, Epoch(1))?;
    execute(
        &mut worker,
        SliceRequest::PrepareSnapshot { snapshot: SNAPSHOT },
    )?;
    drop(worker);
    let before = calm_figures(&brick)?;
    replace_all(&brick, SNAPSHOT, pages)?;
    let kept = calm_figures(&brick)?;
    report.add_row(row("after a snapshot", &before, &kept, pages, pages));
    report.add_note("one pass for each row: the counts do not depend on time");
    Ok(report)
}

/// The counts of a brick that has nothing to do.
#[derive(Clone, Copy, PartialEq, Eq)]
struct BrickFigures {
    written: MediaBytes,
    used_bytes: u64,
}

fn calm_figures(brick: &Brick<MappedMedia>) -> anyhow::Result<BrickFigures> {
    let figures = || -> anyhow::Result<BrickFigures> {
        Ok(BrickFigures {
            written: brick.media_bytes(),
            used_bytes: brick.status()?.used_bytes,
        })
    };
    let began = Instant::now();
    let (mut last, mut since) = (figures()?, began);
    while since.elapsed() < CALM {
        if began.elapsed() > CALM_LIMIT {
            bail!("the brick still works after {} s", CALM_LIMIT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
        let present = figures()?;
        if present != last {
            (last, since) = (present, Instant::now());
        }
    }
    Ok(last)
}

fn row(
    case: &str,
    before: &BrickFigures,
    after: &BrickFigures,
    versions: u64,
    pages: u64,
) -> Vec<ReportCell> {
    let user_bytes = (pages * PAGE) as f64;
    let written = after.written.since(before.written);
    let more = after.used_bytes.saturating_sub(before.used_bytes);
    let metadata = more.saturating_sub(versions * PAGE);
    let per_version = (versions > 0).then(|| metadata as f64 / versions as f64);
    vec![
        case.into(),
        (written.total() as f64 / user_bytes).into(),
        (written.metadata() as f64 / user_bytes).into(),
        versions.into(),
        per_version.into(),
    ]
}

/// Writes each page once, in a scattered order.
fn replace_all(brick: &Arc<Brick<MappedMedia>>, epoch: Epoch, pages: u64) -> anyhow::Result<()> {
    let mut worker = open_worker(brick, epoch)?;
    let data: bytes::Bytes = vec![0x5a; PAGE_BYTES].into();
    for number in 0..pages {
        let page = (u128::from(number) * u128::from(STEP) % u128::from(pages)) as u64;
        let request = SliceRequest::Write {
            offset: page * PAGE,
            data: data.clone(),
            stamp: Stamp {
                epoch,
                op: number + 1,
                open_ops: 0,
            },
        };
        execute(&mut worker, request)?;
    }
    Ok(())
}

fn open_worker(
    brick: &Arc<Brick<MappedMedia>>,
    epoch: Epoch,
) -> anyhow::Result<Worker<MappedMedia>> {
    let mut worker = Worker::open(brick, std::process::id(), 0)?;
    worker.attach(SLICE, epoch)?;
    Ok(worker)
}

fn execute(worker: &mut Worker<MappedMedia>, request: SliceRequest) -> anyhow::Result<()> {
    let started = worker.start(0, request, TierHint::None);
    worker.end_batch();
    match started {
        Outcome::Done(result) => Ok(result.map(drop)?),
        Outcome::Deferred(_) => bail!("a pool in memory defers no request"),
    }
}
