//! The last report of each volume that is served over NFS, and the orders to its server.

use crate::nfs_orders::NfsOrderTable;
use crate::wire::{NfsExport, NfsExportState};
use pagemesh_base::layout::{EpochNumber, VolumeName};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The last report of each served volume, and the orders to the servers.
#[derive(Default)]
pub(crate) struct NfsExports {
    reports: Mutex<BTreeMap<VolumeName, ReceivedNfs>>,
    pub(crate) orders: NfsOrderTable,
}

/// A report, and its sender.
pub(crate) struct ReceivedNfs {
    pub(crate) attachment: EpochNumber,
    pub(crate) at: Duration,
    pub(crate) export: NfsExportState,
}

impl NfsExports {
    pub(crate) fn reports(&self) -> MutexGuard<'_, BTreeMap<VolumeName, ReceivedNfs>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn remove(&self, volume: &VolumeName) {
        self.reports().remove(volume);
    }
}

impl ReceivedNfs {
    pub(crate) fn shown(&self, name: &VolumeName, now: Duration) -> NfsExport {
        let age = now.saturating_sub(self.at);
        NfsExport {
            volume: name.clone(),
            reported_ms_ago: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
            export: self.export.clone(),
        }
    }
}
