//! Tokens in the store: the table `tokens` by UUID, and two keys of `meta`.

use super::{META, Store, StoreContents, StoreError, encode};
use crate::access::TokenRecord;
use redb::{ReadTransaction, ReadableTable, TableDefinition, TableError, WriteTransaction};
use std::collections::BTreeSet;
use uuid::Uuid;

const TOKENS: TableDefinition<u128, &[u8]> = TableDefinition::new("tokens");
/// The key of `meta` with the last mark of token time, in seconds since 1970.
const TOKEN_MARK: &str = "token_time_unix_s";
/// The key of `meta` that is there once the first admin token was made.
const ADMIN_TOKEN_MADE: &str = "admin_token_made";

impl Store {
    /// Reads the tokens, the mark of token time, and whether the first admin token was made.
    pub(super) fn load_tokens(
        &self,
        transaction: &ReadTransaction,
        contents: &mut StoreContents,
    ) -> Result<(), StoreError> {
        let meta = transaction.open_table(META).map_err(|e| self.io_error(e))?;
        if let Some(mark) = meta.get(TOKEN_MARK).map_err(|e| self.io_error(e))? {
            let mark = mark.value().parse();
            contents.token_mark_unix_s =
                mark.map_err(|_| self.damage_error("the mark of token time is no number"))?;
        }
        let made = meta.get(ADMIN_TOKEN_MADE).map_err(|e| self.io_error(e))?;
        contents.admin_token_made = made.is_some();
        let table = match transaction.open_table(TOKENS) {
            Ok(table) => table,
            Err(TableError::TableDoesNotExist(_)) => return Ok(()),
            Err(error) => return Err(self.io_error(error)),
        };
        let mut names = BTreeSet::new();
        for entry in table.iter().map_err(|e| self.io_error(e))? {
            let (key, value) = entry.map_err(|e| self.io_error(e))?;
            let what = format!("the token {}", Uuid::from_u128(key.value()));
            let token: TokenRecord = self.decode(&what, value.value())?;
            let is_its_own = token.id.as_u128() == key.value();
            self.check_record(&what, is_its_own && names.insert(token.name.clone()))?;
            contents.tokens.push(token);
        }
        Ok(())
    }
}

pub(super) fn put(transaction: &WriteTransaction, record: &TokenRecord) -> Result<(), redb::Error> {
    let mut table = transaction.open_table(TOKENS)?;
    table.insert(record.id.as_u128(), encode(record)?.as_slice())?;
    Ok(())
}

pub(super) fn remove(transaction: &WriteTransaction, id: Uuid) -> Result<(), redb::Error> {
    transaction.open_table(TOKENS)?.remove(id.as_u128())?;
    Ok(())
}

pub(super) fn set_mark(
    transaction: &WriteTransaction,
    mark_unix_s: u64,
) -> Result<(), redb::Error> {
    let mut meta = transaction.open_table(META)?;
    meta.insert(TOKEN_MARK, mark_unix_s.to_string().as_str())?;
    Ok(())
}

pub(super) fn note_admin_token(transaction: &WriteTransaction) -> Result<(), redb::Error> {
    transaction.open_table(META)?.insert(ADMIN_TOKEN_MADE, "")?;
    Ok(())
}
