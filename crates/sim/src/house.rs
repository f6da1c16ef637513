//! A brick's machine: its pool, and the brick while it runs.

use crate::medium::Medium;
use pagemesh_base::layout::BrickId;
use pagemesh_base::slice::BrickStatus;
use pagemesh_brick::brick::Brick;
use pagemesh_brick::service::Served;
use pagemesh_fabric::serve::{Broken, Exchange};
use pagemesh_fabric::service::{PeerInfo, Service};
use pagemesh_fabric::wire::{Received, Wire};
use pagemesh_pmem::{Durability, Recorder};
use pagemesh_store::pool::{Pool, format};
use std::net::{Ipv4Addr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use uuid::Uuid;

/// How a brick ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Death {
    /// Its process: all it stored is there.
    Process,
    /// Its machine: what was not fenced is there or not.
    Power,
}

/// A brick that runs.
pub(crate) struct Running {
    pub(crate) brick: Arc<Brick<Medium>>,
    pub(crate) medium: Arc<Medium>,
    served: Served<Medium>,
}

/// A pool that no brick has open.
enum Left {
    Alone(Recorder),
    /// Guests may have it mapped, and go on storing.
    Mapped(Arc<Medium>),
}

impl Left {
    fn take(self) -> Recorder {
        match self {
            Left::Alone(recorder) => recorder,
            Left::Mapped(medium) => medium.leave(),
        }
    }
}

/// A brick's machine.
pub(crate) struct House {
    pub(crate) id: BrickId,
    pub(crate) running: Option<Arc<Running>>,
    /// What is on its medium while nothing runs.
    left: Option<Left>,
    /// How it ends when its fuse blows.
    pub(crate) doom: Death,
    pub(crate) port: u32,
    pub(crate) bell: u32,
}

/// The brick died while it did something.
pub(crate) struct Died;

/// Does something of a brick that may end it.
pub(crate) fn survives<T>(act: impl FnOnce() -> T) -> Result<T, Died> {
    catch_unwind(AssertUnwindSafe(act)).map_err(|payload| {
        // A failed assertion is a defect, not a death.
        if payload.is::<String>() || payload.is::<&str>() {
            std::panic::resume_unwind(payload);
        }
        Died
    })
}

impl Running {
    /// Opens a pool: recovers it.
    fn open(recorder: Recorder, fuse: Option<u32>) -> Result<Running, Recorder> {
        let medium = Arc::new(Medium::new(recorder));
        if let Some(accesses) = fuse {
            medium.light(accesses);
        }
        let opened = survives(|| Pool::open(medium.clone(), medium.clone()));
        let Ok(opened) = opened else {
            return Err(medium.leave());
        };
        let (pool, _) = opened.unwrap_or_else(|cause| panic!("a pool does not open: {cause}"));
        let brick = Arc::new(Brick::new(pool, Durability::Pmem));
        Ok(Running {
            served: Served(brick.clone()),
            brick,
            medium,
        })
    }

    /// One turn of a connection; false at its end.
    pub(crate) fn serve(&self, exchange: &mut Exchange, wire: &impl Wire) -> Result<bool, Broken> {
        let peer = PeerInfo {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)),
            identity: Uuid::nil(),
        };
        let mut open = || self.served.open(peer);
        let control = self.served.control();
        loop {
            let received = exchange.receive(wire)?;
            while !exchange.advance(wire, control, &mut open)? && exchange.may_take() {}
            match received {
                Received::Bytes { .. } => {}
                Received::Nothing => return Ok(true),
                Received::End => return Ok(false),
            }
        }
    }
}

impl House {
    /// A machine with a new pool.
    pub(crate) fn new(number: usize, pool_bytes: usize) -> House {
        let id = Uuid::from_u128(0xb000 + number as u128);
        let recorder = Recorder::new(pool_bytes).without_past();
        format(&recorder, id).unwrap_or_else(|cause| panic!("no pool can be made: {cause}"));
        let mut house = House {
            id: BrickId(id),
            running: None,
            left: Some(Left::Alone(recorder)),
            doom: Death::Process,
            port: 1,
            bell: 0,
        };
        house.start(None);
        house
    }

    pub(crate) fn address(&self) -> String {
        format!("brick-{}:{}", self.id.0.as_u128() - 0xb000, self.port)
    }

    /// Starts the brick; false if it died of its fuse while it recovered.
    pub(crate) fn start(&mut self, fuse: Option<u32>) -> bool {
        let Some(recorder) = self.left.take() else {
            return true;
        };
        match Running::open(recorder.take(), fuse) {
            Ok(running) => {
                self.bell = running.brick.view().control().rung();
                self.running = Some(Arc::new(running));
                true
            }
            Err(left) => {
                self.left = Some(Left::Alone(left));
                false
            }
        }
    }

    /// Ends the brick. The caller drops what is given back, with no lock held.
    pub(crate) fn end(&mut self, death: Death, seed: u64) -> Option<Arc<Running>> {
        let running = self.running.take()?;
        self.left = Some(match death {
            Death::Process => {
                running.medium.set_aside();
                Left::Mapped(running.medium.clone())
            }
            Death::Power => Left::Alone(unpowered(running.medium.leave(), seed)),
        });
        Some(running)
    }

    /// A machine that is down loses what its medium had not made durable.
    pub(crate) fn lose_power(&mut self, seed: u64) {
        if let Some(left) = self.left.take() {
            self.left = Some(Left::Alone(unpowered(left.take(), seed)));
        }
    }
}

/// What a pool holds after its machine lost its power.
fn unpowered(left: Recorder, seed: u64) -> Recorder {
    left.crash_point().survivor(seed).without_past()
}

/// What a brick says of itself.
pub(crate) fn status(running: &Running) -> BrickStatus {
    let status = running.served.control().status();
    status.unwrap_or_else(|cause| panic!("a brick has no status: {cause}"))
}
