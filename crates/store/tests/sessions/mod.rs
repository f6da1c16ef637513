//! Tests that look inside: at cells of the control segment, at slots and at single flushes.

mod births;
mod in_place_patches;
mod session_retirement;
mod slot_flush;
mod stalled_sessions;
