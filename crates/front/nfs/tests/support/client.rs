//! A client's side of the wire: builds calls of NFSv3 and encodes them, without the encoder under
//! test.

use pagemesh_nfs::handle::HandleBytes;
use pagemesh_nfs::nfs3::Nfs3Call;
use pagemesh_nfs::nfs3::attributes::{
    AccessArguments, DeviceNumber, SetAttributes, SetAttributesArguments, SetTime, Time,
};
use pagemesh_nfs::nfs3::files::{CommitArguments, Durability, ReadArguments, WriteArguments};
use pagemesh_nfs::nfs3::listing::{
    CookieVerifier, ListArguments, ListPlusArguments, ListingBudget,
};
use pagemesh_nfs::nfs3::names::{
    CreateArguments, CreateMode, DirectoryName, FileName, LinkArguments, MakeDirectoryArguments,
    MakeNodeArguments, RenameArguments, SpecialFile, SymlinkArguments, SymlinkTarget,
};

/// The number of procedures of NFSv3.
pub const PROCEDURES: u32 = 22;

/// The fields of calls.
#[derive(Clone, Debug)]
pub struct Fields {
    pub handle: Vec<u8>,
    pub other_handle: Vec<u8>,
    pub name: Vec<u8>,
    pub other_name: Vec<u8>,
    pub data: Vec<u8>,
    pub verifier: [u8; 8],
    pub attributes: SetAttributes,
    pub guard: Option<Time>,
    pub offset: u64,
    pub count: u32,
    pub other_count: u32,
    /// Chooses among the variants of a field.
    pub choice: u32,
}

/// The call of this procedure with these fields.
pub fn call(procedure: u32, fields: &Fields) -> Nfs3Call<'_> {
    let file = HandleBytes(&fields.handle);
    let at = DirectoryName {
        directory: file,
        name: FileName(&fields.name),
    };
    let to = DirectoryName {
        directory: HandleBytes(&fields.other_handle),
        name: FileName(&fields.other_name),
    };
    let attributes = fields.attributes;
    match procedure {
        0 => Nfs3Call::Null,
        1 => Nfs3Call::GetAttributes(file),
        2 => Nfs3Call::SetAttributes(SetAttributesArguments {
            file,
            change: attributes,
            guard: fields.guard,
        }),
        3 => Nfs3Call::Lookup(at),
        4 => Nfs3Call::Access(AccessArguments {
            file,
            wanted: fields.count,
        }),
        5 => Nfs3Call::ReadSymlink(file),
        6 | 7 | 21 => data_call(procedure, fields),
        8 => Nfs3Call::Create(CreateArguments {
            at,
            mode: match fields.choice % 3 {
                0 => CreateMode::Unchecked(attributes),
                1 => CreateMode::Guarded(attributes),
                _ => CreateMode::Exclusive(&fields.verifier),
            },
        }),
        9 => Nfs3Call::MakeDirectory(MakeDirectoryArguments { at, attributes }),
        10 => Nfs3Call::MakeSymlink(SymlinkArguments {
            at,
            attributes,
            target: SymlinkTarget(&fields.data),
        }),
        11 => Nfs3Call::MakeNode(MakeNodeArguments {
            at,
            file: special_file(fields),
        }),
        12 => Nfs3Call::Remove(at),
        13 => Nfs3Call::RemoveDirectory(at),
        14 => Nfs3Call::Rename(RenameArguments { from: at, to }),
        15 => Nfs3Call::Link(LinkArguments { file, at: to }),
        16 | 17 => list_call(procedure, fields),
        18 => Nfs3Call::SpaceUsage(file),
        19 => Nfs3Call::ServerLimits(file),
        20 => Nfs3Call::NameRules(file),
        other => panic!("there is no procedure {other}"),
    }
}

fn data_call(procedure: u32, fields: &Fields) -> Nfs3Call<'_> {
    let (offset, count) = (fields.offset, fields.count);
    let file = HandleBytes(&fields.handle);
    match procedure {
        6 => Nfs3Call::Read(ReadArguments {
            file,
            offset,
            count,
        }),
        7 => Nfs3Call::Write(WriteArguments {
            file,
            offset,
            durability: Durability::ALL[fields.choice as usize % 3],
            data: &fields.data,
        }),
        _ => Nfs3Call::Commit(CommitArguments {
            file,
            offset,
            count,
        }),
    }
}

fn list_call(procedure: u32, fields: &Fields) -> Nfs3Call<'_> {
    let list = |name_bytes| ListArguments {
        directory: HandleBytes(&fields.handle),
        cookie: fields.offset,
        verifier: CookieVerifier(fields.verifier),
        budget: ListingBudget {
            result_bytes: fields.count,
            name_bytes,
        },
    };
    match procedure {
        16 => Nfs3Call::List(list(64 << 10)),
        _ => Nfs3Call::ListPlus(ListPlusArguments(list(fields.other_count))),
    }
}

fn special_file(fields: &Fields) -> SpecialFile {
    let attributes = fields.attributes;
    let device = DeviceNumber {
        major: fields.count,
        minor: fields.other_count,
    };
    match fields.choice % 4 {
        0 => SpecialFile::BlockDevice(attributes, device),
        1 => SpecialFile::CharacterDevice(attributes, device),
        2 => SpecialFile::Socket(attributes),
        _ => SpecialFile::Fifo(attributes),
    }
}

/// The bytes of arguments.
#[derive(Default)]
pub struct Encoder(pub Vec<u8>);

impl Encoder {
    pub fn word(&mut self, value: u32) -> &mut Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub fn long(&mut self, value: u64) -> &mut Self {
        self.word((value >> 32) as u32).word(value as u32)
    }

    pub fn opaque(&mut self, bytes: &[u8]) -> &mut Self {
        self.word(bytes.len() as u32);
        self.0.extend(bytes);
        while !self.0.len().is_multiple_of(4) {
            self.0.push(0);
        }
        self
    }

    fn at(&mut self, at: DirectoryName<'_>) -> &mut Self {
        self.opaque(at.directory.0).opaque(at.name.0)
    }

    fn time(&mut self, time: Time) -> &mut Self {
        self.word(time.seconds).word(time.nanoseconds)
    }

    fn attributes(&mut self, change: &SetAttributes) -> &mut Self {
        for value in [change.mode, change.uid, change.gid] {
            match value {
                Some(value) => self.word(1).word(value),
                None => self.word(0),
            };
        }
        match change.size_bytes {
            Some(size) => self.word(1).long(size),
            None => self.word(0),
        };
        for time in [change.accessed, change.modified] {
            match time {
                SetTime::Keep => self.word(0),
                SetTime::ToServerTime => self.word(1),
                SetTime::To(time) => self.word(2).time(time),
            };
        }
        self
    }

    fn device(&mut self, kind: u32, change: &SetAttributes, device: DeviceNumber) -> &mut Self {
        let with_attributes = self.word(kind).attributes(change);
        with_attributes.word(device.major).word(device.minor)
    }

    fn list(&mut self, list: &ListArguments<'_>) -> &mut Self {
        self.opaque(list.directory.0).long(list.cookie);
        self.0.extend(list.verifier.0);
        self
    }
}

/// The arguments of a call.
pub fn arguments(call: &Nfs3Call<'_>) -> Vec<u8> {
    let mut out = Encoder::default();
    match call {
        Nfs3Call::Null => &mut out,
        Nfs3Call::GetAttributes(file)
        | Nfs3Call::ReadSymlink(file)
        | Nfs3Call::SpaceUsage(file)
        | Nfs3Call::ServerLimits(file)
        | Nfs3Call::NameRules(file) => out.opaque(file.0),
        Nfs3Call::SetAttributes(it) => {
            out.opaque(it.file.0).attributes(&it.change);
            match it.guard {
                Some(guard) => out.word(1).time(guard),
                None => out.word(0),
            }
        }
        Nfs3Call::Lookup(at) | Nfs3Call::Remove(at) | Nfs3Call::RemoveDirectory(at) => out.at(*at),
        Nfs3Call::Access(it) => out.opaque(it.file.0).word(it.wanted),
        Nfs3Call::Read(it) => out.opaque(it.file.0).long(it.offset).word(it.count),
        Nfs3Call::Commit(it) => out.opaque(it.file.0).long(it.offset).word(it.count),
        Nfs3Call::Write(it) => {
            out.opaque(it.file.0).long(it.offset);
            let counted = out.word(it.data.len() as u32);
            counted.word(it.durability as u32).opaque(it.data)
        }
        Nfs3Call::Create(it) => match it.mode {
            CreateMode::Unchecked(change) => out.at(it.at).word(0).attributes(&change),
            CreateMode::Guarded(change) => out.at(it.at).word(1).attributes(&change),
            CreateMode::Exclusive(verifier) => {
                out.at(it.at).word(2).long(u64::from_be_bytes(*verifier))
            }
        },
        Nfs3Call::MakeDirectory(it) => out.at(it.at).attributes(&it.attributes),
        Nfs3Call::MakeSymlink(it) => out.at(it.at).attributes(&it.attributes).opaque(it.target.0),
        Nfs3Call::MakeNode(it) => {
            let out = out.at(it.at);
            match &it.file {
                SpecialFile::BlockDevice(change, device) => out.device(3, change, *device),
                SpecialFile::CharacterDevice(change, device) => out.device(4, change, *device),
                SpecialFile::Socket(change) => out.word(6).attributes(change),
                SpecialFile::Fifo(change) => out.word(7).attributes(change),
                SpecialFile::Unsuitable(kind) => out.word(*kind as u32),
            }
        }
        Nfs3Call::Rename(it) => out.at(it.from).at(it.to),
        Nfs3Call::Link(it) => out.opaque(it.file.0).at(it.at),
        Nfs3Call::List(it) => out.list(it).word(it.budget.result_bytes),
        Nfs3Call::ListPlus(ListPlusArguments(it)) => {
            let list = out.list(it);
            list.word(it.budget.name_bytes).word(it.budget.result_bytes)
        }
    };
    out.0
}

/// The record of a call with an AUTH_SYS credential.
pub fn record(program: u32, procedure: u32, arguments: &[u8]) -> Vec<u8> {
    let mut credential = Encoder::default();
    credential.word(1).opaque(b"host").word(1000).word(100);
    credential.word(2).word(4).word(27);
    let mut out = Encoder::default();
    out.word(7).word(0).word(2);
    out.word(program).word(3).word(procedure);
    out.word(1).opaque(&credential.0);
    out.word(0).word(0);
    out.0.extend(arguments);
    out.0
}
