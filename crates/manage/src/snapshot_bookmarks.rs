//! Bookmarks of snapshots: made, listed and deleted. They are records of the store alone, so no brick is asked.
//!
//! Invariant: a page that has changed since the epoch of a bookmark was born at that epoch or later, on each leg that the
//! bookmark names and that is in-sync. The promotion of a copy that lacks changes breaks that: pages get back older bytes with their
//! older births. So it deletes the bookmarks of its volume, but those from before a snapshot that the copy has as a whole.

use crate::call::{RecordTag, etag_text};
use crate::events::EventDraft;
use crate::fault::Fault;
use crate::idempotency::{CallStart, CreateAnswer};
use crate::manager::{Manager, ManagerState};
use crate::records::VolumeRecord;
use crate::replica_snapshots::PromotedSnapshots;
use crate::slices::slice_locations;
use crate::snapshot_lists::live_snapshot;
use crate::snapshots::{
    BOOKMARKS_MAX, BookmarkRecord, SnapshotFault, SnapshotName, VOLUME_BOOKMARKS_MAX,
};
use crate::store::StoreWrite;
use crate::wire::{BookmarkDetail, BookmarkInfo, CreateBookmark};
use pagemesh_base::layout::{Leg, SliceId, VolumeName};
use std::collections::BTreeSet;

impl Manager {
    /// Makes a bookmark of a snapshot.
    ///
    /// # Errors
    /// When there is no such snapshot, the name is taken, or a limit is reached.
    pub fn create_bookmark(
        &self,
        volume: &VolumeName,
        request: &CreateBookmark,
    ) -> Result<BookmarkInfo, Fault> {
        let created = self.create_bookmark_keyed(volume, request);
        created.map(|answer| answer.reply)
    }

    /// The same, with the entity tag of the bookmark. A repetition of a call with an `Idempotency-Key` gets the first
    /// answer again.
    ///
    /// # Errors
    /// The same; also when the key belongs to another call, or the first call still runs.
    pub fn create_bookmark_keyed(
        &self,
        volume: &VolumeName,
        request: &CreateBookmark,
    ) -> Result<CreateAnswer<BookmarkInfo>, Fault> {
        let running = match self.begin_call(&("bookmark", volume, request))? {
            CallStart::Run(running) => running,
            CallStart::Repeated(answer) => return Ok(answer),
        };
        let mut book = self.state();
        let record = self.new_bookmark(&book, volume, request, false)?;
        let reply = bookmark_info(volume, &record);
        let etag = etag_text(RecordTag::new(&record), &reply);
        let kept = self.plan_answer(&book, running.as_ref(), &etag, &reply);
        let mut writes = vec![StoreWrite::PutBookmark(&record)];
        writes.extend(kept.writes());
        self.commit(&mut book, &writes, vec![])?;
        self.apply_key_change(&mut book, &kept);
        book.snapshots.put_bookmark(volume, record);
        Ok(CreateAnswer { reply, etag })
    }

    /// The record of a bookmark to make. It may replace one of its name if `replaces`.
    pub(crate) fn new_bookmark(
        &self,
        book: &ManagerState,
        volume: &VolumeName,
        request: &CreateBookmark,
        replaces: bool,
    ) -> Result<BookmarkRecord, Fault> {
        let snapshot = live_snapshot(book, volume, &request.snapshot)?;
        let name = request.name.as_ref().unwrap_or(&request.snapshot).clone();
        match book.snapshots.bookmark(volume, &name) {
            Some(_) if replaces => {}
            Some(_) => {
                let volume = volume.clone();
                return Err(SnapshotFault::BookmarkExists { volume, name }.into());
            }
            None => check_room(book, volume)?,
        }
        let of = book.snapshots.of(volume);
        let layout = of.and_then(|of| of.layout(snapshot));
        let layout = layout.ok_or_else(|| Fault::NoSuchVolume(volume.clone()))?;
        Ok(BookmarkRecord {
            volume: snapshot.volume,
            name,
            epoch: snapshot.epoch,
            snapshot: snapshot.name.clone(),
            created_unix_ms: snapshot.created_unix_ms,
            size_bytes: layout.size_bytes,
            segments: layout
                .for_readers(volume, snapshot.epoch, |_| true)
                .segments,
            made_by: self.actor(),
        })
    }

    /// The bookmarks of a volume, by name.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn bookmarks(&self, volume: &VolumeName) -> Result<Vec<BookmarkInfo>, Fault> {
        let book = self.state();
        book.volume(volume)?;
        let records = book.snapshots.bookmarks_of(volume);
        Ok(records
            .map(|record| bookmark_info(volume, record))
            .collect())
    }

    /// A bookmark, and the legs that had its snapshot and are legs of the volume still; the tag of its record.
    ///
    /// # Errors
    /// When there is no such volume or bookmark.
    pub fn show_bookmark(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
    ) -> Result<(BookmarkDetail, RecordTag), Fault> {
        let book = self.state();
        let present = &book.volume(volume)?.layout_state.layout.segments;
        let present: BTreeSet<SliceId> = slice_locations(present).map(|it| it.slice).collect();
        let record = find_bookmark(&book, volume, name)?;
        let mut layout = record.layout(volume);
        let columns = layout.segments.iter_mut().flat_map(|it| &mut it.columns);
        let has = |leg: &Leg| present.contains(&leg.slice);
        columns.for_each(|column| column.legs.retain(has));
        let detail = BookmarkDetail {
            info: bookmark_info(volume, record),
            bricks: book.addresses(&layout.segments),
            layout,
        };
        Ok((detail, RecordTag::new(record)))
    }

    /// Deletes a bookmark.
    ///
    /// # Errors
    /// When there is no such bookmark, or the store fails.
    pub fn delete_bookmark(&self, volume: &VolumeName, name: &SnapshotName) -> Result<(), Fault> {
        let mut book = self.state();
        book.volume(volume)?;
        let record = find_bookmark(&book, volume, name)?;
        self.check_unchanged(
            || RecordTag::new(record),
            || format!("the bookmark {volume}#{name}"),
        )?;
        let removed = StoreWrite::RemoveBookmark(record.volume, name.clone());
        self.commit(&mut book, &[removed], vec![])?;
        book.snapshots.remove_bookmark(volume, name);
        Ok(())
    }

    /// Stores a volume with a copy that was perhaps promoted. If the copy may lack changes, `snapshots` says what stays of
    /// the snapshots and bookmarks.
    pub(crate) fn commit_promotion(
        &self,
        book: &mut ManagerState,
        record: &VolumeRecord,
        drafts: Vec<EventDraft>,
        snapshots: Option<PromotedSnapshots>,
    ) -> Result<(), Fault> {
        let name = &record.layout_state.layout.name;
        let Some(snapshots) = snapshots else {
            return self.commit_volume(book, record, drafts);
        };
        let goes = |it: &&BookmarkRecord| !snapshots.keeps_bookmark(&it.name);
        let gone = book.snapshots.bookmarks_of(name).filter(goes);
        let gone: Vec<_> = gone.map(|it| (it.volume, it.name.clone())).collect();
        let mut writes = vec![StoreWrite::PutVolume(record)];
        let removals = gone.iter();
        writes.extend(removals.map(|(id, of)| StoreWrite::RemoveBookmark(*id, of.clone())));
        writes.extend(snapshots.writes());
        self.commit(book, &writes, drafts)?;
        drop(writes);
        if !gone.is_empty() {
            tracing::warn!(volume = %name, count = gone.len(), "the promotion deleted bookmarks: the promoted copy may lack changes");
        }
        for (_, bookmark) in gone {
            book.snapshots.remove_bookmark(name, &bookmark);
        }
        let (records, bookmarks) = snapshots.into_records();
        for snapshot in records {
            book.snapshots.put(name, snapshot, self.clock.elapsed());
        }
        for bookmark in bookmarks {
            book.snapshots.put_bookmark(name, bookmark);
        }
        self.put_volume(book, record.clone());
        self.brick_returned.notify_one();
        Ok(())
    }
}

/// Refuses a bookmark beyond the limits.
fn check_room(book: &ManagerState, volume: &VolumeName) -> Result<(), Fault> {
    let (of_volume, all) = (
        book.snapshots.bookmarks_of(volume).count(),
        book.snapshots.count_bookmarks(),
    );
    let (what, most) = match (of_volume >= VOLUME_BOOKMARKS_MAX, all >= BOOKMARKS_MAX) {
        (true, _) => ("bookmarks of the volume", VOLUME_BOOKMARKS_MAX),
        (_, true) => ("bookmarks", BOOKMARKS_MAX),
        _ => return Ok(()),
    };
    Err(Fault::TooMany { what, most })
}

/// The writes that remove all bookmarks of a volume.
pub(crate) fn bookmark_removal_writes<'a>(
    book: &ManagerState,
    volume: &VolumeName,
) -> Vec<StoreWrite<'a>> {
    let records = book.snapshots.bookmarks_of(volume);
    records
        .map(|it| StoreWrite::RemoveBookmark(it.volume, it.name.clone()))
        .collect()
}

fn find_bookmark<'b>(
    book: &'b ManagerState,
    volume: &VolumeName,
    name: &SnapshotName,
) -> Result<&'b BookmarkRecord, Fault> {
    let found = book.snapshots.bookmark(volume, name);
    found.ok_or_else(|| {
        let (volume, name) = (volume.clone(), name.clone());
        SnapshotFault::NoSuchBookmark { volume, name }.into()
    })
}

fn bookmark_info(volume: &VolumeName, record: &BookmarkRecord) -> BookmarkInfo {
    BookmarkInfo {
        volume: volume.clone(),
        name: record.name.clone(),
        snapshot: record.snapshot.clone(),
        epoch: record.epoch,
        created_unix_ms: record.created_unix_ms,
        size_bytes: record.size_bytes,
        made_by: record.made_by.clone(),
    }
}
