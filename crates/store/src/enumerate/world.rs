//! A pool at work on a recorded medium, the model beside it.

use super::medium::{Death, Medium};
use super::model::{
    Bytes, Content, Effect, Entry, Found, Held, Oracle, Step, Thing, UNORDERED, Wrong, apply,
    content, wrong,
};
use super::owner::{self, Owned};
use super::recover::{self, Kind, recover};
use super::{Budget, Tally};
use crate::control::Range;
use crate::session::{Member, Session, clear, write};
use crate::view::{Handle, StoreError};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{CrashPoint, Image, Recorder};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const NODE_PAGES: u64 = 512;
/// Every so many images the objects that images share are read, too.
const READ_ALL: u64 = 64;
/// Every so many images the recovery itself crashes.
const CRASH_RECOVERY: u64 = 48;

/// A session of the pool, as its client sees it.
pub(super) struct Client {
    pub(super) session: Session<Medium>,
    /// Its operations of which another leg may not have heard.
    ops: Vec<(u64, SliceId)>,
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
    pub(super) budget: Budget,
    pub(super) tally: &'t mut Tally,
    /// Objects that no operation touches; most images need not read them.
    pub(super) unread: BTreeMap<SliceId, BTreeMap<u64, u32>>,
    op: u64,
    /// What holds behind the first sync of the operation at hand.
    synced: Option<Oracle>,
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
        budget: Budget,
        tally: &'t mut Tally,
    ) -> Result<World<'t>, Wrong> {
        let recorder = match kind {
            Kind::Memory => Recorder::from_image(image),
            Kind::File => Recorder::of_file(image),
        };
        let (medium, pool) = recover::open(kind, recorder)?;
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
            if let (Effect::Pages(slice, _), true) =
                (&before.maybe[index].effect, before.maybe[index].is_open)
            {
                self.oracle.open.insert(before.maybe[index].op, *slice);
            }
        }
        self.oracle.certain = self.held(&before, &found);
        self.oracle.maybe.clear();
        let certain = &self.oracle.certain;
        self.oracle
            .open
            .retain(|_, slice| certain.contains_key(slice));
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

    fn handle(&self, slice: SliceId) -> Handle {
        let pool = self.pool.borrow();
        pool.handle(slice).expect("the model has it")
    }

    /// Whether a dead session keeps these pages locked.
    fn is_locked(&self, slice: SliceId, pages: std::ops::Range<u64>) -> bool {
        let handle = self.handle(slice);
        let pool = self.pool.borrow();
        let control = pool.view().control();
        let of_pages = (pages.start..pages.end)
            .step_by(16)
            .chain([pages.end - 1])
            .any(|page| !control.is_free(&Range::of(handle.object, PageNo(page), 1)));
        let of_nodes = |page: u64| {
            (1..=4u8).any(|level| {
                let range = Range::of_node(handle.object, level, PageNo(page));
                !control.is_free(&range)
            })
        };
        of_pages || of_nodes(pages.start) || of_nodes(pages.end - 1)
    }

    fn byte_pages(offset: u64, len: u64) -> std::ops::Range<u64> {
        let page = PAGE_BYTES as u64;
        offset / page..(offset + len).div_ceil(page)
    }

    /// Writes through a session. `open` operations before it may be missing
    /// elsewhere; the session may die after `death` accesses.
    pub(super) fn write(
        &mut self,
        client: usize,
        slice: SliceId,
        offset: u64,
        data: &[u8],
        open: u32,
        death: Option<i64>,
    ) -> Result<Option<End>, Wrong> {
        let pages = Self::byte_pages(offset, data.len() as u64);
        if self.clients[client].died_in.is_some() || self.is_locked(slice, pages) {
            return Ok(None);
        }
        let effects = self.write_effects(slice, offset, data);
        let end = self.change(
            client,
            slice,
            effects,
            open,
            death,
            |session, handle, stamp| {
                write(&mut [Member { session, handle }], offset, data, stamp)
                    .map_err(|failure| failure.cause)
            },
        )?;
        Ok(Some(end))
    }

    /// Frees a range through a session.
    pub(super) fn clear(
        &mut self,
        client: usize,
        slice: SliceId,
        offset: u64,
        len: u64,
        open: u32,
        death: Option<i64>,
    ) -> Result<Option<End>, Wrong> {
        let pages = Self::byte_pages(offset, len);
        if self.clients[client].died_in.is_some() || self.is_locked(slice, pages) {
            return Ok(None);
        }
        let effects = self.clear_effects(slice, offset, len);
        let end = self.change(
            client,
            slice,
            effects,
            open,
            death,
            |session, handle, stamp| {
                clear(&mut [Member { session, handle }], offset, len, stamp)
                    .map_err(|failure| failure.cause)
            },
        )?;
        Ok(Some(end))
    }

    fn shown(&self, slice: SliceId) -> Thing<Content> {
        let mut held = self.oracle.now();
        held.remove(&slice).expect("the model has it")
    }

    /// The records of a write: parts of pages by themselves, whole pages of a
    /// leaf together.
    fn write_effects(&self, slice: SliceId, offset: u64, data: &[u8]) -> Vec<Effect> {
        let shown = self.shown(slice);
        let (mut at, mut rest, mut effects) = (offset, data, Vec::new());
        while !rest.is_empty() {
            let (page, within) = (at / PAGE_BYTES as u64, at as usize % PAGE_BYTES);
            let taken = if within != 0 || rest.len() < PAGE_BYTES {
                let taken = rest.len().min(PAGE_BYTES - within);
                let merged = merge(shown.pages.get(&page), within, &rest[..taken]);
                effects.push(Effect::Pages(slice, vec![(page, Some(merged))]));
                taken
            } else {
                let in_leaf = NODE_PAGES - page % NODE_PAGES;
                let count = (rest.len() / PAGE_BYTES).min(in_leaf as usize);
                let chunks = rest.as_chunks::<PAGE_BYTES>().0[..count].iter();
                let pages = (page..).zip(chunks.map(|bytes| Some(content(*bytes))));
                effects.push(Effect::Pages(slice, pages.collect()));
                count * PAGE_BYTES
            };
            at += taken as u64;
            rest = &rest[taken..];
        }
        effects
    }

    fn clear_effects(&self, slice: SliceId, offset: u64, len: u64) -> Vec<Effect> {
        let page_bytes = PAGE_BYTES as u64;
        let shown = self.shown(slice);
        let mut effects = Vec::new();
        let mut part = |offset: u64, len: u64| {
            let page = offset / page_bytes;
            if let (Some(old), true) = (shown.pages.get(&page), len > 0) {
                let within = (offset % page_bytes) as usize;
                let merged = merge(Some(old), within, &vec![0; len as usize]);
                effects.push(Effect::Pages(slice, vec![(page, Some(merged))]));
            }
        };
        let end = offset + len;
        let (first, last) = (
            offset.next_multiple_of(page_bytes),
            end / page_bytes * page_bytes,
        );
        if first > last {
            part(offset, len);
            return effects;
        }
        part(offset, first - offset);
        part(last, end - last);
        let mut run: Vec<(u64, Option<Content>)> = Vec::new();
        for page in first / page_bytes..last / page_bytes {
            let mapped = shown.pages.contains_key(&page);
            if (!mapped || page % NODE_PAGES == 0) && !run.is_empty() {
                effects.push(Effect::Pages(slice, std::mem::take(&mut run)));
            }
            if mapped {
                run.push((page, None));
            }
        }
        if !run.is_empty() {
            effects.push(Effect::Pages(slice, run));
        }
        effects
    }

    fn change(
        &mut self,
        client: usize,
        slice: SliceId,
        effects: Vec<Effect>,
        open: u32,
        death: Option<i64>,
        run: impl FnOnce(&mut Session<Medium>, Handle, Stamp) -> Result<(), StoreError>,
    ) -> Result<End, Wrong> {
        self.op += 1;
        let (op, before) = (self.op, self.oracle.clone());
        let epoch = Epoch(before.certain[&slice].entry.epoch);
        let stamp = Stamp { epoch, op, open };
        let handle = self.handle(slice);
        let group = match self.kind {
            Kind::Memory => op as usize,
            Kind::File => UNORDERED,
        };
        let oldest = op - u64::from(open);
        let told = |(old, _): &mut (u64, SliceId)| *old < oldest;
        for (old, _) in self.clients[client].ops.extract_if(.., told) {
            self.oracle.open.remove(&old);
            for step in self.oracle.maybe.iter_mut().filter(|step| step.op == old) {
                step.is_open = false;
            }
        }
        let first = self.oracle.maybe.len();
        let steps = effects.into_iter().map(|effect| Step {
            effect,
            op,
            is_open: true,
            group,
        });
        self.oracle.maybe.extend(steps);
        if let Some(accesses) = death {
            self.medium.die_after(accesses);
        }
        let session = &mut self.clients[client].session;
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            owner::with(&self.pool, || run(session, handle, stamp))
        }));
        let _left = self.medium.live();
        let during = self.oracle.clone();
        let end = match outcome {
            Ok(Ok(())) => End::Done,
            Ok(Err(StoreError::NoSpace)) => End::Full,
            Ok(Err(cause)) => return wrong("operations", format!("{slice}: {cause}")),
            Err(cause) if cause.is::<Death>() => End::Died,
            Err(cause) => resume_unwind(cause),
        };
        if end != End::Died {
            if end == End::Full {
                self.keep_shown(slice, first)?;
            }
            if self.oracle.maybe.len() > first {
                self.clients[client].ops.push((op, slice));
                self.acknowledge(first, op, slice);
            }
        } else {
            self.clients[client].died_in = Some(group);
            self.tally.deaths += 1;
        }
        self.check_crashes(&during, &self.oracle.clone())?;
        Ok(end)
    }

    /// Some of the last operation's steps happened: those that can be seen.
    fn keep_shown(&mut self, slice: SliceId, first: usize) -> Result<(), Wrong> {
        self.tally.full += 1;
        let alive = self
            .clients
            .iter_mut()
            .find(|client| client.died_in.is_none());
        let session = &mut alive.expect("the one that was refused").session;
        let found = recover::look(&self.pool, session, &self.unread)?;
        while !self.shows(&found, slice) {
            if self.oracle.maybe.len() == first {
                return wrong("refused writes", "something else changed");
            }
            self.oracle.maybe.pop();
        }
        Ok(())
    }

    fn shows(&self, found: &Found, slice: SliceId) -> bool {
        let sums = |thing: Thing<Content>| -> BTreeMap<u64, u32> {
            thing
                .pages
                .into_iter()
                .map(|(page, content)| (page, content.0))
                .collect()
        };
        sums(self.shown(slice)) == found.things[&slice].pages
    }

    /// The steps from `first` on are acknowledged.
    fn acknowledge(&mut self, first: usize, op: u64, slice: SliceId) {
        if self.kind == Kind::File {
            return;
        }
        self.oracle.open.insert(op, slice);
        for step in self.oracle.maybe.split_off(first) {
            apply(&mut self.oracle.certain, &step.effect);
            // What a dead session may still have done to these came before.
            if let Effect::Pages(slice, pages) = step.effect {
                for other in &mut self.oracle.maybe {
                    if let Effect::Pages(of, theirs) = &mut other.effect
                        && *of == slice
                    {
                        theirs.retain(|(page, _)| pages.iter().all(|(new, _)| new != page));
                    }
                }
            }
        }
    }

    /// Everything so far is durable.
    fn settle(&mut self) {
        for step in &self.oracle.maybe {
            if let (Effect::Pages(slice, _), true) = (&step.effect, step.is_open) {
                self.oracle.open.insert(step.op, *slice);
            }
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
        self.oracle.open.retain(|_, of| *of != slice);
        for step in &mut self.oracle.maybe {
            step.is_open &= !matches!(step.effect, Effect::Pages(of, _) if of == slice);
        }
        for client in &mut self.clients {
            client.ops.retain(|(_, of)| *of != slice);
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
        let (slice, op) = (*slice, own[0].op);
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
                    self.oracle.open.insert(op, slice);
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
            // What the file got is there, and durable once it was recovered.
            self.settle();
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
        let recorder = match self.kind {
            Kind::Memory => Recorder::from_image(image),
            Kind::File => Recorder::of_file(image),
        };
        self.clients.clear();
        (self.medium, self.pool) = recover::open(self.kind, recorder)?;
        self.oracle = oracle;
        self.tally.lives += 1;
        self.resolve()?;
        self.open_clients(count)
    }

    /// Checks the crashes since the last call: all but the last happened
    /// before `after` was.
    fn check_crashes(&mut self, during: &Oracle, after: &Oracle) -> Result<(), Wrong> {
        let points = self.medium.recorder.take_crash_points();
        let (last, synced) = (points.len() - 1, self.synced.take());
        self.last.clear();
        for (number, point) in points.into_iter().enumerate() {
            let (oracle, images) = match (number, &synced) {
                _ if number == last => (after, self.budget.after),
                (1.., Some(synced)) => (synced, self.budget.during),
                _ => (during, self.budget.during),
            };
            self.check_point(&point, oracle, images)?;
            self.last.push((point, oracle.clone()));
        }
        Ok(())
    }

    fn check_point(
        &mut self,
        point: &CrashPoint,
        oracle: &Oracle,
        images: u64,
    ) -> Result<(), Wrong> {
        self.tally.points += 1;
        let is_all = point.count() <= images;
        let count = point.count().min(images);
        self.tally.exhausted += u64::from(is_all);
        for index in 0..count {
            let image = match index {
                _ if is_all => point.image(index),
                0 => point.image(0),
                1 => point.everything(),
                _ => point.sample(self.tally.images),
            };
            self.check_image(image, oracle)?;
        }
        Ok(())
    }

    fn check_image(&mut self, image: Image, oracle: &Oracle) -> Result<(), Wrong> {
        self.tally.images += 1;
        if self.tally.images.is_multiple_of(CRASH_RECOVERY) {
            self.crash_recovery(image.clone(), oracle)?;
        }
        let nothing = BTreeMap::new();
        let unread = match self.tally.images.is_multiple_of(READ_ALL) {
            true => &nothing,
            false => &self.unread,
        };
        let found = recover(self.kind, image, unread)?;
        oracle.judge(&found).map(drop)
    }

    /// A crash while recovering from a crash.
    fn crash_recovery(&mut self, image: Image, oracle: &Oracle) -> Result<(), Wrong> {
        let recorder = match self.kind {
            Kind::Memory => Recorder::from_image(image),
            Kind::File => Recorder::of_file(image),
        };
        let (medium, _pool) = recover::open(self.kind, recorder)?;
        for point in medium.recorder.take_crash_points() {
            for image in [
                point.image(0),
                point.everything(),
                point.sample(self.tally.images),
            ] {
                self.tally.images += 1;
                self.tally.of_recovery += 1;
                let found = recover(self.kind, image, &self.unread)?;
                oracle.judge(&found)?;
            }
        }
        Ok(())
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

fn merge(old: Option<&Content>, within: usize, part: &[u8]) -> Content {
    let mut bytes: Bytes = old.map_or([0; PAGE_BYTES], |old| *old.1);
    bytes[within..][..part.len()].copy_from_slice(part);
    content(bytes)
}
