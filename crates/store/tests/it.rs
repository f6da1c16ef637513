//! The tests of pools are one program, because each program links the crate and its dependencies again. Models, fuzz targets and
//! the crash enumeration are programs of their own, because campaigns build them in other profiles.

mod clones;
mod consistent_read;
mod damage;
mod devices;
mod failed_devices;
mod flipped_slots;
mod journal;
mod many_sessions;
mod media_bytes;
mod old_image;
mod partial_pages;
mod patches;
mod pool;
mod returned_legs;
mod scrub;
mod scrub_journal;
mod sessions;
mod snapshots;
mod table;
mod tier;
mod torn_object;
mod transaction;
mod two_pools;
mod unreadable;
