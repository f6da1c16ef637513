//! Durability classes: the failures that an acknowledged write survives. A pool has one, a brick reports it, and all
//! copies of a volume have the same, so that the volume makes one promise.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The failure that acknowledged data survives, the strongest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Durability {
    /// DAX memory mapped with MAP_SYNC: flushed and fenced stores survive power loss.
    Pmem,
    /// Memory with its caches in the persistence domain: fenced stores survive power loss, and
    /// nothing needs to be flushed.
    Eadr,
    /// A plain file: stores survive power loss after a sync of the file, not after a fence.
    FileSync,
    /// tmpfs, hugetlbfs or page cache: survives the death of processes only.
    Process,
}

impl Durability {
    /// Every class, the strongest first.
    pub const ALL: [Durability; 4] = [
        Durability::Pmem,
        Durability::Eadr,
        Durability::FileSync,
        Durability::Process,
    ];

    /// The name of the class.
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

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The text is not the name of a class.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no durability class '{0}'; there are pmem, eadr, file-sync and process")]
pub struct UnknownDurability(pub String);

impl FromStr for Durability {
    type Err = UnknownDurability;

    fn from_str(text: &str) -> Result<Durability, UnknownDurability> {
        let mut all = Durability::ALL.into_iter();
        all.find(|class| class.as_str() == text)
            .ok_or_else(|| UnknownDurability(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_name_of_class() {
        for class in Durability::ALL {
            let json = serde_json::to_string(&class).expect("JSON");
            assert_eq!(json, format!("\"{class}\""));
            assert_eq!(serde_json::from_str::<Durability>(&json).ok(), Some(class));
            assert_eq!(class.as_str().parse(), Ok(class));
        }
    }
}
