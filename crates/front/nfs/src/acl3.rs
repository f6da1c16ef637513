//! The ACL protocol beside NFSv3 (program 100227), by which Linux and Solaris clients read and set POSIX ACLs. It has no RFC; the
//! format is the one of `nfsacl.h` of Linux: an ACL is a number of entries, and an array of tag, id and rights.
//!
//! A mask without named entries is an artefact of Solaris, which has no list of three entries: a server sends it with the rights of
//! the group, and removes it from a list that a client sets.

use crate::handle::HandleBytes;
use crate::limits::ACL_ENTRIES_MAX;
use crate::nfs3::attributes::Attributes;
use crate::nfs3::status::{Answer, Status};
use crate::rpc::ArgumentsError;
use crate::xdr::{Decode, Encode, Reader, Writer, XdrError};
use pagemesh_fs::{Acl, AclEntry, AclTag};

/// The RPC program.
pub const PROGRAM: u32 = 100_227;
/// Its version beside NFSv3.
pub const VERSION: u32 = 3;

/// The bits of a mask: the parts of a call or reply.
pub mod mask {
    /// The access ACL.
    pub const ACCESS: u32 = 1;
    /// The number of its entries.
    pub const ACCESS_COUNT: u32 = 2;
    /// The default ACL.
    pub const DEFAULT: u32 = 4;
    /// The number of its entries.
    pub const DEFAULT_COUNT: u32 = 8;
    /// All parts.
    pub const ALL: u32 = 15;
}

/// The mark of the tags of a default ACL.
const DEFAULT_TAG: u32 = 0x1000;
const ENTRY_BYTES: usize = 12;
const RIGHTS: u32 = 7;

/// An ACL, as the client sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedAcl<'a> {
    /// Tag, id and rights of each entry.
    entries: &'a [u8],
}

impl<'a> Decode<'a> for ReceivedAcl<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        let counted = reader.u32()?;
        let len = reader.length("ACL", ACL_ENTRIES_MAX)?;
        let entries = reader.units(len * ENTRY_BYTES)?;
        match usize::try_from(counted) == Ok(len) {
            true => Ok(Self { entries }),
            false => Err(XdrError::Contradiction {
                what: "ACL",
                counted,
                sent: entries.len(),
            }),
        }
    }
}

fn received_entry(bytes: &[u8; ENTRY_BYTES]) -> Option<AclEntry> {
    let (words, _) = bytes.as_chunks::<4>();
    let [tag, id, rights] = *words else {
        return None;
    };
    let [tag, id, rights] = [tag, id, rights].map(u32::from_be_bytes);
    let tag = u16::try_from(tag & !DEFAULT_TAG).ok()?;
    let tag = AclTag::from_raw(tag, id)?;
    // Solaris sets further bits of the mask.
    let rights = match tag {
        AclTag::Mask => rights & RIGHTS,
        _ => rights,
    };
    Some(AclEntry {
        tag,
        rights: u16::try_from(rights).ok()?,
    })
}

impl ReceivedAcl<'_> {
    /// The ACL in order; `None` without entries: it is to be removed.
    ///
    /// # Errors
    /// [`Status::Invalid`] if the entries are no ACL, or too many.
    pub fn acl(&self) -> Result<Option<Acl>, Status> {
        let (entries, _) = self.entries.as_chunks::<ENTRY_BYTES>();
        let entries: Option<Vec<AclEntry>> = entries.iter().map(received_entry).collect();
        let mut entries = entries.ok_or(Status::Invalid)?;
        if entries.is_empty() {
            return Ok(None);
        }
        entries.sort_by_key(|entry| entry.tag);
        remove_artificial_mask(&mut entries);
        Acl::new(entries).map(Some).map_err(|_| Status::Invalid)
    }
}

/// Removes a mask that a list of four entries has only because Solaris wants one.
fn remove_artificial_mask(entries: &mut Vec<AclEntry>) {
    let rights = |tag| {
        let found = entries.iter().find(|entry: &&AclEntry| entry.tag == tag);
        found.map(|entry| entry.rights)
    };
    let mask = rights(AclTag::Mask);
    if entries.len() == 4 && mask.is_some() && mask == rights(AclTag::GroupObj) {
        entries.retain(|entry| entry.tag != AclTag::Mask);
    }
}

/// An ACL of a reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SentAcl {
    entries: Vec<[u32; 3]>,
    /// The entries are counted, and not sent.
    is_counted: bool,
}

impl SentAcl {
    /// An ACL with its entries, or their number, of a file with this owner and group.
    #[must_use]
    pub fn new(acl: &Acl, is_default: bool, is_counted: bool, (uid, gid): (u32, u32)) -> Self {
        let mark = if is_default { DEFAULT_TAG } else { 0 };
        let word = |entry: &AclEntry| {
            let (tag, id) = entry.tag.to_raw();
            let id = match entry.tag {
                AclTag::UserObj => uid,
                AclTag::GroupObj => gid,
                _ => id.unwrap_or(0),
            };
            [u32::from(tag) | mark, id, entry.rights.into()]
        };
        let mut entries: Vec<AclEntry> = acl.entries().to_vec();
        if acl.is_mode() {
            let group = entries.iter().find(|entry| entry.tag == AclTag::GroupObj);
            let rights = group.map_or(0, |entry| entry.rights);
            let tag = AclTag::Mask;
            entries.push(AclEntry { tag, rights });
            entries.sort_by_key(|entry| entry.tag);
        }
        Self {
            entries: entries.iter().map(word).collect(),
            is_counted,
        }
    }
}

impl Encode for SentAcl {
    fn encode(&self, writer: &mut Writer) {
        writer.length(self.entries.len());
        if self.is_counted {
            writer.length(0);
            return;
        }
        writer.length(self.entries.len());
        for word in self.entries.iter().flatten() {
            writer.u32(*word);
        }
    }
}

/// The arguments of GETACL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetAclArguments<'a> {
    /// The file.
    pub file: HandleBytes<'a>,
    /// The parts that the client wants ([`mask`]).
    pub wanted: u32,
}

/// The arguments of SETACL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetAclArguments<'a> {
    /// The file.
    pub file: HandleBytes<'a>,
    /// The parts to set ([`mask`]).
    pub parts: u32,
    /// The access ACL.
    pub access: ReceivedAcl<'a>,
    /// The default ACL.
    pub default: ReceivedAcl<'a>,
}

/// A call with its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AclCall<'a> {
    /// Does nothing; the result is `()`.
    Null,
    /// Asks for the ACLs of a file; the result is a [`GetAclReply`].
    Get(GetAclArguments<'a>),
    /// Sets ACLs of a file; the result is a [`SetAclReply`].
    Set(SetAclArguments<'a>),
}

impl<'a> AclCall<'a> {
    /// The call with this procedure and these arguments.
    ///
    /// # Errors
    /// If there is no such procedure, or the arguments are malformed.
    pub fn decode(procedure: u32, mut arguments: Reader<'a>) -> Result<Self, ArgumentsError> {
        let reader = &mut arguments;
        Ok(match procedure {
            0 => Self::Null,
            1 => Self::Get(GetAclArguments {
                file: HandleBytes::decode(reader)?,
                wanted: reader.u32()?,
            }),
            2 => Self::Set(SetAclArguments {
                file: HandleBytes::decode(reader)?,
                parts: reader.u32()?,
                access: ReceivedAcl::decode(reader)?,
                default: ReceivedAcl::decode(reader)?,
            }),
            other => return Err(ArgumentsError::Procedure(other)),
        })
    }
}

/// The ACLs of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileAcls {
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// The parts that follow.
    pub parts: u32,
    /// The access ACL. A file without one has the rights of its mode.
    pub access: SentAcl,
    /// The default ACL.
    pub default: SentAcl,
}

impl Encode for FileAcls {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.attributes);
        writer.u32(self.parts);
        writer.value(&self.access);
        writer.value(&self.default);
    }
}

/// The result of [`AclCall::Get`].
pub type GetAclReply = Answer<FileAcls, Option<Attributes>>;
/// The result of [`AclCall::Set`].
pub type SetAclReply = Answer<Option<Attributes>, Option<Attributes>>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::Refusal;
    use crate::testing::{ATTRIBUTE_WORDS, attributes, encoded, handle_on_wire, words};

    fn entry(tag: AclTag, rights: u16) -> AclEntry {
        AclEntry { tag, rights }
    }

    fn list() -> Acl {
        Acl::new(vec![
            entry(AclTag::UserObj, 7),
            entry(AclTag::User(50), 6),
            entry(AclTag::GroupObj, 5),
            entry(AclTag::Mask, 4),
            entry(AclTag::Other, 1),
        ])
        .expect("valid")
    }

    /// The ACL of these words, as a client sends them.
    fn received(entries: &[u32]) -> Result<Option<Acl>, Status> {
        let bytes = words(entries);
        ReceivedAcl { entries: &bytes }.acl()
    }

    #[rustfmt::skip]
    const LIST: [u32; 15] = [
        1, 1000, 7,
        2, 50, 6,
        4, 100, 5,
        16, 0, 4,
        32, 0, 1,
    ];

    #[test]
    fn reply_has_acl_of_mode_with_mask() {
        let mode = SentAcl::new(&Acl::of_mode(0o754), false, false, (1000, 100));
        #[rustfmt::skip]
        let wanted = [
            4, 4,
            1, 1000, 7,
            4, 100, 5,
            16, 0, 5,
            32, 0, 4,
        ];
        assert_eq!(encoded(&mode), words(&wanted));
        let counted = SentAcl::new(&list(), false, true, (1000, 100));
        assert_eq!(encoded(&counted), words(&[5, 0]));
        let acls = FileAcls {
            attributes: Some(attributes()),
            parts: mask::ACCESS,
            access: SentAcl::new(&list(), false, false, (1000, 100)),
            default: SentAcl::default(),
        };
        let wanted = [&[1][..], &ATTRIBUTE_WORDS, &[1, 5, 5], &LIST, &[0, 0]].concat();
        assert_eq!(encoded(&acls), words(&wanted));
        let default = SentAcl::new(&list(), true, false, (1000, 100));
        assert_eq!(default.entries[1], [0x1002, 50, 6]);
    }

    #[test]
    fn received_acl_is_sorted_and_checked() {
        assert_eq!(received(&LIST), Ok(Some(list())));
        let mut mixed = LIST;
        mixed.rotate_left(6);
        mixed[0] |= DEFAULT_TAG;
        assert_eq!(received(&mixed), Ok(Some(list())));
        assert_eq!(received(&[]), Ok(None));
        for (at, word) in [(0, 3), (2, 8), (5, 1 << 20), (9, 1 << 20), (0, 0x2001)] {
            let mut bad = LIST;
            bad[at] = word;
            assert_eq!(received(&bad), Err(Status::Invalid), "word {at}");
        }
        let mut wide = LIST;
        wide[11] |= 1 << 20;
        assert_eq!(received(&wide), Ok(Some(list())));
    }

    #[test]
    fn mask_of_four_entries_is_removed() {
        let with_mask = |rights| [1, 0, 6, 4, 0, 4, 16, 0, rights, 32, 0, 0];
        assert_eq!(received(&with_mask(4)), Ok(Some(Acl::of_mode(0o640))));
        let kept = received(&with_mask(6)).expect("valid").expect("an ACL");
        assert_eq!(kept.entries().len(), 4);
    }

    #[test]
    fn calls_are_decoded_within_limits() {
        let set = [words(&[15, 5, 5]), words(&LIST), words(&[0, 0])].concat();
        let bytes = [handle_on_wire(), set].concat();
        let decode = |bytes: &[u8]| match AclCall::decode(2, Reader::new(bytes)) {
            Ok(AclCall::Set(set)) => (set.parts, set.access.acl(), set.default.acl()),
            other => panic!("{other:?}"),
        };
        assert_eq!(decode(&bytes), (15, Ok(Some(list())), Ok(None)));
        for len in 0..bytes.len() {
            let short = AclCall::decode(2, Reader::new(&bytes[..len]));
            let error = short.expect_err("a part is missing");
            assert_eq!(error.refusal(), Refusal::GarbageArguments);
        }
        for counts in [[5, 6], [6, 5], [2000, 2000], [u32::MAX, u32::MAX]] {
            let set = [words(&[15]), words(&counts), words(&LIST)].concat();
            let bytes = [handle_on_wire(), set, vec![0; 8]].concat();
            AclCall::decode(2, Reader::new(&bytes)).expect_err("the counts lie");
        }
        let get = [handle_on_wire(), words(&[5])].concat();
        let Ok(AclCall::Get(get)) = AclCall::decode(1, Reader::new(&get)) else {
            panic!("a call");
        };
        assert_eq!(get.wanted, 5);
        let unknown = AclCall::decode(3, Reader::new(&[])).expect_err("no procedure");
        assert_eq!(unknown.refusal(), Refusal::ProcedureUnavailable);
    }
}
