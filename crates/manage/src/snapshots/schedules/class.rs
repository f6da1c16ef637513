//! The classes of scheduled snapshots, as sanoid has them, and the periods of each.

use super::calendar::{CivilTime, DAY_S};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// A class of snapshots. A schedule makes one of each class in each period of the class.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotClass {
    /// Several times an hour.
    Frequent,
    /// Each hour.
    Hourly,
    /// Each day, from midnight UTC on.
    Daily,
    /// Each week, from Monday on.
    Weekly,
    /// Each month.
    Monthly,
    /// Each year.
    Yearly,
}

/// All classes, the finest first.
pub const CLASSES: [SnapshotClass; 6] = [
    SnapshotClass::Frequent,
    SnapshotClass::Hourly,
    SnapshotClass::Daily,
    SnapshotClass::Weekly,
    SnapshotClass::Monthly,
    SnapshotClass::Yearly,
];

impl SnapshotClass {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            SnapshotClass::Frequent => "frequent",
            SnapshotClass::Hourly => "hourly",
            SnapshotClass::Daily => "daily",
            SnapshotClass::Weekly => "weekly",
            SnapshotClass::Monthly => "monthly",
            SnapshotClass::Yearly => "yearly",
        }
    }

    /// The first letter of its name, which no other class has.
    fn letter(self) -> char {
        self.name().chars().next().unwrap_or('-')
    }

    /// The number of the period with this time. It rises by 1 with each period.
    pub(crate) fn period(self, unix_s: u64, frequent_minutes: u32) -> u64 {
        let date = CivilTime::from_unix(unix_s);
        match self {
            SnapshotClass::Frequent => unix_s / (60 * u64::from(frequent_minutes.max(1))),
            SnapshotClass::Hourly => unix_s / 3600,
            SnapshotClass::Daily => unix_s / DAY_S,
            // 1970 began on a Thursday.
            SnapshotClass::Weekly => (unix_s / DAY_S + 3) / 7,
            SnapshotClass::Monthly => date.year * 12 + date.month - 1,
            SnapshotClass::Yearly => date.year,
        }
    }

    /// Seconds of its longest period.
    pub(crate) fn longest_s(self, frequent_minutes: u32) -> u64 {
        match self {
            SnapshotClass::Frequent => 60 * u64::from(frequent_minutes.max(1)),
            SnapshotClass::Hourly => 3600,
            SnapshotClass::Daily => DAY_S,
            SnapshotClass::Weekly => 7 * DAY_S,
            SnapshotClass::Monthly => 31 * DAY_S,
            SnapshotClass::Yearly => 366 * DAY_S,
        }
    }
}

/// A set of classes: one snapshot may be of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassSet(u8);

impl ClassSet {
    /// Adds a class.
    pub fn insert(&mut self, class: SnapshotClass) {
        self.0 |= 1 << class as u8;
    }

    /// Whether it has this class.
    #[must_use]
    pub fn has(self, class: SnapshotClass) -> bool {
        self.0 & 1 << class as u8 != 0
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Its classes, the finest first.
    pub fn iter(self) -> impl Iterator<Item = SnapshotClass> {
        CLASSES.into_iter().filter(move |class| self.has(*class))
    }

    /// The set of these letters, each once and in order.
    pub(crate) fn parse(text: &str) -> Option<ClassSet> {
        let mut set = ClassSet::default();
        for letter in text.chars() {
            let class = CLASSES.into_iter().find(|it| it.letter() == letter)?;
            set.insert(class);
        }
        (!set.is_empty() && set.to_string() == text).then_some(set)
    }
}

impl fmt::Display for ClassSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter()
            .try_for_each(|class| write!(f, "{}", class.letter()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_begin_at_their_dates() {
        let at = |year, month, day, second| {
            let date = CivilTime {
                year,
                month,
                day,
                second,
            };
            date.to_unix().expect("a date")
        };
        for (class, before, after) in [
            (
                SnapshotClass::Frequent,
                at(2024, 1, 1, 899),
                at(2024, 1, 1, 900),
            ),
            (
                SnapshotClass::Hourly,
                at(2024, 1, 1, 3599),
                at(2024, 1, 1, 3600),
            ),
            (
                SnapshotClass::Daily,
                at(2024, 1, 1, 86_399),
                at(2024, 1, 2, 0),
            ),
            // 2024-01-07 is a Sunday.
            (
                SnapshotClass::Weekly,
                at(2024, 1, 7, 86_399),
                at(2024, 1, 8, 0),
            ),
            (
                SnapshotClass::Monthly,
                at(2024, 2, 29, 86_399),
                at(2024, 3, 1, 0),
            ),
            (
                SnapshotClass::Yearly,
                at(2024, 12, 31, 86_399),
                at(2025, 1, 1, 0),
            ),
        ] {
            let periods = [before, after].map(|time| class.period(time, 15));
            assert_eq!(periods[0] + 1, periods[1], "{class:?}");
            let length = class.longest_s(15);
            assert_ne!(class.period(after + length, 15), periods[1], "{class:?}");
        }
    }

    #[test]
    fn letters_name_one_set() {
        let mut set = ClassSet::default();
        set.insert(SnapshotClass::Daily);
        set.insert(SnapshotClass::Hourly);
        assert_eq!(set.to_string(), "hd");
        assert_eq!(ClassSet::parse("hd"), Some(set));
        for bad in ["", "dh", "hh", "x", "h-"] {
            assert_eq!(ClassSet::parse(bad), None, "{bad}");
        }
    }
}
