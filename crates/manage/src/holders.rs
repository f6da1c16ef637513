//! The signs of life of clients that have attached volumes.
//!
//! A mount reports that it lives, and that it is ending. So the next mount of the file system waits
//! for one that still stores data, and does not take the file system from one that serves programs.
//! Invariant: memory alone holds the signs, and only those of the present attachment count. They fence no
//! client and permit none to write; the epochs do.

use crate::fault::Fault;
use crate::holder_signs::TrackedHolder;
use crate::manager::{HEARTBEAT_INTERVAL, Manager};
use crate::volumes::check_attachment;
use crate::wire::{HolderSign, HolderStatus, ReportHolder};
use pagemesh_base::layout::VolumeName;
use std::time::Duration;

/// The time between two signs of life of a mount: as between heartbeats of a brick.
pub const SIGN_INTERVAL: Duration = HEARTBEAT_INTERVAL;
/// A client without a sign of life for this long counts as gone: four are missing.
pub const SILENCE_LIMIT: Duration = Duration::from_secs(10);

impl Manager {
    /// Takes a sign of life of the client that has attached a volume.
    ///
    /// # Errors
    /// When there is no such volume, or another client has attached it.
    pub fn report_holder(&self, name: &VolumeName, report: ReportHolder) -> Result<(), Fault> {
        let mut book = self.state();
        check_attachment(name, book.volume(name)?, Some(report.attachment))?;
        let now = self.clock.elapsed();
        let count = match book.holders.get(name) {
            Some(known) if known.attachment == report.attachment => known.sign.count,
            _ => 0,
        };
        let sign = HolderSign {
            count: count + 1,
            ending: report.ending,
        };
        let holder = TrackedHolder {
            attachment: report.attachment,
            received_at: now,
            sign,
        };
        book.holders.insert(name.clone(), holder);
        Ok(())
    }

    /// The client that has attached a volume, and its signs of life.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn holder(&self, name: &VolumeName) -> Result<HolderStatus, Fault> {
        let book = self.state();
        let attached = book.volume(name)?.attachment.clone();
        let is_present = |known: &&TrackedHolder| {
            let present = attached.as_ref().map(|it| it.epoch);
            present == Some(known.attachment)
        };
        let known = book.holders.get(name).filter(is_present);
        let heard_at = known.map_or(self.started_at, |known| known.received_at);
        let silence = self.clock.elapsed().saturating_sub(heard_at);
        Ok(HolderStatus {
            sign: known.map(|known| known.sign),
            silent_us: u64::try_from(silence.as_micros()).unwrap_or(u64::MAX),
            attached,
        })
    }
}
