//! The map of a file that the mount shares with its direct clients (RFD 015). The lock of a file
//! blocks them through it, so it lies below the room of the direct clients.

use crate::format::inode::{AppendExtent, Time};

/// A file's map, shared between the mount and its direct clients.
pub trait SharedFileMap: Send + Sync {
    /// Blocks direct clients until [`SharedFileMap::reopen`], and returns when no client is in an
    /// operation.
    fn close(&self);
    /// Takes back one [`SharedFileMap::close`]. Clients enter again after the last.
    fn reopen(&self);
    /// Invalidates the published map. Clients are blocked.
    fn outdate(&self);
    /// Publishes the file's size, and the first page of each of its spans in the space; see
    /// [`span_index`](crate::format::page_map::span_index). Clients are blocked.
    fn publish(&self, size: u64, spans: &[u64]);
    /// Takes the time of the last write by a client, if it was not taken before.
    fn take_write_time(&self) -> Option<Time>;
    /// Whether the published map is invalid.
    fn is_outdated(&self) -> bool {
        true
    }
    /// Grants clients append space, after [`SharedFileMap::publish`]. `tail` is the content of the
    /// last page below the end. Clients are blocked.
    fn grant_append_space(&self, _extent: AppendExtent, _tail: &[u8]) {}
    /// The end of the file that clients report. `None` if they cannot be asked, or have another
    /// grant.
    fn append_end(&self, _extent: AppendExtent) -> Option<u64> {
        None
    }
    /// A descriptor of the file was closed. From now on direct clients check which file a
    /// descriptor number leads to before they use the number again.
    fn record_close(&self) {}
    /// Keeps direct clients from extending the file until [`SharedFileMap::unlock_end`]; other
    /// operations go on. False: a client is about to extend it.
    fn lock_end(&self) -> bool {
        true
    }
    /// Ends [`SharedFileMap::lock_end`].
    fn unlock_end(&self) {}
}
