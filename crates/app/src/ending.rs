//! How a daemon learns that it should end: a signal, or the end of standard
//! input where whoever started it said so. Signals also tell of children that
//! ended, so that nobody has to look at them again and again.

use anyhow::Context;
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::Read;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// This process should end.
    End,
    /// A child of it has ended.
    ChildEnded,
}

/// Waits for the end.
pub struct Ending {
    events: Receiver<Event>,
    tell: Sender<Event>,
}

/// Tells a daemon to end.
#[derive(Clone)]
pub struct Teller(Sender<Event>);

impl Teller {
    /// Tells it.
    pub fn end(&self) {
        // Whoever listens may have ended already.
        let _ = self.0.send(Event::End);
    }
}

impl Ending {
    /// Listens for SIGINT, SIGTERM and SIGCHLD, and for the end of standard
    /// input if `with_stdin`.
    pub fn listen(with_stdin: bool) -> anyhow::Result<Ending> {
        let (tell, events) = mpsc::channel();
        let mut signals =
            Signals::new([SIGINT, SIGTERM, SIGCHLD]).context("cannot listen for signals")?;
        let on_signal = tell.clone();
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                for signal in signals.forever() {
                    let event = match signal {
                        SIGCHLD => Event::ChildEnded,
                        _ => Event::End,
                    };
                    if on_signal.send(event).is_err() {
                        return;
                    }
                }
            })?;
        if with_stdin {
            let on_end = Teller(tell.clone());
            std::thread::Builder::new()
                .name("stdin".into())
                .spawn(move || {
                    let mut sink = [0; 64];
                    let mut stdin = std::io::stdin().lock();
                    while stdin.read(&mut sink).is_ok_and(|len| len > 0) {}
                    on_end.end();
                })?;
        }
        Ok(Ending { events, tell })
    }

    /// Another way to tell.
    pub fn teller(&self) -> Teller {
        Teller(self.tell.clone())
    }

    /// Waits for at most `limit`; true when the end was told.
    pub fn within(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        loop {
            match self.next(Some(until)) {
                Some(Event::End) => return true,
                Some(Event::ChildEnded) => {}
                None => return false,
            }
        }
    }

    /// Waits until a child ends, but not beyond `until`; true when the end was
    /// told.
    pub fn or_child(&self, until: Option<Instant>) -> bool {
        self.next(until) == Some(Event::End)
    }

    /// Waits for it.
    pub fn wait(&self) {
        while self.next(None) != Some(Event::End) {}
    }

    /// The next event; none if there is none until then. `self.tell` keeps the
    /// channel open.
    fn next(&self, until: Option<Instant>) -> Option<Event> {
        match until {
            None => self.events.recv().ok(),
            Some(until) => {
                let limit = until.saturating_duration_since(Instant::now());
                self.events.recv_timeout(limit).ok()
            }
        }
    }
}
