//! Secrets that come from a file or a variable.

/// The secret without a byte order mark, surrounding space and line ends, which editors and shells leave behind.
///
/// # Errors
/// The secret is in quotes, which would be part of it. The text says so and contains nothing of the secret.
pub fn bare_secret(text: &str) -> Result<&str, &'static str> {
    let bare = text.trim_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
    let is_quoted =
        ['"', '\''].iter().any(|quote| bare.len() > 1 && bare.starts_with(*quote) && bare.ends_with(*quote));
    if is_quoted {
        Err("stands in quotes, which would be part of the secret: leave them out")
    } else {
        Ok(bare)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_secret_trims_surroundings_and_refuses_quotes() {
        for text in ["a b", "a b\n", "a b\r\n", " a b\t", "\u{feff}a b\n", "\u{feff} a b \u{feff}\n\n"] {
            assert_eq!(bare_secret(text), Ok("a b"), "{text:?}");
        }
        for text in ["", " \n", "\u{feff}\n"] {
            assert_eq!(bare_secret(text), Ok(""), "{text:?}");
        }
        for text in ["a\"", "\"", "'", "\"a'", "a\"b"] {
            assert_eq!(bare_secret(text), Ok(text));
        }
        for text in ["\"a\"", "'a b'\n", "\u{feff}\"a\" ", "\"\""] {
            let refused = bare_secret(text).expect_err(text);
            assert!(refused.contains("quotes"), "{refused}");
        }
    }
}
