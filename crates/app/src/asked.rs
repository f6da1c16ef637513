//! What a process that has attached volumes does when it is asked by a signal.
//!
//! A SIGUSR1 makes it tell how its volumes are: the only place that knows of stalled
//! writes, of how far a leg's return has come, and how far a copy that follows lags. A
//! SIGUSR2 begins or stops scrubs.

use anyhow::Context;
use pagemesh_volume::{ScrubState, Volume};
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::io::Write;
use std::sync::{Arc, Weak};

/// Signals that are listened for.
pub struct Asked(Signals);

impl Asked {
    /// To be called before anything takes time: without a listener a signal ends the
    /// process.
    pub fn listen() -> anyhow::Result<Asked> {
        let signals = Signals::new([SIGUSR1, SIGUSR2]);
        Ok(Asked(signals.context("cannot listen for signals")?))
    }

    /// Does from now on what is asked for.
    pub fn obey(mut self, volumes: Vec<Weak<Volume>>) -> anyhow::Result<()> {
        let obey = move || {
            for signal in self.0.forever() {
                let present: Vec<_> = volumes.iter().filter_map(Weak::upgrade).collect();
                match signal {
                    SIGUSR2 => turn_scrubs(&present),
                    _ => tell_status(&present),
                }
            }
        };
        let thread = std::thread::Builder::new().name("status".into());
        thread.spawn(obey)?;
        Ok(())
    }
}

/// Writes the status of each volume to standard output.
fn tell_status(volumes: &[Arc<Volume>]) {
    let mut out = std::io::stdout().lock();
    for status in volumes.iter().filter_map(|volume| volume.status()) {
        let told = serde_json::to_string(&status).map(|line| writeln!(out, "{line}"));
        if let Err(cause) = told.map_err(std::io::Error::from).and_then(|told| told) {
            tracing::warn!(%cause, "the status was not written");
        }
    }
}

/// Stops the scrubs that are under way; if there are none, begins one of each
/// volume, or goes on with it.
fn turn_scrubs(volumes: &[Arc<Volume>]) {
    let runs = |volume: &Volume| {
        let status = volume.status();
        status.is_some_and(|status| status.scrub.state == ScrubState::Running)
    };
    match volumes.iter().any(|volume| runs(volume)) {
        true => volumes.iter().for_each(|volume| volume.stop_scrub()),
        false => volumes.iter().for_each(|volume| volume.start_scrub()),
    }
}
