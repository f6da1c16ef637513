//! The helpers of mount(8) and umount(8). Needs root and /dev/fuse.

use crate::support;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Output;
use support::skip::skip;
use support::{Cluster, PAGEMESH, mounted, program, until};

/// A cluster with a file system, and the directory of the helpers.
struct HelperFixture {
    cluster: Cluster,
    dir: PathBuf,
}

impl HelperFixture {
    fn new() -> Option<HelperFixture> {
        let cluster = mounted::cluster(&[64, 64], "50M")?;
        let dir = cluster.dir().join("mnt");
        fs::create_dir(&dir).unwrap();
        for name in [
            "mount.pagemesh",
            "mount.fuse.pagemesh",
            "umount.fuse.pagemesh",
        ] {
            symlink(PAGEMESH, cluster.dir().join(name)).unwrap();
        }
        Some(HelperFixture { cluster, dir })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.cluster.dir().join(name)
    }

    fn options(&self) -> String {
        let (key, log) = (self.cluster.key(), self.path("mount.log"));
        format!(
            "manager=http://{},key={},log={},_netdev,noauto,x-systemd.automount",
            self.cluster.manager_address(),
            key.display(),
            log.display()
        )
    }

    fn run(&self, helper: &str, words: &[&str]) -> Output {
        program::run(self.path(helper).to_str().unwrap(), words)
    }

    fn mount(&self, more: &str) -> Output {
        let options = format!("{}{more}", self.options());
        let dir = self.dir.to_str().unwrap();
        self.run("mount.pagemesh", &["files", dir, "-v", "-o", &options])
    }

    fn umount(&self) {
        let dir = self.dir.to_str().unwrap();
        program::succeeded("umount", self.run("umount.fuse.pagemesh", &[dir]));
    }
}

/// The process that a verbose helper names.
fn process(told: &str) -> PathBuf {
    let (_, rest) = told.split_once("; process ").unwrap();
    let (pid, _) = rest.split_once(' ').unwrap();
    Path::new("/proc").join(pid)
}

fn assert_failed(output: &Output, code: i32, part: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.contains(part), "no '{part}' in: {said}");
}

#[test]
fn helper_returns_once_mount_is_there() {
    let Some(helpers) = HelperFixture::new() else {
        return;
    };
    let told = program::succeeded("mount", helpers.mount(""));
    let process = process(&told);
    fs::write(helpers.dir.join("file"), b"kept").unwrap();
    assert!(process.exists());
    assert_failed(&helpers.mount(""), 32, "is busy");
    helpers.umount();
    until("the process has ended", || !process.exists());
    let told = program::succeeded("mount", helpers.mount(",ro,noexec"));
    let process = self::process(&told);
    assert_eq!(fs::read(helpers.dir.join("file")).unwrap(), b"kept");
    let refused = fs::write(helpers.dir.join("file"), b"x").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
    // Without its helper umount ends the process as well.
    program::ok("umount", &["-i", helpers.dir.to_str().unwrap()]);
    until("the process has ended", || !process.exists());
}

#[test]
fn helper_exits_with_codes_of_mount() {
    let Some(helpers) = HelperFixture::new() else {
        return;
    };
    let dir = helpers.dir.to_str().unwrap();
    let options = helpers.options();
    let mount = |words: &[&str]| helpers.run("mount.pagemesh", words);
    assert_failed(&mount(&["files"]), 1, "name the file system");
    assert_failed(&mount(&["files", dir, "-o", "what"]), 1, "what");
    let bad_threads = format!("{options},threads=no");
    assert_failed(&mount(&["files", dir, "-o", &bad_threads]), 1, "threads");
    assert_failed(&mount(&["none", dir, "-o", &options]), 32, "no volume none");
    assert_failed(
        &mount(&["files", "/nowhere/x", "-o", &options]),
        32,
        "/nowhere",
    );
    let umount = helpers.run("umount.fuse.pagemesh", &[dir]);
    assert_failed(&umount, 32, "no file system of pagemesh");
    program::succeeded("fake", mount(&["files", dir, "-f", "-o", &options]));
    assert_eq!(fs::read_dir(&helpers.dir).unwrap().count(), 0);
}

/// The helpers are mounted over /sbin in a mount namespace that ends with the test.
#[test]
fn mount_and_umount_find_helpers_and_fstab() {
    let Some(helpers) = HelperFixture::new() else {
        return;
    };
    let systems = fs::read_to_string("/proc/filesystems").unwrap();
    if !systems.contains("\toverlay\n") {
        return skip("needs overlayfs in the kernel");
    }
    let (top, dir) = (helpers.cluster.dir().display(), helpers.dir.display());
    let fstab = helpers.path("fstab");
    let line = format!("files {dir} pagemesh {} 0 0\n", helpers.options());
    fs::write(&fstab, line).unwrap();
    let script = format!(
        "set -eu; sbin=$(readlink -f /sbin); mount -t tmpfs none {top}/mnt; \
         mkdir {top}/mnt/upper {top}/mnt/work; \
         mount -t overlay none -o lowerdir=$sbin,upperdir={top}/mnt/upper,workdir={top}/mnt/work $sbin; \
         umount -l {top}/mnt; \
         for name in mount.pagemesh mount.fuse.pagemesh umount.fuse.pagemesh; do \
         ln -sf {PAGEMESH} $sbin/$name; done; \
         mount -t pagemesh files {dir} -o {options},nodiratime; echo kept > {dir}/file; \
         grep -q ' {dir} fuse.pagemesh rw,nosuid,nodev,.*nodiratime' /proc/mounts; \
         mount -o remount,ro {dir}; ! touch {dir}/file; mount -o remount,rw {dir}; touch {dir}/file; umount {dir}; \
         mount --fstab {fstab} {dir}; grep -q kept {dir}/file; umount {dir}; \
         ! mount --fstab {fstab} -o what {dir}; ! grep -q fuse.pagemesh.*{dir} /proc/mounts",
        options = helpers.options(),
        fstab = fstab.display(),
    );
    program::ok("unshare", &["--mount", "sh", "-c", &script]);
    let shown = helpers.cluster.json(&["fs", "show", "files"]);
    assert!(shown["info"]["attached"].is_null(), "{shown}");
}

#[test]
fn remount_changes_options_of_the_kernel() {
    let Some(helpers) = HelperFixture::new() else {
        return;
    };
    let dir = helpers.dir.to_str().unwrap();
    let remount = |options: &str| {
        let options = format!("remount,{options}");
        helpers.run(
            "mount.fuse.pagemesh",
            &["pagemesh:files", dir, "-o", &options],
        )
    };
    assert_failed(&remount("ro"), 32, "no file system of pagemesh");
    program::succeeded("mount", helpers.mount(""));
    let path = helpers.dir.join("file");
    let file = fs::File::create(&path).unwrap();
    assert_failed(&remount("ro"), 32, "programs that write");
    drop(file);
    // With the options that the kernel shows, as mount(8) passes them.
    let shown = "rw,nosuid,nodev,relatime,user_id=0,group_id=0,default_permissions";
    program::succeeded("remount", remount(&format!("{shown},ro")));
    let refused = fs::write(&path, b"x").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
    let has = |options: &[&str]| {
        let mounts = pagemesh_base::mounts::list_mounts().unwrap();
        let entry = mounts.iter().rev().find(|entry| entry.dir == helpers.dir);
        let entry = entry.unwrap();
        for option in options {
            assert!(entry.has_option(option), "{option} in {entry:?}");
        }
    };
    program::succeeded("remount", remount("rw,noexec,noatime,nodiratime"));
    fs::write(&path, b"x").unwrap();
    has(&["rw", "nosuid", "nodev", "noexec", "noatime", "nodiratime"]);
    program::succeeded("remount", remount("relatime,diratime"));
    has(&["rw", "nosuid", "nodev", "noexec", "relatime"]);
    assert_failed(&remount("sync"), 32, "cannot change sync");
    assert_failed(&remount("strictatime"), 1, "strictatime is not supported");
    helpers.umount();
}
