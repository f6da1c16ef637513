//! The metrics of a process with a brick or with volumes, for Prometheus (`--metrics`).
//!
//! Invariants: a page is collected when a scraper asks, from meters and status that exist anyway. It has no secret: no key,
//! no token, no path, no address. Without `--metrics` nothing listens.

use crate::args::address_of;
use clap::Args;
use pagemesh_base::brick_name::BrickName;
use pagemesh_base::layout::{LegState, VolumeName};
use pagemesh_base::slice::BrickControl;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_brick::brick::Brick;
use pagemesh_brick::scrub::{ScrubState, ScrubStatus};
use pagemesh_brick::tier::TierFigures;
use pagemesh_fs::UncommittedChanges;
use pagemesh_metrics::catalogue::{client, pool};
use pagemesh_metrics::{BoundResponder, MetricPage, OpSums, Responder};
use pagemesh_pmem::Media;
use pagemesh_volume::{Counters, LegStatus, Volume, VolumeState, VolumeStatus};
use std::sync::{OnceLock, Weak};
use std::time::{Duration, Instant};

/// The program's version, in the metrics with information.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The address of the metrics of a process.
#[derive(Args, Clone)]
pub struct MetricsArgs {
    /// Address at which this process serves its metrics for Prometheus, as host:port: `GET /metrics`, without a token. Off if
    /// missing; port 0 takes a free port, which a line `metrics URL` names.
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<String>,
    /// Let --metrics listen on an address that other machines reach. Each machine that reaches it can read the
    /// names and figures of volumes and bricks.
    #[arg(long, requires = "metrics")]
    metrics_allow_remote: bool,
}

impl MetricsArgs {
    /// Binds the address, so that a wrong one ends the program before it has an effect.
    pub fn bind(&self) -> anyhow::Result<Option<BoundResponder>> {
        let Some(address) = &self.metrics else {
            return Ok(None);
        };
        let address = address_of("--metrics", address)?;
        let bound = Responder::bind(address, self.metrics_allow_remote)?;
        if !address.ip().is_loopback() {
            tracing::warn!(%address, "metrics are readable from other machines without a token");
        }
        Ok(Some(bound))
    }
}

/// Serves pages at a bound address, and prints their URL.
pub fn serve(
    bound: Option<BoundResponder>,
    collect: impl Fn() -> MetricPage + Send + Sync + 'static,
) -> anyhow::Result<Option<Responder>> {
    let Some(bound) = bound else {
        return Ok(None);
    };
    let responder = bound.serve(collect)?;
    println!("metrics {}", responder.url());
    Ok(Some(responder))
}

/// The metrics of a brick.
pub fn brick_page<M: Media + Send + Sync + 'static>(
    brick: &Brick<M>,
    name: &OnceLock<BrickName>,
) -> MetricPage {
    let mut page = MetricPage::default();
    let name = name.get().map(BrickName::to_string);
    let name = name.unwrap_or_else(|| brick.id().to_string());
    let durability = brick.durability().to_string();
    page.add(&pool::INFO, &[&name, VERSION, &durability], 1_u64);
    page.add(&pool::FAILED, &[], u64::from(brick.has_failed()));
    match brick.status() {
        Ok(status) => {
            page.add(&pool::CAPACITY, &[], status.capacity_bytes);
            page.add(&pool::USED, &[], status.used_bytes);
            page.add(&pool::SESSIONS, &[], status.sessions);
        }
        Err(cause) => tracing::debug!(%cause, "the metrics lack the status of the pool"),
    }
    add_scrub(&mut page, &brick.scrub_status(Instant::now()));
    page.add_media(&pool::MEDIA, &[], brick.media_bytes());
    if let Some(disk) = brick.disk_figures() {
        page.add(&pool::CACHE_CAPACITY, &[], disk.cache_bytes_max);
        page.add(&pool::CACHE_USED, &[], disk.cache_bytes);
        page.add(&pool::CACHE_DIRTY, &[], disk.dirty_pages);
        page.add(&pool::CACHE_HITS, &[], disk.hits);
        page.add(&pool::CACHE_MISSES, &[], disk.misses);
        page.add(&pool::DISK_UNREADABLE, &[], disk.unreadable_pages);
        page.add(&pool::DISK_SLOW, &[], disk.slow_requests);
    }
    if let Some(tier) = brick.tier_figures() {
        add_tier(&mut page, &tier);
    }
    let sums = OpSums::from(&brick.meters().totals());
    page.add_operations(pool::OPERATIONS, &[], &sums);
    page
}

fn add_tier(page: &mut MetricPage, tier: &TierFigures) {
    let usage = tier.usage;
    let bytes = |frames: u64| frames * PAGE_BYTES as u64;
    for (name, frames, free) in [
        ("memory", usage.memory_frames, usage.memory_free),
        ("flash", usage.flash_frames, usage.flash_free),
    ] {
        page.add(&pool::TIER_CAPACITY, &[name], bytes(frames));
        page.add(&pool::TIER_FREE, &[name], bytes(free));
    }
    page.add(&pool::TIER_DEMOTED, &[], tier.demoted);
    page.add(&pool::TIER_PROMOTED, &[], tier.promoted);
    page.add(&pool::TIER_ABANDONED, &[], tier.abandoned);
    page.add(&pool::TIER_HITS, &[], tier.hits);
    page.add(&pool::TIER_MISSES, &[], tier.misses);
    page.add(&pool::TIER_WAITS, &[], tier.waits);
}

fn add_scrub(page: &mut MetricPage, scrub: &ScrubStatus) {
    let is_running = scrub.state == ScrubState::Running;
    page.add(&pool::SCRUB_RUNNING, &[], u64::from(is_running));
    if let Some(percent) = scrub.percent {
        page.add_real(&pool::SCRUB_PROGRESS, &[], f64::from(percent) / 100.0);
    }
    page.add(&pool::SCRUBS, &[], scrub.passes);
    if let Some((_, ago)) = scrub.last {
        page.add_real(&pool::SCRUB_AGE, &[], ago.as_secs_f64());
    }
    page.add(&pool::CORRECTED, &[], scrub.corrected);
    let found = [scrub.pass, scrub.last.map(|(last, _)| last)];
    let damaged = found.iter().flatten().map(|found| found.damaged).max();
    page.add(&pool::DAMAGED, &[], damaged.unwrap_or(0));
}

/// The metrics of attached volumes. Volumes that are gone are missing.
pub fn client_page(volumes: &[(VolumeName, Weak<Volume>)]) -> MetricPage {
    let mut page = MetricPage::default();
    page.add(&client::INFO, &[VERSION], 1_u64);
    let present = volumes
        .iter()
        .filter_map(|(name, volume)| Some((name, volume.upgrade()?)));
    for (name, volume) in present {
        let labels = [name.as_str()];
        if let Some(status) = volume.status() {
            add_volume(&mut page, labels, &status);
        }
        let sums = OpSums::from(&volume.meters().totals());
        page.add_operations(client::OPERATIONS, &labels, &sums);
    }
    page
}

/// Adds the number of processes on the direct path of a mount.
pub fn add_direct_clients(page: &mut MetricPage, name: &VolumeName, count: usize) {
    page.add(&client::DIRECT_CLIENTS, &[name.as_str()], count);
}

/// Adds the acknowledged changes that a mount has not stored yet.
pub fn add_uncommitted(page: &mut MetricPage, name: &VolumeName, changes: UncommittedChanges) {
    let labels = [name.as_str()];
    let age = changes.since.map_or(Duration::ZERO, |it| it.elapsed());
    page.add(&client::UNCOMMITTED_PAGES, &labels, changes.pages);
    page.add_real(&client::UNCOMMITTED_AGE, &labels, age.as_secs_f64());
}

/// The states of a volume, with their labels.
const STATES: [(VolumeState, &str); 6] = [
    (VolumeState::Healthy, "healthy"),
    (VolumeState::Resyncing, "resyncing"),
    (VolumeState::Degraded, "degraded"),
    (VolumeState::AwaitingManager, "awaiting-manager"),
    (VolumeState::Unavailable, "unavailable"),
    (VolumeState::Fenced, "fenced"),
];
/// The states of a leg.
const LEG_STATES: [LegState; 4] = [
    LegState::InSync,
    LegState::Stale,
    LegState::Syncing,
    LegState::AsyncReplica,
];

fn add_volume(page: &mut MetricPage, labels: [&str; 1], status: &VolumeStatus) {
    let [name] = labels;
    for (state, label) in STATES {
        let is_present = status.state == state;
        page.add(&client::STATE, &[name, label], u64::from(is_present));
    }
    page.add(&client::SIZE_BYTES, &labels, status.size_bytes);
    page.add(&client::CHANNELS, &labels, status.channels);
    let legs = || status.columns.iter().flat_map(|column| &column.legs);
    for state in LEG_STATES {
        let count = legs().filter(|leg| leg.state == state).count();
        page.add(&client::LEGS, &[name, state.as_str()], count);
    }
    let sum =
        |of: fn(&LegStatus) -> Option<u64>| legs().filter_map(of).fold(0, u64::saturating_add);
    let todo = sum(|leg| leg.resync.as_ref().map(|resync| resync.bytes_todo));
    page.add(&client::RESYNC_TODO, &labels, todo);
    let done = sum(|leg| leg.resync.as_ref().map(|resync| resync.bytes_done));
    page.add(&client::RESYNC_DONE, &labels, done);
    let lag = sum(|leg| leg.lag.as_ref().map(|lag| lag.bytes));
    page.add(&client::LAG_BYTES, &labels, lag);
    add_counters(page, labels, &status.counters);
}

fn add_counters(page: &mut MetricPage, labels: [&str; 1], counters: &Counters) {
    for (metric, sum) in [
        (&client::LEGS_LOST, counters.legs_lost),
        (&client::LEGS_RETURNED, counters.legs_returned),
        (&client::READS_REDIRECTED, counters.reads_redirected),
        (&client::READS_HEDGED, counters.reads_hedged),
        (&client::PAGES_REPAIRED, counters.pages_repaired),
        (&client::REPAIRS_FAILED, counters.repairs_failed),
        (&client::REQUESTS_FAILED, counters.requests_failed),
        (&client::PAGES_SCRUBBED, counters.pages_scrubbed),
        (&client::RESYNCED_BYTES, counters.bytes_resynced),
    ] {
        page.add(metric, &labels, sum);
    }
}
