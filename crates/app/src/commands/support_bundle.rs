//! `pagemesh support-bundle`: one archive with the state of this host and its cluster, for a support
//! engineer.
//!
//! `sources` reads the host and the manager; `secrets` finds the secrets of the host; `mask` replaces
//! them in a text; `archive` writes the file. Invariants: every name and text goes through the mask of
//! `archive`; a source that fails or hangs becomes a line in the list of contents, and ends nothing;
//! the archive is bounded in bytes, and the command in time.

mod archive;
mod mask;
mod secrets;
mod sources;

use crate::args::ManagerArgs;
use crate::client::host_name;
use crate::client_file::HOST_DIR;
use crate::output;
use anyhow::Context;
use archive::{Archive, Item};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Limit of the whole command. A source that begins before it ends within its own limit.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Write an archive for a support engineer: version, checks of this machine, configuration, state
/// and figures of the cluster, events, metrics, journal and logs, kernel and limits.
///
/// Secrets are replaced by `[secret]`: keys, tokens, cookies and passwords. Names of hosts and volumes, and
/// addresses stay. A part that is missing, because the manager does not answer for example, is named in the list of
/// contents with its reason.
#[derive(Args)]
pub struct SupportBundleArgs {
    /// The archive; must not exist. By default `pagemesh-support-HOST-TIME.tar.gz` in the current
    /// directory.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Directory with configuration files (`*.toml`) and logs (`*.log`), as /etc/pagemesh or the
    /// directory of `pagemesh up`; may be repeated.
    #[arg(long, value_name = "DIR", default_value = HOST_DIR)]
    pub dir: Vec<PathBuf>,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// The outcome as JSON, and the list of contents in the archive.
#[derive(Serialize)]
struct Report<'a> {
    file: String,
    /// Secrets that were replaced, in all files.
    masked: u64,
    /// Files that may hold a secret and cannot be read; the mask knows secrets in them by shape only.
    unreadable_secrets: &'a [String],
    contents: &'a [Item],
}

/// Writes the archive.
pub fn run(args: &SupportBundleArgs) -> anyhow::Result<()> {
    let now_unix_s = now_unix_s();
    let path = args
        .file
        .clone()
        .unwrap_or_else(|| default_name(now_unix_s));
    let known = secrets::find(args);
    for unreadable in &known.unreadable {
        eprintln!("warning: {unreadable}; a secret in it is recognised by its shape only");
    }
    let mut archive = Archive::create(&path, mask::Mask::new(&known.texts), now_unix_s)?;
    let started = Instant::now();
    let bar = progress();
    for source in sources::all(args) {
        bar.set_message(source.name.to_owned());
        if started.elapsed() < TIME_LIMIT {
            (source.collect)(&mut archive)?;
        } else {
            let reason = format!("the limit of {} s was over", TIME_LIMIT.as_secs());
            archive.missing(source.name, &reason);
        }
        bar.tick();
    }
    bar.finish_and_clear();
    if let Some(cause) = archive.missing_reason(sources::CLUSTER) {
        eprintln!(
            "warning: the part of the cluster is missing: {cause}; name the manager with --manager and the key with --key, \
             or both in {HOST_DIR}/client.toml"
        );
    }
    let masked = archive.masked;
    let report = |contents: &[Item]| {
        serde_json::to_string_pretty(&Report {
            file: path.display().to_string(),
            masked,
            unreadable_secrets: &known.unreadable,
            contents,
        })
    };
    let list = report(&archive.items)?;
    archive.add("contents.json", &list)?;
    let contents = archive.finish()?;
    let report = Report {
        file: path.display().to_string(),
        masked,
        unreadable_secrets: &known.unreadable,
        contents: &contents,
    };
    output::print(args.client.output, &report, || people(&report))
}

fn people(report: &Report) -> String {
    let rows = report.contents.iter().map(|item| {
        let note = item.note.clone().unwrap_or_default();
        vec![item.name.clone(), output::bytes(item.bytes), note]
    });
    format!(
        "{}\n\n{}: {} secrets masked; read it before you send it",
        output::table(&["CONTENT", ">SIZE", "NOTE"], rows),
        report.file,
        report.masked
    )
}

/// A line with the source that is read; hidden unless standard error is a terminal.
fn progress() -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} reading {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar
}

/// A name with host and time, as `pagemesh-support-node-1-20260131T235959Z.tar.gz`.
fn default_name(now_unix_s: u64) -> PathBuf {
    let safe = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let host: String = host_name().chars().map(safe).collect();
    let time = output::time_text(now_unix_s * 1000);
    let time = time.replace(['-', ':'], "").replace(' ', "T");
    PathBuf::from(format!("pagemesh-support-{host}-{time}.tar.gz"))
}

#[expect(clippy::disallowed_methods, reason = "for people")]
fn now_unix_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// The error of an archive that cannot be written.
fn unwritable<T>(result: std::io::Result<T>, path: &std::path::Path) -> anyhow::Result<T> {
    result.with_context(|| {
        format!(
            "cannot write {}; name another file with --file",
            path.display()
        )
    })
}
