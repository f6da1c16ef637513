//! Identities: clients, sessions, stateids, files, principals.

use pagemesh_fs::FileId;

/// The number of a run of the server (its boot verifier). It grows with each start, so that ids of
/// earlier runs are recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Instance(pub u32);

impl Instance {
    /// The number of a new run: the one of the clock, or the next one after the earlier runs if the clock is
    /// behind. Numbers wrap, so that the later one is the nearer one ahead.
    #[must_use]
    pub fn next(clock: u32, earlier: impl IntoIterator<Item = Instance>) -> Self {
        let is_behind = |number: u32, other: u32| other.wrapping_sub(number) <= u32::MAX / 2;
        let earlier = earlier.into_iter().filter(|it| it.0 != 0);
        let number = earlier.fold(clock, |number, Instance(other)| {
            match is_behind(number, other) {
                true => other.wrapping_add(1),
                false => number,
            }
        });
        Self(number.max(1))
    }
}

/// A client id (clientid4): the instance in the upper half, a number that cannot be guessed in the
/// lower one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u64);

impl ClientId {
    pub(super) fn new(instance: Instance, number: u32) -> Self {
        Self(u64::from(instance.0) << 32 | u64::from(number))
    }
}

/// A session id (sessionid4): the client id, and a number that cannot be guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub [u8; 16]);

impl SessionId {
    pub(super) fn new(client: ClientId, number: u64) -> Self {
        let mut bytes = [0; 16];
        let (upper, lower) = bytes.split_at_mut(8);
        upper.copy_from_slice(&client.0.to_be_bytes());
        lower.copy_from_slice(&number.to_be_bytes());
        Self(bytes)
    }
}

/// The identity of a file: the export and the file's identity within its file system. The state
/// compares it and looks no further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileKey {
    /// The number of the export's file system, by the server.
    pub export: u32,
    /// The file.
    pub file: FileId,
}

/// The caller of EXCHANGE_ID and CREATE_SESSION, as far as the rules of client records compare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Principal {
    /// The flavor of the credential: 0 for AUTH_NONE, 1 for AUTH_SYS.
    pub flavor: u32,
    /// The user of AUTH_SYS, else 0.
    pub uid: u32,
    /// The group of AUTH_SYS, else 0.
    pub gid: u32,
}

/// The verifier of a client's run (verifier4). It changes when the client restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Verifier(pub [u8; 8]);

/// The number of an open or lock state. Numbers are not used again within an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateNo(pub(super) u64);

/// The number of an open owner or a lock owner. Numbers are not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct OwnerNo(pub(super) u64);

/// A stateid (stateid4). The `other` bytes are the instance (4) and the state's number (8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateId {
    /// The sequence number; 0 stands for the newest one.
    pub seqid: u32,
    /// The identity of the state.
    pub other: [u8; 12],
}

/// The kinds of stateids (RFC 8881 section 8.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StateIdKind {
    Anonymous,
    ReadBypass,
    Current,
    /// A special form without a meaning, like [`StateId::INVALID`].
    Reserved,
    /// A state of an earlier instance.
    Stale,
    Numbered(StateNo),
}

impl StateId {
    /// The anonymous stateid: all zeros.
    pub const ANONYMOUS: Self = Self::special(0, 0);
    /// The READ bypass stateid: all ones.
    pub const READ_BYPASS: Self = Self::special(u32::MAX, 0xff);
    /// The stateid that stands for the current one of a COMPOUND.
    pub const CURRENT: Self = Self::special(1, 0);
    /// The invalid stateid, which CLOSE returns.
    pub const INVALID: Self = Self::special(u32::MAX, 0);

    const fn special(seqid: u32, byte: u8) -> Self {
        let other = [byte; 12];
        Self { seqid, other }
    }

    pub(super) fn new(instance: Instance, number: StateNo, seqid: u32) -> Self {
        let mut other = [0; 12];
        let (upper, lower) = other.split_at_mut(4);
        upper.copy_from_slice(&instance.0.to_be_bytes());
        lower.copy_from_slice(&number.0.to_be_bytes());
        Self { seqid, other }
    }

    /// Whether it is the anonymous or the READ bypass stateid.
    #[must_use]
    pub fn is_anonymous(&self) -> bool {
        *self == Self::ANONYMOUS || *self == Self::READ_BYPASS
    }

    pub(super) fn kind(&self, instance: Instance) -> StateIdKind {
        let [i0, i1, i2, i3, n0, n1, n2, n3, n4, n5, n6, n7] = self.other;
        match *self {
            Self::ANONYMOUS => StateIdKind::Anonymous,
            Self::READ_BYPASS => StateIdKind::ReadBypass,
            Self::CURRENT => StateIdKind::Current,
            _ if self.other == [0; 12] || self.other == [0xff; 12] => StateIdKind::Reserved,
            _ if u32::from_be_bytes([i0, i1, i2, i3]) != instance.0 => StateIdKind::Stale,
            _ => {
                let number = u64::from_be_bytes([n0, n1, n2, n3, n4, n5, n6, n7]);
                StateIdKind::Numbered(StateNo(number))
            }
        }
    }
}

/// The current and the saved stateid of one COMPOUND (RFC 8881 section 16.2.3.1.2).
#[derive(Clone, Copy, Debug, Default)]
pub struct CompoundStateIds {
    current: Option<StateId>,
    saved: Option<StateId>,
}

impl CompoundStateIds {
    /// The stateid that an argument means; none if it is the current one, and there is none:
    /// NFS4ERR_BAD_STATEID.
    #[must_use]
    pub fn resolve(&self, argument: StateId) -> Option<StateId> {
        if argument == StateId::CURRENT {
            return self.current;
        }
        Some(argument)
    }

    /// An operation has returned a stateid: OPEN, LOCK, LOCKU, OPEN_DOWNGRADE, CLOSE.
    pub fn set(&mut self, stateid: StateId) {
        self.current = Some(stateid);
    }

    /// An operation has set the current filehandle without a stateid: PUTFH, LOOKUP, CREATE, ….
    pub fn clear(&mut self) {
        self.current = None;
    }

    /// SAVEFH.
    pub fn save(&mut self) {
        self.saved = self.current;
    }

    /// RESTOREFH.
    pub fn restore(&mut self) {
        self.current = self.saved;
    }
}
