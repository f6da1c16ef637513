//! The client of a call, and the user that the call names.

use crate::export_table::ExportTable;
use crate::rpc::Credential;
use std::net::SocketAddr;

/// The credential of a call, with the address that it comes from.
#[derive(Clone, Copy)]
pub(crate) struct PeerCredential<'a> {
    pub(crate) address: SocketAddr,
    pub(crate) credential: &'a Credential<'a>,
    /// The exports of this call.
    pub(crate) table: &'a ExportTable,
}
