//! Fuzz targets of the bytes before messages, see the parent module.

use pagemesh_base::checksum::crc32c;
use pagemesh_base::layout::BrickId;
use pagemesh_fabric::test_api::map_wire::{
    GRANT_BYTES, GrantHeader, HELLO_BYTES, MapProtocolError, Refusal, check_hello, hello,
};
use pagemesh_fuzz::{FuzzTarget, Random};
use std::mem::discriminant;
use uuid::Uuid;

fn target(name: &'static str) -> FuzzTarget {
    FuzzTarget::new(name, env!("CARGO_MANIFEST_DIR")).fixup(fix_checksum)
}

fn fix_checksum(bytes: &mut [u8], _: &mut Random) {
    if let Some((said, crc)) = bytes.split_last_chunk_mut::<4>() {
        *crc = crc32c(said).to_le_bytes();
    }
}

#[test]
fn fuzz_map_hello() {
    target("map_hello")
        .seeds([hello().to_vec()])
        .cases(10_000)
        .bytes_max(HELLO_BYTES)
        .run(|bytes| {
            let said = bytes.first_chunk::<HELLO_BYTES>()?;
            let checked = check_hello(said);
            // There is one hello, apart from its two ignored bytes.
            let same = said[..10] == hello()[..10];
            assert!(checked.is_err() || same, "{said:02x?}");
            Some(checked.err().as_ref().map(discriminant::<MapProtocolError>))
        });
}

#[test]
fn fuzz_map_grant() {
    let grant = GrantHeader {
        refused: None,
        session: 7,
        incarnation: 2,
        brick: BrickId(Uuid::from_u128(0xb)),
        pool_bytes: 1 << 40,
        control_bytes: 16 << 20,
        knows_hints: true,
        knows_snapshots: true,
    };
    let refusal = |no_session| GrantHeader {
        refused: Some(Refusal {
            no_session,
            reason_bytes: 30,
        }),
        ..grant
    };
    target("map_grant")
        .seeds([grant, refusal(false), refusal(true)].map(|header| header.encode().to_vec()))
        .cases(10_000)
        .bytes_max(GRANT_BYTES)
        .run(|bytes| {
            let said = bytes.first_chunk::<GRANT_BYTES>()?;
            Some(match GrantHeader::decode(said) {
                Err(cause) => Err(discriminant(&cause)),
                Ok(header) => {
                    let again = header.encode();
                    assert_eq!(GrantHeader::decode(&again), Ok(header));
                    // A valid grant encodes to the same bytes. A status has three values, and only
                    // a refusal has a reason.
                    assert!([0, 1, 2].contains(&u16::from_le_bytes([said[10], said[11]])));
                    assert_eq!(again[..56], said[..56], "{header:?}");
                    Ok(header.refused.map(|refusal| refusal.no_session))
                }
            })
        });
}
