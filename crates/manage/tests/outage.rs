//! The manager's own disk fails.

use crate::cluster;
use cluster::{Cluster, MIB, create_request, name, slices_of_volumes};
use pagemesh_base::layout::{EpochNumber, LegState};
use pagemesh_manage::fault::Fault;
use pagemesh_manage::store::{Store, StoreError};
use pagemesh_manage::wire::{
    AttachVolume, ChangeLegs, DetachVolume, ErrorCode, EventFilter, EventKind, GrowVolume,
    LegChange,
};
use pagemesh_manage::{LayoutKind, Manager};
use redb::StorageBackend;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// The reaction of a disk to a write or a sync.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum DiskMode {
    #[default]
    Healthy,
    /// Every write is stored, but the disk reports a failure.
    WritesThenFails,
    /// No write is stored any more.
    Dead,
    /// The disk stores this many more writes, then none.
    DiesAfter(usize),
}

#[derive(Clone, Debug, Default)]
struct FaultyDisk(Arc<Mutex<(DiskMode, Vec<u8>)>>);

impl FaultyDisk {
    fn set(&self, disk: DiskMode) {
        self.0.lock().expect("no panic").0 = disk;
    }

    fn access<T>(
        &self,
        act: impl FnOnce(DiskMode, &mut Vec<u8>) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut inner = self.0.lock().expect("no panic");
        let (disk, bytes) = &mut *inner;
        act(*disk, bytes)
    }

    /// The contents of the disk, on a working disk.
    fn copy(&self) -> FaultyDisk {
        let bytes = self.0.lock().expect("no panic").1.clone();
        FaultyDisk(Arc::new(Mutex::new((DiskMode::Healthy, bytes))))
    }
}

fn disk_error() -> io::Error {
    io::Error::other("the disk failed")
}

impl StorageBackend for FaultyDisk {
    fn len(&self) -> io::Result<u64> {
        self.access(|_, bytes| Ok(bytes.len() as u64))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.access(|_, bytes| {
            let range = offset as usize..offset as usize + out.len();
            out.copy_from_slice(bytes.get(range).ok_or_else(disk_error)?);
            Ok(())
        })
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.access(|disk, bytes| match disk {
            DiskMode::Dead | DiskMode::DiesAfter(0) => Err(disk_error()),
            _ => {
                bytes.resize(len as usize, 0);
                Ok(())
            }
        })
    }

    fn sync_data(&self) -> io::Result<()> {
        self.access(|disk, _| match disk {
            DiskMode::Healthy | DiskMode::DiesAfter(1..) => Ok(()),
            _ => Err(disk_error()),
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut inner = self.0.lock().expect("no panic");
        let left = match inner.0 {
            DiskMode::DiesAfter(left) => left.checked_sub(1).ok_or_else(disk_error)?,
            _ => 0,
        };
        if matches!(inner.0, DiskMode::DiesAfter(_)) {
            inner.0 = DiskMode::DiesAfter(left);
        }
        drop(inner);
        self.access(|disk, bytes| match disk {
            DiskMode::Dead => Err(disk_error()),
            _ => {
                bytes[offset as usize..][..data.len()].copy_from_slice(data);
                Ok(())
            }
        })
    }
}

fn manager(cluster: &Cluster, medium: &FaultyDisk) -> Manager {
    let store = Store::open_on(medium.clone(), Path::new("medium")).expect("a store");
    let manager = cluster.manager_with(store);
    cluster.send_heartbeats(&manager);
    manager
}

type VolumeChange = fn(&Manager) -> Result<(), Fault>;

fn volume_changes() -> Vec<(&'static str, VolumeChange)> {
    vec![
        ("create", |m| {
            m.create(&create_request("w", LayoutKind::Mirror, MIB))
                .map(drop)
        }),
        ("grow", |m| {
            m.grow(
                &name("v"),
                GrowVolume {
                    size_bytes: 2 * MIB,
                },
            )
            .map(drop)
        }),
        ("delete", |m| m.delete(&name("v"), false).map(drop)),
        ("attach", |m| {
            let client = "c".to_owned();
            m.attach(
                &name("v"),
                &AttachVolume {
                    client,
                    unreachable: false,
                    process: None,
                    replaces: None,
                    receive: false,
                },
            )
            .map(drop)
        }),
        ("detach", |m| {
            m.detach(&name("a"), DetachVolume::default()).map(drop)
        }),
        ("legs", |m| {
            let change = LegChange {
                segment: 0,
                column: 0,
                leg: 0,
                to: LegState::Stale,
                note: None,
            };
            let request = ChangeLegs {
                expected: EpochNumber(1),
                attachment: None,
                changes: vec![change],
            };
            m.change_legs(&name("v"), &request).map(drop)
        }),
    ]
}

/// Whether a change is in the store.
fn is_done(manager: &Manager, what: &str) -> bool {
    let shown = |volume| manager.show(&name(volume)).ok();
    match what {
        "create" => shown("w").is_some(),
        "grow" => shown("v").is_some_and(|it| it.info.size_bytes == 2 * MIB),
        "delete" => shown("v").is_none(),
        "attach" => shown("v").is_some_and(|it| it.info.attached.is_some()),
        "detach" => shown("a").is_some_and(|it| it.info.attached.is_none()),
        _ => shown("v").is_some_and(|it| {
            let mut legs = cluster::legs(&it.layout);
            legs.any(|leg| leg.state == LegState::Stale)
        }),
    }
}

/// Whether the event of a change is in the store.
fn is_reported(manager: &Manager, what: &str) -> bool {
    let (kind, volume) = match what {
        "create" => (EventKind::VolumeCreated, "w"),
        "grow" => (EventKind::VolumeGrown, "v"),
        "delete" => (EventKind::VolumeDeleted, "v"),
        "attach" => (EventKind::Attached, "v"),
        "detach" => (EventKind::Detached, "a"),
        _ => (EventKind::LegLost, "v"),
    };
    let (events, _) = manager.list_events(&EventFilter::default(), 1000);
    let mut events = events.iter();
    events.any(|it| it.kind == kind && it.subject.name == volume)
}

/// A manager with the volume `v`, and the volume `a`, which a client has attached.
fn manager_with_volumes(cluster: &Cluster, medium: &FaultyDisk) -> Manager {
    let manager = manager(cluster, medium);
    for volume in ["v", "a"] {
        manager
            .create(&create_request(volume, LayoutKind::Mirror, MIB))
            .expect("made");
    }
    let request = AttachVolume {
        client: "c".to_owned(),
        unreachable: false,
        process: None,
        replaces: None,
        receive: false,
    };
    manager.attach(&name("a"), &request).expect("attached");
    manager
}

/// The disk dies at each write of a change: the next manager finds the change and its event, or
/// neither.
#[test]
fn crash_keeps_change_and_event_together() {
    for (what, attempt) in volume_changes() {
        let mut found = [false; 2];
        for writes in 0.. {
            let cluster = Cluster::new(2);
            let medium = FaultyDisk::default();
            let manager = manager_with_volumes(&cluster, &medium);
            medium.set(DiskMode::DiesAfter(writes));
            let done = attempt(&manager).is_ok();
            drop(manager);
            let manager = self::manager(&cluster, &medium.copy());
            let is_done = is_done(&manager, what);
            assert_eq!(
                is_done,
                is_reported(&manager, what),
                "{what}, {writes} writes"
            );
            assert!(is_done || !done, "{what} is acknowledged, {writes} writes");
            found[usize::from(is_done)] = true;
            if done {
                break;
            }
            assert!(writes < 1000, "{what} never ends");
        }
        assert_eq!(found, [true; 2], "{what}");
    }
}

fn volume_details(manager: &Manager) -> Vec<pagemesh_manage::wire::VolumeDetail> {
    let volumes = manager.volumes().into_iter();
    volumes
        .map(|info| manager.show(&info.name).expect("there"))
        .collect()
}

/// A store that takes no changes is in the status and in the metrics.
#[test]
fn failed_store_is_visible() {
    let cluster = Cluster::new(2);
    let medium = FaultyDisk::default();
    let manager = manager(&cluster, &medium);
    let is_shown = |failed: bool| {
        let line = format!("pagemesh_manager_store_failed {}\n", u8::from(failed));
        assert!(manager.metrics().text().expect("a text").contains(&line));
        assert_eq!(manager.status().store_failed, failed);
    };
    is_shown(false);
    medium.set(DiskMode::Dead);
    let request = create_request("v", LayoutKind::Mirror, MIB);
    manager.create(&request).expect_err("the disk fails");
    is_shown(true);
    medium.set(DiskMode::Healthy);
    manager.sweep();
    is_shown(true);
}

/// A change of unknown durability is not acknowledged, is not visible and has no effect. Above all,
/// the manager deletes no slice that the store may name.
#[test]
fn change_of_unknown_durability_has_no_effect() {
    // Fail either the first commit of each change, or its last one, after the slices were created.
    for disk in [DiskMode::WritesThenFails, DiskMode::Dead] {
        for (what, attempt) in volume_changes() {
            for late in [false, true] {
                let cluster = Cluster::new(2);
                let medium = FaultyDisk::default();
                let manager = manager(&cluster, &medium);
                manager
                    .create(&create_request("v", LayoutKind::Mirror, MIB))
                    .expect("made");
                manager
                    .create(&create_request("a", LayoutKind::Mirror, MIB))
                    .expect("made");
                let client = "c".to_owned();
                manager
                    .attach(
                        &name("a"),
                        &AttachVolume {
                            client,
                            unreachable: false,
                            process: None,
                            replaces: None,
                            receive: false,
                        },
                    )
                    .expect("attached");
                let before = volume_details(&manager);
                if late {
                    let medium = medium.clone();
                    let hook = move |_: &cluster::FakeBrick| medium.set(disk);
                    *cluster.fakes[0].hook.lock().expect("no panic") =
                        Some(Arc::new(Box::new(hook)));
                } else {
                    medium.set(disk);
                }
                let first = attempt(&manager);
                *cluster.fakes[0].hook.lock().expect("no panic") = None;
                let asks_bricks = matches!(what, "create" | "grow" | "delete");
                if late && (what == "delete" || !asks_bricks) {
                    // The change itself was committed before the calls to bricks.
                    first.expect("done");
                } else {
                    let fault = first.expect_err("the disk fails");
                    assert_eq!(fault.code(), ErrorCode::Internal, "{what}");
                    assert_eq!(volume_details(&manager), before, "{what}");
                    // The store stays failed, even if the disk works again.
                    medium.set(DiskMode::Healthy);
                    for (what, attempt) in volume_changes() {
                        let again = attempt(&manager);
                        let failed =
                            matches!(again, Err(Fault::Store(StoreError::EarlierWriteFailed(_))));
                        assert!(failed, "{what}: {again:?}");
                    }
                    let slices = cluster.slices();
                    for _ in 0..3 {
                        cluster.clock.advance(std::time::Duration::from_secs(121));
                        cluster.send_heartbeats(&manager);
                        manager.sweep();
                    }
                    assert_eq!(cluster.slices(), slices, "{what}");
                }
                assert!(
                    slices_of_volumes(&manager).is_subset(&cluster.slices()),
                    "{what}"
                );
                // Any state of the disk is consistent for the next manager.
                drop(manager);
                let manager = self::manager(&cluster, &medium.copy());
                assert!(
                    slices_of_volumes(&manager).is_subset(&cluster.slices()),
                    "{what} {disk:?} {late}"
                );
                cluster.sweep_until_certain(&manager);
                cluster.assert_no_orphans(&manager);
            }
        }
    }
}
