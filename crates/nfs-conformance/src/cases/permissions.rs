//! Callers: groups, user 0 and AUTH_NONE.

use super::Check;
use crate::fixture::{CaseResult, Fixture, OTHER, Problem, ensure, equal, present};
use pagemesh_nfs_client::Credential;
use pagemesh_nfs_client::nfs3::{
    Create, CreateHow, GetAttributes, Handle, Read, Remove, SetAttributes, SetAttributesCall,
    StableHow, Status, Write,
};

pub(super) const CASES: &[(&str, Check)] = &[
    ("files_belong_to_their_maker", files_belong_to_their_maker),
    ("group_member_reads", group_member_reads),
    ("sixteenth_group_counts", sixteenth_group_counts),
    (
        "caller_outside_the_group_does_not_read",
        caller_outside_the_group_does_not_read,
    ),
    ("owner_bits_count_first", owner_bits_count_first),
    ("auth_none_is_no_owner", auth_none_is_no_owner),
    ("squashed_root_does_not_read", squashed_root_does_not_read),
    ("squashed_root_does_not_write", squashed_root_does_not_write),
    (
        "squashed_root_does_not_remove",
        squashed_root_does_not_remove,
    ),
    (
        "squashed_root_does_not_change_attributes",
        squashed_root_does_not_change_attributes,
    ),
    (
        "squashed_root_makes_no_file_of_root",
        squashed_root_makes_no_file_of_root,
    ),
    (
        "squashed_group_0_has_no_rights",
        squashed_group_0_has_no_rights,
    ),
    (
        "trusted_root_reads_and_writes",
        trusted_root_reads_and_writes,
    ),
    ("trusted_root_removes", trusted_root_removes),
    (
        "trusted_root_makes_files_of_root",
        trusted_root_makes_files_of_root,
    ),
];

/// A new file of another caller.
pub(super) fn file_of(
    it: &mut Fixture,
    caller: Credential,
    directory: &Handle,
    name: &[u8],
) -> Result<Handle, Problem> {
    let made = it.ok_as(
        caller,
        &Create {
            directory,
            name,
            how: CreateHow::Guarded(SetAttributes::mode(0o644)),
        },
    )?;
    present("the handle", made.handle)
}

fn set_mode(it: &mut Fixture, file: &Handle, mode: u32) -> CaseResult {
    it.ok(&SetAttributesCall {
        file,
        attributes: SetAttributes::mode(mode),
        guard: None,
    })?;
    Ok(())
}

fn open_directory(it: &mut Fixture) -> Result<Handle, Problem> {
    let directory = it.directory(b"open")?;
    set_mode(it, &directory, 0o777)?;
    Ok(directory)
}

fn files_belong_to_their_maker(it: &mut Fixture) -> CaseResult {
    let directory = open_directory(it)?;
    let caller = Credential::sys(3456, 4567);
    let file = file_of(it, caller, &directory, b"file")?;
    let found = it.attributes(&file)?;
    equal("owner and group", (found.uid, found.gid), (3456, 4567))
}

fn read(file: &Handle) -> Read<'_> {
    Read {
        file,
        offset: 0,
        count: 10,
    }
}

fn file_of_mode(it: &mut Fixture, mode: u32) -> Result<Handle, Problem> {
    let file = it.file_with(b"file", b"12345")?;
    set_mode(it, &file, mode)?;
    Ok(file)
}

fn group_member_reads(it: &mut Fixture) -> CaseResult {
    let file = file_of_mode(it, 0o640)?;
    let member = Credential::sys(OTHER, it.server.gid);
    it.ok_as(member, &read(&file))?;
    Ok(())
}

fn sixteenth_group_counts(it: &mut Fixture) -> CaseResult {
    let file = file_of_mode(it, 0o640)?;
    let member = Credential::Sys {
        uid: OTHER,
        gid: OTHER,
        groups: (6000..6015).chain([it.server.gid]).collect(),
    };
    it.ok_as(member, &read(&file))?;
    Ok(())
}

fn caller_outside_the_group_does_not_read(it: &mut Fixture) -> CaseResult {
    let (file, other) = (file_of_mode(it, 0o640)?, it.other());
    it.fails_as(other, &read(&file), &[Status::ACCES])?;
    Ok(())
}

/// WRITE has exceptions for the owner, a directory has none.
fn owner_bits_count_first(it: &mut Fixture) -> CaseResult {
    let directory = open_directory(it)?;
    set_mode(it, &directory, 0o077)?;
    let call = Create {
        directory: &directory,
        name: b"x",
        how: CreateHow::Guarded(SetAttributes::mode(0o644)),
    };
    it.fails(&call, &[Status::ACCES])?;
    Ok(())
}

fn auth_none_is_no_owner(it: &mut Fixture) -> CaseResult {
    let file = file_of_mode(it, 0o600)?;
    match it.client_of(Credential::None)?.call(&read(&file)) {
        Ok(Err(_)) | Err(pagemesh_nfs_client::ClientError::Refused(_)) => Ok(()),
        Ok(Ok(_)) => Err(Problem::Wrong("AUTH_NONE reads a file of mode 600".into())),
        Err(error) => Err(error.into()),
    }
}

/// User 0, or a skipped case if the server trusts it.
fn squashed_root(it: &Fixture) -> Result<Credential, Problem> {
    match it.server.trusts_root {
        true => Err(Problem::Skipped("the server trusts user 0".into())),
        false => Ok(Credential::sys(0, 0)),
    }
}

fn squashed_root_does_not_read(it: &mut Fixture) -> CaseResult {
    let root = squashed_root(it)?;
    let file = file_of_mode(it, 0o600)?;
    it.fails_as(root, &read(&file), &[Status::ACCES])?;
    Ok(())
}

fn squashed_root_does_not_write(it: &mut Fixture) -> CaseResult {
    let root = squashed_root(it)?;
    let file = file_of_mode(it, 0o644)?;
    let call = Write {
        file: &file,
        offset: 0,
        stable: StableHow::FileSync,
        data: b"x",
    };
    it.fails_as(root, &call, &[Status::ACCES])?;
    Ok(())
}

fn squashed_root_does_not_remove(it: &mut Fixture) -> CaseResult {
    let root = squashed_root(it)?;
    file_of_mode(it, 0o644)?;
    let directory = it.dir.clone();
    let call = Remove {
        directory: &directory,
        name: b"file",
    };
    it.fails_as(root, &call, &[Status::ACCES])?;
    Ok(())
}

fn squashed_root_does_not_change_attributes(it: &mut Fixture) -> CaseResult {
    let root = squashed_root(it)?;
    let file = file_of_mode(it, 0o644)?;
    for attributes in [
        SetAttributes::mode(0o777),
        SetAttributes {
            uid: Some(0),
            ..SetAttributes::default()
        },
    ] {
        let call = SetAttributesCall {
            file: &file,
            attributes,
            guard: None,
        };
        it.fails_as(root.clone(), &call, &[Status::PERM])?;
    }
    Ok(())
}

fn squashed_root_makes_no_file_of_root(it: &mut Fixture) -> CaseResult {
    let root = squashed_root(it)?;
    let directory = open_directory(it)?;
    let file = file_of(it, root, &directory, b"file")?;
    let found = it.attributes(&file)?;
    ensure!(found.uid != 0, "the owner is user 0");
    ensure!(found.gid != 0, "the group is group 0");
    Ok(())
}

fn squashed_group_0_has_no_rights(it: &mut Fixture) -> CaseResult {
    squashed_root(it)?;
    let directory = open_directory(it)?;
    let caller = Credential::sys(OTHER, 0);
    let file = file_of(it, caller, &directory, b"file")?;
    let found = it.ok(&GetAttributes { file: &file })?;
    ensure!(found.gid != 0, "the group is group 0");
    Ok(())
}

fn trusted_root_reads_and_writes(it: &mut Fixture) -> CaseResult {
    let root = it.trusted_root()?;
    let file = file_of_mode(it, 0)?;
    it.ok_as(root.clone(), &read(&file))?;
    let call = Write {
        file: &file,
        offset: 0,
        stable: StableHow::FileSync,
        data: b"x",
    };
    it.ok_as(root, &call)?;
    Ok(())
}

fn trusted_root_removes(it: &mut Fixture) -> CaseResult {
    let root = it.trusted_root()?;
    file_of_mode(it, 0)?;
    let directory = it.dir.clone();
    let call = Remove {
        directory: &directory,
        name: b"file",
    };
    it.ok_as(root, &call)?;
    Ok(())
}

fn trusted_root_makes_files_of_root(it: &mut Fixture) -> CaseResult {
    let root = it.trusted_root()?;
    let directory = it.dir.clone();
    let file = file_of(it, root, &directory, b"file")?;
    let found = it.attributes(&file)?;
    equal("owner and group", (found.uid, found.gid), (0, 0))
}
