//! Addresses that an operator opens for webhooks.

use core::net::IpAddr;
use std::fmt;
use std::str::FromStr;

/// A network or an address, with or without a port: `10.1.0.0/16`, `127.0.0.1:9000`, `[fd00::]/8`, `[::1]:9000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllowRule {
    network: IpAddr,
    prefix: u8,
    port: Option<u16>,
}

impl AllowRule {
    /// Whether the rule matches the address. An IPv4 rule does not match the IPv6-mapped form.
    pub fn names(self, address: IpAddr) -> bool {
        match (self.network, address) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                shares_prefix(network.to_bits().into(), address.to_bits().into(), self.prefix, 32)
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => {
                shares_prefix(network.to_bits(), address.to_bits(), self.prefix, 128)
            }
            _ => false,
        }
    }

    /// The port of the rule; none for every port.
    pub fn port(self) -> Option<u16> {
        self.port
    }
}

/// Whether two numbers of `bits` bits share their first `prefix` bits.
fn shares_prefix(one: u128, other: u128, prefix: u8, bits: u8) -> bool {
    (one ^ other).checked_shr(u32::from(bits - prefix)).unwrap_or(0) == 0
}

impl FromStr for AllowRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "expected an address or a network, with or without a port, such as 10.1.0.0/16, 127.0.0.1:9000 or [fd00::]/8, got `{text}`"
            )
        };
        let (address, prefix, port) = parts(text).ok_or_else(expected)?;
        let network: IpAddr = address.parse().map_err(|_| expected())?;
        let bits = if network.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            Some(prefix) => number(prefix).filter(|prefix| *prefix <= bits).ok_or_else(expected)?,
            None => bits,
        };
        let port = match port {
            Some(port) => Some(number(port).filter(|port| *port > 0).ok_or_else(expected)?),
            None => None,
        };
        if has_host_bits(network, prefix) {
            return Err(format!("`{text}` has bits of its address beyond the prefix /{prefix}"));
        }
        Ok(Self { network, prefix, port })
    }
}

/// Address, prefix and port.
fn parts(text: &str) -> Option<(&str, Option<&str>, Option<&str>)> {
    let (address, rest) = match text.strip_prefix('[') {
        Some(text) => {
            let (address, rest) = text.split_once(']')?;
            // Brackets around IPv4 would hide a mistake.
            (address.contains(':').then_some(address)?, rest)
        }
        None if text.matches(':').count() > 1 => text.split_at(text.find('/').unwrap_or(text.len())),
        None => text.split_at(text.find(['/', ':']).unwrap_or(text.len())),
    };
    let (prefix, port) = match rest.split_once(':') {
        Some((prefix, port)) => (prefix, Some(port)),
        None => (rest, None),
    };
    match prefix.strip_prefix('/') {
        Some(prefix) => Some((address, Some(prefix), port)),
        None => prefix.is_empty().then_some((address, None, port)),
    }
}

/// Digits alone, no sign.
fn number<T: FromStr>(text: &str) -> Option<T> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

fn has_host_bits(network: IpAddr, prefix: u8) -> bool {
    let (bits, width) = match network {
        IpAddr::V4(network) => (u128::from(network.to_bits()), 32),
        IpAddr::V6(network) => (network.to_bits(), 128),
    };
    bits.trailing_zeros() < width - u32::from(prefix) && bits != 0
}

impl fmt::Display for AllowRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.network {
            IpAddr::V4(network) => write!(f, "{network}/{}", self.prefix)?,
            IpAddr::V6(network) => write!(f, "[{network}]/{}", self.prefix)?,
        }
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// A network or an address: `10.1.0.0/16`, `fd00::/8`, `192.0.2.1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network(AllowRule);

impl Network {
    /// An IPv4 network does not have the mapped form of IPv6.
    pub fn contains(self, address: IpAddr) -> bool {
        self.0.names(address)
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rule: AllowRule = text.parse().map_err(|error: String| {
            error.replace(", with or without a port", "").replace("127.0.0.1:9000", "192.0.2.1")
        })?;
        match rule.port {
            None => Ok(Self(rule)),
            Some(_) => Err(format!("expected an address or a network without a port, got `{text}`")),
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_name_addresses_of_their_network_alone() {
        for (rule, shown, named, others) in [
            (
                "10.1.0.0/16",
                "10.1.0.0/16",
                vec!["10.1.0.0", "10.1.255.255"],
                vec!["10.2.0.0", "10.0.255.255"],
            ),
            ("127.0.0.1:9000", "127.0.0.1/32:9000", vec!["127.0.0.1"], vec!["127.0.0.2", "::ffff:127.0.0.1"]),
            ("10.0.0.0/8:80", "10.0.0.0/8:80", vec!["10.9.9.9"], vec!["11.0.0.0"]),
            ("0.0.0.0/0", "0.0.0.0/0", vec!["0.0.0.0", "255.255.255.255"], vec!["::1"]),
            ("[fd00::]/8", "[fd00::]/8", vec!["fd00::1", "fdff::"], vec!["fe00::", "10.0.0.1"]),
            ("fd00::/8", "[fd00::]/8", vec!["fd12::1"], vec!["fc00::1"]),
            ("::1", "[::1]/128", vec!["::1"], vec!["::2", "::"]),
            ("[::1]:443", "[::1]/128:443", vec!["::1"], vec!["::ffff:0.0.0.1"]),
            ("[fd00::]/8:443", "[fd00::]/8:443", vec!["fd00::9"], vec!["::1"]),
            ("::/0", "[::]/0", vec!["::1", "ffff::"], vec!["1.1.1.1"]),
            ("::ffff:10.0.0.0/104", "[::ffff:10.0.0.0]/104", vec!["::ffff:10.1.1.1"], vec!["10.1.1.1"]),
        ] {
            let parsed: AllowRule = rule.parse().expect(rule);
            assert_eq!(parsed.to_string(), shown);
            assert_eq!(shown.parse(), Ok(parsed), "{shown}");
            for (addresses, is_named) in [(named, true), (others, false)] {
                for address in addresses {
                    let address: IpAddr = address.parse().expect(address);
                    assert_eq!(parsed.names(address), is_named, "{rule} {address}");
                }
            }
        }
    }

    #[test]
    fn network_has_no_port() {
        let network: Network = "10.0.0.0/8".parse().expect("a network");
        assert!(network.contains([10, 1, 1, 1].into()) && !network.contains([11, 1, 1, 1].into()));
        let refused = "10.0.0.0/8:80".parse::<Network>().expect_err("it has a port");
        assert!(refused.contains("without a port"), "{refused}");
        let refused = "example.com".parse::<Network>().expect_err("it is a name");
        assert!(
            refused.contains("expected an address or a network, such as 10.1.0.0/16, 192.0.2.1 or"),
            "{refused}"
        );
    }

    #[test]
    fn other_texts_are_refused_with_a_reason() {
        for (text, reason) in [
            ("", "expected an address"),
            ("example.com", "expected an address"),
            ("10.1", "expected an address"),
            ("10.0.0.1:", "expected an address"),
            ("10.0.0.1:0", "expected an address"),
            ("10.0.0.1:65536", "expected an address"),
            ("10.0.0.1:+80", "expected an address"),
            ("10.0.0.0/33", "expected an address"),
            ("10.0.0.0/", "expected an address"),
            ("10.0.0.0/8/8", "expected an address"),
            ("[10.0.0.1]:80", "expected an address"),
            ("[::1", "expected an address"),
            ("[::1]443", "expected an address"),
            ("::/129", "expected an address"),
            ("10.1.2.3/16", "bits of its address beyond the prefix /16"),
            ("fd00::1/8", "bits of its address beyond the prefix /8"),
        ] {
            let refused = text.parse::<AllowRule>().expect_err(text);
            assert!(refused.contains(reason), "{text}: {refused}");
        }
    }
}
