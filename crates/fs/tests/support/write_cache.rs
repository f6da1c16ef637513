//! A space with a write cache that flushes only when a request asks for it.
//!
//! A change is durable after a flush that follows it. A durable change makes only itself durable: the interface of spaces
//! promises no more. A power cut keeps every durable change and any of the others.

use super::memory::{MemorySpace, wait};
use super::{clock, new_fs};
use pagemesh_base::space::{Channel, Completion, Request, Space, SpaceError, Token};
use pagemesh_fs::{Fs, IoChannel};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A moment at which the power can fail.
pub struct PowerCut {
    /// Whether each change so far is durable.
    durable: Vec<bool>,
}

/// A space in memory that logs its requests.
#[derive(Clone)]
pub struct WriteCacheSpace {
    memory: MemorySpace,
    log: Arc<Mutex<FlushLog>>,
    transactions: Arc<AtomicUsize>,
    direct: Arc<AtomicUsize>,
}

#[derive(Default)]
struct FlushLog {
    durable: Vec<bool>,
    cuts: Vec<PowerCut>,
}

impl FlushLog {
    /// Power cuts while a request stores its changes one after the other.
    fn add_changes(&mut self, changes: usize) {
        while self.durable.len() < changes {
            self.durable.push(false);
            self.add_cut();
        }
    }

    fn add_cut(&mut self) {
        let durable = self.durable.clone();
        self.cuts.push(PowerCut { durable });
    }
}

impl WriteCacheSpace {
    /// A space with an empty file system, which is durable.
    pub fn new(size_bytes: u64) -> WriteCacheSpace {
        let made = MemorySpace::new(size_bytes);
        drop(new_fs(&made));
        WriteCacheSpace::of(made.after_steps(made.steps()))
    }

    fn of(memory: MemorySpace) -> WriteCacheSpace {
        WriteCacheSpace {
            memory,
            log: Arc::default(),
            transactions: Arc::default(),
            direct: Arc::default(),
        }
    }

    pub fn mount(&self) -> (Fs, IoChannel) {
        let fs = Fs::mount(Arc::new(self.clone()), wait, clock).expect("mounted");
        while fs.free_deferred_piece() {}
        let port = fs.open_channel().expect("a port");
        (fs, port)
    }

    /// Limits the number of mapped pages.
    pub fn set_room(&self, pages: Option<usize>) {
        self.memory.set_room(pages);
    }

    /// The power cuts during each request since the last call, and now.
    pub fn take_cuts(&self) -> Vec<PowerCut> {
        let mut log = self.log.lock().expect("no panic");
        log.add_cut();
        std::mem::take(&mut log.cuts)
    }

    /// Numbers of transactions, and of other changes of pages, since the last call.
    pub fn take_change_counts(&self) -> (usize, usize) {
        let take = |count: &AtomicUsize| count.swap(0, Ordering::Relaxed);
        (take(&self.transactions), take(&self.direct))
    }

    /// The states that a power cut may leave, each one once, and at most `images_max`: all of them, or those that keep
    /// or lose everything or a single change, then random ones.
    pub fn images(&self, cut: &PowerCut, images_max: usize, seed: u64) -> Vec<WriteCacheSpace> {
        let changes = cut.durable.len();
        let open: Vec<usize> = (0..changes).filter(|&at| !cut.durable[at]).collect();
        let kept = kept_sets(open.len(), images_max, seed);
        let image = |kept: &Vec<bool>| {
            let is_lost = |step| open.binary_search(&step).is_ok_and(|at| !kept[at]);
            let memory = self
                .memory
                .with_changes(|step| step < changes && !is_lost(step));
            WriteCacheSpace::of(memory)
        };
        kept.iter().map(image).collect()
    }
}

/// Sets of this many unflushed changes that survive.
fn kept_sets(open: usize, images_max: usize, seed: u64) -> Vec<Vec<bool>> {
    if open < 16 && 1 << open <= images_max {
        let set = |bits: usize| (0..open).map(|at| bits >> at & 1 == 1).collect();
        return (0..1 << open).map(set).collect();
    }
    let mut sets = vec![vec![false; open], vec![true; open]];
    // The last changes first: those are new since the cut before.
    for last in (0..open).rev() {
        sets.push((0..open).map(|at| at != last).collect());
        sets.push((0..open).map(|at| at == last).collect());
    }
    sets.truncate(images_max / 2);
    let mut random = seed;
    while sets.len() < images_max {
        let mut bit = || {
            random = splitmix(random);
            random & 1 == 1
        };
        sets.push((0..open).map(|_| bit()).collect());
    }
    sets
}

/// SplitMix64 (Steele, Lea, Flood 2014).
fn splitmix(state: u64) -> u64 {
    let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Space for WriteCacheSpace {
    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn has_write_cache(&self) -> bool {
        true
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        Ok(Box::new(WriteCacheChannel {
            inner: self.memory.open()?,
            space: self.clone(),
        }))
    }
}

struct WriteCacheChannel {
    inner: Box<dyn Channel>,
    space: WriteCacheSpace,
}

impl Channel for WriteCacheChannel {
    fn submit(&mut self, token: Token, request: Request) {
        let is_durable = matches!(
            request,
            Request::Write { durable: true, .. } | Request::Transact { durable: true, .. }
        );
        match request {
            Request::Transact { .. } => _ = self.space.transactions.fetch_add(1, Ordering::Relaxed),
            Request::Write { .. } | Request::Discard { .. } => {
                self.space.direct.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
        let is_flush = request == Request::Flush;
        // Also excludes the requests of other channels.
        let mut log = self.space.log.lock().expect("no panic");
        let before = self.space.memory.steps();
        self.inner.submit(token, request);
        log.add_changes(self.space.memory.steps());
        match (is_flush, is_durable) {
            (true, _) => log.durable.fill(true),
            (false, true) => log.durable[before..].fill(true),
            (false, false) => {}
        }
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        self.inner.reap(into);
    }

    fn poll_fds(&self, _: &mut Vec<RawFd>) {}
}
