//! Tests of `encode`.

use vmferry_memory::{GuestMemory, MemoryKind, SlotLayout};

use super::*;

#[test]
fn encode_error_names_the_page_and_the_compressor() {
    struct Broken;
    impl Compress for Broken {
        fn compress(&mut self, _: &[u8], _: &mut [u8]) -> Result<Option<usize>, CompressError> {
            Err(CompressError::Failed { method: Method::lz4(), reason: "worn out".into() })
        }
    }
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 64 }];
    let memory = GuestMemory::allocate(&layout, MemoryKind::Private).unwrap();
    let hashes = PageHashes::for_memory(&memory);
    let compressors = Compressors::new(|_| Ok(Box::new(Broken)));
    let mut encoder = Encoder::new(compressors, Arc::new(HotPages::new(0)));
    let mut frame = EncodedFrame::new();
    frame.pages_mut(2)[5000] = 1;
    let batch = Batch { round: 1, slot: SlotId(2), pages: &[3, 4] };
    let choice = Choice { pack: Some(Method::lz4()), delta: DeltaUse::Off };
    let error = encoder.encode(&mut frame, batch, &hashes, choice).unwrap_err();
    assert!(error.to_string().starts_with("page 4 of slot 2"), "{error}");
    assert!(error.source.to_string().contains("worn out"));
}
