//! Ends a run whose case does not end.

use crate::corpus::Corpus;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a case may take. It is counted in ticks of the watching thread, so
/// that a process that was stopped meanwhile has not overrun.
const TICKS_MAX: u32 = 30;
const TICK: Duration = Duration::from_secs(1);

#[derive(Default)]
struct State {
    case: Option<Vec<u8>>,
    /// Ticks since the case began.
    ticks: u32,
    over: bool,
}

/// A thread that watches.
pub(crate) struct Watch {
    shared: Arc<(Mutex<State>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(crate) fn new(corpus: Corpus) -> Watch {
        let shared = Arc::new((Mutex::default(), Condvar::new()));
        let watched = Arc::clone(&shared);
        let thread = std::thread::spawn(move || watch(&watched, &corpus));
        Watch {
            shared,
            thread: Some(thread),
        }
    }

    pub(crate) fn begin(&self, input: &[u8]) {
        let mut state = self.shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        (state.case, state.ticks) = (Some(input.to_vec()), 0);
    }

    pub(crate) fn end(&self) {
        let mut state = self.shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.case = None;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut state = self.shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.over = true;
        drop(state);
        self.shared.1.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn watch((state, changed): &(Mutex<State>, Condvar), corpus: &Corpus) {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    while !state.over {
        let waited = changed.wait_timeout(state, TICK);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.ticks += 1;
        if let (Some(input), true) = (&state.case, state.ticks > TICKS_MAX) {
            corpus.keep_failed(input);
            eprintln!("the case does not end");
            std::process::abort();
        }
    }
}
