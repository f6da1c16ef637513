//! Cyclic dependencies between the modules of a crate.
//!
//! A module is a file. It depends on each other file of the crate whose items its paths name; a
//! name that a file re-exports belongs to the file that defines it, so that a `mod.rs` with only
//! `mod` and `pub use` lines depends on nothing. Methods are not seen.

use crate::{Source, check_sizes, exceptions, sources};
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::{self, Visit};

const MODULES_MAX: usize = 3;
/// Re-exports that lead to re-exports, at most.
const RE_EXPORTS_MAX: usize = 8;

/// Names from the crate's root.
pub(crate) type Path = Vec<String>;

/// The paths that a file uses, and the names that it passes on.
#[derive(Default)]
struct FilePaths {
    used: Vec<Path>,
    /// A name here, and the path that it stands for. The name `*` stands for all names.
    re_exports: Vec<(String, Path)>,
}

impl FilePaths {
    fn of(source: &Source) -> FilePaths {
        let mut paths = FilePaths::default();
        paths.visit_file(&source.parsed());
        paths
    }

    fn add_tree(&mut self, tree: &syn::UseTree, mut prefix: Path, is_public: bool) {
        let (name, own) = match tree {
            syn::UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                return self.add_tree(&path.tree, prefix, is_public);
            }
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.add_tree(tree, prefix.clone(), is_public);
                }
                return;
            }
            syn::UseTree::Name(name) => (name.ident.to_string(), name.ident.to_string()),
            syn::UseTree::Rename(rename) => (rename.rename.to_string(), rename.ident.to_string()),
            syn::UseTree::Glob(_) => ("*".to_owned(), "*".to_owned()),
        };
        if own != "*" && own != "self" {
            prefix.push(own);
        }
        if is_public {
            self.re_exports.push((name, prefix));
        } else {
            self.used.push(prefix);
        }
    }
}

fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|it| {
        let is_cfg = it.path().is_ident("cfg");
        is_cfg
            && it
                .meta
                .require_list()
                .is_ok_and(|it| it.tokens.to_string().contains("test"))
    })
}

impl<'a> Visit<'a> for FilePaths {
    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        let is_public = !matches!(item.vis, syn::Visibility::Inherited);
        if !is_for_tests(&item.attrs) {
            self.add_tree(&item.tree, Path::new(), is_public);
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let names: Path = path
            .segments
            .iter()
            .map(|it| it.ident.to_string())
            .collect();
        if names.len() > 1 {
            self.used.push(names);
        }
        visit::visit_path(self, path);
    }

    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if item.ident != "tests" && !is_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }
}

/// The modules that each module of a crate uses, by their paths; the root is the empty path.
pub(crate) type Graph = BTreeMap<Path, BTreeSet<Path>>;

/// A crate's files.
pub(crate) struct Modules(BTreeMap<Path, FilePaths>);

impl Modules {
    pub(crate) fn of(sources: &[&Source], crate_src: &str) -> Modules {
        let named = sources.iter().filter_map(|source| {
            let path = module_path(source.path.strip_prefix(crate_src)?);
            Some((path, FilePaths::of(source)))
        });
        Modules(named.collect())
    }

    /// The path from the crate's root, of names in the module `here`; `None` for another crate.
    fn absolute(&self, here: &Path, names: &[String]) -> Option<Path> {
        let mut base = here.clone();
        let mut rest = names;
        match names.first()?.as_str() {
            "crate" => (base, rest) = (Path::new(), &names[1..]),
            "self" => rest = &names[1..],
            "super" => {
                while rest.first().is_some_and(|it| it == "super") {
                    base.pop()?;
                    rest = &rest[1..];
                }
            }
            child => {
                base.push(child.to_owned());
                return self.0.contains_key(&base).then(|| {
                    base.extend_from_slice(&names[1..]);
                    base
                });
            }
        }
        base.extend_from_slice(rest);
        Some(base)
    }

    /// The file that defines the item of a path from the root.
    fn defining_file(&self, path: &[String], hops: usize) -> Option<Path> {
        let mut end = path.len();
        while !self.0.contains_key(&path[..end]) {
            end = end.checked_sub(1)?;
        }
        let file = path[..end].to_vec();
        let Some(name) = path.get(end).filter(|_| hops < RE_EXPORTS_MAX) else {
            return Some(file);
        };
        let exports = &self.0[&file].re_exports;
        let Some((_, target)) = exports.iter().find(|(own, _)| own == name) else {
            return Some(file);
        };
        let target = self.absolute(&file, target);
        target.and_then(|target| self.defining_file(&target, hops + 1))
    }

    fn file_of(&self, here: &Path, names: &[String]) -> Option<Path> {
        let path = self.absolute(here, names)?;
        let end = (0..=path.len())
            .rev()
            .find(|end| self.0.contains_key(&path[..*end]))?;
        let is_re_exported = path.get(end).is_some_and(|name| {
            self.0[&path[..end]]
                .re_exports
                .iter()
                .any(|(own, _)| own == name)
        });
        match is_re_exported {
            true => self.defining_file(&path, 0),
            // The path of a module alone imports its name; the uses of the name count.
            false => Some(path[..end].to_vec()),
        }
    }

    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.keys()
    }

    pub(crate) fn graph(&self) -> Graph {
        let uses = |(here, paths): (&Path, &FilePaths)| {
            let imported = self.imported_modules(here, paths);
            let files = paths.used.iter().filter_map(|names| {
                let through = names.first().and_then(|it| imported.get(it));
                through.map_or_else(
                    || self.file_of(here, names),
                    |module| {
                        let full: Path = std::iter::once("crate".to_owned())
                            .chain(module.iter().cloned())
                            .chain(names[1..].iter().cloned())
                            .collect();
                        self.file_of(here, &full)
                    },
                )
            });
            let files = files.filter(|file| file != here);
            (here.clone(), files.collect())
        };
        self.0.iter().map(uses).collect()
    }

    /// The modules that a file imports by name, so that `name::item` means an item of theirs.
    fn imported_modules(&self, here: &Path, paths: &FilePaths) -> BTreeMap<String, Path> {
        let modules = paths.used.iter().filter_map(|names| {
            let path = self.absolute(here, names)?;
            let name = path.last()?.clone();
            self.0.contains_key(&path).then_some((name, path))
        });
        modules.collect()
    }
}

/// The module of a file below `src`.
fn module_path(file: &str) -> Path {
    let stem = file.trim_end_matches(".rs");
    let names = stem
        .split('/')
        .filter(|it| !["lib", "main", "mod"].contains(it));
    names.map(str::to_owned).collect()
}

fn reached(graph: &Graph, from: &Path) -> BTreeSet<Path> {
    let mut found = BTreeSet::new();
    let mut next = vec![from.clone()];
    while let Some(module) = next.pop() {
        for used in graph.get(&module).into_iter().flatten() {
            if found.insert(used.clone()) {
                next.push(used.clone());
            }
        }
    }
    found
}

/// The modules of the largest cycle.
fn largest_circle(graph: &Graph) -> BTreeSet<Path> {
    let reach: BTreeMap<_, _> = graph.keys().map(|it| (it, reached(graph, it))).collect();
    let circle = |module: &Path| -> BTreeSet<Path> {
        let of = reach[module].iter();
        of.filter(|other| reach.get(other).is_some_and(|it| it.contains(module)))
            .cloned()
            .collect()
    };
    let circles = graph.keys().map(circle);
    circles.max_by_key(BTreeSet::len).unwrap_or_default()
}

/// The product code of each crate, by its `src/`.
pub(crate) fn crates(sources: &[Source]) -> BTreeMap<&str, Vec<&Source>> {
    let mut crates: BTreeMap<&str, Vec<&Source>> = BTreeMap::new();
    for source in sources.iter().filter(|it| it.is_product()) {
        if let Some(at) = source.path.find("/src/") {
            let src = &source.path[..at + "/src/".len()];
            crates.entry(src).or_default().push(source);
        }
    }
    crates
}

/// For each folder with modules, those that its direct children use of each other. A child counts
/// with all that is below it; the folder's own file does not count.
fn folders(graph: &Graph) -> BTreeMap<Path, Graph> {
    let mut folders: BTreeMap<Path, Graph> = BTreeMap::new();
    for (module, uses) in graph {
        for depth in 0..module.len() {
            let (folder, child) = (&module[..depth], &module[..=depth]);
            let is_sibling = |it: &&Path| it.starts_with(folder) && it.len() > depth;
            let siblings = uses.iter().filter(is_sibling);
            let siblings = siblings.map(|it| it[..=depth].to_vec());
            let children = folders.entry(folder.to_vec()).or_default();
            let of_child = children.entry(child.to_vec()).or_default();
            of_child.extend(siblings.filter(|it| it != child));
        }
    }
    folders
}

#[test]
fn modules_of_a_folder_form_no_large_circle() {
    let sources = sources();
    let mut large = Vec::new();
    for (src, files) in crates(&sources) {
        for (folder, graph) in folders(&Modules::of(&files, src).graph()) {
            let circle = largest_circle(&graph);
            if circle.len() > MODULES_MAX {
                let names = circle.iter().filter_map(|it| it.last().cloned());
                let names: Vec<String> = names.collect();
                let folder = format!("{src}{}", folder.join("/"));
                println!("{folder}: {}", names.join(", "));
                large.push((folder.trim_end_matches("/src/").to_owned(), circle.len()));
            }
        }
    }
    let reason = "modules that all need each other can only be read together";
    check_sizes("circles of modules", reason, &large, exceptions::CIRCLES);
}

#[test]
fn re_exports_and_imported_modules_are_followed() {
    let file = |path: &str, text: &str| Source {
        path: format!("a/src/{path}"),
        text: text.into(),
    };
    let sources = [
        file("lib.rs", "mod room; mod other; pub use room::Item;"),
        file("room/mod.rs", "mod one; mod two; pub use one::Item;"),
        file(
            "room/one.rs",
            "use super::two; fn f() { two::g() } pub struct Item;",
        ),
        file(
            "room/two.rs",
            "#[cfg(test)] mod tests { use crate::other::X; }",
        ),
        file(
            "other.rs",
            "use crate::{Item, room}; fn h() { room::two::g() }",
        ),
    ];
    let files: Vec<&Source> = sources.iter().collect();
    let graph = Modules::of(&files, "a/src/").graph();
    let path = |text: &str| -> Path { text.split("::").map(str::to_owned).collect() };
    let uses =
        |of: &str| -> Vec<String> { graph[&path(of)].iter().map(|it| it.join("::")).collect() };
    assert_eq!(uses("room::one"), ["room::two"]);
    assert_eq!(uses("room::two"), [""; 0]);
    assert_eq!(uses("room"), [""; 0]);
    assert_eq!(uses("other"), ["room", "room::one", "room::two"]);
    let folders = folders(&graph);
    let circles = folders.values().map(|it| largest_circle(it).len());
    assert_eq!(circles.collect::<Vec<_>>(), [0, 0]);
}
