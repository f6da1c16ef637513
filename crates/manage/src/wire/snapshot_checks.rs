//! Bodies of checks of snapshots.

use crate::snapshots::SnapshotName;
use pagemesh_base::layout::{EpochNumber, VolumeName};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// The snapshots to check, and the place to go on from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct CheckSnapshots {
    /// One snapshot; all if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>)]
    pub snapshot: Option<SnapshotName>,
    /// The `next` of the answer before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>)]
    pub from: Option<CheckPosition>,
}

/// A place in a check of snapshots: a pair of copies, some snapshots, and a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CheckPosition {
    /// The epoch of the layout in which the check has begun.
    pub layout: EpochNumber,
    /// The newest snapshot then.
    pub newest: EpochNumber,
    /// The number of the pair.
    pub pair: usize,
    /// Snapshots up to this epoch are compared.
    pub after: EpochNumber,
    /// The last snapshot of the list that has begun.
    pub through: EpochNumber,
    /// The page of the copies.
    pub page: u64,
}

impl std::fmt::Display for CheckPosition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (layout, newest) = (self.layout.0, self.newest.0);
        let (pair, after, through) = (self.pair, self.after.0, self.through.0);
        write!(
            f,
            "{layout}.{newest}.{pair}.{after}.{through}.{}",
            self.page
        )
    }
}

impl From<CheckPosition> for String {
    fn from(position: CheckPosition) -> String {
        position.to_string()
    }
}

impl TryFrom<String> for CheckPosition {
    type Error = String;

    fn try_from(text: String) -> Result<CheckPosition, String> {
        text.parse()
    }
}

impl std::str::FromStr for CheckPosition {
    type Err = String;

    fn from_str(text: &str) -> Result<CheckPosition, String> {
        let bad = || format!("{text:?} is no place in a check of snapshots");
        let numbers = text.split('.').map(str::parse);
        let numbers: Vec<u64> = numbers.collect::<Result<_, _>>().map_err(|_| bad())?;
        let [layout, newest, pair, after, through, page] = numbers[..] else {
            return Err(bad());
        };
        let epoch = |number| u32::try_from(number).map(EpochNumber).map_err(|_| bad());
        Ok(CheckPosition {
            layout: epoch(layout)?,
            newest: epoch(newest)?,
            pair: usize::try_from(pair).map_err(|_| bad())?,
            after: epoch(after)?,
            through: epoch(through)?,
            page,
        })
    }
}

/// The result of a part of a check of snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotCheckReply {
    /// The volume.
    #[schema(value_type = crate::api::document::Name)]
    pub volume: VolumeName,
    /// Versions of pages that were compared.
    pub checked_pages: u64,
    /// Pages that snapshots see with other bytes on one copy than on another.
    pub differences: Vec<SnapshotDifference>,
    /// Bytes of copies that are compared, with those of the calls before.
    pub done_bytes: u64,
    /// Bytes of all copies but the first of each column. 0: no snapshot is on two copies.
    pub all_bytes: u64,
    /// The place to go on from. Missing: the check has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub next: Option<CheckPosition>,
}

/// A page that a snapshot sees with other bytes on one copy than on another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotDifference {
    /// The snapshot.
    #[schema(value_type = crate::api::document::Name)]
    pub snapshot: SnapshotName,
    /// The segment of the volume.
    pub segment: usize,
    /// The column of the segment.
    pub column: usize,
    /// The offset in the copies of the column.
    pub offset_bytes: u64,
    /// The names, or the ids, of the bricks with the copies.
    pub copies: [String; 2],
}
