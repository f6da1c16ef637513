//! Durability classes: the failures that an acknowledged write survives.
//!
//! Invariants: a pool has the class of its medium unless its maker stated another. A class that
//! promises more than the medium is known to keep is accepted only if the maker vouches for it.

use crate::map_error::MapError;
use std::fmt;
use std::str::FromStr;

/// The failure that acknowledged data survives, by the kind of its medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// DAX memory mapped with MAP_SYNC: flushed and fenced stores survive power loss.
    Pmem,
    /// Memory with its caches in the persistence domain: fenced stores survive power loss, and
    /// nothing needs to be flushed.
    Eadr,
    /// A plain file: stores survive power loss after [`crate::Media::sync`], not after a fence.
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

    /// Whether a medium of class `medium` is known to keep this promise. No medium reports whether
    /// the caches before it survive power loss.
    fn is_provided_by(self, medium: Durability) -> bool {
        match (self, medium) {
            (Durability::Process, _) => true,
            // DAX files can be synced like others.
            (Durability::FileSync, Durability::Pmem) => true,
            (wanted, medium) => wanted == medium,
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

/// A class that the maker of a pool stated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatedClass {
    /// The class.
    pub class: Durability,
    /// Whether the maker vouches for the medium where nothing shows that it keeps the promise.
    pub is_trusted: bool,
}

impl StatedClass {
    /// The class, if a medium of class `medium` can have it. A character
    /// device can only be mapped.
    pub(crate) fn check_medium(
        self,
        medium: Durability,
        is_character_device: bool,
    ) -> Result<Durability, MapError> {
        let StatedClass { class, is_trusted } = self;
        if class == Durability::FileSync && is_character_device {
            return Err(MapError::CannotSync);
        }
        match is_trusted || class.is_provided_by(medium) {
            true => Ok(class),
            false => Err(MapError::ClassNotProvided { class, medium }),
        }
    }
}
