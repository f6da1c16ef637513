//! The texts of events: one function for each, so that all of them can be read together.
//!
//! A text names the thing, the change and its cause. The text of a warning ends with the way out.

use super::record::{EventKind, Severity, Subject, SubjectKind, TEXT_BYTES_MAX};
use crate::records::BrickRecord;
use crate::tier_policy::TierPolicy;
use crate::wire::{BrickDevice, DeviceChange, Nfs4ClientId};
use pagemesh_base::brick_name::BrickLabel;
use pagemesh_base::layout::{EpochNumber, VolumeName};
use std::time::Duration;

/// An event before it has a number and a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EventDraft {
    pub kind: EventKind,
    pub severity: Severity,
    pub subject: Subject,
    pub actor: String,
    pub text: String,
}

/// The effect of a lost brick on volumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LossEffect {
    /// Volumes with a leg on the brick.
    pub volumes: usize,
    /// Of these, the volumes with a column that has no in-sync leg on a living brick.
    pub unusable: usize,
}

/// A device in a text: its path, if it is known, and its id.
fn device_label(device: &BrickDevice) -> String {
    match &device.path {
        Some(path) => format!("{path} ({})", device.device),
        None => device.device.to_string(),
    }
}

impl EventDraft {
    fn new(
        kind: EventKind,
        severity: Severity,
        subject: Subject,
        actor: &str,
        text: String,
    ) -> Self {
        let mut text = text;
        let end = text.floor_char_boundary(TEXT_BYTES_MAX);
        text.truncate(end);
        EventDraft {
            kind,
            severity,
            subject,
            actor: actor.to_owned(),
            text,
        }
    }

    pub(super) fn of_volume(
        kind: EventKind,
        severity: Severity,
        volume: &VolumeName,
        actor: &str,
        text: String,
    ) -> EventDraft {
        let subject = Subject {
            kind: SubjectKind::Volume,
            name: volume.to_string(),
        };
        EventDraft::new(kind, severity, subject, actor, text)
    }

    fn of_brick(
        kind: EventKind,
        severity: Severity,
        brick: &BrickRecord,
        actor: &str,
        text: String,
    ) -> EventDraft {
        let name = brick.name.as_ref();
        let subject = Subject {
            kind: SubjectKind::Brick,
            name: name.map_or_else(|| brick.brick.to_string(), ToString::to_string),
        };
        EventDraft::new(kind, severity, subject, actor, text)
    }

    pub(crate) fn manager_started(version: &str) -> EventDraft {
        let subject = Subject {
            kind: SubjectKind::Manager,
            name: "manager".to_owned(),
        };
        let text = format!("The manager has started, version {version}.");
        EventDraft::new(
            EventKind::ManagerStarted,
            Severity::Info,
            subject,
            "manager",
            text,
        )
    }

    pub(crate) fn brick_joined(brick: &BrickRecord) -> EventDraft {
        let BrickRecord {
            address,
            domain,
            durability,
            capacity_bytes,
            ..
        } = brick;
        let label = brick.label();
        let text = format!(
            "The brick {label} at {address} has joined: failure domain {domain}, class {durability}, \
             {capacity_bytes} bytes."
        );
        EventDraft::of_brick(
            EventKind::BrickJoined,
            Severity::Info,
            brick,
            "manager",
            text,
        )
    }

    pub(crate) fn brick_lost(
        brick: &BrickRecord,
        after: Duration,
        effect: LossEffect,
    ) -> EventDraft {
        let LossEffect { volumes, unusable } = effect;
        let (severity, harm) = match (volumes, unusable) {
            (0, _) => (Severity::Warning, "No volume has legs on it".to_owned()),
            (_, 0) => (
                Severity::Warning,
                format!(
                    "{volumes} volumes have legs on it, and in-sync copies on other living bricks"
                ),
            ),
            _ => (
                Severity::Critical,
                format!(
                    "{volumes} volumes have legs on it; {unusable} of them have no in-sync copy on a \
                     living brick and cannot be used"
                ),
            ),
        };
        let text = format!(
            "The brick {} at {} has sent no heartbeat for {} s, because it has ended, hangs, or cannot \
             reach the manager. {harm}. Start it again, or repair its network; if it is gone for good, \
             replace it.",
            brick.label(),
            brick.address,
            after.as_secs(),
        );
        EventDraft::of_brick(EventKind::BrickLost, severity, brick, "manager", text)
    }

    pub(crate) fn brick_returned(brick: &BrickRecord) -> EventDraft {
        let text = format!(
            "The brick {} at {} sends heartbeats again. Clients resync its stale legs.",
            brick.label(),
            brick.address
        );
        EventDraft::of_brick(
            EventKind::BrickReturned,
            Severity::Info,
            brick,
            "manager",
            text,
        )
    }

    pub(crate) fn brick_forgotten(brick: &BrickRecord, actor: &str, slices: usize) -> EventDraft {
        let label = brick.label();
        let text = match slices {
            0 => format!("The brick {label} at {} was forgotten.", brick.address),
            slices => format!(
                "The brick {label} at {} was forgotten by force, with {slices} slices of deleted \
                 volumes on it.",
                brick.address
            ),
        };
        EventDraft::of_brick(
            EventKind::BrickForgotten,
            Severity::Info,
            brick,
            actor,
            text,
        )
    }

    pub(crate) fn scrub_started(brick: &BrickRecord, actor: &str) -> EventDraft {
        let text = format!(
            "A scrub of the pool of the brick {} has started.",
            brick.label()
        );
        EventDraft::of_brick(EventKind::ScrubStarted, Severity::Info, brick, actor, text)
    }

    pub(crate) fn scrub_found(brick: &BrickRecord, corrected: u64, damaged: u64) -> EventDraft {
        let label = brick.label();
        let (severity, text) = match damaged {
            0 => (
                Severity::Warning,
                format!(
                    "The scrub of the brick {label} has corrected {corrected} places of its pool. \
                     Corrections that repeat mean failing media: watch the next scrubs, and plan to \
                     replace the brick."
                ),
            ),
            damaged => (
                Severity::Critical,
                format!(
                    "The scrub of the brick {label} has found {damaged} structures that it cannot \
                     correct, and has corrected {corrected}. Stop the brick, run `pagemesh pool check`, \
                     and let the other copies resync it."
                ),
            ),
        };
        EventDraft::of_brick(EventKind::ScrubFound, severity, brick, "manager", text)
    }

    pub(crate) fn device_added(
        brick: &BrickRecord,
        actor: &str,
        device: &BrickDevice,
    ) -> EventDraft {
        let text = format!(
            "The device {} of {} bytes was added to the pool of the brick {}.",
            device_label(device),
            device.size_bytes,
            brick.label()
        );
        EventDraft::of_brick(EventKind::DeviceAdded, Severity::Info, brick, actor, text)
    }

    pub(crate) fn device_drain_started(
        brick: &BrickRecord,
        actor: &str,
        device: &BrickDevice,
    ) -> EventDraft {
        let text = format!(
            "The drain of the device {} of the brick {} has started: its {} bytes in use move to the \
             pool's other devices.",
            device_label(device),
            brick.label(),
            device.used_bytes
        );
        let kind = EventKind::DeviceDrainStarted;
        EventDraft::of_brick(kind, Severity::Info, brick, actor, text)
    }

    pub(crate) fn device_drain_cancelled(
        brick: &BrickRecord,
        actor: &str,
        device: &BrickDevice,
    ) -> EventDraft {
        let text = format!(
            "The drain of the device {} of the brick {} was cancelled. The pool uses the device again.",
            device_label(device),
            brick.label()
        );
        let kind = EventKind::DeviceDrainCancelled;
        EventDraft::of_brick(kind, Severity::Info, brick, actor, text)
    }

    pub(crate) fn device_drained(brick: &BrickRecord, device: &BrickDevice) -> EventDraft {
        let text = format!(
            "The device {} has left the pool of the brick {}: no data is on it any more.",
            device_label(device),
            brick.label()
        );
        let kind = EventKind::DeviceDrained;
        EventDraft::of_brick(kind, Severity::Info, brick, "manager", text)
    }

    pub(crate) fn device_drain_failed(
        brick: &BrickRecord,
        device: &BrickDevice,
        problem: &str,
    ) -> EventDraft {
        let label = brick.label();
        let text = format!(
            "The drain of the device {} of the brick {label} does not proceed: {problem}. The brick tries \
             again; `pagemesh pool device drain --cancel` ends the drain.",
            device_label(device),
        );
        let kind = EventKind::DeviceDrainFailed;
        EventDraft::of_brick(kind, Severity::Warning, brick, "manager", text)
    }

    pub(crate) fn device_error(brick: &BrickRecord, device: &BrickDevice) -> EventDraft {
        let text = format!(
            "The device {} of the brick {} had an error. The brick has opened its pool again, and uses the device once more. \
             Check the device: after another failure within 24 hours the pool goes on without it, for ever.",
            device_label(device),
            brick.label()
        );
        let kind = EventKind::DeviceError;
        EventDraft::of_brick(kind, Severity::Warning, brick, "manager", text)
    }

    pub(crate) fn device_failed(brick: &BrickRecord, device: &BrickDevice) -> EventDraft {
        let text = format!(
            "The device {} of the brick {} has failed, and the pool goes on without it: its pages are damaged. Scrub the \
             brick's volumes to repair them from other copies, then `pagemesh pool device drain` lets the pool forget it.",
            device_label(device),
            brick.label()
        );
        let kind = EventKind::DeviceFailed;
        EventDraft::of_brick(kind, Severity::Critical, brick, "manager", text)
    }

    pub(crate) fn device_refused(
        brick: &BrickRecord,
        actor: &str,
        change: &DeviceChange,
        error: &str,
    ) -> EventDraft {
        let asked = match change {
            DeviceChange::Add { path, .. } => format!("to add {path} to its pool"),
            DeviceChange::Drain { device } => format!("to drain the device {device}"),
            DeviceChange::CancelDrain { device } => {
                format!("to cancel the drain of the device {device}")
            }
            DeviceChange::Other => "a change of its devices".to_owned(),
        };
        let text = format!("The brick {} has refused {asked}: {error}", brick.label());
        let kind = EventKind::DeviceRefused;
        EventDraft::of_brick(kind, Severity::Warning, brick, actor, text)
    }

    pub(crate) fn legs_lost(
        volume: &VolumeName,
        actor: &str,
        bricks: &[BrickLabel],
        note: Option<&str>,
    ) -> EventDraft {
        let cause = note.map_or_else(String::new, |note| format!(" ({note})"));
        let text = format!(
            "The volume {volume} goes on without its legs on {}{cause}: they miss writes from now on. \
             Its client resyncs them once their bricks answer; see `pagemesh volume show {volume}`.",
            join_labels(bricks)
        );
        EventDraft::of_volume(EventKind::LegLost, Severity::Warning, volume, actor, text)
    }

    pub(crate) fn legs_returned(
        volume: &VolumeName,
        actor: &str,
        bricks: &[BrickLabel],
    ) -> EventDraft {
        let text = format!(
            "The legs of the volume {volume} on {} are up to date again.",
            join_labels(bricks)
        );
        EventDraft::of_volume(EventKind::LegReturned, Severity::Info, volume, actor, text)
    }

    pub(crate) fn promoted(
        volume: &VolumeName,
        actor: &str,
        copy: usize,
        lossy: bool,
    ) -> EventDraft {
        let (severity, rest) = if lossy {
            (
                Severity::Critical,
                "It may lack the writes that were acknowledged last: check the data of programs that \
                 wrote then",
            )
        } else {
            (
                Severity::Warning,
                "It was in-sync. The other copies resync from it: start their bricks, or detach them",
            )
        };
        let text = format!("Copy {copy} of the volume {volume} was promoted. {rest}.");
        EventDraft::of_volume(EventKind::Promoted, severity, volume, actor, text)
    }

    pub(crate) fn attached(volume: &VolumeName, client: &str, epoch: EpochNumber) -> EventDraft {
        let text = format!(
            "The client {client} has attached the volume {volume}, epoch {}.",
            epoch.0
        );
        EventDraft::of_volume(EventKind::Attached, Severity::Info, volume, client, text)
    }

    /// The client `earlier` loses the volume; `cause` is the change, as in "b has attached it".
    pub(crate) fn fenced(
        volume: &VolumeName,
        earlier: &str,
        actor: &str,
        (cause, epoch): (&str, EpochNumber),
    ) -> EventDraft {
        let text = format!(
            "The client {earlier} has lost the volume {volume}, because {cause}: its writes are \
             refused from epoch {} on. If it still runs, stop it, or let it attach the volume again.",
            epoch.0
        );
        EventDraft::of_volume(EventKind::Fenced, Severity::Warning, volume, actor, text)
    }

    pub(crate) fn detached(volume: &VolumeName, client: &str, actor: &str) -> EventDraft {
        let text = format!("The client {client} no longer has the volume {volume} attached.");
        EventDraft::of_volume(EventKind::Detached, Severity::Info, volume, actor, text)
    }

    /// `effect` ends the sentence that begins with the client.
    pub(crate) fn nfs_client_expired(
        volume: &VolumeName,
        actor: &str,
        client: Nfs4ClientId,
        effect: &str,
    ) -> EventDraft {
        let text =
            format!("The NFS client {client} of the server of the file system {volume} {effect}");
        let kind = EventKind::NfsClientExpired;
        EventDraft::of_volume(kind, Severity::Info, volume, actor, text)
    }

    pub(crate) fn volume_created(volume: &VolumeName, actor: &str, bytes: u64) -> EventDraft {
        let text = format!("The volume {volume} of {bytes} bytes was created.");
        EventDraft::of_volume(
            EventKind::VolumeCreated,
            Severity::Info,
            volume,
            actor,
            text,
        )
    }

    pub(crate) fn volume_grown(volume: &VolumeName, actor: &str, bytes: u64) -> EventDraft {
        let text = format!("The volume {volume} has grown to {bytes} bytes.");
        EventDraft::of_volume(EventKind::VolumeGrown, Severity::Info, volume, actor, text)
    }

    pub(crate) fn tier_changed(volume: &VolumeName, actor: &str, policy: TierPolicy) -> EventDraft {
        let rest = match policy {
            TierPolicy::Auto | TierPolicy::Other => {
                "are in memory while they are in use, and cold ones on flash"
            }
            TierPolicy::Memory => "stay in memory",
            TierPolicy::Flash => "leave memory first",
        };
        let text = format!(
            "The tier of the volume {volume} is {} now: its pages {rest}.",
            policy.name()
        );
        let kind = EventKind::TierChanged;
        EventDraft::of_volume(kind, Severity::Info, volume, actor, text)
    }

    pub(crate) fn volume_deleted(
        volume: &VolumeName,
        actor: &str,
        client: Option<&str>,
    ) -> EventDraft {
        let (severity, rest) = match client {
            None => (Severity::Info, String::new()),
            Some(client) => (
                Severity::Warning,
                format!(" by force, while {client} had it attached: its I/O fails, so stop it"),
            ),
        };
        let text = format!("The volume {volume} was deleted{rest}.");
        EventDraft::of_volume(EventKind::VolumeDeleted, severity, volume, actor, text)
    }

    pub(crate) fn replica_attached(
        volume: &VolumeName,
        actor: &str,
        bricks: &[BrickLabel],
    ) -> EventDraft {
        let text = format!(
            "The volume {volume} has a further copy on {}; its client fills it.",
            join_labels(bricks)
        );
        EventDraft::of_volume(
            EventKind::ReplicaAttached,
            Severity::Info,
            volume,
            actor,
            text,
        )
    }

    pub(crate) fn replica_detached(volume: &VolumeName, actor: &str, copy: usize) -> EventDraft {
        let text = format!("Copy {copy} of the volume {volume} was removed.");
        EventDraft::of_volume(
            EventKind::ReplicaDetached,
            Severity::Info,
            volume,
            actor,
            text,
        )
    }
}

/// The first few labels, each once, and the number of the others.
fn join_labels(bricks: &[BrickLabel]) -> String {
    const SHOWN: usize = 5;
    let mut names: Vec<String> = bricks.iter().map(ToString::to_string).collect();
    names.sort_unstable();
    names.dedup();
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names[..SHOWN].join(", ")),
    }
}
