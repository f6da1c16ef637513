//! The calls of stateless servers, such as NFS. Their clients name files by [`FileId`] for as long as they like. A call
//! checks the identity and the permissions of its caller in the same lock, or the same transaction, as it does its work.
//! No call counts an open or a lookup.

use super::Fs;
use crate::error::Result;
use crate::file::attr::Attr;
use crate::file::{attr, lifetime};
use crate::format::file_id::FileId;
use crate::io::channel::IoChannel;
use std::sync::Arc;

/// Keeps an inode from being freed, also without a name. Content is read and written through a pin.
///
/// The drop of the last pin of an inode without a name frees it, as a last close does: it borrows a channel
/// and waits for the volume. A thread that holds a channel calls [`Pin::release`]. A drop never writes times: they
/// stay pending until [`Fs::flush_all_times`].
///
/// A pin holds the file system: drop all pins before the volume is detached.
pub struct Pin {
    fs: Arc<Fs>,
    id: FileId,
    /// Whether [`Pin::release`] has taken the pin back.
    is_released: bool,
}

impl Pin {
    /// The file.
    #[must_use]
    pub fn id(&self) -> FileId {
        self.id
    }

    /// Drops the pin with the caller's channel.
    pub fn release(mut self, channel: &mut IoChannel) {
        self.is_released = true;
        lifetime::unpin(&self.fs.txs, self.id, Some(channel));
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if !self.is_released {
            lifetime::unpin(&self.fs.txs, self.id, None);
        }
    }
}

impl Fs {
    /// Pins a file. Its pages stay after its last name is removed, until the last pin is dropped. A server keeps
    /// pins of files in use for some seconds: without a pin, the removal of a file frees pages that a request reads.
    ///
    /// # Errors
    /// `ESTALE` if the file is gone, also if it has no name and no pin; errors of the volume.
    pub fn pin(self: &Arc<Fs>, id: FileId) -> Result<Pin> {
        lifetime::pin(&self.txs, id)?;
        Ok(Pin {
            fs: Arc::clone(self),
            id,
            is_released: false,
        })
    }

    /// Attributes of a file.
    ///
    /// # Errors
    /// As [`Fs::pin`].
    pub fn attr_of(&self, id: FileId) -> Result<Attr> {
        self.txs.inspect(|core| {
            let inode = core.inode_of(id)?;
            attr::attr(core, id.ino, &inode)
        })
    }
}
