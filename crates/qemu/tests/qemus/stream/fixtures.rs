//! Recorded streams of real QEMUs. They are small: a guest of 8 MiB that never ran, with the page
//! contents replaced by a constant.

use std::io::Read;
use std::path::PathBuf;

use flate2::read::ZlibDecoder;
use serde_json::Value;

/// The byte that replaces each page's content.
pub const CONTENT: u8 = 0x7e;

/// A recorded stream.
pub struct Fixture {
    pub name: String,
    pub layout: Vec<(String, u64)>,
    /// QEMU's own figures of the migration.
    pub normal: u64,
    pub duplicate: u64,
    /// The main stream, and the multifd channels.
    pub streams: Vec<Vec<u8>>,
}

pub fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/qemus/stream/captures")
}

/// All recorded streams.
pub fn read() -> Vec<Fixture> {
    let mut fixtures = Vec::new();
    for entry in std::fs::read_dir(directory()).expect("captures are in the tree") {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "json") {
            continue;
        }
        let about: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let streams = (0..about["streams"].as_u64().unwrap())
            .map(|number| {
                let packed = std::fs::read(directory().join(format!("{name}-{number}.zlib")));
                let mut bytes = Vec::new();
                ZlibDecoder::new(&packed.unwrap()[..]).read_to_end(&mut bytes).unwrap();
                bytes
            })
            .collect();
        fixtures.push(Fixture {
            normal: about["normal"].as_u64().unwrap(),
            duplicate: about["duplicate"].as_u64().unwrap(),
            layout: serde_json::from_value(about["layout"].clone()).unwrap(),
            name,
            streams,
        });
    }
    fixtures
}
