//! Lookups of names, and the targets of links.

use crate::error::{Corruption, Result};
use crate::file::access::{self, Caller, Rights};
use crate::file::attr;
use crate::file::attr::Attr;
use crate::file::wcc::{Wcc, WccReply};
use crate::format::file_id::FileId;
use crate::format::inode::{Ino, Inode, InodeKind, NAME_MAX, damaged_inode};
use crate::format::page_map;
use crate::names::entry::{find, named_inode};
use crate::tree::directory::{check_directory, directory};
use crate::txn::core::Core;
use crate::txn::manager::TxManager;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;

/// See [`crate::Fs::lookup`].
pub(crate) fn lookup(txs: &TxManager, parent: Ino, name: &[u8]) -> Result<Attr> {
    txs.inspect(|core| {
        let parent_inode = directory(&mut core.begin(), parent)?;
        let attr = named_attr(core, parent, parent_inode, name)?;
        core.live_inode(attr.ino).lookups += 1;
        Ok(attr)
    })
}

/// See [`crate::Fs::lookup_at`].
pub(crate) fn lookup_at(
    txs: &TxManager,
    id: FileId,
    name: &[u8],
    caller: &Caller,
) -> WccReply<Attr> {
    let mut wcc = Wcc::default();
    let result = txs.inspect(|core| {
        let inode = core.inode_of(id)?;
        wcc = Wcc::unchanged(core, id, &inode)?;
        check_directory(&inode)?;
        access::check(&mut core.begin(), (id.ino, &inode), caller, Rights::EXECUTE)?;
        named_attr(core, id.ino, inode, name)
    });
    WccReply { wcc, result }
}

/// Attributes of the inode that a directory names so.
fn named_attr(core: &mut Core, parent: Ino, mut parent_inode: Inode, name: &[u8]) -> Result<Attr> {
    if name.len() > NAME_MAX {
        return Err(Errno::NAMETOOLONG.into());
    }
    let mut tx = core.begin();
    let (ino, inode) = match name {
        b"." => (parent, parent_inode),
        b".." => (parent_inode.parent, tx.inode(parent_inode.parent)?),
        name => {
            let entry = find(&mut tx, &mut parent_inode, name)?;
            (entry.ino, named_inode(&mut tx, parent, &entry)?)
        }
    };
    drop(tx);
    attr::attr(core, ino, &inode)
}

/// See [`crate::Fs::read_link`].
pub(crate) fn read_link(txs: &TxManager, ino: Ino) -> Result<Vec<u8>> {
    let now = txs.now();
    txs.inspect(|core| {
        let inode = core.inode(ino)?;
        core.record_read_time(ino, &inode, now);
        target(core, ino, inode)
    })
}

/// See [`crate::Fs::read_link_at`].
pub(crate) fn read_link_at(txs: &TxManager, id: FileId) -> WccReply<Vec<u8>> {
    let now = txs.now();
    let mut wcc = Wcc::default();
    let result = txs.inspect(|core| {
        let inode = core.inode_of(id)?;
        wcc = Wcc::unchanged(core, id, &inode)?;
        core.record_read_time(id.ino, &inode, now);
        target(core, id.ino, inode)
    });
    WccReply { wcc, result }
}

/// The target of a symbolic link.
fn target(core: &mut Core, ino: Ino, inode: Inode) -> Result<Vec<u8>> {
    if inode.kind() != InodeKind::Symlink {
        return Err(Errno::INVAL.into());
    }
    if !inode.target.is_empty() {
        return Ok(inode.target);
    }
    core.check_trusted(ino)?;
    let run = page_map::find(&inode.map, 0, &mut |page| core.page(page))?;
    let run = run.ok_or_else(|| damaged_inode(ino, Corruption("it has no target".into())))?;
    let page = core.page(run.page)?;
    Ok(page[..(inode.size as usize).min(PAGE_BYTES)].to_vec())
}
