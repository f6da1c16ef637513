//! Attributes of inodes, extended attributes, and the usage of the file system.

use super::{PERMISSIONS, RequestContext, refuse};
use crate::abi;
use crate::attr::resolve_time;
use crate::events;
use crate::names;
use crate::reply::{self, FuseReply};
use crate::request::{Request, SetAttr};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{Acl, AclKind, Attr, AttrChanges, NAME_MAX, Result, SetXattrMode};
use rustix::io::Errno;

const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;

/// The value of an attribute, or its length.
pub(crate) fn xattr(value: Vec<u8>, size: u32) -> Result<FuseReply> {
    match size {
        0 => Ok(FuseReply::new(&abi::GetXattrOut {
            size: value.len() as u32,
            unused: 0,
        })),
        size if value.len() > size as usize => refuse(Errno::RANGE),
        _ => Ok(FuseReply::Data(value)),
    }
}

impl RequestContext<'_> {
    fn attr(&self, attr: &Attr) -> FuseReply {
        FuseReply::new(&reply::attr(attr, self.handler.cache))
    }

    pub(super) fn dispatch_attribute_op(&self, request: Request<'_>) -> Result<FuseReply> {
        match request {
            Request::GetAttr => Ok(self.attr(&self.fs.attr(self.ino)?)),
            Request::Statx => Ok(reply::statx(&self.fs.attr(self.ino)?, self.handler.cache)),
            Request::SetAttr(wished) => self.answer_set_attr(&wished),
            Request::GetXattr { name, size } => {
                let value = self.fs.xattr(self.ino, name);
                xattr(
                    value.map_err(|error| names::missing_xattr_error(name, error))?,
                    size,
                )
            }
            Request::ListXattr { size } => self.list_xattr(size),
            Request::SetXattr {
                name,
                value,
                flags,
                acl_flags,
            } => match AclKind::of_attribute(name) {
                Some(kind) => self.set_acl(kind, value, acl_flags),
                None => self.set_xattr(name, value, flags),
            },
            Request::RemoveXattr(name) => {
                let removed = self.fs.remove_xattr(self.ino, name);
                removed.map_err(|error| names::missing_xattr_error(name, error))?;
                Ok(FuseReply::DONE)
            }
            Request::Statfs => Ok(self.statfs()),
            _ => refuse(Errno::NOSYS),
        }
    }

    fn answer_set_attr(&self, wished: &SetAttr) -> Result<FuseReply> {
        if self.handler.event_thread.is_event_thread(self.thread) {
            let attr = events::attr_with_timeout(self.fs, self.ino)?;
            return Ok(FuseReply::new(&reply::uncached_attr(&attr)));
        }
        let changed = self.set_attr(wished)?;
        if self.fs.has_direct_clients(self.ino) {
            return Ok(FuseReply::new(&reply::uncached_attr(&changed)));
        }
        Ok(self.attr(&changed))
    }

    fn set_attr(&self, wished: &SetAttr) -> Result<Attr> {
        let changes = AttrChanges {
            mode: wished.mode.map(|mode| (mode & PERMISSIONS) as u16),
            uid: wished.uid,
            gid: wished.gid,
            atime: wished.atime.map(resolve_time),
            mtime: wished.mtime.map(resolve_time),
        };
        if let Some(size) = wished.size {
            if wished.clears_setid {
                self.clear_setid_unprivileged()?;
            }
            let attr = self
                .fs
                .set_size(&mut *self.fs.borrow_channel()?, self.ino, size)?;
            if changes == AttrChanges::default() {
                return Ok(attr);
            }
        }
        // The kernel leaves the bits that a new owner or group removes to the mount.
        if (changes.uid, changes.gid) != (None, None) && changes.mode.is_none() {
            self.clear_setid(self.ino)?;
        }
        self.fs.set_attr(self.ino, changes)
    }

    fn list_xattr(&self, size: u32) -> Result<FuseReply> {
        let names = self.fs.xattr_names(self.ino)?;
        let ended = names.into_iter().flat_map(|mut name| {
            name.push(0);
            name
        });
        xattr(ended.collect(), size)
    }

    fn set_xattr(&self, name: &[u8], value: &[u8], flags: u32) -> Result<FuseReply> {
        names::check_xattr_name(name)?;
        let how = match flags {
            0 => SetXattrMode::Always,
            XATTR_CREATE => SetXattrMode::Create,
            XATTR_REPLACE => SetXattrMode::Replace,
            _ => return refuse(Errno::INVAL),
        };
        self.fs.set_xattr(self.ino, name, value, how)?;
        Ok(FuseReply::DONE)
    }

    fn set_acl(&self, kind: AclKind, value: &[u8], flags: Option<u32>) -> Result<FuseReply> {
        // Such a kernel would give rights that the ACL does not.
        let flags = flags.ok_or(Errno::OPNOTSUPP)?;
        let acl = Acl::decode(value)?;
        let clears_setgid = flags & abi::SETXATTR_ACL_KILL_SGID != 0;
        self.fs
            .set_acl(self.ino, kind, acl.as_ref(), clears_setgid)?;
        Ok(FuseReply::DONE)
    }

    fn statfs(&self) -> FuseReply {
        const PAGE: u64 = PAGE_BYTES as u64;
        let usage = self.fs.usage();
        let used = usage.used_bytes / PAGE;
        let within_limit = match usage.limit_bytes {
            0 => u64::MAX,
            limit => (limit / PAGE).saturating_sub(used),
        };
        let in_pools = (self.handler.free_space)().map_or(u64::MAX, |bytes| bytes / PAGE);
        let free = match within_limit.min(in_pools) {
            u64::MAX => 0,
            free => free,
        };
        FuseReply::new(&abi::StatfsOut {
            blocks: used + free,
            free,
            available: free,
            files: usage.inodes + free,
            files_free: free,
            block_bytes: PAGE_BYTES as u32,
            name_max: NAME_MAX as u32,
            fragment_bytes: PAGE_BYTES as u32,
            ..abi::StatfsOut::default()
        })
    }
}
