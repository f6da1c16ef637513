//! The test programs of a crate. Cargo finds none by itself where `tests/it.rs` lists the files, so a file without a `mod`
//! line would never run.

use crate::{Source, check_sizes, files, sources};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// `it`, and programs of campaigns: fuzz targets, models and the crash enumeration.
const PROGRAMS_MAX: usize = 4;

/// Rust files by path.
type Files = BTreeMap<PathBuf, syn::File>;

fn test_files() -> Files {
    let all = sources().into_iter();
    let tests =
        all.filter(|source| source.path.contains("/tests/") && !source.path.contains("/src/"));
    let parsed = tests.map(|source| (PathBuf::from(&source.path), source.parsed()));
    parsed.collect()
}

/// The first files of the test programs of a manifest, with Cargo's rules.
fn programs(manifest: &Source, files: &Files) -> Vec<PathBuf> {
    let tests = Path::new(&manifest.path).with_file_name("tests");
    if !manifest.text.contains("\nautotests = false\n") {
        let is_root = |file: &&PathBuf| {
            let is_main = file.file_name().is_some_and(|name| name == "main.rs");
            let dir = if is_main {
                file.parent()
            } else {
                Some(file.as_path())
            };
            dir.and_then(Path::parent) == Some(&tests)
        };
        return files.keys().filter(is_root).cloned().collect();
    }
    let sections = manifest.text.split("[[test]]\n").skip(1);
    let value = |section: &str, key: &str| {
        let own = section.lines().take_while(|line| !line.starts_with('['));
        let mut values = own.filter_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
        values
            .next()
            .map(|value| value.trim_matches('"').to_owned())
    };
    let root = |section: &str| match value(section, "path") {
        Some(path) => Path::new(&manifest.path).with_file_name(path),
        None => tests
            .join(value(section, "name").expect("a name"))
            .with_extension("rs"),
    };
    sections.map(root).collect()
}

/// A path without `..`.
fn normalized(path: &Path) -> PathBuf {
    let mut found = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(found.pop()),
            other => found.push(other),
        }
    }
    found
}

/// The value of the attribute `path`.
fn path_attribute(item: &syn::ItemMod) -> Option<String> {
    let mut values = item
        .attrs
        .iter()
        .filter_map(|attribute| match &attribute.meta {
            syn::Meta::NameValue(pair) if pair.path.is_ident("path") => Some(&pair.value),
            _ => None,
        });
    match values.next()? {
        syn::Expr::Lit(syn::ExprLit {
            lit: syn::Lit::Str(path),
            ..
        }) => Some(path.value()),
        _ => None,
    }
}

/// The files that these programs consist of. A file `a.rs` has its modules in `a/`, and a first file, a `mod.rs` or a file
/// with the attribute `path` in its own directory.
fn reached(files: &Files, programs: Vec<PathBuf>) -> BTreeSet<PathBuf> {
    let mut reached = BTreeSet::new();
    let mut rest: Vec<_> = programs.into_iter().map(|file| (file, true)).collect();
    while let Some((file, is_in_own_directory)) = rest.pop() {
        let Some(parsed) = files.get(&file) else {
            continue;
        };
        let parent = file.parent().expect("a directory").to_owned();
        let below = if is_in_own_directory {
            parent.clone()
        } else {
            file.with_extension("")
        };
        for item in &parsed.items {
            let syn::Item::Mod(item @ syn::ItemMod { content: None, .. }) = item else {
                continue;
            };
            let name = item.ident.to_string();
            match path_attribute(item) {
                Some(path) => rest.push((normalized(&parent.join(path)), true)),
                None => {
                    rest.push((below.join(&name).with_extension("rs"), false));
                    rest.push((below.join(&name).join("mod.rs"), true));
                }
            }
        }
        reached.insert(file);
    }
    reached
}

fn manifests() -> Vec<Source> {
    let mut found = files(&["crates", "xtask"], "toml");
    found.retain(|file| file.path.ends_with("/Cargo.toml"));
    found
}

#[test]
fn every_test_file_belongs_to_a_program() {
    let files = test_files();
    let programs = manifests()
        .iter()
        .flat_map(|it| programs(it, &files))
        .collect();
    let reached = reached(&files, programs);
    assert!(reached.len() > 300, "the files are found: {reached:?}");
    let lost: Vec<_> = files
        .keys()
        .filter(|file| !reached.contains(*file))
        .collect();
    assert!(
        lost.is_empty(),
        "add a `mod` line to `tests/it.rs` of the crate for: {lost:?}"
    );
}

#[test]
fn crates_have_few_test_programs() {
    let files = test_files();
    let number = |manifest: &Source| (manifest.path.clone(), programs(manifest, &files).len());
    let mut found: Vec<_> = manifests().iter().map(number).collect();
    found.retain(|(_, number)| *number > PROGRAMS_MAX);
    let reason = "each test program links the crate and its dependencies again";
    check_sizes("test programs", reason, &found, &[]);
}

#[test]
fn files_of_programs_are_found() {
    let manifest = |text: &str| Source {
        path: "crates/a/Cargo.toml".into(),
        text: text.into(),
    };
    let file = |(path, text): (&str, &str)| {
        let path = PathBuf::from(format!("crates/a/tests/{path}"));
        (path, syn::parse_file(text).expect("Rust"))
    };
    let files: Files = [
        (
            "it.rs",
            "mod one;\n#[path = \"../tests/other/two.rs\"]\nmod two;\nmod support;",
        ),
        ("one.rs", "mod part;"),
        ("one/part.rs", ""),
        ("other/two.rs", "mod near;"),
        ("other/near.rs", ""),
        ("support/mod.rs", "mod below;"),
        ("support/below.rs", ""),
        ("fuzz/main.rs", "mod input;"),
        ("fuzz/input.rs", ""),
        ("lost.rs", ""),
    ]
    .into_iter()
    .map(file)
    .collect();
    let check = |manifest: &Source, expected: &[&str]| {
        let reached = reached(&files, programs(manifest, &files));
        let lost = files.keys().filter(|file| !reached.contains(*file));
        let lost: Vec<_> = lost
            .map(|file| file.strip_prefix("crates/a/tests").expect("below"))
            .collect();
        assert_eq!(lost, expected.iter().map(Path::new).collect::<Vec<_>>());
    };
    check(&manifest("[package]\n"), &[]);
    let listed = "[package]\nautotests = false\n\n[[test]]\nname = \"it\"\n";
    check(
        &manifest(listed),
        &["fuzz/input.rs", "fuzz/main.rs", "lost.rs"],
    );
    let both = format!(
        "{listed}\n[[test]]\nname = \"fuzz\"\npath = \"tests/fuzz/main.rs\"\n\n[lints]\npath = \"no\"\n"
    );
    check(&manifest(&both), &["lost.rs"]);
}
