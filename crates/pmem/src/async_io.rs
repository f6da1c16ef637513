//! Requests of a medium that take as long as a device: loads of pages and syncs.

use crate::map_error::MapError;
use std::os::fd::BorrowedFd;

/// A user's requests to a medium whose pages may not be in memory. One thread uses it.
pub trait AsyncIo: Send {
    /// Starts loads of the pages that hold these bytes. [`AsyncIo::poll`] returns the tag when all of them have ended.
    /// A loaded page may be evicted again before it is read.
    fn load(&mut self, tag: u64, offsets: &[usize]);

    /// The same for pages that may be cached: those without changes take their bytes from the device again, so that
    /// damage there is found.
    fn reload(&mut self, tag: u64, offsets: &[usize]);

    /// Has [`AsyncIo::submit`] write all stores so far to the device. Once that has ended they survive the end of this
    /// process.
    fn write(&mut self, tag: u64);

    /// As [`AsyncIo::write`], and then a flush of all writes that have ended. Once that has ended they survive power loss.
    fn write_and_sync(&mut self, tag: u64);

    /// Has [`AsyncIo::submit`] flush all writes that have ended, of any user, and those that this user asked for before. Once
    /// that has ended they survive power loss. Stores without an [`AsyncIo::write`] need a sync of the medium.
    fn sync(&mut self, tag: u64);

    /// Starts the writes and syncs since the last call. It may block for one of them if nothing else is waited for.
    fn submit(&mut self);

    /// Starts a wait until the medium takes changes without blocking. Another user may take the room first.
    fn wait_for_room(&mut self, tag: u64);

    /// Moves the tags of requests that have ended since the last call to `ended`. A failed load is no
    /// error: the page is then listed as unreadable.
    fn poll(&mut self, ended: &mut Vec<(u64, Result<(), MapError>)>);

    /// Whether requests have ended that no descriptor of [`AsyncIo::poll_fds`] reports.
    fn has_ended_at_once(&self) -> bool;

    /// Descriptors that become readable when [`AsyncIo::poll`] may have results.
    fn poll_fds<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>);
}
