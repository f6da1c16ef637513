//! Reads of snapshots from each leg that has them, without clients.

use super::{SnapshotOracle, TakenSnapshot};
use crate::brick_host::catch_crash;
use crate::checker::{SECTOR, value_of};
use crate::scenario::Scenario;
use pagemesh_base::ids::{EPOCH_MAX, Epoch};
use pagemesh_base::layout::{Layout, LegState, STRIPE_BYTES, SliceId};
use pagemesh_base::slice::{SliceError, SliceReply, SliceRequest};
use pagemesh_brick::worker::Worker;

/// A part of a volume in a leg.
pub(super) struct LegPart {
    host: usize,
    slice: SliceId,
    /// The byte offsets in the slice and in the volume.
    slice_offset: u64,
    volume_offset: u64,
    len: u32,
}

/// The contents that a leg has of a volume.
#[derive(Clone, Copy)]
pub(super) enum LegContent {
    Snapshot(Epoch),
    /// The present contents, for a client with this epoch.
    Present(Epoch),
}

impl LegContent {
    fn request(self, part: &LegPart) -> SliceRequest {
        let (offset, len) = (part.slice_offset, part.len);
        match self {
            LegContent::Snapshot(snapshot) => SliceRequest::ReadVersion {
                snapshot,
                offset,
                len,
            },
            LegContent::Present(_) => SliceRequest::Read { offset, len },
        }
    }

    fn epoch(self) -> Epoch {
        match self {
            LegContent::Snapshot(_) => Epoch(EPOCH_MAX),
            LegContent::Present(epoch) => epoch,
        }
    }
}

impl Scenario {
    /// Reads a snapshot from all legs that run.
    pub(super) fn read_random_snapshot(
        &mut self,
        oracle: &mut SnapshotOracle,
    ) -> Result<(), String> {
        if oracle.taken.is_empty() {
            return Ok(());
        }
        let at = oracle.rng.below(oracle.taken.len() as u64) as usize;
        self.read_snapshot(&mut oracle.taken[at])
    }

    pub(super) fn read_snapshot(&mut self, taken: &mut TakenSnapshot) -> Result<(), String> {
        let Some(manager) = self.manager_host.manager() else {
            return Ok(());
        };
        let shown = manager.show_snapshot(&self.name, &taken.name);
        let (detail, _) =
            shown.map_err(|fault| format!("the snapshot {} is not shown: {fault}", taken.name))?;
        drop(manager);
        let was_read = taken.is_read();
        let content = LegContent::Snapshot(Epoch(taken.epoch));
        let legs = self.leg_parts(&detail.layout);
        if taken.first_legs.is_empty() {
            let slices = legs.iter().flatten().map(|part| part.slice);
            taken.first_legs.extend(slices);
        }
        for leg in legs {
            let name = format!("the snapshot {}", taken.name);
            self.read_leg(&leg, content, &name, &mut taken.values)?;
            let was_away = leg.iter().any(|it| !taken.first_legs.contains(&it.slice));
            if was_away {
                self.report
                    .count("snapshot read on a copy that was away", 1);
            }
        }
        self.report.count("snapshot read", 1);
        if !was_read && taken.is_read() {
            let values = taken.values.iter().flatten().copied().collect();
            self.checker.set_snapshot_values(taken.operation, values);
        }
        Ok(())
    }

    /// The parts of a volume, by in-sync leg.
    pub(super) fn leg_parts(&self, layout: &Layout) -> Vec<Vec<LegPart>> {
        let mut legs = vec![];
        for (number, segment) in layout.segments.iter().enumerate() {
            for (column, entry) in segment.columns.iter().enumerate() {
                for leg in entry.legs.iter().filter(|it| it.state == LegState::InSync) {
                    let Some(host) = self.cluster.host_of(leg.brick) else {
                        continue;
                    };
                    let starts = (0..layout.size_bytes()).step_by(STRIPE_BYTES as usize);
                    let extents = starts.flat_map(|start| {
                        let found = layout.map(start, STRIPE_BYTES);
                        let its = found
                            .into_iter()
                            .filter(|it| (it.segment, it.column) == (number, column));
                        its.map(move |it| (start, it)).collect::<Vec<_>>()
                    });
                    let parts = extents.map(|(volume_offset, extent)| LegPart {
                        host,
                        slice: leg.slice,
                        slice_offset: extent.offset,
                        volume_offset,
                        len: extent.len as u32,
                    });
                    legs.push(parts.collect());
                }
            }
        }
        legs
    }

    /// Reads a leg, and compares it with the known values. A brick that is down, or dies, tells nothing.
    pub(super) fn read_leg(
        &mut self,
        parts: &[LegPart],
        content: LegContent,
        name: &str,
        known: &mut [Option<u64>],
    ) -> Result<(), String> {
        let Some(host) = parts.first().map(|part| part.host) else {
            return Ok(());
        };
        for (part, data) in parts
            .iter()
            .zip(self.read_parts(host, parts, content, name)?)
        {
            let first = part.volume_offset / SECTOR;
            for (sector, bytes) in (first..).zip(data.chunks(SECTOR as usize)) {
                let value = value_of(bytes)
                    .map_err(|why| format!("{name} on brick {host}, sector {sector}: {why}"))?;
                let known = &mut known[sector as usize];
                if let Some(before) = known.replace(value).filter(|before| *before != value) {
                    return Err(format!(
                        "{name} changes: sector {sector} was {before}, and is {value} on brick {host}"
                    ));
                }
            }
        }
        Ok(())
    }

    fn read_parts(
        &self,
        host: usize,
        parts: &[LegPart],
        content: LegContent,
        name: &str,
    ) -> Result<Vec<Vec<u8>>, String> {
        let Some(running) = self.cluster.running_brick(host) else {
            return Ok(vec![]);
        };
        let opened = catch_crash(|| Worker::open(&running.brick, 1, 1));
        let Ok(Ok(mut worker)) = opened else {
            if opened.is_err() {
                self.cluster.crash_brick(host);
            }
            return Ok(vec![]);
        };
        let read = catch_crash(|| {
            let Some(part) = parts.first() else {
                return Ok(vec![]);
            };
            let (handle, _) = worker.attach(part.slice, content.epoch())?;
            let data =
                parts.iter().map(
                    |part| match worker.execute(handle, content.request(part))? {
                        SliceReply::Data(data) => Ok(data),
                        _ => Err(SliceError::Refused("no data".into())),
                    },
                );
            data.collect::<Result<Vec<_>, SliceError>>()
        });
        let has_closed = catch_crash(|| drop(worker)).is_ok();
        if read.is_err() || !has_closed {
            self.cluster.crash_brick(host);
            return Ok(vec![]);
        }
        if running.disk_failure().is_some() {
            return Ok(vec![]);
        }
        match read {
            Ok(Ok(data)) => Ok(data),
            Ok(Err(cause)) => Err(format!("{name} cannot be read on brick {host}: {cause}")),
            Err(_) => Ok(vec![]),
        }
    }
}
