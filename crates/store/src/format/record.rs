//! A journal record: one commit of one session. A single page takes one cache line. The writer
//! encodes the record first and streams the data. Then it adds the checksums of the data and the
//! record's own ([`add_checksum`]).
//!
//! A record certifies itself: its CRC is seeded with its address ([`RecordAddress`]). So a record
//! of another pool, journal, lap or incarnation never decodes, and user bytes that look like a
//! record do not either.
//!
//! Records that count only together are a group. They follow each other in one journal, under one
//! seq. Each has its [`GroupPosition`]; the reader of the journal checks that the others are there.

use crate::format::geometry::OBJECT_BYTES;
use crate::format::slot::{DamagedSlot, FRAMES_MAX, Slot};
use crate::format::table::reach;
use pagemesh_base::bytes::{field, get_u32, get_u64, put};
use pagemesh_base::checksum::{PageChecksums, crc32c, flipped_bit};
use pagemesh_base::ids::{Epoch, Incarnation, ObjectId, PageNo, Seq};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::Media;
use pagemesh_pmem::copy::{crc32c_lines, crc32c_words};
use uuid::Uuid;

/// Pages in one record: the slots of one page-table node.
pub const PAGES_MAX: usize = 512;
/// Levels of a page table: four of 512 slots reach 2^36 pages.
pub const LEVELS_MAX: u8 = 4;

/// Lines of the longest group: as many as the head's bits for them can count.
pub const GROUP_LINES_MAX: usize = 64;
const _: () = assert!(GROUP_LINES_MAX == 1 << (16 - COUNT_BITS));
// A page takes one line at most.
const _: () = assert!(TRANSACTION_PAGES_MAX <= GROUP_LINES_MAX as u64);

/// Bits of the count in a head's half word; the bits above hold the lines before.
const COUNT_BITS: u32 = 10;
/// Bit in a head's byte for the level: the group continues after the record.
const GROUP_CONTINUES: u8 = 1 << 7;

const KIND_MAP: u8 = 1;
const KIND_OBJECT: u8 = 2;
const KIND_PAD: u8 = 3;
/// A map with second sums of its data. Its slots have no check bits: their places hold the sum, the
/// lower byte in the old slot.
const KIND_SUMMED_MAP: u8 = 4;
/// A patch by a build in which heads had no sum of their own: its sum covers all of its lines.
const KIND_OLDER_PATCH: u8 = 5;
/// A map of one page that is changed in place: the bytes are in the lines after the head. The count
/// is that of the bytes. The place of the second sum holds the offset of the first byte in the
/// page. The frame of the new slot is that of the old one, and its place holds the sum of these
/// lines. The record's own sum covers the head alone, so a reader that does not need the bytes does
/// not read them.
const KIND_PATCH: u8 = 6;
/// The byte of those lines in the place of the kind. It is no kind, and no single flipped bit makes
/// it one. So user bytes are never decoded as a record.
const KIND_BYTES: u8 = 0xf0;
/// Bytes of a page in such a line.
pub(crate) const PATCH_LINE_BYTES: usize = LINE_BYTES - 1;
/// Bytes of the line before the kind.
const BYTES_BEFORE_KIND: usize = 4;
/// Lines of an object record: its head, and the entry.
const OBJECT_LINES: usize = 1 + OBJECT_BYTES as usize / LINE_BYTES;
/// The byte of the first change in a head, and that of its checksum, which `open` follows.
const FIRST_AT: usize = 32;
const DATA_CRC_AT: usize = 48;
/// The bit of the kind in a head's first word.
const KIND_SHIFT: u32 = 32;
/// The bit of the second sum's byte in a slot's word.
const SUM_SHIFT: u32 = 56;
/// The frame in a slot's word.
const FRAME_MASK: u64 = FRAMES_MAX - 1;
/// The byte of the first change's new slot in a head.
const NEW_AT: usize = FIRST_AT + 8;
const ENTRY_BYTES: usize = 20;
const ENTRIES_PER_LINE: usize = LINE_BYTES / ENTRY_BYTES;

type Line = [u8; LINE_BYTES];

/// The address of a record: the seed of its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordAddress {
    /// CRC32C of pool, incarnation and journal: the part that is constant while a journal is in
    /// use.
    seed: u32,
    /// The journal's number.
    pub journal: u32,
    /// Lines written to the journal since the pool was made; never wraps.
    pub position: u64,
}

/// A change of one page's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The slot before.
    pub old: Slot,
    /// The slot after.
    pub new: Slot,
    /// The sums of the frame that `new` names; zeroes where it names none. The second sum is set
    /// only if the record has second sums.
    pub sums: PageChecksums,
}

/// Bytes of a part of a page, to be written in place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Patch {
    /// The offset of the first byte in the page.
    pub within: usize,
    /// The number of bytes, less than a page. 0 if the record is no patch.
    pub len: usize,
    /// The bytes; empty if only the head was read.
    pub bytes: Vec<u8>,
}

impl Patch {
    /// Copies the bytes.
    pub(crate) fn set(&mut self, within: usize, bytes: &[u8]) {
        self.within = within;
        self.len = bytes.len();
        self.bytes.clear();
        self.bytes.extend_from_slice(bytes);
        // The bytes' owner may change them meanwhile, so they are copied once and not read again.
        std::hint::black_box(&mut self.bytes);
    }

    /// Makes the record no patch.
    pub(crate) fn clear(&mut self) {
        self.len = 0;
        self.bytes.clear();
    }

    /// Whether the patch is within one page.
    fn is_within_page(&self) -> bool {
        self.len < PAGE_BYTES && self.within + self.len <= PAGE_BYTES
    }

    /// Appends the lines after the head to `into`, and returns their sum.
    pub(crate) fn encode(&self, into: &mut Vec<Line>) -> u32 {
        let start = into.len();
        let (chunks, rest) = self.bytes.as_chunks();
        into.extend(chunks.iter().map(bytes_line));
        if !rest.is_empty() {
            let mut chunk = [0; PATCH_LINE_BYTES];
            chunk[..rest.len()].copy_from_slice(rest);
            into.push(bytes_line(&chunk));
        }
        crc32c_lines(0, &into[start..])
    }
}

/// The sums of no page.
pub const NO_SUMS: PageChecksums = PageChecksums { crc: 0, words: 0 };

/// The position of a record in its group. The default is a single record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupPosition {
    /// Lines of the group before the record; below [`GROUP_LINES_MAX`].
    pub lines_before: u8,
    /// Whether another record of the group follows.
    pub is_continued: bool,
}

/// Slots of consecutive pages, swapped as one: a write, a discard, or a
/// page-table node linked or unlinked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Order in the pool.
    pub seq: Seq,
    /// The object of the pages.
    pub object: ObjectId,
    /// The object's epoch when the operation was admitted.
    pub epoch: Epoch,
    /// 0 for data pages, above for nodes of that level.
    pub level: u8,
    /// The first page; for a node, the first page below it.
    pub page: PageNo,
    /// The client's operation number.
    pub op: u64,
    /// `op` minus the session's oldest operation that may be incomplete on another leg.
    pub open: u32,
    /// Its position in a group of records.
    pub group_position: GroupPosition,
    /// Whether changes have a second sum. One sum cannot tell a flipped bit from data that was
    /// never written.
    pub has_second_sum: bool,
    /// One to [`PAGES_MAX`] pages, in order.
    pub changes: Vec<Change>,
    /// The new bytes of a record that changes one page in place. Both slots name the same frame,
    /// and the CRC32C is that of the whole page afterwards. Such a record is alone and has no
    /// second sum, because it carries all data that it needs.
    pub patch: Patch,
}

/// An entry of the object table replaced as a whole, except for its root slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectRecord {
    /// Order in the pool.
    pub seq: Seq,
    /// The number of the entry.
    pub object: ObjectId,
    /// The entry as it is afterwards.
    pub entry: [u8; OBJECT_BYTES as usize],
}

/// An entry of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalEntry {
    /// Slots swapped.
    Map(Record),
    /// An object created, resized, fenced or deleted.
    Object(ObjectRecord),
}

/// Why bytes are not a record. After a crash such bytes end a journal, unless a later record proves
/// that they were fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRecord {
    /// Too few bytes for the count, or a count, kind or level out of range.
    #[error("no record starts here")]
    Malformed,
    /// Torn, stale, or of another address.
    #[error("the record's checksum does not match its address")]
    Checksum,
    /// The record is valid, but does not belong to the group at its address.
    #[error("the record there belongs to another group")]
    Misplaced,
    /// The checksum is right but a slot is not: a defect of the writer.
    #[error("the record's checksum is right, but {0}")]
    Slot(#[from] DamagedSlot),
}

/// Lines that a record of `pages` pages takes.
#[must_use]
pub fn lines(pages: usize) -> usize {
    1 + pages.saturating_sub(1).div_ceil(ENTRIES_PER_LINE)
}

/// Lines that a patch of `bytes` bytes takes.
#[must_use]
pub fn patch_lines(bytes: usize) -> usize {
    1 + bytes.div_ceil(PATCH_LINE_BYTES)
}

impl RecordAddress {
    /// The address of a line of a journal, in one opening of a pool.
    #[must_use]
    pub fn new(pool: Uuid, incarnation: Incarnation, journal: u32, position: u64) -> RecordAddress {
        let mut bytes = [0; 24];
        put(&mut bytes, 0, *pool.as_bytes());
        put(&mut bytes, 16, incarnation.0.to_le_bytes());
        put(&mut bytes, 20, journal.to_le_bytes());
        RecordAddress {
            seed: crc32c(&bytes),
            journal,
            position,
        }
    }

    /// Another line of the same journal.
    #[must_use]
    pub fn at(self, position: u64) -> RecordAddress {
        RecordAddress { position, ..self }
    }

    /// The CRC32C of pool, incarnation, journal and position, then of the record with its own first
    /// four bytes as zeroes. Of a patch it covers only the head.
    fn checksum(&self, record: &[Line]) -> u32 {
        let Some((head, rest)) = record.split_first() else {
            return self.seed;
        };
        let rest = if is_patch_head(head) { &[] } else { rest };
        let first = get_u64(head, 0) & !u64::from(u32::MAX);
        let mut crc = crc32c_words(
            self.seed,
            &[self.position.to_le_bytes(), first.to_le_bytes()],
        );
        if let Some(others) = head.as_chunks().0.last_chunk::<7>() {
            crc = crc32c_words(crc, others);
        }
        match rest {
            [] => crc,
            rest => crc32c_lines(crc, rest),
        }
    }
}

/// A head as words.
type Words = [u64; 8];

fn to_line(words: &Words) -> Line {
    let mut line = [0; LINE_BYTES];
    for (bytes, word) in line.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    line
}

/// A line of the bytes of a patch.
fn bytes_line(bytes: &[u8; PATCH_LINE_BYTES]) -> Line {
    // By words, as the line is streamed: see `Session::encode_record`.
    let first = get_u64(bytes, 0);
    let low = first & u64::from(u32::MAX);
    let high = (first << 8) & !(u64::MAX >> 24);
    to_line(&std::array::from_fn(|i| match i {
        0 => low | u64::from(KIND_BYTES) << KIND_SHIFT | high,
        _ => get_u64(bytes, i * 8 - 1),
    }))
}

/// Whether a line has the kind of a patch's head; the line may be damaged.
fn is_patch_head(line: &Line) -> bool {
    line[BYTES_BEFORE_KIND] == KIND_PATCH
}

/// Adds the checksum of an encoded record for this address. If the lines of a patch follow its
/// head, adds their sum as well.
pub fn add_checksum(record: &mut [Line], place: &RecordAddress) {
    if let [head, body @ ..] = record
        && is_patch_head(head)
        && !body.is_empty()
    {
        let new = with_patch_sum(get_u64(head, NEW_AT), crc32c_lines(0, body));
        put(head, NEW_AT, new.to_le_bytes());
    }
    let crc = place.checksum(record);
    let first = get_u64(&record[0], 0) & !u64::from(u32::MAX);
    put(&mut record[0], 0, (first | u64::from(crc)).to_le_bytes());
}

/// Sets the sums of the data of change number `index` in an encoded record with second sums.
pub fn set_sums(record: &mut [Line], index: usize, sums: PageChecksums) {
    let (line, at) = change_at(index);
    // Whole words in their places, as the line is streamed: see `Session::encode_record`.
    if index == 0 {
        let open = get_u64(&record[0], DATA_CRC_AT) & !u64::from(u32::MAX);
        let word = open | u64::from(sums.crc);
        put(&mut record[0], DATA_CRC_AT, word.to_le_bytes());
    } else {
        put(&mut record[line], at + 16, sums.crc.to_le_bytes());
    }
    let slots = [at, at + 8].map(|at| get_u64(&record[line], at));
    let [old, new] = with_sum(slots, sums.words);
    put(&mut record[line], at, old.to_le_bytes());
    put(&mut record[line], at + 8, new.to_le_bytes());
}

/// The slots of a change with a sum in place of their check bits.
fn with_sum([old, new]: [u64; 2], sum: u16) -> [u64; 2] {
    let with = |slot, byte| slot & !(0xff << SUM_SHIFT) | u64::from(byte) << SUM_SHIFT;
    let [low, high] = sum.to_le_bytes();
    [with(old, low), with(new, high)]
}

/// The word of the new slot, with the sum of a patch's bytes in place of the frame.
fn with_patch_sum(new: u64, sum: u32) -> u64 {
    new & !FRAME_MASK | u64::from(sum)
}

/// Kind, level and count: the first word without its checksum.
fn first_word(kind: u8, level: u8, count: u16) -> u64 {
    u64::from(kind) << KIND_SHIFT | u64::from(level) << 40 | u64::from(count) << 48
}

fn pack_u32s(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// The line after which the journal continues at the start of its ring.
#[must_use]
pub fn encode_pad(place: &RecordAddress) -> Line {
    let mut line = [0; LINE_BYTES];
    put(&mut line, 0, first_word(KIND_PAD, 0, 0).to_le_bytes());
    add_checksum(std::slice::from_mut(&mut line), place);
    line
}

/// Whether `line` is the pad of `place`.
#[must_use]
pub fn is_pad(line: &Line, place: &RecordAddress) -> bool {
    line[4] == KIND_PAD && place.checksum(std::slice::from_ref(line)) == get_u32(line, 0)
}

/// Whether `line` is the pad of `place` with one flipped bit.
#[must_use]
pub fn is_damaged_pad(line: &Line, place: &RecordAddress) -> bool {
    (0..LINE_BYTES * 8).any(|bit| {
        let mut line = *line;
        line[bit / 8] ^= 1 << (bit % 8);
        is_pad(&line, place)
    })
}

/// Lines of the entry that starts with `line`, as the line claims. The entry is not checked yet.
#[must_use]
pub fn claimed_lines(line: &Line) -> usize {
    let [.., kind, _, low, high] = get_u64(line, 0).to_le_bytes();
    let packed = u16::from_le_bytes([low, high]);
    match (kind, page_count(packed), usize::from(packed)) {
        (KIND_MAP | KIND_SUMMED_MAP, count, _) if count <= PAGES_MAX => lines(count),
        (KIND_PATCH, _, bytes) if bytes < PAGE_BYTES => patch_lines(bytes),
        (KIND_OBJECT, ..) => OBJECT_LINES,
        _ => 1,
    }
}

/// Whether a patch of an older build starts `journal`. This build does not read such patches.
#[must_use]
pub fn is_older_patch(journal: &[Line], place: &RecordAddress) -> bool {
    let Some(head) = journal
        .first()
        .filter(|head| head[BYTES_BEFORE_KIND] == KIND_OLDER_PATCH)
    else {
        return false;
    };
    let [.., low, high] = get_u64(head, 0).to_le_bytes();
    let bytes = usize::from(u16::from_le_bytes([low, high]));
    let record = journal.get(..patch_lines(bytes));
    record.is_some_and(|record| place.checksum(record) == get_u32(head, 0))
}

/// The count of pages, from the half word that also has the lines before.
fn page_count(packed: u16) -> usize {
    usize::from(packed & ((1 << COUNT_BITS) - 1))
}

/// The location of change number `index`: line and byte.
fn change_at(index: usize) -> (usize, usize) {
    if index == 0 {
        return (0, FIRST_AT);
    }
    let entry = index - 1;
    let line = 1 + entry / ENTRIES_PER_LINE;
    (line, entry % ENTRIES_PER_LINE * ENTRY_BYTES)
}

impl Record {
    /// Whether some slot is the one that the record publishes. The first slot lies at byte `at`.
    pub(crate) fn is_published_at<M: Media>(&self, media: &M, at: usize) -> bool {
        let mut changes = (at..).step_by(8).zip(&self.changes);
        changes.any(|(at, change)| media.load(at) == change.new.encode())
    }

    /// Whether the record changes a page in place.
    #[must_use]
    pub fn is_patch(&self) -> bool {
        self.patch.len > 0
    }

    /// Lines of the record.
    #[must_use]
    pub fn lines(&self) -> usize {
        match self.is_patch() {
            true => patch_lines(self.patch.len),
            false => lines(self.changes.len()),
        }
    }

    /// Appends the record to `into`; [`add_checksum`] completes it.
    ///
    /// # Panics
    /// When it has no change, too many, or a level beyond the page table.
    pub fn encode(&self, into: &mut Vec<Line>) {
        if self.is_patch() {
            let start = into.len();
            into.push([0; LINE_BYTES]);
            let sum = self.patch.encode(into);
            into[start] = self.encode_patch(sum);
            return;
        }
        let count = self.changes.len();
        assert!(
            (1..=PAGES_MAX).contains(&count),
            "{count} pages in a record"
        );
        assert!(
            self.level <= LEVELS_MAX
                && usize::from(self.group_position.lines_before) < GROUP_LINES_MAX,
            "level {} of a page table, {:?}",
            self.level,
            self.group_position
        );
        into.push(self.head(self.encode_slots(&self.changes[0])));
        if count == 1 {
            return;
        }
        let start = into.len() - 1;
        into.resize(start + lines(count), [0; LINE_BYTES]);
        let record = &mut into[start..];
        for (index, change) in self.changes.iter().enumerate().skip(1) {
            let (line, at) = change_at(index);
            let [old, new] = self.encode_slots(change);
            put(&mut record[line], at, old.to_le_bytes());
            put(&mut record[line], at + 8, new.to_le_bytes());
            put(&mut record[line], at + 16, change.sums.crc.to_le_bytes());
        }
    }

    /// The head of a patch with this sum of its bytes; [`add_checksum`] completes it.
    ///
    /// # Panics
    /// When it is not a part of one page.
    pub(crate) fn encode_patch(&self, sum: u32) -> Line {
        let Record { patch, changes, .. } = self;
        assert!(
            changes.len() == 1 && self.level == 0 && patch.is_within_page(),
            "a part of one page"
        );
        let slots = [changes[0].old.encode(), changes[0].new.encode()];
        let [old, new] = with_sum(slots, patch.within as u16);
        self.head([old, with_patch_sum(new, sum)])
    }

    /// The head, with the encoded slots of the first change.
    fn head(&self, [old, new]: [u64; 2]) -> Line {
        to_line(&[
            self.first_word(),
            self.seq.0,
            pack_u32s(self.object.0, self.epoch.0),
            self.page.0,
            old,
            new,
            pack_u32s(self.changes[0].sums.crc, self.open),
            self.op,
        ])
    }

    /// The encoded slots of a change that is no patch.
    fn encode_slots(&self, change: &Change) -> [u64; 2] {
        let slots = [change.old.encode(), change.new.encode()];
        match self.has_second_sum {
            true => with_sum(slots, change.sums.words),
            false => slots,
        }
    }

    fn first_word(&self) -> u64 {
        if self.is_patch() {
            return first_word(KIND_PATCH, self.level, self.patch.len as u16);
        }
        let GroupPosition {
            lines_before,
            is_continued: goes_on,
        } = self.group_position;
        let level = self.level | if goes_on { GROUP_CONTINUES } else { 0 };
        let count = self.changes.len() as u16 | u16::from(lines_before) << COUNT_BITS;
        let kind = match self.has_second_sum {
            true => KIND_SUMMED_MAP,
            false => KIND_MAP,
        };
        first_word(kind, level, count)
    }

    /// A record without changes, to be decoded into.
    #[must_use]
    pub fn empty() -> Record {
        Record {
            seq: Seq(0),
            object: ObjectId(0),
            epoch: Epoch(0),
            level: 0,
            page: PageNo(0),
            op: 0,
            open: 0,
            group_position: GroupPosition::default(),
            has_second_sum: false,
            changes: Vec::new(),
            patch: Patch::default(),
        }
    }

    /// Decodes the record at the start of `journal` into `self`. Any bytes may follow it.
    ///
    /// # Errors
    /// When there is none, it is torn, or it belongs to another address. The content of
    /// `self` is then undefined.
    pub fn decode_from(
        &mut self,
        journal: &[Line],
        place: &RecordAddress,
    ) -> Result<(), InvalidRecord> {
        let head = journal.first().ok_or(InvalidRecord::Malformed)?;
        if is_patch_head(head) {
            self.decode_patch(head, place)?;
            let body = journal.get(1..claimed_lines(head));
            return self
                .decode_patch_bytes(body.ok_or(InvalidRecord::Malformed)?, get_u64(head, NEW_AT));
        }
        let [.., kind, packed_level, low, high] = get_u64(head, 0).to_le_bytes();
        let packed = u16::from_le_bytes([low, high]);
        let (level, count) = (packed_level & !GROUP_CONTINUES, page_count(packed));
        let is_map = matches!(kind, KIND_MAP | KIND_SUMMED_MAP);
        if !is_map || level > LEVELS_MAX || !(1..=PAGES_MAX).contains(&count) {
            return Err(InvalidRecord::Malformed);
        }
        let record = journal.get(..claimed_lines(head));
        let record = record.ok_or(InvalidRecord::Malformed)?;
        if place.checksum(record) != get_u32(head, 0) {
            return Err(InvalidRecord::Checksum);
        }
        self.has_second_sum = kind == KIND_SUMMED_MAP;
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
        self.decode_head_fields(head, level)
    }

    /// As [`Record::decode_from`], from the head alone, for a record of one line or a patch. A
    /// decoded patch lacks its bytes.
    ///
    /// # Errors
    /// As [`Record::decode_from`], and when the record has other lines.
    pub fn decode_head(&mut self, head: &Line, place: &RecordAddress) -> Result<(), InvalidRecord> {
        match is_patch_head(head) {
            true => self.decode_patch(head, place),
            false => self.decode_from(std::slice::from_ref(head), place),
        }
    }

    /// Decodes the fields of a head; the changes are already decoded.
    fn decode_head_fields(&mut self, head: &Line, level: u8) -> Result<(), InvalidRecord> {
        let head: Words = std::array::from_fn(|i| get_u64(head, i * 8));
        self.seq = Seq(head[1]);
        self.object = ObjectId(head[2] as u32);
        self.epoch = Epoch((head[2] >> 32) as u32);
        self.level = level;
        self.page = PageNo(head[3]);
        self.op = head[7];
        self.open = (head[6] >> 32) as u32;
        let end = self.page.0.saturating_add(self.changes.len() as u64);
        match end <= reach(LEVELS_MAX) {
            true => Ok(()),
            false => Err(InvalidRecord::Malformed),
        }
    }

    /// Decodes the head of a patch.
    fn decode_patch(&mut self, head: &Line, place: &RecordAddress) -> Result<(), InvalidRecord> {
        if place.checksum(std::slice::from_ref(head)) != get_u32(head, 0) {
            return Err(InvalidRecord::Checksum);
        }
        let [.., level, low, high] = get_u64(head, 0).to_le_bytes();
        let old = Slot::decode_unchecked(get_u64(head, FIRST_AT))?;
        let frame = old.frame().ok_or(InvalidRecord::Malformed)?;
        let new = get_u64(head, NEW_AT);
        let is_sum = new & FRAME_MASK <= u64::from(u32::MAX);
        let new = Slot::decode_unchecked(new & !FRAME_MASK | frame.0)?;
        let crc = get_u32(head, DATA_CRC_AT);
        self.changes.clear();
        self.changes.push(Change {
            old,
            new,
            sums: PageChecksums { crc, words: 0 },
        });
        self.has_second_sum = false;
        self.group_position = GroupPosition::default();
        self.patch.bytes.clear();
        self.patch.within = u16::from_le_bytes([head[FIRST_AT + 7], head[NEW_AT + 7]]).into();
        self.patch.len = u16::from_le_bytes([low, high]).into();
        self.decode_head_fields(head, level)?;
        let is_changing = old.is_changing() || new.is_changing();
        let is_in_place = new.frame() == Some(frame) && !is_changing;
        match level == 0 && is_sum && is_in_place && self.is_patch() && self.patch.is_within_page()
        {
            true => Ok(()),
            false => Err(InvalidRecord::Malformed),
        }
    }

    /// Decodes the bytes of a patch from the lines after its head. `new` is the head's word for the
    /// new slot.
    fn decode_patch_bytes(&mut self, body: &[Line], new: u64) -> Result<(), InvalidRecord> {
        if u64::from(crc32c_lines(0, body)) != new & FRAME_MASK {
            return Err(InvalidRecord::Checksum);
        }
        let Patch { bytes, len, .. } = &mut self.patch;
        bytes.resize(body.len() * PATCH_LINE_BYTES, 0);
        let chunks = bytes.as_chunks_mut::<PATCH_LINE_BYTES>().0;
        for (line, chunk) in body.iter().zip(chunks) {
            if line[BYTES_BEFORE_KIND] != KIND_BYTES {
                return Err(InvalidRecord::Malformed);
            }
            chunk[..BYTES_BEFORE_KIND].copy_from_slice(&line[..BYTES_BEFORE_KIND]);
            chunk[BYTES_BEFORE_KIND..].copy_from_slice(&line[BYTES_BEFORE_KIND + 1..]);
        }
        let has_rest = bytes.iter().skip(*len).any(|&byte| byte != 0);
        bytes.truncate(*len);
        match bytes.len() == *len && !has_rest {
            true => Ok(()),
            false => Err(InvalidRecord::Malformed),
        }
    }
}

impl ObjectRecord {
    fn encode(&self, into: &mut Vec<Line>) {
        let mut record = [[0; LINE_BYTES]; OBJECT_LINES];
        put(
            &mut record[0],
            0,
            first_word(KIND_OBJECT, 0, 0).to_le_bytes(),
        );
        put(&mut record[0], 8, self.seq.0.to_le_bytes());
        put(&mut record[0], 16, self.object.0.to_le_bytes());
        record.as_flattened_mut()[LINE_BYTES..].copy_from_slice(&self.entry);
        into.extend(record);
    }

    fn decode(journal: &[Line], place: &RecordAddress) -> Result<ObjectRecord, InvalidRecord> {
        let record = journal
            .get(..OBJECT_LINES)
            .ok_or(InvalidRecord::Malformed)?;
        if place.checksum(record) != get_u32(&record[0], 0) {
            return Err(InvalidRecord::Checksum);
        }
        Ok(ObjectRecord {
            seq: Seq(get_u64(&record[0], 8)),
            object: ObjectId(get_u32(&record[0], 16)),
            entry: field(record.as_flattened(), LINE_BYTES),
        })
    }
}

impl JournalEntry {
    /// The entry's order in the pool.
    #[must_use]
    pub fn seq(&self) -> Seq {
        match self {
            JournalEntry::Map(record) => record.seq,
            JournalEntry::Object(record) => record.seq,
        }
    }

    /// Lines of the entry.
    #[must_use]
    pub fn lines(&self) -> usize {
        match self {
            JournalEntry::Map(record) => record.lines(),
            JournalEntry::Object(_) => OBJECT_LINES,
        }
    }

    /// Appends the entry, encoded for `place`, to `into`.
    ///
    /// # Panics
    /// As [`Record::encode`].
    pub fn encode(&self, place: &RecordAddress, into: &mut Vec<Line>) {
        let start = into.len();
        match self {
            JournalEntry::Map(record) => record.encode(into),
            JournalEntry::Object(record) => record.encode(into),
        }
        add_checksum(&mut into[start..], place);
    }

    /// The entry at the start of `journal`, if one flipped bit is its only defect.
    #[must_use]
    pub fn correct(journal: &[Line], place: &RecordAddress) -> Option<JournalEntry> {
        let mut copy = journal.get(..journal.len().min(lines(PAGES_MAX)))?.to_vec();
        let head = copy.first()?;
        let claimed = claimed_lines(head);
        let is_patch = is_patch_head(head);
        let covered = if is_patch { 1 } else { claimed };
        let found = place.checksum(copy.get(..covered).unwrap_or_default());
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
                return JournalEntry::decode(&copy, place).ok();
            }
        }
        (0..64).find_map(|bit| {
            copy[0][bit / 8] ^= 1 << (bit % 8);
            let entry = JournalEntry::decode(&copy, place).ok();
            copy[0][bit / 8] ^= 1 << (bit % 8);
            entry
        })
    }

    /// Decodes the entry at the start of `journal`. Any bytes may follow it.
    ///
    /// # Errors
    /// When there is none, it is torn, or it belongs to another address.
    pub fn decode(journal: &[Line], place: &RecordAddress) -> Result<JournalEntry, InvalidRecord> {
        let head = journal.first().ok_or(InvalidRecord::Malformed)?;
        if head[4] == KIND_OBJECT {
            return ObjectRecord::decode(journal, place).map(JournalEntry::Object);
        }
        let mut record = Record::empty();
        record.decode_from(journal, place)?;
        Ok(JournalEntry::Map(record))
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

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_base::ids::FrameNo;
    use proptest::prelude::*;

    fn place() -> RecordAddress {
        RecordAddress::new(Uuid::from_u128(7), Incarnation(3), 2, 1 << 40)
    }

    fn record(pages: usize) -> Record {
        let change = |i: u64| {
            let old = Slot::EMPTY.map(FrameNo(i), 0);
            Change {
                old,
                new: old.map(FrameNo(i + 1000), 5),
                sums: PageChecksums {
                    crc: i as u32,
                    words: 0,
                },
            }
        };
        Record {
            seq: Seq(11),
            object: ObjectId(4),
            epoch: Epoch(9),
            level: 0,
            page: PageNo(1 << 33),
            op: u64::MAX,
            open: 16,
            group_position: GroupPosition::default(),
            has_second_sum: false,
            changes: (0..pages as u64).map(change).collect(),
            patch: Patch::default(),
        }
    }

    /// A patch of a part of a page.
    fn patch(within: usize, len: usize) -> Record {
        let mut record = record(1);
        let change = &mut record.changes[0];
        change.old = Slot::EMPTY.map(FrameNo(77), 0);
        change.new = change.old.map(FrameNo(77), 3);
        let bytes: Vec<u8> = (0..len).map(|at| at as u8 ^ 0x5a).collect();
        record.patch.set(within, &bytes);
        record
    }

    fn encode(record: &Record) -> Vec<Line> {
        let mut lines = Vec::new();
        record.encode(&mut lines);
        add_checksum(&mut lines, &place());
        lines
    }

    #[test]
    fn object_record_decodes_and_flipped_bits_are_found() {
        let entry = JournalEntry::Object(ObjectRecord {
            seq: Seq(5),
            object: ObjectId(3),
            entry: std::array::from_fn(|i| i as u8),
        });
        let mut lines = Vec::new();
        entry.encode(&place(), &mut lines);
        assert_eq!(lines.len(), entry.lines());
        assert_eq!(JournalEntry::decode(&lines, &place()), Ok(entry));
        for bit in 0..lines.len() * LINE_BYTES * 8 {
            let mut damaged = lines.clone();
            damaged.as_flattened_mut()[bit / 8] ^= 1 << (bit % 8);
            assert!(
                JournalEntry::decode(&damaged, &place()).is_err(),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn one_page_record_takes_one_line() {
        assert_eq!([lines(1), lines(2), lines(4), lines(5)], [1, 2, 2, 3]);
        assert_eq!(encode(&record(1)).len(), 1);
    }

    /// The encoding of a record by builds without groups.
    #[test]
    fn single_record_has_no_group_bits() {
        for pages in [1, 2, PAGES_MAX] {
            let head = encode(&record(pages))[0];
            assert_eq!(get_u64(&head, 0) >> 32, 1 | (pages as u64) << 16);
        }
    }

    #[test]
    fn flipped_bits_of_group_record_are_corrected() {
        let standing = GroupPosition {
            lines_before: 41,
            is_continued: true,
        };
        let record = Record {
            group_position: standing,
            has_second_sum: true,
            ..record(5)
        };
        let lines = encode(&record);
        for bit in 0..lines.len() * LINE_BYTES * 8 {
            let mut damaged = lines.clone();
            damaged.as_flattened_mut()[bit / 8] ^= 1 << (bit % 8);
            assert!(
                JournalEntry::decode(&damaged, &place()).is_err(),
                "bit {bit}"
            );
            let corrected = JournalEntry::correct(&damaged, &place());
            assert_eq!(
                corrected,
                Some(JournalEntry::Map(record.clone())),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn record_is_valid_only_at_its_address() {
        let lines = encode(&record(3));
        let others = [
            RecordAddress::new(Uuid::from_u128(8), Incarnation(3), 2, 1 << 40),
            RecordAddress::new(Uuid::from_u128(7), Incarnation(4), 2, 1 << 40),
            RecordAddress::new(Uuid::from_u128(7), Incarnation(3), 3, 1 << 40),
            RecordAddress::new(Uuid::from_u128(7), Incarnation(3), 2, (1 << 40) + 1),
        ];
        for place in others {
            assert_eq!(
                JournalEntry::decode(&lines, &place),
                Err(InvalidRecord::Checksum)
            );
        }
    }

    #[track_caller]
    fn check_missing_lines(lines: &[Line]) {
        for kept in 0..lines.len() {
            assert!(JournalEntry::decode(&lines[..kept], &place()).is_err());
            let mut torn = lines.to_vec();
            torn[kept] = [0; LINE_BYTES];
            assert!(
                JournalEntry::decode(&torn, &place()).is_err(),
                "line {kept}"
            );
        }
    }

    #[test]
    fn flipped_bits_and_missing_lines_are_found() {
        let lines = encode(&record(7));
        for bit in 0..lines.len() * LINE_BYTES * 8 {
            let mut damaged = lines.clone();
            damaged.as_flattened_mut()[bit / 8] ^= 1 << (bit % 8);
            assert!(
                JournalEntry::decode(&damaged, &place()).is_err(),
                "bit {bit}"
            );
        }
        check_missing_lines(&lines);
    }

    #[test]
    fn patch_bytes_follow_their_head() {
        for (within, len) in [(0, 1), (4095, 1), (5, 63), (9, 64), (1, 4095), (0, 4095)] {
            let record = patch(within, len);
            let mut lines = encode(&record);
            assert_eq!(lines.len(), 1 + len.div_ceil(63));
            assert_eq!(claimed_lines(&lines[0]), lines.len());
            assert_eq!(
                usize::from(lines[0][39]) | usize::from(lines[0][47]) << 8,
                within
            );
            assert!(lines[1..].iter().all(|line| line[4] == KIND_BYTES));
            let bytes: Vec<u8> = [&lines[1][..4], &lines[1][5..]].concat();
            let first = len.min(63);
            assert_eq!(bytes[..first], record.patch.bytes[..first]);
            assert!(bytes[first..].iter().all(|&byte| byte == 0));
            lines.push([0xaa; LINE_BYTES]);
            assert_eq!(
                JournalEntry::decode(&lines, &place()),
                Ok(JournalEntry::Map(record))
            );
        }
    }

    #[test]
    fn patch_bit_flips_are_corrected_and_missing_lines_found() {
        let record = patch(1000, 130);
        let lines = encode(&record);
        for bit in 0..lines.len() * LINE_BYTES * 8 {
            let mut damaged = lines.clone();
            damaged.as_flattened_mut()[bit / 8] ^= 1 << (bit % 8);
            assert!(
                JournalEntry::decode(&damaged, &place()).is_err(),
                "bit {bit}"
            );
            let corrected = JournalEntry::correct(&damaged, &place());
            assert_eq!(
                corrected,
                Some(JournalEntry::Map(record.clone())),
                "bit {bit}"
            );
        }
        check_missing_lines(&lines);
    }

    #[test]
    fn patch_head_decodes_without_its_bytes() {
        let mut record = patch(3000, 200);
        let mut lines = encode(&record);
        // The head decodes in spite of damaged bytes.
        lines[2] = [7; LINE_BYTES];
        let mut found = Record::empty();
        found.decode_head(&lines[0], &place()).unwrap();
        record.patch.bytes.clear();
        assert_eq!(found, record);
        assert_eq!(found.lines(), lines.len());
        for bit in 0..LINE_BYTES * 8 {
            lines[0][bit / 8] ^= 1 << (bit % 8);
            assert!(found.decode_head(&lines[0], &place()).is_err(), "bit {bit}");
            lines[0][bit / 8] ^= 1 << (bit % 8);
        }
        // The head of a record of several pages has more lines.
        let several = encode(&super::tests::record(2))[0];
        assert!(found.decode_head(&several, &place()).is_err());
    }

    /// Not even bytes that form a record for the very address of their line.
    #[test]
    fn patch_bytes_never_decode_as_record() {
        let mut record = patch(0, 63 * 3);
        let second = place().at(place().position + 2);
        for entry in [
            JournalEntry::Map(super::tests::record(1)),
            JournalEntry::Map(record.clone()),
        ] {
            let mut lines = Vec::new();
            entry.encode(&second, &mut lines);
            let [first, rest @ ..] = &lines[..1] else {
                panic!("a head");
            };
            assert!(rest.is_empty());
            record.patch.bytes[63..126].copy_from_slice(&[&first[..4], &first[5..]].concat());
            let lines = encode(&record);
            assert!(JournalEntry::decode(&lines[2..], &second).is_err());
            record.patch.bytes[63..126].copy_from_slice(&first[..63]);
            let lines = encode(&record);
            assert!(JournalEntry::decode(&lines[2..], &second).is_err());
        }
    }

    /// Refuses a record with a right checksum that no writer makes.
    #[test]
    fn impossible_patch_is_refused() {
        let sound = encode(&patch(4000, 96));
        let refused = |change: &dyn Fn(&mut Vec<Line>)| {
            let mut lines = sound.clone();
            change(&mut lines);
            let claimed = claimed_lines(&lines[0]);
            add_checksum(&mut lines[..claimed], &place());
            let found = JournalEntry::decode(&lines, &place());
            assert_eq!(found, Err(InvalidRecord::Malformed));
        };
        // Beyond the page, of a node, while it is being changed, with bytes after its end.
        refused(&|lines| lines[0][39] = 0xff);
        refused(&|lines| lines[0][5] = 1);
        refused(&|lines| lines[0][44] ^= 0x20);
        refused(&|lines| lines[2][63] = 1);
        refused(&|lines| lines[1][4] = 0);
        refused(&|lines| put(&mut lines[0], 6, 0u16.to_le_bytes()));
    }

    /// The sums take the place of the check bits that slots have in a pool.
    #[test]
    fn second_sums_replace_slot_check_bits() {
        let mut record = record(2);
        record.has_second_sum = true;
        record.changes[0].sums.words = 0x1234;
        record.changes[1].sums.words = 0xabcd;
        let lines = encode(&record);
        assert_eq!(lines[0][4], 4);
        assert_eq!((lines[0][39], lines[0][47]), (0x34, 0x12));
        assert_eq!((lines[1][7], lines[1][15]), (0xcd, 0xab));
        let slot = record.changes[1].new.encode();
        assert_eq!(get_u64(&lines[1], 8) << 8, slot << 8);
    }

    #[test]
    fn data_checksums_can_be_set_after_encoding() {
        let mut record = record(9);
        let summed = record.changes.iter_mut().zip(0xabc0..);
        summed.for_each(|(change, sum)| change.sums.words = sum);
        record.has_second_sum = true;
        let (mut blank, mut lines) = (record.clone(), Vec::new());
        blank
            .changes
            .iter_mut()
            .for_each(|change| change.sums = NO_SUMS);
        blank.encode(&mut lines);
        for (index, change) in record.changes.iter().enumerate() {
            set_sums(&mut lines, index, change.sums);
        }
        add_checksum(&mut lines, &place());
        assert_eq!(lines, encode(&record));
    }

    proptest! {
        #[test]
        fn record_round_trips(
            pages in 1..=PAGES_MAX,
            level in 0..=LEVELS_MAX,
            lines_before in 0..GROUP_LINES_MAX as u8,
            is_continued in any::<bool>(),
            has_second_sum in any::<bool>(),
            rest in 0usize..4,
        ) {
            let group_position = GroupPosition { lines_before, is_continued };
            let mut record = Record { level, group_position, has_second_sum, ..record(pages) };
            if has_second_sum {
                let summed = record.changes.iter_mut().zip(0x7f80u16..);
                summed.for_each(|(change, sum)| change.sums.words = sum);
            }
            let mut lane = encode(&record);
            lane.extend(vec![[0xaa; LINE_BYTES]; rest]);
            prop_assert_eq!(JournalEntry::decode(&lane, &place()), Ok(JournalEntry::Map(record)));
        }

        #[test]
        fn arbitrary_bytes_are_no_record(lane in prop::collection::vec(any::<[[u8; 32]; 2]>(), 0..8)) {
            let lane: Vec<Line> = lane.iter().map(|l| field(l.as_flattened(), 0)).collect();
            prop_assert!(JournalEntry::decode(&lane, &place()).is_err());
        }
    }
}
