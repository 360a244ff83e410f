//! Deliberate defects.

/// A deliberate defect that no correct engine has. It shows that the checks can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The log loses pages.
    ForgetPages,
    /// The source reads ABORTED where the destination answered that it does not know the session.
    UnknownIsAborted,
    /// The destination's disk drops acknowledged writes.
    LyingDisk,
    /// The source never learns that the link is lost, and its clock stops.
    NoClock,
    /// The pages of a withdrawn round are not sent again.
    ForgetRecalled,
    /// A paused guest waits for the link instead of being resumed.
    StayPaused,
    /// The source resumes the guest when a lane is lost, and still accepts READY.
    RunOnBeforeReady,
    /// The source does not tell the destination that the guest runs on.
    ForgetWithdraw,
    /// The destination takes the last frame before a cut for one that it has not placed.
    PlaceTwice,
    /// A lane does not resend the frames that were lost with its channel.
    ForgetKept,
    /// The destination continues with a FINAL that it received before the control channel was
    /// reconnected.
    KeepFinal,
    /// Free-page hints are not stopped before a harvest.
    HintAcrossHarvest,
    /// Free-page hints are requested before the round's pages are write-protected again.
    HintUnprotected,
    /// A restarted receiver leaves a guest that outlived its predecessor as it is.
    LeaveUnfinished,
    /// A process in a slow step sends no keepalives.
    NoLife,
    /// The source counts the duration of its own slow step as its peer's silence.
    CountOwnTime,
    /// The source answers a request with zeros instead of the page.
    ServeZeros,
    /// The source takes FETCHING for OWNS.
    FetchingIsOwns,
    /// The source takes ENDED for OWNS.
    EndedIsOwns,
    /// LACKING omits a page.
    OmitLacking,
    /// A copy that arrives late is placed over a page that the guest has written.
    PlaceLate,
    /// The destination reports that it has all pages while one is missing.
    FetchedEarly,
    /// A restarted destination takes missing pages for zeros.
    ForgetMissing,
    /// The destination runs the guest if the witness does not answer its claim.
    RunUnclaimed,
    /// The source takes the guest back if the witness does not answer.
    TakeBackUnanswered,
    /// The source takes a claim for the destination's word that it owns the guest.
    ClaimedIsOwns,
    /// The hosts trust a witness that was restored from a backup.
    TrustRestored,
    /// The destination does not repeat requests whose answers were lost with a channel.
    ForgetRequests,
}
