//! The manager's own disk fails.

mod cluster;

use cluster::{Cluster, MIB, name, named, wish};
use pagemesh_base::layout::{EpochNumber, LegState};
use pagemesh_manage::fault::Fault;
use pagemesh_manage::store::{Store, StoreError};
use pagemesh_manage::wire::{AttachVolume, ChangeLegs, Code, DetachVolume, GrowVolume, LegChange};
use pagemesh_manage::{Kind, Manager};
use redb::StorageBackend;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// What a disk does when it is told to make things durable or to write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Disk {
    #[default]
    Well,
    /// Everything reaches it, but it says that it failed.
    Denies,
    /// Nothing reaches it any more.
    Dead,
}

#[derive(Clone, Debug, Default)]
struct Medium(Arc<Mutex<(Disk, Vec<u8>)>>);

impl Medium {
    fn set(&self, disk: Disk) {
        self.0.lock().expect("no panic").0 = disk;
    }

    fn with<T>(&self, act: impl FnOnce(Disk, &mut Vec<u8>) -> io::Result<T>) -> io::Result<T> {
        let mut inner = self.0.lock().expect("no panic");
        let (disk, bytes) = &mut *inner;
        act(*disk, bytes)
    }

    /// What is on it, as a disk that works again.
    fn copy(&self) -> Medium {
        let bytes = self.0.lock().expect("no panic").1.clone();
        Medium(Arc::new(Mutex::new((Disk::Well, bytes))))
    }
}

fn broken() -> io::Error {
    io::Error::other("the disk failed")
}

impl StorageBackend for Medium {
    fn len(&self) -> io::Result<u64> {
        self.with(|_, bytes| Ok(bytes.len() as u64))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.with(|_, bytes| {
            let range = offset as usize..offset as usize + out.len();
            out.copy_from_slice(bytes.get(range).ok_or_else(broken)?);
            Ok(())
        })
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.with(|disk, bytes| match disk {
            Disk::Dead => Err(broken()),
            _ => {
                bytes.resize(len as usize, 0);
                Ok(())
            }
        })
    }

    fn sync_data(&self) -> io::Result<()> {
        self.with(|disk, _| match disk {
            Disk::Well => Ok(()),
            _ => Err(broken()),
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.with(|disk, bytes| match disk {
            Disk::Dead => Err(broken()),
            _ => {
                bytes[offset as usize..][..data.len()].copy_from_slice(data);
                Ok(())
            }
        })
    }
}

fn manager(cluster: &Cluster, medium: &Medium) -> Manager {
    let store = Store::open_on(medium.clone(), Path::new("medium")).expect("a store");
    let manager = cluster.manager_with(store);
    cluster.beat(&manager);
    manager
}

type Attempt = fn(&Manager) -> Result<(), Fault>;

fn attempts() -> Vec<(&'static str, Attempt)> {
    vec![
        ("create", |m| {
            m.create(&wish("w", Kind::Mirror, MIB)).map(drop)
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
            let wish = ChangeLegs {
                expected: EpochNumber(1),
                attachment: None,
                changes: vec![change],
            };
            m.change_legs(&name("v"), &wish).map(drop)
        }),
    ]
}

fn shown(manager: &Manager) -> Vec<pagemesh_manage::wire::VolumeDetail> {
    let volumes = manager.volumes().into_iter();
    volumes
        .map(|info| manager.show(&info.name).expect("there"))
        .collect()
}

/// A change that may or may not be on the disk is not answered, is not seen,
/// and leads to nothing: above all, no slice is deleted that the disk may name.
#[test]
fn what_the_disk_may_have_forgotten_is_not_acted_upon() {
    // While the first commit of each change fails, and while its last one
    // does, when slices have been made.
    for disk in [Disk::Denies, Disk::Dead] {
        for (what, attempt) in attempts() {
            for late in [false, true] {
                let cluster = Cluster::new(2);
                let medium = Medium::default();
                let manager = manager(&cluster, &medium);
                manager.create(&wish("v", Kind::Mirror, MIB)).expect("made");
                manager.create(&wish("a", Kind::Mirror, MIB)).expect("made");
                let client = "c".to_owned();
                manager
                    .attach(
                        &name("a"),
                        &AttachVolume {
                            client,
                            unreachable: false,
                        },
                    )
                    .expect("attached");
                let before = shown(&manager);
                if late {
                    let medium = medium.clone();
                    let hook = move |_: &cluster::Fake| medium.set(disk);
                    *cluster.fakes[0].hook.lock().expect("no panic") =
                        Some(Arc::new(Box::new(hook)));
                } else {
                    medium.set(disk);
                }
                let first = attempt(&manager);
                *cluster.fakes[0].hook.lock().expect("no panic") = None;
                let asks_bricks = matches!(what, "create" | "grow" | "delete");
                if late && (what == "delete" || !asks_bricks) {
                    // The change itself was written before bricks were asked.
                    first.expect("done");
                } else {
                    let fault = first.expect_err("the disk fails");
                    assert_eq!(fault.code(), Code::Internal, "{what}");
                    assert_eq!(shown(&manager), before, "{what}");
                    // It stays so, even if the disk says that it is well.
                    medium.set(Disk::Well);
                    for (what, attempt) in attempts() {
                        let again = attempt(&manager);
                        let failed = matches!(again, Err(Fault::Store(StoreError::Failed(_))));
                        assert!(failed, "{what}: {again:?}");
                    }
                    let slices = cluster.slices();
                    for _ in 0..3 {
                        cluster.clock.advance(std::time::Duration::from_secs(121));
                        cluster.beat(&manager);
                        manager.sweep();
                    }
                    assert_eq!(cluster.slices(), slices, "{what}");
                }
                assert!(named(&manager).is_subset(&cluster.slices()), "{what}");
                // Whatever is on the disk, the next manager makes it true.
                drop(manager);
                let manager = self::manager(&cluster, &medium.copy());
                assert!(
                    named(&manager).is_subset(&cluster.slices()),
                    "{what} {disk:?} {late}"
                );
                cluster.sweep_out(&manager);
                cluster.assert_no_orphans(&manager);
            }
        }
    }
}
