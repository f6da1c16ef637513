//! The tables of opens, lock states, files and owners.
//!
//! Invariants: an open owner has one open per file, and a lock owner one lock state per file. A file
//! is in the table while it has opens. A lock state has at least one open of its file; it goes with
//! the last of them, and its locks go with it. An owner is in the table while it has states. The
//! counts of a file follow from the share bits of its opens, and the counts of all files from the files.

use super::StateError;
use super::clients::Client;
use super::events::StateEvent;
use super::ids::{ClientId, FileKey, Instance, OwnerNo, StateId, StateIdKind, StateNo};
use super::limits::{RANGES_MAX, RANGES_PER_FILE_MAX, RANGES_PER_OWNER_MAX};
use super::locks::{LockTable, LockTableLimits};
use super::owner_states::OwnerStates;
use super::requests::ShareBits;
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OwnerKind {
    Open,
    Lock,
}

#[derive(Debug)]
pub(super) struct Owner {
    pub(super) client: ClientId,
    pub(super) name: Arc<[u8]>,
    kind: OwnerKind,
    states: u32,
}

/// The state of an open.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) client: ClientId,
    owner: OwnerNo,
    pub(super) file: FileKey,
    pub(super) access: ShareBits,
    pub(super) deny: ShareBits,
    /// The pairs of access and deny of its OPENs, as bits.
    modes: OpenModes,
    pub(super) seqid: u32,
    /// In a box, because few opens have some.
    #[expect(clippy::box_collection, reason = "8 bytes of each open instead of 24")]
    lock_states: Option<Box<Vec<StateNo>>>,
}

/// The pairs of access and deny bits with which an owner has opened a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OpenModes(u16);

impl OpenModes {
    fn bit(access: u8, deny: u8) -> u16 {
        1 << (access << 2 | deny)
    }

    pub(super) fn add(&mut self, access: ShareBits, deny: ShareBits) {
        self.0 |= Self::bit(access.0, deny.0);
    }

    /// The modes within these bits, if these bits are the union of some modes (RFC 8881 section
    /// 18.18.3).
    pub(super) fn reduced(self, access: ShareBits, deny: ShareBits) -> Option<Self> {
        let mut modes = Self::default();
        let (mut all_access, mut all_deny) = (ShareBits::NONE, ShareBits::NONE);
        for bits in 0..16_u8 {
            let mode = (ShareBits(bits >> 2), ShareBits(bits & 3));
            let is_there = self.0 & Self::bit(mode.0.0, mode.1.0) != 0;
            if is_there && access.contains(mode.0) && deny.contains(mode.1) {
                modes.add(mode.0, mode.1);
                all_access = all_access.union(mode.0);
                all_deny = all_deny.union(mode.1);
            }
        }
        (all_access == access && all_deny == deny).then_some(modes)
    }
}

/// The state of a lock owner in a file.
#[derive(Debug)]
pub(super) struct LockState {
    pub(super) client: ClientId,
    pub(super) owner: OwnerNo,
    pub(super) file: FileKey,
    pub(super) seqid: u32,
    /// The opens by which the owner has locked.
    pub(super) opens: Vec<StateNo>,
}

/// A file with opens.
#[derive(Debug, Default)]
pub(super) struct OpenFile {
    pub(super) states: OwnerStates,
    /// Opens with access READ, access WRITE, deny READ, deny WRITE.
    counts: [u32; 4],
    pub(super) locks: Option<Box<LockTable<OwnerNo>>>,
}

/// The bits that counts are kept of, in the order of [`OpenFile::counts`].
fn counted(access: ShareBits, deny: ShareBits) -> [bool; 4] {
    let [read, write] = [ShareBits::READ, ShareBits::WRITE];
    [
        access.contains(read),
        access.contains(write),
        deny.contains(read),
        deny.contains(write),
    ]
}

impl OpenFile {
    fn add(&mut self, access: ShareBits, deny: ShareBits) {
        for (count, is_set) in self.counts.iter_mut().zip(counted(access, deny)) {
            *count += u32::from(is_set);
        }
    }

    fn subtract(&mut self, access: ShareBits, deny: ShareBits) {
        for (count, is_set) in self.counts.iter_mut().zip(counted(access, deny)) {
            *count -= u32::from(is_set);
        }
    }

    /// Whether opens other than `own` conflict with an open of these bits. It looks at no open.
    pub(super) fn conflicts(&self, access: ShareBits, deny: ShareBits, own: Option<&Open>) -> bool {
        let own = own.map_or([false; 4], |it| counted(it.access, it.deny));
        let others = self.counts.iter().zip(own);
        let mut others = others.map(|(count, own)| *count > u32::from(own));
        // The access of others conflicts with the deny bits, and the reverse.
        let asked = counted(deny, access);
        asked.iter().any(|it| others.next().unwrap_or(false) && *it)
    }
}

/// The tables.
#[derive(Debug, Default)]
pub(super) struct Shares {
    pub(super) opens: HashMap<StateNo, Open>,
    pub(super) locks: HashMap<StateNo, LockState>,
    pub(super) files: HashMap<FileKey, OpenFile>,
    pub(super) owners: HashMap<OwnerNo, Owner>,
    next_number: u64,
    /// Opens that deny something.
    denying: usize,
    /// Locked ranges of all files.
    ranges: usize,
}

/// The sequence number after a change; 0 has a meaning of its own.
pub(super) fn next_seqid(seqid: u32) -> u32 {
    seqid.wrapping_add(1).max(1)
}

/// Checks the sequence number of a stateid.
pub(super) fn check_seqid(argument: u32, current: u32) -> Result<(), StateError> {
    // The numbers wrap: one behind the current one is an earlier one.
    match current.wrapping_sub(argument) {
        _ if argument == 0 => Ok(()),
        0 => Ok(()),
        behind if behind < u32::MAX / 2 => Err(StateError::OldStateId),
        _ => Err(StateError::BadStateId),
    }
}

/// The number of a stateid that is no special one.
pub(super) fn number_of(stateid: StateId, instance: Instance) -> Result<StateNo, StateError> {
    match stateid.kind(instance) {
        StateIdKind::Numbered(number) => Ok(number),
        StateIdKind::Stale => Err(StateError::StaleStateId),
        StateIdKind::Anonymous
        | StateIdKind::ReadBypass
        | StateIdKind::Current
        | StateIdKind::Reserved => Err(StateError::BadStateId),
    }
}

impl Shares {
    fn next_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn owner_of(client: &Client, name: &[u8], kind: OwnerKind) -> Option<OwnerNo> {
        let owners = match kind {
            OwnerKind::Open => &client.open_owners,
            OwnerKind::Lock => &client.lock_owners,
        };
        owners.get(name).copied()
    }

    /// The number of a lock owner; none if it has no locks.
    pub(super) fn lock_owner(client: &Client, name: &[u8]) -> Option<OwnerNo> {
        Self::owner_of(client, name, OwnerKind::Lock)
    }

    /// The state of an owner in a file.
    pub(super) fn state_of(
        &self,
        client: &Client,
        name: &[u8],
        kind: OwnerKind,
        file: &FileKey,
    ) -> Option<StateNo> {
        let owner = Self::owner_of(client, name, kind)?;
        self.files.get(file)?.states.get(owner)
    }

    /// Counts one more state of an owner.
    fn hold_owner(&mut self, client: &mut Client, name: &[u8], kind: OwnerKind) -> OwnerNo {
        let number = match Self::owner_of(client, name, kind) {
            Some(number) => number,
            None => {
                let number = OwnerNo(self.next_number());
                let name: Arc<[u8]> = name.into();
                let owners = match kind {
                    OwnerKind::Open => &mut client.open_owners,
                    OwnerKind::Lock => &mut client.lock_owners,
                };
                owners.insert(name.clone(), number);
                let owner = Owner {
                    client: client.id,
                    name,
                    kind,
                    states: 0,
                };
                self.owners.insert(number, owner);
                number
            }
        };
        if let Some(owner) = self.owners.get_mut(&number) {
            owner.states += 1;
        }
        number
    }

    fn release_owner(&mut self, client: &mut Client, number: OwnerNo) {
        let Some(owner) = self.owners.get_mut(&number) else {
            return;
        };
        owner.states -= 1;
        if owner.states > 0 {
            return;
        }
        match owner.kind {
            OwnerKind::Open => client.open_owners.remove(&owner.name),
            OwnerKind::Lock => client.lock_owners.remove(&owner.name),
        };
        self.owners.remove(&number);
    }

    /// Adds an open without conflicts. The owner has none of the file. Whether it is the first one.
    pub(super) fn add_open(
        &mut self,
        client: &mut Client,
        name: &[u8],
        file: FileKey,
        (access, deny): (ShareBits, ShareBits),
    ) -> (StateNo, bool) {
        let number = StateNo(self.next_number());
        let owner = self.hold_owner(client, name, OwnerKind::Open);
        client.opens.insert(number);
        let mut modes = OpenModes::default();
        modes.add(access, deny);
        let open = Open {
            client: client.id,
            owner,
            file,
            access,
            deny,
            modes,
            seqid: 1,
            lock_states: None,
        };
        self.opens.insert(number, open);
        self.denying += usize::from(deny != ShareBits::NONE);
        let open_file = self.files.entry(file).or_default();
        let is_first = open_file.states.is_empty();
        open_file.states.insert(owner, number);
        open_file.add(access, deny);
        (number, is_first)
    }

    /// Changes the bits of an open: its new sequence number.
    fn set_mode(
        &mut self,
        number: StateNo,
        (access, deny): (ShareBits, ShareBits),
        modes: OpenModes,
    ) -> Option<u32> {
        let open = self.opens.get_mut(&number)?;
        let file = self.files.get_mut(&open.file)?;
        file.subtract(open.access, open.deny);
        file.add(access, deny);
        self.denying -= usize::from(open.deny != ShareBits::NONE);
        self.denying += usize::from(deny != ShareBits::NONE);
        (open.access, open.deny, open.modes) = (access, deny, modes);
        open.seqid = next_seqid(open.seqid);
        Some(open.seqid)
    }

    /// Adds the bits of a further OPEN without conflicts.
    pub(super) fn upgrade(
        &mut self,
        number: StateNo,
        access: ShareBits,
        deny: ShareBits,
    ) -> Option<u32> {
        let open = self.opens.get(&number)?;
        let mut modes = open.modes;
        modes.add(access, deny);
        let bits = (open.access.union(access), open.deny.union(deny));
        self.set_mode(number, bits, modes)
    }

    /// Reduces the bits of an open.
    pub(super) fn downgrade(
        &mut self,
        number: StateNo,
        access: ShareBits,
        deny: ShareBits,
    ) -> Result<u32, StateError> {
        let open = self.opens.get(&number).ok_or(StateError::BadStateId)?;
        let modes = open.modes.reduced(access, deny).ok_or(StateError::Inval)?;
        self.set_mode(number, (access, deny), modes)
            .ok_or(StateError::BadStateId)
    }

    /// Removes an open, and the lock states that have no other open.
    pub(super) fn remove_open(
        &mut self,
        number: StateNo,
        client: &mut Client,
        events: &mut Vec<StateEvent>,
    ) {
        let Some(open) = self.opens.remove(&number) else {
            return;
        };
        for lock in open.lock_states.as_deref().into_iter().flatten() {
            let Some(state) = self.locks.get_mut(lock) else {
                continue;
            };
            state.opens.retain(|it| *it != number);
            if state.opens.is_empty() {
                self.remove_lock_state(*lock, client);
            }
        }
        client.opens.remove(&number);
        self.denying -= usize::from(open.deny != ShareBits::NONE);
        self.release_owner(client, open.owner);
        if let Some(file) = self.files.get_mut(&open.file) {
            file.states.remove(open.owner);
            file.subtract(open.access, open.deny);
            if file.states.is_empty() {
                self.files.remove(&open.file);
                events.push(StateEvent::FileUnused(open.file));
            }
        }
    }

    /// Adds a lock state for a lock owner without one in the file of the open.
    pub(super) fn add_lock_state(
        &mut self,
        client: &mut Client,
        name: &[u8],
        open_number: StateNo,
    ) -> Option<StateNo> {
        let file = self.opens.get(&open_number)?.file;
        let number = StateNo(self.next_number());
        let owner = self.hold_owner(client, name, OwnerKind::Lock);
        client.lock_states.insert(number);
        if let Some(file) = self.files.get_mut(&file) {
            file.states.insert(owner, number);
        }
        let state = LockState {
            client: client.id,
            owner,
            file,
            seqid: 0,
            opens: Vec::new(),
        };
        self.locks.insert(number, state);
        self.join(number, open_number);
        Some(number)
    }

    /// A lock state lasts as long as this open, too.
    pub(super) fn join(&mut self, lock: StateNo, open: StateNo) {
        let (Some(state), Some(open_state)) =
            (self.locks.get_mut(&lock), self.opens.get_mut(&open))
        else {
            return;
        };
        if !state.opens.contains(&open) {
            state.opens.push(open);
            open_state.lock_states.get_or_insert_default().push(lock);
        }
    }

    /// Removes a lock state and its locks.
    pub(super) fn remove_lock_state(&mut self, number: StateNo, client: &mut Client) {
        let Some(state) = self.locks.remove(&number) else {
            return;
        };
        for open in &state.opens {
            let open = self.opens.get_mut(open);
            if let Some(states) = open.and_then(|open| open.lock_states.as_mut()) {
                states.retain(|it| *it != number);
            }
        }
        client.lock_states.remove(&number);
        if let Some(file) = self.files.get_mut(&state.file) {
            file.states.remove(state.owner);
        }
        self.release_owner(client, state.owner);
        self.with_locks(&state.file, |table| table.release(state.owner));
    }

    /// Calls a function with the locks of a file, and drops an empty table.
    pub(super) fn with_locks<R>(
        &mut self,
        file: &FileKey,
        function: impl FnOnce(&mut LockTable<OwnerNo>) -> R,
    ) -> Option<R> {
        let locks = &mut self.files.get_mut(file)?.locks;
        let table = locks.get_or_insert_default();
        let before = table.len();
        let result = function(table);
        self.ranges = self.ranges + table.len() - before;
        if locks.as_ref().is_some_and(|it| it.is_empty()) {
            *locks = None;
        }
        Some(result)
    }

    /// Whether an open denies something.
    pub(super) fn has_denials(&self) -> bool {
        self.denying > 0
    }

    /// Locked ranges of all files.
    pub(super) fn ranges(&self) -> usize {
        self.ranges
    }

    /// The bounds of the locks of a file, of which the other files leave a part.
    pub(super) fn lock_limits(&self, file: &FileKey) -> LockTableLimits {
        let locks = self.files.get(file).and_then(|it| it.locks.as_ref());
        let others = self.ranges - locks.map_or(0, |it| it.len());
        LockTableLimits {
            ranges_per_owner_max: RANGES_PER_OWNER_MAX,
            ranges_max: RANGES_PER_FILE_MAX.min(RANGES_MAX.saturating_sub(others)),
        }
    }

    /// The access of a lock state: the access of its opens.
    pub(super) fn lock_access(&self, state: &LockState) -> ShareBits {
        let opens = state.opens.iter().filter_map(|it| self.opens.get(it));
        opens.fold(ShareBits::NONE, |bits, it| bits.union(it.access))
    }

    /// The open of a stateid.
    pub(super) fn open_of(
        &self,
        client: ClientId,
        stateid: StateId,
        file: Option<&FileKey>,
        instance: Instance,
    ) -> Result<StateNo, StateError> {
        let number = number_of(stateid, instance)?;
        let open = self.opens.get(&number).ok_or(StateError::BadStateId)?;
        check_belongs((open.client, &open.file), (client, file))?;
        check_seqid(stateid.seqid, open.seqid)?;
        Ok(number)
    }

    /// The lock state of a stateid.
    pub(super) fn lock_of(
        &self,
        client: ClientId,
        stateid: StateId,
        file: Option<&FileKey>,
        instance: Instance,
    ) -> Result<StateNo, StateError> {
        let number = number_of(stateid, instance)?;
        let state = self.locks.get(&number).ok_or(StateError::BadStateId)?;
        check_belongs((state.client, &state.file), (client, file))?;
        check_seqid(stateid.seqid, state.seqid)?;
        Ok(number)
    }
}

/// Checks that a state is of the client, and of the file if the request names one.
fn check_belongs(
    of: (ClientId, &FileKey),
    wanted: (ClientId, Option<&FileKey>),
) -> Result<(), StateError> {
    let is_of_file = wanted.1.is_none_or(|file| file == of.1);
    match of.0 == wanted.0 && is_of_file {
        true => Ok(()),
        false => Err(StateError::BadStateId),
    }
}
