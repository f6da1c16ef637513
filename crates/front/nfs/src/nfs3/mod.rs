//! NFS version 3 (RFC 1813): the arguments and results of all procedures.
//!
//! [`Nfs3Call::decode`] makes a call of its arguments. The server answers it with the result type
//! that the variant names. [`FailedCall`] is the result of a failure without attributes, for any
//! procedure.

pub mod attributes;
pub mod files;
pub mod filesystem;
pub mod listing;
pub mod names;
pub mod status;

use crate::handle::HandleBytes;
use crate::rpc::ArgumentsError;
use crate::xdr::{Decode, Encode, Reader, Writer, XdrError, wire_enum};
use attributes::{AccessArguments, SetAttributesArguments};
use files::{CommitArguments, ReadArguments, WriteArguments};
use listing::{ListArguments, ListPlusArguments};
use names::{
    CreateArguments, DirectoryName, LinkArguments, MakeDirectoryArguments, MakeNodeArguments,
    RenameArguments, SymlinkArguments,
};
use status::Status;

/// The RPC program.
pub const PROGRAM: u32 = 100_003;
/// Its version.
pub const VERSION: u32 = 3;

wire_enum! {
    /// The procedures.
    pub enum Procedure, "procedure of NFSv3" {
        /// Does nothing.
        Null = 0,
        /// GETATTR.
        GetAttributes = 1,
        /// SETATTR.
        SetAttributes = 2,
        /// LOOKUP.
        Lookup = 3,
        /// ACCESS.
        Access = 4,
        /// READLINK.
        ReadSymlink = 5,
        /// READ.
        Read = 6,
        /// WRITE.
        Write = 7,
        /// CREATE.
        Create = 8,
        /// MKDIR.
        MakeDirectory = 9,
        /// SYMLINK.
        MakeSymlink = 10,
        /// MKNOD.
        MakeNode = 11,
        /// REMOVE.
        Remove = 12,
        /// RMDIR.
        RemoveDirectory = 13,
        /// RENAME.
        Rename = 14,
        /// LINK.
        Link = 15,
        /// READDIR.
        List = 16,
        /// READDIRPLUS.
        ListPlus = 17,
        /// FSSTAT.
        SpaceUsage = 18,
        /// FSINFO.
        ServerLimits = 19,
        /// PATHCONF.
        NameRules = 20,
        /// COMMIT.
        Commit = 21,
    }
}

impl Procedure {
    /// The number of optional attributes in the result of a failure: of one file, before and after
    /// a change, or both.
    const fn failure_attributes(self) -> usize {
        match self {
            Self::Null | Self::GetAttributes => 0,
            Self::Lookup
            | Self::Access
            | Self::ReadSymlink
            | Self::Read
            | Self::List
            | Self::ListPlus
            | Self::SpaceUsage
            | Self::ServerLimits
            | Self::NameRules => 1,
            Self::SetAttributes
            | Self::Write
            | Self::Create
            | Self::MakeDirectory
            | Self::MakeSymlink
            | Self::MakeNode
            | Self::Remove
            | Self::RemoveDirectory
            | Self::Commit => 2,
            Self::Link => 3,
            Self::Rename => 4,
        }
    }
}

/// The result of a failure without attributes. [`Procedure::Null`] cannot fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedCall {
    /// The procedure.
    pub procedure: Procedure,
    /// The reason.
    pub status: Status,
}

impl Encode for FailedCall {
    fn encode(&self, writer: &mut Writer) {
        if self.procedure == Procedure::Null {
            return;
        }
        writer.value(&self.status);
        for _ in 0..self.procedure.failure_attributes() {
            writer.bool(false);
        }
    }
}

/// A call with its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nfs3Call<'a> {
    /// The result is `()`.
    Null,
    /// The result is an [`attributes::GetAttributesReply`].
    GetAttributes(HandleBytes<'a>),
    /// The result is an [`attributes::SetAttributesReply`].
    SetAttributes(SetAttributesArguments<'a>),
    /// The result is a [`names::LookupReply`].
    Lookup(DirectoryName<'a>),
    /// The result is an [`attributes::AccessReply`].
    Access(AccessArguments<'a>),
    /// The result is a [`files::ReadSymlinkReply`].
    ReadSymlink(HandleBytes<'a>),
    /// The result is a [`files::ReadReply`].
    Read(ReadArguments<'a>),
    /// The result is a [`files::WriteReply`].
    Write(WriteArguments<'a>),
    /// The result is a [`names::CreateReply`].
    Create(CreateArguments<'a>),
    /// The result is a [`names::CreateReply`].
    MakeDirectory(MakeDirectoryArguments<'a>),
    /// The result is a [`names::CreateReply`].
    MakeSymlink(SymlinkArguments<'a>),
    /// The result is a [`names::CreateReply`].
    MakeNode(MakeNodeArguments<'a>),
    /// The result is a [`names::RemoveReply`].
    Remove(DirectoryName<'a>),
    /// The result is a [`names::RemoveReply`].
    RemoveDirectory(DirectoryName<'a>),
    /// The result is a [`names::RenameReply`].
    Rename(RenameArguments<'a>),
    /// The result is a [`names::LinkReply`].
    Link(LinkArguments<'a>),
    /// The result is a [`listing::ListReply`], with entries by [`listing::Listing::add`].
    List(ListArguments<'a>),
    /// The result is a [`listing::ListReply`], with entries by [`listing::Listing::add_plus`].
    ListPlus(ListPlusArguments<'a>),
    /// The result is a [`filesystem::SpaceUsageReply`].
    SpaceUsage(HandleBytes<'a>),
    /// The result is a [`filesystem::ServerLimitsReply`].
    ServerLimits(HandleBytes<'a>),
    /// The result is a [`filesystem::NameRulesReply`].
    NameRules(HandleBytes<'a>),
    /// The result is a [`files::CommitReply`].
    Commit(CommitArguments<'a>),
}

impl<'a> Nfs3Call<'a> {
    /// The call with this procedure and these arguments.
    ///
    /// # Errors
    /// If there is no such procedure, or the arguments are malformed.
    pub fn decode(procedure: u32, mut arguments: Reader<'a>) -> Result<Self, ArgumentsError> {
        let unknown = ArgumentsError::Procedure(procedure);
        let procedure = Procedure::from_number(procedure).ok_or(unknown)?;
        Ok(Self::decode_arguments(procedure, &mut arguments)?)
    }

    fn decode_arguments(procedure: Procedure, reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(match procedure {
            Procedure::Null => Self::Null,
            Procedure::GetAttributes => Self::GetAttributes(Decode::decode(reader)?),
            Procedure::SetAttributes => Self::SetAttributes(Decode::decode(reader)?),
            Procedure::Lookup => Self::Lookup(Decode::decode(reader)?),
            Procedure::Access => Self::Access(Decode::decode(reader)?),
            Procedure::ReadSymlink => Self::ReadSymlink(Decode::decode(reader)?),
            Procedure::Read => Self::Read(Decode::decode(reader)?),
            Procedure::Write => Self::Write(Decode::decode(reader)?),
            Procedure::Create => Self::Create(Decode::decode(reader)?),
            Procedure::MakeDirectory => Self::MakeDirectory(Decode::decode(reader)?),
            Procedure::MakeSymlink => Self::MakeSymlink(Decode::decode(reader)?),
            Procedure::MakeNode => Self::MakeNode(Decode::decode(reader)?),
            Procedure::Remove => Self::Remove(Decode::decode(reader)?),
            Procedure::RemoveDirectory => Self::RemoveDirectory(Decode::decode(reader)?),
            Procedure::Rename => Self::Rename(Decode::decode(reader)?),
            Procedure::Link => Self::Link(Decode::decode(reader)?),
            Procedure::List => Self::List(Decode::decode(reader)?),
            Procedure::ListPlus => Self::ListPlus(Decode::decode(reader)?),
            Procedure::SpaceUsage => Self::SpaceUsage(Decode::decode(reader)?),
            Procedure::ServerLimits => Self::ServerLimits(Decode::decode(reader)?),
            Procedure::NameRules => Self::NameRules(Decode::decode(reader)?),
            Procedure::Commit => Self::Commit(Decode::decode(reader)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::Refusal;
    use crate::testing::{encoded, words};

    #[test]
    fn procedures_have_the_numbers_of_the_rfc() {
        let numbers: Vec<u32> = Procedure::ALL.iter().map(|it| it.number()).collect();
        assert_eq!(numbers, Vec::from_iter(0..=21));
        let unknown = Nfs3Call::decode(22, Reader::new(&[])).unwrap_err();
        assert_eq!(unknown.refusal(), Refusal::ProcedureUnavailable);
    }

    #[test]
    fn calls_without_arguments_are_refused() {
        for procedure in 0..=21 {
            let decoded = Nfs3Call::decode(procedure, Reader::new(&[0; 2]));
            match procedure {
                0 => assert_eq!(decoded, Ok(Nfs3Call::Null)),
                _ => assert_eq!(decoded.unwrap_err().refusal(), Refusal::GarbageArguments),
            }
        }
    }

    #[test]
    fn procedures_that_take_a_handle_are_told_apart() {
        let bytes = words(&[4, 0x0909_0909]);
        let decode = |procedure| Nfs3Call::decode(procedure, Reader::new(&bytes));
        let file = HandleBytes(&[9; 4]);
        assert_eq!(decode(1), Ok(Nfs3Call::GetAttributes(file)));
        assert_eq!(decode(5), Ok(Nfs3Call::ReadSymlink(file)));
        assert_eq!(decode(18), Ok(Nfs3Call::SpaceUsage(file)));
        assert_eq!(decode(19), Ok(Nfs3Call::ServerLimits(file)));
        assert_eq!(decode(20), Ok(Nfs3Call::NameRules(file)));
    }

    /// The words of a failure without attributes, from the definitions in RFC 1813.
    #[test]
    fn failures_have_the_optional_values_of_the_rfc() {
        let words_of_failures = [
            0, 1, 3, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 5, 4, 2, 2, 2, 2, 2, 3,
        ];
        for (procedure, count) in Procedure::ALL.iter().zip(words_of_failures) {
            let failed = FailedCall {
                procedure: *procedure,
                status: Status::Jukebox,
            };
            let wanted = [10008, 0, 0, 0, 0];
            assert_eq!(encoded(&failed), words(&wanted[..count]), "{procedure:?}");
        }
    }
}
