//! A write of which only a part went past the kernel.

use super::support::mounted;
use super::{direct_file, new_client, open_file};
use std::os::unix::fs::FileExt;

const PAGE: usize = 4096;
/// Enough for several records of an asynchronous replica.
const PAGES: usize = 23;
const TRIES: u32 = 20;

/// Other processes may have read and overwritten the written part, so it is not written again.
#[test]
fn kernel_writes_rest_of_partial_direct_write() {
    let Some((cluster, mount)) = mounted::mount_with_async_replica() else {
        return;
    };
    let file = open_file(&mount, "file");
    file.write_all_at(&[0; PAGES * PAGE], 0).unwrap();
    let direct = direct_file(new_client(), &file);
    super::until("the client writes directly", || {
        direct.write(&[1; PAGE], 0).is_some()
    });
    let mut round = 1u8;
    let written = (0..TRIES).find_map(|_| {
        // The replication ring fills, since its brick is stopped.
        cluster.brick(2).stop_all_threads();
        let last = loop {
            round = round % 250 + 1;
            match direct.write(&[round; PAGES * PAGE], 0) {
                Some(written) if written == PAGES * PAGE => {}
                other => break other,
            }
        };
        cluster.brick(2).signal("CONT");
        if last.is_none() {
            // The ring was full between two writes. The next time it is full at another point.
            mounted::await_async_replica(&cluster);
            super::until("the client writes directly again", || {
                direct.write(&[0; PAGE], 0).is_some()
            });
        }
        last
    });
    let written = written.expect("a part of a write was done");
    assert!(written > 0 && written.is_multiple_of(PAGE), "{written}");
    let mut found = vec![0; PAGES * PAGE];
    file.read_exact_at(&mut found, 0).unwrap();
    let (done, rest) = found.split_at(written);
    assert!(done.iter().all(|&byte| byte == round));
    assert!(rest.iter().all(|&byte| byte != round));
    drop((direct, file));
    mount.stop(&cluster);
    cluster.check_identical("files");
}
