//! Work for nobody, which takes all of the CPU that it is given.

use std::hint::black_box;
use std::io;
use std::thread;

use clap::Args;

use crate::Result;

#[derive(Args)]
pub struct Options {
    /// How many threads burn.
    #[arg(long)]
    pub threads: usize,
}

/// Says that it burns, and does so until stdin ends.
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
