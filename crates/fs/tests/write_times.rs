//! A reader may ask for the attributes of a file while an overwrite is in flight, and read the old bytes. The attributes after the
//! overwrite differ from those: otherwise the reader would keep the old bytes for ever.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{Attr, FileId, Fs, Pin};
use support::server::{Server, compared, owner};

const PAGE: usize = 4096;

/// Attributes of a file around an overwrite of its second page.
struct Observed {
    before: Attr,
    /// While the bytes are in flight.
    during: Attr,
    after: Attr,
    /// Changes of the space.
    steps: usize,
}

/// Overwrites a page of a file. `write` ends when the bytes are there.
fn observe(server: &Server, id: FileId, write: impl FnOnce(&Fs, &Bytes) + Send) -> Observed {
    let (fs, data) = (&server.fs, &Bytes::from(vec![9; PAGE]));
    let before = server.fs.attr_of(id).unwrap();
    let steps = server.memory.steps();
    let during = std::thread::scope(|scope| {
        server.memory.while_stalled(|wait_for_request| {
            scope.spawn(move || write(fs, data));
            wait_for_request();
            server.fs.attr_of(id).unwrap()
        })
    });
    Observed {
        before,
        during,
        after: server.fs.attr_of(id).unwrap(),
        steps: server.memory.steps() - steps,
    }
}

/// A file of four pages, pinned.
fn server_with_file() -> (Server, Pin) {
    let mut server = Server::new();
    let pin = server.pin(server.file("file", 0o600));
    server.write(&pin, 0, vec![1; 4 * PAGE]).result.unwrap();
    (server, pin)
}

fn check(seen: &Observed) {
    assert_ne!(compared(&seen.during), compared(&seen.after));
    assert!(seen.during.ctime >= seen.before.ctime);
    assert!(seen.after.mtime > seen.before.mtime);
    assert_eq!(seen.after.mtime, seen.after.ctime);
    assert_eq!(seen.steps, 1, "the page, and no transaction");
}

#[test]
fn attributes_in_a_write_differ_from_those_after_it() {
    for is_stable in [false, true] {
        let (server, pin) = server_with_file();
        let mut wcc = None;
        let seen = observe(&server, pin.id(), |fs, data| {
            let reply = fs.write_at(&pin, PAGE as u64, data, is_stable, &owner());
            reply.result.unwrap();
            wcc = Some(reply.wcc);
        });
        check(&seen);
        let wcc = wcc.unwrap();
        assert_eq!(wcc.before, Some(compared(&seen.before)));
        assert_eq!(wcc.after, Some(seen.after));
    }
}

#[test]
fn attributes_in_a_kernel_write_differ_from_those_after_it() {
    let (server, pin) = server_with_file();
    let seen = observe(&server, pin.id(), |fs, data| {
        let mut channel = fs.open_channel().unwrap();
        let written = fs.write(&mut channel, pin.id().ino, Some(PAGE as u64), data, false);
        assert_eq!(written.unwrap(), PAGE as u64..2 * PAGE as u64);
    });
    check(&seen);
}

#[test]
fn attributes_in_a_queued_write_differ_from_those_after_it() {
    let (server, pin) = server_with_file();
    let seen = observe(&server, pin.id(), |fs, data| {
        let mut queue = fs.write_queue().unwrap();
        let begun = fs.begin_write(&mut queue, 5, pin.id().ino, PAGE as u64, data, false);
        assert!(begun.unwrap());
        let mut ended = Vec::new();
        while !queue.is_empty() {
            queue.reap(|id, result| ended.push((id, result)));
        }
        assert_eq!(ended, [(5, Ok(PAGE))]);
        // The answer to the program follows: the attributes are new before it.
    });
    check(&seen);
}

/// Both overwrites are in flight at once. The attributes change with the end of each.
#[test]
fn two_writes_at_once_change_attributes_twice() {
    let (server, pin) = server_with_file();
    let fs = &server.fs;
    let replies = std::thread::scope(|scope| {
        let write = |page: usize| {
            let pin = &pin;
            scope.spawn(move || {
                let data = Bytes::from(vec![9; PAGE]);
                fs.write_at(pin, (page * PAGE) as u64, &data, false, &owner())
            })
        };
        let writes: Vec<_> = (0..4).map(write).collect();
        writes
            .into_iter()
            .map(|write| write.join().unwrap())
            .collect::<Vec<_>>()
    });
    let mut around: Vec<_> = replies
        .into_iter()
        .map(|reply| {
            (
                reply.wcc.before.unwrap(),
                compared(&reply.wcc.after.unwrap()),
            )
        })
        .collect();
    around.sort_by_key(|(_, after)| after.ctime);
    for pair in around.windows(2) {
        // Each one's attributes before are those after another one: nothing is hidden between.
        assert_eq!(pair[0].1, pair[1].0);
    }
    let last = fs.attr_of(pin.id()).unwrap();
    assert_eq!(around.last().unwrap().1, compared(&last));
}
