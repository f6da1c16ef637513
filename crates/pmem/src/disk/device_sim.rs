//! A device in memory for simulations. Its requests end when the simulation says so, in any order, on one thread.
//!
//! Contract of a device, as the disk above relies on it:
//! - each 512 bytes are written as a whole or not at all; a request's parts are written in any order;
//! - a read that overlaps a write in time may return the old or the new bytes;
//! - a write that has ended is visible to later reads, and survives the end of the process;
//! - a FLUSH makes the writes durable that ended before it began;
//! - at a power loss each 512 bytes have one of the contents since the last FLUSH, also of writes in flight,
//!   independently of each other;
//! - at the end of a process each 512 bytes of its writes in flight arrive or not; the next process opens the device only after
//!   its requests have ended.

mod events;

pub use events::{DeviceEnd, SimulatedCounts, SimulatedFault};

use pagemesh_base::defect::{self, Defect};
use pagemesh_base::poison::lock;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

const SECTOR_BYTES: usize = 512;
type Sector = [u8; SECTOR_BYTES];
type Page = [u8; PAGE_BYTES];

/// Latency of most requests.
const LATENCY_US_MAX: u64 = 300;
/// One request in this many takes longer, up to the limit below.
const LONG_ODDS: u64 = 40;
const LONG_LATENCY_US_MAX: u64 = 30_000;
/// Requests of a slow device take longer by this factor.
const SLOW_FACTOR: u32 = 50;

/// The user of a device: the disk of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Generation(u64);

/// The ring of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RingNo(u64);

/// A request that has ended, for its ring.
pub(super) struct EndedRequest {
    pub(super) buffer: usize,
    /// The number of bytes, or a negated error number.
    pub(super) result: i32,
    /// The bytes of a read.
    pub(super) bytes: Vec<u8>,
}

struct SimRequest {
    number: u64,
    ring: Option<RingNo>,
    buffer: usize,
    started: Duration,
    due: Duration,
    work: SimWork,
}

enum SimWork {
    /// The bytes of the moment at which the request began, if the read takes them then.
    Read {
        offset: u64,
        len: usize,
        early: Option<Vec<u8>>,
    },
    Write {
        offset: u64,
        bytes: Vec<u8>,
    },
    /// The older contents that it makes obsolete.
    Flush(BTreeMap<u64, Vec<Sector>>),
}

/// See the module.
pub struct SimulatedDevice {
    len: u64,
    state: Mutex<SimState>,
}

struct SimState {
    rng: SplitMix64,
    now: Duration,
    pages: BTreeMap<usize, Box<Page>>,
    /// Of each sector that was written since the last FLUSH, its older contents, the durable one first.
    older: BTreeMap<u64, Vec<Sector>>,
    in_flight: Vec<SimRequest>,
    ended: BTreeMap<RingNo, Vec<EndedRequest>>,
    flushes: BTreeMap<u64, i32>,
    unreadable: BTreeSet<usize>,
    faults: Vec<SimulatedFault>,
    is_slow: bool,
    generation: u64,
    last_number: u64,
    counts: SimulatedCounts,
}

impl SimulatedDevice {
    /// A device of zeroes. The seed chooses latencies, orders and losses.
    #[must_use]
    pub fn new(len: u64, seed: u64) -> Arc<SimulatedDevice> {
        Arc::new(SimulatedDevice {
            len,
            state: Mutex::new(SimState {
                rng: SplitMix64::new(seed),
                now: Duration::ZERO,
                pages: BTreeMap::new(),
                older: BTreeMap::new(),
                in_flight: Vec::new(),
                ended: BTreeMap::new(),
                flushes: BTreeMap::new(),
                unreadable: BTreeSet::new(),
                faults: Vec::new(),
                is_slow: false,
                generation: 0,
                last_number: 0,
                counts: SimulatedCounts::default(),
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, SimState> {
        lock(&self.state)
    }

    /// Bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len
    }

    /// Sets the simulated time.
    pub fn set_time(&self, now: Duration) {
        self.state().now = now;
    }

    /// When the next request in flight is due.
    #[must_use]
    pub fn next_due(&self) -> Option<Duration> {
        self.state().in_flight.iter().map(|it| it.due).min()
    }

    /// The age of the oldest request in flight.
    #[must_use]
    pub fn oldest_age(&self) -> Duration {
        let state = self.state();
        let ages = state
            .in_flight
            .iter()
            .map(|it| state.now.saturating_sub(it.started));
        ages.max().unwrap_or_default()
    }

    /// Ends one of the requests that are due. False: none is.
    pub fn end_due(&self) -> bool {
        let mut state = self.state();
        let now = state.now;
        let due = |it: &SimRequest| it.due <= now;
        let count = state.in_flight.iter().filter(|it| due(it)).count() as u64;
        if count == 0 {
            return false;
        }
        let nth = state.rng.below(count) as usize;
        let places = state.in_flight.iter().enumerate().filter(|(_, it)| due(it));
        let places: Vec<usize> = places.map(|(at, _)| at).collect();
        state.end(places[nth]);
        true
    }

    /// Ends the request that is due first, for a caller that waits. False: none is in flight.
    pub(super) fn end_first(&self) -> bool {
        let mut state = self.state();
        let requests = state.in_flight.iter().enumerate();
        let Some((at, _)) = requests.min_by_key(|(_, it)| (it.due, it.number)) else {
            return false;
        };
        state.end(at);
        true
    }

    /// A process or the machine ends: the requests in flight arrive or not, and a loss of power takes sectors that no FLUSH
    /// covers. Later requests of the same process have no effect.
    pub fn end_user(&self, end: DeviceEnd) {
        let mut state = self.state();
        state.generation += 1;
        state.faults.clear();
        state.settle();
        if end == DeviceEnd::Power {
            state.lose_power();
        }
    }

    /// Requests take longer from now on, or no longer.
    pub fn set_slow(&self, is_slow: bool) {
        self.state().is_slow = is_slow;
    }

    /// Adds a fault.
    pub fn add_fault(&self, fault: SimulatedFault) {
        self.state().faults.push(fault);
    }

    /// Ends all faults but those of pages that cannot be read.
    pub fn clear_faults(&self) {
        let mut state = self.state();
        state.faults.clear();
        state.is_slow = false;
        let now = state.now;
        for request in &mut state.in_flight {
            request.due = request.due.min(now);
        }
    }

    /// A page fails with EIO until it is written.
    pub fn make_unreadable(&self, page: usize) {
        self.state().unreadable.insert(page);
    }

    /// Whether the page fails.
    #[must_use]
    pub fn is_unreadable(&self, page: usize) -> bool {
        self.state().unreadable.contains(&page)
    }

    /// The pages from one on with a first sector that repeats a word other than zero.
    #[must_use]
    pub fn pages_of_values(&self, first: usize) -> Vec<usize> {
        let state = self.state();
        let is_value = |page: &Page| {
            let words = &page[..SECTOR_BYTES].as_chunks::<8>().0;
            words[0] != [0; 8] && words.iter().all(|word| *word == words[0])
        };
        let pages = state
            .pages
            .range(first..)
            .filter(|(_, page)| is_value(page));
        pages.map(|(page, _)| *page).collect()
    }

    /// Flips a bit on the device.
    pub fn flip_bit(&self, offset: usize, bit: u32) {
        let mut state = self.state();
        if let Some(page) = state.pages.get_mut(&(offset / PAGE_BYTES)) {
            page[offset % PAGE_BYTES] ^= 1 << bit;
        }
    }

    /// How often something happened so far.
    #[must_use]
    pub fn counts(&self) -> SimulatedCounts {
        self.state().counts
    }

    pub(super) fn connect(&self) -> Generation {
        let mut state = self.state();
        state.generation += 1;
        Generation(state.generation)
    }

    pub(super) fn new_ring(&self) -> RingNo {
        let mut state = self.state();
        state.last_number += 1;
        RingNo(state.last_number)
    }

    /// Whether a caller may write its group itself.
    pub(super) fn allows_inline(&self) -> bool {
        self.state().rng.one_in(3)
    }

    /// Starts a request of a ring: a write of these bytes, or a read.
    pub(super) fn start(
        &self,
        user: Generation,
        ring: RingNo,
        (offset, len, buffer): (u64, usize, usize),
        written: Option<Vec<u8>>,
    ) {
        let mut state = self.state();
        if user.0 != state.generation {
            // Its process is dead.
            let bytes = if written.is_none() {
                vec![0; len]
            } else {
                Vec::new()
            };
            let result = len as i32;
            let ended = state.ended.entry(ring).or_default();
            return ended.push(EndedRequest {
                buffer,
                result,
                bytes,
            });
        }
        let work = match written {
            Some(bytes) => SimWork::Write { offset, bytes },
            None => {
                let is_early = state.rng.one_in(2);
                let early = is_early.then(|| state.read(offset, len));
                SimWork::Read { offset, len, early }
            }
        };
        state.add(Some(ring), buffer, work);
    }

    pub(super) fn has_ended(&self, ring: RingNo) -> bool {
        self.state()
            .ended
            .get(&ring)
            .is_some_and(|ended| !ended.is_empty())
    }

    pub(super) fn take_ended(&self, ring: RingNo) -> Vec<EndedRequest> {
        self.state().ended.remove(&ring).unwrap_or_default()
    }

    /// Starts a FLUSH. Returns its number.
    pub(super) fn start_flush(&self, user: Generation) -> u64 {
        let mut state = self.state();
        if user.0 != state.generation {
            state.last_number += 1;
            let number = state.last_number;
            state.flushes.insert(number, 0);
            return number;
        }
        let covered = std::mem::take(&mut state.older);
        state.add(None, 0, SimWork::Flush(covered))
    }

    /// The result of a FLUSH that has ended.
    pub(super) fn flush_result(&self, number: u64) -> Option<io::Result<()>> {
        let result = self.state().flushes.remove(&number)?;
        Some(match result {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(-code)),
        })
    }

    /// Reads at once.
    pub(super) fn read_now(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let mut state = self.state();
        if state.has_unreadable(offset, into.len()) {
            state.counts.errors += 1;
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        into.copy_from_slice(&state.read(offset, into.len()));
        Ok(())
    }
}

impl SimState {
    fn add(&mut self, ring: Option<RingNo>, buffer: usize, work: SimWork) -> u64 {
        self.last_number += 1;
        let is_long = self.rng.one_in(LONG_ODDS);
        let most = if is_long {
            LONG_LATENCY_US_MAX
        } else {
            LATENCY_US_MAX
        };
        let mut latency = Duration::from_micros(1 + self.rng.below(most));
        if self.is_slow {
            latency *= SLOW_FACTOR;
        }
        let hang = |fault: &SimulatedFault| matches!(fault, SimulatedFault::Hang(_));
        if let Some(at) = self.faults.iter().position(hang)
            && let SimulatedFault::Hang(time) = self.faults.remove(at)
        {
            latency = time;
        }
        self.in_flight.push(SimRequest {
            number: self.last_number,
            ring,
            buffer,
            started: self.now,
            due: self.now + latency,
            work,
        });
        self.last_number
    }

    fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let first = offset as usize / PAGE_BYTES;
        let mut bytes = Vec::with_capacity(len);
        for page in first..first + len / PAGE_BYTES {
            match self.pages.get(&page) {
                Some(found) => bytes.extend_from_slice(&found[..]),
                None => bytes.resize(bytes.len() + PAGE_BYTES, 0),
            }
        }
        bytes
    }

    fn has_unreadable(&self, offset: u64, len: usize) -> bool {
        let first = offset as usize / PAGE_BYTES;
        self.unreadable
            .range(first..first + len / PAGE_BYTES)
            .next()
            .is_some()
    }

    fn take_fault(&mut self, fits: impl Fn(&SimulatedFault) -> Option<i32>) -> Option<i32> {
        let at = self.faults.iter().position(|fault| fits(fault).is_some())?;
        fits(&self.faults.remove(at))
    }

    /// Ends a request in flight.
    fn end(&mut self, at: usize) {
        let SimRequest {
            ring,
            buffer,
            work,
            number,
            ..
        } = self.in_flight.remove(at);
        self.counts.ended += 1;
        self.counts.overtaken += u64::from(at > 0);
        let (result, bytes) = match work {
            SimWork::Read { offset, len, .. } if self.has_unreadable(offset, len) => {
                self.counts.errors += 1;
                (-libc::EIO, Vec::new())
            }
            SimWork::Read { offset, len, early } => {
                self.counts.loads += 1;
                (len as i32, early.unwrap_or_else(|| self.read(offset, len)))
            }
            SimWork::Write { offset, bytes } => {
                let len = bytes.len() as i32;
                let failure = self.take_fault(|fault| match fault {
                    SimulatedFault::FailWrite(code) => Some(*code),
                    _ => None,
                });
                match failure {
                    Some(code) => {
                        self.counts.errors += 1;
                        self.write_some(offset, &bytes);
                        (-code, Vec::new())
                    }
                    None => {
                        self.write_sectors(offset, &bytes, |_| true);
                        (len, Vec::new())
                    }
                }
            }
            SimWork::Flush(covered) => {
                let failure = self.take_fault(|fault| match fault {
                    SimulatedFault::FailFlush(code) => Some(*code),
                    _ => None,
                });
                if failure.is_some() || defect::is(Defect::DeviceFlushIgnored) {
                    self.put_back(covered);
                }
                self.counts.errors += u64::from(failure.is_some());
                self.counts.flushes += 1;
                self.flushes.insert(number, -failure.unwrap_or(0));
                return;
            }
        };
        if let Some(ring) = ring {
            let ended = self.ended.entry(ring).or_default();
            ended.push(EndedRequest {
                buffer,
                result,
                bytes,
            });
        }
    }

    /// A FLUSH did not make these older contents obsolete.
    fn put_back(&mut self, covered: BTreeMap<u64, Vec<Sector>>) {
        for (sector, mut older) in covered {
            older.append(self.older.entry(sector).or_default());
            self.older.insert(sector, older);
        }
    }

    fn write_sectors(
        &mut self,
        offset: u64,
        bytes: &[u8],
        mut is_written: impl FnMut(u64) -> bool,
    ) {
        let first = offset / SECTOR_BYTES as u64;
        for (number, new) in (first..).zip(bytes.as_chunks::<SECTOR_BYTES>().0) {
            if !is_written(number) {
                continue;
            }
            let at = number as usize * SECTOR_BYTES;
            let page = self.pages.entry(at / PAGE_BYTES);
            let page = page.or_insert_with(|| Box::new([0; PAGE_BYTES]));
            let sectors = page.as_chunks_mut::<SECTOR_BYTES>().0;
            let sector = &mut sectors[at % PAGE_BYTES / SECTOR_BYTES];
            if *sector != *new {
                self.older.entry(number).or_default().push(*sector);
                *sector = *new;
            }
        }
        let page = offset as usize / PAGE_BYTES;
        for page in page..page + bytes.len() / PAGE_BYTES {
            self.unreadable.remove(&page);
        }
    }

    /// Any of the sectors.
    fn write_some(&mut self, offset: u64, bytes: &[u8]) {
        let mut rng = self.rng.split();
        match rng.below(4) {
            0 => {}
            1 => self.write_sectors(offset, bytes, |_| true),
            _ => self.write_sectors(offset, bytes, |_| rng.one_in(2)),
        }
    }

    /// The requests in flight arrive or not.
    fn settle(&mut self) {
        for request in std::mem::take(&mut self.in_flight) {
            match request.work {
                SimWork::Read { len, .. } => {
                    if let Some(ring) = request.ring {
                        let ended = self.ended.entry(ring).or_default();
                        let (buffer, result) = (request.buffer, len as i32);
                        ended.push(EndedRequest {
                            buffer,
                            result,
                            bytes: vec![0; len],
                        });
                    }
                }
                SimWork::Write { offset, bytes } => {
                    self.counts.torn_writes += 1;
                    self.write_some(offset, &bytes);
                    if let Some(ring) = request.ring {
                        let ended = self.ended.entry(ring).or_default();
                        let (buffer, result) = (request.buffer, bytes.len() as i32);
                        ended.push(EndedRequest {
                            buffer,
                            result,
                            bytes: Vec::new(),
                        });
                    }
                }
                SimWork::Flush(covered) => {
                    self.put_back(covered);
                    self.flushes.insert(request.number, 0);
                }
            }
        }
    }

    /// Puts back sectors that no FLUSH covers. The ways are those that break protocols: all but a few, only a few, any, none,
    /// and whole pages.
    fn lose_power(&mut self) {
        let way = self.rng.below(6);
        let mut rng = self.rng.split();
        let page_seed = rng.next_u64();
        for (number, mut versions) in std::mem::take(&mut self.older) {
            let at = number as usize * SECTOR_BYTES;
            let is_lost = match way {
                0 => false,
                1 => true,
                2 => rng.one_in(8),
                3 => !rng.one_in(8),
                4 => SplitMix64::new(page_seed ^ (at / PAGE_BYTES) as u64).one_in(2),
                _ => rng.one_in(2),
            };
            if !is_lost {
                continue;
            }
            let version = match rng.one_in(2) {
                true => 0,
                false => rng.below(versions.len() as u64) as usize,
            };
            if let Some(page) = self.pages.get_mut(&(at / PAGE_BYTES)) {
                let sectors = page.as_chunks_mut::<SECTOR_BYTES>().0;
                sectors[at % PAGE_BYTES / SECTOR_BYTES] = versions.swap_remove(version);
                self.counts.sectors_lost += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests;
