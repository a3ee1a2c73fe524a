-- How much of a box's time awake was paid for with its account's credit. A box without a row: nothing of it.

CREATE TABLE box_meters (
    box_id TEXT PRIMARY KEY,
    metered_ms BIGINT NOT NULL
);
