//! Blocking work, off the threads that serve sockets.

use super::Api;
use super::reply::Refusal;
use crate::fault::{Code, Fault};
use crate::manager::Manager;
use tokio::sync::OwnedSemaphorePermit;

impl Api {
    /// Runs what waits for the store at most.
    pub(super) async fn quick<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Manager) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Refusal> {
        self.run(None, work).await
    }

    /// Runs what may wait for bricks.
    pub(super) async fn slow<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Manager) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Refusal> {
        let permit = self.slow.clone().try_acquire_owned();
        let permit = permit.map_err(|_| Refusal::overloaded())?;
        self.run(Some(permit), work).await
    }

    /// Permits go with the work: a client that stops waiting does not make
    /// room for another one.
    async fn run<T: Send + 'static>(
        &self,
        slow: Option<OwnedSemaphorePermit>,
        work: impl FnOnce(&Manager) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Refusal> {
        let permit = self.work.clone().try_acquire_owned();
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
                    Code::Internal,
                    "the manager could not finish the request",
                    "look at the manager's log",
                ))
            }
        }
    }
}
