//! Owners and groups as `name@domain`, by the users and groups of this machine.
//!
//! Invariants: a request never waits for the name service. Threads of their own ask it, at most once at a time for a name or number, and
//! with no lock held. While a first answer is missing, clients get NFS4ERR_DELAY and ask again; after [`OWNER_LOOKUP_WAIT`] the number is
//! sent, and a name is unknown. An old answer serves calls while a new lookup runs or fails, for [`OWNER_STALE_LIMIT`] at most. The
//! answers, the queue and the threads are bounded.

use super::identity::{Identities, NameAnswer};
use crate::limits::{
    OWNER_ANSWER_LIMIT, OWNER_ANSWERS_MAX, OWNER_FAILURE_LIMIT, OWNER_LOOKUP_BYTES_MAX,
    OWNER_LOOKUP_WAIT, OWNER_LOOKUPS_MAX, OWNER_LOOKUPS_QUEUED_MAX, OWNER_STALE_LIMIT,
};
use pagemesh_base::poison;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The most bytes of a domain, as in DNS.
const DOMAIN_BYTES_MAX: usize = 253;

/// A list of names: the one of users, or the one of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NameList {
    /// Users.
    Users,
    /// Groups.
    Groups,
}

/// A question for a name service.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum NameQuestion {
    /// The name of a number.
    NameOf(NameList, u32),
    /// The number of a name, without its domain.
    IdOf(NameList, Box<str>),
}

/// The answer of a name service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameResult {
    /// The name, without a domain.
    Name(String),
    /// The number.
    Id(u32),
}

/// Answers a question; none if there is no such name or number, an error if the service failed. It may block.
pub type NameService =
    Box<dyn Fn(&NameQuestion) -> Result<Option<NameResult>, String> + Send + Sync>;

/// Asks the users and groups of this machine (getpwuid(3), getpwnam(3), getgrgid(3), getgrnam(3)).
///
/// # Errors
/// If the name service of the machine failed.
pub fn system_names(question: &NameQuestion) -> Result<Option<NameResult>, String> {
    use nix::unistd::{Gid, Group, Uid, User};
    let answer = match question {
        NameQuestion::NameOf(NameList::Users, uid) => User::from_uid(Uid::from_raw(*uid))
            .map(|user| user.map(|user| NameResult::Name(user.name))),
        NameQuestion::NameOf(NameList::Groups, gid) => Group::from_gid(Gid::from_raw(*gid))
            .map(|group| group.map(|group| NameResult::Name(group.name))),
        NameQuestion::IdOf(NameList::Users, name) => {
            User::from_name(name).map(|user| user.map(|user| NameResult::Id(user.uid.as_raw())))
        }
        NameQuestion::IdOf(NameList::Groups, name) => Group::from_name(name)
            .map(|group| group.map(|group| NameResult::Id(group.gid.as_raw()))),
    };
    answer.map_err(|error| error.to_string())
}

/// A kept answer.
#[derive(Clone, Debug)]
enum CachedName {
    Name(Arc<str>),
    Id(u32),
    None,
}

#[derive(Debug)]
struct Entry {
    /// None: the first lookup has not ended.
    answer: Option<CachedName>,
    /// The end of the answer's validity, or the time of the first question.
    at: Instant,
    /// No lookup begins before.
    retry_at: Instant,
    /// A thread looks it up, or will.
    is_queued: bool,
}

#[derive(Default)]
struct Answers {
    entries: HashMap<NameQuestion, Entry>,
    queue: VecDeque<NameQuestion>,
    threads: usize,
}

struct Shared {
    domain: String,
    service: NameService,
    answers: Mutex<Answers>,
}

/// See the module.
pub struct NamedIdentities(Arc<Shared>);

/// The domain cannot be a part of names of owners.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the domain {0:?} of names is unusable; use 1 to {DOMAIN_BYTES_MAX} letters, digits, dots and hyphens, as in example.org"
)]
pub struct DomainError(String);

/// Checks a domain of names.
///
/// # Errors
/// If it is empty, too long, or has other bytes than letters, digits, dots and hyphens.
pub fn check_domain(domain: &str) -> Result<(), DomainError> {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    match (1..=DOMAIN_BYTES_MAX).contains(&domain.len()) && domain.bytes().all(is_part) {
        true => Ok(()),
        false => Err(DomainError(domain.into())),
    }
}

impl NamedIdentities {
    /// Names of this domain.
    ///
    /// # Errors
    /// As [`check_domain`].
    pub fn new(domain: &str, service: NameService) -> Result<Self, DomainError> {
        check_domain(domain)?;
        Ok(Self(Arc::new(Shared {
            domain: domain.into(),
            service,
            answers: Mutex::default(),
        })))
    }

    fn name_of(&self, list: NameList, id: u32) -> NameAnswer<Arc<str>> {
        match self.ask(NameQuestion::NameOf(list, id), Instant::now()) {
            NameAnswer::Known(CachedName::Name(name)) => NameAnswer::Known(name),
            NameAnswer::Known(_) | NameAnswer::Unknown => NameAnswer::Unknown,
            NameAnswer::Pending => NameAnswer::Pending,
        }
    }

    /// Names of other domains are unknown.
    fn id_of(&self, list: NameList, name: &str) -> NameAnswer<u32> {
        let (name, domain) = name.rsplit_once('@').unwrap_or_default();
        let is_own = domain.eq_ignore_ascii_case(&self.0.domain);
        if !is_own || name.is_empty() || name.len() > OWNER_LOOKUP_BYTES_MAX || name.contains('\0')
        {
            return NameAnswer::Unknown;
        }
        match self.ask(NameQuestion::IdOf(list, name.into()), Instant::now()) {
            NameAnswer::Known(CachedName::Id(id)) => NameAnswer::Known(id),
            NameAnswer::Known(_) | NameAnswer::Unknown => NameAnswer::Unknown,
            NameAnswer::Pending => NameAnswer::Pending,
        }
    }

    /// The kept answer. A missing or old one is looked up.
    fn ask(&self, question: NameQuestion, now: Instant) -> NameAnswer<CachedName> {
        let mut answers = poison::lock(&self.0.answers);
        let (answer, is_due) = match answers.entries.get(&question) {
            None => (NameAnswer::Pending, true),
            Some(Entry {
                answer: None, at, ..
            }) => match now.saturating_duration_since(*at) >= OWNER_LOOKUP_WAIT {
                true => (NameAnswer::Unknown, false),
                false => (NameAnswer::Pending, false),
            },
            Some(Entry {
                answer: Some(kept),
                at,
                retry_at,
                ..
            }) => match now.checked_duration_since(*at) {
                None => (NameAnswer::Known(kept.clone()), false),
                Some(age) if age < OWNER_STALE_LIMIT => {
                    (NameAnswer::Known(kept.clone()), now >= *retry_at)
                }
                Some(_) => (NameAnswer::Unknown, now >= *retry_at),
            },
        };
        if is_due {
            let is_waiting = matches!(answer, NameAnswer::Pending);
            if answers.enqueue(question, now) {
                self.start_thread(answers);
            } else if is_waiting {
                // No lookup will ever answer it: a dead name service has filled the queue.
                return NameAnswer::Unknown;
            }
        }
        answer
    }

    /// Starts a thread that asks the name service until the queue is empty, unless there are enough.
    fn start_thread(&self, mut answers: std::sync::MutexGuard<'_, Answers>) {
        if answers.threads >= OWNER_LOOKUPS_MAX {
            return;
        }
        answers.threads += 1;
        drop(answers);
        let shared = Arc::clone(&self.0);
        let builder = std::thread::Builder::new().name("nfs-names".into());
        if let Err(error) = builder.spawn(move || shared.run()) {
            tracing::warn!(%error, "no thread asks the name service; the next call tries again");
            poison::lock(&self.0.answers).give_up();
        }
    }
}

impl Answers {
    /// Queues a lookup, if there is room and none is queued. Returns whether it did.
    fn enqueue(&mut self, question: NameQuestion, now: Instant) -> bool {
        if self.queue.len() >= OWNER_LOOKUPS_QUEUED_MAX {
            return false;
        }
        match self.entries.get_mut(&question) {
            Some(entry) if entry.is_queued => return false,
            Some(entry) => entry.is_queued = true,
            None => {
                if self.entries.len() >= OWNER_ANSWERS_MAX {
                    let mut idle = self.entries.iter().filter(|(_, entry)| !entry.is_queued);
                    let Some(idle) = idle.next().map(|(question, _)| question.clone()) else {
                        return false;
                    };
                    self.entries.remove(&idle);
                }
                let entry = Entry {
                    answer: None,
                    at: now,
                    retry_at: now,
                    is_queued: true,
                };
                self.entries.insert(question.clone(), entry);
            }
        }
        self.queue.push_back(question);
        true
    }

    /// A thread could not start: without any other thread, the queue waits for nothing.
    fn give_up(&mut self) {
        self.threads -= 1;
        if self.threads > 0 {
            return;
        }
        for question in std::mem::take(&mut self.queue) {
            self.entries.remove(&question);
        }
    }

    fn end(&mut self, question: &NameQuestion, result: Result<CachedName, ()>, now: Instant) {
        let Some(entry) = self.entries.get_mut(question) else {
            return;
        };
        entry.is_queued = false;
        entry.retry_at = now + OWNER_FAILURE_LIMIT;
        match result {
            Ok(kept) => {
                let limit = match kept {
                    CachedName::None => OWNER_FAILURE_LIMIT,
                    CachedName::Name(_) | CachedName::Id(_) => OWNER_ANSWER_LIMIT,
                };
                (entry.answer, entry.at) = (Some(kept), now + limit);
            }
            // An old answer stays, with its age.
            Err(()) if entry.answer.is_some() => {}
            Err(()) => {
                (entry.answer, entry.at) = (Some(CachedName::None), now + OWNER_FAILURE_LIMIT)
            }
        }
    }
}

impl Shared {
    fn run(&self) {
        while let Some(question) = self.next() {
            let asked = std::panic::AssertUnwindSafe(|| (self.service)(&question));
            let answer = std::panic::catch_unwind(asked);
            let result = match answer.unwrap_or_else(|_| Err("the lookup panicked".into())) {
                Ok(Some(NameResult::Name(name))) => {
                    Ok(CachedName::Name(format!("{name}@{}", self.domain).into()))
                }
                Ok(Some(NameResult::Id(id))) => Ok(CachedName::Id(id)),
                Ok(None) => Ok(CachedName::None),
                Err(error) => {
                    tracing::warn!(?question, %error, "a name of an owner is unknown; check the name service (getent passwd)");
                    Err(())
                }
            };
            poison::lock(&self.answers).end(&question, result, Instant::now());
        }
    }

    /// The next question; none ends the thread.
    fn next(&self) -> Option<NameQuestion> {
        let mut answers = poison::lock(&self.answers);
        let next = answers.queue.pop_front();
        if next.is_none() {
            answers.threads -= 1;
        }
        next
    }
}

impl Identities for NamedIdentities {
    fn user_name(&self, uid: u32) -> NameAnswer<Arc<str>> {
        self.name_of(NameList::Users, uid)
    }

    fn group_name(&self, gid: u32) -> NameAnswer<Arc<str>> {
        self.name_of(NameList::Groups, gid)
    }

    fn user_id(&self, name: &str) -> NameAnswer<u32> {
        self.id_of(NameList::Users, name)
    }

    fn group_id(&self, name: &str) -> NameAnswer<u32> {
        self.id_of(NameList::Groups, name)
    }
}

#[cfg(test)]
mod tests;
