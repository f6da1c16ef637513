//! A leg whose pool is mapped in this process: requests are done inside
//! `submit`, by a session of the pool. Only what the pool's owner alone can do
//! goes to the brick, over the connection that the mapping came with.
//!
//! Invariants: nothing is done after the brick's end of the connection closed
//! was noticed, nor once a request of the session found it lost: if each of those
//! that were submitted together waited for an owner that stands still, the last would
//! wait for all their waits. The mapping goes with the last leg, so that a new brick
//! can recover the pool. The watcher never touches the pool.

use crate::engine::LegAnswers;
use crate::limits::MAPPED_DONE_MAX;
use arrayvec::ArrayVec;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::LEGS_MAX;
use pagemesh_base::slice::{
    Leg, SLICE_IO_BYTES_MAX, SliceCompletion, SliceError, SliceReply, SliceRequest, Stamp,
    TransactionPart,
};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{MappedMedia, Media};
use pagemesh_store::consistent_read::{ConsistentRead, ReadPiece};
use pagemesh_store::pool_mapping::{Handle, PoolMapping};
use pagemesh_store::requests::{ExecuteOutcome, execute};
use pagemesh_store::session::{LegFailure, LegSession, Session, write, write_numbered};
use pagemesh_store::transaction::{transact, transact_numbered};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{Shutdown, shutdown};
use std::any::Any;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// A session of a mapped pool, and the brick that owns it.
pub struct MappedLeg {
    session: Session<MappedMedia>,
    handle: Handle,
    /// The newest epoch that this leg used.
    epoch: Epoch,
    /// The connection to the pool's owner.
    owner: Box<dyn Leg>,
    /// Requests that the owner has not answered.
    owner_pending: u32,
    completions: Vec<SliceCompletion>,
    /// Why nothing is done any more: the owner is gone, or stands still.
    loss_error: Option<SliceError>,
    owner_link: Arc<OwnerLink>,
}

/// The connection that a session lives and dies with.
struct OwnerLink {
    socket: OwnedFd,
    /// Whether this end closed it.
    is_closed_locally: AtomicBool,
}

impl MappedLeg {
    /// The leg of a session. `life` is a descriptor that hangs up when the
    /// brick is gone; `owner` does what the session cannot.
    ///
    /// # Errors
    /// When the watcher cannot be started.
    pub fn new(
        session: Session<MappedMedia>,
        handle: Handle,
        epoch: Epoch,
        owner: Box<dyn Leg>,
        life: OwnedFd,
    ) -> std::io::Result<MappedLeg> {
        let view = Arc::downgrade(session.mapping());
        let life = Arc::new(OwnerLink {
            socket: life,
            is_closed_locally: AtomicBool::new(false),
        });
        let watched = life.clone();
        let watcher = std::thread::Builder::new().name("brick-watcher".into());
        watcher.spawn(move || watch_owner(&view, &watched))?;
        Ok(MappedLeg {
            session,
            handle,
            epoch,
            owner,
            owner_pending: 0,
            completions: Vec::new(),
            loss_error: None,
            owner_link: life,
        })
    }

    /// Keeps an answer until it is reaped; one that it is lost holds from then on.
    pub(crate) fn push_completion(&mut self, tag: u64, result: Result<SliceReply, SliceError>) {
        if let Err(error @ SliceError::Lost(_)) = &result {
            self.loss_error = Some(error.clone());
        }
        debug_assert!(
            self.completions.len() < MAPPED_DONE_MAX,
            "completions are reaped"
        );
        self.completions.push(SliceCompletion { tag, result });
    }

    /// Writes the same bytes through every leg at once: each source byte is
    /// loaded once, and one fence commits them all.
    pub(crate) fn write_all(
        legs: &mut [&mut MappedLeg],
        offset: u64,
        data: &[u8],
        stamp: Stamp,
    ) -> LegAnswers {
        if data.len() > SLICE_IO_BYTES_MAX as usize {
            let cause = SliceError::OutOfRange(format!("{} bytes in one write", data.len()));
            return legs.iter().map(|_| Err(cause.clone())).collect();
        }
        MappedLeg::change_all(legs, stamp, &|members| write(members, offset, data, stamp))
    }

    /// The same for a transaction.
    pub(crate) fn transact_all(
        legs: &mut [&mut MappedLeg],
        parts: &[TransactionPart],
        stamp: Stamp,
    ) -> LegAnswers {
        MappedLeg::change_all(legs, stamp, &|members| transact(members, parts, stamp))
    }

    fn change_all(
        legs: &mut [&mut MappedLeg],
        stamp: Stamp,
        change: &impl Fn(&mut [LegSession<'_, MappedMedia>]) -> Result<(), LegFailure>,
    ) -> LegAnswers {
        let mut lost = legs.iter().enumerate();
        let lost = lost.find_map(|(at, leg)| Some((at, leg.loss_error.clone()?)));
        let failed = lost.or_else(|| {
            let members = legs.iter_mut().map(|leg| {
                leg.epoch = leg.epoch.max(stamp.epoch);
                LegSession {
                    session: &mut leg.session,
                    handle: leg.handle,
                }
            });
            let mut members: ArrayVec<_, LEGS_MAX> = members.collect();
            let failure = change(&mut members).err()?;
            Some((failure.leg, SliceError::from(failure.cause)))
        });
        let Some((failed, error)) = failed else {
            return legs.iter().map(|_| Ok(SliceReply::Done)).collect();
        };
        // The others go on without it, as if they had been asked alone.
        let (before, rest) = legs.split_at_mut(failed);
        let (_, after) = rest.split_at_mut(1);
        let mut others: ArrayVec<&mut MappedLeg, LEGS_MAX> = ArrayVec::new();
        others.extend(before.iter_mut().chain(after).map(|leg| &mut **leg));
        let mut answers = match others.is_empty() {
            true => LegAnswers::new(),
            false => MappedLeg::change_all(&mut others, stamp, change),
        };
        answers.insert(failed, Err(error));
        answers
    }
}

/// What a guest works on: a session of a leg's pool, and nothing else of it. Guests have no
/// engine, and share pages with others of their kind.
pub trait DirectLeg {
    /// Where the pool lies.
    type Media: Media;

    /// The session, and the slice in its pool.
    fn session_and_handle(&self) -> (&Session<Self::Media>, &Handle);

    /// The same, to be used.
    fn session_member(&mut self) -> LegSession<'_, Self::Media>;

    /// A write of this place will come: fetches meanwhile what other cores had last.
    #[inline]
    fn prefetch_write(&self, offset: u64) {
        let (session, handle) = self.session_and_handle();
        session.prefetch_write(handle, page_of(offset));
    }

    /// A read of this place will come: fetches meanwhile what tells where it lies.
    #[inline]
    fn prefetch_read(&self, offset: u64) {
        let (session, handle) = self.session_and_handle();
        session.prefetch_read(handle, page_of(offset));
    }

    /// It comes next: fetches where it lies.
    #[inline]
    fn prefetch_page(&self, offset: u64) {
        let (session, handle) = self.session_and_handle();
        session.prefetch_page(handle, page_of(offset));
    }

    /// How many of `len` bytes from here on one record can tell of.
    #[inline]
    fn record_len(&self, offset: u64, len: u64) -> u64 {
        self.session_and_handle().0.record_len_max(offset, len)
    }

    /// Reads bytes, each page checked against its checksum.
    ///
    /// # Errors
    /// As the store says.
    #[inline]
    fn read_into(&mut self, offset: u64, into: &mut [u8], epoch: Epoch) -> Result<(), SliceError> {
        let LegSession { session, handle } = self.session_member();
        Ok(session.read(&handle, offset, into, epoch)?)
    }

    /// Reads bytes of several places as they are at one moment. False: it cannot be had,
    /// now or at all.
    ///
    /// # Errors
    /// As the store says.
    fn read_consistent(
        &mut self,
        pieces: &mut [ReadPiece<'_>],
        epoch: Epoch,
    ) -> Result<bool, SliceError> {
        let LegSession { session, handle } = self.session_member();
        Ok(session.read_consistent(&handle, pieces, epoch)?)
    }

    /// The same without a copy: where the pages lie. None: as there.
    ///
    /// # Errors
    /// As the store says.
    fn map_consistent(
        &mut self,
        ranges: &[(u64, u64)],
        epoch: Epoch,
    ) -> Result<Option<Box<ConsistentRead<Self::Media>>>, SliceError> {
        let LegSession { session, handle } = self.session_member();
        Ok(session.map_consistent(&handle, ranges, epoch)?)
    }

    /// Whole pages of one chunk that are written together or not at all.
    fn atomic_pages_max(&self) -> u64 {
        self.session_and_handle().0.pages_max()
    }
}

fn page_of(offset: u64) -> PageNo {
    PageNo(offset / PAGE_BYTES as u64)
}

/// Of an operation of a guest: what its session did before is on all legs.
fn op_stamp(epoch: Epoch, op: u64) -> Stamp {
    Stamp {
        epoch,
        op,
        open_ops: 0,
    }
}

fn session_members<L: DirectLeg>(legs: &mut [L]) -> ArrayVec<LegSession<'_, L::Media>, LEGS_MAX> {
    legs.iter_mut().map(DirectLeg::session_member).collect()
}

/// Writes bytes through every leg at once, for a guest. Each record is of this epoch, and
/// gets a number that `next_piece` gives, behind the lock words of its pages.
///
/// # Errors
/// What the first leg says that failed. Whole pages before the failing one are there.
#[inline]
pub fn overwrite_all<L: DirectLeg>(
    legs: &mut [L],
    offset: u64,
    data: &[u8],
    epoch: Epoch,
    next: impl Fn() -> u64,
) -> Result<(), SliceError> {
    let stamp = || op_stamp(epoch, next());
    let written = write_numbered(&mut session_members(legs), offset, data, epoch, stamp);
    written.map_err(|failure| failure.cause.into())
}

/// Changes pages of several places through every leg at once, as a whole, with a
/// number that `next_piece` gives behind the lock words of all of them.
///
/// # Errors
/// What the first leg says that failed. Nothing has changed then, unless a slot was
/// found damaged after the commit.
pub fn overwrite_atomically<L: DirectLeg>(
    legs: &mut [L],
    parts: &[TransactionPart],
    epoch: Epoch,
    next: impl Fn() -> u64,
) -> Result<(), SliceError> {
    let stamp = || op_stamp(epoch, next());
    let written = transact_numbered(&mut session_members(legs), parts, epoch, stamp);
    written.map_err(|failure| failure.cause.into())
}

impl DirectLeg for MappedLeg {
    type Media = MappedMedia;

    #[inline]
    fn session_and_handle(&self) -> (&Session<MappedMedia>, &Handle) {
        (&self.session, &self.handle)
    }

    #[inline]
    fn session_member(&mut self) -> LegSession<'_, MappedMedia> {
        LegSession {
            session: &mut self.session,
            handle: self.handle,
        }
    }
}

/// What a guest's process does with them.
impl MappedLeg {
    /// What it shares with all legs of its pool in this process.
    #[must_use]
    pub fn view(&self) -> &Arc<PoolMapping<MappedMedia>> {
        self.session.mapping()
    }

    /// Sessions of its pool that nobody has at the moment, and all.
    #[must_use]
    pub fn sessions(&self) -> (u32, u32) {
        let control = self.session.mapping().control();
        (control.free_sessions(), control.session_count())
    }

    /// The descriptors of its brick's connection.
    pub fn descriptors(&self, into: &mut Vec<RawFd>) {
        into.push(self.owner_link.socket.as_raw_fd());
        self.owner.poll_fds(into);
    }

    /// Those of its pool, which all legs of one pool in a process share.
    pub fn pool_descriptors(&self, into: &mut Vec<RawFd>) {
        let view = self.session.mapping();
        into.push(view.media().file().as_raw_fd());
        into.push(view.control().shared().file().as_raw_fd());
    }
}

/// Waits for the brick's end; then no session of the mapping does anything
/// more.
fn watch_owner(view: &Weak<PoolMapping<MappedMedia>>, life: &OwnerLink) {
    loop {
        let mut fds = [PollFd::new(&life.socket, PollFlags::RDHUP)];
        match poll(&mut fds, None) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            _ if life.is_closed_locally.load(Ordering::Acquire) => return,
            _ => {
                if let Some(view) = view.upgrade() {
                    view.mark_owner_gone();
                }
                return;
            }
        }
    }
}

impl Drop for MappedLeg {
    fn drop(&mut self) {
        self.owner_link
            .is_closed_locally
            .store(true, Ordering::Release);
        // Ends the session and its watcher; fails only if the brick is gone.
        let _ = shutdown(&self.owner_link.socket, Shutdown::Both);
    }
}

impl Leg for MappedLeg {
    fn submit(&mut self, tag: u64, request: SliceRequest) {
        if let Some(error) = self.loss_error.clone() {
            return self.push_completion(tag, Err(error));
        }
        self.epoch = request.epoch().map_or(self.epoch, |it| it.max(self.epoch));
        match execute(&mut self.session, self.handle, self.epoch, request) {
            ExecuteOutcome::Done(result) => self.push_completion(tag, result),
            ExecuteOutcome::NeedsOwner(request) => {
                self.owner_pending += 1;
                self.owner.submit(tag, request);
            }
        }
    }

    fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
        into.append(&mut self.completions);
        if self.owner_pending > 0 {
            let before = into.len();
            self.owner.reap(into);
            self.owner_pending -= (into.len() - before) as u32;
        }
    }

    fn poll_closed(&mut self) -> Option<SliceError> {
        self.owner.poll_closed()
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        self.owner.poll_fds(into);
    }

    fn deadline(&self) -> Option<Instant> {
        match (self.completions.is_empty(), self.owner_pending) {
            // Nothing will become readable for what is done already.
            (false, _) => Some(Instant::now()),
            (true, 0) => None,
            (true, _) => self.owner.deadline(),
        }
    }

    fn as_any(&mut self) -> Option<&mut dyn Any> {
        Some(self)
    }
}
