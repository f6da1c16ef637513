//! The side of a process that reaches files of mounts itself.
//!
//! Each mount has a few **stations**: a row, and a session of every leg. A thread always uses
//! the same one; two that share one take turns, and who would have to wait is served by the kernel.
//! Sessions are scarce: guests leave a part of every pool's to those who cannot do without, and
//! where few are left a station that nobody uses gives its own back.
//!
//! A process reaches a mount by the name of its socket, or, in another network namespace, by a file
//! of the mount that it has open ([`contact`](pagemesh_base::contact)).
//!
//! Invariants: nothing is done but inside of the row's operation, after a look that nobody
//! keeps guests away; whatever fails is left to the kernel, which does all of it again. What
//! belongs to a brick that is gone is dropped at once, by a thread that waits for that:
//! else the next brick would have to end this process.

mod growth;
mod link;
pub mod station;

use crate::account::{self, Ledger, STATIONS, Told, Why};
use crate::board::{Board, Run, identity};
use crate::owned;
use crate::wire::{self, Answer, Hidden, Question};
use arrayvec::ArrayVec;
use link::{COPYING, Link, Way, device_name, is_copying};
use pagemesh_base::aside::aside;
use pagemesh_base::key::{KEY_BYTES, Key};
use pagemesh_base::layout::COPIES_MAX;
use pagemesh_base::slice::{Leg, SLICE_IO_BYTES_MAX, SliceError};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_base::wait::until_readable;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_pmem::{Mapped, Pane};
use pagemesh_store::moment::Moment;
use pagemesh_store::view::View;
use pagemesh_volume::guests::{Hindrance, Picture, Segment};
use pagemesh_volume::{MappedLeg, Transport, Transports};
use rustix::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use station::{Intent, Operation, Station, Worked};
use std::cell::Cell;
use std::collections::HashMap;
use std::fs::File as SystemFile;
use std::io::{self, Read, Seek};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Mounts that one process reaches; the kernel serves further ones.
const MOUNTS_MAX: usize = 16;
/// Looks at a busy station before the kernel serves the call: operations take a microsecond
/// or two.
const SPINS: u32 = 400;
/// Between attempts to be let in, or to have the legs of a new picture.
const RETRY: Duration = Duration::from_millis(10);
/// The same where the process is just copied: a fork takes about as long.
const COPY_RETRY: Duration = Duration::from_millis(1);
/// So often it is tried at most by who waits for forks.
const COPY_TRIES_MAX: u32 = 100;
/// The same where rows or sessions are lacking: as long as many processes want more than there
/// are, each attempt of each of them costs connections to the mount and the bricks.
const FULL_RETRY: Duration = Duration::from_secs(1);
/// Sessions of a pool that guests leave to others: ports of mounts, a copy that comes back,
/// another client. At least so many, and of a large pool this part.
const SESSIONS_KEPT_MIN: u32 = 8;
const SESSIONS_KEPT_PART: u32 = 8;
/// Where fewer sessions are left than this part of a pool's, a station gives back what it does
/// not use; elsewhere it keeps them, since having them again costs milliseconds and the memory
/// map of the pool.
const SESSIONS_FEW_PART: u32 = 2;
/// Between two looks at stations that somebody is at: bricks wait for two seconds until
/// whoever maps their pools lets go.
const BUSY_LOOK: Duration = Duration::from_millis(200);
/// So long nobody used such a station, at least, and twice as long at most.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// Calls that the kernel serves after a file was opened, or its size or pages changed, before
/// the mount is asked how it is: whoever reads a small file once, or makes one longer all the
/// time, would ask for nothing.
const MISSES_MAX: u32 = 4;
/// Seconds of waiting for an answer of a mount; the kernel serves meanwhile.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Stack for joining a mount, whose stations take 80 KiB, and for what a station needs a
/// connection to each brick for.
const ROOM_BYTES: usize = 256 << 10;

/// Where the kernel says who somebody is no key is asked for.
const NO_KEY: [u8; KEY_BYTES] = [0; KEY_BYTES];

/// Runs something with all signals kept away from the threads that it starts, where its own is not
/// cancelled.
pub type Masked = fn(&mut dyn FnMut());

/// What a process has of mounts, by device number.
pub struct Guest {
    mounts: Mutex<Vec<(u64, Known)>>,
    masked: Masked,
    /// Calls that the kernel is still left with.
    patience: AtomicU32,
    has_left: AtomicBool,
}

/// What a process knows of a mount.
enum Known {
    Joined(Arc<Mount>),
    /// It did not let this process in; until then it is not asked again, in milliseconds of
    /// the monotonic clock.
    Refused(u64, Why),
    /// A thread of this process is asking it.
    Joining,
}

/// A file on the direct path.
pub struct File {
    guest: &'static Guest,
    device: u64,
    /// Once this process has joined it.
    mount: OnceLock<Arc<Mount>>,
    /// When it may be tried again, in milliseconds of the monotonic clock, and why not now.
    join_at: AtomicU64,
    join_why: Reason,
    /// Once it was asked for: the same as long as the file is open.
    board: OnceLock<Arc<Board>>,
    ino: u64,
    /// The descriptor that the file was opened by. The program may have closed it since.
    descriptor: RawFd,
    /// Its place in the account.
    slot: usize,
    /// Why the mount does not tell how the file is.
    board_why: Reason,
    misses: AtomicU32,
    /// Somebody wanted to make it longer.
    grows: AtomicBool,
}

struct Mount {
    device: String,
    way: Way,
    transports: Transports,
    masked: Masked,
    segment: Segment,
    /// Which memory that is.
    segment_id: Option<(u64, u64)>,
    stations: [Mutex<Stand>; STATIONS],
    /// For questions about files.
    asker: Mutex<Link>,
    boards: Mutex<HashMap<u64, Weak<Board>>>,
    /// Of the pools that are mapped.
    panes: Mutex<Vec<Seen>>,
    is_gone: AtomicBool,
    /// When a station may try again, in milliseconds of the monotonic clock, and why not now.
    retry_at: AtomicU64,
    retry_why: Reason,
    /// None: the mount has no memory for it.
    ledger: Option<Ledger>,
    /// Wakes the thread that waits for ends.
    changed: OwnedFd,
}

/// A pool that this process has mapped, and its pane.
type Seen = (Weak<View<Mapped>>, Arc<Pane>);

/// A station of this process, and what it has from others.
#[derive(Default)]
struct Stand {
    station: Station<MappedLeg>,
    link: Option<Link>,
    /// Since it was looked at for that.
    is_used: bool,
    /// What was listed of their descriptors: one that has ended may tell of none.
    listed: Vec<RawFd>,
}

/// Why a station has no legs.
enum Lack {
    /// There is no row or session left for it.
    Room,
    /// What passes, or has ended.
    Picture,
}

impl From<io::Error> for Lack {
    fn from(error: io::Error) -> Lack {
        match error.kind() {
            // The mount has as many connections as it takes.
            io::ErrorKind::UnexpectedEof => Lack::Room,
            _ => Lack::Picture,
        }
    }
}

impl From<SliceError> for Lack {
    fn from(error: SliceError) -> Lack {
        match error {
            SliceError::NoSession(_) => Lack::Room,
            _ => Lack::Picture,
        }
    }
}

/// A reason that may become another.
struct Reason(AtomicU32);

impl Reason {
    fn new(why: Why) -> Reason {
        Reason(AtomicU32::new(why as u32))
    }

    fn get(&self) -> Why {
        let number = self.0.load(Ordering::Relaxed) as usize;
        Why::ALL.get(number).copied().unwrap_or(Why::NoMount)
    }

    fn set(&self, why: Why) {
        self.0.store(why as u32, Ordering::Relaxed);
    }
}

/// Why a mount was not joined.
fn why_not_joined(cause: &io::Error) -> Why {
    use io::ErrorKind as Kind;
    match cause.kind() {
        _ if is_copying(cause) => Why::Joining,
        Kind::UnexpectedEof | Kind::ConnectionReset | Kind::BrokenPipe => Why::Turned,
        // It speaks otherwise.
        Kind::Other => Why::Version,
        _ => Why::NoMount,
    }
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// The number of this thread, for its station.
fn thread_number() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    NUMBER.with(|number| {
        if number.get() == usize::MAX {
            number.set(THREADS.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

/// Does something on a thread that has room for it: those of programs may have little stack.
/// None: there is no such thread.
fn with_room<T: Send>(masked: Masked, run: impl FnOnce() -> T + Send) -> Option<T> {
    let (mut run, mut done) = (Some(run), None);
    masked(&mut || {
        done = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(ROOM_BYTES);
            let made = thread.spawn_scoped(scope, run.take()?);
            made.ok()?.join().ok()
        });
    });
    done
}

impl Guest {
    /// Of nothing yet. So many calls are left to the kernel before a mount is joined: having
    /// all that writes need costs a process more than a hundred of them.
    #[must_use]
    pub const fn new(masked: Masked, patience: u32) -> Guest {
        Guest {
            mounts: Mutex::new(Vec::new()),
            masked,
            patience: AtomicU32::new(patience),
            has_left: AtomicBool::new(false),
        }
    }

    /// The file with this device number and inode, whether its mount lets this process in or
    /// not. The caller has it open until the [`File`] is dropped, now by this descriptor.
    #[must_use]
    pub fn open(&'static self, device: u64, ino: u64, descriptor: RawFd) -> File {
        let file = File {
            guest: self,
            device,
            mount: OnceLock::new(),
            join_at: AtomicU64::new(0),
            join_why: Reason::new(Why::Joining),
            board: OnceLock::new(),
            ino,
            descriptor,
            slot: account::slot_of(device, ino),
            board_why: Reason::new(Why::Asking),
            misses: AtomicU32::new(0),
            grows: AtomicBool::new(false),
        };
        if self.patience.load(Ordering::Relaxed) == 0 {
            // Each call tries again.
            let _ = file.join();
        }
        file
    }

    /// The same where the process is copied by forks alone, not by commands that last: they are
    /// waited for.
    #[must_use]
    pub fn open_beside_forks(&'static self, device: u64, ino: u64, descriptor: RawFd) -> File {
        let file = self.open(device, ino, descriptor);
        let is_put_off = || matches!(file.try_join(), Err((wait, _)) if wait == COPY_RETRY);
        for _ in 0..COPY_TRIES_MAX {
            if !is_put_off() {
                break;
            }
            std::thread::sleep(COPY_RETRY);
        }
        file
    }

    /// What this process did on the direct path and by the kernel, file by file.
    #[must_use]
    pub fn told(&self) -> Vec<Told> {
        let mounts = self.mounts.try_lock();
        let mounts = mounts.iter().flat_map(|mounts| mounts.iter());
        let joined = mounts.filter_map(|(_, known)| match known {
            Known::Joined(mount) if !mount.is_gone() => mount.ledger.as_ref(),
            _ => None,
        });
        account::told(&joined.collect::<Vec<_>>())
    }

    /// Leaves all mounts, and joins none any more. Threads end soon afterwards.
    pub fn leave(&self) {
        self.has_left.store(true, Ordering::SeqCst);
        for (_, known) in guard(&self.mounts).drain(..) {
            if let Known::Joined(mount) = known {
                mount.end();
            }
        }
    }

    /// Whether the kernel is to have one call more.
    fn is_patient(&self) -> bool {
        let less = |left: u32| left.checked_sub(1);
        let order = Ordering::Relaxed;
        self.patience.fetch_update(order, order, less).is_ok()
    }

    /// The mount, if it lets this process in; or how long it is not to be asked again, and why. It is
    /// asked by one thread, and others go on meanwhile, here and at other mounts.
    fn mount(&self, device: u64, file: RawFd) -> Result<Arc<Mount>, (Duration, Why)> {
        if self.has_left.load(Ordering::SeqCst) {
            return Err((FULL_RETRY, Why::Confined));
        }
        if let Some(known) = self.known(device) {
            return known;
        }
        let first = thread_number() % STATIONS;
        let opened = with_room(self.masked, || {
            Mount::open((device, file), self.masked, first)
        });
        let opened = opened.unwrap_or(Err(io::ErrorKind::Other.into()));
        let known = match &opened {
            Ok(mount) => Some(Known::Joined(Arc::clone(mount))),
            Err(cause) if is_copying(cause) => None,
            Err(cause) => {
                let until = now_ms() + FULL_RETRY.as_millis() as u64;
                Some(Known::Refused(until, why_not_joined(cause)))
            }
        };
        let mut mounts = guard(&self.mounts);
        mounts.retain(|(other, _)| *other != device);
        mounts.extend(known.map(|known| (device, known)));
        drop(mounts);
        if self.has_left.load(Ordering::SeqCst) {
            self.leave();
        }
        opened.map_err(|cause| {
            let wait = match is_copying(&cause) {
                true => COPY_RETRY,
                false => FULL_RETRY,
            };
            (wait, why_not_joined(&cause))
        })
    }

    /// The same, as far as it is known; if it is not, the caller is to ask.
    fn known(&self, device: u64) -> Option<Result<Arc<Mount>, (Duration, Why)>> {
        let now = now_ms();
        let mut mounts = guard(&self.mounts);
        mounts.retain(|(_, known)| match known {
            Known::Joined(mount) => !mount.is_gone(),
            Known::Refused(until, _) => now < *until,
            Known::Joining => true,
        });
        let known = mounts.iter().find(|(known, _)| *known == device);
        match known.map(|(_, known)| known) {
            Some(Known::Joined(mount)) => Some(Ok(Arc::clone(mount))),
            Some(Known::Refused(_, why)) => Some(Err((FULL_RETRY, *why))),
            Some(Known::Joining) => Some(Err((RETRY, Why::Joining))),
            None if mounts.len() == MOUNTS_MAX => Some(Err((FULL_RETRY, Why::NoMount))),
            None => {
                mounts.push((device, Known::Joining));
                None
            }
        }
    }
}

impl Stand {
    fn take_legs(&mut self, picture: Picture, legs: ArrayVec<MappedLeg, COPIES_MAX>) {
        self.listed = legs.iter().flat_map(all_descriptors).collect();
        self.listed.iter().copied().for_each(owned::add);
        self.station.equip(picture, legs);
    }

    fn drop_legs(&mut self) {
        if !self.listed.is_empty() {
            self.strip(&owned::Making::anyway());
        }
    }

    /// Drops the legs. What is off the list and not closed yet no child may get.
    fn strip(&mut self, _making: &owned::Making) {
        self.listed.drain(..).for_each(owned::remove);
        self.station.strip();
    }

    /// Whether a pool has not enough sessions for others.
    fn is_greedy(&self) -> bool {
        let legs = self.station.legs().iter();
        legs.map(MappedLeg::sessions)
            .any(|(spare, all)| spare < SESSIONS_KEPT_MIN.max(all / SESSIONS_KEPT_PART))
    }

    /// Gives back what nobody has used since the last look, unless there is plenty of it.
    fn tend(&mut self) {
        let is_used = std::mem::take(&mut self.is_used);
        let is_few = |(spare, all)| spare < all / SESSIONS_FEW_PART;
        let mut sessions = self.station.legs().iter().map(MappedLeg::sessions);
        if !is_used && (self.station.legs().is_empty() || sessions.any(is_few)) {
            self.drop_legs();
            self.leave();
        }
    }

    /// Gives the row back.
    fn leave(&mut self) {
        if let Some(link) = self.link.take() {
            // A mount that is gone has no rows.
            let _ = wire::send(link.as_fd(), &Question::Leave.encode(), None);
        }
    }
}

fn all_descriptors(leg: &MappedLeg) -> Vec<RawFd> {
    let mut all = Vec::new();
    leg.descriptors(&mut all);
    leg.pool_descriptors(&mut all);
    all
}

impl Drop for Stand {
    fn drop(&mut self) {
        self.drop_legs();
        self.leave();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        owned::remove(self.changed.as_raw_fd());
    }
}

impl Mount {
    /// Whoever asks is the first at this station.
    fn open((device, file): (u64, RawFd), masked: Masked, first: usize) -> io::Result<Arc<Mount>> {
        let (link, way) = Link::connect(device, file)?;
        let (answer, memory) = link.ask(Question::Join)?;
        let memory = memory.ok_or(io::ErrorKind::PermissionDenied)?;
        // There may be a row for it another time.
        let row = match answer {
            Answer::Joined(row, _) => Some(row as usize),
            _ => None,
        };
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let (asker, _) = Link::connect(device, file)?;
        let ledger = match asker.ask(Question::Account)? {
            (Answer::Yes, Some(memory)) => Some(Ledger::join(memory).map_err(io::Error::other)?),
            _ => None,
        };
        if let Some(ledger) = &ledger {
            ledger.catch_up(device);
        }
        let making = owned::Making::begin().ok_or(COPYING)?;
        let mount = Arc::new(Mount {
            transports: Transports::new(
                Key::from_bytes(NO_KEY),
                Transport::Map,
                Timeouts::default(),
            ),
            masked,
            segment_id: identity(&memory),
            segment: Segment::join(memory).map_err(io::Error::other)?,
            stations: std::array::from_fn(|_| Mutex::default()),
            asker: Mutex::new(asker),
            boards: Mutex::default(),
            panes: Mutex::default(),
            is_gone: AtomicBool::new(false),
            retry_at: AtomicU64::new(0),
            retry_why: Reason::new(Why::Renewing),
            ledger,
            changed: aside(rustix::event::eventfd(0, flags)?),
            device: device_name(device),
            way,
        });
        owned::add(mount.changed.as_raw_fd());
        // For all children: in a virtual machine it is the host that answers, one question
        // after the other. None is copied meanwhile, who would wait for the answer for ever.
        let _known = pagemesh_pmem::cpu::cpu();
        drop(making);
        if let Some(row) = row {
            let mut first = guard(&mount.stations[first]);
            first.link = Some(link);
            first.station.take_row(row);
        }
        let watched = Arc::clone(&mount);
        std::thread::Builder::new()
            .name("pagemesh-guest".into())
            .spawn(move || watched.await_ends())?;
        Ok(mount)
    }

    fn board(&self, ino: u64, grows: bool) -> Result<Arc<Board>, Why> {
        let question = match grows {
            true => Question::Grow(ino),
            false => Question::Board(ino),
        };
        let mut asker = self.asker.try_lock().map_err(|_| Why::Asking)?;
        let answered = asker.ask(question);
        match answered {
            Ok((Answer::Yes, Some(memory))) => {
                let mut boards = guard(&self.boards);
                boards.retain(|_, board| board.strong_count() > 0);
                if let Some(known) = boards.get(&ino).and_then(Weak::upgrade) {
                    // The number may be another file's by now.
                    if known.is_of(&memory) {
                        return Ok(known);
                    }
                }
                let board = Arc::new(Board::join(memory).map_err(|_| Why::Version)?);
                boards.insert(ino, Arc::downgrade(&board));
                Ok(board)
            }
            Ok((Answer::Hidden(hidden), _)) => Err(match hidden {
                Hidden::Mapped => Why::Mapped,
                Hidden::Cached => Why::Cached,
                Hidden::Shape => Why::Shape,
                Hidden::Full => Why::Boards,
            }),
            Ok(_) => Err(Why::Asking),
            Err(cause) => {
                // An answer that comes late would be taken for that of the next question.
                match cause.kind() {
                    io::ErrorKind::WouldBlock => self.ask_anew(&mut asker),
                    _ => self.end(),
                }
                Err(Why::Asking)
            }
        }
    }

    /// The mount is there, and takes longer: the next question goes by another connection.
    #[cold]
    fn ask_anew(&self, asker: &mut Link) {
        let link = match self.way {
            Way::Name => Link::by_name(&self.device),
            Way::File => asker.another(),
        };
        match link {
            Ok(link) => {
                *asker = link;
                self.wake();
            }
            Err(_) => self.end(),
        }
    }

    /// Another connection, while the process is not copied.
    fn connect(&self) -> Result<Link, Lack> {
        match self.way {
            Way::Name => Ok(Link::by_name(&self.device)?),
            // It may wait for an answer; another try comes soon.
            Way::File => {
                let asker = self.asker.try_lock().map_err(|_| Lack::Picture)?;
                Ok(asker.another()?)
            }
        }
    }

    /// A session of a leg, by the path of its brick's socket, or by the socket that the mount
    /// gives.
    fn map(&self, link: &Link, picture: &Picture, leg: usize) -> Result<MappedLeg, Lack> {
        let seat = &picture.seats[leg];
        let map = |path: &Path| {
            let (brick, slice) = (seat.brick, seat.slice);
            self.transports.map(brick, path, slice, picture.epoch)
        };
        match self.way {
            Way::Name => Ok(map(&seat.socket)?),
            Way::File => {
                let answered = link.ask(Question::Socket(leg as u64))?;
                let (Answer::Yes, Some(socket)) = answered else {
                    return Err(Lack::Picture);
                };
                let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
                Ok(map(path.as_ref())?)
            }
        }
    }

    /// The pane of a pool that a leg of this mount has. The caller is at a station of it, so
    /// that nobody lets go of the pool meanwhile.
    fn pane(&self, view: &Arc<View<Mapped>>) -> Option<Arc<Pane>> {
        let mut panes = guard(&self.panes);
        let is_its = |known: &Weak<View<Mapped>>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(view));
        if let Some((_, pane)) = panes.iter().find(|(known, _)| is_its(known)) {
            return Some(Arc::clone(pane));
        }
        let pane = Arc::new(Pane::of(view.media()).ok()?);
        panes.push((Arc::downgrade(view), Arc::clone(&pane)));
        Some(pane)
    }

    /// Lets go of pools whose legs are gone: the next brick would have to end this process.
    fn vacate(&self) {
        guard(&self.panes).retain(|(view, pane)| {
            let is_there = view.upgrade().is_some_and(|view| !view.is_gone());
            // A system without room for that has the brick end this process.
            is_there || pane.vacate().is_err()
        });
    }

    fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    fn end(&self) {
        self.is_gone.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // Its counter is far from full.
        let _ = rustix::io::write(&self.changed, &1u64.to_ne_bytes());
    }

    /// This thread's station, if nobody else is at it.
    #[inline]
    fn stand(&self) -> Option<(usize, MutexGuard<'_, Stand>)> {
        let number = thread_number() % STATIONS;
        let stand = &self.stations[number];
        for _ in 0..SPINS {
            if let Ok(stand) = stand.try_lock() {
                return Some((number, stand));
            }
            std::hint::spin_loop();
        }
        None
    }

    /// No station tries again before so long.
    fn put_off(&self, now_ms: u64, wait: Duration, why: Why) {
        self.retry_why.set(why);
        let retry_at = now_ms + wait.as_millis() as u64;
        self.retry_at.store(retry_at, Ordering::Relaxed);
    }

    /// Gets a station what it needs, now and then.
    #[cold]
    fn equip(&self, stand: &mut Stand) -> Result<(), Why> {
        let now = now_ms();
        if self.segment.generation() == 0 {
            return Err(self.why_withheld());
        }
        if now < self.retry_at.load(Ordering::Relaxed) {
            return Err(self.retry_why.get());
        }
        let making = owned::Making::begin().ok_or(Why::Joining)?;
        let equipped = with_room(self.masked, || self.try_equip(stand, &making));
        let lack = match equipped.unwrap_or(Err(Lack::Room)) {
            Ok(()) => None,
            Err(Lack::Picture) => Some((RETRY, Why::Renewing)),
            Err(Lack::Room) => {
                // Others can do nothing with a session without a row, nor with one of one leg.
                stand.leave();
                Some((FULL_RETRY, Why::NoSession))
            }
        };
        if let Some((wait, why)) = lack {
            stand.strip(&making);
            self.put_off(now, wait, why);
        }
        self.wake();
        lack.map_or(Ok(()), |(_, why)| Err(why))
    }

    /// Why nobody may use the path at the moment.
    fn why_withheld(&self) -> Why {
        withheld_by(self.segment.hindrance())
    }

    fn try_equip(&self, stand: &mut Stand, making: &owned::Making) -> Result<(), Lack> {
        // A session that is not used any more may be the one that the brick lacks.
        stand.strip(making);
        let question = match stand.link {
            None => Question::Join,
            Some(_) => Question::Look,
        };
        let link = match stand.link.take() {
            None => self.connect()?,
            Some(link) => link,
        };
        let answered = link.ask(question);
        stand.link = Some(link);
        if let Ok((_, Some(memory))) = &answered
            && identity(memory) != self.segment_id
        {
            // The next mount, which has the device's number now.
            self.end();
            return Err(Lack::Room);
        }
        let answer = answered.map(|(answer, _)| answer);
        let Ok(Answer::Joined(row, picture)) = answer else {
            // A row that comes late is given back with it.
            stand.leave();
            answer?;
            return Err(Lack::Room);
        };
        stand.station.take_row(row as usize);
        let picture = picture.ok_or(Lack::Picture)?;
        let mut legs = ArrayVec::new();
        for leg in 0..picture.seats.len() {
            let link = stand.link.as_ref().ok_or(Lack::Picture)?;
            let leg = self.map(link, &picture, leg)?;
            legs.try_push(leg).map_err(|_| Lack::Picture)?;
        }
        stand.take_legs(picture, legs);
        match stand.is_greedy() {
            true => Err(Lack::Room),
            false => Ok(()),
        }
    }

    /// Waits for bricks that go, and for the mount.
    fn await_ends(&self) {
        let mut descriptors = Vec::new();
        let mut look_at = None;
        while !self.is_gone.load(Ordering::Acquire) {
            descriptors.clear();
            descriptors.push(self.changed.as_raw_fd());
            let (mut has_link, mut is_busy) = (false, false);
            // Whoever asks reads the answer. It is not looked for meanwhile.
            match self.asker.try_lock() {
                Ok(asker) => descriptors.push(asker.as_fd().as_raw_fd()),
                Err(_) => is_busy = true,
            }
            for station in &self.stations {
                let Ok(stand) = station.try_lock() else {
                    is_busy = true;
                    continue;
                };
                has_link |= stand.link.is_some();
                let legs = stand.station.legs().iter();
                legs.for_each(|leg| leg.descriptors(&mut descriptors));
            }
            // Who has nothing to give back sleeps.
            look_at = match has_link {
                true => look_at.or(Some(Instant::now() + IDLE_MAX)),
                false => None,
            };
            // Who is at a station may wait for a mount that hangs, while bricks come and go.
            let busy_until = is_busy.then(|| Instant::now() + BUSY_LOOK);
            let until = look_at.into_iter().chain(busy_until).min();
            if until_readable(&descriptors, until).is_err() {
                break;
            }
            let free = || self.stations.iter().filter_map(|it| it.try_lock().ok());
            if look_at.is_some_and(|at| Instant::now() >= at) {
                look_at = None;
                free().for_each(|mut stand| stand.tend());
            }
            let _ = rustix::io::read(&self.changed, &mut [0; 8]);
            for mut stand in free() {
                if stand.station.legs_mut().any(|leg| leg.ended().is_some()) {
                    stand.drop_legs();
                }
            }
            self.vacate();
            if self.has_lost_mount() {
                break;
            }
        }
        self.is_gone.store(true, Ordering::Release);
        for station in &self.stations {
            *guard(station) = Stand::default();
        }
        if let Some(ledger) = &self.ledger {
            ledger.close();
        }
        self.vacate();
    }

    fn has_lost_mount(&self) -> bool {
        // Whoever asks reads the answer, and would notice the end itself.
        let Ok(asker) = self.asker.try_lock() else {
            return false;
        };
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        let peeked = rustix::net::recv(&*asker, &mut [0u8; 1], flags);
        matches!(peeked, Ok((_, 0)))
    }
}

pub(crate) fn withheld_by(hindrance: Option<Hindrance>) -> Why {
    match hindrance {
        None | Some(Hindrance::Busy) => Why::Withheld,
        Some(Hindrance::Legs) => Why::Legs,
        Some(Hindrance::Tcp) => Why::Tcp,
        Some(Hindrance::Buffers) => Why::Buffers,
        Some(Hindrance::Columns) => Why::Columns,
    }
}

/// What a mount tells of its clients, as JSON.
pub(crate) fn ask_status(device: u64, file: RawFd) -> io::Result<Vec<u8>> {
    let (link, _) = Link::connect(device, file)?;
    let (_, memory) = link.ask(Question::Status)?;
    let mut memory = memory.ok_or(io::ErrorKind::InvalidData)?;
    let mut bytes = Vec::new();
    memory.seek(io::SeekFrom::Start(0))?;
    memory.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Why guests may not begin anything with a file just now.
#[cold]
fn why_not_begun(mount: &Mount, board: &Board) -> Why {
    match mount.segment.is_closed() || board.is_closed() {
        true => Why::Closed,
        false => Why::Asking,
    }
}

/// Wakes who sends what is in the ring.
#[cold]
fn call(link: Option<&Link>, segment: &Segment) {
    let called = link.map(|link| {
        let question = Question::Call.encode();
        wire::send(link.as_fd(), &question, None)
    });
    if !matches!(called, Some(Ok(()))) {
        segment.ring().call_again();
    }
}

/// Bytes of a file where they lie in a pool, see [`File::show`]. Whoever has changed them
/// since has made them over, and may have them changed under one who reads.
pub struct Shown {
    moment: Box<Moment<Mapped>>,
    pane: Arc<Pane>,
    runs: Vec<Run>,
}

impl Shown {
    /// The bytes in their order, in pieces of at most a page. They can be read as long as
    /// this is there.
    pub fn slices(&self) -> impl Iterator<Item = (NonNull<u8>, usize)> + '_ {
        let page = PAGE_BYTES as u64;
        let parts = self.runs.iter().flat_map(move |run| {
            let (mut at, end) = (run.offset, run.offset + run.len);
            std::iter::from_fn(move || {
                let within = at % page;
                let len = (page - within).min(end - at);
                at += len;
                (len > 0).then_some((within as usize, len as usize))
            })
        });
        let places = self.moment.places().zip(parts);
        places.map(|(place, (within, len))| (self.pane.at(place + within, len), len))
    }

    /// Whether all that was read there until now is what the file had at one moment.
    #[must_use]
    pub fn is_same(&self) -> bool {
        self.moment.is_same() && !self.pane.is_vacated()
    }
}

/// Has the mount with this device number overwrite parts of a file that is open by this descriptor, all of them or none,
/// whatever of the direct path is there; see [`pagemesh_fs::Fs::write_together`]. Waits as
/// long as the mount does. The caller has the file open to be written.
///
/// # Errors
/// `EOPNOTSUPP` where there is no mount, or this process may not be its guest; `EIO` when
/// it went meanwhile, and the parts are changed or not; what the mount says. What the system
/// lacks, and `EAGAIN` for a mount that does not answer, with nothing changed.
pub fn write_by_mount(
    (device, ino, descriptor): (u64, u64, RawFd),
    parts: &[(u64, &[u8])],
) -> io::Result<()> {
    use io::ErrorKind as Kind;
    let told = |cause: io::Error| match cause.kind() {
        // Nobody listens, or not the mount.
        Kind::NotFound | Kind::ConnectionRefused | Kind::PermissionDenied
        // Who may not be a guest finds the connection closed, before it has asked or after.
        | Kind::UnexpectedEof | Kind::ConnectionReset | Kind::BrokenPipe
        // It speaks otherwise.
        | Kind::Other => Errno::OPNOTSUPP.into(),
        // That passes.
        _ => cause,
    };
    let (link, _) = {
        let _making = owned::Making::anyway();
        Link::reach(device, descriptor).map_err(told)?
    };
    link.ask(Question::Board(ino)).map_err(told)?;
    link.wait_for(None)?;
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let memory = SystemFile::from(rustix::fs::memfd_create("pagemesh-parts", flags)?);
    memory.write_all_at(&wire::encode_parts(parts), 0)?;
    let question = Question::Write(ino).encode();
    wire::send(link.as_fd(), &question, Some(memory.as_fd()))?;
    let answered = link.answer().map_err(|_| io::Error::from(Errno::IO))?;
    match answered.0 {
        Answer::Yes => Ok(()),
        Answer::Failed(error) => Err(io::Error::from_raw_os_error(error)),
        Answer::No | Answer::Hidden(_) | Answer::Joined(..) => Err(Errno::IO.into()),
    }
}

impl File {
    /// Reads bytes, fewer at the end; none: the kernel does it. It may allocate, and wait for
    /// the mount and for bricks. As many pages as change together are read as they are at one
    /// moment.
    #[must_use]
    pub fn read(&self, into: &mut [u8], offset: u64) -> Option<usize> {
        let place = (offset, into.len(), Intent::Read);
        let read = self.operate(place, |_| true, |operation| operation.read(into, offset));
        self.or_note(read)
    }

    /// Shows bytes where they lie, fewer at the end, as they are at one moment; none: they
    /// can only be read. At most [`MOMENT_PAGES_MAX`] pages.
    ///
    /// [`MOMENT_PAGES_MAX`]: pagemesh_store::moment::MOMENT_PAGES_MAX
    #[must_use]
    pub fn show(&self, offset: u64, len: usize) -> Option<Shown> {
        let mount = self.or_note(self.mount())?;
        let place = (offset, len, Intent::Read);
        let shown = self.operate(place, Option::is_some, |operation| {
            operation.moment(offset, len, |leg| mount.pane(leg.view()))
        });
        let shown = shown.and_then(|shown| shown.ok_or(Why::Busy));
        let ((moment, runs), pane) = self.or_note(shown)?;
        Some(Shown {
            moment,
            pane,
            runs: runs.to_vec(),
        })
    }

    /// Overwrites whole pages of several places, all of them or none; none: the mount does
    /// it, see [`write_by_mount`].
    #[must_use]
    pub fn write_together(&self, parts: &[(u64, &[u8])]) -> Option<()> {
        let bytes: usize = parts.iter().map(|(_, data)| data.len()).sum();
        let &(first, _) = parts.first()?;
        let place = (first, bytes, Intent::Write);
        let written = self.operate(
            place,
            |()| true,
            |operation| {
                let written = operation.write_together(parts);
                if let Some(Ok(())) = written {
                    self.note_written();
                }
                written
            },
        );
        self.or_note(written)
    }

    /// Counts an operation that the kernel gets, for a reason that the caller knows.
    #[cold]
    pub fn note(&self, why: Why) {
        account::note(self.slot, why);
        if let Some(ledger) = self.joined().and_then(|mount| mount.ledger.as_ref()) {
            ledger.note(self.slot, why);
        }
    }

    #[inline]
    fn or_note<T>(&self, done: Result<T, Why>) -> Option<T> {
        done.inspect_err(|&why| self.note(why)).ok()
    }

    /// The mount, if this process is a guest of it, or becomes one.
    #[inline]
    fn mount(&self) -> Result<&Mount, Why> {
        self.joined().map_or_else(|| self.join(), Ok)
    }

    /// The same, if it was one already.
    #[inline]
    fn joined(&self) -> Option<&Mount> {
        self.mount.get().map(Arc::as_ref)
    }

    #[cold]
    fn join(&self) -> Result<&Mount, Why> {
        if self.guest.is_patient() {
            return Err(Why::Patience);
        }
        if now_ms() < self.join_at.load(Ordering::Relaxed) {
            return Err(self.join_why.get());
        }
        self.try_join().map_err(|(_, why)| why)
    }

    /// Else how long it is not to be tried again, and why.
    fn try_join(&self) -> Result<&Mount, (Duration, Why)> {
        let joined = self.guest.mount(self.device, self.descriptor);
        let joined = joined.inspect_err(|(wait, why)| {
            let again = now_ms() + wait.as_millis() as u64;
            self.join_why.set(*why);
            self.join_at.store(again, Ordering::Relaxed);
        })?;
        if let Some(ledger) = &joined.ledger {
            ledger.name(self.slot, self.ino);
        }
        Ok(self.mount.get_or_init(|| joined))
    }

    /// Bytes of the file, as long as guests may have it; none: the kernel is to be asked.
    /// Nothing is begun for it: each end that a board tells was the file's at some moment since
    /// the look, since who changes more than that outdates it first.
    #[must_use]
    pub fn size(&self) -> Option<u64> {
        let board = self.board.get()?;
        let may = self.is_open() && !board.is_closed() && !board.is_outdated();
        may.then(|| board.size())
    }

    /// Whether everything that the file was given is durable as it is.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        // Guests are let in where nothing is buffered. What a copy follows with is waited
        // for in the kernel's way, and so is what was stored into mappings: where there are
        // some the file is closed to guests.
        let has_guests = |board: &Arc<Board>| !board.is_closed() && !board.is_outdated();
        self.is_open() && !self.is_followed() && self.board.get().is_some_and(has_guests)
    }

    /// Whether its mount lets guests in at the moment.
    #[must_use]
    pub fn is_open(&self) -> bool {
        let lets_in = |mount: &Mount| mount.segment.generation() != 0 && !mount.is_gone();
        self.joined().is_some_and(lets_in)
    }

    /// Whether a copy gets later what is confirmed.
    #[must_use]
    pub fn is_followed(&self) -> bool {
        let is_followed = |mount: &Mount| mount.segment.ring().is_followed();
        self.joined().is_some_and(is_followed)
    }

    /// A count that changes whenever a descriptor of the file was closed, and whenever a process
    /// with direct clients opened a file of the mount past its preload library. Callers that know
    /// the file by a descriptor number check the number when the count has changed. 0 is never
    /// returned. None: the file is not on the direct path yet, so that no operation of this file
    /// will be done here.
    #[inline]
    #[must_use]
    pub fn changes(&self) -> Option<u64> {
        let (mount, board) = (self.joined()?, self.board.get()?);
        Some(1 + board.closes() + mount.segment.opens())
    }

    /// The same, if nothing has to be asked for before reading or writing.
    #[inline]
    #[must_use]
    pub fn ready(&self) -> Option<u64> {
        self.changes().filter(|_| self.is_shown())
    }

    /// The same for a caller that wants to read or write: joins the mount and asks for the file,
    /// now and then.
    #[inline]
    #[must_use]
    pub fn prepare(&self) -> Option<u64> {
        let prepared = self.try_prepare();
        prepared.map_err(|why| self.note(why)).ok()
    }

    #[inline]
    fn try_prepare(&self) -> Result<u64, Why> {
        let mount = self.mount()?;
        if mount.is_gone.load(Ordering::Relaxed) {
            return Err(Why::MountGone);
        }
        if !self.is_shown() {
            self.renew()?;
        }
        self.changes().ok_or(Why::Asking)
    }

    #[inline]
    fn is_shown(&self) -> bool {
        self.board.get().is_some_and(|board| !board.is_outdated())
    }

    /// Does an operation, if guests may, and this one can. `is_done` tells whether what came of
    /// it counts.
    #[inline]
    fn operate<T>(
        &self,
        (offset, len, intent): (u64, usize, Intent),
        is_done: impl Fn(&T) -> bool,
        work: impl FnOnce(&mut Operation<'_, MappedLeg>) -> Worked<T>,
    ) -> Result<T, Why> {
        if len == 0 || len > SLICE_IO_BYTES_MAX as usize {
            return Err(Why::Long);
        }
        let mount = self.mount()?;
        if mount.is_gone.load(Ordering::Relaxed) {
            return Err(Why::MountGone);
        }
        if !self.is_shown() {
            self.renew()?;
        }
        let board = self.board.get().ok_or(Why::Asking)?;
        let (number, mut stand) = mount.stand().ok_or(Why::Busy)?;
        stand.is_used = true;
        if !stand.station.is_ready(&mount.segment) {
            mount.equip(&mut stand)?;
        }
        let Stand { station, link, .. } = &mut *stand;
        let place = (offset, len as u64, intent);
        let begun = station.begin(&mount.segment, board, self.ino, place);
        let mut operation = begun.ok_or_else(|| why_not_begun(mount, board))?;
        let worked = work(&mut operation);
        if operation.must_call() {
            call(link.as_ref(), &mount.segment);
        }
        drop(operation);
        match worked.ok_or(Why::Busy)? {
            Ok(done) => {
                if let Some(ledger) = &mount.ledger
                    && is_done(&done)
                {
                    ledger.count_direct(number, self.slot);
                }
                Ok(done)
            }
            Err(error) => Err(self.fail(mount, stand, &error)),
        }
    }

    /// Asks how the file is now, now and then. An error: it may not be tried.
    #[cold]
    fn renew(&self) -> Result<(), Why> {
        if self.misses.fetch_add(1, Ordering::Relaxed) % MISSES_MAX != MISSES_MAX - 1 {
            return Err(self.board_why.get());
        }
        let grows = self.grows.load(Ordering::Relaxed);
        let mount = self.joined().ok_or(Why::Joining)?;
        let shown = mount.board(self.ino, grows);
        self.board_why
            .set(shown.as_ref().err().copied().unwrap_or(Why::Asking));
        let shown = shown?;
        let board = self.board.get_or_init(|| Arc::clone(&shown));
        match Arc::ptr_eq(board, &shown) && !board.is_outdated() {
            true => Ok(()),
            false => Err(Why::Asking),
        }
    }

    /// A leg did not do it: what it can do no more is dropped.
    #[cold]
    fn fail(&self, mount: &Mount, mut stand: MutexGuard<'_, Stand>, error: &SliceError) -> Why {
        if matches!(error, SliceError::Lost(_) | SliceError::StaleEpoch { .. }) {
            stand.drop_legs();
            mount.put_off(now_ms(), RETRY, Why::Renewing);
            mount.wake();
        }
        Why::Lost
    }

    #[inline]
    fn note_written(&self) {
        if let Some(board) = self.board.get() {
            let now = clock_gettime(ClockId::RealtimeCoarse);
            let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
            board.note_written(now_ns);
        }
    }
}
