//! Connections of clients to the model bricks.

use super::{Connection, Fabric};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::poison;
use pagemesh_base::slice::{Leg, SliceCompletion, SliceError, SliceRequest};
use pagemesh_volume::{BrickAddress, Connector};
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::time::Instant;

struct FakeLeg {
    fabric: Fabric,
    number: u64,
}

impl Leg for FakeLeg {
    fn submit(&mut self, tag: u64, request: SliceRequest) {
        let mut bricks = poison::lock(&self.fabric.0);
        let at_once = bricks.is_synchronous;
        let connection = bricks
            .connections
            .get_mut(&self.number)
            .expect("connection");
        let lost = connection.lost;
        let (brick, slice) = (connection.brick, connection.slice);
        if lost {
            let result = Err(SliceError::Lost("the connection broke before".into()));
            connection.arrived.push(SliceCompletion::new(tag, result));
        } else if at_once {
            let result = bricks.execute(brick, slice, self.number, request);
            let connection = bricks
                .connections
                .get_mut(&self.number)
                .expect("connection");
            connection.arrived.push(SliceCompletion::new(tag, result));
        } else {
            connection.queue.push_back((tag, request));
        }
    }

    fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
        let mut bricks = poison::lock(&self.fabric.0);
        let connection = bricks
            .connections
            .get_mut(&self.number)
            .expect("connection");
        into.append(&mut connection.arrived);
    }

    fn poll_closed(&mut self) -> Option<SliceError> {
        let bricks = poison::lock(&self.fabric.0);
        let connection = bricks.connections.get(&self.number).expect("connection");
        let is_idle = connection.arrived.is_empty();
        (connection.lost && is_idle).then(|| SliceError::Lost("the connection broke".into()))
    }

    fn poll_fds(&self, _into: &mut Vec<RawFd>) {}

    fn now(&self) -> Option<Instant> {
        let bricks = poison::lock(&self.fabric.0);
        bricks.clock.filter(|_| !bricks.is_synchronous)
    }
}

impl Drop for FakeLeg {
    /// The brick may still do requests that were sent.
    fn drop(&mut self) {
        let mut bricks = poison::lock(&self.fabric.0);
        let at_once = bricks.is_synchronous;
        let connection = bricks
            .connections
            .get_mut(&self.number)
            .expect("connection");
        connection.orphan = true;
        if connection.lost {
            bricks.connections.remove(&self.number);
        } else if at_once {
            bricks.break_connection(self.number);
        }
    }
}

impl Connector for Fabric {
    fn connect(
        &self,
        brick: BrickId,
        _address: &BrickAddress,
        slice: SliceId,
        epoch: Epoch,
    ) -> Result<Box<dyn Leg>, SliceError> {
        let mut bricks = poison::lock(&self.0);
        let present = bricks.bricks.get(&brick).filter(|brick| brick.up);
        let Some(present) = present else {
            return Err(SliceError::Lost("no process listens".into()));
        };
        let model = present
            .slices
            .get(&slice)
            .ok_or(SliceError::NoSuchSlice(slice))?;
        if epoch.0 < model.epoch() {
            let current = Epoch(model.epoch());
            return Err(SliceError::StaleEpoch { current });
        }
        if bricks.connections_of(brick).len() >= bricks.bricks[&brick].sessions_max {
            return Err(SliceError::NoSession("all sessions are in use".into()));
        }
        bricks.next += 1;
        let number = bricks.next;
        let connection = Connection {
            brick,
            slice,
            epoch,
            orphan: false,
            lost: false,
            superseded: false,
            keeps_order: false,
            is_broken: false,
            queue: VecDeque::new(),
            answers: VecDeque::new(),
            arrived: vec![],
        };
        bricks.connections.insert(number, connection);
        Ok(Box::new(FakeLeg {
            fabric: self.clone(),
            number,
        }))
    }
}
