//! A client keeps its opens and locks while a request of it runs: the request may be a WRITE that has passed its checks.

use super::*;
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::HashMap;

const DELAY: StateError = StateError::Delay;

#[test]
fn session_with_running_requests_is_not_destroyed() {
    let mut server = TestServer::new();
    let (client, session) = server.client("host");
    let [own, other] = [0, 1].map(|slot| server.run(session, slot, 1));
    for caller in [None, Some(session)] {
        let destroyed = server.state.destroy_session(session, caller);
        assert_eq!(destroyed, Err(DELAY), "{caller:?}");
    }
    server.state.finish(other.slot, Some(b"done"), server.now);
    assert_eq!(server.state.destroy_session(session, None), Err(DELAY));
    let own_session = Some(session);
    assert_eq!(server.state.destroy_session(session, own_session), Ok(()));
    let gone = Err(StateError::BadSession);
    assert_eq!(server.state.destroy_session(session, own_session), gone);
    server.state.finish(own.slot, Some(b"late"), server.now);
    assert_eq!(server.state.clients.get(client).expect("there").running, 0);
    assert_eq!(server.state.counts().cached_bytes, 0);
    let direction = ChannelDirection::ForeOrBoth;
    let bound = server.state.bind_connection(session, direction);
    assert_eq!(bound, Err(StateError::BadSession));
}

#[test]
fn restarted_client_waits_for_its_earlier_requests() {
    let mut server = TestServer::new();
    let (earlier, session) = server.client("host");
    server.open(earlier, "owner", 1, 3, 3).expect("free");
    let (other, _) = server.client("other");
    let request = server.run(session, 0, 1);
    let new = server.exchange("host", 2, 0, 0).expect("a restart");
    for _ in 0..2 {
        assert_eq!(server.create(new.client, new.sequence, 0), Err(DELAY));
    }
    server.state.expire_client(earlier).expect("there");
    let opened = server.open(other, "owner", 1, 3, 3);
    assert_eq!(opened, Err(StateError::ShareDenied));
    server.state.finish(request.slot, None, server.now);
    assert!(server.open(other, "owner", 1, 3, 3).is_ok());
    // The same number: the refused calls count none.
    assert!(server.create(new.client, new.sequence, 0).is_ok());
}

#[test]
fn request_of_the_earlier_client_may_replace_it() {
    let mut server = TestServer::new();
    let (earlier, session) = server.client("host");
    let request = server.run(session, 0, 1);
    let new = server.exchange("host", 2, 0, 0).expect("a restart");
    let args = CreateSessionArgs {
        client: new.client,
        sequence: new.sequence,
        flags: 0,
        fore: channel(),
        back: channel(),
        principal: user(0),
        address: address(),
        caller: Some(earlier),
    };
    let created = server.state.create_session(&args, server.now);
    assert!(created.is_ok(), "{created:?}");
    server.state.finish(request.slot, None, server.now);
    assert!(server.state.clients.get(earlier).is_err());
}

/// A client with one file, which it opens for itself alone after each start.
struct Holder {
    server: TestServer,
    client: Option<ClientId>,
    sessions: Vec<SessionId>,
    running: Vec<SlotUse>,
    /// The last sequence number of each slot.
    sequences: HashMap<(SessionId, u32), u32>,
    others: usize,
}

impl Holder {
    /// EXCHANGE_ID and CREATE_SESSION of a run of the client. With requests of an earlier run, it must try again.
    fn connect(&mut self, run: u8) {
        let Ok(reply) = self.server.exchange("holder", run, 0, 0) else {
            return;
        };
        let Ok(created) = self.server.create(reply.client, reply.sequence, 0) else {
            return;
        };
        if self.client != Some(reply.client) {
            self.sessions.clear();
        }
        self.client = Some(reply.client);
        self.sessions.push(created.session);
        let (state, now) = (&mut self.server.state, self.server.now);
        let _ = state.reclaim_complete(reply.client, false, now);
        state.list_client(reply.client, EXPORT).expect("there");
        let opened = self.server.open(reply.client, "owner", 1, 3, 3);
        opened.expect("a free file");
    }

    fn start(&mut self, session: SessionId) {
        let is_used = |slot| {
            let mut running = self.running.iter();
            running.any(|it| (it.session, it.slot) == (session, slot))
        };
        let Some(slot) = (0..channel().slots).find(|slot| !is_used(*slot)) else {
            return;
        };
        let sequence = self.sequences.entry((session, slot)).or_default();
        if let Ok(SequenceOutcome::Run(grant)) = self.server.sequence(session, slot, *sequence + 1)
        {
            *sequence += 1;
            self.running.push(grant.slot);
        }
    }

    /// Whether another client gets the file.
    fn other_gets_file(&mut self) -> bool {
        self.others += 1;
        let (other, _) = self.server.client(&format!("other {}", self.others));
        let opened = self.server.open(other, "owner", 1, 3, 3);
        self.server.state.expire_client(other).expect("there");
        self.server.store();
        opened.is_ok()
    }

    fn step(&mut self, action: u8, index: Index) {
        let session = (!self.sessions.is_empty()).then(|| *index.get(&self.sessions));
        match (action, session) {
            (0, _) => self.connect(index.index(2) as u8),
            (1 | 2, Some(session)) => self.start(session),
            (3, _) if !self.running.is_empty() => {
                let ended = self.running.swap_remove(index.index(self.running.len()));
                let now = self.server.now;
                self.server.state.finish(ended, Some(b"reply"), now);
            }
            (4, Some(session)) => {
                let _ = self.server.state.destroy_session(session, None);
            }
            (5, _) => {
                if let Some(client) = self.client {
                    let _ = self.server.state.expire_client(client);
                }
            }
            (6, _) => self.server.pass(limits::LEASE),
            _ => {}
        }
    }
}

proptest! {
    /// The client, an operator and the clock act in any order.
    #[test]
    fn no_other_client_gets_a_file_under_requests(
        steps in prop::collection::vec((0..7u8, any::<Index>()), 1..80),
        index in any::<Index>(),
    ) {
        let mut holder = Holder {
            server: TestServer::new(),
            client: None,
            sessions: Vec::new(),
            running: Vec::new(),
            sequences: HashMap::new(),
            others: 0,
        };
        for (action, index) in steps {
            holder.step(action, index);
            prop_assert!(!holder.other_gets_file() || holder.running.is_empty());
        }
        // The state goes after the last request.
        while !holder.running.is_empty() {
            holder.step(3, index);
        }
        holder.step(6, index);
        prop_assert!(holder.other_gets_file());
    }
}
