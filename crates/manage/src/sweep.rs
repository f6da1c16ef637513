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
use pagemesh_base::layout::{BrickId, Segment, SliceId};
use pagemesh_base::slice::{BrickControl, SliceError};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

/// How often slices that could not be deleted are tried again. Returning
/// bricks are tried at once.
pub const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Slices that one pass tries to delete; the next pass goes on.
const SWEEP_SLICES_MAX: usize = 1024;
/// A request to make a slice may be carried out this long after its brick was
/// first seen to answer without having the slice; until then "no such slice"
/// does not mean that there will be none. Counted from an answer and not from
/// the request, because a brick that stood still finds old requests in its
/// sockets when it goes on. Far longer than the timeouts of connections.
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

/// What a failed attempt to make a slice may have left.
enum Trace {
    /// Nothing of ours: the brick was not asked, or the slice is another's.
    None,
    /// Perhaps a slice, and nothing will follow: the brick has answered.
    Settled,
    /// Perhaps a slice, now or later: there was no answer.
    Open,
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
            let Err((trace, cause)) = make(&mut controls, place) else {
                continue;
            };
            let fault = Fault::Brick {
                brick: place.brick,
                address: self.address(place.brick),
                cause,
            };
            drop(controls);
            self.undo(&places, at, &trace);
            return Err(fault);
        }
        Ok(())
    }

    /// Deletes the slices up to the one that failed and forgets those that
    /// were never asked for.
    fn undo(&self, places: &[Place], failed: usize, trace: &Trace) {
        let (asked, never) = match trace {
            Trace::None => (failed, failed),
            Trace::Settled => (failed + 1, failed + 1),
            Trace::Open => (failed, failed + 1),
        };
        let key = |place: &Place| (place.brick, place.slice);
        let never: Vec<_> = places[never..].iter().map(key).collect();
        self.pardon(&never);
        let doomed = |place: &Place| Doomed {
            brick: place.brick,
            slice: place.slice,
            uncertain: false,
        };
        let asked: Vec<_> = places[..asked].iter().map(doomed).collect();
        self.retire(&asked);
    }

    /// Tries to delete slices; those that are gone are forgotten. A brick
    /// that is dead or gets lost is left for the next pass. Once the store has
    /// failed, nothing is deleted any more: it may name as part of a volume
    /// what memory still has as doomed.
    pub(crate) fn retire(&self, doomed: &[Doomed]) {
        if self.store.has_failed() {
            return;
        }
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
        gone: &mut Vec<(BrickId, SliceId)>,
    ) -> Result<(), SliceError> {
        let control = controls.get(brick)?;
        for doomed in slices {
            let slice = doomed.slice;
            match control.delete(slice) {
                Ok(()) => gone.push((brick, slice)),
                Err(SliceError::NoSuchSlice(_)) if self.stays_away(doomed) => {
                    gone.push((brick, slice));
                }
                Err(SliceError::NoSuchSlice(_)) => {}
                Err(cause @ SliceError::Lost(_)) => return Err(cause),
                // One slice that cannot go must not keep the others.
                Err(cause) => {
                    tracing::warn!(%brick, %slice, %cause, "cannot delete a slice; trying again later");
                }
            }
        }
        Ok(())
    }

    /// Whether a slice that its brick does not have will not appear later.
    fn stays_away(&self, doomed: &Doomed) -> bool {
        if !doomed.uncertain {
            return true;
        }
        let now = self.clock.elapsed();
        let mut book = self.book();
        let Some(doom) = book.doomed.get_mut(&(doomed.brick, doomed.slice)) else {
            return true;
        };
        let since = *doom.absent_since.get_or_insert(now);
        now.saturating_sub(since) >= UNCERTAIN_FOR
    }

    fn pardon(&self, gone: &[(BrickId, SliceId)]) {
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
        let doomed = self.next_to_retire();
        self.retire(&doomed);
    }

    /// The doomed slices that can be tried now. Each pass begins behind the
    /// last one of the pass before, so that slices that cannot be deleted do
    /// not keep others waiting for ever.
    fn next_to_retire(&self) -> Vec<Doomed> {
        let mut book = self.book();
        let behind = book.swept_to.map_or(Bound::Unbounded, Bound::Excluded);
        let up_to = book.swept_to.map(Bound::Included);
        let later = book.doomed.range((behind, Bound::Unbounded));
        let earlier = up_to.map(|to| book.doomed.range((Bound::Unbounded, to)));
        let next: Vec<Doomed> = later
            .chain(earlier.into_iter().flatten())
            .map(|(_, doom)| doom.record)
            .filter(|record| {
                let brick = book.bricks.get(&record.brick);
                brick.is_some_and(|brick| self.is_alive(brick)) && !book.is_building(record.slice)
            })
            .take(SWEEP_SLICES_MAX)
            .collect();
        book.swept_to = next.last().map(|record| (record.brick, record.slice));
        next
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

fn make(controls: &mut Controls<'_>, place: &Place) -> Result<(), (Trace, SliceError)> {
    let control = controls
        .get(place.brick)
        .map_err(|cause| (Trace::None, cause))?;
    control.create(place.slice, place.bytes).map_err(|cause| {
        let trace = match cause {
            SliceError::Lost(_) => Trace::Open,
            SliceError::SliceExists(_) => Trace::None,
            // A brick that could not make a slice durable may have it still.
            _ => Trace::Settled,
        };
        (trace, cause)
    })
}
