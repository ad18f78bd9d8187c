//! Threads that take all of the CPU that they get, as a load beside a measurement.

use std::hint::black_box;
use std::io;
use std::thread;

use clap::Args;

use crate::Result;

#[derive(Args)]
pub struct Options {
    /// Number of threads.
    #[arg(long)]
    pub threads: usize,
}

/// Says on stdout that the threads run, and burns until stdin ends.
pub fn burn(options: &Options) -> Result<()> {
    for _ in 0..options.threads {
        thread::spawn(|| {
            let mut number = 0_u64;
            loop {
                number = black_box(number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
            }
        });
    }
    println!("burning");
    io::copy(&mut io::stdin(), &mut io::sink())?;
    Ok(())
}
