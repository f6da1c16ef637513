//! READDIR and READDIRPLUS.

use super::{Attributes, Handle, Nfs3Result, PROGRAM, VERSION, result};
use crate::connection::REPLY_BYTES_MAX;
use crate::rpc::Procedure;
use crate::xdr::{DecodeError, Decoder, Encoder};

/// Bytes of a name that the client takes.
const NAME_BYTES_MAX: u32 = REPLY_BYTES_MAX as u32;

/// READDIR.
#[derive(Clone, Copy, Debug)]
pub struct ReadDir<'a> {
    /// The directory.
    pub directory: &'a Handle,
    /// The cookie of the last entry of the part before; 0: the start.
    pub cookie: u64,
    /// The verifier of the part before.
    pub verifier: [u8; 8],
    /// The bytes of the result.
    pub count: u32,
}

/// READDIRPLUS.
#[derive(Clone, Copy, Debug)]
pub struct ReadDirPlus<'a> {
    /// The directory.
    pub directory: &'a Handle,
    /// The cookie of the last entry of the part before; 0: the start.
    pub cookie: u64,
    /// The verifier of the part before.
    pub verifier: [u8; 8],
    /// The bytes of names, numbers and cookies.
    pub dir_count: u32,
    /// The bytes of the result.
    pub max_count: u32,
}

/// A part of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing<E> {
    /// The attributes of the directory.
    pub directory: Option<Attributes>,
    /// The verifier for the next part.
    pub verifier: [u8; 8],
    /// The entries.
    pub entries: Vec<E>,
    /// Whether no entries follow.
    pub is_end: bool,
}

/// An entry of READDIR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The number of the file.
    pub file_id: u64,
    /// The name.
    pub name: Vec<u8>,
    /// The cookie behind the entry.
    pub cookie: u64,
}

/// An entry of READDIRPLUS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlusEntry {
    /// The name and its numbers.
    pub entry: Entry,
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// The file.
    pub handle: Option<Handle>,
}

fn decode_entry(fields: &mut Decoder<'_>) -> Result<Entry, DecodeError> {
    Ok(Entry {
        file_id: fields.u64("fileid")?,
        name: fields.opaque("name", NAME_BYTES_MAX)?.to_vec(),
        cookie: fields.u64("cookie")?,
    })
}

fn decode_plus_entry(fields: &mut Decoder<'_>) -> Result<PlusEntry, DecodeError> {
    Ok(PlusEntry {
        entry: decode_entry(fields)?,
        attributes: Attributes::decode_after(fields)?,
        handle: fields.optional("handle follows", Handle::decode)?,
    })
}

fn decode_listing<E>(
    fields: &mut Decoder<'_>,
    entry: impl Fn(&mut Decoder<'_>) -> Result<E, DecodeError>,
) -> Result<Listing<E>, DecodeError> {
    let directory = Attributes::decode_after(fields)?;
    let verifier = fields.fixed("verifier")?;
    let mut entries = Vec::new();
    while fields.bool("entry follows")? {
        entries.push(entry(fields)?);
    }
    Ok(Listing {
        directory,
        verifier,
        entries,
        is_end: fields.bool("eof")?,
    })
}

impl Procedure for ReadDir<'_> {
    type Result = Nfs3Result<Listing<Entry>, Option<Attributes>>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 16;

    fn encode(&self, out: &mut Encoder) {
        self.directory.encode(out);
        out.u64(self.cookie).fixed(&self.verifier).u32(self.count);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        result(
            fields,
            |fields| decode_listing(fields, decode_entry),
            Attributes::decode_after,
        )
    }
}

impl Procedure for ReadDirPlus<'_> {
    type Result = Nfs3Result<Listing<PlusEntry>, Option<Attributes>>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 17;

    fn encode(&self, out: &mut Encoder) {
        self.directory.encode(out);
        out.u64(self.cookie).fixed(&self.verifier);
        out.u32(self.dir_count).u32(self.max_count);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        result(
            fields,
            |fields| decode_listing(fields, decode_plus_entry),
            Attributes::decode_after,
        )
    }
}
