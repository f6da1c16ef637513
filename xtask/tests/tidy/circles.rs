//! Cyclic dependencies between the modules of a crate.

use crate::{Source, check_sizes, exceptions, sources};
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::{self, Visit};

const MODULES_MAX: usize = 3;

/// The names after `crate` in the paths of a file.
#[derive(Default)]
struct Uses(BTreeSet<String>);

impl<'a> Visit<'a> for Uses {
    fn visit_use_tree(&mut self, tree: &'a syn::UseTree) {
        if let syn::UseTree::Path(path) = tree
            && path.ident == "crate"
        {
            self.add_tree(&path.tree);
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let mut names = path.segments.iter().map(|it| it.ident.to_string());
        if names.next().is_some_and(|it| it == "crate") {
            self.0.extend(names.next());
        }
        visit::visit_path(self, path);
    }

    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if item.ident != "tests" {
            visit::visit_item_mod(self, item);
        }
    }
}

impl Uses {
    fn add_tree(&mut self, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => drop(self.0.insert(path.ident.to_string())),
            syn::UseTree::Name(name) => drop(self.0.insert(name.ident.to_string())),
            syn::UseTree::Rename(rename) => drop(self.0.insert(rename.ident.to_string())),
            syn::UseTree::Group(group) => group.items.iter().for_each(|it| self.add_tree(it)),
            syn::UseTree::Glob(_) => {}
        }
    }
}

type Graph = BTreeMap<String, BTreeSet<String>>;

/// The top-level modules that each top-level module of a crate uses.
fn graph(sources: &[&Source], crate_src: &str) -> Graph {
    let module = |source: &Source| -> Option<String> {
        let below = source.path.strip_prefix(crate_src)?;
        let first = below.split('/').next()?.trim_end_matches(".rs");
        (first != "lib" && first != "main").then(|| first.to_owned())
    };
    let mut graph = Graph::new();
    for source in sources {
        let Some(module) = module(source) else {
            continue;
        };
        let mut uses = Uses::default();
        uses.visit_file(&source.parsed());
        graph.entry(module).or_default().extend(uses.0);
    }
    let modules: BTreeSet<String> = graph.keys().cloned().collect();
    for (module, uses) in &mut graph {
        uses.retain(|it| it != module && modules.contains(it));
    }
    graph
}

fn reached(graph: &Graph, from: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut next = vec![from.to_owned()];
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
fn largest_circle(graph: &Graph) -> BTreeSet<String> {
    let reach: BTreeMap<_, _> = graph.keys().map(|it| (it, reached(graph, it))).collect();
    let circle = |module: &String| -> BTreeSet<String> {
        let of = reach[module].iter();
        of.filter(|other| reach[*other].contains(module))
            .cloned()
            .collect()
    };
    graph
        .keys()
        .map(circle)
        .max_by_key(BTreeSet::len)
        .unwrap_or_default()
}

#[test]
fn modules_of_a_crate_form_no_large_circle() {
    let sources = sources();
    let product: Vec<&Source> = sources.iter().filter(|it| it.is_product()).collect();
    let crates: BTreeSet<&str> = product
        .iter()
        .filter_map(|it| {
            it.path
                .find("/src/")
                .map(|at| &it.path[..at + "/src/".len()])
        })
        .collect();
    let mut large = Vec::new();
    for crate_src in crates {
        let of: Vec<&Source> = product
            .iter()
            .copied()
            .filter(|it| it.path.starts_with(crate_src))
            .collect();
        let circle = largest_circle(&graph(&of, crate_src));
        if circle.len() > MODULES_MAX {
            println!("{crate_src}: {circle:?}");
            large.push((crate_src.trim_end_matches("/src/").to_owned(), circle.len()));
        }
    }
    let reason = "modules that all need each other can only be read together";
    check_sizes("circles of modules", reason, &large, exceptions::CIRCLES);
}
