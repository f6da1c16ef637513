//! The volume that a stream is written to: which one may get it, and the state that it must have before.

use super::ReceiveArgs;
use anyhow::{Context, bail, ensure};
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::snapshots::SnapshotName;
use pagemesh_manage::wire::{CreateVolume, SnapshotInfo, VolumeContent, VolumeInfo};
use pagemesh_manage::{LayoutKind, ManagerClient, TierPolicy};
use pagemesh_stream::{Header, SnapshotIdentity, StreamContent};
use uuid::Uuid;

/// The label of a snapshot that a receiver makes for a while: to go back to the newest received one, or to read what it wrote.
pub const RESET_LABEL: &str = "receive-reset";

/// The label of a received snapshot. It names the snapshot at its sender.
pub fn label(sent: &SnapshotIdentity) -> String {
    format!("received={sent}")
}

/// Whether an interrupted receive has left the snapshot.
pub fn is_leftover(snapshot: &SnapshotInfo) -> bool {
    snapshot.labels.iter().any(|it| it == RESET_LABEL)
}

/// What to do with the rest of an interrupted stream.
#[derive(Debug, PartialEq)]
pub enum Reset {
    /// The volume is as the stream expects it.
    Nothing,
    /// An interrupted stream of a whole snapshot: the volume is cleared.
    Clear,
    /// An interrupted stream of changes: the volume goes back to its newest snapshot.
    ToNewest,
}

/// A volume that may get the stream.
#[derive(Debug, PartialEq)]
pub struct Target {
    /// The identity of the volume.
    pub id: Uuid,
    /// The name of the snapshot to make.
    pub name: SnapshotName,
    /// The volume's snapshot at which the changes begin.
    pub from: Option<SnapshotName>,
    /// Whether this command has made the volume.
    pub is_new: bool,
    /// What to do first.
    pub reset: Reset,
    /// Snapshots that an interrupted receive has left.
    pub leftovers: Vec<SnapshotName>,
}

impl Target {
    /// Makes the volume, or checks that the stream may be written to it.
    pub fn prepare(
        args: &ReceiveArgs,
        manager: &ManagerClient,
        header: &Header,
    ) -> anyhow::Result<Target> {
        let name: SnapshotName = header
            .to_name
            .parse()
            .with_context(|| format!("the stream's snapshot has the name '{}'", header.to_name))?;
        let volumes = manager.volumes()?;
        let existing = volumes.iter().find(|it| it.name == args.volume);
        let Some(volume) = existing else {
            check_without_volume(&args.volume, header)?;
            let created = manager.create(&create_request(
                &args.volume,
                (args.copies, args.class.as_deref()),
                header,
            )?)?;
            return Ok(Target {
                id: created.volume.info.id,
                name,
                from: None,
                is_new: true,
                reset: Reset::Nothing,
                leftovers: vec![],
            });
        };
        let snapshots = manager.snapshots(Some(&args.volume), None)?;
        let (leftovers, snapshots): (Vec<_>, Vec<_>) = snapshots.into_iter().partition(is_leftover);
        let (from, reset) = check(volume, &snapshots, header, &name)?;
        if volume.size_bytes < header.limit_bytes {
            manager.grow(&args.volume, header.limit_bytes)?;
        }
        Ok(Target {
            id: volume.id,
            name,
            from,
            is_new: false,
            reset,
            leftovers: leftovers.into_iter().map(|it| it.name).collect(),
        })
    }
}

fn check_without_volume(name: &VolumeName, header: &Header) -> anyhow::Result<()> {
    ensure!(
        header.start.target_epoch == 0,
        "there is no volume {name} that the rest of a stream could be written to; send the stream from its start"
    );
    ensure!(
        header.from_epoch.is_none(),
        "there is no volume {name}, and the stream has only the changes since the snapshot {}; receive that one first",
        header.from_name
    );
    Ok(())
}

/// The volume that a stream or a backup with this header is written to.
pub fn create_request(
    volume: &VolumeName,
    (copies, class): (usize, Option<&str>),
    header: &Header,
) -> anyhow::Result<CreateVolume> {
    Ok(CreateVolume {
        name: volume.clone(),
        size_bytes: header.limit_bytes,
        layout: match copies {
            1 => LayoutKind::Concat,
            _ => LayoutKind::Mirror,
        },
        columns: None,
        copies: Some(copies),
        durability: class.map(str::parse).transpose()?,
        content: content_of(header),
        tier: TierPolicy::Auto,
        received: true,
    })
}

fn content_of(header: &Header) -> VolumeContent {
    match header.content {
        StreamContent::Blocks => VolumeContent::Blocks,
        StreamContent::Files => VolumeContent::Files,
    }
}

/// The snapshot at which the changes of the stream begin, and the way there, after a check that the volume may get them.
/// `snapshots` are those of the volume, the newest first.
fn check(
    volume: &VolumeInfo,
    snapshots: &[SnapshotInfo],
    header: &Header,
    name: &SnapshotName,
) -> anyhow::Result<(Option<SnapshotName>, Reset)> {
    let at = &volume.name;
    ensure!(
        volume.content == content_of(header),
        "the volume {at} has other content than the stream, files or blocks; receive it into a new volume"
    );
    let Some(last_receive) = volume.received else {
        bail!(
            "the volume {at} receives no snapshots: it was promoted, or no receive has made it; receive into a new volume"
        );
    };
    let received = snapshots.iter().find(|it| is_same(volume, it, &header.to));
    if let Some(received) = received {
        bail!(
            "the volume {at} has this snapshot already, as {at}@{}",
            received.name
        );
    }
    ensure!(
        snapshots.iter().all(|it| it.name != *name),
        "the volume {at} has another snapshot {name}; delete it, or receive the stream into another volume"
    );
    let newest = snapshots.first();
    let from = match (header.from(), newest) {
        (None, None) => None,
        (None, Some(newest)) => bail!(
            "the volume {at} has a snapshot, {}, and the stream has all of a volume; receive it into a new volume",
            newest.name
        ),
        (Some(from), Some(newest)) if is_same(volume, newest, &from) => Some(newest),
        (Some(from), newest) => bail!(
            "the stream begins at the snapshot {} ({from}), and the newest snapshot of {at} is {}; send the changes since that one",
            header.from_name,
            newest.map_or("none".into(), |it| it.name.to_string())
        ),
    };
    let start = &header.start;
    let is_rest = start.target_epoch != 0;
    ensure!(
        !is_rest || (volume.id, last_receive.0) == (start.target, start.target_epoch),
        "the volume {at} is not as the cut stream left it: it is another one, or another stream was received since; send \
         the stream from its start"
    );
    let reset = match from {
        _ if is_rest => Reset::Nothing,
        None if last_receive.0 == 0 => Reset::Nothing,
        None => Reset::Clear,
        Some(from) if last_receive < from.epoch => Reset::Nothing,
        Some(_) => Reset::ToNewest,
    };
    Ok((from.map(|it| it.name.clone()), reset))
}

/// Whether a snapshot of the volume has this identity, or was received from the one with it.
fn is_same(volume: &VolumeInfo, snapshot: &SnapshotInfo, identity: &SnapshotIdentity) -> bool {
    let own = SnapshotIdentity {
        volume: volume.id,
        epoch: snapshot.epoch.0,
    };
    own == *identity || snapshot.labels.contains(&label(identity))
}
