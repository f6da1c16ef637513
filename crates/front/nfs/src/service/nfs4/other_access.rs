//! Share reservations beside calls that have no state, as in NFSv3, and removed files that expired clients keep.
//!
//! Such a call costs one load of an atomic value while no open denies anything, or no file is open.

use super::Nfs4;
use crate::nfs3::status::Status;
use crate::nfs4::state::{IoAccess, NfsState};
use crate::service::snapshots::View;
use crate::service::{Failure, Target};
use pagemesh_fs::FileId;
use std::sync::atomic::{AtomicBool, Ordering};

/// The facts of the state that calls need without its lock. They change under the lock, before the reply to the request that changes them:
/// a call that a client sends after that reply sees the change.
#[derive(Debug, Default)]
pub(super) struct StateSummary {
    has_denials: AtomicBool,
    has_opens: AtomicBool,
}

impl StateSummary {
    /// It writes only changed values, so that the cache line stays shared.
    pub(super) fn update(&self, state: &NfsState) {
        for (kept, is_set) in [
            (&self.has_denials, state.has_denials()),
            (&self.has_opens, state.has_opens()),
        ] {
            if kept.load(Ordering::Relaxed) != is_set {
                kept.store(is_set, Ordering::Relaxed);
            }
        }
    }
}

impl Nfs4 {
    fn has_denials(&self) -> bool {
        self.summary.has_denials.load(Ordering::Relaxed)
    }

    fn has_opens(&self) -> bool {
        self.summary.has_opens.load(Ordering::Relaxed)
    }
}

impl Target<'_> {
    /// Fails with NFS3ERR_JUKEBOX if an open of a client of NFSv4.1 denies an access of NFSv3. The client then asks again until the open is
    /// closed, as with nfs-ganesha. Expired clients lose their state.
    pub(in crate::service) fn check_denials(&self, access: IoAccess) -> Result<(), Failure> {
        match self.view {
            View::Live => self.check_denials_of(self.id, access),
            View::Directory | View::Snapshot(_) => Ok(()),
        }
    }

    fn check_denials_of(&self, file: FileId, access: IoAccess) -> Result<(), Failure> {
        let nfs4 = &self.service.nfs4;
        if !nfs4.has_denials() {
            return Ok(());
        }
        let checked = nfs4.call(|locked, now| {
            let file = locked.key(self.export.volume, file);
            locked.state.check_io_without_state(file, access, now)
        });
        checked.map_err(|_| Status::Jukebox)?;
        // An expired client that has lost its open must not reclaim it after a crash.
        let stored = nfs4.lists.wait(self.export.volume);
        stored.map_err(|error| self.report(&error))
    }

    /// As [`Self::check_denials`], for a create of NFSv3 that truncates an existing file of this name.
    pub(in crate::service) fn check_truncation(&self, name: &[u8]) -> Result<(), Failure> {
        if !self.service.nfs4.has_denials() {
            return Ok(());
        }
        match self.find(name).result {
            Ok(attr) => self.check_denials_of(attr.file_id(), IoAccess::Write),
            // The create has the error.
            Err(_) => Ok(()),
        }
    }

    /// A name of a file is gone. Without a further name, expired clients that have the file open lose their state, so that its space is
    /// freed.
    pub(in crate::service) fn name_removed(&self, file: FileId) {
        self.export.pins.forget(file);
        let nfs4 = &self.service.nfs4;
        if !nfs4.has_opens() {
            return;
        }
        let attr = self.export.fs.attr_of(file);
        if attr.is_ok_and(|attr| attr.links > 0) {
            return;
        }
        nfs4.call(|locked, now| {
            let file = locked.key(self.export.volume, file);
            locked.state.file_removed(file, now);
        });
        self.export.drop_unused_pins();
    }
}
