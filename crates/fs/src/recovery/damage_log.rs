//! Inconsistencies that a mount found.

use crate::error::{FsError, Result};
use crate::format::inode::Ino;
use pagemesh_base::space::SpaceError;
use std::collections::HashSet;

/// Damages that are reported one by one.
const REPORTED_MAX: usize = 4;

/// Inconsistencies that were found.
#[derive(Default)]
pub(crate) struct DamageLog {
    reported: Vec<String>,
    pub(crate) count: u64,
    /// Inodes with untrusted content.
    pub(crate) untrusted: HashSet<Ino>,
}

impl DamageLog {
    pub(crate) fn record(&mut self, what: impl FnOnce() -> String) {
        self.count += 1;
        if self.reported.len() < REPORTED_MAX {
            let what = what();
            tracing::error!(%what, "the file system is damaged");
            self.reported.push(what);
        }
    }

    /// The report of all damages; `None` if there are none.
    pub(crate) fn summary(&self) -> Option<String> {
        let more = self.count - self.reported.len() as u64;
        let told = self.reported.join("; ");
        match (self.count, more) {
            (0, _) => None,
            (_, 0) => Some(told),
            (_, more) => Some(format!("{told}; and {more} more")),
        }
    }
}

/// The text of a damage. Returns other errors, such as an unreachable volume, unchanged.
pub(crate) fn damage_text(error: FsError) -> Result<String> {
    match error {
        FsError::Damaged { what, cause } => Ok(format!("{what} is damaged: {cause}")),
        FsError::Space(cause @ SpaceError::Damaged { .. }) => Ok(cause.to_string()),
        other => Err(other),
    }
}

pub(crate) fn owner_name(ino: Ino) -> String {
    match ino {
        Ino::TABLE => "the inode table".into(),
        Ino(number) => format!("inode {number}"),
    }
}
