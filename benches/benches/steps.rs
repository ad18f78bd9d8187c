//! Time that the hot steps take: `cargo bench -p fanfare-benches`.

#[path = "../steps.rs"]
mod steps;

use criterion::{Criterion, Throughput};

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("steps");
    for step in steps::all() {
        let mut once = (step.make)();
        group.throughput(Throughput::Elements(step.times.into()));
        group.bench_function(step.name, |bencher| bencher.iter(&mut once));
    }
    group.finish();
    criterion.final_summary();
}
