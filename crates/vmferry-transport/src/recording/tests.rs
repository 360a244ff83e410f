use std::io::{IoSlice, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

use super::*;
use crate::{Dialer, Listener};

/// A channel that is recorded at both sides: what each wrote, with gathered writes among it.
fn exchange(here: Option<Recorder>, there: Option<Recorder>) {
    let (one, other) = UnixStream::pair().unwrap();
    let mut dialer = Dialer::over([OwnedFd::from(one)]).unwrap();
    dialer.recorder = here;
    let mut listener = Listener::over([OwnedFd::from(other)]).unwrap();
    if let Some(recorder) = there {
        listener.record(recorder);
    }
    let (mut reader, mut writer) = dialer.connect().unwrap().split();
    let parts = [IoSlice::new(b"to "), IoSlice::new(b""), IoSlice::new(b"there")];
    assert_eq!(writer.write_vectored(&parts).unwrap(), 8);
    writer.finish().unwrap();
    // A socket of the caller's is accepted when something has come.
    let accepted = listener.accept().unwrap().unwrap().handshake(Duration::from_secs(5)).unwrap();
    let (mut their_reader, mut their_writer) = accepted.split();
    let mut found = String::new();
    their_reader.read_to_string(&mut found).unwrap();
    assert_eq!(found, "to there");
    their_writer.write_all(b"and back").unwrap();
    their_writer.finish().unwrap();
    found.clear();
    reader.read_to_string(&mut found).unwrap();
    assert_eq!(found, "and back");
}

/// The files of a directory by name, and that nobody else can read them.
fn files(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read(path).unwrap())
        })
        .collect();
    files.sort();
    files
}

#[test]
fn each_direction_is_recorded_at_both_sides() {
    let root = tempfile::tempdir().unwrap();
    let recorder =
        |name: &str, side| Recorder::new(&root.path().join(name), side, 1 << 20).unwrap();
    let here = recorder("here", RecordingSide::Source);
    exchange(Some(here.clone()), Some(recorder("there", RecordingSide::Destination)));
    exchange(Some(here), None);
    let mode = std::fs::metadata(root.path().join("here")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    for (name, side, channels) in
        [("here", RecordingSide::Source, 2), ("there", RecordingSide::Destination, 1)]
    {
        let found = files(&root.path().join(name));
        assert_eq!(found.len(), 2 * channels, "{name}");
        for (at, (file, bytes)) in found.iter().enumerate() {
            let (head, content) = bytes.split_first_chunk().unwrap();
            let header = RecordingHeader::parse(head).unwrap();
            let to_destination = at % 2 == 0;
            assert_eq!((header.side, header.connection), (side, at as u32 / 2));
            assert_eq!(header.direction == Direction::ToDestination, to_destination);
            assert_eq!(content, if to_destination { &b"to there"[..] } else { b"and back" });
            assert_eq!(file.contains("to-destination"), to_destination);
        }
    }
}

#[test]
fn the_limit_ends_the_recording_and_not_the_channel() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("r");
    // Two headers and 8 bytes: the way back is over the limit.
    let limit = 2 * RECORDING_HEADER_BYTES as u64 + 8;
    let recorder = Recorder::new(&directory, RecordingSide::Source, limit).unwrap();
    let said = Arc::new(Mutex::new(Vec::new()));
    let hearer = Arc::clone(&said);
    recorder.tell(move |text| hearer.lock().unwrap().push(text.to_owned()));
    exchange(Some(recorder.clone()), None);
    exchange(Some(recorder), None);
    let bytes: usize = files(&directory).iter().map(|(_, bytes)| bytes.len()).sum();
    assert!(bytes as u64 <= limit, "{bytes}");
    let said = said.lock().unwrap();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("its limit of 56 bytes"), "{said:?}");
}

#[test]
fn a_directory_that_others_can_read_is_refused() {
    let root = tempfile::tempdir().unwrap();
    std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let error = Recorder::new(root.path(), RecordingSide::Source, 1).unwrap_err().to_string();
    assert!(error.contains("chmod 700"), "{error}");
}

#[test]
fn an_earlier_recording_is_not_written_over() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("r");
    for _ in 0..2 {
        let recorder = Recorder::new(&directory, RecordingSide::Source, 1 << 20).unwrap();
        exchange(Some(recorder), None);
    }
    assert_eq!(files(&directory).len(), 4);
}

#[test]
fn a_header_is_read_as_it_was_written() {
    let header = RecordingHeader {
        side: RecordingSide::Destination,
        direction: Direction::ToSource,
        connection: 3,
        at: 0x0102_0304,
    };
    let bytes = header.encode();
    assert_eq!(bytes, *b"VMFTRACE\x01\0\x02\x02\x03\0\0\0\x04\x03\x02\x01\0\0\0\0");
    assert_eq!(RecordingHeader::parse(&bytes), Ok(header));
    for at in 0..12 {
        let mut bad = bytes;
        bad[at] ^= 0x40;
        assert!(RecordingHeader::parse(&bad).is_err(), "byte {at}");
    }
}
