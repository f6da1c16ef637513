//! Storage of fuzz inputs, and the environment variables of a run.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{env, fs};

/// The stored inputs of a target, one file each.
#[derive(Clone, Debug)]
pub(crate) struct Corpus(PathBuf);

impl Corpus {
    pub(crate) fn new(manifest_dir: &str, name: &str) -> Corpus {
        Corpus(Path::new(manifest_dir).join("fuzz").join(name))
    }

    /// Every stored input, in the order of the file names.
    pub(crate) fn load(&self) -> Vec<Vec<u8>> {
        let Ok(entries) = fs::read_dir(&self.0) else {
            return Vec::new();
        };
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        let read = |path| fs::read(&path).unwrap_or_else(|cause| panic!("{path:?}: {cause}"));
        paths.into_iter().map(read).collect()
    }

    pub(crate) fn keep_if_requested(&self, what: &str, input: &[u8]) {
        if env::var_os("PAGEMESH_FUZZ_KEEP").is_some() {
            self.keep(what, input);
        }
    }

    /// Stores an input that failed and prints the command that runs it again.
    pub(crate) fn keep_failed(&self, input: &[u8]) {
        let path = self.keep("failed", input);
        let target = self.0.file_name().unwrap_or_default();
        eprintln!(
            "the input failed; to run it again: PAGEMESH_FUZZ_INPUT={} cargo test --workspace fuzz_{}",
            path.display(),
            target.display()
        );
    }

    fn keep(&self, what: &str, input: &[u8]) -> PathBuf {
        let mut hasher = DefaultHasher::new();
        input.hash(&mut hasher);
        let path = self.0.join(format!("{what}-{:016x}", hasher.finish()));
        let written = fs::create_dir_all(&self.0).and_then(|()| fs::write(&path, input));
        if let Err(cause) = written {
            eprintln!(
                "cannot write {}: {cause}; the input: {input:02x?}",
                path.display()
            );
        }
        path
    }
}

/// The single input to run, if one is given.
pub(crate) fn single_input() -> Option<Vec<u8>> {
    let path = PathBuf::from(env::var_os("PAGEMESH_FUZZ_INPUT")?);
    Some(fs::read(&path).unwrap_or_else(|cause| panic!("{path:?}: {cause}")))
}

/// Duration of a long run in seconds; none: a short run.
pub(crate) fn run_seconds() -> Option<u64> {
    env_number("PAGEMESH_FUZZ_SECONDS")
}

/// The seed of the mutations: fixed in a short run, different each time in a long one.
#[expect(
    clippy::disallowed_methods,
    reason = "only the seed depends on the clock"
)]
pub(crate) fn run_seed() -> u64 {
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    env_number("PAGEMESH_FUZZ_SEED").unwrap_or_else(|| match run_seconds() {
        Some(_) => now().map_or(0, |since| since.as_nanos() as u64),
        None => 0,
    })
}

fn env_number(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text} is not a number")),
    )
}
