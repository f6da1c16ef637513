//! Versions of pages that snapshots see, and the comparison of those that two legs have.
//!
//! A leg that was away while a snapshot was cut lacks versions, or has wrong ones: a version lives on it until the page
//! was copied or written again, and covers the versions between. [`plan_version_edits`] lists the edits that make the leg
//! equal to another one.
//!
//! Invariant: the plan changes no view of a snapshot that the target has as a whole.

use crate::ids::{Epoch, PageNo};

/// Snapshots of one [`VersionRange`].
pub const LISTED_SNAPSHOTS_MAX: usize = 256;
/// Edits of one [`VersionEdits`].
pub const VERSION_EDITS_MAX: usize = 64;

/// A version of a page that was replaced. A snapshot at epoch `s` sees it if `birth < s <= death`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageVersion {
    /// The page.
    pub page: PageNo,
    /// The epoch of the change that wrote it.
    pub birth: Epoch,
    /// The epoch of the change that replaced it.
    pub death: Epoch,
}

impl PageVersion {
    /// Whether the snapshot at this epoch sees it.
    #[must_use]
    pub fn is_seen_by(&self, snapshot: Epoch) -> bool {
        self.birth < snapshot && snapshot <= self.death
    }

    fn is_seen_by_any(&self, snapshots: &[Epoch]) -> bool {
        self.newest_of(snapshots).is_some()
    }

    /// The newest of some snapshots that see it.
    fn newest_of(&self, snapshots: &[Epoch]) -> Option<Epoch> {
        let seeing = snapshots.iter().filter(|it| self.is_seen_by(**it));
        seeing.copied().max()
    }
}

/// The versions to list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionRange {
    /// Only versions that died before this epoch. The slice must have this epoch or a newer one.
    pub below: Epoch,
    /// Only versions that one of these snapshots sees, at most [`LISTED_SNAPSHOTS_MAX`].
    pub snapshots: Vec<Epoch>,
    /// The first page.
    pub from: PageNo,
}

/// A list of versions, sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VersionList {
    /// All versions of whole pages.
    pub versions: Vec<PageVersion>,
    /// The page to continue with; none: the slice ends. If it is the page of the request, the pool is not ready, and the
    /// caller repeats the request.
    pub next: Option<PageNo>,
}

/// An edit of the versions of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionEdit {
    /// The page.
    pub page: PageNo,
    /// The birth of the version.
    pub birth: Epoch,
    /// The death that it has; none: it is added, with the bytes of a page.
    pub from: Option<Epoch>,
    /// The death that it gets; none: it is removed.
    pub to: Option<Epoch>,
}

/// Edits of the versions of one leaf of 512 pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionEdits {
    /// The `below` of the lists that the edits were made from.
    pub below: Epoch,
    /// At most [`VERSION_EDITS_MAX`].
    pub edits: Vec<VersionEdit>,
    /// The bytes of the pages that are added, in their order.
    pub data: bytes::Bytes,
}

/// The edits after which snapshots see on the target the versions that they see on the source.
///
/// `missing` are snapshots that the source has as a whole, and the target not. `complete` are those that the target has
/// as a whole. Both lists have all versions of the same pages that a missing snapshot sees.
///
/// A birth names the bytes of a page. So a version that both have gets the death up to which snapshots see it rightly.
#[must_use]
pub fn plan_version_edits(
    (source, target): (&[PageVersion], &[PageVersion]),
    missing: &[Epoch],
    complete: &[Epoch],
) -> Vec<VersionEdit> {
    let is_same =
        |one: &PageVersion, other: &PageVersion| (one.page, one.birth) == (other.page, other.birth);
    let mut edits = Vec::new();
    let mut kept: Vec<PageVersion> = Vec::new();
    for present in target {
        let right = source.iter().find(|it| is_same(it, present));
        let right = right.filter(|it| it.is_seen_by_any(missing));
        let by_source = right.map(|it| it.death);
        // A second version of a birth is superfluous.
        let death = match kept.iter().any(|it| is_same(it, present)) {
            true => None,
            false => by_source.max(present.newest_of(complete)),
        };
        if let Some(death) = death {
            kept.push(PageVersion { death, ..*present });
        }
        if is_other_view(present, death, missing, complete) {
            edits.push(VersionEdit {
                page: present.page,
                birth: present.birth,
                from: Some(present.death),
                to: death,
            });
        }
    }
    let is_new = |it: &&PageVersion| !kept.iter().any(|kept| is_same(it, kept));
    let wanted = source.iter().filter(|it| it.is_seen_by_any(missing));
    edits.extend(wanted.filter(is_new).map(|it| VersionEdit {
        page: it.page,
        birth: it.birth,
        from: None,
        to: Some(it.death),
    }));
    edits
}

/// Whether other snapshots see a version after it got this death.
fn is_other_view(
    version: &PageVersion,
    death: Option<Epoch>,
    missing: &[Epoch],
    complete: &[Epoch],
) -> bool {
    let Some(death) = death else {
        return true;
    };
    let edited = PageVersion { death, ..*version };
    let mut snapshots = missing.iter().chain(complete);
    snapshots.any(|&it| version.is_seen_by(it) != edited.is_seen_by(it))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(page: u64, birth: u32, death: u32) -> PageVersion {
        PageVersion {
            page: PageNo(page),
            birth: Epoch(birth),
            death: Epoch(death),
        }
    }

    fn edit(birth: u32, from: Option<u32>, to: Option<u32>) -> VersionEdit {
        VersionEdit {
            page: PageNo(1),
            birth: Epoch(birth),
            from: from.map(Epoch),
            to: to.map(Epoch),
        }
    }

    #[test]
    fn version_that_outlives_its_death_is_shortened() {
        // The target was away from 9 to 20. Snapshot 9 is complete on it, 12 and 16 are not.
        let source = [version(1, 5, 10), version(1, 10, 15), version(1, 15, 18)];
        let target = [version(1, 5, 18)];
        let plan = plan_version_edits((&source, &target), &[Epoch(12), Epoch(16)], &[Epoch(9)]);
        let expected = [
            edit(5, Some(18), Some(9)),
            edit(10, None, Some(15)),
            edit(15, None, Some(18)),
        ];
        assert_eq!(plan, expected);
    }

    #[test]
    fn version_over_a_hole_is_removed() {
        let target = [version(1, 5, 18)];
        let plan = plan_version_edits((&[], &target), &[Epoch(12)], &[]);
        assert_eq!(plan, [edit(5, Some(18), None)]);
    }

    #[test]
    fn equal_versions_need_no_edit() {
        let source = [version(1, 5, 18), version(2, 3, 14)];
        let target = [version(1, 5, 17), version(2, 3, 14)];
        let plan = plan_version_edits((&source, &target), &[Epoch(12)], &[Epoch(9)]);
        assert_eq!(plan, []);
    }
}
