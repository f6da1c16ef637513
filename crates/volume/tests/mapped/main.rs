//! Volumes over pools that are mapped in this process. Fused writes to several legs obey the
//! same rules as separate ones.

mod local_socket;
mod snapshot_reads;
mod snapshots;
mod tier;
mod world;

use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{Leg, SliceError, SliceRequest, Stamp, TransactionPart};
use pagemesh_base::space::{Reply, Request, Space, SpaceError, Token};
use pagemesh_brick::brick::Brick;
use pagemesh_brick::file;
use pagemesh_pmem::Durability;
use pagemesh_store::pool::Pool;
use pagemesh_store::session::Session;
use pagemesh_volume::{MappedLeg, VolumeState};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use world::{BrickHost, Client, MIB, MappedCluster, OwnerConnection, PAGE, slice, wait_for};

/// If the owner is stalled, several requests do not wait for it one after the other.
#[test]
fn leg_with_stalled_owner_stays_lost() {
    let house = BrickHost::new(0, 32 * MIB, 8 * MIB);
    house.stop();
    let path = house.directory.path().join("pool");
    let (media, _claim) = wait_for(|| "the pool is free".into(), || file::open(&path).ok());
    let (media, durability) = (Arc::new(media), Durability::Process);
    let (pool, _) = Pool::open(Arc::clone(&media), media).expect("it is whole");
    // No maintenance loop runs; this test maintains the brick.
    let brick = Arc::new(Brick::new(pool, durability));
    let (object, _) = brick.attach(slice(0), Epoch(1)).expect("attached");
    let handle = brick.mapping().handle(object, slice(0)).expect("a handle");
    let number = brick.open_session(1, 1).expect("a session");
    let session = Session::new(brick.mapping().clone(), number).with_owner_wait(Duration::ZERO);
    let (ours, _theirs) = UnixStream::pair().expect("a pair");
    let owner = OwnerConnection {
        brick: Arc::clone(&brick),
        slice: slice(0),
        session: number,
        done: vec![],
        lifeline: ours.try_clone().expect("a descriptor").into(),
    };
    let leg = MappedLeg::new(session, handle, Epoch(1), Box::new(owner), ours.into());
    let mut leg = leg.expect("a watcher");
    let mut write = |op: u64| {
        let stamp = Stamp {
            epoch: Epoch(1),
            op,
            open_ops: 0,
        };
        let data = Bytes::from(vec![1; MIB as usize]);
        let offset = op % 8 * MIB;
        leg.submit(
            op,
            SliceRequest::Write {
                offset,
                data,
                stamp,
            },
        );
        let mut done = vec![];
        leg.reap(&mut done);
        done.pop().expect("it is done at once").result
    };
    let first = (1..1000).find(|&op| write(op).is_err());
    let first = first.expect("what it was granted ends");
    // The owner goes on, and grants the request.
    while brick.maintain() {}
    let answer = write(first + 1);
    assert!(matches!(answer, Err(SliceError::Lost(_))), "{answer:?}");
}

/// Writes have every length and alignment, over two and three legs, and beyond one record.
#[test]
fn legs_written_together_are_equal() {
    for legs in [2, 3] {
        let world = MappedCluster::new(&vec![32 * MIB; legs], 8 * MIB);
        let mut client = world.attach();
        let places = [
            (0, PAGE),
            (512, 512),
            (PAGE + 512, 3 * PAGE),
            (2 * MIB - PAGE, 2 * PAGE),
            (3 * MIB, 2 * MIB),
            (6 * MIB - 512, MIB + 1024),
        ];
        for (round, value) in (1..=3).enumerate() {
            for (offset, len) in places {
                assert_eq!(client.write(offset, len, value), Ok(Reply::Done));
            }
            let (offset, len) = (3 * MIB + 512 * round as u64, MIB);
            assert_eq!(
                client.complete(Request::Discard { offset, len }),
                Ok(Reply::Done)
            );
            client.assert_holds(offset, len, 0);
            client.assert_holds(6 * MIB - 512, MIB + 1024, value);
            client.assert_legs_equal();
        }
        assert_eq!(client.status().counters.legs_lost, 0);
    }
}

/// A fused write has the stamps of separate writes. Every leg lists the last writes of a
/// client that is gone, with the same epoch and number.
#[test]
fn all_legs_list_last_writes_of_dead_client() {
    let world = MappedCluster::new(&[16 * MIB, 16 * MIB, 16 * MIB], MIB);
    let mut client = world.attach();
    let epoch = client.status().epoch;
    for page in 0..5 {
        assert_eq!(client.write(page * PAGE, PAGE, 9), Ok(Reply::Done));
    }
    drop(client);
    let first = world.in_flight(0);
    let last = first
        .iter()
        .any(|&(page, count, at, _)| (page, count, at) == (4, 1, epoch));
    assert!(last, "{first:?}");
    // Completed operations are not listed.
    assert!(!first.iter().any(|(page, ..)| *page == 0), "{first:?}");
    assert_eq!(world.in_flight(1), first);
    assert_eq!(world.in_flight(2), first);
    // Recovery clears the tables.
    let client = world.attach();
    client.assert_legs_equal();
    assert_eq!(world.in_flight(0), []);
}

/// The pool of the leg in the middle fills up within a write. The others have all of the write,
/// and the client gets no error.
#[test]
fn leg_filled_by_a_write_becomes_stale() {
    for full in [0, 1] {
        let mut pools = [32 * MIB; 3];
        pools[full] = 4 * MIB;
        let world = MappedCluster::new(&pools, 8 * MIB);
        let mut client = world.attach();
        for piece in 0..8 {
            assert_eq!(client.write(piece * MIB, MIB, 3), Ok(Reply::Done));
        }
        client.wait_until_stale(full);
        client.assert_holds(0, 8 * MIB, 3);
        client.assert_legs_equal();
        // Once there is space again, the leg returns.
        let all = Request::Discard {
            offset: 0,
            len: 8 * MIB,
        };
        assert_eq!(client.complete(all), Ok(Reply::Done));
        assert_eq!(client.write(0, MIB, 4), Ok(Reply::Done));
        client.wait_for_state(VolumeState::Healthy);
        client.assert_legs_equal();
        client.assert_holds(0, MIB, 4);
    }
}

/// All pools are full: the client gets an error, and the legs stay equal.
#[test]
fn full_pools_refuse_writes_and_stay_equal() {
    let world = MappedCluster::new(&[4 * MIB, 4 * MIB], 8 * MIB);
    let mut client = world.attach();
    let mut refused = 0;
    for piece in 0..32 {
        // The range has parts of pages at both ends.
        let (offset, len) = (piece * MIB / 4 + 512, MIB / 4 - 1024);
        match client.write(offset, len, 5) {
            Ok(_) => {}
            Err(SpaceError::NoSpace(_)) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused > 0);
    client.assert_legs_equal();
    let all = Request::Discard {
        offset: 0,
        len: 8 * MIB,
    };
    assert_eq!(client.complete(all), Ok(Reply::Done));
    client.wait_for_state(VolumeState::Healthy);
    assert_eq!(client.write(0, MIB, 6), Ok(Reply::Done));
    client.assert_legs_equal();
}

#[test]
fn restarted_brick_is_resynced() {
    for gone in 0..2 {
        let world = MappedCluster::new(&[32 * MIB, 32 * MIB], 4 * MIB);
        let mut client = world.attach();
        assert_eq!(client.write(0, 2 * MIB, 1), Ok(Reply::Done));
        // The last write of a session is in the in-flight tables.
        assert_eq!(client.write(3 * MIB, PAGE, 1), Ok(Reply::Done));
        world.hosts.0[gone].stop();
        assert_eq!(client.write(MIB / 2, MIB, 2), Ok(Reply::Done));
        let trim = Request::Discard {
            offset: 0,
            len: PAGE,
        };
        assert_eq!(client.complete(trim), Ok(Reply::Done));
        client.wait_until_stale(gone);
        world.hosts.0[gone].start();
        client.wait_for_state(VolumeState::Healthy);
        client.assert_legs_equal();
        client.assert_holds(0, PAGE, 0);
        client.assert_holds(MIB / 2, MIB, 2);
        let moved = client.status().counters.bytes_resynced;
        // Writes in flight at the loss are copied twice, later ones once.
        let most = 2 * MIB + 8 * PAGE;
        assert!((MIB..most).contains(&moved), "moved {moved}");
    }
}

/// A channel is not reaped while its thread waits for something else. Its brick comes back
/// nevertheless, which needs a pool that no client maps.
#[test]
fn unreaped_channel_releases_pool() {
    for copies in 1..=2 {
        let world = MappedCluster::new(&[32 * MIB; 2][..copies], 4 * MIB);
        let mut client = world.attach();
        let mut other = client.volume.open().expect("a channel");
        assert_eq!(client.write(0, MIB, 1), Ok(Reply::Done));
        let read = Request::Read {
            offset: 0,
            len: PAGE as u32,
        };
        // Both channels are in use, and one has a request in flight when the brick ends.
        other.submit(Token(1), read.clone());
        wait_for(
            || "the other channel is served".into(),
            || {
                let mut done = vec![];
                other.reap(&mut done);
                done.pop()
            },
        );
        world.hosts.0[0].stop();
        other.submit(Token(2), read);
        world.hosts.0[0].start();
        client.wait_for_state(VolumeState::Healthy);
        client.assert_holds(0, PAGE, 1);
        let mut done = vec![];
        wait_for(
            || "the request in flight ends".into(),
            || {
                other.reap(&mut done);
                done.pop()
            },
        );
    }
}

/// The old client's fused writes are refused by every leg.
#[test]
fn superseded_client_writes_no_leg() {
    let world = MappedCluster::new(&[64 * MIB, 64 * MIB], MIB);
    let mut old = world.attach();
    assert_eq!(old.write(0, PAGE, 1), Ok(Reply::Done));
    let mut new = world.attach();
    assert_eq!(new.write(0, PAGE, 2), Ok(Reply::Done));
    assert_eq!(old.write(0, PAGE, 3), Err(SpaceError::Fenced));
    new.assert_holds(0, PAGE, 2);
    new.assert_legs_equal();
}

fn transact(pages: &[u64], value: u8) -> Request {
    let part = |page: &u64| TransactionPart::Write {
        offset: page * PAGE,
        data: Bytes::from(vec![value; PAGE as usize]),
    };
    let parts = pages.iter().map(part).collect();
    let durable = false;
    Request::Transact { parts, durable }
}

#[test]
fn mapped_transaction_is_one_operation_per_leg() {
    let world = MappedCluster::new(&[32 * MIB, 32 * MIB, 32 * MIB], 8 * MIB);
    let mut client = world.attach();
    // The pages lie in three leaves, in no order.
    let pages = [1500, 3, 700, 4];
    assert_eq!(client.complete(transact(&pages, 7)), Ok(Reply::Done));
    for page in pages {
        client.assert_holds(page * PAGE, PAGE, 7);
    }
    client.assert_holds(5 * PAGE, PAGE, 0);
    drop(client);
    world.attach().assert_legs_equal();
}

#[test]
fn full_mapped_leg_applies_no_part_of_transaction() {
    let world = MappedCluster::new(&[32 * MIB, 16 * MIB], 24 * MIB);
    let mut client = world.attach();
    let mut at = 0;
    while client.status().state == VolumeState::Healthy {
        let pages: Vec<u64> = (0..60).map(|page| at + page + page / 30).collect();
        assert_eq!(client.complete(transact(&pages, 9)), Ok(Reply::Done));
        pages
            .iter()
            .for_each(|page| client.assert_holds(page * PAGE, PAGE, 9));
        at += 61;
    }
    client.wait_for_state(VolumeState::Degraded);
}

/// A process that ends detaches its volumes, even if another thread holds a reference for a
/// short time, and if the manager is not reached at once.
#[test]
fn volume_detaches_while_shared() {
    let world = MappedCluster::new(&[8 << 20], 1 << 20);
    let Client {
        volume, channel, ..
    } = world.attach();
    drop(channel);
    let volume = Arc::new(volume);
    let held = Arc::clone(&volume);
    volume.detach();
    assert_eq!(world.manager.detached.load(Ordering::SeqCst), 2);
    assert!(held.check(None, &mut |_, _| {}).is_err());
    drop((volume, held));
    assert_eq!(world.manager.detached.load(Ordering::SeqCst), 2);
}
