#include "worker/generation/slots.h"

#include <algorithm>

#include "worker/generation/request_limits.h"

namespace bulkhead::worker::generation {

std::uint32_t Slots::common(const Slot& slot, std::span<const std::int64_t> prompt) const {
    const std::span<const std::int64_t> held = slot.sequence == 0 ? std::span{slot.left} : slot.running;
    const auto differs = std::ranges::mismatch(held, prompt).in1;
    return static_cast<std::uint32_t>(differs - held.begin()) / codebooks_;
}

std::optional<Slots::Choice> Slots::find(std::span<const std::int64_t> prompt, std::uint32_t keep_max) const {
    std::optional<std::uint32_t> oldest;
    std::uint32_t source = 0;
    std::vector<std::uint32_t> keep(count());
    for (std::uint32_t i = 0; i < count(); ++i) {
        const bool is_free = slots_[i].sequence == 0;
        if (is_free && (!oldest || slots_[i].left_at < slots_[*oldest].left_at)) oldest = i;
        keep[i] = std::min(keep_max, common(slots_[i], prompt));
        const bool spares_a_copy = keep[i] == keep[source] && is_free && slots_[source].sequence != 0;
        if (keep[i] > keep[source] || spares_a_copy) source = i;
    }
    if (!oldest) return std::nullopt;
    if (keep[source] == 0) return Choice{*oldest, 0, {}};
    const Slot& from = slots_[source];
    const bool needs_it = from.sequence != 0 || 2 * keep[source] * codebooks_ < from.left.size();
    if (!needs_it || source == *oldest) return Choice{source, keep[source], {}};
    if (keep[source] >= keep[*oldest] + limits::copied_prefix_min) return Choice{*oldest, keep[source], source};
    return Choice{*oldest, keep[*oldest], {}};
}

void Slots::take(std::uint32_t slot, Sequence sequence) { slots_[slot] = {sequence, {}, {}, slots_[slot].left_at}; }

void Slots::leave(std::uint32_t slot, std::vector<std::int64_t> tokens) {
    slots_[slot] = {0, std::move(tokens), {}, ++leavings_};
}

}  // namespace bulkhead::worker::generation
