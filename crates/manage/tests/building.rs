//! Slices are made and deleted on bricks that fail in every way, and none is
//! left that no volume has.

mod cluster;

use cluster::{Cluster, MIB, Mood, brick_id, legs, name, named, wish};
use pagemesh_manage::fault::Fault;
use pagemesh_manage::wire::{AttachVolume, Code, GrowVolume};
use pagemesh_manage::{Kind, Manager};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

const MOODS: [Mood; 7] = [
    Mood::Away,
    Mood::Replaced,
    Mood::Full,
    Mood::Mute,
    Mood::Deaf,
    Mood::Denies,
    Mood::Keeps,
];

fn striped(text: &str) -> pagemesh_manage::wire::CreateVolume {
    pagemesh_manage::wire::CreateVolume {
        columns: Some(4),
        ..wish(text, Kind::StripeMirror, 4 * MIB)
    }
}

/// Whatever one brick does in the middle of it, a volume that is not created
/// leaves no slice, also if the manager crashes right after it.
#[test]
fn a_failed_create_leaves_nothing() {
    for mood in MOODS {
        for crash in [false, true] {
            let cluster = Cluster::new(3);
            let manager = cluster.living();
            manager.create(&striped("old")).expect("a volume");
            cluster.fakes[1].set(mood);
            let made = manager.create(&striped("new"));
            assert_eq!(made.is_ok(), mood == Mood::Keeps, "{mood:?}: {made:?}");
            let manager = if crash { cluster.crashed() } else { manager };
            cluster.sweep_out(&manager);
            cluster.cheer();
            cluster.fakes[1].deliver();
            cluster.sweep_out(&manager);
            cluster.assert_no_orphans(&manager);
            let left = manager.volumes().len();
            assert_eq!(left, 1 + usize::from(mood == Mood::Keeps), "{mood:?}");
            manager.create(&striped("next")).expect("a volume");
        }
    }
}

#[test]
fn a_failed_grow_leaves_the_volume_as_it_was() {
    for mood in MOODS {
        let cluster = Cluster::new(3);
        let manager = cluster.living();
        manager.create(&striped("v")).expect("a volume");
        let before = manager.show(&name("v")).expect("the volume");
        cluster.fakes[2].set(mood);
        let size_bytes = 8 * MIB;
        let grown = manager.grow(&name("v"), GrowVolume { size_bytes });
        assert_eq!(grown.is_ok(), mood == Mood::Keeps, "{mood:?}: {grown:?}");
        cluster.cheer();
        cluster.fakes[2].deliver();
        cluster.sweep_out(&manager);
        if mood != Mood::Keeps {
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
fn what_cannot_be_deleted_is_deleted_later() {
    for mood in MOODS {
        for crash in [false, true] {
            let cluster = Cluster::new(3);
            let manager = cluster.living();
            manager.create(&striped("v")).expect("a volume");
            manager.create(&striped("w")).expect("a volume");
            cluster.fakes[0].set(mood);
            let deleted = manager.delete(&name("v"), false).expect("deleted");
            let fails = !matches!(mood, Mood::Full | Mood::Denies);
            assert_eq!(deleted.pending_deletions > 0, fails, "{mood:?}");
            let manager = if crash { cluster.crashed() } else { manager };
            cluster.cheer();
            cluster.sweep_out(&manager);
            cluster.assert_no_orphans(&manager);
            assert_eq!(manager.volumes().len(), 1);
        }
    }
}

/// A brick that dies after any number of slices, and a manager that crashes
/// at any of its calls to bricks: the image of the store at each such moment
/// leads back to a cluster without orphans.
#[test]
fn a_crash_at_any_call_to_a_brick_leaves_no_orphan() {
    for strength in 0..3 {
        let cluster = Arc::new(Cluster::new(3));
        let manager = cluster.living();
        manager.create(&striped("old")).expect("a volume");
        let images: Arc<Mutex<Vec<_>>> = Arc::default();
        for fake in &cluster.fakes {
            let (images, within) = (images.clone(), Arc::downgrade(&cluster));
            let hook = move |_: &cluster::Fake| {
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
        *cluster.fakes[1].strength.lock().expect("no panic") = Some(strength);
        let made = manager.create(&striped("new"));
        assert_eq!(made.is_ok(), strength >= 2, "{strength}: {made:?}");
        // Deletions are interrupted, too.
        manager.delete(&name("old"), false).expect("deleted");
        for fake in &cluster.fakes {
            *fake.hook.lock().expect("no panic") = None;
        }
        drop(manager);
        let images = std::mem::take(&mut *images.lock().expect("no panic"));
        assert!(images.len() > 8, "{}", images.len());
        cluster.cheer();
        for (path, slices) in images {
            for fake in &cluster.fakes {
                let mut there = fake.slices.lock().expect("no panic");
                there.clear();
                let its = slices.iter().filter(|(brick, _)| *brick == fake.id);
                there.extend(its.map(|&(_, slice)| (slice, MIB)));
            }
            let manager = cluster.manager_on(&path);
            cluster.sweep_out(&manager);
            cluster.assert_no_orphans(&manager);
        }
    }
}

/// "No such slice" is believed only when a late request can no longer come,
/// counted from the brick's own answer.
#[test]
fn a_create_that_arrives_late_is_found() {
    let cluster = Cluster::new(2);
    let manager = cluster.living();
    cluster.fakes[1].set(Mood::Deaf);
    let made = manager.create(&wish("v", Kind::Mirror, MIB));
    assert!(matches!(made, Err(Fault::Brick { .. })), "{made:?}");
    assert_eq!(cluster.fakes[0].slices().len(), 0, "deleted at once");
    // The brick stands still for an hour, then finds the request.
    cluster.clock.advance(Duration::from_secs(3600));
    cluster.fakes[1].set(Mood::Well);
    cluster.beat(&manager);
    manager.sweep();
    assert_eq!(manager.status().pending_deletions, 1);
    cluster.fakes[1].deliver();
    assert_eq!(cluster.fakes[1].slices().len(), 1);
    cluster.beat(&manager);
    manager.sweep();
    cluster.assert_no_orphans(&manager);
}

/// One slice that cannot go keeps neither its neighbours nor other bricks.
#[test]
fn the_sweep_reaches_every_slice() {
    let cluster = Cluster::new(2);
    let manager = cluster.living();
    for number in 0..3 {
        let text = format!("v{number}");
        manager
            .create(&wish(&text, Kind::Mirror, MIB))
            .expect("a volume");
    }
    let stuck = *cluster.fakes[0].slices().first().expect("a slice");
    cluster.fakes[0]
        .stuck
        .lock()
        .expect("no panic")
        .insert(stuck);
    // Left to the sweep, and the stuck one is the first it meets.
    cluster.fakes[0].set(Mood::Away);
    for number in 0..3 {
        let _ = manager
            .delete(&name(&format!("v{number}")), false)
            .expect("deleted");
    }
    cluster.fakes[0].set(Mood::Well);
    manager.sweep();
    assert_eq!(cluster.slices(), [(brick_id(0), stuck)].into());
    assert_eq!(manager.status().pending_deletions, 1);
    cluster.cheer();
    manager.sweep();
    cluster.assert_no_orphans(&manager);
}

/// A brick is never called with the lock held: everything else goes on while
/// it hesitates, and what concerns the volume itself is refused.
#[test]
fn a_slow_brick_keeps_nobody_waiting() {
    let cluster = Cluster::new(2);
    let manager = Arc::new(cluster.living());
    manager
        .create(&wish("other", Kind::Mirror, MIB))
        .expect("a volume");
    let (asks, asked) = mpsc::channel::<()>();
    let (lets, go_on) = mpsc::channel::<()>();
    let size_bytes = 2 * MIB;
    let (asks, go_on) = (Mutex::new(asks), Mutex::new(go_on));
    let tester = std::thread::current().id();
    let hook = move |_: &cluster::Fake| {
        // What the test itself does in the meantime does not wait for itself.
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
        // Owned here, so that a panic lets the brick go on.
        let within = move |calls: &dyn Fn()| {
            asked.recv().expect("the brick is asked");
            calls();
            lets.send(()).expect("the brick waits");
        };
        let busy = |result: Option<Code>| assert_eq!(result, Some(Code::InUse));
        let others_go_on = || {
            cluster.beat(&manager);
            let client = "c".to_owned();
            let attached = manager.attach(
                &name("other"),
                &AttachVolume {
                    client,
                    unreachable: false,
                },
            );
            attached.expect("attached");
            assert_eq!(manager.status().bricks_alive, 2);
            assert_eq!(manager.bricks().len(), 2);
        };
        let create = scope.spawn(|| manager.create(&wish("v", Kind::Mirror, MIB)));
        // Connect, status, create: each call in turn.
        for _ in 0..3 {
            within(&|| {
                others_go_on();
                manager.sweep();
                busy(code(manager.create(&wish("v", Kind::Mirror, MIB))));
                busy(
                    code(manager.delete(&name("v"), true)).map(|code| match code {
                        Code::NotFound => Code::InUse,
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
                busy(code(manager.delete(&name("v"), true)));
                busy(code(manager.grow(&name("v"), GrowVolume { size_bytes })));
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

fn code<T>(result: Result<T, Fault>) -> Option<Code> {
    result.err().map(|fault| fault.code())
}

/// A client attaches and loses a leg while its volume grows: none of it is
/// undone by the grow.
#[test]
fn what_happens_during_a_grow_stays() {
    let cluster = Cluster::new(2);
    let manager: Arc<Manager> = Arc::new(cluster.living());
    manager
        .create(&wish("v", Kind::Mirror, MIB))
        .expect("a volume");
    let within = Arc::downgrade(&manager);
    let once = std::sync::Once::new();
    let hook = move |_: &cluster::Fake| {
        once.call_once(|| {
            let manager = within.upgrade().expect("the manager");
            let client = "c".to_owned();
            manager
                .attach(
                    &name("v"),
                    &AttachVolume {
                        client,
                        unreachable: false,
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
    assert_eq!(named(&manager), cluster.slices());
}
