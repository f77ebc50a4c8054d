#pragma once

#include <cstdint>
#include <vector>

#include "ipc/base/error.h"
#include "worker/generation/engine.h"
#include "worker/generation/slot_state.h"

namespace bulkhead::worker::generation {

/// A slot's initial contents besides its KV. Built whole from the request, so that nothing of an
/// earlier sequence remains.
struct SlotStart {
    SlotState state;
    std::vector<std::uint8_t> flags;   ///< [C, V] `TokenFlag`
    std::vector<std::int32_t> forced;  ///< [steps, C]
};

/// Builds the start of a slot. Errors  input_invalid: more forced steps than a slot holds
[[nodiscard]] Result<SlotStart> start_slot(const DrawRules& rules, const Start& start);

}  // namespace bulkhead::worker::generation
