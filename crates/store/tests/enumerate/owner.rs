//! The pool's owner, run by the test's only thread when a session waits for it.

use super::medium::CrashMedium;
use pagemesh_store::pool::Pool;
use pagemesh_store::wait::set_yield_fn;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// A pool that a waiting session can reach.
pub(super) type SharedPool = Rc<RefCell<Pool<CrashMedium>>>;

/// Maintenance rounds of the owner in one operation. Each round answers a waiting session, and an
/// operation gives up after fewer answers.
const MAINTENANCE_MAX: u32 = 200;

thread_local! {
    static OWNER: RefCell<Option<SharedPool>> = const { RefCell::new(None) };
    static TENDS: Cell<u32> = const { Cell::new(0) };
}

/// Runs an operation of a session; whenever the session waits, the owner maintains the pool.
pub(super) fn with_owner<T>(pool: &SharedPool, run: impl FnOnce() -> T) -> T {
    struct Restore(Option<SharedPool>);
    impl Drop for Restore {
        fn drop(&mut self) {
            set_waits(self.0.is_some());
            OWNER.set(self.0.take());
        }
    }
    let _restore = Restore(OWNER.replace(Some(pool.clone())));
    set_waits(true);
    TENDS.set(0);
    run()
}

/// Whether the owner maintains the pool in place of each wait.
fn set_waits(maintains: bool) {
    set_yield_fn(if maintains {
        Some(Rc::new(maintain_current))
    } else {
        None
    });
}

/// Maintains the pool of the thread; false if there is none.
fn maintain_current() -> bool {
    let pool = OWNER.with_borrow(Clone::clone);
    let Some(pool) = pool else { return false };
    TENDS.set(TENDS.get() + 1);
    assert!(
        TENDS.get() <= MAINTENANCE_MAX,
        "the owner maintains the pool and never answers"
    );
    let medium = pool.borrow().mapping().media().clone();
    // The planned death hits the session, not the owner, and the owner waits for no session.
    let left = medium.cancel_death();
    set_waits(false);
    pool.borrow_mut().maintain().expect("a sound pool");
    set_waits(true);
    medium.die_after(left);
    true
}
