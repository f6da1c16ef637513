//! Durability classes: what an acknowledgement survives.
//!
//! Invariants: a class is a fact of the medium unless the pool's maker stated
//! another. One that promises more than the medium is known to keep is taken
//! only on the maker's word.

use crate::mapped_media::MapError;
use std::fmt;
use std::str::FromStr;

/// What survives what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// DAX memory mapped with MAP_SYNC: a flush and a fence survive power loss.
    Pmem,
    /// Memory whose caches are in the persistence domain: a fence survives
    /// power loss, and nothing needs to be flushed.
    Eadr,
    /// A plain file: [`crate::Media::sync`] survives power loss, a fence does
    /// not.
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

    /// Whether a medium of class `medium` is known to keep this promise. No
    /// medium tells whether the caches before it survive power loss.
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

/// The text names no class.
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
    /// Whether the maker answers for the medium where nothing shows that it
    /// keeps the promise.
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
