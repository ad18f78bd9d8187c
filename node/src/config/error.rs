use std::error::Error;
use std::fmt;

/// One mistake or oddity with its place: `fanfare.toml:7: limits.nesting`, `FANFARE_LISTEN` or `--listen`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigMistake {
    pub location: String,
    pub problem: String,
}

impl ConfigMistake {
    pub fn new(location: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { location: location.into(), problem: problem.into() }
    }

    /// A mistake with the text of the error and its causes, separated by colons.
    pub fn because(location: &str, error: &dyn Error) -> Self {
        let mut problem = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            problem = format!("{problem}: {error}");
            cause = error.source();
        }
        Self::new(location, problem)
    }
}

impl fmt::Display for ConfigMistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.location, self.problem)
    }
}

/// Every mistake of the configuration, one per line; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError(pub Vec<ConfigMistake>);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, mistake) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { "\n" };
            write!(f, "{separator}{mistake}")?;
        }
        Ok(())
    }
}

impl Error for ConfigError {}
