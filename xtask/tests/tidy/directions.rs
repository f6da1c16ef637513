//! The directions of imports: between crates as the code map of ARCHITECTURE.md says, and from a
//! folder of a crate only to folders before it in the crate's list there.

use crate::circles::{self, Modules};
use crate::{root, sources};
use std::collections::BTreeSet;
use std::fs;

/// The folders of crates in the order in which they may import: each only from folders before it.
/// Modules beside the folders are not checked. ARCHITECTURE.md has the same order.
const ORDERS: &[(&str, &[&str])] = &[
    ("direct", &["protocol", "shared", "client", "server"]),
    (
        "preload",
        &[
            "kernel",
            "state",
            "c_library",
            "engine",
            "descriptors",
            "process",
            "report",
            "io",
            "tracking",
            "interposed",
        ],
    ),
    (
        "store",
        &["format", "shared", "session", "recovery", "owner", "check"],
    ),
    (
        "fs",
        &[
            "format", "live", "alloc", "io", "txn", "tree", "direct", "file", "names", "recovery",
            "fs",
        ],
    ),
];

/// The crates that each row of the code map names in its third column; rows with words such as
/// "all" state no list.
fn code_map(architecture: &str) -> Vec<(String, BTreeSet<String>)> {
    let (_, map) = architecture
        .split_once("\n## Code map\n")
        .expect("the code map");
    let rows = map.lines().skip_while(|line| !line.starts_with("| `"));
    let rows = rows.take_while(|line| line.starts_with("| `"));
    let cells = rows.map(|row| row.split(" | ").collect::<Vec<_>>());
    let listed = cells.filter_map(|cells| {
        let [name, _, uses] = cells.as_slice() else {
            panic!("three columns: {cells:?}");
        };
        let uses = uses.trim_end_matches(" |");
        let is_list = uses == "–" || !uses.contains(' ') || uses.contains(", ");
        let is_list = is_list && !uses.starts_with("all");
        let uses = uses.split(", ").filter(|it| *it != "–").map(str::to_owned);
        (is_list && !name.contains(',')).then(|| {
            let name = name.trim_start_matches("| ").trim_matches('`');
            (name.to_owned(), uses.collect())
        })
    });
    listed.collect()
}

/// The workspace's crates among the dependencies of a manifest.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let lines = manifest.lines().skip_while(|it| *it != "[dependencies]");
    let lines = lines.skip(1).take_while(|it| !it.starts_with('['));
    let names = lines.filter_map(|line| line.strip_prefix("pagemesh-"));
    let end = |it: &str| it.find(['.', ' ', '=']).unwrap_or(it.len());
    names.map(|it| it[..end(it)].to_owned()).collect()
}

#[test]
fn code_map_lists_dependencies_of_crates() {
    let architecture = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("a text");
    let map = code_map(&architecture);
    assert!(map.len() > 10, "{map:?}");
    for (name, listed) in map {
        let manifest = root().join("crates").join(&name).join("Cargo.toml");
        let text = fs::read_to_string(manifest).expect("the crate of the code map");
        let real = dependencies(&text);
        assert_eq!(
            listed, real,
            "crates that {name} uses: ARCHITECTURE.md says the left, Cargo.toml the right. A \
             reader trusts the map; a dependency that it does not show is a layer that is gone"
        );
    }
}

/// The list of a crate's folders in the document: an entry of a list, or a section.
fn folder_list<'a>(architecture: &'a str, name: &str) -> &'a str {
    let (entry, section) = (format!("\n- `{name}`: "), format!("\n### `{name}`, by "));
    let lists = [(entry, "\n- "), (section, "\n## ")];
    let mut found = lists.iter().filter_map(|(start, end)| {
        let (_, list) = architecture.split_once(start)?;
        Some(list.split(end).next().unwrap_or(list))
    });
    found
        .next()
        .unwrap_or_else(|| panic!("a list of the folders of {name}"))
}

#[test]
fn architecture_lists_folders_in_order_of_imports() {
    let architecture = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("a text");
    for (name, order) in ORDERS {
        let mut rest = folder_list(&architecture, name);
        for folder in *order {
            let word = [format!("`{folder}`"), format!("`{folder}/`")];
            let after = word.iter().filter_map(|it| rest.split_once(it.as_str()));
            let after = after.map(|(_, after)| after).max_by_key(|it| it.len());
            rest = after.unwrap_or_else(|| {
                panic!("ARCHITECTURE.md lists {folder} of {name} after the folders that it imports")
            });
        }
    }
}

#[test]
fn folders_import_only_folders_before_them() {
    let sources = sources();
    let crates = circles::crates(&sources);
    let mut wrong = Vec::new();
    for (name, order) in ORDERS {
        let src = format!("crates/{name}/src/");
        let modules = Modules::of(&crates[src.as_str()], &src);
        let rank = |path: &[String]| {
            order
                .iter()
                .position(|it| Some(*it) == path.first().map(String::as_str))
        };
        for folder in *order {
            let is_there = modules
                .paths()
                .any(|it| it.first().is_some_and(|it| it == folder));
            assert!(is_there, "{name} has no folder {folder}");
        }
        for (module, uses) in modules.graph() {
            let later = uses
                .iter()
                .filter(|used| rank(used) > rank(&module) && rank(&module).is_some());
            wrong.extend(
                later.map(|used| format!("{name}: {} uses {}", module.join("::"), used.join("::"))),
            );
        }
    }
    assert!(
        wrong.is_empty(),
        "a folder imports only folders before it in its list, so that a reader can stop there:\n  {}",
        wrong.join("\n  ")
    );
}
