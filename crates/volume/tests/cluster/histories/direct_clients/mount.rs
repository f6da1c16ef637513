//! The actions of a mount while it has direct clients, and after their deaths.

use super::{DirectScenario, REQUESTS_MAX, segment_of};
use crate::world::oracle::{SECTOR, fill};
use bytes::Bytes;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::poison;
use pagemesh_base::space::{Channel, Reply, Request, SpaceError, Token};
use pagemesh_volume::direct_access::{FileRange, TornOp};
use pagemesh_volume::test_api::{CheckJob, ControllerEvent};
use std::ops::Range;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::sync::{Arc, Condvar, Mutex};

/// The row of a client that died during an operation, and its reconciliation.
pub(super) struct DeadRow {
    pub(super) row: usize,
    pub(super) range: FileRange,
    pub(super) reconciled: Option<Receiver<()>>,
}

/// A request of the mount.
pub(super) struct MountRequest {
    pub(super) file: u64,
    pub(super) sectors: Range<u64>,
    pub(super) token: u64,
    pub(super) is_write: bool,
    pub(super) order: Option<u64>,
}

impl DirectScenario {
    /// Takes one step of the mount's cleanup after a dead client.
    pub(super) fn reconcile_dead_row(&mut self) {
        let hub = Arc::clone(&self.world.client.shared);
        let Some(guests) = hub.direct_access.get() else {
            return;
        };
        let segment = &guests.segment;
        if self.dead_rows.is_empty() {
            return;
        }
        let at = self.world.rng.below(self.dead_rows.len() as u64) as usize;
        let dead = &mut self.dead_rows[at];
        let Some(healed) = &dead.reconciled else {
            let (done, told) = mpsc::channel();
            let heal = ControllerEvent::Reconcile(dead.row, TornOp::PerPage(dead.range), done);
            self.world.client.mailbox.post(heal);
            dead.reconciled = Some(told);
            return;
        };
        let is_early = defect::is(Defect::RowClearedFirst);
        match healed.try_recv() {
            Err(TryRecvError::Empty) if !is_early => {}
            Err(TryRecvError::Disconnected) => panic!("the reconciliation ended without a result"),
            _ => {
                segment.row(dead.row).end_op();
                self.dead_rows.swap_remove(at);
            }
        }
    }

    /// Adds a request from the kernel.
    pub(super) fn add_request(&mut self) {
        if self.requests.len() >= REQUESTS_MAX {
            return;
        }
        let (file, sectors) = self.random_range();
        self.next += 1;
        self.closed_files[file as usize] += 1;
        self.requests.push(MountRequest {
            file,
            sectors,
            token: self.next,
            is_write: self.world.rng.one_in(2),
            order: None,
        });
    }

    /// Submits the requests that no direct operation blocks, and takes the results.
    pub(super) fn process_requests(&mut self) {
        let hub = Arc::clone(&self.world.client.shared);
        let Some(channel) = &mut self.channel else {
            return;
        };
        let segment = segment_of(&hub);
        for ask in self.requests.iter_mut().filter(|ask| ask.order.is_none()) {
            let is_inside = |(_, place): (usize, FileRange)| place.file == ask.file;
            if segment.active_ops().any(is_inside) {
                continue;
            }
            let (offset, count) = (
                ask.sectors.start * SECTOR,
                ask.sectors.end - ask.sectors.start,
            );
            let request = match ask.is_write {
                true => Request::Write {
                    offset,
                    data: Bytes::from(fill(ask.token, count)),
                    durable: false,
                },
                false => Request::Read {
                    offset,
                    len: (count * SECTOR) as u32,
                },
            };
            ask.order = Some(match ask.is_write {
                true => self.oracle.begin(0, ask.sectors.clone(), ask.token),
                false => self.oracle.begin_read(ask.sectors.clone()),
            });
            channel.submit(Token(ask.token), request);
        }
        let mut completions = vec![];
        channel.reap(&mut completions);
        for completion in completions {
            let token = completion.token.0;
            let at = self.requests.iter().position(|ask| ask.token == token);
            let ask = self.requests.swap_remove(at.expect("answered once"));
            let order = ask.order.expect("it was submitted");
            self.closed_files[ask.file as usize] -= 1;
            self.coverage.requests += 1;
            match completion.result {
                Ok(Reply::Done) => self.oracle.complete(order),
                Ok(Reply::Data(data)) => {
                    let read = self.oracle.end_read(order, Some(&data));
                    read.unwrap_or_else(|wrong| panic!("the mount: {wrong}"));
                }
                Err(SpaceError::Unavailable(_) | SpaceError::Damaged { .. }) if ask.is_write => {
                    self.oracle.mark_indeterminate(order);
                }
                Err(SpaceError::Unavailable(_) | SpaceError::Damaged { .. }) => {
                    self.oracle.end_read(order, None).expect("nothing");
                }
                result => panic!("token {token} ended with {result:?}"),
            }
        }
    }

    pub(super) fn collect_checks(&mut self) {
        self.checks.retain(|job| {
            let Some(result) = poison::lock(&job.progress).result.take() else {
                return true;
            };
            if let Ok(report) = result {
                self.coverage.checks += 1;
                assert_eq!(
                    report.pages_differing, 0,
                    "a check with direct clients: {report:?}"
                );
            }
            false
        });
    }

    pub(super) fn start_check(&mut self) {
        let job = Arc::new(CheckJob {
            repair_from: None,
            progress: Mutex::default(),
            changed: Condvar::new(),
        });
        self.checks.push(Arc::clone(&job));
        self.world.client.mailbox.post(ControllerEvent::Check(job));
    }
}
