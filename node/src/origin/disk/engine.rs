//! Log messages of the storage engine. Its workers write the reason of a failure only to the log; a later commit reports just that the
//! engine has failed.

use std::sync::OnceLock;

use parking_lot::Mutex;

static LISTENER: EngineLogger = EngineLogger { last_error: Mutex::new(None) };

/// Logger of all engines of the process; only a test has more than one engine.
struct EngineLogger {
    last_error: Mutex<Option<String>>,
}

/// Sends warnings and errors of the engine to the log of this program, from the first call on.
pub(in crate::origin) fn listen() {
    static LISTENS: OnceLock<()> = OnceLock::new();
    LISTENS.get_or_init(|| {
        // A program that embeds this library may have set its own logger, which then gets the engine's messages directly.
        if log::set_logger(&LISTENER).is_ok() {
            log::set_max_level(log::LevelFilter::Warn);
        }
    });
}

/// Describes an engine error in plain words. A poisoned engine is described by its last logged error.
pub(in crate::origin) fn reason(error: &fjall::Error) -> String {
    match error {
        fjall::Error::Io(error) => error.to_string(),
        fjall::Error::Poisoned => {
            let last_error = LISTENER.last_error.lock().clone();
            last_error.unwrap_or_else(|| "the storage engine has given up".to_owned())
        }
        other => other.to_string(),
    }
}

impl log::Log for EngineLogger {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        let target = metadata.target();
        metadata.level() <= log::Level::Warn
            && ["fjall", "lsm_tree"].iter().any(|name| target.starts_with(name))
    }

    fn log(&self, record: &log::Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let message = record.args().to_string();
        if record.level() == log::Level::Error {
            tracing::error!(said = message, "storage engine failed");
            *self.last_error.lock() = Some(message);
        } else {
            tracing::warn!(said = message, "storage engine warned");
        }
    }

    fn flush(&self) {}
}
