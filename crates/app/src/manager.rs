//! `pagemesh manager`.

use crate::args;
use crate::ending::Ending;
use crate::key;
use pagemesh_base::key::Key;
use pagemesh_base::slice::{BrickControl, SliceError};
use pagemesh_fabric::brick_client::BrickClient;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::tcp::resolve;
use pagemesh_manage::{Bricks, Config, serve};
use std::sync::Arc;

/// Reaches bricks over tcp.
struct Remotes(Key);

impl Bricks for Remotes {
    fn control(&self, address: &str) -> Result<Box<dyn BrickControl>, SliceError> {
        let address = resolve(address)?;
        let remote = BrickClient::connect(address, &self.0, Timeouts::default())?;
        Ok(Box::new(remote))
    }
}

/// Runs a manager until it is told to end.
pub fn run(args: &args::Manager) -> anyhow::Result<()> {
    let key = match key::named(args.key.as_deref()) {
        Some(path) => Key::load(path)?,
        None => key::find_or_create(&key::default_path(&args.listen)?)?,
    };
    let ending = Ending::listen(args.until_stdin_ends)?;
    let bricks = Arc::new(Remotes(key.clone()));
    let handle = serve(Config::new(&args.listen, args.store.clone(), key, bricks))?;
    println!("ready {}", handle.url());
    ending.wait();
    handle.stop();
    Ok(())
}
