//! A running pool on a recorded medium, together with its model.

use super::CheckCounts;
use super::budget::Budget;
use super::medium::CrashMedium;
use super::model::{CheckFailure, PageWord, apply, fail, record_open};
use super::model::{
    Content, Effect, ExpectedInFlight, ObjectContents, ObjectEntry, Oracle, PoolContents,
    PossibleRecord, RecoveredContents, UNORDERED,
};
use super::owner::SharedPool;
use super::recover::{self, MediumKind};
use super::tier::TierMoves;
use pagemesh_base::layout::SliceId;
use pagemesh_pmem::{CrashPoint, Image};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::session::Session;
use pagemesh_store::test_api::{ControlInternals, PoolInternals};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A session of the pool as its client sees it.
pub(super) struct Client {
    pub(super) session: Session<CrashMedium>,
    /// Its operations that another leg may lack.
    pub(super) ops: Vec<(u64, ExpectedInFlight)>,
    /// The group of the operation in which the client died, if it died.
    pub(super) died_in: Option<usize>,
}

/// The pool, its expected contents, and the counts of the checks.
pub(super) struct CrashHarness<'t> {
    pub(super) kind: MediumKind,
    pub(super) medium: Arc<CrashMedium>,
    pub(super) pool: SharedPool,
    pub(super) clients: Vec<Client>,
    pub(super) oracle: Oracle,
    /// The budget of each crash point; none: nothing is checked.
    pub(super) budget: Option<Budget>,
    pub(super) tally: &'t mut CheckCounts,
    /// Checksums of the objects that no operation touches; most images need not read them.
    pub(super) unread_sums: BTreeMap<SliceId, BTreeMap<u64, PageWord>>,
    /// Number of the last operation.
    pub(super) op: u64,
    /// The oracle after the first sync of the current operation.
    pub(super) oracle_after_sync: Option<Oracle>,
    /// Pages that are on their way to another tier.
    pub(super) tier_moves: TierMoves,
    /// Crash points of the last operation, from which a sequence may resume.
    pub(super) last_points: Vec<(CrashPoint, Oracle)>,
}

/// The outcome of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpOutcome {
    Completed,
    PoolFull,
    Died,
}

impl<'t> CrashHarness<'t> {
    /// Opens the pool of an image and checks the crashes during the opening.
    pub(super) fn open(
        kind: MediumKind,
        image: Image,
        oracle: Oracle,
        clients: usize,
        budget: Option<Budget>,
        tally: &'t mut CheckCounts,
    ) -> Result<CrashHarness<'t>, CheckFailure> {
        let (medium, pool) = recover::open(kind, kind.recorder(image))?;
        let mut world = CrashHarness {
            kind,
            medium,
            pool,
            clients: Vec::new(),
            oracle,
            budget,
            tally,
            unread_sums: BTreeMap::new(),
            op: 1000,
            oracle_after_sync: None,
            tier_moves: TierMoves::default(),
            last_points: Vec::new(),
        };
        world.adopt_recovered()?;
        world.open_clients(clients)?;
        Ok(world)
    }

    /// Makes the contents that a recovery has just decided on certain.
    fn adopt_recovered(&mut self) -> Result<(), CheckFailure> {
        let before = self.oracle.clone();
        self.check_crashes(&before, &before)?;
        let mut reader = recover::session(&self.pool);
        let found = recover::read_contents(&self.pool, &mut reader, &BTreeMap::new())?;
        let number = reader.number();
        let closed = self.pool.borrow_mut().close_session(number);
        closed.or_else(|cause| fail("ending a session", cause.to_string()))?;
        let present = before.check(&found)?;
        for index in present {
            record_open(&mut self.oracle.open, &before.possible[index]);
        }
        self.oracle.certain = self.contents_of(&before, &found);
        self.oracle.snapshots = found.snapshots.clone();
        self.oracle.uncertain_snapshot = None;
        self.oracle.possible.clear();
        let certain = &self.oracle.certain;
        self.oracle
            .open
            .retain(|_, open| certain.contains_key(&open.slice));
        let now = self.oracle.clone();
        self.check_crashes(&now, &now)
    }

    /// The recovered contents, with the bytes that the model knows for their checksums.
    fn contents_of(&self, before: &Oracle, found: &RecoveredContents) -> PoolContents {
        let mut known: BTreeMap<PageWord, Content> = BTreeMap::new();
        for thing in before.certain.values() {
            known.extend(
                thing
                    .pages
                    .values()
                    .map(|content| (content.0, content.clone())),
            );
        }
        for step in &before.possible {
            if let Effect::Pages(_, pages) = &step.effect {
                let contents = pages.iter().filter_map(|(_, content)| content.clone());
                known.extend(contents.map(|content| (content.0, content)));
            }
            if let Effect::Clone(_, thing) = &step.effect {
                let contents = thing.pages.values().cloned();
                known.extend(contents.map(|content| (content.0, content)));
            }
        }
        let thing = |thing: &ObjectContents<PageWord>| ObjectContents {
            entry: thing.entry,
            pages: thing
                .pages
                .iter()
                .map(|(&page, sum)| (page, known[sum].clone()))
                .collect(),
        };
        let things = found.objects.iter();
        things
            .map(|(&slice, found)| (slice, thing(found)))
            .collect()
    }

    pub(super) fn open_clients(&mut self, count: usize) -> Result<(), CheckFailure> {
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

    /// Marks everything so far as durable.
    fn make_durable(&mut self) {
        for step in &self.oracle.possible {
            record_open(&mut self.oracle.open, step);
        }
        self.oracle.make_certain();
    }

    /// Runs an operation of the owner; `effect` is its record, if it has one. An operation that
    /// `syncs` makes everything before it durable.
    pub(super) fn owner_op(
        &mut self,
        syncs: bool,
        effect: Option<Effect>,
        run: impl FnOnce(&SharedPool) -> Result<(), String>,
    ) -> Result<(), CheckFailure> {
        let group = match self.kind {
            MediumKind::Memory | MediumKind::Tier => usize::MAX,
            MediumKind::File => UNORDERED,
        };
        let step = effect.map(|effect| PossibleRecord {
            effect,
            op: 0,
            epoch: 0,
            is_open: false,
            group,
        });
        let is_put = step.is_some();
        self.oracle.possible.extend(step);
        let during = self.oracle.clone();
        if self.kind == MediumKind::File && syncs {
            // After the first sync only the operation's own record is uncertain.
            let own = is_put.then(|| self.oracle.possible.pop()).flatten();
            self.make_durable();
            self.oracle.possible.extend(own);
            self.oracle_after_sync = Some(self.oracle.clone());
        }
        if let Err(cause) = run(&self.pool) {
            return fail("operations", cause);
        }
        if is_put && self.kind != MediumKind::File {
            let step = self.oracle.possible.pop().expect("its own");
            apply(&mut self.oracle.certain, &step.effect);
        }
        if self.kind == MediumKind::File && syncs {
            self.make_durable();
        }
        self.check_crashes(&during, &self.oracle.clone())
    }

    pub(super) fn forget_leaves(&mut self) {
        for client in &mut self.clients {
            client.session.clear_leaf_cache();
        }
    }

    /// The legs are equal: no operation of the slice needs to be listed any more.
    pub(super) fn forget_open(&mut self, slice: SliceId) {
        self.oracle.open.retain(|_, open| open.slice != slice);
        for step in &mut self.oracle.possible {
            step.is_open &= !matches!(step.effect, Effect::Pages(of, _) if of == slice);
        }
        for client in &mut self.clients {
            client.ops.retain(|(_, open)| open.slice != slice);
        }
    }

    /// Ends a client, dead or alive.
    pub(super) fn end_client(&mut self, client: usize) -> Result<(), CheckFailure> {
        let Client {
            session,
            ops,
            died_in,
        } = self.clients.swap_remove(client);
        let during = self.oracle.clone();
        let number = session.number();
        let closed = self.pool.borrow_mut().close_session(number);
        closed.or_else(|cause| fail("ending a session", cause.to_string()))?;
        if self.clients.iter().all(|client| client.died_in.is_none()) {
            let pool = self.pool.borrow();
            let next = pool.mapping().control().seq().load(Ordering::Acquire);
            if pool.checkpoint_limit().0 != next {
                return fail("checkpoints", "an ended session holds them back");
            }
        }
        if let Some(group) = died_in {
            let mut reader = recover::session(&self.pool);
            let found = recover::read_contents(&self.pool, &mut reader, &self.unread_sums)?;
            self.resolve_dead_op(group, &found)?;
            let number = reader.number();
            let closed = self.pool.borrow_mut().close_session(number);
            closed.or_else(|cause| fail("ending a session", cause.to_string()))?;
        }
        if self.kind == MediumKind::File {
            self.make_durable();
        }
        self.oracle.open.extend(ops);
        self.check_crashes(&during, &self.oracle.clone())
    }

    /// The owner rolled the operation of a dead session forward, or voided it. The oracle takes the
    /// visible contents as final.
    fn resolve_dead_op(
        &mut self,
        group: usize,
        found: &RecoveredContents,
    ) -> Result<(), CheckFailure> {
        let (own, others): (Vec<PossibleRecord>, Vec<PossibleRecord>) =
            std::mem::take(&mut self.oracle.possible)
                .into_iter()
                .partition(|step| step.group == group);
        let Some(Effect::Pages(slice, _)) = own.first().map(|step| &step.effect) else {
            self.oracle.possible = others;
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
                snapshots: self.oracle.snapshots.clone(),
                uncertain_snapshot: self.oracle.uncertain_snapshot,
                ..Oracle::default()
            };
            std::mem::swap(&mut self.oracle, &mut tried);
            if self.matches(found, slice) {
                self.oracle.open = tried.open;
                if own[..count].iter().any(|step| !is_empty(step)) {
                    let done = own[..count].iter();
                    done.for_each(|step| record_open(&mut self.oracle.open, step));
                    self.tally.rolled_forward += 1;
                } else {
                    self.tally.voided += 1;
                }
                self.oracle.possible = others;
                return Ok(());
            }
            self.oracle = tried;
        }
        fail("a dead session's operation", "only a part of it is applied")
    }

    /// The owner and all sessions die; the machine keeps running.
    pub(super) fn reopen(&mut self) -> Result<(), CheckFailure> {
        let count = self.clients.len();
        let during = self.oracle.clone();
        if self.kind == MediumKind::File {
            // Data in the file survives, and is durable after the recovery. Only the last operation
            // stays uncertain if its session died inside it.
            let died = self.clients.iter().any(|client| client.died_in.is_some());
            let steps = std::mem::take(&mut self.oracle.possible).into_iter();
            let (open, done) = steps.partition(|step| died && step.op == self.op);
            self.oracle.possible = done;
            self.make_durable();
            self.oracle.possible = open;
        }
        self.clients.clear();
        self.tier_moves = TierMoves::default();
        self.pool = recover::reopen(self.kind, &self.medium)?;
        self.check_crashes(&during, &during)?;
        self.adopt_recovered()?;
        self.open_clients(count)
    }

    /// Opens a pool on a crash image and continues the sequence there.
    pub(super) fn resume_from_image(
        &mut self,
        image: Image,
        oracle: Oracle,
        count: usize,
    ) -> Result<(), CheckFailure> {
        self.clients.clear();
        self.tier_moves = TierMoves::default();
        (self.medium, self.pool) = recover::open(self.kind, self.kind.recorder(image))?;
        self.oracle = oracle;
        self.tally.resumptions += 1;
        self.adopt_recovered()?;
        self.open_clients(count)
    }

    /// Empties the running pool; every frame must be free then.
    pub(super) fn empty_pool(mut self) -> Result<(), CheckFailure> {
        while let Some(client) = self.clients.iter().position(|c| c.died_in.is_some()) {
            self.end_client(client)?;
        }
        self.end_moves()?;
        let slices = self.oracle.current();
        let sessions = self
            .clients
            .drain(..)
            .map(|client| client.session)
            .collect();
        recover::empty(&self.pool, sessions, slices.keys().copied())
    }

    pub(super) fn entry(&self, slice: SliceId) -> Option<ObjectEntry> {
        self.oracle.current().get(&slice).map(|thing| thing.entry)
    }
}

fn is_empty(step: &PossibleRecord) -> bool {
    matches!(&step.effect, Effect::Pages(_, pages) if pages.is_empty())
}
