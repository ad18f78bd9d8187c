//! The names that AWS gives to regions, functions, topics and roles.

/// A service that the node asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AwsService {
    Lambda,
    Sns,
    Sts,
}

impl AwsService {
    /// The service's address in the region. A region of an unknown partition needs a setting.
    pub(super) fn endpoint(self, region: &str) -> String {
        let name = match self {
            Self::Lambda => "lambda",
            Self::Sns => "sns",
            Self::Sts => "sts",
        };
        let domain = match region.split_once('-') {
            Some(("cn", _)) => "amazonaws.com.cn",
            Some(("eusc", _)) => "amazonaws.eu",
            _ => "amazonaws.com",
        };
        format!("https://{name}.{region}.{domain}/")
    }
}

/// `arn:<partition>:<service>:<region>:<account>:<resource>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Arn<'a> {
    pub(super) region: &'a str,
    pub(super) resource: &'a str,
}

impl<'a> Arn<'a> {
    /// Parses an ARN of this service; none for any other text.
    pub(super) fn of(text: &'a str, service: &str) -> Option<Self> {
        let parts: Vec<&str> = text.splitn(6, ':').collect();
        let [arn, partition, named, region, account, resource] = parts[..] else { return None };
        let is_partition = partition.starts_with("aws") && consists(partition, 3, 32, "-");
        let is_account = account.len() == 12 && account.bytes().all(|byte| byte.is_ascii_digit());
        (arn == "arn" && is_partition && named == service && is_account).then_some(Self { region, resource })
    }
}

/// Whether the text is a region. It becomes part of a host, so no other character is allowed.
pub(super) fn is_region(text: &str) -> bool {
    let is_in = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=32).contains(&text.len())
        && text.bytes().all(is_in)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

pub(super) fn is_function(text: &str) -> bool {
    let is_name = |name: &str| consists(name, 1, 140, "_-");
    match Arn::of(text, "lambda") {
        Some(arn) => is_region(arn.region) && arn.resource.strip_prefix("function:").is_some_and(is_name),
        None => is_name(text),
    }
}

pub(super) fn is_qualifier(text: &str) -> bool {
    consists(text, 1, 128, "_-$")
}

pub(super) fn is_topic(text: &str) -> bool {
    let is_name = |name: &str| consists(name.strip_suffix(".fifo").unwrap_or(name), 1, 256, "_-");
    Arn::of(text, "sns").is_some_and(|arn| is_region(arn.region) && is_name(arn.resource))
}

pub(super) fn is_role(text: &str) -> bool {
    let is_name = |name: &str| consists(name, 1, 512, "_+=,.@/-");
    Arn::of(text, "iam")
        .is_some_and(|arn| arn.region.is_empty() && arn.resource.strip_prefix("role/").is_some_and(is_name))
}

pub(super) fn is_external_id(text: &str) -> bool {
    consists(text, 2, 1224, "_+=,.@:/-")
}

pub(super) fn is_session_name(text: &str) -> bool {
    consists(text, 2, 64, "_+=,.@-")
}

/// Whether the text has only ASCII letters, digits and these marks, and `least` to `most` bytes.
fn consists(text: &str, least: usize, most: usize, marks: &str) -> bool {
    (least..=most).contains(&text.len())
        && text.chars().all(|character| character.is_ascii_alphanumeric() || marks.contains(character))
}
