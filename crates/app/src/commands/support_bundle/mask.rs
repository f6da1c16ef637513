//! Replaces secrets in a text.
//!
//! A secret of this host is known by its text: it is replaced in any part of `WINDOW` bytes or more,
//! also in hexadecimal digits of either case, in base64 at any offset, and percent-encoded. Any other secret is
//! known by its shape: tokens of pagemesh, keys in hexadecimal digits, credentials in headers and URLs, and values with a telling
//! name. Invariant: pure.

use regex::{Captures, Regex};
use std::collections::{HashMap, HashSet};

/// The text in place of a secret.
const MASKED: &str = "[secret]";
/// Bytes of the shortest part of a secret that is replaced: 40 bits of a key in hexadecimal digits, so that no
/// other text is hit by chance.
const WINDOW: usize = 10;
/// Bytes of the shortest known secret: a shorter text would hit ordinary words.
const SECRET_BYTES_MIN: usize = 6;

/// Shapes of secrets. The first group stays; the rest of the match is replaced.
const SHAPES: [&str; 7] = [
    // A token of pagemesh, or its beginning.
    r"()pm_[A-Za-z0-9_-]{10,}",
    // A key, the HMAC that proves one, or another 256 bits.
    r"()[0-9a-fA-F]{64,}",
    // Headers.
    r"(?i)((?:bearer|basic)(?:\s|%20|\+)+)[^\s,;]{6,}",
    r"(?im)((?:set-)?cookie2?\s*[:=]\s*)\S[^\r\n]*",
    // User and password of a URL.
    r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\s@]*:[^/\s@]*@",
    // Parameters of a URL, and cookies.
    r"(?i)([?&;\s](?:pagemesh_)?(?:token|password|secret|api[_-]?key|auth)=)[^&;\s/][^&;\s]*",
    // Values with a telling name that are no path.
    r#"(?i)((?:password|passwd|passphrase|secret|token|credential|api[_-]?key|private[_-]?key)["']?\s*[:=]\s*["']?)[^\s"'/\[{,;][^\s"',;]{5,}"#,
];

/// The secrets to replace.
pub struct Mask {
    /// Parts of known secrets, by their length.
    windows: HashMap<usize, HashSet<Vec<u8>>>,
    shapes: Vec<Regex>,
}

impl Mask {
    pub fn new(secrets: &[Vec<u8>]) -> Mask {
        let mut windows: HashMap<usize, HashSet<Vec<u8>>> = HashMap::new();
        for spelling in secrets.iter().flat_map(|it| spellings(it)) {
            let width = spelling.len().min(WINDOW);
            if width >= SECRET_BYTES_MIN {
                let parts = spelling.windows(width).map(<[u8]>::to_vec);
                windows.entry(width).or_default().extend(parts);
            }
        }
        let shapes = SHAPES
            .iter()
            .map(|it| Regex::new(it).expect("a valid shape"));
        Mask {
            windows,
            shapes: shapes.collect(),
        }
    }

    /// The text without secrets, and the number of those replaced.
    pub fn apply(&self, text: &str) -> (String, u64) {
        let (mut text, mut count) = self.replace_known(text);
        for shape in &self.shapes {
            let replace = |found: &Captures| {
                count += 1;
                format!("{}{MASKED}", &found[1])
            };
            text = shape.replace_all(&text, replace).into_owned();
        }
        (text, count)
    }

    fn replace_known(&self, text: &str) -> (String, u64) {
        let bytes = text.as_bytes();
        let mut secret = vec![false; bytes.len()];
        for (width, parts) in &self.windows {
            let starts: HashSet<[u8; 2]> = parts.iter().map(|it| [it[0], it[1]]).collect();
            for (at, found) in bytes.windows(*width).enumerate() {
                if starts.contains(&[found[0], found[1]]) && parts.contains(found) {
                    secret[at..at + width].fill(true);
                }
            }
        }
        let (mut out, mut count, mut at) = (vec![], 0, 0);
        while at < bytes.len() {
            let length = secret[at..]
                .iter()
                .take_while(|it| **it == secret[at])
                .count();
            if secret[at] {
                out.extend_from_slice(MASKED.as_bytes());
                count += 1;
            } else {
                out.extend_from_slice(&bytes[at..at + length]);
            }
            at += length;
        }
        (String::from_utf8_lossy(&out).into_owned(), count)
    }
}

/// The ways in which a secret may be written.
fn spellings(secret: &[u8]) -> Vec<Vec<u8>> {
    let mut written = vec![
        secret.to_vec(),
        secret.to_ascii_lowercase(),
        secret.to_ascii_uppercase(),
        each(secret, |byte| format!("%{byte:02x}")),
        each(secret, |byte| format!("%{byte:02X}")),
        each(secret, |byte| format!("{byte:02x}")),
        each(secret, |byte| format!("{byte:02X}")),
    ];
    for alphabet in [STANDARD, URL_SAFE] {
        // Three bytes are four characters, so that three offsets differ. The characters at both ends mix with other bytes.
        for offset in 0..3.min(secret.len()) {
            let whole = (secret.len() - offset) / 3 * 3;
            written.push(base64(&secret[offset..offset + whole], alphabet));
        }
    }
    written
}

fn each(secret: &[u8], spell: impl Fn(u8) -> String) -> Vec<u8> {
    secret
        .iter()
        .flat_map(|byte| spell(*byte).into_bytes())
        .collect()
}

/// The last two characters of the alphabets of RFC 4648.
const STANDARD: [u8; 2] = *b"+/";
const URL_SAFE: [u8; 2] = *b"-_";

/// Base64 of whole groups of three bytes.
fn base64(bytes: &[u8], last: [u8; 2]) -> Vec<u8> {
    let letter = |value: u32| match value & 63 {
        value @ 0..26 => b'A' + value as u8,
        value @ 26..52 => b'a' + (value - 26) as u8,
        value @ 52..62 => b'0' + (value - 52) as u8,
        62 => last[0],
        _ => last[1],
    };
    let groups = bytes.chunks_exact(3);
    let values = groups.map(|it| u32::from_be_bytes([0, it[0], it[1], it[2]]));
    values
        .flat_map(|value| [18, 12, 6, 0].map(|shift| letter(value >> shift)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "5f0c9a7be1d24386b7f1a90c3d5e8264";

    /// Asserts that a text keeps no ten bytes in a row of what stands for the secret.
    #[track_caller]
    fn hides(text: &str, leaked: &str) {
        let (masked, count) = Mask::new(&[SECRET.into()]).apply(text);
        assert!(count > 0 && !masked.contains(leaked), "{masked}");
    }

    #[test]
    fn known_secret_is_hidden_in_each_spelling() {
        hides(&format!("x={SECRET}&y"), &SECRET[..4]);
        hides(&SECRET.to_uppercase(), "5F0C");
        hides(&format!("part {} of it", &SECRET[7..19]), &SECRET[7..12]);
        for before in ["", "a", "ab"] {
            let text = format!("{before}{SECRET}z");
            let padded = format!("{text}{}", &"00"[..(3 - text.len() % 3) % 3]);
            let coded = base64(padded.as_bytes(), STANDARD);
            let coded = String::from_utf8(coded).expect("letters");
            hides(&coded, &coded[8..20]);
        }
        let hex = String::from_utf8(each(SECRET.as_bytes(), |byte| format!("{byte:02x}")));
        hides(&hex.expect("digits"), "3566");
    }

    #[test]
    fn unknown_secrets_are_hidden_by_shape() {
        let mask = Mask::new(&[]);
        for text in [
            "pm_QkFTRTY0LXRva2VuLW9mLWEtdGVzdC13aXRoLTQzLWM",
            "key QkFT 5f0c9a7be1d24386b7f1a90c3d5e82645f0c9a7be1d24386b7f1a90c3d5e8264",
            "Authorization: Bearer QkFTRTY0",
            "cookie: a=b; pagemesh_token=QkFTRTY0",
            "http://me:QkFTRTY0@10.0.0.1:7070/",
            "GET /x?token=QkFTRTY0 200",
            "password = \"QkFTRTY0\"",
            "{\"token\": \"QkFTRTY0\"}",
            "--api-key=QkFTRTY0",
        ] {
            let (masked, count) = mask.apply(text);
            assert!(count > 0, "{text}");
            let rest = masked.replace("key QkFT", "");
            assert!(!rest.contains("QkFT") && !rest.contains("5f0c"), "{masked}");
        }
    }

    #[test]
    fn ordinary_text_stays() {
        let mask = Mask::new(&[SECRET.into(), b"abc".to_vec()]);
        for text in [
            "key = \"/etc/pagemesh/key\"",
            "token-file = \"/etc/pagemesh/token\"",
            "abc def, 5f0c9a7b",
            "http://10.0.0.1:7070/api/v1/volumes",
            "Größe 12 µs",
        ] {
            assert_eq!(mask.apply(text), (text.to_owned(), 0));
        }
    }
}
