//! Byte-range locks, and calls on stateids.

use super::compound::Compound;
use super::{Done, Fault, encode_state_id, state_id};
use crate::nfs4::arguments::open::{
    Lock, LockBytes, LockType, Locker as WireLocker, TestLock, Unlock,
};
use crate::nfs4::arguments::{StateidList, WireStateid};
use crate::nfs4::state::{LockArgs, LockDenied, LockError, LockKind, LockRange, Locker, StateId};
use crate::nfs4::status::{OK, Status};
use crate::service::Target;
use crate::xdr::Writer;
use pagemesh_fs::InodeKind;

/// Attempts of a LOCK while other requests append records to the list of its file system.
const LOCK_ATTEMPTS: u32 = 8;

fn kind(wire: LockType) -> LockKind {
    match wire.is_exclusive() {
        true => LockKind::Write,
        false => LockKind::Read,
    }
}

fn range(bytes: LockBytes) -> Result<LockRange, Fault> {
    LockRange::from_wire(bytes.offset, bytes.length).ok_or(Fault::Status(Status::Invalid))
}

/// Appends the lock in the way (`LOCK4denied`).
fn encode_denied(denied: &LockDenied, out: &mut Writer) {
    let (offset, length) = denied.range.to_wire();
    out.u64(offset);
    out.u64(length);
    out.value(&match denied.kind {
        LockKind::Read => LockType::Read,
        LockKind::Write => LockType::Write,
    });
    out.u64(denied.client.0);
    out.opaque(&denied.owner);
}

fn denied(error: LockError, out: &mut Writer) -> Fault {
    match error {
        LockError::Denied(denied) => {
            encode_denied(&denied, out);
            Status::Denied.into()
        }
        LockError::State(error) => error.into(),
    }
}

impl<'a> Compound<'a> {
    /// The stateid that an argument means.
    pub(super) fn resolved(&self, id: WireStateid) -> Result<StateId, Fault> {
        let resolved = self.stateids.resolve(state_id(id));
        resolved.ok_or(Fault::Status(Status::BadStateid))
    }

    /// The current file, which must be a regular one.
    fn regular_file(&self) -> Result<&Target<'a>, Fault> {
        let target = self.file_or(Status::IsDirectory)?;
        match target.kind()? {
            InodeKind::File => Ok(target),
            InodeKind::Directory => Err(Status::IsDirectory.into()),
            InodeKind::Symlink => Err(Status::Symlink.into()),
            _ => Err(Status::WrongType.into()),
        }
    }

    pub(super) fn lock(&mut self, it: &Lock<'_>, out: &mut Writer) -> Done {
        let client = self.client_id()?;
        let target = self.regular_file()?;
        let (volume, id) = (target.export.volume, target.state_file());
        let locker = match it.locker {
            WireLocker::New { open, owner } => Locker::New {
                open: self.resolved(open)?,
                owner: owner.0,
            },
            WireLocker::Existing(id) => Locker::Existing(self.resolved(id)?),
        };
        let nfs4 = &self.service.nfs4;
        let args = LockArgs {
            client,
            file: nfs4.call(|locked, _| locked.key(volume, id)),
            locker,
            kind: kind(it.kind),
            range: range(it.bytes)?,
            is_reclaim: it.is_reclaim,
        };
        let stateid = self.granted_lock(target, &args, out)?;
        self.stateids.set(stateid);
        encode_state_id(stateid, out);
        Ok(())
    }

    /// The stateid of a lock. The records of expired clients that make way are durable before the lock is: nothing would
    /// undo it if their write failed.
    fn granted_lock(
        &self,
        target: &Target<'_>,
        args: &LockArgs<'_>,
        out: &mut Writer,
    ) -> Result<StateId, Fault> {
        let nfs4 = &self.service.nfs4;
        for _ in 0..LOCK_ATTEMPTS {
            let prepared = nfs4.call(|locked, now| locked.state.prepare_lock(args, now));
            prepared.map_err(|error| denied(error, out))?;
            self.store_list(target)?;
            let locked = nfs4.call(|locked, now| {
                let is_durable = locked.lists.is_durable(args.file.export);
                is_durable.then(|| locked.state.lock(args, now))
            });
            if let Some(locked) = locked {
                return locked.map_err(|error| denied(error, out));
            }
        }
        Err(Status::Delay.into())
    }

    pub(super) fn test_lock(&self, it: &TestLock<'_>, out: &mut Writer) -> Done {
        let client = self.client_id()?;
        let target = self.regular_file()?;
        let (kind, range) = (kind(it.kind), range(it.bytes)?);
        let tested = self.service.nfs4.call(|locked, now| {
            let file = locked.key(target.export.volume, target.state_file());
            let state = &mut locked.state;
            state.test_lock(client, file, it.owner.0, (range, kind), now)
        });
        tested.map_err(|error| denied(error, out))
    }

    pub(super) fn unlock(&mut self, it: &Unlock, out: &mut Writer) -> Done {
        let client = self.client_id()?;
        let target = self.file_or(Status::IsDirectory)?;
        let stateid = self.resolved(it.stateid)?;
        let range = range(it.bytes)?;
        let stateid = self.service.nfs4.call(|locked, _| {
            let file = locked.key(target.export.volume, target.state_file());
            locked.state.unlock(client, stateid, file, range)
        })?;
        self.stateids.set(stateid);
        encode_state_id(stateid, out);
        Ok(())
    }

    pub(super) fn free_stateid(&self, id: WireStateid) -> Done {
        let (client, stateid) = (self.client_id()?, self.resolved(id)?);
        let nfs4 = &self.service.nfs4;
        nfs4.call(|locked, _| locked.state.free_stateid(client, stateid))?;
        Ok(())
    }

    pub(super) fn test_stateids(&self, ids: &StateidList<'_>, out: &mut Writer) -> Done {
        let client = self.client_id()?;
        out.length(ids.len());
        self.service.nfs4.call(|locked, _| {
            for id in ids.iter() {
                let tested = locked.state.test_stateid(client, state_id(id));
                out.u32(tested.map_or_else(|error| error.code(), |()| OK));
            }
        });
        Ok(())
    }
}
