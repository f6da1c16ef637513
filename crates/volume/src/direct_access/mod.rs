//! Direct access: the threads of a direct client read and overwrite pages in the legs themselves
//! (RFD 015). The [`segment`] is the memory that they share with the volume; `access` has the
//! lease that the volume grants them.

pub(crate) mod access;
pub(crate) mod segment;

pub(crate) use access::DirectAccess;
pub use access::{LayoutLease, LeaseLeg};
pub use segment::{
    ClientRow, DirectDisabledReason, DirectSegment, FileRange, ROWS, RUNS_MAX, SEGMENT_BYTES,
    TornOp,
};
