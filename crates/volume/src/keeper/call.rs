//! Calls that block, made elsewhere on the keeper's behalf.

use crate::authority::{Attached, Authority, AuthorityError, BrickAddress, LegChange};
use crate::connector::Connector;
use crate::status::CopyReport;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, Layout, Name, SliceId};
use pagemesh_base::slice::{Leg, SliceError};

pub(crate) enum Call {
    Attach,
    ChangeLegs {
        attachment: Epoch,
        expected: Epoch,
        changes: Vec<LegChange>,
    },
    Layout {
        attachment: Epoch,
        told: CopyReport,
    },
    Detach {
        attachment: Epoch,
    },
    Connect {
        brick: BrickId,
        address: BrickAddress,
        slice: SliceId,
        epoch: Epoch,
    },
}

pub(crate) enum Outcome {
    Attached(Result<Attached, AuthorityError>),
    Changed(Result<Layout, AuthorityError>),
    Connected(Result<Box<dyn Leg>, SliceError>),
    Detached(Result<(), AuthorityError>),
}

impl Call {
    /// What to answer if it cannot even be made.
    pub(crate) fn if_not_made(&self) -> fn(String) -> Outcome {
        match self {
            Call::Attach | Call::Layout { .. } => {
                |why| Outcome::Attached(Err(AuthorityError::Unreachable(why)))
            }
            Call::ChangeLegs { .. } => {
                |why| Outcome::Changed(Err(AuthorityError::Unreachable(why)))
            }
            Call::Detach { .. } => |why| Outcome::Detached(Err(AuthorityError::Unreachable(why))),
            Call::Connect { .. } => |why| Outcome::Connected(Err(SliceError::Lost(why))),
        }
    }
}

/// Makes calls without blocking the keeper: the outcome comes as an event.
pub(crate) trait Caller {
    fn start(&self, id: u64, call: Call);
}

/// Makes one call, blocking.
pub(crate) fn perform(
    call: Call,
    name: &Name,
    client: &str,
    authority: &dyn Authority,
    connector: &dyn Connector,
) -> Outcome {
    match call {
        Call::Attach => Outcome::Attached(authority.attach(name, client)),
        Call::Layout { attachment, told } => {
            Outcome::Attached(authority.layout(name, attachment, &told))
        }
        Call::ChangeLegs {
            attachment,
            expected,
            changes,
        } => Outcome::Changed(authority.change_legs(name, attachment, expected, &changes)),
        Call::Detach { attachment } => Outcome::Detached(authority.detach(name, attachment)),
        Call::Connect {
            brick,
            address,
            slice,
            epoch,
        } => Outcome::Connected(connector.connect(brick, &address, slice, epoch)),
    }
}
