//! The documents that say which test holds what must not outlive the tests.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Names of functions of tests begin so far from other words in backquotes.
const NAME_CHARS_MIN: usize = 16;

fn functions(dir: &Path, into: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            functions(&path, into);
        } else if path.extension().is_some_and(|it| it == "rs") {
            let text = fs::read_to_string(&path).expect("text");
            let after = text.split("fn ").skip(1);
            into.extend(after.map(|rest| name(rest).to_owned()));
        }
    }
}

fn name(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// Words in backquotes that can only be names of tests.
fn named(text: &str) -> BTreeSet<&str> {
    let quoted = text.split('`').skip(1).step_by(2);
    let looks = |word: &&str| {
        let lower = !word.contains(|c: char| c.is_ascii_uppercase());
        lower
            && name(word) == *word
            && word.len() >= NAME_CHARS_MIN
            && word.matches('_').count() >= 2
    };
    quoted.filter(looks).collect()
}

#[test]
fn promises_name_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("a root");
    let mut known = BTreeSet::new();
    functions(&root.join("crates"), &mut known);
    functions(&root.join("xtask"), &mut known);
    for document in ["docs/promises.md", "ARCHITECTURE.md"] {
        let text = fs::read_to_string(root.join(document)).expect("a document");
        let found = named(&text);
        assert!(found.len() > 20, "{document} names tests");
        let begins = |word: &str| word.starts_with('_');
        let missing: Vec<&&str> = found
            .iter()
            .filter(|word| !begins(word) && !known.contains(**word))
            .collect();
        assert!(
            missing.is_empty(),
            "{document} names what is not there: {missing:?}"
        );
    }
}
