//! Row handling of the mount, for clients of any kind: no process, no thread, no clock. The
//! [`server`](crate::server) adds waiting and killing of processes.

use crate::shared::shared_file_map::SharedFileMap;
use pagemesh_base::defect::{self, Defect};
use pagemesh_fs::{AppendExtent, Ino, Time};
use pagemesh_volume::direct_access::DirectSegment;
use std::sync::Arc;

/// Returns once no client is in an operation on a file with a closed map. Between two looks it
/// calls `wait` with the number of an active row; if `wait` returns false, it stops waiting.
pub fn drain_file(segment: &DirectSegment, ino: Ino, mut wait: impl FnMut(usize) -> bool) {
    if defect::is(Defect::SharedFileMapNotAwaited) {
        return;
    }
    let inside = || {
        let mut active = segment.active_ops();
        active.find(|(_, place)| place.file == ino.0)
    };
    while let Some((number, _)) = inside() {
        if !wait(number) {
            return;
        }
    }
}

/// Frees a dead client's row for another client. The caller has reconciled the legs where the
/// client was in an operation. If the client held the append lock, the file map is outdated from
/// now on.
pub fn clear_row(segment: &DirectSegment, number: usize, file_map: Option<&SharedFileMap>) {
    if let Some(file_map) = file_map {
        file_map.release_dead_lock(number);
    }
    segment.row(number).end_op();
}

/// A file's map, as its file system uses it: once `close` returns, no client is in an operation on
/// the file.
pub struct DrainingFileMap {
    file_map: Arc<SharedFileMap>,
    drain: Box<dyn Fn() + Send + Sync>,
}

impl DrainingFileMap {
    /// Wraps a map; `close` waits by `await_quiet`.
    pub fn new(
        file_map: Arc<SharedFileMap>,
        await_quiet: impl Fn() + Send + Sync + 'static,
    ) -> DrainingFileMap {
        DrainingFileMap {
            file_map,
            drain: Box::new(await_quiet),
        }
    }

    /// The map that clients read.
    #[must_use]
    pub fn file_map(&self) -> &SharedFileMap {
        &self.file_map
    }
}

impl pagemesh_fs::SharedFileMap for DrainingFileMap {
    fn close(&self) {
        self.file_map.close();
        (self.drain)();
    }

    fn reopen(&self) {
        self.file_map.reopen();
    }

    fn outdate(&self) {
        self.file_map.outdate();
    }

    fn publish(&self, size: u64, spans: &[u64]) {
        self.file_map.publish(size, spans);
    }

    fn take_write_time(&self) -> Option<Time> {
        self.file_map.take_write_time()
    }

    fn is_outdated(&self) -> bool {
        self.file_map.is_outdated()
    }

    fn record_close(&self) {
        self.file_map.record_close();
    }

    fn grant_append_space(&self, append_extent: AppendExtent, tail: &[u8]) {
        self.file_map.grant_append_space(append_extent, tail);
    }

    fn append_end(&self, append_extent: AppendExtent) -> Option<u64> {
        self.file_map.append_end(append_extent)
    }

    fn lock_end(&self) -> bool {
        self.file_map.lock_end()
    }

    fn unlock_end(&self) {
        self.file_map.unlock_end();
    }
}
