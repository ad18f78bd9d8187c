use std::fmt;

/// One thing that is wrong, and where: `fanfare.toml:7: limits.nesting`, `FANFARE_LISTEN` or `--listen`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    pub place: String,
    pub problem: String,
}

impl Mistake {
    pub(super) fn new(place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { place: place.into(), problem: problem.into() }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.problem)
    }
}

/// Every mistake of the configuration, one per line; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError(pub Vec<Mistake>);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, mistake) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { "\n" };
            write!(f, "{separator}{mistake}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}
