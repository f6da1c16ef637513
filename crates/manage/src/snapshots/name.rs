//! Names of snapshots and of holds, by the rules of names of volumes.

use pagemesh_base::layout::{BadVolumeName, VolumeName};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The name of a snapshot, unique among those of its volume. `VOLUME@NAME` names it in texts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SnapshotName(VolumeName);

/// The tag of a hold: as long as a snapshot has one, it cannot be deleted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HoldTag(VolumeName);

impl SnapshotName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl FromStr for SnapshotName {
    type Err = BadVolumeName;

    fn from_str(text: &str) -> Result<SnapshotName, BadVolumeName> {
        text.parse().map(SnapshotName)
    }
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for HoldTag {
    type Err = BadVolumeName;

    fn from_str(text: &str) -> Result<HoldTag, BadVolumeName> {
        text.parse().map(HoldTag)
    }
}

impl fmt::Display for HoldTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
