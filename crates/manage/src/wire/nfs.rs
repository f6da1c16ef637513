//! JSON bodies of NFS exports: the state of a server, as the process that has the volume attached reports it.

use pagemesh_base::layout::{EpochNumber, VolumeName};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use utoipa::ToSchema;

/// Most entries in each list of a report.
pub const NFS_LIST_MAX: usize = 256;
/// Most bytes of each text of a report.
pub const NFS_TEXT_BYTES_MAX: usize = 1024;

/// Most orders to one server at a time: more are no longer the work of a person.
pub const NFS_ORDERS_MAX: usize = 16;

/// The state of the NFS export of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportNfs {
    /// The epoch that the attach returned.
    #[schema(value_type = u32)]
    pub attachment: EpochNumber,
    /// The state. None: the server ends.
    pub export: Option<NfsExportState>,
    /// The results of orders to expire clients.
    #[serde(default)]
    #[schema(max_items = 16)]
    pub expiries: Vec<NfsExpiry>,
}

/// The id of a client of NFSv4.1: 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Nfs4ClientId(pub u64);

/// A text is not the id of a client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the id of an NFS client has 16 hexadecimal digits; list them with: pagemesh nfs clients")]
pub struct BadNfs4ClientId;

impl FromStr for Nfs4ClientId {
    type Err = BadNfs4ClientId;

    fn from_str(text: &str) -> Result<Nfs4ClientId, BadNfs4ClientId> {
        let is_id = text.len() == 16 && text.bytes().all(|it| it.is_ascii_hexdigit());
        let number = is_id.then(|| u64::from_str_radix(text, 16).ok()).flatten();
        number.map(Nfs4ClientId).ok_or(BadNfs4ClientId)
    }
}

impl TryFrom<String> for Nfs4ClientId {
    type Error = BadNfs4ClientId;

    fn try_from(text: String) -> Result<Nfs4ClientId, BadNfs4ClientId> {
        text.parse()
    }
}

impl fmt::Display for Nfs4ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl From<Nfs4ClientId> for String {
    fn from(id: Nfs4ClientId) -> String {
        id.to_string()
    }
}

/// The orders of the manager to an NFS server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NfsOrders {
    /// Clients that the server expires. It answers in a report.
    #[schema(value_type = Vec<String>, max_items = 16)]
    pub expire: Vec<Nfs4ClientId>,
}

/// The answer to an order to expire a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NfsExpiry {
    /// The client.
    #[schema(value_type = String)]
    pub client: Nfs4ClientId,
    /// The result.
    pub result: NfsExpiryResult,
}

/// The result of an order to expire a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum NfsExpiryResult {
    /// The client has lost this state, and cannot reclaim it.
    Expired(LostNfsState),
    /// The server has no such client.
    Unknown,
    /// Requests in progress hold the state of the client: their number.
    Running(u64),
    /// The client has lost its state, but the stable list still has its right to reclaim it.
    Unwritten,
}

/// The state that an expired client has lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LostNfsState {
    /// Opens.
    pub opens: u64,
    /// Locked byte ranges.
    pub locks: u64,
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
    /// Clients of NFSv4.1 that have got state in this file system, or in none so far, the ones with the most locks first, then with the most
    /// opens. At most 256.
    #[serde(default)]
    #[schema(max_items = 256)]
    pub nfs4_clients: Vec<Nfs4Client>,
    /// All these clients.
    #[serde(default)]
    pub nfs4_clients_total: u64,
}

/// A client of NFSv4.1. Its numbers are of all file systems of the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Nfs4Client {
    /// Its id.
    #[schema(value_type = String)]
    pub client: Nfs4ClientId,
    /// The address of its last request, as `host:port`.
    pub address: String,
    /// Its name for itself (`co_ownerid`), with escapes such as `\\x00`. A longer one ends with `...`.
    pub name: String,
    /// The minor version of its protocol.
    pub minor_version: u32,
    /// Its lease.
    pub lease: Nfs4Lease,
    /// Seconds since it renewed its lease last.
    pub renewed_s: u64,
    /// Whether it may still reclaim state of before a restart of the server.
    pub is_reclaiming: bool,
    /// Sessions.
    pub sessions: u64,
    /// Requests in progress.
    pub running: u64,
    /// Opens.
    pub opens: u64,
    /// Locked byte ranges.
    pub locks: u64,
    /// The file systems in which it has got state.
    #[schema(max_items = 256)]
    pub file_systems: Vec<String>,
}

/// The lease of a client of NFSv4.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Nfs4Lease {
    /// The client has no session yet.
    Unconfirmed,
    /// The lease runs.
    Active,
    /// The lease is over. The client keeps its state until another client needs it.
    Expired,
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
    /// Its name in the RFC: `READDIRPLUS`. Each request of NFSv4.1 is one call of `COMPOUND`.
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
