//! Shutdown of a daemon: by a signal or, on request, by the end of standard input. Signals also
//! report exited children, so that a supervisor need not poll.

use crate::service;
use anyhow::Context;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::Read;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// An event that the daemon waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShutdownEvent {
    /// This process must end.
    End,
    /// A child process has exited.
    ChildEnded,
    /// A thread of this process reports an event.
    Notice,
}

/// Receives shutdown events.
pub struct Shutdown {
    events: Receiver<ShutdownEvent>,
    sender: Sender<ShutdownEvent>,
}

/// Triggers the shutdown of a daemon.
#[derive(Clone)]
pub struct ShutdownTrigger(Sender<ShutdownEvent>);

impl ShutdownTrigger {
    /// Triggers the shutdown.
    pub fn trigger(&self) {
        // The receiver may have ended already.
        let _ = self.0.send(ShutdownEvent::End);
    }
}

/// Whether this process ignores SIGHUP: proc_pid_status(5).
fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    is_ignored(&status, SIGHUP)
}

fn is_ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|it| it.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|it| u64::from_str_radix(it.trim(), 16).ok());
    mask.is_some_and(|mask| (mask >> (signal - 1)) & 1 == 1)
}

/// Wakes the thread that waits for the shutdown of a daemon.
#[derive(Clone)]
pub struct Waker(Sender<ShutdownEvent>);

impl Waker {
    /// Ends one [`Shutdown::wait_or_notice`].
    pub fn wake(&self) {
        // The receiver may have ended already.
        let _ = self.0.send(ShutdownEvent::Notice);
    }
}

impl Shutdown {
    /// Listens for SIGINT, SIGTERM, SIGHUP and SIGCHLD, and for the end of standard
    /// input if `with_stdin`. SIGHUP stays ignored if it is, as under nohup(1).
    pub fn listen(with_stdin: bool) -> anyhow::Result<Shutdown> {
        let hangup = (!is_hangup_ignored()).then_some(SIGHUP);
        Self::listen_with(with_stdin, hangup)
    }

    /// As [`Shutdown::listen`], without SIGHUP: it has another meaning for this process.
    pub fn listen_without_hangup(with_stdin: bool) -> anyhow::Result<Shutdown> {
        Self::listen_with(with_stdin, None)
    }

    fn listen_with(with_stdin: bool, hangup: Option<i32>) -> anyhow::Result<Shutdown> {
        let (tell, events) = mpsc::channel();
        let watched = [SIGINT, SIGTERM, SIGCHLD].into_iter().chain(hangup);
        let mut signals = Signals::new(watched).context("cannot listen for signals")?;
        let on_signal = tell.clone();
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                for signal in signals.forever() {
                    let event = match signal {
                        SIGCHLD => ShutdownEvent::ChildEnded,
                        _ => ShutdownEvent::End,
                    };
                    if on_signal.send(event).is_err() {
                        return;
                    }
                }
            })?;
        if with_stdin {
            let on_end = ShutdownTrigger(tell.clone());
            std::thread::Builder::new()
                .name("stdin".into())
                .spawn(move || {
                    let mut sink = [0; 64];
                    let mut stdin = std::io::stdin().lock();
                    while stdin.read(&mut sink).is_ok_and(|len| len > 0) {}
                    on_end.trigger();
                })?;
        }
        Ok(Shutdown {
            events,
            sender: tell,
        })
    }

    /// A shutdown that only its triggers begin, for a part of this process.
    pub fn of_part() -> Shutdown {
        let (sender, events) = mpsc::channel();
        Shutdown { events, sender }
    }

    /// Another trigger of this shutdown.
    pub fn trigger(&self) -> ShutdownTrigger {
        ShutdownTrigger(self.sender.clone())
    }

    /// A waker of the thread that waits for this shutdown.
    pub fn waker(&self) -> Waker {
        Waker(self.sender.clone())
    }

    /// Waits for the shutdown or a notice; returns true on shutdown.
    pub fn wait_or_notice(&self) -> bool {
        loop {
            match self.next_event(None) {
                Some(ShutdownEvent::ChildEnded) => {}
                event => return event == Some(ShutdownEvent::End),
            }
        }
    }

    /// Waits for at most `limit`; returns true on shutdown.
    pub fn wait_for(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        loop {
            match self.next_event(Some(until)) {
                Some(ShutdownEvent::End) => return true,
                Some(ShutdownEvent::ChildEnded | ShutdownEvent::Notice) => {}
                None => return false,
            }
        }
    }

    /// Waits until a child exits, at most until `until`; returns true on shutdown.
    pub fn wait_for_child(&self, until: Option<Instant>) -> bool {
        self.next_event(until) == Some(ShutdownEvent::End)
    }

    /// Waits for the shutdown.
    pub fn wait(&self) {
        while self.next_event(None) != Some(ShutdownEvent::End) {}
    }

    /// The next event; `None` after `until`. `self.sender` keeps the channel open.
    fn next_event(&self, until: Option<Instant>) -> Option<ShutdownEvent> {
        let event = match until {
            None => self.events.recv().ok(),
            Some(until) => {
                let limit = until.saturating_duration_since(Instant::now());
                self.events.recv_timeout(limit).ok()
            }
        };
        if event == Some(ShutdownEvent::End) {
            service::notify_stopping();
        }
        event
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_status() {
        let status = "Name:\tpagemesh\nSigBlk:\t0000000000000001\nSigIgn:\t0000000000001001\n";
        assert!(is_ignored(status, SIGHUP));
        assert!(!is_ignored(status, SIGTERM));
        assert!(!is_ignored("SigIgn:\t0000000000001000\n", SIGHUP));
        assert!(!is_ignored("", SIGHUP));
    }
}
