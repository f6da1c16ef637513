//! The process's side of the direct path: it reads and writes files of mounts itself.
//!
//! For each mount a process has a few I/O slots ([`io_slot`]): a row, and a session of every leg. A
//! thread always uses the same slot. Threads that share a slot take turns; the kernel serves a call
//! that would have to wait long.
//!
//! Sessions are scarce. Direct clients leave a part of every pool's sessions to users that cannot
//! do without them. Where few sessions are left, an idle slot gives its own back.
//!
//! A process reaches a mount by the name of its socket, or, in another network namespace, through a
//! file of the mount that it has open ([`mount_connection`](pagemesh_base::mount_connection)).
//!
//! Invariants: an operation does its work only inside of the row's operation, after it has checked
//! that direct access is not disabled. If it fails, the kernel does all of it again. A thread waits
//! for bricks to end and drops everything that belongs to an ended brick at once: otherwise the
//! next brick would have to kill this process.

pub mod internal_fds;
pub mod io_slot;
mod mount_link;
pub mod report;
mod write;

use crate::protocol::wire::{self, ClientRequest, FileRefusal, MountReply};
use crate::shared::op_counters::{self, FileCounts, IO_SLOTS, OpCounters, Why};
use crate::shared::shared_file_map::{FileExtent, SharedFileMap, memory_id};
use arrayvec::ArrayVec;
use io_slot::{Intent, IoSlot, LegResult, Operation};
use mount_link::{ConnectMethod, FORK_IN_PROGRESS, MountLink, device_name, is_fork_in_progress};
use pagemesh_base::key::{KEY_BYTES, Key};
use pagemesh_base::layout::LEGS_MAX;
use pagemesh_base::move_fd_high::move_fd_high;
use pagemesh_base::slice::{Leg, SLICE_IO_BYTES_MAX, SliceError};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_base::wait::until_readable;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_pmem::{MappedMedia, ReadMapping};
use pagemesh_store::consistent_read::ConsistentRead;
use pagemesh_store::pool_mapping::PoolMapping;
use pagemesh_volume::direct_access::{DirectDisabledReason, DirectSegment, LayoutLease};
use pagemesh_volume::{MappedLeg, Transport, Transports};
use rustix::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
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

/// Mounts that one process reaches directly; the kernel serves further ones.
const MOUNTS_MAX: usize = 16;
/// Attempts to lock a busy slot before the kernel serves the call: operations take a microsecond or
/// two.
const SPINS: u32 = 400;
/// Delay between attempts to join a mount, or to map the legs of a new layout lease.
const RETRY: Duration = Duration::from_millis(10);
/// Delay between attempts while the process forks: a fork takes about as long.
const FORK_RETRY: Duration = Duration::from_millis(1);
/// Attempts of a caller that waits for forks to end.
const FORK_TRIES_MAX: u32 = 100;
/// Delay between attempts where rows or sessions are lacking. While more processes want one than
/// there are, each attempt costs connections to the mount and the bricks.
const FULL_RETRY: Duration = Duration::from_secs(1);
/// Sessions of a pool that direct clients leave to others (channels of mounts, a leg that resyncs,
/// another client): at least so many, and of a large pool this part.
const SESSIONS_RESERVED_MIN: u32 = 8;
const SESSIONS_RESERVED_PART: u32 = 8;
/// If fewer sessions are left than this part of a pool's, an idle slot gives its sessions back.
/// Otherwise it keeps them, since mapping the pool again costs milliseconds.
const SESSIONS_SCARCE_PART: u32 = 2;
/// Delay between two looks while a slot or the control link is locked: bricks wait two seconds
/// until a process that maps their pools lets go.
const BUSY_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// A slot is idle if no thread used it for at least this time, and for at most twice this time.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// Calls that the kernel serves after a file was opened, or its size or pages changed, before the
/// client asks the mount for the file map. A program that reads a small file once, or extends a
/// file all the time, would ask in vain.
const KERNEL_CALLS_PER_REQUEST: u32 = 4;
/// Longest wait for an answer of a mount; the kernel serves meanwhile.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// Stack for joining a mount (its slots take 80 KiB) and for mapping the legs of a slot, which
/// needs a connection to each brick.
const HELPER_STACK_BYTES: usize = 256 << 10;

/// The kernel identifies the peer of a unix socket, so bricks ask for no key.
const NO_KEY: [u8; KEY_BYTES] = [0; KEY_BYTES];

/// Runs a closure with all signals blocked in the threads that it starts, and with cancellation of
/// the calling thread disabled.
pub type RunMasked = fn(&mut dyn FnMut());

/// The mounts that a process has joined, or failed to join, by device number.
pub struct DirectClient {
    mounts: Mutex<Vec<(u64, MountState)>>,
    run_masked: RunMasked,
    /// Calls that the kernel serves before this process joins a mount.
    patience: AtomicU32,
    has_left: AtomicBool,
}

/// The state of a mount in this process.
enum MountState {
    Joined(Arc<JoinedMount>),
    /// The mount refused this process. The client does not ask it again before this time, in
    /// milliseconds of the monotonic clock.
    Refused(u64, Why),
    /// A thread of this process is joining it.
    Joining,
}

/// A file on the direct path.
pub struct DirectFile {
    client: &'static DirectClient,
    device: u64,
    /// Set once this process has joined it.
    mount: OnceLock<Arc<JoinedMount>>,
    /// When the next attempt to join is due, in milliseconds of the monotonic clock, and the reason
    /// for the delay.
    join_retry_at: AtomicU64,
    join_reason: AtomicReason,
    /// Set by the first successful request; the same as long as the file is open.
    file_map: OnceLock<Arc<SharedFileMap>>,
    ino: u64,
    /// The descriptor that the file was opened by. The program may have closed it since.
    descriptor: RawFd,
    /// Its index in the operation counters.
    account_index: usize,
    /// Why the mount gives no current map of the file.
    file_map_reason: AtomicReason,
    misses: AtomicU32,
    /// A write reached beyond the append extent.
    wants_append_space: AtomicBool,
}

struct JoinedMount {
    device: String,
    connect_method: ConnectMethod,
    transports: Transports,
    run_masked: RunMasked,
    segment: DirectSegment,
    /// The identity of the segment's memory, see [`memory_id`].
    segment_id: Option<(u64, u64)>,
    io_slots: [Mutex<SlotResources>; IO_SLOTS],
    /// For requests about files.
    control_link: Mutex<MountLink>,
    file_maps: Mutex<HashMap<u64, Weak<SharedFileMap>>>,
    /// Read mappings of the pools that are mapped.
    read_mappings: Mutex<Vec<PoolReadMapping>>,
    is_gone: AtomicBool,
    /// When a slot may be equipped again, in milliseconds of the monotonic clock, and the reason
    /// for the delay.
    retry_at: AtomicU64,
    retry_reason: AtomicReason,
    /// None: the mount has no memory for counters.
    counters: Option<OpCounters>,
    /// Wakes the thread that watches for ended bricks and the end of the mount.
    wake_fd: OwnedFd,
}

/// A pool that this process has mapped, and its read mapping.
type PoolReadMapping = (Weak<PoolMapping<MappedMedia>>, Arc<ReadMapping>);

/// An I/O slot of this process, and the resources that the mount and the bricks gave it.
#[derive(Default)]
struct SlotResources {
    io_slot: IoSlot<MappedLeg>,
    link: Option<MountLink>,
    /// Whether a thread used it since the last idle check.
    is_used: bool,
    /// The listed descriptors of its legs: a leg that has ended may report none.
    listed_fds: Vec<RawFd>,
}

/// Why a slot has no legs.
enum EquipError {
    /// No row or session is left for it.
    NoCapacity,
    /// The layout changes, or a brick or the mount has ended.
    LayoutUnavailable,
}

impl From<io::Error> for EquipError {
    fn from(error: io::Error) -> EquipError {
        match error.kind() {
            // The mount serves no further connection.
            io::ErrorKind::UnexpectedEof => EquipError::NoCapacity,
            _ => EquipError::LayoutUnavailable,
        }
    }
}

impl From<SliceError> for EquipError {
    fn from(error: SliceError) -> EquipError {
        match error {
            SliceError::NoSession(_) => EquipError::NoCapacity,
            _ => EquipError::LayoutUnavailable,
        }
    }
}

/// A reason that other threads may replace.
struct AtomicReason(AtomicU32);

impl AtomicReason {
    fn new(why: Why) -> AtomicReason {
        AtomicReason(AtomicU32::new(why as u32))
    }

    fn get(&self) -> Why {
        let number = self.0.load(Ordering::Relaxed) as usize;
        Why::ALL.get(number).copied().unwrap_or(Why::NoMount)
    }

    fn set(&self, why: Why) {
        self.0.store(why as u32, Ordering::Relaxed);
    }
}

/// Why an attempt to join a mount failed.
fn join_failure_reason(cause: &io::Error) -> Why {
    use io::ErrorKind as Kind;
    match cause.kind() {
        _ if is_fork_in_progress(cause) => Why::Joining,
        Kind::UnexpectedEof | Kind::ConnectionReset | Kind::BrokenPipe => Why::Turned,
        // It speaks another version of the protocol.
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

/// The number of this thread, which selects its slot.
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

/// Runs a closure on a thread with a stack large enough: threads of programs may have a small one.
/// None: the system cannot start such a thread.
fn run_on_helper_stack<T: Send>(
    run_masked: RunMasked,
    run: impl FnOnce() -> T + Send,
) -> Option<T> {
    let (mut run, mut done) = (Some(run), None);
    run_masked(&mut || {
        done = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(HELPER_STACK_BYTES);
            let made = thread.spawn_scoped(scope, run.take()?);
            made.ok()?.join().ok()
        });
    });
    done
}

impl DirectClient {
    /// A client without mounts. The kernel serves the first `patience` calls before a mount is
    /// joined: the resources for writes cost a process more than a hundred calls.
    #[must_use]
    pub const fn new(run_masked: RunMasked, patience: u32) -> DirectClient {
        DirectClient {
            mounts: Mutex::new(Vec::new()),
            run_masked,
            patience: AtomicU32::new(patience),
            has_left: AtomicBool::new(false),
        }
    }

    /// The file with this device number and inode, also if its mount refuses this process. The
    /// caller keeps it open until the [`DirectFile`] is dropped; at this call it is open by this
    /// descriptor.
    #[must_use]
    pub fn open(&'static self, device: u64, ino: u64, descriptor: RawFd) -> DirectFile {
        let file = DirectFile {
            client: self,
            device,
            mount: OnceLock::new(),
            join_retry_at: AtomicU64::new(0),
            join_reason: AtomicReason::new(Why::Joining),
            file_map: OnceLock::new(),
            ino,
            descriptor,
            account_index: op_counters::index_of(device, ino),
            file_map_reason: AtomicReason::new(Why::Asking),
            misses: AtomicU32::new(0),
            wants_append_space: AtomicBool::new(false),
        };
        if self.patience.load(Ordering::Relaxed) == 0 {
            // Each call tries again.
            let _ = file.join();
        }
        file
    }

    /// As [`DirectClient::open`], but waits for forks in progress. The caller knows that the
    /// process forks only briefly, and does not wait for a command meanwhile.
    #[must_use]
    pub fn open_waiting_for_forks(
        &'static self,
        device: u64,
        ino: u64,
        descriptor: RawFd,
    ) -> DirectFile {
        let file = self.open(device, ino, descriptor);
        let is_put_off = || matches!(file.try_join(), Err((wait, _)) if wait == FORK_RETRY);
        for _ in 0..FORK_TRIES_MAX {
            if !is_put_off() {
                break;
            }
            std::thread::sleep(FORK_RETRY);
        }
        file
    }

    /// The counts of direct operations and of operations by the kernel, file by file.
    #[must_use]
    pub fn file_counts(&self) -> Vec<FileCounts> {
        let mounts = self.mounts.try_lock();
        let mounts = mounts.iter().flat_map(|mounts| mounts.iter());
        let joined = mounts.filter_map(|(_, known)| match known {
            MountState::Joined(mount) if !mount.is_gone() => mount.counters.as_ref(),
            _ => None,
        });
        op_counters::file_counts(&joined.collect::<Vec<_>>())
    }

    /// Leaves all mounts, and joins none any more. Its threads end soon afterwards.
    pub fn leave(&self) {
        self.has_left.store(true, Ordering::SeqCst);
        for (_, known) in guard(&self.mounts).drain(..) {
            if let MountState::Joined(mount) = known {
                mount.mark_gone();
            }
        }
    }

    /// Whether the kernel serves one call more.
    fn consume_patience(&self) -> bool {
        let less = |left: u32| left.checked_sub(1);
        let order = Ordering::Relaxed;
        self.patience.fetch_update(order, order, less).is_ok()
    }

    /// The mount, if it lets this process in; otherwise the delay until the next attempt, and the
    /// reason. One thread asks a mount; other threads go on meanwhile, here and at other mounts.
    fn mount(&self, device: u64, file: RawFd) -> Result<Arc<JoinedMount>, (Duration, Why)> {
        if self.has_left.load(Ordering::SeqCst) {
            return Err((FULL_RETRY, Why::Confined));
        }
        if let Some(known) = self.known_mount(device) {
            return known;
        }
        let first = thread_number() % IO_SLOTS;
        let opened = run_on_helper_stack(self.run_masked, || {
            JoinedMount::join((device, file), self.run_masked, first)
        });
        let opened = opened.unwrap_or(Err(io::ErrorKind::Other.into()));
        let known = match &opened {
            Ok(mount) => Some(MountState::Joined(Arc::clone(mount))),
            Err(cause) if is_fork_in_progress(cause) => None,
            Err(cause) => {
                let until = now_ms() + FULL_RETRY.as_millis() as u64;
                Some(MountState::Refused(until, join_failure_reason(cause)))
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
            let wait = match is_fork_in_progress(&cause) {
                true => FORK_RETRY,
                false => FULL_RETRY,
            };
            (wait, join_failure_reason(&cause))
        })
    }

    /// The known state of the mount. None: the caller must ask; until then the state is `Joining`.
    fn known_mount(&self, device: u64) -> Option<Result<Arc<JoinedMount>, (Duration, Why)>> {
        let now = now_ms();
        let mut mounts = guard(&self.mounts);
        mounts.retain(|(_, known)| match known {
            MountState::Joined(mount) => !mount.is_gone(),
            MountState::Refused(until, _) => now < *until,
            MountState::Joining => true,
        });
        let known = mounts.iter().find(|(known, _)| *known == device);
        match known.map(|(_, known)| known) {
            Some(MountState::Joined(mount)) => Some(Ok(Arc::clone(mount))),
            Some(MountState::Refused(_, why)) => Some(Err((FULL_RETRY, *why))),
            Some(MountState::Joining) => Some(Err((RETRY, Why::Joining))),
            None if mounts.len() == MOUNTS_MAX => Some(Err((FULL_RETRY, Why::NoMount))),
            None => {
                mounts.push((device, MountState::Joining));
                None
            }
        }
    }
}

impl SlotResources {
    fn set_legs(&mut self, lease: LayoutLease, legs: ArrayVec<MappedLeg, LEGS_MAX>) {
        self.listed_fds = legs.iter().flat_map(leg_descriptors).collect();
        self.listed_fds.iter().copied().for_each(internal_fds::add);
        self.io_slot.set_legs(lease, legs);
    }

    fn drop_legs(&mut self) {
        if !self.listed_fds.is_empty() {
            self.release_legs(&internal_fds::FdCreation::begin_regardless());
        }
    }

    /// Drops the legs. No child may inherit a descriptor that is off the list and not closed yet.
    fn release_legs(&mut self, _making: &internal_fds::FdCreation) {
        self.listed_fds.drain(..).for_each(internal_fds::remove);
        self.io_slot.release_legs();
    }

    /// Whether a pool has too few sessions left for other users.
    fn exceeds_session_share(&self) -> bool {
        let legs = self.io_slot.legs().iter();
        legs.map(MappedLeg::sessions)
            .any(|(spare, all)| spare < SESSIONS_RESERVED_MIN.max(all / SESSIONS_RESERVED_PART))
    }

    /// Gives legs and row back if no thread has used the slot since the last check, unless sessions
    /// are plentiful.
    fn release_if_idle(&mut self) {
        let is_used = std::mem::take(&mut self.is_used);
        let is_few = |(spare, all)| spare < all / SESSIONS_SCARCE_PART;
        let mut sessions = self.io_slot.legs().iter().map(MappedLeg::sessions);
        if !is_used && (self.io_slot.legs().is_empty() || sessions.any(is_few)) {
            self.drop_legs();
            self.release_row();
        }
    }

    /// Gives the row back.
    fn release_row(&mut self) {
        if let Some(link) = self.link.take() {
            // A mount that is gone has no rows.
            let _ = wire::send(link.as_fd(), &ClientRequest::ReleaseRow.encode(), None);
        }
    }
}

fn leg_descriptors(leg: &MappedLeg) -> Vec<RawFd> {
    let mut all = Vec::new();
    leg.descriptors(&mut all);
    leg.pool_descriptors(&mut all);
    all
}

impl Drop for SlotResources {
    fn drop(&mut self) {
        self.drop_legs();
        self.release_row();
    }
}

impl Drop for JoinedMount {
    fn drop(&mut self) {
        internal_fds::remove(self.wake_fd.as_raw_fd());
    }
}

impl JoinedMount {
    /// Joins a mount. The row that the mount gives goes to slot `first`, that of the calling
    /// thread.
    fn join(
        (device, file): (u64, RawFd),
        run_masked: RunMasked,
        first: usize,
    ) -> io::Result<Arc<JoinedMount>> {
        let (link, method) = MountLink::connect(device, file)?;
        let (reply, memory) = link.ask(ClientRequest::Join)?;
        let memory = memory.ok_or(io::ErrorKind::PermissionDenied)?;
        // The mount may have no row for it now; a later attempt may get one.
        let row = match reply {
            MountReply::Joined(row, _) => Some(row as usize),
            _ => None,
        };
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let (control_link, _) = MountLink::connect(device, file)?;
        let counters = match control_link.ask(ClientRequest::GetCounters)? {
            (MountReply::Success, Some(memory)) => {
                Some(OpCounters::join(memory).map_err(io::Error::other)?)
            }
            _ => None,
        };
        if let Some(counters) = &counters {
            counters.import_process_counts(device);
        }
        let creation = internal_fds::FdCreation::begin().ok_or(FORK_IN_PROGRESS)?;
        let mount = Arc::new(JoinedMount {
            transports: Transports::new(
                Key::from_bytes(NO_KEY),
                Transport::Map,
                Timeouts::default(),
            ),
            run_masked,
            segment_id: memory_id(&memory),
            segment: DirectSegment::join(memory).map_err(io::Error::other)?,
            io_slots: std::array::from_fn(|_| Mutex::default()),
            control_link: Mutex::new(control_link),
            file_maps: Mutex::default(),
            read_mappings: Mutex::default(),
            is_gone: AtomicBool::new(false),
            retry_at: AtomicU64::new(0),
            retry_reason: AtomicReason::new(Why::Renewing),
            counters,
            wake_fd: move_fd_high(rustix::event::eventfd(0, flags)?),
            device: device_name(device),
            connect_method: method,
        });
        internal_fds::add(mount.wake_fd.as_raw_fd());
        // Detected once, for all children: in a virtual machine the host answers CPUID, one request
        // after the other. No fork runs meanwhile: the child would wait for the answer for ever.
        let _known = pagemesh_pmem::cpu::cpu();
        drop(creation);
        if let Some(row) = row {
            let mut first = guard(&mount.io_slots[first]);
            first.link = Some(link);
            first.io_slot.set_row(row);
        }
        let watched = Arc::clone(&mount);
        std::thread::Builder::new()
            .name("pagemesh-guest".into())
            .spawn(move || watched.watch_ends())?;
        Ok(mount)
    }

    fn file_map(&self, ino: u64, grows: bool) -> Result<Arc<SharedFileMap>, Why> {
        let request = match grows {
            true => ClientRequest::GetFileMapForAppend(ino),
            false => ClientRequest::GetFileMap(ino),
        };
        let mut control_link = self.control_link.try_lock().map_err(|_| Why::Asking)?;
        let reply = control_link.ask(request);
        match reply {
            Ok((MountReply::Success, Some(memory))) => {
                let mut file_maps = guard(&self.file_maps);
                file_maps.retain(|_, file_map| file_map.strong_count() > 0);
                if let Some(known) = file_maps.get(&ino).and_then(Weak::upgrade) {
                    // Another file may have the inode number by now.
                    if known.is_backed_by(&memory) {
                        return Ok(known);
                    }
                }
                let file_map = Arc::new(SharedFileMap::join(memory).map_err(|_| Why::Version)?);
                file_maps.insert(ino, Arc::downgrade(&file_map));
                Ok(file_map)
            }
            Ok((MountReply::FileRefused(refusal), _)) => Err(match refusal {
                FileRefusal::Mapped => Why::Mapped,
                FileRefusal::Cached => Why::Cached,
                FileRefusal::Unsupported => Why::Shape,
                FileRefusal::TooManyFiles => Why::Boards,
            }),
            Ok(_) => Err(Why::Asking),
            Err(cause) => {
                // A late answer would be taken for that of the next request.
                match cause.kind() {
                    io::ErrorKind::WouldBlock => self.reconnect_control(&mut control_link),
                    _ => self.mark_gone(),
                }
                Err(Why::Asking)
            }
        }
    }

    /// The mount is slow but there: later requests go by another connection.
    #[cold]
    fn reconnect_control(&self, control_link: &mut MountLink) {
        let link = match self.connect_method {
            ConnectMethod::SocketName => MountLink::connect_by_name(&self.device),
            ConnectMethod::OpenFile => control_link.connect_again(),
        };
        match link {
            Ok(link) => {
                *control_link = link;
                self.wake();
            }
            Err(_) => self.mark_gone(),
        }
    }

    /// Another connection. The caller holds an [`FdCreation`](internal_fds::FdCreation).
    fn connect_again(&self) -> Result<MountLink, EquipError> {
        match self.connect_method {
            ConnectMethod::SocketName => Ok(MountLink::connect_by_name(&self.device)?),
            // Its lock may be held by a thread that waits for an answer; the next attempt comes
            // soon.
            ConnectMethod::OpenFile => {
                let control_link = self
                    .control_link
                    .try_lock()
                    .map_err(|_| EquipError::LayoutUnavailable)?;
                Ok(control_link.connect_again()?)
            }
        }
    }

    /// A session of a leg, by the path of its brick's socket, or by the socket that the mount
    /// gives.
    fn map_leg(
        &self,
        link: &MountLink,
        lease: &LayoutLease,
        leg: usize,
    ) -> Result<MappedLeg, EquipError> {
        let lease_leg = &lease.legs[leg];
        let map = |path: &Path| {
            let (brick, slice) = (lease_leg.brick, lease_leg.slice);
            self.transports.map(brick, path, slice, lease.epoch)
        };
        match self.connect_method {
            ConnectMethod::SocketName => Ok(map(&lease_leg.socket)?),
            ConnectMethod::OpenFile => {
                let reply = link.ask(ClientRequest::GetBrickSocket(leg as u64))?;
                let (MountReply::Success, Some(socket)) = reply else {
                    return Err(EquipError::LayoutUnavailable);
                };
                let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
                Ok(map(path.as_ref())?)
            }
        }
    }

    /// The read mapping of a pool that a leg of this mount has. The caller holds a slot of the
    /// mount, so the pool stays mapped meanwhile.
    fn read_mapping(&self, pool: &Arc<PoolMapping<MappedMedia>>) -> Option<Arc<ReadMapping>> {
        let mut mappings = guard(&self.read_mappings);
        let is_its = |known: &Weak<PoolMapping<MappedMedia>>| {
            std::ptr::eq(known.as_ptr(), Arc::as_ptr(pool))
        };
        if let Some((_, mapping)) = mappings.iter().find(|(known, _)| is_its(known)) {
            return Some(Arc::clone(mapping));
        }
        let mapping = Arc::new(ReadMapping::of(pool.media()).ok()?);
        mappings.push((Arc::downgrade(pool), Arc::clone(&mapping)));
        Some(mapping)
    }

    /// Unmaps the pools of ended bricks: otherwise the next brick would have to kill this process.
    fn unmap_ended_pools(&self) {
        guard(&self.read_mappings).retain(|(pool, mapping)| {
            let is_there = pool.upgrade().is_some_and(|pool| !pool.is_owner_gone());
            // If the system has no resources to unmap it, the brick kills this process.
            is_there || mapping.detach().is_err()
        });
    }

    fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    fn mark_gone(&self) {
        self.is_gone.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // The counter of the eventfd is far from full.
        let _ = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes());
    }

    /// This thread's slot, unless another thread keeps it locked.
    #[inline]
    fn lock_io_slot(&self) -> Option<(usize, MutexGuard<'_, SlotResources>)> {
        let number = thread_number() % IO_SLOTS;
        let slot = &self.io_slots[number];
        for _ in 0..SPINS {
            if let Ok(slot) = slot.try_lock() {
                return Some((number, slot));
            }
            std::hint::spin_loop();
        }
        None
    }

    /// No slot is equipped again before this delay has passed.
    fn delay_retry(&self, now_ms: u64, wait: Duration, why: Why) {
        self.retry_reason.set(why);
        let retry_at = now_ms + wait.as_millis() as u64;
        self.retry_at.store(retry_at, Ordering::Relaxed);
    }

    /// Gets a slot its row and legs, unless an attempt failed shortly before.
    #[cold]
    fn equip_slot(&self, slot: &mut SlotResources) -> Result<(), Why> {
        let now = now_ms();
        if self.segment.generation() == 0 {
            return Err(self.disabled_reason());
        }
        if now < self.retry_at.load(Ordering::Relaxed) {
            return Err(self.retry_reason.get());
        }
        let creation = internal_fds::FdCreation::begin().ok_or(Why::Joining)?;
        let equipped =
            run_on_helper_stack(self.run_masked, || self.try_equip_slot(slot, &creation));
        let error = match equipped.unwrap_or(Err(EquipError::NoCapacity)) {
            Ok(()) => None,
            Err(EquipError::LayoutUnavailable) => Some((RETRY, Why::Renewing)),
            Err(EquipError::NoCapacity) => {
                // Other processes cannot use a session without a row, nor a session of one leg
                // only.
                slot.release_row();
                Some((FULL_RETRY, Why::NoSession))
            }
        };
        if let Some((wait, why)) = error {
            slot.release_legs(&creation);
            self.delay_retry(now, wait, why);
        }
        self.wake();
        error.map_or(Ok(()), |(_, why)| Err(why))
    }

    /// Why direct access is disabled at the moment.
    fn disabled_reason(&self) -> Why {
        disabled_reason_for(self.segment.disabled_reason())
    }

    fn try_equip_slot(
        &self,
        slot: &mut SlotResources,
        creation: &internal_fds::FdCreation,
    ) -> Result<(), EquipError> {
        // An unused session of this slot may be the one that the brick lacks.
        slot.release_legs(creation);
        let request = match slot.link {
            None => ClientRequest::Join,
            Some(_) => ClientRequest::GetLayout,
        };
        let link = match slot.link.take() {
            None => self.connect_again()?,
            Some(link) => link,
        };
        let reply = link.ask(request);
        slot.link = Some(link);
        if let Ok((_, Some(memory))) = &reply
            && memory_id(memory) != self.segment_id
        {
            // This is the next mount, which has got the same device number.
            self.mark_gone();
            return Err(EquipError::NoCapacity);
        }
        let reply = reply.map(|(reply, _)| reply);
        let Ok(MountReply::Joined(row, picture)) = reply else {
            // A late row is given back with the link.
            slot.release_row();
            reply?;
            return Err(EquipError::NoCapacity);
        };
        slot.io_slot.set_row(row as usize);
        let lease = picture.ok_or(EquipError::LayoutUnavailable)?;
        let mut legs = ArrayVec::new();
        for leg in 0..lease.legs.len() {
            let link = slot.link.as_ref().ok_or(EquipError::LayoutUnavailable)?;
            let leg = self.map_leg(link, &lease, leg)?;
            legs.try_push(leg)
                .map_err(|_| EquipError::LayoutUnavailable)?;
        }
        slot.set_legs(lease, legs);
        match slot.exceeds_session_share() {
            true => Err(EquipError::NoCapacity),
            false => Ok(()),
        }
    }

    /// Watches for ended bricks and for the end of the mount.
    fn watch_ends(&self) {
        let mut descriptors = Vec::new();
        let mut look_at = None;
        while !self.is_gone.load(Ordering::Acquire) {
            descriptors.clear();
            descriptors.push(self.wake_fd.as_raw_fd());
            let (mut has_link, mut is_busy) = (false, false);
            // The thread that asks reads the answer. The link is not polled meanwhile.
            match self.control_link.try_lock() {
                Ok(control_link) => descriptors.push(control_link.as_fd().as_raw_fd()),
                Err(_) => is_busy = true,
            }
            for io_slot in &self.io_slots {
                let Ok(slot) = io_slot.try_lock() else {
                    is_busy = true;
                    continue;
                };
                has_link |= slot.link.is_some();
                let legs = slot.io_slot.legs().iter();
                legs.for_each(|leg| leg.descriptors(&mut descriptors));
            }
            // A process without links has nothing to give back, and sleeps.
            look_at = match has_link {
                true => look_at.or(Some(Instant::now() + IDLE_MAX)),
                false => None,
            };
            // The holder of a slot may wait for a stalled mount, while bricks come and go.
            let busy_until = is_busy.then(|| Instant::now() + BUSY_POLL_INTERVAL);
            let until = look_at.into_iter().chain(busy_until).min();
            if until_readable(&descriptors, until).is_err() {
                break;
            }
            let free = || self.io_slots.iter().filter_map(|it| it.try_lock().ok());
            if look_at.is_some_and(|at| Instant::now() >= at) {
                look_at = None;
                free().for_each(|mut slot| slot.release_if_idle());
            }
            let _ = rustix::io::read(&self.wake_fd, &mut [0; 8]);
            for mut slot in free() {
                if slot
                    .io_slot
                    .legs_mut()
                    .any(|leg| leg.poll_closed().is_some())
                {
                    slot.drop_legs();
                }
            }
            self.unmap_ended_pools();
            if self.is_mount_disconnected() {
                break;
            }
        }
        self.is_gone.store(true, Ordering::Release);
        for io_slot in &self.io_slots {
            *guard(io_slot) = SlotResources::default();
        }
        if let Some(counters) = &self.counters {
            counters.export_direct_counts();
        }
        self.unmap_ended_pools();
    }

    fn is_mount_disconnected(&self) -> bool {
        // The thread that asks reads the answer, and notices the end of the connection itself.
        let Ok(control_link) = self.control_link.try_lock() else {
            return false;
        };
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        let peeked = rustix::net::recv(&*control_link, &mut [0u8; 1], flags);
        matches!(peeked, Ok((_, 0)))
    }
}

pub(crate) fn disabled_reason_for(hindrance: Option<DirectDisabledReason>) -> Why {
    match hindrance {
        None | Some(DirectDisabledReason::Reconfiguring) => Why::Withheld,
        Some(DirectDisabledReason::LegNotInSync) => Why::Legs,
        Some(DirectDisabledReason::TcpLeg) => Why::Tcp,
        Some(DirectDisabledReason::BufferedPool) => Why::Buffers,
        Some(DirectDisabledReason::MultipleColumns) => Why::Columns,
    }
}

/// The status of a mount's direct clients, as JSON.
pub(crate) fn request_status(device: u64, file: RawFd) -> io::Result<Vec<u8>> {
    let (link, _) = MountLink::connect(device, file)?;
    let (_, memory) = link.ask(ClientRequest::GetStatus)?;
    let mut memory = memory.ok_or(io::ErrorKind::InvalidData)?;
    let mut bytes = Vec::new();
    memory.seek(io::SeekFrom::Start(0))?;
    memory.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Why no direct operation may begin on a file at the moment.
#[cold]
fn begin_failure_reason(mount: &JoinedMount, file_map: &SharedFileMap) -> Why {
    match mount.segment.is_closed() || file_map.is_closed() {
        true => Why::Closed,
        false => Why::Asking,
    }
}

/// Wakes the thread of the mount that sends the contents of the replication ring.
#[cold]
fn wake_replicator(link: Option<&MountLink>, segment: &DirectSegment) {
    let called = link.map(|link| {
        let request = ClientRequest::WakeReplicator.encode();
        wire::send(link.as_fd(), &request, None)
    });
    if !matches!(called, Some(Ok(()))) {
        segment.ring().rearm_wakeup();
    }
}

/// Bytes of a file at their place in a pool, see [`DirectFile::map_consistent`]. Writers do not
/// wait for a reader: the bytes may change while they are read. [`ConsistentMapping::is_unchanged`]
/// detects that afterwards.
pub struct ConsistentMapping {
    consistent_read: Box<ConsistentRead<MappedMedia>>,
    mapping: Arc<ReadMapping>,
    extents: Vec<FileExtent>,
}

impl ConsistentMapping {
    /// The bytes in order, in pieces of at most a page. The pieces can be read as long as this
    /// mapping lives.
    pub fn slices(&self) -> impl Iterator<Item = (NonNull<u8>, usize)> + '_ {
        let page = PAGE_BYTES as u64;
        let parts = self.extents.iter().flat_map(move |run| {
            let (mut at, end) = (run.offset, run.offset + run.len);
            std::iter::from_fn(move || {
                let within = at % page;
                let len = (page - within).min(end - at);
                at += len;
                (len > 0).then_some((within as usize, len as usize))
            })
        });
        let places = self.consistent_read.page_offsets().zip(parts);
        places.map(|(place, (within, len))| (self.mapping.at(place + within, len), len))
    }

    /// Whether everything that was read so far belongs to one consistent state of the file.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        self.consistent_read.is_unchanged() && !self.mapping.is_detached()
    }
}

/// Asks the mount with this device number to overwrite parts of the open file `descriptor`, all of
/// them or none, also if the direct path is not available; see [`pagemesh_fs::Fs::write_atomic`].
/// It waits as long as the mount needs. The caller has the file open for writing.
///
/// # Errors
/// `EOPNOTSUPP` if there is no mount, or the mount does not admit this process. `EIO` if
/// the mount ended meanwhile; then the parts are changed or not. The error of the mount. Errors of
/// the system, and `EAGAIN` for a mount that does not answer, with nothing changed.
pub fn write_by_mount(
    (device, ino, descriptor): (u64, u64, RawFd),
    parts: &[(u64, &[u8])],
) -> io::Result<()> {
    use io::ErrorKind as Kind;
    let told = |cause: io::Error| match cause.kind() {
        // No process listens, or it is not the mount.
        Kind::NotFound | Kind::ConnectionRefused | Kind::PermissionDenied
        // The mount closes the connection of a process that it does not admit, before or after the
        // request.
        | Kind::UnexpectedEof | Kind::ConnectionReset | Kind::BrokenPipe
        // It speaks another version of the protocol.
        | Kind::Other => Errno::OPNOTSUPP.into(),
        // A transient error.
        _ => cause,
    };
    let (link, _) = {
        let _making = internal_fds::FdCreation::begin_regardless();
        MountLink::connect_regardless(device, descriptor).map_err(told)?
    };
    link.ask(ClientRequest::GetFileMap(ino)).map_err(told)?;
    link.set_reply_timeout(None)?;
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let memory = SystemFile::from(rustix::fs::memfd_create("pagemesh-parts", flags)?);
    memory.write_all_at(&wire::encode_parts(parts), 0)?;
    let request = ClientRequest::WriteAtomic(ino).encode();
    wire::send(link.as_fd(), &request, Some(memory.as_fd()))?;
    let reply = link
        .receive_reply()
        .map_err(|_| io::Error::from(Errno::IO))?;
    match reply.0 {
        MountReply::Success => Ok(()),
        MountReply::Failed(error) => Err(io::Error::from_raw_os_error(error)),
        MountReply::Unavailable | MountReply::FileRefused(_) | MountReply::Joined(..) => {
            Err(Errno::IO.into())
        }
    }
}

impl DirectFile {
    /// Reads bytes, fewer at the end of the file; none: the kernel must do it. It may allocate, and
    /// wait for the mount and for bricks. Each group of pages that writes change atomically is read
    /// as one consistent state.
    #[must_use]
    pub fn read(&self, into: &mut [u8], offset: u64) -> Option<usize> {
        let place = (offset, into.len(), Intent::Read);
        let read = self.operate(place, |_| true, |operation| operation.read(into, offset));
        self.or_count_kernel(read)
    }

    /// Maps bytes in place, fewer at the end of the file, as one consistent state; none: the bytes
    /// can only be read. At most [`CONSISTENT_READ_PAGES_MAX`] pages.
    ///
    /// [`CONSISTENT_READ_PAGES_MAX`]: pagemesh_store::consistent_read::CONSISTENT_READ_PAGES_MAX
    #[must_use]
    pub fn map_consistent(&self, offset: u64, len: usize) -> Option<ConsistentMapping> {
        let mount = self.or_count_kernel(self.mount())?;
        let place = (offset, len, Intent::Read);
        let shown = self.operate(place, Option::is_some, |operation| {
            operation.map_consistent(offset, len, |leg| mount.read_mapping(leg.view()))
        });
        let shown = shown.and_then(|shown| shown.ok_or(Why::Busy));
        let ((moment, runs), pane) = self.or_count_kernel(shown)?;
        Some(ConsistentMapping {
            consistent_read: moment,
            mapping: pane,
            extents: runs.to_vec(),
        })
    }

    /// Overwrites whole pages of several places, all of them or none; none: the mount must do it,
    /// see [`write_by_mount`].
    #[must_use]
    pub fn write_atomic(&self, parts: &[(u64, &[u8])]) -> Option<()> {
        let bytes: usize = parts.iter().map(|(_, data)| data.len()).sum();
        let &(first, _) = parts.first()?;
        let place = (first, bytes, Intent::Write);
        let written = self.operate(
            place,
            |()| true,
            |operation| {
                let written = operation.write_atomic(parts);
                if let Some(Ok(())) = written {
                    self.record_write_time();
                }
                written
            },
        );
        self.or_count_kernel(written)
    }

    /// Counts an operation that the kernel serves, for a reason that the caller knows.
    #[cold]
    pub fn count_kernel(&self, why: Why) {
        op_counters::count_kernel(self.account_index, why);
        if let Some(counters) = self
            .joined_mount()
            .and_then(|mount| mount.counters.as_ref())
        {
            counters.count_kernel(self.account_index, why);
        }
    }

    #[inline]
    fn or_count_kernel<T>(&self, done: Result<T, Why>) -> Option<T> {
        done.inspect_err(|&why| self.count_kernel(why)).ok()
    }

    /// The mount, if this process is a direct client of it, or becomes one.
    #[inline]
    fn mount(&self) -> Result<&JoinedMount, Why> {
        self.joined_mount().map_or_else(|| self.join(), Ok)
    }

    /// The mount, if this process has joined it already.
    #[inline]
    fn joined_mount(&self) -> Option<&JoinedMount> {
        self.mount.get().map(Arc::as_ref)
    }

    #[cold]
    fn join(&self) -> Result<&JoinedMount, Why> {
        if self.client.consume_patience() {
            return Err(Why::Patience);
        }
        if now_ms() < self.join_retry_at.load(Ordering::Relaxed) {
            return Err(self.join_reason.get());
        }
        self.try_join().map_err(|(_, why)| why)
    }

    /// Joins the mount; otherwise returns the delay until the next attempt, and the reason.
    fn try_join(&self) -> Result<&JoinedMount, (Duration, Why)> {
        let joined = self.client.mount(self.device, self.descriptor);
        let joined = joined.inspect_err(|(wait, why)| {
            let again = now_ms() + wait.as_millis() as u64;
            self.join_reason.set(*why);
            self.join_retry_at.store(again, Ordering::Relaxed);
        })?;
        if let Some(counters) = &joined.counters {
            counters.set_ino(self.account_index, self.ino);
        }
        Ok(self.mount.get_or_init(|| joined))
    }

    /// Bytes of the file, as long as direct access is allowed; none: ask the kernel. It begins no
    /// row operation. Each end in a file map was the file's end at some moment since the check,
    /// since the mount outdates the map before it changes more than the end.
    #[must_use]
    pub fn size(&self) -> Option<u64> {
        let file_map = self.file_map.get()?;
        let may = self.is_direct_allowed() && !file_map.is_closed() && !file_map.is_outdated();
        may.then(|| file_map.size())
    }

    /// Whether all writes to the file that have returned are durable without an fsync.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        // Direct access is allowed only where nothing is buffered. The kernel's path waits for
        // writes that an asynchronous replica lacks, and for stores into mappings: the mount closes
        // the map of a mapped file.
        let has_guests =
            |file_map: &Arc<SharedFileMap>| !file_map.is_closed() && !file_map.is_outdated();
        self.is_direct_allowed()
            && !self.has_async_replica()
            && self.file_map.get().is_some_and(has_guests)
    }

    /// Whether its mount allows direct access at the moment.
    #[must_use]
    pub fn is_direct_allowed(&self) -> bool {
        let lets_in = |mount: &JoinedMount| mount.segment.generation() != 0 && !mount.is_gone();
        self.joined_mount().is_some_and(lets_in)
    }

    /// Whether an asynchronous replica receives acknowledged writes later.
    #[must_use]
    pub fn has_async_replica(&self) -> bool {
        let is_followed = |mount: &JoinedMount| mount.segment.ring().has_replica();
        self.joined_mount().is_some_and(is_followed)
    }

    /// A count that changes whenever a descriptor of the file was closed, and whenever a process
    /// with direct clients opened a file of the mount without its preload library. Callers that
    /// know the file by a descriptor number check the number when the count has changed. 0 is never
    /// returned. None: the file is not on the direct path yet, so this client does no operation of
    /// it.
    #[inline]
    #[must_use]
    pub fn change_count(&self) -> Option<u64> {
        let (mount, file_map) = (self.joined_mount()?, self.file_map.get()?);
        Some(1 + file_map.close_count() + mount.segment.untracked_opens())
    }

    /// As [`DirectFile::change_count`], but only if a read or write needs no request to the mount
    /// first.
    #[inline]
    #[must_use]
    pub fn ready_change_count(&self) -> Option<u64> {
        self.change_count().filter(|_| self.has_current_map())
    }

    /// As [`DirectFile::change_count`], for a caller that wants to read or write. Now and then it
    /// joins the mount and asks for the file map.
    #[inline]
    #[must_use]
    pub fn prepare(&self) -> Option<u64> {
        let prepared = self.try_prepare();
        prepared.map_err(|why| self.count_kernel(why)).ok()
    }

    #[inline]
    fn try_prepare(&self) -> Result<u64, Why> {
        let mount = self.mount()?;
        if mount.is_gone.load(Ordering::Relaxed) {
            return Err(Why::MountGone);
        }
        if !self.has_current_map() {
            self.refresh_file_map()?;
        }
        self.change_count().ok_or(Why::Asking)
    }

    #[inline]
    fn has_current_map(&self) -> bool {
        self.file_map
            .get()
            .is_some_and(|file_map| !file_map.is_outdated())
    }

    /// Runs an operation if direct access is allowed and the operation can be done. `is_done`
    /// decides whether its result counts as a direct operation.
    #[inline]
    fn operate<T>(
        &self,
        (offset, len, intent): (u64, usize, Intent),
        is_done: impl Fn(&T) -> bool,
        work: impl FnOnce(&mut Operation<'_, MappedLeg>) -> LegResult<T>,
    ) -> Result<T, Why> {
        if len == 0 || len > SLICE_IO_BYTES_MAX as usize {
            return Err(Why::Long);
        }
        let mount = self.mount()?;
        if mount.is_gone.load(Ordering::Relaxed) {
            return Err(Why::MountGone);
        }
        if !self.has_current_map() {
            self.refresh_file_map()?;
        }
        let file_map = self.file_map.get().ok_or(Why::Asking)?;
        let (number, mut slot) = mount.lock_io_slot().ok_or(Why::Busy)?;
        slot.is_used = true;
        if !slot.io_slot.is_ready(&mount.segment) {
            mount.equip_slot(&mut slot)?;
        }
        let SlotResources { io_slot, link, .. } = &mut *slot;
        let place = (offset, len as u64, intent);
        let begun = io_slot.begin(&mount.segment, file_map, self.ino, place);
        let mut operation = begun.ok_or_else(|| begin_failure_reason(mount, file_map))?;
        let worked = work(&mut operation);
        if operation.must_wake_replicator() {
            wake_replicator(link.as_ref(), &mount.segment);
        }
        drop(operation);
        match worked.ok_or(Why::Busy)? {
            Ok(done) => {
                if let Some(counters) = &mount.counters
                    && is_done(&done)
                {
                    counters.count_direct(number, self.account_index);
                }
                Ok(done)
            }
            Err(error) => Err(self.drop_failed_legs(mount, slot, &error)),
        }
    }

    /// Asks for the current file map, on one call in [`KERNEL_CALLS_PER_REQUEST`]. An error: the
    /// operation goes to the kernel.
    #[cold]
    fn refresh_file_map(&self) -> Result<(), Why> {
        if self.misses.fetch_add(1, Ordering::Relaxed) % KERNEL_CALLS_PER_REQUEST
            != KERNEL_CALLS_PER_REQUEST - 1
        {
            return Err(self.file_map_reason.get());
        }
        let grows = self.wants_append_space.load(Ordering::Relaxed);
        let mount = self.joined_mount().ok_or(Why::Joining)?;
        let shown = mount.file_map(self.ino, grows);
        self.file_map_reason
            .set(shown.as_ref().err().copied().unwrap_or(Why::Asking));
        let shown = shown?;
        let file_map = self.file_map.get_or_init(|| Arc::clone(&shown));
        match Arc::ptr_eq(file_map, &shown) && !file_map.is_outdated() {
            true => Ok(()),
            false => Err(Why::Asking),
        }
    }

    /// A leg failed: drops the legs if the session or its epoch is lost.
    #[cold]
    fn drop_failed_legs(
        &self,
        mount: &JoinedMount,
        mut slot: MutexGuard<'_, SlotResources>,
        error: &SliceError,
    ) -> Why {
        if matches!(error, SliceError::Lost(_) | SliceError::StaleEpoch { .. }) {
            slot.drop_legs();
            mount.delay_retry(now_ms(), RETRY, Why::Renewing);
            mount.wake();
        }
        Why::Lost
    }

    #[inline]
    fn record_write_time(&self) {
        if let Some(file_map) = self.file_map.get() {
            let now = clock_gettime(ClockId::RealtimeCoarse);
            let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
            file_map.record_write_time(now_ns);
        }
    }
}
