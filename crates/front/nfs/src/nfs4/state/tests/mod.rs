//! Tests of the state machine as the service calls it.

mod bounds;
mod exchange_id;
mod expiry;
mod grace;
mod histories;
mod leases;
mod memory;
mod opens;
mod range_locks;
mod running_requests;
mod sessions;

use super::requests::*;
use super::*;
use pagemesh_fs::{FileId, Ino};
use std::net::SocketAddr;
use std::time::Duration;

pub(super) const SECOND: Duration = Duration::from_secs(1);

pub(super) fn address() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 1], 700))
}

pub(super) fn user(uid: u32) -> Principal {
    Principal {
        flavor: 1,
        uid,
        gid: 100,
    }
}

pub(super) fn file(number: u64) -> FileKey {
    FileKey {
        export: EXPORT,
        file: FileId {
            ino: Ino(number),
            generation: 1,
            birth: 7,
        },
    }
}

/// The attributes that a client asks for.
pub(super) fn channel() -> ChannelAttributes {
    ChannelAttributes {
        header_padding: 0,
        request_bytes_max: 8192,
        reply_bytes_max: 8192,
        cached_reply_bytes_max: 2048,
        operations_max: 16,
        slots: 8,
    }
}

/// The number of the file system of all files, except for files by [`other_file`].
pub(super) const EXPORT: u32 = 1;

/// A server with its clock, and the lists of clients that it stores.
pub(super) struct TestServer {
    pub(super) state: NfsState,
    pub(super) now: Instant,
    /// The address of the next CREATE_SESSION.
    pub(super) address: SocketAddr,
    /// The list of [`EXPORT`].
    pub(super) list: KnownClients,
    /// The list of the file system with the next number.
    pub(super) other_list: KnownClients,
    pub(super) events: Vec<StateEvent>,
}

impl TestServer {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        let mut server = Self {
            state: NfsState::new(Instance(1), &[], now),
            now,
            address: address(),
            list: KnownClients::default(),
            other_list: KnownClients::default(),
            events: Vec::new(),
        };
        server.start();
        server
    }

    /// Handles the effects, as the service does before a reply.
    pub(super) fn store(&mut self) {
        for event in self.state.take_events() {
            match &event {
                StateEvent::Journal { export, record } if *export == EXPORT => {
                    self.list.apply(record);
                }
                StateEvent::Journal { record, .. } => self.other_list.apply(record),
                StateEvent::GraceEnded => {
                    self.list.apply(&JournalRecord::GraceEnded);
                    self.other_list.apply(&JournalRecord::GraceEnded);
                }
                _ => {}
            }
            self.events.push(event);
        }
    }

    /// A new run of the server with the stored list.
    pub(super) fn restart(&mut self) {
        self.store();
        self.start();
        self.events.clear();
    }

    fn start(&mut self) {
        let lists = [(EXPORT, &self.list), (EXPORT + 1, &self.other_list)];
        let known = lists.map(|(export, list)| (export, list.clone()));
        let instance = Instance::next(1, [self.list.instance()]);
        self.state = NfsState::new(instance, &known, self.now);
        let started = JournalRecord::Started(instance);
        self.list.apply(&started);
        self.other_list.apply(&started);
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now += time;
        self.state.tick(self.now);
        self.store();
    }

    pub(super) fn exchange(
        &mut self,
        owner: &str,
        verifier: u8,
        uid: u32,
        flags: u32,
    ) -> Result<ExchangeIdReply, StateError> {
        let args = ExchangeIdArgs {
            owner: owner.as_bytes(),
            verifier: Verifier([verifier; 8]),
            principal: user(uid),
            flags,
            protection: StateProtection::None,
            address: address(),
        };
        self.state.exchange_id(&args, self.now)
    }

    pub(super) fn create(
        &mut self,
        client: ClientId,
        sequence: u32,
        uid: u32,
    ) -> Result<CreateSessionReply, StateError> {
        self.create_with(client, sequence, uid, channel())
    }

    pub(super) fn create_with(
        &mut self,
        client: ClientId,
        sequence: u32,
        uid: u32,
        fore: ChannelAttributes,
    ) -> Result<CreateSessionReply, StateError> {
        let args = CreateSessionArgs {
            client,
            sequence,
            flags: 0,
            fore,
            back: channel(),
            principal: user(uid),
            address: self.address,
            caller: None,
        };
        self.state.create_session(&args, self.now)
    }

    /// A confirmed client that has not completed its reclaims.
    pub(super) fn reclaiming_client(&mut self, owner: &str) -> (ClientId, SessionId) {
        let reply = self.exchange(owner, 1, 0, 0).expect("a client");
        let session = self.create(reply.client, reply.sequence, 0);
        self.store();
        (reply.client, session.expect("a session").session)
    }

    /// A client that may open files.
    pub(super) fn client(&mut self, owner: &str) -> (ClientId, SessionId) {
        let (client, session) = self.reclaiming_client(owner);
        self.state
            .reclaim_complete(client, false, self.now)
            .expect("the first one");
        let listed = self.state.list_client(client, EXPORT);
        listed.expect("a client");
        self.store();
        (client, session)
    }

    pub(super) fn sequence(
        &mut self,
        session: SessionId,
        slot: u32,
        sequence: u32,
    ) -> Result<SequenceOutcome, StateError> {
        self.sequence_with(session, slot, sequence, |_| {})
    }

    pub(super) fn sequence_with(
        &mut self,
        session: SessionId,
        slot: u32,
        sequence: u32,
        change: impl FnOnce(&mut SequenceArgs),
    ) -> Result<SequenceOutcome, StateError> {
        let mut args = SequenceArgs {
            session,
            slot,
            sequence,
            highest_slot: slot,
            is_cached: true,
            request_bytes: 200,
            operations: 2,
            fingerprint: 77,
            address: address(),
        };
        change(&mut args);
        self.state.sequence(&args, self.now)
    }

    pub(super) fn run(&mut self, session: SessionId, slot: u32, sequence: u32) -> SequenceGrant {
        match self.sequence(session, slot, sequence) {
            Ok(SequenceOutcome::Run(grant)) => grant,
            other => panic!("the request must run: {other:?}"),
        }
    }

    /// A whole request that renews the lease.
    pub(super) fn renew(&mut self, session: SessionId, sequence: u32) {
        let grant = self.run(session, 0, sequence);
        self.state.finish(grant.slot, Some(b"reply"), self.now);
    }

    pub(super) fn open(
        &mut self,
        client: ClientId,
        owner: &str,
        number: u64,
        access: u32,
        deny: u32,
    ) -> Result<StateId, StateError> {
        self.open_with(client, owner, number, (access, deny), false)
            .map(|it| it.stateid)
    }

    pub(super) fn open_with(
        &mut self,
        client: ClientId,
        owner: &str,
        number: u64,
        (access, deny): (u32, u32),
        is_reclaim: bool,
    ) -> Result<OpenGrant, StateError> {
        let args = OpenArgs {
            client,
            owner: owner.as_bytes(),
            file: file(number),
            access: ShareBits::new(access).expect("bits"),
            deny: ShareBits::new(deny).expect("bits"),
            is_reclaim,
            is_new_file: false,
        };
        let grant = self.state.open(&args, self.now);
        self.store();
        grant
    }

    pub(super) fn lock(
        &mut self,
        client: ClientId,
        number: u64,
        locker: Locker<'_>,
        kind: LockKind,
        (first, last): (u64, u64),
    ) -> Result<StateId, LockError> {
        let args = LockArgs {
            client,
            file: file(number),
            locker,
            kind,
            range: LockRange::new(first, last).expect("a range"),
            is_reclaim: false,
        };
        let prepared = self.state.prepare_lock(&args, self.now);
        self.store();
        prepared?;
        let locked = self.state.lock(&args, self.now);
        assert_eq!(self.state.take_events(), []);
        locked
    }

    pub(super) fn io(
        &mut self,
        client: ClientId,
        stateid: StateId,
        number: u64,
        access: IoAccess,
    ) -> Result<(), StateError> {
        self.state
            .check_io(client, stateid, file(number), access, self.now)
    }

    pub(super) fn removals(&self) -> Vec<(ClientId, RemovalReason)> {
        let removals = self.events.iter().filter_map(|it| match it {
            StateEvent::ClientRemoved { client, reason } => Some((*client, *reason)),
            _ => None,
        });
        removals.collect()
    }
}
