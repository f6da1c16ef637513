//! An event, as the store keeps it and as REST shows it.

use crate::access::Role;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Bytes of the longest text of an event; a longer one is cut.
pub(crate) const TEXT_BYTES_MAX: usize = 1024;

/// The kind of an event.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// The heartbeats of a brick are missing.
    BrickLost,
    /// The heartbeats of a lost brick arrive again.
    BrickReturned,
    /// A brick has registered for the first time.
    BrickJoined,
    /// The manager has forgotten a brick.
    BrickForgotten,
    /// A volume goes on without some of its legs.
    LegLost,
    /// Legs of a volume are up to date again.
    LegReturned,
    /// A copy has become the only in-sync copy of a volume.
    Promoted,
    /// A client has lost a volume to another client.
    Fenced,
    /// A client has attached a volume.
    Attached,
    /// The attachment of a volume has ended.
    Detached,
    /// An operator has expired a client of an NFS server.
    NfsClientExpired,
    /// A volume was created.
    VolumeCreated,
    /// A volume has grown.
    VolumeGrown,
    /// The policy of a volume in pools with disks behind memory has changed.
    TierChanged,
    /// A volume was deleted.
    VolumeDeleted,
    /// A snapshot was cloned.
    VolumeCloned,
    /// A clone does not share pages any more.
    ClonePromoted,
    /// A volume that received snapshots may be written.
    VolumePromoted,
    /// A snapshot was made.
    SnapshotCreated,
    /// A snapshot was deleted.
    SnapshotDeleted,
    /// The labels of a volume were changed.
    VolumeLabelsChanged,
    /// A copy of a volume got snapshots that it lacked.
    SnapshotsCopied,
    /// A snapshot could not be made.
    SnapshotFailed,
    /// The newest snapshot of a schedule is too old.
    ScheduleLate,
    /// The snapshots of a schedule are on time again.
    ScheduleOnTime,
    /// A rollback to a snapshot has begun.
    RollbackBegun,
    /// A rollback to a snapshot has ended.
    RollbackEnded,
    /// A volume has a further copy.
    ReplicaAttached,
    /// A volume has a copy less.
    ReplicaDetached,
    /// A scrub of a brick's pool has started.
    ScrubStarted,
    /// A scrub has corrected or found damage.
    ScrubFound,
    /// A device was added to the pool of a brick.
    DeviceAdded,
    /// The drain of a device has started.
    DeviceDrainStarted,
    /// The drain of a device was cancelled.
    DeviceDrainCancelled,
    /// A device was drained, and has left its pool.
    DeviceDrained,
    /// The drain of a device does not proceed.
    DeviceDrainFailed,
    /// A device had an error, and its pool was opened again with it.
    DeviceError,
    /// A device has failed, and its pool goes on without it.
    DeviceFailed,
    /// A brick has refused to change its devices.
    DeviceRefused,
    /// A token was created.
    TokenCreated,
    /// A token was revoked.
    TokenRevoked,
    /// Wrong tokens were refused.
    LoginRefused,
    /// The manager has started.
    ManagerStarted,
    /// A kind of a later version.
    #[serde(other)]
    Other,
}

impl EventKind {
    /// Whether a role may read events of this kind: the names, roles and lives of tokens are for the
    /// roles that may list tokens.
    #[must_use]
    pub fn is_readable_by(self, role: Role) -> bool {
        !self.is_for_admins() || role >= Role::Admin
    }

    pub(crate) fn is_for_admins(self) -> bool {
        matches!(self, EventKind::TokenCreated | EventKind::TokenRevoked)
    }
}

/// How urgent an event is.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Nothing to do.
    Info,
    /// Redundancy or access is reduced; the text has the way out.
    Warning,
    /// Data cannot be used, or acknowledged writes may be lost.
    Critical,
}

impl Severity {
    /// Its name in REST and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Critical => "critical",
        }
    }
}

/// The kind of the thing that an event is about.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum SubjectKind {
    /// A brick.
    Brick,
    /// A volume.
    Volume,
    /// A token.
    Token,
    /// The manager.
    Manager,
}

/// The thing that an event is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
pub struct Subject {
    /// Its kind.
    pub kind: SubjectKind,
    /// Its name; a brick without a name has its UUID.
    pub name: String,
}

/// The acknowledgement of an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Acknowledgement {
    /// The name of the token, or `cluster key`.
    pub by: String,
    /// Milliseconds since 1970.
    pub time_unix_ms: u64,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Event)]
pub struct EventRecord {
    /// Rises with every event. A repetition has a number of its own and replaces the event that it
    /// repeats, so numbers are missing in lists.
    pub seq: u64,
    /// Milliseconds since 1970, of the last repetition.
    pub time_unix_ms: u64,
    /// Its kind.
    pub kind: EventKind,
    /// How urgent it is.
    pub severity: Severity,
    /// The thing that it is about.
    pub subject: Subject,
    /// The cause of the change: the name of a token, `cluster key`, the name of a client, or
    /// `manager`.
    pub actor: String,
    /// The change, its cause and, for warnings, the way out.
    pub text: String,
    /// How often it happened: 2 or more for repetitions, each within an hour of the one before.
    #[serde(default = "once")]
    pub count: u64,
    /// Milliseconds since 1970, of the first of the repetitions.
    #[serde(default)]
    pub first_unix_ms: u64,
    /// Its acknowledgement, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acknowledged: Option<Acknowledgement>,
}

fn once() -> u64 {
    1
}
