//! A volume on a cluster, its export, and what it must hold.

use crate::load::{Load, Plan};
use crate::oracle::Oracle;
use crate::support::net::Net;
use crate::support::{Cluster, Export, MIB, Pools};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The bar for the longest that a request may take when a brick dies.
pub const STALL_MAX: Duration = Duration::from_secs(3);
/// The same for a read while another copy is there: it is asked after 50 ms at
/// the latest.
pub const READ_MAX: Duration = Duration::from_secs(1);
pub const VOLUME: &str = "disk";

pub struct Rig {
    export: Option<Export>,
    pub cluster: Cluster,
    pub oracle: Arc<Oracle>,
}

impl Rig {
    /// A volume of this many MiB on bricks with room for it, not exported.
    /// `layout` as `--layout mirror`.
    pub fn new(pools: Pools, bricks: usize, size_mib: u64, layout: &[&str], seed: u64) -> Rig {
        let sizes = vec![size_mib + size_mib / 2 + 32; bricks];
        Rig::with_pools(pools, &sizes, size_mib, layout, seed)
    }

    pub fn with_pools(
        pools: Pools,
        sizes_mib: &[u64],
        size_mib: u64,
        layout: &[&str],
        seed: u64,
    ) -> Rig {
        let cluster = Cluster::with_pools(pools, sizes_mib);
        Rig::on(cluster, size_mib, layout, seed)
    }

    /// The same with every process on a machine of its own; none without root.
    pub fn apart(
        (bricks, clients): (usize, usize),
        size_mib: u64,
        layout: &[&str],
        seed: u64,
    ) -> Option<Rig> {
        let net = Net::new(bricks, clients)?;
        let sizes = vec![size_mib + size_mib / 2 + 32; bricks];
        let cluster = Cluster::apart(Pools::Memory, &sizes, net);
        Some(Rig::on(cluster, size_mib, layout, seed))
    }

    /// A volume on a cluster that has room for it.
    pub fn on(cluster: Cluster, size_mib: u64, layout: &[&str], seed: u64) -> Rig {
        cluster.create(VOLUME, &format!("{size_mib}M"), layout);
        Rig {
            export: None,
            cluster,
            oracle: Arc::new(Oracle::new(seed, size_mib * MIB)),
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

    /// Goes on with an export that there is.
    pub fn adopt(&mut self, export: Export) {
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

    pub fn load(&self, plan: &Plan) -> Load {
        Load::start(&self.oracle, &self.socket(), VOLUME, plan)
    }

    /// Reads everything through the export and checks it.
    #[track_caller]
    pub fn verify(&self) {
        self.oracle.verify(&self.socket(), VOLUME);
    }

    /// Ends the export in peace, and has the legs compared.
    pub fn end_and_check(&mut self) {
        self.take_export().stop();
        self.cluster.check_identical(VOLUME);
    }

    /// With each brick dead in turn, the other legs alone hold what they must:
    /// what the program itself says of its legs is not taken on trust. Ends
    /// with every leg back, and the volume served.
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
