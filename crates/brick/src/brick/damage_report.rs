//! The log lines about damage that recovery found in a pool.

use pagemesh_store::recovery::RecoverySummary;
use std::path::Path;
use uuid::Uuid;

/// Reports the damage that recovery found. A medium that loses bits will lose more.
pub(super) fn warn_of_damage(path: &Path, pool: Uuid, found: &RecoverySummary) {
    if found.corrected_pages > 0 {
        tracing::warn!(
            %pool, path = %path.display(), pages = found.corrected_pages,
            "one bit was wrong in pages that were written since the last checkpoint, and recovery \
             mended them: the power failed while they were written, or the medium loses bits"
        );
    }
    if !found.is_damaged() {
        return;
    }
    let way_out = "stop the brick and run `pagemesh pool check` on the pool; a medium that loses bits should be replaced";
    let path = path.display();
    if found.corrected > 0 || found.bitmap_lines > 0 {
        tracing::warn!(
            %pool, %path, records_entries_and_slots = found.corrected, bitmap_lines = found.bitmap_lines,
            "the medium had damaged the pool, and recovery mended it; {way_out}"
        );
    }
    if found.versions_lost > 0 {
        tracing::error!(
            %pool, %path, versions = found.versions_lost,
            "the log of versions had no room for all pages that snapshots see: snapshots lack pages on this brick; \
             read them from another copy, and delete snapshots that are not needed; \
             `pagemesh pool check` frees the space of the lost pages"
        );
    }
    if found.damaged > 0 || found.objects_lost > 0 || found.withheld > 0 {
        tracing::error!(
            %pool, %path, records_without_data = found.damaged, objects_lost = found.objects_lost,
            frames_withheld = found.withheld,
            "the medium has damaged the pool; {way_out}"
        );
    }
}
