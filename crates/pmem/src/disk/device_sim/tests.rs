use super::*;

/// Writes pages of one byte each. They stay in flight.
fn write(device: &SimulatedDevice, user: Generation, page: usize, byte: u8) {
    let at = (page * PAGE_BYTES) as u64;
    let ring = device.new_ring();
    let bytes = vec![byte; PAGE_BYTES];
    device.start(user, ring, (at, PAGE_BYTES, 0), Some(bytes));
}

/// The first byte of each sector of a page.
fn sectors(device: &SimulatedDevice, page: usize) -> Vec<u8> {
    let mut bytes = [0; PAGE_BYTES];
    let read = device.read_now(&mut bytes, (page * PAGE_BYTES) as u64);
    read.expect("a readable page");
    let (sectors, _) = bytes.as_chunks::<SECTOR_BYTES>();
    assert!(
        sectors
            .iter()
            .all(|sector| sector.iter().all(|it| *it == sector[0]))
    );
    sectors.iter().map(|sector| sector[0]).collect()
}

fn flush(device: &SimulatedDevice, user: Generation) {
    let number = device.start_flush(user);
    while device.end_first() {}
    let result = device.flush_result(number).expect("it has ended");
    result.expect("no fault");
}

/// A flushed page of ones under twos, a page of twos, and a page of twos in flight.
fn device_with_unflushed_pages(seed: u64) -> Arc<SimulatedDevice> {
    let device = SimulatedDevice::new(1 << 20, seed);
    let user = device.connect();
    write(&device, user, 0, 1);
    while device.end_first() {}
    flush(&device, user);
    write(&device, user, 0, 2);
    write(&device, user, 1, 2);
    while device.end_first() {}
    write(&device, user, 2, 2);
    device
}

#[test]
fn power_loss_takes_only_what_no_flush_covers() {
    let (mut mixed, mut torn) = (0, 0);
    for seed in 0..200 {
        let device = device_with_unflushed_pages(seed);
        device.end_user(DeviceEnd::Power);
        let pages = [0, 1, 2].map(|page| sectors(&device, page));
        assert!(pages[0].iter().all(|byte| [1, 2].contains(byte)));
        assert!(
            pages[1..]
                .iter()
                .flatten()
                .all(|byte| [0, 2].contains(byte))
        );
        let is_mixed = |page: &Vec<u8>| page.iter().any(|byte| *byte != page[0]);
        mixed += usize::from(is_mixed(&pages[0]) || is_mixed(&pages[1]));
        torn += usize::from(is_mixed(&pages[2]));
    }
    assert!(mixed > 20 && torn > 20, "{mixed} mixed, {torn} torn");
}

#[test]
fn end_of_process_keeps_writes_that_have_ended() {
    let mut torn = 0;
    for seed in 0..100 {
        let device = device_with_unflushed_pages(seed);
        device.end_user(DeviceEnd::Process);
        assert_eq!(sectors(&device, 0), [2; 8]);
        assert_eq!(sectors(&device, 1), [2; 8]);
        let page = sectors(&device, 2);
        assert!(page.iter().all(|byte| [0, 2].contains(byte)));
        torn += usize::from(page.contains(&0) && page.contains(&2));
    }
    assert!(torn > 10, "{torn} torn");
}

#[test]
fn dead_user_changes_nothing() {
    let device = SimulatedDevice::new(1 << 20, 0);
    let user = device.connect();
    device.end_user(DeviceEnd::Process);
    write(&device, user, 0, 7);
    flush(&device, user);
    assert_eq!(sectors(&device, 0), [0; 8]);
}

#[test]
fn unreadable_page_is_readable_after_a_write() {
    let device = SimulatedDevice::new(1 << 20, 0);
    let user = device.connect();
    device.make_unreadable(3);
    assert!(
        device
            .read_now(&mut [0; PAGE_BYTES], 3 * PAGE_BYTES as u64)
            .is_err()
    );
    write(&device, user, 3, 5);
    while device.end_first() {}
    assert_eq!(sectors(&device, 3), [5; 8]);
}
