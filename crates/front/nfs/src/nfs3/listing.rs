//! Listings of directories: READDIR and READDIRPLUS.
//!
//! A [`Listing`] encodes entries while the file system visits them, and counts their bytes against
//! the limits of the client. Its entries become the tail of the reply, so that they are not copied.
//!
//! A limit of a client (`count`, `maxcount`) covers the whole result without its status. The limit
//! `dircount` covers only the numbers, names and cookies of entries. It is a hint about the work of
//! the server: the first entry may exceed it, or else a client with a low one could not go on.

use crate::handle::{EncodedHandle, HandleBytes};
use crate::limits::LISTING_BYTES_MAX;
use crate::nfs3::attributes::Attributes;
use crate::nfs3::status::{Answer, Status};
use crate::xdr::{Decode, Encode, Reader, UNIT_BYTES, Writer, XdrError};
use bytes::Bytes;

/// A number that changes when cookies expire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CookieVerifier(pub [u8; 8]);

impl CookieVerifier {
    /// Bytes on the wire.
    const BYTES: usize = 8;
}

impl Decode<'_> for CookieVerifier {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        reader.fixed().copied().map(Self)
    }
}

impl Encode for CookieVerifier {
    fn encode(&self, writer: &mut Writer) {
        writer.fixed(&self.0);
    }
}

/// The limits of one listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListingBudget {
    /// Bytes of the whole result, at most [`LISTING_BYTES_MAX`].
    pub result_bytes: u32,
    /// Bytes of the numbers, names and cookies.
    pub name_bytes: u32,
}

/// The arguments of READDIR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListArguments<'a> {
    /// The directory.
    pub directory: HandleBytes<'a>,
    /// The cookie of the last known entry; 0 for the start.
    pub cookie: u64,
    /// The verifier that came with the cookie.
    pub verifier: CookieVerifier,
    /// The limits of the result.
    pub budget: ListingBudget,
}

impl<'a> Decode<'a> for ListArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            directory: HandleBytes::decode(reader)?,
            cookie: reader.u64()?,
            verifier: CookieVerifier::decode(reader)?,
            budget: ListingBudget {
                result_bytes: reader.u32()?.min(LISTING_BYTES_MAX),
                name_bytes: LISTING_BYTES_MAX,
            },
        })
    }
}

/// The arguments of READDIRPLUS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListPlusArguments<'a>(pub ListArguments<'a>);

impl<'a> Decode<'a> for ListPlusArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        let directory = HandleBytes::decode(reader)?;
        let cookie = reader.u64()?;
        let verifier = CookieVerifier::decode(reader)?;
        let name_bytes = reader.u32()?.min(LISTING_BYTES_MAX);
        let result_bytes = reader.u32()?.min(LISTING_BYTES_MAX);
        Ok(Self(ListArguments {
            directory,
            cookie,
            verifier,
            budget: ListingBudget {
                result_bytes,
                name_bytes,
            },
        }))
    }
}

/// An entry of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The number of the inode.
    pub inode: u64,
    /// The name.
    pub name: &'a [u8],
    /// The cookie that continues after this entry; not 0.
    pub cookie: u64,
}

impl Encode for Entry<'_> {
    fn encode(&self, writer: &mut Writer) {
        writer.u64(self.inode);
        writer.opaque(self.name);
        writer.u64(self.cookie);
    }
}

/// The part of an entry that only READDIRPLUS has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntryFile {
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// The handle of the file.
    pub handle: Option<EncodedHandle>,
}

impl Encode for EntryFile {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.attributes);
        writer.value(&self.handle);
    }
}

/// Whether a listing takes more entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// The entry was added; add the next one.
    Left,
    /// The entry did not fit. Stop.
    Full,
}

/// Bytes of a result without entries: the attributes of the directory, the verifier, the end of the
/// list and the mark of the last entry.
const FIXED_BYTES: usize =
    UNIT_BYTES + Attributes::BYTES + CookieVerifier::BYTES + UNIT_BYTES + UNIT_BYTES;

/// Entries of a directory, encoded.
#[derive(Debug)]
pub struct Listing {
    budget: ListingBudget,
    entries: Writer,
    entry_count: usize,
    name_bytes: usize,
    is_full: bool,
}

impl Listing {
    /// A listing without entries.
    #[must_use]
    pub fn new(budget: ListingBudget) -> Self {
        Self {
            budget,
            entries: Writer::new(),
            entry_count: 0,
            name_bytes: 0,
            is_full: false,
        }
    }

    /// The number of entries.
    #[must_use]
    pub fn entry_count(&self) -> usize {
        self.entry_count
    }

    /// Adds an entry of READDIR if it fits. After one that does not fit, none does.
    pub fn add(&mut self, entry: &Entry<'_>) -> Room {
        self.add_with(entry, &())
    }

    /// Adds an entry of READDIRPLUS if it fits. After one that does not fit, none does.
    pub fn add_plus(&mut self, entry: &Entry<'_>, file: &EntryFile) -> Room {
        self.add_with(entry, file)
    }

    fn add_with(&mut self, entry: &Entry<'_>, file: &impl Encode) -> Room {
        if self.is_full {
            return Room::Full;
        }
        let start = self.entries.len();
        self.entries.bool(true);
        self.entries.value(entry);
        let name_bytes = self.name_bytes + self.entries.len() - start - UNIT_BYTES;
        self.entries.value(file);
        let result_bytes = FIXED_BYTES + self.entries.len();
        let is_beyond_names = self.entry_count > 0 && name_bytes > self.budget.name_bytes as usize;
        if result_bytes > self.budget.result_bytes as usize || is_beyond_names {
            self.entries.truncate(start);
            self.is_full = true;
            return Room::Full;
        }
        self.entry_count += 1;
        self.name_bytes = name_bytes;
        Room::Left
    }

    /// The result with these entries. `is_end` tells that the directory has no entries after them;
    /// a listing with an entry that did not fit never has the end.
    ///
    /// # Errors
    /// [`Status::TooSmall`] if the result has no room for the first entry, or for none at all.
    pub fn finish(
        self,
        directory: Option<Attributes>,
        verifier: CookieVerifier,
        is_end: bool,
    ) -> Result<ListedEntries, Status> {
        let has_no_room = FIXED_BYTES > self.budget.result_bytes as usize;
        if has_no_room || (self.is_full && self.entry_count == 0) {
            return Err(Status::TooSmall);
        }
        let mut entries = self.entries;
        entries.bool(false);
        entries.bool(is_end && !self.is_full);
        Ok(ListedEntries {
            directory,
            verifier,
            entries: entries.into_bytes().into(),
        })
    }
}

/// The result of a listing; [`Listing::finish`] makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedEntries {
    directory: Option<Attributes>,
    verifier: CookieVerifier,
    entries: Bytes,
}

impl Encode for ListedEntries {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.directory);
        writer.value(&self.verifier);
    }

    fn tail(&self) -> Bytes {
        self.entries.clone()
    }
}

/// The result of READDIR and READDIRPLUS. A failure has the attributes of the directory.
pub type ListReply = Answer<ListedEntries, Option<Attributes>>;

#[cfg(test)]
mod tests;
