//! The arbiter in virtual time, and the settings.

use super::*;

/// 1 Gbit/s: a packet of 4096 bytes takes 32.768 µs.
const RATE: &str = "rate=1Gbit/s;";
const MS: Nanos = 1_000_000;

fn link(text: &str) -> Link {
    Link::new(&Settings::parse(&format!("{RATE}{text}")).unwrap())
}

/// A sender of messages of `size` bytes on a service level.
struct Sender {
    level: u8,
    size: u64,
    /// The percentage of each millisecond in which it has something to send.
    busy: u64,
    sent: u64,
}

impl Sender {
    fn new(level: u8, size: u64) -> Self {
        let (busy, sent) = (100, 0);
        Self {
            level,
            size,
            busy,
            sent,
        }
    }
}

/// Lets senders send for a second. Each asks every 50 µs whether it may send. Returns the number of bytes that each has sent.
fn run(link: &mut Link, senders: &mut [Sender]) -> Vec<u64> {
    for step in 0..20_000 {
        let now = 1_000 * MS + step * MS / 20;
        link.serve(now);
        for (id, sender) in senders.iter_mut().enumerate() {
            let (id, wants) = (id as FlowId, step % 20 * 5 < sender.busy);
            if !wants {
                link.sent(now, id, sender.level, 0, false);
                continue;
            }
            let mut sent = 0;
            let allowed = link.ask(now, id, sender.level);
            while sent < allowed {
                sent += sender.size;
            }
            link.sent(now, id, sender.level, sent, true);
            sender.sent += sent;
        }
    }
    senders.iter().map(|sender| sender.sent).collect()
}

/// The ratio of the bytes of two senders that always have something to send.
fn ratio(text: &str, sizes: [u64; 2]) -> f64 {
    let mut link = link(text);
    let mut senders = [Sender::new(0, sizes[0]), Sender::new(1, sizes[1])];
    let sent = run(&mut link, &mut senders);
    let all: u64 = sent.iter().sum();
    // The senders use the whole rate. The tolerance is for messages that exceed an allowance.
    assert!((124_000_000..126_000_000).contains(&all), "{sent:?}");
    sent[1] as f64 / sent[0] as f64
}

fn is_near(value: f64, expected: f64, tolerance: f64) -> bool {
    (value / expected - 1.0).abs() <= tolerance
}

#[test]
fn bandwidth_follows_the_weights_whatever_the_length_of_messages() {
    for weight in [1, 2, 4, 8, 16, 64, 255] {
        for sizes in [[64, 64], [64_000, 64_000], [64_000, 64], [1000, 64_000]] {
            let got = ratio(&format!("qos_vlarb_low=0:1,1:{weight}"), sizes);
            assert!(
                is_near(got, weight.into(), 0.05),
                "{weight} {sizes:?}: {got}"
            );
        }
    }
}

#[test]
fn a_weight_of_zero_is_served_from_the_other_table_only() {
    let got = ratio(
        "qos_high_limit=3;qos_vlarb_high=1:4,0:0;qos_vlarb_low=0:1,1:0",
        [64_000, 64_000],
    );
    assert!(is_near(got, 3.0, 0.02), "{got}");

    // A lane with a weight of zero in one table is also served if no other lane waits.
    for level in [0, 1] {
        let mut link = link("qos_vlarb_high=1:4,0:0;qos_vlarb_low=0:1,1:0");
        let sent = run(&mut link, &mut [Sender::new(level, 4096)]);
        assert!(is_near(sent[0] as f64, 125e6, 0.01), "{level}: {sent:?}");
    }
}

#[test]
fn the_high_limit_lets_one_packet_of_low_priority_pass() {
    // IBA 7.6.9.2: the limit is in units of 4096 bytes, which is a packet here; 0 is one packet.
    for (limit, expected) in [
        (0, 1.0),
        (1, 1.0),
        (2, 2.0),
        (16, 16.0),
        (64, 64.0),
        (254, 254.0),
    ] {
        let text = format!("qos_high_limit={limit};qos_vlarb_high=1:255;qos_vlarb_low=0:1");
        let got = ratio(&text, [4096, 4096]);
        assert!(is_near(got, expected, 0.05), "{limit}: {got}");
    }
}

#[test]
fn low_priority_starves_only_without_a_limit_and_only_while_high_priority_sends() {
    let text = "qos_high_limit=255;qos_vlarb_high=1:1;qos_vlarb_low=0:1";
    let mut senders = [Sender::new(0, 4096), Sender::new(1, 4096)];
    let sent = run(&mut link(text), &mut senders);
    // The first packet of low priority was sent before the other sender asked.
    assert!(sent[0] <= 2 * 4096, "{sent:?}");
    // 60 % of the time nothing of high priority waits.
    let mut senders = [Sender::new(0, 4096), Sender::new(1, 4096)];
    senders[1].busy = 40;
    let sent = run(&mut link(text), &mut senders);
    assert!(is_near(sent[0] as f64, 75e6, 0.05), "{sent:?}");
}

#[test]
fn lanes_that_have_nothing_to_send_leave_the_link_to_others() {
    let mut link = link("qos_vlarb_low=0:1,1:100");
    let sent = run(&mut link, &mut [Sender::new(0, 4096)]);
    assert!(is_near(sent[0] as f64, 125e6, 0.01), "{sent:?}");
}

#[test]
fn flows_of_a_lane_share_it() {
    let mut link = link("qos_vlarb_low=0:1,1:2;qos_sl2vl=0,1,1,0,0,0,0,0,0,0,0,0,0,0,0,0");
    let mut senders = [0, 1, 1, 2].map(|level| Sender::new(level, 20_000));
    let sent = run(&mut link, &mut senders);
    assert!(is_near(sent[0] as f64, 125e6 / 3.0, 0.02), "{sent:?}");
    for one in &sent[1..] {
        assert!(is_near(*one as f64, 125e6 * 2.0 / 9.0, 0.02), "{sent:?}");
    }
}

#[test]
fn an_idle_link_sends_at_once_and_does_not_save_up_time() {
    let mut link = link("qos_vlarb_low=0:1,1:1");
    for at in [1_000 * MS, 5_000 * MS] {
        assert_eq!(link.ask(at, 7, 0), 4096);
        link.sent(at, 7, 0, 40_960, false);
        // The message exceeds the allowance by nine packets, which take 295 µs.
        assert_eq!(link.ask(at + MS / 10, 7, 0), 0);
        let free = link.next(7).unwrap();
        assert!((free - at).abs_diff(10 * 32_768) < 40_000, "{}", free - at);
        assert_eq!(link.ask(free, 7, 0), 4096);
        link.sent(free, 7, 0, 4096, false);
    }
}

/// A message of 250 MB takes two seconds of the link, in which nothing else is sent.
#[test]
fn a_message_that_was_sent_too_early_is_carried_while_nobody_asks() {
    let mut link = link("");
    assert_eq!(link.ask(0, 7, 0), 4096);
    link.sent(0, 7, 0, 250_000_000, false);
    let early = 1_900 * MS;
    link.forget_silent(early);
    assert_eq!(link.ask(early, 7, 0), 0);
    let next = link.next(7).unwrap();
    assert!((1_995 * MS..2_005 * MS).contains(&next), "{next}");
    link.sent(next, 7, 0, 0, false);
    link.serve(next);
    link.forget_silent(4_000 * MS);
    assert!(!link.knows(7));
}

#[test]
fn a_thread_that_is_late_catches_up_at_most_ten_milliseconds() {
    let mut link = link("");
    assert_eq!(link.ask(0, 1, 0), 4096);
    link.sent(0, 1, 0, 4096, true);
    link.serve(3 * MS);
    assert!(is_near(link.allowance(1) as f64, 375_000.0, 0.02));
    link.sent(3 * MS, 1, 0, link.allowance(1), true);
    link.serve(1_000 * MS);
    assert!(
        is_near(link.allowance(1) as f64, 1_250_000.0, 0.02),
        "{}",
        link.allowance(1)
    );
}

#[test]
fn a_flow_that_stops_asking_is_forgotten() {
    let mut link = link("qos_vlarb_low=0:1,1:1");
    link.ask(0, 1, 0);
    link.sent(0, 1, 0, 4096, true);
    link.ask(900 * MS, 2, 1);
    link.forget_silent(1_100 * MS);
    assert_eq!((link.next(1), link.next(2).is_some()), (None, true));
    link.touch(1_500 * MS, 2);
    link.forget_silent(2_000 * MS);
    assert!(link.next(2).is_some());
    link.leave(2);
    assert_eq!(link.next(2), None);
}

#[test]
fn the_state_is_the_same_after_encoding() {
    let text = format!("{RATE}qos_high_limit=2;qos_vlarb_high=1:3,2:1;qos_vlarb_low=0:2,1:1");
    let settings = Settings::parse(&text).unwrap();
    let mut link = Link::new(&settings);
    let mut senders = [0, 1, 1, 2].map(|level| Sender::new(level, 20_000));
    run(&mut link, &mut senders);
    let (bytes, now) = (link.encode(settings.fingerprint()), 2_000 * MS);
    assert_eq!(Link::decode(&settings, &bytes, now).unwrap(), link);
    // A file that ends too early is an error and not a panic. So is the file of a link with other settings.
    for end in 0..bytes.len() - 8 {
        Link::decode(&settings, &bytes[..end], now).unwrap_err();
    }
    let other = Settings::parse(&text.replace("0:2", "0:3")).unwrap();
    assert!(
        Link::decode(&other, &bytes, now)
            .unwrap_err()
            .contains("other settings")
    );
    // After a restart of the host the clock begins at 0.
    assert_eq!(
        Link::decode(&settings, &bytes, 0).unwrap(),
        Link::new(&settings)
    );
}

#[test]
fn settings_have_the_names_and_forms_of_opensm() {
    let text = "# a link\nrate SDR\nqos_max_vls 4\nqos_high_limit 255\nqos_vlarb_high 0:4,1:0\n\
                qos_vlarb_low=1:4, 2:8,3:1; qos_sl2vl 0,1,2,3,0,0,0,0,0,0,0,0,0,0,0,3\nlink=/dev/shm/x";
    let settings = Settings::parse(text).unwrap();
    assert_eq!((settings.rate, settings.high_limit), (1_000_000_000, None));
    assert_eq!(
        settings.low.last(),
        Some(&settings::Share { lane: 3, weight: 1 })
    );
    assert_eq!(settings.lanes[15], 3);
    assert_eq!(settings.link.unwrap().to_str(), Some("/dev/shm/x"));
    // Without a map the levels use the lanes of the tables in turn.
    let settings = Settings::parse("rate=100 Mbit/s;qos_vlarb_low=0:1,1:4").unwrap();
    assert_eq!(
        (settings.rate, settings.lanes[..3].to_vec()),
        (12_500_000, vec![0, 1, 0])
    );
}

#[test]
fn an_error_says_what_to_write() {
    for (text, parts) in [
        ("", "rate is missing: add rate=1Gbit/s"),
        ("rate=fast", "rate=fast: Gbit/s SDR"),
        ("rate=1bit/s", "Gbit/s"),
        ("rate=1kbit/s", "80kbit/s to"),
        ("rate", "'rate' has no value: NAME=VALUE qos_sl2vl"),
        (
            "rate=1Gbit/s;qos_max_vl=2",
            "'qos_max_vl' is no setting: qos_max_vls",
        ),
        ("rate=1Gbit/s;qos_max_vls=16", "1 to 15"),
        ("rate=1Gbit/s;qos_high_limit=256", "0 to 255"),
        (
            "rate=1Gbit/s;qos_vlarb_low=0:1,1",
            "'1' is no entry: LANE:WEIGHT",
        ),
        ("rate=1Gbit/s;qos_vlarb_low=15:1", "'15:1' 0 to 14"),
        ("rate=1Gbit/s;qos_vlarb_high=0:256", "'0:256' 0 to 255"),
        (
            "rate=1Gbit/s;qos_max_vls=2;qos_vlarb_low=2:1",
            "lane 2 increase qos_max_vls",
        ),
        (
            "rate=1Gbit/s;qos_max_vls=2;qos_vlarb_low=0:1",
            "lane 1 of service level 1 add 1:1 to qos_vlarb_low",
        ),
        ("rate=1Gbit/s;qos_sl2vl=0,1", "has 2 lanes: give 16"),
        (
            "rate=1Gbit/s;qos_sl2vl=1,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0",
            "level 0 lane 1 increase qos_max_vls",
        ),
        ("rate=1Gbit/s;link=here", "whole path"),
    ] {
        let error = Settings::parse(text).unwrap_err().to_string();
        for part in parts.split(": ") {
            for word in part.split(' ') {
                assert!(error.contains(word), "{text}: {word}: {error}");
            }
        }
    }
    let many = vec!["0:1"; 65].join(",");
    let error = Settings::parse(&format!("{RATE}qos_vlarb_low={many}")).unwrap_err();
    assert!(error.to_string().contains("at most 64"), "{error}");
}

#[test]
fn a_traffic_class_selects_a_level_by_its_upper_bits() {
    assert_eq!(
        [0, 0x1f, 0x20, 0xb8, 0xff].map(level_of_class),
        [0, 0, 1, 5, 7]
    );
}
