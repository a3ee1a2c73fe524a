//! A store in a bucket that is reached by the S3 protocol: its address, what the environment says about it, and its limits.
//!
//! Endpoint, region and credentials come from the environment variables that other programs read too (`AWS_…`), never from the
//! address: an address is logged.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut};
use object_store::client::{ClientConfigKey, HttpError, HttpErrorKind};
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};

use super::StoreError;
use super::store::StoreUrlError;

/// How long a connection to the store may take to come about.
const CONNECT_MAX: Duration = Duration::from_secs(4);

/// How long one attempt may take, its bytes included. Shorter than what an operation has, so that a second one fits.
const ATTEMPT_MAX: Duration = Duration::from_secs(12);

/// How often a failed attempt is made again: the next checkpoint tries again anyway.
const RETRIES_MAX: usize = 3;

/// From when on no attempt is begun any more, counted from the first one.
const RETRIES_FOR: Duration = Duration::from_secs(8);

/// How long it waits before the first retry; it doubles.
const PAUSE_FIRST: Duration = Duration::from_millis(100);

/// The longest it waits before a retry.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Most characters of a store's own word on what is wrong.
const REASON_MAX: usize = 200;

/// Where in which bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    name: String,
    prefix: String,
}

impl Bucket {
    /// From what stands behind `s3://`; `None`: that names no bucket.
    pub(super) fn parse(address: &str) -> Option<Self> {
        let (name, prefix) = address.split_once('/').unwrap_or((address, ""));
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        let is_label = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        // S3's own rule. Anything else would end up in the host's name or path of a request.
        let is_name = (3..=63).contains(&name.len())
            && name.bytes().all(|byte| is_label(byte) || byte == b'-' || byte == b'.')
            && [name.bytes().next(), name.bytes().last()].into_iter().flatten().all(is_label);
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let is_segment =
            |segment: &str| !matches!(segment, "" | "." | "..") && segment.bytes().all(is_plain);
        let is_prefix = prefix.is_empty() || prefix.split('/').all(is_segment);
        (is_name && is_prefix).then(|| Self { name: name.to_owned(), prefix: prefix.to_owned() })
    }

    /// A client for it with what the environment says. Nothing is asked yet.
    pub(super) fn open(&self) -> Result<Arc<dyn ObjectStore>, StoreUrlError> {
        self.open_with(AmazonS3Builder::from_env())
    }

    /// As [`open`](Self::open), with these settings.
    pub(super) fn open_with(
        &self,
        settings: AmazonS3Builder,
    ) -> Result<Arc<dyn ObjectStore>, StoreUrlError> {
        let set = |key| settings.get_config_value(&key);
        let endpoint = set(AmazonS3ConfigKey::S3Endpoint).or(set(AmazonS3ConfigKey::Endpoint));
        let allow_http = set(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp));
        let allow_http = allow_http.is_some_and(|word| matches!(word.as_str(), "true" | "1"));
        if let Some(endpoint) = endpoint {
            let in_clear = endpoint.starts_with("http://");
            if !in_clear && !endpoint.starts_with("https://") {
                let text = "AWS_ENDPOINT_URL must begin with `https://` (or `http://`)";
                return Err(StoreUrlError::Environment(text.to_owned()));
            }
            if in_clear && !allow_http {
                let text = "AWS_ENDPOINT_URL is `http://`, and everything would go in clear: \
                            `https://`, or AWS_ALLOW_HTTP=true";
                return Err(StoreUrlError::Environment(text.to_owned()));
            }
        }
        let retry = RetryConfig {
            backoff: BackoffConfig {
                init_backoff: PAUSE_FIRST,
                max_backoff: PAUSE_MAX,
                ..BackoffConfig::default()
            },
            max_retries: RETRIES_MAX,
            retry_timeout: RETRIES_FOR,
        };
        let client = ClientOptions::new()
            .with_allow_http(allow_http)
            .with_connect_timeout(CONNECT_MAX)
            .with_timeout(ATTEMPT_MAX);
        let opened = settings
            .with_bucket_name(&self.name)
            .with_client_options(client)
            .with_retry(retry)
            // Who owns a sandbox rests on it.
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            // Not every store knows how to delete many at once, and here it is one each time.
            .with_disable_bulk_delete(true)
            .build()
            .map_err(|error| StoreUrlError::Environment(reason(&error)))?;
        Ok(if self.prefix.is_empty() {
            Arc::new(opened)
        } else {
            Arc::new(PrefixStore::new(opened, Path::from(self.prefix.as_str())))
        })
    }
}

/// What an error of a bucket means, where more is known of it than that something failed.
pub(super) fn explained(error: &object_store::Error) -> Option<StoreError> {
    match error {
        object_store::Error::PermissionDenied { .. }
        | object_store::Error::Unauthenticated { .. } => {
            return Some(StoreError::Denied(reason(error)));
        }
        _ => {}
    }
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = next {
        if let Some(cause) = cause.downcast_ref::<HttpError>() {
            return Some(match cause.kind() {
                HttpErrorKind::Timeout => StoreError::Silent,
                _ => StoreError::Unreachable(reason(error)),
            });
        }
        next = cause.source();
    }
    // The store has answered, and says so in its own words.
    error.to_string().contains("<Code>").then(|| StoreError::Failed(reason(error)))
}

/// Why, in short: the store's own code if it has given one, else the innermost cause. Addresses stay out of it.
fn reason(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    let mut code = None;
    loop {
        let text = innermost.to_string();
        if let Some((_, rest)) = text.split_once("<Code>") {
            code = rest.split_once("</Code>").map(|(code, _)| code.to_owned());
        }
        match innermost.source() {
            Some(source) => innermost = source,
            None => break,
        }
    }
    code.unwrap_or_else(|| innermost.to_string()).chars().take(REASON_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_named_with_or_without_a_folder_in_it() {
        let bucket = |name: &str, prefix: &str| {
            Some(Bucket { name: name.to_owned(), prefix: prefix.to_owned() })
        };
        assert_eq!(Bucket::parse("checkpoints"), bucket("checkpoints", ""));
        assert_eq!(Bucket::parse("my.check-points/"), bucket("my.check-points", ""));
        assert_eq!(Bucket::parse("abc/eu/one/"), bucket("abc", "eu/one"));
        for wrong in
            ["", "ab", "Bucket", "a_b", "-abc", "abc.", "abc//x", "abc/../x", "abc/x y", "k:s@abc"]
        {
            assert_eq!(Bucket::parse(wrong), None, "{wrong}");
        }
        assert_eq!(Bucket::parse(&"a".repeat(64)), None);
    }

    #[test]
    fn what_the_environment_gets_wrong_is_named() {
        let bucket = Bucket::parse("checkpoints").expect("a bucket");
        let told = |settings: AmazonS3Builder| match bucket.open_with(settings) {
            Err(StoreUrlError::Environment(text)) => text,
            other => panic!("{other:?}"),
        };
        let keys =
            || AmazonS3Builder::new().with_access_key_id("key").with_secret_access_key("secret");
        let told_http = told(keys().with_endpoint("http://127.0.0.1:9000"));
        assert!(told_http.contains("AWS_ALLOW_HTTP"), "{told_http}");
        let told_scheme = told(keys().with_endpoint("127.0.0.1:9000"));
        assert!(told_scheme.contains("AWS_ENDPOINT_URL"), "{told_scheme}");
        let half = told(AmazonS3Builder::new().with_access_key_id("key"));
        assert!(half.to_lowercase().contains("secret"), "{half}");
        let in_clear = keys().with_endpoint("http://127.0.0.1:9000").with_allow_http(true);
        bucket.open_with(in_clear).expect("asked for");
        bucket.open_with(keys()).expect("the default endpoint");
    }
}
