-- Boxes: sandboxes of the other face. What a box is beyond its sandbox stands in its record, as JSON; it outlives the sandbox.

ALTER TABLE sandboxes ADD COLUMN face TEXT NOT NULL DEFAULT 'sandbox';

CREATE TABLE boxes (
    id TEXT PRIMARY KEY,
    account TEXT NOT NULL,
    record TEXT NOT NULL,
    created_ms BIGINT NOT NULL,
    -- When it ended; 0: it has not.
    ended_ms BIGINT NOT NULL
);

-- Conversations that have given a sign of life.
CREATE TABLE agents (
    id TEXT PRIMARY KEY,
    client TEXT NOT NULL,
    heard_ms BIGINT NOT NULL,
    -- 1: it has said that it leaves.
    has_left BIGINT NOT NULL
);
