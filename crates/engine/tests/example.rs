//! The example VMM works as docs/embedding.md describes it, and is as short as that document
//! claims.

/// The maximum number of lines of the example, so that it can be read in one sitting.
const MOST_LINES: usize = 200;

#[path = "../examples/embed.rs"]
mod embed;

#[test]
fn example_vmm_moves_the_guest_intact() {
    // The example checks every page of the guest at the destination.
    embed::main().unwrap();
}

#[test]
fn example_vmm_is_short() {
    let lines = include_str!("../examples/embed.rs").lines().count();
    assert!(lines < MOST_LINES, "{lines} lines");
}

#[test]
fn example_policy_is_valid() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/policy.toml");
    vmferry::config::policy::Policy::load(path.as_ref()).unwrap();
}
