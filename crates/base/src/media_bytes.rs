//! Bytes that a pool writes to its medium, as the pool counts them and as bricks and the manager report them.

use serde::{Deserialize, Serialize};

/// Bytes written to a medium, by their use. Sums saturate: counts may come from outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MediaBytes {
    /// Pages, nodes of page tables that were zeroed, and parts of pages that were changed in place.
    pub data: u64,
    /// Lines of journals.
    pub journal: u64,
    /// Slots, checksums, the bitmap, objects, the in-flight table, superblocks.
    pub tables: u64,
}

impl MediaBytes {
    /// Each part with its name in metrics and tables.
    #[must_use]
    pub fn by_kind(&self) -> [(&'static str, u64); 3] {
        [
            ("data", self.data),
            ("journal", self.journal),
            ("tables", self.tables),
        ]
    }

    /// All bytes.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.data.saturating_add(self.metadata())
    }

    /// All bytes but the data's.
    #[must_use]
    pub fn metadata(&self) -> u64 {
        self.journal.saturating_add(self.tables)
    }

    /// Adds other bytes.
    pub fn add(&mut self, other: MediaBytes) {
        self.data = self.data.saturating_add(other.data);
        self.journal = self.journal.saturating_add(other.journal);
        self.tables = self.tables.saturating_add(other.tables);
    }

    /// The difference to an earlier value of the same counters.
    #[must_use]
    pub fn since(self, earlier: MediaBytes) -> MediaBytes {
        MediaBytes {
            data: self.data.saturating_sub(earlier.data),
            journal: self.journal.saturating_sub(earlier.journal),
            tables: self.tables.saturating_sub(earlier.tables),
        }
    }
}
