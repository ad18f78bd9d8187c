//! How long the hot steps take: `cargo bench -p fanfare-benches`.

#[path = "../steps.rs"]
mod steps;

use criterion::Criterion;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    for mut step in steps::all() {
        criterion.bench_function(step.name, |bencher| bencher.iter(|| (step.once)()));
    }
    criterion.final_summary();
}
