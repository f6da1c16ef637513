//! Many connections without a call. The test measures the memory of its process, which no other test
//! may change meanwhile: nextest starts a process for each.

use crate::support;
use std::io::Write;
use std::net::TcpStream;
use support::session::Session;
use support::world::ServedWorld;

/// Kibibytes of memory of this process.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_ascii_whitespace().nth(1));
    number.expect("a size").parse().expect("a number")
}

/// Connections that send a part of a mark, if any.
fn half_open(world: &ServedWorld, count: usize, bytes: &[u8]) -> Vec<TcpStream> {
    let address = world.server.local_addrs()[0];
    let connect = |_| {
        let mut stream = TcpStream::connect(address).expect("connected");
        stream.write_all(bytes).expect("sent");
        stream
    };
    (0..count).map(connect).collect()
}

#[test]
fn thousands_of_half_open_connections_take_little_memory() {
    pagemesh_base::fd_limit::raise_fd_limit().expect("descriptors");
    let world = ServedWorld::new();
    let mut served = Session::new(&world);
    let root = served.root();
    let before = resident_kib();
    let idle = half_open(&world, 4000, &[]);
    let partial = half_open(&world, 4000, &[0x80, 0]);
    world.wait_until("all connections", |now| now.connections == 8001);
    let each = resident_kib().saturating_sub(before) * 1024 / 8000;
    assert!(each < 4096, "a half-open connection takes {each} bytes");
    assert!(served.attributes(&root).is_ok());
    assert_eq!(world.server.figures().half_open, 8000);

    drop((idle, partial));
    world.wait_until("the end", |now| now.connections == 1);
    assert!(Session::new(&world).mount("/data").is_ok());
    assert!(served.attributes(&root).is_ok());
}
