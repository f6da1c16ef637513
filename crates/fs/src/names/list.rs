//! Listings of directories.

use crate::error::{Corruption, Result};
use crate::format::directory_page::FIRST_KEY;
use crate::format::inode::{Ino, InodeKind, damaged_inode};
use crate::names::entry::check_name;
use crate::tree::directory::{Tree, directory};
use crate::txn::manager::TxManager;

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
        let dots: [(&[u8], Ino); 2] = [(b".", ino), (b"..", inode.parent)];
        for (cookie, (name, ino)) in (1..).zip(dots) {
            let listed = DirEntry {
                cookie,
                ino,
                kind: InodeKind::Directory,
                name: name.to_vec(),
            };
            if cookie > after && !visit(&listed) {
                return Ok(());
            }
        }
        let from = after.saturating_add(1).max(FIRST_KEY);
        let mut odd = None;
        Tree::new(tx, &mut inode).scan(from, |entry, name| {
            if check_name(name).is_err() {
                odd = Some(name.to_vec());
                return false;
            }
            visit(&DirEntry {
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
    })
}
