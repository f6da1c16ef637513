//! The end of a failed store.
//!
//! A failed commit may be stored all the same, so memory and file may differ from then on. Opening the
//! file again in this process would mean to replace the state of the manager under its running calls,
//! such as a creation between its two transactions. The next process reads the file anyway, and each
//! of its starts is tested as the start after a crash. So the manager goes on to answer reads, and
//! ends once its disk takes writes again; systemd then starts it (`Restart=on-failure`).

use super::Store;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Bytes that the disk must take before the store is opened again: more than the first changes need.
const PROBE_BYTES: usize = 4 << 20;

impl Store {
    /// Whether the store has failed, and its disk takes writes again.
    #[must_use]
    pub fn can_reopen(&self) -> bool {
        if !self.has_failed() || !self.is_file {
            return false;
        }
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        name.push(".probe");
        let path = self.path.with_file_name(name);
        let probed = probe(&path);
        // A file that stays is overwritten by the next probe.
        let _ = std::fs::remove_file(&path);
        if let Err(error) = &probed {
            tracing::debug!(%error, "the disk of the store takes no writes yet");
        }
        probed.is_ok()
    }
}

/// Writes to a file beside the store, and syncs it: a full disk may report an error only then.
fn probe(path: &Path) -> io::Result<()> {
    // An ended manager may have left the file, and it has no other user.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    let piece = [0u8; 64 << 10];
    for _ in 0..PROBE_BYTES / piece.len() {
        file.write_all(&piece)?;
    }
    file.sync_all()
}
