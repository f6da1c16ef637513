//! LOOKUP and READLINK.

use super::Check;
use crate::fixture::{CaseResult, Fixture, equal, present};
use pagemesh_nfs_client::nfs3::{FileType, Lookup, ReadLink, Status};

pub(super) const LOOKUP: &[(&str, Check)] = &[
    ("name_is_found", name_is_found),
    ("result_has_both_attributes", result_has_both_attributes),
    ("unknown_name_is_noent", unknown_name_is_noent),
    (
        "failure_has_directory_attributes",
        failure_has_directory_attributes,
    ),
    ("file_is_no_directory", file_is_no_directory),
    ("symlink_is_no_directory", symlink_is_no_directory),
    ("symlink_is_not_followed", symlink_is_not_followed),
    ("dot_is_the_directory", dot_is_the_directory),
    ("dot_dot_is_the_parent", dot_dot_is_the_parent),
    (
        "dot_dot_of_the_root_stays_inside",
        dot_dot_of_the_root_stays_inside,
    ),
    ("case_of_letters_counts", case_of_letters_counts),
    ("any_bytes_are_a_name", any_bytes_are_a_name),
    ("search_permission_is_needed", search_permission_is_needed),
    (
        "read_permission_is_not_needed",
        read_permission_is_not_needed,
    ),
];

pub(super) const READLINK: &[(&str, Check)] = &[
    ("target_is_read", target_is_read),
    ("result_has_attributes", result_has_attributes),
    ("target_of_1000_bytes_is_read", target_of_1000_bytes_is_read),
    ("any_bytes_are_a_target", any_bytes_are_a_target),
    ("file_is_invalid", file_is_invalid),
    ("directory_is_invalid", directory_is_invalid),
    ("any_caller_may_read", any_caller_may_read),
];

fn name_is_found(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.file(b"file")?, it.dir.clone());
    equal("the handle", it.lookup(&dir, b"file")?, file)
}

fn result_has_both_attributes(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.file(b"file")?, it.dir.clone());
    let found = it.ok(&Lookup {
        directory: &dir,
        name: b"file",
    })?;
    it.check_after("the file", &file, found.attributes)?;
    it.check_after("the directory", &dir, found.directory)
}

fn unknown_name_is_noent(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let call = Lookup {
        directory: &dir,
        name: b"none",
    };
    it.fails(&call, &[Status::NOENT])?;
    Ok(())
}

fn failure_has_directory_attributes(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let call = Lookup {
        directory: &dir,
        name: b"none",
    };
    let attributes = it.fails(&call, &[Status::NOENT])?;
    it.check_after("the directory", &dir, attributes)
}

fn file_is_no_directory(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let call = Lookup {
        directory: &file,
        name: b"x",
    };
    it.fails(&call, &[Status::NOTDIR])?;
    Ok(())
}

fn symlink_is_no_directory(it: &mut Fixture) -> CaseResult {
    let link = it.symlink(b"link", b".")?;
    let call = Lookup {
        directory: &link,
        name: b"x",
    };
    it.fails(&call, &[Status::NOTDIR])?;
    Ok(())
}

fn symlink_is_not_followed(it: &mut Fixture) -> CaseResult {
    it.file(b"file")?;
    let (link, dir) = (it.symlink(b"link", b"file")?, it.dir.clone());
    let found = it.lookup(&dir, b"link")?;
    equal("the handle", &found, &link)?;
    equal("the type", it.attributes(&found)?.kind, FileType::Symlink)
}

fn dot_is_the_directory(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    equal("the handle", it.lookup(&dir, b".")?, dir)
}

fn dot_dot_is_the_parent(it: &mut Fixture) -> CaseResult {
    let (child, dir) = (it.directory(b"child")?, it.dir.clone());
    equal("the handle", it.lookup(&child, b"..")?, dir)
}

/// A server answers with the root, or not at all: it never leads out of the export.
fn dot_dot_of_the_root_stays_inside(it: &mut Fixture) -> CaseResult {
    let root = it.root.clone();
    let found = it.call(&Lookup {
        directory: &root,
        name: b"..",
    })?;
    match found {
        Ok(found) => equal("the handle", found.handle, root),
        Err(_) => Ok(()),
    }
}

fn case_of_letters_counts(it: &mut Fixture) -> CaseResult {
    let (lower, upper) = (it.file(b"name")?, it.file(b"NAME")?);
    let dir = it.dir.clone();
    equal("the handle", it.lookup(&dir, b"name")?, lower)?;
    equal("the handle", it.lookup(&dir, b"NAME")?, upper)
}

fn any_bytes_are_a_name(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    for name in [&b"\xff\xfe\x01\n"[..], b" ", b"...", b"-rf *", b"\\"] {
        let file = it.file(name)?;
        equal("the handle", it.lookup(&dir, name)?, file)?;
    }
    Ok(())
}

fn search_permission_is_needed(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let closed = it.directory_in(&dir, b"closed", 0o744)?;
    it.file_in(&closed, b"file", 0o644)?;
    let other = it.other();
    let call = Lookup {
        directory: &closed,
        name: b"file",
    };
    it.fails_as(other, &call, &[Status::ACCES])?;
    Ok(())
}

fn read_permission_is_not_needed(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let directory = it.directory_in(&dir, b"unlisted", 0o711)?;
    it.file_in(&directory, b"file", 0o644)?;
    let other = it.other();
    let call = Lookup {
        directory: &directory,
        name: b"file",
    };
    it.ok_as(other, &call)?;
    Ok(())
}

fn target_is_read(it: &mut Fixture) -> CaseResult {
    let file = it.symlink(b"link", b"../some/target")?;
    let read = it.ok(&ReadLink { file: &file })?;
    equal("the target", read.target, b"../some/target".to_vec())
}

fn result_has_attributes(it: &mut Fixture) -> CaseResult {
    let file = it.symlink(b"link", b"target")?;
    let read = it.ok(&ReadLink { file: &file })?;
    let attributes = present("the attributes", read.attributes)?;
    equal("the type", attributes.kind, FileType::Symlink)
}

fn target_of_1000_bytes_is_read(it: &mut Fixture) -> CaseResult {
    let target = vec![b't'; 1000];
    let file = it.symlink(b"link", &target)?;
    let read = it.ok(&ReadLink { file: &file })?;
    equal("the target", read.target, target)
}

fn any_bytes_are_a_target(it: &mut Fixture) -> CaseResult {
    let target = b"\xff//\x01\n..";
    let file = it.symlink(b"link", target)?;
    let read = it.ok(&ReadLink { file: &file })?;
    equal("the target", read.target, target.to_vec())
}

fn file_is_invalid(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    it.fails(&ReadLink { file: &file }, &[Status::INVAL])?;
    Ok(())
}

fn directory_is_invalid(it: &mut Fixture) -> CaseResult {
    let file = it.directory(b"directory")?;
    it.fails(&ReadLink { file: &file }, &[Status::INVAL])?;
    Ok(())
}

fn any_caller_may_read(it: &mut Fixture) -> CaseResult {
    let (file, other) = (it.symlink(b"link", b"target")?, it.other());
    it.ok_as(other, &ReadLink { file: &file })?;
    Ok(())
}
