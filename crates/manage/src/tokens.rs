//! The manager's calls about tokens.
//!
//! Invariants: memory changes only after the store. A look-up never waits for the store: changes hold
//! the lock of the manager's state, and the lock of the tokens only to read or replace records.

mod first_admin;
mod token_events;

pub(crate) use first_admin::create_at_first_start;
pub use first_admin::{ADMIN_TOKEN_FILE, AdminTokenOutput};

use crate::access::{
    BookError, EXPIRES_S_MAX, Identity, TOKENS_MAX, TokenBook, TokenName, TokenRecord, TokenRole,
    TokenSecret,
};
use crate::events::EventDraft;
use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::store::{StoreError, StoreWrite};
use crate::wire::{CreateToken, CreatedToken, TokenInfo};
use std::io;
use std::net::IpAddr;
use uuid::Uuid;

/// A change of the tokens.
#[derive(Default)]
struct BookChange {
    removed: Vec<Uuid>,
    put: Vec<TokenRecord>,
    is_first_admin: bool,
    events: Vec<EventDraft>,
}

impl Manager {
    /// The identity of a token, if it is valid now.
    #[must_use]
    pub fn identify(&self, token: &TokenSecret) -> Option<Identity> {
        let hash = token.hash();
        let mut book = self.access.book();
        let now = self.token_time(&mut book);
        let record = book.find(&hash, now)?;
        Some(Identity {
            role: record.role.into(),
            name: record.name.as_str().into(),
            token: Some(record.id),
        })
    }

    /// Whether the identity behind a request is still valid. A stream asks again every few seconds,
    /// and ends when the token of its request is revoked or has expired.
    #[must_use]
    pub fn is_still_valid(&self, identity: &Identity) -> bool {
        let Some(id) = identity.token else {
            return true;
        };
        let mut book = self.access.book();
        let now = self.token_time(&mut book);
        book.is_valid(id, now)
    }

    /// Every token, without the tokens themselves.
    #[must_use]
    pub fn tokens(&self) -> Vec<TokenInfo> {
        let mut book = self.access.book();
        let now = self.token_time(&mut book);
        let all = book.list().into_iter();
        all.map(|record| token_info(record, now)).collect()
    }

    /// A token, by its id.
    #[must_use]
    pub fn token(&self, id: Uuid) -> Option<TokenInfo> {
        let mut book = self.access.book();
        let now = self.token_time(&mut book);
        book.get(id).map(|record| token_info(record, now))
    }

    /// Creates a token. Only the answer has it.
    ///
    /// # Errors
    /// When the name is taken, the life is too long, or there are too many tokens.
    pub fn create_token(&self, request: &CreateToken) -> Result<CreatedToken, Fault> {
        let random = TokenSecret::random().map_err(Fault::Random)?;
        self.add_token(request, random, false)
    }

    /// Revokes a token: the next request with it is refused.
    ///
    /// # Errors
    /// When there is none with this id.
    pub fn revoke_token(&self, id: Uuid) -> Result<(), Fault> {
        let mut state = self.state();
        let token = self.token(id).ok_or(Fault::NoSuchToken(id))?;
        let change = BookChange {
            removed: vec![id],
            events: vec![token_events::revoked(&token, &self.actor())],
            ..BookChange::default()
        };
        Ok(self.commit_tokens(&mut state, change)?)
    }

    /// Writes into the records of expired tokens that they have expired, and renews the mark of token
    /// time.
    pub(crate) fn store_expired_tokens(&self) {
        let mut state = self.state();
        let (put, is_due) = {
            let mut book = self.access.book();
            let now = self.token_time(&mut book);
            (book.newly_expired(now), book.needs_mark(now))
        };
        if (put.is_empty() && !is_due) || self.store.has_failed() {
            return;
        }
        let change = BookChange {
            put,
            ..BookChange::default()
        };
        if let Err(error) = self.commit_tokens(&mut state, change) {
            tracing::error!(%error, "cannot note the expired tokens");
        }
    }

    /// Creates the first admin token, if this store never had one. `deliver` takes the token before
    /// it is valid.
    fn create_first_admin_token(
        &self,
        deliver: impl FnOnce(&TokenSecret) -> io::Result<()>,
    ) -> Result<bool, Fault> {
        if self.access.had_admin_token {
            return Ok(false);
        }
        let token = TokenSecret::random().map_err(Fault::Random)?;
        deliver(&token).map_err(Fault::AdminToken)?;
        let request = CreateToken {
            name: first_admin_name(),
            role: TokenRole::Admin,
            expires_s: None,
        };
        self.add_token(&request, token, true)?;
        Ok(true)
    }

    fn add_token(
        &self,
        request: &CreateToken,
        token: TokenSecret,
        is_first_admin: bool,
    ) -> Result<CreatedToken, Fault> {
        if let Some(life_s) = request.expires_s
            && !(1..=EXPIRES_S_MAX).contains(&life_s)
        {
            let what = format!("a token lives 1 to {EXPIRES_S_MAX} seconds, not {life_s}");
            return Err(Fault::invalid_field(what, "choose another time"));
        }
        let mut state = self.state();
        let (removed, now) = {
            let mut book = self.access.book();
            let now = self.token_time(&mut book);
            let room = book.make_room(&request.name, now);
            (room.map_err(|error| book_fault(error, &request.name))?, now)
        };
        let record = TokenRecord {
            id: (self.settings.new_id)(),
            name: request.name.clone(),
            role: request.role,
            hash: token.hash(),
            created_unix_s: now,
            expires_unix_s: request.expires_s.map(|life_s| now.saturating_add(life_s)),
            expired: false,
        };
        let info = token_info(&record, now);
        let change = BookChange {
            removed,
            events: vec![token_events::created(&record, &self.actor())],
            put: vec![record],
            is_first_admin,
        };
        self.commit_tokens(&mut state, change)?;
        Ok(CreatedToken {
            token: token.expose().to_owned(),
            info,
        })
    }

    /// Stores a change with its events and a mark of token time, then applies it.
    fn commit_tokens(
        &self,
        state: &mut ManagerState,
        change: BookChange,
    ) -> Result<(), StoreError> {
        let mark_unix_s = self.token_time(&mut self.access.book());
        let mut writes = vec![StoreWrite::SetTokenMark(mark_unix_s)];
        writes.extend(change.removed.iter().map(|id| StoreWrite::RemoveToken(*id)));
        writes.extend(change.put.iter().map(StoreWrite::PutToken));
        if change.is_first_admin {
            writes.push(StoreWrite::NoteAdminTokenMade);
        }
        self.commit(state, &writes, change.events)?;
        let mut book = self.access.book();
        for id in change.removed {
            book.remove(id);
        }
        for record in change.put {
            book.put(record);
        }
        book.set_mark(mark_unix_s);
        Ok(())
    }

    /// Records that an address has sent too many wrong tokens.
    pub(crate) fn record_wrong_tokens(&self, peer: IpAddr) {
        let event = token_events::login_refused(peer);
        if let Err(error) = self.commit(&mut self.state(), &[], vec![event]) {
            tracing::error!(%error, "cannot record an event");
        }
    }

    /// Token time now, in seconds since 1970.
    pub(crate) fn token_time_now(&self) -> u64 {
        self.token_time(&mut self.access.book())
    }

    fn token_time(&self, book: &mut TokenBook) -> u64 {
        book.now(self.clock.elapsed(), self.clock.unix_s())
    }
}

/// The name of the token of the first start.
fn first_admin_name() -> TokenName {
    "admin".parse().expect("letters are a name")
}

fn book_fault(error: BookError, name: &TokenName) -> Fault {
    match error {
        BookError::NameTaken => Fault::TokenExists(name.clone()),
        BookError::Full => Fault::TooMany {
            what: "tokens",
            most: TOKENS_MAX,
        },
    }
}

fn token_info(record: &TokenRecord, now_unix_s: u64) -> TokenInfo {
    TokenInfo {
        id: record.id,
        name: record.name.clone(),
        role: record.role,
        created_unix_s: record.created_unix_s,
        expires_unix_s: record.expires_unix_s,
        expired: record.is_expired(now_unix_s),
    }
}
