//! The records of a RAM section.
//!
//! Source: `ram_load_precopy`, `save_page_header` and the functions that call it, in QEMU's `migration/ram.c` (7.2 to 10.0).
//! Each begins with a big-endian word: an offset in a memory block, a multiple of 4096, and flags below.

use super::PAGE;
use super::bytes::{Found, be16, be32, be64, byte, found, name};

/// A page of zeros: one more byte follows, which is 0.
pub(super) const ZERO: u64 = 0x02;
/// The table of blocks; the word's other bits are the bytes of all.
pub(super) const MEM_SIZE: u64 = 0x04;
/// A page as it is.
pub(super) const WHOLE: u64 = 0x08;
/// The end of the section. Stands alone.
pub(super) const EOS: u64 = 0x10;
/// The page is of the same block as the one before; else the block's name follows.
pub(super) const CONTINUE: u64 = 0x20;
/// Changes of a page: capability `xbzrle`.
pub(super) const XBZRLE: u64 = 0x40;
/// Something of RDMA's. Stands alone.
pub(super) const HOOK: u64 = 0x80;
/// A page that zlib has packed: capability `compress`, which 9.1 no longer has.
pub(super) const COMPRESSED: u64 = 0x100;
/// The channels of `multifd` are waited for, since 8.1. Stands alone.
pub(super) const MULTIFD_FLUSH: u64 = 0x200;

const FLAGS: u64 = PAGE as u64 - 1;

/// What zlib may make of a page at most (`compressBound(4096)`).
const MAX_COMPRESSED: u32 = 4109;

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The end of the section.
    End,
    /// Nothing about pages.
    Mark,
    /// The table of blocks begins: so many bytes of all together.
    Table(u64),
    /// A page of zeros.
    Zero,
    /// A page, whose content ends the record.
    Page,
    /// A page in some other form.
    Packed,
}

/// A record. Its content need not have come yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record<'a> {
    pub kind: Kind,
    /// Where the page is in its block, in bytes.
    pub offset: u64,
    /// The block's name, if it is another block than before.
    pub name: Option<&'a [u8]>,
    /// The record's length, with all that follows the word.
    pub length: usize,
}

/// Reads all of a record but a page's content.
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

/// Reads an entry of the table of blocks, of which so many bytes are left, and returns its length on the wire and that of
/// the block.
///
/// Behind the block's length 7.2 and later put 8 bytes each for `postcopy-ram` (of a block whose pages have another size than
/// the host's) and `x-ignore-shared`, and nothing in the stream says that they do. But all of them begin with a
/// byte that no name's length is, or are none of the words that can follow.
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

/// Name and length of a block; returns where they end.
fn table_pair(bytes: &[u8], at: usize, left: u64) -> Found<(usize, u64)> {
    let after = at + 1 + found!(name(bytes, at)).len();
    let block_bytes = found!(be64(bytes, after));
    if block_bytes == 0 || block_bytes > left || !block_bytes.is_multiple_of(PAGE as u64) {
        return Found::Other;
    }
    Found::Whole((after + 8, block_bytes))
}
