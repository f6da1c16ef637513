//! `pagemesh schedule replicate`: sends the newest snapshots of a schedule to its targets.
//!
//! The target tells the last snapshot that it has. So a run is repeated as a whole after a kill, and after the loss of its report. The
//! manager keeps the last snapshot of each target, and a bookmark of it.

use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::commands::snapshot::receive::target::is_leftover;
use crate::output::{self, table};
use anyhow::{Context, anyhow, ensure};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use pagemesh_base::checksum::crc32c;
use pagemesh_base::layout::{NAME_BYTES_MAX, VolumeName};
use pagemesh_manage::ManagerClient;
use pagemesh_manage::snapshots::{HoldTag, SnapshotName};
use pagemesh_manage::wire::{ReportSent, ScheduleTarget, ScheduleVolume, SnapshotInfo};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use uuid::Uuid;

/// Send the newest snapshot of each volume of a schedule to its targets, as changes since the last one that a target has.
///
/// Run it from a timer, on a machine that reaches both clusters.
#[derive(Args)]
pub struct ReplicateArgs {
    /// Name of the schedule.
    pub name: SnapshotName,
    /// Only this target.
    #[arg(long)]
    pub target: Option<SnapshotName>,
    /// File with the cluster key of the targets; by default as for the schedule's own cluster.
    #[arg(long, value_name = "FILE", value_parser = crate::args::path_parser())]
    pub target_key: Option<PathBuf>,
    /// Copies of a volume that is new at the target.
    #[arg(long, default_value_t = 2, value_parser = RangedU64ValueParser::<usize>::new().range(1..=3))]
    pub copies: usize,
    /// Bytes of a stream per second, at most.
    #[arg(long, value_name = "BYTES")]
    pub rate: Option<String>,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// The outcome for a volume at a target.
#[derive(Serialize)]
struct Replicated {
    volume: VolumeName,
    target: SnapshotName,
    target_volume: VolumeName,
    snapshot: Option<SnapshotName>,
    /// `sent`, `up-to-date`, `no-snapshot` or `failed`.
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Replicates a schedule.
pub fn run(args: &ReplicateArgs) -> anyhow::Result<()> {
    let manager = manager_client(&args.client)?;
    let detail = manager.schedule(&args.name)?;
    let targets = detail.info.policy.targets.iter();
    let chosen = |it: &&ScheduleTarget| args.target.as_ref().is_none_or(|name| *name == it.name);
    let targets: Vec<&ScheduleTarget> = targets.filter(chosen).collect();
    ensure!(
        !targets.is_empty(),
        "the schedule {} has no such target; add one with: pagemesh schedule update {} --target NAME=URL",
        args.name,
        args.name
    );
    let mut done = Vec::new();
    for target in targets {
        for volume in detail.volumes.iter().filter(|it| !it.received) {
            done.push(replicate(args, &manager, target, volume)?);
        }
    }
    let failed = done.iter().filter(|it| it.outcome == "failed").count();
    output::print(args.client.output, &done, || replication_table(&done))?;
    ensure!(
        failed == 0,
        "{failed} of {} volumes were not sent",
        done.len()
    );
    Ok(())
}

fn replicate(
    args: &ReplicateArgs,
    manager: &ManagerClient,
    target: &ScheduleTarget,
    volume: &ScheduleVolume,
) -> anyhow::Result<Replicated> {
    let target_volume = format!("{}{}", target.volume_prefix, volume.volume);
    let target_volume: VolumeName = target_volume
        .parse()
        .with_context(|| format!("the target {} has a prefix that makes no name", target.name))?;
    let mut replicated = Replicated {
        volume: volume.volume.clone(),
        target: target.name.clone(),
        target_volume,
        snapshot: volume.newest.clone(),
        outcome: "no-snapshot",
        error: None,
    };
    let Some(newest) = &volume.newest else {
        return Ok(replicated);
    };
    let pair = VolumePair {
        args,
        manager,
        target,
        volume: &volume.volume,
        target_volume: &replicated.target_volume,
    };
    match pair.send(newest) {
        Ok(outcome) => replicated.outcome = outcome,
        Err(cause) => {
            replicated.outcome = "failed";
            replicated.error = Some(format!("{cause:#}"));
        }
    }
    Ok(replicated)
}

/// A volume, and its copy at a target.
struct VolumePair<'a> {
    args: &'a ReplicateArgs,
    manager: &'a ManagerClient,
    target: &'a ScheduleTarget,
    volume: &'a VolumeName,
    target_volume: &'a VolumeName,
}

impl VolumePair<'_> {
    /// Sends a snapshot, unless the target has it, and reports it.
    fn send(&self, newest: &SnapshotName) -> anyhow::Result<&'static str> {
        let snapshots = self.manager.snapshots(Some(self.volume), None)?;
        let named = snapshots.iter().find(|it| it.name == *newest);
        let named = named.ok_or_else(|| anyhow!("{}@{newest} was deleted", self.volume))?;
        let id = self.manager.volume(self.volume)?.info.id;
        let (from, outcome) = match self.last_received(id)? {
            Some(epoch) if epoch == named.epoch.0 => (None, "up-to-date"),
            Some(epoch) => (Some(self.start_at(&snapshots, epoch)?), "sent"),
            None => (None, "sent"),
        };
        if outcome == "sent" {
            let hold = self.hold_tag()?;
            // A first stream may last longer than the retention of the schedule. An earlier hold may be that of another run.
            let was_held = named.holds.contains(&hold);
            self.manager.hold_snapshot(self.volume, newest, &hold)?;
            if let Err(cause) = self.pipe(newest, from.as_deref()) {
                if !was_held {
                    let released = self.manager.release_snapshot(self.volume, newest, &hold);
                    released.with_context(|| format!("{cause:#}; and its hold {hold} stays"))?;
                }
                return Err(cause);
            }
        }
        let report = ReportSent {
            target: self.target.name.clone(),
            volume: self.volume.clone(),
            snapshot: newest.clone(),
        };
        self.manager.report_sent(&self.args.name, &report)?;
        self.release_holds(&self.hold_tag()?)?;
        Ok(outcome)
    }

    /// The tag of the hold of a snapshot that is on its way to the target.
    fn hold_tag(&self) -> anyhow::Result<HoldTag> {
        let (schedule, target) = (&self.args.name, &self.target.name);
        let long = format!("sending-{schedule}-{target}");
        let tag = match long.len() > NAME_BYTES_MAX {
            true => format!("sending-{:08x}", crc32c(long.as_bytes())),
            false => long,
        };
        let tag = tag.parse();
        tag.with_context(|| format!("the name of the target {} makes no tag", self.target.name))
    }

    /// Releases the hold, and those that killed runs left.
    fn release_holds(&self, tag: &HoldTag) -> anyhow::Result<()> {
        for snapshot in self.manager.snapshots(Some(self.volume), None)? {
            if snapshot.holds.contains(tag) {
                self.manager
                    .release_snapshot(self.volume, &snapshot.name, tag)?;
            }
        }
        Ok(())
    }

    /// The epoch of the last snapshot of the volume that the target has. None without the volume there, or without a snapshot.
    fn last_received(&self, id: Uuid) -> anyhow::Result<Option<u32>> {
        let client = manager_client(&self.target_args())?;
        let volumes = client.volumes()?;
        if !volumes.iter().any(|it| it.name == *self.target_volume) {
            return Ok(None);
        }
        let received = client.snapshots(Some(self.target_volume), None)?;
        let label = format!("received={id}@");
        // The newest come first.
        let mut epochs = received.iter().flat_map(|it| &it.labels);
        let epoch = epochs.find_map(|text| text.strip_prefix(&label)?.parse().ok());
        ensure!(
            epoch.is_some() || received.iter().all(is_leftover),
            "the volume {} at {} has snapshots of another volume; choose another prefix for the target {}",
            self.target_volume,
            self.target.manager,
            self.target.name
        );
        Ok(epoch)
    }

    fn target_args(&self) -> ManagerArgs {
        let own = &self.args.client;
        ManagerArgs {
            manager: self.target.manager.clone(),
            key: self.args.target_key.clone().or_else(|| own.key.clone()),
            token_file: None,
            output: own.output,
        }
    }

    /// The snapshot or bookmark of this epoch.
    fn start_at(&self, snapshots: &[SnapshotInfo], epoch: u32) -> anyhow::Result<String> {
        let volume = self.volume;
        if let Some(found) = snapshots.iter().find(|it| it.epoch.0 == epoch) {
            return Ok(format!("{volume}@{}", found.name));
        }
        let bookmarks = self.manager.bookmarks(volume)?;
        let found = bookmarks.iter().find(|it| it.epoch.0 == epoch);
        let found = found.ok_or_else(|| {
            anyhow!(
                "{volume} has neither a snapshot nor a bookmark of the last snapshot that {} has; delete or rename the volume {} there, so that \
                 all of it is sent again",
                self.target.name,
                self.target_volume
            )
        })?;
        Ok(format!("{volume}#{}", found.name))
    }

    /// Runs `snapshot send` into `snapshot receive`.
    fn pipe(&self, newest: &SnapshotName, from: Option<&str>) -> anyhow::Result<()> {
        let program = std::env::current_exe().context("cannot find this program")?;
        let own = &self.args.client;
        let mut send = Command::new(&program);
        send.args(["snapshot", "send", "--compress"]);
        send.arg(format!("{}@{newest}", self.volume));
        from.map(|from| send.args(["--from", from]));
        self.args
            .rate
            .as_ref()
            .map(|rate| send.args(["--rate", rate]));
        add_cluster(&mut send, &own.manager, own.key.as_deref());
        let mut sender = send
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the sender")?;
        let output = sender.stdout.take().context("the sender has no output")?;
        let target = self.target_args();
        let mut receive = Command::new(&program);
        receive.args(["snapshot", "receive", self.target_volume.as_str()]);
        receive.args(["--copies", &self.args.copies.to_string()]);
        add_cluster(&mut receive, &target.manager, target.key.as_deref());
        let received = receive.stdin(output).stdout(Stdio::null()).status();
        if received.is_err() {
            // The sender would wait for a reader. It may have ended already.
            let _ = sender.kill();
        }
        let sent = sender.wait().context("cannot wait for the sender")?;
        let received = received.context("cannot start the receiver")?;
        ensure!(sent.success(), "the sender failed: {sent}");
        ensure!(received.success(), "the receiver failed: {received}");
        Ok(())
    }
}

fn add_cluster(command: &mut Command, manager: &str, key: Option<&Path>) {
    command.args(["--manager", manager]);
    if let Some(key) = key.filter(|key| !key.as_os_str().is_empty()) {
        command.arg("--key").arg(key);
    }
}

fn replication_table(done: &[Replicated]) -> String {
    let dash = || "-".to_owned();
    let rows = done.iter().map(|it| {
        vec![
            it.volume.to_string(),
            it.target.to_string(),
            it.target_volume.to_string(),
            it.snapshot.as_ref().map_or_else(dash, ToString::to_string),
            it.outcome.to_owned(),
            it.error.clone().unwrap_or_else(dash),
        ]
    });
    let head = [
        "VOLUME",
        "TARGET",
        "VOLUME THERE",
        "SNAPSHOT",
        "OUTCOME",
        "ERROR",
    ];
    table(&head, rows)
}
