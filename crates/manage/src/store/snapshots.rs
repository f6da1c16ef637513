//! Snapshots in the store: the table `snapshots` by the volume's UUID and the epoch, and `snapshot_layouts` by the
//! volume's UUID and the epoch of the first snapshot with the layout.
//!
//! The first snapshot raises the schema in its transaction: an earlier manager would give epochs of snapshots to layouts,
//! and delete volumes without their snapshots.

use super::{Store, StoreContents, StoreError, encode, raise_schema};
use crate::snapshots::{SnapshotLayout, SnapshotRecord, SnapshotState};
use pagemesh_base::layout::EpochNumber;
use redb::{ReadTransaction, ReadableTable, TableDefinition, TableError, WriteTransaction};
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

const SNAPSHOTS: TableDefinition<(u128, u32), &[u8]> = TableDefinition::new("snapshots");
const LAYOUTS: TableDefinition<(u128, u32), &[u8]> = TableDefinition::new("snapshot_layouts");

/// The first schema with snapshots.
const SCHEMA_WITH_SNAPSHOTS: u64 = 2;

/// A record, after its name in errors and its key.
type KeyedRecord<T> = (String, (Uuid, EpochNumber), T);

impl Store {
    /// Reads the snapshots and their layouts, after the volumes.
    pub(super) fn load_snapshots(
        &self,
        transaction: &ReadTransaction,
        contents: &mut StoreContents,
    ) -> Result<(), StoreError> {
        let last_epochs: BTreeMap<Uuid, EpochNumber> = contents
            .volumes
            .iter()
            .map(|it| (it.layout_state.layout.volume, it.layout_state.reserved))
            .collect();
        let mut layouts = BTreeSet::new();
        for (what, key, layout) in
            self.load_keyed::<SnapshotLayout>(transaction, LAYOUTS, "layout")?
        {
            self.check_record(&what, (layout.volume, layout.first) == key)?;
            layouts.insert(key);
            contents.snapshot_layouts.push(layout);
        }
        let mut names = BTreeSet::new();
        for (what, key, snapshot) in
            self.load_keyed::<SnapshotRecord>(transaction, SNAPSHOTS, "snapshot")?
        {
            let is_its_own = (snapshot.volume, snapshot.epoch) == key;
            let last = last_epochs.get(&snapshot.volume);
            let is_reserved = last.is_some_and(|last| snapshot.epoch <= *last);
            let has_layout = layouts.contains(&(snapshot.volume, snapshot.layout));
            let is_unique = snapshot.state != SnapshotState::Committed
                || names.insert((snapshot.volume, snapshot.name.clone()));
            let is_sound = is_its_own && is_reserved && has_layout && is_unique;
            self.check_record(&what, is_sound)?;
            contents.snapshots.push(snapshot);
        }
        Ok(())
    }

    /// The records of a table.
    fn load_keyed<T: serde::de::DeserializeOwned>(
        &self,
        transaction: &ReadTransaction,
        table: TableDefinition<(u128, u32), &[u8]>,
        kind: &str,
    ) -> Result<Vec<KeyedRecord<T>>, StoreError> {
        let table = match transaction.open_table(table) {
            Ok(table) => table,
            Err(TableError::TableDoesNotExist(_)) => return Ok(vec![]),
            Err(error) => return Err(self.io_error(error)),
        };
        let mut records = vec![];
        for entry in table.iter().map_err(|e| self.io_error(e))? {
            let (key, value) = entry.map_err(|e| self.io_error(e))?;
            let (volume, epoch) = key.value();
            let key = (Uuid::from_u128(volume), EpochNumber(epoch));
            let what = format!("the {kind} {epoch} of the volume {}", key.0);
            let record = self.decode(&what, value.value())?;
            records.push((what, key, record));
        }
        Ok(records)
    }
}

pub(super) fn put(
    transaction: &WriteTransaction,
    record: &SnapshotRecord,
) -> Result<(), redb::Error> {
    raise_schema(transaction, SCHEMA_WITH_SNAPSHOTS)?;
    let mut table = transaction.open_table(SNAPSHOTS)?;
    let key = (record.volume.as_u128(), record.epoch.0);
    table.insert(key, encode(record)?.as_slice())?;
    Ok(())
}

pub(super) fn remove(
    transaction: &WriteTransaction,
    volume: Uuid,
    epoch: EpochNumber,
) -> Result<(), redb::Error> {
    let mut table = transaction.open_table(SNAPSHOTS)?;
    table.remove((volume.as_u128(), epoch.0))?;
    Ok(())
}

pub(super) fn put_layout(
    transaction: &WriteTransaction,
    layout: &SnapshotLayout,
) -> Result<(), redb::Error> {
    let mut table = transaction.open_table(LAYOUTS)?;
    let key = (layout.volume.as_u128(), layout.first.0);
    table.insert(key, encode(layout)?.as_slice())?;
    Ok(())
}

pub(super) fn remove_layout(
    transaction: &WriteTransaction,
    volume: Uuid,
    first: EpochNumber,
) -> Result<(), redb::Error> {
    let mut table = transaction.open_table(LAYOUTS)?;
    table.remove((volume.as_u128(), first.0))?;
    Ok(())
}
