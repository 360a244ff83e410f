use std::path::Path;

use super::*;

/// A host whose configuration names these peers.
pub fn host(directory: &Path, peers: &[&str]) -> Host {
    let keeper = KeeperAt::new(directory.join("keeper"));
    let host = Host::with_keeper(directory.join("daemon.toml"), keeper);
    configure(&host, directory, peers);
    host
}

/// Writes another configuration.
fn configure(host: &Host, directory: &Path, peers: &[&str]) {
    let mut text = format!(
        "listen = \"127.0.0.1:0\"\nplain = true\nqemu_user = \"root\"\ndirectory = {directory:?}\n"
    );
    for peer in peers {
        text += &format!("[[peer]]\nname = {peer:?}\naddress = \"127.0.0.1:7002\"\n");
    }
    std::fs::write(&host.config, text).unwrap();
}

fn make(peer: &str) -> Ask {
    Ask::Sockets(SocketOrder::MakeOutgoing { peer: peer.into() })
}

#[test]
fn orders_follow_the_file_as_it_was_tried() {
    let directory = tempfile::tempdir().unwrap();
    let host = host(directory.path(), &["b"]);
    let does = |ask: Ask| host.carry_out(&ask).map(drop);
    assert!(does(make("b")).unwrap_err().contains("names no peer b"));
    does(Ask::Attempt).unwrap();
    does(make("b")).unwrap();
    does(Ask::Adopt).unwrap();
    configure(&host, directory.path(), &["c"]);
    does(make("c")).unwrap_err();
    does(Ask::Attempt).unwrap();
    does(make("b")).unwrap();
    does(make("c")).unwrap();
    does(Ask::Abandon).unwrap();
    does(make("c")).unwrap_err();
    does(Ask::Attempt).unwrap();
    does(Ask::Adopt).unwrap();
    does(make("c")).unwrap();
    does(make("b")).unwrap_err();
}

#[test]
fn directory_cannot_change() {
    let directory = tempfile::tempdir().unwrap();
    let host = host(directory.path(), &["b"]);
    host.carry_out(&Ask::Attempt).unwrap();
    host.carry_out(&Ask::Adopt).unwrap();
    configure(&host, Path::new("/etc"), &["b"]);
    let refused = host.carry_out(&Ask::Attempt).unwrap_err();
    assert!(refused.contains("directory can't change"), "{refused}");
    host.carry_out(&make("b")).unwrap();
}

#[test]
fn only_names_of_peers_are_looked_up() {
    let directory = tempfile::tempdir().unwrap();
    let host = host(directory.path(), &["b"]);
    host.carry_out(&Ask::Attempt).unwrap();
    let look_up = |address: &str| host.carry_out(&Ask::Addresses(address.into()));
    let (said, descriptor) = look_up("tcp:127.0.0.1:7002").unwrap();
    let Said::Addresses(found) = said else { panic!("{said:?}") };
    assert!(found == [std::net::IpAddr::from([127, 0, 0, 1])] && descriptor.is_none());
    for other in ["tcp:127.0.0.1:7003", "tcp:localhost:7002", "tls:127.0.0.1:7002", "/etc/passwd"] {
        look_up(other).unwrap_err();
    }
}
