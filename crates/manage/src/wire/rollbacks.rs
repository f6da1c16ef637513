//! Bodies about rollbacks.

use crate::rollback::{Rollback, RollbackPhase};
use crate::snapshots::SnapshotName;
use pagemesh_base::layout::EpochNumber;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A rollback to begin, or to take up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BeginRollback {
    /// The snapshot that gives the volume its content.
    #[schema(value_type = crate::api::document::Name)]
    pub snapshot: SnapshotName,
    /// `true` begins although a client has attached the volume. The attach for the rollback fences it.
    #[serde(default)]
    pub force: bool,
}

/// The snapshot of before exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartRollbackCopy {
    /// The epoch that the attach for the rollback returned.
    #[schema(value_type = u32)]
    pub attachment: EpochNumber,
}

/// All pages are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FinishRollback {
    /// The epoch that the attach for the rollback returned.
    #[schema(value_type = u32)]
    pub attachment: EpochNumber,
    /// The phase in which they were copied: `copying` or `undoing`.
    pub phase: RollbackPhase,
}

/// A rollback that was turned back, or has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndedRollback {
    /// The rollback.
    pub rollback: Option<Rollback>,
    /// Whether it has ended. Otherwise the client copies from the snapshot of before.
    pub ended: bool,
}
