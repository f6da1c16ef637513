//! Durability classes: the promise of a pool's acknowledgements.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use utoipa::ToSchema;

/// A durability class, the strongest first. All copies of a volume have one class, so that the
/// volume makes one promise.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Durability {
    /// Persistent memory, with lines flushed from the caches.
    Pmem,
    /// Persistent memory with persistent caches.
    Eadr,
    /// A file: durable after a completed flush.
    FileSync,
    /// Survives the death of processes, but not of the machine.
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
pub struct UnknownDurability(pub String);

impl FromStr for Durability {
    type Err = UnknownDurability;

    fn from_str(word: &str) -> Result<Durability, UnknownDurability> {
        let all = [
            Durability::Pmem,
            Durability::Eadr,
            Durability::FileSync,
            Durability::Process,
        ];
        let found = all.into_iter().find(|class| class.as_str() == word);
        found.ok_or_else(|| UnknownDurability(word.into()))
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
