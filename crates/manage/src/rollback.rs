//! The states of a rollback of a volume to a snapshot. Pure: a request and a state give the next state.
//!
//! ```text
//!            begin            attach            copying           finish
//!  (none) ────────▶ requested ──────▶ preparing ───────▶ copying ────────▶ (none)
//!     ▲                 │ undo            │ undo            │ undo
//!     ├─────────────────┴─────────────────┘                 ▼     finish
//!     └───────────────────────────────────────────────── undoing ◀──
//! ```
//!
//! Invariants:
//! - Pages are changed in `copying` and `undoing` only. Then the snapshot of before exists, and a hold keeps it.
//! - The snapshot of before is made in `preparing` only: the attach before has fenced each other client, so no
//!   write follows it.
//! - Each request may be repeated, also after a crash of the client or the manager.

use crate::snapshots::SnapshotName;
use pagemesh_base::layout::EpochNumber;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The tag of the hold that keeps a snapshot of before.
pub const ROLLBACK_HOLD: &str = "rollback";

/// The progress of a rollback.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RollbackPhase {
    /// Nothing is changed, and another client may still have the volume.
    Requested,
    /// Nothing is changed. The client of the rollback makes the snapshot of before.
    Preparing,
    /// Changed pages are copied back from the snapshot.
    Copying,
    /// Changed pages are copied back from the snapshot of before.
    Undoing,
}

/// A rollback that has not ended. Until then, other uses of the volume are refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Rollback {
    /// The snapshot that gives the volume its content.
    #[schema(value_type = crate::api::document::Name)]
    pub to: SnapshotName,
    /// Its epoch.
    #[schema(value_type = u32)]
    pub to_epoch: EpochNumber,
    /// The snapshot of before.
    #[schema(value_type = crate::api::document::Name)]
    pub undo: SnapshotName,
    /// Its progress.
    pub phase: RollbackPhase,
    /// Seconds since 1970.
    pub since_unix_s: u64,
}

/// Why a request does not fit the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RollbackRefusal {
    /// No rollback runs.
    NoRollback,
    /// Another one runs, or is being undone.
    Other(Rollback),
}

/// The end of a rollback.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RollbackEnd {
    /// The snapshot with the present content of the volume. A hold by [`ROLLBACK_HOLD`] on it ends.
    pub content: SnapshotName,
    /// Whether it was undone.
    pub is_undone: bool,
}

/// Begins a rollback, or takes the same one up.
pub(crate) fn begin(
    present: Option<&Rollback>,
    new: impl FnOnce() -> Rollback,
    to: &SnapshotName,
) -> Result<Rollback, RollbackRefusal> {
    match present {
        None => Ok(new()),
        Some(it) if it.to == *to && it.phase != RollbackPhase::Undoing => Ok(it.clone()),
        Some(other) => Err(RollbackRefusal::Other(other.clone())),
    }
}

/// The client of the rollback has attached the volume.
pub(crate) fn attach(present: Option<&Rollback>) -> Result<Rollback, RollbackRefusal> {
    let mut next = present.ok_or(RollbackRefusal::NoRollback)?.clone();
    if next.phase == RollbackPhase::Requested {
        next.phase = RollbackPhase::Preparing;
    }
    Ok(next)
}

/// The snapshot of before exists: pages may be changed.
pub(crate) fn copying(present: Option<&Rollback>) -> Result<Rollback, RollbackRefusal> {
    let present = present.ok_or(RollbackRefusal::NoRollback)?;
    match present.phase {
        RollbackPhase::Preparing | RollbackPhase::Copying => Ok(Rollback {
            phase: RollbackPhase::Copying,
            ..present.clone()
        }),
        RollbackPhase::Requested | RollbackPhase::Undoing => {
            Err(RollbackRefusal::Other(present.clone()))
        }
    }
}

/// Goes back: at once if nothing is changed, which None reports.
pub(crate) fn undo(present: Option<&Rollback>) -> Result<Option<Rollback>, RollbackRefusal> {
    let present = present.ok_or(RollbackRefusal::NoRollback)?;
    match present.phase {
        RollbackPhase::Requested | RollbackPhase::Preparing => Ok(None),
        RollbackPhase::Copying | RollbackPhase::Undoing => Ok(Some(Rollback {
            phase: RollbackPhase::Undoing,
            ..present.clone()
        })),
    }
}

/// All pages are copied in this phase.
pub(crate) fn finish(
    present: Option<&Rollback>,
    phase: RollbackPhase,
) -> Result<RollbackEnd, RollbackRefusal> {
    let present = present.ok_or(RollbackRefusal::NoRollback)?;
    match (present.phase, phase) {
        (RollbackPhase::Copying, RollbackPhase::Copying) => Ok(RollbackEnd {
            content: present.to.clone(),
            is_undone: false,
        }),
        (RollbackPhase::Undoing, RollbackPhase::Undoing) => Ok(RollbackEnd {
            content: present.undo.clone(),
            is_undone: true,
        }),
        _ => Err(RollbackRefusal::Other(present.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use RollbackPhase::{Copying, Preparing, Requested, Undoing};

    fn name(text: &str) -> SnapshotName {
        text.parse().expect("a name")
    }

    fn rollback(phase: RollbackPhase) -> Rollback {
        Rollback {
            to: name("a"),
            to_epoch: EpochNumber(2),
            undo: name("before"),
            phase,
            since_unix_s: 7,
        }
    }

    fn phase_of(next: Result<Rollback, RollbackRefusal>) -> Option<RollbackPhase> {
        next.ok().map(|next| next.phase)
    }

    #[test]
    fn each_request_moves_each_phase_as_drawn() {
        let refused = None;
        for (phase, attached, copied, undone) in [
            (Requested, Some(Preparing), refused, Some(None)),
            (Preparing, Some(Preparing), Some(Copying), Some(None)),
            (Copying, Some(Copying), Some(Copying), Some(Some(Undoing))),
            (Undoing, Some(Undoing), refused, Some(Some(Undoing))),
        ] {
            let at = rollback(phase);
            assert_eq!(phase_of(attach(Some(&at))), attached, "attach in {phase:?}");
            assert_eq!(phase_of(copying(Some(&at))), copied, "copy in {phase:?}");
            let next = undo(Some(&at)).ok().map(|next| next.map(|it| it.phase));
            assert_eq!(next, undone, "undo in {phase:?}");
            for ended in [Requested, Preparing, Copying, Undoing] {
                let may_end = ended == phase && matches!(phase, Copying | Undoing);
                assert_eq!(finish(Some(&at), ended).is_ok(), may_end, "{phase:?}");
            }
        }
    }

    #[test]
    fn nothing_follows_without_a_begin() {
        let none = RollbackRefusal::NoRollback;
        assert_eq!(attach(None), Err(none.clone()));
        assert_eq!(copying(None), Err(none.clone()));
        assert_eq!(undo(None), Err(none.clone()));
        assert_eq!(finish(None, Copying), Err(none));
    }

    #[test]
    fn same_rollback_is_taken_up_and_another_refused() {
        let new = || rollback(Requested);
        assert_eq!(begin(None, new, &name("a")), Ok(rollback(Requested)));
        let never = || -> Rollback { panic!("one runs") };
        for phase in [Requested, Preparing, Copying] {
            let at = rollback(phase);
            assert_eq!(begin(Some(&at), never, &name("a")), Ok(at.clone()));
            let other = begin(Some(&at), never, &name("b"));
            assert_eq!(other, Err(RollbackRefusal::Other(at)));
        }
        let at = rollback(Undoing);
        let back = begin(Some(&at), never, &name("a"));
        assert_eq!(back, Err(RollbackRefusal::Other(at)));
    }

    #[test]
    fn end_names_the_snapshot_whose_content_is_there() {
        let end = |phase| finish(Some(&rollback(phase)), phase).expect("ended");
        assert_eq!(end(Copying).content, name("a"));
        assert_eq!(end(Undoing).content, name("before"));
        assert!(end(Undoing).is_undone && !end(Copying).is_undone);
    }
}
