//! Extended attributes by name.

use crate::error::Result;
use crate::format::acl::{Acl, AclKind};
use crate::format::inode::{Ino, Inode};
use crate::names::acls;
use crate::tree::tier::TIER_ATTRIBUTE;
use crate::tree::xattr_list::{CAPABILITIES, get_xattr, load_xattrs, remove_xattr, set_xattr};
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use rustix::io::Errno;

/// Longest name in bytes, the limit of the kernel.
const NAME_MAX: usize = 255;
/// Longest value in bytes, the limit of the kernel.
const VALUE_MAX: usize = 65_536;

/// Condition for setting an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetXattrMode {
    /// None.
    Always,
    /// The attribute does not exist.
    Create,
    /// The attribute exists.
    Replace,
}

/// See [`crate::Fs::xattr`].
pub(crate) fn get(txs: &TxManager, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
    if name == TIER_ATTRIBUTE {
        let inode = txs.inspect(|core| core.inode(ino))?;
        return Ok(inode.tier_value().ok_or(Errno::NODATA)?.to_vec());
    }
    if let Some(kind) = AclKind::of_attribute(name) {
        let acl = acls::get(txs, ino, kind)?;
        return Ok(acl.ok_or(Errno::NODATA)?.encode());
    }
    txs.inspect(|core| {
        let mut tx = core.begin();
        let inode = tx.inode(ino)?;
        let found = get_xattr(&mut tx, ino, &inode, name)?;
        Ok(found.ok_or(Errno::NODATA)?)
    })
}

/// See [`crate::Fs::xattr_names`].
pub(crate) fn names(txs: &TxManager, ino: Ino) -> Result<Vec<Vec<u8>>> {
    let (inode, list) = txs.inspect(|core| {
        let mut tx = core.begin();
        let inode = tx.inode(ino)?;
        let list = load_xattrs(&mut tx, ino, &inode)?;
        Ok((inode, list))
    })?;
    let tier = inode.tier_value().map(|_| TIER_ATTRIBUTE.to_vec());
    let all = list.names();
    txs.lock_core().stop_if_damaged(&all);
    // An earlier release stored the name as any other.
    let all = all?.into_iter().filter(|name| name != TIER_ATTRIBUTE);
    Ok(tier.into_iter().chain(all).collect())
}

/// See [`crate::Fs::set_xattr`].
pub(crate) fn set(
    txs: &TxManager,
    ino: Ino,
    name: &[u8],
    value: &[u8],
    how: SetXattrMode,
) -> Result<()> {
    if name.is_empty() || name.len() > NAME_MAX {
        return Err(Errno::RANGE.into());
    }
    if value.len() > VALUE_MAX {
        return Err(Errno::TOOBIG.into());
    }
    if name == TIER_ATTRIBUTE {
        return change_tier(txs, ino, Some(value), how);
    }
    // The kernel has no conditions for ACLs.
    if let Some(kind) = AclKind::of_attribute(name) {
        let acl = Acl::decode(value)?;
        return acls::set(txs, ino, (kind, acl.as_ref()), false);
    }
    // A write through the kernel removes capabilities; direct clients must be blocked.
    let arms = name == CAPABILITIES;
    let armed = arms.then(|| txs.file_lock(ino)).transpose()?;
    let _alone = armed.as_ref().map(|data| data.write());
    change_xattrs(txs, ino, |tx, inode| {
        if how != SetXattrMode::Always {
            match (get_xattr(tx, ino, inode, name)?, how) {
                (Some(_), SetXattrMode::Create) => return Err(Errno::EXIST.into()),
                (None, SetXattrMode::Replace) => return Err(Errno::NODATA.into()),
                _ => {}
            }
        }
        set_xattr(tx, ino, inode, name, value)
    })
}

/// See [`crate::Fs::remove_xattr`].
pub(crate) fn remove(txs: &TxManager, ino: Ino, name: &[u8]) -> Result<()> {
    if name == TIER_ATTRIBUTE {
        return change_tier(txs, ino, None, SetXattrMode::Replace);
    }
    if let Some(kind) = AclKind::of_attribute(name) {
        return acls::set(txs, ino, (kind, None), false);
    }
    change_xattrs(txs, ino, |tx, inode| {
        match remove_xattr(tx, ino, inode, name)? {
            true => Ok(()),
            false => Err(Errno::NODATA.into()),
        }
    })
}

fn change_tier(txs: &TxManager, ino: Ino, value: Option<&[u8]>, how: SetXattrMode) -> Result<()> {
    let now = txs.now();
    txs.change_deferrable(|tx| {
        let mut inode = tx.inode(ino)?;
        match (inode.tier_value(), how) {
            (Some(_), SetXattrMode::Create) => return Err(Errno::EXIST.into()),
            (None, SetXattrMode::Replace) => return Err(Errno::NODATA.into()),
            _ => {}
        }
        inode.set_tier_value(value)?;
        inode.touch(now);
        tx.put_inode(ino, &inode)
    })
}

fn change_xattrs(
    txs: &TxManager,
    ino: Ino,
    change: impl Fn(&mut Tx<'_>, &mut Inode) -> Result<()>,
) -> Result<()> {
    let now = txs.now();
    txs.change_deferrable(|tx| {
        let mut inode = tx.inode(ino)?;
        change(tx, &mut inode)?;
        inode.touch(now);
        tx.put_inode(ino, &inode)
    })
}
