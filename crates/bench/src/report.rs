//! Reports: a table with the facts that give it a meaning, as text, JSON and SVG.
//!
//! Invariants: every row has a cell per column; numbers are finite; a report has its durability
//! class and the machine. Saving never replaces an earlier run: names contain the time, and an
//! existing file is an error.

use crate::error::BenchError;
use crate::plot::Plot;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Version of the JSON format; it rises when a field changes its meaning.
pub const FORMAT: u32 = 0;

/// Facts of the machine of a run; no host name, no addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Cores available to the run.
    pub cores: usize,
    /// The model name of the processor.
    pub cpu_model: String,
    /// The kernel's release.
    pub kernel: String,
}

impl Machine {
    /// The machine of this process.
    pub fn current() -> Machine {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Machine {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            cpu_model: model_name(&info).unwrap_or("unknown").to_owned(),
            kernel: kernel.trim().to_owned(),
        }
    }
}

fn model_name(info: &str) -> Option<&str> {
    info.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == "model name")
        .map(|(_, model)| model.trim())
}

/// One column of a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportColumn {
    /// Its name.
    pub name: String,
    /// The unit; empty for names and ratios.
    pub unit: String,
}

/// One cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ReportCell {
    /// Not measured.
    Missing,
    /// A count.
    Count(u64),
    /// A measured value.
    Number(f64),
    /// A name.
    Text(String),
}

impl From<&str> for ReportCell {
    fn from(text: &str) -> ReportCell {
        ReportCell::Text(text.to_owned())
    }
}

impl From<String> for ReportCell {
    fn from(text: String) -> ReportCell {
        ReportCell::Text(text)
    }
}

impl From<u64> for ReportCell {
    fn from(count: u64) -> ReportCell {
        ReportCell::Count(count)
    }
}

impl From<f64> for ReportCell {
    fn from(number: f64) -> ReportCell {
        match number.is_finite() {
            true => ReportCell::Number(number),
            false => ReportCell::Missing,
        }
    }
}

impl From<Option<f64>> for ReportCell {
    fn from(number: Option<f64>) -> ReportCell {
        number.map_or(ReportCell::Missing, ReportCell::from)
    }
}

impl ReportCell {
    fn render(&self) -> String {
        match self {
            ReportCell::Missing => "-".to_owned(),
            ReportCell::Count(count) => group_digits(*count),
            ReportCell::Number(number) => three_digits(*number),
            ReportCell::Text(text) => text.clone(),
        }
    }
}

/// Three significant digits; whole numbers from 100 on.
fn three_digits(number: f64) -> String {
    match number.abs() {
        large if large >= 99.95 => match number < 0.0 {
            true => format!("-{}", group_digits(number.abs().round() as u64)),
            false => group_digits(number.round() as u64),
        },
        middle if middle >= 9.995 => format!("{number:.1}"),
        middle if middle >= 0.1 => format!("{number:.2}"),
        0.0 => "0".to_owned(),
        _ => format!("{number:.3}"),
    }
}

/// Groups digits: 1234567 becomes 1 234 567.
fn group_digits(count: u64) -> String {
    let digits = count.to_string();
    let mut grouped = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(' ');
        }
        grouped.push(digit);
    }
    grouped
}

/// The result of a benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The version of the format, [`FORMAT`].
    pub format: u32,
    /// The benchmark's short name, such as `session`: names the files.
    pub name: String,
    /// One line on the measurement.
    pub title: String,
    /// Durability class of the measured pools: `pmem`, `file-sync`, `process`.
    pub class: String,
    /// Creation time in seconds since 1970.
    pub unix_time_s: u64,
    /// The machine.
    pub machine: Machine,
    /// The columns of each row.
    pub columns: Vec<ReportColumn>,
    /// Medians of rounds, unless a note says otherwise.
    pub rows: Vec<Vec<ReportCell>>,
    /// Methods and caveats.
    pub notes: Vec<String>,
    /// Its charts.
    pub plots: Vec<Plot>,
    /// The figures of every round.
    pub raw: serde_json::Value,
}

impl Report {
    /// An empty report of this machine and time. Columns are names and units.
    #[expect(clippy::disallowed_methods, reason = "for people")]
    pub fn new(name: &str, title: &str, class: &str, columns: &[(&str, &str)]) -> Report {
        let column = |(name, unit): &(&str, &str)| ReportColumn {
            name: (*name).to_owned(),
            unit: (*unit).to_owned(),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Report {
            format: FORMAT,
            name: name.to_owned(),
            title: title.to_owned(),
            class: class.to_owned(),
            unix_time_s: now.map_or(0, |since| since.as_secs()),
            machine: Machine::current(),
            columns: columns.iter().map(column).collect(),
            rows: Vec::new(),
            notes: Vec::new(),
            plots: Vec::new(),
            raw: serde_json::Value::Null,
        }
    }

    /// Adds a row.
    ///
    /// # Panics
    /// If it does not have one cell per column: a defect of the benchmark.
    pub fn add_row(&mut self, row: Vec<ReportCell>) {
        assert_eq!(row.len(), self.columns.len(), "a cell per column");
        self.rows.push(row);
    }

    /// Adds a note.
    pub fn add_note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// The cell in the first row with the first cell `row`, in the column `column`.
    pub fn cell(&self, row: &str, column: &str) -> Option<&ReportCell> {
        let at = self.columns.iter().position(|c| c.name == column)?;
        let row = self.rows.iter().find(|r| r[0].render() == row)?;
        row.get(at)
    }

    /// As aligned text.
    pub fn text(&self) -> String {
        let mut table = Table::new();
        table
            .load_preset(presets::UTF8_HORIZONTAL_ONLY)
            .set_content_arrangement(ContentArrangement::Disabled)
            .set_header(self.columns.iter().map(heading));
        for row in &self.rows {
            table.add_row(row.iter().map(ReportCell::render));
        }
        for at in 0..self.columns.len() {
            let textual = self
                .rows
                .iter()
                .all(|r| matches!(r[at], ReportCell::Text(_)));
            if let (false, Some(column)) = (textual, table.column_mut(at)) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let Machine {
            cores,
            cpu_model,
            kernel,
        } = &self.machine;
        let mut text = format!(
            "{}\ndurability class: {}; {cores} cores, {cpu_model}, Linux {kernel}\n{table}\n",
            self.title, self.class
        );
        for note in &self.notes {
            writeln!(text, "- {note}").expect("a string takes everything");
        }
        text
    }

    /// As JSON, to be read again with serde.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("maps have string keys and numbers are finite")
    }

    /// Writes `NAME-CLASS-TIME.json` and an SVG per plot into `dir`, which is created if it does
    /// not exist. Returns the paths.
    ///
    /// # Errors
    /// If a file exists already or cannot be written.
    pub fn save(&self, dir: &Path) -> Result<Vec<PathBuf>, BenchError> {
        let cannot =
            |action: &str, path: &Path| BenchError::system(format!("{action} {}", path.display()));
        fs::create_dir_all(dir).map_err(cannot("make the directory", dir))?;
        let stem = format!("{}-{}-{}", self.name, self.class, self.unix_time_s);
        let mut files = vec![(dir.join(format!("{stem}.json")), self.json())];
        for (at, plot) in self.plots.iter().enumerate() {
            let facts = format!(
                "durability class {}; {} cores, {}",
                self.class, self.machine.cores, self.machine.cpu_model
            );
            files.push((dir.join(format!("{stem}-{}.svg", at + 1)), plot.svg(&facts)));
        }
        for (path, text) in &files {
            File::create_new(path)
                .and_then(|mut file| file.write_all(text.as_bytes()))
                .map_err(cannot("write", path))?;
        }
        Ok(files.into_iter().map(|(path, _)| path).collect())
    }
}

fn heading(column: &ReportColumn) -> String {
    match column.unit.as_str() {
        "" => column.name.clone(),
        unit => format!("{}\n{unit}", column.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Report {
        let mut report = Report::new("t", "A title", "process", &[("what", ""), ("time", "µs")]);
        report.machine = Machine {
            cores: 2,
            cpu_model: "Model".to_owned(),
            kernel: "6.1".to_owned(),
        };
        report.add_row(vec!["write".into(), 1234.5.into()]);
        report.add_row(vec!["read".into(), ReportCell::Missing]);
        report.add_note("medians of 5 rounds");
        report
    }

    #[test]
    fn text_is_aligned_and_carries_its_facts() {
        let text: Vec<String> = example()
            .text()
            .lines()
            .map(|l| l.trim_end().to_owned())
            .collect();
        assert_eq!(text[0], "A title");
        assert_eq!(
            text[1],
            "durability class: process; 2 cores, Model, Linux 6.1"
        );
        assert_eq!(text[3], " what     time");
        assert_eq!(text[4], "            µs");
        assert_eq!(text[6], " write   1 235");
        assert_eq!(text[8], " read        -");
        assert_eq!(
            text.last().map(String::as_str),
            Some("- medians of 5 rounds")
        );
    }

    #[test]
    fn numbers_keep_three_digits() {
        for (number, text) in [
            (0.0, "0"),
            (0.0123, "0.012"),
            (0.5, "0.50"),
            (9.99, "9.99"),
            (9.996, "10.0"),
            (99.96, "100"),
            (2_122_681.0, "2 122 681"),
            (-1500.0, "-1 500"),
        ] {
            assert_eq!(ReportCell::from(number).render(), text);
        }
        assert_eq!(ReportCell::from(f64::INFINITY), ReportCell::Missing);
    }

    #[test]
    fn json_reads_back() {
        let report = example();
        let back: Report = serde_json::from_str(&report.json()).expect("our own JSON");
        assert_eq!(back, report);
    }

    #[test]
    fn saved_runs_are_never_replaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut report = example();
        report.plots.push(Plot::default());
        let files = report.save(&dir.path().join("runs")).expect("saved");
        assert_eq!(files.len(), 2);
        let again = report.save(&dir.path().join("runs")).expect_err("exists");
        assert!(again.to_string().contains(".json"), "{again}");
    }

    #[test]
    fn cells_are_found_by_row_and_column() {
        assert_eq!(
            example().cell("write", "time"),
            Some(&ReportCell::Number(1234.5))
        );
        assert_eq!(example().cell("write", "none"), None);
    }

    #[test]
    fn cpu_model_is_found() {
        assert_eq!(model_name("a: b\nmodel name\t: X 1\n"), Some("X 1"));
        assert!(Machine::current().cores > 0);
    }
}
