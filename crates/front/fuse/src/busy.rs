//! Keeping idle processors awake while a mount is busy: those of the program that waits
//! for an answer, and of bricks on this machine, would be woken for every request.
//!
//! Who serves a request says so, which is a load of a shared word, and a store to another
//! once in [`LINGER`]. A thread looks at that as often, while there are requests, and
//! sleeps for good otherwise.

use pagemesh_base::awake::{Awake, BUSY_MIN, LINGER};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::thread::JoinHandle;

/// Nobody looks; requests are counted.
const IDLE: u8 = 0;
/// The thread looks whether requests go on.
const WATCHED: u8 = 1;
/// Processors are not kept awake at all.
const NEVER: u8 = 2;

/// Whether a mount is busy.
#[derive(Debug)]
pub(crate) struct Busy {
    state: AtomicU8,
    /// Requests since the mount was busy, up to [`BUSY_MIN`] or a few more.
    count: AtomicU32,
    /// A request came since the thread has looked.
    has_come: AtomicBool,
    is_over: AtomicBool,
}

/// The thread that keeps processors awake.
pub(crate) struct Keeper {
    busy: Arc<Busy>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// By way of this device, if any.
    pub(crate) fn start(device: Option<PathBuf>) -> io::Result<Keeper> {
        let busy = Arc::new(Busy {
            state: AtomicU8::new(if device.is_some() { IDLE } else { NEVER }),
            count: AtomicU32::new(0),
            has_come: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        });
        let keep = |device: PathBuf| {
            let busy = Arc::clone(&busy);
            let thread = std::thread::Builder::new().name("fuse-awake".into());
            thread.spawn(move || busy.keep(&device))
        };
        let thread = device.map(keep).transpose()?;
        Ok(Keeper { busy, thread })
    }

    /// For a thread that serves.
    pub(crate) fn noter(&self) -> Noter {
        Noter {
            busy: Arc::clone(&self.busy),
            keeper: self.thread.as_ref().map(|thread| thread.thread().clone()),
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.busy.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// What a thread that serves tells of requests with.
#[derive(Clone, Debug)]
pub(crate) struct Noter {
    busy: Arc<Busy>,
    keeper: Option<std::thread::Thread>,
}

impl Noter {
    /// A request has come.
    pub(crate) fn note(&self) {
        let busy = &*self.busy;
        match busy.state.load(Ordering::Relaxed) {
            IDLE => {
                let before = busy.count.fetch_add(1, Ordering::Relaxed);
                if let (BUSY_MIN, Some(keeper)) = (before + 1, &self.keeper) {
                    keeper.unpark();
                }
            }
            WATCHED if !busy.has_come.load(Ordering::Relaxed) => {
                busy.has_come.store(true, Ordering::Relaxed);
            }
            _ => {}
        }
    }
}

impl Busy {
    fn keep(&self, device: &std::path::Path) {
        while !self.is_over.load(Ordering::Relaxed) {
            if self.count.load(Ordering::Relaxed) < BUSY_MIN {
                std::thread::park();
                continue;
            }
            self.state.store(WATCHED, Ordering::Relaxed);
            let mut awake = None;
            while self.goes_on() {
                if awake.is_none() {
                    match Awake::hold(device) {
                        Ok(held) => awake = Some(held),
                        Err(cause) => {
                            tracing::debug!(%cause, ?device, "it cannot be used");
                            self.state.store(NEVER, Ordering::Relaxed);
                            return;
                        }
                    }
                }
            }
            drop(awake);
            self.count.store(0, Ordering::Relaxed);
            self.state.store(IDLE, Ordering::Relaxed);
        }
    }

    /// Whether a request comes within the time that processors are kept awake for none.
    fn goes_on(&self) -> bool {
        self.has_come.store(false, Ordering::Relaxed);
        std::thread::park_timeout(LINGER);
        self.has_come.load(Ordering::Relaxed) && !self.is_over.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note_until(noter: &Noter, is_so: impl Fn() -> bool) {
        while !is_so() {
            noter.note();
            std::thread::yield_now();
        }
    }

    #[test]
    fn processors_are_kept_awake_while_requests_go_on() {
        let dir = tempfile::tempdir().expect("a directory");
        let device = dir.path().join("device");
        std::fs::write(&device, b"").expect("written");
        let written = || std::fs::read(&device).expect("read") == [0; 4];
        let keeper = Keeper::start(Some(device.clone())).expect("a thread");
        let noter = keeper.noter();
        (1..BUSY_MIN).for_each(|_| noter.note());
        assert_eq!(
            noter.busy.state.load(Ordering::Relaxed),
            IDLE,
            "that is little"
        );
        for _ in 0..2 {
            note_until(&noter, written);
            while noter.busy.state.load(Ordering::Relaxed) != IDLE {
                std::thread::yield_now();
            }
            std::fs::write(&device, b"").expect("written");
        }
        // It ends while it is awake, too.
        note_until(&noter, written);
        drop(keeper);
    }

    #[test]
    fn nobody_is_kept_awake_without_the_right_to() {
        let dir = tempfile::tempdir().expect("a directory");
        let keeper = Keeper::start(Some(dir.path().join("none"))).expect("a thread");
        let noter = keeper.noter();
        note_until(&noter, || noter.busy.state.load(Ordering::Relaxed) == NEVER);
        noter.note();
        let keeper = Keeper::start(None).expect("nothing");
        keeper.noter().note();
    }
}
