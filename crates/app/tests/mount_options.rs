//! Options of `mount -o`. Needs root and /dev/fuse.

use crate::support;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::{MountFlags, mount_remount};
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::SystemTime;
use support::mounted::{self, TestMount, direct_command};
use support::{Cluster, until};

fn mount_with(cluster: &Cluster, options: &[&str]) -> TestMount {
    let mounted =
        TestMount::try_with_options(cluster, "files", "mnt", ("auto", "classic"), options);
    mounted.unwrap_or_else(|ended| panic!("no mount: {ended:?}"))
}

/// Mounts with options that are refused, and returns the message.
fn refusal(cluster: &Cluster, options: &[&str]) -> String {
    let mounted =
        TestMount::try_with_options(cluster, "files", "mnt", ("auto", "classic"), options);
    let ended = mounted.err().expect("it is refused");
    String::from_utf8_lossy(&ended.stderr).into_owned()
}

fn read_file(path: &Path) {
    File::open(path)
        .unwrap()
        .read_to_end(&mut Vec::new())
        .unwrap();
}

/// Whether a read changes the access time of an inode, which is old before.
fn read_changes_time(path: &Path, read: impl Fn(&Path)) -> bool {
    let old = fs::FileTimes::new().set_accessed(SystemTime::UNIX_EPOCH);
    File::open(path).unwrap().set_times(old).unwrap();
    read(path);
    path.metadata().unwrap().atime() != 0
}

/// The same for a file and a directory.
fn reads_change_times(mount: &TestMount) -> (bool, bool) {
    let file = read_changes_time(&mount.path("file"), read_file);
    let list = |path: &Path| assert_eq!(fs::read_dir(path).unwrap().count(), 0);
    (file, read_changes_time(&mount.path("directory"), list))
}

#[test]
fn access_times_follow_the_options() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    for (options, expected) in [
        (&[][..], (true, true)),
        (&["-o", "noatime"], (false, false)),
        (
            &["-o", "rw,nodiratime,nofail,x-systemd.automount"],
            (true, false),
        ),
        (
            &["-o", "noatime,nodiratime", "-o", "relatime,diratime"],
            (true, true),
        ),
    ] {
        let mount = mount_with(&cluster, options);
        mount.sh("mkdir -p directory; echo old > file");
        assert_eq!(reads_change_times(&mount), expected, "{options:?}");
        mount.stop(&cluster);
    }
    let said = refusal(&cluster, &["-o", "ro,strictatime"]);
    assert!(said.contains("strictatime is not supported"), "{said}");
}

#[test]
fn read_of_bytes_just_written_changes_the_access_time() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mount = mount_with(&cluster, &[]);
    let path = mount.path("file");
    let atime = || {
        let told = path.metadata().unwrap();
        (told.atime(), told.atime_nsec())
    };
    fs::write(&path, b"content").unwrap();
    let before = atime();
    mount.sh("sleep 0.05");
    read_file(&path);
    let first = atime();
    assert!(first > before);
    mount.sh("sleep 0.05");
    read_file(&path);
    assert_eq!(atime(), first);
    mount.stop(&cluster);
}

#[test]
fn remount_by_mount_2_changes_access_times() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mount = mount_with(&cluster, &[]);
    mount.sh("mkdir -p directory; echo old > file");
    let fixed = MountFlags::NOSUID | MountFlags::NODEV;
    for (flags, expected) in [
        (MountFlags::NOATIME, (false, false)),
        (MountFlags::NODIRATIME, (true, false)),
        (MountFlags::RELATIME, (true, true)),
    ] {
        mount_remount(&mount.dir, fixed | flags, "").unwrap();
        // The mount looks once a second.
        until("the options hold", || {
            reads_change_times(&mount) == expected
        });
    }
    mount.stop(&cluster);
}

#[test]
fn read_only_mount_takes_no_changes() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mount = mount_with(&cluster, &[]);
    mount.sh("echo old > file; touch -a -d 2001-02-03 file");
    let atime = mount.path("file").metadata().unwrap().atime();
    mount.stop(&cluster);
    let mount = mount_with(&cluster, &["-o", "ro"]);
    let refused = fs::write(mount.path("file"), b"new").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
    read_file(&mount.path("file"));
    assert_eq!(mount.path("file").metadata().unwrap().atime(), atime);
    mount.stop(&cluster);
}

#[test]
fn devices_and_setid_bits_count_if_allowed() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let check = |options: &[&str], is_allowed: bool| {
        let mount = mount_with(&cluster, options);
        let zero = mount.path("zero");
        let _ = fs::remove_file(&zero);
        let mode = Mode::from_raw_mode(0o600);
        mknodat(CWD, &zero, FileType::CharacterDevice, mode, makedev(1, 5)).unwrap();
        assert_eq!(File::open(&zero).is_ok(), is_allowed, "{options:?}");
        // A user other than root executes it.
        mount.sh("cp -f $(readlink -f $(command -v id)) id; chmod 4755 id; chmod 755 .");
        let program = mount.path("id");
        let uid = mount.sh(&format!(
            "exec setpriv --reuid=1000 --clear-groups {} -u < /dev/null",
            program.display()
        ));
        assert_eq!(uid.trim() == "0", is_allowed, "{options:?}");
        mount.stop(&cluster);
    };
    // Its parents let other users through.
    fs::set_permissions(cluster.dir(), PermissionsExt::from_mode(0o755)).unwrap();
    check(&[], false);
    check(&["-o", "dev,suid"], true);
    check(&["-o", "defaults,dev,suid,nodev,nosuid"], false);
}

#[test]
fn options_are_shown_and_others_refused() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mount = mount_with(&cluster, &["-o", "sync,dirsync,noexec,_netdev"]);
    let mounts = pagemesh_base::mounts::list_mounts().unwrap();
    let entry = mounts
        .iter()
        .rev()
        .find(|entry| entry.dir == mount.dir)
        .unwrap();
    for option in [
        "rw", "nosuid", "nodev", "noexec", "sync", "dirsync", "relatime",
    ] {
        assert!(entry.has_option(option), "{option} in {entry:?}");
    }
    mount.sh("echo content > file; fallocate -l 100000 file");
    // Direct writes would not wait for an asynchronous replica.
    let words = [
        "dd",
        "if=/dev/zero",
        "of=file",
        "bs=4096",
        "count=9",
        "conv=notrunc",
    ];
    let done = direct_command(&words)
        .current_dir(&mount.dir)
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    let told = cluster.run(&["mount", "status", mount.dir.to_str().unwrap()]);
    let told = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(told.contains("Without a direct path"), "{told}");
    mount.stop(&cluster);
    for (options, part) in [
        (
            &["-o", "ro,what=3"][..],
            "the option what=3 is not known; there are ro, rw,",
        ),
        (&["-o", "remount,ro"], "mount -o remount"),
        (
            &["-o", "sync", "--commit-interval", "5"],
            "leave one of them out",
        ),
    ] {
        let said = refusal(&cluster, options);
        assert!(said.contains(part), "{said}");
    }
}

/// Programs on the direct path get it, too.
#[test]
fn direct_clients_see_the_time_of_birth() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mount = mount_with(&cluster, &[]);
    let earlier = mount.sh("date +%s; echo content > file; touch -d 2001-02-03 file");
    let born = |command: &mut std::process::Command| {
        let told = command.current_dir(&mount.dir).output().unwrap();
        assert!(told.status.success(), "{told:?}");
        String::from_utf8(told.stdout).unwrap()
    };
    let words = ["stat", "-c", "%W", "file"];
    let by_kernel = born(std::process::Command::new(words[0]).args(&words[1..]));
    let seconds: i64 = by_kernel.trim().parse().unwrap();
    assert!(seconds >= earlier.trim().parse().unwrap());
    assert_eq!(born(&mut direct_command(&words)), by_kernel);
    mount.stop(&cluster);
}
