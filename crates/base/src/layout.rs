//! Layouts: the placement of a volume's bytes. The manager owns them, clients compute placement
//! from them.
//!
//! A volume is a concatenation of segments; a segment is striped over columns;
//! a column is mirrored over legs. One column is no striping, one leg no
//! mirroring. Growing a volume adds a segment.

use crate::ids::Epoch;
use crate::units::PAGE_BYTES;
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;
use uuid::Uuid;

/// Bytes of the longest name.
pub const NAME_BYTES_MAX: usize = 64;
/// Legs of a mirror.
pub const LEGS_MAX: usize = 3;
/// Columns of a stripe.
pub const COLUMNS_MAX: usize = 16;
/// Segments of a volume: how often it can grow.
pub const SEGMENTS_MAX: usize = 64;
/// Bytes of a stripe unit.
pub const STRIPE_BYTES: u64 = 64 << 10;
/// The largest slice: the reach of a page table, limited to less than a quarter of it.
pub const SLICE_BYTES_MAX: u64 = 64 << 40;

/// The name of a volume: 1 to 64 of `A-Z a-z 0-9 . _ -`, not starting with a
/// dot or a dash.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VolumeName(String);

/// Why a text is not a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadVolumeName {
    /// Nothing there.
    #[error("a name must not be empty")]
    Empty,
    /// Too many bytes.
    #[error("a name has at most {NAME_BYTES_MAX} bytes, this one has {0}")]
    TooLong(usize),
    /// A character with a special meaning in paths, exports or terminals.
    #[error("{0:?} cannot stand in a name; use letters, digits, '.', '_' and '-'")]
    Character(char),
    /// The name would look like an option or a hidden file.
    #[error("a name starts with a letter, a digit or '_', not with {0:?}")]
    Start(char),
}

impl VolumeName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for VolumeName {
    type Error = BadVolumeName;

    fn try_from(text: String) -> Result<VolumeName, BadVolumeName> {
        check_name(&text)?;
        Ok(VolumeName(text))
    }
}

/// Checks the rules of names: they are safe in paths, exports, terminals and logs.
pub(crate) fn check_name(text: &str) -> Result<(), BadVolumeName> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    match text.chars().next() {
        None => Err(BadVolumeName::Empty),
        Some(_) if text.len() > NAME_BYTES_MAX => Err(BadVolumeName::TooLong(text.len())),
        Some(c @ ('.' | '-')) => Err(BadVolumeName::Start(c)),
        Some(_) => match text.chars().find(|&c| !allowed(c)) {
            Some(c) => Err(BadVolumeName::Character(c)),
            None => Ok(()),
        },
    }
}

impl std::str::FromStr for VolumeName {
    type Err = BadVolumeName;

    fn from_str(text: &str) -> Result<VolumeName, BadVolumeName> {
        VolumeName::try_from(text.to_owned())
    }
}

impl From<VolumeName> for String {
    fn from(name: VolumeName) -> String {
        name.0
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A brick's identity: the UUID of its pool.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct BrickId(pub Uuid);

/// A slice's identity, chosen by the manager, the same for its whole life.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct SliceId(pub Uuid);

impl fmt::Display for BrickId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for SliceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The state of a leg, which determines its use.
///
/// Its serde form is the one of stored and exchanged layouts. Status output shows [`LegState::as_str`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LegState {
    /// Holds everything acknowledged: written and read.
    InSync,
    /// Missed writes: neither written nor read.
    Stale,
    /// Being brought up to date: written, not read.
    Syncing,
    /// An asynchronous replica. It holds a prefix of the acknowledged changes, and every change
    /// that was acknowledged as durable. Its client sends it the changes in their order after it
    /// has acknowledged them. It is neither written synchronously nor read.
    ///
    /// Written as `following`: programs of the previous version exchange layouts with managers of this one, and
    /// a manager of that version may open this store. They refuse a state that they do not know, and would lose the
    /// volume. A later version can write `async-replica`, because this one reads it.
    #[serde(rename = "following", alias = "async-replica")]
    AsyncReplica,
}

impl LegState {
    /// The name of the state, for people and in status output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            LegState::InSync => "in-sync",
            LegState::Stale => "stale",
            LegState::Syncing => "syncing",
            LegState::AsyncReplica => "async-replica",
        }
    }

    /// Writes [`LegState::as_str`]: a `serialize_with` of status output.
    ///
    /// # Errors
    /// Those of the serializer.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    pub fn serialize_shown<S: Serializer>(state: &LegState, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(state.as_str())
    }
}

impl fmt::Display for LegState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// One leg of a column's mirror.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leg {
    /// The brick.
    pub brick: BrickId,
    /// The slice of that brick.
    pub slice: SliceId,
    /// Its state.
    pub state: LegState,
    /// The leg needs a full resync: it was not in-sync since it was added, or since another leg was
    /// promoted. All of it may differ, whatever its births are.
    #[serde(flatten, with = "full_resync_keys")]
    pub needs_full_resync: bool,
    /// The leg was never in-sync: it may hold no data.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub empty: bool,
    /// Once up to date the leg becomes an asynchronous replica instead of in-sync.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub asynchronous: bool,
}

/// The JSON keys of [`Leg::needs_full_resync`]: its name, and the earlier name `fresh`.
///
/// **Data loss:** both are written. A program of the previous version ignores the present name; without `fresh` it would
/// resync the leg by its losses only, and put it in-sync too early. A reader accepts either, and true wins.
mod full_resync_keys {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::ops::Not;

    #[derive(Serialize, Deserialize)]
    struct Keys {
        #[serde(default, skip_serializing_if = "Not::not")]
        needs_full_resync: bool,
        #[serde(default, skip_serializing_if = "Not::not")]
        fresh: bool,
    }

    #[allow(clippy::trivially_copy_pass_by_ref)]
    pub(super) fn serialize<S: Serializer>(needed: &bool, to: S) -> Result<S::Ok, S::Error> {
        let keys = Keys {
            needs_full_resync: *needed,
            fresh: *needed,
        };
        keys.serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
        Keys::deserialize(from).map(|keys| keys.needs_full_resync || keys.fresh)
    }
}

/// A column: the same bytes in each leg.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ColumnFields")]
pub struct Column {
    /// One to three legs.
    pub legs: Vec<Leg>,
    /// The epoch of the oldest loss of a leg that is still behind; 0 if none is. Such a leg misses
    /// the pages that were born since, and operations that were in flight then.
    pub lost_since: EpochNumber,
}

/// The unchecked fields of a column.
#[derive(Deserialize)]
struct ColumnFields {
    legs: Vec<Leg>,
    lost_since: Option<EpochNumber>,
    /// The number of the loss, by earlier builds; 0 if no leg is behind.
    round: Option<u8>,
}

impl TryFrom<ColumnFields> for Column {
    type Error = BadLayout;

    /// A leg that was lost under an earlier build misses all that was ever written: it is not known
    /// at which epoch it was lost.
    fn try_from(fields: ColumnFields) -> Result<Column, BadLayout> {
        let by_round = |round| EpochNumber(u32::from(round != 0));
        let lost_since = fields.lost_since.or(fields.round.map(by_round));
        Ok(Column {
            legs: fields.legs,
            lost_since: lost_since.ok_or(BadLayout::NoLossEpoch)?,
        })
    }
}

/// A run of a volume's bytes, striped over its columns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "SegmentFields")]
pub struct Segment {
    /// Bytes of the volume in this segment: whole pages; with several columns, whole stripes of
    /// [`STRIPE_BYTES`] times the columns.
    pub bytes: u64,
    /// One or more.
    pub columns: Vec<Column>,
}

/// The unchecked fields of a segment.
#[derive(Deserialize)]
struct SegmentFields {
    bytes: u64,
    columns: Vec<Column>,
}

/// Why a layout is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadLayout {
    /// No columns, or too many.
    #[error("a segment has {0} columns; there are 1 to {COLUMNS_MAX}")]
    Columns(usize),
    /// No legs, or too many.
    #[error("a column has {0} legs; there are 1 to {LEGS_MAX}")]
    Legs(usize),
    /// Neither the epoch of a loss, nor the round of an earlier build.
    #[error("a column does not say since when a leg is behind")]
    NoLossEpoch,
    /// A size that does not divide evenly.
    #[error("a segment of {bytes} bytes does not fill {columns} columns")]
    Uneven {
        /// Its size.
        bytes: u64,
        /// Its columns.
        columns: usize,
    },
    /// Slices beyond the largest.
    #[error("a segment of {0} bytes is larger than its slices can be")]
    TooLarge(u64),
    /// No segments, or more than a volume can have.
    #[error("a layout has {0} segments; there are 1 to {SEGMENTS_MAX}")]
    Segments(usize),
}

impl TryFrom<SegmentFields> for Segment {
    type Error = BadLayout;

    fn try_from(SegmentFields { bytes, columns }: SegmentFields) -> Result<Segment, BadLayout> {
        let count = columns.len();
        if !(1..=COLUMNS_MAX).contains(&count) {
            return Err(BadLayout::Columns(count));
        }
        for column in &columns {
            if !(1..=LEGS_MAX).contains(&column.legs.len()) {
                return Err(BadLayout::Legs(column.legs.len()));
            }
        }
        let unit = match count {
            1 => PAGE_BYTES as u64,
            _ => STRIPE_BYTES * count as u64,
        };
        if bytes == 0 || !bytes.is_multiple_of(unit) {
            let columns = count;
            return Err(BadLayout::Uneven { bytes, columns });
        }
        match bytes / count as u64 > SLICE_BYTES_MAX {
            true => Err(BadLayout::TooLarge(bytes)),
            false => Ok(Segment { bytes, columns }),
        }
    }
}

/// The layout of a volume. Every change raises the epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "LayoutFields")]
pub struct Layout {
    /// The volume's identity.
    pub volume: Uuid,
    /// Its name.
    pub name: VolumeName,
    /// Its fencing number. An attach, the loss of a leg and the return of a leg raise it.
    pub epoch: EpochNumber,
    /// In order of the volume's bytes.
    pub segments: Vec<Segment>,
}

/// The unchecked fields of a layout.
#[derive(Deserialize)]
struct LayoutFields {
    volume: Uuid,
    name: VolumeName,
    epoch: EpochNumber,
    segments: Vec<Segment>,
}

impl TryFrom<LayoutFields> for Layout {
    type Error = BadLayout;

    fn try_from(said: LayoutFields) -> Result<Layout, BadLayout> {
        match said.segments.len() {
            1..=SEGMENTS_MAX => Ok(Layout {
                volume: said.volume,
                name: said.name,
                epoch: said.epoch,
                segments: said.segments,
            }),
            count => Err(BadLayout::Segments(count)),
        }
    }
}

/// An [`Epoch`] in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EpochNumber(pub u32);

impl From<EpochNumber> for Epoch {
    fn from(number: EpochNumber) -> Epoch {
        Epoch(number.0)
    }
}

/// A contiguous run of a volume's bytes in one column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutExtent {
    /// The segment.
    pub segment: usize,
    /// The column of the segment.
    pub column: usize,
    /// The first byte in the column's slices.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Layout {
    /// All columns, in order.
    pub fn columns(&self) -> impl Iterator<Item = &Column> + Clone {
        self.segments.iter().flat_map(|segment| &segment.columns)
    }

    /// Bytes of the volume.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.bytes).sum()
    }

    /// The extents of a range, in order. A range beyond the end is truncated.
    #[must_use]
    pub fn map(&self, offset: u64, len: u64) -> Vec<LayoutExtent> {
        let end = offset.saturating_add(len).min(self.size_bytes());
        let mut extents = Vec::new();
        let mut start = 0;
        for (number, segment) in self.segments.iter().enumerate() {
            let mut at = offset.max(start);
            let stop = end.min(start + segment.bytes);
            while at < stop {
                let extent = segment.locate(number, at - start, stop - at);
                at += extent.len;
                extents.push(extent);
            }
            start += segment.bytes;
        }
        extents
    }
}

impl Segment {
    /// Bytes of each column's slices.
    #[must_use]
    pub fn slice_bytes(&self) -> u64 {
        self.bytes / self.columns.len() as u64
    }

    fn locate(&self, segment: usize, at: u64, len: u64) -> LayoutExtent {
        let columns = self.columns.len() as u64;
        if columns == 1 {
            return LayoutExtent {
                segment,
                column: 0,
                offset: at,
                len,
            };
        }
        let (unit, within) = (at / STRIPE_BYTES, at % STRIPE_BYTES);
        LayoutExtent {
            segment,
            column: (unit % columns) as usize,
            offset: unit / columns * STRIPE_BYTES + within,
            len: len.min(STRIPE_BYTES - within),
        }
    }
}

#[cfg(test)]
mod tests;
