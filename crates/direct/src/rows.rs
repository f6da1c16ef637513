//! What a mount does with rows, wherever its guests are: no process, no thread, no clock.
//! The [`server`](crate::server) waits and ends processes beside it.

use crate::shared_file_map::SharedFileMap;
use pagemesh_base::defect::{self, Defect};
use pagemesh_fs::{AppendExtent, Ino, Time};
use pagemesh_volume::direct_access::DirectSegment;
use std::sync::Arc;

/// Returns once no guest is inside of an operation on a file whose board is closed. Between
/// two looks `wait` is told of a row that is; false: nobody is waited for any more.
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

/// A dead guest's row may be another's: the legs are alike where it was inside of an
/// operation. What it held of the file's board says nothing any more.
pub fn clear_row(segment: &DirectSegment, number: usize, file_map: Option<&SharedFileMap>) {
    if let Some(file_map) = file_map {
        file_map.release_dead_lock(number);
    }
    segment.row(number).end_op();
}

/// A file's board, as its file system sees it: once it is closed no guest is inside any more.
pub struct DrainingFileMap {
    file_map: Arc<SharedFileMap>,
    drain: Box<dyn Fn() + Send + Sync>,
}

impl DrainingFileMap {
    /// Of this board; whoever closes it waits by `await_quiet`.
    pub fn new(
        file_map: Arc<SharedFileMap>,
        await_quiet: impl Fn() + Send + Sync + 'static,
    ) -> DrainingFileMap {
        DrainingFileMap {
            file_map,
            drain: Box::new(await_quiet),
        }
    }

    /// What guests see.
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
