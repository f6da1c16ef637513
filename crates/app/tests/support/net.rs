//! Machines as network namespaces, and a network between them that drops packets on request.
//!
//! One bridge in its own namespace, the hub, joins all hosts. The sender's neighbour table decides
//! the dropped packets: its entry for the receiver names an unused MAC address. So packets vanish
//! without an error, each direction by itself, with nothing but iproute2.
//!
//! Invariants: nothing of the network is visible outside of its namespaces. They are deleted with
//! the value. The next test deletes the namespaces of killed test processes.

use super::program;
use super::skip::skip;
use std::sync::atomic::{AtomicU32, Ordering};

/// The prefix of the names of all test namespaces; the process id comes next.
const PREFIX: &str = "pagemesh-test-";
/// A MAC address that no interface has.
const UNUSED_MAC: &str = "02:00:00:00:ff:ff";

/// A machine of a cluster; bricks and clients count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    Manager,
    Brick(usize),
    Client(usize),
    /// Reaches all other hosts, even if packets between those are dropped.
    Hub,
}

impl Host {
    fn number(self) -> usize {
        match self {
            Host::Manager => 1,
            Host::Brick(n) => 10 + n,
            Host::Client(n) => 100 + n,
            Host::Hub => 254,
        }
    }

    /// Its address in its network.
    pub fn ip(self) -> String {
        format!("10.77.0.{}", self.number())
    }

    fn mac_address(self) -> String {
        format!("02:00:00:00:00:{:02x}", self.number())
    }

    /// The hub's end of its link.
    fn port(self) -> String {
        format!("port{}", self.number())
    }
}

/// A network; dropping it takes it down.
pub struct Net {
    name: String,
    hosts: Vec<Host>,
}

impl Net {
    /// A manager, bricks and clients that all reach each other. Returns `None` and prints a note if
    /// this user may not make namespaces.
    pub fn new(bricks: usize, clients: usize) -> Option<Net> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (pid, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        remove_leftovers();
        let mut net = Net {
            name: format!("{PREFIX}{pid}-{count}-"),
            hosts: vec![],
        };
        let hub = net.namespace(Host::Hub);
        let made = program::run("ip", &["netns", "add", &hub]);
        if !made.status.success() {
            let cause = String::from_utf8_lossy(&made.stderr);
            assert!(
                cause.contains("not permitted") || cause.contains("denied"),
                "{cause}"
            );
            skip(&format!("needs root for network namespaces: {cause}"));
            return None;
        }
        net.hosts.push(Host::Hub);
        net.ip(
            Host::Hub,
            "link add hub address 02:00:00:00:00:fe type bridge",
        );
        net.ip(
            Host::Hub,
            &format!("addr add {}/24 dev hub", Host::Hub.ip()),
        );
        net.ip(Host::Hub, "link set hub up");
        let hosts = [Host::Manager].into_iter();
        let hosts = hosts.chain((0..bricks).map(Host::Brick));
        for host in hosts.chain((0..clients).map(Host::Client)) {
            net.join(host);
        }
        for &from in &net.hosts[1..] {
            for &to in &net.hosts[1..] {
                net.set_neighbour(from, to, &to.mac_address());
            }
        }
        Some(net)
    }

    fn join(&mut self, host: Host) {
        let name = self.namespace(host);
        program::ok("ip", &["netns", "add", &name]);
        self.hosts.push(host);
        let (port, station) = (host.port(), host.mac_address());
        self.ip(
            Host::Hub,
            &format!("link add {port} type veth peer name net address {station} netns {name}"),
        );
        self.ip(Host::Hub, &format!("link set {port} master hub up"));
        self.ip(host, &format!("addr add {}/24 dev net", host.ip()));
        self.ip(host, "link set net up");
        self.ip(host, "link set lo up");
    }

    fn namespace(&self, host: Host) -> String {
        format!("{}{}", self.name, host.number())
    }

    /// Runs `ip` in the namespace of a host.
    fn ip(&self, host: Host, args: &str) {
        let name = self.namespace(host);
        let args: Vec<&str> = ["-n", &name].into_iter().chain(args.split(' ')).collect();
        program::ok("ip", &args);
    }

    fn set_neighbour(&self, from: Host, to: Host, station: &str) {
        if from != to {
            let to = to.ip();
            self.ip(
                from,
                &format!("neigh replace {to} lladdr {station} nud permanent dev net"),
            );
        }
    }

    /// The words before a command that make it run on a host.
    pub fn enter(&self, host: Host) -> Vec<String> {
        let words = ["ip", "netns", "exec"].map(str::to_owned);
        words.into_iter().chain([self.namespace(host)]).collect()
    }

    /// The file of the namespace of a host.
    pub fn namespace_file(&self, host: Host) -> std::path::PathBuf {
        std::path::Path::new("/run/netns").join(self.namespace(host))
    }

    /// Gives a host a further address. The hub hears of it at once, as by a gratuitous ARP.
    pub fn assign(&self, host: Host, address: &str) {
        self.ip(host, &format!("addr add {address}/24 dev net"));
        let hardware = host.mac_address();
        self.ip(
            Host::Hub,
            &format!("neigh replace {address} lladdr {hardware} nud permanent dev hub"),
        );
    }

    /// Takes a further address away.
    pub fn withdraw(&self, host: Host, address: &str) {
        self.ip(host, &format!("addr del {address}/24 dev net"));
    }

    /// From now on all packets from one host to the other are dropped.
    pub fn drop_packets(&self, from: Host, to: Host) {
        self.set_neighbour(from, to, UNUSED_MAC);
    }

    /// The packets arrive again.
    pub fn restore_packets(&self, from: Host, to: Host) {
        self.set_neighbour(from, to, &to.mac_address());
    }

    /// Drops the packets of both directions.
    pub fn cut(&self, one: Host, other: Host) {
        self.drop_packets(one, other);
        self.drop_packets(other, one);
    }

    /// Restores both directions.
    pub fn heal(&self, one: Host, other: Host) {
        self.restore_packets(one, other);
        self.restore_packets(other, one);
    }

    /// Takes a host's link down.
    pub fn unplug(&self, host: Host) {
        self.ip(Host::Hub, &format!("link set {} down", host.port()));
    }

    /// Takes a host's link up again.
    pub fn plug(&self, host: Host) {
        self.ip(Host::Hub, &format!("link set {} up", host.port()));
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for &host in &self.hosts {
            remove(&self.namespace(host));
        }
    }
}

fn remove(namespace: &str) {
    // The next test removes a namespace that is left.
    let _ = program::run("ip", &["netns", "del", namespace]);
}

/// Removes the namespaces of test processes that are gone.
fn remove_leftovers() {
    let Ok(names) = std::fs::read_dir("/run/netns") else {
        return;
    };
    for name in names.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
        let pid = name
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.split_once('-'));
        if pid.is_some_and(|(pid, _)| !std::path::Path::new("/proc").join(pid).exists()) {
            remove(&name);
        }
    }
}
