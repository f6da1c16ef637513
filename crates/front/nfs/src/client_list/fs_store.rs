//! The stable list in the service file of a file system.

use super::StableStore;
use bytes::Bytes;
use pagemesh_fs::{Fs, FsError};
use std::sync::Arc;

/// The service file of a file system. Each write is durable when it returns.
pub struct ServiceFileStore {
    fs: Arc<Fs>,
}

impl ServiceFileStore {
    /// The store of a file system. The first write makes the file.
    #[must_use]
    pub fn new(fs: Arc<Fs>) -> Self {
        Self { fs }
    }
}

impl StableStore for ServiceFileStore {
    fn len(&self) -> Result<u64, FsError> {
        match self.fs.service_file(false)? {
            Some(ino) => Ok(self.fs.attr(ino)?.size),
            None => Ok(0),
        }
    }

    fn read(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, FsError> {
        let Some(ino) = self.fs.service_file(false)? else {
            return Ok(Vec::new());
        };
        let mut channel = self.fs.borrow_channel()?;
        let len = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.fs.read(&mut channel, ino, offset, len)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), FsError> {
        let Some(ino) = self.fs.service_file(true)? else {
            return Err(rustix::io::Errno::NOENT.into());
        };
        let mut channel = self.fs.borrow_channel()?;
        let data = Bytes::copy_from_slice(bytes);
        let written = self
            .fs
            .write(&mut channel, ino, Some(offset), &data, true)?;
        match written.end - written.start == bytes.len() as u64 {
            true => Ok(()),
            false => Err(rustix::io::Errno::NOSPC.into()),
        }
    }

    fn sync(&self) -> Result<(), FsError> {
        Ok(())
    }
}
