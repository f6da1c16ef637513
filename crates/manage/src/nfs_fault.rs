//! Errors about clients of NFS servers: the failed action, the cause, and the way out.

use crate::error_code::ErrorCode;
use crate::wire::Nfs4ClientId;
use pagemesh_base::layout::VolumeName;

/// An error about a client of an NFS server.
#[derive(Debug, thiserror::Error)]
pub enum NfsClientFault {
    /// No server has the client.
    #[error("no NFS server has a client {0}")]
    Unknown(Nfs4ClientId),
    /// Another call expires the client.
    #[error("another call expires the NFS client {0} already")]
    Busy(Nfs4ClientId),
    /// Requests in progress keep the state of the client.
    #[error(
        "the NFS client {client} gets no new requests, but keeps its opens and locks until {requests} requests in progress have ended"
    )]
    Running {
        /// The client.
        client: Nfs4ClientId,
        /// The requests.
        requests: u64,
    },
    /// The stable list is not written.
    #[error(
        "the NFS client {0} has lost its opens and locks, but the server cannot write its list of clients now: no other client gets them before"
    )]
    Unwritten(Nfs4ClientId),
    /// The server has not reported.
    #[error("the NFS server of the file system {0} does not report, so that no client was expired")]
    NotGiven(VolumeName),
    /// The server has not answered.
    #[error("the NFS server of the file system {0} got the order, and did not answer in time")]
    NotAnswered(VolumeName),
}

impl NfsClientFault {
    /// The kind of the error.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            NfsClientFault::Unknown(_) => ErrorCode::NotFound,
            _ => ErrorCode::InUse,
        }
    }

    /// The way out.
    pub(crate) fn hint(&self) -> &'static str {
        match self {
            NfsClientFault::Unknown(_) => {
                "list them with: pagemesh nfs clients; a client that has connected again has another id"
            }
            NfsClientFault::Busy(_) => "wait for its answer",
            NfsClientFault::Running { .. } | NfsClientFault::Unwritten(_) => {
                "look for a stalled file system with: pagemesh nfs list; the rest follows by itself when its bricks answer"
            }
            NfsClientFault::NotGiven(_) => {
                "see when it reported with: pagemesh nfs list; if the process is gone, serve the file system again"
            }
            NfsClientFault::NotAnswered(_) => {
                "see whether the client is still there with: pagemesh nfs clients"
            }
        }
    }
}
