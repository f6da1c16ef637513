//! One configuration file: its text, and the type of each value.
//!
//! Invariant: an entry that is returned has a known key and a value of the type of its argument.

use clap::{Arg, Command};
use std::any::TypeId;
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Arguments that are no keys: they concern one call of the command, or no daemon. A daemon needs the cluster key,
/// and takes no token.
const NO_KEYS: [&str; 6] = ["check", "config", "output", "help", "version", "token_file"];
/// The key, and the option, of a file with a token.
pub const TOKEN_FILE: &str = "token-file";
/// Bytes of the longest configuration file: many times the shipped examples.
const FILE_BYTES_MAX: u64 = 256 << 10;

/// Why a configuration file is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// No such file, no right to read it, no text.
    #[error(
        "the configuration file {} cannot be read: {cause}; name a readable file with --config",
        shown(path)
    )]
    Unreadable {
        path: PathBuf,
        cause: std::io::Error,
    },
    #[error(
        "{} is no configuration file: it must be a regular file of at most {} KiB",
        shown(path),
        FILE_BYTES_MAX >> 10
    )]
    NotConfig { path: PathBuf },
    #[error("{}:{line}: {message}; write each line as: key = value", shown(path))]
    Syntax {
        path: PathBuf,
        line: usize,
        message: String,
    },
    #[error(
        "{}:{line}: the key '{key}' is unknown; the nearest known key is '{nearest}'",
        shown(path)
    )]
    UnknownKey {
        path: PathBuf,
        line: usize,
        key: String,
        nearest: String,
    },
    #[error(
        "{place}: a daemon takes no token, because it registers, attaches and reports with the cluster key; \
         leave it out, and name the file of the key: key, or --key"
    )]
    TokenOfDaemon { place: String },
    #[error(
        "{}:{line}: '{key}' has a value of type {found}; write {wanted}",
        shown(path)
    )]
    WrongType {
        path: PathBuf,
        line: usize,
        key: String,
        found: &'static str,
        wanted: String,
    },
    #[error(
        "{}:{line}: '{key}' is set and '{missing}' is not; set '{missing}', too",
        shown(path)
    )]
    Gap {
        path: PathBuf,
        line: usize,
        key: String,
        missing: String,
    },
}

/// A key with its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub key: String,
    pub line: usize,
    value: Value,
}

#[derive(Clone, Debug, PartialEq)]
enum Value {
    Flag(bool),
    Texts(Vec<String>),
}

impl Entry {
    /// The words of this entry as an option.
    pub fn option_words(&self, long: &str) -> Vec<OsString> {
        match &self.value {
            Value::Flag(false) => vec![],
            Value::Flag(true) => vec![format!("--{long}").into()],
            Value::Texts(texts) => texts
                .iter()
                .map(|text| format!("--{long}={text}").into())
                .collect(),
        }
    }

    /// Its values, as positional words.
    pub fn values(&self) -> Vec<OsString> {
        match &self.value {
            Value::Flag(_) => vec![],
            Value::Texts(texts) => texts.iter().map(OsString::from).collect(),
        }
    }
}

/// The arguments of a command that a file can set.
pub fn keys(command: &Command) -> impl Iterator<Item = &Arg> {
    let is_key = |it: &&Arg| !it.is_hide_set() && !NO_KEYS.contains(&it.get_id().as_str());
    command.get_arguments().filter(is_key)
}

/// The key of an argument.
pub fn key_name(argument: &Arg) -> &str {
    argument
        .get_long()
        .unwrap_or_else(|| argument.get_id().as_str())
}

/// The path of a file as a word of a message.
fn shown(path: &Path) -> std::path::Display<'_> {
    path.display()
}

/// Reads the file of a command.
pub fn read(path: &Path, command: &Command) -> Result<Vec<Entry>, ConfigError> {
    let text = read_text(path)?;
    let table = DeTable::parse(&text).map_err(|error| ConfigError::Syntax {
        path: path.to_owned(),
        line: line_at(&text, error.span().map_or(0, |span| span.start)),
        message: error.message().replace('\n', ", "),
    })?;
    let table = table.into_inner();
    let mut entries = vec![];
    for (key, value) in &table {
        let line = line_at(&text, key.span().start);
        entries.push(entry(path, command, key.get_ref(), line, value)?);
    }
    entries.sort_by_key(|entry| entry.line);
    Ok(entries)
}

fn read_text(path: &Path) -> Result<String, ConfigError> {
    let unreadable = |cause| ConfigError::Unreadable {
        path: path.to_owned(),
        cause,
    };
    // Before the open, which waits for a writer of a pipe.
    let found = std::fs::metadata(path).map_err(unreadable)?;
    if !found.is_file() || found.len() > FILE_BYTES_MAX {
        return Err(ConfigError::NotConfig {
            path: path.to_owned(),
        });
    }
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut limited = file.take(FILE_BYTES_MAX);
    limited.read_to_string(&mut text).map_err(unreadable)?;
    Ok(text)
}

/// The line of a byte, counted from 1.
fn line_at(text: &str, at: usize) -> usize {
    let before = text.as_bytes().get(..at).unwrap_or(text.as_bytes());
    1 + before.iter().filter(|&&byte| byte == b'\n').count()
}

fn entry(
    path: &Path,
    command: &Command,
    key: &str,
    line: usize,
    value: &Spanned<DeValue<'_>>,
) -> Result<Entry, ConfigError> {
    let Some(argument) = keys(command).find(|argument| key_name(argument) == key) else {
        if key == TOKEN_FILE {
            let place = format!("{}:{line}: '{key}'", shown(path));
            return Err(ConfigError::TokenOfDaemon { place });
        }
        return Err(ConfigError::UnknownKey {
            path: path.to_owned(),
            line,
            key: key.to_owned(),
            nearest: nearest_key(command, key),
        });
    };
    let converted = convert(argument, value.get_ref());
    let value = converted.ok_or_else(|| ConfigError::WrongType {
        path: path.to_owned(),
        line,
        key: key.to_owned(),
        found: value.get_ref().type_str(),
        wanted: wanted(argument, key),
    })?;
    Ok(Entry {
        key: key.to_owned(),
        line,
        value,
    })
}

fn nearest_key(command: &Command, key: &str) -> String {
    let distance = |known: &&str| strsim::damerau_levenshtein(known, key);
    let nearest = keys(command).map(key_name).min_by_key(distance);
    nearest.unwrap_or_default().to_owned()
}

/// The value as the argument takes it; `None` for another type.
fn convert(argument: &Arg, value: &DeValue<'_>) -> Option<Value> {
    if !argument.get_action().takes_values() {
        return value.as_bool().map(Value::Flag);
    }
    match value {
        DeValue::Array(items) if takes_many(argument) => {
            let texts = items.iter().map(|item| item.get_ref().as_str());
            let texts = texts.map(|text| text.map(str::to_owned));
            texts.collect::<Option<_>>().map(Value::Texts)
        }
        DeValue::Integer(number) if is_number(argument) => {
            let number = i64::from_str_radix(number.as_str(), number.radix()).ok()?;
            Some(Value::Texts(vec![number.to_string()]))
        }
        DeValue::String(text) if !is_number(argument) => {
            Some(Value::Texts(vec![text.as_ref().to_owned()]))
        }
        _ => None,
    }
}

/// The type that a key takes, with an example.
fn wanted(argument: &Arg, key: &str) -> String {
    if !argument.get_action().takes_values() {
        format!("true or false, as {key} = true")
    } else if is_number(argument) {
        format!("a number, as {key} = 4")
    } else if takes_many(argument) {
        format!("strings, as {key} = [\"one\", \"two\"]")
    } else {
        format!("a string in quotes, as {key} = \"text\"")
    }
}

/// Whether an argument takes several values.
pub fn takes_many(argument: &Arg) -> bool {
    let is_range = argument
        .get_num_args()
        .is_some_and(|it| it.max_values() > 1);
    is_range || matches!(argument.get_action(), clap::ArgAction::Append)
}

/// Whether an argument is a number.
pub fn is_number(argument: &Arg) -> bool {
    let parsed = argument.get_value_parser().type_id();
    let numbers = [
        TypeId::of::<u16>(),
        TypeId::of::<u32>(),
        TypeId::of::<u64>(),
        TypeId::of::<usize>(),
    ];
    numbers.iter().any(|number| parsed == *number)
}
