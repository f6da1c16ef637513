//! Handles that name no file: empty, short, forged, of a removed file. Each procedure refuses them.

use crate::Case;
use crate::fixture::{CaseResult, Fixture, Problem, ensure, one_of};
use pagemesh_nfs_client::nfs3::{
    self, Access, Commit, Create, CreateHow, FsInfo, FsStat, GetAttributes, Handle, Link, Lookup,
    MakeDirectory, MakeNode, Node, PathConf, Read, ReadDir, ReadDirPlus, ReadLink, Remove,
    RemoveDirectory, Rename, SetAttributes, SetAttributesCall, StableHow, Status, Symlink, Write,
};
use pagemesh_nfs_client::rpc::arguments;
use pagemesh_nfs_client::{ClientError, Procedure};

/// The procedures with a handle.
const PROCEDURES: &[(&str, u32)] = &[
    ("getattr", 1),
    ("setattr", 2),
    ("lookup", 3),
    ("access", 4),
    ("readlink", 5),
    ("read", 6),
    ("write", 7),
    ("create", 8),
    ("mkdir", 9),
    ("symlink", 10),
    ("mknod", 11),
    ("remove", 12),
    ("rmdir", 13),
    ("rename", 14),
    ("link", 15),
    ("readdir", 16),
    ("readdirplus", 17),
    ("fsstat", 18),
    ("fsinfo", 19),
    ("pathconf", 20),
    ("commit", 21),
];

pub(super) fn add(cases: &mut Vec<Case>) {
    for (name, number) in PROCEDURES {
        let number = *number;
        cases.push(Case::new(format!("{name}.empty_handle"), move |it| {
            unknown(it, number, &[])
        }));
        cases.push(Case::new(format!("{name}.unknown_handle"), move |it| {
            unknown(it, number, &[0xa5; 40])
        }));
        cases.push(Case::new(format!("{name}.handle_of_65_bytes"), move |it| {
            long(it, number)
        }));
        cases.push(Case::new(format!("{name}.stale_handle"), move |it| {
            stale(it, number)
        }));
    }
    cases.push(Case::new("handles.forged_handle", forged));
    cases.push(Case::new("handles.cut_handle", cut));
    cases.push(Case::new("handles.prolonged_handle", prolonged));
}

fn encoded<P: Procedure>(call: P) -> Vec<u8> {
    arguments(&call)
}

/// The arguments of a procedure on a file or directory.
fn call(number: u32, file: &Handle) -> Vec<u8> {
    let (directory, name) = (file, &b"name"[..]);
    let attributes = SetAttributes::mode(0o644);
    match number {
        2 => encoded(SetAttributesCall {
            file,
            attributes,
            guard: None,
        }),
        3 => encoded(Lookup { directory, name }),
        4 => encoded(Access { file, wanted: 63 }),
        5 => encoded(ReadLink { file }),
        8 => encoded(Create {
            directory,
            name,
            how: CreateHow::Guarded(attributes),
        }),
        9 => encoded(MakeDirectory {
            directory,
            name,
            attributes,
        }),
        10 => encoded(Symlink {
            directory,
            name,
            attributes,
            target: b"target",
        }),
        11 => encoded(MakeNode {
            directory,
            name,
            node: Node::Fifo(attributes),
        }),
        12 => encoded(Remove { directory, name }),
        13 => encoded(RemoveDirectory { directory, name }),
        14 => encoded(Rename {
            from: (directory, name),
            to: (directory, b"new"),
        }),
        15 => encoded(Link {
            file,
            directory,
            name,
        }),
        _ => read_call(number, file),
    }
}

/// The same, of a procedure that reads, writes or lists.
fn read_call(number: u32, file: &Handle) -> Vec<u8> {
    let directory = file;
    let (offset, count, cookie, verifier) = (0, 100, 0, [0; 8]);
    match number {
        16 => encoded(ReadDir {
            directory,
            cookie,
            verifier,
            count: 4096,
        }),
        17 => encoded(ReadDirPlus {
            directory,
            cookie,
            verifier,
            dir_count: 4096,
            max_count: 4096,
        }),
        18 => encoded(FsStat { file }),
        19 => encoded(FsInfo { file }),
        20 => encoded(PathConf { file }),
        6 => encoded(Read {
            file,
            offset,
            count,
        }),
        7 => encoded(Write {
            file,
            offset,
            stable: StableHow::FileSync,
            data: b"data",
        }),
        21 => encoded(Commit {
            file,
            offset,
            count,
        }),
        _ => encoded(GetAttributes { file }),
    }
}

/// The status of a procedure.
fn status(it: &mut Fixture, number: u32, file: &Handle) -> Result<Status, Problem> {
    let target = (nfs3::PROGRAM, nfs3::VERSION, number);
    let result = it.client.call_raw(target, &call(number, file))?;
    let number = result.first_chunk().copied().map(u32::from_be_bytes);
    let known = |it: &&Status| Some(it.number()) == number;
    let status = Status::ALL.iter().find(known);
    status
        .copied()
        .ok_or_else(|| Problem::Wrong(format!("the status {number:?}")))
}

fn refused(it: &mut Fixture, number: u32, file: &Handle, wanted: &[Status]) -> CaseResult {
    let found = status(it, number, file)?;
    // A server without special files need not look at the handle.
    if number == 11 && found == Status::NOTSUPP {
        return Ok(());
    }
    one_of("the status", found, wanted)
}

fn unknown(it: &mut Fixture, number: u32, bytes: &[u8]) -> CaseResult {
    let file = Handle(bytes.to_vec());
    refused(it, number, &file, &[Status::BADHANDLE, Status::STALE])
}

/// A handle has at most 64 bytes (NFS3_FHSIZE).
fn long(it: &mut Fixture, number: u32) -> CaseResult {
    let file = Handle(vec![1; 65]);
    match status(it, number, &file) {
        Ok(found) => one_of("the status", found, &[Status::BADHANDLE, Status::STALE]),
        Err(_) => {
            let target = (nfs3::PROGRAM, nfs3::VERSION, number);
            let mut client = it.client_of(it.client.credential.clone())?;
            match client.call_raw(target, &call(number, &file)) {
                Err(ClientError::Refused(_) | ClientError::Closed) => Ok(()),
                other => Err(Problem::Wrong(format!("{other:?}"))),
            }
        }
    }
}

fn stale(it: &mut Fixture, number: u32) -> CaseResult {
    let is_of_file = matches!(number, 5..=7 | 15 | 21);
    let file = match is_of_file {
        true => it.stale_file()?,
        false => it.stale_directory()?,
    };
    // A directory without its dots has no names.
    let allowed = [Status::STALE, Status::NOENT];
    let is_of_names = matches!(number, 3 | 8..=14);
    let wanted = if is_of_names {
        &allowed[..]
    } else {
        &allowed[..1]
    };
    refused(it, number, &file, wanted)
}

/// Each bit of a handle matters, or the file is the same: no other file is reached.
fn forged(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"secret", b"12345")?;
    let own = it.attributes(&file)?.file_id;
    for bit in 0..8 * file.0.len() {
        let mut bytes = file.0.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let file = Handle(bytes);
        match it.call(&GetAttributes { file: &file })? {
            Ok(found) => ensure!(
                found.file_id == own,
                "bit {bit} leads to the file {}",
                found.file_id
            ),
            Err(failure) => {
                let wanted = [Status::BADHANDLE, Status::STALE];
                one_of(&format!("bit {bit}"), failure.status, &wanted)?;
            }
        }
    }
    Ok(())
}

fn cut(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    for len in 0..file.0.len() {
        let file = Handle(file.0[..len].to_vec());
        let wanted = [Status::BADHANDLE, Status::STALE];
        it.fails(&GetAttributes { file: &file }, &wanted)?;
    }
    Ok(())
}

fn prolonged(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    for len in file.0.len() + 1..=64 {
        let mut bytes = file.0.clone();
        bytes.resize(len, 0);
        let file = Handle(bytes);
        let wanted = [Status::BADHANDLE, Status::STALE];
        it.fails(&GetAttributes { file: &file }, &wanted)?;
    }
    Ok(())
}
