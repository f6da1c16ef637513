//! What a mount does with rows, wherever its guests are: no process, no thread, no clock.
//! The [`server`](crate::server) waits and ends processes beside it.

use crate::board::Board;
use pagemesh_base::defect::{self, Defect};
use pagemesh_fs::Ino;
use pagemesh_volume::guests::Segment;

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
