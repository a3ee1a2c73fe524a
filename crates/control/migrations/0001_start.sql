-- The catalogue: who owns which sandbox, who may ask, and what was already answered.
-- One text for SQLite and PostgreSQL: only TEXT and BIGINT; times are milliseconds since 1970; JSON is TEXT.

CREATE TABLE hosts (
    id TEXT PRIMARY KEY,
    -- Goes up each time a host of this name takes ownership anew.
    epoch BIGINT NOT NULL,
    -- Until when the host owns its sandboxes without saying so again; 0: no lease is needed (one machine).
    lease_until_ms BIGINT NOT NULL,
    created_ms BIGINT NOT NULL
);

CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    host TEXT NOT NULL,
    -- Goes up at each change of owner; a host refuses orders with an older one.
    epoch BIGINT NOT NULL,
    -- creating | ready | deleting
    state TEXT NOT NULL,
    link_key TEXT NOT NULL,
    -- What was asked for.
    spec TEXT NOT NULL,
    created_ms BIGINT NOT NULL
);

CREATE TABLE tokens (
    id TEXT PRIMARY KEY,
    -- SHA-256 in hex of 256 random bits: nothing to guess, so no slow hash is needed.
    hash TEXT NOT NULL UNIQUE,
    label TEXT NOT NULL,
    created_ms BIGINT NOT NULL
);

CREATE TABLE idempotency (
    key TEXT PRIMARY KEY,
    -- SHA-256 in hex of the request.
    request_hash TEXT NOT NULL,
    sandbox_id TEXT NOT NULL,
    -- The answer; empty while it is being worked on.
    answer TEXT NOT NULL,
    created_ms BIGINT NOT NULL
);

CREATE INDEX idempotency_created ON idempotency (created_ms);
