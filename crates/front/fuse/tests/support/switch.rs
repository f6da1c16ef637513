//! Switches FUSE over io_uring on or off while tests use it, and restores the setting.
//!
//! The switch is global, and tests of several processes use it at once. A test that needs it on
//! holds [`USERS`] shared. The first such test writes the previous setting into that file, and the
//! last one restores it, or the next run does if that test was killed. A test holds [`GATE`] while
//! it starts or ends such a use. A test that needs the switch off holds it all the time.
//!
//! Locks are released explicitly, not by closing: a child of another thread has the file, too,
//! until it runs its program.

#![allow(dead_code)] // Each test file uses a part of it.

use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions, read_to_string, write};
use std::io::{Read, Seek, Write};

const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
const USERS: &str = "/run/lock/pagemesh-test-enable-uring";
const GATE: &str = "/run/lock/pagemesh-test-enable-uring-gate";

fn open(path: &str) -> Option<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.open(path).ok()
}

struct GateLock(File);

impl Drop for GateLock {
    fn drop(&mut self) {
        unlock(&self.0);
    }
}

fn pass_gate() -> Option<GateLock> {
    let gate = open(GATE)?;
    flock(&gate, FlockOperation::LockExclusive).ok()?;
    Some(GateLock(gate))
}

fn try_lock_exclusive(users: &File) -> bool {
    flock(users, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// The setting before tests used the switch. The caller holds the gate.
fn initial_setting(users: &mut File) -> Option<String> {
    let mut found = String::new();
    users.rewind().ok()?;
    users.read_to_string(&mut found).ok()?;
    if found.is_empty() {
        found = read_to_string(SWITCH).ok()?.trim().to_owned();
        users.write_all(found.as_bytes()).ok()?;
    }
    Some(found)
}

pub fn is_on() -> bool {
    read_to_string(SWITCH).is_ok_and(|switch| switch.trim() == "Y")
}

fn unlock(lock: &File) {
    let _ = flock(lock, FlockOperation::Unlock);
}

/// Restores the setting. The caller is alone, and holds the gate.
fn restore(users: &mut File) {
    if let Some(found) = initial_setting(users)
        && write(SWITCH, found).is_ok()
    {
        let _ = users.set_len(0);
    }
}

/// The switch is off as long as this lives, which is short: others wait for it.
pub struct UringOffGuard {
    users: File,
    _gate: GateLock,
}

/// None if there is no switch, or this user may not set it. Waits for tests that need it on.
pub fn turn_off() -> Option<UringOffGuard> {
    let mut users = open(USERS)?;
    loop {
        let gate = pass_gate()?;
        if try_lock_exclusive(&users) {
            initial_setting(&mut users)?;
            write(SWITCH, "N").ok()?;
            return Some(UringOffGuard { users, _gate: gate });
        }
        // They pass the gate when they end.
        drop(gate);
        flock(&users, FlockOperation::LockExclusive).ok()?;
        unlock(&users);
    }
}

impl Drop for UringOffGuard {
    fn drop(&mut self) {
        restore(&mut self.users);
        unlock(&self.users);
    }
}

/// The switch is on as long as this lives.
pub struct UringOnGuard(File);

/// None if there is no switch, or this user may not set it.
pub fn turn_on() -> Option<UringOnGuard> {
    let mut users = open(USERS)?;
    let _gate = pass_gate()?;
    initial_setting(&mut users)?;
    write(SWITCH, "Y").ok()?;
    flock(&users, FlockOperation::LockShared).ok()?;
    Some(UringOnGuard(users))
}

impl Drop for UringOnGuard {
    fn drop(&mut self) {
        let Some(_gate) = pass_gate() else { return };
        if try_lock_exclusive(&self.0) {
            restore(&mut self.0);
        }
        unlock(&self.0);
    }
}
