use super::*;

fn exit_kind(given: &[&str]) -> Result<(), clap::error::ErrorKind> {
    let all = std::iter::once("fanfare").chain(given.iter().copied());
    command().try_get_matches_from(all).map(drop).map_err(|error| error.kind())
}

#[test]
fn the_definition_of_the_commands_is_sound() {
    command().debug_assert();
}

#[test]
fn serve_needs_no_word() {
    let matches = command().get_matches_from(["fanfare", "--listen", "127.0.0.1:0", "--insecure"]);
    assert_eq!(matches.get_one::<String>("listen").map(String::as_str), Some("127.0.0.1:0"));
    assert_eq!(matches.get_one::<String>("insecure").map(String::as_str), Some("true"));
    assert!(exit_kind(&["serve", "--listen", "127.0.0.1:0"]).is_ok());
    assert!(exit_kind(&["check-config", "--auth=off"]).is_ok());
}

#[test]
fn unknown_or_missing_arguments_are_refused() {
    use clap::error::ErrorKind;
    assert_eq!(exit_kind(&["--lisen", "x"]), Err(ErrorKind::UnknownArgument));
    assert_eq!(exit_kind(&["serv"]), Err(ErrorKind::InvalidSubcommand));
    assert_eq!(exit_kind(&["sub"]), Err(ErrorKind::MissingRequiredArgument));
    assert_eq!(exit_kind(&["pub", "channel"]), Err(ErrorKind::MissingRequiredArgument));
    assert_eq!(exit_kind(&["--version"]), Err(ErrorKind::DisplayVersion));
}
