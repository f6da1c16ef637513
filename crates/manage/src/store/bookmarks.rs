//! Bookmarks in the store: the table `snapshot_bookmarks` by the volume's UUID and the name.
//!
//! The first bookmark, and the first volume that receives snapshots, raise the schema in their transaction: an earlier
//! manager would promote a copy without the loss of the bookmarks, and let clients write to such a volume.

use super::{Store, StoreContents, StoreError, encode, raise_schema};
use crate::snapshots::BookmarkRecord;
use redb::{ReadTransaction, ReadableTable, TableDefinition, TableError, WriteTransaction};
use uuid::Uuid;

const BOOKMARKS: TableDefinition<(u128, &str), &[u8]> = TableDefinition::new("snapshot_bookmarks");
/// The first schema with bookmarks and volumes that receive snapshots.
pub(super) const SCHEMA_WITH_BOOKMARKS: u64 = 3;

impl Store {
    /// Reads the bookmarks.
    pub(super) fn load_bookmarks(
        &self,
        transaction: &ReadTransaction,
        contents: &mut StoreContents,
    ) -> Result<(), StoreError> {
        let table = match transaction.open_table(BOOKMARKS) {
            Ok(table) => table,
            Err(TableError::TableDoesNotExist(_)) => return Ok(()),
            Err(error) => return Err(self.io_error(error)),
        };
        for entry in table.iter().map_err(|e| self.io_error(e))? {
            let (key, value) = entry.map_err(|e| self.io_error(e))?;
            let (volume, name) = key.value();
            let what = format!(
                "the bookmark {name} of the volume {}",
                Uuid::from_u128(volume)
            );
            let record: BookmarkRecord = self.decode(&what, value.value())?;
            let key = (record.volume.as_u128(), record.name.as_str());
            self.check_record(&what, key == (volume, name))?;
            contents.bookmarks.push(record);
        }
        Ok(())
    }
}

pub(super) fn put(
    transaction: &WriteTransaction,
    record: &BookmarkRecord,
) -> Result<(), redb::Error> {
    raise_schema(transaction, SCHEMA_WITH_BOOKMARKS)?;
    let mut table = transaction.open_table(BOOKMARKS)?;
    let key = (record.volume.as_u128(), record.name.as_str());
    table.insert(key, encode(record)?.as_slice())?;
    Ok(())
}

pub(super) fn remove(
    transaction: &WriteTransaction,
    volume: Uuid,
    name: &str,
) -> Result<(), redb::Error> {
    let mut table = transaction.open_table(BOOKMARKS)?;
    table.remove((volume.as_u128(), name))?;
    Ok(())
}
