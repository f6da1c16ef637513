//! What a mount does with rows, wherever its guests are: no process, no thread, no clock.
//! The [`server`](crate::server) waits and ends processes beside it.

use crate::board::Board;
use pagemesh_base::defect::{self, Defect};
use pagemesh_fs::{Growth, Ino, Time};
use pagemesh_volume::guests::Segment;
use std::sync::Arc;

/// Returns once no guest is inside of an operation on a file whose board is closed. Between
/// two looks `wait` is told of a row that is; false: nobody is waited for any more.
pub fn await_quiet(segment: &Segment, ino: Ino, mut wait: impl FnMut(usize) -> bool) {
    if defect::is(Defect::BoardNotAwaited) {
        return;
    }
    let inside = || {
        let mut active = segment.active();
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
pub fn clear(segment: &Segment, number: usize, board: Option<&Board>) {
    if let Some(board) = board {
        board.tear(number);
    }
    segment.row(number).leave();
}

/// A file's board, as its file system sees it: once it is closed no guest is inside any more.
pub struct FileBoard {
    board: Arc<Board>,
    await_quiet: Box<dyn Fn() + Send + Sync>,
}

impl FileBoard {
    /// Of this board; whoever closes it waits by `await_quiet`.
    pub fn new(board: Arc<Board>, await_quiet: impl Fn() + Send + Sync + 'static) -> FileBoard {
        FileBoard {
            board,
            await_quiet: Box::new(await_quiet),
        }
    }

    /// What guests see.
    #[must_use]
    pub fn board(&self) -> &Board {
        &self.board
    }
}

impl pagemesh_fs::Board for FileBoard {
    fn close(&self) {
        self.board.close();
        (self.await_quiet)();
    }

    fn reopen(&self) {
        self.board.reopen();
    }

    fn outdate(&self) {
        self.board.outdate();
    }

    fn show(&self, size: u64, spans: &[u64]) {
        self.board.show(size, spans);
    }

    fn take_written(&self) -> Option<Time> {
        self.board.take_written()
    }

    fn is_outdated(&self) -> bool {
        self.board.is_outdated()
    }

    fn note_closed(&self) {
        self.board.note_closed();
    }

    fn lend(&self, growth: Growth, tail: &[u8]) {
        self.board.lend(growth, tail);
    }

    fn end(&self, growth: Growth) -> Option<u64> {
        self.board.end(growth)
    }

    fn hold_end(&self) -> bool {
        self.board.hold_end()
    }

    fn release_end(&self) {
        self.board.release_end();
    }
}
