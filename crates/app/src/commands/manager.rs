//! `pagemesh manager`.

use crate::args::path_parser;
use crate::client::host_name;
use crate::config::ConfigArgs;
use crate::key;
use crate::service;
use crate::shutdown::Shutdown;
use anyhow::bail;
use clap::Args;
use clap::builder::RangedU64ValueParser;
use pagemesh_base::fd_limit::raise_fd_limit;
use pagemesh_base::key::Key;
use pagemesh_base::slice::{BrickControl, SliceError};
use pagemesh_fabric::brick_client::BrickClient;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::tcp::resolve;
use pagemesh_manage::{
    AdminTokenOutput, BrickConnector, METRIC_VOLUMES, ManagerConfig, VOLUMES_MAX, serve,
};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Run the manager.
#[derive(Args)]
pub struct ManagerDaemonArgs {
    /// Database of the manager.
    #[arg(long, default_value = "manager.redb")]
    pub store: PathBuf,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:7070")]
    pub listen: String,
    /// File with the cluster key; by default one in the user's configuration directory, which is
    /// created if missing.
    #[arg(long, env = "PAGEMESH_KEY", value_parser = path_parser())]
    pub key: Option<PathBuf>,
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Name under which browsers may reach the manager, besides IP addresses, `localhost` and this
    /// host's name; may be repeated. A cookie for another name does not count.
    #[arg(long, value_name = "NAME")]
    pub allowed_host: Vec<String>,
    /// Volumes with series of their own in the metrics at `GET /metrics`: the busiest. The others share one series; 0 leaves
    /// only the sums of the cluster.
    #[arg(long, value_name = "COUNT", default_value_t = METRIC_VOLUMES, value_parser = metric_volumes_parser())]
    pub metrics_volumes: usize,
    /// Exit when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
}

/// Connects to bricks over TCP.
struct TcpBrickConnector(Key);

impl BrickConnector for TcpBrickConnector {
    fn control(&self, address: &str) -> Result<Box<dyn BrickControl>, SliceError> {
        let address = resolve(address)?;
        let remote = BrickClient::connect(address, &self.0, Timeouts::default())?;
        Ok(Box::new(remote))
    }
}

fn metric_volumes_parser() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(0..=VOLUMES_MAX as u64)
}

/// Runs a manager until its shutdown.
pub fn run(args: &ManagerDaemonArgs) -> anyhow::Result<()> {
    let key = match key::nonempty_path(args.key.as_deref()) {
        Some(path) => Key::load(path)?,
        None => key::find_or_create(&key::default_path(&args.listen)?)?,
    };
    let ending = Shutdown::listen(args.until_stdin_ends)?;
    let bricks = Arc::new(TcpBrickConnector(key.clone()));
    let mut config = ManagerConfig::new(&args.listen, args.store.clone(), key, bricks);
    config.allowed_hosts = args.allowed_host.clone();
    config.allowed_hosts.push(host_name());
    if std::io::stdout().is_terminal() {
        config.admin_token = AdminTokenOutput::Terminal;
    }
    config.settings.metric_volumes = args.metrics_volumes;
    let (trigger, must_reopen) = (ending.trigger(), Arc::new(AtomicBool::new(false)));
    let on_end = must_reopen.clone();
    config.on_end = Some(Box::new(move || {
        on_end.store(true, Ordering::Release);
        trigger.trigger();
    }));
    if let Err(cause) = raise_fd_limit() {
        tracing::warn!(%cause, "cannot raise the limit of descriptors (RLIMIT_NOFILE)");
    }
    let handle = serve(config)?;
    println!("ready {}", handle.url());
    service::notify_ready(&handle.url());
    ending.wait();
    handle.stop();
    if must_reopen.load(Ordering::Acquire) {
        bail!(
            "the store {} failed to write a change, and its disk takes writes again; start the manager again \
             to open the store anew",
            args.store.display()
        );
    }
    Ok(())
}
