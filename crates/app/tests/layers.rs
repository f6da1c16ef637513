//! A mount below overlay file systems, as container engines store layers. Needs root and /dev/fuse.

use crate::support;
use rustix::fs::{CWD, FileType, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use support::Pools;
use support::mounted::{self, TestMount};
use support::program;
use support::skip::skip;

/// Changes in an overlay. [`TELL`] prints the result of each line.
const CHANGES: &str = "\
    cd $top; rm gone; rm -r gonedir; mv old new; mkdir made; echo x > made/f; echo more >> kept; \
    rm -r again; mkdir again; echo y > again/only; mv dir moved; ln kept hard; \
    ln -s kept soft; chmod 700 kept; setfattr -n user.a -v b kept; \
    rm swapped; mkdir swapped; mkfifo fifo; truncate -s 10000 sparse; \
    for i in $(seq 50); do echo $i > many$i; done; for i in $(seq 1 2 50); do rm many$i; done";
/// Names, kinds, modes and contents below the top.
const TELL: &str = "\
    cd $top; find . | LC_ALL=C sort | while read -r f; do \
    printf '%s ' \"$f\"; stat -c '%F %a %h' \"$f\" | sed 's/directory \\([0-9]*\\) .*/directory \\1/'; \
    if [ -f \"$f\" ]; then md5sum < \"$f\"; getfattr -d \"$f\" | grep user || true; fi; done";

/// A lower layer in a directory.
fn fill_lower(lower: &Path) {
    let script = "cd $0; mkdir dir gonedir again; echo 1 > gone; echo 2 > old; echo 3 > kept; \
                  echo 4 > dir/inner; echo 5 > gonedir/f; echo 6 > again/before; echo 7 > swapped";
    program::ok("bash", &["-ec", script, lower.to_str().unwrap()]);
}

/// How to mount an overlay of a lower, an upper and a work directory on a top directory.
#[derive(Clone, Copy)]
enum Overlay {
    Kernel,
    Fuse,
}

impl Overlay {
    /// The tree that programs find in the overlay, directly and after a second mount of it.
    fn tree(self, upper: &Path, aside: &Path) -> String {
        let dir = |base: &Path, name: &str| {
            let dir = base.join(name);
            fs::create_dir_all(&dir).unwrap();
            dir.to_str().unwrap().to_owned()
        };
        let (lower, top) = (dir(aside, "lower"), dir(aside, "top"));
        fill_lower(Path::new(&lower));
        let options = format!(
            "lowerdir={lower},upperdir={},workdir={}",
            dir(upper, "upper"),
            dir(upper, "work")
        );
        let mount = match self {
            Overlay::Kernel => format!("mount -t overlay overlay -o {options} {top}"),
            Overlay::Fuse => format!("fuse-overlayfs -o {options} {top}"),
        };
        let script = format!(
            "set -eu; top={top}; {mount}; ({CHANGES}); ({TELL}) > {lower}.1; umount {top}; \
             {mount}; ({TELL}) > {lower}.2; umount {top}; cmp {lower}.1 {lower}.2; cat {lower}.1"
        );
        program::ok("unshare", &["--mount", "bash", "-c", &script])
    }
}

fn check_like_tmpfs(overlay: Overlay) {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let reference = Pools::Memory.dir();
    let dirs = ["one", "two"].map(|name| {
        let dir = cluster.dir().join(name);
        fs::create_dir(&dir).unwrap();
        dir
    });
    let expected = overlay.tree(reference.path(), &dirs[0]);
    let mount = TestMount::new(&cluster, "files", "auto");
    assert_eq!(overlay.tree(&mount.dir, &dirs[1]), expected);
    assert!(expected.contains("./again/only"), "{expected}");
    assert!(!expected.contains("./again/before"), "{expected}");
    mount.stop(&cluster);
    let mount = TestMount::new(&cluster, "files", "auto");
    let whiteout = mount.path("upper/gone").symlink_metadata().unwrap();
    assert!(whiteout.file_type().is_char_device() && whiteout.rdev() == 0);
    mount.stop(&cluster);
}

#[test]
fn overlay_of_kernel_keeps_its_upper_layer_on_mount() {
    let systems = fs::read_to_string("/proc/filesystems").unwrap();
    if !systems.contains("\toverlay\n") {
        return skip("needs overlayfs in the kernel");
    }
    check_like_tmpfs(Overlay::Kernel);
}

#[test]
fn fuse_overlayfs_keeps_its_upper_layer_on_mount() {
    check_like_tmpfs(Overlay::Fuse);
}

#[test]
fn rename_leaves_whiteout_under_old_name() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "auto");
    let (old, new) = (mount.path("old"), mount.path("new"));
    let rename = |flags| renameat_with(CWD, &old, CWD, &new, flags).err();
    fs::write(&old, b"1").unwrap();
    fs::write(&new, b"2").unwrap();
    let no_replace = RenameFlags::WHITEOUT | RenameFlags::NOREPLACE;
    assert_eq!(rename(no_replace), Some(Errno::EXIST));
    assert_eq!(
        rename(RenameFlags::WHITEOUT | RenameFlags::EXCHANGE),
        Some(Errno::INVAL)
    );
    assert_eq!(rename(RenameFlags::WHITEOUT), None);
    assert_eq!(fs::read(&new).unwrap(), b"1");
    let left = old.symlink_metadata().unwrap();
    assert_eq!(
        FileType::from_raw_mode(left.mode()),
        FileType::CharacterDevice
    );
    assert_eq!((left.rdev(), left.mode() & 0o7777, left.nlink()), (0, 0, 1));
    fs::remove_file(&new).unwrap();
    assert_eq!(rename(no_replace), None, "a whiteout moves, too");
    assert!(new.symlink_metadata().unwrap().file_type().is_char_device());
    fs::create_dir(mount.path("dir")).unwrap();
    let moved = (mount.path("dir"), mount.path("dir2"));
    renameat_with(CWD, &moved.0, CWD, &moved.1, RenameFlags::WHITEOUT).unwrap();
    assert_eq!(mount.dir.metadata().unwrap().nlink(), 3);
    mount.sh("rm -r old new dir dir2; test -z \"$(ls -A)\"");
    mount.stop(&cluster);
}
