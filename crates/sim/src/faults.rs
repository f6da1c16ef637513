//! What goes wrong.

use crate::client::Client;
use crate::cluster::tell;
use crate::house::Death;
use crate::life::{Life, SEVERED};
use crate::medium::{Flipped, Medium, Mishap};
use crate::network::{Peer, Weather};
use crate::workload::PAGE_SECTORS;
use std::ops::Range;
use std::time::Duration;

/// How long a stopped client stands still, at most.
const STOP_MS_MAX: u64 = 10_000;
/// How long a stalled channel looks at no answers, at most.
const STALL_MS_MAX: u64 = 3000;
/// Requests that a crowded page gets.
const CROWD_REQUESTS: u32 = 80;
/// Longer than anybody waits for a column without legs.
const LONG: Duration = Duration::from_secs(30);

/// One step in so many sets a trap, where a history has transactions.
const AMBUSHED: u64 = 800;
/// Steps from the first copy of a settling to its end, at most.
const COPIES_STEPS_MAX: u64 = 40;

/// How late what a severed connection carries arrives, at most.
const LATE_US_MAX: u64 = 500_000;

/// A page that all threads want.
pub(crate) struct Crowd {
    pub(crate) sectors: Range<u64>,
    /// Requests to come.
    pub(crate) left: u32,
}

/// Steps that a stage of a siege may take.
const STAGE_STEPS_MAX: u32 = 1500;

/// See [`Life::besiege`].
enum Stage {
    /// All is made well, until one client is left and has all its legs.
    Calm,
    /// The client has lost a leg, and the manager does not hear of it.
    Alone,
    /// It hears nobody while another client attaches.
    Replaced,
}

/// See [`Life::besiege`].
pub(crate) struct Siege {
    /// Whom it is about.
    client: u32,
    stage: Stage,
    steps: u32,
}

/// See [`Life::ambush`].
enum Trap {
    /// The client's transaction reaches all but one brick, for so many steps.
    Sent(u32),
    /// The next client attaches, and settles what was left.
    Settles,
    /// It has begun to copy; so many steps to go.
    Copies(u32),
}

/// See [`Life::ambush`].
pub(crate) struct Ambush {
    client: u32,
    /// The brick that did not get the transaction.
    spared: usize,
    trap: Trap,
    steps: u32,
}

impl Life {
    fn count(&mut self, name: &'static str) {
        self.outcome.count(name, 1);
    }

    /// Whom faults may hit.
    fn victim(&mut self) -> usize {
        self.dice.roll(self.plan.pools.len() as u64) as usize
    }

    fn death(&mut self) -> Death {
        // A machine has power for all of them, or for none.
        match self.dice.one_in(2) || self.plan.guests {
            true => Death::Process,
            false => Death::Power,
        }
    }

    fn peer(&mut self) -> Peer {
        let clients: Vec<u32> = self.clients.iter().map(|client| client.number).collect();
        match self.dice.pick(&clients) {
            Some(client) if !self.dice.one_in(4) => Peer::Client(client),
            _ => Peer::Manager,
        }
    }

    /// Something goes wrong, or is set right.
    pub(crate) fn fault(&mut self) {
        if self.plan.damaged.is_some() {
            return self.mild_fault();
        }
        if self.siege.is_some() || self.is_bereft() {
            return;
        }
        let mut houses = 0..self.plan.pools.len();
        if houses.any(|house| !self.cluster.is_up(house)) && self.dice.one_in(3) {
            return self.start();
        }
        match self.dice.roll(27) {
            0 => self.kill(),
            1 | 2 => self.light(),
            3..=6 => self.start(),
            7 if self.dice.one_in(2) => self.black_out(),
            8 => self.cut(),
            9 | 10 => {
                self.cluster.net().mend();
                tell!(self.cluster, "the network is whole");
            }
            11 => self.slow(),
            12 => self.manager(),
            13 => {
                self.desk.mend();
            }
            14 => self.crash(),
            15 => self.contest(),
            16 => self.stop(),
            17 => self.replace_channel(),
            18 | 19 => self.weather(),
            20 if self.dice.one_in(4) => {
                self.count("long wait");
                self.pass(LONG);
            }
            21 => self.hang_up(),
            22 => self.besiege(),
            23..=25 => self.stall(),
            26 => self.crowd(),
            _ => {}
        }
    }

    /// Where a medium goes wrong the other copies must stay: two that fail are
    /// one too many. With three copies one other may fail beside it, always the
    /// same. Nor may the damaged brick die: what it lost of its last record
    /// looks to its recovery like a record that was never whole. That clients
    /// end is open work, see RFD 003.
    fn mild_fault(&mut self) {
        if self.plan.copies > 2 && self.dice.one_in(4) {
            return self.second_fault();
        }
        match self.dice.roll(10) {
            0 => self.crash(),
            4 => self.contest(),
            1 => self.replace_channel(),
            2 => self.weather(),
            3 => self.hang_up(),
            5 => self.stall(),
            _ => self.damage(),
        }
    }

    /// A brick fails whose neighbour's medium goes wrong, or is set right.
    fn second_fault(&mut self) {
        let Some(damaged) = self.plan.damaged else {
            return;
        };
        let house = (damaged + 1) % self.plan.pools.len();
        if !self.cluster.is_up(house) {
            return self.start();
        }
        self.count("a brick fails beside a damaged one");
        match self.dice.roll(4) {
            0 => self.kill_one(house),
            1 => self.light_one(house),
            2 => self.cut_one(house),
            _ => self.cluster.net().mend(),
        }
    }

    fn kill(&mut self) {
        let house = self.victim();
        self.kill_one(house);
    }

    fn kill_one(&mut self, house: usize) {
        let death = self.death();
        self.count(match death {
            Death::Process => "brick killed",
            Death::Power => "power lost",
        });
        self.cluster.kill(house, death);
    }

    /// A brick will die in the middle of something.
    fn light(&mut self) {
        let house = self.victim();
        self.light_one(house);
    }

    fn light_one(&mut self, house: usize) {
        let death = self.death();
        let range = if self.dice.one_in(2) { 30 } else { 600 };
        let accesses = self.dice.roll(range) as u32;
        if let Some(running) = self.cluster.running(house) {
            if running.medium.is_lit() {
                return;
            }
            self.count(match death {
                Death::Process => "brick killed inside an operation",
                Death::Power => "power lost inside an operation",
            });
            self.cluster.houses()[house].doom = death;
            running.medium.light(accesses);
            tell!(
                self.cluster,
                "brick {house} will die in {accesses} accesses"
            );
        }
    }

    fn start(&mut self) {
        let houses = 0..self.plan.pools.len();
        let down: Vec<usize> = houses.filter(|it| !self.cluster.is_up(*it)).collect();
        let Some(house) = self.dice.pick(&down) else {
            return;
        };
        if self.dice.one_in(4) && !self.plan.guests {
            // A machine that was only without its brick loses its power, too.
            self.cluster.kill(house, Death::Power);
        }
        let fuse = self.dice.one_in(4).then(|| self.dice.roll(60) as u32);
        if fuse.is_some() {
            self.count("death in recovery");
            let death = self.death();
            self.cluster.houses()[house].doom = death;
        }
        let moves = self.dice.one_in(4);
        self.cluster.start(house, fuse, moves);
        self.desk.hear(house);
    }

    /// All machines lose their power, those of the clients, too.
    fn black_out(&mut self) {
        self.count("power lost everywhere");
        self.kill_guests();
        for house in 0..self.plan.pools.len() {
            self.cluster.kill(house, Death::Power);
        }
        self.desk.die(Death::Power);
        self.desk.start();
        while !self.clients.is_empty() {
            self.leave(0);
        }
        self.enter();
    }

    fn cut(&mut self) {
        let (peer, house) = (self.peer(), self.victim());
        self.cut_between(peer, house);
    }

    fn cut_one(&mut self, house: usize) {
        let peer = self.peer();
        self.cut_between(peer, house);
    }

    fn cut_between(&mut self, peer: Peer, house: usize) {
        let (up, down) = [(true, true), (true, false), (false, true)][self.dice.roll(3) as usize];
        self.count(match up && down {
            true => "partition",
            false => "one-way partition",
        });
        tell!(
            self.cluster,
            "{peer:?} and brick {house} are cut: up {up}, down {down}"
        );
        self.cluster.net().cut(peer, house, up, down);
    }

    fn slow(&mut self) {
        let house = self.victim();
        let is_slow = !self.cluster.net().is_slow(house);
        if is_slow {
            self.count("slow brick");
        }
        tell!(self.cluster, "brick {house} is slow: {is_slow}");
        self.cluster.net().slow(house, is_slow);
    }

    fn manager(&mut self) {
        match self.dice.roll(5) {
            0 => {
                self.count("manager killed");
                self.kill_manager();
            }
            1 => {
                self.count("manager restarted");
                self.kill_manager();
                self.desk.start();
            }
            2 => {
                self.count("manager killed inside a commit");
                let writes = self.dice.roll(40) as u32;
                self.desk.light(writes);
            }
            3 => {
                self.count("answers of the manager lost");
                self.desk.be_deaf(2);
            }
            _ => {
                let clients: Vec<u32> = self.clients.iter().map(|c| c.number).collect();
                if let Some(client) = self.dice.pick(&clients) {
                    self.count("manager out of reach");
                    self.desk.cut(client);
                }
            }
        }
    }

    fn kill_manager(&mut self) {
        if self.desk.kill() == Death::Power {
            self.count("power of the manager lost");
        }
    }

    fn crash(&mut self) {
        if self.clients.is_empty() {
            return;
        }
        self.count("client killed");
        let at = self.dice.roll(self.clients.len() as u64) as usize;
        let was_newest = at + 1 == self.clients.len();
        self.leave(at);
        if was_newest {
            self.enter();
        }
    }

    /// Another client takes the volume while one has it.
    fn contest(&mut self) {
        if self.plan.is_contested && self.clients.len() < 2 {
            self.count("second client");
            if self.dice.one_in(2) {
                self.stop();
            }
            self.enter();
        }
    }

    /// Has another client take the volume while the one that has it knows that
    /// something is amiss, and not that: a leg is lost, and the manager was not
    /// heard. Then that client asks the manager again, with bricks in reach.
    /// No other fault meanwhile: the way there is long.
    fn besiege(&mut self) {
        if !self.plan.is_contested || self.plan.copies < 2 {
            return;
        }
        self.mend();
        self.siege = Some(Siege {
            client: 0,
            stage: Stage::Calm,
            steps: 0,
        });
    }

    /// The next stage of a siege, if its time has come.
    pub(crate) fn go_on(&mut self) {
        let Some(mut siege) = self.siege.take() else {
            return;
        };
        siege.steps += 1;
        if siege.steps > STAGE_STEPS_MAX {
            return self.mend();
        }
        let client = self.clients.iter().position(|it| it.number == siege.client);
        let stage = match (&siege.stage, client) {
            (Stage::Calm, _) => self.isolate(&mut siege),
            (_, None) => return self.mend(),
            (Stage::Alone, Some(at)) => self.clients[at].is_awaiting_manager().then(|| {
                self.replace(at);
                Stage::Replaced
            }),
            (Stage::Replaced, Some(at)) => {
                let mut others = self.clients[at + 1..].iter();
                if others.any(|other| other.attachment > 0) {
                    tell!(self.cluster, "client {} is free", siege.client);
                    return self.mend();
                }
                None
            }
        };
        if let Some(stage) = stage {
            (siege.stage, siege.steps) = (stage, 0);
        }
        self.siege = Some(siege);
    }

    /// Takes the manager and a brick from a client that had all.
    fn isolate(&mut self, siege: &mut Siege) -> Option<Stage> {
        self.dismiss();
        let [client] = &self.clients[..] else {
            return None;
        };
        if !client.is_healthy() {
            return None;
        }
        siege.client = client.number;
        self.count("siege");
        tell!(self.cluster, "client {} loses the manager", siege.client);
        self.desk.cut(siege.client);
        self.kill();
        Some(Stage::Alone)
    }

    /// It stands still, or the network lets nothing through; another one enters.
    fn replace(&mut self, at: usize) {
        let client = &mut self.clients[at];
        if self.dice.one_in(2) {
            client.stopped_until = self.cluster.now() + Duration::from_millis(STOP_MS_MAX);
            tell!(self.cluster, "client {} stands still", client.number);
        } else {
            let peer = Peer::Client(client.number);
            for house in 0..self.plan.pools.len() {
                self.cluster.net().cut(peer, house, true, true);
            }
            tell!(
                self.cluster,
                "client {} is cut off from all bricks",
                client.number
            );
        }
        self.enter();
    }

    /// Has a client die whose transaction one brick lacks, and then a brick that
    /// may have it, while the next client makes them equal.
    pub(crate) fn ambush(&mut self) {
        let is_possible = self.plan.ambushes
            && self.plan.damaged.is_none()
            && self.plan.copies > 1
            && self.siege.is_none()
            && !self.is_bereft();
        let Some(mut ambush) = self.ambush.take() else {
            if is_possible && self.ambushing.one_in(AMBUSHED) {
                self.set_trap();
            }
            return;
        };
        ambush.steps += 1;
        if ambush.steps > STAGE_STEPS_MAX || self.siege.is_some() {
            return self.cluster.net().mend();
        }
        let client = self
            .clients
            .iter()
            .position(|it| it.number == ambush.client);
        let Some(at) = client else {
            return;
        };
        ambush.trap = match ambush.trap {
            Trap::Sent(0) => {
                self.cluster.net().mend();
                self.leave(at);
                self.enter();
                ambush.client = self.next_client;
                Trap::Settles
            }
            Trap::Sent(steps) => Trap::Sent(steps - 1),
            Trap::Settles if self.clients[at].witness.has_copied() => {
                Trap::Copies(self.ambushing.roll(COPIES_STEPS_MAX) as u32)
            }
            Trap::Settles => Trap::Settles,
            Trap::Copies(0) => {
                let others = (0..self.plan.pools.len()).filter(|it| *it != ambush.spared);
                let others: Vec<usize> = others.collect();
                if let Some(house) = self.ambushing.pick(&others) {
                    self.count("settling interrupted");
                    self.cluster.kill(house, Death::Process);
                }
                return;
            }
            Trap::Copies(steps) => Trap::Copies(steps - 1),
        };
        self.ambush = Some(ambush);
    }

    fn set_trap(&mut self) {
        let ready = |it: &Client| it.is_healthy() && !it.is_stopped() && !it.threads.is_empty();
        let Some(at) = self.clients.iter().position(ready) else {
            return;
        };
        let client = self.clients[at].number;
        let spared = self.ambushing.roll(self.plan.pools.len() as u64) as usize;
        tell!(
            self.cluster,
            "client {client} does not reach brick {spared}, and will end"
        );
        self.cluster
            .net()
            .cut(Peer::Client(client), spared, true, false);
        self.transact(at, 0);
        self.ambush = Some(Ambush {
            client,
            spared,
            trap: Trap::Sent(10 + self.ambushing.roll(40) as u32),
            steps: 0,
        });
    }

    /// All threads want one page for a while, and some messages take long: a
    /// change is on one leg when the other is read.
    fn crowd(&mut self) {
        if self.plan.files {
            return;
        }
        let page = self.dice.roll(self.sectors.div_ceil(PAGE_SECTORS)) * PAGE_SECTORS;
        let sectors = page..(page + PAGE_SECTORS).min(self.sectors);
        tell!(self.cluster, "all threads want {sectors:?}");
        self.count("crowd");
        self.crowd = Some(Crowd {
            sectors,
            left: CROWD_REQUESTS,
        });
        self.cluster.net().weather = Weather {
            delayed: 4,
            ..Weather::default()
        };
    }

    /// A thread of a client is busy with something else for a while.
    fn stall(&mut self) {
        let at = self.dice.roll(self.clients.len().max(1) as u64) as usize;
        let until = self.cluster.now() + self.dice.micros(STALL_MS_MAX * 1000);
        let threads = self.clients.get_mut(at).map(|client| &mut client.threads);
        if let Some(threads) = threads.filter(|threads| !threads.is_empty()) {
            let thread = self.dice.roll(threads.len() as u64) as usize;
            threads[thread].stopped_until = until;
            let number = threads[thread].number;
            tell!(self.cluster, "channel {number} stands still");
            self.count("channel stalled");
            if self.dice.one_in(2) {
                self.hang_up();
            }
        }
    }

    /// A client's process stands still for a while.
    fn stop(&mut self) {
        let at = self.dice.roll(self.clients.len().max(1) as u64) as usize;
        let until = self.cluster.now() + self.dice.micros(STOP_MS_MAX * 1000);
        if let Some(client) = self.clients.get_mut(at) {
            tell!(self.cluster, "client {} stands still", client.number);
            client.stopped_until = until;
            self.count("client stopped");
        }
    }

    fn replace_channel(&mut self) {
        let at = self.dice.roll(self.clients.len().max(1) as u64) as usize;
        let Some(client) = self.clients.get_mut(at) else {
            return;
        };
        if client.threads.is_empty() || client.is_stopped() {
            return;
        }
        // One that is driven to its end keeps its sessions: many of them leave
        // none for a column that is to come back.
        if client
            .driven
            .status()
            .is_some_and(|s| s.channels > client.threads.len())
        {
            return;
        }
        let thread = self.dice.roll(client.threads.len() as u64) as usize;
        let gone = client.threads.swap_remove(thread);
        tell!(self.cluster, "channel {} is closed", gone.number);
        drop(gone);
        self.next_thread += 1;
        client.open(self.next_thread);
        self.count("channel closed");
    }

    fn weather(&mut self) {
        let odds = |dice: &mut crate::dice::Dice, odds: u64| match dice.one_in(2) {
            true => 0,
            false => odds,
        };
        let dice = &mut self.dice;
        let rough = self.plan.damaged.is_none();
        let weather = Weather {
            lost: if rough { odds(dice, 200) } else { 0 },
            repeated: if rough { odds(dice, 200) } else { 0 },
            corrupted: if rough { odds(dice, 300) } else { 0 },
            delayed: odds(dice, 8),
            overtaking: dice.one_in(2),
        };
        tell!(self.cluster, "{weather:?}");
        self.cluster.net().weather = weather;
    }

    /// A connection breaks.
    fn hang_up(&mut self) {
        let victim = self.plan.damaged;
        let net = self.cluster.net();
        let mut lines = Vec::new();
        for client in &self.clients {
            lines.extend(net.of(Peer::Client(client.number)));
        }
        lines.retain(|id| {
            let house = net.line(*id).map(|line| line.house);
            victim.is_none_or(|victim| house == Some(victim))
        });
        if let Some(line) = self.dice.pick(&lines) {
            drop(net);
            tell!(self.cluster, "connection {line} breaks");
            self.cluster.hang_up(line);
            self.count("connection broken");
        }
    }

    /// A client loses a connection of which the brick does not know: what it
    /// had sent arrives when the client is back and has sent it again, maybe
    /// after what it wrote since. All threads want one page meanwhile.
    pub(crate) fn sever(&mut self) {
        if !self.plan.severs || self.is_bereft() {
            return;
        }
        if self.severing.one_in(SEVERED) {
            let page = self.severing.roll(self.sectors.div_ceil(PAGE_SECTORS)) * PAGE_SECTORS;
            let sectors = page..(page + PAGE_SECTORS).min(self.sectors);
            tell!(
                self.cluster,
                "all threads want {sectors:?}, one loses its way"
            );
            self.crowd = Some(Crowd {
                sectors,
                left: CROWD_REQUESTS,
            });
            self.is_severing = true;
        }
        if !self.is_severing {
            return;
        }
        let laden = self.cluster.net().laden();
        if let Some(line) = self.severing.pick(&laden) {
            let late = self.severing.micros(LATE_US_MAX);
            tell!(
                self.cluster,
                "connection {line} is severed, and is late by {late:?}"
            );
            self.cluster.net().sever(line, late);
            self.is_severing = false;
            self.count("connection severed");
        }
    }

    /// The medium goes wrong.
    fn damage(&mut self) {
        let Some(running) = self
            .plan
            .damaged
            .and_then(|house| self.cluster.running(house))
        else {
            return;
        };
        if self.plan.flips_slots && self.flipping.one_in(2) {
            return self.flip_slot(&running.medium);
        }
        if self.plan.spoils && self.spoiling.one_in(3) {
            if running.medium.spoil(self.spoiling.word()) {
                tell!(self.cluster, "a page cannot be read");
                self.count("page unreadable");
                self.frames_withheld += 1;
            }
            return;
        }
        let choice = self.dice.word();
        match choice >> 60 {
            0..=7 => {
                if running.medium.flip(choice) {
                    self.count("bit flipped");
                }
            }
            8..=11 => {
                running.medium.bungle(Mishap::Lost);
                self.count("write lost");
            }
            _ => {
                running.medium.bungle(Mishap::Misdirected(choice));
                self.count("write misdirected");
            }
        }
        tell!(self.cluster, "the medium goes wrong");
    }

    fn flip_slot(&mut self, medium: &Medium) {
        let Some(Flipped { level, is_mapped }) = medium.flip_slot(&mut self.flipping) else {
            return;
        };
        tell!(self.cluster, "a slot of level {level} loses a bit");
        self.count(match level {
            0 => "slot of a page flipped",
            _ => "slot above the leaves flipped",
        });
        self.frames_withheld += u64::from(level == 0 && is_mapped);
    }
}
