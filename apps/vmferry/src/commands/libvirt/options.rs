//! The options of `vmferry send --libvirt` as those of `virsh migrate`, and options that mean
//! nothing for libvirt.

use std::ffi::OsString;

use clap::ArgMatches;
use clap::parser::ValueSource;

use super::peer::Uris;
use crate::args::{SendOptions, WhenStuck};
use crate::exit::{Code, Failure};

const MIB: u64 = 1 << 20;

/// libvirt's largest bandwidth in MiB/s, which means no limit: `QEMU_DOMAIN_MIG_BANDWIDTH_MAX` in
/// its `qemu_domain.h`.
const UNLIMITED_MIB: u64 = i64::MAX as u64 / MIB;

const CERTIFICATES: &str = "the daemons connect the hosts: set `tls` (or `plain`) in the daemon's \
                            configuration, and `id` for a peer";
const PACKING: &str = "the daemon packs memory and disks, with the settings of its configuration";
const UNKNOWN_TO_QEMU: &str = "QEMU sends the guest's memory itself, and vmferry only carries it";
const HOOK: &str = "libvirt has its own hook, /etc/libvirt/hooks/qemu, which it runs on both hosts";

/// Options that mean nothing with `--libvirt`, and what to do instead.
const REFUSED: [(&str, &str); 26] = [
    ("tls", CERTIFICATES),
    ("ca", CERTIFICATES),
    ("cert", CERTIFICATES),
    ("key", CERTIFICATES),
    ("crl", CERTIFICATES),
    ("clock_skew", CERTIFICATES),
    ("plain", CERTIFICATES),
    ("server_name", CERTIFICATES),
    ("destination_id", CERTIFICATES),
    ("compress", "the daemon packs memory and disks: set `compress` in its configuration"),
    (
        "reconnect_timeout",
        "the daemon makes links again: set `reconnect_timeout` in its \
                           configuration",
    ),
    ("when_busy", PACKING),
    ("workers", PACKING),
    ("delta_memory", PACKING),
    ("no_free_page_hints", PACKING),
    ("protocol", "the daemons agree on a version of the protocol"),
    (
        "channels",
        "the daemon makes a link for each of libvirt's connections: use --multifd N for \
                  more of them",
    ),
    ("max_rounds", "libvirt does not limit rounds: use --timeout"),
    ("downtime_abort", "QEMU does not end a pause that has begun: use --downtime-limit"),
    (
        "pause_before_switchover",
        "libvirt has no hold before the switchover, and no downtime limit keeps QEMU from it once \
         the guest writes little (docs/libvirt.md)",
    ),
    (
        "post_copy",
        "QEMU's own post-copy: use --postcopy, as for virsh, or `virsh migrate-postcopy` later",
    ),
    ("verify", UNKNOWN_TO_QEMU),
    ("record", UNKNOWN_TO_QEMU),
    ("record_limit", UNKNOWN_TO_QEMU),
    ("hook", HOOK),
    ("hook_timeout", HOOK),
];

/// Which options the user gave, and did not leave at their defaults.
pub struct Given<'a>(pub &'a ArgMatches);

impl Given<'_> {
    /// Whether an option is on the command line.
    pub fn has(&self, option: &str) -> bool {
        self.0.value_source(option) == Some(ValueSource::CommandLine)
    }

    /// Fails if an option is given that means nothing with `--libvirt`.
    pub fn must_mean_something(&self) -> Result<(), Failure> {
        if self.0.get_one("when_stuck") == Some(&WhenStuck::PostCopy) {
            let text = "--when-stuck post-copy has no effect with --libvirt: use --postcopy, and \
                        `virsh migrate-postcopy` when it is stuck";
            return Err(Failure::new(Code::Usage, text));
        }
        let Some((option, reason)) = REFUSED.iter().find(|(option, _)| self.has(option)) else {
            return Ok(());
        };
        let option = option.replace('_', "-");
        let text = format!("--{option} has no effect with --libvirt: {reason}");
        Err(Failure::new(Code::Usage, text))
    }
}

/// A rate as libvirt takes it: whole MiB per second, rounded down so that the cap holds.
pub fn mib_per_s(bytes_per_s: Option<u64>) -> Result<u64, Failure> {
    let Some(bytes) = bytes_per_s else { return Ok(UNLIMITED_MIB) };
    match bytes / MIB {
        // libvirt takes 0 for no limit.
        0 => {
            let text = format!(
                "{bytes} bytes per second are less than libvirt can cap a migration to: use at \
                 least 1MiB/s"
            );
            Err(Failure::new(Code::Usage, text))
        }
        mib => Ok(mib.min(UNLIMITED_MIB)),
    }
}

/// The command line of `virsh migrate`.
pub fn migrate_arguments(
    uuid: &str,
    uris: &Uris,
    options: &SendOptions,
) -> Result<Vec<OsString>, Failure> {
    let domain = &options.domain;
    let mut all: Vec<OsString> = Vec::new();
    all.extend(["migrate", "--live", "--p2p", "--domain", uuid].map(Into::into));
    let mut add = |option: &str, value: OsString| {
        // One argument, because a value may look like an option.
        let mut argument = OsString::from(format!("--{option}="));
        argument.push(value);
        all.push(argument);
    };
    add("desturi", uris.libvirt.clone().into());
    add("migrateuri", uris.memory.clone().into());
    if domain.copy_storage_all || domain.copy_storage_inc {
        add("disks-uri", uris.disks.clone().into());
    }
    if let Some(disks) = &domain.migrate_disks {
        add("migrate-disks", disks.into());
    }
    if let Some(name) = &domain.dname {
        add("dname", name.into());
    }
    if let Some(file) = &domain.xml {
        add("xml", file.into());
    }
    if let Some(file) = &domain.persistent_xml {
        add("persistent-xml", file.into());
    }
    if let Some(streams) = options.multifd {
        add("parallel-connections", streams.to_string().into());
    }
    if let Some(cap) = options.migration.max_bandwidth {
        let mib: OsString = mib_per_s(Some(cap))?.to_string().into();
        add("bandwidth", mib.clone());
        if domain.postcopy {
            add("postcopy-bandwidth", mib);
        }
    }
    let flags = [
        ("--copy-storage-all", domain.copy_storage_all),
        ("--copy-storage-inc", domain.copy_storage_inc),
        ("--persistent", domain.persistent),
        ("--undefinesource", domain.undefine_source),
        ("--auto-converge", domain.auto_converge || options.migration.throttle > 0),
        ("--postcopy", domain.postcopy),
        ("--postcopy-after-precopy", domain.postcopy),
        ("--parallel", domain.parallel || options.multifd.is_some()),
        ("--unsafe", domain.unsafe_),
        ("--abort-on-error", domain.abort_on_error),
    ];
    all.extend(flags.into_iter().filter(|(_, given)| *given).map(|(flag, _)| flag.into()));
    Ok(all)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches};

    use super::*;
    use crate::args::{Arguments, Command};

    fn parsed(more: &[&str]) -> (ArgMatches, SendOptions) {
        let usual = ["vmferry", "send", "--libvirt", "web", "--to", "host-b"];
        let matches = Arguments::command().try_get_matches_from([&usual[..], more].concat());
        let matches = matches.unwrap();
        let Command::Send(options) = Arguments::from_arg_matches(&matches).unwrap().command else {
            panic!("not `send`")
        };
        (matches.subcommand_matches("send").unwrap().clone(), *options)
    }

    fn arguments(more: &[&str]) -> Result<Vec<String>, Failure> {
        let uris = Uris { libvirt: "L".into(), memory: "M".into(), disks: "D".into() };
        let all = migrate_arguments("U", &uris, &parsed(more).1)?;
        Ok(all.into_iter().map(|one| one.into_string().unwrap()).collect())
    }

    #[test]
    fn refused_options_are_refused_only_if_they_are_given() {
        for more in [
            &[][..],
            &["--downtime-limit", "300ms", "--max-bandwidth", "1G", "--timeout", "9s"],
            &["--throttle", "50", "--multifd", "2", "--save-run", "f", "--when-stuck", "refuse"],
        ] {
            Given(&parsed(more).0).must_mean_something().unwrap();
        }
        for (more, said) in [
            (&["--verify"][..], "QEMU sends"),
            (&["--compress", "auto"], "`compress` in its configuration"),
            (&["--channels", "2"], "--multifd"),
            (&["--tls", "d"], "`tls` (or `plain`)"),
            (&["--pause-before-switchover"], "libvirt has no hold"),
        ] {
            let failure = Given(&parsed(more).0).must_mean_something().unwrap_err();
            assert_eq!(failure.code, Code::Usage);
            let text = failure.to_string();
            assert!(text.starts_with(more[0]) && text.contains(said), "{text}");
        }
    }

    #[test]
    fn virsh_gets_the_options_that_it_has() {
        let plain =
            ["migrate", "--live", "--p2p", "--domain", "U", "--desturi=L", "--migrateuri=M"];
        assert_eq!(arguments(&[]).unwrap(), plain);
        let (usual, more) = (arguments(&["--postcopy", "--max-bandwidth", "10MiB/s"]).unwrap(), 7);
        let postcopy = ["--bandwidth=10", "--postcopy-bandwidth=10", "--postcopy"];
        assert_eq!(usual[more..more + 3], postcopy);
        let copied = arguments(&["--copy-storage-all", "--migrate-disks", "vda"]).unwrap();
        assert_eq!(copied[more..], ["--disks-uri=D", "--migrate-disks=vda", "--copy-storage-all"]);
        let parallel = arguments(&["--multifd", "3", "--throttle", "20"]).unwrap();
        let expected = ["--parallel-connections=3", "--auto-converge", "--parallel"];
        assert_eq!(parallel[more..], expected);
    }

    #[test]
    fn cap_is_never_rounded_to_no_cap() {
        assert_eq!(mib_per_s(Some(MIB * 3 / 2)).unwrap(), 1);
        assert_eq!(mib_per_s(None).unwrap(), 8_796_093_022_207);
        assert_eq!(mib_per_s(Some(1000)).unwrap_err().code, Code::Usage);
        assert_eq!(arguments(&["--max-bandwidth", "1k"]).unwrap_err().code, Code::Usage);
    }
}
