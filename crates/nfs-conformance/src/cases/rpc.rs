//! ONC RPC (RFC 5531): programs, versions, procedures and credentials.

use super::Check;
use crate::fixture::{CaseResult, Fixture, Problem, ensure, equal};
use pagemesh_nfs_client::nfs3::{self, GetAttributes, Null};
use pagemesh_nfs_client::rpc::{Refusal, arguments, call_record};
use pagemesh_nfs_client::{ClientError, Connection, Credential, mount3};

pub(super) const CASES: &[(&str, Check)] = &[
    ("null_is_empty", null_is_empty),
    ("null_of_auth_none", null_of_auth_none),
    (
        "version_2_of_nfs_is_a_mismatch",
        version_2_of_nfs_is_a_mismatch,
    ),
    (
        "version_9_of_nfs_is_a_mismatch",
        version_9_of_nfs_is_a_mismatch,
    ),
    (
        "version_4_of_nfs_has_an_answer",
        version_4_of_nfs_has_an_answer,
    ),
    (
        "version_9_of_mount_is_a_mismatch",
        version_9_of_mount_is_a_mismatch,
    ),
    (
        "unknown_program_is_unavailable",
        unknown_program_is_unavailable,
    ),
    ("procedure_22_is_unavailable", procedure_22_is_unavailable),
    (
        "last_procedure_number_is_unavailable",
        last_procedure_number_is_unavailable,
    ),
    (
        "procedure_6_of_mount_is_unavailable",
        procedure_6_of_mount_is_unavailable,
    ),
    ("rpc_version_3_is_a_mismatch", rpc_version_3_is_a_mismatch),
    (
        "missing_arguments_are_garbage",
        missing_arguments_are_garbage,
    ),
    ("unknown_flavor_is_refused", unknown_flavor_is_refused),
    ("sixteen_groups_are_allowed", sixteen_groups_are_allowed),
    ("seventeen_groups_are_refused", seventeen_groups_are_refused),
    (
        "credential_of_404_bytes_is_refused",
        credential_of_404_bytes_is_refused,
    ),
    (
        "calls_in_flight_are_all_answered",
        calls_in_flight_are_all_answered,
    ),
    (
        "call_in_fragments_is_answered",
        call_in_fragments_is_answered,
    ),
];

const NFS: u32 = nfs3::PROGRAM;

fn refusal(it: &mut Fixture, target: (u32, u32, u32)) -> Result<Refusal, Problem> {
    refused(it.client.call_raw(target, &[]))
}

fn refused(result: Result<Vec<u8>, ClientError>) -> Result<Refusal, Problem> {
    match result {
        Err(ClientError::Refused(refusal)) => Ok(refusal),
        Err(error) => Err(error.into()),
        Ok(_) => Err(Problem::Wrong("the call was executed".into())),
    }
}

fn mismatch(found: Refusal) -> CaseResult {
    match found {
        Refusal::ProgramMismatch { low, high } => {
            ensure!(
                (low..=high).contains(&3),
                "version 3 is not in {low}..={high}"
            );
            Ok(())
        }
        other => Err(Problem::Wrong(format!("{other:?}"))),
    }
}

fn null_is_empty(it: &mut Fixture) -> CaseResult {
    it.call(&Null)
}

fn null_of_auth_none(it: &mut Fixture) -> CaseResult {
    it.call_as(Credential::None, &Null)
}

fn version_2_of_nfs_is_a_mismatch(it: &mut Fixture) -> CaseResult {
    mismatch(refusal(it, (NFS, 2, 0))?)
}

fn version_9_of_nfs_is_a_mismatch(it: &mut Fixture) -> CaseResult {
    mismatch(refusal(it, (NFS, 9, 0))?)
}

/// Servers of version 4 execute NULL, others refuse the version.
fn version_4_of_nfs_has_an_answer(it: &mut Fixture) -> CaseResult {
    match it.client.call_raw((NFS, 4, 0), &[]) {
        Ok(result) => equal("the result of NULL", result, Vec::new()),
        refused_call => mismatch(refused(refused_call)?),
    }
}

fn version_9_of_mount_is_a_mismatch(it: &mut Fixture) -> CaseResult {
    let mut client = it.client_of(Credential::None)?;
    client.connection = Connection::connect(it.server.mount, it.server.limit)?;
    mismatch(refused(client.call_raw((mount3::PROGRAM, 9, 0), &[]))?)
}

fn unknown_program_is_unavailable(it: &mut Fixture) -> CaseResult {
    let found = refusal(it, (0x2000_0000, 1, 0))?;
    equal("the refusal", found, Refusal::ProgramUnavailable)
}

fn procedure_22_is_unavailable(it: &mut Fixture) -> CaseResult {
    let found = refusal(it, (NFS, 3, 22))?;
    equal("the refusal", found, Refusal::ProcedureUnavailable)
}

fn last_procedure_number_is_unavailable(it: &mut Fixture) -> CaseResult {
    let found = refusal(it, (NFS, 3, u32::MAX))?;
    equal("the refusal", found, Refusal::ProcedureUnavailable)
}

fn procedure_6_of_mount_is_unavailable(it: &mut Fixture) -> CaseResult {
    let mut client = it.client_of(Credential::None)?;
    client.connection = Connection::connect(it.server.mount, it.server.limit)?;
    let found = refused(client.call_raw((mount3::PROGRAM, 3, 6), &[]))?;
    equal("the refusal", found, Refusal::ProcedureUnavailable)
}

/// Sends a record, and returns the refusal, or none if the server closes the connection.
fn refusal_of_record(it: &mut Fixture, record: &[u8]) -> Result<Option<Refusal>, Problem> {
    let connection = &mut it.client.connection;
    connection.sender().send_bytes(record)?;
    match connection.receive() {
        Ok(reply) => refused(reply.outcome.map_err(ClientError::Refused)).map(Some),
        Err(ClientError::Closed) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn rpc_version_3_is_a_mismatch(it: &mut Fixture) -> CaseResult {
    let mut record = call_record(1, &Credential::None, (NFS, 3, 0), &[]);
    record[12..16].copy_from_slice(&3_u32.to_be_bytes());
    let found = refusal_of_record(it, &record)?;
    let (low, high) = (2, 2);
    equal(
        "the refusal",
        found,
        Some(Refusal::RpcMismatch { low, high }),
    )
}

fn missing_arguments_are_garbage(it: &mut Fixture) -> CaseResult {
    let found = refusal(it, (NFS, 3, 1))?;
    equal("the refusal", found, Refusal::GarbageArguments)
}

fn unknown_flavor_is_refused(it: &mut Fixture) -> CaseResult {
    let mut record = call_record(1, &Credential::None, (NFS, 3, 1), &[0; 4]);
    record[28..32].copy_from_slice(&77_u32.to_be_bytes());
    match refusal_of_record(it, &record)? {
        Some(Refusal::Authentication(_)) => Ok(()),
        found => Err(Problem::Wrong(format!("the refusal is {found:?}"))),
    }
}

fn with_groups(it: &Fixture, count: u32) -> Credential {
    Credential::Sys {
        uid: it.server.uid,
        gid: it.server.gid,
        groups: (5000..5000 + count).collect(),
    }
}

fn sixteen_groups_are_allowed(it: &mut Fixture) -> CaseResult {
    let (caller, file) = (with_groups(it, 16), it.root.clone());
    it.ok_as(caller, &GetAttributes { file: &file })?;
    Ok(())
}

fn seventeen_groups_are_refused(it: &mut Fixture) -> CaseResult {
    let caller = with_groups(it, 17);
    let file = it.root.clone();
    let arguments = arguments(&GetAttributes { file: &file });
    let record = call_record(1, &caller, (NFS, 3, 1), &arguments);
    refusal_of_record(it, &record)?;
    Ok(())
}

fn credential_of_404_bytes_is_refused(it: &mut Fixture) -> CaseResult {
    let caller = with_groups(it, (404 - 28) / 4);
    let record = call_record(1, &caller, (NFS, 3, 0), &[]);
    refusal_of_record(it, &record)?;
    Ok(())
}

/// Replies may come in any order.
fn calls_in_flight_are_all_answered(it: &mut Fixture) -> CaseResult {
    let file = it.root.clone();
    let arguments = arguments(&GetAttributes { file: &file });
    let caller = it.client.credential.clone();
    let connection = &mut it.client.connection;
    let mut waiting = Vec::new();
    for _ in 0..50 {
        waiting.push(connection.send(&caller, (NFS, 3, 1), &arguments)?);
    }
    while !waiting.is_empty() {
        let reply = connection.receive()?;
        let before = waiting.len();
        waiting.retain(|xid| *xid != reply.xid);
        ensure!(waiting.len() + 1 == before, "unknown xid {:#x}", reply.xid);
        ensure!(reply.outcome.is_ok(), "{:?}", reply.outcome);
    }
    Ok(())
}

fn call_in_fragments_is_answered(it: &mut Fixture) -> CaseResult {
    let record = call_record(77, &Credential::None, (NFS, 3, 0), &[]);
    let mut fragments = Vec::new();
    let parts = record[4..].chunks(8);
    let count = parts.len();
    for (at, part) in parts.enumerate() {
        let last = u32::from(at + 1 == count) << 31;
        fragments.extend((part.len() as u32 | last).to_be_bytes());
        fragments.extend(part);
    }
    let connection = &mut it.client.connection;
    connection.sender().send_bytes(&fragments)?;
    let reply = connection.receive()?;
    equal("the xid", reply.xid, 77)?;
    equal("the outcome", reply.outcome, Ok(Vec::new()))
}
