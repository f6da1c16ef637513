//! GETACL and SETACL of the ACL protocol beside NFSv3.

use super::snapshots::View;
use super::{Failed, NoReply, Outcome, Service};
use crate::acl3::{AclCall, FileAcls, GetAclArguments, SentAcl, SetAclArguments, mask};
use crate::nfs3::attributes::Attributes;
use crate::nfs3::status::Status;
use crate::peer::PeerCredential;
use crate::rpc::{Call, Reply};
use crate::xdr::Reader;
use pagemesh_fs::{Acl, AclKind};
use std::net::SocketAddr;

impl Service {
    pub(super) fn answer_acl(
        &self,
        client: SocketAddr,
        call: &Call<'_>,
        arguments: Reader<'_>,
    ) -> Result<Reply, NoReply> {
        let table = self.exports.table();
        let peer = PeerCredential {
            address: client,
            credential: &call.credential,
            table: &table,
        };
        match AclCall::decode(call.procedure, arguments) {
            Ok(AclCall::Null) => Ok(Reply::success(call.xid, &())),
            Ok(AclCall::Get(it)) => self.reply(call.xid, self.get_acl(peer, &it)),
            Ok(AclCall::Set(it)) => self.reply(call.xid, self.set_acl(peer, &it)),
            Err(error) => Ok(self.refuse_arguments(call, error)),
        }
    }

    /// A file without an access ACL gets one from its mode, as with Solaris and Linux.
    fn get_acl(
        &self,
        peer: PeerCredential<'_>,
        it: &GetAclArguments<'_>,
    ) -> Outcome<FileAcls, Option<Attributes>> {
        let target = self.target(peer, it.file)?;
        if it.wanted & !mask::ALL != 0 {
            return Err(Status::Invalid.into());
        }
        if target.view == View::Directory {
            let attributes = target.snapshot_directory()?;
            let acl = Acl::of_mode(attributes.mode as u16);
            let is_counted = it.wanted & mask::ACCESS == 0;
            let owner = (attributes.uid, attributes.gid);
            return Ok(FileAcls {
                attributes: Some(attributes),
                parts: it.wanted,
                access: SentAcl::new(&acl, false, is_counted, owner),
                default: SentAcl::default(),
            });
        }
        let (acls, attr) = match target.fs.acls_of(target.id) {
            Ok(found) => found,
            Err(error) => return Err(target.report(&error).into()),
        };
        let owner = (attr.uid, attr.gid);
        let sent = |acl: Option<&Acl>, is_default, (entries, count)| {
            let acl = acl.filter(|_| it.wanted & (entries | count) != 0);
            let is_counted = it.wanted & entries == 0;
            acl.map(|acl| SentAcl::new(acl, is_default, is_counted, owner))
                .unwrap_or_default()
        };
        let access = acls.access.unwrap_or_else(|| Acl::of_mode(attr.mode));
        let of_access = (mask::ACCESS, mask::ACCESS_COUNT);
        let of_default = (mask::DEFAULT, mask::DEFAULT_COUNT);
        Ok(FileAcls {
            attributes: Some(target.attributes(&attr)),
            parts: it.wanted,
            access: sent(Some(&access), false, of_access),
            default: sent(acls.default.as_ref(), true, of_default),
        })
    }

    fn set_acl(
        &self,
        peer: PeerCredential<'_>,
        it: &SetAclArguments<'_>,
    ) -> Outcome<Option<Attributes>, Option<Attributes>> {
        let target = self.changed_target(peer, it.file)?;
        if it.parts & !mask::ALL != 0 {
            return Err(Status::Invalid.into());
        }
        let mut changes = Vec::new();
        if it.parts & mask::ACCESS != 0 {
            changes.push((AclKind::Access, it.access.acl()?));
        }
        if it.parts & mask::DEFAULT != 0 {
            changes.push((AclKind::Default, it.default.acl()?));
        }
        let reply = target
            .export
            .fs
            .set_acls(target.id, &changes, &target.caller);
        let after = target.after(&reply.wcc);
        match reply.result {
            Ok(()) => Ok(after),
            Err(error) => Err(Failed::new(target.report(&error), after)),
        }
    }
}
