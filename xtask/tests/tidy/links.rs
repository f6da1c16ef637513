//! Links between documents, and the pages of the book.
//!
//! Invariants: a relative link leads to a file and, if it has one, to an anchor there. A path in
//! backquotes is the end of the path of a file, and the path of a module in ARCHITECTURE.md, as
//! `front/nbd/wait`, is a file or a folder in the sources of that crate. The book (`docs`)
//! has each of its pages in its summary once. Its pages link only to other pages, since files outside
//! of the book are not there when it is read as HTML. A document of the root that a page includes
//! needs a redirect for each of its links.

use crate::{Source, documents, files, root};
use regex::Regex;
use std::collections::HashMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

const SUMMARY: &str = "docs/SUMMARY.md";

/// The lines of a document outside of code blocks.
fn lines_without_code(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// The text of a heading without its links.
fn title(line: &str) -> String {
    let link = Regex::new(r"\[([^\]]*)\]\([^)]*\)").expect("a pattern");
    let text = line.trim_start_matches('#').trim();
    link.replace_all(text, "$1").into_owned()
}

/// The anchors of the headings of a document, as mdBook makes them.
fn anchors(text: &str) -> Vec<String> {
    let mut seen = HashMap::<String, usize>::new();
    let headings = lines_without_code(text).filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let title = title(line).to_lowercase();
        let kept = title
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let count = seen.entry(anchor.clone()).or_default();
        *count += 1;
        match *count {
            1 => anchor,
            count => format!("{anchor}-{}", count - 1),
        }
    };
    headings.map(anchor).collect()
}

/// A link, from the directory of its document.
struct Link {
    file: String,
    anchor: String,
}

/// The links of a document to files.
fn links(text: &str) -> Vec<Link> {
    let link = Regex::new(r"\]\(([^)\s]+)\)").expect("a pattern");
    let text: Vec<&str> = lines_without_code(text).collect();
    let text = text.join("\n");
    let targets = link.captures_iter(&text).map(|found| found[1].to_owned());
    let to_files = targets.filter(|it| !it.contains("://") && !it.starts_with("mailto:"));
    let link = |target: String| {
        let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
        Link {
            file: file.to_owned(),
            anchor: anchor.to_owned(),
        }
    };
    to_files.map(link).collect()
}

/// The file that a link of a document leads to, from the root.
fn target(document: &str, link: &Link) -> PathBuf {
    let document = Path::new(document);
    let above = document.parent().unwrap_or(Path::new(""));
    let path = match link.file.as_str() {
        "" => document.to_owned(),
        file => above.join(file),
    };
    let mut found = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                found.pop();
            }
            other => found.push(other),
        }
    }
    found
}

/// The document of the root that a page of the book includes.
fn included(page: &Source) -> Option<&str> {
    let inner = page.text.trim().strip_prefix("{{#include ../")?;
    inner.strip_suffix("}}")
}

#[track_caller]
fn assert_none(what: &str, wrong: &[String]) {
    assert!(wrong.is_empty(), "{what}:\n  {}", wrong.join("\n  "));
}

#[test]
fn links_of_documents_lead_somewhere() {
    // A document is read once, and not for each link that leads to it.
    let mut anchors_of = HashMap::new();
    let mut wrong = Vec::new();
    for document in documents() {
        for link in links(&document.text) {
            let file = target(&document.path, &link);
            let at = root().join(&file);
            let mut has_anchor = || {
                let known = anchors_of.entry(file.clone()).or_insert_with(|| {
                    let text = fs::read_to_string(&at).unwrap_or_default();
                    anchors(&text)
                });
                known.contains(&link.anchor)
            };
            if !at.exists() || !(link.anchor.is_empty() || has_anchor()) {
                wrong.push(format!("{}: {}#{}", document.path, link.file, link.anchor));
            }
        }
    }
    assert_none("links without a target", &wrong);
}

/// The paths of sources, documents and manifests in backquotes, without absolute ones: those are of a machine.
fn quoted_paths(text: &str) -> Vec<String> {
    let path = Regex::new(r"`([\w./-]+/[\w.-]+\.(?:rs|md|toml))`").expect("a pattern");
    let lines: Vec<&str> = lines_without_code(text).collect();
    let lines = lines.join("\n");
    let found = path.captures_iter(&lines);
    let found = found.map(|found| found[1].to_owned());
    found.filter(|path| !path.starts_with('/')).collect()
}

/// The paths of all sources, documents and manifests, each with a `/` before it.
fn all_paths() -> Vec<String> {
    let directories = ["crates", "xtask", "docs", "bench", "scripts"];
    let below = ["rs", "md", "toml"].map(|extension| files(&directories, extension));
    let below = below.into_iter().flatten().map(|file| file.path);
    below.map(|path| format!("/{path}")).collect()
}

#[test]
fn paths_in_documents_exist() {
    let all = all_paths();
    let mut wrong = Vec::new();
    for document in documents() {
        for path in quoted_paths(&document.text) {
            let end = format!("/{path}");
            if !all.iter().any(|it| it.ends_with(&end)) {
                wrong.push(format!("{}: {path}", document.path));
            }
        }
    }
    assert_none("paths that no file ends with", &wrong);
}

#[test]
fn quoted_paths_are_found() {
    let text = "`a.rs`, `x/a.rs`\n```\n`x/b.rs`\n```\n`cat x/c.rs`, `y/d-e.toml`, `x/*.md`";
    assert_eq!(quoted_paths(text), ["x/a.rs", "y/d-e.toml"]);
}

/// The paths of modules in backquotes that begin with a crate, as `store/session/write`.
fn quoted_modules(text: &str) -> Vec<String> {
    let path = Regex::new(r"`([a-z_]+(?:/[a-z_]+)+)/?`").expect("a pattern");
    let lines: Vec<&str> = lines_without_code(text).collect();
    let lines = lines.join("\n");
    let found = path.captures_iter(&lines);
    found.map(|found| found[1].to_owned()).collect()
}

/// Whether the path is a crate, or a file or folder of modules in a crate.
fn is_module(path: &str) -> bool {
    let crates = root().join("crates");
    let is_source = |(name, module): (&str, &str)| {
        let at = crates.join(name).join("src").join(module);
        at.is_dir() || at.with_extension("rs").is_file()
    };
    let splits = path.match_indices('/');
    let mut splits = splits.map(|(at, _)| (&path[..at], &path[at + 1..]));
    crates.join(path).join("Cargo.toml").is_file() || splits.any(is_source)
}

#[test]
fn modules_in_architecture_exist() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("a text");
    let modules = quoted_modules(&text);
    assert!(modules.len() > 10, "{modules:?}");
    let wrong: Vec<String> = modules.into_iter().filter(|it| !is_module(it)).collect();
    assert_none("paths in ARCHITECTURE.md without a module", &wrong);
}

#[test]
fn module_paths_are_told_from_others() {
    let text = "`nbd`, `front/nbd/wait`, `format/`, `x/a.rs`, `a/b/`";
    assert_eq!(quoted_modules(text), ["front/nbd/wait", "a/b"]);
    for known in ["front/nbd", "front/nbd/wait", "volume/client"] {
        assert!(is_module(known), "{known}");
    }
    for unknown in ["front/nbd/plan", "front", "volume/nowhere"] {
        assert!(!is_module(unknown), "{unknown}");
    }
}

#[test]
fn summary_has_each_page_once() {
    let pages = documents();
    let pages = pages.iter().filter(|it| it.path.starts_with("docs/"));
    let summary = fs::read_to_string(root().join(SUMMARY)).expect("the summary");
    let entries: Vec<PathBuf> = links(&summary)
        .iter()
        .map(|link| target(SUMMARY, link))
        .collect();
    let wrong: Vec<String> = pages
        .filter(|page| page.path != SUMMARY)
        .map(|page| {
            let same = entries.iter().filter(|it| **it == Path::new(&page.path));
            (&page.path, same.count())
        })
        .filter(|(_, count)| *count != 1)
        .map(|(page, count)| format!("{page} is {count} times in {SUMMARY}"))
        .collect();
    assert_none("pages of the book that are not in its summary once", &wrong);
}

#[test]
fn pages_of_book_link_to_pages() {
    let mut wrong = Vec::new();
    for page in documents() {
        if !page.path.starts_with("docs/") {
            continue;
        }
        for link in links(&page.text) {
            let file = target(&page.path, &link);
            let extension = file.extension().and_then(|it| it.to_str());
            let is_page = file.starts_with("docs") && extension == Some("md");
            // mdbook copies the pictures below docs into the book.
            let is_picture = file.starts_with("docs") && extension == Some("png");
            if !(is_page || is_picture && root().join(&file).is_file()) {
                wrong.push(format!("{}: {}", page.path, link.file));
            }
        }
    }
    assert_none(
        "links out of the book; name the file in backquotes instead",
        &wrong,
    );
}

#[test]
fn links_of_included_documents_have_redirects() {
    let book = fs::read_to_string(root().join("docs/book.toml")).expect("the book");
    let pages = documents();
    let mut wrong = Vec::new();
    for page in &pages {
        let Some(name) = included(page) else { continue };
        let document = pages.iter().find(|it| it.path == name);
        let document = document.unwrap_or_else(|| panic!("{} includes {name}", page.path));
        for link in links(&document.text) {
            let place = link.file.replace(".md", ".html");
            if !link.file.is_empty() && !book.contains(&format!("\"/{place}\" = ")) {
                wrong.push(format!("{name}: {}", link.file));
            }
        }
    }
    assert_none("links without a redirect in docs/book.toml", &wrong);
}

#[test]
fn anchors_are_those_of_mdbook() {
    let text =
        "# A `b` c, d\n```sh\n# no heading\n```\n## [One](x.md) two\n## A b c d\n## /etc/fstab\n";
    assert_eq!(
        anchors(text),
        ["a-b-c-d", "one-two", "a-b-c-d-1", "etcfstab"]
    );
}
