//! Bricks fail in every way while slices are created and deleted. No slice without a volume
//! remains.

use crate::cluster;
use cluster::{
    BrickBehavior, Cluster, MIB, brick_id, create_request, legs, name, slices_of_volumes,
};
use pagemesh_manage::fault::Fault;
use pagemesh_manage::wire::{AttachVolume, ErrorCode, GrowVolume};
use pagemesh_manage::{LayoutKind, Manager};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

const BEHAVIORS: [BrickBehavior; 7] = [
    BrickBehavior::Unreachable,
    BrickBehavior::Replaced,
    BrickBehavior::Full,
    BrickBehavior::LosesAnswers,
    BrickBehavior::DelaysRequests,
    BrickBehavior::FailsAfterCreate,
    BrickBehavior::RefusesDelete,
];

fn striped_request(text: &str) -> pagemesh_manage::wire::CreateVolume {
    pagemesh_manage::wire::CreateVolume {
        columns: Some(4),
        ..create_request(text, LayoutKind::StripeMirror, 4 * MIB)
    }
}

/// A failed create leaves no slice, for every behavior of one brick, also if the manager crashes
/// right after it.
#[test]
fn failed_create_leaves_no_slices() {
    for mood in BEHAVIORS {
        for crash in [false, true] {
            let cluster = Cluster::new(3);
            let manager = cluster.manager_with_bricks_alive();
            manager.create(&striped_request("old")).expect("a volume");
            cluster.fakes[1].set(mood);
            let made = manager.create(&striped_request("new"));
            assert_eq!(
                made.is_ok(),
                mood == BrickBehavior::RefusesDelete,
                "{mood:?}: {made:?}"
            );
            let manager = if crash { cluster.crash_copy() } else { manager };
            cluster.sweep_until_certain(&manager);
            cluster.reset_bricks();
            cluster.fakes[1].deliver_delayed();
            cluster.sweep_until_certain(&manager);
            cluster.assert_no_orphans(&manager);
            let left = manager.volumes().len();
            assert_eq!(
                left,
                1 + usize::from(mood == BrickBehavior::RefusesDelete),
                "{mood:?}"
            );
            manager.create(&striped_request("next")).expect("a volume");
        }
    }
}

#[test]
fn failed_grow_leaves_volume_unchanged() {
    for mood in BEHAVIORS {
        let cluster = Cluster::new(3);
        let manager = cluster.manager_with_bricks_alive();
        manager.create(&striped_request("v")).expect("a volume");
        let before = manager.show(&name("v")).expect("the volume");
        cluster.fakes[2].set(mood);
        let size_bytes = 8 * MIB;
        let grown = manager.grow(&name("v"), GrowVolume { size_bytes });
        assert_eq!(
            grown.is_ok(),
            mood == BrickBehavior::RefusesDelete,
            "{mood:?}: {grown:?}"
        );
        cluster.reset_bricks();
        cluster.fakes[2].deliver_delayed();
        cluster.sweep_until_certain(&manager);
        if mood != BrickBehavior::RefusesDelete {
            assert_eq!(manager.show(&name("v")).expect("the volume"), before);
        }
        cluster.assert_no_orphans(&manager);
        let grown = manager.grow(
            &name("v"),
            GrowVolume {
                size_bytes: 16 * MIB,
            },
        );
        assert_eq!(grown.expect("grown").volume.info.size_bytes, 16 * MIB);
        cluster.assert_no_orphans(&manager);
    }
}

#[test]
fn failed_slice_delete_is_retried_later() {
    for mood in BEHAVIORS {
        for crash in [false, true] {
            let cluster = Cluster::new(3);
            let manager = cluster.manager_with_bricks_alive();
            manager.create(&striped_request("v")).expect("a volume");
            manager.create(&striped_request("w")).expect("a volume");
            cluster.fakes[0].set(mood);
            let deleted = manager.delete(&name("v"), false).expect("deleted");
            let fails = !matches!(mood, BrickBehavior::Full | BrickBehavior::FailsAfterCreate);
            assert_eq!(deleted.pending_deletions > 0, fails, "{mood:?}");
            let manager = if crash { cluster.crash_copy() } else { manager };
            cluster.reset_bricks();
            cluster.sweep_until_certain(&manager);
            cluster.assert_no_orphans(&manager);
            assert_eq!(manager.volumes().len(), 1);
        }
    }
}

/// A brick dies after any number of slices, and a manager crashes at any of its calls to bricks.
/// Each image of the store at such a point leads back to a cluster without orphans.
#[test]
fn manager_crash_at_any_brick_call_leaves_no_orphan() {
    for strength in 0..3 {
        let cluster = Arc::new(Cluster::new(3));
        let manager = cluster.manager_with_bricks_alive();
        manager.create(&striped_request("old")).expect("a volume");
        let images: Arc<Mutex<Vec<_>>> = Arc::default();
        for fake in &cluster.fakes {
            let (images, within) = (images.clone(), Arc::downgrade(&cluster));
            let hook = move |_: &cluster::FakeBrick| {
                let cluster = within.upgrade().expect("the cluster");
                let path = cluster.dir.path().join(uuid::Uuid::new_v4().to_string());
                std::fs::copy(cluster.store(), &path).expect("a copy");
                images
                    .lock()
                    .expect("no panic")
                    .push((path, cluster.slices()));
            };
            *fake.hook.lock().expect("no panic") = Some(Arc::new(Box::new(hook)));
        }
        *cluster.fakes[1].creates_left.lock().expect("no panic") = Some(strength);
        let made = manager.create(&striped_request("new"));
        assert_eq!(made.is_ok(), strength >= 2, "{strength}: {made:?}");
        // Interrupt deletions, too.
        manager.delete(&name("old"), false).expect("deleted");
        for fake in &cluster.fakes {
            *fake.hook.lock().expect("no panic") = None;
        }
        drop(manager);
        let images = std::mem::take(&mut *images.lock().expect("no panic"));
        assert!(images.len() > 8, "{}", images.len());
        cluster.reset_bricks();
        for (path, slices) in images {
            for fake in &cluster.fakes {
                let mut there = fake.slices.lock().expect("no panic");
                there.clear();
                let its = slices.iter().filter(|(brick, _)| *brick == fake.id);
                there.extend(its.map(|&(_, slice)| (slice, MIB)));
            }
            let manager = cluster.manager_on(&path);
            cluster.sweep_until_certain(&manager);
            cluster.assert_no_orphans(&manager);
        }
    }
}

/// The manager trusts "no such slice" only when a late request can no longer arrive, counted from
/// the brick's own answer.
#[test]
fn slice_created_by_late_request_is_deleted() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    cluster.fakes[1].set(BrickBehavior::DelaysRequests);
    let made = manager.create(&create_request("v", LayoutKind::Mirror, MIB));
    assert!(matches!(made, Err(Fault::Brick { .. })), "{made:?}");
    assert_eq!(cluster.fakes[0].slices().len(), 0, "deleted at once");
    // The brick stalls for an hour, then finds the request.
    cluster.clock.advance(Duration::from_secs(3600));
    cluster.fakes[1].set(BrickBehavior::Healthy);
    cluster.send_heartbeats(&manager);
    manager.sweep();
    assert_eq!(manager.status().pending_deletions, 1);
    cluster.fakes[1].deliver_delayed();
    assert_eq!(cluster.fakes[1].slices().len(), 1);
    cluster.send_heartbeats(&manager);
    manager.sweep();
    cluster.assert_no_orphans(&manager);
}

/// One undeletable slice blocks neither other slices nor other bricks.
#[test]
fn sweep_reaches_every_slice() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    for number in 0..3 {
        let text = format!("v{number}");
        manager
            .create(&create_request(&text, LayoutKind::Mirror, MIB))
            .expect("a volume");
    }
    let stuck = *cluster.fakes[0].slices().first().expect("a slice");
    cluster.fakes[0]
        .undeletable
        .lock()
        .expect("no panic")
        .insert(stuck);
    // Left to the sweep, which tries the undeletable slice first.
    cluster.fakes[0].set(BrickBehavior::Unreachable);
    for number in 0..3 {
        let _ = manager
            .delete(&name(&format!("v{number}")), false)
            .expect("deleted");
    }
    cluster.fakes[0].set(BrickBehavior::Healthy);
    manager.sweep();
    assert_eq!(cluster.slices(), [(brick_id(0), stuck)].into());
    assert_eq!(manager.status().pending_deletions, 1);
    cluster.reset_bricks();
    manager.sweep();
    cluster.assert_no_orphans(&manager);
}

/// The manager never calls a brick while it holds the lock. Other requests continue during a slow
/// brick call; requests for the volume itself are refused.
#[test]
fn slow_brick_blocks_no_other_request() {
    let cluster = Cluster::new(2);
    let manager = Arc::new(cluster.manager_with_bricks_alive());
    manager
        .create(&create_request("other", LayoutKind::Mirror, MIB))
        .expect("a volume");
    let (asks, asked) = mpsc::channel::<()>();
    let (lets, go_on) = mpsc::channel::<()>();
    let size_bytes = 2 * MIB;
    let (asks, go_on) = (Mutex::new(asks), Mutex::new(go_on));
    let tester = std::thread::current().id();
    let hook = move |_: &cluster::FakeBrick| {
        // The test's own calls must not wait for the test.
        if std::thread::current().id() == tester {
            return;
        }
        asks.lock()
            .expect("no panic")
            .send(())
            .expect("the test waits");
        go_on
            .lock()
            .expect("no panic")
            .recv()
            .expect("the test goes on");
    };
    *cluster.fakes[1].hook.lock().expect("no panic") = Some(Arc::new(Box::new(hook)));
    std::thread::scope(|scope| {
        // The closure owns these, so that a panic releases the brick.
        let within = move |calls: &dyn Fn()| {
            asked.recv().expect("the brick is asked");
            calls();
            lets.send(()).expect("the brick waits");
        };
        let busy = |result: Option<ErrorCode>| assert_eq!(result, Some(ErrorCode::InUse));
        let others_go_on = || {
            cluster.send_heartbeats(&manager);
            let client = "c".to_owned();
            let attached = manager.attach(
                &name("other"),
                &AttachVolume {
                    client,
                    unreachable: false,
                    process: None,
                    replaces: None,
                    receive: false,
                },
            );
            attached.expect("attached");
            assert_eq!(manager.status().bricks_alive, 2);
            assert_eq!(manager.bricks().len(), 2);
        };
        let create = scope.spawn(|| manager.create(&create_request("v", LayoutKind::Mirror, MIB)));
        // Connect, status, create: each call in order.
        for _ in 0..3 {
            within(&|| {
                others_go_on();
                manager.sweep();
                busy(fault_code(manager.create(&create_request(
                    "v",
                    LayoutKind::Mirror,
                    MIB,
                ))));
                busy(
                    fault_code(manager.delete(&name("v"), true)).map(|code| match code {
                        ErrorCode::NotFound => ErrorCode::InUse,
                        code => code,
                    }),
                );
            });
        }
        create.join().expect("no panic").expect("a volume");
        cluster.assert_no_orphans(&manager);
        let grow = scope.spawn(|| manager.grow(&name("v"), GrowVolume { size_bytes }));
        for _ in 0..3 {
            within(&|| {
                others_go_on();
                manager.sweep();
                busy(fault_code(manager.delete(&name("v"), true)));
                busy(fault_code(
                    manager.grow(&name("v"), GrowVolume { size_bytes }),
                ));
            });
        }
        grow.join().expect("no panic").expect("grown");
        cluster.assert_no_orphans(&manager);
        let delete = scope.spawn(|| manager.delete(&name("v"), false));
        for _ in 0..4 {
            within(&others_go_on);
        }
        delete.join().expect("no panic").expect("deleted");
    });
    *cluster.fakes[1].hook.lock().expect("no panic") = None;
    cluster.assert_no_orphans(&manager);
}

fn fault_code<T>(result: Result<T, Fault>) -> Option<ErrorCode> {
    result.err().map(|fault| fault.code())
}

/// A client attaches and loses a leg while its volume grows; the grow undoes neither.
#[test]
fn layout_changes_during_grow_are_kept() {
    let cluster = Cluster::new(2);
    let manager: Arc<Manager> = Arc::new(cluster.manager_with_bricks_alive());
    manager
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("a volume");
    let within = Arc::downgrade(&manager);
    let once = std::sync::Once::new();
    let hook = move |_: &cluster::FakeBrick| {
        once.call_once(|| {
            let manager = within.upgrade().expect("the manager");
            let client = "c".to_owned();
            manager
                .attach(
                    &name("v"),
                    &AttachVolume {
                        client,
                        unreachable: false,
                        process: None,
                        replaces: None,
                        receive: false,
                    },
                )
                .expect("attached");
        });
    };
    *cluster.fakes[0].hook.lock().expect("no panic") = Some(Arc::new(Box::new(hook)));
    let grown = manager.grow(
        &name("v"),
        GrowVolume {
            size_bytes: 2 * MIB,
        },
    );
    let grown = grown.expect("grown").volume;
    assert_eq!(grown.info.attached.expect("attached").epoch.0, 2);
    assert_eq!(grown.layout.epoch.0, 3);
    assert_eq!(legs(&grown.layout).count(), 4);
    assert_eq!(slices_of_volumes(&manager), cluster.slices());
}
