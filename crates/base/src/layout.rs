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
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_safe_in_paths_and_exports() {
        for good in ["a", "vol-1", "A_b.c", "9"] {
            assert!(good.parse::<VolumeName>().is_ok(), "{good}");
        }
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        for bad in ["", "a/b", "a b", "a\n", ".", "-x", "é", long.as_str()] {
            assert!(bad.parse::<VolumeName>().is_err(), "{bad:?}");
        }
        assert!(serde_json::from_str::<VolumeName>("\"a/b\"").is_err());
    }

    #[test]
    fn impossible_layout_is_refused() {
        let leg = r#"{"brick":"00000000-0000-0000-0000-000000000001",
            "slice":"00000000-0000-0000-0000-000000000002","state":"in-sync"}"#;
        let column = |legs: usize| {
            format!(
                r#"{{"legs":[{}],"lost_since":0}}"#,
                vec![leg; legs].join(",")
            )
        };
        let check = |bytes: u64, columns: usize, legs: usize, segments: usize| {
            let columns = vec![column(legs); columns].join(",");
            let segment = format!(r#"{{"bytes":{bytes},"columns":[{columns}]}}"#);
            let segments = vec![segment; segments].join(",");
            let layout = format!(
                r#"{{"volume":"00000000-0000-0000-0000-000000000003","name":"v","epoch":1,
                "segments":[{segments}]}}"#
            );
            serde_json::from_str::<Layout>(&layout).map_err(|error| error.to_string())
        };
        let layout = check(4 * STRIPE_BYTES, 2, 3, 2).expect("a layout");
        assert_eq!(layout.size_bytes(), 8 * STRIPE_BYTES);
        for (bytes, columns, legs, segments, why) in [
            (4096, 0, 1, 1, "0 columns"),
            (17 * STRIPE_BYTES, COLUMNS_MAX + 1, 1, 1, "17 columns"),
            (4096, 1, 0, 1, "0 legs"),
            (4096, 1, 4, 1, "4 legs"),
            (0, 1, 1, 1, "does not fill"),
            (4097, 1, 1, 1, "does not fill"),
            (3 * STRIPE_BYTES, 2, 1, 1, "does not fill"),
            (SLICE_BYTES_MAX + 4096, 1, 1, 1, "larger than"),
            (u64::MAX - 4095, 1, 1, 2, "larger than"),
            (4096, 1, 1, 0, "0 segments"),
            (4096, 1, 1, SEGMENTS_MAX + 1, "65 segments"),
        ] {
            let refused = check(bytes, columns, legs, segments).expect_err(why);
            assert!(refused.contains(why), "{refused}");
        }
    }

    const LEG: Leg = Leg {
        brick: BrickId(Uuid::nil()),
        slice: SliceId(Uuid::nil()),
        state: LegState::AsyncReplica,
        needs_full_resync: false,
        empty: false,
        asynchronous: true,
    };

    /// [`LEG`] with these fields, which replace its own of the same names.
    fn read_leg(fields: serde_json::Value) -> Leg {
        let mut document = serde_json::to_value(LEG).expect("JSON");
        for (key, value) in fields.as_object().expect("fields") {
            document[key] = value.clone();
        }
        serde_json::from_value(document).expect("a leg")
    }

    #[test]
    fn need_of_full_resync_has_two_keys() {
        let needed = Leg {
            needs_full_resync: true,
            ..LEG
        };
        let written = serde_json::to_value(&needed).expect("JSON");
        assert_eq!(written["needs_full_resync"], true, "{written}");
        assert_eq!(
            written["fresh"], true,
            "a program of the previous version reads only this"
        );
        for (fresh, needed) in [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(a, b)| (a == 1, b == 1)) {
            let fields = serde_json::json!({"fresh": fresh, "needs_full_resync": needed});
            let leg = read_leg(fields);
            assert_eq!(leg.needs_full_resync, fresh || needed);
            assert_eq!((leg.state, leg.asynchronous), (LEG.state, true));
        }
        for key in ["fresh", "needs_full_resync"] {
            let leg = read_leg(serde_json::json!({ key: true }));
            assert!(leg.needs_full_resync, "{key}");
        }
        assert!(!read_leg(serde_json::json!({})).needs_full_resync);
    }

    #[test]
    fn round_of_earlier_build_is_read_as_first_epoch() {
        let read = |fields: serde_json::Value| {
            let column = serde_json::from_value::<Column>(fields);
            column.map(|column| column.lost_since.0).ok()
        };
        for (round, lost_since) in [(0, 0), (1, 1), (15, 1)] {
            let column = serde_json::json!({"legs": [], "round": round});
            assert_eq!(read(column), Some(lost_since));
        }
        let both = serde_json::json!({"legs": [], "round": 3, "lost_since": 7});
        assert_eq!(read(both), Some(7));
        assert_eq!(read(serde_json::json!({"legs": []})), None);
    }

    #[test]
    fn state_of_replica_is_stored_under_earlier_name() {
        let written = serde_json::to_value(LEG).expect("JSON");
        assert_eq!(written["state"], "following");
        for name in ["following", "async-replica"] {
            let leg = read_leg(serde_json::json!({"state": name}));
            assert_eq!(leg, LEG, "{name}");
        }
        assert_eq!(LEG.state.to_string(), "async-replica");
    }

    fn layout(segments: &[(usize, u64)]) -> Layout {
        let column = Column {
            legs: vec![],
            lost_since: EpochNumber(0),
        };
        let segment = |&(columns, units): &(usize, u64)| Segment {
            bytes: units * columns as u64 * STRIPE_BYTES,
            columns: vec![column.clone(); columns],
        };
        Layout {
            volume: Uuid::nil(),
            name: "v".parse().expect("a name"),
            epoch: EpochNumber(1),
            segments: segments.iter().map(segment).collect(),
        }
    }

    proptest! {
        /// Each byte has one place in its slice, no two bytes share one, and a range maps to the
        /// places of its bytes.
        #[test]
        fn mapping_is_one_to_one(
            segments in prop::collection::vec((1usize..5, 1u64..5), 1..4),
            offset in 0u64..2 << 20, len in 1u64..2 << 20,
        ) {
            let layout = layout(&segments);
            let size = layout.size_bytes();
            let mut seen = std::collections::HashSet::new();
            for page in 0..size / 4096 {
                let places = layout.map(page * 4096, 4096);
                prop_assert_eq!(places.len(), 1);
                let place = places[0];
                prop_assert!(place.offset + 4096 <= layout.segments[place.segment].slice_bytes());
                prop_assert!(seen.insert((place.segment, place.column, place.offset)));
            }
            let mut at = offset;
            for extent in layout.map(offset, len) {
                let first = layout.map(at, 1)[0];
                let last = layout.map(at + extent.len - 1, 1)[0];
                prop_assert_eq!(first, LayoutExtent { len: 1, ..extent });
                prop_assert_eq!(last.offset, extent.offset + extent.len - 1);
                prop_assert_eq!((last.segment, last.column), (extent.segment, extent.column));
                at += extent.len;
            }
            prop_assert_eq!(at, (offset + len).min(size).max(offset));
        }
    }
}
