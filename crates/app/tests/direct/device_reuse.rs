//! A mount that gets the device number of an unmounted one before the old process has ended.

use super::client_rows::mount_device;
use super::support::mounted::{self, CLASSIC, TestMount};
use super::support::until;
use super::{check, direct_file, new_client, open_file};
use pagemesh_direct::wire::{self, ClientRequest};
use rustix::mount::UnmountFlags;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// The kernel reuses the number as soon as the first mount is gone. The processes of both mounts
/// listen under names that derive from it.
#[test]
fn clients_find_new_mount_while_old_one_ends() {
    let Some(cluster) = mounted::cluster(&[128, 128], "24M") else {
        return;
    };
    cluster.ok(&["fs", "create", "other", "--size", "24M"]);
    let mut first = TestMount::with_fuse(&cluster, "files", "map", CLASSIC);
    let number = std::fs::metadata(&first.dir).unwrap().dev();
    let mut ending = first.daemon.take().unwrap();
    ending.stop_all_threads();
    rustix::mount::unmount(&first.dir, UnmountFlags::empty()).unwrap();
    let place = cluster.dir().join("mnt2");
    let second = std::thread::scope(|scope| {
        let second = scope.spawn(|| TestMount::try_new(&cluster, "other", "mnt2", "map", CLASSIC));
        await_mounted(&place);
        ending.signal("CONT");
        second.join().unwrap().unwrap()
    });
    assert!(ending.await_end().success(), "{}", ending.log());
    let found = std::fs::metadata(&second.dir).unwrap().dev();
    if found != number {
        println!("another test was given the number");
    }
    let file = open_file(&second, "file");
    file.write_all_at(&[7; 8192], 0).unwrap();
    let direct = direct_file(new_client(), &file);
    check(&direct, &file, 0, &[7; 8192]);
    drop((direct, file));
    // The unmount waits for the mount's own process, and not for the other one.
    second.stop(&cluster);
    cluster.check_identical("other");
}

/// A mount that ends does not wait for the addresses of a process that has not ended.
#[test]
fn term_ends_mount_while_previous_one_ends() {
    let Some(cluster) = mounted::cluster(&[128, 128], "24M") else {
        return;
    };
    cluster.ok(&["fs", "create", "other", "--size", "24M"]);
    let mut first = TestMount::with_fuse(&cluster, "files", "map", CLASSIC);
    let ending = first.daemon.take().unwrap();
    ending.stop_all_threads();
    rustix::mount::unmount(&first.dir, UnmountFlags::empty()).unwrap();
    let place = cluster.dir().join("mnt2");
    std::fs::create_dir(&place).unwrap();
    let args = ["mount", "other", place.to_str().unwrap(), "--fuse", CLASSIC];
    let mut second = cluster.try_daemon("mount-mnt2", &args, 0).unwrap();
    await_mounted(&place);
    let told = Instant::now();
    second.signal("TERM");
    assert!(second.await_end().success(), "{}", second.log());
    // Otherwise it would wait 40 s.
    assert!(told.elapsed() < Duration::from_secs(20));
    ending.signal("CONT");
}

fn await_mounted(place: &Path) {
    until("it is mounted", || {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        mounts.contains(&format!(" {} ", place.display()))
    });
}

/// A process without its mount gives no answer: a client that asks means another mount.
#[test]
fn process_without_mount_refuses_clients() {
    let Some(cluster) = mounted::cluster(&[128, 128], "24M") else {
        return;
    };
    let mut mount = TestMount::with_fuse(&cluster, "files", "map", CLASSIC);
    let name = mount_device(&mount);
    let ask = || {
        let socket = wire::new_socket().ok()?;
        rustix::net::connect(&socket, &wire::socket_address(&name).ok()?).ok()?;
        Some(socket)
    };
    let join = |socket: &std::os::fd::OwnedFd| {
        wire::send(socket.as_fd(), &ClientRequest::Join.encode(), None).ok()?;
        wire::receive(socket.as_fd()).ok()?
    };
    assert!(join(&ask().expect("it listens")).is_some());
    let mut ending = mount.daemon.take().unwrap();
    ending.stop_all_threads();
    // The request is queued when the mount goes, and it is the first one handled afterwards.
    let asked = ask().expect("the kernel takes it");
    wire::send(asked.as_fd(), &ClientRequest::Join.encode(), None).unwrap();
    rustix::mount::unmount(&mount.dir, UnmountFlags::empty()).unwrap();
    ending.signal("CONT");
    let answer = wire::receive(asked.as_fd());
    assert!(!matches!(answer, Ok(Some(_))), "it was let in");
    assert!(ending.await_end().success(), "{}", ending.log());
}
