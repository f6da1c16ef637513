//! How a daemon learns that it should end: a signal, or the end of standard
//! input where whoever started it said so.

use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::Read;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// Waits for the end.
pub struct Ending {
    told: Receiver<()>,
    tell: Sender<()>,
}

impl Ending {
    /// Listens for SIGINT and SIGTERM, and for the end of standard input if
    /// `with_stdin`.
    pub fn listen(with_stdin: bool) -> anyhow::Result<Ending> {
        let (tell, told) = mpsc::channel();
        let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot listen for signals")?;
        let on_signal = tell.clone();
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                for _ in signals.forever() {
                    if on_signal.send(()).is_err() {
                        return;
                    }
                }
            })?;
        if with_stdin {
            let on_end = tell.clone();
            std::thread::Builder::new()
                .name("stdin".into())
                .spawn(move || {
                    let mut sink = [0; 64];
                    let mut stdin = std::io::stdin().lock();
                    while stdin.read(&mut sink).is_ok_and(|len| len > 0) {}
                    // Whoever listens may have ended already.
                    let _ = on_end.send(());
                })?;
        }
        Ok(Ending { told, tell })
    }

    /// Another way to tell.
    pub fn teller(&self) -> Sender<()> {
        self.tell.clone()
    }

    /// Waits for at most `limit`; true when the end was told.
    pub fn within(&self, limit: Duration) -> bool {
        !matches!(
            self.told.recv_timeout(limit),
            Err(RecvTimeoutError::Timeout)
        )
    }

    /// Waits for it.
    pub fn wait(&self) {
        // An error means that nobody can tell any more.
        let _ = self.told.recv();
    }
}
