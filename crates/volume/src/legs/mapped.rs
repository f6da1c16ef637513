//! A leg in a pool that is mapped in this process. A session of the pool does the requests
//! inside `submit`. Only requests that need the pool's owner go to the brick, over the
//! connection that the mapping came with: also those that find a page on a disk behind the mapped memory.
//!
//! Invariants:
//! - The leg does nothing after the brick closed its end of the connection, or after a
//!   request found the session lost. Otherwise, if several requests met a stalled owner, each
//!   would wait for it in turn.
//! - The mapping goes with the last leg, so that a new brick can recover the pool.
//! - The watcher never touches the pool.

use super::snapshot_reads::SnapshotReads;
use crate::engine::LegAnswers;
use crate::limits::MAPPED_DONE_MAX;
use arrayvec::ArrayVec;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::LEGS_MAX;
use pagemesh_base::slice::{
    Leg, SLICE_IO_BYTES_MAX, SliceCompletion, SliceError, SliceReply, SliceRequest, Stamp,
    TransactionPart,
};
use pagemesh_base::tier_hint::TierHint;
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
    /// The error that ended the leg: its owner is gone, or is stalled.
    loss_error: Option<SliceError>,
    owner_link: Arc<OwnerLink>,
    /// Whether the brick knows tier hints.
    knows_hints: bool,
    /// None until the first read of a snapshot.
    snapshot_reads: Option<Box<SnapshotReads>>,
}

/// The connection that bounds the life of a session.
struct OwnerLink {
    socket: OwnedFd,
    /// Whether this process closed it.
    is_closed_locally: AtomicBool,
}

impl MappedLeg {
    /// Creates the leg of a session. `life` is a descriptor that hangs up when the brick is
    /// gone. `owner` does the requests that the session cannot.
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
            knows_hints: false,
            snapshot_reads: None,
        })
    }

    /// The same with a brick that knows tier hints, if it does.
    #[must_use]
    pub fn with_hints(mut self, knows_hints: bool) -> MappedLeg {
        self.knows_hints = knows_hints;
        self
    }

    /// Sets the hint of the requests that follow, if the brick knows hints.
    #[inline]
    pub(crate) fn set_hint(&mut self, hint: TierHint) {
        if self.knows_hints {
            self.session.set_hint(hint);
        }
    }

    /// Stores an answer until the next reap. A lost session stays lost for all later requests.
    pub(crate) fn push_completion(&mut self, tag: u64, result: Result<SliceReply, SliceError>) {
        if let Err(error @ SliceError::Lost(_)) = &result {
            self.loss_error = Some(error.clone());
        }
        debug_assert!(
            self.completions.len() < MAPPED_DONE_MAX,
            "completions are reaped"
        );
        self.completions.push(SliceCompletion::new(tag, result));
    }

    /// Sends a request to the pool's owner.
    pub(crate) fn ask_owner(&mut self, tag: u64, request: SliceRequest) {
        self.owner_pending += 1;
        let hint = self.session.hint();
        self.owner.submit_hinted(tag, request, hint);
    }

    /// Reads a snapshot from memory, or asks the owner for the read's frames. Returns whether it has read.
    fn read_snapshot(&mut self, tag: u64, snapshot: Epoch, range: (u64, u32)) -> bool {
        if range.1 > SLICE_IO_BYTES_MAX {
            return false;
        }
        let reads = self.snapshot_reads.get_or_insert_default();
        let mapping = self.session.mapping();
        if let Some(data) = reads.read(mapping, &self.handle, snapshot, range) {
            self.push_completion(tag, Ok(SliceReply::Data(data)));
            return true;
        }
        for (question, request) in reads.ask(mapping, snapshot, range) {
            self.owner_pending += 1;
            self.owner.submit(question, request);
        }
        false
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

    /// Makes a transaction on every leg at once, as [`MappedLeg::write_all`] writes.
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
        // The other legs go on without the failed one, as if they had been asked alone.
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

/// The part of a leg that a direct client uses: a session of the leg's pool. Direct clients
/// have no engine, and share pages with each other.
pub trait DirectLeg {
    /// The media of the pool.
    type Media: Media;

    /// The session, and the slice in its pool.
    fn session_and_handle(&self) -> (&Session<Self::Media>, &Handle);

    /// The session and the slice, for requests that change the session.
    fn session_member(&mut self) -> LegSession<'_, Self::Media>;

    /// Prefetches the lines for a coming write of this offset. Other cores may have had them
    /// last.
    #[inline]
    fn prefetch_write(&self, offset: u64) {
        let (session, handle) = self.session_and_handle();
        session.prefetch_write(handle, page_of(offset));
    }

    /// Prefetches the slot for a coming read of this offset.
    #[inline]
    fn prefetch_read(&self, offset: u64) {
        let (session, handle) = self.session_and_handle();
        session.prefetch_read(handle, page_of(offset));
    }

    /// Prefetches the first lines of the page, because the read comes next.
    #[inline]
    fn prefetch_page(&self, offset: u64) {
        let (session, handle) = self.session_and_handle();
        session.prefetch_page(handle, page_of(offset));
    }

    /// How many of `len` bytes from `offset` on fit into one record.
    #[inline]
    fn record_len(&self, offset: u64, len: u64) -> u64 {
        self.session_and_handle().0.record_len_max(offset, len)
    }

    /// Reads bytes. Each page is checked against its checksum.
    ///
    /// # Errors
    /// The errors of the store.
    #[inline]
    fn read_into(&mut self, offset: u64, into: &mut [u8], epoch: Epoch) -> Result<(), SliceError> {
        let LegSession { session, handle } = self.session_member();
        Ok(session.read(&handle, offset, into, epoch)?)
    }

    /// Reads several ranges as of one point in time. False if no consistent read is possible,
    /// now or at all.
    ///
    /// # Errors
    /// The errors of the store.
    fn read_consistent(
        &mut self,
        pieces: &mut [ReadPiece<'_>],
        epoch: Epoch,
    ) -> Result<bool, SliceError> {
        let LegSession { session, handle } = self.session_member();
        Ok(session.read_consistent(&handle, pieces, epoch)?)
    }

    /// Maps several ranges as of one point in time, without a copy. None if no consistent read
    /// is possible, as in [`DirectLeg::read_consistent`].
    ///
    /// # Errors
    /// The errors of the store.
    fn map_consistent(
        &mut self,
        ranges: &[(u64, u64)],
        epoch: Epoch,
    ) -> Result<Option<Box<ConsistentRead<Self::Media>>>, SliceError> {
        let LegSession { session, handle } = self.session_member();
        Ok(session.map_consistent(&handle, ranges, epoch)?)
    }

    /// The maximum of whole pages of one chunk that are written atomically.
    fn atomic_pages_max(&self) -> u64 {
        self.session_and_handle().0.pages_max()
    }
}

fn page_of(offset: u64) -> PageNo {
    PageNo(offset / PAGE_BYTES as u64)
}

/// The stamp of a direct operation. The session's earlier operations are on all legs.
fn op_stamp((epoch, op): (Epoch, u64)) -> Stamp {
    Stamp {
        epoch,
        op,
        open_ops: 0,
    }
}

fn session_members<L: DirectLeg>(legs: &mut [L]) -> ArrayVec<LegSession<'_, L::Media>, LEGS_MAX> {
    legs.iter_mut().map(DirectLeg::session_member).collect()
}

/// Writes bytes through every leg at once, for a direct client under a lease of this epoch. `next` gives
/// the epoch and the number of each record while the lock words of its pages are held.
///
/// # Errors
/// The error of the first leg that failed. Whole pages before the failing one are written.
#[inline]
pub fn overwrite_all<L: DirectLeg>(
    legs: &mut [L],
    offset: u64,
    data: &[u8],
    epoch: Epoch,
    next: impl Fn() -> (Epoch, u64),
) -> Result<(), SliceError> {
    let stamp = || op_stamp(next());
    let written = write_numbered(&mut session_members(legs), offset, data, epoch, stamp);
    written.map_err(|failure| failure.cause.into())
}

/// Changes pages of several ranges through every leg at once, atomically, under a lease of this epoch.
/// `next` gives the epoch and the number while the lock words of all pages are held.
///
/// # Errors
/// The error of the first leg that failed. In that case nothing has changed, unless a slot was
/// found damaged after the commit.
pub fn overwrite_atomically<L: DirectLeg>(
    legs: &mut [L],
    parts: &[TransactionPart],
    epoch: Epoch,
    next: impl Fn() -> (Epoch, u64),
) -> Result<(), SliceError> {
    let stamp = || op_stamp(next());
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

/// The calls that a direct client's process uses.
impl MappedLeg {
    /// The mapping, which all legs of the pool in this process share.
    #[must_use]
    pub fn view(&self) -> &Arc<PoolMapping<MappedMedia>> {
        self.session.mapping()
    }

    /// The free sessions of the pool, and the number of all.
    #[must_use]
    pub fn sessions(&self) -> (u32, u32) {
        let control = self.session.mapping().control();
        (control.free_sessions(), control.session_count())
    }

    /// Adds the descriptors of the connection to the brick.
    pub fn descriptors(&self, into: &mut Vec<RawFd>) {
        into.push(self.owner_link.socket.as_raw_fd());
        self.owner.poll_fds(into);
    }

    /// Adds the descriptors of the pool, which all its legs in this process share.
    pub fn pool_descriptors(&self, into: &mut Vec<RawFd>) {
        let view = self.session.mapping();
        into.push(view.media().file().as_raw_fd());
        into.push(view.control().shared().file().as_raw_fd());
    }
}

/// Waits for the end of the brick. After that no session of the mapping does anything.
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
        // Ends the session and its watcher. It fails only if the brick is gone.
        let _ = shutdown(&self.owner_link.socket, Shutdown::Both);
    }
}

impl Leg for MappedLeg {
    fn submit(&mut self, tag: u64, request: SliceRequest) {
        self.submit_hinted(tag, request, TierHint::None);
    }

    fn submit_hinted(&mut self, tag: u64, request: SliceRequest, hint: TierHint) {
        self.set_hint(hint);
        if let Some(error) = self.loss_error.clone() {
            return self.push_completion(tag, Err(error));
        }
        self.epoch = request.epoch().map_or(self.epoch, |it| it.max(self.epoch));
        if let SliceRequest::ReadVersion {
            snapshot,
            offset,
            len,
        } = request
            && self.read_snapshot(tag, snapshot, (offset, len))
        {
            return;
        }
        match execute(&mut self.session, self.handle, self.epoch, request) {
            ExecuteOutcome::Done(result) => self.push_completion(tag, result),
            ExecuteOutcome::NeedsOwner(request) => self.ask_owner(tag, request),
        }
    }

    fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
        into.append(&mut self.completions);
        if self.owner_pending > 0 {
            let before = into.len();
            self.owner.reap(into);
            self.owner_pending -= (into.len() - before) as u32;
            if let Some(reads) = &mut self.snapshot_reads {
                let mut at = before;
                while let Some(answer) = into.get(at) {
                    match reads.take_answer(answer) {
                        true => drop(into.remove(at)),
                        false => at += 1,
                    }
                }
            }
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
            // No descriptor becomes readable for completions that are ready.
            (false, _) => Some(Instant::now()),
            (true, 0) => None,
            (true, _) => self.owner.deadline(),
        }
    }

    fn as_any(&mut self) -> Option<&mut dyn Any> {
        Some(self)
    }
}
