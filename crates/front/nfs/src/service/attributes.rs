//! GETATTR, SETATTR and ACCESS.

use super::snapshots::View;
use super::{Failed, Failure, Outcome, Service, Target, convert};
use crate::handle::HandleBytes;
use crate::nfs3::attributes::{
    AccessArguments, Attributes, ChangeAttributes, GrantedAccess, SetAttributesArguments, access,
};
use crate::nfs3::status::Status;
use crate::nfs4::state::IoAccess;
use crate::peer::PeerCredential;
use pagemesh_fs::{AccessMask, FsError};
use rustix::io::Errno;

/// The rights that a read-only export does not give.
const CHANGES: u32 = access::MODIFY | access::EXTEND | access::DELETE;

impl Target<'_> {
    /// The attributes of the file, which must exist.
    pub(super) fn own_attributes(&self) -> Result<Attributes, Failure> {
        if self.view == View::Directory {
            return self.snapshot_directory();
        }
        let attr = self.fs.attr_of(self.id);
        let attr = attr.map_err(|error| self.report(&error))?;
        Ok(self.attributes(&attr))
    }
}

impl Service {
    pub(super) fn get_attributes(
        &self,
        peer: PeerCredential<'_>,
        file: HandleBytes<'_>,
    ) -> Outcome<Attributes, ()> {
        let target = self.target(peer, file)?;
        Ok(target.own_attributes()?)
    }

    pub(super) fn set_attributes(
        &self,
        peer: PeerCredential<'_>,
        it: &SetAttributesArguments<'_>,
    ) -> Outcome<ChangeAttributes, ChangeAttributes> {
        let target = self.changed_target(peer, it.file)?;
        let wanted = convert::changes(&it.change)?;
        if wanted.size.is_some() {
            target.check_denials(IoAccess::Write)?;
        }
        let guard = it.guard.map(convert::time);
        let fs = &target.export.fs;
        let reply = fs.set_attributes(target.id, &wanted, guard, &target.caller);
        let attributes = target.around(&reply.wcc);
        match reply.result {
            Ok(()) => Ok(attributes),
            Err(FsError::Posix(Errno::AGAIN)) if guard.is_some() => Err(Failed::new(
                Failure::Status(Status::NotSynchronized),
                attributes,
            )),
            Err(error) => Err(Failed::new(target.report(&error), attributes)),
        }
    }

    pub(super) fn access(
        &self,
        peer: PeerCredential<'_>,
        it: &AccessArguments<'_>,
    ) -> Outcome<GrantedAccess, Option<Attributes>> {
        let target = self.target(peer, it.file)?;
        if target.view == View::Directory {
            return Ok(GrantedAccess {
                attributes: Some(target.snapshot_directory()?),
                granted: it.wanted & (access::READ | access::LOOKUP),
            });
        }
        let is_read_only = target.options.is_read_only || target.check_live().is_err();
        let wanted = match is_read_only {
            true => it.wanted & !CHANGES,
            false => it.wanted,
        };
        match target
            .fs
            .access_mask(target.id, &target.caller, AccessMask(wanted))
        {
            Ok((granted, attr)) => Ok(GrantedAccess {
                attributes: Some(target.attributes(&attr)),
                granted: granted.0,
            }),
            Err(error) => Err(target.report(&error).into()),
        }
    }
}
