//! LOCK, LOCKT and LOCKU.

use super::ids::{ClientId, FileKey, OwnerNo, StateId, StateNo};
use super::limits::{
    LOCK_STATES_MAX, LOCK_STATES_PER_CLIENT_MAX, OWNER_BYTES_MAX, RANGES_MAX, RANGES_PER_LOCK_MAX,
};
use super::listing::LeaseStatus;
use super::locks::{Lock, LockKind, LockRange, LockRefusal, TableFull};
use super::requests::{LockArgs, LockDenied, LockError, Locker, ShareBits};
use super::shares::{OwnerKind, Shares, next_seqid};
use super::{NfsState, StateError};
use std::time::Instant;

/// The lock state of a request, and the open that a new locker names.
struct LockerState {
    lock: Option<StateNo>,
    open: Option<StateNo>,
    access: ShareBits,
}

fn needed_access(kind: LockKind) -> ShareBits {
    match kind {
        LockKind::Read => ShareBits::READ,
        LockKind::Write => ShareBits::WRITE,
    }
}

fn denied_lock(args: &LockArgs<'_>, denied: LockDenied) -> LockError {
    match args.is_reclaim {
        true => StateError::ReclaimConflict.into(),
        false => LockError::Denied(denied),
    }
}

impl NfsState {
    fn locker(&self, args: &LockArgs<'_>) -> Result<LockerState, StateError> {
        let (client, file, instance) = (args.client, Some(&args.file), self.instance);
        match args.locker {
            Locker::Existing(stateid) => {
                let lock = self.shares.lock_of(client, stateid, file, instance)?;
                let state = self.shares.locks.get(&lock);
                Ok(LockerState {
                    lock: Some(lock),
                    open: None,
                    access: state.map_or(ShareBits::NONE, |it| self.shares.lock_access(it)),
                })
            }
            Locker::New { open, owner } => {
                let open = self.shares.open_of(client, open, file, instance)?;
                if owner.len() > OWNER_BYTES_MAX {
                    return Err(StateError::Inval);
                }
                let client = self.clients.get(client)?;
                let lock = self
                    .shares
                    .state_of(client, owner, OwnerKind::Lock, &args.file);
                let access = self.shares.opens.get(&open).map(|it| it.access);
                Ok(LockerState {
                    lock,
                    open: Some(open),
                    access: access.unwrap_or(ShareBits::NONE),
                })
            }
        }
    }

    /// Removes expired clients with conflicting locks, one after the other.
    fn unlock_way(
        &mut self,
        client: ClientId,
        owner: Option<OwnerNo>,
        file: &FileKey,
        (range, kind): (LockRange, LockKind),
        now: Instant,
    ) -> Result<(), LockDenied> {
        while let Some(conflict) = self.lock_conflict(owner, file, range, kind) {
            let others = [conflict.client];
            let error = StateError::Delay;
            if conflict.client == client || self.expire_for_conflict(&others, now, error).is_err() {
                return Err(conflict);
            }
        }
        Ok(())
    }

    fn lock_conflict(
        &self,
        owner: Option<OwnerNo>,
        file: &FileKey,
        range: LockRange,
        kind: LockKind,
    ) -> Option<LockDenied> {
        let table = self.shares.files.get(file)?.locks.as_ref()?;
        let conflict = table.conflict(owner, range, kind)?;
        let owner = self.shares.owners.get(&conflict.owner)?;
        Some(LockDenied {
            range: conflict.range,
            kind: conflict.kind,
            client: owner.client,
            owner: owner.name.clone(),
        })
    }

    fn checked_locker(
        &mut self,
        args: &LockArgs<'_>,
        now: Instant,
    ) -> Result<(LockerState, Option<OwnerNo>), StateError> {
        self.check_grace(args.client, args.file.export, args.is_reclaim, now)?;
        let locker = self.locker(args)?;
        if !locker.access.contains(needed_access(args.kind)) {
            return Err(StateError::OpenMode);
        }
        let state = locker.lock.and_then(|it| self.shares.locks.get(&it));
        let owner = state.map(|it| it.owner);
        Ok((locker, owner))
    }

    /// The first part of LOCK: expired clients in the way, or in need of room, lose their state. Their records are
    /// durable before [`Self::lock`], which changes nothing that a failed write would have to undo.
    ///
    /// # Errors
    /// Those of [`Self::lock`].
    pub fn prepare_lock(&mut self, args: &LockArgs<'_>, now: Instant) -> Result<(), LockError> {
        let (locker, owner) = self.checked_locker(args, now)?;
        let wanted = (args.range, args.kind);
        self.unlock_way(args.client, owner, &args.file, wanted, now)
            .map_err(|denied| denied_lock(args, denied))?;
        if locker.lock.is_none() {
            self.make_room_for_lock_state();
        }
        self.make_room_for_ranges();
        Ok(())
    }

    /// LOCK (RFC 8881 section 18.10), after [`Self::prepare_lock`]. It removes no client.
    ///
    /// # Errors
    /// DENIED with the lock in the way, RECLAIM_CONFLICT, the errors of the stateid and of the grace
    /// period, OPENMODE, INVAL for a long owner, and DELAY if there are too many locks.
    pub fn lock(&mut self, args: &LockArgs<'_>, now: Instant) -> Result<StateId, LockError> {
        let (locker, owner) = self.checked_locker(args, now)?;
        if let Some(denied) = self.lock_conflict(owner, &args.file, args.range, args.kind) {
            return Err(denied_lock(args, denied));
        }
        let (number, is_new) = self.lock_state(args, &locker)?;
        if let Err(refusal) = self.lock_range(number, args) {
            if is_new {
                let client = self.clients.get_mut(args.client)?;
                self.shares.remove_lock_state(number, client);
            }
            return Err(refusal.into());
        }
        if args.is_reclaim {
            self.grace.extend(now);
        }
        Ok(self.changed_lock(number)?)
    }

    /// The lock state of the locker, and whether it is new.
    fn lock_state(
        &mut self,
        args: &LockArgs<'_>,
        locker: &LockerState,
    ) -> Result<(StateNo, bool), StateError> {
        match (locker.lock, locker.open, args.locker) {
            (Some(lock), open, _) => {
                if let Some(open) = open {
                    self.shares.join(lock, open);
                }
                Ok((lock, false))
            }
            (None, Some(open), Locker::New { owner, .. }) => {
                self.check_lock_limits(args.client)?;
                let client = self.clients.get_mut(args.client)?;
                let added = self.shares.add_lock_state(client, owner, open);
                Ok((added.ok_or(StateError::BadStateId)?, true))
            }
            _ => Err(StateError::BadStateId),
        }
    }

    /// Removes expired clients while there are too many lock states.
    fn make_room_for_lock_state(&mut self) {
        while self.shares.locks.len() >= LOCK_STATES_MAX && self.remove_first(LeaseStatus::Courtesy)
        {
        }
    }

    /// Removes expired clients while there are too many ranges.
    fn make_room_for_ranges(&mut self) {
        while self.shares.ranges() + RANGES_PER_LOCK_MAX > RANGES_MAX
            && self.remove_first(LeaseStatus::Courtesy)
        {}
    }

    fn check_lock_limits(&self, client: ClientId) -> Result<(), StateError> {
        let of_client = self.clients.get(client)?.lock_states.len();
        match of_client >= LOCK_STATES_PER_CLIENT_MAX || self.shares.locks.len() >= LOCK_STATES_MAX
        {
            true => Err(StateError::Delay),
            false => Ok(()),
        }
    }

    fn lock_range(&mut self, number: StateNo, args: &LockArgs<'_>) -> Result<(), StateError> {
        let limits = self.shares.lock_limits(&args.file);
        let state = self.shares.locks.get(&number);
        let lock = Lock {
            owner: state.ok_or(StateError::BadStateId)?.owner,
            range: args.range,
            kind: args.kind,
        };
        let locked = self
            .shares
            .with_locks(&args.file, |table| table.lock(lock, limits));
        match locked.ok_or(StateError::BadStateId)? {
            Ok(()) => Ok(()),
            // The conflicts are gone, so that it is the limit.
            Err(LockRefusal::Full | LockRefusal::Conflict(_)) => Err(StateError::Delay),
        }
    }

    /// The stateid of a lock state after a change.
    fn changed_lock(&mut self, number: StateNo) -> Result<StateId, StateError> {
        let state = self.shares.locks.get_mut(&number);
        let state = state.ok_or(StateError::BadStateId)?;
        state.seqid = next_seqid(state.seqid);
        let seqid = state.seqid;
        Ok(self.stateid(number, seqid))
    }

    /// LOCKT (RFC 8881 section 18.11). Expired clients in the way lose their state.
    ///
    /// # Errors
    /// DENIED with the lock in the way, and GRACE in the grace period.
    pub fn test_lock(
        &mut self,
        client: ClientId,
        file: FileKey,
        owner: &[u8],
        (range, kind): (LockRange, LockKind),
        now: Instant,
    ) -> Result<(), LockError> {
        self.update_grace(now);
        let owner = Shares::lock_owner(self.clients.get(client)?, owner);
        if self.is_in_grace() {
            return Err(StateError::Grace.into());
        }
        self.unlock_way(client, owner, &file, (range, kind), now)
            .map_err(LockError::Denied)
    }

    /// LOCKU (RFC 8881 section 18.12).
    ///
    /// # Errors
    /// Those of the stateid, and DELAY if the unlock splits a range and there are too many.
    pub fn unlock(
        &mut self,
        client: ClientId,
        stateid: StateId,
        file: FileKey,
        range: LockRange,
    ) -> Result<StateId, StateError> {
        let number = self
            .shares
            .lock_of(client, stateid, Some(&file), self.instance)?;
        let owner = self.shares.locks.get(&number).map(|it| it.owner);
        let owner = owner.ok_or(StateError::BadStateId)?;
        let limits = self.shares.lock_limits(&file);
        let unlocked = self
            .shares
            .with_locks(&file, |table| table.unlock(owner, range, limits));
        if let Some(Err(TableFull)) = unlocked {
            return Err(StateError::Delay);
        }
        self.changed_lock(number)
    }
}
