#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace bulkhead::worker::generation {

/// Which sequence has each slot, and which prompt's KV lies in it. A new prompt with the same
/// beginning reuses it.
///
/// Pure: it moves no data. A row is one position of `codebooks` tokens.
class Slots {
public:
    using Sequence = std::uint64_t;  ///< its number; 0: none

    Slots(std::uint32_t count, std::uint32_t codebooks) : slots_(count), codebooks_{codebooks} {}

    /// A new sequence's slot, and what it need not compute.
    struct Choice {
        std::uint32_t slot = 0;
        std::uint32_t keep = 0;                  ///< positions of the prompt in the slot, now or
                                                 ///< after the copy
        std::optional<std::uint32_t> copy_from;  ///< the slot whose first `keep` positions are to
                                                 ///< be copied there
    };
    /// Returns nothing if all slots are taken. Keeps at most `keep_max` positions: the last one of
    /// a prompt must be fed to give a token. Copies a prefix if its slot still needs it: a sequence
    /// runs there, or the slot holds far more than this prompt would keep. Overwrites the slot that
    /// was left longest ago.
    [[nodiscard]] std::optional<Choice> find(std::span<const std::int64_t> prompt, std::uint32_t keep_max) const;

    void take(std::uint32_t slot, Sequence sequence);
    /// Ends the slot's sequence. Its KV is now that of `tokens`.
    void leave(std::uint32_t slot, std::vector<std::int64_t> tokens);
    /// Sets the tokens of a running sequence that the next `find` may copy.
    void holds(std::uint32_t slot, std::span<const std::int64_t> tokens) { slots_[slot].running = tokens; }
    void exchange(std::uint32_t a, std::uint32_t b) { std::swap(slots_[a], slots_[b]); }

    [[nodiscard]] Sequence sequence_in(std::uint32_t slot) const { return slots_[slot].sequence; }
    [[nodiscard]] std::uint32_t count() const noexcept { return static_cast<std::uint32_t>(slots_.size()); }

private:
    struct Slot {
        Sequence sequence = 0;
        std::vector<std::int64_t> left;         ///< tokens of the last sequence's KV; empty
                                                ///< while one runs
        std::span<const std::int64_t> running;  ///< tokens of the running sequence's KV
        std::uint64_t left_at = 0;
    };
    [[nodiscard]] std::uint32_t common(const Slot& slot, std::span<const std::int64_t> prompt) const;

    std::vector<Slot> slots_;
    const std::uint32_t codebooks_;
    std::uint64_t leavings_ = 0;
};

}  // namespace bulkhead::worker::generation
