//! Aborts a run with a case that does not end.

use crate::corpus::Corpus;
use pagemesh_base::poison::{lock, recover};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time limit of a case. It is counted in ticks of the watchdog thread, so that a process that was
/// stopped meanwhile does not exceed it.
const TICKS_MAX: u32 = 30;
const TICK: Duration = Duration::from_secs(1);

#[derive(Default)]
struct WatchdogState {
    case: Option<Vec<u8>>,
    /// Ticks since the case began.
    ticks: u32,
    is_stopped: bool,
}

/// The watchdog thread.
pub(crate) struct CaseWatchdog {
    shared: Arc<(Mutex<WatchdogState>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl CaseWatchdog {
    pub(crate) fn new(corpus: Corpus) -> CaseWatchdog {
        let shared = Arc::new((Mutex::default(), Condvar::new()));
        let watched = Arc::clone(&shared);
        let thread = std::thread::spawn(move || watch_cases(&watched, &corpus));
        CaseWatchdog {
            shared,
            thread: Some(thread),
        }
    }

    pub(crate) fn begin(&self, input: &[u8]) {
        let mut state = lock(&self.shared.0);
        (state.case, state.ticks) = (Some(input.to_vec()), 0);
    }

    pub(crate) fn end(&self) {
        let mut state = lock(&self.shared.0);
        state.case = None;
    }
}

impl Drop for CaseWatchdog {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.0);
        state.is_stopped = true;
        drop(state);
        self.shared.1.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn watch_cases((state, changed): &(Mutex<WatchdogState>, Condvar), corpus: &Corpus) {
    let mut state = lock(state);
    while !state.is_stopped {
        let waited = changed.wait_timeout(state, TICK);
        state = recover(waited).0;
        state.ticks += 1;
        if let (Some(input), true) = (&state.case, state.ticks > TICKS_MAX) {
            corpus.keep_failed(input);
            eprintln!("the case does not end within {TICKS_MAX} s");
            std::process::abort();
        }
    }
}
