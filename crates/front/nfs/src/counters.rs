//! The counters of a server.

use crate::nfs3::Procedure;
use crate::nfs3::status::Status;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of procedures of NFSv3.
pub const NFS3_PROCEDURES: usize = Procedure::ALL.len();

/// The number of procedures with figures: the NFSv3 procedures, and COMPOUND.
pub const PROCEDURES: usize = NFS3_PROCEDURES + 1;

/// The place of COMPOUND, the procedure of NFSv4.1, after the procedures of NFSv3.
pub const COMPOUND: usize = NFS3_PROCEDURES;

/// The names of the procedures in lower case: NFSv3's by their numbers, and then COMPOUND.
pub const PROCEDURE_NAMES: [&str; PROCEDURES] = [
    "null",
    "getattr",
    "setattr",
    "lookup",
    "access",
    "readlink",
    "read",
    "write",
    "create",
    "mkdir",
    "symlink",
    "mknod",
    "remove",
    "rmdir",
    "rename",
    "link",
    "readdir",
    "readdirplus",
    "fsstat",
    "fsinfo",
    "pathconf",
    "commit",
    "compound",
];

/// The numbers of a server since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Connections that exist now.
    pub connections: usize,
    /// Connections accepted.
    pub accepted: u64,
    /// Connections closed at once, because there were too many.
    pub refused: u64,
    /// Connections ended because the client broke the protocol or stalled.
    pub violations: u64,
    /// Calls of NFSv3, by the number of the procedure.
    pub calls: [u64; NFS3_PROCEDURES],
    /// Requests of NFSv4.1.
    pub compounds: u64,
    /// Calls of MOUNT.
    pub mount_calls: u64,
    /// Calls refused before a procedure saw them: unknown programs and procedures, malformed
    /// arguments and credentials.
    pub refused_calls: u64,
    /// Calls that the server knew: a client sent them again. Those that change names or attributes
    /// got the reply of the first one.
    pub repeated_calls: u64,
    /// Calls of NFSv3 and MOUNT that ended with an error.
    pub errors: u64,
    /// Those among them with a fault of the storage or the server.
    pub faults: u64,
}

/// The counters as threads count them.
#[derive(Default)]
pub(crate) struct CounterCells {
    pub(crate) accepted: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) violations: AtomicU64,
    calls: [AtomicU64; NFS3_PROCEDURES],
    pub(crate) compounds: AtomicU64,
    pub(crate) mount_calls: AtomicU64,
    pub(crate) refused_calls: AtomicU64,
    pub(crate) repeated_calls: AtomicU64,
    pub(crate) errors: AtomicU64,
    faults: AtomicU64,
}

/// Counts one.
pub(crate) fn count(cell: &AtomicU64) {
    cell.fetch_add(1, Ordering::Relaxed);
}

impl CounterCells {
    /// Counts a call of a procedure with this number.
    pub(crate) fn count_call(&self, procedure: u32) {
        let cell = usize::try_from(procedure).ok();
        if let Some(cell) = cell.and_then(|number| self.calls.get(number)) {
            count(cell);
        }
    }

    /// Counts a call that fails.
    pub(crate) fn count_error(&self, status: Status) {
        count(&self.errors);
        let is_fault = matches!(status, Status::Io | Status::Jukebox | Status::ServerFault);
        if is_fault {
            count(&self.faults);
        }
    }

    pub(crate) fn read(&self, connections: usize) -> Counters {
        let value = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        Counters {
            connections,
            accepted: value(&self.accepted),
            refused: value(&self.refused),
            violations: value(&self.violations),
            calls: std::array::from_fn(|number| self.calls.get(number).map_or(0, value)),
            compounds: value(&self.compounds),
            mount_calls: value(&self.mount_calls),
            refused_calls: value(&self.refused_calls),
            repeated_calls: value(&self.repeated_calls),
            errors: value(&self.errors),
            faults: value(&self.faults),
        }
    }
}
