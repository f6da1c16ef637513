//! What calls do about ports when the volume opens few channels.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)]

mod support;

use bytes::Bytes;
use pagemesh_base::space::{Channel, Completion, Request, Space, SpaceError, Token};
use pagemesh_fs::{Fs, Ino, Make};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::memory::{Memory, wait};
use support::pool::Pooled;
use support::{OWNER, clock, made};

/// Channels that a mount has for itself.
const OWN: usize = 2;

/// When somebody hears that there is no further channel.
#[derive(Clone, Copy)]
enum Told {
    /// When he opens one.
    AtOnce,
    /// By its first request.
    Late,
}

/// A space of so many channels.
#[derive(Clone)]
struct Few {
    inner: Arc<dyn Space>,
    most: usize,
    told: Told,
    open: Arc<AtomicUsize>,
    refused: Arc<AtomicUsize>,
}

fn busy() -> SpaceError {
    SpaceError::Busy("there are enough; close some".into())
}

impl Few {
    fn new(inner: Arc<dyn Space>, most: usize, told: Told) -> Few {
        Few {
            inner,
            most,
            told,
            open: Arc::default(),
            refused: Arc::default(),
        }
    }

    fn of_memory(most: usize, told: Told) -> Few {
        let memory = Memory::new(1 << 30);
        drop(made(&memory));
        Few::new(memory.shared(), most, told)
    }

    fn mount(self) -> (Few, Fs) {
        let fs = Fs::mount(Arc::new(self.clone()), wait, clock).unwrap();
        (self, fs)
    }

    fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }

    fn refused(&self) -> usize {
        self.refused.load(Ordering::SeqCst)
    }
}

impl Space for Few {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        let before = self.open.fetch_add(1, Ordering::SeqCst);
        let way = Way {
            inner: self.inner.open()?,
            is_refused: before >= self.most,
            done: Vec::new(),
            few: self.clone(),
        };
        let is_refused = way.is_refused && matches!(self.told, Told::AtOnce);
        self.refused
            .fetch_add(usize::from(is_refused), Ordering::SeqCst);
        match is_refused {
            true => Err(busy()),
            false => Ok(Box::new(way)),
        }
    }
}

struct Way {
    inner: Box<dyn Channel>,
    is_refused: bool,
    done: Vec<Completion>,
    few: Few,
}

impl Channel for Way {
    fn submit(&mut self, token: Token, request: Request) {
        if !self.is_refused {
            return self.inner.submit(token, request);
        }
        self.few.refused.fetch_add(1, Ordering::SeqCst);
        let result = Err(busy());
        self.done.push(Completion { token, result });
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.done);
        self.inner.reap(into);
    }

    fn wait_on(&self, _: &mut Vec<RawFd>) {}
}

impl Drop for Way {
    fn drop(&mut self) {
        self.few.open.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn who_finds_no_channel_waits_for_a_port() {
    for told in [Told::AtOnce, Told::Late] {
        let (few, fs) = Few::of_memory(OWN + 1, told).mount();
        let ino = fs.create(Ino::ROOT, b"file", Make::File, 0o600, OWNER);
        let ino = ino.unwrap().ino;
        let mut first = fs.borrow().unwrap();
        assert!(fs.spare_pipe().is_none(), "it never waits");
        let data = Bytes::from_static(b"later");
        let write = || fs.write(&mut *fs.borrow()?, ino, Some(0), &data, false);
        std::thread::scope(|scope| {
            let others: Vec<_> = (0..3).map(|_| scope.spawn(write)).collect();
            while few.refused() == 0 {
                std::thread::yield_now();
            }
            assert!(others.iter().all(|other| !other.is_finished()));
            let early = Bytes::from_static(b"early");
            fs.write(&mut first, ino, Some(0), &early, false).unwrap();
            drop(first);
            for other in others {
                assert_eq!(other.join().unwrap().unwrap(), 0..5);
            }
        });
        assert!(few.refused() <= 3, "who has tried waits");
        assert_eq!(few.open(), OWN + 1);
        let read = fs.read(&mut fs.borrow().unwrap(), ino, 0, 9).unwrap();
        assert_eq!(read, b"later");
    }
}

#[test]
fn a_mount_needs_channels_of_its_own() {
    for told in [Told::AtOnce, Told::Late] {
        let few = Few::of_memory(OWN - 1, told);
        let error = Fs::mount(Arc::new(few), wait, clock).err().unwrap();
        assert!(error.to_string().contains("close some"), "{error}");
    }
}

#[test]
fn ports_that_are_idle_for_long_are_closed() {
    let (few, fs) = Few::of_memory(OWN + 3, Told::AtOnce).mount();
    let now = Instant::now();
    let tend = |s: u64| fs.tend(now + Duration::from_secs(s), &mut Vec::new());
    let all = [(); 3].map(|()| fs.borrow().unwrap());
    tend(0);
    tend(100);
    assert_eq!(few.open(), OWN + 3, "they are in use");
    drop(all);
    tend(100);
    // One of them is used on and on.
    for s in 101..120 {
        drop(fs.borrow().unwrap());
        tend(s);
        let left = if s <= 110 { 3 } else { 1 };
        assert_eq!(few.open(), OWN + left, "after {s} s");
    }
    tend(140);
    assert_eq!(few.open(), OWN);
    drop(fs.borrow().unwrap());
    assert_eq!(few.open(), OWN + 1);
}

/// Who finds no room has a port, and the reserve needs none.
#[test]
fn the_last_port_is_enough_to_give_up_the_reserve() {
    let pooled = Pooled::new(24 << 20, 1 << 36, false);
    let (_, fs) = Few::new(pooled.shared(), OWN + 1, Told::Late).mount();
    while fs.free_some() {}
    let ino = fs.create(Ino::ROOT, b"file", Make::File, 0o600, OWNER);
    let ino = ino.unwrap().ino;
    let mut port = fs.borrow().unwrap();
    let data = Bytes::from(vec![7; 1 << 20]);
    fs.write(&mut port, ino, Some(0), &data, false).unwrap();
    pooled.fill();
    let full = fs.write(&mut port, ino, None, &data, false);
    assert_eq!(full.unwrap_err().errno(), Errno::NOSPC);
    assert_eq!(fs.set_size(&mut port, ino, 12_345).unwrap().size, 12_345);
    drop(port);
    // Nor does freeing what is left, or taking it again.
    while fs.free_some() {}
}

/// What goes with the log of a long sync goes by the port of who syncs.
#[test]
fn a_long_sync_needs_one_port() {
    const PAGES: u64 = 200;
    let (few, fs) = Few::of_memory(OWN + 1, Told::AtOnce).mount();
    let made = fs.create(Ino::ROOT, b"file", Make::File, 0o600, OWNER);
    let ino = made.unwrap().ino;
    fs.open(ino).unwrap();
    let mut port = fs.borrow().unwrap();
    let data = Bytes::from(vec![1; PAGES as usize * 4096]);
    fs.write(&mut port, ino, Some(0), &data, false).unwrap();
    fs.hold(&mut port, ino, 0, &data).unwrap();
    let inodes = fs.usage().inodes;
    fs.sync(&mut port, ino).unwrap();
    assert_eq!((fs.held_pages(), fs.usage().inodes), (0, inodes));
    assert_eq!((few.open(), few.refused()), (OWN + 1, 0));
}
