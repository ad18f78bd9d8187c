//! The documented sample file.

use std::fmt::Write as _;

use super::Config;
use super::field::Form;
use super::settings::{Setting, settings};

const HEAD: &str = "\
# Fanfare: every setting with its default.
#
# Give this file with --config or FANFARE_CONFIG. Each setting is also a flag (admin_listen: --admin-listen) and
# a variable (FANFARE_ADMIN_LISTEN); those of [limits] are variables only (FANFARE_LIMITS_NESTING). A flag beats
# the environment, the environment beats this file; an empty variable counts as not given, one of no setting is
# a warning. Relative paths start in the working directory. `fanfare check-config` checks all of it;
# `fanfare config-reference` prints this page.
";

const LIMITS_HEAD: &str = "
[limits]
# Bytes may be written with a unit (\"64KiB\"), milliseconds as a duration (\"30s\").
";

/// A configuration file that holds every default, with a sentence about each.
pub fn reference() -> String {
    let defaults = Config::default();
    let mut out = HEAD.to_owned();
    let mut table = None;
    for setting in settings().filter(|setting| setting.in_file()) {
        if setting.table != table {
            table = setting.table;
            out.push_str(LIMITS_HEAD);
        }
        write_setting(&mut out, setting, (setting.show)(&defaults));
    }
    out
}

fn write_setting(out: &mut String, setting: &Setting, default: Option<String>) {
    let Setting { name, value, doc, .. } = setting;
    let written = match default {
        None if setting.form == Form::List => format!("# {name} = [\"…\"]"),
        None => format!("# {name} = \"…\""),
        Some(text) if setting.form == Form::Text => format!("{name} = {}", toml::Value::String(text)),
        Some(text) => format!("{name} = {text}"),
    };
    write!(out, "\n# {doc}.\n# Value: {}\n{written}\n", value.to_ascii_lowercase())
        .expect("a string takes all text");
}
