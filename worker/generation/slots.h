#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace bulkhead::worker::generation {

/// Whose sequence a slot has, and which prompt's KV lies in it: what a sequence left behind serves the next prompt that
/// begins the same way.
///
/// Pure: it moves nothing by itself. Rows are positions, each of `codebooks` tokens.
class Slots {
public:
    using Sequence = std::uint64_t;  ///< its number; 0 is none

    Slots(std::uint32_t count, std::uint32_t codebooks) : slots_(count), codebooks_{codebooks} {}

    /// Where a new sequence goes, and what it need not compute.
    struct Place {
        std::uint32_t slot = 0;
        std::uint32_t keep = 0;                  ///< positions of the prompt that the slot holds, or will after the copy
        std::optional<std::uint32_t> copy_from;  ///< the slot whose first `keep` positions are to be copied there
    };
    /// Nothing where all slots have a sequence. At most `keep_max` positions are kept: the last one of a prompt has to be
    /// fed to give a token. A prefix is copied where its slot still needs it: for the sequence that runs there, or because
    /// it holds far more than this prompt would leave of it. What is overwritten is what was left longest ago.
    [[nodiscard]] std::optional<Place> find(std::span<const std::int64_t> prompt, std::uint32_t keep_max) const;

    void take(std::uint32_t slot, Sequence sequence);
    /// The slot holds these tokens' KV now, and no sequence.
    void leave(std::uint32_t slot, std::vector<std::int64_t> tokens);
    /// Of a sequence that runs: what the next `find` may copy.
    void holds(std::uint32_t slot, std::span<const std::int64_t> tokens) { slots_[slot].running = tokens; }
    void exchange(std::uint32_t a, std::uint32_t b) { std::swap(slots_[a], slots_[b]); }

    [[nodiscard]] Sequence sequence_in(std::uint32_t slot) const { return slots_[slot].sequence; }
    [[nodiscard]] std::uint32_t count() const noexcept { return static_cast<std::uint32_t>(slots_.size()); }
    [[nodiscard]] std::uint32_t free() const;

private:
    struct Slot {
        Sequence sequence = 0;
        std::vector<std::int64_t> left;         ///< tokens whose KV it holds, by the last sequence; none while one runs
        std::span<const std::int64_t> running;  ///< the same of the one that runs
        std::uint64_t left_at = 0;
    };
    [[nodiscard]] std::uint32_t common(const Slot& slot, std::span<const std::int64_t> prompt) const;

    std::vector<Slot> slots_;
    const std::uint32_t codebooks_;
    std::uint64_t leavings_ = 0;
};

}  // namespace bulkhead::worker::generation
