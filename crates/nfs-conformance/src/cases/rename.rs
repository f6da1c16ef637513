//! RENAME.

use super::Check;
use crate::fixture::{CaseResult, Fixture, Problem, ensure, equal};
use pagemesh_nfs_client::nfs3::{
    GetAttributes, Handle, Link, Lookup, Rename, SetAttributes, SetAttributesCall, Status,
};

pub(super) const CASES: &[(&str, Check)] = &[
    ("name_changes", name_changes),
    (
        "file_moves_to_another_directory",
        file_moves_to_another_directory,
    ),
    ("handle_survives", handle_survives),
    ("file_replaces_a_file", file_replaces_a_file),
    ("replaced_file_is_stale", replaced_file_is_stale),
    ("file_replaces_a_symlink", file_replaces_a_symlink),
    ("symlink_moves_itself", symlink_moves_itself),
    ("directory_moves", directory_moves),
    (
        "moved_directory_has_its_new_parent",
        moved_directory_has_its_new_parent,
    ),
    (
        "links_of_parents_follow_a_directory",
        links_of_parents_follow_a_directory,
    ),
    (
        "directory_replaces_an_empty_directory",
        directory_replaces_an_empty_directory,
    ),
    (
        "full_directory_is_not_replaced",
        full_directory_is_not_replaced,
    ),
    (
        "file_does_not_replace_a_directory",
        file_does_not_replace_a_directory,
    ),
    (
        "directory_does_not_replace_a_file",
        directory_does_not_replace_a_file,
    ),
    ("same_name_changes_nothing", same_name_changes_nothing),
    ("names_of_one_file_are_kept", names_of_one_file_are_kept),
    (
        "directory_does_not_move_into_itself",
        directory_does_not_move_into_itself,
    ),
    (
        "directory_does_not_move_below_itself",
        directory_does_not_move_below_itself,
    ),
    ("unknown_name_is_noent", unknown_name_is_noent),
    ("dots_are_errors", dots_are_errors),
    ("file_is_no_directory", file_is_no_directory),
    ("source_needs_permission", source_needs_permission),
    ("destination_needs_permission", destination_needs_permission),
    ("sticky_source_protects_files", sticky_source_protects_files),
    (
        "sticky_destination_protects_files",
        sticky_destination_protects_files,
    ),
    ("stale_destination_is_stale", stale_destination_is_stale),
];

type Name<'a> = (&'a Handle, &'a [u8]);

fn rename(it: &mut Fixture, from: Name<'_>, to: Name<'_>) -> CaseResult {
    it.ok(&Rename { from, to })?;
    Ok(())
}

fn refused(it: &mut Fixture, from: Name<'_>, to: Name<'_>, wanted: &[Status]) -> CaseResult {
    it.fails(&Rename { from, to }, wanted)?;
    Ok(())
}

fn is_gone(it: &mut Fixture, directory: &Handle, name: &[u8]) -> CaseResult {
    it.fails(&Lookup { directory, name }, &[Status::NOENT])?;
    Ok(())
}

fn set_mode(it: &mut Fixture, file: &Handle, mode: u32) -> CaseResult {
    it.ok(&SetAttributesCall {
        file,
        attributes: SetAttributes::mode(mode),
        guard: None,
    })?;
    Ok(())
}

fn name_changes(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.file(b"a")?, it.dir.clone());
    rename(it, (&dir, b"a"), (&dir, b"b"))?;
    is_gone(it, &dir, b"a")?;
    equal("the handle", it.lookup(&dir, b"b")?, file)
}

fn file_moves_to_another_directory(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.file(b"a")?, it.dir.clone());
    let other = it.directory(b"other")?;
    rename(it, (&dir, b"a"), (&other, b"a"))?;
    is_gone(it, &dir, b"a")?;
    equal("the handle", it.lookup(&other, b"a")?, file)
}

fn handle_survives(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.file_with(b"a", b"12345")?, it.dir.clone());
    rename(it, (&dir, b"a"), (&dir, b"b"))?;
    equal("the size", it.attributes(&file)?.size_bytes, 5)
}

fn file_replaces_a_file(it: &mut Fixture) -> CaseResult {
    let (a, dir) = (it.file(b"a")?, it.dir.clone());
    it.file(b"b")?;
    rename(it, (&dir, b"a"), (&dir, b"b"))?;
    equal("the handle", it.lookup(&dir, b"b")?, a)?;
    is_gone(it, &dir, b"a")
}

fn replaced_file_is_stale(it: &mut Fixture) -> CaseResult {
    it.file(b"a")?;
    let (b, dir) = (it.file(b"b")?, it.dir.clone());
    rename(it, (&dir, b"a"), (&dir, b"b"))?;
    it.fails(&GetAttributes { file: &b }, &[Status::STALE])
}

fn file_replaces_a_symlink(it: &mut Fixture) -> CaseResult {
    let (target, file) = (it.file(b"target")?, it.file(b"file")?);
    it.symlink(b"link", b"target")?;
    let dir = it.dir.clone();
    rename(it, (&dir, b"file"), (&dir, b"link"))?;
    equal("the handle", it.lookup(&dir, b"link")?, file)?;
    it.attributes(&target)?;
    Ok(())
}

fn symlink_moves_itself(it: &mut Fixture) -> CaseResult {
    let (link, dir) = (it.symlink(b"link", b"none")?, it.dir.clone());
    rename(it, (&dir, b"link"), (&dir, b"moved"))?;
    equal("the handle", it.lookup(&dir, b"moved")?, link)
}

fn directory_moves(it: &mut Fixture) -> CaseResult {
    let (directory, other) = (it.directory(b"directory")?, it.directory(b"other")?);
    let file = it.file_in(&directory, b"file", 0o644)?;
    let dir = it.dir.clone();
    rename(it, (&dir, b"directory"), (&other, b"moved"))?;
    equal(
        "the handle",
        it.lookup(&other, b"moved")?,
        directory.clone(),
    )?;
    equal("the file", it.lookup(&directory, b"file")?, file)
}

fn moved_directory_has_its_new_parent(it: &mut Fixture) -> CaseResult {
    let (directory, other) = (it.directory(b"directory")?, it.directory(b"other")?);
    let dir = it.dir.clone();
    rename(it, (&dir, b"directory"), (&other, b"moved"))?;
    equal("the parent", it.lookup(&directory, b"..")?, other)
}

fn links_of_parents_follow_a_directory(it: &mut Fixture) -> CaseResult {
    it.directory(b"directory")?;
    let (other, dir) = (it.directory(b"other")?, it.dir.clone());
    let before = it.attributes(&dir)?.links;
    rename(it, (&dir, b"directory"), (&other, b"moved"))?;
    equal("the links", it.attributes(&dir)?.links, before - 1)?;
    equal("the links", it.attributes(&other)?.links, 3)
}

fn directory_replaces_an_empty_directory(it: &mut Fixture) -> CaseResult {
    let (a, b) = (it.directory(b"a")?, it.directory(b"b")?);
    it.file_in(&a, b"file", 0o644)?;
    let dir = it.dir.clone();
    rename(it, (&dir, b"a"), (&dir, b"b"))?;
    equal("the handle", it.lookup(&dir, b"b")?, a)?;
    it.fails(&GetAttributes { file: &b }, &[Status::STALE])
}

fn full_directory_is_not_replaced(it: &mut Fixture) -> CaseResult {
    it.directory(b"a")?;
    let (b, dir) = (it.directory(b"b")?, it.dir.clone());
    it.file_in(&b, b"file", 0o644)?;
    let wanted = [Status::NOTEMPTY, Status::EXIST];
    refused(it, (&dir, b"a"), (&dir, b"b"), &wanted)?;
    it.lookup(&dir, b"a")?;
    it.lookup(&b, b"file")?;
    Ok(())
}

/// RFC 1813 names EXIST; Linux has ISDIR and NOTDIR.
fn file_does_not_replace_a_directory(it: &mut Fixture) -> CaseResult {
    it.file(b"a")?;
    it.directory(b"b")?;
    let dir = it.dir.clone();
    let wanted = [Status::EXIST, Status::ISDIR];
    refused(it, (&dir, b"a"), (&dir, b"b"), &wanted)
}

fn directory_does_not_replace_a_file(it: &mut Fixture) -> CaseResult {
    it.directory(b"a")?;
    it.file(b"b")?;
    let dir = it.dir.clone();
    let wanted = [Status::EXIST, Status::NOTDIR];
    refused(it, (&dir, b"a"), (&dir, b"b"), &wanted)
}

fn same_name_changes_nothing(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.file(b"a")?, it.dir.clone());
    rename(it, (&dir, b"a"), (&dir, b"a"))?;
    equal("the handle", it.lookup(&dir, b"a")?, file)
}

fn names_of_one_file_are_kept(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.file(b"a")?, it.dir.clone());
    it.ok(&Link {
        file: &file,
        directory: &dir,
        name: b"b",
    })?;
    rename(it, (&dir, b"a"), (&dir, b"b"))?;
    it.lookup(&dir, b"a")?;
    equal("the links", it.attributes(&file)?.links, 2)
}

fn directory_does_not_move_into_itself(it: &mut Fixture) -> CaseResult {
    let (directory, dir) = (it.directory(b"a")?, it.dir.clone());
    refused(it, (&dir, b"a"), (&directory, b"b"), &[Status::INVAL])
}

fn directory_does_not_move_below_itself(it: &mut Fixture) -> CaseResult {
    let (directory, dir) = (it.directory(b"a")?, it.dir.clone());
    let child = it.directory_in(&directory, b"child", 0o755)?;
    refused(it, (&dir, b"a"), (&child, b"b"), &[Status::INVAL])
}

fn unknown_name_is_noent(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    refused(it, (&dir, b"none"), (&dir, b"b"), &[Status::NOENT])
}

fn dots_are_errors(it: &mut Fixture) -> CaseResult {
    it.directory(b"a")?;
    let dir = it.dir.clone();
    let wanted = [
        Status::INVAL,
        Status::EXIST,
        Status::ACCES,
        Status::ISDIR,
        Status::NOTEMPTY,
    ];
    for dots in [&b"."[..], b".."] {
        refused(it, (&dir, dots), (&dir, b"b"), &wanted)?;
        refused(it, (&dir, b"a"), (&dir, dots), &wanted)?;
    }
    Ok(())
}

fn file_is_no_directory(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.file(b"file")?, it.dir.clone());
    refused(it, (&file, b"x"), (&dir, b"y"), &[Status::NOTDIR])?;
    refused(it, (&dir, b"file"), (&file, b"y"), &[Status::NOTDIR])
}

/// A directory of mode 755 or 777 with a file of the owner.
fn two_directories(it: &mut Fixture) -> Result<[Handle; 2], Problem> {
    let (closed, open) = (it.directory(b"closed")?, it.directory(b"open")?);
    it.file_in(&closed, b"file", 0o666)?;
    it.file_in(&open, b"file", 0o666)?;
    set_mode(it, &open, 0o777)?;
    Ok([closed, open])
}

fn source_needs_permission(it: &mut Fixture) -> CaseResult {
    let ([closed, open], other) = (two_directories(it)?, it.other());
    let call = Rename {
        from: (&closed, b"file"),
        to: (&open, b"new"),
    };
    it.fails_as(other, &call, &[Status::ACCES])?;
    Ok(())
}

fn destination_needs_permission(it: &mut Fixture) -> CaseResult {
    let ([closed, open], other) = (two_directories(it)?, it.other());
    let call = Rename {
        from: (&open, b"file"),
        to: (&closed, b"new"),
    };
    it.fails_as(other, &call, &[Status::ACCES])?;
    Ok(())
}

fn sticky_source_protects_files(it: &mut Fixture) -> CaseResult {
    let ([_, open], other) = (two_directories(it)?, it.other());
    set_mode(it, &open, 0o1777)?;
    let call = Rename {
        from: (&open, b"file"),
        to: (&open, b"new"),
    };
    it.fails_as(other, &call, &[Status::ACCES, Status::PERM])?;
    Ok(())
}

fn sticky_destination_protects_files(it: &mut Fixture) -> CaseResult {
    let ([_, open], other) = (two_directories(it)?, it.other());
    set_mode(it, &open, 0o1777)?;
    let own = super::permissions::file_of(it, other.clone(), &open, b"own")?;
    let call = Rename {
        from: (&open, b"own"),
        to: (&open, b"file"),
    };
    it.fails_as(other, &call, &[Status::ACCES, Status::PERM])?;
    let found = it.lookup(&open, b"own")?;
    ensure!(found == own, "the file moved");
    Ok(())
}

fn stale_destination_is_stale(it: &mut Fixture) -> CaseResult {
    it.file(b"file")?;
    let (stale, dir) = (it.stale_directory()?, it.dir.clone());
    let wanted = [Status::STALE, Status::NOENT];
    refused(it, (&dir, b"file"), (&stale, b"x"), &wanted)?;
    it.lookup(&dir, b"file")?;
    Ok(())
}
