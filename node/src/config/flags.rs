//! The settings as flags of `fanfare serve` and `fanfare check-config`.

use clap::{Arg, ArgAction, ArgMatches};

use super::Config;
use super::field::Form;
use super::settings::{Setting, flag_settings};

/// The flags that were given, as text.
#[derive(Default)]
pub struct Flags(pub(super) Vec<(&'static Setting, String)>);

impl Flags {
    /// Reads the flags of a command with [`arguments`].
    pub fn of(matches: &ArgMatches) -> Self {
        let given = |setting: &'static Setting| {
            let texts: Vec<_> = matches.get_many::<String>(setting.name)?.map(String::as_str).collect();
            Some((setting, texts.join(",")))
        };
        Self(flag_settings().filter_map(given).collect())
    }
}

/// One argument for each setting that has a flag. `LoadedConfig` checks the values.
pub fn arguments() -> impl Iterator<Item = Arg> {
    let defaults = Config::default();
    flag_settings().map(move |setting| argument(setting, (setting.show)(&defaults)))
}

fn argument(setting: &'static Setting, default: Option<String>) -> Arg {
    let is_switch = setting.form == Form::Boolean;
    let shown = default.filter(|_| !is_switch).map(|text| format!(" [default: {text}]"));
    let arg = Arg::new(setting.name)
        .long(setting.flag())
        .value_name(setting.value)
        .help(format!("{}{}", setting.doc, shown.unwrap_or_default()))
        .action(if setting.form == Form::List { ArgAction::Append } else { ArgAction::Set });
    if is_switch { arg.num_args(0..=1).require_equals(true).default_missing_value("true") } else { arg }
}
