//! The dynamic section of a loaded library, as the dynamic loader uses it.
//!
//! The layouts come from the System V ABI (gabi, "Dynamic Linking"), the GNU hash table and GNU
//! symbol versions (LSB 5.0, "Symbol Versioning"). The loader has read all of these tables
//! before, and would have failed if they were wrong.

use libc::{Elf64_Sym, c_char, c_int};
use std::ffi::CStr;

/// As defined in `<link.h>`.
#[repr(C)]
pub struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const DynamicEntry,
    next: *const LinkMap,
    previous: *const LinkMap,
}

/// As defined in `<link.h>`, up to the last field that is needed.
#[repr(C)]
pub struct LoaderDebug {
    version: c_int,
    map: *const LinkMap,
}

#[repr(C)]
struct DynamicEntry {
    tag: i64,
    value: usize,
}

/// An entry of a relocation table with addends.
#[repr(C)]
pub struct Relocation {
    offset: usize,
    info: u64,
    addend: i64,
}

impl Relocation {
    /// Whether it writes the address of a symbol: `R_X86_64_64`, `_GLOB_DAT` or `_JUMP_SLOT`.
    pub fn is_address(&self) -> bool {
        matches!(self.info as u32, 1 | 6 | 7) && self.addend == 0
    }

    /// The number of its symbol.
    pub fn symbol(&self) -> usize {
        (self.info >> 32) as usize
    }
}

#[repr(C)]
struct VersionDefinition {
    version: u16,
    flags: u16,
    number: u16,
    count: u16,
    hash: u32,
    names: u32,
    next: u32,
}

#[repr(C)]
struct VersionNeeded {
    version: u16,
    count: u16,
    file: u32,
    versions: u32,
    next: u32,
}

#[repr(C)]
struct VersionOfNeeded {
    hash: u32,
    flags: u16,
    number: u16,
    name: u32,
    next: u32,
}

const TAG_NEEDED: i64 = 1;
const TAG_PLT_BYTES: i64 = 2;
const TAG_STRINGS: i64 = 5;
const TAG_SYMBOLS: i64 = 6;
const TAG_RELOCATIONS: i64 = 7;
const TAG_RELOCATIONS_BYTES: i64 = 8;
const TAG_SONAME: i64 = 14;
const TAG_PLT: i64 = 23;
const TAG_GNU_HASH: i64 = 0x6fff_fef5;
const TAG_VERSIONS: i64 = 0x6fff_fff0;
const TAG_VERSIONS_DEFINED: i64 = 0x6fff_fffc;
const TAG_VERSIONS_NEEDED: i64 = 0x6fff_fffe;

/// Masks the bit that marks a version as not the default one.
const VERSION: u16 = 0x7fff;

const VARIABLE: u8 = 1;
const FUNCTION: u8 = 2;
const INDIRECT_FUNCTION: u8 = 10;

/// A loaded program or library. It stays loaded.
#[derive(Clone, Copy)]
pub struct LoadedObject {
    map: &'static LinkMap,
}

/// A name that ends with a zero.
#[derive(Clone, Copy)]
pub struct SymbolName(*const u8);

impl SymbolName {
    pub fn of(name: &'static CStr) -> SymbolName {
        SymbolName(name.as_ptr().cast())
    }

    fn bytes(self) -> impl Iterator<Item = u8> {
        let mut at = self.0;
        std::iter::from_fn(move || {
            // SAFETY: within a name, or its zero. Volatile, so that the loop stays a loop.
            let byte = unsafe { at.read_volatile() };
            at = at.wrapping_add(1);
            (byte != 0).then_some(byte)
        })
    }

    pub fn is(self, other: SymbolName) -> bool {
        let (mut left, mut right) = (self.bytes(), other.bytes());
        loop {
            match (left.next(), right.next()) {
                (None, None) => return true,
                (one, other) if one != other => return false,
                _ => {}
            }
        }
    }

    fn gnu_hash(self) -> u32 {
        self.bytes().fold(5381, |hash: u32, byte| {
            hash.wrapping_mul(33).wrapping_add(u32::from(byte))
        })
    }
}

unsafe extern "C" {
    static _r_debug: LoaderDebug;
    static _DYNAMIC: u8;
}

/// All loaded objects, in lookup order.
pub fn loaded_objects() -> impl Iterator<Item = LoadedObject> {
    // SAFETY: the loader fills it before any code of this library runs, and it stays.
    let first = unsafe { (&raw const _r_debug.map).read().as_ref() };
    // SAFETY: a list of the loader; null or the next.
    let next = |map: &&'static LinkMap| unsafe { map.next.as_ref() };
    std::iter::successors(first, next).map(|map| LoadedObject { map })
}

/// The library that contains this code.
pub fn own_object() -> Option<LoadedObject> {
    let own = (&raw const _DYNAMIC).cast::<DynamicEntry>();
    loaded_objects().find(|object| object.map.dynamic == own)
}

impl LoadedObject {
    pub fn is(self, other: LoadedObject) -> bool {
        std::ptr::eq(self.map, other.map)
    }

    /// The path that it was loaded from: a string that stays valid.
    pub fn path(self) -> *const c_char {
        self.map.name
    }

    pub fn base(self) -> usize {
        self.map.base
    }

    fn entries(self) -> impl Iterator<Item = &'static DynamicEntry> {
        let mut at = self.map.dynamic;
        std::iter::from_fn(move || {
            // SAFETY: null, or a list that ends with a tag of 0.
            let entry = unsafe { at.as_ref() }?;
            at = at.wrapping_add(1);
            (entry.tag != 0).then_some(entry)
        })
    }

    fn value(self, tag: i64) -> Option<usize> {
        let found = self.entries().find(|entry| entry.tag == tag);
        found.map(|entry| entry.value)
    }

    /// The address of a table. The loader may have added the base in place.
    fn table<T>(self, tag: i64) -> Option<*const T> {
        let value = self.value(tag)?;
        let is_relative = value < self.map.base;
        let address = if is_relative {
            self.map.base + value
        } else {
            value
        };
        Some(address as *const T)
    }

    fn string(self, at: usize) -> Option<SymbolName> {
        let strings = self.table::<u8>(TAG_STRINGS)?;
        Some(SymbolName(strings.wrapping_add(at)))
    }

    pub fn soname(self) -> Option<SymbolName> {
        self.string(self.value(TAG_SONAME)?)
    }

    /// The libraries that it was linked with, as far as they are loaded.
    pub fn needed(self) -> impl Iterator<Item = LoadedObject> {
        let entries = self.entries().filter(|entry| entry.tag == TAG_NEEDED);
        let names = entries.filter_map(move |entry| self.string(entry.value));
        let is = |other: LoadedObject, name| other.soname().is_some_and(|soname| soname.is(name));
        names.filter_map(move |name| loaded_objects().find(|other| is(*other, name)))
    }

    fn symbol(self, number: usize) -> Option<&'static Elf64_Sym> {
        let symbols = self.table::<Elf64_Sym>(TAG_SYMBOLS)?;
        // SAFETY: numbers come from this object's own tables.
        Some(unsafe { &*symbols.add(number) })
    }

    pub fn name_of(self, number: usize) -> Option<SymbolName> {
        self.string(self.symbol(number)?.st_name as usize)
    }

    pub fn relocations(self) -> impl Iterator<Item = &'static Relocation> {
        let of = move |table, bytes| {
            let count = self.value(bytes).unwrap_or(0) / size_of::<Relocation>();
            let table: Option<*const Relocation> = self.table(table);
            // SAFETY: a table with its length.
            table.map_or(&[][..], |first| unsafe {
                std::slice::from_raw_parts(first, count)
            })
        };
        let named = of(TAG_RELOCATIONS, TAG_RELOCATIONS_BYTES);
        named.iter().chain(of(TAG_PLT, TAG_PLT_BYTES))
    }

    /// The address that a relocation writes.
    pub fn slot(self, relocation: &Relocation) -> *mut usize {
        (self.map.base + relocation.offset) as *mut usize
    }

    fn version_number(self, symbol: usize) -> Option<u16> {
        let versions = self.table::<u16>(TAG_VERSIONS)?;
        // SAFETY: one for each symbol.
        Some(unsafe { versions.add(symbol).read() })
    }

    /// The hash of the version that it requires of an imported symbol; none: any.
    pub fn version_wanted(self, symbol: usize) -> Option<u32> {
        let number = self.version_number(symbol)? & VERSION;
        let mut file: *const VersionNeeded = self.table(TAG_VERSIONS_NEEDED)?;
        loop {
            // SAFETY: entries lead to each other by their distances; the last one's is 0.
            let needed = unsafe { &*file };
            let mut at: *const VersionOfNeeded = offset_by(file, needed.versions);
            for _ in 0..needed.count {
                // SAFETY: as above.
                let version = unsafe { &*at };
                if version.number & VERSION == number {
                    return Some(version.hash);
                }
                at = offset_by(at, version.next);
            }
            if needed.next == 0 {
                return None;
            }
            file = offset_by(file, needed.next);
        }
    }

    /// Whether a symbol is of the version with this hash, or of the default version.
    fn is_version(self, symbol: usize, hash: Option<u32>) -> bool {
        let Some(number) = self.version_number(symbol) else {
            return true;
        };
        let Some(hash) = hash else {
            return number & !VERSION == 0;
        };
        let Some(mut at) = self.table::<VersionDefinition>(TAG_VERSIONS_DEFINED) else {
            return true;
        };
        loop {
            // SAFETY: as in `version_wanted`.
            let definition = unsafe { &*at };
            if definition.number == number & VERSION {
                return definition.hash == hash;
            }
            if definition.next == 0 {
                return false;
            }
            at = offset_by(at, definition.next);
        }
    }

    /// The address of a function that it defines, by its GNU hash table.
    pub fn function(self, name: SymbolName, version: Option<u32>) -> Option<usize> {
        let number = self.number_of(name, version)?;
        let symbol = self.symbol(number)?;
        let address = self.map.base + symbol.st_value as usize;
        match symbol.st_info & 0xf {
            FUNCTION => Some(address),
            INDIRECT_FUNCTION => {
                // SAFETY: it chooses one of several functions by the processor, and takes no
                // arguments on x86-64. Its library is relocated: this one's dependencies are first.
                let choose = unsafe {
                    std::mem::transmute::<usize, unsafe extern "C" fn() -> usize>(address)
                };
                // SAFETY: as above.
                Some(unsafe { choose() })
            }
            _ => None,
        }
    }

    /// The address of a variable that it defines.
    pub fn data(self, name: SymbolName) -> Option<usize> {
        let symbol = self.symbol(self.number_of(name, None)?)?;
        (symbol.st_info & 0xf == VARIABLE).then_some(self.map.base + symbol.st_value as usize)
    }

    fn number_of(self, name: SymbolName, version: Option<u32>) -> Option<usize> {
        let table: *const u32 = self.table(TAG_GNU_HASH)?;
        // SAFETY: a header of four words, a filter, buckets, and chains.
        let word = |at: usize| unsafe { table.add(at).read() };
        let (buckets, first, filter) = (word(0) as usize, word(1) as usize, word(2) as usize);
        let buckets_at = 4 + filter * 2;
        let hash = name.gnu_hash();
        let mut number = word(buckets_at + hash as usize % buckets.max(1)) as usize;
        if buckets == 0 || number < first {
            return None;
        }
        loop {
            let seen = word(buckets_at + buckets + number - first);
            let is_its = seen | 1 == hash | 1
                && self.name_of(number)?.is(name)
                && self.symbol(number)?.st_shndx != 0
                && self.is_version(number, version);
            if is_its {
                return Some(number);
            }
            if seen & 1 != 0 {
                return None;
            }
            number += 1;
        }
    }
}

fn offset_by<T, U>(from: *const T, bytes: u32) -> *const U {
    from.wrapping_byte_add(bytes as usize).cast()
}
