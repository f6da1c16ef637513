//! JSON bodies of NFS exports: the state of a server, as the process that has the volume attached reports it.

use pagemesh_base::layout::{EpochNumber, VolumeName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Most entries in each list of a report.
pub const NFS_LIST_MAX: usize = 256;
/// Most bytes of each text of a report.
pub const NFS_TEXT_BYTES_MAX: usize = 1024;

/// The state of the NFS export of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportNfs {
    /// The epoch that the attach returned.
    #[schema(value_type = u32)]
    pub attachment: EpochNumber,
    /// The state. None: the server ends.
    pub export: Option<NfsExportState>,
}

/// A file system behind an NFS server: its clients, and the operations of the last step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NfsExportState {
    /// The addresses that the server listens on, as `host:port`.
    #[schema(max_items = 256)]
    pub addresses: Vec<String>,
    /// The paths that clients mount, with their rules.
    #[schema(max_items = 256)]
    pub paths: Vec<NfsPath>,
    /// Clients that are connected to the server, the busiest first. At most 256.
    #[schema(max_items = 256)]
    pub clients: Vec<NfsClient>,
    /// All clients that are connected to the server.
    pub clients_total: u64,
    /// The procedures and operations with calls in the step.
    #[schema(max_items = 256)]
    pub operations: Vec<NfsOperation>,
    /// The length of the step in milliseconds.
    pub step_ms: u64,
    /// The threads that carry out calls.
    pub workers: NfsWorkers,
    /// The grace period after a start of the server, while it lasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace: Option<NfsGrace>,
    /// Clients of NFSv4.1 in the stable list of the file system: they may reclaim their state after a restart of the server.
    #[serde(default)]
    pub listed_clients: u64,
    /// Records of the stable list that are not durable yet.
    #[serde(default)]
    pub unwritten_records: u64,
}

/// The grace period of NFSv4.1: clients may only reclaim their state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NfsGrace {
    /// Seconds until it ends, if no reclaim extends it.
    pub left_s: u64,
    /// Clients that may still reclaim.
    pub clients: u64,
}

/// A path that clients mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NfsPath {
    /// The path.
    pub path: String,
    /// The rules, as in an exports file: `10.0.0.0/8(rw,root_squash)`.
    #[schema(max_items = 256)]
    pub rules: Vec<String>,
}

/// A client of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NfsClient {
    /// Its IP address.
    pub address: String,
    /// Its connections.
    pub connections: u64,
    /// Its calls since it connected.
    pub calls: u64,
    /// Seconds since its last call.
    pub idle_s: u64,
}

/// The calls of a procedure or operation in the step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NfsOperation {
    /// Its name in the RFC: `READDIRPLUS`.
    pub name: String,
    /// Calls.
    pub calls: u64,
    /// Calls that ended with an error.
    pub errors: u64,
    /// The mean time from the call to its reply, in nanoseconds.
    pub mean_ns: u64,
    /// The median.
    pub p50_ns: u64,
    /// The 99th percentile.
    pub p99_ns: u64,
}

/// The workers of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NfsWorkers {
    /// Threads now.
    pub threads: u64,
    /// The hard limit of threads.
    pub threads_max: u64,
    /// Threads in a call that wait for the storage or a lock.
    pub blocked: u64,
    /// Calls that wait for a thread.
    pub queued: u64,
    /// The mean wait of the calls of the step for a thread, in nanoseconds.
    pub mean_wait_ns: u64,
    /// Whether calls run, and none has ended for a second.
    pub stalled: bool,
    /// The reason of the last change of the number of threads. Empty: it never changed.
    pub last_change: String,
}

/// The NFS export of a volume, with the age of its report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NfsExport {
    /// The volume.
    #[schema(value_type = crate::api::document::Name)]
    pub volume: VolumeName,
    /// Milliseconds since the last report. A server reports each 10 s.
    pub reported_ms_ago: u64,
    /// The state.
    pub export: NfsExportState,
}
