//! EXCHANGE_ID and DESTROY_CLIENTID.

use super::clients::{Client, NewClient};
use super::events::RemovalReason;
use super::ids::ClientId;
use super::limits::{CLIENTS_MAX, OWNER_BYTES_MAX, UNCONFIRMED_MAX};
use super::listing::LeaseStatus;
use super::requests::{ExchangeIdArgs, ExchangeIdReply, StateProtection, exchange_flags};
use super::{NfsState, StateError};
use std::time::Instant;

fn reply(client: &Client) -> ExchangeIdReply {
    let confirmed = if client.is_confirmed() {
        exchange_flags::CONFIRMED_R
    } else {
        0
    };
    ExchangeIdReply {
        client: client.id,
        sequence: client.next_sequence,
        flags: exchange_flags::USE_NON_PNFS | confirmed,
    }
}

fn check_exchange_id(args: &ExchangeIdArgs<'_>) -> Result<(), StateError> {
    if args.flags & !exchange_flags::ARGUMENTS != 0 || args.owner.len() > OWNER_BYTES_MAX {
        return Err(StateError::Inval);
    }
    match args.protection {
        StateProtection::None => Ok(()),
        // A machine credential is one of RPCSEC_GSS.
        StateProtection::MachineCredential => Err(StateError::Inval),
        StateProtection::SecretStateVerifier => Err(StateError::EncrAlgUnsupp),
    }
}

impl NfsState {
    /// EXCHANGE_ID (RFC 8881 section 18.35). Section 18.35.4 has the cases:
    ///
    /// | case | confirmed record | verifier | principal | update | result |
    /// |---|---|---|---|---|---|
    /// | 1, 4 | none | | | no | a new record replaces an unconfirmed one |
    /// | 2 | yes | same | same | no | the record |
    /// | 3 | with state, lease runs | | differs | no | CLID_INUSE |
    /// | 3 | other | | differs | no | a new record; the old one ends at once |
    /// | 5 | yes | differs | same | no | a new record; CREATE_SESSION ends the old one |
    /// | 6 | yes | same | same | yes | the record |
    /// | 7 | none | | | yes | NOENT |
    /// | 8 | yes | differs | | yes | NOT_SAME |
    /// | 9 | yes | same | differs | yes | PERM |
    ///
    /// # Errors
    /// As above; INVAL for unknown flags and SP4_MACH_CRED, ENCR_ALG_UNSUPP for SP4_SSV, DELAY if the
    /// server has too many clients, or while an operator expires this one.
    pub fn exchange_id(
        &mut self,
        args: &ExchangeIdArgs<'_>,
        now: Instant,
    ) -> Result<ExchangeIdReply, StateError> {
        check_exchange_id(args)?;
        self.check_not_expiring(args.owner)?;
        let is_update = args.flags & exchange_flags::UPD_CONFIRMED_REC_A != 0;
        let Some(client) = self.clients.confirmed(args.owner) else {
            if is_update {
                return Err(StateError::NoEnt);
            }
            return self.add_client(args, now);
        };
        let is_same_run = client.verifier == args.verifier;
        let is_same_principal = client.principal == args.principal;
        match (is_update, is_same_run, is_same_principal) {
            (true, false, _) => Err(StateError::NotSame),
            (true, true, false) => Err(StateError::Perm),
            (_, true, true) => Ok(reply(client)),
            (false, false, true) => self.add_client(args, now),
            (false, _, false) if client.has_state() && !client.is_expired(now) => {
                Err(StateError::ClidInUse)
            }
            (false, _, false) => {
                let id = client.id;
                self.remove_client(id, RemovalReason::Replaced);
                self.add_client(args, now)
            }
        }
    }

    fn add_client(
        &mut self,
        args: &ExchangeIdArgs<'_>,
        now: Instant,
    ) -> Result<ExchangeIdReply, StateError> {
        if let Some(id) = self.clients.unconfirmed(args.owner) {
            self.remove_client(id, RemovalReason::Replaced);
        }
        if self.clients.with_status(LeaseStatus::Unconfirmed) >= UNCONFIRMED_MAX {
            self.remove_first(LeaseStatus::Unconfirmed);
        }
        if self.clients.len() >= CLIENTS_MAX
            && !self.remove_first(LeaseStatus::Courtesy)
            && !self.remove_first(LeaseStatus::Unconfirmed)
        {
            return Err(StateError::Delay);
        }
        let new = NewClient {
            owner: args.owner.into(),
            verifier: args.verifier,
            principal: args.principal,
            address: args.address,
        };
        Ok(reply(self.clients.insert(new, now)))
    }

    /// Removes the client of a status with the earliest deadline; false if there is none.
    pub(super) fn remove_first(&mut self, status: LeaseStatus) -> bool {
        let first = self.clients.first(status);
        first.is_some_and(|(_, id)| self.remove_client(id, RemovalReason::Limit))
    }

    /// DESTROY_CLIENTID (RFC 8881 section 18.50).
    ///
    /// # Errors
    /// If there is no such client, or it has sessions, opens or locks.
    pub fn destroy_client(&mut self, client: ClientId) -> Result<(), StateError> {
        let record = self.clients.get(client)?;
        if record.has_state() {
            return Err(StateError::ClientIdBusy);
        }
        self.revoke_reclaims(client);
        self.remove_client(client, RemovalReason::Destroyed);
        Ok(())
    }
}
