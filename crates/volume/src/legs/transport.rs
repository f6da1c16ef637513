//! Connections to bricks: mapped if the brick is on this machine and its pool allows it, over the brick's unix socket if
//! the pool does not, and over TCP otherwise.
//!
//! Invariants: all sessions of one pool in this process share one mapping, which goes with the
//! last leg. A mapping is never joined after its brick is gone.

use crate::legs::connector::Connector;
use crate::legs::mapped::MappedLeg;
use pagemesh_base::authority::BrickAddress;
use pagemesh_base::brick_name::BrickLabel;
use pagemesh_base::ids::Epoch;
use pagemesh_base::key::Key;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::poison;
use pagemesh_base::slice::{Leg, SliceError};
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::map::{self, MapGrant};
use pagemesh_fabric::tcp::{self, Endpoint, TcpLeg};
use pagemesh_pmem::{MappedMedia, SharedSegment};
use pagemesh_store::control::Control;
use pagemesh_store::pool::Pool;
use pagemesh_store::pool_mapping::PoolMapping;
use pagemesh_store::session::Session;
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

/// The transports that may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// `map` where it is possible, else the brick's unix socket on this machine, else TCP.
    Auto,
    /// Only `map`.
    Map,
    /// Only TCP.
    Tcp,
}

/// Connects to bricks; see the module.
pub struct Transports {
    key: Key,
    transport: Transport,
    timeouts: Timeouts,
    mappings: Mutex<HashMap<BrickId, Weak<PoolMapping<MappedMedia>>>>,
}

impl Transports {
    /// Creates connections that prove this cluster key.
    #[must_use]
    pub fn new(key: Key, transport: Transport, timeouts: Timeouts) -> Transports {
        Transports {
            key,
            transport,
            timeouts,
            mappings: Mutex::default(),
        }
    }

    fn tcp(
        &self,
        brick: BrickId,
        address: &BrickAddress,
        slice: SliceId,
        epoch: Epoch,
    ) -> Result<Box<dyn Leg>, SliceError> {
        let mut timeouts = self.timeouts;
        if address.buffers() {
            // Writes, too, may wait for the brick's disk.
            timeouts.stall = timeouts.stall.max(timeouts.call);
        }
        let connect = |endpoint| -> Result<Box<dyn Leg>, SliceError> {
            let leg = TcpLeg::connect(endpoint, &self.key, timeouts, slice, epoch)?;
            check_brick(&label(brick, address), leg.brick())?;
            Ok(Box::new(leg))
        };
        if let Some(socket) = self.local_socket(address) {
            match connect(Endpoint::Local(socket)) {
                // Another brick may have the path, which has no such slice or no session, or this user no access to it.
                Err(cause) if !matches!(cause, SliceError::StaleEpoch { .. }) => {
                    let socket = socket.display();
                    tracing::debug!(%socket, %cause, "a brick is reached over tcp, not at its socket");
                }
                connected => return connected,
            }
        }
        connect(tcp::resolve(&address.tcp)?.into())
    }

    /// The socket of a brick on this machine with a pool that cannot be mapped.
    fn local_socket<'a>(&self, address: &'a BrickAddress) -> Option<&'a Path> {
        let socket = address.map_socket.as_deref().map(Path::new)?;
        let is_used = self.transport == Transport::Auto && address.buffers() && socket.exists();
        is_used.then_some(socket)
    }

    /// Connects a leg by mapping its pool in this process.
    ///
    /// # Errors
    /// When the brick is not there, refuses, or has no session left.
    pub fn map(
        &self,
        brick: BrickId,
        socket: &Path,
        slice: SliceId,
        epoch: Epoch,
    ) -> Result<MappedLeg, SliceError> {
        let (grant, link) = map::connect(socket, self.timeouts)?;
        check_brick(&unnamed(brick), grant.brick)?;
        let (number, knows_hints) = (grant.session, grant.knows_hints);
        let view = self.pool_mapping(grant)?;
        let (attached, owner, life) = link.attach(slice, epoch)?;
        let handle = view.handle(pagemesh_base::ids::ObjectId(attached.handle), slice)?;
        // A stalled brick delays writes for the same time as over TCP.
        let session = Session::new(view, number).with_owner_wait(self.timeouts.stall);
        let leg = MappedLeg::new(session, handle, epoch, Box::new(owner), life);
        let leg = leg.map(|leg| leg.with_hints(knows_hints));
        leg.map_err(|cause| SliceError::Lost(format!("no thread can watch brick {brick}: {cause}")))
    }

    /// Returns the mapping of a granted pool: the present one of this opening, or a new one.
    fn pool_mapping(&self, grant: MapGrant) -> Result<Arc<PoolMapping<MappedMedia>>, SliceError> {
        let mut views = poison::lock(&self.mappings);
        views.retain(|_, view| view.strong_count() > 0);
        let known = views.get(&grant.brick).and_then(Weak::upgrade);
        if let Some(view) = known
            && view.incarnation().0 == grant.incarnation
            && !view.is_owner_gone()
        {
            return Ok(view);
        }
        let brick = grant.brick;
        let view = Arc::new(open_mapping(grant)?);
        views.insert(brick, Arc::downgrade(&view));
        Ok(view)
    }
}

/// Maps a granted pool.
fn open_mapping(grant: MapGrant) -> Result<PoolMapping<MappedMedia>, SliceError> {
    let unusable = |cause: &dyn std::fmt::Display| {
        SliceError::Refused(format!(
            "the pool of brick {} cannot be mapped: {cause}",
            grant.brick
        ))
    };
    let size = |bytes: u64| usize::try_from(bytes).map_err(|cause| unusable(&cause));
    let (pool_bytes, control_bytes) = (size(grant.pool_bytes)?, size(grant.control_bytes)?);
    let pool = File::from(grant.pool);
    let media = MappedMedia::new(pool, pool_bytes).map_err(|cause| unusable(&cause))?;
    let block = Pool::peek(&media).map_err(|cause| unusable(&cause))?;
    let media = match block.stated {
        Some(stated) => media
            .with_stated_class(stated)
            .map_err(|cause| unusable(&cause))?,
        None => media,
    };
    if BrickId(block.pool) != grant.brick {
        return Err(unusable(&"it is another pool's file"));
    }
    if block.geometry.pool_bytes != grant.pool_bytes {
        return Err(unusable(&"its size is not as the brick says"));
    }
    let control = File::from(grant.control);
    let shared = SharedSegment::open(control, control_bytes).map_err(|cause| unusable(&cause))?;
    let control = Control::open(shared, block.geometry.journals, block.incarnation);
    let control = control.map_err(|cause| unusable(&cause))?;
    let media = Arc::new(media);
    Ok(PoolMapping::new(
        media.clone(),
        media,
        control,
        block.geometry,
        block.pool,
        block.incarnation,
    )
    .of_first_device())
}

/// How messages name a brick at this address.
fn label(id: BrickId, address: &BrickAddress) -> BrickLabel {
    let name = address.name.clone();
    BrickLabel { id, name }
}

/// The same for a brick of which only the id is known.
fn unnamed(id: BrickId) -> BrickLabel {
    BrickLabel { id, name: None }
}

fn check_brick(expected: &BrickLabel, found: BrickId) -> Result<(), SliceError> {
    if expected.id == found {
        return Ok(());
    }
    let found = unnamed(found);
    Err(SliceError::Refused(format!(
        "brick {found} answers at the address of brick {expected}"
    )))
}

impl Connector for Transports {
    fn connect(
        &self,
        brick: BrickId,
        address: &BrickAddress,
        slice: SliceId,
        epoch: Epoch,
    ) -> Result<Box<dyn Leg>, SliceError> {
        let map = |socket| {
            let leg = self.map(brick, socket, slice, epoch)?;
            Ok(Box::new(leg) as Box<dyn Leg>)
        };
        let mappable = !address.buffers();
        let socket = address.map_socket.as_deref().map(Path::new);
        match (self.transport, socket) {
            (Transport::Map, Some(socket)) => map(socket),
            (Transport::Map, None) => Err(SliceError::Refused(format!(
                "brick {} has no map socket; use the tcp transport",
                label(brick, address)
            ))),
            (Transport::Auto, Some(socket)) if mappable && socket.exists() => {
                match map(socket) {
                    // The path may belong to another brick on this machine, or this user may
                    // have no access to it.
                    Err(SliceError::Refused(_) | SliceError::Lost(_)) => {
                        self.tcp(brick, address, slice, epoch)
                    }
                    mapped => mapped,
                }
            }
            _ => self.tcp(brick, address, slice, epoch),
        }
    }
}
