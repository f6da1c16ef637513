//! The cluster of commands that name none: `client.toml` in the user's configuration directory, and then
//! `/etc/pagemesh/client.toml`.
//!
//! Invariant: the key and the token of a file serve for calls to the manager of that file only, so that the
//! secret of one cluster never reaches the manager of another.

use crate::args::DEFAULT_MANAGER;
use crate::config_file::{self, ConfigError, Entry};
use anyhow::Context;
use clap::{Arg, Command};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The directory with the configuration of this machine.
pub const HOST_DIR: &str = "/etc/pagemesh";
/// The name of the file in both directories.
pub const FILE_NAME: &str = "client.toml";

/// The file of a user or of the machine.
#[derive(Debug, Default)]
pub struct ClientFile {
    manager: Option<String>,
    /// File with the cluster key.
    pub key: Option<PathBuf>,
    /// File with a token.
    pub token_file: Option<PathBuf>,
}

/// The existing files: the user's, and the machine's.
#[derive(Debug, Default)]
pub struct ClientFiles {
    user: Option<ClientFile>,
    host: Option<ClientFile>,
}

impl ClientFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// When a file exists and is not valid.
    pub fn load() -> Result<ClientFiles, ConfigError> {
        // Without a home directory there is no file of the user.
        let user = config_dir().ok();
        ClientFiles::read(user.as_deref(), Path::new(HOST_DIR))
    }

    fn read(user: Option<&Path>, host: &Path) -> Result<ClientFiles, ConfigError> {
        let read_in = |dir: &Path| ClientFile::read(&dir.join(FILE_NAME));
        Ok(ClientFiles {
            user: user.map(read_in).transpose()?.flatten(),
            host: read_in(host)?,
        })
    }

    /// The address of the manager, if a file names one.
    pub fn manager(&self) -> Option<&str> {
        let files = self.user.iter().chain(&self.host);
        files.filter_map(|file| file.manager.as_deref()).next()
    }

    /// The file of the user, if it is about this manager.
    pub fn of_user(&self, manager: &str) -> Option<&ClientFile> {
        self.user.as_ref().filter(|file| file.is_of(manager))
    }

    /// The file of the machine, if it is about this manager.
    pub fn of_host(&self, manager: &str) -> Option<&ClientFile> {
        self.host.as_ref().filter(|file| file.is_of(manager))
    }

    /// The file with a token for this manager.
    pub fn token_file(&self, manager: &str) -> Option<&Path> {
        let mut files = self.of_user(manager).into_iter();
        let mut files = files.by_ref().chain(self.of_host(manager));
        files.find_map(|file| file.token_file.as_deref())
    }
}

impl ClientFile {
    /// Reads a file; none if there is none.
    fn read(path: &Path) -> Result<Option<ClientFile>, ConfigError> {
        match std::fs::metadata(path) {
            Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(None),
            _ => {}
        }
        let mut found = ClientFile::default();
        for entry in config_file::read(path, &definition())? {
            let value = || entry.values().into_iter().next().unwrap_or_default();
            match entry.key.as_str() {
                "manager" => found.manager = Some(value().to_string_lossy().into_owned()),
                "key" => found.key = Some(value().into()),
                _ => found.token_file = Some(value().into()),
            }
        }
        Ok(Some(found))
    }

    fn is_of(&self, manager: &str) -> bool {
        let own = self.manager.as_deref().unwrap_or(DEFAULT_MANAGER);
        plain_address(own) == plain_address(manager)
    }
}

/// The user's configuration directory of pagemesh.
pub fn config_dir() -> anyhow::Result<PathBuf> {
    let config = match std::env::var_os("XDG_CONFIG_HOME") {
        Some(config) if !config.is_empty() => PathBuf::from(config),
        _ => {
            let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
            let home = home
                .context("neither HOME nor XDG_CONFIG_HOME is set; name the key file with --key")?;
            Path::new(&home).join(".config")
        }
    };
    Ok(config.join("pagemesh"))
}

/// The keys of the file, as the definition of a command.
fn definition() -> Command {
    // Not the identifier of the option: daemons take no token, and this file does.
    let token = Arg::new("token").long("token-file");
    let keys = [
        Arg::new("manager").long("manager"),
        Arg::new("key").long("key"),
    ];
    Command::new(FILE_NAME).args(keys).arg(token)
}

/// Host and port of an address.
fn plain_address(url: &str) -> &str {
    url.trim_start_matches("http://").trim_end_matches('/')
}

/// Checks one file.
pub fn check(path: &Path) -> Result<Vec<Entry>, ConfigError> {
    config_file::read(path, &definition())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(user: &str, host: &str) -> Result<ClientFiles, ConfigError> {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, text) in [("user", user), ("host", host)] {
            std::fs::create_dir(dir.path().join(name)).expect("made");
            if !text.is_empty() {
                std::fs::write(dir.path().join(name).join(FILE_NAME), text).expect("written");
            }
        }
        ClientFiles::read(Some(&dir.path().join("user")), &dir.path().join("host"))
    }

    #[test]
    fn user_file_precedes_host_file() {
        let host = "manager = \"http://10.0.0.1:7070\"\nkey = \"/etc/pagemesh/key\"\n";
        let both = files("manager = \"http://10.0.0.9:7070\"", host).expect("valid files");
        assert_eq!(both.manager(), Some("http://10.0.0.9:7070"));
        let host_only = files("", host).expect("a valid file");
        assert_eq!(host_only.manager(), Some("http://10.0.0.1:7070"));
        assert_eq!(files("", "").expect("no file").manager(), None);
    }

    #[test]
    fn secrets_serve_for_manager_of_their_file_only() {
        let host = "manager = \"http://10.0.0.1:7070\"\nkey = \"/k\"\ntoken-file = \"/t\"\n";
        let found = files("key = \"/own\"", host).expect("valid files");
        let key = |file: Option<&ClientFile>| file.and_then(|it| it.key.clone());
        assert_eq!(key(found.of_host("10.0.0.1:7070/")), Some("/k".into()));
        assert_eq!(key(found.of_host("http://10.0.0.2:7070")), None);
        assert_eq!(key(found.of_user("http://10.0.0.1:7070")), None);
        assert_eq!(key(found.of_user(DEFAULT_MANAGER)), Some("/own".into()));
        let token = |manager| found.token_file(manager).map(Path::to_owned);
        assert_eq!(token("http://10.0.0.1:7070"), Some("/t".into()));
        assert_eq!(token(DEFAULT_MANAGER), None);
    }

    #[test]
    fn invalid_file_is_refused_with_line() {
        let refused = files("", "\nmanger = \"x\"").expect_err("an unknown key");
        let text = refused.to_string();
        assert!(
            text.contains("client.toml:2") && text.contains("'manager'"),
            "{text}"
        );
        assert!(files("manager = 4", "").is_err());
    }

    #[test]
    fn shipped_example_has_each_key() {
        let example = include_str!("../../../contrib/config/client.toml");
        let all: Vec<&str> = example
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(key) if !key.starts_with(' ') => key,
                _ => line,
            })
            .collect();
        let found = files("", &all.join("\n")).expect("valid keys");
        let host = found.host.expect("a file");
        assert_eq!(host.manager.as_deref(), Some("http://@MANAGER@:7070"));
        assert!(host.key.is_some() && host.token_file.is_some());
    }
}
