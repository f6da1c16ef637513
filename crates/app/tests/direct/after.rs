//! A mount that has the device number of one whose process has not ended yet.

use super::rows::device;
use super::support::mounted::{self, CLASSIC, Mounted};
use super::support::until;
use super::{check, direct, guest, opened};
use pagemesh_direct::wire::{self, ClientRequest};
use rustix::mount::UnmountFlags;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// The kernel gives the number away as soon as the mount is gone, and processes of both
/// listen under names that follow from it.
#[test]
fn who_mounts_while_another_one_ends_is_found_by_guests() {
    let Some(cluster) = mounted::cluster(&[128, 128], "24M") else {
        return;
    };
    cluster.ok(&["fs", "create", "other", "--size", "24M"]);
    let mut first = Mounted::by(&cluster, "files", "map", CLASSIC);
    let number = std::fs::metadata(&first.dir).unwrap().dev();
    let mut ending = first.daemon.take().unwrap();
    ending.freeze();
    rustix::mount::unmount(&first.dir, UnmountFlags::empty()).unwrap();
    let place = cluster.dir().join("mnt2");
    let second = std::thread::scope(|scope| {
        let second = scope.spawn(|| Mounted::try_new(&cluster, "other", "mnt2", "map", CLASSIC));
        await_mounted(&place);
        ending.signal("CONT");
        second.join().unwrap().unwrap()
    });
    assert!(ending.await_end().success(), "{}", ending.log());
    let found = std::fs::metadata(&second.dir).unwrap().dev();
    if found != number {
        println!("another test was given the number");
    }
    let file = opened(&second, "file");
    file.write_all_at(&[7; 8192], 0).unwrap();
    let direct = direct(guest(), &file);
    check(&direct, &file, 0, &[7; 8192]);
    drop((direct, guest, file));
    // Who unmounts waits for its process, and not for the other one.
    second.stop(&cluster);
    cluster.check_identical("other");
}

/// It does not wait for the addresses of one that does not end.
#[test]
fn who_is_to_end_while_another_one_ends_does_so() {
    let Some(cluster) = mounted::cluster(&[128, 128], "24M") else {
        return;
    };
    cluster.ok(&["fs", "create", "other", "--size", "24M"]);
    let mut first = Mounted::by(&cluster, "files", "map", CLASSIC);
    let ending = first.daemon.take().unwrap();
    ending.freeze();
    rustix::mount::unmount(&first.dir, UnmountFlags::empty()).unwrap();
    let place = cluster.dir().join("mnt2");
    std::fs::create_dir(&place).unwrap();
    let args = ["mount", "other", place.to_str().unwrap(), "--fuse", CLASSIC];
    let mut second = cluster.try_daemon("mount-mnt2", &args, 0).unwrap();
    await_mounted(&place);
    let told = Instant::now();
    second.signal("TERM");
    assert!(second.await_end().success(), "{}", second.log());
    // It would wait 40 s.
    assert!(told.elapsed() < Duration::from_secs(20));
    ending.signal("CONT");
}

fn await_mounted(place: &Path) {
    until("it is mounted", || {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        mounts.contains(&format!(" {} ", place.display()))
    });
}

/// A process that still ends answers nobody: whoever asks means another mount.
#[test]
fn who_has_no_mount_any_more_lets_nobody_in() {
    let Some(cluster) = mounted::cluster(&[128, 128], "24M") else {
        return;
    };
    let mut mount = Mounted::by(&cluster, "files", "map", CLASSIC);
    let name = device(&mount);
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
    ending.freeze();
    // It is in the queue when the mount goes, and answered first of all.
    let asked = ask().expect("the kernel takes it");
    wire::send(asked.as_fd(), &ClientRequest::Join.encode(), None).unwrap();
    rustix::mount::unmount(&mount.dir, UnmountFlags::empty()).unwrap();
    ending.signal("CONT");
    let answer = wire::receive(asked.as_fd());
    assert!(!matches!(answer, Ok(Some(_))), "it was let in");
    assert!(ending.await_end().success(), "{}", ending.log());
}
