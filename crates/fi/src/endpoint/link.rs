//! Links: reliable connections between busy endpoints, which are faster than datagrams.
//!
//! ```text
//! lower address           other
//!     | ---- offer ------> |      after 64 messages; the offer and all other steps are sent as datagrams
//!     | <--- accept ------ |
//!     | <=== probes =====> |      the first messages on the link
//!     | ---- moved ------> |      and then messages on the link; each end moves independently of the other,
//!     | <--- moved ------- |      when its probe has completed
//! ```
//!
//! Of two endpoints, the one with the lower address offers the link. The link carries messages of at most [`limits::EAGER`] bytes with their
//! content, the announcements of longer messages, and the RDMA Writes by which the sender of a longer message writes it to the memory
//! that the receiver grants. All other messages, such as the grants and atomic operations, remain datagrams. The receiver reads no
//! message of the link before `moved`, which follows all earlier datagrams, so the order of messages does not change. If the link fails,
//! each end tells the other how many messages it has received on the link. The messages that were not received are sent again as
//! datagrams, from the memory of the link, before any new one.

use std::collections::HashMap;

use super::send::fill;
use super::*;

const MESSAGE_ROOM: usize = (HEADER + limits::EAGER).next_multiple_of(64);

/// The name of a link: its index in the table of links, and a number that tells it from earlier links at this index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Name {
    link_index: u8,
    generation: u16,
}

impl Name {
    #[cfg(test)]
    pub(super) const fn for_test(link_index: u8) -> Self {
        Self {
            link_index,
            generation: 0,
        }
    }

    fn id(self, kind: u64, index: usize) -> u64 {
        kind << KIND
            | u64::from(self.generation) << 40
            | u64::from(self.link_index) << 32
            | (index as u64 & u64::from(u32::MAX))
    }

    fn of(id: u64) -> (Self, usize) {
        let [_, high, low, link_index, ..] = id.to_be_bytes();
        let name = Self {
            link_index,
            generation: u16::from_be_bytes([high, low]),
        };
        (name, (id & u64::from(u32::MAX)) as usize)
    }
}

/// A message on a link that has not completed.
#[derive(Debug, Clone, Copy)]
struct Sent {
    /// The operation. A probe has none.
    op: u32,
    what: What,
    length: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Message,
    Announcement,
    /// The first message, which shows that the queue pairs are connected.
    Probe,
    /// A write of a message, or of a piece of one, to a memory window of the peer.
    Write,
    /// A write that no longer counts, because its message is written again by datagrams.
    Abandoned,
}

impl Sent {
    fn kind(self) -> u64 {
        if self.what == What::Announcement {
            ANNOUNCE
        } else {
            OP
        }
    }
}

#[derive(Debug)]
struct Link {
    /// The fields are dropped in this order: the queue pair before the memory.
    stream: Stream,
    region: Region,
    area: Area,
    name: Name,
    peer: Remote,
    /// The queue pair of the peer, when it is known.
    remote: Option<u32>,
    /// Whether the probe has arrived at the peer. Other messages use the link only after that: if a firewall drops the packets of TCP,
    /// the connection fails only after a while.
    is_proven: bool,
    /// Whether messages to the peer use the link.
    sends: bool,
    /// Whether the peer has reported that its messages use the link.
    receives: bool,
    posted: u64,
    received: u64,
    /// The number of receives that are posted and have not completed.
    receives_posted: usize,
    sent: VecDeque<Sent>,
    /// Announced messages for which the peer has granted memory, and whose writes wait for room on the link.
    writes: VecDeque<u32>,
    /// The number of memory windows that are being bound.
    binds: usize,
    broken: bool,
    /// Whether the peer was notified of the failure.
    notified: bool,
    /// The number of messages that the peer has received on the link. Known when the peer has reported the failure of the
    /// link.
    count: Option<u64>,
    /// Whether the peer has closed its endpoint.
    closed: bool,
    /// The time at which the peer reported that it closes its endpoint, and the number of messages that it had sent on the link.
    closing: Option<(Instant, u64)>,
}

impl Link {
    fn post_receive(&mut self, at: usize) -> Result<(), i32> {
        let piece = Piece {
            at: self.area.address(at * MESSAGE_ROOM),
            len: HEADER + limits::EAGER,
            lkey: self.region.lkey(),
        };
        let id = self.name.id(LINK_RECEIVE, at);
        // SAFETY: the area is registered, and this part of it is not used before the completion.
        unsafe { self.stream.receive(id, piece) }?;
        self.receives_posted += 1;
        Ok(())
    }

    /// Returns the report that the link has failed, and the peer to which it is sent. All receives must have completed.
    fn report(&self) -> Option<(Remote, Header)> {
        let mut header = step(Step::Broken, self.stream.number(), self.remote?);
        header.tag = self.received;
        Some((self.peer, header))
    }

    /// Returns the offset of the memory of message number `number`.
    fn offset_of(number: u64) -> usize {
        let index = usize::try_from(number % limits::LINK_DEPTH as u64).unwrap_or(0);
        (limits::LINK_DEPTH + index) * MESSAGE_ROOM
    }
}

/// The links of an endpoint.
#[derive(Debug)]
pub(super) struct Links {
    all: Vec<Option<Link>>,
    /// The number of messages to and from each peer that has no link. `i32::MAX`: a link was offered to the peer. Negative after a
    /// refusal.
    counts: HashMap<Remote, i32>,
    /// The number of messages of peers that are not in `counts`, since it was last found to be full.
    uncounted: usize,
    generation: u16,
    enabled: bool,
    /// Whether the endpoint is being closed. It neither offers nor accepts a link then.
    closing: bool,
    /// Whether some link has failed and still exists.
    pub(super) any_broken: bool,
}

impl Links {
    pub(super) fn new(enabled: bool) -> Self {
        Self {
            all: Vec::new(),
            counts: HashMap::new(),
            uncounted: 0,
            generation: 0,
            enabled,
            closing: false,
            any_broken: false,
        }
    }

    /// Called when the endpoint begins to close.
    pub(super) fn begin_close(&mut self) {
        self.closing = true;
    }

    /// Returns whether a peer with a link has closed its endpoint.
    pub(super) fn has_closed(&self, peer: Remote) -> bool {
        self.of(peer).is_some_and(|link| link.closed)
    }

    fn of(&self, peer: Remote) -> Option<&Link> {
        self.all.iter().flatten().find(|link| link.peer == peer)
    }

    fn find(&self, peer: Remote) -> Option<usize> {
        let mut all = self.all.iter();
        all.position(|link| link.as_ref().is_some_and(|l| l.peer == peer))
    }

    fn get(&self, name: Name) -> Option<&Link> {
        let link = self.all.get(usize::from(name.link_index))?.as_ref()?;
        (link.name == name).then_some(link)
    }

    fn get_mut(&mut self, name: Name) -> Option<&mut Link> {
        let link = self.all.get_mut(usize::from(name.link_index))?.as_mut()?;
        (link.name == name).then_some(link)
    }

    /// Returns whether messages of a peer come, or came, over a link that still exists.
    pub(super) fn receives_from(&self, peer: Remote) -> bool {
        self.of(peer).is_some_and(|link| link.receives)
    }

    /// Returns the peers that have to acknowledge messages on a link, or to answer an offer or the report of a failed link.
    pub(super) fn waiting(&self) -> impl Iterator<Item = Remote> + '_ {
        let links = self.all.iter().flatten();
        links
            .filter(|l| !l.sent.is_empty() || !l.closed && (l.broken || l.remote.is_none()))
            .map(|l| l.peer)
    }

    /// Returns a message that has arrived: `None` if the link does not exist any more, an error if earlier messages of the peer
    /// have not arrived yet.
    pub(super) fn message(
        &self,
        name: Name,
        at: usize,
        length: usize,
    ) -> Option<Result<&[u8], ()>> {
        let link = self.get(name)?;
        if !link.receives {
            return Some(Err(()));
        }
        // SAFETY: the receive has completed and is not posted again yet.
        Some(Ok(unsafe {
            link.area.received(at.saturating_mul(MESSAGE_ROOM), length)
        }))
    }
}

impl Endpoint {
    /// Returns the link for a message to a peer, if it has one. `FI_EAGAIN` if the message has to wait.
    pub(super) fn link_to(&mut self, cx: &mut Shared, to: Remote) -> Result<Option<usize>, i32> {
        if !self.links.enabled {
            return Ok(None);
        }
        let Some(link_index) = self.links.find(to) else {
            return Ok(None);
        };
        let Some(link) = self.links.all.get(link_index).and_then(Option::as_ref) else {
            return Ok(None);
        };
        let Some(remote) = link.remote else {
            return Ok(None);
        };
        if link.sends {
            // The peer has or will get all messages of this end. Only messages of the peer wait on this link for their receives.
            let is_done = link.count.is_some() && link.sent.is_empty() && link.writes.is_empty();
            if link.broken && is_done {
                return Ok(None);
            }
            let full = link.sent.len() >= limits::LINK_DEPTH;
            return match (link.closed, link.broken || full) {
                (true, _) => Ok(None),
                (false, true) => Err(FI_EAGAIN),
                (false, false) => Ok(Some(link_index)),
            };
        }
        if link.broken || link.closed || !link.is_proven {
            return Ok(None);
        }
        let header = step(Step::Moved, link.stream.number(), remote);
        if self.post_answer(cx, to, &header).is_err() {
            return Ok(None);
        }
        if let Some(link) = self.links.all.get_mut(link_index).and_then(Option::as_mut) {
            link.sends = true;
        }
        Ok(Some(link_index))
    }

    /// Sends a message on a link that has room for it.
    pub(super) fn post_on_link(
        &mut self,
        link_index: usize,
        op: u32,
        header: &Header,
        content: &UserMemory,
    ) -> Result<(), i32> {
        let link = self.links.all.get_mut(link_index).and_then(Option::as_mut);
        let link = link.ok_or(FI_EAGAIN)?;
        let length = HEADER + content.len();
        let at = Link::offset_of(link.posted);
        // SAFETY: fewer messages are outstanding than the link has memory for, so no request uses this one.
        fill(unsafe { link.area.to_send(at, length) }, header, content);
        let piece = Piece {
            at: link.area.address(at),
            len: length,
            lkey: link.region.lkey(),
        };
        // SAFETY: the area is registered, and this part of it is not reused before the completion.
        unsafe { link.stream.send(link.name.id(LINK_SEND, 0), piece) }?;
        link.posted += 1;
        link.sent.push_back(Sent {
            op,
            what: match header.kind {
                Kind::Announce => What::Announcement,
                Kind::Probe => What::Probe,
                _ => What::Message,
            },
            length,
        });
        Ok(())
    }

    /// Counts a message to or from a peer, and offers it a link if there are many.
    pub(super) fn count_message(&mut self, cx: &mut Shared, peer: Remote, length: u64) {
        if !self.links.enabled || self.links.closing || peer == self.name {
            return;
        }
        // A link is offered only to peers of the address vector. Strangers must not take the places of those.
        if !self.links.counts.contains_key(&peer)
            && (self.source(cx, peer) == FI_ADDR_NOTAVAIL || !self.may_count_another(cx))
        {
            return;
        }
        let count = self.links.counts.entry(peer).or_default();
        if *count == i32::MAX {
            return;
        }
        let weight = 1 + length / limits::EAGER as u64;
        *count = count
            .saturating_add(i32::try_from(weight).unwrap_or(i32::MAX))
            .min(i32::MAX - 1);
        if *count >= limits::BUSY && self.name < peer {
            *count = i32::MAX;
            if self.source(cx, peer) == FI_ADDR_NOTAVAIL {
                return;
            }
            match self.new_link(cx, peer, None) {
                Ok(number) => self.answer(cx, peer, step(Step::Offer, number, 0)),
                Err(_) => self.offer_later(peer),
            }
        }
    }

    /// Returns whether the messages of one more peer may be counted. If there are too many peers, those that the program has removed from
    /// the address vector are forgotten: once in [`limits::COUNTED`] messages, because each is looked up.
    fn may_count_another(&mut self, cx: &mut Shared) -> bool {
        if self.links.counts.len() < limits::COUNTED {
            return true;
        }
        self.links.uncounted += 1;
        if self.links.uncounted >= limits::COUNTED {
            self.links.uncounted = 0;
            let mut counts = std::mem::take(&mut self.links.counts);
            counts.retain(|peer, _| {
                self.links.of(*peer).is_some() || self.source(cx, *peer) != FI_ADDR_NOTAVAIL
            });
            self.links.counts = counts;
        }
        self.links.counts.len() < limits::COUNTED
    }

    /// Postpones the next offer of a link to a peer until [`limits::REFUSED`] more messages were exchanged.
    fn offer_later(&mut self, peer: Remote) {
        self.links
            .counts
            .insert(peer, limits::BUSY - limits::REFUSED);
    }

    /// Removes a link whose peer has closed its endpoint, if no message or write on it is incomplete in either direction and none of its
    /// messages is held.
    fn forget_closed_link(&mut self) {
        let held = &self.held;
        let is_done = |link: &Link| {
            let waits = held.has_message_of(link.name);
            // The last messages of the peer may still be on their way. If its host has failed, they never arrive.
            let all = |(at, count): (Instant, u64)| {
                let of_link = |i: &Incoming| i.link.is_some_and(|(name, _)| name == link.name);
                link.received >= count && !self.incoming.iter().any(|(_, i)| of_link(i))
                    || at.elapsed() > limits::LINGER_MOST
            };
            link.closing.is_some_and(all)
                && link.sent.is_empty()
                && link.writes.is_empty()
                && !waits
        };
        let mut all = self.links.all.iter_mut();
        if let Some(done) = all.find(|link| link.as_ref().is_some_and(is_done)) {
            *done = None;
        }
    }

    /// Creates a link, and connects it to the peer's queue pair `remote`, if that is known. Returns the number of its own
    /// queue pair.
    fn new_link(&mut self, cx: &Shared, peer: Remote, remote: Option<u32>) -> Result<u32, i32> {
        if self.links.all.iter().flatten().count() >= limits::LINKS {
            self.forget_closed_link();
        }
        let free = self.links.all.iter().position(Option::is_none);
        let link_index = free.unwrap_or(self.links.all.len());
        if link_index >= limits::LINKS {
            return Err(FI_EAGAIN);
        }
        let area = Area::new(2 * limits::LINK_DEPTH * MESSAGE_ROOM).ok_or(FI_ENOMEM)?;
        // SAFETY: the area is live as long as its region. Each part is used either by the device or by this endpoint.
        let region = unsafe { Region::new(&cx.pd, area.address(0), area.size(), Access::Sink) }?;
        let stream = Stream::new(&cx.pd, &self.cq)?;
        self.links.generation = self.links.generation.wrapping_add(1);
        let mut link = Link {
            stream,
            region,
            area,
            name: Name {
                link_index: u8::try_from(link_index).unwrap_or(u8::MAX),
                generation: self.links.generation,
            },
            peer,
            remote: None,
            is_proven: false,
            sends: false,
            receives: false,
            posted: 0,
            received: 0,
            receives_posted: 0,
            sent: VecDeque::new(),
            writes: VecDeque::new(),
            binds: 0,
            broken: false,
            notified: false,
            count: None,
            closed: false,
            closing: None,
        };
        for at in 0..limits::LINK_DEPTH {
            link.post_receive(at)?;
        }
        let number = link.stream.number();
        if free.is_none() {
            self.links.all.push(None);
        }
        if let Some(to) = self.links.all.get_mut(link_index) {
            *to = Some(link);
        }
        if let Some(remote) = remote
            && let Err(why) = self.connect(link_index, remote)
        {
            if let Some(link) = self.links.all.get_mut(link_index) {
                *link = None;
            }
            return Err(why);
        }
        Ok(number)
    }

    /// Connects a link to the peer's queue pair.
    fn connect(&mut self, link_index: usize, remote: u32) -> Result<(), i32> {
        let link = self.links.all.get_mut(link_index).and_then(Option::as_mut);
        let link = link.ok_or(FI_EINVAL)?;
        link.remote = Some(remote);
        let peer = Remote {
            ip: link.peer.ip,
            qpn: remote,
        };
        link.stream
            .connect(peer, self.gid_index, self.job.timeout_ms)?;
        let header = Header::new(Kind::Probe);
        self.post_on_link(link_index, 0, &header, &UserMemory::default())
    }

    /// Handles a step of a peer.
    pub(super) fn link_step(&mut self, cx: &mut Shared, from: Remote, header: &Header) {
        let Some(step_of_peer) = Step::from_number(header.length) else {
            return;
        };
        let link_index = self.links.find(from);
        if step_of_peer == Step::Offer {
            // A peer whose offer is not answered goes on sending datagrams.
            if self.deferred.len() >= limits::DEFERRED {
                return;
            }
            let welcome = link_index.is_none()
                && self.links.enabled
                && !self.links.closing
                && from < self.name
                && self.source(cx, from) != FI_ADDR_NOTAVAIL;
            let made = if welcome {
                self.new_link(cx, from, Some(header.id))
            } else {
                Err(FI_EAGAIN)
            };
            let answer = match made {
                Ok(number) => step(Step::Accept, number, header.id),
                Err(_) => step(Step::Refuse, 0, header.id),
            };
            return self.answer(cx, from, answer);
        }
        // The step may be of an earlier link.
        let of_link = |link: &Link| u64::from(link.stream.number()) == header.data;
        let known = link_index.filter(|_| self.links.of(from).is_some_and(of_link));
        let Some(link_index) = known else {
            // This end has given up the link, and does not know any more how many messages it has received. The peer waits for that
            // number before it sends anything else, so the answer is that the link is gone.
            if step_of_peer == Step::Broken && self.deferred.len() < limits::DEFERRED {
                let number = u32::try_from(header.data).unwrap_or(0);
                self.answer(cx, from, step(Step::Gone, number, header.id));
            }
            // The peer cannot write over the link, and this end has not noticed that the link has failed.
            if step_of_peer == Step::Gone
                && header.data == 0
                && let Some(link_index) = link_index
                && self.links.of(from).is_some_and(|link| link.receives)
            {
                self.break_link(cx, link_index);
            }
            return;
        };
        let Some(Some(link)) = self.links.all.get_mut(link_index) else {
            return;
        };
        match step_of_peer {
            Step::Offer => {}
            Step::Accept if link.remote.is_none() => {
                if self.connect(link_index, header.id).is_err() {
                    self.break_link(cx, link_index);
                }
            }
            Step::Refuse if link.remote.is_none() => {
                if let Some(link) = self.links.all.get_mut(link_index) {
                    *link = None;
                }
                self.offer_later(from);
            }
            Step::Moved => {
                link.receives = true;
                self.take_held(cx);
            }
            Step::Broken if link.count.is_none() => {
                link.count = Some(header.tag);
                // The grants for messages that are written over the link are no longer valid. The peer sends new ones after this step.
                // A message of which only a piece has arrived is also granted again.
                let first = link.posted - link.sent.len() as u64;
                let mut lost: Vec<u32> = link.writes.drain(..).collect();
                for (number, sent) in (first..).zip(&mut link.sent) {
                    let whole = |op: &Op| matches!(op, Op::Announced { grant: Some(g), written, .. } if *written >= g.length);
                    let arrived = number < header.tag && self.ops.get(sent.op).is_some_and(whole);
                    if sent.what == What::Write && !arrived {
                        sent.what = What::Abandoned;
                        lost.push(sent.op);
                    }
                }
                // Deferred writes wait for room in the send queue, and were not passed to the link yet.
                let linked = |op: &Op| matches!(op, Op::Announced { to, grant: Some(g), .. } if *to == from && g.linked);
                self.deferred.retain(|deferred| match deferred {
                    Deferred::Write(op) if self.ops.get(*op).is_some_and(linked) => {
                        lost.push(*op);
                        false
                    }
                    _ => true,
                });
                for op in lost {
                    self.forget_grant(op);
                }
                self.break_link(cx, link_index);
            }
            Step::Closed => {
                link.closed = true;
                link.closing = Some((Instant::now(), header.tag));
                if link.broken {
                    self.mend_links(cx);
                }
            }
            // Once the peer has reported its count, the step only answers a repeated report of this end, and is ignored.
            Step::Gone if link.count.is_none() => {
                link.closed = true;
                self.break_link(cx, link_index);
            }
            Step::Accept | Step::Refuse | Step::Broken | Step::Gone => {}
        }
    }

    /// Handles a completion of a link.
    pub(super) fn completed_on_link(&mut self, cx: &mut Shared, wc: &Wc, err: i32) {
        let (name, at) = Name::of(wc.wr_id);
        let Some(link) = self.links.get_mut(name) else {
            return;
        };
        if wc.wr_id >> KIND == LINK_RECEIVE {
            link.receives_posted = link.receives_posted.saturating_sub(1);
        }
        if err != 0 {
            let link_index = usize::from(name.link_index);
            return self.break_link(cx, link_index);
        }
        if wc.wr_id >> KIND == LINK_BIND {
            link.binds = link.binds.saturating_sub(1);
            let name = u32::try_from(at).unwrap_or(u32::MAX);
            return self.window_bound(cx, name);
        }
        if wc.wr_id >> KIND == LINK_SEND {
            // Once the peer has reported its count, `send_again` handles the messages in the queue.
            if link.count.is_none()
                && let Some(sent) = link.sent.pop_front()
            {
                link.is_proven |= sent.what == What::Probe;
                self.link_sent(cx, sent, 0);
                self.write_waiting(cx, usize::from(name.link_index));
            }
            return;
        }
        link.received += 1;
        let from = link.peer;
        if let Some(word) = written_word(wc) {
            if !link.broken {
                // This fails only if the link has failed.
                let _posted = link.post_receive(at);
            }
            let length = wc.byte_len as usize;
            let fits = self.incoming.get(word).is_some_and(|i| {
                i.link.is_some_and(|(link, _)| link == name)
                    && length == (i.granted - i.placed).min(limits::PIECE)
            });
            if fits {
                self.placed(cx, word, length);
            } else {
                self.bad = self.bad.wrapping_add(1);
            }
            return;
        }
        let length = wc.byte_len as usize;
        let held = Held {
            receive: at,
            link: Some(name),
            follows_link: false,
            length,
            from,
        };
        // SAFETY: the receive has completed and is not posted again yet.
        let message = unsafe { link.area.received(at.saturating_mul(MESSAGE_ROOM), length) };
        let kind = Header::decode(message).map(|(header, _)| header.kind);
        let matched = matches!(kind, Some(Kind::Eager | Kind::Announce));
        if !matched {
            if kind != Some(Kind::Probe) {
                self.bad = self.bad.wrapping_add(1);
            }
            return self.release_receive(&held);
        }
        if !self.held.is_empty() || !self.take(cx, &held) {
            self.held.push_back(held);
            self.take_held(cx);
        } else {
            self.release_receive(&held);
        }
    }

    fn link_sent(&mut self, cx: &mut Shared, sent: Sent, err: i32) {
        if sent.what == What::Probe {
            return;
        }
        self.outstanding = self.outstanding.saturating_sub(1);
        if sent.what == What::Abandoned {
            return;
        }
        let kind = sent.kind();
        self.request_completed(cx, kind, sent.op, err);
    }

    /// Returns the link that a peer may write a message over.
    pub(super) fn link_for_writes(&self, from: Remote) -> Option<usize> {
        let link_index = self.links.find(from)?;
        let link = self.links.all.get(link_index)?.as_ref()?;
        // Each held message of the link occupies one of its receives, and each write consumes one. While messages are held, writes
        // could consume all other receives, so no write is granted.
        let waits = self.held.has_message_of(link.name);
        let usable =
            link.receives && link.remote.is_some() && !link.broken && !link.closed && !waits;
        (usable && link.binds < limits::BINDS).then_some(link_index)
    }

    /// Binds a window for the memory of an announced message. The grant is sent when the window is bound.
    pub(super) fn bind_window(
        &mut self,
        cx: &mut Shared,
        link_index: usize,
        name: u32,
        mut grant: Header,
    ) {
        let Some(link) = self.links.all.get_mut(link_index).and_then(Option::as_mut) else {
            return;
        };
        let Some(incoming) = self.incoming.get_mut(name) else {
            return;
        };
        let Some(region) = &mut incoming.region else {
            return;
        };
        let bound = link
            .stream
            .bind(link.name.id(LINK_BIND, name as usize), region);
        grant.tag = u64::from(region.rkey()) << 32 | u64::from(name);
        incoming.link = Some((link.name, grant));
        match bound {
            Ok(()) => link.binds += 1,
            Err(_) => self.grant_datagrams(cx, name),
        }
    }

    fn window_bound(&mut self, cx: &mut Shared, name: u32) {
        let Some(incoming) = self.incoming.get(name) else {
            return;
        };
        let from = incoming.message.from;
        if let Some((_, grant)) = incoming.link {
            self.answer(cx, from, grant);
        }
    }

    /// Grants the memory of an announced message again. The message was to be written over a link, and is now written by datagrams.
    fn grant_datagrams(&mut self, cx: &mut Shared, name: u32) {
        let Some(incoming) = self.incoming.get_mut(name) else {
            return;
        };
        let Some((_, mut grant)) = incoming.link.take() else {
            return;
        };
        // The window ends before the memory is registered again.
        incoming.region = None;
        incoming.placed = 0;
        let from = incoming.message.from;
        let at = usize::try_from(incoming.base).unwrap_or(0);
        // SAFETY: the memory belongs to this library, or to the program, which does not access it until the receive has completed.
        let made = unsafe { Region::new(&cx.pd, at, incoming.granted, Access::RemoteSink) };
        match made.and_then(|region| region.restrict_to(from).map(|()| region)) {
            Ok(region) => {
                grant.flags &= !LINKED;
                grant.tag = u64::from(region.rkey()) << 32 | u64::from(name);
                incoming.region = Some(region);
                self.answer(cx, from, grant);
            }
            Err(why) => {
                self.answer(cx, from, Header::grant_of_nothing(grant.id));
                if let Some(incoming) = self.incoming.remove(name) {
                    self.received(cx, &incoming.target, &incoming.message, 0, why);
                }
            }
        }
    }

    /// Sends new grants for all messages that were to be written over a failed link, so that they are written by datagrams.
    fn grant_again(&mut self, cx: &mut Shared, link: Name) {
        let of_link = |i: &Incoming| i.link.is_some_and(|(name, _)| name == link);
        let names = self.incoming.iter().filter(|(_, i)| of_link(i));
        let names: Vec<u32> = names.map(|(name, _)| name).collect();
        for name in names {
            self.grant_datagrams(cx, name);
        }
    }

    /// Forgets the grant of an announced message, because another one follows.
    fn forget_grant(&mut self, op: u32) {
        if let Some(Op::Announced { grant, written, .. }) = self.ops.get_mut(op) {
            *grant = None;
            *written = 0;
        }
    }

    /// Writes the next piece of an announced message over the link to its peer, at once or when there is room.
    pub(super) fn write_on_link(&mut self, cx: &mut Shared, op: u32) {
        let Some(Op::Announced { to, .. }) = self.ops.get(op) else {
            return;
        };
        let to = *to;
        let usable = |l: &&mut Link| l.peer == to && l.remote.is_some() && !l.broken;
        let link = self.links.all.iter_mut().flatten().find(usable);
        let Some(link) = link else {
            // When the peer notices that the link has failed, it sends another grant.
            self.forget_grant(op);
            if self.links.find(to).is_none() {
                // This end has given up the link. The peer notices that only if it sends on the link.
                self.answer(cx, to, step(Step::Gone, 0, 0));
            }
            return;
        };
        link.writes.push_back(op);
        let link_index = usize::from(link.name.link_index);
        self.write_waiting(cx, link_index);
    }

    /// Posts the writes for which a link has room.
    fn write_waiting(&mut self, cx: &mut Shared, link_index: usize) {
        loop {
            let Some(Some(link)) = self.links.all.get_mut(link_index) else {
                return;
            };
            if link.sent.len() >= limits::LINK_DEPTH || link.broken {
                return;
            }
            let Some(op) = link.writes.pop_front() else {
                return;
            };
            let Some(Op::Announced {
                memory,
                regions,
                grant: Some(grant),
                written,
                ..
            }) = self.ops.get_mut(op)
            else {
                continue;
            };
            let from = *written;
            let length = grant.length.saturating_sub(from).min(limits::PIECE);
            let pieces = pieces(memory, regions, from, length);
            let there = (grant.rkey, grant.base.wrapping_add(from as u64));
            let id = link.name.id(LINK_SEND, 0);
            // SAFETY: the regions are live until the operation has completed.
            let posted = unsafe { link.stream.write(id, grant.word, there, &pieces) };
            if posted.is_err() {
                link.writes.push_front(op);
                return self.break_link(cx, link_index);
            }
            *written = from + length;
            link.posted += 1;
            link.sent.push_back(Sent {
                op,
                what: What::Write,
                length,
            });
            self.outstanding += 1;
        }
    }

    /// Posts the receive of a message again.
    pub(super) fn release_receive(&mut self, held: &Held) {
        match held.link {
            None => self.again(held.receive),
            Some(name) => {
                if let Some(link) = self.links.get_mut(name).filter(|link| !link.broken) {
                    // This fails only if the link has failed.
                    let _posted = link.post_receive(held.receive);
                }
            }
        }
    }

    /// Called when a link has failed. Messages that have arrived on it may still have completions in the queue.
    fn break_link(&mut self, cx: &mut Shared, link_index: usize) {
        let Some(Some(link)) = self.links.all.get_mut(link_index) else {
            return;
        };
        if !std::mem::replace(&mut link.broken, true) {
            link.stream.fail();
        }
        self.links.any_broken = true;
        self.mend_links(cx);
    }

    /// Repeats the report that the link to a peer has failed, if the peer has not reported the failure. A peer that has given up the
    /// link answers with [`Step::Gone`].
    pub(super) fn report_failed_link(&mut self, cx: &mut Shared, peer: Remote) {
        let link = self.links.of(peer);
        let unanswered = link.filter(|l| l.notified && l.count.is_none() && !l.closed);
        if let Some((_, header)) = unanswered.and_then(Link::report) {
            self.answer(cx, peer, header);
        }
    }

    /// Sends the messages of failed links as datagrams, and removes the links that are not needed any more.
    pub(super) fn mend_links(&mut self, cx: &mut Shared) {
        for link_index in 0..self.links.all.len() {
            let Some(Some(link)) = self.links.all.get_mut(link_index) else {
                continue;
            };
            if !link.broken {
                continue;
            }
            let peer = link.peer;
            if link.remote.is_none() {
                // The peer broke off before it had accepted the offer, so nothing was sent.
                if let Some(to) = self.links.all.get_mut(link_index) {
                    *to = None;
                }
                continue;
            }
            // When the queue pair has failed, all receives complete. The number of messages that have arrived is final then.
            if link.receives_posted > 0 {
                continue;
            }
            let closed = link.closed;
            if !std::mem::replace(&mut link.notified, true) {
                let name = link.name;
                if let Some((_, header)) = link.report() {
                    self.answer(cx, peer, header);
                }
                self.grant_again(cx, name);
            }
            if closed {
                self.lose_link(cx, |of| of == peer, FI_ECONNRESET);
                continue;
            }
            self.send_again(cx, link_index);
        }
        self.links.any_broken = self.links.all.iter().flatten().any(|l| l.broken);
    }

    /// Sends the messages that the peer has not received on a failed link as datagrams. Does nothing before the peer has
    /// reported how many it has received.
    fn send_again(&mut self, cx: &mut Shared, link_index: usize) {
        loop {
            let Some(Some(link)) = self.links.all.get_mut(link_index) else {
                return;
            };
            let Some(count) = link.count else { return };
            let number = link.posted - link.sent.len() as u64;
            let peer = link.peer;
            let Some(sent) = link.sent.front().copied() else {
                // Messages that have arrived on the link may still wait for a receive.
                let name = link.name;
                if !self.held.has_message_of(name)
                    && let Some(link) = self.links.all.get_mut(link_index)
                {
                    *link = None;
                }
                return;
            };
            if number < count || matches!(sent.what, What::Probe | What::Abandoned) {
                link.sent.pop_front();
                self.link_sent(cx, sent, 0);
                continue;
            }
            // SAFETY: the link has failed, so the device does not read this memory any more.
            let bytes = unsafe { link.area.received(Link::offset_of(number), sent.length) };
            let Ok(way) = cx.way(peer.ip, self.gid_index) else {
                return;
            };
            let to = To {
                way: &way,
                qpn: peer.qpn,
                qkey: self.job.qkey,
            };
            let kind = sent.kind();
            let id = kind << KIND | u64::from(sent.op);
            let mut slot = None;
            let posted = if bytes.len() <= limits::INLINE {
                self.qp.send_copy(to, id, bytes, true)
            } else {
                let Some(free) = self.free_slots.pop() else {
                    return;
                };
                slot = Some(free);
                let at = usize::from(free) * SLOT;
                // SAFETY: the slot is free: no request uses it.
                unsafe { self.slots.to_send(at, bytes.len()) }.copy_from_slice(bytes);
                let piece = Piece {
                    at: self.slots.address(at),
                    len: bytes.len(),
                    lkey: self.slot_region.lkey(),
                };
                // SAFETY: the slots are registered, and this one is not reused before the completion.
                unsafe { self.qp.send(to, id, piece, true) }
            };
            if let Err(why) = posted {
                self.free_slots.extend(slot);
                if full(why) == FI_EAGAIN {
                    return;
                }
                if let Some(Some(link)) = self.links.all.get_mut(link_index) {
                    link.sent.pop_front();
                }
                self.link_sent(cx, sent, why);
                continue;
            }
            if let Some(Op::Sent { slot: of_op, .. }) = self.ops.get_mut(sent.op) {
                *of_op = slot;
            }
            if let Some(Some(link)) = self.links.all.get_mut(link_index) {
                link.sent.pop_front();
            }
        }
    }

    /// Ends the links to peers that are lost, and the messages to them. Messages that have arrived on a link stay until they are
    /// received.
    pub(super) fn lose_link(&mut self, cx: &mut Shared, which: impl Fn(Remote) -> bool, err: i32) {
        for link_index in 0..self.links.all.len() {
            let Some(to) = self.links.all.get_mut(link_index) else {
                return;
            };
            let Some(link) = to.as_mut().filter(|link| which(link.peer)) else {
                continue;
            };
            link.closed = true;
            if !std::mem::replace(&mut link.broken, true) {
                link.stream.fail();
            }
            let sent = std::mem::take(&mut link.sent);
            let waiting = std::mem::take(&mut link.writes);
            let name = link.name;
            // The peer regards these messages as delivered, and they may have completions that are not polled yet.
            let may_have_arrived = link.receives && link.receives_posted > 0;
            if !link.receives {
                // The peer has not sent `moved`, and will not send it any more, so these messages can never be read.
                self.held.remove_link(name);
            }
            if may_have_arrived || self.held.has_message_of(name) {
                self.links.any_broken = true;
            } else {
                *to = None;
            }
            for sent in sent {
                self.link_sent(cx, sent, err);
            }
            for op in waiting {
                self.request_completed(cx, OP, op, err);
            }
        }
    }

    /// Tells the peers with links that this endpoint is being closed, so that they do not report failed links to it.
    pub(super) fn notify_peers_of_close(&mut self, cx: &mut Shared) {
        let links = self.links.all.iter().flatten();
        let open = links.filter(|l| !l.closed);
        // Messages that wait for others may be sent on any link later.
        let unknown = !self.postponed.is_empty();
        let posted = |l: &Link| if unknown { u64::MAX } else { l.posted };
        let peers: Vec<(Remote, u32, u32, u64)> = open
            .filter_map(|l| Some((l.peer, l.stream.number(), l.remote?, posted(l))))
            .collect();
        for (to, number, remote, posted) in peers {
            let Ok(op) = self.ops.insert(Op::CloseNotice { to }) else {
                return;
            };
            let id = OP << KIND | u64::from(op);
            let mut header = step(Step::Closed, number, remote);
            header.tag = posted;
            if self.post_header(cx, to, id, &header).is_err() {
                self.ops.remove(op);
            }
        }
    }

    /// Returns whether the only outstanding messages are close notices (`Op::CloseNotice`) to peers that have closed their endpoints
    /// too. Such peers do not acknowledge the notices.
    pub(super) fn is_left_alone(&self) -> bool {
        let closed = |peer: &Remote| self.links.of(*peer).is_none_or(|l| l.closed);
        let left = self.ops.iter();
        let left = left.filter(|(_, op)| matches!(op, Op::CloseNotice { to } if closed(to)));
        self.deferred.is_empty() && self.postponed.is_empty() && left.count() == self.outstanding
    }
}

/// Returns the header of a step. `number`: the queue pair of this end. `remote`: that of the peer.
fn step(step: Step, number: u32, remote: u32) -> Header {
    let mut header = Header::new(Kind::Link);
    header.id = number;
    header.data = remote.into();
    header.length = step as u64;
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_names_its_link() {
        for (link_index, generation, index) in [(0, 0, 0), (7, 1, 31), (255, u16::MAX, 0xffff_ffff)]
        {
            let name = Name {
                link_index,
                generation,
            };
            for kind in [LINK_SEND, LINK_RECEIVE, LINK_BIND] {
                let id = name.id(kind, index);
                assert_eq!((id >> KIND, Name::of(id)), (kind, (name, index)));
            }
        }
    }
}
