//! The attach of a volume to a client.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::holder_signs::{TrackedHolder, check_replaced};
use crate::layout_state::LayoutChange;
use crate::manager::Manager;
use crate::received::check_receiver;
use crate::records::{Attachment, VolumeRecord};
use crate::rollback_checks::check_no_rollback;
use crate::volumes::{CLIENT_BYTES_MAX, check_text};
use crate::wire::{AttachReply, AttachVolume};
use pagemesh_base::layout::VolumeName;

impl Manager {
    /// Attaches a volume to a client; the new epoch fences the previous client.
    ///
    /// # Errors
    /// When there is no such volume, a client has attached it that the request does not replace, or the
    /// store fails.
    pub fn attach(&self, name: &VolumeName, request: &AttachVolume) -> Result<AttachReply, Fault> {
        self.attach_if(name, request, |record| check_no_rollback(record))
    }

    /// The same, if `check` finds that the volume may be attached. It may change the record.
    pub(crate) fn attach_if(
        &self,
        name: &VolumeName,
        request: &AttachVolume,
        check: impl FnOnce(&mut VolumeRecord) -> Result<(), Fault>,
    ) -> Result<AttachReply, Fault> {
        check_text("the client's label", &request.client, CLIENT_BYTES_MAX)?;
        if let Some(process) = &request.process {
            check_text("the client's process", process, CLIENT_BYTES_MAX)?;
        }
        let mut book = self.state();
        let mut record = book.volume(name)?.clone();
        check(&mut record)?;
        check_replaced(&record, request)?;
        check_receiver(&record, request)?;
        let promoted = match request.unreachable {
            true => self.promote_if_allowed(&book, &mut record)?,
            false => None,
        };
        record.layout_state = record.layout_state.apply(&LayoutChange::Attach)?;
        let (client, epoch) = (&request.client, record.layout_state.layout.epoch);
        record.received = record.received.map(|_| epoch);
        let earlier = record.attachment.replace(Attachment {
            client: client.clone(),
            epoch,
            since_unix_s: self.clock.unix_s(),
            process: request.process.clone(),
        });
        let mut drafts = Vec::new();
        if let Some((copy, snapshots)) = &promoted {
            drafts.push(EventDraft::promoted(name, "manager", *copy, true));
            drafts.extend(snapshots.draft(name, "manager", *copy));
        }
        drafts.extend(earlier.map(|earlier| {
            let cause = format!("{client} has attached it");
            EventDraft::fenced(name, &earlier.client, client, (&cause, epoch))
        }));
        drafts.push(EventDraft::attached(name, client, epoch));
        let (copy, snapshots) = promoted.unzip();
        self.commit_promotion(&mut book, &record, drafts, snapshots)?;
        let holder = TrackedHolder::new(epoch, self.clock.elapsed());
        book.holders.insert(name.clone(), holder);
        if let Some(copy) = copy {
            tracing::warn!(volume = %name, copy, "an asynchronous copy is promoted");
        }
        Ok(AttachReply {
            bricks: book.addresses(&record.layout_state.layout.segments),
            layout: record.layout_state.layout,
        })
    }
}
