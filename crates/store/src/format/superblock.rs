//! The two superblocks, with the identity and plan of a pool and the position of its last
//! checkpoint. They alternate. The valid one of the higher generation counts, so that a torn write
//! of one leaves the other.
//!
//! The heads of the first journals are in the page of the superblock. Those of the others lie in pages behind both
//! superblocks, a copy for each, and the superblock has the checksum of its copy.

use crate::format::bitmap_ends::BITMAP_ENDS_BYTES;
pub use crate::format::bitmap_ends::BitmapEnds;
use crate::format::device_paths::{DEVICE_PATHS_BYTES, DevicePaths};
use crate::format::devices::{DEVICE_ENTRY_BYTES, DEVICES_MAX, DeviceTable};
use crate::format::geometry::{Geometry, PAGE_HEADS, REGIONS};
use crate::format::regions::PAGE;
pub use crate::format::regions::VERSION;
use crate::format::version_log::{LOG_PLACE_BYTES, VersionLogPlace};
use pagemesh_base::bytes::{field, get_u32, get_u64, put};
use pagemesh_base::checksum::{crc32c, crc32c_append};
use pagemesh_base::ids::{Epoch, Incarnation, Seq};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Durability, StatedClass};
use uuid::Uuid;

const MAGIC: [u8; 8] = *b"pagemesh";
/// The highest valid generation, seq and line position: a billion of them each second reach it
/// after a century. No count below it overflows.
pub(crate) const COUNT_MAX: u64 = 1 << 62;
const FEATURES_AT: usize = 112;
const REGIONS_AT: usize = 136;
const MORE_HEADS_CRC_AT: usize = 192;
const _: () = assert!(REGIONS_AT + REGIONS * 8 == MORE_HEADS_CRC_AT);
const VERSION_LOG_AT: usize = 196;
const PATHS_AT: usize = 256;
const _: () = assert!(MORE_HEADS_CRC_AT + 4 <= VERSION_LOG_AT);
const _: () = assert!(VERSION_LOG_AT + LOG_PLACE_BYTES <= PATHS_AT);
const PATHS_END: usize = PATHS_AT + DEVICE_PATHS_BYTES;
const HEADS_AT: usize = 1024;
const _: () = assert!(PATHS_END <= HEADS_AT);
const HEADS_END: usize = HEADS_AT + PAGE_HEADS as usize * 8;
const DEVICES_END: usize = HEADS_END + (DEVICES_MAX - 1) * DEVICE_ENTRY_BYTES;
const BITMAP_ENDS_END: usize = DEVICES_END + BITMAP_ENDS_BYTES;
const _: () = assert!(BITMAP_ENDS_END <= PAGE_BYTES, "heads and devices fit");

/// Features of a pool, a bit each, by the programs that may open it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// A program that does not know one of these must not open the pool.
    pub incompatible: u64,
    /// A program that does not know one of these may read the pool, and must not change it.
    pub read_compatible: u64,
    /// Any program may open the pool. It keeps the bits.
    pub compatible: u64,
}

/// Builds before the format was final set these bits: 63 for a draft, 62 for births in place of rounds, 61 for used
/// lines of bitmaps. No feature takes them again.
const DRAFTS: u64 = 1 << 63 | 1 << 62 | 1 << 61;
/// The incompatible features that this program knows. Each gets a constant here, from bit 0 on.
const INCOMPATIBLE: u64 = Features::VERSIONS | Features::CLONES;
/// The read-compatible features that this program knows.
const READ_COMPATIBLE: u64 = 0;

impl Features {
    /// The features of a new pool: none. Later ones are set when a pool begins to use them.
    pub const NEW: Features = Features {
        incompatible: 0,
        read_compatible: 0,
        compatible: 0,
    };

    /// Replaced pages are kept for snapshots: the version log, objects of versions, and records of kind 8.
    pub const VERSIONS: u64 = 1 << 0;
    /// Slices share frames with snapshots of other slices.
    pub const CLONES: u64 = 1 << 1;

    /// Whether this program may open a pool with them.
    fn check(&self) -> Result<(), BadSuperblock> {
        if self.incompatible & DRAFTS != 0 {
            return Err(BadSuperblock::Draft);
        }
        let unknown = self.incompatible & !INCOMPATIBLE;
        if unknown != 0 {
            return Err(BadSuperblock::Features(unknown));
        }
        // No opening of this program only reads.
        match self.read_compatible & !READ_COMPATIBLE {
            0 => Ok(()),
            unknown => Err(BadSuperblock::ReadFeatures(unknown)),
        }
    }
}

/// The content of a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The pool's identity.
    pub pool: Uuid,
    /// Rises with each write of a superblock; its parity selects the page.
    pub generation: u64,
    /// Rises with each opening of the pool.
    pub incarnation: Incarnation,
    /// The epoch of the pool, as a fencing number.
    pub epoch: Epoch,
    /// Records below this are applied and persistent.
    pub checkpoint: Seq,
    /// Frames in use at the checkpoint, page-table nodes included.
    pub used_frames: u64,
    /// The used part of each device's bitmap at the checkpoint.
    pub bitmap_ends: BitmapEnds,
    /// Entries of the object table from here on were never used.
    pub objects_end: u32,
    /// Journals from here on were never used: recovery does not read them.
    pub journals_end: u32,
    /// The durability class that the pool's creator stated; none leaves it to the medium.
    pub stated: Option<StatedClass>,
    /// The boot of the machine in which the pool was made. Set if the pool's class promises nothing
    /// beyond that boot, although its medium outlives it.
    pub boot: Option<Uuid>,
    /// The pool's features.
    pub features: Features,
    /// The pool's plan.
    pub geometry: Geometry,
    /// Each journal's first retained line, as an absolute position.
    pub journal_heads: Vec<u64>,
    /// Where the further devices were last found.
    pub device_paths: DevicePaths,
    /// The log of versions that snapshots see, and that no slot names yet.
    pub version_log: VersionLogPlace,
}

/// Why a page is not a usable superblock.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSuperblock {
    /// The magic bytes are not there.
    #[error("this is not a pagemesh pool")]
    NotAPool,
    /// Another version wrote it.
    #[error(
        "the pool has format version {0}, this program reads version {VERSION}; use the program that wrote it"
    )]
    Version(u32),
    /// A later program made it, or changed it.
    #[error(
        "the pool has incompatible features that this program does not know (bits {0:#x}); use the release that wrote it, or a later one"
    )]
    Features(u64),
    /// A later program made it, or changed it. This one may read it, and always writes.
    #[error(
        "the pool has features that this program does not know and would not keep up to date (read-compatible bits {0:#x}); use the release that wrote it, or a later one"
    )]
    ReadFeatures(u64),
    /// A build before the format was final made it.
    #[error(
        "the pool has a draft of format version {VERSION}, from before the format was final; open it with the build that made it and copy the volumes, or replace it by a new brick: attach copies there and detach the old ones with `pagemesh replica`"
    )]
    Draft,
    /// Torn or damaged.
    #[error(
        "both superblocks are damaged; restore the pool from a copy, or replace it by a new brick: attach copies there and detach the lost ones with `pagemesh replica`"
    )]
    Checksum,
    /// The checksum is right, but the plan does not follow from the size.
    #[error("the superblock contradicts itself: {0}")]
    Inconsistent(&'static str),
}

impl Superblock {
    /// The byte offset where this generation is written.
    #[must_use]
    pub fn offset(&self) -> usize {
        (self.generation % 2) as usize * PAGE_BYTES
    }

    /// The copy of the pages behind the superblocks that belongs to this generation.
    pub(crate) fn heads_at(&self) -> usize {
        self.geometry.heads_at(self.generation % 2)
    }

    /// The heads of used journals that have no room in the page, as they lie on media.
    #[must_use]
    pub fn encode_more_heads(&self) -> Vec<u8> {
        let used = self.journals_end as usize;
        let more = self.journal_heads[..used].get(PAGE_HEADS as usize..);
        let heads = more.unwrap_or_default().iter();
        heads.flat_map(|head| head.to_le_bytes()).collect()
    }

    /// Takes the heads that have no room in the page. `read` fills them from a byte of the pool on.
    ///
    /// # Errors
    /// When they are not those of this superblock.
    pub(crate) fn load_more_heads(
        &mut self,
        page: &[u8; PAGE_BYTES],
        read: impl FnOnce(usize, &mut [u8]),
    ) -> Result<(), BadSuperblock> {
        let used = self.journals_end.saturating_sub(PAGE_HEADS) as usize;
        let mut bytes = vec![0; used * 8];
        if used > 0 {
            read(self.heads_at(), &mut bytes);
        }
        if crc32c(&bytes) != get_u32(page, MORE_HEADS_CRC_AT) {
            return Err(BadSuperblock::Checksum);
        }
        let heads = self.journal_heads.iter_mut().skip(PAGE_HEADS as usize);
        for (head, bytes) in heads.zip(bytes.as_chunks().0) {
            *head = u64::from_le_bytes(*bytes);
            if *head > COUNT_MAX {
                return Err(BEYOND_LIMIT);
            }
        }
        Ok(())
    }

    /// The page as it lies on media.
    ///
    /// # Panics
    /// When the number of heads is not the number of journals.
    #[must_use]
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        assert_eq!(
            self.journal_heads.len(),
            self.geometry.journals as usize,
            "a head for each journal"
        );
        let mut page = [0; PAGE_BYTES];
        put(&mut page, 0, MAGIC);
        put(&mut page, 8, VERSION.to_le_bytes());
        put(&mut page, 16, *self.pool.as_bytes());
        put(&mut page, 32, self.generation.to_le_bytes());
        put(&mut page, 40, self.incarnation.0.to_le_bytes());
        put(&mut page, 44, self.epoch.0.to_le_bytes());
        put(&mut page, 48, self.checkpoint.0.to_le_bytes());
        put(&mut page, 56, self.geometry.pool_bytes.to_le_bytes());
        put(&mut page, 64, self.geometry.journals.to_le_bytes());
        if let Some(stated) = self.stated {
            put(
                &mut page,
                68,
                [durability_code(stated.class), stated.is_trusted.into()],
            );
        }
        put(&mut page, 72, self.geometry.journal_bytes.to_le_bytes());
        put(&mut page, 80, self.used_frames.to_le_bytes());
        put(&mut page, 88, self.objects_end.to_le_bytes());
        put(&mut page, 92, self.journals_end.to_le_bytes());
        put(&mut page, 96, self.boot.unwrap_or_default().into_bytes());
        let Features {
            incompatible,
            read_compatible,
            compatible,
        } = self.features;
        put_words(
            &mut page,
            FEATURES_AT,
            [incompatible, read_compatible, compatible],
        );
        put_words(&mut page, REGIONS_AT, self.geometry.region_starts());
        self.version_log.encode(&mut page[VERSION_LOG_AT..PATHS_AT]);
        let more_heads_crc = crc32c(&self.encode_more_heads());
        put(&mut page, MORE_HEADS_CRC_AT, more_heads_crc.to_le_bytes());
        let heads = self.journal_heads.iter().take(PAGE_HEADS as usize);
        for (head, at) in heads.zip((HEADS_AT..).step_by(8)) {
            put(&mut page, at, head.to_le_bytes());
        }
        let devices = &self.geometry.devices;
        devices.encode(&mut page[HEADS_END..DEVICES_END]);
        self.bitmap_ends
            .encode(&mut page[DEVICES_END..BITMAP_ENDS_END]);
        self.device_paths
            .encode(devices, &mut page[PATHS_AT..PATHS_END]);
        let crc = checksum(&page);
        put(&mut page, 12, crc.to_le_bytes());
        page
    }

    /// Decodes a page from media. Heads that have no room in the page are zero.
    ///
    /// # Errors
    /// When it is not a superblock of this version, or is damaged or inconsistent.
    pub fn decode(page: &[u8; PAGE_BYTES]) -> Result<Superblock, BadSuperblock> {
        if field(page, 0) != MAGIC {
            return Err(BadSuperblock::NotAPool);
        }
        if checksum(page) != get_u32(page, 12) {
            return Err(BadSuperblock::Checksum);
        }
        // Every version has magic, version and checksum in the same places, so a newer pool is told
        // apart from a damaged one.
        if get_u32(page, 8) != VERSION {
            return Err(BadSuperblock::Version(get_u32(page, 8)));
        }
        let [incompatible, read_compatible, compatible] = get_words(page, FEATURES_AT);
        let features = Features {
            incompatible,
            read_compatible,
            compatible,
        };
        features.check()?;
        let geometry = decode_geometry(page).map_err(BadSuperblock::Inconsistent)?;
        let used_frames = get_u64(page, 80);
        let [objects_end, lanes_end] = [88, 92].map(|at| get_u32(page, at));
        if used_frames > geometry.frame_bytes() / PAGE
            || objects_end > geometry.object_count()
            || lanes_end > geometry.journals
        {
            return Err(BadSuperblock::Inconsistent(
                "it counts more frames, objects or journals than the pool has",
            ));
        }
        let bitmap_ends = decode_bitmap_ends(page, &geometry, used_frames)?;
        let in_page = geometry.journals.min(PAGE_HEADS) as usize;
        let heads = (HEADS_AT..).step_by(8).take(in_page);
        let mut heads: Vec<u64> = heads.map(|at| get_u64(page, at)).collect();
        heads.resize(geometry.journals as usize, 0);
        if [32, 48].iter().any(|&at| get_u64(page, at) > COUNT_MAX)
            || heads.iter().any(|&head| head > COUNT_MAX)
            || get_u32(page, 40) == u32::MAX
        {
            return Err(BEYOND_LIMIT);
        }
        Ok(Superblock {
            version_log: decode_version_log(page, &geometry)?,
            pool: Uuid::from_bytes(field(page, 16)),
            generation: get_u64(page, 32),
            incarnation: Incarnation(get_u32(page, 40)),
            epoch: Epoch(get_u32(page, 44)),
            checkpoint: Seq(get_u64(page, 48)),
            used_frames,
            bitmap_ends,
            objects_end,
            journals_end: lanes_end,
            stated: decode_stated(field(page, 68))?,
            boot: Some(Uuid::from_bytes(field(page, 96))).filter(|boot| !boot.is_nil()),
            features,
            device_paths: DevicePaths::decode(&geometry.devices, &page[PATHS_AT..PATHS_END]),
            geometry,
            journal_heads: heads,
        })
    }

    /// The valid superblock of the higher generation.
    ///
    /// # Errors
    /// The error of the first copy, when neither is valid.
    pub fn choose(pages: [&[u8; PAGE_BYTES]; 2]) -> Result<Superblock, BadSuperblock> {
        Superblock::newer(pages.map(Superblock::decode))
    }

    /// The same of two decoded copies.
    pub(crate) fn newer(
        copies: [Result<Superblock, BadSuperblock>; 2],
    ) -> Result<Superblock, BadSuperblock> {
        use BadSuperblock::{Draft, Features, ReadFeatures, Version};
        match copies {
            [Ok(a), Ok(b)] if a.pool != b.pool => Err(BadSuperblock::Inconsistent(
                "its two copies belong to different pools",
            )),
            [Ok(a), Ok(b)] => Ok(if a.generation > b.generation { a } else { b }),
            // Another program may have written one copy so far. Refuse the pool: continuing from
            // the older copy would undo that program's changes.
            [
                Err(other @ (Version(_) | Features(_) | ReadFeatures(_) | Draft)),
                _,
            ]
            | [
                _,
                Err(other @ (Version(_) | Features(_) | ReadFeatures(_) | Draft)),
            ] => Err(other),
            [Ok(one), Err(_)] | [Err(_), Ok(one)] => Ok(one),
            [Err(first), Err(BadSuperblock::NotAPool)] => Err(first),
            [Err(_), Err(second)] => Err(second),
        }
    }
}

const BEYOND_LIMIT: BadSuperblock = BadSuperblock::Inconsistent(
    "a generation, seq, incarnation or line position is beyond its limit",
);

fn put_words<const N: usize>(page: &mut [u8; PAGE_BYTES], at: usize, words: [u64; N]) {
    for (word, at) in words.iter().zip((at..).step_by(8)) {
        put(page, at, word.to_le_bytes());
    }
}

fn get_words<const N: usize>(page: &[u8; PAGE_BYTES], at: usize) -> [u64; N] {
    std::array::from_fn(|number| get_u64(page, at + number * 8))
}

fn decode_geometry(page: &[u8; PAGE_BYTES]) -> Result<Geometry, &'static str> {
    let journals = (get_u32(page, 64), get_u64(page, 72));
    let starts = get_words(page, REGIONS_AT);
    let mut geometry = Geometry::from_regions(get_u64(page, 56), journals, starts)?;
    let entries = &page[HEADS_END..DEVICES_END];
    geometry.devices = DeviceTable::decode(entries, geometry.pool_bytes / PAGE)?;
    Ok(geometry)
}

fn decode_version_log(
    page: &[u8; PAGE_BYTES],
    geometry: &Geometry,
) -> Result<VersionLogPlace, BadSuperblock> {
    let place = VersionLogPlace::decode(&page[VERSION_LOG_AT..PATHS_AT], &geometry.frame_numbers());
    place.map_err(BadSuperblock::Inconsistent)
}

fn decode_bitmap_ends(
    page: &[u8; PAGE_BYTES],
    geometry: &Geometry,
    used_frames: u64,
) -> Result<BitmapEnds, BadSuperblock> {
    let ends = BitmapEnds::decode(&page[DEVICES_END..BITMAP_ENDS_END], geometry);
    let ends = ends.map_err(BadSuperblock::Inconsistent)?;
    match used_frames <= ends.frames(geometry) {
        true => Ok(ends),
        false => Err(BadSuperblock::Inconsistent(
            "more frames are in use than the used part of its bitmap has",
        )),
    }
}

/// The byte of a class; zero stands for none.
fn durability_code(class: Durability) -> u8 {
    match class {
        Durability::Pmem => 1,
        Durability::Eadr => 2,
        Durability::FileSync => 3,
        Durability::Process => 4,
    }
}

fn decode_stated([class, trusted]: [u8; 2]) -> Result<Option<StatedClass>, BadSuperblock> {
    let found = Durability::ALL
        .into_iter()
        .find(|&of| durability_code(of) == class);
    match (found, trusted) {
        (Some(class), 0 | 1) => Ok(Some(StatedClass {
            class,
            is_trusted: trusted == 1,
        })),
        (None, 0) if class == 0 => Ok(None),
        _ => Err(BadSuperblock::Inconsistent(
            "its durability class is unknown",
        )),
    }
}

/// CRC32C of all bytes but the checksum's own four.
fn checksum(page: &[u8; PAGE_BYTES]) -> u32 {
    crc32c_append(crc32c_append(0, &page[..12]), &page[16..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock(generation: u64) -> Superblock {
        let geometry = Geometry::plan(1 << 30).expect("a plan");
        Superblock {
            pool: Uuid::from_u128(5),
            generation,
            incarnation: Incarnation(2),
            epoch: Epoch(1),
            checkpoint: Seq(generation * 10),
            used_frames: 0,
            bitmap_ends: BitmapEnds::of_new(&geometry),
            objects_end: 1,
            journals_end: 2,
            stated: None,
            boot: None,
            features: Features::NEW,
            device_paths: DevicePaths::default(),
            version_log: VersionLogPlace::default(),
            geometry,
            journal_heads: (0..u64::from(geometry.journals)).collect(),
        }
    }

    const BLANK: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

    #[test]
    fn superblock_round_trips() {
        let block = superblock(7);
        assert_eq!(Superblock::decode(&block.encode()), Ok(block));
    }

    #[test]
    fn stated_class_is_kept_and_unknown_class_refused() {
        for class in Durability::ALL {
            for is_trusted in [false, true] {
                let block = Superblock {
                    stated: Some(StatedClass { class, is_trusted }),
                    boot: Some(Uuid::from_u128(8)),
                    ..superblock(7)
                };
                assert_eq!(Superblock::decode(&block.encode()), Ok(block));
            }
        }
        for wrong in [[5, 0], [0, 1], [1, 2]] {
            let mut page = superblock(7).encode();
            put(&mut page, 68, wrong);
            let crc = checksum(&page);
            put(&mut page, 12, crc.to_le_bytes());
            let decoded = Superblock::decode(&page);
            let is_refused = matches!(decoded, Err(BadSuperblock::Inconsistent(_)));
            assert!(is_refused, "{wrong:?}: {decoded:?}");
        }
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let page = superblock(7).encode();
        for bit in 0..PAGE_BYTES * 8 {
            let mut damaged = page;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&damaged).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn newer_valid_superblock_is_chosen() {
        let (old, new) = (superblock(8), superblock(9));
        assert_ne!(old.offset(), new.offset());
        let choose = |a: &_, b: &_| Superblock::choose([a, b]);
        assert_eq!(choose(&old.encode(), &new.encode()), Ok(new.clone()));
        let mut torn = new.encode();
        torn[2000] ^= 1;
        assert_eq!(choose(&old.encode(), &torn), Ok(old.clone()));
        assert_eq!(choose(&BLANK, &old.encode()), Ok(old));
        assert_eq!(choose(&BLANK, &torn), Err(BadSuperblock::Checksum));
        assert_eq!(choose(&torn, &BLANK), Err(BadSuperblock::Checksum));
        assert_eq!(choose(&BLANK, &BLANK), Err(BadSuperblock::NotAPool));
    }

    #[test]
    fn newer_version_is_refused_even_in_one_copy() {
        let mut newer = superblock(9).encode();
        put(&mut newer, 8, 2u32.to_le_bytes());
        let crc = checksum(&newer);
        put(&mut newer, 12, crc.to_le_bytes());
        for pages in [
            [&newer, &superblock(8).encode()],
            [&superblock(8).encode(), &newer],
        ] {
            assert_eq!(Superblock::choose(pages), Err(BadSuperblock::Version(2)));
        }
    }
    #[test]
    fn unknown_feature_is_refused_unless_compatible() {
        let with = |incompatible, read_compatible, compatible| {
            let features = Features {
                incompatible,
                read_compatible,
                compatible,
            };
            let block = Superblock {
                features,
                ..superblock(7)
            };
            Superblock::decode(&block.encode()).map(|block| block.features.compatible)
        };
        let known = Features::VERSIONS | Features::CLONES;
        assert_eq!(with(known, 0, 0), Ok(0));
        for bit in (2..64).map(|bit| 1 << bit) {
            assert_eq!(with(0, 0, bit), Ok(bit));
            assert_eq!(with(0, bit, 0), Err(BadSuperblock::ReadFeatures(bit)));
            let refused = match bit & DRAFTS {
                0 => BadSuperblock::Features(bit),
                _ => BadSuperblock::Draft,
            };
            assert_eq!(with(bit, bit, bit), Err(refused), "{bit:#x}");
        }
    }

    #[test]
    fn heads_behind_the_superblock_round_trip() {
        let geometry = Geometry::plan(1 << 40).expect("a plan");
        let block = Superblock {
            bitmap_ends: BitmapEnds::of_new(&geometry),
            geometry,
            journals_end: 700,
            journal_heads: (0..u64::from(geometry.journals))
                .map(|it| it % 700)
                .collect(),
            ..superblock(7)
        };
        let page = block.encode();
        let more = block.encode_more_heads();
        let mut decoded = Superblock::decode(&page).expect("a superblock");
        let read = |at, into: &mut [u8]| {
            assert_eq!(at, block.heads_at());
            into.copy_from_slice(&more);
        };
        decoded.load_more_heads(&page, read).expect("its heads");
        assert_eq!(decoded.journal_heads[..700], block.journal_heads[..700]);
        let torn = |_, into: &mut [u8]| into.fill(1);
        let refused = decoded.load_more_heads(&page, torn);
        assert_eq!(refused, Err(BadSuperblock::Checksum));
    }
}
