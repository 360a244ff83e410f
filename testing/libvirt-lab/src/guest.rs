//! Domains on a host, and what their guests report on the serial console.

use std::path::{Path, PathBuf};

use crate::{Domain, LibvirtHost, Said, last_lines, poll};

/// The directory of the serial consoles' files, on each host. libvirt also writes QEMU's logs here.
pub(crate) const CONSOLES: &str = "/var/log/libvirt/qemu";

impl LibvirtHost {
    /// Starts a transient domain (`virsh create`).
    ///
    /// # Panics
    /// If libvirt can't.
    pub fn create(&self, domain: &Domain) {
        self.virsh_ok(&["create", self.write_xml(domain).to_str().expect("a path is text")]);
    }

    /// Defines and starts a persistent domain.
    ///
    /// # Panics
    /// If libvirt can't.
    pub fn define_and_start(&self, domain: &Domain) {
        self.define(domain);
        self.virsh_ok(&["start", &domain.name]);
    }

    /// Defines a persistent domain and does not start it.
    ///
    /// # Panics
    /// If libvirt can't.
    pub fn define(&self, domain: &Domain) {
        self.virsh_ok(&["define", self.write_xml(domain).to_str().expect("a path is text")]);
    }

    /// Writes a domain's definition to a file, and returns the file's path on this host.
    fn write_xml(&self, domain: &Domain) -> PathBuf {
        let path = Path::new("/run").join(format!("{}.xml", domain.name));
        let xml = domain.xml(self.version(), self.boot());
        std::fs::write(self.path(&path), xml).expect("/run can be written");
        path
    }

    /// The domain's state as `virsh domstate` prints it (`running`, `paused`, `shut off`), or
    /// `None` if this host has no such domain.
    ///
    /// # Panics
    /// If libvirt does not answer.
    pub fn domain_state(&self, name: &str) -> Option<String> {
        let output = self.virsh(&["domstate", name]);
        if output.status.success() {
            return Some(String::from_utf8_lossy(&output.stdout).trim().to_owned());
        }
        let problem = String::from_utf8_lossy(&output.stderr);
        // It may end between two calls of virsh.
        let gone = ["failed to get domain", "Domain not found"];
        let gone = gone.iter().any(|text| problem.contains(text));
        assert!(gone, "domstate {name}: {problem}");
        None
    }

    /// Waits until the domain is in a state; see [`domain_state`](Self::domain_state).
    ///
    /// # Panics
    /// If it never is.
    pub fn wait_for_state(&self, name: &str, state: Option<&str>) {
        poll(
            || (self.domain_state(name).as_deref() == state).then_some(()),
            || format!("{name} is {:?} instead of {state:?}", self.domain_state(name)),
        );
    }

    /// The process of the domain's QEMU, if the domain runs.
    pub fn qemu_pid(&self, name: &str) -> Option<u32> {
        std::fs::read_to_string(self.pid_file(name)).ok()?.trim().parse().ok()
    }

    /// The file with the PID of the domain's QEMU. libvirt removes it when the QEMU has ended.
    pub fn pid_file(&self, name: &str) -> PathBuf {
        self.path_in_run(Path::new("libvirt/qemu").join(format!("{name}.pid")))
    }

    /// The file that the domain's serial console writes on this host. libvirt empties it when it
    /// starts a QEMU for the domain.
    pub fn console(&self, name: &str) -> PathBuf {
        self.path(Path::new(CONSOLES).join(format!("{name}.console")))
    }

    /// The guest's last report on this host.
    pub fn said(&self, name: &str) -> Option<Said> {
        Said::last(&self.console(name))
    }

    /// Waits until the guest has reported what is wanted on this host.
    ///
    /// # Panics
    /// If it never does.
    pub fn wait_for(&self, name: &str, what: &str, wanted: impl Fn(&Said) -> bool) -> Said {
        let found = || self.said(name).filter(&wanted);
        poll(found, || {
            let log = self.path(Path::new(CONSOLES).join(format!("{name}.log")));
            format!(
                "{name} on {} never {what}: {:?}\n{}\n{}",
                self.name(),
                self.domain_state(name),
                last_lines(&self.console(name), 5),
                last_lines(&log, 5)
            )
        })
    }

    /// Waits until the guest has checked all of its memory once more on this host, without an
    /// error.
    ///
    /// # Panics
    /// If it does not, or has found an error.
    pub fn check_guest(&self, name: &str) -> Said {
        Said::check(|what, wanted| self.wait_for(name, what, wanted))
    }
}
