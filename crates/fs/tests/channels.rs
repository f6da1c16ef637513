//! Calls and their channels when the volume opens few of them.

use crate::support;
use bytes::Bytes;
use pagemesh_base::space::{Channel, Completion, Request, Space, SpaceError, Token};
use pagemesh_fs::{CreateKind, Fs, Ino};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::memory::{MemorySpace, wait};
use support::pool::PoolSpace;
use support::{OWNER, clock, new_fs};

/// Channels that a mount keeps for itself.
const MOUNT_CHANNELS: usize = 2;

/// When the space refuses a further channel.
#[derive(Clone, Copy)]
enum RefusalPoint {
    /// At its opening.
    AtOpen,
    /// At its first request.
    AtFirstRequest,
}

/// A space with a limited number of channels.
#[derive(Clone)]
struct LimitedSpace {
    inner: Arc<dyn Space>,
    channels_max: usize,
    refusal_point: RefusalPoint,
    open_channels: Arc<AtomicUsize>,
    refusals: Arc<AtomicUsize>,
}

fn busy() -> SpaceError {
    SpaceError::Busy("there are enough; close some".into())
}

impl LimitedSpace {
    fn new(inner: Arc<dyn Space>, most: usize, told: RefusalPoint) -> LimitedSpace {
        LimitedSpace {
            inner,
            channels_max: most,
            refusal_point: told,
            open_channels: Arc::default(),
            refusals: Arc::default(),
        }
    }

    fn with_memory_fs(most: usize, told: RefusalPoint) -> LimitedSpace {
        let memory = MemorySpace::new(1 << 30);
        drop(new_fs(&memory));
        LimitedSpace::new(memory.shared(), most, told)
    }

    fn mount(self) -> (LimitedSpace, Fs) {
        let fs = Fs::mount(Arc::new(self.clone()), wait, clock).unwrap();
        (self, fs)
    }

    fn open_channels(&self) -> usize {
        self.open_channels.load(Ordering::SeqCst)
    }

    fn refusals(&self) -> usize {
        self.refusals.load(Ordering::SeqCst)
    }
}

impl Space for LimitedSpace {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        let before = self.open_channels.fetch_add(1, Ordering::SeqCst);
        let way = LimitedChannel {
            inner: self.inner.open()?,
            is_refused: before >= self.channels_max,
            done: Vec::new(),
            space: self.clone(),
        };
        let is_refused = way.is_refused && matches!(self.refusal_point, RefusalPoint::AtOpen);
        self.refusals
            .fetch_add(usize::from(is_refused), Ordering::SeqCst);
        if is_refused {
            Err(busy())
        } else {
            Ok(Box::new(way))
        }
    }
}

struct LimitedChannel {
    inner: Box<dyn Channel>,
    is_refused: bool,
    done: Vec<Completion>,
    space: LimitedSpace,
}

impl Channel for LimitedChannel {
    fn submit(&mut self, token: Token, request: Request) {
        if !self.is_refused {
            return self.inner.submit(token, request);
        }
        self.space.refusals.fetch_add(1, Ordering::SeqCst);
        let result = Err(busy());
        self.done.push(Completion { token, result });
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.done);
        self.inner.reap(into);
    }

    fn poll_fds(&self, _: &mut Vec<RawFd>) {}
}

impl Drop for LimitedChannel {
    fn drop(&mut self) {
        self.space.open_channels.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn call_without_channel_waits_for_a_pooled_one() {
    for told in [RefusalPoint::AtOpen, RefusalPoint::AtFirstRequest] {
        let (few, fs) = LimitedSpace::with_memory_fs(MOUNT_CHANNELS + 1, told).mount();
        let ino = fs.create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER);
        let ino = ino.unwrap().ino;
        let mut first = fs.borrow_channel().unwrap();
        assert!(fs.try_write_queue().is_none(), "it never waits");
        let data = Bytes::from_static(b"later");
        let write = || fs.write(&mut *fs.borrow_channel()?, ino, Some(0), &data, false);
        std::thread::scope(|scope| {
            let others: Vec<_> = (0..3).map(|_| scope.spawn(write)).collect();
            while few.refusals() == 0 {
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
        assert!(few.refusals() <= 3, "a call that has tried waits");
        assert_eq!(few.open_channels(), MOUNT_CHANNELS + 1);
        let read = fs
            .read(&mut fs.borrow_channel().unwrap(), ino, 0, 9)
            .unwrap();
        assert_eq!(read, b"later");
    }
}

#[test]
fn mount_fails_without_its_own_channels() {
    for told in [RefusalPoint::AtOpen, RefusalPoint::AtFirstRequest] {
        let few = LimitedSpace::with_memory_fs(MOUNT_CHANNELS - 1, told);
        let error = Fs::mount(Arc::new(few), wait, clock).err().unwrap();
        assert!(error.to_string().contains("close some"), "{error}");
    }
}

#[test]
fn idle_channels_are_closed() {
    let (few, fs) = LimitedSpace::with_memory_fs(MOUNT_CHANNELS + 3, RefusalPoint::AtOpen).mount();
    let now = Instant::now();
    let tend = |s: u64| fs.poll_idle_channels(now + Duration::from_secs(s), &mut Vec::new());
    let all = [(); 3].map(|()| fs.borrow_channel().unwrap());
    tend(0);
    tend(100);
    assert_eq!(few.open_channels(), MOUNT_CHANNELS + 3, "they are in use");
    drop(all);
    tend(100);
    // One of them stays in use.
    for s in 101..120 {
        drop(fs.borrow_channel().unwrap());
        tend(s);
        let left = if s <= 110 { 3 } else { 1 };
        assert_eq!(few.open_channels(), MOUNT_CHANNELS + left, "after {s} s");
    }
    tend(140);
    assert_eq!(few.open_channels(), MOUNT_CHANNELS);
    drop(fs.borrow_channel().unwrap());
    assert_eq!(few.open_channels(), MOUNT_CHANNELS + 1);
}

/// A call without room has a channel, and the reserve needs no further one.
#[test]
fn last_channel_suffices_to_release_the_reserve() {
    let pooled = PoolSpace::new(24 << 20, 1 << 36, false);
    let (_, fs) = LimitedSpace::new(
        pooled.shared(),
        MOUNT_CHANNELS + 1,
        RefusalPoint::AtFirstRequest,
    )
    .mount();
    while fs.free_deferred_piece() {}
    let ino = fs.create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER);
    let ino = ino.unwrap().ino;
    let mut port = fs.borrow_channel().unwrap();
    let data = Bytes::from(vec![7; 1 << 20]);
    fs.write(&mut port, ino, Some(0), &data, false).unwrap();
    pooled.fill();
    let full = fs.write(&mut port, ino, None, &data, false);
    assert_eq!(full.unwrap_err().errno(), Errno::NOSPC);
    assert_eq!(fs.set_size(&mut port, ino, 12_345).unwrap().size, 12_345);
    drop(port);
    // Freeing deferred pages and refilling the reserve need none either.
    while fs.free_deferred_piece() {}
}

/// The log of a long sync is freed through the channel of the sync.
#[test]
fn long_sync_needs_one_channel() {
    const PAGES: u64 = 200;
    let (few, fs) = LimitedSpace::with_memory_fs(MOUNT_CHANNELS + 1, RefusalPoint::AtOpen).mount();
    let made = fs.create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER);
    let ino = made.unwrap().ino;
    fs.open(ino).unwrap();
    let mut port = fs.borrow_channel().unwrap();
    let data = Bytes::from(vec![1; PAGES as usize * 4096]);
    fs.write(&mut port, ino, Some(0), &data, false).unwrap();
    fs.buffer_mmap_write(&mut port, ino, 0, &data).unwrap();
    let inodes = fs.usage().inodes;
    fs.sync(&mut port, ino).unwrap();
    assert_eq!((fs.mmap_dirty_pages(), fs.usage().inodes), (0, inodes));
    assert_eq!(
        (few.open_channels(), few.refusals()),
        (MOUNT_CHANNELS + 1, 0)
    );
}
