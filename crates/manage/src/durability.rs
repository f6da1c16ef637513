//! Durability classes: what an acknowledgement of a pool promises.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use utoipa::ToSchema;

/// A class, the strongest first. The copies of a volume are of one class, so
/// that a volume promises one thing.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Durability {
    /// Flushed lines on persistent memory.
    Pmem,
    /// Persistent caches.
    Eadr,
    /// Durable when a flush has completed.
    FileSync,
    /// Survives the death of processes, not of the machine.
    Process,
}

impl Durability {
    /// The word of the class.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Durability::Pmem => "pmem",
            Durability::Eadr => "eadr",
            Durability::FileSync => "file-sync",
            Durability::Process => "process",
        }
    }
}

/// The text names no class.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no durability class '{0}'; there are pmem, eadr, file-sync and process")]
pub struct UnknownClass(pub String);

impl FromStr for Durability {
    type Err = UnknownClass;

    fn from_str(word: &str) -> Result<Durability, UnknownClass> {
        let all = [
            Durability::Pmem,
            Durability::Eadr,
            Durability::FileSync,
            Durability::Process,
        ];
        let found = all.into_iter().find(|class| class.as_str() == word);
        found.ok_or_else(|| UnknownClass(word.into()))
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
