//! Checks which legs served reads: no stale leg is ever read.
//!
//! A client's channels use the layout of one epoch, as the manager made it. For every sector of a
//! successful read there must be an answer of some leg that
//! - holds the bytes of the read there, and came after the read was submitted;
//! - is of a slice that this layout calls in-sync, and that had been in-sync since before the
//!   request to the leg;
//! - came over a connection that was made after the slice was last stale.
//!
//! Until channels use a layout, no write is acknowledged without the legs that the layout leaves
//! out, so those legs may be read until then.

use crate::checker::{SECTOR, value_of};
use pagemesh_base::layout::{Layout, LegState, SliceId};
use pagemesh_base::poison::lock;
use pagemesh_base::slice::{
    Leg, SliceCompletion, SliceError, SliceReply, SliceRequest, TransactionPart,
};
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Counts and orders the events of a client.
type EventTime = u64;

/// A read that a leg answered.
struct ServedRead {
    slice: SliceId,
    connected_at: EventTime,
    submitted_at: EventTime,
    answered_at: EventTime,
    /// Whether the layout of that time allowed the read.
    was_allowed: bool,
    offset: u64,
    data: Vec<u8>,
}

/// The state of a slice in the layouts that the client used.
#[derive(Clone, Copy, Default)]
struct SliceState {
    in_sync_since: Option<EventTime>,
    is_stale: bool,
    /// When the slice last became stale.
    last_stale_at: EventTime,
}

#[derive(Default)]
struct OracleState {
    now: EventTime,
    epoch: u32,
    layout: Option<Layout>,
    slice_states: BTreeMap<SliceId, SliceState>,
    served_reads: Vec<ServedRead>,
    /// The first value that this client writes.
    first_value: u64,
    has_copied: bool,
    transactions_recovered: u64,
}

impl OracleState {
    fn tick(&mut self) -> EventTime {
        self.now += 1;
        self.now
    }

    /// Whether a leg's answer is allowed. The layout may have been in force at the
    /// answer, or at the request's end: another part of the request may have taken longer.
    fn is_allowed(&self, served: &ServedRead, begun: EventTime) -> bool {
        served.answered_at > begun
            && (served.was_allowed
                || self.may_serve(served.slice, served.connected_at, served.submitted_at))
    }

    fn may_serve(&self, slice: SliceId, connected: EventTime, asked: EventTime) -> bool {
        let standing = self.slice_states.get(&slice).copied().unwrap_or_default();
        let since = standing.in_sync_since;
        connected >= standing.last_stale_at && since.is_some_and(|since| asked >= since)
    }
}

/// The requests to one client's legs, and their answers.
#[derive(Clone, Default)]
pub(crate) struct ReadOracle(Arc<Mutex<OracleState>>);

impl ReadOracle {
    /// Records that a read is submitted.
    pub(crate) fn begin_read(&self) -> EventTime {
        lock(&self.0).tick()
    }

    /// Whether the oracle already has the layout that the channels use.
    pub(crate) fn has_layout(&self, epoch: u32) -> bool {
        lock(&self.0).epoch == epoch
    }

    /// Records that channels use this layout from now on.
    pub(crate) fn set_layout(&self, epoch: u32, layout: Layout) {
        let mut seen = lock(&self.0);
        let now = seen.tick();
        for leg in layout.columns().flat_map(|column| &column.legs) {
            let standing = seen.slice_states.entry(leg.slice).or_default();
            let is_stale = matches!(leg.state, LegState::Stale | LegState::AsyncReplica);
            if is_stale && !standing.is_stale {
                standing.last_stale_at = now;
            }
            standing.is_stale = is_stale;
            standing.in_sync_since = match leg.state {
                LegState::InSync => standing.in_sync_since.or(Some(now)),
                _ => None,
            };
        }
        (seen.epoch, seen.layout) = (epoch, Some(layout));
    }

    /// The oracle of a client that writes values from `first_value` on.
    pub(crate) fn new(first_value: u64) -> ReadOracle {
        let seen = OracleState {
            first_value,
            ..OracleState::default()
        };
        ReadOracle(Arc::new(Mutex::new(seen)))
    }

    /// Number of times that a leg got a transaction of an older client, or its rollback.
    pub(crate) fn transactions_recovered(&self) -> u64 {
        lock(&self.0).transactions_recovered
    }

    /// Whether a leg got a write of an older client.
    pub(crate) fn has_copied(&self) -> bool {
        lock(&self.0).has_copied
    }

    /// Forgets the answers before this time: no read needs them.
    pub(crate) fn discard_before(&self, before: EventTime) {
        let mut seen = lock(&self.0);
        seen.served_reads
            .retain(|served| served.answered_at > before);
    }

    /// Checks a read of these bytes at a byte offset of the volume.
    pub(crate) fn check_read(
        &self,
        begun: EventTime,
        from: u64,
        data: &[u8],
    ) -> Result<(), String> {
        let seen = lock(&self.0);
        let layout = seen.layout.as_ref().ok_or("a read without a layout")?;
        for (number, sector) in (0..).zip(data.chunks(SECTOR as usize)) {
            let at = from + number * SECTOR;
            let extents = layout.map(at, SECTOR);
            let place = extents.first().ok_or("a read beyond the volume")?;
            let legs = &layout.segments[place.segment].columns[place.column].legs;
            let gives = |served: &&ServedRead| {
                let start = place.offset.checked_sub(served.offset);
                let held = start.and_then(|start| served.data.get(start as usize..));
                legs.iter().any(|leg| leg.slice == served.slice)
                    && held.is_some_and(|held| held.starts_with(sector))
            };
            let mut given = seen.served_reads.iter().filter(gives);
            if !given.any(|served| seen.is_allowed(served, begun)) {
                let epoch = seen.epoch;
                let at = at / SECTOR;
                return Err(format!(
                    "a stale leg was read: no leg that is in-sync in the layout of epoch {epoch} \
                     returned the bytes of the read in sector {at}"
                ));
            }
        }
        Ok(())
    }

    /// Wraps a leg so that the oracle sees its answers.
    pub(crate) fn observe(&self, slice: SliceId, leg: impl Leg + 'static) -> Box<dyn Leg> {
        Box::new(ObservedLeg {
            oracle: self.clone(),
            slice,
            connected_at: lock(&self.0).tick(),
            pending_reads: BTreeMap::new(),
            inner: leg,
        })
    }
}

/// Whether the request copies an older client's write from one leg to another.
fn copies_older_write(request: &SliceRequest, first_value: u64) -> bool {
    let is_old = |data: &[u8]| {
        let first = data.get(..SECTOR as usize).map(value_of);
        matches!(first, Some(Ok(value)) if (1..first_value).contains(&value))
    };
    match request {
        SliceRequest::Write { data, .. } | SliceRequest::Copy { data, .. } => is_old(data),
        SliceRequest::Transact { parts, .. } => parts.iter().any(|part| match part {
            TransactionPart::Write { data, .. } => is_old(data),
            TransactionPart::Clear { .. } => false,
        }),
        _ => false,
    }
}

/// Whether the request has more than one run of pages: a single write has one.
fn has_gaps(request: &SliceRequest) -> bool {
    let SliceRequest::Transact { parts, .. } = request.without_flush() else {
        return false;
    };
    let first = parts.iter().map(TransactionPart::offset).min();
    let last = parts.iter().map(|part| part.offset() + part.len()).max();
    let bytes: u64 = parts.iter().map(TransactionPart::len).sum();
    first
        .zip(last)
        .is_some_and(|(first, last)| last - first > bytes)
}

struct ObservedLeg<L> {
    oracle: ReadOracle,
    slice: SliceId,
    connected_at: EventTime,
    /// Reads in progress, by tag: the time and the byte offset of the request.
    pending_reads: BTreeMap<u64, (EventTime, u64)>,
    inner: L,
}

impl<L: Leg> Leg for ObservedLeg<L> {
    fn submit(&mut self, tag: u64, request: SliceRequest) {
        if let SliceRequest::Read { offset, .. } = request {
            let now = lock(&self.oracle.0).tick();
            self.pending_reads.insert(tag, (now, offset));
        }
        let mut seen = lock(&self.oracle.0);
        if copies_older_write(&request, seen.first_value) {
            seen.has_copied = true;
            seen.transactions_recovered += u64::from(has_gaps(&request));
        }
        drop(seen);
        self.inner.submit(tag, request);
    }

    fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
        let old = into.len();
        self.inner.reap(into);
        let mut seen = lock(&self.oracle.0);
        for SliceCompletion { tag, result, .. } in &into[old..] {
            let asked = self.pending_reads.remove(tag);
            if let (Some((asked, offset)), Ok(SliceReply::Data(data))) = (asked, result) {
                let answered = seen.tick();
                let was_sound = seen.may_serve(self.slice, self.connected_at, asked);
                seen.served_reads.push(ServedRead {
                    was_allowed: was_sound,
                    slice: self.slice,
                    connected_at: self.connected_at,
                    submitted_at: asked,
                    answered_at: answered,
                    offset,
                    data: data.clone(),
                });
            }
        }
    }

    fn poll_closed(&mut self) -> Option<SliceError> {
        self.inner.poll_closed()
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        self.inner.poll_fds(into);
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
    struct ImmediateLeg(Vec<SliceCompletion>);

    impl Leg for ImmediateLeg {
        fn submit(&mut self, tag: u64, request: SliceRequest) {
            if let SliceRequest::Read { len, .. } = request {
                let result = Ok(SliceReply::Data(vec![7; len as usize]));
                self.0.push(SliceCompletion::new(tag, result));
            }
        }

        fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
            into.append(&mut self.0);
        }

        fn poll_fds(&self, _into: &mut Vec<RawFd>) {}
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
            needs_full_resync: false,
            asynchronous: false,
            empty: false,
        };
        let column = |number, first| Column {
            legs: vec![leg(number, 0, first), leg(number, 1, InSync)],
            lost_since: EpochNumber(u32::from(first == Stale)),
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

    fn read_sector(leg: &mut dyn Leg, offset: u64) {
        let len = SECTOR as u32;
        leg.submit(0, SliceRequest::Read { offset, len });
        leg.reap(&mut vec![]);
    }

    /// Reads the last sector of the first stripe and the first sector of the second.
    fn check(oracle: &ReadOracle, begun: EventTime) -> Result<(), String> {
        oracle.check_read(begun, STRIPE_BYTES - SECTOR, &[7; 2 * SECTOR as usize])
    }

    #[test]
    fn leg_may_become_stale_after_serving_its_part() {
        let oracle = ReadOracle::default();
        oracle.set_layout(1, layout(InSync));
        let mut first = oracle.observe(slice(0, 0), ImmediateLeg::default());
        let mut second = oracle.observe(slice(1, 1), ImmediateLeg::default());
        let begun = oracle.begin_read();
        read_sector(&mut *first, STRIPE_BYTES - SECTOR);
        oracle.set_layout(2, layout(Stale));
        assert!(
            check(&oracle, begun).is_err(),
            "no leg returned the second part"
        );
        read_sector(&mut *second, 0);
        check(&oracle, begun).expect("it was in-sync when it answered");
    }

    #[test]
    fn reads_over_connection_from_before_stale_do_not_count() {
        let oracle = ReadOracle::default();
        oracle.set_layout(1, layout(InSync));
        let mut first = oracle.observe(slice(0, 0), ImmediateLeg::default());
        let mut second = oracle.observe(slice(1, 1), ImmediateLeg::default());
        for state in [Stale, Syncing, InSync] {
            oracle.set_layout(2, layout(state));
            let begun = oracle.begin_read();
            read_sector(&mut *first, STRIPE_BYTES - SECTOR);
            read_sector(&mut *second, 0);
            assert!(
                check(&oracle, begun).is_err(),
                "{state:?}, the old connection"
            );
        }
        let mut first = oracle.observe(slice(0, 0), ImmediateLeg::default());
        let begun = oracle.begin_read();
        read_sector(&mut *first, STRIPE_BYTES - SECTOR);
        read_sector(&mut *second, 0);
        check(&oracle, begun).expect("it is back, over a connection of its own");
    }

    #[test]
    fn answer_from_before_the_read_does_not_count() {
        let oracle = ReadOracle::default();
        oracle.set_layout(1, layout(InSync));
        let mut first = oracle.observe(slice(0, 0), ImmediateLeg::default());
        let mut second = oracle.observe(slice(1, 1), ImmediateLeg::default());
        read_sector(&mut *first, STRIPE_BYTES - SECTOR);
        let begun = oracle.begin_read();
        read_sector(&mut *second, 0);
        assert!(check(&oracle, begun).is_err());
    }
}
