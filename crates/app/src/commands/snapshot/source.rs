//! A snapshot that this process reads, and its changes since an earlier one.

use super::SnapshotPath;
use super::space_io::SpaceIo;
use crate::args::{ManagerArgs, Transport as TransportArg};
use crate::key;
use crate::snapshot_path::BookmarkPath;
use anyhow::{Context, ensure};
use pagemesh_base::authority::ResolvedLayout;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::VolumeName;
use pagemesh_base::space::{Extent, Space, SpaceError};
use pagemesh_fabric::limits::Timeouts;
use pagemesh_manage::ManagerClient;
use pagemesh_manage::authority::resolved_layout;
use pagemesh_manage::wire::{BookmarkInfo, SnapshotInfo, VolumeContent};
use pagemesh_stream::{ContentSummary, PAGE_BYTES, SnapshotIdentity, StreamContent};
use pagemesh_volume::{SnapshotSpace, Transport, Transports};
use serde::Serialize;
use std::sync::Arc;

/// Ranges that a count keeps for the visit after it.
const KNOWN_RANGES_MAX: usize = 1 << 20;
/// Bytes of one read, or of several small ones at once. Bricks get it in pieces.
const READ_BYTES: u64 = 4 << 20;

/// A snapshot, and the copies to read it from.
pub struct SnapshotSource {
    pub info: SnapshotInfo,
    pub identity: SnapshotIdentity,
    space: SnapshotSpace,
    layout: ResolvedLayout,
}

impl SnapshotSource {
    /// Finds a snapshot at the manager. It connects to bricks at the first read.
    pub fn open(
        args: &ManagerArgs,
        transport: TransportArg,
        manager: &ManagerClient,
        path: &SnapshotPath,
    ) -> anyhow::Result<SnapshotSource> {
        let detail = manager.snapshot(&path.volume, &path.name)?;
        let key = key::find(args.key.as_deref(), &args.manager)?;
        let transport = match transport {
            TransportArg::Auto => Transport::Auto,
            TransportArg::Map => Transport::Map,
            TransportArg::Tcp => Transport::Tcp,
        };
        let connector = Arc::new(Transports::new(key, transport, Timeouts::default()));
        let layout = resolved_layout(detail.layout, detail.bricks);
        let epoch = detail.info.epoch.0;
        let space = SnapshotSpace::new(connector, &layout, Epoch(epoch))
            .with_context(|| format!("cannot read {path}"))?;
        Ok(SnapshotSource {
            identity: SnapshotIdentity {
                volume: layout.layout.volume,
                epoch,
            },
            info: detail.info,
            space,
            layout,
        })
    }

    /// A reader of the snapshot.
    pub fn reader(&self) -> anyhow::Result<SpaceIo> {
        SpaceIo::open(&self.space)
    }

    /// Bytes of the volume.
    pub fn size_bytes(&self) -> u64 {
        self.space.size_bytes()
    }
}

/// A bookmark: the epoch of a snapshot, and the copies that can tell the changes since.
pub struct BookmarkSource {
    pub info: BookmarkInfo,
    pub identity: SnapshotIdentity,
    layout: ResolvedLayout,
}

impl BookmarkSource {
    /// Finds a bookmark at the manager.
    pub fn open(manager: &ManagerClient, path: &BookmarkPath) -> anyhow::Result<BookmarkSource> {
        let detail = manager.bookmark(&path.volume, &path.name)?;
        let layout = resolved_layout(detail.layout, detail.bricks);
        Ok(BookmarkSource {
            identity: SnapshotIdentity {
                volume: layout.layout.volume,
                epoch: detail.info.epoch.0,
            },
            info: detail.info,
            layout,
        })
    }
}

/// The differences between two snapshots, or all of one.
pub struct Changes {
    lister: SpaceIo,
    /// Lists the earlier snapshot, if no copy can compare the two: then each page that one of them has may differ.
    old_lister: Option<SpaceIo>,
    new: SpaceIo,
    old: Option<(SpaceIo, u64)>,
    /// Whether the bytes of before are known. After a bookmark they are not.
    is_old_known: bool,
    size_bytes: u64,
    /// The changed ranges from a byte on, if a count has found them.
    known: Option<(u64, Vec<ByteRange>)>,
}

/// A range of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ByteRange {
    pub offset: u64,
    pub bytes: u64,
}

/// A part of a volume as it was, and as it is.
pub struct ChangedPart {
    pub offset: u64,
    pub new: Vec<u8>,
    /// Zeroes if the bytes of before are not known.
    pub old: Vec<u8>,
    /// Whether `old` has the bytes of before.
    pub is_old_known: bool,
}

impl ChangedPart {
    /// Adds the difference of its pages.
    pub fn add_to(&self, summary: &mut ContentSummary) {
        let pages = self.new.chunks(PAGE_BYTES).zip(self.old.chunks(PAGE_BYTES));
        let mut offset = self.offset;
        for (new, old) in pages {
            if new != old {
                summary.subtract(offset, old);
                summary.add(offset, new);
            }
            offset += PAGE_BYTES as u64;
        }
    }
}

impl Changes {
    /// The changes of a snapshot since an earlier one of its volume; all of it if there is none.
    pub fn new(source: &SnapshotSource, from: Option<&SnapshotSource>) -> anyhow::Result<Changes> {
        let Some(from) = from else {
            return Ok(Changes {
                lister: SpaceIo::open(&source.space)?,
                old_lister: None,
                new: SpaceIo::open(&source.space)?,
                old: None,
                is_old_known: true,
                size_bytes: source.size_bytes(),
                known: None,
            });
        };
        check_order(source, from)?;
        let changed = source
            .space
            .changes_since(&from.layout, Epoch(from.identity.epoch))?;
        Changes::open(source, from, &changed, None)
    }

    /// The same between two snapshots that may have no copy in common: then it lists each page that one of them has.
    pub fn between(source: &SnapshotSource, from: &SnapshotSource) -> anyhow::Result<Changes> {
        check_order(source, from)?;
        let earlier = Epoch(from.identity.epoch);
        match source.space.changes_since(&from.layout, earlier) {
            Ok(changed) => Changes::open(source, from, &changed, None),
            Err(SpaceError::Unavailable(cause)) => {
                tracing::warn!(%cause, "all pages of both snapshots are compared");
                let old_lister = SpaceIo::open(&from.space)?;
                Changes::open(source, from, &source.space, Some(old_lister))
            }
            Err(cause) => Err(cause.into()),
        }
    }

    fn open(
        source: &SnapshotSource,
        from: &SnapshotSource,
        changed: &SnapshotSpace,
        old_lister: Option<SpaceIo>,
    ) -> anyhow::Result<Changes> {
        Ok(Changes {
            lister: SpaceIo::open(changed)?,
            old_lister,
            new: SpaceIo::open(&source.space)?,
            old: Some((SpaceIo::open(&from.space)?, from.size_bytes())),
            is_old_known: true,
            size_bytes: source.size_bytes(),
            known: None,
        })
    }

    /// The changes of a snapshot since a bookmark of its volume: pages that may have changed.
    pub fn since_bookmark(
        source: &SnapshotSource,
        from: &BookmarkSource,
    ) -> anyhow::Result<Changes> {
        let label = format!("{}#{}", from.info.volume, from.info.name);
        check_earlier(source, &from.identity, &label)?;
        let epoch = Epoch(from.identity.epoch);
        let changed = source.space.changes_since(&from.layout, epoch)?;
        Ok(Changes {
            lister: SpaceIo::open(&changed)?,
            old_lister: None,
            new: SpaceIo::open(&source.space)?,
            old: None,
            is_old_known: false,
            size_bytes: source.size_bytes(),
            known: None,
        })
    }

    /// The same, without the bytes of before.
    pub fn without_old(mut self) -> Changes {
        (self.old, self.is_old_known) = (None, false);
        self
    }

    /// Calls `visit` with the changed ranges from this byte on, in order.
    pub fn visit_ranges(
        &mut self,
        start: u64,
        mut visit: impl FnMut(&mut Changes, u64, u64) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        if let Some((_, known)) = self.known.take_if(|(from, _)| *from == start) {
            return known
                .iter()
                .try_for_each(|range| visit(self, range.offset, range.bytes));
        }
        let mut at = start;
        while at < self.size_bytes {
            for extent in self.list(at)? {
                if extent.mapped {
                    visit(self, at, extent.len)?;
                }
                at += extent.len;
            }
        }
        Ok(())
    }

    /// The extents from a byte on: a mapped one may have changed.
    fn list(&mut self, at: u64) -> anyhow::Result<Vec<Extent>> {
        let new = self.lister.extents(at, self.size_bytes - at)?;
        let (Some(lister), Some((_, old_bytes))) = (&mut self.old_lister, &self.old) else {
            return Ok(new);
        };
        if at >= *old_bytes {
            return Ok(new);
        }
        let old = lister.extents(at, *old_bytes - at)?;
        Ok(first_union(&new, &old).into_iter().collect())
    }

    /// The changed ranges, in order. Neighbours are one range.
    pub fn ranges(&mut self) -> anyhow::Result<Vec<ByteRange>> {
        let mut ranges: Vec<ByteRange> = Vec::new();
        self.visit_ranges(0, |_, offset, bytes| {
            match ranges.last_mut() {
                Some(last) if last.offset + last.bytes == offset => last.bytes += bytes,
                _ => ranges.push(ByteRange { offset, bytes }),
            }
            Ok(())
        })?;
        Ok(ranges)
    }

    /// Bytes of the changed pages from this byte on. It reads none of them. A visit from the same byte on lists them no second time,
    /// unless they are many.
    pub fn count_bytes(&mut self, start: u64) -> anyhow::Result<u64> {
        let (mut count, mut known) = (0, Vec::new());
        self.visit_ranges(start, |_, offset, bytes| {
            count += bytes;
            if known.len() <= KNOWN_RANGES_MAX {
                known.push(ByteRange { offset, bytes });
            }
            Ok(())
        })?;
        self.known = (known.len() <= KNOWN_RANGES_MAX).then_some((start, known));
        Ok(count)
    }

    /// Calls `visit` with each changed part from this byte on, in order. It holds [`READ_BYTES`] of them in memory.
    pub fn visit(
        &mut self,
        start: u64,
        mut visit: impl FnMut(ChangedPart) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.visit_batches(start, |parts| parts.into_iter().try_for_each(&mut visit))
    }

    /// The same, with all parts of one look at the bricks.
    pub fn visit_batches(
        &mut self,
        start: u64,
        mut visit: impl FnMut(Vec<ChangedPart>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut batch = Vec::new();
        let mut batch_bytes = 0;
        self.visit_ranges(start, |changes, offset, len| {
            let end = offset + len;
            let mut offset = offset;
            while offset < end {
                let len = READ_BYTES.min(end - offset);
                if batch_bytes + len > READ_BYTES {
                    batch_bytes = 0;
                    visit(changes.read(&std::mem::take(&mut batch))?)?;
                }
                batch.push((offset, len as u32));
                batch_bytes += len;
                offset += len;
            }
            Ok(())
        })?;
        visit(self.read(&batch)?)
    }

    /// Bytes of the snapshot, changed or not.
    pub fn read_new(&mut self, offset: u64, len: u32) -> anyhow::Result<Vec<u8>> {
        self.new.read(offset, len)
    }

    /// Reads parts, several at once.
    fn read(&mut self, parts: &[(u64, u32)]) -> anyhow::Result<Vec<ChangedPart>> {
        let new = self.new.read_all(parts)?;
        let mut before = Vec::new();
        if let Some((earlier, size_bytes)) = &mut self.old {
            let within = parts.iter().take_while(|(offset, _)| offset < size_bytes);
            let within: Vec<_> = within
                .map(|&(offset, len)| (offset, u64::from(len).min(*size_bytes - offset) as u32))
                .collect();
            before = earlier.read_all(&within)?;
        }
        let mut before = before.into_iter();
        let parts = parts.iter().zip(new).map(|(&(offset, _), new)| {
            let mut old = before.next().unwrap_or_default();
            // Behind its end, the volume had zeroes.
            old.resize(new.len(), 0);
            ChangedPart {
                offset,
                new,
                old,
                is_old_known: self.is_old_known,
            }
        });
        Ok(parts.collect())
    }
}

/// The first extent that is mapped in one of two listings of the same place, or a hole in both.
fn first_union(one: &[Extent], other: &[Extent]) -> Option<Extent> {
    let mut filled = [one, other].map(|list| list.iter().filter(|it| it.len > 0));
    let [one, other] = &mut filled;
    let (one, other) = (one.next()?, other.next()?);
    Some(Extent {
        len: one.len.min(other.len),
        mapped: one.mapped || other.mapped,
    })
}

/// The content of a volume, as a stream names it.
pub fn stream_content(
    manager: &ManagerClient,
    volume: &VolumeName,
) -> anyhow::Result<StreamContent> {
    Ok(match manager.volume(volume)?.info.content {
        VolumeContent::Blocks => StreamContent::Blocks,
        VolumeContent::Files => StreamContent::Files,
    })
}

/// Refuses two snapshots that are not an earlier and a later one of a volume.
fn check_order(source: &SnapshotSource, from: &SnapshotSource) -> anyhow::Result<()> {
    let label = format!("{}@{}", from.info.volume, from.info.name);
    check_earlier(source, &from.identity, &label)
}

/// Refuses a start that is not of the same volume, or not earlier.
fn check_earlier(
    source: &SnapshotSource,
    from: &SnapshotIdentity,
    label: &str,
) -> anyhow::Result<()> {
    let (volume, name) = (&source.info.volume, &source.info.name);
    ensure!(
        from.volume == source.identity.volume,
        "{label} is not of {volume}; name two snapshots of one volume"
    );
    ensure!(
        from.epoch < source.identity.epoch,
        "{label} is not earlier than {volume}@{name}; name the earlier one as the start"
    );
    Ok(())
}
