//! The groups of users by this machine's list of users, for callers with more than the 16 groups of
//! AUTH_SYS.
//!
//! A name service may be slow or dead, so lookups run in threads of their own, and calls do not.
//!
//! Invariants: a lookup runs with no lock held, and at most once at a time for a user. The cache, the
//! threads and the calls that wait are bounded. A good answer serves calls while the next lookup runs or
//! fails, up to [`GROUP_ANSWER_AGE_MAX`]. A call of a user without an answer waits for a bounded time.

use crate::limits::{
    GROUP_ANSWER_AGE_MAX, GROUP_ANSWER_LIMIT, GROUP_ANSWERS_MAX, GROUP_LOOKUP_WAIT,
    GROUP_RETRY_PAUSE, GROUP_THREADS_MAX, GROUP_WAITERS_MAX,
};
use pagemesh_base::poison;
use pagemesh_fs::CALLER_GROUPS_MAX;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

/// Returns the groups of a user id; none if there is no such user, and an error if the lookup fails. It
/// may block.
pub type GroupLookup = Box<dyn Fn(u32) -> io::Result<Option<Vec<u32>>> + Send + Sync>;

/// The groups of a user by the users and groups of this machine, as getgrouplist(3) returns them.
/// A directory service takes part through the name service switch, if the program uses a C library
/// with one.
///
/// # Errors
/// If the list of users cannot be read.
pub fn system_groups(uid: u32) -> io::Result<Option<Vec<u32>>> {
    let Some(user) = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid))? else {
        return Ok(None);
    };
    let Ok(name) = std::ffi::CString::new(user.name) else {
        return Ok(None);
    };
    let groups = nix::unistd::getgrouplist(&name, user.gid)?;
    Ok(Some(groups.into_iter().map(|it| it.as_raw()).collect()))
}

/// The present time.
type Clock = Box<dyn Fn() -> Instant + Send + Sync>;

/// The groups of a user; none if the groups of the call count.
type Groups = Option<Arc<[u32]>>;

/// The answer is not known yet. The client asks again later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pending;

/// The answer for one user.
#[derive(Clone, Debug)]
struct Answer {
    /// The last result; none inside if there is no such user, or no lookup has succeeded.
    groups: Option<Groups>,
    /// The time of a lookup that succeeded; none if none has.
    known_at: Option<Instant>,
    /// The time of the next lookup.
    refresh_at: Instant,
    /// The user is in the queue, or a thread looks it up.
    is_running: bool,
}

impl Answer {
    /// The groups, unless they are too old.
    fn usable(&self, now: Instant) -> Option<Groups> {
        let is_old = |at: Instant| now.saturating_duration_since(at) >= GROUP_ANSWER_AGE_MAX;
        let groups = self.groups.as_ref()?;
        match self.known_at.is_some_and(is_old) {
            true => None,
            false => Some(groups.clone()),
        }
    }
}

#[derive(Default)]
struct Answers {
    by_user: HashMap<u32, Answer>,
    /// Users that a thread looks up next. All have a place in `by_user`.
    queue: VecDeque<u32>,
    threads: usize,
    /// Calls that wait for an answer.
    waiting: usize,
}

/// See the module.
pub(crate) struct GroupCache(Arc<Lookups>);

struct Lookups {
    lookup: GroupLookup,
    clock: Clock,
    answers: Mutex<Answers>,
    answered: Condvar,
}

impl GroupCache {
    pub(crate) fn new(lookup: GroupLookup) -> Self {
        Self::with_clock(lookup, Box::new(Instant::now))
    }

    fn with_clock(lookup: GroupLookup, clock: Clock) -> Self {
        Self(Arc::new(Lookups {
            lookup,
            clock,
            answers: Mutex::default(),
            answered: Condvar::new(),
        }))
    }

    /// The groups of a user; none if the call's own groups count.
    pub(crate) fn groups(&self, uid: u32) -> Result<Groups, Pending> {
        let now = (self.0.clock)();
        let mut answers = poison::lock(&self.0.answers);
        if !answers.by_user.contains_key(&uid) {
            if !make_room(&mut answers.by_user) {
                return Err(Pending);
            }
            let answer = Answer {
                groups: None,
                known_at: None,
                refresh_at: now,
                is_running: false,
            };
            answers.by_user.insert(uid, answer);
        }
        if let Some(answer) = answers.by_user.get_mut(&uid)
            && !answer.is_running
            && answer.refresh_at <= now
        {
            answer.is_running = true;
            answers.queue.push_back(uid);
            self.start_thread(&mut answers);
        }
        self.wait(answers, uid, now)
    }

    /// Waits for an answer that may be used.
    fn wait(
        &self,
        mut answers: MutexGuard<'_, Answers>,
        uid: u32,
        now: Instant,
    ) -> Result<Groups, Pending> {
        let until = Instant::now() + GROUP_LOOKUP_WAIT;
        let mut is_counted = false;
        let result = loop {
            let known = answers.by_user.get(&uid).and_then(|it| it.usable(now));
            if let Some(groups) = known {
                break Ok(groups);
            }
            if !is_counted && answers.waiting >= GROUP_WAITERS_MAX {
                break Err(Pending);
            }
            answers.waiting += usize::from(!is_counted);
            is_counted = true;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(
                    uid,
                    "the name service is slow: a user's calls wait for its groups, and are tried again"
                );
                break Err(Pending);
            }
            answers = poison::recover(self.0.answered.wait_timeout(answers, left)).0;
        };
        answers.waiting -= usize::from(is_counted);
        result
    }

    /// Starts a thread for the queue, unless enough run.
    fn start_thread(&self, answers: &mut Answers) {
        if answers.threads >= GROUP_THREADS_MAX {
            return;
        }
        let lookups = Arc::clone(&self.0);
        let thread = std::thread::Builder::new().name("nfs-groups".into());
        match thread.spawn(move || lookups.run()) {
            // The thread has no part of a file system, and ends with its queue. A name service that never
            // answers would block a join.
            Ok(_detached) => answers.threads += 1,
            Err(error) if answers.threads == 0 => {
                tracing::warn!(%error, "cannot start a thread for lookups of groups");
                while let Some(uid) = answers.queue.pop_front() {
                    answers.end(
                        uid,
                        Err(io::ErrorKind::OutOfMemory.into()),
                        (self.0.clock)(),
                    );
                }
            }
            Err(_) => {}
        }
    }
}

impl Lookups {
    /// Looks users up until the queue is empty.
    fn run(&self) {
        while let Some(uid) = self.next() {
            let looked_up = catch_unwind(AssertUnwindSafe(|| (self.lookup)(uid)));
            let result = looked_up.unwrap_or_else(|_| Err(io::Error::other("the lookup panicked")));
            poison::lock(&self.answers).end(uid, result, (self.clock)());
            self.answered.notify_all();
        }
    }

    fn next(&self) -> Option<u32> {
        let mut answers = poison::lock(&self.answers);
        let uid = answers.queue.pop_front();
        answers.threads -= usize::from(uid.is_none());
        uid
    }
}

impl Answers {
    /// Stores the result of a lookup. After a failure a good answer stays.
    fn end(&mut self, uid: u32, result: io::Result<Option<Vec<u32>>>, now: Instant) {
        let Some(answer) = self.by_user.get_mut(&uid) else {
            return;
        };
        answer.is_running = false;
        match result {
            Ok(groups) => {
                answer.groups = Some(groups.map(sorted));
                answer.known_at = Some(now);
                answer.refresh_at = now + GROUP_ANSWER_LIMIT;
            }
            Err(error) => {
                tracing::warn!(uid, %error, "the lookup of a user's groups failed; the earlier groups count, or else the groups of its calls");
                if answer.usable(now).is_none() {
                    answer.groups = Some(None);
                    answer.known_at = None;
                }
                answer.refresh_at = now + GROUP_RETRY_PAUSE;
            }
        }
    }
}

fn sorted(mut groups: Vec<u32>) -> Arc<[u32]> {
    groups.sort_unstable();
    groups.dedup();
    groups.truncate(CALLER_GROUPS_MAX);
    groups.into()
}

/// Drops the answer that expires first, if there is no room for another. Returns whether there is room:
/// lookups that run keep their places.
fn make_room(answers: &mut HashMap<u32, Answer>) -> bool {
    if answers.len() < GROUP_ANSWERS_MAX {
        return true;
    }
    let idle = answers.iter().filter(|(_, answer)| !answer.is_running);
    let oldest = idle.min_by_key(|(_, answer)| answer.refresh_at);
    let oldest = oldest.map(|(uid, _)| *uid);
    oldest.is_some_and(|uid| answers.remove(&uid).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
    use std::sync::mpsc::{self, Receiver, Sender};
    use std::time::Duration;

    /// A cache at a time that a test chooses.
    struct TimedCache {
        cache: GroupCache,
        seconds: Arc<AtomicU64>,
    }

    impl TimedCache {
        fn new(
            lookup: impl Fn(u32) -> io::Result<Option<Vec<u32>>> + Send + Sync + 'static,
        ) -> Self {
            let (start, seconds) = (Instant::now(), Arc::new(AtomicU64::new(0)));
            let passed = Arc::clone(&seconds);
            let clock = move || start + Duration::from_secs(passed.load(Ordering::SeqCst));
            let cache = GroupCache::with_clock(Box::new(lookup), Box::new(clock));
            Self { cache, seconds }
        }

        fn counted(result: Option<Vec<u32>>) -> (Self, Arc<AtomicU32>) {
            let count = Arc::new(AtomicU32::new(0));
            let counter = Arc::clone(&count);
            let lookup = move |_| {
                counter.fetch_add(1, Ordering::SeqCst);
                Ok(result.clone())
            };
            (Self::new(lookup), count)
        }

        /// Lookups begin with a message, and end with another.
        fn gated() -> (Self, Receiver<u32>, Sender<()>) {
            let (begun, begins) = mpsc::channel();
            let (end, ends) = mpsc::channel::<()>();
            let ends = Mutex::new(ends);
            let lookup = move |uid| {
                // The test has gone if no message can be sent or received.
                let _ = begun.send(uid);
                let _ = poison::lock(&ends).recv();
                Ok(Some(vec![uid]))
            };
            (Self::new(lookup), begins, end)
        }

        fn pass(&self, time: Duration) {
            self.seconds.fetch_add(time.as_secs(), Ordering::SeqCst);
        }

        fn groups(&self, uid: u32) -> Result<Option<Vec<u32>>, Pending> {
            let groups = self.cache.groups(uid)?;
            Ok(groups.map(|it| it.to_vec()))
        }

        fn threads(&self) -> usize {
            poison::lock(&self.cache.0.answers).threads
        }

        /// Waits until no lookup runs.
        #[track_caller]
        fn wait_for_lookups(&self) {
            let until = Instant::now() + Duration::from_secs(30);
            while self.threads() > 0 {
                assert!(Instant::now() < until, "a lookup does not end");
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn answer_is_looked_up_again_after_its_time() {
        let (cache, count) = TimedCache::counted(Some(vec![3, 1, 3]));
        for _ in 0..3 {
            assert_eq!(cache.groups(7), Ok(Some(vec![1, 3])));
        }
        assert_eq!(count.load(Ordering::SeqCst), 1);
        cache.pass(GROUP_ANSWER_LIMIT);
        assert_eq!(cache.groups(7), Ok(Some(vec![1, 3])));
        cache.wait_for_lookups();
        assert_eq!(count.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn unknown_user_is_kept_as_an_answer() {
        let (cache, count) = TimedCache::counted(None);
        for _ in 0..3 {
            assert_eq!(cache.groups(7), Ok(None));
        }
        assert_eq!(count.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn cache_is_bounded() {
        let (cache, _) = TimedCache::counted(Some(vec![]));
        for uid in 0..GROUP_ANSWERS_MAX as u32 + 10 {
            assert!(cache.groups(uid).is_ok());
        }
        let users = poison::lock(&cache.cache.0.answers).by_user.len();
        assert_eq!(users, GROUP_ANSWERS_MAX);
    }

    #[test]
    fn groups_beyond_the_limit_are_left_out() {
        let (cache, _) = TimedCache::counted(Some((0..5000).collect()));
        let groups = cache.groups(7).expect("an answer").expect("groups");
        assert_eq!(groups.len(), CALLER_GROUPS_MAX);
    }

    #[test]
    fn failed_refresh_keeps_the_good_answer_for_a_bounded_time() {
        let is_down = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&is_down);
        let cache = TimedCache::new(move |_| match flag.load(Ordering::SeqCst) {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(Some(vec![1])),
        });
        assert_eq!(cache.groups(7), Ok(Some(vec![1])));
        is_down.store(true, Ordering::SeqCst);
        for _ in 0..3 {
            cache.pass(GROUP_ANSWER_LIMIT);
            assert_eq!(cache.groups(7), Ok(Some(vec![1])));
            cache.wait_for_lookups();
        }
        cache.pass(GROUP_ANSWER_AGE_MAX);
        assert_eq!(cache.groups(7), Ok(None), "the answer is too old");
        is_down.store(false, Ordering::SeqCst);
        cache.pass(GROUP_RETRY_PAUSE);
        assert!(cache.groups(7).is_ok());
        cache.wait_for_lookups();
        assert_eq!(cache.groups(7), Ok(Some(vec![1])));
    }

    #[test]
    fn old_answer_serves_calls_while_a_lookup_runs() {
        let (cache, begins, end) = TimedCache::gated();
        end.send(()).expect("a lookup");
        assert_eq!(cache.groups(7), Ok(Some(vec![7])));
        assert_eq!(begins.recv(), Ok(7));
        cache.pass(GROUP_ANSWER_LIMIT);
        for _ in 0..10 {
            assert_eq!(cache.groups(7), Ok(Some(vec![7])));
        }
        assert_eq!(begins.recv(), Ok(7));
        end.send(()).expect("a lookup");
        cache.wait_for_lookups();
        assert!(begins.try_recv().is_err(), "one lookup");
    }

    #[test]
    fn dead_name_service_holds_bounded_threads_and_calls() {
        let (cache, begins, end) = TimedCache::gated();
        let users = 1..=3 * GROUP_WAITERS_MAX as u32;
        std::thread::scope(|scope| {
            let call = |uid| {
                let cache = &cache;
                scope.spawn(move || cache.groups(uid))
            };
            let calls: Vec<_> = users.clone().map(call).collect();
            for call in calls {
                assert_eq!(call.join().expect("a thread"), Err(Pending));
            }
        });
        assert_eq!(cache.threads(), GROUP_THREADS_MAX);
        drop(end);
        cache.wait_for_lookups();
        let mut looked_up: Vec<_> = begins.try_iter().collect();
        looked_up.sort_unstable();
        assert!(looked_up.into_iter().eq(users), "each user once");
        assert_eq!(cache.groups(1), Ok(Some(vec![1])));
    }
}
