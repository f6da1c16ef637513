//! Blocking work, on other threads than the sockets.

use super::ApiState;
use super::reply::Refusal;
use crate::error_code::ErrorCode;
use crate::fault::Fault;
use crate::manager::Manager;
use tokio::sync::OwnedSemaphorePermit;

impl ApiState {
    /// Runs work that waits for the store but never for bricks.
    pub(super) async fn run_store_work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Manager) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Refusal> {
        self.run_blocking(None, work).await
    }

    /// Runs work that may wait for bricks.
    pub(super) async fn run_brick_work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Manager) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Refusal> {
        let permit = self.brick_permits.clone().try_acquire_owned();
        let permit = permit.map_err(|_| Refusal::overloaded())?;
        self.run_blocking(Some(permit), work).await
    }

    /// Runs blocking work. The permits belong to the work: a client that stops waiting frees none.
    async fn run_blocking<T: Send + 'static>(
        &self,
        slow: Option<OwnedSemaphorePermit>,
        work: impl FnOnce(&Manager) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Refusal> {
        let permit = self.blocking_permits.clone().try_acquire_owned();
        let permit = permit.map_err(|_| Refusal::overloaded())?;
        let manager = self.manager.clone();
        let done = tokio::task::spawn_blocking(move || {
            let _permits = (permit, slow);
            work(&manager)
        });
        match done.await {
            Ok(result) => result.map_err(Refusal::from),
            Err(error) => {
                tracing::error!(%error, "a request was not finished");
                Err(Refusal::new(
                    ErrorCode::Internal,
                    "the manager could not finish the request",
                    "look at the manager's log",
                ))
            }
        }
    }
}
