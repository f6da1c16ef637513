//! LINK.

use super::Check;
use crate::fixture::{CaseResult, Fixture, equal};
use pagemesh_nfs_client::nfs3::{Link, PathConf, Status};

pub(super) const CASES: &[(&str, Check)] = &[
    ("file_has_a_second_name", file_has_a_second_name),
    ("result_has_attributes", result_has_attributes),
    ("existing_name_is_kept", existing_name_is_kept),
    ("directory_is_an_error", directory_is_an_error),
    ("file_is_no_directory", file_is_no_directory),
    ("permission_is_needed", permission_is_needed),
    ("stale_file_is_stale", stale_file_is_stale),
    ("stale_directory_is_stale", stale_directory_is_stale),
    ("maximum_of_links_is_told", maximum_of_links_is_told),
];

fn file_has_a_second_name(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.file_with(b"file", b"12345")?, it.dir.clone());
    it.ok(&Link {
        file: &file,
        directory: &dir,
        name: b"other",
    })?;
    equal("the handle", it.lookup(&dir, b"other")?, file.clone())?;
    equal("the links", it.attributes(&file)?.links, 2)
}

fn result_has_attributes(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.file(b"file")?, it.dir.clone());
    let linked = it.ok(&Link {
        file: &file,
        directory: &dir,
        name: b"other",
    })?;
    it.check_after("the file", &file, linked.attributes)?;
    it.check_after("the directory", &dir, linked.directory.after)
}

fn existing_name_is_kept(it: &mut Fixture) -> CaseResult {
    let (file, other) = (it.file(b"file")?, it.file(b"other")?);
    let dir = it.dir.clone();
    let call = Link {
        file: &file,
        directory: &dir,
        name: b"other",
    };
    it.fails(&call, &[Status::EXIST])?;
    equal("the handle", it.lookup(&dir, b"other")?, other)
}

fn directory_is_an_error(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.directory(b"directory")?, it.dir.clone());
    let call = Link {
        file: &file,
        directory: &dir,
        name: b"other",
    };
    let wanted = [Status::ISDIR, Status::PERM, Status::INVAL];
    it.fails(&call, &wanted)?;
    Ok(())
}

fn file_is_no_directory(it: &mut Fixture) -> CaseResult {
    let (file, other) = (it.file(b"file")?, it.file(b"other")?);
    let call = Link {
        file: &file,
        directory: &other,
        name: b"x",
    };
    it.fails(&call, &[Status::NOTDIR])?;
    Ok(())
}

fn permission_is_needed(it: &mut Fixture) -> CaseResult {
    let (file, dir, other) = (it.file(b"file")?, it.dir.clone(), it.other());
    let call = Link {
        file: &file,
        directory: &dir,
        name: b"x",
    };
    it.fails_as(other, &call, &[Status::ACCES, Status::PERM])?;
    Ok(())
}

fn stale_file_is_stale(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.stale_file()?, it.dir.clone());
    let call = Link {
        file: &file,
        directory: &dir,
        name: b"x",
    };
    it.fails(&call, &[Status::STALE])?;
    Ok(())
}

fn stale_directory_is_stale(it: &mut Fixture) -> CaseResult {
    let (file, directory) = (it.file(b"file")?, it.stale_directory()?);
    let call = Link {
        file: &file,
        directory: &directory,
        name: b"x",
    };
    it.fails(&call, &[Status::STALE, Status::NOENT])?;
    Ok(())
}

fn maximum_of_links_is_told(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let told = it.ok(&PathConf { file: &file })?;
    crate::fixture::ensure!(told.links_max >= 2, "linkmax is {}", told.links_max);
    Ok(())
}
