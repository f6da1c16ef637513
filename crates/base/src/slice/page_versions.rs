//! Versions of pages that snapshots see, and the comparison of those that two legs have.
//!
//! A leg that was away while a snapshot was cut lacks versions, or has wrong ones: a version lives on it until the page
//! was copied or written again, and covers the versions between. [`plan_version_edits`] lists the edits that make the views
//! of the leg equal to those of another one.
//!
//! Views are compared by the checksums of pages. Births are not enough: a page that is changed twice in one epoch has
//! the same birth with both contents, and a copy of a page may be born later than the page.
//!
//! Invariant: the plan changes no view of a snapshot that the target has as a whole.

use crate::ids::{Epoch, PageNo};

/// Snapshots of one [`VersionRange`].
pub const LISTED_SNAPSHOTS_MAX: usize = 256;
/// Edits of one [`VersionEdits`].
pub const VERSION_EDITS_MAX: usize = 64;

/// The contents of a page between two changes. A snapshot at epoch `s` sees it if `birth < s <= death`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageVersion {
    /// The page.
    pub page: PageNo,
    /// The epoch of the change that wrote it.
    pub birth: Epoch,
    /// The epoch of the change that replaced it. In a list, the epoch of the range stands for each later one, and for a
    /// page that was not replaced.
    pub death: Epoch,
    /// CRC32C of the page.
    pub sum: u32,
}

impl PageVersion {
    /// Whether the snapshot at this epoch sees it.
    #[must_use]
    pub fn is_seen_by(&self, snapshot: Epoch) -> bool {
        self.birth < snapshot && snapshot <= self.death
    }

    /// Whether it can stand for another version of the page. It may be born later: then a comparison of two snapshots names
    /// a page too many, and never one too few. It may be born earlier if no mark is between the births.
    fn stands_for(&self, other: &PageVersion, marks: &[Epoch]) -> bool {
        let is_between = |mark: &Epoch| self.birth < *mark && *mark <= other.birth;
        self.sum == other.sum && !marks.iter().any(is_between)
    }
}

/// A `below` of ranges for a look alone: no edits follow, so nothing has to be merged.
pub const VIEWS_ONLY: Epoch = Epoch(u32::MAX);

/// The versions to list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionRange {
    /// The slice must have this epoch or a newer one. Versions that died before do not change any more. Or [`VIEWS_ONLY`].
    pub below: Epoch,
    /// Only versions that one of these snapshots sees, at most [`LISTED_SNAPSHOTS_MAX`]. They are older than `below`.
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
    /// Its checksum.
    pub sum: u32,
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

/// The pages that snapshots see with other bytes in one list than in the other. Both lists are sorted, and have all versions
/// of the same pages that these snapshots see.
#[must_use]
pub fn unequal_views(
    (mut one, mut other): (&[PageVersion], &[PageVersion]),
    snapshots: &[Epoch],
) -> Vec<(PageNo, Epoch)> {
    let mut unequal = Vec::new();
    while let Some(page) = first_page(one, other) {
        let lists = [take_page(&mut one, page), take_page(&mut other, page)];
        let differs = |it: &&Epoch| {
            let [one, other] = lists.map(|list| view(list, **it).map(|version| version.sum));
            one != other
        };
        unequal.extend(snapshots.iter().filter(differs).map(|&it| (page, it)));
    }
    unequal
}

/// The version of a page that a snapshot sees.
fn view(versions: &[PageVersion], snapshot: Epoch) -> Option<&PageVersion> {
    let seen = versions.iter().filter(|it| it.is_seen_by(snapshot));
    seen.max_by_key(|it| it.birth)
}

/// A comparison of versions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VersionPlan {
    /// Edits of the target, in the order of pages.
    pub edits: Vec<VersionEdit>,
    /// Views that no edit makes equal. The target sees another page, which is a page of the slice still.
    pub unequal: Vec<(PageNo, Epoch)>,
}

/// The edits after which snapshots see on the target the bytes that they see on the source.
///
/// `missing` are snapshots that the source has as a whole, and the target not. `complete` are those that the target has
/// as a whole. Both are sorted, and older than `below`. `marks` are the epochs of all snapshots and bookmarks of the
/// volume, to which others are compared. Both lists are sorted, and have all versions of the same pages that a missing
/// snapshot sees.
#[must_use]
pub fn plan_version_edits(
    (mut source, mut target): (&[PageVersion], &[PageVersion]),
    below: Epoch,
    (missing, complete): (&[Epoch], &[Epoch]),
    marks: &[Epoch],
) -> VersionPlan {
    let mut plan = VersionPlan::default();
    while let Some(page) = first_page(source, target) {
        let views = PageViews {
            source: take_page(&mut source, page),
            target: take_page(&mut target, page),
            below,
            missing,
            complete,
            marks,
        };
        views.plan(page, &mut plan);
    }
    plan
}

fn first_page(source: &[PageVersion], target: &[PageVersion]) -> Option<PageNo> {
    let firsts = [source.first(), target.first()].into_iter().flatten();
    firsts.map(|it| it.page).min()
}

fn take_page<'a>(list: &mut &'a [PageVersion], page: PageNo) -> &'a [PageVersion] {
    let (found, rest) = list.split_at(list.partition_point(|it| it.page <= page));
    *list = rest;
    found
}

/// The versions of one page on two legs.
struct PageViews<'a> {
    source: &'a [PageVersion],
    target: &'a [PageVersion],
    below: Epoch,
    missing: &'a [Epoch],
    complete: &'a [Epoch],
    marks: &'a [Epoch],
}

impl PageViews<'_> {
    fn plan(&self, page: PageNo, plan: &mut VersionPlan) {
        let (mut kept, mut unequal) = (Vec::new(), Vec::new());
        for version in self.target {
            let wrong = self.wrong_views(version);
            let after = match wrong.is_empty() {
                true => Some(*version),
                false => self.shortened(version),
            };
            let is_open = version.death >= self.below;
            let stays = after.is_some_and(|it| !self.wrong_views(&it).is_empty());
            if stays || is_open && !wrong.is_empty() {
                unequal.extend(wrong);
                continue;
            }
            kept.extend(after);
            if after != Some(*version) {
                plan.edits.push(VersionEdit {
                    page,
                    birth: version.birth,
                    sum: version.sum,
                    from: Some(version.death),
                    to: after.map(|it| it.death),
                });
            }
        }
        self.plan_added(page, (&kept, &unequal), &mut plan.edits);
        plan.unequal
            .extend(unequal.into_iter().map(|it| (page, it)));
    }

    /// The version of the source that a missing snapshot sees.
    fn wanted(&self, snapshot: Epoch) -> Option<&PageVersion> {
        view(self.source, snapshot)
    }

    fn is_right(&self, version: &PageVersion, snapshot: Epoch) -> bool {
        self.wanted(snapshot)
            .is_some_and(|wanted| version.stands_for(wanted, self.marks))
    }

    /// The missing snapshots that see a version of the target, and should see another one, or none.
    fn wrong_views(&self, version: &PageVersion) -> Vec<Epoch> {
        let missing = self.missing.iter().copied();
        let is_wrong = |it: &Epoch| version.is_seen_by(*it) && !self.is_right(version, *it);
        missing.filter(is_wrong).collect()
    }

    /// A version of the target up to the newest snapshot that sees it rightly; none: there is no such snapshot.
    fn shortened(&self, version: &PageVersion) -> Option<PageVersion> {
        let missing = self.missing.iter();
        let right = missing.filter(|&&it| self.is_right(version, it));
        let seeing = right.chain(self.complete).copied();
        let death = seeing.filter(|it| version.is_seen_by(*it)).max()?;
        Some(PageVersion { death, ..*version })
    }

    /// Adds the versions that missing snapshots see on the source, and do not see on the target. Such a version lives between two
    /// complete snapshots, so that these do not see it.
    fn plan_added(
        &self,
        page: PageNo,
        (kept, unequal): (&[PageVersion], &[Epoch]),
        edits: &mut Vec<VersionEdit>,
    ) {
        let mut added: Vec<VersionEdit> = Vec::new();
        let mut is_run = false;
        for &snapshot in self.missing {
            let is_seen = |it: &PageVersion| it.is_seen_by(snapshot) && self.is_right(it, snapshot);
            let is_done = kept.iter().any(is_seen) || unequal.contains(&snapshot);
            let wanted = self.wanted(snapshot).filter(|_| !is_done);
            let Some(wanted) = wanted else {
                is_run = false;
                continue;
            };
            let before = self.complete.partition_point(|it| *it < snapshot);
            let before = self.complete[..before].last().copied();
            let birth = wanted.birth.max(before.unwrap_or(Epoch(0)));
            match added.last_mut().filter(|_| is_run) {
                Some(last) if (last.birth, last.sum) == (birth, wanted.sum) => {
                    last.to = Some(snapshot)
                }
                _ => added.push(VersionEdit {
                    page,
                    birth,
                    sum: wanted.sum,
                    from: None,
                    to: Some(snapshot),
                }),
            }
            is_run = true;
        }
        edits.extend(added);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(page: u64, birth: u32, death: u32, sum: u32) -> PageVersion {
        PageVersion {
            page: PageNo(page),
            birth: Epoch(birth),
            death: Epoch(death),
            sum,
        }
    }

    fn edit((birth, sum): (u32, u32), from: Option<u32>, to: Option<u32>) -> VersionEdit {
        VersionEdit {
            page: PageNo(1),
            birth: Epoch(birth),
            sum,
            from: from.map(Epoch),
            to: to.map(Epoch),
        }
    }

    fn plan(
        legs: (&[PageVersion], &[PageVersion]),
        missing: &[u32],
        complete: &[u32],
    ) -> VersionPlan {
        let epochs = |list: &[u32]| list.iter().copied().map(Epoch).collect::<Vec<_>>();
        let (missing, complete) = (epochs(missing), epochs(complete));
        let marks = [&missing[..], &complete[..]].concat();
        plan_version_edits(legs, Epoch(20), (&missing, &complete), &marks)
    }

    #[test]
    fn version_that_outlives_its_death_is_shortened() {
        // The target was away from 9 to 20. Snapshot 9 is complete on it, 12 and 16 are not.
        let source = [
            version(1, 5, 10, 50),
            version(1, 10, 15, 60),
            version(1, 15, 18, 70),
        ];
        let target = [version(1, 5, 18, 50)];
        let expected = [
            edit((5, 50), Some(18), Some(9)),
            edit((10, 60), None, Some(12)),
            edit((15, 70), None, Some(16)),
        ];
        let plan = plan((&source, &target), &[12, 16], &[9]);
        assert_eq!((&plan.edits[..], plan.unequal.len()), (&expected[..], 0));
    }

    #[test]
    fn version_over_a_hole_is_removed() {
        let target = [version(1, 5, 18, 50)];
        let plan = plan((&[], &target), &[12], &[]);
        assert_eq!(plan.edits, [edit((5, 50), Some(18), None)]);
    }

    #[test]
    fn equal_views_need_no_edit() {
        let source = [version(1, 5, 18, 50), version(2, 3, 14, 60)];
        // It died elsewhere, and was born later; no snapshot sees that.
        let target = [version(1, 5, 17, 50), version(2, 4, 14, 60)];
        let plan = plan((&source, &target), &[12], &[9]);
        assert_eq!(plan, VersionPlan::default());
    }

    #[test]
    fn version_born_before_a_mark_stands_for_no_later_one() {
        let (source, target) = ([version(1, 8, 18, 50)], [version(1, 5, 18, 50)]);
        // Nothing is compared with an epoch between the births.
        assert_eq!(plan((&source, &target), &[12], &[]), VersionPlan::default());
        let expected = [
            edit((5, 50), Some(18), Some(7)),
            edit((8, 50), None, Some(12)),
        ];
        assert_eq!(plan((&source, &target), &[12], &[7]).edits, expected);
    }

    #[test]
    fn version_of_one_birth_with_other_bytes_is_replaced() {
        let (source, target) = ([version(1, 5, 18, 51)], [version(1, 5, 18, 50)]);
        let expected = [edit((5, 50), Some(18), None), edit((5, 51), None, Some(12))];
        assert_eq!(plan((&source, &target), &[10, 12], &[]).edits, expected);
    }

    #[test]
    fn page_born_later_on_the_target_is_added_for_older_ones() {
        let (source, target) = ([version(1, 5, 20, 50)], [version(1, 14, 20, 50)]);
        let plan = plan((&source, &target), &[10, 12, 16], &[11]);
        let expected = [
            edit((5, 50), None, Some(10)),
            edit((11, 50), None, Some(12)),
        ];
        assert_eq!((&plan.edits[..], plan.unequal.len()), (&expected[..], 0));
    }

    #[test]
    fn views_with_other_bytes_are_unequal() {
        let one = [version(1, 5, 9, 50), version(2, 3, 20, 60)];
        let other = [version(1, 6, 20, 50), version(2, 3, 20, 61)];
        let found = unequal_views((&one, &other), &[Epoch(8), Epoch(12)]);
        let expected = [(1, 12), (2, 8), (2, 12)];
        assert_eq!(found, expected.map(|(page, it)| (PageNo(page), Epoch(it))));
    }

    #[test]
    fn page_of_the_slice_with_other_bytes_is_unequal() {
        let (source, target) = ([version(1, 5, 20, 51)], [version(1, 5, 20, 50)]);
        let plan = plan((&source, &target), &[12], &[]);
        assert_eq!(plan.unequal, [(PageNo(1), Epoch(12))]);
    }
}
