//! What commands are called outside: short, and no two alike though every guest counts its own.
//!
//! A guest gives its commands numbers that go up, under a mark of its boot; guests that were copied from one template share that
//! mark, so that the first command of each has the same number. Names are these numbers, shuffled in a way that is the sandbox's
//! own and can be undone: nothing needs to be kept, and what was told once is understood by every later daemon.

use api::SandboxId;
use api::id::{ALPHABET, ID_CHARS};

use crate::guest::ExecId;

/// Bits of a name: [`ID_CHARS`] characters of five bits.
const BITS: u32 = 60;
/// Of these, how many are the guest's count; the others are the mark of its boot.
const COUNT_BITS: u32 = 28;
const MASK: u64 = (1 << BITS) - 1;
/// An odd number without a pattern (the golden ratio): multiplied by it the low bits reach the high ones.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// How often the bits are mixed. After two each depends on each.
const ROUNDS: u64 = 3;

/// How one sandbox calls its commands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExecNames {
    key: u64,
    /// That of the sandbox it is a fork of: who knew a command there finds it here.
    parent: Option<u64>,
}

impl ExecNames {
    /// Of a sandbox, and of what it is a fork of.
    pub(crate) fn of(id: &SandboxId, parent: Option<&SandboxId>) -> Self {
        Self { key: key(id), parent: parent.map(key) }
    }

    /// What a command is called.
    pub(crate) fn name(&self, ExecId(number): ExecId) -> String {
        let (mark, count) = (number >> 32, number & u64::from(u32::MAX));
        if count >> COUNT_BITS != 0 {
            // More commands in one boot than there are names.
            return format!("{number:016x}");
        }
        let shuffled = shuffle(mark << COUNT_BITS | count, self.key);
        let character = |place: usize| {
            let five = shuffled >> (5 * (ID_CHARS - 1 - place)) & 31;
            char::from(ALPHABET[usize::try_from(five).unwrap_or(0)])
        };
        (0..ID_CHARS).map(character).collect()
    }

    /// Which commands a name may mean, the likeliest first: it is as it was given, or as the sandbox gave it that this one is a
    /// fork of, or as it was given by earlier versions (16 hexadecimal digits).
    pub(crate) fn meant(&self, text: &str) -> Vec<ExecId> {
        if text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return u64::from_str_radix(text, 16).map(ExecId).into_iter().collect();
        }
        let Some(shuffled) = number(text) else { return Vec::new() };
        let keys = [Some(self.key), self.parent].into_iter().flatten();
        keys.map(|key| {
            let number = unshuffle(shuffled, key);
            ExecId((number >> COUNT_BITS) << 32 | number & ((1 << COUNT_BITS) - 1))
        })
        .collect()
    }

    /// The one command that a name means in a guest of this boot (`None`: not known).
    pub(crate) fn in_boot(&self, text: &str, boot: Option<[u8; 16]>) -> Option<ExecId> {
        let meant = self.meant(text);
        meant
            .iter()
            .copied()
            .find(|id| boot.is_some_and(|boot| is_of(*id, boot)))
            .or_else(|| meant.first().copied())
    }
}

/// Whether a command is of this boot of its guest.
pub(crate) fn is_of(ExecId(number): ExecId, [a, b, c, d, ..]: [u8; 16]) -> bool {
    number >> 32 == u64::from(u32::from_le_bytes([a, b, c, d]))
}

fn number(text: &str) -> Option<u64> {
    if text.len() != ID_CHARS {
        return None;
    }
    text.bytes().try_fold(0, |number, byte| {
        let five = ALPHABET.iter().position(|one| *one == byte)?;
        Some(number << 5 | five as u64)
    })
}

/// FNV-1a over the id: it need not be secret, only stay as it is.
fn key(id: &SandboxId) -> u64 {
    id.as_str().bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn shuffle(number: u64, key: u64) -> u64 {
    (0..ROUNDS).fold(number, |number, round| {
        let mixed = (number ^ round_key(key, round)).wrapping_mul(FACTOR) & MASK;
        // Undone by itself, since twice the shift is all the bits.
        mixed ^ mixed >> (BITS / 2)
    })
}

fn unshuffle(number: u64, key: u64) -> u64 {
    (0..ROUNDS).rev().fold(number, |number, round| {
        let mixed = number ^ number >> (BITS / 2);
        (mixed.wrapping_mul(inverse(FACTOR)) ^ round_key(key, round)) & MASK
    })
}

fn round_key(key: u64, round: u64) -> u64 {
    key.rotate_left(u32::try_from(round).unwrap_or(0) * 21) & MASK
}

/// The number that undoes a multiplication by an odd one, by Newton's method: each step doubles the bits that are right.
const fn inverse(odd: u64) -> u64 {
    let mut inverse = odd;
    let mut bits = 3;
    while bits < u64::BITS {
        inverse = inverse.wrapping_mul(2_u64.wrapping_sub(odd.wrapping_mul(inverse)));
        bits *= 2;
    }
    inverse
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn id(text: &str) -> SandboxId {
        text.parse().expect("an id")
    }

    #[test]
    fn a_name_is_short_means_one_command_and_is_another_in_each_sandbox() {
        let sandboxes = ["k3vq7mzt2abc", "k3vq7mzt2abd", "aaaaaaaaaaaa"]
            .map(|text| ExecNames::of(&id(text), None));
        let mut names = BTreeSet::new();
        for of in sandboxes {
            for mark in [0, 1, 0x8f3a_0012, u64::from(u32::MAX)] {
                for count in [1, 2, 3, 77, (1 << COUNT_BITS) - 1] {
                    let exec = ExecId(mark << 32 | count);
                    let name = of.name(exec);
                    assert_eq!(name.len(), ID_CHARS);
                    assert_eq!(of.meant(&name), [exec], "{name}");
                    assert!(names.insert(name), "given twice");
                }
            }
        }
        // It stays as it is: daemons of another version know it.
        assert_eq!(sandboxes[0].name(ExecId(0x8f3a_0012_0000_0001)), "hnkainteaodl");
    }

    #[test]
    fn names_of_earlier_versions_and_of_the_parent_are_understood_and_others_are_not() {
        let parent = ExecNames::of(&id("k3vq7mzt2abc"), None);
        let fork = ExecNames::of(&id("zzzzzzzzzzzz"), Some(&id("k3vq7mzt2abc")));
        let exec = ExecId(0x0403_0201_0000_0007);
        let boot = [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9];
        assert_eq!(fork.in_boot("0403020100000007", None), Some(exec));
        assert_eq!(fork.in_boot(&parent.name(exec), Some(boot)), Some(exec));
        assert_eq!(fork.in_boot(&fork.name(exec), Some(boot)), Some(exec));
        assert_eq!(fork.in_boot(&fork.name(exec), None), Some(exec));
        for no in [
            "",
            "1",
            "k3vq7mzt2ab",
            "k3vq7mzt2abcd",
            "K3VQ7MZT2ABC",
            "k3vq7mzt2ab1",
            "0403020100000g07",
        ] {
            assert_eq!(fork.meant(no), [], "{no}");
        }
        let far = ExecId(1 << 32 | 1 << COUNT_BITS);
        assert_eq!(parent.in_boot(&parent.name(far), None), Some(far), "by its number");
    }
}
