//! Banner that a node prints on stdout once it is up.

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::net::SocketAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::target::reachable;
use crate::app::Addresses;
use crate::config::{Config, StoreKind};

pub(super) struct Banner<'a> {
    pub(super) config: &'a Config,
    pub(super) node_id: String,
    pub(super) addresses: Addresses,
    /// Key of a development node.
    pub(super) key: Option<String>,
}

impl Banner<'_> {
    pub(super) fn text(&self) -> String {
        let mut text = self.facts();
        match &self.key {
            Some(key) if std::io::stdout().is_terminal() => {
                text += &development(key, self.addresses.listen, self.config, &program());
            }
            Some(_) => {
                let file = self.config.development_key_file();
                writeln!(text, "  key       in {}", file.display()).expect("a string takes all text");
            }
            None => {}
        }
        text
    }

    fn facts(&self) -> String {
        let Addresses { listen, admin, .. } = self.addresses;
        let data_dir = self.config.data_dir.display();
        let store = match self.config.store {
            StoreKind::Embedded => "embedded",
            StoreKind::None => "none, without history",
            StoreKind::Scylla => "shared, in ScyllaDB or Cassandra",
        };
        let node_id = &self.node_id;
        let (http, ws) = schemes(self.config);
        let open =
            if self.config.auth { "" } else { "  auth      off: whoever connects may do everything\n" };
        format!(
            "fanfare {version}\n  node      {node_id}\n  clients   {http}://{listen}  {ws}://{listen}/realtime\n  \
             admin     http://{admin}\n  store     {store}\n  data      {data_dir}\n{open}",
            version = env!("CARGO_PKG_VERSION"),
        )
    }
}

/// URL schemes of HTTP and of the socket.
fn schemes(config: &Config) -> (&'static str, &'static str) {
    if config.tls_files().is_some() { ("https", "wss") } else { ("http", "ws") }
}

/// The key and three commands that work as printed, in another terminal of the same folder.
fn development(key: &str, listen: SocketAddr, config: &Config, program: &str) -> String {
    let basic = STANDARD.encode(key);
    let node = format!("{}://{}", schemes(config).0, reachable(listen));
    let channel = format!("{node}/api/channels/demo");
    let mut given = match config.data_dir.to_str() {
        Some("./data") => String::new(),
        _ => format!(" --data-dir {}", quoted(&config.data_dir.to_string_lossy())),
    };
    if config.tls_files().is_some() {
        given += &format!(" --url {node}");
    }
    format!(
        "
development key, also in dev-key of the data folder:
  {key}

in another terminal: follow a channel, publish to it, read it back
  {program} sub{given} demo
  curl -H 'authorization: Basic {basic}' -d '{{\"name\":\"greeting\",\"data\":\"hello\"}}' {channel}/publish
  curl -H 'authorization: Basic {basic}' {channel}/history
"
    )
}

/// The command that starts this program again from the same folder.
fn program() -> String {
    if std::env::var_os("CARGO").is_some() {
        let profile = if cfg!(debug_assertions) { "" } else { " --release" };
        return format!("cargo run{profile} -q --");
    }
    let name = std::env::args().next();
    name.map_or_else(|| "fanfare".to_owned(), |name| quoted(&name))
}

/// The text as one word of a shell.
fn quoted(word: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"/._-:@%+,=".contains(&b);
    if !word.is_empty() && word.bytes().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_stand_as_they_are_pasted() {
        let listen = "0.0.0.0:8080".parse().expect("an address");
        let text = development("secret.dev", listen, &Config::default(), "fanfare");
        let commands: Vec<_> =
            text.lines().skip_while(|line| !line.contains(" sub ")).map(str::trim).collect();
        assert_eq!(
            commands,
            [
                "fanfare sub demo",
                "curl -H 'authorization: Basic c2VjcmV0LmRldg==' -d '{\"name\":\"greeting\",\"data\":\"hello\"}' \
                 http://127.0.0.1:8080/api/channels/demo/publish",
                "curl -H 'authorization: Basic c2VjcmV0LmRldg==' http://127.0.0.1:8080/api/channels/demo/history",
            ]
        );
        let in_folder = |folder: &str| Config { data_dir: folder.into(), ..Config::default() };
        let text = development("secret.dev", listen, &in_folder("/my data"), "cargo run -q --");
        assert!(text.contains("  cargo run -q -- sub --data-dir '/my data' demo\n"), "{text}");
        let tls =
            Config { tls_cert: Some("a.crt".into()), tls_key: Some("a.key".into()), ..Config::default() };
        let text = development("secret.dev", listen, &tls, "fanfare");
        assert!(text.contains("  fanfare sub --url https://127.0.0.1:8080 demo\n"), "{text}");
        assert!(!text.contains("http://"), "{text}");
    }

    #[test]
    fn words_are_quoted_where_a_shell_would_part_them() {
        assert_eq!(quoted("target/release/fanfare"), "target/release/fanfare");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
