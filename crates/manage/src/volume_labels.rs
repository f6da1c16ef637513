//! Changes of the labels of volumes. Schedules select volumes by them.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::label_text::is_label_part;
use crate::manager::Manager;
use crate::wire::{SetLabels, VolumeInfo};
use pagemesh_base::layout::VolumeName;

/// Labels of one volume.
const VOLUME_LABELS_MAX: usize = 16;

fn check_part(what: &str, text: &str) -> Result<(), Fault> {
    match is_label_part(text) {
        true => Ok(()),
        false => Err(Fault::invalid_field(
            format!("'{}' is no {what} of a label", text.escape_debug()),
            "use 1 to 32 letters, digits, points, dashes and underscores",
        )),
    }
}

impl Manager {
    /// Sets and removes labels of a volume. Other labels stay.
    ///
    /// # Errors
    /// When there is no such volume, a label is malformed, or the volume would have too many.
    pub fn set_labels(&self, name: &VolumeName, request: &SetLabels) -> Result<VolumeInfo, Fault> {
        for (key, value) in &request.set {
            check_part("key", key)?;
            check_part("value", value)?;
        }
        let mut book = self.state();
        let mut record = book.volume(name)?.clone();
        self.check_volume_unchanged(&record)?;
        let mut labels = record.labels.clone();
        labels.retain(|key, _| !request.remove.contains(key));
        labels.extend(request.set.clone());
        if labels.len() > VOLUME_LABELS_MAX {
            return Err(Fault::TooMany {
                what: "labels of the volume",
                most: VOLUME_LABELS_MAX,
            });
        }
        if labels != record.labels {
            record.labels = labels;
            let changed = EventDraft::volume_labels_changed(name, &self.actor(), &record.labels);
            self.commit_volume(&mut book, &record, vec![changed])?;
        }
        Ok(self.volume_info(&book, &record))
    }
}
