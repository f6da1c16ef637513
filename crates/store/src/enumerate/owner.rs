//! The owner of a pool, when the one thread of a test waits for it.

use super::medium::CrashMedium;
use crate::pool::Pool;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// A pool that a session's wait can reach.
pub(super) type SharedPool = Rc<RefCell<Pool<CrashMedium>>>;

/// Rounds of the owner in one operation. Each answers whoever waits, and an
/// operation gives up after fewer answers.
const MAINTENANCE_MAX: u32 = 200;

thread_local! {
    static OWNER: RefCell<Option<SharedPool>> = const { RefCell::new(None) };
    static TENDS: Cell<u32> = const { Cell::new(0) };
}

/// Runs an operation of a session; whenever it waits for the owner, the owner
/// tends the pool.
pub(super) fn with_owner<T>(pool: &SharedPool, run: impl FnOnce() -> T) -> T {
    struct Restore(Option<SharedPool>);
    impl Drop for Restore {
        fn drop(&mut self) {
            OWNER.set(self.0.take());
        }
    }
    let _restore = Restore(OWNER.replace(Some(pool.clone())));
    TENDS.set(0);
    run()
}

/// Tends the pool of the thread, if there is one.
pub(crate) fn maintain_current() -> bool {
    let pool = OWNER.with_borrow(Clone::clone);
    let Some(pool) = pool else { return false };
    TENDS.set(TENDS.get() + 1);
    assert!(
        TENDS.get() <= MAINTENANCE_MAX,
        "the owner tends and never answers"
    );
    let medium = pool.borrow().mapping().data.clone();
    // The session may be about to die; its owner is not.
    let left = medium.cancel_death();
    pool.borrow_mut().maintain().expect("a sound pool");
    medium.die_after(left);
    true
}
