//! Time, links and steps of the simulation.

use std::ops::{Index, IndexMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anywarp_core::connection::End as StreamEnd;
use anywarp_core::llp::mpa::frame::Run;
use anywarp_core::observe::Observer;
use anywarp_core::verbs::mr::Memory;

use crate::end::{End, Host, Setup};
use crate::pipe::{Load, Pipe};
use crate::raw::Raw;
use crate::rng::Rng;

/// Index of an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndId(usize);

/// Index of a scripted peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawId(usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Node {
    End(usize),
    Raw(usize),
}

#[derive(Debug)]
struct Link {
    nodes: [Node; 2],
    /// `pipes[i]` carries the bytes that `nodes[i]` sends.
    pipes: [Pipe; 2],
}

/// Ends, links and a clock.
#[derive(Debug)]
pub struct World {
    seed: u64,
    /// The generator for all random choices of the world.
    pub rng: Rng,
    start: Instant,
    now: Instant,
    ends: Vec<End>,
    raws: Vec<Raw>,
    links: Vec<Link>,
    hosts: u64,
    /// Whether a message that is only an acknowledgement waits until a step has nothing else to do, as in a busy
    /// engine.
    pub lazy_acks: bool,
}

impl Index<EndId> for World {
    type Output = End;
    fn index(&self, id: EndId) -> &End {
        &self.ends[id.0]
    }
}

impl IndexMut<EndId> for World {
    fn index_mut(&mut self, id: EndId) -> &mut End {
        &mut self.ends[id.0]
    }
}

impl Index<RawId> for World {
    type Output = Raw;
    fn index(&self, id: RawId) -> &Raw {
        &self.raws[id.0]
    }
}

impl IndexMut<RawId> for World {
    fn index_mut(&mut self, id: RawId) -> &mut Raw {
        &mut self.raws[id.0]
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with ANYWARP_SEED={}", self.seed);
        }
    }
}

impl World {
    /// An empty world.
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        // Discards the first number.
        rng.next();
        // This is the only use of a real clock. Only differences to its value matter.
        let start = Instant::now();
        Self {
            seed,
            lazy_acks: rng.chance(50),
            rng,
            start,
            now: start,
            ends: Vec::new(),
            raws: Vec::new(),
            links: Vec::new(),
            hosts: 0,
        }
    }

    /// The time that has passed.
    pub fn elapsed(&self) -> Duration {
        self.now - self.start
    }

    /// The time.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// A new device.
    pub fn host(&mut self) -> Host {
        self.host_with(None)
    }

    /// A new device with an observer.
    pub fn host_with(&mut self, observer: Option<Arc<dyn Observer>>) -> Host {
        self.hosts += 1;
        Host::new(self.seed ^ self.hosts << 32, observer)
    }

    /// Two connected ends on two hosts; the first one is the initiator.
    pub fn pair(&mut self, setup: &Setup) -> (EndId, EndId) {
        let (a, b) = (self.host(), self.host());
        self.connect(&a, setup, &b, setup)
    }

    /// A connected pair on these hosts; the first one is the initiator.
    pub fn connect(&mut self, a: &Host, of_a: &Setup, b: &Host, of_b: &Setup) -> (EndId, EndId) {
        let (a, b) = (self.end(a, of_a), self.end(b, of_b));
        self.link(Node::End(a.0), Node::End(b.0));
        let now = self.now;
        self[a].conn.attach(of_a.stream(true), now);
        self[b].conn.attach(of_b.stream(false), now);
        (a, b)
    }

    /// An end without a peer.
    pub fn end(&mut self, host: &Host, setup: &Setup) -> EndId {
        let qpn = 0x100 + self.ends.len() as u32;
        self.ends.push(End::new(host, qpn, setup));
        EndId(self.ends.len() - 1)
    }

    /// An end with a scripted peer.
    pub fn raw(&mut self, setup: &Setup, initiator: bool) -> (EndId, RawId) {
        let host = self.host();
        let end = self.end(&host, setup);
        self.raws.push(Raw::new(setup.crc));
        let raw = RawId(self.raws.len() - 1);
        self.link(Node::End(end.0), Node::Raw(raw.0));
        let now = self.now;
        self[end].conn.attach(setup.stream(initiator), now);
        (end, raw)
    }

    /// An end that is connected to itself.
    pub fn looped(&mut self, setup: &Setup) -> EndId {
        let host = self.host();
        let end = self.end(&host, setup);
        self.link(Node::End(end.0), Node::End(end.0));
        let now = self.now;
        self[end].conn.attach(setup.stream(true), now);
        end
    }

    fn link(&mut self, a: Node, b: Node) {
        let pipes = [Pipe::new(&mut self.rng), Pipe::new(&mut self.rng)];
        self.links.push(Link {
            nodes: [a, b],
            pipes,
        });
    }

    /// The pipe that `end` sends into.
    pub fn pipe_from(&mut self, end: EndId) -> &mut Pipe {
        let (link, side) = self.link_of(Node::End(end.0)).expect("an end with a link");
        &mut self.links[link].pipes[side]
    }

    /// Breaks the link of this end.
    pub fn kill(&mut self, end: EndId) {
        if let Some((link, _)) = self.link_of(Node::End(end.0)) {
            self.reset(link);
        }
    }

    fn link_of(&self, node: Node) -> Option<(usize, usize)> {
        self.links.iter().enumerate().find_map(|(i, link)| {
            let side = link.nodes.iter().position(|n| *n == node)?;
            Some((i, side))
        })
    }

    fn reset(&mut self, link: usize) {
        let now = self.now;
        for pipe in &mut self.links[link].pipes {
            pipe.reset(now, &mut self.rng);
        }
    }

    // ------------------------------------------------------------------ turns

    /// Runs until nothing happens any more, for at most an hour of virtual time.
    pub fn run(&mut self) {
        let end = self.now + Duration::from_secs(3600);
        self.run_until(end);
    }

    /// Runs for some time, or until nothing happens any more.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        self.run_until(end);
        self.now = self.now.max(end);
    }

    fn run_until(&mut self, end: Instant) {
        for turn in 0.. {
            assert!(turn < 3_000_000, "the conversation does not end");
            if !self.turn(end) {
                return;
            }
        }
    }

    /// Makes one step; false when nothing can happen before `until`.
    pub fn turn(&mut self, until: Instant) -> bool {
        let mut busy = false;
        let first = self.rng.below(self.ends.len());
        for i in 0..self.ends.len() {
            let flush = !self.lazy_acks;
            busy |= self.transmit((first + i) % self.ends.len(), flush);
        }
        for i in 0..self.raws.len() {
            busy |= self.transmit_raw(i);
        }
        busy |= self.deliver();
        if busy {
            return true;
        }
        for i in 0..self.ends.len() {
            busy |= self.transmit(i, true);
        }
        if busy {
            return true;
        }
        let next = self
            .links
            .iter()
            .flat_map(|l| l.pipes.iter().filter_map(Pipe::next_arrival))
            .chain(self.ends.iter().filter_map(|e| e.conn.poll_timeout()))
            .min();
        let Some(next) = next.filter(|t| *t <= until) else {
            return false;
        };
        self.now = self.now.max(next);
        let now = self.now;
        for end in &mut self.ends {
            if end.conn.poll_timeout().is_some_and(|t| t <= now) {
                end.conn.handle_timeout(now);
                end.collect();
            }
        }
        true
    }

    fn transmit(&mut self, i: usize, flush: bool) -> bool {
        let Some((link, side)) = self.link_of(Node::End(i)) else {
            self.ends[i].collect();
            return false;
        };
        let mut busy = false;
        loop {
            let now = self.now;
            let end = &mut self.ends[i];
            if end.over {
                end.collect();
                return busy;
            }
            if end.batch.is_empty() {
                end.conn.poll_tx(now, flush, &mut end.batch);
                end.sent = 0;
                end.collect();
            }
            let closing = end.conn.end();
            if closing == StreamEnd::Dead {
                // The stream is closed or broken. Nothing more is sent, not even a Terminate.
                end.over = true;
                let pipe = &mut self.links[link].pipes[side];
                return busy | pipe.close(now, &mut self.rng);
            }
            let pipe = &mut self.links[link].pipes[side];
            if end.batch.is_empty() {
                if closing == StreamEnd::Closing {
                    busy |= pipe.close(now, &mut self.rng);
                }
                return busy;
            }
            if pipe.is_closed() {
                return busy;
            }
            let room = pipe.room();
            if room == 0 {
                return busy;
            }
            let most = room.min(1 + self.rng.below(400_000));
            let Some(bytes) = gather(end, most) else {
                // The memory of a message was deregistered, so the engine has to drop the connection.
                self.reset(link);
                return true;
            };
            busy = true;
            end.sent += bytes.len();
            let dies = pipe.write(now, &mut self.rng, &bytes);
            if end.sent >= end.batch.len() {
                end.batch.clear();
                end.sent = 0;
                end.conn.handle_written();
                end.collect();
            }
            if dies {
                self.reset(link);
                return true;
            }
        }
    }

    fn transmit_raw(&mut self, i: usize) -> bool {
        let node = Node::Raw(i);
        let (link, side) = self.link_of(node).expect("a linked peer");
        let now = self.now;
        let raw = &mut self.raws[i];
        let pipe = &mut self.links[link].pipes[side];
        let mut busy = false;
        let room = pipe.room().min(raw.out.len());
        if room > 0 {
            let bytes: Vec<u8> = raw.out.drain(..room).collect();
            pipe.write(now, &mut self.rng, &bytes);
            busy = true;
        }
        if raw.closing && raw.out.is_empty() {
            busy |= pipe.close(now, &mut self.rng);
        }
        busy
    }

    fn deliver(&mut self) -> bool {
        let mut busy = false;
        for link in 0..self.links.len() {
            for side in 0..2 {
                let to = self.links[link].nodes[1 - side];
                while let Some(load) = self.links[link].pipes[side].arrive(self.now) {
                    busy = true;
                    self.arrived(to, link, load);
                }
            }
        }
        busy
    }

    fn arrived(&mut self, to: Node, link: usize, load: Load) {
        let now = self.now;
        match (to, load) {
            (Node::End(i), Load::Bytes(bytes)) => {
                if !self.ends[i].over {
                    self.ends[i].take_bytes(now, &mut self.rng, &bytes);
                }
            }
            (Node::End(i), load @ (Load::Fin | Load::Reset)) => {
                let end = &mut self.ends[i];
                if end.over {
                    return;
                }
                end.conn.handle_eof(matches!(load, Load::Reset), false);
                end.collect();
                end.over = true;
                let (_, side) = self.link_of(to).expect("a linked end");
                let pipe = &mut self.links[link].pipes[side];
                pipe.close(now, &mut self.rng);
            }
            (Node::Raw(i), Load::Bytes(bytes)) => self.raws[i].take_bytes(&bytes),
            (Node::Raw(i), Load::Fin | Load::Reset) => self.raws[i].closed = true,
        }
    }
}

/// Returns up to `most` bytes of the batch after those already written. `None` if its user memory was deregistered.
fn gather(end: &End, most: usize) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    for run in end.batch.rest(end.sent) {
        let room = most - out.len();
        match run {
            Run::Own(bytes) => out.extend_from_slice(&bytes[..bytes.len().min(room)]),
            Run::User { place, from, len } => {
                let pinned = place.pin()?;
                let n = len.min(room) as u64;
                end.host.space.gather(&pinned, from as u64, n, &mut out);
            }
        }
        if out.len() >= most {
            break;
        }
    }
    Some(out)
}
