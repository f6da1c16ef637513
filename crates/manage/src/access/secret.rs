//! The secret of a token, and its hash.
//!
//! Invariants: neither type shows its content in debug output. Only [`TokenSecret::expose`] returns
//! the text of a token. Secrets are random with 256 bits, so a fast hash is enough: a guess of the
//! input of a known hash is as hopeless as a guess of the token. The look-up by hash may take
//! variable time for the same reason, because a client cannot choose the bytes of a hash.

use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::{Digest, Sha256};
use std::fmt;
use std::io;

/// The first characters of every token.
pub(crate) const TOKEN_PREFIX: &str = "pm_";
/// Random bytes of a token.
const SECRET_BYTES: usize = 32;
/// Characters behind the prefix: base64url (RFC 4648, section 5) without padding.
const DIGITS: usize = 43;
const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
/// Bytes of a SHA-256.
const HASH_BYTES: usize = 32;

/// A token: `pm_` and 43 characters of base64url.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenSecret(String);

impl TokenSecret {
    /// A new token.
    ///
    /// # Errors
    /// When the kernel gives no random bytes.
    pub fn random() -> io::Result<TokenSecret> {
        let mut bytes = [0; SECRET_BYTES];
        let mut at = 0;
        while at < bytes.len() {
            at += getrandom(&mut bytes[at..], GetRandomFlags::empty())?;
        }
        Ok(TokenSecret::from_bytes(&bytes))
    }

    fn from_bytes(bytes: &[u8; SECRET_BYTES]) -> TokenSecret {
        let mut text = TOKEN_PREFIX.to_owned();
        for three in bytes.chunks(3) {
            let byte = |at: usize| u32::from(three.get(at).copied().unwrap_or(0));
            let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
            for digit in 0..=three.len() {
                let index = bits >> (18 - 6 * digit) & 63;
                text.push(char::from(ALPHABET[index as usize]));
            }
        }
        TokenSecret(text)
    }

    /// The token of a text; `None` if the text has another form.
    #[must_use]
    pub fn parse(text: &str) -> Option<TokenSecret> {
        let digits = text.strip_prefix(TOKEN_PREFIX)?;
        let is_token = digits.len() == DIGITS && digits.bytes().all(|it| ALPHABET.contains(&it));
        is_token.then(|| TokenSecret(text.to_owned()))
    }

    /// The text of the token. The caller must not log it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// The SHA-256 of the text.
    #[must_use]
    pub fn hash(&self) -> TokenHash {
        TokenHash(Sha256::digest(self.0.as_bytes()).into())
    }
}

impl fmt::Debug for TokenSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenSecret")
    }
}

/// The SHA-256 of a token. JSON has it in hexadecimal; only the store's records contain it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TokenHash([u8; HASH_BYTES]);

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenHash")
    }
}

impl Serialize for TokenHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let digits: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        serializer.serialize_str(&digits)
    }
}

impl<'de> Deserialize<'de> for TokenHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TokenHash, D::Error> {
        // The error does not repeat the text.
        let bad = || de::Error::custom("the hash of a token has 64 hexadecimal digits");
        let text = String::deserialize(deserializer)?;
        if text.len() != HASH_BYTES * 2 || !text.is_ascii() {
            return Err(bad());
        }
        let mut bytes = [0; HASH_BYTES];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let [high, low] = [pair[0], pair[1]].map(|it| char::from(it).to_digit(16));
            let (Some(high), Some(low)) = (high, low) else {
                return Err(bad());
            };
            *byte = (high << 4 | low) as u8;
        }
        Ok(TokenHash(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_base64url_of_its_bytes() {
        // Computed with: printf '\xfb%.0s' $(seq 32) | base64 | tr +/ -_ | tr -d =
        let token = TokenSecret::from_bytes(&[0xfb; 32]);
        let text = "pm_-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_v7-_s";
        assert_eq!(token.expose(), text);
        assert_eq!(TokenSecret::parse(text), Some(token.clone()));
        // Computed with: printf "$TEXT" | sha256sum
        let hash = serde_json::to_string(&token.hash()).expect("JSON");
        assert_eq!(hash.len(), 66);
        let again: TokenHash = serde_json::from_str(&hash).expect("a hash");
        assert_eq!(again, token.hash());
    }

    #[test]
    fn other_texts_are_no_tokens() {
        let token = TokenSecret::random().expect("random bytes");
        let text = token.expose();
        let wrong = [
            "",
            "pm_",
            &text[3..],
            &text[..45],
            &format!("{text}A"),
            &format!("PM_{}", &text[3..]),
            &format!("{}+", &text[..45]),
            &format!("{} ", &text[..45]),
            &format!("{}é", &text[..44]),
        ];
        for wrong in wrong {
            assert!(TokenSecret::parse(wrong).is_none(), "{wrong}");
        }
        assert_ne!(TokenSecret::random().expect("random bytes"), token);
    }

    #[test]
    fn debug_output_hides_token_and_hash() {
        let token = TokenSecret::random().expect("random bytes");
        let shown = format!("{token:?} {:?}", token.hash());
        assert_eq!(shown, "TokenSecret TokenHash");
    }
}
