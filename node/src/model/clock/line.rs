//! The expiry line, by which rows expire: follows the system clock while it drifts, but not when it steps.

/// Difference from which the system clock counts as stepped. The line follows this much at once, and this much in each hour.
pub const STEP_MS: u64 = 60_000;
const HOUR_MS: u64 = 3_600_000;

/// State of the expiry line after a reading. Times are milliseconds: since the epoch for the system clock, since boot for the other one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExpiryLine {
    /// Difference of the line from the time since boot.
    offset_ms: i64,
    step: Option<ClockStep>,
    /// The difference that the line may still follow, and the time of that count.
    allowance_ms: u64,
    counted_ms: u64,
    hold_ms: u64,
    steps: u64,
}

/// A step: the system clock has left the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ClockStep {
    offset_ms: i64,
    since_ms: i64,
    cause: ClockStepCause,
}

/// Cause of a difference between the system clock and the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClockStepCause {
    /// The clock was set, or is wrong.
    Stepped,
    /// The machine was off, or the node ran on another one: a change of the clock cannot be told from the time that passed.
    Away,
}

/// State of the line at one moment, for the next start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockCheckpoint {
    pub boot_ms: u64,
    pub line_ms: u64,
    /// The stepped system clock, and how long it has kept its new time.
    pub stepped: Option<(u64, u64)>,
    /// Whether the step is due to the machine having been off.
    pub is_away: bool,
}

impl ExpiryLine {
    pub(super) fn new(wall_ms: u64, boot_ms: u64, hold_ms: u64) -> Self {
        let offset_ms = apart(wall_ms, boot_ms);
        Self { offset_ms, step: None, allowance_ms: STEP_MS, counted_ms: boot_ms, hold_ms, steps: 0 }
    }

    /// Continues the line after a restart. `is_same_boot`: the time since boot has not begun again.
    pub(super) fn after(
        left: ClockCheckpoint,
        is_same_boot: bool,
        (wall_ms, boot_ms): (u64, u64),
        hold_ms: u64,
    ) -> Self {
        let is_same_boot = is_same_boot && boot_ms >= left.boot_ms;
        // After another boot the time that has passed is unknown.
        let offset_ms = apart(left.line_ms, if is_same_boot { left.boot_ms } else { boot_ms });
        let mut line = Self { offset_ms, ..Self::new(wall_ms, boot_ms, hold_ms) };
        line.step = left.stepped.filter(|_| is_same_boot).map(|(stepped_ms, held_ms)| ClockStep {
            offset_ms: apart(stepped_ms, left.boot_ms),
            since_ms: signed(left.boot_ms) - signed(held_ms),
            cause: if left.is_away { ClockStepCause::Away } else { ClockStepCause::Stepped },
        });
        line.see(wall_ms, boot_ms);
        if let Some(step) = &mut line.step
            && !is_same_boot
            && step.offset_ms > offset_ms
        {
            (step.cause, line.steps) = (ClockStepCause::Away, 0);
        }
        line
    }

    /// Reads both clocks and returns the time by which rows expire: the earlier one of the line and the system clock.
    pub(super) fn see(&mut self, wall_ms: u64, boot_ms: u64) -> u64 {
        let offset_ms = apart(wall_ms, boot_ms);
        if is_near(offset_ms, self.offset_ms) {
            self.step = None;
            self.follow(offset_ms, boot_ms);
        } else {
            match self.step {
                Some(step) if is_near(offset_ms, step.offset_ms) => {
                    if signed(boot_ms) - step.since_ms >= signed(self.hold_ms) {
                        (self.offset_ms, self.step) = (offset_ms, None);
                    }
                }
                _ => {
                    self.steps += 1;
                    self.step = Some(ClockStep {
                        offset_ms,
                        since_ms: signed(boot_ms),
                        cause: ClockStepCause::Stepped,
                    });
                }
            }
        }
        at(self.offset_ms.min(offset_ms), boot_ms)
    }

    fn follow(&mut self, offset_ms: i64, boot_ms: u64) {
        let regained_ms = boot_ms.saturating_sub(self.counted_ms) / (HOUR_MS / STEP_MS);
        if regained_ms > 0 {
            self.allowance_ms = self.allowance_ms.saturating_add(regained_ms).min(STEP_MS);
            self.counted_ms = boot_ms;
        }
        let by_ms = (offset_ms - self.offset_ms).unsigned_abs().min(self.allowance_ms);
        self.allowance_ms -= by_ms;
        self.offset_ms += (offset_ms - self.offset_ms).signum() * signed(by_ms);
    }

    /// The line itself, whatever the system clock says.
    pub(super) fn at(&self, boot_ms: u64) -> u64 {
        at(self.offset_ms, boot_ms)
    }

    pub(super) fn offset_ms(&self) -> i64 {
        self.offset_ms
    }

    /// Counts how often the system clock has left the line, or a later time that it had kept.
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// The lead of the system clock over the line and its cause, while it has left the line.
    pub(super) fn stepped(&self) -> Option<(i64, ClockStepCause)> {
        self.step.map(|step| (step.offset_ms - self.offset_ms, step.cause))
    }

    pub(super) fn checkpoint(&self, boot_ms: u64) -> ClockCheckpoint {
        let stepped = self.step.map(|step| {
            let held_ms = u64::try_from(signed(boot_ms) - step.since_ms).unwrap_or(0);
            (at(step.offset_ms, boot_ms), held_ms)
        });
        let is_away = self.step.is_some_and(|step| step.cause == ClockStepCause::Away);
        ClockCheckpoint { boot_ms, line_ms: self.at(boot_ms), stepped, is_away }
    }
}

fn is_near(one_ms: i64, other_ms: i64) -> bool {
    one_ms.abs_diff(other_ms) <= STEP_MS
}

fn apart(wall_ms: u64, boot_ms: u64) -> i64 {
    signed(wall_ms) - signed(boot_ms)
}

fn at(offset_ms: i64, boot_ms: u64) -> u64 {
    u64::try_from(signed(boot_ms).saturating_add(offset_ms)).unwrap_or(0)
}

/// A signed value, limited to half the range so that a difference of two does not overflow.
fn signed(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX).min(i64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE_MS: u64 = 1_767_225_600_000;
    const DAY_MS: i64 = 24 * 3_600_000;

    fn line() -> ExpiryLine {
        ExpiryLine::new(BASE_MS, 0, HOUR_MS)
    }

    fn wall(boot_ms: u64, ahead_ms: i64) -> u64 {
        (BASE_MS + boot_ms).saturating_add_signed(ahead_ms)
    }

    #[test]
    fn a_drift_is_followed() {
        let mut line = line();
        // 1 ms in each of 100 000 seconds, and back.
        for second in 1..=100_000_u64 {
            let ahead_ms = second.min(100_000 - second).cast_signed();
            line.see(wall(second * 1_000, ahead_ms), second * 1_000);
            assert_eq!(line.at(second * 1_000), wall(second * 1_000, ahead_ms), "{second}");
        }
        assert_eq!((line.steps(), line.stepped()), (0, None));
    }

    #[test]
    fn a_second_of_difference_is_no_step_and_90_seconds_are() {
        for (ahead_ms, steps) in [(1_000, 0), (-1_000, 0), (60_000, 0), (90_000, 1), (-90_000, 1)] {
            let mut line = line();
            line.see(wall(1_000, ahead_ms), 1_000);
            assert_eq!(line.steps(), steps, "{ahead_ms}");
        }
    }

    #[test]
    fn many_small_steps_are_one() {
        let mut line = line();
        for minute in 1..=10 {
            line.see(wall(minute * 60_000, minute.cast_signed() * 50_000), minute * 60_000);
        }
        assert!(line.at(600_000) <= wall(600_000, 2 * STEP_MS.cast_signed()), "followed too far");
        assert!(line.steps() >= 1);
    }

    #[test]
    fn the_earlier_time_counts_until_a_step_has_held() {
        for ahead_ms in [90_000, 600_000, 5 * DAY_MS, -90_000, -600_000, -5 * DAY_MS] {
            let mut line = line();
            for minute in 1..=60 {
                let boot_ms = minute * 60_000;
                assert_eq!(line.see(wall(boot_ms, ahead_ms), boot_ms), wall(boot_ms, ahead_ms.min(0)));
                assert_eq!(line.at(boot_ms), wall(boot_ms, 0));
            }
            assert_eq!(line.stepped(), Some((ahead_ms, ClockStepCause::Stepped)));
            let boot_ms = 61 * 60_000;
            assert_eq!(line.see(wall(boot_ms, ahead_ms), boot_ms), wall(boot_ms, ahead_ms), "it has held");
            assert_eq!((line.steps(), line.stepped()), (1, None));
        }
    }

    #[test]
    fn one_wrong_reading_leaves_nothing_behind() {
        let mut line = line();
        assert_eq!(line.see(wall(1_000, 5 * DAY_MS), 1_000), wall(1_000, 0));
        let late_ms = 2 * HOUR_MS;
        assert_eq!(line.see(wall(late_ms, 0), late_ms), wall(late_ms, 0));
        assert_eq!((line.steps(), line.stepped()), (1, None));
        line.see(wall(late_ms + 1, 5 * DAY_MS), late_ms + 1);
        assert!(line.stepped().is_some(), "a second one has to hold by itself");
    }

    #[test]
    fn a_step_goes_on_over_a_restart() {
        let mut line = line();
        line.see(wall(1_000, 5 * DAY_MS), 1_000);
        let left = line.checkpoint(30 * 60_000);
        let at = |boot_ms| (wall(boot_ms, 5 * DAY_MS), boot_ms);
        let mut again = ExpiryLine::after(left, true, at(40 * 60_000), HOUR_MS);
        assert_eq!(again.at(40 * 60_000), wall(40 * 60_000, 0));
        let (wall_ms, boot_ms) = at(HOUR_MS + 1_001);
        assert_eq!(again.see(wall_ms, boot_ms), wall_ms, "it has held for an hour in both runs");
        assert_eq!(again.steps(), 0, "no new one");
    }

    #[test]
    fn a_step_while_the_node_was_down_is_found() {
        for ahead_ms in [5 * DAY_MS, -5 * DAY_MS] {
            let left = line().checkpoint(1_000);
            let again = ExpiryLine::after(left, true, (wall(9_000, ahead_ms), 9_000), HOUR_MS);
            assert_eq!((again.steps(), again.stepped()), (1, Some((ahead_ms, ClockStepCause::Stepped))));
            assert_eq!(again.at(9_000), wall(9_000, 0));
        }
    }

    #[test]
    fn a_machine_that_was_off_has_not_stepped_and_waits() {
        let left = line().checkpoint(1_000);
        // Booted five days later, with 500 ms on the other clock.
        let mut again = ExpiryLine::after(left, false, (wall(1_000, 5 * DAY_MS), 500), HOUR_MS);
        assert_eq!((again.steps(), again.stepped()), (0, Some((5 * DAY_MS, ClockStepCause::Away))));
        assert_eq!(again.at(500), wall(1_000, 0));
        let third = ExpiryLine::after(again.checkpoint(500), true, (wall(1_100, 5 * DAY_MS), 600), HOUR_MS);
        assert_eq!(
            (third.steps(), third.stepped()),
            (0, Some((5 * DAY_MS, ClockStepCause::Away))),
            "after one more restart"
        );
        let boot_ms = 500 + HOUR_MS;
        let wall_ms = wall(1_000, 5 * DAY_MS) + HOUR_MS;
        assert_eq!(again.see(wall_ms, boot_ms), wall_ms);
        let back = ExpiryLine::after(left, false, (wall(1_000, -5 * DAY_MS), 500), HOUR_MS);
        assert_eq!(back.stepped(), Some((-5 * DAY_MS, ClockStepCause::Stepped)), "no time passes backwards");
    }
}
