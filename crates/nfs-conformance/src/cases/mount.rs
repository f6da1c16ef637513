//! MOUNT version 3 (RFC 1813, appendix I).

use super::Check;
use crate::fixture::{CaseResult, Fixture, Problem, ensure, equal};
use pagemesh_nfs_client::mount3::{
    Dump, Export, Mount, MountStatus, Mounted, Null, Unmount, UnmountAll,
};
use pagemesh_nfs_client::nfs3::FileType;
use pagemesh_nfs_client::{Client, Credential};

pub(super) const CASES: &[(&str, Check)] = &[
    ("null_is_empty", null_is_empty),
    ("root_is_a_directory", root_is_a_directory),
    ("root_has_one_handle", root_has_one_handle),
    ("flavors_have_auth_sys", flavors_have_auth_sys),
    ("path_with_slash_at_its_end", path_with_slash_at_its_end),
    ("unknown_path_is_refused", unknown_path_is_refused),
    ("relative_path_is_refused", relative_path_is_refused),
    (
        "path_of_1024_bytes_is_refused",
        path_of_1024_bytes_is_refused,
    ),
    ("file_is_refused", file_is_refused),
    ("export_lists_the_path", export_lists_the_path),
    ("dump_ends", dump_ends),
    ("unmount_has_no_result", unmount_has_no_result),
    ("handle_works_after_unmount", handle_works_after_unmount),
];

fn client(it: &Fixture) -> Result<Client, Problem> {
    let caller = Credential::sys(it.server.uid, it.server.gid);
    Ok(Client::connect(it.server.mount, caller, it.server.limit)?)
}

fn mount(it: &Fixture, path: &[u8]) -> Result<Result<Mounted, MountStatus>, Problem> {
    Ok(client(it)?.call(&Mount { path })?)
}

fn mounted(it: &Fixture) -> Result<Mounted, Problem> {
    let path = it.server.path.clone();
    mount(it, path.as_bytes())?.map_err(|status| Problem::Wrong(status.to_string()))
}

fn refused(it: &Fixture, path: &[u8], wanted: &[MountStatus]) -> CaseResult {
    match mount(it, path)? {
        Ok(_) => Err(Problem::Wrong("the path was mounted".into())),
        Err(status) => {
            ensure!(wanted.contains(&status), "{status} instead of {wanted:?}");
            Ok(())
        }
    }
}

fn null_is_empty(it: &mut Fixture) -> CaseResult {
    Ok(client(it)?.call(&Null)?)
}

fn root_is_a_directory(it: &mut Fixture) -> CaseResult {
    let root = mounted(it)?.root;
    equal("the type", it.attributes(&root)?.kind, FileType::Directory)
}

fn root_has_one_handle(it: &mut Fixture) -> CaseResult {
    equal("the second root", mounted(it)?.root, mounted(it)?.root)
}

fn flavors_have_auth_sys(it: &mut Fixture) -> CaseResult {
    let flavors = mounted(it)?.flavors;
    ensure!(flavors.contains(&1), "AUTH_SYS is not among {flavors:?}");
    Ok(())
}

fn path_with_slash_at_its_end(it: &mut Fixture) -> CaseResult {
    let path = format!("{}/", it.server.path);
    let root = mounted(it)?.root;
    match mount(it, path.as_bytes())? {
        Ok(other) => equal("the root", other.root, root),
        Err(status) => Err(Problem::Wrong(status.to_string())),
    }
}

fn unknown_path_is_refused(it: &mut Fixture) -> CaseResult {
    let wanted = [MountStatus::NOENT, MountStatus::ACCES];
    refused(it, b"/there/is/no/such/export", &wanted)
}

fn relative_path_is_refused(it: &mut Fixture) -> CaseResult {
    let wanted = [MountStatus::NOENT, MountStatus::ACCES, MountStatus::INVAL];
    refused(it, b"", &wanted)
}

fn path_of_1024_bytes_is_refused(it: &mut Fixture) -> CaseResult {
    let mut path = vec![b'x'; 1024];
    path[0] = b'/';
    let wanted = [
        MountStatus::NAMETOOLONG,
        MountStatus::NOENT,
        MountStatus::ACCES,
    ];
    refused(it, &path, &wanted)
}

fn file_is_refused(it: &mut Fixture) -> CaseResult {
    let name = format!("mount-{}", std::process::id());
    let root = it.root.clone();
    it.file_in(&root, name.as_bytes(), 0o644)?;
    let path = format!("{}/{name}", it.server.path);
    let wanted = [MountStatus::NOTDIR, MountStatus::NOENT, MountStatus::ACCES];
    let result = refused(it, path.as_bytes(), &wanted);
    it.dir = root;
    it.remove(name.as_bytes())?;
    result
}

fn export_lists_the_path(it: &mut Fixture) -> CaseResult {
    let exports = client(it)?.call(&Export)?;
    let path = it.server.path.as_bytes();
    let is_listed = exports.iter().any(|(export, _)| path.starts_with(export));
    ensure!(is_listed, "the path is not among {} exports", exports.len());
    Ok(())
}

fn dump_ends(it: &mut Fixture) -> CaseResult {
    client(it)?.call(&Dump)?;
    Ok(())
}

fn unmount_has_no_result(it: &mut Fixture) -> CaseResult {
    let path = it.server.path.clone();
    let path = path.as_bytes();
    client(it)?.call(&Unmount { path })?;
    client(it)?.call(&UnmountAll)?;
    Ok(())
}

fn handle_works_after_unmount(it: &mut Fixture) -> CaseResult {
    let root = mounted(it)?.root;
    client(it)?.call(&UnmountAll)?;
    it.attributes(&root)?;
    Ok(())
}
