//! The secrets of this host: the keys and tokens that its configuration names, and those at their
//! usual places.
//!
//! Invariant: their texts go to the mask alone; they are never printed or written.

use super::SupportBundleArgs;
use super::sources::{self, read_bounded, running};
use crate::client_file::config_dir;
use pagemesh_base::key::Key;
use pagemesh_manage::{ADMIN_TOKEN_FILE, token};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Bytes of the longest file of a secret; a longer one is none.
const SECRET_BYTES_MAX: usize = 4096;
/// Variables that have a secret, and variables that name the file of one.
const SECRET_VARIABLES: [&str; 1] = ["PAGEMESH_TOKEN"];
const FILE_VARIABLES: [&str; 2] = ["PAGEMESH_KEY", "PAGEMESH_TOKEN_FILE"];
/// Keys of a configuration file, and options, that name the file of a secret.
const FILE_KEYS: [&str; 2] = ["key", "token-file"];

/// The secrets that the mask must know.
pub struct Known {
    pub texts: Vec<Vec<u8>>,
    /// Files that exist and cannot be read, with the cause.
    pub unreadable: Vec<String>,
}

/// The texts and the files of secrets.
#[derive(Default)]
struct SecretSources {
    texts: Vec<Vec<u8>>,
    files: BTreeSet<PathBuf>,
}

/// Finds the secrets of this host.
pub fn find(args: &SupportBundleArgs) -> Known {
    let mut found = SecretSources::default();
    found.add_environment(
        &mut std::env::vars_os()
            .map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec())),
    );
    for process in running() {
        let environment = process.environment();
        let pairs = environment.split(|byte| *byte == 0).filter_map(|pair| {
            let at = pair.iter().position(|byte| *byte == b'=')?;
            Some((pair[..at].to_vec(), pair[at + 1..].to_vec()))
        });
        found.add_environment(&mut { pairs });
        found.add_options(&process.words());
    }
    found.files.extend(args.client.key.clone());
    found.files.extend(args.client.token_file.clone());
    if let Ok(dir) = config_dir() {
        found.add_configured(&dir);
        found.add_dir(Some(&dir.join("keys")));
    }
    let usual = ["/etc/pagemesh", "/var/lib/pagemesh"].map(PathBuf::from);
    for dir in usual.iter().chain(&args.dir) {
        found.add_configured(dir);
    }
    found.read()
}

impl SecretSources {
    fn add_environment(&mut self, pairs: &mut dyn Iterator<Item = (Vec<u8>, Vec<u8>)>) {
        for (name, value) in pairs {
            let is_one_of = |names: &[&str]| names.iter().any(|it| it.as_bytes() == name);
            if is_one_of(&SECRET_VARIABLES) {
                self.texts.push(value.trim_ascii().to_vec());
            } else if is_one_of(&FILE_VARIABLES) && !value.is_empty() {
                self.files.insert(OsStr::from_bytes(&value).into());
            }
        }
    }

    /// The files that options of a command line name.
    fn add_options(&mut self, words: &[String]) {
        for (at, word) in words.iter().enumerate() {
            let Some(long) = word.strip_prefix("--") else {
                continue;
            };
            let (name, value) = match long.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (long, words.get(at + 1).map(String::as_str)),
            };
            match (name, value) {
                ("store", Some(value)) => self.add_store(Path::new(value)),
                (name, Some(value)) if FILE_KEYS.contains(&name) => {
                    self.files.insert(value.into());
                }
                _ => {}
            }
        }
    }

    /// The files that the configuration files in a directory name, and files of secrets in it.
    fn add_configured(&mut self, dir: &Path) {
        self.add_dir(Some(dir));
        // A linked file is not packed, but a daemon may read it: its secrets count, too.
        let found = [sources::files(dir, "toml"), sources::links(dir, "toml")];
        for path in found.concat() {
            let text = read_bounded(&path).unwrap_or_default();
            // Line by line: a file with an error has secrets, too.
            for line in text.lines() {
                let Some((name, value)) = line.trim_start_matches(['#', ' ']).split_once('=')
                else {
                    continue;
                };
                let value = value.trim().trim_matches(['"', '\'']);
                if FILE_KEYS.contains(&name.trim()) && value.starts_with('/') {
                    self.files.insert(value.into());
                } else if name.trim() == "store" {
                    self.add_store(Path::new(value));
                }
            }
        }
    }

    /// The manager writes its first token beside its store.
    fn add_store(&mut self, store: &Path) {
        self.add_dir(store.parent());
    }

    /// The files of secrets in a directory: by their names, or all in a directory of keys.
    fn add_dir(&mut self, dir: Option<&Path>) {
        let Some(dir) = dir else { return };
        let is_of_keys = dir.file_name() == Some(OsStr::new("keys"));
        let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
        for entry in names {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_configuration = name.ends_with(".toml") || name.ends_with(".log");
            let is_secret =
                name == ADMIN_TOKEN_FILE || name.contains("key") || name.contains("token");
            if is_of_keys || (is_secret && !is_configuration) {
                self.files.insert(entry.path());
            }
        }
    }

    fn read(self) -> Known {
        let (mut texts, mut unreadable) = (self.texts, vec![]);
        for path in self.files {
            match std::fs::metadata(&path) {
                Ok(found) if found.is_file() && found.len() <= SECRET_BYTES_MAX as u64 => {}
                Ok(_) => continue,
                Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => continue,
                Err(cause) => {
                    unreadable.push(format!("{}: {cause}", path.display()));
                    continue;
                }
            }
            match std::fs::read(&path) {
                Ok(bytes) => texts.push(bytes.trim_ascii().to_vec()),
                Err(cause) => unreadable.push(format!("{}: {cause}", path.display())),
            }
        }
        for at in 0..texts.len() {
            // A key has two more texts: its bytes, and the proof that clients send to the manager.
            let digits = std::str::from_utf8(&texts[at]).ok();
            if let Some(key) = digits.and_then(|digits| Key::parse(digits).ok()) {
                texts.push(key.as_bytes().to_vec());
                texts.push(token::token(&key).into_bytes());
            }
        }
        Known { texts, unreadable }
    }
}
