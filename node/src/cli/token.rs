//! `fanfare token`: signs with a key, without asking a node.

use clap::{Args, Subcommand};
use fanfare_client::Key;
use fanfare_client::sign::{self, JwtParams, TokenParams};

use super::failure::{CommandOutcome, Failure};
use super::target::KeyArguments;
use super::{inspect, output};
use crate::config::parse_duration;
use crate::model::{Capability, ClientId, Limits};

/// Default capability of a JWT, which must carry one.
const ALL: &str = r#"{"*":["subscribe","publish","presence","history","amqp-subscribe"]}"#;
const JWT_TTL_MS: u64 = 3_600_000;

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct TokenArguments {
    #[command(subcommand)]
    command: Option<TokenCommand>,

    #[command(flatten)]
    key: KeyArguments,

    /// Capability of the token, as JSON: {"chat:*":["subscribe"]}; else all that the key holds (--jwt: all operations
    /// on *)
    #[arg(long, value_name = "JSON")]
    capability: Option<String>,

    /// The clientId that the token forces on a connection
    #[arg(long, value_name = "ID")]
    client_id: Option<String>,

    /// Lifetime of the token, such as 90s, 10m or 2h; at most 48h unless the node is set otherwise [default: 1h]
    #[arg(long, value_name = "DURATION", value_parser = ttl_ms)]
    ttl: Option<u64>,

    /// Sign a service JWT, ready for use, instead of a token request
    #[arg(long)]
    jwt: bool,
}

#[derive(Subcommand)]
enum TokenCommand {
    /// Says what a token holds and why a node would refuse it, without asking a node
    Inspect(inspect::InspectArguments),
}

fn ttl_ms(text: &str) -> Result<u64, String> {
    let ttl = parse_duration(text)?;
    u64::try_from(ttl.as_millis())
        .ok()
        .filter(|ms| *ms > 0)
        .ok_or_else(|| "must be longer than nothing".to_owned())
}

pub(super) fn run(arguments: TokenArguments) -> Result<CommandOutcome, Failure> {
    if let Some(TokenCommand::Inspect(inspected)) = arguments.command {
        return inspect::run(inspected);
    }
    let key: Key = arguments.key.key()?.parse().map_err(|error| unusable(&error))?;
    check(&arguments)?;
    if arguments.jwt && arguments.capability.is_none() {
        // Written to stderr, so that a script reads the token alone.
        eprintln!("signed for every operation on every channel: a key that holds less needs --capability");
    }
    let (ttl_ms_max, requested_ms) = (Limits::default().token_ttl_max_ms, arguments.ttl.unwrap_or_default());
    if requested_ms > ttl_ms_max {
        eprintln!(
            "signed for more than 48h: a node takes it only where its limits say so (token_ttl_max_ms, jwt_lifetime_ms)"
        );
    }
    let signed = if arguments.jwt { jwt(&key, arguments)? } else { token_request(&key, arguments)? };
    output::print(&format!("{signed}\n"))
}

/// Refuses arguments that every node would refuse.
fn check(arguments: &TokenArguments) -> Result<(), Failure> {
    if let Some(capability) = &arguments.capability {
        Capability::parse_json(capability)
            .map_err(|error| Failure::usage(format!("--capability: {error}")))?;
    }
    if let Some(client_id) = &arguments.client_id {
        // The length limit is a setting of the node.
        let limits = Limits { client_id_bytes: usize::MAX, ..Limits::default() };
        ClientId::new(client_id, &limits).map_err(|error| Failure::usage(format!("--client-id {error}")))?;
    }
    Ok(())
}

fn jwt(key: &Key, arguments: TokenArguments) -> Result<String, Failure> {
    let params = JwtParams {
        capability: arguments.capability.unwrap_or_else(|| ALL.to_owned()),
        client_id: arguments.client_id,
        issued_s: None,
        ttl_s: arguments.ttl.unwrap_or(JWT_TTL_MS).div_ceil(1000),
    };
    sign::jwt(key, &params).map_err(|error| unusable(&error))
}

fn token_request(key: &Key, arguments: TokenArguments) -> Result<String, Failure> {
    let params = TokenParams {
        ttl_ms: arguments.ttl,
        capability: arguments.capability,
        client_id: arguments.client_id,
        timestamp_ms: None,
        nonce: None,
    };
    let request = sign::token_request(key, params).map_err(|error| unusable(&error))?;
    serde_json::to_string(&request).map_err(|error| unusable(&error))
}

fn unusable(error: &dyn std::error::Error) -> Failure {
    Failure::usage(format!("cannot sign: {error}"))
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches as _;

    use super::*;

    fn arguments(given: &[&str]) -> TokenArguments {
        let command = TokenArguments::augment_args(clap::Command::new("token").no_binary_name(true));
        TokenArguments::from_arg_matches(&command.get_matches_from(given)).expect("good arguments")
    }

    #[test]
    fn token_that_every_node_would_refuse_is_not_signed() {
        for bad in [
            ["--capability", "demo"],
            ["--capability", r#"{"demo":["fly"]}"#],
            ["--client-id", "*"],
            ["--client-id", ""],
        ] {
            assert!(check(&arguments(&bad)).is_err(), "{bad:?}");
        }
        assert!(check(&arguments(&["--capability", r#"{"demo":["subscribe"]}"#])).is_ok());
        assert!(ttl_ms("48h").is_ok() && ttl_ms("0s").is_err());
    }

    #[test]
    fn nothing_is_sent_for_what_was_not_given() {
        let key: Key = "secret.k1".parse().expect("a good key");
        let fields = |given: &[&str]| {
            let request: serde_json::Map<String, serde_json::Value> =
                serde_json::from_str(&token_request(&key, arguments(given)).expect("signed")).expect("JSON");
            request
        };
        let mut names: Vec<_> = fields(&[]).into_iter().map(|(name, _)| name).collect();
        names.sort();
        assert_eq!(names, ["keyName", "mac", "nonce", "timestamp"]);
        let all = fields(&["--ttl", "10m", "--client-id", "ann", "--capability", r#"{ "a": ["publish"] }"#]);
        assert_eq!(all["ttl"], 600_000);
        assert_eq!(all["clientId"], "ann");
        assert_eq!(all["capability"], r#"{ "a": ["publish"] }"#);
    }

    #[test]
    fn a_ttl_is_a_duration() {
        assert_eq!(ttl_ms("1h"), Ok(3_600_000));
        assert!(ttl_ms("3600").is_err());
        assert!(ttl_ms("0s").is_err());
    }
}
