//! Machines as network namespaces, and a network between them that loses what
//! it is told to.
//!
//! One bridge in a namespace of its own, the hub, joins all hosts. Who loses
//! packets to whom is decided by the sender's neighbour table: an entry that
//! names a station that does not exist. So packets vanish without a word, each
//! direction by itself, with nothing but iproute2.
//!
//! Invariants: nothing of it is visible outside of its namespaces; they are
//! deleted with the value, and those of test processes that were killed by the
//! next one.

use super::program;
use super::skip::skip;
use std::sync::atomic::{AtomicU32, Ordering};

/// What begins the names of all namespaces of tests; the process id follows.
const PREFIX: &str = "pagemesh-test-";
/// A station that is not there.
const NOBODY: &str = "02:00:00:00:ff:ff";

/// A machine of a cluster; bricks and clients count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    Manager,
    Brick(usize),
    Client(usize),
    /// Reaches all the others, whatever they lose among themselves.
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

    fn station(self) -> String {
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
    /// A manager, bricks and clients that all reach each other; none if this
    /// user may not make namespaces, which is said.
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
                net.direct(from, to, &to.station());
            }
        }
        Some(net)
    }

    fn join(&mut self, host: Host) {
        let name = self.namespace(host);
        program::ok("ip", &["netns", "add", &name]);
        self.hosts.push(host);
        let (port, station) = (host.port(), host.station());
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

    fn direct(&self, from: Host, to: Host, station: &str) {
        if from != to {
            let to = to.ip();
            self.ip(
                from,
                &format!("neigh replace {to} lladdr {station} nud permanent dev net"),
            );
        }
    }

    /// What makes the command that follows run on a host.
    pub fn enter(&self, host: Host) -> Vec<String> {
        let words = ["ip", "netns", "exec"].map(str::to_owned);
        words.into_iter().chain([self.namespace(host)]).collect()
    }

    /// From now on nothing that one sends to the other arrives.
    pub fn lose(&self, from: Host, to: Host) {
        self.direct(from, to, NOBODY);
    }

    /// It arrives again.
    pub fn deliver(&self, from: Host, to: Host) {
        self.direct(from, to, &to.station());
    }

    /// Neither hears the other.
    pub fn cut(&self, one: Host, other: Host) {
        self.lose(one, other);
        self.lose(other, one);
    }

    /// Both hear each other again.
    pub fn heal(&self, one: Host, other: Host) {
        self.deliver(one, other);
        self.deliver(other, one);
    }

    /// Takes a host's link down.
    pub fn unplug(&self, host: Host) {
        self.ip(Host::Hub, &format!("link set {} down", host.port()));
    }

    /// Its link is up again.
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
    // What is left is removed by the next test.
    let _ = program::run("ip", &["netns", "del", namespace]);
}

/// Removes what test processes left that are gone.
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
