//! Access control lists of inodes: read and changed as a whole, with the mode, in one transaction.

use crate::error::Result;
use crate::file::access::{self, Caller};
use crate::file::attr::{Attr, attr};
use crate::file::kernel_pages;
use crate::file::wcc::{WccReply, WccTracker};
use crate::format::acl::{Acl, AclKind};
use crate::format::file_id::FileId;
use crate::format::inode::{Ino, Inode};
use crate::live::kernel_hooks::KernelHooks;
use crate::tree::acl_xattrs::{load_acl, set_acl};
use crate::tree::new_inode::SET_GID;
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;

/// The lists of an inode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acls {
    /// `None`: the mode says all.
    pub access: Option<Acl>,
    /// `None`: there is none.
    pub default: Option<Acl>,
}

/// See [`crate::Fs::acl`].
pub(crate) fn get(txs: &TxManager, ino: Ino, kind: AclKind) -> Result<Option<Acl>> {
    txs.inspect(|core| {
        let mut tx = core.begin();
        let inode = tx.inode(ino)?;
        load_acl(&mut tx, ino, &inode, kind)
    })
}

/// See [`crate::Fs::set_acl`].
pub(crate) fn set(
    txs: &TxManager,
    ino: Ino,
    (kind, acl): (AclKind, Option<&Acl>),
    clears_setgid: bool,
) -> Result<()> {
    let now = txs.now();
    txs.change_deferrable(|tx| {
        let mut inode = tx.inode(ino)?;
        set_acl(tx, ino, &mut inode, kind, acl)?;
        if clears_setgid {
            inode.mode &= !SET_GID;
        }
        inode.touch(now);
        tx.put_inode(ino, &inode)
    })
}

/// See [`crate::Fs::acls_of`].
pub(crate) fn acls_of(txs: &TxManager, id: FileId) -> Result<(Acls, Attr)> {
    txs.inspect(|core| {
        let inode = core.inode_of(id)?;
        let mut tx = core.begin();
        let acls = Acls {
            access: load_acl(&mut tx, id.ino, &inode, AclKind::Access)?,
            default: load_acl(&mut tx, id.ino, &inode, AclKind::Default)?,
        };
        drop(tx);
        Ok((acls, attr(core, id.ino, &inode)?))
    })
}

/// See [`crate::Fs::set_acls`].
pub(crate) fn set_acls(
    txs: &TxManager,
    hooks: &KernelHooks,
    id: FileId,
    changes: &[(AclKind, Option<Acl>)],
    caller: &Caller,
) -> WccReply<()> {
    let mut tracker = WccTracker::new(id);
    let now = txs.now();
    let result = txs.change(|tx| {
        let mut inode = tracker.begin(tx)?;
        access::check_owner(&inode, caller)?;
        for (kind, acl) in changes {
            set_checked(tx, (id.ino, &mut inode), (*kind, acl.as_ref()), caller)?;
        }
        inode.touch(now);
        tx.put_inode(id.ino, &inode)?;
        tracker.end(tx)
    });
    if result.is_ok() {
        kernel_pages::notify_attributes(txs, hooks, id.ino);
    }
    WccReply {
        wcc: tracker.wcc(txs, &result),
        result,
    }
}

/// A caller outside the group loses set-group-id with the new rights of the mode, as by a chmod.
fn set_checked(
    tx: &mut Tx<'_>,
    (ino, inode): (Ino, &mut Inode),
    (kind, acl): (AclKind, Option<&Acl>),
    caller: &Caller,
) -> Result<()> {
    set_acl(tx, ino, inode, kind, acl)?;
    if kind == AclKind::Access && acl.is_some() {
        inode.mode = access::permitted_mode(inode.mode, inode.gid, caller);
    }
    Ok(())
}
