//! COMMIT.

use super::Check;
use crate::fixture::{CaseResult, Fixture, Problem, equal, status_of};
use pagemesh_nfs_client::nfs3::{Commit, Committed, Handle, StableHow, Status, Write};

pub(super) const CASES: &[(&str, Check)] = &[
    ("whole_file_is_committed", whole_file_is_committed),
    ("range_is_committed", range_is_committed),
    ("verifier_is_constant", verifier_is_constant),
    ("empty_file_is_committed", empty_file_is_committed),
    (
        "range_beyond_the_end_is_committed",
        range_beyond_the_end_is_committed,
    ),
    ("last_offset_is_no_crash", last_offset_is_no_crash),
    ("result_has_attributes", result_has_attributes),
];

fn commit(it: &mut Fixture, file: &Handle, offset: u64, count: u32) -> Result<Committed, Problem> {
    it.ok(&Commit {
        file,
        offset,
        count,
    })
}

fn file_with_unstable_data(it: &mut Fixture) -> Result<Handle, Problem> {
    let file = it.file(b"file")?;
    it.ok(&Write {
        file: &file,
        offset: 0,
        stable: StableHow::Unstable,
        data: &[3; 9000],
    })?;
    Ok(file)
}

fn whole_file_is_committed(it: &mut Fixture) -> CaseResult {
    let file = file_with_unstable_data(it)?;
    commit(it, &file, 0, 0)?;
    Ok(())
}

fn range_is_committed(it: &mut Fixture) -> CaseResult {
    let file = file_with_unstable_data(it)?;
    commit(it, &file, 4096, 100)?;
    Ok(())
}

fn verifier_is_constant(it: &mut Fixture) -> CaseResult {
    let file = file_with_unstable_data(it)?;
    let first = commit(it, &file, 0, 0)?.verifier;
    equal("the verifier", commit(it, &file, 0, 0)?.verifier, first)
}

fn empty_file_is_committed(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    commit(it, &file, 0, 0)?;
    Ok(())
}

fn range_beyond_the_end_is_committed(it: &mut Fixture) -> CaseResult {
    let file = file_with_unstable_data(it)?;
    commit(it, &file, 1 << 30, 4096)?;
    Ok(())
}

/// The RFC does not say whether such a range is invalid.
fn last_offset_is_no_crash(it: &mut Fixture) -> CaseResult {
    let file = file_with_unstable_data(it)?;
    let result = it.call(&Commit {
        file: &file,
        offset: u64::MAX,
        count: u32::MAX,
    })?;
    let allowed = [Status::OK, Status::INVAL, Status::FBIG];
    crate::fixture::one_of("COMMIT", status_of(&result), &allowed)?;
    it.attributes(&file)?;
    Ok(())
}

fn result_has_attributes(it: &mut Fixture) -> CaseResult {
    let file = file_with_unstable_data(it)?;
    let committed = commit(it, &file, 0, 0)?;
    it.check_after("the file", &file, committed.wcc.after)
}
