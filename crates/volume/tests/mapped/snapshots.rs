//! Snapshots over real pools that are mapped in this process.

use crate::world::{LIMIT, MIB, Manager, MappedCluster, PAGE, slice};
use bytes::Bytes;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::{SliceReply, SliceRequest};
use pagemesh_base::space::{Channel, Reply, Request, Space, Token};
use pagemesh_base::wait::until_readable;
use pagemesh_volume::{Connector, SnapshotSpace};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The births of the first pages of a leg.
fn births(world: &MappedCluster, leg: usize, count: u32) -> Vec<Epoch> {
    let host = &world.hosts.0[leg];
    let link = world
        .hosts
        .connect(host.id, &<_>::default(), slice(leg), Epoch(1 << 20));
    let mut link = link.expect("a session");
    let page = PageNo(0);
    link.submit(1, SliceRequest::Births { page, count });
    let mut done = vec![];
    link.reap(&mut done);
    match done.pop().expect("done at once").result {
        Ok(SliceReply::Births(births)) => births,
        other => panic!("{other:?}"),
    }
}

fn complete(channel: &mut dyn Channel, request: Request) -> Reply {
    channel.submit(Token(1), request);
    let (mut done, end) = (vec![], Instant::now() + LIMIT);
    loop {
        channel.reap(&mut done);
        if let Some(completion) = done.pop() {
            return completion.result.expect("done");
        }
        assert!(Instant::now() < end, "no answer");
        let mut fds = vec![];
        channel.poll_fds(&mut fds);
        let until = channel.deadline().map_or(end, |at| at.min(end));
        until_readable(&fds, Some(until)).expect("waited");
    }
}

#[test]
fn all_legs_get_equal_stamps_under_cuts() {
    const PAGES: u64 = 64;
    const CUTS: u32 = 40;
    let world = MappedCluster::new(&[32 * MIB, 32 * MIB], 4 * MIB);
    let client = world.attach();
    let (volume, mut channel) = (client.volume, client.channel);
    let is_over = AtomicBool::new(false);
    let counted = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut count = 0u64;
            while !is_over.load(Ordering::Relaxed) {
                count += 1;
                let offset = count * 7 % PAGES * PAGE;
                let data = Bytes::from(vec![count as u8; PAGE as usize]);
                let durable = false;
                let write = Request::Write {
                    offset,
                    data,
                    durable,
                };
                assert_eq!(complete(&mut *channel, write), Reply::Done);
            }
            count
        });
        for epoch in 100..100 + CUTS {
            volume.cut_snapshot(Epoch(epoch)).expect("cut");
        }
        is_over.store(true, Ordering::Relaxed);
        writer.join().expect("no panic")
    });
    assert!(counted > 0);
    let write = Request::Write {
        offset: 0,
        data: Bytes::from(vec![1; PAGE as usize]),
        durable: false,
    };
    complete(&mut *channel, write);
    let first = births(&world, 0, PAGES as u32);
    assert_eq!(first, births(&world, 1, PAGES as u32));
    let last = Epoch(99 + CUTS);
    assert!(first.contains(&last), "{:?}", BTreeSet::from_iter(first));
    assert_eq!(volume.status().expect("a status").counters.legs_lost, 0);
}

#[test]
fn snapshot_space_reads_mapped_pools() {
    let world = MappedCluster::new(&[32 * MIB, 32 * MIB], 4 * MIB);
    let mut client = world.attach();
    assert_eq!(client.write(PAGE, 2 * PAGE, 7), Ok(Reply::Done));
    let snapshot = Epoch(100);
    client.volume.cut_snapshot(snapshot).expect("cut");
    let layout = Manager::attached(&world.manager.layout.lock().expect("whole").0);
    let connector = Arc::new(world.hosts.clone());
    let space = SnapshotSpace::new(connector, &layout, snapshot).expect("copies");
    let mut channel = space.open().expect("a channel");
    let read = |offset, len| Request::Read { offset, len };
    let Reply::Data(data) = complete(&mut *channel, read(0, 4 * PAGE as u32)) else {
        panic!("no data");
    };
    let whole = [vec![0; 4096], vec![7; 8192], vec![0; 4096]].concat();
    assert!(data == whole, "the pages of the snapshot");
    let (offset, len) = (0, space.size_bytes());
    let Reply::Extents(extents) = complete(&mut *channel, Request::Extents { offset, len }) else {
        panic!("no extents");
    };
    let extents: Vec<_> = extents.iter().map(|it| (it.len, it.mapped)).collect();
    let rest = len - 3 * PAGE;
    assert_eq!(extents, [(PAGE, false), (2 * PAGE, true), (rest, false)]);
    // The reader fences nobody.
    assert_eq!(client.write(8 * PAGE, PAGE, 8), Ok(Reply::Done));
    assert_eq!(client.status().counters.legs_lost, 0);
}
