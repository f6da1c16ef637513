//! Errors about snapshots: the failed action, the cause, and the way out.

use super::name::{HoldTag, SnapshotName};
use crate::error_code::ErrorCode;
use pagemesh_base::layout::VolumeName;

/// An error about a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotFault {
    /// No snapshot of this name.
    #[error("there is no snapshot {volume}@{name}")]
    NoSuchSnapshot {
        /// The volume.
        volume: VolumeName,
        /// The name.
        name: SnapshotName,
    },
    /// The name is taken.
    #[error("there already is a snapshot {volume}@{name}")]
    Exists {
        /// The volume.
        volume: VolumeName,
        /// The name.
        name: SnapshotName,
    },
    /// Another call makes a snapshot of the volume.
    #[error("a snapshot of the volume {0} is being made")]
    Running(VolumeName),
    /// Holds keep it.
    #[error("the snapshot {volume}@{name} is held by {}", tag_list(.tags))]
    Held {
        /// The volume.
        volume: VolumeName,
        /// The name.
        name: SnapshotName,
        /// The tags of the holds.
        tags: Vec<HoldTag>,
    },
    /// No hold with this tag.
    #[error("the snapshot {volume}@{name} has no hold {tag}")]
    NoSuchHold {
        /// The volume.
        volume: VolumeName,
        /// The name.
        name: SnapshotName,
        /// The tag.
        tag: HoldTag,
    },
    /// No bookmark of this name.
    #[error("there is no bookmark {volume}#{name}")]
    NoSuchBookmark {
        /// The volume.
        volume: VolumeName,
        /// The name.
        name: SnapshotName,
    },
    /// The name is taken.
    #[error("there already is a bookmark {volume}#{name}")]
    BookmarkExists {
        /// The volume.
        volume: VolumeName,
        /// The name.
        name: SnapshotName,
    },
    /// No schedule of this name.
    #[error("there is no schedule {0}")]
    NoSuchSchedule(SnapshotName),
    /// The name is taken.
    #[error("there already is a schedule {0}")]
    ScheduleExists(SnapshotName),
    /// The volume receives snapshots, so nobody else may change it.
    #[error("the volume {0} receives snapshots of another volume, and is read-only")]
    Received(VolumeName),
    /// The last receive was interrupted, and the volume is between two snapshots.
    #[error("the volume {0} has not received all of a snapshot")]
    Unfinished(VolumeName),
    /// The volume receives no snapshots.
    #[error("the volume {0} receives no snapshots: it was promoted, or not made by a receive")]
    NotReceived(VolumeName),
    /// Clones depend on it.
    #[error("clones of the snapshot {volume}@{name} share pages with it: {}", name_list(.clones))]
    HasClones {
        /// The volume.
        volume: VolumeName,
        /// The name.
        name: SnapshotName,
        /// Its clones.
        clones: Vec<VolumeName>,
    },
    /// The copy to promote lacks parts of it.
    #[error("the copy does not have all of the snapshot {volume}@{name}, and its promotion would delete it; it is needed by {}", user_list(.tags, .clones))]
    LostAtPromotion {
        /// The volume.
        volume: VolumeName,
        /// The name.
        name: SnapshotName,
        /// The tags of the holds.
        tags: Vec<HoldTag>,
        /// Its clones.
        clones: Vec<VolumeName>,
    },
    /// No copy of the volume has all of it.
    #[error("no copy of the volume {volume} has all of the snapshot {name} any more")]
    NoCopy {
        /// The volume.
        volume: VolumeName,
        /// The name.
        name: SnapshotName,
    },
    /// The volume to delete has snapshots.
    #[error("the volume {volume} has {count} snapshots")]
    VolumeHasSnapshots {
        /// The volume.
        volume: VolumeName,
        /// How many.
        count: usize,
    },
    /// The copy to remove is the last one with snapshots.
    #[error("copy {copy} of the volume {volume} is the only one that has all of {count} snapshots")]
    LastCopy {
        /// The volume.
        volume: VolumeName,
        /// The copy.
        copy: usize,
        /// How many snapshots.
        count: usize,
    },
    /// A rollback has not ended.
    #[error("the volume {volume} is being rolled back {}, and takes no other use until that has ended", rollback_target(.volume, .to, *.is_undone))]
    RollingBack {
        /// The volume.
        volume: VolumeName,
        /// The snapshot.
        to: SnapshotName,
        /// Whether the rollback is being undone.
        is_undone: bool,
    },
    /// No rollback.
    #[error("no rollback of the volume {0} is unfinished")]
    NoRollback(VolumeName),
    /// The client did not fetch the order for the cut.
    #[error(
        "the client {client} of the volume {volume} does not answer: it has ended, or its release knows no snapshots"
    )]
    NotFetched {
        /// The volume.
        volume: VolumeName,
        /// The client.
        client: String,
    },
    /// The client did not answer in time.
    #[error("the client {client} of the volume {volume} did not finish the snapshot in time")]
    NotAnswered {
        /// The volume.
        volume: VolumeName,
        /// The client.
        client: String,
    },
    /// The client could not make it.
    #[error("the client {client} of the volume {volume} cannot make a snapshot: {cause}")]
    Refused {
        /// The volume.
        volume: VolumeName,
        /// The client.
        client: String,
        /// Its error.
        cause: String,
    },
    /// The layout changed during each attempt.
    #[error(
        "the volume {volume} changed during each of {attempts} attempts to make a snapshot; the last change: {cause}"
    )]
    Unsteady {
        /// The volume.
        volume: VolumeName,
        /// The number of attempts.
        attempts: u32,
        /// The change during the last one.
        cause: String,
    },
}

fn promotion_hint(has_holds_alone: bool) -> &'static str {
    match has_holds_alone {
        true => {
            "start the bricks of a copy that has it, or release the holds, or use force, which deletes the snapshot"
        }
        false => "start the bricks of a copy that has it, or delete these clones first",
    }
}

impl SnapshotFault {
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            SnapshotFault::NoSuchSnapshot { .. }
            | SnapshotFault::NoSuchBookmark { .. }
            | SnapshotFault::NoSuchSchedule(_)
            | SnapshotFault::NoSuchHold { .. }
            | SnapshotFault::NoRollback(_) => ErrorCode::NotFound,
            SnapshotFault::Exists { .. }
            | SnapshotFault::BookmarkExists { .. }
            | SnapshotFault::ScheduleExists(_) => ErrorCode::Exists,
            _ => ErrorCode::InUse,
        }
    }

    /// The way out.
    pub(crate) fn hint(&self) -> &'static str {
        match self {
            SnapshotFault::NoSuchSnapshot { .. } => {
                "list what there is with: pagemesh snapshot list"
            }
            SnapshotFault::Exists { .. } => "choose another name, or delete that snapshot first",
            SnapshotFault::Running(_) => "try again when it has ended",
            SnapshotFault::Held { .. } => {
                "release it first with: pagemesh snapshot release TAG VOLUME@NAME"
            }
            SnapshotFault::NoSuchHold { .. } => {
                "see its holds with: pagemesh snapshot show VOLUME@NAME"
            }
            SnapshotFault::HasClones { .. } => {
                "delete them first, or let them copy these pages with: pagemesh clone promote NAME"
            }
            SnapshotFault::LostAtPromotion { clones, .. } => promotion_hint(clones.is_empty()),
            SnapshotFault::NoCopy { .. } => "take another snapshot",
            SnapshotFault::NoSuchBookmark { .. } => {
                "list what there is with: pagemesh bookmark list VOLUME"
            }
            SnapshotFault::BookmarkExists { .. } => {
                "choose another name, or delete that bookmark first"
            }
            SnapshotFault::NoSuchSchedule(_) => "list what there is with: pagemesh schedule list",
            SnapshotFault::ScheduleExists(_) => {
                "change it with: pagemesh schedule update, or choose another name"
            }
            SnapshotFault::Received(_) => {
                "read a snapshot of it as VOLUME@NAME, or let clients write with: pagemesh volume promote NAME"
            }
            SnapshotFault::Unfinished(_) => {
                "receive the stream again, or the rest of it, or delete the volume"
            }
            SnapshotFault::NotReceived(_) => "receive into a new volume",
            SnapshotFault::VolumeHasSnapshots { .. } => {
                "delete them first, or delete the volume with all of them: pagemesh volume delete --snapshots"
            }
            SnapshotFault::RollingBack { .. } => {
                "complete it with: pagemesh snapshot rollback VOLUME@NAME, or undo it with: pagemesh snapshot rollback --undo VOLUME"
            }
            SnapshotFault::NoRollback(_) => {
                "begin one with: pagemesh snapshot rollback VOLUME@NAME"
            }
            SnapshotFault::LastCopy { .. } => "delete these snapshots first",
            SnapshotFault::NotFetched { .. } => {
                "update that client; if it is gone, end its attachment with: pagemesh volume detach NAME"
            }
            SnapshotFault::NotAnswered { .. } => {
                "nothing was changed; try again when the volume is in-sync"
            }
            SnapshotFault::Refused { .. } => "nothing was changed; repair the cause and try again",
            SnapshotFault::Unsteady { .. } => {
                "nothing was changed; try again when its legs no longer change"
            }
        }
    }

    /// Whether the cut itself failed. Events report that, and no request that was refused before.
    pub(crate) fn is_failed_cut(&self) -> bool {
        matches!(
            self,
            SnapshotFault::NotFetched { .. }
                | SnapshotFault::NotAnswered { .. }
                | SnapshotFault::Refused { .. }
                | SnapshotFault::Unsteady { .. }
        )
    }
}

fn name_list(names: &[VolumeName]) -> String {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    names.join(", ")
}

fn rollback_target(volume: &VolumeName, to: &SnapshotName, is_undone: bool) -> String {
    match is_undone {
        false => format!("to {volume}@{to}"),
        true => format!("to {volume}@{to}, and the rollback is being undone"),
    }
}

fn user_list(tags: &[HoldTag], clones: &[VolumeName]) -> String {
    let holds = tags.iter().map(|tag| format!("the hold {tag}"));
    let clones = clones.iter().map(|name| format!("the clone {name}"));
    holds.chain(clones).collect::<Vec<_>>().join(", ")
}

fn tag_list(tags: &[HoldTag]) -> String {
    let tags: Vec<String> = tags.iter().map(ToString::to_string).collect();
    tags.join(", ")
}
