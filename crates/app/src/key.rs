//! The place of the cluster key.
//!
//! `--key` or `PAGEMESH_KEY` names the key file. Otherwise a `client.toml` for the manager's address names it, or it
//! is the file of the address in the user's configuration directory. So several clusters of one user do not disturb
//! each other.

use crate::client_file::{ClientFile, ClientFiles, HOST_DIR, config_dir};
use anyhow::{Context, bail};
use pagemesh_base::key::{KEY_BYTES, Key};
use rustix::rand::{GetRandomFlags, getrandom};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// The default key file of a manager's address.
pub fn default_path(manager: &str) -> anyhow::Result<PathBuf> {
    let config = config_dir()?;
    let address = manager.trim_start_matches("http://").trim_end_matches('/');
    let usable = |c: char| c.is_ascii_alphanumeric() || ".:-_[]".contains(c);
    if address.is_empty() || address.starts_with('.') || !address.chars().all(usable) {
        bail!("'{manager}' is no address of a manager; write it as http://127.0.0.1:7070");
    }
    Ok(config.join("keys").join(address))
}

/// The named key file. An empty name, as from an empty `PAGEMESH_KEY`, counts as none.
pub fn nonempty_path(path: Option<&Path>) -> Option<&Path> {
    path.filter(|path| !path.as_os_str().is_empty())
}

/// Reads the named key file, or the one of the manager's address.
pub fn find(named: Option<&Path>, manager: &str) -> anyhow::Result<Key> {
    if let Some(path) = locate(named, manager)? {
        return Ok(Key::load(&path)?);
    }
    let path = default_path(manager)?;
    bail!(
        "there is no cluster key for {manager} in {} or {HOST_DIR}/client.toml; name the key file with --key or \
         PAGEMESH_KEY",
        path.display()
    )
}

/// The named key file, or the one of the manager's address: of the user's `client.toml`, of the user's keys, of the
/// machine's `client.toml`. None if there is none.
pub fn locate(named: Option<&Path>, manager: &str) -> anyhow::Result<Option<PathBuf>> {
    if let Some(path) = nonempty_path(named) {
        return Ok(Some(path.to_owned()));
    }
    let files = ClientFiles::load()?;
    let stored = || default_path(manager).ok().filter(|path| path.exists());
    let key_of = |file: Option<&ClientFile>| file.and_then(|file| file.key.clone());
    let of_user = key_of(files.of_user(manager)).or_else(stored);
    Ok(of_user.or_else(|| key_of(files.of_host(manager))))
}

/// Reads a key file, or creates one with a new key. Of several processes that create it at once,
/// one succeeds, and all read its key.
pub fn find_or_create(path: &Path) -> anyhow::Result<Key> {
    if path.exists() {
        return Ok(Key::load(path)?);
    }
    let mut bytes = [0u8; KEY_BYTES];
    let mut at = 0;
    while at < bytes.len() {
        at += getrandom(&mut bytes[at..], GetRandomFlags::empty())?;
    }
    let made = write_temporary(path, &Key::from_bytes(bytes))?.persist_noclobber(path);
    match made {
        Err(failed) if failed.error.kind() != ErrorKind::AlreadyExists => {
            Err(failed.error).with_context(|| write_error(path))
        }
        _ => Ok(Key::load(path)?),
    }
}

/// Writes a key file that only its owner can read; replaces an existing one.
pub fn store(path: &Path, key: &Key) -> anyhow::Result<()> {
    let stored = write_temporary(path, key)?.persist(path);
    stored.map(drop).with_context(|| write_error(path))
}

fn write_error(path: &Path) -> String {
    format!("cannot write the key file {}", path.display())
}

/// Writes the whole key to a temporary file next to the key file, under an unpredictable name. The
/// file is removed unless it is renamed. No other process can have opened it before (open(2),
/// O_EXCL), and its mode is 0600.
fn write_temporary(path: &Path, key: &Key) -> anyhow::Result<NamedTempFile> {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let write = || {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(parent)?;
        let mut file = tempfile::Builder::new()
            .prefix(".key-")
            .tempfile_in(parent)?;
        for byte in key.as_bytes() {
            write!(file, "{byte:02x}")?;
        }
        file.write_all(b"\n")?;
        file.as_file().sync_all()?;
        Ok::<_, std::io::Error>(file)
    };
    write().with_context(|| write_error(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::Barrier;

    const MANAGERS: usize = 8;

    fn key(byte: u8) -> Key {
        Key::from_bytes([byte; KEY_BYTES])
    }

    /// The names in a directory.
    fn names(dir: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(dir).expect("a directory");
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
        let names = entries.map(|entry| name(entry).to_string_lossy().into_owned());
        names.collect()
    }

    #[test]
    fn concurrent_managers_create_one_key() {
        for _round in 0..50 {
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("keys").join("address");
            let start = Barrier::new(MANAGERS);
            let keys: Vec<Key> = std::thread::scope(|scope| {
                let manager = || {
                    start.wait();
                    find_or_create(&path).expect("a key")
                };
                let managers: Vec<_> = (0..MANAGERS).map(|_| scope.spawn(manager)).collect();
                let keys = managers.into_iter().map(|it| it.join().expect("no panic"));
                keys.collect()
            });
            let kept = Key::load(&path).expect("a key file");
            assert!(keys.iter().all(|key| key.as_bytes() == kept.as_bytes()));
            assert_eq!(names(&dir.path().join("keys")), ["address"]);
        }
    }

    #[test]
    fn key_file_is_private_and_not_written_through_link() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("key");
        let other = dir.path().join("other");
        std::fs::write(&other, "precious").expect("written");
        // The key file itself, and a temporary name that an attacker could guess from the process
        // id.
        let draft = path.with_extension(format!("{}.new", std::process::id()));
        for link in [&path, &draft] {
            symlink(&other, link).expect("a link");
        }
        store(&path, &key(1)).expect("stored");
        assert_eq!(std::fs::read(&other).expect("the other"), b"precious");
        let found = path.symlink_metadata().expect("the key file");
        assert!(found.is_file());
        assert_eq!(found.permissions().mode() & 0o7777, 0o600);
        assert_eq!(Key::load(&path).expect("a key").as_bytes(), &[1; KEY_BYTES]);
        // A key file that others can read is replaced.
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).expect("mode set");
        store(&path, &key(2)).expect("stored");
        assert_eq!(Key::load(&path).expect("a key").as_bytes(), &[2; KEY_BYTES]);
    }

    #[test]
    fn invalid_key_file_is_not_replaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("key");
        symlink(dir.path().join("nowhere"), &path).expect("a link");
        let refused = find_or_create(&path).expect_err("a refusal");
        assert!(refused.to_string().contains("key"), "{refused}");
        assert_eq!(names(dir.path()), ["key"]);
    }
}
