//! Missing pages on a real kernel: threads, processes and KVM guests that wait for their pages.

mod blocked;
mod child;
mod descriptors;
mod huge_pages;
mod kernel;
mod placed;
mod processes;
mod refused;
mod second_mapping;
mod served;
mod support;
