//! The durability class of a medium, and the class that the maker of a pool stated.
//!
//! Invariants: a pool has the class of its medium unless its maker stated another. A class that
//! promises more than the medium is known to keep is accepted only if the maker vouches for it.

use crate::map_error::MapError;
pub use pagemesh_base::durability::{Durability, UnknownDurability};

/// Whether a medium of class `medium` is known to keep the promise of `class`. No medium reports whether
/// the caches before it survive power loss.
fn is_provided_by(class: Durability, medium: Durability) -> bool {
    match (class, medium) {
        (Durability::Process, _) => true,
        // DAX files can be synced like others.
        (Durability::FileSync, Durability::Pmem) => true,
        (wanted, medium) => wanted == medium,
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
        if is_trusted || is_provided_by(class, medium) {
            Ok(class)
        } else {
            Err(MapError::ClassNotProvided { class, medium })
        }
    }
}
