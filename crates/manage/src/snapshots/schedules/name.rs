//! Names of scheduled snapshots: `PREFIX-20261128-100003-hd`: the time in UTC, and the first letters of the classes.
//!
//! The name alone has all that a plan needs. So a received snapshot, which keeps its name, is pruned by a schedule of its own cluster.

use super::calendar::CivilTime;
use super::class::ClassSet;
use crate::snapshots::SnapshotName;

/// Bytes of the longest prefix, and of the longest name of a schedule or target.
pub const PREFIX_BYTES_MAX: usize = 24;

/// The name of a snapshot of these classes.
pub(crate) fn scheduled_name(prefix: &str, unix_s: u64, classes: ClassSet) -> Option<SnapshotName> {
    let CivilTime {
        year,
        month,
        day,
        second,
    } = CivilTime::from_unix(unix_s);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let time = format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}");
    format!("{prefix}-{time}-{classes}").parse().ok()
}

/// The time and the classes in the name of a snapshot; none if it is of another schedule or of none.
pub(crate) fn parse_name(prefix: &str, name: &SnapshotName) -> Option<(u64, ClassSet)> {
    let rest = name.as_str().strip_prefix(prefix)?.strip_prefix('-')?;
    let mut parts = rest.split('-');
    let (date, time, classes) = (parts.next()?, parts.next()?, parts.next()?);
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if parts.next().is_some() || date.len() != 8 || time.len() != 6 {
        return None;
    }
    if !is_number(date) || !is_number(time) {
        return None;
    }
    let number = |text: &str| text.parse::<u64>().ok();
    let (hour, minute, second) = (
        number(&time[..2])?,
        number(&time[2..4])?,
        number(&time[4..])?,
    );
    if hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    let time = CivilTime {
        year: number(&date[..4])?,
        month: number(&date[4..6])?,
        day: number(&date[6..])?,
        second: hour * 3600 + minute * 60 + second,
    };
    Some((time.to_unix()?, ClassSet::parse(classes)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_of_others_are_not_parsed() {
        let parse = |text: &str| parse_name("auto", &text.parse().expect("a name"));
        assert!(parse("auto-20261128-100003-hd").is_some());
        for bad in [
            "auto",
            "auto-20261128-100003",
            "auto-20261128-100003-",
            "auto-20261128-100003-dh",
            "auto-20261328-100003-h",
            "auto-20260230-100003-h",
            "auto-20261128-240003-h",
            "auto-2026112-8100003-h",
            "auto-20261128-100003-h-h",
            "automatic-20261128-100003-h",
            "other-20261128-100003-h",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn names_have_time_and_classes(
            unix_s in 0..253_402_300_800u64, bits in 1..64u8, prefix in "[a-z][a-z0-9.-]{0,23}"
        ) {
            let mut classes = ClassSet::default();
            for class in super::super::class::CLASSES {
                if bits >> class as u8 & 1 == 1 {
                    classes.insert(class);
                }
            }
            let name = scheduled_name(&prefix, unix_s, classes).expect("a name");
            prop_assert_eq!(parse_name(&prefix, &name), Some((unix_s, classes)));
        }
    }
}
