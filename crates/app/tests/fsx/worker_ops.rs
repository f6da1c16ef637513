//! Operations of several processes on the same files at the same time.

use super::support::Cluster;
use super::worker::{FsxWorker, WorkerOp, WorkerRequest};
use super::{BYTES_MAX, FILES, FsxState, LEN_MAX, PAGE};

/// Operations when all tests run.
pub const OPERATIONS: u64 = 6000;
/// Operations between two remounts, at most.
pub const BETWEEN_MOUNTS: u64 = 1500;
/// Consecutive operations of workers on one file, at most: direct clients get access after a few.
const BURST_MAX: u64 = 14;

impl WorkerRequest {
    pub fn of(what: WorkerOp, file: usize, offset: u64, len: u64) -> WorkerRequest {
        WorkerRequest {
            op: what,
            file,
            offset,
            len,
            bytes: vec![],
        }
    }
}

impl FsxState {
    pub fn operation_with_workers(&mut self, cluster: &Cluster) {
        let at = self.below(FILES as u64) as usize;
        match self.below(100) {
            0..=39 => self.operation(),
            40..=64 => self.burst(at, FsxState::one_worker_op),
            65..=84 => self.burst(at, FsxState::concurrent_writes),
            85..=94 => self.burst(at, FsxState::read_during_write),
            95..=98 => self.change_by_worker(at),
            _ => self.kill_worker(cluster, at),
        }
    }

    fn burst(&mut self, at: usize, does: fn(&mut FsxState, usize)) {
        for _ in 0..=self.below(BURST_MAX) {
            does(self, at);
        }
    }

    /// A random range, mostly within the file.
    fn random_range(&mut self, at: usize) -> (u64, u64) {
        let (size, len) = (self.models[at].len() as u64, self.len());
        match self.below(12) {
            0 => (self.offset(), len),
            _ if size == 0 => (0, len),
            _ => {
                let offset = self.below(size);
                (offset, len.min(size - offset))
            }
        }
    }

    fn random_worker(&mut self) -> usize {
        self.below(self.workers.len() as u64) as usize
    }

    fn write_order(&mut self, what: WorkerOp, at: usize, offset: u64, len: u64) -> WorkerRequest {
        WorkerRequest {
            bytes: self.bytes(len),
            ..WorkerRequest::of(what, at, offset, len)
        }
    }

    /// Runs a command on a worker.
    fn run_on_worker(&mut self, hand: usize, order: &WorkerRequest) -> Vec<u8> {
        let WorkerRequest {
            op: what,
            file,
            offset,
            len,
            ..
        } = order;
        self.log_op(format!("by {hand}: {what:?} {file} {offset} {len}"));
        let done = self.workers[hand].execute(order);
        let done = done.unwrap_or_else(|cause| panic!("{cause}: {:#?}", self.recent_ops));
        self.count_direct(hand, order, done.is_direct);
        done.bytes
    }

    fn count_direct(&mut self, hand: usize, order: &WorkerRequest, is_direct: bool) {
        if order.op == WorkerOp::Write && is_direct {
            assert!(self.workers[hand].is_direct(), "by the kernel");
            self.direct_count += 1;
        }
    }

    fn one_worker_op(&mut self, at: usize) {
        let (hand, (offset, len)) = (self.random_worker(), self.random_range(at));
        if self.below(2) == 0 {
            let order = self.write_order(WorkerOp::Write, at, offset, len);
            self.run_on_worker(hand, &order);
            self.apply_write(at, offset, &order.bytes);
            return;
        }
        let read = self.run_on_worker(hand, &WorkerRequest::of(WorkerOp::Read, at, offset, len));
        let model = self.models[at].get(offset as usize..).unwrap_or(&[]);
        let model = &model[..model.len().min(len as usize)];
        let differs = (0..model.len()).find(|&byte| read.get(byte) != Some(&model[byte]));
        let is_same = differs.is_none() && read.len() == model.len();
        assert!(
            is_same,
            "file {at} at {differs:?} of {offset}, {} of {} bytes: {:#?}",
            read.len(),
            model.len(),
            self.recent_ops
        );
    }

    /// A worker overwrites a part of the file, or this process if there is no worker.
    pub fn overwrite_part(&mut self, at: usize, offset: u64, len: u64) {
        let within = self.below(len);
        let (offset, len) = (offset + within, 1 + self.below(len - within));
        let order = self.write_order(WorkerOp::Write, at, offset, len);
        match self.workers.is_empty() {
            true => {
                self.log_op(format!("concurrent write {at} {offset} {len}"));
                let file = &self.open[at];
                std::os::unix::fs::FileExt::write_all_at(file, &order.bytes, offset).unwrap();
            }
            false => {
                let hand = self.random_worker();
                self.run_on_worker(hand, &order);
            }
        }
        self.apply_write(at, offset, &order.bytes);
    }

    /// All workers and this process write at the same time. Each writes bytes of its own, which may
    /// share a page.
    fn concurrent_writes(&mut self, at: usize) {
        let (mut offset, len) = self.random_range(at);
        let writers = self.workers.len() as u64 + 1;
        let part = len.div_ceil(writers).max(1);
        let mut orders = Vec::new();
        for _ in 0..writers {
            orders.push(self.write_order(WorkerOp::Write, at, offset, part));
            offset += part;
        }
        self.log_op(format!(
            "at once, {part} each: {at} {} to {offset}",
            orders[0].offset
        ));
        // The order of the writers changes.
        let shift = self.random_worker();
        orders.rotate_left(shift);
        let own = orders.pop().unwrap();
        for (hand, order) in self.workers.iter_mut().zip(&orders) {
            hand.send(order);
        }
        let written =
            std::os::unix::fs::FileExt::write_all_at(&self.open[at], &own.bytes, own.offset);
        written.unwrap();
        self.apply_write(at, own.offset, &own.bytes);
        for (hand, order) in orders.iter().enumerate() {
            let done = self.workers[hand].reply().unwrap();
            self.count_direct(hand, order, done.is_direct);
            self.apply_write(at, order.offset, &order.bytes);
        }
        let first = orders.iter().map(|order| order.offset);
        let first = first.min().unwrap().min(own.offset);
        self.compare(at, first, offset - first);
    }

    /// One worker reads while another one writes: each byte is as before or as after the write, and
    /// all bytes of one page are of the same write.
    fn read_during_write(&mut self, at: usize) {
        let size = self.models[at].len() as u64;
        let page = PAGE as usize;
        if size < PAGE {
            return;
        }
        let offset = self.below(size / PAGE) * PAGE;
        let len = PAGE * (1 + self.below((size - offset) / PAGE).min(LEN_MAX / PAGE - 1));
        let writer = self.random_worker();
        let reader =
            (writer + 1 + self.below(self.workers.len() as u64 - 1) as usize) % self.workers.len();
        self.log_op(format!(
            "{writer} concurrent with {reader}: {at} {offset} {len}"
        ));
        let order = self.write_order(WorkerOp::Write, at, offset, len);
        self.workers[writer].send(&order);
        self.workers[reader].send(&WorkerRequest::of(WorkerOp::Read, at, offset, len));
        let read = self.workers[reader].reply().unwrap().bytes;
        let is_direct = self.workers[writer].reply().unwrap().is_direct;
        self.count_direct(writer, &order, is_direct);
        let old = &self.models[at][offset as usize..][..len as usize];
        let parts = read.chunks(page).zip(old.chunks(page));
        for (number, ((read, old), new)) in parts.zip(order.bytes.chunks(page)).enumerate() {
            assert!(
                read == old || read == new,
                "page {number} from {offset} on of file {at} is neither: {:#?}",
                self.recent_ops
            );
        }
        assert_eq!(read.len() as u64, len, "{:#?}", self.recent_ops);
        self.apply_write(at, offset, &order.bytes);
    }

    fn change_by_worker(&mut self, at: usize) {
        let (hand, (offset, len)) = (self.random_worker(), self.random_range(at));
        match self.below(4) {
            0 => {
                let end = self.models[at].len() as u64;
                if end + len < BYTES_MAX {
                    let order = self.write_order(WorkerOp::Append, at, offset, len);
                    self.run_on_worker(hand, &order);
                    self.apply_write(at, end, &order.bytes);
                }
            }
            1 => {
                let order = self.write_order(WorkerOp::WriteDurably, at, offset, len);
                self.run_on_worker(hand, &order);
                self.apply_write(at, offset, &order.bytes);
            }
            2 => {
                self.run_on_worker(hand, &WorkerRequest::of(WorkerOp::Sync, at, 0, 0));
            }
            _ => {
                let size = self.below(BYTES_MAX);
                self.run_on_worker(hand, &WorkerRequest::of(WorkerOp::Truncate, at, 0, size));
                self.models[at].resize(size as usize, 0);
            }
        }
    }

    /// Kills a worker during a write: each page is there or not.
    fn kill_worker(&mut self, cluster: &Cluster, at: usize) {
        let (hand, (offset, len)) = (self.random_worker(), self.random_range(at));
        let turns = self.below(100_000);
        self.log_op(format!(
            "kill {hand} during write {at} {offset} {len}, {turns} turns"
        ));
        let order = self.write_order(WorkerOp::Write, at, offset, len);
        let victim = &mut self.workers[hand];
        victim.send(&order);
        (0..turns).for_each(|_| std::hint::spin_loop());
        victim.kill();
        let is_done = victim.reply().is_ok();
        let is_direct = victim.is_direct();
        self.workers[hand] = FsxWorker::start(cluster, &self.mount, is_direct);
        let old = self.models[at].clone();
        self.apply_write(at, offset, &order.bytes);
        if !is_done {
            self.models[at] = self.read_torn_write(at, &old, offset);
        }
        self.compare_all();
    }

    /// Direct clients did a part of the operations without the kernel.
    pub fn check_direct_count(&self, operations: u64) {
        let has_direct = self.workers.iter().any(FsxWorker::is_direct);
        let least = if has_direct { operations / 10 } else { 0 };
        eprintln!("{} of {operations} directly", self.direct_count);
        assert!(
            self.direct_count >= least,
            "{} of {operations}",
            self.direct_count
        );
    }
}
