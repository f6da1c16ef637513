//! Behind a guest that died inside of an operation: each brick finishes or drops it, and
//! they may differ. What it had claimed in the ring, and not filled, is filled with what
//! came of it.
//!
//! Nobody who goes through the kernel reads or changes the pages meanwhile: who asks for
//! this keeps them from doing so. Other guests of the file are kept out here. No range is
//! locked; who holds one may be waiting for this to end.
//!
//! What was one transaction is copied as one: were the source lost half-way, no leg would be
//! left with half of it.

use super::check::{Right, compare_chunk, compare_page};
use super::copy::{self, CopyError, Party, parties};
use super::follow;
use super::model::LegKeep;
use super::reform::lost_if_gone;
use super::state::State;
use crate::guests::{Guests, Place, Wound};
use crate::limits::{HEAL_RETRY, HEAL_TOLD_MIN};
use crate::ring::{Entry, Left, places_of, record_len};
use crate::status::CheckReport;
use crate::view::{Gate, Mask};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::slice::{Run, SliceReply, SliceRequest};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::mpsc::Sender;

/// The only column of a volume that has guests.
const COLUMN: usize = 0;
/// Why a copy follows no more.
const REPAIRED: &str = "a page that differed was repaired";

/// Makes the legs alike there, as the leg has it that guests read. The row stays active until
/// then.
pub(super) async fn heal(state: Rc<State>, row: usize, wound: Wound, done: Sender<()>) {
    let guests = state.hub.guests.get();
    if let Some(guests) = guests {
        guests.note_dead(row);
    }
    // Until all of it is done: what a try that failed had begun may end later.
    let _out = match defect::is(Defect::HealedBesideGuests) {
        true => None,
        false => Some(
            state
                .keep_living_guests_out(|file| file == wound.file())
                .await,
        ),
    };
    let mut tries = 0u64;
    loop {
        let gate = || state.model().columns.get(COLUMN).map(|column| column.gate);
        state
            .until(|| state.is_over() || gate() == Some(Gate::Open))
            .await;
        let healed = match state.is_over() {
            true => Ok(()),
            false => try_heal(&state, row, &wound).await,
        };
        if healed.is_ok() {
            if let Some(guests) = guests {
                guests.forget_dead(row);
            }
            // Whoever asked may have stopped waiting.
            let _ = done.send(());
            return;
        }
        tries += 1;
        if let Err(cause) = healed
            && tries >= HEAL_TOLD_MIN
            && tries.is_power_of_two()
        {
            let volume = &state.name;
            tracing::warn!(%volume, row, tries, cause, "what a dead guest left is not healed yet");
        }
        state.sleep(HEAL_RETRY).await;
    }
}

/// Once. Else why it has to be tried again.
async fn try_heal(state: &State, row: usize, wound: &Wound) -> Result<(), &'static str> {
    let epoch = state.model().epoch();
    // A leg that is lost is in-sync until that is noted, and may come back as it is.
    let Some(written) = written(state) else {
        return Err("a leg is lost");
    };
    if !await_windows(state, &written).await {
        return Err("a leg has not cleaned up behind it");
    }
    let mut report = CheckReport::default();
    let compared = match wound {
        _ if defect::is(Defect::NotHealed) => Ok(()),
        Wound::Bytes(place) => make_alike(state, (place.offset, place.len), &mut report).await,
        Wound::Together { runs, .. } => make_alike_together(state, runs, &mut report).await,
    };
    if let Err(cause) = &compared {
        tracing::warn!(volume = %state.name, %cause, "what a guest left is not alike yet");
    }
    let is_alike = report.pages_repaired >= report.pages_differing;
    let is_same = |all: Vec<Party>| {
        let mut both = all.iter().zip(&written);
        let is_one = |(one, other): (&Party, &Party)| Rc::ptr_eq(&one.control, &other.control);
        all.len() == written.len() && both.all(is_one)
    };
    let are_all_here = self::written(state).is_some_and(is_same);
    if compared.is_err() || !is_alike {
        return Err("its pages differ, and cannot be made alike");
    }
    if !are_all_here || state.model().epoch() != epoch {
        return Err("legs came or went meanwhile");
    }
    let differed = report.pages_differing > 0;
    match (state.hub.guests.get(), wound) {
        (Some(guests), Wound::Bytes(place)) => {
            match end_claim(state, guests, (row, *place), differed).await {
                true => Ok(()),
                false => Err("what it claimed for a copy that follows has no end yet"),
            }
        }
        (Some(_), Wound::Together { .. }) => {
            // Nothing of it is claimed.
            if differed {
                follow::end(state, COLUMN, REPAIRED);
            }
            Ok(())
        }
        (None, _) => Ok(()),
    }
}

/// Page by page.
async fn make_alike(
    state: &State,
    (offset, len): (u64, u64),
    report: &mut CheckReport,
) -> Result<(), String> {
    let page = PAGE_BYTES as u64;
    let start = offset / page * page;
    // What a dead guest said may be anything.
    let end = (offset + len).next_multiple_of(page).min(bytes(state));
    let len = end.saturating_sub(start);
    let (start, len) = match defect::is(Defect::HealedInPart) {
        true => (start + page.min(len), len.saturating_sub(page)),
        false => (start, len),
    };
    compare_chunk(state, COLUMN, (start, len), Right::Last, report).await
}

/// All pages or none, from the last leg that has all of them. Where each lacks one, or a slot is
/// damaged where they are copied to, they cannot be copied as one.
async fn make_alike_together(
    state: &State,
    runs: &[Run],
    report: &mut CheckReport,
) -> Result<(), String> {
    let page = PAGE_BYTES as u64;
    let end = bytes(state) / page;
    let pages = runs
        .iter()
        .flat_map(|run| run.page.0..run.page.0 + run.count);
    let within = pages.filter(|&page| page < end);
    // What a dead guest said may be anything.
    let offsets: BTreeSet<u64> = within.map(|at| at * page).collect();
    let legs = state.model().columns[COLUMN].sources();
    let all = parties(state, COLUMN, legs).unwrap_or_default();
    if all.is_empty() {
        return Err("no leg is in-sync".into());
    }
    let (mut differing, mut damaged) = (0, Mask::default());
    for &offset in &offsets {
        let (found, differs) = compare_page(state, COLUMN, &all, offset).await?;
        differing += u64::from(differs);
        damaged = damaged.or(found);
    }
    if differing == 0 && damaged.is_empty() {
        return Ok(());
    }
    // What becomes of them page by page counts anew.
    report.pages_differing += differing;
    report.pages_repaired += differing;
    if let Some(from) = all.iter().rposition(|party| !damaged.has(party.leg)) {
        let mut others = all;
        let from = others.remove(from);
        match copy_together(state, &from, &others, &offsets).await {
            Ok(()) => return Ok(()),
            Err(failure) if failure.is_damage() => {}
            Err(CopyError { leg, error }) => {
                lost_if_gone(state, COLUMN, leg, &error);
                return Err(error.to_string());
            }
        }
    }
    for offset in offsets {
        make_alike(state, (offset, page), report).await?;
    }
    Ok(())
}

/// As one transaction.
async fn copy_together(
    state: &State,
    from: &Party,
    to: &[Party],
    offsets: &BTreeSet<u64>,
) -> Result<(), CopyError> {
    let mut parts = Vec::new();
    for &offset in offsets {
        parts.push(copy::read_page(state, from, offset).await?);
    }
    copy::transact(state, to, &parts).await
}

fn bytes(state: &State) -> u64 {
    state.model().columns[COLUMN].bytes
}

/// Ends what a dead guest had claimed in the ring. False: it has to be tried again.
async fn end_claim(
    state: &State,
    guests: &Guests,
    (row, place): (usize, Place),
    differed: bool,
) -> bool {
    let ring = guests.segment.ring();
    match ring.left_by(guests.segment.row(row)) {
        Left::Nothing if differed => {
            // It got what the others have no more, or was not told.
            follow::end(state, COLUMN, REPAIRED);
            true
        }
        Left::Nothing => true,
        Left::Unknown => {
            ring.spoil();
            follow::end(state, COLUMN, "a guest died before it said what it changes");
            ring.void_unclaimed(&guests.segment, |row| guests.is_dead(row))
        }
        Left::Claim(first) => {
            let Some(left) = read_left(state, first, place).await else {
                return false;
            };
            let is_known = record_len(place.offset, place.len) == place.len && place.len > 0;
            if !is_known || ring.is_named_behind(&guests.segment, &left) {
                ring.spoil();
                follow::end(
                    state,
                    COLUMN,
                    "a guest died, and others wrote over its pages",
                );
            }
            // The task that sends is polled behind this.
            let _ = ring.fill(first, left.offset, &left.data);
            state.act();
            true
        }
    }
}

/// What the legs hold where a guest died, as it would have said it.
async fn read_left(state: &State, first: u64, place: Place) -> Option<Entry> {
    let len = record_len(place.offset, place.len);
    let (leg, control) = {
        let model = state.model();
        let column = &model.columns[COLUMN];
        let leg = column.sources().legs().next()?;
        (leg, column.legs[leg].control.clone()?)
    };
    let (offset, wanted) = (place.offset, len as u32);
    let request = SliceRequest::Read {
        offset,
        len: wanted,
    };
    match control.ask(state, request).await {
        Ok(SliceReply::Data(data)) if data.len() as u64 == len => Some(Entry {
            place: first,
            places: places_of(offset, len).max(1),
            offset,
            data: data.into(),
        }),
        Ok(_) => None,
        Err(error) => {
            lost_if_gone(state, COLUMN, leg, &error);
            None
        }
    }
}

/// All legs that are written; none if one is not in reach.
fn written(state: &State) -> Option<Vec<Party>> {
    let is_written = {
        let model = state.model();
        let legs = &model.columns[COLUMN].legs;
        Mask::where_leg(|leg| legs.get(leg).is_some_and(LegKeep::is_written))
    };
    parties(state, COLUMN, is_written)
}

/// The barrier: behind it each brick has cleaned up behind who died before.
async fn await_windows(state: &State, written: &[Party]) -> bool {
    let (epoch, round) = {
        let model = state.model();
        (model.epoch(), model.columns[COLUMN].told_round())
    };
    // It may be so new that no leg has heard of it.
    state.hub.hold_epoch(epoch);
    let asked = written.iter().map(|party| {
        let raise = SliceRequest::RaiseEpoch { epoch, round };
        (party, party.control.start(state, raise))
    });
    let asked: Vec<_> = asked.collect();
    let mut all = true;
    for (party, tag) in asked {
        if let Err(error) = party.control.answer(state, tag).await {
            lost_if_gone(state, COLUMN, party.leg, &error);
            all = false;
        }
    }
    all
}
