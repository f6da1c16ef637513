//! Parts that this crate's own tests reach and no other crate needs.

pub use crate::connection::EndReason;
pub use crate::handshake::Handshake;
pub use crate::limits::{OPTIONS_MAX, RECEIVE_BYTES, SKIPPED_BYTES_MAX};
pub use crate::negotiation::{
    INPUT_BYTES_MAX, NegotiatedOptions, Negotiation, NegotiationStep, ProtocolViolation,
};
pub use crate::receiver::{ReceiveOutcome, Receiver, RequestFrame};
pub use crate::requests::{Continuation, RequestPlan, next_zeroes, plan};
pub use crate::stop_signal::StopSignal;

/// The numbers and messages of the protocol.
pub mod wire {
    pub use crate::wire::*;
}
