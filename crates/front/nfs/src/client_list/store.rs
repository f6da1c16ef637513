//! The place of a stable list.

use pagemesh_fs::FsError;

/// A file that keeps a stable list. Writes that are not durable yet may be lost, or in part, at a crash.
pub trait StableStore: Send + Sync {
    /// Bytes of the file; 0 if there is none yet.
    ///
    /// # Errors
    /// If the file system fails.
    fn len(&self) -> Result<u64, FsError>;

    /// Whether the file has no bytes.
    ///
    /// # Errors
    /// As [`Self::len`].
    fn is_empty(&self) -> Result<bool, FsError> {
        Ok(self.len()? == 0)
    }

    /// The bytes from `offset`, as many as there are up to `bytes`. Holes are zeros.
    ///
    /// # Errors
    /// If the file system fails.
    fn read(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, FsError>;

    /// Writes bytes. The first write makes the file.
    ///
    /// # Errors
    /// If the file system fails. Then any part of the bytes may be there.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), FsError>;

    /// Makes all earlier writes durable.
    ///
    /// # Errors
    /// If the file system fails, or has lost an earlier write.
    fn sync(&self) -> Result<(), FsError>;
}
