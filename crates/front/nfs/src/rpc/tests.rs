use super::*;
use crate::testing::words;

/// A call of NFSv3 GETATTR as Linux sends it: AUTH_SYS of `host`, user 1000, groups 1000, 4 and 27.
#[rustfmt::skip]
const LINUX_CALL: [u8; 88] = [
    0x12, 0x34, 0x56, 0x78, // xid
    0, 0, 0, 0, // call
    0, 0, 0, 2, // RPC version
    0, 1, 0x86, 0xa3, // program 100003
    0, 0, 0, 3, // version
    0, 0, 0, 1, // procedure
    0, 0, 0, 1, 0, 0, 0, 36, // AUTH_SYS
    0, 0x98, 0x96, 0x80, // stamp
    0, 0, 0, 4, b'h', b'o', b's', b't',
    0, 0, 3, 0xe8, // uid
    0, 0, 3, 0xe8, // gid
    0, 0, 0, 3, 0, 0, 3, 0xe8, 0, 0, 0, 4, 0, 0, 0, 27,
    0, 0, 0, 0, 0, 0, 0, 0, // verifier
    0, 0, 0, 4, 9, 9, 9, 9, // arguments: a handle
    0, 0, 0, 7,
];

fn denial(record: &[u8]) -> Denial {
    match Call::decode(record) {
        Err(CallError::Denied { denial, .. }) => denial,
        other => panic!("{other:?}"),
    }
}

/// A call with this credential and verifier.
fn call_with(credential: &[u8], verifier: &[u8]) -> Vec<u8> {
    [&LINUX_CALL[..24], credential, verifier].concat()
}

#[test]
fn header_of_linux_is_decoded() {
    let (call, arguments) = Call::decode(&LINUX_CALL).unwrap();
    let ids = (call.xid, call.program, call.version, call.procedure);
    assert_eq!(ids, (0x1234_5678, 100_003, 3, 1));
    let Credential::System(credential) = call.credential else {
        panic!("{call:?}");
    };
    assert_eq!(credential.stamp, 10_000_000);
    assert_eq!(credential.machine_name, b"host");
    assert_eq!((credential.uid, credential.gid), (1000, 1000));
    assert_eq!(credential.groups.ids(), [1000, 4, 27]);
    assert_eq!(arguments.rest(), words(&[4, 0x0909_0909, 7]));
}

#[test]
fn every_cut_of_a_header_is_refused() {
    for len in 0..76 {
        let decoded = Call::decode(&LINUX_CALL[..len]);
        let is_short = matches!(decoded, Err(CallError::Header(XdrError::Short { .. })));
        assert!(is_short, "{len}: {decoded:?}");
    }
    assert!(Call::decode(&LINUX_CALL[..76]).is_ok());
}

#[test]
fn caller_without_credential_is_anonymous() {
    let record = call_with(&words(&[0, 0]), &words(&[0, 0]));
    assert_eq!(
        Call::decode(&record).unwrap().0.credential,
        Credential::None
    );
}

#[test]
fn other_messages_are_refused() {
    let mut reply = LINUX_CALL;
    reply[7] = 1;
    assert_eq!(Call::decode(&reply), Err(CallError::NotACall(1)));
    let mut version = LINUX_CALL;
    version[11] = 3;
    assert_eq!(denial(&version), Denial::RpcMismatch);
}

#[test]
fn other_flavors_are_rejected() {
    for flavor in [2, 3, 6, 390_003] {
        let record = call_with(&words(&[flavor, 4, 0]), &words(&[0, 0]));
        let rejected = Denial::Authentication(AuthStatus::RejectedCredential);
        assert_eq!(denial(&record), rejected, "{flavor}");
    }
}

#[test]
fn malformed_credentials_are_refused() {
    let bad = Denial::Authentication(AuthStatus::BadCredential);
    let seventeen = [&[1, 4 * (5 + 17), 0, 0, 0, 0, 17][..], &[0; 17]].concat();
    let cases = [
        words(&[1, 4, 0]),
        words(&[1, 24, 0, 0, 0, 0, 0, 0]),
        words(&[1, 20, 0, 0, 0, 0, 1]),
        words(&[1, 8, 0, 256]),
        words(&seventeen),
        [words(&[0, 404]), vec![0; 404]].concat(),
    ];
    for credential in cases {
        let record = call_with(&credential, &words(&[0, 0]));
        assert_eq!(denial(&record), bad, "{credential:?}");
    }
}

#[test]
fn sixteen_groups_are_accepted() {
    let groups: Vec<u32> = (1..=16).collect();
    let credential = [&[1, 4 * (5 + 16), 0, 0, 0, 0, 16][..], &groups].concat();
    let record = call_with(&words(&credential), &words(&[0, 0]));
    let (call, _) = Call::decode(&record).unwrap();
    let Credential::System(credential) = call.credential else {
        panic!("{call:?}");
    };
    assert_eq!(credential.groups.ids(), groups);
}

#[test]
fn verifier_must_be_empty() {
    let bad = Denial::Authentication(AuthStatus::BadVerifier);
    for verifier in [words(&[1, 0]), words(&[0, 4, 0]), words(&[0, 401])] {
        assert_eq!(denial(&call_with(&words(&[0, 0]), &verifier)), bad);
    }
}

struct Data(&'static [u8]);

impl Encode for Data {
    fn encode(&self, writer: &mut Writer) {
        writer.length(self.0.len());
    }

    fn tail(&self) -> Bytes {
        Bytes::from_static(self.0)
    }
}

#[test]
fn success_has_mark_header_and_padded_tail() {
    let reply = Reply::success(7, &Data(b"hello")).parts().concat();
    let head = words(&[0x8000_0024, 7, 1, 0, 0, 0, 0, 5]);
    assert_eq!(reply, [&head[..], b"hello\0\0\0"].concat());
    let empty = Reply::success(7, &()).parts().concat();
    assert_eq!(empty, words(&[0x8000_0018, 7, 1, 0, 0, 0, 0]));
}

#[test]
fn tail_is_not_copied() {
    let reply = Reply::success(7, &Data(b"hello"));
    assert_eq!(reply.parts()[1].as_ptr(), b"hello".as_ptr());
}

#[test]
fn refusals_have_the_numbers_of_the_rfc() {
    let check = |refusal, rest: &[u32]| {
        let mark = 0x8000_0000 | (20 + 4 * rest.len() as u32);
        let wanted = [&[mark, 7, 1, 0, 0, 0][..], rest].concat();
        assert_eq!(Reply::refused(7, refusal).parts().concat(), words(&wanted));
    };
    check(Refusal::ProgramUnavailable, &[1]);
    check(Refusal::ProgramMismatch { low: 3, high: 4 }, &[2, 3, 4]);
    check(Refusal::ProcedureUnavailable, &[3]);
    check(Refusal::GarbageArguments, &[4]);
    check(Refusal::SystemError, &[5]);
}

#[test]
fn denials_have_the_numbers_of_the_rfc() {
    let mismatch = Reply::denied(7, Denial::RpcMismatch).parts().concat();
    assert_eq!(mismatch, words(&[0x8000_0018, 7, 1, 1, 0, 2, 2]));
    for (number, status) in (1..).zip(AuthStatus::ALL) {
        let denied = Reply::denied(7, Denial::Authentication(*status));
        let wanted = words(&[0x8000_0014, 7, 1, 1, 1, number]);
        assert_eq!(denied.parts().concat(), wanted);
    }
}
