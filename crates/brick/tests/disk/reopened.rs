//! A further device fails under load: the brick opens its pool again without it, in the same process.

use crate::disk::client::{Client, PAGE, Pool, SIZE, SLICE, open, options, random_write};
use crate::disk::pool_devices::find;
use crate::disk::power_cuts::{CutDisk, PageHistory};
use pagemesh_base::poison::lock;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{BrickControl, SliceError, SliceReply, SliceRequest};
use pagemesh_brick::brick::{Brick, DeviceFailures, MaintenanceThread};
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file;
use pagemesh_brick::pool_devices::DeviceStatus;
use pagemesh_pmem::{DeviceFault, DeviceLog, DevicePlan, DiskMedia, PlannedRequest, RequestLimits};
use pagemesh_store::devices::DeviceState;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, Barrier, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uuid::Uuid;

const EVERYTHING: Range<u64> = 0..u64::MAX;
const EIO: i32 = 5;
const ENXIO: i32 = 6;
const ENOSPC: i32 = 28;
/// The device that fails, of [`DEVICES`].
const FAILING: usize = 1;
const DEVICES: usize = 3;
/// Writes before the failure.
const WRITES: u64 = 600;

/// The contents of a slice that a client has written and flushed.
#[derive(Clone)]
struct Model {
    /// The bytes that were flushed last, and those with the writes after them.
    flushed: Vec<u8>,
    written: Vec<u8>,
}

/// A brick with a client that writes until its brick has failed.
struct LoadedBrick {
    home: Pool,
    device: Uuid,
    plans: Vec<Arc<DevicePlan>>,
    brick: Arc<Brick<DiskMedia>>,
    maintenance: MaintenanceThread<DiskMedia>,
    model: Arc<Mutex<Model>>,
    load: JoinHandle<()>,
}

fn limits() -> OpenOptions {
    // A loaded machine reaches neither.
    let request_limits = RequestLimits {
        slow: Duration::from_secs(1),
        fail: Duration::from_secs(5),
    };
    OpenOptions {
        request_limits,
        ..options()
    }
}

impl LoadedBrick {
    /// Calls `fail` after some writes.
    fn start(fail: impl FnOnce(&[Arc<DevicePlan>]) + Send + 'static) -> LoadedBrick {
        LoadedBrick::start_with(limits(), fail)
    }

    fn start_with(
        options: OpenOptions,
        fail: impl FnOnce(&[Arc<DevicePlan>]) + Send + 'static,
    ) -> LoadedBrick {
        let home = Pool::with_devices(DEVICES);
        let plans: Vec<_> = (0..DEVICES).map(|_| DevicePlan::of_next_device()).collect();
        let opened = Brick::open_disk(&home.path(), options);
        let (brick, maintenance, _) = opened.expect("a brick");
        brick.create(SLICE, SIZE).expect("room");
        let block = file::read_superblock(&home.path()).expect("a pool");
        let device = block.geometry.devices.iter().next().expect("a device").id;
        let start = vec![0; SIZE as usize];
        let model = Arc::new(Mutex::new(Model {
            flushed: start.clone(),
            written: start,
        }));
        let (shared, client, planned) = (model.clone(), Client::new(&brick, 1), plans.clone());
        let load = std::thread::spawn(move || write_until_lost(client, &shared, || fail(&planned)));
        LoadedBrick {
            home,
            device,
            plans,
            brick,
            maintenance,
            model,
            load,
        }
    }

    fn wait_until_failed(&self) {
        let end = Instant::now() + Duration::from_secs(120);
        while !self.brick.has_failed() {
            assert!(Instant::now() < end, "the brick goes on");
            std::thread::yield_now();
        }
    }

    /// Waits for the failure, and opens the pool again without the device. Requests may hang meanwhile.
    fn reopen(self) -> ReopenedBrick {
        let mut failures = earlier_failure(self.device);
        let reopened = self.reopen_after(&mut failures);
        let status = find(&reopened.brick, reopened.before.device).expect("it is listed");
        assert_eq!(status.state, DeviceState::Failed);
        reopened
    }

    /// The same, with or without the device.
    fn reopen_after(self, failures: &mut DeviceFailures) -> ReopenedBrick {
        self.wait_until_failed();
        assert!(self.brick.can_reopen());
        let opened = self.brick.reopen(&self.home.path(), &limits(), failures);
        let (brick, maintenance, _) = opened.expect("the other devices are sound");
        ReopenedBrick {
            before: self,
            brick,
            maintenance,
        }
    }
}

/// A failure of the device, shortly before.
fn earlier_failure(device: Uuid) -> DeviceFailures {
    let mut failures = DeviceFailures::default();
    assert!(failures.note(device, Instant::now()));
    failures
}

fn is_lost(result: &Result<SliceReply, SliceError>) -> bool {
    matches!(result, Err(SliceError::Lost(_)))
}

/// The pages that a write touches.
fn pages_of(write: &SliceRequest) -> Range<u64> {
    let SliceRequest::Write { offset, data, .. } = write else {
        panic!("{write:?} is no write");
    };
    offset / PAGE..(offset + data.len() as u64).div_ceil(PAGE)
}

fn whole_pages(client: &mut Client, pages: Range<u64>, bytes: &[u8]) -> SliceRequest {
    let range = (pages.start * PAGE) as usize..(pages.end * PAGE) as usize;
    SliceRequest::Write {
        offset: pages.start * PAGE,
        data: bytes[range].to_vec().into(),
        stamp: client.stamp(),
    }
}

/// Writes and flushes; reads too, so that each kind of request reaches the devices.
fn write_until_lost(mut client: Client, model: &Mutex<Model>, fail: impl FnOnce()) {
    let mut rng = SplitMix64::new(43);
    let mut fail = Some(fail);
    for round in 0.. {
        if round == WRITES
            && let Some(fail) = fail.take()
        {
            fail();
        }
        let write = random_write(&mut rng, &mut client, &mut lock(model).written);
        let offset = rng.below(SIZE / PAGE) * PAGE;
        let len = PAGE as u32;
        client.execute(vec![SliceRequest::Read { offset, len }]);
        let pages = pages_of(&write);
        let mut results = client.execute(vec![write, SliceRequest::Flush]);
        if let Err(SliceError::Damaged { .. }) = results[0] {
            // A part of a page that cannot be read: the volume engine writes the whole page.
            let whole = whole_pages(&mut client, pages, &lock(model).written);
            results = client.execute(vec![whole, SliceRequest::Flush]);
        }
        if results.contains(&Ok(SliceReply::Done)) && !results.iter().any(is_lost) {
            assert_eq!(results, [Ok(SliceReply::Done), Ok(SliceReply::Done)]);
            let mut model = lock(model);
            model.flushed = model.written.clone();
            continue;
        }
        assert!(results.iter().any(is_lost), "{results:?}");
        break;
    }
    // Nothing is executed after the failure, and later syncs fail too.
    let write = random_write(&mut rng, &mut client, &mut vec![0; SIZE as usize]);
    let read = SliceRequest::Read {
        offset: 0,
        len: PAGE as u32,
    };
    let results = client.execute(vec![write, read, SliceRequest::Flush]);
    assert!(results.iter().all(is_lost), "{results:?}");
}

/// The brick after the failure, beside the one before.
struct ReopenedBrick {
    before: LoadedBrick,
    brick: Arc<Brick<DiskMedia>>,
    maintenance: MaintenanceThread<DiskMedia>,
}

impl ReopenedBrick {
    /// Ends the requests that hang, and the brick before.
    fn end_before(
        self,
    ) -> (
        Pool,
        Uuid,
        Arc<Brick<DiskMedia>>,
        MaintenanceThread<DiskMedia>,
    ) {
        let LoadedBrick {
            home,
            device,
            plans,
            brick,
            maintenance,
            load,
            ..
        } = self.before;
        plans.iter().for_each(|plan| plan.clear());
        load.join().expect("no panic");
        drop((brick, maintenance));
        (home, device, self.brick, self.maintenance)
    }
}

fn read_page(client: &mut Client, page: u64) -> Result<Vec<u8>, SliceError> {
    let read = SliceRequest::Read {
        offset: page * PAGE,
        len: PAGE as u32,
    };
    match client.execute(vec![read]).remove(0) {
        Ok(SliceReply::Data(found)) => Ok(found),
        Err(cause) => Err(cause),
        other => panic!("page {page}: {other:?}"),
    }
}

fn page_of(bytes: &[u8], page: u64) -> &[u8] {
    &bytes[(page * PAGE) as usize..][..PAGE as usize]
}

/// Each page is as it was flushed or written last, or damaged. Returns the damaged ones.
fn damaged_pages(client: &mut Client, model: &Model) -> Vec<u64> {
    let mut damaged = Vec::new();
    for page in 0..SIZE / PAGE {
        match read_page(client, page) {
            Ok(found) => {
                let known = [&model.flushed, &model.written].map(|it| page_of(it, page));
                assert!(
                    known.contains(&&found[..]),
                    "page {page} is older than its flush"
                );
            }
            Err(SliceError::Damaged { .. }) => damaged.push(page),
            Err(cause) => panic!("page {page}: {cause}"),
        }
    }
    damaged
}

/// Writes pages as the volume engine repairs them from another copy.
fn repair(client: &mut Client, pages: &[u64], bytes: &[u8]) {
    for &page in pages {
        let write = whole_pages(client, page..page + 1, bytes);
        assert_eq!(client.execute(vec![write]), [Ok(SliceReply::Done)]);
    }
}

/// A device fails: the pool goes on, and all that was flushed elsewhere is there, also after a second opening.
fn check_failure(fail: impl FnOnce(&[Arc<DevicePlan>]) + Send + 'static) {
    let reopened = LoadedBrick::start(fail).reopen();
    let mut client = Client::new(&reopened.brick, 2);
    let mut model = lock(&reopened.before.model).clone();
    let damaged = damaged_pages(&mut client, &model);
    let pages = (SIZE / PAGE) as usize;
    assert!((10..pages - 10).contains(&damaged.len()), "{damaged:?}");
    // The pool gets room for the repair while requests of the brick before may hang.
    let other = reopened.before.home.directory.path().join("other");
    let added = reopened.brick.add_device(&other, Some(3 << 20));
    added.expect("a new device");
    repair(&mut client, &damaged, &model.flushed);
    let kept: HashSet<u64> = damaged.into_iter().collect();
    for page in 0..SIZE / PAGE {
        if !kept.contains(&page) {
            let found = read_page(&mut client, page).expect("sound");
            model.flushed[(page * PAGE) as usize..][..PAGE as usize].copy_from_slice(&found);
        }
    }
    model.written = model.flushed.clone();
    assert_eq!(
        client.execute(vec![SliceRequest::Flush]),
        [Ok(SliceReply::Done)]
    );
    let (home, device, brick, maintenance) = reopened.end_before();
    assert_eq!(damaged_pages(&mut client, &model), []);
    drop(client);
    maintenance.stop();
    drop(brick);
    let (brick, _maintenance) = open(&home.path());
    assert_eq!(damaged_pages(&mut Client::new(&brick, 3), &model), []);
    let status = find(&brick, device).expect("it is listed");
    assert_eq!(status.state, DeviceState::Failed);
}

fn on_device(request: PlannedRequest, fault: DeviceFault) -> impl FnOnce(&[Arc<DevicePlan>]) {
    move |plans| plans[FAILING].add(request, EVERYTHING, u64::MAX, fault)
}

#[test]
fn brick_goes_on_after_failed_write_of_further_device() {
    check_failure(on_device(PlannedRequest::Write, DeviceFault::Error(EIO)));
}

#[test]
fn brick_goes_on_after_short_write_of_further_device() {
    check_failure(on_device(PlannedRequest::Write, DeviceFault::Short(512)));
}

#[test]
fn brick_goes_on_while_further_device_is_full() {
    check_failure(on_device(PlannedRequest::Write, DeviceFault::Error(ENOSPC)));
}

#[test]
fn brick_goes_on_after_failed_flush_of_further_device() {
    check_failure(on_device(PlannedRequest::Flush, DeviceFault::Error(EIO)));
}

#[test]
fn brick_goes_on_when_further_device_is_gone() {
    check_failure(|plans| plans[FAILING].fail_all(ENXIO));
}

#[test]
fn brick_goes_on_without_further_device_of_bad_sectors() {
    check_failure(on_device(PlannedRequest::Read, DeviceFault::Error(EIO)));
}

#[test]
fn brick_goes_on_while_requests_of_further_device_hang() {
    let kinds = [
        PlannedRequest::Read,
        PlannedRequest::Write,
        PlannedRequest::Flush,
    ];
    let check = |kind| move || check_failure(on_device(kind, DeviceFault::Hang));
    let checks = kinds.map(|kind| std::thread::spawn(check(kind)));
    for check in checks {
        check.join().expect("no panic");
    }
}

/// Waits until the brick has failed and its disk has no write in flight.
fn wait_until_quiet(brick: &Brick<DiskMedia>) {
    let disk = brick.mapping().media().disk();
    disk.hand_over(Duration::from_secs(60), |_| false)
        .expect("sound devices");
}

/// A history of writes over a failure. Numbers of writes go on from one client to the next.
struct CutHistory {
    log: Arc<DeviceLog>,
    pages: PageHistory,
    model: Vec<u8>,
    write: u64,
    /// The pages of the last write.
    last: Range<u64>,
    rng: SplitMix64,
}

impl CutHistory {
    /// Repeats the last write, which had no answer: no later flush confirms it.
    fn repeat_last(&mut self, client: &mut Client) {
        self.write += 1;
        let write = whole_pages(client, self.last.clone(), &self.model);
        self.pages.record(self.write, &write, &self.model);
        assert_eq!(client.execute(vec![write]), [Ok(SliceReply::Done)]);
    }

    /// Writes, and flushes one time in three. True: the brick has failed.
    fn write(&mut self, client: &mut Client) -> bool {
        self.write += 1;
        let write = random_write(&mut self.rng, client, &mut self.model);
        self.last = pages_of(&write);
        // Whole pages: a part of a damaged page is refused.
        let write = whole_pages(client, self.last.clone(), &self.model);
        self.pages.record(self.write, &write, &self.model);
        let (is_flushed, confirmed) = (self.rng.below(3) == 0, self.write - 1);
        let mut batch = vec![write];
        batch.extend(is_flushed.then_some(SliceRequest::Flush));
        let results = client.execute(batch);
        if results.iter().any(is_lost) {
            return true;
        }
        assert!(
            results.iter().all(|it| *it == Ok(SliceReply::Done)),
            "{results:?}"
        );
        if is_flushed {
            self.log.mark(confirmed);
        }
        false
    }

    /// Checks the pages of a brick that was opened after a cut. `reopened` is the last write before the failure.
    fn check(&self, client: &mut Client, flushed: u64, reopened: Option<u64>, context: &str) {
        for (number, versions) in self.pages.pages.iter().enumerate() {
            let first = versions.iter().rposition(|(write, _)| *write <= flushed);
            let legal = &versions[first.expect("the content at the start")..];
            match read_page(client, number as u64) {
                Ok(found) => assert!(
                    legal.iter().any(|(_, bytes)| *bytes == found),
                    "{context}: page {number} has none of its contents since write {}, but of {:?}; flushed {flushed}, {reopened:?}",
                    legal[0].0,
                    versions
                        .iter()
                        .filter(|(_, bytes)| *bytes == found)
                        .map(|it| it.0)
                        .collect::<Vec<_>>(),
                ),
                Err(SliceError::Damaged { .. }) => assert!(
                    reopened.is_some_and(|last| legal[0].0 <= last),
                    "{context}: page {number} of write {} is damaged",
                    legal[0].0
                ),
                Err(cause) => panic!("{context}: page {number}: {cause}"),
            }
        }
    }
}

/// A device fails and the brick goes on, without it or with it once more; then the power fails at any moment, before, within
/// or after the opening.
fn cut_power_around_failure(seed: u64, is_again: bool) {
    let home = Pool::with_devices(DEVICES);
    let start = home.images();
    let log = DeviceLog::of_next_devices(DEVICES);
    let plans: Vec<_> = (0..DEVICES).map(|_| DevicePlan::of_next_device()).collect();
    let (brick, maintenance) = open(&home.path());
    brick.create(SLICE, SIZE).expect("room");
    let model = vec![0; SIZE as usize];
    let mut history = CutHistory {
        log: log.clone(),
        pages: PageHistory::new(&model),
        model,
        write: 0,
        last: 0..0,
        rng: SplitMix64::new(seed),
    };
    let created = log.events().len();
    let mut client = Client::new(&brick, 1);
    for _ in 0..200 {
        assert!(!history.write(&mut client));
    }
    plans[FAILING].add(
        PlannedRequest::Write,
        EVERYTHING,
        if is_again { 1 } else { u64::MAX },
        DeviceFault::Error(EIO),
    );
    while !history.write(&mut client) {}
    wait_until_quiet(&brick);
    let failed_at = (log.events().len(), history.write);
    let device = file::read_superblock(&home.path()).expect("a pool");
    let device = device.geometry.devices.iter().next().expect("a device").id;
    let mut failures = match is_again {
        true => DeviceFailures::default(),
        false => earlier_failure(device),
    };
    log.follow_next_devices(if is_again { &[0, 1, 2] } else { &[0, 2] });
    let reopened = brick.reopen(&home.path(), &options(), &mut failures);
    let (next, next_maintenance, _) = reopened.expect("a brick");
    let mut next_client = Client::new(&next, 2);
    history.repeat_last(&mut next_client);
    for _ in 0..60 {
        assert!(!history.write(&mut next_client));
    }
    let events = log.events();
    drop((client, next_client));
    drop((brick, maintenance, next, next_maintenance));
    let mut rng = SplitMix64::new(seed ^ 0x5eed);
    let paths = home.named("cut");
    let mut states = HashSet::new();
    for turn in 0..24 {
        // Half of the cuts lie within the opening and shortly after it.
        let first = [created, failed_at.0][turn % 2];
        let span = [events.len() - created, (events.len() - failed_at.0) / 2][turn % 2];
        let cut = first + rng.below(span as u64 + 1) as usize;
        let disk = CutDisk::new(&start, &events[..cut]);
        for (path, device) in paths.iter().zip(&disk.devices) {
            std::fs::write(path, device.image(rng.below(5), &mut rng)).expect("written");
        }
        let (at, count) = (failed_at.0, events.len());
        let context = format!("seed {seed}, after {cut} of {count} requests, failure after {at}");
        let named = OpenOptions {
            devices: paths[1..].to_vec(),
            ..options()
        };
        let opened = Brick::open_disk(&paths[0], named);
        let (brick, _maintenance, _) = opened.unwrap_or_else(|cause| panic!("{context}: {cause}"));
        let has_failed = brick
            .devices()
            .iter()
            .any(|it| it.state == DeviceState::Failed);
        let reopened = has_failed.then_some(failed_at.1);
        assert!(cut >= failed_at.0 || !has_failed, "{context}");
        states.insert(has_failed);
        let mut client = Client::new(&brick, 3);
        history.check(&mut client, disk.flushed, reopened, &context);
    }
    let count = if is_again { 1 } else { 2 };
    assert_eq!(
        states.len(),
        count,
        "the device has failed in some images only"
    );
}

#[test]
fn power_cut_around_failure_keeps_flushed_writes() {
    for seed in 1..=2 {
        cut_power_around_failure(seed, false);
    }
}

#[test]
fn power_cut_around_second_chance_keeps_flushed_writes() {
    for seed in 3..=4 {
        cut_power_around_failure(seed, true);
    }
}

/// The errors of all devices that a brick has survived.
fn errors_of(brick: &Brick<DiskMedia>) -> Vec<u64> {
    let devices = brick.devices();
    let is_dated = |it: &DeviceStatus| it.last_error_age.is_some() == (it.errors > 0);
    assert!(devices.iter().all(is_dated), "{devices:?}");
    devices.iter().map(|it| it.errors).collect()
}

fn state_of(brick: &Brick<DiskMedia>, device: Uuid) -> DeviceState {
    find(brick, device).expect("it is listed").state
}

#[test]
fn device_with_an_error_is_used_once_more() {
    let once = |plans: &[Arc<DevicePlan>]| {
        plans[FAILING].add(
            PlannedRequest::Write,
            EVERYTHING,
            1,
            DeviceFault::Error(EIO),
        );
    };
    let loaded = LoadedBrick::start(once);
    let mut failures = DeviceFailures::default();
    loaded.wait_until_failed();
    let plans: Vec<_> = (0..DEVICES).map(|_| DevicePlan::of_next_device()).collect();
    let reopened = loaded.reopen_after(&mut failures);
    let device = reopened.before.device;
    assert_eq!(state_of(&reopened.brick, device), DeviceState::Active);
    assert_eq!(errors_of(&reopened.brick), [0, 1, 0]);
    let mut client = Client::new(&reopened.brick, 2);
    let mut model = lock(&reopened.before.model).clone();
    assert_eq!(damaged_pages(&mut client, &model), []);
    // The second error within a day is the last one.
    plans[FAILING].fail_all(EIO);
    let mut rng = SplitMix64::new(47);
    while !reopened.brick.has_failed() {
        let write = random_write(&mut rng, &mut client, &mut model.written);
        client.execute(vec![write, SliceRequest::Flush]);
    }
    let home = reopened.before.home.path();
    let last = reopened.brick.reopen(&home, &limits(), &mut failures);
    let (last, _maintenance, _) = last.expect("the other devices are sound");
    assert_eq!(state_of(&last, device), DeviceState::Failed);
    assert_eq!(errors_of(&last), [0, 2, 0]);
    plans.iter().for_each(|plan| plan.clear());
    drop(client);
    reopened.end_before();
}

#[test]
fn device_that_fails_at_once_again_is_left_out() {
    let loaded = LoadedBrick::start(|plans| plans[FAILING].fail_all(EIO));
    loaded.wait_until_failed();
    let plans: Vec<_> = (0..DEVICES).map(|_| DevicePlan::of_next_device()).collect();
    plans[FAILING].fail_all(EIO);
    let reopened = loaded.reopen_after(&mut DeviceFailures::default());
    let device = reopened.before.device;
    assert_eq!(state_of(&reopened.brick, device), DeviceState::Failed);
    assert!(plans[FAILING].befallen() > 0);
    plans.iter().for_each(|plan| plan.clear());
    reopened.end_before();
}

#[test]
fn device_that_hangs_is_left_out_at_once() {
    let hang = on_device(PlannedRequest::Write, DeviceFault::Hang);
    let reopened = LoadedBrick::start(hang).reopen_after(&mut DeviceFailures::default());
    let device = reopened.before.device;
    assert_eq!(state_of(&reopened.brick, device), DeviceState::Failed);
    assert_eq!(errors_of(&reopened.brick), [0, 1, 0]);
    reopened.end_before();
}

#[test]
fn failure_of_first_device_is_not_reopened() {
    let with_first = |plans: &[Arc<DevicePlan>]| {
        plans[FAILING].fail_all(EIO);
        plans[0].fail_all(EIO);
    };
    let first = |plans: &[Arc<DevicePlan>]| plans[0].fail_all(EIO);
    for loaded in [LoadedBrick::start(first), LoadedBrick::start(with_first)] {
        loaded.wait_until_failed();
        let failures = &mut DeviceFailures::default();
        let refused = (loaded.brick).reopen(&loaded.home.path(), &limits(), failures);
        assert!(refused.is_err());
        loaded.plans.iter().for_each(|plan| plan.clear());
        loaded.load.join().expect("no panic");
    }
}

#[test]
fn sound_device_is_handed_over_after_its_writes() {
    let ready = Arc::new(Barrier::new(2));
    let is_ready = ready.clone();
    let hang = move |plans: &[Arc<DevicePlan>]| {
        is_ready.wait();
        plans[2].add(PlannedRequest::Write, EVERYTHING, 1, DeviceFault::Hang);
    };
    let loaded = LoadedBrick::start_with(options(), hang);
    let mut reader = Client::new(&loaded.brick, 1);
    ready.wait();
    while loaded.plans[2].befallen() == 0 {
        std::thread::yield_now();
    }
    // A write of the third device is in flight, and the second one fails.
    loaded.plans[FAILING].fail_all(ENXIO);
    let mut pages = (0..SIZE / PAGE).cycle();
    while !loaded.brick.has_failed() {
        let _ = read_page(&mut reader, pages.next().expect("a page"));
    }
    let disk = loaded.brick.mapping().media().disk().clone();
    let refused = disk.hand_over(Duration::from_millis(50), |_| false);
    let cause = refused.expect_err("a write is in flight").to_string();
    assert!(cause.contains("have not ended"), "{cause}");
    loaded.plans.iter().for_each(|plan| plan.clear());
    loaded.load.join().expect("no panic");
    // The write ends as a short one, so this device has failed, too.
    let handed = disk
        .hand_over(Duration::from_secs(60), |_| false)
        .expect("the first device");
    assert_eq!((handed.sound.len(), handed.failed.len()), (1, 2));
}
