//! `pagemesh top`: bricks, volumes, file systems and direct clients with their live figures.
//!
//! Invariants: one thread asks the manager, so a slow manager never blocks the keys. The screen is
//! restored at every end, a panic included.

mod sample;
mod screen;
mod state;
#[cfg(test)]
mod tests;

use crate::args::{ManagerArgs, Output};
use crate::client::manager_client;
use crate::output;
use clap::Args;
use pagemesh_manage::ManagerClient;
use ratatui::crossterm::event::{self, Event};
use sample::{Details, Sample};
use state::{Selected, TopState};
use std::io::IsTerminal;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// Show bricks, volumes, file systems and direct clients with their live figures.
///
/// Keys: Tab and Shift-Tab change the list, arrows select, s and S change the column that sorts, r
/// reverses the order, / filters by name, Enter shows the selected volume with its latency histogram
/// and stages, q quits. Without a terminal, or with `--once` or `--output json`, it prints once.
#[derive(Args)]
pub struct TopArgs {
    /// Seconds between two questions to the manager, 1 to 60.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=60))]
    pub interval: u64,
    /// Print all lists once, and end.
    #[arg(long)]
    pub once: bool,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// The answer to one round of questions.
type Round = Result<(Sample, Option<Details>), String>;

/// Shows the lists until the user quits.
pub fn run(args: &TopArgs) -> anyhow::Result<()> {
    let manager = manager_client(&args.client)?;
    let is_live = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if args.once || !is_live || args.client.output == Output::Json {
        let sample = Sample::ask(&manager)?;
        return output::print(args.client.output, &sample, || sample.to_text());
    }
    let interval = Duration::from_secs(args.interval);
    let (select, selected) = mpsc::channel();
    let (send, rounds) = mpsc::channel();
    let asked = manager.clone();
    std::thread::Builder::new()
        .name("top".into())
        .spawn(move || ask_rounds(&asked, interval, &selected, &send))?;
    let mut terminal = ratatui::try_init()?;
    let shown = show(
        &mut terminal,
        TopState::new(manager.url()),
        &rounds,
        &select,
    );
    ratatui::restore();
    shown
}

/// Asks the manager in each interval, and at once after another selection, until the screen is gone.
fn ask_rounds(
    manager: &ManagerClient,
    interval: Duration,
    selected: &Receiver<Option<Selected>>,
    send: &Sender<Round>,
) {
    let mut detail_of = None;
    loop {
        let round = Sample::ask(manager).map(|sample| {
            let details = detail_of.as_ref();
            (sample, details.and_then(|of| Details::ask(manager, of)))
        });
        if send
            .send(round.map_err(|error| format!("{error:#}")))
            .is_err()
        {
            return;
        }
        match selected.recv_timeout(interval) {
            Ok(next) => detail_of = next,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Draws and handles keys until the user quits.
fn show(
    terminal: &mut ratatui::DefaultTerminal,
    mut state: TopState,
    rounds: &Receiver<Round>,
    select: &Sender<Option<Selected>>,
) -> anyhow::Result<()> {
    /// How long a round may wait for the next look at the keys.
    const KEY_WAIT: Duration = Duration::from_millis(100);
    let mut told = None;
    loop {
        while let Ok(round) = rounds.try_recv() {
            state.take_round(round);
        }
        terminal.draw(|frame| screen::draw(frame, &state))?;
        if event::poll(KEY_WAIT)?
            && let Event::Key(key) = event::read()?
            && state.handle_key(key)
        {
            return Ok(());
        }
        let selected = state.detail_of();
        if selected != told {
            select.send(selected.clone())?;
            told = selected;
        }
    }
}
