//! Bricks and the network between them and everybody else.
//!
//! Locks are held for moments and never while real code runs: that code sends
//! and receives, and takes them itself.

use crate::dice::Dice;
use crate::guests::Crew;
use crate::history::History;
use crate::house::{Death, House, Running, survives};
use crate::network::{LineId, Network, Peer, Way};
use crate::wire::{BrickWire, PeerWire};
use pagemesh_base::layout::BrickId;
use pagemesh_base::slice::SliceError;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::remote::Remote;
use pagemesh_fabric::serve::Exchange;
use std::collections::BTreeMap;
use std::fmt::Arguments;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Turns of a brick in which a blocking call must have its answer.
const RUSHED_TURNS_MAX: u32 = 64;

pub(crate) fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct Cluster {
    net: Mutex<Network>,
    houses: Mutex<Vec<House>>,
    exchanges: Mutex<BTreeMap<LineId, Exchange>>,
    history: Mutex<History>,
    dice: Mutex<Dice>,
    scrub_every: Option<Duration>,
    pub(crate) crew: Mutex<Crew>,
    /// Whether the bricks' pools are mapped by guests.
    pub(crate) has_guests: bool,
    /// What the fake clock counts from; only differences matter.
    start: Instant,
}

/// Tells the history.
macro_rules! tell {
    ($cluster:expr, $($what:tt)*) => { $cluster.tell(format_args!($($what)*)) };
}
pub(crate) use tell;

impl Cluster {
    pub(crate) fn new(
        mut dice: Dice,
        pools: &[usize],
        scrub_every: Option<Duration>,
        history: History,
        crew: Option<Crew>,
    ) -> Arc<Cluster> {
        let houses = pools.iter().enumerate();
        let houses = houses.map(|(number, bytes)| House::new(number, *bytes));
        let cluster = Arc::new(Cluster {
            net: Mutex::new(Network::new(dice.split(), pools.len())),
            houses: Mutex::new(houses.collect()),
            exchanges: Mutex::default(),
            history: Mutex::new(history),
            dice: Mutex::new(dice),
            scrub_every,
            has_guests: crew.is_some(),
            crew: Mutex::new(crew.unwrap_or_else(|| Crew::new(0))),
            start: Instant::now(),
        });
        (0..pools.len()).for_each(|house| cluster.plan_scrubs(house));
        cluster
    }

    fn plan_scrubs(&self, house: usize) {
        if let (Some(every), Some(running)) = (self.scrub_every, self.running(house)) {
            running.brick.plan_scrubs(Some(every), self.instant());
        }
    }

    /// Scrubs of pools that came to their end in the bricks that run, and what
    /// they mended.
    pub(crate) fn scrubs(&self) -> (u64, u64) {
        let now = self.instant();
        let houses = self.houses();
        let running = houses.iter().filter_map(|house| house.running.as_ref());
        let scrubs = running.map(|running| running.brick.scrub_status(now));
        scrubs.fold((0, 0), |(passes, mended), scrubs| {
            (passes + scrubs.passes, mended + scrubs.mended)
        })
    }

    pub(crate) fn net(&self) -> MutexGuard<'_, Network> {
        guard(&self.net)
    }

    pub(crate) fn houses(&self) -> MutexGuard<'_, Vec<House>> {
        guard(&self.houses)
    }

    pub(crate) fn now(&self) -> Duration {
        self.net().now
    }

    pub(crate) fn instant(&self) -> Instant {
        self.start + self.now()
    }

    pub(crate) fn tell(&self, what: Arguments<'_>) {
        let now = self.now();
        guard(&self.history).tell(now, what);
    }

    pub(crate) fn digest(&self) -> u64 {
        guard(&self.history).digest()
    }

    pub(crate) fn running(&self, house: usize) -> Option<Arc<Running>> {
        self.houses()[house].running.clone()
    }

    pub(crate) fn is_up(&self, house: usize) -> bool {
        self.houses()[house].running.is_some()
    }

    pub(crate) fn house_of(&self, brick: BrickId) -> Option<usize> {
        self.houses().iter().position(|house| house.id == brick)
    }

    /// A connection for blocking calls to whoever has this address.
    pub(crate) fn connect(
        self: &Arc<Cluster>,
        peer: Peer,
        address: &str,
        timeouts: Timeouts,
    ) -> Result<(Remote<PeerWire>, LineId), SliceError> {
        let lost = |why: &str| SliceError::Lost(format!("the brick at {address}: {why}"));
        let found = {
            let houses = self.houses();
            let at = houses.iter().position(|house| house.address() == address);
            let at = at.filter(|at| houses[*at].running.is_some());
            at.map(|at| (at, houses[at].id))
        };
        let (house, id) = found.ok_or_else(|| lost("cannot be reached"))?;
        let line = {
            let mut net = self.net();
            if net.is_cut(peer, house) {
                return Err(lost("no answer"));
            }
            net.open(peer, house)
        };
        guard(&self.exchanges).insert(line, Exchange::default());
        let wire = PeerWire::new(Arc::clone(self), line);
        Ok((Remote::new(wire, id, timeouts.call), line))
    }

    /// Lets a brick answer a blocking call; false if it does not.
    pub(crate) fn rush(&self, line: LineId) -> bool {
        for _ in 0..RUSHED_TURNS_MAX {
            if self.net().deliver(line, Way::Down) {
                return true;
            }
            if !self.serve(line) {
                break;
            }
        }
        self.net().deliver(line, Way::Down)
    }

    /// A brick's turn with one connection: one message. False if there is
    /// nothing for it, or nobody.
    pub(crate) fn serve(&self, line: LineId) -> bool {
        let house = match self.net().line(line) {
            Some(found) => found.house,
            None => return false,
        };
        let Some(running) = self.running(house) else {
            return false;
        };
        if !self.net().deliver(line, Way::Up) {
            return false;
        }
        let Some(mut exchange) = guard(&self.exchanges).remove(&line) else {
            return false;
        };
        let wire = BrickWire {
            cluster: self,
            line,
        };
        self.rouse(house);
        let served = survives(|| running.serve(&mut exchange, &wire));
        self.rested();
        match served {
            Ok(Ok(true)) => {
                guard(&self.exchanges).insert(line, exchange);
            }
            Ok(ended) => {
                if let Err(broken) = ended {
                    tell!(self, "brick {house} ends connection {line}: {broken}");
                }
                self.end_session(house, line, exchange);
            }
            Err(_) => {
                self.kill_doomed(house);
                drop(exchange);
            }
        }
        true
    }

    fn end_session(&self, house: usize, line: LineId, exchange: Exchange) {
        self.net().hang_up(line);
        self.rouse(house);
        let dropped = survives(|| drop(exchange));
        self.rested();
        if dropped.is_err() {
            self.kill_doomed(house);
        }
    }

    /// A connection breaks: both ends see it.
    pub(crate) fn hang_up(&self, line: LineId) {
        let house = self.net().line(line).map(|line| line.house);
        let exchange = guard(&self.exchanges).remove(&line);
        if let (Some(house), Some(exchange)) = (house, exchange) {
            self.end_session(house, line, exchange);
        }
    }

    /// A housekeeper's round, if the bell was rung.
    pub(crate) fn tend(&self, house: usize) -> bool {
        let Some(running) = self.running(house) else {
            return false;
        };
        if self.scrub_every.is_some() {
            let now = self.instant();
            if survives(|| running.brick.scrub_if_due(now)).is_err() {
                self.kill_doomed(house);
                return true;
            }
        }
        let rung = running.brick.view().control().rung();
        if self.houses()[house].bell == rung {
            return false;
        }
        self.houses()[house].bell = rung;
        self.rouse(house);
        let tended = survives(|| running.brick.tend());
        self.rested();
        match tended {
            // There is more to do.
            Ok(true) => self.houses()[house].bell = rung.wrapping_sub(1),
            Ok(false) => {}
            Err(_) => self.kill_doomed(house),
        }
        assert!(
            !running.brick.has_failed(),
            "the pool of brick {house} failed"
        );
        true
    }

    pub(crate) fn kill_doomed(&self, house: usize) {
        let doom = self.houses()[house].doom;
        self.kill(house, doom);
    }

    /// Ends a brick at once.
    pub(crate) fn kill(&self, house: usize, death: Death) {
        let seed = guard(&self.dice).word();
        let Some(running) = self.houses()[house].end(death, seed) else {
            if death == Death::Power {
                self.houses()[house].lose_power(seed);
            }
            return;
        };
        tell!(self, "brick {house} dies: {death:?}");
        if self.has_guests {
            running.brick.view().abandon();
        }
        let lines: Vec<LineId> = {
            let mut net = self.net();
            let exchanges = guard(&self.exchanges);
            let of_house = |line: &LineId| net.line(*line).is_none_or(|l| l.house == house);
            let lines = exchanges.keys().copied().filter(of_house).collect();
            net.die(house, death == Death::Power);
            lines
        };
        let dead: Vec<Exchange> = {
            let mut exchanges = guard(&self.exchanges);
            lines
                .iter()
                .filter_map(|line| exchanges.remove(line))
                .collect()
        };
        drop(dead);
        drop(running);
    }

    /// Starts a brick that is down; with a fuse it may die while it recovers.
    pub(crate) fn start(&self, house: usize, fuse: Option<u32>, moves: bool) {
        if self.is_up(house) {
            return;
        }
        self.evict(house);
        let started = {
            let mut houses = self.houses();
            houses[house].port += u32::from(moves);
            houses[house].start(fuse)
        };
        self.net().revive(house);
        self.plan_scrubs(house);
        match started {
            true => tell!(self, "brick {house} starts"),
            false => tell!(self, "brick {house} dies while it recovers"),
        }
    }
}
