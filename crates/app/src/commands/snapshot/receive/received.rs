//! The volume while it receives: it is attached, goes back to its newest snapshot, and gets the records of a stream.

use super::target::{RESET_LABEL, Reset, Target};
use super::{Checkpoint, Failure, ReceiveArgs};
use crate::client::attach_to_receive;
use crate::commands::mount::takeover::{HolderWords, ServingHolder, await_holder};
use crate::commands::snapshot::SnapshotPath;
use crate::commands::snapshot::source::{Changes, SnapshotSource};
use crate::commands::snapshot::space_io::SpaceIo;
use crate::output;
use anyhow::{Context, anyhow, bail, ensure};
use pagemesh_base::layout::EpochNumber;
use pagemesh_base::space::Space;
use pagemesh_manage::ManagerClient;
use pagemesh_manage::snapshots::SnapshotName;
use pagemesh_manage::wire::{Attachment, CreateSnapshot, VolumeInfo};
use pagemesh_stream::{ContentSummary, PAGE_BYTES, Record, StreamReader, Totals, is_zero};
use pagemesh_volume::Volume;
use std::io::Read;

/// Bytes of one read of the pages before a change.
const READ_BYTES: u64 = 4 << 20;
const RECEIVE_WORDS: HolderWords = HolderWords {
    done: "received snapshots into",
    this: "this receive",
};

/// Waits for an earlier receiver that has ended or is silent. Refuses while one runs.
pub fn await_receiver(
    args: &ReceiveArgs,
    manager: &ManagerClient,
) -> anyhow::Result<Option<EpochNumber>> {
    let volume = &args.volume;
    let volumes = manager.volumes()?;
    let receives = |it: &VolumeInfo| it.name == *volume && it.received.is_some();
    if !volumes.iter().any(receives) {
        // It is made, or refused, later.
        return Ok(None);
    }
    let refuse = |holder: &Attachment| {
        ServingHolder::Refuse(anyhow!(
            "{} receives snapshots into the volume {volume}; wait for its end, or end it",
            holder.client
        ))
    };
    let pause = |time| {
        std::thread::sleep(time);
        false
    };
    await_holder(manager, volume, (&RECEIVE_WORDS, None), refuse, pause)
}

/// Attaches the volume in place of an earlier receiver.
pub fn attach(args: &ReceiveArgs, replaced: Option<EpochNumber>) -> anyhow::Result<Volume> {
    let replaced = replaced.unwrap_or(EpochNumber(0));
    attach_to_receive(&args.client, args.transport, &args.volume, replaced)
}

/// A snapshot of the volume.
pub fn open(
    args: &ReceiveArgs,
    manager: &ManagerClient,
    name: &SnapshotName,
) -> anyhow::Result<SnapshotSource> {
    let path = SnapshotPath {
        volume: args.volume.clone(),
        name: name.clone(),
    };
    SnapshotSource::open(&args.client, args.transport, manager, &path)
}

/// Undoes an interrupted receive.
pub fn reset(
    args: &ReceiveArgs,
    manager: &ManagerClient,
    target: &Target,
    volume: &Volume,
    io: &mut SpaceIo,
) -> anyhow::Result<()> {
    for name in &target.leftovers {
        manager.delete_snapshot(&args.volume, name)?;
    }
    match (&target.reset, &target.from) {
        (Reset::Clear, _) => {
            io.clear(0, volume.size_bytes())?;
            io.flush()
        }
        (Reset::ToNewest, Some(newest)) => {
            let name: SnapshotName = format!("receive-reset-{}", volume.attachment().0).parse()?;
            let request = CreateSnapshot {
                name: name.clone(),
                labels: vec![RESET_LABEL.to_owned()],
            };
            manager.create_snapshot(&args.volume, &request)?;
            let restored = restore(args, manager, &name, newest, io);
            let deleted = manager.delete_snapshot(&args.volume, &name);
            restored.with_context(|| {
                format!(
                    "cannot go back to {}@{newest} after an interrupted receive",
                    args.volume
                )
            })?;
            deleted.map(drop).map_err(Into::into)
        }
        _ => Ok(()),
    }
}

/// Writes the pages of a snapshot that differ in a later one.
fn restore(
    args: &ReceiveArgs,
    manager: &ManagerClient,
    present: &SnapshotName,
    wanted: &SnapshotName,
    io: &mut SpaceIo,
) -> anyhow::Result<()> {
    let (present, wanted) = (open(args, manager, present)?, open(args, manager, wanted)?);
    let mut changes = Changes::new(&present, Some(&wanted))?;
    changes.visit(0, |part| {
        let pages = part.new.chunks(PAGE_BYTES).zip(part.old.chunks(PAGE_BYTES));
        let mut offset = part.offset;
        for (new, old) in pages {
            let len = PAGE_BYTES as u64;
            if new == old {
            } else if is_zero(old) {
                io.clear(offset, len)?;
            } else {
                io.write(offset, old.to_vec())?;
            }
            offset += len;
        }
        Ok(())
    })?;
    io.flush()
}

/// What a volume got.
pub struct Applied {
    pub totals: Totals,
    /// The content summary of the stream.
    pub summary: ContentSummary,
    /// The expected difference between the snapshots from this byte on.
    pub expected: (u64, ContentSummary),
}

/// The reader of the bytes before the changes of a stream with a summary of its pages.
pub struct Before {
    io: SpaceIo,
    size_bytes: u64,
}

impl Before {
    pub fn new(snapshot: &SnapshotSource) -> anyhow::Result<Before> {
        Ok(Before {
            io: snapshot.reader()?,
            size_bytes: snapshot.size_bytes(),
        })
    }

    /// Takes the pages of a range away from a summary.
    fn subtract(
        &mut self,
        summary: &mut ContentSummary,
        offset: u64,
        len: u64,
    ) -> anyhow::Result<()> {
        let end = (offset + len).min(self.size_bytes);
        let mut at = offset;
        while at < end {
            for extent in self.io.extents(at, end - at)? {
                let extent_end = at + extent.len;
                while extent.mapped && at < extent_end {
                    let len = READ_BYTES.min(extent_end - at);
                    summary.subtract(at, &self.io.read(at, len as u32)?);
                    at += len;
                }
                at = extent_end;
            }
        }
        Ok(())
    }
}

/// The state of a volume that gets the records of a stream.
struct Apply<'a, F> {
    io: &'a mut SpaceIo,
    before: Option<Before>,
    last: Checkpoint,
    /// The summary of the pages of the stream, if the stream has it.
    sent: ContentSummary,
    /// The difference that these pages make.
    difference: ContentSummary,
    store: F,
}

impl<F: FnMut(Checkpoint) -> anyhow::Result<()>> Apply<'_, F> {
    /// Applies a record. At the end it returns the totals, and the summary of the stream.
    fn record(&mut self, record: Record) -> anyhow::Result<Option<(Totals, ContentSummary)>> {
        match record {
            Record::Data { offset, data } => {
                if let Some(before) = &mut self.before {
                    before.subtract(&mut self.difference, offset, data.len() as u64)?;
                    self.difference.add(offset, &data);
                    self.sent.add(offset, &data);
                }
                self.io.write(offset, data)?;
            }
            Record::Zeroes { offset, len } => {
                if let Some(before) = &mut self.before {
                    before.subtract(&mut self.difference, offset, len)?;
                }
                self.io.clear(offset, len)?;
            }
            Record::Checkpoint { position, summary } => {
                self.io.flush()?;
                self.last = Checkpoint { position, summary };
                (self.store)(self.last)?;
            }
            Record::End { totals, summary } => {
                self.io.flush()?;
                ensure!(
                    self.before.is_none() || self.sent == summary,
                    "the pages of the stream have the content summary {}, and its end says {summary}: send it again",
                    self.sent
                );
                return Ok(Some((totals, summary)));
            }
        }
        Ok(None)
    }
}

/// Writes the records of a stream to the volume. All of them are durable when it returns.
pub fn apply(
    io: &mut SpaceIo,
    before: Option<Before>,
    stream: &mut StreamReader<impl Read>,
    store: impl FnMut(Checkpoint) -> anyhow::Result<()>,
) -> Result<Applied, Failure> {
    let start = stream.header().start.clone();
    let bar = output::progress("receiving");
    bar.set_length(stream.header().size_bytes);
    let mut apply = Apply {
        io,
        before,
        last: Checkpoint {
            position: start.position,
            summary: start.summary,
        },
        sent: start.summary,
        difference: ContentSummary::default(),
        store,
    };
    let mut step = |apply: &mut Apply<'_, _>| match stream.next()? {
        Some(record) => {
            if let Record::Data { offset, data } = &record {
                bar.set_position(offset + data.len() as u64);
            }
            apply.record(record)
        }
        None => bail!("the stream has no end"),
    };
    let result = loop {
        match step(&mut apply) {
            Ok(None) => {}
            Ok(Some(end)) => break Ok(end),
            Err(cause) => break Err(cause),
        }
    };
    bar.finish_and_clear();
    match result {
        Ok((totals, summary)) => Ok(Applied {
            totals,
            summary,
            expected: match apply.before {
                Some(_) => (start.position, apply.difference),
                None => (0, summary),
            },
        }),
        Err(cause) => Err(Failure {
            cause,
            checkpoint: Some(apply.last),
        }),
    }
}

/// Compares the difference that a stream made, from this byte on, with the expected one. No other client writes to the
/// volume, so the next snapshot of it has the same content. A later receive removes the snapshot that a killed one leaves.
pub fn verify(
    args: &ReceiveArgs,
    manager: &ManagerClient,
    target: &Target,
    volume: &Volume,
    (start, expected): (u64, ContentSummary),
) -> anyhow::Result<()> {
    let name: SnapshotName = format!("receive-check-{}", volume.attachment().0).parse()?;
    let request = CreateSnapshot {
        name: name.clone(),
        labels: vec![RESET_LABEL.to_owned()],
    };
    manager.create_snapshot(&args.volume, &request)?;
    let found = summarize(args, manager, target, &name, start);
    let deleted = manager.delete_snapshot(&args.volume, &name);
    let found = found?;
    deleted?;
    ensure!(
        found == expected,
        "the volume {} has the content summary {found}, and the stream {expected}: the content differs, and no snapshot is made; \
         receive all of the snapshot into another volume, and report this",
        args.volume
    );
    Ok(())
}

/// The difference between a snapshot and the one at which the stream begins, from this byte on.
fn summarize(
    args: &ReceiveArgs,
    manager: &ManagerClient,
    target: &Target,
    name: &SnapshotName,
    start: u64,
) -> anyhow::Result<ContentSummary> {
    let source = open(args, manager, name)?;
    let from = target.from.as_ref();
    let from = from.map(|name| open(args, manager, name)).transpose()?;
    let mut changes = Changes::new(&source, from.as_ref())?;
    let bar = output::progress("verifying");
    bar.set_length(changes.count_bytes(start)?);
    let mut found = ContentSummary::default();
    changes.visit(start, |part| {
        bar.inc(part.new.len() as u64);
        part.add_to(&mut found);
        Ok(())
    })?;
    bar.finish_and_clear();
    Ok(found)
}
