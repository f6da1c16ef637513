//! File systems of a real cluster, mounted through the kernel, and programs that
//! people have on them. For root with /dev/fuse.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use support::mounted::{self, Mounted};
use support::until;

#[test]
fn programs_find_what_they_put_there() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    for transport in ["map", "tcp"] {
        let mount = Mounted::new(&cluster, "files", transport);
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
        // Everything is there for whoever mounts next.
        let mount = Mounted::new(&cluster, "files", transport);
        mount
            .sh("diff -r -x fifo src out/src; cd clone; git fsck --strict; git status --porcelain");
        mount.sh("rm -rf src copy out repo clone all.tar s2");
        mount.stop(&cluster);
    }
    cluster.check_identical("files");
}

#[test]
fn sqlite_keeps_its_promises_on_a_mount() {
    let Some(cluster) = mounted::cluster(&[128, 128], "100M") else {
        return;
    };
    let mount = Mounted::new(&cluster, "files", "auto");
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

/// Files that are there at once; older ones are deleted.
const FILES: u64 = 500;

/// Writes files until told to stop; each that is counted was acknowledged. None:
/// it was stopped, otherwise why a call failed.
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

/// The last files that were counted are there. The oldest may be deleted already.
fn check_files(dir: &Path, count: u64) {
    for n in (count + 1).saturating_sub(FILES)..count {
        let content = fs::read_to_string(dir.join(format!("f{n}"))).unwrap();
        assert_eq!(content, format!("{n:08}").repeat(700), "file {n}");
    }
}

#[test]
fn what_was_acknowledged_outlives_the_mounting_process() {
    let Some(cluster) = mounted::cluster(&[128, 128], "100M") else {
        return;
    };
    let mut so_far = 0;
    for round in 0..3 {
        let mount = Mounted::new(&cluster, "files", "auto");
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
    let mount = Mounted::new(&cluster, "files", "auto");
    check_files(&mount.dir, so_far);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

#[test]
fn a_brick_dies_and_the_mount_goes_on() {
    let Some(mut cluster) = mounted::cluster(&[128, 128], "100M") else {
        return;
    };
    let mount = Mounted::new(&cluster, "files", "auto");
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

#[test]
fn a_second_mount_fences_the_first() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mut first = Mounted::new(&cluster, "files", "auto");
    fs::write(first.path("file"), b"kept").unwrap();
    let open = File::options()
        .write(true)
        .open(first.path("file"))
        .unwrap();
    let second = Mounted::try_new(&cluster, "files", "mnt2", "auto").unwrap();
    assert_eq!(fs::read(second.path("file")).unwrap(), b"kept");
    (&open).write_all(b"lost").expect_err("fenced");
    let mut daemon = first.daemon.take().unwrap();
    assert_eq!(daemon.await_end().code(), Some(1));
    assert!(
        daemon.log().contains("another client took over"),
        "{}",
        daemon.log()
    );
    assert_eq!(fs::read(second.path("file")).unwrap(), b"kept");
    second.stop(&cluster);
}

#[test]
fn a_small_pool_fills_and_is_told_of() {
    let Some(cluster) = mounted::cluster(&[24, 24], "64M") else {
        return;
    };
    let mount = Mounted::new(&cluster, "files", "auto");
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
    until("it is told to be full", || free() < 4 << 20);
    fs::remove_file(&path).unwrap();
    until("there is room again", || free() > 12 << 20);
    until("it is usable", || {
        fs::write(mount.path("again"), vec![2; 8 << 20]).is_ok()
    });
    mount.stop(&cluster);
}

#[test]
fn mounts_end_as_they_should() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mount = Mounted::new(&cluster, "files", "auto");
    let dir = mount.dir.to_str().unwrap().to_owned();
    let open = File::create(mount.path("open")).unwrap();
    cluster.refused(&["mount", "files", &dir], &["busy", "umount"]);
    cluster.refused(&["umount", &dir], &["cannot unmount", "--lazy"]);
    cluster.refused(&["fs", "delete", "files"], &["attached"]);
    // Away from its place, and there for whoever has it open.
    cluster.ok(&["umount", &dir, "--lazy"]);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    (&open).write_all(b"late").unwrap();
    drop(open);
    let mut mount = mount;
    assert!(mount.daemon.take().unwrap().await_end().success());
    drop(mount);

    // A signal cuts off who has files open.
    let mut mount = Mounted::new(&cluster, "files", "auto");
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
fn what_cannot_be_mounted_is_refused() {
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
        &["holds files"],
    );
    cluster.refused(&["fs", "create", "odd", "--size", "5000"], &["8192"]);
    let listed = cluster.json(&["fs", "list"]);
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(listed[0]["size_bytes"], 50 << 20);
}
