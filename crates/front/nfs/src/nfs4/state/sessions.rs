//! The table of sessions, their slots and the replies that slots keep.
//!
//! A session reserves the memory of its replies when it is made, so that no slot loses a reply later:
//! a repeated request always finds it. Slots take memory when they are used first.
//!
//! Invariant: the reservations of one client, of one address and of all sessions are within a limit each.
//! A new session gets a part of the memory that is left below each limit, so that its slots get fewer
//! long before a session is refused.

use super::StateError;
use super::ids::{ClientId, SessionId};
use super::limits::{
    CACHED_BYTES_MAX, CACHED_BYTES_PER_ADDRESS_MAX, CACHED_BYTES_PER_CLIENT_MAX,
    CACHED_REPLY_BYTES_MAX, CACHED_SHARE, CACHED_SHARE_OF_ADDRESS, CACHED_SHARE_OF_CLIENT,
    SLOTS_MAX, SMALL_REPLY_BYTES,
};
use super::requests::{ChannelAttributes, SlotUse};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;

/// The last request of a slot.
#[derive(Debug, Default)]
pub(super) enum SlotState {
    /// No request has used the slot.
    #[default]
    Unused,
    Running,
    Replied(Arc<[u8]>),
    /// The reply was not kept.
    NotKept,
}

#[derive(Debug, Default)]
struct Slot {
    sequence: u32,
    fingerprint: u64,
    state: SlotState,
}

/// The meaning of a request's sequence number in its slot.
#[derive(Debug)]
pub(super) enum SlotStep {
    New,
    Replay(Arc<[u8]>),
}

/// A session.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) client: ClientId,
    pub(super) fore: ChannelAttributes,
    /// The address that reserves the memory.
    address: IpAddr,
    reserved_bytes: usize,
    slots: Vec<Slot>,
    /// It takes no further requests.
    is_closed: bool,
}

impl Session {
    /// The rules of sequence numbers (RFC 8881 section 2.10.6.1).
    pub(super) fn step(
        &self,
        slot: u32,
        sequence: u32,
        fingerprint: u64,
    ) -> Result<SlotStep, StateError> {
        let unused = Slot::default();
        let slot = self.slots.get(slot as usize).unwrap_or(&unused);
        let is_running = matches!(slot.state, SlotState::Running);
        if sequence == slot.sequence.wrapping_add(1) && !is_running {
            return Ok(SlotStep::New);
        }
        if sequence != slot.sequence {
            return Err(StateError::SeqMisordered);
        }
        match &slot.state {
            SlotState::Unused => Err(StateError::SeqMisordered),
            _ if slot.fingerprint != fingerprint => Err(StateError::SeqFalseRetry),
            SlotState::Running => Err(StateError::Delay),
            SlotState::Replied(reply) => Ok(SlotStep::Replay(reply.clone())),
            SlotState::NotKept => Err(StateError::RetryUncachedRep),
        }
    }

    /// Requests in progress.
    pub(super) fn running(&self) -> usize {
        let running = |it: &&Slot| matches!(it.state, SlotState::Running);
        self.slots.iter().filter(running).count()
    }

    fn kept_bytes(&self) -> usize {
        self.slots.iter().map(|it| kept_bytes(&it.state)).sum()
    }
}

fn kept_bytes(state: &SlotState) -> usize {
    match state {
        SlotState::Replied(reply) => reply.len(),
        SlotState::Unused | SlotState::Running | SlotState::NotKept => 0,
    }
}

/// All sessions.
#[derive(Debug, Default)]
pub(super) struct SessionTable {
    sessions: HashMap<SessionId, Session>,
    next_number: u64,
    /// The keys of session ids. A client that guesses an id could end the session of another client.
    keys: RandomState,
    reserved_bytes: usize,
    /// The part of each address.
    reserved_by_address: HashMap<IpAddr, usize>,
    kept_bytes: usize,
}

/// The slots that a new session may have: a part of those that are left, and one at least if any is left.
fn slot_share(bytes_max: usize, reserved_bytes: usize, slot_bytes: usize, share: usize) -> usize {
    let left = bytes_max.saturating_sub(reserved_bytes) / slot_bytes;
    (left / share).max(1).min(left)
}

impl SessionTable {
    pub(super) fn len(&self) -> usize {
        self.sessions.len()
    }

    pub(super) fn reserved_bytes(&self) -> usize {
        self.reserved_bytes
    }

    pub(super) fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }

    /// Whether less than a quarter of the memory for replies is left.
    pub(super) fn is_short_of_memory(&self) -> bool {
        self.reserved_bytes > CACHED_BYTES_MAX / 4 * 3
    }

    pub(super) fn get(&self, id: SessionId) -> Result<&Session, StateError> {
        let session = self.sessions.get(&id).filter(|it| !it.is_closed);
        session.ok_or(StateError::BadSession)
    }

    /// The session takes no further requests. Its requests in progress go on.
    pub(super) fn close(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.is_closed = true;
        }
    }

    /// The slots and the bytes of each kept reply that a new session gets, for a client with these sessions.
    ///
    /// # Errors
    /// If there is no memory for any.
    pub(super) fn negotiate(
        &self,
        asked: &ChannelAttributes,
        of_client: &[SessionId],
        address: IpAddr,
    ) -> Result<(u32, u32), StateError> {
        let reply_bytes = asked.cached_reply_bytes_max.min(CACHED_REPLY_BYTES_MAX);
        let slot_bytes = (reply_bytes as usize).max(SMALL_REPLY_BYTES);
        let sessions = of_client.iter().filter_map(|it| self.sessions.get(it));
        let by_client = sessions.map(|it| it.reserved_bytes).sum();
        let address = address.to_canonical();
        let by_address = self.reserved_by_address.get(&address).copied();
        let bounds = [
            (CACHED_BYTES_MAX, self.reserved_bytes, CACHED_SHARE),
            (
                CACHED_BYTES_PER_ADDRESS_MAX,
                by_address.unwrap_or(0),
                CACHED_SHARE_OF_ADDRESS,
            ),
            (
                CACHED_BYTES_PER_CLIENT_MAX,
                by_client,
                CACHED_SHARE_OF_CLIENT,
            ),
        ];
        let shares = bounds.map(|(max, reserved, share)| {
            let slots = slot_share(max, reserved, slot_bytes, share);
            u32::try_from(slots).unwrap_or(SLOTS_MAX)
        });
        let most = asked.slots.min(SLOTS_MAX);
        match shares.into_iter().fold(most, u32::min) {
            0 => Err(StateError::NoSpc),
            slots => Ok((slots, reply_bytes)),
        }
    }

    pub(super) fn insert(
        &mut self,
        client: ClientId,
        fore: ChannelAttributes,
        address: IpAddr,
    ) -> SessionId {
        let id = loop {
            self.next_number += 1;
            let id = SessionId::new(client, self.keys.hash_one(self.next_number));
            if !self.sessions.contains_key(&id) {
                break id;
            }
        };
        let slot_bytes = (fore.cached_reply_bytes_max as usize).max(SMALL_REPLY_BYTES);
        let reserved_bytes = fore.slots as usize * slot_bytes;
        let address = address.to_canonical();
        self.reserved_bytes += reserved_bytes;
        *self.reserved_by_address.entry(address).or_default() += reserved_bytes;
        let session = Session {
            client,
            fore,
            address,
            reserved_bytes,
            slots: Vec::new(),
            is_closed: false,
        };
        self.sessions.insert(id, session);
        id
    }

    /// Removes a session: its client, and its requests in progress.
    pub(super) fn remove(&mut self, id: SessionId) -> Option<(ClientId, usize)> {
        let session = self.sessions.remove(&id)?;
        self.reserved_bytes -= session.reserved_bytes;
        if let Entry::Occupied(mut by_address) = self.reserved_by_address.entry(session.address) {
            *by_address.get_mut() -= session.reserved_bytes;
            if *by_address.get() == 0 {
                by_address.remove();
            }
        }
        self.kept_bytes -= session.kept_bytes();
        Some((session.client, session.running()))
    }

    /// A new request takes a slot.
    pub(super) fn start(&mut self, id: SessionId, slot: u32, sequence: u32, fingerprint: u64) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let index = slot as usize;
        if session.slots.len() <= index {
            session.slots.resize_with(index + 1, Slot::default);
        }
        if let Some(slot) = session.slots.get_mut(index) {
            self.kept_bytes -= kept_bytes(&slot.state);
            *slot = Slot {
                sequence,
                fingerprint,
                state: SlotState::Running,
            };
        }
    }

    /// The request of a slot has ended: its client, none if the session is gone.
    pub(super) fn finish(&mut self, used: &SlotUse, reply: Option<&[u8]>) -> Option<ClientId> {
        let session = self.sessions.get_mut(&used.session)?;
        let bytes_max = if used.is_cached {
            session.fore.cached_reply_bytes_max as usize
        } else {
            0
        };
        let bytes_max = bytes_max.max(SMALL_REPLY_BYTES);
        let slot = session.slots.get_mut(used.slot as usize)?;
        slot.state = match reply {
            Some(reply) if reply.len() <= bytes_max => SlotState::Replied(reply.into()),
            _ => SlotState::NotKept,
        };
        self.kept_bytes += kept_bytes(&slot.state);
        Some(session.client)
    }
}
