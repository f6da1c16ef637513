//! Every metric: name, kind, labels and help text. The page `docs/reference/metrics.md` is generated from it.
//!
//! Invariants: a name has the base unit of its value (`_seconds`, `_bytes`), and `_total` if and only if it is a counter. A
//! metric of one program is never one of another, so that sums over all targets count nothing twice.

use super::page::OpMetrics;

/// The kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// A sum that starts at 0 with its program.
    Counter,
    /// A present value.
    Gauge,
    /// The distribution of a value, in cumulative buckets.
    Histogram,
}

impl MetricKind {
    /// The name in texts.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        }
    }
}

/// A metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its full name.
    pub name: &'static str,
    /// Its kind.
    pub kind: MetricKind,
    /// The names of its labels, in order.
    pub labels: &'static [&'static str],
    /// Its meaning.
    pub help: &'static str,
}

impl Metric {
    /// The name without the suffix of counters, which the encoder adds.
    pub(crate) fn name_of_family(&self) -> &'static str {
        self.name.strip_suffix("_total").unwrap_or(self.name)
    }
}

macro_rules! metrics {
    ($($id:ident $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(
            #[doc = $help]
            pub static $id: Metric = Metric {
                name: $name, kind: MetricKind::$kind, labels: &[$($label),*], help: $help,
            };
        )*
        /// All of them.
        pub const ALL: &[&Metric] = &[$(&$id),*];
    };
}

/// The metrics of the manager, at `GET /metrics` of its REST address.
pub mod manager {
    use super::{Metric, MetricKind, OpMetrics};

    metrics! {
        INFO Gauge "pagemesh_manager_info" ["version"] "The version of the manager, as a label; the value is 1.";
        STORE_FAILED Gauge "pagemesh_manager_store_failed" [] "Whether the store failed to write a change: 1 until the next start, and the manager takes no changes until then.";
        REQUESTS Counter "pagemesh_manager_requests_total" ["class"] "Requests that the manager answered, by the class of the status: `2xx`, `4xx`, and so on. A stream counts when it begins.";
        WATCH_STREAMS Gauge "pagemesh_manager_watch_streams" [] "Open streams of changes (`GET /api/v1/watch`).";
        CRITICAL_EVENTS Gauge "pagemesh_manager_unacknowledged_critical_events" [] "Critical events in the history that nobody has acknowledged.";
        BRICK_UP Gauge "pagemesh_brick_up" ["brick", "domain", "durability"] "Whether heartbeats of the brick arrive: 1, or 0 if it counts as dead.";
        BRICK_HEARTBEAT_AGE Gauge "pagemesh_brick_heartbeat_age_seconds" ["brick"] "Time since the last heartbeat; missing if none arrived since the manager started.";
        BRICK_CAPACITY Gauge "pagemesh_brick_capacity_bytes" ["brick"] "Bytes that slices can use in total.";
        BRICK_USED Gauge "pagemesh_brick_used_bytes" ["brick"] "Bytes in use, by the last heartbeat.";
        BRICK_PROVISIONED Gauge "pagemesh_brick_provisioned_bytes" ["brick"] "Bytes of all slices placed on the brick, written or not.";
        BRICK_SLICES Gauge "pagemesh_brick_slices" ["brick"] "Slices of volumes.";
        BRICK_PENDING_DELETIONS Gauge "pagemesh_brick_pending_deletions" ["brick"] "Slices of deleted volumes that the brick still holds.";
        BRICK_SESSIONS Gauge "pagemesh_brick_sessions" ["brick"] "Open sessions, by the last heartbeat.";
        BRICK_SCRUB_RUNNING Gauge "pagemesh_brick_scrub_running" ["brick"] "Whether a scrub of the pool is running.";
        BRICK_SCRUBS Counter "pagemesh_brick_scrubs_completed_total" ["brick"] "Scrubs of the pool that were completed since the brick started.";
        BRICK_SCRUB_AGE Gauge "pagemesh_brick_scrub_age_seconds" ["brick"] "Time since the last completed scrub; missing if the brick completed none.";
        BRICK_CORRECTED Counter "pagemesh_brick_scrub_corrected_total" ["brick"] "Structures that scrubs of the pool corrected since the brick started.";
        BRICK_DAMAGED Gauge "pagemesh_brick_scrub_damaged" ["brick"] "Structures that are still damaged, by the running scrub or else by the last one.";
        DEVICE_SIZE Gauge "pagemesh_brick_device_size_bytes" ["brick", "device"] "Size of a device of the pool, by its UUID; the first device has that of the pool.";
        DEVICE_USED Gauge "pagemesh_brick_device_used_bytes" ["brick", "device"] "Bytes in use on a device of the pool, by the last heartbeat.";
        DEVICE_DRAINING Gauge "pagemesh_brick_device_draining" ["brick", "device"] "Whether the data of a device moves to the pool's other devices: 1 or 0.";
        DEVICE_FAILED Gauge "pagemesh_brick_device_failed" ["brick", "device"] "Whether a device has failed, and the pool goes on without it: 1 or 0.";
        DEVICE_ERRORS Counter "pagemesh_brick_device_errors_total" ["brick", "device"] "Errors of a device after which the brick has opened its pool again, since the brick started.";
        DEVICE_DRAIN_LEFT Gauge "pagemesh_brick_device_drain_left_bytes" ["brick", "device"] "Bytes in use on a device that is draining.";
        DEVICE_DRAIN_BLOCKED Gauge "pagemesh_brick_device_drain_blocked" ["brick", "device"] "Whether a drain does not proceed, for the reason in `pagemesh pool device list`: 1 or 0.";
        BRICK_OPERATIONS Counter "pagemesh_brick_operations_total" ["brick", "kind"] "Requests over tcp that the brick answered and reported.";
        BRICK_BYTES Counter "pagemesh_brick_operation_bytes_total" ["brick", "kind"] "Bytes of these requests.";
        BRICK_MEDIA Counter "pagemesh_brick_media_written_bytes_total" ["brick", "kind"] "Bytes that the brick and the clients that map its pool wrote to its medium, as reported: `data`, `journal` or `tables`.";
        VOLUMES Gauge "pagemesh_volumes" ["health"] "Volumes, by the health of their legs.";
        VOLUMES_ATTACHED Gauge "pagemesh_volumes_attached" [] "Volumes that a client has attached.";
        VOLUMES_UNREACHABLE Gauge "pagemesh_volumes_with_unreachable_legs" [] "Volumes with a leg on a brick that counts as dead.";
        VOLUMES_UNUSABLE Gauge "pagemesh_volumes_without_reachable_copy" [] "Volumes with a column that has no in-sync leg on a brick that is alive.";
        SNAPSHOTS Gauge "pagemesh_manager_snapshots" ["state"] "Snapshots of all volumes: `committed`, or `deleting` while bricks still drop them.";
        SCHEDULES Gauge "pagemesh_manager_schedules" ["health"] "Schedules of snapshots: `ok`, `warning` or `critical` by the age of the newest snapshot of their latest volume, or `disabled`.";
        SCHEDULE_AGE Gauge "pagemesh_schedule_newest_snapshot_age_seconds" ["schedule"] "Age of the newest snapshot of the latest volume of the schedule; missing without volumes, and beyond the limit of labels.";
        PENDING_DELETIONS Gauge "pagemesh_pending_deletions" [] "Slices of deleted volumes that bricks still hold.";
        FIGURES_AGE Gauge "pagemesh_figures_age_seconds" [] "Time since any client of a volume reported its operations; missing if none did since the manager started.";
        OPERATIONS Counter "pagemesh_operations_total" ["kind"] "Operations that clients of volumes reported since the manager started.";
        BYTES Counter "pagemesh_operation_bytes_total" ["kind"] "Bytes of these operations.";
        LATENCY Histogram "pagemesh_operation_latency_seconds" ["kind"] "Latency of the timed ones of these operations: all over sockets, one of 64 on mapped pools.";
        STAGES Counter "pagemesh_operation_stage_seconds_total" ["kind", "stage"] "Time of the timed operations by stage; the stages add up to the latency.";
        VOLUME_OPERATIONS Counter "pagemesh_volume_operations_total" ["volume", "kind"] "Operations of one of the busiest volumes while it had this label, or of all others: `(other)`.";
        VOLUME_BYTES Counter "pagemesh_volume_operation_bytes_total" ["volume", "kind"] "Bytes of these operations.";
        VOLUME_LATENCY Histogram "pagemesh_volume_operation_latency_seconds" ["volume", "kind"] "Latency of the timed ones of these operations.";
        VOLUME_FIGURES_AGE Gauge "pagemesh_volume_figures_age_seconds" ["volume"] "Time since the client of one of the busiest volumes reported its operations, while it is attached.";
        VOLUME_DEGRADED Gauge "pagemesh_volume_degraded" ["volume"] "1 for a volume with a stale leg; missing for other volumes, and beyond the limit of labels.";
        VOLUME_SNAPSHOTS Gauge "pagemesh_volume_snapshots" ["volume"] "Snapshots of the volume; missing without any, and beyond the limit of labels.";
        VOLUME_RESYNC_TODO Gauge "pagemesh_volume_resync_todo_bytes" ["volume"] "Bytes that running resyncs copy or compare, as far as known; missing without a resync, and beyond the limit of labels.";
        VOLUME_RESYNC_DONE Gauge "pagemesh_volume_resync_done_bytes" ["volume"] "Bytes of these that are done.";
        VOLUME_LAG_BYTES Gauge "pagemesh_volume_replica_lag_bytes" ["volume"] "Bytes of changes that the asynchronous copy does not have yet; missing without such a copy, and beyond the limit of labels.";
        VOLUME_LAG_AGE Gauge "pagemesh_volume_replica_lag_seconds" ["volume"] "Time since the oldest of these changes was, or could have been, acknowledged.";
    }

    /// The label of the volumes without a label of their own. No volume has such a name.
    pub const OTHER: &str = "(other)";

    /// The operations of all volumes.
    pub const CLUSTER: OpMetrics = OpMetrics {
        operations: &OPERATIONS,
        bytes: &BYTES,
        latency: Some(&LATENCY),
        stages: Some(&STAGES),
    };
    /// The operations of a volume.
    pub const VOLUME: OpMetrics = OpMetrics {
        operations: &VOLUME_OPERATIONS,
        bytes: &VOLUME_BYTES,
        latency: Some(&VOLUME_LATENCY),
        stages: None,
    };
    /// The operations of a brick.
    pub const BRICK: OpMetrics = OpMetrics {
        operations: &BRICK_OPERATIONS,
        bytes: &BRICK_BYTES,
        latency: None,
        stages: None,
    };
}

/// The metrics of a brick's own process (`brick --metrics`).
pub mod pool {
    use super::{Metric, MetricKind, OpMetrics};

    metrics! {
        INFO Gauge "pagemesh_pool_info" ["brick", "version", "durability"] "The brick, its version and its durability class, as labels; the value is 1.";
        FAILED Gauge "pagemesh_pool_failed" [] "Whether the pool failed: 1 shortly before the brick ends.";
        CAPACITY Gauge "pagemesh_pool_capacity_bytes" [] "Bytes that slices can use in total.";
        USED Gauge "pagemesh_pool_used_bytes" [] "Bytes in use.";
        SESSIONS Gauge "pagemesh_pool_sessions" [] "Open sessions.";
        SCRUB_RUNNING Gauge "pagemesh_pool_scrub_running" [] "Whether a scrub of the pool is running.";
        SCRUB_PROGRESS Gauge "pagemesh_pool_scrub_progress_ratio" [] "The part of the running scrub that is done; missing without one.";
        SCRUBS Counter "pagemesh_pool_scrubs_completed_total" [] "Scrubs that were completed since the brick started.";
        SCRUB_AGE Gauge "pagemesh_pool_scrub_age_seconds" [] "Time since the last completed scrub; missing without one.";
        CORRECTED Counter "pagemesh_pool_scrub_corrected_total" [] "Structures that scrubs corrected since the brick started.";
        DAMAGED Gauge "pagemesh_pool_scrub_damaged" [] "Structures that are still damaged, by the running scrub or else by the last one.";
        MEDIA Counter "pagemesh_pool_media_written_bytes_total" ["kind"] "Bytes that the brick and the clients that map the pool wrote to its medium since the brick started: `data`, `journal` or `tables`.";
        CACHE_CAPACITY Gauge "pagemesh_pool_cache_capacity_bytes" [] "Bytes of data pages that the cache of a pool of class file-sync holds at most (`--memory-budget`). This metric and the others of the cache are missing for other classes.";
        CACHE_USED Gauge "pagemesh_pool_cache_used_bytes" [] "Bytes of data pages that the cache holds.";
        CACHE_DIRTY Gauge "pagemesh_pool_cache_dirty_pages" [] "Pages of the cache that are not on the disk yet.";
        CACHE_HITS Counter "pagemesh_pool_cache_hits_total" [] "Reads of pages that were in the cache.";
        CACHE_MISSES Counter "pagemesh_pool_cache_misses_total" [] "Pages that were loaded from the disk.";
        DISK_UNREADABLE Gauge "pagemesh_pool_disk_unreadable_pages" [] "Pages of the disk that could not be read since the brick started. At more than 64 the pool fails.";
        DISK_SLOW Counter "pagemesh_pool_disk_slow_requests_total" [] "Requests to the disk that took longer than 10 s. At 60 s the pool fails.";
        TIER_CAPACITY Gauge "pagemesh_pool_tier_capacity_bytes" ["tier"] "Bytes of frames in memory and on flash. This metric and the others of the tier are missing for pools without disks behind memory.";
        TIER_FREE Gauge "pagemesh_pool_tier_free_bytes" ["tier"] "Bytes of these frames that are free.";
        TIER_DEMOTED Counter "pagemesh_pool_tier_demoted_pages_total" [] "Pages that were moved to flash.";
        TIER_PROMOTED Counter "pagemesh_pool_tier_promoted_pages_total" [] "Pages that were moved to memory. A write moves a page without being counted.";
        TIER_ABANDONED Counter "pagemesh_pool_tier_abandoned_moves_total" [] "Pages that changed while they were copied, and stayed.";
        TIER_HITS Counter "pagemesh_pool_tier_hits_total" [] "Pages that reads over tcp found in memory.";
        TIER_MISSES Counter "pagemesh_pool_tier_misses_total" [] "Pages that reads over tcp found on flash.";
        TIER_WAITS Counter "pagemesh_pool_tier_waits_total" [] "How often a request waited for a page to leave memory.";
        REQUESTS Counter "pagemesh_pool_requests_total" ["kind"] "Requests over tcp that the brick answered. Clients that map the pool do not appear here.";
        BYTES Counter "pagemesh_pool_request_bytes_total" ["kind"] "Bytes of these requests.";
        LATENCY Histogram "pagemesh_pool_request_latency_seconds" ["kind"] "Time that the brick spent on these requests.";
        STAGES Counter "pagemesh_pool_stage_seconds_total" ["kind", "stage"] "Time of these requests by stage; the stages add up to the latency.";
    }

    /// The requests of the brick.
    pub const OPERATIONS: OpMetrics = OpMetrics {
        operations: &REQUESTS,
        bytes: &BYTES,
        latency: Some(&LATENCY),
        stages: Some(&STAGES),
    };
}

/// The metrics of a process with attached volumes (`export nbd --metrics`, `mount --metrics`).
pub mod client {
    use super::{Metric, MetricKind, OpMetrics};

    metrics! {
        INFO Gauge "pagemesh_client_info" ["version"] "The version of the program, as a label; the value is 1.";
        STATE Gauge "pagemesh_client_volume_state" ["volume", "state"] "1 for the present state of the volume, 0 for the others.";
        SIZE_BYTES Gauge "pagemesh_client_volume_size_bytes" ["volume"] "Bytes of the volume.";
        CHANNELS Gauge "pagemesh_client_channels" ["volume"] "Open channels: connections, or threads of a mount.";
        DIRECT_CLIENTS Gauge "pagemesh_client_direct_clients" ["volume"] "Processes on the direct path of a mount (exec, libpagemesh).";
        UNCOMMITTED_PAGES Gauge "pagemesh_client_uncommitted_pages" ["volume"] "Pages of acknowledged changes that a mount has not stored yet (`mount --commit-interval`); 0 without the option.";
        UNCOMMITTED_AGE Gauge "pagemesh_client_uncommitted_age_seconds" ["volume"] "Time since the oldest of these changes; 0 without one.";
        LEGS Gauge "pagemesh_client_legs" ["volume", "state"] "Legs of all columns, by their state.";
        RESYNC_TODO Gauge "pagemesh_client_resync_todo_bytes" ["volume"] "Bytes that running resyncs copy or compare, as far as known; 0 without a resync.";
        RESYNC_DONE Gauge "pagemesh_client_resync_done_bytes" ["volume"] "Bytes of these that are done.";
        LAG_BYTES Gauge "pagemesh_client_replica_lag_bytes" ["volume"] "Bytes of changes that asynchronous copies do not have yet.";
        LEGS_LOST Counter "pagemesh_client_legs_lost_total" ["volume"] "Legs lost.";
        LEGS_RETURNED Counter "pagemesh_client_legs_returned_total" ["volume"] "Legs that completed a resync.";
        READS_REDIRECTED Counter "pagemesh_client_reads_redirected_total" ["volume"] "Reads that went to another leg after an error.";
        READS_HEDGED Counter "pagemesh_client_reads_hedged_total" ["volume"] "Late reads that were asked of a second leg.";
        PAGES_REPAIRED Counter "pagemesh_client_pages_repaired_total" ["volume"] "Damaged pages rewritten from another leg.";
        REPAIRS_FAILED Counter "pagemesh_client_repairs_failed_total" ["volume"] "Repairs that did not work out.";
        REQUESTS_FAILED Counter "pagemesh_client_requests_failed_total" ["volume"] "Requests that were answered with an error. The other metrics of operations leave them out.";
        PAGES_SCRUBBED Counter "pagemesh_client_pages_scrubbed_total" ["volume"] "Pages that scrubs have read on all in-sync legs.";
        RESYNCED_BYTES Counter "pagemesh_client_resynced_bytes_total" ["volume"] "Bytes copied by resyncs.";
        OPS Counter "pagemesh_client_operations_total" ["volume", "kind"] "Operations of all channels and of direct clients.";
        BYTES Counter "pagemesh_client_operation_bytes_total" ["volume", "kind"] "Bytes of these operations.";
        LATENCY Histogram "pagemesh_client_operation_latency_seconds" ["volume", "kind"] "Latency of the timed ones of these operations: all over sockets, one of 64 on mapped pools.";
        STAGES Counter "pagemesh_client_stage_seconds_total" ["volume", "kind", "stage"] "Time of the timed operations by stage; the stages add up to the latency.";
    }

    /// The operations of a volume.
    pub const OPERATIONS: OpMetrics = OpMetrics {
        operations: &OPS,
        bytes: &BYTES,
        latency: Some(&LATENCY),
        stages: Some(&STAGES),
    };
}

/// The metrics of an NFS server, beside the metrics of its volumes (`serve nfs --metrics`). Calls without an export, as requests of
/// NFSv4.1 about a session alone, have an empty label `export`.
pub mod nfs {
    use super::{Metric, MetricKind};

    metrics! {
        STANDBY Gauge "pagemesh_nfs_standby" [] "Whether the process waits to take its file systems over: 1, or 0.";
        MANAGER_SILENCE Gauge "pagemesh_nfs_standby_manager_silence_seconds" [] "Time for which the manager has not answered a standby that waits, or 0.";
        CONNECTIONS Gauge "pagemesh_nfs_connections" ["state"] "Connections: `established` with a call so far, `half-open` without one.";
        HELD_BYTES Gauge "pagemesh_nfs_held_bytes" [] "Bytes of incomplete calls, and of replies that clients have not taken.";
        DROPPED_REPETITIONS Counter "pagemesh_nfs_dropped_repetitions_total" [] "Repetitions of running calls that got no reply, because too many waited.";
        CALLS Counter "pagemesh_nfs_calls_total" ["export", "procedure"] "Calls that got a reply. Each request of NFSv4.1 is one call of the procedure `compound`. It counts for the file system of the last file that it worked on.";
        ERRORS Counter "pagemesh_nfs_errors_total" ["export", "procedure"] "Those among them with an error.";
        RECEIVED_BYTES Counter "pagemesh_nfs_received_bytes_total" ["export", "procedure"] "Bytes of these calls.";
        SENT_BYTES Counter "pagemesh_nfs_sent_bytes_total" ["export", "procedure"] "Bytes of the replies.";
        LATENCY Histogram "pagemesh_nfs_latency_seconds" ["export", "procedure"] "Time from a whole call to its reply; bounds are 1 µs and its doubles up to 8 s.";
        QUEUE_TIME Counter "pagemesh_nfs_queue_seconds_total" ["export", "procedure"] "The part of this time in the queue of the export.";
        WORKERS Gauge "pagemesh_nfs_workers" ["export"] "Threads for calls of the export.";
        WORKERS_MOST Gauge "pagemesh_nfs_workers_most" ["export"] "The most such threads so far.";
        WORKERS_LIMIT Gauge "pagemesh_nfs_workers_limit" ["export"] "The most such threads that are allowed: the share of the export.";
        WORKERS_BLOCKED Gauge "pagemesh_nfs_workers_blocked" ["export"] "Those of them that wait for the volume or a lock.";
        WORKERS_REASON Gauge "pagemesh_nfs_workers_reason" ["export", "reason"] "1 for the reason of the last change of their number, 0 for the others.";
        RUNNING Gauge "pagemesh_nfs_running_calls" ["export"] "Calls that run.";
        QUEUED Gauge "pagemesh_nfs_queued_calls" ["export"] "Calls that wait for a worker.";
        WAITING_CONNECTIONS Gauge "pagemesh_nfs_waiting_connections" ["export"] "Connections that are not read, because the queue of the export has no room.";
        REFUSED Counter "pagemesh_nfs_refused_calls_total" ["export"] "Calls that a stalled export refused with NFS3ERR_JUKEBOX; clients try again.";
        GRACE_LEFT Gauge "pagemesh_nfs_grace_seconds_left" [] "Seconds until the grace period of NFSv4.1 ends, if no reclaim extends it; 0 after its end.";
        GRACE_CLIENTS Gauge "pagemesh_nfs_grace_clients" [] "Clients that may still reclaim state of before the start of the server.";
        LISTED_CLIENTS Gauge "pagemesh_nfs_listed_clients" ["export"] "Clients of NFSv4.1 that may reclaim their state after a restart.";
        LIST_RECORDS Counter "pagemesh_nfs_list_records_total" ["export"] "Records of the stable list of clients since the start of the server.";
        LIST_UNWRITTEN Gauge "pagemesh_nfs_list_records_unwritten" ["export"] "Records of the stable list of clients that are not durable yet.";
        CLIENTS Gauge "pagemesh_nfs_clients" ["lease"] "Clients of NFSv4.1 by their lease: `unconfirmed` without a session so far, `active`, and `expired` ones that keep their state until another client needs it.";
        SESSIONS Gauge "pagemesh_nfs_sessions" [] "Sessions of NFSv4.1.";
        OPENS Gauge "pagemesh_nfs_opens" [] "Opens of files by clients of NFSv4.1.";
        LOCKED_RANGES Gauge "pagemesh_nfs_locked_ranges" [] "Byte ranges that clients of NFSv4.1 have locked.";
        REMOVED_CLIENTS Counter "pagemesh_nfs_removed_clients_total" ["reason"] "Clients of NFSv4.1 that the server has removed with their state. Expired ones: `command` by an operator, `lease` without state, `conflict` because another client needed a file or range, `courtesy` after 24 h, `limit` for want of room. Others: `destroyed` by themselves, `replaced` by a restarted client, `unconfirmed` without a session.";
        REPLY_BYTES Gauge "pagemesh_nfs_session_reply_bytes" ["state"] "Bytes of replies for repeated requests of sessions: `kept` ones, and those that sessions have `reserved`.";
        STALLED Gauge "pagemesh_nfs_stalled" ["export"] "Whether calls run, and none has ended for a second: 1, or 0.";
        FENCED Gauge "pagemesh_nfs_fenced" ["export"] "Whether another client has the volume, so that calls are refused: 1, or 0.";
    }
}

/// All metrics, by the program that has them.
pub const PROGRAMS: [(&str, &[&Metric]); 4] = [
    ("The manager", manager::ALL),
    ("A brick", pool::ALL),
    ("An export or a mount", client::ALL),
    ("An NFS server", nfs::ALL),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_follow_the_conventions_of_prometheus() {
        let mut names = BTreeSet::new();
        for metric in PROGRAMS.iter().flat_map(|(_, metrics)| *metrics) {
            let name = metric.name;
            assert!(names.insert(name), "{name} is there twice");
            assert!(name.starts_with("pagemesh_"), "{name}");
            let is_name = |it: u8| it.is_ascii_lowercase() || it == b'_';
            assert!(name.bytes().all(is_name), "{name}");
            let is_counter = metric.kind == MetricKind::Counter;
            assert_eq!(name.ends_with("_total"), is_counter, "{name}");
            for unit in ["_ns", "_us", "_ms", "_percent", "_kib", "_mib"] {
                assert!(!name.contains(&format!("{unit}_")) && !name.ends_with(unit));
            }
            assert!(metric.help.ends_with('.'), "{name}: {}", metric.help);
            assert!(!metric.labels.contains(&"le"), "{name}");
        }
    }
}
