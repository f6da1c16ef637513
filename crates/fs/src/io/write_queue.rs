//! A queue of writes that go on while others begin.

use crate::error::{FsError, Result};
use crate::format::inode::Ino;
use crate::io::channel_pool::PooledChannel;
use crate::live::file_lock::FileReadGuard;
use pagemesh_base::space::{Request, SpaceError};
use pagemesh_base::tier_hint::TierHint;
use std::collections::BTreeMap;
use std::os::fd::RawFd;

/// An overwrite within a file without holes. Its guard keeps the file's size and pages unchanged.
pub(crate) struct Overwrite {
    pub(crate) ino: Ino,
    pub(crate) guard: FileReadGuard,
    pub(crate) requests: Vec<Request>,
    pub(crate) hint: TierHint,
    pub(crate) bytes: usize,
}

/// Called for each write of a queue when its bytes are there, or some of them after an error: before the file is unlocked, and before the
/// result is reported. `keeps_time`: a crash must leave a time that is as late.
pub(crate) trait WriteEnd {
    fn end_write(&self, ino: Ino, keeps_time: bool) -> Result<()>;
}

/// Writes in flight. Dropping the queue waits for them.
pub struct WriteQueue<'f> {
    channel: PooledChannel<'f>,
    ends: &'f (dyn WriteEnd + Sync),
    /// Writes by their first token.
    in_flight: BTreeMap<u64, QueuedWrite>,
}

struct QueuedWrite {
    id: u64,
    ino: Ino,
    /// Requests in flight.
    pending_requests: usize,
    /// Bytes that the write writes, or its first error.
    result: std::result::Result<usize, SpaceError>,
    keeps_time: bool,
    _guard: FileReadGuard,
}

impl<'f> WriteQueue<'f> {
    pub(crate) fn new(
        channel: PooledChannel<'f>,
        ends: &'f (dyn WriteEnd + Sync),
    ) -> WriteQueue<'f> {
        WriteQueue {
            channel,
            ends,
            in_flight: BTreeMap::new(),
        }
    }

    pub(crate) fn begin(&mut self, name: u64, write: Overwrite, keeps_time: bool) {
        let begun = QueuedWrite {
            id: name,
            ino: write.ino,
            pending_requests: write.requests.len(),
            result: Ok(write.bytes),
            keeps_time,
            _guard: write.guard,
        };
        self.in_flight.insert(self.channel.next_token, begun);
        for request in write.requests {
            self.channel.submit_hinted(request, write.hint);
        }
    }

    /// Makes progress without blocking. Calls `tell` with the id and result in bytes of each write
    /// that has ended.
    pub fn reap(&mut self, mut tell: impl FnMut(u64, Result<usize>)) {
        let channel = &mut *self.channel;
        channel.channel.reap(&mut channel.completions);
        for done in channel.completions.drain(..) {
            let begun = self.in_flight.range_mut(..=done.token.0).next_back();
            let (&first, begun) = begun.expect("what has begun is asked for alone");
            begun.pending_requests -= 1;
            if let (Ok(_), Err(cause)) = (&begun.result, done.result) {
                begun.result = Err(cause);
            }
            if begun.pending_requests == 0
                && let Some(ended) = self.in_flight.remove(&first)
            {
                let keeps_time = ended.keeps_time && ended.result.is_ok();
                let recorded = self.ends.end_write(ended.ino, keeps_time);
                let result = ended.result.map_err(FsError::Space);
                tell(ended.id, result.and_then(|bytes| recorded.map(|()| bytes)));
            }
        }
    }

    /// Number of writes in flight.
    #[must_use]
    pub fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether no write is in flight.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Sleeps until there may be something to reap, or another descriptor is readable.
    pub fn wait(&mut self, other: Option<RawFd>) {
        self.channel.sleep(other);
    }
}

impl Drop for WriteQueue<'_> {
    fn drop(&mut self) {
        while !self.is_empty() {
            self.reap(|_, _| {});
            if !self.is_empty() {
                self.wait(None);
            }
        }
    }
}
