//! Moves the pages and nodes of a draining device to the others, in small steps.
//!
//! A pass goes over all slices, and then over all page tables. Frames of a draining device are not granted, so a pass
//! misses nothing, unless a page cannot be read.

use crate::brick::Brick;
use crate::process::start_time;
use pagemesh_base::ids::{Epoch, FrameNo, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_base::wait::until_ready;
use pagemesh_pmem::{AsyncIo, MapError, Media};
use pagemesh_store::devices::{Device, DeviceState};
use pagemesh_store::drain::NodeCursor;
use pagemesh_store::pool::ObjectError;
use pagemesh_store::pool_mapping::{Handle, StoreError};
use pagemesh_store::recovery::PoolError;
use pagemesh_store::session::Session;
use pagemesh_telemetry::OpKind;
use rustix::event::{PollFd, PollFlags};
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Pages that one step moves, at most. A step reads them all before it counts the unreadable ones.
const STEP_PAGES: usize = 16;
/// Unreadable pages at which a pass stops. With the pages of the last step they are far fewer than the pages at which a
/// disk counts as failed ([`PAGES_MAX`](pagemesh_pmem::unreadable::PAGES_MAX)).
const UNREADABLE_MAX: u64 = 16;
/// Slots that one step looks at.
const SCANNED_PAGES: u64 = 1 << 14;
/// The interval of looks at the requests of clients.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// The longest wait for the device below without a look at the end of the brick.
const POLL_LIMIT: Duration = Duration::from_secs(1);

/// The result of a step.
pub(super) enum DrainStep {
    /// Data was moved, or there was none here.
    Moved {
        /// Bytes moved.
        bytes: u64,
        /// The pause before the next step.
        pause: Duration,
    },
    /// A pass has ended, and this keeps data on the device.
    Blocked(String),
    /// A pass has ended, and no data should be left.
    Empty,
}

/// A pass over the slices of a pool.
pub(super) struct Mover<M: Media> {
    brick: Arc<Brick<M>>,
    device: Uuid,
    session: Session<M>,
    io: Option<Box<dyn AsyncIo>>,
    last_tag: u64,
    slices: std::vec::IntoIter<SliceId>,
    /// The slice, its pages, and the next page to look at.
    at: Option<SlicePages>,
    nodes: NodeCursor,
    damaged: u64,
    /// Requests of clients at the last look, and whether there were some since the one before.
    requests: u64,
    is_busy: bool,
    looked_at: Instant,
}

struct SlicePages {
    handle: Handle,
    pages: u64,
    next: u64,
}

impl<M: Media + Send + Sync + 'static> Mover<M> {
    /// Opens a session, and begins a pass over the data of a device.
    pub(super) fn new(brick: &Arc<Brick<M>>, device: Uuid) -> Result<Mover<M>, ObjectError> {
        let io = brick.mapping().media().async_io();
        let io = io.map_err(PoolError::from)?;
        let pid = std::process::id();
        let mut pool = brick.pool();
        let number = pool.open_session(pid, start_time(pid).unwrap_or(0))?;
        let slices: Vec<SliceId> = pool.list_movable().map(|object| object.slice).collect();
        drop(pool);
        Ok(Mover {
            session: brick.session(number),
            brick: brick.clone(),
            device,
            io,
            last_tag: 0,
            slices: slices.into_iter(),
            at: None,
            nodes: NodeCursor::default(),
            damaged: 0,
            requests: 0,
            is_busy: true,
            looked_at: Instant::now(),
        })
    }

    /// The device that the pass empties.
    pub(super) fn device(&self) -> Uuid {
        self.device
    }

    /// Moves some pages or nodes.
    ///
    /// # Errors
    /// When the pool lacks room, or fails. A new pass may succeed later.
    pub(super) fn step(&mut self, device: &Device) -> Result<DrainStep, ObjectError> {
        let is_failed = device.state == DeviceState::Failed;
        if self.damaged >= UNREADABLE_MAX && !is_failed {
            return Ok(DrainStep::Blocked(format!(
                "at least {} pages of it cannot be read, and the drain reads no more of them, because the disk would fail; \
                 let a scrub of their volumes repair them from another copy, or delete the volumes",
                self.damaged
            )));
        }
        if self.at.is_none() {
            let Some(slice) = self.slices.next() else {
                return self.step_nodes();
            };
            self.at = self.open_slice(slice);
            return Ok(self.moved(0));
        }
        match self.move_some(device) {
            Ok(pages) => Ok(self.moved(pages * PAGE_BYTES as u64)),
            // The slice was deleted.
            Err(ObjectError::Store(StoreError::NoSuchObject)) => {
                self.at = None;
                Ok(self.moved(0))
            }
            Err(cause) => Err(cause),
        }
    }

    fn open_slice(&self, slice: SliceId) -> Option<SlicePages> {
        let pool = self.brick.pool();
        // A slice may have been deleted since the pass began.
        let (size_bytes, handle) = pool.movable_handle(slice).ok()?;
        Some(SlicePages {
            handle,
            pages: size_bytes.div_ceil(PAGE_BYTES as u64),
            next: 0,
        })
    }

    /// Looks at the next pages of the slice, and moves those on the device. Returns their number.
    fn move_some(&mut self, device: &Device) -> Result<u64, ObjectError> {
        let Some(SlicePages {
            handle,
            pages,
            next,
        }) = self.at
        else {
            return Ok(0);
        };
        let frames = device.frames();
        let end = pages.min(next + SCANNED_PAGES);
        let mut found: Vec<(u64, usize)> = Vec::new();
        let looked_to =
            self.session
                .visit_slots(&handle, next..end, Epoch(u32::MAX), |page, _, slot| {
                    let frame = slot.and_then(|slot| slot.frame());
                    if let Some(frame) = frame.filter(|frame| frames.contains(&frame.0)) {
                        found.push((page.0, frame.0 as usize * PAGE_BYTES));
                    }
                    found.len() < STEP_PAGES
                })?;
        self.load(found.iter().map(|(_, place)| *place))?;
        let mut moved = 0;
        let mut at = next;
        for &(page, _) in &found {
            // An earlier move may have included it.
            if page < at {
                continue;
            }
            at = page;
            let range = page..found.last().map_or(page, |last| last.0) + 1;
            loop {
                let is_leaving = |frame: FrameNo| frames.contains(&frame.0);
                let step = self
                    .session
                    .move_pages(&handle, at..range.end, is_leaving)?;
                moved += step.moved;
                self.damaged += step.damaged;
                let PageNo(reached) = step.next;
                // Without progress the owner has recalled the grants, and the session gets new ones.
                if reached > at {
                    at = reached;
                    break;
                }
            }
        }
        let next = match found.last() {
            Some(last) if found.len() == STEP_PAGES => last.0 + 1,
            _ => looked_to.max(end),
        };
        self.at = (next < pages).then_some(SlicePages {
            handle,
            pages,
            next,
        });
        Ok(moved)
    }

    /// Loads pages into memory, and waits until the medium takes changes.
    fn load(&mut self, places: impl Iterator<Item = usize>) -> Result<(), ObjectError> {
        let media = self.brick.mapping().media().clone();
        let Some(io) = &mut self.io else {
            return Ok(());
        };
        let missing: Vec<usize> = places.filter(|&at| !media.is_cached(at)).collect();
        self.last_tag += 1;
        if !missing.is_empty() {
            io.load(self.last_tag, &missing);
            wait_for(io.as_mut(), self.last_tag)?;
        }
        if !media.has_room() {
            self.last_tag += 1;
            io.wait_for_room(self.last_tag);
            wait_for(io.as_mut(), self.last_tag)?;
        }
        Ok(())
    }

    /// Moves nodes, after the pages. At the end of all tables the pass has ended.
    fn step_nodes(&mut self) -> Result<DrainStep, ObjectError> {
        let from = self.nodes;
        let next = self.brick.retry_while_stuck(|pool| pool.move_nodes(from))?;
        if let Some(next) = next {
            self.nodes = next;
            return Ok(self.moved(0));
        }
        Ok(match self.damaged {
            0 => DrainStep::Empty,
            damaged => DrainStep::Blocked(format!(
                "{damaged} pages of it cannot be read; let a scrub of their volumes repair them from another copy, or delete the volumes"
            )),
        })
    }

    /// The result of a step, with the pause that keeps to the rate.
    fn moved(&mut self, bytes: u64) -> DrainStep {
        if self.looked_at.elapsed() >= LOOK_INTERVAL {
            let totals = self.brick.meters().totals();
            let kinds = [OpKind::Read, OpKind::Write, OpKind::Flush];
            let requests = kinds.map(|kind| totals.of(kind).ops).iter().sum();
            self.is_busy = requests != self.requests;
            self.requests = requests;
            self.looked_at = Instant::now();
        }
        let bytes_per_s = self.brick.drain_rate(self.is_busy);
        DrainStep::Moved {
            bytes,
            pause: Duration::from_micros(bytes * 1_000_000 / bytes_per_s),
        }
    }
}

impl<M: Media> Drop for Mover<M> {
    fn drop(&mut self) {
        self.brick.close_session(self.session.number());
    }
}

/// Waits for a request to the device below.
fn wait_for(io: &mut dyn AsyncIo, tag: u64) -> Result<(), PoolError> {
    let mut ended: Vec<(u64, Result<(), MapError>)> = Vec::new();
    io.submit();
    loop {
        io.poll(&mut ended);
        if let Some((_, result)) = ended.drain(..).find(|(ended, _)| *ended == tag) {
            return Ok(result?);
        }
        let mut fds = Vec::new();
        io.poll_fds(&mut fds);
        let mut fds: Vec<PollFd<'_>> = fds
            .iter()
            .map(|fd| PollFd::new(fd, PollFlags::IN))
            .collect();
        if let Err(cause) = until_ready(&mut fds, Some(Instant::now() + POLL_LIMIT)) {
            tracing::warn!(%cause, "cannot wait for the disk");
            std::thread::sleep(POLL_LIMIT);
        }
    }
}
