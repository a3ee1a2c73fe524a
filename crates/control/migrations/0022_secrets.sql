-- Secrets of accounts, encrypted with the key in `secrets.key` in the data folder.

CREATE TABLE secrets (
    account TEXT NOT NULL,
    name TEXT NOT NULL,
    -- Nonce and ciphertext, base64.
    sealed TEXT NOT NULL,
    updated_ms BIGINT NOT NULL,
    PRIMARY KEY (account, name)
);
