//! Choosing the blocks of a sample.

use std::fs::File;

use rustix::fs::{SeekFrom, seek};

use super::reading::{BLOCK_BYTES, Buffer};

/// How often another place is drawn instead of a block of zeros, of which images have many.
const DRAWS: usize = 4;

/// Blocks that are always among them, as far as the file has them. The beginnings of the first 16
/// clusters of a qcow2 image, which are its tables, and of a partition table; and the beginning of
/// the first partition at 1 MiB, where its file system counts mounts and notes times.
fn fixed() -> impl Iterator<Item = u64> {
    let clusters = (0..16).map(|cluster| cluster << 16);
    clusters.chain((0..2).map(|block| (1 << 20) + block * BLOCK_BYTES as u64))
}

/// The length of a file or block device, in bytes.
pub(super) fn length(file: &File) -> Option<u64> {
    seek(file, SeekFrom::End(0)).ok()
}

/// Chooses at most `count` blocks of an image by their offsets in bytes: those that are always
/// chosen, and others at random, rather with data than without. `look` says whether the file is
/// read for that.
pub(super) fn choose(
    file: &File,
    count: usize,
    random: &mut fastrand::Rng,
    look: Look,
) -> Vec<u64> {
    let blocks = length(file).unwrap_or(0).div_ceil(BLOCK_BYTES as u64);
    if blocks <= count as u64 {
        return (0..blocks).map(|block| block * BLOCK_BYTES as u64).collect();
    }
    let mut chosen: Vec<u64> =
        fixed().filter(|offset| offset / (BLOCK_BYTES as u64) < blocks).take(count / 2).collect();
    let mut buffer = Buffer::new();
    while chosen.len() < count {
        let mut draw = || random.u64(..blocks) * BLOCK_BYTES as u64;
        let mut offset = draw();
        if look == Look::ForData {
            for _ in 0..DRAWS {
                offset = next_data(file, offset).unwrap_or(offset);
                let content = buffer.read(file, offset);
                if content.is_ok_and(|content| content.iter().any(|byte| *byte != 0)) {
                    break;
                }
                offset = draw();
            }
        }
        chosen.push(offset);
    }
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

/// Whether blocks with data are looked for, which takes reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// They are.
    ForData,
    /// The guest is paused, and there is no time.
    Nowhere,
}

/// The block at or after this offset that is not in a hole.
fn next_data(file: &File, offset: u64) -> Option<u64> {
    let found = seek(file, SeekFrom::Data(offset)).ok()?;
    Some(found / BLOCK_BYTES as u64 * BLOCK_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn blocks_with_data_are_found_in_a_sparse_image() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 30).unwrap();
        for place in 0..40 {
            file.write_all_at(&[7; 32 << 10], (place * 23 + 100) << 20).unwrap();
        }
        let mut random = fastrand::Rng::with_seed(1);
        let chosen = choose(&file, 100, &mut random, Look::ForData);
        let with_data = chosen.iter().filter(|offset| {
            let mut byte = [0];
            file.read_exact_at(&mut byte, **offset).unwrap();
            byte == [7]
        });
        let found = with_data.count();
        assert!(found >= 25, "{found} of {}", chosen.len());
        for always in fixed() {
            assert!(chosen.contains(&always), "{always}");
        }
    }

    #[test]
    fn small_images_are_read_whole_and_the_same_session_reads_the_same() {
        let file = tempfile::tempfile().unwrap();
        file.set_len((16 << 10) + 1).unwrap();
        let mut random = fastrand::Rng::with_seed(1);
        let of = |file: &File, random: &mut _| choose(file, 100, random, Look::Nowhere);
        assert_eq!(of(&file, &mut random), [0, 16 << 10]);
        file.set_len(1 << 30).unwrap();
        let again = || of(&file, &mut fastrand::Rng::with_seed(7));
        assert_eq!(again(), again());
        assert!(again().iter().all(|offset| *offset < 1 << 30 && offset.is_multiple_of(16 << 10)));
        assert_ne!(again(), of(&file, &mut random));
    }
}
