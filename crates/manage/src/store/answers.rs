//! The answers of calls with keys in the store: the table `answers` by number.

use super::{Store, StoreError, encode};
use crate::call_key::KeptAnswer;
use redb::{
    ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition, TableError, WriteTransaction,
};
use std::collections::BTreeSet;

const ANSWERS: TableDefinition<u64, &[u8]> = TableDefinition::new("answers");

impl Store {
    /// Reads every answer.
    pub(super) fn load_answers(
        &self,
        transaction: &ReadTransaction,
    ) -> Result<Vec<KeptAnswer>, StoreError> {
        let table = match transaction.open_table(ANSWERS) {
            Ok(table) => table,
            Err(TableError::TableDoesNotExist(_)) => return Ok(vec![]),
            Err(error) => return Err(self.io_error(error)),
        };
        let (mut answers, mut keys) = (vec![], BTreeSet::new());
        for entry in table.iter().map_err(|e| self.io_error(e))? {
            let (seq, value) = entry.map_err(|e| self.io_error(e))?;
            let what = format!("the answer {}", seq.value());
            let answer: KeptAnswer = self.decode(&what, value.value())?;
            let is_its_own = answer.seq == seq.value();
            self.check_record(&what, is_its_own && keys.insert(answer.key.clone()))?;
            answers.push(answer);
        }
        Ok(answers)
    }

    /// Reads one answer.
    pub(crate) fn read_answer(&self, seq: u64) -> Result<KeptAnswer, StoreError> {
        let what = format!("the answer {seq}");
        let transaction = self.database.begin_read().map_err(|e| self.io_error(e))?;
        let table = transaction
            .open_table(ANSWERS)
            .map_err(|e| self.io_error(e))?;
        let found = table.get(seq).map_err(|e| self.io_error(e))?;
        let found = found.ok_or_else(|| self.damage_error(&format!("{what} is missing")))?;
        self.decode(&what, found.value())
    }
}

pub(super) fn put(transaction: &WriteTransaction, answer: &KeptAnswer) -> Result<(), redb::Error> {
    let mut table = transaction.open_table(ANSWERS)?;
    table.insert(answer.seq, encode(answer)?.as_slice())?;
    Ok(())
}

pub(super) fn remove(transaction: &WriteTransaction, seq: u64) -> Result<(), redb::Error> {
    transaction.open_table(ANSWERS)?.remove(seq)?;
    Ok(())
}
