//! The manager's errors, and the way out of each.

use crate::access::TokenName;
use crate::call_key::{BadKey, IdempotencyKey};
use crate::error_code::ErrorCode;
use crate::layout_state::LayoutChangeError;
use crate::nfs_fault::NfsClientFault;
use crate::placement::PlacementError;
use crate::shape::ShapeError;
use crate::snapshots::SnapshotFault;
use crate::store::StoreError;
use crate::wire::ErrorBody;
use pagemesh_base::brick_name::{BrickLabel, BrickName, BrickRef};
use pagemesh_base::layout::{BrickId, EpochNumber, VolumeName};
use pagemesh_base::slice::SliceError;
use std::io;
use uuid::Uuid;

/// The way out of errors about bricks of another version.
const RUN_SAME_VERSION: &str = "run it with the manager's version of pagemesh";

/// The way out of errors about devices.
const LIST_DEVICES: &str = "list what there is with: pagemesh pool device list BRICK";

/// The way out of an ambiguous id of a brick.
const WRITE_UUID: &str = "write the whole UUID; pagemesh status --output json has it";

/// An error of the manager.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// A field breaks its rules.
    #[error("{what}")]
    InvalidField {
        /// The broken rule.
        what: String,
        /// The way out.
        hint: &'static str,
    },
    /// No such layout or size.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// No placement for the volume.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The layout may not change in this way.
    #[error(transparent)]
    LayoutChange(#[from] LayoutChangeError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A snapshot cannot be made, found or deleted.
    #[error(transparent)]
    Snapshot(#[from] SnapshotFault),
    /// A client of an NFS server cannot be expired.
    #[error(transparent)]
    NfsClient(#[from] NfsClientFault),
    /// No volume of this name.
    #[error("there is no volume {0}")]
    NoSuchVolume(VolumeName),
    /// No process serves the volume over NFS.
    #[error("no process serves the volume {0} over NFS")]
    NotServed(VolumeName),
    /// The name is taken.
    #[error("there already is a volume {0}")]
    VolumeExists(VolumeName),
    /// Another call is creating or growing the volume.
    #[error("the volume {0} is being created or grown")]
    VolumeBusy(VolumeName),
    /// A client has attached the volume.
    #[error("the volume {name} is attached to {client}")]
    Attached {
        /// The volume.
        name: VolumeName,
        /// Its client.
        client: String,
    },
    /// The attachment of the caller is over.
    #[error("attachment {asked} of the volume {name} is over{}", now(.client))]
    Fenced {
        /// The volume.
        name: VolumeName,
        /// The attachment of the caller.
        asked: u32,
        /// The client that has attached it now.
        client: Option<String>,
    },
    /// No brick of this name or id.
    #[error("there is no brick {0}")]
    NoSuchBrick(BrickRef),
    /// Several bricks without names have ids with these first digits.
    #[error("several bricks have a UUID that starts with {0}")]
    BrickAmbiguous(BrickRef),
    /// Another brick has the name.
    #[error("the name {name} belongs to another brick, at {address}, with the UUID {}", .holder.0)]
    BrickNameTaken {
        /// The name.
        name: BrickName,
        /// The brick that has it.
        holder: BrickId,
        /// The address of that brick.
        address: String,
    },
    /// No event of this number.
    #[error("there is no event {0}")]
    NoSuchEvent(u64),
    /// The thing has changed since the state that the request names.
    #[error("{0} has changed since it was read")]
    ChangedMeanwhile(String),
    /// The header is no key.
    #[error(transparent)]
    BadKey(#[from] BadKey),
    /// The first call with the key still runs.
    #[error("the first call with the Idempotency-Key {0} still runs")]
    KeyRunning(IdempotencyKey),
    /// Another call had the key.
    #[error("another call had the Idempotency-Key {0}")]
    KeyReused(IdempotencyKey),
    /// The brick holds slices of volumes.
    #[error("the brick {brick} holds slices of {volumes}")]
    BrickInUse {
        /// The brick.
        brick: BrickLabel,
        /// The volumes of these slices.
        volumes: String,
    },
    /// The brick holds slices of deleted volumes.
    #[error("the brick {brick} still holds {slices} slices of deleted volumes")]
    BrickHasPendingDeletes {
        /// The brick.
        brick: BrickLabel,
        /// How many.
        slices: usize,
    },
    /// The brick is alive, and would register again with its next heartbeat.
    #[error("the brick {0} is alive")]
    BrickAlive(BrickLabel),
    /// The brick is dead, and receives no request.
    #[error("the brick {0} is dead")]
    BrickDead(BrickLabel),
    /// The brick reports no scrubs, and would ignore the request.
    #[error("the brick {0} reports no scrubs")]
    BrickCannotScrub(BrickLabel),
    /// The brick does not report its devices, and would ignore the request.
    #[error("the brick {0} does not report the devices of its pool")]
    BrickCannotChangeDevices(BrickLabel),
    /// The brick's pool has no such device.
    #[error("the pool of the brick {brick} has no device {device}")]
    NoSuchDevice {
        /// The brick.
        brick: BrickLabel,
        /// The device that the request names.
        device: Uuid,
    },
    /// The first device holds the journals and tables.
    #[error(
        "the first device of the brick {0} cannot be drained: it has the journals and tables of its pool"
    )]
    FirstDevice(BrickLabel),
    /// No cancel without a drain.
    #[error("the device {0} is not draining")]
    NotDraining(Uuid),
    /// Two bricks register with the same id.
    #[error("the brick {brick} is alive at {present}; {asked} says it is the same one")]
    BrickDuplicate {
        /// The brick.
        brick: BrickLabel,
        /// The known address.
        present: String,
        /// The address of the new registration.
        asked: String,
    },
    /// The brick serves an older copy of its pool, which lacks acknowledged writes.
    #[error(
        "the brick {brick} serves opening {asked} of its pool, but opening {known} was seen: it is an older copy"
    )]
    BrickOutdated {
        /// The brick.
        brick: BrickLabel,
        /// The last known opening.
        known: u32,
        /// The opening that registers.
        asked: u32,
    },
    /// A brick failed; the manager has rolled back the rest.
    #[error("the brick {brick} at {address} failed: {cause}")]
    Brick {
        /// The brick.
        brick: BrickLabel,
        /// Where it was reached.
        address: String,
        /// The error of the brick.
        cause: SliceError,
    },
    /// No token of this id.
    #[error("there is no token {0}")]
    NoSuchToken(Uuid),
    /// The name is taken.
    #[error("there already is a token {0}")]
    TokenExists(TokenName),
    /// The kernel gives no random bytes.
    #[error("cannot make a token: {0}")]
    Random(io::Error),
    /// The first admin token cannot be written.
    #[error("cannot write the admin token: {0}")]
    AdminToken(io::Error),
    /// A limit is reached.
    #[error("there are {most} {what} already, and no more are allowed")]
    TooMany {
        /// The limited things.
        what: &'static str,
        /// The limit.
        most: usize,
    },
}

fn now(client: &Option<String>) -> String {
    let attached = |client| format!("; {client} has attached since");
    client.as_ref().map_or_else(String::new, attached)
}

impl Fault {
    /// A field that breaks its rules.
    pub(crate) fn invalid_field(what: impl Into<String>, hint: &'static str) -> Fault {
        Fault::InvalidField {
            what: what.into(),
            hint,
        }
    }

    /// The kind of the error.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Fault::InvalidField { .. }
            | Fault::Shape(_)
            | Fault::BrickAmbiguous(_)
            | Fault::BadKey(_) => ErrorCode::BadRequest,
            Fault::Placement(_) => ErrorCode::NoRoom,
            Fault::LayoutChange(change) => match change {
                LayoutChangeError::Conflict { .. } => ErrorCode::EpochConflict,
                LayoutChangeError::NoSuchLeg { .. }
                | LayoutChangeError::DuplicateLeg { .. }
                | LayoutChangeError::NoSuchLegIndex(_)
                | LayoutChangeError::ColumnMismatch
                | LayoutChangeError::NoLegNamed => ErrorCode::BadRequest,
                _ => ErrorCode::InUse,
            },
            Fault::Store(_) | Fault::Random(_) | Fault::AdminToken(_) => ErrorCode::Internal,
            Fault::Snapshot(fault) => fault.code(),
            Fault::NfsClient(fault) => fault.code(),
            Fault::NoSuchVolume(_)
            | Fault::NotServed(_)
            | Fault::NoSuchBrick(_)
            | Fault::NoSuchEvent(_)
            | Fault::NoSuchDevice { .. }
            | Fault::NoSuchToken(_) => ErrorCode::NotFound,
            Fault::VolumeExists(_) | Fault::BrickNameTaken { .. } | Fault::TokenExists(_) => {
                ErrorCode::Exists
            }
            Fault::ChangedMeanwhile(_) => ErrorCode::ChangedMeanwhile,
            Fault::KeyRunning(_) => ErrorCode::StillRunning,
            Fault::KeyReused(_) => ErrorCode::KeyReused,
            Fault::Fenced { .. } => ErrorCode::Fenced,
            Fault::VolumeBusy(_)
            | Fault::Attached { .. }
            | Fault::BrickInUse { .. }
            | Fault::BrickHasPendingDeletes { .. }
            | Fault::BrickAlive(_)
            | Fault::BrickDuplicate { .. }
            | Fault::FirstDevice(_)
            | Fault::NotDraining(_)
            | Fault::BrickOutdated { .. } => ErrorCode::InUse,
            Fault::Brick { .. }
            | Fault::BrickDead(_)
            | Fault::BrickCannotScrub(_)
            | Fault::BrickCannotChangeDevices(_) => ErrorCode::BrickFailed,
            Fault::TooMany { .. } => ErrorCode::NoRoom,
        }
    }

    /// The current epoch of the layout, in an epoch conflict.
    #[must_use]
    pub fn epoch(&self) -> Option<EpochNumber> {
        match self {
            Fault::LayoutChange(LayoutChangeError::Conflict { current, .. }) => Some(*current),
            _ => None,
        }
    }

    /// The body of the answer that reports the fault.
    #[must_use]
    pub fn to_body(&self) -> ErrorBody {
        ErrorBody {
            error: self.to_string(),
            hint: self.hint().to_owned(),
            code: self.code(),
            epoch: self.epoch().map(|epoch| epoch.0),
        }
    }

    /// The way out.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Fault::InvalidField { hint, .. } => hint,
            Fault::Shape(_) => "choose another size or layout",
            Fault::Placement(PlacementError::TooFewDomains { .. }) => {
                "start bricks in more failure domains, or ask for fewer copies"
            }
            Fault::Placement(PlacementError::NoBricks(_)) => {
                "start a brick with --manager, or ask for another durability class"
            }
            Fault::Placement(_) => "choose a smaller size, add a brick, or delete a volume",
            Fault::LayoutChange(change) => change_hint(change),
            Fault::Snapshot(fault) => fault.hint(),
            Fault::NfsClient(fault) => fault.hint(),
            Fault::Store(StoreError::EarlierWriteFailed(_)) => {
                "make room on the disk of the manager's store or repair it, and start the manager again if nothing restarts it"
            }
            Fault::Store(_) => "look at the manager's log and the disk of its store",
            Fault::NoSuchVolume(_) => "list what there is with: pagemesh volume list",
            Fault::NotServed(_) => "serve it with: pagemesh serve nfs NAME",
            Fault::ChangedMeanwhile(_) => "read it again, and decide anew",
            Fault::BadKey(_) => "send one random key with each new call, such as a UUID",
            Fault::KeyRunning(_) => "repeat the call when that one has ended",
            Fault::KeyReused(_) => "send a new key with each new call",
            Fault::NoSuchEvent(_) => {
                "list what there is with: pagemesh events; a repetition has replaced it, or it was dropped"
            }
            Fault::NoSuchBrick(_) => "list what there is with: pagemesh status",
            Fault::BrickAmbiguous(_) => WRITE_UUID,
            Fault::BrickNameTaken { .. } => {
                "choose another name with --name, or have the manager forget that brick if it is gone for good"
            }
            Fault::VolumeExists(_) => "choose another name, or delete that volume first",
            Fault::VolumeBusy(_) => "try again when that operation has ended",
            Fault::Attached { .. } => "stop that client, or use force: its I/O then fails",
            Fault::Fenced { .. } => "attach the volume again to continue",
            Fault::BrickInUse { .. } => "delete these volumes first",
            Fault::BrickHasPendingDeletes { .. } => {
                "start the brick so that they can be deleted, or use force if it never returns"
            }
            Fault::BrickAlive(_) => "stop it first",
            Fault::BrickDead(_) => "start it again",
            Fault::NoSuchDevice { .. } | Fault::NotDraining(_) => LIST_DEVICES,
            Fault::FirstDevice(_) => "attach replicas of its volumes elsewhere",
            Fault::BrickCannotScrub(_) | Fault::BrickCannotChangeDevices(_) => RUN_SAME_VERSION,
            Fault::BrickDuplicate { .. } => {
                "stop one of them; a copied pool must not be served together with its original"
            }
            Fault::BrickOutdated { .. } => {
                "serve the newest state of the pool; this one lacks writes that were acknowledged"
            }
            Fault::Brick { .. } => "nothing was changed; repair the brick and try again",
            Fault::NoSuchToken(_) => "list what there is with: pagemesh token list",
            Fault::TokenExists(_) => "choose another name, or revoke that token first",
            Fault::Random(_) => "look at the manager's log",
            Fault::AdminToken(_) => "let the manager write to the directory of its store",
            Fault::TooMany { .. } => "delete what is no longer needed",
        }
    }
}

fn change_hint(change: &LayoutChangeError) -> &'static str {
    match change {
        LayoutChangeError::Conflict { .. } => "read the layout again and decide anew",
        LayoutChangeError::NoSuchLeg { .. } => "count segments, columns and legs from 0",
        LayoutChangeError::DuplicateLeg { .. } | LayoutChangeError::NoLegNamed => {
            "name each leg to change once"
        }
        LayoutChangeError::IllegalTransition { .. } => {
            "legs go from in-sync to stale to syncing to in-sync, and from syncing to stale"
        }
        LayoutChangeError::LastInSync { .. } => {
            "bring another leg of the column in-sync first; the last one holds the only data"
        }
        LayoutChangeError::NoSuchLegIndex(_) => "see the copies with: pagemesh replica status",
        LayoutChangeError::ColumnMismatch => "try again",
        LayoutChangeError::TooManyLegs => "detach a replica first",
        LayoutChangeError::NeverInSync(_) => {
            "start the bricks of a copy that was in-sync, and attach the volume so that the others resync"
        }
        LayoutChangeError::TooManySegments | LayoutChangeError::EpochOverflow => {
            "copy the volume to a new one"
        }
    }
}
