//! `.snapshot/NAME` in mounts, `pagemesh fs restore`, and copies that pass no data through the client.

use crate::by_both;
use crate::support;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use support::mounted::{self, TestMount, direct_command};
use support::{Cluster, program};

/// A mounted file system with a snapshot `one`, of which files were changed since.
fn mounted_with_snapshot(fuse: &'static str) -> Option<(Cluster, TestMount)> {
    let cluster = mounted::cluster(&[128, 128], "64M")?;
    let mount = TestMount::with_fuse(&cluster, "files", "auto", fuse);
    mount.sh("mkdir -p a/b; echo one > a/b/file; ln -s file a/b/link; chmod 640 a/b/file; chown 7:8 a/b/file; \
              touch -d 2001-02-03 a/b/file; head -c 3M /dev/zero | tr '\\0' x > large; sync .");
    cluster.ok(&["snapshot", "create", "files@one"]);
    mount.sh("echo two > a/b/file; rm large; echo new > a/b/new; mkdir later; sync .");
    Some((cluster, mount))
}

fn files_are_seen_as_in_the_snapshot(fuse: &'static str) {
    let Some((cluster, mount)) = mounted_with_snapshot(fuse) else {
        return;
    };
    mount.sh("[ $(cat a/b/file) = two ]; [ $(cat .snapshot/one/a/b/file) = one ]; \
              [ $(cat a/.snapshot/one/b/file) = one ]; [ $(cat a/b/.snapshot/one/link) = one ]; \
              [ $(stat -c %s .snapshot/one/large) = 3145728 ]; \
              [ $(tr -d x < .snapshot/one/large | wc -c) = 0 ]; [ ! -e a/b/.snapshot/one/new ]; \
              [ \"$(ls .snapshot/one/a/b | tr '\\n' ' ')\" = 'file link ' ]; [ ! -e later/.snapshot/one ]; \
              [ $(stat -c %a:%u:%g .snapshot/one/a/b/file) = 640:7:8 ]; \
              [ \"$(ls -A)\" = $'a\\nlater' ]; [ $(ls .snapshot) = one ]; [ ! -e .snapshot/two ]");
    let inode = |path: &str| fs::metadata(mount.path(path)).unwrap().ino();
    assert_ne!(inode("a/b/file"), inode(".snapshot/one/a/b/file"));
    // Copies with reflinks fall back to reads.
    mount.sh("cp --reflink=auto -a .snapshot/one/large large; cmp large .snapshot/one/large");
    let read_only = |result: std::io::Result<()>| {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
    };
    read_only(fs::write(mount.path(".snapshot/one/a/b/file"), "x"));
    read_only(fs::remove_file(mount.path(".snapshot/one/a/b/file")));
    read_only(fs::create_dir(mount.path(".snapshot/one/dir")));
    read_only(fs::create_dir(mount.path(".snapshot/two")));
    // Programs on the direct path read views through the kernel.
    let path = mount.path(".snapshot/one/a/b/file");
    let output = direct_command(&["cat", path.to_str().unwrap()]).output();
    let text = program::succeeded("cat", output.unwrap());
    assert_eq!(text, "one\n");
    mount.stop(&cluster);
}

by_both! { files_are_seen_as_in_the_snapshot }

#[test]
fn listings_show_snapshots_on_demand() {
    let Some((cluster, mount)) = mounted_with_snapshot(mounted::CLASSIC) else {
        return;
    };
    let free = |path: &str| {
        let found = rustix::fs::statvfs(mount.path(path)).unwrap();
        (found.f_blocks, found.f_bsize)
    };
    assert_eq!(free(".snapshot/one/a"), free("."));
    assert_eq!(free(".snapshot"), free("."));
    mount.stop(&cluster);
    let how = ("auto", mounted::CLASSIC);
    let shown = ["--show-snapshots"];
    let mount = TestMount::try_with_options(&cluster, "files", "mnt", how, &shown).unwrap();
    mount.sh("[ \"$(ls -A | sort | tr '\\n' ' ')\" = '.snapshot a later ' ]; [ \"$(ls -A later)\" = .snapshot ]; \
              [ \"$(find . -maxdepth 2 -name .snapshot | sort | tr '\\n' ' ')\" = './.snapshot ./a/.snapshot ./later/.snapshot ' ]; \
              [ \"$(ls -A .snapshot/one/a)\" = b ]; rmdir later");
    let empty = cluster.dir().join("empty");
    fs::create_dir(&empty).unwrap();
    let refused = ["mount", "files@one", empty.to_str().unwrap(), shown[0]];
    cluster.refused(&refused, &["has no snapshots"]);
    mount.stop(&cluster);
}

#[test]
fn deleted_snapshot_gives_errors_and_its_name_another_one() {
    let Some((cluster, mount)) = mounted_with_snapshot(mounted::CLASSIC) else {
        return;
    };
    mount.sh("[ $(cat .snapshot/one/a/b/file) = one ]");
    cluster.ok(&["snapshot", "delete", "files@one", "--yes"]);
    cluster.ok(&["snapshot", "create", "files@one"]);
    support::until("the name has the new snapshot", || {
        let read = fs::read_to_string(mount.path(".snapshot/one/a/b/file"));
        // Errors are in order until the kernel asks for the name again, and old content is right.
        match read.as_deref() {
            Ok("two\n") => true,
            Ok(old) => {
                assert_eq!(old, "one\n");
                false
            }
            Err(_) => false,
        }
    });
    mount.stop(&cluster);
}

#[test]
fn real_entry_of_the_name_hides_the_views() {
    let Some((cluster, mount)) = mounted_with_snapshot(mounted::CLASSIC) else {
        return;
    };
    mount.sh("! mkdir .snapshot 2>/dev/null; mkdir plain; mv -T plain later/.snapshot 2>/dev/null || true");
    mount.sh("[ -e a/.snapshot/one ]");
    mount.stop(&cluster);
}

#[test]
fn files_and_directories_are_restored() {
    let Some((cluster, mount)) = mounted_with_snapshot(mounted::CLASSIC) else {
        return;
    };
    let path = |name: &str| mount.path(name).to_str().unwrap().to_owned();
    let restored = cluster.json(&["fs", "restore", &path("large")]);
    assert_eq!(
        (&restored["snapshot"], &restored["bytes"]),
        (&"one".into(), &3_145_728.into())
    );
    mount.sh("cmp large .snapshot/one/large; rm -r a");
    cluster.ok(&["fs", "restore", &path("a")]);
    mount.sh("[ $(cat a/b/file) = one ]; [ $(readlink a/b/link) = file ]; [ ! -e a/b/new ]; \
              [ \"$(stat -c %a:%u:%g:%Y a/b/file)\" = \"$(stat -c %a:%u:%g:%Y .snapshot/one/a/b/file)\" ]; \
              [ \"$(ls -A a | tr '\\n' ' ')\" = 'b ' ]");
    // The restored directory is another inode than that of the snapshot, so its parent's view is used.
    mount.sh("echo changed > large");
    cluster.refused(&["fs", "restore", &path("large")], &["exists", "--force"]);
    cluster.ok(&["fs", "restore", &path("large"), "--to", &path("copy")]);
    cluster.ok(&["fs", "restore", &path("large"), "--force", "--from", "one"]);
    mount.sh("cmp large copy; [ $(stat -c %s large) = 3145728 ]");
    cluster.refused(
        &["fs", "restore", &path("never")],
        &["none of 1 snapshots has"],
    );
    let outside = cluster.dir().join("file");
    cluster.refused(
        &["fs", "restore", outside.to_str().unwrap()],
        &["has no snapshots"],
    );
    mount.stop(&cluster);
}

/// Whole spans are shared: the copy takes no space, so no data passed through the client.
#[test]
fn copy_file_range_shares_pages() {
    let Some((cluster, mount)) = mounted_with_snapshot(mounted::CLASSIC) else {
        return;
    };
    mount.sh("head -c 16M /dev/urandom > source; sync .");
    let free = |mount: &TestMount| -> u64 {
        let output = Command::new("stat")
            .args(["-f", "-c", "%a"])
            .arg(&mount.dir)
            .output();
        let text = program::succeeded("stat", output.unwrap());
        text.trim().parse().unwrap()
    };
    let before = free(&mount);
    mount.sh("cp --reflink=auto source copy; sync .; cmp source copy");
    let taken = (before - free(&mount)) * 4096;
    assert!(taken < 4 << 20, "{taken} bytes");
    // FUSE passes no FICLONE.
    mount.sh("! cp --reflink=always source other 2>/dev/null");
    mount.stop(&cluster);
}
