//! A volume on a cluster, its export, and its expected contents.

use crate::faults::load::{LoadPlan, RunningLoad};
use crate::faults::oracle::BlockOracle;
use crate::support::net::Net;
use crate::support::{Cluster, Export, MIB, Pools};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The limit for the slowest request when a brick dies.
pub const STALL_MAX: Duration = Duration::from_secs(3);
/// The same limit for a read while another copy is there: the client asks that copy after 50 ms at
/// the latest.
pub const READ_MAX: Duration = Duration::from_secs(1);
pub const VOLUME: &str = "disk";

pub struct VolumeRig {
    export: Option<Export>,
    pub cluster: Cluster,
    pub oracle: Arc<BlockOracle>,
}

impl VolumeRig {
    /// A volume of this many MiB on bricks with room for it, not exported. `layout` is as in
    /// `--layout mirror`.
    pub fn new(
        pools: Pools,
        bricks: usize,
        size_mib: u64,
        layout: &[&str],
        seed: u64,
    ) -> VolumeRig {
        let sizes = vec![size_mib + size_mib / 2 + 32; bricks];
        VolumeRig::with_pools(pools, &sizes, size_mib, layout, seed)
    }

    pub fn with_pools(
        pools: Pools,
        sizes_mib: &[u64],
        size_mib: u64,
        layout: &[&str],
        seed: u64,
    ) -> VolumeRig {
        let cluster = Cluster::with_pools(pools, sizes_mib);
        VolumeRig::on(cluster, size_mib, layout, seed)
    }

    /// The same with every process on a machine of its own; `None` without root.
    pub fn on_separate_hosts(
        (bricks, clients): (usize, usize),
        size_mib: u64,
        layout: &[&str],
        seed: u64,
    ) -> Option<VolumeRig> {
        let net = Net::new(bricks, clients)?;
        let sizes = vec![size_mib + size_mib / 2 + 32; bricks];
        let cluster = Cluster::on_separate_hosts(Pools::Memory, &sizes, net);
        Some(VolumeRig::on(cluster, size_mib, layout, seed))
    }

    /// A volume on a cluster that has room for it.
    pub fn on(cluster: Cluster, size_mib: u64, layout: &[&str], seed: u64) -> VolumeRig {
        cluster.create(VOLUME, &format!("{size_mib}M"), layout);
        VolumeRig {
            export: None,
            cluster,
            oracle: Arc::new(BlockOracle::new(seed, size_mib * MIB)),
        }
    }

    /// Exports the volume.
    pub fn serve(&mut self, transport: &str) {
        self.serve_from(0, transport);
    }

    /// Exports the volume on this client's machine.
    pub fn serve_from(&mut self, client: usize, transport: &str) {
        assert!(self.export.is_none(), "it is served");
        self.export = Some(self.cluster.export_from(client, &[VOLUME], transport));
    }

    /// Continues with an existing export.
    pub fn set_export(&mut self, export: Export) {
        assert!(self.export.is_none(), "it is served");
        self.export = Some(export);
    }

    pub fn export(&self) -> &Export {
        self.export.as_ref().expect("it is served")
    }

    pub fn take_export(&mut self) -> Export {
        self.export.take().expect("it is served")
    }

    pub fn socket(&self) -> PathBuf {
        self.export().socket()
    }

    pub fn load(&self, plan: &LoadPlan) -> RunningLoad {
        RunningLoad::start(&self.oracle, &self.socket(), VOLUME, plan)
    }

    /// Reads everything through the export and checks it.
    #[track_caller]
    pub fn verify(&self) {
        self.oracle.verify(&self.socket(), VOLUME);
    }

    /// Stops the export, and has the legs compared.
    pub fn end_and_check(&mut self) {
        self.take_export().stop();
        self.cluster.check_identical(VOLUME);
    }

    /// Kills each brick in turn and checks the contents of the other legs: the test does not rely
    /// on the program's own report. In the end every leg is back, and the volume is served.
    pub fn verify_without_each(&mut self, bricks: usize, transport: &str) {
        for brick in 0..bricks {
            self.cluster.kill_brick(brick);
            self.serve(transport);
            self.verify();
            self.cluster.restart_brick(brick);
            self.export().await_state("healthy");
            self.take_export().stop();
        }
        self.serve(transport);
    }
}

/// States of the legs, column after column.
pub fn legs(status: &Value) -> Vec<String> {
    let columns = status["columns"].as_array().expect("columns");
    let legs = columns
        .iter()
        .flat_map(|column| column["legs"].as_array().expect("legs"));
    legs.map(|leg| leg["state"].as_str().unwrap_or_default().to_owned())
        .collect()
}

/// A sum of the volume's counters.
pub fn counter(status: &Value, name: &str) -> u64 {
    status["counters"][name].as_u64().expect("a counter")
}
