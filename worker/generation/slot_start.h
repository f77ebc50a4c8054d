#pragma once

#include <cstdint>
#include <vector>

#include "ipc/base/error.h"
#include "worker/generation/engine.h"
#include "worker/generation/slot_state.h"

namespace bulkhead::worker::generation {

/// What a slot holds besides its KV, as it is when a sequence starts: made whole from the request, so that nothing of an
/// earlier sequence can be left in it.
struct SlotStart {
    SlotState state;
    std::vector<std::uint8_t> flags;   ///< [C, V] `TokenFlag`
    std::vector<std::int32_t> forced;  ///< [steps, C]
};

/// Errors  input_invalid: more forced steps than a slot holds
[[nodiscard]] Result<SlotStart> start_slot(const DrawRules& rules, const Start& start);

}  // namespace bulkhead::worker::generation
