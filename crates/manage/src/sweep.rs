//! Making and deleting slices on bricks, and the housekeeping that finishes
//! what could not be finished at once.
//!
//! Invariants: a brick is asked who it is before it is asked to do anything,
//! so that another pool at the same address is never taken for it. A slice
//! that is part of a volume is never deleted. Nothing here holds the lock
//! while it talks to a brick.

use crate::fault::Fault;
use crate::manager::{Brick, Manager, Place, places};
use crate::records::Doomed;
use crate::store::Write;
use pagemesh_base::layout::{BrickId, Segment};
use pagemesh_base::slice::{BrickControl, SliceError};
use std::collections::BTreeMap;
use std::time::Duration;

/// How often slices that could not be deleted are tried again. Returning
/// bricks are tried at once.
pub const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Slices that one pass tries to delete; the next pass goes on.
const SWEEP_SLICES_MAX: usize = 1024;
/// A request to make a slice may reach its brick this long after it was given
/// up; until then "no such slice" does not mean that there will be none. Far
/// longer than the timeouts of control connections.
const UNCERTAIN_FOR: Duration = Duration::from_secs(120);

/// Connections to bricks, opened when first needed.
struct Controls<'a> {
    manager: &'a Manager,
    open: BTreeMap<BrickId, Box<dyn BrickControl>>,
}

impl Controls<'_> {
    fn get(&mut self, brick: BrickId) -> Result<&dyn BrickControl, SliceError> {
        if !self.open.contains_key(&brick) {
            let control = self.manager.bricks.control(&self.manager.address(brick))?;
            let found = control.status()?.brick;
            if found != brick {
                return Err(SliceError::Refused(format!(
                    "another brick answers: {found}"
                )));
            }
            self.open.insert(brick, control);
        }
        Ok(self.open[&brick].as_ref())
    }
}

/// What is known of a slice after it was asked for.
enum Made {
    /// It is there.
    Yes,
    /// It is not there, or is not ours.
    No,
    /// No answer.
    Unknown,
}

impl Manager {
    fn address(&self, brick: BrickId) -> String {
        let book = self.book();
        let known = book.bricks.get(&brick);
        known.map_or_else(String::new, |brick| brick.record.address.clone())
    }

    fn controls(&self) -> Controls<'_> {
        Controls {
            manager: self,
            open: BTreeMap::new(),
        }
    }

    /// Makes the slices of segments; if one fails, deletes those made before.
    ///
    /// # Errors
    /// What the brick said.
    pub(crate) fn build(&self, segments: &[Segment]) -> Result<(), Fault> {
        let places: Vec<Place> = places(segments).collect();
        let mut controls = self.controls();
        for (at, place) in places.iter().enumerate() {
            let (made, cause) = match make(&mut controls, place) {
                (_, Ok(())) => continue,
                (made, Err(cause)) => (made, cause),
            };
            let fault = Fault::Brick {
                brick: place.brick,
                address: self.address(place.brick),
                cause,
            };
            drop(controls);
            self.undo(&places, at, &made);
            return Err(fault);
        }
        Ok(())
    }

    /// Deletes the first `failed` slices and forgets those that never were.
    fn undo(&self, places: &[Place], failed: usize, made: &Made) {
        let mut never: Vec<&Place> = places[failed + 1..].iter().collect();
        if matches!(made, Made::No) {
            never.push(&places[failed]);
        }
        let gone: Vec<_> = never
            .iter()
            .map(|place| (place.brick, place.slice))
            .collect();
        self.pardon(&gone);
        let doomed: Vec<Doomed> = places[..failed]
            .iter()
            .map(|place| Doomed {
                brick: place.brick,
                slice: place.slice,
                uncertain: false,
            })
            .collect();
        self.retire(&doomed);
    }

    /// Tries to delete slices; those that are gone are forgotten. A brick
    /// that is dead, or fails once, is left for the next pass.
    pub(crate) fn retire(&self, doomed: &[Doomed]) {
        let mut by_brick: BTreeMap<BrickId, Vec<Doomed>> = BTreeMap::new();
        for &slice in doomed {
            by_brick.entry(slice.brick).or_default().push(slice);
        }
        let alive = |brick: &BrickId| {
            let book = self.book();
            let known = book.bricks.get(brick);
            known.is_some_and(|brick| self.is_alive(brick))
        };
        let mut gone = Vec::new();
        let mut controls = self.controls();
        for (brick, slices) in by_brick {
            if !alive(&brick) {
                continue;
            }
            if let Err(cause) = self.empty(&mut controls, brick, &slices, &mut gone) {
                tracing::warn!(%brick, %cause, "cannot delete slices now; trying again later");
            }
        }
        self.pardon(&gone);
    }

    fn empty(
        &self,
        controls: &mut Controls<'_>,
        brick: BrickId,
        slices: &[Doomed],
        gone: &mut Vec<(BrickId, pagemesh_base::layout::SliceId)>,
    ) -> Result<(), SliceError> {
        let control = controls.get(brick)?;
        for doomed in slices {
            match control.delete(doomed.slice) {
                Ok(()) => gone.push((brick, doomed.slice)),
                Err(SliceError::NoSuchSlice(_)) if self.is_settled(doomed) => {
                    gone.push((brick, doomed.slice));
                }
                Err(SliceError::NoSuchSlice(_)) => {}
                Err(cause) => return Err(cause),
            }
        }
        Ok(())
    }

    fn is_settled(&self, doomed: &Doomed) -> bool {
        let book = self.book();
        let since = book.doomed.get(&(doomed.brick, doomed.slice));
        let now = self.clock.elapsed();
        !doomed.uncertain
            || since.is_none_or(|doom| now.saturating_sub(doom.since) >= UNCERTAIN_FOR)
    }

    fn pardon(&self, gone: &[(BrickId, pagemesh_base::layout::SliceId)]) {
        if gone.is_empty() {
            return;
        }
        let mut book = self.book();
        let writes: Vec<_> = gone.iter().map(|&(b, s)| Write::Pardon(b, s)).collect();
        // What stays written down is deleted again, which does no harm.
        if let Err(error) = self.store.commit(&writes) {
            tracing::error!(%error, "cannot write down which slices are deleted");
            return;
        }
        for key in gone {
            book.doomed.remove(key);
        }
    }

    /// One pass of housekeeping: tells which bricks died or returned, and
    /// tries again to delete what is left of deleted volumes.
    pub fn sweep(&self) {
        self.tell_deaths();
        let doomed: Vec<Doomed> = {
            let book = self.book();
            let idle = book.doomed.values().filter(|doom| {
                let brick = book.bricks.get(&doom.record.brick);
                brick.is_some_and(|brick| self.is_alive(brick))
                    && !book.is_building(doom.record.slice)
            });
            idle.map(|doom| doom.record)
                .take(SWEEP_SLICES_MAX)
                .collect()
        };
        self.retire(&doomed);
    }

    fn tell_deaths(&self) {
        let mut book = self.book();
        for brick in book.bricks.values_mut() {
            let alive = self.is_alive(brick);
            if alive != brick.told_alive {
                brick.told_alive = alive;
                tell(brick, alive);
            }
        }
    }
}

fn tell(brick: &Brick, alive: bool) {
    let (id, address) = (brick.record.brick, &brick.record.address);
    if alive {
        tracing::info!(brick = %id, %address, "the brick is alive");
    } else {
        tracing::warn!(brick = %id, %address, "the brick's heartbeats are missing; it counts as dead");
    }
}

fn make(controls: &mut Controls<'_>, place: &Place) -> (Made, Result<(), SliceError>) {
    let control = match controls.get(place.brick) {
        Ok(control) => control,
        Err(cause) => return (Made::No, Err(cause)),
    };
    match control.create(place.slice, place.bytes) {
        Ok(()) => (Made::Yes, Ok(())),
        Err(cause @ SliceError::Lost(_)) => (Made::Unknown, Err(cause)),
        Err(cause) => (Made::No, Err(cause)),
    }
}
