//! The points at which threads of a volume interact outside their mutexes. Tests explore the
//! interleavings at these points (`models`). In other builds they do nothing.

#[cfg(test)]
pub(crate) use explored::{lock, step};

/// Marks an access to data that other threads access.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn step(_what: &'static str) {}

/// Marks a mutex that is about to be locked.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn lock<T>(_what: &'static str, _mutex: &std::sync::Mutex<T>) {}

#[cfg(test)]
mod explored {
    use pagemesh_models::Access;

    /// Marks an access to data that other threads access.
    pub(crate) fn step(what: &'static str) {
        pagemesh_models::step(what, 0..1, Access::Change);
    }

    /// Marks a mutex that is about to be locked.
    pub(crate) fn lock<T>(what: &'static str, mutex: &std::sync::Mutex<T>) {
        step(what);
        pagemesh_models::pause_while_locked(mutex);
    }
}
