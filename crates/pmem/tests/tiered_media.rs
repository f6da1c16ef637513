//! Memory in front of a disk: the syncs that reach the disk.

use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{
    DeviceEvent, DeviceLog, Disk, DiskOptions, MappedMedia, Media, NewDevice, RequestLimits,
    TieredMedia,
};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

const MEMORY: usize = 1 << 20;
const END: usize = 3 << 20;
const HEAD: usize = 8 * PAGE_BYTES;

struct Tiered {
    media: TieredMedia,
    log: Arc<DeviceLog>,
    path: PathBuf,
    _directory: TempDir,
}

impl Tiered {
    fn new() -> Tiered {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let new = |name: &str, len: usize| {
            let mut options = File::options();
            options.read(true).write(true).create_new(true);
            let file = options.open(directory.path().join(name)).expect("a file");
            file.set_len(len as u64).expect("its length");
            file
        };
        let memory = MappedMedia::new(new("memory", MEMORY), MEMORY).expect("a mapping");
        let limits = RequestLimits::default();
        let cache_bytes = 64 << 10;
        let options = DiskOptions {
            cache_bytes,
            limits,
        };
        let log = DeviceLog::of_next_devices(1);
        let disk = Arc::new(Disk::start(None, options).expect("a disk"));
        let media = TieredMedia::new(memory, disk.data());
        let device = NewDevice {
            file: new("disk", END - MEMORY),
            bytes: MEMORY..END,
            head_len: HEAD,
            frame_table: 3 * PAGE_BYTES..6 * PAGE_BYTES,
        };
        media.attach_device(device).expect("attached");
        Tiered {
            media,
            log,
            path: directory.path().join("disk"),
            _directory: directory,
        }
    }

    fn on_disk(&self, at: usize) -> u64 {
        let bytes = std::fs::read(&self.path).expect("the file");
        let word = &bytes[at - MEMORY..at - MEMORY + 8];
        u64::from_le_bytes(word.try_into().expect("8 bytes"))
    }

    fn flushes(&self) -> usize {
        let events = self.log.events();
        let ends = events.iter();
        ends.filter(|it| matches!(it, DeviceEvent::Flush { .. }))
            .count()
    }
}

#[test]
fn sync_makes_each_kind_of_store_durable() {
    let tiered = Tiered::new();
    let media = &tiered.media;
    let (in_head, in_frames) = (MEMORY + 4 * PAGE_BYTES, MEMORY + HEAD + 2 * PAGE_BYTES);
    for at in [in_head, in_frames] {
        let mut value = at as u64;
        let mut check = |store: &dyn Fn(u64)| {
            value += 1;
            store(value);
            media.sync().expect("synced");
            assert_eq!(tiered.on_disk(at), value, "byte {at}");
        };
        check(&|value| media.store(at, value));
        check(&|value| media.write(at, &value.to_le_bytes()));
        check(&|value| {
            let old = media.load(at);
            media.compare_exchange(at, old, value).expect("unchanged");
        });
        check(&|value| {
            let mut line = [0; 64];
            line[..8].copy_from_slice(&value.to_le_bytes());
            let _fenced = media.fence(media.stream_line(at, &line));
        });
    }
    let mut page = [0; PAGE_BYTES];
    page[0] = 9;
    let (_, stores) = TieredMedia::stream_page(&[(media, in_frames), (media, PAGE_BYTES)], &page);
    let _fenced = media.fence(stores);
    media.sync().expect("synced");
    assert_eq!(tiered.on_disk(in_frames), 9);
    assert_eq!(media.load(PAGE_BYTES), 9);
}

#[test]
fn sync_after_stores_to_memory_asks_no_disk() {
    let tiered = Tiered::new();
    tiered.media.sync().expect("synced");
    let before = tiered.flushes();
    assert!(before > 0, "the first sync covers an earlier process");
    for value in 0..10 {
        tiered.media.store(0, value);
        tiered.media.sync().expect("synced");
    }
    assert_eq!(tiered.flushes(), before);
    tiered.media.store(MEMORY + HEAD, 1);
    tiered.media.sync().expect("synced");
    assert!(tiered.flushes() > before);
}
