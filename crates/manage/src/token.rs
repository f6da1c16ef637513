//! The token that proves to the manager that a client knows the cluster key: the HMAC-SHA256 (RFC
//! 2104) of a fixed text under the key, in hex, sent as a bearer token (RFC 6750). The key itself
//! never leaves the client.

use hmac::{Hmac, Mac};
use pagemesh_base::key::Key;
use sha2::Sha256;

/// The text under the token's HMAC. Other uses of the key have other texts.
const MAC_TEXT: &[u8] = b"pagemesh rest v0";
/// Bytes of the HMAC.
const MAC_BYTES: usize = 32;

fn mac(key: &Key) -> Hmac<Sha256> {
    let mut code = <Hmac<Sha256> as Mac>::new_from_slice(key.as_bytes())
        .expect("HMAC takes keys of any length");
    code.update(MAC_TEXT);
    code
}

/// The token of a key: 64 hexadecimal digits.
#[must_use]
pub fn token(key: &Key) -> String {
    let bytes = mac(key).finalize().into_bytes();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the value of an `Authorization` header carries the key's token. The comparison takes
/// constant time.
#[must_use]
pub fn is_authorized(key: &Key, header: &[u8]) -> bool {
    let Some(bytes) = parse_bearer(header) else {
        return false;
    };
    mac(key).verify_slice(&bytes).is_ok()
}

fn parse_bearer(header: &[u8]) -> Option<[u8; MAC_BYTES]> {
    let text = std::str::from_utf8(header).ok()?;
    let (scheme, digits) = text.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("bearer") || digits.len() != MAC_BYTES * 2 {
        return None;
    }
    let mut bytes = [0; MAC_BYTES];
    for (byte, pair) in bytes.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
        let [high, low] = [char::from(pair[0]), char::from(pair[1])].map(|c| c.to_digit(16));
        *byte = (high? << 4 | low?) as u8;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_token_of_own_key_is_authorized() {
        let key = Key::from_bytes([7; 32]);
        let right = format!("Bearer {}", token(&key));
        // Computed with: printf 'pagemesh rest v0' | openssl dgst -sha256
        // -mac hmac -macopt hexkey:$(printf '07%.0s' $(seq 32))
        let vector = "7f7d9a577828ca4363114f492fc7ca2015146941bc97537e1075aad3eacd7ed3";
        assert_eq!(token(&key), vector);
        assert!(is_authorized(&key, right.as_bytes()));
        let other = format!("Bearer {}", token(&Key::from_bytes([8; 32])));
        for wrong in ["", "Bearer", "Bearer ", &other, &right[..70], &right[7..]] {
            assert!(!is_authorized(&key, wrong.as_bytes()), "{wrong:?}");
        }
        let mut flipped = right.clone().into_bytes();
        let last = flipped.len() - 1;
        flipped[last] ^= 1;
        assert!(!is_authorized(&key, &flipped));
        flipped[last] = 0xff;
        assert!(!is_authorized(&key, &flipped));
    }
}
