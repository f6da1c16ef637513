//! Where reads were served: no stale leg is ever read.
//!
//! What a client's channels go by is the layout of one epoch, as the manager
//! made it. For every sector of a read that succeeds, some answer must exist
//! that
//! - holds what the read shows there, and came after the read was submitted;
//! - is of a slice that this layout calls in-sync, and that had been so since
//!   before it was asked;
//! - came over a connection that was made after the slice was last stale.
//!
//! Before channels go by a layout, nothing is acknowledged without the legs
//! that it leaves out, so that those may be read until then.

use crate::checker::SECTOR;
use crate::cluster::guard;
use pagemesh_base::layout::{Layout, LegState, SliceId};
use pagemesh_base::slice::{Leg, SliceCompletion, SliceReply, SliceRequest};
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Counts what happens to a client; orders its events.
type Moment = u64;

/// A read that a leg answered.
struct Served {
    slice: SliceId,
    connected: Moment,
    asked: Moment,
    answered: Moment,
    /// Whether the layout of that moment let it be read.
    was_sound: bool,
    offset: u64,
    data: Vec<u8>,
}

/// How a slice stands in the layouts that the client went by.
#[derive(Clone, Copy, Default)]
struct Standing {
    in_sync_since: Option<Moment>,
    is_stale: bool,
    /// When it became stale last.
    left: Moment,
}

#[derive(Default)]
struct Seen {
    now: Moment,
    epoch: u32,
    layout: Option<Layout>,
    standing: BTreeMap<SliceId, Standing>,
    served: Vec<Served>,
}

impl Seen {
    fn tick(&mut self) -> Moment {
        self.now += 1;
        self.now
    }

    /// A read may go by the layout of when it was answered, or of when its
    /// request ended: another part of that may have taken longer.
    fn is_sound(&self, served: &Served, begun: Moment) -> bool {
        served.answered > begun
            && (served.was_sound || self.may_serve(served.slice, served.connected, served.asked))
    }

    fn may_serve(&self, slice: SliceId, connected: Moment, asked: Moment) -> bool {
        let standing = self.standing.get(&slice).copied().unwrap_or_default();
        let since = standing.in_sync_since;
        connected >= standing.left && since.is_some_and(|since| asked >= since)
    }
}

/// What one client's legs were asked and answered.
#[derive(Clone, Default)]
pub(crate) struct Witness(Arc<Mutex<Seen>>);

impl Witness {
    /// A read is submitted.
    pub(crate) fn begin(&self) -> Moment {
        guard(&self.0).tick()
    }

    /// Whether the layout that the channels go by is known already.
    pub(crate) fn knows(&self, epoch: u32) -> bool {
        guard(&self.0).epoch == epoch
    }

    /// From now on channels go by this layout.
    pub(crate) fn adopt(&self, epoch: u32, layout: Layout) {
        let mut seen = guard(&self.0);
        let now = seen.tick();
        let columns = layout.segments.iter().flat_map(|segment| &segment.columns);
        for leg in columns.flat_map(|column| &column.legs) {
            let standing = seen.standing.entry(leg.slice).or_default();
            let is_stale = leg.state == LegState::Stale;
            if is_stale && !standing.is_stale {
                standing.left = now;
            }
            standing.is_stale = is_stale;
            standing.in_sync_since = match leg.state {
                LegState::InSync => standing.in_sync_since.or(Some(now)),
                _ => None,
            };
        }
        (seen.epoch, seen.layout) = (epoch, Some(layout));
    }

    /// Forgets answers from before this moment: no read asks for them.
    pub(crate) fn forget(&self, before: Moment) {
        let mut seen = guard(&self.0);
        seen.served.retain(|served| served.answered > before);
    }

    /// Checks a read of these bytes from a byte of the volume on.
    pub(crate) fn check(&self, begun: Moment, from: u64, data: &[u8]) -> Result<(), String> {
        let seen = guard(&self.0);
        let layout = seen.layout.as_ref().ok_or("a read without a layout")?;
        for (number, sector) in (0..).zip(data.chunks(SECTOR as usize)) {
            let at = from + number * SECTOR;
            let extents = layout.map(at, SECTOR);
            let place = extents.first().ok_or("a read beyond the volume")?;
            let legs = &layout.segments[place.segment].columns[place.column].legs;
            let gives = |served: &&Served| {
                let start = place.offset.checked_sub(served.offset);
                let held = start.and_then(|start| served.data.get(start as usize..));
                legs.iter().any(|leg| leg.slice == served.slice)
                    && held.is_some_and(|held| held.starts_with(sector))
            };
            let mut given = seen.served.iter().filter(gives);
            if !given.any(|served| seen.is_sound(served, begun)) {
                let epoch = seen.epoch;
                let at = at / SECTOR;
                return Err(format!(
                    "a stale leg was read: no leg that is in-sync in the layout of epoch {epoch} \
                     gave what the read shows of sector {at}"
                ));
            }
        }
        Ok(())
    }

    /// A leg that tells what it answers.
    pub(crate) fn watch(&self, slice: SliceId, leg: impl Leg + 'static) -> Box<dyn Leg> {
        Box::new(Watched {
            witness: self.clone(),
            slice,
            connected: guard(&self.0).tick(),
            asked: BTreeMap::new(),
            inner: leg,
        })
    }
}

struct Watched<L> {
    witness: Witness,
    slice: SliceId,
    connected: Moment,
    /// Reads under way, by tag: when they were asked, and from which byte on.
    asked: BTreeMap<u64, (Moment, u64)>,
    inner: L,
}

impl<L: Leg> Leg for Watched<L> {
    fn submit(&mut self, tag: u64, request: SliceRequest) {
        if let SliceRequest::Read { offset, .. } = request {
            let now = guard(&self.witness.0).tick();
            self.asked.insert(tag, (now, offset));
        }
        self.inner.submit(tag, request);
    }

    fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
        let old = into.len();
        self.inner.reap(into);
        let mut seen = guard(&self.witness.0);
        for SliceCompletion { tag, result } in &into[old..] {
            let asked = self.asked.remove(tag);
            if let (Some((asked, offset)), Ok(SliceReply::Data(data))) = (asked, result) {
                let answered = seen.tick();
                let was_sound = seen.may_serve(self.slice, self.connected, asked);
                seen.served.push(Served {
                    was_sound,
                    slice: self.slice,
                    connected: self.connected,
                    asked,
                    answered,
                    offset,
                    data: data.clone(),
                });
            }
        }
    }

    fn wait_on(&self, into: &mut Vec<RawFd>) {
        self.inner.wait_on(into);
    }

    fn deadline(&self) -> Option<Instant> {
        self.inner.deadline()
    }

    fn now(&self) -> Option<Instant> {
        self.inner.now()
    }
}
