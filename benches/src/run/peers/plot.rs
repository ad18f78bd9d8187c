//! Fan-out as pictures: one for each workload, with a bar for each server.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;

use super::super::report::{deliveries_per_core_second, median};
use super::contender::Contender;
use super::measure::FixedRate;
use super::workload::{self, Workload};

const WIDTH: u32 = 800;
/// Width of the column of names; the bars begin after it.
const NAMES: u32 = 290;
const BARS: u32 = 420;
const ROW: u32 = 20;
const TITLE: u32 = 34;
const FOOTER: u32 = 28;

/// Writes `fan-out-….svg` into the folder, which is created, and gives the number of pictures. `footer` says where and
/// when they were measured. Pictures of an earlier run are removed, since the page does not describe them.
pub(super) fn write(fan_outs: &[FixedRate], folder: &Path, footer: &str) -> io::Result<usize> {
    fs::create_dir_all(folder)?;
    let mut drawn = BTreeSet::new();
    for fixed in fan_outs {
        let name = file_name(&fixed.workload);
        fs::write(folder.join(&name), picture(fixed, footer))?;
        drawn.insert(name);
    }
    let all = workload::of_parts(|_| true).into_iter().map(|workload| file_name(&workload));
    for of_another in all.filter(|name| !drawn.contains(name)) {
        match fs::remove_file(folder.join(of_another)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(fan_outs.len())
}

fn file_name(workload: &Workload) -> String {
    let (channels, rate, bytes) = (workload.channels, workload.deliveries_per_s, workload.message_bytes);
    let groups = if workload.groups { "-in-groups" } else { "" };
    format!("fan-out-{channels}-channels{groups}-{rate}-per-s-{bytes}-bytes.svg")
}

fn picture(FixedRate { workload, rows }: &FixedRate, footer: &str) -> String {
    let measured = || rows.iter().filter(|row| !row.runs.is_empty());
    let cost = measured().map(|row| (row.contender, 1e6 / median(&row.runs, deliveries_per_core_second)));
    let p99 = measured().map(|row| (row.contender, median(&row.runs, |run| run.p99_ms)));
    let panels = [
        Panel { title: "µs of server CPU per delivery", bars: cost.collect(), scale: |value| value },
        Panel { title: "p99 of the delivery, ms (logarithmic)", bars: p99.collect(), scale: decades },
    ];
    let height: u32 = TITLE + panels.iter().map(Panel::height).sum::<u32>() + FOOTER;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    text(&mut svg, 8, 20, "start", "bold", &workload.title());
    let mut top = TITLE;
    for panel in &panels {
        panel.draw(top, &mut svg);
        top += panel.height();
    }
    text(&mut svg, 8, top + 18, "start", "normal", footer);
    svg + "</svg>\n"
}

struct Panel {
    title: &'static str,
    bars: Vec<(Contender, f64)>,
    /// Length of a bar for a value, in units of its own.
    scale: fn(f64) -> f64,
}

/// Gives the length of a bar on a logarithmic scale from a tenth of a millisecond.
fn decades(ms: f64) -> f64 {
    (ms.max(0.1) * 10.0).log10() + 0.1
}

impl Panel {
    fn height(&self) -> u32 {
        TITLE + self.bars.len() as u32 * ROW
    }

    fn draw(&self, top: u32, svg: &mut String) {
        text(svg, NAMES, top + 20, "start", "normal", self.title);
        let longest =
            self.bars.iter().map(|(_, value)| (self.scale)(*value)).fold(f64::MIN_POSITIVE, f64::max);
        for (nth, (contender, value)) in (0..).zip(&self.bars) {
            let y = top + TITLE + nth * ROW;
            let width = ((self.scale)(*value) / longest * f64::from(BARS)).clamp(1.0, f64::from(BARS)) as u32;
            text(svg, NAMES - 8, y + 12, "end", "normal", contender.name());
            let color = if contender.is_peer() { "#7a8ca3" } else { "#d9732b" };
            let _ = writeln!(
                svg,
                "<rect x=\"{NAMES}\" y=\"{y}\" width=\"{width}\" height=\"{}\" fill=\"{color}\"/>",
                ROW - 5
            );
            text(svg, NAMES + width + 6, y + 12, "start", "normal", &format!("{value:.2}"));
        }
    }
}

fn text(svg: &mut String, x: u32, y: u32, anchor: &str, weight: &str, text: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\" font-weight=\"{weight}\">{}</text>",
        text.replace('&', "&amp;").replace('<', "&lt;")
    );
}

#[cfg(test)]
mod tests {
    use super::super::bars::tests::run;
    use super::super::measure::Row;
    use super::*;
    use crate::load::FanoutOutcome;

    fn row(contender: Contender, server_cpu_s: f64, p99_ms: f64) -> Row<FanoutOutcome> {
        Row { runs: vec![run(server_cpu_s, p99_ms)], ..Row::new(contender) }
    }

    #[test]
    fn a_bar_is_as_long_as_what_it_stands_for() {
        let mut rows = vec![row(Contender::Fanfare, 1.0, 1.0), row(Contender::Nats, 4.0, 1_000.0)];
        rows.push(Row::new(Contender::Baseline));
        let svg =
            picture(&FixedRate { workload: workload::many_channels(100_000, 128), rows }, "a machine, a day");
        assert!(svg.contains(">a machine, a day</text>"), "{svg}");
        let bars = svg.matches("height=\"15\"").count();
        assert_eq!(bars, 4, "two panels, and no bar of who has no figure: {svg}");
        for width in [BARS / 4, BARS] {
            assert!(svg.contains(&format!("width=\"{width}\" height=\"15\"")), "{svg}");
        }
        assert!(svg.contains(">4.00</text>") && svg.contains(">1000.00</text>"), "{svg}");
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    }

    #[test]
    fn each_workload_has_a_file_of_its_own() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let all = workload::of_parts(|_| true).into_iter();
        let fan_outs: Vec<FixedRate> = all
            .map(|workload| FixedRate { workload, rows: vec![row(Contender::Fanfare, 1.0, 1.0)] })
            .collect();
        let plots = folder.path().join("plots");
        let write = |fan_outs| write(fan_outs, &plots, "").expect("a folder that can be written");
        let files = || fs::read_dir(&plots).expect("the folder was made").count();
        assert_eq!((write(&fan_outs), files()), (fan_outs.len(), fan_outs.len()));
        fs::write(plots.join("another.svg"), "").expect("a file beside them");
        assert_eq!((write(&fan_outs[..1]), files()), (1, 2), "and what is no picture of a workload stays");
    }
}
