//! `pagemesh snapshot receive`: writes a stream to a volume, and makes its snapshot there.
//!
//! Invariants: the snapshot is made only after the whole stream was intact, and the volume was read and has its content.
//! A stream of changes is written only to a volume that has the content of its start. No other client attaches the volume until it is
//! promoted.

mod received;
pub mod target;

use super::space_io::SpaceIo;
use crate::args::{CLASSES, ManagerArgs, Transport};
use crate::client::{DetachGuard, cluster_client};
use crate::commands::mount::life_signs::LifeSigns;
use crate::output::{self, bytes};
use crate::snapshot_cuts;
use anyhow::{Context, anyhow, ensure};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use pagemesh_base::layout::{EpochNumber, VolumeName};
use pagemesh_base::space::Space;
use pagemesh_manage::ManagerClient;
use pagemesh_manage::wire::{CreateSnapshot, SnapshotInfo};
use pagemesh_stream::{ContentSummary, Header, ResumeToken, StreamReader, StreamStart};
use received::{Applied, Before};
use serde::Serialize;
use std::io::{self, BufReader, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use target::Target;

/// Write a stream of `snapshot send` from standard input to a volume, and make its snapshot there.
///
/// A stream of all of a snapshot makes the volume. A stream of changes needs the volume that received the earlier
/// snapshot. The snapshot is made, under its name at the sender, after all of the stream has arrived intact, and the
/// volume was read and has its content. The volume is read-only for others until `pagemesh volume promote`.
#[derive(Args)]
pub struct ReceiveArgs {
    /// Volume to make, or to write the changes to.
    pub volume: VolumeName,
    /// Number of copies of a new volume, each on its own brick.
    #[arg(long, default_value_t = 2, value_parser = RangedU64ValueParser::<usize>::new().range(1..=3))]
    pub copies: usize,
    /// Durability class of the bricks of a new volume; by default the strongest class with room.
    #[arg(long, value_parser = CLASSES)]
    pub class: Option<String>,
    /// File for the token that resumes the stream after a cut. With it, a new volume is kept when its stream is cut; otherwise it
    /// is deleted.
    #[arg(long, value_name = "FILE")]
    pub resume_file: Option<PathBuf>,
    /// Transport to the bricks.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: Transport,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// The result, for programs.
#[derive(Serialize)]
struct Received {
    #[serde(flatten)]
    snapshot: SnapshotInfo,
    data_bytes: u64,
    zero_bytes: u64,
    summary: String,
}

/// Receives a stream.
pub fn run(args: &ReceiveArgs) -> anyhow::Result<()> {
    ensure!(
        !io::stdin().is_terminal(),
        "standard input is a terminal; pipe a stream to it, or redirect a file: pagemesh snapshot receive {} < FILE",
        args.volume
    );
    let input = BufReader::with_capacity(1 << 20, io::stdin().lock());
    let mut stream = StreamReader::new(input)?;
    let manager = cluster_client(&args.client)?;
    let header = stream.header().clone();
    let replaced = received::await_receiver(args, &manager)?;
    let target = Target::prepare(args, &manager, &header)?;
    match receive(args, &manager, &target, replaced, &mut stream) {
        Ok(received) => {
            if let Some(path) = &args.resume_file {
                remove(path)?;
            }
            output::print(args.client.output, &received, || {
                let info = &received.snapshot;
                let data = bytes(received.data_bytes);
                format!("received {}@{}: {data} of pages", info.volume, info.name)
            })
        }
        Err(failure) => Err(end_failed(args, &manager, &target, &header, failure)),
    }
}

fn remove(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
            Err(cause).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Why a stream was not received.
struct Failure {
    cause: anyhow::Error,
    /// The last checkpoint that the volume has, if the stream can go on from there.
    checkpoint: Option<Checkpoint>,
}

impl From<anyhow::Error> for Failure {
    fn from(cause: anyhow::Error) -> Failure {
        let checkpoint = None;
        Failure { cause, checkpoint }
    }
}

/// A position of the stream that the volume has durably.
#[derive(Clone, Copy)]
struct Checkpoint {
    position: u64,
    summary: ContentSummary,
}

/// Deletes the new volume, or keeps it and says how to go on.
fn end_failed(
    args: &ReceiveArgs,
    manager: &ManagerClient,
    target: &Target,
    header: &Header,
    Failure { cause, checkpoint }: Failure,
) -> anyhow::Error {
    let volume = &args.volume;
    if target.is_new && (args.resume_file.is_none() || checkpoint.is_none()) {
        return match manager.delete(volume, false) {
            Ok(_) => cause.context(format!(
                "received nothing; the unfinished volume {volume} is deleted"
            )),
            Err(why) => cause.context(format!(
                "the volume {volume} is unfinished, and cannot be deleted: {why}"
            )),
        };
    }
    let Some(checkpoint) = checkpoint else {
        return cause.context(format!("the volume {volume} did not get the snapshot"));
    };
    let info = manager.volume(volume).map(|detail| detail.info);
    let stored = info.map_err(anyhow::Error::from).and_then(|info| {
        let epoch = info.received.context("the volume was promoted")?.0;
        let token = token_of(header, target, epoch, checkpoint);
        store_token(args, &token)?;
        Ok(token)
    });
    match stored {
        Ok(token) => cause.context(format!(
            "the volume {volume} is unfinished: write nothing to it, and send the rest with: pagemesh snapshot send ... --resume {token}"
        )),
        Err(why) => cause.context(format!("the volume {volume} is unfinished, and has no resume token: {why:#}")),
    }
}

fn token_of(header: &Header, target: &Target, epoch: u32, checkpoint: Checkpoint) -> ResumeToken {
    let start = StreamStart {
        position: checkpoint.position,
        summary: checkpoint.summary,
        target: target.id,
        target_epoch: epoch,
    };
    ResumeToken::new(header, start)
}

/// Replaces the resume file, if there is one, as a whole.
fn store_token(args: &ReceiveArgs, token: &ResumeToken) -> anyhow::Result<()> {
    let Some(path) = &args.resume_file else {
        return Ok(());
    };
    let parent = path.parent().filter(|it| !it.as_os_str().is_empty());
    let mut file = tempfile::NamedTempFile::new_in(parent.unwrap_or(Path::new(".")))?;
    writeln!(file, "{token}")?;
    file.as_file().sync_all()?;
    file.persist(path)
        .with_context(|| format!("cannot store the token in {}", path.display()))?;
    Ok(())
}

fn receive(
    args: &ReceiveArgs,
    manager: &ManagerClient,
    target: &Target,
    replaced: Option<EpochNumber>,
    stream: &mut StreamReader<impl Read>,
) -> Result<Received, Failure> {
    let header = stream.header().clone();
    let volume = Arc::new(received::attach(args, replaced)?);
    let _guard = DetachGuard(Arc::clone(&volume));
    let _signs = LifeSigns::start(manager.clone(), &args.volume, &volume)?;
    snapshot_cuts::serve(manager, &[(args.volume.clone(), Arc::downgrade(&volume))])?;
    if volume.size_bytes() < header.size_bytes {
        let why = anyhow!(
            "the volume {} is smaller than the stream's; grow it",
            args.volume
        );
        return Err(why.into());
    }
    let epoch = volume.attachment().0;
    let mut io = SpaceIo::open(&*volume)?;
    received::reset(args, manager, target, &volume, &mut io)?;
    let before = match (&target.from, header.has_page_summary) {
        (Some(from), true) => Some(Before::new(&received::open(args, manager, from)?)?),
        _ => None,
    };
    let Applied {
        totals,
        summary,
        expected,
    } = received::apply(&mut io, before, stream, |checkpoint| {
        store_token(args, &token_of(&header, target, epoch, checkpoint))
    })?;
    received::verify(args, manager, target, &volume, expected)?;
    let request = CreateSnapshot {
        name: target.name.clone(),
        labels: vec![target::label(&header.to)],
    };
    let made = manager.create_snapshot(&args.volume, &request);
    let snapshot = made.map_err(anyhow::Error::from)?;
    Ok(Received {
        snapshot,
        data_bytes: totals.data_bytes,
        zero_bytes: totals.zero_bytes,
        summary: summary.to_string(),
    })
}
