//! Bodies of requests that have several parts; the table of [`request`](super::request) shows them.

use super::EDIT_BYTES;
use super::fields::FieldReader;
use super::request::Control;
use super::{BIRTH_BYTES, Header, ID_BYTES, MalformedMessage, PART_BYTES};
use bytes::Bytes;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{
    COPY_PAGES_MAX, CloneSource, SliceRequest, Stamp, TransactionPart, VERSION_EDITS_MAX,
    VersionEdit, VersionEdits,
};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::PAGE_BYTES;
use uuid::Uuid;

pub(super) fn encode_dropped(slice: SliceId, snapshots: &[Epoch]) -> Bytes {
    let mut body = slice.0.as_bytes().to_vec();
    for snapshot in snapshots {
        body.extend_from_slice(&snapshot.0.to_le_bytes());
    }
    body.into()
}

/// A slice and a list of epochs.
pub(super) fn decode_epochs(
    header: &Header,
    body: &Bytes,
) -> Result<(SliceId, Vec<Epoch>), MalformedMessage> {
    let cut = || header.malformed("the snapshots of a request do not fill its body");
    let (slice, rest) = body.split_first_chunk::<ID_BYTES>().ok_or_else(cut)?;
    let (words, left) = rest.as_chunks();
    if !left.is_empty() || words.is_empty() || words.len() as u64 != header.len {
        return Err(cut());
    }
    let snapshots = words.iter().map(|it| Epoch(u32::from_le_bytes(*it)));
    Ok((SliceId(Uuid::from_bytes(*slice)), snapshots.collect()))
}

pub(super) fn encode_edits(slice: SliceId, edits: &VersionEdits) -> Bytes {
    let mut body = slice.0.as_bytes().to_vec();
    body.extend_from_slice(&edits.data);
    for edit in &edits.edits {
        body.extend_from_slice(&edit.page.0.to_le_bytes());
        body.extend_from_slice(&edit.birth.0.to_le_bytes());
        for death in [edit.from, edit.to] {
            body.extend_from_slice(&death.map_or(0, |it| it.0).to_le_bytes());
        }
        body.extend_from_slice(&edit.sum.to_le_bytes());
    }
    body.into()
}

/// Edits of versions. Their pages are not copied from the body.
pub(super) fn decode_edits(header: &Header, mut body: Bytes) -> Result<Control, MalformedMessage> {
    let cut = || header.malformed("the edits of versions do not fill their body");
    let count = usize::try_from(header.len).unwrap_or(usize::MAX);
    if !(1..=VERSION_EDITS_MAX).contains(&count) || body.len() < ID_BYTES {
        return Err(cut());
    }
    let slice = Uuid::from_slice(&body.split_to(ID_BYTES)).map_err(|_| cut())?;
    let at = body.len().checked_sub(count * EDIT_BYTES).ok_or_else(cut)?;
    let table = body.split_off(at);
    let fields = FieldReader::new(&table);
    let edits = fields.list(version_edit).ok_or_else(cut)?;
    let added = edits.iter().filter(|edit| edit.from.is_none()).count();
    if body.len() != added * PAGE_BYTES {
        return Err(cut());
    }
    let below = Epoch(header.epoch);
    let slice = SliceId(slice);
    let data = body;
    let edits = VersionEdits { below, edits, data };
    Ok(Control::EditVersions { slice, edits })
}

fn version_edit(fields: &mut FieldReader<'_>) -> Option<VersionEdit> {
    Some(VersionEdit {
        page: PageNo(fields.u64()?),
        birth: Epoch(fields.u32()?),
        from: Some(Epoch(fields.u32()?)).filter(|it| it.0 > 0),
        to: Some(Epoch(fields.u32()?)).filter(|it| it.0 > 0),
        sum: fields.u32()?,
    })
}

pub(super) fn decode_clone(header: &Header, body: &Bytes) -> Result<Control, MalformedMessage> {
    let (ids, left) = body.as_chunks::<ID_BYTES>();
    let ([slice, origin], []) = (ids, left) else {
        return Err(header.malformed("a clone does not name two slices"));
    };
    Ok(Control::CreateClone {
        slice: SliceId(Uuid::from_bytes(*slice)),
        source: CloneSource {
            origin: SliceId(Uuid::from_bytes(*origin)),
            snapshot: Epoch(header.epoch),
        },
        size_bytes: header.len,
    })
}

const PART_WRITE: u32 = 1;
const PART_CLEAR: u32 = 2;

pub(super) fn encode_parts(parts: &[TransactionPart]) -> Bytes {
    let mut body = Vec::new();
    for part in parts {
        if let TransactionPart::Write { data, .. } = part {
            body.extend_from_slice(data);
        }
    }
    for part in parts {
        let what = match part {
            TransactionPart::Write { .. } => PART_WRITE,
            TransactionPart::Clear { .. } => PART_CLEAR,
        };
        body.extend_from_slice(&part.offset().to_le_bytes());
        let len = u32::try_from(part.len()).unwrap_or(u32::MAX);
        body.extend_from_slice(&len.to_le_bytes());
        body.extend_from_slice(&what.to_le_bytes());
    }
    body.into()
}

/// The parts of a transaction. Their data is not copied.
pub(super) fn decode_parts(
    header: &Header,
    mut body: Bytes,
) -> Result<Vec<TransactionPart>, MalformedMessage> {
    let count = usize::try_from(header.len).unwrap_or(usize::MAX);
    if !(1..=TRANSACTION_PAGES_MAX as usize).contains(&count) {
        return Err(header.malformed("a number of parts beyond limits"));
    }
    let cut = || header.malformed("the parts of a transaction do not fill its body");
    let at = body.len().checked_sub(count * PART_BYTES).ok_or_else(cut)?;
    let table = body.split_off(at);
    let mut fields = FieldReader::new(&table);
    let mut parts = Vec::with_capacity(count);
    for _ in 0..count {
        let told = (fields.u64(), fields.u32(), fields.u32());
        let (Some(offset), Some(len), Some(what)) = told else {
            return Err(cut());
        };
        parts.push(match what {
            PART_WRITE if len as usize <= body.len() => TransactionPart::Write {
                offset,
                data: body.split_to(len as usize),
            },
            PART_WRITE => return Err(cut()),
            PART_CLEAR => TransactionPart::Clear {
                offset,
                len: u64::from(len),
            },
            _ => return Err(header.malformed("a part that neither writes nor clears")),
        });
    }
    match body.is_empty() {
        true => Ok(parts),
        false => Err(cut()),
    }
}

pub(super) fn encode_copy(births: &[Epoch], data: &Bytes) -> Bytes {
    let mut body = Vec::with_capacity(data.len() + births.len() * BIRTH_BYTES);
    body.extend_from_slice(data);
    for birth in births {
        body.extend_from_slice(&birth.0.to_le_bytes());
    }
    body.into()
}

/// A copy. Its pages are not copied from the body.
pub(super) fn decode_copy(
    header: &Header,
    mut body: Bytes,
    stamp: Stamp,
) -> Result<SliceRequest, MalformedMessage> {
    let count = usize::try_from(header.len).unwrap_or(usize::MAX);
    if !(1..=COPY_PAGES_MAX).contains(&count) {
        return Err(header.malformed("a number of pages beyond limits"));
    }
    let cut = || header.malformed("the pages and births of a copy do not fill its body");
    let at = body
        .len()
        .checked_sub(count * BIRTH_BYTES)
        .ok_or_else(cut)?;
    let births = body.split_off(at);
    if at != 0 && at != count * PAGE_BYTES {
        return Err(cut());
    }
    let births = births.as_chunks().0.iter();
    Ok(SliceRequest::Copy {
        page: PageNo(header.offset),
        births: births.map(|it| Epoch(u32::from_le_bytes(*it))).collect(),
        data: body,
        stamp,
    })
}
