//! Extended attributes: many of them, of any length.

use crate::support;
use pagemesh_fs::{CreateKind, Fs, Ino, SetXattrMode};
use rustix::io::Errno;
use std::collections::BTreeMap;
use support::memory::MemorySpace;
use support::{OWNER, mount_and_free, new_fs};

const SIZE: u64 = 16 << 20;

fn file(fs: &Fs) -> Ino {
    let made = fs.create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER);
    made.unwrap().ino
}

/// A random number below `end`, xorshift64.
fn below(state: &mut u64, end: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state % end
}

fn check_all(fs: &Fs, ino: Ino, expected: &BTreeMap<Vec<u8>, Vec<u8>>) {
    let mut names = fs.xattr_names(ino).unwrap();
    names.sort();
    assert!(names.iter().eq(expected.keys()), "{} names", names.len());
    for (name, value) in expected {
        assert_eq!(&fs.xattr(ino, name).unwrap(), value);
    }
}

#[test]
fn random_attributes_are_those_of_a_map() {
    let memory = MemorySpace::new(SIZE);
    let (mut fs, _) = new_fs(&memory);
    let ino = file(&fs);
    let usage = fs.usage();
    let mapped = memory.mapped_pages();
    let mut expected = BTreeMap::new();
    let (mut random, mut refused) = (7, 0);
    for round in 0..4_000 {
        let number = below(&mut random, 400);
        // Names and values of several lengths, and pages full of values of one length.
        let width = 3 + number as usize % 5;
        let name = format!("user.{number:0>width$}").into_bytes();
        let len = match below(&mut random, 20) {
            0..3 => below(&mut random, 9_000),
            3..6 => below(&mut random, 300),
            _ => 40 * (number % 3),
        };
        match below(&mut random, 3) {
            0 => {
                let removed = fs.remove_xattr(ino, &name).err();
                let expected = expected.remove(&name).is_none().then_some(Errno::NODATA);
                assert_eq!(removed.map(|error| error.errno()), expected);
            }
            _ => {
                let value = vec![round as u8; len as usize];
                match fs.set_xattr(ino, &name, &value, SetXattrMode::Always) {
                    Ok(()) => drop(expected.insert(name.clone(), value)),
                    Err(error) => {
                        assert_eq!(error.errno(), Errno::NOSPC);
                        refused += 1;
                    }
                }
            }
        }
        let found = fs.xattr(ino, &name).ok();
        assert_eq!(found.as_ref(), expected.get(&name));
        if round % 250 == 0 {
            check_all(&fs, ino, &expected);
            fs = mount_and_free(&memory).0;
            check_all(&fs, ino, &expected);
        }
    }
    assert!(refused > 0, "the list was full at times");
    for name in expected.keys() {
        fs.remove_xattr(ino, name).unwrap();
    }
    assert_eq!(fs.xattr_names(ino).unwrap().len(), 0);
    assert_eq!(fs.usage(), usage);
    assert_eq!(memory.mapped_pages(), mapped);
}

#[test]
fn change_among_many_attributes_writes_few_pages() {
    let memory = MemorySpace::new(SIZE);
    let (fs, _) = new_fs(&memory);
    let ino = file(&fs);
    let set = |number: u32, with: u8| {
        let name = format!("user.{number:08}");
        fs.set_xattr(ino, name.as_bytes(), &[with; 9], SetXattrMode::Always)
            .unwrap();
    };
    (0..4_000).for_each(|number| set(number, 1));
    let check = |change: &dyn Fn()| {
        let steps = memory.steps();
        change();
        assert_eq!(memory.steps(), steps + 1, "one transaction");
        // The inode, the place of the change, and the end of the list; both may lie in two pages.
        let pages = memory.last_step_pages();
        assert!(pages <= 5, "{pages} pages");
    };
    check(&|| set(4_000, 1));
    check(&|| set(7, 2));
    check(&|| fs.remove_xattr(ino, b"user.00000000").unwrap());
    let found = |number: u32| fs.xattr(ino, format!("user.{number:08}").as_bytes());
    assert_eq!(found(0).unwrap_err().errno(), Errno::NODATA);
    assert_eq!(found(7).unwrap(), [2; 9]);
    assert_eq!(found(4_000).unwrap(), [1; 9]);
    assert_eq!(fs.xattr_names(ino).unwrap().len(), 4_000);
}
