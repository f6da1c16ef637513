//! Seeded mutation of a stored corpus, for the tests of decoders.
//!
//! A [`FuzzTarget`] is a test. It feeds a decoder with its seeds (the output of real encoders),
//! with the inputs stored in `fuzz/NAME/` of its crate, and with mutations of both. An input with a
//! new outcome is mutated further, so the search goes where the decoder distinguishes inputs.
//!
//! ```text
//! cargo test --workspace fuzz_                       every target, briefly
//! cargo xtask fuzz --seconds 600 --target TARGET     one target, for long
//! PAGEMESH_FUZZ_INPUT=FILE cargo test --workspace fuzz_TARGET
//! ```
//!
//! `PAGEMESH_FUZZ_SEED` chooses other mutations; `PAGEMESH_FUZZ_KEEP=1` writes inputs with new
//! outcomes into the corpus. A failing input is written there too, as `failed-…`: it stays, as the
//! regression test of its fix.
//!
//! [`image`] stores whole files of old formats.
//!
//! Invariants: a short run with the same seed, corpus and code gives the same result. A case that
//! does not end is a failure. Only tests use this crate.

#![forbid(unsafe_code)]

mod corpus;
pub mod image;
mod mutation;
mod random;
mod watchdog;

pub use random::Random;

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

/// Maximum number of inputs that are mutated further; each of more would be chosen too rarely.
const POPULATION_MAX: usize = 1024;

/// Corrects checksums and lengths of a mutated input, so that the decoder gets past them.
pub type Fixup = fn(&mut [u8], &mut Random);

/// A decoder under test.
pub struct FuzzTarget {
    name: &'static str,
    corpus: corpus::Corpus,
    cases: u32,
    bytes_max: usize,
    seeds: Vec<Vec<u8>>,
    fixup: Fixup,
}

impl FuzzTarget {
    /// A target with its corpus in `fuzz/NAME` of the crate at `env!("CARGO_MANIFEST_DIR")`.
    #[must_use]
    pub fn new(name: &'static str, manifest_dir: &str) -> FuzzTarget {
        FuzzTarget {
            name,
            corpus: corpus::Corpus::new(manifest_dir, name),
            cases: 2000,
            bytes_max: 4096,
            seeds: Vec::new(),
            fixup: |_, _| {},
        }
    }

    /// Number of mutated inputs in a short run.
    #[must_use]
    pub fn cases(mut self, cases: u32) -> FuzzTarget {
        self.cases = cases;
        self
    }

    /// Maximum size of a mutated input in bytes.
    #[must_use]
    pub fn bytes_max(mut self, bytes_max: usize) -> FuzzTarget {
        self.bytes_max = bytes_max;
        self
    }

    /// Adds seeds: the output of real encoders.
    #[must_use]
    pub fn seeds(mut self, seeds: impl IntoIterator<Item = Vec<u8>>) -> FuzzTarget {
        self.seeds.extend(seeds);
        self
    }

    /// Sets the [`Fixup`]; it applies to seven of eight mutated inputs.
    #[must_use]
    pub fn fixup(mut self, reseal: Fixup) -> FuzzTarget {
        self.fixup = reseal;
        self
    }

    /// Runs the target. A case panics if a promise is broken, and returns its outcome: the
    /// decoder's result for the input, without its numbers.
    ///
    /// # Panics
    /// If the case panics.
    pub fn run<O: Hash>(self, mut case: impl FnMut(&[u8]) -> O) {
        let watch = watchdog::CaseWatchdog::new(self.corpus.clone());
        let mut run = |bytes: &[u8]| {
            watch.begin(bytes);
            let outcome = catch_unwind(AssertUnwindSafe(|| case(bytes)));
            watch.end();
            match outcome {
                Ok(outcome) => digest(&outcome),
                Err(panic) => {
                    self.corpus.keep_failed(bytes);
                    resume_unwind(panic)
                }
            }
        };
        if let Some(input) = corpus::single_input() {
            run(&input);
            return;
        }
        let mut seen = HashSet::new();
        let mut population = Vec::new();
        for seed in &self.seeds {
            seen.insert(run(seed));
            population.push(seed.clone());
            self.corpus.keep_if_requested("seed", seed);
        }
        for kept in self.corpus.load() {
            seen.insert(run(&kept));
            population.push(kept);
        }
        assert!(!population.is_empty(), "{} has no input", self.name);
        let seed = corpus::run_seed();
        println!("fuzz target {}, PAGEMESH_FUZZ_SEED={seed}", self.name);
        let mut random = Random::new(seed ^ digest(&self.name));
        let until =
            corpus::run_seconds().map(|seconds| Instant::now() + Duration::from_secs(seconds));
        let mut done = 0u64;
        while until.map_or(done < u64::from(self.cases), |until| Instant::now() < until) {
            let mut input = random.choose(&population).clone();
            let other = random.choose(&population);
            mutation::mutate(&mut input, other, self.bytes_max, &mut random);
            if random.below(8) > 0 {
                (self.fixup)(&mut input, &mut random);
            }
            if seen.insert(run(&input)) && population.len() < POPULATION_MAX {
                self.corpus.keep_if_requested("find", &input);
                population.push(input);
            }
            done += 1;
        }
        println!(
            "{}: {done} mutated inputs, {} outcomes",
            self.name,
            seen.len()
        );
    }
}

fn digest(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Runs `work`; returns its result and the peak of bytes that it had allocated in this thread.
pub fn measure_allocation<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let mut result = None;
    let info = allocation_counter::measure(|| result = Some(work()));
    match result {
        Some(result) => (result, info.bytes_max),
        None => unreachable!("the work was done"),
    }
}

/// Bytes that an allocation takes beyond the requested ones: glibc has a header of 8 bytes, and rounds up to 16.
pub const ALLOCATION_EXTRA_BYTES: i64 = 16;

/// Runs `work`; returns its result and the bytes that this thread had allocated in it and not freed, with
/// [`ALLOCATION_EXTRA_BYTES`] for each allocation.
pub fn measure_retained<T>(work: impl FnOnce() -> T) -> (T, i64) {
    let mut result = None;
    let info = allocation_counter::measure(|| result = Some(work()));
    let extra = ALLOCATION_EXTRA_BYTES * info.count_current;
    match result {
        Some(result) => (result, info.bytes_current + extra),
        None => unreachable!("the work was done"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    fn test_target() -> FuzzTarget {
        FuzzTarget::new("nothing", env!("CARGO_MANIFEST_DIR")).seeds([b"seed".to_vec()])
    }

    fn collect_inputs() -> Vec<Vec<u8>> {
        let inputs = RefCell::new(Vec::new());
        test_target().cases(500).bytes_max(64).run(|bytes| {
            inputs.borrow_mut().push(bytes.to_vec());
            bytes.first().copied()
        });
        inputs.into_inner()
    }

    #[test]
    fn run_is_repeatable_and_keeps_its_limits() {
        let first = collect_inputs();
        assert_eq!(first.len(), 501);
        assert!(first.iter().all(|input| input.len() <= 64));
        assert!(first == collect_inputs(), "another run");
        let different: HashSet<_> = first.iter().collect();
        assert!(different.len() > 300, "{} inputs", different.len());
    }

    /// Only a chain of lucky mutations reaches the condition; the search finds it because each step
    /// has an outcome of its own.
    #[test]
    fn outcomes_lead_the_search() {
        let best = RefCell::new(0);
        test_target().cases(60_000).run(|bytes| {
            let same = bytes.iter().zip(b"frames").take_while(|(a, b)| a == b);
            let same = same.count();
            let mut best = best.borrow_mut();
            *best = same.max(*best);
            same
        });
        assert_eq!(best.into_inner(), 6);
    }

    #[test]
    fn allocated_bytes_are_counted() {
        let (len, bytes) = measure_allocation(|| vec![1u8; 5000].len());
        assert_eq!(len, 5000);
        assert!((5000..6000).contains(&bytes), "{bytes}");
    }

    #[test]
    fn freed_bytes_are_not_retained() {
        let (kept, bytes) = measure_retained(|| {
            drop(vec![1u8; 5000]);
            vec![1u8; 300]
        });
        assert_eq!(bytes, 300 + ALLOCATION_EXTRA_BYTES);
        assert_eq!(measure_retained(|| drop(kept)).1, -bytes);
    }
}
