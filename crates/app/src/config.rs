//! Configuration files of the daemons, as `--config FILE`: TOML, in which each key is an option of
//! the command by its long name, or a positional argument by its own.
//!
//! The definition of the command line is the only list of keys. A file becomes words of the command
//! line, for the options that neither the command line nor the environment sets; clap then reads
//! all of them. So an option in a file means the same as the flag, and the precedence is: flag,
//! environment, file, default.
//!
//! Invariants: an unknown key, a wrong type and a wrong value are errors that name file and line. A
//! file is never executed, changed or read beyond `FILE_BYTES_MAX`.

#[cfg(test)]
mod reference;

use crate::client_file::{self, ClientFiles};
use crate::commands::Cli;
use crate::config_file::{self, ConfigError, Entry, TOKEN_FILE, key_name, keys};
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, CommandFactory, FromArgMatches};
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// The commands that take a configuration file: the first word of its name, and their words.
const DAEMONS: [(&str, &[&str]); 5] = [
    ("manager", &["manager"]),
    ("brick", &["brick"]),
    ("export", &["export", "nbd"]),
    ("mount", &["mount"]),
    ("nfs", &["serve", "nfs"]),
];
/// The identifier of the option that names the manager.
const MANAGER: &str = "manager";
/// The exit code of an invalid command line; clap's, too.
const EXIT_USAGE: i32 = 2;

/// The argument that names the configuration file, which is read before the command line is parsed.
#[derive(Args)]
pub struct ConfigArgs {
    /// Configuration file. Its keys are the long names of these options. Options on the command
    /// line and in the environment take precedence.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Parses the command line with its configuration file; ends the process if either is wrong.
pub fn parse_command_line() -> Cli {
    let expanded = expand(std::env::args_os().collect(), |name| std::env::var_os(name));
    let (words, source) = expanded.unwrap_or_else(|error| fail(&error));
    let manager = || Ok(ClientFiles::load()?.manager().map(str::to_owned));
    let parsed = parse(words, manager).unwrap_or_else(|error| fail(&error));
    parsed.unwrap_or_else(|error| {
        if let Some(source) = source
            && let Some(entry) = source.entry_of(&error)
        {
            let path = source.path.display();
            eprint!("error in {path}:{}, key {}: ", entry.line, entry.key);
        }
        error.exit()
    })
}

/// Parses the words of a command line. If they leave the manager to the default, the manager of a `client.toml`
/// takes its place.
fn parse(
    words: Vec<OsString>,
    manager_of_files: impl FnOnce() -> Result<Option<String>, ConfigError>,
) -> Result<Result<Cli, clap::Error>, ConfigError> {
    let matches = match Cli::command().try_get_matches_from(&words) {
        Ok(matches) => matches,
        Err(error) => return Ok(Err(error)),
    };
    let named = match has_default_manager(&matches) {
        true => manager_of_files()?,
        false => None,
    };
    let Some(manager) = named else {
        return Ok(Cli::from_arg_matches(&matches));
    };
    let command = with_default_manager(Cli::command(), &manager);
    let matches = command.try_get_matches_from(words);
    Ok(matches.and_then(|matches| Cli::from_arg_matches(&matches)))
}

/// Whether the command calls a manager that neither the command line nor the environment names.
fn has_default_manager(mut matches: &ArgMatches) -> bool {
    while let Some((_, inner)) = matches.subcommand() {
        matches = inner;
    }
    matches.try_contains_id(MANAGER).is_ok()
        && matches.value_source(MANAGER) == Some(ValueSource::DefaultValue)
}

/// The same definition with another default of `--manager`.
fn with_default_manager(command: Command, manager: &str) -> Command {
    let is_manager = |it: &Arg| it.get_id() == MANAGER && !it.get_default_values().is_empty();
    let names_manager = command.get_arguments().any(is_manager);
    let command = match names_manager {
        true => command.mut_arg(MANAGER, |it| it.default_value(manager.to_owned())),
        false => command,
    };
    command.mut_subcommands(|inner| with_default_manager(inner, manager))
}

/// A configuration file in `/etc/pagemesh`, by its name: `client.toml`, or the words of the daemon that reads it.
/// None: no program reads a file of this name.
pub fn check_file(path: &Path) -> Option<Result<Vec<(String, String)>, ConfigError>> {
    let name = path.file_stem()?.to_str()?;
    let entries = match name {
        "client" => client_file::check(path),
        _ => {
            let daemon = name.split('-').next()?;
            let (_, words) = DAEMONS.iter().find(|(known, _)| *known == daemon)?;
            let mut root = Cli::command();
            root.build();
            let line = [&["pagemesh"], *words].concat();
            let line: Vec<OsString> = line.iter().map(OsString::from).collect();
            let (command, _) = find_daemon(&root, &line)?;
            config_file::read(path, command)
        }
    };
    let pairs = |entry: &Entry| {
        let values = entry.values().into_iter();
        let value = values.map(|it| it.to_string_lossy().into_owned());
        (entry.key.clone(), value.collect::<Vec<_>>().join(" "))
    };
    Some(entries.map(|entries| entries.iter().map(pairs).collect()))
}

fn fail(error: &ConfigError) -> ! {
    eprintln!("error: {error}");
    std::process::exit(EXIT_USAGE)
}

/// The file behind some words of a command line.
#[derive(Debug)]
struct Source {
    path: PathBuf,
    /// Each used entry, under the name of its argument in clap's errors.
    entries: Vec<(String, Entry)>,
}

impl Source {
    /// The entry with the value that clap refuses.
    fn entry_of(&self, error: &clap::Error) -> Option<&Entry> {
        let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else {
            return None;
        };
        let found = self.entries.iter().find(|(name, _)| name == argument);
        found.map(|(_, entry)| entry)
    }
}

/// Adds the options of the configuration file, if the command line names one.
fn expand(
    words: Vec<OsString>,
    environment: impl Fn(&OsStr) -> Option<OsString>,
) -> Result<(Vec<OsString>, Option<Source>), ConfigError> {
    let mut root = Cli::command();
    root.build();
    let Some((command, head)) = find_daemon(&root, &words) else {
        return Ok((words, None));
    };
    let given = Given::read(command, &words[head..]);
    if given.options.contains(TOKEN_FILE) {
        let place = format!("--{TOKEN_FILE}");
        return Err(ConfigError::TokenOfDaemon { place });
    }
    let words = without_flag_values(command, words, head);
    let Some(path) = given.config.as_deref() else {
        return Ok((words, None));
    };
    let entries = config_file::read(path, command)?;
    let is_unset = |argument: &Arg| {
        let variable = argument.get_env().and_then(&environment);
        variable.is_none_or(|value| value.is_empty()) && !given.has(command, argument)
    };
    let mut source = Source {
        path: path.to_owned(),
        entries: vec![],
    };
    let (mut options, mut positionals) = (vec![], vec![]);
    for argument in keys(command) {
        let entry = entries.iter().find(|entry| entry.key == key_name(argument));
        let Some(entry) = entry.filter(|_| is_unset(argument)) else {
            continue;
        };
        match argument.get_long() {
            Some(long) => options.extend(entry.option_words(long)),
            None => positionals.extend(entry.values()),
        }
        source.entries.push((argument.to_string(), entry.clone()));
    }
    refuse_gap(command, &given, &source)?;
    let (before, after) = words.split_at(head);
    let mut expanded = [before, &options, after].concat();
    if !positionals.is_empty() {
        if !after.iter().any(|word| word == "--") {
            expanded.push("--".into());
        }
        expanded.extend(positionals);
    }
    Ok((expanded, Some(source)))
}

/// The command line without the values of flags: `--direct-io=false` takes back a `true` of the file, and
/// `--direct-io=true` is the flag itself.
fn without_flag_values(command: &Command, words: Vec<OsString>, head: usize) -> Vec<OsString> {
    let mut kept = vec![];
    let mut words = words.into_iter();
    kept.extend(words.by_ref().take(head));
    while let Some(word) = words.next() {
        let text = word.to_string_lossy().into_owned();
        if text == "--" {
            kept.push(word);
            break;
        }
        match text
            .strip_prefix("--")
            .and_then(|long| long.split_once('='))
        {
            Some((long, "false")) if is_flag(command, long) => {}
            Some((long, "true")) if is_flag(command, long) => kept.push(format!("--{long}").into()),
            _ => {
                let has_value = text
                    .strip_prefix("--")
                    .is_some_and(|it| takes_next_word(command, it));
                kept.push(word);
                kept.extend(has_value.then(|| words.next()).flatten());
            }
        }
    }
    kept.extend(words);
    kept
}

/// Whether an option is a flag that a file can set.
fn is_flag(command: &Command, long: &str) -> bool {
    let found = keys(command).find(|it| it.get_long() == Some(long));
    found.is_some_and(|it| !it.get_action().takes_values())
}

/// The daemon that a command line starts, and the number of words that name it.
fn find_daemon<'a>(root: &'a Command, words: &[OsString]) -> Option<(&'a Command, usize)> {
    DAEMONS.iter().find_map(|(_, path)| {
        let head = path.len() + 1;
        let is_named = words.get(1..head)?.iter().zip(*path).all(|(a, b)| a == b);
        let find = |command: Option<&'a Command>, name: &&str| command?.find_subcommand(name);
        let command = path.iter().fold(Some(root), find)?;
        is_named.then_some((command, head))
    })
}

/// A later positional argument must not take the place of a missing one.
fn refuse_gap(command: &Command, given: &Given, source: &Source) -> Result<(), ConfigError> {
    let in_file = |argument: &Arg| {
        let name = argument.to_string();
        source.entries.iter().find(|(known, _)| *known == name)
    };
    let mut missing = None;
    for argument in command.get_positionals().skip(given.positionals) {
        match (in_file(argument), missing) {
            (None, None) => missing = Some(key_name(argument)),
            (Some((_, entry)), Some(missing)) => {
                return Err(ConfigError::Gap {
                    path: source.path.clone(),
                    line: entry.line,
                    key: entry.key.clone(),
                    missing: missing.to_owned(),
                });
            }
            _ => {}
        }
    }
    Ok(())
}

/// The arguments on the command line.
#[derive(Default)]
struct Given {
    /// Long names of options.
    options: HashSet<String>,
    /// Number of positional arguments.
    positionals: usize,
    config: Option<PathBuf>,
}

impl Given {
    /// Reads the words behind the name of a command. Clap reports wrong words later.
    fn read(command: &Command, words: &[OsString]) -> Given {
        let mut given = Given::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let text = word.to_string_lossy();
            if text == "--" {
                given.positionals += words.count();
                break;
            }
            let Some(long) = text.strip_prefix("--") else {
                if given.positionals == 0 && command.find_subcommand(word).is_some() {
                    // Another command, which has no configuration file.
                    return Given::default();
                }
                given.positionals += usize::from(!text.starts_with('-') || text == "-");
                continue;
            };
            let (name, value) = match long.split_once('=') {
                Some((name, value)) => (name, Some(OsString::from(value))),
                None if takes_next_word(command, long) => (long, words.next().cloned()),
                None => (long, None),
            };
            if name == "config" {
                given.config = value.map(PathBuf::from);
            }
            given.options.insert(name.to_owned());
        }
        given
    }

    /// Whether the command line has the argument, or an option that excludes it.
    fn has(&self, command: &Command, argument: &Arg) -> bool {
        let Some(long) = argument.get_long() else {
            let index = argument.get_index().unwrap_or(1);
            return self.positionals >= index;
        };
        self.options.contains(long) || self.has_alternative(command, argument)
    }

    /// Whether the command line has another option of a group of which it can have only one.
    fn has_alternative(&self, command: &Command, argument: &Arg) -> bool {
        let exclusive = command.get_groups().filter(|group| {
            let is_member = group.get_args().any(|id| id == argument.get_id());
            is_member && !(*group).clone().is_multiple()
        });
        let members = exclusive.flat_map(|group| group.get_args());
        let long_of = |id: &clap::Id| {
            let found = command.get_arguments().find(|it| it.get_id() == id);
            found.and_then(Arg::get_long)
        };
        members
            .filter_map(long_of)
            .any(|long| self.options.contains(long))
    }
}

/// Whether the word behind an option is its value.
fn takes_next_word(command: &Command, long: &str) -> bool {
    let found = command
        .get_arguments()
        .find(|it| it.get_long() == Some(long));
    found.is_some_and(|it| it.get_action().takes_values() && !it.is_require_equals_set())
}

#[cfg(test)]
mod tests;
