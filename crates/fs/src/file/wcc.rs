//! Attributes before and after a change, from the change itself: the weak cache consistency data of NFSv3 (RFC 1813,
//! section 2.6). A client keeps its cache if that has the attributes before.

use crate::error::{FsError, Result};
use crate::file::attr::{Attr, attr};
use crate::format::file_id::FileId;
use crate::format::inode::{Ino, Inode, Time};
use crate::txn::core::Core;
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;

/// The attributes by which a client recognizes changes of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WccAttr {
    /// Size in bytes.
    pub size: u64,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of anything.
    pub ctime: Time,
}

impl WccAttr {
    pub(crate) fn of(inode: &Inode) -> WccAttr {
        WccAttr {
            size: inode.size,
            mtime: inode.mtime,
            ctime: inode.ctime,
        }
    }

    pub(crate) fn of_attr(attr: &Attr) -> WccAttr {
        WccAttr {
            size: attr.size,
            mtime: attr.mtime,
            ctime: attr.ctime,
        }
    }
}

/// Attributes of a file or directory around an operation. With both, nothing else changed the inode between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wcc {
    /// Before the operation. `None` of an operation that changes nothing or failed, and if another change came between its
    /// parts.
    pub before: Option<WccAttr>,
    /// After the operation, also after one that failed. `None` if the inode is gone or cannot be read.
    pub after: Option<Attr>,
}

impl Wcc {
    /// Of an operation that changes nothing: the inode as it is.
    pub(crate) fn unchanged(core: &mut Core, id: FileId, inode: &Inode) -> Result<Wcc> {
        Ok(Wcc {
            before: None,
            after: Some(attr(core, id.ino, inode)?),
        })
    }

    /// After an operation with an unknown outcome, or without attributes of its own: the inode as it is now.
    pub(crate) fn now(txs: &TxManager, id: FileId) -> Wcc {
        let seen = txs.inspect(|core| {
            let inode = core.inode_of(id)?;
            Wcc::unchanged(core, id, &inode)
        });
        seen.unwrap_or_default()
    }
}

/// The result of an operation on a file or directory, and the attributes of that inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WccReply<T> {
    /// Of the file or directory that the call names, also after an error.
    pub wcc: Wcc,
    /// The result.
    pub result: Result<T>,
}

impl<T> WccReply<T> {
    /// A failure before the operation began.
    pub(crate) fn failed(txs: &TxManager, id: FileId, error: FsError) -> WccReply<T> {
        WccReply {
            wcc: Wcc::now(txs, id),
            result: Err(error),
        }
    }
}

/// Collects the attributes of one inode around a transaction. The transaction may run again: each run begins anew.
pub(crate) struct WccTracker {
    id: FileId,
    /// As the last run found the inode.
    found: Option<(WccAttr, Wcc)>,
    /// As the last run left it.
    left: Option<Attr>,
}

impl WccTracker {
    pub(crate) fn new(id: FileId) -> WccTracker {
        WccTracker {
            id,
            found: None,
            left: None,
        }
    }

    pub(crate) fn ino(&self) -> Ino {
        self.id.ino
    }

    /// The inode, before the transaction changes anything.
    pub(crate) fn begin(&mut self, tx: &mut Tx<'_>) -> Result<Inode> {
        self.left = None;
        let inode = tx.inode_of(self.id)?;
        let unchanged = Wcc::unchanged(tx.core, self.id, &inode)?;
        self.found = Some((WccAttr::of(&inode), unchanged));
        Ok(inode)
    }

    /// The transaction has changed the inode for the last time.
    pub(crate) fn end(&mut self, tx: &mut Tx<'_>) -> Result<()> {
        let inode = tx.inode(self.id.ino)?;
        self.left = Some(attr(tx.core, self.id.ino, &inode)?);
        Ok(())
    }

    /// Later steps have freed pages.
    pub(crate) fn set_pages(&mut self, pages: u64) {
        if let Some(left) = &mut self.left {
            left.pages = pages;
        }
    }

    /// The attributes, for the result of the transaction.
    pub(crate) fn wcc<T>(self, txs: &TxManager, result: &Result<T>) -> Wcc {
        match (self.left, self.found) {
            (Some(left), Some((before, _))) if result.is_ok() => Wcc {
                before: Some(before),
                after: Some(left),
            },
            (None, Some((_, unchanged))) => unchanged,
            // The outcome may be unknown, or the transaction has not begun.
            _ => Wcc::now(txs, self.id),
        }
    }
}
