//! A directory of backups.
//!
//! ```text
//! backup.json          the version, and the identity of the directory
//! lock                 flock(2): exclusive to change the directory, shared to read it, which needs no permission to write
//! unfinished           there while a backup is made: chunks of a crash before may be incomplete
//! chunks/ab/ab12…      one file for each chunk, named by the SHA-256 of its bytes
//! backups/VOLUME@NAME  one manifest for each backup
//! ```
//!
//! Invariants: a manifest gets its name after all of its chunks are durable. A chunk is deleted only if no manifest names it, under the exclusive
//! lock, and only if all manifests are intact.

use crate::snapshot_path::SnapshotPath;
use anyhow::{Context, bail, ensure};
use pagemesh_stream::backup::{
    CHUNK_BYTES, ChunkId, ManifestEntry, ManifestReader, ManifestWriter, decode_chunk, encode_chunk,
};
use pagemesh_stream::{Header, is_zero};
use rustix::fs::{FlockOperation, flock, syncfs};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Level of zstd: the library's default.
const LEVEL: i32 = 3;
const VERSION: u32 = 1;
/// Bytes of the largest file of a chunk.
const CHUNK_FILE_BYTES_MAX: u64 = 2 * CHUNK_BYTES as u64;

/// The description of a directory.
#[derive(Serialize, Deserialize)]
struct Description {
    format: String,
    version: u32,
    id: Uuid,
}

/// A backup in a list.
#[derive(Clone, Debug, Serialize)]
pub struct BackupInfo {
    pub backup: String,
    pub volume_id: Uuid,
    pub epoch: u32,
    pub created_unix_ms: u64,
    pub size_bytes: u64,
    pub limit_bytes: u64,
    pub chunks: u64,
    pub chunk_bytes: u64,
}

/// A backup with a damaged manifest, in a list.
#[derive(Clone, Debug, Serialize)]
pub struct DamagedBackup {
    pub backup: String,
    pub problem: String,
}

/// An entry of a list.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum BackupEntry {
    Whole(BackupInfo),
    Damaged(DamagedBackup),
}

impl BackupEntry {
    /// The backup, if its manifest is whole.
    pub fn whole(self) -> Option<BackupInfo> {
        match self {
            BackupEntry::Whole(info) => Some(info),
            BackupEntry::Damaged(_) => None,
        }
    }
}

/// The result of a verification.
#[derive(Debug, Serialize)]
pub struct DirectoryReport {
    pub backups: usize,
    pub chunks: usize,
    pub stored_bytes: u64,
    pub problems: Vec<String>,
}

/// The deleted things.
#[derive(Debug, Serialize)]
pub struct PruneReport {
    pub backups: Vec<String>,
    pub chunks: u64,
    pub bytes: u64,
}

/// A locked directory. Its lock ends with the value, and with the process.
pub struct BackupDirectory {
    dir: PathBuf,
    /// None: the directory has no lock yet, and this process may only read it.
    _lock: Option<File>,
    pub id: Uuid,
}

impl BackupDirectory {
    /// Opens a directory to make or delete backups; makes it if it is missing or empty, and `may_make`.
    fn open(
        dir: &Path,
        may_make: bool,
        operation: FlockOperation,
    ) -> anyhow::Result<BackupDirectory> {
        let shown = dir.display();
        let described = dir.join("backup.json");
        if may_make && !described.exists() {
            make(dir).with_context(|| format!("cannot make the directory of backups {shown}"))?;
        }
        let text = fs::read_to_string(&described).with_context(|| {
            format!("{shown} is no directory of backups; make one with: pagemesh backup create")
        })?;
        let known: Description = serde_json::from_str(&text)
            .with_context(|| format!("{} is damaged", described.display()))?;
        ensure!(
            known.format == "pagemesh-backup" && known.version == VERSION,
            "{shown} has version {} of '{}', and this release knows version {VERSION} of 'pagemesh-backup'",
            known.version,
            known.format
        );
        let is_reader = operation == FlockOperation::NonBlockingLockShared;
        let lock = open_lock(&dir.join("lock"), is_reader);
        let lock = lock.with_context(|| format!("cannot open the lock of {shown}"))?;
        if let Some(lock) = &lock {
            flock(lock, operation).with_context(|| {
                format!(
                    "{shown} is in use by another backup, prune, verify or restore; wait for its end"
                )
            })?;
        }
        Ok(BackupDirectory {
            dir: dir.to_owned(),
            _lock: lock,
            id: known.id,
        })
    }

    /// Opens a directory to make backups; makes it if it is missing or empty.
    pub fn open_to_add(dir: &Path) -> anyhow::Result<BackupDirectory> {
        BackupDirectory::open(dir, true, FlockOperation::NonBlockingLockExclusive)
    }

    /// Opens a directory to delete backups.
    pub fn open_to_change(dir: &Path) -> anyhow::Result<BackupDirectory> {
        BackupDirectory::open(dir, false, FlockOperation::NonBlockingLockExclusive)
    }

    /// Opens a directory to read backups.
    pub fn open_to_read(dir: &Path) -> anyhow::Result<BackupDirectory> {
        BackupDirectory::open(dir, false, FlockOperation::NonBlockingLockShared)
    }

    fn manifest_path(&self, name: &str) -> PathBuf {
        self.dir.join("backups").join(name)
    }

    fn chunk_path(&self, id: ChunkId) -> PathBuf {
        let name = id.to_string();
        self.dir.join("chunks").join(&name[..2]).join(name)
    }

    /// Opens the manifest of a backup.
    pub fn manifest(&self, name: &str) -> anyhow::Result<ManifestReader<BufReader<File>>> {
        let file = File::open(self.manifest_path(name)).with_context(|| {
            format!(
                "there is no backup {name} in {}; list them with: pagemesh backup list",
                self.dir.display()
            )
        })?;
        ManifestReader::new(BufReader::new(file)).with_context(|| format!("the backup {name}"))
    }

    /// Whether there is a backup of this name.
    pub fn has(&self, name: &str) -> bool {
        self.manifest_path(name).exists()
    }

    /// The names of backups.
    fn names(&self) -> anyhow::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.dir.join("backups"))? {
            let name = entry?.file_name();
            // A temporary file begins with a point.
            if let Some(name) = name.to_str().filter(|name| !name.starts_with('.')) {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// All backups, by the time of their snapshots, and after them those with a damaged manifest. Each manifest is read as
    /// a whole.
    pub fn list(&self) -> anyhow::Result<Vec<BackupEntry>> {
        let (mut whole, mut damaged) = (Vec::new(), Vec::new());
        for name in self.names()? {
            match self.read_info(&name) {
                Ok(info) => whole.push(info),
                Err(cause) => damaged.push(DamagedBackup {
                    backup: name,
                    problem: format!("{cause:#}"),
                }),
            }
        }
        whole.sort_by_key(|it| (it.volume_id, it.epoch));
        let whole = whole.into_iter().map(BackupEntry::Whole);
        Ok(whole
            .chain(damaged.into_iter().map(BackupEntry::Damaged))
            .collect())
    }

    fn read_info(&self, name: &str) -> anyhow::Result<BackupInfo> {
        let mut manifest = self.manifest(name)?;
        while manifest
            .next()
            .with_context(|| format!("the backup {name}"))?
            .is_some()
        {}
        Ok(info(name, manifest.header(), manifest.chunks()))
    }

    /// The bytes of a chunk.
    pub fn read_chunk(&self, id: ChunkId) -> anyhow::Result<Vec<u8>> {
        let mut file = Vec::new();
        let opened = File::open(self.chunk_path(id));
        let opened = opened.with_context(|| format!("the chunk {id} is missing"))?;
        opened.take(CHUNK_FILE_BYTES_MAX).read_to_end(&mut file)?;
        Ok(decode_chunk(id, &file)?)
    }

    /// Reads all chunks of all backups.
    pub fn verify(&self) -> anyhow::Result<DirectoryReport> {
        let mut report = DirectoryReport {
            backups: 0,
            chunks: 0,
            stored_bytes: 0,
            problems: vec![],
        };
        let mut is_sound: BTreeMap<ChunkId, bool> = BTreeMap::new();
        for name in self.names()? {
            report.backups += 1;
            let mut damaged = 0u64;
            let mut check = |entry: ManifestEntry| {
                let known = is_sound.entry(entry.id).or_insert_with(|| {
                    let size = fs::metadata(self.chunk_path(entry.id));
                    report.stored_bytes += size.map_or(0, |it| it.len());
                    match self.read_chunk(entry.id) {
                        Ok(_) => true,
                        Err(cause) => {
                            report.problems.push(format!("{cause:#}"));
                            false
                        }
                    }
                });
                damaged += u64::from(!*known);
            };
            let read = self.visit(&name, &mut check);
            if let Err(cause) = read {
                report.problems.push(format!("{cause:#}"));
            } else if damaged > 0 {
                report
                    .problems
                    .push(format!("the backup {name} lacks {damaged} chunks"));
            }
        }
        report.chunks = is_sound.len();
        Ok(report)
    }

    fn visit(&self, name: &str, visit: &mut impl FnMut(ManifestEntry)) -> anyhow::Result<()> {
        let mut manifest = self.manifest(name)?;
        while let Some(entry) = manifest
            .next()
            .with_context(|| format!("the backup {name}"))?
        {
            visit(entry);
        }
        Ok(())
    }

    /// Deletes backups, and then the chunks that no backup has.
    pub fn prune(
        &self,
        keep: Option<usize>,
        deleted: &[SnapshotPath],
        dry_run: bool,
    ) -> anyhow::Result<PruneReport> {
        let gone = self.pruned_names(keep, deleted)?;
        // A damaged manifest does not tell its chunks, so none is deleted then.
        let mut used = HashSet::new();
        for name in self.names()?.iter().filter(|name| !gone.contains(*name)) {
            self.visit(name, &mut |entry| {
                used.insert(entry.id);
            })
            .context("no chunk is deleted while a backup is damaged; delete it with --delete")?;
        }
        if !dry_run {
            for name in &gone {
                fs::remove_file(self.manifest_path(name))?;
            }
            File::open(self.dir.join("backups"))?.sync_all()?;
            self.clear_temporaries()?;
        }
        let mut report = PruneReport {
            backups: gone.into_iter().collect(),
            chunks: 0,
            bytes: 0,
        };
        for folder in fs::read_dir(self.dir.join("chunks"))? {
            for entry in fs::read_dir(folder?.path())? {
                let entry = entry?;
                let name = entry.file_name();
                let id = name.to_str().and_then(|name| name.parse::<ChunkId>().ok());
                if id.is_some_and(|id| !used.contains(&id)) {
                    report.chunks += 1;
                    report.bytes += entry.metadata()?.len();
                    if !dry_run {
                        fs::remove_file(entry.path())?;
                    }
                }
            }
        }
        // Each chunk that is left is of a finished backup.
        let mark = self.dir.join("unfinished");
        if !dry_run && mark.exists() {
            fs::remove_file(mark)?;
        }
        Ok(report)
    }

    fn pruned_names(
        &self,
        keep: Option<usize>,
        deleted: &[SnapshotPath],
    ) -> anyhow::Result<BTreeSet<String>> {
        let mut gone: BTreeSet<String> = deleted.iter().map(ToString::to_string).collect();
        if let Some(unknown) = gone.iter().find(|name| !self.has(name)) {
            bail!("there is no backup {unknown} in {}", self.dir.display());
        }
        let Some(keep) = keep else {
            return Ok(gone);
        };
        let mut of_volumes: BTreeMap<Uuid, Vec<(u32, String)>> = BTreeMap::new();
        for name in self
            .names()?
            .into_iter()
            .filter(|name| !gone.contains(name))
        {
            let manifest = self
                .manifest(&name)
                .context("nothing is deleted while a backup is damaged; delete it with --delete")?;
            let to = &manifest.header().to;
            of_volumes
                .entry(to.volume)
                .or_default()
                .push((to.epoch, name));
        }
        for backups in of_volumes.values_mut() {
            backups.sort_by_key(|(epoch, _)| std::cmp::Reverse(*epoch));
            gone.extend(backups.drain(..).skip(keep).map(|(_, name)| name));
        }
        Ok(gone)
    }

    /// Deletes the temporary files of a process that was killed.
    fn clear_temporaries(&self) -> anyhow::Result<()> {
        for folder in ["", "backups"] {
            for entry in fs::read_dir(self.dir.join(folder))? {
                let entry = entry?;
                if entry.file_name().to_string_lossy().starts_with(".tmp") {
                    fs::remove_file(entry.path())?;
                }
            }
        }
        Ok(())
    }

    /// Begins a backup of this name.
    pub fn begin(
        &self,
        name: &str,
        header: &Header,
        check_all: bool,
    ) -> anyhow::Result<NewBackup<'_>> {
        let mark = self.dir.join("unfinished");
        let was_unfinished = mark.exists();
        File::create(&mark)?.sync_all()?;
        File::open(&self.dir)?.sync_all()?;
        self.clear_temporaries()?;
        let file = tempfile::Builder::new()
            .prefix(".tmp")
            .tempfile_in(self.dir.join("backups"))?;
        Ok(NewBackup {
            directory: self,
            name: name.to_owned(),
            manifest: ManifestWriter::new(BufWriter::new(file), header)?,
            mark: (!was_unfinished).then_some(mark),
            checks_known: was_unfinished || check_all,
            stored_chunks: 0,
            stored_bytes: 0,
        })
    }
}

/// A backup that is being made. Unless it is finished, no manifest is there.
pub struct NewBackup<'a> {
    directory: &'a BackupDirectory,
    name: String,
    manifest: ManifestWriter<BufWriter<tempfile::NamedTempFile>>,
    /// The mark that the backup has made. An earlier one stays: chunks of other volumes may be incomplete, until they are pruned.
    mark: Option<PathBuf>,
    /// Whether chunks that are there are read before they are used: a crash may have left incomplete ones.
    checks_known: bool,
    pub stored_chunks: u64,
    pub stored_bytes: u64,
}

impl NewBackup<'_> {
    /// Adds a chunk that an earlier backup has.
    pub fn push_known(&mut self, entry: ManifestEntry) -> anyhow::Result<()> {
        Ok(self.manifest.push(entry)?)
    }

    /// Adds a chunk, and stores it if the directory does not have it. A chunk of zeroes is left out.
    pub fn push(&mut self, index: u64, data: &[u8]) -> anyhow::Result<()> {
        if is_zero(data) {
            return Ok(());
        }
        let id = ChunkId::of(data);
        let path = self.directory.chunk_path(id);
        let is_known = match self.checks_known {
            true => self.directory.read_chunk(id).is_ok(),
            false => path.exists(),
        };
        if !is_known {
            let file = encode_chunk(data, LEVEL)?;
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            let mut out = tempfile::Builder::new()
                .prefix(".tmp")
                .tempfile_in(&self.directory.dir)?;
            out.write_all(&file)?;
            out.persist(&path)
                .with_context(|| format!("cannot store {}", path.display()))?;
            self.stored_chunks += 1;
            self.stored_bytes += file.len() as u64;
        }
        self.push_known(ManifestEntry { index, id })
    }

    /// Makes all chunks durable, and then the manifest. Returns the number of its chunks.
    pub fn finish(self) -> anyhow::Result<u64> {
        let (out, chunks) = self.manifest.end()?;
        let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        let backups = File::open(self.directory.dir.join("backups"))?;
        syncfs(&backups).context("cannot make the chunks durable")?;
        file.as_file().sync_all()?;
        let path = self.directory.manifest_path(&self.name);
        file.persist_noclobber(&path)
            .with_context(|| format!("cannot store {}", path.display()))?;
        backups.sync_all()?;
        if let Some(mark) = &self.mark {
            fs::remove_file(mark)?;
        }
        Ok(chunks)
    }
}

/// Opens the lock of a directory. A reader needs no permission to write. None: there is no lock, and the reader cannot make
/// one; then no process has changed the directory since it was copied here.
fn open_lock(path: &Path, is_reader: bool) -> io::Result<Option<File>> {
    if is_reader {
        match File::open(path) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            opened => return opened.map(Some),
        }
    }
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).truncate(false);
    match options.open(path) {
        Err(cause) if is_reader && is_read_only(&cause) => Ok(None),
        opened => opened.map(Some),
    }
}

fn is_read_only(cause: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    matches!(cause.kind(), PermissionDenied | ReadOnlyFilesystem)
}

/// Makes an empty directory of backups.
fn make(dir: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(dir)?;
    let mut others = fs::read_dir(dir)?.filter_map(Result::ok);
    let is_ours = |name: &std::ffi::OsStr| name == "chunks" || name == "backups";
    ensure!(
        others.all(|it| is_ours(&it.file_name())),
        "it has other files; name an empty or a new directory"
    );
    for folder in ["chunks", "backups"] {
        fs::create_dir_all(dir.join(folder))?;
    }
    let description = Description {
        format: "pagemesh-backup".to_owned(),
        version: VERSION,
        id: Uuid::new_v4(),
    };
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    serde_json::to_writer_pretty(&mut file, &description)?;
    file.as_file().sync_all()?;
    file.persist_noclobber(dir.join("backup.json"))?;
    Ok(File::open(dir)?.sync_all()?)
}

fn info(name: &str, header: &Header, chunks: u64) -> BackupInfo {
    BackupInfo {
        backup: name.to_owned(),
        volume_id: header.to.volume,
        epoch: header.to.epoch,
        created_unix_ms: header.created_unix_ms,
        size_bytes: header.size_bytes,
        limit_bytes: header.limit_bytes,
        chunks,
        chunk_bytes: CHUNK_BYTES as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{OFlags, fcntl_getfl};

    #[test]
    fn reader_opens_the_lock_without_permission_to_write() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let made = open_lock(&path, true).unwrap().expect("it is made");
        assert!(path.exists());
        flock(&made, FlockOperation::NonBlockingLockShared).unwrap();
        let read = open_lock(&path, true).unwrap().expect("it is there");
        let flags = fcntl_getfl(&read).unwrap() & OFlags::ACCMODE;
        assert_eq!(flags, OFlags::RDONLY);
        flock(&read, FlockOperation::NonBlockingLockShared).unwrap();
        assert!(flock(&read, FlockOperation::NonBlockingLockExclusive).is_err());
        for kind in [
            io::ErrorKind::PermissionDenied,
            io::ErrorKind::ReadOnlyFilesystem,
        ] {
            assert!(is_read_only(&kind.into()));
        }
        assert!(!is_read_only(&io::ErrorKind::NotFound.into()));
    }
}
