//! `vmferry send`: moves a running guest.

use vmferry_control::{RecordRequest, Request, call};
use vmferry_transport::Address;

use super::link::{address, source_files};
use super::migration::{migrate, migrate_request, saved_run};
use super::socket;
use crate::args::SendOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::progress::JsonEvents;
use crate::tables::{outcome, recorded};

/// Asks the guest's VMM to migrate, and shows progress and result. This process holds the
/// migration's lease: if it ends before COMMIT, the migration is cancelled.
pub fn run(options: &SendOptions, output: &Output) -> Result<(), Failure> {
    if let Some(qmp) = &options.qemu {
        super::libvirt::managed::must_not_be_managed(qmp, &options.to)?;
        return super::qemu::send::run(qmp, options, output);
    }
    if let Some(guest) = &options.libvirt {
        return super::libvirt::run(guest, options, output);
    }
    super::qemu::hook::must_be_of_a_qemu(&options.hook)?;
    let tls = source_files(options)?;
    let to = address(&options.to, &options.tls)?;
    let mut request = migrate_request(to, tls, &options.migration, options.verify);
    let address: Address = request.to.parse().map_err(|error| Failure::of(Code::Usage, error))?;
    // Absolute, because the VMM uses the files and has another working directory.
    request.witness = options.witness.witness.as_deref().map(std::path::absolute).transpose()?;
    if let Some(directory) = &options.record.record {
        let directory = std::path::absolute(directory)?;
        request.record = Some(RecordRequest { directory, limit: options.record.record_limit });
    }
    let socket = socket(options.guest.as_deref().unwrap_or_default())?;
    // A restricted VMM can't resolve names, so this process does. VMMs that report no release are
    // not restricted and do not know the member `addresses`.
    if call(&socket, &Request::Status, &mut |_| {})?["release"].is_string() {
        request.addresses = address.look_up()?;
    }
    let saved = saved_run(&options.migration)?;
    let stats = migrate(&socket, request, output, JsonEvents::All, saved)?;
    output.result(&stats, || outcome(&recorded(&stats)));
    Ok(())
}
