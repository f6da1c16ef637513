//! The cut of a connection, for answers that cannot end otherwise.

use std::sync::Arc;
use tokio::sync::Notify;

/// Cuts the connection of a request; an extension of each request.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectionCut(Arc<Notify>);

impl ConnectionCut {
    /// Cuts the connection; data that the peer has not taken is lost.
    pub(crate) fn cut(&self) {
        self.0.notify_one();
    }

    /// Waits until a request cuts the connection.
    pub(crate) async fn wait(&self) {
        self.0.notified().await;
    }
}
