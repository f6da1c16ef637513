//! A snapshot that its caller makes step by step. It is for programs with a loop of their own and for simulations:
//! [`Manager::create_snapshot`] waits for the client on a thread.

use super::{Attempt, Reservation, SnapshotFault};
use crate::fault::Fault;
use crate::manager::Manager;
use crate::records::Attachment;
use crate::snapshots::PollState;
use crate::wire::{CreateSnapshot, CutOrder, SnapshotInfo};
use pagemesh_base::layout::{BrickId, EpochNumber, SliceId, VolumeName};
use std::time::Instant;

/// A snapshot that is being made: its epoch is reserved, and the order for the client is placed. A restarted manager gives
/// it up.
#[must_use = "only `Manager::end_snapshot` ends it"]
pub struct SnapshotCut {
    volume: VolumeName,
    epoch: EpochNumber,
    layout_epoch: EpochNumber,
    attachment: Option<Attachment>,
    legs: Vec<(BrickId, SliceId)>,
    has_replica: bool,
    /// The change of the volume that prevented the order.
    change: Option<String>,
}

impl SnapshotCut {
    /// The reserved epoch.
    #[must_use]
    pub fn epoch(&self) -> EpochNumber {
        self.epoch
    }

    /// The epoch that names the attachment of the client with the order; none if the manager prepares the legs.
    #[must_use]
    pub fn attachment(&self) -> Option<EpochNumber> {
        self.attachment.as_ref().map(|it| it.epoch)
    }
}

impl Manager {
    /// Reserves the epoch of a snapshot, and orders the cut.
    ///
    /// # Errors
    /// As [`Manager::create_snapshot`] before the cut.
    pub fn begin_snapshot(
        &self,
        volume: &VolumeName,
        request: &CreateSnapshot,
    ) -> Result<SnapshotCut, Fault> {
        super::check_labels(&request.labels)?;
        let mut cut = self.reserve(volume, request)?;
        let attachment = cut.attachment.clone();
        let change = attachment.and_then(|attachment| self.place_order(&cut, &attachment));
        // The caller ends it now.
        cut.is_committed = true;
        Ok(SnapshotCut {
            volume: cut.volume.clone(),
            epoch: cut.epoch,
            layout_epoch: cut.layout_epoch,
            attachment: cut.attachment.clone(),
            legs: std::mem::take(&mut cut.legs),
            has_replica: cut.has_replica,
            change,
        })
    }

    /// The order for the client of an attachment, if there is one.
    ///
    /// # Errors
    /// When there is no such volume, or the attachment is over.
    pub fn cut_order(
        &self,
        volume: &VolumeName,
        attachment: EpochNumber,
    ) -> Result<Option<CutOrder>, Fault> {
        Ok(match self.poll_cut(volume, attachment, None)? {
            PollState::Order(epoch, step) => Some(CutOrder { epoch, step }),
            PollState::Wait(number, _) => {
                self.cut_orders.end_poll(volume, number);
                None
            }
            PollState::Replaced => None,
        })
    }

    /// Commits a snapshot if its client has answered that it is cut, or the manager can prepare the legs. Otherwise gives
    /// it up.
    ///
    /// # Errors
    /// As [`Manager::create_snapshot`] after one attempt; then no snapshot is left.
    pub fn end_snapshot(&self, cut: SnapshotCut) -> Result<SnapshotInfo, Fault> {
        let mut reservation = Reservation {
            manager: self,
            volume: cut.volume.clone(),
            epoch: cut.epoch,
            layout_epoch: cut.layout_epoch,
            attachment: cut.attachment.clone(),
            legs: cut.legs,
            is_known: false,
            is_certain: true,
            has_replica: cut.has_replica,
            is_committed: false,
        };
        let now = Instant::now();
        let attempt = match (cut.change, cut.attachment) {
            (Some(change), _) => Attempt::Void(change),
            (None, Some(it)) => self.await_order(&mut reservation, it.client, now, now)?,
            (None, None) => self.prepare_legs(&mut reservation)?,
        };
        match self.check_attempt(&reservation, attempt) {
            Attempt::Done => {
                let mut cuts = [reservation];
                let created = self.commit_cuts(&mut cuts, None, |mut all| all.remove(0));
                created.map(|answer| answer.reply)
            }
            Attempt::Void(cause) => Err(SnapshotFault::Unsteady {
                volume: cut.volume,
                attempts: 1,
                cause,
            }
            .into()),
        }
    }
}
