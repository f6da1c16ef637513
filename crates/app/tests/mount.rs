//! File systems of a real cluster, mounted through the kernel, and common programs on them. Needs
//! root and /dev/fuse.

use crate::by_both;
use crate::support;
use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags, SeekFrom};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use support::mounted::{self, TestMount};
use support::skip::skip;
use support::until;

by_both! {
    programs_read_back_their_files
    copies_share_their_pages
    sqlite_is_consistent_on_mount
    acknowledged_writes_survive_mount_kill
    forced_mount_fences_first
    mounts_end_cleanly
    killed_mount_process_leaves_disconnected_mount
}

/// `cp` asks for a reflink, and then for copy_file_range.
fn copies_share_their_pages(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "tcp", fuse);
    mount.sh("head -c 9000001 /dev/urandom > one; for i in 1 2 3 4; do cp one copy$i; done");
    mount.sh("test $(df --output=used -B1 . | tail -1) -lt 12000000; for i in 1 2 3 4; do cmp one copy$i; done");
    mount.sh(
        "printf changed | dd of=copy2 bs=1 seek=5000000 conv=notrunc status=none; \
         cp copy1 expected; printf changed | dd of=expected bs=1 seek=5000000 conv=notrunc status=none; \
         rm copy1; truncate -s 4M copy3; cmp one copy4; cmp copy2 expected; cmp -n 4194304 one copy3",
    );
    mount.stop(&cluster);
    let mount = TestMount::with_fuse(&cluster, "files", "tcp", fuse);
    mount.sh("rm one expected; cmp -n 4194304 copy4 copy3; ! cmp -s copy4 copy2; sync; rm copy*");
    // The mount frees files once the kernel has forgotten them.
    until("their pages are free", || {
        let told = rustix::fs::statvfs(&mount.dir).unwrap();
        (told.f_blocks - told.f_bfree) * told.f_frsize < 3 << 20
    });
    mount.stop(&cluster);
}

fn programs_read_back_their_files(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    for transport in ["map", "tcp"] {
        let mount = TestMount::with_fuse(&cluster, "files", transport, fuse);
        mount.sh(
            "mkdir src; for i in $(seq 40); do mkdir -p src/d$((i % 7)); \
             head -c $((i * i * 97)) /dev/urandom > src/d$((i % 7))/f$i; done; \
             ln -s d1 src/link; ln src/d1/f1 src/hard; chmod 751 src/d2; \
             touch -d '2001-02-03 04:05:06.789 UTC' src/d3/f3; mkfifo src/fifo; \
             truncate -s 3M src/sparse; printf x | dd of=src/sparse bs=1 seek=2000000 conv=notrunc status=none",
        );
        mount.sh("cp -a src copy; diff -r --no-dereference -x fifo src copy");
        mount.sh(
            "tar -cSf all.tar src; mkdir out; tar -xf all.tar -C out; diff -r -x fifo src out/src",
        );
        mount.sh("test $(stat -c %Y out/src/d3/f3) = $(date -d '2001-02-03 04:05:06 UTC' +%s); stat -c %y src/d3/f3 | grep -q 06.789000000");
        mount.sh(
            "cp --sparse=always src/sparse s2; cmp s2 src/sparse; test $(stat -c %b s2) -lt 100",
        );
        mount.sh(
            "export HOME=$PWD GIT_CONFIG_NOSYSTEM=1; git init -q repo; cd repo; \
             git config user.email a@b; git config user.name a; cp -r ../src/d1 ../src/d2 .; \
             git add -A; git commit -qm one; echo x > new; git add new; git commit -qm two; \
             git gc -q; cd ..; git clone -q repo clone; cd clone; git fsck --strict; git log --oneline | wc -l",
        );
        mount.stop(&cluster);
        // The next mount finds everything.
        let mount = TestMount::with_fuse(&cluster, "files", transport, fuse);
        mount
            .sh("diff -r -x fifo src out/src; cd clone; git fsck --strict; git status --porcelain");
        mount.sh("rm -rf src copy out repo clone all.tar s2");
        mount.stop(&cluster);
    }
    cluster.check_identical("files");
}

fn sqlite_is_consistent_on_mount(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[128, 128], "100M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "auto", fuse);
    mount.sh(
        "sqlite3 db 'pragma journal_mode=wal; create table t(a integer primary key, b blob);'; \
         for i in $(seq 4); do sqlite3 -cmd '.timeout 20000' db \"begin immediate; \
         with recursive n(x) as (select 1 union all select x+1 from n where x<500) \
         insert into t(b) select randomblob(200) from n; commit;\" & done; wait; \
         test $(sqlite3 db 'select count(*) from t') = 2000; \
         test $(sqlite3 db 'pragma integrity_check') = ok; \
         sqlite3 db 'pragma mmap_size=100000000; select count(*) from t where length(b)=200;'; \
         sqlite3 db 'pragma journal_mode=delete; delete from t where a % 3 = 0; vacuum;'; \
         test $(sqlite3 db 'pragma integrity_check') = ok",
    );
    mount.stop(&cluster);
}

/// Files that exist at once; older ones are deleted.
const FILES: u64 = 500;

/// Writes files until `stop` is set; each counted file was acknowledged. Returns `None` if it was
/// stopped, or the cause if a call failed.
fn write_files(dir: &Path, count: &AtomicU64, stop: &AtomicBool) -> Option<std::io::Error> {
    while !stop.load(Ordering::Relaxed) {
        let n = count.load(Ordering::Relaxed);
        let write = || {
            let mut file = File::create(dir.join(format!("f{n}")))?;
            file.write_all(format!("{n:08}").repeat(700).as_bytes())
        };
        if let Err(cause) = write() {
            return Some(cause);
        }
        count.store(n + 1, Ordering::Relaxed);
        if n >= FILES
            && let Err(cause) = fs::remove_file(dir.join(format!("f{}", n - FILES)))
        {
            return Some(cause);
        }
    }
    None
}

/// The last counted files are there. The oldest ones may be deleted already.
fn check_files(dir: &Path, count: u64) {
    for n in (count + 1).saturating_sub(FILES)..count {
        let content = fs::read_to_string(dir.join(format!("f{n}"))).unwrap();
        assert_eq!(content, format!("{n:08}").repeat(700), "file {n}");
    }
}

fn acknowledged_writes_survive_mount_kill(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[128, 128], "100M") else {
        return;
    };
    let mut so_far = 0;
    for round in 0..3 {
        let mount = TestMount::with_fuse(&cluster, "files", "auto", fuse);
        check_files(&mount.dir, so_far);
        let (count, stop) = (AtomicU64::new(so_far), AtomicBool::new(false));
        let dir = mount.dir.clone();
        std::thread::scope(|scope| {
            scope.spawn(|| write_files(&dir, &count, &stop));
            until("files were written", || {
                count.load(Ordering::Relaxed) > so_far + 100
            });
            mount.kill();
        });
        so_far = count.load(Ordering::Relaxed);
        assert!(so_far > 100 * (round + 1));
    }
    let mount = TestMount::with_fuse(&cluster, "files", "auto", fuse);
    check_files(&mount.dir, so_far);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

fn killed_mount_process_leaves_disconnected_mount(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mut mount = TestMount::with_fuse(&cluster, "files", "auto", fuse);
    let open = File::create(mount.path("open")).unwrap();
    mount.daemon.take().unwrap().kill();
    // The kernel may not have noticed the end of the connection yet.
    until("everything fails as it should", || {
        let written = (&open).write_all(b"x");
        let listed = fs::read_dir(&mount.dir).map(drop);
        let failed = [errno(written), errno(listed)];
        let soon = [Errno::NOTCONN, Errno::CONNABORTED, Errno::CANCELED];
        assert!(
            failed.iter().all(|errno| soon.contains(errno)),
            "{failed:?}"
        );
        failed == [Errno::NOTCONN; 2]
    });
    drop(open);
    cluster.ok(&["umount", mount.dir.to_str().unwrap()]);
    assert_eq!(fs::read_dir(&mount.dir).unwrap().count(), 0);
    mount.remount(&cluster, "files", "auto");
    assert_eq!(fs::read(mount.path("open")).unwrap(), b"");
    mount.stop(&cluster);
}

#[test]
fn mount_clears_dead_mount_and_keeps_stopped_one() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mut mount = TestMount::new(&cluster, "files", "auto");
    let dir = mount.dir.to_str().unwrap().to_owned();
    let open = File::create(mount.path("open")).unwrap();
    mount.daemon.as_ref().unwrap().signal("STOP");
    cluster.refused(&["mount", "files", &dir], &["busy", "umount"]);
    mount.daemon.as_ref().unwrap().signal("CONT");
    mount.daemon.take().unwrap().kill();
    // A process has a file of the dead mount open still.
    mount.remount(&cluster, "files", "auto");
    assert_eq!(fs::read(mount.path("open")).unwrap(), b"");
    drop(open);
    mount.stop(&cluster);
}

#[test]
fn missing_io_uring_falls_back_or_is_refused() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let dir = cluster.dir().join("dir");
    fs::create_dir(&dir).unwrap();
    let dir = dir.to_str().unwrap();
    let Some(off) = support::switch::turn_off() else {
        return skip("needs root and the switch of FUSE over io_uring");
    };
    cluster.refused(
        &["mount", "files", dir, "--fuse", "io-uring"],
        &["cannot mount with io_uring", "--fuse classic"],
    );
    let mount = TestMount::with_fuse(&cluster, "files", "auto", "auto");
    fs::write(mount.path("file"), b"kept").unwrap();
    mount.stop(&cluster);
    drop(off);
}

#[test]
fn mount_continues_if_brick_dies() {
    let Some(mut cluster) = mounted::cluster(&[128, 128], "100M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "auto");
    let (count, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let dir = mount.dir.clone();
    let written = |more: u64| {
        let goal = count.load(Ordering::Relaxed) + more;
        until("files are written", || count.load(Ordering::Relaxed) > goal);
    };
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| write_files(&dir, &count, &stop));
        written(50);
        cluster.kill_brick(0);
        written(50);
        cluster.restart_brick(0);
        until("the copy is back", || {
            cluster.json(&["fs", "show", "files"])["info"]["health"] == "in-sync"
        });
        written(50);
        stop.store(true, Ordering::Relaxed);
        let failed = writing.join().unwrap();
        assert!(failed.is_none(), "{failed:?}");
    });
    check_files(&dir, count.load(Ordering::Relaxed));
    mount.stop(&cluster);
    cluster.check_identical("files");
}

fn forced_mount_fences_first(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mut first = TestMount::with_fuse(&cluster, "files", "auto", fuse);
    fs::write(first.path("file"), b"kept").unwrap();
    let open = File::options()
        .write(true)
        .open(first.path("file"))
        .unwrap();
    let second = TestMount::by_force(&cluster, "files", "mnt2", "auto", fuse);
    assert_eq!(fs::read(second.path("file")).unwrap(), b"kept");
    (&open).write_all(b"lost").expect_err("fenced");
    let mut daemon = first.daemon.take().unwrap();
    assert_eq!(daemon.await_end().code(), Some(support::FENCED));
    assert!(
        daemon.log().contains("another client took over"),
        "{}",
        daemon.log()
    );
    assert_eq!(fs::read(second.path("file")).unwrap(), b"kept");
    second.stop(&cluster);
}

#[test]
fn full_small_pool_is_reported() {
    let Some(cluster) = mounted::cluster(&[24, 24], "64M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "auto");
    let path = mount.path("big");
    let mut file = File::create(&path).unwrap();
    let full = loop {
        if let Err(cause) = file.write_all(&[1; 100_000]) {
            break cause;
        }
    };
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    drop(file);
    let free = || rustix::fs::statvfs(&mount.dir).unwrap().f_bavail * 4096;
    until("it is reported as full", || free() < 4 << 20);
    fs::remove_file(&path).unwrap();
    until("there is room again", || free() > 12 << 20);
    until("it is usable", || {
        fs::write(mount.path("again"), vec![2; 8 << 20]).is_ok()
    });
    mount.stop(&cluster);
}

fn mounts_end_cleanly(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "auto", fuse);
    let dir = mount.dir.to_str().unwrap().to_owned();
    let open = File::create(mount.path("open")).unwrap();
    cluster.refused(&["mount", "files", &dir], &["busy", "umount"]);
    cluster.refused(&["umount", &dir], &["cannot unmount", "--lazy"]);
    cluster.refused(&["fs", "delete", "files"], &["attached"]);
    // Unmounted from its directory, and still there for processes with open files.
    cluster.ok(&["umount", &dir, "--lazy"]);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    (&open).write_all(b"late").unwrap();
    drop(open);
    let mut mount = mount;
    assert!(mount.daemon.take().unwrap().await_end().success());
    drop(mount);

    // A signal cuts off processes with open files.
    let mut mount = TestMount::with_fuse(&cluster, "files", "auto", fuse);
    assert_eq!(fs::read(mount.path("open")).unwrap(), b"late");
    let open = File::create(mount.path("other")).unwrap();
    mount.daemon.as_ref().unwrap().signal("TERM");
    let mut daemon = mount.daemon.take().unwrap();
    assert!(daemon.await_end().success(), "{}", daemon.log());
    (&open).write_all(b"x").expect_err("cut off");
    drop(mount);
    let shown = cluster.json(&["fs", "show", "files"]);
    assert!(shown["info"]["attached"].is_null(), "{shown}");
    cluster.ok(&["fs", "delete", "files"]);
    assert_eq!(cluster.ok(&["fs", "list"]).lines().count(), 1);
}

#[test]
fn invalid_mounts_are_refused() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    cluster.create("blocks", "16M", &[]);
    let dir = cluster.dir().join("empty");
    fs::create_dir(&dir).unwrap();
    let dir = dir.to_str().unwrap();
    let file = cluster.dir().join("file");
    fs::write(&file, b"").unwrap();
    cluster.refused(&["mount", "blocks", dir], &["holds blocks", "export nbd"]);
    cluster.refused(&["mount", "none", dir], &["no volume none"]);
    cluster.refused(&["mount", "files", "/nowhere/at/all"], &["no directory"]);
    let missing = format!("{dir}/missing");
    cluster.refused(&["mount", "files", &missing], &["make the directory"]);
    let file = file.to_str().unwrap();
    cluster.refused(&["mount", "files", file], &["not a directory"]);
    cluster.refused(&["umount", dir], &["no file system of pagemesh"]);
    let socket = cluster.dir().join("s");
    let socket = socket.to_str().unwrap();
    cluster.refused(
        &["export", "nbd", "files", "--socket", socket],
        &["holds files", "pagemesh mount"],
    );
    cluster.refused(&["fs", "show", "blocks"], &["holds blocks"]);
    cluster.refused(&["fs", "delete", "blocks"], &["holds blocks"]);
    cluster.refused(&["fs", "create", "files", "--size", "1M"], &["already"]);
    cluster.refused(&["fs", "create", "huge", "--size", "1T"], &["more than"]);
    cluster.refused(
        &["volume", "grow", "files", "--size", "1G"],
        &["holds files", "pagemesh fs grow"],
    );
    cluster.refused(&["fs", "grow", "blocks", "--size", "1G"], &["holds blocks"]);
    cluster.refused(
        &["fs", "grow", "files", "--size", "20M"],
        &["would not be more"],
    );
    cluster.refused(
        &["fs", "grow", "files", "--size", "1G"],
        &["copy the files"],
    );
    cluster.refused(&["fs", "create", "odd", "--size", "5000"], &["8192"]);
    let listed = cluster.json(&["fs", "list"]);
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(listed[0]["size_bytes"], 50 << 20);
}

/// Damages each occurrence of these bytes in a pool that a brick serves. Returns their number.
fn corrupt_pool(pool: &Path, bytes: &[u8]) -> usize {
    let content = fs::read(pool).unwrap();
    let file = File::options().write(true).open(pool).unwrap();
    let found = content.windows(bytes.len()).enumerate();
    let found: Vec<usize> = found
        .filter(|(_, window)| *window == bytes)
        .map(|(at, _)| at)
        .collect();
    for &at in &found {
        file.write_all_at(&[bytes[0] ^ 1], at as u64).unwrap();
    }
    found.len()
}

#[test]
fn damaged_file_system_is_mounted_read_only() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "auto");
    fs::write(mount.path("early"), b"kept").unwrap();
    // Inodes on another page of the table than the root inode.
    mount.sh("for i in $(seq 40); do echo $i > f$i; done");
    symlink("a place that is found", mount.path("link")).unwrap();
    mount.stop(&cluster);
    for brick in 0..2 {
        assert!(corrupt_pool(cluster.pool(brick), b"a place that is found") > 0);
    }
    let mut mount = TestMount::new(&cluster, "files", "auto");
    assert_eq!(fs::read(mount.path("early")).unwrap(), b"kept");
    assert!(fs::read_dir(&mount.dir).unwrap().count() >= 30);
    let lost = fs::read_link(mount.path("link")).unwrap_err();
    assert_eq!(lost.raw_os_error(), Some(Errno::IO.raw_os_error()));
    for refused in [
        fs::write(mount.path("early"), b"new").err(),
        fs::write(mount.path("new"), b"new").err(),
        fs::remove_file(mount.path("early")).err(),
        fs::create_dir(mount.path("new")).err(),
    ] {
        assert_eq!(refused.unwrap().kind(), ErrorKind::ReadOnlyFilesystem);
    }
    cluster.ok(&["umount", mount.dir.to_str().unwrap()]);
    let mut daemon = mount.daemon.take().unwrap();
    assert!(daemon.await_end().success(), "{}", daemon.log());
    let log = daemon.log();
    for part in [
        "files is mounted read-only",
        "cannot be read",
        "pagemesh fs create",
    ] {
        assert!(log.contains(part), "{part:?} is not in {log}");
    }
    // The copies are damaged alike, and the check reports the damage.
    let checked = cluster.run(&["volume", "check", "files"]);
    let told = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(
        !checked.status.success() && told.contains("damaged"),
        "{told}"
    );
}

#[test]
fn file_system_grows_mounted_and_unmounted() {
    let Some(cluster) = mounted::cluster(&[256, 256], "20M") else {
        return;
    };
    let size = |mount: &TestMount| {
        let told = rustix::fs::statvfs(&mount.dir).unwrap();
        told.f_blocks * told.f_frsize
    };
    let mount = TestMount::new(&cluster, "files", "auto");
    assert_eq!(size(&mount), 20 << 20);
    let full = fs::write(mount.path("big"), vec![1; 30 << 20]).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    let grown = cluster.json(&["fs", "grow", "files", "--size", "40M"]);
    assert_eq!(grown["volume"]["info"]["size_bytes"], 40 << 20);
    until("the mount knows", || size(&mount) == 40 << 20);
    fs::write(mount.path("big"), vec![1; 30 << 20]).unwrap();
    mount.stop(&cluster);
    let told = cluster.ok(&["fs", "grow", "files", "--size", "60M"]);
    assert!(told.contains("next mount"), "{told}");
    let mount = TestMount::new(&cluster, "files", "auto");
    assert_eq!(size(&mount), 60 << 20);
    fs::write(mount.path("more"), vec![2; 20 << 20]).unwrap();
    mount.stop(&cluster);
    cluster.check_identical("files");
}

#[track_caller]
fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Errno {
    Errno::from_raw_os_error(result.unwrap_err().raw_os_error().unwrap())
}

#[test]
fn unusual_requests_get_standard_errors() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "auto");
    // Names.
    let longest = "n".repeat(255);
    fs::write(mount.path(&longest), b"x").unwrap();
    let longer = mount.path(&"n".repeat(256));
    assert_eq!(errno(fs::write(&longer, b"x")), Errno::NAMETOOLONG);
    assert_eq!(errno(fs::create_dir(&longer)), Errno::NAMETOOLONG);
    assert_eq!(
        errno(fs::rename(mount.path(&longest), &longer)),
        Errno::NAMETOOLONG
    );
    assert_eq!(errno(fs::metadata(&longer)), Errno::NAMETOOLONG);
    // A path deeper than a single path name can be.
    let step = "d".repeat(100);
    let directory = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut at = rustix::fs::open(&mount.dir, directory, Mode::empty()).unwrap();
    for _ in 0..60 {
        rustix::fs::mkdirat(&at, &step, Mode::RWXU).unwrap();
        at = rustix::fs::openat(&at, &step, directory, Mode::empty()).unwrap();
    }
    let made = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    let deep = rustix::fs::openat(&at, "file", made, Mode::RWXU).unwrap();
    File::from(deep).write_all(b"deep").unwrap();
    drop(at);
    mount.sh("test $(find . -name file | wc -c) -gt 6000; rm -r dddd*");
    // Links in a circle; a directory moved into itself, also by way of another one.
    symlink("loop", mount.path("loop")).unwrap();
    assert_eq!(errno(fs::read(mount.path("loop"))), Errno::LOOP);
    fs::create_dir_all(mount.path("a/b/c")).unwrap();
    for below in ["a/a", "a/b/a", "a/b/c/a"] {
        assert_eq!(
            errno(fs::rename(mount.path("a"), mount.path(below))),
            Errno::INVAL
        );
    }
    let exchange = |from: &str, to: &str| {
        let (from, to) = (mount.path(from), mount.path(to));
        rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE)
    };
    assert_eq!(exchange("a", "a/b/c"), Err(Errno::INVAL));
    assert_eq!(exchange("a/b/c", "a"), Err(Errno::INVAL));
    assert_eq!(errno(fs::remove_dir(mount.path("a/b"))), Errno::NOTEMPTY);
    let linked = rustix::fs::linkat(CWD, mount.path("a"), CWD, mount.path("h"), AtFlags::empty());
    assert_eq!(linked, Err(Errno::PERM));

    // Offsets.
    let path = mount.path("file");
    fs::write(&path, b"0123456789").unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    for offset in [1 << 44, (1 << 62) + 5, i64::MAX as u64 - 1, i64::MAX as u64] {
        let beyond = [Errno::FBIG, Errno::INVAL];
        assert!(
            beyond.contains(&errno(file.write_at(b"xy", offset))),
            "{offset}"
        );
        assert!(
            beyond.contains(&errno(file.set_len((offset + 1).min(i64::MAX as u64)))),
            "{offset}"
        );
        let mut bytes = [0; 8];
        assert!(
            matches!(file.read_at(&mut bytes, offset), Ok(0) | Err(_)),
            "{offset}"
        );
        let sought = rustix::fs::seek(&file, SeekFrom::Data(offset));
        assert_eq!(sought, Err(Errno::NXIO), "{offset}");
        let sought = rustix::fs::seek(&file, SeekFrom::Hole(offset));
        assert_eq!(sought, Err(Errno::NXIO), "{offset}");
        let reserve = rustix::fs::fallocate(&file, FallocateFlags::empty(), offset, 1);
        assert_eq!(reserve, Err(Errno::FBIG), "{offset}");
    }
    assert_eq!(
        rustix::fs::seek(&file, SeekFrom::Data(10)),
        Err(Errno::NXIO)
    );
    assert_eq!(rustix::fs::seek(&file, SeekFrom::Hole(9)), Ok(10));
    file.write_at(b"x", (1 << 44) - 1).unwrap();
    file.set_len(10).unwrap();

    // A refused call changes nothing.
    for mode in [FallocateFlags::COLLAPSE_RANGE, FallocateFlags::INSERT_RANGE] {
        let refused = rustix::fs::fallocate(&file, mode, 0, 4096);
        assert_eq!(refused, Err(Errno::OPNOTSUPP));
    }
    assert_eq!(fs::read(&path).unwrap(), b"0123456789");
    drop(file);
    mount.stop(&cluster);
}
