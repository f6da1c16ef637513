//! A write of which only a part went past the kernel.

use super::support::mounted;
use super::{direct, guest, opened};
use std::os::unix::fs::FileExt;

const PAGE: usize = 4096;
/// Some records' worth, where a copy follows.
const PAGES: usize = 23;
const TRIES: u32 = 20;

/// Others may have read and overwritten what was written, so it is not written once more.
#[test]
fn the_kernel_is_left_with_the_rest_of_a_write() {
    let Some((cluster, mount)) = mounted::followed() else {
        return;
    };
    let file = opened(&mount, "file");
    file.write_all_at(&[0; PAGES * PAGE], 0).unwrap();
    let direct = direct(guest(), &file);
    super::until("it is a guest's", || direct.write(&[1; PAGE], 0).is_some());
    let mut round = 1u8;
    let written = (0..TRIES).find_map(|_| {
        // The ring fills, since nobody takes anything out of it.
        cluster.brick(2).freeze();
        let last = loop {
            round = round % 250 + 1;
            match direct.write(&[round; PAGES * PAGE], 0) {
                Some(written) if written == PAGES * PAGE => {}
                other => break other,
            }
        };
        cluster.brick(2).signal("CONT");
        if last.is_none() {
            // It was full between two writes. The next time it is so elsewhere.
            mounted::await_followed(&cluster);
            super::until("it is a guest's again", || {
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
