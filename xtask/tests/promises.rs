//! The documents that say which test holds what must not outlive the tests.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Names of functions are at least as long, unlike other words in backquotes.
const NAME_CHARS_MIN: usize = 16;
/// The part of ARCHITECTURE.md that names tests; the others name any function.
const OF_TESTS: &str = "\n## Invariants and the tests that hold them\n";

/// The functions of the workspace, and those of them that are tests.
#[derive(Default)]
struct Functions {
    all: BTreeSet<String>,
    tests: BTreeSet<String>,
}

impl Functions {
    fn read(&mut self, dir: &Path) {
        for entry in fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                self.read(&path);
            } else if path.extension().is_some_and(|it| it == "rs") {
                self.read_text(&fs::read_to_string(&path).expect("text"));
            }
        }
    }

    fn read_text(&mut self, text: &str) {
        let mut is_test = false;
        for line in text.lines().map(str::trim) {
            // Those in `proptest!` have the attribute, too.
            is_test |= line == "#[test]";
            let Some(function) = function(line) else {
                continue;
            };
            self.all.insert(function.to_owned());
            if std::mem::take(&mut is_test) {
                self.tests.insert(function.to_owned());
            }
        }
    }
}

/// The function whose signature begins on a line.
fn function(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("fn ")?;
    let is_word = |word: &str| {
        word.chars()
            .all(|c| c.is_ascii_alphanumeric() || "()_".contains(c))
    };
    (before.split_whitespace().all(is_word)).then(|| name(after))
}

fn name(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// Words in backquotes that can only be names of functions, also where a part
/// of one is left out.
fn named(text: &str) -> BTreeSet<&str> {
    let quoted = text.split('`').skip(1).step_by(2);
    let looks = |word: &&str| {
        let lower = !word.contains(|c: char| c.is_ascii_uppercase());
        let is_long = word.len() >= NAME_CHARS_MIN && word.matches('_').count() >= 2;
        lower && name(word) == *word && (is_long || word.starts_with('_'))
    };
    quoted.filter(looks).collect()
}

#[track_caller]
fn check(document: &str, text: &str, known: &BTreeSet<String>) {
    let found = named(text);
    assert!(found.len() > 20, "{document} names functions");
    let missing: Vec<&&str> = found
        .iter()
        .filter(|word| !known.contains(**word))
        .collect();
    assert!(
        missing.is_empty(),
        "{document} names what is not there: {missing:?}"
    );
}

#[test]
fn promises_name_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("a root");
    let mut functions = Functions::default();
    functions.read(&root.join("crates"));
    functions.read(&root.join("xtask"));
    let read = |document| fs::read_to_string(root.join(document)).expect("a document");
    check(
        "docs/promises.md",
        &read("docs/promises.md"),
        &functions.tests,
    );
    let architecture = read("ARCHITECTURE.md");
    check("ARCHITECTURE.md", &architecture, &functions.all);
    let (_, of_tests) = architecture.split_once(OF_TESTS).expect("the part");
    let (of_tests, _) = of_tests.split_once("\n## ").expect("a part behind it");
    check("the invariants", of_tests, &functions.tests);
}

#[test]
fn only_what_is_a_test_counts_as_one() {
    let mut functions = Functions::default();
    functions.read_text(
        "#[test]\n#[ignore = \"slow\"]\nfn one() {\n  let fn_like = 1;\n}\n\
         /// About the fn that is none.\nfn helper() {}\nproptest! {\n  #[test]\n  fn two(n in 0..4) {}\n}\n\
         pub(crate) const fn third() {}",
    );
    let [all, tests] = [&functions.all, &functions.tests]
        .map(|names| names.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(all, ["helper", "one", "third", "two"]);
    assert_eq!(tests, ["one", "two"]);
    let named = named("`_2`, `a_name_that_is_long`, `short_one`, `Type::a_name_that_is_long`");
    assert_eq!(named, BTreeSet::from(["_2", "a_name_that_is_long"]));
}
