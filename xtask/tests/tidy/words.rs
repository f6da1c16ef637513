//! Words of earlier names do not come back.
//!
//! Names were chosen again after the first version (RFD 024): one word per thing, and the field's
//! word if there is one. Words with a normal meaning (ring, view, window, lane of a vector, …) are not
//! listed, even if an earlier name used them.

use crate::{Source, check_sizes, documents, exceptions, sources};
use regex::Regex;
use std::collections::BTreeMap;
use syn::visit::{self, Visit};

/// Each earlier word, and the word of today.
const WORDS: &[(&str, &str)] = &[
    ("aside", "move_fd_high, or the place that is meant"),
    ("amid", "in progress, OpGuard"),
    ("bell", "doorbell"),
    ("board", "shared file map"),
    ("buried", "retired session, rolled forward"),
    ("bury", "retire a session, roll forward"),
    ("crew", "worker pool"),
    ("desk", "manager host"),
    ("dice", "random numbers, rng"),
    ("doomed", "pending delete"),
    ("guest", "direct client"),
    ("house", "brick host, server state"),
    ("housekeeper", "maintenance thread"),
    ("keeper", "volume controller, maintenance thread"),
    ("lend", "grant append space"),
    ("lent", "granted append space"),
    ("mend", "correct"),
    ("pane", "read mapping"),
    ("picture", "layout lease"),
    ("seat", "leg index, member slot"),
    ("ship", "replicate, send; replication queue"),
    ("station", "I/O slot"),
    ("stranger", "unauthenticated connection"),
    ("tally", "coverage, counts"),
    ("trouble", "error"),
    ("undecided", "indeterminate"),
    ("wish", "request"),
    ("witness", "read oracle"),
    ("wound", "torn operation"),
    ("wounded", "torn"),
];
/// Names of types that do not say what the type holds.
const EMPTY_TYPES: &[&str] = &[
    "Asked", "Found", "Held", "Kept", "Life", "Left", "Lying", "Others", "Place", "Run", "Seen",
    "Stand", "Told", "Tried", "Turns", "Way", "Worked", "World",
];
/// Words that must stay in a document, and the reason.
const EXTERNAL: &[(&str, &str, &str)] = &[
    ("CHANGELOG.md", "", "earlier versions had these names"),
    (
        "docs/rfd/024-names-and-rooms.md",
        "",
        "it is the record of the earlier names",
    ),
    (
        "docs/formats.md",
        "doomed",
        "the name of a table in the manager's store",
    ),
    (
        "docs/reference/rest.md",
        "mend",
        "the name of a JSON field, `mended`",
    ),
];
const PROSE_REASON: &str = "earlier words name nothing that a reader can look up";
const NAME_REASON: &str = "one word per thing; rename the last ones, then remove the exception";

fn pattern(word: &str) -> Regex {
    Regex::new(&format!(r"(?i)\b{word}(s|es|ed|ing)?\b")).expect("a pattern")
}

fn patterns() -> Vec<(&'static str, &'static str, Regex)> {
    let words = WORDS.iter();
    words.map(|(old, new)| (*old, *new, pattern(old))).collect()
}

/// The comment of a line of source, also behind code.
fn comment(line: &str) -> Option<&str> {
    let starts = ["// ", "/// ", "//! "].map(|start| line.find(start));
    let start = starts.into_iter().flatten().min()?;
    Some(&line[start..])
}

/// The words of all identifiers in a source, in lower case, with their numbers. Comments and text
/// literals do not count.
fn identifier_words(text: &str) -> BTreeMap<String, usize> {
    let token = r##"(?s)//[^\n]*|r#".*?"#|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])'|[A-Za-z_]\w*"##;
    let token = Regex::new(token).expect("a pattern");
    let part = Regex::new(r"[A-Z]?[a-z]+|[A-Z]+").expect("a pattern");
    let mut words = BTreeMap::new();
    for found in token.find_iter(text) {
        let is_name = found
            .as_str()
            .starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
        let is_raw_text = found.as_str().starts_with("r#\"");
        if is_name && !is_raw_text {
            for word in part.find_iter(found.as_str()) {
                *words.entry(word.as_str().to_lowercase()).or_default() += 1;
            }
        }
    }
    words
}

/// The types that a source defines.
#[derive(Default)]
struct Types(Vec<String>);

impl<'a> Visit<'a> for Types {
    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        self.0.push(item.ident.to_string());
    }

    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        self.0.push(item.ident.to_string());
    }

    fn visit_item_type(&mut self, item: &'a syn::ItemType) {
        self.0.push(item.ident.to_string());
    }

    fn visit_item_trait(&mut self, item: &'a syn::ItemTrait) {
        self.0.push(item.ident.to_string());
        visit::visit_item_trait(self, item);
    }
}

fn is_external(path: &str, word: &str) -> bool {
    EXTERNAL
        .iter()
        .any(|(file, of, _)| *file == path && (of.is_empty() || *of == word))
}

/// This rule names the words.
fn is_rule(source: &Source) -> bool {
    source.path.starts_with("xtask/tests/tidy/")
}

#[test]
fn prose_has_no_earlier_words() {
    let (sources, documents) = (sources(), documents());
    let sources = sources.iter().filter(|it| !is_rule(it));
    let comments = sources.flat_map(|it| {
        let comments = it.text.lines().filter_map(comment);
        comments.map(|line| (it.path.as_str(), line))
    });
    let prose = documents
        .iter()
        .flat_map(|it| it.text.lines().map(|line| (it.path.as_str(), line)));
    let patterns = patterns();
    let mut wrong = Vec::new();
    for (path, line) in comments.chain(prose) {
        for (old, new, pattern) in &patterns {
            if pattern.is_match(line) && !is_external(path, old) {
                wrong.push(format!("{path}: {old} is {new} today: {}", line.trim()));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "earlier words ({PROSE_REASON}):\n  {}",
        wrong.join("\n  ")
    );
}

#[test]
fn identifiers_have_no_earlier_words() {
    let mut total: BTreeMap<String, usize> = BTreeMap::new();
    let patterns = patterns();
    for source in sources().iter().filter(|it| !is_rule(it)) {
        for (word, count) in identifier_words(&source.text) {
            let old = patterns.iter().find(|(_, _, it)| it.is_match(&word));
            if let Some((old, _, _)) = old {
                *total.entry((*old).to_owned()).or_default() += count;
            }
        }
    }
    let total: Vec<_> = total.into_iter().collect();
    check_sizes(
        "earlier words in identifiers",
        NAME_REASON,
        &total,
        exceptions::EARLIER_WORDS,
    );
}

#[test]
fn types_say_what_they_hold() {
    let mut empty: BTreeMap<String, usize> = BTreeMap::new();
    for source in sources() {
        let mut types = Types::default();
        types.visit_file(&source.parsed());
        for name in types.0.iter().filter(|it| EMPTY_TYPES.contains(&&***it)) {
            *empty.entry(name.clone()).or_default() += 1;
        }
    }
    let empty: Vec<_> = empty.into_iter().collect();
    let reason = "a name that fits every type says nothing about this one";
    check_sizes("types", reason, &empty, exceptions::EMPTY_TYPES);
}

#[test]
fn words_of_identifiers_are_found() {
    let text = "// a guest\nlet my_guest = \"a guest\"; struct GuestsLeft { seat: u8 }\n";
    let words = identifier_words(text);
    assert_eq!(
        (words.get("guest"), words.get("guests"), words.get("seat")),
        (Some(&1), Some(&1), Some(&1))
    );
    assert_eq!(comment("let it = 1; // a seat"), Some("// a seat"));
    assert_eq!(comment("let it = \"https://a\";"), None);
}
