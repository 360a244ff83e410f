//! Real QEMUs whose guests are moved by the library: attached, carried, and with recognized
//! streams.

mod carried;
mod carried_guests;
mod carried_post_copy;
mod carrying;
mod carrying_faults;
mod changes;
mod devices;
mod disks;
mod found;
mod kvm;
mod kvm_lost_pages;
mod kvm_network;
mod memory_files;
mod migration;
mod post_copy;
mod stream;
mod support;
mod vcpus;
mod writers;
