//! The manager's store: a redb database of JSON records.
//!
//! Invariants: one change is one durable transaction: when [`Store::commit`] returns, all of its
//! writes survive a crash. If it fails, either all of them are stored or none, and the store
//! accepts no write until it is opened again, by the next process (see [`Store::can_reopen`]). A file that is not a manager store is never written.
//!
//! Tables: `meta` (purpose and schema version of the file), `bricks` by UUID, `volumes` by name,
//! `pending_deletes` by the UUIDs of brick and slice, `events` by sequence number, `tokens` by UUID,
//! `answers` by number, and the tables of [`snapshots`]. A store of an earlier version has no `events`, `tokens`, `answers`
//! and snapshots; the first of each makes its table.

mod answers;
mod bookmarks;
mod events;
mod probe;
mod schedules;
mod snapshots;
mod tokens;

use crate::access::TokenRecord;
use crate::call_key::KeptAnswer;
use crate::events::EventRecord;
use crate::records::{BrickRecord, PendingDelete, VolumeRecord};
use crate::slices::slice_locations;
use crate::snapshots::schedules::ScheduleRecord;
use crate::snapshots::{BookmarkRecord, SnapshotLayout, SnapshotName, SnapshotRecord};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::{BrickId, EpochNumber, SliceId, VolumeName};
use redb::{
    Database, DatabaseError, Durability, ReadableDatabase, ReadableTable, TableDefinition,
    TableError, WriteTransaction,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use uuid::Uuid;

/// The schema of a store without snapshots. Schema 1 is frozen: a change that is more than a field with a default takes a
/// higher one.
pub const SCHEMA: u64 = 1;
/// The highest schema that this manager knows. Snapshots raise the schema to 2, and bookmarks, volumes that receive snapshots and
/// schedules raise it to 3.
pub const SCHEMA_MAX: u64 = 3;
/// The purpose that the `meta` table states.
const PURPOSE: &str = "pagemesh manager store";
/// Memory for the page cache of the store. The store is small, and memory also holds all of it as
/// records.
const CACHE_BYTES: usize = 4 << 20;
/// The first bytes of every redb file.
const REDB_MAGIC: &[u8; 9] = b"redb\x1a\x0a\xa9\x0d\x0a";

const META: TableDefinition<&str, &str> = TableDefinition::new("meta");
const BRICKS: TableDefinition<u128, &[u8]> = TableDefinition::new("bricks");
const VOLUMES: TableDefinition<&str, &[u8]> = TableDefinition::new("volumes");
const PENDING_DELETES: TableDefinition<(u128, u128), &[u8]> = TableDefinition::new("doomed");

/// The reason why the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has opened it.
    #[error("the store {} is in use by another manager; stop that one, or name another file with --store", .0.display())]
    InUse(PathBuf),
    /// The file is no manager store.
    #[error("{} is not a manager store ({why}); it is left as it is, name another file with --store", path.display())]
    NotAStore {
        /// The file.
        path: PathBuf,
        /// The evidence.
        why: String,
    },
    /// A later version wrote the store.
    #[error("the store {} has schema {found}, this manager knows up to {SCHEMA_MAX}; use a newer pagemesh", path.display())]
    NewerSchema {
        /// The file.
        path: PathBuf,
        /// Its schema.
        found: u64,
    },
    /// A record cannot be decoded.
    #[error("the store {} is damaged: {what}; restore it from a copy", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damaged part.
        what: String,
    },
    /// An earlier change failed to be written.
    #[error("the store {} takes no changes since it failed to write one; make room on its disk or repair it, then the manager ends, and takes changes when it is started again", .0.display())]
    EarlierWriteFailed(PathBuf),
    /// The file cannot be opened, read or written.
    #[error("the store {} cannot be used: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        cause: String,
    },
}

/// One write of a change.
#[derive(Clone, Debug)]
pub enum StoreWrite<'a> {
    /// Adds or replaces a brick.
    PutBrick(&'a BrickRecord),
    /// Forgets a brick.
    RemoveBrick(BrickId),
    /// Adds or replaces a volume.
    PutVolume(&'a VolumeRecord),
    /// Forgets a volume.
    RemoveVolume(&'a VolumeName),
    /// Adds a pending delete.
    AddPendingDelete(PendingDelete),
    /// Removes a pending delete: the slice is deleted, or belongs to a volume now.
    RemovePendingDelete(BrickId, SliceId),
    /// Adds or replaces an event.
    PutEvent(&'a EventRecord),
    /// Removes an event.
    RemoveEvent(u64),
    /// Replaces the highest number of a dropped event.
    SetDroppedEvent(u64),
    /// Adds or replaces a token.
    PutToken(&'a TokenRecord),
    /// Forgets a token.
    RemoveToken(Uuid),
    /// Adds the answer of a call with a key.
    PutAnswer(&'a KeptAnswer),
    /// Forgets an answer.
    RemoveAnswer(u64),
    /// Adds or replaces a snapshot.
    PutSnapshot(&'a SnapshotRecord),
    /// Forgets a snapshot: the volume's UUID and the epoch.
    RemoveSnapshot(Uuid, EpochNumber),
    /// Adds the layout of snapshots.
    PutSnapshotLayout(&'a SnapshotLayout),
    /// Forgets a layout: the volume's UUID and the epoch of its first snapshot.
    RemoveSnapshotLayout(Uuid, EpochNumber),
    /// Adds or replaces a bookmark.
    PutBookmark(&'a BookmarkRecord),
    /// Forgets a bookmark: the volume's UUID and the name.
    RemoveBookmark(Uuid, SnapshotName),
    /// Adds or replaces a schedule.
    PutSchedule(&'a ScheduleRecord),
    /// Forgets a schedule.
    RemoveSchedule(SnapshotName),
    /// Replaces the mark of token time, in seconds since 1970.
    SetTokenMark(u64),
    /// Notes that the first admin token was made.
    NoteAdminTokenMade,
}

/// Everything in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreContents {
    /// Every brick.
    pub bricks: Vec<BrickRecord>,
    /// Every volume.
    pub volumes: Vec<VolumeRecord>,
    /// Every pending delete.
    pub pending_deletes: Vec<PendingDelete>,
    /// Every event, by sequence number.
    pub events: Vec<EventRecord>,
    /// The highest number of an event that was dropped for lack of room; 0 if none was.
    pub dropped_event_seq: u64,
    /// Every token.
    pub tokens: Vec<TokenRecord>,
    /// Every kept answer, by number.
    pub answers: Vec<KeptAnswer>,
    /// Every snapshot.
    pub snapshots: Vec<SnapshotRecord>,
    /// Every layout of snapshots.
    pub snapshot_layouts: Vec<SnapshotLayout>,
    /// Every bookmark.
    pub bookmarks: Vec<BookmarkRecord>,
    /// Every schedule.
    pub schedules: Vec<ScheduleRecord>,
    /// The last mark of token time, in seconds since 1970; 0 if there is none.
    pub token_mark_unix_s: u64,
    /// Whether the first admin token was made.
    pub admin_token_made: bool,
}

/// An open store; it locks out other processes.
#[derive(Debug)]
pub struct Store {
    database: Database,
    path: PathBuf,
    /// Whether `path` is a file, not the label of another backend.
    is_file: bool,
    /// Whether a commit has failed. Its writes may be stored all the same, so the contents of the
    /// file are unknown until the store is opened again.
    failed: AtomicBool,
}

impl Store {
    /// Opens a store, or creates one if the file is missing or empty.
    ///
    /// # Errors
    /// When it is in use, not a store, newer, damaged or unreachable.
    pub fn open(path: &Path) -> Result<Store, StoreError> {
        if !check_existing(path)? {
            create_file(path)?;
        }
        let mut store = Store::open_with(path, |builder| builder.create(path))?;
        store.is_file = true;
        store.check_purpose()?;
        Ok(store)
    }

    /// Opens a store on another backend than a file, such as a failing disk in a test; `label`
    /// replaces its path in messages. The caller must not open it twice.
    ///
    /// # Errors
    /// When it is not a store, newer, damaged or unreachable.
    pub fn open_on(disk: impl redb::StorageBackend, label: &Path) -> Result<Store, StoreError> {
        let store = Store::open_with(label, |builder| builder.create_with_backend(disk))?;
        store.check_purpose()?;
        Ok(store)
    }

    fn open_with(
        path: &Path,
        open: impl FnOnce(&redb::Builder) -> Result<Database, DatabaseError>,
    ) -> Result<Store, StoreError> {
        let mut builder = Database::builder();
        builder.set_cache_size(CACHE_BYTES);
        let mut database = open(&builder).map_err(|error| open_error(path, error))?;
        // Verify the checksums of all pages: the store is small, and the manager trusts its
        // contents. The result, whether redb had to rebuild the free-page table, does not matter.
        database
            .check_integrity()
            .map_err(|error| open_error(path, error))?;
        Ok(Store {
            database,
            path: path.to_owned(),
            is_file: false,
            failed: AtomicBool::new(false),
        })
    }

    /// Makes one change durable.
    ///
    /// # Errors
    /// When it cannot be written. Then it is unknown whether the next opening finds the change, so
    /// the store refuses every later change.
    pub fn commit(&self, writes: &[StoreWrite<'_>]) -> Result<(), StoreError> {
        if self.has_failed() {
            return Err(StoreError::EarlierWriteFailed(self.path.clone()));
        }
        let done = self.try_commit(writes);
        if done.is_err() {
            self.failed.store(true, Ordering::Release);
        }
        done.map_err(|error| self.io_error(error))
    }

    /// Whether a commit has failed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    fn try_commit(&self, writes: &[StoreWrite<'_>]) -> Result<(), redb::Error> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(match defect::is(Defect::ManagerNotSynced) {
            true => Durability::None,
            false => Durability::Immediate,
        })?;
        // With a one-phase commit, later damage to the pages of the last commit looks like an
        // interrupted commit. Opening would then roll back to the commit before, and an epoch would
        // fall.
        transaction.set_two_phase_commit(true);
        for write in writes {
            apply_write(&transaction, write)?;
        }
        Ok(transaction.commit()?)
    }

    /// Reads the whole store.
    ///
    /// # Errors
    /// When a record cannot be read or decoded.
    pub fn load(&self) -> Result<StoreContents, StoreError> {
        let transaction = self.database.begin_read().map_err(|e| self.io_error(e))?;
        let mut contents = StoreContents::default();
        let bricks = transaction
            .open_table(BRICKS)
            .map_err(|e| self.io_error(e))?;
        for entry in bricks.iter().map_err(|e| self.io_error(e))? {
            let (key, value) = entry.map_err(|e| self.io_error(e))?;
            let what = format!("the brick {}", Uuid::from_u128(key.value()));
            let brick: BrickRecord = self.decode(&what, value.value())?;
            self.check_record(&what, brick.brick.0.as_u128() == key.value())?;
            contents.bricks.push(brick);
        }
        let volumes = transaction
            .open_table(VOLUMES)
            .map_err(|e| self.io_error(e))?;
        for entry in volumes.iter().map_err(|e| self.io_error(e))? {
            let (name, value) = entry.map_err(|e| self.io_error(e))?;
            let what = format!("the volume {}", name.value());
            let volume: VolumeRecord = self.decode(&what, value.value())?;
            let named = volume.layout_state.layout.name.as_str() == name.value();
            self.check_record(&what, named && volume.layout_state.is_sound())?;
            contents.volumes.push(volume);
        }
        let pending = transaction
            .open_table(PENDING_DELETES)
            .map_err(|e| self.io_error(e))?;
        for entry in pending.iter().map_err(|e| self.io_error(e))? {
            let (key, value) = entry.map_err(|e| self.io_error(e))?;
            let (brick, slice) = key.value();
            let what = format!("the slice to delete {}", Uuid::from_u128(slice));
            let pending: PendingDelete = self.decode(&what, value.value())?;
            let is_its_own =
                (pending.brick.0.as_u128(), pending.slice.0.as_u128()) == (brick, slice);
            self.check_record(&what, is_its_own)?;
            contents.pending_deletes.push(pending);
        }
        self.load_events(&transaction, &mut contents)?;
        self.load_tokens(&transaction, &mut contents)?;
        contents.answers = self.load_answers(&transaction)?;
        self.load_snapshots(&transaction, &mut contents)?;
        self.load_bookmarks(&transaction, &mut contents)?;
        self.load_schedules(&transaction, &mut contents)?;
        self.check_slices_unique(&contents)?;
        Ok(contents)
    }

    fn check_record(&self, what: &str, sound: bool) -> Result<(), StoreError> {
        if sound {
            return Ok(());
        }
        Err(self.damage_error(&format!("{what} contradicts itself")))
    }

    /// Checks that no slice appears twice, in volumes or in pending deletes.
    fn check_slices_unique(&self, contents: &StoreContents) -> Result<(), StoreError> {
        let pending = contents.pending_deletes.iter().map(|pending| pending.slice);
        let mut seen: BTreeSet<SliceId> = pending.collect();
        for volume in &contents.volumes {
            for place in slice_locations(&volume.layout_state.layout.segments) {
                if !seen.insert(place.slice) {
                    let what = format!("the slice {} is there twice", place.slice);
                    return Err(self.damage_error(&what));
                }
            }
        }
        Ok(())
    }

    /// Marks a new file as a manager store, and checks the mark of an old one.
    fn check_purpose(&self) -> Result<(), StoreError> {
        let transaction = self.database.begin_read().map_err(|e| self.io_error(e))?;
        let mut tables = transaction.list_tables().map_err(|e| self.io_error(e))?;
        if tables.next().is_none() {
            return self.write_meta();
        }
        let foreign = |why: &str| StoreError::NotAStore {
            path: self.path.clone(),
            why: why.into(),
        };
        let meta = match transaction.open_table(META) {
            Ok(meta) => meta,
            Err(TableError::Storage(error)) => return Err(self.io_error(error)),
            Err(_) => return Err(foreign("a redb database of something else")),
        };
        let read = |key| -> Result<Option<String>, StoreError> {
            let value = meta.get(key).map_err(|e| self.io_error(e))?;
            Ok(value.map(|value| value.value().to_owned()))
        };
        if read("purpose")?.as_deref() != Some(PURPOSE) {
            return Err(foreign("its meta table does not say so"));
        }
        let schema = read("schema")?.unwrap_or_default();
        match schema.parse::<u64>() {
            Ok(SCHEMA..=SCHEMA_MAX) => Ok(()),
            Ok(found) if found > SCHEMA_MAX => Err(StoreError::NewerSchema {
                path: self.path.clone(),
                found,
            }),
            _ => Err(self.damage_error(&format!("its schema is {schema:?}"))),
        }
    }

    fn write_meta(&self) -> Result<(), StoreError> {
        let make = || -> Result<(), redb::Error> {
            let mut transaction = self.database.begin_write()?;
            transaction.set_two_phase_commit(true);
            {
                let mut meta = transaction.open_table(META)?;
                meta.insert("purpose", PURPOSE)?;
                meta.insert("schema", SCHEMA.to_string().as_str())?;
                transaction.open_table(BRICKS)?;
                transaction.open_table(VOLUMES)?;
                transaction.open_table(PENDING_DELETES)?;
            }
            transaction.commit()?;
            Ok(())
        };
        make().map_err(|error| self.io_error(error))
    }

    fn decode<T: DeserializeOwned>(&self, what: &str, bytes: &[u8]) -> Result<T, StoreError> {
        serde_json::from_slice(bytes)
            .map_err(|error| self.damage_error(&format!("{what} cannot be read: {error}")))
    }

    pub(crate) fn damage_error(&self, what: &str) -> StoreError {
        StoreError::Damaged {
            path: self.path.clone(),
            what: what.to_owned(),
        }
    }

    fn io_error(&self, cause: impl std::fmt::Display) -> StoreError {
        StoreError::Io {
            path: self.path.clone(),
            cause: cause.to_string(),
        }
    }
}

fn apply_write(transaction: &WriteTransaction, write: &StoreWrite<'_>) -> Result<(), redb::Error> {
    match write {
        StoreWrite::PutBrick(record) => {
            let mut table = transaction.open_table(BRICKS)?;
            table.insert(record.brick.0.as_u128(), encode(record)?.as_slice())?;
        }
        StoreWrite::RemoveBrick(brick) => {
            transaction.open_table(BRICKS)?.remove(brick.0.as_u128())?;
        }
        StoreWrite::PutVolume(record) => {
            if record.received.is_some() {
                raise_schema(transaction, bookmarks::SCHEMA_WITH_BOOKMARKS)?;
            }
            let mut table = transaction.open_table(VOLUMES)?;
            let name = record.layout_state.layout.name.as_str();
            table.insert(name, encode(record)?.as_slice())?;
        }
        StoreWrite::RemoveVolume(name) => {
            transaction.open_table(VOLUMES)?.remove(name.as_str())?;
        }
        StoreWrite::AddPendingDelete(pending) => {
            let mut table = transaction.open_table(PENDING_DELETES)?;
            let key = (pending.brick.0.as_u128(), pending.slice.0.as_u128());
            table.insert(key, encode(pending)?.as_slice())?;
        }
        StoreWrite::RemovePendingDelete(brick, slice) => {
            let key = (brick.0.as_u128(), slice.0.as_u128());
            transaction.open_table(PENDING_DELETES)?.remove(key)?;
        }
        StoreWrite::PutEvent(event) => events::put(transaction, event)?,
        StoreWrite::RemoveEvent(seq) => events::remove(transaction, *seq)?,
        StoreWrite::SetDroppedEvent(seq) => events::set_dropped(transaction, *seq)?,
        StoreWrite::PutToken(record) => tokens::put(transaction, record)?,
        StoreWrite::RemoveToken(id) => tokens::remove(transaction, *id)?,
        StoreWrite::PutAnswer(answer) => answers::put(transaction, answer)?,
        StoreWrite::RemoveAnswer(seq) => answers::remove(transaction, *seq)?,
        StoreWrite::PutSnapshot(record) => snapshots::put(transaction, record)?,
        StoreWrite::RemoveSnapshot(volume, epoch) => {
            snapshots::remove(transaction, *volume, *epoch)?;
        }
        StoreWrite::PutSnapshotLayout(layout) => snapshots::put_layout(transaction, layout)?,
        StoreWrite::RemoveSnapshotLayout(volume, first) => {
            snapshots::remove_layout(transaction, *volume, *first)?;
        }
        StoreWrite::PutBookmark(record) => bookmarks::put(transaction, record)?,
        StoreWrite::RemoveBookmark(volume, name) => {
            bookmarks::remove(transaction, *volume, name.as_str())?;
        }
        StoreWrite::PutSchedule(record) => schedules::put(transaction, record)?,
        StoreWrite::RemoveSchedule(name) => schedules::remove(transaction, name.as_str())?,
        StoreWrite::SetTokenMark(mark_unix_s) => tokens::set_mark(transaction, *mark_unix_s)?,
        StoreWrite::NoteAdminTokenMade => tokens::note_admin_token(transaction)?,
    }
    Ok(())
}

/// Raises the schema, so that earlier managers refuse the store. It never falls.
fn raise_schema(transaction: &WriteTransaction, schema: u64) -> Result<(), redb::Error> {
    let mut meta = transaction.open_table(META)?;
    let present = meta.get("schema")?.and_then(|it| it.value().parse().ok());
    if present.is_none_or(|present: u64| present < schema) {
        meta.insert("schema", schema.to_string().as_str())?;
    }
    Ok(())
}

fn encode(record: &impl Serialize) -> Result<Vec<u8>, redb::Error> {
    serde_json::to_vec(record).map_err(|error| redb::Error::Io(io::Error::other(error)))
}

/// Checks a file before redb opens it, because redb would write to it. An empty file is initialized
/// in place and so keeps its owner and mode.
fn check_existing(path: &Path) -> Result<bool, StoreError> {
    let foreign = |why: &str| StoreError::NotAStore {
        path: path.to_owned(),
        why: why.into(),
    };
    let found = match std::fs::metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(unusable_error(path, &error)),
    };
    if !found.is_file() {
        return Err(foreign("not a regular file"));
    }
    let mut start = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(REDB_MAGIC.len() as u64).read_to_end(&mut start))
        .map_err(|error| unusable_error(path, &error))?;
    match start.as_slice() {
        [] => Ok(true),
        magic if magic == REDB_MAGIC => Ok(true),
        _ => Err(foreign("not a redb database")),
    }
}

/// Creates an empty store that only its owner can read. It is written to a temporary file and
/// linked into place, so that a crash leaves a whole store or none. If another manager was faster,
/// its store stays.
fn create_file(path: &Path) -> Result<(), StoreError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", Uuid::new_v4()));
    let beside = path.with_file_name(name);
    let made = create_empty(&beside).and_then(|()| match std::fs::hard_link(&beside, path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(unusable_error(path, &error))
        }
        _ => Ok(()),
    });
    // A temporary file that cannot be removed is an empty store, which no manager opens.
    let _ = std::fs::remove_file(&beside);
    made?;
    sync_directory(path).map_err(|error| unusable_error(path, &error))
}

fn create_empty(path: &Path) -> Result<(), StoreError> {
    let mut options = OpenOptions::new();
    let private = options.write(true).create_new(true).mode(0o600);
    private
        .open(path)
        .map_err(|error| unusable_error(path, &error))?;
    Store::open_with(path, |builder| builder.create(path))?.write_meta()
}

fn unusable_error(path: &Path, cause: &io::Error) -> StoreError {
    StoreError::Io {
        path: path.to_owned(),
        cause: cause.to_string(),
    }
}

/// A new file survives a crash only after its directory is synced.
fn sync_directory(path: &Path) -> io::Result<()> {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    std::fs::File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

fn open_error(path: &Path, error: DatabaseError) -> StoreError {
    let path = path.to_owned();
    match error {
        DatabaseError::DatabaseAlreadyOpen => StoreError::InUse(path),
        DatabaseError::UpgradeRequired(version) => StoreError::NotAStore {
            path,
            why: format!("a redb file of the old version {version}"),
        },
        DatabaseError::Storage(redb::StorageError::Corrupted(what)) => {
            StoreError::Damaged { path, what }
        }
        error => StoreError::Io {
            path,
            cause: error.to_string(),
        },
    }
}
