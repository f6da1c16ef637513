//! The threads that serve some of the kernel's queues, and how they share the requests.
//!
//! An entry belongs to one of the kernel's queues. The kernel owns it while a command is in flight;
//! the server owns it between the completion and the next command, which hands over the answer and
//! fetches the next request. Commands for an entry may go through the rings of different threads;
//! the next request comes through the ring of the last one.
//!
//! There are *followers*, as many as entries, and one *lead*. A follower has one entry or none.
//! With an entry, it serves the requests that come in it, one after the other. Without one, it
//! waits until another thread passes it an entry.
//!
//! Followers that wait for the volume at the same time share neither messages nor wake-ups. So an
//! entry with requests that had to wait again and again goes to the lead, with the last answer, if
//! other requests wait at that time. The lead serves the requests that can be begun asynchronously
//! ([`AsyncWriter`]) concurrently with its other requests, and never blocks. It passes a request
//! that may block to a follower, with the entry; the next request of that entry then comes to that
//! follower. When no request waits any more, as over `map`, the lead passes all requests on, until
//! it has no entries.
//!
//! With the first entry that it gets, the lead registers more entries with the kernel, so that many
//! requests can be begun at once. Without waiting requests there are few entries: then the kernel
//! queues, and each wake-up serves several callers.
//!
//! # One write
//!
//! The kernel has FUSE over io_uring enabled (`enable_uring`), so that a mount uses it. A program
//! writes 4 KiB within a file.
//!
//! 1. `PoolWorker::serve_some` → `CommandRing::wait`: the thread of this processor sleeps until an
//!    entry has a request. `RingQueues::take` takes the header and the payload, which stays in the
//!    entry's memory. `PoolWorker::handle_entry` → `RawRequest::decode` makes a `Request::Write`.
//! 2. `QueuedWrites::begin` takes an idle channel as a write queue (`Fs::try_write_queue`) and calls
//!    `Fs::begin_write`. The file system continues there.
//! 3. Over `map` the write is done by then: `PoolWorker::reap` → `QueuedWrites::reap` finds its
//!    result. `PoolWorker::answer` puts it into the entry, and `RingQueues::commit` →
//!    `CommandRing::submit_entry` gives the entry back to the kernel, for the next request.
//!
//! Over `tcp` the thread takes other requests between steps 2 and 3. A request that cannot be begun
//! so is handled at once (`FsHandler`), or passed to another thread. Without `enable_uring`, threads
//! read the requests from `/dev/fuse` (`classic`, `batching`) and begin writes the same way.

use crate::abi::{self, DATA_BYTES_MAX};
use crate::batching::IMMEDIATE_MAX;
use crate::busy::RequestCounter;
use crate::device;
use crate::memory::{CommandRing, EntryMemory, RingEvent, WaitMode};
use crate::reply::FuseReply;
use crate::request::RawRequest;
use crate::request_handler::{AsyncWriter, BeginResult, RequestHandler};
use crate::ring::pin_to_cpu;
use pagemesh_base::poison::{self, recover};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Consecutive requests that had to wait, after which an entry goes to the lead. Over `map` a
/// request has to wait now and then.
const WAITS_BEFORE_HANDOVER: u32 = 8;

/// The threads of some queues.
pub(crate) struct WorkerPool {
    device: RingQueues,
    request_counter: RequestCounter,
    queues: Vec<u16>,
    entries: EntryCounts,
    /// Requests that were begun and have not ended.
    pending_requests: AtomicUsize,
    shared: Mutex<WorkerPoolState>,
    work_passed: Condvar,
}

/// Entries of each queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryCounts {
    /// Registered at the start.
    pub(crate) initial: usize,
    /// Registered once requests wait for the volume.
    pub(crate) additional: usize,
}

/// The role of a thread of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Lead,
    /// Starts with an entry of this queue.
    Follower(u16),
    /// Starts without an entry.
    Spare,
}

#[derive(Default)]
struct WorkerPoolState {
    /// For followers without an entry; as many as there are entries, at most.
    passed: VecDeque<(RingRequest, RawRequest)>,
    /// Answered entries, for the lead to give to the kernel.
    answered: Vec<RingRequest>,
    /// The lead's ring.
    lead_ring: Option<Arc<OwnedFd>>,
    is_stopping: bool,
}

impl WorkerPool {
    pub(crate) fn new(
        device: RingQueues,
        request_counter: RequestCounter,
        queues: &[u16],
        entries: EntryCounts,
    ) -> WorkerPool {
        WorkerPool {
            device,
            request_counter,
            queues: queues.to_vec(),
            entries,
            pending_requests: AtomicUsize::new(0),
            shared: Mutex::default(),
            work_passed: Condvar::new(),
        }
    }

    /// The roles of the threads that the pool needs.
    pub(crate) fn roles(&self) -> Vec<Role> {
        let each = |queue| {
            let first = std::iter::repeat_n(Role::Follower(queue), self.entries.initial);
            first.chain(std::iter::repeat_n(Role::Spare, self.entries.additional))
        };
        let followers = self.queues.iter().copied().flat_map(each);
        [Role::Lead].into_iter().chain(followers).collect()
    }

    fn lock_shared(&self) -> MutexGuard<'_, WorkerPoolState> {
        poison::lock(&self.shared)
    }

    fn pass_to_follower(&self, taken: RingRequest, incoming: RawRequest) {
        self.lock_shared().passed.push_back((taken, incoming));
        self.work_passed.notify_one();
    }

    /// Waits for a passed request; none: the mount is gone.
    fn wait_for_passed(&self) -> Option<(RingRequest, RawRequest)> {
        let mut shared = self.lock_shared();
        loop {
            if shared.is_stopping {
                return None;
            }
            if let Some(passed) = shared.passed.pop_front() {
                return Some(passed);
            }
            let woken = self.work_passed.wait(shared);
            shared = recover(woken);
        }
    }

    /// Returns an answered entry to the lead, and gives the ring to wake.
    fn return_to_lead(&self, taken: RingRequest) -> Result<Arc<OwnedFd>, RingRequest> {
        let mut shared = self.lock_shared();
        match shared.lead_ring.clone() {
            Some(lead) => {
                shared.answered.push(taken);
                Ok(lead)
            }
            None => Err(taken),
        }
    }

    /// Answered entries that were returned to the lead; none: the mount is gone.
    fn take_answered(&self) -> Option<Vec<RingRequest>> {
        let mut shared = self.lock_shared();
        let returned = std::mem::take(&mut shared.answered);
        (!shared.is_stopping).then_some(returned)
    }

    fn stop(&self) -> Option<Arc<OwnedFd>> {
        let mut shared = self.lock_shared();
        shared.is_stopping = true;
        self.work_passed.notify_all();
        shared.lead_ring.clone()
    }

    /// Records requests that have ended. Returns the number of requests that all threads still have
    /// in flight.
    fn record_completed(&self, count: usize) -> usize {
        let before = self.pending_requests.fetch_sub(count, Ordering::Relaxed);
        before.saturating_sub(count)
    }
}

/// The state of one serving thread.
struct PoolWorker<'s> {
    pool: &'s WorkerPool,
    files: &'s dyn RequestHandler,
    async_writer: Box<dyn AsyncWriter + 's>,
    commands: CommandRing,
    is_lead: bool,
    /// Entries of requests that were begun.
    pending: Vec<RingRequest>,
    /// Answers that the writer reported.
    completed: Vec<(u64, FuseReply)>,
    /// Whether the last requests that were begun had to wait.
    has_waited: bool,
    /// Consecutive requests that had to wait.
    waits: u32,
    /// Consecutive rounds in which no request had to wait.
    immediate_rounds: u32,
    has_all_entries: bool,
    /// The queue of the processor that the thread is pinned to.
    queue: Option<u16>,
}

impl Drop for PoolWorker<'_> {
    fn drop(&mut self) {
        // The mount is gone, or will be aborted.
        self.pool.record_completed(self.pending.len());
        let lead = self.pool.stop();
        if let (false, Some(lead)) = (self.is_lead, lead)
            && let Err(cause) = self.commands.wake(lead.as_fd())
        {
            tracing::debug!(%cause, "cannot wake the lead; it has ended");
        }
    }
}

/// Serves until the mount is gone. Calls `report` once it is ready, or with the reason for which it
/// is not.
pub(crate) fn serve(
    pool: &WorkerPool,
    files: &dyn RequestHandler,
    role: Role,
    report: impl FnOnce(Option<io::Error>),
) -> io::Result<()> {
    let begun = PoolWorker::start(pool, files, role).and_then(|mut server| {
        // A command ends at once if the kernel refuses it, or if a request is pending already.
        let is_there = server.serve_events()?;
        Ok((server, is_there))
    });
    match begun {
        Ok((mut server, mut is_there)) => {
            report(None);
            while is_there {
                is_there = server.serve_some()?;
            }
            Ok(())
        }
        Err(cause) => {
            report(Some(io::Error::new(cause.kind(), cause.to_string())));
            Err(cause)
        }
    }
}

impl<'s> PoolWorker<'s> {
    fn start(
        pool: &'s WorkerPool,
        files: &'s dyn RequestHandler,
        role: Role,
    ) -> io::Result<PoolWorker<'s>> {
        let all = (pool.entries.initial + pool.entries.additional) * pool.queues.len();
        let is_lead = role == Role::Lead;
        let commands = match is_lead {
            true => CommandRing::new(all, WaitMode::ByPoll)?,
            // It has no entries besides the one that it has begun.
            false => CommandRing::new(1, WaitMode::InRing)?,
        };
        let mut server = PoolWorker {
            pool,
            files,
            async_writer: files.async_writer().unwrap_or(Box::new(NoAsyncWriter)),
            commands,
            is_lead,
            pending: Vec::new(),
            completed: Vec::new(),
            has_waited: false,
            waits: 0,
            immediate_rounds: 0,
            has_all_entries: false,
            queue: None,
        };
        match role {
            Role::Lead => {
                let ring = server.commands.descriptor().try_clone_to_owned()?;
                let mut shared = pool.lock_shared();
                if shared.is_stopping {
                    return Err(io::Error::other("the other threads of the pool have ended"));
                }
                shared.lead_ring = Some(Arc::new(ring));
            }
            Role::Follower(queue) => {
                server.pin_to_queue(queue);
                pool.device.register(&mut server.commands, queue)?;
            }
            Role::Spare => {}
        }
        Ok(server)
    }

    /// Pins the thread to the processor of the callers that it serves.
    fn pin_to_queue(&mut self, queue: u16) {
        if self.queue != Some(queue) {
            pin_to_cpu(queue);
            self.queue = Some(queue);
        }
    }

    /// False: the mount is gone.
    fn serve_some(&mut self) -> io::Result<bool> {
        if !self.pending.is_empty() {
            if !self.commands.has_unsubmitted() {
                self.has_waited = true;
                let ring = self.commands.descriptor().as_raw_fd();
                self.async_writer.wait(self.is_lead.then_some(ring));
                self.reap()?;
                if self.pending.is_empty() {
                    return Ok(true);
                }
            }
            self.commands.submit_pending()?;
        } else if self.is_lead || self.commands.len() > 0 {
            self.commands.wait()?;
        } else {
            let Some((taken, incoming)) = self.pool.wait_for_passed() else {
                return Ok(false);
            };
            self.pin_to_queue(taken.queue());
            self.handle_entry(taken, incoming)?;
        }
        let is_there = self.serve_events()?;
        self.reap()?;
        self.immediate_rounds = match self.pending.is_empty() {
            true => self.immediate_rounds.saturating_add(1),
            false => 0,
        };
        Ok(is_there)
    }

    /// False: the mount is gone.
    fn serve_events(&mut self) -> io::Result<bool> {
        while let Some(came) = self.commands.next_event()? {
            match came {
                RingEvent::Wakeup => match self.pool.take_answered() {
                    Some(returned) => self.recommit_answered(returned)?,
                    None => return Ok(false),
                },
                RingEvent::Entry(entry, code) => {
                    let Some((taken, incoming)) = self.pool.device.take(entry, code)? else {
                        return Ok(false);
                    };
                    self.pool.request_counter.count_request();
                    self.handle_entry(taken, incoming)?;
                }
            }
        }
        Ok(true)
    }

    /// Gives the kernel the entries that followers have answered, and the first time registers
    /// more.
    fn recommit_answered(&mut self, returned: Vec<RingRequest>) -> io::Result<()> {
        self.immediate_rounds = 0;
        for taken in returned {
            self.pool.device.commit(&mut self.commands, taken)?;
        }
        if !std::mem::replace(&mut self.has_all_entries, true)
            && let Err(cause) = self.register_additional()
        {
            tracing::warn!(%cause, "cannot register more entries of the ring; the mount goes on with fewer");
        }
        Ok(())
    }

    fn register_additional(&mut self) -> io::Result<()> {
        for &queue in &self.pool.queues {
            for _ in 0..self.pool.entries.additional {
                self.pool.device.register(&mut self.commands, queue)?;
            }
        }
        Ok(())
    }

    fn handle_entry(&mut self, taken: RingRequest, incoming: RawRequest) -> io::Result<()> {
        if self.is_lead && self.immediate_rounds >= IMMEDIATE_MAX {
            self.pool.pass_to_follower(taken, incoming);
            return Ok(());
        }
        let answer = match incoming.decode() {
            Ok(request) => match self.async_writer.begin(&taken.header, &request) {
                BeginResult::Pending => {
                    self.has_waited = false;
                    self.pending.push(taken);
                    self.pool.pending_requests.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
                BeginResult::Complete(answer) => answer,
                BeginResult::NotStarted if self.is_lead => {
                    drop(request);
                    self.pool.pass_to_follower(taken, incoming);
                    return Ok(());
                }
                BeginResult::NotStarted => self.files.handle(&taken.header, request),
            },
            Err(errno) => FuseReply::Error(errno),
        };
        // Drops the references to the entry's memory.
        drop(incoming);
        self.answer(taken, &answer)
    }

    fn answer(&mut self, mut taken: RingRequest, answer: &FuseReply) -> io::Result<()> {
        taken.answer(answer)?;
        self.pool.device.commit(&mut self.commands, taken)
    }

    /// Answers the requests that have ended.
    fn reap(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let ended = &mut self.completed;
        self.async_writer
            .reap(&mut |unique, answer| ended.push((unique, answer)));
        let mut ended = std::mem::take(&mut self.completed);
        for (unique, answer) in ended.drain(..) {
            let has_name = |begun: &RingRequest| begun.header.unique == unique;
            let at = self.pending.iter().position(has_name);
            let at = at.ok_or_else(|| io::Error::other("a request ended that was never begun"))?;
            let taken = self.pending.swap_remove(at);
            let others = self.pool.record_completed(1);
            self.waits = match self.has_waited {
                true => self.waits.saturating_add(1),
                false => 0,
            };
            if self.is_lead || self.waits < WAITS_BEFORE_HANDOVER || others == 0 {
                self.answer(taken, &answer)?;
            } else {
                self.waits = 0;
                self.answer_and_return(taken, &answer)?;
            }
        }
        self.completed = ended;
        Ok(())
    }

    /// Answers, and returns the entry to the lead.
    fn answer_and_return(&mut self, mut taken: RingRequest, answer: &FuseReply) -> io::Result<()> {
        taken.answer(answer)?;
        match self.pool.return_to_lead(taken) {
            Ok(lead) => self.commands.wake(lead.as_fd()),
            // The lead is about to start.
            Err(taken) => self.pool.device.commit(&mut self.commands, taken),
        }
    }
}

/// An entry with a request to answer.
pub(crate) struct RingRequest {
    entry: EntryMemory,
    pub(crate) header: abi::InHeader,
    /// The kernel's id of the request.
    commit_id: u64,
}

/// Whether a command ended because the mount did.
fn is_unmounted(code: i32) -> bool {
    let over = [Errno::NOTCONN, Errno::CONNABORTED, Errno::NODEV];
    over.iter().any(|errno| code == -errno.raw_os_error())
}

/// The kernel's queues of a mount.
pub(crate) struct RingQueues(pub(crate) Arc<OwnedFd>, pub(crate) abi::Dialect);

fn command(queue: u16, commit: u64) -> abi::RingCommand {
    abi::RingCommand {
        commit,
        queue,
        ..abi::RingCommand::default()
    }
}

impl RingQueues {
    /// Gives the kernel a new entry for a queue.
    pub(crate) fn register(&self, commands: &mut CommandRing, queue: u16) -> io::Result<()> {
        let entry = EntryMemory::new(queue, DATA_BYTES_MAX as usize)?;
        let (device, command) = (self.0.as_fd(), command(queue, 0));
        commands.submit_entry(device, abi::RING_REGISTER, &command, entry, true)
    }

    /// Gives back an answered entry, for the next request.
    pub(crate) fn commit(&self, commands: &mut CommandRing, taken: RingRequest) -> io::Result<()> {
        let (device, command) = (self.0.as_fd(), command(taken.queue(), taken.commit_id));
        let code = abi::RING_COMMIT_AND_FETCH;
        commands.submit_entry(device, code, &command, taken.entry, false)
    }

    /// The request of an entry after its command ended with this code; None: the mount is gone.
    pub(crate) fn take(
        &self,
        entry: EntryMemory,
        code: i32,
    ) -> io::Result<Option<(RingRequest, RawRequest)>> {
        match code {
            0.. => {}
            // The kernel may end a command with any error while the mount ends.
            code if is_unmounted(code) || !device::is_alive(&self.0) => return Ok(None),
            code => return Err(io::Error::from_raw_os_error(-code)),
        }
        let header: abi::InHeader = entry.get(0);
        let op: [u8; abi::OP_BYTES_MAX] = entry.get(abi::ring::OP_AT);
        let about: abi::RingEntry = entry.get(abi::ring::ENTRY_AT);
        let payload = entry.payload(about.payload_len as usize);
        let mut taken = RingRequest {
            entry,
            header,
            commit_id: about.commit,
        };
        // The default answer is an error.
        taken.put_header(-Errno::IO.raw_os_error(), 0);
        let request = RawRequest::from_parts(header, &op, payload, self.1);
        Ok(Some((taken, request)))
    }
}

impl RingRequest {
    pub(crate) fn queue(&self) -> u16 {
        self.entry.queue
    }

    /// Puts an answer, which the kernel gets with the entry. The caller should have dropped the
    /// payload of the request.
    pub(crate) fn answer(&mut self, answer: &FuseReply) -> io::Result<()> {
        let bytes = answer.bytes();
        self.entry.put_payload(bytes)?;
        self.put_header(answer.error(), bytes.len());
        Ok(())
    }

    fn put_header(&mut self, error: i32, payload_len: usize) {
        let header = abi::OutHeader {
            len: (size_of::<abi::OutHeader>() + payload_len) as u32,
            error,
            unique: self.header.unique,
        };
        self.entry.put(0, header);
        let mut about: abi::RingEntry = self.entry.get(abi::ring::ENTRY_AT);
        about.payload_len = payload_len as u32;
        self.entry.put(abi::ring::ENTRY_AT, about);
    }
}

/// Begins no requests.
struct NoAsyncWriter;

impl AsyncWriter for NoAsyncWriter {
    fn begin(&mut self, _: &crate::abi::InHeader, _: &crate::request::Request<'_>) -> BeginResult {
        BeginResult::NotStarted
    }

    fn reap(&mut self, _: &mut dyn FnMut(u64, FuseReply)) {}

    fn len(&self) -> usize {
        0
    }

    fn wait(&mut self, _: Option<std::os::fd::RawFd>) {}
}
