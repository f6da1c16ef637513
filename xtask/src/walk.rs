//! `cargo xtask walk`: the files that one write passes, in order.
//!
//! Modules on the way have a section `# One write` in their documentation. Together the sections
//! name each function of the way, as `Type::function` or `module::function`. This finds the file
//! that defines each, so that the list changes with the code.
//!
//! The rule of a section is [`RULE`]. A test compares the numbers of files with their limits.

use crate::root;
use crate::source_lines::{function_name, leading_identifier};
use anyhow::{Context, bail};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The functions that a section names.
const RULE: &str = "\
A walk names, for the success path of a 4 KiB overwrite on a warm and healthy volume, from the request
to its answer, each function that decides the way or changes state that other threads see. A
predicate of a single load, bookkeeping of the calling thread alone, calls that only pass arguments
on, and cold steps are described in words.";

/// The first line of a section. It ends at the next heading of the same level.
const HEADING: &str = "# One write";

const NBD: &str = "crates/front/nbd/src/connection.rs";
const FUSE: &str = "crates/front/fuse/src/worker_pool.rs";
const FS: &str = "crates/fs/src/file/write.rs";
const PRELOAD: &str = "crates/preload/src/io/transfer.rs";
const DIRECT: &str = "crates/direct/src/client/file.rs";
const VOLUME: &str = "crates/volume/src/client/channel/mod.rs";
const STORE: &str = "crates/store/src/session/mod.rs";

/// One way through the code, by the files with its sections.
struct Walk {
    name: &'static str,
    /// The number of files on it may not exceed this. Lower it when the walk gets shorter.
    files_max: usize,
    /// The number of files that a reader should need.
    files_goal: usize,
    sections: &'static [&'static str],
}

const WALKS: [Walk; 3] = [
    Walk {
        name: "4 KiB over NBD",
        files_max: 17,
        files_goal: 14,
        sections: &[NBD, VOLUME, STORE],
    },
    Walk {
        name: "4 KiB through the mount, over io_uring",
        files_max: 21,
        files_goal: 16,
        sections: &[FUSE, FS, VOLUME, STORE],
    },
    Walk {
        name: "4 KiB on the direct path",
        files_max: 15,
        files_goal: 12,
        sections: &[PRELOAD, DIRECT, STORE],
    },
];

/// Prints each way with its files, and compares their number with the goal.
pub(crate) fn print() -> anyhow::Result<()> {
    println!("{RULE}\n");
    let definitions = Definitions::read(&root().join("crates"))?;
    for walk in &WALKS {
        let files = walk.files(&definitions)?;
        println!(
            "{}: {} files, at most {}, the goal is {}",
            walk.name,
            files.len(),
            walk.files_max,
            walk.files_goal
        );
        for (file, functions) in &files {
            println!("    {file}: {}", functions.join(", "));
        }
    }
    Ok(())
}

/// The files of a way in the order of their first function, with their functions.
type WalkFiles = Vec<(String, Vec<String>)>;

impl Walk {
    fn files(&self, definitions: &Definitions) -> anyhow::Result<WalkFiles> {
        let mut files = WalkFiles::new();
        for path in self.sections {
            let text = fs::read_to_string(root().join(path))
                .with_context(|| format!("cannot read {path}"))?;
            let Some(text) = section(&text) else {
                bail!("{path}: its documentation has no section \"{HEADING}\"");
            };
            definitions
                .add_files(&text, &mut files)
                .with_context(|| format!("{path}, section \"{HEADING}\""))?;
        }
        Ok(files)
    }
}

/// The section of a module's documentation about one write.
fn section(text: &str) -> Option<String> {
    let documentation = text.lines().map_while(|line| line.strip_prefix("//!"));
    let lines = documentation.map(|line| line.strip_prefix(' ').unwrap_or(line));
    let mut lines = lines.skip_while(|line| *line != HEADING);
    lines.next()?;
    let lines: Vec<&str> = lines.take_while(|line| !line.starts_with("# ")).collect();
    Some(lines.join("\n"))
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
                } else if name.ends_with(".rs") && name != "test_api.rs" {
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

    /// Adds the functions that a section names to their files.
    fn add_files(&self, section: &str, files: &mut WalkFiles) -> anyhow::Result<()> {
        for path in named_functions(section) {
            let Some(file) = self.file(path) else {
                bail!("no {path} in the product's code");
            };
            let name = path.to_owned();
            match files.iter_mut().find(|(known, _)| known == file) {
                Some((_, functions)) if functions.contains(&name) => {}
                Some((_, functions)) => functions.push(name),
                None => files.push((file.to_owned(), vec![name])),
            }
        }
        Ok(())
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
        let section = "`v::Engine::submit`, `engine::write` and `Engine::submit`";
        let mut files = WalkFiles::new();
        definitions
            .add_files(section, &mut files)
            .expect("known functions");
        let functions = ["v::Engine::submit", "engine::write", "Engine::submit"].map(str::to_owned);
        assert_eq!(
            files,
            [("v/src/engine/mod.rs".to_owned(), functions.to_vec())]
        );
        let unknown = definitions.add_files("`tests::hidden`", &mut files);
        assert!(unknown.is_err_and(|error| error.to_string().contains("tests::hidden")));
    }

    #[test]
    fn section_ends_at_next_heading() {
        let text = "//! A module.\n//!\n//! # One write\n//!\n//! `a::b`\n//! ## Step\n//! # Other\n\
                    use it;\n//! # One write\n";
        assert_eq!(section(text).as_deref(), Some("\n`a::b`\n## Step"));
        assert_eq!(section("//! A module.\nuse it;\n//! # One write\n"), None);
    }

    #[test]
    fn walks_do_not_get_longer() {
        let definitions = Definitions::read(&root().join("crates")).expect("the sources");
        for walk in &WALKS {
            let files = walk.files(&definitions).expect("a section at each step");
            assert!(
                files.len() <= walk.files_max,
                "{} passes {} files and may pass {} (goal {}). Each file more is one more that a \
                 reader of this way must open: {files:#?}",
                walk.name,
                files.len(),
                walk.files_max,
                walk.files_goal,
            );
        }
    }
}
