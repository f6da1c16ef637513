//! GETATTR, SETATTR and ACCESS.

use super::{Failed, Failure, Outcome, Service, convert};
use crate::handle::HandleBytes;
use crate::nfs3::attributes::{
    AccessArguments, Attributes, ChangeAttributes, GrantedAccess, SetAttributesArguments, access,
};
use crate::nfs3::status::Status;
use crate::peer::PeerCredential;
use pagemesh_fs::{AccessMask, FsError};
use rustix::io::Errno;

/// The rights that a read-only export does not give.
const CHANGES: u32 = access::MODIFY | access::EXTEND | access::DELETE;

impl Service {
    pub(super) fn get_attributes(
        &self,
        credential: PeerCredential<'_>,
        file: HandleBytes<'_>,
    ) -> Outcome<Attributes, ()> {
        let target = self.target(credential, file)?;
        match target.export.fs.attr_of(target.id) {
            Ok(attr) => Ok(target.attributes(&attr)),
            Err(error) => Err(target.report(&error).into()),
        }
    }

    pub(super) fn set_attributes(
        &self,
        credential: PeerCredential<'_>,
        it: &SetAttributesArguments<'_>,
    ) -> Outcome<ChangeAttributes, ChangeAttributes> {
        let target = self.changed_target(credential, it.file)?;
        let wanted = convert::changes(&it.change)?;
        let guard = it.guard.map(convert::time);
        let fs = &target.export.fs;
        let mut channel = fs.borrow_channel().map_err(|error| target.report(&error))?;
        let reply = fs.set_attributes(&mut channel, target.id, &wanted, guard, &target.caller);
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
        credential: PeerCredential<'_>,
        it: &AccessArguments<'_>,
    ) -> Outcome<GrantedAccess, Option<Attributes>> {
        let target = self.target(credential, it.file)?;
        let wanted = match target.options.is_read_only {
            true => it.wanted & !CHANGES,
            false => it.wanted,
        };
        let fs = &target.export.fs;
        match fs.access_mask(target.id, &target.caller, AccessMask(wanted)) {
            Ok((granted, attr)) => Ok(GrantedAccess {
                attributes: Some(target.attributes(&attr)),
                granted: granted.0,
            }),
            Err(error) => Err(target.report(&error).into()),
        }
    }
}
