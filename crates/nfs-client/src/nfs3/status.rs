//! The status of a result (nfsstat3).

use crate::xdr::{DecodeError, Decoder};
use std::fmt;

/// The status of a procedure.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Status(u32);

macro_rules! statuses {
    ($($name:ident = $number:literal),* $(,)?) => {
        impl Status {
            $(
                #[doc = concat!("NFS3 status ", stringify!($number), ".")]
                pub const $name: Self = Self($number);
            )*

            /// All of RFC 1813.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The name in RFC 1813, without its prefix.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self.0 {
                    $($number => stringify!($name),)*
                    _ => "unknown",
                }
            }
        }
    };
}

statuses! {
    OK = 0,
    PERM = 1,
    NOENT = 2,
    IO = 5,
    NXIO = 6,
    ACCES = 13,
    EXIST = 17,
    XDEV = 18,
    NODEV = 19,
    NOTDIR = 20,
    ISDIR = 21,
    INVAL = 22,
    FBIG = 27,
    NOSPC = 28,
    ROFS = 30,
    MLINK = 31,
    NAMETOOLONG = 63,
    NOTEMPTY = 66,
    DQUOT = 69,
    STALE = 70,
    REMOTE = 71,
    BADHANDLE = 10001,
    NOT_SYNC = 10002,
    BAD_COOKIE = 10003,
    NOTSUPP = 10004,
    TOOSMALL = 10005,
    SERVERFAULT = 10006,
    BADTYPE = 10007,
    JUKEBOX = 10008,
}

impl Status {
    /// The number on the wire.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }

    pub(super) fn decode(fields: &mut Decoder<'_>) -> Result<Self, DecodeError> {
        let field = "status";
        let value = fields.u32(field)?;
        match Self::ALL.contains(&Self(value)) {
            true => Ok(Self(value)),
            false => Err(DecodeError::Value { field, value }),
        }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}
