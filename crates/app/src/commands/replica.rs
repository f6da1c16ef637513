//! `pagemesh replica`: adds, removes and promotes copies of a volume.

mod copies;

use crate::args::{ManagerArgs, Output};
use crate::client::manager_client;
use crate::output;
use clap::{Args, Subcommand, ValueEnum};
use copies::{copy_statuses, copy_table};
use pagemesh_base::brick_name::BrickRef;
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::ManagerClient;
use pagemesh_manage::snapshots::SnapshotName;
use pagemesh_manage::wire::{AttachReplica, ChooseReplica, VolumeContent, VolumeDetail};

/// Add, remove and promote copies of a volume.
#[derive(Subcommand)]
pub enum ReplicaCommand {
    Attach(AttachArgs),
    Detach(DetachArgs),
    Promote(PromoteArgs),
    /// Show the copies of a volume.
    Status {
        /// Volume.
        volume: VolumeName,
        #[command(flatten)]
        client: ManagerArgs,
    },
}

/// The time at which a copy receives a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReplicaMode {
    /// Before the write is acknowledged.
    Sync,
    /// Shortly after the acknowledgement, in order. A durable write (O_SYNC, O_DSYNC, fsync, FUA,
    /// flush) is acknowledged once the copy has it.
    Async,
}

/// Add a copy to a volume, even while it is in use. After its first resync a synchronous copy
/// holds every acknowledged write.
#[derive(Args)]
pub struct AttachArgs {
    /// Volume.
    pub volume: VolumeName,
    /// Name or UUID of the brick for the copy; by default any brick with room in a failure domain
    /// that has no copy yet.
    #[arg(long)]
    pub brick: Option<BrickRef>,
    /// When the copy receives a write.
    #[arg(long, value_enum, default_value_t = ReplicaMode::Sync)]
    pub mode: ReplicaMode,
    /// Let the manager promote the asynchronous copy for a client that reaches no in-sync copy,
    /// while every brick with an in-sync copy is dead.
    ///
    /// Data loss: the promoted copy may lack the last acknowledged writes that were not
    /// durable.
    #[arg(long)]
    pub auto_promote: bool,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Remove a copy of a volume.
#[derive(Args)]
pub struct DetachArgs {
    /// Volume.
    pub volume: VolumeName,
    /// Number of the copy, from 0.
    #[arg(long)]
    pub copy: usize,
    /// Remove it although a client has attached the volume, which is then fenced, or although
    /// no living brick would have an in-sync copy.
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Make one copy the only in-sync one; the others resync from it. Not needed while any in-sync
/// copy is reachable: the next client then uses that copy by itself.
#[derive(Args)]
pub struct PromoteArgs {
    /// Volume.
    pub volume: VolumeName,
    /// Number of the copy, from 0.
    #[arg(long)]
    pub copy: usize,
    /// Promote it although a client has attached the volume, which is then fenced, or although
    /// the copy is not in-sync.
    ///
    /// Data loss: acknowledged writes that the copy lacks are lost.
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Attaches, detaches, promotes and shows copies.
pub fn run(command: &ReplicaCommand) -> anyhow::Result<()> {
    match command {
        ReplicaCommand::Attach(args) => attach(args),
        ReplicaCommand::Detach(args) => detach(args),
        ReplicaCommand::Promote(args) => promote(args),
        ReplicaCommand::Status {
            volume,
            client: args,
        } => {
            let detail = manager_client(args)?.volume(volume)?;
            let copies = copy_statuses(&detail)?;
            output::print(args.output, &copies, || copy_table(&copies))
        }
    }
}

fn attach(args: &AttachArgs) -> anyhow::Result<()> {
    let volume = &args.volume;
    let request = AttachReplica {
        brick: args.brick.clone(),
        asynchronous: args.mode == ReplicaMode::Async,
        auto_promote: args.auto_promote,
    };
    let detail = manager_client(&args.client)?.attach_replica(volume, request)?;
    let copy = detail.info.copies - 1;
    let done = format!("{volume} has copy {copy} now; {}", fill_hint(&detail));
    print_copies(&args.client, &detail, &done)
}

fn detach(args: &DetachArgs) -> anyhow::Result<()> {
    let (volume, copy) = (&args.volume, args.copy);
    let client = manager_client(&args.client)?;
    let choice = select_copy(&client, volume, copy, args.force)?;
    let detail = client.detach_replica(volume, choice)?;
    let done = format!("{volume} has no copy {copy} any more");
    print_copies(&args.client, &detail, &done)
}

fn promote(args: &PromoteArgs) -> anyhow::Result<()> {
    let (volume, copy) = (&args.volume, args.copy);
    let client = manager_client(&args.client)?;
    let choice = select_copy(&client, volume, copy, args.force)?;
    let detail = client.promote_replica(volume, choice)?;
    let hint = usage_hint(volume, &detail);
    let lost = lost_text(&detail.lost_snapshots);
    let done = format!("copy {copy} of {volume} is promoted; {hint}{lost}");
    if matches!(args.client.output, Output::Json) && !lost.is_empty() {
        eprintln!("{}", lost.trim_start());
    }
    print_copies(&args.client, &detail, &done)
}

/// Names a copy by its number and the current epoch. If the answer is lost and the user repeats the
/// command, the number may already mean another copy.
fn select_copy(
    client: &ManagerClient,
    volume: &VolumeName,
    copy: usize,
    force: bool,
) -> anyhow::Result<ChooseReplica> {
    let expected = Some(client.volume(volume)?.layout.epoch);
    Ok(ChooseReplica {
        copy,
        force,
        expected,
    })
}

fn print_copies(args: &ManagerArgs, detail: &VolumeDetail, what: &str) -> anyhow::Result<()> {
    let copies = copy_statuses(detail)?;
    output::print(args.output, &copies, || {
        format!("{what}\n\n{}", copy_table(&copies))
    })
}

/// The snapshots that a promotion deleted.
fn lost_text(names: &[SnapshotName]) -> String {
    let names: Vec<&str> = names.iter().map(SnapshotName::as_str).collect();
    match names.is_empty() {
        true => String::new(),
        false => format!(
            "\nsnapshots that this copy did not have as a whole are deleted: {}",
            names.join(", ")
        ),
    }
}

fn fill_hint(detail: &VolumeDetail) -> &'static str {
    match detail.info.attached {
        Some(_) => "the attached client resyncs the copy, and reports the progress",
        None => "the next client that attaches the volume resyncs the copy",
    }
}

fn usage_hint(volume: &VolumeName, detail: &VolumeDetail) -> String {
    let verb = match detail.info.content {
        VolumeContent::Blocks => format!("pagemesh export nbd {volume}"),
        VolumeContent::Files => format!("pagemesh mount {volume} DIR"),
    };
    format!("use it with: {verb}")
}
