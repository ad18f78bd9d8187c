//! Messages between nodes: the types of `proto/peer/v1`, and the items of a batch one by one.

use std::fmt;

use bytes::{Buf as _, Bytes};
use prost::encoding::{
    DecodeContext, WireType, decode_key, decode_varint, encode_key, encode_varint, skip_field,
};
use prost::{DecodeError, Message as _};

/// The types of the schema `proto/peer/v1/peer.proto`, generated. `proto/tests/generated.rs` compares the
/// two.
pub mod v1 {
    // Included rather than a module of its own, since rustfmt would change the generated text of a module.
    include!("peer/v1.rs");
}

/// Major version of the protocol between nodes. Nodes of different majors do not speak to each other.
pub const MAJOR: u32 = 1;
/// Minor version of the protocol between nodes. Later minors only add fields and kinds of items.
pub const MINOR: u32 = 0;
/// HTTP/2 path of the gRPC method that opens a peer stream.
pub const STREAM_PATH: &str = "/fanfare.peer.v1.Peer/Lane";
/// Greatest number of peer streams from a node to one peer.
pub const STREAMS_MAX: usize = 8;

/// Tag of the field `items` of `Items`.
const ITEM_TAG: u32 = 1;
/// Tag of the field `request` of `Item`.
const REQUEST_TAG: u32 = 6;

/// Encodes one item as it stands in a batch, with field key and length. A batch is such items one after
/// another.
pub fn encode_item(item: &v1::Item) -> Bytes {
    let length = item.encoded_len();
    let mut out = Vec::with_capacity(length + 6);
    encode_key(ITEM_TAG, WireType::LengthDelimited, &mut out);
    encode_varint(length as u64, &mut out);
    item.encode_raw(&mut out);
    out.into()
}

/// Encodes one item as a node of the next minor may send it, for tests: with an unknown field, and behind an
/// item and a request of unknown kinds.
pub fn encode_item_of_next_minor(item: &v1::Item) -> Bytes {
    const UNKNOWN_TAG: u32 = 1_000;
    let mut body = item.encode_to_vec();
    encode_key(UNKNOWN_TAG, WireType::Varint, &mut body);
    encode_varint(7, &mut body);
    let mut unknown = Vec::new();
    encode_key(UNKNOWN_TAG + 1, WireType::LengthDelimited, &mut unknown);
    encode_varint(3, &mut unknown);
    unknown.extend(b"new");
    let mut asking = Vec::new();
    // // A request beside an answer would be answered with a request in turn, and two such nodes would never
    // come to an end.
    if !matches!(item.kind, Some(v1::item::Kind::Answer(_))) {
        let request = v1::Request { number: u64::MAX, kind: None };
        encode_key(REQUEST_TAG, WireType::LengthDelimited, &mut asking);
        encode_varint((request.encoded_len() + unknown.len()) as u64, &mut asking);
        request.encode_raw(&mut asking);
        asking.extend(&unknown);
    }
    let mut out = Vec::with_capacity(body.len() + asking.len() + unknown.len() + 18);
    for item in [unknown, asking, body] {
        encode_key(ITEM_TAG, WireType::LengthDelimited, &mut out);
        encode_varint(item.len() as u64, &mut out);
        out.extend(item);
    }
    out.into()
}

/// Iterator over the items of a batch, which decodes each when it is asked for. It ends after the first
/// error.
#[derive(Debug)]
pub struct Items(Bytes);

impl Items {
    /// Takes the field `items` of a batch.
    pub fn new(batch: Bytes) -> Self {
        Self(batch)
    }

    fn take(&mut self) -> Result<Option<v1::Item>, ItemError> {
        while self.0.has_remaining() {
            let (tag, wire_type) = decode_key(&mut self.0)?;
            if (tag, wire_type) != (ITEM_TAG, WireType::LengthDelimited) {
                skip_field(wire_type, tag, &mut self.0, DecodeContext::default())?;
                continue;
            }
            let length = decode_varint(&mut self.0)?;
            if length > self.0.remaining() as u64 {
                return Err(ItemError);
            }
            return Ok(Some(v1::Item::decode(self.0.split_to(length as usize))?));
        }
        Ok(None)
    }
}

/// Error of a batch whose bytes are no items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ItemError;

impl fmt::Display for ItemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a batch cannot be read")
    }
}

impl std::error::Error for ItemError {}

impl From<DecodeError> for ItemError {
    fn from(_: DecodeError) -> Self {
        Self
    }
}

impl Iterator for Items {
    type Item = Result<v1::Item, ItemError>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = self.take().transpose();
        if matches!(item, Some(Err(_))) {
            self.0.clear();
        }
        item
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(sequence: u64) -> v1::Item {
        let forward = v1::Forward { last: sequence, ..v1::Forward::default() };
        v1::Item { kind: Some(v1::item::Kind::Forward(forward)) }
    }

    #[test]
    fn joined_items_are_what_the_schema_says() {
        let items = vec![item(1), item(2), item(3)];
        let joined: Vec<u8> = items.iter().flat_map(encode_item).collect();
        assert_eq!(joined, v1::Items { items: items.clone() }.encode_to_vec());
        assert_eq!(Items::new(joined.into()).collect::<Result<Vec<_>, _>>(), Ok(items));
    }

    #[test]
    fn unknown_fields_are_passed_over() {
        let mut batch = Vec::new();
        encode_key(2, WireType::Varint, &mut batch);
        encode_varint(300, &mut batch);
        batch.extend(encode_item(&item(1)));
        encode_key(ITEM_TAG, WireType::SixtyFourBit, &mut batch);
        batch.extend([0; 8]);
        // Item of a kind of a later minor.
        encode_key(ITEM_TAG, WireType::LengthDelimited, &mut batch);
        encode_varint(3, &mut batch);
        batch.extend([0xba, 0x06, 0]);
        let items: Vec<_> = Items::new(batch.into()).collect();
        assert_eq!(items, [Ok(item(1)), Ok(v1::Item { kind: None })]);
    }

    #[test]
    fn truncated_or_oversized_batch_ends_with_error() {
        let whole = encode_item(&item(7));
        for cut in 1..whole.len() {
            let items: Vec<_> = Items::new(whole.slice(..cut)).collect();
            assert_eq!(items, [Err(ItemError)], "cut at {cut}");
        }
        let claims_a_gigabyte = [0x0a, 0x80, 0x80, 0x80, 0x80, 0x04, 1, 2, 3];
        assert_eq!(Items::new(claims_a_gigabyte.to_vec().into()).next(), Some(Err(ItemError)));
    }
}
