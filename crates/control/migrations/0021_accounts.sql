-- Accounts, to which boxes belong, and whose keys the tokens are.

CREATE TABLE accounts (
    id TEXT PRIMARY KEY,
    -- free | pro | max; empty: none.
    plan TEXT NOT NULL,
    -- What is left, milliseconds of a box of size 1; -1: nothing is counted.
    credit_ms BIGINT NOT NULL,
    -- Ranges of addresses, as JSON; null: from anywhere.
    url_allow TEXT NOT NULL,
    created_ms BIGINT NOT NULL
);

ALTER TABLE tokens ADD COLUMN account TEXT NOT NULL DEFAULT 'default';
-- admin | boxes
ALTER TABLE tokens ADD COLUMN scope TEXT NOT NULL DEFAULT 'admin';
