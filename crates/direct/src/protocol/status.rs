//! The status of a mount's direct clients, as JSON: the answer to
//! [`ClientRequest::GetStatus`](crate::protocol::wire::ClientRequest::GetStatus), for `pagemesh
//! mount status`.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The status of a mount's direct path, as the mount's process reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectStatus {
    /// Why direct access is disabled at the moment; none: it is enabled.
    pub closed: Option<String>,
    /// Rows in use: threads of clients.
    #[serde(alias = "rows")]
    pub rows_taken: usize,
    /// Files on the direct path at the moment, by inode.
    pub files: Vec<u64>,
    /// How often processes or files were refused, by reason, since the mount began.
    pub refused: BTreeMap<String, u64>,
    /// Direct clients, by process number.
    pub processes: Vec<ClientStatus>,
    /// The clients that the mount killed last.
    pub killed: Vec<KilledClient>,
}

/// A direct client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Its process number.
    pub pid: i32,
    /// Its name, proc(5).
    pub name: String,
    /// When it connected first, in seconds since 1970.
    #[serde(alias = "since")]
    pub connected_at: u64,
    /// Operations that went directly.
    pub direct: u64,
    /// Operations on files that the library knows, by the kernel.
    pub kernel: u64,
    /// Operations by the kernel, by reason.
    pub reasons: BTreeMap<String, u64>,
    /// File by file.
    pub files: Vec<FileUsage>,
}

/// The counts of a direct client for a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileUsage {
    /// Its inode; 0: all files beyond those with counters of their own.
    pub ino: u64,
    /// Operations that went directly.
    pub direct: u64,
    /// Operations by the kernel.
    pub kernel: u64,
    /// Operations by the kernel, by reason.
    pub reasons: BTreeMap<String, u64>,
}

/// A client that was killed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KilledClient {
    /// Its process number.
    pub pid: i32,
    /// Its name.
    pub name: String,
    /// When, in seconds since 1970.
    pub at: u64,
    /// Why.
    #[serde(alias = "why")]
    pub reason: String,
}
