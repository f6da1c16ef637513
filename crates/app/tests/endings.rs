//! Mounts that end although other mount namespaces or open files hold them. Needs root and
//! /dev/fuse.

use crate::support;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use support::Cluster;
use support::mounted::{self, TestMount};

/// A process in a mount namespace of its own; dropping it kills it.
struct OtherNamespace(Child);

impl OtherNamespace {
    fn new() -> OtherNamespace {
        let mut child = Command::new("unshare")
            .args(["--mount", "sh", "-c", "echo; exec sleep 600"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let stdout = child.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        OtherNamespace(child)
    }

    /// Whether calls of this process on a file of the mount fail.
    fn is_cut_off(&self, mount: &TestMount) -> bool {
        let pid = self.0.id();
        let path = format!("/proc/{pid}/root{}", mount.path("file").display());
        fs::read(path).is_err()
    }
}

impl Drop for OtherNamespace {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn mount_in_other_namespace() -> Option<(Cluster, TestMount, OtherNamespace)> {
    let cluster = mounted::cluster(&[64, 64], "50M")?;
    let mount = TestMount::new(&cluster, "files", "auto");
    fs::write(mount.path("file"), b"kept").unwrap();
    let elsewhere = OtherNamespace::new();
    assert!(!elsewhere.is_cut_off(&mount));
    Some((cluster, mount, elsewhere))
}

#[test]
fn umount_names_mount_holder_and_term_ends_mount() {
    let Some((cluster, mut mount, elsewhere)) = mount_in_other_namespace() else {
        return;
    };
    let dir = mount.dir.to_str().unwrap().to_owned();
    let mut daemon = mount.daemon.take().unwrap();
    let held = format!("{} (sleep)", elsewhere.0.id());
    let kill = format!("kill {}", daemon.pid());
    cluster.refused(
        &["umount", &dir],
        &["other mount namespaces", &held, &dir, &kill],
    );
    assert!(!elsewhere.is_cut_off(&mount), "cut off without a request");
    daemon.signal("TERM");
    assert!(daemon.await_end().success(), "{}", daemon.log());
    assert!(daemon.log().contains(&held), "{}", daemon.log());
    assert!(elsewhere.is_cut_off(&mount));
    let shown = cluster.json(&["fs", "show", "files"]);
    assert!(shown["info"]["attached"].is_null(), "{shown}");
    mount.remount(&cluster, "files", "auto");
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"kept");
    mount.stop(&cluster);
}

#[test]
fn umount_waits_for_namespace_that_ends_soon() {
    let Some((cluster, mount, elsewhere)) = mount_in_other_namespace() else {
        return;
    };
    drop(elsewhere);
    mount.stop(&cluster);
}

#[test]
fn forced_umount_detaches_mount_in_all_namespaces() {
    let Some((cluster, mut mount, elsewhere)) = mount_in_other_namespace() else {
        return;
    };
    let open = File::create(mount.path("open")).unwrap();
    let dir = mount.dir.to_str().unwrap().to_owned();
    cluster.ok(&["umount", "--force", &dir]);
    let mut daemon = mount.daemon.take().unwrap();
    assert!(daemon.await_end().success(), "{}", daemon.log());
    assert!(elsewhere.is_cut_off(&mount));
    (&open).write_all(b"x").expect_err("cut off");
}

#[test]
fn fenced_mount_ends_despite_other_namespaces() {
    let Some((cluster, mut mount, elsewhere)) = mount_in_other_namespace() else {
        return;
    };
    let second = TestMount::by_force(&cluster, "files", "mnt2", "auto", "auto");
    let mut daemon = mount.daemon.take().unwrap();
    assert_eq!(daemon.await_end().code(), Some(support::FENCED));
    assert!(elsewhere.is_cut_off(&mount));
    second.stop(&cluster);
}

#[test]
fn term_ends_lazily_unmounted_mount_with_open_file() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mut mount = TestMount::new(&cluster, "files", "auto");
    let open = File::create(mount.path("open")).unwrap();
    cluster.ok(&["umount", "--lazy", mount.dir.to_str().unwrap()]);
    let mut daemon = mount.daemon.take().unwrap();
    assert!(daemon.is_running());
    daemon.signal("TERM");
    assert!(daemon.await_end().success(), "{}", daemon.log());
    (&open).write_all(b"x").expect_err("cut off");
}
