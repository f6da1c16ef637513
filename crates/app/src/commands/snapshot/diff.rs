//! `pagemesh snapshot diff`: the changes between two snapshots, or since one.

use super::SnapshotPath;
use super::file_changes::{self, ChangeKind, FileChange, FileTree};
use super::source::{ByteRange, Changes, SnapshotSource};
use super::temporary::TemporarySnapshot;
use crate::args::{ManagerArgs, Transport};
use crate::client::{manager_client, open_snapshot};
use crate::output::{self, bytes, table};
use anyhow::Context;
use clap::Args;
use pagemesh_fs::{Fs, Ino};
use pagemesh_manage::wire::VolumeContent;
use serde::Serialize;
use std::sync::Arc;

/// Ranges that a table shows.
const RANGES_SHOWN: usize = 1000;
/// Bytes of one read of a file.
const READ_BYTES: u64 = 4 << 20;

/// Show the changes between two snapshots of a volume, or since one.
///
/// For a file system it lists the files that were created (+), deleted (-), modified (M) and renamed (R); for other
/// volumes the changed ranges. A range may have been written with equal bytes. Without a later snapshot it compares with the
/// present: it makes a temporary snapshot, and deletes it at its end. The volume may be in use.
#[derive(Args)]
pub struct DiffArgs {
    /// The earlier snapshot.
    #[arg(value_name = "VOLUME@EARLIER")]
    pub from: SnapshotPath,
    /// The later snapshot of the same volume; the present state if missing.
    #[arg(value_name = "VOLUME@LATER")]
    pub to: Option<SnapshotPath>,
    /// Show the changed ranges of the volume of a file system, too.
    #[arg(long)]
    pub ranges: bool,
    /// Transport to the bricks.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: Transport,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// The result, for programs.
#[derive(Serialize)]
struct SnapshotDiff {
    from: SnapshotPath,
    /// None: the present.
    to: Option<SnapshotPath>,
    /// Bytes of the pages that may differ.
    changed_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    ranges: Option<Vec<ByteRange>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    files: Option<Vec<FileChange>>,
}

/// Shows the changes.
pub fn run(args: &DiffArgs) -> anyhow::Result<()> {
    let manager = manager_client(&args.client)?;
    let volume = &args.from.volume;
    let content = manager.volume(volume)?.info.content;
    let from = SnapshotSource::open(&args.client, args.transport, &manager, &args.from)?;
    let present = match &args.to {
        Some(_) => None,
        None => Some(TemporarySnapshot::create(
            &args.client,
            args.transport,
            &manager,
            volume,
        )?),
    };
    let to = args.to.as_ref();
    let to = to.or(present.as_ref().map(|present| &present.path));
    let to = to.unwrap_or(&args.from);
    let source = SnapshotSource::open(&args.client, args.transport, &manager, to)?;
    let ranges = Changes::between(&source, &from)?.ranges()?;
    let changed_bytes = ranges.iter().map(|range| range.bytes).sum();
    let is_files = content == VolumeContent::Files;
    let files = is_files
        .then(|| diff_files(args, to, &ranges))
        .transpose()?;
    let diff = SnapshotDiff {
        from: args.from.clone(),
        to: args.to.clone(),
        changed_bytes,
        ranges: (!is_files || args.ranges).then_some(ranges),
        files,
    };
    output::print(args.client.output, &diff, || text(&diff))
}

/// Compares the files of two snapshots.
fn diff_files(
    args: &DiffArgs,
    to: &SnapshotPath,
    ranges: &[ByteRange],
) -> anyhow::Result<Vec<FileChange>> {
    let open = |path: &SnapshotPath| -> anyhow::Result<Fs> {
        let space = Arc::new(open_snapshot(&args.client, args.transport, path)?);
        let fs = Fs::mount_snapshot(space, pagemesh_fuse::wait, pagemesh_fuse::now);
        let fs =
            fs.with_context(|| format!("cannot read the file system in the snapshot {path}"))?;
        match fs.damage() {
            None => Ok(fs),
            Some(damage) => Err(damage).with_context(|| format!("cannot compare {path}")),
        }
    };
    let (old, new) = (open(&args.from)?, open(to)?);
    let (old_tree, new_tree) = (FileTree::read(&old)?, FileTree::read(&new)?);
    file_changes::compare(&old_tree, &new_tree, |ino| {
        differs_in(&old, &new, ino, ranges)
            .with_context(|| format!("cannot compare the contents of the inode {}", ino.0))
    })
}

/// Whether a file has other bytes in the changed ranges of its volume.
fn differs_in(old: &Fs, new: &Fs, ino: Ino, ranges: &[ByteRange]) -> anyhow::Result<bool> {
    let (before, after) = (old.extents(ino)?, new.extents(ino)?);
    // Another place may have equal bytes.
    let moved = match before == after {
        true => None,
        false => Some((0, old.attr(ino)?.size)),
    };
    let changed = after
        .iter()
        .flat_map(|&extent| changed_parts(extent, ranges));
    let mut channels = (old.borrow_channel()?, new.borrow_channel()?);
    for (start, len) in moved.into_iter().chain(changed) {
        let mut at = start;
        while at < start + len {
            let count = READ_BYTES.min(start + len - at) as u32;
            let one = old.read(&mut channels.0, ino, at, count)?;
            let other = new.read(&mut channels.1, ino, at, count)?;
            if one != other {
                return Ok(true);
            }
            at += u64::from(count);
        }
    }
    Ok(false)
}

/// The parts of an extent of a file that lie in changed ranges: bytes of the file.
fn changed_parts(
    (in_file, in_space, len): (u64, u64, u64),
    ranges: &[ByteRange],
) -> impl Iterator<Item = (u64, u64)> {
    let end = in_space + len;
    let first = ranges.partition_point(|range| range.offset + range.bytes <= in_space);
    let ranges = ranges[first..].iter();
    let ranges = ranges.take_while(move |range| range.offset < end);
    ranges.map(move |range| {
        let start = range.offset.max(in_space);
        let stop = (range.offset + range.bytes).min(end);
        (in_file + (start - in_space), stop - start)
    })
}

fn text(diff: &SnapshotDiff) -> String {
    let mut text = String::new();
    for change in diff.files.iter().flatten() {
        let FileChange { path, to, .. } = change;
        text += &match (change.change, to) {
            (ChangeKind::Renamed, Some(to)) => format!("R  {path} -> {to}\n"),
            (ChangeKind::Deleted, _) => format!("-  {path}\n"),
            (ChangeKind::Created, _) => format!("+  {path}\n"),
            _ => format!("M  {path}\n"),
        };
    }
    if let Some(ranges) = diff.ranges.as_ref().filter(|ranges| !ranges.is_empty()) {
        let rows = ranges.iter().take(RANGES_SHOWN);
        let rows = rows.map(|it| vec![it.offset.to_string(), it.bytes.to_string()]);
        text += &table(&[">OFFSET", ">BYTES"], rows);
        text += "\n";
        if ranges.len() > RANGES_SHOWN {
            let more = ranges.len() - RANGES_SHOWN;
            text += &format!("and {more} more; --output json has all\n");
        }
    }
    let to = diff.to.as_ref();
    let to = to.map_or_else(|| "the present".to_owned(), ToString::to_string);
    text + &format!(
        "{} of pages changed from {} to {to}",
        bytes(diff.changed_bytes),
        diff.from
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_an_extent_are_cut_by_changed_ranges() {
        let range = |offset, bytes| ByteRange { offset, bytes };
        let ranges = [range(0, 10), range(20, 10), range(40, 100)];
        let parts = |extent| changed_parts(extent, &ranges).collect::<Vec<_>>();
        assert_eq!(parts((1000, 5, 20)), [(1000, 5), (1015, 5)]);
        assert_eq!(parts((0, 10, 10)), []);
        assert_eq!(parts((7, 50, 10)), [(7, 10)]);
        assert_eq!(parts((7, 140, 10)), []);
    }
}
