//! Events in the store: the table `events` by sequence number, and a key of `meta`.

use super::{META, Store, StoreContents, StoreError, encode};
use crate::events::EventRecord;
use redb::{ReadTransaction, ReadableTable, TableDefinition, TableError, WriteTransaction};

const EVENTS: TableDefinition<u64, &[u8]> = TableDefinition::new("events");
/// The key of `meta` with the highest number of an event that was dropped for lack of room.
const DROPPED_SEQ: &str = "dropped_event_seq";

impl Store {
    /// Reads the events, and the number of the last dropped one.
    pub(super) fn load_events(
        &self,
        transaction: &ReadTransaction,
        contents: &mut StoreContents,
    ) -> Result<(), StoreError> {
        let meta = transaction.open_table(META).map_err(|e| self.io_error(e))?;
        if let Some(dropped) = meta.get(DROPPED_SEQ).map_err(|e| self.io_error(e))? {
            let dropped = dropped.value().parse();
            contents.dropped_event_seq = dropped
                .map_err(|_| self.damage_error("the mark of dropped events is no number"))?;
        }
        let table = match transaction.open_table(EVENTS) {
            Ok(table) => table,
            Err(TableError::TableDoesNotExist(_)) => return Ok(()),
            Err(error) => return Err(self.io_error(error)),
        };
        for entry in table.iter().map_err(|e| self.io_error(e))? {
            let (seq, value) = entry.map_err(|e| self.io_error(e))?;
            let what = format!("the event {}", seq.value());
            let event: EventRecord = self.decode(&what, value.value())?;
            self.check_record(&what, event.seq == seq.value())?;
            contents.events.push(event);
        }
        Ok(())
    }
}

pub(super) fn put(transaction: &WriteTransaction, event: &EventRecord) -> Result<(), redb::Error> {
    let mut table = transaction.open_table(EVENTS)?;
    table.insert(event.seq, encode(event)?.as_slice())?;
    Ok(())
}

pub(super) fn remove(transaction: &WriteTransaction, seq: u64) -> Result<(), redb::Error> {
    transaction.open_table(EVENTS)?.remove(seq)?;
    Ok(())
}

pub(super) fn set_dropped(transaction: &WriteTransaction, seq: u64) -> Result<(), redb::Error> {
    let mut meta = transaction.open_table(META)?;
    meta.insert(DROPPED_SEQ, seq.to_string().as_str())?;
    Ok(())
}
