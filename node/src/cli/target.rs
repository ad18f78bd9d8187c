//! Target node and credential of a client command.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use clap::Args;
use fanfare_client::{Credential, Options};
use serde::Deserialize;

use super::failure::Failure;
use crate::config::{development_key_file, node_file};
use crate::model::bare_secret;

const KEY_VARIABLE: &str = "FANFARE_KEY";
const TOKEN_VARIABLE: &str = "FANFARE_TOKEN";

#[derive(Args)]
pub(super) struct KeyArguments {
    /// The API key, <secret>.<keyName>; else FANFARE_KEY, else the key of the development node
    // A secret may begin with a hyphen.
    #[arg(long, value_name = "KEY", allow_hyphen_values = true)]
    key: Option<String>,

    /// The data folder of a node on this machine; else FANFARE_DATA_DIR [default: ./data]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

#[derive(Args)]
pub(super) struct NodeArguments {
    /// http://host:port or ws://host:port, under TLS https:// or wss://; else FANFARE_URL, else the node that runs in the data folder
    #[arg(long, value_name = "URL")]
    url: Option<String>,

    /// Trust the certificates of this file (PEM) to sign the node's, instead of those of the system
    #[arg(long, value_name = "FILE")]
    ca_cert: Option<PathBuf>,

    #[command(flatten)]
    key: KeyArguments,

    /// A service JWT in place of a key; else FANFARE_TOKEN
    #[arg(long, value_name = "TOKEN", allow_hyphen_values = true, conflicts_with = "key")]
    token: Option<String>,

    /// Sends no credential, to a node that runs with --auth off
    #[arg(long, conflicts_with_all = ["key", "token"])]
    no_key: bool,
}

impl KeyArguments {
    pub(super) fn key(&self) -> Result<String, Failure> {
        let given = self.key.clone().map_or_else(|| secret_variable(KEY_VARIABLE), |key| Ok(Some(key)))?;
        match given {
            Some(key) => Ok(key),
            None => self.development_key("no --key and no FANFARE_KEY"),
        }
    }

    /// The development node's key. `missing` names the setting that was not given instead.
    fn development_key(&self, missing: &str) -> Result<String, Failure> {
        let file = development_key_file(&self.data_dir());
        let text = std::fs::read_to_string(&file).map_err(|error| {
            let file = file.display();
            Failure::failed(format!(
                "{missing}, and the key of a development node cannot be read from {file}: {error}"
            ))
        })?;
        let key = bare_secret(&text)
            .map_err(|reason| Failure::failed(format!("what {} holds {reason}", file.display())))?;
        Ok(key.to_owned())
    }

    fn data_dir(&self) -> PathBuf {
        data_dir(self.data_dir.clone())
    }
}

impl NodeArguments {
    pub(super) fn options(&self) -> Result<Options, Failure> {
        let url = self.url()?;
        let credential = self.credential(&url)?;
        let mut options = Options::new(url, credential);
        if let Some(file) = &self.ca_cert {
            if !options.url.starts_with("https://") && !options.url.starts_with("wss://") {
                return Err(Failure::usage(format!("--ca-cert: {} is not under TLS", options.url)));
            }
            options.authorities = Some(std::fs::read(file).map_err(|error| {
                Failure::usage(format!("--ca-cert: cannot read {}: {error}", file.display()))
            })?);
        }
        Ok(options)
    }

    /// The credential. A flag takes precedence over the environment. The development key is sent only to a node on this machine.
    fn credential(&self, url: &str) -> Result<Credential, Failure> {
        if self.no_key {
            return Ok(Credential::None);
        }
        let (key, token) = match (&self.key.key, &self.token) {
            (None, None) => (secret_variable(KEY_VARIABLE)?, secret_variable(TOKEN_VARIABLE)?),
            (key, token) => (key.clone(), token.clone()),
        };
        match (key, token) {
            (Some(_), Some(_)) => Err(Failure::usage(
                "FANFARE_KEY and FANFARE_TOKEN are both set: unset one of them, or name the credential by --key or --token",
            )),
            (Some(key), None) => Ok(Credential::Key(key)),
            (None, Some(token)) => service_jwt(token),
            (None, None) if !is_local(url) => Err(Failure::usage(format!(
                "{url} is another machine: give a credential for it by --key, --token, FANFARE_KEY or FANFARE_TOKEN, or --no-key"
            ))),
            (None, None) => {
                let missing = "no --key, --token or --no-key, no FANFARE_KEY or FANFARE_TOKEN";
                self.key.development_key(missing).map(Credential::Key)
            }
        }
    }

    fn url(&self) -> Result<String, Failure> {
        match self.url.clone().or_else(|| variable("FANFARE_URL")) {
            Some(url) if has_known_scheme(&url) => Ok(url),
            Some(_) => Err(Failure::usage(
                "the address of the node begins with http:// or ws://, under TLS with https:// or wss://",
            )),
            None => running_node(&node_file(&self.key.data_dir())),
        }
    }
}

fn has_known_scheme(url: &str) -> bool {
    url.split_once("://").is_some_and(|(scheme, _)| matches!(scheme, "http" | "ws" | "https" | "wss"))
}

/// Refuses a key or a token request that was given as a token by mistake, before it is sent anywhere.
fn service_jwt(token: String) -> Result<Credential, Failure> {
    let part = |part: &str| {
        !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
    };
    if token.split('.').count() == 3 && token.split('.').all(part) {
        return Ok(Credential::Token(token));
    }
    Err(Failure::usage(
        "what was given as the token is no service JWT: `fanfare token --jwt` signs one, and a token request is exchanged for one at /keys/{keyName}/requestToken",
    ))
}

fn is_local(url: &str) -> bool {
    let authority =
        url.split_once("://").map_or(url, |(_, rest)| rest).split(['/', '?', '#']).next().unwrap_or_default();
    // The host comes after the user: localhost:x@node.example is not this machine.
    if authority.contains('@') {
        return false;
    }
    if let Ok(address) = authority.parse::<SocketAddr>() {
        return address.ip().is_loopback();
    }
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    host == "localhost"
        || host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The address in the file that a running node writes.
fn running_node(file: &Path) -> Result<String, Failure> {
    #[derive(Deserialize)]
    struct ListenNodeFile {
        listen: SocketAddr,
        #[serde(default)]
        tls: bool,
    }

    let failed = |reason: String| {
        let file = file.display();
        Failure::failed(format!(
            "no --url and no FANFARE_URL, and no running node is named by {file}: {reason}"
        ))
    };
    let text = std::fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
    let node: ListenNodeFile = serde_json::from_str(&text).map_err(|error| failed(error.to_string()))?;
    let scheme = if node.tls { "https" } else { "http" };
    Ok(format!("{scheme}://{}", reachable(node.listen)))
}

/// The address of a listener for clients on its own machine: loopback in place of all addresses.
pub(super) fn reachable(listen: SocketAddr) -> SocketAddr {
    match listen {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => (Ipv4Addr::LOCALHOST, v4.port()).into(),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => (Ipv6Addr::LOCALHOST, v6.port()).into(),
        other => other,
    }
}

/// The data folder of a node on this machine.
pub(super) fn data_dir(given: Option<PathBuf>) -> PathBuf {
    let given = given.or_else(|| variable("FANFARE_DATA_DIR").map(PathBuf::from));
    given.unwrap_or_else(|| PathBuf::from("./data"))
}

/// The variable as a secret; an empty one counts as not given.
fn secret_variable(name: &str) -> Result<Option<String>, Failure> {
    let Some(text) = variable(name) else { return Ok(None) };
    match bare_secret(&text) {
        Ok("") => Ok(None),
        Ok(secret) => Ok(Some(secret.to_owned())),
        Err(reason) => Err(Failure::usage(format!("{name} {reason}"))),
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_node_is_found_by_its_file() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = node_file(folder.path());
        let Err(Failure::Failed(text)) = running_node(&file) else {
            unreachable!("the folder names no node")
        };
        assert!(text.contains("no --url") && text.contains("node.json"), "{text}");
        let json = r#"{"nodeId":"n","pid":1,"listen":"[::]:8080","admin":"127.0.0.1:8081"}"#;
        std::fs::write(&file, json).expect("the folder is writable");
        assert_eq!(running_node(&file), Ok("http://[::1]:8080".to_owned()));
        std::fs::write(&file, json.replace('}', r#","tls":true}"#)).expect("the folder is writable");
        assert_eq!(running_node(&file), Ok("https://[::1]:8080".to_owned()));
    }

    #[test]
    fn a_key_is_read_from_the_data_folder() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let arguments = |key: Option<&str>| KeyArguments {
            key: key.map(str::to_owned),
            data_dir: Some(folder.path().to_path_buf()),
        };
        let Err(Failure::Failed(text)) = arguments(None).key() else { unreachable!("the folder has no key") };
        assert!(text.contains("dev-key") && !text.contains("--no-key"), "{text}");
        std::fs::write(folder.path().join("dev-key"), "secret.dev\n").expect("the folder is writable");
        assert_eq!(arguments(None).key(), Ok("secret.dev".to_owned()));
        assert_eq!(arguments(Some("other.k")).key(), Ok("other.k".to_owned()));
    }

    #[test]
    fn the_key_of_this_machine_stays_on_it() {
        for local in ["http://127.0.0.1:80", "ws://localhost/x", "wss://[::1]:443?a=b", "http://localhost#x"]
        {
            assert!(is_local(local), "{local}");
        }
        for other in
            ["http://node.example:80", "http://localhost:80@node.example", "ws://127.0.0.1@10.0.0.1:80"]
        {
            assert!(!is_local(other), "{other}");
        }
    }
}
