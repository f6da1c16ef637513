//! The deliberate defects of the store ([`pagemesh_base::defect`]). Hooks that need more than a
//! condition lie next to the code that they break: `session/defects`, `owner/defects`.

pub(crate) use pagemesh_base::defect::{Defect, is};
#[cfg(test)]
pub(crate) use pagemesh_base::defect::{present, without};

#[cfg(test)]
use std::cell::Cell;

#[cfg(test)]
thread_local! {
    /// For [`Defect::FrameReuse`]: frames that records below this seq freed are granted.
    pub(crate) static GRANTED: Cell<u64> = const { Cell::new(0) };
}

/// Sets the defect of the store in this thread, or clears it.
#[cfg(test)]
pub(crate) fn set(defect: Option<Defect>) {
    pagemesh_base::defect::set(defect);
    GRANTED.set(0);
}
