//! Who is told that bytes may be lost.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)]

mod support;

use pagemesh_fs::{Fs, Ino, Make, Port, Seen};
use rustix::io::Errno;
use std::sync::Arc;
use support::lossy::Lossy;
use support::memory::{Memory, wait};
use support::{OWNER, clock, made};

struct Case {
    space: Lossy,
    fs: Fs,
    ports: [Port; 2],
    ino: Ino,
}

impl Case {
    fn new() -> Case {
        let memory = Memory::new(1 << 30);
        drop(made(&memory));
        let space = Lossy::new(&memory);
        let fs = Fs::mount(Arc::new(space.clone()), wait, clock).unwrap();
        let made = fs.create(Ino::ROOT, b"file", Make::File, 0o600, OWNER);
        let ino = made.unwrap().ino;
        Case {
            ports: [fs.port().unwrap(), fs.port().unwrap()],
            space,
            fs,
            ino,
        }
    }

    /// Syncs by each channel, one after the other: what they say.
    fn check(&mut self, seen: &Seen, expected: [Result<(), Errno>; 2]) {
        let Case { fs, ports, ino, .. } = self;
        let mut sync = |at: usize| {
            let synced = fs.sync_opened(&mut ports[at], *ino, seen);
            synced.map_err(|error| error.errno())
        };
        assert_eq!([sync(0), sync(1)], expected);
    }
}

const TOLD: [Result<(), Errno>; 2] = [Err(Errno::IO), Ok(())];
const SOUND: [Result<(), Errno>; 2] = [Ok(()), Ok(())];

#[test]
fn each_open_file_hears_of_a_loss_once() {
    let mut case = Case::new();
    let (one, other) = (case.fs.seen(), case.fs.seen());
    case.check(&one, SOUND);
    case.space.lose();
    // By whichever channel.
    case.check(&one, TOLD);
    case.check(&other, TOLD);
    case.check(&one, SOUND);
    case.check(&other, SOUND);
    let later = case.fs.seen();
    case.check(&later, SOUND);
    case.space.lose();
    case.space.lose();
    for seen in [&one, &other, &later] {
        case.check(seen, TOLD);
        case.check(seen, SOUND);
    }
}

#[test]
fn a_loss_that_nobody_heard_of_is_told_to_who_opens_the_file() {
    let mut case = Case::new();
    case.space.lose();
    let (one, other) = (case.fs.seen(), case.fs.seen());
    case.check(&one, TOLD);
    case.check(&other, TOLD);
    assert_eq!(case.fs.sync_all(&mut case.ports[0]), Ok(()));
    case.space.lose();
    // An unmount says what nobody has heard.
    let all = case.fs.sync_all(&mut case.ports[1]);
    assert_eq!(all.unwrap_err().errno(), Errno::IO);
    assert_eq!(case.fs.sync_all(&mut case.ports[0]), Ok(()));
    case.check(&one, TOLD);
}
