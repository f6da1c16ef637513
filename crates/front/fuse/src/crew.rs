//! The threads that serve some of the kernel's queues, and who of them serves what.
//!
//! There are *followers*, as many as entries, and one *lead*. A follower has one entry or
//! none. With one, it serves the requests that come in it, one after the other; with none,
//! it waits for one to be passed to it.
//!
//! Followers that wait for the volume at the same time share neither messages nor
//! wake-ups. So an entry whose requests had to wait again and again goes to the lead, with
//! the last answer, if others wait at that time. The lead serves what can be begun ([`Hand`]) beside its other
//! requests, and never blocks: what may block it passes to a follower, with the entry,
//! whose next request then comes to that follower. When nothing waits any more, as over
//! `map`, it passes everything, until it has no entries.
//!
//! With the first entry that it gets, the lead gives the kernel more of them, so that many
//! requests can be begun at once. Where nothing waits there are few: then the kernel
//! queues, and each wake-up serves several callers.

use crate::answer::Answer;
use crate::busy::Noter;
use crate::collect::{AT_ONCE_MAX, Begun, Hand};
use crate::files::Files;
use crate::memory::{Came, Commands, Sleeps};
use crate::request::Incoming;
use crate::ring::{Queues, Taken, stay_on};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Requests in a row that had to wait, after which an entry goes to the lead. Over `map`
/// one has to now and then.
const WAITS_MIN: u32 = 8;

/// The threads of some queues.
pub(crate) struct Crew {
    device: Queues,
    noter: Noter,
    queues: Vec<u16>,
    entries: Entries,
    /// Requests that were begun and have not ended.
    under_way: AtomicUsize,
    shared: Mutex<Shared>,
    passed: Condvar,
}

/// Entries of each queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entries {
    /// From the beginning.
    pub(crate) first: usize,
    /// Once requests wait for the volume.
    pub(crate) more: usize,
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
struct Shared {
    /// For followers without an entry; as many as there are entries, at most.
    passed: VecDeque<(Taken, Incoming)>,
    /// Answered, for the lead to give to the kernel.
    returned: Vec<Taken>,
    /// The lead's ring.
    lead: Option<Arc<OwnedFd>>,
    is_over: bool,
}

impl Crew {
    pub(crate) fn new(device: Queues, noter: Noter, queues: &[u16], entries: Entries) -> Crew {
        Crew {
            device,
            noter,
            queues: queues.to_vec(),
            entries,
            under_way: AtomicUsize::new(0),
            shared: Mutex::default(),
            passed: Condvar::new(),
        }
    }

    /// The threads that it needs.
    pub(crate) fn roles(&self) -> Vec<Role> {
        let each = |queue| {
            let first = std::iter::repeat_n(Role::Follower(queue), self.entries.first);
            first.chain(std::iter::repeat_n(Role::Spare, self.entries.more))
        };
        let followers = self.queues.iter().copied().flat_map(each);
        [Role::Lead].into_iter().chain(followers).collect()
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass(&self, taken: Taken, incoming: Incoming) {
        self.shared().passed.push_back((taken, incoming));
        self.passed.notify_one();
    }

    /// Waits for what is passed; none: the mount is no more.
    fn await_passed(&self) -> Option<(Taken, Incoming)> {
        let mut shared = self.shared();
        loop {
            if shared.is_over {
                return None;
            }
            if let Some(passed) = shared.passed.pop_front() {
                return Some(passed);
            }
            let woken = self.passed.wait(shared);
            shared = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Leaves an answered entry to the lead, and says whom to tell.
    fn give_to_lead(&self, taken: Taken) -> Result<Arc<OwnedFd>, Taken> {
        let mut shared = self.shared();
        match shared.lead.clone() {
            Some(lead) => {
                shared.returned.push(taken);
                Ok(lead)
            }
            None => Err(taken),
        }
    }

    /// What was left to the lead; none: the mount is no more.
    fn take_returned(&self) -> Option<Vec<Taken>> {
        let mut shared = self.shared();
        let returned = std::mem::take(&mut shared.returned);
        (!shared.is_over).then_some(returned)
    }

    fn end(&self) -> Option<Arc<OwnedFd>> {
        let mut shared = self.shared();
        shared.is_over = true;
        self.passed.notify_all();
        shared.lead.clone()
    }

    /// How many requests of all threads are under way now that so many have ended.
    fn note_ended(&self, count: usize) -> usize {
        let before = self.under_way.fetch_sub(count, Ordering::Relaxed);
        before.saturating_sub(count)
    }
}

/// One thread's serving.
struct Server<'s> {
    crew: &'s Crew,
    files: &'s dyn Files,
    hand: Box<dyn Hand + 's>,
    commands: Commands,
    is_lead: bool,
    /// Entries whose requests were begun.
    begun: Vec<Taken>,
    /// What the hand has told of.
    ended: Vec<(u64, Answer)>,
    /// Whether what was begun last had to wait.
    has_waited: bool,
    /// How many times in a row that was so.
    waits: u32,
    /// How many times in a row nothing had to wait.
    at_once: u32,
    has_all_entries: bool,
    /// Of the processor that it stays on.
    queue: Option<u16>,
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        // The mount is no more, or will be cut off.
        self.crew.note_ended(self.begun.len());
        let lead = self.crew.end();
        if let (false, Some(lead)) = (self.is_lead, lead)
            && let Err(cause) = self.commands.tell(lead.as_fd())
        {
            tracing::debug!(%cause, "the lead has gone");
        }
    }
}

/// Serves until the mount is no more, and says when it is ready to, or why it is not.
pub(crate) fn serve(
    crew: &Crew,
    files: &dyn Files,
    role: Role,
    told: impl FnOnce(Option<io::Error>),
) -> io::Result<()> {
    let begun = Server::start(crew, files, role).and_then(|mut server| {
        // A command ends at once if it is refused, or a request is there already.
        let is_there = server.serve_what_came()?;
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

impl<'s> Server<'s> {
    fn start(crew: &'s Crew, files: &'s dyn Files, role: Role) -> io::Result<Server<'s>> {
        let all = (crew.entries.first + crew.entries.more) * crew.queues.len();
        let is_lead = role == Role::Lead;
        let commands = match is_lead {
            true => Commands::new(all, Sleeps::Elsewhere)?,
            // What it has begun is all that it has.
            false => Commands::new(1, Sleeps::Here)?,
        };
        let mut server = Server {
            crew,
            files,
            hand: files.hand().unwrap_or(Box::new(NoHand)),
            commands,
            is_lead,
            begun: Vec::new(),
            ended: Vec::new(),
            has_waited: false,
            waits: 0,
            at_once: 0,
            has_all_entries: false,
            queue: None,
        };
        match role {
            Role::Lead => {
                let ring = server.commands.descriptor().try_clone_to_owned()?;
                let mut shared = crew.shared();
                if shared.is_over {
                    return Err(io::Error::other("the others of its crew have ended"));
                }
                shared.lead = Some(Arc::new(ring));
            }
            Role::Follower(queue) => {
                server.stay_with(queue);
                crew.device.register(&mut server.commands, queue)?;
            }
            Role::Spare => {}
        }
        Ok(server)
    }

    /// Stays on the processor whose callers it serves.
    fn stay_with(&mut self, queue: u16) {
        if self.queue != Some(queue) {
            stay_on(queue);
            self.queue = Some(queue);
        }
    }

    /// False: the mount is no more.
    fn serve_some(&mut self) -> io::Result<bool> {
        if !self.begun.is_empty() {
            if !self.commands.is_due() {
                self.has_waited = true;
                let ring = self.commands.descriptor().as_raw_fd();
                self.hand.wait(self.is_lead.then_some(ring));
                self.reap()?;
                if self.begun.is_empty() {
                    return Ok(true);
                }
            }
            self.commands.look()?;
        } else if self.is_lead || self.commands.len() > 0 {
            self.commands.wait()?;
        } else {
            let Some((taken, incoming)) = self.crew.await_passed() else {
                return Ok(false);
            };
            self.stay_with(taken.queue());
            self.take(taken, incoming)?;
        }
        let is_there = self.serve_what_came()?;
        self.reap()?;
        self.at_once = match self.begun.is_empty() {
            true => self.at_once.saturating_add(1),
            false => 0,
        };
        Ok(is_there)
    }

    /// False: the mount is no more.
    fn serve_what_came(&mut self) -> io::Result<bool> {
        while let Some(came) = self.commands.next()? {
            match came {
                Came::Told => match self.crew.take_returned() {
                    Some(returned) => self.adopt(returned)?,
                    None => return Ok(false),
                },
                Came::Entry(entry, code) => {
                    let Some((taken, incoming)) = self.crew.device.take(entry, code)? else {
                        return Ok(false);
                    };
                    self.crew.noter.note();
                    self.take(taken, incoming)?;
                }
            }
        }
        Ok(true)
    }

    /// Gives the kernel what followers have answered, and the first time more entries.
    fn adopt(&mut self, returned: Vec<Taken>) -> io::Result<()> {
        self.at_once = 0;
        for taken in returned {
            self.crew.device.commit(&mut self.commands, taken)?;
        }
        if !std::mem::replace(&mut self.has_all_entries, true)
            && let Err(cause) = self.register_more()
        {
            tracing::warn!(%cause, "there are fewer entries of the ring than there could be");
        }
        Ok(())
    }

    fn register_more(&mut self) -> io::Result<()> {
        for &queue in &self.crew.queues {
            for _ in 0..self.crew.entries.more {
                self.crew.device.register(&mut self.commands, queue)?;
            }
        }
        Ok(())
    }

    fn take(&mut self, taken: Taken, incoming: Incoming) -> io::Result<()> {
        if self.is_lead && self.at_once >= AT_ONCE_MAX {
            self.crew.pass(taken, incoming);
            return Ok(());
        }
        let answer = match incoming.decode() {
            Ok(request) => match self.hand.begin(&taken.header, &request) {
                Begun::UnderWay => {
                    self.has_waited = false;
                    self.begun.push(taken);
                    self.crew.under_way.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
                Begun::Ended(answer) => answer,
                Begun::Not if self.is_lead => {
                    drop(request);
                    self.crew.pass(taken, incoming);
                    return Ok(());
                }
                Begun::Not => self.files.handle(&taken.header, request),
            },
            Err(errno) => Answer::Error(errno),
        };
        // With it goes what holds the entry's memory.
        drop(incoming);
        self.answer(taken, &answer)
    }

    fn answer(&mut self, mut taken: Taken, answer: &Answer) -> io::Result<()> {
        taken.answer(answer)?;
        self.crew.device.commit(&mut self.commands, taken)
    }

    /// Answers what has ended of what was begun.
    fn reap(&mut self) -> io::Result<()> {
        if self.begun.is_empty() {
            return Ok(());
        }
        let ended = &mut self.ended;
        self.hand
            .reap(&mut |unique, answer| ended.push((unique, answer)));
        let mut ended = std::mem::take(&mut self.ended);
        for (unique, answer) in ended.drain(..) {
            let has_name = |begun: &Taken| begun.header.unique == unique;
            let at = self.begun.iter().position(has_name);
            let at = at.ok_or_else(|| io::Error::other("what has ended was never begun"))?;
            let taken = self.begun.swap_remove(at);
            let others = self.crew.note_ended(1);
            self.waits = match self.has_waited {
                true => self.waits.saturating_add(1),
                false => 0,
            };
            if self.is_lead || self.waits < WAITS_MIN || others == 0 {
                self.answer(taken, &answer)?;
            } else {
                self.waits = 0;
                self.hand_over(taken, &answer)?;
            }
        }
        self.ended = ended;
        Ok(())
    }

    /// Answers, and leaves the entry to the lead.
    fn hand_over(&mut self, mut taken: Taken, answer: &Answer) -> io::Result<()> {
        taken.answer(answer)?;
        match self.crew.give_to_lead(taken) {
            Ok(lead) => self.commands.tell(lead.as_fd()),
            // It is about to begin.
            Err(taken) => self.crew.device.commit(&mut self.commands, taken),
        }
    }
}

/// Begins nothing.
struct NoHand;

impl Hand for NoHand {
    fn begin(&mut self, _: &crate::abi::InHeader, _: &crate::request::Request<'_>) -> Begun {
        Begun::Not
    }

    fn reap(&mut self, _: &mut dyn FnMut(u64, Answer)) {}

    fn len(&self) -> usize {
        0
    }

    fn wait(&mut self, _: Option<std::os::fd::RawFd>) {}
}
