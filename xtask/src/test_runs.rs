//! Runs of the tests: all of them, and the few of an inner loop.
//!
//! `cargo-nextest` runs each test in a process of its own, with a time limit
//! (`.config/nextest.toml`), and goes on after a failure. The documentation tests follow with
//! `cargo test --doc`, which nextest does not run.

use crate::{cargo, root};
use anyhow::{Context, bail};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::process::Command;

/// nextest's exit code if it ran and a test failed; any other means that it did not run.
const TESTS_FAILED: i32 = 100;
/// The report of the last run, see `.config/nextest.toml`.
const REPORT: &str = "target/nextest/default/junit.xml";

/// Runs every test and the documentation's, or the tests that `options` select.
pub(crate) fn run_all(options: &[OsString]) -> anyhow::Result<()> {
    let report = root().join(REPORT);
    // An old report must not stand for a run that wrote none.
    if report.exists() {
        fs::remove_file(&report).with_context(|| format!("cannot remove {}", report.display()))?;
    }
    let mut run = cargo();
    run.args(["nextest", "run", "--locked"]).args(options);
    if options.is_empty() {
        run.arg("--workspace");
    }
    let status = run.status().context("cannot start cargo")?;
    let mut failures = Vec::new();
    if !status.success() {
        if status.code() != Some(TESTS_FAILED) {
            bail!("cargo nextest ended with {status}: see above");
        }
        let text = fs::read_to_string(&report)
            .with_context(|| format!("cannot read {}", report.display()))?;
        failures.extend(failed_tests(&text).iter().map(FailedTest::rerun_command));
    }
    if options.is_empty() && !succeeds(cargo().args(DOC_TESTS))? {
        failures.push(format!("cargo {}", DOC_TESTS.join(" ")));
    }
    if failures.is_empty() && !status.success() {
        bail!("a test failed that {REPORT} does not name: see above");
    }
    if !failures.is_empty() {
        println!("\nTo rerun the failures, each alone:\n");
        for command in &failures {
            println!("    {command}");
        }
        println!();
        bail!("{} failed", failures.len());
    }
    Ok(())
}

const DOC_TESTS: &[&str] = &["test", "--doc", "--workspace", "--locked", "--quiet"];

/// Checks the format, the lints of the workspace, the rules of the tree, and the unit tests of
/// crates with changes.
pub(crate) fn run_quick(since: &str) -> anyhow::Result<()> {
    let changed = changed_packages(since)?;
    println!("unit tests of: {}", list(&changed));
    let mut steps = vec![
        words("fmt --all --check"),
        words("clippy --workspace --all-targets --locked --quiet -- -D warnings"),
        words("nextest run --locked --package xtask"),
    ];
    let selected = changed.iter().map(|package| format!("package({package})"));
    let selected = selected.collect::<Vec<_>>().join(" | ");
    if !changed.is_empty() {
        let mut unit_tests =
            words("nextest run --locked --workspace --lib --bins --no-tests pass -E");
        unit_tests.push(&selected);
        steps.push(unit_tests);
    }
    for step in steps {
        if !succeeds(cargo().args(&step))? {
            bail!("cargo {} failed", step.join(" "));
        }
    }
    Ok(())
}

fn words(command: &str) -> Vec<&str> {
    command.split(' ').collect()
}

fn list(packages: &BTreeSet<String>) -> String {
    if packages.is_empty() {
        return "no crate, since none has changed".into();
    }
    packages.iter().cloned().collect::<Vec<_>>().join(", ")
}

/// The packages with a file that has changed since a commit, or that git does not know yet.
fn changed_packages(since: &str) -> anyhow::Result<BTreeSet<String>> {
    let mut files = git(&["diff", "--name-only", "--merge-base", since])?;
    files += &git(&["ls-files", "--others", "--exclude-standard"])?;
    let mut packages = BTreeSet::new();
    for file in files.lines() {
        let mut dir = root().join(file);
        while dir.pop() && dir != root() {
            let manifest = dir.join("Cargo.toml");
            if let Ok(text) = fs::read_to_string(manifest) {
                packages.extend(package_name(&text).map(str::to_owned));
                break;
            }
        }
    }
    Ok(packages)
}

/// The value of the first `name` in a manifest.
fn package_name(manifest: &str) -> Option<&str> {
    let line = manifest.lines().find(|line| line.starts_with("name = "))?;
    line.split('"').nth(1)
}

fn git(arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("git")
        .args(arguments)
        .current_dir(root())
        .output()
        .context("cannot start git")?;
    if !output.status.success() {
        let cause = String::from_utf8_lossy(&output.stderr);
        bail!("git {} failed: {}", arguments.join(" "), cause.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn succeeds(command: &mut Command) -> anyhow::Result<bool> {
    let status = command.status().context("cannot start cargo")?;
    Ok(status.success())
}

/// A test as nextest's report names it.
#[derive(Debug, PartialEq)]
struct FailedTest {
    /// `pagemesh-store`, or `pagemesh-store::it` of an integration test.
    binary: String,
    name: String,
}

impl FailedTest {
    /// The command runs in the whole workspace: alone, a package is built with other features, and
    /// so anew.
    fn rerun_command(&self) -> String {
        let FailedTest { binary, name } = self;
        format!(
            "cargo nextest run --locked --workspace --no-capture \
             -E 'binary_id({binary}) & test(={name})'"
        )
    }
}

/// The failed tests of a report in JUnit's format: the `testcase` elements with a `failure` or an
/// `error`.
fn failed_tests(report: &str) -> Vec<FailedTest> {
    let cases = report.split("<testcase ").skip(1);
    let failed = cases.filter(|case| case.contains("<failure") || case.contains("<error"));
    let named = failed.filter_map(|case| {
        Some(FailedTest {
            binary: attribute(case, "classname")?.to_owned(),
            name: attribute(case, "name")?.to_owned(),
        })
    });
    named.collect()
}

/// An attribute of the element that `text` starts in.
fn attribute<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let element = text.split('>').next()?;
    let (_, value) = format!(" {element}")
        .find(&format!(" {name}=\""))
        .map(|at| element.split_at(at))?;
    value.split('"').nth(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_tests_have_rerun_commands() {
        let report = r#"<testsuite name="pagemesh::direct" tests="3">
            <testcase name="one" classname="pagemesh::direct" time="1.2"></testcase>
            <testcase name="part::two" classname="pagemesh::direct" time="0.1">
                <failure message="a &lt;testcase&gt;" type="test failure">no</failure>
            </testcase>
            <testcase name="three" classname="pagemesh" time="0.1"/>
        </testsuite>"#;
        let failed = failed_tests(report);
        let commands: Vec<_> = failed.iter().map(FailedTest::rerun_command).collect();
        let expected = "cargo nextest run --locked --workspace --no-capture \
                        -E 'binary_id(pagemesh::direct) & test(=part::two)'";
        assert_eq!(commands, [expected]);
    }

    #[test]
    fn manifest_names_its_package() {
        assert_eq!(package_name("[package]\nname = \"xtask\"\n"), Some("xtask"));
        assert_eq!(package_name("[workspace]\n"), None);
    }
}
