//! The findings of a scrub of a pool's metadata, as the pool counts them and as bricks and the manager report them.
//!
//! Invariant: the JSON form has every key that a reader of this or of the previous version requires.

use serde::{Deserialize, Serialize};

/// The extent and the results of a scrub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "ScrubReportKeys", into = "ScrubReportKeys")]
pub struct ScrubReport {
    /// Superblocks, records, lines of the bitmap, table entries and leaves that were checked.
    pub checked: u64,
    /// Superblocks rewritten. Includes newer superblocks that checkpoints rewrote since the last
    /// scrub.
    pub superblocks: u64,
    /// Journal records corrected. Includes those that checkpoints corrected since the last scrub.
    pub records: u64,
    /// Journals with an applied record that cannot be corrected. Only the slices' other legs needed
    /// it. The record was skipped, and all slices are compared as a whole when they are attached
    /// next.
    pub skipped_journals: u64,
    /// Entries of the in-flight table rewritten.
    pub in_flight: u64,
    /// Lines of the bitmap rewritten.
    pub bitmap_lines: u64,
    /// Entries of the object table rewritten.
    pub objects: u64,
    /// Slots of page tables corrected. Includes those that sessions corrected since the last scrub.
    pub slots: u64,
    /// Damage that only `pool check` or another leg can repair.
    pub damaged: u64,
}

impl ScrubReport {
    /// The number of all corrections. A report from outside may have any numbers, so the sum
    /// saturates.
    #[must_use]
    pub fn corrected(&self) -> u64 {
        [
            self.superblocks,
            self.records,
            self.skipped_journals,
            self.in_flight,
            self.bitmap_lines,
            self.objects,
            self.slots,
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }
}

/// The JSON form of a [`ScrubReport`]. The manager of the previous version requires the earlier names
/// in heartbeats: without them it would refuse the brick.
#[derive(Serialize, Deserialize)]
struct ScrubReportKeys {
    checked: u64,
    superblocks: u64,
    records: u64,
    /// Missing in reports of the previous version.
    skipped_journals: Option<u64>,
    /// The earlier name of `skipped_journals`.
    #[serde(default)]
    left_behind: u64,
    in_flight: u64,
    bitmap_lines: u64,
    objects: u64,
    slots: u64,
    /// Derived from the others.
    #[serde(skip_deserializing)]
    corrected: u64,
    /// The earlier name of `corrected`.
    #[serde(skip_deserializing)]
    mended: u64,
    damaged: u64,
}

impl From<ScrubReportKeys> for ScrubReport {
    fn from(keys: ScrubReportKeys) -> ScrubReport {
        ScrubReport {
            checked: keys.checked,
            superblocks: keys.superblocks,
            records: keys.records,
            skipped_journals: keys.skipped_journals.unwrap_or(keys.left_behind),
            in_flight: keys.in_flight,
            bitmap_lines: keys.bitmap_lines,
            objects: keys.objects,
            slots: keys.slots,
            damaged: keys.damaged,
        }
    }
}

impl From<ScrubReport> for ScrubReportKeys {
    fn from(report: ScrubReport) -> ScrubReportKeys {
        ScrubReportKeys {
            checked: report.checked,
            superblocks: report.superblocks,
            records: report.records,
            skipped_journals: Some(report.skipped_journals),
            left_behind: report.skipped_journals,
            in_flight: report.in_flight,
            bitmap_lines: report.bitmap_lines,
            objects: report.objects,
            slots: report.slots,
            corrected: report.corrected(),
            mended: report.corrected(),
            damaged: report.damaged,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const REPORT: ScrubReport = ScrubReport {
        checked: 9,
        superblocks: 1,
        records: 2,
        skipped_journals: 3,
        in_flight: 4,
        bitmap_lines: 5,
        objects: 6,
        slots: 7,
        damaged: 8,
    };

    fn read(document: Value) -> ScrubReport {
        serde_json::from_value(document).expect("a report")
    }

    #[test]
    fn sum_of_extreme_counts_saturates() {
        let report = ScrubReport {
            records: u64::MAX,
            ..REPORT
        };
        assert_eq!(report.corrected(), u64::MAX);
    }

    #[test]
    fn both_names_of_keys_are_written() {
        let written = serde_json::to_value(REPORT).expect("JSON");
        for (key, value) in [
            ("left_behind", 3),
            ("skipped_journals", 3),
            ("corrected", 28),
            ("mended", 28),
        ] {
            assert_eq!(written[key], value, "{key}");
        }
        assert_eq!(read(written), REPORT);
    }

    #[test]
    fn either_name_of_keys_is_read() {
        let rest = json!({"checked": 9, "superblocks": 1, "records": 2, "in_flight": 4,
            "bitmap_lines": 5, "objects": 6, "slots": 7, "damaged": 8});
        let with = |skipped: &str, corrected: &str| {
            let mut document = rest.clone();
            document[skipped] = 3.into();
            document[corrected] = 28.into();
            read(document)
        };
        assert_eq!(with("left_behind", "mended"), REPORT);
        assert_eq!(with("skipped_journals", "corrected"), REPORT);
    }
}
