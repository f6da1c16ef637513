//! The service file: one file without a name, in which servers of a file system keep their own state, such as the NFS server's
//! stable list of clients (RFC 8881, section 8.4.2.1). The root inode names it by [`FileId`].
//!
//! No lookup, handle or listing leads to it: users get `ESTALE` for its number. It counts in the space usage, and goes along with
//! snapshots and clones.
//!
//! An earlier release does not know the name: its mount frees the file, as it frees each file without a name, and clears the
//! name when it stores the root. Then there is no service file. A name that leads to another file does not count.

use crate::error::Result;
use crate::format::file_id::FileId;
use crate::format::inode::{Ino, Inode};
use crate::tree::directory::linked_directory;
use crate::tree::new_inode::{CreateKind, Credentials, new_inode};
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use rustix::io::Errno;

/// Root owns the file.
const OWNER: Credentials = Credentials { uid: 0, gid: 0 };
const MODE: u16 = 0o600;

/// See [`crate::Fs::service_file`].
pub(crate) fn find(txs: &TxManager) -> Result<Option<Ino>> {
    txs.inspect(|core| {
        let mut tx = core.begin();
        let root = tx.inode(Ino::ROOT)?;
        find_in(&mut tx, &root)
    })
}

/// As [`crate::Fs::service_file`] with `create`.
pub(crate) fn find_or_create(txs: &TxManager) -> Result<Ino> {
    let now = txs.now();
    txs.change_or_read(|tx| {
        let mut root = linked_directory(tx, Ino::ROOT)?;
        if let Some(ino) = find_in(tx, &root)? {
            return Ok(ino);
        }
        let of = (Ino::ROOT, &root);
        let (ino, mut inode) = new_inode(tx, of, &CreateKind::File, MODE, OWNER, now)?;
        inode.links = 0;
        tx.put_inode(ino, &inode)?;
        root.service_file = Some(FileId::of(ino, &inode));
        tx.put_inode(Ino::ROOT, &root)?;
        tx.core.record_unused_creation(ino);
        Ok(ino)
    })
}

/// The file that the root names, if it is there.
fn find_in(tx: &mut Tx<'_>, root: &Inode) -> Result<Option<Ino>> {
    let Some(FileId { ino, .. }) = root.service_file else {
        return Ok(None);
    };
    let inode = match tx.inode(ino) {
        Ok(inode) => inode,
        Err(error) if error.errno() == Errno::STALE => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(tx.is_service_file(ino, &inode)?.then_some(ino))
}
