//! What the storage engine says. Its workers tell the reason of a failure to the log alone: a commit after it knows only
//! that there was one.

use std::sync::OnceLock;

use parking_lot::Mutex;

static LISTENER: Listener = Listener { last_error: Mutex::new(None) };

/// Of all engines of the process; only a test has more than one.
struct Listener {
    last_error: Mutex<Option<String>>,
}

/// From the first call on the warnings and errors of the engine go to the log of this program.
pub(in crate::origin) fn listen() {
    static LISTENS: OnceLock<()> = OnceLock::new();
    LISTENS.get_or_init(|| {
        // Whoever embeds this library may have a logger, which then hears the engine itself.
        if log::set_logger(&LISTENER).is_ok() {
            log::set_max_level(log::LevelFilter::Warn);
        }
    });
}

/// The error in plain words, by what was said when it is one of consequence only.
pub(in crate::origin) fn reason(error: &fjall::Error) -> String {
    match error {
        fjall::Error::Io(error) => error.to_string(),
        fjall::Error::Poisoned => {
            let said = LISTENER.last_error.lock().clone();
            said.unwrap_or_else(|| "the storage engine has given up".to_owned())
        }
        other => other.to_string(),
    }
}

impl log::Log for Listener {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        let target = metadata.target();
        metadata.level() <= log::Level::Warn
            && ["fjall", "lsm_tree"].iter().any(|name| target.starts_with(name))
    }

    fn log(&self, record: &log::Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let said = record.args().to_string();
        if record.level() == log::Level::Error {
            tracing::error!(said, "storage engine failed");
            *self.last_error.lock() = Some(said);
        } else {
            tracing::warn!(said, "storage engine warned");
        }
    }

    fn flush(&self) {}
}
