//! Clients and sessions: EXCHANGE_ID, CREATE_SESSION, BIND_CONN_TO_SESSION, SEQUENCE, DESTROY_SESSION,
//! DESTROY_CLIENTID, RECLAIM_COMPLETE.

use super::compound::{ActiveSession, Compound, SlotGuard};
use super::{Done, Fault};
use crate::limits::REPLY_CHECKSUM_BYTES_MAX;
use crate::nfs4::arguments::session::{
    BindConnection, ChannelAttributes, CreateSession, ExchangeId, Protection, SequenceArguments,
    SessionId as WireSessionId,
};
use crate::nfs4::state::{
    self, ChannelDirection, ClientId, CreateSessionArgs, ExchangeIdArgs, Principal, SequenceArgs,
    SequenceOutcome, SessionId, StateProtection, Verifier,
};
use crate::nfs4::status::Status;
use crate::rpc::Credential;
use crate::xdr::Writer;
use siphasher::sip::SipHasher13;
use std::hash::{Hash, Hasher};

/// The implementation that clients see: a domain and a name.
const IMPLEMENTATION: [&[u8]; 2] = [b"pagemesh", b"pagemesh"];
/// The directions of a connection (`channel_dir_from_client4`, `channel_dir_from_server4`).
const DIRECTION_FORE: u32 = 1;
const DIRECTION_BACK: u32 = 2;
const DIRECTION_FORE_OR_BOTH: u32 = 3;
const DIRECTION_BOTH: u32 = 3;
const DIRECTION_BACK_OR_BOTH: u32 = 7;

fn channel(wire: &ChannelAttributes) -> state::ChannelAttributes {
    state::ChannelAttributes {
        header_padding: wire.header_padding,
        request_bytes_max: wire.request_bytes_max,
        reply_bytes_max: wire.reply_bytes_max,
        cached_reply_bytes_max: wire.cached_reply_bytes_max,
        operations_max: wire.operations_max,
        slots: wire.requests_max,
    }
}

fn wire_channel(channel: &state::ChannelAttributes) -> ChannelAttributes {
    ChannelAttributes {
        header_padding: channel.header_padding,
        request_bytes_max: channel.request_bytes_max,
        reply_bytes_max: channel.reply_bytes_max,
        cached_reply_bytes_max: channel.cached_reply_bytes_max,
        operations_max: channel.operations_max,
        requests_max: channel.slots,
    }
}

impl Compound<'_> {
    fn principal(&self) -> Principal {
        match &self.call.credential {
            Credential::None => Principal {
                flavor: 0,
                uid: 0,
                gid: 0,
            },
            Credential::System(system) => Principal {
                flavor: 1,
                uid: system.uid,
                gid: system.gid,
            },
        }
    }

    /// The client of the session.
    pub(super) fn client_id(&self) -> Result<ClientId, Fault> {
        let session = self.session.as_ref();
        session
            .map(|it| it.client)
            .ok_or(Fault::Status(Status::NotInSession))
    }

    pub(super) fn exchange_id(&self, it: &ExchangeId<'_>, out: &mut Writer) -> Done {
        let args = ExchangeIdArgs {
            owner: it.owner,
            verifier: Verifier(*it.verifier),
            principal: self.principal(),
            flags: it.flags,
            protection: match it.protection {
                Protection::None => StateProtection::None,
                Protection::MachineCredential => StateProtection::MachineCredential,
                Protection::Ssv => StateProtection::SecretStateVerifier,
            },
            address: self.peer.address,
        };
        let nfs4 = &self.service.nfs4;
        let reply = nfs4.call(|locked, now| locked.state.exchange_id(&args, now))?;
        out.u64(reply.client.0);
        out.u32(reply.sequence);
        out.u32(reply.flags);
        out.value(&Protection::None);
        out.u64(0);
        out.opaque(nfs4.server_name.as_bytes());
        out.opaque(nfs4.server_name.as_bytes());
        out.length(1);
        IMPLEMENTATION.iter().for_each(|text| out.opaque(text));
        out.u64(0);
        out.u32(0);
        Ok(())
    }

    pub(super) fn create_session(&self, it: &CreateSession, out: &mut Writer) -> Done {
        let args = CreateSessionArgs {
            client: ClientId(it.client),
            sequence: it.sequence,
            flags: it.flags,
            fore: channel(&it.fore),
            back: channel(&it.back),
            principal: self.principal(),
            address: self.peer.address,
            caller: self.session.as_ref().map(|it| it.client),
        };
        let nfs4 = &self.service.nfs4;
        let reply = nfs4.call(|locked, now| locked.state.create_session(&args, now))?;
        out.fixed(&reply.session.0);
        out.u32(reply.sequence);
        out.u32(reply.flags);
        out.value(&wire_channel(&reply.fore));
        out.value(&wire_channel(&reply.back));
        Ok(())
    }

    pub(super) fn bind_connection(&self, it: &BindConnection, out: &mut Writer) -> Done {
        let direction = match it.direction {
            DIRECTION_FORE => ChannelDirection::Fore,
            DIRECTION_BACK => ChannelDirection::Back,
            DIRECTION_FORE_OR_BOTH => ChannelDirection::ForeOrBoth,
            DIRECTION_BACK_OR_BOTH => ChannelDirection::BackOrBoth,
            _ => return Err(Status::BadXdr.into()),
        };
        let session = SessionId(it.session.0);
        let nfs4 = &self.service.nfs4;
        let bound = nfs4.call(|locked, _| locked.state.bind_connection(session, direction))?;
        out.value(&it.session);
        out.u32(match bound {
            ChannelDirection::Fore | ChannelDirection::ForeOrBoth => DIRECTION_FORE,
            ChannelDirection::Back => DIRECTION_BACK,
            ChannelDirection::Both | ChannelDirection::BackOrBoth => DIRECTION_BOTH,
        });
        out.bool(false);
        Ok(())
    }

    /// A hash of the request: its caller, its length and its first bytes. Another caller gets no reply
    /// of a repeated request (RFC 8881, section 2.10.6.1.3.1).
    fn fingerprint(&self) -> u64 {
        let mut hasher = SipHasher13::new();
        self.principal().hash(&mut hasher);
        hasher.write_usize(self.arguments.len());
        let first = self.arguments.len().min(REPLY_CHECKSUM_BYTES_MAX);
        hasher.write(&self.arguments[..first]);
        hasher.finish()
    }

    pub(super) fn sequence(&mut self, it: &SequenceArguments, out: &mut Writer) -> Done {
        let args = SequenceArgs {
            session: SessionId(it.session.0),
            slot: it.slot,
            sequence: it.sequence,
            highest_slot: it.highest_slot,
            is_cached: it.is_cached,
            request_bytes: self.record.len(),
            operations: self.operations as usize,
            fingerprint: self.fingerprint(),
            address: self.peer.address,
        };
        let nfs4 = &self.service.nfs4;
        let grant = match nfs4.call(|locked, now| locked.state.sequence(&args, now))? {
            SequenceOutcome::Replay(reply) => {
                self.replay = Some(reply);
                return Ok(());
            }
            SequenceOutcome::Run(grant) => grant,
        };
        self.session = Some(ActiveSession {
            client: grant.client,
            session: args.session,
            reply_bytes_max: grant.reply_bytes_max as usize,
            cached_bytes_max: it
                .is_cached
                .then_some(grant.cached_reply_bytes_max as usize),
        });
        self.slot = Some(SlotGuard::new(self.service, grant.slot));
        let reply = &grant.reply;
        out.fixed(&reply.session.0);
        out.u32(reply.sequence);
        out.u32(reply.slot);
        out.u32(reply.highest_slot);
        out.u32(reply.target_highest_slot);
        out.u32(reply.status_flags);
        Ok(())
    }

    /// The session of the request itself ends only with its last operation.
    pub(super) fn destroy_session(&self, session: WireSessionId) -> Done {
        let session = SessionId(session.0);
        let own = self.session.as_ref().map(|it| it.session);
        if own == Some(session) && !self.is_last {
            return Err(Status::NotOnlyOperation.into());
        }
        let nfs4 = &self.service.nfs4;
        nfs4.call(|locked, _| locked.state.destroy_session(session, own))?;
        Ok(())
    }

    pub(super) fn destroy_client(&self, client: u64) -> Done {
        let client = ClientId(client);
        let nfs4 = &self.service.nfs4;
        nfs4.call(|locked, _| locked.state.destroy_client(client))?;
        Ok(())
    }

    pub(super) fn reclaim_complete(&self, is_one_file_system: bool) -> Done {
        let client = self.client_id()?;
        if is_one_file_system {
            self.place()?;
            return Ok(());
        }
        let nfs4 = &self.service.nfs4;
        let late = nfs4.call(|locked, now| locked.state.list_late_reclaims(client, now))?;
        // Workers of the file systems write the records. Other clients of this thread do not wait for them.
        if !self.are_listed(&late.exports) {
            if late.must_wait {
                return Err(Status::Delay.into());
            }
            tracing::warn!(
                ?client,
                "an NFS client has completed its reclaims, and a file system does not take the record: a crash before it does loses the client's locks there"
            );
        }
        nfs4.call(|locked, now| locked.state.reclaim_complete(client, false, now))?;
        Ok(())
    }
}
