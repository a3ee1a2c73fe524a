-- Settings of the project: one value each, as JSON.

CREATE TABLE project (
    setting TEXT PRIMARY KEY,
    value TEXT NOT NULL
);
