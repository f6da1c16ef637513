//! LOOKUP, CREATE, MKDIR, SYMLINK, MKNOD, REMOVE, RMDIR, RENAME and LINK.

use super::{Attributes, Handle, Nfs3Result, PROGRAM, SetAttributes, VERSION, WccData, result};
use crate::rpc::Procedure;
use crate::xdr::{DecodeError, Decoder, Encoder};

fn encode_name(out: &mut Encoder, directory: &Handle, name: &[u8]) {
    directory.encode(out);
    out.opaque(name);
}

/// LOOKUP.
#[derive(Clone, Copy, Debug)]
pub struct Lookup<'a> {
    /// The directory.
    pub directory: &'a Handle,
    /// The name.
    pub name: &'a [u8],
}

/// The result of LOOKUP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookedUp {
    /// The file.
    pub handle: Handle,
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// The attributes of the directory.
    pub directory: Option<Attributes>,
}

impl Procedure for Lookup<'_> {
    type Result = Nfs3Result<LookedUp, Option<Attributes>>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 3;

    fn encode(&self, out: &mut Encoder) {
        encode_name(out, self.directory, self.name);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        let found = |fields: &mut Decoder<'_>| {
            Ok(LookedUp {
                handle: Handle::decode(fields)?,
                attributes: Attributes::decode_after(fields)?,
                directory: Attributes::decode_after(fields)?,
            })
        };
        result(fields, found, Attributes::decode_after)
    }
}

/// The result of procedures that make a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Created {
    /// The file.
    pub handle: Option<Handle>,
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// The attributes of the directory, before and after.
    pub directory: WccData,
}

type CreatedResult = Nfs3Result<Created, WccData>;

fn decode_created(fields: &mut Decoder<'_>) -> Result<CreatedResult, DecodeError> {
    let created = |fields: &mut Decoder<'_>| {
        Ok(Created {
            handle: fields.optional("handle follows", Handle::decode)?,
            attributes: Attributes::decode_after(fields)?,
            directory: WccData::decode(fields)?,
        })
    };
    result(fields, created, WccData::decode)
}

/// The way of a CREATE (createhow3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateHow {
    /// UNCHECKED: an existing file is used.
    Unchecked(SetAttributes),
    /// GUARDED: an existing file is an error.
    Guarded(SetAttributes),
    /// EXCLUSIVE: an existing file with another verifier is an error.
    Exclusive([u8; 8]),
}

/// CREATE.
#[derive(Clone, Copy, Debug)]
pub struct Create<'a> {
    /// The directory.
    pub directory: &'a Handle,
    /// The name.
    pub name: &'a [u8],
    /// The way.
    pub how: CreateHow,
}

impl Procedure for Create<'_> {
    type Result = CreatedResult;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 8;

    fn encode(&self, out: &mut Encoder) {
        encode_name(out, self.directory, self.name);
        match &self.how {
            CreateHow::Unchecked(attributes) => attributes.encode(out.u32(0)),
            CreateHow::Guarded(attributes) => attributes.encode(out.u32(1)),
            CreateHow::Exclusive(verifier) => {
                out.u32(2).fixed(verifier);
            }
        }
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        decode_created(fields)
    }
}

/// MKDIR.
#[derive(Clone, Copy, Debug)]
pub struct MakeDirectory<'a> {
    /// The parent.
    pub directory: &'a Handle,
    /// The name.
    pub name: &'a [u8],
    /// The attributes.
    pub attributes: SetAttributes,
}

impl Procedure for MakeDirectory<'_> {
    type Result = CreatedResult;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 9;

    fn encode(&self, out: &mut Encoder) {
        encode_name(out, self.directory, self.name);
        self.attributes.encode(out);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        decode_created(fields)
    }
}

/// SYMLINK.
#[derive(Clone, Copy, Debug)]
pub struct Symlink<'a> {
    /// The directory.
    pub directory: &'a Handle,
    /// The name.
    pub name: &'a [u8],
    /// The attributes.
    pub attributes: SetAttributes,
    /// The target.
    pub target: &'a [u8],
}

impl Procedure for Symlink<'_> {
    type Result = CreatedResult;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 10;

    fn encode(&self, out: &mut Encoder) {
        encode_name(out, self.directory, self.name);
        self.attributes.encode(out);
        out.opaque(self.target);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        decode_created(fields)
    }
}

/// The file that MKNOD makes (mknoddata3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// NF3CHR, with a major and a minor number.
    CharacterDevice(SetAttributes, (u32, u32)),
    /// NF3BLK, with a major and a minor number.
    BlockDevice(SetAttributes, (u32, u32)),
    /// NF3SOCK.
    Socket(SetAttributes),
    /// NF3FIFO.
    Fifo(SetAttributes),
    /// A type that MKNOD does not make, by its number.
    Other(u32),
}

/// MKNOD.
#[derive(Clone, Copy, Debug)]
pub struct MakeNode<'a> {
    /// The directory.
    pub directory: &'a Handle,
    /// The name.
    pub name: &'a [u8],
    /// The file.
    pub node: Node,
}

impl Procedure for MakeNode<'_> {
    type Result = CreatedResult;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 11;

    fn encode(&self, out: &mut Encoder) {
        encode_name(out, self.directory, self.name);
        let mut device = |number, attributes: &SetAttributes, (major, minor)| {
            attributes.encode(out.u32(number));
            out.u32(major).u32(minor);
        };
        match &self.node {
            Node::BlockDevice(attributes, numbers) => device(3, attributes, *numbers),
            Node::CharacterDevice(attributes, numbers) => device(4, attributes, *numbers),
            Node::Socket(attributes) => attributes.encode(out.u32(6)),
            Node::Fifo(attributes) => attributes.encode(out.u32(7)),
            Node::Other(number) => {
                out.u32(*number);
            }
        }
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        decode_created(fields)
    }
}

/// REMOVE.
#[derive(Clone, Copy, Debug)]
pub struct Remove<'a> {
    /// The directory.
    pub directory: &'a Handle,
    /// The name.
    pub name: &'a [u8],
}

impl Procedure for Remove<'_> {
    type Result = Nfs3Result<WccData, WccData>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 12;

    fn encode(&self, out: &mut Encoder) {
        encode_name(out, self.directory, self.name);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        result(fields, WccData::decode, WccData::decode)
    }
}

/// RMDIR.
#[derive(Clone, Copy, Debug)]
pub struct RemoveDirectory<'a> {
    /// The parent.
    pub directory: &'a Handle,
    /// The name.
    pub name: &'a [u8],
}

impl Procedure for RemoveDirectory<'_> {
    type Result = Nfs3Result<WccData, WccData>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 13;

    fn encode(&self, out: &mut Encoder) {
        encode_name(out, self.directory, self.name);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        result(fields, WccData::decode, WccData::decode)
    }
}

/// RENAME.
#[derive(Clone, Copy, Debug)]
pub struct Rename<'a> {
    /// The directory and the name before.
    pub from: (&'a Handle, &'a [u8]),
    /// The directory and the name after.
    pub to: (&'a Handle, &'a [u8]),
}

/// The two directories of RENAME, before and after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renamed {
    /// The directory of the old name.
    pub from: WccData,
    /// The directory of the new name.
    pub to: WccData,
}

impl Procedure for Rename<'_> {
    type Result = Nfs3Result<Renamed, Renamed>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 14;

    fn encode(&self, out: &mut Encoder) {
        encode_name(out, self.from.0, self.from.1);
        encode_name(out, self.to.0, self.to.1);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        let renamed = |fields: &mut Decoder<'_>| {
            Ok(Renamed {
                from: WccData::decode(fields)?,
                to: WccData::decode(fields)?,
            })
        };
        result(fields, renamed, renamed)
    }
}

/// LINK.
#[derive(Clone, Copy, Debug)]
pub struct Link<'a> {
    /// The file.
    pub file: &'a Handle,
    /// The directory of the new name.
    pub directory: &'a Handle,
    /// The new name.
    pub name: &'a [u8],
}

/// The file and the directory of LINK.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Linked {
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// The attributes of the directory, before and after.
    pub directory: WccData,
}

impl Procedure for Link<'_> {
    type Result = Nfs3Result<Linked, Linked>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 15;

    fn encode(&self, out: &mut Encoder) {
        self.file.encode(out);
        encode_name(out, self.directory, self.name);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        let linked = |fields: &mut Decoder<'_>| {
            Ok(Linked {
                attributes: Attributes::decode_after(fields)?,
                directory: WccData::decode(fields)?,
            })
        };
        result(fields, linked, linked)
    }
}
