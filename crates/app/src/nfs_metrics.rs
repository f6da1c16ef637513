//! The metrics of an NFS server.

use crate::metrics_pages::client_page;
use crate::standby::StandbyState;
use pagemesh_base::layout::VolumeName;
use pagemesh_metrics::MetricPage;
use pagemesh_metrics::catalogue::nfs;
use pagemesh_nfs::nfs4::state::{RemovalReason, StateCounts};
use pagemesh_nfs::{
    CallFigures, ExportFigures, Figures, Nfs4Status, PROCEDURE_NAMES, Server, SizingReason,
    latency_bound,
};
use pagemesh_volume::Volume;
use std::sync::{OnceLock, Weak};
use std::time::Instant;

/// The parts of a process that its metrics show, once they are there.
#[derive(Default)]
pub struct ShownServer {
    pub standby: StandbyState,
    pub volumes: OnceLock<Vec<(VolumeName, Weak<Volume>)>>,
    pub server: OnceLock<Weak<Server>>,
}

/// The metrics of the standby, the volumes and the server.
pub fn page(shown: &ShownServer) -> MetricPage {
    let volumes = shown.volumes.get().map(Vec::as_slice);
    let mut page = client_page(volumes.unwrap_or_default());
    let standby = shown.standby.figures(Instant::now());
    page.add(&nfs::STANDBY, &[], u64::from(standby.is_waiting));
    let silence = standby.manager_silence.as_secs_f64();
    page.add_real(&nfs::MANAGER_SILENCE, &[], silence);
    if let Some(server) = shown.server.get().and_then(Weak::upgrade) {
        add(&mut page, &server.figures());
        add_nfs4(&mut page, &server.nfs4_status());
    }
    page
}

fn add(page: &mut MetricPage, figures: &Figures) {
    let established = figures.connections - figures.half_open.min(figures.connections);
    page.add(&nfs::CONNECTIONS, &["established"], established);
    page.add(&nfs::CONNECTIONS, &["half-open"], figures.half_open);
    page.add(&nfs::HELD_BYTES, &[], figures.held_bytes);
    page.add(&nfs::DROPPED_REPETITIONS, &[], figures.dropped_repetitions);
    for export in &figures.exports {
        add_export(page, export);
    }
}

fn add_nfs4(page: &mut MetricPage, status: &Nfs4Status) {
    let grace = status.grace;
    page.add(
        &nfs::GRACE_LEFT,
        &[],
        grace.map_or(0, |it| it.left.as_secs()),
    );
    page.add(&nfs::GRACE_CLIENTS, &[], grace.map_or(0, |it| it.clients));
    add_counts(page, &status.counts);
    for (reason, removed) in RemovalReason::ALL.iter().zip(status.removals) {
        page.add(&nfs::REMOVED_CLIENTS, &[reason.name()], removed);
    }
    for list in &status.lists {
        let labels = [list.file_system.as_str()];
        page.add(&nfs::LISTED_CLIENTS, &labels, list.clients);
        page.add(&nfs::LIST_RECORDS, &labels, list.records);
        page.add(&nfs::LIST_UNWRITTEN, &labels, list.unwritten);
    }
}

fn add_counts(page: &mut MetricPage, counts: &StateCounts) {
    let (unconfirmed, expired) = (counts.unconfirmed_clients, counts.courtesy_clients);
    let active = counts.clients - unconfirmed - expired;
    for (lease, clients) in [
        ("unconfirmed", unconfirmed),
        ("active", active),
        ("expired", expired),
    ] {
        page.add(&nfs::CLIENTS, &[lease], clients);
    }
    page.add(&nfs::SESSIONS, &[], counts.sessions);
    page.add(&nfs::OPENS, &[], counts.opens);
    page.add(&nfs::LOCKED_RANGES, &[], counts.ranges);
    page.add(&nfs::REPLY_BYTES, &["kept"], counts.cached_bytes);
    let reserved = counts.cached_bytes_reserved;
    page.add(&nfs::REPLY_BYTES, &["reserved"], reserved);
}

fn add_export(page: &mut MetricPage, figures: &ExportFigures) {
    let export = figures.export.as_deref().unwrap_or_default();
    for (procedure, calls) in PROCEDURE_NAMES.iter().zip(&figures.procedures) {
        // A procedure without a call has no series.
        if calls.calls > 0 {
            add_calls(page, [export, procedure], calls);
        }
    }
    let labels = [export];
    page.add(&nfs::WORKERS, &labels, figures.workers);
    page.add(&nfs::WORKERS_MOST, &labels, figures.workers_most);
    page.add(&nfs::WORKERS_LIMIT, &labels, figures.workers_max);
    page.add(&nfs::WORKERS_BLOCKED, &labels, figures.blocked);
    if let Some(reason) = figures.last_change {
        let reasons = SizingReason::ALL.map(SizingReason::name);
        page.add_state(&nfs::WORKERS_REASON, &labels, &reasons, reason.name());
    }
    page.add(&nfs::RUNNING, &labels, figures.running);
    page.add(&nfs::QUEUED, &labels, figures.queued);
    page.add(
        &nfs::WAITING_CONNECTIONS,
        &labels,
        figures.waiting_connections,
    );
    page.add(&nfs::REFUSED, &labels, figures.refused);
    page.add(&nfs::STALLED, &labels, u64::from(figures.is_stalled));
    page.add(&nfs::FENCED, &labels, u64::from(figures.is_fenced));
}

fn add_calls(page: &mut MetricPage, labels: [&str; 2], calls: &CallFigures) {
    page.add(&nfs::CALLS, &labels, calls.calls);
    page.add(&nfs::ERRORS, &labels, calls.errors);
    page.add(&nfs::RECEIVED_BYTES, &labels, calls.bytes_received);
    page.add(&nfs::SENT_BYTES, &labels, calls.bytes_sent);
    let bound = |bucket| latency_bound(bucket).map_or(f64::INFINITY, |it| it.as_secs_f64());
    let buckets = calls.latency.iter().enumerate();
    let buckets = buckets.map(|(bucket, count)| (bound(bucket), *count));
    let seconds = calls.time.as_secs_f64();
    page.add_histogram(&nfs::LATENCY, &labels, seconds, buckets.collect());
    page.add_real(&nfs::QUEUE_TIME, &labels, calls.queue_time.as_secs_f64());
}
