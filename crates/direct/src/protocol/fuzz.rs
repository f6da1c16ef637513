//! Fuzz targets of the packets of direct clients and mounts, see RFD 004.

use crate::protocol::wire::{ClientRequest, FileRefusal, MountReply, decode_parts, encode_parts};
use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, LEGS_MAX, SliceId};
use pagemesh_fuzz::FuzzTarget;
use pagemesh_volume::direct_access::{LayoutLease, LeaseLeg, ROWS};
use std::mem::discriminant;
use uuid::Uuid;

fn target(name: &'static str) -> FuzzTarget {
    FuzzTarget::new(name, env!("CARGO_MANIFEST_DIR")).cases(10_000)
}

#[test]
fn fuzz_direct_question() {
    let requests = [
        ClientRequest::Join,
        ClientRequest::GetLayout,
        ClientRequest::GetFileMap(7),
        ClientRequest::WakeReplicator,
        ClientRequest::ReleaseRow,
        ClientRequest::GetFileMapForAppend(3),
        ClientRequest::WriteAtomic(3),
    ];
    target("direct_question")
        .seeds(requests.map(|request| request.encode().to_vec()))
        .bytes_max(64)
        .run(|bytes| {
            let request = ClientRequest::decode(bytes).ok()?;
            assert_eq!(request.encode()[..], *bytes);
            Some(discriminant(&request))
        });
}

#[test]
fn fuzz_direct_parts() {
    let parts: [(u64, &[u8]); 2] = [(8192, &[1; 40]), (100, &[2; 9])];
    target("direct_parts")
        .seeds([encode_parts(&parts), encode_parts(&[])])
        .bytes_max(512)
        .run(|bytes| {
            let parts = decode_parts(&Bytes::copy_from_slice(bytes)).ok()?;
            let again: Vec<(u64, &[u8])> =
                parts.iter().map(|(at, data)| (*at, &data[..])).collect();
            assert_eq!(encode_parts(&again), bytes);
            Some(parts.len())
        });
}

#[test]
fn fuzz_direct_answer() {
    let lease_leg = |number| LeaseLeg {
        brick: BrickId(Uuid::from_u128(number)),
        slice: SliceId(Uuid::from_u128(number + 9)),
        socket: format!("/run/brick-{number}.sock").into(),
    };
    let lease = LayoutLease {
        generation: 3,
        epoch: Epoch(7),
        legs: vec![lease_leg(1), lease_leg(2)],
    };
    let replies = [
        MountReply::Joined(3, Some(lease)),
        MountReply::Joined(0, None),
        MountReply::Success,
        MountReply::Unavailable,
        MountReply::FileRefused(FileRefusal::TooManyFiles),
        MountReply::Failed(5),
    ];
    target("direct_answer")
        .seeds(replies.map(|reply| reply.encode()))
        .bytes_max(512)
        .run(|bytes| {
            let reply = MountReply::decode(bytes).ok()?;
            let legs = match &reply {
                MountReply::Joined(row, lease) => {
                    assert!((*row as usize) < ROWS);
                    lease.as_ref().map_or(0, |lease| lease.legs.len())
                }
                MountReply::Success
                | MountReply::Unavailable
                | MountReply::FileRefused(_)
                | MountReply::Failed(_) => 0,
            };
            assert!(legs <= LEGS_MAX);
            assert_eq!(
                MountReply::decode(&reply.encode()).ok(),
                Some(reply.clone())
            );
            Some((discriminant(&reply), legs))
        });
}
