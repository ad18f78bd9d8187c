//! Address guard: webhooks may reach public addresses, and those that the operator opens.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use url::{Host, Url};

use super::AllowRule;

/// Port of mail servers, which take commands from any connection; it needs an explicit rule.
const SMTP: u16 = 25;

/// The rules of one port. Applied to the address that a connection is opened to, after DNS.
#[derive(Debug, Clone)]
pub struct AddressGuard {
    /// Rules of this port alone.
    rules: Vec<AllowRule>,
    port: u16,
    is_open: bool,
}

impl AddressGuard {
    pub fn of(rules: &[AllowRule], port: u16) -> Self {
        let is_of_port = |rule: &&AllowRule| rule.port().map_or(port != SMTP, |named| named == port);
        Self { rules: rules.iter().filter(is_of_port).copied().collect(), port, is_open: false }
    }

    /// A guard that allows every address.
    pub fn open() -> Self {
        Self { rules: Vec::new(), port: 0, is_open: true }
    }

    /// Whether no address is open, because the port needs a rule and there is none.
    pub fn is_shut(&self) -> bool {
        !self.is_open && self.port == SMTP && self.rules.is_empty()
    }

    pub fn allows(&self, address: IpAddr) -> bool {
        self.is_open
            || (self.port != SMTP && is_public(address))
            || self.rules.iter().any(|rule| rule.names(address))
    }
}

/// The address in a URL whose host needs no DNS.
pub fn literal_address(url: &Url) -> Option<IpAddr> {
    match url.host()? {
        Host::Ipv4(address) => Some(address.into()),
        Host::Ipv6(address) => Some(address.into()),
        Host::Domain(_) => None,
    }
}

fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

/// IPv4 networks that are not public, each with the length of its prefix.
const SPECIAL_V4: [(Ipv4Addr, u32); 18] = [
    // This network, private, shared, loopback, link-local (metadata too).
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    // Protocol assignments, with the metadata of Oracle's cloud; AS112; relays of 6to4; AMT.
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 31, 196, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    (Ipv4Addr::new(192, 52, 193, 0), 24),
    // Documentation, benchmarks.
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    // Multicast; reserved, with broadcast.
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
    // The address at which Azure serves each machine, including its metadata.
    (Ipv4Addr::new(168, 63, 129, 16), 32),
];

fn is_public_v4(address: Ipv4Addr) -> bool {
    let is_in = |(network, prefix): &(Ipv4Addr, u32)| {
        (network.to_bits() ^ address.to_bits()).checked_shr(32 - prefix).unwrap_or(0) == 0
    };
    !SPECIAL_V4.iter().any(is_in)
}

/// Whether an IPv6 address is public: in the global unicast range 2000::/3, except protocol assignments (with Teredo), documentation and
/// 6to4. Loopback, mapped and compatible IPv4, NAT64, discard-only, unique-local, link-local, site-local and multicast are outside that
/// range.
fn is_public_v6(address: Ipv6Addr) -> bool {
    let [first, second, ..] = address.segments();
    match first {
        // 2001::/23 and 2001:db8::/32.
        0x2001 => second > 0x1ff && second != 0xdb8,
        0x2002 => false,
        // 3fff::/20.
        0x3fff => second > 0xfff,
        _ => first >> 13 == 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(rules: &[&str], port: u16) -> AddressGuard {
        let rules: Vec<_> = rules.iter().map(|rule| rule.parse().expect("a rule")).collect();
        AddressGuard::of(&rules, port)
    }

    fn allows(guard: &AddressGuard, address: &str) -> bool {
        guard.allows(address.parse().expect(address))
    }

    #[test]
    fn only_public_addresses_are_open_without_rules() {
        let guard = guard(&[], 443);
        for special in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "10.255.255.255",
            "100.64.0.1",
            "100.100.100.200",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.254",
            "168.63.129.16",
            "169.254.169.254",
            "169.254.0.1",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.192",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.7",
            "203.0.113.7",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::8.8.8.8",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::ffff:8.8.8.8",
            "::ffff:0:127.0.0.1",
            "64:ff9b::127.0.0.1",
            "64:ff9b::8.8.8.8",
            "64:ff9b:1::a00:1",
            "100::1",
            "2001::1",
            "2001:0:4136:e378:8000:63bf:3fff:fdd2",
            "2001:2::1",
            "2001:20::1",
            "2001:1ff:ffff::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:808:808::1",
            "3fff::1",
            "3fff:fff::1",
            "5f00::1",
            "fc00::1",
            "fd00:ec2::254",
            "fdff::1",
            "fe80::1",
            "febf::1",
            "fec0::1",
            "ff02::1",
            "ff0e::1",
        ] {
            assert!(!allows(&guard, special), "{special}");
        }
        for public in [
            "1.1.1.1",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.1",
            "100.63.255.255",
            "100.128.0.1",
            "128.0.0.1",
            "168.63.129.15",
            "169.253.255.255",
            "172.15.0.1",
            "172.32.0.1",
            "192.0.1.1",
            "192.167.1.1",
            "198.20.0.1",
            "223.255.255.255",
            "2001:200::1",
            "2001:4860:4860::8888",
            "2001:db9::1",
            "2003::1",
            "2606:4700::1111",
            "3fff:1000::1",
        ] {
            assert!(allows(&guard, public), "{public}");
        }
    }

    #[test]
    fn a_rule_opens_exactly_the_addresses_it_names() {
        let rules = ["10.1.0.0/16", "127.0.0.1:9000", "[fd00::]/8", "192.168.0.1:25"];
        for (port, open, closed) in [
            (
                80,
                &["10.1.2.3", "fd00::1", "8.8.8.8"][..],
                &["10.2.0.1", "127.0.0.1", "192.168.0.1", "::1"][..],
            ),
            (9000, &["127.0.0.1", "10.1.2.3"], &["127.0.0.2", "::ffff:127.0.0.1", "::ffff:10.1.2.3"]),
            (25, &["192.168.0.1"], &["8.8.8.8", "10.1.2.3", "fd00::1", "192.168.0.2"]),
        ] {
            let guard = guard(&rules, port);
            open.iter().for_each(|address| assert!(allows(&guard, address), "{address} {port}"));
            closed.iter().for_each(|address| assert!(!allows(&guard, address), "{address} {port}"));
        }
        assert!(!allows(&guard(&[], 25), "8.8.8.8"), "mail");
        assert!(allows(&guard(&["0.0.0.0/0"], 80), "127.0.0.1"));
        assert!(!allows(&guard(&["0.0.0.0/0"], 25), "127.0.0.1"));
    }
}
