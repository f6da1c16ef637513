//! Sentences have a named subject.

use crate::{Source, documents, files, sources};
use regex::Regex;

const REASON: &str = "a relative clause without a noun hides the actor: write \"the brick\", \
                      \"the caller\", \"the bytes\"";

/// The comment lines of a file.
fn comments(source: &Source) -> impl Iterator<Item = &str> {
    source
        .text
        .lines()
        .map(str::trim_start)
        .filter(|line| line.starts_with("//"))
}

/// The files of the web console with comments.
fn console_sources() -> Vec<Source> {
    const CODE: [&str; 4] = [
        "console/src",
        "console/mock",
        "console/tests",
        "console/scripts",
    ];
    let extensions = ["ts", "svelte", "css"].iter();
    extensions.flat_map(|it| files(&CODE, it)).collect()
}

/// The comment lines of a file of the console, also those of its `/* */` and `<!-- -->` comments.
fn console_comments(source: &Source) -> impl Iterator<Item = &str> {
    const STARTS: [&str; 4] = ["//", "/*", "* ", "<!--"];
    let lines = source.text.lines().map(str::trim_start);
    lines.filter(|line| STARTS.iter().any(|start| line.starts_with(start)))
}

/// The lines of a document outside of code blocks.
fn prose(document: &Source) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    document.text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence && !line.trim().is_empty()
    })
}

/// Asserts that at most this share of the lines matches, in thousandths of a percent.
#[track_caller]
fn check(lines: &[(String, &str)], pattern: &str, most: usize) {
    let pattern = Regex::new(pattern).expect("a pattern");
    let found: Vec<_> = lines
        .iter()
        .filter(|(_, line)| pattern.is_match(line))
        .collect();
    let share = found.len() * 100_000 / lines.len().max(1);
    let shown: Vec<String> = found
        .iter()
        .map(|(path, line)| format!("{path}: {line}"))
        .collect();
    assert!(
        share <= most,
        "{} of {} lines match {pattern}, {share} of at most {most} thousandths of a percent ({REASON}):\n  {}",
        found.len(),
        lines.len(),
        shown.join("\n  "),
    );
}

const WHO: &str = r"(?i)\b(who|whoever|whose|whom)\b";
const WHAT: &str = r"(?i)\bwhat(ever)?\b";

#[test]
fn comments_name_their_subjects() {
    let sources = sources();
    let lines: Vec<_> = sources
        .iter()
        .flat_map(|it| comments(it).map(|line| (it.path.clone(), line)))
        .collect();
    check(&lines, WHO, 200);
    check(&lines, WHAT, 250);
}

#[test]
fn documents_name_their_subjects() {
    let documents = documents();
    let lines: Vec<_> = documents
        .iter()
        .flat_map(|it| prose(it).map(|line| (it.path.clone(), line)))
        .collect();
    check(&lines, WHO, 200);
    check(&lines, WHAT, 250);
}

/// The console has few comments, so one line would be a large share: none may match.
#[test]
fn console_comments_name_their_subjects() {
    let sources = console_sources();
    let lines: Vec<_> = sources
        .iter()
        .flat_map(|it| console_comments(it).map(|line| (it.path.clone(), line)))
        .collect();
    assert!(lines.len() > 100, "only {} comment lines", lines.len());
    check(&lines, WHO, 0);
    check(&lines, WHAT, 0);
}
