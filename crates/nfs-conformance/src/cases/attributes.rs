//! GETATTR and SETATTR.

use super::Check;
use crate::fixture::{CaseResult, Fixture, Problem, ensure, equal};
use pagemesh_nfs_client::Credential;
use pagemesh_nfs_client::nfs3::{
    Attributes, FileType, FsInfo, GetAttributes, Handle, Read, SetAttributes, SetAttributesCall,
    SetTime, Status, Time, WccData, properties,
};

pub(super) const GETATTR: &[(&str, Check)] = &[
    ("root_is_a_directory", root_is_a_directory),
    ("new_file_has_its_attributes", new_file_has_its_attributes),
    ("new_directory_has_two_links", new_directory_has_two_links),
    (
        "symlink_has_the_size_of_its_target",
        symlink_has_the_size_of_its_target,
    ),
    ("size_follows_a_write", size_follows_a_write),
    ("used_bytes_follow_a_write", used_bytes_follow_a_write),
    ("file_ids_differ", file_ids_differ),
    ("files_share_the_file_system", files_share_the_file_system),
    ("any_caller_may_ask", any_caller_may_ask),
    (
        "recreated_name_has_another_handle",
        recreated_name_has_another_handle,
    ),
];

pub(super) const SETATTR: &[(&str, Check)] = &[
    ("mode_is_set", mode_is_set),
    (
        "type_bits_of_the_mode_have_no_effect",
        type_bits_of_the_mode_have_no_effect,
    ),
    ("growth_reads_as_zeros", growth_reads_as_zeros),
    ("shrink_cuts_the_data", shrink_cuts_the_data),
    (
        "shrink_and_growth_read_as_zeros",
        shrink_and_growth_read_as_zeros,
    ),
    ("same_size_changes_the_times", same_size_changes_the_times),
    (
        "size_beyond_the_maximum_is_an_error",
        size_beyond_the_maximum_is_an_error,
    ),
    ("last_size_is_an_error", last_size_is_an_error),
    (
        "size_of_a_directory_is_an_error",
        size_of_a_directory_is_an_error,
    ),
    (
        "matching_guard_allows_the_change",
        matching_guard_allows_the_change,
    ),
    ("other_guard_is_not_sync", other_guard_is_not_sync),
    ("times_of_the_client_are_set", times_of_the_client_are_set),
    ("times_of_the_server_are_set", times_of_the_server_are_set),
    ("change_time_advances", change_time_advances),
    ("empty_change_succeeds", empty_change_succeeds),
    (
        "other_caller_may_not_set_the_mode",
        other_caller_may_not_set_the_mode,
    ),
    (
        "other_caller_may_not_set_the_size",
        other_caller_may_not_set_the_size,
    ),
    (
        "other_caller_may_not_set_times",
        other_caller_may_not_set_times,
    ),
    ("writer_may_set_server_times", writer_may_set_server_times),
    (
        "writer_may_not_set_client_times",
        writer_may_not_set_client_times,
    ),
    (
        "owner_may_not_give_a_file_away",
        owner_may_not_give_a_file_away,
    ),
    (
        "owner_may_give_a_file_to_its_group",
        owner_may_give_a_file_to_its_group,
    ),
    (
        "owner_may_not_give_a_file_to_another_group",
        owner_may_not_give_a_file_to_another_group,
    ),
    ("root_may_give_a_file_away", root_may_give_a_file_away),
    (
        "refused_change_changes_nothing",
        refused_change_changes_nothing,
    ),
];

fn set(it: &mut Fixture, file: &Handle, attributes: SetAttributes) -> Result<WccData, Problem> {
    it.ok(&SetAttributesCall {
        file,
        attributes,
        guard: None,
    })
}

/// Fails the case unless the caller's change has one of these statuses.
fn refused(
    it: &mut Fixture,
    caller: Credential,
    (file, attributes): (&Handle, SetAttributes),
    wanted: &[Status],
) -> CaseResult {
    let guard = None;
    let call = SetAttributesCall {
        file,
        attributes,
        guard,
    };
    it.fails_as(caller, &call, wanted)?;
    Ok(())
}

fn owner(it: &Fixture) -> Credential {
    it.client.credential.clone()
}

fn root_is_a_directory(it: &mut Fixture) -> CaseResult {
    let root = it.root.clone();
    let attributes = it.attributes(&root)?;
    equal("the type", attributes.kind, FileType::Directory)?;
    ensure!(attributes.links >= 2, "{} links", attributes.links);
    Ok(())
}

fn new_file_has_its_attributes(it: &mut Fixture) -> CaseResult {
    let (uid, gid) = (it.server.uid, it.server.gid);
    let file = it.file(b"file")?;
    let found = it.attributes(&file)?;
    equal("the type", found.kind, FileType::Regular)?;
    equal("the mode", found.mode & 0o7777, 0o644)?;
    equal(
        "links, owner, group",
        (found.links, found.uid, found.gid),
        (1, uid, gid),
    )?;
    equal("the size", found.size_bytes, 0)
}

fn new_directory_has_two_links(it: &mut Fixture) -> CaseResult {
    let directory = it.directory(b"directory")?;
    let found = it.attributes(&directory)?;
    equal("the type", found.kind, FileType::Directory)?;
    equal("the links", found.links, 2)
}

fn symlink_has_the_size_of_its_target(it: &mut Fixture) -> CaseResult {
    let link = it.symlink(b"link", b"some/target")?;
    let found = it.attributes(&link)?;
    equal("the type", found.kind, FileType::Symlink)?;
    equal("the size", found.size_bytes, 11)
}

fn size_follows_a_write(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    it.write(&file, 10_000, b"12345")?;
    equal("the size", it.attributes(&file)?.size_bytes, 10_005)
}

fn used_bytes_follow_a_write(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", &[1; 100_000])?;
    let used = it.attributes(&file)?.used_bytes;
    ensure!(used >= 100_000, "{used} bytes are used by 100000");
    Ok(())
}

fn file_ids_differ(it: &mut Fixture) -> CaseResult {
    let (a, b) = (it.file(b"a")?, it.file(b"b")?);
    let (a, b) = (it.attributes(&a)?.file_id, it.attributes(&b)?.file_id);
    ensure!(a != b, "both files have the number {a}");
    Ok(())
}

fn files_share_the_file_system(it: &mut Fixture) -> CaseResult {
    let (file, dir) = (it.file(b"a")?, it.dir.clone());
    let wanted = it.attributes(&dir)?.file_system;
    equal("the file system", it.attributes(&file)?.file_system, wanted)
}

fn any_caller_may_ask(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let file = it.file_in(&dir, b"file", 0)?;
    let other = it.other();
    it.ok_as(other, &GetAttributes { file: &file })?;
    Ok(())
}

fn recreated_name_has_another_handle(it: &mut Fixture) -> CaseResult {
    let first = it.file(b"file")?;
    it.remove(b"file")?;
    let second = it.file(b"file")?;
    ensure!(first != second, "the handle is used again");
    it.fails(&GetAttributes { file: &first }, &[Status::STALE])
}

fn mode_is_set(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    for mode in [0, 0o777, 0o4711, 0o1600] {
        set(it, &file, SetAttributes::mode(mode))?;
        equal("the mode", it.attributes(&file)?.mode & 0o7777, mode)?;
    }
    Ok(())
}

fn type_bits_of_the_mode_have_no_effect(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    set(it, &file, SetAttributes::mode(0o040_600))?;
    let found = it.attributes(&file)?;
    equal("the type", found.kind, FileType::Regular)?;
    equal("the mode", found.mode & 0o7777, 0o600)
}

fn content(it: &mut Fixture, file: &Handle) -> Result<Vec<u8>, Problem> {
    let read = it.ok(&Read {
        file,
        offset: 0,
        count: 60_000,
    })?;
    ensure!(read.is_end, "the file does not end");
    Ok(read.data)
}

fn growth_reads_as_zeros(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", b"12345")?;
    set(it, &file, SetAttributes::size(9))?;
    equal("the data", content(it, &file)?, b"12345\0\0\0\0".to_vec())
}

fn shrink_cuts_the_data(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", &[7; 20_000])?;
    set(it, &file, SetAttributes::size(9001))?;
    equal("the data", content(it, &file)?, vec![7; 9001])
}

fn shrink_and_growth_read_as_zeros(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", &[7; 20_000])?;
    set(it, &file, SetAttributes::size(100))?;
    set(it, &file, SetAttributes::size(20_000))?;
    let wanted = [vec![7; 100], vec![0; 19_900]].concat();
    ensure!(content(it, &file)? == wanted, "the data came back");
    Ok(())
}

fn same_size_changes_the_times(it: &mut Fixture) -> CaseResult {
    let file = it.file_with(b"file", b"12345")?;
    let before = it.attributes(&file)?;
    set(it, &file, SetAttributes::size(5))?;
    let after = it.attributes(&file)?;
    equal("the size", after.size_bytes, 5)?;
    ensure!(
        after.changed > before.changed,
        "ctime is {:?}",
        after.changed
    );
    Ok(())
}

fn size_beyond_the_maximum_is_an_error(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let max = it.ok(&FsInfo { file: &file })?.file_bytes_max;
    let Some(beyond) = max.checked_add(1) else {
        return Err(Problem::Skipped("files have no maximum size".into()));
    };
    let (change, owner) = (SetAttributes::size(beyond), owner(it));
    refused(it, owner, (&file, change), &[Status::FBIG, Status::INVAL])?;
    equal("the size", it.attributes(&file)?.size_bytes, 0)
}

fn last_size_is_an_error(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let (change, owner) = (SetAttributes::size(u64::MAX), owner(it));
    refused(it, owner, (&file, change), &[Status::FBIG, Status::INVAL])?;
    equal("the size", it.attributes(&file)?.size_bytes, 0)
}

fn size_of_a_directory_is_an_error(it: &mut Fixture) -> CaseResult {
    let directory = it.directory(b"directory")?;
    let (change, owner) = (SetAttributes::size(0), owner(it));
    refused(
        it,
        owner,
        (&directory, change),
        &[Status::ISDIR, Status::INVAL],
    )
}

fn matching_guard_allows_the_change(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let guard = Some(it.attributes(&file)?.changed);
    it.ok(&SetAttributesCall {
        file: &file,
        attributes: SetAttributes::mode(0o600),
        guard,
    })?;
    equal("the mode", it.attributes(&file)?.mode & 0o7777, 0o600)
}

fn other_guard_is_not_sync(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let before = it.attributes(&file)?;
    let guard = Some(Time {
        nanoseconds: before.changed.nanoseconds ^ 1,
        ..before.changed
    });
    let call = SetAttributesCall {
        file: &file,
        attributes: SetAttributes::mode(0o600),
        guard,
    };
    it.fails(&call, &[Status::NOT_SYNC])?;
    equal("the attributes", it.attributes(&file)?, before)
}

fn times(accessed: SetTime, modified: SetTime) -> SetAttributes {
    SetAttributes {
        accessed,
        modified,
        ..SetAttributes::default()
    }
}

fn times_of_the_client_are_set(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let info = it.ok(&FsInfo { file: &file })?;
    ensure!(
        info.properties & properties::CANSETTIME != 0,
        "CANSETTIME is not set"
    );
    let time = |seconds| Time {
        seconds,
        nanoseconds: 500_000_000,
    };
    let change = times(SetTime::Client(time(1000)), SetTime::Client(time(2000)));
    set(it, &file, change)?;
    let found = it.attributes(&file)?;
    equal(
        "the times",
        (found.accessed, found.modified),
        (time(1000), time(2000)),
    )
}

fn times_of_the_server_are_set(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let early = SetTime::Client(Time::default());
    set(it, &file, times(early, early))?;
    let old = it.attributes(&file)?;
    equal("mtime", old.modified, Time::default())?;
    set(it, &file, times(SetTime::Server, SetTime::Server))?;
    let new = it.attributes(&file)?;
    ensure!(new.modified > old.modified, "mtime is {:?}", new.modified);
    ensure!(new.accessed > old.accessed, "atime is {:?}", new.accessed);
    Ok(())
}

fn change_time_advances(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let mut last = it.attributes(&file)?.changed;
    for mode in [0o600, 0o640, 0o604, 0o666] {
        set(it, &file, SetAttributes::mode(mode))?;
        let changed = it.attributes(&file)?.changed;
        ensure!(changed > last, "{changed:?} follows {last:?}");
        last = changed;
    }
    Ok(())
}

fn empty_change_succeeds(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let before = it.attributes(&file)?;
    set(it, &file, SetAttributes::default())?;
    let after = it.attributes(&file)?;
    let kept = |it: &Attributes| (it.mode, it.uid, it.gid, it.size_bytes, it.modified);
    equal("the attributes", kept(&after), kept(&before))
}

fn other_caller_may_not_set_the_mode(it: &mut Fixture) -> CaseResult {
    let (file, other) = (it.file(b"file")?, it.other());
    refused(
        it,
        other,
        (&file, SetAttributes::mode(0o777)),
        &[Status::PERM],
    )
}

fn other_caller_may_not_set_the_size(it: &mut Fixture) -> CaseResult {
    let (file, other) = (it.file(b"file")?, it.other());
    refused(it, other, (&file, SetAttributes::size(5)), &[Status::ACCES])
}

fn other_caller_may_not_set_times(it: &mut Fixture) -> CaseResult {
    let (file, other) = (it.file(b"file")?, it.other());
    let change = times(SetTime::Server, SetTime::Server);
    refused(it, other, (&file, change), &[Status::ACCES, Status::PERM])
}

fn writable_file(it: &mut Fixture) -> Result<Handle, Problem> {
    let file = it.file(b"writable")?;
    set(it, &file, SetAttributes::mode(0o666))?;
    Ok(file)
}

fn writer_may_set_server_times(it: &mut Fixture) -> CaseResult {
    let (file, other) = (writable_file(it)?, it.other());
    let call = SetAttributesCall {
        file: &file,
        attributes: times(SetTime::Server, SetTime::Server),
        guard: None,
    };
    it.ok_as(other, &call)?;
    Ok(())
}

fn writer_may_not_set_client_times(it: &mut Fixture) -> CaseResult {
    let (file, other) = (writable_file(it)?, it.other());
    let time = SetTime::Client(Time::default());
    refused(
        it,
        other,
        (&file, times(time, time)),
        &[Status::PERM, Status::ACCES],
    )
}

fn owner_change(uid: Option<u32>, gid: Option<u32>) -> SetAttributes {
    SetAttributes {
        uid,
        gid,
        ..SetAttributes::default()
    }
}

fn owner_may_not_give_a_file_away(it: &mut Fixture) -> CaseResult {
    let (file, owner) = (it.file(b"file")?, owner(it));
    refused(
        it,
        owner,
        (&file, owner_change(Some(4321), None)),
        &[Status::PERM],
    )
}

fn owner_may_give_a_file_to_its_group(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let caller = Credential::Sys {
        uid: it.server.uid,
        gid: it.server.gid,
        groups: vec![4567],
    };
    let call = SetAttributesCall {
        file: &file,
        attributes: owner_change(None, Some(4567)),
        guard: None,
    };
    it.ok_as(caller, &call)?;
    equal("the group", it.attributes(&file)?.gid, 4567)
}

fn owner_may_not_give_a_file_to_another_group(it: &mut Fixture) -> CaseResult {
    let (file, owner) = (it.file(b"file")?, owner(it));
    refused(
        it,
        owner,
        (&file, owner_change(None, Some(4567))),
        &[Status::PERM],
    )
}

fn root_may_give_a_file_away(it: &mut Fixture) -> CaseResult {
    let root = it.trusted_root()?;
    let file = it.file(b"file")?;
    let call = SetAttributesCall {
        file: &file,
        attributes: owner_change(Some(4321), Some(4567)),
        guard: None,
    };
    it.ok_as(root, &call)?;
    let found = it.attributes(&file)?;
    equal("owner and group", (found.uid, found.gid), (4321, 4567))
}

fn refused_change_changes_nothing(it: &mut Fixture) -> CaseResult {
    let (file, owner) = (it.file_with(b"file", b"12345")?, owner(it));
    let before = it.attributes(&file)?;
    let change = SetAttributes {
        uid: Some(4321),
        mode: Some(0o600),
        size_bytes: Some(2),
        ..SetAttributes::default()
    };
    refused(it, owner, (&file, change), &[Status::PERM])?;
    equal("the attributes", it.attributes(&file)?, before)
}
