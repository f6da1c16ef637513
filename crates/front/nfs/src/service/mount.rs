//! MOUNT. The server keeps no list of mounts: handles need none, and a list that survives neither
//! clients nor restarts tells nothing.

use super::{Failure, NoReply, Service, Target};
use crate::counters::count;
use crate::handle::EncodedHandle;
use crate::mount3::{
    ExportEntry, ExportList, FLAVOR_NONE, FLAVOR_SYSTEM, MountCall, MountList, MountPath,
    MountReply, MountStatus, MountedRoot,
};
use crate::nfs3::attributes::FileType;
use crate::nfs3::status::Status;
use crate::rpc::{Call, Credential, Reply};
use pagemesh_fs::Ino;

impl Service {
    pub(super) fn mount(&self, call: &Call<'_>, it: &MountCall<'_>) -> Result<Reply, NoReply> {
        match it {
            MountCall::Null | MountCall::Unmount(_) | MountCall::UnmountAll => {
                Ok(Reply::success(call.xid, &()))
            }
            MountCall::Dump => Ok(Reply::success(call.xid, &MountList(&[]))),
            MountCall::Export => Ok(self.list_exports(call.xid)),
            MountCall::Mount(path) => {
                let reply = match self.mounted(&call.credential, *path) {
                    Ok(handle) => MountReply::Mounted(MountedRoot {
                        handle,
                        flavors: &[FLAVOR_SYSTEM, FLAVOR_NONE],
                    }),
                    Err(Failure::Status(status)) => {
                        count(&self.counters.errors);
                        MountReply::Failed(mount_status(status))
                    }
                    Err(Failure::Fenced) => return Err(NoReply::Fenced),
                };
                Ok(Reply::success(call.xid, &reply))
            }
        }
    }

    fn list_exports(&self, xid: u32) -> Reply {
        let paths: Vec<String> = self
            .exports
            .iter()
            .map(|it| format!("/{}", it.name))
            .collect();
        let entry = |path| ExportEntry { path, clients: &[] };
        let paths = paths.iter().map(String::as_bytes);
        let entries: Vec<_> = paths.map(entry).collect();
        Reply::success(xid, &ExportList(&entries))
    }

    /// The directory of a path: the name of an export, and perhaps directories below its root, which
    /// the caller must be able to look up.
    fn mounted(
        &self,
        credential: &Credential<'_>,
        path: MountPath<'_>,
    ) -> Result<EncodedHandle, Failure> {
        let names = path.0.split(|byte| *byte == b'/');
        let mut names = names.filter(|name| !name.is_empty());
        let export = names.next().and_then(|name| self.exports.by_name(name));
        let export = export.ok_or(Status::NoEntry)?;
        if export.is_fenced() {
            return Err(Failure::Fenced);
        }
        let root = export.fs.attr(Ino::ROOT);
        let root = root.map_err(|error| self.report(export, &error))?;
        let mut target = self.target_in(export, root.file_id(), credential)?;
        for name in names {
            target = target.enter(name)?;
        }
        Ok(target.handle(target.id))
    }
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
