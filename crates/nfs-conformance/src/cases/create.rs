//! CREATE and MKDIR.

use super::Check;
use crate::fixture::{CaseResult, Fixture, Problem, ensure, equal, present};
use pagemesh_nfs_client::nfs3::{
    self, Create, CreateHow, Created, FileType, Handle, MakeDirectory, SetAttributes,
    SetAttributesCall, SetTime, Status, Time,
};
use pagemesh_nfs_client::rpc::{Refusal, arguments};
use pagemesh_nfs_client::{ClientError, Credential};

pub(super) const CREATE: &[(&str, Check)] = &[
    (
        "result_has_handle_and_attributes",
        result_has_handle_and_attributes,
    ),
    ("attributes_are_set", attributes_are_set),
    ("size_is_set", size_is_set),
    ("unchecked_keeps_a_file", unchecked_keeps_a_file),
    (
        "unchecked_with_size_truncates",
        unchecked_with_size_truncates,
    ),
    (
        "unchecked_truncation_needs_permission",
        unchecked_truncation_needs_permission,
    ),
    ("guarded_refuses_a_file", guarded_refuses_a_file),
    ("exclusive_makes_a_file", exclusive_makes_a_file),
    (
        "repeated_exclusive_is_the_same_file",
        repeated_exclusive_is_the_same_file,
    ),
    ("other_verifier_is_exist", other_verifier_is_exist),
    (
        "exclusive_refuses_a_guarded_file",
        exclusive_refuses_a_guarded_file,
    ),
    (
        "exclusive_verifier_of_zeros_refuses_a_file",
        exclusive_verifier_of_zeros_refuses_a_file,
    ),
    (
        "exclusive_file_takes_attributes",
        exclusive_file_takes_attributes,
    ),
    ("directory_is_not_replaced", directory_is_not_replaced),
    ("symlink_is_not_replaced", symlink_is_not_replaced),
    ("file_is_no_directory", file_is_no_directory),
    ("permission_is_needed", permission_is_needed),
    ("removed_directory_is_stale", removed_directory_is_stale),
    (
        "set_gid_directory_gives_its_group",
        set_gid_directory_gives_its_group,
    ),
    ("unknown_mode_is_garbage", unknown_mode_is_garbage),
];

pub(super) const MKDIR: &[(&str, Check)] = &[
    (
        "result_has_handle_and_attributes",
        directory_has_handle_and_attributes,
    ),
    ("parent_has_a_further_link", parent_has_a_further_link),
    ("mode_is_set", directory_mode_is_set),
    ("directory_is_not_replaced", mkdir_keeps_a_directory),
    ("file_is_not_replaced", mkdir_keeps_a_file),
    ("file_is_no_directory", mkdir_in_a_file),
    ("permission_is_needed", mkdir_needs_permission),
    ("set_gid_is_inherited", set_gid_is_inherited),
];

fn create(it: &mut Fixture, name: &[u8], how: CreateHow) -> Result<Created, Problem> {
    let directory = it.dir.clone();
    it.ok(&Create {
        directory: &directory,
        name,
        how,
    })
}

fn refused(it: &mut Fixture, name: &[u8], how: CreateHow, wanted: &[Status]) -> CaseResult {
    let directory = it.dir.clone();
    let call = Create {
        directory: &directory,
        name,
        how,
    };
    it.fails(&call, wanted)?;
    Ok(())
}

fn guarded(mode: u32) -> CreateHow {
    CreateHow::Guarded(SetAttributes::mode(mode))
}

/// The handle of a result; a client looks the name up if it is absent.
fn handle(it: &mut Fixture, made: Created, name: &[u8]) -> Result<Handle, Problem> {
    let dir = it.dir.clone();
    match made.handle {
        Some(handle) => Ok(handle),
        None => it.lookup(&dir, name),
    }
}

fn result_has_handle_and_attributes(it: &mut Fixture) -> CaseResult {
    let made = create(it, b"file", guarded(0o640))?;
    let handle = present("the handle", made.handle)?;
    it.check_after("the file", &handle, made.attributes)
}

fn attributes_are_set(it: &mut Fixture) -> CaseResult {
    let time = Time {
        seconds: 1_000_000,
        nanoseconds: 0,
    };
    let attributes = SetAttributes {
        mode: Some(0o4751),
        accessed: SetTime::Client(time),
        modified: SetTime::Client(time),
        ..SetAttributes::default()
    };
    let made = create(it, b"file", CreateHow::Guarded(attributes))?;
    let file = handle(it, made, b"file")?;
    let found = it.attributes(&file)?;
    equal("the mode", found.mode & 0o7777, 0o4751)?;
    equal("the times", (found.accessed, found.modified), (time, time))
}

fn size_is_set(it: &mut Fixture) -> CaseResult {
    let attributes = SetAttributes {
        mode: Some(0o644),
        ..SetAttributes::size(12_345)
    };
    let made = create(it, b"file", CreateHow::Guarded(attributes))?;
    let file = handle(it, made, b"file")?;
    equal("the size", it.attributes(&file)?.size_bytes, 12_345)
}

fn unchecked_keeps_a_file(it: &mut Fixture) -> CaseResult {
    let first = it.file_with(b"file", b"12345")?;
    let how = CreateHow::Unchecked(SetAttributes::default());
    let made = create(it, b"file", how)?;
    equal("the handle", &handle(it, made, b"file")?, &first)?;
    equal("the size", it.attributes(&first)?.size_bytes, 5)
}

fn unchecked_with_size_truncates(it: &mut Fixture) -> CaseResult {
    let first = it.file_with(b"file", b"12345")?;
    let how = CreateHow::Unchecked(SetAttributes::size(0));
    let made = create(it, b"file", how)?;
    equal("the handle", &handle(it, made, b"file")?, &first)?;
    equal("the size", it.attributes(&first)?.size_bytes, 0)
}

fn unchecked_truncation_needs_permission(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let directory = it.directory_in(&dir, b"open", 0o777)?;
    it.ok(&SetAttributesCall {
        file: &directory,
        attributes: SetAttributes::mode(0o777),
        guard: None,
    })?;
    let file = it.file_in(&directory, b"file", 0o644)?;
    it.write(&file, 0, b"12345")?;
    let other = it.other();
    let call = Create {
        directory: &directory,
        name: b"file",
        how: CreateHow::Unchecked(SetAttributes::size(0)),
    };
    it.fails_as(other, &call, &[Status::ACCES])?;
    equal("the size", it.attributes(&file)?.size_bytes, 5)
}

fn guarded_refuses_a_file(it: &mut Fixture) -> CaseResult {
    it.file(b"file")?;
    refused(it, b"file", guarded(0o644), &[Status::EXIST])
}

const VERIFIER: [u8; 8] = *b"verifier";

fn exclusive_makes_a_file(it: &mut Fixture) -> CaseResult {
    let made = create(it, b"file", CreateHow::Exclusive(VERIFIER))?;
    let file = handle(it, made, b"file")?;
    let found = it.attributes(&file)?;
    equal(
        "type, size",
        (found.kind, found.size_bytes),
        (FileType::Regular, 0),
    )?;
    equal("the owner", found.uid, it.server.uid)
}

fn repeated_exclusive_is_the_same_file(it: &mut Fixture) -> CaseResult {
    let first = create(it, b"file", CreateHow::Exclusive(VERIFIER))?;
    let first = handle(it, first, b"file")?;
    let second = create(it, b"file", CreateHow::Exclusive(VERIFIER))?;
    equal("the handle", handle(it, second, b"file")?, first)
}

fn other_verifier_is_exist(it: &mut Fixture) -> CaseResult {
    create(it, b"file", CreateHow::Exclusive(VERIFIER))?;
    let other = CreateHow::Exclusive(*b"VERIFIER");
    refused(it, b"file", other, &[Status::EXIST])
}

fn exclusive_refuses_a_guarded_file(it: &mut Fixture) -> CaseResult {
    it.file(b"file")?;
    let how = CreateHow::Exclusive(VERIFIER);
    refused(it, b"file", how, &[Status::EXIST])
}

/// A server stores zeros in a file without a verifier.
fn exclusive_verifier_of_zeros_refuses_a_file(it: &mut Fixture) -> CaseResult {
    it.file(b"file")?;
    refused(it, b"file", CreateHow::Exclusive([0; 8]), &[Status::EXIST])
}

/// A client sets the attributes after an EXCLUSIVE create.
fn exclusive_file_takes_attributes(it: &mut Fixture) -> CaseResult {
    let made = create(it, b"file", CreateHow::Exclusive(VERIFIER))?;
    let file = handle(it, made, b"file")?;
    let attributes = SetAttributes {
        mode: Some(0o644),
        accessed: SetTime::Server,
        modified: SetTime::Server,
        ..SetAttributes::default()
    };
    it.ok(&SetAttributesCall {
        file: &file,
        attributes,
        guard: None,
    })?;
    let found = it.attributes(&file)?;
    equal("the mode", found.mode & 0o7777, 0o644)?;
    ensure!(found.modified.seconds > 1000, "mtime {:?}", found.modified);
    Ok(())
}

/// UNCHECKED may give the handle of the directory, as Linux does.
fn directory_is_not_replaced(it: &mut Fixture) -> CaseResult {
    let first = it.directory(b"name")?;
    for how in [guarded(0o644), CreateHow::Exclusive(VERIFIER)] {
        refused(it, b"name", how, &[Status::EXIST, Status::ISDIR])?;
    }
    let dir = it.dir.clone();
    let _ = it.call(&Create {
        directory: &dir,
        name: b"name",
        how: CreateHow::Unchecked(SetAttributes::mode(0o644)),
    })?;
    equal("the handle", it.lookup(&dir, b"name")?, first)
}

/// UNCHECKED follows no symbolic link.
fn symlink_is_not_replaced(it: &mut Fixture) -> CaseResult {
    it.symlink(b"name", b"target")?;
    refused(it, b"name", guarded(0o644), &[Status::EXIST])?;
    let dir = it.dir.clone();
    let unchecked = CreateHow::Unchecked(SetAttributes::mode(0o644));
    let _ = it.call(&Create {
        directory: &dir,
        name: b"name",
        how: unchecked,
    })?;
    let link = it.lookup(&dir, b"name")?;
    equal("the type", it.attributes(&link)?.kind, FileType::Symlink)?;
    let target = it.client.lookup(&dir, b"target")?;
    ensure!(target.is_err(), "the target was made");
    Ok(())
}

fn file_is_no_directory(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let call = Create {
        directory: &file,
        name: b"x",
        how: guarded(0o644),
    };
    it.fails(&call, &[Status::NOTDIR])?;
    Ok(())
}

fn permission_is_needed(it: &mut Fixture) -> CaseResult {
    let (dir, other) = (it.dir.clone(), it.other());
    let call = Create {
        directory: &dir,
        name: b"x",
        how: guarded(0o644),
    };
    it.fails_as(other, &call, &[Status::ACCES])?;
    Ok(())
}

fn removed_directory_is_stale(it: &mut Fixture) -> CaseResult {
    let directory = it.stale_directory()?;
    let call = Create {
        directory: &directory,
        name: b"x",
        how: guarded(0o644),
    };
    it.fails(&call, &[Status::STALE, Status::NOENT])?;
    Ok(())
}

/// A directory with the set-gid bit, of a group of the caller.
fn set_gid_directory(it: &mut Fixture) -> Result<(Credential, Handle), Problem> {
    let caller = Credential::Sys {
        uid: it.server.uid,
        gid: it.server.gid,
        groups: vec![4567],
    };
    let directory = it.directory(b"group")?;
    for attributes in [
        SetAttributes {
            gid: Some(4567),
            ..SetAttributes::default()
        },
        SetAttributes::mode(0o2775),
    ] {
        let call = SetAttributesCall {
            file: &directory,
            attributes,
            guard: None,
        };
        it.ok_as(caller.clone(), &call)?;
    }
    Ok((caller, directory))
}

fn set_gid_directory_gives_its_group(it: &mut Fixture) -> CaseResult {
    let (_, directory) = set_gid_directory(it)?;
    let file = it.file_in(&directory, b"file", 0o644)?;
    equal("the group", it.attributes(&file)?.gid, 4567)
}

fn unknown_mode_is_garbage(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let mut bytes = arguments(&Create {
        directory: &dir,
        name: b"file",
        how: CreateHow::Exclusive(VERIFIER),
    });
    let at = bytes.len() - 12;
    bytes[at..at + 4].copy_from_slice(&3_u32.to_be_bytes());
    match it
        .client
        .call_raw((nfs3::PROGRAM, nfs3::VERSION, 8), &bytes)
    {
        Err(ClientError::Refused(Refusal::GarbageArguments)) => Ok(()),
        other => Err(Problem::Wrong(format!("{other:?}"))),
    }
}

fn make(it: &mut Fixture, name: &[u8], mode: u32) -> Result<Created, Problem> {
    let directory = it.dir.clone();
    it.ok(&MakeDirectory {
        directory: &directory,
        name,
        attributes: SetAttributes::mode(mode),
    })
}

fn make_fails(
    it: &mut Fixture,
    directory: &Handle,
    caller: Credential,
    wanted: &[Status],
) -> CaseResult {
    let call = MakeDirectory {
        directory,
        name: b"name",
        attributes: SetAttributes::mode(0o755),
    };
    it.fails_as(caller, &call, wanted)?;
    Ok(())
}

fn directory_has_handle_and_attributes(it: &mut Fixture) -> CaseResult {
    let made = make(it, b"directory", 0o755)?;
    let handle = present("the handle", made.handle)?;
    it.check_after("the directory", &handle, made.attributes)
}

fn parent_has_a_further_link(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let before = it.attributes(&dir)?.links;
    make(it, b"directory", 0o755)?;
    equal("the links", it.attributes(&dir)?.links, before + 1)?;
    it.remove_directory(b"directory")?;
    equal("the links", it.attributes(&dir)?.links, before)
}

fn directory_mode_is_set(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let directory = it.directory_in(&dir, b"directory", 0o1750)?;
    equal("the mode", it.attributes(&directory)?.mode & 0o7777, 0o1750)
}

fn mkdir_keeps_a_directory(it: &mut Fixture) -> CaseResult {
    it.directory(b"name")?;
    let (dir, owner) = (it.dir.clone(), it.client.credential.clone());
    make_fails(it, &dir, owner, &[Status::EXIST])
}

fn mkdir_keeps_a_file(it: &mut Fixture) -> CaseResult {
    it.file(b"name")?;
    let (dir, owner) = (it.dir.clone(), it.client.credential.clone());
    make_fails(it, &dir, owner, &[Status::EXIST])
}

fn mkdir_in_a_file(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let owner = it.client.credential.clone();
    make_fails(it, &file, owner, &[Status::NOTDIR])
}

fn mkdir_needs_permission(it: &mut Fixture) -> CaseResult {
    let (dir, other) = (it.dir.clone(), it.other());
    make_fails(it, &dir, other, &[Status::ACCES])
}

fn set_gid_is_inherited(it: &mut Fixture) -> CaseResult {
    let (_, directory) = set_gid_directory(it)?;
    let child = it.directory_in(&directory, b"child", 0o755)?;
    let found = it.attributes(&child)?;
    equal("the group", found.gid, 4567)?;
    equal("the mode", found.mode & 0o7777, 0o2755)
}
