//! The exports file: the directories that clients may mount, and the rules for their callers.
//!
//! The grammar is a strict part of exports(5) of Linux.
//!
//! ```text
//! file     = { line }
//! line     = [ path client { client } ] [ comment ]
//! path     = "/" FILE-SYSTEM { "/" DIRECTORY }
//! client   = pattern [ "(" option { "," option } ")" ]
//! pattern  = "*" | ADDRESS | ADDRESS "/" BITS
//! comment  = "#" to the end of the line, at the begin of a word
//! ```
//!
//! - Spaces and tabs separate words. A backslash at the end of a line continues it.
//! - Double quotes keep spaces within a word. A backslash and three octal digits are a byte, as in
//!   `\040`.
//! - An export has one line. A client pattern stands once in it.
//! - The most specific pattern decides: one address, then longer prefixes, then `*`.
//! - A client without a rule has no access.
//!
//! | option | default | effect |
//! |---|---|---|
//! | `ro`, `rw` | `ro` | changes are refused, or not |
//! | `root_squash`, `no_root_squash`, `all_squash` | `root_squash` | the callers that become anonymous |
//! | `anonuid=N`, `anongid=N` | 65534 | the ids of anonymous callers |
//! | `secure`, `insecure` | `secure` | calls come from a port below 1024, or from any |
//! | `manage_gids`, `no_manage_gids` | `no_manage_gids` | this machine's list of users names the groups of a caller, in place of the call |
//! | `sync`, `no_subtree_check`, `sec=sys` | | none: the server always works so |
//!
//! The parser is pure, and takes no memory beyond the text and the rules.

mod words;

use crate::client_pattern::{ClientPattern, ClientPatternError};
use crate::export::{ExportOptions, Squash};
use crate::limits::{
    EXPORT_NAME_BYTES_MAX, EXPORT_RULES_MAX, EXPORTS_FILE_BYTES_MAX, EXPORTS_MAX,
    MOUNT_PATH_BYTES_MAX, RULES_MAX,
};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io::Read;
use std::path::Path;
use words::{Mistake, TextPosition, Word, WordReader};

/// The path of an export: a file system, and directories in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExportPath {
    /// The name of the file system.
    pub file_system: String,
    /// The names of directories, each in the one before.
    pub directories: Vec<String>,
}

impl ExportPath {
    /// The path that a text names; none if it is no path of an export.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut names = text.strip_prefix('/')?.split('/').map(String::from);
        let file_system = names.next()?;
        let directories: Vec<String> = names.collect();
        let is_name = |name: &String| {
            let is_dots = matches!(name.as_str(), "" | "." | "..");
            !is_dots && name.len() <= EXPORT_NAME_BYTES_MAX
        };
        let is_path = is_name(&file_system) && directories.iter().all(is_name);
        (is_path && text.len() <= MOUNT_PATH_BYTES_MAX).then_some(Self {
            file_system,
            directories,
        })
    }
}

impl fmt::Display for ExportPath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "/{}", self.file_system)?;
        self.directories
            .iter()
            .try_for_each(|name| write!(formatter, "/{name}"))
    }
}

/// The rule for some clients of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientRule {
    /// The clients.
    pub clients: ClientPattern,
    /// The rule.
    pub options: ExportOptions,
}

/// A line of an exports file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportLine {
    /// The number of the line, from 1.
    pub line: usize,
    /// The path.
    pub path: ExportPath,
    /// The rules, the most specific one first.
    pub rules: Vec<ClientRule>,
}

/// The content of an exports file. See the module for the grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportsFile {
    /// The name of the file.
    pub name: String,
    /// The exports.
    pub exports: Vec<ExportLine>,
}

/// A mistake in an exports file, or why it cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}:{line}:{column}: {cause}")]
pub struct ExportsFileError {
    /// The name of the file.
    pub name: String,
    /// The line, from 1.
    pub line: usize,
    /// The first character of the word, from 1.
    pub column: usize,
    /// The mistake.
    pub cause: ExportsFileCause,
}

/// A mistake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportsFileCause {
    /// The file cannot be read.
    #[error("the exports file cannot be read: {0}")]
    Unreadable(String),
    /// The file is too long.
    #[error(
        "the exports file has more than {EXPORTS_FILE_BYTES_MAX} bytes; join addresses to networks"
    )]
    TooLong,
    /// The file has too many lines with exports.
    #[error("there are more than {EXPORTS_MAX} exports; export directories above them")]
    TooManyExports,
    /// An export has too many rules, or all have.
    #[error(
        "there are more than {EXPORT_RULES_MAX} clients of this export, or {RULES_MAX} of all; join addresses to networks"
    )]
    TooManyRules,
    /// The text is not UTF-8.
    #[error("the text is not UTF-8; save the file as UTF-8")]
    NotUtf8,
    /// A quote has no end.
    #[error("this quote has no end in its line; add a `\"`")]
    OpenQuote,
    /// A backslash is neither an escape nor at the end of a line.
    #[error(
        "a backslash needs three octal digits from 000 to 377, as \\040 for a space, or ends a line"
    )]
    Escape,
    /// A character that no name has.
    #[error("the character {0:?} is not allowed; remove it")]
    ControlCharacter(char),
    /// The first word is no path.
    #[error("{0:?} is no path of an export; write /FILESYSTEM or /FILESYSTEM/DIRECTORY")]
    Path(String),
    /// Two lines have the same path.
    #[error("line {1} exports {0} already; join both lines")]
    SamePath(ExportPath, usize),
    /// The export has no clients.
    #[error("{0} has no clients; add addresses, or `*(ro)` for all clients")]
    NoClients(ExportPath),
    /// A word is no pattern of clients.
    #[error(transparent)]
    Client(#[from] ClientPatternError),
    /// Two rules are for the same clients.
    #[error("the client {0} has a rule in this line already; remove one of them")]
    SameClient(ClientPattern),
    /// Options without a client.
    #[error(
        "these options have no client; remove the space before `(`, or write `*(…)` for all clients"
    )]
    NoClient,
    /// A parenthesis is missing.
    #[error("the options of {0:?} have no end; close them with `)` and leave out spaces")]
    OpenOptions(String),
    /// There is no such option.
    #[error("there is no option {0:?}; use {OPTIONS}")]
    Option(String),
    /// The server does not work so.
    #[error("the option {0:?} is not supported: {1}")]
    Unsupported(String, &'static str),
    /// Two options exclude each other, or one stands twice.
    #[error("the option {0:?} contradicts or repeats an option before; remove one of them")]
    Contradiction(String),
    /// The value of an option is no id.
    #[error("{0:?} has no id; write a number from 0 to 4294967294 after the `=`")]
    Id(String),
    /// No file system of the server has the name.
    #[error(
        "this server has no file system {0:?}; remove the line, or start the server with that file system"
    )]
    UnknownFileSystem(String),
    /// The directory of the export cannot be used.
    #[error("the directory {0} cannot be exported: {1}")]
    Directory(ExportPath, String),
    /// Nothing is known about the directory of the export now.
    #[error(
        "the directory {0} cannot be read now: {1}; read the file again when the file system answers"
    )]
    Unavailable(ExportPath, String),
}

/// The options, as the error for an unknown one lists them.
const OPTIONS: &str = "ro, rw, root_squash, no_root_squash, all_squash, anonuid=N, anongid=N, secure, insecure, manage_gids or no_manage_gids";

impl ExportsFile {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, or at its first mistake.
    pub fn read(path: &Path) -> Result<Self, ExportsFileError> {
        let name = path.display().to_string();
        let read = || {
            let mut text = Vec::new();
            let most = EXPORTS_FILE_BYTES_MAX as u64 + 1;
            std::fs::File::open(path)?
                .take(most)
                .read_to_end(&mut text)?;
            Ok(text)
        };
        let text = read().map_err(|error: std::io::Error| ExportsFileError {
            name: name.clone(),
            line: 1,
            column: 1,
            cause: ExportsFileCause::Unreadable(error.to_string()),
        })?;
        Self::parse(&name, &text)
    }

    /// The content of a text. The name is for errors.
    ///
    /// # Errors
    /// The first mistake.
    pub fn parse(name: &str, text: &[u8]) -> Result<Self, ExportsFileError> {
        let exports = parse(text).map_err(|(place, cause)| ExportsFileError {
            name: name.into(),
            line: place.line,
            column: place.column,
            cause,
        })?;
        Ok(Self {
            name: name.into(),
            exports,
        })
    }

    /// Checks that a server has all file systems.
    ///
    /// # Errors
    /// The first line with another one.
    pub fn check_file_systems(
        &self,
        is_known: impl Fn(&str) -> bool,
    ) -> Result<(), ExportsFileError> {
        let mut exports = self.exports.iter();
        match exports.find(|export| !is_known(&export.path.file_system)) {
            None => Ok(()),
            Some(export) => {
                let name = export.path.file_system.clone();
                Err(self.error(export.line, ExportsFileCause::UnknownFileSystem(name)))
            }
        }
    }

    /// The error of a line.
    pub(crate) fn error(&self, line: usize, cause: ExportsFileCause) -> ExportsFileError {
        ExportsFileError {
            name: self.name.clone(),
            line,
            column: 1,
            cause,
        }
    }
}

fn parse(text: &[u8]) -> Result<Vec<ExportLine>, Mistake> {
    let start = TextPosition { line: 1, column: 1 };
    if text.len() > EXPORTS_FILE_BYTES_MAX {
        return Err((start, ExportsFileCause::TooLong));
    }
    let text = std::str::from_utf8(text).map_err(|error| {
        let valid = text.get(..error.valid_up_to()).unwrap_or_default();
        let line = 1 + valid.iter().filter(|byte| **byte == b'\n').count();
        (TextPosition { line, column: 1 }, ExportsFileCause::NotUtf8)
    })?;
    let mut exports: Vec<ExportLine> = Vec::new();
    let mut lines = HashMap::new();
    let mut rules = 0;
    let mut reader = WordReader::new(text);
    while let Some(words) = reader.next_line()? {
        let Some((path, clients)) = words.split_first() else {
            continue;
        };
        if exports.len() == EXPORTS_MAX {
            return Err((path.place, ExportsFileCause::TooManyExports));
        }
        let export = parse_line(path, clients)?;
        rules += export.rules.len();
        if rules > RULES_MAX {
            return Err((path.place, ExportsFileCause::TooManyRules));
        }
        if let Some(before) = lines.insert(export.path.clone(), export.line) {
            let cause = ExportsFileCause::SamePath(export.path, before);
            return Err((path.place, cause));
        }
        exports.push(export);
    }
    Ok(exports)
}

fn parse_line(path: &Word, clients: &[Word]) -> Result<ExportLine, Mistake> {
    let unusable = || (path.place, ExportsFileCause::Path(path.text.clone()));
    let parsed = ExportPath::parse(&path.text).ok_or_else(unusable)?;
    if clients.is_empty() {
        return Err((path.place, ExportsFileCause::NoClients(parsed)));
    }
    if clients.len() > EXPORT_RULES_MAX {
        return Err((path.place, ExportsFileCause::TooManyRules));
    }
    let mut rules = Vec::new();
    let mut known = HashSet::new();
    for word in clients {
        let rule = parse_client(&word.text).map_err(|cause| (word.place, cause))?;
        if !known.insert(rule.clients) {
            return Err((word.place, ExportsFileCause::SameClient(rule.clients)));
        }
        rules.push(rule);
    }
    rules.sort_by_key(|rule| std::cmp::Reverse(rule.clients.specificity()));
    Ok(ExportLine {
        line: path.place.line,
        path: parsed,
        rules,
    })
}

fn parse_client(word: &str) -> Result<ClientRule, ExportsFileCause> {
    let (pattern, options) = match word.split_once('(') {
        None => (word, None),
        Some(("", _)) => return Err(ExportsFileCause::NoClient),
        Some((pattern, rest)) => match rest.strip_suffix(')') {
            Some(options) => (pattern, Some(options)),
            None => return Err(ExportsFileCause::OpenOptions(pattern.into())),
        },
    };
    let clients = ClientPattern::parse(pattern)?;
    let mut parsed = OptionParser::default();
    for option in options.into_iter().flat_map(|it| it.split(',')) {
        parsed.add(option)?;
    }
    Ok(ClientRule {
        clients,
        options: parsed.options(),
    })
}

/// The options of a client so far.
#[derive(Default)]
struct OptionParser {
    is_writable: Option<bool>,
    squash: Option<Squash>,
    anonymous_uid: Option<u32>,
    anonymous_gid: Option<u32>,
    needs_reserved_port: Option<bool>,
    manages_groups: Option<bool>,
}

impl OptionParser {
    fn add(&mut self, option: &str) -> Result<(), ExportsFileCause> {
        match option {
            "ro" => set(&mut self.is_writable, false, option),
            "rw" => set(&mut self.is_writable, true, option),
            "root_squash" => set(&mut self.squash, Squash::Root, option),
            "no_root_squash" => set(&mut self.squash, Squash::None, option),
            "all_squash" => set(&mut self.squash, Squash::All, option),
            "secure" => set(&mut self.needs_reserved_port, true, option),
            "insecure" => set(&mut self.needs_reserved_port, false, option),
            "manage_gids" => set(&mut self.manages_groups, true, option),
            "no_manage_gids" => set(&mut self.manages_groups, false, option),
            "sync" | "no_subtree_check" | "sec=sys" => Ok(()),
            _ => match option.split_once('=') {
                Some(("anonuid", id)) => {
                    set(&mut self.anonymous_uid, parse_id(option, id)?, option)
                }
                Some(("anongid", id)) => {
                    set(&mut self.anonymous_gid, parse_id(option, id)?, option)
                }
                _ => Err(unusable_option(option)),
            },
        }
    }

    fn options(&self) -> ExportOptions {
        let defaults = ExportOptions::default();
        ExportOptions {
            is_read_only: !self.is_writable.unwrap_or(false),
            squash: self.squash.unwrap_or(Squash::Root),
            anonymous_uid: self.anonymous_uid.unwrap_or(defaults.anonymous_uid),
            anonymous_gid: self.anonymous_gid.unwrap_or(defaults.anonymous_gid),
            needs_reserved_port: self.needs_reserved_port.unwrap_or(true),
            manages_groups: self.manages_groups.unwrap_or(false),
        }
    }
}

fn set<T>(field: &mut Option<T>, value: T, option: &str) -> Result<(), ExportsFileCause> {
    match field.replace(value) {
        None => Ok(()),
        Some(_) => Err(ExportsFileCause::Contradiction(option.into())),
    }
}

/// The id 2^32 - 1 means none.
fn parse_id(option: &str, id: &str) -> Result<u32, ExportsFileCause> {
    let is_number = id.bytes().all(|byte| byte.is_ascii_digit());
    let parsed = id.parse().ok().filter(|id| is_number && *id != u32::MAX);
    parsed.ok_or_else(|| ExportsFileCause::Id(option.into()))
}

fn unusable_option(option: &str) -> ExportsFileCause {
    let name = option.split('=').next().unwrap_or_default();
    let reason = match name {
        "async" => "each reply follows the storage of its change; leave the option out",
        "subtree_check" => {
            "a handle names a file wherever it moves; leave the option out, and read about exports of directories"
        }
        "sec" => "callers are identified by AUTH_SYS; write sec=sys or leave the option out",
        "crossmnt" | "nohide" => "no export lies in another file system; leave the option out",
        "fsid" => "each export has an id that survives restarts; leave the option out",
        _ => return ExportsFileCause::Option(option.into()),
    };
    ExportsFileCause::Unsupported(option.into(), reason)
}

#[cfg(test)]
mod tests;
