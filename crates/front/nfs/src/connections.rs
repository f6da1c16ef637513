//! All connections of a server: their bounds, and their removal.
//!
//! A connection without a call is half-open. It is cheap, and the oldest one makes room for a new
//! one. Connections with a call are bounded in total and for each address; beyond, a connection ends
//! at its first call.
//!
//! A host without a rule of any export gets refusals only. Such hosts have a small bound of their own, and the
//! oldest of their connections makes room also for a host with a rule.

use crate::connection::{Connection, ConnectionId, EndReason};
use crate::counters::{CounterCells, count};
use crate::export_table::Exports;
use crate::limits::Limits;
use pagemesh_base::poison;
use rustix::event::epoll;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// A client with connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientFigures {
    /// Its address.
    pub address: IpAddr,
    /// Its connections with a call so far.
    pub connections: usize,
    /// The calls on these connections.
    pub calls: u64,
    /// The time since bytes last came or went.
    pub idle: Duration,
}

/// See the module.
pub(crate) struct Connections {
    pub(crate) epoll: OwnedFd,
    pub(crate) limits: Limits,
    counters: Arc<CounterCells>,
    exports: Exports,
    table: Mutex<ConnectionTable>,
    removed: Condvar,
    /// Bytes of incomplete records and of replies that clients have not taken.
    held: AtomicUsize,
}

#[derive(Default)]
struct ConnectionTable {
    next_id: ConnectionId,
    all: HashMap<ConnectionId, Arc<Connection>>,
    /// Connections without a call, the oldest first.
    half_open: BTreeMap<ConnectionId, ()>,
    /// Connections with a call.
    established: usize,
    /// Those among them of hosts without a rule, the oldest first.
    without_rule: BTreeMap<ConnectionId, ()>,
    /// The version of the rules that decided about them.
    rules: u64,
    by_address: HashMap<IpAddr, usize>,
    is_stopping: bool,
}

impl Connections {
    pub(crate) fn new(
        limits: Limits,
        counters: Arc<CounterCells>,
        exports: Exports,
    ) -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            limits,
            counters,
            exports,
            table: Mutex::default(),
            removed: Condvar::new(),
            held: AtomicUsize::new(0),
        })
    }

    pub(crate) fn count(&self) -> usize {
        poison::lock(&self.table).all.len()
    }

    /// The clients by their addresses, the one with the most calls first.
    pub(crate) fn clients(&self, now: Instant) -> Vec<ClientFigures> {
        let connections: Vec<_> = poison::lock(&self.table).all.values().cloned().collect();
        let mut clients: HashMap<IpAddr, ClientFigures> = HashMap::new();
        for connection in connections.iter().filter(|it| it.is_established()) {
            let (calls, last_event) = connection.activity();
            let address = connection.client().to_canonical();
            let idle = now.saturating_duration_since(last_event);
            let client = clients.entry(address).or_insert(ClientFigures {
                address,
                connections: 0,
                calls: 0,
                idle,
            });
            client.connections += 1;
            client.calls += calls;
            client.idle = client.idle.min(idle);
        }
        let mut clients: Vec<_> = clients.into_values().collect();
        clients.sort_by_key(|it| (std::cmp::Reverse(it.calls), it.address));
        clients
    }

    pub(crate) fn half_open(&self) -> usize {
        poison::lock(&self.table).half_open.len()
    }

    pub(crate) fn get(&self, id: ConnectionId) -> Option<Arc<Connection>> {
        poison::lock(&self.table).all.get(&id).cloned()
    }

    /// Adds a client. The oldest half-open connection makes room, if there are too many.
    pub(crate) fn add(self: &Arc<Self>, socket: TcpStream, peer: SocketAddr) -> io::Result<()> {
        crate::connection::prepare(&socket)?;
        let mut table = poison::lock(&self.table);
        if table.is_stopping {
            return Err(io::Error::other("the server stops"));
        }
        let id = table.next_id;
        table.next_id += 1;
        let connection = Connection::new(id, (socket, peer), Arc::clone(self));
        let connection = Arc::new(connection);
        let added = Arc::clone(&connection);
        table.all.insert(id, connection);
        table.half_open.insert(id, ());
        let oldest = match table.half_open.len() > self.limits.half_open_max {
            true => table.oldest_half_open(),
            false => None,
        };
        drop(table);
        self.close_for_room(oldest);
        let started = added.start();
        if let Err(error) = &started {
            let error = io::Error::from(error.kind());
            added.close(EndReason::Socket(error));
        }
        started
    }

    /// Closes the oldest half-open connection: the process has no descriptor for another one.
    pub(crate) fn make_room(&self) {
        let oldest = poison::lock(&self.table).oldest_half_open();
        self.close_for_room(oldest);
    }

    /// See [`Connection::establish`].
    pub(crate) fn establish(&self, connection: &Connection) -> Result<(), EndReason> {
        let address = connection.client();
        let has_rule = self.exports.has_rule(address);
        let mut table = poison::lock(&self.table);
        if table.half_open.remove(&connection.id).is_none() {
            // It was closed meanwhile.
            return Ok(());
        }
        let of_address = table.by_address.get(&address).copied().unwrap_or(0);
        let is_address_full = of_address >= self.limits.address_connections_max;
        let is_full = table.established >= self.limits.connections_max;
        let without_rule_max = self.limits.without_rule_max;
        let needs_room = is_full || (!has_rule && table.without_rule.len() >= without_rule_max);
        let oldest = match needs_room && !is_address_full {
            true => table.take_oldest_without_rule(),
            false => None,
        };
        if is_address_full || (needs_room && oldest.is_none()) {
            // It is half-open until its end.
            table.half_open.insert(connection.id, ());
            drop(table);
            count(&self.counters.refused);
            return Err(EndReason::TooMany);
        }
        table.established += 1;
        table.by_address.insert(address, of_address + 1);
        if !has_rule {
            table.without_rule.insert(connection.id, ());
        }
        drop(table);
        self.close_for_room(oldest);
        Ok(())
    }

    fn close_for_room(&self, closed: impl IntoIterator<Item = Arc<Connection>>) {
        for connection in closed {
            count(&self.counters.refused);
            connection.close(EndReason::TooMany);
        }
    }

    /// Finds the hosts without a rule again after the rules have changed.
    fn note_rules(&self) {
        let rules = self.exports.version();
        if poison::lock(&self.table).rules == rules {
            return;
        }
        let all = self.all();
        let established = all.iter().filter(|it| it.is_established());
        let without_rule = established.filter(|it| !self.exports.has_rule(it.client()));
        let without_rule: Vec<_> = without_rule.map(|it| it.id).collect();
        let mut table = poison::lock(&self.table);
        table.rules = rules;
        table.without_rule.clear();
        for id in without_rule {
            if table.all.contains_key(&id) {
                table.without_rule.insert(id, ());
            }
        }
        let mut closed = Vec::new();
        while table.without_rule.len() > self.limits.without_rule_max {
            closed.extend(table.take_oldest_without_rule());
        }
        drop(table);
        self.close_for_room(closed);
    }

    /// Removes a connection that is closed.
    pub(crate) fn remove(&self, connection: &Connection, reason: &EndReason) {
        let peer = connection.peer;
        let mut table = poison::lock(&self.table);
        if table.all.remove(&connection.id).is_none() {
            return;
        }
        table.without_rule.remove(&connection.id);
        if table.half_open.remove(&connection.id).is_none() {
            table.established -= 1;
            let address = connection.client();
            if let Some(of_address) = table.by_address.get_mut(&address) {
                *of_address -= 1;
                if *of_address == 0 {
                    table.by_address.remove(&address);
                }
            }
        }
        // The removal is seen together with its counter.
        if reason.is_violation() {
            count(&self.counters.violations);
        }
        drop(table);
        self.removed.notify_all();
        log_end(&peer, connection.is_established(), reason);
    }

    /// Sets the bytes that a connection holds, of which `held` is the earlier number. Returns whether
    /// all connections hold too many.
    pub(crate) fn hold(&self, held: &mut usize, now: usize) -> bool {
        let before = std::mem::replace(held, now);
        if now <= before {
            if now < before {
                self.held.fetch_sub(before - now, Ordering::Relaxed);
            }
            return false;
        }
        let all = self.held.fetch_add(now - before, Ordering::Relaxed);
        all + now - before > self.limits.unsent_bytes_max
    }

    /// Closes connections that hold bytes until the others may hold theirs, the one that has waited for its client for the longest
    /// time first. The caller has no lock of a connection.
    pub(crate) fn make_room_for_bytes(&self) {
        let holding = self.all().into_iter();
        let holding = holding.filter_map(|it| Some((it.holds_since()?, it)));
        let mut holding: Vec<_> = holding.collect();
        holding.sort_by_key(|(since, connection)| (*since, connection.id));
        for (_, connection) in holding {
            if self.held() <= self.limits.unsent_bytes_max {
                return;
            }
            connection.close(EndReason::Overload);
        }
    }

    /// Whether all connections together hold so many bytes that clients with untaken replies get no more of them.
    pub(crate) fn are_bytes_scarce(&self) -> bool {
        self.held() > self.limits.unsent_bytes_max / 2
    }

    /// The bytes that all connections hold.
    pub(crate) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn all(&self) -> Vec<Arc<Connection>> {
        poison::lock(&self.table).all.values().cloned().collect()
    }

    /// Ends connections that are beyond a deadline.
    pub(crate) fn check_deadlines(&self, now: Instant) {
        self.note_rules();
        for connection in self.all() {
            connection.check_deadlines(now, &self.limits);
        }
    }

    /// Reads no more calls, and ends connections after their last replies.
    pub(crate) fn stop(&self) {
        poison::lock(&self.table).is_stopping = true;
        for connection in self.all() {
            connection.end_input(EndReason::Stopped);
        }
    }

    /// Waits until no connection has a call or a reply. Returns the number that have one.
    pub(crate) fn wait_for_end(&self, limit: Duration) -> usize {
        let until = Instant::now() + limit;
        let mut table = poison::lock(&self.table);
        while !table.all.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            table = poison::recover(self.removed.wait_timeout(table, left)).0;
        }
        drop(table);
        self.all().iter().filter(|it| it.is_busy()).count()
    }

    /// Ends all connections now.
    pub(crate) fn close_all(&self) {
        for connection in self.all() {
            connection.close(EndReason::Stopped);
        }
    }
}

impl ConnectionTable {
    fn take_oldest_without_rule(&mut self) -> Option<Arc<Connection>> {
        let (id, ()) = self.without_rule.pop_first()?;
        self.all.get(&id).cloned()
    }

    fn oldest_half_open(&self) -> Option<Arc<Connection>> {
        let (id, ()) = self.half_open.first_key_value()?;
        self.all.get(id).cloned()
    }
}

fn log_end(peer: &dyn Display, is_established: bool, reason: &EndReason) {
    if reason.is_violation() {
        tracing::warn!(%peer, %reason, "NFS connection ended");
    } else if is_established {
        tracing::info!(%peer, %reason, "NFS connection ended");
    } else {
        tracing::debug!(%peer, %reason, "NFS connection without a call ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::Reply;
    use crate::testing::connections_with;
    use crate::xdr::{Encode, Writer};
    use bytes::Bytes;
    use std::net::TcpListener;

    /// Much more than sockets take.
    const REPLY_BYTES: usize = 64 << 20;

    struct LongResult;

    impl Encode for LongResult {
        fn encode(&self, _: &mut Writer) {}

        fn tail(&self) -> Bytes {
            Bytes::from(vec![0; REPLY_BYTES])
        }
    }

    #[test]
    fn overload_closes_the_client_that_is_slow_for_the_longest_time() {
        let limits = Limits {
            unsent_bytes_max: REPLY_BYTES / 4 * 5,
            ..Limits::default()
        };
        let connections = connections_with(limits);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = listener.local_addr().expect("an address");
        let clients = [0, 1].map(|_| {
            let client = TcpStream::connect(address).expect("connected");
            let (socket, peer) = listener.accept().expect("a client");
            connections.add(socket, peer).expect("added");
            client
        });
        let slow = [0, 1].map(|id| {
            let connection = connections.get(id).expect("a connection");
            connection.admit_always(REPLY_BYTES);
            connection.reply(Reply::success(1, &LongResult), REPLY_BYTES);
            connection
        });
        assert_eq!(slow.each_ref().map(|it| it.is_closed()), [true, false]);
        assert!(connections.are_bytes_scarce());
        assert!(connections.held() <= REPLY_BYTES);
        drop(clients);
    }
}
