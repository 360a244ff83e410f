//! The names in the header of a qcow2 image.
//!
//! Source: QEMU `docs/interop/qcow2.rst`; `qcow2_do_open` and `qcow2_read_extensions` in
//! `block/qcow2.c`.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use serde::{Deserialize, Serialize};

const MAGIC: &[u8; 4] = b"QFI\xfb";

/// The extension with the name of the file that has the data.
const DATA_FILE: u32 = 0x4441_5441;

/// QEMU takes no longer name of a backing file.
const MOST_NAME_BYTES: u32 = 1023;

/// The largest cluster. The header and the name of the backing file are in the first one.
const MOST_CLUSTER_BYTES: u64 = 2 << 20;

/// The bytes in which extensions are looked for. QEMU writes a few hundred.
const HEADER_BYTES: usize = 64 << 10;

/// The files that an image names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageNames {
    /// The backing file.
    pub backing: Option<String>,
    /// The file with the guest's data.
    pub data_file: Option<String>,
}

/// Reads the names in an image. A file that is no qcow2 image has none, nor one that is missing.
///
/// # Errors
/// The system's, and a header that can't be understood.
pub fn image_names(path: &Path) -> io::Result<ImageNames> {
    // A pipe must not hold this process.
    let nonblock = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = match File::options().read(true).custom_flags(nonblock).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(ImageNames::default()),
        file => file?,
    };
    let mut header = vec![0; HEADER_BYTES];
    let length = read(&file, &mut header, 0)?;
    header.truncate(length);
    if !header.starts_with(MAGIC) {
        return Ok(ImageNames::default());
    }
    let word = |at: usize| header.get(at..)?.first_chunk().copied().map(u32::from_be_bytes);
    let unusual = || io::Error::new(io::ErrorKind::InvalidData, "its header is unusual");
    let (offset, size) = (header.get(8..).and_then(|rest| rest.first_chunk()), word(16));
    let (offset, size) = offset.zip(size).ok_or_else(unusual)?;
    let offset = u64::from_be_bytes(*offset);
    let mut names = ImageNames::default();
    if offset != 0 {
        if size > MOST_NAME_BYTES || offset > MOST_CLUSTER_BYTES {
            return Err(unusual());
        }
        let mut name = vec![0; size as usize];
        let length = read(&file, &mut name, offset)?;
        names.backing = Some(text(&name[..length]).ok_or_else(unusual)?);
    }
    // Version 2 has no length in its header.
    let mut at = if word(4) == Some(2) { 72 } else { word(100).ok_or_else(unusual)? as usize };
    let end =
        if offset == 0 { HEADER_BYTES } else { usize::try_from(offset).unwrap_or(usize::MAX) };
    while at < end {
        let (kind, length) = word(at).zip(word(at.saturating_add(4))).ok_or_else(unusual)?;
        if kind == 0 {
            return Ok(names);
        }
        let start = at.saturating_add(8);
        if kind == DATA_FILE {
            let content = header.get(start..start.saturating_add(length as usize));
            names.data_file = Some(content.and_then(text).ok_or_else(unusual)?);
        }
        at = start.saturating_add((length as usize).next_multiple_of(8));
    }
    // Without an end within what was read, there may be more.
    if end >= HEADER_BYTES { Err(unusual()) } else { Ok(names) }
}

fn text(bytes: &[u8]) -> Option<String> {
    // As a C string.
    let bytes = bytes.split(|byte| *byte == 0).next()?;
    std::str::from_utf8(bytes).ok().map(str::to_owned)
}

fn read(file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < into.len() {
        match file.read_at(&mut into[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A header of version 3 with these extensions, and with the name of a backing file after them.
    pub fn header(extensions: &[(u32, &[u8])], backing: &str) -> Vec<u8> {
        let mut image = vec![0; 104];
        image[..4].copy_from_slice(MAGIC);
        image[7] = 3;
        image[100..104].copy_from_slice(&104_u32.to_be_bytes());
        for (kind, content) in extensions.iter().copied().chain([(0, &b""[..])]) {
            image.extend(kind.to_be_bytes());
            image.extend((content.len() as u32).to_be_bytes());
            image.extend(content);
            image.resize(image.len().next_multiple_of(8), 0);
        }
        if !backing.is_empty() {
            let offset = image.len() as u64;
            image[8..16].copy_from_slice(&offset.to_be_bytes());
            image[16..20].copy_from_slice(&(backing.len() as u32).to_be_bytes());
            image.extend(backing.as_bytes());
        }
        image
    }

    fn names(content: &[u8]) -> io::Result<ImageNames> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        std::fs::write(&path, content).unwrap();
        image_names(&path)
    }

    #[test]
    fn names_are_found() {
        let all = |backing: Option<&str>, data_file: Option<&str>| ImageNames {
            backing: backing.map(str::to_owned),
            data_file: data_file.map(str::to_owned),
        };
        let backing_format = (0xe279_2aca, &b"raw"[..]);
        let data = (DATA_FILE, &b"data.raw"[..]);
        for (content, expected) in [
            (b"".to_vec(), all(None, None)),
            (vec![1; 4096], all(None, None)),
            (header(&[], ""), all(None, None)),
            (header(&[backing_format], "/dev/sda"), all(Some("/dev/sda"), None)),
            (header(&[backing_format, data], "base"), all(Some("base"), Some("data.raw"))),
            (header(&[data], ""), all(None, Some("data.raw"))),
        ] {
            assert_eq!(names(&content).unwrap(), expected);
        }
        assert_eq!(image_names(Path::new("/nowhere/x")).unwrap(), ImageNames::default());
    }

    #[test]
    fn unusual_headers_are_errors() {
        let mut long = header(&[], "x");
        long[16] = 1;
        let mut far = header(&[], "x");
        far[8] = 1;
        let endless = header(&[(7, &[0; 70_000])], "");
        let mut cut = header(&[(DATA_FILE, b"data.raw")], "");
        cut.truncate(114);
        for content in [long, far, endless, cut, MAGIC.to_vec()] {
            assert!(names(&content).is_err());
        }
    }

    #[test]
    fn any_header_is_read_without_a_panic() {
        let base = header(&[(DATA_FILE, b"data.raw")], "/dev/sda");
        for at in 0..base.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut changed = base.clone();
                changed[at] = value;
                let _ = names(&changed);
            }
        }
    }
}
