use vmferry_handover::journal::{Side as JournalSide, records_of};
use vmferry_handover::{FinishEntry, SourceFinish};
use vmferry_libvirt_rpc::MigrateFlags;

use super::*;
use crate::libvirt::take_over::tests::{Running, start};

const SESSION: SessionId = SessionId([7; 16]);

/// Such as after a disk that was slower than libvirt is patient.
#[test]
fn finish_of_a_libvirt_that_has_gone_is_not_sent() {
    let place = tempfile::tempdir().unwrap();
    let journals = place.path().join("journals");
    let keeper = Running::start(place.path());
    let (proxy, _events) = start(place.path().join("sockets"), &journals, keeper).unwrap();
    let (libvirt, ours) = UnixStream::pair().unwrap();
    let part = Part::source(Arc::default());
    let session = Session::new(&proxy.shared, "host-b".into(), SESSION, part, ours);
    let guest = Guest { name: "web".into(), uuid: uuid::Uuid::max() };
    session.begin(&guest).unwrap();
    drop(libvirt);
    let call = FinishCall { serial: 1, guest, cancelled: false, flags: MigrateFlags(0) };
    let refused = session.finish(&proxy.shared, &call).unwrap_err();
    assert!(refused.contains("is not sent"), "{refused}");
    // Its record is on disk, so the other host decides.
    let records = records_of::<FinishEntry>(&journals, SESSION, JournalSide::Source).unwrap();
    let records: Vec<_> = records.unwrap().into_iter().map(|entry| entry.record).collect();
    assert_eq!(SourceFinish::recover(&records), Ok(Some(SourceFinish::Sent)));
    drop(session);
    assert_eq!(proxy.doubts().len(), 1);
}
