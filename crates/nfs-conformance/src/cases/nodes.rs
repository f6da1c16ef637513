//! SYMLINK and MKNOD.

use super::Check;
use crate::fixture::{CaseResult, Fixture, Problem, equal, present};
use pagemesh_nfs_client::Credential;
use pagemesh_nfs_client::nfs3::{
    Created, FileType, Handle, MakeNode, Node, ReadLink, SetAttributes, Status, Symlink,
};

pub(super) const SYMLINK: &[(&str, Check)] = &[
    (
        "result_has_handle_and_attributes",
        result_has_handle_and_attributes,
    ),
    ("existing_name_is_kept", existing_name_is_kept),
    ("empty_target_is_an_error", empty_target_is_an_error),
    (
        "target_of_5000_bytes_is_an_error",
        target_of_5000_bytes_is_an_error,
    ),
    (
        "target_with_zero_byte_is_an_error",
        target_with_zero_byte_is_an_error,
    ),
    ("file_is_no_directory", file_is_no_directory),
    ("permission_is_needed", permission_is_needed),
];

pub(super) const MKNOD: &[(&str, Check)] = &[
    ("fifo_is_made", fifo_is_made),
    ("socket_is_made", socket_is_made),
    ("device_needs_privilege", device_needs_privilege),
    (
        "root_makes_a_character_device",
        root_makes_a_character_device,
    ),
    ("root_makes_a_block_device", root_makes_a_block_device),
    ("regular_file_is_badtype", regular_file_is_badtype),
    ("existing_name_is_kept", mknod_keeps_a_file),
    ("permission_is_needed", mknod_needs_permission),
];

fn link_call<'a>(directory: &'a Handle, target: &'a [u8]) -> Symlink<'a> {
    Symlink {
        directory,
        name: b"link",
        attributes: SetAttributes::default(),
        target,
    }
}

fn result_has_handle_and_attributes(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let made = it.ok(&link_call(&dir, b"target"))?;
    let handle = present("the handle", made.handle)?;
    it.check_after("the link", &handle, made.attributes)
}

fn existing_name_is_kept(it: &mut Fixture) -> CaseResult {
    let (dir, link) = (it.dir.clone(), it.symlink(b"link", b"first")?);
    it.fails(&link_call(&dir, b"second"), &[Status::EXIST])?;
    let read = it.ok(&ReadLink { file: &link })?;
    equal("the target", read.target, b"first".to_vec())
}

fn refused_target(it: &mut Fixture, target: &[u8], wanted: &[Status]) -> CaseResult {
    let dir = it.dir.clone();
    it.fails(&link_call(&dir, target), wanted)?;
    it.fails(
        &pagemesh_nfs_client::nfs3::Lookup {
            directory: &dir,
            name: b"link",
        },
        &[Status::NOENT],
    )?;
    Ok(())
}

fn empty_target_is_an_error(it: &mut Fixture) -> CaseResult {
    refused_target(it, b"", &[Status::INVAL, Status::NOENT, Status::ACCES])
}

fn target_of_5000_bytes_is_an_error(it: &mut Fixture) -> CaseResult {
    refused_target(it, &[b'x'; 5000], &[Status::NAMETOOLONG, Status::INVAL])
}

fn target_with_zero_byte_is_an_error(it: &mut Fixture) -> CaseResult {
    refused_target(it, b"a\0b", &[Status::INVAL, Status::ACCES])
}

fn file_is_no_directory(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    it.fails(&link_call(&file, b"target"), &[Status::NOTDIR])?;
    Ok(())
}

fn permission_is_needed(it: &mut Fixture) -> CaseResult {
    let (dir, other) = (it.dir.clone(), it.other());
    it.fails_as(other, &link_call(&dir, b"target"), &[Status::ACCES])?;
    Ok(())
}

const PLAIN: SetAttributes = SetAttributes {
    mode: Some(0o640),
    uid: None,
    gid: None,
    size_bytes: None,
    accessed: pagemesh_nfs_client::nfs3::SetTime::Keep,
    modified: pagemesh_nfs_client::nfs3::SetTime::Keep,
};

/// The result of MKNOD, or a skipped case if the server makes no special files.
fn node_as(
    it: &mut Fixture,
    caller: Credential,
    node: Node,
) -> Result<Result<Created, Status>, Problem> {
    let dir = it.dir.clone();
    let made = it.call_as(
        caller,
        &MakeNode {
            directory: &dir,
            name: b"node",
            node,
        },
    )?;
    match made {
        Err(failure) if failure.status == Status::NOTSUPP => {
            Err(Problem::Skipped("the server makes no special files".into()))
        }
        Err(failure) => Ok(Err(failure.status)),
        Ok(made) => Ok(Ok(made)),
    }
}

fn node(it: &mut Fixture, node: Node) -> Result<Result<Created, Status>, Problem> {
    let owner = it.client.credential.clone();
    node_as(it, owner, node)
}

fn made(result: Result<Created, Status>) -> Result<Handle, Problem> {
    let made = result.map_err(|status| Problem::Wrong(format!("MKNOD failed: {status}")))?;
    present("the handle", made.handle)
}

fn check_kind(it: &mut Fixture, special: Node, kind: FileType) -> CaseResult {
    let result = node(it, special)?;
    let file = made(result)?;
    let found = it.attributes(&file)?;
    equal(
        "type, mode",
        (found.kind, found.mode & 0o7777),
        (kind, 0o640),
    )
}

fn fifo_is_made(it: &mut Fixture) -> CaseResult {
    check_kind(it, Node::Fifo(PLAIN), FileType::Fifo)
}

fn socket_is_made(it: &mut Fixture) -> CaseResult {
    check_kind(it, Node::Socket(PLAIN), FileType::Socket)
}

fn refused(it: &mut Fixture, special: Node, wanted: &[Status]) -> CaseResult {
    match node(it, special)? {
        Ok(_) => Err(Problem::Wrong("the file was made".into())),
        Err(status) => crate::fixture::one_of("MKNOD", status, wanted),
    }
}

fn device_needs_privilege(it: &mut Fixture) -> CaseResult {
    let allowed = [Status::PERM, Status::ACCES];
    refused(it, Node::CharacterDevice(PLAIN, (1, 3)), &allowed)
}

fn device_of_root(it: &mut Fixture, special: Node, kind: FileType) -> CaseResult {
    let root = it.trusted_root()?;
    let result = node_as(it, root, special)?;
    let file = made(result)?;
    let found = it.attributes(&file)?;
    equal("type, device", (found.kind, found.device), (kind, (7, 300)))
}

fn root_makes_a_character_device(it: &mut Fixture) -> CaseResult {
    let special = Node::CharacterDevice(PLAIN, (7, 300));
    device_of_root(it, special, FileType::CharacterDevice)
}

fn root_makes_a_block_device(it: &mut Fixture) -> CaseResult {
    let special = Node::BlockDevice(PLAIN, (7, 300));
    device_of_root(it, special, FileType::BlockDevice)
}

fn regular_file_is_badtype(it: &mut Fixture) -> CaseResult {
    let allowed = [Status::BADTYPE, Status::INVAL];
    refused(it, Node::Other(1), &allowed)
}

fn mknod_keeps_a_file(it: &mut Fixture) -> CaseResult {
    it.file(b"node")?;
    refused(it, Node::Fifo(PLAIN), &[Status::EXIST])
}

fn mknod_needs_permission(it: &mut Fixture) -> CaseResult {
    let other = it.other();
    match node_as(it, other, Node::Fifo(PLAIN))? {
        Ok(_) => Err(Problem::Wrong("the file was made".into())),
        Err(status) => crate::fixture::one_of("MKNOD", status, &[Status::ACCES]),
    }
}
