//! The mount that a killed mount process leaves: the kernel refuses every call on it.
//!
//! Invariant: only a mount of the calling user is cleared, and only after the kernel has said that no
//! process serves it. A mount whose process is stopped or slow stays.

use anyhow::Context;
use pagemesh_base::mounts::MountEntry;
use pagemesh_fuse::unmount_dir;
use rustix::io::Errno;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

/// Limit of the question to the kernel: a process that is alive may not answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Takes a dead mount of this user from its mount point; false if the mount is not dead, or not this user's.
pub fn clear(at: &Path, known: &MountEntry) -> anyhow::Result<bool> {
    let user = rustix::process::geteuid().as_raw();
    if known.user != Some(user) || !is_dead(at) {
        return Ok(false);
    }
    let shown = at.display();
    // Processes may have files of the dead mount open; they keep them, and their errors.
    unmount_dir(at, true).with_context(|| {
        format!("cannot clear the dead mount on {shown}; run: pagemesh umount --lazy {shown}")
    })?;
    eprintln!("note: the mount process of {shown} was killed; cleared its mount");
    Ok(true)
}

/// Whether no process serves the mount any more.
fn is_dead(at: &Path) -> bool {
    let (send, answer) = mpsc::channel();
    let at = at.to_owned();
    // statfs(2) always asks the mount process; the kernel has no answer in a cache.
    std::thread::spawn(move || {
        // The receiver is gone after the limit.
        let _ = send.send(rustix::fs::statvfs(&at).err());
    });
    let dead = [Some(Errno::NOTCONN), Some(Errno::CONNABORTED)];
    let answer = answer.recv_timeout(ANSWER_TIMEOUT);
    answer.is_ok_and(|error| dead.contains(&error))
}
