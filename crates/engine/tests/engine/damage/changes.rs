//! The modifications of a frame. Each returns `None` if it does not apply to the frame.

use vmferry_codec::Decompressors;
use vmferry_wire::{Algorithm, Encoding, FrameHeader, FrameKind, Run};

use crate::support::relay::{Wire, seal_header};

pub fn has(frame: &Wire, encoding: Encoding) -> bool {
    frame.runs.iter().any(|run| run.encoding == encoding)
}

/// A copy of the frame if it has pages of this encoding.
pub fn with(frame: &Wire, encoding: Encoding) -> Option<Wire> {
    has(frame, encoding).then(|| frame.clone())
}

pub fn flip_packed(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Packed)?;
    let algorithm = frame.header.algorithm?;
    let packed_runs = frame.runs.iter().filter(|run| run.encoding == Encoding::Packed);
    let mut plain = vec![0; packed_runs.map(Run::content_bytes).sum()];
    let mut decompressors = Decompressors::default();
    decompressors
        .decompress(algorithm, frame.packed(), &mut plain)
        .expect("the frame is still intact");
    let mut says_the_same = |packed: &[u8]| {
        let mut damaged = vec![0; plain.len()];
        decompressors.decompress(algorithm, packed, &mut damaged).is_ok() && damaged == plain
    };
    // A flipped bit may be in a distance that then refers to another copy of the same bytes, so
    // this looks for the first bit that matters.
    let packed = frame.packed_mut();
    let flipped = (packed.len() / 2 * 8..packed.len() * 8).any(|bit| {
        packed[bit / 8] ^= 1 << (bit % 8);
        let matters = !says_the_same(packed);
        if !matters {
            packed[bit / 8] ^= 1 << (bit % 8);
        }
        matters
    });
    assert!(flipped, "no bit of the second half matters");
    Some(frame.sealed())
}

pub fn cut_packed(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Packed)?;
    frame.payload.pop();
    frame.header.packed_bytes -= 1;
    Some(frame.sealed())
}

pub fn append_to_packed(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Packed)?;
    frame.payload.extend_from_slice(&[0; 3]);
    frame.header.packed_bytes += 3;
    Some(frame.sealed())
}

/// A run of packed pages that is not directly followed by the next run.
pub fn one_page_more(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Packed)?;
    let index = (0..frame.runs.len()).find(|index| {
        let run = &frame.runs[*index];
        let next = frame.runs.get(index + 1).map_or(2048, |next| next.first);
        run.encoding == Encoding::Packed && next > run.range().end
    })?;
    frame.runs[index].pages += 1;
    Some(frame.sealed())
}

pub fn one_page_less(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = frame.clone();
    let long =
        |run: &&mut Run| matches!(run.encoding, Encoding::Packed | Encoding::Raw) && run.pages > 1;
    frame.runs.iter_mut().find(long)?.pages -= 1;
    Some(frame.sealed())
}

pub fn other_algorithm(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Packed)?;
    frame.header.algorithm = match frame.header.algorithm? {
        Algorithm::Zlib => Some(Algorithm::Zstd),
        Algorithm::Zstd => Some(Algorithm::Lz4),
        Algorithm::Lz4 => Some(Algorithm::Zlib),
    };
    Some(frame.sealed())
}

pub fn unknown_algorithm(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut bytes = with(frame, Encoding::Packed)?.sealed();
    bytes[5] = 77;
    seal_header(&mut bytes);
    Some(bytes)
}

pub fn no_algorithm(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Packed)?;
    frame.header.algorithm = None;
    Some(frame.sealed())
}

pub fn flip_raw(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Raw)?;
    frame.payload[5000] ^= 1;
    Some(frame.sealed())
}

pub fn called_zero(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Raw)?;
    let run = frame.runs.iter_mut().find(|run| run.encoding == Encoding::Raw)?;
    run.encoding = Encoding::Zero;
    let bytes = run.content_bytes();
    frame.payload.drain(..bytes);
    Some(frame.sealed())
}

pub fn other_sum(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Raw)?;
    frame.runs.last_mut()?.content_sum ^= 1 << 63;
    Some(frame.sealed())
}

pub fn other_base(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Delta)?;
    frame.packed_mut()[0] ^= 1;
    Some(frame.sealed())
}

/// The deltas of an earlier frame again, in place of the next ones.
pub fn replayed(earlier: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let frame = with(frame, Encoding::Delta)?;
    let mut again = earlier.iter().find(|frame| has(frame, Encoding::Delta))?.clone();
    again.header.sequence = frame.header.sequence;
    Some(again.sealed())
}

pub fn cut_delta(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Delta)?;
    frame.payload.pop();
    frame.header.packed_bytes -= 1;
    frame.header.delta_bytes -= 1;
    Some(frame.sealed())
}

pub fn append_to_deltas(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Delta)?;
    frame.payload.extend_from_slice(&[0; 5]);
    frame.header.packed_bytes += 5;
    frame.header.delta_bytes += 5;
    Some(frame.sealed())
}

/// Deltas for a page that was never sent: the pages after the content are empty.
pub fn of_unknown_page(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Delta)?;
    let run = frame.runs.last_mut().filter(|run| run.encoding == Encoding::Delta)?;
    run.first = 2048 - u64::from(run.pages);
    Some(frame.sealed())
}

pub fn claims_less_deltas(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = with(frame, Encoding::Delta)?;
    frame.header.delta_bytes -= 1;
    Some(frame.sealed())
}

pub fn flip_header(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut bytes = frame.clone().sealed();
    bytes[9] ^= 4;
    Some(bytes)
}

pub fn flip_table(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut bytes = frame.clone().sealed();
    bytes[vmferry_wire::FRAME_HEADER_BYTES + 1] ^= 4;
    Some(bytes)
}

pub fn too_long(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut bytes = frame.clone().sealed();
    bytes[24..28].copy_from_slice(&u32::MAX.to_le_bytes());
    seal_header(&mut bytes);
    Some(bytes)
}

pub fn other_slot(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = frame.clone();
    frame.header.slot.0 += 2;
    Some(frame.sealed())
}

pub fn beyond_slot(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = frame.clone();
    frame.runs.last_mut()?.first = 2047;
    frame.runs.last_mut()?.pages.checked_sub(2)?;
    Some(frame.sealed())
}

pub fn next_sequence(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = frame.clone();
    frame.header.sequence += 1;
    Some(frame.sealed())
}

/// The last run is moved to the next lane's stripe.
pub fn other_lane(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let mut frame = frame.clone();
    frame.runs.last_mut()?.first += 512;
    Some(frame.sealed())
}

pub fn end_of_round(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    // A frame of the paused round, which no later round corrects.
    let FrameHeader { kind, round, sequence, .. } = frame.header;
    (kind == FrameKind::Pages && round > 1 && has(frame, Encoding::Raw))
        .then(|| FrameHeader::end_of_round(round, sequence).encode().to_vec())
}

pub fn half(_: &[Wire], frame: &Wire) -> Option<Vec<u8>> {
    let bytes = with(frame, Encoding::Packed)?.sealed();
    Some(bytes[..bytes.len() / 2].to_vec())
}
