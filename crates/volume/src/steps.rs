//! Where threads of a volume meet beside their mutexes. Tests explore the
//! interleavings through it (`models`); built for anything else, it is nothing.

#[cfg(test)]
pub(crate) use explored::{lock, step};

/// Before an access to what other threads access.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn step(_what: &'static str) {}

/// Before a mutex is locked.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn lock<T>(_what: &'static str, _mutex: &std::sync::Mutex<T>) {}

#[cfg(test)]
mod explored {
    use pagemesh_models::Access;

    /// Before an access to what other threads access.
    pub(crate) fn step(what: &'static str) {
        pagemesh_models::step(what, 0..1, Access::Change);
    }

    /// Before a mutex is locked.
    pub(crate) fn lock<T>(what: &'static str, mutex: &std::sync::Mutex<T>) {
        step(what);
        pagemesh_models::pause_while_locked(mutex);
    }
}
