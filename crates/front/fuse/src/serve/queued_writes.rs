//! Writes that a thread begins and answers later, together with others.

use super::files::write_offset;
use super::{FsHandler, written};
use crate::abi;
use crate::open_files::OpenFile;
use crate::reply::FuseReply;
use crate::request::Request;
use crate::request_handler::{AsyncWriter, BeginResult};
use pagemesh_fs::{Ino, WriteQueue};
use std::os::fd::RawFd;

/// Writes that one thread has begun.
pub(super) struct QueuedWrites<'s> {
    served: &'s FsHandler,
    /// Present while there are such writes.
    queue: Option<WriteQueue<'s>>,
}

impl AsyncWriter for QueuedWrites<'_> {
    fn begin(&mut self, header: &abi::InHeader, request: &Request<'_>) -> BeginResult {
        if let Request::Fsync { file, is_data_only } = request {
            return self.skip_redundant_sync(Ino(header.node), *file, *is_data_only);
        }
        let Request::Write {
            file,
            offset,
            data,
            flags,
            how,
        } = request
        else {
            return BeginResult::NotStarted;
        };
        let Some(at) = write_offset(*offset, *flags) else {
            return BeginResult::NotStarted;
        };
        if how & (abi::WRITE_KILL_SUIDGID | abi::WRITE_CACHE) != 0 {
            return BeginResult::NotStarted;
        }
        // The kernel drops its pages after such a write, and this thread must not wait for that.
        let is_past_cache = how & abi::WRITE_LOCK_OWNER != 0;
        if is_past_cache && self.served.fs.has_cached_open(Ino(header.node)) {
            return BeginResult::NotStarted;
        }
        if !is_past_cache {
            self.served.fs.record_kernel_pages(Ino(header.node));
        }
        // A thread that serves the write synchronously may wait for a channel, or open one.
        let Some(pipe) = self
            .queue
            .take()
            .or_else(|| self.served.fs.try_write_queue())
        else {
            return BeginResult::NotStarted;
        };
        let pipe = self.queue.insert(pipe);
        let (ino, is_durable) = (
            Ino(header.node),
            self.served.is_write_durable(*file, *flags),
        );
        let fs = &self.served.fs;
        let begun = match is_past_cache {
            true => fs.begin_write_past_cache(pipe, header.unique, ino, at, data, is_durable),
            false => fs.begin_write(pipe, header.unique, ino, at, data, is_durable),
        };
        let begun = match begun {
            Ok(true) => {
                self.served.record_write(*file, *how);
                BeginResult::Pending
            }
            Ok(false) => BeginResult::NotStarted,
            Err(error) => BeginResult::Complete(FuseReply::Error(self.served.errno(&error))),
        };
        self.release_idle_queue();
        begun
    }

    fn reap(&mut self, tell: &mut dyn FnMut(u64, FuseReply)) {
        let served = self.served;
        if let Some(pipe) = &mut self.queue {
            pipe.reap(|unique, result| {
                let answer = match result {
                    Ok(bytes) => written(bytes),
                    Err(error) => FuseReply::Error(served.errno(&error)),
                };
                tell(unique, answer);
            });
        }
        self.release_idle_queue();
    }

    fn len(&self) -> usize {
        self.queue.as_ref().map_or(0, WriteQueue::len)
    }

    fn wait(&mut self, other: Option<RawFd>) {
        if let Some(pipe) = &mut self.queue {
            pipe.wait(other);
        }
    }
}

impl<'s> QueuedWrites<'s> {
    pub(super) fn new(served: &'s FsHandler) -> QueuedWrites<'s> {
        QueuedWrites {
            served,
            queue: None,
        }
    }

    /// Answers an fdatasync, or the sync after a durable write, at once if it has nothing to do.
    fn skip_redundant_sync(&self, ino: Ino, file: u64, is_data_only: bool) -> BeginResult {
        let opened = self.served.open_files.get(file);
        let is_done = |opened: &OpenFile| {
            (is_data_only || opened.expects_sync())
                && self.served.fs.has_nothing_to_sync(ino, &opened.lost_writes)
        };
        match opened.filter(|opened| is_done(opened)) {
            Some(opened) if opened.take_expected_sync() || is_data_only => {
                opened.sync_pattern.record_sync(is_data_only);
                BeginResult::Complete(FuseReply::DONE)
            }
            _ => BeginResult::NotStarted,
        }
    }

    /// Releases an idle channel, so that it takes part in the volume's other work meanwhile.
    fn release_idle_queue(&mut self) {
        if self.len() == 0 {
            self.queue = None;
        }
    }
}
