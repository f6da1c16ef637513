//! READ, WRITE, COMMIT and READLINK.
//!
//! A pin is declared before the channel of its call, so that the channel is returned first: see
//! [`PinCache`](crate::pin_cache::PinCache).

use super::snapshots::View;
use super::{Failed, Failure, NoReply, Outcome, Service, Target};
use crate::handle::HandleBytes;
use crate::nfs3::attributes::{Attributes, ChangeAttributes};
use crate::nfs3::files::{
    CommitArguments, CommittedData, Durability, ReadArguments, ReadData, ReadSymlink,
    WriteArguments, WrittenData,
};
use crate::nfs3::status::Status;
use crate::nfs4::state::IoAccess;
use crate::peer::PeerCredential;
use crate::rpc::Reply;
use bytes::Bytes;
use pagemesh_fs::Pin;
use std::sync::Arc;
use std::time::Instant;

impl Target<'_> {
    /// A snapshot frees nothing, so its pins are not kept.
    pub(super) fn pin(&self) -> Result<Arc<Pin>, Failure> {
        let pin = match self.view {
            View::Live => self.export.pins.get(self.id, Instant::now()),
            View::Directory => return Err(Status::IsDirectory.into()),
            View::Snapshot(_) => self.fs.pin(self.id).map(Arc::new),
        };
        pin.map_err(|error| self.report(&error))
    }
}

impl Service {
    pub(super) fn read(
        &self,
        peer: PeerCredential<'_>,
        it: &ReadArguments<'_>,
    ) -> Outcome<ReadData, Option<Attributes>> {
        let target = self.target(peer, it.file)?;
        target.check_denials(IoAccess::Read)?;
        let pin = target.pin()?;
        let fs = &target.fs;
        let reply = fs.read_at(&pin, it.offset, it.count, &target.caller);
        let attributes = target.after(&reply.wcc);
        match reply.result {
            Ok(read) => Ok(ReadData {
                attributes,
                is_end: read.is_eof,
                data: read.bytes.into(),
            }),
            Err(error) => Err(Failed::new(target.report(&error), attributes)),
        }
    }

    /// Writes data, which is a part of `record`.
    pub(super) fn write(
        &self,
        peer: PeerCredential<'_>,
        it: &WriteArguments<'_>,
        record: &Bytes,
    ) -> Outcome<WrittenData, ChangeAttributes> {
        let target = self.changed_target(peer, it.file)?;
        target.check_denials(IoAccess::Write)?;
        let pin = target.pin()?;
        let fs = &target.export.fs;
        let data = record.slice_ref(it.data);
        let has_cache = fs.has_write_cache();
        let is_stable = it.durability != Durability::Unstable;
        // A loss after this line changes the verifier of the COMMIT.
        let verifier = target.export.write_verifier(fs.lost_writes());
        let caller = &target.caller;
        let reply = fs.write_at(&pin, it.offset, &data, is_stable, caller);
        let attributes = target.around(&reply.wcc);
        match reply.result {
            Ok(count) => Ok(WrittenData {
                attributes,
                count,
                // A copy with a cache may have come meanwhile.
                durability: match (has_cache || fs.has_write_cache()) && !is_stable {
                    true => Durability::Unstable,
                    false => Durability::FileSync,
                },
                verifier,
            }),
            Err(error) => Err(Failed::new(target.report(&error), attributes)),
        }
    }

    pub(super) fn commit(
        &self,
        peer: PeerCredential<'_>,
        it: &CommitArguments<'_>,
    ) -> Outcome<CommittedData, ChangeAttributes> {
        let target = self.target(peer, it.file)?;
        target.check_live()?;
        let pin = target.pin()?;
        let fs = &target.export.fs;
        let mut channel = fs.borrow_channel().map_err(|error| target.report(&error))?;
        let reply = fs.commit(&mut channel, &pin);
        let attributes = target.around(&reply.wcc);
        match reply.result {
            Ok(losses) => Ok(CommittedData {
                attributes,
                verifier: target.export.write_verifier(losses),
            }),
            Err(error) => Err(Failed::new(target.report(&error), attributes)),
        }
    }

    /// The result borrows the target, so it becomes a reply here.
    pub(super) fn read_symlink(
        &self,
        xid: u32,
        peer: PeerCredential<'_>,
        file: HandleBytes<'_>,
    ) -> Result<Reply, NoReply> {
        let read = self.read_target(peer, file);
        let outcome = read.as_ref().map(|(target, attributes)| ReadSymlink {
            attributes: *attributes,
            target,
        });
        let outcome = outcome.map_err(|failed| Failed::new(failed.failure, *failed.attributes));
        self.reply(xid, outcome)
    }

    fn read_target(
        &self,
        peer: PeerCredential<'_>,
        file: HandleBytes<'_>,
    ) -> Outcome<(Vec<u8>, Option<Attributes>), Option<Attributes>> {
        let target = self.target(peer, file)?;
        if target.view == View::Directory {
            return Err(Status::Invalid.into());
        }
        let reply = target.fs.read_link_at(target.id);
        let attributes = target.after(&reply.wcc);
        match reply.result {
            Ok(path) => Ok((path, attributes)),
            Err(error) => Err(Failed::new(target.report(&error), attributes)),
        }
    }
}
