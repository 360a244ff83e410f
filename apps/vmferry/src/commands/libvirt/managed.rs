//! Recognizes the QMP socket of a QEMU that libvirt manages. libvirt keeps its connection, and a
//! QEMU serves one client of a QMP socket at a time, so another client would wait in vain.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::exit::{Code, Failure};

/// The directories of libvirt's QEMU driver, without the first one or two components.
const DIRECTORY: &str = "libvirt/qemu";

/// The name that libvirt gives the monitor's character device.
const MONITOR: &[u8] = b"chardev=charmonitor";

/// Fails at once, with the command to use instead, if libvirt manages the QEMU at a QMP socket.
pub fn must_not_be_managed(qmp: &Path, to: &str) -> Result<(), Failure> {
    let Some(name) = managed_guest(qmp) else { return Ok(()) };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let guest = match &name {
        Some(name) if name.chars().all(plain) => name.clone(),
        Some(name) => format!("'{}'", name.replace('\'', "'\\''")),
        None => "GUEST".to_owned(),
    };
    // With --libvirt it is the name of a peer.
    let is_address = to.contains([':', '/']);
    let peer = if is_address { to.split([':', '/']).next().unwrap_or_default() } else { to };
    let schemes = ["", "tls", "tcp", "unix", "fd", "grpc", "grpc-ack"];
    let peer = if schemes.contains(&peer) { "PEER" } else { peer };
    let text = format!(
        "libvirt manages the guest of the QMP socket {}, and keeps the socket for itself: use \
         `vmferry send --libvirt {guest} --to {peer}`, where {peer} is a peer of `vmferry daemon` \
         (docs/libvirt.md)",
        qmp.display()
    );
    Err(Failure::new(Code::Busy, text))
}

/// `None` if libvirt does not manage the QEMU, or else the guest's name, if it can be seen.
fn managed_guest(qmp: &Path) -> Option<Option<String>> {
    let path = std::fs::canonicalize(qmp).ok()?;
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let named = guest_of_sockets(&listeners(&sockets, &path));
    if named.is_some() {
        return Some(named);
    }
    is_in_libvirts_directory(&path).then(|| name_in_directory(&path))
}

/// `/var/lib/libvirt/qemu/domain-3-web/monitor.sock`, or the same under `/run` or a user's
/// `~/.config`.
fn is_in_libvirts_directory(path: &Path) -> bool {
    let text = path.to_string_lossy();
    let is_system = ["/var/lib/", "/run/", "/var/run/"]
        .iter()
        .any(|base| text.starts_with(&format!("{base}{DIRECTORY}/")));
    let is_monitor = path.file_name().is_some_and(|name| name == "monitor.sock");
    is_system || is_monitor && text.contains(&format!("/{DIRECTORY}/"))
}

/// The name in `domain-ID-NAME`, which libvirt cuts after 20 characters.
fn name_in_directory(path: &Path) -> Option<String> {
    const CUT_AFTER: usize = 20;
    let directory = path.parent()?.file_name()?.to_str()?.strip_prefix("domain-")?;
    let (id, name) = directory.split_once('-')?;
    let is_id = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit());
    (is_id && name.chars().count() < CUT_AFTER).then(|| name.to_owned())
}

/// The inodes of sockets that listen at a path, from `/proc/net/unix`.
fn listeners(sockets: &str, path: &Path) -> Vec<String> {
    /// `__SO_ACCEPTCON`.
    const LISTENS: &str = "00010000";
    let wanted = path.to_string_lossy();
    let lines = sockets.lines().filter_map(|line| {
        let mut fields = line.splitn(8, ' ').map(str::trim);
        let flags = fields.nth(3)?;
        // The inode is padded to a width.
        let (inode, at) = line
            .trim_end()
            .rsplit_once(' ')
            .map(|(before, at)| (before.rsplit(' ').next().unwrap_or_default(), at))?;
        (flags == LISTENS && at == wanted).then(|| inode.to_owned())
    });
    lines.collect()
}

/// The name of the guest of a process that has one of these sockets and libvirt's monitor.
fn guest_of_sockets(inodes: &[String]) -> Option<String> {
    if inodes.is_empty() {
        return None;
    }
    let links: Vec<String> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let directory = process.path();
        let Ok(command) = std::fs::read(directory.join("cmdline")) else { continue };
        let Some(name) = libvirts_guest(&command) else { continue };
        let Ok(descriptors) = std::fs::read_dir(directory.join("fd")) else { continue };
        let has_one = descriptors.flatten().any(|descriptor| {
            std::fs::read_link(descriptor.path()).is_ok_and(|link| {
                links.iter().any(|wanted| link.as_os_str().as_bytes() == wanted.as_bytes())
            })
        });
        if has_one {
            return Some(name);
        }
    }
    None
}

/// The guest's name on the command line of a QEMU that libvirt has started:
/// `-name guest=web,debug-threads=on` and `-mon chardev=charmonitor,…`.
fn libvirts_guest(command: &[u8]) -> Option<String> {
    let mut arguments = command.split(|byte| *byte == 0);
    if !arguments.clone().any(|argument| argument.starts_with(MONITOR)) {
        return None;
    }
    arguments.find(|argument| *argument == b"-name")?;
    let name = String::from_utf8_lossy(arguments.next()?).into_owned();
    let name = name.strip_prefix("guest=").unwrap_or(&name);
    // In QEMU's options a comma is written twice.
    let end = name.replace(",,", "\0\0").find(',').unwrap_or(name.len());
    Some(name[..end].replace(",,", ","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libvirts_guest_is_read_from_the_command_line() {
        let command = |name: &str, monitor: &str| {
            ["qemu", "-name", name, "-mon", monitor].join("\0").into_bytes()
        };
        let monitor = "chardev=charmonitor,id=monitor,mode=control";
        let named = libvirts_guest(&command("guest=web,debug-threads=on", monitor));
        assert_eq!(named.as_deref(), Some("web"));
        let odd = libvirts_guest(&command("guest=a,,b,debug-threads=on", monitor));
        assert_eq!(odd.as_deref(), Some("a,b"));
        assert_eq!(libvirts_guest(&command("guest=web", "chardev=mon")), None);
    }

    #[test]
    fn listeners_are_found_by_their_path() {
        let sockets = "\
Num       RefCount Protocol Flags    Type St Inode Path
0000000039153038: 00000002 00000000 00010000 0001 01 4686194 /var/lib/x/monitor.sock
000000008a5a94be: 00000003 00000000 00000000 0001 03  46861 /var/lib/x/monitor.sock
000000008a5a94bf: 00000002 00000000 00010000 0001 01   977 /run/other.sock
000000008a5a94c0: 00000002 00000000 00000000 0002 01   978
";
        assert_eq!(listeners(sockets, Path::new("/var/lib/x/monitor.sock")), ["4686194"]);
        assert_eq!(listeners(sockets, Path::new("/run/other.sock")), ["977"]);
    }

    #[test]
    fn directories_of_libvirt_are_recognized() {
        let monitor = Path::new("/var/lib/libvirt/qemu/domain-3-web-1/monitor.sock");
        assert!(is_in_libvirts_directory(monitor));
        assert_eq!(name_in_directory(monitor).as_deref(), Some("web-1"));
        let session = Path::new("/home/u/.config/libvirt/qemu/lib/domain-1-a/monitor.sock");
        assert!(is_in_libvirts_directory(session));
        let cut = Path::new("/var/lib/libvirt/qemu/domain-3-abcdefghijklmnopqrst/monitor.sock");
        assert_eq!(name_in_directory(cut), None);
        assert!(!is_in_libvirts_directory(Path::new("/run/qemu/web.qmp")));
        assert!(!is_in_libvirts_directory(Path::new("/run/monitor.sock")));
    }

    #[test]
    fn socket_of_another_program_is_not_managed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        must_not_be_managed(&path, "host-b:7001").unwrap();
        must_not_be_managed(&directory.path().join("none"), "host-b:7001").unwrap();
    }
}
