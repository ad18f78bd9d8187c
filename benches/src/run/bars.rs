use serde::Serialize;

use super::report::Measured;

/// Share of the floor's deliveries per core-second.
const FANOUT_SHARE_MIN: f64 = 0.60;
/// Resident memory per idle connection.
const IDLE_KB_MAX: f64 = 6.0;
/// Share of the bare loop's rows per second.
const PUBLISH_SHARE_MIN: f64 = 0.40;

/// A figure that the project holds itself to.
#[derive(Serialize)]
pub(super) struct Bar {
    pub(super) what: String,
    pub(super) measured: String,
    pub(super) bar: String,
    pub(super) met: bool,
}

/// The bars of all that was measured; what failed has none.
pub(super) fn bars(measured: &Measured) -> Vec<Bar> {
    let fanouts = measured.fanouts.iter().map(|fanout| {
        let what = format!("fan-out × {}, of the floor", fanout.subscribers);
        Bar::share(what, fanout.ratio(), FANOUT_SHARE_MIN)
    });
    let idle = measured.idle.iter().map(|idle| Bar {
        what: "KB per idle connection".to_owned(),
        measured: format!("{:.2}", idle.resident_kb()),
        bar: format!("≤ {IDLE_KB_MAX}"),
        met: idle.resident_kb() <= IDLE_KB_MAX,
    });
    let publish = measured.publish.iter().map(|publish| {
        Bar::share("acked publishes, of the bare loop".to_owned(), publish.ratio(), PUBLISH_SHARE_MIN)
    });
    fanouts.chain(idle).chain(publish).collect()
}

impl Bar {
    fn share(what: String, ratio: f64, at_least: f64) -> Self {
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        Self {
            what,
            measured: percent(ratio),
            bar: format!("≥ {}", percent(at_least)),
            met: ratio >= at_least,
        }
    }
}
