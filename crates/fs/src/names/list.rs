//! Listings of directories.

use crate::error::{Corruption, FsError, Result};
use crate::file::access::{self, Caller, Rights};
use crate::file::attr::{Attr, attr};
use crate::file::wcc::{Wcc, WccReply};
use crate::format::directory_page::{FIRST_KEY, TreeEntry};
use crate::format::file_id::FileId;
use crate::format::inode::{Ino, Inode, InodeKind, damaged_inode};
use crate::names::entry::{check_name, named_inode};
use crate::tree::directory::{Tree, check_directory, directory};
use crate::txn::core::Core;
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use std::collections::BTreeSet;

/// An entry of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// The cookie to continue a listing behind this entry.
    pub cookie: u64,
    /// The inode that it names.
    pub ino: Ino,
    /// The type of that inode.
    pub kind: InodeKind,
    /// The name.
    pub name: Vec<u8>,
}

/// Most entries of one listing with attributes. The pages of inodes are read under the core's lock, so the listing of one
/// client must not hold it for long.
const LISTED_ATTRS_MAX: usize = 256;
/// Entries that such a listing reads before it reads their inodes.
const LIST_STEP: usize = 64;
/// Most entries of one listing without attributes.
const LISTED_NAMES_MAX: usize = 4096;

/// See [`crate::Fs::list`].
pub(crate) fn list(
    txs: &TxManager,
    ino: Ino,
    after: u64,
    mut visit: impl FnMut(&DirEntry) -> bool,
) -> Result<()> {
    let now = txs.now();
    txs.inspect(|core| {
        let tx = &mut core.begin();
        let mut inode = directory(tx, ino)?;
        tx.core.record_read_time(ino, &inode, now);
        visit_entries(tx, ino, &mut inode, after, |entry| visit(&entry))
    })
}

/// See [`crate::Fs::list_with_attributes`].
pub(crate) fn list_with_attributes(
    txs: &TxManager,
    id: FileId,
    after: u64,
    caller: &Caller,
    mut visit: impl FnMut(&DirEntry, Option<&Attr>) -> bool,
) -> WccReply<bool> {
    list_checked(txs, id, caller, |core, inode| {
        let may_look = access::may(&mut core.begin(), (id.ino, inode), caller, Rights::EXECUTE)?;
        let mut after = after;
        for _ in 0..LISTED_ATTRS_MAX / LIST_STEP {
            let mut step = Vec::new();
            visit_entries(&mut core.begin(), id.ino, inode, after, |entry| {
                step.push(entry);
                step.len() < LIST_STEP
            })?;
            if may_look {
                read_inode_pages(core, &step);
            }
            for entry in &step {
                let attr = match may_look {
                    true => entry_attr(core, id.ino, entry)?,
                    false => None,
                };
                if !visit(entry, attr.as_ref()) {
                    return Ok(false);
                }
                after = entry.cookie;
            }
            if step.len() < LIST_STEP {
                return Ok(true);
            }
        }
        Ok(false)
    })
}

/// See [`crate::Fs::list_at`].
pub(crate) fn list_at(
    txs: &TxManager,
    id: FileId,
    after: u64,
    caller: &Caller,
    mut visit: impl FnMut(&DirEntry) -> bool,
) -> WccReply<bool> {
    list_checked(txs, id, caller, |core, inode| {
        let mut count = 0;
        let mut is_end = true;
        visit_entries(&mut core.begin(), id.ino, inode, after, |entry| {
            count += 1;
            is_end = count <= LISTED_NAMES_MAX && visit(&entry);
            is_end
        })?;
        Ok(is_end)
    })
}

/// Lists a directory by `run`, if the caller may.
fn list_checked<T>(
    txs: &TxManager,
    id: FileId,
    caller: &Caller,
    run: impl FnOnce(&mut Core, &mut Inode) -> Result<T>,
) -> WccReply<T> {
    let now = txs.now();
    let mut wcc = Wcc::default();
    let result = txs.inspect(|core| {
        let mut inode = core.inode_of(id)?;
        wcc = Wcc::unchanged(core, id, &inode)?;
        check_directory(&inode)?;
        let of = (id.ino, &inode);
        access::check(&mut core.begin(), of, caller, Rights::READ)?;
        core.record_read_time(id.ino, &inode, now);
        run(core, &mut inode)
    });
    WccReply { wcc, result }
}

/// Reads the pages of the inodes of these entries that are not in memory, each one once and all at once. The look at an inode
/// meets its error again.
fn read_inode_pages(core: &mut Core, entries: &[DirEntry]) {
    let mut pages = BTreeSet::new();
    for entry in entries {
        if let Ok(Some((page, _))) = core.begin().locate_inode(entry.ino) {
            pages.insert(page);
        }
    }
    let _ = core.read_pages(pages);
}

/// Attributes of the inode that an entry names; `None` if they are damaged.
fn entry_attr(core: &mut Core, directory: Ino, entry: &DirEntry) -> Result<Option<Attr>> {
    let ino = entry.ino;
    let inode = match entry.name.as_slice() {
        b"." | b".." => core.inode(ino),
        _ => {
            let named = TreeEntry {
                key: entry.cookie,
                ino,
                kind: entry.kind,
            };
            named_inode(&mut core.begin(), directory, &named)
        }
    };
    let attr = inode.and_then(|inode| attr(core, ino, &inode));
    core.stop_if_damaged(&attr);
    match attr {
        Err(FsError::Damaged { .. } | FsError::Posix(_)) => Ok(None),
        attr => attr.map(Some),
    }
}

/// Visits the entries behind a cookie, in order.
fn visit_entries(
    tx: &mut Tx<'_>,
    ino: Ino,
    inode: &mut Inode,
    after: u64,
    mut visit: impl FnMut(DirEntry) -> bool,
) -> Result<()> {
    let dots: [(&[u8], Ino); 2] = [(b".", ino), (b"..", inode.parent)];
    for (cookie, (name, ino)) in (1..).zip(dots) {
        let listed = DirEntry {
            cookie,
            ino,
            kind: InodeKind::Directory,
            name: name.to_vec(),
        };
        if cookie > after && !visit(listed) {
            return Ok(());
        }
    }
    let from = after.saturating_add(1).max(FIRST_KEY);
    let mut odd = None;
    Tree::new(tx, inode).scan(from, |entry, name| {
        if check_name(name).is_err() {
            odd = Some(name.to_vec());
            return false;
        }
        visit(DirEntry {
            cookie: entry.key,
            ino: entry.ino,
            kind: entry.kind,
            name: name.to_vec(),
        })
    })?;
    match odd {
        None => Ok(()),
        Some(name) => Err(damaged_inode(
            ino,
            Corruption(format!("it names {:?}", String::from_utf8_lossy(&name))),
        )),
    }
}
