//! `pagemesh events`.

use crate::args::ManagerArgs;
use crate::args::Output;
use crate::client::manager_client;
use crate::output::{self, json_word, table, time_text};
use clap::{Args, Subcommand, ValueEnum};
use pagemesh_manage::wire::{EventFilter, EventGap, EventRecord, Hello, Severity, SubjectKind};
use pagemesh_manage::{ManagerClient, ManagerError};
use std::io::{ErrorKind, Write};
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Events that the command shows without `--since`.
const SHOWN: usize = 100;
/// Events of one request.
const PAGE: usize = 1000;
/// Pause before the next attempt to reach the manager.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Show, follow and acknowledge the events of the cluster.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct EventsArgs {
    /// Command instead of the list.
    #[command(subcommand)]
    pub command: Option<EventsCommand>,
    /// Print new events until the command is interrupted. It waits for a manager that restarts, and
    /// then goes on where it was. With `--output json` each event is one line.
    #[arg(long)]
    pub follow: bool,
    /// Events of this severity and of higher ones.
    #[arg(long, value_enum)]
    pub severity: Option<SeverityArg>,
    /// Events about this brick, volume or token: its name, or as in `volume:NAME`.
    #[arg(long, value_name = "NAME")]
    pub subject: Option<String>,
    /// Events since this time ago, as `90s`, `30m`, `12h` or `7d`. By default the last 100 events.
    #[arg(long, value_name = "TIME")]
    pub since: Option<Age>,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Commands about single events.
#[derive(Subcommand)]
pub enum EventsCommand {
    /// Acknowledge an event, so that the list shows that an operator takes care of it.
    Acknowledge {
        /// Number of the event.
        seq: u64,
    },
}

/// The severity of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SeverityArg {
    /// Nothing to do.
    Info,
    /// Redundancy or access is reduced.
    Warning,
    /// Data cannot be used, or acknowledged writes may be lost.
    Critical,
}

impl From<SeverityArg> for Severity {
    fn from(severity: SeverityArg) -> Severity {
        match severity {
            SeverityArg::Info => Severity::Info,
            SeverityArg::Warning => Severity::Warning,
            SeverityArg::Critical => Severity::Critical,
        }
    }
}

/// A time ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Age(Duration);

impl FromStr for Age {
    type Err = String;

    fn from_str(text: &str) -> Result<Age, String> {
        let wrong = || "use a number and a unit, as 90s, 30m, 12h or 7d".to_owned();
        let interval: crate::args::Interval = text.parse().map_err(|_| wrong())?;
        interval.0.map(Age).ok_or_else(wrong)
    }
}

/// Shows, follows or acknowledges events.
pub fn run(args: &EventsArgs) -> anyhow::Result<()> {
    let manager = manager_client(&args.client)?;
    if let Some(EventsCommand::Acknowledge { seq }) = args.command {
        let event = manager.acknowledge_event(seq)?;
        return output::print(args.client.output, &event, || {
            let by = event.acknowledged.as_ref().map_or("-", |it| it.by.as_str());
            format!("event {seq} is acknowledged by {by}")
        });
    }
    let filter = EventFilter {
        severity: args.severity.map(Severity::from),
        subject: args.subject.clone(),
        ..EventFilter::default()
    };
    if args.follow {
        return follow(&manager, args, &filter);
    }
    let events = list(&manager, args, &filter)?;
    output::print(args.client.output, &events, || event_table(&events))
}

/// The last events, or all since a time.
fn list(
    manager: &ManagerClient,
    args: &EventsArgs,
    filter: &EventFilter,
) -> Result<Vec<EventRecord>, ManagerError> {
    let Some(Age(age)) = args.since else {
        return manager.events(&EventFilter {
            last: Some(SHOWN),
            ..filter.clone()
        });
    };
    let from_ms = unix_ms().saturating_sub(age.as_millis() as u64);
    let mut found = Vec::new();
    let mut after = None;
    loop {
        let page = manager.events(&EventFilter {
            after,
            limit: Some(PAGE),
            ..filter.clone()
        })?;
        after = page.last().map(|event| event.seq);
        let is_last = page.len() < PAGE;
        found.extend(
            page.into_iter()
                .filter(|event| event.time_unix_ms >= from_ms),
        );
        if is_last {
            return Ok(found);
        }
    }
}

/// Milliseconds since 1970.
#[expect(
    clippy::disallowed_methods,
    reason = "events have the time of clocks on walls"
)]
fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

/// Prints the last events, then new ones, until standard output is closed.
fn follow(manager: &ManagerClient, args: &EventsArgs, filter: &EventFilter) -> anyhow::Result<()> {
    // The number comes first: an event that follows it is in the list or in the stream.
    let newest = manager.events(&EventFilter {
        last: Some(1),
        ..EventFilter::default()
    })?;
    let mut seen = newest.last().map_or(0, |event| event.seq);
    let mut reported_gap = 0;
    for event in list(manager, args, filter)? {
        seen = seen.max(event.seq);
        if !print_line(args.client.output, &event)? {
            return Ok(());
        }
    }
    let mut is_waiting = false;
    loop {
        match manager.watch(Some(seen)) {
            Ok(stream) => {
                is_waiting = false;
                if !print_stream(stream, args, filter, (&mut seen, &mut reported_gap))? {
                    return Ok(());
                }
            }
            Err(error @ ManagerError::Unreachable { .. }) => {
                if !is_waiting {
                    eprintln!("waiting: {error}");
                }
                is_waiting = true;
                std::thread::sleep(RETRY_PAUSE);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Prints the events of a stream to its end; false once standard output is closed. The last argument
/// has the number of the last event, and the end of the last gap that was reported.
fn print_stream(
    mut stream: pagemesh_manage::EventStream,
    args: &EventsArgs,
    filter: &EventFilter,
    (seen, reported_gap): (&mut u64, &mut u64),
) -> anyhow::Result<bool> {
    while let Some(message) = stream.next_message() {
        match message.kind.as_str() {
            "hello" => {
                let hello: Hello = serde_json::from_str(&message.data)?;
                if hello.last_seq < *seen {
                    let last = hello.last_seq;
                    eprintln!(
                        "the manager has another store: its last event is {last}, not {seen}"
                    );
                    *seen = last;
                }
            }
            "gap" => {
                let EventGap { after, up_to } = serde_json::from_str(&message.data)?;
                if up_to > *reported_gap {
                    eprintln!(
                        "events between {after} and {up_to} are missing: the history of the manager had no room \
                         for them"
                    );
                    *reported_gap = up_to;
                }
            }
            "event" => {
                let event: EventRecord = serde_json::from_str(&message.data)?;
                let is_new = event.seq > *seen;
                *seen = event.seq.max(*seen);
                if is_new && filter.matches(&event) && !print_line(args.client.output, &event)? {
                    return Ok(false);
                }
            }
            _ => {}
        }
    }
    Ok(true)
}

/// Prints an event on one line; false if standard output is closed.
fn print_line(output: Output, event: &EventRecord) -> anyhow::Result<bool> {
    let line = match output {
        Output::Json => serde_json::to_string(event)?,
        Output::Table => {
            let EventRecord {
                seq, kind, subject, ..
            } = event;
            format!(
                "{seq} {} {} {} {}: {}",
                time_text(event.time_unix_ms),
                event.severity.name(),
                json_word(kind),
                subject.name,
                text_with_count(event)
            )
        }
    };
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Err(cause) if cause.kind() == ErrorKind::BrokenPipe => Ok(false),
        written => Ok(written.map(|()| true)?),
    }
}

fn text_with_count(event: &EventRecord) -> String {
    match event.count {
        0 | 1 => event.text.clone(),
        count => format!(
            "{} ({count} times since {})",
            event.text,
            time_text(event.first_unix_ms)
        ),
    }
}

fn event_table(events: &[EventRecord]) -> String {
    if events.is_empty() {
        return "no events".into();
    }
    let rows = events.iter().map(|event| {
        let subject = match event.subject.kind {
            SubjectKind::Manager => "manager".to_owned(),
            kind => format!("{} {}", json_word(&kind), event.subject.name),
        };
        let acknowledged = event.acknowledged.as_ref();
        vec![
            event.seq.to_string(),
            time_text(event.time_unix_ms),
            event.severity.name().to_owned(),
            json_word(&event.kind),
            subject,
            acknowledged.map_or_else(|| "-".into(), |it| it.by.clone()),
            text_with_count(event),
        ]
    });
    let head = [
        ">SEQ",
        "TIME",
        "SEVERITY",
        "KIND",
        "SUBJECT",
        "ACKNOWLEDGED BY",
        "EVENT",
    ];
    table(&head, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn age_needs_number_and_unit() {
        assert_eq!("90s".parse(), Ok(Age(Duration::from_secs(90))));
        assert_eq!("7d".parse(), Ok(Age(Duration::from_secs(7 * 86_400))));
        for wrong in ["", "never", "7", "-1d", "1w", "0s"] {
            assert!(wrong.parse::<Age>().is_err(), "{wrong}");
        }
    }
}
