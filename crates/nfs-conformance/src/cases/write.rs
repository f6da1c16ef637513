//! WRITE.

use super::Check;
use crate::fixture::{CaseResult, Fixture, Problem, ensure, equal};
use pagemesh_nfs_client::nfs3::{
    self, FsInfo, Handle, Read, SetAttributes, SetAttributesCall, StableHow, Status, Write, Written,
};
use pagemesh_nfs_client::rpc::arguments;

pub(super) const CASES: &[(&str, Check)] = &[
    ("unstable_data_is_read_back", unstable_data_is_read_back),
    ("data_sync_is_kept", data_sync_is_kept),
    ("file_sync_is_kept", file_sync_is_kept),
    ("count_is_that_of_the_data", count_is_that_of_the_data),
    ("verifier_is_constant", verifier_is_constant),
    ("verifier_is_that_of_commit", verifier_is_that_of_commit),
    ("parts_are_joined", parts_are_joined),
    ("overwrite_replaces_a_part", overwrite_replaces_a_part),
    ("no_bytes_change_nothing", no_bytes_change_nothing),
    (
        "no_bytes_beyond_the_end_keep_the_size",
        no_bytes_beyond_the_end_keep_the_size,
    ),
    ("hole_is_left", hole_is_left),
    ("times_advance", times_advance),
    ("maximum_count_is_written", maximum_count_is_written),
    (
        "offset_at_the_largest_size_is_fbig",
        offset_at_the_largest_size_is_fbig,
    ),
    (
        "offset_of_2_to_63_is_an_error",
        offset_of_2_to_63_is_an_error,
    ),
    ("last_offset_is_an_error", last_offset_is_an_error),
    (
        "range_across_the_last_offset_is_an_error",
        range_across_the_last_offset_is_an_error,
    ),
    ("directory_is_an_error", directory_is_an_error),
    ("symlink_is_an_error", symlink_is_an_error),
    ("permission_is_needed", permission_is_needed),
    (
        "owner_writes_a_read_only_file",
        owner_writes_a_read_only_file,
    ),
    ("set_id_bits_are_cleared", set_id_bits_are_cleared),
    (
        "count_beyond_the_data_is_refused",
        count_beyond_the_data_is_refused,
    ),
    (
        "unknown_durability_is_refused",
        unknown_durability_is_refused,
    ),
];

fn write(
    it: &mut Fixture,
    (file, offset): (&Handle, u64),
    stable: StableHow,
    data: &[u8],
) -> Result<Written, Problem> {
    it.ok(&Write {
        file,
        offset,
        stable,
        data,
    })
}

fn content(it: &mut Fixture, file: &Handle) -> Result<Vec<u8>, Problem> {
    let read = it.ok(&Read {
        file,
        offset: 0,
        count: 60_000,
    })?;
    equal("the end", read.is_end, true)?;
    Ok(read.data)
}

fn check_stable(it: &mut Fixture, stable: StableHow) -> CaseResult {
    let file = it.file(b"file")?;
    let written = write(it, (&file, 0), stable, b"12345")?;
    ensure!(
        written.committed >= stable,
        "{:?} instead of {stable:?}",
        written.committed
    );
    equal("the data", content(it, &file)?, b"12345".to_vec())
}

fn unstable_data_is_read_back(it: &mut Fixture) -> CaseResult {
    check_stable(it, StableHow::Unstable)
}

fn data_sync_is_kept(it: &mut Fixture) -> CaseResult {
    check_stable(it, StableHow::DataSync)
}

fn file_sync_is_kept(it: &mut Fixture) -> CaseResult {
    check_stable(it, StableHow::FileSync)
}

fn count_is_that_of_the_data(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let written = write(it, (&file, 0), StableHow::Unstable, &[1; 30_001])?;
    equal("the count", written.count, 30_001)
}

fn verifier_is_constant(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let first = write(it, (&file, 0), StableHow::Unstable, b"1")?.verifier;
    let second = write(it, (&file, 1), StableHow::FileSync, b"2")?.verifier;
    equal("the verifier", second, first)
}

fn verifier_is_that_of_commit(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let written = write(it, (&file, 0), StableHow::Unstable, b"1")?.verifier;
    let committed = it.ok(&nfs3::Commit {
        file: &file,
        offset: 0,
        count: 0,
    })?;
    equal("the verifier", committed.verifier, written)
}

fn parts_are_joined(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    for at in (0..10).rev() {
        write(
            it,
            (&file, at * 1000),
            StableHow::Unstable,
            &[at as u8; 1000],
        )?;
    }
    let wanted: Vec<u8> = (0..10).flat_map(|at| [at; 1000]).collect();
    ensure!(content(it, &file)? == wanted, "the data is wrong");
    Ok(())
}

fn overwrite_replaces_a_part(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", &[1; 12_000])?;
    write(it, (&file, 4000), StableHow::Unstable, &[2; 5000])?;
    let wanted = [vec![1; 4000], vec![2; 5000], vec![1; 3000]].concat();
    ensure!(content(it, &file)? == wanted, "the data is wrong");
    Ok(())
}

fn no_bytes_change_nothing(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", b"12345")?;
    let written = write(it, (&file, 2), StableHow::FileSync, b"")?;
    equal("the count", written.count, 0)?;
    equal("the data", content(it, &file)?, b"12345".to_vec())
}

fn no_bytes_beyond_the_end_keep_the_size(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", b"12345")?;
    write(it, (&file, 100), StableHow::FileSync, b"")?;
    equal("the size", it.attributes(&file)?.size_bytes, 5)
}

fn hole_is_left(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", b"12345")?;
    write(it, (&file, 10_000), StableHow::Unstable, b"6")?;
    let wanted = [&b"12345"[..], &[0; 9995], b"6"].concat();
    ensure!(content(it, &file)? == wanted, "the data is wrong");
    Ok(())
}

fn times_advance(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let mut last = it.attributes(&file)?;
    for at in 0..5 {
        write(it, (&file, 0), StableHow::Unstable, &[at])?;
        let next = it.attributes(&file)?;
        ensure!(next.modified > last.modified, "mtime {:?}", next.modified);
        ensure!(next.changed > last.changed, "ctime {:?}", next.changed);
        last = next;
    }
    Ok(())
}

fn maximum_count_is_written(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let max = it.ok(&FsInfo { file: &file })?.write_max;
    let data = vec![9; max as usize];
    let written = write(it, (&file, 0), StableHow::Unstable, &data)?;
    equal("the count", written.count, max)?;
    equal("the size", it.attributes(&file)?.size_bytes, max.into())
}

/// Fails the case unless the WRITE fails and the file stays empty.
fn beyond(it: &mut Fixture, offset: u64, wanted: &[Status]) -> CaseResult {
    let file = it.file(b"file")?;
    let call = Write {
        file: &file,
        offset,
        stable: StableHow::FileSync,
        data: &[1; 200],
    };
    it.fails(&call, wanted)?;
    equal("the size", it.attributes(&file)?.size_bytes, 0)
}

fn offset_at_the_largest_size_is_fbig(it: &mut Fixture) -> CaseResult {
    let root = it.root.clone();
    let max = it.ok(&FsInfo { file: &root })?.file_bytes_max;
    if max > i64::MAX as u64 {
        return Err(Problem::Skipped("files have no maximum size".into()));
    }
    beyond(it, max, &[Status::FBIG])
}

const BEYOND: &[Status] = &[Status::FBIG, Status::INVAL];

fn offset_of_2_to_63_is_an_error(it: &mut Fixture) -> CaseResult {
    beyond(it, 1 << 63, BEYOND)
}

fn last_offset_is_an_error(it: &mut Fixture) -> CaseResult {
    beyond(it, u64::MAX, BEYOND)
}

fn range_across_the_last_offset_is_an_error(it: &mut Fixture) -> CaseResult {
    beyond(it, u64::MAX - 100, BEYOND)
}

fn wrong_type(it: &mut Fixture, file: &Handle, wanted: &[Status]) -> CaseResult {
    let call = Write {
        file,
        offset: 0,
        stable: StableHow::FileSync,
        data: b"x",
    };
    it.fails(&call, wanted)?;
    Ok(())
}

fn directory_is_an_error(it: &mut Fixture) -> CaseResult {
    let directory = it.directory(b"directory")?;
    wrong_type(it, &directory, &[Status::ISDIR, Status::INVAL])
}

fn symlink_is_an_error(it: &mut Fixture) -> CaseResult {
    let link = it.symlink(b"link", b"target")?;
    wrong_type(it, &link, &[Status::INVAL])
}

fn permission_is_needed(it: &mut Fixture) -> CaseResult {
    let (file, other) = (it.file_with(b"file", b"12345")?, it.other());
    let call = Write {
        file: &file,
        offset: 0,
        stable: StableHow::FileSync,
        data: b"x",
    };
    it.fails_as(other, &call, &[Status::ACCES])?;
    equal("the data", content(it, &file)?, b"12345".to_vec())
}

/// As READ of an unreadable file.
fn owner_writes_a_read_only_file(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let file = it.file_in(&dir, b"file", 0o444)?;
    it.write(&file, 0, b"12345")?;
    Ok(())
}

fn set_id_bits_are_cleared(it: &mut Fixture) -> CaseResult {
    let (file, other) = (it.file(b"file")?, it.other());
    it.ok(&SetAttributesCall {
        file: &file,
        attributes: SetAttributes::mode(0o6777),
        guard: None,
    })?;
    it.ok_as(
        other,
        &Write {
            file: &file,
            offset: 0,
            stable: StableHow::FileSync,
            data: b"x",
        },
    )?;
    equal("the mode", it.attributes(&file)?.mode & 0o7777, 0o777)
}

/// Sends a WRITE with one word changed, counted from the end of the arguments.
fn changed_word(it: &mut Fixture, from_end: usize, word: u32) -> CaseResult {
    let file = it.file_with(b"file", b"12345678")?;
    let mut bytes = arguments(&Write {
        file: &file,
        offset: 0,
        stable: StableHow::FileSync,
        data: b"abcdefgh",
    });
    let at = bytes.len() - from_end;
    bytes[at..at + 4].copy_from_slice(&word.to_be_bytes());
    match it
        .client
        .call_raw((nfs3::PROGRAM, nfs3::VERSION, 7), &bytes)
    {
        Ok(result) => ensure!(result[..4] != [0; 4], "the call was executed"),
        Err(pagemesh_nfs_client::ClientError::Refused(_)) => {}
        Err(error) => return Err(error.into()),
    }
    equal("the data", content(it, &file)?, b"12345678".to_vec())
}

fn count_beyond_the_data_is_refused(it: &mut Fixture) -> CaseResult {
    changed_word(it, 8 + 4 + 4 + 4, 100)
}

fn unknown_durability_is_refused(it: &mut Fixture) -> CaseResult {
    changed_word(it, 8 + 4 + 4, 3)
}
