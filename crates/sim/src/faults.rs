//! The faults of a history.

mod crash_trap;
mod disk;
mod takeover;

pub(crate) use crash_trap::CrashTrap;
pub(crate) use takeover::TakeoverFault;

use crate::brick_host::CrashKind;
use crate::cluster::tell;
use crate::medium::{FlippedSlot, MemoryMedium, WriteFault};
use crate::network::{MessageFaults, Peer};
use crate::rng::SimRng;
use crate::scenario::{SEVER_ODDS, Scenario};
use crate::workload::PAGE_SECTORS;
use std::ops::Range;
use std::time::Duration;

/// Maximum time for which a client is stopped.
const STOP_MS_MAX: u64 = 10_000;
/// Maximum time for which a stalled channel takes no answers.
const STALL_MS_MAX: u64 = 3000;
/// Requests to a hot page.
const HOT_PAGE_REQUESTS: u32 = 80;
/// Longer than the time limit of a wait for a column without legs.
const LONG_WAIT: Duration = Duration::from_secs(30);

/// Maximum delay of the messages that a severed connection carries.
const SEVERED_DELAY_US_MAX: u64 = 500_000;

/// A page that all threads access.
pub(crate) struct HotPage {
    pub(crate) sectors: Range<u64>,
    /// Requests still to come.
    pub(crate) requests_left: u32,
}

/// Maximum of steps in a stage of a takeover or of a crash trap.
const STAGE_STEPS_MAX: u32 = 1500;

impl Scenario {
    fn count_event(&mut self, name: &'static str) {
        self.report.count(name, 1);
    }

    /// A brick that faults may hit.
    fn random_host(&mut self) -> usize {
        self.rng.below(self.plan.pool_bytes.len() as u64) as usize
    }

    fn random_crash_kind(&mut self) -> CrashKind {
        // Direct clients and bricks share one machine, which has power for all of them or for none.
        match self.rng.one_in(2) || self.plan.has_direct_clients {
            true => CrashKind::Process,
            false => CrashKind::Power,
        }
    }

    fn random_peer(&mut self) -> Peer {
        let clients: Vec<u32> = self.clients.iter().map(|client| client.number).collect();
        match self.rng.pick(&clients) {
            Some(client) if !self.rng.one_in(4) => Peer::Client(client),
            _ => Peer::Manager,
        }
    }

    /// Injects a fault, or clears one.
    pub(crate) fn inject_fault(&mut self) {
        if self.plan.damaged_brick.is_some() {
            return self.inject_mild_fault();
        }
        if self.takeover.is_some() || self.is_promotion_under_way() {
            return;
        }
        if self.wants_disk_fault() {
            return self.inject_disk_fault();
        }
        let mut hosts = 0..self.plan.pool_bytes.len();
        if hosts.any(|host| !self.cluster.is_up(host)) && self.rng.one_in(3) {
            return self.start_random_brick();
        }
        match self.rng.below(27) {
            0 => self.kill_random_brick(),
            1 | 2 => self.arm_random_fuse(),
            3..=6 => self.start_random_brick(),
            7 if self.rng.one_in(2) => self.lose_power_everywhere(),
            8 => self.partition_random_brick(),
            9 | 10 => {
                self.cluster.net().clear_faults();
                tell!(self.cluster, "the network has no faults");
            }
            11 => self.toggle_slow_brick(),
            12 => self.inject_manager_fault(),
            13 => {
                self.manager_host.clear_faults();
            }
            14 => self.kill_random_client(),
            15 => self.start_second_client(),
            16 => self.stop_client(),
            17 => self.reopen_channel(),
            18 | 19 => self.set_message_faults(),
            20 if self.rng.one_in(4) => {
                self.count_event("long wait");
                self.advance_time(LONG_WAIT);
            }
            21 => self.break_random_connection(),
            22 => self.start_takeover(),
            23..=25 => self.stall_thread(),
            26 => self.start_hot_page(),
            _ => {}
        }
    }

    /// With a damaged medium the other copies must survive: two failed copies are one too many.
    /// With three copies one other brick may fail as well, always the same. The damaged brick must
    /// not die either: the lost part of its last record looks to its recovery like a torn record.
    /// It is an open task that clients may die here, see RFD 003.
    fn inject_mild_fault(&mut self) {
        if self.plan.copies > 2 && self.rng.one_in(4) {
            return self.inject_second_fault();
        }
        match self.rng.below(10) {
            0 => self.kill_random_client(),
            4 => self.start_second_client(),
            1 => self.reopen_channel(),
            2 => self.set_message_faults(),
            3 => self.break_random_connection(),
            5 => self.stall_thread(),
            _ => self.damage_medium(),
        }
    }

    /// Makes the neighbour of the damaged brick fail, or clears that fault.
    fn inject_second_fault(&mut self) {
        let Some(damaged) = self.plan.damaged_brick else {
            return;
        };
        let host = (damaged + 1) % self.plan.pool_bytes.len();
        if !self.cluster.is_up(host) {
            return self.start_random_brick();
        }
        self.count_event("second brick failed");
        match self.rng.below(4) {
            0 => self.kill_brick(host),
            1 => self.arm_fuse(host),
            2 => self.partition_brick(host),
            _ => self.cluster.net().clear_faults(),
        }
    }

    fn kill_random_brick(&mut self) {
        let host = self.random_host();
        self.kill_brick(host);
    }

    fn kill_brick(&mut self, host: usize) {
        let death = self.random_crash_kind();
        self.count_event(match death {
            CrashKind::Process => "brick killed",
            CrashKind::Power => "power lost",
        });
        self.cluster.kill_brick(host, death);
    }

    /// Lets a random brick die at a later access.
    fn arm_random_fuse(&mut self) {
        let host = self.random_host();
        self.arm_fuse(host);
    }

    fn arm_fuse(&mut self, host: usize) {
        let death = self.random_crash_kind();
        let range = if self.rng.one_in(2) { 30 } else { 600 };
        let accesses = self.rng.below(range) as u32;
        if let Some(running) = self.cluster.running_brick(host) {
            if running.medium.is_fuse_armed() {
                return;
            }
            self.count_event(match death {
                CrashKind::Process => "brick killed inside an operation",
                CrashKind::Power => "power lost inside an operation",
            });
            self.cluster.hosts()[host].crash_kind = death;
            running.medium.arm_fuse(accesses);
            tell!(self.cluster, "brick {host} will die in {accesses} accesses");
        }
    }

    fn start_random_brick(&mut self) {
        let hosts = 0..self.plan.pool_bytes.len();
        let down: Vec<usize> = hosts.filter(|it| !self.cluster.is_up(*it)).collect();
        let Some(host) = self.rng.pick(&down) else {
            return;
        };
        if self.rng.one_in(4) && !self.plan.has_direct_clients {
            // A machine that had only lost its brick loses its power, too.
            self.cluster.kill_brick(host, CrashKind::Power);
        }
        let fuse = self.rng.one_in(4).then(|| self.rng.below(60) as u32);
        if fuse.is_some() {
            self.count_event("death in recovery");
            let death = self.random_crash_kind();
            self.cluster.hosts()[host].crash_kind = death;
        }
        let moves = self.rng.one_in(4);
        self.cluster.start_brick(host, fuse, moves);
        self.manager_host.send_heartbeat(host);
    }

    /// All machines lose their power, including the clients' machines.
    fn lose_power_everywhere(&mut self) {
        self.count_event("power lost everywhere");
        self.kill_direct_clients();
        for host in 0..self.plan.pool_bytes.len() {
            self.cluster.kill_brick(host, CrashKind::Power);
        }
        self.manager_host.crash(CrashKind::Power);
        self.manager_host.start();
        while !self.clients.is_empty() {
            self.crash_client(0);
        }
        self.start_client();
    }

    fn partition_random_brick(&mut self) {
        let (peer, host) = (self.random_peer(), self.random_host());
        self.partition_pair(peer, host);
    }

    fn partition_brick(&mut self, host: usize) {
        let peer = self.random_peer();
        self.partition_pair(peer, host);
    }

    fn partition_pair(&mut self, peer: Peer, host: usize) {
        let (up, down) = [(true, true), (true, false), (false, true)][self.rng.below(3) as usize];
        self.count_event(match up && down {
            true => "partition",
            false => "one-way partition",
        });
        tell!(
            self.cluster,
            "{peer:?} and brick {host} are cut: up {up}, down {down}"
        );
        self.cluster.net().partition(peer, host, up, down);
    }

    fn toggle_slow_brick(&mut self) {
        let host = self.random_host();
        let is_slow = !self.cluster.net().is_slow(host);
        if is_slow {
            self.count_event("slow brick");
        }
        tell!(self.cluster, "brick {host} is slow: {is_slow}");
        self.cluster.net().set_slow(host, is_slow);
    }

    fn inject_manager_fault(&mut self) {
        match self.rng.below(5) {
            0 => {
                self.count_event("manager killed");
                self.kill_manager();
            }
            1 => {
                self.count_event("manager restarted");
                self.kill_manager();
                self.manager_host.start();
            }
            2 => {
                self.count_event("manager killed inside a commit");
                let writes = self.rng.below(40) as u32;
                self.manager_host.fail_disk_after(writes);
            }
            3 => {
                self.count_event("answers of the manager lost");
                self.manager_host.lose_answers(2);
            }
            _ => {
                let clients: Vec<u32> = self.clients.iter().map(|c| c.number).collect();
                if let Some(client) = self.rng.pick(&clients) {
                    self.count_event("manager out of reach");
                    self.manager_host.partition_client(client);
                }
            }
        }
    }

    fn kill_manager(&mut self) {
        if self.manager_host.kill() == CrashKind::Power {
            self.count_event("power of the manager lost");
        }
    }

    fn kill_random_client(&mut self) {
        if self.clients.is_empty() {
            return;
        }
        self.count_event("client killed");
        let at = self.rng.below(self.clients.len() as u64) as usize;
        let was_newest = at + 1 == self.clients.len();
        self.crash_client(at);
        if was_newest {
            self.start_client();
        }
    }

    /// Another client attaches while one has the volume.
    fn start_second_client(&mut self) {
        if self.plan.is_contested && self.clients.len() < 2 {
            self.count_event("second client");
            if self.rng.one_in(2) {
                self.stop_client();
            }
            self.start_client();
        }
    }

    /// All threads access one page for a while, and some messages are late: a change is on one leg
    /// when the other is read.
    fn start_hot_page(&mut self) {
        if self.plan.has_files {
            return;
        }
        let page = self.rng.below(self.sectors.div_ceil(PAGE_SECTORS)) * PAGE_SECTORS;
        let sectors = page..(page + PAGE_SECTORS).min(self.sectors);
        tell!(self.cluster, "all threads want {sectors:?}");
        self.count_event("hot page");
        self.hot_page = Some(HotPage {
            sectors,
            requests_left: HOT_PAGE_REQUESTS,
        });
        self.cluster.net().message_faults = MessageFaults {
            delayed: 4,
            ..MessageFaults::default()
        };
    }

    /// Stalls a thread of a client for a while.
    fn stall_thread(&mut self) {
        let at = self.rng.below(self.clients.len().max(1) as u64) as usize;
        let until = self.cluster.now() + self.rng.micros_below(STALL_MS_MAX * 1000);
        let threads = self.clients.get_mut(at).map(|client| &mut client.threads);
        if let Some(threads) = threads.filter(|threads| !threads.is_empty()) {
            let thread = self.rng.below(threads.len() as u64) as usize;
            threads[thread].stalled_until = until;
            let number = threads[thread].number;
            tell!(self.cluster, "channel {number} is stalled");
            self.count_event("channel stalled");
            if self.rng.one_in(2) {
                self.break_random_connection();
            }
        }
    }

    /// Stops a client's process for a while.
    fn stop_client(&mut self) {
        let at = self.rng.below(self.clients.len().max(1) as u64) as usize;
        let until = self.cluster.now() + self.rng.micros_below(STOP_MS_MAX * 1000);
        if let Some(client) = self.clients.get_mut(at) {
            tell!(self.cluster, "client {} is stopped", client.number);
            client.stopped_until = until;
            self.count_event("client stopped");
        }
    }

    fn reopen_channel(&mut self) {
        let at = self.rng.below(self.clients.len().max(1) as u64) as usize;
        let Some(client) = self.clients.get_mut(at) else {
            return;
        };
        if client.threads.is_empty() || client.is_stopped() {
            return;
        }
        // A channel that is being closed keeps its sessions. Many of them would leave none for a
        // column that reconnects.
        if client
            .driven
            .status()
            .is_some_and(|s| s.channels > client.threads.len())
        {
            return;
        }
        let thread = self.rng.below(client.threads.len() as u64) as usize;
        let gone = client.threads.swap_remove(thread);
        tell!(self.cluster, "channel {} is closed", gone.number);
        drop(gone);
        self.next_thread += 1;
        client.open_thread(self.next_thread);
        self.count_event("channel closed");
    }

    fn set_message_faults(&mut self) {
        let odds = |rng: &mut pagemesh_base::rng::SplitMix64, odds: u64| match rng.one_in(2) {
            true => 0,
            false => odds,
        };
        let rng = &mut self.rng;
        let rough = self.plan.damaged_brick.is_none();
        let weather = MessageFaults {
            lost: if rough { odds(rng, 200) } else { 0 },
            repeated: if rough { odds(rng, 200) } else { 0 },
            corrupted: if rough { odds(rng, 300) } else { 0 },
            delayed: odds(rng, 8),
            overtaking: rng.one_in(2),
        };
        tell!(self.cluster, "{weather:?}");
        self.cluster.net().message_faults = weather;
    }

    /// Breaks a connection.
    fn break_random_connection(&mut self) {
        let victim = self.plan.damaged_brick;
        let net = self.cluster.net();
        let mut connections = Vec::new();
        for client in &self.clients {
            connections.extend(net.open_connections_of(Peer::Client(client.number)));
        }
        connections.retain(|id| {
            let host = net.connection(*id).map(|line| line.host);
            victim.is_none_or(|victim| host == Some(victim))
        });
        if let Some(connection) = self.rng.pick(&connections) {
            drop(net);
            tell!(self.cluster, "connection {connection} breaks");
            self.cluster.hang_up(connection);
            self.count_event("connection broken");
        }
    }

    /// A client loses a connection without the brick's knowledge. The requests in the connection
    /// arrive after the client has reconnected and sent them again, maybe after its later writes.
    /// All threads access one page meanwhile.
    pub(crate) fn sever_connection(&mut self) {
        if !self.plan.severs_connections || self.is_promotion_under_way() {
            return;
        }
        if self.sever_rng.one_in(SEVER_ODDS) {
            let page = self.sever_rng.below(self.sectors.div_ceil(PAGE_SECTORS)) * PAGE_SECTORS;
            let sectors = page..(page + PAGE_SECTORS).min(self.sectors);
            tell!(
                self.cluster,
                "all threads want {sectors:?}, one connection is severed"
            );
            self.hot_page = Some(HotPage {
                sectors,
                requests_left: HOT_PAGE_REQUESTS,
            });
            self.is_severing = true;
        }
        if !self.is_severing {
            return;
        }
        let laden = self.cluster.net().connections_with_requests();
        if let Some(connection) = self.sever_rng.pick(&laden) {
            let late = self.sever_rng.micros_below(SEVERED_DELAY_US_MAX);
            tell!(
                self.cluster,
                "connection {connection} is severed, and is late by {late:?}"
            );
            self.cluster.net().sever(connection, late);
            self.is_severing = false;
            self.count_event("connection severed");
        }
    }

    /// Damages the medium.
    fn damage_medium(&mut self) {
        let Some(running) = self
            .plan
            .damaged_brick
            .and_then(|host| self.cluster.running_brick(host))
        else {
            return;
        };
        let medium = match (running.medium.memory(), running.medium.disk()) {
            (Some(memory), _) => memory,
            (None, Some(disk)) => return self.damage_disk(disk.device()),
            (None, None) => return,
        };
        if self.plan.flips_slots && self.slot_flip_rng.one_in(2) {
            return self.flip_table_slot(medium);
        }
        if self.plan.has_unreadable_pages && self.unreadable_rng.one_in(3) {
            if medium.make_unreadable(self.unreadable_rng.next_u64()) {
                tell!(self.cluster, "a page cannot be read");
                self.count_event("page unreadable");
                self.frames_withheld += 1;
            }
            return;
        }
        let choice = self.rng.next_u64();
        match choice >> 60 {
            0..=7 => {
                if medium.flip_data_bit(choice) {
                    self.count_event("bit flipped");
                }
            }
            8..=11 => {
                medium.inject_write_fault(WriteFault::Lost);
                self.count_event("write lost");
            }
            _ => {
                medium.inject_write_fault(WriteFault::Misdirected(choice));
                self.count_event("write misdirected");
            }
        }
        tell!(self.cluster, "the medium is damaged");
    }

    fn flip_table_slot(&mut self, medium: &MemoryMedium) {
        let Some(FlippedSlot { level, is_mapped }) = medium.flip_slot(&mut self.slot_flip_rng)
        else {
            return;
        };
        tell!(self.cluster, "a slot of level {level} loses a bit");
        self.count_event(match level {
            0 => "slot of a page flipped",
            _ => "slot above the leaves flipped",
        });
        self.frames_withheld += u64::from(level == 0 && is_mapped);
    }
}
