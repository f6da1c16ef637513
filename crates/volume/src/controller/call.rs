//! Blocking calls that other threads make for the controller.

use crate::legs::connector::Connector;
use pagemesh_base::authority::CopyReport;
use pagemesh_base::authority::{
    Authority, AuthorityError, BrickAddress, LegChange, ResolvedLayout,
};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, Layout, SliceId, VolumeName};
use pagemesh_base::slice::{Leg, SliceError};

pub enum BlockingCall {
    Attach,
    ChangeLegs {
        attachment: Epoch,
        expected: Epoch,
        changes: Vec<LegChange>,
    },
    FetchLayout {
        attachment: Epoch,
        report: CopyReport,
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

pub enum CallOutcome {
    Layout(Result<ResolvedLayout, AuthorityError>),
    LegsChanged(Result<Layout, AuthorityError>),
    Connected(Result<Box<dyn Leg>, SliceError>),
    Detached(Result<(), AuthorityError>),
}

impl BlockingCall {
    /// The outcome if the call cannot even be started.
    pub fn failure_outcome(&self) -> fn(String) -> CallOutcome {
        match self {
            BlockingCall::Attach | BlockingCall::FetchLayout { .. } => {
                |why| CallOutcome::Layout(Err(AuthorityError::Unreachable(why)))
            }
            BlockingCall::ChangeLegs { .. } => {
                |why| CallOutcome::LegsChanged(Err(AuthorityError::Unreachable(why)))
            }
            BlockingCall::Detach { .. } => {
                |why| CallOutcome::Detached(Err(AuthorityError::Unreachable(why)))
            }
            BlockingCall::Connect { .. } => {
                |why| CallOutcome::Connected(Err(SliceError::Lost(why)))
            }
        }
    }
}

/// Makes calls without blocking the controller. The outcome comes as an event.
pub trait CallRunner {
    fn start(&self, id: u64, call: BlockingCall);
}

/// Makes one call. It blocks.
pub fn perform(
    call: BlockingCall,
    name: &VolumeName,
    client: &str,
    authority: &dyn Authority,
    connector: &dyn Connector,
) -> CallOutcome {
    match call {
        BlockingCall::Attach => CallOutcome::Layout(authority.attach(name, client)),
        BlockingCall::FetchLayout {
            attachment,
            report: told,
        } => CallOutcome::Layout(authority.layout(name, attachment, &told)),
        BlockingCall::ChangeLegs {
            attachment,
            expected,
            changes,
        } => CallOutcome::LegsChanged(authority.change_legs(name, attachment, expected, &changes)),
        BlockingCall::Detach { attachment } => {
            CallOutcome::Detached(authority.detach(name, attachment))
        }
        BlockingCall::Connect {
            brick,
            address,
            slice,
            epoch,
        } => CallOutcome::Connected(connector.connect(brick, &address, slice, epoch)),
    }
}
