//! Where the cluster key is.
//!
//! Named by `--key` or `PAGEMESH_KEY`; else the one that belongs to the
//! manager's address in the user's configuration directory, so that several
//! clusters of one user do not disturb each other.

use anyhow::{Context, bail};
use pagemesh_base::key::{KEY_BYTES, Key};
use rustix::rand::{GetRandomFlags, getrandom};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The key file of a manager's address.
pub fn default_path(manager: &str) -> anyhow::Result<PathBuf> {
    let config = match std::env::var_os("XDG_CONFIG_HOME") {
        Some(config) if !config.is_empty() => PathBuf::from(config),
        _ => {
            let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
            let home = home
                .context("neither HOME nor XDG_CONFIG_HOME is set; name the key file with --key")?;
            Path::new(&home).join(".config")
        }
    };
    let address = manager.trim_start_matches("http://").trim_end_matches('/');
    let usable = |c: char| c.is_ascii_alphanumeric() || ".:-_[]".contains(c);
    if address.is_empty() || address.starts_with('.') || !address.chars().all(usable) {
        bail!("'{manager}' is no address of a manager; write it as http://127.0.0.1:7070");
    }
    Ok(config.join("pagemesh").join("keys").join(address))
}

/// Reads the key that was named, or the one of the manager's address.
pub fn find(named: Option<&Path>, manager: &str) -> anyhow::Result<Key> {
    match named {
        Some(path) => Ok(Key::load(path)?),
        None => {
            let path = default_path(manager)?;
            if !path.exists() {
                bail!(
                    "there is no cluster key for {manager} in {}; name the key file with --key or PAGEMESH_KEY",
                    path.display()
                );
            }
            Ok(Key::load(&path)?)
        }
    }
}

/// Reads a key file, or makes one with a new key.
pub fn find_or_create(path: &Path) -> anyhow::Result<Key> {
    if path.exists() {
        return Ok(Key::load(path)?);
    }
    let mut bytes = [0u8; KEY_BYTES];
    let mut at = 0;
    while at < bytes.len() {
        at += getrandom(&mut bytes[at..], GetRandomFlags::empty())?;
    }
    store(path, &Key::from_bytes(bytes))?;
    Ok(Key::from_bytes(bytes))
}

/// Writes a key file that only its owner can read; replaces what is there.
pub fn store(path: &Path, key: &Key) -> anyhow::Result<()> {
    let failed = || format!("cannot write the key file {}", path.display());
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(parent)
        .with_context(failed)?;
    let draft = path.with_extension(format!("{}.new", std::process::id()));
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&draft)
        .with_context(failed)?;
    let digits: String = key
        .as_bytes()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    file.write_all(digits.as_bytes()).with_context(failed)?;
    file.write_all(b"\n").with_context(failed)?;
    file.sync_all().with_context(failed)?;
    std::fs::rename(&draft, path).with_context(failed)
}
