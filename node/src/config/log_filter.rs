//! The log filter. Its own parser is too lenient: it takes every unknown level for a target.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use super::nearest::{nearest, nearest_spelling};

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
/// Crates that log; others may log too.
const TARGETS: [&str; 12] = [
    "fanfare",
    "scylla",
    "chitchat",
    "fjall",
    "lsm_tree",
    "hyper",
    "hyper_util",
    "h2",
    "tonic",
    "axum",
    "rustls",
    "tokio",
];

/// Parses the filter, without space between and around its parts.
pub(super) fn read_log_filter(text: &str) -> Result<String, String> {
    let parts: Vec<_> = text.split(',').map(read_part).collect::<Result<_, _>>()?;
    let filter = parts.join(",");
    match EnvFilter::builder().parse(&filter) {
        Ok(_) => Ok(filter),
        Err(_) => Err(format!("expected a level or a filter such as info,fanfare=debug, got `{text}`")),
    }
}

fn read_part(part: &str) -> Result<String, String> {
    let Some((target, level)) = part.rsplit_once('=') else {
        return read_level(part.trim()).map(str::to_owned);
    };
    let (target, level) = (target.trim(), level.trim());
    if is_target(target) {
        return Ok(format!("{target}={}", read_level(level)?));
    }
    Err(format!(
        "`{target}` is no part of the program that can log; expected a filter such as info,fanfare=debug, parted by commas"
    ))
}

fn read_level(text: &str) -> Result<&str, String> {
    if !text.is_empty() && text.parse::<LevelFilter>().is_ok() {
        return Ok(text);
    }
    let levels = LEVELS.join(", ");
    match nearest(text, LEVELS.into_iter()) {
        Some(meant) => Err(format!("`{text}` is no level, did you mean {meant}? Levels are {levels}")),
        None => Err(format!("`{text}` is no level; levels are {levels}, as in info,fanfare=debug")),
    }
}

/// Whether the text is a module path, with or without a span.
fn is_target(text: &str) -> bool {
    let (path, span) = text.split_once('[').map_or((text, ""), |(path, span)| (path, span));
    let is_path = path.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-:".contains(&b));
    is_path
        && !text.is_empty()
        && (span.is_empty() != text.contains('['))
        && (span.is_empty() || span.ends_with(']'))
}

/// Warnings about log lines that a valid filter leaves out, probably by mistake.
pub(super) fn odd(filter: &str) -> Vec<String> {
    let targets: Vec<_> =
        filter.split(',').filter_map(|part| part.rsplit_once('=')).map(|(target, _)| target).collect();
    let is_for_all = targets.len() < filter.split(',').count();
    let mut odd = Vec::new();
    if !is_for_all && !targets.iter().any(|target| "fanfare".starts_with(target)) {
        odd.push(format!("leaves out most lines of the node, errors too; say info,{filter} to have them"));
    }
    for target in targets {
        let name = target.split([':', '[']).next().unwrap_or_default();
        let is_known = TARGETS.iter().any(|known| known.starts_with(name));
        let meant = nearest_spelling(name, TARGETS.into_iter()).filter(|_| !is_known);
        odd.extend(meant.map(|meant| format!("nothing logs as `{name}`, did you mean {meant}?")));
    }
    odd
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_filter_refuses_unknown_level_and_suggests_nearest() {
        for (text, reason) in [
            ("warning", "`warning` is no level, did you mean warn?"),
            ("inof", "`inof` is no level, did you mean info?"),
            ("information", "`information` is no level, did you mean info?"),
            ("err", "`err` is no level, did you mean error?"),
            ("info,fanfare", "`fanfare` is no level; levels are off, error, warn, info, debug, trace"),
            ("fanfare=inof", "`inof` is no level, did you mean info?"),
            ("fanfare=", "`` is no level; levels are"),
            ("info,", "`` is no level; levels are"),
            ("", "`` is no level; levels are"),
            (" ", "`` is no level; levels are"),
            ("info fanfare", "`info fanfare` is no level, did you mean info?"),
            ("6", "`6` is no level; levels are"),
            ("fanfare[x]", "`fanfare[x]` is no level; levels are"),
            ("info;fanfare=debug", "`info;fanfare` is no part of the program that can log"),
            ("info fanfare=debug", "`info fanfare` is no part of the program that can log"),
            ("=debug", "`` is no part of the program that can log"),
            ("a=b=debug", "`a=b` is no part of the program that can log"),
            ("fanfare[=debug", "`fanfare[` is no part of the program that can log"),
            ("fanfare[x=debug", "`fanfare[x` is no part of the program that can log"),
        ] {
            let refused = read_log_filter(text).expect_err(text);
            assert!(refused.starts_with(reason), "{text}: {refused}");
        }
    }

    #[test]
    fn log_filter_accepts_valid_text_and_drops_spaces() {
        for (text, filter) in [
            (" info", "info"),
            ("WARN\n", "WARN"),
            ("off", "off"),
            ("3", "3"),
            ("info, fanfare = debug", "info,fanfare=debug"),
            ("info,fanfare::edge=trace,h2=off", "info,fanfare::edge=trace,h2=off"),
            ("info,[request{id}]=debug", "info,[request{id}]=debug"),
        ] {
            assert_eq!(read_log_filter(text).as_deref(), Ok(filter), "{text}");
        }
    }

    #[test]
    fn a_filter_that_leaves_the_node_out_is_odd() {
        for good in
            ["info", "off", "warn,scylla=debug", "fanfare=debug", "fan=debug", "info,tokio_rustls=debug"]
        {
            assert_eq!(odd(good), [""; 0], "{good}");
        }
        for (filter, warning) in [
            (
                "scylla=debug",
                "leaves out most lines of the node, errors too; say info,scylla=debug to have them",
            ),
            ("fanfare::edge=debug", "leaves out most lines of the node"),
            ("info,fanfaer=debug", "nothing logs as `fanfaer`, did you mean fanfare?"),
            ("info,hyper-util=debug", "nothing logs as `hyper-util`, did you mean hyper_util?"),
        ] {
            let odd = odd(filter);
            assert!(odd.len() == 1 && odd[0].starts_with(warning), "{filter}: {odd:?}");
        }
    }
}
