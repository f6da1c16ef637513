//! `pagemesh doctor`: checks of a machine before and after pagemesh runs on it.
//!
//! `facts` reads the machine, with `ports` and `installed`; `checks` judges the facts and reads nothing. Invariant: the command
//! changes nothing on the machine.

mod checks;
mod facts;
mod installed;
mod ports;

use crate::args::{Output, path_parser};
use crate::commands::Verdict;
use crate::output;
use checks::{Check, Finding};
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Check this machine: kernel, FUSE, huge pages, DAX, limits, configuration files, ports, clock, memory, manager and
/// key. Each finding has its reason and the command that corrects it.
///
/// Exit codes: 0 no finding; 5 warnings; 3 errors.
#[derive(Args)]
pub struct DoctorArgs {
    /// Address of the manager; by default the one in `client.toml`, or in the configuration of a daemon.
    #[arg(long, env = "PAGEMESH_MANAGER")]
    pub manager: Option<String>,
    /// File with the cluster key; by default the one in `client.toml`, or in the configuration of a daemon.
    #[arg(long, env = "PAGEMESH_KEY", value_parser = path_parser())]
    pub key: Option<PathBuf>,
    /// Output format.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// The report as JSON.
#[derive(Serialize)]
struct Report<'a> {
    worst: Finding,
    checks: &'a [Check],
}

/// Checks the machine, and returns the worst finding.
pub fn run(args: &DoctorArgs) -> anyhow::Result<Verdict> {
    let manager = args.manager.as_deref().filter(|url| !url.is_empty());
    let host = facts::HostFacts::gather(manager, args.key.as_deref());
    let checks = checks::all(&host);
    let worst = checks.iter().map(|check| check.finding).max();
    let worst = worst.unwrap_or(Finding::Ok);
    let report = Report {
        worst,
        checks: &checks,
    };
    output::print(args.output, &report, || people(&checks))?;
    Ok(match worst {
        Finding::Ok => Verdict::Done,
        Finding::Warning => Verdict::Warned,
        Finding::Error => Verdict::Damaged,
    })
}

/// The report for people, of this machine and the named manager.
pub fn report(manager: Option<&str>, key: Option<&Path>) -> String {
    people(&checks::all(&facts::HostFacts::gather(manager, key)))
}

/// A line for each check, with reason and correction below a finding.
fn people(checks: &[Check]) -> String {
    let mut text = String::new();
    for check in checks {
        let word = output::json_word(&check.finding);
        text += &format!("{word:<8} {:<12} {}\n", check.name, check.text);
        if check.finding > Finding::Ok {
            text += &format!("{:21} why: {}\n", "", check.reason);
        }
        if let Some(fix) = &check.fix {
            text += &format!("{:21} fix: {fix}\n", "");
        }
    }
    text
}
