//! Pools on block devices. Only root can create them.

use crate::skip;
use pagemesh_brick::file::{self, FileError};
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;

/// A loop device over a file.
struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    /// None without permission to create one.
    fn new(dir: &Path, bytes: u64) -> Option<LoopDevice> {
        if !nix::unistd::geteuid().is_root() {
            skip::skip("loop devices are made by root");
            return None;
        }
        let below = dir.join("below");
        let made = std::fs::File::create(&below).and_then(|file| file.set_len(bytes));
        made.expect("a file");
        let mut losetup = Command::new("losetup");
        let out = losetup.args(["--find", "--show"]).arg(&below).output();
        let out = out.expect("losetup runs");
        assert!(out.status.success(), "{out:?}");
        let path = String::from_utf8(out.stdout).expect("a path");
        let path = PathBuf::from(path.trim());
        Some(LoopDevice { path })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let mut losetup = Command::new("losetup");
        let _ = losetup.arg("--detach").arg(&self.path).status();
    }
}

#[test]
fn device_too_short_or_with_a_pool_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let Some(device) = LoopDevice::new(dir.path(), 64 * MIB) else {
        return;
    };
    let long = file::create(&device.path, 128 * MIB);
    let said = long.expect_err("it is too short").to_string();
    assert!(
        said.contains("134217728") && said.contains("67108864"),
        "{said}"
    );
    file::create(&device.path, 64 * MIB).expect("a pool");
    let again = file::create(&device.path, 64 * MIB);
    assert!(matches!(again, Err(FileError::HoldsPool(_))), "{again:?}");
    file::open(&device.path).expect("the pool is still there");
}

#[test]
fn mounted_device_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let Some(device) = LoopDevice::new(dir.path(), 64 * MIB) else {
        return;
    };
    let run = |program: &str, args: &[&Path]| {
        let status = Command::new(program).args(args).output().expect(program);
        assert!(status.status.success(), "{status:?}");
    };
    run("mkfs.ext4", &[&device.path]);
    let at = dir.path().join("at");
    std::fs::create_dir(&at).expect("a directory");
    run("mount", &[&device.path, &at]);
    let made = file::create(&device.path, 32 * MIB);
    run("umount", &[&at]);
    assert!(matches!(made, Err(FileError::Mounted(_))), "{made:?}");
}
