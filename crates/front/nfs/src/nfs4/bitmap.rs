//! Sets of attributes (`bitmap4`), and the numbers of attributes of RFC 8881, section 5.

use crate::limits::BITMAP_WORDS_MAX;
use crate::xdr::{Decode, Encode, Reader, Writer, XdrError};

/// A set of attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bitmap(pub [u32; BITMAP_WORDS_MAX]);

impl Bitmap {
    /// The set of these attributes.
    #[must_use]
    pub const fn of(attributes: &[u32]) -> Self {
        let mut words = [0; BITMAP_WORDS_MAX];
        let mut at = 0;
        while at < attributes.len() {
            words[attributes[at] as usize / 32] |= 1 << (attributes[at] % 32);
            at += 1;
        }
        Self(words)
    }

    /// The set without an attribute.
    #[must_use]
    pub const fn without_one(mut self, attribute: u32) -> Self {
        self.0[attribute as usize / 32] &= !(1 << (attribute % 32));
        self
    }

    /// Whether the set has an attribute.
    #[must_use]
    pub fn contains(&self, attribute: u32) -> bool {
        let word = self.0.get(attribute as usize / 32);
        word.is_some_and(|word| word >> (attribute % 32) & 1 == 1)
    }

    /// Adds an attribute below `32 * BITMAP_WORDS_MAX`.
    pub fn insert(&mut self, attribute: u32) {
        if let Some(word) = self.0.get_mut(attribute as usize / 32) {
            *word |= 1 << (attribute % 32);
        }
    }

    /// The attributes of both sets.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] & other.0[at]))
    }

    /// The attributes of either set.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] | other.0[at]))
    }

    /// The attributes of this set that the other does not have.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] & !other.0[at]))
    }

    /// Whether the set has no attribute.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0 == Self::default().0
    }

    /// The attributes, in the order of their numbers.
    pub fn iter(self) -> impl Iterator<Item = u32> {
        (0..32 * BITMAP_WORDS_MAX as u32).filter(move |attribute| self.contains(*attribute))
    }
}

impl Decode<'_> for Bitmap {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        let count = reader.length("words of a bitmap", BITMAP_WORDS_MAX)?;
        let mut words = [0; BITMAP_WORDS_MAX];
        for word in &mut words[..count] {
            *word = reader.u32()?;
        }
        Ok(Self(words))
    }
}

/// The words up to the last one that is not zero.
impl Encode for Bitmap {
    fn encode(&self, writer: &mut Writer) {
        let is_set = |word: &u32| *word != 0;
        let count = self.0.iter().rposition(is_set).map_or(0, |at| at + 1);
        writer.length(count);
        self.0[..count].iter().for_each(|word| writer.u32(*word));
    }
}

/// Attributes and their numbers.
#[allow(missing_docs)] // The RFC has these names.
pub mod attribute {
    pub const SUPPORTED_ATTRS: u32 = 0;
    pub const TYPE: u32 = 1;
    pub const FH_EXPIRE_TYPE: u32 = 2;
    pub const CHANGE: u32 = 3;
    pub const SIZE: u32 = 4;
    pub const LINK_SUPPORT: u32 = 5;
    pub const SYMLINK_SUPPORT: u32 = 6;
    pub const NAMED_ATTR: u32 = 7;
    pub const FSID: u32 = 8;
    pub const UNIQUE_HANDLES: u32 = 9;
    pub const LEASE_TIME: u32 = 10;
    pub const RDATTR_ERROR: u32 = 11;
    pub const ACL: u32 = 12;
    pub const ACLSUPPORT: u32 = 13;
    pub const CANSETTIME: u32 = 15;
    pub const CASE_INSENSITIVE: u32 = 16;
    pub const CASE_PRESERVING: u32 = 17;
    pub const CHOWN_RESTRICTED: u32 = 18;
    pub const FILEHANDLE: u32 = 19;
    pub const FILEID: u32 = 20;
    pub const FILES_AVAIL: u32 = 21;
    pub const FILES_FREE: u32 = 22;
    pub const FILES_TOTAL: u32 = 23;
    pub const HOMOGENEOUS: u32 = 26;
    pub const MAXFILESIZE: u32 = 27;
    pub const MAXLINK: u32 = 28;
    pub const MAXNAME: u32 = 29;
    pub const MAXREAD: u32 = 30;
    pub const MAXWRITE: u32 = 31;
    pub const MODE: u32 = 33;
    pub const NO_TRUNC: u32 = 34;
    pub const NUMLINKS: u32 = 35;
    pub const OWNER: u32 = 36;
    pub const OWNER_GROUP: u32 = 37;
    pub const RAWDEV: u32 = 41;
    pub const SPACE_AVAIL: u32 = 42;
    pub const SPACE_FREE: u32 = 43;
    pub const SPACE_TOTAL: u32 = 44;
    pub const SPACE_USED: u32 = 45;
    pub const TIME_ACCESS: u32 = 47;
    pub const TIME_ACCESS_SET: u32 = 48;
    pub const TIME_CREATE: u32 = 50;
    pub const TIME_DELTA: u32 = 51;
    pub const TIME_METADATA: u32 = 52;
    pub const TIME_MODIFY: u32 = 53;
    pub const TIME_MODIFY_SET: u32 = 54;
    pub const MOUNTED_ON_FILEID: u32 = 55;
    pub const SUPPATTR_EXCLCREAT: u32 = 75;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{decode_error, decoded, encoded, words};

    #[test]
    fn bitmaps_have_at_most_three_words() {
        let bitmap: Bitmap = decoded(&words(&[2, 0x0010_000a, 1]));
        assert_eq!(bitmap.iter().collect::<Vec<_>>(), [1, 3, 20, 32]);
        assert_eq!(encoded(&bitmap), words(&[2, 0x0010_000a, 1]));
        assert_eq!(encoded(&Bitmap::default()), words(&[0]));
        let error = decode_error::<Bitmap>(&words(&[4, 0, 0, 0, 0]));
        assert!(matches!(error, XdrError::TooLong { len: 4, max: 3, .. }));
    }

    #[test]
    fn sets_are_combined() {
        let (some, other) = (Bitmap::of(&[1, 40, 75]), Bitmap::of(&[40, 50]));
        assert_eq!(some.and(other), Bitmap::of(&[40]));
        assert_eq!(some.without(other), Bitmap::of(&[1, 75]));
        assert_eq!(some.or(other), Bitmap::of(&[1, 40, 50, 75]));
        assert!(!some.contains(500) && some.contains(75));
        let mut built = Bitmap::default();
        built.insert(75);
        built.insert(500);
        assert_eq!(built, Bitmap::of(&[75]));
        assert!(!built.is_empty() && Bitmap::default().is_empty());
    }
}
