//! Copies between the legs of a column.
//!
//! Invariants: a page that no source can read is never skipped silently. Holes are copied as
//! holes. A page that is copied for another reason than an operation in flight keeps its birth.

use super::control::ControlConnection;
use super::state::ControllerState;
use crate::limits::RESYNC_CHUNK_BYTES;
use crate::snapshot::LegSet;
use bytes::Bytes;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::{
    COPY_PAGES_MAX, PageRun, SLICE_IO_BYTES_MAX, SliceError, SliceReply, SliceRequest, Stamp,
    TransactionPart,
};
use pagemesh_base::space::Extent;
use pagemesh_base::units::PAGE_BYTES;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

const _: () = assert!(RESYNC_CHUNK_BYTES <= (COPY_PAGES_MAX * PAGE_BYTES) as u64);

/// The error of a copy, and its leg.
pub(super) struct CopyError {
    pub leg: usize,
    pub error: SliceError,
}

impl CopyError {
    pub(super) fn is_damage(&self) -> bool {
        matches!(self.error, SliceError::Damaged { .. })
    }

    pub(super) fn is_damage_of(&self, leg: usize) -> bool {
        self.leg == leg && self.is_damage()
    }
}

#[derive(Clone)]
pub(super) struct LegConnection {
    pub leg: usize,
    pub control: Rc<ControlConnection>,
}

/// The handling of births and holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyKind {
    /// Pages and holes keep the births of the source.
    KeepBirths,
    /// They are born now, holes too. Otherwise the clear would leave no trace. A leg that is still
    /// stale may hold data there, and the target may later be its only source.
    BornNow,
    /// Holes are cleared, and nothing else is copied. That frees space.
    ClearOnly,
}

/// The connections to these legs; none if one of them has none.
pub(super) fn leg_connections(
    state: &ControllerState,
    column: usize,
    legs: LegSet,
) -> Option<Vec<LegConnection>> {
    let model = state.model();
    let keeps = &model.columns[column].legs;
    let party = |leg: usize| {
        let control = keeps.get(leg)?.control.clone()?;
        Some(LegConnection { leg, control })
    };
    legs.legs().map(party).collect()
}

/// Runs futures in order, at most `most` of them at once. After a failure no more futures
/// begin, and the running ones go on to their end. So none of them is running when this returns
/// the first failure.
pub(super) async fn run_concurrently<F: Future<Output = Result<(), String>>>(
    state: &ControllerState,
    most: usize,
    mut futures: impl Iterator<Item = F>,
) -> Result<(), String> {
    let mut begun: Vec<Pin<Box<F>>> = vec![];
    let mut result = Ok(());
    poll_fn(|context| {
        let room = most - begun.len();
        let begins = if result.is_ok() { room } else { 0 };
        begun.extend(futures.by_ref().take(begins).map(Box::pin));
        let before = begun.len();
        begun.retain_mut(|future| match future.as_mut().poll(context) {
            Poll::Pending => true,
            Poll::Ready(one) => {
                if result.is_ok() {
                    result = one;
                }
                false
            }
        });
        if before == 0 {
            return Poll::Ready(());
        }
        if begun.len() < before {
            state.record_activity();
        }
        Poll::Pending
    })
    .await;
    result
}

/// Copies a range to `to` from the first leg of `from` that can read it. The caller keeps the
/// range unchanged meanwhile. The range has at most [`RESYNC_CHUNK_BYTES`].
pub(super) async fn copy_chunk(
    state: &ControllerState,
    from: &[LegConnection],
    to: &[LegConnection],
    (offset, len): (u64, u64),
    kind: CopyKind,
) -> Result<(), CopyError> {
    debug_assert!(len <= RESYNC_CHUNK_BYTES && len <= u64::from(SLICE_IO_BYTES_MAX));
    let mut last = None;
    for source in from {
        match copy_from_leg(state, source, to, (offset, len), kind).await {
            Err(failure) if failure.is_damage_of(source.leg) => last = Some(failure),
            other => return other,
        }
    }
    let Some(failure) = last else {
        return Ok(());
    };
    let page = PAGE_BYTES as u64;
    if len <= page || from.len() == 1 {
        return Err(failure);
    }
    // No source can read the whole range, but for each page one may.
    for at in (offset..offset + len).step_by(PAGE_BYTES) {
        let mut done = Err(CopyError {
            leg: failure.leg,
            error: failure.error.clone(),
        });
        for source in from {
            let one = (at, page.min(offset + len - at));
            done = copy_from_leg(state, source, to, one, kind).await;
            if !matches!(&done, Err(failure) if failure.is_damage_of(source.leg)) {
                break;
            }
        }
        done?;
    }
    Ok(())
}

async fn copy_from_leg(
    state: &ControllerState,
    from: &LegConnection,
    to: &[LegConnection],
    (offset, len): (u64, u64),
    kind: CopyKind,
) -> Result<(), CopyError> {
    let (mut at, end) = (offset, offset + len);
    while at < end {
        for extent in extents(state, from, at, end).await? {
            let range = (at, extent.len.min(end - at));
            match (extent.mapped, kind) {
                _ if range.1 == 0 => {}
                (true, CopyKind::ClearOnly) => {}
                (true, _) => copy_data(state, from, to, range, kind).await?,
                (false, _) => copy_holes(state, from, to, range, kind).await?,
            }
            at += range.1;
        }
    }
    Ok(())
}

/// Copies a range of mapped pages.
async fn copy_data(
    state: &ControllerState,
    from: &LegConnection,
    to: &[LegConnection],
    (offset, len): (u64, u64),
    kind: CopyKind,
) -> Result<(), CopyError> {
    // Both answers are on their way together.
    let births = request_kept_births(state, from, (offset, len), kind);
    let request = SliceRequest::Read {
        offset,
        len: len as u32,
    };
    let reply = from.control.call(state, request).await;
    let births = take_kept_births(state, from, births).await?;
    let fail = |error| CopyError {
        leg: from.leg,
        error,
    };
    let SliceReply::Data(data) = reply.map_err(fail)? else {
        return Err(fail(SliceError::Refused("it returns no data".into())));
    };
    let data = Bytes::from(data);
    apply_change(state, to, |stamp| match &births {
        Some(births) => SliceRequest::Copy {
            page: PageNo(offset / PAGE_BYTES as u64),
            births: births.clone(),
            data: data.clone(),
            stamp,
        },
        None => SliceRequest::Write {
            offset,
            data: data.clone(),
            stamp,
        },
    })
    .await
}

/// Copies a range of pages that are holes on the source.
async fn copy_holes(
    state: &ControllerState,
    from: &LegConnection,
    to: &[LegConnection],
    (offset, len): (u64, u64),
    kind: CopyKind,
) -> Result<(), CopyError> {
    let births = request_kept_births(state, from, (offset, len), kind);
    let births = take_kept_births(state, from, births).await?;
    let pages = len.div_ceil(PAGE_BYTES as u64) as usize;
    apply_change(state, to, |stamp| {
        let births = match kind {
            CopyKind::BornNow => Some(vec![stamp.epoch; pages]),
            _ => births.clone(),
        };
        match births {
            Some(births) => SliceRequest::Copy {
                page: PageNo(offset / PAGE_BYTES as u64),
                births,
                data: Bytes::new(),
                stamp,
            },
            None => SliceRequest::Clear { offset, len, stamp },
        }
    })
    .await
}

/// Requests the births of a range on a leg, in whole pages.
pub(super) fn request_births(
    state: &ControllerState,
    of: &LegConnection,
    (offset, len): (u64, u64),
) -> u64 {
    const PAGE: u64 = PAGE_BYTES as u64;
    let request = SliceRequest::Births {
        page: PageNo(offset / PAGE),
        count: len.div_ceil(PAGE) as u32,
    };
    of.control.submit(state, request)
}

/// Takes the answer to [`request_births`].
pub(super) async fn take_births(
    state: &ControllerState,
    of: &LegConnection,
    tag: u64,
) -> Result<Vec<Epoch>, CopyError> {
    let fail = |error| CopyError { leg: of.leg, error };
    match of.control.answer(state, tag).await.map_err(fail)? {
        SliceReply::Births(births) => Ok(births),
        _ => Err(fail(SliceError::Refused("it lists no births".into()))),
    }
}

/// Requests the births of a range, if the copy keeps them. The births of a part of a page are not
/// kept: only the end of a slice could be one.
fn request_kept_births(
    state: &ControllerState,
    from: &LegConnection,
    (offset, len): (u64, u64),
    kind: CopyKind,
) -> Option<u64> {
    const PAGE: u64 = PAGE_BYTES as u64;
    let is_whole = offset.is_multiple_of(PAGE) && len.is_multiple_of(PAGE);
    (kind == CopyKind::KeepBirths && is_whole).then(|| request_births(state, from, (offset, len)))
}

/// Takes the answer to [`request_kept_births`].
async fn take_kept_births(
    state: &ControllerState,
    from: &LegConnection,
    tag: Option<u64>,
) -> Result<Option<Vec<Epoch>>, CopyError> {
    match tag {
        Some(tag) => take_births(state, from, tag).await.map(Some),
        None => Ok(None),
    }
}

/// Reads a page of this leg as a part of a transaction.
async fn read_page(
    state: &ControllerState,
    from: &LegConnection,
    offset: u64,
) -> Result<TransactionPart, CopyError> {
    let len = PAGE_BYTES as u64;
    let extents = extents(state, from, offset, offset + len).await?;
    if !extents.iter().any(|extent| extent.mapped) {
        return Ok(TransactionPart::Clear { offset, len });
    }
    let fail = |error| CopyError {
        leg: from.leg,
        error,
    };
    let request = SliceRequest::Read {
        offset,
        len: PAGE_BYTES as u32,
    };
    match from.control.call(state, request).await.map_err(fail)? {
        SliceReply::Data(data) => Ok(TransactionPart::Write {
            offset,
            data: data.into(),
        }),
        _ => Err(fail(SliceError::Refused("it returns no data".into()))),
    }
}

/// Copies the pages of one operation as one transaction. Otherwise a loss of the source midway
/// could leave every leg with half of it.
///
/// Each page comes from the first source that can read it. A source on which a page is damaged
/// becomes a target, too. False, without any change, if no source can read some page.
pub(super) async fn copy_operation(
    state: &ControllerState,
    from: &[LegConnection],
    mut to: Vec<LegConnection>,
    offsets: &[u64],
) -> Result<bool, CopyError> {
    let mut parts = Vec::new();
    for &offset in offsets {
        let mut part = None;
        for source in from {
            match read_page(state, source, offset).await {
                Ok(found) => {
                    part = Some(found);
                    break;
                }
                Err(failure) if failure.is_damage() => {
                    if to.iter().all(|target| target.leg != source.leg) {
                        to.push(source.clone());
                    }
                }
                Err(failure) => return Err(failure),
            }
        }
        let Some(part) = part else {
            return Ok(false);
        };
        parts.push(part);
    }
    let transact = |stamp| SliceRequest::Transact {
        parts: parts.clone(),
        stamp,
    };
    to.sort_by_key(|target| target.leg);
    apply_change(state, &to, transact).await?;
    Ok(true)
}

/// The pages of a range that are mapped on a leg.
pub(super) async fn mapped_runs(
    state: &ControllerState,
    of: &LegConnection,
    mut at: u64,
    end: u64,
) -> Result<Vec<PageRun>, CopyError> {
    let page = PAGE_BYTES as u64;
    let mut runs = vec![];
    while at < end {
        for extent in extents(state, of, at, end).await? {
            let stop = (at + extent.len).min(end);
            if extent.mapped && stop > at {
                let first = at / page;
                runs.push(PageRun {
                    page: PageNo(first),
                    count: stop.div_ceil(page) - first,
                });
            }
            at = stop;
        }
    }
    Ok(runs)
}

/// The extents of a leg from `at` on: at least one, and maybe not up to the end.
pub(super) async fn extents(
    state: &ControllerState,
    of: &LegConnection,
    at: u64,
    end: u64,
) -> Result<Vec<Extent>, CopyError> {
    let fail = |error| CopyError { leg: of.leg, error };
    let request = SliceRequest::Extents {
        offset: at,
        len: end - at,
    };
    match of.control.call(state, request).await.map_err(fail)? {
        SliceReply::Extents(extents) if extents.iter().any(|e| e.len > 0) => Ok(extents),
        _ => Err(fail(SliceError::Refused("it lists no extents".into()))),
    }
}

async fn clear(
    state: &ControllerState,
    to: &[LegConnection],
    offset: u64,
    len: u64,
) -> Result<(), CopyError> {
    let clear = |stamp| SliceRequest::Clear { offset, len, stamp };
    apply_change(state, to, clear).await
}

/// Reports to legs that the controller's changes are complete. The in-flight tables need not
/// keep them.
pub(super) async fn send_complete(
    state: &ControllerState,
    to: &[LegConnection],
) -> Result<(), CopyError> {
    clear(state, to, 0, 0).await
}

/// Makes the same change on several legs.
async fn apply_change(
    state: &ControllerState,
    to: &[LegConnection],
    request: impl Fn(Stamp) -> SliceRequest,
) -> Result<(), CopyError> {
    let op = state.next_op();
    let start = |party: &LegConnection| {
        let epoch = party.control.epoch(state);
        let stamp = Stamp {
            epoch,
            op,
            open_ops: 0,
        };
        party.control.submit(state, request(stamp))
    };
    let tags: Vec<u64> = to.iter().map(start).collect();
    for (party, mut tag) in to.iter().zip(tags) {
        loop {
            match party.control.answer(state, tag).await {
                Ok(_) => break,
                // The controller itself raised the epoch meanwhile.
                Err(SliceError::StaleEpoch { current }) if current <= state.shared.held_epoch() => {
                    tag = start(party);
                }
                Err(error) => {
                    let leg = party.leg;
                    return Err(CopyError { leg, error });
                }
            }
        }
    }
    Ok(())
}

/// Splits a run of pages into chunks. A chunk is no longer than one lock may be held for, and
/// lies within one lock region.
pub(super) fn chunks(start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut at = start;
    std::iter::from_fn(move || {
        let len = RESYNC_CHUNK_BYTES
            .min(end.saturating_sub(at))
            .min(RESYNC_CHUNK_BYTES - at % RESYNC_CHUNK_BYTES);
        let chunk = (at, len);
        at += len;
        (len > 0).then_some(chunk)
    })
}
