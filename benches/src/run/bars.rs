use serde::Serialize;

use super::report::Measurements;

/// Least share of the baseline's deliveries per core-second.
const FANOUT_SHARE_MIN: f64 = 0.60;
/// Greatest resident memory per idle connection, in kB.
const IDLE_KB_MAX: f64 = 6.0;
/// Least share of the bare loop's rows per second.
const PUBLISH_SHARE_MIN: f64 = 0.40;

/// Greatest CPU time of the server for a client that attaches and gets the list of 1 000 members, in ms.
const NEWCOMER_MS_MAX: f64 = 50.0;
/// Greatest ratio of the bytes that subscribers are sent while members enter to those that they have to be
/// sent.
const PRESENCE_SENT_MAX: f64 = 1.01;

/// Least number of runs from which a bar is judged.
pub(super) const RUNS_MIN: usize = 3;

/// Gives the reason why a bar of so few runs is not judged; `None` for enough runs.
pub(super) fn insufficient_runs(runs: usize) -> Option<String> {
    (runs < RUNS_MIN).then(|| format!("runs are fewer than {RUNS_MIN}: {runs}"))
}

/// Bound that the project sets itself, with the measured figure.
#[derive(Serialize)]
pub(super) struct Bar {
    pub(super) what: String,
    pub(super) measured: String,
    pub(super) bar: String,
    /// Measured figure, as a multiple of the bound.
    pub(super) of_bar: f64,
    pub(super) met: bool,
    /// Reason for which the bar is not judged.
    pub(super) not_judged: Option<String>,
}

/// Makes the bars of all measurements; a failed measurement has none.
pub(super) fn bars(measured: &Measurements) -> Vec<Bar> {
    let fanouts = measured.fanouts.iter().map(|fanout| {
        let what = format!("fan-out × {}, of the floor", fanout.subscribers);
        Bar::share(what, fanout.ratio(), FANOUT_SHARE_MIN)
    });
    let idle = measured.idle.iter().map(|idle| {
        let show = |kb: f64| format!("{kb:.2}");
        Bar::at_most("KB per idle connection".to_owned(), idle.resident_kb(), IDLE_KB_MAX, show)
    });
    let publish = measured.publish.iter().map(|publish| {
        Bar::share("acked publishes, of the bare loop".to_owned(), publish.ratio(), PUBLISH_SHARE_MIN)
    });
    let newcomers = measured.presences.iter().take(1).map(|presence| {
        let what = format!("CPU ms of a newcomer, {} members", presence.members);
        Bar::at_most(what, presence.newcomer_cpu_ms(), NEWCOMER_MS_MAX, |ms| format!("{ms:.2}"))
    });
    let entering = measured.presences.iter().map(|presence| {
        let what = format!("sent of needed, entering before {}", presence.subscribers);
        Bar::at_most(what, presence.sent_of_needed(), PRESENCE_SENT_MAX, |ratio| format!("{ratio:.4}"))
    });
    fanouts.chain(idle).chain(publish).chain(newcomers).chain(entering).collect()
}

impl Bar {
    /// Removes the verdict if there is a reason not to judge.
    pub(super) fn judged_unless(self, not_judged: Option<String>) -> Self {
        Self { not_judged, ..self }
    }

    /// Makes a bar without a figure.
    pub(super) fn without_figure(what: String, not_judged: String) -> Self {
        let none = || "–".to_owned();
        let (measured, bar, not_judged) = (none(), none(), Some(not_judged));
        Self { what, measured, bar, of_bar: f64::NAN, met: false, not_judged }
    }

    pub(super) fn share(what: String, ratio: f64, at_least: f64) -> Self {
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        Self {
            what,
            measured: percent(ratio),
            bar: format!("≥ {}", percent(at_least)),
            of_bar: ratio / at_least,
            met: ratio >= at_least,
            not_judged: None,
        }
    }

    pub(super) fn multiple(what: String, ratio: f64, at_least: f64) -> Self {
        Self {
            what,
            measured: format!("{ratio:.2} ×"),
            bar: format!("≥ {at_least} ×"),
            of_bar: ratio / at_least,
            met: ratio >= at_least,
            not_judged: None,
        }
    }

    pub(super) fn at_least(what: String, figure: f64, at_least: f64, show: impl Fn(f64) -> String) -> Self {
        Self {
            what,
            measured: show(figure),
            bar: format!("≥ {}", show(at_least)),
            of_bar: figure / at_least,
            met: figure >= at_least,
            not_judged: None,
        }
    }

    pub(super) fn at_most(what: String, figure: f64, at_most: f64, show: impl Fn(f64) -> String) -> Self {
        Self {
            what,
            measured: show(figure),
            bar: format!("≤ {at_most}"),
            of_bar: figure / at_most,
            met: figure <= at_most,
            not_judged: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_met_on_its_side() {
        for (figure, met) in [(0.59, false), (0.6, true), (0.9, true)] {
            assert_eq!(Bar::share(String::new(), figure, 0.6).met, met);
            assert_eq!(Bar::multiple(String::new(), figure, 0.6).met, met);
            assert_eq!(Bar::at_least(String::new(), figure, 0.6, |share| share.to_string()).met, met);
        }
        for (figure, met) in [(49.0, true), (50.0, true), (50.1, false), (f64::NAN, false)] {
            assert_eq!(Bar::at_most(String::new(), figure, 50.0, |ms| ms.to_string()).met, met);
        }
        assert_eq!(Bar::at_most(String::new(), 25.0, 50.0, |ms| ms.to_string()).of_bar, 0.5);
    }
}
