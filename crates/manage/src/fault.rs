//! Why the manager refuses something, and what to do about it.

use crate::ledger::ChangeError;
use crate::placement::PlaceError;
use crate::shape::ShapeError;
use crate::store::StoreError;
use pagemesh_base::layout::{BrickId, EpochNumber, VolumeName};
use pagemesh_base::slice::SliceError;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What kind of refusal, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// The request makes no sense.
    BadRequest,
    /// The client did not prove that it knows the key.
    Unauthorized,
    /// No such thing.
    NotFound,
    /// No such verb for this thing.
    WrongMethod,
    /// Too many bytes.
    TooLarge,
    /// The body is no JSON.
    NotJson,
    /// It is there already.
    Exists,
    /// It is in use, or being changed.
    InUse,
    /// The layout has another epoch than expected.
    EpochConflict,
    /// Another client has attached.
    Fenced,
    /// No bricks for it.
    NoRoom,
    /// A brick refused or did not answer.
    BrickFailed,
    /// Too many requests at once.
    Overloaded,
    /// It took too long; it may or may not be done.
    TimedOut,
    /// The manager itself failed.
    Internal,
}

impl Code {
    /// The HTTP status that goes with it.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Code::BadRequest => 400,
            Code::Unauthorized => 401,
            Code::NotFound => 404,
            Code::WrongMethod => 405,
            Code::TooLarge => 413,
            Code::NotJson => 415,
            Code::Exists | Code::InUse | Code::EpochConflict | Code::Fenced => 409,
            Code::Internal => 500,
            Code::BrickFailed => 502,
            Code::Overloaded => 503,
            Code::TimedOut => 504,
            Code::NoRoom => 507,
        }
    }
}

/// A refusal.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// A field that breaks its rules.
    #[error("{what}")]
    Bad {
        /// What is wrong.
        what: String,
        /// How it would be right.
        hint: &'static str,
    },
    /// No such layout or size.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// No place for it.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The layout may not change so.
    #[error(transparent)]
    Change(#[from] ChangeError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No volume of this name.
    #[error("there is no volume {0}")]
    NoSuchVolume(VolumeName),
    /// The name is taken.
    #[error("there already is a volume {0}")]
    VolumeExists(VolumeName),
    /// Somebody is creating or growing it.
    #[error("the volume {0} is just being created or grown")]
    VolumeBusy(VolumeName),
    /// A client has it.
    #[error("the volume {name} is attached to {client}")]
    Attached {
        /// The volume.
        name: VolumeName,
        /// Its client.
        client: String,
    },
    /// The attachment that asks is not the present one.
    #[error("attachment {asked} of the volume {name} is over{}", now(.client))]
    Fenced {
        /// The volume.
        name: VolumeName,
        /// Who asks.
        asked: u32,
        /// Who has it now.
        client: Option<String>,
    },
    /// No brick of this id.
    #[error("there is no brick {0}")]
    NoSuchBrick(BrickId),
    /// It holds slices.
    #[error("the brick {brick} holds slices of {volumes}")]
    BrickHolds {
        /// The brick.
        brick: BrickId,
        /// Whose slices.
        volumes: String,
    },
    /// It holds slices of deleted volumes.
    #[error("the brick {brick} still holds {slices} slices of deleted volumes")]
    BrickOwes {
        /// The brick.
        brick: BrickId,
        /// How many.
        slices: usize,
    },
    /// It would come back with its next heartbeat.
    #[error("the brick {0} is alive")]
    BrickAlive(BrickId),
    /// It hears nothing.
    #[error("the brick {0} is dead")]
    BrickDead(BrickId),
    /// It would not do what it is asked.
    #[error("the brick {0} tells nothing of scrubs")]
    BrickTooOld(BrickId),
    /// Two bricks say they are the same one.
    #[error("the brick {brick} is alive at {present}; {asked} says it is the same one")]
    BrickTwice {
        /// The brick.
        brick: BrickId,
        /// Where it is known to be.
        present: String,
        /// Where it also claims to be.
        asked: String,
    },
    /// It lacks acknowledged writes.
    #[error(
        "the brick {brick} serves opening {asked} of its pool, but opening {known} was seen: it is an older copy"
    )]
    BrickOlder {
        /// The brick.
        brick: BrickId,
        /// The last opening that was seen.
        known: u32,
        /// The one that asks.
        asked: u32,
    },
    /// A brick did not do its part; nothing is left of the rest.
    #[error("the brick {brick} at {address} failed: {cause}")]
    Brick {
        /// The brick.
        brick: BrickId,
        /// Where it was reached.
        address: String,
        /// What it said.
        cause: SliceError,
    },
    /// A named limit.
    #[error("there are {most} {what} already, and no more are allowed")]
    TooMany {
        /// Of what.
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
    pub(crate) fn bad(what: impl Into<String>, hint: &'static str) -> Fault {
        Fault::Bad {
            what: what.into(),
            hint,
        }
    }

    /// What kind it is.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Fault::Bad { .. } | Fault::Shape(_) => Code::BadRequest,
            Fault::Place(_) => Code::NoRoom,
            Fault::Change(change) => match change {
                ChangeError::Conflict { .. } => Code::EpochConflict,
                ChangeError::NoSuchLeg { .. }
                | ChangeError::NamedTwice { .. }
                | ChangeError::NoSuchCopy(_)
                | ChangeError::OtherColumns
                | ChangeError::Empty => Code::BadRequest,
                _ => Code::InUse,
            },
            Fault::Store(_) => Code::Internal,
            Fault::NoSuchVolume(_) | Fault::NoSuchBrick(_) => Code::NotFound,
            Fault::VolumeExists(_) => Code::Exists,
            Fault::Fenced { .. } => Code::Fenced,
            Fault::VolumeBusy(_)
            | Fault::Attached { .. }
            | Fault::BrickHolds { .. }
            | Fault::BrickOwes { .. }
            | Fault::BrickAlive(_)
            | Fault::BrickTwice { .. }
            | Fault::BrickOlder { .. } => Code::InUse,
            Fault::Brick { .. } | Fault::BrickDead(_) | Fault::BrickTooOld(_) => Code::BrickFailed,
            Fault::TooMany { .. } => Code::NoRoom,
        }
    }

    /// The epoch of the layout, where the refusal is about it.
    #[must_use]
    pub fn epoch(&self) -> Option<EpochNumber> {
        match self {
            Fault::Change(ChangeError::Conflict { current, .. }) => Some(*current),
            _ => None,
        }
    }

    /// The way out.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Fault::Bad { hint, .. } => hint,
            Fault::Shape(_) => "choose another size or layout",
            Fault::Place(PlaceError::TooFewDomains { .. }) => {
                "start bricks in more failure domains, or ask for fewer copies"
            }
            Fault::Place(PlaceError::NoBricks(_)) => {
                "start a brick with --manager, or ask for another durability class"
            }
            Fault::Place(_) => "choose a smaller size, add a brick, or delete a volume",
            Fault::Change(change) => change_hint(change),
            Fault::Store(StoreError::Failed(_)) => "see to the disk, then start the manager again",
            Fault::Store(_) => "look at the manager's log and the disk of its store",
            Fault::NoSuchVolume(_) => "list what there is with: pagemesh volume list",
            Fault::NoSuchBrick(_) => "list what there is with: pagemesh status",
            Fault::VolumeExists(_) => "choose another name, or delete that volume first",
            Fault::VolumeBusy(_) => "try again when that has ended",
            Fault::Attached { .. } => "stop that client, or use force: its I/O then fails",
            Fault::Fenced { .. } => "attach the volume again to go on",
            Fault::BrickHolds { .. } => "delete these volumes first",
            Fault::BrickOwes { .. } => {
                "start the brick so that they can be deleted, or use force if it never returns"
            }
            Fault::BrickAlive(_) => "stop it first",
            Fault::BrickDead(_) => "start it again",
            Fault::BrickTooOld(_) => "run it with the manager's version of pagemesh",
            Fault::BrickTwice { .. } => {
                "stop one of them; a copied pool must not be served beside its original"
            }
            Fault::BrickOlder { .. } => {
                "serve the newest state of the pool; this one lacks writes that were acknowledged"
            }
            Fault::Brick { .. } => "nothing was changed; see to the brick and try again",
            Fault::TooMany { .. } => "delete what is no longer needed",
        }
    }
}

fn change_hint(change: &ChangeError) -> &'static str {
    match change {
        ChangeError::Conflict { .. } => "read the layout again and decide anew",
        ChangeError::NoSuchLeg { .. } => "count segments, columns and legs from 0",
        ChangeError::NamedTwice { .. } | ChangeError::Empty => "name each leg to change once",
        ChangeError::Step { .. } => {
            "legs go from in-sync to stale to syncing to in-sync, and from syncing to stale"
        }
        ChangeError::LastInSync { .. } => {
            "bring another leg of the column in-sync first; the last one holds the only data"
        }
        ChangeError::NoSuchCopy(_) => "see the copies with: pagemesh replica status",
        ChangeError::OtherColumns => "try again",
        ChangeError::TooManyCopies => "detach a replica first",
        ChangeError::NeverInSync(_) => {
            "start the bricks of a copy that was, and attach the volume for the rest to follow"
        }
        ChangeError::TooManySegments | ChangeError::EpochsUsedUp => "copy the volume to a new one",
    }
}
