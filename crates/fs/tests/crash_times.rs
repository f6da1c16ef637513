//! A crash that keeps the bytes of an overwrite leaves times no earlier than the reported ones, if the file system keeps write times.
//! Otherwise a client of NFS with bytes from before the overwrite would find the attributes of these bytes, and keep them.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{Attr, FileId, Pin, SetAttributes, SetTime, Time, WccAttr};
use support::memory::MemorySpace;
use support::mount_with_leftovers;
use support::server::{NOTHING, Server, compared, mode, owner};

const PAGE: usize = 4096;
/// Readings of the test clock in the time that is stored ahead.
const GRANTED_TICKS: usize = 2000;

/// A file of four pages, pinned; its times are stored.
fn server_with_file() -> (Server, Pin) {
    let mut server = Server::new();
    let pin = server.pin(server.file("file", 0o600));
    server.write(&pin, 0, vec![1; 4 * PAGE]).result.unwrap();
    server.fs.flush_all_times().unwrap();
    (server, pin)
}

fn server_that_keeps_times() -> (Server, Pin) {
    let (server, pin) = server_with_file();
    server.fs.keep_write_times();
    (server, pin)
}

fn pass_ticks(ticks: usize) {
    for _ in 0..ticks {
        support::clock();
    }
}

fn page() -> Bytes {
    Bytes::from(vec![9; PAGE])
}

/// Overwrites a page. Returns the attributes that the caller gets, and the changes of the space.
fn overwrite(server: &Server, pin: &Pin, is_stable: bool) -> (Attr, usize) {
    let steps = server.memory.steps();
    let reply = server.fs.write_at(pin, 0, &page(), is_stable, &owner());
    reply.result.unwrap();
    (reply.wcc.after.unwrap(), server.memory.steps() - steps)
}

/// The attributes of a file that a mount of this image reports.
fn attr_after_crash(image: &MemorySpace, id: FileId) -> Attr {
    let (fs, _) = mount_with_leftovers(image);
    fs.attr_of(id).unwrap()
}

#[track_caller]
fn check_crash(server: &Server, id: FileId, reported: &Attr) {
    let image = server.memory.snapshot();
    let found = attr_after_crash(&image, id);
    assert!(found.ctime >= reported.ctime && found.mtime >= reported.mtime);
    assert_eq!(compared(&attr_after_crash(&image, id)), compared(&found));
}

#[test]
fn overwrite_has_a_later_time_after_a_crash() {
    for is_stable in [false, true] {
        let (server, pin) = server_that_keeps_times();
        let before = server.fs.attr_of(pin.id()).unwrap();
        let (reported, _) = overwrite(&server, &pin, is_stable);
        assert!(reported.ctime > before.ctime);
        check_crash(&server, pin.id(), &reported);
        // The running server reports the real times.
        let now = server.fs.attr_of(pin.id()).unwrap();
        assert_eq!(compared(&now), compared(&reported));
    }
}

#[test]
fn kernel_overwrite_has_a_later_time_after_a_crash() {
    let (server, pin) = server_that_keeps_times();
    let (fs, ino) = (&server.fs, pin.id().ino);
    let mut channel = fs.open_channel().unwrap();
    fs.write(&mut channel, ino, Some(0), &page(), false)
        .unwrap();
    check_crash(&server, pin.id(), &fs.attr(ino).unwrap());
}

/// Queues an overwrite. Returns whether the queue took it, and the changes of the space.
fn queue_overwrite(server: &Server, pin: &Pin, ticks_within: usize) -> (bool, usize) {
    let steps = server.memory.steps();
    let mut queue = server.fs.write_queue().unwrap();
    let begun = server
        .fs
        .begin_write(&mut queue, 1, pin.id().ino, 0, &page(), false);
    pass_ticks(ticks_within);
    let mut ended = 0;
    while !queue.is_empty() {
        queue.reap(|_, result| {
            result.unwrap();
            ended += 1;
        });
    }
    let begun = begun.unwrap();
    assert_eq!(ended, usize::from(begun));
    (begun, server.memory.steps() - steps)
}

#[test]
fn queued_overwrite_needs_a_time_stored_ahead() {
    let (server, pin) = server_that_keeps_times();
    assert_eq!(queue_overwrite(&server, &pin, 0), (false, 0));
    overwrite(&server, &pin, false);
    assert_eq!(queue_overwrite(&server, &pin, 0), (true, 1));
    check_crash(&server, pin.id(), &server.fs.attr_of(pin.id()).unwrap());
    // The time passes while the write is in flight.
    assert_eq!(queue_overwrite(&server, &pin, GRANTED_TICKS), (true, 2));
    check_crash(&server, pin.id(), &server.fs.attr_of(pin.id()).unwrap());
}

#[test]
fn overwrites_share_one_transaction_between_flushes() {
    let (server, pin) = server_that_keeps_times();
    for _ in 0..2 {
        let steps = (0..10).map(|_| overwrite(&server, &pin, true).1);
        let expected: Vec<usize> = [2].into_iter().chain([1; 9]).collect();
        assert_eq!(steps.collect::<Vec<_>>(), expected);
        server.fs.flush_all_times().unwrap();
    }
    // Without a flush, the stored time passes.
    overwrite(&server, &pin, true);
    pass_ticks(GRANTED_TICKS);
    let (reported, steps) = overwrite(&server, &pin, true);
    assert_eq!(steps, 2);
    check_crash(&server, pin.id(), &reported);
}

#[test]
fn overwrites_need_no_transaction_if_times_are_not_kept() {
    let (server, pin) = server_with_file();
    assert_eq!(overwrite(&server, &pin, true).1, 1);
    assert_eq!(queue_overwrite(&server, &pin, 0), (true, 1));
}

/// Without a sync, its bytes may be lost as well.
#[test]
fn unstable_overwrite_in_a_write_cache_stores_no_time() {
    let (server, pin) = server_with_file();
    let memory = server.memory.snapshot().with_write_cache();
    let (fs, channel) = mount_with_leftovers(&memory);
    let server = Server {
        fs: fs.into(),
        memory,
        channel,
    };
    let pin = server.pin(pin.id());
    server.fs.keep_write_times();
    assert_eq!(overwrite(&server, &pin, false).1, 1);
    let (reported, steps) = overwrite(&server, &pin, true);
    assert_eq!(steps, 2);
    check_crash(&server, pin.id(), &reported);
}

#[test]
fn flush_of_times_stores_the_real_ones() {
    let (server, pin) = server_that_keeps_times();
    let (reported, _) = overwrite(&server, &pin, true);
    server.fs.flush_all_times().unwrap();
    let found = attr_after_crash(&server.memory.snapshot(), pin.id());
    assert_eq!(compared(&found), compared(&reported));
}

#[test]
fn failed_flush_of_times_changes_no_reported_time() {
    let (server, pin) = server_that_keeps_times();
    let (reported, _) = overwrite(&server, &pin, true);
    server.memory.set_room(Some(0));
    server.fs.flush_all_times().unwrap_err();
    let now = || compared(&server.fs.attr_of(pin.id()).unwrap());
    assert_eq!(now(), compared(&reported));
    server.memory.set_room(None);
    check_crash(&server, pin.id(), &reported);
    server.fs.flush_all_times().unwrap();
    assert_eq!(now(), compared(&reported));
    let found = attr_after_crash(&server.memory.snapshot(), pin.id());
    assert_eq!(compared(&found), compared(&reported));
}

#[test]
fn changes_after_a_crash_have_later_times_than_it_left() {
    let (server, pin) = server_that_keeps_times();
    overwrite(&server, &pin, true);
    let image = server.memory.snapshot();
    let (fs, channel) = mount_with_leftovers(&image);
    let server = Server {
        fs: fs.into(),
        memory: image,
        channel,
    };
    server.fs.keep_write_times();
    let mut last = server.fs.attr_of(pin.id()).unwrap();
    let pin = server.pin(pin.id());
    for _ in 0..3 {
        let (reported, _) = overwrite(&server, &pin, true);
        assert!(reported.ctime > last.ctime);
        check_crash(&server, pin.id(), &reported);
        last = reported;
    }
}

/// Crashes after each change of the space: no time is earlier than the last reported one.
#[test]
fn any_crash_leaves_no_earlier_time_than_reported() {
    let (server, pin) = server_that_keeps_times();
    let set = |change: SetAttributes| {
        let reply = server.fs.set_attributes(pin.id(), &change, None, &owner());
        reply.result.unwrap();
    };
    let past = Time { sec: 77, nsec: 7 };
    let mtime = SetAttributes {
        mtime: Some(SetTime::At(past)),
        ..NOTHING
    };
    let mut reported: Vec<(usize, WccAttr)> = Vec::new();
    for turn in 0..40 {
        match turn % 8 {
            2 => server.fs.flush_all_times().unwrap(),
            4 => set(mode(0o640)),
            7 => set(mtime),
            _ => drop(overwrite(&server, &pin, true)),
        }
        let now = server.fs.attr_of(pin.id()).unwrap();
        reported.push((server.memory.steps(), compared(&now)));
    }
    for pair in reported.windows(2) {
        let ((first, before), (next, after)) = (pair[0], pair[1]);
        for steps in first..next {
            let image = server.memory.after_steps(steps);
            let found = compared(&attr_after_crash(&image, pin.id()));
            assert!(found.ctime >= before.ctime, "after {steps} changes");
            let is_set = found.mtime == past && after.mtime == past;
            assert!(found.mtime >= before.mtime || is_set);
            if steps == first && before.mtime == past {
                assert_eq!(found.mtime, past, "a user has set it");
            }
        }
    }
}

/// A flush of times may come between the end of an overwrite and its reply.
#[test]
fn times_of_concurrent_overwrites_are_kept() {
    const WRITERS: usize = 3;
    const WRITES: usize = 40;
    let (server, pin) = server_that_keeps_times();
    let (fs, memory, pin) = (&server.fs, &server.memory, &pin);
    let write = |_| {
        let reply = fs.write_at(pin, 0, &page(), true, &owner());
        reply.result.unwrap();
        (memory.steps(), reply.wcc.after.unwrap())
    };
    let reported: Vec<(usize, Attr)> = std::thread::scope(|scope| {
        let writer = |_| scope.spawn(move || (0..WRITES).map(write).collect::<Vec<_>>());
        let writers: Vec<_> = (0..WRITERS).map(writer).collect();
        while writers.iter().any(|writer| !writer.is_finished()) {
            fs.flush_all_times().unwrap();
        }
        let ended = writers.into_iter();
        ended.flat_map(|writer| writer.join().unwrap()).collect()
    });
    for (steps, attr) in reported {
        let image = memory.after_steps(steps);
        let found = attr_after_crash(&image, pin.id());
        assert!(found.ctime >= attr.ctime && found.mtime >= attr.mtime);
    }
}
