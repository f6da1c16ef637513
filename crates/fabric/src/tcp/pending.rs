//! Requests of a leg that wait for their replies.
//!
//! Invariants: bounded by [`LEG_REQUESTS_MAX`]. A tag on the wire is a slot number and the count of
//! requests so far. Tags rise, so a late or repeated reply never matches another request.

use crate::message::reply::ExpectedLen;
use crate::message::{MalformedMessage, MessageKind};
use pagemesh_base::slice::{LEG_REQUESTS_MAX, SliceReply, SliceRequest};

const _: () = assert!(LEG_REQUESTS_MAX.is_power_of_two());
const SLOT_BITS: u32 = LEG_REQUESTS_MAX.trailing_zeros();

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlightRequest {
    /// The submitter's number.
    pub(super) tag: u64,
    kind: MessageKind,
    is_durable: bool,
    expected: ExpectedLen,
}

impl InFlightRequest {
    pub(super) fn new(tag: u64, kind: MessageKind, request: &SliceRequest) -> InFlightRequest {
        InFlightRequest {
            tag,
            kind,
            is_durable: matches!(request, SliceRequest::Durable { .. }),
            expected: ExpectedLen::of(request),
        }
    }

    /// Whether it may wait for a disk or a barrier.
    fn is_slow(&self) -> bool {
        let kinds = matches!(
            self.kind,
            MessageKind::Flush
                | MessageKind::RaiseEpoch
                | MessageKind::ForgetInFlight
                | MessageKind::PrepareSnapshot
        );
        kinds || self.is_durable
    }

    /// Whether a reply has the requested number of bytes or entries.
    pub(super) fn fits(&self, reply: &SliceReply) -> bool {
        self.expected.fits(reply)
    }
}

/// A slot and its request.
#[derive(Default)]
struct PendingSlot {
    /// The tag on the wire of its present or last use.
    tag: u64,
    pending: Option<InFlightRequest>,
}

/// The table of requests in flight.
#[derive(Default)]
pub(super) struct PendingTable {
    slots: Vec<PendingSlot>,
    free: Vec<usize>,
    /// Requests so far. No connection lives long enough to overflow its bits in the tag.
    inserted: u64,
    /// Requests in flight that may take the brick long.
    slow: usize,
}

impl PendingTable {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn is_full(&self) -> bool {
        self.len() == LEG_REQUESTS_MAX
    }

    /// Whether a request in flight may wait for a disk or a barrier; all later requests wait with
    /// it.
    pub(super) fn has_slow(&self) -> bool {
        self.slow > 0
    }

    /// Adds a request; returns its tag on the wire.
    pub(super) fn insert(&mut self, pending: InFlightRequest) -> u64 {
        self.slow += usize::from(pending.is_slow());
        let at = self.free.pop().unwrap_or_else(|| {
            let at = self.slots.len();
            self.slots.push(PendingSlot::default());
            at
        });
        self.inserted += 1;
        let place = &mut self.slots[at];
        place.tag = self.inserted << SLOT_BITS | at as u64;
        place.pending = Some(pending);
        place.tag
    }

    /// Removes the request that a reply answers.
    pub(super) fn remove(
        &mut self,
        tag: u64,
        kind: MessageKind,
    ) -> Result<InFlightRequest, MalformedMessage> {
        let at = tag as usize % LEG_REQUESTS_MAX;
        let place = self.slots.get_mut(at).filter(|place| place.tag == tag);
        let pending = place.and_then(|place| place.pending.take_if(|p| p.kind == kind));
        let pending = pending.ok_or(MalformedMessage::UnexpectedReply(tag))?;
        self.slow -= usize::from(pending.is_slow());
        self.free.push(at);
        Ok(pending)
    }

    /// Removes all requests.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = InFlightRequest> + '_ {
        self.free.clear();
        self.slow = 0;
        self.slots.drain(..).filter_map(|place| place.pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_matches_its_request_only_once() {
        let mut table = PendingTable::default();
        let pending = InFlightRequest::new(7, MessageKind::Flush, &SliceRequest::Flush);
        let first = table.insert(pending);
        assert_eq!(
            table.remove(first, MessageKind::Read).err(),
            Some(MalformedMessage::UnexpectedReply(first))
        );
        assert!(table.has_slow());
        assert_eq!(
            table.remove(first, MessageKind::Flush).map(|p| p.tag),
            Ok(7)
        );
        assert!(!table.has_slow());
        let second = table.insert(pending);
        assert!(first < second, "tags rise");
        assert!(table.remove(first, MessageKind::Flush).is_err());
        assert!(table.remove(u64::MAX, MessageKind::Flush).is_err());
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn every_slot_has_its_own_tag() {
        let mut table = PendingTable::default();
        let pending = |tag| InFlightRequest::new(tag, MessageKind::Flush, &SliceRequest::Flush);
        let tags: Vec<u64> = (0..LEG_REQUESTS_MAX as u64)
            .map(|tag| table.insert(pending(tag)))
            .collect();
        assert!(table.is_full());
        for (own, wire) in tags.into_iter().enumerate().rev() {
            assert_eq!(
                table.remove(wire, MessageKind::Flush).map(|p| p.tag),
                Ok(own as u64)
            );
        }
        assert!(table.is_empty());
    }
}
