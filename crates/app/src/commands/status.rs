//! `pagemesh status`.

use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::commands::brick::list;
use crate::commands::volume::volume_table;
use crate::output::{self, bytes};
use pagemesh_manage::wire::{BrickInfo, ClusterStatus, VolumeInfo};
use serde::Serialize;

/// The line about a failed store.
const STORE_FAILED: &str = "\nTHE MANAGER TAKES NO CHANGES: its store failed to write one. Make room on its disk or repair it, then \
                            start the manager again.";

#[derive(Serialize)]
struct ClusterOutput {
    manager: String,
    status: ClusterStatus,
    bricks: Vec<BrickInfo>,
    volumes: Vec<VolumeInfo>,
}

/// Shows the cluster.
pub fn run(args: &ManagerArgs) -> anyhow::Result<()> {
    let manager = manager_client(args)?;
    let cluster = ClusterOutput {
        manager: manager.url().to_owned(),
        status: manager.status()?,
        bricks: manager.bricks()?,
        volumes: manager.volumes()?,
    };
    output::print(args.output, &cluster, || {
        let status = &cluster.status;
        let scrubs = match (status.scrubs_corrected, status.scrubs_damaged) {
            (0, 0) => String::new(),
            (corrected, damaged) => {
                format!(
                    "\nscrubs of pools have corrected {corrected} places, {damaged} are still damaged"
                )
            }
        };
        let schedules = match (status.schedules_critical, status.schedules_warning) {
            (0, 0) => String::new(),
            (critical, warning) => format!(
                "\nsnapshots are late: {critical} of {} schedules critical, {warning} warning; see: pagemesh schedule list",
                status.schedules
            ),
        };
        let store = if status.store_failed {
            STORE_FAILED
        } else {
            ""
        };
        format!(
            "manager {} {}{store}\n{} of {} bricks alive, {} of {} used, {} promised to volumes{scrubs}{schedules}\n\n{}{}\n\n{}",
            cluster.manager,
            status.version,
            status.bricks_alive,
            status.bricks,
            bytes(status.used_bytes),
            bytes(status.capacity_bytes),
            bytes(status.provisioned_bytes),
            list::brick_table(&cluster.bricks),
            list::draining_text(&cluster.bricks),
            volume_table(&cluster.volumes)
        )
    })
}
