//! Random histories against simple models.

use super::*;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

const CLIENTS: usize = 3;
const OWNERS: usize = 2;
const FILES: u64 = 2;
const BYTES: usize = 6;

type LockBytes = [Option<LockKind>; BYTES];

/// A client as it knows itself. Lock owner N locks by the open of open owner N.
struct ModelClient {
    id: ClientId,
    session: SessionId,
    sequence: u32,
    renewed_at: Instant,
    opens: HashMap<(usize, u64), (u32, u32, StateId)>,
    locks: HashMap<(usize, u64), (LockBytes, StateId)>,
}

#[derive(Clone, Debug)]
enum Step {
    Open {
        owner: usize,
        file: u64,
        access: u32,
        deny: u32,
    },
    Close {
        owner: usize,
        file: u64,
    },
    Lock {
        owner: usize,
        file: u64,
        bytes: (usize, usize),
        kind: LockKind,
    },
    Unlock {
        owner: usize,
        file: u64,
        bytes: (usize, usize),
    },
    Anonymous {
        file: u64,
        access: IoAccess,
    },
    Pass(u64),
    ClientRestart,
    Expire,
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let kind = prop_oneof![Just(LockKind::Read), Just(LockKind::Write)];
    let bytes = (0..BYTES, 0..BYTES).prop_map(|(a, b)| (a.min(b), a.max(b)));
    let access = prop_oneof![Just(IoAccess::Read), Just(IoAccess::Write)];
    let deny = prop_oneof![5 => Just(0u32), 1 => 1..4u32];
    let step = prop_oneof![
        8 => (0..OWNERS, 0..FILES, 1..4u32, deny)
            .prop_map(|(owner, file, access, deny)| Step::Open { owner, file, access, deny }),
        3 => (0..OWNERS, 0..FILES).prop_map(|(owner, file)| Step::Close { owner, file }),
        8 => (0..OWNERS, 0..FILES, bytes.clone(), kind)
            .prop_map(|(owner, file, bytes, kind)| Step::Lock { owner, file, bytes, kind }),
        3 => (0..OWNERS, 0..FILES, bytes)
            .prop_map(|(owner, file, bytes)| Step::Unlock { owner, file, bytes }),
        1 => (0..FILES, access).prop_map(|(file, access)| Step::Anonymous { file, access }),
        3 => prop_oneof![Just(1u64), Just(45), Just(91)].prop_map(Step::Pass),
        1 => Just(Step::ClientRestart),
        1 => Just(Step::Expire),
    ];
    prop::collection::vec((0..CLIENTS, step), 1..80)
}

struct History {
    server: TestServer,
    clients: [Option<ModelClient>; CLIENTS],
    verifier: u8,
    /// Files that the service keeps.
    pins: HashMap<FileKey, u32>,
}

impl History {
    fn new() -> Self {
        Self {
            server: TestServer::new(),
            clients: [const { None }; CLIENTS],
            verifier: 0,
            pins: HashMap::new(),
        }
    }

    fn connect(&mut self, index: usize) {
        self.verifier += 1;
        let owner = format!("client {index}");
        let reply = self
            .server
            .exchange(&owner, self.verifier, 0, 0)
            .expect("same user");
        let session = self
            .server
            .create(reply.client, reply.sequence, 0)
            .expect("new");
        let completed = self
            .server
            .state
            .reclaim_complete(reply.client, false, self.server.now);
        completed.expect("the first one");
        let listed = self.server.state.list_client(reply.client, EXPORT);
        listed.expect("a client");
        self.clients[index] = Some(ModelClient {
            id: reply.client,
            session: session.session,
            sequence: 0,
            renewed_at: self.server.now,
            opens: HashMap::new(),
            locks: HashMap::new(),
        });
    }

    /// A request of the client: its lease is renewed, if it is still there.
    fn renew(&mut self, index: usize) {
        let Some(client) = &mut self.clients[index] else {
            return self.connect(index);
        };
        client.sequence += 1;
        client.renewed_at = self.server.now;
        let (session, sequence) = (client.session, client.sequence);
        self.server.renew(session, sequence);
    }

    fn client(&self, index: usize) -> &ModelClient {
        self.clients[index]
            .as_ref()
            .expect("it has just sent a request")
    }

    fn is_expired(&self, index: usize) -> bool {
        let client = self.clients[index].as_ref();
        client.is_some_and(|it| self.server.now - it.renewed_at >= limits::LEASE)
    }

    /// Drops expired clients in the way; whether the request succeeds.
    fn give_way(&mut self, in_the_way: &[usize]) -> bool {
        let is_free = in_the_way.iter().all(|it| self.is_expired(*it));
        if is_free {
            for index in in_the_way {
                self.clients[*index] = None;
            }
        }
        is_free
    }

    fn others(&self, filter: impl Fn(usize, &ModelClient) -> bool) -> Vec<usize> {
        let clients = self.clients.iter().enumerate();
        let clients =
            clients.filter(|(index, it)| it.as_ref().is_some_and(|it| filter(*index, it)));
        clients.map(|(index, _)| index).collect()
    }

    fn open(&mut self, index: usize, owner: usize, number: u64, (access, deny): (u32, u32)) {
        let conflicts = self.others(|other, client| {
            let opens = client.opens.iter();
            opens
                .filter(|(key, _)| key.1 == number && (other, key.0) != (index, owner))
                .any(|(_, (a, d, _))| a & deny != 0 || d & access != 0)
        });
        let id = self.client(index).id;
        let name = format!("owner {owner}");
        let granted = self
            .server
            .open_with(id, &name, number, (access, deny), false);
        let is_free = !conflicts.contains(&index) && self.give_way(&conflicts);
        assert_eq!(granted.is_ok(), is_free, "{granted:?}");
        let Ok(granted) = granted else { return };
        *self.pins.entry(file(number)).or_default() += u32::from(granted.is_first_of_file);
        let client = self.clients[index].as_mut().expect("connected");
        let entry = client.opens.entry((owner, number));
        let open = entry.or_insert((0, 0, granted.stateid));
        *open = (open.0 | access, open.1 | deny, granted.stateid);
    }

    fn close(&mut self, index: usize, owner: usize, number: u64) {
        let Some(client) = &mut self.clients[index] else {
            return;
        };
        if let Some((_, _, stateid)) = client.opens.remove(&(owner, number)) {
            client.locks.remove(&(owner, number));
            let closed = self.server.state.close(client.id, stateid, file(number));
            closed.expect("an open");
        }
    }

    fn lock(
        &mut self,
        index: usize,
        owner: usize,
        number: u64,
        bytes: (usize, usize),
        kind: LockKind,
    ) {
        let client = self.client(index);
        let (id, Some(&(access, _, open))) = (client.id, client.opens.get(&(owner, number))) else {
            return;
        };
        let name = format!("lock owner {owner}");
        let locker = Locker::New {
            open,
            owner: name.as_bytes(),
        };
        let range = (bytes.0 as u64, bytes.1 as u64);
        let conflicts = self.others(|other, client| {
            let locks = client.locks.iter();
            locks
                .filter(|(key, _)| key.1 == number && (other, key.0) != (index, owner))
                .flat_map(|(_, (locks, _))| &locks[bytes.0..=bytes.1])
                .any(|it| it.is_some_and(|it| kind == LockKind::Write || it == LockKind::Write))
        });
        let locked = self.server.lock(id, number, locker, kind, range);
        let needed = if kind == LockKind::Read { 1 } else { 2 };
        if access & needed == 0 {
            assert_eq!(locked, Err(StateError::OpenMode.into()));
            return;
        }
        // The server removes expired clients one after the other, until one lease runs.
        for other in &conflicts {
            if self.is_expired(*other)
                && self
                    .server
                    .state
                    .clients
                    .get(self.client(*other).id)
                    .is_err()
            {
                self.clients[*other] = None;
            }
        }
        let remaining = conflicts.iter().any(|it| self.clients[*it].is_some());
        assert_eq!(locked.is_ok(), !remaining, "{locked:?}");
        let Ok(stateid) = locked else { return };
        let client = self.clients[index].as_mut().expect("connected");
        let lock = client
            .locks
            .entry((owner, number))
            .or_insert(([None; BYTES], stateid));
        lock.0[bytes.0..=bytes.1].fill(Some(kind));
        lock.1 = stateid;
    }

    fn unlock(&mut self, index: usize, owner: usize, number: u64, bytes: (usize, usize)) {
        let client = self.clients[index].as_mut().expect("connected");
        let Some(lock) = client.locks.get_mut(&(owner, number)) else {
            return;
        };
        let range = LockRange::new(bytes.0 as u64, bytes.1 as u64).expect("a range");
        let unlocked = self
            .server
            .state
            .unlock(client.id, lock.1, file(number), range);
        lock.1 = unlocked.expect("a lock state");
        lock.0[bytes.0..=bytes.1].fill(None);
    }

    fn anonymous(&mut self, index: usize, number: u64, access: IoAccess) {
        let bit = if access == IoAccess::Read { 1 } else { 2 };
        let conflicts = self.others(|_, client| {
            let opens = client.opens.iter();
            opens
                .filter(|(key, _)| key.1 == number)
                .any(|(_, (_, deny, _))| deny & bit != 0)
        });
        let id = self.client(index).id;
        let checked = self.server.io(id, StateId::ANONYMOUS, number, access);
        assert_eq!(checked.is_ok(), self.give_way(&conflicts));
    }

    fn pass(&mut self, seconds: u64) {
        self.server.pass(Duration::from_secs(seconds));
        for index in 0..CLIENTS {
            let is_unused = |it: &ModelClient| it.opens.is_empty();
            if self.is_expired(index) && self.clients[index].as_ref().is_some_and(is_unused) {
                self.clients[index] = None;
            }
        }
    }

    fn step(&mut self, index: usize, step: Step) {
        if !matches!(step, Step::Pass(_) | Step::ClientRestart | Step::Expire) {
            self.renew(index);
        }
        match step {
            Step::Open {
                owner,
                file,
                access,
                deny,
            } => {
                self.open(index, owner, file, (access, deny));
            }
            Step::Close { owner, file } => self.close(index, owner, file),
            Step::Lock {
                owner,
                file,
                bytes,
                kind,
            } => self.lock(index, owner, file, bytes, kind),
            Step::Unlock { owner, file, bytes } => self.unlock(index, owner, file, bytes),
            Step::Anonymous { file, access } => self.anonymous(index, file, access),
            Step::Pass(seconds) => self.pass(seconds),
            Step::ClientRestart => self.connect(index),
            Step::Expire => {
                if let Some(client) = self.clients[index].take() {
                    assert!(self.server.state.expire_client(client.id).is_some());
                }
            }
        }
        self.check();
    }

    /// The server's state equals the model.
    fn check(&mut self) {
        self.server.store();
        for event in std::mem::take(&mut self.server.events) {
            if let StateEvent::FileUnused(file) = event {
                *self.pins.get_mut(&file).expect("a pin") -= 1;
            }
        }
        let counts = self.server.state.counts();
        let clients: Vec<_> = self.clients.iter().flatten().collect();
        assert_eq!(counts.clients, clients.len());
        assert_eq!(counts.sessions, clients.len());
        let opens = clients.iter().flat_map(|it| it.opens.keys());
        assert_eq!(counts.opens, opens.clone().count());
        let files: HashSet<_> = opens.map(|(_, number)| file(*number)).collect();
        assert_eq!(counts.files, files.len());
        for (file, pins) in &self.pins {
            assert_eq!(*pins, u32::from(files.contains(file)));
        }
        let lock_states: usize = clients.iter().map(|it| it.locks.len()).sum();
        assert_eq!(counts.lock_states, lock_states);
        assert_eq!(self.server.list.len(), clients.len());
        self.check_ranges();
    }

    fn check_ranges(&self) {
        let shares = &self.server.state.shares;
        let mut found: HashMap<(ClientId, String, FileKey), LockBytes> = HashMap::new();
        for (file, open_file) in &shares.files {
            for lock in open_file.locks.iter().flat_map(|it| it.iter()) {
                let owner = &shares.owners[&lock.owner];
                let name = String::from_utf8(owner.name.to_vec()).expect("a name");
                let bytes = found
                    .entry((owner.client, name, *file))
                    .or_insert([None; BYTES]);
                let range = lock.range.first() as usize..=lock.range.last() as usize;
                bytes[range].fill(Some(lock.kind));
            }
        }
        let clients = self.clients.iter().flatten();
        let expected = clients.flat_map(|client| {
            let locks = client.locks.iter();
            locks.map(|((owner, number), (bytes, _))| {
                let name = format!("lock owner {owner}");
                ((client.id, name, file(*number)), *bytes)
            })
        });
        let expected = expected.filter(|(_, bytes)| bytes.iter().any(Option::is_some));
        assert_eq!(found, expected.collect());
    }
}

proptest! {
    #[test]
    fn opens_and_locks_equal_the_model(steps in steps()) {
        let mut history = History::new();
        for (index, step) in steps {
            history.step(index, step);
        }
        history.server.pass(limits::LEASE);
        history.server.pass(limits::COURTESY);
        history.clients = [const { None }; CLIENTS];
        history.check();
        prop_assert_eq!(history.server.state.counts(), StateCounts::default());
        prop_assert_eq!(history.server.state.next_deadline(), None);
    }

    /// Requests of two slots, each sent again and delivered late at random.
    #[test]
    fn no_request_runs_twice(
        steps in prop::collection::vec((0..2u32, 0..4u8, any::<prop::sample::Index>()), 1..100),
    ) {
        let mut server = TestServer::new();
        let (_, session) = server.client("host");
        let mut executed = HashSet::new();
        // Requests in the network, the last request of each slot, and those in progress.
        let mut sent: Vec<(u32, u32)> = Vec::new();
        let (mut last, mut is_answered) = ([0u32; 2], [true; 2]);
        let mut running: Vec<(u32, u32, SlotUse)> = Vec::new();
        for (slot, action, index) in steps {
            let at = slot as usize;
            let request = match action {
                0 if is_answered[at] => {
                    last[at] += 1;
                    is_answered[at] = false;
                    (slot, last[at])
                }
                1 if !running.is_empty() => {
                    let (slot, sequence, used) = running.swap_remove(index.index(running.len()));
                    let reply = sequence.to_be_bytes();
                    server.state.finish(used, Some(&reply), server.now);
                    // The reply is lost half of the time: a repeated request finds it.
                    is_answered[slot as usize] |= action == 1 && index.index(2) == 0;
                    continue;
                }
                _ if sent.is_empty() => continue,
                _ => sent[index.index(sent.len())],
            };
            sent.push(request);
            let (slot, sequence) = request;
            let is_newest = sequence == last[slot as usize];
            match server.sequence(session, slot, sequence) {
                Ok(SequenceOutcome::Run(grant)) => {
                    prop_assert!(executed.insert(request), "{request:?} ran twice");
                    running.push((slot, sequence, grant.slot));
                }
                Ok(SequenceOutcome::Replay(reply)) => {
                    prop_assert_eq!(&*reply, &sequence.to_be_bytes());
                    is_answered[slot as usize] |= is_newest;
                }
                Err(StateError::Delay) => {
                    prop_assert!(running.iter().any(|it| (it.0, it.1) == request));
                }
                Err(error) => {
                    prop_assert_eq!(error, StateError::SeqMisordered);
                    prop_assert!(!is_newest, "the newest request was refused");
                }
            }
        }
    }

    /// Clients open files for themselves alone. After any restarts, expiries and absences, a client
    /// reclaims a file only if no other client has had it since, and no operator has expired the client.
    #[test]
    fn reclaimed_file_was_not_given_to_another(
        steps in prop::collection::vec((0..CLIENTS, 0..9u8, 0..FILES), 1..120),
    ) {
        let mut server = TestServer::new();
        let mut ids: [Option<ClientId>; CLIENTS] = [None; CLIENTS];
        let mut beliefs: [HashSet<u64>; CLIENTS] = Default::default();
        let mut last_granted: HashMap<u64, usize> = HashMap::new();
        for (index, action, number) in steps {
            let client = ids[index].filter(|it| server.state.clients.get(*it).is_ok());
            match (action, client) {
                (0, _) => {
                    server.restart();
                    continue;
                }
                (1, _) => {
                    server.pass(Duration::from_secs(91));
                    continue;
                }
                // The client notices that it is unknown, and reclaims all that it believes to have.
                (_, None) => {
                    let (client, _) = server.reclaiming_client(&format!("client {index}"));
                    ids[index] = Some(client);
                    beliefs[index].retain(|number| {
                        let grant = server.open_with(client, "owner", *number, (3, 3), true);
                        let holder = last_granted.get(number);
                        assert!(grant.is_err() || holder == Some(&index));
                        grant.is_ok()
                    });
                }
                (2..=3, Some(client)) => {
                    let _ = server.state.reclaim_complete(client, false, server.now);
                    server.store();
                }
                (4, Some(client)) => {
                    server.state.expire_client(client).expect("there");
                    server.store();
                    last_granted.retain(|_, holder| *holder != index);
                }
                (_, Some(client)) => {
                    let grant = server.open_with(client, "owner", number, (3, 3), false);
                    if grant.is_ok() {
                        beliefs[index].insert(number);
                        last_granted.insert(number, index);
                    }
                }
            }
        }
    }
}
