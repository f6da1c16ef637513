//! The checks of READ, WRITE and SETATTR of the size.

use super::ids::{ClientId, FileKey, StateId, StateIdKind, StateNo};
use super::requests::{IoAccess, ShareBits};
use super::shares::check_seqid;
use super::{NfsState, StateError};
use std::time::Instant;

impl IoAccess {
    fn bits(self) -> ShareBits {
        match self {
            Self::Read => ShareBits::READ,
            Self::Write => ShareBits::WRITE,
        }
    }
}

impl NfsState {
    /// Checks the stateid of an access to data (RFC 8881 sections 8.2 and 9.1). The anonymous
    /// stateid, and the READ bypass stateid in a WRITE, allow the access if no open denies it. READ
    /// bypass allows every READ. An open for WRITE allows READs that no open denies, since clients
    /// read parts of pages before they write.
    ///
    /// # Errors
    /// Those of the stateid, OPENMODE, LOCKED, and GRACE for a special stateid in the grace period.
    pub fn check_io(
        &mut self,
        client: ClientId,
        stateid: StateId,
        file: FileKey,
        access: IoAccess,
        now: Instant,
    ) -> Result<(), StateError> {
        let kind = stateid.kind(self.instance);
        let number = match kind {
            StateIdKind::ReadBypass if access == IoAccess::Read => return Ok(()),
            StateIdKind::Anonymous | StateIdKind::ReadBypass => {
                self.update_grace(now);
                if self.is_in_grace() {
                    return Err(StateError::Grace);
                }
                return self.check_io_without_state(file, access, now);
            }
            StateIdKind::Stale => return Err(StateError::StaleStateId),
            StateIdKind::Current | StateIdKind::Reserved => return Err(StateError::BadStateId),
            StateIdKind::Numbered(number) => number,
        };
        let (owner, of_file, seqid, allowed) = if let Some(open) = self.shares.opens.get(&number) {
            (open.client, open.file, open.seqid, open.access)
        } else {
            let state = self.shares.locks.get(&number);
            let state = state.ok_or(StateError::BadStateId)?;
            let allowed = self.shares.lock_access(state);
            (state.client, state.file, state.seqid, allowed)
        };
        if owner != client || of_file != file {
            return Err(StateError::BadStateId);
        }
        check_seqid(stateid.seqid, seqid)?;
        match access {
            _ if allowed.contains(access.bits()) => Ok(()),
            IoAccess::Read => {
                let lock = self.shares.locks.get(&number);
                let own = lock.map_or_else(|| vec![number], |it| it.opens.clone());
                self.check_denials(file, access, &own, now)
            }
            IoAccess::Write => Err(StateError::OpenMode),
        }
    }

    /// Checks an access of a protocol without opens, as NFSv3. Expired clients with opens that deny it
    /// lose their state.
    ///
    /// # Errors
    /// LOCKED if an open denies it. NFSv3 answers with NFS3ERR_JUKEBOX.
    pub fn check_io_without_state(
        &mut self,
        file: FileKey,
        access: IoAccess,
        now: Instant,
    ) -> Result<(), StateError> {
        self.check_denials(file, access, &[], now)
    }

    /// Whether an open that is not of `own` denies the access.
    fn check_denials(
        &mut self,
        file: FileKey,
        access: IoAccess,
        own: &[StateNo],
        now: Instant,
    ) -> Result<(), StateError> {
        let Some(open_file) = self.shares.files.get(&file) else {
            return Ok(());
        };
        if !open_file.conflicts(access.bits(), ShareBits::NONE, None) {
            return Ok(());
        }
        let states = open_file.states.iter().filter(|it| !own.contains(it));
        let opens = states.filter_map(|it| self.shares.opens.get(&it));
        let denying = opens.filter(|it| it.deny.overlaps(access.bits()));
        let mut clients: Vec<ClientId> = denying.map(|it| it.client).collect();
        clients.sort_unstable();
        clients.dedup();
        self.expire_for_conflict(&clients, now, StateError::Locked)
    }
}
