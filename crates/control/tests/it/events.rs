//! Timelines as pages and as streams, and explanations.

use bytes::Bytes;
use http_body_util::Full;

use crate::client::{Sse, World};

async fn stream(world: &World, path: &str, headers: &[(&str, &str)]) -> Sse {
    let mut request = world.request("GET", path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    Sse::new(world.open(request.body(Full::new(Bytes::new())).unwrap()).await)
}

#[tokio::test]
async fn pages_follow_one_another() {
    let world = World::new().await;
    let web = world.sandbox("web").await;
    world.fake.say(&web.id, "sandbox.updated", "third");
    let page = async |query: &str| {
        let page = world.call("GET", &format!("/v1/sandboxes/web/events{query}"), "").await.value();
        let seqs: Vec<u64> = page["events"]
            .as_array()
            .unwrap()
            .iter()
            .map(|event| event["seq"].as_u64().unwrap())
            .collect();
        (seqs, page["next_after"].as_u64().unwrap())
    };
    assert_eq!(page("").await, (vec![1, 2, 3], 3));
    assert_eq!(page("?limit=2").await, (vec![1, 2], 2));
    assert_eq!(page("?after=2").await, (vec![3], 3));
    assert_eq!(page("?after=3").await, (vec![], 3));
}

#[tokio::test]
async fn a_stream_tells_the_past_then_the_present_and_ends_with_the_sandbox() {
    let world = World::new().await;
    let web = world.sandbox("web").await;
    let mut events =
        stream(&world, "/v1/sandboxes/web/events", &[("accept", "text/event-stream")]).await;
    assert_eq!(events.next().await.unwrap().0, "1");
    assert_eq!(events.next().await.unwrap().1.kind, "sandbox.running");
    world.fake.say(&web.id, "sandbox.updated", "now");
    let (id, event) = events.next().await.unwrap();
    assert_eq!((id.as_str(), event.text.as_str()), ("3", "now"));
    world.call("DELETE", "/v1/sandboxes/web", "").await;
    assert_eq!(events.next().await.unwrap().1.kind, "sandbox.deleted");
    assert!(events.next().await.is_none());
}

#[tokio::test]
async fn a_cut_stream_goes_on_after_the_last_event_received() {
    let world = World::new().await;
    let web = world.sandbox("web").await;
    let mut events = stream(&world, "/v1/sandboxes/web/events?stream=true", &[]).await;
    events.next().await.unwrap();
    let (last, _) = events.next().await.unwrap();
    drop(events);
    // Missed meanwhile, and more than the host's channel holds.
    for number in 0..40 {
        world.fake.say(&web.id, "sandbox.updated", &number.to_string());
    }
    let mut events =
        stream(&world, "/v1/sandboxes/web/events?stream=true", &[("last-event-id", &last)]).await;
    for number in 0..40 {
        assert_eq!(events.next().await.unwrap().1.text, number.to_string());
    }
    let bad =
        world.request("GET", "/v1/sandboxes/web/events?stream=true").header("last-event-id", "x");
    let bad = world.send(bad.body(Full::new(Bytes::new())).unwrap()).await.error();
    assert_eq!(bad, "400 invalid_request Last-Event-ID: not the id of an event of this stream");
}

/// A burst larger than the host's channel while the client does not read: the gap is read again.
#[tokio::test]
async fn a_slow_reader_misses_nothing() {
    let world = World::new().await;
    let web = world.sandbox("web").await;
    let mut events = stream(&world, "/v1/sandboxes/web/events?stream=true", &[]).await;
    events.next().await.unwrap();
    events.next().await.unwrap();
    for number in 0..3000 {
        world.fake.say(&web.id, "sandbox.updated", &number.to_string());
    }
    for number in 0..3000 {
        assert_eq!(events.next().await.unwrap().1.text, number.to_string());
    }
}

#[tokio::test]
async fn all_timelines_at_once_and_on_from_a_cut() {
    let world = World::new().await;
    let mut events = stream(&world, "/v1/events", &[]).await;
    let (web, api) = (world.sandbox("web").await, world.sandbox("api").await);
    let mut told = Vec::new();
    for _ in 0..4 {
        told.push(events.next().await.unwrap());
    }
    let seen: Vec<_> = told.iter().map(|(_, event)| (&event.sandbox_id, event.seq)).collect();
    assert_eq!(seen, [(&web.id, 1), (&web.id, 2), (&api.id, 1), (&api.id, 2)]);
    drop(events);
    world.fake.say(&web.id, "sandbox.updated", "missed");
    let after = &told[1].0;
    let path = format!("/v1/events?after={after}");
    for (path, header) in [("/v1/events", Some(after.as_str())), (path.as_str(), None)] {
        let header: Vec<_> = header.into_iter().map(|id| ("last-event-id", id)).collect();
        let mut events = stream(&world, path, &header).await;
        let mut seen = Vec::new();
        for _ in 0..3 {
            let (_, event) = events.next().await.unwrap();
            seen.push((event.sandbox_id, event.seq));
        }
        assert_eq!(seen, [(api.id.clone(), 1), (api.id.clone(), 2), (web.id.clone(), 3)]);
    }
    let bad = world.call("GET", "/v1/events?after=7", "").await.error();
    assert_eq!(bad, "400 invalid_request after: not the id of an event of this stream");
}

/// Nothing is skipped in silence: what the journal does not have any more, or never had, is said to be missing.
#[tokio::test]
async fn what_a_stream_of_all_has_lost_is_told_in_its_place() {
    let mut world = World::new().await;
    let web = world.sandbox("web").await;
    let mut events = stream(&world, "/v1/events", &[]).await;
    // More at once than the host's channel holds: the journal itself has a gap.
    for number in 0..1000 {
        world.fake.say(&web.id, "sandbox.updated", &number.to_string());
    }
    let (mut seen, mut missing, mut last) = (0, 0, String::new());
    while seen + missing < 1000 {
        let (id, kind, data) = events.next_raw().await.unwrap();
        match kind.as_str() {
            "events.lost" => missing += data["missing"].as_u64().unwrap(),
            "sandbox.updated" => seen += 1,
            // Of its making.
            _ => {}
        }
        last = id;
    }
    assert!(missing > 0, "the fake's channel took a thousand events");
    assert_eq!(seen + missing, 1000);
    drop(events);

    world.restart().await;
    // An id of an earlier version does not say since when something is lacking.
    let (earlier, _) = last.rsplit_once('-').unwrap();
    let mut events = stream(&world, "/v1/events", &[("last-event-id", earlier)]).await;
    let (id, kind, data) = events.next_raw().await.unwrap();
    assert_eq!((kind.as_str(), &data["missing"]), ("events.lost", &serde_json::Value::Null));
    drop(events);
    // And from there it goes on.
    let mut events = stream(&world, "/v1/events", &[("last-event-id", &id)]).await;
    world.fake.say(&web.id, "sandbox.updated", "new");
    assert_eq!(events.next().await.unwrap().1.text, "new");
}

/// Across a restart of the daemon a stream of all goes on from the timelines.
#[tokio::test]
async fn after_a_restart_a_stream_of_all_goes_on_and_nothing_is_told_twice_but_what_is_of_the_same_moment()
 {
    let mut world = World::new().await;
    let web = world.sandbox("web").await;
    let mut events = stream(&world, "/v1/events", &[]).await;
    world.fake.say(&web.id, "sandbox.updated", "one");
    let (last, one) = events.next().await.unwrap();
    assert_eq!(one.text, "one");
    drop(events);
    world.fake.say(&web.id, "sandbox.updated", "two");
    world.restart().await;
    let db = world.sandbox("db").await;
    let mut events = stream(&world, "/v1/events", &[("last-event-id", &last)]).await;
    world.fake.say(&web.id, "sandbox.updated", "three");
    // All of the fake's events are of one moment: it begins with those before.
    let mut told = Vec::new();
    let mut resume = String::new();
    while told.last().is_none_or(|(_, text): &(_, String)| text != "three") {
        let (id, event) = events.next().await.unwrap();
        if event.text == "two" {
            resume.clone_from(&id);
        }
        told.push((event.sandbox_id, event.text));
    }
    for text in ["one", "two", "three"] {
        let times = told.iter().filter(|(id, told)| *id == web.id && told == text).count();
        assert_eq!(times, 1, "{text}: {told:?}");
    }
    assert!(told.iter().any(|(id, _)| *id == db.id), "{told:?}");
    // An id from there is good for the next cut.
    drop(events);
    let mut events = stream(&world, "/v1/events", &[("last-event-id", &resume)]).await;
    while events.next().await.unwrap().1.text != "three" {}
}

/// A client that comes with a time that is still to come tells that the clock was set back: by times nothing is found then.
#[tokio::test]
async fn after_a_restart_with_the_clock_set_back_a_stream_says_that_something_is_missing() {
    let mut world = World::new().await;
    let web = world.sandbox("web").await;
    let mut events = stream(&world, "/v1/events", &[]).await;
    world.fake.say(&web.id, "sandbox.updated", "one");
    let (last, _) = events.next().await.unwrap();
    drop(events);
    let (place, _) = last.rsplit_once('-').unwrap();
    let tomorrow = jiff::Timestamp::now().as_millisecond() + 86_400_000;
    let last = format!("{place}-{tomorrow}");
    world.fake.say(&web.id, "sandbox.updated", "two");
    world.restart().await;
    let mut events = stream(&world, "/v1/events", &[("last-event-id", &last)]).await;
    let (_, kind, data) = events.next_raw().await.unwrap();
    assert_eq!((kind.as_str(), &data["missing"]), ("events.lost", &serde_json::Value::Null));
    world.fake.say(&web.id, "sandbox.updated", "three");
    assert_eq!(events.next().await.unwrap().1.text, "three");
}

/// A timeline keeps its newest entries only.
#[tokio::test]
async fn entries_that_are_not_kept_any_more_are_told_to_be_missing() {
    let world = World::new().await;
    let web = world.sandbox("web").await;
    for number in 3..=10 {
        world.fake.say(&web.id, "sandbox.updated", &number.to_string());
    }
    world.fake.forget(&web.id, 6);
    let mut events = stream(&world, "/v1/sandboxes/web/events?stream=true&after=2", &[]).await;
    let (id, lost) = events.next().await.unwrap();
    assert_eq!((id.as_str(), lost.kind.as_str()), ("6", "events.lost"));
    assert_eq!(lost.data["missing"], 4);
    for seq in 7..=10 {
        assert_eq!(events.next().await.unwrap().1.seq, seq);
    }
}

#[tokio::test]
async fn s01_why_explains_in_every_status() {
    let world = World::new().await;
    let web = world.sandbox("web").await;
    let why = async || world.call("GET", "/v1/sandboxes/web/why", "").await.value();
    let awake = why().await;
    assert_eq!(
        awake["summary"],
        "`web` is awake since 2026-11-30T10:15:30.123Z: something ran in it; if nothing changes it sleeps at \
         2026-11-30T10:15:30.123Z"
    );
    world.call("POST", "/v1/sandboxes/web/sleep", r#"{"tier": "disk"}"#).await;
    assert_eq!(
        why().await["summary"],
        "`web` sleeps on disk since 2026-11-30T10:15:30.123Z; anything that needs it wakes it, at the latest a timer \
         of its own at 2026-11-30T10:15:30.123Z"
    );
    world.call("POST", "/v1/sandboxes/web/execs", r#"{"command": "true"}"#).await;
    for _ in 0..1100 {
        world.fake.say(&web.id, "sandbox.updated", "again");
    }
    let long = why().await;
    assert_eq!((&long["sleeps"], &long["wakes"]), (&1.into(), &1.into()));
    assert_eq!(long["timeline"].as_array().unwrap().len(), 100);
    assert_eq!(long["timeline"][99]["seq"], 1104);
}
