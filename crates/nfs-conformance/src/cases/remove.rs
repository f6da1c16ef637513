//! REMOVE and RMDIR.

use super::Check;
use crate::fixture::{CaseResult, Fixture, OTHER, equal};
use pagemesh_nfs_client::Credential;
use pagemesh_nfs_client::nfs3::{
    GetAttributes, Handle, Link, Lookup, Remove, RemoveDirectory, SetAttributes, SetAttributesCall,
    Status,
};

pub(super) const REMOVE: &[(&str, Check)] = &[
    ("name_is_removed", name_is_removed),
    ("handle_becomes_stale", handle_becomes_stale),
    ("other_name_keeps_the_file", other_name_keeps_the_file),
    ("symlink_is_removed_itself", symlink_is_removed_itself),
    ("unknown_name_is_noent", unknown_name_is_noent),
    ("directory_is_an_error", directory_is_an_error),
    ("file_is_no_directory", file_is_no_directory),
    ("permission_is_needed", permission_is_needed),
    (
        "mode_of_the_file_does_not_matter",
        mode_of_the_file_does_not_matter,
    ),
    (
        "sticky_directory_protects_files",
        sticky_directory_protects_files,
    ),
];

pub(super) const RMDIR: &[(&str, Check)] = &[
    ("directory_is_removed", directory_is_removed),
    ("handle_becomes_stale", directory_handle_becomes_stale),
    ("full_directory_is_kept", full_directory_is_kept),
    ("file_is_an_error", file_is_an_error),
    (
        "symlink_to_a_directory_is_an_error",
        symlink_to_a_directory_is_an_error,
    ),
    ("unknown_name_is_noent", unknown_directory_is_noent),
    ("dot_is_an_error", dot_is_an_error),
    ("dot_dot_is_an_error", dot_dot_is_an_error),
    ("permission_is_needed", rmdir_needs_permission),
    (
        "sticky_directory_protects_directories",
        sticky_directory_protects_directories,
    ),
];

fn refused(it: &mut Fixture, directory: &Handle, name: &[u8], wanted: &[Status]) -> CaseResult {
    it.fails(&Remove { directory, name }, wanted)?;
    Ok(())
}

fn refused_directory(it: &mut Fixture, name: &[u8], wanted: &[Status]) -> CaseResult {
    let dir = it.dir.clone();
    let directory = &dir;
    it.fails(&RemoveDirectory { directory, name }, wanted)?;
    Ok(())
}

fn is_gone(it: &mut Fixture, name: &[u8]) -> CaseResult {
    let dir = it.dir.clone();
    let directory = &dir;
    it.fails(&Lookup { directory, name }, &[Status::NOENT])?;
    Ok(())
}

fn is_stale(it: &mut Fixture, file: &Handle) -> CaseResult {
    it.fails(&GetAttributes { file }, &[Status::STALE])
}

fn name_is_removed(it: &mut Fixture) -> CaseResult {
    it.file(b"file")?;
    it.remove(b"file")?;
    is_gone(it, b"file")
}

fn handle_becomes_stale(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", b"12345")?;
    it.remove(b"file")?;
    is_stale(it, &file)
}

fn other_name_keeps_the_file(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.file(b"file")?, it.dir.clone());
    it.ok(&Link {
        file: &file,
        directory: &dir,
        name: b"other",
    })?;
    it.remove(b"file")?;
    equal("the links", it.attributes(&file)?.links, 1)?;
    equal("the handle", it.lookup(&dir, b"other")?, file)
}

fn symlink_is_removed_itself(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    it.symlink(b"link", b"file")?;
    it.remove(b"link")?;
    is_gone(it, b"link")?;
    it.attributes(&file)?;
    Ok(())
}

fn unknown_name_is_noent(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    refused(it, &dir, b"none", &[Status::NOENT])
}

/// RFC 1813 leaves REMOVE of a directory to the server, but the tree must stay whole.
fn directory_is_an_error(it: &mut Fixture) -> CaseResult {
    let directory = it.directory(b"directory")?;
    it.file_in(&directory, b"file", 0o644)?;
    let wanted = [
        Status::ISDIR,
        Status::PERM,
        Status::EXIST,
        Status::NOTEMPTY,
        Status::INVAL,
    ];
    let dir = it.dir.clone();
    refused(it, &dir, b"directory", &wanted)?;
    it.lookup(&directory, b"file")?;
    Ok(())
}

fn file_is_no_directory(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    refused(it, &file, b"x", &[Status::NOTDIR])
}

fn permission_is_needed(it: &mut Fixture) -> CaseResult {
    it.file(b"file")?;
    let (dir, other) = (it.dir.clone(), it.other());
    let call = Remove {
        directory: &dir,
        name: b"file",
    };
    it.fails_as(other, &call, &[Status::ACCES])?;
    it.lookup(&dir, b"file")?;
    Ok(())
}

fn mode_of_the_file_does_not_matter(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    it.file_in(&dir, b"file", 0)?;
    it.remove(b"file")
}

fn set_mode(it: &mut Fixture, file: &Handle, mode: u32) -> CaseResult {
    it.ok(&SetAttributesCall {
        file,
        attributes: SetAttributes::mode(mode),
        guard: None,
    })?;
    Ok(())
}

fn sticky_directory_protects_files(it: &mut Fixture) -> CaseResult {
    let (directory, other) = (it.directory(b"sticky")?, it.other());
    let file = it.file_in(&directory, b"file", 0o666)?;
    set_mode(it, &directory, 0o1777)?;
    let call = Remove {
        directory: &directory,
        name: b"file",
    };
    it.fails_as(other.clone(), &call, &[Status::ACCES, Status::PERM])?;
    it.attributes(&file)?;
    set_mode(it, &directory, 0o777)?;
    it.ok_as(other, &call)?;
    Ok(())
}

fn directory_is_removed(it: &mut Fixture) -> CaseResult {
    it.directory(b"directory")?;
    it.remove_directory(b"directory")?;
    is_gone(it, b"directory")
}

fn directory_handle_becomes_stale(it: &mut Fixture) -> CaseResult {
    let directory = it.directory(b"directory")?;
    it.remove_directory(b"directory")?;
    is_stale(it, &directory)
}

fn full_directory_is_kept(it: &mut Fixture) -> CaseResult {
    let directory = it.directory(b"directory")?;
    it.file_in(&directory, b"file", 0o644)?;
    refused_directory(it, b"directory", &[Status::NOTEMPTY, Status::EXIST])?;
    it.lookup(&directory, b"file")?;
    Ok(())
}

fn file_is_an_error(it: &mut Fixture) -> CaseResult {
    it.file(b"file")?;
    refused_directory(it, b"file", &[Status::NOTDIR])
}

fn symlink_to_a_directory_is_an_error(it: &mut Fixture) -> CaseResult {
    it.directory(b"directory")?;
    it.symlink(b"link", b"directory")?;
    refused_directory(it, b"link", &[Status::NOTDIR])
}

fn unknown_directory_is_noent(it: &mut Fixture) -> CaseResult {
    refused_directory(it, b"none", &[Status::NOENT])
}

fn dot_is_an_error(it: &mut Fixture) -> CaseResult {
    refused_directory(it, b".", &[Status::INVAL, Status::ACCES])
}

fn dot_dot_is_an_error(it: &mut Fixture) -> CaseResult {
    let wanted = [
        Status::EXIST,
        Status::INVAL,
        Status::NOTEMPTY,
        Status::ACCES,
    ];
    refused_directory(it, b"..", &wanted)
}

fn rmdir_needs_permission(it: &mut Fixture) -> CaseResult {
    it.directory(b"directory")?;
    let (dir, other) = (it.dir.clone(), it.other());
    let call = RemoveDirectory {
        directory: &dir,
        name: b"directory",
    };
    it.fails_as(other, &call, &[Status::ACCES])?;
    Ok(())
}

fn sticky_directory_protects_directories(it: &mut Fixture) -> CaseResult {
    let directory = it.directory(b"sticky")?;
    it.directory_in(&directory, b"child", 0o777)?;
    set_mode(it, &directory, 0o1777)?;
    let call = RemoveDirectory {
        directory: &directory,
        name: b"child",
    };
    let other = Credential::sys(OTHER, OTHER);
    it.fails_as(other, &call, &[Status::ACCES, Status::PERM])?;
    it.ok(&call)?;
    Ok(())
}
