//! The context of a trace, as [W3C Trace Context](https://www.w3.org/TR/trace-context/) writes it into
//! headers.

use std::fmt;

/// Name of the header with trace id, span id and flags.
pub const TRACEPARENT: &str = "traceparent";
/// Name of the header with the state of tracing systems.
pub const TRACESTATE: &str = "tracestate";

/// Greatest length of `tracestate`; a longer one is dropped, as the standard allows.
const STATE_BYTES_MAX: usize = 512;
/// Length of `traceparent` in version 00, and of the same fields in later versions.
const TEXT_BYTES: usize = 55;
/// Flag of a span that is recorded.
const SAMPLED: u8 = 1;

/// One span of a trace, as the parent of others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext {
    /// Id of the trace, not all zeros.
    pub trace_id: [u8; 16],
    /// Id of the span, not all zeros.
    pub span_id: [u8; 8],
    /// Whether the span is recorded.
    pub is_sampled: bool,
    /// Value of `tracestate`, passed on as it is: at most 512 bytes of visible ASCII and spaces, empty if
    /// there is none.
    pub state: Box<str>,
}

impl TraceContext {
    /// Reads the values of both headers; an empty `state` stands for none. Gives `None` if `parent` is
    /// malformed.
    ///
    /// A `state` that is too long or no header value is dropped alone.
    pub fn parse(parent: &str, state: &str) -> Option<Self> {
        let text = parent.as_bytes();
        let (fields, rest) = text.split_at_checked(TEXT_BYTES)?;
        let is_parted = [2, 35, 52].into_iter().all(|at| fields[at] == b'-');
        let [version] = hex(&fields[..2])?;
        let is_ended = match version {
            0 => rest.is_empty(),
            0xff => false,
            _ => rest.first().is_none_or(|next| *next == b'-'),
        };
        if !is_parted || !is_ended {
            return None;
        }
        let (trace_id, span_id) = (hex(&fields[3..35])?, hex(&fields[36..52])?);
        let [flags] = hex(&fields[53..])?;
        if trace_id == [0; 16] || span_id == [0; 8] {
            return None;
        }
        let is_kept =
            state.len() <= STATE_BYTES_MAX && state.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        let state = if is_kept { state.trim() } else { "" };
        Some(Self { trace_id, span_id, is_sampled: flags & SAMPLED != 0, state: state.into() })
    }

    /// Gives the value of `traceparent`.
    pub fn parent(&self) -> String {
        self.to_string()
    }
}

/// Writes the value of `traceparent`.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("00-")?;
        self.trace_id.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("-")?;
        self.span_id.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, "-{:02x}", u8::from(self.is_sampled))
    }
}

/// Reads two lower-case hexadecimal digits for each byte.
fn hex<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, digits) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(digits[0])? << 4 | digit(digits[1])?;
    }
    (text.len() == 2 * N).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_context_is_read_and_written() {
        let context = TraceContext::parse(PARENT, " a=1,b=2 ").expect("a context");
        assert_eq!((context.trace_id[0], context.span_id[7], context.is_sampled), (0x4b, 0xb7, true));
        assert_eq!(&*context.state, "a=1,b=2");
        assert_eq!(context.parent(), PARENT);
        let unsampled = TraceContext::parse(&PARENT.replace("-01", "-02"), "").expect("a context");
        assert!(!unsampled.is_sampled, "another flag than that of sampled");
        assert_eq!(unsampled.parent(), PARENT.replace("-01", "-00"));
    }

    #[test]
    fn later_versions_are_read_as_far_as_they_are_known() {
        for later in [PARENT.replacen("00", "01", 1), PARENT.replacen("00", "fe", 1) + "-more"] {
            assert_eq!(TraceContext::parse(&later, "").expect("a context").parent(), PARENT);
        }
    }

    #[test]
    fn malformed_parents_are_none() {
        let replaced = |from, to| PARENT.replacen(from, to, 1);
        for malformed in [
            String::new(),
            "00".to_owned(),
            format!("{PARENT}-"),
            format!("{PARENT} "),
            replaced("00-", "ff-"),
            replaced("00-", "0g-"),
            replaced("00-", "+0-"),
            replaced("00-", "01-") + "more",
            replaced("4bf9", "4BF9"),
            replaced("4bf9", "4bf-"),
            replaced("-00f0", "000f0"),
            replaced("4bf92f3577b34da6a3ce929d0e0e4736", "00000000000000000000000000000000"),
            replaced("00f067aa0ba902b7", "0000000000000000"),
            replaced("-01", "-0x"),
            replaced("00f067aa0ba902b7", "00f067aa0ba902ü"),
        ] {
            assert_eq!(TraceContext::parse(&malformed, ""), None, "{malformed}");
        }
    }

    #[test]
    fn a_state_that_is_no_header_value_is_dropped_alone() {
        for state in ["a=1\n", "a=\u{fc}", &"a".repeat(513)] {
            assert_eq!(&*TraceContext::parse(PARENT, state).expect("a context").state, "", "{state:?}");
        }
    }
}
