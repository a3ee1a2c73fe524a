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
async fn all_timelines_at_once() {
    let world = World::new().await;
    let mut events = stream(&world, "/v1/events", &[]).await;
    let (web, api) = (world.sandbox("web").await, world.sandbox("api").await);
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(events.next().await.unwrap().0);
    }
    let want = [
        format!("{}/1", web.id),
        format!("{}/2", web.id),
        format!("{}/1", api.id),
        format!("{}/2", api.id),
    ];
    assert_eq!(ids, want);
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
        "`web` sleeps on disk since 2026-11-30T10:15:30.123Z; anything that needs it wakes it"
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
