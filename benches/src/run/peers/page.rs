//! Page with the figures of a run, beside the pictures.

use std::fs;
use std::io;
use std::path::Path;

use super::super::machine::Machine;
use super::contender::ServerDescription;

/// Writes `peers.md` into the folder; `tables` is the output of the command, with bars and failures.
pub(super) fn write(
    folder: &Path,
    machine: &Machine,
    contenders: &[ServerDescription],
    tables: &str,
) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join("peers.md"), page(machine, contenders, tables))
}

fn page(machine: &Machine, contenders: &[ServerDescription], tables: &str) -> String {
    let contenders: String = contenders.iter().map(|contender| format!("{contender}\n")).collect();
    format!(
        "# Beside the peers\n\nWritten by the command below, which makes it anew each time; what is measured, and how, is told in \
         `docs/benchmarks.md`.\n\n```\n{machine}{contenders}```\n\n{}\n",
        tables.trim_end()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_names_the_machine_before_its_figures() {
        let machine = Machine::look(Path::new("no-node"));
        let folder = tempfile::tempdir().expect("a folder");
        let within = folder.path().join("new");
        write(&within, &machine, &[], "| a table |\n\n").expect("a folder that can be written");
        let page = fs::read_to_string(within.join("peers.md")).expect("the page");
        let (before, after) = page.split_once("```\n\n").expect("a block with the machine");
        assert!(before.starts_with("# ") && before.contains(&machine.to_string()), "{page}");
        assert_eq!(after, "| a table |\n");
    }
}
