//! The search: which thread continues at each choice, and where choices are.
//!
//! An execution is its list of selected options; the next execution changes the last choice with an
//! untried option (depth first). The default option is free: the running thread continues, and a
//! pausing thread yields to the next one. Any other option costs one of the model's switches; when
//! these are used up there are no more choices (Musuvathi and Qadeer, "Iterative context bounding",
//! PLDI 2007).
//!
//! There is a choice before an access only if another thread accesses the same unit and one of the
//! two changes it. Any other access can move behind the switch unnoticed. The search learns which
//! units are shared; when it finds more, it starts anew.

use pagemesh_base::rng::SplitMix64;
use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Maximum of accesses and pauses in one execution, far above any that ends.
const STEPS_MAX: u64 = 300_000;
/// Stack of a coroutine: code runs on it that otherwise has a thread's large stack.
const STACK_BYTES: usize = 1 << 20;
/// Maximum number of switches in a random execution.
const RANDOM_SWITCHES_MAX: usize = 8;
/// Environment variable: seconds of random executions for each model.
const SECONDS_VAR: &str = "PAGEMESH_MODELS_SECONDS";
/// Environment variable: seed of the first random execution.
const SEED_VAR: &str = "PAGEMESH_MODELS_SEED";

/// The kind of access to a unit of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads the unit.
    Load,
    /// Changes the unit, or may.
    Change,
}

type Unit = (&'static str, usize);

thread_local! {
    pub(crate) static STATE: RefCell<Option<SearchState>> = const { RefCell::new(None) };
}

/// Panic payload of a dying thread.
pub(crate) struct ThreadDeath;

/// The action of a thread at a choice.
pub(crate) enum StepAction {
    Continue,
    Switch,
    Die,
}

/// A test of all interleavings of some threads, up to a bound.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    name: &'static str,
    switches: usize,
    mortal_thread: Option<usize>,
    has_time: bool,
}

/// The extent of an exploration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exploration {
    /// Number of different executions.
    pub executions: u64,
    /// Accesses and pauses of the longest execution.
    pub steps: u64,
}

/// A failed execution.
#[derive(Clone, Debug)]
pub struct ExecutionFailure {
    /// The panic message.
    pub cause: String,
    /// Each choice that was not the default.
    pub schedule: Vec<String>,
    /// Number of executions including this one.
    pub executions: u64,
}

impl fmt::Display for ExecutionFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "execution {}: {}", self.executions, self.cause)?;
        let mut choices = self.schedule.iter();
        choices.try_for_each(|choice| write!(f, "\n  {choice}"))
    }
}

impl Model {
    /// A model with at most this many switches away from a thread that could continue.
    #[must_use]
    pub const fn new(name: &'static str, switches: usize) -> Model {
        Model {
            name,
            switches,
            mortal_thread: None,
            has_time: false,
        }
    }

    /// Lets one thread die before any of its accesses.
    #[must_use]
    pub const fn with_mortal(mut self, thread: usize) -> Model {
        self.mortal_thread = Some(thread);
        self
    }

    /// Adds time: once in an execution a thread may find its wait timed out, and the last thread
    /// always does.
    #[must_use]
    pub const fn with_time(mut self) -> Model {
        self.has_time = true;
        self
    }

    /// Runs every execution within the bound, then random ones beyond it for the time that the
    /// environment sets.
    ///
    /// # Panics
    /// If an execution fails.
    #[track_caller]
    pub fn check(self, run: impl Fn() + Clone + Send + Sync + 'static) -> Exploration {
        let begin = Instant::now();
        let explored = match self.explore(run.clone()) {
            Ok(explored) => explored,
            Err(failed) => panic!("model {}, {failed}", self.name),
        };
        let (name, took) = (self.name, begin.elapsed());
        println!("model {name}: {explored:?} in {took:.1?}");
        let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
        if let Some(seconds) = number(SECONDS_VAR) {
            let first = number(SEED_VAR).unwrap_or(1);
            let limit = Duration::from_secs(seconds);
            match self.explore_random(first, limit, run) {
                Ok(executions) => {
                    println!("model {name}: {executions} random executions from seed {first}");
                }
                Err((seed, failed)) => panic!("model {name}, {SEED_VAR}={seed}, {failed}"),
            }
        }
        explored
    }

    /// Runs every execution within the bound until one fails.
    ///
    /// # Errors
    /// The failed execution.
    pub fn explore(
        self,
        run: impl Fn() + Clone + Send + Sync + 'static,
    ) -> Result<Exploration, ExecutionFailure> {
        let state = self.explore_bounded(run)?;
        Ok(Exploration {
            executions: state.executions,
            steps: state.longest_steps,
        })
    }

    fn explore_bounded(
        self,
        run: impl Fn() + Clone + Send + Sync + 'static,
    ) -> Result<SearchState, ExecutionFailure> {
        let mut state = SearchState::new(self, None);
        loop {
            state = state.run(run.clone())?;
            if !state.has_new_shared {
                return Ok(state);
            }
            state.has_new_shared = false;
            state.executions = 0;
        }
    }

    /// Runs random executions with consecutive seeds; returns their number.
    fn explore_random(
        self,
        first: u64,
        limit: Duration,
        run: impl Fn() + Clone + Send + Sync + 'static,
    ) -> Result<u64, (u64, ExecutionFailure)> {
        let fail = |seed| move |failed| (seed, failed);
        // The shared units are already known, so one seed is one execution.
        let shared = self.explore_bounded(run.clone()).map_err(fail(0))?.shared;
        let state = |random| SearchState {
            shared: shared.clone(),
            ..SearchState::new(self, Some(random))
        };
        let default = state(RandomChoices::none());
        let choices = default.run(run.clone()).map_err(fail(0))?.choice_index;
        let begin = Instant::now();
        let mut seed = first;
        while begin.elapsed() < limit {
            let random = state(RandomChoices::new(seed, choices));
            random.run(run.clone()).map_err(fail(seed))?;
            seed += 1;
        }
        Ok(seed - first)
    }
}

/// A number in `0..count`.
fn below(rng: &mut SplitMix64, count: usize) -> usize {
    rng.below(count as u64) as usize
}

/// The choices of one random execution that differ from the default.
struct RandomChoices {
    rng: SplitMix64,
    switch_points: BTreeSet<usize>,
}

impl RandomChoices {
    fn none() -> RandomChoices {
        RandomChoices {
            rng: SplitMix64::new(0),
            switch_points: BTreeSet::new(),
        }
    }

    /// Selects a few of about `choices` choices.
    fn new(seed: u64, choices: usize) -> RandomChoices {
        let mut rng = SplitMix64::new(seed);
        let count = 1 + below(&mut rng, RANDOM_SWITCHES_MAX);
        let switch_points = (0..count).map(|_| below(&mut rng, choices.max(1)));
        RandomChoices {
            switch_points: switch_points.collect(),
            rng,
        }
    }

    fn choose(&mut self, at: usize, options: usize) -> usize {
        if self.switch_points.contains(&at) {
            1 + below(&mut self.rng, options - 1)
        } else {
            0
        }
    }
}

#[derive(Clone, Copy)]
struct ChoicePoint {
    selected: usize,
    options: usize,
}

/// The threads that accessed a unit, as bits, and those that changed it.
#[derive(Clone, Copy, Default)]
struct AccessSet {
    accessed_by: u8,
    changed_by: u8,
}

impl AccessSet {
    fn is_shared(self) -> bool {
        self.changed_by != 0 && self.accessed_by.count_ones() > 1
    }
}

pub(crate) struct SearchState {
    model: Model,
    random: Option<RandomChoices>,
    path: Vec<ChoicePoint>,
    accesses: HashMap<Unit, AccessSet>,
    shared: HashSet<Unit>,
    /// Units found to be shared in this execution.
    newly_shared: Vec<Unit>,
    has_new_shared: bool,
    has_begun: bool,
    executions: u64,
    longest_steps: u64,

    // State of the current execution.
    /// Choices so far.
    choice_index: usize,
    switches_used: usize,
    steps: u64,
    ended_threads: Vec<bool>,
    are_threads_running: bool,
    has_died: bool,
    has_timed_out: bool,
    current_thread: usize,
    /// The thread to which the next switch leads.
    next_thread: Option<usize>,
    wake_counts: BTreeMap<Unit, u64>,
    schedule: Vec<String>,
}

impl SearchState {
    fn new(model: Model, random: Option<RandomChoices>) -> SearchState {
        SearchState {
            model,
            random,
            path: Vec::new(),
            accesses: HashMap::new(),
            shared: HashSet::new(),
            newly_shared: Vec::new(),
            has_new_shared: false,
            has_begun: false,
            executions: 0,
            longest_steps: 0,
            choice_index: 0,
            switches_used: 0,
            steps: 0,
            ended_threads: Vec::new(),
            are_threads_running: false,
            has_died: false,
            has_timed_out: false,
            current_thread: 0,
            next_thread: None,
            wake_counts: BTreeMap::new(),
            schedule: Vec::new(),
        }
    }

    /// Runs executions until there are no more.
    fn run(self, run: impl Fn() + Send + Sync + 'static) -> Result<SearchState, ExecutionFailure> {
        let mut config = Config::new();
        config.stack_size = STACK_BYTES;
        config.failure_persistence = FailurePersistence::None;
        config.max_steps = MaxSteps::None;
        STATE.set(Some(self));
        let runner = Runner::new(ModelScheduler, config);
        let outcome = catch_unwind(AssertUnwindSafe(|| runner.run(run)));
        let mut state = STATE.take().expect("it was set");
        state.has_begun = false;
        match outcome {
            Ok(_) => Ok(state),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&s| s.into()));
                Err(ExecutionFailure {
                    cause: text.unwrap_or_else(|| "a panic without a message".into()),
                    schedule: state.schedule,
                    executions: state.executions,
                })
            }
        }
    }

    /// Starts the next execution; false if there is none.
    fn start_next_execution(&mut self) -> bool {
        if self.has_begun && !self.backtrack() {
            return false;
        }
        self.has_begun = true;
        self.executions += 1;
        self.choice_index = 0;
        self.switches_used = 0;
        self.steps = 0;
        self.has_died = false;
        self.has_timed_out = false;
        self.are_threads_running = false;
        self.ended_threads.clear();
        self.wake_counts.clear();
        self.schedule.clear();
        true
    }

    fn backtrack(&mut self) -> bool {
        if self.random.is_some() {
            return false;
        }
        if !self.newly_shared.is_empty() {
            self.shared.extend(self.newly_shared.drain(..));
            // Ends this search; the caller starts anew with the new shared units.
            self.has_new_shared = true;
            self.path.clear();
            return false;
        }
        while let Some(last) = self.path.last_mut() {
            last.selected += 1;
            if last.selected < last.options {
                return true;
            }
            self.path.pop();
        }
        false
    }

    /// Selects one of the options; each but the first costs `cost` switches.
    fn choose(&mut self, options: usize, cost: usize) -> usize {
        if let Some(random) = &mut self.random {
            self.choice_index += 1;
            return match options {
                1 => 0,
                _ => random.choose(self.choice_index - 1, options),
            };
        }
        if options == 1 || self.switches_used + cost > self.model.switches {
            return 0;
        }
        if self.choice_index == self.path.len() {
            self.path.push(ChoicePoint {
                selected: 0,
                options,
            });
        }
        let ChoicePoint {
            selected: taken,
            options: then,
        } = self.path[self.choice_index];
        assert_eq!(then, options, "the model is not deterministic");
        self.choice_index += 1;
        if taken > 0 {
            self.switches_used += cost;
        }
        taken
    }

    /// The threads that have not ended, in order after the current one.
    fn other_threads(&self) -> Vec<usize> {
        let count = self.ended_threads.len();
        let behind = (1..count).map(|by| (self.current_thread + by) % count);
        behind
            .filter(|&thread| !self.ended_threads[thread])
            .collect()
    }

    fn count_step(&mut self) {
        self.steps += 1;
        assert!(self.steps < STEPS_MAX, "the threads do not end");
    }

    pub(crate) fn step(
        &mut self,
        space: &'static str,
        units: Range<usize>,
        access: Access,
    ) -> StepAction {
        self.count_step();
        let mut is_shared = false;
        for unit in units.clone() {
            let unit = (space, unit);
            let seen = self.accesses.entry(unit).or_default();
            let was_shared = seen.is_shared();
            seen.accessed_by |= 1 << self.current_thread;
            if access == Access::Change {
                seen.changed_by |= 1 << self.current_thread;
            }
            if !was_shared && seen.is_shared() {
                self.newly_shared.push(unit);
            }
            is_shared |= self.shared.contains(&unit);
        }
        if self.model.mortal_thread == Some(self.current_thread)
            && !self.has_died
            && self.choose(2, 0) == 1
        {
            self.has_died = true;
            let me = self.current_thread;
            self.schedule
                .push(format!("thread {me} dies before {space} {units:?}"));
            return StepAction::Die;
        }
        if !is_shared {
            return StepAction::Continue;
        }
        let others = self.other_threads();
        match self.choose(others.len() + 1, 1) {
            0 => StepAction::Continue,
            other => {
                let (me, next) = (self.current_thread, others[other - 1]);
                let told = format!("thread {next} before {me} does {access:?} {space} {units:?}");
                self.schedule.push(told);
                self.next_thread = Some(next);
                StepAction::Switch
            }
        }
    }

    pub(crate) fn pause(&mut self) -> StepAction {
        self.count_step();
        let others = self.other_threads();
        if others.is_empty() {
            return StepAction::Continue;
        }
        let next = others[self.choose(others.len(), 1)];
        if next != others[0] {
            let me = self.current_thread;
            self.schedule
                .push(format!("thread {next} while {me} waits"));
        }
        self.next_thread = Some(next);
        StepAction::Switch
    }

    pub(crate) fn is_time_over(&mut self) -> bool {
        if !self.model.has_time {
            return false;
        }
        if self.is_last_thread() {
            return true;
        }
        let is_over = !self.has_timed_out && self.choose(2, 0) == 1;
        if is_over {
            self.has_timed_out = true;
            let me = self.current_thread;
            self.schedule.push(format!("thread {me} waits no longer"));
        }
        is_over
    }

    fn is_last_thread(&self) -> bool {
        self.other_threads().is_empty()
    }

    /// Whether a sleep may end without a wake-up.
    pub(crate) fn may_wake_unprompted(&self) -> bool {
        self.has_died || self.model.has_time && self.is_last_thread()
    }

    pub(crate) fn wake_count(&self, futex: Unit) -> u64 {
        self.wake_counts.get(&futex).copied().unwrap_or(0)
    }

    pub(crate) fn wake(&mut self, futex: Unit) {
        *self.wake_counts.entry(futex).or_default() += 1;
    }

    pub(crate) fn are_threads_running(&self) -> bool {
        self.are_threads_running
    }

    pub(crate) fn has_ended(&self, thread: usize) -> bool {
        self.ended_threads[thread]
    }

    pub(crate) fn this_thread(&self) -> usize {
        self.current_thread
    }

    /// All threads exist: chooses the first one.
    pub(crate) fn begin_threads(&mut self, count: usize) {
        assert!(count <= 8, "{count} threads are too many");
        self.ended_threads = vec![false; count];
        self.are_threads_running = true;
        let first = self.choose(count, 0);
        if first > 0 {
            self.schedule.push(format!("thread {first} begins"));
        }
        self.next_thread = Some(first);
    }

    /// The current thread has ended: chooses the next one.
    pub(crate) fn end_thread(&mut self) {
        self.ended_threads[self.current_thread] = true;
        let others = self.other_threads();
        if !others.is_empty() {
            let next = others[self.choose(others.len(), 0)];
            if next != others[0] {
                let me = self.current_thread;
                self.schedule.push(format!("thread {next} after {me}"));
            }
            self.next_thread = Some(next);
        }
    }

    pub(crate) fn finish_threads(&mut self) {
        self.are_threads_running = false;
        self.longest_steps = self.longest_steps.max(self.steps);
    }
}

/// Switches to the selected thread.
pub(crate) fn switch() {
    shuttle::thread::yield_now();
}

/// The scheduler that shuttle calls.
struct ModelScheduler;

impl Scheduler for ModelScheduler {
    fn new_execution(&mut self) -> Option<Schedule> {
        let is_there = STATE.with_borrow_mut(|state| {
            state
                .as_mut()
                .is_some_and(SearchState::start_next_execution)
        });
        is_there.then(|| Schedule::new(0))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        _is_yielding: bool,
    ) -> Option<TaskId> {
        let has = |id: TaskId| runnable.iter().any(|task| task.id() == id);
        STATE.with_borrow_mut(|state| {
            let state = state.as_mut().expect("a model runs");
            // The first task is the model itself; its threads come after it.
            let chosen = state.next_thread.map(|thread| TaskId::from(thread + 1));
            let chosen = chosen.filter(|&id| state.are_threads_running && has(id));
            if let Some(id) = chosen {
                state.current_thread = usize::from(id) - 1;
                // The model continues when the last thread has ended.
                state.next_thread = Some(state.current_thread);
                return Some(id);
            }
            let stays = current.filter(|&id| has(id));
            stays.or_else(|| runnable.first().map(|task| task.id()))
        })
    }

    fn next_u64(&mut self) -> u64 {
        0
    }
}
