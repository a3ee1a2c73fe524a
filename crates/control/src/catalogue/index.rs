//! The catalogue's answers to every request, in memory: which id has this name, which key has this id.

use std::collections::HashMap;

use api::SandboxId;

/// One sandbox as the catalogue knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Its id, for ever.
    pub(crate) id: SandboxId,
    /// Its name, unique.
    pub(crate) name: String,
    /// What the catalogue is doing with it.
    pub(crate) state: State,
    /// Secret part of its URLs.
    pub(crate) link_key: String,
    /// Ownership count.
    pub(crate) epoch: i64,
    /// When it was asked for.
    pub(crate) created_ms: i64,
    /// Which face it belongs to: no other knows it.
    pub(crate) face: Face,
}

/// Which face a sandbox belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Face {
    /// `/v1/sandboxes`
    Sandbox,
    /// `/v1/boxes`
    Box,
}

impl Face {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Sandbox => "sandbox",
            Self::Box => "box",
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        [Self::Sandbox, Self::Box].into_iter().find(|face| face.as_str() == text)
    }
}

/// What the catalogue is doing with a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Written down; its host has not answered yet.
    Creating,
    /// Its host has it.
    Ready,
    /// Its host was told, or will be told, to remove it.
    Deleting,
}

impl State {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Ready => "ready",
            Self::Deleting => "deleting",
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        [Self::Creating, Self::Ready, Self::Deleting]
            .into_iter()
            .find(|state| state.as_str() == text)
    }
}

/// All entries, by id and by name.
#[derive(Default)]
pub(crate) struct Index {
    entries: HashMap<SandboxId, Entry>,
    names: HashMap<String, SandboxId>,
}

impl Index {
    pub(crate) fn by_id(&self, id: &SandboxId) -> Option<&Entry> {
        self.entries.get(id)
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<&Entry> {
        self.names.get(name).and_then(|id| self.entries.get(id))
    }

    /// Oldest first; of the same millisecond by id, so that pages do not overlap.
    pub(crate) fn all(&self) -> Vec<Entry> {
        let mut all: Vec<Entry> = self.entries.values().cloned().collect();
        all.sort_by(|a, b| (a.created_ms, &a.id).cmp(&(b.created_ms, &b.id)));
        all
    }

    pub(crate) fn insert(&mut self, entry: Entry) {
        self.names.insert(entry.name.clone(), entry.id.clone());
        self.entries.insert(entry.id.clone(), entry);
    }

    pub(crate) fn change(&mut self, id: &SandboxId, change: impl FnOnce(&mut Entry)) {
        if let Some(mut entry) = self.remove(id) {
            change(&mut entry);
            self.insert(entry);
        }
    }

    pub(crate) fn remove(&mut self, id: &SandboxId) -> Option<Entry> {
        let entry = self.entries.remove(id)?;
        self.names.remove(&entry.name);
        Some(entry)
    }
}
