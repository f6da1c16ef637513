//! Schedules in the store: the table `schedules` by name. The first one raises the schema in its transaction, because an earlier manager
//! would not carry it out.

use super::bookmarks::SCHEMA_WITH_BOOKMARKS;
use super::{Store, StoreContents, StoreError, encode, raise_schema};
use crate::snapshots::schedules::ScheduleRecord;
use redb::{ReadTransaction, ReadableTable, TableDefinition, TableError, WriteTransaction};

const SCHEDULES: TableDefinition<&str, &[u8]> = TableDefinition::new("schedules");

impl Store {
    /// Reads the schedules.
    pub(super) fn load_schedules(
        &self,
        transaction: &ReadTransaction,
        contents: &mut StoreContents,
    ) -> Result<(), StoreError> {
        let table = match transaction.open_table(SCHEDULES) {
            Ok(table) => table,
            Err(TableError::TableDoesNotExist(_)) => return Ok(()),
            Err(error) => return Err(self.io_error(error)),
        };
        for entry in table.iter().map_err(|e| self.io_error(e))? {
            let (name, value) = entry.map_err(|e| self.io_error(e))?;
            let what = format!("the schedule {}", name.value());
            let record: ScheduleRecord = self.decode(&what, value.value())?;
            self.check_record(&what, record.name.as_str() == name.value())?;
            contents.schedules.push(record);
        }
        Ok(())
    }
}

pub(super) fn put(
    transaction: &WriteTransaction,
    record: &ScheduleRecord,
) -> Result<(), redb::Error> {
    raise_schema(transaction, SCHEMA_WITH_BOOKMARKS)?;
    let mut table = transaction.open_table(SCHEDULES)?;
    table.insert(record.name.as_str(), encode(record)?.as_slice())?;
    Ok(())
}

pub(super) fn remove(transaction: &WriteTransaction, name: &str) -> Result<(), redb::Error> {
    transaction.open_table(SCHEDULES)?.remove(name)?;
    Ok(())
}
