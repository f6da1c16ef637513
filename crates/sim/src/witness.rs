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

use crate::checker::{SECTOR, value_of};
use crate::cluster::guard;
use pagemesh_base::layout::{Layout, LegState, SliceId};
use pagemesh_base::slice::{Leg, Part, SliceCompletion, SliceError, SliceReply, SliceRequest};
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
    /// What this client writes is from here on.
    first_value: u64,
    has_copied: bool,
    transactions_settled: u64,
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
        for leg in layout.columns().flat_map(|column| &column.legs) {
            let standing = seen.standing.entry(leg.slice).or_default();
            let is_stale = matches!(leg.state, LegState::Stale | LegState::Following);
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

    /// Of a client that writes values from this one on.
    pub(crate) fn new(first_value: u64) -> Witness {
        let seen = Seen {
            first_value,
            ..Seen::default()
        };
        Witness(Arc::new(Mutex::new(seen)))
    }

    /// How often a leg was given a transaction of an older client, or it was
    /// taken back there.
    pub(crate) fn transactions_settled(&self) -> u64 {
        guard(&self.0).transactions_settled
    }

    /// Whether a leg was given what an older client wrote.
    pub(crate) fn has_copied(&self) -> bool {
        guard(&self.0).has_copied
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

/// Whether this copies what an older client wrote from one leg to another.
fn is_copy(request: &SliceRequest, first_value: u64) -> bool {
    let is_old = |data: &[u8]| {
        let first = data.get(..SECTOR as usize).map(value_of);
        matches!(first, Some(Ok(value)) if (1..first_value).contains(&value))
    };
    match request {
        SliceRequest::Write { data, .. } => is_old(data),
        SliceRequest::Transact { parts, .. } => parts.iter().any(|part| match part {
            Part::Write { data, .. } => is_old(data),
            Part::Clear { .. } => false,
        }),
        _ => false,
    }
}

/// Whether it is more than one run of pages: what one write changed is not.
fn has_gaps(request: &SliceRequest) -> bool {
    let SliceRequest::Transact { parts, .. } = request else {
        return false;
    };
    let first = parts.iter().map(Part::offset).min();
    let last = parts.iter().map(|part| part.offset() + part.len()).max();
    let bytes: u64 = parts.iter().map(Part::len).sum();
    first
        .zip(last)
        .is_some_and(|(first, last)| last - first > bytes)
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
        let mut seen = guard(&self.witness.0);
        if is_copy(&request, seen.first_value) {
            seen.has_copied = true;
            seen.transactions_settled += u64::from(has_gaps(&request));
        }
        drop(seen);
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

    fn ended(&mut self) -> Option<SliceError> {
        self.inner.ended()
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

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_base::layout::{BrickId, Column, EpochNumber, Leg as Placed, STRIPE_BYTES};
    use pagemesh_base::layout::{LegState::*, Segment};
    use uuid::Uuid;

    /// A leg that answers every read at once.
    #[derive(Default)]
    struct Prompt(Vec<SliceCompletion>);

    impl Leg for Prompt {
        fn submit(&mut self, tag: u64, request: SliceRequest) {
            if let SliceRequest::Read { len, .. } = request {
                let result = Ok(SliceReply::Data(vec![7; len as usize]));
                self.0.push(SliceCompletion { tag, result });
            }
        }

        fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
            into.append(&mut self.0);
        }

        fn wait_on(&self, _into: &mut Vec<RawFd>) {}
    }

    const fn slice(column: u128, leg: u128) -> SliceId {
        SliceId(Uuid::from_u128(10 * column + leg))
    }

    /// Two columns of two legs; the first leg of the first column is in this state.
    fn layout(first: LegState) -> Layout {
        let leg = |column, leg, state| Placed {
            brick: BrickId(Uuid::from_u128(leg)),
            slice: slice(column, leg),
            state,
            fresh: false,
            asynchronous: false,
            empty: false,
        };
        let column = |number, first| Column {
            legs: vec![leg(number, 0, first), leg(number, 1, InSync)],
            round: u8::from(first == Stale),
        };
        Layout {
            volume: Uuid::nil(),
            name: "volume".parse().expect("a name"),
            epoch: EpochNumber(1),
            segments: vec![Segment {
                bytes: 2 * STRIPE_BYTES,
                columns: vec![column(0, first), column(1, InSync)],
            }],
        }
    }

    fn ask(leg: &mut dyn Leg, offset: u64) {
        let len = SECTOR as u32;
        leg.submit(0, SliceRequest::Read { offset, len });
        leg.reap(&mut vec![]);
    }

    /// The last sector of the first stripe, and the first of the second.
    fn check(witness: &Witness, begun: Moment) -> Result<(), String> {
        witness.check(begun, STRIPE_BYTES - SECTOR, &[7; 2 * SECTOR as usize])
    }

    #[test]
    fn a_leg_may_leave_after_it_served_its_part_of_a_read() {
        let witness = Witness::default();
        witness.adopt(1, layout(InSync));
        let mut first = witness.watch(slice(0, 0), Prompt::default());
        let mut second = witness.watch(slice(1, 1), Prompt::default());
        let begun = witness.begin();
        ask(&mut *first, STRIPE_BYTES - SECTOR);
        witness.adopt(2, layout(Stale));
        assert!(
            check(&witness, begun).is_err(),
            "nobody gave the second part"
        );
        ask(&mut *second, 0);
        check(&witness, begun).expect("it was in-sync when it answered");
    }

    #[test]
    fn what_a_leg_serves_after_it_left_does_not_count() {
        let witness = Witness::default();
        witness.adopt(1, layout(InSync));
        let mut first = witness.watch(slice(0, 0), Prompt::default());
        let mut second = witness.watch(slice(1, 1), Prompt::default());
        for state in [Stale, Syncing, InSync] {
            witness.adopt(2, layout(state));
            let begun = witness.begin();
            ask(&mut *first, STRIPE_BYTES - SECTOR);
            ask(&mut *second, 0);
            assert!(
                check(&witness, begun).is_err(),
                "{state:?}, the old connection"
            );
        }
        let mut first = witness.watch(slice(0, 0), Prompt::default());
        let begun = witness.begin();
        ask(&mut *first, STRIPE_BYTES - SECTOR);
        ask(&mut *second, 0);
        check(&witness, begun).expect("it is back, over a connection of its own");
    }

    #[test]
    fn an_older_answer_does_not_count() {
        let witness = Witness::default();
        witness.adopt(1, layout(InSync));
        let mut first = witness.watch(slice(0, 0), Prompt::default());
        let mut second = witness.watch(slice(1, 1), Prompt::default());
        ask(&mut *first, STRIPE_BYTES - SECTOR);
        let begun = witness.begin();
        ask(&mut *second, 0);
        assert!(check(&witness, begun).is_err());
    }
}
