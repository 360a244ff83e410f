use super::*;
use crate::packets::{
    OTHER_UUID, UUID, Value, cookie as cookie_of, definition, finish, prepare, prepare_args, words,
};

fn read(list: &[(&str, Value<'_>)], cookie: &[u8], flags: u32) -> Result<PrepareCall, RpcError> {
    PrepareCall::read(1, &prepare_args(list, cookie, flags))
}

#[test]
fn prepare_is_read() {
    let call = PrepareCall::read(9, &prepare(9, "web")[28..]).unwrap();
    assert_eq!(call.serial, 9);
    assert_eq!(call.guest, Guest { name: "web".into(), uuid: UUID.parse().unwrap() });
    assert_eq!((call.source_name.as_str(), &call.new_name), ("web", &None));
    assert!(
        call.flags.contains(MigrateFlags::LIVE) && call.flags.contains(MigrateFlags::PEER2PEER)
    );
    assert!(!call.flags.contains(MigrateFlags::POSTCOPY));
    assert_eq!(call.migrate_socket().unwrap().path().to_str(), Some("/run/m.sock"));
    assert_eq!(call.disks_socket().unwrap().unwrap().path().to_str(), Some("/run/d.sock"));
    assert_eq!(call.xml, definition("web", UUID));
}

#[test]
fn prepare_of_a_renamed_guest_has_both_names() {
    let xml = definition("web", UUID);
    let list = [("destination_xml", Value::Text(&xml)), ("destination_name", Value::Text("web-2"))];
    let call = read(&list, &cookie_of("web", UUID), 0).unwrap();
    assert_eq!(call.guest.name, "web-2");
    assert_eq!(call.source_name, "web");
    assert_eq!(call.new_name.as_deref(), Some("web-2"));
    // The cookie has the name of the definition.
    assert!(matches!(
        read(&list, &cookie_of("web-2", UUID), 0),
        Err(RpcError::OtherGuest { what: "name", .. })
    ));
    let list =
        [("destination_xml", Value::Text(&xml)), ("destination_name", Value::Text("../web"))];
    assert!(matches!(read(&list, b"", 0), Err(RpcError::BadName { .. })));
}

#[test]
fn prepare_without_sockets_names_what_is_missing() {
    let xml = definition("web", UUID);
    let call = read(&[("destination_xml", Value::Text(&xml))], b"", 0).unwrap();
    assert_eq!(call.migrate_socket(), Err(RpcError::MissingParameter { name: "migrate_uri" }));
    assert_eq!(call.disks_socket(), Ok(None));
    let tcp = ("migrate_uri", Value::Text("tcp:host:49152"));
    let call = read(&[("destination_xml", Value::Text(&xml)), tcp], b"", 0).unwrap();
    assert!(matches!(call.migrate_socket(), Err(RpcError::NotASocket { .. })));
}

#[test]
fn prepare_refuses_what_libvirt_could_read_differently() {
    let xml = definition("web", UUID);
    let list = [("destination_xml", Value::Text(&xml))];
    let error = RpcError::MissingParameter { name: "destination_xml" };
    assert_eq!(read(&[], b"", 0), Err(error));
    assert_eq!(read(&list, b"", 4), Err(RpcError::Tunnelled));
    let other = read(&list, &cookie_of("web", OTHER_UUID), 0);
    assert!(matches!(other, Err(RpcError::OtherGuest { what: "UUID", .. })), "{other:?}");
    let twice = format!("<domain><name>a</name><name>b</name><uuid>{UUID}</uuid></domain>");
    let other = read(&[("destination_xml", Value::Text(&twice))], b"", 0);
    assert!(matches!(other, Err(RpcError::BadXml { .. })), "{other:?}");
    let nul = xml.replace("web", "w\0b");
    let other = read(&[("destination_xml", Value::Text(&nul))], b"", 0);
    assert!(matches!(other, Err(RpcError::NotText { .. })), "{other:?}");
}

#[test]
fn prepare_and_finish_refuse_every_cut_and_leftover() {
    let whole = prepare(1, "web")[28..].to_vec();
    let end = finish(2, "web", 0)[28..].to_vec();
    let mut prepared = PreparedGuests::default();
    prepared.add(&PrepareCall::read(1, &whole).unwrap());
    for length in 0..whole.len() {
        assert!(PrepareCall::read(1, &whole[..length]).is_err(), "{length}");
    }
    for length in 0..end.len() {
        assert!(prepared.clone().finish(2, &end[..length]).is_err(), "{length}");
    }
    for more in 1..5 {
        let error = RpcError::Leftover { bytes: more as u64 };
        let longer = [&whole[..], &vec![0; more]].concat();
        assert_eq!(PrepareCall::read(1, &longer), Err(error.clone()));
        let longer = [&end[..], &vec![0; more]].concat();
        assert_eq!(prepared.finish(2, &longer), Err(error));
    }
    assert!(prepared.finish(2, &end).is_ok());
}

#[test]
fn finish_needs_a_prepare_of_the_same_name_and_happens_once() {
    let mut prepared = PreparedGuests::default();
    let args = |packet: Vec<u8>| packet[28..].to_vec();
    let error = RpcError::NotPrepared { name: "web".into() };
    assert_eq!(prepared.finish(1, &args(finish(1, "web", 0))), Err(error.clone()));
    prepared.add(&PrepareCall::read(1, &args(prepare(1, "web"))).unwrap());
    prepared.add(&PrepareCall::read(2, &args(prepare(2, "web"))).unwrap());
    assert_eq!(prepared.len(), 1);
    let other = RpcError::NotPrepared { name: "db".into() };
    assert_eq!(prepared.finish(3, &args(finish(3, "db", 0))), Err(other));
    let (call, _) = prepared.finish(4, &args(finish(4, "web", 1))).unwrap();
    assert_eq!((call.serial, call.cancelled, call.guest.name.as_str()), (4, true, "web"));
    assert_eq!(prepared.finish(5, &args(finish(5, "web", 0))), Err(error));
}

#[test]
fn finish_refuses_another_guests_cookie_and_a_missing_name() {
    let mut prepared = PreparedGuests::default();
    prepared.add(&PrepareCall::read(1, &prepare(1, "web")[28..]).unwrap());
    let name = [("destination_name", Value::Text("web"))];
    for (list, cookie, flags) in [
        (&name[..], cookie_of("web", OTHER_UUID), 0),
        (&name[..], cookie_of("db", UUID), 0),
        (&name[..], Vec::new(), 4),
        (&[][..], Vec::new(), 0),
    ] {
        let args = [prepare_args(list, &cookie, flags), words(&[0])].concat();
        let error = prepared.finish(2, &args).unwrap_err();
        let expected = matches!(
            error,
            RpcError::OtherGuest { .. }
                | RpcError::Tunnelled
                | RpcError::MissingParameter { name: "destination_name" }
        );
        assert!(expected, "{error}");
    }
    // A canceled migration has no cookie.
    let args = [prepare_args(&name, b"", 0), words(&[1])].concat();
    assert!(prepared.finish(3, &args).unwrap().0.cancelled);
}
