//! Attributes before and after a change (wcc_data). The RFC lets a server leave them out; a client
//! then drops its cache after each of its own changes. The cases ask for both.

use super::Check;
use crate::fixture::{CaseResult, Fixture, ensure};
use pagemesh_nfs_client::nfs3::{
    Attributes, Commit, Create, CreateHow, Link, MakeDirectory, Remove, RemoveDirectory, Rename,
    SetAttributes, SetAttributesCall, StableHow, Status, Symlink, WccData, Write,
};

pub(super) const CASES: &[(&str, Check)] = &[
    ("setattr", setattr),
    ("setattr_failure", setattr_failure),
    ("write_append", write_append),
    ("write_overwrite", write_overwrite),
    ("commit", commit),
    ("create", create),
    ("create_failure", create_failure),
    ("mkdir", mkdir),
    ("symlink", symlink),
    ("remove", remove),
    ("remove_failure", remove_failure),
    ("rmdir", rmdir),
    ("rename", rename),
    ("rename_in_one_directory", rename_in_one_directory),
    ("link", link),
    ("changes_have_distinct_times", changes_have_distinct_times),
];

fn setattr(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let before = it.attributes(&file)?;
    let wcc = it.ok(&SetAttributesCall {
        file: &file,
        attributes: SetAttributes::mode(0o600),
        guard: None,
    })?;
    it.check_wcc("SETATTR", &file, &before, &wcc)
}

fn setattr_failure(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let other = it.other();
    let call = SetAttributesCall {
        file: &file,
        attributes: SetAttributes::mode(0o600),
        guard: None,
    };
    let wcc = it.fails_as(other, &call, &[Status::PERM])?;
    it.check_after("SETATTR", &file, wcc.after)
}

fn write_at(it: &mut Fixture, offset: u64) -> CaseResult {
    let file = it.file_with(b"file", b"12345")?;
    let before = it.attributes(&file)?;
    let written = it.ok(&Write {
        file: &file,
        offset,
        stable: StableHow::Unstable,
        data: b"abc",
    })?;
    it.check_wcc("WRITE", &file, &before, &written.wcc)
}

fn write_append(it: &mut Fixture) -> CaseResult {
    write_at(it, 5)
}

fn write_overwrite(it: &mut Fixture) -> CaseResult {
    write_at(it, 1)
}

fn commit(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", b"12345")?;
    let before = it.attributes(&file)?;
    let committed = it.ok(&Commit {
        file: &file,
        offset: 0,
        count: 0,
    })?;
    it.check_wcc("COMMIT", &file, &before, &committed.wcc)
}

/// Checks the attributes of the directory of the case around a change.
fn check_directory(it: &mut Fixture, what: &str, before: &Attributes, wcc: &WccData) -> CaseResult {
    let dir = it.dir.clone();
    it.check_wcc(what, &dir, before, wcc)?;
    let changed = wcc.after.map(|after| after.changed);
    ensure!(changed > Some(before.changed), "{what}: ctime {changed:?}");
    Ok(())
}

fn create(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let before = it.attributes(&dir)?;
    let made = it.ok(&Create {
        directory: &dir,
        name: b"file",
        how: CreateHow::Guarded(SetAttributes::mode(0o644)),
    })?;
    check_directory(it, "CREATE", &before, &made.directory)
}

fn create_failure(it: &mut Fixture) -> CaseResult {
    it.file(b"file")?;
    let dir = it.dir.clone();
    let call = Create {
        directory: &dir,
        name: b"file",
        how: CreateHow::Guarded(SetAttributes::mode(0o644)),
    };
    let wcc = it.fails(&call, &[Status::EXIST])?;
    it.check_after("CREATE", &dir, wcc.after)
}

fn mkdir(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let before = it.attributes(&dir)?;
    let made = it.ok(&MakeDirectory {
        directory: &dir,
        name: b"directory",
        attributes: SetAttributes::mode(0o755),
    })?;
    check_directory(it, "MKDIR", &before, &made.directory)
}

fn symlink(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let before = it.attributes(&dir)?;
    let made = it.ok(&Symlink {
        directory: &dir,
        name: b"link",
        attributes: SetAttributes::default(),
        target: b"target",
    })?;
    check_directory(it, "SYMLINK", &before, &made.directory)
}

fn remove(it: &mut Fixture) -> CaseResult {
    it.file(b"file")?;
    let dir = it.dir.clone();
    let before = it.attributes(&dir)?;
    let wcc = it.ok(&Remove {
        directory: &dir,
        name: b"file",
    })?;
    check_directory(it, "REMOVE", &before, &wcc)
}

fn remove_failure(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let call = Remove {
        directory: &dir,
        name: b"none",
    };
    let wcc = it.fails(&call, &[Status::NOENT])?;
    it.check_after("REMOVE", &dir, wcc.after)
}

fn rmdir(it: &mut Fixture) -> CaseResult {
    it.directory(b"directory")?;
    let dir = it.dir.clone();
    let before = it.attributes(&dir)?;
    let wcc = it.ok(&RemoveDirectory {
        directory: &dir,
        name: b"directory",
    })?;
    check_directory(it, "RMDIR", &before, &wcc)
}

fn rename(it: &mut Fixture) -> CaseResult {
    it.file(b"file")?;
    let (dir, other) = (it.dir.clone(), it.directory(b"other")?);
    let before = it.attributes(&dir)?;
    let other_before = it.attributes(&other)?;
    let renamed = it.ok(&Rename {
        from: (&dir, b"file"),
        to: (&other, b"file"),
    })?;
    check_directory(it, "RENAME", &before, &renamed.from)?;
    it.check_wcc("RENAME", &other, &other_before, &renamed.to)
}

fn rename_in_one_directory(it: &mut Fixture) -> CaseResult {
    it.file(b"file")?;
    let dir = it.dir.clone();
    let before = it.attributes(&dir)?;
    let renamed = it.ok(&Rename {
        from: (&dir, b"file"),
        to: (&dir, b"new"),
    })?;
    check_directory(it, "RENAME", &before, &renamed.from)?;
    check_directory(it, "RENAME", &before, &renamed.to)
}

fn link(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.file(b"file")?, it.dir.clone());
    let before = it.attributes(&dir)?;
    let linked = it.ok(&Link {
        file: &file,
        directory: &dir,
        name: b"other",
    })?;
    check_directory(it, "LINK", &before, &linked.directory)
}

/// Two changes in one tick of a coarse clock would look like one to a client.
fn changes_have_distinct_times(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let mut last = it.attributes(&dir)?.changed;
    for number in 0..20 {
        it.file(format!("file-{number}").as_bytes())?;
        let changed = it.attributes(&dir)?.changed;
        ensure!(changed > last, "{changed:?} follows {last:?}");
        last = changed;
    }
    Ok(())
}
