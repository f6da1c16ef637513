//! Counters of the REST API, for the manager's metrics.

use std::sync::atomic::{AtomicU64, Ordering};

/// The classes of HTTP statuses, as their label names them.
const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// Counters since the manager started.
#[derive(Debug, Default)]
pub(crate) struct ApiCounters {
    answers: [AtomicU64; CLASSES.len()],
    /// The open streams of changes.
    streams: AtomicU64,
}

impl ApiCounters {
    /// Counts an answer with this HTTP status.
    pub(crate) fn count_answer(&self, status: u16) {
        let class = usize::from(status / 100).checked_sub(1);
        if let Some(count) = class.and_then(|class| self.answers.get(class)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The answers by class of status.
    pub(crate) fn answers(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.answers.iter().map(|it| it.load(Ordering::Relaxed));
        CLASSES.into_iter().zip(counts)
    }

    /// Counts an open stream.
    pub(crate) fn add_stream(&self) {
        self.streams.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of a stream.
    pub(crate) fn remove_stream(&self) {
        self.streams.fetch_sub(1, Ordering::Relaxed);
    }

    /// The open streams.
    pub(crate) fn streams(&self) -> u64 {
        self.streams.load(Ordering::Relaxed)
    }
}
