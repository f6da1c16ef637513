//! The difference between two readings of counters, as it travels: only buckets that changed.

use super::histogram::{BUCKETS, OCTAVES};
use super::{KINDS, STAGES, add_media, add_stages};
use pagemesh_base::media_bytes::MediaBytes;
use serde::{Deserialize, Serialize};

/// The operations of an interval, for each kind. It may come from outside: see [`Report::check`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// By [`OpKind`](super::OpKind).
    pub kinds: [KindReport; KINDS],
    /// Bytes that a brick wrote to its medium. Missing in reports of volumes and of earlier bricks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media: Option<MediaBytes>,
}

/// The operations of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KindReport {
    /// All operations.
    pub ops: u64,
    /// Bytes of all operations.
    pub bytes: u64,
    /// Buckets of the latency with the number of timed operations, in ascending order.
    pub latency: Vec<(u16, u64)>,
    /// Groups of buckets with the nanoseconds that the timed operations spent in each stage, in
    /// ascending order.
    pub stages: Vec<(u8, [u64; STAGES])>,
}

/// A report that no meter made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// A bucket number is too large, or not larger than the one before it.
    #[error("bucket {0} is out of order or beyond the last one")]
    Bucket(u16),
    /// The number of a group of buckets is too large, or not larger than the one before it.
    #[error("bucket group {0} is out of order or beyond the last one")]
    Octave(u8),
}

impl Report {
    /// Whether the report says nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Report::default()
    }

    /// Whether it has operations.
    #[must_use]
    pub fn has_operations(&self) -> bool {
        self.kinds.iter().any(|kind| *kind != KindReport::default())
    }

    /// Adds a later report, which was checked.
    pub fn merge(&mut self, later: &Report) {
        add_media(&mut self.media, later.media);
        for (kind, later) in self.kinds.iter_mut().zip(&later.kinds) {
            kind.ops = kind.ops.saturating_add(later.ops);
            kind.bytes = kind.bytes.saturating_add(later.bytes);
            merge_entries(&mut kind.latency, &later.latency, |to, from| {
                *to = to.saturating_add(*from);
            });
            merge_entries(&mut kind.stages, &later.stages, add_stages);
        }
    }

    /// Checks a report from outside. [`Totals::add`](super::Totals::add) needs it.
    ///
    /// # Errors
    /// The first bucket that is not valid.
    pub fn check(&self) -> Result<(), ReportError> {
        for kind in &self.kinds {
            ascending(&kind.latency, BUCKETS).map_err(ReportError::Bucket)?;
            ascending(&kind.stages, OCTAVES).map_err(ReportError::Octave)?;
        }
        Ok(())
    }
}

/// Adds entries to entries, both in ascending order of their numbers.
fn merge_entries<N: Copy + Ord, T: Copy>(
    to: &mut Vec<(N, T)>,
    from: &[(N, T)],
    add: impl Fn(&mut T, &T),
) {
    for (number, value) in from {
        match to.binary_search_by_key(number, |(number, _)| *number) {
            Ok(at) => add(&mut to[at].1, value),
            Err(at) => to.insert(at, (*number, *value)),
        }
    }
}

/// Checks that the numbers ascend and are below the end. The error is the first that is not valid.
fn ascending<N: Copy + PartialOrd + Into<u64>, T>(entries: &[(N, T)], end: usize) -> Result<(), N> {
    let mut last = None;
    for (number, _) in entries {
        if (*number).into() >= end as u64 || last.is_some_and(|last| last >= *number) {
            return Err(*number);
        }
        last = Some(*number);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_with_invalid_buckets_is_refused() {
        let with = |latency: &[(u16, u64)], stages: &[(u8, [u64; STAGES])]| {
            let mut report = Report::default();
            report.kinds[1].latency = latency.to_vec();
            report.kinds[1].stages = stages.to_vec();
            report.check()
        };
        assert_eq!(with(&[(0, 1), (248, 1)], &[(31, [0; STAGES])]), Ok(()));
        assert_eq!(with(&[(249, 1)], &[]), Err(ReportError::Bucket(249)));
        assert_eq!(with(&[(5, 1), (5, 1)], &[]), Err(ReportError::Bucket(5)));
        assert_eq!(
            with(&[], &[(32, [0; STAGES])]),
            Err(ReportError::Octave(32))
        );
        let error = serde_json::from_str::<Report>(r#"{"kinds": []}"#);
        assert!(error.is_err());
    }

    #[test]
    fn report_without_media_has_earlier_form() {
        let earlier = serde_json::to_value(Report::default()).expect("JSON");
        assert_eq!(earlier.as_object().map(serde_json::Map::len), Some(1));
        let read: Report = serde_json::from_value(earlier).expect("a report");
        assert_eq!(read, Report::default());
        let media = MediaBytes {
            data: 1,
            journal: 2,
            tables: 3,
        };
        let mut sum = Report {
            media: Some(media),
            ..read
        };
        let text = serde_json::to_string(&sum).expect("JSON");
        assert!(
            text.ends_with(r#""media":{"data":1,"journal":2,"tables":3}}"#),
            "{text}"
        );
        sum.merge(&serde_json::from_str(&text).expect("a report"));
        assert_eq!(sum.media.map(|media| media.total()), Some(12));
        assert!(!sum.has_operations() && !sum.is_empty());
    }
}
