//! OPEN, OPEN_DOWNGRADE, CLOSE, FREE_STATEID and TEST_STATEID.

use super::ids::{ClientId, FileKey, StateId, StateNo};
use super::limits::{OPENS_MAX, OPENS_PER_CLIENT_MAX, OWNER_BYTES_MAX};
use super::listing::LeaseStatus;
use super::requests::{OpenArgs, OpenGrant, ShareBits};
use super::shares::OwnerKind;
use super::{NfsState, StateError};
use std::time::Instant;

impl NfsState {
    /// The stateid of a state with this sequence number.
    pub(super) fn stateid(&self, number: StateNo, seqid: u32) -> StateId {
        StateId::new(self.instance, number, seqid)
    }

    /// Whether the client may open files of a file system now. OPEN calls it before it creates a file. It
    /// puts the client into the list of the file system before the first open there that is no reclaim.
    ///
    /// # Errors
    /// GRACE before the client has completed its reclaims, and in the grace period. For a reclaim
    /// NO_GRACE after either, and RECLAIM_BAD if the client was not known before the restart.
    pub fn check_open(
        &mut self,
        client: ClientId,
        export: u32,
        is_reclaim: bool,
        now: Instant,
    ) -> Result<(), StateError> {
        // Its expiry waits for the lists that it was in at the order.
        if self.clients.get(client)?.is_expiring {
            return Err(StateError::Delay);
        }
        self.check_grace(client, export, is_reclaim, now)?;
        match is_reclaim {
            true => Ok(()),
            false => self.list_client(client, export),
        }
    }

    /// Whether the limits of opens allow one more. OPEN calls it before it creates a file, because a refusal must leave none.
    /// [`Self::open`] does not ask again for a new file, so that requests in progress may exceed the limits by one open each.
    ///
    /// # Errors
    /// INVAL for a long owner, and DELAY if there are too many opens.
    pub fn check_new_open(&mut self, client: ClientId, owner: &[u8]) -> Result<(), StateError> {
        if owner.len() > OWNER_BYTES_MAX {
            return Err(StateError::Inval);
        }
        self.check_open_limits(client)
    }

    /// OPEN of a file that exists (RFC 8881 section 18.16). A further OPEN of the same owner adds its
    /// bits to the open. Expired clients in the way lose their state.
    ///
    /// # Errors
    /// Those of [`Self::check_open`], INVAL for no access or a long owner, SHARE_DENIED or
    /// RECLAIM_CONFLICT, and DELAY if there are too many opens.
    pub fn open(&mut self, args: &OpenArgs<'_>, now: Instant) -> Result<OpenGrant, StateError> {
        let export = args.file.export;
        self.check_grace(args.client, export, args.is_reclaim, now)?;
        if args.access == ShareBits::NONE || args.owner.len() > OWNER_BYTES_MAX {
            return Err(StateError::Inval);
        }
        self.make_way(args, now)?;
        let client = self.clients.get(args.client)?;
        let own = self
            .shares
            .state_of(client, args.owner, OwnerKind::Open, &args.file);
        let upgraded = own.and_then(|number| {
            let seqid = self.shares.upgrade(number, args.access, args.deny)?;
            Some((number, seqid))
        });
        self.note_use(args, now)?;
        if let Some((number, seqid)) = upgraded {
            return Ok(OpenGrant {
                stateid: self.stateid(number, seqid),
                is_first_of_file: false,
            });
        }
        if !args.is_new_file {
            self.check_open_limits(args.client)?;
        }
        let client = self.clients.get_mut(args.client)?;
        let bits = (args.access, args.deny);
        let (number, is_first_of_file) = self.shares.add_open(client, args.owner, args.file, bits);
        Ok(OpenGrant {
            stateid: self.stateid(number, 1),
            is_first_of_file,
        })
    }

    /// Lists the client, or notes the reclaim for its RECLAIM_COMPLETE.
    fn note_use(&mut self, args: &OpenArgs<'_>, now: Instant) -> Result<(), StateError> {
        let export = args.file.export;
        if !args.is_reclaim {
            return self.list_client(args.client, export);
        }
        self.grace.extend(now);
        let client = self.clients.get_mut(args.client)?;
        client.reclaimed_in.insert(export);
        Ok(())
    }

    /// Removes expired clients with conflicting opens.
    fn make_way(&mut self, args: &OpenArgs<'_>, now: Instant) -> Result<(), StateError> {
        let client = self.clients.get(args.client)?;
        let Some(file) = self.shares.files.get(&args.file) else {
            return Ok(());
        };
        let own = self
            .shares
            .state_of(client, args.owner, OwnerKind::Open, &args.file);
        let own_open = own.and_then(|it| self.shares.opens.get(&it));
        if !file.conflicts(args.access, args.deny, own_open) {
            return Ok(());
        }
        let error = if args.is_reclaim {
            StateError::ReclaimConflict
        } else {
            StateError::ShareDenied
        };
        let others = file.states.iter().filter(|it| Some(*it) != own);
        let others = others.filter_map(|it| self.shares.opens.get(&it));
        let conflicts =
            others.filter(|it| it.access.overlaps(args.deny) || it.deny.overlaps(args.access));
        let mut clients: Vec<ClientId> = conflicts.map(|it| it.client).collect();
        clients.sort_unstable();
        clients.dedup();
        if clients.contains(&args.client) {
            return Err(error);
        }
        self.expire_for_conflict(&clients, now, error)
    }

    fn check_open_limits(&mut self, client: ClientId) -> Result<(), StateError> {
        if self.clients.get(client)?.opens.len() >= OPENS_PER_CLIENT_MAX {
            return Err(StateError::Delay);
        }
        while self.shares.opens.len() >= OPENS_MAX {
            if !self.remove_first(LeaseStatus::Courtesy) {
                return Err(StateError::Delay);
            }
        }
        Ok(())
    }

    /// OPEN_DOWNGRADE (RFC 8881 section 18.18).
    ///
    /// # Errors
    /// Those of the stateid, and INVAL if the bits are not the union of bits of some OPENs.
    pub fn open_downgrade(
        &mut self,
        client: ClientId,
        stateid: StateId,
        file: FileKey,
        access: ShareBits,
        deny: ShareBits,
    ) -> Result<StateId, StateError> {
        let number = self
            .shares
            .open_of(client, stateid, Some(&file), self.instance)?;
        if access == ShareBits::NONE {
            return Err(StateError::Inval);
        }
        let seqid = self.shares.downgrade(number, access, deny)?;
        Ok(self.stateid(number, seqid))
    }

    /// CLOSE (RFC 8881 section 18.2). Locks by this open alone are unlocked. The result is
    /// [`StateId::INVALID`].
    ///
    /// # Errors
    /// Those of the stateid.
    pub fn close(
        &mut self,
        client: ClientId,
        stateid: StateId,
        file: FileKey,
    ) -> Result<StateId, StateError> {
        let number = self
            .shares
            .open_of(client, stateid, Some(&file), self.instance)?;
        let record = self.clients.get_mut(client)?;
        self.shares.remove_open(number, record, &mut self.events);
        Ok(StateId::INVALID)
    }

    /// FREE_STATEID (RFC 8881 section 18.38): drops a lock state without locks.
    ///
    /// # Errors
    /// Those of the stateid, and LOCKS_HELD for an open, or with locks.
    pub fn free_stateid(&mut self, client: ClientId, stateid: StateId) -> Result<(), StateError> {
        self.test_stateid(client, stateid)?;
        let number = self
            .shares
            .lock_of(client, stateid, None, self.instance)
            .map_err(|_| StateError::LocksHeld)?;
        if self.locked_ranges(number) > 0 {
            return Err(StateError::LocksHeld);
        }
        let client = self.clients.get_mut(client)?;
        self.shares.remove_lock_state(number, client);
        Ok(())
    }

    /// The locked ranges of a lock state.
    pub(super) fn locked_ranges(&self, lock_state: StateNo) -> usize {
        let ranges = self.shares.locks.get(&lock_state).and_then(|state| {
            let file = self.shares.files.get(&state.file)?;
            Some(file.locks.as_ref()?.owner_ranges(state.owner))
        });
        ranges.unwrap_or(0)
    }

    /// The status of one stateid of TEST_STATEID (RFC 8881 section 18.48).
    ///
    /// # Errors
    /// The status.
    pub fn test_stateid(&self, client: ClientId, stateid: StateId) -> Result<(), StateError> {
        let open = self.shares.open_of(client, stateid, None, self.instance);
        match open {
            Err(StateError::BadStateId) => self
                .shares
                .lock_of(client, stateid, None, self.instance)
                .map(|_| ()),
            other => other.map(|_| ()),
        }
    }
}
