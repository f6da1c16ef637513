//! How much of a write one record covers: that much is applied as a whole or not at all.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{BrickControl, Stamp};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_brick::brick::Brick;
use pagemesh_brick::file;
use pagemesh_store::session::{LegSession, Session, write_numbered};
use std::cell::Cell;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(5));
const BYTES: u64 = 1100 * PAGE_BYTES as u64;

/// A direct client continues record by record, and reports its position when one fails.
#[test]
fn write_is_one_record_per_announced_length() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let path = dir.path().join("pool");
    file::create(&path, 64 << 20).expect("a pool");
    let (brick, keeper, _) = Brick::open(&path).expect("a brick");
    brick.create(SLICE, BYTES).expect("room");
    let (object, _) = brick.attach(SLICE, Epoch(1)).expect("the slice");
    let view = brick.mapping().clone();
    let handle = view.handle(object, SLICE).expect("the object");
    let number = brick
        .open_session(std::process::id(), 0)
        .expect("a session");
    let mut session = Session::new(view, number);
    let data = vec![7; 600 * PAGE_BYTES];
    let mut several = 0;
    for round in 1..60 {
        let len = 1 + round * 1_234_567 % data.len() as u64;
        let mut at = round * 7_654_321 % (BYTES - len);
        let (end, mut records) = (at + len, 0);
        while at < end {
            let run = session.record_len_max(at, end - at);
            let numbers = Cell::new(0);
            let stamp = || {
                numbers.set(numbers.get() + 1);
                let (epoch, op, open) = (Epoch(1), 1, 0);
                Stamp {
                    epoch,
                    op,
                    open_ops: open,
                }
            };
            let session = &mut session;
            let members = &mut [LegSession { session, handle }];
            let written = write_numbered(members, at, &data[..run as usize], Epoch(1), stamp);
            written.expect("room");
            assert_eq!(numbers.get(), 1, "{run} bytes at {at}");
            (at, records) = (at + run, records + 1);
        }
        several += u32::from(records > 1);
    }
    assert!(several > 10, "{several}");
    brick.close_session(number);
    keeper.stop();
}
