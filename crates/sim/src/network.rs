//! The network: connections between peers and bricks as streams of messages,
//! each with a time of arrival.
//!
//! A stream keeps its order, as TCP does; what overtakes is another
//! connection. A message that is lost therefore holds up all behind it, until
//! somebody gives the connection up. Replies of one stream may overtake each
//! other where a history asks for it: the protocol allows that.

use crate::dice::Dice;
use pagemesh_fabric::message::HEADER_BYTES;
use pagemesh_fabric::wire::Received;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::time::Duration;

/// Silence between two machines after which both give their connections up,
/// as the fabric's keepalive does.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// Who connects to a brick.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Peer {
    Client(u32),
    Manager,
}

pub(crate) type LineId = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// To the brick.
    Up,
    /// To its peer.
    Down,
}

/// One direction of a connection.
#[derive(Default)]
struct Lane {
    messages: VecDeque<(Duration, Vec<u8>)>,
    /// Sent, and no whole message yet.
    partial: Vec<u8>,
    arrived: VecDeque<u8>,
    /// When the last message arrives.
    last: Duration,
    /// The sender sends no more.
    is_ended: bool,
    /// Something was lost: nothing arrives any more.
    stuck_since: Option<Duration>,
}

impl Lane {
    fn is_due(&self, now: Duration) -> bool {
        let next = self.messages.front();
        !self.arrived.is_empty()
            || match next {
                Some((at, _)) => self.stuck_since.is_none() && *at <= now,
                None => self.is_ended,
            }
    }

    fn take(&mut self, now: Duration) -> bool {
        if self.stuck_since.is_some() || self.messages.front().is_none_or(|(at, _)| *at > now) {
            return false;
        }
        let (_, bytes) = self.messages.pop_front().expect("a message");
        self.arrived.extend(bytes);
        true
    }

    /// The sender's end is gone: what is under way arrives in part.
    fn end(&mut self, kept: usize) {
        self.messages.truncate(kept);
        if self.stuck_since.take().is_some() {
            self.messages.clear();
        }
        self.partial.clear();
        self.is_ended = true;
    }
}

pub(crate) struct Line {
    pub(crate) peer: Peer,
    pub(crate) house: usize,
    up: Lane,
    down: Lane,
    /// A blocking call is made over it: messages arrive at once.
    is_rushed: bool,
    peer_left: bool,
    brick_left: bool,
    /// The brick's machine lost its power: nobody says so until it is back.
    is_orphan: bool,
}

/// What cannot pass between a peer and a house.
#[derive(Clone, Copy, Debug)]
struct Cut {
    up: bool,
    down: bool,
    since: Duration,
}

/// What may go wrong with single messages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Weather {
    /// One in so many; 0 for never.
    pub(crate) lost: u64,
    pub(crate) repeated: u64,
    pub(crate) corrupted: u64,
    pub(crate) delayed: u64,
    /// Whether replies may overtake each other.
    pub(crate) overtaking: bool,
}

/// What went wrong with single messages, counted.
#[derive(Default)]
pub(crate) struct Mishaps {
    lost: u64,
    repeated: u64,
    corrupted: u64,
    delayed: u64,
    overtaken: u64,
}

impl Mishaps {
    pub(crate) fn named(&self) -> [(&'static str, u64); 5] {
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
    pub(crate) weather: Weather,
    dice: Dice,
    lines: BTreeMap<LineId, Line>,
    next: LineId,
    cuts: BTreeMap<(Peer, usize), Cut>,
    slow: Vec<bool>,
    pub(crate) messages: u64,
    pub(crate) mishaps: Mishaps,
}

fn one_in(dice: &mut Dice, sides: u64) -> bool {
    sides > 0 && dice.one_in(sides)
}

impl Network {
    pub(crate) fn new(dice: Dice, houses: usize) -> Network {
        Network {
            now: Duration::ZERO,
            weather: Weather::default(),
            dice,
            lines: BTreeMap::new(),
            next: 0,
            cuts: BTreeMap::new(),
            slow: vec![false; houses],
            messages: 0,
            mishaps: Mishaps::default(),
        }
    }

    pub(crate) fn open(&mut self, peer: Peer, house: usize) -> LineId {
        self.next += 1;
        let line = Line {
            peer,
            house,
            up: Lane::default(),
            down: Lane::default(),
            is_rushed: true,
            peer_left: false,
            brick_left: false,
            is_orphan: false,
        };
        self.lines.insert(self.next, line);
        self.next
    }

    pub(crate) fn line(&self, id: LineId) -> Option<&Line> {
        self.lines.get(&id)
    }

    /// The blocking calls are over.
    pub(crate) fn settle(&mut self, id: LineId) {
        if let Some(line) = self.lines.get_mut(&id) {
            line.is_rushed = false;
        }
    }

    /// How a way between two is cut, and for how long.
    fn cut_of(&self, peer: Peer, house: usize, way: Way) -> (bool, bool) {
        let Some(cut) = self.cuts.get(&(peer, house)) else {
            return (false, false);
        };
        let blocked = match way {
            Way::Up => cut.up,
            Way::Down => cut.down,
        };
        (blocked, self.now >= cut.since + KEEPALIVE)
    }

    /// Whether nothing passes on a line now, and whether both ends have given
    /// it up.
    fn trouble(&self, line: &Line, way: Way) -> (bool, bool) {
        let (blocked, is_dead) = self.cut_of(line.peer, line.house, way);
        let stuck = line.up.stuck_since.into_iter().chain(line.down.stuck_since);
        let is_over = stuck
            .min()
            .is_some_and(|since| self.now >= since + KEEPALIVE);
        (blocked, is_dead || is_over)
    }

    pub(crate) fn is_cut(&self, peer: Peer, house: usize) -> bool {
        self.cuts.contains_key(&(peer, house))
    }

    pub(crate) fn cut(&mut self, peer: Peer, house: usize, up: bool, down: bool) {
        let since = self.now;
        self.cuts.insert((peer, house), Cut { up, down, since });
    }

    pub(crate) fn mend(&mut self) {
        self.cuts.clear();
        self.slow.fill(false);
        self.weather = Weather::default();
    }

    pub(crate) fn slow(&mut self, house: usize, is_slow: bool) {
        self.slow[house] = is_slow;
    }

    pub(crate) fn is_slow(&self, house: usize) -> bool {
        self.slow[house]
    }

    pub(crate) fn send(&mut self, id: LineId, way: Way, bytes: &[u8]) -> io::Result<()> {
        let Network {
            now,
            weather,
            dice,
            lines,
            messages,
            mishaps,
            slow,
            ..
        } = self;
        let line = lines.get_mut(&id).ok_or(io::ErrorKind::NotConnected)?;
        let is_slow = slow[line.house];
        let (lane, gone) = match way {
            Way::Up => (&mut line.up, line.brick_left && !line.is_orphan),
            Way::Down => (&mut line.down, line.peer_left),
        };
        if gone {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        lane.partial.extend_from_slice(bytes);
        while let Some(message) = whole(&mut lane.partial) {
            *messages += 1;
            let is_repeated = one_in(dice, weather.repeated);
            mishaps.repeated += u64::from(is_repeated);
            for _ in 0..1 + u32::from(is_repeated) {
                let mut message = message.clone();
                if one_in(dice, weather.corrupted) {
                    mishaps.corrupted += 1;
                    let at = dice.roll(message.len() as u64) as usize;
                    message[at] ^= 1 << dice.roll(8);
                }
                let mut at = *now + Duration::from_micros(20) + dice.micros(100);
                if one_in(dice, weather.delayed) {
                    mishaps.delayed += 1;
                    at += dice.micros(20_000);
                }
                if is_slow {
                    at += dice.micros(50_000);
                }
                let overtakes = weather.overtaking && way == Way::Down;
                if !overtakes {
                    at = at.max(lane.last);
                }
                lane.last = lane.last.max(at);
                let place = lane.messages.partition_point(|(other, _)| *other <= at);
                mishaps.overtaken += (lane.messages.len() - place) as u64;
                lane.messages.insert(place, (at, message));
            }
            if one_in(dice, weather.lost) {
                mishaps.lost += 1;
                lane.messages.pop_back();
                lane.stuck_since = lane.stuck_since.or(Some(*now));
            }
        }
        Ok(())
    }

    /// Has the next message arrive, if its time has come. False if nothing is
    /// there to be taken, not even an end.
    pub(crate) fn deliver(&mut self, id: LineId, way: Way) -> bool {
        let Some(line) = self.lines.get(&id) else {
            return false;
        };
        let (blocked, is_dead) = self.trouble(line, way);
        let now = self.now;
        let Some(line) = self.lines.get_mut(&id) else {
            return false;
        };
        let now = if line.is_rushed { Duration::MAX } else { now };
        let lane = match way {
            Way::Up => &mut line.up,
            Way::Down => &mut line.down,
        };
        if !blocked {
            lane.take(now);
        }
        is_dead || !lane.arrived.is_empty() || (!blocked && lane.is_due(now))
    }

    /// Whether a delivery would give something.
    pub(crate) fn is_due(&self, id: LineId, way: Way) -> bool {
        self.lines.get(&id).is_some_and(|line| {
            let (blocked, is_dead) = self.trouble(line, way);
            let lane = match way {
                Way::Up => &line.up,
                Way::Down => &line.down,
            };
            is_dead || (!blocked && lane.is_due(self.now))
        })
    }

    pub(crate) fn receive(&mut self, id: LineId, way: Way, into: &mut Vec<u8>) -> Received {
        let Some(line) = self.lines.get_mut(&id) else {
            return Received::End;
        };
        let room = into.capacity() - into.len();
        let lane = match way {
            Way::Up => &mut line.up,
            Way::Down => &mut line.down,
        };
        let len = room.min(lane.arrived.len());
        if len > 0 {
            into.extend(lane.arrived.drain(..len));
            return Received::Bytes { all: len < room };
        }
        let has_ended = lane.is_ended && lane.messages.is_empty();
        let is_known = self.lines.get(&id).map(|line| self.trouble(line, way));
        let (blocked, is_dead) = is_known.unwrap_or((false, true));
        match is_dead || (has_ended && !blocked) {
            true => Received::End,
            false => Received::Nothing,
        }
    }

    /// The peer closes its end.
    pub(crate) fn leave(&mut self, id: LineId) {
        let Some(line) = self.lines.get_mut(&id) else {
            return;
        };
        line.peer_left = true;
        let kept = self.dice.roll(line.up.messages.len() as u64 + 1) as usize;
        line.up.end(kept);
        line.down = Lane::default();
        if line.brick_left && !line.is_orphan {
            self.lines.remove(&id);
        }
    }

    /// The peer loses the connection; what it had sent is late, and arrives.
    pub(crate) fn sever(&mut self, id: LineId, late: Duration) {
        if let Some(line) = self.lines.get_mut(&id) {
            line.down = Lane::default();
            line.down.is_ended = true;
            for (at, _) in &mut line.up.messages {
                *at += late;
            }
            line.up.last += late;
        }
    }

    /// Connections of clients on whose way to the brick something is.
    pub(crate) fn laden(&self) -> Vec<LineId> {
        let laden = |line: &Line| {
            let is_client = matches!(line.peer, Peer::Client(_));
            let is_open = !line.peer_left && !line.brick_left;
            is_client && is_open && !line.up.messages.is_empty()
        };
        let lines = self.lines.iter();
        lines
            .filter(|(_, line)| laden(line))
            .map(|(id, _)| *id)
            .collect()
    }

    /// The brick closes its end.
    pub(crate) fn hang_up(&mut self, id: LineId) {
        if let Some(line) = self.lines.get_mut(&id) {
            line.brick_left = true;
            line.up = Lane::default();
            line.down.end(usize::MAX);
            if line.peer_left {
                self.lines.remove(&id);
            }
        }
    }

    /// The brick is gone with all its connections; without its power nobody is
    /// told.
    pub(crate) fn die(&mut self, house: usize, is_powerless: bool) {
        for line in self.lines.values_mut().filter(|line| line.house == house) {
            if line.brick_left {
                continue;
            }
            line.brick_left = true;
            line.up = Lane::default();
            let kept = self.dice.roll(line.down.messages.len() as u64 + 1) as usize;
            line.down.end(kept);
            line.down.is_ended = !is_powerless;
            line.is_orphan = is_powerless;
        }
        self.sweep();
    }

    /// The machine is back: whoever still speaks to the dead brick is told.
    pub(crate) fn revive(&mut self, house: usize) {
        for line in self.lines.values_mut().filter(|line| line.house == house) {
            if std::mem::take(&mut line.is_orphan) {
                line.down.is_ended = true;
            }
        }
        self.sweep();
    }

    fn sweep(&mut self) {
        self.lines
            .retain(|_, line| !(line.peer_left && line.brick_left));
    }

    /// Connections at whose brick something has arrived.
    pub(crate) fn busy(&self) -> Vec<LineId> {
        let lines = self.lines.iter();
        let live = lines.filter(|(_, line)| !line.brick_left);
        live.map(|(id, _)| *id)
            .filter(|id| self.is_due(*id, Way::Up))
            .collect()
    }

    /// Connections of a peer that are open at both ends.
    pub(crate) fn of(&self, peer: Peer) -> Vec<LineId> {
        let lines = self.lines.iter();
        let open = |line: &Line| line.peer == peer && !line.peer_left && !line.brick_left;
        lines
            .filter(|(_, line)| open(line))
            .map(|(id, _)| *id)
            .collect()
    }

    /// When something arrives next that has not yet.
    pub(crate) fn next_arrival(&self) -> Option<Duration> {
        let lanes = self
            .lines
            .values()
            .flat_map(|line| [&line.up, &line.down])
            .filter(|lane| lane.stuck_since.is_none());
        let next = lanes.filter_map(|lane| lane.messages.front());
        next.map(|(at, _)| *at).filter(|at| *at > self.now).min()
    }
}

/// Cuts the first whole message off.
fn whole(bytes: &mut Vec<u8>) -> Option<Vec<u8>> {
    /// Where a header tells the length of the body.
    const BODY_LEN_AT: usize = 20;
    let len = bytes.get(BODY_LEN_AT..)?.first_chunk::<4>()?;
    let len = HEADER_BYTES + u32::from_le_bytes(*len) as usize;
    (bytes.len() >= len).then(|| {
        let rest = bytes.split_off(len);
        std::mem::replace(bytes, rest)
    })
}
