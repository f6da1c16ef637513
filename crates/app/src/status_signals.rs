//! Status signals of a process with attached volumes.
//!
//! On SIGUSR1 the process prints the status of its volumes. Only this process knows stalled writes,
//! the progress of resyncs and the lag of an asynchronous copy. SIGUSR2 starts or stops scrubs.

use anyhow::Context;
use pagemesh_volume::{ScrubState, Volume};
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::io::Write;
use std::sync::{Arc, Weak};

/// The registered signals.
pub struct StatusSignals(Signals);

impl StatusSignals {
    /// Registers the signals. Call it before any slow operation: an unregistered signal would kill
    /// the process.
    pub fn listen() -> anyhow::Result<StatusSignals> {
        let signals = Signals::new([SIGUSR1, SIGUSR2]);
        Ok(StatusSignals(signals.context("cannot listen for signals")?))
    }

    /// Handles the signals from now on, in a thread.
    pub fn handle(mut self, volumes: Vec<Weak<Volume>>) -> anyhow::Result<()> {
        let obey = move || {
            for signal in self.0.forever() {
                let present: Vec<_> = volumes.iter().filter_map(Weak::upgrade).collect();
                match signal {
                    SIGUSR2 => toggle_scrubs(&present),
                    _ => print_status(&present),
                }
            }
        };
        let thread = std::thread::Builder::new().name("status".into());
        thread.spawn(obey)?;
        Ok(())
    }
}

/// Writes the status of each volume to standard output.
fn print_status(volumes: &[Arc<Volume>]) {
    let mut out = std::io::stdout().lock();
    for status in volumes.iter().filter_map(|volume| volume.status()) {
        let told = serde_json::to_string(&status).map(|line| writeln!(out, "{line}"));
        if let Err(cause) = told.map_err(std::io::Error::from).and_then(|told| told) {
            tracing::warn!(%cause, "the status was not written");
        }
    }
}

/// Stops the running scrubs; if none runs, starts or resumes a scrub of each volume.
fn toggle_scrubs(volumes: &[Arc<Volume>]) {
    let runs = |volume: &Volume| {
        let status = volume.status();
        status.is_some_and(|status| status.scrub.state == ScrubState::Running)
    };
    match volumes.iter().any(|volume| runs(volume)) {
        true => volumes.iter().for_each(|volume| volume.stop_scrub()),
        false => volumes.iter().for_each(|volume| volume.start_scrub()),
    }
}
