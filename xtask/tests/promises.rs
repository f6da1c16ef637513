//! The documents name the tests of invariants and promises; those tests must exist.

#[path = "../src/source_lines.rs"]
mod source_lines;

use source_lines::{function_name, leading_identifier};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Minimum length of a function name in backquotes, to tell it from other words. Names of fuzz
/// targets are exempt.
const NAME_CHARS_MIN: usize = 12;
/// The part of docs/testing.md that names tests.
const TESTS_HEADING: &str = "\n## Invariants and the tests that hold them\n";

/// The functions of the workspace, and the tests among them.
#[derive(Default)]
struct FunctionNames {
    all: BTreeSet<String>,
    tests: BTreeSet<String>,
}

impl FunctionNames {
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
        let by_both = by_both(text);
        for line in text.lines().map(str::trim) {
            // Tests in `proptest!` have the attribute, too.
            is_test |= line == "#[test]";
            let Some(function) = function_name(line) else {
                continue;
            };
            self.all.insert(function.to_owned());
            if std::mem::take(&mut is_test) || by_both.contains(function) {
                self.tests.insert(function.to_owned());
            }
        }
    }
}

/// The functions that `by_both!` turns into tests, one a line.
fn by_both(text: &str) -> BTreeSet<&str> {
    let lines = text.lines().skip_while(|line| *line != "by_both! {");
    let lines = lines.skip(1).take_while(|line| *line != "}");
    lines.map(str::trim).collect()
}

/// Words in backquotes that can only be function names, also those with an elided part.
fn quoted_function_names(text: &str) -> BTreeSet<&str> {
    let quoted = text.split('`').skip(1).step_by(2);
    let looks = |word: &&str| {
        let lower = !word.contains(|c: char| c.is_ascii_uppercase());
        let is_long = word.len() >= NAME_CHARS_MIN && word.matches('_').count() >= 2;
        let is_marked = word.starts_with("fuzz_") || word.starts_with('_');
        lower && leading_identifier(word) == *word && (is_long || is_marked)
    };
    quoted.filter(looks).collect()
}

#[track_caller]
fn check(document: &str, text: &str, known: &BTreeSet<String>) {
    let found = quoted_function_names(text);
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

/// Each `Type::function` in backquotes, in two parts.
fn quoted_methods(text: &str) -> Vec<(&str, &str)> {
    let quoted = text.split('`').skip(1).step_by(2);
    let methods = quoted.filter_map(|word| word.rsplit_once("::"));
    let methods = methods.filter(|(of, function)| {
        let of_type = of
            .rsplit("::")
            .next()
            .is_some_and(|it| it.starts_with(char::is_uppercase));
        of_type && leading_identifier(function) == *function
    });
    methods
        .filter(|(_, function)| function.starts_with(char::is_lowercase))
        .collect()
}

/// Checks that the function of each `Type::function` in backquotes exists.
#[track_caller]
fn check_methods(document: &str, text: &str, known: &BTreeSet<String>) {
    let methods = quoted_methods(text);
    assert!(methods.len() > 20, "{document} names methods");
    let missing = methods
        .iter()
        .filter(|(_, function)| !known.contains(*function));
    let missing: Vec<String> = missing
        .map(|(of, function)| format!("{of}::{function}"))
        .collect();
    assert!(
        missing.is_empty(),
        "{document} names missing methods: {missing:?}"
    );
}

/// A function in a test file, and its calls.
struct Caller {
    file: PathBuf,
    /// The type of a method, or else the stem of the file.
    owner: String,
    name: String,
    is_test: bool,
    calls: Vec<Call>,
}

/// `name(…)`, or `of::name(…)`.
#[derive(Debug, PartialEq)]
struct Call {
    owner: Option<String>,
    name: String,
}

impl Caller {
    /// Whether this function is the target of a call in `by`.
    fn is_called_by(&self, by: &Caller, call: &Call) -> bool {
        let is_it = match &call.owner {
            Some(of) if of == "super" => by.file.parent() == Some(&self.file.with_extension("")),
            Some(of) => *of == self.owner,
            None => self.file == by.file,
        };
        is_it && call.name == self.name
    }
}

/// The calls on a line, without method calls.
fn calls_of_line(line: &str) -> Vec<Call> {
    let is_path = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let before_each = line.match_indices('(').map(|(at, _)| &line[..at]);
    let paths = before_each.filter_map(|before| {
        let start = before.rfind(|c| !is_path(c)).map_or(0, |at| at + 1);
        (!before[..start].ends_with('.')).then(|| &before[start..])
    });
    let call = |path: &str| {
        let mut words = path.rsplit("::").map(str::to_owned);
        let name = words.next().filter(|name| !name.is_empty())?;
        let of = words.next();
        Some(Call { owner: of, name })
    };
    paths.filter_map(call).collect()
}

/// The functions of a test file.
fn callers_of_file(file: &Path, text: &str) -> Vec<Caller> {
    let stem = file.file_stem().and_then(|stem| stem.to_str());
    let stem = stem.unwrap_or_default();
    let (mut of, mut is_test, mut found) = (stem, false, Vec::<Caller>::new());
    let by_both = by_both(text);
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("impl ") {
            let subject = rest.rsplit(" for ").next().unwrap_or(rest);
            of = leading_identifier(subject);
        } else if line == "}" {
            of = stem;
        }
        is_test |= line.trim() == "#[test]";
        if let Some(function) = function_name(line.trim()) {
            found.push(Caller {
                file: file.to_owned(),
                owner: of.to_owned(),
                name: function.to_owned(),
                is_test: std::mem::take(&mut is_test) || by_both.contains(function),
                calls: vec![],
            });
        } else if let Some(last) = found.last_mut() {
            last.calls.extend(calls_of_line(line));
        }
    }
    found
}

fn collect_rust_files(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect_rust_files(&path, into);
        } else if path.extension().is_some_and(|it| it == "rs") {
            into.push(path);
        }
    }
}

/// The tests that may be skipped: those that reach a call of `skip`.
fn skippable_tests(callers: &[Caller]) -> BTreeSet<String> {
    let calls_skip = |caller: &Caller| caller.calls.iter().any(|call| call.name == "skip");
    let mut found: Vec<bool> = callers.iter().map(calls_skip).collect();
    loop {
        let reaches = |caller: &Caller| {
            let reached = callers.iter().zip(&found).filter(|(_, found)| **found);
            let mut reached = reached.map(|(callee, _)| callee);
            reached.any(|callee| {
                caller
                    .calls
                    .iter()
                    .any(|call| callee.is_called_by(caller, call))
            })
        };
        let next: Vec<bool> = callers
            .iter()
            .zip(&found)
            .map(|(caller, found)| *found || reaches(caller))
            .collect();
        if next == found {
            break;
        }
        found = next;
    }
    let tests = callers.iter().zip(found);
    let tests = tests.filter(|(caller, found)| *found && caller.is_test);
    tests.map(|(caller, _)| caller.name.clone()).collect()
}

/// Words in backquotes, and whether "(root)" follows them.
fn root_marks(text: &str) -> Vec<(String, bool)> {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let parts: Vec<&str> = text.split('`').collect();
    let quoted = parts.windows(2).skip(1).step_by(2);
    quoted
        .map(|pair| (pair[0].to_owned(), pair[1].starts_with(" (root)")))
        .collect()
}

fn root() -> &'static Path {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().expect("a root")
}

/// The promises mark each test that needs privileges with "(root)".
#[test]
fn promises_mark_tests_that_need_root() {
    let mut skipped = BTreeSet::new();
    let rooms = ["crates", "crates/front"].map(|above| root().join(above));
    let rooms = rooms.map(|above| fs::read_dir(above).expect("the rooms"));
    for room in rooms.into_iter().flatten() {
        let mut found = vec![];
        collect_rust_files(&room.expect("a room").path().join("tests"), &mut found);
        let read = |file: &PathBuf| callers_of_file(file, &fs::read_to_string(file).expect("text"));
        let all: Vec<Caller> = found.iter().flat_map(read).collect();
        skipped.extend(skippable_tests(&all));
    }
    for known in [
        "client_cut_off_from_brick_continues",
        "pools_work_on_full_tmpfs",
        "clock_jumps_between_restarts_are_harmless",
        "mounted_device_is_refused",
        "concurrent_appends_do_not_overlap",
    ] {
        assert!(skipped.contains(known), "{known} is not among {skipped:?}");
    }
    let promises = fs::read_to_string(root().join("docs/promises.md")).expect("a document");
    let wrong: Vec<_> = root_marks(&promises)
        .into_iter()
        .filter(|(word, is_marked)| skipped.contains(word) != *is_marked)
        .collect();
    assert!(
        wrong.is_empty(),
        "docs/promises.md must mark exactly what may be skipped by \"(root)\": {wrong:?}"
    );
}

#[test]
fn only_tests_that_reach_skip_need_root() {
    let text = "fn make() {\n    Net::new(2);\n}\nimpl Net {\n    fn new() {\n        skip(\"no\");\n    }\n}\n\
         by_both! {\n    far\n}\nfn far() {\n    make();\n}\n#[test]\nfn near() {\n    it.skip(1);\n    Other::new();\n}\n";
    let mut all = callers_of_file(Path::new("a/net.rs"), text);
    assert_eq!(skippable_tests(&all), BTreeSet::from(["far".to_owned()]));
    let below = "#[test]\nfn below() {\n    super::make();\n}\n";
    for (file, is_below) in [("a/net/one.rs", true), ("a/other/one.rs", false)] {
        all.extend(callers_of_file(Path::new(file), below));
        assert_eq!(skippable_tests(&all).contains("below"), is_below, "{file}");
        all.pop();
    }
    let marks = root_marks("`one`\n  (root), `two` and `three` (root).");
    let marks: Vec<bool> = marks.into_iter().map(|(_, is_marked)| is_marked).collect();
    assert_eq!(marks, [true, false, true]);
}

fn workspace_functions() -> FunctionNames {
    let mut functions = FunctionNames::default();
    functions.read(&root().join("crates"));
    functions.read(&root().join("xtask"));
    functions
}

#[test]
fn promises_name_tests_that_exist() {
    let root = root();
    let functions = workspace_functions();
    let read = |document| fs::read_to_string(root.join(document)).expect("a document");
    check(
        "docs/promises.md",
        &read("docs/promises.md"),
        &functions.tests,
    );
    check_methods(
        "docs/internals.md",
        &read("docs/internals.md"),
        &functions.all,
    );
    let testing = read("docs/testing.md");
    let (_, of_tests) = testing.split_once(TESTS_HEADING).expect("the part");
    check("the invariants", of_tests, &functions.tests);
}

/// The field of a line that declares one.
fn field_name(line: &str) -> Option<&str> {
    let line = line.trim();
    let line = line.strip_prefix("pub").unwrap_or(line);
    let line = match line.strip_prefix('(') {
        Some(rest) => rest.split_once(')')?.1,
        None => line,
    };
    let name = leading_identifier(line.trim_start());
    let is_field = line.trim_start()[name.len()..].starts_with(": ");
    (is_field && !name.is_empty()).then_some(name)
}

/// A comment that names a function of another file, without a link, is not checked by rustdoc.
#[test]
fn comments_name_methods_and_fields_that_exist() {
    let mut known = workspace_functions().all;
    let mut files = Vec::new();
    collect_rust_files(&root().join("crates"), &mut files);
    let read = |file: PathBuf| (fs::read_to_string(&file).expect("text"), file);
    let files: Vec<(String, PathBuf)> = files.into_iter().map(read).collect();
    for (text, _) in &files {
        known.extend(text.lines().filter_map(field_name).map(str::to_owned));
    }
    let mut missing = Vec::new();
    for (text, file) in &files {
        let comments = text.lines().map(str::trim);
        for line in comments.filter(|line| line.starts_with("//")) {
            let methods = quoted_methods(line);
            let wrong = methods.iter().filter(|(_, name)| !known.contains(*name));
            missing.extend(wrong.map(|(of, name)| format!("{}: {of}::{name}", file.display())));
        }
    }
    assert!(
        missing.is_empty(),
        "comments name functions or fields that are missing:\n  {}",
        missing.join("\n  ")
    );
}

#[test]
fn fields_are_found() {
    let lines = [
        "    pub(crate) one: u8,",
        "two: Vec<u8>,",
        "let it: u8;",
        "a::b()",
    ];
    let names: Vec<_> = lines.into_iter().filter_map(field_name).collect();
    assert_eq!(names, ["one", "two"]);
}

#[test]
fn only_test_functions_count_as_tests() {
    let mut functions = FunctionNames::default();
    functions.read_text(
        "#[test]\n#[ignore = \"slow\"]\nfn one() {\n  let fn_like = 1;\n}\n\
         /// About the fn that is none.\nfn helper() {}\nproptest! {\n  #[test]\n  fn two(n in 0..4) {}\n}\n\
         pub(crate) const fn third() {}",
    );
    let [all, tests] = [&functions.all, &functions.tests]
        .map(|names| names.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(all, ["helper", "one", "third", "two"]);
    assert_eq!(tests, ["one", "two"]);
    let named = quoted_function_names(
        "`_2`, `a_name_that_is_long`, `short_one`, `Type::a_name_that_is_long`",
    );
    assert_eq!(named, BTreeSet::from(["_2", "a_name_that_is_long"]));
}

/// The names that the runs of `cargo test` in the Makefile select, behind `--nocapture`.
fn test_filters(makefile: &str) -> Vec<&str> {
    let runs = makefile
        .lines()
        .filter_map(|line| line.split_once("--nocapture"));
    let words = runs.flat_map(|(_, names)| {
        names.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':')
    });
    words
        .filter(|word| word.contains('_') || word.ends_with("::"))
        .collect()
}

#[test]
fn makefile_filters_match_tests() {
    let functions = workspace_functions();
    let makefile = fs::read_to_string(root().join("Makefile")).expect("a Makefile");
    let joined = makefile.replace("\\\n", " ");
    let filters = test_filters(&joined);
    assert!(filters.len() > 8, "{filters:?}");
    for filter in filters {
        let (modules, name) = filter.rsplit_once("::").unwrap_or(("", filter));
        let has_modules = modules.split_terminator("::").all(has_module);
        let has_name = functions.tests.iter().any(|test| test.contains(name));
        assert!(
            has_modules && has_name,
            "no test of the Makefile's {filter}"
        );
    }
}

/// The paths of tests that the chores give to `cargo test`.
#[test]
fn chores_name_tests_that_exist() {
    let functions = workspace_functions();
    let text = fs::read_to_string(root().join("xtask/src/campaigns.rs")).expect("the chores");
    let is_path = |word: &&str| {
        word.contains("::")
            && word
                .chars()
                .all(|c| c.is_ascii_lowercase() || "_:".contains(c))
    };
    let paths: Vec<&str> = text.split('"').skip(1).step_by(2).filter(is_path).collect();
    assert!(paths.len() > 3, "{paths:?}");
    for path in paths {
        for part in path.split("::").filter(|part| !part.is_empty()) {
            let is_known = has_module(part) || functions.tests.contains(part);
            assert!(is_known, "{path}: no {part}");
        }
    }
}

/// Whether a file or a directory of the crates is this module.
fn has_module(module: &str) -> bool {
    let entries = walkdir::WalkDir::new(root().join("crates")).into_iter();
    let mut entries = entries.map(|entry| entry.expect("a readable directory"));
    entries.any(|entry| entry.path().file_stem().is_some_and(|stem| stem == module))
}
