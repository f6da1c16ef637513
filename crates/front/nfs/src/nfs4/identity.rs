//! Names of owners and groups. A client with the same numbers as the server sends and takes decimal
//! numbers (RFC 8881, section 5.9), as Linux does unless it is told to map names.

use super::status::Status;
use crate::xdr::Writer;
use std::sync::Arc;

/// The most digits of an id.
const DIGITS_MAX: usize = 10;

/// The answer of a list of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameAnswer<T> {
    /// The name or number.
    Known(T),
    /// There is none.
    Unknown,
    /// It is not known yet. The client asks again later.
    Pending,
}

/// Maps ids to names and back. The server asks it while it answers a request: an implementation keeps
/// its answers, and never waits.
pub trait Identities: Send + Sync {
    /// The name of a user. An unknown one is sent as its number.
    fn user_name(&self, uid: u32) -> NameAnswer<Arc<str>>;

    /// The name of a group. An unknown one is sent as its number.
    fn group_name(&self, gid: u32) -> NameAnswer<Arc<str>>;

    /// The user of a name that is no number.
    fn user_id(&self, name: &str) -> NameAnswer<u32>;

    /// The group of a name that is no number.
    fn group_id(&self, name: &str) -> NameAnswer<u32>;
}

/// Sends numbers, and knows no names.
#[derive(Clone, Copy, Debug, Default)]
pub struct NumericIdentities;

impl Identities for NumericIdentities {
    fn user_name(&self, _: u32) -> NameAnswer<Arc<str>> {
        NameAnswer::Unknown
    }

    fn group_name(&self, _: u32) -> NameAnswer<Arc<str>> {
        NameAnswer::Unknown
    }

    fn user_id(&self, _: &str) -> NameAnswer<u32> {
        NameAnswer::Unknown
    }

    fn group_id(&self, _: &str) -> NameAnswer<u32> {
        NameAnswer::Unknown
    }
}

/// Appends the name of an owner, or its number.
///
/// # Errors
/// [`Status::Delay`] while the name is looked up.
pub(super) fn encode_owner(
    id: u32,
    name: NameAnswer<Arc<str>>,
    writer: &mut Writer,
) -> Result<(), Status> {
    match name {
        NameAnswer::Known(name) => {
            writer.opaque(name.as_bytes());
            return Ok(());
        }
        NameAnswer::Pending => return Err(Status::Delay),
        NameAnswer::Unknown => {}
    }
    let mut digits = [b'0'; DIGITS_MAX];
    let mut rest = id;
    let mut first = DIGITS_MAX;
    for (at, digit) in digits.iter_mut().enumerate().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
        first = at;
        if rest == 0 {
            break;
        }
    }
    writer.opaque(&digits[first..]);
    Ok(())
}

/// The id of a name of a client. Digits are a number.
///
/// # Errors
/// [`Status::Invalid`] for an empty name or one that is not UTF-8, [`Status::BadOwner`] for an unknown one,
/// [`Status::Delay`] while it is looked up.
pub(super) fn decode_owner(
    name: &[u8],
    find: impl FnOnce(&str) -> NameAnswer<u32>,
) -> Result<u32, Status> {
    let name = std::str::from_utf8(name).map_err(|_| Status::Invalid)?;
    if name.is_empty() {
        return Err(Status::Invalid);
    }
    if name.bytes().all(|byte| byte.is_ascii_digit()) {
        return name.parse().map_err(|_| Status::BadOwner);
    }
    match find(name) {
        NameAnswer::Known(id) => Ok(id),
        NameAnswer::Unknown => Err(Status::BadOwner),
        NameAnswer::Pending => Err(Status::Delay),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_decimal_numbers() {
        for id in [0, 7, 10, 1000, 65_534, u32::MAX] {
            let mut writer = Writer::new();
            encode_owner(id, NameAnswer::Unknown, &mut writer).unwrap();
            let text = id.to_string();
            let mut wanted = Writer::new();
            wanted.opaque(text.as_bytes());
            assert_eq!(writer.written(0), wanted.written(0));
            assert_eq!(
                decode_owner(text.as_bytes(), |_| NameAnswer::Unknown),
                Ok(id)
            );
        }
    }

    #[test]
    fn unknown_owners_are_refused() {
        let find = |name: &str| match name {
            "root@x" => NameAnswer::Known(0),
            "new@x" => NameAnswer::Pending,
            _ => NameAnswer::Unknown,
        };
        let decode = |name: &[u8]| decode_owner(name, find);
        assert_eq!(decode(b"new@x"), Err(Status::Delay));
        assert_eq!(decode(b"root@x"), Ok(0));
        assert_eq!(decode(b"other@x"), Err(Status::BadOwner));
        assert_eq!(decode(b"4294967296"), Err(Status::BadOwner));
        assert_eq!(decode(b"-1"), Err(Status::BadOwner));
        assert_eq!(decode(b""), Err(Status::Invalid));
        assert_eq!(decode(b"\xff"), Err(Status::Invalid));
    }

    #[test]
    fn known_name_is_sent() {
        let mut writer = Writer::new();
        let known = NameAnswer::Known("a@x".into());
        encode_owner(5, known, &mut writer).unwrap();
        assert_eq!(writer.written(0), b"\0\0\0\x03a@x\0");
        let pending = encode_owner(5, NameAnswer::Pending, &mut writer);
        assert_eq!(pending, Err(Status::Delay));
    }
}
