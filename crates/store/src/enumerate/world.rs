//! A pool at work on a recorded medium, the model beside it.

use super::Tally;
use super::budget::Budget;
use super::medium::Medium;
use super::model::{Content, Effect, Entry, Found, Held, Open, Oracle, Step, Thing, UNORDERED};
use super::model::{Wrong, apply, content, note_open, wrong};
use super::owner::Owned;
use super::recover::{self, Kind};
use crate::session::Session;
use crate::view::Handle;
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{CrashPoint, Image};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A session of the pool, as its client sees it.
pub(super) struct Client {
    pub(super) session: Session<Medium>,
    /// Its operations of which another leg may not have heard.
    pub(super) ops: Vec<(u64, Open)>,
    /// The group of its operation, if it died inside.
    pub(super) died_in: Option<usize>,
}

/// The pool, what it must hold, and what was checked.
pub(super) struct World<'t> {
    pub(super) kind: Kind,
    pub(super) medium: Arc<Medium>,
    pub(super) pool: Owned,
    pub(super) clients: Vec<Client>,
    pub(super) oracle: Oracle,
    /// What is checked of each point; none: nothing.
    pub(super) budget: Option<Budget>,
    pub(super) tally: &'t mut Tally,
    /// Objects that no operation touches; most images need not read them.
    pub(super) unread: BTreeMap<SliceId, BTreeMap<u64, u32>>,
    /// Number of the last operation.
    pub(super) op: u64,
    /// What holds behind the first sync of the operation at hand.
    pub(super) synced: Option<Oracle>,
    /// Of the last operation, as far as a crash can come back to them.
    pub(super) last: Vec<(CrashPoint, Oracle)>,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Done,
    Full,
    Died,
}

impl<'t> World<'t> {
    /// Opens the pool of an image and checks the crashes of the opening.
    pub(super) fn open(
        kind: Kind,
        image: Image,
        oracle: Oracle,
        clients: usize,
        budget: Option<Budget>,
        tally: &'t mut Tally,
    ) -> Result<World<'t>, Wrong> {
        let (medium, pool) = recover::open(kind, kind.recorded(image))?;
        let mut world = World {
            kind,
            medium,
            pool,
            clients: Vec::new(),
            oracle,
            budget,
            tally,
            unread: BTreeMap::new(),
            op: 1000,
            synced: None,
            last: Vec::new(),
        };
        world.resolve()?;
        world.open_clients(clients)?;
        Ok(world)
    }

    /// A recovery has just decided what is there: from now on it stays.
    fn resolve(&mut self) -> Result<(), Wrong> {
        let before = self.oracle.clone();
        self.check_crashes(&before, &before)?;
        let mut reader = recover::session(&self.pool);
        let found = recover::look(&self.pool, &mut reader, &BTreeMap::new())?;
        let number = reader.number();
        let closed = self.pool.borrow_mut().close_session(number);
        closed.or_else(|cause| wrong("ending a session", cause.to_string()))?;
        let present = before.judge(&found)?;
        for index in present {
            note_open(&mut self.oracle.open, &before.maybe[index]);
        }
        self.oracle.certain = self.held(&before, &found);
        self.oracle.maybe.clear();
        let certain = &self.oracle.certain;
        self.oracle
            .open
            .retain(|_, open| certain.contains_key(&open.slice));
        let now = self.oracle.clone();
        self.check_crashes(&now, &now)
    }

    /// What was found, with the bytes that the model knows of.
    fn held(&self, before: &Oracle, found: &Found) -> Held {
        let mut known: BTreeMap<u32, Content> = BTreeMap::new();
        let zeroes = content([0; PAGE_BYTES]);
        known.insert(zeroes.0, zeroes);
        for thing in before.certain.values() {
            known.extend(
                thing
                    .pages
                    .values()
                    .map(|content| (content.0, content.clone())),
            );
        }
        for step in &before.maybe {
            if let Effect::Pages(_, pages) = &step.effect {
                let contents = pages.iter().filter_map(|(_, content)| content.clone());
                known.extend(contents.map(|content| (content.0, content)));
            }
        }
        let thing = |thing: &Thing<u32>| Thing {
            entry: thing.entry,
            pages: thing
                .pages
                .iter()
                .map(|(&page, sum)| (page, known[sum].clone()))
                .collect(),
        };
        let things = found.things.iter();
        things
            .map(|(&slice, found)| (slice, thing(found)))
            .collect()
    }

    pub(super) fn open_clients(&mut self, count: usize) -> Result<(), Wrong> {
        while self.clients.len() < count {
            let session = recover::session(&self.pool);
            self.clients.push(Client {
                session,
                ops: Vec::new(),
                died_in: None,
            });
        }
        let now = self.oracle.clone();
        self.check_crashes(&now, &now)
    }

    pub(super) fn handle(&self, slice: SliceId) -> Handle {
        let pool = self.pool.borrow();
        pool.handle(slice).expect("the model has it")
    }

    /// Everything so far is durable.
    fn settle(&mut self) {
        for step in &self.oracle.maybe {
            note_open(&mut self.oracle.open, step);
        }
        self.oracle.settle();
    }

    /// Something that the owner does; `effect` is its record, if it has one.
    /// What `syncs` makes all before it durable.
    pub(super) fn own(
        &mut self,
        syncs: bool,
        effect: Option<Effect>,
        run: impl FnOnce(&Owned) -> Result<(), String>,
    ) -> Result<(), Wrong> {
        let group = match self.kind {
            Kind::Memory => usize::MAX,
            Kind::File => UNORDERED,
        };
        let step = effect.map(|effect| Step {
            effect,
            op: 0,
            epoch: 0,
            is_open: false,
            group,
        });
        let is_put = step.is_some();
        self.oracle.maybe.extend(step);
        let during = self.oracle.clone();
        if self.kind == Kind::File && syncs {
            // Behind the first sync only the operation's own is uncertain.
            let own = is_put.then(|| self.oracle.maybe.pop()).flatten();
            self.settle();
            self.oracle.maybe.extend(own);
            self.synced = Some(self.oracle.clone());
        }
        if let Err(cause) = run(&self.pool) {
            return wrong("operations", cause);
        }
        if is_put && self.kind == Kind::Memory {
            let step = self.oracle.maybe.pop().expect("its own");
            apply(&mut self.oracle.certain, &step.effect);
        }
        if self.kind == Kind::File && syncs {
            self.settle();
        }
        self.check_crashes(&during, &self.oracle.clone())
    }

    pub(super) fn forget_leaves(&mut self) {
        for client in &mut self.clients {
            client.session.forget_leaves();
        }
    }

    /// The legs are equal: nothing of the slice is open any more.
    pub(super) fn forget_open(&mut self, slice: SliceId) {
        self.oracle.open.retain(|_, open| open.slice != slice);
        for step in &mut self.oracle.maybe {
            step.is_open &= !matches!(step.effect, Effect::Pages(of, _) if of == slice);
        }
        for client in &mut self.clients {
            client.ops.retain(|(_, open)| open.slice != slice);
        }
    }

    /// Ends a client, dead or alive.
    pub(super) fn end(&mut self, client: usize) -> Result<(), Wrong> {
        let Client {
            session,
            ops,
            died_in,
        } = self.clients.swap_remove(client);
        let during = self.oracle.clone();
        let number = session.number();
        let closed = self.pool.borrow_mut().close_session(number);
        closed.or_else(|cause| wrong("ending a session", cause.to_string()))?;
        if self.clients.iter().all(|client| client.died_in.is_none()) {
            let pool = self.pool.borrow();
            let next = pool.view().control().seq().load(Ordering::Acquire);
            if pool.limit().0 != next {
                return wrong("checkpoints", "a session that ended holds them back");
            }
        }
        if let Some(group) = died_in {
            let mut reader = recover::session(&self.pool);
            let found = recover::look(&self.pool, &mut reader, &self.unread)?;
            self.decide(group, &found)?;
            let number = reader.number();
            let closed = self.pool.borrow_mut().close_session(number);
            closed.or_else(|cause| wrong("ending a session", cause.to_string()))?;
        }
        if self.kind == Kind::File {
            self.settle();
        }
        self.oracle.open.extend(ops);
        self.check_crashes(&during, &self.oracle.clone())
    }

    /// The operation of a dead session was finished or voided: as it is shown
    /// now it stays.
    fn decide(&mut self, group: usize, found: &Found) -> Result<(), Wrong> {
        let (own, others): (Vec<Step>, Vec<Step>) = std::mem::take(&mut self.oracle.maybe)
            .into_iter()
            .partition(|step| step.group == group);
        let Some(Effect::Pages(slice, _)) = own.first().map(|step| &step.effect) else {
            self.oracle.maybe = others;
            return Ok(());
        };
        let slice = *slice;
        for count in (0..=own.len()).rev() {
            let mut held = self.oracle.certain.clone();
            own[..count]
                .iter()
                .for_each(|step| apply(&mut held, &step.effect));
            let mut tried = Oracle {
                certain: held,
                ..Oracle::default()
            };
            std::mem::swap(&mut self.oracle, &mut tried);
            if self.shows(found, slice) {
                self.oracle.open = tried.open;
                if own[..count].iter().any(|step| !is_empty(step)) {
                    let done = own[..count].iter();
                    done.for_each(|step| note_open(&mut self.oracle.open, step));
                    self.tally.finished += 1;
                } else {
                    self.tally.voided += 1;
                }
                self.oracle.maybe = others;
                return Ok(());
            }
            self.oracle = tried;
        }
        wrong("a dead session's operation", "a part of it is there")
    }

    /// The owner dies with all its sessions, the machine goes on.
    pub(super) fn reopen(&mut self) -> Result<(), Wrong> {
        let count = self.clients.len();
        let during = self.oracle.clone();
        if self.kind == Kind::File {
            // What the file got is there, and durable once it was recovered. Who died in
            // the middle of the last operation leaves that open.
            let died = self.clients.iter().any(|client| client.died_in.is_some());
            let steps = std::mem::take(&mut self.oracle.maybe).into_iter();
            let (open, done) = steps.partition(|step| died && step.op == self.op);
            self.oracle.maybe = done;
            self.settle();
            self.oracle.maybe = open;
        }
        self.clients.clear();
        self.pool = recover::reopen(self.kind, &self.medium)?;
        self.check_crashes(&during, &during)?;
        self.resolve()?;
        self.open_clients(count)
    }

    /// Goes on from what a crash left.
    pub(super) fn crash_to(
        &mut self,
        image: Image,
        oracle: Oracle,
        count: usize,
    ) -> Result<(), Wrong> {
        self.clients.clear();
        (self.medium, self.pool) = recover::open(self.kind, self.kind.recorded(image))?;
        self.oracle = oracle;
        self.tally.lives += 1;
        self.resolve()?;
        self.open_clients(count)
    }

    /// Empties the pool that was at work; every frame must be free then.
    pub(super) fn empty(mut self) -> Result<(), Wrong> {
        while let Some(client) = self.clients.iter().position(|c| c.died_in.is_some()) {
            self.end(client)?;
        }
        let slices = self.oracle.now();
        let sessions = self
            .clients
            .drain(..)
            .map(|client| client.session)
            .collect();
        recover::empty(&self.pool, sessions, slices.keys().copied())
    }

    pub(super) fn entry(&self, slice: SliceId) -> Option<Entry> {
        self.oracle.now().get(&slice).map(|thing| thing.entry)
    }
}

fn is_empty(step: &Step) -> bool {
    matches!(&step.effect, Effect::Pages(_, pages) if pages.is_empty())
}
