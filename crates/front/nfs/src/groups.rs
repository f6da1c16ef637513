//! The groups of users by this machine's list of users, for callers with more than the 16 groups of
//! AUTH_SYS.
//!
//! Invariants: a lookup runs with no lock held, and at most once at a time for a user. The cache is
//! bounded. An old answer serves calls while a new lookup runs. Calls of a user without an answer
//! wait for a bounded time.

use crate::limits::{GROUP_ANSWER_LIMIT, GROUP_ANSWERS_MAX, GROUP_LOOKUP_WAIT};
use pagemesh_base::poison;
use pagemesh_fs::CALLER_GROUPS_MAX;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

/// Returns the groups of a user id; none if the user is unknown or the lookup fails. It may block.
pub type GroupLookup = Box<dyn Fn(u32) -> Option<Vec<u32>> + Send + Sync>;

/// The groups of a user by the users and groups of this machine, as getgrouplist(3) returns them.
/// A directory service takes part through the name service switch, if the program uses a C library
/// with one.
#[must_use]
pub fn system_groups(uid: u32) -> Option<Vec<u32>> {
    let looked_up = || -> nix::Result<Option<Vec<u32>>> {
        let Some(user) = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid))? else {
            return Ok(None);
        };
        let Ok(name) = std::ffi::CString::new(user.name) else {
            return Ok(None);
        };
        let groups = nix::unistd::getgrouplist(&name, user.gid)?;
        Ok(Some(groups.into_iter().map(|it| it.as_raw()).collect()))
    };
    looked_up().unwrap_or_else(|error| {
        tracing::warn!(uid, %error, "the groups of a user are unknown; its calls have the groups that they name");
        None
    })
}

/// The answer for one user.
#[derive(Clone, Debug)]
struct Answer {
    /// The last result; none inside if the lookup failed.
    groups: Option<Option<Arc<[u32]>>>,
    /// The end of the result's validity.
    until: Instant,
    /// A thread looks the user up.
    is_running: bool,
}

/// See the module.
pub(crate) struct GroupCache {
    lookup: GroupLookup,
    answers: Mutex<HashMap<u32, Answer>>,
    answered: Condvar,
}

/// The next step of a call.
enum Step {
    Use(Option<Arc<[u32]>>),
    LookUp,
}

impl GroupCache {
    pub(crate) fn new(lookup: GroupLookup) -> Self {
        Self {
            lookup,
            answers: Mutex::default(),
            answered: Condvar::new(),
        }
    }

    /// The groups of a user; none if the call's own groups count.
    pub(crate) fn groups(&self, uid: u32, now: Instant) -> Option<Arc<[u32]>> {
        match self.begin(uid, now) {
            Step::Use(groups) => groups,
            Step::LookUp => {
                let mut guard = RunningLookup {
                    cache: self,
                    uid,
                    groups: None,
                };
                let mut groups = (self.lookup)(uid);
                if let Some(groups) = &mut groups {
                    groups.sort_unstable();
                    groups.dedup();
                    groups.truncate(CALLER_GROUPS_MAX);
                }
                guard.groups = groups.map(Arc::from);
                guard.groups.clone()
            }
        }
    }

    fn begin(&self, uid: u32, now: Instant) -> Step {
        let until = now + GROUP_LOOKUP_WAIT;
        let mut answers = poison::lock(&self.answers);
        loop {
            let Some(answer) = answers.get_mut(&uid) else {
                make_room(&mut answers);
                let answer = Answer {
                    groups: None,
                    until: now,
                    is_running: true,
                };
                answers.insert(uid, answer);
                return Step::LookUp;
            };
            if !answer.is_running && answer.until <= now {
                answer.is_running = true;
                return Step::LookUp;
            }
            if let Some(groups) = &answer.groups {
                return Step::Use(groups.clone());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Step::Use(None);
            }
            answers = poison::recover(self.answered.wait_timeout(answers, left)).0;
        }
    }

    fn end(&self, uid: u32, groups: Option<Arc<[u32]>>) {
        let mut answers = poison::lock(&self.answers);
        if let Some(answer) = answers.get_mut(&uid) {
            answer.is_running = false;
            answer.groups = Some(groups);
            answer.until = Instant::now() + GROUP_ANSWER_LIMIT;
        }
        self.answered.notify_all();
    }
}

/// Drops the answer that expires first. Lookups that run keep their places: threads bound them.
fn make_room(answers: &mut HashMap<u32, Answer>) {
    if answers.len() < GROUP_ANSWERS_MAX {
        return;
    }
    let idle = answers.iter().filter(|(_, answer)| !answer.is_running);
    let oldest = idle.min_by_key(|(_, answer)| answer.until);
    if let Some(uid) = oldest.map(|(uid, _)| *uid) {
        answers.remove(&uid);
    }
}

/// Stores the result, also after a panic of the lookup.
struct RunningLookup<'a> {
    cache: &'a GroupCache,
    uid: u32,
    groups: Option<Arc<[u32]>>,
}

impl Drop for RunningLookup<'_> {
    fn drop(&mut self) {
        self.cache.end(self.uid, self.groups.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;

    fn counted(result: Option<Vec<u32>>) -> (GroupCache, Arc<AtomicU32>) {
        let count = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&count);
        let lookup = move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
            result.clone()
        };
        (GroupCache::new(Box::new(lookup)), count)
    }

    #[test]
    fn answer_is_looked_up_again_after_its_time() {
        let (cache, count) = counted(Some(vec![3, 1, 3]));
        let start = Instant::now();
        for _ in 0..3 {
            assert_eq!(cache.groups(7, start).as_deref(), Some(&[1, 3][..]));
        }
        assert_eq!(count.load(Ordering::SeqCst), 1);
        let later = Instant::now() + GROUP_ANSWER_LIMIT;
        assert!(cache.groups(7, later).is_some());
        assert_eq!(count.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn failed_lookup_is_kept_as_an_answer() {
        let (cache, count) = counted(None);
        for _ in 0..3 {
            assert_eq!(cache.groups(7, Instant::now()), None);
        }
        assert_eq!(count.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn cache_is_bounded() {
        let (cache, _) = counted(Some(vec![]));
        for uid in 0..GROUP_ANSWERS_MAX as u32 + 10 {
            cache.groups(uid, Instant::now());
        }
        assert_eq!(poison::lock(&cache.answers).len(), GROUP_ANSWERS_MAX);
    }

    #[test]
    fn groups_beyond_the_limit_are_left_out() {
        let (cache, _) = counted(Some((0..5000).collect()));
        let groups = cache.groups(7, Instant::now()).expect("groups");
        assert_eq!(groups.len(), CALLER_GROUPS_MAX);
    }

    #[test]
    fn old_answer_serves_calls_while_a_lookup_runs() {
        let (begun, wait_begun) = mpsc::channel();
        let (end, wait_end) = mpsc::channel::<()>();
        let wait_end = Mutex::new(wait_end);
        let lookup = move |_| {
            begun.send(()).expect("a test");
            poison::lock(&wait_end).recv().expect("a test");
            Some(vec![1])
        };
        let cache = GroupCache::new(Box::new(lookup));
        let later = Instant::now() + GROUP_ANSWER_LIMIT + GROUP_ANSWER_LIMIT;
        std::thread::scope(|scope| {
            scope.spawn(|| cache.groups(7, Instant::now()));
            wait_begun.recv().expect("a lookup");
            let second = scope.spawn(|| cache.groups(7, Instant::now()));
            end.send(()).expect("a lookup");
            assert_eq!(second.join().expect("a thread").as_deref(), Some(&[1][..]));
            let again = scope.spawn(|| cache.groups(7, later));
            wait_begun.recv().expect("a lookup");
            assert_eq!(cache.groups(7, later).as_deref(), Some(&[1][..]));
            end.send(()).expect("a lookup");
            assert!(again.join().expect("a thread").is_some());
        });
    }
}
