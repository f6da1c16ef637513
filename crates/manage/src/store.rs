//! The manager's store: a redb database of JSON records.
//!
//! Invariants: one change is one durable transaction: when [`ManagerState::commit`]
//! returns, all of its writes survive a crash. If it fails, all of them or none
//! are there, and nothing is written after it until the store is opened anew.
//! A file that is no manager store is never written to.
//!
//! Tables: `meta` (what the file is, and its schema version), `bricks` by
//! UUID, `volumes` by name, `doomed` by the UUIDs of brick and slice.

use crate::manager::places;
use crate::records::{BrickRecord, Doomed, VolumeRecord};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::{BrickId, SliceId, VolumeName};
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

/// The schema this manager writes; higher ones are refused.
pub const SCHEMA: u64 = 1;
/// What the file says it is.
const PURPOSE: &str = "pagemesh manager store";
/// Memory for pages of the store. It is small, and all of it is also in
/// memory as records.
const CACHE_BYTES: usize = 4 << 20;
/// The first bytes of every redb file.
const REDB_MAGIC: &[u8; 9] = b"redb\x1a\x0a\xa9\x0d\x0a";

const META: TableDefinition<&str, &str> = TableDefinition::new("meta");
const BRICKS: TableDefinition<u128, &[u8]> = TableDefinition::new("bricks");
const VOLUMES: TableDefinition<&str, &[u8]> = TableDefinition::new("volumes");
const DOOMED: TableDefinition<(u128, u128), &[u8]> = TableDefinition::new("doomed");

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has it.
    #[error("the store {} is in use by another manager; stop that one, or name another file with --store", .0.display())]
    InUse(PathBuf),
    /// A file of something else.
    #[error("{} is not a manager store ({why}); it is left as it is, name another file with --store", path.display())]
    NotAStore {
        /// The file.
        path: PathBuf,
        /// How it is known.
        why: String,
    },
    /// Written by a later version.
    #[error("the store {} has schema {found}, this manager knows up to {SCHEMA}; use a newer pagemesh", path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its schema.
        found: u64,
    },
    /// A record that cannot be understood.
    #[error("the store {} is damaged: {what}; restore it from a copy", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is damaged.
        what: String,
    },
    /// A change could not be written before.
    #[error("the store {} takes no changes since it failed to write one; see to its disk and start the manager again", .0.display())]
    Failed(PathBuf),
    /// The file cannot be opened, read or written.
    #[error("the store {} cannot be used: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: String,
    },
}

/// One write of a change.
#[derive(Clone, Debug)]
pub enum Write<'a> {
    /// Adds or replaces a brick.
    PutBrick(&'a BrickRecord),
    /// Forgets a brick.
    RemoveBrick(BrickId),
    /// Adds or replaces a volume.
    PutVolume(&'a VolumeRecord),
    /// Forgets a volume.
    RemoveVolume(&'a VolumeName),
    /// Remembers a slice that must go.
    Doom(Doomed),
    /// It is gone, or belongs to a volume now.
    Pardon(BrickId, SliceId),
}

/// Everything in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Every brick.
    pub bricks: Vec<BrickRecord>,
    /// Every volume.
    pub volumes: Vec<VolumeRecord>,
    /// Every slice to delete.
    pub doomed: Vec<Doomed>,
}

/// An open store; nobody else can open it.
#[derive(Debug)]
pub struct Store {
    database: Database,
    path: PathBuf,
    /// Whether a commit has failed. It may be there all the same, so what the
    /// file says is not known until it is opened again.
    failed: AtomicBool,
}

impl Store {
    /// Opens a store, or makes one where there is no file or an empty one.
    ///
    /// # Errors
    /// When it is in use, something else, newer, damaged or out of reach.
    pub fn open(path: &Path) -> Result<Store, StoreError> {
        if !is_there(path)? {
            make(path)?;
        }
        let store = Store::over(path, |builder| builder.create(path))?;
        store.check_purpose()?;
        Ok(store)
    }

    /// A store on a disk of another kind than files, such as one that fails;
    /// `label` stands for its path in messages. Nobody guards it against being
    /// opened twice.
    ///
    /// # Errors
    /// When it is something else, newer, damaged or out of reach.
    pub fn open_on(disk: impl redb::StorageBackend, label: &Path) -> Result<Store, StoreError> {
        let store = Store::over(label, |builder| builder.create_with_backend(disk))?;
        store.check_purpose()?;
        Ok(store)
    }

    fn over(
        path: &Path,
        open: impl FnOnce(&redb::Builder) -> Result<Database, DatabaseError>,
    ) -> Result<Store, StoreError> {
        let mut builder = Database::builder();
        builder.set_cache_size(CACHE_BYTES);
        let mut database = open(&builder).map_err(|error| refusal(path, error))?;
        // The checksums of all pages: a store is small, and what it says is
        // taken for the truth. Whether free pages had to be counted anew does
        // not matter.
        database
            .check_integrity()
            .map_err(|error| refusal(path, error))?;
        Ok(Store {
            database,
            path: path.to_owned(),
            failed: AtomicBool::new(false),
        })
    }

    /// Makes one change durable.
    ///
    /// # Errors
    /// When it cannot be written. Whether it is there after the next opening
    /// is then not known, so that every later change is refused.
    pub fn commit(&self, writes: &[Write<'_>]) -> Result<(), StoreError> {
        if self.has_failed() {
            return Err(StoreError::Failed(self.path.clone()));
        }
        let done = self.try_commit(writes);
        if done.is_err() {
            self.failed.store(true, Ordering::Release);
        }
        done.map_err(|error| self.io(error))
    }

    /// Whether a commit has failed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    fn try_commit(&self, writes: &[Write<'_>]) -> Result<(), redb::Error> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(match defect::is(Defect::ManagerNotSynced) {
            true => Durability::None,
            false => Durability::Immediate,
        })?;
        // With one phase, a last commit whose pages are damaged later looks
        // like one that was cut off, and opening goes back to the one before:
        // an epoch would fall.
        transaction.set_two_phase_commit(true);
        for write in writes {
            put(&transaction, write)?;
        }
        Ok(transaction.commit()?)
    }

    /// Reads all of it.
    ///
    /// # Errors
    /// When a record cannot be read or understood.
    pub fn load(&self) -> Result<Contents, StoreError> {
        let transaction = self.database.begin_read().map_err(|e| self.io(e))?;
        let mut contents = Contents::default();
        let bricks = transaction.open_table(BRICKS).map_err(|e| self.io(e))?;
        for entry in bricks.iter().map_err(|e| self.io(e))? {
            let (key, value) = entry.map_err(|e| self.io(e))?;
            let what = format!("the brick {}", Uuid::from_u128(key.value()));
            let brick: BrickRecord = self.decode(&what, value.value())?;
            self.check(&what, brick.brick.0.as_u128() == key.value())?;
            contents.bricks.push(brick);
        }
        let volumes = transaction.open_table(VOLUMES).map_err(|e| self.io(e))?;
        for entry in volumes.iter().map_err(|e| self.io(e))? {
            let (name, value) = entry.map_err(|e| self.io(e))?;
            let what = format!("the volume {}", name.value());
            let volume: VolumeRecord = self.decode(&what, value.value())?;
            let named = volume.ledger.layout.name.as_str() == name.value();
            self.check(&what, named && volume.ledger.is_sound())?;
            contents.volumes.push(volume);
        }
        let doomed = transaction.open_table(DOOMED).map_err(|e| self.io(e))?;
        for entry in doomed.iter().map_err(|e| self.io(e))? {
            let (key, value) = entry.map_err(|e| self.io(e))?;
            let (brick, slice) = key.value();
            let what = format!("the slice to delete {}", Uuid::from_u128(slice));
            let doomed: Doomed = self.decode(&what, value.value())?;
            let is_its_own = (doomed.brick.0.as_u128(), doomed.slice.0.as_u128()) == (brick, slice);
            self.check(&what, is_its_own)?;
            contents.doomed.push(doomed);
        }
        self.check_apart(&contents)?;
        Ok(contents)
    }

    fn check(&self, what: &str, sound: bool) -> Result<(), StoreError> {
        if sound {
            return Ok(());
        }
        Err(self.damaged(&format!("{what} contradicts itself")))
    }

    /// Sees that no slice belongs to two volumes, or to one and to none.
    fn check_apart(&self, contents: &Contents) -> Result<(), StoreError> {
        let doomed = contents.doomed.iter().map(|doomed| doomed.slice);
        let mut seen: BTreeSet<SliceId> = doomed.collect();
        for volume in &contents.volumes {
            for place in places(&volume.ledger.layout.segments) {
                if !seen.insert(place.slice) {
                    let what = format!("the slice {} is there twice", place.slice);
                    return Err(self.damaged(&what));
                }
            }
        }
        Ok(())
    }

    /// Makes a new file a manager store, and sees that an old one is.
    fn check_purpose(&self) -> Result<(), StoreError> {
        let transaction = self.database.begin_read().map_err(|e| self.io(e))?;
        let mut tables = transaction.list_tables().map_err(|e| self.io(e))?;
        if tables.next().is_none() {
            return self.initialise();
        }
        let foreign = |why: &str| StoreError::NotAStore {
            path: self.path.clone(),
            why: why.into(),
        };
        let meta = match transaction.open_table(META) {
            Ok(meta) => meta,
            Err(TableError::Storage(error)) => return Err(self.io(error)),
            Err(_) => return Err(foreign("a redb database of something else")),
        };
        let read = |key| -> Result<Option<String>, StoreError> {
            let value = meta.get(key).map_err(|e| self.io(e))?;
            Ok(value.map(|value| value.value().to_owned()))
        };
        if read("purpose")?.as_deref() != Some(PURPOSE) {
            return Err(foreign("its meta table does not say so"));
        }
        let schema = read("schema")?.unwrap_or_default();
        match schema.parse::<u64>() {
            Ok(SCHEMA) => Ok(()),
            Ok(found) if found > SCHEMA => Err(StoreError::Newer {
                path: self.path.clone(),
                found,
            }),
            _ => Err(self.damaged(&format!("its schema is {schema:?}"))),
        }
    }

    fn initialise(&self) -> Result<(), StoreError> {
        let make = || -> Result<(), redb::Error> {
            let mut transaction = self.database.begin_write()?;
            transaction.set_two_phase_commit(true);
            {
                let mut meta = transaction.open_table(META)?;
                meta.insert("purpose", PURPOSE)?;
                meta.insert("schema", SCHEMA.to_string().as_str())?;
                transaction.open_table(BRICKS)?;
                transaction.open_table(VOLUMES)?;
                transaction.open_table(DOOMED)?;
            }
            transaction.commit()?;
            Ok(())
        };
        make().map_err(|error| self.io(error))
    }

    fn decode<T: DeserializeOwned>(&self, what: &str, bytes: &[u8]) -> Result<T, StoreError> {
        serde_json::from_slice(bytes)
            .map_err(|error| self.damaged(&format!("{what} cannot be read: {error}")))
    }

    fn damaged(&self, what: &str) -> StoreError {
        StoreError::Damaged {
            path: self.path.clone(),
            what: what.to_owned(),
        }
    }

    fn io(&self, cause: impl std::fmt::Display) -> StoreError {
        StoreError::Io {
            path: self.path.clone(),
            cause: cause.to_string(),
        }
    }
}

fn put(transaction: &WriteTransaction, write: &Write<'_>) -> Result<(), redb::Error> {
    match write {
        Write::PutBrick(record) => {
            let mut table = transaction.open_table(BRICKS)?;
            table.insert(record.brick.0.as_u128(), encode(record)?.as_slice())?;
        }
        Write::RemoveBrick(brick) => {
            transaction.open_table(BRICKS)?.remove(brick.0.as_u128())?;
        }
        Write::PutVolume(record) => {
            let mut table = transaction.open_table(VOLUMES)?;
            let name = record.ledger.layout.name.as_str();
            table.insert(name, encode(record)?.as_slice())?;
        }
        Write::RemoveVolume(name) => {
            transaction.open_table(VOLUMES)?.remove(name.as_str())?;
        }
        Write::Doom(doomed) => {
            let mut table = transaction.open_table(DOOMED)?;
            let key = (doomed.brick.0.as_u128(), doomed.slice.0.as_u128());
            table.insert(key, encode(doomed)?.as_slice())?;
        }
        Write::Pardon(brick, slice) => {
            let key = (brick.0.as_u128(), slice.0.as_u128());
            transaction.open_table(DOOMED)?.remove(key)?;
        }
    }
    Ok(())
}

fn encode(record: &impl Serialize) -> Result<Vec<u8>, redb::Error> {
    serde_json::to_vec(record).map_err(|error| redb::Error::Io(io::Error::other(error)))
}

/// Looks at a file before redb does, which would write to it. An empty one is
/// filled in place, as whoever made it may have wished.
fn is_there(path: &Path) -> Result<bool, StoreError> {
    let foreign = |why: &str| StoreError::NotAStore {
        path: path.to_owned(),
        why: why.into(),
    };
    let found = match std::fs::metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(unusable(path, &error)),
    };
    if !found.is_file() {
        return Err(foreign("not a regular file"));
    }
    let mut start = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(REDB_MAGIC.len() as u64).read_to_end(&mut start))
        .map_err(|error| unusable(path, &error))?;
    match start.as_slice() {
        [] => Ok(true),
        magic if magic == REDB_MAGIC => Ok(true),
        _ => Err(foreign("not a redb database")),
    }
}

/// Makes an empty store that only its owner can read: beside its place, and
/// moved there whole, so that a crash leaves a store or none. If another
/// manager was faster, its store stays.
fn make(path: &Path) -> Result<(), StoreError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", Uuid::new_v4()));
    let beside = path.with_file_name(name);
    let made = fill(&beside).and_then(|()| match std::fs::hard_link(&beside, path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(unusable(path, &error)),
        _ => Ok(()),
    });
    // What cannot be removed is an empty store that nobody opens.
    let _ = std::fs::remove_file(&beside);
    made?;
    sync_directory(path).map_err(|error| unusable(path, &error))
}

fn fill(path: &Path) -> Result<(), StoreError> {
    let mut options = OpenOptions::new();
    let private = options.write(true).create_new(true).mode(0o600);
    private.open(path).map_err(|error| unusable(path, &error))?;
    Store::over(path, |builder| builder.create(path))?.initialise()
}

fn unusable(path: &Path, cause: &io::Error) -> StoreError {
    StoreError::Io {
        path: path.to_owned(),
        cause: cause.to_string(),
    }
}

/// A file is only there for sure once its directory says so.
fn sync_directory(path: &Path) -> io::Result<()> {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    std::fs::File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

fn refusal(path: &Path, error: DatabaseError) -> StoreError {
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
