//! `fanfare key new`.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::failure::{CommandOutcome, Failure};
use super::output;
use crate::model::random_bytes;

pub(super) fn run() -> Result<CommandOutcome, Failure> {
    output::print(&text(random_bytes(), random_bytes()))
}

/// The key string on the first line, then the lines for an account in the directory file.
fn text(secret: [u8; 32], name: [u8; 5]) -> String {
    let secret = URL_SAFE_NO_PAD.encode(secret);
    let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        r#"{secret}.k{name}

[[tenants.accounts.keys]]
name = "k{name}"
secret = "{secret}"
status = "active"
capability = {{ "*" = ["subscribe", "publish", "presence", "history", "amqp-subscribe"] }}
"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_hold_the_parts_of_the_key() {
        let text = text([0xfb; 32], [1, 2, 3, 4, 0xff]);
        let (key, lines) = text.split_once("\n\n").expect("the key, then its lines");
        let (secret, name) = key.rsplit_once('.').expect("a secret and a name");
        assert_eq!(name, "k01020304ff");
        let directory: toml::Table = lines.parse().expect("the lines are TOML");
        let entry = &directory["tenants"]["accounts"]["keys"][0];
        assert_eq!(entry["name"].as_str(), Some(name));
        assert_eq!(entry["secret"].as_str(), Some(secret));
    }
}
