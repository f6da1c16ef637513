//! fio on exported volumes and on other block servers.

use crate::commands::bench::MeasureArgs;
use crate::commands::bench::scratch::{ScratchCluster, VOLUME_BYTES};
use pagemesh_base::layout::VolumeName;
use pagemesh_bench::peers::{self, NbdPeer};
use pagemesh_bench::report::Report;
use std::path::Path;
use std::time::Duration;

/// Runs the benchmark.
pub fn run(measure: &MeasureArgs) -> anyhow::Result<Report> {
    let scratch = ScratchCluster::start(measure, 2, 2)?;
    let options = peers::PeerOptions {
        rounds: measure.rounds,
        runtime: Duration::from_secs(measure.seconds),
        size_bytes: VOLUME_BYTES / 2,
        ratio_columns: 2,
        ..peers::PeerOptions::default()
    };
    let mut exporters = Vec::new();
    let mut peers = Vec::new();
    for transport in ["map", "tcp"] {
        let name: VolumeName = transport.parse()?;
        let class = scratch.create_volume(&name)?;
        let (exporter, uri) = scratch.export(&name, transport)?;
        let mut pids = scratch.cluster.brick_pids();
        pids.push(exporter.0.id());
        peers.push(NbdPeer::external(
            &format!("pagemesh {transport}"),
            &class,
            &uri,
            &pids,
        ));
        exporters.push(exporter);
    }
    peers.push(NbdPeer::nbdkit_memory(options.size_bytes)?);
    peers.push(NbdPeer::qemu_nbd(
        Path::new("/dev/shm"),
        options.size_bytes,
    )?);
    peers.push(NbdPeer::qemu_quorum(options.size_bytes)?);
    Ok(peers::run_peers(&peers, &options)?)
}
