//! The committed files of the console belong to their sources, and to the headers that the manager sends.

use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use walkdir::WalkDir;

/// All that the build of the console reads, from the folder `console`.
const SOURCES: [&str; 7] = [
    "index.html",
    "package.json",
    "package-lock.json",
    "src",
    "svelte.config.js",
    "tsconfig.json",
    "vite.config.ts",
];
/// Folders of the console with code that the build does not read.
const OTHER_CODE: [&str; 3] = ["mock", "scripts", "tests"];
const LINES_MAX: usize = 600;
/// The limit of all scripts and styles together. Compressed they have about two fifths of it.
const BYTES_MAX: usize = 600 << 10;

fn own(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn console() -> PathBuf {
    own("../../console")
}

fn files(roots: &[&str]) -> Vec<PathBuf> {
    let walked = roots
        .iter()
        .flat_map(|root| WalkDir::new(console().join(root)));
    let entries = walked.map(|entry| entry.expect("a readable source"));
    let entries = entries.filter(|entry| entry.file_type().is_file());
    entries.map(walkdir::DirEntry::into_path).collect()
}

fn sha256(bytes: &[u8]) -> String {
    let mut hex = String::new();
    for byte in Sha256::digest(bytes) {
        write!(hex, "{byte:02x}").expect("a string takes all text");
    }
    hex
}

fn name(path: &Path) -> String {
    let name = path.strip_prefix(console()).expect("a source");
    name.to_string_lossy().into_owned()
}

#[test]
fn committed_console_is_built_from_its_sources() {
    let recorded = fs::read_to_string(own("sources.sha256")).expect("the checksums");
    let recorded: BTreeMap<String, String> = recorded
        .lines()
        .filter_map(|line| line.split_once("  "))
        .map(|(sum, name)| (name.to_owned(), sum.to_owned()))
        .collect();
    let present: BTreeMap<String, String> = files(&SOURCES)
        .iter()
        .map(|path| (name(path), sha256(&fs::read(path).expect("a source"))))
        .collect();
    let names = recorded.keys().chain(present.keys());
    let changed: Vec<&String> = names
        .filter(|name| recorded.get(*name) != present.get(*name))
        .collect();
    assert!(
        changed.is_empty(),
        "the console was not built again after a change of {changed:?}: run make console"
    );
}

#[test]
fn table_has_every_built_file_with_its_etag() {
    let mut found: Vec<String> = Vec::new();
    for entry in WalkDir::new(own("assets")) {
        let entry = entry.expect("a readable file");
        if entry.file_type().is_file() {
            let path = entry.path().strip_prefix(own("assets")).expect("a file");
            found.push(format!("/{}", path.to_string_lossy()));
        }
    }
    found.sort();
    let listed: Vec<&str> = pagemesh_console::all().iter().map(|it| it.path).collect();
    assert_eq!(listed, found, "run make console");
    for file in pagemesh_console::all() {
        let etag = format!("\"{}\"", &sha256(file.bytes)[..32]);
        assert_eq!(file.etag, etag, "{}", file.path);
    }
}

#[test]
fn page_obeys_the_content_security_policy() {
    let index = pagemesh_console::index().expect("the page");
    let html = std::str::from_utf8(index.bytes).expect("a text");
    for forbidden in [
        "style=",
        "<style",
        "javascript:",
        "data:",
        "http://",
        "https://",
        "onload=",
    ] {
        assert!(!html.contains(forbidden), "{forbidden} in the page");
    }
    for script in html.split("<script").skip(1) {
        assert!(script.contains(" src=\"/assets/"), "an inline script");
    }
    for reference in html.split("\"/assets/").skip(1) {
        let path = format!("/assets/{}", reference.split('"').next().expect("a path"));
        let file = pagemesh_console::file(&path).expect("a file of the page");
        assert!(file.is_hashed());
    }
}

#[test]
fn console_stays_small() {
    let bytes: usize = pagemesh_console::all()
        .iter()
        .map(|it| it.bytes.len())
        .sum();
    assert!(bytes <= BYTES_MAX, "{bytes} bytes");
    let code = [&SOURCES[..], &OTHER_CODE[..]].concat();
    let code = files(&code);
    let code = code.iter().filter(|path| {
        let extension = path.extension().and_then(|it| it.to_str());
        matches!(extension, Some("ts" | "svelte" | "css" | "js"))
    });
    let long = code.filter(|path| {
        let text = fs::read_to_string(path).expect("a text");
        text.lines().count() > LINES_MAX
    });
    let long: Vec<String> = long.map(|path| name(path)).collect();
    assert!(long.is_empty(), "more than {LINES_MAX} lines: {long:?}");
}

#[test]
fn markup_from_data_is_never_inserted() {
    for path in files(&["src"]) {
        let text = fs::read_to_string(&path).unwrap_or_default();
        for forbidden in ["{@html", "innerHTML", "eval(", "document.write"] {
            assert!(!text.contains(forbidden), "{forbidden} in {}", name(&path));
        }
    }
}
