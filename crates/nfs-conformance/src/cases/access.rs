//! ACCESS.

use super::Check;
use crate::fixture::{CaseResult, Fixture, Problem, equal, present};
use pagemesh_nfs_client::Credential;
use pagemesh_nfs_client::nfs3::{Access, Handle, access};

pub(super) const CASES: &[(&str, Check)] = &[
    ("owner_of_a_file", owner_of_a_file),
    ("owner_without_bits_has_none", owner_without_bits_has_none),
    ("other_caller_reads_a_file", other_caller_reads_a_file),
    ("execute_follows_its_bit", execute_follows_its_bit),
    ("owner_of_a_directory", owner_of_a_directory),
    ("other_caller_of_a_directory", other_caller_of_a_directory),
    (
        "closed_directory_grants_nothing",
        closed_directory_grants_nothing,
    ),
    ("only_wanted_bits_are_granted", only_wanted_bits_are_granted),
    ("no_bits_are_no_error", no_bits_are_no_error),
    ("unknown_bits_are_not_granted", unknown_bits_are_not_granted),
    ("result_has_attributes", result_has_attributes),
    ("group_has_its_bits", group_has_its_bits),
    (
        "further_groups_have_their_bits",
        further_groups_have_their_bits,
    ),
    (
        "group_bits_exclude_other_bits",
        group_bits_exclude_other_bits,
    ),
];

fn granted(
    it: &mut Fixture,
    caller: Credential,
    file: &Handle,
    wanted: u32,
) -> Result<u32, Problem> {
    let (_, granted) = it.ok_as(caller, &Access { file, wanted })?;
    Ok(granted)
}

fn owner(it: &Fixture) -> Credential {
    it.client.credential.clone()
}

fn file_of_mode(it: &mut Fixture, mode: u32) -> Result<Handle, Problem> {
    let dir = it.dir.clone();
    it.file_in(&dir, b"file", mode)
}

/// DELETE has no meaning for a file, so a server may grant or refuse it.
const OF_FILES: u32 = access::ALL & !access::DELETE & !access::LOOKUP;
/// EXECUTE has no meaning for a directory.
const OF_DIRECTORIES: u32 = access::ALL & !access::EXECUTE;

fn owner_of_a_file(it: &mut Fixture) -> CaseResult {
    let (file, owner) = (file_of_mode(it, 0o644)?, owner(it));
    let found = granted(it, owner, &file, OF_FILES)?;
    let wanted = access::READ | access::MODIFY | access::EXTEND;
    equal("the access", found, wanted)
}

fn owner_without_bits_has_none(it: &mut Fixture) -> CaseResult {
    let (file, owner) = (file_of_mode(it, 0o077)?, owner(it));
    equal("the access", granted(it, owner, &file, OF_FILES)?, 0)
}

fn other_caller_reads_a_file(it: &mut Fixture) -> CaseResult {
    let (file, other) = (file_of_mode(it, 0o644)?, it.other());
    let found = granted(it, other, &file, OF_FILES)?;
    equal("the access", found, access::READ)
}

fn execute_follows_its_bit(it: &mut Fixture) -> CaseResult {
    let (file, other) = (file_of_mode(it, 0o711)?, it.other());
    let found = granted(it, other, &file, OF_FILES)?;
    equal("the access", found, access::EXECUTE)
}

fn owner_of_a_directory(it: &mut Fixture) -> CaseResult {
    let (dir, owner) = (it.directory(b"directory")?, owner(it));
    let found = granted(it, owner, &dir, OF_DIRECTORIES)?;
    equal("the access", found, OF_DIRECTORIES)
}

fn other_caller_of_a_directory(it: &mut Fixture) -> CaseResult {
    let (dir, other) = (it.directory(b"directory")?, it.other());
    let found = granted(it, other, &dir, OF_DIRECTORIES)?;
    equal("the access", found, access::READ | access::LOOKUP)
}

fn closed_directory_grants_nothing(it: &mut Fixture) -> CaseResult {
    let (dir, other) = (it.dir.clone(), it.other());
    let closed = it.directory_in(&dir, b"closed", 0o700)?;
    equal("the access", granted(it, other, &closed, access::ALL)?, 0)
}

fn only_wanted_bits_are_granted(it: &mut Fixture) -> CaseResult {
    let (file, owner) = (file_of_mode(it, 0o644)?, owner(it));
    let found = granted(it, owner, &file, access::READ)?;
    equal("the access", found, access::READ)
}

fn no_bits_are_no_error(it: &mut Fixture) -> CaseResult {
    let (file, owner) = (file_of_mode(it, 0o644)?, owner(it));
    equal("the access", granted(it, owner, &file, 0)?, 0)
}

fn unknown_bits_are_not_granted(it: &mut Fixture) -> CaseResult {
    let (file, owner) = (file_of_mode(it, 0o777)?, owner(it));
    let found = granted(it, owner, &file, u32::MAX)?;
    equal("the unknown bits", found & !access::ALL, 0)
}

fn result_has_attributes(it: &mut Fixture) -> CaseResult {
    let file = file_of_mode(it, 0o640)?;
    let (attributes, _) = it.ok(&Access {
        file: &file,
        wanted: access::READ,
    })?;
    let attributes = present("the attributes", attributes)?;
    equal("the mode", attributes.mode & 0o7777, 0o640)
}

fn group_has_its_bits(it: &mut Fixture) -> CaseResult {
    let file = file_of_mode(it, 0o660)?;
    let member = Credential::sys(crate::fixture::OTHER, it.server.gid);
    let found = granted(it, member, &file, OF_FILES)?;
    let wanted = access::READ | access::MODIFY | access::EXTEND;
    equal("the access", found, wanted)
}

fn further_groups_have_their_bits(it: &mut Fixture) -> CaseResult {
    let file = file_of_mode(it, 0o640)?;
    let member = Credential::Sys {
        uid: crate::fixture::OTHER,
        gid: crate::fixture::OTHER,
        groups: (5000..5015).chain([it.server.gid]).collect(),
    };
    let found = granted(it, member, &file, OF_FILES)?;
    equal("the access", found, access::READ)
}

fn group_bits_exclude_other_bits(it: &mut Fixture) -> CaseResult {
    let file = file_of_mode(it, 0o604)?;
    let member = Credential::sys(crate::fixture::OTHER, it.server.gid);
    equal("the access", granted(it, member, &file, OF_FILES)?, 0)
}
