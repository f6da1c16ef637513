//! The head of a COMPOUND: its tag, minor version and number of operations.

use crate::limits::TAG_BYTES_MAX;
use crate::nfs4::operation::Operation;
use crate::xdr::{Decode, Reader, XdrError};

/// The fields before the operations (`COMPOUND4args`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompoundHead<'a> {
    /// A text that the reply repeats.
    pub tag: &'a [u8],
    /// The minor version.
    pub minor_version: u32,
    /// The number of operations, unchecked: the session has a limit.
    pub operations: u32,
}

impl<'a> Decode<'a> for CompoundHead<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            tag: reader.opaque("tag of a COMPOUND", TAG_BYTES_MAX)?,
            minor_version: reader.u32()?,
            operations: reader.u32()?,
        })
    }
}

/// The next operation of a COMPOUND, without its arguments; [`Operation::Illegal`] for an unknown number.
///
/// # Errors
/// If no number is left.
pub fn next_operation(reader: &mut Reader<'_>) -> Result<Operation, XdrError> {
    let number = reader.u32()?;
    Ok(Operation::from_number(number).unwrap_or(Operation::Illegal))
}
