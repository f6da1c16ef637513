//! The arguments and results of state operations.

use super::ids::{ClientId, FileKey, Principal, SessionId, StateId, Verifier};
use super::locks::{LockKind, LockRange};
use std::net::SocketAddr;
use std::sync::Arc;

/// Flags of EXCHANGE_ID, in arguments and results.
pub mod exchange_flags {
    /// The client handles NFS4ERR_MOVED referrals.
    pub const SUPP_MOVED_REFER: u32 = 1;
    /// The client handles NFS4ERR_MOVED migrations.
    pub const SUPP_MOVED_MIGR: u32 = 2;
    /// The client asks to bind stateids to principals.
    pub const BIND_PRINC_STATEID: u32 = 0x100;
    /// A server without pNFS.
    pub const USE_NON_PNFS: u32 = 0x1_0000;
    /// A metadata server.
    pub const USE_PNFS_MDS: u32 = 0x2_0000;
    /// A data server.
    pub const USE_PNFS_DS: u32 = 0x4_0000;
    /// The client updates its confirmed record.
    pub const UPD_CONFIRMED_REC_A: u32 = 0x4000_0000;
    /// Result: the record is confirmed.
    pub const CONFIRMED_R: u32 = 0x8000_0000;
    /// The flags that a client may send.
    pub const ARGUMENTS: u32 = SUPP_MOVED_REFER
        | SUPP_MOVED_MIGR
        | BIND_PRINC_STATEID
        | USE_NON_PNFS
        | USE_PNFS_MDS
        | USE_PNFS_DS
        | UPD_CONFIRMED_REC_A;
}

/// Flags of CREATE_SESSION.
pub mod session_flags {
    /// The client asks for a reply cache that survives restarts.
    pub const PERSIST: u32 = 1;
    /// The client asks for a backchannel on the connection.
    pub const CONN_BACK_CHAN: u32 = 2;
    /// The client asks for RDMA.
    pub const CONN_RDMA: u32 = 4;
    /// The flags that a client may send.
    pub const ARGUMENTS: u32 = PERSIST | CONN_BACK_CHAN | CONN_RDMA;
}

/// The state protection that a client asks for (state_protect_how4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateProtection {
    /// SP4_NONE.
    None,
    /// SP4_MACH_CRED: needs RPCSEC_GSS, which the server has not.
    MachineCredential,
    /// SP4_SSV.
    SecretStateVerifier,
}

/// The arguments of EXCHANGE_ID.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeIdArgs<'a> {
    /// The client's owner (co_ownerid).
    pub owner: &'a [u8],
    /// The verifier of the client's run.
    pub verifier: Verifier,
    /// The caller.
    pub principal: Principal,
    /// eia_flags.
    pub flags: u32,
    /// The state protection.
    pub protection: StateProtection,
    /// The address of the client, for the operator.
    pub address: SocketAddr,
}

/// The result of EXCHANGE_ID. The server's owner, scope and implementation id are the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangeIdReply {
    /// The client id.
    pub client: ClientId,
    /// The sequence number for the client's next CREATE_SESSION.
    pub sequence: u32,
    /// eir_flags.
    pub flags: u32,
}

/// The attributes of one channel (channel_attrs4) without RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelAttributes {
    /// ca_headerpadsize.
    pub header_padding: u32,
    /// ca_maxrequestsize.
    pub request_bytes_max: u32,
    /// ca_maxresponsesize.
    pub reply_bytes_max: u32,
    /// ca_maxresponsesize_cached.
    pub cached_reply_bytes_max: u32,
    /// ca_maxoperations.
    pub operations_max: u32,
    /// ca_maxrequests: the number of slots.
    pub slots: u32,
}

/// The arguments of CREATE_SESSION.
#[derive(Clone, Copy, Debug)]
pub struct CreateSessionArgs {
    /// The client id.
    pub client: ClientId,
    /// csa_sequence.
    pub sequence: u32,
    /// csa_flags.
    pub flags: u32,
    /// The channel from client to server.
    pub fore: ChannelAttributes,
    /// The channel from server to client.
    pub back: ChannelAttributes,
    /// The caller.
    pub principal: Principal,
    /// The address of the client.
    pub address: SocketAddr,
    /// The client of the session of the COMPOUND; none without SEQUENCE.
    pub caller: Option<ClientId>,
}

/// The result of CREATE_SESSION.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateSessionReply {
    /// The session.
    pub session: SessionId,
    /// csr_sequence: the one of the arguments.
    pub sequence: u32,
    /// csr_flags: none. The server has no callbacks, no persistent reply cache and no RDMA.
    pub flags: u32,
    /// The channel from client to server, as negotiated.
    pub fore: ChannelAttributes,
    /// The channel from server to client, as negotiated.
    pub back: ChannelAttributes,
}

/// The direction of a connection: channel_dir_from_client4 in arguments, channel_dir_from_server4 in
/// results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelDirection {
    /// CDFC4_FORE, CDFS4_FORE.
    Fore,
    /// CDFC4_BACK, CDFS4_BACK.
    Back,
    /// CDFC4_FORE_OR_BOTH in arguments only.
    ForeOrBoth,
    /// CDFC4_BACK_OR_BOTH in arguments only.
    BackOrBoth,
    /// CDFS4_BOTH in results only.
    Both,
}

/// The arguments of SEQUENCE, and the size of its request.
#[derive(Clone, Copy, Debug)]
pub struct SequenceArgs {
    /// The session.
    pub session: SessionId,
    /// The slot.
    pub slot: u32,
    /// The sequence number of the slot.
    pub sequence: u32,
    /// sa_highest_slotid.
    pub highest_slot: u32,
    /// sa_cachethis.
    pub is_cached: bool,
    /// Bytes of the request, as in ca_maxrequestsize.
    pub request_bytes: usize,
    /// Operations of the request, with the SEQUENCE.
    pub operations: usize,
    /// A hash of the request without its RPC header. A repeated request with another hash is
    /// NFS4ERR_SEQ_FALSE_RETRY.
    pub fingerprint: u64,
    /// The address of the client, for the operator.
    pub address: SocketAddr,
}

/// A slot in use. [`super::NfsState::finish`] takes it back: exactly once, on every way.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a slot that is not finished answers NFS4ERR_DELAY for ever"]
pub struct SlotUse {
    pub(super) session: SessionId,
    pub(super) slot: u32,
    pub(super) is_cached: bool,
}

/// A new request may run.
#[derive(Debug, PartialEq, Eq)]
pub struct SequenceGrant {
    /// The client of the session.
    pub client: ClientId,
    /// The slot.
    pub slot: SlotUse,
    /// The result of SEQUENCE.
    pub reply: SequenceReply,
    /// Bytes of the largest reply: NFS4ERR_REP_TOO_BIG.
    pub reply_bytes_max: u32,
    /// Bytes of the largest reply if the client asks to keep it: NFS4ERR_REP_TOO_BIG_TO_CACHE.
    pub cached_reply_bytes_max: u32,
}

/// The result of SEQUENCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceReply {
    /// sr_sessionid.
    pub session: SessionId,
    /// sr_sequenceid.
    pub sequence: u32,
    /// sr_slotid.
    pub slot: u32,
    /// sr_highest_slotid.
    pub highest_slot: u32,
    /// sr_target_highest_slotid.
    pub target_highest_slot: u32,
    /// sr_status_flags.
    pub status_flags: u32,
}

/// The outcome of SEQUENCE.
#[derive(Debug, PartialEq, Eq)]
pub enum SequenceOutcome {
    /// Run the operations after it.
    Run(SequenceGrant),
    /// The request is a repeated one: send the bytes that [`super::NfsState::finish`] got.
    Replay(Arc<[u8]>),
}

/// Share access or deny bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShareBits(pub(super) u8);

impl ShareBits {
    /// No bit: OPEN4_SHARE_DENY_NONE.
    pub const NONE: Self = Self(0);
    /// OPEN4_SHARE_ACCESS_READ, OPEN4_SHARE_DENY_READ.
    pub const READ: Self = Self(1);
    /// OPEN4_SHARE_ACCESS_WRITE, OPEN4_SHARE_DENY_WRITE.
    pub const WRITE: Self = Self(2);
    /// OPEN4_SHARE_ACCESS_BOTH, OPEN4_SHARE_DENY_BOTH.
    pub const BOTH: Self = Self(3);

    /// The bits of the wire, without the flags for delegations; none if other bits are set.
    #[must_use]
    pub fn new(bits: u32) -> Option<Self> {
        u8::try_from(bits).ok().filter(|it| *it <= 3).map(Self)
    }

    /// Whether all bits of `other` are set.
    #[must_use]
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    pub(super) fn overlaps(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    pub(super) fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The arguments of OPEN after the file is found or created.
#[derive(Clone, Copy, Debug)]
pub struct OpenArgs<'a> {
    /// The client.
    pub client: ClientId,
    /// The open owner's name. The client id in open_owner4 means nothing in NFSv4.1.
    pub owner: &'a [u8],
    /// The file.
    pub file: FileKey,
    /// share_access without the flags for delegations: READ, WRITE or BOTH.
    pub access: ShareBits,
    /// share_deny.
    pub deny: ShareBits,
    /// CLAIM_PREVIOUS; false for CLAIM_NULL and CLAIM_FH. Other claims are of delegations.
    pub is_reclaim: bool,
    /// This OPEN has made the file, after [`super::NfsState::check_new_open`].
    pub is_new_file: bool,
}

/// The result of OPEN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenGrant {
    /// The stateid.
    pub stateid: StateId,
    /// No open of the file was there before: the caller keeps the file from being freed until
    /// [`super::StateEvent::FileUnused`].
    pub is_first_of_file: bool,
}

/// An access to data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoAccess {
    /// READ.
    Read,
    /// WRITE, or SETATTR of the size.
    Write,
}

/// The locker of LOCK (locker4).
#[derive(Clone, Copy, Debug)]
pub enum Locker<'a> {
    /// open_to_lock_owner4.
    New {
        /// The stateid of the open.
        open: StateId,
        /// The lock owner's name.
        owner: &'a [u8],
    },
    /// The lock stateid of exist_lock_owner4.
    Existing(StateId),
}

/// The arguments of LOCK.
#[derive(Clone, Copy, Debug)]
pub struct LockArgs<'a> {
    /// The client.
    pub client: ClientId,
    /// The file.
    pub file: FileKey,
    /// The locker.
    pub locker: Locker<'a>,
    /// The kind; the blocking kinds are the same as the others.
    pub kind: LockKind,
    /// The range.
    pub range: LockRange,
    /// reclaim.
    pub is_reclaim: bool,
}

/// A lock that conflicts (LOCK4denied).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockDenied {
    /// The range of the lock.
    pub range: LockRange,
    /// Its kind.
    pub kind: LockKind,
    /// Its client.
    pub client: ClientId,
    /// Its lock owner's name.
    pub owner: Arc<[u8]>,
}

/// The error of LOCK and LOCKT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LockError {
    /// NFS4ERR_DENIED.
    Denied(LockDenied),
    /// Another error.
    State(super::StateError),
}

impl From<super::StateError> for LockError {
    fn from(error: super::StateError) -> Self {
        Self::State(error)
    }
}
