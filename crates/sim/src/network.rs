//! The network: connections between peers and bricks as streams of messages, each with a time of
//! arrival.
//!
//! A stream keeps its order, as TCP does; only another connection can overtake. A lost message
//! therefore blocks all messages behind it, until an end closes the connection. Replies of one
//! stream may overtake each other if a history asks for it: the protocol allows that.

use crate::rng::SimRng;
use pagemesh_base::rng::SplitMix64;
use pagemesh_fabric::message::HEADER_BYTES;
use pagemesh_fabric::wire::ReceiveResult;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::time::Duration;

/// Silence between two machines after which both close their connections, as the fabric's keepalive
/// does.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// A machine that connects to a brick.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Peer {
    Client(u32),
    Manager,
}

pub(crate) type ConnectionId = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// To the brick.
    ToBrick,
    /// To its peer.
    ToPeer,
}

/// One direction of a connection.
#[derive(Default)]
struct MessageStream {
    messages: VecDeque<(Duration, Vec<u8>)>,
    /// Sent bytes that are no whole message yet.
    unframed: Vec<u8>,
    arrived: VecDeque<u8>,
    /// Arrival time of the last message.
    last_arrival: Duration,
    /// The sender sends no more.
    is_ended: bool,
    /// A message was lost: no later one arrives.
    blocked_since: Option<Duration>,
}

impl MessageStream {
    fn is_due(&self, now: Duration) -> bool {
        let next = self.messages.front();
        !self.arrived.is_empty()
            || match next {
                Some((at, _)) => self.blocked_since.is_none() && *at <= now,
                None => self.is_ended,
            }
    }

    fn deliver_due(&mut self, now: Duration) -> bool {
        if self.blocked_since.is_some() || self.messages.front().is_none_or(|(at, _)| *at > now) {
            return false;
        }
        let (_, bytes) = self.messages.pop_front().expect("a message");
        self.arrived.extend(bytes);
        true
    }

    /// The sender's end is gone: a part of the messages in transit arrives.
    fn end(&mut self, kept: usize) {
        self.messages.truncate(kept);
        if self.blocked_since.take().is_some() {
            self.messages.clear();
        }
        self.unframed.clear();
        self.is_ended = true;
    }
}

pub(crate) struct SimConnection {
    pub(crate) peer: Peer,
    pub(crate) host: usize,
    to_brick: MessageStream,
    to_peer: MessageStream,
    /// A blocking call uses the connection: messages arrive at once.
    is_blocking_call: bool,
    is_peer_closed: bool,
    is_brick_closed: bool,
    /// The brick's machine lost its power: the peer learns that when the machine is back.
    is_brick_powerless: bool,
}

/// The directions that are blocked between a peer and a brick's machine.
#[derive(Clone, Copy, Debug)]
struct Partition {
    blocks_to_brick: bool,
    blocks_to_peer: bool,
    since: Duration,
}

/// Faults of single messages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MessageFaults {
    /// Odds of each fault (one in this many); 0 for never.
    pub(crate) lost: u64,
    pub(crate) repeated: u64,
    pub(crate) corrupted: u64,
    pub(crate) delayed: u64,
    /// Whether replies may overtake each other.
    pub(crate) overtaking: bool,
}

/// Counts of the faults of single messages.
#[derive(Default)]
pub(crate) struct MessageFaultCounts {
    lost: u64,
    repeated: u64,
    corrupted: u64,
    delayed: u64,
    overtaken: u64,
}

impl MessageFaultCounts {
    pub(crate) fn by_name(&self) -> [(&'static str, u64); 5] {
        [
            ("messages lost", self.lost),
            ("messages repeated", self.repeated),
            ("messages corrupted", self.corrupted),
            ("messages delayed", self.delayed),
            ("replies overtaken", self.overtaken),
        ]
    }
}

pub(crate) struct Network {
    pub(crate) now: Duration,
    pub(crate) message_faults: MessageFaults,
    rng: SplitMix64,
    connections: BTreeMap<ConnectionId, SimConnection>,
    last_id: ConnectionId,
    partitions: BTreeMap<(Peer, usize), Partition>,
    slow: Vec<bool>,
    pub(crate) messages: u64,
    pub(crate) fault_counts: MessageFaultCounts,
}

fn happens_one_in(rng: &mut SplitMix64, sides: u64) -> bool {
    sides > 0 && rng.one_in(sides)
}

impl Network {
    pub(crate) fn new(rng: SplitMix64, hosts: usize) -> Network {
        Network {
            now: Duration::ZERO,
            message_faults: MessageFaults::default(),
            rng,
            connections: BTreeMap::new(),
            last_id: 0,
            partitions: BTreeMap::new(),
            slow: vec![false; hosts],
            messages: 0,
            fault_counts: MessageFaultCounts::default(),
        }
    }

    pub(crate) fn open(&mut self, peer: Peer, host: usize) -> ConnectionId {
        self.last_id += 1;
        let connection = SimConnection {
            peer,
            host,
            to_brick: MessageStream::default(),
            to_peer: MessageStream::default(),
            is_blocking_call: true,
            is_peer_closed: false,
            is_brick_closed: false,
            is_brick_powerless: false,
        };
        self.connections.insert(self.last_id, connection);
        self.last_id
    }

    pub(crate) fn connection(&self, id: ConnectionId) -> Option<&SimConnection> {
        self.connections.get(&id)
    }

    /// Ends the blocking calls of a connection.
    pub(crate) fn end_blocking_call(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.is_blocking_call = false;
        }
    }

    /// Whether a direction is blocked, and whether it has been for longer than the keepalive.
    fn partition_state(&self, peer: Peer, host: usize, way: Direction) -> (bool, bool) {
        let Some(cut) = self.partitions.get(&(peer, host)) else {
            return (false, false);
        };
        let blocked = match way {
            Direction::ToBrick => cut.blocks_to_brick,
            Direction::ToPeer => cut.blocks_to_peer,
        };
        (blocked, self.now >= cut.since + KEEPALIVE)
    }

    /// Whether messages are blocked on a connection now, and whether both ends have closed it.
    fn block_state(&self, connection: &SimConnection, way: Direction) -> (bool, bool) {
        let (blocked, is_dead) = self.partition_state(connection.peer, connection.host, way);
        let stuck = connection
            .to_brick
            .blocked_since
            .into_iter()
            .chain(connection.to_peer.blocked_since);
        let is_over = stuck
            .min()
            .is_some_and(|since| self.now >= since + KEEPALIVE);
        (blocked, is_dead || is_over)
    }

    pub(crate) fn is_partitioned(&self, peer: Peer, host: usize) -> bool {
        self.partitions.contains_key(&(peer, host))
    }

    pub(crate) fn partition(&mut self, peer: Peer, host: usize, up: bool, down: bool) {
        let since = self.now;
        self.partitions.insert(
            (peer, host),
            Partition {
                blocks_to_brick: up,
                blocks_to_peer: down,
                since,
            },
        );
    }

    pub(crate) fn clear_faults(&mut self) {
        self.partitions.clear();
        self.slow.fill(false);
        self.message_faults = MessageFaults::default();
    }

    pub(crate) fn set_slow(&mut self, host: usize, is_slow: bool) {
        self.slow[host] = is_slow;
    }

    pub(crate) fn is_slow(&self, host: usize) -> bool {
        self.slow[host]
    }

    pub(crate) fn send(
        &mut self,
        id: ConnectionId,
        way: Direction,
        bytes: &[u8],
    ) -> io::Result<()> {
        let Network {
            now,
            message_faults: weather,
            rng: dice,
            connections: lines,
            messages,
            fault_counts: mishaps,
            slow,
            ..
        } = self;
        let connection = lines.get_mut(&id).ok_or(io::ErrorKind::NotConnected)?;
        let is_slow = slow[connection.host];
        let (lane, gone) = match way {
            Direction::ToBrick => (
                &mut connection.to_brick,
                connection.is_brick_closed && !connection.is_brick_powerless,
            ),
            Direction::ToPeer => (&mut connection.to_peer, connection.is_peer_closed),
        };
        if gone {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        lane.unframed.extend_from_slice(bytes);
        while let Some(message) = take_message(&mut lane.unframed) {
            *messages += 1;
            let is_repeated = happens_one_in(dice, weather.repeated);
            mishaps.repeated += u64::from(is_repeated);
            for _ in 0..1 + u32::from(is_repeated) {
                let mut message = message.clone();
                if happens_one_in(dice, weather.corrupted) {
                    mishaps.corrupted += 1;
                    let at = dice.below(message.len() as u64) as usize;
                    message[at] ^= 1 << dice.below(8);
                }
                let mut at = *now + Duration::from_micros(20) + dice.micros_below(100);
                if happens_one_in(dice, weather.delayed) {
                    mishaps.delayed += 1;
                    at += dice.micros_below(20_000);
                }
                if is_slow {
                    at += dice.micros_below(50_000);
                }
                let overtakes = weather.overtaking && way == Direction::ToPeer;
                if !overtakes {
                    at = at.max(lane.last_arrival);
                }
                lane.last_arrival = lane.last_arrival.max(at);
                let place = lane.messages.partition_point(|(other, _)| *other <= at);
                mishaps.overtaken += (lane.messages.len() - place) as u64;
                lane.messages.insert(place, (at, message));
            }
            if happens_one_in(dice, weather.lost) {
                mishaps.lost += 1;
                lane.messages.pop_back();
                lane.blocked_since = lane.blocked_since.or(Some(*now));
            }
        }
        Ok(())
    }

    /// Delivers the next message if its time has come. False if there is neither data nor an end to
    /// take.
    pub(crate) fn deliver(&mut self, id: ConnectionId, way: Direction) -> bool {
        let Some(connection) = self.connections.get(&id) else {
            return false;
        };
        let (blocked, is_dead) = self.block_state(connection, way);
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&id) else {
            return false;
        };
        let now = if connection.is_blocking_call {
            Duration::MAX
        } else {
            now
        };
        let lane = match way {
            Direction::ToBrick => &mut connection.to_brick,
            Direction::ToPeer => &mut connection.to_peer,
        };
        if !blocked {
            lane.deliver_due(now);
        }
        is_dead || !lane.arrived.is_empty() || (!blocked && lane.is_due(now))
    }

    /// Whether a delivery would succeed.
    pub(crate) fn is_due(&self, id: ConnectionId, way: Direction) -> bool {
        self.connections.get(&id).is_some_and(|connection| {
            let (blocked, is_dead) = self.block_state(connection, way);
            let lane = match way {
                Direction::ToBrick => &connection.to_brick,
                Direction::ToPeer => &connection.to_peer,
            };
            is_dead || (!blocked && lane.is_due(self.now))
        })
    }

    pub(crate) fn receive(
        &mut self,
        id: ConnectionId,
        way: Direction,
        into: &mut Vec<u8>,
    ) -> ReceiveResult {
        let Some(connection) = self.connections.get_mut(&id) else {
            return ReceiveResult::End;
        };
        let room = into.capacity() - into.len();
        let lane = match way {
            Direction::ToBrick => &mut connection.to_brick,
            Direction::ToPeer => &mut connection.to_peer,
        };
        let len = room.min(lane.arrived.len());
        if len > 0 {
            into.extend(lane.arrived.drain(..len));
            return ReceiveResult::Bytes {
                drained: len < room,
            };
        }
        let has_ended = lane.is_ended && lane.messages.is_empty();
        let is_known = self
            .connections
            .get(&id)
            .map(|connection| self.block_state(connection, way));
        let (blocked, is_dead) = is_known.unwrap_or((false, true));
        match is_dead || (has_ended && !blocked) {
            true => ReceiveResult::End,
            false => ReceiveResult::WouldBlock,
        }
    }

    /// The peer closes its end.
    pub(crate) fn close_peer_end(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.is_peer_closed = true;
        let kept = self
            .rng
            .below(connection.to_brick.messages.len() as u64 + 1) as usize;
        connection.to_brick.end(kept);
        connection.to_peer = MessageStream::default();
        if connection.is_brick_closed && !connection.is_brick_powerless {
            self.connections.remove(&id);
        }
    }

    /// The peer loses the connection; its earlier messages arrive late.
    pub(crate) fn sever(&mut self, id: ConnectionId, late: Duration) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.to_peer = MessageStream::default();
            connection.to_peer.is_ended = true;
            for (at, _) in &mut connection.to_brick.messages {
                *at += late;
            }
            connection.to_brick.last_arrival += late;
        }
    }

    /// Open client connections with requests in transit to the brick.
    pub(crate) fn connections_with_requests(&self) -> Vec<ConnectionId> {
        let laden = |connection: &SimConnection| {
            let is_client = matches!(connection.peer, Peer::Client(_));
            let is_open = !connection.is_peer_closed && !connection.is_brick_closed;
            is_client && is_open && !connection.to_brick.messages.is_empty()
        };
        let connections = self.connections.iter();
        connections
            .filter(|(_, connection)| laden(connection))
            .map(|(id, _)| *id)
            .collect()
    }

    /// The brick closes its end.
    pub(crate) fn close_brick_end(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.is_brick_closed = true;
            connection.to_brick = MessageStream::default();
            connection.to_peer.end(usize::MAX);
            if connection.is_peer_closed {
                self.connections.remove(&id);
            }
        }
    }

    /// The brick is gone with all its connections; after a loss of power no peer is told.
    pub(crate) fn drop_brick(&mut self, host: usize, is_powerless: bool) {
        for connection in self
            .connections
            .values_mut()
            .filter(|line| line.host == host)
        {
            if connection.is_brick_closed {
                continue;
            }
            connection.is_brick_closed = true;
            connection.to_brick = MessageStream::default();
            let kept = self.rng.below(connection.to_peer.messages.len() as u64 + 1) as usize;
            connection.to_peer.end(kept);
            connection.to_peer.is_ended = !is_powerless;
            connection.is_brick_powerless = is_powerless;
        }
        self.remove_closed();
    }

    /// The machine is back: peers that still use the dead brick's connections are told.
    pub(crate) fn restore_brick(&mut self, host: usize) {
        for connection in self
            .connections
            .values_mut()
            .filter(|line| line.host == host)
        {
            if std::mem::take(&mut connection.is_brick_powerless) {
                connection.to_peer.is_ended = true;
            }
        }
        self.remove_closed();
    }

    fn remove_closed(&mut self) {
        self.connections
            .retain(|_, connection| !(connection.is_peer_closed && connection.is_brick_closed));
    }

    /// Connections with data at the brick's end.
    pub(crate) fn connections_with_arrivals(&self) -> Vec<ConnectionId> {
        let connections = self.connections.iter();
        let live = connections.filter(|(_, connection)| !connection.is_brick_closed);
        live.map(|(id, _)| *id)
            .filter(|id| self.is_due(*id, Direction::ToBrick))
            .collect()
    }

    /// Whether a slow brick has messages that it has not served.
    pub(crate) fn has_slow_arrivals(&self) -> bool {
        let arrived = self.connections_with_arrivals();
        arrived
            .iter()
            .any(|id| self.slow[self.connections[id].host])
    }

    /// A peer's connections that are open at both ends.
    pub(crate) fn open_connections_of(&self, peer: Peer) -> Vec<ConnectionId> {
        let connections = self.connections.iter();
        let open = |connection: &SimConnection| {
            connection.peer == peer && !connection.is_peer_closed && !connection.is_brick_closed
        };
        connections
            .filter(|(_, connection)| open(connection))
            .map(|(id, _)| *id)
            .collect()
    }

    /// Time of the next future arrival.
    pub(crate) fn next_arrival(&self) -> Option<Duration> {
        let lanes = self
            .connections
            .values()
            .flat_map(|connection| [&connection.to_brick, &connection.to_peer])
            .filter(|lane| lane.blocked_since.is_none());
        let next = lanes.filter_map(|lane| lane.messages.front());
        next.map(|(at, _)| *at).filter(|at| *at > self.now).min()
    }
}

/// Cuts off the first whole message.
fn take_message(bytes: &mut Vec<u8>) -> Option<Vec<u8>> {
    /// Offset of the body length in a header.
    const BODY_LEN_AT: usize = 20;
    let len = bytes.get(BODY_LEN_AT..)?.first_chunk::<4>()?;
    let len = HEADER_BYTES + u32::from_le_bytes(*len) as usize;
    (bytes.len() >= len).then(|| {
        let rest = bytes.split_off(len);
        std::mem::replace(bytes, rest)
    })
}
