//! Rules for the source and the documents that no other tool checks.
//!
//! Each rule prints its reason. A rule that the tree does not meet yet has a list of exceptions with
//! their sizes in `exceptions.rs`: an exception may shrink and may not grow, and a rule fails on
//! an exception that is no longer needed.

mod circles;
mod directions;
mod exceptions;
mod links;
mod names;
mod prose;
mod sizes;
mod test_programs;
mod words;

use std::fs;
use std::path::{Path, PathBuf};

/// A Rust file of the workspace.
struct Source {
    /// From the root of the repository, with `/`.
    path: String,
    text: String,
}

impl Source {
    /// Whether users run this code; false for tests, models, benchmarks and simulations.
    fn is_product(&self) -> bool {
        const NOT_PRODUCT: [&str; 7] = [
            "/tests/", "/testing", "/models", "/fuzz", "/bench/", "/sim/", "xtask/",
        ];
        self.path.contains("/src/")
            && !NOT_PRODUCT.iter().any(|part| self.path.contains(part))
            && !self.path.ends_with("/tests.rs")
            && !self.path.starts_with("crates/fs-model")
    }

    fn parsed(&self) -> syn::File {
        syn::parse_file(&self.text).unwrap_or_else(|error| panic!("{}: {error}", self.path))
    }
}

fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().expect("the repository").to_owned()
}

/// The files with this extension below some directories of the repository.
fn files(directories: &[&str], extension: &str) -> Vec<Source> {
    let root = root();
    let walked = directories.iter().flat_map(|dir| {
        let entries = walkdir::WalkDir::new(root.join(dir)).sort_by_file_name();
        entries
            .into_iter()
            .filter_entry(|entry| entry.file_name() != "target")
    });
    walked
        .map(|entry| entry.expect("a readable directory").into_path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .map(|path| Source {
            text: fs::read_to_string(&path).expect("a text"),
            path: path
                .strip_prefix(&root)
                .expect("a path below the root")
                .to_string_lossy()
                .into(),
        })
        .collect()
}

fn sources() -> Vec<Source> {
    files(&["crates", "xtask"], "rs")
}

fn documents() -> Vec<Source> {
    let mut found = files(&["docs"], "md");
    let at_root = fs::read_dir(root())
        .expect("the repository")
        .filter_map(Result::ok);
    found.extend(at_root.filter_map(|entry| {
        let path = entry.file_name().to_string_lossy().into_owned();
        path.ends_with(".md").then(|| Source {
            text: fs::read_to_string(entry.path()).expect("a text"),
            path,
        })
    }));
    found
}

/// Compares sizes above a limit with the list of exceptions.
fn check_sizes(rule: &str, reason: &str, found: &[(String, usize)], exceptions: &[(&str, usize)]) {
    let mut wrong = Vec::new();
    for (name, size) in found {
        match exceptions.iter().find(|(exception, _)| exception == name) {
            None => wrong.push(format!("{name} has {size}")),
            Some((_, allowed)) if size > allowed => {
                wrong.push(format!("{name} has grown from {allowed} to {size}"));
            }
            Some(_) => {}
        }
    }
    for (exception, _) in exceptions {
        if !found.iter().any(|(name, _)| name == exception) {
            wrong.push(format!("{exception} needs no exception any more"));
        }
    }
    assert!(
        wrong.is_empty(),
        "{rule} ({reason}):\n  {}",
        wrong.join("\n  ")
    );
}
