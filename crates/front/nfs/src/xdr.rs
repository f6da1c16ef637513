//! XDR (RFC 4506): a reader that borrows, and a writer that appends.
//!
//! A [`Reader`] takes no memory and copies no bytes. It compares a length with its limit, then with
//! the bytes that are left, before it returns anything.
//!
//! A variable field is padded to a multiple of four bytes. The padding must be there. Its value is
//! ignored, as the kernels and libtirpc do: nothing depends on it, and a client that sends other
//! bytes than zeroes would gain nothing from an error. Bytes after the last field are ignored for
//! the same reason; [`Reader::finish`] refuses them where they could hide a part of a credential.

use bytes::Bytes;

/// Bytes of the unit of XDR.
pub const UNIT_BYTES: usize = 4;

/// The reason that bytes are not the expected value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XdrError {
    /// The bytes end inside a field.
    #[error("a field needs {wanted} bytes, and {left} are left")]
    Short {
        /// Bytes of the field, with its padding.
        wanted: usize,
        /// Bytes that are left.
        left: usize,
    },
    /// A variable field is longer than its limit.
    #[error("{what}: length {len} is more than {max}")]
    TooLong {
        /// The field.
        what: &'static str,
        /// Its length on the wire.
        len: u32,
        /// Its limit.
        max: usize,
    },
    /// A boolean is neither 0 nor 1.
    #[error("a boolean is {0}; only 0 and 1 are allowed")]
    Boolean(u32),
    /// An enumeration has no such value.
    #[error("{what}: there is no value {value}")]
    Enumeration {
        /// The enumeration.
        what: &'static str,
        /// Its value on the wire.
        value: u32,
    },
    /// Two fields contradict each other.
    #[error("{what}: {counted} bytes are announced, and {sent} are sent")]
    Contradiction {
        /// The field.
        what: &'static str,
        /// Bytes that the first field announces.
        counted: u32,
        /// Bytes of the second field.
        sent: usize,
    },
    /// Bytes follow the last field.
    #[error("{what}: {extra} bytes follow the last field")]
    Extra {
        /// The structure.
        what: &'static str,
        /// The number of bytes.
        extra: usize,
    },
}

/// A value that clients send.
pub trait Decode<'a>: Sized {
    /// Takes the value from the front of the reader.
    ///
    /// # Errors
    /// If the bytes are not such a value.
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError>;
}

/// A value that the server sends.
pub trait Encode {
    /// Appends the value, without its [`tail`](Encode::tail).
    fn encode(&self, writer: &mut Writer);

    /// The bytes that follow the encoded fields. The reply sends them without a copy, and pads
    /// them. Only the result of a procedure may have a tail: [`rpc::Reply`](crate::rpc::Reply) asks
    /// no inner field for one.
    fn tail(&self) -> Bytes {
        Bytes::new()
    }
}

/// The zeroes after a field of `len` bytes.
#[must_use]
pub const fn padding_bytes(len: usize) -> usize {
    len.wrapping_neg() % UNIT_BYTES
}

/// Takes fields from the front of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// A reader at the first of these bytes.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The bytes that no field has taken.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Takes this many bytes and their padding; returns the bytes.
    fn take(&mut self, count: usize) -> Result<&'a [u8], XdrError> {
        let wanted = count.saturating_add(padding_bytes(count));
        let Some((field, rest)) = self.rest.split_at_checked(wanted) else {
            let left = self.rest.len();
            return Err(XdrError::Short { wanted, left });
        };
        self.rest = rest;
        Ok(&field[..count])
    }

    /// Takes a field of fixed size.
    ///
    /// # Errors
    /// If the bytes or their padding are not there.
    pub fn fixed<const N: usize>(&mut self) -> Result<&'a [u8; N], XdrError> {
        let field = self.take(N)?;
        let short = XdrError::Short {
            wanted: N,
            left: field.len(),
        };
        field.first_chunk().ok_or(short)
    }

    /// Takes `count` bytes and their padding, without a length before them.
    ///
    /// # Errors
    /// If the bytes or their padding are not there.
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], XdrError> {
        self.take(count)
    }

    /// Takes an unsigned integer.
    ///
    /// # Errors
    /// If fewer than four bytes are left.
    pub fn u32(&mut self) -> Result<u32, XdrError> {
        self.fixed().map(|bytes| u32::from_be_bytes(*bytes))
    }

    /// Takes an unsigned hyper integer.
    ///
    /// # Errors
    /// If fewer than eight bytes are left.
    pub fn u64(&mut self) -> Result<u64, XdrError> {
        self.fixed().map(|bytes| u64::from_be_bytes(*bytes))
    }

    /// Takes a boolean.
    ///
    /// # Errors
    /// If it is neither 0 nor 1, or not there.
    pub fn bool(&mut self) -> Result<bool, XdrError> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(XdrError::Boolean(other)),
        }
    }

    /// Takes the length of a variable field or array, of at most `max` bytes or elements.
    ///
    /// # Errors
    /// If the length is more than `max`, or not there.
    pub fn length(&mut self, what: &'static str, max: usize) -> Result<usize, XdrError> {
        let len = self.u32()?;
        match usize::try_from(len) {
            Ok(length) if length <= max => Ok(length),
            _ => Err(XdrError::TooLong { what, len, max }),
        }
    }

    /// Takes this many bytes: the elements of an array that are decoded later.
    ///
    /// # Errors
    /// If not all of them and their padding are there.
    pub fn units(&mut self, count: usize) -> Result<&'a [u8], XdrError> {
        self.take(count)
    }

    /// Takes variable opaque data or a string, as bytes.
    ///
    /// # Errors
    /// If it is longer than `max`, or not all of its bytes and its padding are there.
    pub fn opaque(&mut self, what: &'static str, max: usize) -> Result<&'a [u8], XdrError> {
        let len = self.length(what, max)?;
        self.take(len)
    }

    /// Takes optional data: a boolean, and the value after a true one.
    ///
    /// # Errors
    /// As the boolean and the value.
    pub fn optional<T>(
        &mut self,
        value: impl FnOnce(&mut Self) -> Result<T, XdrError>,
    ) -> Result<Option<T>, XdrError> {
        match self.bool()? {
            true => value(self).map(Some),
            false => Ok(None),
        }
    }

    /// Ends a structure that must take all bytes.
    ///
    /// # Errors
    /// If bytes are left.
    pub fn finish(&self, what: &'static str) -> Result<(), XdrError> {
        match self.rest.len() {
            0 => Ok(()),
            extra => Err(XdrError::Extra { what, extra }),
        }
    }
}

/// Appends fields.
#[derive(Debug, Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// A writer without bytes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The bytes so far.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// The number of bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether no field was appended.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Removes all bytes after the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.bytes.truncate(len);
    }

    /// Appends an unsigned integer.
    pub fn u32(&mut self, value: u32) {
        self.bytes.extend(value.to_be_bytes());
    }

    /// Appends an unsigned hyper integer.
    pub fn u64(&mut self, value: u64) {
        self.bytes.extend(value.to_be_bytes());
    }

    /// Appends a boolean.
    pub fn bool(&mut self, value: bool) {
        self.u32(value.into());
    }

    /// Appends the length of a variable field or array.
    ///
    /// # Panics
    /// If it is 4 GiB or more: no value of these protocols is that long.
    pub fn length(&mut self, len: usize) {
        self.u32(u32::try_from(len).expect("a limit below 4 GiB bounds each field"));
    }

    /// Appends a field of fixed size, and its padding.
    pub fn fixed(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        let padding = [0; UNIT_BYTES];
        self.bytes.extend(&padding[..padding_bytes(bytes.len())]);
    }

    /// Appends variable opaque data or a string.
    pub fn opaque(&mut self, bytes: &[u8]) {
        self.length(bytes.len());
        self.fixed(bytes);
    }

    /// Replaces the four bytes at `at` with an unsigned integer, for a field that depends on later
    /// ones. Bytes that were not appended stay absent.
    pub fn replace_u32(&mut self, at: usize, value: u32) {
        if let Some(field) = self.bytes.get_mut(at..at.saturating_add(UNIT_BYTES)) {
            field.copy_from_slice(&value.to_be_bytes());
        }
    }

    /// The bytes after the first `from`.
    #[must_use]
    pub fn written(&self, from: usize) -> &[u8] {
        self.bytes.get(from..).unwrap_or_default()
    }

    /// Appends another value.
    pub fn value(&mut self, value: &impl Encode) {
        value.encode(self);
    }
}

/// Optional data: a boolean, and the value after a true one.
impl<T: Encode> Encode for Option<T> {
    fn encode(&self, writer: &mut Writer) {
        writer.bool(self.is_some());
        if let Some(value) = self {
            value.encode(writer);
        }
    }
}

/// No data.
impl Encode for () {
    fn encode(&self, _: &mut Writer) {}
}

/// Defines an enumeration with its numbers on the wire.
macro_rules! wire_enum {
    (
        $(#[$attribute:meta])*
        pub enum $name:ident, $what:literal {
            $($(#[$variant_attribute:meta])* $variant:ident = $number:literal,)*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum $name {
            $($(#[$variant_attribute])* $variant = $number,)*
        }

        impl $name {
            /// All values, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The value with this number.
            #[must_use]
            pub const fn from_number(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// The number on the wire.
            #[must_use]
            pub const fn number(self) -> u32 {
                self as u32
            }
        }

        impl $crate::xdr::Decode<'_> for $name {
            fn decode(
                reader: &mut $crate::xdr::Reader<'_>,
            ) -> Result<Self, $crate::xdr::XdrError> {
                let value = reader.u32()?;
                let what = $what;
                let unknown = $crate::xdr::XdrError::Enumeration { what, value };
                Self::from_number(value).ok_or(unknown)
            }
        }

        impl $crate::xdr::Encode for $name {
            fn encode(&self, writer: &mut $crate::xdr::Writer) {
                writer.u32(self.number());
            }
        }
    };
}
pub(crate) use wire_enum;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_big_endian() {
        let bytes = [0, 0, 1, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 1];
        let mut reader = Reader::new(&bytes);
        assert_eq!(reader.u32(), Ok(0x102));
        assert_eq!(reader.u64(), Ok(0x3_0000_0004));
        assert_eq!(reader.bool(), Ok(true));
        assert_eq!(reader.finish("a test"), Ok(()));
        let mut writer = Writer::new();
        writer.u32(0x102);
        writer.u64(0x3_0000_0004);
        writer.bool(true);
        assert_eq!(writer.into_bytes(), bytes);
    }

    #[test]
    fn opaque_data_has_padding() {
        let bytes = [0, 0, 0, 5, b'h', b'e', b'l', b'l', b'o', 0, 0, 0];
        assert_eq!(Reader::new(&bytes).opaque("a name", 5), Ok(&b"hello"[..]));
        let mut writer = Writer::new();
        writer.opaque(b"hello");
        assert_eq!(writer.into_bytes(), bytes);
        for (len, padding) in [(0, 0), (1, 3), (2, 2), (3, 1), (4, 0), (5, 3)] {
            assert_eq!(padding_bytes(len), padding, "{len}");
        }
    }

    #[test]
    fn missing_padding_is_refused() {
        let bytes = [0, 0, 0, 5, b'h', b'e', b'l', b'l', b'o', 0, 0];
        let short = XdrError::Short { wanted: 8, left: 7 };
        assert_eq!(Reader::new(&bytes).opaque("a name", 5), Err(short));
    }

    #[test]
    fn value_of_padding_is_ignored() {
        let bytes = [0, 0, 0, 1, b'x', 7, 8, 9, 0, 0, 0, 2];
        let mut reader = Reader::new(&bytes);
        assert_eq!(reader.opaque("a name", 5), Ok(&b"x"[..]));
        assert_eq!(reader.u32(), Ok(2));
    }

    #[test]
    fn limit_is_compared_before_bytes_are_taken() {
        let bytes = [0xff; 8];
        let mut reader = Reader::new(&bytes);
        let too_long = XdrError::TooLong {
            what: "a name",
            len: u32::MAX,
            max: 255,
        };
        assert_eq!(reader.opaque("a name", 255), Err(too_long));
        let long = Reader::new(&bytes).opaque("a name", usize::MAX);
        assert!(matches!(long, Err(XdrError::Short { left: 4, .. })));
    }

    #[test]
    fn boolean_is_zero_or_one() {
        let read = |value: u32| Reader::new(&value.to_be_bytes()).bool();
        assert_eq!(read(0), Ok(false));
        assert_eq!(read(1), Ok(true));
        assert_eq!(read(2), Err(XdrError::Boolean(2)));
        assert_eq!(read(0x0100_0000), Err(XdrError::Boolean(0x0100_0000)));
    }

    #[test]
    fn optional_value_follows_a_true_boolean() {
        let mut reader = Reader::new(&[0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0, 0]);
        assert_eq!(reader.optional(Reader::u32), Ok(Some(9)));
        assert_eq!(reader.optional(Reader::u32), Ok(None));
        assert!(reader.optional(Reader::u32).is_err());
    }

    #[test]
    fn extra_bytes_are_counted() {
        let extra = XdrError::Extra {
            what: "a test",
            extra: 3,
        };
        assert_eq!(Reader::new(&[1, 2, 3]).finish("a test"), Err(extra));
    }
}
