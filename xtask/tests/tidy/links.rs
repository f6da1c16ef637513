//! Links between documents.

use crate::{documents, root};
use regex::Regex;
use std::fs;
use std::path::Path;

/// The anchors of the headings of a document, as common Markdown renderers make them.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn links_of_documents_lead_somewhere() {
    let link = Regex::new(r"\]\(([^)\s]+)\)").expect("a pattern");
    let mut wrong = Vec::new();
    for document in documents() {
        let path = root().join(&document.path);
        for found in link.captures_iter(&document.text) {
            let target = &found[1];
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let at = match file {
                "" => path.clone(),
                file => path.parent().unwrap_or(Path::new("/")).join(file),
            };
            let has_anchor = || {
                let text = fs::read_to_string(&at).unwrap_or_default();
                anchors(&text).iter().any(|it| it == anchor)
            };
            if !at.exists() || !(anchor.is_empty() || has_anchor()) {
                wrong.push(format!("{}: {target}", document.path));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "links without a target:\n  {}",
        wrong.join("\n  ")
    );
}
