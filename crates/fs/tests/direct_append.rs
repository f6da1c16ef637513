//! Files that direct clients extend, with a crash after every change of the space. The mounted file
//! has the state before or after the operation in progress.

use crate::support;
use bytes::Bytes;
use pagemesh_base::space::Request;
use pagemesh_fs::{AllocateMode, Attr, CreateKind, Fs, FsError, Ino, IoChannel};
use rustix::io::Errno;
use std::sync::Arc;
use support::direct_client::{TestDirectClient, WriteEnd, write_record};
use support::lossy::LossySpace;
use support::memory::{MemorySpace, wait};
use support::pool::PoolSpace;
use support::{OWNER, clock, mount_and_free, mount_with_leftovers, new_fs, new_fs_with_limit};

const SIZE: u64 = support::direct_client::MEMORY_BYTES;
const PAGE: u64 = 4096;

struct AppendFile {
    fs: Fs,
    channel: IoChannel,
    ino: Ino,
    direct_client: Arc<TestDirectClient>,
}

impl AppendFile {
    fn opened((fs, port): (Fs, IoChannel), ino: Ino) -> AppendFile {
        // Its file map outlives a close.
        fs.lookup_ino(ino).unwrap();
        fs.open(ino).unwrap();
        AppendFile {
            fs,
            channel: port,
            ino,
            direct_client: Arc::default(),
        }
    }

    fn new(memory: &MemorySpace) -> AppendFile {
        AppendFile::made(new_fs(memory))
    }

    fn made((fs, port): (Fs, IoChannel)) -> AppendFile {
        let attr = fs
            .create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER)
            .unwrap();
        AppendFile::opened((fs, port), attr.ino)
    }

    /// Whether direct clients may extend the file.
    fn grant_append(&self) -> bool {
        let guests = Arc::clone(&self.direct_client);
        let shown = self
            .fs
            .publish_file_map_for_append(self.ino, || Some(guests))
            .unwrap();
        shown.is_some() && self.direct_client.0.lock().unwrap().growth.is_some()
    }

    fn check(&mut self, model: &[u8], at: &str) {
        if let Err(found) = self.compare(&[model]) {
            panic!("{at}: {found}");
        }
    }

    /// Whether the content is one of these.
    fn compare(&mut self, models: &[&[u8]]) -> Result<(), String> {
        let attr = self.fs.attr(self.ino).unwrap();
        let found = self
            .fs
            .read(&mut self.channel, self.ino, 0, 1 << 23)
            .unwrap();
        if found.len() as u64 != attr.size {
            return Err(format!("{} of {} bytes", found.len(), attr.size));
        }
        if models.iter().any(|model| found == *model) {
            Ok(())
        } else {
            Err(format!("it has {} bytes, and others", found.len()))
        }
    }
}

/// Random numbers from a seed.
struct TestRandom(pagemesh_fuzz::Random);

impl TestRandom {
    fn new(seed: u64) -> TestRandom {
        TestRandom(pagemesh_fuzz::Random::new(seed))
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0.draw() % end
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        (0..len).map(|_| 1 + self.below(255) as u8).collect()
    }
}

fn overwrite(model: &mut Vec<u8>, offset: usize, data: &[u8]) {
    model.resize(model.len().max(offset + data.len()), 0);
    model[offset..offset + data.len()].copy_from_slice(data);
}

/// Checks the image after each change of the last operation.
fn crash_everywhere(memory: &MemorySpace, from: usize, models: [&[u8]; 2], ino: Ino, at: &str) {
    for steps in from..=memory.steps() {
        let at = format!("{at}, after change {steps}");
        let old = memory.after_steps(steps);
        let mut file = AppendFile::opened(mount_with_leftovers(&old), ino);
        if let Err(found) = file.compare(&models) {
            panic!("{at}, mounted: {found}");
        }
        while file.fs.free_deferred_piece() {}
        if let Err(found) = file.compare(&models) {
            panic!("{at}, finished: {found}");
        }
        assert!(!file.fs.attr(ino).unwrap().has_volatile_size, "{at}");
        check_pages(&old, &file.fs);
        // Bytes from behind the end do not reappear.
        let size = file.fs.attr(ino).unwrap().size;
        file.fs
            .set_size(&mut file.channel, ino, size + 9000)
            .unwrap();
        let more = file.fs.read(&mut file.channel, ino, size, 9000).unwrap();
        assert!(more.iter().all(|&byte| byte == 0), "{at}");
    }
}

/// Every mapped page is counted; all other counted pages are unwritten.
fn check_pages(memory: &MemorySpace, fs: &Fs) {
    let used = fs.usage().used_bytes / PAGE;
    let unwritten = used.checked_sub(memory.mapped_pages() as u64);
    assert!(unwritten.is_some_and(|pages| pages < 100), "{used} in use");
}

fn run_ops(seed: u64, operations: usize, crashes: bool) -> (u64, u64) {
    let mut random = TestRandom::new(seed);
    let memory = MemorySpace::new(SIZE);
    let mut file = AppendFile::new(&memory);
    let mut model: Vec<u8> = Vec::new();
    let (mut by_guest, mut lent) = (0, 0);
    for number in 0..operations {
        let before = model.clone();
        let steps = memory.steps();
        let len = [1, 16, 100, 100, 4070, 4096, 4120, 9000][random.below(8) as usize];
        let data = random.bytes(len);
        let end = model.len() as u64;
        let what = random.below(21);
        let at = format!("seed {seed}, operation {number}, {what} of {len} at {end}");
        match what {
            0..12 => {
                let back = match what {
                    10.. => random.below(end % PAGE + 1),
                    _ => 0,
                };
                let ending = match random.below(12) {
                    0 => WriteEnd::DiesAfterWrite,
                    1 => WriteEnd::DiesBeforeWrite,
                    _ => WriteEnd::Completed,
                };
                let is_lent = |guests: &TestDirectClient| {
                    let told = guests.0.lock().unwrap();
                    !told.is_outdated && told.growth.is_some()
                };
                lent += u64::from(!is_lent(&file.direct_client) && file.grant_append());
                if file
                    .direct_client
                    .write(&memory.shared(), back, &data, ending)
                {
                    by_guest += 1;
                    if ending != WriteEnd::DiesBeforeWrite {
                        overwrite(&mut model, (end - back) as usize, &data);
                    }
                } else {
                    file.fs
                        .write(
                            &mut file.channel,
                            file.ino,
                            None,
                            &data.clone().into(),
                            false,
                        )
                        .unwrap();
                    model.extend(&data);
                    file.grant_append();
                }
            }
            12 => {
                let offset = random.below(end + 1) / PAGE * PAGE;
                let data = &data[..data.len().min(4096)];
                let bytes = Bytes::from(data.to_vec());
                file.fs
                    .write(&mut file.channel, file.ino, Some(offset), &bytes, false)
                    .unwrap();
                overwrite(&mut model, offset as usize, data);
            }
            13 => {
                let bytes = Bytes::from(data.clone());
                file.fs
                    .write(&mut file.channel, file.ino, None, &bytes, false)
                    .unwrap();
                model.extend(&data);
            }
            14 => {
                let size = random.below(end + 1) as usize;
                file.fs
                    .set_size(&mut file.channel, file.ino, size as u64)
                    .unwrap();
                model.truncate(size);
            }
            15 => {
                let size = (end + random.below(300)).next_multiple_of(random.below(2) + 1);
                file.fs.set_size(&mut file.channel, file.ino, size).unwrap();
                model.resize(size as usize, 0);
            }
            16 => {
                // Preallocated space that is invisible, and then gone.
                let how = AllocateMode::Reserve { keep_size: true };
                file.fs
                    .allocate(&mut file.channel, file.ino, how, end, 10_000)
                    .unwrap();
                file.fs.set_size(&mut file.channel, file.ino, end).unwrap();
            }
            17 => {
                file.fs.release(file.ino);
                assert!(!file.fs.attr(file.ino).unwrap().has_volatile_size, "{at}");
                file.fs.open(file.ino).unwrap();
            }
            18 => {
                file.fs
                    .set_attr(
                        file.ino,
                        pagemesh_fs::AttrChanges {
                            mode: Some(0o640),
                            ..Default::default()
                        },
                    )
                    .unwrap();
            }
            19 => {
                // Up to the end, which direct clients may have moved.
                let first = end.saturating_sub(data.len() as u64);
                let part = (first, Bytes::from(data[..(end - first) as usize].to_vec()));
                let parts = [part];
                let (port, ino) = (&mut file.channel, file.ino);
                let written = file.fs.write_atomic(port, ino, &parts, || true);
                assert_eq!(written.is_ok(), end > 0, "{at}");
                overwrite(&mut model, first as usize, &parts[0].1);
            }
            _ => {
                drop(file.channel);
                drop(file.fs);
                file = AppendFile::opened(mount_and_free(&memory), file.ino);
            }
        }
        file.check(&model, &at);
        if crashes {
            crash_everywhere(&memory, steps, [&before, &model], file.ino, &at);
        }
    }
    (by_guest, lent)
}

#[test]
fn direct_and_mount_writes_share_one_file() {
    let lives = (0..20).map(|seed| run_ops(seed, 400, false));
    let (by_guest, lent) = lives.fold((0, 0), |all, life| (all.0 + life.0, all.1 + life.1));
    assert!(
        by_guest > 2000 && lent > 500,
        "{by_guest} by direct clients, {lent}"
    );
}

#[test]
fn crash_during_append_keeps_a_consistent_file() {
    let lives = (100..120).map(|seed| run_ops(seed, 60, true));
    let (by_guest, _) = lives.fold((0, 0), |all, life| (all.0 + life.0, all.1 + life.1));
    assert!(by_guest > 300, "{by_guest} by direct clients");
}

/// The machine loses power at each fence of direct clients' and the mount's writes. Returns the
/// number of mounted images.
fn run_ops_in_pool(seed: u64, operations: usize) -> usize {
    const POOL_BYTES: usize = 96 << 20;
    /// Most images of one fence.
    const IMAGES_MAX: u64 = 4;
    let mut random = TestRandom::new(seed);
    let pooled = PoolSpace::new(POOL_BYTES, SIZE / 2, false);
    let mut file = AppendFile::made(pooled.mount());
    let mut model: Vec<u8> = Vec::new();
    pooled.crash_points();
    let mut images = 0;
    for number in 0..operations {
        let before = model.clone();
        let len = [1, 100, 4070, 4096, 4120, 13_000][random.below(6) as usize];
        let data = random.bytes(len);
        let end = model.len() as u64;
        let what = random.below(10);
        let at = format!("seed {seed}, operation {number}, {what} of {len} at {end}");
        let back = random.below(end % PAGE + 1) * (what % 2);
        match what {
            0..7 if file.grant_append()
                && file
                    .direct_client
                    .write(&pooled.shared(), back, &data, WriteEnd::Completed) =>
            {
                overwrite(&mut model, (end - back) as usize, &data);
            }
            7 => {
                let size = random.below(end + 1);
                file.fs.set_size(&mut file.channel, file.ino, size).unwrap();
                model.truncate(size as usize);
            }
            8 => {
                file.fs.release(file.ino);
                file.fs.open(file.ino).unwrap();
            }
            _ => {
                let bytes = Bytes::from(data.clone());
                file.fs
                    .write(&mut file.channel, file.ino, None, &bytes, false)
                    .unwrap();
                model.extend(&data);
            }
        }
        file.check(&model, &at);
        let points = pooled.crash_points();
        let last = points.len() - 1;
        for (point, crash) in points.iter().enumerate() {
            for image in crash.images(IMAGES_MAX, IMAGES_MAX, seed + point as u64) {
                images += 1;
                let left = PoolSpace::recover(image, false);
                let mut found = AppendFile::opened(left.mount(), file.ino);
                let models: [&[u8]; 2] = [&before, &model];
                // Acknowledged data is in the file.
                let models = &models[usize::from(point == last)..];
                if let Err(found) = found.compare(models) {
                    panic!("{at}, fence {point} of {last}: {found}");
                }
                let used = found.fs.usage().used_bytes / PAGE;
                let unwritten = used.checked_sub(left.mapped_pages());
                assert!(unwritten.is_some_and(|pages| pages < 100), "{at}");
            }
        }
    }
    images
}

#[test]
fn power_failure_at_each_fence_of_appends() {
    let images: usize = (200..206).map(|seed| run_ops_in_pool(seed, 30)).sum();
    assert!(images > 1000, "{images} images");
}

/// A partial record over several pages, after two crashes, is discarded.
#[test]
fn lower_of_two_footers_wins() {
    let memory = MemorySpace::new(SIZE);
    let mut file = AppendFile::new(&memory);
    let mut model = vec![7; 100];
    file.fs
        .write(
            &mut file.channel,
            file.ino,
            None,
            &model.clone().into(),
            false,
        )
        .unwrap();
    assert!(file.grant_append());
    assert!(
        file.direct_client
            .write(&memory.shared(), 0, &[8; 50], WriteEnd::Completed)
    );
    model.extend([8; 50]);
    let place = file.direct_client.0.lock().unwrap().spans[0] * PAGE;
    let first = memory.page(place / PAGE).to_vec();
    assert!(
        file.direct_client
            .write(&memory.shared(), 0, &[9; 9000], WriteEnd::DiesAfterWrite)
    );
    write_record(&memory.shared(), place, &first);
    file.check(&model, "torn");
    let mut file = AppendFile::opened(mount_and_free(&memory), file.ino);
    file.check(&model, "mounted");
    check_pages(&memory, &file.fs);
}

/// A program maps the file, and the pool has no room to publish its size.
#[test]
fn mmap_store_past_old_end_survives_failed_publish() {
    let memory = MemorySpace::new(SIZE);
    let mut file = AppendFile::new(&memory);
    let mut model = vec![7; 5000];
    file.fs
        .write(
            &mut file.channel,
            file.ino,
            None,
            &model.clone().into(),
            false,
        )
        .unwrap();
    assert!(file.grant_append());
    let appended = [8; 9000];
    assert!(
        file.direct_client
            .write(&memory.shared(), 0, &appended, WriteEnd::Completed)
    );
    model.extend(appended);
    memory.set_room(Some(0));
    let barred = file.fs.disable_direct_access(file.ino);
    assert_eq!(barred.unwrap_err().errno(), Errno::NOSPC);
    memory.set_room(None);
    let data = Bytes::from(vec![9; PAGE as usize]);
    file.fs
        .buffer_mmap_write(&mut file.channel, file.ino, 2 * PAGE, &data)
        .unwrap();
    overwrite(&mut model, 2 * PAGE as usize, &data);
    file.check(&model, "held");
    file.fs.sync(&mut file.channel, file.ino).unwrap();
    let mut left = AppendFile::opened(mount_and_free(&memory.snapshot()), file.ino);
    left.check(&model, "synced");
}

/// Deleting a file frees its append extent, too.
#[test]
fn deleted_append_file_frees_its_granted_pages() {
    let memory = MemorySpace::new(SIZE);
    let empty = new_fs(&MemorySpace::new(SIZE)).0.usage().used_bytes;
    let file = AppendFile::new(&memory);
    let bytes = Bytes::from(vec![1; 5000]);
    let mut port = file.fs.open_channel().unwrap();
    file.fs
        .write(&mut port, file.ino, None, &bytes, false)
        .unwrap();
    assert!(file.grant_append());
    assert!(
        file.direct_client
            .write(&memory.shared(), 0, &[9; 9000], WriteEnd::Completed)
    );
    file.fs.unlink(Ino::ROOT, b"file").unwrap();
    let (left, _) = mount_and_free(&memory.snapshot());
    check_pages(&memory, &file.fs);
    file.fs.forget(file.ino, 2);
    file.fs.release(file.ino);
    for fs in [&left, &file.fs] {
        assert_eq!(fs.usage().inodes, 2);
        assert_eq!(fs.usage().used_bytes, empty);
    }
    check_pages(&memory, &file.fs);
}

/// The lookup of a file that a crash left with an append extent reads its pages, and may fail.
#[test]
fn failed_lookup_keeps_no_reference() {
    let memory = MemorySpace::new(SIZE);
    let mut file = AppendFile::new(&memory);
    let data = Bytes::from(vec![1; 5000]);
    file.fs
        .write(&mut file.channel, file.ino, None, &data, false)
        .unwrap();
    assert!(file.grant_append());
    let space = LossySpace::new(&memory.snapshot());
    let fs = Fs::mount(Arc::new(space.clone()), wait, clock).unwrap();
    type LookupCall = fn(&Fs, Ino) -> Result<Attr, FsError>;
    let asks: [LookupCall; 3] = [
        |fs, _| fs.lookup(Ino::ROOT, b"file"),
        |fs, ino| fs.lookup_ino(ino),
        |fs, ino| fs.open(ino),
    ];
    for ask in asks {
        space.refuse_requests(|request| matches!(request, Request::Extents { .. }), 1);
        let refused = ask(&fs, file.ino).unwrap_err();
        assert_eq!((refused.errno(), space.refusals_left()), (Errno::IO, 0));
    }
    fs.unlink(Ino::ROOT, b"file").unwrap();
    while fs.free_deferred_piece() {}
    assert_eq!(fs.usage().inodes, 2);
}

/// Append space counts as used, so none is granted without room.
#[test]
fn limit_holds_for_granted_append_space() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs_with_limit(&memory, 1 << 20);
    let attr = fs
        .create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER)
        .unwrap();
    let mut data = vec![1; 600 << 10];
    let bytes = Bytes::from(data.clone());
    fs.write(&mut port, attr.ino, None, &bytes, false).unwrap();
    let mut file = AppendFile::opened((fs, port), attr.ino);
    assert!(!file.grant_append(), "a span of 512 KiB does not fit");
    assert!(
        !file
            .direct_client
            .write(&memory.shared(), 0, &[2; 100], WriteEnd::Completed)
    );
    file.fs
        .set_size(&mut file.channel, file.ino, 50_000)
        .unwrap();
    data.truncate(50_000);
    assert!(file.grant_append());
    let used = file.fs.usage().used_bytes;
    assert!(
        file.direct_client
            .write(&memory.shared(), 0, &[2; 100], WriteEnd::Completed)
    );
    data.extend([2; 100]);
    assert_eq!(file.fs.usage().used_bytes, used);
    file.check(&data, "lent");
    file.fs.release(file.ino);
    assert!(file.fs.usage().used_bytes < used);
    file.check(&data, "settled");
}

/// The kernel would discard a size that it asked for before the notification, and a seek to the end
/// would find an earlier one.
#[test]
fn kernel_is_not_notified_during_direct_appends() {
    let memory = MemorySpace::new(SIZE);
    let mut file = AppendFile::new(&memory);
    assert!(file.grant_append());
    let append = |file: &AppendFile| {
        let space = memory.shared();
        assert!(
            file.direct_client
                .write(&space, 0, &[2; 100], WriteEnd::Completed)
        );
        *file.direct_client.1.lock().unwrap() = Some(support::clock());
    };
    append(&file);
    assert_eq!(file.fs.collect_direct_writes(), []);
    append(&file);
    assert_eq!(file.fs.collect_direct_writes(), []);
    let data = Bytes::from(vec![2; 100]);
    file.fs
        .write(&mut file.channel, file.ino, None, &data, false)
        .unwrap();
    // The published size includes earlier writes.
    assert_eq!(file.fs.collect_direct_writes(), [file.ino]);
    file.check(&[2; 300], "settled");
    assert_eq!(file.fs.collect_direct_writes(), []);
}

/// A program that opens many files in sequence finds a file map for each. The number of maps kept
/// for closed files is bounded.
#[test]
fn file_maps_of_closed_files_are_bounded() {
    const FILES: usize = 1100;
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let mut boards = Vec::new();
    for number in 0..FILES {
        let name = format!("file-{number}");
        let attr = fs.create(Ino::ROOT, name.as_bytes(), CreateKind::File, 0o600, OWNER);
        let ino = attr.unwrap().ino;
        fs.lookup_ino(ino).unwrap();
        fs.open(ino).unwrap();
        let data = Bytes::from(vec![7; 5000]);
        fs.write(&mut port, ino, Some(0), &data, false).unwrap();
        let guests: Arc<TestDirectClient> = Arc::default();
        let shown = fs.publish_file_map(ino, || Some(guests.clone())).unwrap();
        assert!(shown.is_some(), "{number}");
        drop(shown);
        *guests.1.lock().unwrap() = Some(support::clock());
        fs.release(ino);
        boards.push((ino, guests));
    }
    let is_kept = |guests: &Arc<TestDirectClient>| Arc::strong_count(guests) > 1;
    let kept = boards.iter().filter(|(_, guests)| is_kept(guests)).count();
    assert_eq!(kept, 1024);
    // A released map blocks its clients, and its writes are recorded.
    let (ino, gone) = boards.iter().find(|(_, guests)| !is_kept(guests)).unwrap();
    assert_eq!(gone.0.lock().unwrap().closed, 1);
    assert!(fs.collect_direct_writes().contains(ino));
    fs.open(*ino).unwrap();
    let anew: Arc<TestDirectClient> = Arc::default();
    assert!(
        fs.publish_file_map(*ino, || Some(anew.clone()))
            .unwrap()
            .is_some()
    );
    assert_eq!(anew.0.lock().unwrap().closed, 0);
    assert_eq!(fs.read(&mut port, *ino, 0, 1 << 20).unwrap(), [7; 5000]);
}
