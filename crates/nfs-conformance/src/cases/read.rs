//! READ.

use super::Check;
use crate::fixture::{CaseResult, Fixture, Problem, ensure, equal, status_of};
use pagemesh_nfs_client::nfs3::{
    FsInfo, Handle, Read, ReadData, SetAttributes, SetAttributesCall, Status,
};

pub(super) const CASES: &[(&str, Check)] = &[
    ("data_is_read", data_is_read),
    ("result_has_attributes", result_has_attributes),
    (
        "part_before_the_end_is_not_the_end",
        part_before_the_end_is_not_the_end,
    ),
    (
        "part_up_to_the_end_is_the_end",
        part_up_to_the_end_is_the_end,
    ),
    ("part_across_the_end_is_short", part_across_the_end_is_short),
    ("offset_at_the_end_is_the_end", offset_at_the_end_is_the_end),
    (
        "offset_beyond_the_end_is_the_end",
        offset_beyond_the_end_is_the_end,
    ),
    (
        "offset_of_2_to_63_has_no_data",
        offset_of_2_to_63_has_no_data,
    ),
    ("last_offset_has_no_data", last_offset_has_no_data),
    (
        "range_across_the_last_offset_has_no_data",
        range_across_the_last_offset_has_no_data,
    ),
    ("no_bytes_are_no_error", no_bytes_are_no_error),
    ("empty_file_is_the_end", empty_file_is_the_end),
    ("hole_reads_as_zeros", hole_reads_as_zeros),
    (
        "count_beyond_the_maximum_is_short",
        count_beyond_the_maximum_is_short,
    ),
    ("last_count_is_short", last_count_is_short),
    ("maximum_count_is_read", maximum_count_is_read),
    ("unaligned_ranges_are_read", unaligned_ranges_are_read),
    ("directory_is_an_error", directory_is_an_error),
    ("symlink_is_an_error", symlink_is_an_error),
    ("permission_is_needed", permission_is_needed),
    (
        "owner_reads_an_unreadable_file",
        owner_reads_an_unreadable_file,
    ),
    ("executable_file_is_readable", executable_file_is_readable),
];

fn read(it: &mut Fixture, file: &Handle, offset: u64, count: u32) -> Result<ReadData, Problem> {
    let read = it.ok(&Read {
        file,
        offset,
        count,
    })?;
    equal("the count", read.count as usize, read.data.len())?;
    ensure!(read.count <= count, "{} of {count} bytes", read.count);
    Ok(read)
}

/// Fails the case unless a READ of ten bytes has this data and end.
fn check(it: &mut Fixture, (offset, count): (u64, u32), data: &[u8], is_end: bool) -> CaseResult {
    let file = it.file_with(b"file", b"0123456789")?;
    let found = read(it, &file, offset, count)?;
    equal("the data", found.data.as_slice(), data)?;
    equal("the end", found.is_end, is_end)
}

fn data_is_read(it: &mut Fixture) -> CaseResult {
    check(it, (0, 4), b"0123", false)
}

fn result_has_attributes(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", b"0123456789")?;
    let found = read(it, &file, 0, 10)?;
    it.check_after("the file", &file, found.attributes)
}

fn part_before_the_end_is_not_the_end(it: &mut Fixture) -> CaseResult {
    check(it, (3, 6), b"345678", false)
}

fn part_up_to_the_end_is_the_end(it: &mut Fixture) -> CaseResult {
    check(it, (3, 7), b"3456789", true)
}

fn part_across_the_end_is_short(it: &mut Fixture) -> CaseResult {
    check(it, (8, 100), b"89", true)
}

fn offset_at_the_end_is_the_end(it: &mut Fixture) -> CaseResult {
    check(it, (10, 1), b"", true)
}

fn offset_beyond_the_end_is_the_end(it: &mut Fixture) -> CaseResult {
    check(it, (1 << 20, 512), b"", true)
}

/// A server may also call such an offset invalid.
fn no_data(it: &mut Fixture, offset: u64) -> CaseResult {
    let file = it.file_with(b"file", b"0123456789")?;
    let call = Read {
        file: &file,
        offset,
        count: 4096,
    };
    match it.call(&call)? {
        Ok(found) => {
            equal("the data", found.data, Vec::new())?;
            equal("the end", found.is_end, true)
        }
        failed => {
            let allowed = [Status::INVAL, Status::FBIG];
            crate::fixture::one_of("READ", status_of(&failed), &allowed)
        }
    }
}

fn offset_of_2_to_63_has_no_data(it: &mut Fixture) -> CaseResult {
    no_data(it, 1 << 63)
}

fn last_offset_has_no_data(it: &mut Fixture) -> CaseResult {
    no_data(it, u64::MAX)
}

fn range_across_the_last_offset_has_no_data(it: &mut Fixture) -> CaseResult {
    no_data(it, u64::MAX - 100)
}

fn no_bytes_are_no_error(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", b"0123456789")?;
    equal("the data", read(it, &file, 3, 0)?.data, Vec::new())
}

fn empty_file_is_the_end(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let found = read(it, &file, 0, 10)?;
    equal("data, end", (found.data, found.is_end), (Vec::new(), true))
}

fn hole_reads_as_zeros(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    it.write(&file, 50_000, b"x")?;
    let found = read(it, &file, 100, 40_000)?;
    equal("the end", found.is_end, false)?;
    ensure!(!found.data.is_empty(), "no data");
    ensure!(found.data.iter().all(|byte| *byte == 0), "not zero");
    Ok(())
}

fn long_count(it: &mut Fixture, count: u32) -> CaseResult {
    let file = it.file_with(b"file", &[5; 3000])?;
    let found = read(it, &file, 0, count)?;
    equal(
        "data, end",
        (found.data, found.is_end),
        (vec![5; 3000], true),
    )
}

fn count_beyond_the_maximum_is_short(it: &mut Fixture) -> CaseResult {
    let root = it.root.clone();
    let max = it.ok(&FsInfo { file: &root })?.read_max;
    long_count(it, max.saturating_add(1))
}

fn last_count_is_short(it: &mut Fixture) -> CaseResult {
    long_count(it, u32::MAX)
}

fn maximum_count_is_read(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", b"begin")?;
    let told = it.ok(&FsInfo { file: &file })?.read_max;
    // The client takes no longer replies.
    let max = told.min(8 << 20);
    it.ok(&SetAttributesCall {
        file: &file,
        attributes: SetAttributes::size(u64::from(max) + 1),
        guard: None,
    })?;
    let found = read(it, &file, 0, max)?;
    equal("the count", found.count, max)?;
    equal("the end", found.is_end, false)
}

fn unaligned_ranges_are_read(it: &mut Fixture) -> CaseResult {
    let data: Vec<u8> = (0..20_000_u32).map(|at| (at % 251) as u8).collect();
    let file = it.file_with(b"file", &data)?;
    for (offset, count) in [(1, 1), (4095, 2), (4097, 8193), (8191, 4096), (19_999, 1)] {
        let found = read(it, &file, offset as u64, count as u32)?;
        let wanted = &data[offset..offset + count];
        ensure!(found.data == wanted, "the bytes {offset}+{count} are wrong");
    }
    Ok(())
}

fn wrong_type(it: &mut Fixture, file: &Handle, wanted: &[Status]) -> CaseResult {
    let call = Read {
        file,
        offset: 0,
        count: 10,
    };
    it.fails(&call, wanted)?;
    Ok(())
}

/// RFC 1813 names INVAL; Linux has ISDIR.
fn directory_is_an_error(it: &mut Fixture) -> CaseResult {
    let directory = it.directory(b"directory")?;
    wrong_type(it, &directory, &[Status::ISDIR, Status::INVAL])
}

fn symlink_is_an_error(it: &mut Fixture) -> CaseResult {
    let link = it.symlink(b"link", b"target")?;
    wrong_type(it, &link, &[Status::INVAL])
}

fn permission_is_needed(it: &mut Fixture) -> CaseResult {
    let (dir, other) = (it.dir.clone(), it.other());
    let file = it.file_in(&dir, b"file", 0o600)?;
    let call = Read {
        file: &file,
        offset: 0,
        count: 10,
    };
    it.fails_as(other, &call, &[Status::ACCES])?;
    Ok(())
}

/// A program may read through a descriptor that it opened before a change of the mode, so a server
/// allows the owner to read (RFC 1813, section 4.4).
fn owner_reads_an_unreadable_file(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let file = it.file_in(&dir, b"file", 0)?;
    read(it, &file, 0, 10)?;
    Ok(())
}

/// A client needs READ to run a program (RFC 1813, section 4.4).
fn executable_file_is_readable(it: &mut Fixture) -> CaseResult {
    let (dir, other) = (it.dir.clone(), it.other());
    let file = it.file_in(&dir, b"file", 0o711)?;
    it.ok_as(
        other,
        &Read {
            file: &file,
            offset: 0,
            count: 10,
        },
    )?;
    Ok(())
}
