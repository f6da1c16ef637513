//! The threads that serve some of the kernel's queues, and who of them serves what.
//!
//! There are *followers*, as many as entries, and one *lead*. A follower has one entry or
//! none. With one, it serves the requests that come in it, one after the other; with none,
//! it waits for one to be passed to it.
//!
//! Followers that wait for the volume at the same time share neither messages nor
//! wake-ups. So an entry whose requests had to wait again and again goes to the lead, with
//! the last answer, if others wait at that time. The lead serves what can be begun ([`AsyncWriter`]) beside its other
//! requests, and never blocks: what may block it passes to a follower, with the entry,
//! whose next request then comes to that follower. When nothing waits any more, as over
//! `map`, it passes everything, until it has no entries.
//!
//! With the first entry that it gets, the lead gives the kernel more of them, so that many
//! requests can be begun at once. Where nothing waits there are few: then the kernel
//! queues, and each wake-up serves several callers.

use crate::batching::{AsyncWriter, BeginResult, IMMEDIATE_MAX};
use crate::busy::RequestCounter;
use crate::memory::{CommandRing, RingEvent, WaitMode};
use crate::reply::FuseReply;
use crate::request::RawRequest;
use crate::request_handler::RequestHandler;
use crate::ring::{RingQueues, RingRequest, pin_to_cpu};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Requests in a row that had to wait, after which an entry goes to the lead. Over `map`
/// one has to now and then.
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
    /// From the beginning.
    pub(crate) initial: usize,
    /// Once requests wait for the volume.
    pub(crate) additional: usize,
}

/// What a thread of a crew does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Lead,
    /// Begins with an entry of this queue.
    Follower(u16),
    /// Begins without.
    Spare,
}

#[derive(Default)]
struct WorkerPoolState {
    /// For followers without an entry; as many as there are entries, at most.
    passed: VecDeque<(RingRequest, RawRequest)>,
    /// Answered, for the lead to give to the kernel.
    answered: Vec<RingRequest>,
    /// The lead's ring.
    lead_ring: Option<Arc<OwnedFd>>,
    is_stopping: bool,
}

impl WorkerPool {
    pub(crate) fn new(
        device: RingQueues,
        noter: RequestCounter,
        queues: &[u16],
        entries: EntryCounts,
    ) -> WorkerPool {
        WorkerPool {
            device,
            request_counter: noter,
            queues: queues.to_vec(),
            entries,
            pending_requests: AtomicUsize::new(0),
            shared: Mutex::default(),
            work_passed: Condvar::new(),
        }
    }

    /// The threads that it needs.
    pub(crate) fn roles(&self) -> Vec<Role> {
        let each = |queue| {
            let first = std::iter::repeat_n(Role::Follower(queue), self.entries.initial);
            first.chain(std::iter::repeat_n(Role::Spare, self.entries.additional))
        };
        let followers = self.queues.iter().copied().flat_map(each);
        [Role::Lead].into_iter().chain(followers).collect()
    }

    fn lock_shared(&self) -> MutexGuard<'_, WorkerPoolState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass_to_follower(&self, taken: RingRequest, incoming: RawRequest) {
        self.lock_shared().passed.push_back((taken, incoming));
        self.work_passed.notify_one();
    }

    /// Waits for what is passed; none: the mount is no more.
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
            shared = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Leaves an answered entry to the lead, and says whom to tell.
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

    /// What was left to the lead; none: the mount is no more.
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

    /// How many requests of all threads are under way now that so many have ended.
    fn record_completed(&self, count: usize) -> usize {
        let before = self.pending_requests.fetch_sub(count, Ordering::Relaxed);
        before.saturating_sub(count)
    }
}

/// One thread's serving.
struct PoolWorker<'s> {
    pool: &'s WorkerPool,
    files: &'s dyn RequestHandler,
    async_writer: Box<dyn AsyncWriter + 's>,
    commands: CommandRing,
    is_lead: bool,
    /// Entries whose requests were begun.
    pending: Vec<RingRequest>,
    /// What the hand has told of.
    completed: Vec<(u64, FuseReply)>,
    /// Whether what was begun last had to wait.
    has_waited: bool,
    /// How many times in a row that was so.
    waits: u32,
    /// How many times in a row nothing had to wait.
    immediate_rounds: u32,
    has_all_entries: bool,
    /// Of the processor that it stays on.
    queue: Option<u16>,
}

impl Drop for PoolWorker<'_> {
    fn drop(&mut self) {
        // The mount is no more, or will be cut off.
        self.pool.record_completed(self.pending.len());
        let lead = self.pool.stop();
        if let (false, Some(lead)) = (self.is_lead, lead)
            && let Err(cause) = self.commands.wake(lead.as_fd())
        {
            tracing::debug!(%cause, "the lead has gone");
        }
    }
}

/// Serves until the mount is no more, and says when it is ready to, or why it is not.
pub(crate) fn serve(
    crew: &WorkerPool,
    files: &dyn RequestHandler,
    role: Role,
    told: impl FnOnce(Option<io::Error>),
) -> io::Result<()> {
    let begun = PoolWorker::start(crew, files, role).and_then(|mut server| {
        // A command ends at once if it is refused, or a request is there already.
        let is_there = server.serve_events()?;
        Ok((server, is_there))
    });
    match begun {
        Ok((mut server, mut is_there)) => {
            told(None);
            while is_there {
                is_there = server.serve_some()?;
            }
            Ok(())
        }
        Err(cause) => {
            told(Some(io::Error::new(cause.kind(), cause.to_string())));
            Err(cause)
        }
    }
}

impl<'s> PoolWorker<'s> {
    fn start(
        crew: &'s WorkerPool,
        files: &'s dyn RequestHandler,
        role: Role,
    ) -> io::Result<PoolWorker<'s>> {
        let all = (crew.entries.initial + crew.entries.additional) * crew.queues.len();
        let is_lead = role == Role::Lead;
        let commands = match is_lead {
            true => CommandRing::new(all, WaitMode::ByPoll)?,
            // What it has begun is all that it has.
            false => CommandRing::new(1, WaitMode::InRing)?,
        };
        let mut server = PoolWorker {
            pool: crew,
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
                let mut shared = crew.lock_shared();
                if shared.is_stopping {
                    return Err(io::Error::other("the others of its crew have ended"));
                }
                shared.lead_ring = Some(Arc::new(ring));
            }
            Role::Follower(queue) => {
                server.pin_to_queue(queue);
                crew.device.register(&mut server.commands, queue)?;
            }
            Role::Spare => {}
        }
        Ok(server)
    }

    /// Stays on the processor whose callers it serves.
    fn pin_to_queue(&mut self, queue: u16) {
        if self.queue != Some(queue) {
            pin_to_cpu(queue);
            self.queue = Some(queue);
        }
    }

    /// False: the mount is no more.
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

    /// False: the mount is no more.
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

    /// Gives the kernel what followers have answered, and the first time more entries.
    fn recommit_answered(&mut self, returned: Vec<RingRequest>) -> io::Result<()> {
        self.immediate_rounds = 0;
        for taken in returned {
            self.pool.device.commit(&mut self.commands, taken)?;
        }
        if !std::mem::replace(&mut self.has_all_entries, true)
            && let Err(cause) = self.register_additional()
        {
            tracing::warn!(%cause, "there are fewer entries of the ring than there could be");
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
        // With it goes what holds the entry's memory.
        drop(incoming);
        self.answer(taken, &answer)
    }

    fn answer(&mut self, mut taken: RingRequest, answer: &FuseReply) -> io::Result<()> {
        taken.answer(answer)?;
        self.pool.device.commit(&mut self.commands, taken)
    }

    /// Answers what has ended of what was begun.
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
            let at = at.ok_or_else(|| io::Error::other("what has ended was never begun"))?;
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

    /// Answers, and leaves the entry to the lead.
    fn answer_and_return(&mut self, mut taken: RingRequest, answer: &FuseReply) -> io::Result<()> {
        taken.answer(answer)?;
        match self.pool.return_to_lead(taken) {
            Ok(lead) => self.commands.wake(lead.as_fd()),
            // It is about to begin.
            Err(taken) => self.pool.device.commit(&mut self.commands, taken),
        }
    }
}

/// Begins nothing.
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
