//! The rate of the link, as measured by the lanes' senders.

use std::time::Duration;

/// A channel's rate is evaluated after this time, which is many times that of a system call ...
const EVALUATION_PERIOD: Duration = Duration::from_millis(10);
/// ... or after this number of bytes, the largest send buffer of a TCP socket by default.
const EVALUATION_BYTES: u64 = 4 << 20;
/// Weight of a new measurement in the moving average: a change of the link counts for two thirds
/// after five measurements.
const WEIGHT: f64 = 0.2;
/// A channel that was idle for less than this fraction of the time shows the link's rate. A gap
/// between two frames is not zero even on a saturated link.
const IDLE_PART: f64 = 0.1;
/// Time in which the assumed rate of a link that is never saturated doubles: a link that has become
/// ten times faster is found within about a second, and a single gap changes little.
const DOUBLES_IN: Duration = Duration::from_millis(350);

/// The measured rate, and the cap on it.
#[derive(Debug)]
pub struct LinkRate {
    cap: Option<f64>,
    lanes: Vec<LaneRate>,
}

#[derive(Clone, Copy, Debug, Default)]
struct LaneRate {
    bytes: u64,
    waited: Duration,
    took: Duration,
    /// The rate while the channel was not idle, in bytes per second.
    rate: Option<f64>,
}

impl LinkRate {
    /// Nothing is measured yet. `cap` is in bytes per second.
    pub fn new(lanes: u8, cap: Option<u64>) -> Self {
        let lanes = vec![LaneRate::default(); usize::from(lanes)];
        Self { cap: cap.map(|cap| cap as f64), lanes }
    }

    /// Changes the cap. The rate has to be measured again.
    pub fn set_cap(&mut self, cap: Option<u64>) {
        self.cap = cap.map(|cap| cap as f64);
        for lane in &mut self.lanes {
            lane.rate = None;
        }
    }

    /// The rate of all lanes together, if it is known.
    pub fn bytes_per_s(&self) -> Option<f64> {
        let (mut sum, mut known) = (0.0, 0);
        for rate in self.lanes.iter().filter_map(|lane| lane.rate) {
            sum += rate;
            known += 1;
        }
        // A lane that has sent nothing yet is assumed to be like the others.
        let measured = (known > 0).then(|| sum * self.lanes.len() as f64 / f64::from(known));
        match (measured, self.cap) {
            (Some(measured), Some(cap)) => Some(measured.min(cap)),
            (measured, cap) => measured.or(cap),
        }
    }

    /// Records a frame that a lane's channel has accepted in the time `took`, after the channel had
    /// waited for the frame.
    pub fn sent(&mut self, lane: usize, bytes: u64, waited: Duration, took: Duration) {
        let Some(lane) = self.lanes.get_mut(lane) else { return };
        lane.bytes += bytes;
        lane.waited += waited;
        lane.took += took;
        if lane.took < EVALUATION_PERIOD && lane.bytes < EVALUATION_BYTES {
            return;
        }
        let (took, all) = (lane.took.as_secs_f64(), (lane.took + lane.waited).as_secs_f64());
        let seen = lane.bytes as f64 / took.max(1e-9);
        let busy = lane.waited.as_secs_f64() < IDLE_PART * all;
        lane.rate = Some(match lane.rate {
            None => seen,
            Some(known) if busy => known + WEIGHT * (seen - known),
            // The lane could have carried more. Its limit is unknown until it is saturated, so its
            // assumed rate grows until then.
            Some(known) => {
                let grown = known * (all / DOUBLES_IN.as_secs_f64()).exp2();
                grown.min(seen).max(lane.bytes as f64 / all.max(1e-9))
            }
        });
        (lane.bytes, lane.waited, lane.took) = (0, Duration::ZERO, Duration::ZERO);
    }
}
