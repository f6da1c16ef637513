//! FUSE over io_uring, switched on or off while tests use it, and back.
//!
//! The switch is the machine's, and tests of several processes use it at once. Who wants
//! it on holds [`USERS`] shared; the first one writes down there what the switch was, and
//! the last one puts it back, or the next run does if that one was killed. Who comes and
//! who goes holds [`GATE`] meanwhile, and who wants it off does all the time.
//!
//! Locks are let go by name, not by closing: a child of another thread has the file, too,
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

/// What the switch was before tests used it. For who is in the gate.
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

/// Puts it back. For who is alone, in the gate.
fn restore(users: &mut File) {
    if let Some(found) = initial_setting(users)
        && write(SWITCH, found).is_ok()
    {
        let _ = users.set_len(0);
    }
}

/// It is off as long as this lives, which is short: others wait for it.
pub struct UringOffGuard {
    users: File,
    _gate: GateLock,
}

/// None where there is no switch, or nobody may use it. Waits for those who want it on.
pub fn turn_off() -> Option<UringOffGuard> {
    let mut users = open(USERS)?;
    loop {
        let gate = pass_gate()?;
        if try_lock_exclusive(&users) {
            initial_setting(&mut users)?;
            write(SWITCH, "N").ok()?;
            return Some(UringOffGuard { users, _gate: gate });
        }
        // They pass the gate when they go.
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

/// It is on as long as this lives.
pub struct UringOnGuard(File);

/// None where there is no switch, or nobody may use it.
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
