//! Bytes that no client sends: the server refuses them or closes the connection, and serves others.

use super::Check;
use crate::fixture::{CaseResult, Fixture, Problem, ensure, equal};
use pagemesh_nfs_client::nfs3::{
    self, Create, CreateHow, GetAttributes, Remove, SetAttributes, Status,
};
use pagemesh_nfs_client::rpc::{Reply, arguments, call_record, decode_result};
use pagemesh_nfs_client::{ClientError, Connection, Credential};
use std::io::Write as _;
use std::net::TcpStream;

pub(super) const CASES: &[(&str, Check)] = &[
    ("record_of_2_gib_is_cut_off", record_of_2_gib_is_cut_off),
    (
        "fragments_of_4_gib_are_cut_off",
        fragments_of_4_gib_are_cut_off,
    ),
    (
        "fragments_without_end_are_cut_off",
        fragments_without_end_are_cut_off,
    ),
    ("empty_fragments_are_cut_off", empty_fragments_are_cut_off),
    (
        "empty_record_leaves_others_served",
        empty_record_leaves_others_served,
    ),
    (
        "reply_instead_of_a_call_leaves_others_served",
        reply_instead_of_a_call,
    ),
    (
        "random_bytes_leave_others_served",
        random_bytes_leave_others_served,
    ),
    (
        "handle_length_that_lies_is_refused",
        handle_length_that_lies,
    ),
    ("name_length_that_lies_is_refused", name_length_that_lies),
    ("data_length_that_lies_is_refused", data_length_that_lies),
    (
        "credential_length_that_lies_is_refused",
        credential_length_that_lies,
    ),
    ("groups_that_lie_are_refused", groups_that_lie),
    (
        "half_open_connections_leave_others_served",
        half_open_connections,
    ),
    (
        "connection_cut_within_a_call_leaves_others_served",
        connection_cut_within_a_call,
    ),
    (
        "replayed_remove_is_answered_alike",
        replayed_remove_is_answered_alike,
    ),
    (
        "replayed_create_is_answered_alike",
        replayed_create_is_answered_alike,
    ),
    (
        "replay_on_another_connection_is_answered_alike",
        replay_on_another_connection,
    ),
    (
        "xid_of_another_call_is_executed",
        xid_of_another_call_is_executed,
    ),
];

fn connect(it: &Fixture) -> Result<Connection, Problem> {
    Ok(Connection::connect(it.server.nfs, it.server.limit)?)
}

/// Fails the case unless a new connection is served.
fn is_served(it: &Fixture) -> CaseResult {
    let mut client = it.client_of(it.client.credential.clone())?;
    let result = client.call(&GetAttributes { file: &it.root })?;
    ensure!(result.is_ok(), "{result:?}");
    Ok(())
}

/// Sends these bytes again and again, and fails the case unless the server ends the connection
/// before it took `bytes_max`.
fn is_cut_off(it: &Fixture, bytes: &[u8], bytes_max: usize) -> CaseResult {
    let mut connection = connect(it)?;
    for _ in 0..bytes_max.div_ceil(bytes.len()) {
        if let Err(error) = connection.sender().send_bytes(bytes) {
            return match error {
                ClientError::Closed => is_served(it),
                other => Err(other.into()),
            };
        }
    }
    // All bytes are in the socket's buffers.
    match connection.receiver().receive_record() {
        Err(ClientError::Closed) => is_served(it),
        Err(error) => Err(Problem::Wrong(format!("the connection is open: {error}"))),
        Ok(_) => Err(Problem::Wrong("the server replied".into())),
    }
}

fn record_of_2_gib_is_cut_off(it: &mut Fixture) -> CaseResult {
    let record = [&[0xff; 4][..], &[0; 65_536]].concat();
    is_cut_off(it, &record, 64 << 20)
}

/// Four fragments of 1 GiB and no last one; the server gets at most 64 MiB of them.
fn fragments_of_4_gib_are_cut_off(it: &mut Fixture) -> CaseResult {
    let record = [&[0x40, 0, 0, 0][..], &[0; 65_536]].concat();
    is_cut_off(it, &record, 64 << 20)
}

fn fragments_without_end_are_cut_off(it: &mut Fixture) -> CaseResult {
    let fragments = [0, 0, 0, 1, 7].repeat(1000);
    is_cut_off(it, &fragments, 16 << 20)
}

fn empty_fragments_are_cut_off(it: &mut Fixture) -> CaseResult {
    is_cut_off(it, &[0; 4000], 16 << 20)
}

/// Sends bytes on a connection of their own.
fn others_are_served(it: &Fixture, bytes: &[u8]) -> CaseResult {
    let mut connection = connect(it)?;
    connection.sender().send_bytes(bytes)?;
    is_served(it)
}

fn empty_record_leaves_others_served(it: &mut Fixture) -> CaseResult {
    others_are_served(it, &[0x80, 0, 0, 0])
}

fn reply_instead_of_a_call(it: &mut Fixture) -> CaseResult {
    let mut record = call_record(1, &Credential::None, (nfs3::PROGRAM, 3, 0), &[]);
    record[8..12].copy_from_slice(&1_u32.to_be_bytes());
    others_are_served(it, &record)
}

fn random_bytes_leave_others_served(it: &mut Fixture) -> CaseResult {
    let mut state = 0x9e37_79b9_u32;
    for _ in 0..50 {
        let bytes: Vec<u8> = (0..200)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                state as u8
            })
            .collect();
        let mut record = 200_u32.to_be_bytes().to_vec();
        record[0] |= 0x80;
        record.extend(bytes);
        others_are_served(it, &record)?;
    }
    Ok(())
}

/// Fails the case if a call with these arguments succeeds.
fn lie_is_refused(it: &mut Fixture, procedure: u32, bytes: &[u8]) -> CaseResult {
    let mut client = it.client_of(it.client.credential.clone())?;
    match client.call_raw((nfs3::PROGRAM, nfs3::VERSION, procedure), bytes) {
        Ok(result) => ensure!(!result.starts_with(&[0; 4]), "the call was executed"),
        Err(ClientError::Refused(_) | ClientError::Closed) => {}
        Err(error) => return Err(error.into()),
    }
    is_served(it)
}

const LIES: [u32; 4] = [u32::MAX, u32::MAX - 3, 1 << 31, 1 << 20];

fn handle_length_that_lies(it: &mut Fixture) -> CaseResult {
    let mut bytes = arguments(&GetAttributes { file: &it.root });
    for lie in LIES {
        bytes[..4].copy_from_slice(&lie.to_be_bytes());
        lie_is_refused(it, 1, &bytes)?;
    }
    Ok(())
}

fn name_length_that_lies(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let mut bytes = arguments(&Remove {
        directory: &dir,
        name: b"name",
    });
    let at = bytes.len() - 8;
    for lie in LIES {
        bytes[at..at + 4].copy_from_slice(&lie.to_be_bytes());
        lie_is_refused(it, 12, &bytes)?;
    }
    Ok(())
}

fn data_length_that_lies(it: &mut Fixture) -> CaseResult {
    let file = it.file(b"file")?;
    let mut bytes = arguments(&nfs3::Write {
        file: &file,
        offset: 0,
        stable: nfs3::StableHow::FileSync,
        data: b"data",
    });
    let at = bytes.len() - 8;
    for lie in LIES {
        bytes[at..at + 4].copy_from_slice(&lie.to_be_bytes());
        lie_is_refused(it, 7, &bytes)?;
    }
    equal("the size", it.attributes(&file)?.size_bytes, 0)
}

/// Sends a NULL call with one word of its credential changed; any answer but a success is right.
fn credential_is_refused(it: &mut Fixture, at: usize) -> CaseResult {
    for lie in LIES {
        let caller = Credential::sys(1, 2);
        let mut record = call_record(1, &caller, (nfs3::PROGRAM, 3, 0), &[]);
        record[at..at + 4].copy_from_slice(&lie.to_be_bytes());
        let mut connection = connect(it)?;
        connection.sender().send_bytes(&record)?;
        match connection.receive() {
            Ok(Reply { outcome: Ok(_), .. }) => {
                return Err(Problem::Wrong("the call was executed".into()));
            }
            Ok(_) | Err(ClientError::Closed) => {}
            Err(error) => return Err(error.into()),
        }
    }
    is_served(it)
}

/// The length of the credential's body follows the mark, six words and the flavor.
fn credential_length_that_lies(it: &mut Fixture) -> CaseResult {
    credential_is_refused(it, 4 + 6 * 4 + 4)
}

/// The number of groups follows the stamp, the name of 8 bytes, the user and the group.
fn groups_that_lie(it: &mut Fixture) -> CaseResult {
    credential_is_refused(it, 4 + 8 * 4 + 4 + 4 + 8 + 8)
}

fn half_open_connections(it: &mut Fixture) -> CaseResult {
    let mut streams = Vec::new();
    for _ in 0..it.server.half_open {
        let stream = TcpStream::connect_timeout(&it.server.nfs, it.server.limit);
        let stream = stream.and_then(|mut stream| {
            stream.write_all(&[0x80, 0])?;
            Ok(stream)
        });
        // The server may refuse some of them.
        streams.extend(stream.ok());
    }
    ensure!(!streams.is_empty(), "no connection was accepted");
    // The connection of the case was there before.
    let root = it.root.clone();
    it.attributes(&root)?;
    drop(streams);
    // New connections are served once the server has seen the end of these.
    let mut last = is_served(it);
    for _ in 0..100 {
        if last.is_ok() {
            break;
        }
        std::thread::yield_now();
        last = is_served(it);
    }
    last
}

fn connection_cut_within_a_call(it: &mut Fixture) -> CaseResult {
    let root = it.root.clone();
    let bytes = arguments(&GetAttributes { file: &root });
    let record = call_record(1, &Credential::None, (nfs3::PROGRAM, 3, 1), &bytes);
    for len in [1, 4, 5, 20, record.len() - 1] {
        others_are_served(it, &record[..len])?;
    }
    Ok(())
}

/// Sends the same record on two connections, or twice on one, and returns both results.
fn replayed(it: &mut Fixture, record: &[u8], is_on_another: bool) -> Result<[Reply; 2], Problem> {
    let mut first = connect(it)?;
    first.sender().send_bytes(record)?;
    let reply = first.receive()?;
    let mut second = match is_on_another {
        true => connect(it)?,
        false => first,
    };
    second.sender().send_bytes(record)?;
    Ok([reply, second.receive()?])
}

fn remove_record(it: &mut Fixture, xid: u32) -> Result<Vec<u8>, Problem> {
    it.file(b"file")?;
    let dir = it.dir.clone();
    let bytes = arguments(&Remove {
        directory: &dir,
        name: b"file",
    });
    let caller = it.client.credential.clone();
    Ok(call_record(xid, &caller, (nfs3::PROGRAM, 3, 12), &bytes))
}

fn check_replayed(replies: [Reply; 2]) -> CaseResult {
    let [first, second] = replies;
    if let Ok(result) = &first.outcome {
        ensure!(result.starts_with(&[0; 4]), "the first call failed");
    }
    equal("the second reply", second, first)
}

fn replayed_remove_is_answered_alike(it: &mut Fixture) -> CaseResult {
    let record = remove_record(it, 0x7100_0001)?;
    check_replayed(replayed(it, &record, false)?)
}

fn replayed_create_is_answered_alike(it: &mut Fixture) -> CaseResult {
    let dir = it.dir.clone();
    let bytes = arguments(&Create {
        directory: &dir,
        name: b"file",
        how: CreateHow::Guarded(SetAttributes::mode(0o644)),
    });
    let caller = it.client.credential.clone();
    let record = call_record(0x7200_0001, &caller, (nfs3::PROGRAM, 3, 8), &bytes);
    check_replayed(replayed(it, &record, false)?)
}

/// A client sends its calls again after it has connected again.
fn replay_on_another_connection(it: &mut Fixture) -> CaseResult {
    let record = remove_record(it, 0x7300_0001)?;
    check_replayed(replayed(it, &record, true)?)
}

/// Clients start xids anew, so the xid alone is no replay.
fn xid_of_another_call_is_executed(it: &mut Fixture) -> CaseResult {
    let record = remove_record(it, 0x7400_0001)?;
    let mut connection = connect(it)?;
    connection.sender().send_bytes(&record)?;
    connection.receive()?;
    let dir = it.dir.clone();
    let bytes = arguments(&Remove {
        directory: &dir,
        name: b"none",
    });
    let caller = it.client.credential.clone();
    let other = call_record(0x7400_0001, &caller, (nfs3::PROGRAM, 3, 12), &bytes);
    connection.sender().send_bytes(&other)?;
    let result = connection
        .receive()?
        .outcome
        .map_err(ClientError::Refused)?;
    let result = decode_result::<Remove<'_>>(&result).map_err(ClientError::Decode)?;
    crate::fixture::failure(12, result, &[Status::NOENT])?;
    Ok(())
}
