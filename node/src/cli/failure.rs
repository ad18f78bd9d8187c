//! Outcomes of a command.

use std::error::Error;
use std::fmt::Write as _;
use std::io;
use std::process::ExitCode;

use clap::error::{ContextKind, ErrorKind};

use super::output;
use super::runtime::StopSignal;
use crate::tasks;

/// End of a command that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CommandOutcome {
    Done,
    /// Ended by a signal, before the work was done.
    Interrupted(StopSignal),
}

impl CommandOutcome {
    pub(super) fn exit_code(self) -> ExitCode {
        match self {
            Self::Done => ExitCode::SUCCESS,
            // The exit codes that shells use for signals.
            Self::Interrupted(StopSignal::Interrupt) => ExitCode::from(130),
            Self::Interrupted(StopSignal::Terminate) => ExitCode::from(143),
        }
    }
}

/// Failure of a command, in words for the terminal.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// Failure with exit code 1.
    Failed(String),
    /// Wrong use or configuration, with exit code 2.
    Usage(String),
}

impl Failure {
    pub(super) fn failed(text: impl Into<String>) -> Self {
        Self::Failed(text.into())
    }

    pub(super) fn usage(text: impl Into<String>) -> Self {
        Self::Usage(text.into())
    }

    /// `context`, then the error and its causes, separated by colons.
    pub(super) fn because(context: &str, error: &dyn Error) -> Self {
        let mut text = format!("{context}: {error}");
        let mut cause = error.source();
        while let Some(error) = cause {
            write!(text, ": {error}").expect("a string takes all text");
            cause = error.source();
        }
        Self::Failed(text)
    }

    /// The failure of a client call; wrong use if the client could not even begin with its input.
    pub(super) fn of_client(context: &str, error: &fanfare_client::Error) -> Self {
        use fanfare_client::Error;
        match error {
            Error::BadUrl(_) | Error::BadKey | Error::BadValue(_) => {
                Self::usage(format!("{context}: {error}"))
            }
            Error::Unreachable { address, source } if source.kind() == io::ErrorKind::ConnectionRefused => {
                Self::failed(format!("cannot connect to {address}: connection refused; is the node running?"))
            }
            Error::Untrusted { unknown_issuer: true, .. } => Self::failed(format!(
                "{context}: {error}; name the certificate of the one that did by --ca-cert, or its own if it signed itself"
            )),
            _ => Self::because(context, error),
        }
    }

    /// Reports a command line without work to do: help and version go to stdout, a mistake to stderr.
    pub(super) fn report_arguments(error: clap::Error) -> ExitCode {
        if !error.use_stderr() {
            error.print().ok();
            return ExitCode::SUCCESS;
        }
        let command = error.get(ContextKind::InvalidSubcommand).map(ToString::to_string);
        let command = command.filter(|_| error.kind() == ErrorKind::ArgumentConflict);
        let report = move || {
            error.print().ok();
            if let Some(command) = command {
                output::report(&format!("put the flags after the command: {command} [FLAGS]"));
            }
        };
        tasks::at_most(output::READ_WITHIN, report).ok();
        ExitCode::from(2)
    }

    /// Writes the reason to stderr, with a bounded wait for the reader.
    pub(super) fn report(self) -> ExitCode {
        let (text, code) = match self {
            Self::Failed(text) => (text, 1),
            Self::Usage(text) => (text, 2),
        };
        output::report_all(text.lines().map(str::to_owned).collect());
        ExitCode::from(code)
    }
}
