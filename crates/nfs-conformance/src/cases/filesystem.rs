//! FSSTAT, FSINFO and PATHCONF.

use super::Check;
use crate::fixture::{CaseResult, Fixture, Problem, ensure, equal};
use pagemesh_nfs_client::Credential;
use pagemesh_nfs_client::nfs3::{
    FsInfo, FsInfoData, FsStat, PathConf, PathConfData, Status, properties,
};

pub(super) const FSSTAT: &[(&str, Check)] = &[
    ("numbers_are_consistent", numbers_are_consistent),
    ("any_file_has_the_numbers", any_file_has_the_numbers),
    ("result_has_attributes", stat_has_attributes),
    ("any_caller_may_ask", any_caller_may_ask),
];

pub(super) const FSINFO: &[(&str, Check)] = &[
    (
        "transfer_sizes_are_consistent",
        transfer_sizes_are_consistent,
    ),
    (
        "largest_file_has_4_gib_or_more",
        largest_file_has_4_gib_or_more,
    ),
    ("time_delta_is_below_a_minute", time_delta_is_below_a_minute),
    ("links_are_supported_as_told", links_are_supported_as_told),
    ("null_credential_may_ask", null_credential_may_ask),
    ("result_has_attributes", info_has_attributes),
];

pub(super) const PATHCONF: &[(&str, Check)] = &[
    ("longest_name_is_made", longest_name_is_made),
    (
        "longer_name_is_refused_as_told",
        longer_name_is_refused_as_told,
    ),
    ("case_is_as_told", case_is_as_told),
    ("result_has_attributes", conf_has_attributes),
];

fn numbers_are_consistent(it: &mut Fixture) -> CaseResult {
    let file = it.root.clone();
    let stat = it.ok(&FsStat { file: &file })?;
    let bytes = [stat.available_bytes, stat.free_bytes, stat.total_bytes];
    ensure!(bytes.is_sorted(), "available, free, total: {bytes:?}");
    let files = [stat.available_files, stat.free_files, stat.total_files];
    ensure!(files.is_sorted(), "available, free, total: {files:?}");
    ensure!(stat.total_bytes > 0, "the file system has no bytes");
    Ok(())
}

fn any_file_has_the_numbers(it: &mut Fixture) -> CaseResult {
    let (file, root) = (it.file(b"file")?, it.root.clone());
    let root = it.ok(&FsStat { file: &root })?;
    let found = it.ok(&FsStat { file: &file })?;
    equal("the total", found.total_bytes, root.total_bytes)
}

fn stat_has_attributes(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let stat = it.ok(&FsStat { file: &file })?;
    it.check_after("the file", &file, stat.attributes)
}

fn any_caller_may_ask(it: &mut Fixture) -> CaseResult {
    let (dir, other) = (it.dir.clone(), it.other());
    let file = it.file_in(&dir, b"file", 0)?;
    it.ok_as(other, &FsStat { file: &file })?;
    Ok(())
}

fn info(it: &mut Fixture) -> Result<FsInfoData, Problem> {
    let file = it.root.clone();
    it.ok(&FsInfo { file: &file })
}

fn transfer_sizes_are_consistent(it: &mut Fixture) -> CaseResult {
    let info = info(it)?;
    let read = (info.read_multiple, info.read_preferred, info.read_max);
    let write = (info.write_multiple, info.write_preferred, info.write_max);
    for (multiple, preferred, max) in [read, write] {
        let sizes = [1, multiple, preferred, max];
        ensure!(sizes.is_sorted(), "multiple, preferred, max: {sizes:?}");
        ensure!(max >= 4096, "at most {max} bytes");
    }
    ensure!(
        info.listing_preferred >= 512,
        "dtpref is {}",
        info.listing_preferred
    );
    Ok(())
}

fn largest_file_has_4_gib_or_more(it: &mut Fixture) -> CaseResult {
    let max = info(it)?.file_bytes_max;
    ensure!(max > u32::MAX.into(), "maxfilesize is {max}");
    Ok(())
}

fn time_delta_is_below_a_minute(it: &mut Fixture) -> CaseResult {
    let delta = info(it)?.time_delta;
    ensure!(delta.seconds < 60, "time_delta is {delta:?}");
    Ok(())
}

fn links_are_supported_as_told(it: &mut Fixture) -> CaseResult {
    let told = info(it)?.properties;
    ensure!(told & properties::LINK != 0, "LINK is not set");
    ensure!(told & properties::SYMLINK != 0, "SYMLINK is not set");
    it.symlink(b"link", b"target")?;
    Ok(())
}

/// A client asks before it has a user (RFC 2623, section 2.3.2).
fn null_credential_may_ask(it: &mut Fixture) -> CaseResult {
    let file = it.root.clone();
    it.ok_as(Credential::None, &FsInfo { file: &file })?;
    Ok(())
}

fn info_has_attributes(it: &mut Fixture) -> CaseResult {
    let file = it.root.clone();
    let info = it.ok(&FsInfo { file: &file })?;
    it.check_after("the root", &file, info.attributes)
}

fn conf(it: &mut Fixture) -> Result<PathConfData, Problem> {
    let file = it.root.clone();
    it.ok(&PathConf { file: &file })
}

fn longest_name_is_made(it: &mut Fixture) -> CaseResult {
    let max = conf(it)?.name_max;
    ensure!((14..=4096).contains(&max), "name_max is {max}");
    let name = vec![b'n'; max as usize];
    let (file, dir) = (it.file(&name)?, it.dir.clone());
    equal("the handle", it.lookup(&dir, &name)?, file)
}

fn longer_name_is_refused_as_told(it: &mut Fixture) -> CaseResult {
    let told = conf(it)?;
    let name = vec![b'n'; told.name_max as usize + 1];
    let dir = it.dir.clone();
    let result = it.client.lookup(&dir, &name)?;
    match told.no_truncation {
        true => crate::fixture::failure(3, result, &[Status::NAMETOOLONG]).map(|_| ()),
        false => Ok(()),
    }
}

fn case_is_as_told(it: &mut Fixture) -> CaseResult {
    let told = conf(it)?;
    it.file(b"Name")?;
    let dir = it.dir.clone();
    let found = it.client.lookup(&dir, b"nAME")?.is_ok();
    equal("case_insensitive", told.is_case_insensitive, found)
}

fn conf_has_attributes(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let conf = it.ok(&PathConf { file: &file })?;
    it.check_after("the file", &file, conf.attributes)
}
