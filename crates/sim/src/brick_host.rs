//! A brick's machine: its pool, and the brick while it runs.

use crate::any_medium::SimMedium;
use crate::disk_medium::{DiskMedium, end_user};
use crate::medium::MemoryMedium;
use pagemesh_base::layout::BrickId;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{BrickStatus, SliceError};
use pagemesh_brick::brick::Brick;
use pagemesh_brick::service::BrickService;
use pagemesh_fabric::serve::{ConnectionError, Exchange};
use pagemesh_fabric::service::{PeerInfo, Service};
use pagemesh_fabric::wire::{ReceiveResult, Wire};
use pagemesh_pmem::{Disk, Durability, Media, Recorder, SimulatedDevice};
use pagemesh_store::pool::{Pool, format};
use std::net::{Ipv4Addr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use uuid::Uuid;

/// How a brick ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CrashKind {
    /// The process dies: all stores survive.
    Process,
    /// The machine loses its power: each unfenced store, and each sector that no FLUSH covers, survives or not.
    Power,
}

/// A running brick.
pub(crate) struct RunningBrick {
    pub(crate) brick: Arc<Brick<SimMedium>>,
    pub(crate) medium: Arc<SimMedium>,
    served: BrickService<SimMedium>,
}

/// The kind of a brick's medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolKind {
    Memory,
    Disk,
}

/// A pool that no brick has open.
enum IdlePool {
    Unmapped(Recorder),
    /// Direct clients may have it mapped, and continue to store.
    Mapped(Arc<SimMedium>),
    Disk(Arc<SimulatedDevice>),
}

impl IdlePool {
    /// The contents of memory; none of a disk.
    fn into_recorder(self) -> Result<Recorder, Arc<SimulatedDevice>> {
        match self {
            IdlePool::Unmapped(recorder) => Ok(recorder),
            IdlePool::Mapped(medium) => Ok(memory_of(&medium).take_surviving_state()),
            IdlePool::Disk(device) => Err(device),
        }
    }
}

fn memory_of(medium: &SimMedium) -> &MemoryMedium {
    medium.memory().expect("a pool in memory")
}

/// A brick's machine.
pub(crate) struct BrickHost {
    pub(crate) id: BrickId,
    pub(crate) running: Option<Arc<RunningBrick>>,
    /// The contents of its medium while the brick does not run.
    idle_pool: Option<IdlePool>,
    /// How the brick ends when its fuse blows.
    pub(crate) crash_kind: CrashKind,
    pub(crate) port: u32,
    pub(crate) doorbell_count: u32,
    /// The disk's device, if the pool is on one.
    pub(crate) device: Option<Arc<SimulatedDevice>>,
    /// The disk has made progress that connections have not noticed.
    pub(crate) needs_poll: bool,
    /// Requests of the device that had ended when they last looked.
    pub(crate) ended_seen: u64,
    /// How often the disk has failed.
    pub(crate) disk_failures: u64,
    /// Chooses the sizes of caches.
    rng: SplitMix64,
}

/// The brick died during an operation.
pub(crate) struct BrickDied;

/// Runs an operation of a brick that may kill the brick.
pub(crate) fn catch_crash<T>(act: impl FnOnce() -> T) -> Result<T, BrickDied> {
    catch_unwind(AssertUnwindSafe(act)).map_err(|payload| {
        // A failed assertion is a defect, not a death of the brick.
        if payload.is::<String>() || payload.is::<&str>() {
            std::panic::resume_unwind(payload);
        }
        BrickDied
    })
}

impl RunningBrick {
    /// Opens and recovers a pool.
    fn open(recorder: Recorder, fuse: Option<u32>) -> Result<RunningBrick, Recorder> {
        let medium = Arc::new(SimMedium::Memory(MemoryMedium::new(recorder)));
        let views = [medium.clone(), medium];
        let opened = RunningBrick::recover(&views, fuse, Durability::Pmem);
        opened.ok_or_else(|| memory_of(&views[0]).take_surviving_state())
    }

    /// The same of a pool on a disk. None: the fuse blew, or the disk has failed.
    fn open_disk(
        device: &Arc<SimulatedDevice>,
        cache: u64,
        fuse: Option<u32>,
    ) -> Option<RunningBrick> {
        let views = DiskMedium::open(device, cache).map(|view| Arc::new(SimMedium::Disk(view)));
        RunningBrick::recover(&views, fuse, Durability::FileSync)
    }

    fn recover(
        views: &[Arc<SimMedium>; 2],
        fuse: Option<u32>,
        durability: Durability,
    ) -> Option<RunningBrick> {
        let [data, overlay] = views;
        if let Some(accesses) = fuse {
            data.arm_fuse(accesses);
        }
        let opened = catch_crash(|| Pool::open(data.clone(), overlay.clone())).ok()?;
        let has_failed = data
            .disk()
            .is_some_and(|disk| disk.disk().failure().is_some());
        if has_failed {
            return None;
        }
        let (pool, _) = opened.unwrap_or_else(|cause| panic!("cannot open a pool: {cause}"));
        let brick = Arc::new(Brick::new(pool, durability));
        Some(RunningBrick {
            served: BrickService(brick.clone()),
            brick,
            medium: data.clone(),
        })
    }

    /// The disk below the pool, if there is one.
    pub(crate) fn disk(&self) -> Option<&Arc<Disk>> {
        Some(self.medium.disk()?.disk())
    }

    /// Why the brick must end, if its disk has failed.
    pub(crate) fn disk_failure(&self) -> Option<String> {
        self.disk()?.failure()
    }

    /// Answers the requests of a connection that need not wait any longer.
    pub(crate) fn poll(
        &self,
        exchange: &mut Exchange,
        wire: &impl Wire,
    ) -> Result<bool, ConnectionError> {
        let mut open = || -> Result<_, SliceError> { Err(SliceError::NoSession("not now".into())) };
        exchange.advance(wire, self.served.control(), &mut open)?;
        Ok(true)
    }

    /// Serves one turn of a connection; false at its end.
    pub(crate) fn serve_turn(
        &self,
        exchange: &mut Exchange,
        wire: &impl Wire,
    ) -> Result<bool, ConnectionError> {
        let peer = PeerInfo {
            address: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 1))),
            identity: Uuid::nil(),
        };
        let mut open = || self.served.open(peer);
        let control = self.served.control();
        loop {
            let received = exchange.receive(wire)?;
            while !exchange.advance(wire, control, &mut open)? && exchange.may_accept() {}
            match received {
                ReceiveResult::Bytes { .. } => {}
                ReceiveResult::WouldBlock => return Ok(true),
                ReceiveResult::End => return Ok(false),
            }
        }
    }
}

impl BrickHost {
    /// A machine with a new pool. The random numbers are for a disk.
    pub(crate) fn new(
        number: usize,
        pool_bytes: usize,
        kind: PoolKind,
        mut rng: SplitMix64,
    ) -> BrickHost {
        let id = Uuid::from_u128(0xb000 + number as u128);
        let (device, idle_pool) = match kind {
            PoolKind::Memory => {
                let recorder = Recorder::new(pool_bytes).without_crash_points();
                format_pool(&recorder, id);
                (None, IdlePool::Unmapped(recorder))
            }
            PoolKind::Disk => {
                let device = SimulatedDevice::new(pool_bytes as u64, rng.next_u64());
                let [data, _] = DiskMedium::open(&device, 0);
                format_pool(&data, id);
                data.sync().expect("a sound disk");
                (Some(device.clone()), IdlePool::Disk(device))
            }
        };
        let mut host = BrickHost {
            id: BrickId(id),
            running: None,
            idle_pool: Some(idle_pool),
            crash_kind: CrashKind::Process,
            port: 1,
            doorbell_count: 0,
            device,
            needs_poll: false,
            ended_seen: 0,
            disk_failures: 0,
            rng,
        };
        host.start(None);
        host
    }

    pub(crate) fn address(&self) -> String {
        format!("brick-{}:{}", self.id.0.as_u128() - 0xb000, self.port)
    }

    /// Starts the brick; false if its fuse blew during the recovery.
    pub(crate) fn start(&mut self, fuse: Option<u32>) -> bool {
        let Some(idle) = self.idle_pool.take() else {
            return true;
        };
        let opened = match idle.into_recorder() {
            Ok(recorder) => RunningBrick::open(recorder, fuse).map_err(IdlePool::Unmapped),
            Err(device) => {
                let opened = RunningBrick::open_disk(&device, self.rng.next_u64(), fuse);
                opened.ok_or_else(|| {
                    end_user(&device, self.crash_kind);
                    IdlePool::Disk(device)
                })
            }
        };
        match opened {
            Ok(running) => {
                self.doorbell_count = running.brick.mapping().control().doorbell_count();
                self.running = Some(Arc::new(running));
                true
            }
            Err(left) => {
                self.idle_pool = Some(left);
                false
            }
        }
    }

    /// Ends the brick. The caller drops the returned brick while it holds no lock.
    pub(crate) fn stop(&mut self, death: CrashKind, seed: u64) -> Option<Arc<RunningBrick>> {
        let running = self.running.take()?;
        self.idle_pool = Some(match (&*running.medium, death) {
            (SimMedium::Disk(disk), _) => {
                disk.disarm_fuse();
                end_user(disk.device(), death);
                IdlePool::Disk(disk.device().clone())
            }
            (SimMedium::Memory(memory), CrashKind::Process) => {
                memory.freeze_state();
                IdlePool::Mapped(running.medium.clone())
            }
            (SimMedium::Memory(memory), CrashKind::Power) => {
                IdlePool::Unmapped(after_power_loss(memory.take_surviving_state(), seed))
            }
        });
        Some(running)
    }

    /// A stopped machine loses the stores that its medium had not made durable.
    pub(crate) fn lose_power(&mut self, seed: u64) {
        if let Some(left) = self.idle_pool.take() {
            self.idle_pool = Some(match left.into_recorder() {
                Ok(recorder) => IdlePool::Unmapped(after_power_loss(recorder, seed)),
                Err(device) => {
                    end_user(&device, CrashKind::Power);
                    IdlePool::Disk(device)
                }
            });
        }
    }
}

fn format_pool(media: &impl Media, id: Uuid) {
    format(media, id).unwrap_or_else(|cause| panic!("cannot format a pool: {cause}"));
}

/// The contents of a pool after its machine lost its power.
fn after_power_loss(left: Recorder, seed: u64) -> Recorder {
    left.crash_point()
        .sample_recorder(seed)
        .without_crash_points()
}

/// The status that a brick reports.
pub(crate) fn brick_status(running: &RunningBrick) -> BrickStatus {
    let status = running.served.control().status();
    status.unwrap_or_else(|cause| panic!("a brick has no status: {cause}"))
}
