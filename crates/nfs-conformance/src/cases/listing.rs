//! READDIR and READDIRPLUS.

use super::Check;
use crate::fixture::{CaseResult, Fixture, Problem, ensure, equal, one_of, status_of};
use pagemesh_nfs_client::Credential;
use pagemesh_nfs_client::nfs3::{
    self, Entry, Handle, Listing, PlusEntry, ReadDir, ReadDirPlus, Remove, Status,
};
use pagemesh_nfs_client::rpc::arguments;
use std::collections::{BTreeMap, BTreeSet};

pub(super) const READDIR: &[(&str, Check)] = &[
    ("empty_directory_has_dots", empty_directory_has_dots),
    ("numbers_are_those_of_getattr", numbers_are_those_of_getattr),
    ("each_entry_comes_once", each_entry_comes_once),
    (
        "each_entry_comes_once_with_small_counts",
        each_entry_comes_once_with_small_counts,
    ),
    (
        "result_is_not_above_the_count",
        result_is_not_above_the_count,
    ),
    ("long_names_come_once", long_names_come_once),
    ("tiny_count_is_toosmall", tiny_count_is_toosmall),
    ("last_count_is_short", last_count_is_short),
    ("cookies_differ", cookies_differ),
    ("cookie_is_used_twice", cookie_is_used_twice),
    ("last_cookie_is_the_end", last_cookie_is_the_end),
    (
        "removal_meanwhile_keeps_other_entries",
        removal_meanwhile_keeps_other_entries,
    ),
    (
        "removal_of_the_cookie_keeps_other_entries",
        removal_of_the_cookie_keeps_other_entries,
    ),
    (
        "addition_meanwhile_keeps_entries",
        addition_meanwhile_keeps_entries,
    ),
    (
        "removal_while_reading_empties_it",
        removal_while_reading_empties_it,
    ),
    ("unknown_cookie_has_an_answer", unknown_cookie_has_an_answer),
    ("other_verifier_has_an_answer", other_verifier_has_an_answer),
    ("result_has_attributes", result_has_attributes),
    ("file_is_no_directory", file_is_no_directory),
    ("permission_is_needed", permission_is_needed),
];

pub(super) const READDIRPLUS: &[(&str, Check)] = &[
    ("entries_are_those_of_readdir", entries_are_those_of_readdir),
    (
        "each_entry_comes_once_with_small_counts",
        plus_with_small_counts,
    ),
    (
        "attributes_are_those_of_getattr",
        plus_attributes_are_those_of_getattr,
    ),
    (
        "handles_are_those_of_lookup",
        plus_handles_are_those_of_lookup,
    ),
    (
        "result_is_not_above_the_maximum",
        plus_is_not_above_the_maximum,
    ),
    ("tiny_maximum_is_toosmall", plus_tiny_maximum_is_toosmall),
    ("file_is_no_directory", plus_file_is_no_directory),
    ("permission_is_needed", plus_needs_permission),
];

/// A position: the cookie and the verifier.
type Position = (u64, [u8; 8]);
const START: Position = (0, [0; 8]);

fn part(
    it: &mut Fixture,
    directory: &Handle,
    from: Position,
    count: u32,
) -> Result<Listing<Entry>, Problem> {
    it.ok(&ReadDir {
        directory,
        cookie: from.0,
        verifier: from.1,
        count,
    })
}

fn plus_part(
    it: &mut Fixture,
    directory: &Handle,
    from: Position,
    max_count: u32,
) -> Result<Listing<PlusEntry>, Problem> {
    it.ok(&ReadDirPlus {
        directory,
        cookie: from.0,
        verifier: from.1,
        dir_count: max_count,
        max_count,
    })
}

/// The parts up to this one, at most.
const PARTS_MAX: usize = 10_000;

/// The names from a position to the end. `between` runs after each part.
fn names_from(
    it: &mut Fixture,
    directory: &Handle,
    (mut from, count): (Position, u32),
    mut between: impl FnMut(&mut Fixture, &[Entry]) -> CaseResult,
) -> Result<Vec<Vec<u8>>, Problem> {
    let mut names = Vec::new();
    for _ in 0..PARTS_MAX {
        let found = part(it, directory, from, count)?;
        ensure!(
            found.is_end || !found.entries.is_empty(),
            "a part has no entry and is not the end"
        );
        if let Some(last) = found.entries.last() {
            from = (last.cookie, found.verifier);
        }
        names.extend(found.entries.iter().map(|entry| entry.name.clone()));
        between(it, &found.entries)?;
        if found.is_end {
            return Ok(names);
        }
    }
    Err(Problem::Wrong("the listing does not end".into()))
}

fn names(it: &mut Fixture, directory: &Handle, count: u32) -> Result<Vec<Vec<u8>>, Problem> {
    names_from(it, directory, (START, count), |_, _| Ok(()))
}

/// A directory with this many files, and their names.
fn filled(it: &mut Fixture, count: usize) -> Result<(Handle, BTreeSet<Vec<u8>>), Problem> {
    let directory = it.directory(b"filled")?;
    let mut names = BTreeSet::new();
    for number in 0..count {
        let name = format!("file-{number}").into_bytes();
        it.file_in(&directory, &name, 0o644)?;
        names.insert(name);
    }
    Ok((directory, names))
}

/// Fails the case unless each name, and each of the dots, is found once.
fn check_names(found: Vec<Vec<u8>>, wanted: &BTreeSet<Vec<u8>>) -> CaseResult {
    let count = found.len();
    let mut set: BTreeSet<Vec<u8>> = found.into_iter().collect();
    equal("names that come once", set.len(), count)?;
    for dots in [&b"."[..], b".."] {
        ensure!(set.remove(dots), "{} is absent", dots.escape_ascii());
    }
    let missing = wanted.difference(&set).count();
    let unknown = set.difference(wanted).count();
    equal("missing and unknown names", (missing, unknown), (0, 0))
}

fn empty_directory_has_dots(it: &mut Fixture) -> CaseResult {
    let directory = it.directory(b"empty")?;
    let found = names(it, &directory, 4096)?;
    check_names(found, &BTreeSet::new())
}

fn numbers_are_those_of_getattr(it: &mut Fixture) -> CaseResult {
    let (directory, _) = filled(it, 5)?;
    let found = part(it, &directory, START, 4096)?;
    for entry in found.entries {
        let file = it.lookup(&directory, &entry.name)?;
        let wanted = it.attributes(&file)?.file_id;
        equal("the number", entry.file_id, wanted)?;
    }
    Ok(())
}

fn each_entry_comes_once(it: &mut Fixture) -> CaseResult {
    let (directory, wanted) = filled(it, 300)?;
    check_names(names(it, &directory, 4096)?, &wanted)
}

fn each_entry_comes_once_with_small_counts(it: &mut Fixture) -> CaseResult {
    let (directory, wanted) = filled(it, 40)?;
    check_names(names(it, &directory, 300)?, &wanted)
}

fn result_is_not_above_the_count(it: &mut Fixture) -> CaseResult {
    let (directory, _) = filled(it, 60)?;
    for count in [200, 256, 300, 512, 1000, 1500] {
        let bytes = arguments(&ReadDir {
            directory: &directory,
            cookie: 0,
            verifier: [0; 8],
            count,
        });
        let target = (nfs3::PROGRAM, nfs3::VERSION, 16);
        // The count begins at READDIR3resok, after the status.
        let len = it.client.call_raw(target, &bytes)?.len() - 4;
        ensure!(len <= count as usize, "{len} bytes for a count of {count}");
    }
    Ok(())
}

fn long_names_come_once(it: &mut Fixture) -> CaseResult {
    let directory = it.directory(b"long")?;
    let mut wanted = BTreeSet::new();
    for number in 0..20_u8 {
        let name = vec![b'a' + number; 255];
        it.file_in(&directory, &name, 0o644)?;
        wanted.insert(name);
    }
    check_names(names(it, &directory, 700)?, &wanted)
}

fn refused(it: &mut Fixture, directory: &Handle, count: u32, wanted: &[Status]) -> CaseResult {
    let call = ReadDir {
        directory,
        cookie: 0,
        verifier: [0; 8],
        count,
    };
    it.fails(&call, wanted)?;
    Ok(())
}

fn tiny_count_is_toosmall(it: &mut Fixture) -> CaseResult {
    let (directory, _) = filled(it, 1)?;
    for count in [0, 1, 16, 40] {
        refused(it, &directory, count, &[Status::TOOSMALL])?;
    }
    Ok(())
}

fn last_count_is_short(it: &mut Fixture) -> CaseResult {
    let (directory, wanted) = filled(it, 30)?;
    check_names(names(it, &directory, u32::MAX)?, &wanted)
}

fn cookies_differ(it: &mut Fixture) -> CaseResult {
    let (directory, _) = filled(it, 20)?;
    let found = part(it, &directory, START, 8192)?;
    let cookies: BTreeSet<u64> = found.entries.iter().map(|entry| entry.cookie).collect();
    equal("cookies", cookies.len(), found.entries.len())?;
    ensure!(!cookies.contains(&0), "a cookie is 0, which is the start");
    Ok(())
}

fn cookie_is_used_twice(it: &mut Fixture) -> CaseResult {
    let (directory, _) = filled(it, 20)?;
    let first = part(it, &directory, START, 300)?;
    let last = first.entries.last();
    let cookie = last.map(|entry| entry.cookie).unwrap_or_default();
    let from = (cookie, first.verifier);
    let second = part(it, &directory, from, 8192)?.entries;
    equal(
        "the entries",
        part(it, &directory, from, 8192)?.entries,
        second,
    )
}

fn last_cookie_is_the_end(it: &mut Fixture) -> CaseResult {
    let (directory, _) = filled(it, 5)?;
    let all = part(it, &directory, START, 8192)?;
    equal("the end", all.is_end, true)?;
    let cookie = all.entries.last().map(|entry| entry.cookie);
    let from = (cookie.unwrap_or_default(), all.verifier);
    let rest = part(it, &directory, from, 8192)?;
    equal("entries, end", (rest.entries.len(), rest.is_end), (0, true))
}

/// Removes a file that no part has had yet, after the first part.
fn removal_meanwhile_keeps_other_entries(it: &mut Fixture) -> CaseResult {
    let (directory, mut wanted) = filled(it, 40)?;
    let mut seen = BTreeSet::new();
    let mut removed = None;
    let left = wanted.clone();
    let found = names_from(it, &directory, (START, 300), |it, entries| {
        seen.extend(entries.iter().map(|entry| entry.name.clone()));
        let Some(name) = left.difference(&seen).last().filter(|_| removed.is_none()) else {
            return Ok(());
        };
        it.ok(&Remove {
            directory: &directory,
            name,
        })?;
        removed = Some(name.clone());
        Ok(())
    })?;
    let removed = removed.ok_or_else(|| Problem::Wrong("one part has all".into()))?;
    // A server that read ahead may still have it.
    if !found.contains(&removed) {
        wanted.remove(&removed);
    }
    check_names(found, &wanted)
}

/// Removes the entry with the cookie of the next call.
fn removal_of_the_cookie_keeps_other_entries(it: &mut Fixture) -> CaseResult {
    let (directory, wanted) = filled(it, 40)?;
    let found = names_from(it, &directory, (START, 300), |it, entries| {
        let last = entries.last().filter(|last| wanted.contains(&last.name));
        if let Some(last) = last {
            it.ok(&Remove {
                directory: &directory,
                name: &last.name,
            })?;
        }
        Ok(())
    })?;
    check_names(found, &wanted)
}

fn addition_meanwhile_keeps_entries(it: &mut Fixture) -> CaseResult {
    let (directory, wanted) = filled(it, 40)?;
    let mut number = 0;
    let mut added = BTreeSet::new();
    let mut found = names_from(it, &directory, (START, 300), |it, _| {
        if number < 20 {
            let name = format!("added-{number}").into_bytes();
            it.file_in(&directory, &name, 0o644)?;
            added.insert(name);
            number += 1;
        }
        Ok(())
    })?;
    let count = found.len();
    let set: BTreeSet<_> = found.iter().cloned().collect();
    equal("names that come once", set.len(), count)?;
    // New entries may come or not.
    found.retain(|name| !added.contains(name));
    check_names(found, &wanted)
}

/// `rm -r` removes the entries of each part before it asks for the next one.
fn removal_while_reading_empties_it(it: &mut Fixture) -> CaseResult {
    let (directory, wanted) = filled(it, 100)?;
    let found = names_from(it, &directory, (START, 512), |it, entries| {
        for entry in entries.iter().filter(|it| wanted.contains(&it.name)) {
            it.ok(&Remove {
                directory: &directory,
                name: &entry.name,
            })?;
        }
        Ok(())
    })?;
    check_names(found, &wanted)?;
    check_names(names(it, &directory, 4096)?, &BTreeSet::new())
}

fn answered(it: &mut Fixture, cookie: u64, verifier: [u8; 8]) -> CaseResult {
    let (directory, _) = filled(it, 5)?;
    let result = it.call(&ReadDir {
        directory: &directory,
        cookie,
        verifier,
        count: 4096,
    })?;
    let allowed = [Status::OK, Status::BAD_COOKIE];
    one_of("READDIR", status_of(&result), &allowed)
}

fn unknown_cookie_has_an_answer(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let verifier = part(it, &dir, START, 4096)?.verifier;
    answered(it, u64::MAX - 5, verifier)
}

fn other_verifier_has_an_answer(it: &mut Fixture) -> CaseResult {
    answered(it, 3, [0xa5; 8])
}

fn result_has_attributes(it: &mut Fixture) -> CaseResult {
    let (directory, _) = filled(it, 1)?;
    let found = part(it, &directory, START, 4096)?;
    it.check_after("the directory", &directory, found.directory)
}

fn file_is_no_directory(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    refused(it, &file, 4096, &[Status::NOTDIR])
}

fn closed_directory(it: &mut Fixture) -> Result<(Handle, Credential), Problem> {
    let (dir, other) = (it.dir.clone(), it.other());
    Ok((it.directory_in(&dir, b"closed", 0o711)?, other))
}

fn permission_is_needed(it: &mut Fixture) -> CaseResult {
    let (directory, other) = closed_directory(it)?;
    let call = ReadDir {
        directory: &directory,
        cookie: 0,
        verifier: [0; 8],
        count: 4096,
    };
    it.fails_as(other, &call, &[Status::ACCES])?;
    Ok(())
}

/// All entries of READDIRPLUS.
fn plus(
    it: &mut Fixture,
    directory: &Handle,
    max_count: u32,
) -> Result<BTreeMap<Vec<u8>, PlusEntry>, Problem> {
    let mut entries = BTreeMap::new();
    let mut from = START;
    for _ in 0..PARTS_MAX {
        let found = plus_part(it, directory, from, max_count)?;
        if let Some(last) = found.entries.last() {
            from = (last.entry.cookie, found.verifier);
        }
        for entry in found.entries {
            let name = entry.entry.name.clone();
            let earlier = entries.insert(name.clone(), entry);
            ensure!(earlier.is_none(), "{} twice", name.escape_ascii());
        }
        if found.is_end {
            return Ok(entries);
        }
    }
    Err(Problem::Wrong("the listing does not end".into()))
}

fn entries_are_those_of_readdir(it: &mut Fixture) -> CaseResult {
    let (directory, wanted) = filled(it, 100)?;
    let found = plus(it, &directory, 32_768)?;
    check_names(found.into_keys().collect(), &wanted)
}

fn plus_with_small_counts(it: &mut Fixture) -> CaseResult {
    let (directory, wanted) = filled(it, 40)?;
    let found = plus(it, &directory, 900)?;
    check_names(found.into_keys().collect(), &wanted)
}

fn plus_attributes_are_those_of_getattr(it: &mut Fixture) -> CaseResult {
    let (directory, wanted) = filled(it, 10)?;
    let found = plus(it, &directory, 32_768)?;
    for name in wanted {
        let file = it.lookup(&directory, &name)?;
        let attributes = found.get(&name).and_then(|entry| entry.attributes);
        it.check_after("the entry", &file, attributes)?;
    }
    Ok(())
}

fn plus_handles_are_those_of_lookup(it: &mut Fixture) -> CaseResult {
    let (directory, wanted) = filled(it, 10)?;
    let found = plus(it, &directory, 32_768)?;
    for name in wanted {
        let file = it.lookup(&directory, &name)?;
        let handle = found.get(&name).and_then(|entry| entry.handle.clone());
        equal("the handle", handle, Some(file))?;
    }
    Ok(())
}

fn plus_is_not_above_the_maximum(it: &mut Fixture) -> CaseResult {
    let (directory, _) = filled(it, 60)?;
    for max_count in [700, 1000, 2000, 4096] {
        let bytes = arguments(&ReadDirPlus {
            directory: &directory,
            cookie: 0,
            verifier: [0; 8],
            dir_count: max_count,
            max_count,
        });
        let target = (nfs3::PROGRAM, nfs3::VERSION, 17);
        let len = it.client.call_raw(target, &bytes)?.len() - 4;
        ensure!(len <= max_count as usize, "{len} bytes of {max_count}");
    }
    Ok(())
}

fn plus_refused(
    it: &mut Fixture,
    (directory, caller): (&Handle, Credential),
    max_count: u32,
    wanted: &[Status],
) -> CaseResult {
    let call = ReadDirPlus {
        directory,
        cookie: 0,
        verifier: [0; 8],
        dir_count: max_count,
        max_count,
    };
    it.fails_as(caller, &call, wanted)?;
    Ok(())
}

fn plus_tiny_maximum_is_toosmall(it: &mut Fixture) -> CaseResult {
    let (directory, _) = filled(it, 1)?;
    let owner = it.client.credential.clone();
    for count in [0, 1, 16, 100] {
        let call = (&directory, owner.clone());
        plus_refused(it, call, count, &[Status::TOOSMALL])?;
    }
    Ok(())
}

/// RFC 1813 allows a server to have no READDIRPLUS.
fn plus_file_is_no_directory(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let owner = it.client.credential.clone();
    let wanted = [Status::NOTDIR, Status::NOTSUPP];
    plus_refused(it, (&file, owner), 8192, &wanted)
}

fn plus_needs_permission(it: &mut Fixture) -> CaseResult {
    let (directory, other) = closed_directory(it)?;
    plus_refused(it, (&directory, other), 8192, &[Status::ACCES])
}
