//! The owner of a pool, when the one thread of a test waits for it.

use super::medium::Medium;
use crate::pool::Pool;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// A pool that a session's wait can reach.
pub(super) type Owned = Rc<RefCell<Pool<Medium>>>;

/// Rounds of the owner in one operation. Each answers whoever waits, and an
/// operation gives up after fewer answers.
const TENDS_MAX: u32 = 200;

thread_local! {
    static OWNER: RefCell<Option<Owned>> = const { RefCell::new(None) };
    static TENDS: Cell<u32> = const { Cell::new(0) };
}

/// Runs an operation of a session; whenever it waits for the owner, the owner
/// tends the pool.
pub(super) fn with<T>(pool: &Owned, run: impl FnOnce() -> T) -> T {
    struct Restore(Option<Owned>);
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
pub(crate) fn tend() -> bool {
    let pool = OWNER.with_borrow(Clone::clone);
    let Some(pool) = pool else { return false };
    TENDS.set(TENDS.get() + 1);
    assert!(
        TENDS.get() <= TENDS_MAX,
        "the owner tends and never answers"
    );
    let medium = pool.borrow().view().data.clone();
    // The session may be about to die; its owner is not.
    let left = medium.live();
    pool.borrow_mut().tend().expect("a sound pool");
    medium.die_after(left);
    true
}
