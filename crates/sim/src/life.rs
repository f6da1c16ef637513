//! One history: a cluster, clients that read and write, faults, and at the end
//! a rest in which all must be well.

use crate::checker::Checker;
use crate::client::Client;
use crate::cluster::{Cluster, tell};
use crate::desk::Desk;
use crate::dice::Dice;
use crate::faults::{Ambush, Crowd, Siege};
use crate::files::{Files, VOLUME_BYTES};
use crate::guests::Guests;
use crate::history::History;
use crate::promotion::Promotion;
use pagemesh_base::layout::{COPIES_MAX, Layout, Name};
use pagemesh_manage::Kind;
use pagemesh_manage::wire::{AttachReplica, Content, CreateVolume};
use pagemesh_store::wait::take_turns;
use pagemesh_volume::AttachError;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Steps with faults.
const STEPS: u64 = 4000;
/// The same where there are files: an operation takes some thirty.
const FILE_STEPS: u64 = 12_000;
const HEARTBEAT: Duration = Duration::from_secs(2);
/// One step in so many severs a connection, where a history has that.
pub(crate) const SEVERED: u64 = 500;
/// Tells the dice of severed connections from all others of a seed.
const SEVERING: u64 = 0x7365_7665_7265_6421;
/// Tells the dice of transactions from all others of a seed.
const TRANSACTING: u64 = 0x7472_616e_7361_6374;
/// Tells the dice of traps from all others of a seed.
const AMBUSHING: u64 = 0x616d_6275_7368_6520;
/// Tells the dice of flipped slots from all others of a seed.
const FLIPPING: u64 = 0x666c_6970_7069_6e67;
/// Tells the dice of pages that cannot be read from all others of a seed.
const SPOILING: u64 = 0x7370_6f69_6c69_6e67;
const FOLLOWING: u64 = 0x666f_6c6c_6f77_696e;
/// Tells the dice of promotions from all others of a seed.
const PROMOTING: u64 = 0x7072_6f6d_6f74_696e;
/// Steps without anything to do after which time is moved on.
const IDLE_STEPS: u32 = 2;

/// What a history is like.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) kind: Kind,
    pub(crate) copies: usize,
    pub(crate) columns: usize,
    pub(crate) pools: Vec<usize>,
    pub(crate) volume_bytes: u64,
    pub(crate) channels_max: u64,
    /// The volume is larger than the pools.
    pub(crate) is_tight: bool,
    /// Whose medium goes wrong. All other faults then hit nobody else: two
    /// that fail are one too many for two copies.
    pub(crate) damaged: Option<usize>,
    /// Two clients may want the volume.
    pub(crate) is_contested: bool,
    /// One step in so many is a fault.
    pub(crate) calm: u64,
    /// Requests begin in so many of the first sectors.
    pub(crate) hot_sectors: u64,
    /// How often clients scrub the volume and bricks their pools.
    pub(crate) scrub_every: Option<Duration>,
    /// Connections are severed, see [`Life::sever`].
    pub(crate) severs: bool,
    /// Some requests are transactions.
    pub(crate) transacts: bool,
    /// Traps are set, see [`Life::ambush`].
    pub(crate) ambushes: bool,
    /// Where a medium goes wrong, slots of its page tables flip, too.
    pub(crate) flips_slots: bool,
    /// And pages of data cannot be read.
    pub(crate) spoils: bool,
    /// A further copy follows.
    pub(crate) follows: bool,
    /// And is promoted, see [`Life::promote`].
    pub(crate) promotes: bool,
    /// The volume holds a file system.
    pub(crate) files: bool,
    /// Its mount has guests: bricks, mount and guests are one machine.
    pub(crate) guests: bool,
}

impl Plan {
    fn roll(dice: &mut Dice) -> Plan {
        let mut lots = dice.beside();
        let scrub_every = (lots.one_in(4)).then(|| Duration::from_secs(1 + lots.roll(20)));
        let is_tight = dice.one_in(6);
        let copies = [1, 2, 2, 2, 2, 3][dice.roll(6) as usize];
        let columns = if is_tight || dice.one_in(2) { 1 } else { 2 };
        let kind = match (columns, copies) {
            (1, 1) => Kind::Concat,
            (1, _) => Kind::Mirror,
            (_, 1) => Kind::Stripe,
            _ => Kind::StripeMirror,
        };
        let houses = copies.max(columns) + dice.roll(2) as usize;
        let bytes = if is_tight { 2 << 20 } else { 64 << 20 };
        let volume_bytes = match is_tight {
            true => 4 << 20,
            false => columns as u64 * (64 << 10) * (1 + dice.roll(3)),
        };
        let damaged = copies > 1 && !is_tight && dice.one_in(4);
        let damaged = damaged.then(|| dice.roll(houses as u64) as usize);
        let is_contested = !is_tight && dice.one_in(2);
        // Two clients of many channels may need all sessions that a pool has: a
        // leg that is lost for that would be the second that fails.
        let channels_max = match is_tight || damaged.is_some() && is_contested {
            true => 1,
            false => 3,
        };
        Plan {
            kind,
            copies,
            columns,
            pools: vec![bytes; houses],
            volume_bytes,
            channels_max,
            is_tight,
            damaged,
            is_contested,
            calm: 25 + dice.roll(200),
            hot_sectors: if dice.one_in(3) { 32 } else { u64::MAX },
            scrub_every,
            severs: false,
            transacts: false,
            ambushes: false,
            flips_slots: false,
            spoils: false,
            follows: false,
            promotes: false,
            files: false,
            guests: false,
        }
    }
}

impl Plan {
    /// The volume holds a file system: it has one column, and pools with room for it.
    fn hold_files(&mut self) {
        self.kind = if self.copies == 1 {
            Kind::Concat
        } else {
            Kind::Mirror
        };
        (self.columns, self.is_tight, self.files) = (1, false, true);
        self.pools.fill(64 << 20);
        self.volume_bytes = VOLUME_BYTES;
    }
}

impl Plan {
    /// Its mount has guests: copies that they write, and one machine that has power or not.
    fn let_guests_in(&mut self) {
        (self.guests, self.damaged) = (true, None);
        if self.copies == 1 {
            (self.copies, self.kind) = (2, Kind::Mirror);
            let pool = self.pools[0];
            self.pools.resize(self.pools.len().max(2), pool);
        }
        // Room for one that follows.
        let pool = self.pools[0];
        let wanted = (self.copies + 1).min(COPIES_MAX);
        self.pools.resize(self.pools.len().max(wanted), pool);
    }
}

/// What a volume holds, and who uses it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Blocks,
    Files,
    Guests,
}

/// What a history came to, or many of them.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// How many these are.
    pub histories: u64,
    /// The same for two runs of a seed.
    pub digest: u64,
    /// Operations that were acknowledged, and those that were not.
    pub acknowledged: u64,
    /// See above.
    pub failed: u64,
    /// Messages sent.
    pub messages: u64,
    /// Faults that happened, by name.
    pub faults: std::collections::BTreeMap<&'static str, u64>,
    /// Sectors searched, and those that were given up.
    pub sectors: u64,
    /// See above.
    pub given_up: u64,
    /// Pages that were rewritten from another leg.
    pub repaired: u64,
    /// Time that passed, in the simulation.
    pub time: Duration,
}

pub(crate) struct Life {
    pub(crate) plan: Plan,
    pub(crate) dice: Dice,
    pub(crate) severing: Dice,
    pub(crate) transacting: Dice,
    pub(crate) ambushing: Dice,
    pub(crate) flipping: Dice,
    pub(crate) spoiling: Dice,
    /// Slots of pages that lost what they named, and pages that cannot be read.
    pub(crate) frames_withheld: u64,
    /// The next connection that carries something to a brick is severed.
    pub(crate) is_severing: bool,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) desk: Arc<Desk>,
    pub(crate) name: Name,
    pub(crate) checker: Checker,
    /// The last one is the newest.
    pub(crate) clients: Vec<Client>,
    pub(crate) next_client: u32,
    pub(crate) next_thread: u32,
    pub(crate) next_value: u64,
    pub(crate) sectors: u64,
    /// Where bytes lie; who is in-sync changes.
    pub(crate) layout: Layout,
    pub(crate) next_beat: Duration,
    pub(crate) idle: u32,
    /// Parts of transactions without an answer, by their first sector, that a
    /// later client has read.
    looked_at: BTreeSet<(usize, u64)>,
    pub(crate) siege: Option<Siege>,
    pub(crate) crowd: Option<Crowd>,
    pub(crate) ambush: Option<Ambush>,
    pub(crate) promotion: Option<Promotion>,
    pub(crate) files: Option<Files>,
    pub(crate) guests: Option<Guests>,
    /// Bricks that no client that enters reaches.
    pub(crate) out_of_reach: Vec<usize>,
    /// All is well again: every request that begins now succeeds.
    pub(crate) is_well: bool,
    /// Every page was written since the last fault: no medium may lack one.
    pub(crate) is_rewritten: bool,
    pub(crate) outcome: Outcome,
}

impl Life {
    fn new(seed: u64, used: Use, is_printed: bool) -> Life {
        let has_files = used != Use::Blocks;
        let mut dice = Dice::new(seed);
        // Dice of their own: a history without such faults is as it was before
        // there were any.
        let mut severing = Dice::new(seed ^ SEVERING);
        let mut plan = Plan::roll(&mut dice);
        if has_files {
            plan.hold_files();
        }
        if used == Use::Guests {
            plan.let_guests_in();
        }
        let odds = if plan.copies == 1 { 2 } else { 12 };
        plan.severs = plan.damaged.is_none() && severing.one_in(odds);
        let mut transacting = Dice::new(seed ^ TRANSACTING);
        plan.transacts = transacting.one_in(2);
        let mut ambushing = Dice::new(seed ^ AMBUSHING);
        plan.ambushes = plan.transacts && ambushing.one_in(2);
        let mut flipping = Dice::new(seed ^ FLIPPING);
        plan.flips_slots = plan.damaged.is_some() && flipping.one_in(2);
        let mut spoiling = Dice::new(seed ^ SPOILING);
        plan.spoils = plan.damaged.is_some() && spoiling.one_in(2);
        let has_room = plan.copies < plan.pools.len().min(COPIES_MAX);
        let has_room = has_room && plan.columns == 1 && !plan.is_tight;
        plan.follows = has_room && Dice::new(seed ^ FOLLOWING).one_in(2);
        let mut promoting = Dice::new(seed ^ PROMOTING);
        plan.promotes = has_room && plan.damaged.is_none() && !plan.guests && !promoting.one_in(3);
        plan.follows |= plan.promotes;
        let promotion = plan.promotes.then(|| Promotion::new(promoting));
        if has_files {
            // These have requests of their own.
            (plan.severs, plan.transacts, plan.ambushes) = (false, false, false);
        }
        let files = has_files.then(|| Files::new(seed));
        let history = History::new(is_printed);
        let (guests, crew) = plan.guests.then(|| Guests::new(seed)).unzip();
        let every = plan.scrub_every;
        let cluster = Cluster::new(dice.split(), &plan.pools, every, history, crew);
        if plan.guests {
            let weak = Arc::downgrade(&cluster);
            take_turns(Some(Rc::new(move || {
                let cluster = weak.upgrade();
                cluster.is_some_and(|cluster| cluster.let_guests_go_on())
            })));
        }
        tell!(cluster, "seed {seed}: {plan:?}");
        let desk = Desk::new(&cluster, dice.split());
        let name: Name = "volume".parse().expect("a name");
        let wish = CreateVolume {
            name: name.clone(),
            size_bytes: plan.volume_bytes,
            layout: plan.kind,
            columns: (plan.columns > 1).then_some(plan.columns),
            copies: (plan.copies > 1).then_some(plan.copies),
            durability: None,
            content: if has_files {
                Content::Files
            } else {
                Content::Blocks
            },
        };
        let manager = desk.manager().expect("a manager that runs");
        let made = manager.create(&wish);
        let made = made.unwrap_or_else(|fault| panic!("no volume was made: {fault}"));
        if plan.follows {
            let wish = AttachReplica {
                asynchronous: true,
                auto_promote: promotion.as_ref().is_some_and(Promotion::is_automatic),
                ..AttachReplica::default()
            };
            let added = manager.attach_replica(&name, wish);
            added.unwrap_or_else(|fault| panic!("no copy was added: {fault}"));
            desk.expect_promotion();
        }
        let sectors = made.volume.layout.size_bytes() / crate::checker::SECTOR;
        let mut life = Life {
            plan,
            dice,
            severing,
            transacting,
            ambushing,
            flipping,
            spoiling,
            frames_withheld: 0,
            is_severing: false,
            cluster,
            desk,
            name,
            checker: Checker::default(),
            clients: Vec::new(),
            next_client: 0,
            next_thread: 0,
            next_value: 0,
            sectors,
            layout: made.volume.layout,
            next_beat: HEARTBEAT,
            idle: 0,
            looked_at: BTreeSet::new(),
            siege: None,
            crowd: None,
            ambush: None,
            promotion,
            files,
            guests,
            out_of_reach: vec![],
            is_well: false,
            is_rewritten: false,
            outcome: Outcome::default(),
        };
        life.enter();
        life
    }

    /// Another client begins to attach.
    pub(crate) fn enter(&mut self) {
        self.enter_again(false);
    }

    /// Another client begins to attach, after one has tried in vain or as the first.
    pub(crate) fn enter_again(&mut self, unreachable: bool) {
        self.next_client += 1;
        self.bereave_the_next();
        let client = Client::new(
            &self.cluster,
            &self.desk,
            self.next_client,
            &self.name,
            self.next_value + 1,
            self.dice.split(),
            unreachable,
        );
        self.clients.push(client);
    }

    fn houses(&self) -> usize {
        self.plan.pools.len()
    }

    /// Something that happens by itself; true if anything did.
    pub(crate) fn step(&mut self) -> Result<bool, String> {
        let at = self.dice.roll(self.clients.len().max(1) as u64) as usize;
        let acted = match self.dice.roll(100) {
            0..=34 => self.serve(),
            35..=59 => self.turn(at)?,
            60..=71 => self.call(at),
            72..=79 => {
                let by = self.dice.micros(200);
                self.pass(by);
                false
            }
            _ => {
                let house = self.dice.roll(self.houses() as u64) as usize;
                self.cluster.tend(house)
            }
        };
        self.idle = if acted { 0 } else { self.idle + 1 };
        if self.idle > IDLE_STEPS {
            self.idle = 0;
            if !self.catch_up()? {
                self.jump();
            }
        }
        Ok(acted)
    }

    /// Something that is due and that the dice did not hit.
    fn catch_up(&mut self) -> Result<bool, String> {
        let clients = self.clients.len();
        if self.serve() || (0..clients).any(|at| self.call(at)) {
            return Ok(true);
        }
        for at in 0..clients {
            if self.turn(at)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn call(&mut self, at: usize) -> bool {
        let client = self.clients.get_mut(at);
        client.is_some_and(|client| !client.is_stopped() && client.call())
    }

    fn serve(&mut self) -> bool {
        let lines = self.cluster.net().busy();
        let Some(line) = self.dice.pick(&lines) else {
            return false;
        };
        let is_slow = {
            let net = self.cluster.net();
            net.line(line).is_some_and(|line| net.is_slow(line.house))
        };
        (!is_slow || self.dice.one_in(10)) && self.cluster.serve(line)
    }

    /// A client's turn: keeper and channels.
    fn turn(&mut self, at: usize) -> Result<bool, String> {
        let Some(client) = self.clients.get_mut(at) else {
            return Ok(false);
        };
        if client.is_stopped() {
            return Ok(false);
        }
        let number = client.number;
        match client.turn() {
            Some(Ok(())) => {
                tell!(self.cluster, "client {number} has attached");
                let (attachment, is_whole) = self.clients[at].attached();
                self.meet_promotion(attachment);
                self.checker.attached(attachment, !is_whole);
                if let Some(every) = self.plan.scrub_every {
                    self.clients[at].scrub(every);
                }
                if self.plan.files {
                    return self.mount(at).map(|()| true);
                }
                let channels = 1 + self.dice.roll(self.plan.channels_max);
                for _ in 0..channels {
                    self.next_thread += 1;
                    self.clients[at].open(self.next_thread);
                }
                self.look(at);
                return Ok(true);
            }
            Some(Err(cause)) => {
                tell!(self.cluster, "client {number} does not attach: {cause}");
                self.leave(at);
                if self.clients.is_empty() {
                    let is_unreachable = matches!(cause, AttachError::Unreachable { .. });
                    self.enter_again(is_unreachable && self.plan.promotes);
                }
                return Ok(true);
            }
            None => {}
        }
        let client = &self.clients[at];
        if self.checker.is_partial(client.attachment) && client.is_healthy() {
            self.checker.reached_all();
        }
        Ok(self.go(at)? | self.reap(at)?)
    }

    /// Ends a client as a crash would.
    pub(crate) fn leave(&mut self, at: usize) {
        if self.plan.files {
            self.end_program(at);
        }
        let client = self.clients.remove(at);
        tell!(self.cluster, "client {} is gone", client.number);
        self.account(&client);
    }

    /// A client that has just attached reads what transactions of others left
    /// that have no answer.
    fn look(&mut self, at: usize) {
        if self.clients[at].threads.is_empty() {
            return;
        }
        let parts = self.checker.cut_off_before(self.clients[at].attachment);
        for (number, sectors) in parts {
            if self.looked_at.insert((number, sectors.start)) {
                self.read(at, 0, sectors);
            }
        }
    }

    /// Adds what a client that ends has counted.
    pub(crate) fn account(&mut self, client: &Client) {
        let Some(status) = client.driven.status() else {
            return;
        };
        self.outcome.repaired += status.counters.pages_repaired;
        self.outcome
            .count("reads hedged", status.counters.reads_hedged);
        self.outcome.count(
            "transaction settled as a whole",
            client.witness.transactions_settled(),
        );
        let scrub = &status.scrub;
        self.outcome.count("volume scrubbed", scrub.passes);
        let found = scrub.last.iter().chain(&scrub.pass);
        let repaired = found.map(|pass| pass.found.pages_repaired).sum();
        self.outcome.count("page repaired by a scrub", repaired);
    }

    pub(crate) fn pass(&mut self, by: Duration) {
        self.cluster.net().now += by;
        let now = self.cluster.now();
        if now >= self.next_beat {
            self.next_beat = now + HEARTBEAT;
            for house in 0..self.houses() {
                self.desk.hear(house);
            }
            if let Some(manager) = self.desk.manager() {
                manager.sweep();
            }
        }
    }

    /// Moves time to where something happens next.
    fn jump(&mut self) {
        let now = self.cluster.now();
        let clients = self.clients.iter().filter_map(Client::next);
        let arrival = self.cluster.net().next_arrival();
        let next = clients.chain(arrival).chain([self.next_beat]);
        let next = next.filter(|at| *at > now).min();
        let by = next.map_or(Duration::from_millis(1), |at| at - now);
        // A silent leg is only found out by looking at it.
        self.pass(by.min(Duration::from_millis(250)));
    }

    fn live(&mut self) -> Result<(), String> {
        let steps = if self.plan.files { FILE_STEPS } else { STEPS };
        for _ in 0..steps {
            self.go_on();
            self.sever();
            self.ambush();
            self.promote()?;
            self.tend_guests()?;
            if self.dice.one_in(self.plan.calm) {
                self.fault();
            } else if self.dice.one_in(4) {
                self.submit()?;
            } else {
                self.step()?;
            }
        }
        self.rest()
    }
}

/// Runs the history of a seed.
///
/// # Errors
/// What was broken.
pub fn run(seed: u64, is_printed: bool) -> Result<Outcome, String> {
    run_one(seed, Use::Blocks, is_printed)
}

/// Runs the history of a seed whose volume holds a file system.
///
/// # Errors
/// What was broken.
pub fn run_files(seed: u64, is_printed: bool) -> Result<Outcome, String> {
    run_one(seed, Use::Files, is_printed)
}

/// Runs the history of a seed whose volume holds a file system that guests use, too.
///
/// # Errors
/// What was broken.
pub fn run_guests(seed: u64, is_printed: bool) -> Result<Outcome, String> {
    run_one(seed, Use::Guests, is_printed)
}

fn run_one(seed: u64, used: Use, is_printed: bool) -> Result<Outcome, String> {
    let ended = catch_unwind(AssertUnwindSafe(|| {
        let mut life = Life::new(seed, used, is_printed);
        let lived = life.live();
        if let Err(broken) = &lived {
            tell!(life.cluster, "{broken}");
        }
        lived?;
        let mut outcome = life.outcome.clone();
        outcome.histories = 1;
        outcome.digest = life.cluster.digest();
        outcome.time = life.cluster.now();
        let net = life.cluster.net();
        outcome.messages = net.messages;
        for (name, times) in net.mishaps.named() {
            outcome.count(name, times);
        }
        Ok(outcome)
    }));
    take_turns(None);
    ended.unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let text = text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
        Err(text.unwrap_or_else(|| "a panic without words".into()))
    })
}
