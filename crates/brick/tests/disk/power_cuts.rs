//! The device loses power at any moment of a history of writes and flushes: of its writes since the last FLUSH, any 512
//! bytes may be missing, in any order.
//!
//! The history is a real one: the brick's threads write to a file, and the device's log has each request. So two runs of a
//! seed differ in their groups, but each of the images is one that a power cut may leave.

use crate::disk::client::{Client, PAGE, Pool, SIZE, SLICE, open, open_all, options, random_write};
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{BrickControl, SliceReply, SliceRequest};
use pagemesh_brick::brick::Brick;
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_pmem::{DeviceEvent, DeviceLog};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const SECTOR: usize = 512;
const WRITES: u64 = 120;
/// Power cuts of each history, and images of each cut.
const CUTS: u64 = 12;
const IMAGES: u64 = 4;

/// The contents that each page had, with the number of the write that made it so.
pub struct PageHistory {
    pub pages: Vec<Vec<(u64, Vec<u8>)>>,
}

impl PageHistory {
    pub fn new(model: &[u8]) -> PageHistory {
        let pages = model.chunks(PAGE as usize);
        PageHistory {
            pages: pages.map(|page| vec![(0, page.to_vec())]).collect(),
        }
    }

    /// Notes the pages that a write changed.
    pub fn record(&mut self, write: u64, request: &SliceRequest, model: &[u8]) {
        let SliceRequest::Write { offset, data, .. } = request else {
            panic!("{request:?} is no write");
        };
        let end = offset + data.len() as u64;
        for page in offset / PAGE..end.div_ceil(PAGE) {
            let bytes = model[(page * PAGE) as usize..][..PAGE as usize].to_vec();
            self.pages[page as usize].push((write, bytes));
        }
    }

    /// Fails unless each page has its content of write `flushed`, or of a later write.
    fn check(&self, found: &[u8], flushed: u64, context: &str) {
        for (number, (versions, page)) in self
            .pages
            .iter()
            .zip(found.chunks(PAGE as usize))
            .enumerate()
        {
            let first = versions.iter().rposition(|(write, _)| *write <= flushed);
            let legal = &versions[first.expect("the content at the start")..];
            assert!(
                legal.iter().any(|(_, bytes)| bytes == page),
                "{context}: page {number} has none of its {} contents since write {flushed}; write {:?} made its content",
                legal.len(),
                versions
                    .iter()
                    .find(|(_, bytes)| bytes == page)
                    .map(|it| it.0),
            );
        }
    }
}

/// The devices at a power cut.
pub struct CutDisk {
    pub devices: Vec<CutDevice>,
    /// The last write that a flush has confirmed.
    pub flushed: u64,
}

pub struct CutDevice {
    /// The image with all writes before the last FLUSH.
    durable: Vec<u8>,
    /// Each sector with the contents of later writes, in their order.
    pending: BTreeMap<usize, Vec<PendingSector>>,
}

struct PendingSector {
    bytes: Vec<u8>,
    has_ended: bool,
    /// It had ended when the FLUSH began that is running.
    is_covered: bool,
}

impl CutDisk {
    pub fn new(start: &[Vec<u8>], events: &[DeviceEvent]) -> CutDisk {
        let devices = start.iter().map(|image| CutDevice {
            durable: image.clone(),
            pending: BTreeMap::new(),
        });
        let mut disk = CutDisk {
            devices: devices.collect(),
            flushed: 0,
        };
        for event in events {
            disk.apply(event);
        }
        disk
    }

    fn apply(&mut self, event: &DeviceEvent) {
        match event {
            DeviceEvent::Write {
                device,
                offset,
                bytes,
            } => {
                let first = *offset as usize / SECTOR;
                for (number, sector) in bytes.chunks(SECTOR).enumerate() {
                    let pending = &mut self.devices[*device].pending;
                    let versions = pending.entry(first + number).or_default();
                    versions.push(PendingSector {
                        bytes: sector.to_vec(),
                        has_ended: false,
                        is_covered: false,
                    });
                }
            }
            DeviceEvent::WriteEnd {
                device,
                offset,
                len,
            } => {
                let first = *offset as usize / SECTOR;
                for sector in first..first + len / SECTOR {
                    let versions = self.devices[*device].pending.get_mut(&sector);
                    // Two writes of a page are never in flight together.
                    let last = versions.and_then(|versions| versions.last_mut());
                    last.expect("a write has started").has_ended = true;
                }
            }
            DeviceEvent::FlushStart { device } => {
                let versions = self.devices[*device].pending.values_mut().flatten();
                versions.for_each(|version| version.is_covered = version.has_ended);
            }
            DeviceEvent::Flush { device } => self.devices[*device].flush(),
            DeviceEvent::Mark(write) => self.flushed = *write,
        }
    }
}

impl CutDevice {
    fn flush(&mut self) {
        for (sector, versions) in &mut self.pending {
            let covered = versions.iter().rposition(|version| version.is_covered);
            if let Some(last) = covered {
                self.durable[sector * SECTOR..][..SECTOR].copy_from_slice(&versions[last].bytes);
                versions.drain(..=last);
            }
        }
        self.pending.retain(|_, versions| !versions.is_empty());
    }

    /// An image that this cut may leave: all pending sectors, none, or some by chance.
    pub fn image(&self, kind: u64, rng: &mut SplitMix64) -> Vec<u8> {
        let mut image = self.durable.clone();
        // Of 8 sectors so many persist in some version.
        let share = [8, 0, 4, 7, 1][kind as usize % 5];
        for (sector, versions) in &self.pending {
            if rng.below(8) >= share {
                continue;
            }
            let latest = versions.len() as u64 - 1;
            let version = match kind {
                0 => latest,
                _ => rng.below(latest + 1),
            };
            image[sector * SECTOR..][..SECTOR].copy_from_slice(&versions[version as usize].bytes);
        }
        image
    }
}

/// Writes and flushes with a log of the devices. Returns the log and the contents of the pages.
fn run_history(seed: u64, path: &Path, devices: usize) -> (Arc<DeviceLog>, PageHistory) {
    let mut rng = SplitMix64::new(seed);
    let log = DeviceLog::of_next_devices(devices);
    let (brick, _maintenance) = open(path);
    let mut client = Client::new(&brick, 2);
    let mut model = client.read_all();
    let mut history = PageHistory::new(&model);
    for write in 1..=WRITES {
        let request = random_write(&mut rng, &mut client, &mut model);
        history.record(write, &request, &model);
        // A flush confirms the writes that were answered before it was sent, a durable write confirms itself as well.
        let (batch, confirmed) = match rng.below(10) {
            0 => (vec![request, SliceRequest::Flush], Some(write - 1)),
            1 => {
                let change = Box::new(request);
                (vec![SliceRequest::Durable { change }], Some(write))
            }
            _ => (vec![request], None),
        };
        let results = client.execute(batch);
        assert!(
            results.iter().all(|it| *it == Ok(SliceReply::Done)),
            "{results:?}"
        );
        if let Some(confirmed) = confirmed {
            log.mark(confirmed);
        }
    }
    (log, history)
}

/// A pool with a slice and some content.
fn made_pool(devices: usize) -> Pool {
    let home = Pool::with_devices(devices);
    let (brick, _maintenance) = open(&home.path());
    brick.create(SLICE, SIZE).expect("room");
    let mut client = Client::new(&brick, 1);
    let mut model = vec![0; SIZE as usize];
    let mut rng = SplitMix64::new(3);
    for _ in 0..64 {
        let request = random_write(&mut rng, &mut client, &mut model);
        assert_eq!(client.execute(vec![request]), [Ok(SliceReply::Done)]);
    }
    assert_eq!(
        client.execute(vec![SliceRequest::Flush]),
        [Ok(SliceReply::Done)]
    );
    home
}

/// Recovers an image and checks its pages, and recovers it once more.
fn check_image(paths: &[PathBuf], history: &PageHistory, flushed: u64, context: &str) {
    let options = OpenOptions {
        devices: paths[1..].to_vec(),
        ..options()
    };
    let (brick, _maintenance, _) =
        Brick::open_disk(&paths[0], options).unwrap_or_else(|cause| panic!("{context}: {cause}"));
    let found = Client::new(&brick, 3).read_all();
    history.check(&found, flushed, context);
    drop((brick, _maintenance));
    let (again, _maintenance) = open_all(paths);
    assert!(
        Client::new(&again, 4).read_all() == found,
        "{context}: another content after a second opening"
    );
}

fn cut_power(seed: u64, devices: usize) {
    let home = made_pool(devices);
    let start = home.images();
    let (log, history) = run_history(seed, &home.path(), devices);
    let events = log.events();
    let flushes = events
        .iter()
        .filter(|it| matches!(it, DeviceEvent::Flush { .. }))
        .count();
    assert!(flushes > 5, "{flushes} of {} requests", events.len());
    let mut rng = SplitMix64::new(seed ^ 0x5eed);
    let image_paths = home.named("cut");
    for _ in 0..CUTS {
        let cut = rng.below(events.len() as u64 + 1) as usize;
        let disk = CutDisk::new(&start, &events[..cut]);
        for kind in 0..IMAGES {
            for (number, (path, device)) in image_paths.iter().zip(&disk.devices).enumerate() {
                // Each device keeps and loses others.
                let kind = (kind + number as u64 * seed) % 5;
                std::fs::write(path, device.image(kind, &mut rng)).expect("written");
            }
            let context = format!(
                "seed {seed}, {devices} devices, after {cut} of {} requests, image {kind}",
                events.len()
            );
            check_image(&image_paths, &history, disk.flushed, &context);
        }
    }
}

/// The number of seeds; `PAGEMESH_SEEDS` for a longer campaign.
fn seeds() -> u64 {
    let given = std::env::var("PAGEMESH_SEEDS").ok();
    given.and_then(|it| it.parse().ok()).unwrap_or(2)
}

#[test]
fn power_cut_keeps_flushed_writes_of_disk() {
    for seed in 1..=seeds() {
        cut_power(seed, 1);
    }
}

#[test]
fn power_cut_keeps_flushed_writes_of_devices() {
    for seed in 1..=seeds() {
        cut_power(seed, 2 + seed as usize % 2);
    }
}
