//! `pagemesh manager`.

use crate::args;
use crate::key;
use crate::shutdown::Shutdown;
use pagemesh_base::key::Key;
use pagemesh_base::slice::{BrickControl, SliceError};
use pagemesh_fabric::brick_client::BrickClient;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::tcp::resolve;
use pagemesh_manage::{BrickConnector, ManagerConfig, serve};
use std::sync::Arc;

/// Connects to bricks over TCP.
struct TcpBrickConnector(Key);

impl BrickConnector for TcpBrickConnector {
    fn control(&self, address: &str) -> Result<Box<dyn BrickControl>, SliceError> {
        let address = resolve(address)?;
        let remote = BrickClient::connect(address, &self.0, Timeouts::default())?;
        Ok(Box::new(remote))
    }
}

/// Runs a manager until its shutdown.
pub fn run(args: &args::ManagerDaemonArgs) -> anyhow::Result<()> {
    let key = match key::nonempty_path(args.key.as_deref()) {
        Some(path) => Key::load(path)?,
        None => key::find_or_create(&key::default_path(&args.listen)?)?,
    };
    let ending = Shutdown::listen(args.until_stdin_ends)?;
    let bricks = Arc::new(TcpBrickConnector(key.clone()));
    let handle = serve(ManagerConfig::new(
        &args.listen,
        args.store.clone(),
        key,
        bricks,
    ))?;
    println!("ready {}", handle.url());
    ending.wait();
    handle.stop();
    Ok(())
}
