//! JSON to MessagePack.

use crate::json;

/// Converts a valid JSON text to MessagePack. A number that fits i64 or u64 becomes an integer, every other
/// number a finite f64. The result for an invalid text is meaningless.
pub fn from_json(json: &str) -> Vec<u8> {
    let mut counts = container_counts(json.as_bytes()).into_iter();
    let mut out = Vec::with_capacity(json.len());
    for token in Tokens::new(json) {
        match token {
            Token::Open(bracket) => write_container(&mut out, bracket, counts.next().unwrap_or(0)),
            Token::String(literal) => write_string(&mut out, literal),
            Token::Scalar(literal) => write_scalar(&mut out, literal),
            Token::Close | Token::Comma | Token::Colon => {}
        }
    }
    out
}

const VECTOR: &str = "a vector takes every byte";

fn write_container(out: &mut Vec<u8>, bracket: u8, count: u32) {
    if bracket == b'{' {
        rmp::encode::write_map_len(out, count).expect(VECTOR);
    } else {
        rmp::encode::write_array_len(out, count).expect(VECTOR);
    }
}

fn write_string(out: &mut Vec<u8>, literal: &str) {
    if literal.contains('\\') {
        let text: String = serde_json::from_str(literal).unwrap_or_default();
        rmp::encode::write_str(out, &text).expect(VECTOR);
    } else {
        rmp::encode::write_str(out, literal.trim_matches('"')).expect(VECTOR);
    }
}

fn write_scalar(out: &mut Vec<u8>, literal: &str) {
    match literal {
        "null" => rmp::encode::write_nil(out).expect(VECTOR),
        "true" | "false" => rmp::encode::write_bool(out, literal == "true").expect(VECTOR),
        // An integer would lose the sign.
        "-0" => rmp::encode::write_f64(out, -0.0).expect(VECTOR),
        number => {
            if let Ok(value) = number.parse::<u64>() {
                rmp::encode::write_uint(out, value).expect(VECTOR);
            } else if let Ok(value) = number.parse::<i64>() {
                rmp::encode::write_sint(out, value).expect(VECTOR);
            } else {
                let value = number.parse::<f64>().unwrap_or(0.0).clamp(f64::MIN, f64::MAX);
                rmp::encode::write_f64(out, value).expect(VECTOR);
            }
        }
    }
}

/// Counts the elements or pairs of each container, in the order of the opening brackets.
fn container_counts(bytes: &[u8]) -> Vec<u32> {
    let Ok(text) = std::str::from_utf8(bytes) else { return Vec::new() };
    let (mut counts, mut open, mut opened) = (Vec::new(), Vec::new(), false);
    for token in Tokens::new(text) {
        if opened && !matches!(token, Token::Close) {
            *counts.last_mut().expect("a container was just opened") = 1;
        }
        opened = matches!(token, Token::Open(_));
        match token {
            Token::Open(_) => {
                open.push(counts.len());
                counts.push(0);
            }
            Token::Close => drop(open.pop()),
            Token::Comma => {
                if let Some(index) = open.last() {
                    counts[*index] += 1;
                }
            }
            Token::Colon | Token::String(_) | Token::Scalar(_) => {}
        }
    }
    counts
}

enum Token<'a> {
    Open(u8),
    Close,
    Comma,
    Colon,
    /// String literal, quotes included.
    String(&'a str),
    /// Number, `true`, `false` or `null`.
    Scalar(&'a str),
}

struct Tokens<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Tokens<'a> {
    fn new(text: &'a str) -> Self {
        Self { text, at: 0 }
    }

    fn string_length(rest: &[u8]) -> usize {
        let mut at = 1;
        while let Some(byte) = rest.get(at) {
            match byte {
                b'"' => return at + 1,
                b'\\' => at += 2,
                _ => at += 1,
            }
        }
        rest.len()
    }

    fn scalar_length(rest: &[u8]) -> usize {
        let is_end =
            |byte: &u8| matches!(byte, b',' | b']' | b'}' | b':' | b'"' | b' ' | b'\t' | b'\n' | b'\r');
        rest.iter().skip(1).position(is_end).map_or(rest.len(), |length| length + 1)
    }
}

impl<'a> Iterator for Tokens<'a> {
    type Item = Token<'a>;

    fn next(&mut self) -> Option<Token<'a>> {
        self.at = json::space_end(self.text.as_bytes(), self.at);
        let rest = &self.text[self.at..];
        let (length, token) = match rest.bytes().next()? {
            bracket @ (b'{' | b'[') => (1, Token::Open(bracket)),
            b'}' | b']' => (1, Token::Close),
            b',' => (1, Token::Comma),
            b':' => (1, Token::Colon),
            b'"' => {
                let length = Self::string_length(rest.as_bytes());
                (length, Token::String(rest.get(..length)?))
            }
            _ => {
                let length = Self::scalar_length(rest.as_bytes());
                (length, Token::Scalar(rest.get(..length)?))
            }
        };
        self.at += length;
        Some(token)
    }
}
