//! What other processes do with the same files, beside this one and each other.

use super::hand::{Hand, Order, What};
use super::support::Cluster;
use super::{BYTES_MAX, FILES, Files, LEN_MAX, PAGE};

/// Of a run of all tests.
pub const OPERATIONS: u64 = 6000;
/// Operations from one remount to the next, at most.
pub const BETWEEN_MOUNTS: u64 = 1500;
/// So many operations of hands at most meet a file as the one before left it: guests are
/// let in after a few.
const BURST_MAX: u64 = 14;

impl Order {
    pub fn of(what: What, file: usize, offset: u64, len: u64) -> Order {
        Order {
            what,
            file,
            offset,
            len,
            bytes: vec![],
        }
    }
}

impl Files {
    pub fn operation_with_hands(&mut self, cluster: &Cluster) {
        let at = self.roll(FILES as u64) as usize;
        match self.roll(100) {
            0..=39 => self.operation(),
            40..=64 => self.burst(at, Files::one_hand),
            65..=84 => self.burst(at, Files::all_at_once),
            85..=94 => self.burst(at, Files::read_beside),
            95..=98 => self.change_by_hand(at),
            _ => self.kill_hand(cluster, at),
        }
    }

    fn burst(&mut self, at: usize, does: fn(&mut Files, usize)) {
        for _ in 0..=self.roll(BURST_MAX) {
            does(self, at);
        }
    }

    /// Mostly what a file has.
    fn place(&mut self, at: usize) -> (u64, u64) {
        let (size, len) = (self.models[at].len() as u64, self.len());
        match self.roll(12) {
            0 => (self.offset(), len),
            _ if size == 0 => (0, len),
            _ => {
                let offset = self.roll(size);
                (offset, len.min(size - offset))
            }
        }
    }

    fn hand(&mut self) -> usize {
        self.roll(self.hands.len() as u64) as usize
    }

    fn write_order(&mut self, what: What, at: usize, offset: u64, len: u64) -> Order {
        Order {
            bytes: self.bytes(len),
            ..Order::of(what, at, offset, len)
        }
    }

    /// A hand does something.
    fn by(&mut self, hand: usize, order: &Order) -> Vec<u8> {
        let Order {
            what,
            file,
            offset,
            len,
            ..
        } = order;
        self.did(format!("by {hand}: {what:?} {file} {offset} {len}"));
        let done = self.hands[hand].does(order);
        let done = done.unwrap_or_else(|cause| panic!("{cause}: {:#?}", self.last));
        self.count(hand, order, done.is_direct);
        done.bytes
    }

    fn count(&mut self, hand: usize, order: &Order, is_direct: bool) {
        if order.what == What::Write && is_direct {
            assert!(self.hands[hand].is_direct(), "by the kernel");
            self.direct += 1;
        }
    }

    fn one_hand(&mut self, at: usize) {
        let (hand, (offset, len)) = (self.hand(), self.place(at));
        if self.roll(2) == 0 {
            let order = self.write_order(What::Write, at, offset, len);
            self.by(hand, &order);
            self.put(at, offset, &order.bytes);
            return;
        }
        let read = self.by(hand, &Order::of(What::Read, at, offset, len));
        let model = self.models[at].get(offset as usize..).unwrap_or(&[]);
        let model = &model[..model.len().min(len as usize)];
        let differs = (0..model.len()).find(|&byte| read.get(byte) != Some(&model[byte]));
        let is_same = differs.is_none() && read.len() == model.len();
        assert!(
            is_same,
            "file {at} at {differs:?} of {offset}, {} of {} bytes: {:#?}",
            read.len(),
            model.len(),
            self.last
        );
    }

    /// A hand, or this process where there is none, overwrites a part of what is there.
    pub fn write_beside(&mut self, at: usize, offset: u64, len: u64) {
        let within = self.roll(len);
        let (offset, len) = (offset + within, 1 + self.roll(len - within));
        let order = self.write_order(What::Write, at, offset, len);
        match self.hands.is_empty() {
            true => {
                self.did(format!("write beside {at} {offset} {len}"));
                let file = &self.open[at];
                std::os::unix::fs::FileExt::write_all_at(file, &order.bytes, offset).unwrap();
            }
            false => {
                let hand = self.hand();
                self.by(hand, &order);
            }
        }
        self.put(at, offset, &order.bytes);
    }

    /// All hands and this process write at the same time, each bytes of its own, which may
    /// be of one page.
    fn all_at_once(&mut self, at: usize) {
        let (mut offset, len) = self.place(at);
        let writers = self.hands.len() as u64 + 1;
        let part = len.div_ceil(writers).max(1);
        let mut orders = Vec::new();
        for _ in 0..writers {
            orders.push(self.write_order(What::Write, at, offset, part));
            offset += part;
        }
        self.did(format!(
            "at once, {part} each: {at} {} to {offset}",
            orders[0].offset
        ));
        // Who is first moves on.
        let shift = self.hand();
        orders.rotate_left(shift);
        let own = orders.pop().unwrap();
        for (hand, order) in self.hands.iter_mut().zip(&orders) {
            hand.tell(order);
        }
        let written =
            std::os::unix::fs::FileExt::write_all_at(&self.open[at], &own.bytes, own.offset);
        written.unwrap();
        self.put(at, own.offset, &own.bytes);
        for (hand, order) in orders.iter().enumerate() {
            let done = self.hands[hand].done().unwrap();
            self.count(hand, order, done.is_direct);
            self.put(at, order.offset, &order.bytes);
        }
        let first = orders.iter().map(|order| order.offset);
        let first = first.min().unwrap().min(own.offset);
        self.compare(at, first, offset - first);
    }

    /// One hand reads while another writes: each byte is as before or as after, and all of
    /// a page are as one write left them.
    fn read_beside(&mut self, at: usize) {
        let size = self.models[at].len() as u64;
        let page = PAGE as usize;
        if size < PAGE {
            return;
        }
        let offset = self.roll(size / PAGE) * PAGE;
        let len = PAGE * (1 + self.roll((size - offset) / PAGE).min(LEN_MAX / PAGE - 1));
        let writer = self.hand();
        let reader =
            (writer + 1 + self.roll(self.hands.len() as u64 - 1) as usize) % self.hands.len();
        self.did(format!("{writer} beside {reader}: {at} {offset} {len}"));
        let order = self.write_order(What::Write, at, offset, len);
        self.hands[writer].tell(&order);
        self.hands[reader].tell(&Order::of(What::Read, at, offset, len));
        let read = self.hands[reader].done().unwrap().bytes;
        let is_direct = self.hands[writer].done().unwrap().is_direct;
        self.count(writer, &order, is_direct);
        let old = &self.models[at][offset as usize..][..len as usize];
        let parts = read.chunks(page).zip(old.chunks(page));
        for (number, ((read, old), new)) in parts.zip(order.bytes.chunks(page)).enumerate() {
            assert!(
                read == old || read == new,
                "page {number} from {offset} on of file {at} is neither: {:#?}",
                self.last
            );
        }
        assert_eq!(read.len() as u64, len, "{:#?}", self.last);
        self.put(at, offset, &order.bytes);
    }

    fn change_by_hand(&mut self, at: usize) {
        let (hand, (offset, len)) = (self.hand(), self.place(at));
        match self.roll(4) {
            0 => {
                let end = self.models[at].len() as u64;
                if end + len < BYTES_MAX {
                    let order = self.write_order(What::Append, at, offset, len);
                    self.by(hand, &order);
                    self.put(at, end, &order.bytes);
                }
            }
            1 => {
                let order = self.write_order(What::WriteDurably, at, offset, len);
                self.by(hand, &order);
                self.put(at, offset, &order.bytes);
            }
            2 => {
                self.by(hand, &Order::of(What::Sync, at, 0, 0));
            }
            _ => {
                let size = self.roll(BYTES_MAX);
                self.by(hand, &Order::of(What::Truncate, at, 0, size));
                self.models[at].resize(size as usize, 0);
            }
        }
    }

    /// Kills a hand while it writes: each page is there or not.
    fn kill_hand(&mut self, cluster: &Cluster, at: usize) {
        let (hand, (offset, len)) = (self.hand(), self.place(at));
        let turns = self.roll(100_000);
        self.did(format!(
            "kill {hand} amid write {at} {offset} {len}, {turns} turns"
        ));
        let order = self.write_order(What::Write, at, offset, len);
        let victim = &mut self.hands[hand];
        victim.tell(&order);
        (0..turns).for_each(|_| std::hint::spin_loop());
        victim.kill();
        let is_done = victim.done().is_ok();
        let is_direct = victim.is_direct();
        self.hands[hand] = Hand::start(cluster, &self.mount, is_direct);
        let old = self.models[at].clone();
        self.put(at, offset, &order.bytes);
        if !is_done {
            self.models[at] = self.either(at, &old, offset);
        }
        self.compare_all();
    }

    /// Guests did part of it without the kernel.
    pub fn check_hands(&self, operations: u64) {
        let has_direct = self.hands.iter().any(Hand::is_direct);
        let least = if has_direct { operations / 10 } else { 0 };
        eprintln!("{} of {operations} directly", self.direct);
        assert!(self.direct >= least, "{} of {operations}", self.direct);
    }
}
