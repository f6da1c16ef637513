//! The meters of all channels of a volume, or of all connections of a brick.

use super::meter::ChannelMeter;
use super::totals::Totals;
use pagemesh_base::poison;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

/// A source of sums that another thread may read at any time.
pub trait ReadTotals: Send + Sync + 'static {
    /// The sums so far.
    fn totals(&self) -> Totals;
}

impl ReadTotals for ChannelMeter {
    fn totals(&self) -> Totals {
        ChannelMeter::totals(self)
    }
}

/// The meters in use, and the sums of closed ones. Each operation counts once in
/// [`MeterSet::totals`], also while a meter closes.
#[derive(Default)]
pub struct MeterSet {
    state: Mutex<MeterSetState>,
}

#[derive(Default)]
struct MeterSetState {
    open: Vec<Arc<dyn ReadTotals>>,
    closed: Totals,
}

/// A meter in a set, until this is dropped. Its owner is the only writer.
pub struct OpenMeter<M: ReadTotals = ChannelMeter> {
    set: Arc<MeterSet>,
    meter: Arc<M>,
}

impl MeterSet {
    /// Adds a new meter to the set.
    #[must_use]
    pub fn open(self: &Arc<MeterSet>) -> OpenMeter {
        self.open_with(ChannelMeter::default())
    }

    /// Adds a meter to the set.
    #[must_use]
    pub fn open_with<M: ReadTotals>(self: &Arc<MeterSet>, meter: M) -> OpenMeter<M> {
        let meter = Arc::new(meter);
        poison::lock(&self.state).open.push(meter.clone());
        OpenMeter {
            set: Arc::clone(self),
            meter,
        }
    }

    /// The sums of all meters that are, or were, in the set.
    #[must_use]
    pub fn totals(&self) -> Totals {
        let state = poison::lock(&self.state);
        let mut totals = state.closed.clone();
        for meter in &state.open {
            totals.merge(&meter.totals());
        }
        totals
    }
}

impl<M: ReadTotals> Deref for OpenMeter<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.meter
    }
}

impl<M: ReadTotals> Drop for OpenMeter<M> {
    fn drop(&mut self) {
        let mut state = poison::lock(&self.set.state);
        state.closed.merge(&self.meter.totals());
        let own = Arc::as_ptr(&self.meter).cast::<()>();
        state
            .open
            .retain(|meter| Arc::as_ptr(meter).cast::<()>() != own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpKind;

    #[test]
    fn closed_meter_stays_in_the_totals() {
        let set: Arc<MeterSet> = Arc::default();
        let (first, second) = (set.open(), set.open());
        first.count(OpKind::Read, 1);
        second.count(OpKind::Read, 2);
        drop(first);
        second.count(OpKind::Read, 4);
        let read = |set: &MeterSet| {
            let totals = set.totals();
            (totals.of(OpKind::Read).ops, totals.of(OpKind::Read).bytes)
        };
        assert_eq!(read(&set), (3, 7));
        drop(second);
        assert_eq!(read(&set), (3, 7));
    }
}
