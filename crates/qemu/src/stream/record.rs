//! The records of a RAM section.
//!
//! Source: `ram_load_precopy`, `save_page_header` and the functions that call it, in QEMU's
//! `migration/ram.c` (7.2 to 10.0). Each record begins with a big-endian word: the upper bits are
//! an offset in a memory block, a multiple of 4096, and the bits below are flags.

use super::PAGE;
use super::bytes::{Found, be16, be32, be64, byte, found, name};

/// A page of zeros: one more byte follows, which is 0.
pub(crate) const ZERO: u64 = 0x02;
/// The table of blocks; the other bits of the word are the total size in bytes.
pub(super) const MEM_SIZE: u64 = 0x04;
/// A page with its content.
pub(crate) const WHOLE: u64 = 0x08;
/// The end of the section. No other bits are set.
pub(crate) const EOS: u64 = 0x10;
/// The page is in the same block as the previous one; otherwise the block's name follows.
pub(super) const CONTINUE: u64 = 0x20;
/// Changes of a page: capability `xbzrle`.
pub(super) const XBZRLE: u64 = 0x40;
/// An RDMA hook. No other bits are set.
pub(super) const HOOK: u64 = 0x80;
/// A page compressed by zlib: capability `compress`, which 9.1 removed.
pub(super) const COMPRESSED: u64 = 0x100;
/// A sync point of the `multifd` channels, since 8.1. No other bits are set.
pub(super) const MULTIFD_FLUSH: u64 = 0x200;

const FLAGS: u64 = PAGE as u64 - 1;

/// The largest zlib output for a page (`compressBound(4096)`).
const MAX_COMPRESSED: u32 = 4109;

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The end of the section.
    End,
    /// Nothing about pages.
    Mark,
    /// The table of blocks begins; with the total size of all blocks in bytes.
    Table(u64),
    /// A page of zeros.
    Zero,
    /// A page, whose content ends the record.
    Page,
    /// A page in another encoding.
    Packed,
}

/// A record. A page's content need not have arrived yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record<'a> {
    pub kind: Kind,
    /// The page's offset in its block, in bytes.
    pub offset: u64,
    /// The block's name, if the block has changed.
    pub name: Option<&'a [u8]>,
    /// The record's length, including the word.
    pub length: usize,
}

/// Parses all of a record but a page's content.
pub(super) fn record(bytes: &[u8]) -> Found<Record<'_>> {
    let word = found!(be64(bytes, 0));
    let (offset, flags) = (word & !FLAGS, word & FLAGS);
    let alone = |kind, offset| Found::Whole(Record { kind, offset, name: None, length: 8 });
    match word {
        EOS => return alone(Kind::End, 0),
        HOOK | MULTIFD_FLUSH => return alone(Kind::Mark, 0),
        _ if flags == MEM_SIZE && offset != 0 => return alone(Kind::Table(offset), 0),
        _ => {}
    }
    let form = flags & !CONTINUE;
    if ![ZERO, WHOLE, XBZRLE, COMPRESSED].contains(&form) {
        return Found::Other;
    }
    let block = match flags & CONTINUE {
        0 => Some(found!(name(bytes, 8))),
        _ => None,
    };
    let body = 8 + block.map_or(0, |name| 1 + name.len());
    let (kind, content) = match form {
        ZERO => match found!(byte(bytes, body)) {
            0 => (Kind::Zero, 1),
            _ => return Found::Other,
        },
        WHOLE => (Kind::Page, PAGE),
        XBZRLE => {
            let (encoding, length) = (found!(byte(bytes, body)), found!(be16(bytes, body + 1)));
            if encoding != 1 || usize::from(length) > PAGE {
                return Found::Other;
            }
            (Kind::Packed, 3 + usize::from(length))
        }
        _ => match found!(be32(bytes, body)) {
            length @ 0..=MAX_COMPRESSED => (Kind::Packed, 4 + length as usize),
            _ => return Found::Other,
        },
    };
    Found::Whole(Record { kind, offset, name: block, length: body + content })
}

/// Parses an entry of the table of blocks, where `left` is the remaining total of block bytes.
/// Returns the entry's length in the stream and the block's size.
///
/// After the block's size, QEMU 7.2 and later put 8 bytes for `postcopy-ram` (if the block's page
/// size differs from the host's) and 8 bytes for `x-ignore-shared`, and the stream does not say
/// whether they are there. But each of these begins with a byte that can't be a name's length, or
/// is none of the words that can follow the table.
pub(super) fn table_entry(bytes: &[u8], left: u64) -> Found<(usize, u64)> {
    let (at, block_bytes) = found!(table_pair(bytes, 0, left));
    for extra in [0, 8, 16] {
        let next = at + extra;
        let fits = if block_bytes == left {
            match found!(be64(bytes, next)) {
                EOS | HOOK | MULTIFD_FLUSH => Found::Whole(()),
                _ => Found::Other,
            }
        } else {
            match table_pair(bytes, next, left - block_bytes) {
                Found::Whole(_) => Found::Whole(()),
                Found::Short => Found::Short,
                Found::Other => Found::Other,
            }
        };
        match fits {
            Found::Whole(()) => return Found::Whole((next, block_bytes)),
            Found::Short => return Found::Short,
            Found::Other => {}
        }
    }
    Found::Other
}

/// Parses name and size of a block. Returns where they end.
fn table_pair(bytes: &[u8], at: usize, left: u64) -> Found<(usize, u64)> {
    let after = at + 1 + found!(name(bytes, at)).len();
    let block_bytes = found!(be64(bytes, after));
    if block_bytes == 0 || block_bytes > left || !block_bytes.is_multiple_of(PAGE as u64) {
        return Found::Other;
    }
    Found::Whole((after + 8, block_bytes))
}
