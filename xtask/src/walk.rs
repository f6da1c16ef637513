//! `cargo xtask walk`: the files that one write passes, in order.
//!
//! The walks of docs/internals.md name each function of the way, as `Type::function` or
//! `module::function`. This finds the file that defines each, so that the list changes with the
//! code. A test in `tests/promises.rs` checks that the named functions exist.

use crate::root;
use crate::source_lines::{function_name, leading_identifier};
use anyhow::{Context, bail};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The end of each way: the fence that makes the write durable in all pools.
const COMMIT: &str = "**This is the";

/// One way through the code: a name, and where its parts begin and end in docs/internals.md.
struct Walk {
    name: &'static str,
    files_max: usize,
    parts: &'static [(&'static str, &'static str)],
}

const VOLUME: (&str, &str) = ("**Volume** (", "**Store** (");
const STORE: (&str, &str) = ("**Store** (", COMMIT);
const WALKS: [Walk; 3] = [
    Walk {
        name: "4 KiB over NBD",
        files_max: 14,
        parts: &[("**NBD** (", "**Volume** ("), VOLUME, STORE],
    },
    Walk {
        name: "4 KiB through the mount",
        files_max: 16,
        parts: &[
            ("**A write of 4 KiB within a file.**", "**A create.**"),
            VOLUME,
            STORE,
        ],
    },
    Walk {
        name: "4 KiB on the direct path",
        files_max: 12,
        parts: &[
            (
                "**A write of 4 KiB on the direct path**",
                "With an asynchronous replica,",
            ),
            STORE,
        ],
    },
];

/// Prints each way with its files, and compares their number with the goal.
pub(crate) fn print() -> anyhow::Result<()> {
    let document = root().join("docs/internals.md");
    let text = fs::read_to_string(&document)
        .with_context(|| format!("cannot read {}", document.display()))?;
    let definitions = Definitions::read(&root().join("crates"))?;
    for walk in &WALKS {
        let files = walk.files(&text, &definitions)?;
        println!(
            "{}: {} files, the goal is {}",
            walk.name,
            files.len(),
            walk.files_max
        );
        for (file, functions) in &files {
            println!("    {file}: {}", functions.join(", "));
        }
    }
    Ok(())
}

impl Walk {
    /// The files in the order of their first function, with their functions.
    fn files(
        &self,
        text: &str,
        definitions: &Definitions,
    ) -> anyhow::Result<Vec<(String, Vec<String>)>> {
        let mut files: Vec<(String, Vec<String>)> = Vec::new();
        for (start, end) in self.parts {
            let (_, part) = text
                .split_once(start)
                .with_context(|| format!("docs/internals.md has no \"{start}\""))?;
            let (part, _) = part
                .split_once(end)
                .with_context(|| format!("docs/internals.md has no \"{end}\" after \"{start}\""))?;
            for path in named_functions(part) {
                let Some(file) = definitions.file(path) else {
                    bail!("docs/internals.md: no {path} in the product's code");
                };
                let name = path.to_owned();
                match files.iter_mut().find(|(known, _)| known == file) {
                    Some((_, functions)) if functions.contains(&name) => {}
                    Some((_, functions)) => functions.push(name),
                    None => files.push((file.to_owned(), vec![name])),
                }
            }
        }
        Ok(files)
    }
}

/// The paths in backquotes that end in a function.
fn named_functions(text: &str) -> impl Iterator<Item = &str> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter(|word| {
        let function = word.rsplit_once("::").map(|(_, function)| function);
        function.is_some_and(|it| it.starts_with(char::is_lowercase))
    })
}

/// The files that define each function, by its type or module.
struct Definitions(BTreeMap<(String, String), Vec<String>>);

impl Definitions {
    fn read(crates: &Path) -> anyhow::Result<Definitions> {
        let mut definitions = Definitions(BTreeMap::new());
        let mut dirs = vec![crates.to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(&dir).with_context(|| format!("{}", dir.display()))? {
                let path = entry?.path();
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                if path.is_dir() {
                    if !["tests", "testing", "models", "enumerate", "fuzz"].contains(&&*name) {
                        dirs.push(path);
                    }
                } else if name.ends_with(".rs") {
                    let text = fs::read_to_string(&path)
                        .with_context(|| format!("cannot read {}", path.display()))?;
                    definitions.add_file(crates, &path, &text);
                }
            }
        }
        Ok(definitions)
    }

    fn add_file(&mut self, crates: &Path, path: &Path, text: &str) {
        let module = module_name(path);
        let file = path.strip_prefix(crates).unwrap_or(path).to_string_lossy();
        let mut owner = None;
        for line in text.lines() {
            if line == "#[cfg(test)]" {
                return;
            }
            let is_trait = line.split(' ').take(3).any(|word| word == "trait");
            if line.starts_with("impl") || is_trait {
                owner = Some(implemented_type(line).to_owned());
            } else if line == "}" {
                owner = None;
            }
            let line = line.trim().replace("extern \"C\" ", "");
            let Some(function) = function_name(&line) else {
                continue;
            };
            for owner in owner.iter().cloned().chain([module.clone()]) {
                let files = self.0.entry((owner, function.to_owned())).or_default();
                if !files.iter().any(|known| *known == file) {
                    files.push(file.clone().into_owned());
                }
            }
        }
    }

    /// The file that defines `…::owner::function`, with every earlier name of the path in its own.
    fn file(&self, path: &str) -> Option<&str> {
        let names: Vec<&str> = path.split("::").collect();
        let [above @ .., owner, function] = names.as_slice() else {
            return None;
        };
        let files = self.0.get(&((*owner).to_owned(), (*function).to_owned()))?;
        let is_below = |file: &&String| {
            above
                .iter()
                .all(|it| file.split('/').any(|part| part == *it))
        };
        files.iter().find(is_below).map(String::as_str)
    }
}

/// The name of a file's module.
fn module_name(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let name = if stem == "mod" {
        path.parent().and_then(Path::file_name).unwrap_or_default()
    } else {
        path.file_stem().unwrap_or_default()
    };
    name.to_string_lossy().into_owned()
}

/// The type of an `impl` line, or the trait of a `trait` line, without generics.
fn implemented_type(line: &str) -> &str {
    let subject = line.rsplit(" for ").next().unwrap_or(line);
    let subject = subject.rsplit("trait ").next().unwrap_or(subject);
    let subject = match subject.strip_prefix("impl<") {
        Some(rest) => rest.split_once("> ").map_or(rest, |(_, rest)| rest),
        None => subject.trim_start_matches("impl "),
    };
    leading_identifier(subject)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn walk_lists_defining_files_once() {
        let mut definitions = Definitions(BTreeMap::new());
        let text = "impl<B: Backend> Engine<B> {\n    pub(crate) fn submit(&self) {\n    }\n}\n\
                    fn write() {}\n#[cfg(test)]\nmod tests {\n    fn hidden() {}\n}\n";
        definitions.add_file(Path::new("c"), Path::new("c/v/src/engine/mod.rs"), text);
        let walk = Walk {
            name: "test",
            files_max: 1,
            parts: &[("from", "to")],
        };
        let way = "from `v::Engine::submit`, `engine::write` and `Engine::submit` to";
        let files = walk.files(way, &definitions).expect("known functions");
        let functions = ["v::Engine::submit", "engine::write", "Engine::submit"].map(str::to_owned);
        assert_eq!(
            files,
            [("v/src/engine/mod.rs".to_owned(), functions.to_vec())]
        );
        let unknown = walk.files("from `tests::hidden` to", &definitions);
        assert!(unknown.is_err_and(|error| error.to_string().contains("tests::hidden")));
    }
}
