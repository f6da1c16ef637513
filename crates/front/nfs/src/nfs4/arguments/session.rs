//! Clients and sessions.

use crate::limits::{
    CALLBACK_SECURITY_MAX, MACHINE_NAME_BYTES_MAX, OWNER_BYTES_MAX, SECURITY_OIDS_MAX,
};
use crate::nfs4::bitmap::Bitmap;
use crate::rpc::Groups;
use crate::xdr::{Decode, Encode, Reader, Writer, XdrError, wire_enum};

/// The id of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; SessionId::BYTES]);

impl SessionId {
    /// Bytes on the wire.
    pub const BYTES: usize = 16;
}

impl Decode<'_> for SessionId {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        reader.fixed().copied().map(Self)
    }
}

impl Encode for SessionId {
    fn encode(&self, writer: &mut Writer) {
        writer.fixed(&self.0);
    }
}

wire_enum! {
    /// The protection of state (`state_protect_how4`).
    pub enum Protection, "protection of state" {
        /// None: callers are trusted.
        None = 0,
        /// By the credential of the machine.
        MachineCredential = 1,
        /// By a shared secret.
        Ssv = 2,
    }
}

/// Skips the arguments of a protection.
fn protection(reader: &mut Reader<'_>) -> Result<Protection, XdrError> {
    let kind = Protection::decode(reader)?;
    if kind != Protection::None {
        Bitmap::decode(reader)?;
        Bitmap::decode(reader)?;
    }
    if kind == Protection::Ssv {
        for what in ["hash algorithms", "encryption algorithms"] {
            for _ in 0..reader.length(what, SECURITY_OIDS_MAX)? {
                reader.opaque("algorithm", OWNER_BYTES_MAX)?;
            }
        }
        reader.u32()?;
        reader.u32()?;
    }
    Ok(kind)
}

/// The arguments of EXCHANGE_ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangeId<'a> {
    /// Differs after each restart of the client.
    pub verifier: &'a [u8; 8],
    /// The name of the client.
    pub owner: &'a [u8],
    /// Flags (`EXCHGID4_FLAG_*`).
    pub flags: u32,
    /// The protection of state.
    pub protection: Protection,
}

impl<'a> Decode<'a> for ExchangeId<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        let verifier = reader.fixed()?;
        let owner = reader.opaque("owner of a client", OWNER_BYTES_MAX)?;
        let flags = reader.u32()?;
        let protection = protection(reader)?;
        for _ in 0..reader.length("implementations of a client", 1)? {
            reader.opaque("domain of an implementation", OWNER_BYTES_MAX)?;
            reader.opaque("name of an implementation", OWNER_BYTES_MAX)?;
            reader.u64()?;
            reader.u32()?;
        }
        Ok(Self {
            verifier,
            owner,
            flags,
            protection,
        })
    }
}

/// The bounds of a channel (`channel_attrs4`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelAttributes {
    /// Bytes of padding before data.
    pub header_padding: u32,
    /// Bytes of a request, with its RPC header.
    pub request_bytes_max: u32,
    /// Bytes of a reply, with its RPC header.
    pub reply_bytes_max: u32,
    /// Bytes of a reply that a slot keeps.
    pub cached_reply_bytes_max: u32,
    /// Operations of a request.
    pub operations_max: u32,
    /// Requests at a time: the slots.
    pub requests_max: u32,
}

impl Decode<'_> for ChannelAttributes {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        let attributes = Self {
            header_padding: reader.u32()?,
            request_bytes_max: reader.u32()?,
            reply_bytes_max: reader.u32()?,
            cached_reply_bytes_max: reader.u32()?,
            operations_max: reader.u32()?,
            requests_max: reader.u32()?,
        };
        for _ in 0..reader.length("RDMA reads", 1)? {
            reader.u32()?;
        }
        Ok(attributes)
    }
}

impl Encode for ChannelAttributes {
    fn encode(&self, writer: &mut Writer) {
        writer.u32(self.header_padding);
        writer.u32(self.request_bytes_max);
        writer.u32(self.reply_bytes_max);
        writer.u32(self.cached_reply_bytes_max);
        writer.u32(self.operations_max);
        writer.u32(self.requests_max);
        writer.length(0);
    }
}

/// Skips the security parameters of callbacks.
fn callback_security(reader: &mut Reader<'_>) -> Result<(), XdrError> {
    for _ in 0..reader.length("security of callbacks", CALLBACK_SECURITY_MAX)? {
        match reader.u32()? {
            0 => {}
            1 => {
                reader.u32()?;
                reader.opaque("machine name", MACHINE_NAME_BYTES_MAX)?;
                reader.u64()?;
                Groups::decode(reader)?;
            }
            6 => {
                reader.u32()?;
                reader.opaque("GSS handle", OWNER_BYTES_MAX)?;
                reader.opaque("GSS handle", OWNER_BYTES_MAX)?;
            }
            value => {
                let what = "security of callbacks";
                return Err(XdrError::Enumeration { what, value });
            }
        }
    }
    Ok(())
}

/// The arguments of CREATE_SESSION.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateSession {
    /// The client, by EXCHANGE_ID.
    pub client: u64,
    /// The number of this request.
    pub sequence: u32,
    /// Flags (`CREATE_SESSION4_FLAG_*`).
    pub flags: u32,
    /// The bounds of requests.
    pub fore: ChannelAttributes,
    /// The bounds of callbacks.
    pub back: ChannelAttributes,
    /// The program of callbacks.
    pub callback_program: u32,
}

impl Decode<'_> for CreateSession {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        let session = Self {
            client: reader.u64()?,
            sequence: reader.u32()?,
            flags: reader.u32()?,
            fore: ChannelAttributes::decode(reader)?,
            back: ChannelAttributes::decode(reader)?,
            callback_program: reader.u32()?,
        };
        callback_security(reader)?;
        Ok(session)
    }
}

/// The arguments of BIND_CONN_TO_SESSION.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindConnection {
    /// The session.
    pub session: SessionId,
    /// The wanted channels (`channel_dir_from_client4`).
    pub direction: u32,
}

impl Decode<'_> for BindConnection {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        let session = SessionId::decode(reader)?;
        let direction = reader.u32()?;
        reader.bool()?;
        Ok(Self { session, direction })
    }
}

/// The arguments of BACKCHANNEL_CTL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackchannelControl {
    /// The program of callbacks.
    pub callback_program: u32,
}

impl Decode<'_> for BackchannelControl {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        let callback_program = reader.u32()?;
        callback_security(reader)?;
        Ok(Self { callback_program })
    }
}

/// The arguments of SEQUENCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceArguments {
    /// The session.
    pub session: SessionId,
    /// The number of the request of the slot.
    pub sequence: u32,
    /// The slot.
    pub slot: u32,
    /// The highest slot with a request of the client.
    pub highest_slot: u32,
    /// Whether the slot must keep the whole reply.
    pub is_cached: bool,
}

impl Decode<'_> for SequenceArguments {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self {
            session: SessionId::decode(reader)?,
            sequence: reader.u32()?,
            slot: reader.u32()?,
            highest_slot: reader.u32()?,
            is_cached: reader.bool()?,
        })
    }
}
