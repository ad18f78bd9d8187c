//! API keys: `<secret>.<keyName>`, parted at the last dot.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// An API key, taken apart. `Debug` does not show the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Key {
    secret: String,
    name: String,
}

impl Key {
    /// Gives the secret, with which requests and tokens are signed.
    pub fn secret(&self) -> &str {
        &self.secret
    }

    /// Gives the key's name, which is not secret: it stands in requests, tokens and stored rows.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl FromStr for Key {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text.rsplit_once('.') {
            Some((secret, name)) if !secret.is_empty() && !name.is_empty() => {
                Ok(Self { secret: secret.into(), name: name.into() })
            }
            _ => Err(Error::BadKey),
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("name", &self.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_dot_parts_secret_and_name() {
        let key: Key = "a.b.c.k1".parse().expect("a key");
        assert_eq!((key.secret(), key.name()), ("a.b.c", "k1"));
        assert!(!format!("{key:?}").contains("a.b.c"));
        for bad in ["", "k1", ".k1", "secret."] {
            assert!(bad.parse::<Key>().is_err(), "{bad:?}");
        }
    }
}
