use super::*;
use pagemesh_fuzz::measure_allocation;

const OPENS: u64 = 10_000;

/// Opens files as many clients do: 100 clients, an owner for each 10 files, and names of the length
/// that Linux uses.
fn open_all(server: &mut TestServer, clients: &[ClientId], is_locked: bool) {
    for number in 0..OPENS {
        let client = clients[number as usize % clients.len()];
        let owner = format!("open id: {:>020}", number / 1000);
        let open = server.open(client, &owner, number, 3, 0).expect("free");
        if is_locked {
            let owner = format!("lock id: {:>020}", number / 1000);
            let locker = Locker::New {
                open,
                owner: owner.as_bytes(),
            };
            let range = (0, u64::MAX);
            server
                .lock(client, number, locker, LockKind::Write, range)
                .expect("free");
        }
    }
    server.events = Vec::new();
}

fn check(is_locked: bool, bytes_max: u64) {
    let mut server = TestServer::new();
    let clients: Vec<_> = (0..100)
        .map(|it| {
            server
                .client(&format!("Linux NFSv4.1 host-{it}.example.org"))
                .0
        })
        .collect();
    let ((), bytes) = measure_allocation(|| open_all(&mut server, &clients, is_locked));
    assert_eq!(server.state.counts().opens as u64, OPENS);
    assert_eq!(server.state.counts().ranges > 0, is_locked);
    let per_open = bytes / OPENS;
    assert!(per_open < bytes_max, "{per_open} bytes for each open");
    assert!(
        per_open > 100,
        "{per_open} bytes for each open: not measured"
    );
}

/// The peak counts, with tables that grow at that moment.
#[test]
fn open_takes_less_than_512_bytes() {
    check(false, 512);
}

#[test]
fn open_with_a_lock_takes_less_than_1536_bytes() {
    check(true, 1536);
}
