//! XDR (RFC 4506): fields of calls, and bounded fields of replies.

/// Why bytes are no value of their type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end within a field.
    #[error("the bytes end within the field {0:?}")]
    Short(&'static str),
    /// A length is beyond its limit.
    #[error("the field {field:?} has {len} bytes; at most {max} are allowed")]
    TooLong {
        /// The field.
        field: &'static str,
        /// Its length in bytes.
        len: u32,
        /// The limit in bytes.
        max: u32,
    },
    /// Padding is not zero.
    #[error("the padding of the field {0:?} is not zero")]
    Padding(&'static str),
    /// A number is not one of its type.
    #[error("the field {field:?} has the unknown value {value}")]
    Value {
        /// The field.
        field: &'static str,
        /// The value.
        value: u32,
    },
    /// Bytes follow the last field.
    #[error("{0} bytes follow the last field")]
    Trailing(usize),
}

/// The bytes of a call.
#[derive(Clone, Debug, Default)]
pub struct Encoder(Vec<u8>);

impl Encoder {
    /// No bytes yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends an unsigned integer.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Appends an unsigned hyper integer.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Appends bytes of a fixed length, which is a multiple of 4.
    pub fn fixed(&mut self, bytes: &[u8]) -> &mut Self {
        debug_assert!(bytes.len().is_multiple_of(4));
        self.0.extend(bytes);
        self
    }

    /// Appends bytes with their length, padded to a multiple of 4 bytes.
    pub fn opaque(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.0.extend(bytes);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Appends a boolean, and the value if there is one.
    pub fn optional<T>(
        &mut self,
        value: Option<T>,
        encode: impl FnOnce(&mut Self, T),
    ) -> &mut Self {
        self.u32(value.is_some().into());
        if let Some(value) = value {
            encode(self, value);
        }
        self
    }

    /// The bytes so far.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Takes fields from the bytes of a reply. It takes memory only for bytes that are there.
#[derive(Clone, Debug)]
pub struct Decoder<'a>(&'a [u8]);

impl<'a> Decoder<'a> {
    /// A decoder at the first byte.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The bytes that no field has taken.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }

    /// Takes bytes of a fixed length.
    ///
    /// # Errors
    /// If there are fewer.
    pub fn fixed<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], DecodeError> {
        let (first, rest) = self
            .0
            .split_first_chunk()
            .ok_or(DecodeError::Short(field))?;
        self.0 = rest;
        Ok(*first)
    }

    /// Takes an unsigned integer.
    ///
    /// # Errors
    /// If the bytes end.
    pub fn u32(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        self.fixed(field).map(u32::from_be_bytes)
    }

    /// Takes an unsigned hyper integer.
    ///
    /// # Errors
    /// If the bytes end.
    pub fn u64(&mut self, field: &'static str) -> Result<u64, DecodeError> {
        self.fixed(field).map(u64::from_be_bytes)
    }

    /// Takes a boolean.
    ///
    /// # Errors
    /// If it is neither 0 nor 1, or the bytes end.
    pub fn bool(&mut self, field: &'static str) -> Result<bool, DecodeError> {
        match self.u32(field)? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(DecodeError::Value { field, value }),
        }
    }

    /// Takes at most `max` bytes with a length before them.
    ///
    /// # Errors
    /// If the length is beyond `max` or the bytes that are there, or the padding is not zero.
    pub fn opaque(&mut self, field: &'static str, max: u32) -> Result<&'a [u8], DecodeError> {
        let len = self.u32(field)?;
        if len > max {
            return Err(DecodeError::TooLong { field, len, max });
        }
        let padded = (len as usize).next_multiple_of(4);
        let (padded, rest) = self
            .0
            .split_at_checked(padded)
            .ok_or(DecodeError::Short(field))?;
        let (bytes, padding) = padded.split_at(len as usize);
        if padding.iter().any(|byte| *byte != 0) {
            return Err(DecodeError::Padding(field));
        }
        self.0 = rest;
        Ok(bytes)
    }

    /// Takes a boolean, and a value if it is true.
    ///
    /// # Errors
    /// If the boolean or the value has one.
    pub fn optional<T>(
        &mut self,
        field: &'static str,
        decode: impl FnOnce(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Option<T>, DecodeError> {
        match self.bool(field)? {
            true => decode(self).map(Some),
            false => Ok(None),
        }
    }

    /// Ends the value.
    ///
    /// # Errors
    /// If bytes are left.
    pub fn end(self) -> Result<(), DecodeError> {
        match self.0.len() {
            0 => Ok(()),
            left => Err(DecodeError::Trailing(left)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_survive_the_wire() {
        let mut out = Encoder::new();
        out.u32(7).u64(1 << 40).opaque(b"12345").fixed(b"abcd");
        out.optional(Some(9), |out, it| {
            out.u32(it);
        });
        let bytes = out.into_bytes();
        let mut fields = Decoder::new(&bytes);
        assert_eq!(fields.u32("a"), Ok(7));
        assert_eq!(fields.u64("b"), Ok(1 << 40));
        assert_eq!(fields.opaque("c", 5), Ok(&b"12345"[..]));
        assert_eq!(fields.fixed("d"), Ok(*b"abcd"));
        assert_eq!(fields.optional("e", |it| it.u32("f")), Ok(Some(9)));
        assert_eq!(fields.end(), Ok(()));
    }

    #[test]
    fn false_fields_are_errors() {
        let opaque = |bytes: &[u8]| Decoder::new(bytes).opaque("x", 8).map(<[u8]>::to_vec);
        assert_eq!(opaque(&[0, 0, 0]), Err(DecodeError::Short("x")));
        assert_eq!(opaque(&[0, 0, 0, 4, 1, 2]), Err(DecodeError::Short("x")));
        let padding = [0, 0, 0, 1, 5, 0, 1, 0];
        assert_eq!(opaque(&padding), Err(DecodeError::Padding("x")));
        let long = DecodeError::TooLong {
            field: "x",
            len: u32::MAX,
            max: 8,
        };
        assert_eq!(opaque(&[255; 8]), Err(long));
        let value = DecodeError::Value {
            field: "y",
            value: 2,
        };
        assert_eq!(Decoder::new(&[0, 0, 0, 2]).bool("y"), Err(value));
        assert_eq!(Decoder::new(&[0]).end(), Err(DecodeError::Trailing(1)));
    }
}
