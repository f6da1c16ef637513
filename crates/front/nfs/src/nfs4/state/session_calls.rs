//! CREATE_SESSION, DESTROY_SESSION, BIND_CONN_TO_SESSION and SEQUENCE.
//!
//! Invariant: between [`NfsState::sequence`] and [`NfsState::finish`] no other request has the slot,
//! and a request runs once: a repeated one gets the reply, or an error.

use super::clients::Client;
use super::events::RemovalReason;
use super::ids::{ClientId, SessionId};
use super::limits::{
    CHANNEL_BYTES_MIN, LEASE, OPERATIONS_MAX, SESSIONS_PER_CLIENT_MAX, SLOTS_MAX, SLOTS_SHORT,
};
use super::listing::LeaseStatus;
use super::requests::{
    ChannelAttributes, ChannelDirection, CreateSessionArgs, CreateSessionReply, SequenceArgs,
    SequenceGrant, SequenceOutcome, SequenceReply, SlotUse, session_flags,
};
use super::sessions::SlotStep;
use super::{NfsState, StateError};
use crate::limits::RECORD_BYTES_MAX;
use std::time::Instant;

/// Operations of a callback: CB_SEQUENCE and one more.
const BACK_OPERATIONS_MIN: u32 = 2;
/// Bytes of the reply of a lone SEQUENCE, without its RPC header.
const SEQUENCE_REPLY_BYTES: u32 = 56;

/// The bytes of requests and replies, and the operations, that both sides accept.
fn negotiate(
    asked: &ChannelAttributes,
    operations_min: u32,
) -> Result<ChannelAttributes, StateError> {
    let bytes = asked.request_bytes_max.min(asked.reply_bytes_max);
    if bytes < CHANNEL_BYTES_MIN || asked.operations_max < operations_min || asked.slots == 0 {
        return Err(StateError::TooSmall);
    }
    let bytes_max = u32::try_from(RECORD_BYTES_MAX).unwrap_or(u32::MAX);
    Ok(ChannelAttributes {
        header_padding: 0,
        request_bytes_max: asked.request_bytes_max.min(bytes_max),
        reply_bytes_max: asked.reply_bytes_max.min(bytes_max),
        cached_reply_bytes_max: asked.cached_reply_bytes_max.min(bytes_max),
        operations_max: asked.operations_max.min(OPERATIONS_MAX),
        slots: asked.slots.min(SLOTS_MAX),
    })
}

/// A repeated CREATE_SESSION gets its result again. Failed ones do not count, so that the client may
/// send the same number again.
fn check_create_sequence(
    client: &Client,
    sequence: u32,
) -> Result<Option<CreateSessionReply>, StateError> {
    if sequence == client.next_sequence {
        return Ok(None);
    }
    let last = client.last_session.as_ref();
    let replay = last.filter(|it| it.sequence == sequence);
    replay.copied().map(Some).ok_or(StateError::SeqMisordered)
}

impl NfsState {
    /// CREATE_SESSION (RFC 8881 section 18.36). It confirms the client's record, and ends an earlier
    /// one of the same owner with its state.
    ///
    /// # Errors
    /// STALE_CLIENTID, SEQ_MISORDERED, CLID_INUSE, INVAL for unknown flags, TOOSMALL, NOSPC if the
    /// client has too many sessions, or no memory for replies is left to it, its address or the server, and
    /// DELAY while an operator expires it, or while requests of the earlier record run: they may change
    /// files under its locks.
    pub fn create_session(
        &mut self,
        args: &CreateSessionArgs,
        now: Instant,
    ) -> Result<CreateSessionReply, StateError> {
        let client = self.clients.get(args.client)?;
        self.check_not_expiring(&client.owner)?;
        if let Some(reply) = check_create_sequence(client, args.sequence)? {
            return Ok(reply);
        }
        if !client.is_confirmed() && client.principal != args.principal {
            return Err(StateError::ClidInUse);
        }
        if args.flags & !session_flags::ARGUMENTS != 0 {
            return Err(StateError::Inval);
        }
        self.check_earlier_record(client, args.caller)?;
        let mut fore = negotiate(&args.fore, 1)?;
        let back = negotiate(&args.back, BACK_OPERATIONS_MIN)?;
        if client.sessions.len() >= SESSIONS_PER_CLIENT_MAX {
            return Err(StateError::NoSpc);
        }
        let address = args.address.ip();
        (fore.slots, fore.cached_reply_bytes_max) =
            self.sessions
                .negotiate(&args.fore, &client.sessions, address)?;
        self.confirm(args, now);
        let reply = CreateSessionReply {
            session: self.sessions.insert(args.client, fore, address),
            sequence: args.sequence,
            flags: 0,
            fore,
            back,
        };
        let client = self.clients.get_mut(args.client)?;
        client.sessions.push(reply.session);
        client.next_sequence = args.sequence.wrapping_add(1);
        client.last_session = Some(reply);
        client.address = args.address;
        Ok(reply)
    }

    /// Requests of the earlier record, other than the caller's own, keep its state.
    fn check_earlier_record(
        &self,
        client: &Client,
        caller: Option<ClientId>,
    ) -> Result<(), StateError> {
        let confirmed = self.clients.confirmed(&client.owner);
        match confirmed.filter(|it| it.id != client.id) {
            Some(it) if it.running > usize::from(caller == Some(it.id)) => Err(StateError::Delay),
            _ => Ok(()),
        }
    }

    fn confirm(&mut self, args: &CreateSessionArgs, now: Instant) {
        let Ok(client) = self.clients.get(args.client) else {
            return;
        };
        if client.is_confirmed() {
            self.clients.renew(args.client, now);
            return;
        }
        let earlier = self.clients.confirmed(&client.owner).map(|it| it.id);
        if let Some(earlier) = earlier {
            self.remove_client(earlier, RemovalReason::Replaced);
        }
        self.clients.renew(args.client, now);
        self.clients
            .set_status(args.client, LeaseStatus::Active, now + LEASE);
    }

    /// DESTROY_SESSION (RFC 8881 section 18.37). `caller` is the session of the COMPOUND itself.
    ///
    /// # Errors
    /// BADSESSION, and DELAY while other requests of the session run: the client's record must count them.
    pub fn destroy_session(
        &mut self,
        session: SessionId,
        caller: Option<SessionId>,
    ) -> Result<(), StateError> {
        let running = self.sessions.get(session)?.running();
        if running > usize::from(caller == Some(session)) {
            return Err(StateError::Delay);
        }
        let removed = self.sessions.remove(session);
        let (client, running) = removed.ok_or(StateError::BadSession)?;
        if let Ok(client) = self.clients.get_mut(client) {
            client.sessions.retain(|it| *it != session);
            client.running -= running;
        }
        Ok(())
    }

    /// BIND_CONN_TO_SESSION (RFC 8881 section 18.34). All connections may send requests of all
    /// sessions, since the server protects no state. The server sends no callbacks, so that a
    /// backchannel has no effect.
    ///
    /// # Errors
    /// If there is no such session; INVAL for a direction of results.
    pub fn bind_connection(
        &mut self,
        session: SessionId,
        direction: ChannelDirection,
    ) -> Result<ChannelDirection, StateError> {
        self.sessions.get(session)?;
        match direction {
            ChannelDirection::Fore | ChannelDirection::ForeOrBoth => Ok(ChannelDirection::Fore),
            ChannelDirection::Back => Ok(ChannelDirection::Back),
            ChannelDirection::BackOrBoth => Ok(ChannelDirection::Both),
            ChannelDirection::Both => Err(StateError::Inval),
        }
    }

    /// SEQUENCE (RFC 8881 section 18.46). It renews the lease.
    ///
    /// # Errors
    /// BADSESSION, BADSLOT, BAD_HIGH_SLOT, SEQ_MISORDERED, SEQ_FALSE_RETRY, RETRY_UNCACHED_REP,
    /// REQ_TOO_BIG, TOO_MANY_OPS, REP_TOO_BIG_TO_CACHE, and DELAY while the same request runs. The
    /// slot does not change then.
    pub fn sequence(
        &mut self,
        args: &SequenceArgs,
        now: Instant,
    ) -> Result<SequenceOutcome, StateError> {
        let session = self.sessions.get(args.session)?;
        let (fore, client) = (session.fore, session.client);
        if args.slot >= fore.slots {
            return Err(StateError::BadSlot);
        }
        if args.highest_slot >= fore.slots {
            return Err(StateError::BadHighSlot);
        }
        let step = session.step(args.slot, args.sequence, args.fingerprint);
        self.clients.renew(client, now);
        if let SlotStep::Replay(reply) = step? {
            return Ok(SequenceOutcome::Replay(reply));
        }
        if args.request_bytes > fore.request_bytes_max as usize {
            return Err(StateError::ReqTooBig);
        }
        if args.operations > fore.operations_max as usize {
            return Err(StateError::TooManyOps);
        }
        if args.is_cached && fore.cached_reply_bytes_max < SEQUENCE_REPLY_BYTES {
            return Err(StateError::RepTooBigToCache);
        }
        let record = self.clients.get_mut(client)?;
        record.running += 1;
        record.address = args.address;
        self.sessions
            .start(args.session, args.slot, args.sequence, args.fingerprint);
        Ok(SequenceOutcome::Run(SequenceGrant {
            client,
            slot: SlotUse {
                session: args.session,
                slot: args.slot,
                is_cached: args.is_cached,
            },
            reply: self.sequence_reply(args, fore.slots),
            reply_bytes_max: fore.reply_bytes_max,
            cached_reply_bytes_max: fore.cached_reply_bytes_max,
        }))
    }

    /// The result of SEQUENCE. While memory for replies is short, clients are asked to use fewer
    /// slots. No status flag is ever set: an expired client loses its sessions with its state, there
    /// is no backchannel, and no state moves or can be recalled.
    fn sequence_reply(&self, args: &SequenceArgs, slots: u32) -> SequenceReply {
        let target = if self.sessions.is_short_of_memory() {
            slots.min(SLOTS_SHORT)
        } else {
            slots
        };
        SequenceReply {
            session: args.session,
            sequence: args.sequence,
            slot: args.slot,
            highest_slot: slots.saturating_sub(1),
            target_highest_slot: target.saturating_sub(1),
            status_flags: 0,
        }
    }

    /// The request of a slot has ended. `reply` is the whole result of the COMPOUND; none if there is
    /// none, because the request has panicked or the file system is fenced. It renews the lease, or is the
    /// last request of a client that an operator expires.
    pub fn finish(&mut self, slot: SlotUse, reply: Option<&[u8]>, now: Instant) {
        let Some(client) = self.sessions.finish(&slot, reply) else {
            return;
        };
        if let Ok(client) = self.clients.get_mut(client) {
            client.running -= 1;
        }
        self.clients.renew(client, now);
        self.end_expiry(client);
    }
}
