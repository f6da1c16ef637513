//! The way to a brick on this machine whose pool cannot be mapped.

use crate::world::{BrickHost, LIMIT, MIB, PAGE, slice};
use pagemesh_base::ids::Epoch;
use pagemesh_base::key::Key;
use pagemesh_base::layout::BrickId;
use pagemesh_base::slice::{Leg, SliceError, SliceReply, SliceRequest};
use pagemesh_base::wait::until_readable;
use pagemesh_brick::service::BrickService;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::tcp::{ServerOptions, TcpServer};
use pagemesh_volume::{BrickAddress, Connector, Transport, Transports};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

const KEY: [u8; 32] = [7; 32];

struct ServedBrick {
    // Dropped in this order: its connections end before the brick.
    server: TcpServer,
    host: BrickHost,
    socket: PathBuf,
}

fn serve(leg: usize) -> ServedBrick {
    let host = BrickHost::new(leg, 8 * MIB, MIB);
    let service = host.with_running(|running| BrickService(running.brick.clone()));
    let socket = host.directory.path().join("brick.sock");
    let address = "127.0.0.1:0".parse().expect("an address");
    let options = ServerOptions::default();
    let server = TcpServer::bind(address, Key::from_bytes(KEY), Arc::new(service), options);
    let mut server = server.expect("a free port");
    server.serve_local(&socket).expect("a free path");
    ServedBrick {
        server,
        host,
        socket,
    }
}

/// The addresses of a brick with a pool on a disk.
fn address(tcp: &str, socket: &Path) -> BrickAddress {
    BrickAddress {
        name: None,
        tcp: tcp.into(),
        map_socket: Some(socket.display().to_string()),
        durability: "file-sync".into(),
    }
}

fn connect(
    transport: Transport,
    id: BrickId,
    address: &BrickAddress,
) -> Result<Box<dyn Leg>, SliceError> {
    let transports = Transports::new(Key::from_bytes(KEY), transport, Timeouts::default());
    transports.connect(id, address, slice(0), Epoch(1))
}

fn read_page(leg: &mut dyn Leg) -> Result<SliceReply, SliceError> {
    let read = SliceRequest::Read {
        offset: 0,
        len: PAGE as u32,
    };
    leg.submit(1, read);
    let until = Instant::now() + LIMIT;
    let mut done = Vec::new();
    while done.is_empty() {
        assert!(Instant::now() < until, "no answer");
        let mut fds = Vec::new();
        leg.poll_fds(&mut fds);
        until_readable(&fds, Some(Instant::now() + LIMIT / 100)).expect("descriptors");
        leg.reap(&mut done);
    }
    done.remove(0).result
}

/// No brick listens there.
const NOWHERE: &str = "127.0.0.1:1";

#[test]
fn disk_pool_is_reached_at_its_socket() {
    let served = serve(0);
    let at = address(NOWHERE, &served.socket);
    let mut leg = connect(Transport::Auto, served.host.id, &at).expect("a leg");
    assert!(matches!(read_page(&mut *leg), Ok(SliceReply::Data(_))));
    // Without the choice there is only tcp.
    let lost = connect(Transport::Tcp, served.host.id, &at).err();
    assert!(matches!(lost, Some(SliceError::Lost(_))), "{lost:?}");
}

#[test]
fn socket_of_another_brick_is_passed_over() {
    let (served, other) = (serve(0), serve(1));
    let tcp = served.server.address().to_string();
    for socket in [&other.socket, Path::new("/nowhere/brick.sock")] {
        let at = address(&tcp, socket);
        let mut leg = connect(Transport::Auto, served.host.id, &at).expect("a leg");
        assert!(matches!(read_page(&mut *leg), Ok(SliceReply::Data(_))));
    }
}
