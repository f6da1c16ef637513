//! The end of a history: no more faults, and everything must come to rest and
//! be right.

use crate::checker::{SECTOR, value_of};
use crate::client::Client;
use crate::cluster::tell;
use crate::life::Life;
use crate::medium::Medium;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{Layout, Leg, LegState};
use pagemesh_base::slice::{BrickControl, SliceError, SliceReply, SliceRequest};
use pagemesh_brick::worker::Worker;
use pagemesh_pmem::Media;
use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

/// Steps in which all must have come to rest, and time that may pass.
pub(crate) const STEPS_MAX: u64 = 400_000;
const TIME_MAX: Duration = Duration::from_secs(600);
/// Rounds of housekeeping after which everything deleted is free.
const ROUNDS_MAX: u32 = 200;
const PAGE: u64 = 4096;

struct Bypass {
    house: usize,
    worker: Worker<Medium>,
    handle: u32,
    may_be_damaged: bool,
}

impl Bypass {
    fn ask(&mut self, request: SliceRequest) -> Result<Option<SliceReply>, String> {
        match self.worker.execute(self.handle, request) {
            Ok(reply) => Ok(Some(reply)),
            Err(SliceError::Damaged { .. }) if self.may_be_damaged => Ok(None),
            Err(cause) => Err(format!("brick {}: {cause}", self.house)),
        }
    }

    /// Nothing if the page may be damaged, and is.
    fn read(&mut self, page: u64) -> Result<Option<Vec<u8>>, String> {
        let request = SliceRequest::Read {
            offset: page * PAGE,
            len: PAGE as u32,
        };
        match self.ask(request)? {
            Some(SliceReply::Data(data)) => Ok(Some(data)),
            None => Ok(None),
            Some(_) => Err(format!("brick {} reads nothing", self.house)),
        }
    }

    /// Adds the pages of a slice that hold data, or may.
    fn note_mapped(&mut self, bytes: u64, pages: &mut BTreeSet<u64>) -> Result<(), String> {
        let mut offset = 0;
        while offset < bytes {
            let len = bytes - offset;
            let Some(SliceReply::Extents(extents)) =
                self.ask(SliceRequest::Extents { offset, len })?
            else {
                pages.extend(0..bytes / PAGE);
                return Ok(());
            };
            for extent in extents {
                let next = offset + extent.len;
                if extent.mapped {
                    pages.extend(offset / PAGE..next.div_ceil(PAGE));
                }
                offset = next;
            }
        }
        Ok(())
    }
}
/// Any.
const LEG_STATES: [LegState; 4] = [
    LegState::InSync,
    LegState::Stale,
    LegState::Syncing,
    LegState::Following,
];
/// Sectors of a request at the end.
const PART: u64 = 256;

impl Life {
    /// Ends all faults, waits, and checks everything.
    pub(crate) fn rest(&mut self) -> Result<(), String> {
        tell!(self.cluster, "no more faults");
        self.calm_guests();
        self.mend();
        self.until_promoted()?;
        // Who attached meanwhile may not reach the copies that were given up.
        self.mend();
        if self.plan.is_tight {
            // The smallest pools have three sessions: one that lost its
            // connections needs them twice for a moment, and gets none.
            while !self.clients.is_empty() {
                self.leave(0);
            }
            self.enter();
            self.until_attached()?;
            self.weed()?;
            self.is_well = true;
            self.read_all()?;
            self.leave(0);
            self.settle_lines();
            self.compare_legs(&[LegState::InSync])?;
            self.enter();
            self.until_attached()?;
            self.make_room();
        }
        self.until_calm()?;
        if self.plan.files {
            self.is_well = true;
            return self.rest_files();
        }
        // A channel hears that a column is back when it looks at its answers.
        self.reap(0)?;
        self.weed()?;
        self.is_well = true;
        self.read_all()?;
        // A page that was found damaged may have cost a leg.
        self.until_calm()?;
        self.dismiss_all();
        // Before anything is written over it.
        self.compare_all_legs()?;
        self.is_well = false;
        self.enter();
        self.until_calm()?;
        self.reap(0)?;
        self.weed()?;
        self.is_well = true;
        self.write_all()?;
        self.is_rewritten = true;
        self.dismiss_all();
        self.count_scrubs();
        self.compare_all_legs()?;
        let searched = self.checker.check(self.sectors)?;
        (self.outcome.sectors, self.outcome.given_up) = (searched.sectors, searched.given_up);
        self.outcome
            .count("transaction without an answer happened", searched.happened);
        self.outcome
            .count("transaction without an answer vanished", searched.vanished);
        self.outcome
            .count("transaction of unknown outcome", searched.open);
        self.outcome
            .count("change lost with a promotion", searched.lost);
        self.outcome
            .count("durable change kept by a promotion", searched.lasted);
        self.delete_all()
    }

    pub(crate) fn count_scrubs(&mut self) {
        let (scrubs, mended) = self.cluster.scrubs();
        self.outcome.count("pool scrubbed", scrubs);
        self.outcome.count("pool mended by a scrub", mended);
    }

    /// Sets all right that faults did to the cluster.
    pub(crate) fn mend(&mut self) {
        self.cluster.net().mend();
        self.desk.mend();
        for house in 0..self.plan.pools.len() {
            if let Some(running) = self.cluster.running(house) {
                running.medium.light_out();
                running.medium.behave();
            }
            self.cluster.start(house, None, false);
            self.desk.hear(house);
        }
        for client in &mut self.clients {
            client.stopped_until = Duration::ZERO;
            for thread in &mut client.threads {
                thread.stopped_until = Duration::ZERO;
            }
        }
    }

    pub(crate) fn until_calm(&mut self) -> Result<(), String> {
        let until = self.cluster.now() + TIME_MAX;
        for _ in 0..STEPS_MAX {
            self.step()?;
            self.tend_guests()?;
            self.dismiss_superseded();
            if let [client] = &self.clients[..]
                && client.attachment > 0
                && client.is_calm()
                && self.are_guests_calm()
            {
                tell!(self.cluster, "all is calm");
                return Ok(());
            }
            if self.cluster.now() > until {
                break;
            }
        }
        let clients = self.clients.iter().map(|client| {
            let pending: Vec<_> = client.threads.iter().map(|t| t.pending.len()).collect();
            let (number, status) = (client.number, client.driven.status());
            format!("client {number} has {pending:?} pending {status:#?}")
        });
        let clients: Vec<String> = clients.collect();
        Err(format!("no rest: {}", clients.join("\n")))
    }

    /// Ends clients whose volume another one has.
    pub(crate) fn dismiss(&mut self) {
        let present = self.clients.iter().map(|client| client.attachment).max();
        let over = self.clients.iter().position(|client| {
            let is_idle = client.is_idle();
            let is_older = client.attachment > 0 && Some(client.attachment) < present;
            // One that is fenced by nobody stays, and there is no rest.
            let is_fenced = client.is_fenced() && self.desk.is_superseded(client.attachment);
            is_idle && (is_older || is_fenced)
        });
        if let Some(at) = over {
            self.leave(at);
        }
        if self.clients.is_empty() {
            self.enter();
        }
    }

    /// Ends also those that have not heard of it: whoever took the volume is gone
    /// and has told no leg. They would work on until they ask the manager.
    fn dismiss_superseded(&mut self) {
        let is_over = |client: &Client| {
            let is_superseded = self.desk.is_superseded(client.attachment);
            client.attachment > 0 && client.is_idle() && is_superseded
        };
        if let Some(at) = self.clients.iter().position(is_over) {
            self.leave(at);
        }
        self.dismiss();
    }

    /// One client has the volume, with or without all legs.
    fn until_attached(&mut self) -> Result<(), String> {
        for _ in 0..STEPS_MAX {
            self.dismiss_superseded();
            if self.clients.len() == 1 && self.clients[0].attachment > 0 {
                return Ok(());
            }
            self.step()?;
        }
        Err("no client attaches".into())
    }

    /// Every request has its answer, whatever legs are in use.
    fn until_answered(&mut self) -> Result<(), String> {
        for _ in 0..STEPS_MAX {
            if self.clients.iter().all(Client::is_idle) {
                return Ok(());
            }
            self.step()?;
        }
        Err("requests have no answer".into())
    }

    /// A volume that fills its pools is emptied, so that legs that were left
    /// out for want of room can return.
    fn make_room(&mut self) {
        self.ensure_thread();
        let sectors = self.sectors;
        self.discard(0, 0, 0..sectors);
    }

    /// Threads that were turned away, and do not know it, go.
    fn weed(&mut self) -> Result<(), String> {
        for thread in 0..self.clients[0].threads.len() {
            self.flush(0, thread);
        }
        self.until_answered()?;
        self.ensure_thread();
        Ok(())
    }

    fn ensure_thread(&mut self) {
        if self.clients[0].threads.is_empty() {
            self.next_thread += 1;
            self.clients[0].open(self.next_thread);
        }
    }

    pub(crate) fn parts(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let sectors = self.sectors;
        let starts = (0..sectors).step_by(PART as usize);
        starts.map(move |start| start..(start + PART).min(sectors))
    }

    /// What was acknowledged is there, even if legs are missing.
    fn read_all(&mut self) -> Result<(), String> {
        self.ensure_thread();
        for part in self.parts() {
            self.read(0, 0, part);
            self.until_answered()?;
        }
        Ok(())
    }

    /// Every page can be written: nothing that died has left a lock behind, in
    /// a brick or in the client.
    fn write_all(&mut self) -> Result<(), String> {
        for part in self.parts() {
            self.write(0, 0, part.clone(), false);
            self.until_calm()?;
            self.read(0, 0, part.clone());
            self.until_calm()?;
            if self.plan.is_tight {
                self.discard(0, 0, part);
                self.until_calm()?;
            }
        }
        Ok(())
    }

    /// Ends all clients, and lets bricks see that they are gone.
    pub(crate) fn dismiss_all(&mut self) {
        for mut client in std::mem::take(&mut self.clients) {
            client.program = None;
            self.account(&client);
        }
        self.settle_lines();
    }

    /// Lets bricks see that their clients are gone.
    fn settle_lines(&mut self) {
        self.pass(Duration::from_secs(1));
        loop {
            let lines = self.cluster.net().busy();
            if lines.is_empty() {
                break;
            }
            for line in lines {
                self.cluster.serve(line);
            }
        }
    }

    /// A way to a leg's pages past all clients.
    fn bypass(&self, leg: &Leg, epoch: Epoch) -> Result<Bypass, String> {
        let house = self.cluster.house_of(leg.brick).ok_or("no such brick")?;
        let running = self.cluster.running(house).ok_or("a brick is down")?;
        let told = |cause: SliceError| format!("brick {house}: {cause}");
        let mut worker = Worker::open(&running.brick, 1, 1).map_err(told)?;
        let (handle, _) = worker.attach(leg.slice, epoch).map_err(told)?;
        Ok(Bypass {
            house,
            worker,
            handle,
            may_be_damaged: self.plan.damaged == Some(house) && !self.is_rewritten,
        })
    }

    /// All legs are there, and hold the same.
    pub(crate) fn compare_all_legs(&self) -> Result<(), String> {
        for (number, column) in self.layout()?.columns().enumerate() {
            if column.round != 0 {
                return Err(format!("column {number} is in round {}", column.round));
            }
        }
        self.compare_legs(&LEG_STATES)
    }

    pub(crate) fn layout(&self) -> Result<Layout, String> {
        let manager = self.desk.manager().ok_or("no manager")?;
        let detail = manager.show(&self.name);
        Ok(detail.map_err(|fault| fault.to_string())?.layout)
    }

    /// Legs in these states hold the same.
    fn compare_legs(&self, states: &[LegState]) -> Result<(), String> {
        let layout = self.layout()?;
        let epoch = Epoch(layout.epoch.0);
        for segment in &layout.segments {
            for (number, column) in segment.columns.iter().enumerate() {
                let legs = column.legs.iter();
                let legs = legs.filter(|leg| states.contains(&leg.state));
                let ways = legs.map(|leg| self.bypass(leg, epoch));
                let mut ways = ways.collect::<Result<Vec<_>, String>>()?;
                let mut pages = BTreeSet::new();
                for way in &mut ways {
                    way.note_mapped(segment.slice_bytes(), &mut pages)?;
                }
                for page in pages {
                    let found = ways.iter_mut().map(|way| way.read(page));
                    let found = found.collect::<Result<Vec<_>, String>>()?;
                    let found = found.iter().flatten();
                    let found: Vec<_> = found.collect();
                    if found.windows(2).any(|pair| pair[0] != pair[1]) {
                        let sectors = |bytes: &[u8]| -> Vec<_> {
                            bytes.chunks(SECTOR as usize).map(value_of).collect()
                        };
                        let held: Vec<_> = found.iter().map(|bytes| sectors(bytes)).collect();
                        return Err(format!("page {page} of column {number} differs: {held:?}"));
                    }
                    if found.is_empty() {
                        return Err(format!("page {page} of column {number} is lost"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Deletes the volume: every frame must be free again.
    pub(crate) fn delete_all(&mut self) -> Result<(), String> {
        let manager = self.desk.manager().ok_or("no manager")?;
        let deleted = manager.delete(&self.name, true);
        deleted.map_err(|fault| format!("the volume is not deleted: {fault}"))?;
        drop(manager);
        for house in 0..self.plan.pools.len() {
            let running = self.cluster.running(house).ok_or("a brick is down")?;
            let used = || running.brick.status().map_or(u64::MAX, |s| s.used_bytes);
            let mut rounds = 0;
            while used() > 0 && rounds < ROUNDS_MAX {
                running.brick.tend();
                rounds += 1;
            }
            // Nothing is freed on the word of damage: what a damaged slot of a page named
            // stays in use, and so does what cannot be read.
            let is_damaged = self.plan.damaged == Some(house);
            let withheld = if is_damaged { self.frames_withheld } else { 0 };
            if used() > withheld * PAGE {
                return Err(format!("brick {house} has lost {} bytes of frames", used()));
            }
            let unreadable = running.medium.unreadable().len() as u64;
            if used() < unreadable * PAGE {
                return Err(format!(
                    "brick {house} would use one of {unreadable} unreadable frames again"
                ));
            }
        }
        Ok(())
    }
}
