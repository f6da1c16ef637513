//! The manager's metrics for Prometheus.
//!
//! Invariants: the number of series grows with the bricks and with `metric_volumes`, never with the volumes. Values are those
//! of the lists and figures of REST at the same time.

use crate::figure_history::FigureSubject;
use crate::manager::Manager;
use crate::snapshots::SnapshotState;
use crate::wire::{
    BrickDevice, BrickInfo, DeviceState, ReplicationStatus, ResyncProgress, ScrubState,
    VolumeHealth, VolumeInfo,
};
use pagemesh_base::brick_name::BrickName;
use pagemesh_base::layout::{BrickId, VolumeName};
use pagemesh_metrics::MetricPage;
use pagemesh_metrics::catalogue::manager as names;
use std::time::Duration;

impl Manager {
    /// The present values of all metrics.
    #[must_use]
    pub fn metrics(&self) -> MetricPage {
        let mut page = MetricPage::default();
        let version = env!("CARGO_PKG_VERSION");
        page.add(&names::INFO, &[version], 1_u64);
        self.add_manager(&mut page);
        self.bricks()
            .iter()
            .for_each(|brick| add_brick(&mut page, brick));
        let volumes = self.volumes();
        add_volumes(&mut page, &volumes);
        // `volumes` has just renewed the set of living bricks.
        let (pending, unusable) = {
            let book = self.state();
            (book.pending_deletes.len(), book.volumes.count_unusable())
        };
        page.add(&names::PENDING_DELETIONS, &[], pending);
        page.add(&names::VOLUMES_UNUSABLE, &[], unusable);
        self.add_degraded_volumes(&mut page, &volumes);
        self.add_snapshots(&mut page);
        self.add_schedules(&mut page);
        self.add_replication(&mut page);
        self.add_operations(&mut page);
        self.add_ages(&mut page, &volumes);
        page
    }

    /// The manager itself: its store, its API, its open events.
    fn add_manager(&self, page: &mut MetricPage) {
        let store_failed = u64::from(self.has_store_failed());
        page.add(&names::STORE_FAILED, &[], store_failed);
        for (class, count) in self.api_counters.answers() {
            page.add(&names::REQUESTS, &[class], count);
        }
        page.add(&names::WATCH_STREAMS, &[], self.api_counters.streams());
        let critical = self.events().unacknowledged_critical();
        page.add(&names::CRITICAL_EVENTS, &[], critical);
    }

    /// The first volumes with a stale leg, up to the limit of labels.
    fn add_degraded_volumes(&self, page: &mut MetricPage, volumes: &[VolumeInfo]) {
        let degraded = volumes
            .iter()
            .filter(|volume| volume.health == VolumeHealth::Degraded);
        for volume in degraded.take(self.settings.metric_volumes) {
            page.add(&names::VOLUME_DEGRADED, &[volume.name.as_str()], 1_u64);
        }
    }

    /// The snapshots of all volumes, and those of the first volumes that have any, up to the limit of labels.
    fn add_snapshots(&self, page: &mut MetricPage) {
        let book = self.state();
        let of_volumes = book.snapshots.volumes(None);
        let counts: Vec<(&VolumeName, usize, usize)> = of_volumes
            .map(|(name, of)| {
                let count = |state| of.entries().filter(|it| it.record.state == state).count();
                let live = count(SnapshotState::Committed);
                (name, live, count(SnapshotState::Deleting))
            })
            .collect();
        let live: usize = counts.iter().map(|(_, live, _)| live).sum();
        let deleting: usize = counts.iter().map(|(_, _, deleting)| deleting).sum();
        page.add(&names::SNAPSHOTS, &["committed"], live);
        page.add(&names::SNAPSHOTS, &["deleting"], deleting);
        let shown = counts.iter().filter(|(_, live, _)| *live > 0);
        for (name, live, _) in shown.take(self.settings.metric_volumes) {
            page.add(&names::VOLUME_SNAPSHOTS, &[name.as_str()], *live);
        }
    }

    /// The schedules by health, and the ages of the first ones, up to the limit of labels.
    fn add_schedules(&self, page: &mut MetricPage) {
        let book = self.state();
        let counts = self.count_schedules(&book);
        for (health, count) in [
            ("ok", counts.ok),
            ("warning", counts.warning),
            ("critical", counts.critical),
            ("disabled", counts.disabled),
        ] {
            page.add(&names::SCHEDULES, &[health], count);
        }
        let shown = self.schedule_ages(&book);
        for (record, age_s) in shown.take(self.settings.metric_volumes) {
            page.add(&names::SCHEDULE_AGE, &[record.name.as_str()], age_s);
        }
    }

    /// The resyncs and the lag of the first volumes that have any, up to the limit of labels.
    fn add_replication(&self, page: &mut MetricPage) {
        let book = self.state();
        let records = book.replication_reports.keys();
        let records = records.filter_map(|name| book.volumes.get(name));
        let statuses = records.filter_map(|record| {
            let status = self.replication_status(&book, record)?;
            Some((&record.layout_state.layout.name, status))
        });
        for (name, status) in statuses.take(self.settings.metric_volumes) {
            add_replication_status(page, name.as_str(), &status);
        }
    }

    fn add_operations(&self, page: &mut MetricPage) {
        let bricks: Vec<_> = {
            let book = self.state();
            let bricks = book.bricks.iter();
            bricks
                .map(|(id, brick)| (*id, series_label(*id, brick.record.name.as_ref())))
                .collect()
        };
        let sums = self.figures.sums();
        page.add_operations(names::CLUSTER, &[], &sums.cluster);
        if sums.volumes.limit() > 0 {
            for (name, of) in sums.volumes.labelled() {
                page.add_operations(names::VOLUME, &[name.as_str()], of);
            }
            page.add_operations(names::VOLUME, &[names::OTHER], sums.volumes.others());
        }
        for (id, label) in bricks {
            if let Some(of) = sums.bricks.get(&id) {
                page.add_operations(names::BRICK, &[&label], &of.operations);
                if let Some(media) = of.media {
                    page.add_media(&names::BRICK_MEDIA, &[&label], media);
                }
            }
        }
    }

    /// The ages of the last reports: of any volume, and of attached volumes with a label.
    fn add_ages(&self, page: &mut MetricPage, volumes: &[VolumeInfo]) {
        let labelled: Vec<VolumeName> = {
            let sums = self.figures.sums();
            sums.volumes
                .labelled()
                .map(|(name, _)| name.clone())
                .collect()
        };
        let now = self.clock.elapsed();
        let history = self.figures.history();
        let age_s = |subject: &FigureSubject| {
            let age = now.saturating_sub(history.series(subject)?.heard());
            Some(age.as_secs_f64())
        };
        if let Some(age_s) = age_s(&FigureSubject::Cluster) {
            page.add_real(&names::FIGURES_AGE, &[], age_s);
        }
        let attached = volumes.iter().filter(|volume| volume.attached.is_some());
        for volume in attached.filter(|volume| labelled.binary_search(&volume.name).is_ok()) {
            if let Some(age_s) = age_s(&FigureSubject::Volume(volume.name.clone())) {
                page.add_real(&names::VOLUME_FIGURES_AGE, &[volume.name.as_str()], age_s);
            }
        }
    }
}

/// The label of a brick: its name, or else its whole id. The short id of messages need not be unique, and
/// Prometheus refuses a page with the same series twice.
fn series_label(id: BrickId, name: Option<&BrickName>) -> String {
    name.map_or_else(|| id.to_string(), BrickName::to_string)
}

fn add_brick(page: &mut MetricPage, brick: &BrickInfo) {
    let label = series_label(brick.brick, brick.name.as_ref());
    let labels = [label.as_str()];
    let durability = brick.durability.to_string();
    let placed = [&label, brick.domain.as_str(), &durability];
    page.add(&names::BRICK_UP, &placed, u64::from(brick.alive));
    if let Some(age_ms) = brick.heartbeat_age_ms {
        let age = Duration::from_millis(age_ms);
        page.add_real(&names::BRICK_HEARTBEAT_AGE, &labels, age.as_secs_f64());
    }
    page.add(&names::BRICK_CAPACITY, &labels, brick.capacity_bytes);
    page.add(&names::BRICK_USED, &labels, brick.used_bytes);
    page.add(&names::BRICK_PROVISIONED, &labels, brick.provisioned_bytes);
    page.add(&names::BRICK_SLICES, &labels, brick.slices);
    page.add(
        &names::BRICK_PENDING_DELETIONS,
        &labels,
        brick.pending_deletions,
    );
    page.add(&names::BRICK_SESSIONS, &labels, brick.sessions);
    for device in brick.devices.iter().flatten() {
        add_device(page, &label, device);
    }
    let Some(scrub) = &brick.scrub else {
        return;
    };
    let is_running = brick.alive && scrub.state == ScrubState::Running;
    page.add(&names::BRICK_SCRUB_RUNNING, &labels, u64::from(is_running));
    page.add(&names::BRICK_SCRUBS, &labels, scrub.passes);
    if let Some(ended_ms_ago) = scrub.ended_ms_ago {
        let age =
            Duration::from_millis(ended_ms_ago.saturating_add(brick.heartbeat_age_ms.unwrap_or(0)));
        page.add_real(&names::BRICK_SCRUB_AGE, &labels, age.as_secs_f64());
    }
    page.add(&names::BRICK_CORRECTED, &labels, scrub.corrected);
    page.add(&names::BRICK_DAMAGED, &labels, scrub.damaged());
}

fn add_device(page: &mut MetricPage, brick: &str, device: &BrickDevice) {
    let id = device.device.to_string();
    let labels = [brick, id.as_str()];
    page.add(&names::DEVICE_SIZE, &labels, device.size_bytes);
    page.add(&names::DEVICE_USED, &labels, device.used_bytes);
    let is_draining = device.state == DeviceState::Draining;
    page.add(&names::DEVICE_DRAINING, &labels, u64::from(is_draining));
    let has_failed = device.state == DeviceState::Failed;
    page.add(&names::DEVICE_FAILED, &labels, u64::from(has_failed));
    page.add(&names::DEVICE_ERRORS, &labels, device.errors);
    if let Some(drain) = &device.drain {
        page.add(&names::DEVICE_DRAIN_LEFT, &labels, drain.left_bytes);
        let is_blocked = drain.problem.is_some();
        page.add(&names::DEVICE_DRAIN_BLOCKED, &labels, u64::from(is_blocked));
    }
}

fn add_replication_status(page: &mut MetricPage, name: &str, status: &ReplicationStatus) {
    let labels = [name];
    if !status.resyncs.is_empty() {
        let sum = |of: fn(&ResyncProgress) -> u64| {
            status.resyncs.iter().map(of).fold(0, u64::saturating_add)
        };
        page.add(&names::VOLUME_RESYNC_TODO, &labels, sum(|it| it.bytes_todo));
        page.add(&names::VOLUME_RESYNC_DONE, &labels, sum(|it| it.bytes_done));
    }
    if let Some(lag) = status.lag {
        page.add(&names::VOLUME_LAG_BYTES, &labels, lag.bytes);
        // A client that is gone reports no more, and its last changes stay behind.
        let since_report_us = if lag.changes > 0 {
            status.reported_us_ago
        } else {
            0
        };
        let age = Duration::from_micros(lag.age_us.saturating_add(since_report_us));
        page.add_real(&names::VOLUME_LAG_AGE, &labels, age.as_secs_f64());
    }
}

fn add_volumes(page: &mut MetricPage, volumes: &[VolumeInfo]) {
    for (health, label) in [
        (VolumeHealth::InSync, "in-sync"),
        (VolumeHealth::Syncing, "syncing"),
        (VolumeHealth::Degraded, "degraded"),
    ] {
        let count = volumes
            .iter()
            .filter(|volume| volume.health == health)
            .count();
        page.add(&names::VOLUMES, &[label], count);
    }
    let count = |is: fn(&&VolumeInfo) -> bool| volumes.iter().filter(is).count();
    let attached = count(|volume| volume.attached.is_some());
    page.add(&names::VOLUMES_ATTACHED, &[], attached);
    let unreachable = count(|volume| volume.unreachable_legs > 0);
    page.add(&names::VOLUMES_UNREACHABLE, &[], unreachable);
}
