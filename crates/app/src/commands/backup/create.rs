//! `pagemesh backup create`.

use super::CreateArgs;
use super::directory::{BackupDirectory, BackupEntry, BackupInfo, NewBackup};
use crate::client::manager_client;
use crate::commands::snapshot::source::{BookmarkSource, Changes, SnapshotSource, stream_content};
use crate::output::{self, bytes};
use crate::snapshot_path::{BookmarkPath, SnapshotPath};
use anyhow::{Context, ensure};
use pagemesh_manage::ManagerClient;
use pagemesh_manage::snapshots::SnapshotName;
use pagemesh_manage::wire::CreateBookmark;
use pagemesh_stream::backup::{CHUNK_BYTES, ManifestEntry, ManifestReader};
use pagemesh_stream::{Header, StreamStart};
use serde::Serialize;
use std::io::Read;
use uuid::Uuid;

const CHUNK: u64 = CHUNK_BYTES as u64;

/// The result, for programs.
#[derive(Serialize)]
struct Created {
    backup: String,
    /// The earlier backup with the other chunks; missing: all of the snapshot was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
    read_bytes: u64,
    chunks: u64,
    stored_chunks: u64,
    stored_bytes: u64,
}

/// Stores a snapshot in a directory.
pub fn run(args: &CreateArgs) -> anyhow::Result<()> {
    let manager = manager_client(&args.client)?;
    let source = SnapshotSource::open(&args.client, args.transport, &manager, &args.snapshot)?;
    let directory = BackupDirectory::open_to_add(&args.dir)?;
    let name = args.snapshot.to_string();
    ensure!(
        !directory.has(&name),
        "{} has a backup {name} already; delete it with: pagemesh backup prune --delete",
        args.dir.display()
    );
    let start = match args.full {
        true => None,
        false => find_start(args, &manager, &directory, &source)?,
    };
    let header = header_of(&manager, args, &source)?;
    let mut new = directory.begin(&name, &header, args.full)?;
    let (since, read_bytes) = match start {
        Some((backup, mut changes)) => {
            let before = directory.manifest(&backup.backup)?;
            let read = store(&mut changes, &mut new, &header, Some(before))?;
            (Some(backup.backup), read)
        }
        None => {
            let mut all = Changes::new(&source, None)?;
            let none: Option<ManifestReader<std::fs::File>> = None;
            (None, store(&mut all, &mut new, &header, none)?)
        }
    };
    let (stored_chunks, stored_bytes) = (new.stored_chunks, new.stored_bytes);
    let chunks = new.finish()?;
    if !args.no_bookmark
        && let Err(cause) = make_bookmark(&manager, &args.snapshot, &directory)
    {
        eprintln!(
            "warning: no bookmark was made, so the next backup needs this snapshot, or reads all: {cause:#}"
        );
    }
    let created = Created {
        backup: name,
        since,
        read_bytes,
        chunks,
        stored_chunks,
        stored_bytes,
    };
    output::print(args.client.output, &created, || {
        format!(
            "stored {}: read {}, and {} new chunks of {} in files",
            created.backup,
            bytes(created.read_bytes),
            created.stored_chunks,
            bytes(created.stored_bytes)
        )
    })
}

fn header_of(
    manager: &ManagerClient,
    args: &CreateArgs,
    source: &SnapshotSource,
) -> anyhow::Result<Header> {
    let content = stream_content(manager, &args.snapshot.volume)?;
    Ok(Header {
        stream: Uuid::new_v4(),
        to: source.identity.clone(),
        to_name: source.info.name.to_string(),
        from_epoch: None,
        from_name: String::new(),
        has_page_summary: false,
        size_bytes: source.size_bytes(),
        limit_bytes: source.info.size_bytes,
        content,
        created_unix_ms: source.info.created_unix_ms,
        start: StreamStart::default(),
    })
}

/// The newest earlier backup of the volume with a snapshot or bookmark of its epoch, and the changes since.
fn find_start(
    args: &CreateArgs,
    manager: &ManagerClient,
    directory: &BackupDirectory,
    source: &SnapshotSource,
) -> anyhow::Result<Option<(BackupInfo, Changes)>> {
    let volume = &args.snapshot.volume;
    let is_earlier = |it: &BackupInfo| {
        it.volume_id == source.identity.volume && it.epoch < source.identity.epoch
    };
    let mut earlier = Vec::new();
    for entry in directory.list()? {
        match entry {
            BackupEntry::Whole(info) => earlier.extend(Some(info).filter(is_earlier)),
            BackupEntry::Damaged(damaged) => eprintln!(
                "warning: the backup {} is damaged, and is not used: {}",
                damaged.backup, damaged.problem
            ),
        }
    }
    earlier.sort_by_key(|it| std::cmp::Reverse(it.epoch));
    if earlier.is_empty() {
        return Ok(None);
    }
    let snapshots = manager.snapshots(Some(volume), None)?;
    let bookmarks = manager.bookmarks(volume)?;
    for backup in earlier {
        if let Some(found) = snapshots.iter().find(|it| it.epoch.0 == backup.epoch) {
            let path = SnapshotPath {
                volume: volume.clone(),
                name: found.name.clone(),
            };
            let from = SnapshotSource::open(&args.client, args.transport, manager, &path)?;
            let changes = Changes::new(source, Some(&from))?;
            return Ok(Some((backup, changes.without_old())));
        }
        if let Some(found) = bookmarks.iter().find(|it| it.epoch.0 == backup.epoch) {
            let path = BookmarkPath {
                volume: volume.clone(),
                name: found.name.clone(),
            };
            let from = BookmarkSource::open(manager, &path)?;
            return Ok(Some((backup, Changes::since_bookmark(source, &from)?)));
        }
    }
    Ok(None)
}

/// Stores the changed chunks, and takes over the others. Returns the bytes that were read.
fn store(
    changes: &mut Changes,
    new: &mut NewBackup<'_>,
    header: &Header,
    before: Option<ManifestReader<impl Read>>,
) -> anyhow::Result<u64> {
    let mut known = KnownChunks::new(before)?;
    let bar = output::progress("storing");
    bar.set_length(changes.count_bytes(0)?);
    let (mut next, mut read) = (0, 0);
    changes.visit_ranges(0, |changes, offset, len| {
        let last = (offset + len - 1) / CHUNK;
        for index in (offset / CHUNK).max(next)..=last {
            while let Some(entry) = known.take_below(index)? {
                new.push_known(entry)?;
            }
            known.skip(index)?;
            let at = index * CHUNK;
            let chunk_len = CHUNK.min(header.size_bytes - at);
            new.push(index, &changes.read_new(at, chunk_len as u32)?)?;
            read += chunk_len;
        }
        next = next.max(last + 1);
        bar.inc(len);
        Ok(())
    })?;
    while let Some(entry) = known.take_below(u64::MAX)? {
        new.push_known(entry)?;
    }
    bar.finish_and_clear();
    Ok(read)
}

/// The chunks of the backup before, in order.
struct KnownChunks<R: Read> {
    manifest: Option<ManifestReader<R>>,
    next: Option<ManifestEntry>,
}

impl<R: Read> KnownChunks<R> {
    fn new(manifest: Option<ManifestReader<R>>) -> anyhow::Result<KnownChunks<R>> {
        let mut known = KnownChunks {
            manifest,
            next: None,
        };
        known.advance()?;
        Ok(known)
    }

    fn advance(&mut self) -> anyhow::Result<()> {
        self.next = match &mut self.manifest {
            Some(manifest) => manifest.next().context("the backup before")?,
            None => None,
        };
        Ok(())
    }

    fn take_below(&mut self, index: u64) -> anyhow::Result<Option<ManifestEntry>> {
        let found = self.next.filter(|it| it.index < index);
        if found.is_some() {
            self.advance()?;
        }
        Ok(found)
    }

    /// Leaves out a chunk that has changed.
    fn skip(&mut self, index: u64) -> anyhow::Result<()> {
        match self.next {
            Some(next) if next.index == index => self.advance(),
            _ => Ok(()),
        }
    }
}

/// Replaces the bookmark of the directory by one of this snapshot.
fn make_bookmark(
    manager: &ManagerClient,
    snapshot: &SnapshotPath,
    directory: &BackupDirectory,
) -> anyhow::Result<()> {
    let id = directory.id.simple().to_string();
    let name: SnapshotName = format!("backup-{}", &id[..8]).parse()?;
    let bookmarks = manager.bookmarks(&snapshot.volume)?;
    if bookmarks.iter().any(|it| it.name == name) {
        manager.delete_bookmark(&snapshot.volume, &name)?;
    }
    let request = CreateBookmark {
        snapshot: snapshot.name.clone(),
        name: Some(name),
    };
    manager.create_bookmark(&snapshot.volume, &request)?;
    Ok(())
}
