//! MOUNT version 3 (RFC 1813, appendix I): the procedures that lead from a path to the first file
//! handle.

use crate::handle::EncodedHandle;
use crate::limits::MOUNT_PATH_BYTES_MAX;
use crate::rpc::ArgumentsError;
use crate::xdr::{Decode, Encode, Reader, Writer, XdrError, wire_enum};

/// The RPC program.
pub const PROGRAM: u32 = 100_005;
/// Its version for NFSv3.
pub const VERSION: u32 = 3;

/// The number of the authentication flavor AUTH_NONE, for [`MountedRoot::flavors`].
pub const FLAVOR_NONE: u32 = 0;
/// The number of the authentication flavor AUTH_SYS.
pub const FLAVOR_SYSTEM: u32 = 1;

wire_enum! {
    /// The reason that a mount fails.
    pub enum MountStatus, "mount status" {
        /// The caller may not mount.
        Permission = 1,
        /// There is no such path.
        NoEntry = 2,
        /// The storage failed.
        Io = 5,
        /// The client may not use the export.
        Access = 13,
        /// The path is no directory.
        NotDirectory = 20,
        /// The path is malformed.
        Invalid = 22,
        /// The path is too long.
        NameTooLong = 63,
        /// The server does not have the operation.
        NotSupported = 10004,
        /// Another fault of the server.
        ServerFault = 10006,
    }
}

/// A path of the server, as the client wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountPath<'a>(pub &'a [u8]);

impl<'a> Decode<'a> for MountPath<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        let path = reader.opaque("mount path", MOUNT_PATH_BYTES_MAX)?;
        Ok(Self(path))
    }
}

/// A call with its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountCall<'a> {
    /// Does nothing; the result is `()`.
    Null,
    /// Asks for the root of an export; the result is a [`MountReply`].
    Mount(MountPath<'a>),
    /// Asks for the mounts of all clients; the result is a [`MountList`].
    Dump,
    /// Forgets a mount of the client; the result is `()`.
    Unmount(MountPath<'a>),
    /// Forgets all mounts of the client; the result is `()`.
    UnmountAll,
    /// Asks for the exports; the result is an [`ExportList`].
    Export,
}

impl<'a> MountCall<'a> {
    /// The call with this procedure and these arguments.
    ///
    /// # Errors
    /// If there is no such procedure, or the arguments are malformed.
    pub fn decode(procedure: u32, mut arguments: Reader<'a>) -> Result<Self, ArgumentsError> {
        let reader = &mut arguments;
        Ok(match procedure {
            0 => Self::Null,
            1 => Self::Mount(MountPath::decode(reader)?),
            2 => Self::Dump,
            3 => Self::Unmount(MountPath::decode(reader)?),
            4 => Self::UnmountAll,
            5 => Self::Export,
            other => return Err(ArgumentsError::Procedure(other)),
        })
    }
}

/// The root of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountedRoot<'a> {
    /// Its handle.
    pub handle: EncodedHandle,
    /// The authentication flavors that the export accepts, the preferred one first.
    pub flavors: &'a [u32],
}

/// The result of [`MountCall::Mount`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountReply<'a> {
    /// The root.
    Mounted(MountedRoot<'a>),
    /// The reason of the failure.
    Failed(MountStatus),
}

impl Encode for MountReply<'_> {
    fn encode(&self, writer: &mut Writer) {
        match self {
            Self::Mounted(root) => {
                writer.u32(0);
                writer.value(&root.handle);
                writer.length(root.flavors.len());
                for flavor in root.flavors {
                    writer.u32(*flavor);
                }
            }
            Self::Failed(status) => writer.value(status),
        }
    }
}

/// A mount of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountEntry<'a> {
    /// The client's name or address.
    pub client: &'a [u8],
    /// The path that it mounted.
    pub path: &'a [u8],
}

/// The result of [`MountCall::Dump`]. The caller bounds the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountList<'a>(pub &'a [MountEntry<'a>]);

impl Encode for MountList<'_> {
    fn encode(&self, writer: &mut Writer) {
        for entry in self.0 {
            writer.bool(true);
            writer.opaque(entry.client);
            writer.opaque(entry.path);
        }
        writer.bool(false);
    }
}

/// An export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportEntry<'a> {
    /// The path that clients mount.
    pub path: &'a [u8],
    /// The clients that may mount it, as people read them; empty for all.
    pub clients: &'a [&'a [u8]],
}

/// The result of [`MountCall::Export`]. The caller bounds the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportList<'a>(pub &'a [ExportEntry<'a>]);

impl Encode for ExportList<'_> {
    fn encode(&self, writer: &mut Writer) {
        for entry in self.0 {
            writer.bool(true);
            writer.opaque(entry.path);
            for client in entry.clients {
                writer.bool(true);
                writer.opaque(client);
            }
            writer.bool(false);
        }
        writer.bool(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::Refusal;
    use crate::testing::{encoded, handle, handle_on_wire};

    fn decode(procedure: u32, bytes: &[u8]) -> Result<MountCall<'_>, ArgumentsError> {
        MountCall::decode(procedure, Reader::new(bytes))
    }

    #[test]
    fn calls_are_decoded() {
        let path = b"\0\0\0\x05/data\0\0\0";
        let data = MountPath(b"/data");
        assert_eq!(decode(0, &[]), Ok(MountCall::Null));
        assert_eq!(decode(1, path), Ok(MountCall::Mount(data)));
        assert_eq!(decode(2, &[]), Ok(MountCall::Dump));
        assert_eq!(decode(3, path), Ok(MountCall::Unmount(data)));
        assert_eq!(decode(4, &[]), Ok(MountCall::UnmountAll));
        assert_eq!(decode(5, &[]), Ok(MountCall::Export));
    }

    #[test]
    fn unusable_calls_are_refused() {
        let refusal = |decoded: Result<MountCall<'_>, ArgumentsError>| {
            let error = decoded.expect_err("an unusable call");
            error.refusal()
        };
        assert_eq!(refusal(decode(6, &[])), Refusal::ProcedureUnavailable);
        assert_eq!(refusal(decode(1, &[0, 0])), Refusal::GarbageArguments);
        let long = [&1025u32.to_be_bytes()[..], &[b'x'; 1028]].concat();
        assert_eq!(refusal(decode(1, &long)), Refusal::GarbageArguments);
        let longest = [&1024u32.to_be_bytes()[..], &[b'x'; 1024]].concat();
        assert!(decode(1, &longest).is_ok());
    }

    #[test]
    fn root_is_encoded_with_its_flavors() {
        let reply = MountReply::Mounted(MountedRoot {
            handle: handle(),
            flavors: &[FLAVOR_SYSTEM, FLAVOR_NONE],
        });
        let wanted = [
            &[0; 4][..],
            &handle_on_wire(),
            &[0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0],
        ];
        assert_eq!(encoded(&reply), wanted.concat());
        let failed = MountReply::Failed(MountStatus::Access);
        assert_eq!(encoded(&failed), [0, 0, 0, 13]);
        let failed = MountReply::Failed(MountStatus::ServerFault);
        assert_eq!(encoded(&failed), [0, 0, 0x27, 0x16]);
    }

    #[test]
    fn lists_are_chains_of_optional_values() {
        let mounts = [MountEntry {
            client: b"host",
            path: b"/a",
        }];
        let wanted = b"\0\0\0\x01\0\0\0\x04host\0\0\0\x02/a\0\0\0\0\0\0";
        assert_eq!(encoded(&MountList(&mounts)), wanted);
        assert_eq!(encoded(&MountList(&[])), [0; 4]);

        let all = ExportEntry {
            path: b"/a",
            clients: &[],
        };
        let some = ExportEntry {
            path: b"/b",
            clients: &[b"10.0.0.0/8", b"host"],
        };
        let wanted = b"\0\0\0\x01\0\0\0\x02/a\0\0\0\0\0\0\
            \0\0\0\x01\0\0\0\x02/b\0\0\
            \0\0\0\x01\0\0\0\x0a10.0.0.0/8\0\0\0\0\0\x01\0\0\0\x04host\0\0\0\0\0\0\0\0";
        assert_eq!(encoded(&ExportList(&[all, some])), wanted);
    }
}
