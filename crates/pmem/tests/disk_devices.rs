//! A disk of several devices.

use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::unreadable::PATTERN;
use pagemesh_pmem::{
    DeviceEvent, DeviceFault, DeviceLog, DevicePlan, Disk, DiskMedia, DiskOptions, MapError, Media,
    NewDevice, PlannedRequest, RequestLimits,
};
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

const MEGABYTE: usize = 1 << 20;
/// Bytes before the frames of each device.
const HEAD: usize = 8 * PAGE_BYTES;
/// Bytes of the head that may leave memory.
const TABLE: Range<usize> = 3 * PAGE_BYTES..6 * PAGE_BYTES;
/// The second device begins behind a gap, the third at the second's end.
const PLACES: [Range<usize>; 3] = [
    0..MEGABYTE,
    2 * MEGABYTE..3 * MEGABYTE,
    3 * MEGABYTE..4 * MEGABYTE,
];

struct Files(TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir_in("/var/tmp").expect("a directory"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A locked new file.
    fn create(&self, name: &str, len: usize) -> File {
        let mut options = File::options();
        options.read(true).write(true).create_new(true);
        let file = options.open(self.path(name)).expect("a file");
        file.set_len(len as u64).expect("its length");
        file.try_lock().expect("its lock");
        file
    }

    fn is_locked(&self, name: &str) -> bool {
        let file = File::open(self.path(name)).expect("the file");
        file.try_lock().is_err()
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).expect("the file")
    }

    fn device(&self, name: &str, bytes: Range<usize>) -> NewDevice {
        NewDevice {
            file: self.create(name, bytes.len()),
            bytes,
            head_len: HEAD,
            frame_table: TABLE,
        }
    }
}

fn options() -> DiskOptions {
    DiskOptions {
        // Sixteen pages.
        cache_bytes: 64 << 10,
        limits: RequestLimits::default(),
    }
}

/// A disk with the devices "0", "1" and "2".
fn disk(files: &Files) -> DiskMedia {
    disk_with(files, options())
}

fn disk_with(files: &Files, options: DiskOptions) -> DiskMedia {
    let [first, others @ ..] = PLACES;
    let first = files.device("0", first);
    let disk = Disk::start(Some(first), options).expect("a disk");
    let data = Arc::new(disk).data();
    for (name, place) in ["1", "2"].into_iter().zip(others) {
        let device = files.device(name, place);
        data.attach_device(device).expect("attached");
    }
    data
}

/// The content of a page of the disk.
fn content(page: usize) -> [u8; PAGE_BYTES] {
    [(page % 251) as u8 + 1; PAGE_BYTES]
}

fn pages(place: &Range<usize>) -> Range<usize> {
    place.start / PAGE_BYTES..place.end / PAGE_BYTES
}

fn write(media: &DiskMedia, page: usize, bytes: &[u8; PAGE_BYTES]) {
    let (_, stores) = DiskMedia::stream_page(&[(media, page * PAGE_BYTES)], bytes);
    let _fenced = media.fence(stores);
}

fn read(media: &DiskMedia, page: usize) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    media.read(page * PAGE_BYTES, &mut bytes);
    bytes
}

#[test]
fn pages_lie_on_their_devices() {
    let files = Files::new();
    let data = disk(&files);
    assert_eq!(data.len_bytes(), PLACES[2].end);
    let overlay = data.disk().overlay();
    for page in PLACES.iter().flat_map(pages) {
        write(&data, page, &content(page));
    }
    data.sync().expect("synced");
    for (name, place) in ["0", "1", "2"].into_iter().zip(&PLACES) {
        let found = files.bytes(name);
        for (page, bytes) in pages(place).zip(found.chunks(PAGE_BYTES)) {
            assert!(bytes == content(page), "page {page} of device {name}");
        }
    }
    // Words of a head and of a frame, in the data view and over it.
    for place in &PLACES {
        for at in [place.start + 64, place.end - 64] {
            overlay.store(at, 7);
            data.store(at, 9);
            data.compare_exchange(at, 9, 11).expect("9");
            assert_eq!((overlay.load(at), data.load(at)), (7, 11));
        }
    }
    data.sync().expect("synced");
    let last = files.bytes("2");
    assert_eq!(last[64..72], 11u64.to_le_bytes());
    assert_eq!(last[MEGABYTE - 64..][..8], 11u64.to_le_bytes());
}

#[test]
fn loads_end_with_their_device() {
    let files = Files::new();
    let data = disk(&files);
    for page in PLACES.iter().flat_map(pages) {
        write(&data, page, &content(page));
    }
    data.sync().expect("synced");
    let mut io = data.async_io().expect("requests").expect("a disk");
    // On both sides of the border of two devices.
    let border = PLACES[2].start / PAGE_BYTES;
    let wanted: Vec<usize> = (border - 4..border).collect();
    let frames = border + HEAD / PAGE_BYTES;
    let wanted = wanted.into_iter().chain(frames..frames + 4);
    let offsets: Vec<usize> = wanted.map(|page| page * PAGE_BYTES).collect();
    io.reload(1, &offsets);
    io.submit();
    let mut ended = Vec::new();
    while ended.is_empty() {
        io.poll(&mut ended);
        std::thread::yield_now();
    }
    assert!(matches!(ended[..], [(1, Ok(()))]));
    for offset in offsets {
        let page = offset / PAGE_BYTES;
        assert!(read(&data, page) == content(page), "page {page}");
    }
}

#[test]
fn flush_reaches_devices_that_were_written() {
    let files = Files::new();
    let log = DeviceLog::of_next_devices(3);
    let data = disk(&files);
    data.sync().expect("synced");
    let flushed = |from: usize| {
        let events = log.events();
        let mut devices: Vec<usize> = events[from..]
            .iter()
            .filter_map(|event| match event {
                DeviceEvent::Flush { device } => Some(*device),
                _ => None,
            })
            .collect();
        devices.sort_unstable();
        (devices, events.len())
    };
    let (first, seen) = flushed(0);
    assert_eq!(first, [0, 1, 2], "what an earlier process wrote");
    write(&data, PLACES[2].end / PAGE_BYTES - 1, &content(0));
    data.sync().expect("synced");
    assert_eq!(flushed(seen).0, [0, 2]);
}

#[test]
fn device_leaves_and_another_takes_its_bytes() {
    let files = Files::new();
    let data = disk(&files);
    let place = PLACES[2].clone();
    for page in pages(&place) {
        write(&data, page, &content(page));
    }
    assert!(files.is_locked("2"));
    data.detach_device(place.start).expect("detached");
    assert!(!files.is_locked("2"));
    assert_eq!(data.len_bytes(), place.end);
    for page in pages(&place) {
        let found = read(&data, page);
        assert!(
            found
                .as_chunks()
                .0
                .iter()
                .all(|word| *word == PATTERN.to_le_bytes())
        );
    }
    let again = data.detach_device(place.start);
    assert!(matches!(again, Err(MapError::NoDeviceAt(_))), "{again:?}");
    data.attach_device(files.device("3", place.clone()))
        .expect("attached");
    for page in pages(&place) {
        assert!(read(&data, page) == [0; PAGE_BYTES], "page {page}");
        write(&data, page, &content(page + 1));
    }
    data.sync().expect("synced");
    let found = files.bytes("3");
    let mut written = pages(&place).zip(found.chunks(PAGE_BYTES));
    assert!(written.all(|(page, bytes)| bytes == content(page + 1)));
    assert_eq!(data.disk().failure(), None);
}

#[test]
fn device_at_a_wrong_place_is_refused() {
    let files = Files::new();
    let data = disk(&files);
    let short = NewDevice {
        bytes: 4 * MEGABYTE..6 * MEGABYTE,
        ..files.device("short", 4 * MEGABYTE..5 * MEGABYTE)
    };
    let refused = data.attach_device(short);
    assert!(
        matches!(refused, Err(MapError::TooShort { .. })),
        "{refused:?}"
    );
    for (number, place) in [
        MEGABYTE..2 * MEGABYTE,
        3 * MEGABYTE..5 * MEGABYTE,
        4 * MEGABYTE..4 * MEGABYTE + 5,
    ]
    .into_iter()
    .enumerate()
    {
        let refused = data.attach_device(files.device(&format!("bad{number}"), place));
        assert!(
            matches!(refused, Err(MapError::BadDevicePlace { .. })),
            "{refused:?}"
        );
    }
    assert_eq!(data.len_bytes(), PLACES[2].end);
}

/// Readers look at a device that leaves, and writers use the others.
#[test]
fn requests_go_on_while_devices_change() {
    let files = Files::new();
    let data = Arc::new(disk(&files));
    let place = PLACES[2].clone();
    let is_over = Arc::new(AtomicBool::new(false));
    let reader = {
        let (data, place, is_over) = (data.clone(), place.clone(), is_over.clone());
        std::thread::spawn(move || {
            let mut io = data.async_io().expect("requests").expect("a disk");
            let mut round = 0;
            while !is_over.load(Ordering::Relaxed) {
                for page in pages(&place) {
                    let found = data.load(page * PAGE_BYTES + 8);
                    let expected = u64::from_le_bytes([content(page)[0]; 8]);
                    assert!(
                        [0, PATTERN, expected].contains(&found),
                        "{found:#x} in page {page}"
                    );
                }
                round += 1;
                let offsets: Vec<usize> = pages(&place).map(|page| page * PAGE_BYTES).collect();
                io.load(round, &offsets);
                io.submit();
                let mut ended = Vec::new();
                while ended.is_empty() {
                    io.poll(&mut ended);
                    std::thread::yield_now();
                }
            }
        })
    };
    let writer = {
        let (data, is_over) = (data.clone(), is_over.clone());
        std::thread::spawn(move || {
            let own: Vec<usize> = PLACES[..2].iter().flat_map(pages).collect();
            while !is_over.load(Ordering::Relaxed) {
                for &page in &own {
                    write(&data, page, &content(page));
                }
                data.sync().expect("synced");
                for &page in &own {
                    assert!(read(&data, page) == content(page), "page {page}");
                }
            }
        })
    };
    for round in 0..20 {
        for page in pages(&place) {
            write(&data, page, &content(page));
        }
        data.detach_device(place.start).expect("detached");
        let device = files.device(&format!("next{round}"), place.clone());
        data.attach_device(device).expect("attached");
    }
    is_over.store(true, Ordering::Relaxed);
    reader.join().expect("no panic");
    writer.join().expect("no panic");
    assert_eq!(data.disk().failure(), None);
}

#[test]
fn devices_are_flushed_also_without_threads() {
    let files = Files::new();
    let plans = [(); 3].map(|()| DevicePlan::of_next_device());
    let log = DeviceLog::of_next_devices(3);
    plans.iter().for_each(|plan| plan.refuse_threads());
    let data = disk(&files);
    for round in 0..3 {
        for place in &PLACES {
            write(&data, place.end / PAGE_BYTES - 1, &content(round));
        }
        data.sync().expect("synced");
    }
    let events = log.events();
    let flushes = |wanted: usize| {
        let is_it = |event: &&DeviceEvent| matches!(event, DeviceEvent::Flush { device } if *device == wanted);
        events.iter().filter(is_it).count()
    };
    assert_eq!([0, 1, 2].map(flushes), [3, 3, 3]);
}

/// A defect panics on a thread of the disk: syncs fail, and do not wait for ever.
#[test]
fn panic_of_a_thread_fails_the_disk() {
    for request in [PlannedRequest::Write, PlannedRequest::Flush] {
        for broken in 0..3 {
            let files = Files::new();
            let plans = [(); 3].map(|()| DevicePlan::of_next_device());
            let data = disk(&files);
            plans[broken].add(request, 0..u64::MAX, 1, DeviceFault::Panic);
            write(&data, PLACES[broken].end / PAGE_BYTES - 1, &content(1));
            for _ in 0..2 {
                let synced = data.sync();
                assert!(matches!(synced, Err(MapError::SyncFailed)), "{synced:?}");
            }
            let cause = data.disk().failure().expect("a failed disk");
            assert!(cause.contains("panicked"), "{cause}");
        }
    }
}

/// Reads more frames than the cache has pages.
fn read_other_frames(data: &DiskMedia) {
    for place in &PLACES {
        for page in pages(place).skip(HEAD / PAGE_BYTES + 64).take(32) {
            read(data, page);
        }
    }
}

#[test]
fn pages_loaded_ahead_are_cached() {
    for refuses_io_uring in [false, true] {
        let files = Files::new();
        let plans = [(); 3].map(|()| DevicePlan::of_next_device());
        if refuses_io_uring {
            plans.iter().for_each(|plan| plan.refuse_io_uring());
        }
        let data = disk(&files);
        let first = |device: usize| PLACES[device].start / PAGE_BYTES + HEAD / PAGE_BYTES;
        let wanted = [first(0), first(0) + 1, first(1) + 5, first(2)];
        for page in wanted {
            write(&data, page, &content(page));
        }
        data.sync().expect("synced");
        read_other_frames(&data);
        let offsets = wanted.map(|page| page * PAGE_BYTES);
        assert!(!offsets.iter().any(|&at| data.is_cached(at)));
        // It cannot be read once, and then it can.
        plans[1].add(PlannedRequest::Read, 0..u64::MAX, 1, DeviceFault::Error(5));
        data.load_ahead(&offsets);
        assert!(offsets.iter().all(|&at| data.is_cached(at)));
        assert!(
            wanted
                .iter()
                .all(|&page| read(&data, page) == content(page))
        );
        assert_eq!(data.unreadable_pages(), []);
    }
}

#[test]
fn frame_table_leaves_memory_and_comes_back() {
    let files = Files::new();
    let data = disk(&files);
    let overlay = data.disk().overlay();
    let words = || PLACES.iter().map(|place| place.start + TABLE.start + 800);
    for at in words() {
        overlay.store(at, 5);
        data.store(at, at as u64);
    }
    data.sync().expect("synced");
    for (name, word) in ["0", "1", "2"].into_iter().zip(words()) {
        let at = TABLE.start + 800;
        assert_eq!(files.bytes(name)[at..at + 8], word.to_le_bytes());
    }
    read_other_frames(&data);
    assert!(!words().any(|at| data.is_cached(at)));
    assert!(words().all(|at| data.load(at) == at as u64 && overlay.load(at) == 5));
    // The head around it stays.
    let around = [TABLE.start - 8, TABLE.end].into_iter();
    let mut around = around.flat_map(|at| PLACES.iter().map(move |place| place.start + at));
    assert!(around.all(|at| data.load(at) == 0 && data.is_cached(at)));
}

#[test]
fn unreadable_frame_table_fails_the_disk() {
    let files = Files::new();
    let plan = DevicePlan::of_next_device();
    let data = disk(&files);
    let table = TABLE.start as u64..TABLE.end as u64;
    plan.add(PlannedRequest::Read, table, 1, DeviceFault::Error(5));
    data.load(TABLE.start);
    let cause = data.disk().failure().expect("a failed disk");
    assert!(cause.contains("journals or tables"), "{cause}");
    assert_eq!(data.unreadable_pages(), []);
}

#[test]
fn overlay_loads_runs_of_the_frame_table() {
    let files = Files::new();
    let plans = [(); 3].map(|()| DevicePlan::of_next_device());
    // The cache has 64 pages, and a run three.
    let cache_bytes = 64 * PAGE_BYTES;
    let data = disk_with(
        &files,
        DiskOptions {
            cache_bytes,
            ..options()
        },
    );
    let words =
        |device: usize| [0, 1, 2].map(|it| PLACES[device].start + TABLE.start + it * PAGE_BYTES);
    let overlay = data.disk().overlay();
    for device in 0..2 {
        let [first, second, third] = words(device);
        assert_eq!(overlay.load(second), 0);
        assert!([first, third].iter().all(|&at| data.is_cached(at)));
        data.store(third, 7);
        assert_eq!(overlay.load(third), 7, "a store is lost");
    }
    // A neighbour that cannot be read does not fail the disk.
    let [first, second, _] = words(2);
    let bad = (TABLE.start + PAGE_BYTES) as u64..(TABLE.start + 2 * PAGE_BYTES) as u64;
    plans[2].add(PlannedRequest::Read, bad, 1, DeviceFault::Error(5));
    assert_eq!(overlay.load(first), 0);
    assert!(plans[2].befallen() == 1 && !data.is_cached(second));
    assert_eq!(data.disk().failure(), None);
    assert_eq!(overlay.load(second), 0);
}
