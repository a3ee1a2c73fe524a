-- What deleted sandboxes had used: a bill outlives what it is for. One row each, written before the deletion.

CREATE TABLE usage_of_deleted (
    sandbox_id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    deleted_ms BIGINT NOT NULL,
    awake_ms BIGINT NOT NULL,
    asleep_memory_ms BIGINT NOT NULL,
    asleep_disk_ms BIGINT NOT NULL,
    off_ms BIGINT NOT NULL,
    cpu_ms BIGINT NOT NULL,
    memory_mib_seconds BIGINT NOT NULL,
    state_mb_seconds BIGINT NOT NULL
);
