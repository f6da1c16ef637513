//! Bytes of calls.

use super::file_set::{FILES_PER_DIRECTORY, FileSet};
use super::workload::Request;
use pagemesh_nfs_client::nfs3::{
    Access, Commit, Create, CreateHow, FsStat, GetAttributes, Handle, Lookup, Read, ReadDir,
    ReadDirPlus, ReadLink, Remove, SetAttributes, SetAttributesCall, StableHow, Write, access,
};
use pagemesh_nfs_client::rpc::{Credential, Procedure, arguments, call_record};

/// Bytes of a READDIR, and of the names of a READDIRPLUS.
const LISTING_BYTES: u32 = 8 << 10;
/// Bytes of a READDIRPLUS.
const LISTING_PLUS_BYTES: u32 = 32 << 10;

/// The record of a call. `payload` has at least a block.
pub(crate) fn encode(
    request: &Request,
    set: &FileSet,
    (xid, caller): (u32, &Credential),
    payload: &[u8],
) -> Vec<u8> {
    let file = |file: u32| &set.files[file as usize].handle;
    let directory = |at: u32| &set.directories[at as usize];
    let call = Call { xid, caller };
    match *request {
        Request::Lookup { file, exists } => {
            let prefix = if exists { "" } else { "no-" };
            let name = format!("{prefix}{}", FileSet::file_name(file));
            call.record(&Lookup {
                directory: directory(file / FILES_PER_DIRECTORY),
                name: name.as_bytes(),
            })
        }
        Request::Read {
            file: at,
            offset,
            count,
        } => call.record(&Read {
            file: file(at),
            offset: offset.into(),
            count,
        }),
        Request::Write {
            file: at,
            offset,
            count,
            is_synchronous,
        } => call.record(&Write {
            file: file(at),
            offset: offset.into(),
            stable: match is_synchronous {
                true => StableHow::FileSync,
                false => StableHow::Unstable,
            },
            data: &payload[..count as usize],
        }),
        Request::GetAttr { file: at } => call.record(&GetAttributes { file: file(at) }),
        Request::ReadLink { link } => call.record(&ReadLink {
            file: &set.links[link as usize],
        }),
        Request::ReadDir { directory: at } => call.record(&read_dir(directory(at))),
        Request::ReadDirPlus { directory: at } => call.record(&read_dir_plus(directory(at))),
        Request::Create {
            directory: at,
            number,
        } => call.record(&Create {
            directory: directory(at),
            name: FileSet::spare_name(number).as_bytes(),
            how: CreateHow::Guarded(SetAttributes::mode(0o644)),
        }),
        Request::Remove {
            directory: at,
            number,
        } => call.record(&Remove {
            directory: directory(at),
            name: FileSet::spare_name(number).as_bytes(),
        }),
        Request::FsStat => call.record(&FsStat {
            file: set.root.as_ref().unwrap_or(&Handle(Vec::new())),
        }),
        Request::SetAttr {
            file: at,
            size_bytes,
        } => call.record(&SetAttributesCall {
            file: file(at),
            attributes: match size_bytes {
                Some(size) => SetAttributes::size(size.into()),
                None => SetAttributes::mode(0o644),
            },
            guard: None,
        }),
        Request::Access { file: at } => call.record(&Access {
            file: file(at),
            wanted: access::ALL,
        }),
        Request::Commit { file: at } => call.record(&Commit {
            file: file(at),
            offset: 0,
            count: 0,
        }),
    }
}

fn read_dir(directory: &Handle) -> ReadDir<'_> {
    ReadDir {
        directory,
        cookie: 0,
        verifier: [0; 8],
        count: LISTING_BYTES,
    }
}

fn read_dir_plus(directory: &Handle) -> ReadDirPlus<'_> {
    ReadDirPlus {
        directory,
        cookie: 0,
        verifier: [0; 8],
        dir_count: LISTING_BYTES,
        max_count: LISTING_PLUS_BYTES,
    }
}

/// The header of a call.
struct Call<'c> {
    xid: u32,
    caller: &'c Credential,
}

impl Call<'_> {
    fn record<P: Procedure>(&self, procedure: &P) -> Vec<u8> {
        let target = (P::PROGRAM, P::VERSION, P::NUMBER);
        call_record(self.xid, self.caller, target, &arguments(procedure))
    }
}
