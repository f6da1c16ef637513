//! The tokens of a manager, behind a lock of their own.

use super::token_book::TokenBook;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The tokens of a manager.
pub(crate) struct AccessState {
    book: Mutex<TokenBook>,
    /// Whether the store had a first admin token at the manager's start.
    pub(crate) had_admin_token: bool,
}

impl AccessState {
    pub(crate) fn new(book: TokenBook, had_admin_token: bool) -> AccessState {
        AccessState {
            book: Mutex::new(book),
            had_admin_token,
        }
    }

    /// Locks the tokens. A panic leaves them consistent, because each change is one call.
    pub(crate) fn book(&self) -> MutexGuard<'_, TokenBook> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
