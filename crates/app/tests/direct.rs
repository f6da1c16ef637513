//! The direct path: processes that reach the files of a mount themselves, beside others
//! that go through the kernel. For root with /dev/fuse.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use pagemesh_direct::guest::{File as Direct, Guest};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use support::mounted::{self, Mounted};
use support::until;

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
    }
}

fn opened(mount: &Mounted, name: &str) -> File {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true);
    options.open(mount.dir.join(name)).unwrap()
}

fn direct(guest: &Guest, file: &File) -> Option<Direct> {
    let found = file.metadata().unwrap();
    guest.open(found.dev(), found.ino())
}

fn guest() -> Guest {
    Guest::new(|run| run())
}

/// What is at a place, by both ways.
fn check(direct: &Direct, file: &File, offset: u64, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    until("guests are let in again", || {
        direct.read(&mut bytes, offset, true) == Some(expected.len())
    });
    assert!(bytes == expected, "directly, at {offset}");
    bytes.fill(0);
    file.read_exact_at(&mut bytes, offset).unwrap();
    assert!(bytes == expected, "by the kernel, at {offset}");
}

#[test]
fn what_a_guest_writes_is_what_the_kernel_reads() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    let file = opened(&mount, "file");
    let mut random = Random::new(1);
    let mut model = vec![0; 3 << 20];
    random.fill(&mut model);
    file.write_all_at(&model, 0).unwrap();
    let guest = guest();
    let direct = direct(&guest, &file).expect("the file is on the direct path");
    check(&direct, &file, 0, &model[..1 << 20]);
    for round in 0..2000 {
        let len = 1 + random.below(20_000) as usize;
        let offset = random.below((model.len() - len) as u64);
        let part = &mut model[offset as usize..][..len];
        random.fill(part);
        match round % 3 {
            0 => file.write_all_at(part, offset).unwrap(),
            _ => until("guests are let in", || {
                direct.write(part, offset, true) == Some(len)
            }),
        }
        check(&direct, &file, offset, part);
    }
    // Longer, by the kernel: a guest goes by what the mount tells anew.
    assert_eq!(direct.write(&[1; 100], model.len() as u64 - 50, true), None);
    model.extend_from_slice(&[7; 5000]);
    file.write_all_at(&[7; 5000], model.len() as u64 - 5000)
        .unwrap();
    let last = model.len() - 9000;
    check(&direct, &file, last as u64, &model[last..]);
    let mut bytes = [0; 100];
    assert_eq!(
        direct.read(&mut bytes, model.len() as u64 - 40, true),
        Some(40)
    );
    assert_eq!(
        direct.read(&mut bytes, model.len() as u64 + 40, true),
        Some(0)
    );
    // Shorter: what was cut off is nobody's any more.
    file.set_len(10_000).unwrap();
    until("guests are let in again", || {
        direct.read(&mut bytes, 9_950, true) == Some(50)
    });
    assert_eq!(direct.write(&[1; 10], 9_995, true), None);
    // Holes are the kernel's.
    file.set_len(50_000).unwrap();
    for _ in 0..20 {
        assert_eq!(direct.read(&mut bytes, 9_950, true), None);
    }
    drop((direct, guest, file));
    mount.stop(&cluster);
    cluster.check_identical("files");
}

#[test]
fn the_time_of_a_guests_write_is_told() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    let file = opened(&mount, "file");
    file.write_all_at(&[1; 8192], 0).unwrap();
    let old = file.metadata().unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    let guest = guest();
    let direct = direct(&guest, &file).expect("on the direct path");
    until("guests are let in", || {
        direct.write(&[2; 4096], 0, true).is_some()
    });
    until("the time is told", || {
        let now = file.metadata().unwrap();
        (now.mtime(), now.mtime_nsec()) > (old.mtime(), old.mtime_nsec())
    });
    drop((direct, guest, file));
    mount.stop(&cluster);
}

#[test]
fn a_brick_goes_and_returns_under_a_guest() {
    let Some(mut cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    let file = opened(&mount, "file");
    file.write_all_at(&[0; 1 << 20], 0).unwrap();
    let guest = guest();
    let direct = direct(&guest, &file).expect("on the direct path");
    let mut random = Random::new(3);
    let mut model = vec![0; 1 << 20];
    let mut by_guest = 0;
    let mut write = |by_guest: &mut u32| {
        let offset = random.below(255) * 4096;
        let part = &mut model[offset as usize..][..4096];
        random.fill(part);
        match direct.write(part, offset, true) {
            Some(len) => {
                assert_eq!(len, 4096);
                *by_guest += 1;
            }
            None => file.write_all_at(part, offset).unwrap(),
        }
    };
    for _ in 0..1000 {
        write(&mut by_guest);
    }
    assert!(by_guest > 900, "{by_guest}");
    cluster.kill_brick(1);
    for _ in 0..1000 {
        write(&mut by_guest);
    }
    cluster.restart_brick(1);
    let alone = by_guest;
    until("guests are let in with both copies", || {
        write(&mut by_guest);
        let shown = cluster.json(&["volume", "show", "files"]).to_string();
        by_guest > alone && !shown.contains("stale") && !shown.contains("syncing")
    });
    let healthy = by_guest;
    until("guests are let in with both copies", || {
        write(&mut by_guest);
        by_guest > healthy
    });
    for _ in 0..1000 {
        write(&mut by_guest);
    }
    let mut bytes = vec![0; 1 << 20];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == model);
    drop((direct, guest, file));
    mount.stop(&cluster);
    cluster.check_identical("files");
}
