//! `fanfare backup` and `fanfare restore`: the data folder of a node, into one file and back.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal as _, Read, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use bytes::{Buf as _, Bytes};
use clap::{Arg, ArgAction, ArgMatches, Command};
use tokio::sync::mpsc;

use super::failure::{CommandOutcome, Failure};
use super::progress::ProgressReporter;
use super::running::RunningNode;
use super::{output, runtime};
use crate::app::{self, BackupError, BackupSummary, CopyProgress, StoppedNode};
use crate::config::{Config, flags};

/// Blocks in the queue between reader and writer; the reader waits when it is full.
const BLOCKS: usize = 2;

pub(super) fn commands() -> [Command; 2] {
    let file = |help| Arg::new("file").value_name("FILE").required(true).help(help);
    let check = Arg::new("check").long("check").action(ArgAction::SetTrue);
    [
        Command::new("backup")
            .about(
                "Writes what a node keeps on its disk into a file, while the node runs: the store unless nodes share \
                 it, and the outbox",
            )
            .arg(file("The file to write, readable for its owner alone; a device or a pipe; - for stdout"))
            .args(flags::arguments()),
        Command::new("restore")
            .about("Fills an empty data folder from a backup; after it was cut short, run it again")
            .arg(file("The backup; - for stdin"))
            .arg(check.help("Only reads the whole backup, and says what is wrong with it"))
            .args(flags::arguments()),
    ]
}

pub(super) fn backup(config: &Config, matches: &ArgMatches) -> Result<CommandOutcome, Failure> {
    let target = BackupDestination::of(matches)?;
    let outcome = runtime::interruptible(backed_up(config, target.clone()));
    if !matches!(outcome, Ok(CommandOutcome::Done)) {
        target.discard();
    }
    outcome
}

async fn backed_up(config: &Config, target: BackupDestination) -> Result<CommandOutcome, Failure> {
    let (give, blocks) = mpsc::channel(BLOCKS);
    let from = CliBackupSource::open(config).await?;
    let writing = target.clone();
    let written = tokio::task::spawn_blocking(move || {
        writing.write(BackupBlockReceiver { blocks, block: Bytes::new() })
    });
    let given = from.give(give).await;
    let written = written.await.map_err(|error| Failure::because("backup", &error))?;
    // A damaged backup, or a full disk, explains the error of the other side; a missing end does not.
    let summary = match (written, given) {
        (Err(BackupError::Cut(_) | BackupError::Foreign), Err(failure)) => return Err(failure),
        (written, _) => written.map_err(|error| Failure::because("backup", &error))?,
    };
    let text = format!("backup of {}", described(&summary));
    match target {
        BackupDestination::Stdout => output::report(&text),
        BackupDestination::Special(_) | BackupDestination::File { .. } => {
            return output::print(&format!("{text}\n"));
        }
    }
    Ok(CommandOutcome::Done)
}

/// The process that has the databases open.
enum CliBackupSource {
    Running(RunningNode),
    Stopped(StoppedNode),
}

impl CliBackupSource {
    /// Opens the folder, whose lock shows whether a node runs on it: `node.json` may be of another machine.
    async fn open(config: &Config) -> Result<Self, Failure> {
        let own = config.clone();
        let opened = tokio::task::spawn_blocking(move || StoppedNode::open(&own)).await;
        let closed = match opened.map_err(|error| Failure::because("backup", &error))? {
            Ok(node) => return Ok(Self::Stopped(node)),
            Err(error) => Failure::because("backup", &error),
        };
        RunningNode::find(config).await?.map(Self::Running).ok_or(closed)
    }

    async fn give(self, to: mpsc::Sender<Bytes>) -> Result<(), Failure> {
        match self {
            Self::Running(node) => node.stream("/backup", to).await,
            Self::Stopped(node) => {
                let written = tokio::task::spawn_blocking(move || node.write(BackupBlockSender(to))).await;
                let written = written.map_err(|error| Failure::because("backup", &error))?;
                written.map_err(|error| Failure::because("backup", &error))
            }
        }
    }
}

/// A writer that passes its bytes to another thread.
struct BackupBlockSender(mpsc::Sender<Bytes>);

impl Write for BackupBlockSender {
    fn write(&mut self, block: &[u8]) -> io::Result<usize> {
        let given = self.0.blocking_send(Bytes::copy_from_slice(block));
        given.map(|()| block.len()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A reader of another task's blocks, for a thread that may block.
struct BackupBlockReceiver {
    blocks: mpsc::Receiver<Bytes>,
    block: Bytes,
}

impl Read for BackupBlockReceiver {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.block.is_empty() {
            let Some(block) = self.blocks.blocking_recv() else { return Ok(0) };
            self.block = block;
        }
        let length = self.block.len().min(buffer.len());
        self.block.copy_to_slice(&mut buffer[..length]);
        Ok(length)
    }
}

/// The destination of a backup.
#[derive(Debug, Clone)]
enum BackupDestination {
    Stdout,
    /// An existing device or pipe.
    Special(PathBuf),
    /// A file that is written as `aside` in the same folder, and renamed when complete.
    File {
        path: PathBuf,
        aside: PathBuf,
    },
}

impl BackupDestination {
    fn of(matches: &ArgMatches) -> Result<Self, Failure> {
        match &**file(matches)? {
            "-" if io::stdout().is_terminal() => {
                Err(Failure::usage("backup: stdout is a terminal; name a file, or a program that reads it"))
            }
            "-" => Ok(Self::Stdout),
            path => Self::of_path(Path::new(path)),
        }
    }

    fn of_path(path: &Path) -> Result<Self, Failure> {
        let refused =
            |error: &io::Error| Failure::because(&format!("cannot write {}", path.display()), error);
        match fs::metadata(path).map(|found| found.file_type()) {
            Ok(found) if found.is_dir() => Err(refused(&io::ErrorKind::IsADirectory.into())),
            Ok(found) if !found.is_file() => Ok(Self::Special(path.to_owned())),
            // Replaces the target of a symbolic link, not the link.
            Ok(_) => fs::canonicalize(path).map(Self::beside).map_err(|error| refused(&error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::beside(path.to_owned())),
            Err(error) => Err(refused(&error)),
        }
    }

    fn beside(path: PathBuf) -> Self {
        let mut aside = path.as_os_str().to_owned();
        aside.push(format!(".{:016x}.new", u64::from_be_bytes(crate::model::random_bytes())));
        Self::File { path, aside: aside.into() }
    }

    /// Writes the backup and checks it on the way, so that an incomplete one is not accepted.
    fn write(&self, from: impl Read) -> Result<BackupSummary, BackupError> {
        let unwritten = |path: &Path, error: io::Error| BackupError::Unwritten {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        match self {
            Self::Stdout => copied(from, io::stdout().lock(), Path::new("-")),
            Self::Special(path) => {
                let file = OpenOptions::new().write(true).open(path);
                copied(from, file.map_err(|error| unwritten(path, error))?, path)
            }
            Self::File { path, aside } => {
                let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(aside);
                let file = file.map_err(|error| unwritten(path, error))?;
                let summary = copied(from, &file, path)?;
                let kept =
                    file.sync_all().and_then(|()| fs::rename(aside, path)).and_then(|()| sync_folder(path));
                kept.map_err(|error| unwritten(path, error))?;
                Ok(summary)
            }
        }
    }

    /// Removes an incomplete file.
    fn discard(&self) {
        if let Self::File { aside, .. } = self {
            fs::remove_file(aside).ok();
        }
    }
}

/// Syncs the folder, so that the name of the file survives a power loss.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

/// Writes a backup and checks it on the way.
fn copied(from: impl Read, to: impl Write, path: &Path) -> Result<BackupSummary, BackupError> {
    let mut copying = TeeReader { from, to, is_unwritten: false };
    match checked(&mut copying) {
        Err(BackupError::Unread(error)) if copying.is_unwritten => {
            Err(BackupError::Unwritten { path: path.to_owned(), reason: error.to_string() })
        }
        outcome => outcome,
    }
}

/// A reader that writes everything it reads.
struct TeeReader<R, W> {
    from: R,
    to: W,
    /// Whether a read error is really one of the writing.
    is_unwritten: bool,
}

impl<R: Read, W: Write> Read for TeeReader<R, W> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.from.read(buffer)?;
        let written = self.to.write_all(&buffer[..length]);
        let written = written.and_then(|()| if length == 0 { self.to.flush() } else { Ok(()) });
        self.is_unwritten = written.is_err();
        written.map(|()| length)
    }
}

fn checked(from: impl Read) -> Result<BackupSummary, BackupError> {
    with_progress(|on_progress| app::check_backup(from, on_progress))
}

/// Reports the progress on stderr.
fn with_progress<T>(act: impl FnOnce(&mut dyn FnMut(u64, u64)) -> T) -> T {
    let mut reporter = ProgressReporter::default();
    let outcome = act(&mut |rows, of| reporter.report(CopyProgress { rows, of, before: 0 }));
    reporter.end();
    outcome
}

pub(super) fn restore(config: &Config, matches: &ArgMatches) -> Result<CommandOutcome, Failure> {
    let path = file(matches)?;
    let from: Box<dyn Read> = match &**path {
        "-" => Box::new(io::stdin().lock()),
        path => Box::new(
            File::open(path).map_err(|error| Failure::because(&format!("cannot read {path}"), &error))?,
        ),
    };
    if matches.get_flag("check") {
        let summary = checked(from).map_err(|error| Failure::because("restore", &error))?;
        return output::print(&format!("whole: {}\n", described(&summary)));
    }
    let restored = with_progress(|on_progress| app::restore(config, from, on_progress));
    let summary = restored.map_err(|error| Failure::because("restore", &error))?;
    output::report(&format!(
        "tokens that were revoked after {} are good again here: revoke them once more when the node runs",
        date(summary.header.taken_ms)
    ));
    output::print(&format!("{} has the {}\n", config.data_dir.display(), described(&summary)))
}

fn file(matches: &ArgMatches) -> Result<&String, Failure> {
    matches.get_one::<String>("file").ok_or_else(|| Failure::usage("FILE is missing"))
}

fn described(BackupSummary { header, totals, bytes }: &BackupSummary) -> String {
    let databases = [("store", &header.store_format), ("outbox", &header.outbox_format)];
    let names: Vec<_> =
        databases.iter().filter(|(_, format)| format.is_some()).map(|(name, _)| *name).collect();
    let names = if names.is_empty() { "nothing".to_owned() } else { names.join(" and ") };
    let node_id = output::printable(&header.node_id);
    let (rows, taken) = (totals.rows, date(header.taken_ms));
    format!("{names} of node {node_id} as of {taken}: {rows} rows, {bytes} bytes")
}

fn date(epoch_ms: u64) -> String {
    // Times beyond the calendar's range are not shown as dates.
    match UNIX_EPOCH.checked_add(Duration::from_millis(epoch_ms)) {
        Some(time) if epoch_ms < 253_402_300_800_000 => httpdate::fmt_http_date(time),
        _ => format!("{epoch_ms} ms"),
    }
}
