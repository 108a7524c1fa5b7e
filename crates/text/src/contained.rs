//! Calls into crates that panic on some damaged files.

use std::cell::Cell;
use std::panic::AssertUnwindSafe;
use std::sync::Once;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// What `work` gives; `None` if it panicked, whose message is not printed. What it has changed is not to be used after that.
pub fn contained<T>(work: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                before(info);
            }
        }));
    });
    let outer = QUIET.replace(true);
    let result = std::panic::catch_unwind(AssertUnwindSafe(work));
    QUIET.set(outer);
    result.ok()
}
