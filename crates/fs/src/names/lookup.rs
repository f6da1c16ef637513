//! Lookups of names, and the targets of links.

use crate::error::{Corruption, Result};
use crate::file::attr;
use crate::file::attr::Attr;
use crate::format::inode::{Ino, InodeKind, NAME_MAX, damaged_inode};
use crate::format::page_map;
use crate::names::entry::{find, named_inode};
use crate::tree::directory::directory;
use crate::txn::manager::TxManager;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;

/// See [`crate::Fs::lookup`].
pub(crate) fn lookup(txs: &TxManager, parent: Ino, name: &[u8]) -> Result<Attr> {
    if name.len() > NAME_MAX {
        return Err(Errno::NAMETOOLONG.into());
    }
    txs.inspect(|core| {
        let mut tx = core.begin();
        let mut parent_inode = directory(&mut tx, parent)?;
        let (ino, inode) = match name {
            b"." => (parent, parent_inode),
            b".." => (parent_inode.parent, tx.inode(parent_inode.parent)?),
            name => {
                let entry = find(&mut tx, &mut parent_inode, name)?;
                (entry.ino, named_inode(&mut tx, parent, &entry)?)
            }
        };
        drop(tx);
        let attr = attr::attr(core, ino, &inode)?;
        core.live_inode(ino).lookups += 1;
        Ok(attr)
    })
}

/// See [`crate::Fs::read_link`].
pub(crate) fn read_link(txs: &TxManager, ino: Ino) -> Result<Vec<u8>> {
    txs.inspect(|core| {
        let inode = core.inode(ino)?;
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
    })
}
