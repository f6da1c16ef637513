//! MOUNT. Handles need no list of mounts: DUMP lists the calls of clients since the start of the
//! server, and access does not depend on it.

use super::{Failure, NoReply, Service, Target};
use crate::counters::count;
use crate::export_table::ServedExport;
use crate::handle::EncodedHandle;
use crate::mount3::{
    ExportEntry, ExportList, FLAVOR_NONE, FLAVOR_SYSTEM, MountCall, MountEntry, MountList,
    MountPath, MountReply, MountStatus, MountedRoot,
};
use crate::nfs3::attributes::FileType;
use crate::nfs3::status::Status;
use crate::peer::PeerCredential;
use crate::rpc::Reply;
use pagemesh_fs::{FileId, Ino};
use std::sync::Arc;

impl Service {
    pub(super) fn mount(
        &self,
        xid: u32,
        peer: PeerCredential<'_>,
        it: &MountCall<'_>,
    ) -> Result<Reply, NoReply> {
        let client = peer.address.ip().to_canonical();
        match it {
            MountCall::Null => {}
            MountCall::Unmount(path) => self.mounts.remove(client, path.0),
            MountCall::UnmountAll => self.mounts.remove_all(client),
            MountCall::Dump => return Ok(self.list_mounts(xid)),
            MountCall::Export => return Ok(list_exports(xid, peer)),
            MountCall::Mount(path) => {
                let reply = match self.mounted(peer, *path) {
                    Ok(handle) => {
                        self.mounts.add(client, path.0);
                        MountReply::Mounted(MountedRoot {
                            handle,
                            flavors: &[FLAVOR_SYSTEM, FLAVOR_NONE],
                        })
                    }
                    Err(Failure::Status(status)) => {
                        count(&self.counters.errors);
                        let path = String::from_utf8_lossy(path.0);
                        tracing::info!(%client, %path, ?status, "a mount was refused");
                        MountReply::Failed(mount_status(status))
                    }
                    Err(Failure::Fenced) => return Err(NoReply::Fenced),
                };
                return Ok(Reply::success(xid, &reply));
            }
        }
        Ok(Reply::success(xid, &()))
    }

    fn list_mounts(&self, xid: u32) -> Reply {
        let mounts = self.mounts.list();
        let entries: Vec<_> = mounts
            .iter()
            .map(|(client, path)| MountEntry {
                client: client.as_bytes(),
                path,
            })
            .collect();
        Reply::success(xid, &MountList(&entries))
    }

    /// The directory of a path: an export, and perhaps directories below its root, which the caller
    /// must be able to look up. The deepest export to which the client has access decides.
    fn mounted(
        &self,
        peer: PeerCredential<'_>,
        path: MountPath<'_>,
    ) -> Result<EncodedHandle, Failure> {
        let names = path.0.split(|byte| *byte == b'/');
        let names: Vec<_> = names.filter(|name| !name.is_empty()).collect();
        let exports = peer.table.above(&names);
        if exports.is_empty() {
            return Err(Status::NoEntry.into());
        }
        let has_rule = |export: &&&Arc<ServedExport>| export.rule(peer.address.ip()).is_some();
        let export = exports.iter().find(has_rule).ok_or(Status::Access)?;
        let mut target = self.target_in(export, self.root_of(export)?, peer)?;
        for name in names.iter().skip(export.depth()) {
            target = target.enter(name)?;
        }
        Ok(target.handle(target.id))
    }

    /// The root of an export.
    pub(super) fn root_of(&self, export: &ServedExport) -> Result<FileId, Failure> {
        if export.is_fenced() {
            return Err(self.fenced());
        }
        if let Some(directory) = export.directory {
            return Ok(directory);
        }
        let root = export.fs.attr(Ino::ROOT);
        let root = root.map_err(|error| self.report(export, &error))?;
        Ok(root.file_id())
    }
}

fn list_exports(xid: u32, peer: PeerCredential<'_>) -> Reply {
    let described = peer.table.iter();
    let described: Vec<_> = described
        .map(|export| (export.path.to_string(), export.client_names()))
        .collect();
    let clients: Vec<Vec<&[u8]>> = described
        .iter()
        .map(|(_, clients)| clients.iter().map(String::as_bytes).collect())
        .collect();
    let entries: Vec<_> = described
        .iter()
        .zip(&clients)
        .map(|((path, _), clients)| ExportEntry {
            path: path.as_bytes(),
            clients,
        })
        .collect();
    Reply::success(xid, &ExportList(&entries))
}

impl Target<'_> {
    /// Goes to a directory with this name.
    fn enter(mut self, name: &[u8]) -> Result<Self, Failure> {
        let (found, _) = self.look_up(name);
        let found = found.map_err(|failed| failed.failure)?;
        if found.attributes.kind != FileType::Directory {
            return Err(Status::NotDirectory.into());
        }
        self.id = found.id;
        self.in_view(found.view)
    }
}

fn mount_status(status: Status) -> MountStatus {
    match status {
        Status::Permission => MountStatus::Permission,
        Status::NoEntry | Status::Stale => MountStatus::NoEntry,
        Status::Access => MountStatus::Access,
        Status::NotDirectory => MountStatus::NotDirectory,
        Status::Invalid => MountStatus::Invalid,
        Status::NameTooLong => MountStatus::NameTooLong,
        Status::Io | Status::Jukebox => MountStatus::Io,
        _ => MountStatus::ServerFault,
    }
}
