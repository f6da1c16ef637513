//! Output: tables and progress bars for people, JSON for programs.

use crate::args::Output;
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::io::Write;

/// Prints a value as JSON, or as its text for people.
pub fn print(
    output: Output,
    value: &impl Serialize,
    people: impl FnOnce() -> String,
) -> anyhow::Result<()> {
    let text = match output {
        Output::Json => serde_json::to_string_pretty(value)?,
        Output::Table => people(),
    };
    print_text(text.trim_end())
}

/// Prints a text. A reader may close the pipe early, as `head` does.
pub fn print_text(text: &str) -> anyhow::Result<()> {
    match writeln!(std::io::stdout().lock(), "{text}") {
        Err(cause) if cause.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

/// A table without lines. A head that starts with `>` aligns its column to the right.
pub fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(NOTHING);
    table.set_header(head.iter().map(|name| name.trim_start_matches('>')));
    for (index, name) in head.iter().enumerate() {
        if name.starts_with('>')
            && let Some(column) = table.column_mut(index)
        {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for row in rows {
        table.add_row(row);
    }
    table.to_string()
}

/// Bytes for people, in powers of 1024.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut shown = count as f64;
    let mut unit = 0;
    while shown >= 1024.0 && unit + 1 < UNITS.len() {
        shown /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{count} B"),
        _ => format!("{shown:.1} {}", UNITS[unit]),
    }
}

/// A time for people.
pub fn nanos(ns: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs")];
    let unit = UNITS.iter().find(|(size, _)| ns >= *size);
    match unit {
        Some((size, unit)) => format!("{:.1} {unit}", ns as f64 / *size as f64),
        None => format!("{ns} ns"),
    }
}

/// The JSON name of an enumeration's value.
pub fn json_word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        other => format!("{other:?}"),
    }
}

/// A progress bar in bytes on standard error; hidden unless that is a terminal.
pub fn progress(what: &str) -> ProgressBar {
    let bar = ProgressBar::new(0);
    let style = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar
}
