//! Typed numbers. Each is a transparent integer with its unit in its type, so that arithmetic
//! between different kinds does not compile.

use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($int:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub $int);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

number!(
    /// A 4 KiB unit of a pool, counted from the start of the pool.
    FrameNo(u64)
);
number!(
    /// A 4 KiB unit of an object, counted from the start of the object.
    PageNo(u64)
);
number!(
    /// An object's place in its pool's object table.
    ObjectId(u32)
);
number!(
    /// The global order of records in one pool. Zero is before every record.
    Seq(u64)
);
number!(
    /// The fencing number of a pool or volume; an older one is refused.
    Epoch(u32)
);
number!(
    /// One opening of a pool. Records of an earlier one are never replayed.
    Incarnation(u32)
);

/// The highest epoch: the frame table of a pool has 28 bits for the epoch of a page's birth.
pub const EPOCH_MAX: u32 = (1 << 28) - 1;
