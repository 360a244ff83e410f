//! The example VMM does what docs/embedding.md says, and is as short as it says.

/// The most lines that the example may have, so that it can be read in one sitting.
const MOST_LINES: usize = 200;

#[path = "../examples/embed.rs"]
mod embed;

#[test]
fn the_guest_arrives_whole() {
    // The example checks every page of the guest at the destination.
    embed::main().unwrap();
}

#[test]
fn it_is_short() {
    let lines = include_str!("../examples/embed.rs").lines().count();
    assert!(lines < MOST_LINES, "{lines} lines");
}

#[test]
fn the_example_of_a_policy_is_one() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/policy.toml");
    vmferry::config::policy::Policy::load(path.as_ref()).unwrap();
}
