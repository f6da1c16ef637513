//! The cluster key: both ends of a connection must know it before either sends another message.
//!
//! Invariants: the key never appears in printed, formatted or serialised output; its type
//! implements none of these. A key file that others can read is no secret and is refused. Reading
//! that file is the only I/O of this module; keys are made elsewhere.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes of a key: as many as HMAC-SHA256 gives.
pub const KEY_BYTES: usize = 32;
/// Bytes of the longest key file: the digits, and white space around them. Longer files are not key
/// files.
const FILE_BYTES_MAX: u64 = 256;
/// Permission bits of group and others.
const GROUP_AND_OTHERS: u32 = 0o077;
/// Hexadecimal digits of a key.
const DIGITS: usize = KEY_BYTES * 2;

/// A cluster's secret.
#[derive(Clone)]
pub struct Key([u8; KEY_BYTES]);

/// Why there is no key. No error repeats the content of the file.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// No such file, or no right to read it.
    #[error(
        "the key file {} cannot be read: {cause}; name the cluster's key file with --key or PAGEMESH_KEY",
        path.display()
    )]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        cause: io::Error,
    },
    /// Group or others may read or change it.
    #[error(
        "the key file {} is open to others (mode {mode:04o}); run: chmod 600 {}",
        path.display(), path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It is not a key.
    #[error("the key file {} is not a key: {cause}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The error in the text.
        cause: BadKey,
    },
}

/// Why a text is not a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadKey {
    /// Too short or too long.
    #[error("a key is {DIGITS} hexadecimal digits, this text has {0} characters")]
    Length(usize),
    /// Something other than 0-9, a-f, A-F.
    #[error("character {0} of the key is not a hexadecimal digit")]
    Digit(usize),
    /// Longer than any key file, not a regular file, or not text.
    #[error("it must be a small text file of {DIGITS} hexadecimal digits")]
    NotText,
}

impl Key {
    /// The key of these bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Key {
        Key(bytes)
    }

    /// The bytes, for a message authentication code.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }

    /// Reads 64 hexadecimal digits; white space around them is ignored.
    ///
    /// # Errors
    /// When the text is anything else.
    pub fn parse(text: &str) -> Result<Key, BadKey> {
        let digits = text.trim();
        if digits.chars().count() != DIGITS {
            return Err(BadKey::Length(digits.chars().count()));
        }
        let mut values = [0u8; DIGITS];
        for (at, (value, digit)) in values.iter_mut().zip(digits.chars()).enumerate() {
            let nibble = digit.to_digit(16).ok_or(BadKey::Digit(at + 1))?;
            *value = nibble as u8;
        }
        let mut bytes = [0u8; KEY_BYTES];
        for (byte, pair) in bytes.iter_mut().zip(values.chunks_exact(2)) {
            *byte = pair[0] << 4 | pair[1];
        }
        Ok(Key(bytes))
    }

    /// Reads a key file that only its owner can read.
    ///
    /// # Errors
    /// When it cannot be read, is open to group or others, or holds no key.
    pub fn load(path: &Path) -> Result<Key, KeyError> {
        let unreadable = |cause| KeyError::Unreadable {
            path: path.to_owned(),
            cause,
        };
        let malformed = |cause| KeyError::Malformed {
            path: path.to_owned(),
            cause,
        };
        // Checked before opening: opening a pipe would wait for a writer. The opened file is
        // checked again, as another file may get the name in between.
        if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
            return Err(malformed(BadKey::NotText));
        }
        let file = File::open(path).map_err(unreadable)?;
        let metadata = file.metadata().map_err(unreadable)?;
        if metadata.mode() & GROUP_AND_OTHERS != 0 {
            return Err(KeyError::Exposed {
                path: path.to_owned(),
                mode: metadata.mode() & 0o7777,
            });
        }
        let mut bytes = Vec::new();
        let mut limited = file.take(FILE_BYTES_MAX + 1);
        limited.read_to_end(&mut bytes).map_err(unreadable)?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(malformed(BadKey::NotText));
        }
        let text = std::str::from_utf8(&bytes).map_err(|_| malformed(BadKey::NotText))?;
        Key::parse(text).map_err(malformed)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    const TEXT: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191A1B1C1D1E1F";

    fn file(name: &str, mode: u32, text: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(name);
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("mode set");
        (dir, path)
    }

    #[test]
    fn reads_64_digits_and_a_newline() {
        let (_dir, path) = file("key", 0o600, format!("{TEXT}\n").as_bytes());
        let key = Key::load(&path).expect("a key");
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(key.as_bytes().as_slice(), ascending);
    }

    #[test]
    fn debug_output_hides_key() {
        let key = Key::parse(TEXT).expect("a key");
        assert_eq!(format!("{key:?}"), "Key(hidden)");
    }

    #[test]
    fn text_of_wrong_length_or_digits_is_no_key() {
        for bad in ["", "00", &TEXT[1..], &format!("{TEXT}0")] {
            assert!(matches!(Key::parse(bad), Err(BadKey::Length(_))), "{bad:?}");
        }
        let sign = format!("+{}", &TEXT[1..]);
        assert_eq!(Key::parse(&sign).err(), Some(BadKey::Digit(1)));
        let accent = format!("{}é", &TEXT[1..]);
        assert_eq!(Key::parse(&accent).err(), Some(BadKey::Digit(64)));
    }

    #[test]
    fn key_file_readable_by_others_is_refused_with_chmod_hint() {
        for mode in [0o640, 0o604, 0o660, 0o601] {
            let (_dir, path) = file("key", mode, TEXT.as_bytes());
            let said = Key::load(&path).expect_err("exposed").to_string();
            assert!(said.contains("chmod 600"), "{said}");
            assert!(!said.contains(TEXT), "{said}");
        }
    }

    #[test]
    fn malformed_key_file_is_refused_without_its_content() {
        for text in [&b"secret"[..], &[0xff; 64], &[b'a'; 1000]] {
            let (_dir, path) = file("key", 0o600, text);
            let error = Key::load(&path).expect_err("no key");
            assert!(matches!(error, KeyError::Malformed { .. }), "{error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        let dir = tempfile::tempdir().expect("a directory");
        assert!(matches!(
            Key::load(dir.path()),
            Err(KeyError::Malformed { .. })
        ));
        assert!(matches!(
            Key::load(&dir.path().join("none")),
            Err(KeyError::Unreadable { .. })
        ));
    }
}
