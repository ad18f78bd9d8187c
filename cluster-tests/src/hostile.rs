//! Channel names that have a meaning if they are not escaped: in paths, headers, routing keys, forms and patterns.

/// Names that are valid.
pub fn channels() -> Vec<String> {
    let names =
        ["#", "a.b", "*", "\"quoted\"", "\u{1f600}", "%2F", "a%2Fb", "a/b", "a&b=c+d ", "x\u{7f}\u{85}y"];
    let longest = ["n".repeat(512), "\u{1f600}".repeat(128)];
    names.into_iter().map(str::to_owned).chain(longest).collect()
}

/// Names that are refused: empty, more than 512 bytes, with a control character of C0, or reserved.
pub fn refused_channels() -> Vec<String> {
    let names = ["", "x\u{0}y", "x\u{1f}y", "line\r\nx-service-channel: other", "[reserved]"];
    names.into_iter().map(str::to_owned).chain(["n".repeat(513)]).collect()
}

/// Gives the name as a string of TOML.
pub fn toml(name: &str) -> String {
    serde_json::Value::from(name).to_string().replace('\u{7f}', "\\u007f")
}
