//! Clients of a cluster: of the manager, and of a volume that this process attaches.

use crate::args::{ManagerArgs, Transport as TransportArg};
use crate::client_file::ClientFiles;
use crate::process_identity::ProcessIdentity;
use crate::snapshot_path::SnapshotPath;
use crate::{key, token_file};
use anyhow::{Context, bail};
use pagemesh_base::ids::Epoch;
use pagemesh_base::key::Key;
use pagemesh_base::layout::{EpochNumber, Layout, VolumeName};
use pagemesh_fabric::limits::Timeouts;
use pagemesh_manage::authority::snapshot_layout;
use pagemesh_manage::wire::{
    AttachReply, AttachVolume, ChangeLegs, DetachVolume, ReportReplication, VolumeContent,
    VolumeDetail,
};
use pagemesh_manage::{ManagerAuthority, ManagerClient, ManagerError, VolumeConnection};
use pagemesh_volume::{AttachError, SnapshotSpace, Transport, Transports, Volume};
use std::sync::Arc;

/// A client of the manager that the arguments name, with their token if they name one, otherwise with the cluster
/// key. If they name neither, the token of a `client.toml` comes before the key.
pub fn manager_client(args: &ManagerArgs) -> anyhow::Result<ManagerClient> {
    let mut token = token_file::find(args.token_file.as_deref())?;
    if token.is_none() && key::nonempty_path(args.key.as_deref()).is_none() {
        let files = ClientFiles::load()?;
        token = token_file::find(files.token_file(&args.manager))?;
    }
    match token {
        Some(token) => Ok(ManagerClient::with_token(&args.manager, &token)?),
        None => cluster_client(args),
    }
}

/// A client with the cluster key, for daemons: they outlive a token, and no token may register, attach or report.
pub fn cluster_client(args: &ManagerArgs) -> anyhow::Result<ManagerClient> {
    let key = key::find(args.key.as_deref(), &args.manager)?;
    Ok(ManagerClient::new(&args.manager, &key)?)
}

/// Refuses a volume with another kind of content.
pub fn expect_content(
    manager: &ManagerClient,
    name: &VolumeName,
    content: VolumeContent,
) -> anyhow::Result<VolumeDetail> {
    let detail = manager.volume(name)?;
    if detail.info.content == content {
        return Ok(detail);
    }
    match content {
        VolumeContent::Blocks => {
            bail!("the volume {name} holds files; use it with: pagemesh mount {name} DIR")
        }
        VolumeContent::Files => bail!(
            "the volume {name} holds blocks, and no file system of pagemesh; use it with: \
             pagemesh export nbd {name}, or make a file system: pagemesh fs create"
        ),
    }
}

/// Detaches the volume when dropped, before the process ends.
pub struct DetachGuard(pub Arc<Volume>);

impl Drop for DetachGuard {
    fn drop(&mut self) {
        self.0.detach();
    }
}

/// Attaches a volume in this process. If no in-sync copy is reachable, it asks the manager a second
/// time; the manager may then promote an asynchronous copy.
pub fn attach(
    args: &ManagerArgs,
    transport: TransportArg,
    name: &VolumeName,
) -> anyhow::Result<Volume> {
    Ok(attach_replacing(args, transport, name, None)??)
}

/// The same, and the attach may end this attachment alone (0: none), if there is one.
pub fn attach_replacing(
    args: &ManagerArgs,
    transport: TransportArg,
    name: &VolumeName,
    replaces: Option<EpochNumber>,
) -> anyhow::Result<Result<Volume, AttachError>> {
    attach_as(args, transport, name, replaces, false)
}

/// The same for a process that receives snapshots into the volume.
pub fn attach_to_receive(
    args: &ManagerArgs,
    transport: TransportArg,
    name: &VolumeName,
    replaces: EpochNumber,
) -> anyhow::Result<Volume> {
    Ok(attach_as(args, transport, name, Some(replaces), true)??)
}

fn attach_as(
    args: &ManagerArgs,
    transport: TransportArg,
    name: &VolumeName,
    replaces: Option<EpochNumber>,
    receive: bool,
) -> anyhow::Result<Result<Volume, AttachError>> {
    let key = key::find(args.key.as_deref(), &args.manager)?;
    let client = ManagerClient::new(&args.manager, &key)?;
    let connector = Arc::new(transports(key, transport));
    let host = host_name();
    let who = format!("{host}:{}", std::process::id());
    let process = ProcessIdentity::own().map(|own| own.to_string());
    let attach = |unreachable| {
        let authority = Arc::new(ManagerAuthority {
            connection: client.clone(),
            unreachable,
            process: process.clone(),
            replaces,
            receive,
        });
        Volume::attach(authority, connector.clone(), name.clone(), &who)
    };
    match attach(false) {
        Err(AttachError::Unreachable { .. }) if client.volume(name)?.info.auto_promote => {
            Ok(attach(true))
        }
        attached => Ok(attached),
    }
}

/// Attaches a volume for its rollback. The attach may end this attachment alone (0: none).
pub fn attach_for_rollback(
    args: &ManagerArgs,
    transport: TransportArg,
    name: &VolumeName,
    replaces: EpochNumber,
) -> anyhow::Result<Volume> {
    let key = key::find(args.key.as_deref(), &args.manager)?;
    let authority = Arc::new(ManagerAuthority {
        connection: RollbackConnection(ManagerClient::new(&args.manager, &key)?),
        unreachable: false,
        process: ProcessIdentity::own().map(|own| own.to_string()),
        replaces: Some(replaces),
        receive: false,
    });
    let who = format!("{}:{}", host_name(), std::process::id());
    let connector = Arc::new(transports(key, transport));
    Ok(Volume::attach(authority, connector, name.clone(), &who)?)
}

/// A connection that attaches for a rollback.
struct RollbackConnection(ManagerClient);

impl VolumeConnection for RollbackConnection {
    fn attach(
        &self,
        name: &VolumeName,
        request: &AttachVolume,
    ) -> Result<AttachReply, ManagerError> {
        self.0.attach_for_rollback(name, request)
    }

    fn change_legs(&self, name: &VolumeName, request: &ChangeLegs) -> Result<Layout, ManagerError> {
        VolumeConnection::change_legs(&self.0, name, request)
    }

    fn detail(
        &self,
        name: &VolumeName,
        report: Option<&ReportReplication>,
    ) -> Result<VolumeDetail, ManagerError> {
        self.0.detail(name, report)
    }

    fn detach(&self, name: &VolumeName, request: DetachVolume) -> Result<(), ManagerError> {
        VolumeConnection::detach(&self.0, name, request)
    }
}

fn transports(key: Key, transport: TransportArg) -> Transports {
    let transport = match transport {
        TransportArg::Auto => Transport::Auto,
        TransportArg::Map => Transport::Map,
        TransportArg::Tcp => Transport::Tcp,
    };
    Transports::new(key, transport, Timeouts::default())
}

/// Opens a snapshot, for reads. It attaches nothing, so the client of the volume goes on.
pub fn open_snapshot(
    args: &ManagerArgs,
    transport: TransportArg,
    path: &SnapshotPath,
) -> anyhow::Result<SnapshotSpace> {
    let key = key::find(args.key.as_deref(), &args.manager)?;
    let manager = ManagerClient::new(&args.manager, &key)?;
    let detail = manager.snapshot(&path.volume, &path.name)?;
    let connector = Arc::new(transports(key, transport));
    let epoch = Epoch(detail.info.epoch.0);
    let space = SnapshotSpace::new(connector, &snapshot_layout(&detail), epoch);
    let space = space.with_context(|| format!("cannot read the snapshot {path}"))?;
    Ok(space.with_label(&path.to_string()))
}

/// The name of this machine.
pub fn host_name() -> String {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    match name.is_empty() {
        true => "localhost".into(),
        false => name,
    }
}
