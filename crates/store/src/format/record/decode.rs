//! Decoding of entries, and the correction of an entry with one flipped bit.
//!
//! Invariant: any bytes decode to an entry of the very address or to an error.

use super::encode::RecordAddress;
use super::layout::{
    BYTES_BEFORE_KIND, COUNT_BITS, FIRST_AT, FRAME_MASK, GROUP_CONTINUES, KIND_ADOPTION,
    KIND_KEPT_BIRTH, KIND_MAP, KIND_OBJECT, KIND_OLDER_PATCH, KIND_PAD, KIND_PATCH,
    KIND_SUMMED_MAP, NEW_AT, OBJECT_LINES, Words, change_at, is_patch_head, page_count,
};
use super::patch::patch_lines;
use super::{
    Change, GroupPosition, InvalidRecord, JournalEntry, LEVELS_MAX, Line, ObjectRecord, PAGES_MAX,
    Record, lines,
};
use crate::format::slot::{DamagedSlot, Slot};
use crate::format::table::reach;
use pagemesh_base::bytes::{field, get_u32, get_u64};
use pagemesh_base::checksum::{PageChecksums, flipped_bit};
use pagemesh_base::ids::{Epoch, ObjectId, PageNo, Seq};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::copy::crc32c_lines;

impl Record {
    /// Decodes the record at the start of `journal` into `self`. Any bytes may follow it.
    ///
    /// # Errors
    /// When there is none, it is torn, or it belongs to another address. The content of
    /// `self` is then undefined.
    pub fn decode_from(
        &mut self,
        journal: &[Line],
        address: &RecordAddress,
    ) -> Result<(), InvalidRecord> {
        let head = journal.first().ok_or(InvalidRecord::Malformed)?;
        if is_patch_head(head) {
            self.decode_patch(head, address)?;
            let body = journal.get(1..claimed_lines(head));
            return self
                .decode_patch_bytes(body.ok_or(InvalidRecord::Malformed)?, get_u64(head, NEW_AT));
        }
        let [.., kind, packed_level, low, high] = get_u64(head, 0).to_le_bytes();
        let packed = u16::from_le_bytes([low, high]);
        let (level, count) = (packed_level & !GROUP_CONTINUES, page_count(packed));
        let is_map = matches!(
            kind,
            KIND_MAP | KIND_SUMMED_MAP | KIND_KEPT_BIRTH | KIND_ADOPTION
        );
        if !is_map
            || level > LEVELS_MAX
            || kind == KIND_ADOPTION && level > 1
            || !(1..=PAGES_MAX).contains(&count)
        {
            return Err(InvalidRecord::Malformed);
        }
        let record = journal.get(..claimed_lines(head));
        let record = record.ok_or(InvalidRecord::Malformed)?;
        if address.checksum(record) != get_u32(head, 0) {
            return Err(InvalidRecord::Checksum);
        }
        self.has_second_sum = matches!(kind, KIND_SUMMED_MAP | KIND_KEPT_BIRTH);
        self.is_adoption = kind == KIND_ADOPTION;
        self.changes.clear();
        self.changes
            .push(get_change(head, FIRST_AT, self.has_second_sum)?);
        for index in 1..count {
            let (line, at) = change_at(index);
            self.changes
                .push(get_change(&record[line], at, self.has_second_sum)?);
        }
        self.patch.clear();
        self.group_position = GroupPosition {
            lines_before: (packed >> COUNT_BITS) as u8,
            is_continued: packed_level != level,
        };
        self.decode_head_fields(head, level)?;
        if kind == KIND_KEPT_BIRTH {
            self.kept_birth = Some(Epoch(std::mem::take(&mut self.open)));
        }
        Ok(())
    }

    /// As [`Record::decode_from`], from the head alone, for a record of one line or a patch. A
    /// decoded patch lacks its bytes.
    ///
    /// # Errors
    /// As [`Record::decode_from`], and when the record has other lines.
    pub fn decode_head(
        &mut self,
        head: &Line,
        address: &RecordAddress,
    ) -> Result<(), InvalidRecord> {
        match is_patch_head(head) {
            true => self.decode_patch(head, address),
            false => self.decode_from(std::slice::from_ref(head), address),
        }
    }

    /// Decodes the fields of a head; the changes are already decoded.
    pub(super) fn decode_head_fields(
        &mut self,
        head: &Line,
        level: u8,
    ) -> Result<(), InvalidRecord> {
        let head: Words = std::array::from_fn(|i| get_u64(head, i * 8));
        self.seq = Seq(head[1]);
        self.object = ObjectId(head[2] as u32);
        self.epoch = Epoch((head[2] >> 32) as u32);
        self.level = level;
        self.page = PageNo(head[3]);
        self.op = head[7];
        self.open = (head[6] >> 32) as u32;
        self.kept_birth = None;
        let end = self.page.0.saturating_add(self.changes.len() as u64);
        match end <= reach(LEVELS_MAX) {
            true => Ok(()),
            false => Err(InvalidRecord::Malformed),
        }
    }
}

impl ObjectRecord {
    pub(super) fn decode(
        journal: &[Line],
        address: &RecordAddress,
    ) -> Result<ObjectRecord, InvalidRecord> {
        let record = journal
            .get(..OBJECT_LINES)
            .ok_or(InvalidRecord::Malformed)?;
        if address.checksum(record) != get_u32(&record[0], 0) {
            return Err(InvalidRecord::Checksum);
        }
        Ok(ObjectRecord {
            seq: Seq(get_u64(&record[0], 8)),
            object: ObjectId(get_u32(&record[0], 16)),
            entry: Box::new(field(record.as_flattened(), LINE_BYTES)),
        })
    }
}

impl JournalEntry {
    /// Decodes the entry at the start of `journal`. Any bytes may follow it.
    ///
    /// # Errors
    /// When there is none, it is torn, or it belongs to another address.
    pub fn decode(
        journal: &[Line],
        address: &RecordAddress,
    ) -> Result<JournalEntry, InvalidRecord> {
        let head = journal.first().ok_or(InvalidRecord::Malformed)?;
        if head[4] == KIND_OBJECT {
            return ObjectRecord::decode(journal, address).map(JournalEntry::Object);
        }
        let mut record = Record::empty();
        record.decode_from(journal, address)?;
        Ok(JournalEntry::Map(record))
    }

    /// The entry at the start of `journal`, if one flipped bit is its only defect.
    #[must_use]
    pub fn correct(journal: &[Line], address: &RecordAddress) -> Option<JournalEntry> {
        let mut copy = journal.get(..journal.len().min(lines(PAGES_MAX)))?.to_vec();
        let head = copy.first()?;
        let claimed = claimed_lines(head);
        let is_patch = is_patch_head(head);
        let covered = if is_patch { 1 } else { claimed };
        let found = address.checksum(copy.get(..covered).unwrap_or_default());
        let is_body = is_patch && found == get_u32(head, 0);
        // The lines that the wrong sum covers.
        let (first, end, found, expected) = match (is_patch, is_body) {
            (true, true) => {
                let found = crc32c_lines(0, copy.get(1..claimed)?);
                let expected = get_u64(head, NEW_AT) & FRAME_MASK;
                (1, claimed, found, expected as u32)
            }
            _ => (0, covered, found, get_u32(head, 0)),
        };
        if end <= copy.len() {
            let bit = flipped_bit((end - first) * LINE_BYTES, found, expected);
            // The first word holds the length of the entry, so its bits are tried one by one below.
            if let Some(bit) = bit.filter(|&bit| is_body || bit >= 64) {
                copy[first + bit / (LINE_BYTES * 8)][bit / 8 % LINE_BYTES] ^= 1 << (bit % 8);
                return JournalEntry::decode(&copy, address).ok();
            }
        }
        (0..64).find_map(|bit| {
            copy[0][bit / 8] ^= 1 << (bit % 8);
            let entry = JournalEntry::decode(&copy, address).ok();
            copy[0][bit / 8] ^= 1 << (bit % 8);
            entry
        })
    }
}

fn get_change(line: &Line, at: usize, is_summed: bool) -> Result<Change, DamagedSlot> {
    let (old, new) = (get_u64(line, at), get_u64(line, at + 8));
    let crc = get_u32(line, at + 16);
    Ok(match is_summed {
        true => Change {
            old: Slot::decode_unchecked(old)?,
            new: Slot::decode_unchecked(new)?,
            sums: PageChecksums {
                crc,
                words: u16::from_le_bytes([line[at + 7], line[at + 15]]),
            },
        },
        false => Change {
            old: Slot::decode(old)?,
            new: Slot::decode(new)?,
            sums: PageChecksums { crc, words: 0 },
        },
    })
}

/// Lines of the entry that starts with `line`, as the line claims. The entry is not checked yet.
#[must_use]
pub fn claimed_lines(line: &Line) -> usize {
    let [.., kind, _, low, high] = get_u64(line, 0).to_le_bytes();
    let packed = u16::from_le_bytes([low, high]);
    match (kind, page_count(packed), usize::from(packed)) {
        (KIND_MAP | KIND_SUMMED_MAP | KIND_KEPT_BIRTH | KIND_ADOPTION, count, _)
            if count <= PAGES_MAX =>
        {
            lines(count)
        }
        (KIND_PATCH, _, bytes) if bytes < PAGE_BYTES => patch_lines(bytes),
        (KIND_OBJECT, ..) => OBJECT_LINES,
        _ => 1,
    }
}

/// Whether a patch of an older build starts `journal`. This build does not read such patches.
#[must_use]
pub fn is_older_patch(journal: &[Line], address: &RecordAddress) -> bool {
    let Some(head) = journal
        .first()
        .filter(|head| head[BYTES_BEFORE_KIND] == KIND_OLDER_PATCH)
    else {
        return false;
    };
    let [.., low, high] = get_u64(head, 0).to_le_bytes();
    let bytes = usize::from(u16::from_le_bytes([low, high]));
    let record = journal.get(..patch_lines(bytes));
    record.is_some_and(|record| address.checksum(record) == get_u32(head, 0))
}

/// Whether `line` is the pad of `address`.
#[must_use]
pub fn is_pad(line: &Line, address: &RecordAddress) -> bool {
    line[4] == KIND_PAD && address.checksum(std::slice::from_ref(line)) == get_u32(line, 0)
}

/// Whether `line` is the pad of `address` with one flipped bit.
#[must_use]
pub fn is_damaged_pad(line: &Line, address: &RecordAddress) -> bool {
    (0..LINE_BYTES * 8).any(|bit| {
        let mut line = *line;
        line[bit / 8] ^= 1 << (bit % 8);
        is_pad(&line, address)
    })
}
