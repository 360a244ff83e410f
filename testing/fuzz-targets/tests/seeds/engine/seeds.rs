//! Makes the seeds of the fuzz targets.

use vmferry_handover::journal::Record;
use vmferry_wire::GuestIdentity;

type Seeds = Vec<(String, Vec<u8>)>;

/// All that is under way is finished well, and every message delivered.
const GO_ON: [u8; 9] = [6, 0, 0, 8, 0, 0, 0, 3, 10];
/// The same, and the guest dirties pages.
const GO_ON_DIRTYING: [u8; 9] = [6, 0, 0xda, 8, 0, 0, 0, 3, 10];
/// The settings of a conversation whose guest is moved with post-copy after the first round.
const POST_COPY: [u8; 2] = [0x8c, 0];
/// Time enough for every timeout passes.
const WAIT: [u8; 3] = [11, 0xff, 0x3f];
const CUT: [u8; 2] = [12, 2];
const THE_SOURCE_DIES: [u8; 3] = [14, 2, 0];
const THE_DESTINATION_DIES: [u8; 3] = [14, 3, 0];

/// Conversations that are cut, ended or doubted at some step.
pub fn conversations() -> Seeds {
    let going = |steps: usize| GO_ON.repeat(steps);
    let mut seeds = Vec::new();
    for (name, settings) in [("one-lane", 0_u8), ("two-lanes", 1), ("verified", 3), ("rounds", 12)]
    {
        seeds.push((name.to_owned(), [vec![settings], going(40)].concat()));
    }
    for steps in [1, 4, 8, 12, 14, 15, 16, 18] {
        let mut add = |name: &str, then: &[u8]| {
            let seed = [vec![0], going(steps), then.to_vec(), going(8), WAIT.to_vec(), going(8)];
            seeds.push((format!("{name}-{steps}"), seed.concat()));
        };
        add("cut", &CUT);
        add("source-dies", &THE_SOURCE_DIES);
        add("destination-dies", &THE_DESTINATION_DIES);
    }
    // COMMIT is on its way, and everything breaks.
    for steps in 10..20 {
        for (name, then) in [("doubt", &CUT), ("doubt-of-the-next", &[14, 2])] {
            let seed = [vec![0], going(steps), vec![6, 0, 0, 0, 8, 0, 0], then.to_vec()];
            seeds.push((format!("{name}-{steps}"), seed.concat()));
        }
    }
    seeds.extend(post_copies());
    seeds
}

/// Conversations with post-copy, and their losses at some step.
fn post_copies() -> Seeds {
    let going = |steps: usize| GO_ON_DIRTYING.repeat(steps);
    let mut seeds = Vec::new();
    for (name, settings) in [
        ("post-copy", POST_COPY),
        ("post-copy-auto", [0x8c, 1]),
        ("post-copy-when-stuck", [0x80, 4]),
        ("post-copy-two-lanes", [0x8d, 0]),
        ("post-copy-outcomes-lost", [0x8c, 8]),
    ] {
        seeds.push((name.to_owned(), [settings.to_vec(), going(40)].concat()));
    }
    for steps in [10, 12, 14, 15, 16, 17, 18, 20] {
        let mut add = |name: &str, then: &[u8]| {
            let wait = [going(3), WAIT.to_vec()].concat().repeat(4);
            let seed = [POST_COPY.to_vec(), going(steps), then.to_vec(), wait, going(12)];
            seeds.push((format!("post-copy-{name}-{steps}"), seed.concat()));
        };
        add("cut", &CUT);
        add("fetch-lane-lost", &[13, 1, 0]);
        add("source-dies", &THE_SOURCE_DIES);
        add("destination-dies", &THE_DESTINATION_DIES);
        add("guest-and-destination-die", &[14, 3, 1, 1, 1]);
        add("page-touched", &[14, 6]);
        add("guest-ends", &[14, 7]);
        let later = [going(2), WAIT.to_vec(), going(2)].concat();
        add("given-up", &[&[14, 3, 1, 1, 1], &CUT[..], &later, &[14, 4]].concat());
    }
    seeds
}

/// Journals of both sides, whole and torn, and choices of records.
pub fn journals() -> Seeds {
    let open = Record::Open {
        guest: GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: "web".into() },
        peer: "tls:host-b.example:7001".into(),
        peer_names: vec!["spiffe://vmferry/host/host-b".into()],
        at: 1_790_000_000,
        order: 3,
        process: None,
        witness: None,
    };
    let by_operator = false;
    let aborted = Record::Aborted { reason: "no COMMIT came in time".into() };
    let mut seeds = Vec::new();
    for (name, records) in [
        ("source-open", vec![open.clone()]),
        ("source-in-doubt", vec![open.clone(), Record::Commit]),
        ("source-given", vec![open.clone(), Record::Commit, Record::Given { by_operator }]),
        ("source-kept", vec![open.clone(), Record::Commit, Record::Kept { by_operator: true }]),
        ("destination-owns", vec![open.clone(), Record::RunIntent]),
        ("destination-aborted", vec![open.clone(), aborted.clone()]),
        ("both-words", vec![open.clone(), Record::RunIntent, aborted]),
        ("both-sides", vec![open.clone(), Record::Commit, Record::RunIntent]),
    ] {
        let lines: Vec<u8> = records.iter().flat_map(Record::encode).collect();
        let torn = lines[..lines.len() - 7].to_vec();
        seeds.push((name.to_owned(), [vec![0], lines].concat()));
        seeds.push((format!("{name}-torn"), [vec![0], torn].concat()));
    }
    for seed in 0..6_u8 {
        let choices = (0..90_u8).map(|at| at.wrapping_mul(31).wrapping_add(seed.wrapping_mul(77)));
        seeds.push((format!("choices-{seed}"), [vec![1, seed], choices.collect()].concat()));
    }
    seeds
}

/// Policies, each with who comes and what is offered.
pub fn policies() -> Seeds {
    let rule = |source: &str, guests: &str| {
        format!("[[allow]]\nsource = \"{source}\"\nguests = [{guests}]\n")
    };
    let by_uuid = "[[allow]]\nsource = \"backup.example.org\"\n\
                   uuids = [\"00000000-0000-0000-0000-000000000007\"]\n";
    let everything = [
        &rule("spiffe://vmferry/host/rack1-*", "\"web-*\", \"cache\""),
        by_uuid,
        "[[allow]]\nuid = 7\nguests = [\"*\"]\n",
    ]
    .concat();
    let questions: [(&str, &str, &str); 12] = [
        ("everything", &everything, "spiffe://vmferry/host/rack1-a\nrack1-a.example.org\0web-1"),
        ("another-guest", &everything, "spiffe://vmferry/host/rack1-a\0db"),
        ("another-host", &everything, "spiffe://vmferry/host/rack2-a\0web-1"),
        ("another-path", &everything, "spiffe://vmferry/host/rack1-a/b\0web-1"),
        ("by-uuid", by_uuid, "backup.example.org\0db"),
        ("any-label", &rule("*.example.org", "\"*\""), "a.example.org\nb.a.example.org\0x"),
        ("letters", &rule("A.Example.ORG", "\"Web\""), "a.eXAMPLE.org\0Web"),
        ("stars", &rule("*a**b*", "\"*a*b*a*\""), "aaabab\0abbaba"),
        ("a-mistake", "[[allow]]\nsource = \"a b\"\nguests = [\"x\"]\n", "a b\0x"),
        ("nothing-for-it", "[[allow]]\nsource = \"a\"\n", "a\0x"),
        ("no-rule", "# nothing yet\n", "a\0x"),
        ("odd-names", &rule("10.0.0.*", "\"a\\u0000b\", \"é\""), "10.0.0.7\n10.0.0.7.8\0é"),
    ];
    let seeds = questions.into_iter().map(|(name, policy, who)| {
        (name.to_owned(), [policy.as_bytes(), &[0, 0], who.as_bytes()].concat())
    });
    seeds.collect()
}
