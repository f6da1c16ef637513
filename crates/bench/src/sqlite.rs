//! Inserts by SQLite's shell, each a transaction that is durable when it is acknowledged:
//! `journal_mode=wal`, `synchronous=full`. Databases lie on mounts and, last, on a peer.
//!
//! In each round every place gets the same inserts, into a database of its own that exists since
//! the first round; the first place moves on by one. The time covers the whole program.

use crate::error::BenchError;
use crate::mirror::MountPlace;
use crate::process::{self, ChildProcess, command_killed_with_thread};
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
use serde_json::json;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

const PACKAGE: &str = "sqlite3";
/// Longest time of one program.
const TOOL_TIME_MAX: Duration = Duration::from_secs(120);

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct SqliteOptions {
    /// Rounds, at least [`crate::session::ROUNDS_MIN`].
    pub rounds: usize,
    /// Inserts of one round at one place.
    pub inserts: u32,
    /// Approximate bytes of a row.
    pub row_bytes: u32,
}

/// The input of the shell.
fn insert_script(options: &SqliteOptions) -> String {
    let head = "pragma journal_mode=wal;\npragma synchronous=full;\n\
        create table if not exists rows (id integer primary key, at integer, text blob);\n";
    let (inserts, bytes) = (options.inserts, options.row_bytes);
    let insert = |n| format!("insert into rows (at, text) values ({n}, randomblob({bytes}));\n");
    let inserts: String = (0..inserts).map(insert).collect();
    format!("{head}{inserts}")
}

/// Inserts per second.
fn inserts_per_second(
    place: &MountPlace,
    script: &Path,
    options: &SqliteOptions,
) -> Result<f64, BenchError> {
    let cannot = BenchError::system("read the script of sqlite3");
    let input = File::open(script).map_err(cannot)?;
    let database = place.dir.join("database");
    let mut command = match place.prefix.split_first() {
        None => command_killed_with_thread("sqlite3"),
        Some((first, rest)) => {
            let mut command = command_killed_with_thread(first);
            command.args(rest).arg("sqlite3");
            command
        }
    };
    command
        .args(["-batch", "-bail"])
        .arg(database)
        .stdin(input)
        .stdout(Stdio::null());
    let start = Instant::now();
    ChildProcess::start(&format!("sqlite3 on {}", place.name), command)?
        .wait_for_success(TOOL_TIME_MAX)?;
    Ok(f64::from(options.inserts) / start.elapsed().as_secs_f64())
}

/// Runs the comparison; see the module. The first place has one copy.
///
/// # Errors
/// If an option is invalid, or sqlite3 is missing or fails.
pub fn run_sqlite(places: &[MountPlace], options: &SqliteOptions) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    if places.len() < 2 || options.inserts == 0 {
        let text = "there is nothing to compare; name at least two places and one insert";
        return Err(BenchError::Option(text.into()));
    }
    process::require_program("sqlite3", PACKAGE)?;
    let cannot = || BenchError::system("write a script for sqlite3");
    let mut file = tempfile::NamedTempFile::new().map_err(cannot())?;
    let text = insert_script(options);
    file.write_all(text.as_bytes()).map_err(cannot())?;
    let mut rates = vec![Vec::new(); places.len()];
    for round in 0..options.rounds {
        for turn in 0..places.len() {
            let at = (turn + round) % places.len();
            rates[at].push(inserts_per_second(&places[at], file.path(), options)?);
        }
        eprintln!("round {} of {} is done", round + 1, options.rounds);
    }
    Ok(report(places, options, &rates))
}

fn report(places: &[MountPlace], options: &SqliteOptions, rates: &[Vec<f64>]) -> Report {
    let title = "inserts by SQLite, durable one by one, all in one alternating run";
    let last = places.len() - 1;
    let to_first = format!("to {}", places[0].name);
    let to_last = format!("to {}", places[last].name);
    let columns = [
        ("place", ""),
        ("inserts", "1/s"),
        (to_first.as_str(), "×"),
        (to_last.as_str(), "×"),
    ];
    let mut report = Report::new("sqlite", title, &places[0].class, &columns);
    for (place, of_place) in places.iter().zip(rates) {
        report.add_row(vec![
            ReportCell::from(place.name.as_str()),
            median(of_place).into(),
            median_ratio(of_place, &rates[0]).into(),
            median_ratio(of_place, &rates[last]).into(),
        ]);
    }
    report.add_note(format!(
        "medians of {} alternating rounds of {} inserts of {} bytes by one program, which \
         starts and ends in that time; journal_mode=wal, synchronous=full; ratios are medians \
         of the rounds' own",
        options.rounds, options.inserts, options.row_bytes
    ));
    report.raw = json!({
        "places": places.iter().map(|place| &place.name).collect::<Vec<_>>(),
        "inserts_per_s_by_place_round": rates,
    });
    report
}
