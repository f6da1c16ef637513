//! A brick's machine: its pool, and the brick while it runs.

use crate::medium::SimMedium;
use pagemesh_base::layout::BrickId;
use pagemesh_base::slice::BrickStatus;
use pagemesh_brick::brick::Brick;
use pagemesh_brick::service::BrickService;
use pagemesh_fabric::serve::{ConnectionError, Exchange};
use pagemesh_fabric::service::{PeerInfo, Service};
use pagemesh_fabric::wire::{ReceiveResult, Wire};
use pagemesh_pmem::{Durability, Recorder};
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
    /// The machine loses its power: each unfenced store survives or not.
    Power,
}

/// A running brick.
pub(crate) struct RunningBrick {
    pub(crate) brick: Arc<Brick<SimMedium>>,
    pub(crate) medium: Arc<SimMedium>,
    served: BrickService<SimMedium>,
}

/// A pool that no brick has open.
enum IdlePool {
    Unmapped(Recorder),
    /// Direct clients may have it mapped, and continue to store.
    Mapped(Arc<SimMedium>),
}

impl IdlePool {
    fn into_recorder(self) -> Recorder {
        match self {
            IdlePool::Unmapped(recorder) => recorder,
            IdlePool::Mapped(medium) => medium.take_surviving_state(),
        }
    }
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
        let medium = Arc::new(SimMedium::new(recorder));
        if let Some(accesses) = fuse {
            medium.arm_fuse(accesses);
        }
        let opened = catch_crash(|| Pool::open(medium.clone(), medium.clone()));
        let Ok(opened) = opened else {
            return Err(medium.take_surviving_state());
        };
        let (pool, _) = opened.unwrap_or_else(|cause| panic!("cannot open a pool: {cause}"));
        let brick = Arc::new(Brick::new(pool, Durability::Pmem));
        Ok(RunningBrick {
            served: BrickService(brick.clone()),
            brick,
            medium,
        })
    }

    /// Serves one turn of a connection; false at its end.
    pub(crate) fn serve_turn(
        &self,
        exchange: &mut Exchange,
        wire: &impl Wire,
    ) -> Result<bool, ConnectionError> {
        let peer = PeerInfo {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)),
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
    /// A machine with a new pool.
    pub(crate) fn new(number: usize, pool_bytes: usize) -> BrickHost {
        let id = Uuid::from_u128(0xb000 + number as u128);
        let recorder = Recorder::new(pool_bytes).without_crash_points();
        format(&recorder, id).unwrap_or_else(|cause| panic!("cannot format a pool: {cause}"));
        let mut host = BrickHost {
            id: BrickId(id),
            running: None,
            idle_pool: Some(IdlePool::Unmapped(recorder)),
            crash_kind: CrashKind::Process,
            port: 1,
            doorbell_count: 0,
        };
        host.start(None);
        host
    }

    pub(crate) fn address(&self) -> String {
        format!("brick-{}:{}", self.id.0.as_u128() - 0xb000, self.port)
    }

    /// Starts the brick; false if its fuse blew during the recovery.
    pub(crate) fn start(&mut self, fuse: Option<u32>) -> bool {
        let Some(recorder) = self.idle_pool.take() else {
            return true;
        };
        match RunningBrick::open(recorder.into_recorder(), fuse) {
            Ok(running) => {
                self.doorbell_count = running.brick.mapping().control().doorbell_count();
                self.running = Some(Arc::new(running));
                true
            }
            Err(left) => {
                self.idle_pool = Some(IdlePool::Unmapped(left));
                false
            }
        }
    }

    /// Ends the brick. The caller drops the returned brick while it holds no lock.
    pub(crate) fn stop(&mut self, death: CrashKind, seed: u64) -> Option<Arc<RunningBrick>> {
        let running = self.running.take()?;
        self.idle_pool = Some(match death {
            CrashKind::Process => {
                running.medium.freeze_state();
                IdlePool::Mapped(running.medium.clone())
            }
            CrashKind::Power => IdlePool::Unmapped(after_power_loss(
                running.medium.take_surviving_state(),
                seed,
            )),
        });
        Some(running)
    }

    /// A stopped machine loses the stores that its medium had not made durable.
    pub(crate) fn lose_power(&mut self, seed: u64) {
        if let Some(left) = self.idle_pool.take() {
            self.idle_pool = Some(IdlePool::Unmapped(after_power_loss(
                left.into_recorder(),
                seed,
            )));
        }
    }
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
